"""Numbers that a step reads from tensors only to return them: ``return loss.item()``, ``return float(loss)``.

Nothing between the read and the caller can use such a number. This is proven from the code (:mod:`._return_places`):
a function calls ``.item()`` or ``float()``, and only returns what it gets; it is the captured function, or one whose
result the captured function only returns, and so on. While a step is recorded,
a float is itself there, and is known again by its identity. A :class:`Read` stands in the place of any other number.
The plan returns the tensor, and a replay reads the number from it.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from . import _return_places
from ._frames import TORCH
from ._return_places import AS_FLOAT, AS_IT_IS, DEFERRED

_DEEP = 100  # levels of a result
__all__ = [
    "AS_FLOAT",
    "AS_IT_IS",
    "Rate",
    "Read",
    "code_of",
    "gives_rates",
    "how_returned",
    "plain",
    "replaced",
    "source_of",
]
# Functions of PyTorch that call the captured function and return what it returns, such as `torch.no_grad()`.
_PASSING = f"{TORCH}utils/_contextlib.py"


class Read:
    """A number that is returned, with a tensor of its own that holds it."""

    __slots__ = ("tensor", "value")

    def __init__(self, tensor: torch.Tensor, value: Any) -> None:
        self.tensor = tensor
        self.value = value


class Rate:
    """The rate of a scheduler that is returned: what it is when all else of a call is done. With ``key``, it is an
    entry of a group of the optimizer; without a place, all rates."""

    __slots__ = ("_scheduler", "_seen", "key", "path", "place")

    def __init__(self, path: str, scheduler: Any, place: int | None, key: str, seen: Any = None) -> None:
        """``seen``: what it was where a recorded step has read it."""
        self.path = path
        self._scheduler = scheduler
        self.place = place
        self.key = key
        self._seen = seen

    @property
    def value(self) -> Any:
        if self._seen is not None:
            return self._seen
        if self.key:
            return self._scheduler.optimizer.param_groups[self.place][self.key]
        rates = self._scheduler.get_last_lr()
        return rates if self.place is None else rates[self.place]

    def __getitem__(self, place: int) -> Rate:
        """One of all rates."""
        seen = self._seen if self._seen is None else self._seen[place]
        return Rate(self.path, self._scheduler, place, self.key, seen)

    def parts(self) -> list[Rate]:
        """The rates, each by itself."""
        return [self] if self.place is not None else [self[i] for i in range(len(self._scheduler.get_last_lr()))]


def source_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor that a read finds its number in, if that is simple."""
    if type(tensor) is DTensor and all(isinstance(placement, Replicate) for placement in tensor.placements):
        tensor = tensor._local_tensor
    return tensor if type(tensor) is torch.Tensor and tensor.numel() == 1 else None


def how_returned(frame: types.FrameType, step: Any, runner: types.CodeType) -> str:
    """How the result of the call that a frame makes now is returned, if that is all that the frame's function does with
    it, and what it returns is the result of ``step``, which ``runner`` has called: :data:`AS_IT_IS`, or
    :data:`AS_FLOAT`. Otherwise empty."""
    how = _return_places.how_returned(frame) if _gives_result(frame, step, runner) else ""
    return how if how != AS_FLOAT or frame.f_globals.get("float", float) is float else ""


def gives_rates(frame: types.FrameType, step: Any, runner: types.CodeType) -> bool:
    """Whether a frame reads ``get_last_lr`` or ``param_groups`` only to return numbers from there, as the result of
    ``step`` or in it."""
    return _gives_result(frame, step, runner) and _return_places.gives_rates(frame)


def _gives_result(frame: types.FrameType, step: Any, runner: types.CodeType) -> bool:
    """Whether what the function of a frame returns is the result of ``step``, which ``runner`` has called, or in it:
    each function on the way only returns what it gets."""
    inner = _return_places.function_of(frame)
    while (caller := inner.f_back) is not None and caller.f_code is not runner:
        passes = caller.f_code.co_filename == _PASSING
        function = caller.f_locals.get("func") if passes else _return_places.called(caller)
        if not _runs(function, inner.f_code):
            return False
        inner = _return_places.function_of(caller)
    return caller is not None and _runs(step, inner.f_code)


def unwrapped(function: Any) -> Any:
    """The function that functions of PyTorch, such as `torch.no_grad()` makes, call with what they are called with.
    None while a closure of theirs is not filled."""
    while type(function) is types.FunctionType and function.__code__.co_filename == _PASSING:
        try:
            function = inspect.getclosurevars(function).nonlocals.get("func")
        except ValueError:
            return None
    return function


def bound_and_plain(function: Any) -> tuple[tuple[Any, ...], types.FunctionType | None]:
    """What a captured function is bound to, and the function of Python's behind it; none of another callable."""
    plain = unwrapped(function)
    bound: tuple[Any, ...] = ()
    if type(plain) is types.MethodType:
        plain, bound = unwrapped(plain.__func__), (plain.__self__,)
    return bound, plain if type(plain) is types.FunctionType else None


def code_of(function: Any) -> types.CodeType | None:
    """The code whose result a call of a captured function gives, if nobody sees it before the caller; none of a
    generator."""
    while True:
        if type(function) is functools.partial:
            function = function.func
        elif type(function) is types.MethodType:
            function = function.__func__
        elif type(function) is not types.FunctionType:
            return None
        elif (inner := unwrapped(function)) is not function:
            function = inner
        else:
            code = function.__code__
            return None if code.co_flags & DEFERRED else code


def _runs(function: Any, code: types.CodeType) -> bool:
    """Whether calling a function runs code and gives what this returns to the caller, and to nobody else (a cache)."""
    while type(function) is functools.partial:
        function = function.func
    if type(function) is types.MethodType:
        function = function.__func__
    return type(function) is types.FunctionType and function.__code__ is code


def plain(result: Any) -> Any:
    """A result with the numbers in their places."""
    return replaced(result, lambda part: part.value if isinstance(part, Read | Rate) else part)


def another(part: Any) -> Any:
    """A number of a tensor or a scheduler as another object, so that what it is in is made anew; all else itself."""
    return copy.copy(part) if isinstance(part, Read | Rate) else part


def put_back(result: Any, plain: Any) -> Any:
    """A result with the parts of another one, which was made of it by :func:`replaced`: the step may have put its lists
    and dicts elsewhere too."""
    done: dict[int, Any] = {}

    def of(part: Any, other: Any) -> Any:
        if part is other or type(part) is not type(other) or type(part) not in (tuple, list, dict):
            return other
        if id(part) not in done:
            done[id(part)] = part
            keys = list(part) if type(part) is dict else range(len(part))
            items = [of(part[key], other[key]) for key in keys]
            if type(part) is tuple:
                done[id(part)] = part if all(map(operator.is_, items, part)) else tuple(items)
            else:
                for key, item in zip(keys, items, strict=True):
                    part[key] = item
        return done[id(part)]

    return of(result, plain)


def replaced(result: Any, new: Callable[[Any], Any]) -> Any:
    """A result with ``new`` of each part in the places of tuples, lists and dicts. Where that is the part itself
    everywhere, and in what contains itself, the result stays itself."""
    made: dict[int, Any] = {}

    def of(part: Any, depth: int) -> Any:
        if type(part) not in (tuple, list, dict):
            return new(part)
        if id(part) not in made:
            made[id(part)] = part
            if depth < _DEEP:
                made[id(part)] = inside(part, depth + 1)
        return made[id(part)]

    def inside(part: Any, depth: int) -> Any:
        if type(part) is dict:
            entries = {key: of(value, depth) for key, value in part.items()}
            return part if all(entries[key] is value for key, value in part.items()) else entries
        items = [of(item, depth) for item in part]
        return part if all(map(operator.is_, items, part)) else type(part)(items)

    return of(result, 0)
