"""The autograd graph of a region's forward, cut off from the caller's, and how a backward runs over it.

A region's forward runs on detached inputs. What its graph saves for the backward is not in the graph: hooks keep it in
a list beside (:class:`Tape`), and every backward says which list is meant. So one graph serves all forwards of a
variant, as the guards of the variant say that each would make the same graph.

Gradients leave the graph as eager adds them up: a tensor that the region uses twice gets two *contributions*, in the
order in which the autograd engine makes them, and the engine adds them to those from outside. Adding them up inside
would round otherwise.
"""

from __future__ import annotations

import heapq
import inspect
import itertools
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from ._bytecode import instructions
from ._libraries import is_library_class
from ._memory import storage_of, version_of
from ._specs import local_of

_Hooks = torch.autograd.graph.saved_tensors_hooks


@dataclass(frozen=True)
class Given:
    """A tensor that the graph saves and that the caller has passed: its place among those that are saved."""

    place: int
    spec: Any


@dataclass(frozen=True)
class Made:
    """A tensor that the graph saves and that the forward has made: its place among those."""

    place: int
    spec: Any


class Tape:
    """What one forward saves for its backward, in the order in which the graph saves it."""

    def __init__(
        self,
        given: dict[int, int],
        arguments: list[torch.Tensor],
        state: list[torch.Tensor],
        unrecorded: Callable[[], Any],
    ) -> None:
        """``given``: places of detached inputs by their identities. The graph may save other tensors in the memory of
        ``arguments`` and ``state``."""
        self._places_of_given = given
        self._state = {id(tensor) for tensor in state}
        self._in_state = {storage_of(tensor): tensor for tensor in reversed(state)}
        self._in_arguments = {storage_of(tensor): place for place, tensor in enumerate(arguments)}
        self._unrecorded = unrecorded
        #: Tensors of the state, and places of arguments, that must not be written before the backward.
        self.checked_state: dict[int, torch.Tensor] = {}
        self.checked_arguments: set[int] = set()
        # What was saved, and the versions that it had then, while the forward runs.
        self._live: list[torch.Tensor] = []
        self._versions: list[int] = []
        self.entries: list[Given | Made | torch.Tensor] = []  # tensors: those of the state
        self.given: list[int] = []  # the places of detached inputs that are saved
        self.made: list[torch.Tensor] = []
        self._current: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], dict[int, torch.Tensor]] | None = None
        self.has_other_hooks = False

    def hooks(self) -> Any:
        """Within, what autograd saves goes into this tape."""
        return _Hooks(self._pack, self._unpack)

    def was_written(self) -> bool:
        """Whether the forward, which has ended, has written to what it had saved. Lets go of that."""
        found = any(
            version_of(local_of(tensor)) != version for tensor, version in zip(self._live, self._versions, strict=True)
        )
        self._live.clear()
        return found

    def _pack(self, tensor: torch.Tensor) -> int:
        self._live.append(tensor)
        self._versions.append(version_of(local_of(tensor)))
        self.entries.append(self._entry(tensor))
        return len(self.entries) - 1

    def _entry(self, tensor: torch.Tensor) -> Given | Made | torch.Tensor:
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        given = self._places_of_given.get(id(tensor))
        if given is not None:
            if given not in self.given:
                self.given.append(given)
            return Given(self.given.index(given), spec)
        of_state = tensor if id(tensor) in self._state else self._in_state.get(storage_of(tensor))
        if of_state is not None:
            self.checked_state[id(of_state)] = of_state
        if of_state is tensor:
            return tensor
        with self._unrecorded():
            if of_state is not None:
                return tensor.detach()
            plain = local_of(tensor).data
        place = self._in_arguments.get(storage_of(tensor))
        if place is not None:
            self.checked_arguments.add(place)
        for place, known in enumerate(self.made):
            if is_same(known, plain):
                return Made(place, spec)
        self.made.append(plain)
        return Made(len(self.made) - 1, spec)

    def _unpack(self, number: int) -> torch.Tensor:
        if self._live:  # the forward itself asks for gradients
            return self._live[number]
        if self._current is None:
            raise RuntimeError(
                "rote: the graph of a region is used from outside; remedy: return the tensors that have it, or call "
                "release() on the region"
            )
        given, made, others = self._current
        return others[number] if number in others else self._tensor(self.entries[number], given, made)

    def _tensor(
        self, entry: Given | Made | torch.Tensor, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        if isinstance(entry, torch.Tensor):
            return entry
        local = (given if isinstance(entry, Given) else made)[entry.place]
        same = entry.spec is None or isinstance(local, DTensor)
        return local if same else DTensor(local, entry.spec, requires_grad=False)

    def as_in_eager(self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What eager saves, in its order."""
        return [self._tensor(entry, given, made) for entry in self.entries]

    def parts(
        self, saved: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, torch.Tensor]]:
        """Plain tensors of what eager saves: those that the caller has passed, and those that the forward has made. And
        what hooks have put in the places of tensors of the state."""
        given: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        others: dict[int, torch.Tensor] = {}
        for number, (entry, tensor) in enumerate(zip(self.entries, saved, strict=True)):
            if not isinstance(entry, torch.Tensor):
                (given if isinstance(entry, Given) else made)[entry.place] = local_of(tensor).data
            elif not is_same(local_of(entry), local_of(tensor)):
                others[number] = tensor
        return [given[i] for i in range(len(given))], [made[i] for i in range(len(made))], others

    def play(
        self, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], others: dict[int, torch.Tensor]
    ) -> Tape:
        """Within, the graph finds the tensors that one forward has saved."""
        self._current = given, made, others
        return self

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self._current = None


def is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors look at the same memory in the same way."""
    return bool(
        shares_memory(one, other)
        and one.dtype == other.dtype
        and one.storage_offset() == other.storage_offset()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_conj() == other.is_conj()
        and one.is_neg() == other.is_neg()
    )


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two plain tensors have one storage."""
    return storage_of(one) == storage_of(other)


@dataclass(frozen=True)
class _Contribution:
    """A gradient that leaves the graph: by which edge of a node, to which input of another node."""

    node: Node
    place: int
    end: Node
    number: int

    @property
    def edge(self) -> GradientEdge:
        return GradientEdge(self.end, self.number)


class Graph:
    """The graph of one forward."""

    def __init__(self, outputs: Sequence[torch.Tensor], tape: Tape, given: dict[Node, int], begin: int) -> None:
        """``outputs``: tensors with the graph, all different; ``given``: nodes at which gradients of the caller's
        tensors arrive, and the places of these; ``begin``: the graph's first sequence number."""
        self._outputs = [get_gradient_edge(tensor) for tensor in outputs]
        self._tape = tape
        contributions = _contributions([edge.node for edge in self._outputs], Ends(given, begin))
        #: What gradients go to, one for each contribution, in the order in which the engine makes them: places of what
        #: the caller has passed, parameters, and nodes outside.
        self.leaves: list[int | torch.Tensor | GradientEdge] = [_target(each, given) for each in contributions]
        uses = Counter(each.edge for each in contributions)
        self._single: list[tuple[int, GradientEdge]] = []
        self._several: list[GradientEdge | None] = []  # of each contribution, if a hook catches it
        self._caught: list[torch.Tensor | None] = [None] * len(contributions)
        places: dict[Node, list[tuple[int, int]]] = {}
        for number, each in enumerate(contributions):
            # A node may lead to a parameter that needs a gradient too: nothing must go on there.
            if uses[each.edge] == 1 and not each.end.next_functions:
                self._single.append((number, each.edge))
                self._several.append(None)
            else:
                places.setdefault(each.node, []).append((number, each.place))
                self._several.append(each.edge)
        for node, of_node in places.items():
            node.register_hook(self._catch(of_node))

    @property
    def goes_outside(self) -> bool:
        """Whether gradients go to nodes of another graph that the caller has not passed."""
        return any(isinstance(leaf, GradientEdge) for leaf in self.leaves)

    def _catch(self, places: list[tuple[int, int]]) -> Callable[[Any, Any], Any]:
        """A hook that takes contributions out, before the engine adds them up."""
        caught = self._caught

        def catch(gradients: Any, _: Any) -> Any:
            left = list(gradients)
            for number, place in places:
                caught[number], left[place] = left[place], None
            return tuple(left)

        return catch

    def backward(
        self,
        needs: tuple[bool, ...],
        tangents: Sequence[torch.Tensor | None],
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        others: dict[int, torch.Tensor] | None = None,
    ) -> list[torch.Tensor | None]:
        """The contributions of one backward, for those that are needed. ``tangents``: gradients of the outputs;
        ``given``, ``made``, ``others``: as :meth:`Tape.parts` has them."""
        found: list[torch.Tensor | None] = [None] * len(self.leaves)
        ends = [(edge, tangent) for edge, tangent in zip(self._outputs, tangents, strict=True) if tangent is not None]
        singles = [(number, edge) for number, edge in self._single if needs[number]]
        several = {edge for edge, need in zip(self._several, needs, strict=True) if edge is not None and need}
        if not ends or not (singles or several):
            return found
        with self._tape.play(given, made, others or {}), _without_hooks(self.leaves):
            gradients = torch.autograd.grad(
                [edge for edge, _ in ends],
                [*(edge for _, edge in singles), *several],
                [tangent for _, tangent in ends],
                retain_graph=True,
                allow_unused=True,
            )
        for (number, _), gradient in zip(singles, gradients, strict=False):
            found[number] = gradient
        for number, edge in enumerate(self._several):
            if edge is not None:
                found[number], self._caught[number] = self._caught[number], None
        return found


@contextmanager
def _without_hooks(leaves: Sequence[int | torch.Tensor | GradientEdge]) -> Iterator[None]:
    """Within, hooks of parameters do not run: the caller's graph runs them."""
    hooks = [leaf._backward_hooks for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf._backward_hooks]
    kept = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, own in zip(hooks, kept, strict=True):
            each.update(own)


def _target(contribution: _Contribution, given: dict[Node, int]) -> int | torch.Tensor | GradientEdge:
    if contribution.end in given:
        return given[contribution.end]
    if is_leaf(contribution.end):
        return contribution.end.variable  # type: ignore[attr-defined, no-any-return]
    return contribution.edge


@dataclass(frozen=True)
class Ends:
    """Where the graph of a call ends: at leaves, at nodes of what the caller has passed, and at all from before."""

    given: Container[Node | None]
    begin: int
    """The first sequence number of the call."""

    def __contains__(self, node: Node) -> bool:
        return is_leaf(node) or node in self.given or node._sequence_nr() < self.begin


def reached(roots: Iterable[Node | None], ends: Ends) -> tuple[set[Node], set[Node]]:
    """The nodes of a graph, and those of its ends that it has reached."""
    pending, nodes, reached_ends = list(roots), set[Node](), set[Node]()
    while pending:
        node = pending.pop()
        if node is None or node in nodes:
            continue
        if node in ends:
            reached_ends.add(node)
            continue
        nodes.add(node)
        pending += [following for following, _ in node.next_functions]
    return nodes, reached_ends


def _contributions(roots: list[Node], ends: Ends) -> list[_Contribution]:
    """The gradients that leave a graph, in the order in which the engine runs nodes: of those whose gradients are
    complete, the one that was made last (torch/csrc/autograd/engine.cpp)."""
    waiting: Counter[Node] = Counter(roots)
    for node in reached(roots, ends)[0]:
        waiting.update(following for following, _ in node.next_functions if following is not None)
    ready: list[tuple[int, int, Node]] = []
    arrivals = itertools.count()  # no two entries of the heap are equal
    found: list[_Contribution] = []

    def arrives(node: Node) -> None:
        waiting[node] -= 1
        if not waiting[node] and node not in ends:
            heapq.heappush(ready, (-node._sequence_nr(), next(arrivals), node))

    for node in roots:
        arrives(node)
    while ready:
        _, _, node = heapq.heappop(ready)
        for place, (following, number) in enumerate(node.next_functions):
            if following is None:
                continue
            if following in ends:
                found.append(_Contribution(node, place, following, number))
            arrives(following)
    return found


def apart(outputs: list[torch.Tensor], ends: Ends) -> str:
    """Why one node cannot stand for the graph of several results; empty if it can."""
    for i, one in enumerate(outputs):
        if any(shares_memory(local_of(one), local_of(other)) for other in outputs[:i]):
            return "returns results that share memory"
    graphs = [reached([tensor.grad_fn], ends) for tensor in outputs]
    edges = {(tensor.grad_fn, tensor.output_nr) for tensor in outputs}
    for node in set[Node]().union(*(nodes for nodes, _ in graphs)):
        if not edges.isdisjoint(node.next_functions):
            return "returns a result that was computed of another one"
    for nodes, of_ends in graphs[1:]:
        if nodes.isdisjoint(graphs[0][0]) or of_ends != graphs[0][1]:
            return "returns results that have not all inputs in common"
    return ""


def unfit(nodes: Iterable[Node]) -> tuple[str, str] | None:
    """Why nodes cannot serve other calls than the one that has made them, with the remedy."""
    for node in nodes:
        if not isinstance(node, BackwardCFunction):
            continue
        name = type(node).__name__.removesuffix("Backward")
        if name == "CheckpointFunction":
            return "sets a checkpoint with use_reentrant=True", INSIDE
        own = [value for key, value in vars(node).items() if key != "saved_tensors"]
        if any(isinstance(leaf, torch.Tensor) for leaf in _pytree.tree_leaves(own)):
            what = f"the backward of {name} finds tensors on ctx, which are those of one call"
            return what, "keep them by ctx.save_for_backward()"
        function = type(node)._forward_cls
        if not is_library_class(function) and (_writes_attributes(function) or any(map(_may_change, own))):
            return (
                f"the backward of {name} may change what is on ctx",
                "leave attributes of ctx as the forward sets them",
            )
    return None


def _may_change(value: Any) -> bool:
    return isinstance(value, list | dict | set | bytearray | deque)


def _writes_attributes(function: Any) -> bool:
    """Whether the backward of a function of autograd sets or deletes attributes."""
    code = getattr(inspect.unwrap(function.backward), "__code__", None)
    return code is None or any(name in ("STORE_ATTR", "DELETE_ATTR") for _, name, _ in instructions(code))


INSIDE = "make the function inside the checkpoint the region, or leave the checkpoint out"


def casts(nodes: set[Node], ends: set[Node]) -> list[torch.Tensor] | None:
    """The parameters that a graph of these nodes and ends casts to another dtype, each once. None if it uses such a
    parameter as it is, too: eager adds up the parameter's gradients in the order of all of these."""
    cast = {id(parameter): parameter for parameter in map(_cast, (*nodes, *ends)) if parameter is not None}
    uses = (following for node in nodes if not is_cast(node) for following, _ in node.next_functions)
    direct = {id(node.variable) for node in uses if node is not None and is_leaf(node)}  # type: ignore[attr-defined]
    return None if direct & cast.keys() else list(cast.values())


def is_cast(node: Node) -> bool:
    """Whether a node is that of a cast of a parameter."""
    return _cast(node) is not None


def _cast(node: Node) -> torch.Tensor | None:
    """The parameter whose cast a node is."""
    source = node.next_functions[0][0] if node.name().startswith("ToCopyBackward") else None
    return source.variable if source is not None and is_leaf(source) else None  # type: ignore[attr-defined]


def is_leaf(node: Node) -> bool:
    """Whether a node accumulates the gradient of a tensor that no op has made."""
    return type(node).__name__ == "AccumulateGrad"
