"""What an attack on `rote.propagation` found: integers, shards without elements, in-place forms that DTensor lacks, and
ops that DTensor itself takes apart."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import rote.propagation
import torch
import torch.nn.functional as F
from models import mesh
from sending import sent
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

aten = torch.ops.aten
R = Replicate()
LARGE = 2**40 + 1  # no float holds it
# Each rank's summand of a whole tensor, or the tensor itself.
Place = Callable[[Tensor, Placement], Tensor]
Call = Callable[[Place], Tensor]


def placed(whole: Tensor, placement: Placement) -> Tensor:
    if isinstance(placement, Partial):
        on_first = torch.distributed.get_rank() == 0
        local = whole.clone() if on_first else torch.zeros_like(whole)
        return DTensor.from_local(local, mesh(2), [placement], run_check=False)
    return distribute_tensor(whole.clone(), mesh(2), [placement], src_data_rank=None)


def whole(tensor: Tensor, _: Placement) -> Tensor:
    return tensor.clone()


def full(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def numbers() -> Tensor:
    return torch.tensor([1, 2, 7, LARGE])


def two_rows() -> Tensor:
    return torch.stack([numbers(), numbers() // 3])


# Without partial sums of integers, which PyTorch would make by a division.
INTEGERS: dict[str, Call] = {
    "where": lambda on: torch.where(on(numbers() > 2, R), on(numbers(), Partial()), on(numbers(), R)),
    "where of a number": lambda on: torch.where(on(numbers() > 2, R), on(numbers(), Partial()), 7),
    "addcmul": lambda on: torch.addcmul(on(numbers(), Partial()), on(numbers(), R), on(numbers() % 3, R)),
    "addmv": lambda on: torch.addmv(on(numbers()[:1], R), on(numbers().view(1, 4), Shard(1)), on(numbers(), Shard(0))),
    "scatter_add": lambda on: torch.scatter_add(
        on(torch.zeros(4, dtype=torch.int64), R),
        0,
        on(torch.tensor([0, 0, 1, 3]), Shard(0)),
        on(torch.ones(4, dtype=torch.int64), Shard(0)),
    ),
    "index_add": lambda on: torch.index_add(
        on(numbers(), R), 0, on(torch.tensor([0, 0, 1, 3]), Shard(0)), on(numbers(), Shard(0))
    ),
    "select_scatter": lambda on: torch.select_scatter(on(two_rows(), Partial()), on(numbers() + 4, R), 0, 1),
    "slice_scatter": lambda on: torch.slice_scatter(on(two_rows(), Partial()), on(two_rows()[:1], R), 0, 1),
    "diagonal_scatter": lambda on: torch.diagonal_scatter(on(two_rows(), Partial()), on(numbers()[2:], R)),
    "masked_fill": lambda on: on(numbers(), Partial()).masked_fill(on(numbers() > 2, R), on(torch.tensor(5), R)),
    "add": lambda on: on(numbers(), Partial()) + on(numbers(), R),
    "cat": lambda on: torch.cat([on(numbers(), Partial()), on(numbers(), R)]),
    "stack": lambda on: torch.stack([on(numbers(), Partial()), on(numbers(), R)]),
    "any, of truth values": lambda on: torch.where(on(numbers() > 2, R), on(numbers() > 1, R), on(numbers() > 8, R)),
}


def pairs() -> Tensor:
    return torch.complex(floats(4, 3), floats(4, 3).flip(0))


# Collectives refuse tensors that are conjugated where they are read.
CONJUGATED: dict[str, Call] = {
    "mm": lambda on: on(pairs(), Partial()) @ on(pairs(), Partial()).mH,
    "sum": lambda on: on(pairs(), Partial()).conj().sum(0).resolve_conj(),
    "exp": lambda on: on(pairs(), Partial()).conj().exp(),
    "cov": lambda on: torch.cov(on(pairs(), Partial())),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CONJUGATED)
def test_the_best_reduces_before_it_conjugates(name: str) -> None:
    expected = CONJUGATED[name](whole)
    with rote.propagation.install("best"):
        found = full(CONJUGATED[name](placed))
    torch.testing.assert_close(found.resolve_conj(), expected.resolve_conj())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", INTEGERS)
def test_the_best_keeps_integers(name: str) -> None:
    expected = INTEGERS[name](whole)
    with rote.propagation.install("best"):
        found = INTEGERS[name](placed)
    assert rote.propagation.stats().answered > 0
    assert found.dtype == expected.dtype
    assert torch.equal(full(found), expected)


def floats(*shape: int) -> Tensor:
    torch.manual_seed(0)
    return torch.rand(*shape)


IN_PLACE: dict[str, Callable[[Tensor, Place], Any]] = {
    "scatter_reduce_": lambda x, on: x.scatter_reduce_(
        0, on(torch.tensor([[0, 1, 1, 0]]), R), on(floats(1, 4), R), "amax"
    ),
    "renorm_": lambda x, on: x.renorm_(1, 0, 0.5),
    "unsqueeze_": lambda x, on: x.unsqueeze_(0),
    "transpose_": lambda x, on: x.transpose_(0, 1),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Partial()])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_tensor_written_in_place_stays_whole(name: str, placement: Placement) -> None:
    """DTensor refuses these: Rote's answers about parts of them must not make it go on halfway."""
    x, expected = placed(floats(6, 4), placement), floats(6, 4)
    assert isinstance(x, DTensor)
    with rote.propagation.install("best"), contextlib.suppress(NotImplementedError, RuntimeError):
        IN_PLACE[name](x, placed)
        IN_PLACE[name](expected, whole)
    assert x.placements == (placement,)
    local = list(expected.shape)
    if isinstance(placement, Shard):
        local[placement.dim] //= 2
    assert list(x.to_local().shape) == local
    assert torch.equal(x.full_tensor(), expected)


# What DTensor chooses; "same" chooses it too.
CHOSEN: dict[str, Call] = {
    "index_copy": lambda on: torch.index_copy(
        on(floats(4, 4), R), 1, on(torch.arange(4), R), on(floats(4, 4), Shard(0))
    ),
    "cross": lambda on: torch.linalg.cross(on(floats(1, 3), R), on(floats(5, 3), Shard(0))),
    "pool an empty shard": lambda on: F.avg_pool2d(on(floats(1, 3, 9, 9), Shard(0)), 3, 1, 1),
    "cast to complex": lambda on: on(floats(4), Partial()).to(torch.complex64),
    "add integers": lambda on: on(numbers() % 9, Partial()) + on(numbers() % 9, R),
    "stack integers": lambda on: torch.stack([on(numbers() % 9, Partial()), on(numbers() % 9, R)]),
    "expand": lambda on: on(torch.tensor(1.0), R).expand(1, 1),
    "split nothing": lambda on: torch.split(on(floats(0, 4), Shard(0)), 2, 1)[0],
    "shift": lambda on: on(numbers(), Shard(0)) << 1,
}


def described(tensor: Tensor) -> Any:
    assert isinstance(tensor, DTensor)
    local = tensor.to_local()
    return tensor.placements, tensor.shape, tensor.stride(), tensor.dtype, local.dtype, local.tolist()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CHOSEN)
def test_the_same_is_what_dtensor_chooses(name: str) -> None:
    expected = described(CHOSEN[name](placed))
    with rote.propagation.install("same"):
        assert described(CHOSEN[name](placed)) == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("lookup", ["gather", "embedding"])
def test_a_rank_without_rows_looks_nothing_up(lookup: str) -> None:
    def looked_up(on: Place) -> Tensor:
        if lookup == "embedding":
            return F.embedding(on(torch.tensor([0, 0, 0, 0, 0]), R), on(floats(1, 4), Shard(0)))
        return torch.gather(on(floats(1, 4), Shard(0)), 0, on(torch.tensor([[0, 0, 0, 0]]), R))

    with rote.propagation.install("best"):
        found = looked_up(placed)
    assert torch.equal(full(found), looked_up(whole))


BACKWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "hardtanh": lambda grad, x: aten.hardtanh_backward(grad, x, 0.0, 6.0),
    "hardsigmoid": lambda grad, x: aten.hardsigmoid_backward(grad, x),
    "softshrink": lambda grad, x: aten.softshrink_backward(grad, x, 0.5),
    "hardshrink": lambda grad, x: aten.hardshrink_backward(grad, x, 0.5),
    "softplus": lambda grad, x: aten.softplus_backward(grad, x, 1.0, 20.0),
    "hardswish": lambda grad, x: aten.hardswish_backward(grad, x),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BACKWARDS)
def test_gradients_of_activations_stay_sharded(name: str) -> None:
    """Composite ops inside a decomposition are taken apart in a dispatch as elsewhere."""
    grad, x = floats(8, 4), torch.randn(8, 4)
    with rote.propagation.install("best"), sent() as counted:
        found = BACKWARDS[name](placed(grad, Shard(0)), placed(x, Shard(0)))
    assert isinstance(found, DTensor)
    assert found.placements == (Shard(0),)
    assert not counted
    assert torch.equal(found.full_tensor(), BACKWARDS[name](grad, x))


POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "avg_pool1d": lambda x: F.avg_pool1d(x[..., 0], 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool2d, divided": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
    "avg_pool3d": lambda x: F.avg_pool3d(x, 2),
    "lp_pool2d": lambda x: F.lp_pool2d(x, 2.0, 2),
    "adaptive_max_pool2d": lambda x: F.adaptive_max_pool2d(x, 3),
    "adaptive_avg_pool2d": lambda x: F.adaptive_avg_pool2d(x, 3),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("placement", [Shard(0), Shard(1), R])
@pytest.mark.parametrize("name", POOLS)
def test_gradients_of_pools(name: str, placement: Placement) -> None:
    """DTensor has no rule for some of these. An argument that may be none is left out at the end."""
    one, other = floats(4, 6, 8, 8).requires_grad_(), placed(floats(4, 6, 8, 8), placement).requires_grad_()
    POOLS[name](one).pow(2).sum().backward()
    with rote.propagation.install("best"):
        POOLS[name](other).pow(2).sum().backward()
    assert other.grad is not None
    torch.testing.assert_close(full(other.grad), one.grad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.int64, torch.float64])
def test_a_result_has_the_dtype_of_what_it_is_written_to(dtype: torch.dtype) -> None:
    out = placed(torch.ones(4, 4, dtype=dtype), R)
    with rote.propagation.install("best"):
        made = torch.zeros((4, 4), out=out)
    assert isinstance(made, DTensor)
    assert made._spec.tensor_meta is not None
    assert made.dtype == made._spec.tensor_meta.dtype == made.to_local().dtype == dtype


@pytest.mark.ranks(2)
def test_a_division_of_integers_is_warned_of() -> None:
    """DTensor adds a replicated tensor of integers to a partial one in floats."""
    with rote.propagation.install("same"):
        partial, other = placed(numbers() % 9, Partial()), placed(numbers() % 9, R)
        with pytest.warns(
            RuntimeWarning, match=r"test_odd_answers.*divides tensor 1, of integers.*tensor 0 of the call"
        ):
            found = partial + other
        counted = rote.propagation.stats().refuted
    assert found.dtype == torch.float32
    assert sum(counted.values()) == 1
