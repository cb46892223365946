"""What tensors are, as text: values, flags, gradients, and which share memory."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def look(**named: object) -> str:
    """One line for each tensor; storages are numbered in the order in which they are met."""
    storages: dict[int, int] = {}
    return "\n".join(line for name, value in named.items() for line in _lines(name, value, storages))


def _lines(name: str, value: object, storages: dict[int, int], depth: int = 0) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [line for i, each in enumerate(value) for line in _lines(f"{name}[{i}]", each, storages, depth)]
    if not isinstance(value, Tensor):
        return [f"{name}: {value!r}"]
    with torch.no_grad():
        local = value.to_local() if isinstance(value, DTensor) else value
    content = local.detach().contiguous().reshape(-1)
    said = [
        type(value).__name__,
        f"{tuple(value.shape)} {local.stride()} at {local.storage_offset()}",
        f"of {_number(local, storages)}",
        content.tolist(),
        *(word for word in ("requires_grad", "is_leaf", "retains_grad") if getattr(value, word)),
        *(["a view"] if value._is_view() else []),
    ]
    lines = [f"{name}: {' '.join(map(str, said))}"]
    if (value.is_leaf or value.retains_grad) and value.grad is not None and depth < 3:
        lines += _lines(f"{name}.grad", value.grad, storages, depth + 1)
    return lines


def _number(local: Tensor, storages: dict[int, int]) -> str:
    """Storages that begin at one address are one memory; what is empty shares nothing."""
    storage = local.untyped_storage()
    if not storage.nbytes():
        return "nothing"
    return f"memory {storages.setdefault(storage.data_ptr(), len(storages))} of {storage.nbytes()} bytes"
