"""Partials that a script registers with Rote: subclasses of `Partial`, on gloo ranks.

What they give is compared with the op on whole tensors.
"""

import math
import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import log_sum_exp
import pytest
import ragged_shard
import rote
import rote.propagation
import torch
import torch.nn.functional as F
from log_sum_exp import LogSumExp, P
from models import mesh
from oracle import IS_TESTED
from rote._own_rules import overloads
from rote._rules import name_of
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from propagation import engine

aten = torch.ops.aten


@contextmanager
def registered(**options: Any) -> Iterator[None]:
    if options:
        rote.propagation.register_partial(LogSumExp, **{"reduction": "sum", "parameters": ("scale",), **options})
    else:
        log_sum_exp.register()
    try:
        yield
    finally:
        rote.propagation.unregister_partial(LogSumExp)


def laid(whole: Tensor, on: Any, scale: int = 1) -> DTensor:
    """A partial tensor of unequal parts that is this one when it is reduced."""
    ranks, rank = on.size(), on.get_local_rank(0)
    share = (rank + 1) / (ranks * (ranks + 1) / 2)
    return DTensor.from_local(whole + scale * math.log(share), on, [LogSumExp(scale)], run_check=False)


MOVES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "t": (lambda x: x.t(), (6, 4)),
    "transpose": (lambda x: x.transpose(0, 1), (6, 4)),
    "permute": (lambda x: x.permute(2, 0, 1), (6, 4, 2)),
    "view": (lambda x: x.view(24), (6, 4)),
    "unsqueeze": (lambda x: x.unsqueeze(0), (6, 4)),
    "expand": (lambda x: x.expand(6, 3, 4), (6, 1, 4)),
    "slice": (lambda x: x[1:5:2], (6, 4)),
    "select": (lambda x: x[2], (6, 4)),
    "split": (lambda x: x.split(2)[1], (6, 4)),
    "cat": (lambda x: torch.cat([x, x], 1), (6, 4)),
    "stack": (lambda x: torch.stack([x, x]), (6, 4)),
    "flip": (lambda x: x.flip(0), (6, 4)),
    "roll": (lambda x: x.roll(1, 0), (6, 4)),
    "repeat": (lambda x: x.repeat(2, 1), (6, 4)),
    "diagonal": (lambda x: x.diagonal(), (6, 4)),
    "crop": (lambda x: F.pad(x, (-1, -1)), (6, 4)),
    "index_select": (lambda x: x.index_select(0, beside(x, torch.tensor([3, 0]))), (6, 4)),
    "gather": (lambda x: x.gather(0, beside(x, torch.tensor([[3, 0, 1, 1]]))), (6, 4)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (2, 3, 4)),
}
REDUCED: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "clone": (torch.clone, (6, 4)),
    "written clone": (lambda x: x.clone().mul_(2).neg_(), (6, 4)),
    "written list": (lambda x: torch._foreach_mul([x.clone()], 2)[0], (6, 4)),
    "written memory": (lambda x: torch.empty_like(x).copy_(x), (6, 4)),
    "written new memory": (lambda x: x.new_empty(6, 4).copy_(x), (6, 4)),
    "exp": (torch.exp, (6, 4)),
    "sum": (torch.sum, (6, 4)),
    "amax": (lambda x: x.amax(0), (6, 4)),
    "mul": (lambda x: x * 2, (6, 4)),
    "neg": (torch.neg, (6, 4)),
    "mm": (lambda x: x @ x.t(), (6, 4)),
    "sub": (lambda x: x - x, (6, 4)),
    "pad": (lambda x: F.pad(x, (1, 2)), (6, 4)),
    "triu": (torch.triu, (6, 4)),
    "tril": (torch.tril, (6, 4)),
    "diag of a vector": (torch.diag, (6,)),
    "diag_embed": (torch.diag_embed, (6, 4)),
    "where": (lambda x: torch.where(beside(x, torch.arange(4) > 1), x, beside(x, torch.zeros(4))), (6, 4)),
    "masked_fill": (lambda x: x.masked_fill(beside(x, torch.arange(4) > 1), 0.0), (6, 4)),
    "index_fill": (lambda x: x.index_fill(0, beside(x, torch.tensor([1])), 0.0), (6, 4)),
    "scatter": (lambda x: x.scatter(0, beside(x, torch.tensor([[3, 0, 1, 1]])), 0.0), (6, 4)),
    "slice_scatter": (lambda x: x.slice_scatter(beside(x, torch.zeros(2, 4)), 0, 1, 3), (6, 4)),
    "slice_backward": (lambda x: aten.slice_backward(x, [8, 4], 0, 1, 7, 1), (6, 4)),
    "select_backward": (lambda x: aten.select_backward(x, [3, 6, 4], 0, 1), (6, 4)),
    "relu": (torch.relu, (6, 4)),
    "cast": (lambda x: x.float(), (6, 4)),
    "softmax": (lambda x: x.softmax(0), (6, 4)),
    "cumsum": (lambda x: x.cumsum(0), (6, 4)),
    "where of copies": (lambda x: torch.where(beside(x, torch.arange(4) > 1), x, x), (6, 4)),
    "bilinear": (lambda x: F.interpolate(x, scale_factor=2, mode="linear"), (2, 3, 4)),
}


def beside(like: Tensor, whole: Tensor) -> Tensor:
    return DTensor.from_local(whole, like.device_mesh) if isinstance(like, DTensor) else whole


def check(name: str, op: Callable[..., Any], shape: tuple[int, ...], placement: Placement, collectives: int) -> None:
    torch.manual_seed(1)
    whole = torch.randn(shape, dtype=torch.float64)
    for scale in (1, 2):
        with CommDebugMode() as seen:
            found = op(laid(whole, mesh(2), scale))
        expected = LogSumExp(scale) if placement == P else placement
        assert found.placements == (expected,), f"{name}: {found.placements}"
        assert seen.get_total_counts() == collectives, f"{name}: {seen.get_comm_counts()}"
        torch.testing.assert_close(found.full_tensor(), op(whole), msg=lambda said: f"{name}: {said}")


@pytest.mark.ranks(2)
def test_ops_that_move_elements_pass_them() -> None:
    with registered(), rote.propagation.install("best"):
        for name, (op, shape) in MOVES.items():
            check(name, op, shape, P, 0)
        assert {reason for _, reason in rote.propagation.stats().handed_on} <= {
            "DTensor runs the op in a way of its own"
        }


@pytest.mark.ranks(2)
def test_other_ops_reduce_them_first() -> None:
    with registered(), rote.propagation.install("best"):
        torch.manual_seed(1)
        for name, (op, shape) in REDUCED.items():
            whole = torch.randn(shape, dtype=torch.float64)
            with CommDebugMode() as seen:
                found = op(laid(whole, mesh(2)))
            assert not any(isinstance(one, LogSumExp) for one in found.placements), f"{name}: {found.placements}"
            assert seen.get_total_counts() > 0, name
            torch.testing.assert_close(found.full_tensor(), op(whole), msg=lambda said, name=name: f"{name}: {said}")


@pytest.mark.ranks(2)
def test_ops_pass_them_as_the_script_says() -> None:
    """A step moves nothing until it is reduced, and its parts come from shards."""
    on = mesh(2)
    torch.manual_seed(1)
    whole, bias = torch.randn(8, 4, dtype=torch.float64), torch.randn(4, dtype=torch.float64)
    with registered(), rote.propagation.install("best"):
        x = distribute_tensor(whole, on, [Shard(0)])
        with CommDebugMode() as seen:
            found = (x.logsumexp(0) + beside(x, bias)).view(2, 2).t()[1]
        assert found.placements == (P,)
        assert seen.get_total_counts() == 0
        with CommDebugMode() as seen:
            reduced = found.redistribute(placements=[Replicate()])
        assert seen.get_total_counts() == 1
        expected = (whole.logsumexp(0) + bias).view(2, 2).t()[1]
        torch.testing.assert_close(reduced.to_local(), expected)
        torch.testing.assert_close(found.redistribute(placements=[Shard(0)]).full_tensor(), expected)
        # Of two, one is reduced.
        both = laid(whole, on) + laid(whole, on)
        assert both.placements == (P,)
        torch.testing.assert_close(both.full_tensor(), 2 * whole)
        # A number is no tensor: strategies of as many tensors are taken.
        reduced = laid(whole, on) + 1.0
        assert reduced.placements == (Replicate(),)
        torch.testing.assert_close(reduced.to_local(), whole + 1.0)
        # The function looks at the arguments, and what is not among the strategies is by Rote's rule.
        assert x.logsumexp(1).placements == (Shard(0),)
        handed_on = {op for op, _ in rote.propagation.stats().handed_on}
        assert not handed_on & {"aten::add.Tensor", "aten::logsumexp"}
    with registered(passes={aten.add.Tensor: [[P, P]]}), rote.propagation.install("best"), CommDebugMode() as seen:
        kept = laid(whole, on) + 1.0
        assert (kept.placements, seen.get_total_counts()) == ((P,), 0)
        torch.testing.assert_close(kept.full_tensor(), whole + 1.0)


@pytest.mark.ranks(2)
def test_a_function_may_refuse_arguments_and_a_wrong_one_is_warned_of() -> None:
    on = mesh(2)
    whole = torch.randn(8, 4, dtype=torch.float64)

    def passes(x: Any, other: Any, alpha: float = 1) -> Any:
        return [[P, P, Replicate()]] if alpha == 1 else []

    with registered(passes={aten.add.Tensor: passes}), rote.propagation.install("best"):
        x = laid(whole, on)
        other = beside(x, whole)
        assert torch.add(x, other).placements == (P,)
        assert torch.add(x, other, alpha=2).placements == (Replicate(),)
        torch.testing.assert_close(torch.add(x, other, alpha=2).full_tensor(), whole * 3)
    with (
        registered(passes={aten.add.Tensor: lambda x, other: [[P, P]]}),
        rote.propagation.install("best"),
        pytest.warns(RuntimeWarning, match=r"strategy 0 has 2 placements, expected 3"),
    ):
        beside(x, whole) + beside(x, whole)


@pytest.mark.ranks(2)
def test_other_parameters_and_other_partials_are_not_mixed() -> None:
    on = mesh(2)
    torch.manual_seed(1)
    whole = torch.randn(6, 4, dtype=torch.float64)
    share = 0.25 if on.get_local_rank(0) else 0.75
    with registered(), rote.propagation.install("best"):
        others = {
            "scale 2": laid(whole, on, 2),
            "sum": DTensor.from_local(whole * share, on, [Partial()], run_check=False),
            "replicated": DTensor.from_local(whole, on, [Replicate()], run_check=False),
            "shard": distribute_tensor(whole, on, [Shard(0)]),
        }
        for name, other in others.items():
            for op in (torch.stack, torch.cat):
                for pair in ([laid(whole, on), other], [other, laid(whole, on)]):
                    found = op(pair)
                    assert not any(isinstance(one, LogSumExp) for one in found.placements), name
                    torch.testing.assert_close(found.full_tensor(), op([whole, whole]), msg=name)
        for scale in (1, 2):
            assert torch.stack([laid(whole, on, scale)] * 2).placements == (LogSumExp(scale),)


@pytest.mark.ranks(2)
def test_a_mesh_of_two_dims_has_them_beside_others() -> None:
    on = mesh(1, 2)
    torch.manual_seed(1)
    whole = torch.randn(6, 4, dtype=torch.float64)
    share = math.log(0.25 if on.get_local_rank(1) else 0.75)
    with registered(), rote.propagation.install("best"):
        x = DTensor.from_local(whole + share, on, [Shard(0), P], run_check=False)
        assert x.t().placements == (Shard(1), P)
        torch.testing.assert_close(x.t().full_tensor(), whole.t())
        torch.testing.assert_close(x.exp().full_tensor(), whole.exp())


@pytest.mark.ranks(2)
def test_what_is_written_stays_as_it_lies() -> None:
    on = mesh(2)
    whole = torch.randn(6, 4, dtype=torch.float64)
    passes = {aten.add_.Tensor: [[P, P, Replicate()]], aten.add.Tensor: [[P, P, Replicate()]]}
    writes = [lambda y: y.mul_(2), lambda y: y.exp_()]
    if IS_TESTED:  # DTensor of 2.11 writes these to its part alone
        writes += [lambda y: y.zero_(), lambda y: y.fill_(1.0)]
    with registered(passes=passes), rote.propagation.install("best"):
        x = laid(whole, on)
        x += beside(x, whole)
        assert x.placements == (P,)
        torch.testing.assert_close(x.full_tensor(), 2 * whole)
        for write in writes:
            y = laid(whole, on)
            with pytest.raises(RuntimeError):
                write(y)
            torch.testing.assert_close(y.full_tensor(), whole)
        if IS_TESTED:  # DTensor of 2.11 has no rule for it
            assert laid(whole, on).t_().placements == (P,)


@pytest.mark.ranks(2)
def test_rules_of_a_script_take_them() -> None:
    on = mesh(2)
    whole = torch.randn(6, 4, dtype=torch.float64)

    def scaled(x: Any, other: Any) -> Any:
        return [[P, P, Replicate()]]

    rote.propagation.register(aten.logaddexp.default, scaled, replace=True)
    try:
        with registered(passes={aten.logaddexp.default: [[P, Replicate(), P]]}), rote.propagation.install("best"):
            x = laid(whole, on)
            # Wrong for this op, and taken all the same: from its rule and from what is added to it.
            assert torch.logaddexp(x, beside(x, whole)).placements == (P,)
            assert torch.logaddexp(beside(x, whole), x).placements == (P,)
            rote.propagation.unregister(aten.logaddexp.default)
            assert torch.logaddexp(x, beside(x, whole)).placements == (Replicate(),)
            assert torch.logaddexp(beside(x, whole), x).placements == (P,)
            rote.propagation.register(aten.logaddexp.default, scaled, replace=True)
    finally:
        rote.propagation.unregister(aten.logaddexp.default)


@pytest.mark.ranks(2)
def test_they_lie_beside_registered_shards() -> None:
    on = mesh(1, 2)
    torch.manual_seed(1)
    whole = torch.randn(8, 4, dtype=torch.float64)
    rows = ragged_shard.RaggedShard(0, (1, 3))
    ragged_shard.register()
    try:
        with registered(), rote.propagation.install("best"):
            x = DTensor.from_local(
                whole + math.log(0.25 if on.get_local_rank(1) else 0.75), on, [Replicate(), P], run_check=False
            )
            found = x.redistribute(placements=[Replicate(), rows])
            assert found.placements == (Replicate(), rows)
            torch.testing.assert_close(found.full_tensor(), whole)
            torch.testing.assert_close((x.exp() + found).full_tensor(), whole.exp() + whole)
    finally:
        rote.propagation.unregister_sharding(ragged_shard.RaggedShard)


@pytest.mark.ranks(2)
def test_same_and_unregistered_ones_are_dtensors() -> None:
    """DTensor is asked as it is about any class, and Rote takes none for a plain partial."""
    on = mesh(2)
    whole = torch.randn(6, 4, dtype=torch.float64)

    def seen() -> list[Any]:
        found: list[Any] = []
        for op in (torch.t, lambda x: x.view(24), lambda x: x * 2, torch.exp, lambda x: x + x):
            try:
                found.append(op(laid(whole, on)).placements)
            except Exception as problem:
                found.append(type(problem))
        return found

    today = seen()
    with rote.propagation.install("best"):
        assert seen() == today
        assert any("LogSumExp" in reason for _, reason in rote.propagation.stats().handed_on)
        with registered():
            assert laid(whole, on).t().placements == (P,)
            assert (laid(whole, on) * 2).placements == (Replicate(),)
        assert seen() == today
        with pytest.raises(ValueError, match="LogSumExp: no partial is registered"):
            rote.propagation.unregister_partial(LogSumExp)
    with registered(), rote.propagation.install():
        assert seen() == today
        reasons = {reason for _, reason in rote.propagation.stats().handed_on}
        assert "a placement of the script's own" in reasons
    with registered():
        assert seen() == today
    assert not rote.propagation._rules.PASSES


@pytest.mark.ranks(2)
def test_a_captured_step_is_guarded_by_them() -> None:
    on = mesh(2)
    torch.manual_seed(1)
    with registered(), rote.propagation.install("best"):
        captured = rote.capture(lambda x: (x.t().exp(), x.t()))
        for _ in range(4):
            for scale in (1, 2):
                whole = torch.randn(6, 4, dtype=torch.float64)
                reduced, moved = captured(laid(whole, on, scale))
                torch.testing.assert_close(reduced.full_tensor(), whole.t().exp())
                assert moved.placements == (LogSumExp(scale),)
                torch.testing.assert_close(moved.full_tensor(), whole.t())
        assert (captured.stats.variants, captured.stats.replays) == (2, 4), captured.stats


@pytest.mark.ranks(2)
def test_the_example_of_the_documentation_runs() -> None:
    page = (Path(__file__).parents[2] / "docs" / "propagation.md").read_text()
    section = page.partition("## Partials of your own\n")[2].partition("\n## ")[0]
    lines = section[section.index("\n    ") :].split("\n- **")[0].splitlines()
    names: dict[str, Any] = {"mesh": mesh(2), "whole": torch.randn(8, 4, dtype=torch.float64)}
    exec(textwrap.dedent("\n".join(line for line in lines if line.startswith("    ") or not line)), names)
    try:
        with CommDebugMode() as seen:
            found = names["step"](names["whole"])
        assert seen.get_total_counts() == 1
        torch.testing.assert_close(found.to_local(), names["whole"].logsumexp(0) + 1)
    finally:
        rote.propagation.uninstall()
        rote.propagation.unregister_partial(names["LogSumExp"])


def test_what_cannot_be_registered() -> None:
    class Inherits(Partial):
        def __eq__(self, other: object) -> bool:
            return type(other) is type(self)

        __hash__ = Partial.__hash__

    def refused(kind: type[Exception], said: str, cls: Any = LogSumExp, **options: Any) -> None:
        with pytest.raises(kind, match=said):
            rote.propagation.register_partial(cls, **{"reduction": "sum", **options})

    refused(TypeError, "expected a subclass of Partial", cls=Shard)
    refused(TypeError, "expected a subclass of Partial", cls=Partial)
    refused(TypeError, "expected a subclass of Partial", cls=P)
    refused(
        TypeError,
        "with __hash__ and _reduce_value and _reduce_shard_value and _partition_value of its own",
        cls=Inherits,
    )
    refused(ValueError, "expected reduction=, one of sum, avg, max, min, product, found 'mean'", reduction="mean")
    refused(TypeError, "expected names of attributes in parameters=", parameters="scale")
    refused(TypeError, "expected passes=, strategies by op", passes=[[P, P]])
    refused(TypeError, "expected passes= of ops with their overloads", passes={aten.add: [[P, P]]})
    refused(TypeError, "expected a list of strategies or a function", passes={aten.add.Tensor: 3})
    refused(ValueError, "strategy 1 has 4 placements", passes={aten.add.Tensor: [[P, P], [P, P, P, P]]})
    refused(ValueError, "strategy 0 has 1 placements", passes={aten.add.Tensor: [[P]]})
    refused(ValueError, "expected ops on single tensors", passes={aten._foreach_neg.default: [[P, P]]})
    refused(ValueError, "there is no rule to add to: register one", passes={aten.nonzero.default: [[P, P]]})
    with registered():
        refused(ValueError, "LogSumExp is registered already")
        refused(ValueError, "expected a name that is not taken", cls=type("LogSumExp", (LogSumExp,), {}))
    refused(ValueError, "expected a name that is not taken", cls=type("max", (LogSumExp,), {}))
    assert not rote.propagation._rules.PASSES


@pytest.mark.ranks(2)
def test_parameters_have_to_say_what_a_placement_is() -> None:
    """One that they do not tell apart from others is left to DTensor, with a warning."""
    on = mesh(2)
    whole = torch.randn(6, 4)
    with registered(parameters=()), rote.propagation.install("best"), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert laid(whole, on).t().placements == (P,)
        answered = rote.propagation.stats().answered
        laid(whole, on, 3).t()
        assert any("is not equal to a LogSumExp that is made of its parameters" in str(one.message) for one in said)
        assert rote.propagation.stats().answered == answered


def test_propagate_says_how_an_op_runs() -> None:
    with registered():
        found = rote.propagate("aten::t", ["f32[6,4] @ P(LogSumExp,2)"], mesh="tp=2")
        assert found.outputs[0].placements == (LogSumExp(2),)
        assert "P(LogSumExp,2)" in str(found)
        found = rote.propagate("aten::exp", ["f32[6,4] @ P(LogSumExp,1)"], mesh="tp=2", why=True)
        assert [step.kind for step in found.inputs[0].steps] == ["all_reduce"]
        found = rote.propagate("aten::add.Tensor", ["f32[6,4] @ P(LogSumExp,1)", "f32[6,4] @ R"], mesh="tp=2")
        assert found.outputs[0].placements == (P,)
        assert found.bytes == 0
        found = rote.propagate("aten::logsumexp", ["f32[6,4] @ S(0)", [0]], mesh="tp=2")
        assert found.outputs[0].placements == (P,)
    with pytest.raises(ValueError, match="LogSumExp"):
        rote.propagate("aten::t", ["f32[6,4] @ P(LogSumExp,2)"], mesh="tp=2")


def judged(op: str, args: str, **options: Any) -> dict[str, Any]:
    (report,) = rote.validate(op, args=args, missing=options.pop("missing", False), **options)
    assert report["samples"] == 1, report["unjudged"]
    return report


def wrong(report: dict[str, Any]) -> list[str]:
    return [one["combination"] for one in report["wrong"]]


@pytest.mark.parametrize("device_mesh", ["2", "3", "2,2"])
def test_the_truth_table_judges_what_passes_them(device_mesh: str) -> None:
    def added(name: str, op: str, args: str) -> int:
        """How many claims the registration adds, all of them right."""
        before = judged(op, args, mesh=device_mesh)["correct"]
        with registered():
            after = judged(op, args, mesh=device_mesh)
        assert not wrong(after), (name, after["wrong"])
        return int(after["correct"]) - int(before)

    assert added("whole", "aten::add.Tensor", "f32[8,6] f32[8,6]") > 0
    assert added("whole, scaled", "aten::add.Tensor", "f32[8,6] f32[6] 2.5") > 0
    assert added("made", "aten::logsumexp", "f32[12,6] [0]") > 0
    assert added("made of both dims", "aten::logsumexp", "f32[12,6] [0,1]") > 0
    assert added("moved", "aten::t", "f32[8,6]") == 0
    with registered():
        for op, args in [
            ("aten::t", "f32[8,6]"),
            ("aten::view", "f32[8,6] [48]"),
            ("aten::cat", "{f32[4,6]; f32[2,6]}"),
            ("aten::roll", "f32[8,6] [1] [0]"),
            ("aten::gather", "f32[8,6] 0 i64[3,6]<8"),
        ]:
            with_them = judged(op, args, mesh=device_mesh, placements=[P, LogSumExp(3)])
            assert not wrong(with_them), (op, with_them["wrong"])
            assert with_them["correct"] >= judged(op, args, mesh=device_mesh)["correct"] + 2, op


# Strategies that are wrong for some arguments or all.
WRONG: dict[str, tuple[Any, list[tuple[Any, ...]], str, str]] = {
    "twice": (aten.add.Tensor, [(P, P, P)], "f32[8,6] f32[8,6]", "P(LogSumExp,1),P(LogSumExp,1) -> P(LogSumExp,1)"),
    "alpha": (aten.add.Tensor, [(P, Replicate(), P)], "f32[8,6] f32[8,6] 2", "R,P(LogSumExp,1) -> P(LogSumExp,1)"),
    "neg": (aten.neg.default, [(P, P)], "f32[8,6]", "P(LogSumExp,1) -> P(LogSumExp,1)"),
    "as a sum": (aten.exp.default, [(P, P)], "f32[8,6]", "P(LogSumExp,1) -> P(LogSumExp,1)"),
    "other": (aten.t.default, [(LogSumExp(2), P)], "f32[8,6]", "P(LogSumExp,1) -> P(LogSumExp,2)"),
    "of a whole": (aten.t.default, [(P, Replicate())], "f32[8,6]", "R -> P(LogSumExp,1)"),
    "of a shard": (aten.sum.dim_IntList, [(P, Shard(0))], "f32[8,6] [0]", "S(0) -> P(LogSumExp,1)"),
    "reduced": (aten.sum.dim_IntList, [(P, P)], "f32[8,6] [0]", "P(LogSumExp,1) -> P(LogSumExp,1)"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_truth_table_finds_wrong_strategies(case: str) -> None:
    op, strategies, args, combination = WRONG[case]
    with registered(passes={op: strategies}, combine=log_sum_exp.combined):
        assert wrong(judged(name_of(op), args)) == [combination]


def test_the_truth_table_says_what_could_pass() -> None:
    args = "f32[8,6] f32[8,6]"
    with registered(passes={}, combine=log_sum_exp.combined):
        report = judged("aten::add.Tensor", args, placements=[P], missing=True)
        assert not report["missing"]
        could = {one["combination"] for one in report["left_out"] if "LogSumExp" in one["reason"]}
        assert could == {f"{inputs} -> P(LogSumExp,1)" for inputs in ("P(LogSumExp,1),R", "R,P(LogSumExp,1)")}
        only = rote.validate("aten::neg", args="f32[8,6]", only="P(LogSumExp,1) -> P(LogSumExp,1)")[0]
        assert [one["combination"] for one in only["untrue"]] == ["P(LogSumExp,1) -> P(LogSumExp,1)"]


def test_the_command_line_judges_them(tmp_path: Path) -> None:
    rote_binary = engine.binary()
    assert rote_binary is not None, "cargo build --release"
    (tmp_path / "my_partials.py").write_text(
        "import log_sum_exp, torch, rote.propagation\n"
        "P = log_sum_exp.P\n"
        "passes = {torch.ops.aten.add.Tensor: [(P, P, P)]}\n"
        "rote.propagation.register_partial(log_sum_exp.LogSumExp, reduction='sum', parameters=('scale',),"
        " passes=passes, combine=log_sum_exp.combined)\n"
    )
    places = os.pathsep.join([str(Path(rote.__file__).parent.parent), str(Path(__file__).parent)])
    environment = os.environ | {"ROTE_PYTHON": sys.executable, "PYTHONPATH": places}
    with_them = ["--import", "my_partials", "--placement", "P(LogSumExp,1)"]

    def judged_by(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [rote_binary, "validate", *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)

    right = judged_by("--op", "t,exp,logsumexp", *with_them)
    assert right.returncode == 0, right.stdout + right.stderr
    wrong = judged_by("--op", "add.Tensor", "--args", "f32[8,6] f32[6]", *with_them)
    assert wrong.returncode == 1
    assert "WRONG P(LogSumExp,1),P(LogSumExp,1) -> P(LogSumExp,1)" in wrong.stdout
    repro = next(line for line in wrong.stdout.splitlines() if line.lstrip().startswith("rote validate "))
    again = judged_by(*shlex.split(repro)[2:])
    assert again.returncode == 1 and "WRONG" in again.stdout, again.stdout + again.stderr
    for placement in ("P(LogSumExp,x)", "Nope(0)", "S(0)"):
        unknown = judged_by("--op", "t", "--import", "my_partials", "--placement", placement)
        assert unknown.returncode == 2 and placement in unknown.stderr, placement
    unread = judged_by("--op", "neg", "--args", "f32[8,6")
    assert unread.returncode == 2 and "f32[8,6" in unread.stderr, unread.stderr
    assert judged_by("--op", "mm", "--args", "f32[8,6] f32[8,6]").returncode == 1


class GeometricMean(LogSumExp):
    """Of positive numbers alone. The scale is part of the class's name alone."""

    def __eq__(self, other: object) -> bool:
        return type(other) is GeometricMean

    def __hash__(self) -> int:
        return hash(GeometricMean)


def test_parts_may_have_to_be_positive() -> None:
    G = GeometricMean()
    passes = {
        aten.mul.Tensor: [[G, G, G]],
        aten.reciprocal.default: [[G, G]],
        aten.exp.default: [[G, G]],
        aten.sqrt.default: [[G, G]],
    }
    rote.propagation.register_partial(
        GeometricMean,
        reduction="product",
        passes=passes,
        combine=lambda placement, parts: torch.stack(parts).log().mean(0).exp(),
    )
    try:
        assert not wrong(judged("aten::mul.Tensor", "f32[8,6] f32[8,6]"))
        assert not wrong(judged("aten::reciprocal", "f32[8,6]"))
        assert not wrong(judged("aten::sqrt", "f32[8,6]"))
        assert wrong(judged("aten::exp", "f32[8,6]")) == ["P(GeometricMean) -> P(GeometricMean)"]
        # With both on one mesh dim each: means of means.
        assert not wrong(judged("aten::mul.Tensor", "f32[4,6] f32[4,6]", mesh="2,3"))
    finally:
        rote.propagation.unregister_partial(GeometricMean)


class Combined(LogSumExp):
    """Parts combine as a function says."""

    combine: Callable[[Tensor], Tensor]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    def __hash__(self) -> int:
        return hash(type(self))


class Halves(Combined):
    combine = staticmethod(lambda parts: parts.sum(0) / 2)


class Root(Combined):
    combine = staticmethod(lambda parts: parts.square().sum(0).sqrt())


class Largest(Combined):
    """By magnitude."""

    combine = staticmethod(
        lambda parts: torch.where(parts.amax(0) >= -parts.amin(0), parts.amax(0), parts.amin(0)),
    )


class Top(Combined):
    combine = staticmethod(lambda parts: parts.amax(0))


class MeanOfMeans(Combined):
    """It matters on which mesh dim parts are combined first."""

    combine = staticmethod(lambda parts: parts.mean(0) + parts[0].abs() * 0.1)


S: Any = Partial()
# What parts combine to when there is one, or when some are negative.
TOLD: list[tuple[type[Combined], str, str, list[Any], bool]] = [
    (Halves, "aten::neg", "f32[6,4]", [Halves(), Halves()], True),
    (Halves, "aten::add.Tensor", "f32[6,4] f32[4]", [Halves(), Halves(), Halves()], True),
    (Halves, "aten::neg", "f32[6,4]", [S, Halves()], False),
    (Halves, "aten::mul.Scalar", "f32[6,4] 2.0", [S, Halves()], False),
    (Root, "aten::relu", "f32[6,4]", [Root(), Root()], False),
    (Root, "aten::abs", "f32[6,4]", [Root(), Root()], True),
    (Largest, "aten::neg", "f32[6,4]", [Largest(), Largest()], True),
    (Largest, "aten::relu", "f32[6,4]", [Largest(), Largest()], False),
    (Largest, "aten::neg", "i64[6,4]", [Largest(), Largest()], True),
    (Largest, "aten::mul.Tensor", "f32[6,4] f32[4]", [Largest(), Largest(), Replicate()], True),
    (Top, "aten::_to_copy", "f32[6,4] i64", [Top(), Top()], True),
    (Top, "aten::neg", "i64[6,4]", [Top(), Top()], False),
]


@pytest.mark.parametrize("device_mesh", ["2", "3", "2,2"])
@pytest.mark.parametrize(("cls", "op", "args", "strategy", "right"), TOLD)
def test_the_truth_table_combines_as_many_parts_as_there_are_ranks(
    cls: type[Combined], op: str, args: str, strategy: list[Any], right: bool, device_mesh: str
) -> None:
    overload = overloads(op)[0]
    rote.propagation.register_partial(
        cls,
        reduction="sum",
        passes={overload: [strategy]},
        combine=lambda placement, parts: cls.combine(torch.stack(parts)),
    )
    try:
        report = judged(op, args, mesh=device_mesh)
    finally:
        rote.propagation.unregister_partial(cls)
    assert bool(wrong(report)) != right, report
    if device_mesh != "2,2":  # else, mixed with other partials
        assert not any(f"P({cls.__name__})" in one["reason"] for one in report["unjudged"]), report["unjudged"]


def test_parts_that_depend_on_the_mesh_dim_are_not_judged() -> None:
    rote.propagation.register_partial(
        MeanOfMeans,
        reduction="sum",
        passes={aten.neg.default: [[MeanOfMeans(), MeanOfMeans()]]},
        combine=lambda placement, parts: MeanOfMeans.combine(torch.stack(parts)),
    )
    try:
        report = judged("aten::neg", "f32[6,4]", mesh="2,2")
        assert not wrong(report)
        assert any("if another mesh dim comes first" in one["reason"] for one in report["unjudged"]), report
    finally:
        rote.propagation.unregister_partial(MeanOfMeans)


def test_bf16_is_judged_by_what_it_can_hold() -> None:
    assert not wrong(judged("aten::mul.Tensor", "bf16[6,4] bf16[4]"))


def test_the_truth_table_has_to_know_how_parts_combine() -> None:
    rote.propagation.register(aten.logaddexp.default, lambda x, y: [[P, P, P]], replace=True)
    args = "f32[8,6] f32[8,6]"
    passes = {aten.neg.default: [[P, P]]}
    try:
        with registered(passes=passes):
            # What cannot be judged is left out of a rule of Rote's.
            assert not wrong(judged("aten::neg", "f32[8,6]"))
            with pytest.raises(ValueError, match=r"cannot judge a rule with LogSumExp\(1\): register .* with combine="):
                rote.validate("aten::logaddexp", args=args)
            with pytest.raises(RuntimeError, match=r"P\(LogSumExp,1\): .* register it with combine="):
                rote.validate("aten::t", args="f32[8,6]", placements=[P])
        with registered(combine=log_sum_exp.combined):
            assert not wrong(judged("aten::logaddexp", args))
    finally:
        rote.propagation.unregister(aten.logaddexp.default)
    with registered(), pytest.raises(RuntimeError, match=r"S\(0\): expected a placement of a registered class"):
        rote.validate("aten::t", args="f32[8,6]", placements=[Shard(0)])
    with pytest.raises(TypeError, match="expected combine=, a function, found 3"), registered(combine=3):
        pass


def raising(placement: Any, parts: list[Tensor]) -> Tensor:
    raise ArithmeticError("no sum today")


@pytest.mark.parametrize(
    ("combine", "reason"),
    [
        (raising, "LogSumExp: ArithmeticError: no sum today"),
        (lambda placement, parts: parts[0][:1], r"expected combine= to return torch.float64 of shape \[48\]"),
        (lambda placement, parts: parts[0].float(), "expected combine= to return torch.float64"),
        (lambda placement, parts: 3.0, r"to return torch.float64 of shape \[48\], found 3.0"),
    ],
)
def test_what_goes_wrong_in_combine_is_said(combine: Any, reason: str) -> None:
    passes = {aten.logsumexp.default: lambda x, dims, keepdim=False: [[P, Shard(0)]], aten.neg.default: [[P, P]]}
    with registered(passes=passes, combine=combine):
        report = judged("aten::neg", "f32[48]")
        assert any(re.search(reason, one["reason"]) for one in report["unjudged"]), report
        (one,) = judged("aten::logsumexp", "f32[8,48] [0]")["wrong"]
        assert re.search(reason, one["reason"])
