"""``rote.capture_loops``, and the function with captured loops that it returns."""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

from . import _loops
from ._captured import Captured
from ._module_regions import ModuleRegions
from ._split_step import SplitStep
from ._step import Stats

Arguments = ParamSpec("Arguments")
_OF_REGIONS = {"plans": None, "max_variants": 8, "ignore": (), "passes": "", "verify": 0}
_DEFAULTS = {**_OF_REGIONS, "strict": False, "regions": True}
_OPTIONS = {*_DEFAULTS, "verify_every", "propagation"}
Result = TypeVar("Result", covariant=True)


class CapturedLoops(Generic[Arguments, Result]):
    """A function with captured loops. Call it as the function it stands for.

    ``stats`` and ``explain()`` are of the turns of its loops. All other attributes are the original function's.
    """

    def __init__(self, function: Callable[Arguments, Result], made: Any, turns: list[Captured[..., Any]]) -> None:
        self._made = made
        self._turns = turns
        self.__wrapped__ = function

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return self._made(*args, **kwargs)  # type: ignore[no-any-return]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds to an instance as a function does."""
        return self if instance is None else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        if name == "__wrapped__":  # of an object that is about to be unpickled
            raise AttributeError(name)
        return getattr(self.__wrapped__, name)

    @property
    def stats(self) -> dict[str, Stats]:
        """The present values of the counters, by the names of the loops: ``train (line 12)``."""
        return {turn.__qualname__: turn.stats for turn in self._turns}

    def explain(self) -> str:
        """The report of each loop, as :meth:`Captured.explain` has it."""
        return "\n\n".join(f"{turn.__qualname__}\n{turn.explain()}" for turn in self._turns)


@overload
def capture_loops(
    fn: Callable[Arguments, Result],
    *,
    state: Any = ...,
    plans: str | Path | None = ...,
    strict: bool = ...,
    verify: int = ...,
    verify_every: int = ...,
    propagation: Literal["torch", "rote"] = ...,
    regions: bool = ...,
    max_variants: int = ...,
    ignore: Sequence[str] = ...,
    passes: str | Sequence[str] = ...,
) -> CapturedLoops[Arguments, Result]: ...
@overload
def capture_loops(
    fn: None = None,
    *,
    state: Any = ...,
    plans: str | Path | None = ...,
    strict: bool = ...,
    verify: int = ...,
    verify_every: int = ...,
    propagation: Literal["torch", "rote"] = ...,
    regions: bool = ...,
    max_variants: int = ...,
    ignore: Sequence[str] = ...,
    passes: str | Sequence[str] = ...,
) -> Callable[[Callable[Arguments, Result]], CapturedLoops[Arguments, Result]]: ...
def capture_loops(fn: Callable[..., Any] | None = None, *, state: Any = None, **options: Any) -> Any:
    """Captures what the loops of a function do in each turn: ``for x, y in loader: ...``.

    For scripts that have no function for a step. Each turn is captured as :func:`capture` captures a step: recorded in
    the first turns, and replayed from then on, across all calls of the function. What a turn does on the host after its
    last op (``total += loss.item()``, ``if i % 100 == 0: print(...)``, ``break``) runs as it is written. The function
    may stay as it is. Usable as a call or as a decorator, also of a method.

    The innermost loops that call ``backward`` are captured, or the blocks under ``if`` that train in loops which step
    through an environment (``env.step(action)``). If there are none, as in a function that evaluates, it is
    the innermost ``for`` loops that set a variable to the result of a call.

    Args:
        fn: the function. Its source must be available.
        state, plans, strict, verify, verify_every, propagation, regions, max_variants, ignore, passes: as
            :func:`capture` has them, for each loop.

    Returns:
        A callable with the signature of ``fn``, and with ``stats``, by loops, and ``explain()``.

    Raises:
        ValueError: no loop of the function can be captured. The message says why.
    """

    unknown = options.keys() - _OPTIONS
    if unknown:
        raise TypeError(f"rote.capture_loops takes no {min(unknown)}=")

    def wrap(function: Callable[..., Any]) -> CapturedLoops[..., Any]:
        return CapturedLoops(function, *with_captured_loops(function, state, **options))

    return wrap if fn is None else wrap(fn)


def with_captured_loops(fn: Callable[..., Any], state: Any, **options: Any) -> tuple[Any, list[Captured[..., Any]]]:
    """What takes the place of a function, and the captured turns of its loops. Raises ``ValueError`` where there are
    none."""
    turns: list[Captured[..., Any]] = []

    def captured(turn: types.FunctionType) -> Captured[..., Any]:
        turns.append(captured_turn(turn, state, **options))
        return turns[-1]

    try:
        made = _loops.remade(fn, captured)
    except _loops.NotCapturedError as problem:
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise ValueError(f"no loop of {name} can be captured: {problem}") from None
    return _one_at_a_time(made, fn), turns


def _one_at_a_time(made: Callable[..., Any], fn: Callable[..., Any]) -> Callable[..., Any]:
    """What its turns read, a function with captured loops has in one place for all calls. So calls of other threads
    meanwhile, and those that it makes of itself, are calls of the function as it was."""
    running: dict[str, object] = {}  # and no lock, which cannot be pickled
    cells = _loops.cells_of(made)

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        call = object()
        if running.setdefault("call", call) is not call:
            return fn(*args, **kwargs)
        try:
            return made(*args, **kwargs)
        finally:
            for cell in cells:  # what they hold ends with the call, as variables do
                with contextlib.suppress(ValueError):  # of an empty one
                    del cell.cell_contents
            del running["call"]

    return run


def captured_turn(turn: types.FunctionType, state: Any, **options: Any) -> Captured[..., Any]:
    """What a loop does in one turn, captured."""
    options = {**_DEFAULTS, **options}
    of_regions = {name: options[name] for name in _OF_REGIONS}
    regions = ModuleRegions(**of_regions) if options.pop("regions") else None
    return Captured(SplitStep(turn, state, looks=True, regions=regions, **options))
