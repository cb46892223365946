"""What a step reads of a tensor besides its data while it is recorded: where its memory lies, how often it was
written.

These are Python values that a plan would freeze. Of an argument, where it lies may differ from call to call: once
a step has looked, later calls are compared in that too. What differs at every call refuses the recording.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch

from ._native import check, lib
from ._specs import local_of

# Methods and properties that tell where the memory of a tensor lies.
_PLACES = ("storage_offset", "untyped_storage", "storage", "_typed_storage", "_is_view")
# What no guard could hold to: why, by name.
_REFUSED = {
    "_version": "how often a tensor was written",
    "_base": "the tensor that another is a view of",
    "is_shared": "whether other processes share a tensor's memory",
    "is_pinned": "whether a tensor's memory is pinned",
}
_ADDRESSES = ("data_ptr", "tolist", "__getitem__", "__iter__")

Patch = Callable[[Any, str, Any], AbstractContextManager[None]]


class Looks:
    """Watches what one recorded step reads of its arguments and of the state."""

    def __init__(
        self,
        session: Any,
        refuse: Callable[[str, str, str], None],
        is_user_code: Callable[[types.CodeType], bool],
    ) -> None:
        self._session = session
        self._refuse = refuse
        self._is_user_code = is_user_code
        self._known: dict[int, int | None] = {}  # storages from before the step: which leaf has it

    def know(self, tensors: Iterable[tuple[torch.Tensor, int | None]]) -> None:
        """Names the tensors from before the step, of arguments with their leaf."""
        for tensor, leaf in tensors:
            storage = _storage(tensor)
            if storage is not None and self._known.get(storage) is None:
                self._known[storage] = leaf

    def patches(self, stack: ExitStack, patched: Patch) -> None:
        """Enters every patch."""
        for name in _PLACES:
            stack.enter_context(patched(torch.Tensor, name, self._place(name)))
        for name, what in _REFUSED.items():
            stack.enter_context(patched(torch.Tensor, name, self._refused(name, what)))
        for name in _ADDRESSES:
            stack.enter_context(patched(torch.UntypedStorage, name, self._address(name)))
        for owner, name in ((torch, "initial_seed"), (torch.random, "initial_seed"), (torch.cuda, "initial_seed")):
            stack.enter_context(patched(owner, name, self._seed(getattr(owner, name))))

    def _place(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)

        def place(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self._is_user_code(sys._getframe(1).f_code):
                leaf = self._known.get(_storage(tensor) or 0)
                if leaf is not None:
                    check(lib.rote_record_closer(self._session, leaf))
            return original(tensor, *args, **kwargs)

        return place

    def _refused(self, name: str, what: str) -> Any:
        original = getattr(torch.Tensor, name)

        def look(tensor: torch.Tensor) -> None:
            if self._is_user_code(sys._getframe(2).f_code) and (_storage(tensor) or 0) in self._known:
                self._refuse(
                    f"Tensor.{name}",
                    f"reads {what}, of an argument or of the state: Python would find another value at a later call",
                    "read it outside the captured function",
                )

        if not callable(original):

            def read(tensor: torch.Tensor) -> Any:
                look(tensor)
                return original.__get__(tensor)

            return property(read)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            look(tensor)
            return original(tensor, *args, **kwargs)

        return call

    def _address(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.UntypedStorage, name)

        def read(storage: Any, *args: Any) -> Any:
            if self._is_user_code(sys._getframe(1).f_code):
                self._refuse(
                    f"UntypedStorage.{name}",
                    "reads a storage on the host: what Python does with that leaves no trace in a plan",
                    "read it outside the captured function",
                )
            return original(storage, *args)

        return read

    def _seed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def initial_seed(*args: Any) -> Any:
            if self._is_user_code(sys._getframe(1).f_code):
                self._refuse(
                    "torch.initial_seed",
                    "reads the seed of a generator: a later call may find another one",
                    "pass the seed as an argument",
                )
            return original(*args)

        return initial_seed


def _storage(tensor: torch.Tensor) -> int | None:
    """The address of a local tensor's storage, if it has one."""
    try:
        return int(torch._C.TensorBase.untyped_storage(local_of(tensor))._cdata)
    except (RuntimeError, NotImplementedError):
        return None
