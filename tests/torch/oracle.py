"""Eager PyTorch as the oracle: the same script, once plain and once captured.

A script is a generator. It takes `capture`, builds what it needs, yields the
result of every call of its step and returns the state that the step touches.
It is run twice from the same seed, first with an eager `capture` that hands
the function back, then with `rote.capture`. Everything yielded, the state at
the end and the RNG state after every call must be equal bit for bit. Most
scripts only call one step again and again: `over` is their generator.

`ROTE_TEST_ORACLE_ONLY=1` runs both sides eager and skips what only Rote can
promise (statistics, messages). A case that fails then is wrong itself.
"""

import collections
import copy
import dataclasses
import os
import types
import zlib
from collections.abc import Callable, Generator, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from extent import EVERYTHING, SEED
from ranks import CaseSkipped, eager_side
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

ORACLE_ONLY = os.environ.get("ROTE_TEST_ORACLE_ONLY") == "1"
#: Passes that keep every bit, for tests that hold whatever the passes are.
PASSES = ["default", "none", "all"]
REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
TESTED = next(line[7:] for line in REQUIREMENTS.read_text().splitlines() if line.startswith("torch=="))
IS_TESTED = torch.__version__.split("+")[0] == TESTED

Facts = dict[str, Any]
Calls = Generator[Any, None, Any]
Script = Callable[["Capture"], Calls]


class Capture(Protocol):
    def __call__(self, fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Any: ...


def eager(fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Callable[..., Any]:
    return fn


def rote_capture(fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Any:
    """`rote.capture`, or eager when only the oracle is under test."""
    if ORACLE_ONLY:
        return eager(fn)
    import rote

    return rote.capture(fn, state=state, **options)


def over(
    capture: Capture,
    step: Callable[..., Any],
    calls: Iterable[Any],
    *,
    state: Any = None,
    before: Mapping[int, Callable[[], object]] = types.MappingProxyType({}),
    seen: Callable[[], Any] | None = None,
    end: Callable[[], Any] | None = None,
    **options: Any,
) -> Calls:
    """Calls a captured step once with each of ``calls``: one argument, or a tuple of arguments.

    ``before`` holds what happens before a call, by its number. ``seen`` gives what is compared after each call,
    beside the result, and ``end`` what is compared at the end, if that is not the state."""
    captured = capture(step, state=state, **options)
    for call, arguments in enumerate(calls):
        before.get(call, int)()
        if type(arguments) is not tuple:
            arguments = (arguments,)
        yield captured(*arguments) if seen is None else (captured(*arguments), seen())
    return state if end is None else end()


@dataclasses.dataclass
class Run:
    outputs: list[Facts]
    end: Facts
    steps: list[Any]
    stats: list[list[Any]]  # per yield, per captured step


def run(script: Script, capture: Capture) -> Run:
    steps: list[Any] = []
    stats: list[list[Any]] = []

    def remember(fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Any:
        steps.append(capture(fn, state=state, **options))
        return steps[-1]

    torch.manual_seed(0)
    calls = script(remember)
    outputs: list[Facts] = []
    while True:
        try:
            outputs.append(facts({"output": next(calls), "rng": torch.get_rng_state()}))
            stats.append([copy.deepcopy(getattr(step, "stats", None)) for step in steps])
        except StopIteration as stop:
            return Run(outputs, facts(stop.value, kept=True), steps, stats)


def run_eager(script: Script) -> Run:
    """The oracle's side. What a version of torch other than the tested one cannot do is skipped."""
    try:
        with eager_side():
            return run(script, eager)
    except RuntimeError as error:
        if IS_TESTED:
            raise
        why = f"eager torch {torch.__version__} cannot run this case: {error}"
        raise CaseSkipped(" ".join(why.split())[:300]) from error


def check_equal(script: Script, *, replays: int = 20, **options: Any) -> list[Any]:
    """The promise of a captured step: equal to eager, and really replayed."""
    return check_replayed(run_eager(script), script, replays, options)


def passes_for(script: Script) -> list[str]:
    """The selections of passes that a script runs with: one of them, the usual one for every second script; or all,
    where everything is asked for. `ROTE_PASSES` chooses one."""
    if "ROTE_PASSES" in os.environ:
        return [os.environ["ROTE_PASSES"]]
    if EVERYTHING:
        return PASSES
    name = f"{script.__module__}.{script.__qualname__}"
    return [[PASSES[0], *PASSES][(zlib.crc32(name.encode()) + SEED) % 4]]


def check_equal_with_each(script: Script, *, replays: int = 20) -> None:
    """The same promise, whatever the passes are."""
    expected = run_eager(script)
    for passes in passes_for(script):
        try:
            check_replayed(expected, script, replays, {"passes": passes})
        except Exception as error:
            error.add_note(f"passes: {passes}")
            raise


def check_replayed(expected: Run, script: Script, replays: int, options: dict[str, Any]) -> list[Any]:
    def capture(fn: Callable[..., Any], *, state: Any = None, **more: Any) -> Any:
        return rote_capture(fn, state=state, **{"strict": True, **options, **more})

    found = run(script, capture)
    check_same(expected, found)
    assert len(found.outputs) >= replays
    for step in found.steps:
        if not ORACLE_ONLY:
            assert step.stats.replays >= replays, step.stats
            assert not step.stats.refusals, step.stats
    return found.steps


def check_right(script: Script, capture: Capture = rote_capture, *, replays: int = 0) -> Run:
    """The promise of any captured step, replayed or not: equal to eager. ``replays``: of the first step, at least."""
    expected, found = run_eager(script), run(script, capture)
    check_same(expected, found)
    if not ORACLE_ONLY and replays:
        assert found.steps[0].stats.replays >= replays, found.steps[0].stats
    return found


def check_same(expected: Run, found: Run) -> None:
    """Fails where a run is not what eager is."""
    assert len(expected.outputs) == len(found.outputs)
    for call, (want, got) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        compare(want, got, f"call {call}: ")
    compare(expected.end, found.end, "at the end: ")


def compare(expected: Facts, found: Facts, where: str = "") -> None:
    """Fails with every fact that differs, eager's value first."""
    wrong = [
        f"{where}{name}: expected {show(expected.get(name))}, found {show(found.get(name))}"
        for name in {**expected, **found}
        if not same(expected.get(name), found.get(name))
    ]
    assert not wrong, "\n".join(wrong[:20])


def same(expected: Any, found: Any) -> bool:
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        return (
            expected.dtype == found.dtype
            and expected.shape == found.shape
            and torch.equal(bits(expected), bits(found))  # -0.0 is not 0.0, a NaN is itself
        )
    if isinstance(expected, np.ndarray) and isinstance(found, np.ndarray):
        return same(torch.tensor(expected), torch.tensor(found))
    return type(expected) is type(found) and bool(expected == found)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)


def show(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)} {value.flatten()[:4].tolist()}"
    return repr(value)


def facts(tree: Any, *, kept: bool = False) -> Facts:
    """Every fact about modules, optimizers, tensors and values in `tree`, by path.

    `kept` is for state, which also keeps its autograd facts and its aliases.
    (A loss that was backpropagated inside the step has no graph left to keep.)
    """
    tensors: dict[str, torch.Tensor] = {}
    values: Facts = {}
    collect(tree, "", tensors, values)
    for path, tensor in tensors.items():
        local = local_of(tensor)
        values[f"{path}.shape"] = tuple(tensor.shape)
        values[f"{path}.stride"] = tensor.stride()
        values[f"{path}.local stride"] = local.stride()
        values[f"{path}.local"] = local.clone()
        if isinstance(tensor, DTensor):
            values[f"{path}.placements"] = tensor.placements
            values[f"{path}.mesh"] = tuple(tensor.device_mesh.shape)
        if kept:
            # An AsyncCollectiveTensor is a plain tensor that nobody has waited for yet.
            waited = isinstance(tensor, AsyncCollectiveTensor)
            values[f"{path}.type"] = "Tensor" if waited else type(tensor).__name__
            values[f"{path}.requires_grad"] = tensor.requires_grad
            values[f"{path}.is_leaf"] = tensor.is_leaf
    if kept:
        values["aliases"] = overlaps(tensors)
    return values


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's plain tensor, waited for."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def collect(tree: Any, path: str, tensors: dict[str, torch.Tensor], values: Facts) -> None:
    if isinstance(tree, torch.Tensor):
        tensors[path] = tree
        if tree.is_leaf and tree.grad is not None:
            tensors[f"{path}.grad"] = tree.grad
    elif isinstance(tree, torch.nn.Module):
        for name, module in tree.named_modules():
            values[f"{path}.{name}.training"] = module.training
        for name, parameter in tree.named_parameters(remove_duplicate=False):
            collect(parameter, f"{path}.{name}", tensors, values)
        for name, buffer in tree.named_buffers(remove_duplicate=False):
            collect(buffer, f"{path}.{name}", tensors, values)
    elif isinstance(tree, torch.optim.Optimizer):
        for i, group in enumerate(tree.param_groups):
            for name, value in group.items():
                if name != "params":
                    collect(value, f"{path}.param_groups[{i}][{name}]", tensors, values)
            for j, parameter in enumerate(group["params"]):
                for name, value in tree.state.get(parameter, {}).items():
                    collect(value, f"{path}.state[{i}][{j}][{name}]", tensors, values)
    elif isinstance(tree, (dict, list, tuple)):
        values[f"{path}.structure"] = str(pytree.tree_structure(tree))
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        for name, value in items:
            collect(value, f"{path}.{name}" if path else str(name), tensors, values)
        if type(tree) not in (dict, list, tuple):
            collect_parts(tree, path, tensors, values)
    elif (
        dataclasses.is_dataclass(type(tree))
        or isinstance(tree, (collections.UserDict, types.SimpleNamespace))
        or type(tree) in pytree.SUPPORTED_NODES
    ):
        collect_parts(tree, path, tensors, values)
    else:
        values[path] = tree


def collect_parts(tree: Any, path: str, tensors: dict[str, torch.Tensor], values: Facts) -> None:
    """The class of an object, its attributes in their order, and its slots."""
    values[f"{path}.class"] = type(tree)
    own = getattr(tree, "__dict__", {})
    slots = {name for base in type(tree).__mro__ for name in getattr(base, "__slots__", ()) if hasattr(tree, name)}
    values[f"{path}.attributes"] = [*own, *sorted(slots)]
    for name in (*own, *slots):
        collect(getattr(tree, name), f"{path}->{name}", tensors, values)


def overlaps(tensors: dict[str, torch.Tensor]) -> list[tuple[str, ...]]:
    """Groups of names whose bytes overlap: what an in-place write would be seen through."""
    spans = []
    locals_ = {path: local_of(tensor) for path, tensor in tensors.items()}  # held: some are made anew
    for path, local in locals_.items():
        if local.numel():
            last = sum((n - 1) * s for n, s in zip(local.shape, local.stride(), strict=True))
            start = local.data_ptr()
            spans.append((start, start + (last + 1) * local.element_size(), path))
    groups: list[list[str]] = []
    end = -1
    for start, stop, path in sorted(spans):
        if start >= end:
            groups.append([])
        groups[-1].append(path)
        end = max(end, stop)
    return sorted(tuple(sorted(group)) for group in groups if len(group) > 1)
