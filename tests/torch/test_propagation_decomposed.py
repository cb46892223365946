"""Ops without a rule, answered by PyTorch's decompositions with policy "best".

The numbers of the results are those of the op on the whole tensors.
"""

from typing import Any

import pytest
import rote.propagation
import torch
from models import mesh
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

ATEN = torch.ops.aten


def answered_alike(op: Any, args: tuple[Any, ...], on: Any, placements: Any) -> list[Any]:
    """Fails if Rote does not answer an op by its decomposition, or the results are wrong. Tensors without dims are
    replicated. Returns the placements of the results."""

    def placed(arg: Any) -> Any:
        if not isinstance(arg, Tensor):
            return arg
        whole = [Replicate()] * on.ndim
        return distribute_tensor(arg, on, placements if arg.ndim else whole)

    expected = op(*args)
    with rote.propagation.install("best"):
        made = op(*map(placed, args))
        decomposed = rote.propagation.stats().decomposed
    name = op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")
    assert decomposed == {name: 1}, rote.propagation.stats()
    pairs = [(made, expected)] if isinstance(made, DTensor) else list(zip(made, expected, strict=True))
    for ours, whole in pairs:
        torch.testing.assert_close(ours.full_tensor(), whole)
    return [ours.placements for ours, _ in pairs]


@pytest.mark.ranks(2)
def test_a_mean_is_not_taken_of_shards() -> None:
    """The gradient of a mean is divided by the number of elements: the local op would divide by those of its shard.
    Each answer is for one reduction."""
    torch.manual_seed(0)
    x, y, gradient = torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 4)
    for reduction, expected in [(0, Shard(0)), (1, Replicate()), (2, Shard(0)), (1, Replicate())]:
        args = (gradient if reduction == 0 else gradient.sum(), x, y, reduction)
        (found,) = answered_alike(ATEN.mse_loss_backward.default, args, mesh(2), [Shard(0)])
        assert found == (expected,), reduction


@pytest.mark.ranks(2)
def test_shards_pass_through() -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    (found,) = answered_alike(ATEN.softplus_backward.default, (x, x + 1, 1.0, 20.0), mesh(2), [Shard(1)])
    assert found == (Shard(1),)


@pytest.mark.ranks(2)
def test_answers_differ_by_arguments_within_an_installation() -> None:
    """DTensor keeps answers: it must tell arguments apart that it knows nothing of."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    with rote.propagation.install("best"):
        placed = distribute_tensor(x, mesh(2), [Shard(0)])
        for dim in (1, 0, None, 1):
            for ours, whole in zip(ATEN.aminmax(placed, dim=dim), ATEN.aminmax(x, dim=dim), strict=True):
                torch.testing.assert_close(ours.full_tensor(), whole)
