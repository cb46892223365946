"""What `docs/guards.md` says that no guard sees, where `test_state_sweep.py` does not show it: a replay differs from
eager. One that is seen by now belongs into the tests of what is guarded."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import as_dtensor, mesh
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

CALLS = 8


class Named(torch.Tensor):
    """A subclass that changes nothing."""


def order_of_an_optimizers_state(capture: Capture) -> Calls:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(weights, 0.1, momentum=0.5)
    for weight in weights:
        optimizer.state[weight]["momentum_buffer"] = torch.ones(2)

    def step(x: Tensor) -> Tensor:
        first = next(iter(optimizer.state))
        optimizer.state[first] = optimizer.state.pop(first)
        return x * 2

    captured = capture(step, state=[*weights, optimizer])
    for _ in range(CALLS):
        yield captured(torch.ones(2)), [id(each) == id(weights[0]) for each in optimizer.state]
    return {}


def print_options(capture: Capture) -> Calls:
    def step(x: Tensor) -> Tensor:
        torch.set_printoptions(precision=2)
        return x * 2

    captured = capture(step)
    for call in range(CALLS):
        torch.set_printoptions(precision=4 + call % 2)
        yield captured(torch.ones(2)), str(torch.tensor(1.23456))
    torch.set_printoptions(profile="default")
    return {}


def class_of_an_argument(capture: Capture) -> Calls:
    def step(x: Tensor) -> Tensor:
        x.__class__ = Named
        return torch.Tensor.as_subclass(x, Tensor) * 2

    captured = capture(step)
    for _ in range(CALLS):
        x = torch.ones(2)
        yield captured(x), type(x).__name__
    return {}


def storage_by_its_address(capture: Capture) -> Calls:
    known = torch.ones(2)
    captured = capture(lambda x: x * (3 if x.untyped_storage()._cdata == address else 2))
    address = known.untyped_storage()._cdata
    for call in range(CALLS):
        yield captured(known if call == CALLS - 1 else torch.ones(2))
    return {}


def version_of_a_gradient(capture: Capture) -> Calls:
    weight = nn.Parameter(torch.ones(2))

    def step(x: Tensor) -> None:
        weight.grad = None
        (weight * x).sum().backward()
        weight.grad.mul_(2)

    captured = capture(step, state=[weight])
    for _ in range(CALLS):
        captured(torch.ones(2))
        yield weight.grad._version
    return {}


def kernel_of_autograd(capture: Capture) -> Calls:
    library = torch.library.Library(f"rote_out_of_sight_{id(capture)}", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x * 2, "CPU")
    twice = getattr(torch.ops, f"rote_out_of_sight_{id(capture)}").twice
    captured = capture(lambda x: twice(x))
    for call in range(CALLS):
        if call == CALLS - 1:
            library.impl("twice", lambda x: x * 3, "AutogradCPU")
        yield captured(torch.ones(2))
    return {}


def local_tensor_beside_its_dtensor(capture: Capture) -> Calls:
    def step(x: DTensor) -> tuple[DTensor, Tensor]:
        y = x * 2
        return y, y._local_tensor

    captured = capture(step)
    for _ in range(CALLS):
        y, local = captured(as_dtensor(torch.ones(4), mesh(1), Shard(0)))
        yield y._local_tensor is local
    return {}


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "script",
    [
        order_of_an_optimizers_state,
        print_options,
        class_of_an_argument,
        storage_by_its_address,
        version_of_a_gradient,
        kernel_of_autograd,
        local_tensor_beside_its_dtensor,
    ],
    ids=lambda script: script.__name__,
)
@pytest.mark.skipif(ORACLE_ONLY, reason="compares two ways of running")
def test_what_the_guide_calls_out_of_sight_is(script: Callable[[Capture], Any]) -> None:
    with pytest.raises(AssertionError, match="expected"):
        check_right(script)
