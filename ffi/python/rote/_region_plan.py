"""What all forwards of one variant of a region have in common: their inputs, and the nodes of autograd that stand for
their graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from . import _bridge, _graph, _record, _verify
from ._specs import local_of
from ._step import VerificationError

if TYPE_CHECKING:
    from ._region import Backward


class NodePiece:
    """A piece of the graph of all forwards of one variant, and the node of autograd that stands for it."""

    def __init__(self, piece: _graph.Piece, leaves: list[int], arguments: list[int]) -> None:
        """What is saved only so that autograd finds what was written since: ``leaves`` of the result, in whose memory
        the piece has saved something, by their places; ``arguments``, by their places among those a plan finds."""
        self.piece, self._checked_leaves, self._checked_arguments = piece, leaves, arguments
        self.saved = piece.saved
        self.backward: Backward | None = None
        self.twin: NodePiece | None = None  # of the plan that a verified call has replayed; this piece is eager's then

    def of_equal(self, renamed: dict[int, Any]) -> NodePiece:
        """The same of an equal region, as :meth:`_graph.Piece.of_equal` has it."""
        made = copy.copy(self)
        made.piece = self.piece.of_equal(renamed)
        made.saved = made.piece.saved
        made.backward = made.twin = None
        return made

    def node(self) -> tuple[Any, ...]:
        """The node of each forward, as the bridge takes it."""
        saved = self.saved
        live = saved.given[: saved.live_given], saved.made[: saved.live_made]
        to_save = *live, saved.checked_state, self._checked_leaves, self._checked_arguments
        return self.piece.slots, self.piece.targets, self.gradients, to_save, self.piece.entries

    def hooked_node(self, given: list[torch.Tensor], made: list[torch.Tensor]) -> tuple[Any, ...]:
        """The node of one forward, which saves what eager saves. ``given``, ``made``: all tensors of the forward."""
        saved = self.saved
        own = [given[place] for place in saved.given], [made[place] for place in saved.made]
        to_save = [saved.as_in_eager(number, *own) for number in saved.entries]
        return self.piece.slots, self.piece.targets, self.of_hooked, to_save, self.piece.entries

    def of_hooked(self, needs: tuple[bool, ...], tangents: Any, saved: list[torch.Tensor]) -> Any:
        return self.gradients(needs, tangents, *self.saved.parts(saved))

    def gradients(
        self,
        needs: tuple[bool, ...],
        tangents: tuple[torch.Tensor | None, ...],
        given: list[torch.Tensor],
        made: list[torch.Tensor],
        others: dict[int, torch.Tensor] | None = None,
    ) -> Any:
        """The contributions of one backward: those that are needed. ``tangents``: the gradients that come in."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "rote: a region cannot be differentiated twice (create_graph=True); remedy: call release() on the "
                "region, or leave this module out of rote.capture_module"
            )
        if self.piece.calls_functions and all(tangent is None for tangent in tangents):
            raise RuntimeError(
                "rote: no gradient arrives at a region that calls a torch.autograd.Function, which eager gives zeros "
                "then; remedy: call release() on the region, or return zeros from the backward of the function that "
                "takes its result"
            )
        if self.backward is None or others:
            found = self.piece.backward(needs, tangents, given, made, others)
            if self.twin is not None and not others:
                self.twin.compare(found, needs, tangents, given, made)
            return found
        return self.backward.call((needs, tangents, given, made), {})

    def compare(self, found: Any, *args: Any) -> None:
        """Runs the backward of a verified call, and raises an error where it does not give what eager has given."""
        if self.backward is None:
            return
        replayed = self.backward.beside(args)
        for number, (one, other) in enumerate(zip(found, replayed, strict=True)):
            if (one is None) != (other is None) or not (one is None or _is_same_gradient(one, other)):
                what = f"{self.backward.target(number)} (gradient {number + 1} of {len(found)})"
                raise VerificationError(f"a replay of {self.backward.name()} differs from eager in {what}")

    def is_like(self, other: NodePiece) -> bool:
        """Whether the backward of one piece can take what the other one has saved."""
        one, two = self.saved, other.saved
        kinds = [[type(entry) for entry in saved.entries.values()] for saved in (one, two)]
        given = [len(piece.piece.slots) for piece in (self, other)]
        left = [[type(target) for target in piece.piece.targets] for piece in (self, other)]
        places = one.given == two.given and one.made == two.made
        return places and kinds[0] == kinds[1] and given[0] == given[1] and left[0] == left[1]


_ANY_ORDER: list[int] = []


class RegionPlan:
    """What all forwards of one variant have in common."""

    def __init__(
        self, graph: _graph.Graph, tape: _graph.Tape, inputs: Inputs, places: list[int], leaves: list[Any]
    ) -> None:
        """``leaves``: of the result; ``places``: of those that have the graph."""
        self._finders = inputs.finders[:]  # each finds one tensor in the arguments of a call
        self._outputs = places
        self._nodes: list[tuple[Any, ...]] = []  # of all forwards, once there is one
        self.key = ""  # of the plan of the forward
        self.pieces = []
        for piece in graph.pieces:
            made = [tape.made[place] for place in piece.saved.made[: piece.saved.live_made]]
            checked = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and _is_saved(leaf, made)]
            arguments = piece.saved.checked_arguments
            found = [*range(len(self._finders), len(self._finders) + len(arguments))]
            self._finders += map(inputs.finder, arguments)
            self.pieces.append(NodePiece(piece, checked, found))
        order = sorted((number, i) for i, piece in enumerate(self.pieces) for number in piece.saved.entries)
        self._order = [i for _, i in order]  # in which eager saves: the pieces of all that is saved

    def of_equal(self, renamed: dict[int, Any]) -> RegionPlan:
        """The same of an equal region, as :meth:`_graph.Piece.of_equal` has it."""
        made = copy.copy(self)
        made.pieces = [piece.of_equal(renamed) for piece in self.pieces]
        made._nodes = []
        return made

    def verify(self, replayed: RegionPlan) -> bool:
        """Has each backward compared with that of the plan that was replayed, if the graphs are alike."""
        if len(self.pieces) != len(replayed.pieces):
            return False
        for piece, twin in zip(self.pieces, replayed.pieces, strict=True):
            piece.twin = twin
        return all(piece.is_like(twin) for piece, twin in zip(self.pieces, replayed.pieces, strict=True))

    def attach(self, result: Any, args: Any, kwargs: Any, hooked: bool) -> Any:
        """The result of a forward, as one of autograd's. ``result``: with what the graph has saved; ``hooked``: whether
        code around has set hooks for saved tensors, which may count what they are called with."""
        result, made = result
        leaves, structure = ([result], None) if isinstance(result, torch.Tensor) else _pytree.tree_flatten(result)
        given = [find(args, kwargs) for find in self._finders]
        nodes, order = self._nodes, _ANY_ORDER
        if hooked:
            nodes, order = [piece.hooked_node(given, made) for piece in self.pieces], self._order
        elif not nodes:
            nodes = self._nodes = [piece.node() for piece in self.pieces]
        _bridge.bridge().attach_region(leaves, self._outputs, given, made, nodes, order)
        return leaves[0] if structure is None else _pytree.tree_unflatten(leaves, structure)


_NONE = torch.empty(0)  # stands for a leaf that is no tensor


class Inputs:
    """The arguments of a forward, with detached tensors in the places of those that require grad."""

    def __init__(self, casts: list[torch.Tensor], args: Any, kwargs: Any) -> None:
        """``casts``: tensors that stand before the arguments, and that the function finds by itself: the graph ends at
        their own nodes."""
        args = (casts, *args)
        leaves, structure = _pytree.tree_flatten((args, kwargs))
        self.places: dict[int, int] = {}  # of detached tensors among these inputs
        self.finders: list[Callable[[Any, Any], torch.Tensor]] = []
        self._originals: dict[int, torch.Tensor] = {}  # by detached tensors
        self._leaves, self._all = leaves[:], (args, kwargs)
        self.tensors = [leaf if isinstance(leaf, torch.Tensor) else _NONE for leaf in leaves]
        made: dict[int, torch.Tensor] = {}
        for place, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                if id(leaf) not in made:
                    made[id(leaf)] = cut = leaf if place < len(casts) else _detached(leaf)
                    self.places[id(cut)] = len(self.finders)
                    self.finders.append(self.finder(place))
                    self._originals[id(cut)] = leaf
                leaves[place] = made[id(leaf)]
        self._made = list(made.values())
        (_, *self.args), self.kwargs = _pytree.tree_unflatten(leaves, structure)

    def finder(self, place: int) -> Callable[[Any, Any], torch.Tensor]:
        """Finds the tensor of a later call that stands in the place of a leaf."""
        return _finder(self._leaves[place], place, *self._all)

    def nodes(self) -> dict[Node, int]:
        """The nodes at which gradients of these inputs arrive, with the places of the inputs."""
        return {get_gradient_edge(cut).node: self.places[id(cut)] for cut in self._made}

    def original(self, leaf: Any) -> Any:
        """What the caller has passed, for what stands for it."""
        return self._originals.get(id(leaf), leaf)


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the memory of another one, at which a graph begins."""
    with _record.unrecorded():
        detached = tensor.detach()
    _bridge.bridge().begin_graph(detached)
    return detached


def _finder(leaf: torch.Tensor, place: int, args: Any, kwargs: Any) -> Callable[[Any, Any], torch.Tensor]:
    """Finds the tensor of a later call that stands where this one does."""
    for i, argument in enumerate(args):
        if argument is leaf:
            return lambda args, kwargs: args[i]
    for name, argument in kwargs.items():
        if argument is leaf:
            return lambda args, kwargs: kwargs[name]
    return lambda args, kwargs: _pytree.tree_leaves((args, kwargs))[place]


def _is_same_gradient(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two gradients are equal bit for bit."""
    of_one, of_other = (each._spec if isinstance(each, DTensor) else None for each in (one, other))
    return of_one == of_other and _verify.same(local_of(one), local_of(other))


def _is_saved(tensor: torch.Tensor, made: list[torch.Tensor]) -> bool:
    return any(_graph.shares_memory(each, local_of(tensor)) for each in made)
