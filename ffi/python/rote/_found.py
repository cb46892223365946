"""Tensors that a step uses and nobody has named in ``state=``: class weights in a closure, a running total in an
attribute, the shadow list of an average, a teacher.

A recorded step meets them. From the next recording on they are part of the state, as if they were named there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch

# Tensors that are found, at most.
_MOST = 4096
# How many tensors may be found at one path, one after the other.
_MOST_AT_ONE_PATH = 4


class Found:
    """The tensors that belong to the state of a step and were not named. It does not keep them alive."""

    def __init__(self) -> None:
        self._tensors: dict[int, tuple[str, weakref.ref[torch.Tensor]]] = {}
        self._times: dict[str, int] = {}

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
