"""Classes in reach: their attributes, and what their methods name and call."""

from __future__ import annotations

import gc
import types
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils import _pytree

from . import _introspect
from ._facts import ABSENT, all_of, describe, plain
from ._libraries import is_library_class, is_made_by_library
from ._named import Named
from ._numbers import BASES, CLASS, DICT_ITEM, HOST, SIZE
from ._policy import called_methods
from ._walk import Walk


class Classes:
    """The part of a walk that guards classes."""

    def __init__(self, walk: Walk, named: Named) -> None:
        self._walk = walk
        self._named = named
        self._seen: set[int] = set()
        self._own: list[tuple[str, dict[Any, Any]]] = []  # the user's, and what their dicts hold
        self._library: list[type] = []
        self._covered: set[int] = set()  # library classes that a fact of another one covers

    def of(self, kind: type, depth: int) -> None:
        """The attributes of a class, and what its methods name."""
        for base in _introspect.mro(kind):
            if not _introspect.can_change(base):
                continue
            self._walk.handlers.of_class(base)
            if is_library_class(base):
                self.of_library(base)
            elif id(base) not in self._seen:
                self._seen.add(id(base))
                self._of_the_user(base, depth)

    def _of_the_user(self, base: type, depth: int) -> None:
        walk, label = self._walk, _introspect.name(base)
        walk.add(BASES, base, None, HOST, label, base)
        own = _dict_behind(_introspect.class_dict(base))
        if own is None:
            return
        walk.class_dicts[id(own)] = base
        walk.add(SIZE, own, None, HOST, label, own, "")
        node = _pytree.SUPPORTED_NODES.get(base, ABSENT)
        walk.add(DICT_ITEM, _pytree.SUPPORTED_NODES, base, HOST, f"pytree of {label}", node)
        if node is not ABSENT:
            for function in (node.flatten_fn, node.unflatten_fn):
                walk.soon(f"pytree of {label}", function, depth + 1)
        self._own.append((label, own))
        for key, item in list(own.items()):
            if type(key) is not str or _is_said(key, item):
                continue
            subject = f"{label}.{key}"
            if not walk.add(DICT_ITEM, own, key, HOST, subject, item):
                continue
            if isinstance(item, staticmethod | classmethod):
                walk.soon(subject, item.__func__, depth + 1)
            elif isinstance(item, property):
                for accessor in (item.fget, item.fset):
                    walk.soon(subject, accessor, depth + 1)
            elif not isinstance(item, types.GetSetDescriptorType | types.MemberDescriptorType):
                walk.soon(subject, item, depth + 1)

    def of_library(self, kind: type) -> None:
        """A class of a library, once."""
        if id(kind) in self._seen:
            return
        self._seen.add(id(kind))
        self._library.append(kind)
        for base in _introspect.mro(kind)[1:]:
            self._covered.add(id(base))

    def finish(self) -> None:
        """Guards the classes of libraries, each with its bases, and what their methods call, once all names are
        known."""
        private = frozenset(name for name in self._named.attributes if name.startswith("_"))
        for kind in self._library:
            own = [_introspect.class_dict(base) for base in _introspect.mro(kind)]
            called = called_methods(kind, self._named.attributes)
            for key in sorted(called & set().union(*own)):
                method = next(names[key] for names in own if key in names)
                if type(method) is not types.FunctionType:
                    continue
                if is_made_by_library(method):
                    self._named.borrow(method)
                else:  # a script has put it there
                    self._walk.soon(f"{_introspect.name(kind)}.{key}", method, 1)
            for base in _introspect.mro(kind):
                self._objects_in(_introspect.name(kind), base)
            if id(kind) not in self._covered:
                switches = {
                    key for names in own for key, item in names.items() if type(item) is bool and type(key) is str
                }
                self._walk.add(CLASS, kind, private | switches, HOST, _introspect.name(kind), kind, self._set_in(own))

    def _objects_in(self, label: str, base: type) -> None:
        """Guards objects that code in reach names, among the attributes of a class of a library: a script may have put
        them there."""
        own = _introspect.class_dict(base)
        for key in self._named.attributes & own.keys():
            item = own[key]
            if plain(item) or (isinstance(item, type) and is_library_class(item)):
                continue
            if isinstance(item, staticmethod | classmethod):
                function: Any = item.__func__
                if type(function) is types.FunctionType and not is_made_by_library(function):
                    self._walk.soon(f"{label}.{key}", function, 1)
                continue
            if any("__get__" in _introspect.class_dict(each) for each in _introspect.mro(type(item))):
                continue
            behind = _dict_behind(own)
            self._walk.class_dicts[id(behind)] = base
            if self._walk.add(DICT_ITEM, behind, key, HOST, f"{label}.{key}", item):
                self._walk.soon(f"{label}.{key}", item, 1)

    def _set_in(self, own: Sequence[Mapping[str, Any]]) -> str:
        """What code in reach names that is set in a class of a library, for another process: there, methods are the
        same, and values may be others. ``own``: the attributes of the class and its bases."""
        named = self._named.attributes | self._named.texts
        found = (
            f"{key} = {describe(names[key])}" for names in own for key in named & names.keys() if plain(names[key])
        )
        return all_of(sorted(found))

    def of_definitions(self, asked: set[str]) -> None:
        """Guards what classes say of themselves, where code asks for it by these names."""
        walk = self._walk
        for label, own in self._own:
            for key in sorted(key for key in asked & own.keys() if _is_said(key, own[key])):
                if walk.add(DICT_ITEM, own, key, HOST, f"{label}.{key}", own[key]):
                    walk.value(f"{label}.{key}", own[key], 1)


def _dict_behind(attributes: Mapping[str, Any]) -> dict[str, Any] | None:
    """The dict that holds the attributes of a class, of which Python shows a view."""
    return next((inner for inner in gc.get_referents(attributes) if isinstance(inner, dict)), None)


def _is_said(key: str, item: Any) -> bool:
    """Whether an attribute of a class is what it says of itself: its text, its annotations, its fields. What computes
    or binds something when it is asked for (a class method) is none."""
    if not (key.startswith("__") and key.endswith("__")) or callable(item):
        return False
    kind = type(item)
    return kind is types.GetSetDescriptorType or not any(
        "__get__" in _introspect.class_dict(base) for base in _introspect.mro(kind)
    )
