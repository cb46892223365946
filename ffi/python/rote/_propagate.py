"""`rote.propagate`: how an op runs on distributed tensors, asked by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, placement_types
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement

from . import _own_partials, _own_placements
from ._arguments import DTYPES_BY_NAME, Written, written, written_meta, written_placements
from ._native import error, lib
from ._own_rules import Stating, overloads
from ._rules import name_of
from ._specs import links_of


@dataclass(frozen=True)
class Step:
    """One collective, or one change on each rank alone, of a redistribution."""

    kind: str
    """`all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `chunk` or `partition`."""
    mesh_dim: str
    """The name of the mesh dim."""
    before: Placement
    after: Placement
    bytes: int
    """What a rank sends."""
    padding: int
    """How many of these bytes pad uneven shards."""
    cost_us: float
    """Estimated time, in microseconds."""


@dataclass(frozen=True)
class Input:
    """A tensor among the arguments."""

    argument: int
    """Which argument of the op's schema it is, or is a part of."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Global, as are the strides."""
    strides: tuple[int, ...]
    before: tuple[Placement, ...]
    """One per mesh dim."""
    placements: tuple[Placement, ...]
    """In which the op takes it."""
    steps: tuple[Step, ...]
    """The redistribution in front of the op; empty if there is none."""
    bytes: int
    """What a rank sends in these steps."""
    cost_us: float
    """Their estimated time, in microseconds."""


@dataclass(frozen=True)
class Output:
    """A tensor among the results."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    """Global, as are the strides."""
    strides: tuple[int, ...] | None
    """None where Rote does not know them."""
    placements: tuple[Placement, ...]
    """One per mesh dim."""
    local_shape: tuple[int, ...] | None
    """On this rank, or on the first rank if the mesh is a text; None for other shardings than PyTorch's."""
    partition_spec: str | None
    """By tensor dim, as in JAX; None for partials and strided shards."""


@dataclass(frozen=True)
class Other:
    """A strategy that was not chosen on a mesh dim, and why."""

    strategy: str
    reason: str
    cost_us: float | None
    """What the op would cost with it, in microseconds; None if it cannot be had."""


@dataclass(frozen=True)
class Choice:
    """The strategy of a mesh dim, and the others."""

    mesh_dim: str
    strategy: str
    others: tuple[Other, ...]


@dataclass(frozen=True)
class Why:
    """The reasons of a decision."""

    rule: str
    """The op whose rule answered."""
    family: str
    """The family of rules that it belongs to."""
    choices: tuple[Choice, ...]
    """One per mesh dim; none for ops on lists."""


@dataclass(frozen=True)
class Propagation:
    """How an op runs on distributed tensors. `print` shows it as `rote propagate` does."""

    op: str
    mesh: dict[str, int]
    """Ranks by the name of the mesh dim."""
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    bytes: int
    """What a rank sends in all redistributions."""
    cost_us: float
    """Their estimated time, in microseconds."""
    tied: bool
    """Whether other placements may cost the same, or up to a twentieth more."""
    why: Why | None
    """The reasons, if they were asked for."""

    def __str__(self) -> str:
        lines = [f"{self.op} on {', '.join(f'{name}={size}' for name, size in self.mesh.items())}"]
        for i, tensor in enumerate(self.inputs):
            moved = f"  ->  {_listed(tensor.placements)}" if tensor.steps else ""
            meta = written_meta(tensor.dtype, tensor.shape)
            lines.append(f"input {i}    {meta} @ {_listed(tensor.before)}{moved}")
            for step in tensor.steps:
                sent = f", {step.bytes} B per rank, {step.cost_us:.1f} us" if step.bytes else ""
                lines.append(
                    f"  {step.mesh_dim:<8} {step.kind} {_listed([step.before])} -> {_listed([step.after])}{sent}"
                )
        for i, result in enumerate(self.outputs):
            by_dim = f"  {result.partition_spec}" if result.partition_spec else ""
            lines.append(
                f"output {i}   {written_meta(result.dtype, result.shape)} @ {_listed(result.placements)}{by_dim}"
            )
        for choice in self.why.choices if self.why else ():
            lines.append(f"{choice.mesh_dim:<10} {choice.strategy}")
            lines += [f"  not      {other.strategy:<24} {other.reason}" for other in choice.others]
        return "\n".join([*lines, f"cost       {self.cost_us:.1f} us"])


def propagate(
    op: OpOverload | str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    mesh: DeviceMesh | str | None = None,
    why: bool = False,
    strict: bool = False,
) -> Propagation:
    """Says how an op runs on distributed tensors: the placements in which it takes its inputs at the least cost, the
    redistributions in front of it, and its outputs.

    ``op`` is such as ``torch.ops.aten.mm.default`` or ``"aten::mm"``, ``args`` and ``kwargs`` are its arguments. In the
    place of a tensor may stand a `DTensor`, a `DTensorSpec`, the notation of ``rote propagate`` (``"f32[64,32] @
    S(0),R"``), or another tensor, on the device ``meta`` too, which every rank has whole. Nothing is computed, and no
    process group is needed. ``mesh`` is a `DeviceMesh` or such as ``"dp=8,tp=2"``; without, that of the first DTensor.

    ``why`` tells the reasons, too. ``strict`` makes it an error if a partial has to be reduced before the op. Rules
    that the script has registered answer for their ops, and PyTorch's decompositions for ops without a rule.

    Raises `ValueError` if the op has no rule, or an argument does not fit it, or the tensors lie on other meshes than
    ``mesh``.
    """
    overload = _overload(op)
    if not (mesh is None or isinstance(mesh, DeviceMesh | str)):
        raise TypeError(f'rote: expected mesh=, a DeviceMesh or such as "dp=8,tp=2", found {mesh!r}')
    given = _in_order(overload, args, {} if kwargs is None else kwargs)
    mesh = _mesh_of(given) if mesh is None else mesh
    question: dict[str, Any] = {"op": name_of(overload), "why": why}
    question |= _described(mesh) if isinstance(mesh, DeviceMesh) else {"mesh": mesh}
    stating = Stating([name_of(overload)], question["mesh"])
    question["own"] = list(stating.ops)
    question["args"] = [
        written(_with_tensors_written(arg, mesh, "Tensor" in str(formal.type)))
        for formal, arg in zip(overload._schema.arguments, given, strict=False)
    ]
    answer = lib.rote_propagate_json(json.dumps(question).encode(), bool(strict), stating.callback, None)
    _own_placements.go_on()
    if stating.problem is not None:
        raise ValueError(f"rote: {stating.problem}") from stating.problem
    if answer is None:
        raise ValueError(f"rote: {error()}")
    return _read(json.loads(answer))


def _overload(op: OpOverload | str) -> OpOverload:
    if isinstance(op, OpOverload):
        return op
    if not isinstance(op, str):
        raise TypeError(f"rote: expected an op with its overload, such as torch.ops.aten.mm.default, found {op!r}")
    found = overloads(op)
    if len(found) != 1:
        names = ", ".join(map(name_of, found))
        raise ValueError(
            f"rote: {op}: " + (f"expected an overload, one of {names}" if found else "there is no such op")
        )
    return found[0]


def _in_order(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments in the order of the schema, up to the last one that is given."""
    formals = op._schema.arguments
    if isinstance(args, str | torch.Tensor) or not isinstance(args, Sequence):
        raise TypeError(f"rote: {name_of(op)}: expected a tuple or list of arguments, found {args!r}")
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"rote: {name_of(op)}: expected a dict of keyword arguments, found {kwargs!r}")
    positional = [formal.name for formal in formals if not formal.kwarg_only]
    if len(args) > len(positional):
        raise ValueError(f"rote: {name_of(op)}: expected at most {len(positional)} arguments, found {len(args)}")
    named = dict(zip(positional, args, strict=False))
    for name, value in kwargs.items():
        if name in named or all(formal.name != name for formal in formals):
            problem = "is given twice" if name in named else "is no argument"
            raise ValueError(f"rote: {name_of(op)}: {name} {problem}")
        named[name] = value
    last = max((i for i, formal in enumerate(formals) if formal.name in named), default=-1)
    return [named.get(formal.name, formal.default_value) for formal in formals[: last + 1]]


def _mesh_of(given: Sequence[Any]) -> DeviceMesh:
    tensors = (leaf for arg in given for leaf in (arg if isinstance(arg, list | tuple) else [arg]))
    specs = (leaf._spec if isinstance(leaf, DTensor) else leaf for leaf in tensors)
    mesh = next((spec.mesh for spec in specs if isinstance(spec, DTensorSpec)), None)
    if mesh is None:
        raise ValueError('rote: no argument is a DTensor: expected mesh=, a DeviceMesh or such as "dp=8,tp=2"')
    return mesh


def _described(mesh: DeviceMesh) -> dict[str, Any]:
    """A mesh as a question has it, with what its links are said to cost."""
    names = mesh.mesh_dim_names or [f"d{dim}" for dim in range(mesh.ndim)]
    described: dict[str, Any] = {"mesh": ",".join(f"{n}={size}" for n, size in zip(names, mesh.shape, strict=True))}
    described["links"] = links_of(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is not None:
        described["coordinate"] = list(coordinate)
    return described


def _with_tensors_written(arg: Any, mesh: DeviceMesh | str, is_tensor: bool) -> Any:
    if isinstance(arg, list | tuple) and not isinstance(arg, TensorMeta):
        items = [_with_tensors_written(item, mesh, is_tensor) for item in arg]
        return Written("{" + "; ".join(map(written, items)) + "}") if is_tensor else items
    if isinstance(arg, str) and is_tensor:
        return Written(arg)
    spec = arg._spec if isinstance(arg, DTensor) else arg
    if isinstance(spec, DTensorSpec):
        return Written(_of_spec(spec, mesh))
    if isinstance(arg, torch.Tensor):
        if arg.layout is not torch.strided or arg.is_nested:
            raise ValueError(f"rote: expected strided tensors, found one of layout {arg.layout}")
        return Written(_laid_out(arg.dtype, arg.shape, arg.stride()))
    return Written(_laid_out(arg.dtype, arg.shape, arg.stride)) if isinstance(arg, TensorMeta) else arg


def _of_spec(spec: DTensorSpec, mesh: DeviceMesh | str) -> str:
    meta = spec.tensor_meta
    if meta is None:
        raise ValueError("rote: expected a DTensorSpec with its tensor_meta, found None")
    if isinstance(mesh, DeviceMesh) and spec.mesh != mesh:
        raise ValueError(f"rote: expected tensors on {mesh}, found one on {spec.mesh}")
    order = getattr(spec, "shard_order", None)
    usual = order is None or getattr(spec, "use_strided_shard_as_shard_order", False)
    if not usual and order != DTensorSpec(spec.mesh, spec.placements, meta).shard_order:
        raise ValueError("rote: expected shards in the order of the mesh dims, found an order of their own")
    return _laid_out(meta.dtype, meta.shape, meta.stride) + written_placements(spec.placements)


def _laid_out(dtype: torch.dtype, shape: Sequence[int], strides: Sequence[int]) -> str:
    """`f32[64,32]{1,64}`"""
    return f"{written_meta(dtype, shape)}{{{','.join(map(str, strides))}}}"


def _read(answer: dict[str, Any]) -> Propagation:
    mesh = dict(zip(answer["mesh"]["names"], answer["mesh"]["sizes"], strict=True))
    inputs = tuple(
        Input(
            argument=each["argument"],
            dtype=DTYPES_BY_NAME[each["dtype"]],
            shape=tuple(each["shape"]),
            strides=tuple(each["strides"]),
            before=_placements(each["from"]),
            placements=_placements(each["to"]),
            steps=tuple(map(_step, each["steps"])),
            bytes=each["bytes"],
            cost_us=each["cost_us"],
        )
        for each in answer["inputs"]
    )
    outputs = tuple(
        Output(
            dtype=DTYPES_BY_NAME[each["dtype"]],
            shape=tuple(each["shape"]),
            strides=None if each["strides"] is None else tuple(each["strides"]),
            placements=_placements(each["placements"]),
            local_shape=None if each["local_shape"] is None else tuple(each["local_shape"]),
            partition_spec=each["partition_spec"],
        )
        for each in answer["outputs"]
    )
    why = _why(answer["why"]) if "why" in answer else None
    return Propagation(answer["op"], mesh, inputs, outputs, answer["bytes"], answer["cost_us"], answer["tied"], why)


def _step(told: dict[str, Any]) -> Step:
    before, after = _placements([told["from"], told["to"]])
    return Step(told["kind"], told["mesh_dim"], before, after, told["bytes"], told["padding"], told["cost_us"])


def _why(told: dict[str, Any]) -> Why:
    choices = (
        Choice(
            mesh_dim=each["mesh_dim"],
            strategy=each["strategy"],
            others=tuple(Other(o["strategy"], o["reason"], o.get("cost_us")) for o in each["others"]),
        )
        for each in told["mesh_dims"]
    )
    return Why(told["rule"], told["family"], tuple(choices))


def _placements(texts: Sequence[str]) -> tuple[Placement, ...]:
    return tuple(map(read_placement, texts))


def read_placement(text: str) -> Placement:
    """The placement of `S(0)` or `P(LogSumExp,2)`, as Rote writes it. Raises `ValueError` if a registered class makes
    none of these parameters."""
    found = re.fullmatch(r"(\w+)(?:\((.*)\))?", text)
    if found is None:
        raise ValueError(f"expected a placement, found {text!r}")
    kind, inside = found.groups()
    match kind:
        case "R":
            return Replicate()
        case "S":
            return Shard(int(inside))
        case "_S":
            dim, split_factor = map(int, inside.split(","))
            return placement_types._StridedShard(dim, split_factor=split_factor)
        case "P":
            pass
        case _:
            return _own_placements.read(kind, inside)
    own = _own_partials.read(inside)
    if own is not None:
        return own
    if inside == "mask":
        return placement_types._MaskPartial()
    return _NormPartial(float(inside.removeprefix("norm"))) if inside.startswith("norm") else Partial(inside)


def _listed(placements: Sequence[Placement]) -> str:
    return written_placements(placements).removeprefix(" @ ")


__all__ = ["Propagation", "propagate", "read_placement"]
