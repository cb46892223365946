"""PyTorch's decompositions, traced with fake tensors into graphs of ops that Rote has rules for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from ._rules import has_rule, is_meta, name_of

#: How deep decompositions nest.
_DEEPEST = 16
#: How many ops a graph has.
_MOST_OPS = 300
_ATEN = torch.ops.aten
#: Which dims `squeeze` removes depends on their sizes. As views to a shape they are the same on all ranks.
_VIEWS = {_ATEN.squeeze.default, _ATEN.squeeze.dim, _ATEN.squeeze.dims}


class Untraceable(Exception):
    """An op that is no graph of ops with rules."""


class Value(NamedTuple):
    """A tensor of a graph, by its place."""

    at: int


@dataclass(frozen=True)
class Node:
    """An op of a graph, with values in the place of tensors."""

    op: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]

    def filled(self, tensor: Callable[[Value], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with other things in the place of values."""
        args, kwargs = tree_map_only(Value, tensor, (self.args, self.kwargs), is_leaf=_is_value)
        return args, kwargs


@dataclass
class Graph:
    """An op as a graph of others: the metas of all tensors, inputs first, and the ops that results depend on."""

    metas: list[TensorMeta]
    inputs: int
    nodes: list[Node]
    outputs: list[int | None]

    unread: set[int]
    """The inputs that no result depends on."""


def decompositions_of(op: OpOverload) -> list[Callable[..., Any]]:
    """PyTorch's decompositions of an op: that of its table, and that of its own."""
    found = [decomposition_table[op]] if op in decomposition_table else []
    return [*found, op.decompose] if op._can_decompose() else found


def traced(op: OpOverload, args: Any, kwargs: Any, device: str) -> Graph:
    """The graph of an op whose tensors have these metas.

    Raises `Untraceable` for an op that is no graph of ops with rules.
    """
    problems: list[str] = []
    for decomposition in decompositions_of(op):
        try:
            return _traced(decomposition, args, kwargs, device)
        except Untraceable as problem:
            problems.append(str(problem))
    raise Untraceable(f"{name_of(op)}: {'; '.join(problems) or 'PyTorch has no decomposition'}")


def _traced(decomposition: Callable[..., Any], args: Any, kwargs: Any, device: str) -> Graph:
    # A mode of the script's own sees nothing of this.
    with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
        inputs: list[Tensor] = []

        def tensor(meta: TensorMeta) -> Tensor:
            inputs.append(torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype, device=device))
            return inputs[-1]

        fake_args, fake_kwargs = tree_map_only(TensorMeta, tensor, (args, kwargs), is_leaf=is_meta)
        tracer = _Tracer(inputs)
        try:
            with tracer:
                made = decomposition(*fake_args, **fake_kwargs)
            return tracer.finish(made)
        except Untraceable:
            raise
        except Exception as problem:  # a decomposition may raise anything where it does not fit
            raise Untraceable(f"{type(problem).__name__}: {problem}") from problem


class _Tracer(TorchDispatchMode):
    """Notes each op with a rule, and decomposes the others."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.graph = Graph([], len(inputs), [], [], set())
        self.alive: list[Tensor] = []  # so that no address is used again
        self.places: dict[int, int] = {}
        self.sharing: dict[int, int] = {}  # how many tensors share a storage
        self.depth = 0
        for one in inputs:
            self._add(one)

    def _add(self, tensor: Tensor) -> int:
        place = len(self.graph.metas)
        self.graph.metas.append(TensorMeta(tensor.shape, tensor.stride(), tensor.dtype))
        if id(tensor) not in self.places:
            self._hold(tensor)
        self.places[id(tensor)] = place
        return place

    def _hold(self, tensor: Tensor) -> None:
        self.alive.append(tensor)
        storage = tensor.untyped_storage()._cdata
        self.sharing[storage] = self.sharing.get(storage, 0) + 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload) and func.namespace == "prim":  # asks for a property, such as the device
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            raise Untraceable(f"{func} is no function of its arguments")
        if func is _ATEN.lift_fresh.default or func is _ATEN.lift_fresh_copy.default:
            return self._constant(func, args[0])
        if func is _ATEN.detach.default:
            return self._alias(func, args)
        if tensors and func not in _VIEWS and not has_rule(func):
            return self._decomposed(func, args, kwargs)
        written = self._written(func, args, kwargs)
        made = func(*args, **kwargs)
        if func in _VIEWS:
            func, args, kwargs = _ATEN.view.default, (args[0], list(made.shape)), {}
        self._note(func, args, kwargs, made, written)
        return made

    def _alias(self, func: Any, args: Any) -> Any:
        made = func(*args)
        self.places[id(made)] = self._place(args[0])
        self._hold(made)
        return made

    def _decomposed(self, func: Any, args: Any, kwargs: Any) -> Any:
        # A composite op gets here where autograd is switched off, as within a dispatch of DTensor's; elsewhere PyTorch
        # takes it apart before.
        decompositions = [func.decompose] if func._can_decompose() else decompositions_of(func)
        if not decompositions:
            raise Untraceable(f"{name_of(func)} has neither a rule nor a decomposition")
        if self.depth >= _DEEPEST:
            raise Untraceable(f"{name_of(func)} nests too deep")
        self.depth += 1
        try:
            with self:
                made = decompositions[0](*args, **kwargs)
        finally:
            self.depth -= 1
        if made is NotImplemented:
            raise Untraceable(f"{name_of(func)} is not decomposed")
        return made

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """The tensors that an op writes: each made inside, and the only one in its storage."""
        if not func._schema.is_mutable:
            return []
        written: list[Tensor] = []
        for at, formal in enumerate(func._schema.arguments):
            if formal.alias_info is not None and formal.alias_info.is_write:
                given = args[at] if at < len(args) else kwargs.get(formal.name)
                written += [leaf for leaf in tree_leaves(given) if isinstance(leaf, Tensor)]
        for one in written:
            if self._place(one) < self.graph.inputs or self.sharing[one.untyped_storage()._cdata] != 1:
                raise Untraceable(f"{name_of(func)} writes a tensor that others share")
        return written

    def _constant(self, func: Any, given: Tensor) -> Tensor:
        if isinstance(given, FakeTensor) or given.numel() > 64:
            raise Untraceable("a constant without values, or with many")
        made: Tensor = func(given)
        self.graph.nodes.append(Node(func, (given.tolist(),), {}, (), (self._add(made),)))
        return made

    def _place(self, tensor: Tensor) -> int:
        place = self.places.get(id(tensor))
        if place is None:
            raise Untraceable("a tensor from outside of the graph")
        return place

    def _note(self, func: Any, args: Any, kwargs: Any, made: Any, written: Sequence[Tensor]) -> None:
        inputs: list[int] = []

        def value(tensor: Tensor) -> Value:
            inputs.append(self._place(tensor))
            return Value(inputs[-1])

        args, kwargs = tree_map_only(Tensor, value, (tuple(args), kwargs))
        leaves = tree_leaves(made, is_leaf=lambda leaf: leaf is None)
        if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in leaves):
            raise Untraceable(f"{name_of(func)} returns what is no tensor")
        if any(all(one is not leaf for leaf in leaves) for one in written):
            raise Untraceable(f"{name_of(func)} writes what it does not return")
        outputs = tuple(None if leaf is None else self._add(leaf) for leaf in leaves)
        if len(self.graph.nodes) >= _MOST_OPS:
            raise Untraceable("too many ops")
        self.graph.nodes.append(Node(func, args, kwargs, tuple(inputs), outputs))

    def finish(self, made: Any) -> Graph:
        leaves = tree_leaves(made, is_leaf=lambda leaf: leaf is None)
        if any(leaf is not None and not isinstance(leaf, Tensor) for leaf in leaves):
            raise Untraceable("a result that is no tensor")
        graph = self.graph
        graph.outputs = [None if leaf is None else self._place(leaf) for leaf in leaves]
        needed = set(graph.outputs)
        nodes: list[Node] = []
        for node in reversed(graph.nodes):
            if needed & set(node.outputs) - {None}:
                needed.update(node.inputs)
                nodes.insert(0, node)
        graph.nodes = nodes
        graph.unread = set(range(graph.inputs)) - needed
        return graph


def _is_value(leaf: Any) -> bool:
    return isinstance(leaf, Value)


__all__ = ["Graph", "Node", "Untraceable", "Value", "decompositions_of", "traced"]
