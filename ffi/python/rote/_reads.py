"""Which attributes of some objects are read and set, while a step is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import _introspect

_Reader = Callable[[Any, str], Any]
_Writer = Callable[[Any, str, bool], None]
_NONE = object()


def is_plain(one: Any) -> bool:
    """Whether Python's own code finds the attributes of an object."""
    kind = type(one)
    found = (name for each in _introspect.mro(kind) for name in _introspect.class_dict(each))
    reads: Any = kind.__getattribute__
    return reads is object.__getattribute__ and "__getattr__" not in found


class Reads:
    """Tells of every read of an attribute of objects that are :func:`is_plain`. What the class of an object gives by
    ``object.__getattribute__``, by a descriptor's ``__get__`` or in C code, nothing tells of."""

    def __init__(self) -> None:
        self._watched: dict[int, list[_Reader]] = {}
        self._classes: list[type] = []  # whose objects say what is read of them
        self._written: dict[int, _Writer] = {}
        self._writing: list[tuple[type, str, Any]] = []  # classes, methods that were replaced there, and by what

    def watch(self, one: Any, reader: _Reader) -> None:
        """Calls ``reader`` with the object and the name at each read, two frames above the code that reads. What it
        returns stands for the attribute, if it is not None."""
        watched, kind = self._watched, type(one)
        watched.setdefault(id(one), []).append(reader)
        if kind in self._classes:
            return

        def __getattribute__(self: Any, name: str) -> Any:
            if name != "__class__":
                for reader in watched.get(id(self), ()):
                    found = reader(self, name)
                    if found is not None:
                        return found
            return object.__getattribute__(self, name)

        kind.__getattribute__ = __getattribute__  # type: ignore[assignment]
        self._classes.append(kind)

    def watch_writes(self, one: Any, writer: _Writer) -> None:
        """Calls ``writer`` with the object, the name and whether it goes, before an attribute is set or deleted. What
        ``object.__setattr__`` sets, nothing tells of."""
        written, kind = self._written, type(one)
        written[id(one)] = writer
        if any(known is kind for known, _, _ in self._writing):
            return
        sets: Any = kind.__setattr__
        deletes: Any = kind.__delattr__

        def __setattr__(self: Any, name: str, value: Any) -> None:
            if (told := written.get(id(self))) is not None:
                told(self, name, False)
            sets(self, name, value)

        def __delattr__(self: Any, name: str) -> None:
            if (told := written.get(id(self))) is not None:
                told(self, name, True)
            deletes(self, name)

        for method in (__setattr__, __delattr__):
            self._writing.append((kind, method.__name__, _introspect.class_dict(kind).get(method.__name__, _NONE)))
            setattr(kind, method.__name__, method)

    def watches(self, one: Any) -> bool:
        """Whether reads of an object are told of."""
        return id(one) in self._watched

    def leave(self, one: Any) -> None:
        """Tells of an object no more."""
        self._watched.pop(id(one), None)

    def close(self) -> None:
        """Tells of nothing any more."""
        self._watched.clear()
        self._written.clear()
        while self._classes:
            del self._classes.pop().__getattribute__
        while self._writing:
            kind, name, own = self._writing.pop()
            delattr(kind, name) if own is _NONE else setattr(kind, name, own)
