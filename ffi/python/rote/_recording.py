"""One call of a captured function that is recorded: names and facts before
the step, results and gradients after it."""

from __future__ import annotations

import contextlib
import functools
import json
import sys
import types
from collections.abc import Iterator, Set
from ctypes import byref, c_int, c_int64, c_uint32
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from . import (
    _array_arguments,
    _carried,
    _code,
    _containers,
    _counters,
    _decisions,
    _executed_code,
    _facts,
    _floats,
    _introspect,
    _late_numbers,
    _memory,
    _metrics,
    _reads,
    _record,
    _results,
    _return_places,
    _returns,
    _schedulers,
    _survey,
    _tails,
    _unread,
    _uses,
    _views,
    _wrappers,
    propagation,
)
from ._bridge import bridge
from ._executed_code import Codes, ExecutedCode
from ._facts import Attribute
from ._frames import is_users_own
from ._naming import Extent, Naming, flatten, modes
from ._native import c_text, check, error, ids, lib, record_no_grad
from ._numbers import (
    ATTRIBUTE,
    DICT_ITEM,
    GRAD_MEMORY,
    GROUP,
    HOST,
    MODE,
    NO_INDEX,
    REACH_MEMORY,
    SIZE,
    STATE,
    STRUCTURE,
    TUPLE_ITEM,
    WORLD,
)
from ._outside import Outside
from ._policy import without_ops
from ._reach import Reach
from ._sources import position_in, sets_generator
from ._specs import local_of, mesh_text, place_of, short_text
from ._told import Told

if TYPE_CHECKING:
    from ._step import Step

# Tensors that a replay can return; what nobody waited for yet, it returns waited for.
_KINDS = (torch.Tensor, DTensor, AsyncCollectiveTensor)
#: Attributes that these have of their own.
_OWN = {DTensor: {"_local_tensor", "_spec"}, AsyncCollectiveTensor: {"elem", "completed"}}


def _attributes(tensor: torch.Tensor) -> str:
    """Names of the Python attributes of a tensor that are not its class's own."""
    return ", ".join(sorted(vars(tensor).keys() - _OWN.get(type(tensor), set())))


def _is_guarded(fact: _facts.Fact, follows_tuples: bool, tuples: set[tuple[int, str]]) -> bool:
    """Whether a fact counts: of a tuple of hyperparameters its items do where they are followed, else the whole."""
    if fact.kind == TUPLE_ITEM:
        return follows_tuples
    whole = fact.kind == DICT_ITEM and fact.guard == STATE and (id(fact.container), fact.key) in tuples
    return not (whole and follows_tuples)


def _put_back(group: dict[str, Any], key: str, value: Any, traced: Any) -> None:
    if group.get(key) is traced:
        group[key] = value


# Lines of a step where it does what a plan may not be able to hold; later ones are not noted.
_MOST_STOPS = 64
# By these, code takes back what it has drawn from a generator of the host's (torch.Generator has `set_state` too), asks
# where it stands, or draws from a copy.
_PUTS_BACK = frozenset({"setstate", "set_state", "bit_generator", "getstate", "get_state"})
_COPIES = frozenset({"copy", "deepcopy", "dumps", "__reduce__"})
# Settings that PyTorch keeps in its Python modules, where code decides by them.
_SETTINGS = {
    "torch.__future__": ("_overwrite_module_params_on_conversion", "_swap_module_params_on_conversion"),
    "torch.backends.mha": ("_is_fastpath_enabled",),
    "torch.backends.opt_einsum": ("enabled", "strategy"),
    "torch.distributed.tensor._redistribute": (
        "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION",
        "_FORCE_MIN_COST_REDISTRIBUTION_PLAN",
    ),
    "torch.distributed.tensor.experimental._context_parallel._attention": ("_cp_options", "_dispatch_mode"),
    "torch.nn.attention._registry": ("_FLASH_ATTENTION_ACTIVE",),
    "torch.nn.utils.parametrize": ("_cache_enabled",),
    "torch.utils.checkpoint": ("_checkpoint_debug_enabled", "_enable_checkpoint_early_stop"),
}


def _switches() -> Iterator[_facts.Fact]:
    """What a step finds set in PyTorch and DTensor."""
    for module, names in _SETTINGS.items():
        own = vars(sys.modules[module]) if module in sys.modules else {}
        for name in names:
            if name in own:
                yield _facts.Fact(DICT_ITEM, own, name, MODE, f"{module}.{name}", _facts.describe(own[name]))
    yield from _dtensor_switches()


class MoreStateError(Exception):
    """There is more in the state than was known when a recording began."""


class _Entered:
    """What the calling thread has entered; every thread has a list of its own."""

    @property
    def meshes(self) -> str:
        """The meshes of ``with mesh:``, outer ones first."""
        stack = getattr(getattr(device_mesh, "_mesh_resources", None), "mesh_stack", ())
        return "; ".join(map(mesh_text, stack)) if stack else ""


_ENTERED = _Entered()


def _dtensor_switches() -> Iterator[_facts.Fact]:
    """What context managers of DTensor set (the current mesh, the handlers of ``loss_parallel``), and how many rules
    of ops are registered."""

    def count(container: Any, subject: str) -> _facts.Fact:
        return _facts.Fact(SIZE, container, None, MODE, f"len({subject})", str(len(container)))

    entered = _facts.describe(_ENTERED.meshes)
    yield _facts.Fact(ATTRIBUTE, _ENTERED, "meshes", MODE, "current meshes", entered)
    chooser = _facts.describe(propagation.CHOOSER.name)
    yield _facts.Fact(ATTRIBUTE, propagation.CHOOSER, "name", MODE, "who chooses placements", chooser)
    dispatcher = DTensor._op_dispatcher
    yield count(dispatcher._custom_op_handlers, "handlers of DTensor")
    for name in ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs"):
        rules = getattr(dispatcher.sharding_propagator, name, None)
        if rules is not None:
            yield count(rules, f"DTensor's {name}")


def _shared_memory(of_gradients: bool) -> Iterator[_facts.Fact]:
    """Which memory gradients, and tensors that are no state, have in common with others."""
    gradients = [(GRAD_MEMORY, "gradients")] if of_gradients else []
    for kind, whose in (*gradients, (REACH_MEMORY, "tensors in reach")):
        yield _facts.Fact(kind, None, None, STATE, f"memory of {whose}", "")


class Recording(Naming):
    """One call that is recorded."""

    def __init__(self, step: Step, args: Any, kwargs: Any, known: _survey.Survey | None = None) -> None:
        """``known``: what the last recording has found in reach, to be taken over if its guards hold."""
        super().__init__(step.session, list(step.state.tensors()), args, kwargs, is_region=step.is_region)
        self._step = step
        self._containers: list[list[Any]] = []  # in the arguments, before the step and after it
        self._watch = _record.Watch(self.session, self.specs)
        self._flags = _wrappers.Flags([], [])
        self._settled = 0
        self._tape = _floats.Tape(self.session, frozenset(), self._watch.refuse)
        self._follows_arguments = False  # floats among them
        self.arrays = self._arrays()
        """Those among the arguments."""
        self._late_numbers = _late_numbers.Numbers(self._watch.refuse)
        self._readable: dict[int, str] = {}
        self._result: Any = None
        # Reads of floats that are to be found in the result or in attributes, by identity; and whether they have to be.
        self._floats_read: dict[int, tuple[_returns.Read, bool]] = {}
        self._replaced: list[tuple[dict[str, Any], str, Any, Any]] = []  # group, key, value, what stands for it
        self._grad_specs: list[tuple[str, Any, bool]] = []
        self.unread = _unread.Watched([], [], [])
        self._watched: list[torch.optim.Optimizer] = []  # whose dicts the step must not read
        self.executed = ExecutedCode()
        self._operands: list[_decisions.Operand] = []
        self._survey = known or _survey.Survey(step)
        self._sees_code = step.ran is not None  # notes which code the step runs
        self._reads = _reads.Reads()
        self.hidden_reads = False
        self.decides_otherwise = False  # what the step asks about numbers may be about others than at the begin
        """Whether the step has got at attributes of its optimizers without naming them."""
        self.unproven_code = False
        """Whether hyperparameters are not followed because of what a function in reach may do with them."""
        self._kept: list[tuple[_facts.Attribute, Any]] = []  # attributes that the step has set, and nodes of the values
        self._put: list[tuple[_carried.Place, Any]] = []  # where the step has put tensors that later calls take
        self._candidates = _carried.Candidates((), {})
        self._used: list[tuple[str, torch.optim.Optimizer]] = []  # that are not in the state
        self._contents: dict[str, Any] = {}  # of what places hold
        self._known_before = False  # what a place holds was in reach before the place was known as one
        self.schedulers = _schedulers.none()
        self.counters = _counters.Counters([], {}, [])
        self.stops: list[_tails.Stop] = []
        """Where the captured function has done what a plan may not be able to hold, in order."""
        # The same by lines and columns: what was written until then, and how many ops had run.
        self._stops: dict[tuple[int, int], tuple[list[int], list[Any], int]] = {}
        autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        self._casts_outlive_the_call = autocast and torch.is_autocast_cache_enabled()

    def refuse(self, op: str, reason: str, remedy: str) -> None:
        self._watch.refuse(op, reason, remedy)

    @property
    def is_refused(self) -> bool:
        """Whether it has been refused so far."""
        return self._watch.was_refused

    def prepare(self) -> None:
        """Names tensors, collects facts, and tells the library that the step is about to run."""
        structure = self._open_arguments()
        resumed = self._resume()
        self.name_all()
        self._watch.keeps_prints = self._step.keeps_prints
        self._watch.outside = Outside(self.with_grad, self.refuse, self._watch.used_up)
        extents = self.extents()
        self.check_storages(extents)
        self.arrays.in_memory((begin, end) for begin, end, *_ in extents)
        given = _containers.all_of((self.args, self.kwargs))
        if not resumed:
            self._guard_call(structure)
            self._check_supported()
            self._survey.make(self.tensors, self.leaves, given.values(), self._watch.refuse, self._guard)
            self._find_modules()
        if not self._step.is_region:
            self._candidates = _carried.Candidates(self._survey.facts, self._survey.walk.class_dicts)
        self._contents = self._step.unread.carried.contents(self.kwargs)
        self._follow_reducers(self._survey.walk.reducers)
        follows = self._follow_numbers(given.keys(), resumed)
        self._follow_arguments()
        self._watch.arrays = self.arrays
        # PyTorch's optimizers take the tuples in their groups apart; what other code does with these is not followed.
        follows_tuples = follows and not self._tape.proven
        if not resumed:
            facts = self.counters.guarded(self._survey.facts)
            tuples = {(id(fact.container), fact.key[0]) for fact in facts if fact.kind == TUPLE_ITEM}
            for fact in facts:
                fact.hyperparameter = fact.hyperparameter and follows
            self._facts([fact for fact in facts if _is_guarded(fact, follows_tuples, tuples)])
            if self._step.float_arguments is not None:
                self._facts([*self._step.float_arguments.facts(self._follows_arguments)])
            self._check_reach(extents)
            self._step.went_no_further(self._survey.walk.stopped)
            shared = _shared_memory(of_gradients=not self._step.is_region)
            self._facts([*_switches(), *shared, *self._functions_of_optimizers()])
        self._check_reached()
        self._watch_reach(given.keys())
        check(lib.rote_record_ready(self.session))
        self._sees_code = self._sees_code and not self._is_first()
        if follows:
            self._replace_numbers(follows_tuples)

    def _find_modules(self) -> None:
        """Takes modules in reach into the state if no state was given. Raises :class:`MoreStateError` if there are
        others than before."""
        step = self._step
        if step.given_state is None and step.found.add_parts(self._survey.walk.modules_beyond(step.state.parts())):
            raise MoreStateError

    def _follow_reducers(self, reducers: _wrappers.Reducers) -> None:
        """Says what modules that reduce gradients in buckets do in C++, and in every step."""
        self._watch.internal = _wrappers.internal_code(reducers)
        self._flags = _wrappers.Flags(reducers, self._step.wrapped)
        self._settled = _wrappers.settled(reducers)

    def _open_arguments(self) -> str:
        """Finds the leaves of the arguments; the structure as text."""
        structure = self.name_leaves()
        self._before = self._shape_of_arguments()
        self._places_before = self._places()
        self._modes_before = modes()
        return structure

    @property
    def survey(self) -> _survey.Survey:
        """What was found in reach."""
        return self._survey

    def _resume(self) -> bool:
        """Whether all that the recording before has guarded still holds, and nothing has to be guarded again."""
        if self._survey.number is None:
            return False
        resumed = c_int()
        if self._survey.is_up_to_date():
            check(lib.rote_record_resume(self.session, self._survey.number, byref(resumed)))
        if not resumed.value:
            self._survey.forget()
            self._survey = _survey.Survey(self._step)
        return bool(resumed.value)

    def _is_first(self) -> bool:
        """Whether a later recording confirms this one, which then sees for both which code runs."""
        first = c_int()
        check(lib.rote_record_is_first(self.session, byref(first)))
        return bool(first.value) and self._step.knows_code

    def _guard_call(self, structure: str) -> None:
        """Guards the structure of the arguments, the modes, and how many ranks there are."""
        self._guard(STRUCTURE, "args structure", structure)
        for subject, text in self._modes_before:
            self._guard(MODE, subject, text)
        self._guard(WORLD, "world size", str(dist.get_world_size() if dist.is_initialized() else 1))

    def _follow_numbers(self, given: Set[int], resumed: bool) -> bool:
        """Follows counters, hyperparameters and schedulers. Whether hyperparameters can be followed. ``given``: the
        containers in the arguments; ``resumed``: whether nothing has changed since the last recording."""
        survey, step = self._survey, self._step
        walk, facts = survey.walk, survey.facts
        changed = [] if resumed else step.unread.changed(facts)
        # The dict of an object's attributes may be another object's too, or be reached as itself.
        several = walk.seen | walk.shared_dicts
        shared = [each for each in (*walk.left, *changed) if id(_introspect.own(each.holder)) in several]
        self.unread = _unread.Watched(walk.left, changed, walk.functions, shared, walk.reads_unseen)
        self.counters = _counters.Counters(facts, walk.holders, walk.functions)
        if step.ran is not None and not walk.stopped:
            late = [scheduler for _, scheduler in walk.schedulers]
            self.counters.prove(walk.functions, late, walk.fetched | step.read_counters, step.decisions)
        if step.decisions is not None and step.decisions.depend:
            self.decides_otherwise = bool(walk.stopped) or step.decisions.may_be_others(walk.functions)
            self._operands = step.decisions.operands(*step.given(self.args, self.kwargs))
        self._readable = _uses.readable(step.state.optimizers, self.tensors, walk.functions)
        self._watch.number_in = self._number_in
        self._watch.followed = _floats.plain_of
        self._watch.more.append(self._late_numbers.patches)
        self._watch.read_out = self._read_out
        self._watch.read_metric = lambda *read: self.schedulers.read_metric(*read)
        follows = self._follows(walk, given)
        self.schedulers = _schedulers.Schedulers(
            walk.schedulers,
            bool(self._aliases(walk, given)),
            _record.unrecorded,
            self._put_back,
            step.missed_by_schedulers,
            self._reads,
            self._watch.handler,
            functools.partial(_returns.gives_rates, step=step.function, runner=_record.run.__code__),
        )
        return follows

    def _arrays(self) -> _array_arguments.RecordedArrays:
        """The arrays among the arguments."""
        arrays = self._step.array_arguments
        seen = self.args, self.kwargs
        return _array_arguments.NONE if arrays is None else arrays.recorded(self._step.given(*seen), seen)

    def _follow_arguments(self) -> None:
        """Follows floats among the arguments, if all that the step does with them is seen."""
        floats, functions = self._step.float_arguments, self._survey.walk.functions
        if floats is None or self._step.ran == {}:  # no code is known yet
            return
        proof = floats.proof((leaf for _, leaf in self.leaves), functions)
        if proof is not None and not _uses.seen_by(self.tensors, functions):
            self._follows_arguments = True
            self._tape.proven |= proof.codes
            self._tape.places = proof.places

    def _check_supported(self) -> None:
        """Refuses wrappers of modules that cannot be replayed yet."""
        unsupported = _wrappers.unsupported(self._step.wrapped)
        if unsupported is not None:
            self._watch.refuse("", *unsupported)

    def _check_reach(self, extents: list[Extent]) -> None:
        """Refuses what is in reach and cannot be guarded, and code that cannot be followed."""
        walk = self._survey.walk
        self._check_buffers(walk.buffers, extents)
        for path, why in walk.unguarded:
            self._watch.refuse(
                "",
                f"reaches {path}, which cannot be guarded: {why}",
                f'make it unreachable from the captured function; if it does not matter, pass ignore=["{path}"]',
            )
        for name, path in walk.renamed.items():
            self._refuse_past_methods(f"reaches {path}, which is {name} of tensors under another name")
        for function in walk.functions:
            if is_users_own(function.__code__) and (what := without_ops(function, _code.names(function.__code__))):
                self._refuse_past_methods(f"calls {what} in {function.__qualname__}")
            self._check_generators(function, generators=bool(walk.moving))
            self._check_running(function)

    def _watch_reach(self, given: Set[int]) -> None:
        """Says what a recorded step must be seen to use. ``given``: the containers in the arguments."""
        walk, session = self._survey.walk, self.session
        self._outlives = walk.seen | given
        self._watch.iterators = walk.iterators
        self._watch.arguments = {id(leaf) for _, leaf in self.leaves if isinstance(leaf, torch.Tensor)}
        self._watch.handlers = walk.handlers
        self._watch.moving(walk.moving, walk.advancing)
        for path, storage in walk.places():
            check(lib.rote_record_reach(session, c_text(path), storage))
        check(lib.rote_record_generator(session, 0, -1))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            check(lib.rote_record_generator(session, 1, torch.cuda.current_device()))

    def _replace_numbers(self, follows_tuples: bool) -> None:
        """Puts followed numbers in the places of hyperparameters."""
        for path, optimizer in self._step.state.optimizers:
            for i, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    subject = f"{path}.param_groups[{i}]['{key}']"
                    if _uses.is_number(value):
                        self._replaced.append((group, key, value, _floats.read(self._tape, subject, value)))
                    elif follows_tuples and _uses.is_numbers(value):
                        items = [_floats.read(self._tape, f"{subject}[{j}]", item) for j, item in enumerate(value)]
                        self._replaced.append((group, key, value, tuple(items)))
        for group, key, _, traced in self._replaced:
            group[key] = traced

    def _refuse_past_methods(self, what: str) -> None:
        """Refuses a step that may reach the memory of a tensor by no method that a recording sees."""
        self._watch.refuse(
            "",
            f"{what}: no op shows what it does in memory, and a recording sees it only as a method of a tensor",
            "call the method of the tensor itself (`tensor.tolist()`), or do this outside the captured function",
        )

    def _check_generators(self, function: types.FunctionType, generators: bool) -> None:
        """Refuses code that asks for the seed of a generator, or draws from one of the host's whose state it takes back
        or has copied. ``generators``: some of the host's own classes are in reach."""
        names = _code.names(function.__code__)
        if is_users_own(function.__code__) and (seeding := sets_generator(function.__code__)):
            # The state may be that one already while the step is recorded: then no write shows.
            self.unproven_code = self.unproven_code or self._step.ran is None
            if self._step.ran is not None:
                self._watch.refuse(
                    f"{seeding} in {function.__qualname__}",
                    "sets the state of a random number generator: no op shows that, and a replay would not do it",
                    "seed, and put states back, outside the captured function",
                )
        if "initial_seed" in names.attributes:
            self._watch.refuse(
                f"Generator.initial_seed in {function.__qualname__}",
                "reads the seed of a generator: a later call may find another seed",
                "pass the seed as an argument",
            )
        said = names.attributes.union(names.globals)
        of_modules = _PUTS_BACK if "random" in said else {"setstate", "getstate"}
        copies = sorted(said & (_COPIES | _PUTS_BACK if generators else of_modules))
        if copies:
            self._watch.refuse(
                f"{copies[0]} in {function.__qualname__}",
                "reads, copies or restores the state of a random number generator on the host: a plan cannot hold the "
                "numbers that Python draws",
                "draw with torch, or draw outside the captured function and pass the result as an argument",
            )

    def _check_running(self, function: types.FunctionType) -> None:
        """Refuses code that runs text or code of which the walk cannot tell what it names."""
        for name in sorted(_code.names(function.__code__).runs):
            built_in = _code.builtins_of(function).get(name, types.FunctionType)
            found = function.__globals__.get(name, built_in)
            if found in (eval, exec, types.FunctionType):  # not the script's own function of that name
                self._watch.refuse(
                    f"{name} in {function.__qualname__}",
                    "runs text that is not a constant, or code of unknown origin: the names in that code cannot be "
                    "guarded",
                    "make a function of the code outside the captured function, and call the function",
                )

    def _check_reached(self) -> None:
        """Refuses arguments that the step finds elsewhere too: it may ask which object it was given."""
        for value in self._containers[0]:
            if _containers.is_reached(value):
                carried = (place.value() for place in self._step.unread.carried)
                self._known_before = any(id(value) in _containers.all_of(each) for each in carried)
                self._watch.refuse(
                    "",
                    f"takes a {_introspect.name(type(value))} that the captured function can reach elsewhere too: the "
                    "step may ask whether the argument is that very object",
                    "pass a copy of the object, or do not keep it where the captured function finds it",
                )
                return

    def _check_buffers(self, buffers: list[tuple[int, int, str]], extents: list[Extent]) -> None:
        """Refuses arrays in reach that lie in the memory of tensors: no trace is left of what the step reads or writes
        there between two ops."""
        for begin, end, buffer in buffers:
            path = next((path for first, last, _, path in extents if begin < last and first < end), None)
            if path is not None:
                self._watch.refuse(
                    "",
                    f"reaches {buffer}, which lies in the memory of {path}: a plan cannot hold Python's reads and "
                    "writes of that memory",
                    "use the tensor in place of the array inside the captured function; if the step does not use the "
                    f'array, pass ignore=["{buffer}"]',
                )

    def _follows(self, walk: Reach, given: Set[int]) -> bool:
        """Whether hyperparameters can be followed: all that the step does with them is seen."""
        if not self._readable or self._step.ran == {}:  # no code is known yet
            return False
        optimizers = [optimizer for _, optimizer in self._step.state.optimizers]
        seen = not self._step.hides_reads and all(map(_reads.is_plain, optimizers))
        try:
            proven = _uses.prove(
                self._readable,
                walk.functions,
                _code.names,
                self._aliases(walk, given),
                walk.iterators,
                optimizers,
                seen,
                _returns.code_of(self._step.function),
            )
        except _uses.UnprovenCode:
            self.unproven_code = True
            return False
        except _uses.Unproven:
            return False
        self._tape.proven = proven
        self._watched = optimizers if seen else []
        return True

    def _reads_optimizer(self, optimizer: Any, name: str) -> None:
        if name in _unread.BY_ANOTHER_NAME and not _uses.is_of_optimizers(sys._getframe(2).f_code):
            self.hidden_reads = True

    def _uses_optimizer(self, path: str, optimizer: Any, name: str) -> None:
        if name == "step" and not any(optimizer is each for _, each in self._used):
            self._used.append((path or "optimizer", optimizer))

    @staticmethod
    def _aliases(walk: Reach, given: Set[int]) -> list[str]:
        """Where the step holds groups of optimizers by other names than theirs."""
        aliases = [path for path, _ in walk.aliases if _uses.is_alias(path)]
        return [*aliases, "an argument"] if given & walk.watched else aliases

    def _number_in(self, tensor: torch.Tensor, frame: types.FrameType) -> float | None:
        """The number in a tensor that an optimizer reads, if a replay can compute what follows from it."""
        optimizer = _uses.reader(frame)
        if optimizer is None:
            return None
        why = self._readable.get(id(optimizer), "the optimizer is not in the state")
        if not why:
            in_tensor = _floats.in_tensor(self._tape, tensor) if type(tensor) is torch.Tensor else None
            found = self._late_numbers.read(tensor) if in_tensor is None else in_tensor
            if found is not None:
                return found
            why = "it must be one f32 or f64 in a plain tensor of its own, which the step changes by simple ops only"
        path = next((path for path, named in self.tensors if named is tensor), "a number")
        self._watch.refuse(
            "Tensor.item",
            f"{type(optimizer).__qualname__} reads {path} on the host, and Rote cannot follow the number: {why}",
            "give the optimizer plain parameters and numbers, or have it compute with its counters as tensors "
            "(fused=True, if it has that)",
        )
        return None

    def _functions_of_optimizers(self) -> Iterator[_facts.Fact]:
        """Functions that PyTorch's optimizers call by name: what these do with step counters is known."""
        readable = [each for _, each in self._step.state.optimizers if not self._readable[id(each)]]
        functions = [*_uses.trusted_functions(readable)]
        if functions:
            functions.append(("torch", vars(torch), "as_tensor"))
        for module, names, name in functions:
            text = _facts.describe(names[name])
            yield _facts.Fact(DICT_ITEM, names, name, HOST, f"{module}.{name}", text)

    def _read_out(self, tensor: torch.Tensor, frame: types.FrameType, by_float: bool) -> Any:
        """What stands for a number that the step only returns; None if it may do something else with it. ``by_float``:
        ``float()`` has asked for it, and gets a float of any tensor."""
        source = _returns.source_of(tensor)
        how = "" if source is None else _returns.how_returned(frame, self._step.function, _record.run.__code__)
        if source is not None and source.is_floating_point() and not (how or by_float):
            how = _returns.AS_IT_IS if self._goes_into_attribute(frame) else ""
        if source is None or not how or (how == _returns.AS_FLOAT and source.is_complex()):
            return None
        if how == _returns.AS_IT_IS and by_float:  # `.item` is another function's name
            return None
        kept = source.detach().clone()
        if how == _returns.AS_FLOAT and not kept.is_floating_point():
            if not by_float:
                return None
            kept = kept.to(torch.float64)
        read = _returns.Read(kept, _record.unrecorded_item(kept))
        if type(read.value) is not float:
            return read
        self._floats_read[id(read.value)] = read, how == _returns.AS_FLOAT
        return read.value

    def _goes_into_attribute(self, frame: types.FrameType) -> bool:
        """Whether the number that a frame reads now goes into an attribute of which the step does not ask for it."""
        attribute = None if self._step.is_region else _return_places.attribute_set(frame)
        return attribute is not None and self.unread.takes_numbers(*attribute)

    def _with_numbers(self, result: Any) -> tuple[Any, Any]:
        """The result. And again, in other lists and dicts where numbers of tensors are in them: with reads of tensors,
        which ops make of them, in the places of hyperparameters that the step returns."""
        return result, _returns.replaced(result, lambda part: _floats.in_result(part) or _returns.another(part))

    def _with_reads(self, result: Any) -> Any:
        """The result with plain floats. Refuses a step that does not return what it has read to return it."""
        result, found = _floats.returned(result), set()

        def note(part: Any) -> Any:
            found.add(id(part))
            return part

        _returns.replaced(result, note)
        if any(must and place not in found for place, (_, must) in self._floats_read.items()):
            self._watch.refuse(
                "Tensor.item",
                "reads a number to return it as a float, and does not return it",
                "return the tensor and read it outside the captured function",
            )
        return result

    def _guard(self, kind: int, subject: str, text: str) -> None:
        self._survey.guards.append((kind, subject, text))
        check(lib.rote_record_guard(self.session, kind, c_text(subject), c_text(text)))

    def _shape_of_arguments(self) -> list[Any]:
        leaves: list[tuple[str, Any]] = []
        containers: list[Any] = []
        text = "".join(
            flatten(path, value, leaves, containers=containers)
            for path, value in (("args", self.args), ("kwargs", self.kwargs))
        )
        facts = [
            (path, id(leaf), leaf.requires_grad, [(name, id(item)) for name, item in vars(leaf).items()])
            if isinstance(leaf, torch.Tensor)
            else (path, id(leaf))
            for path, leaf in leaves
        ]
        self._containers.append(containers)  # which keeps their addresses theirs
        return [text, [(id(each), id(type(each))) for each in containers], *facts]

    def _places(self) -> list[tuple[str, Any]]:
        """Where each tensor that exists before the step lies, and how it looks at its memory."""
        tensors = [(path, leaf) for path, leaf in self.leaves if isinstance(leaf, torch.Tensor)]
        return [(path, place_of(local_of(tensor))) for path, tensor in (*self.tensors, *tensors)]

    def _check_left(self) -> None:
        """Refuses a step that leaves its arguments, its state or global modes changed."""
        for (path, before), (_, after) in zip(self._places_before, self._places(), strict=True):
            if before != after:
                self._watch.refuse(
                    "",
                    f"leaves {path} in other memory, or with another shape, strides or dtype: a replay would not "
                    "change these",
                    "write to the tensor in place (copy_), use out= tensors of the result's shape, and assign .data "
                    "outside the captured function",
                )
        if self._shape_of_arguments() != self._before:
            self._watch.refuse(
                "",
                "changes the lists, dicts, attributes or requires_grad of its arguments: a replay would not change "
                "these",
                "change a copy inside the captured function, or change the arguments outside of it",
            )
        self._containers.clear()
        for (subject, before), (_, after) in zip(self._modes_before, modes(), strict=True):
            if before != after:
                self._watch.refuse(
                    "",
                    f"leaves {subject} at {after}; it was {before} before: a replay would not change it",
                    f"change {subject} outside the captured function, or inside it with a context manager",
                )

    def _facts(self, facts: list[_facts.Fact]) -> None:
        if not facts:
            return
        self._survey.told += facts
        Told(facts).tell(self.session)

    @property
    def not_told(self) -> str:
        """What a stored plan cannot say of the step; empty if there is nothing."""
        return self._survey.walk.not_told

    def known(self) -> set[int]:
        """What the step has in reach, by id."""
        return self._survey.walk.seen

    def run(self, seen: _record.Seen | None = None) -> Any:
        """Runs the step under observation. ``seen`` is called with every op that was recorded."""
        args, kwargs = self._arguments()
        call = functools.partial(self._step.recorded, *args, **kwargs)
        del args, kwargs
        self._watch.gradients = [(path, tensor, grad) for path, tensor, grad in self.grads if grad is not None]
        self._watch.at_stop = self._stop
        try:
            others = self._survey.walk.optimizers_beyond(self._step.state.parts())
            for optimizer in self._watched:
                self._reads.watch(optimizer, self._reads_optimizer)
            for path, optimizer in others:
                self._reads.watch(optimizer, functools.partial(self._uses_optimizer, path))
            self.unread.watch(self._reads)
            self.schedulers.watch()
            original = None
            with self.executed if self._sees_code else contextlib.nullcontext():
                original, result = _record.run(self.session, self._watch, call, self._with_numbers, seen)
                self._result = self._with_reads(result)
                del result
            self._note_stops()
            self.unread.check(self._gives)
            self._step.unread.note(self._survey.facts)
            if self.schedulers.lost_metric():
                self._watch.refuse(
                    "Tensor.item",
                    "reads a number for a scheduler, and the scheduler does not get the number",
                    "pass the tensor itself: scheduler.step(loss)",
                )
        finally:
            del call  # with the floats among the arguments, which would have to be sought
            self.close()
        self.decides_otherwise |= any(each.has_changed() for each in self._operands)  # now that nothing is watched
        return _returns.put_back(original, _returns.plain(self._result))

    def _arguments(self) -> tuple[Any, Any]:
        """The arguments of the call, with floats that are followed."""
        args, kwargs = self._step.given(self.args, self.kwargs)
        floats = self._step.float_arguments
        if floats is None or not self._follows_arguments:
            return args, kwargs
        traced = {name: _floats.argument(self._tape, path, value) for name, path, value in floats.present()}
        return floats.replaced(args, kwargs, traced)

    def _stop(self) -> None:
        """Notes where the captured function is now, the first time that it is there."""
        frame: types.FrameType | None = sys._getframe(1)
        code = _returns.code_of(self._step.function)
        while frame is not None and frame.f_code is not code:
            frame = frame.f_back
        if frame is None or len(self._stops) >= _MOST_STOPS:
            return
        line, _, column, _ = position_in(frame)
        if line is not None and column is not None and (line, column) not in self._stops:
            self._stops[line, column] = *self._written(), sum(bridge().counts())

    def _written(self) -> tuple[list[int], list[torch.Tensor | None]]:
        """How often each tensor was written, and the gradients."""
        with torch._C.DisableTorchFunctionSubclass():  # of classes of the script's, which may print
            versions = [_memory.version_of(tensor) for tensor, _, _ in self.versions]
            return versions, [tensor.grad for _, tensor, _ in self.grads]

    def _note_stops(self) -> None:
        """Notes what the step has done since its stops."""
        every = sum(bridge().counts())
        now = self._written()
        for at, (versions, gradients, ops) in self._stops.items():
            replaced = (two is not None and one is not two for one, two in zip(gradients, now[1], strict=True))
            writes = versions != now[0] or any(replaced)
            self.stops.append(_tails.Stop(at, writes, ops, every - ops))
        self._stops.clear()

    def _gives(self, value: Any) -> bool:
        """Whether a plan can set an attribute to a value."""
        return not self._step.is_region and _results.can_give(value, self._outlives)

    def unfollowed(self) -> Codes | None:
        """Code that the call has run and that the walk before it has not followed; None where not all was seen."""
        if not self._sees_code:
            return {}
        codes = self.executed.codes
        return None if codes is None else _executed_code.missing(codes, self._survey.walk.functions)

    def carries_more(self) -> bool:
        """Whether the next recording will take other values from one call to the next than this one has, or knows more
        tensors of the state."""
        unread = self._step.unread
        replaced = unread.carried.replaced(self._candidates, self._step.state.of_optimizers())
        met = self._met()
        used = {id(tensor) for _, tensor in met}
        moved = [
            (place, any(id(tensor) in used for tensor in _carried.tensors_in(before)) or self._reads_of(place, origin))
            for place, origin, before in (*self._candidates.moved(), *replaced)
        ]
        gone = unread.carried.beyond(self._survey.walk.met)
        unread.carried.drop(gone)
        now = unread.carried.contents(self.kwargs) if self._contents else {}
        changed = [each for each in unread.carried if now.get(each.path) != self._contents.get(each.path)]
        unread.carried.ban(changed)
        added = unread.carried.add(place for place, is_read in moved if is_read)
        unknown = self.is_refused and any(is_read is None for _, is_read in moved)
        found = not added and (self._step.found.add_parts(self._used) or self._step.found.add(met))
        more = added or bool(gone or changed) or unknown or found or self._known_before
        return more and unread.carried.may_drop()

    def _met(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors in reach without a name that the step has used, or returns, with their paths."""
        met = lib.rote_record_met(self.session)
        if met is None:
            raise RuntimeError(f"rote: {error()}")
        return self._survey.walk.tensors_in_reach(set(map(int, met.split())), self._older_results())

    def _older_results(self) -> set[int]:
        """The identities of tensors that the step returns, or puts into places, and that have no name: of these, those
        in reach exist before the step."""
        values = [self._result, *map(_unread.value_of, self.unread.kept)]
        values += [place.value() for place in self._step.unread.carried.moved(self.kwargs)]
        named = {id(tensor) for _, tensor in self._named()} | {id(before) for _, _, before in self.grads}
        return {id(tensor) for value in values for tensor in _carried.tensors_in(value)} - named

    def _reads_of(self, place: _carried.Place, origin: Attribute | None) -> bool | None:
        """Whether the step reads a place before it puts something there, where that is seen."""
        if origin is None or origin.key != place.key or _introspect.own(origin.holder) is not place.container:
            return True
        return self._step.unread.is_read(origin)

    def refuse_code(self, codes: Codes) -> None:
        """Refuses a step that runs other code in each call."""
        names = sorted(code.co_qualname for code in codes.values())
        self._watch.refuse(
            "",
            f"runs code that no earlier call has run, at every call: {', '.join(names[:3]) or 'unseen'}",
            "make functions outside the step (no exec, no dataclasses or named tuples made inside)",
        )

    def close(self) -> None:
        """Puts the optimizers' own floats back."""
        self._reads.close()
        while self._replaced:
            _put_back(*self._replaced.pop())
        self._tape.close()
        self._stops.clear()
        self._watch.follows_nothing()  # nothing refers to this recording any more

    def _put_back(self, optimizer: torch.optim.Optimizer) -> None:
        """Puts the numbers back that a recording has replaced in an optimizer's groups."""
        groups = set(map(id, optimizer.param_groups))
        for group, key, value, traced in self._replaced:
            if id(group) in groups:
                _put_back(group, key, value, traced)

    def has_settled(self) -> bool:
        """Whether the step has done what a wrapper does once: no later step does so."""
        return _wrappers.settled(self._survey.walk.reducers) != self._settled

    def waits(self, outcome: dict[str, Any]) -> _survey.Survey | None:
        """What the next recording takes over if this one waits for it."""
        return self._survey.wait(outcome.get("candidate"))

    def as_survey(self) -> _survey.Survey | None:
        """Ends the recording of a step that has run already; what the next one takes over."""
        number = c_uint32()
        check(lib.rote_record_survey(self.session, byref(number)))
        return self._survey.wait(None if number.value == NO_INDEX else number.value)

    def forget(self) -> None:
        """Lets go of what was seen: nothing but weak references may hold it, and cycles here are collected late."""
        self._watch.forget()
        if self._survey.number is None:
            self._survey.forget()
        self._kept, self._put, self.with_grad = [], [], []
        self._candidates.forget()
        self._contents, self._used, self._operands = {}, [], []
        self.unread.forget()
        self.schedulers.forget()

    def finish(self) -> dict[str, Any]:
        """Hands results and gradients to the library and ends the recording."""
        structure, output_specs, views, classes = self._leave()
        late = self._late()
        with self.schedulers.hidden(), self._flags.put_back():
            text = lib.rote_record_finish(self.session, _results.to_json(structure, late, views))
        if text is None:
            raise RuntimeError(f"rote: {error()}")
        outcome: dict[str, Any] = json.loads(text)
        if "variant" in outcome:
            self._step.results[outcome["variant"]] = _results.Results(
                structure,
                output_specs,
                self._grad_specs,
                self.own(),
                views,
                self.after(late),
                classes,
                self._puts(),
                dict(self.schedulers.found),
            )
        return outcome

    def _late(self) -> list[_results.Late]:
        """What a replay does when it has ended: it sets attributes, counts, sets flags of wrappers, and calls
        schedulers."""
        counted = [_results.Late(counter.path, number=number) for counter, number in self.counters.counted()]
        calls = self.schedulers.calls
        set_ = [_results.Late(path, number=value) for path, value in self._flags.changed()]
        kept = [_results.Late(path, value=node) for path, node in self._left()]
        called = [_results.Late(call.path, metric=call.metric and call.metric.node) for call in calls]
        return [*kept, *counted, *set_, *called]

    def _left(self) -> list[tuple[str, Any]]:
        """The places where the step has left values, by their paths, and the nodes of the values."""
        kept, put = self._kept, self._put
        return [*((each.path, node) for each, node in kept), *((each.path, node) for each, node in put)]

    def after(self, late: list[_results.Late]) -> list[_results.Act]:
        """The same as functions, but for attributes. Raises ``KeyError`` for what is not in reach."""
        counters = {counter.path: counter for counter in self.counters.found}
        schedulers = {(path, _metrics.takes_metric(each)): each for path, each in self.schedulers.found}
        flags = {flag.path: flag for flag in self._flags.all}

        def act(each: _results.Late) -> _results.Act:
            if each.number is None:
                return schedulers[each.path, each.metric is not None].step, each.metric
            if isinstance(each.number, bool):
                return functools.partial(flags[each.path].put, each.number), None
            return functools.partial(counters[each.path].add, each.number), None

        return [act(each) for each in late if each.value is None]

    def _puts(self) -> list[_results.Put]:
        """The attributes that a replay sets."""
        kept = [(functools.partial(setattr, each.holder, each.key), node) for each, node in self._kept]
        return [*kept, *((each.put, node) for each, node in self._put)]

    def compare(self, variant: int) -> dict[str, Any] | None:
        """Ends the recording without a plan: the first instruction that the plan of a variant has otherwise."""
        structure, _, views, _ = self._leave()
        late = self._late()
        self.counters.put_back()
        with self._flags.put_back():
            text = lib.rote_record_compare(self.session, variant, _results.to_json(structure, late, views))
        return None if text is None else json.loads(text)

    def _leave(self) -> tuple[Any, list[tuple[Any, bool]], list[_views.Made], _results.Classes]:
        """Hands results and gradients to the library: the structure of the result, of each tensor in it the
        spec and whether it requires grad, what they are views of, and the classes in the result."""
        session = self.session
        self._check_left()
        left = _wrappers.left(self._step.wrapped)
        if left is not None:
            self._watch.refuse("", *left)
        self._watch.check_raising()
        self._watch.check_others()
        self._count_writes()
        names: dict[int, Any] = {}
        for path, tensor in self._named():
            for node, part in _views.parts({"b": path}, tensor):
                names.setdefault(id(part), node)
        old = {id(before) for _, _, before in self.grads}
        for path, tensor, before in self.grads:
            if tensor.grad is not None and tensor.grad is not before:
                if id(tensor.grad) in names or id(tensor.grad) in old:
                    self._watch.refuse(
                        "",
                        f"sets {path}.grad to a tensor that is already an argument, state or another gradient",
                        f"give each tensor a gradient of its own: {path}.grad = gradient.clone()",
                    )
                for node, part in _views.parts({"b": f"{path}.grad"}, tensor.grad):
                    names.setdefault(id(part), node)
                own = _attributes(tensor.grad)
                if own:
                    self._watch.refuse(
                        "",
                        f"sets {path}.grad to a tensor with Python attributes ({own}), which a plan cannot give back",
                        "keep these values elsewhere, or set the gradient outside the captured function",
                    )
            if tensor.grad is not None and tensor.grad.requires_grad:
                self._watch.refuse(
                    "",
                    f"leaves a gradient in {path}.grad that carries an autograd graph of its own",
                    "change gradients under torch.no_grad(), and call backward() without create_graph=True",
                )
        outputs: list[torch.Tensor] = []
        structure, classes = self._structure(names, outputs)
        self.schedulers.hand_out(outputs)
        output_specs = []
        given = len(outputs)
        views = self._note_views(outputs)
        attributes = {place: path for path, node in self._left() for place in _results.outputs_in(node)}
        returned = _results.outputs_in(structure)
        for i, tensor in enumerate(outputs):
            gives = f"puts into {attributes[i]}" if i in attributes and i not in returned else "returns"
            if type(tensor) not in _KINDS:
                self._watch.refuse(
                    "",
                    f"{gives} a {'view of a ' if i >= given else ''}{type(tensor).__qualname__}, a subclass of Tensor "
                    "that a plan cannot give back",
                    "return a plain tensor: tensor.as_subclass(torch.Tensor)",
                )
            own = _attributes(tensor)
            if own:
                self._watch.refuse(
                    "",
                    f"{gives} a tensor with Python attributes ({own}), which a plan cannot give back",
                    "return these values beside the tensor",
                )
            requires_grad = tensor.requires_grad and not _views.view_of(tensor).follows
            if requires_grad and tensor.grad_fn is None:
                self._watch.refuse(
                    "",
                    f"{gives} a tensor ({short_text(tensor)}) that the step has made and that requires grad",
                    "detach the tensor, and call requires_grad_() outside of the captured function",
                )
            elif requires_grad and not self._watch.used_up(tensor.grad_fn):
                self._watch.refuse(
                    "",
                    f"{gives} a tensor ({short_text(tensor)}) with an autograd graph that no backward pass in the "
                    "step has used up: a replay has no graph",
                    "call backward() inside the captured function, return tensor.detach(), or capture the step "
                    "under torch.no_grad()",
                )
            output_specs.append((tensor._spec if isinstance(tensor, DTensor) else None, requires_grad))
            local = local_of(tensor)
            spec = self.specs.of_tensor(tensor)
            check(lib.rote_record_output(session, c_text(f"result[{i}]"), local, spec, requires_grad))
        self._watch.check_moving()
        self._watch.forget()
        for path, tensor, before in self.grads:
            self._finish_grad(path, tensor, before)
        self.grads = []
        outputs.clear()
        self._result = None
        for name in lib.rote_record_groups(session).decode().split("\n"):
            if name:
                self._group(name)
        kept = _record.survivors(session, thorough=self._step.kept_tensors)
        self._step.kept_tensors = kept > 0
        if kept and self._casts_outlive_the_call:
            self._watch.refuse(
                "",
                "runs under a torch.autocast that was entered outside of it: autocast keeps the casts of parameters "
                "until its context ends, and a replay would not use these casts",
                "enter torch.autocast inside the captured function, or pass it cache_enabled=False",
            )
        return structure, output_specs, views, classes

    def _structure(self, names: dict[int, Any], outputs: list[torch.Tensor]) -> tuple[Any, _results.Classes]:
        """The structure of the result, and the classes in it and in what the step keeps in attributes."""
        kept, put = self.unread.kept, self._step.unread.carried.moved(self.kwargs)
        values = [self._result, *map(_unread.value_of, kept), *(place.value() for place in put)]
        try:
            numbers = {place: read for place, (read, _) in self._floats_read.items()}
            whole, classes = _results.encode(tuple(values), names, outputs, self._outlives, numbers)
        except _results.Unsupported as problem:
            self._watch.refuse(
                "",
                f"returns {problem}, which a plan cannot give back",
                "return tensors, numbers, text, and tuples, lists, dicts and dataclasses of these",
            )
            return {"c": None}, {}
        finally:
            self._floats_read.clear()  # which holds tensors
        structure, *nodes = whole["tuple"]
        self._kept = list(zip(kept, nodes, strict=False))
        self._put = list(zip(put, nodes[len(kept) :], strict=True))
        return structure, classes

    def _count_writes(self) -> None:
        """Says how often the step has written each named tensor."""
        times = [
            (
                max(0, _memory.version_of(tensor) - before),
                0 if local_of(tensor) is tensor else max(0, _memory.version_of(local_of(tensor)) - local),
            )
            for tensor, before, local in self.versions
        ]
        self.versions = []
        check(lib.rote_record_written(self.session, ids([a for a, _ in times]), ids([b for _, b in times]), len(times)))

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The caller's tensors with their paths; gradients that the step has not replaced too."""
        yield from self.tensors
        for path, leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                yield path, leaf
        for path, tensor, before in self.grads:
            if before is not None and tensor.grad is before:
                yield f"{path}.grad", before

    def _note_views(self, outputs: list[torch.Tensor]) -> list[_views.Made]:
        """What results are views of; their bases, if nobody else has them, become outputs too."""
        grads = [
            (f"{path}.grad", tensor.grad)
            for path, tensor, before in self.grads
            if tensor.grad is not None and tensor.grad is not before
        ]
        try:
            return _views.note(outputs, grads, self._named)
        except _views.Unknown as problem:
            self._watch.refuse("", problem.what, problem.remedy)
            return []

    def _finish_grad(self, path: str, tensor: torch.Tensor, before: torch.Tensor | None) -> None:
        after = tensor.grad
        if after is before:
            return
        if after is None:
            check(record_no_grad(self.session, c_text(path), None, NO_INDEX))
            self._grad_specs.append((path, None, True))
            return
        if type(after) not in (torch.Tensor, DTensor, AsyncCollectiveTensor):
            self._watch.refuse(
                "",
                f"leaves a gradient of class {type(after).__name__} in {path}.grad: a replay can leave only plain "
                "tensors",
                f"leave a plain tensor: {path}.grad = {path}.grad.as_subclass(torch.Tensor)",
            )
        spec = self.specs.of_tensor(after)
        check(lib.rote_record_grad(self.session, c_text(path), local_of(after), spec))
        self._grad_specs.append((path, after._spec if isinstance(after, DTensor) else None, False))

    def _group(self, name: str) -> None:
        group = vars(dist.distributed_c10d)["_resolve_process_group"](name)
        ranks = dist.get_process_group_ranks(group)
        label = getattr(group, "group_desc", "") or name
        label = label.removeprefix("mesh_") if label != "undefined" else name
        array = (c_int64 * len(ranks))(*ranks)
        check(lib.rote_record_group(self.session, c_text(name), array, len(ranks), c_text(label)))
        if name not in self._survey.groups:
            self._survey.groups.add(name)
            self._facts([_facts.Fact(GROUP, name, None, WORLD, f"group {name}", "")])
