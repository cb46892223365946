"""Tensors that a step takes from one call to the next: ``self.h = h.detach()``, ``shadow[name] = ...``, buffers that a
module replaces. And tensors that a script puts into a place before each call: ``self.batch = batch``.

Such a place, an entry of a dict or list or a cell, holds other tensors at each call. It gets no guard. What it holds
before a call is one more argument of that call, under the place's name, and is guarded as arguments are; what the step
has put there is one more result, and a replay puts it there. So it does not matter who reads or writes the place in the
step. A place is found when a recorded step has put other tensors into it, or when it has held another value than at the
recording before, twice.
"""

from __future__ import annotations

import sys
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

import torch

from . import _containers, _introspect
from ._facts import ABSENT, Attribute, Fact, is_of_argument, unique_path
from ._numbers import CELL, DICT_ITEM, LIST_ITEM

# Places that a step may have, at most.
_MOST = 256
# Recordings that are dropped for the next one to take other places, at most.
_MOST_DROPPED = 32
# Candidates that are remembered, at most.
_MOST_REMEMBERED = 16_384
# Recordings before which a script has put something else into a place, for the place to be one.
_TIMES_REPLACED = 2
# How deep tensors may lie in what a place holds, and among how many items.
_DEPTH, _ITEMS = 3, 64
_CONTAINERS = {DICT_ITEM: (dict, OrderedDict, defaultdict), LIST_ITEM: (list,), CELL: (types.CellType,)}
# The names of arguments end so that hold what places held. No argument of a function is named so.
_BEFORE = " before the call"


class Place(NamedTuple):
    """An entry of a dict (of an object's attributes, of a module's buffers, or any other), an item of a list, or a
    cell, whose key is None."""

    container: Any
    key: Any
    path: str
    owner: type | None = None
    """Of the dict of a class: the class, which keeps by itself where its attributes are."""

    def value(self) -> Any:
        """What is there now; ``ABSENT`` if nothing is."""
        return _read(self.container, self.key)

    def put(self, value: Any) -> None:
        """Puts a value there; takes what is there away for ``ABSENT``."""
        if self.owner is not None:
            _put_into_class(self.owner, self.key, value)
        elif type(self.container) is list:
            if self.key < len(self.container):  # its size is guarded
                self.container[self.key] = value
        elif type(self.container) is not types.CellType:
            _put_into_dict(self.container, self.key, value)
        elif value is ABSENT:
            del self.container.cell_contents
        else:
            self.container.cell_contents = value


class Changed(NamedTuple):
    """A place that holds another value than before."""

    place: Place
    origin: Attribute | None
    """The attribute that it is, where that is one of an object whose reads are seen."""
    before: Any
    """What it has held when the recording began."""


def _read(container: Any, key: Any) -> Any:
    if type(container) is list:
        return container[key] if key < len(container) else ABSENT
    if type(container) is not types.CellType:
        return dict.get(container, key, ABSENT)
    try:
        return container.cell_contents
    except ValueError:  # not filled
        return ABSENT


def _put_into_class(kind: type, key: str, value: Any) -> None:
    if value is not ABSENT:
        type.__setattr__(kind, key, value)
    elif key in _introspect.class_dict(kind):
        type.__delattr__(kind, key)


def _put_into_dict(container: dict[Any, Any], key: Any, value: Any) -> None:
    if value is ABSENT:
        dict.pop(container, key, None)
    else:
        dict.__setitem__(container, key, value)


def is_place(kind: int, container: Any) -> bool:
    """Whether a fact of this kind about a container is one about an entry that may be a place."""
    return type(container) in _CONTAINERS.get(kind, ())


class Carried:
    """The places of a step."""

    def __init__(self) -> None:
        self.places: dict[tuple[int, Any], Place] = {}  # by the identities of containers, and of keys
        # What candidates have held at the last recording that met them, by identity, and how often that was something
        # else.
        self._last: dict[tuple[int, Any], tuple[int, int]] = {}
        # Names that were given away, for good: plans know places by their names.
        self._names: dict[str, object] = {}
        self._banned: set[tuple[int, Any]] = set()  # by the same: what they hold, the step changes inside
        self._dropped = 0

    def __contains__(self, place: tuple[Any, Any]) -> bool:
        """Whether an entry of a container is one."""
        return by_identity(*place) in self.places

    def __iter__(self) -> Iterator[Place]:
        return iter(self.places.values())

    def __bool__(self) -> bool:
        return bool(self.places)

    def add(self, found: Iterable[Place]) -> bool:
        """Adds places. False: there are none, or too many."""
        new = {by_identity(each.container, each.key): each for each in found}
        new = {key: each for key, each in new.items() if key not in self._banned and key not in self.places}
        if not new or len(self.places) + len(new) > _MOST:
            return False
        for key, each in new.items():
            self.places[key] = each._replace(path=unique_path(each.path, object(), self._names))
        return True

    def replaced(self, candidates: Candidates, known: Set[int]) -> list[Changed]:
        """The candidates that hold something else than at the last recording, for the second time. ``known``: the
        identities of tensors that no script replaces by themselves."""
        if len(self._last) > _MOST_REMEMBERED:
            self._last.clear()
        found = []
        for fact, value in candidates.before:
            key = by_identity(fact.container, fact.key)
            identity, times = self._last.get(key, (id(value), 0))
            if identity != id(value) and any(id(tensor) not in known for tensor in tensors_in(value)):
                times += 1
                if times >= _TIMES_REPLACED:
                    found.append(Changed(candidates.place(fact), fact.origin, value))
            self._last[key] = id(value), times
        return found

    def may_drop(self) -> bool:
        """Whether one more recording may be dropped since it has shown other places."""
        self._dropped += 1
        return self._dropped <= _MOST_DROPPED

    def drop(self, gone: Iterable[Place]) -> None:
        """Forgets places."""
        for each in gone:
            self.places.pop(by_identity(each.container, each.key), None)

    def ban(self, changed: Iterable[Place]) -> None:
        """Forgets places for good that are of no use: as an argument, what they hold must not change."""
        gone = list(changed)
        self._banned.update(by_identity(each.container, each.key) for each in gone)
        self.drop(gone)

    def contents(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Which objects are in what the places have held when a call began, if these are containers, by their paths."""
        values = {each.path: kwargs.get(each.path + _BEFORE, ABSENT) for each in self}
        return {path: list(_parts(value)) for path, value in values.items() if _containers.held(value) is not None}

    def with_values(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The named arguments of a call, and what the places hold."""
        return {**kwargs, **{each.path + _BEFORE: each.value() for each in self}}

    def tensors(self) -> set[int]:
        """The identities of the tensors that the places hold now."""
        return {id(tensor) for each in self for tensor in tensors_in(each.value())}

    def beyond(self, met: set[tuple[int, Any]]) -> list[Place]:
        """The places that are none of those that were met in reach, as :func:`by_identity` has them. Those of an
        argument stay while there is somebody else who holds them: another call may have that argument again."""
        return [each for key, each in self.places.items() if key not in met and not _may_come_again(each)]

    def moved(self, kwargs: Mapping[str, Any]) -> list[Place]:
        """The places into which a call with these arguments has put something else."""
        return [each for each in self if each.value() is not kwargs.get(each.path + _BEFORE, ABSENT)]


def _may_come_again(place: Place) -> bool:
    return is_of_argument(place.path) and sys.getrefcount(place.container) > 2


def by_identity(container: Any, key: Any) -> tuple[int, Any]:
    """What stands for an entry: which container and which key it is, without a call of their own code."""
    return id(container), key if type(key) in (str, int) else (None, id(key))


def without_values(kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The named arguments of a call as the caller has passed them."""
    if not any(key.endswith(_BEFORE) for key in kwargs):
        return kwargs
    return {key: value for key, value in kwargs.items() if not key.endswith(_BEFORE)}


class Candidates:
    """The entries that a recorded step may take from one call to the next."""

    def __init__(self, facts: Iterable[Fact], class_dicts: Mapping[int, type]) -> None:
        """``class_dicts``: classes by the identities of the dicts of their attributes."""
        self._class_dicts = class_dicts
        self.before = [
            (fact, value)
            for fact in facts
            if is_place(fact.kind, fact.container)
            for value in (_read(fact.container, fact.key),)
            if value is None or _holds_tensors(value)
        ]

    def place(self, fact: Fact) -> Place:
        """The place that a fact is about."""
        return Place(fact.container, fact.key, fact.subject, self._class_dicts.get(id(fact.container)))

    def moved(self) -> list[Changed]:
        """Those into which the step has put other tensors, now that it has run."""
        return [
            Changed(self.place(fact), fact.origin, before)
            for fact, before in self.before
            for now in (_read(fact.container, fact.key),)
            if now is not before and _holds_tensors(now)
        ]

    def forget(self) -> None:
        """Lets go of everything."""
        self.before.clear()


def _holds_tensors(value: Any) -> bool:
    return any(True for _ in tensors_in(value))


def _parts(value: Any) -> Iterator[tuple[int, int]]:
    """The identities of the containers in a value, and of what each holds."""
    for container in _containers.all_of(value).values():
        for part in _containers.held(container) or ():
            yield id(container), id(part)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """The tensors that a value is, or is made of; parameters are none."""
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        if not (issubclass(kind, torch.nn.Parameter) or (_introspect.own(value) or {}).get("_is_param")):
            yield value
    elif depth < _DEPTH and (kind in (tuple, list, dict) or _containers.parts_of(value) is not None):
        inside = _containers.held(value) or ()
        for item in inside if len(inside) <= _ITEMS else ():
            yield from tensors_in(item, depth + 1)
