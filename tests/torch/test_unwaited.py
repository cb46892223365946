"""Results of collectives that nobody has waited for when a captured step is called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import Calls, Capture, check_right, over
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CALLS = 12
SHAPE = (400, 800)


def drawn(call: int) -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(100 * call + dist.get_rank()))


def reduced(x: Tensor) -> Any:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def in_a_dtensor(x: Tensor) -> Any:
    return DTensor.from_local(reduced(x), init_device_mesh("cpu", (2,)), [Replicate()], run_check=False)


def redistributed(x: Tensor) -> Any:
    sharded = DTensor.from_local(x, init_device_mesh("cpu", (2,)), [Shard(0)], run_check=False)
    return sharded.redistribute(placements=[Replicate()], async_op=True)


ARGUMENTS: dict[str, Callable[[Tensor], Any]] = {
    "all_reduce": reduced,
    "all_gather": lambda x: funcol.all_gather_tensor(x, 0, dist.group.WORLD),
    "reduce_scatter": lambda x: funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD),
    "in a dict": lambda x: {"a": reduced(x)},
    "in a list": lambda x: [x, reduced(x)],
    "in a DTensor": in_a_dtensor,
    "redistributed": redistributed,
    "a number": lambda x: reduced(x.sum()),
}


def total(given: Any) -> Tensor:
    if isinstance(given, dict | list):
        return sum(map(total, given.values() if isinstance(given, dict) else given), torch.zeros(()))
    local = given.to_local() if isinstance(given, DTensor) else given
    return (local * 3).sum()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_argument(kind: str) -> None:
    check_right(
        lambda capture: over(capture, total, ((ARGUMENTS[kind](drawn(call)),) for call in range(CALLS))),
        replays=CALLS - 4,
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_gradient(momentum: float) -> None:
    """Averaged by hand, then a captured optimizer."""

    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.zeros(SHAPE))
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
        step = capture(lambda: optimizer.step(), state=[weight, optimizer])
        for call in range(CALLS):
            weight.grad = reduced(drawn(call))
            step()
            yield weight.detach().clone()
        return {}

    check_right(script, replays=CALLS - 6)


@pytest.mark.ranks(2)
def test_output_of_an_eager_parallel_module() -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        model = parallelize_module(
            model, init_device_mesh("cpu", (2,)), {"0": ColwiseParallel(), "2": RowwiseParallel()}
        )
        step = capture(lambda found, target: (found - target).square().sum())
        for call in range(CALLS):
            with torch.no_grad():
                found = model(torch.full((4000, 8), float(call)))
            yield step(found, torch.ones(4000, 8))
        return {}

    check_right(script, replays=CALLS - 4)
