"""Reads of a tensor's address and version by a step that is recorded: where its memory lies, how often it was written.

These are Python values that a plan would freeze. An argument may lie elsewhere at each call. If the step asks for the
place, the plan fits only arguments at this place. If no guard could check a value, the recording is refused.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from ctypes import byref, c_int
from typing import Any

import torch

from ._native import check, lib
from ._specs import local_of

# How a tensor lies in its storage, by what asks for it.
_PLACES = ["storage_offset", "untyped_storage", "storage", "_typed_storage", "_base", "_is_view", "is_inference"]
# What cannot be guarded: refused for tensors that exist before the step.
_COUNTED = ("_version", "is_shared", "_use_count")
_PLACES += [name for name in _COUNTED if hasattr(torch.Tensor, name)]
# What reads or writes memory through a storage.
_STORAGE_ACCESS = {
    torch.UntypedStorage: (
        *("__getitem__", "__setitem__", "__iter__", "tolist", "data_ptr", "copy_", "fill_", "resize_", "clone"),
        *("cpu", "cuda", "byteswap", "share_memory_"),
    ),
    torch.TypedStorage: ("data_ptr", "resize_", "copy_", "fill_", "tolist", "__getitem__", "__setitem__"),
}

Patch = Callable[[Any, str, Any], AbstractContextManager[None]]


def of_tensors(name: str) -> Any:
    """What tensors have by a name: a method, or a property."""
    return vars(torch.Tensor).get(name, getattr(torch._C.TensorBase, name, None))


class MetadataReads:
    """Watches what one recorded step reads of tensors, storages and generators."""

    def __init__(
        self,
        session: Any,
        refuse: Callable[[str, str, str], None],
        is_step: Callable[[types.CodeType], bool],
        resized: Callable[[int, int, int], None],
    ) -> None:
        """``resized``: is told of a storage that code of a library has resized, from and to so many bytes."""
        self._session = session
        self._resized = resized
        self._refuse = refuse
        self._is_step = is_step

    def patches(self, stack: ExitStack, patched: Patch) -> None:
        """Enters every patch."""
        for name in _PLACES:
            stack.enter_context(patched(torch.Tensor, name, self._place(name)))
        for kind, names in _STORAGE_ACCESS.items():
            for name in names:
                stack.enter_context(patched(kind, name, self._storage_access(kind, name)))
        for owner in (torch, torch.random, torch.cuda):
            stack.enter_context(patched(owner, "initial_seed", self._seed(owner.initial_seed)))
        generator = vars(torch.random)["default_generator"]  # which `initial_seed` asks, by whatever name it goes
        stack.enter_context(patched(torch.random, "default_generator", _Asked(generator, self._refuse_seed)))

    def _place(self, name: str) -> Any:
        original = of_tensors(name)

        def ask(tensor: torch.Tensor) -> None:
            if not self._is_step(sys._getframe(2).f_code):
                return
            named = c_int()
            check(lib.rote_record_anchor(self._session, local_of(tensor), byref(named)))
            if named.value and name in _COUNTED:
                self._refuse(
                    f"Tensor.{name}",
                    f"asks for {name} of a tensor that exists before the step: a plan cannot hold Python's use of the "
                    "answer",
                    "ask outside the captured function, and pass the answer as an argument",
                )

        if not callable(original):  # a property

            def get(tensor: torch.Tensor) -> Any:
                ask(tensor)
                return original.__get__(tensor)

            return property(get)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            ask(tensor)
            return original(tensor, *args, **kwargs)

        return call

    def _storage_access(self, kind: type, name: str) -> Callable[..., Any]:
        original = getattr(kind, name)
        resizes = kind is torch.UntypedStorage and name == "resize_"

        def access(storage: Any, *args: Any, **kwargs: Any) -> Any:
            if self._is_step(sys._getframe(1).f_code):
                self._refuse(
                    f"{kind.__name__}.{name}",
                    "reads or writes the memory of a storage: a plan cannot hold these reads and writes",
                    "use torch ops on the tensor, or use the storage outside the captured function",
                )
            if not resizes:
                return original(storage, *args, **kwargs)
            before = storage.nbytes()
            result = original(storage, *args, **kwargs)
            self._resized(storage._cdata, before, storage.nbytes())
            return result

        return access

    def _seed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def initial_seed(*args: Any) -> Any:
            if self._is_step(sys._getframe(1).f_code):
                self._refuse_seed()
            return original(*args)

        return initial_seed

    def _refuse_seed(self) -> None:
        self._refuse(
            "torch.initial_seed",
            "reads the seed of a generator: a later call may find another seed",
            "pass the seed as an argument",
        )


class _Asked:
    """A generator that tells who asks for its seed."""

    def __init__(self, generator: torch.Generator, ask: Callable[[], None]) -> None:
        self._generator, self._ask = generator, ask

    def initial_seed(self) -> int:
        """The seed of the generator."""
        self._ask()
        return self._generator.initial_seed()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)
