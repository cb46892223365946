"""A step that is recorded once and replayed from then on: its session, its calls, its counters."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import tempfile
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Sequence
from ctypes import addressof, byref, c_int, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from . import (
    _array_arguments,
    _bridge,
    _decisions,
    _difference,
    _float_arguments,
    _found,
    _ranks,
    _results,
    _returns,
    _state,
    _survey,
    _unread,
    _verify,
    _wrappers,
)
from ._carried import without_values
from ._executed_code import Codes, ExecutedCode
from ._naming import flatten
from ._native import (
    SESSION_CALL,
    SESSION_CALL_WITHIN,
    c_text,
    check,
    drop_object,
    error,
    lib,
    object_in,
    take_object,
)
from ._numbers import EAGER, REPLAYED
from ._record import uncollected
from ._recording import MoreStateError, Recording
from ._walk import TooMuchError
from .propagation import within_a_step

# Replays of a plan before the one that runs as all later ones do: one without an
# arena, one that runs what is kept.
_UNSETTLED = 2

# In a refusal: one warning a cause, whatever the values.
_VALUES = re.compile(r" \(.*? -> .*?\)| \(once .*?\)|, which was .*? in one call and .*? in the next")
# Recordings in a row in which code ran that no earlier call had run.
_MOST_OTHERS = 8
# Calls that are left eager while a wrapper of the model may still begin in them.
_MOST_BEGINNINGS = 4
# Calls in a row that are left eager while a wrapper of the model is in the middle of something.
_MOST_WAITS = 8
# How often in a row something of Rote's own may go wrong before nothing more is tried.
_MAX_FAILURES = 3

_recording = threading.RLock()
_DISTRIBUTED = dist.is_available()


def _warn(text: str, level: int) -> None:
    """A warning at the user's line; where filters make errors of warnings a log entry, for the step has run or will."""
    try:
        warnings.warn(text, stacklevel=level + 1)
    except Warning:
        logging.getLogger("rote").warning("%s", text)


def cause_of(reason: str) -> str:
    """The reason of a refusal without values."""
    return _VALUES.sub("", reason)


def _leaves(args: Any, kwargs: Any) -> list[tuple[str, Any]]:
    """The leaves of the arguments of a call, by their paths."""
    found: list[tuple[str, Any]] = []
    with contextlib.suppress(Exception):  # of objects that may be anything
        flatten("args", args, found)
        flatten("kwargs", kwargs, found)
    return found


class _Running(threading.local):
    """How many captured functions this thread runs, one within the other: a kernel in Python may call some too."""

    depth = 0


_running = _Running()


def _default_group() -> Any:
    """The default process group, or None."""
    return dist.distributed_c10d._world.default_pg if _DISTRIBUTED else None


def _within() -> bool:
    """Whether a call made now may be one that other ranks do not make, since
    they replay a captured function around it."""
    return _running.depth > 0 or torch._C._current_graph_task_id() != -1  # a hook of a backward pass


# The specs and the classes of what a stored plan gives.
_Trusted = tuple[list[_results.StoredSpec | None], _results.Classes]


class _Untrusted(Exception):
    """A stored plan that can be used only after a recording."""


class RecordingRefused(RuntimeError):
    """A step cannot be replayed: the op, the source line and the remedy."""


class VerificationError(RuntimeError):
    """A replay differs from eager; names the first tensor that does."""


@dataclass(frozen=True)
class Stats:
    """Counters of a captured function."""

    calls: int = 0
    recordings: int = 0
    replays: int = 0
    altered: int = 0  # of the replays: with altered collectives, all ranks agreed
    kept: int = 0  # of the replays: with eager's collectives, since not all ranks could follow
    exchanges: int = 0  # how often the ranks compared their altered collectives
    verified: int = 0  # of the calls: replayed beside eager
    fallbacks: int = 0
    variants: int = 0
    guard_misses: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)
    front: str = ""  # where the recorded part begins, as file:line, if the step runs as it is written before that
    tail: str = ""  # where the step's tail begins, as file:line: what runs as it is written after each replay
    backward: Stats | None = None  # of a region: those of its backward
    regions: dict[str, Stats] = field(default_factory=dict)  # modules that became regions by themselves, by their paths


def _temporary_plans(owner: object) -> tuple[str, Any]:
    """A directory for plans that lasts as long as its owner, and what removes it."""
    plans = tempfile.mkdtemp(prefix="rote-plans-")
    return plans, weakref.finalize(owner, shutil.rmtree, plans, ignore_errors=True)


class Step:
    """What Rote keeps of a captured function."""

    #: Whether only a part of a step is captured: gradients, and hooks of modules and tensors, are then outside.
    is_region = False
    #: Whether calls in which the step prints stay eager.
    keeps_prints = False

    def __init__(
        self,
        fn: Callable[..., Any],
        state: Any,
        *,
        plans: str | Path | None,
        strict: bool,
        max_variants: int,
        ignore: Sequence[str],
        passes: str | Sequence[str],
        verify: int = 0,
        verify_every: int = 0,
        agree: bool = False,
        host: Callable[..., object] | None = None,
        trust_plans: bool = False,
        propagation: str = "torch",
    ) -> None:
        if not callable(fn):
            raise TypeError(f"rote.capture takes a function, not a {type(fn).__name__}")
        if verify < 0:
            raise ValueError(f"verify= must be 0 or more, it is {verify}")
        if verify_every < 0:
            raise ValueError(f"verify_every= must be 0 or more, it is {verify_every}")
        if host is not None and not callable(host):
            raise TypeError(f"host= must be a function, it is {type(host).__name__}")
        if propagation not in ("torch", "rote"):
            raise ValueError(f'propagation={propagation!r}: expected "torch" or "rote"')
        if max_variants < 1:
            raise ValueError(f"max_variants= must be at least 1, it is {max_variants}")
        if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
            raise TypeError("ignore= takes a list of names")
        self.passes = passes if isinstance(passes, str) else ",".join(passes) or "none"
        self.function = fn
        self.given_state = state
        self.decisions = None if self.is_region else _decisions.Decisions(fn)
        self.float_arguments = None if self.is_region else _float_arguments.FloatArguments(fn)
        self.array_arguments = None if self.is_region else _array_arguments.ArrayArguments(fn)
        self._given: list[tuple[Any, Any]] = []  # the arguments of the calls that are handled, one within the other
        self.unread = _unread.Unread()
        self.found = _found.Found()
        self.state = self._state_now()
        self.label = ""  # how people know it, if not by the function's name
        self._strict = strict
        self._verify = verify + _UNSETTLED if verify else 0
        self._verify_every = verify_every
        self._until = verify_every  # calls until the next one that runs beside eager
        self._verified_calls = 0
        self._stopped = False
        self._agree = agree
        self._host = host
        self._trust = trust_plans
        self._around = within_a_step if propagation == "rote" else contextlib.nullcontext
        self.ignore = tuple(ignore)
        self._max_variants = max_variants
        self._warned: set[str] = set()
        self._unguarded: list[str] = []  # where the walk over what is in reach stopped
        self._failures = 0  # in a row, of Rote's own
        self.ran: Codes | None = None  # the code that calls ran, where there is too much in reach to follow all
        self._others = 0  # recordings in a row in which other code ran
        self._nested_calls = 0  # made within captured functions
        self._beginnings = 0  # calls that a wrapper of the model may have used to begin
        self._waits = 0  # calls in a row that a wrapper was not ready for
        self.told_nothing = False  # the last call: it was not recorded, since that of another step was, or ran no op
        self._sees_first = True  # no call has been handled yet
        self._survey: _survey.Survey | None = None  # what the last recording has found, if it waits for another one
        self._off = False  # for good: every call runs eagerly
        self.kept_tensors = False  # the last recording left tensors that outlived it
        self.read_schedulers: list[Any] = []  # whose numbers the step has read
        self._given_up: dict[str, str] = {}  # why a replay cannot call these, by their paths
        self.hides_reads = False  # the step gets at attributes of its optimizers without naming them
        self.missed_by_schedulers: frozenset[str] = frozenset()  # what the step has asked them for, and they have not
        self.read_counters: set[str] = set()  # paths of numbers that the step does more with than count
        self._replayed = False  # whether the last call was replayed
        self._beside = False  # a replay runs beside eager, which calls schedulers itself
        self._acts: list[Callable[[], Any]] = []  # what the last replay leaves to do when it has ended
        self.results: dict[int, _results.Results] = {}
        if plans is None:
            plans, self._temporary = _temporary_plans(self)
        else:
            self._temporary = None
        self.plans = str(plans)
        self.session: Any = None
        self._owner: Any = None  # frees the session when it goes
        self._group: weakref.ref[Any] | None = None  # the default process group at the last call
        self._agrees = False  # with the other ranks, about every call
        self._lock = threading.RLock()
        self.variant = c_uint32()
        self._slot = c_void_p()
        self._places = addressof(self.variant), addressof(self._slot)

    # -- calls ----------------------------------------------------------------

    def call(self, args: Any, kwargs: Any) -> Any:
        """Replays a call, or runs the function and records it."""
        with self._lock:
            if self.decisions is None:
                return self._handle(args, kwargs)
            self._given.append((args, kwargs))
            try:
                return self._handle(args, kwargs)
            finally:
                self._given.pop()

    def _handle(self, args: Any, kwargs: Any) -> Any:
        if self._host is not None:
            self._host(*args, **kwargs)
        if self.session is None and not self._off:
            self._begin()
        if self._off:
            return self._run(args, kwargs)
        group, known = _default_group(), self._group
        if (group is not None) if known is None else (group is None or known() is not group):
            self._enter_world()
        if self.decisions is not None and (seen := self.decisions.seen(args, kwargs)) is not None:
            args, kwargs = seen
        if self.float_arguments is not None and (seen := self.float_arguments.seen(args, kwargs)) is not None:
            args, kwargs = seen
        if self.array_arguments is not None and (seen := self.array_arguments.seen(args, kwargs)) is not None:
            args, kwargs = seen
        if (carried := self.unread.carried).places:
            kwargs = carried.with_values(kwargs)
        if (self._verify > 0 or self._verify_every > 0) and not self._stopped and not self._nested():
            self._until -= 1
            if self._verify > 0 or self._until <= 0 < self._verify_every:
                return self._verified(args, kwargs)
        return self._call(args, kwargs)

    def given(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with which the caller has made the call that is handled."""
        return self._given[-1] if self._given else (args, without_values(kwargs))

    def _call(self, args: Any, kwargs: Any) -> Any:
        call = SESSION_CALL_WITHIN if self._agrees and _within() else SESSION_CALL
        depth = _running.depth
        self._nested_calls += depth > 0
        _running.depth = depth + 1
        try:
            status = _bridge.bridge().call_session(call, self.session, args, kwargs, *self._places)
            if self._agrees:
                self._notice()
            self._replayed = status == REPLAYED
            if self._replayed:
                return self._deliver(args, kwargs)
        except BaseException:  # a signal's: the step is done, and leaves all that it leaves
            if self._slot.value is not None:
                self._deliver(args, kwargs)
            raise
        finally:
            _running.depth = depth
        if status < 0:
            self._leave(args, kwargs)
        if check(status) == EAGER:
            self._notice()
            return self._run(args, kwargs)
        return self._recorded(args, kwargs)

    def _leave(self, args: Any, kwargs: Any) -> None:
        """Puts gradients where eager has left them when its step fails as the last replay did."""
        text = lib.rote_session_left(self.session, byref(self._slot))
        if text is None:
            return
        tensors, left = take_object(self._slot), json.loads(text)
        results = self.results.get(left["variant"])
        if results is not None:
            own = functools.partial(self._argument, args=args, kwargs=kwargs)
            results.leave(dict(zip(left["made"], tensors, strict=True)), left["nothing"], own)

    def _run(self, args: Any, kwargs: Any) -> Any:
        """Runs the function itself."""
        _running.depth += 1
        try:
            args, kwargs = self.given(args, kwargs)
            with self._around():
                return self.function(*args, **kwargs)
        finally:
            _running.depth -= 1

    def _notice(self) -> None:
        notice = lib.rote_session_notice(self.session)
        if notice is not None:
            _warn(f"rote: {notice.decode()}", 5)

    def _deliver(self, args: Any, kwargs: Any) -> Any:
        results = self.results[self.variant.value]
        if results.simply is not None:
            return results.simply(_bridge.bridge().take(self._places[1]))
        tensors = object_in(self._slot)
        self._acts = results.acts(tensors)
        try:
            result = results.deliver(tensors, lambda path: self._argument(path, args, kwargs))
        except BaseException:
            results.deliver(tensors, lambda path: self._argument(path, args, kwargs))
            raise
        finally:
            drop_object(self._slot)
        if self._beside:
            return result
        self._act()
        return _returns.plain(result) if results.gives_rates else result

    def _act(self) -> None:
        """Counts, and calls schedulers, as the step that was just replayed does."""
        acts, self._acts = self._acts, []
        for act in acts:
            act()

    def _nested(self) -> bool:
        """Whether other ranks may not make this call, or a recording sees it."""
        modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
        return _within() if _ranks.world_size() > 1 else bool(modes)

    @staticmethod
    def _argument(path: str, args: Any, kwargs: Any) -> Any:
        return dict(_leaves(args, kwargs))[path]

    # -- what people look at ----------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters, as of now."""
        if self.session is None:
            return Stats()
        text = lib.rote_session_stats(self.session)
        if text is None:
            raise RuntimeError(f"rote: {error()}")
        return Stats(**json.loads(text), verified=self._verified_calls)

    def explain(self) -> str:
        """What was erased, collectives and redistributions with their causes,
        guards, misses and refusals."""
        if self.session is None:
            return "not called yet"
        text = lib.rote_session_explain(self.session)
        if text is None:
            raise RuntimeError(f"rote: {error()}")
        stopped = "".join(f"\n  {where}" for where in self._unguarded)
        return str(text.decode()) + (f"\nvalues beyond these places are not guarded:{stopped}\n" if stopped else "")

    def plan_counts(self, variant: int | None = None) -> dict[str, int]:
        """Instructions of a variant, or of that which ran last: local, views, collectives."""
        if not self.results:
            return {}
        last = max(self.results) if self.variant.value not in self.results else self.variant.value
        variant = last if variant is None else variant
        return dict(json.loads(lib.rote_session_variant(self.session, variant))["counts"])

    # -- set-up -----------------------------------------------------------------

    def _begin(self) -> None:
        """Opens the session. Where that cannot be done, the step runs eagerly."""
        try:
            _bridge.bridge()
        except Exception as problem:
            self._off = True
            self._refused(str(problem).removeprefix("rote: "))
            return
        try:
            self._open(self.plans)
        except RuntimeError as problem:
            # The directory, or what people have asked for: that fails elsewhere too.
            plans, temporary = _temporary_plans(self)
            self._open(plans)
            self.plans, self._temporary = plans, temporary
            _warn(f"{problem}; plans are kept in a temporary directory", 5)

    def _open(self, plans: str) -> None:
        world, rank = 1, 0
        if dist.is_available() and dist.is_initialized():
            world, rank = dist.get_world_size(), dist.get_rank()
        function, code = type(self.function).__qualname__, None
        with contextlib.suppress(Exception):
            function = str(getattr(self.function, "__qualname__", function))
        with contextlib.suppress(Exception):
            code = getattr(self.function, "__code__", None)
        if isinstance(code, types.CodeType):
            function = f"{Path(code.co_filename).name}:{function}"
        function = self.label or function
        session = lib.rote_session_new(
            c_text(function),
            c_text(f"torch {torch.__version__}"),
            world,
            rank,
            os.fsencode(plans),
            self._max_variants,
            c_text(self.passes),
        )
        if session is None:
            raise RuntimeError(f"rote: {error()}")
        owner = c_void_p()
        check(lib.rote_session_owner(session, byref(owner)))
        self.session, self._owner = session, take_object(owner)
        self._enter_world()

    def _enter_world(self) -> None:
        """Follows the job: there is a default process group, another one, or none any more."""
        group = _default_group()
        self._group = None if group is None else weakref.ref(group)
        world, rank = (1, 0) if group is None else (dist.get_world_size(), dist.get_rank())
        name = b"" if group is None else str(group.group_name).encode()
        check(lib.rote_session_world(self.session, name, world, rank))
        self._agrees = False
        if world > 1 or (self._agree and group is not None):
            agrees = c_int()
            if self._agree:
                check(lib.rote_session_let_ranks_agree(self.session))
            check(lib.rote_session_agree_in(self.session, name, byref(agrees)))
            self._agrees = bool(agrees.value)
            self._notice()

    # -- recording ----------------------------------------------------------------

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        if ExecutedCode.running or not _recording.acquire(blocking=False):  # by another thread: it observes the process
            self.told_nothing = True
            return self._run(args, kwargs)
        _running.depth += 1
        try:
            with uncollected():  # a recording allocates enough to set off collections, which take as long as many steps
                return self._record(args, kwargs)
        finally:
            _running.depth -= 1
            _recording.release()

    def _record(self, args: Any, kwargs: Any) -> Any:
        session = self.session
        recording: Recording | None = None
        trusted: _Trusted | None = None
        instead: Callable[[Any, Any], Any] | None = None
        if self._sees_first:
            self._sees_first = False
            if self.ran is None and _survey.much_code(self.state.modules):
                return self._seen(args, kwargs)
        if self._beginnings < _MOST_BEGINNINGS and _wrappers.begins(self.wrapped):
            self._beginnings += 1
            return self._run(args, kwargs)
        self._waits = self._waits + 1 if _wrappers.is_busy(self.wrapped) else 0
        if 0 < self._waits <= _MOST_WAITS:
            return self._run(args, kwargs)
        try:
            check(lib.rote_record_begin(session))
            self._look_for_state()
            known, self._survey = self._survey, None
            recording = Recording(self, args, kwargs, known)
            recording.prepare()
            if self._trust:
                trusted = self._trusted(recording)
        except TooMuchError:
            self._abort(recording)
            instead = functools.partial(self._seen, must=True)
        except MoreStateError:
            self._abort(recording)
            self._sees_first = True
            instead = self._record
        except _Untrusted as problem:
            self._abort(recording)
            self._trust = False
            self._not_trusted(str(problem))
            instead = self._run
        except BaseException as problem:  # of ours, or a signal's: the step has not begun
            self._abort(recording)
            if not isinstance(problem, Exception):
                raise
            self._failed(problem)
            instead = self._run
        if instead is not None:  # here, where errors of the step do not come up while one of these is handled
            return instead(args, kwargs)
        assert recording is not None
        if trusted is not None:
            return self._replay_trusted(recording, trusted, args, kwargs)
        return self._observed(recording)

    def _observed(self, recording: Recording) -> Any:
        """Runs a step that is recorded, and makes of the recording what it is good for."""
        try:
            with self._around():
                result = recording.run()
        except BaseException:
            self._abort(recording)
            raise
        try:
            if recording.has_settled() or not self._has_followed(recording):
                self._abort(recording)
                return result
            outcome = recording.finish()
            self._survey = recording.waits(outcome)
        except BaseException as problem:
            self._abort(recording)
            if not isinstance(problem, Exception):
                raise
            self._failed(problem)
            return result
        self._kept(outcome, recording)
        recording.forget()
        self._failures = 0
        for gone in self.results.keys() - set(outcome["variants"]):
            del self.results[gone]
        if outcome["outcome"] == "refused":
            self._refused(outcome["reason"])
        return result

    def _kept(self, outcome: dict[str, Any], recording: Recording) -> None:
        """Is told what became of a recording."""

    def _seen(self, args: Any, kwargs: Any, must: bool = False) -> Any:
        """Runs a call eagerly and notes which code runs, then looks at what that has in reach. ``must``: no other way
        is left to follow the step."""
        executed = ExecutedCode()
        given = _leaves(args, kwargs)  # which the library knows by address, and the step may drop
        nested = self._nested_calls
        try:
            with executed:
                result = self._run(args, kwargs)
        finally:
            if must or executed.codes is not None:
                self._note(executed)
        places = [(path, id(leaf)) for path, leaf in given]
        is_whole = places == [(path, id(leaf)) for path, leaf in _leaves(args, kwargs)]
        is_last = self._nested_calls == nested  # of the calls that the library knows
        if is_whole and is_last and self.ran is not None:
            self._look_around(args, kwargs)
        return result

    def _look_around(self, args: Any, kwargs: Any) -> None:
        """Looks at what is in reach after a call, for the recording of the next one."""
        recording: Recording | None = None
        try:
            check(lib.rote_record_begin(self.session))
            self._look_for_state()
            recording = Recording(self, args, kwargs)
            recording.prepare()
            self._survey = recording.as_survey()
            recording.close()
            recording.forget()
        except MoreStateError:
            self._abort(recording)
            self._look_around(args, kwargs)
        except BaseException as problem:  # the next call meets it again, and says so
            self._abort(recording)
            if not isinstance(problem, Exception):
                raise

    @property
    def stands_for(self) -> Callable[..., Any]:
        """What callers believe to call."""
        return self.function

    @property
    def recorded(self) -> Callable[..., Any]:
        """What runs when a call is recorded."""
        return self.function

    @property
    def wrapped(self) -> list[tuple[str, nn.Module]]:
        """The modules whose wrappers run in the step."""
        return [] if self.is_region else self.state.modules

    @property
    def knows_code(self) -> bool:
        """Whether calls were seen to run the same code since it is noted which code they run."""
        return bool(self.ran) and self._others == 0

    def _note(self, executed: ExecutedCode, codes: Codes | None = None) -> None:
        if executed.codes is not None:
            self.ran = (self.ran or {}) | (executed.codes if codes is None else codes)
            return
        if executed.interrupted and self._others < _MOST_OTHERS:  # a thread of C++ may just have come or gone
            return
        self._refused(
            "the step reaches too much code to follow all of it, and another profiler of Python is active "
            "(sys.setprofile, threading.setprofile), so that Rote cannot see which code the step runs; remedy: record "
            "without the profiler"
        )

    def _has_followed(self, recording: Recording) -> bool:
        """Whether the walk of a recording has followed all the code that ran. If not, the next one follows it too."""
        left = recording.unfollowed()
        if recording.schedulers.read:
            self.read_schedulers += recording.schedulers.read
            self._given_up.update(recording.schedulers.given_up)
            for path, why in recording.schedulers.given_up.items():
                text = "%s: a replay cannot call %s.step() when it has ended: %s"
                logging.getLogger("rote.record").info(text, self.name(), path, why)
            return False
        seen = recording.unread.judge(self.unread)
        if recording.carries_more() or not seen:
            return False
        if recording.hidden_reads:
            self.hides_reads = True
            return False
        if recording.schedulers.missed:
            self.missed_by_schedulers |= recording.schedulers.missed
            return False
        if unfollowed := recording.arrays.unfollowed():
            assert self.array_arguments is not None
            self.array_arguments.stop(unfollowed)
            return False
        if recording.decides_otherwise and self.decisions is not None and self.ran is not None:
            self.decisions.stop()
            return False
        if recording.counters.strange:
            self.read_counters.add(recording.counters.strange)
            return False
        unknown = recording.unproven_code or recording.counters.changed() or recording.decides_otherwise
        if self.ran is None and unknown:
            self.ran = {}  # the next walk asks what code that runs does with hyperparameters, and with what it counts
            return False
        if left is not None and not left:
            self._others = 0
            return True
        self._others += 1
        self._note(recording.executed, left)
        if self._others >= _MOST_OTHERS:
            recording.refuse_code(left or {})
            return True
        return False

    def _abort(self, recording: Recording | None) -> None:
        if recording is not None:
            recording.close()
            recording.forget()
        lib.rote_record_abort(self.session)

    def _failed(self, problem: Exception) -> None:
        """Something of Rote's own went wrong. The step itself runs, or has run."""
        self._failures += 1
        reason = f"{type(problem).__name__}: {problem}"
        if self._failures >= _MAX_FAILURES and not self._agrees:  # other ranks wait for every call
            self._off = True
            reason += f" ({self._failures} times in a row: every call runs eagerly from now on)"
        self._refused(reason.removeprefix("RuntimeError: rote: "))

    def _not_trusted(self, why: str) -> None:
        logging.getLogger("rote.replay").info(
            "%s: no stored plan is trusted, since a plan file cannot tell this step from another step: %s",
            getattr(self.function, "__qualname__", "the step"),
            why,
        )

    def _trusted(self, recording: Recording) -> _Trusted | None:
        """Binds a stored plan unrecorded, if there is one: the specs and the classes of what a replay gives."""
        if recording.decides_otherwise:
            return None
        if recording.not_told:
            self._not_trusted(recording.not_told)
            return None
        bound = c_int()
        check(lib.rote_record_trust(self.session, byref(self.variant), byref(bound)))
        if not bound.value:
            return None
        variant = self.variant.value
        try:
            plan = json.loads(lib.rote_session_variant(self.session, variant))
            examples = [t._spec for _, t in [*recording.tensors, *recording.leaves] if isinstance(t, DTensor)]
            given = [*plan["outputs"], *(grad for grad in plan["grads"] if not grad["none"])]
            specs = [None if each["spec"] is None else _results.StoredSpec(each["spec"], examples) for each in given]
            structure, late, _ = _results.from_json(plan["result"])
            if any(each.value is not None for each in late):
                raise _Untrusted("it leaves values for later calls, and only a recording tells who reads them")
            recording.after(late)
            try:
                return specs, _results.classes_in(structure, recording.known())
            except _results.Unsupported as problem:
                raise _Untrusted(f"the result is {problem}") from None
        except Exception:
            check(lib.rote_session_give_up(self.session, variant))
            raise

    def _replay_trusted(self, recording: Recording | None, trusted: _Trusted, args: Any, kwargs: Any) -> Any:
        """Replays a stored plan that has just been bound, unrecorded."""
        assert recording is not None
        specs, classes = trusted
        recording.close()
        if check(lib.rote_session_replay_last(self.session, byref(self.variant), byref(self._slot))) == EAGER:
            return self._run(args, kwargs)  # it would read other values than the plan is for
        variant = self.variant.value
        plan = json.loads(lib.rote_session_variant(self.session, variant))
        locals_ = take_object(self._slot)
        left = zip(specs, locals_, strict=True)

        def spec() -> Any:
            stored, local = next(left)
            return None if stored is None else stored.of(local)

        structure, late, views = _results.from_json(plan["result"])
        results = _results.Results(
            structure,
            [(spec(), output["requires_grad"]) for output in plan["outputs"]],
            [(grad["path"], None if grad["none"] else spec(), grad["none"]) for grad in plan["grads"]],
            recording.own(),
            views,
            recording.after(late),
            classes,
        )
        self.results[variant] = results
        self._acts = results.acts(locals_)
        result = results.deliver(locals_, lambda path: self._argument(path, args, kwargs))
        self._act()
        return result

    def _refused(self, reason: str) -> None:
        for path, why in self._given_up.items():
            if f"{path}." in reason or ".param_groups[" in reason:
                reason += f" ({path}.step() cannot wait for the end of a replay: {why})"
        if self._strict:
            raise RecordingRefused(reason)
        cause = cause_of(reason)
        if cause not in self._warned:
            self._warned.add(cause)
            _warn(f"rote: recording refused, the step stays eager: {reason}", 6)

    def went_no_further(self, where: list[str]) -> None:
        """Says once where the walk over what the function reaches has stopped."""
        new = [place for place in where if place not in self._unguarded]
        if new and not self._unguarded:
            logging.getLogger("rote.guards").warning(
                "%s: values beyond these places are not guarded: %s",
                getattr(self.function, "__name__", "the step"),
                "; ".join(new),
            )
        self._unguarded += new

    # -- verification ---------------------------------------------------------------

    def _look_for_state(self) -> None:
        """Finds the state anew: objects in it may hold other modules and tensors than before."""
        with contextlib.suppress(TypeError):
            self.state = self._state_now()

    def _state_now(self) -> _state.State:
        unread = _unread.Unread() if self.is_region else self.unread  # places in the state of a region stay
        return _state.collect(self.given_state, unread, self.found, as_it_is=self.is_region)

    def _verified(self, args: Any, kwargs: Any) -> Any:
        """Runs a call beside eager, if all ranks replay it: a rank that runs it once would not answer the
        collectives of one that runs it twice."""
        if not self._all_replay(args, kwargs):
            return self._call(args, kwargs)
        raises = self._verify > 0
        self._look_for_state()
        self._verify -= raises
        self._until = self._verify_every
        run = _verify.beside(self.state, args, kwargs, self._call_beside, self._run_beside)
        if run.once:
            if not run.raised_elsewhere:  # the next call is verified in its place
                self._verify += raises
                self._until = min(self._until, 1)
            if self._replayed:
                self._act()
            return _returns.plain(run.result())
        self._verified_calls += 1
        if run.difference is None and not run.elsewhere:
            return run.result()
        where = "" if run.difference is not None else f"rank {run.elsewhere[0]}, not on this one"
        if raises:
            what = where if run.difference is None else self._told(run.difference)
            how = "in" if run.difference is not None else "on"
            raise VerificationError(f"a replay of {self.name()} differs from eager {how} {what}") from run.error
        self._differs(args, kwargs, run, where)
        return run.result()

    def _call_beside(self, args: Any, kwargs: Any) -> tuple[Any, bool]:
        """Replays a call that then runs eagerly too. Comes back: the result, and whether it was replayed."""
        self._beside, self._replayed, self._acts = True, False, []
        try:
            return self._call(args, kwargs), self._replayed
        finally:
            self._beside = False

    def _run_beside(self, args: Any, kwargs: Any) -> Any:
        """Runs a call eagerly that was replayed."""
        return self._run(args, kwargs)

    def _told(self, difference: str) -> str:
        """How people are told what differs."""
        return difference

    def _differs(self, args: Any, kwargs: Any, run: _verify.Beside, elsewhere: str) -> None:
        """Ends replays, on all ranks at once, and reports why."""
        self._stopped = True
        finding = _difference.Finding(where="eager raised, so no instruction was looked for")
        if not run.raised_elsewhere:
            with _recording:
                _running.depth += 1
                try:
                    finding = _difference.find(self, args, kwargs, run.before)
                finally:
                    _running.depth -= 1
                    run.after.restore()
        if run.difference is None:
            why = f"a replay of {self.name()} differs from eager on {elsewhere}"
        else:
            if self._temporary is not None:
                self._temporary.detach()  # the report stays
            path = _difference.write(self, run.difference, finding, run.before)
            why = f"a replay of {self.name()} differs from eager in {run.difference}; first {finding}; see {path}"
        check(lib.rote_session_stop(self.session, why.encode()))
        _warn(f"rote: {why}; the step stays eager from now on", 6)

    def name(self) -> str:
        return self.label or str(getattr(self.function, "__name__", "the step"))

    def _all_replay(self, args: Any, kwargs: Any) -> bool:
        """Whether this rank and all others would replay the call."""
        holds = c_int()
        try:
            check(lib.rote_session_holds(self.session, args, kwargs, byref(holds)))
        finally:  # an error included: other ranks wait for this one
            all_hold = all(_ranks.gather(holds.value))
        return all_hold
