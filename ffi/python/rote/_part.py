"""The forward or the backward of a region, among equal ones: the first two are recorded, and all others take the plan
over that these have made (``_equal.py``)."""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable, Hashable
from ctypes import byref, c_int
from typing import Any

import torch

from . import _equal
from ._equal import Known, Unlike
from ._naming import Naming, modes
from ._native import c_text, check, lib
from ._numbers import EAGER, MODE, STRUCTURE
from ._recording import Recording
from ._specs import looks_of
from ._step import Step

# Calls that a part leaves eager while it waits for the plan of another one.
_PATIENCE = 4
# How many parts of a kind are recorded before others take their plan over.
_MOST_LEADERS = 2
# The first parts of each kind, in the order of their first calls.
_leaders: dict[Hashable, list[weakref.ref[Part]]] = {}


class Part(Step):
    """The forward or the backward of a region."""

    is_region = True

    def __init__(self, function: Callable[..., Any], state: Any, **options: Any) -> None:
        super().__init__(function, state, **options)
        self.is_quiet = False  # nobody has asked for it, so nobody is warned
        self._patience = _PATIENCE
        self._known: dict[int, Known] = {}  # what equal parts may take over, by the numbers of variants
        self._kind: Hashable = None  # of the call that is handled: what calls that may share a plan have in common
        self._done: set[Hashable] = set()  # the kinds that have a plan

    def _kind_of_part(self) -> Hashable:
        """What parts that may share plans have in common."""
        raise NotImplementedError

    def _to_take_over(self, other: Part, known: Known, objects: list[Any]) -> Callable[[int], None] | None:
        """What is to be done when a plan of another part is bound, with the number of the variant; None if it cannot be
        taken over. ``objects``: this part's own."""
        raise NotImplementedError

    def _leaders(self) -> list[Part]:
        """The first parts that have met a call of this kind, of which this one may be one."""
        kind = self._kind
        known = _leaders.setdefault(kind, [])
        parts = [part for part in (reference() for reference in known) if part is not None]
        if self not in parts and len(parts) < _MOST_LEADERS:
            known.append(weakref.ref(self, lambda gone: _forget(kind, gone)))
            parts.append(self)
        return parts

    def _looks_of(self, args: Any) -> Hashable:
        """How arguments look of calls of one kind."""
        looks: Hashable = _looks(args)
        return looks

    def _has_looked(self) -> bool:
        """Whether a first call such as this one has shown what there is to see."""
        return True

    def _look(self, args: Any, kwargs: Any) -> Any:
        """Runs a first call eagerly."""
        raise NotImplementedError

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        """Records, unless another part of the kind is about to have a plan: that one serves this part too."""
        grads = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._kind = (self._kind_of_part(), grads, self._looks_of(args), _looks(kwargs))
        leaders = self._leaders()
        if self in leaders and not self._has_looked():
            return self._look(args, kwargs)
        others = leaders[: leaders.index(self)] if self in leaders else leaders
        if self._patience and any(other.is_under_way(self._kind) for other in others):
            self._patience -= 1
            return self._run(args, kwargs)
        return super()._recorded(args, kwargs)

    def _record(self, args: Any, kwargs: Any) -> Any:
        leaders = self._leaders()
        if self not in leaders and self._take_over(leaders[0], args, kwargs):
            return self._replay_bound(args, kwargs)
        return super()._record(args, kwargs) if self._has_looked() else self._look(args, kwargs)

    def is_under_way(self, kind: Hashable) -> bool:
        """Whether recordings of calls of a kind have begun and have not led to a plan."""
        return not (self._off or kind in self._done or self.stats.refusals)

    def _kept(self, outcome: dict[str, Any], recording: Recording) -> None:
        for gone in self._known.keys() - set(outcome["variants"]):
            del self._known[gone]
        if "variant" not in outcome:
            return
        self._done.add(self._kind)
        first = self._leaders()[0]
        if first is self:
            try:
                self._known[outcome["variant"]] = Known(self, recording, outcome["variant"], self._kind)
            except Exception:  # objects in reach may be anything
                return
        else:
            for variant, known in first._known.items():
                if known.is_like(self, recording, self._kind) and first.key(variant) == self.key(outcome["variant"]):
                    known.confirmed.append(weakref.ref(self))

    def _refused(self, reason: str) -> None:
        if self.is_quiet:
            logging.getLogger("rote.record").info("%s stays eager: %s", self.name(), reason)
        else:
            super()._refused(reason)

    def _notice(self) -> None:
        if not self.is_quiet:
            super()._notice()
        elif (notice := lib.rote_session_notice(self.session)) is not None:
            logging.getLogger("rote.record").info("%s: %s", self.name(), notice.decode())

    def key(self, variant: int) -> str:
        """The key of a plan."""
        return str(json.loads(lib.rote_session_variant(self.session, variant))["key"])

    # -- plans of other parts -----------------------------------------------------

    def _take_over(self, other: Part, args: Any, kwargs: Any) -> bool:
        """Binds a plan of an equal part, if there is one for the call."""
        if not other._known or not _equal.are_plain((args, kwargs)):
            return False
        self._look_for_state()
        for known in reversed(other._known.values()):
            if not known.confirmed or known.kind != self._kind:
                continue
            try:
                objects = known.own_objects(self)
                then = self._to_take_over(other, known, objects)
            except Exception:  # not equal, or an object that may be anything
                continue
            if then is not None and self._bind(other, known, objects, args, kwargs):
                then(self.variant.value)
                return True
        return False

    def _bind(self, other: Part, known: Known, objects: list[Any], args: Any, kwargs: Any) -> bool:
        """Binds the plan of an equal part, where all else is as its guards expect."""
        session, bound = self.session, c_int()
        naming = _Call(session, list(self.state.tensors()), args, kwargs, is_region=True)
        try:
            check(lib.rote_record_begin(session))
            naming.guard(known.guards)
            known.told.tell(session, known.containers(objects))
            check(lib.rote_record_ready(session))
            theirs = other.session, known.variant, known.own, len(known.own)
            check(lib.rote_record_adopt(session, *theirs, byref(self.variant), byref(bound)))
            if bound.value:
                results = other.results[known.variant]
                self.results[self.variant.value] = results.of_equal(naming.own())
                self.ran = other.ran
                self._done.add(self._kind)
        except Exception:  # the recording that comes next meets it again, and says so
            return False
        finally:
            lib.rote_record_abort(session)
        return bool(bound.value)

    def _replay_bound(self, args: Any, kwargs: Any) -> Any:
        """Replays the call that a plan was just bound for."""
        if check(lib.rote_session_replay_last(self.session, byref(self.variant), byref(self._slot))) == EAGER:
            return self._run(args, kwargs)
        self._replayed = True
        return self._deliver(args, kwargs)


class _Call(Naming):
    """A call that a plan of another part may be bound for."""

    def refuse(self, op: str, reason: str, remedy: str) -> None:
        raise Unlike

    def guard(self, guards: list[tuple[int, str, str]]) -> None:
        """Names all, and adds the guards of the other part, which hold for this call."""
        now = [(STRUCTURE, self.name_leaves()), *((MODE, text) for _, text in modes())]
        if now != [(kind, text) for kind, _, text in guards[: len(now)]]:
            raise Unlike
        self.name_all()
        self.check_storages(self.extents())
        for kind, subject, text in guards:
            check(lib.rote_record_guard(self.session, kind, c_text(subject), c_text(text)))


def _looks(value: Any) -> Any:
    """How tensors in arguments look, and which arguments are none."""
    kind = type(value)
    if kind in (tuple, list):
        return tuple(map(_looks, value))
    if kind is dict:
        return tuple(map(_looks, value.values()))
    if isinstance(value, torch.Tensor):
        return looks_of(value)
    return kind


def _forget(kind: Hashable, gone: weakref.ref[Part]) -> None:
    left = [each for each in _leaders.get(kind, ()) if each is not gone]
    if left:
        _leaders[kind] = left
    else:
        _leaders.pop(kind, None)
