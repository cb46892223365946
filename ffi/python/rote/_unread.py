"""Attributes that change between calls and that the step does not read: ``trainer.state.epoch``, ``self.last_loss``.

A step that is a method of a trainer has the whole trainer in reach: counters of steps, logs, rates of optimizers that
run elsewhere. Where the value of an attribute, or what lies behind it, was another one at the recording before, the
recording sees every read of that attribute, in whatever code. If there is none, the attribute gets no guard from then
on, and each later recording sees its reads too. No replay depends on it: a step that reads it would have to take
another way through the code, by another value, which is guarded.

A step may set such an attribute (``self.aux_loss = ...``), and read after that what it has set. A plan gives what the
step has set as one more result, and a replay sets the attribute to it.

Reads are seen of objects of ordinary classes in Python only. Where code that runs may read an attribute unseen
(``object.__getattribute__``, descriptors, the garbage collector), every attribute is guarded.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from . import _code, _facts, _introspect
from ._carried import Carried
from ._numbers import DICT_ITEM
from ._reads import Reads
from ._uses import reads_no_other

# Attributes that are left without a guard, at most.
_MOST = 256
# By these, code gets at the attributes of an object without naming them, and is seen.
BY_ANOTHER_NAME = frozenset({"__dict__", "__getstate__", "__reduce__", "__reduce_ex__", "__dir__", "__sizeof__"})
# By these, it is not seen.
_UNSEEN = frozenset({"__get__", "getattr_static", "get_objects", "get_referents", "get_referrers", "py_object"})


# They look for parameters, buffers and modules in the dict of a module, which have guards of their own.
_OF_MODULES = frozenset({nn.Module.__getattr__.__code__, nn.Module.__setattr__.__code__})


def may_be_left(kind: type) -> bool:
    """Whether all reads of attributes of a class's objects can be seen, which no code but Python's reads."""
    bases = [base for base in _introspect.mro(kind) if base is not object]
    meta: Any = type(kind)
    reads: Any = kind.__getattribute__
    return (
        reads is object.__getattribute__
        and all(map(_introspect.can_change, bases))
        and not _introspect.hides(kind)
        and kind.__weakrefoffset__ != 0  # below 0 from Python 3.12 on
        and meta.__setattr__ is type.__setattr__
        and meta.__delattr__ is type.__delattr__
    )


class Unread:
    """What a step has been seen to leave unread, over all its recordings."""

    def __init__(self) -> None:
        self._left = _Places()
        self._read = _Places()
        self._kept = _Places()  # which plans set
        self._before: dict[Any, str] = {}  # what each fact of the last recording has expected
        self._moved = _Places()  # which the step of the last recording has set to something else
        self._sees = True
        self.carried = Carried()
        """What the step takes from one call to the next."""

    def __contains__(self, place: tuple[Any, str]) -> bool:
        return place in self._left

    def changed(self, facts: Iterable[_facts.Fact]) -> list[_facts.Attribute]:
        """Attributes that have changed since the last recording, and are not known to be read."""
        if not self._sees:
            return []
        before, now = self._before, {}
        found: dict[tuple[int, str], _facts.Attribute] = {}
        leading: dict[int, list[_facts.Attribute]] = {}  # to objects, by the addresses of these
        for fact in facts:
            origin = fact.origin
            if origin is None:
                continue
            now[_place(fact)] = text = _text(fact)
            attribute = origin.holder, origin.key
            if fact.kind == DICT_ITEM and type(fact.key) is str and fact.key == origin.key:
                leading.setdefault(id(value_of(origin)), []).append(origin)
            if (before.get(_place(fact), text) != text or attribute in self._moved) and attribute not in self._read:
                found[id(origin.holder), origin.key] = origin
        self._before, self._moved = now, _Places()
        more = dict(found)  # others that lead to the same
        for value in map(value_of, found.values()):
            for other in () if value is _facts.ABSENT or _facts.plain(value) else leading.get(id(value), ()):
                if (other.holder, other.key) not in self._read:
                    more[id(other.holder), other.key] = other
        fitting = [each for each in (more, found) if len(each) + len(self._left) <= _MOST]
        return list(fitting[0].values()) if fitting else []

    def note(self, facts: Iterable[_facts.Fact]) -> None:
        """Notes which attributes a step has set, now that it has run."""
        for fact in facts if self._sees else ():
            if fact.origin is not None and fact.kind == DICT_ITEM and _has_moved(fact, self._before):
                self._moved.add(fact.origin)

    def is_read(self, attribute: _facts.Attribute) -> bool | None:
        """Whether the step reads what an attribute was before the step; None if that is not known."""
        place = attribute.holder, attribute.key
        if not self._sees or place in self._read:
            return True
        return False if place in self._left else None

    def leave(self, found: Iterable[_facts.Attribute]) -> None:
        """Guards attributes no more."""
        for each in found:
            self._left.add(each)

    def guard(self, found: Iterable[_facts.Attribute]) -> None:
        """Guards attributes from now on."""
        for each in found:
            self._read.add(each)
            self._left.remove(each)

    def keep(self, found: Iterable[_facts.Attribute]) -> None:
        """Plans set attributes."""
        for each in found:
            self._kept.add(each)

    def kept(self) -> list[_facts.Attribute]:
        """The attributes that plans set."""
        return self._kept.all()

    def is_blind(self) -> None:
        """Guards every attribute from now on, since not all reads can be seen."""
        self._sees = False
        self._left = _Places()
        self._before = {}


class _Places:
    """Attributes of objects, which it does not keep alive."""

    def __init__(self) -> None:
        self._holders: dict[tuple[int, str], tuple[weakref.ref[Any], str]] = {}  # and their paths

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, place: tuple[Any, str]) -> bool:
        found = self._holders.get((id(place[0]), place[1]))
        return found is not None and found[0]() is place[0]

    def add(self, attribute: _facts.Attribute) -> None:
        place = id(attribute.holder), attribute.key
        self._holders[place] = weakref.ref(attribute.holder), attribute.path

    def remove(self, attribute: _facts.Attribute) -> None:
        self._holders.pop((id(attribute.holder), attribute.key), None)

    def all(self) -> list[_facts.Attribute]:
        """Those whose objects are alive."""
        found = ((holder(), key, path) for (_, key), (holder, path) in self._holders.items())
        return [_facts.Attribute(holder, key, path) for holder, key, path in found if holder is not None]


class Watched:
    """The attributes of which one recording sees the reads."""

    def __init__(
        self,
        left: list[_facts.Attribute],
        changed: list[_facts.Attribute],
        functions: list[types.FunctionType],
        shared: Iterable[_facts.Attribute] = (),
        reads_unseen: bool = False,
    ) -> None:
        """``left``: those without a guard; ``changed``: those with a guard that may not need one. ``shared``: those of
        them that may be read otherwise than as attributes. ``reads_unseen``: whether anything in reach of the functions
        reads attributes unseen."""
        self._left = left
        self._changed = changed
        self._values: list[Any] = []  # what they were before the step
        self._all: Mapping[int, dict[str, _facts.Attribute]] = {}
        self._read = {(id(each.holder), each.key) for each in shared}
        self._set: set[tuple[int, str]] = set()
        self._plain: set[tuple[int, str]] = set()  # where setting an attribute does nothing else
        self._thread = 0  # the step's
        self._taken: set[tuple[int, str]] = set()  # that numbers have gone into
        self.kept: list[_facts.Attribute] = []
        """Those that the step has set without reading what they were before, to what a plan can give."""
        self.blind = bool(left or changed) and (reads_unseen or not _are_seen([*left, *changed], functions))
        """Whether code may read them unseen."""

    def watch(self, reads: Reads) -> None:
        """Sees from now on what is read."""
        if self.blind:
            return
        self._thread = threading.get_ident()
        found: dict[int, dict[str, _facts.Attribute]] = {}
        for each in (*self._left, *self._changed):
            self._values.append(value_of(each))
            found.setdefault(id(each.holder), {})[each.key] = each
            if _introspect.sets_plainly(type(each.holder), each.key):
                self._plain.add((id(each.holder), each.key))
        self._all = found
        for names in found.values():
            holder = next(iter(names.values())).holder
            reads.watch(holder, self._reads)
            reads.watch_writes(holder, self._sets)

    def _reads(self, holder: Any, name: str) -> None:
        names = self._all[id(holder)]
        if name in names:
            if (id(holder), name) not in self._set or (id(holder), name) in self._taken:
                self._read.add((id(holder), name))
        elif name in BY_ANOTHER_NAME and sys._getframe(2).f_code not in _OF_MODULES:
            self._read.update((id(holder), key) for key in names)

    def _sets(self, holder: Any, name: str, deletes: bool) -> None:
        if name not in self._all[id(holder)]:
            return
        if threading.get_ident() != self._thread:  # which may work for the step or not
            self._read.add((id(holder), name))
        if deletes:  # which raises where there is none
            self._reads(holder, name)
        self._set.add((id(holder), name))

    def takes_numbers(self, holder: Any, name: str) -> bool:
        """Whether a number may go into an attribute: who looks at it is seen."""
        place = id(holder), name
        if name not in self._all.get(id(holder), ()) or place not in self._plain or place in self._read:
            return False
        if threading.get_ident() != self._thread:
            return False
        self._taken.add(place)
        return True

    def check(self, gives: Callable[[Any], bool]) -> None:
        """Notes what the step has set. ``gives``: whether a plan can give a value."""
        for each, before in zip((*self._left, *self._changed), self._values, strict=False):  # none where it is blind
            place, value = (id(each.holder), each.key), value_of(each)
            is_set = place in self._set
            if place in self._read or not (is_set or value is not before):
                continue
            if is_set and place in self._plain and value is not _facts.ABSENT and gives(value):
                self.kept.append(each)
            else:
                self._read.add(place)
        self._values.clear()

    def judge(self, unread: Unread) -> bool:
        """Tells what the step has read. False: the recording has no guard that it needs, or a guard that it does not
        need."""
        if self.blind:
            unread.is_blind()
            return False
        read = [each for each in (*self._left, *self._changed) if (id(each.holder), each.key) in self._read]
        others = [each for each in self._changed if each not in read]
        unread.guard(read)
        unread.leave(others)
        unread.keep(self.kept)
        used = not self._read.isdisjoint(self._taken)  # numbers, which the recording says nothing about
        return not others and not used and not any(each in read for each in self._left)

    def forget(self) -> None:
        """Lets go of everything."""
        self._left, self._changed, self._all, self._values, self.kept = [], [], {}, [], []


def _are_seen(attributes: list[_facts.Attribute], functions: list[types.FunctionType]) -> bool:
    holders = [each.holder for each in attributes]
    for function in functions:
        names = _code.names(function.__code__)
        said = names.attributes.union(names.globals)
        if names.runs or not _UNSEEN.isdisjoint(said):
            return False
        if "__getattribute__" in said and not reads_no_other(function, holders):
            return False
    return True


def value_of(attribute: _facts.Attribute) -> Any:
    """What an attribute holds."""
    return (_introspect.own(attribute.holder) or {}).get(attribute.key, _facts.ABSENT)


def _place(fact: _facts.Fact) -> Any:
    return fact.subject, fact.kind, id(fact.container), fact.key is True


def _has_moved(fact: _facts.Fact, before: dict[Any, str]) -> bool:
    value = dict.get(fact.container, fact.key)
    if _facts.plain(value):
        return _facts.describe(value) != fact.expected
    return before.get(_place(fact)) != _text(fact)


def _text(fact: _facts.Fact) -> str:
    if fact.kind == DICT_ITEM:
        value = dict.get(fact.container, fact.key)
        # The text of another value names where else it is: that changes with what has a guard.
        return fact.expected if _facts.plain(value) else f"{id(type(value))} {id(value)}"
    return fact.expected
