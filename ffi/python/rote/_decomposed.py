"""Sharding strategies of ops without a rule, derived from PyTorch's decompositions.

An op is traced into a graph of ops that have rules. A combination of placements on one mesh dim is a strategy of the
op if each op of the graph takes its inputs as they lie, and if the local op does what the graph says: the decomposition
is traced again on the shards of each rank, and must call the same ops with the same arguments. The only arguments that
may differ are sizes that Rote adjusts for the ranks itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from ._decomposition_graphs import Graph, Node, Untraceable, decompositions_of, traced
from ._native import byref, c_int, check, lib
from ._rules import has_rule, is_meta, name_of

Placements = tuple[Any, ...]
# A tuple with the placements of each tensor of a graph; None where the graph has not come to the tensor yet.
Laid = list[Placements | None]
Strategy = tuple[Any, ...]

#: Arguments of these classes decide no value of a result.
_WHERE = (torch.device, torch.layout, torch.memory_format)
_ATEN = torch.ops.aten
#: Ops that fill a new tensor with one number, so that it lies in any way; and which argument is its shape, if any.
_FILLED: dict[Any, int | None] = {
    **dict.fromkeys([_ATEN.zeros.default, _ATEN.ones.default, _ATEN.full.default], 0),
    **dict.fromkeys([_ATEN.new_zeros.default, _ATEN.new_ones.default, _ATEN.new_full.default], 1),
    **dict.fromkeys([_ATEN.zeros_like.default, _ATEN.ones_like.default, _ATEN.full_like.default]),
    _ATEN.scalar_tensor.default: None,
}
#: Those that fill it with zeros, and those that do so if an argument is zero.
_ZEROS = {_ATEN.zeros.default, _ATEN.new_zeros.default, _ATEN.zeros_like.default}
_NUMBERS = {
    _ATEN.full.default: 1,
    _ATEN.new_full.default: 2,
    _ATEN.full_like.default: 1,
    _ATEN.scalar_tensor.default: 0,
}
#: How many placements of ops are tried for one op on one mesh dim.
_MOST_STEPS = 5_000
#: How many strategies a rule has, besides replication.
_MOST_STRATEGIES = 127
#: How many ops with their arguments are kept.
_MOST_KEPT = 4_096


class SizesOfMesh:
    """What specs and rules ask of a mesh, without process groups: these a captured step could not make."""

    def __init__(self, device: str, shape: tuple[int, ...]) -> None:
        self.device_type = device
        self.shape = shape
        self.ndim = len(shape)

    def size(self, dim: int | None = None) -> int:
        return math.prod(self.shape) if dim is None else self.shape[dim]


class Decompositions:
    """Answers for ops without a rule. `ask` answers an `OpSchema` of an op inside as DTensor's propagation does, or
    with None. `propagator` is DTensor's."""

    def __init__(self, ask: Callable[[OpSchema], Any], propagator: Any) -> None:
        self._ask = ask
        self._propagator = propagator
        self._meshes: dict[tuple[str, tuple[int, ...]], SizesOfMesh] = {}
        self._kept: dict[Any, tuple[_Decomposed | None, dict[tuple[int, ...], list[Strategy]]]] = {}

    def has(self, op: Any) -> bool:
        """Whether an op is answered: Rote and DTensor have no rule for it, PyTorch has a decomposition, and the op is a
        pure function of its arguments, so that replication at least is right."""
        return (
            isinstance(op, OpOverload)
            and is_pure(op)
            and not has_rule(op)
            and bool(decompositions_of(op))
            and not self._has_strategy(op)
        )

    def of_lists(self) -> Iterator[OpOverload]:
        """The answered ops of PyTorch's table of decompositions that take lists of tensors."""
        for op in decomposition_table:
            if isinstance(op, OpOverload) and "Tensor[]" in str(op._schema).split("->")[0] and self.has(op):
                yield op

    def _has_strategy(self, op: OpOverload) -> bool:
        of = self._propagator
        return op in of.op_single_dim_strategy_funcs or op in of.op_strategy_funcs or op in of.op_to_rules

    def state(self, schema: OpSchema) -> tuple[list[Strategy], list[TensorMeta | None], Any]:
        """The strategies for a schema, and the metas of the results, as a list and as the op returns them."""
        metas = self._propagator._propagate_tensor_meta_non_cached(schema)
        results = [metas] if is_meta(metas) else list(metas or ())
        return self.strategies(*_asked(schema)), results, metas

    def schema_holds(self, schema: OpSchema, placements: Sequence[Placements]) -> bool:
        """Whether placements of the results and then of the inputs of a schema are right."""
        return self.holds(*_asked(schema), placements)

    def local_args(self, schema: OpSchema, placements: Sequence[Placements], metas: Any) -> tuple[int, Any] | None:
        """Which argument is a size that this rank adjusts, and to what; None if there is none, or it stays."""
        size = size_argument(schema.op)
        mesh = _mesh_of(schema)
        rank = mesh.get_coordinate()
        if size is None or rank is None or size.at >= len(schema.args_schema):
            return None
        if size.dim is None:
            result = metas if is_meta(metas) else metas[0]
            adjusted: Any = list(_shard(result.shape, placements[0], mesh.shape, rank))
        else:
            results = 1 if is_meta(metas) else len(metas)
            first = next(leaf for leaf in tree_leaves(schema.args_schema) if isinstance(leaf, DTensorSpec))
            adjusted = _shard(first.shape, placements[results], mesh.shape, rank)[size.dim]
        given = schema.args_schema[size.at]
        same = list(given) == adjusted if isinstance(given, list | tuple) else given == adjusted
        return None if same else (size.at, adjusted)

    def strategies(self, op: OpOverload, args: Any, kwargs: Any, device: str, sizes: Sequence[int]) -> list[Strategy]:
        """The strategies that hold on each mesh dim of a mesh, besides replication. Metas stand for tensors."""
        decomposed, known = self._of(op, args, kwargs, device)
        if decomposed is None:
            return []
        found: list[Strategy] | None = None
        for size in dict.fromkeys(size for size in sizes if size > 1):
            key = (size,)
            if key not in known:
                known[key] = decomposed.strategies(self._mesh(device, key))
            found = known[key] if found is None else [one for one in found if one in known[key]]
        return found or []

    def holds(
        self,
        op: OpOverload,
        args: Any,
        kwargs: Any,
        device: str,
        sizes: Sequence[int],
        placements: Sequence[Placements],
    ) -> bool:
        """Whether placements on all mesh dims together, of the results and then of the inputs, are right."""
        decomposed, _ = self._of(op, args, kwargs, device)
        return decomposed is not None and decomposed.holds(self._mesh(device, tuple(sizes)), placements)

    def _mesh(self, device: str, sizes: tuple[int, ...]) -> SizesOfMesh:
        key = device, sizes
        if key not in self._meshes:
            self._meshes[key] = SizesOfMesh(device, sizes)
        return self._meshes[key]

    def _of(
        self, op: OpOverload, args: Any, kwargs: Any, device: str
    ) -> tuple[_Decomposed | None, dict[tuple[int, ...], list[Strategy]]]:
        leaves, shape = tree_flatten((args, kwargs), is_leaf=is_meta)
        key = op, device, str(shape), tuple((type(leaf), _comparable(leaf)) for leaf in leaves)
        if key not in self._kept:
            if len(self._kept) >= _MOST_KEPT:
                self._kept.clear()
            try:
                made = _Decomposed(op, args, kwargs, device, self._ask)
            except Untraceable:
                made = None
            self._kept[key] = made, {}
        return self._kept[key]


class _Answer(NamedTuple):
    """How the results of an op of a graph lie, and which of its arguments are adjusted for each rank."""

    outputs: tuple[Placements | None, ...]
    adjusted: frozenset[int]


class _Decomposed:
    """The graph of an op with its arguments."""

    def __init__(self, op: OpOverload, args: Any, kwargs: Any, device: str, ask: Callable[[OpSchema], Any]) -> None:
        self.op, self.args, self.kwargs, self.device = op, args, kwargs, device
        self.size = size_argument(op)
        self.graph = traced(op, args, kwargs, device)
        self._ask = ask
        self._answers: dict[Any, _Answer | None] = {}
        self._local: dict[Any, Graph | None] = {}

    def strategies(self, mesh: SizesOfMesh) -> list[Strategy]:
        """The strategies on a mesh of one dim. Where a tensor has no elements, there is nothing to be gained."""
        whole = self.graph.metas[: self.graph.inputs]
        if any(0 in meta.shape and len(meta.shape) > 1 for meta in whole):
            return []
        found: dict[Strategy, list[Strategy]] = {}
        steps = itertools.count()
        for laid in self._laid(mesh, 0, [None] * len(self.graph.metas), steps):
            inputs = [_first(laid[at]) for at in range(self.graph.inputs)]
            if all(type(one) is Replicate for one in inputs) or not self._is_local(mesh, laid):
                continue
            outputs = [None if at is None else _first(laid[at]) for at in self.graph.outputs]
            read = tuple(None if at in self.graph.unread else one for at, one in enumerate(inputs))
            alike = found.setdefault((*outputs, *read), [])
            if (*outputs, *inputs) not in alike:
                alike.append((*outputs, *inputs))
        # What is not read must lie in one way: else a kernel that reads it all the same could expect another.
        return [alike[0] for alike in found.values() if len(alike) == 1][:_MOST_STRATEGIES]

    def holds(self, mesh: SizesOfMesh, placements: Sequence[Placements]) -> bool:
        results = len(self.graph.outputs)
        laid: Laid = [None] * len(self.graph.metas)
        laid[: self.graph.inputs] = placements[results:]
        for one in self._laid(mesh, 0, laid, itertools.count()):
            outputs = (None if at is None else one[at] for at in self.graph.outputs)
            same = all(a is None or a == b for a, b in zip(outputs, placements[:results], strict=True))
            if same and self._is_local(mesh, one):
                return True
        return False

    def _laid(self, mesh: SizesOfMesh, at: int, laid: Laid, steps: Iterator[int]) -> Iterator[Laid]:
        """All ways to lay the inputs in which the ops from `at` on take their inputs as they lie."""
        last = at == len(self.graph.nodes)
        node = None if last else self.graph.nodes[at]
        taken: Sequence[int] = range(self.graph.inputs) if node is None else node.inputs
        open_ = list(dict.fromkeys(value for value in taken if laid[value] is None))
        options = [
            self._beside(value, laid, math.prod(mesh.shape))
            if value in self.graph.unread
            else _options(self.graph.metas[value], math.prod(mesh.shape))
            for value in open_
        ]
        for choice in itertools.product(*options):
            if next(steps) > _MOST_STEPS:
                return
            own = list(laid)
            for value, placement in zip(open_, choice, strict=True):
                own[value] = (placement,)
            if node is None:
                yield own
                continue
            for answer in self._possible(mesh, at, tuple(own[value] for value in node.inputs)):
                for output, placements in zip(node.outputs, answer.outputs, strict=True):
                    if output is not None:
                        own[output] = placements
                yield from self._laid(mesh, at + 1, own, steps)

    def _beside(self, value: int, laid: Laid, ranks: int) -> list[Any]:
        """How an input may lie that the decomposition does not read. A kernel may read it all the same, as what forward
        has saved of another input: it lies as the inputs of its shape do, but for partial ones."""
        meta = self.graph.metas[value]
        if meta.shape == (0,):  # there is nothing to read
            return [Replicate()]
        others = [
            other
            for other in range(self.graph.inputs)
            if other not in self.graph.unread and self.graph.metas[other].shape == meta.shape
        ]
        if not others:
            return [one for one in _options(meta, ranks) if type(one) is not Partial]
        beside = {_first(laid[other]) for other in others}
        beside = {one for one in beside if type(one) is not Partial}
        return list(beside) if len(beside) == 1 else []

    def _possible(self, mesh: SizesOfMesh, at: int, inputs: tuple[Any, ...]) -> list[_Answer]:
        """The ways in which the results of an op may lie."""
        node = self.graph.nodes[at]
        if node.op not in _FILLED or node.outputs[0] is None:
            answer = self._answer(mesh, at, inputs)
            return [] if answer is None else [answer]
        meta = self.graph.metas[node.outputs[0]]
        each = [
            [one for one in _options(meta, ranks) if _is_zero(node) or type(one) is not Partial] for ranks in mesh.shape
        ]
        return [_Answer((placements,), _adjusted(node)) for placements in itertools.product(*each)]

    def _answer(self, mesh: SizesOfMesh, at: int, inputs: tuple[Any, ...]) -> _Answer | None:
        key = tuple(mesh.shape), at, inputs
        if key not in self._answers:
            self._answers[key] = self._asked(mesh, self.graph.nodes[at], inputs)
        return self._answers[key]

    def _asked(self, mesh: SizesOfMesh, node: Node, inputs: tuple[Placements, ...]) -> _Answer | None:
        """What Rote's rules say of an op; None if the op would move an input."""
        if all(type(placement) is Replicate for placements in inputs for placement in placements):
            whole = (Replicate(),) * mesh.ndim
            return _Answer(tuple(None if value is None else whole for value in node.outputs), frozenset())
        lies = dict(zip(node.inputs, inputs, strict=True))

        def spec(value: Any) -> DTensorSpec:
            return DTensorSpec(cast(DeviceMesh, mesh), lies[value.at], tensor_meta=self.graph.metas[value.at])

        args, kwargs = node.filled(spec)
        found = self._ask(OpSchema(node.op, args, kwargs))
        if found is None:
            return None
        adjusted: set[int] = set()
        if found.redistribute_schema is not None:
            for place, (before, after) in enumerate(zip(args, found.redistribute_schema.args_schema, strict=True)):
                specs = [_placements_in(before), _placements_in(after)]
                if specs[0] != specs[1]:
                    return None
                if not specs[0] and before != after:
                    adjusted.add(place)
        outputs = tuple(_placements_in(found.output_spec))
        kinds = {type(placement).__name__ for placements in outputs for placement in placements or ()}
        if len(outputs) != len(node.outputs) or "_MaskPartial" in kinds:
            return None
        return _Answer(outputs, frozenset(adjusted))

    def _is_local(self, mesh: SizesOfMesh, laid: Laid) -> bool:
        """Whether each rank's local op does what the graph says."""
        for shapes in _shapes_of_ranks([meta.shape for meta in self.graph.metas], laid, mesh.shape):
            local = self._traced_locally(shapes[: self.graph.inputs], self._local_size(shapes))
            if local is None or len(local.nodes) != len(self.graph.nodes) or local.outputs != self.graph.outputs:
                return False
            if len(local.metas) != len(shapes):
                return False
            for meta, whole, shape, placements in zip(local.metas, self.graph.metas, shapes, laid, strict=True):
                if placements is not None and (meta.shape, meta.dtype) != (shape, whole.dtype):
                    return False
            for at, (node, own) in enumerate(zip(self.graph.nodes, local.nodes, strict=True)):
                possible = self._possible(mesh, at, tuple(laid[value] for value in node.inputs))
                if not possible or not _same_call(node, own, possible[0].adjusted):
                    return False
        return True

    def _local_size(self, shapes: Sequence[torch.Size]) -> Any:
        """What a rank gives in the place of a size, if its tensors have these shapes."""
        if self.size is None or self.size.at >= len(self.args):
            return None
        if self.size.dim is not None:
            return shapes[0][self.size.dim]
        first = self.graph.outputs[0]
        return None if first is None else tuple(shapes[first])

    def _traced_locally(self, shapes: tuple[torch.Size, ...], size: Any) -> Graph | None:
        key = shapes, size
        if key not in self._local:
            rest = iter(shapes)

            def local(meta: TensorMeta) -> TensorMeta:
                shape = next(rest)
                return TensorMeta(shape, _strides(shape, meta.stride), meta.dtype)

            args, kwargs = tree_map_only(TensorMeta, local, (self.args, self.kwargs), is_leaf=is_meta)
            if self.size is not None and size is not None:
                args[self.size.at] = size if isinstance(size, int) else list(size)
            try:
                self._local[key] = traced(self.op, args, kwargs, self.device)
            except Untraceable:
                self._local[key] = None
        return self._local[key]


def _asked(schema: OpSchema) -> tuple[OpOverload, Any, Any, str, tuple[int, ...]]:
    """The op of a schema, its arguments with metas in the place of tensors, and the device and sizes of the mesh."""
    given = (list(schema.args_schema), dict(schema.kwargs_schema))
    mesh = _mesh_of(schema)
    args, kwargs = tree_map_only(DTensorSpec, lambda spec: spec.tensor_meta, given)
    return schema.op, args, kwargs, mesh.device_type, tuple(mesh.shape)


def _mesh_of(schema: OpSchema) -> DeviceMesh:
    leaves = tree_leaves((schema.args_schema, schema.kwargs_schema))
    return next(leaf.mesh for leaf in leaves if isinstance(leaf, DTensorSpec))


class Size(NamedTuple):
    """An argument that is a size which ranks adjust to their shards."""

    at: int
    dim: int | None
    """The dim of the first tensor whose size it is; None: it is the shape of the first result."""


def size_argument(op: OpOverload) -> Size | None:
    """The argument of an op that is such a size. All other arguments of a rank's call are the global ones."""
    at, dim = c_int(), c_int()
    kind = check(lib.rote_local_args(name_of(op).encode(), byref(at), byref(dim)))
    return Size(at.value, dim.value if dim.value >= 0 else None) if kind == 1 else None


def is_pure(op: OpOverload) -> bool:
    """Whether an op is a function of its arguments that returns dense tensors, or one list of them."""
    schema = op._schema
    return (
        not schema.is_mutable
        and torch.Tag.nondeterministic_seeded not in op.tags
        and bool(schema.returns)
        and "sparse" not in schema.name
        and all("Tensor" in str(result.type) for result in schema.returns)
        and (len(schema.returns) == 1 or all(result.type.kind() == "TensorType" for result in schema.returns))
    )


def _adjusted(node: Node) -> frozenset[int]:
    shape = _FILLED[node.op]
    return frozenset() if shape is None else frozenset({shape})


def _is_zero(node: Node) -> bool:
    """Whether an op fills a tensor with zeros, whose sum is zero."""
    return node.op in _ZEROS or (node.op in _NUMBERS and node.args[_NUMBERS[node.op]] == 0)


def _options(meta: TensorMeta, ranks: int) -> list[Any]:
    """How one mesh dim may hold a tensor. No shard is empty, as in rules that scripts state."""
    shards = [Shard(dim) for dim, size in enumerate(meta.shape) if -(-size // ranks) * (ranks - 1) < size]
    return [Replicate(), *shards, *([] if meta.dtype == torch.bool else [Partial()])]


def _shard(shape: torch.Size, placements: Placements, mesh: Sequence[int], rank: Sequence[int]) -> torch.Size:
    """The shape of a rank's shard."""
    sizes = list(shape)
    for placement, ranks, at in zip(placements, mesh, rank, strict=True):
        if type(placement) is Shard:
            most = -(-sizes[placement.dim] // ranks)
            sizes[placement.dim] = max(0, min(most, sizes[placement.dim] - most * at))
    return torch.Size(sizes)


def _shapes_of_ranks(whole: Sequence[torch.Size], laid: Laid, mesh: Sequence[int]) -> list[tuple[torch.Size, ...]]:
    """The shapes of the shards of several tensors, once for ranks with the same. What is not laid stays whole."""
    found = [tuple(whole)]
    for dim, ranks in enumerate(mesh):
        own = [placements[dim] if placements else Replicate() for placements in laid]
        each = (
            tuple(_shard(shape, (placement,), (ranks,), (at,)) for shape, placement in zip(shapes, own, strict=True))
            for shapes in found
            for at in range(ranks)
        )
        found = list(dict.fromkeys(each))
    return found


def _strides(shape: Sequence[int], like: Sequence[int]) -> tuple[int, ...]:
    """Strides without gaps, in the order of other strides."""
    strides, next_ = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda dim: (like[dim], -dim)):
        strides[dim] = next_
        next_ *= max(shape[dim], 1)
    return tuple(strides)


def _same_call(one: Node, other: Node, adjusted: frozenset[int]) -> bool:
    """Whether two ops of graphs are the same, with the same arguments but for those that are adjusted."""
    if one.op is not other.op or one.outputs != other.outputs or len(one.args) != len(other.args):
        return False
    pairs = [(a, b) for at, (a, b) in enumerate(zip(one.args, other.args, strict=True)) if at not in adjusted]
    if one.kwargs.keys() != other.kwargs.keys():
        return False
    pairs += [(one.kwargs[name], other.kwargs[name]) for name in one.kwargs]
    return all(_same_argument(a, b) for a, b in pairs)


def _same_argument(one: Any, other: Any) -> bool:
    (ours, our_shape), (theirs, their_shape) = tree_flatten(one), tree_flatten(other)
    return our_shape == their_shape and all(
        isinstance(a, _WHERE) or (type(a) is type(b) and _comparable(a) == _comparable(b))
        for a, b in zip(ours, theirs, strict=True)
    )


def _comparable(leaf: Any) -> Any:
    """A leaf that equals another one only if the other is the same: 0.0 is not -0.0, and NaN is NaN."""
    return repr(leaf) if isinstance(leaf, float | complex) else leaf


def _placements_in(found: Any) -> list[Placements | None]:
    leaves = tree_leaves(found, is_leaf=lambda leaf: leaf is None or isinstance(leaf, DTensorSpec))
    return [
        leaf.placements if isinstance(leaf, DTensorSpec) else None
        for leaf in leaves
        if leaf is None or isinstance(leaf, DTensorSpec)
    ]


def _first(placements: Placements | None) -> Any:
    return None if placements is None else placements[0]


__all__ = ["Decompositions", "is_pure", "name_of"]
