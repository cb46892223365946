"""``rote.capture``: a step that is recorded once and replayed from then on."""

from __future__ import annotations

import functools
import json
import shutil
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from ctypes import byref, c_int, c_int64, c_uint32, c_void_p
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import _bridge, _floats, _reach, _record, _results, _state
from ._native import EAGER, NO_INDEX, REPLAYED, check, error, lib, record_fact_without_key, record_no_grad, take_object
from ._specs import local_of, short_text

_ARG, _STATE, _GRAD = range(3)
_STRUCTURE, _ARGUMENT, _, _, _MODE, _WORLD = range(6)


class RecordingRefused(RuntimeError):
    """A step cannot be replayed: the op, the source line and the remedy."""


class VerificationError(RuntimeError):
    """A replay differs from eager; names the first tensor that does."""


@dataclass(frozen=True)
class Stats:
    """Counters of a captured function."""

    calls: int = 0
    recordings: int = 0
    replays: int = 0
    fallbacks: int = 0
    variants: int = 0
    guard_misses: dict[str, int] = field(default_factory=dict)
    refusals: list[str] = field(default_factory=list)


def _flatten(path: str, value: Any, leaves: list[tuple[str, Any]]) -> str:
    """Leaves in the order of the bridge (facts.h), and the structure as text."""
    if type(value) in (tuple, list):
        inner = [_flatten(f"{path}[{i}]", item, leaves) for i, item in enumerate(value)]
        return ("({})" if type(value) is tuple else "[{}]").format(", ".join(inner))
    if type(value) is dict:
        inner = [f"{key!r}: {_flatten(f'{path}[{key!r}]', item, leaves)}" for key, item in value.items()]
        return "{" + ", ".join(inner) + "}"
    leaves.append((path, value))
    return "tensor" if isinstance(value, torch.Tensor) else "*"


class Captured:
    """A captured function. Call it as the function it stands for."""

    def __init__(
        self,
        fn: Callable[..., Any],
        state: Any,
        plans: str | Path | None,
        strict: bool,
        verify: int,
        trust_plans: bool,
        max_variants: int,
        ignore: Sequence[str],
    ) -> None:
        if not callable(fn):
            raise TypeError(f"rote.capture takes a function, not a {type(fn).__name__}")
        if verify < 0:
            raise ValueError(f"verify= must not be negative, it is {verify}")
        if max_variants < 1:
            raise ValueError(f"max_variants= must be at least 1, it is {max_variants}")
        if isinstance(ignore, str) or not all(isinstance(name, str) for name in ignore):
            raise TypeError("ignore= takes a list of names")
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._state = _state.collect(state)
        self._strict = strict
        self._verify = verify
        self._trust = trust_plans
        self._ignore = tuple(ignore)
        self._max_variants = max_variants
        self._warned: set[str] = set()
        self._results: dict[int, _results.Results] = {}
        self._arguments: tuple[Any, Any] = ((), {})
        if plans is None:
            plans = tempfile.mkdtemp(prefix="rote-plans-")
            weakref.finalize(self, shutil.rmtree, plans, ignore_errors=True)
        self._plans = str(plans)
        self._session: Any = None
        self._lock = threading.RLock()
        self._variant = c_uint32()
        self._slot = c_void_p()

    # -- calls ----------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            if self._session is None:
                self._open()
            if self._verify > 0 and self._results and not self._nested():
                return self._verified(args, kwargs)
            return self._call(args, kwargs)

    def _call(self, args: Any, kwargs: Any) -> Any:
        status = lib.rote_session_call(self._session, args, kwargs, byref(self._variant), byref(self._slot))
        if status == REPLAYED:
            return self._deliver(args, kwargs)
        if check(status) == EAGER:
            notice = lib.rote_session_notice(self._session)
            if notice is not None:
                warnings.warn(f"rote: {notice.decode()}", stacklevel=3)
            return self._fn(*args, **kwargs)
        return self._recorded(args, kwargs)

    def _deliver(self, args: Any, kwargs: Any) -> Any:
        tensors = take_object(self._slot)
        results = self._results[self._variant.value]
        return results.deliver(tensors, lambda path: self._argument(path, args, kwargs))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @staticmethod
    def _nested() -> bool:
        return bool(torch.utils._python_dispatch._get_current_dispatch_mode_stack())

    @staticmethod
    def _argument(path: str, args: Any, kwargs: Any) -> Any:
        leaves: list[tuple[str, Any]] = []
        _flatten("args", args, leaves)
        _flatten("kwargs", kwargs, leaves)
        return dict(leaves)[path]

    # -- what people look at ----------------------------------------------------

    @property
    def stats(self) -> Stats:
        """Counters, as of now."""
        if self._session is None:
            return Stats()
        text = lib.rote_session_stats(self._session)
        if text is None:
            raise RuntimeError(f"rote: {error()}")
        return Stats(**json.loads(text))

    def explain(self) -> str:
        """What was erased, collectives and redistributions with their causes,
        guards, misses and refusals."""
        if self._session is None:
            return "not called yet"
        text = lib.rote_session_explain(self._session)
        if text is None:
            raise RuntimeError(f"rote: {error()}")
        return str(text.decode())

    def plan_counts(self) -> dict[str, int]:
        """Instructions of the variant that ran last: local, views, collectives."""
        if not self._results:
            return {}
        last = max(self._results) if self._variant.value not in self._results else self._variant.value
        return dict(json.loads(lib.rote_session_variant(self._session, last))["counts"])

    # -- set-up -----------------------------------------------------------------

    def _open(self) -> None:
        _bridge.load()
        world, rank = 1, 0
        if dist.is_available() and dist.is_initialized():
            world, rank = dist.get_world_size(), dist.get_rank()
        function = getattr(self._fn, "__qualname__", type(self._fn).__qualname__)
        code = getattr(self._fn, "__code__", None)
        if code is not None:
            function = f"{Path(code.co_filename).name}:{function}"
        session = lib.rote_session_new(
            function.encode(),
            f"torch {torch.__version__}".encode(),
            world,
            rank,
            self._plans.encode(),
            self._max_variants,
        )
        if session is None:
            raise RuntimeError(f"rote: {error()}")
        self._session = session
        weakref.finalize(self, lib.rote_session_free, session).atexit = False

    # -- recording ----------------------------------------------------------------

    def _recorded(self, args: Any, kwargs: Any) -> Any:
        session = self._session
        check(lib.rote_record_begin(session))
        recording = _Recording(self, args, kwargs)
        try:
            recording.prepare()
            if self._trust:
                bound = c_int()
                check(lib.rote_record_trust(session, byref(bound)))
                if bound.value:
                    return self._trusted(recording, args, kwargs)
            result = recording.run()
        except BaseException:
            recording.close()
            lib.rote_record_abort(session)
            raise
        outcome = recording.finish(result)
        if outcome["outcome"] == "refused":
            self._refused(outcome["reason"])
        return result

    def _trusted(self, recording: _Recording, args: Any, kwargs: Any) -> Any:
        recording.close()
        status = lib.rote_session_replay_last(self._session, byref(self._variant), byref(self._slot))
        check(status)
        variant = self._variant.value
        plan = json.loads(lib.rote_session_variant(self._session, variant))
        specs = [t._spec for _, t in recording.tensors if isinstance(t, DTensor)]
        specs += [t._spec for _, t in recording.leaves if isinstance(t, DTensor)]

        def spec(text: str | None) -> Any:
            return None if text is None else _results.spec_from_text(text, specs)

        self._results[variant] = _results.Results(
            plan["result"],
            [(spec(o["spec"]), o["requires_grad"]) for o in plan["outputs"]],
            [(g["path"], spec(g["spec"]), g["none"]) for g in plan["grads"]],
            recording.own(),
        )
        return self._deliver(args, kwargs)

    def _refused(self, reason: str) -> None:
        if self._strict:
            raise RecordingRefused(reason)
        if reason not in self._warned:
            self._warned.add(reason)
            warnings.warn(f"rote: recording refused, the step stays eager: {reason}", stacklevel=5)

    # -- verification ---------------------------------------------------------------

    def _verified(self, args: Any, kwargs: Any) -> Any:
        from ._verify import Snapshot, compare

        replays = self.stats.replays
        before = Snapshot.take(self._state, args, kwargs)
        result = self._call(args, kwargs)
        if self.stats.replays == replays:
            return result
        self._verify -= 1
        replayed = Snapshot.take(self._state, args, kwargs, result)
        before.restore()
        eager_result = self._fn(*args, **kwargs)
        eager = Snapshot.take(self._state, args, kwargs, eager_result)
        difference = compare(replayed, eager)
        if difference is not None:
            raise VerificationError(f"a replay of {self.__name__} differs from eager in {difference}")  # type: ignore[attr-defined]
        return eager_result


class _Recording:
    """One call that is recorded."""

    def __init__(self, captured: Captured, args: Any, kwargs: Any) -> None:
        self._captured = captured
        self._session = captured._session
        self._args, self._kwargs = args, kwargs
        self.leaves: list[tuple[str, Any]] = []
        self.tensors: list[tuple[str, torch.Tensor]] = list(captured._state.tensors())
        self._specs = _record.Specs(self._session)
        self._watch = _record.Watch(self._session, self._specs)
        self._tape = _floats.Tape(self._session)
        self._replaced: list[tuple[dict[str, Any], str, float, float]] = []
        self._grads: list[tuple[str, torch.Tensor, torch.Tensor | None]] = []
        self._grad_specs: list[tuple[str, Any, bool]] = []
        autocast = any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))
        self._casts_outlive_the_call = autocast and torch.is_autocast_cache_enabled()

    def prepare(self) -> None:
        """Names tensors, collects facts, and tells the library that the step
        is about to run."""
        session = self._session
        structure = _flatten("args", self._args, self.leaves)
        structure += " " + _flatten("kwargs", self._kwargs, self.leaves)
        for path, _ in self.leaves:
            check(lib.rote_record_leaf(session, path.encode()))
        self._guard(_STRUCTURE, "args structure", structure)
        self._modes()
        walk = _reach.Walk(self._captured._ignore)
        seen: set[int] = set()
        for path, tensor in self.tensors:
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            self._name(_STATE, path, tensor, tensor, NO_INDEX)
            walk.tensor(path, tensor, short_text(tensor), tensor.grad is not None if tensor.is_leaf else False)
            self._track_grad(path, tensor, NO_INDEX)
        for i, (path, leaf) in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                self._guard(_ARGUMENT, path, short_text(leaf))
                if leaf.requires_grad and not leaf.is_leaf and torch.is_grad_enabled():
                    self._watch.refuse(
                        "",
                        f"takes {path}, which carries an autograd graph from outside the step",
                        "pass path.detach(), or compute it inside the captured function",
                    )
                self._name(_ARG, path, leaf, leaf, i)
                self._track_grad(path, leaf, i)
            else:
                self._guard(_ARGUMENT, path, _reach.describe(leaf))
        state = self._captured._state
        names = {id(tensor): path.split(".", 1)[-1] for path, tensor in reversed(self.tensors)}
        for path, module in state.modules:
            walk.module(path, module)
        for path, optimizer in state.optimizers:
            walk.optimizer(path, optimizer, names)
        walk.function(self._captured._fn)
        for path, leaf in self.leaves:
            if not isinstance(leaf, torch.Tensor):
                walk.value(path, leaf)
        self._facts(walk.facts)
        unsupported = _state.unsupported(state)
        if unsupported is not None:
            self._watch.refuse(
                "",
                f"uses {unsupported}, which is not supported yet",
                "apply rote.capture to a model without the wrapper, for example with DTensor parameters",
            )
        check(lib.rote_record_generator(session, 0, -1))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            check(lib.rote_record_generator(session, 1, torch.cuda.current_device()))
        check(lib.rote_record_ready(session))
        for path, optimizer in state.optimizers:
            for i, group in enumerate(optimizer.param_groups):
                for key, value in group.items():
                    if type(value) is float:
                        traced = _floats.read(self._tape, f"{path}.param_groups[{i}]['{key}']", value)
                        self._replaced.append((group, key, value, traced))
        for group, key, _, traced in self._replaced:
            group[key] = traced

    def _guard(self, kind: int, subject: str, text: str) -> None:
        check(lib.rote_record_guard(self._session, kind, subject.encode(), text.encode()))

    def _modes(self) -> None:
        autocast = [
            f"{kind} {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
        ]
        for subject, text in (
            ("grad_mode", torch.is_grad_enabled()),
            ("inference_mode", torch.is_inference_mode_enabled()),
            ("autocast", ", ".join(autocast) or "off"),
            ("deterministic", torch.are_deterministic_algorithms_enabled()),
            ("default_dtype", torch.get_default_dtype()),
            ("float32_matmul_precision", torch.get_float32_matmul_precision()),
        ):
            self._guard(_MODE, subject, str(text))
        world = dist.get_world_size() if dist.is_initialized() else 1
        self._guard(_WORLD, "world size", str(world))

    def _name(self, kind: int, path: str, owner: torch.Tensor, tensor: torch.Tensor, leaf: int) -> None:
        spec = self._specs.of_tensor(tensor)
        check(lib.rote_record_tensor(self._session, kind, path.encode(), owner, local_of(tensor), spec, leaf))

    def _track_grad(self, path: str, tensor: torch.Tensor, leaf: int) -> None:
        if not tensor.requires_grad or not tensor.is_leaf:
            return
        self._grads.append((path, tensor, tensor.grad))
        if tensor.grad is not None:
            self._name(_GRAD, path, tensor, tensor.grad, leaf)

    def _facts(self, facts: list[_reach.Fact]) -> None:
        add, add_alone, session = lib.rote_record_fact, record_fact_without_key, self._session
        for fact in facts:
            subject, expected, hyper = fact.subject.encode(), fact.expected.encode(), fact.hyperparameter
            if fact.key is None:
                status = add_alone(session, fact.kind, fact.container, None, fact.guard, subject, expected, hyper)
            else:
                status = add(session, fact.kind, fact.container, fact.key, fact.guard, subject, expected, hyper)
            check(status)

    def run(self) -> Any:
        """Runs the step under observation."""
        step = functools.partial(self._captured._fn, *self._args, **self._kwargs)
        try:
            return _record.run(self._session, self._specs, self._watch, step)
        finally:
            self.close()

    def close(self) -> None:
        """Puts the optimizers' own floats back."""
        self._tape.close()
        for group, key, value, traced in self._replaced:
            if group.get(key) is traced:
                group[key] = value
        self._replaced = []

    def own(self) -> Callable[[str], Any]:
        """Finds the state's tensors by path."""
        tensors = dict(reversed(self.tensors))

        def find(path: str) -> Any:
            found = tensors.get(path)
            return tensors[path.removesuffix(".grad")].grad if found is None else found

        return find

    def finish(self, result: Any) -> dict[str, Any]:
        """Hands results and gradients to the library and ends the recording."""
        session = self._session
        names = {id(tensor): path for path, tensor in reversed(self.tensors)}
        for path, leaf in self.leaves:
            if isinstance(leaf, torch.Tensor):
                names.setdefault(id(leaf), path)
        for path, tensor, before in self._grads:
            if tensor.grad is not None and tensor.grad is not before:
                names[id(tensor.grad)] = f"{path}.grad"
        outputs: list[torch.Tensor] = []
        try:
            structure = _results.encode(result, names, outputs)
        except _results.Unsupported as problem:
            structure = {"c": None}
            self._watch.refuse(
                "",
                f"returns a {problem}, which a plan cannot give back",
                "return tensors, numbers, text, and tuples, lists and dicts of these",
            )
        output_specs = []
        for i, tensor in enumerate(outputs):
            if tensor.requires_grad and (tensor.grad_fn is None or not self._watch.used_up(tensor.grad_fn)):
                self._watch.refuse(
                    "",
                    f"returns a tensor ({short_text(tensor)}) with an autograd graph that no backward pass in the "
                    "step has used up: a replay has no graph",
                    "call backward() inside the captured function, return tensor.detach(), or capture the step "
                    "under torch.no_grad()",
                )
            output_specs.append((tensor._spec if isinstance(tensor, DTensor) else None, tensor.requires_grad))
            local = local_of(tensor)
            spec = self._specs.of_tensor(tensor)
            check(lib.rote_record_output(session, f"result[{i}]".encode(), local, spec, tensor.requires_grad))
        self._watch.forget()
        for path, tensor, before in self._grads:
            self._finish_grad(path, tensor, before)
        self._grads = []
        outputs.clear()
        for name in lib.rote_record_groups(session).decode().split("\n"):
            if name:
                self._group(name)
        if _record.survivors(session) and self._casts_outlive_the_call:
            self._watch.refuse(
                "",
                "runs under torch.autocast that was entered outside of it: autocast keeps the casts of parameters "
                "until its context ends, and a replay would not see them",
                "enter torch.autocast inside the captured function, or pass it cache_enabled=False",
            )
        text = lib.rote_record_finish(session, _results.to_json(structure))
        if text is None:
            raise RuntimeError(f"rote: {error()}")
        outcome: dict[str, Any] = json.loads(text)
        if "variant" in outcome:
            self._captured._results[outcome["variant"]] = _results.Results(
                structure, output_specs, self._grad_specs, self.own()
            )
        return outcome

    def _finish_grad(self, path: str, tensor: torch.Tensor, before: torch.Tensor | None) -> None:
        after = tensor.grad
        if after is before:
            return
        if after is None:
            check(record_no_grad(self._session, path.encode(), None, NO_INDEX))
            self._grad_specs.append((path, None, True))
            return
        spec = self._specs.of_tensor(after)
        check(lib.rote_record_grad(self._session, path.encode(), local_of(after), spec))
        self._grad_specs.append((path, after._spec if isinstance(after, DTensor) else None, False))

    def _group(self, name: str) -> None:
        group = dist.distributed_c10d._resolve_process_group(name)
        ranks = dist.get_process_group_ranks(group)
        label = getattr(group, "group_desc", "") or name
        label = label.removeprefix("mesh_") if label != "undefined" else name
        array = (c_int64 * len(ranks))(*ranks)
        check(lib.rote_record_group(self._session, name.encode(), array, len(ranks), label.encode()))
        self._facts([_reach.Fact(_reach.GROUP, name, None, _reach.WORLD, f"group {name}", "")])


def capture(
    fn: Callable[..., Any] | None = None,
    *,
    state: Any = None,
    plans: str | Path | None = None,
    strict: bool = False,
    verify: int = 0,
    trust_plans: bool = False,
    max_variants: int = 8,
    ignore: Sequence[str] = (),
) -> Any:
    """Captures a step: recorded once, replayed from Rust from then on.

    Usable as a call or as a decorator.

    Args:
        fn: the step. What it returns may be tensors, numbers, text, and
            tuples, lists and dicts of these.
        state: what the step reads and writes: a module, an optimizer, a
            tensor, or dicts and lists of these.
        plans: directory of the plan store; a temporary one by default.
        strict: raise :class:`RecordingRefused` where the default warns once
            and stays eager.
        verify: run the first so many replays beside eager, from the same
            state, and raise :class:`VerificationError` at the first bit that
            differs.
        trust_plans: use a stored plan without recording the step once more.
        max_variants: how many plans may be kept; beyond, calls run eagerly.
        ignore: names of host values that may change without mattering, for
            example ``"trainer.step"``.

    Returns:
        A callable with the signature of ``fn``, and ``stats`` and
        ``explain()``.
    """

    def wrap(function: Callable[..., Any]) -> Captured:
        return Captured(function, state, plans, strict, verify, trust_plans, max_variants, ignore)

    return wrap if fn is None else wrap(fn)
