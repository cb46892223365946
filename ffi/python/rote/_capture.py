"""``rote.capture``, and the captured function that it returns."""

from __future__ import annotations

import copy
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, Literal, ParamSpec, Self, TypeVar, overload

from torch import nn
from torch._C._dynamo import eval_frame

from . import _checkpointed
from ._checkpointed import CheckpointedRegion
from ._region import CapturedModule, Region
from ._split_step import SplitStep
from ._step import Stats, Step

Arguments = ParamSpec("Arguments")
Rest = ParamSpec("Rest")
Result = TypeVar("Result", covariant=True)
Returned = TypeVar("Returned")
Instance = TypeVar("Instance")


class Captured(Generic[Arguments, Result]):
    """A captured function. Call it as the function it stands for.

    ``stats``, ``explain()`` and ``plan_counts()`` belong to the captured function. All other attributes are the
    original function's, so that Rote finds and guards them.
    """

    __slots__ = ("__weakref__", "_step")

    def __init__(self, step: Step) -> None:
        object.__setattr__(self, "_step", step)

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        return step_of(self).call(args, kwargs)  # type: ignore[no-any-return]

    @property
    def stats(self) -> Stats:
        """The present values of the counters."""
        return step_of(self).stats

    def explain(self) -> str:
        """A report: the erased work, collectives and redistributions with their causes, guards, misses, refusals."""
        return step_of(self).explain()

    def plan_counts(self) -> dict[str, int]:
        """The numbers of instructions of the variant that ran last: local, views, collectives."""
        return step_of(self).plan_counts()

    @overload
    def __get__(self, instance: None, owner: Any = None) -> Self: ...
    @overload
    def __get__(
        self: Captured[Concatenate[Instance, Rest], Returned], instance: Instance, owner: Any = None
    ) -> Callable[Rest, Returned]: ...
    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Binds to an instance if the original function binds."""
        function = function_of(self)
        get = getattr(type(function), "__get__", None)
        bound = None if get is None else get(function, instance, owner)
        if type(bound) is types.MethodType and bound.__func__ is function:
            return types.MethodType(self, bound.__self__)
        return self

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN:
            return object.__getattribute__(self, name)
        function = function_of(self)
        return function if name == "__wrapped__" else getattr(function, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(function_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(function_of(self), name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(function_of(self)), *_OWN, "__wrapped__"})

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The copy of a captured function is the captured function itself. The copy of a method or of a callable
        object runs eagerly: the captured state belongs to the original."""
        function = function_of(self)
        copied = copy.deepcopy(function, memo)
        return self if copied is function else copied

    def __reduce_ex__(self, protocol: object) -> Any:
        """The captured function is pickled by its name, if the name stands for it, else as the original function."""
        found: Any = sys.modules.get(str(getattr(self, "__module__", None)))
        name = str(getattr(self, "__qualname__", ""))
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (_plain, (function_of(self),))


step_of: Callable[[Captured[Any, Any]], Step] = Captured.__dict__["_step"].__get__
_OF_THE_CLASS = {"__doc__", "__module__", "__slots__", "__orig_bases__", "__parameters__", "_step"}
_OWN = frozenset(Captured.__dict__) - _OF_THE_CLASS | {"__class__", "__reduce__"}


def function_of(captured: Captured[Any, Any]) -> Any:
    """The function that was captured."""
    return step_of(captured).stands_for


def _plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


# torch.compile leaves a captured function as it is: the graph breaks there, and what runs inside is not compiled.
_skip = eval_frame._FrameAction.SKIP
eval_frame.set_code_exec_strategy(Captured.__call__.__code__, eval_frame._FrameExecStrategy(_skip, _skip))
Captured.__call__._torchdynamo_disable = True  # type: ignore[attr-defined]


@overload
def capture(
    fn: Callable[Arguments, Result],
    *,
    state: Any = ...,
    region: bool = ...,
    plans: str | Path | None = ...,
    strict: bool = ...,
    verify: int = ...,
    verify_every: int = ...,
    agree: bool = ...,
    host: Callable[..., object] | None = ...,
    trust_plans: bool = ...,
    propagation: Literal["torch", "rote"] = ...,
    tail: bool = ...,
    max_variants: int = ...,
    ignore: Sequence[str] = ...,
    passes: str | Sequence[str] = ...,
) -> Captured[Arguments, Result]: ...
@overload
def capture(
    fn: None = None,
    *,
    state: Any = ...,
    region: bool = ...,
    plans: str | Path | None = ...,
    strict: bool = ...,
    verify: int = ...,
    verify_every: int = ...,
    agree: bool = ...,
    host: Callable[..., object] | None = ...,
    trust_plans: bool = ...,
    propagation: Literal["torch", "rote"] = ...,
    tail: bool = ...,
    max_variants: int = ...,
    ignore: Sequence[str] = ...,
    passes: str | Sequence[str] = ...,
) -> Callable[[Callable[Arguments, Result]], Captured[Arguments, Result]]: ...
def capture(
    fn: Callable[..., Any] | None = None,
    *,
    state: Any = None,
    region: bool = False,
    plans: str | Path | None = None,
    strict: bool = False,
    verify: int = 0,
    verify_every: int = 0,
    agree: bool = False,
    host: Callable[..., object] | None = None,
    trust_plans: bool = False,
    propagation: Literal["torch", "rote"] = "torch",
    tail: bool = True,
    max_variants: int = 8,
    ignore: Sequence[str] = (),
    passes: str | Sequence[str] = "",
) -> Any:
    """Captures a step: Rote records it in its first calls and replays it from Rust from then on.

    Usable as a call or as a decorator.

    Args:
        fn: the step. It may return tensors, numbers, text, and tuples, lists,
            dicts, dataclasses and named tuples of these.
        state: what the step reads and writes: a module, an optimizer, a
            tensor, or dicts, lists and objects that hold these. By default,
            Rote finds the modules, optimizers and tensors that the step uses.
        region: ``fn`` is a part of a step, as :func:`capture_module` has it:
            its forward and its backward are captured each, and the loss, the
            optimizer and all else stay eager. Not with ``verify_every``,
            ``agree``, ``host``, ``trust_plans`` and ``propagation``.
        plans: directory of the plan store; a temporary one by default.
        strict: raise :class:`RecordingRefused` if a recording is refused. By
            default, a refusal gives one warning, and the step stays eager.
        verify: run this many replays beside eager, from the same state. The
            first bit that differs raises :class:`VerificationError`. Two more
            replays are checked before them, since the first replays only find
            out how much memory the plan needs.
        verify_every: run every n-th call beside eager, on all ranks at the
            same calls. The results of eager stay. At a difference the step
            stays eager for good. A warning then names a report in the plan
            directory, with the first instruction that differs.
        agree: the ranks agree at each call that all of them replay it. The step
            may then read values on the host after collectives (``found_inf``,
            a gradient's norm): the ranks agree about these too. All ranks
            must call the step equally often.
        host: a function that runs before the step at every call, replayed or
            not, with the arguments of the call. Code that a plan cannot hold
            goes there, such as a schedule of your own that sets
            ``group["lr"]``. What it returns is dropped.
        trust_plans: use a stored plan without recording the step once more.
        propagation: who answers DTensor's sharding propagation while the step
            is recorded, and in calls that run eagerly: ``"torch"``, or
            ``"rote"``, with the same answers in less time
            (:mod:`rote.propagation`).
        tail: what a step does on the host after its last op may be what no
            plan can hold: ``meter.update(loss.item())``, ``if loss < best``.
            Rote then replays what comes before, and runs the rest of the
            function as it is written. ``False``: such a step is refused.
        max_variants: how many plans may be kept. If there are more, a plan
            that was not used for 256 calls makes room. Until there is such a
            plan, calls that match no plan run eagerly. A hyperparameter that
            varies needs no plan of its own.
        ignore: names of host values that may change without mattering, for
            example ``"trainer.step"``.
        passes: the passes that run over a plan before it is replayed:
            ``"all"`` (those that keep every bit), ``"none"``, ``"default"``,
            or names (``rote passes`` lists them). ``-`` before a name leaves
            the pass out of the default, ``+`` adds it, as in ``"-arena"``.
            If not given, ``ROTE_PASSES`` counts. With a pass that alters
            collectives, all ranks must call the step equally often.

    Returns:
        A callable with the signature of ``fn``, and with ``stats`` and
        ``explain()``.
    """

    options: dict[str, Any] = {
        "plans": plans,
        "strict": strict,
        "max_variants": max_variants,
        "ignore": ignore,
        "passes": passes,
    }
    of_steps: dict[str, Any] = {
        "verify_every": verify_every,
        "agree": agree,
        "host": host,
        "trust_plans": trust_plans,
        "propagation": propagation,
    }

    def wrap(function: Callable[..., Any]) -> Captured[..., Any]:
        if not region:
            return Captured(SplitStep(function, state, tail=tail, verify=verify, **options, **of_steps))
        other = next((name for name, value in of_steps.items() if value and value != "torch"), None)
        if other is not None:
            instead = "; verify= is for regions too" if other == "verify_every" else ""
            raise ValueError(f"{other}= is for whole steps, and not for region=True{instead}")
        return Captured(Region(function, state, verify=verify, **options))

    return wrap if fn is None else wrap(fn)


def capture_module(
    module: nn.Module,
    *,
    plans: str | Path | None = None,
    strict: bool = False,
    verify: int = 0,
    max_variants: int = 8,
    ignore: Sequence[str] = (),
    passes: str | Sequence[str] = "",
) -> CapturedModule:
    """Captures the ``forward`` of a module, in place, as a region: its forward and its backward are recorded and
    replayed each, and all around them stays eager and live.

    For models whose whole step cannot be captured: with host reads, routers, pipelines, prints. Capture the blocks
    (``for block in model.layers: rote.capture_module(block)``), after wrapping them in activation checkpoints and
    before ``fully_shard`` or ``DistributedDataParallel``, where ``block.compile()`` would stand. Hooks of the module
    itself are outside of the region.

    Args:
        module: the module. Its ``forward`` may take and return tensors, and tuples, lists and dicts of them.
        verify: run this many replays beside eager, from the same state, with
            the backward of each. The first bit that differs raises
            :class:`VerificationError`, in the forward or in the backward.
        plans, strict, max_variants, ignore, passes: as :func:`capture` has them.

    Returns:
        A handle with ``stats``, ``explain()`` and ``release()``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"rote.capture_module takes a module, not a {type(module).__name__}")
    own = vars(module).get("forward")  # of the module itself: hooks of libraries stand there
    if isinstance(own, Captured):
        raise ValueError("rote.capture_module takes a module whose forward is not captured yet")
    inside = _checkpointed.inside_of(module) if own is None else None
    kind = Region if inside is None else CheckpointedRegion
    region = kind(
        module.forward if inside is None else types.MethodType(inside, module),
        module,
        plans=plans,
        strict=strict,
        verify=verify,
        max_variants=max_variants,
        ignore=ignore,
        passes=passes,
    )
    region.in_place = own is None
    module.forward = Captured(region)
    return CapturedModule(module, region, own)
