"""Containers of other classes than Python's own: what an object is made of, if that is all there is to it.

An object of such a class is its entries (of a dict, list or tuple that its class inherits from), its attributes and its
slots. Rote reads these where the interpreter keeps them and runs no code of the class. Distributions of PyTorch hold
their parameters in the same way. Objects of other classes are no containers: objects that hold what only C code knows,
modules, optimizers, and classes of yours that neither are dataclasses nor inherit from a container.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import sys
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from . import _introspect
from ._identity import address, by_identity

_MANAGED_DICT = 1 << 4  # Py_TPFLAGS_MANAGED_DICT: the interpreter keeps the dict before the object
_POINTER = 8
_BASES: tuple[type, ...] = (collections.OrderedDict, dict, list, tuple, types.SimpleNamespace, object)
_NO_CONTAINERS = (nn.Module, torch.optim.Optimizer, torch.amp.GradScaler, torch.Tensor, enum.Enum, type)
_MOST = 10_000  # containers in one argument


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the objects of a class are made."""

    kind: type
    base: type  # whose entries the object has
    slots: tuple[tuple[str, Any], ...]  # names and descriptors
    sequence: bool  # of C code's, with a name for each entry

    def entries(self, value: Any) -> Any:
        """The entries of an object: a dict's as a list of pairs. None: its class has none."""
        base: Any = self.base
        if issubclass(base, dict):
            return [(key, dict.__getitem__(value, key)) for key in base.__iter__(value)]
        return list(base.__iter__(value)) if issubclass(base, list | tuple) else None

    def filled(self, value: Any) -> Iterator[tuple[str, Any]]:
        """The slots that an object has filled."""
        for name, member in self.slots:
            try:
                item = member.__get__(value)
            except AttributeError:
                continue
            yield name, item

    def make(self, entries: Any, attributes: dict[str, Any], slots: dict[str, Any]) -> Any:
        """An object of the class, by no code of the class."""
        base: Any = self.base
        if self.sequence:
            kind: Any = self.kind
            return kind(entries)
        made: Any = base.__new__(self.kind, entries) if base is tuple else base.__new__(self.kind)
        if issubclass(base, dict):
            for key, item in entries:
                base.__setitem__(made, key, item)
        elif base is list:
            list.extend(made, entries)
        if attributes:
            own = _introspect.own(made)
            if own is None:
                raise TypeError(f"a {_introspect.name(self.kind)} takes no attributes")
            own.update(attributes)
        for name, member in self.slots:
            if name in slots:
                member.__set__(made, slots[name])
        return made


@by_identity
def layout_of(kind: type) -> Layout | None:
    """How the objects of a class are made, if that is all there is to them; None of Python's own containers."""
    base = next(each for each in _introspect.mro(kind) if each in _BASES)
    if issubclass(kind, _NO_CONTAINERS) or (kind in _BASES and kind not in (_BASES[0], types.SimpleNamespace)):
        return None
    if kind is torch.Size or _is_sequence_of_torch(kind):
        return Layout(kind, tuple, (), True)
    if not _holds_others(kind, base):
        return None
    own = set(_introspect.mro(base))
    slots = tuple((name, member) for name, member, of in _introspect.members(kind) if of not in own)
    expected = base.__basicsize__ + _POINTER * len(slots)
    managed = bool(_introspect.flags(kind) & _MANAGED_DICT)
    expected += _POINTER * (kind.__dictoffset__ != 0 and base.__dictoffset__ == 0 and not managed)
    expected += _POINTER * (kind.__weakrefoffset__ > 0 and base.__weakrefoffset__ == 0)
    if kind.__basicsize__ != expected or len({name for name, _ in slots}) < len(slots):
        return None
    return Layout(kind, base, slots, False)


def _holds_others(kind: type, base: type) -> bool:
    """Whether the objects of a class are there to hold others."""
    return (
        base is not object
        or "__dataclass_fields__" in {key for each in _introspect.mro(kind) for key in _introspect.class_dict(each)}
        or issubclass(kind, collections.UserDict | collections.UserList | torch.distributions.Distribution)
        or kind in torch.utils._pytree.SUPPORTED_NODES
    )


def _is_sequence_of_torch(kind: type) -> bool:
    """Whether a class is one of those that ops of PyTorch return several tensors in."""
    return (
        _introspect.module_of(kind) == "torch.return_types" and getattr(torch.return_types, kind.__name__, None) is kind
    )


def attributes_of(value: Any) -> dict[Any, Any]:
    """The attributes that an object has of its own."""
    return _introspect.own(value) or {}


def named(module: str, name: str) -> Any:
    """What goes by a name in a Python module that is there; None."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = (_introspect.class_dict(found) if issubclass(type(found), type) else _introspect.own(found) or {}).get(
            part
        )
    return found


# -- arguments ----------------------------------------------------------------


class Parts(NamedTuple):
    """What an argument of another class is made of, one after the other. The bridge reads it too (arguments.h)."""

    names: tuple[Any, ...]  # which object it is, where that may matter; how many parts of each kind; keys and names
    values: tuple[Any, ...]

    def paths(self) -> list[str]:
        """What each part goes by, behind the name of the object."""
        _, pairs, _, *names = self.names
        return [*map(_path_of_key, names[:pairs]), *map(_path_of_attribute, names[pairs:])]


def _path_of_key(key: Any) -> str:
    try:
        return f"[{key!r}]"
    except Exception:  # of keys, which may be anything
        return f"[a {_introspect.name(type(key))}]"


def _path_of_attribute(name: str) -> str:
    is_plain = name.isidentifier() and name != "grad"  # a tensor's gradient goes by `.grad`
    return f".{name}" if is_plain else f".__dict__[{name!r}]"


# Objects that steps reach other than as arguments, by identity: code may ask whether an argument is one of them.
# Nothing is taken away, since a plan may have been made while the object was there.
_in_reach: dict[int, Any] = {}


def reached(value: Any) -> None:
    """Notes an object that a step has in reach."""
    if address(value) not in _in_reach and parts_of(value) is not None:
        _in_reach[address(value)] = value


def is_reached(value: Any) -> bool:
    """Whether some step has an object in reach."""
    return address(value) in _in_reach


def is_container(kind: type) -> bool:
    """Whether objects of a class may be taken apart."""
    return layout_of(kind) is not None


def parts_of(value: Any) -> Parts | None:
    """The parts of an argument that is a container of another class and holds a tensor, however deep; else None: it is
    one value. Nothing that an object is raises."""
    layout = layout_of(type(value))
    if layout is None:
        return None
    try:
        return _parts(value, layout) if _Search().has_tensor(value, layout) else None
    except Exception:  # of classes that have methods of their own
        return None


def _parts(value: Any, layout: Layout) -> Parts | None:
    entries = layout.entries(value) or []
    mapping = issubclass(layout.base, dict)
    pairs = entries if mapping else list(enumerate(entries))
    attributes, slots = attributes_of(value), dict(layout.filled(value))
    if any(type(name) is not str for name in attributes) or attributes.keys() & slots.keys():
        return None
    parts = (*pairs, *attributes.items(), *slots.items())
    reached = address(value) if address(value) in _in_reach else 0
    names = (reached, len(pairs), len(attributes), *(name for name, _ in parts))
    return Parts(names, tuple(item for _, item in parts))


class _TooMuchError(Exception):
    """A container that contains itself, or too many others."""


class _Search:
    """Looks for tensors in a container."""

    def __init__(self) -> None:
        self._above: set[int] = set()
        self._left = _MOST

    def has_tensor(self, value: Any, layout: Layout | None) -> bool:
        """Whether a container holds a tensor, and no module or optimizer beside it: what holds these is the step's
        own."""
        self._left -= 1
        if address(value) in self._above or self._left < 0:
            raise _TooMuchError
        self._above.add(address(value))
        found = False
        for item in _held(value, layout):
            if issubclass(type(item), torch.Tensor):
                found = True
            elif issubclass(type(item), nn.Module | torch.optim.Optimizer):
                found = False
                break
            else:
                kind = type(item)
                inner = layout_of(kind)
                if inner is not None or kind in (tuple, list, dict):
                    found = self.has_tensor(item, inner) or found
        self._above.discard(address(value))
        return found


def _held(value: Any, layout: Layout | None) -> Iterator[Any]:
    """What a container holds."""
    if layout is None:
        yield from dict.values(value) if type(value) is dict else value
        return
    for entry in layout.entries(value) or ():
        yield entry[1] if issubclass(layout.base, dict) else entry
    yield from attributes_of(value).values()
    for _, item in layout.filled(value):
        yield item


def held(value: Any) -> list[Any] | None:
    """What a container of any class holds; None: it is no container."""
    kind = type(value)
    layout = layout_of(kind)
    return None if layout is None and kind not in (tuple, list, dict) else list(_held(value, layout))


def all_of(value: Any) -> dict[int, Any]:
    """All containers in a value, the dicts of their attributes too, by their identities and in their order."""
    found: dict[int, Any] = {}
    pending = [value]
    while pending:
        each = pending.pop()
        inner = held(each)
        if inner is None or address(each) in found:
            continue
        found[address(each)] = each
        own = _introspect.own(each)
        if own is not None:
            found[address(own)] = own
        pending += inner
    return found
