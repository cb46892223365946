"""Findings about objects, remembered by the identity of the object, not by equality."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import Generic, TypeVar

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")
address = builtins.id  # while a step is recorded, another function has that name


class by_identity(Generic[_Asked, _Found]):
    """Remembers what a function finds of objects that do not change, of at most ``most`` of them: to hash a code object
    or a mesh takes longer than most questions, and equal code may be of different files."""

    def __init__(self, find: Callable[[_Asked], _Found], most: int = 4096) -> None:
        functools.update_wrapper(self, find)
        self._find = find
        self._most = most
        self._known: dict[int, tuple[_Asked, _Found]] = {}  # by addresses, which are kept taken

    def __call__(self, asked: _Asked) -> _Found:
        entry = self._known.get(address(asked))
        if entry is None:
            found = self._find(asked)
            if len(self._known) >= self._most:
                self._known.clear()
            entry = self._known[address(asked)] = (asked, found)
        return entry[1]
