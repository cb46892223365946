"""DTensor's sharding propagation, answered from Rust.

with rote.propagation.install():
    loss = train_step(tokens, labels)  # an op that DTensor has not met yet costs microseconds
print(rote.propagation.stats())

docs/propagation.md says what is answered, and by which policy.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, TypeVar, overload

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _dtensor_spec, _op_schema, placement_types
from torch.distributed.tensor import _sharding_prop as torchs
from torch.distributed.tensor._ops import _math_ops, single_dim_strategy

from . import _own_partials, _own_placements, _own_shards_in_dtensor, _rules
from ._agreement import AGREED
from ._bridge import bridge
from ._decomposed import Decompositions
from ._native import c_uint32, c_void_p, check, error, lib
from ._refuted import Refuted
from ._specs import links_of

Policy = Literal["same", "best"]


@dataclass(frozen=True)
class Stats:
    """What has become of DTensor's questions since `install`. DTensor asks each question once and keeps the answer."""

    answered: int = 0
    """Questions that Rote answered."""
    microseconds: float = 0.0
    """Time that Rote took for all questions, those handed on included."""
    strides: dict[str, int] = field(default_factory=dict)
    """Answers in which the strides of results come from PyTorch's fake tensors, by op: these take longer."""
    decomposed: dict[str, int] = field(default_factory=dict)
    """Answers about ops without a rule, by PyTorch's decomposition, by op."""
    handed_on: dict[tuple[str, str], int] = field(default_factory=dict)
    """Questions that DTensor had to answer itself, by op and reason."""
    refuted: dict[str, int] = field(default_factory=dict)
    """Answers of DTensor's by which an op gives another result than on whole tensors, as Rote's rules say; with policy
    `"same"`. Rote warns of each once."""

    def __str__(self) -> str:
        total = sum(self.handed_on.values())
        asked = self.answered + total
        mean = self.microseconds / asked if asked else 0.0
        lines = [f"{self.answered} of {asked} questions answered, {mean:.1f} us each; {total} handed on to DTensor"]
        lines += [f"  {count:>5}  {op}: {reason}" for (op, reason), count in _most(self.handed_on)]
        if self.strides:
            lines.append(f"{sum(self.strides.values())} answers with strides of PyTorch's fake tensors")
            lines += [f"  {count:>5}  {op}" for op, count in _most(self.strides)]
        if self.decomposed:
            lines.append(f"{sum(self.decomposed.values())} answers by PyTorch's decompositions")
            lines += [f"  {count:>5}  {op}" for op, count in _most(self.decomposed)]
        if self.refuted:
            lines.append(f"{sum(self.refuted.values())} answers of DTensor's that are wrong by Rote's rules")
            lines += [f"  {count:>5}  {what}" for what, count in _most(self.refuted)]
        return "\n".join(lines)


def _most(counts: dict[Any, int]) -> list[tuple[Any, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])


class _Propagators:
    """The library's propagators, which live until they are freed. `in_dtensors_order`: they price redistributions as
    DTensor runs them."""

    def __init__(self, in_dtensors_order: bool = False) -> None:
        self.made: list[int] = []
        self.in_dtensors_order = in_dtensors_order

    def of_mesh(self, mesh: Any) -> int:
        """The address of the propagator of a mesh; 0 if this process is not part of it."""
        coordinate = mesh.get_coordinate()
        if coordinate is None:
            return 0
        links = [number for link in links_of(mesh) for number in link]
        return self.new(mesh, coordinate, (ctypes.c_double * len(links))(*links))

    def without_links(self, mesh: Any) -> int:
        """The address of the propagator of a mesh in which nothing moves."""
        return self.new(mesh, [0] * mesh.ndim, None)

    def new(self, mesh: Any, coordinate: Sequence[int], links: Any) -> int:
        """The address of a new propagator."""
        sizes = ",".join(f"{size}" for size in mesh.shape)
        made = lib.rote_propagator_new(sizes.encode(), (c_uint32 * len(coordinate))(*coordinate), links)
        if made is None:
            raise RuntimeError(f"rote: {error()}")
        self.made.append(made)
        if self.in_dtensors_order:
            check(lib.rote_propagator_in_dtensors_order(made))
        return int(made)

    def free(self) -> None:
        for one in self.made:
            lib.rote_propagator_free(one)
        self.made.clear()

    def __del__(self) -> None:
        self.free()


class _Installed:
    """Rote in the place of `ShardingPropagator.propagate_op_sharding_non_cached`."""

    def __init__(self, policy: Policy, own_rules: dict[OpOverload, _rules.Strategies]) -> None:
        self.policy = policy
        self.propagator = _propagator()
        self.propagators = _Propagators(in_dtensors_order=policy == "best")
        self.keyed: set[OpOverload] = set()
        self.decompositions = decompositions() if policy == "best" else None
        agreed = None if policy == "best" else _agreed()
        self.answers = self.made(agreed, own_rules, self.state)
        # Runs no code of the script's.
        self.judge = self.made(None, own_rules, lambda _: "a strategy of the script's own", False)
        self.refuted = Refuted(self.judge.answer)
        self.before = self.propagator.propagate_op_sharding_non_cached, self.propagator.propagate_op_sharding
        look = self.refuted.look if policy == "same" else None
        self.answer = _answering(self.answers.answer, _own_shards_in_dtensor.replicated(self.before[0]), look)
        self.cached = torchs.LocalLRUCache(self.answer)

    def made(
        self,
        agreed: dict[str, int] | None,
        own_rules: dict[OpOverload, _rules.Strategies],
        state: Callable[[Any], Any],
        own_placements: bool = True,
    ) -> Any:
        """What answers questions: those of the kinds in `agreed`, or all."""
        return _answers(
            own_placements,
            self.propagator,
            DTensor._op_dispatcher._custom_op_handlers,
            self.propagators.of_mesh,
            self.registered,
            agreed,
            own_rules,
            state,
            self.decompositions,
        )

    def put(self) -> None:
        """From now on DTensor asks Rote."""
        self.propagator.propagate_op_sharding_non_cached = self.answer
        self.propagator.propagate_op_sharding = self.cached
        if self.decompositions is not None:
            for op in self.decompositions.of_lists():
                self.key(op)

    def take_away(self) -> None:
        """From now on DTensor answers itself, as before."""
        if self.answers.is_asking():
            raise RuntimeError("rote: a sharding rule cannot uninstall Rote, which is asking for it")
        if self.propagator.propagate_op_sharding_non_cached is not self.answer:
            raise RuntimeError(
                "rote: another program has replaced DTensor's propagation since install(): undo that first"
            )
        self.propagator.propagate_op_sharding_non_cached, self.propagator.propagate_op_sharding = self.before
        for op in self.keyed - _rules.OWN.keys() - _rules.PASSES.keys():
            _rules.cache_as_before(op)

    def free(self) -> None:
        self.answers.close()
        self.judge.close()
        self.propagators.free()

    def key(self, op: OpOverload) -> None:
        """Lets DTensor cache the answers for an op that it knows nothing of by all arguments, and look for tensors in
        lists."""
        if op not in self.keyed and op not in self.propagator.op_to_schema_info:
            self.keyed.add(op)
            _rules.cache_by_all_arguments(op)

    def registered(self, op: Any) -> tuple[tuple[Any, ...], bool]:
        """What is registered for an op with DTensor, and whether all of it comes with PyTorch."""
        found = _registered(self.propagator, op)
        if self.policy == "best" and not any(found):
            self.key(op)
        return found, all(_rules.comes_with_torch(one) for one in found)

    def state(self, schema: Any) -> Any:
        """What the script's own rule says of a schema."""
        return _rules.state(self.propagator, schema)


def decompositions() -> Decompositions:
    """Strategies of ops without a rule. Rote's rules answer for the ops inside, whatever is registered for those."""
    propagator = _propagator()

    def inside(op: Any) -> tuple[tuple[Any, ...], bool]:
        return _registered(propagator, op), True

    within = _answers(False, propagator, {}, _Propagators().without_links, inside, None, {}, None, None)
    return Decompositions(within.answer, propagator)


def _registered(propagator: Any, op: Any) -> tuple[Any, ...]:
    tables = (propagator.op_single_dim_strategy_funcs, propagator.op_strategy_funcs, propagator.op_to_rules)
    return tuple(table.get(op) for table in tables)


def _answers(own_placements: bool, *parts: Any) -> Any:
    """The `Answers` of the bridge, about placements of the script's own too or not."""
    return bridge().Answers(
        _address("rote_propagate"),
        _address("rote_last_error"),
        {
            "DTensorSpec": _dtensor_spec.DTensorSpec,
            "TensorMeta": _dtensor_spec.TensorMeta,
            "Size": torch.Size,
            "OpSchema": _op_schema.OpSchema,
            "OutputSharding": _op_schema.OutputSharding,
            "Replicate": Replicate,
            "Shard": Shard,
            "_StridedShard": placement_types._StridedShard,
            "Partial": Partial,
            "_MaskPartial": placement_types._MaskPartial,
            "_NormPartial": _math_ops._NormPartial,
            "_ShardingPlaceholder": single_dim_strategy._ShardingPlaceholder,
            "own": _own_placements.number_of if own_placements else None,
            "made_own": _own_placements.made,
            "made_own_partial": _own_partials.made,
            "warn_own": _own_placements.warn,
            "passes": _rules.PASSES if own_placements else {},
            "state_passes": lambda schema: _rules.state(_propagator(), schema, passes_alone=True),
        },
        *parts,
    )


def _propagator() -> Any:
    """DTensor's own."""
    return DTensor._op_dispatcher.sharding_propagator


def _agreed() -> dict[str, int]:
    """The kinds of answers that are DTensor's own, by op; none in a version of PyTorch that was not compared."""
    version = ".".join(torch.__version__.split(".")[:2])
    return AGREED.get(version, {})


class _Thread(threading.local):
    dtensor_answers = False


_thread = _Thread()


def _answering(
    ask: Callable[[Any], Any], otherwise: Callable[[Any], Any], look: Callable[[Any, Any], None] | None
) -> Callable[[Any], Any]:
    def propagate_op_sharding_non_cached(op_schema: Any) -> Any:
        if _thread.dtensor_answers:
            # About a part of an op that DTensor decomposes. With other strategies for its parts it may answer for ops
            # that it refuses, and move what these write.
            return otherwise(op_schema)
        answer = ask(op_schema)
        if answer is not None:
            return answer
        _own_placements.go_on()
        _thread.dtensor_answers = True
        try:
            answer = otherwise(op_schema)
        finally:
            _thread.dtensor_answers = False
        if look is not None:
            look(op_schema, answer)
        return answer

    return propagate_op_sharding_non_cached


_alone: tuple[Any, Any, Any] | None = None
"""While placements of the script's own are registered and Rote is not installed: what DTensor asks, and before."""


def _look_for_own_placements() -> None:
    """Keeps DTensor from taking registered placements for PyTorch's, as long as there are some."""
    global _alone
    propagator = _propagator()
    here = _alone is not None and propagator.propagate_op_sharding_non_cached is _alone[0]
    if _own_placements.SHARDINGS and not here and _installed is None:
        before = propagator.propagate_op_sharding_non_cached, propagator.propagate_op_sharding
        asked = _own_shards_in_dtensor.replicated(before[0])
        _alone = asked, *before
        propagator.propagate_op_sharding_non_cached = asked
        propagator.propagate_op_sharding = torchs.LocalLRUCache(asked)
    elif here and _alone is not None and not _own_placements.SHARDINGS:
        _, propagator.propagate_op_sharding_non_cached, propagator.propagate_op_sharding = _alone
        _alone = None


def _address(function: str) -> int:
    return int(ctypes.cast(getattr(lib, function), c_void_p).value or 0)


def _forget() -> None:
    """Empties DTensor's caches of answers, as far as they belong to this thread."""
    _propagator().propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


_installed: _Installed | None = None
_within_steps: _Installed | None = None


class Chooser:
    """Who chooses placements: what captured steps guard."""

    name = "DTensor"


CHOOSER = Chooser()


_changes = 0


def _name_chooser() -> None:
    CHOOSER.name = "Rote" if _installed is not None and _installed.policy == "best" else "DTensor"
    if _installed is not None and (_rules.OWN or _own_placements.KNOWN):
        CHOOSER.name += f" and rules of the script, changed {_changes} times"


def _rules_have_changed() -> None:
    global _changes
    _changes += 1
    _forget()
    _name_chooser()


class _Installation:
    """What `install` returns: a context at whose end Rote is uninstalled."""

    def __init__(self, installed: _Installed) -> None:
        self._made = installed

    def __enter__(self) -> _Installation:
        if _installed is not self._made:
            raise RuntimeError("rote: this installation of propagation has ended: call install() again")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None
    ) -> None:
        if _installed is self._made:
            uninstall()


def install(policy: Policy = "same") -> _Installation:
    """Answers DTensor's sharding propagation from Rust, in this process, until `uninstall()` or the end of the context.

    `policy` is `"same"` or `"best"`. `"same"` answers where Rote's choice is DTensor's own; DTensor answers the rest.
    `"best"` takes Rote's choice of placements wherever it has one. All ranks must use the same policy.

    Raises `RuntimeError` if Rote is installed already.
    """
    global _installed
    if policy not in ("same", "best"):
        raise ValueError(f'rote: policy={policy!r}: expected "same" or "best"')
    if _installed is not None:
        raise RuntimeError(f'rote: propagation is installed already, with policy="{_installed.policy}"')
    _installed = _Installed(policy, _rules.OWN)
    _installed.put()
    _forget()
    _name_chooser()
    return _Installation(_installed)


def uninstall() -> None:
    """Lets DTensor answer again. Does nothing if Rote is not installed."""
    global _installed, _last
    if _installed is not None:
        _installed.take_away()
        _last = stats()
        _forget()
        _installed.free()
        _installed = None
        _look_for_own_placements()
        _name_chooser()


@contextlib.contextmanager
def within_a_step() -> Iterator[None]:
    """Answers with policy "same" what is asked within, if Rote is not installed. DTensor's caches are kept: they hold
    the same answers."""
    global _within_steps
    if _installed is not None:
        yield
        return
    if _within_steps is None:
        _within_steps = _Installed("same", {})
    before = _propagator().propagate_op_sharding_non_cached
    if before is _within_steps.answer:
        yield
        return
    _within_steps.put()
    try:
        yield
    finally:
        if (
            _propagator().propagate_op_sharding_non_cached is _within_steps.answer
        ):  # else the step has put another there
            _within_steps.take_away()
            _look_for_own_placements()


_Function = TypeVar("_Function", bound=_rules.Strategies)


@overload
def register(op: OpOverload, function: None = None, *, replace: bool = False) -> Callable[[_Function], _Function]: ...
@overload
def register(op: OpOverload, function: _Function, *, replace: bool = False) -> _Function: ...


def register(
    op: OpOverload, function: _Function | None = None, *, replace: bool = False
) -> _Function | Callable[[_Function], _Function]:
    """Registers a sharding rule for an op, as a decorator or a call. While Rote is installed, it answers by the rule.

    `function` gets the op's arguments as they are, and a `TensorMeta` (shape, stride, dtype) in the place of each
    tensor. It returns strategies that are right on one mesh dim: lists of the placements of the op's results, then of
    its tensor inputs. `_ShardingPlaceholder(dim)` stands for any shard of `dim`, plain or strided, `Shard(dim)` for a
    plain one. The strategy that replicates everything is added.

    Raises `ValueError` if Rote has a rule for the op, or one was registered, unless `replace` is true.
    """

    def put(function: _Function) -> _Function:
        _rules.put(op, function, replace)
        _rules_have_changed()
        return function

    return put if function is None else put(function)


def unregister(op: OpOverload) -> None:
    """Removes the rule that was registered for an op. Raises `ValueError` if there is none."""
    _rules.remove(op)
    _key_again(op)
    _rules_have_changed()


def _key_again(op: OpOverload) -> None:
    if _installed is not None and op in _installed.keyed:
        _rules.cache_by_all_arguments(op)


def register_sharding(
    cls: type[Shard],
    *,
    indices: _own_placements.Indices,
    parameters: Sequence[str] = (),
    fills: _own_placements.Fills | None = None,
) -> None:
    """Registers a subclass of `Shard`, which splits a tensor dim in another way. Under policy `"best"`, Rote answers
    about tensors that lie so.

    `parameters` are the names of the attributes that tell one placement of the class from another: integers, or tuples
    of integers. `cls(dim, units=(1, 3))` makes a placement, where `units` is such a name. `indices(placement, size,
    ranks)` returns the indices of a dim of this size that each rank holds, in local order, as `range` objects or other
    sequences; it raises `ValueError` where no tensor can lie so. Each index has to be on one rank. `fills` has the ops
    whose rules a shard of the class may fill, or is a function that says so of an op; without, all that fit.

    The class needs `__eq__` and `__hash__` that compare class and parameters, `_split_tensor`, `_to_replicate_tensor`
    and `_local_shard_size_and_offset`. While a class is registered, DTensor redistributes from its shards to others by
    way of `Replicate()`.

    Raises `ValueError` if a class of this name is registered already, `TypeError` if the class lacks a method.
    """
    _own_shards_in_dtensor.check()
    _own_placements.put(cls, indices, parameters, fills)
    _own_shards_in_dtensor.tell()
    _look_for_own_placements()
    _rules_have_changed()


def unregister_sharding(cls: type[Shard]) -> None:
    """Removes what was registered for a subclass of `Shard`. Raises `ValueError` if nothing was."""
    _own_placements.remove(cls)
    _own_shards_in_dtensor.tell()
    _look_for_own_placements()
    _rules_have_changed()


def register_partial(
    cls: type[Partial],
    *,
    reduction: str,
    parameters: Sequence[str] = (),
    passes: _own_partials.Passes | None = None,
    combine: _own_partials.Combine | None = None,
) -> None:
    """Registers a subclass of `Partial`, whose parts combine in another way. Under policy `"best"`, Rote answers about
    tensors that lie so: they pass ops that only move elements, and are reduced before others.

    `reduction` is `"sum"`, `"avg"`, `"max"`, `"min"` or `"product"`: reducing costs as much as this collective.
    `parameters` are the names of the attributes that tell one placement of the class from another: integers, or tuples
    of integers. `cls(base=2)` makes a placement, where `base` is such a name. `passes` has further strategies of ops:
    lists of placements as `register` takes them, or a function of the op's arguments that returns such lists. They are
    added to the op's rule.

    `combine(placement, parts)` returns what the ranks of a mesh dim combine to, element by element: `parts` are tensors
    of shape `[n]` in double precision, one for each rank, and so is what it returns. The order of the parts may not
    matter. With it, `rote.validate` judges what passes such partials; without, nothing checks that `passes` is right.

    The class needs `__eq__` and `__hash__` that compare class and parameters, `_reduce_value`, `_reduce_shard_value`
    and `_partition_value`.

    Raises `ValueError` if a class of this name is registered already, or an op in `passes` has no rule, `TypeError` if
    the class lacks a method.
    """
    _own_partials.put(cls, reduction, parameters, passes, combine)
    _rules_have_changed()


def unregister_partial(cls: type[Partial]) -> None:
    """Removes what was registered for a subclass of `Partial`. Raises `ValueError` if nothing was."""
    for op in _own_partials.remove(cls):
        _key_again(op)
    _rules_have_changed()


_last = Stats()


def stats() -> Stats:
    """What has become of DTensor's questions since the last `install`. Without any, of those that steps captured with
    `propagation="rote"` have asked."""
    installed = _installed or (_within_steps if _last == Stats() else None)
    if installed is None:
        return _last
    answered, nanoseconds, strides, decomposed, handed_on = installed.answers.stats()
    return Stats(answered, nanoseconds / 1e3, strides, decomposed, handed_on, dict(installed.refuted.found))


__all__ = [
    "Stats",
    "install",
    "register",
    "register_partial",
    "register_sharding",
    "stats",
    "uninstall",
    "unregister",
    "unregister_partial",
    "unregister_sharding",
]
