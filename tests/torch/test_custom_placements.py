"""Placements that a script registers with Rote: subclasses of `Shard`, and tensors that lie so, on gloo ranks.

What `RaggedShard` gives is compared with the op on whole tensors, and training with a single device's.
"""

import copy
import functools
import itertools
import pickle
import random
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import ragged_shard
import rote
import rote.propagation
import torch
import torch.nn.functional as F
from models import mesh
from oracle import IS_TESTED
from ragged_shard import RaggedShard
from torch import Tensor, nn
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import Placement, _StridedShard

aten = torch.ops.aten
ROWS = RaggedShard(0, (1, 3))
# DTensor squeezes in a way of its own, and makes masks of tables that are split.
HANDED_ON = {
    "a placement of the script's own beside a strided shard",
    "a masked partial of a table that is not split",
    "the arguments of the local op differ",
}
UNITS = {2: ((1, 3), (2, 1), (3, 1)), 4: ((1, 3, 2, 2), (1, 1, 4, 2), (2, 0, 1, 1))}


@contextmanager
def registered(indices: Callable[..., Any] = ragged_shard.indices, **options: Any) -> Iterator[None]:
    rote.propagation.register_sharding(RaggedShard, indices=indices, parameters=("units",), **options)
    try:
        yield
    finally:
        rote.propagation.unregister_sharding(RaggedShard)


def laid(whole: Tensor, placements: Sequence[Placement], on: Any) -> DTensor:
    """A tensor that lies so; its parts are unequal where it is partial."""
    plain = [Replicate() if placement.is_partial() else placement for placement in placements]
    made = distribute_tensor(whole, on, [Replicate()] * on.ndim).redistribute(placements=plain)
    local = made.to_local()
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            local = (0.25 if on.get_local_rank(dim) > 0 else 1 - 0.25 * (on.size(dim) - 1)) * local
    return DTensor.from_local(local, on, placements, run_check=False, shape=whole.shape, stride=whole.stride())


def held(whole: Tensor, placements: Sequence[Placement], on: Any) -> Tensor:
    """What this rank holds of a tensor that lies in shards, by `indices`."""
    for m, placement in enumerate(placements):
        if isinstance(placement, RaggedShard):
            rows = ragged_shard.indices(placement, whole.shape[placement.dim], on.size(m))[on.get_local_rank(m)]
            whole = whole.index_select(placement.dim, torch.tensor(list(rows), dtype=torch.int64))
        elif isinstance(placement, _StridedShard):
            blocks = whole.tensor_split(placement.split_factor, placement.dim)
            pieces = [block.tensor_split(on.size(m), placement.dim)[on.get_local_rank(m)] for block in blocks]
            whole = torch.cat(pieces, placement.dim)
        elif isinstance(placement, Shard):
            pieces = list(whole.tensor_split(on.size(m), placement.dim))
            whole = pieces[on.get_local_rank(m)]
    return whole


def check_equal(where: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4, msg=lambda said: f"{where}: {said}")


def answered() -> None:
    assert not rote.propagation.stats().handed_on, rote.propagation.stats()


def beside(tensor: Tensor, other: Tensor) -> Tensor:
    """Another tensor that ops take beside one, whole on all ranks."""
    if not isinstance(tensor, DTensor):
        return other
    on = tensor.device_mesh
    return distribute_tensor(other, on, [Replicate()] * on.ndim)


# Ops with the shapes of their tensors. 8 elements fit all units of two ranks but (2, 1), which 12 do.
SWEEP: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "relu": (torch.relu, ((12, 24),)),
    "neg": (torch.neg, ((12, 24),)),
    "exp": (torch.exp, ((12, 24),)),
    "gelu": (F.gelu, ((12, 24),)),
    "pow": (lambda x: x**2, ((12, 24),)),
    "add": (torch.add, ((12, 24), (12, 24))),
    "mul": (torch.mul, ((12, 24), (12, 24))),
    "sub of a row": (torch.sub, ((12, 24), (24,))),
    "div by a column": (lambda x, y: x / (2 + y.abs()), ((12, 24), (12, 1))),
    "where": (lambda x, y: torch.where(x > 0, x, y), ((12, 24), (12, 24))),
    "lerp": (lambda x, y: torch.lerp(x, y, 0.3), ((12, 24), (12, 24))),
    "add_": (lambda x, y: x.clone().add_(y), ((12, 24), (12, 24))),
    "mm": (torch.mm, ((12, 24), (24, 12))),
    "bmm": (torch.bmm, ((12, 4, 6), (12, 6, 4))),
    "addmm": (torch.addmm, ((12,), (24, 12), (12, 12))),
    "matmul": (torch.matmul, ((12, 4, 24), (24, 12))),
    "linear": (F.linear, ((4, 12, 24), (12, 24), (12,))),
    "einsum": (lambda x, y: torch.einsum("bij,bjk->bik", x, y), ((12, 4, 24), (12, 24, 4))),
    "sum": (torch.sum, ((12, 24),)),
    "sum of dim 0": (lambda x: x.sum(0), ((12, 24),)),
    "sum of dim 1": (lambda x: x.sum(1, keepdim=True), ((12, 24),)),
    "mean": (torch.mean, ((12, 24),)),
    "mean of dim 0": (lambda x: x.mean(0), ((12, 24),)),
    "mean of dim 1": (lambda x: x.mean(1), ((12, 24),)),
    "amax": (lambda x: x.amax(0), ((12, 24),)),
    "var": (lambda x: x.var(1), ((12, 24),)),
    "norm": (lambda x: torch.linalg.vector_norm(x), ((12, 24),)),
    "cumsum": (lambda x: x.cumsum(0), ((12, 24),)),
    "softmax": (lambda x: x.softmax(1), ((12, 24),)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (24,), w), ((12, 24), (24,))),
    "t": (lambda x: x.t(), ((12, 24),)),
    "transpose": (lambda x: x.transpose(0, 2), ((12, 4, 24),)),
    "permute": (lambda x: x.permute(2, 0, 1), ((12, 4, 24),)),
    "view that splits": (lambda x: x.view(12, 4, 6), ((12, 24),)),
    "view that joins": (lambda x: x.reshape(48, 12), ((12, 4, 12),)),
    "view that keeps": (lambda x: x.view(12, -1), ((12, 4, 6),)),
    "unsqueeze": (lambda x: x.unsqueeze(0), ((12, 24),)),
    "squeeze": (lambda x: x.squeeze(1), ((12, 1, 24),)),
    "expand": (lambda x: x.expand(12, 5, 24), ((12, 1, 24),)),
    "slice of dim 0": (lambda x: x[2:7], ((12, 24),)),
    "slice of dim 1": (lambda x: x[:, 3:9], ((12, 24),)),
    "select": (lambda x: x.select(0, 5), ((12, 24),)),
    "cat": (lambda x, y: torch.cat([x, y]), ((12, 24), (12, 24))),
    "cat of dim 1": (lambda x, y: torch.cat([x, y], 1), ((12, 24), (12, 12))),
    "stack": (lambda x, y: torch.stack([x, y]), ((12, 24), (12, 24))),
    "split": (lambda x: x.split(8, 1)[1], ((12, 24),)),
    "chunk": (lambda x: x.chunk(3)[1], ((12, 24),)),
    "flip": (lambda x: x.flip(0), ((12, 24),)),
    "roll": (lambda x: x.roll(1, 0), ((12, 24),)),
    "tril": (torch.tril, ((12, 24),)),
    "diagonal": (lambda x: x.diagonal(0, 1, 2), ((12, 4, 4),)),
    "index_select": (lambda x: x.index_select(0, beside(x, torch.tensor([3, 0, 11]))), ((12, 24),)),
    "embedding": (lambda x: F.embedding(beside(x, torch.tensor([3, 0, 11])), x), ((12, 24),)),
    "sort": (lambda x: x.sort(1).values, ((12, 24),)),
    "topk": (lambda x: x.topk(3, 0).values, ((12, 24),)),
    "repeat": (lambda x: x.repeat(2, 1), ((12, 24),)),
    "pad": (lambda x: F.pad(x, (1, 2)), ((12, 24),)),
    "clone": (torch.clone, ((12, 24),)),
    "zeros_like": (torch.zeros_like, ((12, 24),)),
    "to double": (lambda x: x.double(), ((12, 24),)),
    "new_zeros": (lambda x: x.new_zeros(12, 24) + x, ((12, 24),)),
}


def options(shape: tuple[int, ...], ranks: int) -> list[Placement]:
    """The ways in which a tensor may lie on a mesh dim: each kind once."""
    found: list[Placement] = [Replicate(), Partial()]
    for dim, size in enumerate(shape):
        found += [RaggedShard(dim, units) for units in UNITS[ranks] if size % sum(units) == 0]
        found += [Shard(dim)] if size % ranks == 0 else []
    return found


def check_sweep(shape: tuple[int, ...], most: int) -> None:
    """Runs each op on tensors of `most` ways to lie."""
    on = mesh(*shape)
    draw = random.Random(0)
    kept = 0
    with registered(), rote.propagation.install("best"):
        for name, (op, shapes) in SWEEP.items():
            torch.manual_seed(1)
            wholes = [torch.randn(each) for each in shapes]
            expected = op(*wholes)
            for way in drawn(shapes, shape, most, draw):
                if name == "add_" and any(one.is_partial() for one in way[0]):
                    continue  # what is written could not stay partial
                where = f"{name} of {way}"
                found = op(*(laid(whole, each, on) for whole, each in zip(wholes, way, strict=True)))
                kept += any(isinstance(each, RaggedShard) for each in found.placements)
                if not any(each.is_partial() for each in found.placements):
                    torch.testing.assert_close(
                        found.to_local(),
                        held(expected, found.placements, on),
                        msg=lambda said, where=where: f"{where}: {said}",
                    )
                torch.testing.assert_close(
                    found.full_tensor(),
                    expected,
                    msg=lambda said, where=where: f"{where}: {said}",
                    atol=1e-4,
                    rtol=1e-4,
                )
        assert kept > 50, kept
        reasons = {reason for _, reason in rote.propagation.stats().handed_on}
        assert reasons <= HANDED_ON, reasons


def drawn(
    shapes: Sequence[tuple[int, ...]], on: Sequence[int], most: int, draw: random.Random
) -> list[tuple[tuple[Placement, ...], ...]]:
    """Ways for tensors to lie, one of them at least in a ragged shard."""
    each = [[options(shape, ranks) for ranks in on] for shape in shapes]
    found: dict[tuple[tuple[Placement, ...], ...], None] = {}
    for _ in range(50 * most):
        way = tuple(tuple(draw.choice(of_dim) for of_dim in of_tensor) for of_tensor in each)
        is_ragged = any(isinstance(one, RaggedShard) for one in itertools.chain(*way))
        if is_ragged and all(fits(shape, one, on) for shape, one in zip(shapes, way, strict=True)):
            found[way] = None
    return list(found)[:most]


def fits(shape: tuple[int, ...], placements: Sequence[Placement], on: Sequence[int]) -> bool:
    """Whether a tensor can lie so: partials of one kind, shards of what those to their left leave."""
    sizes = {dim: {size} for dim, size in enumerate(shape)}
    for placement, ranks in zip(placements, on, strict=True):
        if isinstance(placement, RaggedShard):
            units = sum(placement.units)
            if any(size % units for size in sizes[placement.dim]):
                return False
            sizes[placement.dim] = {size // units * one for size in sizes[placement.dim] for one in placement.units}
        elif isinstance(placement, Shard):
            if any(size % ranks for size in sizes[placement.dim]):
                return False
            sizes[placement.dim] = {size // ranks for size in sizes[placement.dim]}
    return True


@pytest.mark.ranks(2, timeout=400)
def test_ops_give_what_they_give_on_whole_tensors_on_two_ranks() -> None:
    check_sweep((2,), 20)


@pytest.mark.ranks(4, timeout=400)
def test_ops_give_what_they_give_on_whole_tensors_on_a_mesh_of_two_dims() -> None:
    check_sweep((2, 2), 8)


@pytest.mark.ranks(4, timeout=400)
def test_ops_give_what_they_give_on_whole_tensors_on_four_ranks() -> None:
    check_sweep((4,), 10)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def losses(model: nn.Module, placed: Callable[[Tensor], Tensor], optimizer: Callable[..., Any]) -> list[float]:
    descent = optimizer(model.parameters())
    data = torch.Generator().manual_seed(3)
    found = []
    for _ in range(5):
        x, y = (placed(torch.randn(8, 8, generator=data)) for _ in range(2))
        descent.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        descent.step()
        found.append(float(loss.full_tensor() if isinstance(loss, DTensor) else loss))
    return found


OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    "adamw, one by one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
}


def check_training(shape: tuple[int, ...], units: tuple[int, ...], batch: Placement) -> None:
    on = mesh(*shape)
    for optimizer in OPTIMIZERS.values():
        torch.manual_seed(0)
        whole = Mlp()
        model = copy.deepcopy(whole)
        expected = losses(whole, lambda tensor: tensor, optimizer)
        with registered(), rote.propagation.install("best"):
            for module in (model.up, model.down):
                for name, parameter in list(module.named_parameters()):
                    placements = [Replicate()] * (on.ndim - 1) + [RaggedShard(0, units)]
                    made = laid(parameter.detach(), placements, on)
                    module.register_parameter(name, nn.Parameter(made))

            def placed(tensor: Tensor) -> DTensor:
                return distribute_tensor(tensor, on, [batch] + [Replicate()] * (on.ndim - 1))

            found = losses(model, placed, optimizer)
            for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
                assert ours.placements[-1] == RaggedShard(0, units)
                torch.testing.assert_close(ours.full_tensor(), theirs.detach(), atol=1e-5, rtol=1e-5)
            reasons = {reason for _, reason in rote.propagation.stats().handed_on}
            assert not any("script" in reason for reason in reasons), reasons
        assert all(abs(a - b) <= 1e-5 for a, b in zip(found, expected, strict=True)), (found, expected)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("batch", [Replicate(), Shard(0)], ids=str)
def test_a_ragged_mlp_trains_to_the_losses_of_one_device(batch: Placement) -> None:
    check_training((2,), (1, 3), batch)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("shape", "units"), [((4,), (1, 3, 2, 2)), ((2, 2), (3, 1))], ids=str)
def test_a_ragged_mlp_trains_to_the_losses_of_one_device_on_four_ranks(shape: Any, units: Any) -> None:
    check_training(shape, units, Shard(0))


@pytest.mark.ranks(2)
def test_shards_of_other_parameters_are_redistributed() -> None:
    on = mesh(2)
    torch.manual_seed(0)
    x, y = torch.randn(8, 4), torch.randn(8, 4)
    with registered(), rote.propagation.install("best"):
        for first, second in itertools.product([(1, 3), (3, 1)], [(1, 3), (3, 1)]):
            one, other = RaggedShard(0, first), RaggedShard(0, second)
            found = laid(x, [one], on) + laid(y, [other], on)
            torch.testing.assert_close(found.full_tensor(), x + y)
            if first == second:
                assert found.placements == (one,)
                assert found.placements[0] is not None and type(found.placements[0]) is RaggedShard
                assert found.to_local().shape == (8 // 4 * first[on.get_rank()], 4)
        # By hand, too, and back to plain shards.
        made = laid(x, [RaggedShard(0, (1, 3))], on)
        for to in (RaggedShard(0, (3, 1)), RaggedShard(1, (1, 3)), Shard(0), Shard(1), Replicate()):
            again = made.redistribute(placements=[to])
            torch.testing.assert_close(again.to_local(), held(x, [to], on))
            torch.testing.assert_close(again.redistribute(placements=made.placements).to_local(), made.to_local())
        answered()


@pytest.mark.ranks(4)
def test_shards_inside_of_other_shards_are_redistributed() -> None:
    on = mesh(2, 2)
    torch.manual_seed(0)
    x = torch.randn(32, 4)
    each = [Replicate(), Shard(0), RaggedShard(0, (1, 3)), RaggedShard(0, (3, 1)), Shard(1)]
    if IS_TESTED:  # DTensor of 2.11 has no way from whole tensors to these
        each.append(_StridedShard(0, split_factor=2))
    with registered():
        ways = list(itertools.product(each, repeat=2))
        for before, after in itertools.product(ways, repeat=2):
            if not any(isinstance(one, RaggedShard) for one in before + after):
                continue
            made = laid(x, before, on)
            torch.testing.assert_close(made.to_local(), held(x, before, on))
            again = made.redistribute(placements=after)
            check_equal(f"{before} -> {after}", again.to_local(), held(x, after, on))


class Scattered(RaggedShard):
    """Which a partial is reduced into at once."""

    calls = 0

    def _reduce_shard_tensor(self, tensor: Tensor, mesh: DeviceMesh, reduce_op: str, mesh_dim: int) -> Tensor:
        type(self).calls += 1
        whole = collectives.all_reduce(tensor, reduce_op, (mesh, mesh_dim))
        return self._split_tensor(whole, mesh.size(mesh_dim))[0][mesh.get_local_rank(mesh_dim)]


@pytest.mark.ranks(2)
def test_partials_are_reduced_by_the_class() -> None:
    on = mesh(2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    rote.propagation.register_sharding(Scattered, indices=ragged_shard.indices, parameters=("units",))
    try:
        with registered(), rote.propagation.install("best"):
            for cls, calls in ((RaggedShard, 0), (Scattered, 1)):
                for reduction in ("sum", "max"):
                    Scattered.calls = 0
                    to = cls(0, (1, 3))
                    parts = DTensor.from_local(x * (1 + on.get_rank()), on, [Partial(reduction)], run_check=False)
                    found = parts.redistribute(placements=[to])
                    expected = x * 3 if reduction == "sum" else torch.maximum(x, 2 * x)
                    torch.testing.assert_close(found.to_local(), held(expected, [to], on))
                    # A tensor that is written stays, and the partial comes to it.
                    written = laid(x, [to], on).add_(parts)
                    assert written.placements == (to,) and Scattered.calls == 2 * calls
                    torch.testing.assert_close(written.full_tensor(), x + expected)
            answered()
    finally:
        rote.propagation.unregister_sharding(Scattered)


def why(call: Callable[[], Any]) -> str:
    """The reason for which a question is handed on to DTensor, and what was warned of."""
    with rote.propagation.install("best"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            call()
        reasons = {reason for _, reason in rote.propagation.stats().handed_on}
    assert len(reasons) == 1, reasons
    warned = [str(one.message) for one in caught if "rote" in str(one.message)]
    assert len(warned) <= 1, warned
    return f"{reasons.pop()} | {warned}"


@pytest.mark.ranks(2)
def test_what_indices_cannot_say_is_left_to_dtensor_with_one_warning() -> None:
    on = mesh(2)
    torch.manual_seed(0)
    x = torch.randn(8, 4)

    def twice(placement: RaggedShard, size: int, ranks: int) -> Any:
        return [range(0, 3), range(2, size)]

    def lost(placement: RaggedShard, size: int, ranks: int) -> Any:
        return [[0, 1], list(range(3, size))]

    def of_one_rank(placement: RaggedShard, size: int, ranks: int) -> Any:
        return [range(size)]

    def raises(placement: RaggedShard, size: int, ranks: int) -> Any:
        raise KeyError("units")

    def words(placement: RaggedShard, size: int, ranks: int) -> Any:
        return [["a"], ["b"]]

    for indices, expected in (
        (twice, "sharding RaggedShard, parameters (1,3), of 8 elements on 2 ranks: index 2 is on ranks 0 and 1"),
        (lost, "of 8 elements on 2 ranks: index 2 is on no rank"),
        (of_one_rank, "expected the indices of 2 ranks, found those of 1"),
        (raises, "on 2 ranks: KeyError: 'units'"),
        (words, "on 2 ranks: TypeError: expected indices, found 'a'"),
    ):
        with registered(indices):
            made = DTensor.from_local(
                held(x, [RaggedShard(0, (1, 3))], on),
                on,
                [RaggedShard(0, (1, 3))],
                run_check=False,
                shape=x.shape,
                stride=x.stride(),
            )

            reason = why(functools.partial(torch.relu, made))
            assert expected in reason and "DTensor's own propagation answers instead" in reason, reason


@pytest.mark.ranks(2)
def test_an_interrupt_in_indices_ends_the_step() -> None:
    on = mesh(2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    asked = []

    def interrupted(placement: RaggedShard, size: int, ranks: int) -> Any:
        asked.append(size)
        if len(asked) == 1:
            raise KeyboardInterrupt
        return ragged_shard.indices(placement, size, ranks)

    with registered(interrupted), rote.propagation.install("best"):
        made = laid(x, [ROWS], on)
        with pytest.raises(KeyboardInterrupt):
            torch.relu(made)
        assert torch.exp(made).placements == (ROWS,)


@pytest.mark.ranks(2)
def test_a_shard_that_fits_nowhere_is_not_made() -> None:
    on = mesh(2)
    torch.manual_seed(0)
    w = torch.randn(8, 6)
    with registered(), rote.propagation.install("best"):
        # 6 elements are no 4 units.
        x = torch.randn(6, 3)
        made = torch.cat([laid(w, [RaggedShard(1, (1, 2))], on), distribute_tensor(w, on, [Replicate()])])
        assert made.placements == (RaggedShard(1, (1, 2)),), (made.placements, rote.propagation.stats())
        found = laid(w, [RaggedShard(0, (1, 3))], on) @ distribute_tensor(x, on, [Replicate()])
        assert found.placements == (RaggedShard(0, (1, 3)),)
        torch.testing.assert_close(found.full_tensor(), w @ x)
        answered()


@pytest.mark.ranks(2)
def test_same_leaves_them_to_dtensor() -> None:
    on = mesh(2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with registered(), rote.propagation.install("same"):
        made = laid(x, [RaggedShard(0, (1, 3))], on)
        torch.testing.assert_close((made * 2).full_tensor(), x * 2)
        torch.testing.assert_close(made.view(4, 2, 4).full_tensor(), x.view(4, 2, 4))
        with pytest.raises(RuntimeError, match=r"aten\.mul_\.Tensor: DTensor cannot keep how self lies"):
            made.mul_(2)
        with pytest.raises(RuntimeError, match=r"aten\.add\.out: DTensor cannot redistribute keyword arguments"):
            torch.add(laid(x, [Replicate()], on), 1, out=made)
        assert {reason for _, reason in rote.propagation.stats().handed_on} == {"a placement of the script's own"}


@pytest.mark.ranks(2)
def test_without_rote_dtensor_takes_them_for_no_plain_shards() -> None:
    on = mesh(2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    propagator = DTensor._op_dispatcher.sharding_propagator
    before = propagator.propagate_op_sharding_non_cached
    with registered():
        made = laid(x, [RaggedShard(0, (1, 3))], on)
        with rote.propagation.install("best"):
            assert (made + 1).placements == made.placements
        for found, expected in (
            (made + 1, x + 1),
            (made.view(4, 2, 4), x.view(4, 2, 4)),
            (made.unsqueeze(1), x.unsqueeze(1)),
            (torch.cat([made, made]), torch.cat([x, x])),
        ):
            assert not isinstance(found.placements[0], RaggedShard)
            torch.testing.assert_close(found.full_tensor(), expected)
        with rote.propagation.install("same"):
            rote.propagation.unregister_sharding(RaggedShard)
        assert propagator.propagate_op_sharding_non_cached == before
        rote.propagation.register_sharding(RaggedShard, indices=ragged_shard.indices, parameters=("units",))
    assert propagator.propagate_op_sharding_non_cached == before


@pytest.mark.ranks(2)
def test_ops_that_look_at_shards_themselves_raise() -> None:
    on = mesh(2)
    torch.manual_seed(0)
    image, weight = torch.randn(8, 4, 6, 6), torch.randn(4, 4, 3, 3)
    ragged = [RaggedShard(0, (1, 3))]
    with registered(), rote.propagation.install("best"):
        for call in (
            lambda: laid(image, ragged, on).argmax(1),
            lambda: laid(image, ragged, on).argmin(),
            lambda: F.conv2d(laid(image, ragged, on), laid(weight, [Replicate()], on)),
        ):
            with pytest.raises(RuntimeError, match=r"DTensor takes shards for those that torch\.chunk makes"):
                call()
        whole = laid(image, ragged, on).redistribute(placements=[Replicate()])
        torch.testing.assert_close(whole.argmax(1).full_tensor(), image.argmax(1))


@pytest.mark.ranks(2)
def test_only_ops_that_may_be_filled_keep_them() -> None:
    on = mesh(2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    ragged = RaggedShard(0, (1, 3))

    def broken(op: Any) -> bool:
        raise RuntimeError(f"no answer about {op}")

    for fills in ({aten.exp.default, aten.add.Tensor}, lambda op: op in (aten.exp.default, aten.add_.Tensor)):
        with registered(fills=fills), rote.propagation.install("best"):
            made = laid(x, [ragged], on)
            assert torch.exp(made).placements == (ragged,)
            assert torch.sin(made).placements == (Replicate(),)
            torch.testing.assert_close(made.add_(1).full_tensor(), x + 1)
            answered()
    with registered(fills=broken):
        made = laid(x, [ragged], on)
        assert "RuntimeError: no answer about aten.sin.default" in why(lambda: torch.sin(made))


@pytest.mark.ranks(2)
def test_after_unregistering_they_are_dtensors_again() -> None:
    on = mesh(2)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    with registered():
        made = laid(x, [RaggedShard(0, (1, 3))], on)
    with rote.propagation.install("best"):
        with pytest.raises(Exception):  # noqa: B017 - whatever DTensor makes of it
            torch.relu(made)
            DTensor.from_local(made.to_local(), on, made.placements, run_check=False)
        assert {reason for _, reason in rote.propagation.stats().handed_on} == {"a placement of class RaggedShard"}
    with registered(), rote.propagation.install("best"):
        assert torch.relu(made).placements == made.placements
        answered()


class Odd(RaggedShard):
    """Whose placements are equal whatever their units are."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Odd) and self.dim == other.dim

    def __hash__(self) -> int:
        return hash(self.dim)


class Unprinted(RaggedShard):
    """Which prints as a plain shard."""

    __str__ = Shard.__str__


class Lacking(Shard):
    def __init__(self, dim: int, units: tuple[int, ...]) -> None:
        super().__init__(dim)
        self.units = units


def test_what_cannot_be_registered() -> None:
    def put(cls: Any, **options: Any) -> None:
        rote.propagation.register_sharding(
            cls, **({"indices": ragged_shard.indices, "parameters": ("units",)} | options)
        )

    for cls in (Shard, Replicate, _StridedShard, int, RaggedShard(0, (1, 3))):
        with pytest.raises(TypeError, match="expected a subclass of Shard"):
            put(cls)
    lacking = "expected a class with __eq__ and __hash__ and _split_tensor and _to_replicate_tensor and"
    with pytest.raises(TypeError, match=lacking):
        put(Lacking)
    with pytest.raises(TypeError, match="names of attributes in parameters="):
        put(RaggedShard, parameters="units")
    with pytest.raises(TypeError, match="expected indices=, a function"):
        put(RaggedShard, indices=[range(2)])
    with pytest.raises(TypeError, match="ops with their overloads or a function"):
        put(RaggedShard, fills={"aten::add"})
    with registered(), pytest.raises(ValueError, match="RaggedShard is registered already"):
        put(RaggedShard)
    with registered(), pytest.raises(ValueError, match="a name that is not taken"):
        put(type("RaggedShard", (RaggedShard,), {}))
    with pytest.raises(ValueError, match="no sharding is registered"):
        rote.propagation.unregister_sharding(RaggedShard)


def test_parameters_have_to_say_what_a_placement_is() -> None:
    def asked(cls: Any, *made: Any, **options: Any) -> None:
        options = {"indices": ragged_shard.indices, "parameters": ("units",)} | options
        rote.propagation.register_sharding(cls, **options)
        try:
            for one in made:
                rote.propagate("aten::relu", [spec_text(one)], mesh="2")
        finally:
            rote.propagation.unregister_sharding(cls)

    def spec_text(placement: Any) -> Any:
        from rote._arguments import written_placement

        return f"f32[8,8] @ {written_placement(placement)}"

    asked(RaggedShard, RaggedShard(0, (1, 3)), RaggedShard(1, (3, 1)))
    with pytest.raises(TypeError, match="units"):
        asked(RaggedShard, RaggedShard(0, (1, 3)), parameters=())
    with pytest.raises(ValueError, match=r"expected an integer or a tuple of integers, found 1\.5"):
        asked(RaggedShard, RaggedShard(0, 1.5))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is equal to another placement"):
        asked(Odd, Odd(0, (1, 3)), Odd(0, (3, 1)))


def test_propagate_says_how_an_op_runs() -> None:
    with registered():
        found = rote.propagate(
            "aten::mm", ("f32[8,6] @ RaggedShard(1,1,2)", "f32[6,4] @ RaggedShard(0,1,2)"), mesh="tp=2", why=True
        )
        assert found.inputs[1].placements == (RaggedShard(0, (1, 2)),)
        assert found.outputs[0].placements == (Partial(),)
        assert found.cost_us == 0
        found = rote.propagate("aten::t", ("f32[8,6] @ R,RaggedShard(1,1,2)",), mesh="dp=2,tp=2")
        assert found.outputs[0].placements == (Replicate(), RaggedShard(0, (1, 2)))
        assert "f32[6,8] @ R,RaggedShard(0,1,2)" in str(found)
        assert found.outputs[0].local_shape == (2, 8)
        with pytest.raises(ValueError, match=re.escape("expected shards that fit f32[8,6] on mesh tp=2")):
            rote.propagate("aten::t", ("f32[8,6] @ RaggedShard(1,1,3)",), mesh="tp=2")
    with pytest.raises(ValueError, match="expected a placement"):
        rote.propagate("aten::t", ("f32[8,6] @ RaggedShard(1,1,2)",), mesh="tp=2")


class Blocks(RaggedShard):
    """Blocks of some elements, dealt to the ranks as `order` says again and again."""

    def __init__(self, dim: int, block: int = 1, order: tuple[int, ...] = ()) -> None:
        Shard.__init__(self, dim)
        self.block, self.order = block, order

    def __eq__(self, other: object) -> bool:
        mine = self.dim, self.block, self.order
        return type(other) is Blocks and mine == (other.dim, other.block, other.order)

    def __hash__(self) -> int:
        return hash((self.dim, self.block, self.order))

    @staticmethod
    def indices(placement: Any, size: int, ranks: int) -> list[list[int]]:
        if not placement.order or set(placement.order) != set(range(ranks)):
            raise ValueError
        held: list[list[int]] = [[] for _ in range(ranks)]
        for index in range(size):
            held[placement.order[index // placement.block % len(placement.order)]].append(index)
        return held


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (("block", "order"), "Blocks(1,2,[0,1,1])"),
        (("order", "block"), "Blocks(1,[0,1,1],2)"),
        (("order",), "Blocks(1,0,1,1)"),
        (("block",), "Blocks(1,2)"),
        ((), "Blocks(1)"),
    ],
    ids=str,
)
def test_parameters_are_written_and_read(parameters: tuple[str, ...], text: str) -> None:
    known = {"block": 2, "order": (0, 1, 1)}
    one = Blocks(1, **{name: known[name] for name in parameters})  # type: ignore[arg-type]
    order = known["order"] if "order" not in parameters else None

    def indices(placement: Any, size: int, ranks: int) -> Any:
        return Blocks.indices(Blocks(0, placement.block, order or placement.order), size, ranks)  # type: ignore[arg-type]

    rote.propagation.register_sharding(Blocks, indices=indices, parameters=parameters)
    try:
        found = rote.propagate("aten::relu", [f"f32[4,9] @ {text}"], mesh="2")
        assert found.outputs[0].placements == (one,) and f"@ {text}" in str(found)
        assert found.outputs[0].local_shape == (4, len(indices(one, 9, 2)[0]))
        report = rote.validate("aten::mm", args="f32[8,6] f32[6,4]", placements=[one], missing=False)[0]
        assert not report["wrong"] and report["correct"] > 10, report
    finally:
        rote.propagation.unregister_sharding(Blocks)


def test_the_example_is_a_placement() -> None:
    one = RaggedShard(0, (1, 3))
    assert pickle.loads(pickle.dumps(one)) == one == copy.deepcopy(one)
    assert one != RaggedShard(0, (3, 1)) and one != Shard(0)


@torch.library.custom_op("rote_placements::scaled", mutates_args=())
def scaled(x: Tensor, scale: Tensor) -> Tensor:
    return x * scale[:, None]


@scaled.register_fake
def _(x: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(x)


SCALED = torch.ops.rote_placements.scaled


@contextmanager
def rule(strategies: Sequence[Sequence[Any]]) -> Iterator[None]:
    rote.propagation.register(SCALED.default, lambda x, scale: strategies)
    try:
        yield
    finally:
        rote.propagation.unregister(SCALED.default)


RULES: dict[str, Sequence[Sequence[Any]]] = {
    "named": [[ROWS, ROWS, ROWS]],
    "placeholders": [[_ShardingPlaceholder(0)] * 3],
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("strategies", RULES.values(), ids=RULES)
def test_rules_of_a_script_take_them(strategies: Sequence[Sequence[Any]]) -> None:
    on = mesh(2)
    torch.manual_seed(0)
    x, scale = torch.randn(8, 4), torch.randn(8)
    ways: list[Placement] = [Replicate(), Shard(0), ROWS, RaggedShard(0, (3, 1))]
    with registered(), rule(strategies), rote.propagation.install("best"):
        for of_x, of_scale in itertools.product(ways, repeat=2):
            found = SCALED(laid(x, [of_x], on), laid(scale, [of_scale], on))
            check_equal(f"{of_x}, {of_scale}", found.full_tensor(), scaled(x, scale))
        assert SCALED(laid(x, [ROWS], on), laid(scale, [ROWS], on)).placements == (ROWS,)
        assert SCALED(laid(x, [ROWS], on), laid(scale, [Replicate()], on)).placements == (ROWS,)
        answered()
    with registered(fills={aten.add.Tensor}), rule(RULES["placeholders"]), rote.propagation.install("best"):
        assert SCALED(laid(x, [ROWS], on), laid(scale, [ROWS], on)).placements == (Replicate(),)


def test_the_truth_table_judges_rules_of_a_script() -> None:
    args = "f32[8,4] f32[8]"
    with registered():
        with rule(RULES["named"]):
            report = rote.validate("rote_placements::scaled", args=args)[0]
            assert not report["wrong"] and report["correct"] == 2, report
            assert "RaggedShard(0,1,3),RaggedShard(0,1,3)" not in str(report["missing"])
        with rule(RULES["placeholders"]):
            shards = [ROWS, RaggedShard(0, (3, 1))]
            plain = rote.validate("rote_placements::scaled", args=args)[0]
            report = rote.validate("rote_placements::scaled", args=args, placements=shards)[0]
            assert not report["wrong"] and report["correct"] == plain["correct"] + 2, report
        for strategy, reason in (
            ([ROWS, ROWS, RaggedShard(0, (3, 1))], "RaggedShard(0,1,3),RaggedShard(0,3,1) -> RaggedShard(0,1,3)"),
            ([RaggedShard(0, (3, 1)), ROWS, ROWS], "RaggedShard(0,1,3),RaggedShard(0,1,3) -> RaggedShard(0,3,1)"),
            ([Shard(0), ROWS, ROWS], "RaggedShard(0,1,3),RaggedShard(0,1,3) -> S(0)"),
            ([RaggedShard(1, (1, 3)), ROWS, ROWS], "-> RaggedShard(1,1,3)"),
        ):
            with rule([strategy]):
                report = rote.validate("rote_placements::scaled", args=args, missing=False)[0]
                assert reason in str(report["wrong"]), report
        with (
            rule([[RaggedShard(2, (1, 3)), ROWS, ROWS]]),
            pytest.raises(ValueError, match="no shard of a tensor with 2"),
        ):
            rote.validate("rote_placements::scaled", args=args)


def test_the_truth_table_judges_rotes_rules_with_them() -> None:
    shards = [RaggedShard(0, (1, 3)), RaggedShard(0, (2, 2))]
    with registered():
        for op, args in (
            ("aten::mm", "f32[8,4] f32[4,8]"),
            ("aten::add.Tensor", "f32[8,4] f32[4]"),
            ("aten::amax", "f32[8,4] [0]"),
            ("aten::cat", "{f32[8,4];f32[8,4]} 1"),
            ("aten::view", "f32[8,4] [8,2,2]"),
            ("aten::embedding", "f32[8,4] i64[8]<8"),
        ):
            plain = rote.validate(op, args=args, missing=False)[0]
            report = rote.validate(op, args=args, missing=False, placements=shards)[0]
            assert not report["wrong"] and report["correct"] > plain["correct"], report
        only = "RaggedShard(1,1,3),RaggedShard(0,1,3) -> P(sum)"
        report = rote.validate("aten::mm", args="f32[8,4] f32[4,8]", only=only, placements=shards)[0]
        assert report["correct"] == 1, report
        only = "RaggedShard(1,1,3),RaggedShard(0,2,2) -> P(sum)"
        report = rote.validate("aten::mm", args="f32[8,4] f32[4,8]", only=only, placements=shards)[0]
        assert report["correct"] == 0 and report["untrue"], report


@pytest.mark.ranks(2)
def test_a_captured_step_is_guarded_by_them() -> None:
    on = mesh(2)
    torch.manual_seed(0)
    weight, x = torch.randn(8, 8), torch.randn(8, 8)

    def step(of: Tensor) -> Tensor:
        return (of @ placed_weight).square()

    rote.propagation.register_sharding(Unprinted, indices=ragged_shard.indices, parameters=("units",))
    try:
        with registered(), rote.propagation.install("best"):
            placed_weight = laid(weight, [ROWS], on)
            captured = rote.capture(step, state={"weight": placed_weight})
            # The last two have the same local tensors, and no other text.
            ways = (RaggedShard(1, (1, 3)), RaggedShard(1, (3, 1)), Unprinted(1, (2, 2)), Shard(1))
            for variants, way in enumerate(ways, 1):
                for _ in range(4):
                    check_equal(str(way), captured(laid(x, [way], on)).full_tensor(), (x @ weight).square())
                assert captured.stats.variants == variants, captured.stats
            assert captured.stats.replays >= len(ways), captured.stats
    finally:
        rote.propagation.unregister_sharding(Unprinted)
