"""The truth table of sharding rules (`rote.validate`): none of ours is wrong, what is missing is so on purpose, and
wrong rules are found, those that careless test data would let pass among them.

    ROTE_TEST_EVERYTHING=1 pytest tests/torch/test_validation.py

judges all ops; `ROTE_TEST_SEED` takes another part of them.
"""

import random
from typing import Any

import pytest
import rote
from extent import EVERYTHING, SEED

from propagation import samples

PART = 4  # one op in so many

# Strategies put in place of right ones: op, the right one, the wrong one.
MUTATIONS = {
    "a dim off by one": ("aten::mm", "S(0),R -> S(0)", "S(0),R -> S(1)"),
    "inputs swapped": ("aten::mm", "R,S(1) -> S(1)", "S(1),R -> S(1)"),
    "a mean for a sum": ("aten::mm", "S(1),S(0) -> P(sum)", "S(1),S(0) -> P(avg)"),
    "a contraction forgotten": ("aten::mm", "S(1),S(0) -> P(sum)", "S(1),S(0) -> R"),
    "a bias on every rank": ("aten::addmm", "P(sum),S(1),S(0) -> P(sum)", "R,S(1),S(0) -> P(sum)"),
    "batches crossed": ("aten::bmm", "S(0),S(0) -> S(0)", "S(0),S(0) -> S(1)"),
    "a partial sum through a nonlinear op": ("aten::relu", "P(max) -> P(max)", "P(sum) -> P(sum)"),
    "a partial mean through a nonlinear op": ("aten::sigmoid", "P(max) -> P(max)", "P(avg) -> P(avg)"),
    "a sum for a maximum": ("aten::exp", "P(max) -> P(max)", "P(max) -> P(sum)"),
    "a maximum through a decreasing op": ("aten::neg", "P(max) -> P(min)", "P(max) -> P(max)"),
    "one summand shifted by the whole": ("aten::add.Tensor", "P(sum),P(sum) -> P(sum)", "P(sum),R -> P(sum)"),
    "a product of two sums": ("aten::mul.Tensor", "P(sum),R -> P(sum)", "P(sum),P(sum) -> P(sum)"),
    "a partial divisor": ("aten::div.Tensor", "P(sum),R -> P(sum)", "R,P(sum) -> P(sum)"),
    "a maximum of minima": ("aten::minimum", "P(min),P(min) -> P(min)", "P(max),P(max) -> P(max)"),
    "min for max": ("aten::amax", "S(0) -> P(max)", "S(0) -> P(min)"),
    "a reduced dim kept": ("aten::sum.dim_IntList", "S(0) -> P(sum)", "S(0) -> S(0)"),
    "even shards not asked for": ("aten::mean.dim", "S(0) -> P(avg)", "S(0) -> P(avg)"),
    "filled shards not asked for": ("aten::max", "S(0) -> P(max)", "S(0) -> P(max)"),
    "a reduction on one rank": ("aten::max", "S(0) -> P(max)", "S(0) -> R"),
    "a scan cut": ("aten::cumsum", "S(0) -> S(0)", "S(1) -> S(1)"),
    "a softmax cut": ("aten::_softmax", "S(0) -> S(0)", "S(1) -> S(1)"),
    "a dim not transposed": ("aten::t", "S(0) -> S(1)", "S(0) -> S(0)"),
    "rows looked up without a mask": ("aten::embedding", "S(0),R -> P(mask)", "S(0),R -> P(sum)"),
}

# What holds for summands of equal size, or equal sign, or for data as likely negative as positive.
FOOLING = [
    ("aten::sign", "f32[6,5]", "P(sum) -> R"),
    ("aten::relu", "f32[6,5]", "P(sum) -> P(sum)"),
    ("aten::abs", "f32[6,5]", "P(sum) -> P(sum)"),
    ("aten::leaky_relu", "f32[6,5]", "P(sum) -> P(sum)"),
    ("aten::div.Tensor", "f32[6,5] f32[6,5]", "P(sum),P(sum) -> R"),
    ("aten::gt.Tensor", "f32[6,5] f32[6,5]", "P(sum),P(sum) -> R"),
    ("aten::eq.Tensor", "f32[6,5] f32[6,5]", "P(sum),P(sum) -> R"),
    ("aten::atan2", "f32[6,5] f32[6,5]", "P(sum),P(sum) -> R"),
    ("aten::maximum", "f32[6,5] f32[6,5]", "P(sum),P(sum) -> P(sum)"),
    ("aten::sort", "f32[6,5] 1", "P(sum) -> P(sum),R"),
    ("aten::amax", "f32[6,5] [1]", "P(sum) -> P(sum)"),
    ("aten::argmax", "f32[6,5] 1", "P(sum) -> R"),
    ("aten::max.dim", "f32[6,5] 1", "P(max) -> P(max),R"),
    ("aten::mean", "f32[6,5]", "S(1) -> P(avg)"),
    ("aten::amin", "f32[6,5] [1]", "P(max) -> P(max)"),
    ("aten::abs", "f32[6,5]", "P(max) -> P(max)"),
    ("aten::square", "f32[6,5]", "P(avg) -> P(avg)"),
    ("aten::nansum", "f32[6,5] [1]", "P(avg) -> P(sum)"),
]


def flat(reports: list[dict[str, Any]], key: str) -> list[str]:
    return [f"{finding['reason']}: {finding['repro']}" for report in reports for finding in report[key]]


@pytest.fixture(scope="module")
def ops() -> list[str]:
    """The ops that are judged: all that have samples, or a part of them."""
    every = sorted({sample.name for sample in samples.read()})
    return every if EVERYTHING else random.Random(SEED).sample(every, len(every) // PART)


def test_no_rule_is_wrong_and_none_is_missing_without_a_reason(ops: list[str]) -> None:
    reports = rote.validate(*ops)
    assert flat(reports, "wrong") == []
    assert flat(reports, "missing") == []
    assert sum(report["correct"] for report in reports) > (10_000 if EVERYTHING else 1_000)
    assert sum(len(report["left_out"]) for report in reports) > (100 if EVERYTHING else 5)


@pytest.mark.parametrize("mesh", ["4", "2,2"])
def test_no_rule_is_wrong_on_larger_meshes(mesh: str, ops: list[str]) -> None:
    reports = rote.validate(*ops, mesh=mesh, missing=False)
    assert flat(reports, "wrong") == []
    assert sum(report["correct"] for report in reports) > (10_000 if EVERYTHING else 1_000)


def test_planted_errors_are_found() -> None:
    ops = sorted({op for op, _, _ in MUTATIONS.values()})
    assert flat(rote.validate(*ops, missing=False), "wrong") == []
    # The three that fill a shard need a mesh on which some are empty or uneven.
    missed = []
    for what, change in MUTATIONS.items():
        wrong = [
            w
            for mesh in ("2", "4")
            for w in flat(rote.validate(change[0], mesh=mesh, missing=False, changes=[change]), "wrong")
        ]
        if not wrong:
            missed.append(what)
    assert missed == []
    assert len(MUTATIONS) >= 20


@pytest.mark.parametrize(("op", "args", "combination"), FOOLING)
def test_no_symmetry_of_the_data_makes_a_rule_true(op: str, args: str, combination: str) -> None:
    [report] = rote.validate(op, args=args, only=combination)
    assert [finding["combination"] for finding in report["untrue"]] == [combination], report


def test_a_true_combination_is_told_as_such() -> None:
    [report] = rote.validate("mm", args="f32[6,5] f32[5,7]", only="S(1),S(0) -> P(sum)")
    assert report["correct"] == 1
    [report] = rote.validate("nansum", args="f32[6,5] [1]", only="P(sum) -> P(sum)")
    assert len(report["left_out"]) + len(report["missing"]) + report["correct"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ops": ("no_such_op",)}, "no_such_op: no sample"),
        ({"ops": ("mm",), "mesh": "0"}, "mesh"),
        ({"ops": ("mm",), "only": "S(0)"}, "placements"),
        ({"ops": ("mm", "add"), "args": "f32[2]"}, "one op"),
        ({"ops": ("mm",), "args": "f32[2]:odd"}, "odd"),
    ],
)
def test_wrong_requests_are_errors(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        rote.validate(*arguments.pop("ops"), **arguments)
