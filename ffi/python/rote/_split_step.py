"""A step of which only a part can be replayed, the head: what is before and behind it runs on the host, as it is
written (:mod:`._tails`)."""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import types
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from typing import Any

import torch

from . import _blocks, _early_slices, _memory, _moves, _results, _returns, _tails
from ._bridge import bridge
from ._executed_code import ExecutedCode
from ._module_regions import ModuleRegions
from ._recording import Recording
from ._step import RecordingRefused, Stats, Step, cause_of

# A first part is given up if all that ran before the read is more than so many times what its plan has.
_SLIGHT = 4
# The same of all that a call was seen to run, with what ops call in turn, and what passes leave out; looked at after so
# many replays, since calls may go several ways.
_SLIGHT_OF_SEEN = 16
_SETTLED = 8
# Recordings in a row that led to no plan, since each had other guards than the one before.
_PATIENCE = 5
_REMEDY = "; remedy: "
_MANY = 8  # a statement that runs more than this part of all ops is no preparation
_MOST_ATTEMPTS = 8
# In the place of the first of two places, or below 0: those of the step with moved statements.
_MOVED = -(1 << 30)
_FIRST_LOOKS = 2
_LOOKS = 4  # eager calls until one has written
_NO_OPS = "it runs no op there"
_MOST_UNFOLLOWED = 16  # recordings in a row of the whole step that were dropped, to see more in the next one
_DIFFER = "no two recordings in a row were made under the same guards"
_MOST_WITHOUT = 32  # calls until the modules become regions, if no plan has come of them
_MOST_IN_VAIN = 96  # calls until all run eagerly, if no plan has come of them
_looking = threading.Lock()
_SUMS = [each.name for each in fields(Stats) if each.type == "int" and each.name != "variants"]


def _sum(now: Stats, before: Stats) -> Stats:
    """Counters with those of earlier calls."""
    return replace(now, **{name: getattr(now, name) + getattr(before, name) for name in _SUMS})


class _Head(Step):
    """The first part of a step. It says of itself whether it can be replayed."""

    refused: str = ""
    is_refused_later = False  # in calls that go another way than those with a plan

    def __init__(self, function: Callable[..., Any], state: Any, **options: Any) -> None:
        super().__init__(function, state, **options)
        self._in_vain = 0  # recordings that have led to no plan
        self.stops: list[_tails.Stop] = []  # of the recording that has just ended
        self.moved: _moves.Moved | None = None  # of which statements have been moved behind this part
        self.original: Any = None  # what stands for this part and the rest, as they are written
        self.of_original: tuple[Any, Any] = (), {}  # its arguments in the present call
        self.state_of_original = self.state
        self.ran_original = False  # and not this part alone
        self.around_eager: AbstractContextManager[None] = nullcontext()
        self.ran = {}  # only code that runs is followed: what has the names of attributes in it may be the whole step

    def _run(self, args: Any, kwargs: Any) -> Any:
        with self.around_eager:
            return self._run_either(args, kwargs)

    def _run_either(self, args: Any, kwargs: Any) -> Any:
        if self.moved is None:
            return super()._run(args, kwargs)
        self.ran_original = True
        part, self.function = self.function, self.original
        self._given.append(self.of_original)
        try:
            return super()._run(*self.of_original)
        finally:
            self._given.pop()
            self.function = part

    def _run_beside(self, args: Any, kwargs: Any) -> Any:
        return super()._run(args, kwargs)

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        if self.moved is None or self.moved.hold(self.original, *self.of_original, self.state_of_original):
            return super()._recorded(args, kwargs)
        self._count_in_vain()
        return self._run(args, kwargs)

    def _refused(self, reason: str) -> None:
        if self.has_plan():
            self.is_refused_later = True
            super()._refused(reason)
        else:
            self.refused = self.refused or reason

    def _kept(self, outcome: dict[str, Any], recording: Recording) -> None:
        self.stops = recording.stops
        self._count_in_vain()

    def _count_in_vain(self) -> None:
        self._in_vain += 1
        if self._in_vain > _PATIENCE and not self.has_plan():
            self.refused = self.refused or _DIFFER

    def has_plan(self) -> bool:
        """Whether a recording has led to a plan."""
        return bool(self.results)

    def most_instructions(self) -> int:
        """How many the largest of its plans has."""
        return max(sum(self.plan_counts(variant).values()) for variant in self.results)


class SplitStep(Step):
    """What Rote keeps of a captured function that may be parted.

    The whole step is tried first. If it is refused, the last recording tells where a tail may begin (`_tails.places`).
    If no such place serves, one eager call tells behind which statement the step writes no more, before which one its
    ops begin, and which statements may be moved."""

    def __init__(
        self,
        function: Callable[..., Any],
        state: Any,
        *,
        tail: bool = True,
        looks: bool = False,
        regions: ModuleRegions | None = None,
        **options: Any,
    ) -> None:
        """``tail``: whether the function may be halved; ``looks``: it is halved behind the last statement that runs an
        op, whatever stands there; ``regions``: what is done with the modules that no replay calls; ``options``: those
        of :class:`Step`."""
        super().__init__(function, state, **options)
        self._options = options
        self._regions = regions
        self._begun: ModuleRegions | None = None  # the same, once there are some
        self._around_eager: AbstractContextManager[None] = nullcontext()  # what runs as it is written
        self._calls = 0  # so far, as long as they tell something
        self.keeps_prints = looks
        self._code = _returns.code_of(function) if tail else None
        self._stops: list[_tails.Stop] = []  # of the recording that has just ended
        self._why = ""  # the whole step is not replayed
        self._is_refused = False  # and cannot be
        self._why_not = ""  # the last first part that was given up was not replayed either
        self._in_vain = 0  # recordings in a row that have led to no plan
        self._unfollowed = 0  # and of those that were dropped before
        self._tails: list[int] = []  # the statements with which a tail may begin, the best first
        self._attempts: list[tuple[int, int]] = []  # to record the statements between two places, the next one last
        self._tried: set[tuple[int, int]] = set()
        self._hopeless: list[tuple[int, int]] = []  # which cannot be replayed for the reason that the step cannot
        self._at = (0, 0)  # the present attempt
        # The step with statements that only count behind those that write, by where these end.
        self._moved: dict[int, _moves.Moved] = {}
        self._front: _tails.Front | None = None
        self._looks = 0  # so many of the next calls run eagerly and tell where the step writes, until one has told it
        self._has_looked = False
        self._looked: _Statements | None = None  # the call that has written last so far
        self._first_looks = _FIRST_LOOKS if looks and self._code is not None else 0  # the same before anything is tried
        self._last_op = -1  # the last statement that has run an op in these calls
        self._takes_early = False  # slices of data
        self._head: _Head | None = None
        self._halves: _tails.Halves | None = None
        self._is_new = False  # no call has gone to the head so far
        self._has_shortened = False
        self._ops = 0  # that the whole step ran before its last stop
        self._seen_ops = 0  # that it ran in a call that was looked at
        self._earlier = Stats()  # of first parts that were given up

    # -- calls ----------------------------------------------------------------

    def call(self, args: Any, kwargs: Any) -> Any:
        result = self._call_parts(args, kwargs)
        if self._calls < _MOST_IN_VAIN:
            if self._has_told_nothing():
                return result
            self._calls += 1
            if self._calls in (_MOST_WITHOUT, _MOST_IN_VAIN):
                self._without_errors(self._judge_calls)
        return result

    def _has_told_nothing(self) -> bool:
        """Whether the last call has told nothing of what can be replayed."""
        head = self._head
        nothing = self.told_nothing or (head is not None and head.told_nothing)
        self.told_nothing = False
        if head is not None:
            head.told_nothing = False
        return nothing

    def _judge_calls(self) -> None:
        """Goes on without replays, where none has come of many calls."""
        if self.results or (self._head is not None and self._head.has_plan()):
            return
        self._begin_regions()
        if self._calls == _MOST_IN_VAIN and not (self._agrees or self._off):
            self._give_up()
            self._attempts, self._off = [], True
            self._end_looks()
            super()._refused(self._why or _DIFFER)

    def _run(self, args: Any, kwargs: Any) -> Any:
        with self._around_eager:
            return super()._run(args, kwargs)

    def _call_parts(self, args: Any, kwargs: Any) -> Any:
        with self._lock:
            head, halves = self._head, self._halves
            if self._looks or self._first_looks:
                return self._look(args, kwargs)
            if head is None or halves is None:
                return super().call(args, kwargs)
            if self._host is not None:
                self._host(*args, **kwargs)
            if self._front is not None:
                with self._around_eager:
                    falls, left = self._front.run(*args, **kwargs)
                if not falls:
                    return left
                given = args, kwargs
                args, kwargs = self._front.arguments(left)
                if not head.has_plan():
                    head.refused = head.refused or _cut_graph(kwargs, *given)
            block = kwargs[self._front.manager] if self._front is not None and self._front.manager else None
            if block is not None and block.may_swallow:
                return self._run_rest(head, args, kwargs)
            head.of_original, head.ran_original = (args, kwargs), False
            try:
                result = head.call(*halves.begin(args, kwargs))
            except BaseException as error:
                if not head.ran_original:
                    if head.moved is not None:
                        head.moved.make_up(error, head.function, head.original, args, kwargs)
                    if block is not None:
                        block.fail()
                raise
            finally:
                head.of_original = (), {}  # which may hold a batch
            falls, left = (False, ()) if head.ran_original else result
            if block is not None and not (falls or head.ran_original):  # it has returned from within the block
                block.__exit__(None, None, None)
            if not head.ran_original:
                with self._around_eager:
                    result = halves.end(left, args, kwargs) if falls else left
            if self._is_new or self._ops or self._seen_ops or not head.has_plan():
                self._without_errors(lambda: self._judge(head, halves, left if falls else ()))
            if head.is_refused_later and head is self._head:
                head.is_refused_later = False
                self._without_errors(lambda: self._shorten(head))
            return result

    def _run_beside(self, args: Any, kwargs: Any) -> Any:
        return super()._run(args, kwargs)  # with all modules as they are

    def _run_rest(self, head: _Head, args: Any, kwargs: Any) -> Any:
        """Runs what is behind a front as it is written, since the manager of its block may swallow an error: the head
        would know nothing of that."""
        self._earlier = _sum(self._earlier, Stats(calls=1, fallbacks=1))
        with self._around_eager:
            result = head.original(*args, **kwargs)
        head.refused = "the manager of the block there may swallow errors"
        self._without_errors(self._split)
        return result

    def _judge(self, head: _Head, halves: _tails.Halves, left: tuple[Any, ...]) -> None:
        """Goes on to other halves, if these do not serve. ``left``: what the head has given the tail."""
        if head.ran_original and not head.refused:
            return
        is_new, self._is_new = self._is_new, False
        if is_new and (anew := _found_anew(halves, left)):
            self._halve(*self._at, anew)
        elif head.refused or self._is_slight(head):
            if head.refused and cause_of(head.refused) == cause_of(self._why):
                self._hopeless.append(self._at)
            self._split()

    def _shorten(self, head: _Head) -> None:
        """Tries a first part that ends earlier, once: it may serve all ways that calls go. If it does not, the present
        one is taken again."""
        begin, end = self._at
        last = 1 << 30 if end == _tails.LAST else end
        tails = [] if self._code is None or begin < 0 else _tails.places(self._code, head.stops)
        shorter = [(begin, tail) for tail in tails if max(begin, 0) < tail < last]
        if shorter and not self._has_shortened:
            self._has_shortened = True
            self._tried.discard(self._at)
            self._attempts = [self._at, *shorter[::-1]]
            self._split()

    def _without_errors(self, do: Callable[[], None]) -> None:
        """Does what the step itself knows nothing of, and which must not stop it."""
        try:
            do()
        except RecordingRefused:
            raise
        except Exception as problem:
            self._give_up()
            self._attempts = []
            self._end_looks()
            self._failed(problem)

    def _is_slight(self, head: _Head) -> bool:
        """Whether the first part has little of what the step does. It is asked when there is a plan. If it has enough
        and begins behind a front, modules that the front calls become regions."""
        if not head.has_plan():
            return False
        if ops := self._ops:
            self._ops = 0
            return sum(head.plan_counts().values()) * _SLIGHT < ops
        if not self._seen_ops or head.stats.replays < _SETTLED:
            return False
        ops, self._seen_ops = self._seen_ops, 0
        if head.most_instructions() * _SLIGHT_OF_SEEN < ops:
            return True
        if self._front is not None:
            self._begin_regions()
        return False

    def _look(self, args: Any, kwargs: Any) -> Any:
        """Runs a call eagerly, and finds out where it writes, if no other call is looked at: ops are counted once."""
        if not _looking.acquire(blocking=False):
            return super().call(args, kwargs)
        try:
            return self._look_alone(args, kwargs)
        finally:
            _looking.release()

    def _look_alone(self, args: Any, kwargs: Any) -> Any:
        whole = self.function
        try:
            statements = _Statements(self, looks_for_slices=bool(self._first_looks) and not self._takes_early)
            marked = _tails.marked(whole, statements.mark) or whole
        except Exception:  # where there is no bridge to PyTorch, nothing is recorded either
            self._end_looks()
            return super().call(args, kwargs)
        self._earlier = _sum(self._earlier, Stats(calls=1, fallbacks=1))
        if self._host is not None:
            self._host(*args, **kwargs)
        self._given.append((args, kwargs))
        try:
            self.function = marked
            result = self._run(args, kwargs)
        finally:
            self.function = whole
            self._given.pop()
            statements.close()
        self._without_errors(lambda: self._look_at(statements))
        return result

    def _end_looks(self) -> None:
        self._looks, self._first_looks, self._looked = 0, 0, None

    def _look_at(self, statements: _Statements) -> None:
        """Finds out from a call where the step may be parted."""
        statements.check()
        self._seen_ops = max(self._seen_ops, statements.ops())
        whole = self.function
        if self._first_looks:
            self._look_for_end(statements)
            return
        if not statements.ops():  # yet, as in a step that waits for enough samples
            self.told_nothing = True
            return
        self._looks -= 1
        if self._looked is None or statements.last_that_writes() > self._looked.last_that_writes():
            self._looked = statements
        behind = self._looked.last_that_writes() + 1
        if not self._looks or (behind and not self._looked.leaves_out(behind)):  # a call may do nothing
            statements, self._looks, self._looked = self._looked, 0, None
            fronts = [each for each in statements.fronts() if not _tails.is_declaration(whole, each)]
            end = _tails.end_of_ops(whole, behind) if behind else 0
            tails = [*self._tails, end, behind] if behind else self._tails
            every = [(0, end), (0, behind), *((front, tail) for front in fronts for tail in tails or [_tails.LAST])]
            every[1:1] = self._moving(statements, fronts, behind)
            if shorter := statements.behind_step(behind):
                more = [(0, shorter), *((front, shorter) for front in fronts if front < shorter)]
                every[1:1] = [*self._moving(statements, fronts, shorter), *more]
            self._attempts = [*dict.fromkeys(every)][:_MOST_ATTEMPTS][::-1]
            self._split()

    def _moving(self, statements: _Statements, fronts: list[int], behind: int) -> list[tuple[int, int]]:
        """Attempts with the statements moved that may run behind a place."""
        moved = statements.moved(self.function, behind)
        if moved is None or self._moved.setdefault(moved.begin, moved) is not moved:
            return []
        return [(_MOVED, moved.begin), *((-front, moved.begin) for front in fronts if front <= moved.first)]

    def _look_for_end(self, statements: _Statements) -> None:
        """Finds out where the step has run its last op."""
        self._first_looks -= 1
        self._last_op = max(self._last_op, statements.last_that_runs_ops())
        if not self._first_looks and not self._takes_early and (made := statements.taking_early(self.function)):
            self.function, self._takes_early = made, True
            self._code = _returns.code_of(made)
            self._first_looks, self._last_op = 1, -1
        if not self._first_looks:
            end = _tails.begin_of_host(self.function, self._last_op + 1)
            self._attempts = [(0, end)] if end else []
            if end and not self._halve_next():
                self._give_up()

    # -- halves ---------------------------------------------------------------

    def _kept(self, outcome: dict[str, Any], recording: Recording) -> None:
        self._stops = recording.stops
        self._in_vain = 0 if "variant" in outcome or outcome["outcome"] == "refused" else self._in_vain + 1
        if self._in_vain == _PATIENCE and self._code is not None and not self._why and not self._agrees:
            self._without_errors(lambda: self._begin_halves(_DIFFER, self._places_of_tails()))

    def _has_followed(self, recording: Recording) -> bool:
        followed = super()._has_followed(recording)
        self._unfollowed = 0 if followed else self._unfollowed + 1
        if self._unfollowed == _MOST_UNFOLLOWED and self._code is not None and not self._why and not self._agrees:
            self._stops = recording.stops
            self._without_errors(lambda: self._begin_halves(_DIFFER, self._places_of_tails()))
        return followed

    def _places_of_tails(self) -> list[int]:
        return [] if self._code is None else _tails.places(self._code, self._stops)

    def _failed(self, problem: Exception) -> None:
        code, self._code = self._code, None  # it is not the step that stands in the way
        try:
            super()._failed(problem)
        finally:
            self._code = code

    def _refused(self, reason: str) -> None:
        if self._code is None or self._why or self._agrees:
            self._stays_eager(self._with_why_not(reason))
            return
        self._is_refused = True
        self._begin_halves(reason, self._places_of_tails())

    def _begin_halves(self, why: str, tails: list[int]) -> None:
        self._why, self._tails = why, tails
        self._ops = max((stop.ops for stop in self._stops), default=0)
        self._attempts = [(0, tail) for tail in reversed(tails)]
        self._split()

    def _split(self) -> None:
        """Halves the step at the next place. If there is none, the step stays whole, and is refused."""
        if self._halve_next():
            return
        self._give_up()
        if not self._why:  # nothing has been tried but to leave out what stands behind the last op
            return
        if not self._has_looked and self._code is not None and _tails.has_more_than_one(self._code):
            self._has_looked, self._looks = True, _LOOKS
        elif self._is_refused:
            self._stays_eager(self._with_why_not(self._why))
        else:
            self._begin_regions()

    def _stays_eager(self, reason: str) -> None:
        self._begin_regions()
        super()._refused(reason)

    def _begin_regions(self) -> None:
        """The modules that the step calls become regions, since no replay calls them."""
        if self._regions is not None and self._begun is None:
            self._begun = self._regions
            self._around_eager = self._begun
            if self._head is not None:
                self._head.around_eager = self._begun
            self._begun.begin(self.function, self.state.modules)

    def _with_why_not(self, reason: str) -> str:
        """A reason why the whole step is refused, with the reason why the last first part was."""
        if self._head is not None or cause_of(reason) != cause_of(self._why):
            return reason
        why, mark, remedy = reason.partition(_REMEDY)
        return why + self._why_not + mark + remedy

    def _halve_next(self) -> bool:
        """Halves the step at the next place, if there is one."""
        while self._attempts:
            attempt = self._attempts.pop()
            if attempt not in self._tried and not any(_holds(attempt, other) for other in self._hopeless):
                self._tried.add(attempt)
                if self._halve(*attempt):
                    return True
        return False

    def _halve(self, begin: int, end: int, anew: Set[str] = frozenset()) -> bool:
        """Records the statements between two places, if the step can be parted there."""
        self._give_up()
        at = begin, end
        function, front = self.function, None
        try:
            moved = self._moved[end] if begin < 0 else None
            original = function
            if moved is not None:
                function, begin = moved.function, 0 if begin == _MOVED else -begin
            if begin:
                front = _tails.front(function, begin)
                whole = front and _tails.front(original, begin)
                if front is None or whole is None or {*front.names} != {*whole.names}:
                    return False
                function, original = front.rest, whole.rest
            end = end - begin + (front.begin if front else 0) if end != _tails.LAST else end
            halves = _tails.halves(function, end, anew)
        except Exception as problem:  # of a source that is not as the code says
            logging.getLogger("rote.record").info("%s cannot be halved: %s", self.name(), problem)
            return False
        if halves is None:
            return False
        head = _Head(halves.head, self.given_state, **{**self._options, "plans": self.plans, "host": None})
        head.keeps_prints = self.keeps_prints
        where = f"until {halves.line or 'the end'}"
        if moved is not None:
            head.moved, head.state_of_original = moved, self.state
        head.original = original
        head.around_eager = self._around_eager
        head.label = f"{self.name()} ({where if front is None else f'{front.line} {where}'})"
        self._front, self._head, self._halves, self._is_new = front, head, halves, True
        self._at = at
        logging.getLogger("rote.record").info("%s is recorded without the rest, for: %s", head.label, self._why)
        return True

    def _give_up(self) -> None:
        """Forgets the present halves."""
        if self._head is not None and self._halves is not None:
            self._earlier = _sum(self._earlier, self._head.stats)
            if self._head.refused:
                self._why_not = f" (and {self._head.label} alone: {self._head.refused.partition(_REMEDY)[0]})"
        self._front = self._head = self._halves = None

    # -- what people look at ----------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters of the whole step and of its first part, as of now."""
        own = _sum(super().stats, self._earlier)
        if self._begun is not None:
            own = replace(own, regions=self._begun.stats)
        if self._head is None or self._halves is None:
            return own
        front = "" if self._front is None else self._front.line
        return replace(_sum(self._head.stats, own), front=front, tail=self._halves.line, regions=own.regions)

    def explain(self) -> str:
        """The report of what is replayed, and from which line on the step runs as it is written."""
        regions = "" if self._begun is None else self._begun.explain()
        if self._head is None or self._halves is None:
            return f"{super().explain()}\n{regions}" if regions else super().explain()
        before = [] if self._front is None else [f"before {self._front.line}"]
        where = " and ".join([*before, *([f"from {self._halves.line} on"] if self._halves.line else [])])
        why = self._why or _NO_OPS
        return f"{self._head.explain().rstrip()}\n\n{where}, the step runs as it is written: {why}\n{regions}"

    def plan_counts(self, variant: int | None = None) -> dict[str, int]:
        """Instructions of the variant that ran last: local, views, collectives."""
        return super().plan_counts(variant) if self._head is None else self._head.plan_counts(variant)


def _holds(attempt: tuple[int, int], other: tuple[int, int]) -> bool:
    """Whether the statements between two places are known to be among those between two others, in the same order."""
    (begin, end), (first, last) = attempt, other
    return 0 <= begin <= first and (end == _tails.LAST or _tails.LAST != last <= end)


def _cut_graph(values: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Why a part that takes these values, in a call with these arguments, cannot be recorded by itself: it takes a
    graph that the part before it has made. Empty if there is none."""
    given = [*args, *kwargs.values()]
    for name, value in values.items():
        with_graph = isinstance(value, torch.Tensor) and value.requires_grad and not value.is_leaf
        if with_graph and all(value is not each for each in given):
            return f"takes {name}, which carries an autograd graph from the part before"
    return ""


def _has_graph(value: Any) -> bool:
    """Whether a value is a tensor that was computed of others that require gradients, or holds one."""
    if isinstance(value, torch.Tensor):
        return value.grad_fn is not None
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(isinstance(each, torch.Tensor) and each.grad_fn is not None for each in inner)


def _found_anew(halves: _tails.Halves, left: tuple[Any, ...]) -> set[str]:
    """The variables whose values no plan can give back, and which the tail can find by the names that the step uses: no
    replayed step puts such an object anywhere."""
    values = zip(halves.names, left, strict=False)
    return {name for name, value in values if name in halves.chains and not _results.can_give(value, set())}


class _Statements:
    """What each of the outermost statements of a step does in one call."""

    def __init__(self, step: Step, looks_for_slices: bool) -> None:
        self._tensors = [tensor for _, tensor in step.state.tensors()]
        self._marks: list[tuple[int, int, list[int], list[Any]]] = []
        self._problem: Exception | None = None
        source = _blocks.source_of(step.function)
        self._body = [] if source is None else source[2]
        self._moves = None if source is None else _moves.Moves(source[0], source[2])
        self._slices = _early_slices.EarlySlices(source[0], source[2]) if source and looks_for_slices else None
        self._executed = ExecutedCode()  # by the present one
        self._place = -1
        self._older: set[int] | None = None  # tensors with a graph that were there before
        self._first_graph = -1  # the first statement that has made another
        bridge().count_ops()

    def mark(self, place: int) -> None:
        """A statement is about to run, in the frame that calls this; or, below 0, the call has ended."""
        try:
            self._note_code()
            self._mark(place, sys._getframe(1) if place >= 0 else None)
            self._place = place
            if place >= 0:
                self._executed = ExecutedCode()
                self._executed.__enter__()
        except Exception as problem:  # which is not the step's
            self._problem = self._problem or problem

    def _note_code(self) -> None:
        """Notes whether the last statement has called code of the script's."""
        self._executed.__exit__()
        if self._moves is not None and self._place >= 0 and self._executed.codes != {}:
            self._moves.calling.add(self._place)

    def _mark(self, place: int, frame: types.FrameType | None) -> None:
        variables = None if frame is None else {**frame.f_globals, **frame.f_locals}
        if self._moves is not None:
            self._moves.mark(place, variables)
        if self._slices is not None and variables is not None:
            self._slices.see(place, variables)
        if frame is not None and self._first_graph < 0:
            made = {id(each) for each in frame.f_locals.values() if _has_graph(each)}
            self._older = made if self._older is None else self._older
            self._first_graph = self._place if made - self._older else -1
        versions = [_memory.version_of(tensor) for tensor in self._tensors]
        self._marks.append((place, bridge().ops_so_far(), versions, [tensor.grad for tensor in self._tensors]))

    def close(self) -> None:
        """The call has ended."""
        self.mark(-1)
        if self._moves is not None:
            self._moves.close()
        bridge().ops_counted()

    def check(self) -> None:
        """Raises what has gone wrong while the step ran."""
        if self._problem is not None:
            raise self._problem

    def last_that_writes(self) -> int:
        """The last statement after which tensors of the state, or their gradients, were others; below 0 if there is
        none."""
        last = -1
        for (place, _, versions, gradients), (_, _, now, later) in itertools.pairwise(self._marks):
            replaced = (two is not None and one is not two for one, two in zip(gradients, later, strict=True))
            if versions != now or any(replaced):
                last = place
        return last

    def last_that_runs_ops(self) -> int:
        """The last statement that has run an op; below 0 if none has."""
        ran = [place for (place, before, *_), (_, after, *_) in itertools.pairwise(self._marks) if after > before]
        return max(ran, default=-1)

    def ops(self) -> int:
        """How many ops the call has run, with those that ops call."""
        return max((ops for _, ops, *_ in self._marks), default=0)

    def leaves_out(self, behind: int) -> bool:
        """Whether another call may write behind that place, and behind a statement that may be moved."""
        return self._moves is not None and self._moves.stand_before_ops(behind)

    def moved(self, function: Any, behind: int) -> _moves.Moved | None:
        """The step with statements that only count moved behind those that write."""
        return None if self._moves is None else _moves.moved(function, self._moves, behind)

    def taking_early(self, function: Any) -> Any:
        """The step with slices of data taken at its begin; None if there is nothing to take."""
        return None if self._slices is None else self._slices.taken(function)

    def behind_step(self, behind: int) -> int:
        """Where the first statement behind an optimizer's step, and before a place, calls code of the script's, such as
        that of averages of the weights, with counters of its own; 0 if none does."""
        steps = (place for place, each in enumerate(self._body[:behind]) if _tails.calls_step(each))
        first = next(steps, behind)
        calling = set() if self._moves is None else self._moves.calling
        return min((place for place in calling if first < place < behind), default=0)

    def fronts(self) -> list[int]:
        """Before which statements the work may begin: the first two that run an op (the first may make a batch), the
        first that does more than to take parts, the first that makes a graph, the first that runs many, and the one
        that runs most."""
        ops = [(place, later - before) for (place, before, *_), (_, later, *_) in itertools.pairwise(self._marks)]
        many, most = sum(each for _, each in ops) // _MANY, max((each for _, each in ops), default=1) - 1
        some = [place for place, each in ops if each]
        more = [place for place in some if not _early_slices.only_takes(self._body[place])]
        found = [
            *some[:2],
            *more[:1],
            self._first_graph,
            *(next((place for place, each in ops if each > least), 0) for least in (many, most)),
        ]
        return [place for place in dict.fromkeys(found) if place > 0]
