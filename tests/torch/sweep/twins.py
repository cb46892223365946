"""One call, eager and captured, with the same data: whatever a caller can see must be equal bit for bit."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .layouts import laid_out
from .samples import Case

Facts = dict[str, Any]


@dataclasses.dataclass
class Outcome:
    name: str
    calls: int = 0
    replays: int = 0
    refusal: str = ""
    wrong: str = ""
    invalid: str = ""  # eager itself fails, or differs from itself


def step_of(case: Case, cotangents: list[list[Tensor]]) -> Callable[..., Any]:
    call, inside = case.call, case.inside

    def prepared(tensors: Any) -> Any:
        if not inside:
            return tensors
        made = []
        for tensor in tensors:
            strided = tensor.layout is torch.strided and not tensor.is_quantized
            made.append(tensor.clone() if strided else tensor)
        return made

    def forward(tensors: Any, *_: Any) -> Any:
        results = pytree.tree_leaves(call(*prepared(tensors)))
        if not inside:
            return results
        return results, [result.clone() if isinstance(result, Tensor) else result for result in results]

    def backward(tensors: Any, given: Any, _: Any) -> Any:
        results = pytree.tree_leaves(call(*prepared(tensors)))
        ends, ways = [], []
        for result in results:
            if isinstance(result, Tensor) and result.requires_grad:
                ends.append(result)
                ways.append(given[len(ways)])
        leaves = [t for t in tensors if t.requires_grad]
        found = torch.autograd.grad(ends, leaves, ways, allow_unused=True) if ends else None
        return [r.detach() if isinstance(r, Tensor) else r for r in results], found

    step = backward if case.backward and cotangents else forward

    def handling(tensors: Any, given: Any, counter: Tensor) -> Any:
        counter.add_(1)
        try:
            return step(tensors, given, counter)
        except Exception as error:
            return type(error).__name__, counter * 2

    return handling if case.handled else step


def arguments_of(case: Case, tensors: list[Tensor], keep_grad: bool) -> list[Tensor]:
    made = [laid_out(t, case.layout) for t in tensors]
    if not keep_grad:
        made = [t.detach() for t in made]
    if case.twice:
        first: dict[str, Tensor] = {}
        made = [
            first.setdefault(f"{t.dtype}{t.shape}{t.stride() if t.layout is torch.strided else 0}", t) for t in made
        ]
    return made


def cotangents_of(case: Case) -> list[list[Tensor]]:
    """Gradients of the results for a backward pass, one set for each set of tensors."""
    results = pytree.tree_leaves(case.call(*arguments_of(case, case.data[0], True)))
    ends = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if any(end.layout is not torch.strided for end in ends):
        return []
    generator = torch.Generator().manual_seed(11)
    return (
        [[torch.randn(end.shape, dtype=end.dtype, generator=generator) for end in ends] for _ in case.data]
        if ends
        else []
    )


def run(case: Case, step: Callable[..., Any], cotangents: list[list[Tensor]]) -> list[Facts]:
    """What a caller sees of each call: twice the first data, then the first again, the others, and the first."""
    seen = []
    counter = torch.zeros(())
    order = [0, 0, 0, *range(1, len(case.data)), 0, *range(1, len(case.data))]
    for number, which in enumerate(order):
        tensors = arguments_of(case, case.data[which], bool(case.backward and cotangents))
        given = [t.clone() for t in cotangents[which]] if cotangents else []
        torch.manual_seed(number)
        error = ""
        results: Any = None
        try:
            results = step(tensors, given, counter)
        except Exception as raised:
            error = type(raised).__name__ + ": " + str(raised).split("\n")[0]
        seen.append(
            facts(
                {
                    "error": error,
                    "result": results,
                    "argument": tensors,
                    "rng": torch.get_rng_state(),
                    "counter": counter,
                }
            )
        )
    return seen


def facts(tree: Any) -> Facts:
    found: Facts = {}
    for path, leaf in pytree.tree_leaves_with_path(tree):
        name = pytree.keystr(path)
        if isinstance(leaf, Tensor):
            tensor = leaf.detach()
            found[name] = [str(tensor.dtype), tuple(tensor.shape), str(tensor.layout)]
            if tensor.is_quantized:
                found[f"{name}.bits"] = bits(tensor.int_repr())
            elif tensor.layout is torch.strided:
                found[name].append(tensor.stride())
                found[f"{name}.bits"] = bits(tensor.resolve_conj().resolve_neg())
            elif tensor.layout is not torch.sparse_coo:
                found[f"{name}.bits"] = bits(tensor.to_dense())
            else:
                found[f"{name}.bits"] = bits(tensor._values())
                found[f"{name}.indices"] = bits(tensor._indices())
        else:
            found[name] = (type(leaf), repr(leaf))
    return found


def bits(tensor: Tensor) -> Tensor:
    # The tensor may be used later on by what it shares memory with.
    dense = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return dense.copy_(tensor.detach().reshape(-1)).view(torch.uint8)


def same(expected: Any, found: Any) -> bool:
    if isinstance(expected, Tensor) and isinstance(found, Tensor):
        return torch.equal(expected, found)
    return type(expected) is type(found) and bool(expected == found)


def difference(expected: list[Facts], found: list[Facts]) -> str:
    for number, (want, got) in enumerate(zip(expected, found, strict=True)):
        wrong = [
            f"{name}: {show(want.get(name))} in eager, {show(got.get(name))} captured"
            for name in {**want, **got}
            if not same(want.get(name), got.get(name))
        ]
        if wrong:
            return f"call {number}: " + "; ".join(wrong[:3])
    return ""


def show(value: Any) -> str:
    return repr(value[:16].tolist()) if isinstance(value, Tensor) else repr(value)[:300]


def check(case: Case, passes: str) -> Outcome:
    import rote

    outcome = Outcome(f"{case.name}, {passes}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            cotangents = cotangents_of(case) if case.backward else []
            step = step_of(case, cotangents)
            expected = run(case, step, cotangents)
            error = expected[0]["['error']"][1]
            if error != "''":
                outcome.invalid = f"eager: {error}"
                return outcome
            again = run(case, step, cotangents)
        except Exception as error:
            outcome.invalid = f"eager: {type(error).__name__}: {error}"
            return outcome
        differs = difference(expected, again)
        if differs:
            outcome.invalid = f"eager differs from eager: {differs}"
            return outcome
        captured = rote.capture(step, passes=passes)
        try:
            found = run(case, captured, cotangents)
        except Exception as error:
            outcome.wrong = f"{type(error).__name__}: {error}"
            return outcome
    stats = captured.stats
    outcome.calls = stats.calls
    outcome.replays = stats.replays
    outcome.refusal = stats.refusals[0] if stats.refusals else ""
    outcome.wrong = difference(expected, found)
    if outcome.wrong and not stats.replays and "comes from an allocation (empty)" in outcome.refusal:
        outcome.invalid, outcome.wrong = "eager leaves memory as it was", ""
    return outcome
