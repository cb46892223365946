"""Ops without a rule, answered by PyTorch's decompositions with policy "best".

The numbers of the results are those of the op on the whole tensors. Strategies are judged by the truth table, and on
the calls of PyTorch's op tests.
"""

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import rote
import rote._decomposed
import rote.propagation
import torch
from extent import EVERYTHING, SEED
from models import mesh
from torch import Tensor
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn import functional

from propagation import calls, decomposed_calls, samples

ATEN = torch.ops.aten
# Ops and their arguments, in the notation of the truth table.
OPS = {
    "aten::_prelu_kernel": ["f32[4,8] f32[1,8]", "f32[4,8] f32[4,1]"],
    "aten::_prelu_kernel_backward": ["f32[4,8] f32[4,8] f32[1,8]"],
    "aten::aminmax": ["f32[4,8] 1", "f32[4,8] none"],
    "aten::binary_cross_entropy_backward": ["f32[4,8] f32[4,8]:unit f32[4,8]:unit none 0"],
    "aten::channel_shuffle": ["f32[4,8,4] 4"],
    "aten::diagonal_backward": ["f32[4,8] [4,8,8] 0 1 2"],
    "aten::dist": ["f32[4,8] f32[4,8] 2"],
    "aten::floor_divide": ["f32[4,8] f32[8]"],
    "aten::glu_backward": ["f32[4,4] f32[4,8] 1"],
    "aten::hardsigmoid_backward": ["f32[4,8] f32[4,8]"],
    "aten::huber_loss_backward": ["f32[4,8] f32[4,8] f32[4,8] 0 1.0", "f32[] f32[4,8] f32[4,8] 2 1.0"],
    "aten::log_sigmoid_backward": ["f32[4,8] f32[4,8] f32[4,8]"],
    "aten::mish_backward": ["f32[4,8] f32[4,8]"],
    "aten::mse_loss_backward": ["f32[4,8] f32[4,8] f32[4,8] 0", "f32[] f32[4,8] f32[4,8] 2"],
    "aten::native_group_norm_backward": ["f32[4,8,4] f32[4,8,4] f32[4,2] f32[4,2]>0 f32[8] 4 8 4 2 [true,true,true]"],
    "aten::permute_copy": ["f32[4,8,4] [2,0,1]"],
    "aten::pixel_shuffle": ["f32[4,8,4,4] 2"],
    "aten::pixel_unshuffle": ["f32[4,2,4,4] 2"],
    "aten::rot90": ["f32[4,8] 1 [0,1]"],
    "aten::smooth_l1_loss_backward": ["f32[4,8] f32[4,8] f32[4,8] 0 1.0"],
    "aten::softplus_backward": ["f32[4,8] f32[4,8] 1.0 20.0"],
    "aten::squeeze_copy.dim": ["f32[4,1,8] 1"],
    "aten::t_copy": ["f32[4,8]"],
    "aten::transpose_copy.int": ["f32[4,8] 0 1"],
    "aten::unsqueeze_copy": ["f32[4,8] 1"],
}
# Parts of the reasons for which calls of pure functions are handed on.
HANDED_ON = {
    "DynamicOutputShapeException": "the shape of a result depends on values",
    "DataDependentOutputException": "the shape of a result depends on values",
    "its data is not allocated yet": "the number of results depends on values",
    "a keyword argument would have to be redistributed": "DTensor moves no keyword arguments",
    "an argument of class complex": "no placement is asked for with complex numbers",
}
# PyTorch's fake function of the op says other shapes of what backward needs than the kernel.
OTHER_SHAPES = "aten::embedding_bag.padding_idx"
# The op tests of the sweep, samples of each, and placements for each call.
TESTS, SAMPLES, PLACEMENTS = (None, 10_000, 20) if EVERYTHING else (50, 2, 4)
# The share of the overloads that has to be answered.
SHARE = 0.8


def name_of(op: Any) -> str:
    return op._schema.name + (f".{op._overloadname}" if op._overloadname != "default" else "")


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
    assert decomposed == {name_of(op): 1}, rote.propagation.stats()
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
def test_answers_differ_by_arguments_within_an_installation() -> None:
    """DTensor keeps answers: it must tell arguments apart of ops that it knows nothing of."""
    torch.manual_seed(0)
    x = torch.randn(6, 4)
    with rote.propagation.install("best"):
        placed = distribute_tensor(x, mesh(2), [Shard(0)])
        for dim in (1, 0, None, 1):
            for ours, whole in zip(ATEN.aminmax(placed, dim=dim), ATEN.aminmax(x, dim=dim), strict=True):
                torch.testing.assert_close(ours.full_tensor(), whole)
        y = distribute_tensor(x + 1, mesh(2), [Shard(0)])
        for reduction in (1, 2, 0, 1):  # an op for which Rote has a rule, and DTensor has none
            made = ATEN.mse_loss(placed, y, reduction)
            torch.testing.assert_close(made.full_tensor(), ATEN.mse_loss(x, x + 1, reduction))
    assert ATEN.aminmax.default not in DTensor._op_dispatcher.sharding_propagator.op_to_schema_info


@pytest.mark.ranks(2)
def test_lists_of_tensors_are_answered() -> None:
    torch.manual_seed(0)
    given = [torch.randn(4, 6), torch.randn(4, 2)]
    with rote.propagation.install("best"):
        placed = [distribute_tensor(one, mesh(2), [Shard(0)]) for one in given]
        made = ATEN.block_diag(placed)
        assert rote.propagation.stats().decomposed == {"aten::block_diag": 1}, rote.propagation.stats()
    torch.testing.assert_close(made.full_tensor(), torch.block_diag(*given))


def random_args(op: str, args: str) -> tuple[Any, ...]:
    sample = samples.parse("decomposed", 0, f"{op} {args}")
    assert sample is not None and not sample.kwargs
    generator = torch.Generator().manual_seed(0)
    return tuple(sample.filled([t.make(generator) for t in sample.tensors])[0])


def check_on(shape: tuple[int, ...], draw: Callable[[int], Placement]) -> None:
    for name, all_args in OPS.items():
        if name == "aten::aminmax":  # whose dim is a keyword argument
            continue
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
        for args in all_args:
            given = random_args(name, args)
            ndim = min(arg.ndim for arg in given if isinstance(arg, Tensor) and arg.ndim)
            answered_alike(op, given, mesh(*shape), [draw(ndim) for _ in shape])


@pytest.mark.ranks(2)
def test_values_on_two_ranks() -> None:
    for dim in (0, 1):
        check_on((2,), lambda ndim, dim=dim: Shard(min(dim, ndim - 1)))


@pytest.mark.ranks(4)
def test_values_on_four_ranks() -> None:
    check_on((4,), lambda ndim: Shard(0))
    kinds = random.Random(SEED)
    check_on((2, 2), lambda ndim: kinds.choice([Replicate(), *map(Shard, range(ndim))]))


@torch.library.custom_op("rote_decomposed::by_longest", mutates_args=())
def by_longest(x: Tensor) -> Tensor:
    return x / max(x.shape)


@by_longest.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@contextmanager
def decomposed(op: Any, decomposition: Callable[..., Any]) -> Iterator[None]:
    decomposition_table[op] = decomposition
    try:
        yield
    finally:
        del decomposition_table[op]


@pytest.mark.ranks(4)
def test_mesh_dims_are_checked_together() -> None:
    """Either dim of a square may be split: the other is as long as before. Not both."""
    torch.manual_seed(0)
    op = torch.ops.rote_decomposed.by_longest.default
    x = torch.randn(8, 8)
    with decomposed(op, lambda x: x / max(x.shape)):
        for placements in ([Shard(0), Replicate()], [Replicate(), Shard(1)]):
            (found,) = answered_alike(op, (x,), mesh(2, 2), placements)
            assert list(found) == placements
        (found,) = answered_alike(op, (x,), mesh(2, 2), [Shard(0), Shard(1)])
        assert found == (Replicate(), Replicate())


@pytest.mark.ranks(4)
def test_blocks_are_split_by_all_mesh_dims() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8, 2, 2)
    for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=2):
        answered_alike(ATEN.pixel_shuffle.default, (x, 2), mesh(2, 2), placements)
        answered_alike(ATEN.channel_shuffle.default, (x, 4), mesh(2, 2), placements)


@pytest.mark.ranks(2)
def test_what_writes_or_draws_is_left_to_dtensor() -> None:
    installed = rote.propagation.decompositions()
    for op in (ATEN.softplus_backward.grad_input, ATEN.dropout.default, ATEN.item.default, ATEN.add.Tensor):
        assert not installed.has(op), op
    assert installed.has(ATEN.softplus_backward.default)


@pytest.mark.ranks(2)
def test_the_same_policy_decomposes_nothing() -> None:
    x = distribute_tensor(torch.randn(4, 4), mesh(2), [Shard(0)])
    with rote.propagation.install("same"):
        ATEN.softplus_backward(x, x, 1.0, 20.0)
        assert not rote.propagation.stats().decomposed


@pytest.mark.ranks(2)
def test_partials_pass_where_an_op_is_linear() -> None:
    local = torch.full((4, 4), 1.0)
    gradient = DTensor.from_local(local, mesh(2), [Partial()], run_check=False)
    x = torch.linspace(-2, 2, 16).view(4, 4)
    with rote.propagation.install("best"):
        made = ATEN.softplus_backward(gradient, distribute_tensor(x, mesh(2), [Replicate()]), 1.0, 20.0)
    assert made.placements == (Partial(),)
    torch.testing.assert_close(made.full_tensor(), ATEN.softplus_backward(2 * local, x, 1.0, 20.0))


def gradients(x: DTensor, weight: DTensor) -> tuple[Tensor, Tensor]:
    weight.grad = None
    loss = functional.mse_loss(functional.softplus(x @ weight), x, reduction="sum")
    loss.backward()
    assert isinstance(weight.grad, DTensor)
    return loss.detach().full_tensor(), weight.grad.full_tensor()


@pytest.mark.ranks(2)
def test_a_captured_step_replays() -> None:
    """The first recording traces decompositions, of which no op is part of the step."""
    torch.manual_seed(0)
    x = distribute_tensor(torch.randn(8, 4), mesh(2), [Shard(0)])
    weight = distribute_tensor(torch.randn(4, 4), mesh(2), [Replicate()]).requires_grad_()
    whole = weight.full_tensor().detach().requires_grad_()
    expected = functional.mse_loss(functional.softplus(x.full_tensor() @ whole), x.full_tensor(), reduction="sum")
    expected.backward()
    step = rote.capture(gradients, strict=True)
    with rote.propagation.install("best"):
        for _ in range(6):
            loss, gradient = step(x, weight)
            torch.testing.assert_close(loss, expected.detach())
            torch.testing.assert_close(gradient, whole.grad)
        decomposed = rote.propagation.stats().decomposed
    assert decomposed.keys() == {"aten::softplus_backward", "aten::mse_loss_backward"}
    assert step.stats.replays >= 3


@pytest.mark.parametrize("size", [2, 4])
def test_the_truth_table_finds_nothing_wrong_or_missing(size: int) -> None:
    for op, all_args in OPS.items():
        for args in all_args:
            (report,) = rote.validate(op, mesh=str(size), args=args)
            assert not report["wrong"], report["wrong"]
            assert not report["missing"], report["missing"]
            assert report["correct"] > 1, f"{op} {args}: nothing but replication"


def test_the_truth_table_finds_what_the_second_trace_refuses() -> None:
    """Without the trace of the shards, a mean is divided by the elements of a shard."""
    args = "f32[] f32[4,8] f32[4,8] 1"
    (report,) = rote.validate("aten::mse_loss_backward", args=args, missing=False)
    assert not report["wrong"], report["wrong"]
    with mock.patch.object(rote._decomposed._Decomposed, "_is_local", lambda *_: True):
        (report,) = rote.validate("aten::mse_loss_backward", args=args, missing=False)
    assert report["wrong"]


def test_calls_of_op_tests() -> None:
    tests = list(range(len(calls.ops())))
    if TESTS is not None:
        tests = random.Random(SEED).sample(tests, TESTS)
    found = decomposed_calls.of_all(tests, SAMPLES, PLACEMENTS, None if EVERYTHING else SEED)
    print(f"\nseed {SEED}: {found.summary()}")
    wrong = [line for line in found.judged.wrong if OTHER_SHAPES not in line]
    assert not wrong, "\n".join([f"{len(wrong)} wrong", *wrong[:5]])
    for name, reasons in found.handed_on.items():
        known = all(any(part in reason for part in HANDED_ON) for reason in reasons)
        assert known or not rote._decomposed.is_pure(samples.overload(name)), f"{name}: {reasons}"
    if EVERYTHING:
        assert found.share >= SHARE, found.summary()
