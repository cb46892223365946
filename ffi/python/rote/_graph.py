"""The autograd graph of a region's forward, cut off from the caller's, and how a backward runs over it.

A region's forward runs on detached inputs. What its graph saves for the backward is not in the graph: hooks keep it in
a list beside (:class:`Tape`), and every backward says which list is meant. So one graph serves all forwards of a
variant, as the guards of the variant say that each would make the same graph.

Gradients leave the graph as eager adds them up: a tensor that the region uses twice gets two *contributions*, in the
order in which the autograd engine makes them, and the engine adds them to those from outside. Adding them up inside
would round otherwise.

The graph of several results is divided into *pieces*, each with a node of autograd outside. All nodes that gradients of
the same results reach are one piece, unless the order of the engine forbids it. So a backward reaches all nodes of a
piece or none. Where one result is computed of another one, the gradients of the latter meet at the node of its piece:
those from outside, and after them those of the other result. Eager adds them up in that order, as the engine always
runs the node that was made last.
"""

from __future__ import annotations

import copy
import heapq
import inspect
import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree

from . import _bridge
from ._bytecode import instructions
from ._facts import plain
from ._libraries import is_library_class
from ._memory import storage_of, version_of
from ._specs import local_of

_Hooks = torch.autograd.graph.saved_tensors_hooks


@dataclass(frozen=True)
class Given:
    """A tensor that the graph saves and that the caller has passed: its place among the detached inputs."""

    place: int
    spec: Any


@dataclass(frozen=True)
class Made:
    """A tensor that the graph saves and that the forward has made: its place among those."""

    place: int
    spec: Any


#: What stands for a tensor that the graph saves. A tensor of the state stands for itself.
Entry = Given | Made | torch.Tensor


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
        # What was saved, and the versions that it had then, while the forward runs.
        self._live: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._unpacked: list[int] | None = None  # what is unpacked, while that is noted
        self.entries: list[Entry] = []
        self._written: frozenset[int] = frozenset()  # those to which the forward has written since
        # Tensors of the state, and places of arguments, that must not be written before the backward, by entries.
        self.checked_state: dict[int, torch.Tensor] = {}
        self.checked_arguments: dict[int, int] = {}
        self.made: list[torch.Tensor] = []
        self._current: Callable[[int], torch.Tensor] | None = None
        self._lock = threading.RLock()  # equal regions have one graph, and run their backwards one after the other
        self.has_other_hooks = False

    def hooks(self) -> Any:
        """Within, what autograd saves goes into this tape."""
        return _Hooks(self._pack, self._unpack)

    def was_written(self) -> bool:
        """Whether the forward, which has ended, has written to what it had saved. Lets go of that. A backward that
        finds such a tensor raises then, as autograd's do; of branches that no result needs, it finds none."""
        saved = enumerate(zip(self._live, self._versions, strict=True))
        self._written = frozenset(number for number, (tensor, then) in saved if version_of(local_of(tensor)) != then)
        self._live.clear()
        return bool(self._written)

    def _pack(self, tensor: torch.Tensor) -> int:
        self._live.append(tensor)
        self._versions.append(version_of(local_of(tensor)))
        self.entries.append(self._entry(tensor))
        return len(self.entries) - 1

    def _entry(self, tensor: torch.Tensor) -> Entry:
        spec = tensor._spec if isinstance(tensor, DTensor) else None
        given = self._places_of_given.get(id(tensor))
        if given is not None:
            return Given(given, spec)
        of_state = tensor if id(tensor) in self._state else self._in_state.get(storage_of(tensor))
        if of_state is not None:
            self.checked_state[len(self.entries)] = of_state
        if of_state is tensor:
            return tensor
        with self._unrecorded():
            if of_state is not None:
                return tensor.detach()
            plain = local_of(tensor).data
        place = self._in_arguments.get(storage_of(tensor))
        if place is not None:
            self.checked_arguments[len(self.entries)] = place
        for place, known in enumerate(self.made):
            if is_same(known, plain):
                return Made(place, spec)
        self.made.append(plain)
        return Made(len(self.made) - 1, spec)

    def _unpack(self, number: int) -> torch.Tensor:
        if self._unpacked is not None:
            self._unpacked.append(number)
        if self._live:  # the forward itself asks for gradients, or the nodes are asked for what they have saved
            return self._live[number]
        if self._current is None:
            raise RuntimeError(
                "rote: the graph of a region is used from outside; remedy: return the tensors that have it, or call "
                "release() on the region"
            )
        if number in self._written:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation, in a "
                "region of Rote"
            )
        return self._current(number)

    def saved_by(self, nodes: Iterable[Node]) -> list[int]:
        """Which entries nodes of the forward that has just run have saved."""
        self._unpacked = []
        try:
            with self._unrecorded():
                for node in nodes:
                    if isinstance(node, BackwardCFunction):
                        _ = node.saved_tensors
                        continue
                    for name in dir(type(node)):
                        if name.startswith("_saved_"):
                            with suppress(RuntimeError):  # the forward has let go of it
                                getattr(node, name)
            return sorted({*self._unpacked})
        finally:
            self._unpacked = None

    def part(self, numbers: Sequence[int], dead: Container[int]) -> Saved:
        """What these entries stand for. ``dead``: those that no backward finds."""
        given, made, state, arguments = dict[int, int](), dict[int, int](), dict[int, torch.Tensor](), set[int]()
        entries: dict[int, Entry] = {number: self.entries[number] for number in numbers}

        def add(number: int) -> None:
            entry = entries[number]
            if not isinstance(entry, torch.Tensor):
                places = given if isinstance(entry, Given) else made
                entries[number] = replace(entry, place=places.setdefault(entry.place, len(places)))

        for number in numbers:
            if number not in dead:
                add(number)
                if number in self.checked_state:
                    state[id(self.checked_state[number])] = self.checked_state[number]
                if number in self.checked_arguments:
                    arguments.add(self.checked_arguments[number])
        live = len(given), len(made)
        for number in numbers:
            if number in dead:
                add(number)
        return Saved(entries, list(given), list(made), *live, list(state.values()), sorted(arguments))

    @contextmanager
    def play(self, find: Callable[[int], torch.Tensor]) -> Iterator[None]:
        """Within, the graph finds the tensors that one forward has saved, by the numbers of their entries."""
        with self._lock:
            outer, self._current = self._current, find
            try:
                yield
            finally:
                self._current = outer


@dataclass(frozen=True)
class Saved:
    """What nodes of the graph have saved, of all that one forward has saved."""

    #: By their numbers in the tape. The places of what was given and made are those among these nodes' own.
    entries: dict[int, Entry]
    given: list[int]  # the places of detached inputs
    made: list[int]  # the places of what the forward has made
    #: How many of these, from the first on, a backward finds. Hooks for saved tensors see all.
    live_given: int
    live_made: int
    #: Tensors of the state, and places of arguments, that must not be written before the backward.
    checked_state: list[torch.Tensor]
    checked_arguments: list[int]

    def of_equal(self, renamed: dict[int, Any], bases: dict[int, torch.Tensor]) -> Saved:
        """What the forward of an equal region has saved. ``renamed``: that region's tensors by the identities of these;
        ``bases``: the tensors of the state in whose memory entries lie. Raises ``KeyError``."""

        def of_equal(number: int, entry: Entry) -> Entry:
            if not isinstance(entry, torch.Tensor):
                return entry
            same: torch.Tensor | None = renamed.get(id(entry))
            if same is not None:
                return same
            return _same_view(entry, bases[number], renamed[id(bases[number])])

        return replace(
            self,
            entries={number: of_equal(number, entry) for number, entry in self.entries.items()},
            checked_state=[renamed[id(tensor)] for tensor in self.checked_state],
        )

    def as_in_eager(self, number: int, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> torch.Tensor:
        """What eager saves as an entry."""
        entry = self.entries[number]
        if isinstance(entry, torch.Tensor):
            return entry
        local = (given if isinstance(entry, Given) else made)[entry.place]
        same = entry.spec is None or isinstance(local, DTensor)
        return local if same else DTensor(local, entry.spec, requires_grad=False)

    def parts(
        self, saved: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[int, torch.Tensor]]:
        """Plain tensors of what eager saves: those that the caller has passed, and those that the forward has made. And
        what hooks have put in the places of tensors of the state."""
        given: dict[int, torch.Tensor] = {}
        made: dict[int, torch.Tensor] = {}
        others: dict[int, torch.Tensor] = {}
        for (number, entry), tensor in zip(self.entries.items(), saved, strict=True):
            if not isinstance(entry, torch.Tensor):
                (given if isinstance(entry, Given) else made)[entry.place] = local_of(tensor).data
            elif not is_same(local_of(entry), local_of(tensor)):
                others[number] = tensor
        return [given[i] for i in range(len(given))], [made[i] for i in range(len(made))], others


def _same_view(view: torch.Tensor, base: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What looks at the memory of another tensor as a view looks at that of its base. Raises ``KeyError``."""
    inner, of_base, of_other = map(local_of, (view, base, other))
    if inner.dtype != of_other.dtype or inner.is_conj() or inner.is_neg():
        raise KeyError("a view that strides do not make")
    start = inner.storage_offset() - of_base.storage_offset() + of_other.storage_offset()
    made = of_other.detach().as_strided(inner.shape, inner.stride(), start).detach()
    return DTensor(made, view._spec, requires_grad=False) if isinstance(view, DTensor) else made


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


# The types of nodes that save tensors where Python does not see them: functions of C++ libraries, and what stands for
# an op that has written to a view.
_HIDING = {"CppFunction", "CopySlices"}


class Slot(NamedTuple):
    """A gradient that a piece of the graph takes: the piece, and the gradient's place there."""

    piece: int
    place: int


#: What a gradient goes to: a place of what the caller has passed, a parameter, a node outside, another piece.
Target = int | torch.Tensor | GradientEdge | Slot


class Piece:
    """Nodes of the graph that one node of autograd stands for outside."""

    def __init__(
        self,
        nodes: list[Node],
        entries: list[GradientEdge],
        slots: list[int | GradientEdge],
        tape: Tape,
        saved: Saved,
    ) -> None:
        """``nodes``: in the order of the engine; ``entries``: where gradients come in; ``slots``: the same, with the
        numbers of outputs in the places of theirs; ``saved``: by the nodes."""
        self.nodes, self.entries, self.slots, self.saved = nodes, entries, slots, saved
        self._tape = tape
        self.calls_functions = any(isinstance(node, BackwardCFunction) for node in nodes)
        #: For each contribution: what it goes to, and where it leaves the graph.
        self.targets: list[Target] = []
        self._exits: list[GradientEdge] = []
        self._holds_objects: bool | None = None  # whether the nodes may hold some of one region's own

    def of_equal(self, renamed: dict[int, Any]) -> Piece:
        """The same piece as one of an equal region, which has the very nodes: what they find, each backward says.
        ``renamed``: that region's tensors by the identities of these. Raises ``KeyError``."""
        if self._holds_objects is None:
            self._holds_objects = any(map(_holds_objects, self.nodes))
        if self._holds_objects:
            raise KeyError("objects of this region")
        made = copy.copy(self)
        made.saved = self.saved.of_equal(renamed, self._tape.checked_state)
        made.targets = [renamed[id(target)] if isinstance(target, torch.Tensor) else target for target in self.targets]
        return made

    def is_of(self, other: Piece) -> bool:
        """Whether two pieces have the very nodes in common."""
        return self.nodes is other.nodes

    def end(self, target_of: Callable[[Node, int], Target | None]) -> None:
        """Ends the edges that leave the piece, in the order in which the engine makes gradients for them.
        ``target_of``: what an edge leads to; None if it stays within the piece."""
        end_edge = _bridge.bridge().end_edge
        for node in self.nodes:
            for place, (following, number) in enumerate(node.next_functions):
                target = None if following is None else target_of(following, number)
                if target is not None:
                    self.targets.append(target)
                    self._exits.append(GradientEdge(end_edge(node, place), 0))

    def backward(
        self,
        needs: tuple[bool, ...],
        tangents: Sequence[torch.Tensor | None],
        given: Sequence[torch.Tensor],
        made: Sequence[torch.Tensor],
        others: dict[int, torch.Tensor] | None = None,
    ) -> list[torch.Tensor | None]:
        """The contributions of one backward, for those that are needed. ``tangents``: the gradients that come in;
        ``given``, ``made``, ``others``: as :meth:`Saved.parts` has them."""
        found: list[torch.Tensor | None] = [None] * len(self.targets)
        begins = [(edge, tangent) for edge, tangent in zip(self.entries, tangents, strict=True) if tangent is not None]
        needed = [number for number, need in enumerate(needs) if need]
        if not begins or not needed:
            return found

        def find(number: int) -> torch.Tensor:
            return others[number] if others and number in others else self.saved.as_in_eager(number, given, made)

        with self._tape.play(find):
            gradients = torch.autograd.grad(
                [edge for edge, _ in begins],
                [self._exits[number] for number in needed],
                [tangent for _, tangent in begins],
                retain_graph=True,
                allow_unused=True,
            )
        for number, gradient in zip(needed, gradients, strict=True):
            found[number] = gradient
        return found


class Graph:
    """The graph of one forward, in pieces: in the order in which the engine runs them."""

    def __init__(self, outputs: Sequence[torch.Tensor], tape: Tape, given: dict[Node, int], begin: int) -> None:
        """``outputs``: tensors with the graph, all different; ``given``: nodes at which gradients of the caller's
        tensors arrive, and the places of these; ``begin``: the graph's first sequence number. What eager has of the
        graph is gone then."""
        edges = [get_gradient_edge(tensor) for tensor in outputs]
        divided = pieces(edges, Ends(given, begin))
        owners = {node: number for number, nodes in enumerate(divided) for node in nodes}
        slots: list[list[int | GradientEdge]] = [[] for _ in divided]
        places: dict[tuple[Node, int], Slot] = {}
        for number, (node, place, *_) in enumerate(edges):
            owner = owners[node]
            places[node, place] = Slot(owner, len(slots[owner]))
            slots[owner].append(number)
        for node in owners:
            for following, place in node.next_functions:
                if following in owners and owners[following] != owners[node] and (following, place) not in places:
                    owner = owners[following]
                    places[following, place] = Slot(owner, len(slots[owner]))
                    slots[owner].append(GradientEdge(following, place))
        saved = [tape.saved_by(nodes) for nodes in divided]
        unseen = sorted({*range(len(tape.entries))}.difference(*saved))
        may_hide = any(type(node).__name__ in _HIDING for node in owners)
        dead = set() if may_hide else set(unseen)  # saved by branches that no result needs
        #: Whether nodes may have saved tensors where these cannot be seen. Then all pieces have them.
        self.hides = len(divided) > 1 and bool(unseen) and may_hide
        self.pieces = []
        for number, nodes in enumerate(divided):
            entries = [edges[each] if isinstance(each, int) else each for each in slots[number]]
            numbers = sorted({*saved[number], *(unseen if self.hides or not number else ())})
            self.pieces.append(Piece(nodes, entries, slots[number], tape, tape.part(numbers, dead)))
        for number, piece in enumerate(self.pieces):

            def target_of(node: Node, place: int, own: int = number) -> Target | None:
                if node in owners:
                    piece = owners[node]
                    return None if piece == own else places[node, place]
                if node in given:
                    return given[node]
                return node.variable if is_leaf(node) else GradientEdge(node, place)  # type: ignore[attr-defined]

            piece.end(target_of)

    @property
    def goes_outside(self) -> bool:
        """Whether gradients go to nodes of another graph that the caller has not passed."""
        return any(isinstance(target, GradientEdge) for piece in self.pieces for target in piece.targets)


@dataclass(frozen=True)
class Ends:
    """Where the graph of a call ends: at leaves, at nodes of what the caller has passed, and at all from before."""

    given: Container[Node | None]
    begin: int
    """The first sequence number of the call."""

    def __contains__(self, node: Node) -> bool:
        return is_leaf(node) or node in self.given or node._sequence_nr() < self.begin


def reached(roots: Iterable[Node | None], ends: Ends | tuple[()] = ()) -> tuple[set[Node], set[Node]]:
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


def _in_order(roots: list[Node], ends: Ends) -> list[Node]:
    """The nodes of a graph in the order in which the engine runs them: of those whose gradients are complete, the one
    that was made last (torch/csrc/autograd/engine.cpp)."""
    waiting: Counter[Node] = Counter(roots)
    for node in reached(roots, ends)[0]:
        waiting.update(following for following, _ in node.next_functions if following is not None)
    ready: list[tuple[int, int, Node]] = []
    arrivals = itertools.count()  # no two entries of the heap are equal
    found: list[Node] = []

    def arrives(node: Node) -> None:
        waiting[node] -= 1
        if not waiting[node] and node not in ends:
            heapq.heappush(ready, (-node._sequence_nr(), next(arrivals), node))

    for node in roots:
        arrives(node)
    while ready:
        _, _, node = heapq.heappop(ready)
        found.append(node)
        for following, _ in node.next_functions:
            if following is not None:
                arrives(following)
    return found


def pieces(outputs: Sequence[GradientEdge], ends: Ends) -> list[list[Node]]:
    """The nodes of the graph of all results, divided into pieces. Nodes and pieces stand in the engine's order."""
    order = _in_order([edge.node for edge in outputs], ends)
    sources: Counter[Node] = Counter()  # bits: the results whose gradients reach a node
    for number, edge in enumerate(outputs):
        sources[edge.node] |= 1 << number
    for node in order:
        for following, _ in node.next_functions:
            if following is not None and following not in ends:
                sources[following] |= sources[node]
    found: list[list[Node]] = []
    for source, run in itertools.groupby(order, key=sources.__getitem__):
        nodes = list(run)
        for piece in reversed(found):
            if sources[piece[0]] == source:
                piece += nodes
                break
            if not _may_change_places(piece, nodes):
                found.append(nodes)
                break
        else:
            found.append(nodes)
    return found


def _may_change_places(first: list[Node], second: list[Node]) -> bool:
    """Whether the engine could run the second nodes before the first ones, and all sums of gradients were the same."""
    if any(isinstance(node, BackwardCFunction) for node in (*first, *second)):
        return False  # it may do more than compute
    edges = {edge for node in first for edge in node.next_functions if edge[0] is not None}
    of_second = {edge for node in second for edge in node.next_functions if edge[0] is not None}
    return edges.isdisjoint(of_second) and {node for node, _ in edges}.isdisjoint(second)


#: For each result. More pieces, and they cost more than they save.
_MOST_PIECES = 4


def apart(outputs: list[torch.Tensor], ends: Ends) -> str:
    """Why no nodes of autograd can stand for the graph of several results; empty if they can."""
    for i, one in enumerate(outputs):
        if any(shares_memory(local_of(one), local_of(other)) for other in outputs[:i]):
            return "returns results that share memory"
    divided = pieces([get_gradient_edge(tensor) for tensor in outputs], ends)
    if len(divided) <= 1:
        return ""
    if len(divided) > _MOST_PIECES * len(outputs):
        return "returns results whose graphs take turns too often"
    numbers = sorted((node._sequence_nr() for nodes in divided for node in nodes), reverse=True)
    order = [node._sequence_nr() for node in _in_order([tensor.grad_fn for tensor in outputs], ends)]  # type: ignore[misc]
    if order != numbers or len({*numbers}) < len(numbers):
        return "returns several results of which not all were made one after the other"
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


def _holds_objects(node: Node) -> bool:
    """Whether a function of autograd has kept objects that may be those of one module."""
    if not isinstance(node, BackwardCFunction):
        return False
    return not all(_is_common(value) for key, value in vars(node).items() if key != "saved_tensors")


def _is_common(value: Any) -> bool:
    """Whether a value is a plain one, or says where a DTensor lies."""
    if type(value) in (tuple, list):
        return all(map(_is_common, value))
    return plain(value) or isinstance(value, DTensorSpec | DeviceMesh | Placement | TensorMeta | dist.ProcessGroup)


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
