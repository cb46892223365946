"""What the entries of a large container hold, however deep: read at once, as one fact, for they are many.

Each entry counts by its identity. Looked into are containers of Python's own, classes that inherit from these, and
objects that are nothing but attributes. The bridge reads the same (`each_within` in objects.h).
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from . import _look
from ._facts import plain
from ._policy import DEPTH, MOST, Way, is_opaque, way_of

_CONTAINERS = (list, dict, tuple, set, frozenset, collections.deque)


@dataclass
class Within:
    """All that is found in a container."""

    found: list[tuple[Any, int | None]] = field(default_factory=list)
    """In the order of the bridge, with the size of what is looked into."""
    objects: dict[type, list[Any]] = field(default_factory=dict)
    """What is looked into and not of Python's own classes, by its class."""
    whole: bool = True
    """Whether nothing in it may hold more than what was found."""

    @property
    def key(self) -> tuple[frozenset[type], int, int]:
        """What the bridge needs to find the same: whose attributes count, how many levels deep, how many objects."""
        return frozenset(self.objects), DEPTH, MOST


class _TooMuchError(Exception):
    """More entries, or more levels, than are looked into."""


def look(container: Any) -> Within | None:
    """What a container holds; None: too much. Of too many objects, the attributes are left out."""
    for with_objects in (True, False):
        within = Within(whole=with_objects)
        try:
            _look_into(container, within, with_objects, DEPTH)
        except _TooMuchError:
            continue
        return within
    return None


def _look_into(container: Any, within: Within, with_objects: bool, depth: int) -> None:
    for item in _entries(container):
        inside = _inside(item, within, with_objects)
        within.found.append((item, None if inside is None else _look.size(inside)))
        if len(within.found) > MOST:
            raise _TooMuchError
        if inside is not None:
            if depth == 0:
                raise _TooMuchError
            _look_into(inside, within, with_objects, depth - 1)


def _entries(container: Any) -> Iterator[Any]:
    for entry in _look.entries(container):
        yield entry
        if issubclass(type(container), dict):
            yield dict.__getitem__(container, entry)


def _inside(item: Any, within: Within, with_objects: bool) -> Any:
    """What an entry holds: itself, if it is a container, or the dict of its attributes."""
    kind = type(item)
    if issubclass(kind, _CONTAINERS):
        within.whole = within.whole and not _look.own(item) and not any(_look.members(kind))
        if _look.can_change(kind):
            within.objects.setdefault(kind, []).append(item)
        return item
    if plain(item):
        return None
    if with_objects and _is_looked_into(kind):
        within.objects.setdefault(kind, []).append(item)
        return _look.own(item)
    within.whole = False
    return None


def _is_looked_into(kind: type) -> bool:
    """Whether the objects of a class are nothing but attributes."""
    if way_of(kind) is not Way.OBJECT or is_opaque(kind) or _look.hides(kind) or any(_look.members(kind)):
        return False
    return kind.__dictoffset__ != 0 and not any("__next__" in _look.class_dict(base) for base in _look.mro(kind))
