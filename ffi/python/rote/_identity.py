"""Findings about objects, remembered by the identity of the object, not by equality."""

from __future__ import annotations

import builtins
import functools
from collections.abc import Callable
from typing import TypeVar

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")
address = builtins.id  # while a step is recorded, another function has that name


def by_identity(find: Callable[[_Asked], _Found], most: int = 4096) -> Callable[[_Asked], _Found]:
    """Remembers what a function finds of objects that do not change, of at most ``most`` of them: to hash a code object
    or a mesh takes longer than most questions, and equal code may be of different files."""
    known: dict[int, tuple[_Asked, _Found]] = {}  # by addresses, which are kept taken

    @functools.wraps(find)
    def ask(asked: _Asked) -> _Found:
        entry = known.get(address(asked))
        if entry is None:
            found = find(asked)
            if len(known) >= most:
                known.clear()
            entry = known[address(asked)] = (asked, found)
        return entry[1]

    return ask
