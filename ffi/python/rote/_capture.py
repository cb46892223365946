"""``rote.capture`` and ``rote.capture_module``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, overload

from torch import nn

from ._captured import Captured
from ._captured_module import CapturedModule, region_of
from ._module_regions import ModuleRegions
from ._region import Region
from ._split_step import SplitStep

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result", covariant=True)


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
    regions: bool = ...,
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
    regions: bool = ...,
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
    regions: bool = True,
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
        regions: where the step cannot be replayed, or only behind a call of a
            module, the modules that it calls are regions while it runs, as
            :func:`capture_module` has them. ``False``: they stay as they are.
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
            own = {"strict": strict, "tail": tail, **of_steps}
            modules = ModuleRegions(**options, verify=verify) if regions else None
            return Captured(SplitStep(function, state, regions=modules, verify=verify, **options, **own))
        other = next((name for name, value in of_steps.items() if value and value != "torch"), None)
        if other is not None:
            instead = "; verify= is for regions too" if other == "verify_every" else ""
            raise ValueError(f"{other}= is for whole steps, and not for region=True{instead}")
        return Captured(Region(function, state, strict=strict, verify=verify, **options))

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
    region = region_of(
        module,
        plans=plans,
        strict=strict,
        verify=verify,
        max_variants=max_variants,
        ignore=ignore,
        passes=passes,
    )
    return CapturedModule(module, region)
