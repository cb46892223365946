"""Regions: functions whose forward and backward are captured each, while all around them runs as before.

A region is two captured functions. The forward returns its results and what its autograd graph saves; a node of
autograd (``region.h``) holds that until its backward comes, which is captured too, for each variant of the forward. A
graph in several pieces has a node and a captured backward for each.
Where the forward is not replayed, it runs on detached inputs, so that its graph (``_graph.py``) ends where the region
does.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import itertools
import operator
import shutil
import tempfile
import types
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree

from . import _bridge, _class_forward, _graph, _record
from ._equal import Known
from ._native import c_text, lib
from ._part import Part
from ._recording import Recording
from ._region_checks import (
    OUTSIDE,
    Hooks,
    Look,
    is_fixed,
    other_hooks,
    put_hooks,
    take_hooks,
    tensors_in,
    transforms,
    versions_of_packed,
    wrappers,
)
from ._region_plan import Inputs, RegionPlan
from ._specs import looks_of, spec_text
from ._step import Stats, VerificationError

# Calls from the first replay of a forward to that of its backward.
_BEHIND = 2


@functools.cache
def _plans_of_process() -> str:
    """A directory for plans that lasts as long as the process, so that equal blocks share one plan."""
    plans = tempfile.mkdtemp(prefix="rote-regions-")
    atexit.register(shutil.rmtree, plans, ignore_errors=True)
    return plans


class Watch(Protocol):
    """Looks at the first calls of a region, which run eagerly."""

    def run(self, region: Region, args: Any, kwargs: Any) -> Any:
        """Runs a call."""


class Region(Part):
    """A region, and the captured function of its forward."""

    def __init__(self, function: Callable[..., Any], state: Any, *, verify: int = 0, **options: Any) -> None:
        options["plans"] = options["plans"] or _plans_of_process()
        # The backward has its plan later than the forward.
        super().__init__(function, state, verify=verify + _BEHIND if verify > 0 else verify, **options)
        self._options = options
        self.in_place = False  # it stands for the forward of a module's class, which may have another one later
        self.kind: Hashable = None  # equal for regions that may share a plan; known once the region is called
        # Of settings of autocast that a call was seen under: the parameters that are cast; None if calls stay eager.
        self._casts: dict[Any, list[torch.Tensor] | None] = {}
        self._made: RegionPlan | None = None  # by the forward that is recorded
        self._is_refused = False  # the recording, before the forward runs
        self._plans: dict[int, RegionPlan] = {}  # by the numbers of variants
        self._found: RegionPlan | None = None  # whose graph the result of the last call needs
        self._replayed_plan: RegionPlan | None = None  # of the verified call that is under way
        self._differs_in = ""  # what eager's graph of that call shows
        self._hidden: Hooks = []  # while the forward is captured
        self._writes_state = False
        self._reasons: list[str] = []  # why calls run eagerly that no recording was tried of
        self.watch: Watch | None = None
        self._sees = False  # the last call that was not replayed has run eagerly

    # -- calls ----------------------------------------------------------------

    def call(self, args: Any, kwargs: Any) -> Any:
        if self.is_quiet and self.watch is None and _is_leaf_among((*args, *kwargs.values())):
            return self.function(*args, **kwargs)  # a script that takes its gradient may differentiate that again
        if self.in_place and (replaced := self._replaced()) is not None:
            if self.kind is not None:
                return replaced(*args, **kwargs)
            self.function = replaced  # before the first call: `fully_shard` gives a module another class
        if self.kind is not None and not self._hidden and _is_plain_call():
            with self._lock:
                args = ([], *args)
                result = self._handle(args, kwargs)
                plan, self._found = self._found, None
                return result if plan is None else plan.attach(result, args, kwargs, False)
        if _record.in_step() or not _can_be_cut():
            return self.function(*args, **kwargs)
        if self.watch is not None:
            return self.watch.run(self, args, kwargs)
        autocast = _autocast()
        tensors = list(self.state.tensors()) if self.kind is None else []
        if self._is_left(args, kwargs, autocast, tensors):
            return self.function(*args, **kwargs)
        with self._lock:
            outer, self._hidden = self._hidden, take_hooks()
            hooked = bool(self._hidden)
            args = ([_bridge.bridge().autocast(each) for each in self._casts.get(autocast) or ()], *args)
            if self.kind is None:
                self._find_kind(args, kwargs, tensors)
            try:
                result = super().call(args, kwargs)
            finally:
                put_hooks(self._hidden)
                self._hidden = outer
            plan, self._found = self._found, None
            return result if plan is None else plan.attach(result, args, kwargs, hooked)

    def _of_class(self) -> Any:
        """What the class of a module has for its region now."""
        method: Any = self.function
        return _class_forward.of(type(method.__self__))

    def _replaced(self) -> Any:
        """What the class of a module has in the place of the function, if that is another one."""
        method: Any = self.function
        now = self._of_class()
        return None if now is method.__func__ else types.MethodType(now, method.__self__)

    def _is_left(self, args: Any, kwargs: Any, autocast: Any, state: list[tuple[str, torch.Tensor]]) -> bool:
        """Whether a call is left to eager as it is. ``state``: its tensors, where no call was handled before."""
        if autocast is not None and _has_leaf(args, kwargs):
            what = "takes a leaf that requires grad under an autocast entered outside, which keeps the leaf's cast"
            self._stays_eager(what, "enter autocast in the region")
            return True
        # A checkpoint may leave the last writes out when it runs a region again.
        hooked = self._writes_state and torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        makes_parameters = any(nn.parameter.is_lazy(tensor) for _, tensor in state)
        return hooked or makes_parameters or self._casts.get(autocast, ()) is None

    def _find_kind(self, args: Any, kwargs: Any, state: list[tuple[str, torch.Tensor]]) -> None:
        """Says which regions may share plans with this one, and gives them a directory of their own."""
        given = ((f"{i}{tensor.is_leaf}", tensor) for i, tensor in enumerate(tensors_in(args, kwargs)))
        looks = (*_looks(state), *_looks(given))
        said = repr((getattr(self.function, "__qualname__", ""), looks)).encode()
        directory = Path(self.plans, hashlib.blake2s(said, digest_size=8).hexdigest())
        if self.plans == _plans_of_process():  # share with regions that begin now, and not with those of other models
            numbers = itertools.count()
            while directory.is_dir() and any(directory.iterdir()):
                directory = directory.with_suffix(f".{next(numbers)}")
        self.kind = _code_of(self.function), looks, directory
        self.plans = self._options["plans"] = str(directory)

    def _run(self, args: Any, kwargs: Any) -> Any:
        put_hooks(self._hidden)
        try:
            return super()._run(args[1:], kwargs)
        finally:
            take_hooks()

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        if not self.is_quiet:
            return super()._recorded(args, kwargs)
        if not is_fixed((args[1:], *kwargs.values())):
            self._stays_eager("takes a list, a dict or an object, to which it may write in some calls", "pass tensors")
            return self._run(args, kwargs)
        # What a recording leaves beside its result has no graph, so a call that is like it, and runs eagerly, comes
        # first: it shows what there is to leave.
        self._sees, sees = not self._sees, self._sees
        return super()._recorded(args, kwargs) if sees else self._look(args, kwargs)

    def _has_looked(self) -> bool:
        """Whether calls under the present autocast are known to make a region, or not to."""
        return _autocast() in self._casts

    def _look(self, args: Any, kwargs: Any) -> Any:
        """Runs a first call eagerly, and finds out whether the function can be a region at all."""
        if not torch.is_grad_enabled():
            return self._run(args, kwargs)
        look = Look(args[1:], kwargs, [tensor for _, tensor in self.state.tensors()])
        hooked = bool(self._hidden)  # by hooks, which may keep what they see
        with _record.uncollected():  # what the call leaves is among the youngest objects
            with versions_of_packed(self._hidden) as written, transforms() as differentiates, wrappers() as wrapper:
                result = self._run(args, kwargs)
            problem = look.problem(result) if hooked else look.problem_of_eager(result)
        if written():
            problem = "writes to what it has saved, after hooks have seen it", "leave it eager"
        if differentiates():
            problem = "calls a transform of torch.func that differentiates", "use torch.autograd.grad"
        problem = wrapper() or problem
        self._writes_state |= look.writes_state()
        autocast = _autocast()
        self._casts[autocast] = (
            [] if autocast is None else self._in_order(_graph.casts(*look.graph(look.results(result))))
        )
        if problem:
            self._off = True
            self._stays_eager(*problem)
        elif self._casts[autocast] is None:
            self._stays_eager("uses a parameter both as autocast casts it and as it is", "enter autocast in the region")
        return result

    def _in_order(self, parameters: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
        """Parameters in the order of the state, which is that of equal regions."""
        places = {id(tensor): place for place, (_, tensor) in enumerate(self.state.tensors())}
        return parameters and sorted(parameters, key=lambda each: places.get(id(each), len(places)))

    def _stays_eager(self, why: str, remedy: str) -> None:
        """Says once why calls run eagerly."""
        reason = f"{why}; remedy: {remedy}"
        if reason not in self._reasons:
            self._reasons.append(reason)
            self._refused(reason)

    def has_given_up(self) -> bool:
        """Whether all calls run eagerly from now on."""
        return self._off

    def cannot_be_replayed(self, patience: int) -> str:
        """Why no forward can be replayed, as far as that is known; empty if one may be. ``patience``: in how many calls
        there is a plan."""
        stats = self.stats
        if stats.refusals:
            return stats.refusals[-1]
        return f"no plan after {stats.calls} calls" if stats.calls > patience and not self.results else ""

    # -- verification -----------------------------------------------------------

    def _verified(self, args: Any, kwargs: Any) -> Any:
        self._replayed_plan, self._differs_in = None, ""
        try:
            result = super()._verified(args, kwargs)
        finally:
            self._replayed_plan = None
        if self._differs_in:
            raise VerificationError(f"a replay of {self.name()} differs from eager in {self._differs_in}")
        return result

    def _call_beside(self, args: Any, kwargs: Any) -> tuple[Any, bool]:
        result, replayed = super()._call_beside(args, kwargs)
        self._replayed_plan = self._found if replayed else None
        return result, replayed

    def _run_beside(self, args: Any, kwargs: Any) -> Any:
        """Runs a call with a graph of its own, as a recording does. The caller gets the result and the graph of this
        call."""
        result, made, problem = self._run_apart(*args, **kwargs)
        self._found, replayed = made, self._replayed_plan
        if problem is not None:
            self._differs_in = f"what a region may do: it {problem[0]}"
        elif not (made is replayed or (made is not None and replayed is not None and made.verify(replayed))):
            self._differs_in = "its autograd graph"
        return result

    def _told(self, difference: str) -> str:
        if self._replayed_plan is None:
            return difference
        if difference.startswith("result[1]"):
            return f"tensor {difference.removeprefix('result[1]').strip('[]')} of those that it saves for the backward"
        return difference.replace("result[0]", "result", 1)

    def _deliver(self, args: Any, kwargs: Any) -> Any:
        result = super()._deliver(args, kwargs)
        self._found = self._plans.get(self.variant.value)
        return result

    def _observed(self, recording: Recording) -> Any:
        self._is_refused = recording.is_refused
        try:
            result = super()._observed(recording)
            self._found = self._made
            return result
        finally:
            self._made = None

    def _kept(self, outcome: dict[str, Any], recording: Recording) -> None:
        super()._kept(outcome, recording)
        for gone in self._plans.keys() - set(outcome["variants"]):
            del self._plans[gone]
        if "variant" in outcome and self._made is not None:
            self._add_plan(outcome["variant"], self._made, self.key(outcome["variant"]))

    def _add_plan(self, variant: int, made: RegionPlan, key: str) -> None:
        """``key``: of the plan of the forward."""
        made.key = key
        for number, piece in enumerate(made.pieces):
            of_piece = str(number + 1) if len(made.pieces) > 1 else ""
            piece.backward = Backward(self, piece.piece, f"backward{of_piece} of {key}", self._options)
        self._plans[variant] = made

    def _to_take_over(self, other: Part, known: Known, objects: list[Any]) -> Callable[[int], None] | None:
        assert isinstance(other, Region)
        autocast = _autocast()
        plan, renamed = other._plans.get(known.variant), known.renamed(objects)
        # The casts of parameters that autocast keeps are arguments, in this order.
        casts = [renamed.get(id(parameter), parameter) for parameter in other._casts.get(autocast) or ()]
        own = self._casts.get(autocast) or ()
        if len(casts) != len(own) or not all(map(operator.is_, casts, own)):
            return None
        made = None if plan is None else plan.of_equal(renamed)

        def bound(variant: int) -> None:
            self._writes_state |= other._writes_state
            self._casts.setdefault(autocast, casts)
            if made is not None and plan is not None:
                self._add_plan(variant, made, plan.key)

        return bound

    # -- what people look at ----------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters, as of now, and those of the backward."""
        backwards = [backward.stats for backward in self._backwards()]
        stats = super().stats
        return replace(stats, refusals=[*stats.refusals, *self._reasons], backward=_sum(backwards))

    def explain(self) -> str:
        """What Step.explain() says, of the forward and of each backward."""
        reports = [super().explain(), *(f"runs eagerly: {reason}" for reason in self._reasons)]
        reports += [f"{backward.label}:\n{backward.explain()}" for backward in self._backwards()]
        return "\n".join(reports)

    def _backwards(self) -> list[Backward]:
        """The captured backwards, of each variant and each piece of its graph."""
        pieces = (piece for plan in self._plans.values() for piece in plan.pieces)
        return [piece.backward for piece in pieces if piece.backward is not None]

    # -- recording ----------------------------------------------------------------

    @property
    def recorded(self) -> Callable[..., Any]:
        return self._cut_off

    def _cut_off(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function as :meth:`_run_apart` has it, while it is recorded."""
        if self._is_refused:
            return self._run(args, kwargs)
        result, self._made, problem = self._run_apart(*args, **kwargs)
        if problem is not None:
            lib.rote_record_refuse(self.session, b"", b"", *map(c_text, problem))
        return result

    def _run_apart(
        self, casts: list[torch.Tensor], *args: Any, **kwargs: Any
    ) -> tuple[Any, RegionPlan | None, tuple[str, str] | None]:
        """Runs the function with a graph of its own; comes back with its result what the graph has saved. Also: the
        graph, and why it cannot serve other calls, with the remedy."""
        if not torch.is_grad_enabled():
            return self.function(*args, **kwargs), None, None
        inputs = Inputs(casts, args, kwargs)
        state = [tensor for _, tensor in self.state.tensors()]
        tape = _graph.Tape(inputs.places, inputs.tensors, state, _record.unrecorded)
        look = Look(inputs.args, inputs.kwargs, state)
        with tape.hooks(), other_hooks(tape), wrappers() as wrapper:
            result = self.function(*inputs.args, **inputs.kwargs)
        self._writes_state |= look.writes_state()
        if look.changes_arguments():
            raise RuntimeError(
                "rote: a region writes to a list or dict in its arguments, as its first call did not; remedy: return "
                "what it writes, or call release() on the region"
            )
        if (unlike_first := wrapper()) is not None:
            raise RuntimeError(
                f"rote: a region {unlike_first[0]}, as its first call did not; remedy: {unlike_first[1]}"
            )
        leaves, structure = _pytree.tree_flatten(result)
        of_call = look.graph(look.results(result))[0]
        tensors = {id(tensor): tensor for tensor in look.results(result) if tensor.grad_fn in of_call}
        if not tensors:
            return _pytree.tree_unflatten([inputs.original(leaf) for leaf in leaves], structure), None, None
        problem = look.problem(result)
        outputs = list(tensors.values())
        graph = _graph.Graph(outputs, tape, inputs.nodes(), look.begin)
        cut = {key: self._cut(tensor, tape) for key, tensor in tensors.items()}
        places: dict[int, int] = {}
        for place, leaf in enumerate(leaves):
            if id(leaf) in tensors:
                places.setdefault(id(leaf), place)
        left = [cut[id(leaf)] if id(leaf) in cut else inputs.original(leaf) for leaf in leaves]
        made = RegionPlan(graph, tape, inputs, [places[key] for key in tensors], leaves)
        problem = problem or self._problem(graph, tape, writes_to_saved=tape.was_written())
        return (_pytree.tree_unflatten(left, structure), tape.made), made, problem

    def _problem(self, graph: _graph.Graph, tape: _graph.Tape, writes_to_saved: bool) -> tuple[str, str] | None:
        """Why the graph of a forward cannot serve other forwards, with the remedy."""
        if tape.has_other_hooks:
            what = (
                "sets hooks for saved tensors of its own (torch.utils.checkpoint does): they keep tensors of one call"
            )
            return what, _graph.INSIDE
        if graph.goes_outside:
            return OUTSIDE
        if self.is_quiet and any(piece.calls_functions for piece in graph.pieces):
            return "calls a torch.autograd.Function, which may ask for zeros in the place of no gradient", _graph.INSIDE
        if writes_to_saved:
            return "writes to a tensor that it has saved for its backward", "write to a copy"
        if graph.hides:
            what = "returns several results, and writes to a view or calls a C++ library: these hide what they save"
            return what, "return one result"
        return None

    @staticmethod
    def _cut(tensor: torch.Tensor, tape: _graph.Tape) -> torch.Tensor:
        """A result without its graph: the very tensor that the graph has saved, if it has."""
        with _record.unrecorded():
            if isinstance(tensor, DTensor):
                return tensor.detach()
            plain = tensor.data
        return next((made for made in tape.made if type(made) is type(plain) and _graph.is_same(made, plain)), plain)

    def _kind_of_part(self) -> Hashable:
        return self.kind, _autocast()

    def _looks_of(self, args: Any) -> Hashable:
        return super()._looks_of(args[1:])  # casts are known once a call has been looked at


class Backward(Part):
    """The backward of a piece of a region, for one variant of the forward."""

    def __init__(self, forward: Region, piece: _graph.Piece, name: str, options: dict[str, Any]) -> None:
        """``name``: ends with the key of the forward's plan. `rote show` finds one by the other (src/cli/show.rs)."""
        entries = piece.saved.entries.values()
        state = {str(i): entry for i, entry in enumerate(entries) if isinstance(entry, torch.Tensor)}
        super().__init__(_backward, state or None, **options)
        self.label = f"{getattr(forward.function, '__qualname__', forward.name())}.{name}"
        self.is_quiet = forward.is_quiet
        self._piece = piece
        self._of_forward = forward.kind
        self._state_of_forward = forward.state
        self.ran = {}  # what hooks and functions of the user's run is followed

    @property
    def recorded(self) -> Callable[..., Any]:
        return self._without_views

    def _kind_of_part(self) -> Hashable:
        return self.label, self._of_forward

    def _to_take_over(self, other: Part, known: Known, objects: list[Any]) -> Callable[[int], None] | None:
        assert isinstance(other, Backward)
        shown = [other, *(reference() for reference in known.confirmed)]  # to run over equal graphs
        same = any(isinstance(each, Backward) and self._piece.is_of(each._piece) for each in shown)
        return (lambda _: None) if same else None

    def _without_views(self, needs: tuple[bool, ...], tangents: Any, given: Any, made: Any) -> Any:
        """The contributions as tensors for themselves: nobody writes what they are views of."""
        found = self._piece.backward(needs, tangents, given, made)
        with _record.unrecorded():
            return [
                each if each is None or any(each is tangent for tangent in tangents) else _alone(each) for each in found
            ]

    def _run(self, args: Any, kwargs: Any) -> Any:
        return self._piece.backward(*args, **kwargs)

    def beside(self, args: Any) -> Any:
        """What a backward gives that eager has run already, and counts it as verified if it is replayed."""
        found = self.call(args, {})
        self._verified_calls += self._replayed
        return found

    def target(self, number: int) -> str:
        """What a gradient goes to, for people."""
        target = self._piece.targets[number]
        if isinstance(target, torch.Tensor):
            names = {id(tensor): path for path, tensor in self._state_of_forward.tensors()}
            return f"the gradient of {names.get(id(target), 'a parameter')}"
        return f"the gradient of tensor {target} of the arguments" if isinstance(target, int) else "a gradient inside"


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in the same memory that is no view."""
    if isinstance(tensor, DTensor):
        return DTensor(tensor._local_tensor.data, tensor._spec, requires_grad=False)
    return tensor.data


def _code_of(function: Any) -> Any:
    """The code of a function or method; of another callable, itself."""
    return getattr(function, "__code__", function)


def _looks(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Hashable]:
    """How tensors look, with their paths."""
    for path, tensor in tensors:
        if isinstance(tensor, DTensor):
            yield spec_text(tensor._spec)
        yield path, *looks_of(tensor), tensor.device, tensor.requires_grad


def _backward() -> None:
    """Stands for what a backward runs: PyTorch's own code, and what it is seen to call."""


def _is_plain_call() -> bool:
    """Whether the caller neither is recorded nor has set anything that regions look at."""
    plain: bool = _bridge.bridge().is_plain_call()
    return plain and torch._C._functorch.peek_interpreter_stack() is None


def _can_be_cut() -> bool:
    """Whether no transform of torch.func is under way, and hooks for saved tensors are allowed."""
    in_transform = torch._C._functorch.peek_interpreter_stack() is not None
    return not in_transform and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def _is_leaf_among(values: Iterable[Any]) -> bool:
    """Whether one of some values is a leaf that requires grad."""
    return any(isinstance(each, torch.Tensor) and each.requires_grad and each.is_leaf for each in values)


def _has_leaf(args: Any, kwargs: Any) -> bool:
    """Whether an argument is a leaf that requires grad."""
    return _is_leaf_among(tensors_in(args, kwargs))


def _autocast() -> Any:
    """The settings of an autocast that keeps casts of parameters until its context ends; None without one."""
    if not (torch._C._is_any_autocast_enabled() and torch.is_autocast_cache_enabled()):
        return None
    on = [(kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return tuple(on) or None


def _sum(all_: list[Stats]) -> Stats:
    """Counters of several captured functions as one."""
    made: dict[str, Any] = {}
    for each in fields(Stats):
        values = [getattr(stats, each.name) for stats in all_]
        if each.name == "guard_misses":
            made[each.name] = dict(sum(map(Counter, values), Counter()))
        elif each.name == "refusals":
            made[each.name] = list(itertools.chain.from_iterable(values))
        elif each.name not in ("front", "tail", "backward", "regions"):
            made[each.name] = sum(values)
    return Stats(**made)
