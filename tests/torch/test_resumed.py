"""The second recording of a step takes over what the first one has found in reach, while all of it holds."""

import gc
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from models import training
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over
from rote import _survey
from torch import nn

CALLS = 8


class Settings:
    scale = 1.0

    def __init__(self) -> None:
        self.scale = 2.0
        self.others: list[float] = []


def surveys(script: Callable[[Capture], Calls]) -> tuple[int, Any]:
    """How often all that is in reach was looked at, and the counters at the end. The script equals eager."""
    made = _survey.Survey.make
    with mock.patch.object(_survey.Survey, "make", autospec=True, side_effect=made) as make:
        found = check_right(script)
    return make.call_count, None if ORACLE_ONLY else found.stats[-1][0]


def x_of(call: int) -> torch.Tensor:
    return torch.arange(4.0) + call


@pytest.mark.skipif(ORACLE_ONLY, reason="counts what is looked at")
def test_what_is_in_reach_is_looked_at_once() -> None:
    def script(capture: Capture) -> Calls:
        settings, model = Settings(), nn.Linear(4, 4)
        return over(
            capture, lambda x: model(x).detach() * settings.scale, ((x_of(call),) for call in range(CALLS)), state=model
        )

    check_right(script)  # which imports what the first recording of a process does
    looked, stats = surveys(script)
    assert looked == 1
    assert (stats.recordings, stats.replays) == (1, CALLS - 2)


@pytest.mark.parametrize("at", [1, 2])
def test_a_value_that_changes_between_recordings(at: int) -> None:
    def script(capture: Capture) -> Calls:
        settings = Settings()
        step = capture(lambda x: x * settings.scale + len(settings.others))
        for call in range(CALLS):
            if call == at:
                settings.scale = 3.0
            yield step(x_of(call))
        return {}

    _, stats = surveys(script)
    assert ORACLE_ONLY or stats.replays >= CALLS - 5


def test_an_argument_with_other_attributes() -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * x.scale)
        for call in range(CALLS):
            x = x_of(call)
            x.scale = 1.0 + call // 2  # type: ignore[attr-defined]
            yield step(x)
        return {}

    surveys(script)


def test_an_argument_that_is_an_object() -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x, settings: x * settings.scale)
        first, second = Settings(), Settings()
        second.scale = 5.0
        for call in range(2 * CALLS):
            first.scale = 2.0 if call < CALLS else 7.0
            yield step(x_of(call), second if call % 3 == 1 else first)
        return {}

    surveys(script)


def test_another_branch_in_the_second_recording() -> None:
    """A step that asks for data: guards hold, and the second recording goes the other way."""

    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 1)

        def train(x: torch.Tensor) -> torch.Tensor:
            if (x > 2).all():
                return model(x).sum() * 2
            return model(x).mean()

        return over(
            capture, lambda x: train(x).detach(), ((x_of(call % 2 * 10),) for call in range(3 * CALLS)), state=model
        )

    _, stats = surveys(script)
    assert ORACLE_ONLY or (stats.variants == 2 and stats.replays >= CALLS)


def test_a_step_that_fails_between_recordings() -> None:
    def script(capture: Capture) -> Calls:
        settings = Settings()

        def double(x: torch.Tensor) -> torch.Tensor:
            if not isinstance(x, torch.Tensor):
                raise TypeError("a batch is missing")
            return x * settings.scale

        step = capture(double)
        for call in range(CALLS):
            if call == 1:
                with pytest.raises(TypeError):
                    step(None)
            yield step(x_of(call))
        return {}

    _, stats = surveys(script)
    assert ORACLE_ONLY or stats.replays >= CALLS - 4


def test_a_batch_is_not_kept() -> None:
    """What waits for the second recording holds no tensors of the first call."""

    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * 2)
        x = torch.arange(4.0)
        held = weakref.ref(x)
        yield step(x)
        del x
        gc.collect()
        assert held() is None
        yield step(x_of(1))
        return {}

    check_right(script)


def test_hyperparameters_that_change_between_recordings() -> None:
    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 4)
        opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = capture(training(model, opt), state={"model": model, "opt": opt})
        for call in range(2 * CALLS):
            opt.param_groups[0]["lr"] = 0.1 / (1 + call // 2)
            yield step(x_of(call))
        return {"model": model, "opt": opt}

    _, stats = surveys(script)
    assert ORACLE_ONLY or stats.replays >= CALLS


class Plain:
    scale = 2.0

    def __init__(self) -> None:
        self.inner = Settings()


def by_reference() -> tuple[Callable[[], float], Callable[[], object]]:
    held = [Plain()]
    reference = weakref.ref(held[0])
    return lambda: 2.0 if reference() is not None else 3.0, held.clear


def by_value() -> tuple[Callable[[], float], Callable[[], object]]:
    held = {"a": Plain(), "b": Plain()}
    values = weakref.WeakValueDictionary(held)
    return lambda: float(len(values)), lambda: held.pop("a")


def by_set() -> tuple[Callable[[], float], Callable[[], object]]:
    held = [Plain(), Plain()]
    values = weakref.WeakSet(held)
    return lambda: sum(each.inner.scale for each in values), held.pop


def by_module() -> tuple[Callable[[], float], Callable[[], object]]:
    held = [nn.Linear(2, 2)]
    reference = weakref.ref(held[0])
    return lambda: 2.0 if reference() is not None else 3.0, held.clear


def by_finalizer() -> tuple[Callable[[], float], Callable[[], object]]:
    """What goes counts."""
    held, gone = [Plain()], [1.0]
    weakref.finalize(held[0], gone.append, 2.0)
    reference = weakref.ref(held[0])
    return lambda: sum(gone) * (1.0 if reference() is None else 2.0), held.clear


@pytest.mark.sampled(4)
@pytest.mark.parametrize("build", [by_reference, by_value, by_set, by_module, by_finalizer])
@pytest.mark.parametrize("at", range(1, 4))
@pytest.mark.parametrize("called", [False, True])
def test_what_waits_holds_nothing_that_may_go(build: Any, at: int, called: bool, monkeypatch: Any) -> None:
    """``called``: code is followed as it runs, where much is in reach."""
    if called and not ORACLE_ONLY:
        monkeypatch.setattr("rote._policy.MOST_FUNCTIONS", 0)

    def script(capture: Capture) -> Calls:
        read, change = build()
        step = capture(lambda x: x * read())
        for call in range(CALLS):
            if call == at:
                change()
                gc.collect()
            yield step(x_of(call))
        return {}

    check_right(script)


def test_a_step_that_takes_its_batch_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library knows the arguments of the first call by their addresses."""
    if not ORACLE_ONLY:
        monkeypatch.setattr("rote._policy.MOST_FUNCTIONS", 0)

    def apart(batch: dict[str, Any]) -> torch.Tensor:
        labels = batch.pop("labels")
        found = batch["x"] * 2 + labels
        del labels
        batch.clear()
        gc.collect()
        rubbish.append([bytes([255] * size) for size in range(500)])
        return found

    rubbish: list[Any] = []

    def script(capture: Capture) -> Calls:
        for _ in range(2):
            step = capture(apart)
            for call in range(3):
                yield step({"x": x_of(call), "labels": x_of(2), "text": "a" * call, "more": [Plain()]})
        return {}

    check_right(script)


HALVES = 2


def test_a_step_that_calls_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library knows the call that was made last, which is not the first one."""
    if not ORACLE_ONLY:
        monkeypatch.setattr("rote._policy.MOST_FUNCTIONS", 0)

    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 4)

        def forward(x: torch.Tensor) -> torch.Tensor:
            if len(x) > HALVES:
                return torch.cat([step(x[:HALVES]), step(x[HALVES:])])
            return model(x).detach()

        step = capture(forward, state=model)
        for call in range(CALLS):
            yield step(torch.ones(2 * HALVES, 4) * call)
        return {}

    check_right(script)


def test_a_captured_function_in_another_one_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ORACLE_ONLY:
        monkeypatch.setattr("rote._policy.MOST_FUNCTIONS", 0)

    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 4)
        opt = torch.optim.SGD(model.parameters(), lr=0.1)

        def passes(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        inner = capture(passes, state=model)

        def train(x: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = inner(x)
            opt.step()
            return loss

        return over(
            capture, train, (torch.ones(2, 4) * call for call in range(CALLS)), state={"model": model, "opt": opt}
        )

    check_right(script)


HOW_IMPORTED = {
    "module": "import late_settings\n    return x * late_settings.SCALE",
    "attribute": "from late_settings import CONF\n    return x * CONF.scale",
    "by text": "import importlib\n    return x * importlib.import_module('late_settings').SCALE",
    "where it is not there": "import sys\n    if 'late_settings' not in sys.modules:\n        import late_settings\n"
    "    return x * sys.modules['late_settings'].SCALE",
    "of a package": "import late_package.settings\n    return x * late_package.settings.SCALE",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", HOW_IMPORTED)
@pytest.mark.parametrize("at", range(1, 5))
@pytest.mark.parametrize("called", [False, True])
def test_a_module_that_the_first_call_imports(
    how: str, at: int, called: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if called and not ORACLE_ONLY:
        monkeypatch.setattr("rote._policy.MOST_FUNCTIONS", 0)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "late_package").mkdir()
    (tmp_path / "late_package" / "__init__.py").touch()
    name = "late_package.settings" if how == "of a package" else "late_settings"
    for file in ("late_settings.py", "late_package/settings.py"):
        (tmp_path / file).write_text("SCALE = 3.0\nclass Conf:\n    scale = 3.0\nCONF = Conf()\n")

    def script(capture: Capture) -> Calls:
        for gone in ("late_settings", "late_package", "late_package.settings"):
            sys.modules.pop(gone, None)
        names: dict[str, Any] = {}
        source = f"def step(x):\n    {HOW_IMPORTED[how]}\n"
        exec(compile(source, str(tmp_path / "late_step.py"), "exec"), names)
        step = capture(names["step"])
        for call in range(CALLS):
            if call == at:
                sys.modules[name].SCALE = sys.modules[name].CONF.scale = 9.0  # type: ignore[attr-defined]
            yield step(x_of(call))
        return {}

    check_right(script)
