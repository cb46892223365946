"""DTensor's answer to a question, from a process group that moves nothing."""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._collective_utils import MeshTopoInfo, redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from .samples import Sample, Tensor

Placements = tuple[str, ...]


@dataclass
class Answer:
    """What an engine would do: where the inputs go, how the outputs lie, and
    the estimated microseconds; or why it refuses."""

    to: list[Placements] = field(default_factory=list)
    outputs: list[Placements] = field(default_factory=list)
    cost: float = 0.0
    error: str | None = None
    steps: list[str] = field(default_factory=list)


def start() -> None:
    """Makes this process one of eight that exist in name only."""
    # What fails while DTensor looks for shapes is an answer here, not an error.
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)
    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=8, store=FakeStore())


def stop() -> None:
    """Leaves that group."""
    dist.destroy_process_group()


@cache
def device_mesh(sizes: tuple[int, ...]) -> DeviceMesh:
    ranks = torch.arange(math.prod(sizes)).reshape(sizes)
    names = tuple(f"d{i}" for i in range(len(sizes)))
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False)


def links(sizes: tuple[int, ...]) -> list[list[float]]:
    """Latency and bandwidth of each mesh dim, as DTensor estimates them."""
    topology = MeshTopoInfo.build_from_mesh(device_mesh(sizes))
    return [list(pair) for pair in zip(topology.mesh_dim_latency, topology.mesh_dim_bandwidth, strict=True)]


def text(placement: Placement) -> str:
    """A placement in Rote's notation."""
    if isinstance(placement, _StridedShard) and placement.split_factor > 1:
        return f"_S({placement.dim},{placement.split_factor})"
    if isinstance(placement, (Shard, _StridedShard)):
        return f"S({placement.dim})"
    if type(placement).__name__ in ("_MaskPartial", "MaskPartial"):
        return "P(mask)"
    if isinstance(placement, _NormPartial):
        # Of order 1, powers and roots change nothing.
        return "P(sum)" if placement.norm_type == 1 else f"P(norm{float(placement.norm_type):g})"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R"


def placement(written: str) -> Placement:
    """A placement from Rote's notation."""
    if written.startswith("P(norm"):
        return _NormPartial(float(written[len("P(norm") : -1]))
    kind, *numbers = re.findall(r"\w+", written)
    match kind:
        case "R":
            return Replicate()
        case "S":
            return Shard(int(numbers[0]))
        case "_S":
            return _StridedShard(int(numbers[0]), split_factor=int(numbers[1]))
    return Partial(numbers[0])


def spec(tensor: Tensor, placements: Sequence[str], sizes: tuple[int, ...]) -> DTensorSpec:
    """A tensor that lies so.

    Strided shards that an order of shards explains mean that order; others are
    those that views make, which have no order.
    """
    mesh = device_mesh(sizes)
    strides = torch.empty(tensor.shape, device="meta").stride()
    meta = TensorMeta(torch.Size(tensor.shape), strides, tensor.dtype)
    concrete = tuple(placement(p) for p in placements)
    ordered = None
    if any(isinstance(p, _StridedShard) for p in concrete):
        ordered = DTensorSpec._maybe_convert_StridedShard_to_shard_order(concrete, mesh) is not None
    return DTensorSpec(mesh, concrete, tensor_meta=meta, use_strided_shard_as_shard_order=ordered)


def ask(sample: Sample, placements: Sequence[Placements], sizes: tuple[int, ...]) -> Answer:
    """DTensor's propagation, without its caches."""
    specs = [spec(t, p, sizes) for t, p in zip(sample.tensors, placements, strict=True)]
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(sample.op)
    info = info or propagator.op_to_schema_info_for_single_dim_strategy.get(sample.op)
    args, kwargs = sample.filled(specs)
    try:
        found = propagator.propagate_op_sharding_non_cached(OpSchema(sample.op, tuple(args), kwargs, schema_info=info))
    except Exception as error:
        return Answer(error=f"{type(error).__name__}: {error}")
    taken = specs
    if found.redistribute_schema is not None:
        schema = found.redistribute_schema
        taken = [*specs_in(schema.args_schema), *specs_in(schema.kwargs_schema.values())]
    cost = sum(redistribute_cost(a, b) for a, b in zip(specs, taken, strict=True))
    return Answer(
        to=[tuple(text(p) for p in s.placements) for s in taken],
        outputs=[tuple(text(p) for p in s.placements) for s in specs_in([found.output_spec])],
        cost=float(cost),
    )


def specs_in(found: Any) -> Iterator[DTensorSpec]:
    for item in found:
        if isinstance(item, DTensorSpec):
            yield item
        elif isinstance(item, (tuple, list)):
            yield from specs_in(item)
