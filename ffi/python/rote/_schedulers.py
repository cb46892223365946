"""Learning rate schedulers in reach of a step: ``scheduler.step()`` runs live, when a replay has ended.

A scheduler computes with numbers that change at every call, in code that may be anybody's (the function of a
``LambdaLR``). So its call is no part of a plan. While a step is recorded, the schedulers in reach say what is read of
them. If that is nothing but ``step``, called without arguments or with a metric (:mod:`._metrics`), a replay calls it
when all else is done. The numbers in the scheduler then need no guard.

Nothing may see that the call comes later. If the step reads anything else of a scheduler, or reads the groups of its
optimizer after the call, the recording is dropped. The next one guards the numbers of this scheduler as those of any
object. (``get_last_lr()``, or an entry of a group, may be read to be returned: a replay looks when the schedulers have
run.) If the step asks for what a scheduler has not (``hasattr(scheduler, "total_steps")``), the next recording guards
that there is none. While a step is recorded, the call runs in its place.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from . import _arithmetic, _introspect, _metrics
from ._libraries import is_library_class, is_library_function
from ._reads import Reads, is_plain
from ._return_places import RATES, only_returns_groups
from ._returns import Rate

_HERE = f"{Path(__file__).parent}/"
# Names of what schedulers have not, at most: a step may ask for another one in each call.
_MOST_MISSED = 16
# Attributes of an optimizer by which code gets at its groups.
_GROUPS = frozenset({"param_groups", "state_dict", "__dict__", "__getstate__", "__reduce__", "__reduce_ex__"})
_ZERO_GRAD = inspect.unwrap(Optimizer.zero_grad).__code__  # goes through the groups for their parameters alone


def is_followed(scheduler: LRScheduler) -> bool:
    """Whether all that code reads of a scheduler and its optimizer can be seen, and ``step`` is PyTorch's."""
    own = _introspect.own(scheduler)
    step = getattr(type(scheduler), "step", None)
    if own is None or "step" in own or type(step) is not types.FunctionType or not is_library_function(step):
        return False
    return isinstance(own.get("optimizer"), Optimizer) and is_plain(scheduler) and is_plain(own["optimizer"])


def _has(scheduler: LRScheduler, name: str) -> bool:
    """Whether a scheduler has an attribute of this name; of one whose class may change, nobody knows."""
    kind = type(scheduler)
    own = _introspect.own(scheduler) or {}
    return (
        not is_library_class(kind)
        or name in own
        or any(name in _introspect.class_dict(each) for each in _introspect.mro(kind))
    )


@dataclass
class Call:
    """One call of ``step``, with a metric or without arguments."""

    path: str
    scheduler: LRScheduler
    metric: _metrics.Metric | None


class Schedulers:
    """The schedulers in reach of a step that is recorded."""

    def __init__(
        self,
        found: list[tuple[str, LRScheduler]],
        aliases: bool,
        unrecorded: Callable[[], Any],
        plain: Callable[[Optimizer], None],
        missed: frozenset[str],
        seen: Reads,
        handled: Callable[[], object],
        gives_rates: Callable[[types.FrameType], bool],
    ) -> None:
        """``aliases``: the step holds groups of an optimizer by other names than its own. Within ``unrecorded()``,
        nothing is recorded. ``plain`` puts back the numbers in an optimizer's groups. ``missed``: names of attributes
        of which it is guarded that the schedulers have none. ``seen`` tells of reads, ``handled`` whether the step
        handles errors where it is, ``gives_rates`` whether a frame reads ``get_last_lr`` or ``param_groups`` only to
        return numbers from there."""
        self.found = found
        self._paths = {id(scheduler): path for path, scheduler in found}
        self._aliases = aliases
        self._unrecorded = unrecorded
        self._plain = plain
        self._guarded = missed
        self._seen = seen
        self._handled = handled
        self._gives_rates = gives_rates
        self._given: set[int] = set()  # schedulers of which the step has returned rates
        self._groups: set[int] = set()  # optimizers whose groups are not to be read any more
        self._running = False
        self._before: dict[int, list[tuple[dict[str, Any], dict[str, Any]]]] = {}  # groups of optimizers, and copies
        self._metrics = _metrics.Metrics()
        self.calls: list[Call] = []
        """The calls of ``step``, in their order."""
        self.read: list[LRScheduler] = []
        """Of which the step has read more than ``step``."""
        self.given_up: dict[str, str] = {}
        """By their paths, why these are not called when a replay has ended."""
        self.missed: set[str] = set()
        """What else the step has asked for and not found."""
        self.rehearses = False
        """The step runs once more only to be looked at: schedulers stay as they are."""

    def watch(self) -> None:
        """Sees from now on what is read of the schedulers."""
        for _, scheduler in self.found:
            self._seen.watch(scheduler, self._reads)

    def forget(self) -> None:
        """Lets go of the recording, to whose end nothing is called any more."""
        self._plain, self._handled, self._gives_rates = _nothing, _nothing, _never
        self._metrics.forget()
        self.calls.clear()

    def read_metric(
        self, tensor: torch.Tensor, by: types.FrameType, how: Callable[[torch.Tensor], float]
    ) -> float | None:
        """The number that a frame reads from a tensor to give it to a scheduler, and for nothing else."""
        return self._metrics.read(tensor, by, how)

    def hand_out(self, outputs: list[torch.Tensor]) -> None:
        """Appends the metrics in tensors to what the plan returns. The step holds nothing any more."""
        for call in self.calls:
            if call.metric is not None:
                call.metric.hand_out(outputs)

    def lost_metric(self) -> bool:
        """Whether the step has read a number for a scheduler and has not given it to one."""
        lost = self._metrics.lost()
        self._metrics.forget()
        return lost

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Within, the groups of optimizers are as they were before schedulers were called."""
        after = []
        for group, before in (each for groups in self._before.values() for each in groups):
            after.append((group, {key: group[key] for key in before if key in group}))
            group.update(before)
        try:
            yield
        finally:
            for group, values in after:
                group.update(values)

    def _reads(self, scheduler: Any, name: str) -> Any:
        if not self._running:
            if name == "get_last_lr" and _tells_rates(scheduler) and self._gives_rates(sys._getframe(2)):
                self._given.add(id(scheduler))
                return functools.partial(self._rates, scheduler)
            if name == "step":
                self._metrics.step_is_got(sys._getframe(2))
                return functools.partial(self._step, scheduler)
            if _has(scheduler, name) or len(self._guarded) >= _MOST_MISSED:
                self._give_up(scheduler, f"the step reads {name} of it")
            elif name not in self._guarded:
                self.missed.add(name)
        return None

    def _reads_optimizer(self, optimizer: Any, name: str) -> Any:
        if self._running or name not in _GROUPS or sys._getframe(2).f_code is _ZERO_GRAD:
            return None
        calls = [call for call in self.calls if _optimizer_of(call.scheduler) is optimizer]
        if calls and name == "param_groups" and self._gives_rates(sys._getframe(2)):
            self._given.update(id(call.scheduler) for call in calls)
            path, scheduler = calls[0].path, calls[0].scheduler
            groups = list(enumerate(object.__getattribute__(optimizer, name)))
            if all(type(group.get(key, 0)) in (int, float) for _, group in groups for key in RATES):
                return [
                    {key: Rate(path, scheduler, i, key, group[key]) for key in RATES if key in group}
                    for i, group in groups
                ]
        for call in calls:
            self._give_up(call.scheduler, f"the step reads {name} of the optimizer after the call")
        return None

    def _rates(self, scheduler: LRScheduler) -> Rate:
        self._running = True
        try:
            return Rate(self._paths[id(scheduler)], scheduler, None, "", scheduler.get_last_lr())
        finally:
            self._running = False

    def _step(self, scheduler: LRScheduler, *args: Any, **kwargs: Any) -> Any:
        metric = None
        if args or kwargs:
            metric = self._metrics.given(args, kwargs) if _metrics.takes_metric(scheduler) else None
            if metric is None:
                self._give_up(scheduler, "it is called with other arguments than one number that a plan can give")
        if id(scheduler) in self._given:
            self._give_up(scheduler, "the step returns a rate from before the call")
        if not self._may_be_late(scheduler):
            self._give_up(scheduler, "its caller names param_groups or handles errors, or a rate is a tensor")
        if not self._seen.watches(scheduler):
            return scheduler.step(*args, **kwargs)
        self.calls.append(Call(self._paths[id(scheduler)], scheduler, metric))
        optimizer = _optimizer_of(scheduler)
        if id(optimizer) not in self._before:
            self._plain(optimizer)
            self._before[id(optimizer)] = [(group, dict(group)) for group in optimizer.param_groups]
        if not self.rehearses:
            self._run(scheduler, metric)
        if any(group.keys() != before.keys() for group, before in self._before[id(optimizer)]):
            self._give_up(scheduler, "it adds entries to the groups of the optimizer")
        if id(optimizer) not in self._groups:
            self._groups.add(id(optimizer))
            self._seen.watch(optimizer, self._reads_optimizer)
        return None

    def _run(self, scheduler: LRScheduler, metric: _metrics.Metric | None) -> None:
        args: list[Any] = [] if metric is None else [metric.value]
        self._running = True
        try:
            with self._unrecorded():
                scheduler.step(*args)
        finally:
            self._running = False

    def _give_up(self, scheduler: LRScheduler, why: str) -> None:
        """Guards the numbers of a scheduler next time."""
        self._seen.leave(scheduler)
        self.given_up.setdefault(self._paths[id(scheduler)], why)
        if not any(one is scheduler for one in self.read):
            self.read.append(scheduler)

    def _may_be_late(self, scheduler: LRScheduler) -> bool:
        """Whether nothing shows that the call is late: the callers of ``step`` hold no group of an optimizer, and
        handle no error."""
        if self._handled():
            return False
        groups = object.__getattribute__(_optimizer_of(scheduler), "param_groups")
        if self._aliases or any(
            isinstance(value, torch.Tensor) for group in groups for key, value in group.items() if key != "params"
        ):
            return False
        frame: types.FrameType | None = sys._getframe(2)
        while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
            touching = _arithmetic.TOUCHING.intersection(frame.f_code.co_names)
            if touching and not (touching == {"param_groups"} and only_returns_groups(frame.f_code)):
                return False
            frame = frame.f_back
        return True


def none() -> Schedulers:
    """No schedulers."""
    return Schedulers([], False, contextlib.nullcontext, _nothing, frozenset(), Reads(), _nothing, _never)


def _nothing(*_: object) -> None: ...


def _never(*_: object) -> bool:
    return False


def _tells_rates(scheduler: LRScheduler) -> bool:
    """Whether ``get_last_lr`` gives what a scheduler keeps, and that are floats."""
    own = _introspect.own(scheduler) or {}
    tells: Any = type(scheduler).get_last_lr
    if "get_last_lr" in own or tells is not LRScheduler.get_last_lr:
        return False
    rates = own.get("_last_lr")
    return type(rates) is list and all(type(rate) is float for rate in rates)


def _optimizer_of(scheduler: LRScheduler) -> Optimizer:
    optimizer: Optimizer = object.__getattribute__(scheduler, "optimizer")
    return optimizer
