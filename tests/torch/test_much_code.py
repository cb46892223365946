"""Steps with too much code in reach to follow all of it: the walk follows the code that calls run, and sees each
change of what this code reads."""

import dataclasses
import importlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hidden import Hidden, run_hidden
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from rote import _policy

MODULES = _policy.MOST_FUNCTIONS + 100


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """All code in reach is too much."""
    monkeypatch.setattr(_policy, "MOST_FUNCTIONS", 0)


# -- a package that is too large ----------------------------------------------


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package of modules whose functions name those of the next ones."""
    name = "rote_test_large"
    place = tmp_path / name
    place.mkdir()
    (place / "__init__.py").write_text("")
    names = [f"value_{i}" for i in range(40)]
    for at in range(MODULES):
        values = "".join(f"{name} = [{at}.0, '{name}']\n" for name in names)
        reads = ", ".join(names)
        calls = "".join(f"    part_{(at + step) % MODULES}.apply(x, depth - 1)\n" for step in (1, 2, 3))
        (place / f"part_{at}.py").write_text(
            f"{values}scale = 2.0\n\n"
            f"def every():\n    return [{reads}]\n\n"
            f"def apply(x, depth):\n    if depth < 1:\n        return x * scale\n{calls}    return x * value_7[0]\n"
        )
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = [importlib.import_module(f"{name}.part_{at}") for at in range(MODULES)]
    for at, part in enumerate(parts):
        for step in (1, 2, 3):
            other = (at + step) % MODULES
            setattr(part, f"part_{other}", parts[other])
    yield name
    for module in [module for module in sys.modules if module.startswith(name)]:
        del sys.modules[module]


def test_code_that_runs_is_guarded_and_no_other(package: str) -> None:
    part = [sys.modules[f"{package}.part_{at}"] for at in range(MODULES)]

    def script(capture: Capture) -> Calls:
        depth = [0]
        for module in part:
            module.scale = 2.0
        step = capture(lambda x: part[0].apply(x, depth[0]))
        x = torch.arange(4.0)
        for _ in range(6):
            yield step(x)
        part[200].value_3[0] = part[250].scale = 17.0  # what nothing reads
        for _ in range(3):
            yield step(x)
        part[0].scale = 3.0
        for _ in range(4):
            yield step(x)
        depth[0] = 1  # other code runs
        for _ in range(6):
            yield step(x)
        part[2].scale = 5.0  # which reads this now, though its result counts for nothing
        for _ in range(4):
            yield step(x)
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        replays = [stats[0].replays for stats in found.stats]
        assert replays[5] >= 2 and replays[8] == replays[5] + 3, replays
        assert replays[12] > replays[8] and replays[18] > replays[12], replays


# -- who runs the code: `scripts/places/functions.py` has ways that are an expression ----


def in_a_pool() -> Hidden:
    held, pool = [2.0], ThreadPoolExecutor(1)
    pool.submit(int).result()  # its thread runs before the step does

    def read() -> float:
        return held[0]

    return lambda: pool.submit(read).result(), lambda: held.__setitem__(0, 3.0)


def in_a_new_thread() -> Hidden:
    held = [2.0]

    def read(out: list[float]) -> None:
        out.append(held[0])

    def run() -> float:
        out: list[float] = []
        thread = threading.Thread(target=read, args=(out,))
        thread.start()
        thread.join()
        return out[0]

    return run, lambda: held.__setitem__(0, 3.0)


def in_a_backward() -> Hidden:
    held = [2.0]

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 1

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * held[0]

    def read() -> Any:
        x = torch.ones(4, requires_grad=True)
        return torch.autograd.grad(Scaled.apply(x).sum(), x)[0]

    return read, lambda: held.__setitem__(0, 3.0)


def by_a_computed_module() -> Hidden:
    name = "rote_test_hidden"
    module = types.ModuleType(name)
    exec("scale = 2.0\ndef read():\n    return scale\n", vars(module))
    sys.modules[name] = module
    half = "rote_test_"
    return lambda: sys.modules[half + "hidden"].read(), lambda: setattr(module, "scale", 3.0)


RUN = [in_a_pool, in_a_new_thread, in_a_backward]


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("build", RUN, ids=lambda build: build.__name__)
def test_so_is_it_where_all_code_is(build: Callable[[], Hidden]) -> None:
    run_hidden(build)


@pytest.mark.usefixtures("few")
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("build", [*RUN, by_a_computed_module], ids=lambda build: build.__name__)
def test_code_is_followed_whoever_runs_it(build: Callable[[], Hidden]) -> None:
    """Seen, or refused."""
    found = run_hidden(build)
    if not ORACLE_ONLY:
        last = found.stats[-1][0]
        assert last.replays or last.refusals, last


# -- what cannot be followed -----------------------------------------------------


@pytest.mark.usefixtures("few")
def test_code_that_is_made_in_each_call_is_refused() -> None:
    def script(capture: Capture) -> Calls:
        held = [2.0]

        def made(x: torch.Tensor) -> torch.Tensor:
            factor = dataclasses.make_dataclass("Factor", ["value"])(held[0])
            return x * factor.value  # type: ignore[no-any-return]

        step = capture(made, tail=False)
        for call in range(16):
            held[0] = 2.0 + (call == 12)
            yield step(torch.arange(4.0))
        return {}

    with pytest.warns(UserWarning, match="no earlier call has run"):
        found = check_right(script)
    assert ORACLE_ONLY or not found.stats[-1][0].replays


@pytest.mark.usefixtures("few")
def test_another_profiler_is_left_alone() -> None:
    events: list[str] = []

    def profiler(frame: types.FrameType, event: str, arg: Any) -> None:
        events.append(event)

    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * 2)
        x = torch.arange(4.0)
        sys.setprofile(profiler)
        try:
            for _ in range(4):
                yield step(x)
            assert sys.getprofile() is profiler
        finally:
            sys.setprofile(None)
        for _ in range(4):
            yield step(x)
        return {}

    with pytest.warns(UserWarning, match="another profiler of Python is active"):
        found = check_right(script)
    assert events
    assert ORACLE_ONLY or (not found.stats[3][0].replays and found.stats[-1][0].replays)


@pytest.mark.usefixtures("few")
def test_no_hook_is_left_behind() -> None:
    def script(capture: Capture) -> Calls:
        def raises(x: torch.Tensor) -> torch.Tensor:
            if x.tolist()[0] > 1:
                raise ValueError("too large")
            return x

        step = capture(raises, tail=False)
        for first in (2.0, 2.0, 0.0, 0.0):
            try:
                yield step(torch.full((4,), first))
            except ValueError as error:
                yield str(error)
        return {}

    with pytest.warns(UserWarning, match="rote"):
        check_right(script)
    assert sys.getprofile() is None and threading.getprofile() is None
