"""`explain()` says what the cheapest strategies would have moved, beside what DTensor moved."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import mesh
from oracle import ORACLE_ONLY, rote_capture
from ranks import CaseSkipped
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

KIB = 1024


def explained(step: Callable[[], Any], *state: Tensor) -> str:
    """What `explain()` says of a step, from its global ops on."""
    if ORACLE_ONLY:
        raise CaseSkipped("says nothing about eager PyTorch")
    captured = rote_capture(step, state=list(state))
    for _ in range(4):
        captured()
    assert captured.stats.replays > 0, captured.stats
    text = captured.explain()
    return text[text.index("\n  global ops") :]


def line_of(function: Callable[..., Any], text: str) -> str:
    """Where a text stands in a function of this file, as explain() writes it."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


@pytest.mark.ranks(4)
def test_a_gathered_embedding_table_need_not_have_moved() -> None:
    tp = mesh(4)
    table = distribute_tensor(torch.randn(64, 32), tp, [Shard(0)])
    tokens = distribute_tensor(torch.randint(64, (8, 6)), tp, [Shard(0)])

    def step() -> Tensor:
        return F.embedding(tokens, table)

    text = explained(step, table, tokens)
    # What DTensor does: every rank sends its 16 rows to three others.
    assert 3 * table.to_local().nbytes == 6 * KIB
    # What it might do: gather the tokens, 12 on each rank.
    assert 3 * tokens.to_local().nbytes == 288
    wanted = (
        f"aten::embedding at {line_of(step, 'F.embedding')}: DTensor moved S(0) -> R (out S(0)): 6.0 KiB; "
        "cheapest takes S(0); S(0) -> R by all_gather on tp (out P(mask)): 288 B"
    )
    assert f"       1    5.7 KiB  {wanted}\n" in text, text
    assert "in total 5.7 KiB less: DTensor moved 6.0 KiB for these, the cheapest strategies would 288 B" in text, text
    # DTensor itself says that this is right, once the tokens lie so.
    other = F.embedding(tokens.redistribute(placements=[Replicate()]), table)
    assert isinstance(other, DTensor) and other.placements[0].is_partial()
    whole = F.embedding(tokens.full_tensor(), table.full_tensor())
    assert torch.equal(other.full_tensor(), whole)


@pytest.mark.ranks(4)
def test_one_line_when_dtensor_chose_the_cheapest() -> None:
    grid = mesh(2, 2)
    a, b = (distribute_tensor(torch.randn(16, 16), grid, [Shard(0), Shard(1)]) for _ in range(2))

    def step() -> Tensor:
        return F.softmax(a @ b, -1)

    text = explained(step, a, b)
    assert "  second opinion: what DTensor moved for 2 ops was the cheapest each time\n" in text, text
    assert "less" not in text and "no second opinion" not in text, text


@pytest.mark.ranks(4)
def test_what_backward_redistributes_is_judged_too() -> None:
    grid = mesh(2, 2)
    a = distribute_tensor(torch.randn(512, 256), grid, [Shard(0), Shard(1)])
    b = distribute_tensor(torch.randn(256, 384), grid, [Replicate(), Replicate()]).requires_grad_()

    def step() -> Tensor:
        b.grad = None
        loss = (a @ b).square().mean()
        loss.backward()
        return loss.detach()

    text = explained(step, a, b)
    # The weight's gradient is a.T @ gradient, for which the shard of a.T moves from rows to columns: on gloo
    # DTensor gathers all of it and keeps half, where exchanging halves would do.
    gathered, exchanged = 512 * 256 // 4 * 4, 512 * 256 // 4 * 4 // 2
    assert (gathered, exchanged) == (128 * KIB, 64 * KIB)
    where = re.escape(line_of(step, "loss.backward()"))
    found = rf"1   64\.0 KiB  aten::mm at {where}: DTensor moved .* 128\.0 KiB; .*: 64\.0 KiB\n"
    assert re.search(found, text), text


@pytest.mark.ranks(2)
def test_what_the_user_asked_for_is_not_judged() -> None:
    x = distribute_tensor(torch.randn(8, 8), mesh(2), [Shard(0)])

    def step() -> Tensor:
        return x.redistribute(placements=[Replicate()]).relu()

    text = explained(step, x)
    assert "all_gather" in text and "second opinion" not in text, text


@pytest.mark.ranks(2)
def test_an_op_without_a_rule_is_said() -> None:
    library = torch.library.Library("rote_second_opinion", "FRAGMENT")
    library.define("twice(Tensor x, float by=2.0, *, str word='a b') -> Tensor")
    library.impl("twice", lambda x, by=2.0, *, word="": x * by, "CompositeExplicitAutograd")
    twice = torch.ops.rote_second_opinion.twice.default

    @register_sharding(twice)
    def whole(x: Any, by: float = 2.0, word: str = "") -> Any:
        return [([Replicate()], [Replicate(), None, None])]

    x = distribute_tensor(torch.randn(8, 8), mesh(2), [Shard(0)])

    def step() -> Tensor:
        return twice(x, word="c d")

    text = explained(step, x)
    where = line_of(step, "twice(")
    wanted = f"  no second opinion (times)\n       1  rote_second_opinion::twice at {where}: no sharding rule"
    assert wanted in text, text
