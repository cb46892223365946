"""What DTensor is told of the shardings that a script registers: it makes specs with them, redistributes by way of
replication, and is asked about replicated tensors in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._pytree import tree_map_only

from ._own_placements import NEEDED, SHARDINGS, is_shards


def _is_own(placements: Iterable[Any]) -> bool:
    return any(type(placement) in SHARDINGS for placement in placements)


def replicated(otherwise: Callable[[OpSchema], Any]) -> Callable[[OpSchema], Any]:
    """DTensor's propagation, asked about replicated tensors in the place of those that lie in registered shards: it
    would take these for plain ones."""

    def propagate_op_sharding_non_cached(schema: OpSchema) -> Any:
        if not SHARDINGS:
            return otherwise(schema)
        args = _without_own(schema.args_schema)
        if _without_own(schema.kwargs_schema) is not None:
            raise RuntimeError(
                f"rote: {schema.op}: DTensor cannot redistribute keyword arguments: {schema.kwargs_schema}"
            )
        if args is None:
            return otherwise(schema)
        if schema.op in DTensor._op_dispatcher._custom_op_handlers:
            # What follows looks at the shards as they lie.
            raise RuntimeError(
                f"rote: {schema.op}: DTensor takes shards for those that torch.chunk makes: redistribute "
                f"{', '.join(map(str, schema.args_spec))} before"
            )
        written = [
            formal.name
            for formal, arg in zip(schema.op._schema.arguments, schema.args_schema, strict=False)
            if formal.alias_info is not None and formal.alias_info.is_write and _without_own(arg) is not None
        ]
        if written:
            raise RuntimeError(
                f"rote: {schema.op}: DTensor cannot keep how {written[0]} lies, which the op writes: "
                f"{', '.join(map(str, schema.args_spec))}"
            )
        asked = OpSchema(schema.op, args, schema.kwargs_schema, schema.schema_info)
        answer = otherwise(asked)
        return OutputSharding(
            answer.output_spec, answer.redistribute_schema or asked, True, answer.use_val_from_redistribute_schema
        )

    return propagate_op_sharding_non_cached


def _without_own(schema: Any) -> Any:
    """Arguments with replication in the place of registered shards; None if there are none."""
    found = False

    def whole(spec: DTensorSpec) -> DTensorSpec:
        nonlocal found
        if not _is_own(spec.placements):
            return spec
        found = True
        placements = tuple(Replicate() if type(one) in SHARDINGS else one for one in spec.placements)
        return DTensorSpec(spec.mesh, placements, tensor_meta=spec.tensor_meta)

    made = tree_map_only(DTensorSpec, whole, schema)
    return made if found else None


class _Alone(_redistribute._TransformInfo):
    """A change of one mesh dim that is not merged with those of others."""

    def _comm_type_key(self) -> str | None:
        return None


# Not in every version.
_planned: Any = getattr(_redistribute, "_gen_transform_infos_non_cached", None)
_verified: Any = getattr(DTensorSpec, "_verify_shard_order", None)


def check() -> None:
    """Raises `RuntimeError` if DTensor of this version cannot be told."""
    if None in (_planned, _verified) or not all(hasattr(Shard, one) for one in NEEDED):
        raise RuntimeError(f"rote: DTensor of PyTorch {torch.__version__} cannot be told of registered shardings")


def tell() -> None:
    """Lets DTensor make specs with registered shardings and redistribute them, as long as there are some."""
    _redistribute._gen_transform_infos_non_cached = _plan if SHARDINGS else _planned
    DTensorSpec._verify_shard_order = _verify if SHARDINGS else _verified  # type: ignore[method-assign]
    _redistribute._gen_transform_infos.cache_clear()


def _verify(self: DTensorSpec, shard_order: Any) -> None:
    # DTensor compares each shard with `Shard(dim)`, to which none of a subclass is equal.
    if _is_own(self.placements) and shard_order == DTensorSpec.compute_default_shard_order(self.placements):
        return
    _verified(self, shard_order)


def _plan(src_spec: DTensorSpec, dst_spec: DTensorSpec, use_graph_based_transform: bool | None = None) -> list[Any]:
    now, target = list(src_spec.placements), list(dst_spec.placements)
    if not _is_own(now + target):
        infos: list[Any] = _planned(src_spec, dst_spec, use_graph_based_transform)
        return infos
    mesh = src_spec.device_mesh
    shapes = _logical_shapes(src_spec)
    infos = []

    def bring(m: int, to: Placement) -> None:
        if now[m] == to:
            return
        for step in [to] if _is_direct(now[m], to) else [Replicate(), to]:
            infos.append(_Alone(m, (now[m], step), shapes[m]))
            now[m] = step

    def left(placements: Sequence[Any], m: int, dim: int) -> list[tuple[int, Any]]:
        return [(other, placements[other]) for other in range(m) if _splits(placements[other], dim)]

    # From the right, as DTensor does: a shard is the inner split of what those to its left have split.
    for m in reversed(range(mesh.ndim)) if src_spec.num_shards > 1 else ():
        to = target[m]
        if isinstance(to, Shard | _StridedShard) and left(now, m, to.dim) != left(target, m, to.dim):
            to = Replicate()
        bring(m, to)
    for m in range(mesh.ndim):
        bring(m, target[m])
    return infos


def _splits(placement: Any, dim: int) -> bool:
    return isinstance(placement, Shard | _StridedShard) and placement.dim == dim


def _is_direct(now: Placement, to: Placement) -> bool:
    """Whether DTensor has an operation between two placements."""
    if type(now) in SHARDINGS:
        return to.is_replicate()
    if type(to) in SHARDINGS:
        return now.is_replicate() or (now.is_partial() and not is_shards(type(to), "_reduce_shard_tensor"))
    return True


def _logical_shapes(spec: DTensorSpec) -> list[list[int]]:
    """For each mesh dim, the shape of what it splits."""
    mesh = spec.device_mesh
    shape = list(spec.shape)
    shapes = []
    for m, placement in enumerate(spec.placements):
        shapes.append(list(shape))
        if isinstance(placement, Shard | _StridedShard):
            size, ranks, rank = shape[placement.dim], mesh.size(m), mesh.get_local_rank(m)
            shape[placement.dim] = placement._local_shard_size_and_offset(size, ranks, rank)[0]
    return shapes


__all__ = ["check", "replicated", "tell"]
