"""What goes wrong in Rote never stops a step that runs without it.

The call gives eager's result, before and after the fault, with a warning at most.
"""

import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import training
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over, rote_capture
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="eager has no plans")


def trained(capture: Capture, between: Callable[[int], None], **options: Any) -> Calls:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = capture(training(model, optimizer), state={"model": model, "optimizer": optimizer}, **options)
    for i in range(12):
        between(i)
        yield step(torch.ones(2 + i // 6, 4))
    return {"model": model, "optimizer": optimizer}


def check_faulty(fault: Callable[[int], None], replays: int = 0, **options: Any) -> Any:
    """The fault is made before each call of the captured step alone."""

    def script(capture: Capture) -> Calls:
        return trained(capture, fault, **options)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = check_right(script)
    messages = [str(each.message) for each in caught if "rote" in str(each.message)]
    assert len(messages) == len(set(messages)), messages
    assert found.steps[0].stats.replays >= replays, (found.steps[0].stats, messages)
    return messages


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    messages = check_faulty(lambda i: None, 6, plans=tmp_path / "file" / "plans")
    assert any("temporary directory" in message for message in messages), messages


def test_a_store_that_is_deleted_while_it_is_used(tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    check_faulty(lambda i: shutil.rmtree(plans, ignore_errors=True), 6, plans=plans)


def test_a_store_that_is_a_file_from_then_on(tmp_path: Path) -> None:
    plans = tmp_path / "plans"

    def fault(call: int) -> None:
        if call == 1:
            shutil.rmtree(plans, ignore_errors=True)
            plans.write_text("in the way")

    check_faulty(fault, 6, plans=plans)


@pytest.mark.parametrize("how", ["truncate", "empty", "garbage", "directory"])
@pytest.mark.parametrize("trust", [False, True])
def test_damaged_plans(how: str, trust: bool, tmp_path: Path) -> None:
    plans = tmp_path / "plans"
    check_faulty(lambda i: None, 6, plans=plans)
    for file in plans.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            file.unlink()
            if how == "directory":
                file.mkdir()
            else:
                file.write_bytes({"truncate": content[: len(content) // 2], "empty": b"", "garbage": b"x" * 99}[how])
    check_faulty(lambda i: None, 6, plans=plans, trust_plans=trust)


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file may grow: writing a plan fails, which is replayed from memory then."""
    import resource
    import signal

    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        check_faulty(lambda i: None, 6, plans=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_bridge_that_cannot_be_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from rote import _bridge

    def no_bridge() -> None:
        raise RuntimeError("rote: no C++ compiler was found")

    monkeypatch.setattr(_bridge, "bridge", no_bridge)
    step = rote_capture(lambda x: x * 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(step(torch.ones(2)), torch.full((2,), 2.0))
    assert ["compiler" in str(each.message) for each in caught] == [True]


FAILING = {
    "describing a tensor": ("_reach", "short_text"),
    "walking over what is in reach": ("_reach", "Reach"),
    "watching hyperparameters": ("_uses", "watched"),
    "encoding the result": ("_results", "encode"),
    "describing the result": ("_results", "to_json"),
    "counting survivors": ("_record", "survivors"),
    "finding the line": ("_record", "is_users_own"),
    "making a traced float": ("_floats", "_make"),
}


@pytest.mark.parametrize("where", FAILING)
@pytest.mark.parametrize("strict", [False, True])
def test_a_fault_of_our_own(where: str, strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any part of a recording raises, at the third call and after."""
    import rote

    module, name = FAILING[where]
    owner = getattr(rote, module)
    original = getattr(owner, name)
    broken: list[bool] = []

    def failing(*args: Any, **kwargs: Any) -> Any:
        if broken:
            raise ZeroDivisionError("planted")
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, failing)
    weight = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.1)
    calls: list[int] = []

    def train_step(x: Tensor) -> Tensor:
        calls.append(1) if False else None
        loss = weight(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    step = rote_capture(train_step, state={"m": weight, "o": optimizer}, strict=strict, tail=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for i in range(8):
            if i == 4:
                broken.append(True)
            try:
                step(torch.ones(2 + i, 4) if i > 4 else torch.ones(2, 4))
            except rote.RecordingRefused as refused:
                assert strict and "planted" in str(refused)
    assert strict or len({str(each.message) for each in caught}) == len(caught) <= 3, [str(c.message) for c in caught]
    assert strict or caught, "nothing was planted"


NAMES = ["new\nline", "nul\0", "quote'\"", "Ünïcode", "emoji \U0001f600", "lone \udc80", "", "a.b", "args[0]"]


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_odd_names(name: str) -> None:
    """Of the state, of arguments, of entries and attributes."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        models = {name: nn.Linear(4, 4), name + "\0": nn.Linear(4, 4), name + "\1": nn.Linear(4, 4)}
        for model in models.values():
            setattr(model, "x" + name, 2.0)
        parameters = [p for model in models.values() for p in model.parameters()]
        optimizer = torch.optim.SGD([{"params": parameters, name: 0.5}], lr=0.1, momentum=0.5)

        def train_step(x: Tensor, **more: Any) -> Any:
            loss = sum(model(x).square().mean() * more[name] for model in models.values())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return {name: loss.detach()}

        train_step.__qualname__ = name
        step = capture(train_step, state={**models, "o" + name: optimizer})
        for i in range(10):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + i)
            yield step(torch.ones(2, 4), **{name: 0.5})
        return {"models": list(models.values())}

    found = check_right(script)
    # A result with text that is no Unicode has no place in a plan.
    assert found.steps[0].stats.replays >= 4 or "\udc80" in name, found.steps[0].stats


def test_parameters_of_one_name_in_two_modules() -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        a, b = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*a.parameters(), *b.parameters()], lr=0.1, momentum=0.9)

        def train_step(x: Tensor) -> Tensor:
            loss = b(a(x)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return over(
            capture,
            train_step,
            (torch.ones(2, 4) for _ in range(8)),
            state={"a": a, "b": b, "o": optimizer},
            strict=True,
        )

    assert check_right(script).steps[0].stats.replays >= 4


def test_paths_that_are_alike() -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        one, two, three = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        first = torch.optim.SGD(one.parameters(), lr=0.1)
        second = torch.optim.SGD([*two.parameters(), *three.parameters()], lr=0.1, momentum=0.5)

        def train_step(x: Tensor) -> Tensor:
            loss = three(two(one(x))).square().mean()
            loss.backward()
            first.step()
            second.step()
            return loss.detach()

        state = {1: one, "1": two, "x": {"y": three}, "x.y": [first, second], 2: first, "2": second}
        step = capture(train_step, state=state)
        for i in range(12):
            first.param_groups[0]["lr"] = 0.1 / (1 + i)
            second.param_groups[0]["lr"] = 0.2 / (1 + i)
            yield step(torch.ones(2, 4))
        return {"one": one, "two": two, "three": three}

    assert check_right(script).steps[0].stats.replays >= 4


class Unfriendly:
    """Has no hash, no text and no equality."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise ValueError("no text")

    def __eq__(self, other: object) -> bool:
        raise ValueError("no equality")

    def __len__(self) -> int:
        raise ValueError("no length")

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"no {name}")


class UnfriendlyText(str):
    def __eq__(self, other: object) -> bool:
        raise ValueError("no equality")

    __hash__ = str.__hash__


class UnfriendlyDict(dict[str, Any]):
    def items(self) -> Any:
        raise ValueError("no items")

    def __iter__(self) -> Any:
        raise ValueError("no iteration")

    def __len__(self) -> int:
        raise ValueError("no length")


UNFRIENDLY: dict[str, Callable[[], Any]] = {
    "object": Unfriendly,
    "text": lambda: UnfriendlyText("x"),
    "dict": lambda: UnfriendlyDict(a=1),
    "tuple": lambda: (Unfriendly(), 1),
    "huge": lambda: 10**5000,
    "surrogate": lambda: "\udc80",
    "nan": lambda: float("nan"),
    "module": lambda: sys,
    "self": lambda: (lambda held: (held.append(held), held)[1])([]),
}


@pytest.mark.parametrize("kind", UNFRIENDLY)
@pytest.mark.parametrize("place", ["argument", "closure", "attribute", "group"])
@pytest.mark.filterwarnings("ignore:rote")
def test_unfriendly_objects(kind: str, place: str) -> None:
    if kind == "self" and place == "argument":
        pytest.skip("eager's oracle cannot hold it")
    value = UNFRIENDLY[kind]()

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if place == "attribute":
            model.held = value
        if place == "group":
            optimizer.param_groups[0]["held"] = value

        def train_step(x: Tensor, *more: Any) -> Tensor:
            held = value if place == "closure" else None
            loss = model(x).square().mean() * (2 if held is None else 3)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = capture(train_step, state={"model": model, "optimizer": optimizer})
        for _ in range(6):
            yield step(torch.ones(2, 4), *([value] if place == "argument" else []))
        return {"model": model}

    check_right(script)


def test_the_working_directory_goes_away(tmp_path: Path) -> None:
    here = Path.cwd()
    (tmp_path / "here").mkdir()
    os.chdir(tmp_path / "here")
    try:
        shutil.rmtree(tmp_path / "here")
        check_faulty(lambda i: None, 6, plans="plans")
    finally:
        os.chdir(here)
