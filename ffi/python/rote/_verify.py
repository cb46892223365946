"""Replay beside eager, from the same state, compared bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _containers, _ranks, _unread
from ._carried import Place
from ._returns import Rate
from ._specs import local_of
from ._state import State


@dataclass
class Snapshot:
    """Copies of everything that a step may write, and what it has returned and put into attributes."""

    tensors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    grads: dict[str, tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]]
    result: list[tuple[str, Any]]
    cpu_generator: torch.Tensor
    cuda_generator: torch.Tensor | None
    carried: list[tuple[Place, Any]] = field(default_factory=list)
    """What was there for later calls."""

    @staticmethod
    def take(state: State, args: Any, kwargs: Any, result: Any = None) -> Snapshot:
        """Copies the state, the arguments, gradients and generators."""
        named = dict(state.tensors())
        named.update(_tensors("args", args))
        named.update(_tensors("kwargs", kwargs))
        tensors = {path: (t, local_of(t).detach().clone()) for path, t in named.items() if _has_memory(local_of(t))}
        grads = {
            path: (t, t.grad, None if t.grad is None else local_of(t.grad).detach().clone())
            for path, t in named.items()
            if t.is_leaf
        }
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        carried = [(place, place.value()) for place in state.unread.carried]
        given = [("result", result), *((each.path, _unread.value_of(each)) for each in state.unread.kept())]
        given += [(place.path, value) for place, value in carried]
        returned = [
            (path, local_of(leaf).detach().clone() if isinstance(leaf, torch.Tensor) else leaf)
            for whole, value in given
            for path, leaf in _leaves(whole, value)
        ]
        return Snapshot(tensors, grads, returned, torch.get_rng_state(), cuda, carried)

    def restore(self) -> None:
        """Puts everything back, in place."""
        for place, value in self.carried:
            place.put(value)
        with torch.no_grad():
            for tensor, copy in self.tensors.values():
                local = local_of(tensor).detach()
                if not same(local, copy):  # what nothing wrote may be of a kind that cannot be written
                    with _unnoticed(local):
                        local.copy_(copy)
            for tensor, grad, grad_copy in self.grads.values():
                tensor.grad = grad
                if grad is not None and grad_copy is not None:
                    local_of(grad).copy_(grad_copy)
        torch.set_rng_state(self.cpu_generator)
        if self.cuda_generator is not None:
            torch.cuda.set_rng_state(self.cuda_generator)


def _unnoticed(tensor: torch.Tensor) -> contextlib.AbstractContextManager[None]:
    """Within, autograd does not see that a tensor is written: ops write running statistics so, which an earlier forward
    may have saved."""
    keep: Any = torch.autograd._unsafe_preserve_version_counter  # type: ignore[attr-defined]
    return contextlib.nullcontext() if tensor.is_inference() else keep(tensor)


def compare(replayed: Snapshot, eager: Snapshot) -> str | None:
    """The first thing that differs, by name."""
    for path, (_, copy) in eager.tensors.items():
        if path in replayed.tensors and not same(copy, replayed.tensors[path][1]):
            return path
    for path, (_, _, eager_grad) in eager.grads.items():
        grad = replayed.grads[path][2]
        if (grad is None) != (eager_grad is None):
            return f"{path}.grad"
        if grad is not None and eager_grad is not None and not same(grad, eager_grad):
            return f"{path}.grad"
    if len(eager.result) != len(replayed.result):
        return "the number of results"
    for (path, leaf), (other_path, other) in zip(eager.result, replayed.result, strict=True):
        if path != other_path or not _same_leaf(leaf, other):
            return path
    generators = {
        "CPU": (eager.cpu_generator, replayed.cpu_generator),
        "CUDA": (eager.cuda_generator, replayed.cuda_generator),
    }
    for device, (state, other) in generators.items():
        if state is not None and other is not None and not torch.equal(state, other):
            return f"the state of the {device} generator"
    return None


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit: NaN equals the same NaN, 0.0 is not -0.0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(bits(a), bits(b))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes, element after element."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    # One element is contiguous with any stride, and is no bytes then.
    return (
        flat.as_strided(flat.shape, (1,)).view(torch.uint8)
        if flat.numel() == 1
        else flat.contiguous().view(torch.uint8)
    )


def _has_memory(local: torch.Tensor) -> bool:
    """Whether a tensor lies in memory: not one that FSDP2 has given back until its next use."""
    has_storage = local.layout is torch.strided and torch._C._has_storage(local)
    return not has_storage or local.numel() == 0 or local.untyped_storage().nbytes() > 0


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(b, Rate):  # of a scheduler that runs once, in eager
        return type(a) in (int, float)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return same(a, b)
    return type(a) is type(b) and (a == b or (a != a and b != b))


def _tensors(path: str, value: Any) -> dict[str, torch.Tensor]:
    return {path: leaf for path, leaf in _leaves(path, value) if isinstance(leaf, torch.Tensor)}


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """What containers hold, by path."""
    layout = _containers.layout_of(type(value))
    if layout is not None:
        yield f"type({path})", type(value)
        entries = layout.entries(value)
        for i, entry in enumerate(entries or ()):
            key, item = entry if issubclass(layout.base, dict) else (i, entry)
            yield from _leaves(f"{path}[{key!r}]", item)
        for name, item in (*_containers.attributes_of(value).items(), *layout.filled(value)):
            yield from _leaves(f"{path}.{name}", item)
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from _leaves(f"{path}[{i}]", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(f"{path}[{key!r}]", item)
    elif isinstance(value, Rate) and value.place is None:
        yield from _leaves(path, value.parts())
    else:
        yield path, value


_EQUAL, _DIFFERS, _RAISED = range(3)
_REPLAYED, _FAILED, _RAN = range(3)


@dataclass
class Beside:
    """A replay and eager, from the same state. What eager left is there."""

    difference: str | None  # what differs on this rank
    elsewhere: list[int]  # other ranks on which something differs
    raised_elsewhere: bool  # by eager
    before: Snapshot
    after: Snapshot  # eager
    outcome: Any
    error: BaseException | None
    once: bool = False  # some rank did not replay, so the call was made once, and ``outcome`` is what it gave

    def result(self) -> Any:
        """What eager gave."""
        if self.error is not None:
            raise self.error
        return self.outcome


def beside(
    state: State,
    args: Any,
    kwargs: Any,
    replay: Callable[[Any, Any], tuple[Any, bool]],
    eager: Callable[[Any, Any], Any],
) -> Beside:
    """Replays a call, and runs it eagerly from the same state, on every rank. ``replay`` gives the result, and whether
    it has replayed the call: else the step has found other data than the plan is for, and has run."""
    before = Snapshot.take(state, args, kwargs)
    found, failure = _attempt(replay, args, kwargs)
    if failure is not None and _left_alone(failure):
        raise failure
    replayed, has_replayed = found or (None, True)
    ours = _REPLAYED if has_replayed else _RAN
    codes = bytes([ours])
    if _ranks.world_size() > 1:
        # A rank whose step fails may leave collectives unanswered: nothing is run twice then.
        try:
            codes = _ranks.gather(_FAILED if failure is not None else ours)
        except RuntimeError:
            if failure is None:
                raise
            raise failure from None
        if failure is not None:
            raise failure
    if any(codes):
        after = Snapshot.take(state, args, kwargs, replayed)
        return Beside(None, [], _FAILED in codes, before, after, replayed, None, once=True)
    after_replay = Snapshot.take(state, args, kwargs, replayed)
    before.restore()
    outcome, error = _attempt(eager, args, kwargs)
    if error is not None and _left_alone(error):
        raise error
    after_eager = Snapshot.take(state, args, kwargs, outcome)
    difference = None
    if failure is not None and error is None and not isinstance(failure, Exception):
        failure, error = None, failure  # a signal's, which has nothing to do with the step
    elif (failure is None) != (error is None):
        who, said = ("eager", error) if failure is None else ("the replay", failure)
        difference = f"the raised error: {who} raised {said!r}, the other raised nothing"
    elif error is None:
        difference = compare(after_replay, after_eager)
    ours = _EQUAL if difference is None else _DIFFERS
    codes = _ranks.gather(_RAISED if error is not None and difference is None else ours)
    rank = torch.distributed.get_rank() if len(codes) > 1 else 0
    elsewhere = [other for other, code in enumerate(codes) if code == _DIFFERS and other != rank]
    return Beside(difference, elsewhere, error is not None or _RAISED in codes, before, after_eager, outcome, error)


def _left_alone(error: BaseException) -> bool:
    """Whether other ranks did not answer: to ask them anything more would take another timeout."""
    if isinstance(error, torch.distributed.DistError):
        return True
    text = str(error).lower()
    return type(error) is RuntimeError and any(word in text for word in ("gloo", "timed out", "connection"))


def _attempt(run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> tuple[Any, BaseException | None]:
    try:
        return run(args, kwargs), None
    except BaseException as error:
        return None, error
