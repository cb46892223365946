"""Metrics that a step gives to a learning rate scheduler: ``scheduler.step(loss)``, of ``ReduceLROnPlateau``.

The scheduler makes a float of the metric, and keeps nothing else of it. So a plan returns the metric as it is at the
call, and a replay gives the float to the scheduler when all else is done (:mod:`._schedulers`). A metric is a number,
a tensor of one element, or a number that the step reads in the place of the argument: ``scheduler.step(loss.item())``,
``scheduler.step(float(loss))``. Of the last two, the code shows that nothing else gets the number.
"""

from __future__ import annotations

import ast
import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ._record import unrecorded
from ._returns import source_of
from ._sources import Position, node_of, position_at, position_in, position_of


class Metric:
    """A number that a scheduler is given. If a tensor has it, the plan returns one of its own."""

    __slots__ = ("_node", "tensor", "value")

    def __init__(self, value: float, tensor: torch.Tensor | None = None) -> None:
        self.value = value
        self.tensor = tensor
        self._node: Any = None

    def hand_out(self, outputs: list[torch.Tensor]) -> None:
        """Appends the tensor to what the plan returns."""
        if self.tensor is None:
            self._node = {"c": self.value} if math.isfinite(self.value) else {"f": str(self.value)}
        else:
            self._node = {"t": len(outputs)}
            outputs.append(self.tensor)
            self.tensor = None

    @property
    def node(self) -> Any:
        """The metric in the structure of a result; see :func:`number_of`."""
        return self._node


def number_of(node: Any, outputs: list[torch.Tensor]) -> float:
    """The number that a metric is after a replay."""
    ((kind, value),) = node.items()
    return _float(outputs[value]) if kind == "t" else float(value)


def takes_metric(scheduler: LRScheduler) -> bool:
    """Whether a scheduler makes a float of a metric."""
    step: Any = type(scheduler).step
    return step is ReduceLROnPlateau.step


class Metrics:
    """The metrics of one step that is recorded."""

    def __init__(self) -> None:
        self._caller: types.FrameType | None = None  # which has last got `step` of a scheduler
        self._at = 0  # its instruction then
        self._read: tuple[float, Metric] | None = None  # a number that no scheduler has been given so far

    def step_is_got(self, by: types.FrameType) -> None:
        """A frame gets ``step`` of a scheduler, perhaps to call it."""
        self._caller, self._at = by, by.f_lasti

    def read(self, tensor: torch.Tensor, by: types.FrameType, how: Callable[[torch.Tensor], float]) -> float | None:
        """The number that a frame reads from a tensor, if it goes to a scheduler and nowhere else."""
        source = _source_of(tensor)
        if source is None or by is not self._caller or not _is_metric(by, self._at):
            return None
        metric = _kept(source)
        with unrecorded():
            number = how(source)
        self._read = number, metric
        return number

    def given(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Metric | None:
        """The metric among the arguments of ``step``, if it is a simple one and alone."""
        read = self._read
        self.forget()
        if len(args) + len(kwargs) != 1 or kwargs.keys() - {"metrics"}:
            return None
        value = args[0] if args else kwargs["metrics"]
        if read is not None:
            return read[1] if value is read[0] else None
        if type(value) is float or (type(value) in (int, bool) and abs(value) <= _MOST):
            return Metric(float(value))
        source = _source_of(value) if isinstance(value, torch.Tensor) else None
        return None if source is None else _kept(source)

    def lost(self) -> bool:
        """Whether the step has read a number that was to be a metric, and has given it to no scheduler."""
        return self._read is not None

    def forget(self) -> None:
        """Lets go of what the step holds."""
        self._caller = self._read = None


# Beyond it, not every whole number is a float.
_MOST = 1 << 53


def _kept(source: torch.Tensor) -> Metric:
    kept = source.detach().clone()
    return Metric(_float(kept), kept)


def _float(tensor: torch.Tensor) -> float:
    with unrecorded():
        return float(torch._C.TensorBase.__float__(tensor))


def _source_of(tensor: torch.Tensor) -> torch.Tensor | None:
    source = source_of(tensor)
    return None if source is None or source.is_complex() else source


_places: dict[types.CodeType, dict[Position, Position]] = {}


def _is_metric(frame: types.FrameType, got: int) -> bool:
    """Whether the call that a frame makes now is an argument of the call of ``step`` that the instruction ``got`` has
    begun, and its result goes nowhere else."""
    code = frame.f_code
    if code not in _places:
        _places[code] = dict(_found(code))
    expected = _places[code].get(position_in(frame))
    return expected is not None and expected == position_at(code, got)


def _found(code: types.CodeType) -> Iterator[tuple[Position, Position]]:
    """Where the source says ``x.step(y.item())`` or ``x.step(float(y))``: the argument, and ``x.step``."""
    node = node_of(code)
    for each in ast.walk(node) if node is not None else ():
        if not (isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "step"):
            continue
        match each.args, each.keywords:
            case ([read], []) | ([], [ast.keyword(arg="metrics", value=read)]) if _reads(read):
                yield position_of(read), position_of(each.func)


def _reads(argument: ast.expr) -> bool:
    match argument:
        case ast.Call(func=ast.Attribute(attr="item"), args=[], keywords=[]):
            return True
        case ast.Call(func=ast.Name(id="float"), args=[_], keywords=[]):
            return True
    return False
