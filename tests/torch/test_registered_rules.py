"""Sharding rules that a script registers with `rote.propagation.register`, or has registered with PyTorch.

The numbers of the results are those of the op on the whole tensors. What Rote refuses, DTensor answers or refuses.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import rote
import rote.propagation
import torch
from models import mesh
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Placement

ROWS = [
    [_ShardingPlaceholder(0), _ShardingPlaceholder(0), _ShardingPlaceholder(0)],
    [_ShardingPlaceholder(1), _ShardingPlaceholder(1), Replicate()],
    [Partial(), Partial(), Replicate()],
]


@torch.library.custom_op("rote_rules::scaled_rows", mutates_args=())
def scaled_rows(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale[:, None]


@scaled_rows.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("rote_rules::summed", mutates_args=())
def summed(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim)


@summed.register_fake
def _(x: Tensor, dim: int) -> Tensor:
    return x.sum(dim)


@torch.library.custom_op("rote_rules::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 0)


@twice.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2 * x.shape[0], *x.shape[1:])


@torch.library.custom_op("rote_rules::moments", mutates_args=())
def moments(tensors: list[Tensor], weight: float = 1.0) -> tuple[Tensor, Tensor]:
    whole = torch.stack(tensors).sum(0)
    return weight * whole, weight * whole.square()


@moments.register_fake
def _(tensors: list[Tensor], weight: float = 1.0) -> tuple[Tensor, Tensor]:
    return torch.empty_like(tensors[0]), torch.empty_like(tensors[0])


@torch.library.custom_op("rote_rules::double_", mutates_args=("x",))
def double_(x: Tensor, by: Tensor) -> None:
    x.mul_(by)


OPS = torch.ops.rote_rules


@contextmanager
def rule(op: Any, function: Callable[..., Any], **options: Any) -> Iterator[None]:
    rote.propagation.register(op, function, **options)
    try:
        yield
    finally:
        rote.propagation.unregister(op)


def answered(op: str) -> None:
    """Fails if DTensor had to answer a question about an op."""
    handed_on = {reason for (asked, reason) in rote.propagation.stats().handed_on if asked == op}
    assert not handed_on, handed_on


def distributed(whole: Tensor, placements: Sequence[Placement], on: Any) -> DTensor:
    """A tensor that lies so; its parts are unequal where it is partial."""
    laid = [Replicate() if placement.is_partial() else placement for placement in placements]
    local = distribute_tensor(whole, on, laid).to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            ranks = on.size(dim)
            rank = on.get_local_rank(dim)
            weight = 0.25 if rank > 0 else 1 - 0.25 * (ranks - 1)
            local = weight * local
    return DTensor.from_local(local, on, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def check_scaled_rows(shape: tuple[int, ...], policy: Any) -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(8, 6), torch.randn(8)
    on = mesh(*shape)
    with rule(OPS.scaled_rows.default, lambda x, scale: ROWS), rote.propagation.install(policy):
        for of_x in itertools.product([Replicate(), Shard(0), Shard(1), Partial()], repeat=len(shape)):
            for of_scale in itertools.product([Replicate(), Shard(0)], repeat=len(shape)):
                made = OPS.scaled_rows(distributed(x, of_x, on), distributed(scale, of_scale, on))
                torch.testing.assert_close(made.full_tensor(), scaled_rows(x, scale), msg=f"{of_x} {of_scale}")
        answered("rote_rules::scaled_rows")
        assert made.placements == (Partial(),) * len(shape)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("policy", ["same", "best"])
def test_answers_on_two_ranks(policy: str) -> None:
    check_scaled_rows((2,), policy)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_answers_on_four_ranks(shape: tuple[int, ...]) -> None:
    check_scaled_rows(shape, "best")
