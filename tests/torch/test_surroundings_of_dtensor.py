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


Prepared = tuple[Callable[[Tensor], Any], Any, Callable[[bool], Any]]


def check(prepare: Callable[[], Prepared]) -> None:
    """``prepare`` gives a step, its state, and what is around a call: calls in the midst have something else."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        fn, state, around = prepare()
        step = capture(fn, state=state)
        for call in range(CALLS):
            x = torch.arange(16.0).view(4, 4) + call
            with around(FROM <= call < TO):
                yield attempt(lambda: step(x))  # noqa: B023
        return {}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert run.stats[FROM - 1][0].replays, run.stats[-1][0]


def in_the_midst(context: Callable[[], Any]) -> Callable[[bool], Any]:
    return lambda midst: context() if midst else contextlib.nullcontext()


@pytest.mark.ranks(2)
def test_loss_parallel() -> None:
    def prepare() -> Prepared:
        mesh = init_device_mesh("cpu", (2,))
        weight = nn.Parameter(distribute_tensor(torch.randn(4, 4), mesh, [Shard(1)]))

        def step(x: Tensor) -> Any:
            weight.grad = None
            logits = DTensor.from_local(x, mesh, [Replicate()], run_check=False) @ weight
            nn.functional.log_softmax(logits, -1).sum().backward()
            return weight.grad.to_local().clone()  # type: ignore[union-attr]

        return step, weight, in_the_midst(loss_parallel)

    check(prepare)


@pytest.mark.ranks(4)
def test_current_mesh() -> None:
    def prepare() -> Prepared:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rows", "columns"))
        meshes = [mesh["rows"], mesh["columns"]]
        weight = torch.full((4, 4), float(dist.get_rank() + 1))

        def step(x: Tensor) -> Any:
            return DTensor.from_local(x * weight, None, [Shard(0)]).sum().full_tensor()

        return step, weight, lambda midst: meshes[midst]

    check(prepare)


@pytest.mark.ranks(2)
def test_implicit_replication() -> None:
    def prepare() -> Prepared:
        mesh = init_device_mesh("cpu", (2,))
        weight = distribute_tensor(torch.randn(4, 4), mesh, [Replicate()])

        def step(x: Tensor) -> Any:
            return (weight * 2 + (x if torch._C._get_dtensor_allow_implicit_replication() else 1)).to_local()

        return step, weight, in_the_midst(implicit_replication)

    check(prepare)
