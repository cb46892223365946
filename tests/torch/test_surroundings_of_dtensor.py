"""Context managers and registrations of DTensor around the calls of a captured step."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from test_failures import attempt
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import loss_parallel

CALLS, FROM, TO = 16, 6, 11


def check(around: Callable[[], Any], prepare: Callable[[], tuple[Callable[..., Any], Any]]) -> None:
    """Calls in the midst are made within ``around()``."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        fn, state = prepare()
        step = capture(fn, state=state)
        for call in range(CALLS):
            x = torch.arange(16.0).view(4, 4) + call
            with around() if FROM <= call < TO else contextlib.nullcontext():
                yield attempt(lambda: step(x))  # noqa: B023
        return {}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert run.stats[FROM - 1][0].replays, run.stats[-1][0]


@pytest.mark.ranks(2)
def test_loss_parallel() -> None:
    def prepare() -> tuple[Callable[..., Any], Any]:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)]))

        def step(x: Tensor) -> Any:
            weight.grad = None
            logits = DTensor.from_local(x, mesh, [Replicate()], run_check=False) @ weight
            nn.functional.log_softmax(logits, -1).sum().backward()
            return weight.grad.to_local().clone()  # type: ignore[union-attr]

        return step, weight

    check(loss_parallel, prepare)


@pytest.mark.ranks(4)
def test_current_mesh() -> None:
    def script(capture: Capture) -> Calls:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        meshes = [mesh["rows"], mesh["columns"]]
        weight = torch.full((4, 4), float(dist.get_rank() + 1))

        def total(x: Tensor) -> Any:
            return DTensor.from_local(x * weight, None, [Shard(0)]).sum().full_tensor()

        step = capture(total, state=weight)
        for call in range(CALLS):
            with meshes[FROM <= call < TO]:
                yield step(torch.arange(16.0).view(4, 4) + call)
        return {}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert run.stats[FROM - 1][0].replays, run.stats[-1][0]


@pytest.mark.ranks(2)
def test_implicit_replication() -> None:
    def prepare() -> tuple[Callable[..., Any], Any]:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])

        def step(x: Tensor) -> Any:
            return (weight * 2 + (x if torch._C._get_dtensor_allow_implicit_replication() else 1)).to_local()

        return step, weight

    check(implicit_replication, prepare)
