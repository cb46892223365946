"""What modules hold, by no code of their classes: these may have methods such as ``named_parameters`` of their own."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def within(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A module and those inside of it with their paths, each once, as ``named_modules()``."""
    return _all(module, set())


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


def parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters with all their paths, as ``named_parameters(remove_duplicate=False)``."""
    for path, inner in _all(module, None):
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                yield (f"{path}.{name}" if path else name), parameter


def buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Buffers with all their paths, as ``named_buffers(remove_duplicate=False)``."""
    for path, inner in _all(module, None):
        for name, buffer in inner._buffers.items():
            if buffer is not None:
                yield (f"{path}.{name}" if path else name), buffer
