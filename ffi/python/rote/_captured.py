"""The captured function that ``rote.capture`` returns."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

from torch._C._dynamo import eval_frame

from ._step import Stats, Step

Arguments = ParamSpec("Arguments")
Rest = ParamSpec("Rest")
Result = TypeVar("Result", covariant=True)
Returned = TypeVar("Returned")
Instance = TypeVar("Instance")


class Captured(Generic[Arguments, Result]):
    """A captured function. Call it as the function it stands for.

    ``stats``, ``explain()`` and ``plan_counts()`` belong to the captured function. All other attributes are the
    original function's, so that Rote finds and guards them.
    """

    __slots__ = ("__weakref__", "_step")

    def __init__(self, step: Step) -> None:
        object.__setattr__(self, "_step", step)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return step_of(self).call(args, kwargs)  # type: ignore[no-any-return]

    @property
    def stats(self) -> Stats:
        """The present values of the counters."""
        return step_of(self).stats

    def explain(self) -> str:
        """A report: the erased work, collectives and redistributions with their causes, guards, misses, refusals."""
        return step_of(self).explain()

    def plan_counts(self) -> dict[str, int]:
        """The numbers of instructions of the variant that ran last: local, views, collectives."""
        return step_of(self).plan_counts()

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(
        self: Captured[Concatenate[Instance, Rest], Returned], instance: Instance, owner: Any = None
    ) -> Callable[Rest, Returned]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds to an instance if the original function binds."""
        function = function_of(self)
        get = getattr(type(function), "__get__", None)
        bound = None if get is None else get(function, instance, owner)
        if type(bound) is types.MethodType and bound.__func__ is function:
            return types.MethodType(self, bound.__self__)
        return self

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        function = function_of(self)
        return function if name == "__wrapped__" else getattr(function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(function_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(function_of(self), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(function_of(self)), *_OWN, "__wrapped__"})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The copy of a captured function is the captured function itself. The copy of a method or of a callable
        object runs eagerly: the captured state belongs to the original."""
        function = function_of(self)
        copied = copy.deepcopy(function, memo)
        return self if copied is function else copied

    def __reduce_ex__(self, protocol: object) -> Any:
        """The captured function is pickled by its name, if the name stands for it, else as the original function."""
        found: Any = sys.modules.get(str(getattr(self, "__module__", None)))
        name = str(getattr(self, "__qualname__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_plain, (function_of(self),))


step_of: Callable[[Captured[Any, Any]], Step] = Captured.__dict__["_step"].__get__
_OF_THE_CLASS = {"__doc__", "__module__", "__slots__", "__orig_bases__", "__parameters__", "_step"}
_OWN = frozenset(Captured.__dict__) - _OF_THE_CLASS | {"__class__", "__reduce__"}


def function_of(captured: Captured[Any, Any]) -> Any:
    """The function that was captured."""
    return step_of(captured).stands_for


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# torch.compile leaves a captured function as it is: the graph breaks there, and what runs inside is not compiled.
_skip = eval_frame._FrameAction.SKIP
eval_frame.set_code_exec_strategy(Captured.__call__.__code__, eval_frame._FrameExecStrategy(_skip, _skip))
Captured.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]
