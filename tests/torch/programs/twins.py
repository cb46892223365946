"""A program, eager and captured, from the same state: everything that a caller
can see must be equal bit for bit, a NaN being equal to a NaN.

The caller is a hard one: it keeps every result, and between calls it writes to
what it was returned.
"""

import dataclasses
import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from oracle import overlaps
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .generate import Program, local_of

#: Two recordings each with and without gradients, then replays.
CALLS = 8

Facts = dict[str, Any]


@dataclasses.dataclass
class Outcome:
    """How a program went: `wrong` says what differs, eager's value first."""

    seed: int
    passes: str
    calls: int = 0
    replays: int = 0
    refusal: str = ""
    wrong: str = ""
    invalid: str = ""  # eager itself fails or differs from itself


def check(program: Program, mesh: DeviceMesh, passes: str) -> Outcome:
    """Runs the program eagerly and captured."""
    import rote

    outcome = Outcome(program.seed, passes, CALLS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = run(program, mesh, lambda fn, state: fn)
        except Exception as error:
            outcome.invalid = f"eager: {type(error).__name__}: {error}"
            return outcome
        steps: list[Any] = []

        def capture(fn: Callable[..., Any], state: Any) -> Any:
            steps.append(rote.capture(fn, state=state, passes=passes))
            return steps[0]

        try:
            found = run(program, mesh, capture)
        except Exception as error:
            outcome.wrong = f"eager works, captured: {type(error).__name__}: {error}"
            return outcome
    stats = steps[0].stats
    outcome.replays = stats.replays
    outcome.refusal = stats.refusals[0] if stats.refusals else ""
    outcome.wrong = compare(expected, found)
    return outcome


def compare(expected: list[Facts], found: list[Facts]) -> str:
    """The first call after which facts differ, and which."""
    for call, (want, got) in enumerate(zip(expected, found, strict=True)):
        wrong = differences(want, got)
        if wrong:
            return "\n".join(["at the end:" if call == CALLS else f"after call {call}:", *wrong[:6]])
    return ""


def run(program: Program, mesh: DeviceMesh, capture: Callable[..., Any]) -> list[Facts]:
    """What a caller sees after each call, and at the end."""
    functions = program.functions()
    state = functions["state"](mesh)
    step = capture(functions["captured"](mesh, state), state)
    seen: list[Facts] = []
    kept: list[Any] = []
    for call in range(CALLS):
        arguments = functions["arguments"](mesh, call, state)
        torch.manual_seed(call)
        results = step(*arguments)
        kept.append(results)
        seen.append(facts({"state": state, "argument": arguments, "result": results}))
        if call % 2:
            for result in results:
                scribble(result)
    seen.append(facts({"state": state, "kept": dict(enumerate(kept))}))
    return seen


def scribble(tensor: Tensor) -> None:
    """What a caller may do with a tensor that it was returned."""
    local = local_of(tensor)
    if any(stride == 0 for stride in local.stride()) or not local.numel():
        return
    if local.is_floating_point():
        local.mul_(0.5).add_(0.125)
    else:
        local.fill_(1)


def flat(tree: Any, path: str) -> Iterable[tuple[str, Any]]:
    if isinstance(tree, (dict, list, tuple)):
        items = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return itertools.chain.from_iterable(flat(value, f"{path}.{name}") for name, value in items)
    return [(path, tree)]


def facts(trees: dict[str, Any]) -> Facts:
    tensors: dict[str, Tensor] = {}
    values: Facts = {"generator": torch.get_rng_state()}
    for path, tensor in flat(trees, ""):
        tensors[path] = tensor
        if tensor.is_leaf and tensor.grad is not None:
            tensors[f"{path}.grad"] = tensor.grad
    for path, tensor in tensors.items():
        local = local_of(tensor)
        kind = Tensor if isinstance(tensor, AsyncCollectiveTensor) else type(tensor)
        placements = tensor.placements if isinstance(tensor, DTensor) else None
        values[f"{path} is"] = (kind, tensor.dtype, tensor.shape, tensor.stride(), placements, tensor.requires_grad)
        values[f"{path} lies"] = (local.shape, local.stride())
        values[path] = local.clone()
    values["aliases"] = overlaps(tensors)
    return values


def differences(expected: Facts, found: Facts) -> list[str]:
    return [
        f"  {name}: eager {show(expected.get(name))}, captured {show(found.get(name))}"
        for name in {**expected, **found}
        if not same(expected.get(name), found.get(name))
    ]


def same(expected: Any, found: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return False
        if torch.equal(expected, found):
            return not expected.is_floating_point() or torch.equal(expected.signbit(), found.signbit())
        if not expected.is_floating_point():
            return False
        nan = expected.isnan()
        return torch.equal(nan, found.isnan()) and same(expected[~nan], found[~nan]) if nan.any() else False
    return type(expected) is type(found) and bool(expected == found)


def show(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.dtype}{list(value.shape)} {value.flatten()[:8].tolist()}"
    return repr(value)


@functools.cache
def passes() -> tuple[str, ...]:
    """Settings that programs rotate through: the default, none, all, and every
    pass alone. Their names are those that the message about an unknown one lists."""
    import rote

    try:
        rote.capture(lambda: None, passes="?")()
    except RuntimeError as error:
        listed = re.search(r"names of (.+) with", str(error))
        assert listed, error
        return ("default", "none", *listed[1].split(", "), "all", "-arena")
    raise AssertionError("an unknown pass is taken")
