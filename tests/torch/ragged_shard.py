"""veScale's `RaggedShard`: each rank holds as many units of a tensor dim as it is told.

A dim of 8 elements over units (1, 3) has 2 elements on the first rank and 6 on the second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import rote.propagation
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

# Named otherwise in older versions of torch.
all_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor


class RaggedShard(Shard):
    """A shard of `units[rank]` of `sum(units)` equal units of the dim."""

    def __init__(self, dim: int, units: tuple[int, ...]) -> None:
        super().__init__(dim)
        self.units = units

    def sizes(self, size: int) -> list[int]:
        return [size // sum(self.units) * units for units in self.units]

    def _split_tensor(self, tensor: Tensor, num_chunks: int, **_: Any) -> tuple[list[Tensor], list[int]]:
        pieces = tensor.split(self.sizes(tensor.shape[self.dim]), self.dim)
        return [piece.contiguous() for piece in pieces], [0] * num_chunks

    def _to_replicate_tensor(self, local: Tensor, mesh: DeviceMesh, mesh_dim: int, shape: Sequence[int]) -> Tensor:
        sizes = self.sizes(shape[self.dim])
        padded = local.movedim(self.dim, 0).contiguous()
        padded = torch.cat([padded, padded.new_zeros(max(sizes) - len(padded), *padded.shape[1:])])
        pieces = all_gather(padded, 0, (mesh, mesh_dim)).split(max(sizes))
        whole = torch.cat([piece[:size] for piece, size in zip(pieces, sizes, strict=True)])
        return whole.movedim(0, self.dim).contiguous()

    def _local_shard_size_and_offset(self, size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        sizes = self.sizes(size)
        return sizes[rank], sum(sizes[:rank])

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and (self.dim, self.units) == (other.dim, other.units)

    def __hash__(self) -> int:
        return hash((self.dim, self.units))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.dim}, units={self.units})"

    __str__ = __repr__

    def __reduce__(self) -> Any:
        return type(self), (self.dim, self.units)


def indices(placement: RaggedShard, size: int, ranks: int) -> list[range]:
    """The elements of a dim that each rank holds."""
    if len(placement.units) != ranks or size % sum(placement.units):
        raise ValueError(f"{size} elements are no units {placement.units} on {ranks} ranks")
    sizes = placement.sizes(size)
    ends = [sum(sizes[: rank + 1]) for rank in range(ranks)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def register() -> None:
    """Lets Rote answer about tensors that lie so."""
    rote.propagation.register_sharding(RaggedShard, indices=indices, parameters=("units",))
