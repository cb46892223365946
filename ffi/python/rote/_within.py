"""What the entries of a large container hold, however deep: read at once, as one fact, for they are many.

Each entry counts by its identity. Looked into, once each, are containers of Python's own, classes that inherit from
these, and attributes of objects that are nothing but attributes, or text, a number or a member of an enum besides. The
bridge reads the same of the holders (`within` in objects.h).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import _introspect
from ._facts import fixed, plain
from ._policy import MOST, Way, is_opaque, way_of

_IMMUTABLE = (tuple, frozenset)
_CONTAINERS = (list, dict, set, collections.deque, *_IMMUTABLE)


@dataclass
class Within:
    """All that is found in a container."""

    found: list[tuple[Any, int | None]] = field(default_factory=list)
    """Every entry, with the size of one that is looked into."""
    holders: list[Any] = field(default_factory=list)
    """What is looked into and may come to hold other entries."""
    objects: dict[type, list[Any]] = field(default_factory=dict)
    """What is looked into and not of Python's own classes, by its class."""
    whole: bool = True
    """Whether nothing in it may hold more than what was found."""


class _TooMuchError(Exception):
    """More entries than are looked into."""


def never_changes(value: Any) -> bool:
    """Whether an entry holds nothing that may change."""
    return fixed(value) or _introspect.numpy_scalar(type(value))


def look(container: Any) -> Within | None:
    """What a container holds; None: too much. Of too many objects, the attributes are left out."""
    for with_objects in (True, False):
        try:
            return _look_into(container, with_objects)
        except _TooMuchError:
            continue
    return None


def _look_into(container: Any, with_objects: bool) -> Within:
    within = Within(whole=with_objects)
    seen = {id(container)}
    left = collections.deque([_entries(container)])
    while left:
        for item in left.popleft():
            inside = _inside(item, within, with_objects)
            within.found.append((item, None if inside is None else len(inside)))
            if len(within.found) > MOST:
                raise _TooMuchError
            if inside is None or id(item) in seen:
                continue
            seen.add(id(item))
            left.append(iter(inside))
            if not issubclass(type(item), _IMMUTABLE) or _introspect.own(item) is not None:
                within.holders.append(item)
    return within


def _entries(container: Any) -> Iterator[Any]:
    for entry in _introspect.entries(container):
        yield entry
        if issubclass(type(container), dict):
            yield dict.__getitem__(container, entry)


def _inside(item: Any, within: Within, with_objects: bool) -> list[Any] | None:
    """What an entry holds: entries and attributes. None: nothing that may change, or nothing that can be told."""
    kind = type(item)
    if never_changes(item) or (issubclass(kind, type) and item in within.objects):  # classes are guarded by themselves
        return None
    container = issubclass(kind, _CONTAINERS)
    if not container and not (
        with_objects and (_is_attributes(kind) or (plain(item) and not any(_introspect.members(kind))))
    ):
        within.whole = False
        return None
    if any(_introspect.members(kind)):
        within.whole = False
    if _introspect.can_change(kind):
        within.objects.setdefault(kind, []).append(item)
    own = _introspect.own(item)
    return [*(_entries(item) if container else ()), *(() if own is None else _entries(own))]


def _is_attributes(kind: type) -> bool:
    """Whether the objects of a class are nothing but attributes."""
    if way_of(kind) is not Way.OBJECT or is_opaque(kind) or _introspect.hides(kind) or any(_introspect.members(kind)):
        return False
    return kind.__dictoffset__ != 0 and not any(
        "__next__" in _introspect.class_dict(base) for base in _introspect.mro(kind)
    )
