"""Sharding rules that a script registers with `rote.propagation.register`, or has registered with PyTorch.

The numbers of the results are those of the op on the whole tensors. What Rote refuses, DTensor answers or refuses.
"""

import gc
import itertools
import os
import re
import shlex
import subprocess
import sys
import textwrap
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import rote
import rote.propagation
import torch
from models import mesh
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder, register_single_dim_strategy
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from propagation import engine, samples

MYLIB = """
import rote
import torch
from torch.distributed.tensor import Partial, Replicate, Shard

@torch.library.custom_op("mylib::scaled_rows", mutates_args=())
def scaled_rows(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x * scale[:, None]

@scaled_rows.register_fake
def _(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
"""
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


def places(op: Any, function: Callable[..., Any], *args: Any, policy: Any = "best") -> Any:
    """What an op makes of distributed tensors by a rule."""
    with rule(op, function), rote.propagation.install(policy):
        made = op(*args)
        answered(f"rote_rules::{op._schema.name.split('::')[1]}")
    return made


@pytest.mark.ranks(2)
def test_arguments_are_told_apart() -> None:
    """A function may look at any argument: DTensor must not take the answer for one as that for another."""

    def strategies(x: Any, dim: int) -> list[list[Placement]]:
        other = 1 - dim
        return [[Shard(0), Shard(other)], [Partial(), Shard(dim)]]

    torch.manual_seed(0)
    whole = torch.randn(6, 4)
    x = distribute_tensor(whole, mesh(2), [Shard(0)])
    with rule(OPS.summed.default, strategies), rote.propagation.install("same"):
        for dim, placement in [(0, Partial()), (1, Shard(0)), (0, Partial())]:
            made = OPS.summed(x, dim)
            assert made.placements == (placement,)
            torch.testing.assert_close(made.full_tensor(), whole.sum(dim))
        answered("rote_rules::summed")


@pytest.mark.ranks(2)
def test_functions_see_metas_and_arguments() -> None:
    seen: list[Any] = []

    def strategies(tensors: Any, weight: float = 1.0) -> list[list[Placement]]:
        seen.append((tensors[0].shape, tensors[1].stride, tensors[0].dtype, weight))
        return [[Shard(0)] * 4]

    a, b = torch.randn(8, 3), torch.randn(3, 8).t()
    on = mesh(2)
    given = [distribute_tensor(a, on, [Shard(0)]), distribute_tensor(b, on, [Replicate()])]
    first, second = places(OPS.moments.default, strategies, given, 0.5)
    assert seen == [(torch.Size([8, 3]), (1, 8), torch.float32, 0.5)]
    assert first.placements == second.placements == (Shard(0),)
    for made, expected in zip((first, second), moments([a, b], 0.5), strict=True):
        torch.testing.assert_close(made.full_tensor(), expected)


@pytest.mark.ranks(2)
def test_shards_that_would_not_be_chunks_are_gathered() -> None:
    """The shards of 5 rows, doubled, are 6 and 4 rows, and `torch.chunk` makes 5 and 5."""
    for rows, expected in [(5, Replicate()), (6, Shard(0))]:
        whole = torch.randn(rows, 2)
        x = distribute_tensor(whole, mesh(2), [Shard(0)])
        made = places(OPS.twice.default, lambda x: [[Shard(0), Shard(0)]], x)
        assert made.placements == (expected,)
        assert torch.equal(made.full_tensor(), twice(whole))


@pytest.mark.ranks(4)
def test_placeholders_stand_for_strided_shards() -> None:
    whole = torch.arange(16.0).reshape(8, 2)
    for of_x, kept in [(_ShardingPlaceholder(0), True), (Shard(0), False)]:
        on = mesh(2, 2)
        x = distribute_tensor(whole, on, [Replicate(), Shard(0)])
        local = x.to_local().reshape(2, 2, 2)[:, on.get_local_rank(0)]
        x = DTensor.from_local(local, on, [_StridedShard(0, split_factor=2), Shard(0)], run_check=False)
        strategies = [[of_x, of_x, of_x]]
        made = places(
            OPS.scaled_rows.default,
            lambda x, scale, strategies=strategies: strategies,
            x,
            distribute_tensor(torch.ones(8), on, [Replicate()] * 2),
        )
        assert (made.placements == x.placements) == kept
        assert torch.equal(made.full_tensor(), x.full_tensor())


@pytest.mark.ranks(2)
def test_what_an_op_writes_stays() -> None:
    def strategies(x: Any, by: Any) -> list[list[Placement]]:
        return [[Shard(0), Replicate()], [Shard(1), Replicate()]]

    whole, by = torch.randn(4, 6), torch.tensor(3.0)
    on = mesh(2)
    for placement in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(whole.clone(), on, [placement])
        local = x.to_local()
        assert places(OPS.double_.default, strategies, x, distribute_tensor(by, on, [Replicate()])) is None
        assert x.placements == (placement,)
        assert x.to_local().data_ptr() == local.data_ptr()
        assert torch.equal(x.full_tensor(), 3 * whole)
    x = distributed(whole, [Partial()], on)
    with rule(OPS.double_.default, strategies), rote.propagation.install("best"):
        with pytest.raises(Exception, match="double_"):
            OPS.double_(x, distribute_tensor(by, on, [Replicate()]))
        reasons = [reason for op, reason in rote.propagation.stats().handed_on if op == "rote_rules::double_"]
    assert len(reasons) == 1 and "is written in place and cannot be redistributed" in reasons[0]


@pytest.mark.ranks(2)
def test_an_op_that_rote_and_dtensor_know() -> None:
    """A rule of the script goes before those of Rote and DTensor, also in place and with `out=`."""
    only_columns = [[Shard(1), Shard(1)]]
    torch.manual_seed(0)
    whole = torch.randn(4, 6)
    x = distribute_tensor(whole, mesh(2), [Shard(0)])
    asked: list[str] = []

    def strategies(*args: Any, **kwargs: Any) -> list[list[Placement]]:
        asked.append("relu")
        return only_columns

    with pytest.raises(ValueError, match="aten::relu: Rote has a rule for this op; replace=True"):
        rote.propagation.register(torch.ops.aten.relu.default, strategies)
    for policy in ("same", "best"):
        asked.clear()
        with rote.propagation.install(policy):
            assert torch.relu(x).placements == (Shard(0),)
            with rule(torch.ops.aten.relu.default, strategies, replace=True):
                before = rote.propagation.stats().answered
                made = torch.relu(x)
                assert rote.propagation.stats().answered > before
            assert torch.relu(x).placements == (Shard(0),)
        assert asked == ["relu"]
        assert made.placements == (Replicate(),)  # which costs less here than Shard(1)
        assert torch.equal(made.full_tensor(), torch.relu(whole))
    with rule(torch.ops.aten.relu_.default, strategies, replace=True), rote.propagation.install("best"):
        y = distribute_tensor(whole.clone(), mesh(2), [Shard(1)])
        torch.relu_(y)
        assert y.placements == (Shard(1),) and torch.equal(y.full_tensor(), torch.relu(whole))
    columns = [[Shard(1), Shard(1), Replicate(), Shard(1)]]
    with rule(torch.ops.aten.add.out, lambda *_, **__: columns, replace=True), rote.propagation.install("best"):
        out = distribute_tensor(torch.empty(4, 6), mesh(2), [Shard(1)])
        made = torch.add(x, distribute_tensor(torch.tensor(1.0), mesh(2), [Replicate()]), out=out)
        answered("aten::add.out")
        assert made.placements == (Shard(1),) and torch.equal(out.full_tensor(), whole + 1)


@pytest.mark.ranks(2)
def test_rules_answer_only_while_rote_is_installed() -> None:
    x = distribute_tensor(torch.ones(4, 2), mesh(2), [Shard(0)])
    scale = distribute_tensor(torch.ones(4), mesh(2), [Shard(0)])
    with rule(OPS.scaled_rows.default, lambda x, scale: ROWS):
        for _ in range(2):
            with pytest.raises(NotImplementedError):
                OPS.scaled_rows(x, scale)
            with rote.propagation.install():
                assert OPS.scaled_rows(x, scale).placements == (Shard(0),)
    with rote.propagation.install(), pytest.raises(NotImplementedError):
        OPS.scaled_rows(x, scale)


@pytest.mark.ranks(2)
def test_captured_steps_follow_the_rules() -> None:
    """A plan that was recorded by a rule is replayed only while the rule is there."""
    x = distribute_tensor(torch.ones(4, 2), mesh(2), [Shard(0)])
    scale = distribute_tensor(torch.arange(4.0), mesh(2), [Shard(0)])
    step = rote.capture(lambda x, scale: OPS.scaled_rows(x, scale))
    rows, replicated = [[Shard(0)] * 3], []
    with rote.propagation.install("best"):
        for strategies, expected in [(rows, Shard(0)), (replicated, Replicate()), (rows, Shard(0))]:
            with rule(OPS.scaled_rows.default, lambda x, scale, strategies=strategies: strategies):
                for _ in range(3):
                    made = step(x, scale)
                    assert made.placements == (expected,)
                    assert torch.equal(made.full_tensor(), scaled_rows(x.full_tensor(), scale.full_tensor()))


def registered_with_torch(asked: list[Any]) -> Any:
    @torch.library.custom_op("rote_rules::torchs", mutates_args=())
    def torchs(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale[:, None]

    @torchs.register_fake
    def _(x: Tensor, scale: Tensor) -> Tensor:
        return torch.empty_like(x)

    @register_single_dim_strategy(OPS.torchs.default)
    def strategies(op: Any, args: Any, kwargs: Any) -> list[list[Any]]:
        asked.append((op, [meta.shape for meta in args], kwargs))
        return ROWS

    return OPS.torchs


@pytest.mark.ranks(2)
def test_what_is_registered_with_pytorch() -> None:
    asked: list[Any] = []
    op = registered_with_torch(asked)
    torch.manual_seed(0)
    whole, scale = torch.randn(8, 6), torch.randn(8)
    for policy, handed_on in [("best", set()), ("same", {"a strategy of the script's own is registered"})]:
        asked.clear()
        with rote.propagation.install(policy):
            made = op(distribute_tensor(whole, mesh(2), [Shard(0)]), distribute_tensor(scale, mesh(2), [Replicate()]))
            assert {
                why for name, why in rote.propagation.stats().handed_on if name == "rote_rules::torchs"
            } == handed_on
        assert asked[0] == (op.default, [(8, 6), (8,)], {})
        assert made.placements == (Shard(0),)
        torch.testing.assert_close(made.full_tensor(), whole * scale[:, None])


def raises(x: Any, scale: Any) -> list[list[Placement]]:
    raise KeyError("no table")


@pytest.mark.ranks(2)
def test_an_interrupt_in_a_rule_ends_the_step() -> None:
    def interrupted(x: Any, scale: Any) -> Any:
        raise KeyboardInterrupt

    x = distribute_tensor(torch.ones(4, 2), mesh(2), [Shard(0)])
    scale = distribute_tensor(torch.ones(4), mesh(2), [Shard(0)])
    with rule(OPS.scaled_rows.default, interrupted), rote.propagation.install(), pytest.raises(KeyboardInterrupt):
        OPS.scaled_rows(x, scale)


@pytest.mark.ranks(2)
def test_a_rule_cannot_uninstall() -> None:
    told = []

    def uninstalling(x: Any, scale: Any) -> Any:
        with pytest.raises(RuntimeError, match="a sharding rule cannot uninstall Rote") as raised:
            rote.propagation.uninstall()
        told.append(raised)
        return ROWS

    x = distribute_tensor(torch.ones(4, 2), mesh(2), [Shard(0)])
    scale = distribute_tensor(torch.ones(4), mesh(2), [Shard(0)])
    with rule(OPS.scaled_rows.default, uninstalling), rote.propagation.install():
        assert OPS.scaled_rows(x, scale).placements == (Shard(0),)
    assert told


@pytest.mark.ranks(1)
def test_threads_ask_a_rule_in_turn() -> None:
    on, made = mesh(1), list[Any]()

    def ask(number: int) -> None:
        for i in range(100):
            x = DTensor.from_local(torch.ones(3, 2 + i), on, [Shard(0)], run_check=False)
            scale = DTensor.from_local(torch.ones(3), on, [Shard(0)], run_check=False)
            made.append(OPS.scaled_rows(x, scale).placements)

    with rule(OPS.scaled_rows.default, lambda x, scale: ROWS), rote.propagation.install():
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not rote.propagation.stats().handed_on
    assert made == [(Shard(0),)] * 400


@pytest.mark.ranks(1)
def test_an_installation_leaves_nothing() -> None:
    on = mesh(1)

    def cycle() -> weakref.ref[Any]:
        with rule(OPS.scaled_rows.default, lambda x, scale: ROWS), rote.propagation.install():
            x = DTensor.from_local(torch.ones(3, 2), on, [Shard(0)], run_check=False)
            OPS.scaled_rows(x, DTensor.from_local(torch.ones(3), on, [Shard(0)], run_check=False))
            return weakref.ref(rote.propagation._installed)

    gone = [cycle() for _ in range(3)]
    gc.collect()
    assert [each() for each in gone] == [None] * 3


class Odd(Shard):
    pass


WRONG: dict[str, tuple[Any, str]] = {
    "length": ([[Shard(0), Shard(0)]], "strategy 0 has 2 placements, expected 3: of 1 results and 2 tensor inputs"),
    "class": ([ROWS[0], [Odd(0), Shard(0), Shard(0)]], r"strategy 1, placement 0: expected Shard, .* of class Odd"),
    "none": ([[None, Shard(0), Shard(0)]], r"strategy 0, placement 0: expected Shard, .* found None"),
    "no placement": ([["S(0)", Shard(0), Shard(0)]], r"expected Shard, .* found 'S\(0\)' of class str"),
    "dim": ([[Shard(0), Shard(0), Shard(1)]], r"placement 2: S\(1\) is no shard of a tensor with 1 dims"),
    "reduction": ([[Partial("bxor"), Shard(0), Shard(0)]], r"P\(bxor\): expected a reduction among sum, avg"),
    "no list": (3, "raised TypeError"),
    "raises": (raises, "raised KeyError: 'no table'"),
    "arguments": (lambda x: ROWS, "raised TypeError"),
    "too many": ([[Partial(), Partial(), Replicate()]] * 200, "at most 128 strategies"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_rule_is_told(what: str) -> None:
    """The message names op and function. DTensor's own answer follows: here, that it has no rule."""
    said, message = WRONG[what]

    def strategies(x: Any, scale: Any) -> Any:
        return said

    function = said if callable(said) else strategies
    x = distribute_tensor(torch.ones(4, 2), mesh(2), [Shard(0)])
    scale = distribute_tensor(torch.ones(4), mesh(2), [Shard(0)])
    with rule(OPS.scaled_rows.default, function), rote.propagation.install():
        with warnings.catch_warnings(record=True) as told, pytest.raises(NotImplementedError):
            warnings.simplefilter("always")
            OPS.scaled_rows(x, scale)
        reasons = [why for op, why in rote.propagation.stats().handed_on if op == "rote_rules::scaled_rows"]
    assert len(reasons) == 1
    texts = [str(one.message) for one in told if "rote" in str(one.message)]
    assert len(texts) == (what != "too many")  # that is known from Rote's answer, and stands in the reasons
    for text in texts + reasons:
        assert re.search(message, text), text
        assert "rote_rules::scaled_rows" in text
        assert what == "too many" or f"{function.__qualname__} ({__file__}:" in text


@pytest.mark.ranks(2)
def test_a_wrong_rule_of_an_op_that_dtensor_knows() -> None:
    x = distribute_tensor(torch.ones(4, 2), mesh(2), [Shard(0)])
    with (
        rule(torch.ops.aten.relu.default, lambda x: [[Shard(0)]], replace=True),
        rote.propagation.install("best"),
        pytest.warns(RuntimeWarning, match=r"aten::relu.*strategy 0 has 1 placements.*DTensor's own propagation"),
    ):
        assert torch.relu(x).placements == (Shard(0),)


def test_what_cannot_be_registered() -> None:
    op = OPS.scaled_rows.default

    def strategies(x: Any, scale: Any) -> Any:
        return ROWS

    with pytest.raises(TypeError, match="expected an op with its overload"):
        rote.propagation.register(OPS.scaled_rows, strategies)
    with pytest.raises(TypeError, match="rote_rules::scaled_rows: expected a function"):
        rote.propagation.register(op, 3)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="rote_rules::scaled_rows: no rule is registered"):
        rote.propagation.unregister(op)
    with pytest.raises(ValueError, match="aten::addmm: Rote has a rule"):
        rote.propagation.register(torch.ops.aten.addmm.default, strategies)
    with rule(op, strategies):
        with pytest.raises(ValueError, match=r"scaled_rows: .*strategies \(.*\) is registered already; replace=True"):
            rote.propagation.register(op, strategies)
        assert rote.propagation.register(op, replace=True)(strategies) is strategies


def documented() -> tuple[list[str], list[str]]:
    """The blocks of code of "Rules of your own" in docs/propagation.md, Python and shell."""
    text = (samples.ROOT / "docs" / "propagation.md").read_text().split("\n## Rules of your own\n")[1].split("\n## ")[0]
    blocks = re.findall(r"\n\n((?:    .*\n|\n)+)", text)
    code = [textwrap.dedent(block).strip() + "\n" for block in blocks]
    shell = [block.removeprefix("$ ").strip() for block in code if block.startswith("$ ")]
    return [block for block in code if not block.startswith("$ ")], shell


@pytest.mark.ranks(2)
def test_the_example_as_it_stands() -> None:
    (example, validation), _ = documented()
    whole, scale = torch.randn(8, 6), torch.randn(8)
    given = {
        "x": distribute_tensor(whole, mesh(2), [Shard(0)]),
        "scale": distribute_tensor(scale, mesh(2), [Replicate()]),
    }
    exec(MYLIB, given)
    exec(example, given)
    stats = rote.propagation.stats()
    assert stats.answered >= 1 and not stats.handed_on, stats
    assert given["rows"].placements == (Shard(0),)
    torch.testing.assert_close(given["rows"].full_tensor(), whole * scale[:, None])
    assert eval(validation, given)[0]["wrong"] == []
    rote.propagation.unregister(torch.ops.mylib.scaled_rows.default)


def test_the_command_line_as_it_stands(tmp_path: Path) -> None:
    (example, _), (command,) = documented()
    rule_alone = example.split("\n\n")[0]
    rote_binary = engine.binary()
    assert rote_binary is not None, "cargo build --release"
    arguments = shlex.split(command)[1:]

    def judged(registered: str) -> str:
        (tmp_path / "mylib_rules.py").write_text(MYLIB + registered)
        # Where `rote` is found may not be on the path of a program in another folder.
        places = os.pathsep.join([str(Path(rote.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"ROTE_PYTHON": sys.executable, "PYTHONPATH": places}
        done = subprocess.run(
            [rote_binary, *arguments, "--wrong-only"], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode in (0, 1), done.stderr
        assert (done.returncode == 1) == ("WRONG" in done.stdout)
        return done.stdout

    assert "WRONG" not in judged(rule_alone)
    wrong = judged(rule_alone.replace("[Shard(1), Shard(1), Replicate()]", "[Shard(0), Shard(1), Replicate()]"))
    assert "WRONG S(1),R -> S(0)" in wrong and "--import mylib_rules" in wrong


ARGS = "f64[6,4] f64[6]"


def test_validation_judges_registered_rules() -> None:
    with rule(OPS.scaled_rows.default, lambda x, scale: ROWS):
        (report,) = rote.validate("rote_rules::scaled_rows", args=ARGS)
    assert report["correct"] >= 4
    assert not report["wrong"]
    assert [one["combination"] for one in report["missing"]] == ["R,P(sum) -> P(sum)"]


@pytest.mark.parametrize(
    ("planted", "written"),
    [
        ([Shard(0), Shard(0), Replicate()], "S(0),R -> S(0)"),
        ([Partial(), Partial(), Partial()], "P(sum),P(sum) -> P(sum)"),
        ([Shard(0), Shard(1), Replicate()], "S(1),R -> S(0)"),
        ([Replicate(), Partial("max"), Replicate()], "P(max),R -> R"),
    ],
)
def test_validation_finds_a_wrong_strategy(planted: Any, written: str) -> None:
    with rule(OPS.scaled_rows.default, lambda x, scale: [*ROWS, planted]):
        (report,) = rote.validate("rote_rules::scaled_rows", args=ARGS)
    assert [one["combination"] for one in report["wrong"]] == [written]


def test_validation_of_results_written_lists_and_views() -> None:
    def of_double(x: Any, by: Any) -> Any:
        return [[Shard(0), Replicate()], [Partial(), Replicate()]]

    with rule(OPS.double_.default, of_double):
        (report,) = rote.validate("rote_rules::double_", args="f32[5,4] f32[]")
    assert not report["wrong"] and report["correct"] >= 3

    def wrong_double(x: Any, by: Any) -> Any:
        return [[Shard(0), Shard(0)]]

    with rule(OPS.double_.default, wrong_double):
        (report,) = rote.validate("rote_rules::double_", args="f32[4,4] f32[4]")
    assert [one["combination"] for one in report["wrong"]] == ["S(0),S(0) -> S(0)"]
    with rule(OPS.moments.default, lambda tensors, weight=1.0: [[Shard(0)] * 4, [Partial()] * 4]):
        (report,) = rote.validate("rote_rules::moments", args="{f32[4,2];f32[4,2]} 0.5")
    assert [one["combination"] for one in report["wrong"]] == ["P(sum),P(sum) -> P(sum),P(sum)"]
    with rule(OPS.twice.default, lambda x: [[Shard(0), Shard(0)]]):
        for rows in (5, 6):
            (report,) = rote.validate("rote_rules::twice", args=f"f32[{rows},2]", missing=False)
            assert not report["wrong"]


def test_validation_of_what_is_registered_with_pytorch() -> None:
    registered_with_torch([])
    (report,) = rote.validate("rote_rules::torchs", args=ARGS, mesh="2,2")
    assert not report["wrong"] and report["correct"] >= 4


def test_validation_says_what_does_not_fit() -> None:
    with (
        rule(OPS.scaled_rows.default, lambda x, scale: [[Shard(0)]]),
        pytest.raises(ValueError, match=r"rote_rules::scaled_rows: .*strategy 0 has 1 placements"),
    ):
        rote.validate("rote_rules::scaled_rows", args=ARGS)
    with rule(OPS.scaled_rows.default, raises), pytest.raises(ValueError, match=r"raises \(.*raised KeyError"):
        rote.validate("rote_rules::scaled_rows", args=ARGS)
    # Rules of Rote's own are judged as before.
    (report,) = rote.validate("aten::mm", args="f32[6,5] f32[5,7]")
    assert report["correct"] > 3 and not report["wrong"]
