"""Equal steps: what a recording has found out about one of them serves the others, such as the blocks of a model.

A recording knows all that its step can reach, as facts. Objects in reach are of two kinds. The *own* ones, such as the
modules and parameters of a block, each of two equal steps has for itself. All others are the same objects for both. So
an equal step has the same facts, with its own objects in the places of the other one's. :class:`Known` finds these
objects and compares what they hold: an own object must be where its counterpart is, a value must be equal, and all else
must be the very same object. Facts about common objects need no look: `rote_record_adopt` compares them.

Which objects are own ones, two recordings show: a third step takes a plan over only if the second one's facts are the
first one's, with its own objects in their places (:meth:`Known.is_like`).
"""

from __future__ import annotations

import collections
import gc
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import _introspect, _policy
from ._facts import ABSENT, Fact, fixed, parts_of, plain, text_of
from ._libraries import is_library_class
from ._memory import storage_of
from ._numbers import (
    ATTRIBUTE,
    CELL,
    CONTEXT_VAR,
    DICT_ITEM,
    ENTRY_COUNT,
    ENTRY_SIZE,
    FUNCTION,
    ITEMS,
    LIST_ITEM,
    MEMBER,
    NONE_OF,
    OWN,
    REFERENTS,
    SIZE,
    TENSOR_META,
    TYPE_OF,
    WEAK,
    WITHIN,
)
from ._policy import Way, way_of
from ._specs import local_of
from ._told import Told

if TYPE_CHECKING:
    from ._recording import Recording
    from ._step import Step


class Unlike(Exception):
    """Something is not as its counterpart in the other step."""


Objects = list[Any]
_Expected = Callable[[Any, Objects], None]  # raises Unlike for what is found, given the own objects found so far
_Read = Callable[[Any, Any], Any]  # of a container and a key


def _item(own: dict[Any, Any], key: Any) -> Any:
    return dict.get(own, key, ABSENT)


def _in_list(items: list[Any], index: int) -> Any:
    return list.__getitem__(items, index) if index < list.__len__(items) else ABSENT


def _member(holder: Any, member: Any) -> Any:
    try:
        return member.__get__(holder)
    except AttributeError:
        return ABSENT


def _entries(container: Any, with_values: Any) -> list[Any]:
    found = list(_introspect.entries(container))
    if with_values and issubclass(type(container), dict):
        found += [dict.__getitem__(container, key) for key in found]
    return found


def _absent(own: dict[Any, Any], names: tuple[str, ...]) -> list[str]:
    return [name for name in names if name in own]


def _class_and_size(own: dict[Any, Any], key: Any) -> Any:
    found = _item(own, key)
    return found if found is ABSENT else (type(found), _introspect.size(found))


_BUILT_IN = (dict, list, set, collections.OrderedDict)


# How a fact about an own object is read where it leads to one object, to several, or to something that is compared.
_ONE: dict[int, _Read] = {DICT_ITEM: _item, ENTRY_SIZE: _item, LIST_ITEM: _in_list, MEMBER: _member}
_SEVERAL: dict[int, _Read] = {ITEMS: _entries}
_EQUAL: dict[int, _Read] = {
    OWN: lambda holder, _: list(_introspect.own(holder) or ()),
    SIZE: lambda container, _: _introspect.size(container),
    TYPE_OF: lambda holder, _: type(holder),
    ENTRY_COUNT: _class_and_size,
    NONE_OF: _absent,
}


def _mentioned(fact: Fact) -> Iterator[Any]:
    """The objects that a fact about a common object tells of."""
    container, key = fact.container, fact.key
    yield key
    if fact.kind in _ONE:
        yield _ONE[fact.kind](container, key)
    elif fact.kind == ITEMS:
        yield from _entries(container, True)
    elif fact.kind == WITHIN:
        yield from _entries(container, True)
        yield from key
    elif fact.kind == ATTRIBUTE:
        yield getattr(container, key, None)
    elif fact.kind == CONTEXT_VAR:
        yield container.get(None)
    elif fact.kind == WEAK:
        yield _introspect.referent(container)
    elif fact.kind in (CELL, FUNCTION, REFERENTS):
        yield from gc.get_referents(container)


def _with_parts(value: Any) -> Iterator[Any]:
    """An object, and what it is made of for good."""
    yield value
    for part in (None if plain(value) else parts_of(value)) or ():
        yield from _with_parts(part)


def _captured(value: Any) -> Any:
    """The function that a captured function stands for."""
    return _introspect.class_dict(type(value))["_step"].__get__(value).function


def _memory(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Which tensors lie in the memory of an earlier one, and where."""
    first: dict[int, tuple[int, int]] = {}
    found = []
    for number, tensor in enumerate(tensors):
        local = local_of(tensor)
        start = int(local.storage_offset()) * local.element_size() if local.layout is torch.strided else 0
        place, offset = first.setdefault(storage_of(tensor), (number, start))
        found.append((place, start - offset))
    return found


def _attributes(tensor: torch.Tensor) -> int:
    """How many attributes a tensor has beside those of its class."""
    own = tensor.__dict__
    return len(own) - (2 if own and type(tensor) is DTensor else 0)


def _looks_plain(tensor: torch.Tensor) -> bool:
    """Whether nothing about a tensor is a user's own but what it says itself."""
    if not is_library_class(type(tensor)) or _attributes(tensor):
        return False
    local = local_of(tensor)
    return local is tensor or _looks_plain(local)


class Known:
    """What a recording has found out about a step, to be said of equal ones."""

    def __init__(self, step: Step, recording: Recording, variant: int, kind: Hashable) -> None:
        """``kind``: of the call. Raises :class:`Unlike` where it cannot be said of another step."""
        survey = recording.survey
        walk, state = survey.walk, step.state
        if walk.stopped or walk.left or walk.schedulers or state.optimizers or state.scalers:
            raise Unlike
        if step.results[variant].acts_later:
            raise Unlike
        self.variant, self.kind = variant, kind
        self.guards, self._facts = survey.guards, survey.told
        #: Recorded parts whose facts are these, and that have the very plan: others may take it over then.
        self.confirmed: list[weakref.ref[Any]] = []
        self._thread = threading.get_ident()
        self._function, self._ignore = step.function, step.ignore
        self._paths = [path for path, _ in state.modules], [path for path, _ in recording.tensors]
        tensors = [tensor for _, tensor in recording.tensors]
        self._of_state = {*map(id, tensors)}
        self._memory = _memory(tensors)
        self._described = {id(fact.container) for fact in self._facts if fact.kind == TYPE_OF}
        self._containers = {id(fact.container) for fact in self._facts}
        self._objects: Objects = []
        self._numbers: dict[int, int] = {}  # of own objects, by their identities
        self._roots = [self._expected(root) for root in self._roots_of(step, tensors)]
        self._checks: list[tuple[int, _Read, Any, _Expected]] = []
        self._holders: list[int | None] = []  # of each fact the number of its own object
        common: set[int] = set()
        for fact in self._facts:
            holder = self._numbers.get(id(fact.container))
            self._holders.append(holder)
            if holder is None:
                common.update(id(part) for value in _mentioned(fact) for part in _with_parts(value))
            else:
                self._add(holder, fact)
        #: Own objects that common ones lead to: they must be the same for the other step.
        self._shared = [number for key, number in self._numbers.items() if key in common]
        self._held = [(place, holder) for place, holder in enumerate(self._holders) if holder is not None]
        self.own = bytes(holder is not None for holder in self._holders)
        self.told = Told(self._facts)

    @staticmethod
    def _roots_of(step: Step, tensors: list[torch.Tensor]) -> list[Any]:
        return [*(module for _, module in step.state.modules), *tensors]

    def _add(self, holder: int, fact: Fact) -> None:
        container, key = fact.container, fact.key
        if fact.kind in (ATTRIBUTE, CELL, CONTEXT_VAR):
            raise Unlike
        if fact.kind == TENSOR_META:
            return  # the library compares how it looks
        if fact.kind in _ONE:
            if not (fixed(key) or fact.kind == MEMBER):
                raise Unlike
            read = _ONE[fact.kind]
            value = read(container, key)
            self._checks.append((holder, read, key, self._expected(value)))
            if fact.kind == ENTRY_SIZE and id(value) in self._numbers:
                self._checks.append((holder, _class_and_size, key, _equals(_class_and_size(container, key))))
        elif fact.kind in _SEVERAL:
            self._several(holder, key, _entries(container, key))
        elif fact.kind in _EQUAL:
            read = _EQUAL[fact.kind]
            self._checks.append((holder, read, key, _equals(read(container, key))))
        else:  # no look at another object tells: it must be this one
            self._checks.append((holder, lambda holder, _: holder, None, _is(container)))

    def _several(self, holder: int, with_values: Any, entries: list[Any]) -> None:
        expected = [self._expected(entry) for entry in entries]

        def judge(found: list[Any], objects: Objects) -> None:
            if len(found) != len(expected):
                raise Unlike
            for each, expects in zip(found, expected, strict=True):
                expects(each, objects)

        self._checks.append((holder, _entries, with_values, judge))

    def _expected(self, value: Any) -> _Expected:
        """What is expected in the place of an object."""
        if value is ABSENT or value is None:
            return _is(value)
        if fixed(value) or type(value) is torch.Size:
            return _same_value(value)
        number = self._numbers.get(id(value))
        if number is not None:
            return _is_own(number)
        if way_of(type(value)) is Way.CAPTURED:
            return self._is_captured(_captured(value))
        if type(value) in _BUILT_IN and not value and id(value) not in self._containers:
            return _is_empty(type(value))
        if self._may_be_own(value):
            return self._own(value)
        return _is(value)

    def _may_be_own(self, value: Any) -> bool:
        """Whether facts tell all that there is to an object."""
        kind = type(value)
        if kind in _BUILT_IN or isinstance(value, nn.Module):
            return True
        if isinstance(value, torch.Tensor):
            return id(value) in self._of_state and _looks_plain(value)
        is_object = way_of(kind) is Way.OBJECT and id(value) in self._described
        return is_object and not _policy.is_opaque(kind) and not _introspect.hides(kind)

    def _own(self, value: Any) -> _Expected:
        number, kind = len(self._objects), type(value)
        own = _introspect.own(value)
        own = own if id(own) in self._containers else None
        for each in (value, *(() if own is None else (own,))):
            self._numbers[id(each)] = len(self._objects)
            self._objects.append(each)
        is_tensor = isinstance(value, torch.Tensor)
        mesh = value.device_mesh if isinstance(value, DTensor) else None

        def expects(found: Any, objects: Objects) -> None:
            if len(objects) > number:  # a list of entries may be read twice
                return _is_own(number)(found, objects)
            if type(found) is not kind or (is_tensor and not _looks_plain(found)):
                raise Unlike
            if mesh is not None and found.device_mesh is not mesh:
                raise Unlike
            objects.append(found)
            if own is not None:
                objects.append(_introspect.own(found))

        return expects

    def _is_captured(self, function: Any) -> _Expected:
        return lambda found, objects: self._same_function(
            _captured(found) if way_of(type(found)) is Way.CAPTURED else None, function, objects
        )

    def _same_function(self, found: Any, function: Any, objects: Objects) -> None:
        if found is function:
            return
        methods = type(found) is types.MethodType and type(function) is types.MethodType
        if not methods or found.__func__ is not function.__func__:
            raise Unlike
        number = self._numbers.get(id(function.__self__))
        if number is None or found.__self__ is not objects[number]:
            raise Unlike

    # -- of another step --------------------------------------------------------

    def own_objects(self, step: Step) -> Objects:
        """The own objects of an equal step, in the order of the known ones. Raises :class:`Unlike`."""
        tensors = list(step.state.tensors())
        roots = self._roots_of(step, [tensor for _, tensor in tensors])
        paths = [path for path, _ in step.state.modules], [path for path, _ in tensors]
        if self._thread != threading.get_ident() or paths != self._paths or step.ignore != self._ignore:
            raise Unlike
        objects: Objects = []
        for root, expected in zip(roots, self._roots, strict=True):
            expected(root, objects)
        self._same_function(step.function, self._function, objects)
        for holder, read, key, expected in self._checks:
            expected(read(objects[holder], key), objects)
        if len({*map(id, objects)}) != len(objects) or _memory([tensor for _, tensor in tensors]) != self._memory:
            raise Unlike
        if any(objects[number] is not self._objects[number] for number in self._shared):
            raise Unlike
        return objects

    def containers(self, objects: Objects) -> array[int]:
        """What the facts about an equal step with these own objects are about, for :class:`Told`."""
        found = self.told.containers[:]
        for place, holder in self._held:
            found[place] = id(objects[holder])
        return found

    def _facts_of(self, objects: Objects) -> list[Fact]:
        return [
            fact if holder is None else replace(fact, container=objects[holder], origin=None)
            for fact, holder in zip(self._facts, self._holders, strict=True)
        ]

    def renamed(self, objects: Objects) -> dict[int, Any]:
        """The own objects of an equal step, by the identities of the known ones."""
        return {key: objects[number] for key, number in self._numbers.items()}

    def is_like(self, step: Step, recording: Recording, kind: Hashable) -> bool:
        """Whether the facts of another recording are these, with own objects of its step in their places."""
        if kind != self.kind or self.guards != recording.survey.guards:
            return False
        try:
            expected = self._facts_of(self.own_objects(step))
        except Unlike:
            return False
        told = recording.survey.told
        return len(told) == len(expected) and all(map(_is_same_fact, told, expected))


def are_plain(value: Any) -> bool:
    """Whether arguments are made of plain tensors and values in tuples, lists and dicts of Python's own: the words of a
    call tell all of them."""
    kind = type(value)
    if kind in (tuple, list):
        return all(map(are_plain, value))
    if kind is dict:
        return all(type(key) is str and are_plain(item) for key, item in value.items())
    return _looks_plain(value) if isinstance(value, torch.Tensor) else fixed(value)


def _is_same_fact(one: Fact, other: Fact) -> bool:
    """Whether two facts are about the same object, and the same of it."""
    names = (one.kind, one.guard, one.subject, one.expected, one.hyperparameter)
    same_names = names == (other.kind, other.guard, other.subject, other.expected, other.hyperparameter)
    return same_names and _is_same(one.key, other.key) and _is_same(one.container, other.container)


def _is_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    names = type(one) is frozenset and all(type(name) is str for name in one)
    return type(one) is type(other) and (names or fixed(one)) and bool(one == other)


def _is(value: Any) -> _Expected:
    def expects(found: Any, _: Objects) -> None:
        if found is not value:
            raise Unlike

    return expects


def _is_empty(kind: type) -> _Expected:
    def expects(found: Any, _: Objects) -> None:
        if type(found) is not kind or found:
            raise Unlike

    return expects


def _is_own(number: int) -> _Expected:
    def expects(found: Any, objects: Objects) -> None:
        if found is not objects[number]:
            raise Unlike

    return expects


def _equals(value: Any) -> _Expected:
    def expects(found: Any, _: Objects) -> None:
        if found != value:
            raise Unlike

    return expects


def _same_value(value: Any) -> _Expected:
    kind, text = type(value), text_of(value)

    def expects(found: Any, _: Objects) -> None:
        if found is value:
            return
        if type(found) is not kind or not (fixed(found) or kind is torch.Size) or text_of(found) != text:
            raise Unlike

    return expects
