"""What a step can reach is looked at: iterators, locks, Python behind ops, and how far the walk goes. The places where
a number hides are in `scripts/`."""

import concurrent.futures
import itertools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rote
import torch
from hidden import AFTER, BEFORE, Hidden, check_seen
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over, rote_capture
from torch import Tensor, nn

setting = types.SimpleNamespace


class Plain:
    scale: float = 1.0


def counted() -> Callable[[], float]:
    held = itertools.count()
    return lambda: 2.0 if next(held) < BEFORE else 3.0


def sent() -> Callable[[], float]:
    def values() -> Iterator[float]:
        total = 0.0
        while True:
            total += yield 2.0 if total < BEFORE else 3.0

    held: Any = values()
    next(held)
    return lambda: held.send(1.0)


def read_by_a_loop() -> Callable[[], float]:
    held = iter([2.0] * BEFORE + [3.0] * AFTER)

    def read() -> float:
        for value in held:
            return value
        return 0.0

    return read


def read_from_a_slice() -> Callable[[], float]:
    held = iter([2.0] * BEFORE + [3.0] * AFTER)
    return lambda: sum(itertools.islice(held, 1))


@pytest.mark.parametrize("build", [counted, sent, read_by_a_loop, read_from_a_slice], ids=lambda build: build.__name__)
@pytest.mark.filterwarnings("ignore:rote")
def test_iterator_that_the_step_advances_is_refused(build: Callable[[], Callable[[], float]]) -> None:
    def script(capture: Capture) -> Calls:
        read = build()
        return over(capture, lambda x: x * read(), (torch.ones(4) for _ in range(BEFORE + AFTER)))

    found = check_right(script)
    if not ORACLE_ONLY:
        assert not found.steps[0].stats.replays
        assert "remedy" in found.steps[0].stats.refusals[0]


@pytest.mark.skipif(ORACLE_ONLY, reason="asks what is refused")
@pytest.mark.parametrize("asks", [False, True])
def test_step_may_hold_a_lock_but_not_ask_for_it(asks: bool) -> None:
    held, other = threading.Lock(), threading.RLock()

    def holds(x: Tensor) -> Tensor:
        with held, other:
            return x * 2

    def looks(x: Tensor) -> Tensor:
        return x * (3 if held.locked() else 2)

    captured = rote_capture(looks if asks else holds)
    for i in range(6):
        assert torch.equal(captured(torch.ones(2) + i), (torch.ones(2) + i) * 2)
    if asks:
        with held:
            assert torch.equal(captured(torch.ones(2)), torch.ones(2) * 3)
        assert "whether a lock is held" in captured.stats.refusals[0]
    else:
        assert captured.stats.replays >= 3


def test_weak_reference_does_not_keep_its_object() -> None:
    held = [Plain()]
    reference = weakref.ref(held[0])
    step = rote_capture(lambda x: x * (2 if reference() is not None else 3))
    for _ in range(5):
        assert step(torch.ones(1)).item() == 2
    held.clear()
    assert reference() is None
    assert step(torch.ones(1)).item() == 3


@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.filterwarnings("ignore:rote")
def test_python_behind_an_op_is_seen(composite: bool) -> None:
    def script(capture: Capture) -> Calls:
        held = [2.0]
        name = f"rote_tests::scaled{next(numbers)}"
        if composite:
            library = torch.library.Library("rote_tests", "FRAGMENT")
            library.define(name.split("::")[1] + "(Tensor x) -> Tensor")
            library.impl(name.split("::")[1], lambda x: x * held[0], "CompositeImplicitAutograd")
        else:
            scaled = torch.library.custom_op(name, lambda x: x * 1, mutates_args=(), schema="(Tensor x) -> Tensor")
            scaled.register_autograd(lambda ctx, grad: grad * held[0])
        op = getattr(torch.ops.rote_tests, name.split("::")[1])

        def step(x: Tensor) -> Tensor:
            y = x.detach().requires_grad_()
            z = op(y).sum()
            z.backward()
            return y.grad  # type: ignore[return-value]

        captured = capture(step)
        for call in range(BEFORE + AFTER):
            if call == BEFORE:
                held[0] = 3.0
            yield captured(torch.ones(4))
        return {}

    check_right(script)


numbers = itertools.count()


@pytest.mark.filterwarnings("ignore")
def test_attribute_of_a_compiled_module_is_seen() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def script(capture: Capture) -> Calls:
        module: Any = torch.jit.script(Scaled())
        calls = (torch.ones(4) for _ in range(BEFORE + AFTER))
        before = {BEFORE: lambda: setattr(module, "scale", 3.0)}
        return over(capture, lambda x: module(x) * 1, calls, state=module, before=before)

    check_right(script)


def message_of_a_failed_assertion() -> Hidden:
    held = setting(scale=2.0)

    def check() -> None:
        if held is not None:
            raise AssertionError(held.scale)

    def read() -> float:
        try:
            check()
        except AssertionError as error:
            return float(str(error).split("\n")[0])
        return 0.0

    return read, lambda: setattr(held, "scale", 3.0)


def test_message_of_an_assertion_that_is_caught_is_seen() -> None:
    check_seen(message_of_a_failed_assertion)


def test_message_of_an_assertion_is_not_in_reach() -> None:
    """pytest makes the messages of assertions, and so all of pytest would be in reach."""

    def step(x: Tensor) -> Tensor:
        assert x.dim() == 1
        return x * 2

    captured = rote_capture(step)
    for _ in range(6):
        captured(torch.ones(3))
    if not ORACLE_ONLY:
        assert captured.stats.replays, captured.stats
        assert "_pytest" not in captured.explain()


def nested(levels: int) -> Any:
    held: Any = [2.0]
    for _ in range(levels):
        held = [held]
    return held


def deep_value(held: Any, levels: int) -> float:
    for _ in range(levels):
        held = held[0]
    return float(held[0])


def test_walk_says_where_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    held = nested(20)
    many = [lambda: 2.0 for _ in range(5000)]
    step = rote_capture(lambda x: x * deep_value(held, 20) * many[0]())
    for _ in range(4):
        step(torch.ones(2))
    if ORACLE_ONLY:
        return
    (record,) = [record for record in caplog.records if "not guarded" in record.message]
    for text in (record.message, step.explain()):
        assert "closure['many'] has 5000 entries" in text
        assert "closure['held'][0][0]" in text and "objects deep" in text


def test_large_array_that_may_change_is_refused_with_the_remedy() -> None:
    held = np.zeros(9 << 20)
    step = rote_capture(lambda x: x * float(held[5] + 2))
    if ORACLE_ONLY:
        return
    with pytest.warns(UserWarning, match=r"flags\.writeable = False"):
        for _ in range(4):
            step(torch.ones(2))
    held.flags.writeable = False
    step = rote_capture(lambda x: x * float(held[5] + 2))
    for _ in range(6):
        assert step(torch.ones(2))[0].item() == 2.0
    assert step.stats.replays
    held.flags.writeable = True
    held[5] = 1.0
    with pytest.warns(UserWarning, match=r"flags\.writeable = False"):
        assert step(torch.ones(2))[0].item() == 3.0


def test_limit_of_depth_is_as_documented() -> None:
    """What lies deeper than the walk goes is out of sight, and said to be."""
    if ORACLE_ONLY:
        return
    held = nested(20)
    step = rote_capture(lambda x: x * deep_value(held, 20))
    for _ in range(6):
        step(torch.ones(1))
    inner = held
    for _ in range(20):
        inner = inner[0]
    inner[0] = 3.0
    assert step(torch.ones(1)).item() == 2.0  # eager: 3.0
    assert "objects deep" in step.explain()


def doubled_or_tripled(times: int, inner: bool) -> Callable[[Tensor], Tensor]:
    if inner:
        if times == 2:

            def factor() -> int:
                return 2
        else:

            def factor() -> int:
                return 3

        def step(x: Tensor) -> Tensor:
            return x * factor()
    elif times == 2:

        def step(x: Tensor) -> Tensor:
            return x * 2
    else:

        def step(x: Tensor) -> Tensor:
            return x * 3

    return step


@pytest.mark.parametrize("inner", [False, True])
def test_trusted_plans_are_those_of_the_same_code(inner: bool, tmp_path: Path) -> None:
    for times in (2, 3, 2):
        step = rote_capture(doubled_or_tripled(times, inner), plans=tmp_path, trust_plans=True)
        for _ in range(5):
            assert step(torch.ones(1)).item() == times
        if not ORACLE_ONLY:
            assert step.stats.replays, step.stats


def test_attribute_of_a_decorated_function() -> None:
    """A decorator of PyTorch's makes a function of its own; what a script keeps in that is the script's."""

    def script(capture: Capture) -> Calls:
        @torch.no_grad()
        def scaled(x: Tensor) -> Tensor:
            return x * getattr(scaled, "scale", 1.0)

        step = capture(lambda x: scaled(x) + 1)
        for call in range(15):
            if call in (5, 10):
                scaled.scale = float(call)  # type: ignore[attr-defined]
            yield step(torch.ones(2))
        return {}

    check_right(script, replays=6)


@pytest.mark.parametrize("held", [torch.utils.data.Dataset, concurrent.futures.ThreadPoolExecutor, torch.nn.Identity])
def test_attribute_by_a_computed_name(held: Callable[[], Any]) -> None:
    """Of an object of a library's class, of which only what code names is guarded."""

    def script(capture: Capture) -> Calls:
        kept, names = held(), ["scale"]
        kept.scale = 2.0
        before = {5: lambda: setattr(kept, "scale", 3.0), 10: lambda: delattr(kept, "scale")}
        calls = (torch.ones(2) for _ in range(15))
        return over(capture, lambda x: x * getattr(kept, names[0], 1.0), calls, before=before)

    check_right(script, replays=6)


@pytest.mark.ranks(1)
def test_a_miss_names_what_a_module_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor) -> Tensor:
        return x * getattr(torch, "rote_test_other", 2.0) + getattr(torch, "rote_test_third", 1.0)

    captured = rote.capture(step)
    x = torch.ones(3)
    for _ in range(4):
        captured(x)
    assert captured.stats.replays
    monkeypatch.setattr(torch, "rote_test_third", 5.0, raising=False)
    assert torch.equal(captured(x), torch.full((3,), 7.0))
    assert list(captured.stats.guard_misses) == ["torch.rote_test_third"]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("runs", ["", "builtins.eval('1')", "other.eval('1')"])
def test_a_module_that_evaluates_is_no_text(runs: str) -> None:
    """`eval` is a function of Python's, and a method of modules."""
    source = f"""
import builtins
import builtins as other

def step(x):
    model.eval()
    y = model(x) * builtins.abs(-2)
    model.train()
    {runs}
    return y
"""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).requires_grad_(False)
        names: dict[str, Any] = {"model": model, "__name__": "script"}
        exec(compile(source, "<script>", "exec"), names)
        step = capture(names["step"], state=model)
        for _ in range(8):
            yield step(torch.randn(2, 4))
        return model

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert bool(stats.replays) != bool(runs) and bool(stats.refusals) == bool(runs), stats
