"""Tensors that a step makes of numbers on the host: a plan makes them anew by ops.

Whether the numbers change is seen as for any other number: two recordings differ then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_MOST = 64  # elements; larger data belongs into the state
_NUMBERS = (bool, int, float, complex)
PLAIN = (torch.Tensor, torch.nn.Parameter, DTensor)

# An op with its arguments and its result.
Op = tuple[Any, tuple[Any, ...], dict[str, Any], torch.Tensor]


def is_literal(data: Any) -> bool:
    """Whether data is a number, or lists and tuples of a few: a tensor of it has memory of its own."""
    left = _MOST
    pending = [data]
    while pending:
        value = pending.pop()
        if type(value) in (list, tuple, torch.Size):
            pending.extend(value[: left + 1])
        elif type(value) not in _NUMBERS:
            return False
        else:
            left -= 1
        if left < 0 or len(pending) > _MOST * 8:
            return False
    return True


def in_index(tensor: torch.Tensor, key: Any, *value: Any) -> int:
    """How many tensors PyTorch makes at most of the sequences in an index, such as `x[:, [0, -1]]`, and of a number
    that is written there, as PyTorch 2.11 does; 0 if one of them is no literal, or if a class may run its own code."""
    parts = key if type(key) is tuple else (key,)
    if any(isinstance(each, torch.Tensor) and type(each) not in PLAIN for each in (tensor, *parts)):
        return 0
    sequences = [list(part[: _MOST + 1]) if type(part) is range else part for part in parts]
    sequences = [part for part in sequences if type(part) in (list, tuple, bool)]
    if not all(map(is_literal, sequences)):
        return 0
    # A list of lists may be taken for a tuple of them.
    written = sum(type(each) in _NUMBERS for each in value)
    return len(sequences) + sum(len(part) for part in sequences if type(part) is list) + written


def ops_of(tensor: torch.Tensor, number: float | None, unrecorded: Callable[[], Any]) -> Iterator[Op]:
    """The ops that make a constant anew. ``number``: what it was made of, where that is known more exactly than the
    tensor holds it. What runs under ``unrecorded()`` is not recorded."""
    like = {"dtype": tensor.dtype, "device": tensor.device}
    if tensor.numel() == 0:
        yield torch.ops.aten.empty.memory_format, (list(tensor.shape),), like, tensor
        return
    with unrecorded():
        values = tensor.reshape(-1).tolist()
        parts = [tensor] if tensor.dim() == 0 else [each.clone() for each in tensor.reshape(-1)]
        flat = tensor.view(-1)
    for part, value in zip(parts, values, strict=True):
        yield torch.ops.aten.scalar_tensor.default, (value if number is None else number,), like, part
    if tensor.dim() > 0:
        yield torch.ops.aten.stack.default, (parts,), {}, flat
