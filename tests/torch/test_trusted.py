"""With `trust_plans=True` a plan is replayed at once: only for a step that is what it was when the plan was stored.

`test_state_sweep.py` has the values; these are the things that values do not tell.
"""

import decimal
import functools
import operator
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn

CALLS = 6
Build = Callable[[int], tuple[Callable[[Tensor], Any], Any]]  # a step and its state; in two ways

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="about stored plans")


def linears() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def modules_in_a_list(way: int) -> Any:
    model = nn.Module()
    model.a, model.b = linears()
    model.order = [model.a, model.b] if way == 0 else [model.b, model.a]
    return lambda x: model.order[0](model.order[1](x)).detach(), model


def modules_in_a_dict(way: int) -> Any:
    a, b = linears()
    named = {"first": a, "second": b} if way == 0 else {"first": b, "second": a}
    return lambda x: named["first"](named["second"](x)).detach(), {"a": a, "b": b}


def tensors(way: int, hold: Callable[[Tensor, Tensor], Callable[[], tuple[Tensor, Tensor]]]) -> Any:
    a, b = torch.ones(4, 4), torch.full((4, 4), 2.0)
    both = hold(a, b) if way == 0 else hold(b, a)

    def step(x: Tensor) -> Tensor:
        first, second = both()
        first.add_(second * 0.1)
        return x * first

    return step, {"a": a, "b": b}


def in_defaults(first: Tensor, second: Tensor) -> Any:
    return lambda p=first, q=second: (p, q)


def in_keywords(first: Tensor, second: Tensor) -> Any:
    def both(*, p: Tensor = first, q: Tensor = second) -> tuple[Tensor, Tensor]:
        return p, q

    return both


class Held:
    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def both(self) -> tuple[Tensor, Tensor]:
        return self.first, self.second


HOLDING: dict[str, Any] = {
    "a closure": lambda p, q: lambda: (p, q),
    "a list": lambda p, q: functools.partial(tuple, [p, q]),
    "a tuple": lambda p, q: functools.partial(lambda both: both, (p, q)),
    "a partial": lambda p, q: functools.partial(lambda one, other: (one, other), p, other=q),
    "an object": lambda p, q: Held(p, q).both,
    "defaults": in_defaults,
    "keywords": in_keywords,
}


def overlap(way: int) -> Any:
    flat = torch.arange(8.0)
    a, b = flat[:4], flat[4:] if way == 0 else flat[2:6]

    def step(x: Tensor) -> Tensor:
        a.add_(1)
        return x[0] * b

    return step, [a, b]


def gradient_that_requires_one(way: int) -> Any:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4, requires_grad=way == 1)

    def step(x: Tensor) -> Any:
        assert weight.grad is not None
        (weight * x[0] + weight.grad.square() * weight).sum().backward()
        return weight.grad.detach().clone(), weight.grad.grad if weight.grad.is_leaf else None

    return step, weight


def held(first: Any, second: Any, use: Callable[[Any, Tensor], Any]) -> Build:
    def build(way: int) -> Any:
        things = {"it": [first, second][way]}
        return lambda x: use(things["it"], x), None

    return build


CASES: dict[str, Build] = {
    "modules in a list": modules_in_a_list,
    "modules in a dict": modules_in_a_dict,
    **{f"tensors in {name}": functools.partial(tensors, hold=hold) for name, hold in HOLDING.items()},
    "overlap": overlap,
    "gradient": gradient_that_requires_one,
    "function of torch": held(torch.relu, torch.tanh, lambda f, x: f(x)),
    "method of Tensor": held(Tensor.relu, Tensor.tanh, lambda f, x: f(x)),
    "op": held(torch.ops.aten.relu.default, torch.ops.aten.tanh.default, lambda f, x: f(x)),
    "packet": held(torch.ops.aten.relu, torch.ops.aten.tanh, lambda f, x: f(x)),
    "operator": held(operator.add, operator.mul, lambda f, x: f(x, 3)),
    "decimal": held(decimal.Decimal("1.5"), decimal.Decimal("2.5"), lambda d, x: x * float(d)),
    "slice": held(slice(0, 2), slice(1, 3), lambda s, x: x[s]),
    "method": held("ab".upper, "cd".upper, lambda f, x: x * ord(f()[0])),
}


@pytest.mark.parametrize("name", CASES)
def test_another_step_is_recorded(name: str, tmp_path: Path) -> None:
    def script(capture: Capture, way: int) -> Calls:
        fn, state = CASES[name](way)
        step = capture(fn, state=state, plans=tmp_path, trust_plans=True)
        for call in range(CALLS):
            yield step(torch.arange(16.0).view(4, 4) + call)
        return {}

    first = check_right(functools.partial(script, way=0))
    assert first.stats[-1][0].replays, first.stats[-1][0]
    check_right(functools.partial(script, way=1))
    again = check_right(functools.partial(script, way=0))
    assert again.stats[-1][0].replays == CALLS, again.stats[-1][0]


HASHES = """
import sys, torch, rote
scales = {name: torch.tensor(1.0 + i) for i, name in enumerate(("alpha", "beta", "gamma", "delta"))}
of_names = frozenset(scales)

def literal(x):
    for name in {"alpha", "beta", "gamma", "delta"}:
        x = x * 3 + scales[name]
    return x

def built(x):
    for name in of_names:
        x = x * 3 + scales[name]
    return x

def hashed(x):
    return x * (hash("alpha") % 1000)

def member(x):
    return x * 2 if "alpha" in {"alpha", "beta"} else x

step = {"literal": literal, "built": built, "hashed": hashed, "member": member}[sys.argv[1]]
captured = rote.capture(step, state=list(scales.values()), plans=sys.argv[2], trust_plans=True)
x = torch.ones(2)
assert all(torch.equal(captured(x), step(x)) for _ in range(5)), "differs"
print(captured.stats.recordings)
"""


@pytest.mark.parametrize("step", ["literal", "built", "hashed", "member"])
def test_hashes_of_another_process(step: str, tmp_path: Path) -> None:
    recordings = []
    for seed in range(1, 4):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        done = subprocess.run(
            [sys.executable, "-c", HASHES, step, str(tmp_path)], env=environment, capture_output=True, text=True
        )
        assert not done.returncode, done.stderr
        recordings.append(int(done.stdout))
    assert recordings[-1] == 0 if step == "member" else recordings[-1] > 0, recordings
