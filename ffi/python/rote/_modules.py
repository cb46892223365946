"""What modules hold, by no code of their classes: these may have methods such as ``named_parameters`` of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn


def within(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and those inside of it with their paths, each once, as ``named_modules()``."""
    return _all(module, set())


def within_each(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """The same of several modules with paths of their own."""
    for path, module in modules:
        for name, inner in within(module):
            yield (f"{path}.{name}" if name else path), inner


def _all(module: nn.Module, known: set[int] | None, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """``known``: those that are not to come again; None if they are."""
    if known is not None:
        if id(module) in known:
            return
        known.add(id(module))
    yield path, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _all(child, known, f"{path}.{name}" if path else name)


def parameters(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters with all their paths, as ``named_parameters(remove_duplicate=False)``."""
    return _tensors(module, "_parameters")


def buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers with all their paths, as ``named_buffers(remove_duplicate=False)``."""
    return _tensors(module, "_buffers")


def _tensors(module: nn.Module, store: str) -> Iterator[tuple[str, torch.Tensor]]:
    for path, inner in _all(module, None):
        for name, tensor in getattr(inner, store).items():
            if tensor is not None:
                yield (f"{path}.{name}" if path else name), tensor
