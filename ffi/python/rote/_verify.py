"""Replay beside eager, from the same state, compared bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._specs import local_of
from ._state import State


@dataclass
class Snapshot:
    """Copies of everything that a step may write, and what was returned."""

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    grads: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    result: list[tuple[str, torch.Tensor]]
    cpu_generator: torch.Tensor
    cuda_generator: torch.Tensor | None

    @staticmethod
    def take(state: State, args: Any, kwargs: Any, result: Any = None) -> Snapshot:
        """Copies the state, the arguments, gradients and generators."""
        named = dict(state.tensors())
        named.update(_tensors("args", args))
        named.update(_tensors("kwargs", kwargs))
        tensors = {path: (t, local_of(t).detach().clone()) for path, t in named.items()}
        grads = {
            path: (t, t.grad, None if t.grad is None else local_of(t.grad).detach().clone())
            for path, t in named.items()
            if t.requires_grad and t.is_leaf
        }
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        returned = [(path, local_of(t).detach().clone()) for path, t in _tensors("result", result).items()]
        return Snapshot(tensors, grads, returned, torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Puts everything back, in place."""
        with torch.no_grad():
            for tensor, copy in self.tensors.values():
                local_of(tensor).detach().copy_(copy)
            for tensor, grad, grad_copy in self.grads.values():
                tensor.grad = grad
                if grad is not None and grad_copy is not None:
                    local_of(grad).copy_(grad_copy)
        torch.set_rng_state(self.cpu_generator)
        if self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator)


def compare(replayed: Snapshot, eager: Snapshot) -> str | None:
    """The first thing that differs, by name."""
    for path, (_, copy) in eager.tensors.items():
        if path in replayed.tensors and not _same(copy, replayed.tensors[path][1]):
            return path
    for path, (_, _, eager_grad) in eager.grads.items():
        grad = replayed.grads[path][2]
        if (grad is None) != (eager_grad is None):
            return f"{path}.grad"
        if grad is not None and eager_grad is not None and not _same(grad, eager_grad):
            return f"{path}.grad"
    if len(eager.result) != len(replayed.result):
        return "the number of returned tensors"
    for (path, tensor), (_, other) in zip(eager.result, replayed.result, strict=True):
        if not _same(tensor, other):
            return path
    if not torch.equal(eager.cpu_generator, replayed.cpu_generator):
        return "the state of the CPU generator"
    return None


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: NaN equals the same NaN, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return (
        torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
        if a.dim()
        else torch.equal(a.reshape(1).view(torch.uint8), b.reshape(1).view(torch.uint8))
    )


def _tensors(path: str, value: Any) -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor | DTensor):
        return {path: value}
    found: dict[str, torch.Tensor] = {}
    if isinstance(value, tuple | list):
        for i, item in enumerate(value):
            found.update(_tensors(f"{path}[{i}]", item))
    elif isinstance(value, dict):
        for key, item in value.items():
            found.update(_tensors(f"{path}[{key!r}]", item))
    return found
