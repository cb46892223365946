"""What a step uses and nobody has named in ``state=``, as if it were named there.

Tensors: class weights in a closure, a running total in an attribute, the shadow list of an average, a teacher. A
recorded step meets them, and the next recording knows them.

Optimizers of which a recorded step calls ``step``. And the modules in reach, where no state was given at all: the walk
before a recording meets them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch

# Tensors that are found, at most.
_MOST = 4096
# Modules and optimizers, at most.
_MOST_PARTS = 256
# How many tensors may be found at one path, one after the other.
_MOST_AT_ONE_PATH = 8


class Found:
    """Tensors, modules and optimizers that belong to the state of a step and were not named. It does not keep them
    alive."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._times: dict[str, int] = {}
        self._parts: dict[int, tuple[str, weakref.ref[Any]]] = {}

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those that are alive, with their paths."""
        for path, reference in list(self._tensors.values()):
            tensor = reference()
            if tensor is not None:
                yield path, tensor

    def add(self, met: Iterable[tuple[str, torch.Tensor]]) -> bool:
        """Takes tensors into the state. False: there are none, or too many."""
        self._tensors = {key: each for key, each in self._tensors.items() if each[1]() is not None}
        is_any = False
        for path, tensor in met:
            times = self._times[path] = self._times.get(path, 0) + 1
            if times > _MOST_AT_ONE_PATH or len(self._tensors) >= _MOST:
                return False
            self._tensors[id(tensor)] = path, weakref.ref(tensor)
            is_any = True
        return is_any

    def parts(self) -> Iterator[tuple[str, Any]]:
        """The modules and optimizers that are alive, with their paths."""
        for path, reference in list(self._parts.values()):
            part = reference()
            if part is not None:
                yield path, part

    def add_parts(self, met: Iterable[tuple[str, Any]]) -> bool:
        """Takes modules and optimizers into the state. False: there are no others than before, or too many."""
        self._parts = {key: each for key, each in self._parts.items() if each[1]() is not None}
        new = [(path, part) for path, part in met if id(part) not in self._parts]
        for path, part in new[: _MOST_PARTS - len(self._parts)]:
            self._parts[id(part)] = path, weakref.ref(part)
        return bool(new) and len(self._parts) < _MOST_PARTS
