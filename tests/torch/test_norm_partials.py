"""Norms of shards: what takes them as they lie, by arithmetic and beside DTensor.

A partial of norms stands for the root of the sum of the powers of what the ranks
hold. Each call below is asked with its tensors so, replicated, sharded and as
sums; what Rote chooses runs on the pieces of non-negative tensors, and costs no
more than what DTensor chooses.
"""

import math
from collections.abc import Iterator
from itertools import product

import pytest
from propagation.engine import Question

from propagation import dtensor, engine, judge, samples

CALLS = [
    "aten::stack {f32[]>0;f32[]>0;f32[]>0}",
    "aten::stack {f32[4,3]>0;f32[4,3]>0} 1",
    "aten::cat {f32[4,3]>0;f32[5,3]>0}",
    "aten::linalg_vector_norm f32[7]>0 2.0",
    "aten::linalg_vector_norm f32[4,8]>0 2.5 [1]",
    "aten::linalg_vector_norm f32[4,8]>0 3 [0] true",
    "aten::linalg_vector_norm f32[4,8]>0 1",
    "aten::linalg_vector_norm f32[4,8]>0 inf",
    "aten::norm.Scalar f32[6,5]>0",
    "aten::_foreach_norm.Scalar {f32[8,4]>0;f32[4]>0} 2.5",
    "aten::mul.Tensor f32[4,6]>0 0.5",
    "aten::mul.Tensor f32[4,6]>0 -0.5",
    "aten::mul.Tensor f32[4,6]>0 f32[6]>0",
    "aten::div.Tensor f32[4,6]>0 3",
    "aten::add.Tensor f32[4,6]>0 f32[4,6]>0",
    "aten::add.Tensor f32[4,6]>0 1.5",
    "aten::neg f32[4,6]>0",
    "aten::sqrt f32[4,6]>0",
    "aten::clamp f32[4,6]>0 none 1.0",
    "aten::sum f32[4,6]>0",
    "aten::mean.dim f32[4,6]>0 [0]",
    "aten::max f32[4,8]>0",
    "aten::view f32[4,6]>0 [2,2,6]",
    "aten::select.int f32[4,6]>0 0 1",
    "aten::index_select f32[4,6]>0 1 i64[3]<6",
    "aten::constant_pad_nd f32[4,6]>0 [1,1] 2.0",
    "aten::tril f32[4,6]>0",
    "aten::clone f32[4,6]>0",
    "aten::mm f32[4,6]>0 f32[6,4]>0",
]
NORMS = ["P(norm2)", "P(norm2.5)"]


def questions(call: str) -> list[Question]:
    sample = samples.parse("norms", CALLS.index(call), call)
    assert sample is not None
    each = []
    for t in sample.tensors:
        floats = ["P(sum)", *NORMS] if t.dtype.is_floating_point else []
        each.append([("R",), *((f"S({d})",) for d in range(len(t.shape))), *((p,) for p in floats)])
    asked: list[Question] = [(sample, placed, (n,)) for n in (2, 4) for placed in product(*each)]
    # On two mesh dims, all tensors alike: one partial beside another of its kind, or beside a shard.
    for outer, inner in [(NORMS[0], NORMS[0]), (NORMS[1], "S(0)"), ("S(0)", NORMS[1])]:
        placed = tuple((outer, inner) if t.shape else (NORMS[0], "R") for t in sample.tensors)
        if all(t.dtype.is_floating_point for t in sample.tensors):
            asked.append((sample, placed, (2, 2)))
    return asked


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    dtensor.start()
    yield
    dtensor.stop()


@pytest.mark.parametrize("call", CALLS)
def test_what_takes_norms_is_right_and_costs_no_more(call: str) -> None:
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    asked = questions(call)
    chosen = 0
    compared: list[tuple[Question, dtensor.Answer, dtensor.Answer]] = []
    for question, ours in zip(asked, engine.ask(asked), strict=True):
        sample, _, sizes = question
        line = f"{engine.written(question)}\n    {ours}"
        assert ours.error is None, line
        assert judge.is_right(sample, ours.to, ours.outputs, sizes) is None, line
        chosen += any("norm" in p for placed in (*ours.to, *ours.outputs) for p in placed)
        theirs = dtensor.ask(*question)
        if theirs.error is None and not math.isinf(theirs.cost):
            compared.append((question, ours, theirs))
    assert compared, "DTensor answers none of it"
    prices = engine.prices([q for q, _, _ in compared], [theirs.to for _, _, theirs in compared])
    for (question, ours, theirs), price in zip(compared, prices, strict=True):
        assert ours.cost <= price + 1e-6, f"{engine.written(question)}\n    {ours}\n    {theirs}"
    name = call.split()[0]
    assert chosen or name not in ("aten::stack", "aten::norm.Scalar", "aten::_foreach_norm.Scalar", "aten::view"), name


@pytest.mark.parametrize("call", ["aten::neg f32[4,6]>0", "aten::add.Tensor f32[4,6]>0 1"])
def test_arithmetic_tells_norms_from_what_are_none(call: str) -> None:
    sample = samples.parse("wrong", len(call), call)
    assert sample is not None
    assert judge.is_right(sample, [("P(norm2)",)], [("P(norm2)",)], (2,)) is not None
    assert judge.is_right(sample, [("R",)], [("R",)], (2,)) is None
