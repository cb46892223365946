"""Partial log-sum-exps: each rank holds the logarithm of its summand, times a scale."""

from __future__ import annotations

from typing import Any

import rote.propagation
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard


class LogSumExp(Partial):
    """The tensor is `scale` times the logarithm of the sum of what the ranks hold, as exponents."""

    def __init__(self, scale: int = 1) -> None:
        super().__init__("logsumexp")
        self.scale = scale

    def _reduce_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        return collectives.all_reduce((tensor / self.scale).exp(), "sum", (mesh, mesh_dim)).log() * self.scale

    def _reduce_shard_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int, shard_spec: Any) -> Tensor:
        part = shard_spec._reduce_shard_tensor((tensor / self.scale).exp(), mesh, "sum", mesh_dim)
        return part.log() * self.scale

    def _partition_value(self, tensor: Tensor, mesh: DeviceMesh, mesh_dim: int) -> Tensor:
        raise ValueError("no log-sum-exp is made of a replicated tensor")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and self.scale == other.scale

    def __hash__(self) -> int:
        return hash((LogSumExp, self.scale))

    def __repr__(self) -> str:
        return f"LogSumExp({self.scale})"

    __str__ = __repr__


P = LogSumExp()


def combined(placement: LogSumExp, parts: list[Tensor]) -> Tensor:
    """What parts combine to."""
    return torch.stack(parts).div(placement.scale).logsumexp(0) * placement.scale


def register() -> None:
    """Lets Rote answer about such tensors, and add whole ones to them."""
    rote.propagation.register_partial(
        LogSumExp,
        reduction="sum",
        parameters=("scale",),
        passes={
            torch.ops.aten.add.Tensor: [[P, P, Replicate()]],
            torch.ops.aten.logsumexp.default: lambda x, dims, keepdim=False: [[P, Shard(dim)] for dim in dims],
        },
        combine=combined,
    )
