"""Collectives that start early and are waited for late: what a step leaves is eager's, also where it raises midway."""

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_right
from torch import Tensor, nn

KINDS = ["gather", "reduce", "compute", "write", "look", "back", "share", "average", "late"]
SEEDS = 24
LENGTH = 14
GOOD, BAD = 9, 3
ROWS = 6


def programs(seed: int) -> Script:
    """A step of random parts, some calls of which raise at one of its lookups."""
    choose = random.Random(seed)
    kinds = choose.choices(
        ["gather", "reduce", "compute", "write", "look", "back", "share", "average", "late"], k=LENGTH
    )
    looks = [at for at, kind in enumerate(kinds) if kind == "look"]

    def script(capture: Capture) -> Calls:
        torch.manual_seed(seed)
        weights = nn.ParameterList([nn.Parameter(torch.randn(4, 4) / 3) for _ in range(LENGTH)])
        states = [torch.zeros(4, 4) for _ in range(LENGTH)]
        table = torch.randn(ROWS, 4)

        def step(x: Tensor, *rows: Tensor) -> Tensor:
            pending: list[Tensor] = []
            made: list[Tensor] = []
            shared: list[tuple[Tensor, Any]] = []
            for at, kind in enumerate(kinds):
                if kind == "gather":
                    pending.append(funcol.all_gather_tensor(x.detach() + at, 0, dist.group.WORLD)[:4])
                elif kind == "reduce":
                    pending.append(funcol.all_reduce(x.detach() * at, "sum", dist.group.WORLD))
                elif kind == "late" and pending:
                    x = x + pending.pop(0).sin()
                elif kind == "compute":
                    x = (x @ weights[at]).tanh()
                elif kind == "write":
                    states[at].add_(x.detach()).mul_(0.5)
                elif kind == "look":
                    x = x + table[rows[at]]
                elif kind == "back":
                    weights[at].grad = None
                    (x @ weights[at]).square().mean().backward(retain_graph=True)
                    made.append(weights[at].grad)  # type: ignore[arg-type]
                elif kind == "share" and made:
                    grad = made.pop()
                    shared.append((grad, dist.all_reduce(grad, async_op=True)))
                elif kind == "average" and shared:
                    grad, work = shared.pop()
                    work.wait()
                    grad.div_(2)
            for grad, work in shared:
                work.wait()
                grad.mul_(0.5)
            return torch.stack([x.detach(), *(other + 1 for other in pending)]).sum(0)

        captured = capture(step, state=[weights, states, table], passes="+overlap")
        raising = [looks[call % len(looks)] for call in range(BAD)] if looks else []
        for call in range(GOOD + 2 * len(raising)):
            rows = [torch.full((4,), call % ROWS) for _ in range(LENGTH)]
            bad = (call - GOOD) // 2 if call >= GOOD and call % 2 else None
            if bad is not None:
                rows[raising[bad]] += ROWS
            try:
                yield captured(torch.randn(4, 4), *rows)
            except IndexError:
                dist.barrier()
                time.sleep(0.05)  # what eager has started and not waited for ends
                yield "raised", [w.grad for w in weights], states
        return [weights, states]

    return script


@pytest.mark.sampled(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_what_a_step_that_raises_leaves(seed: int) -> None:
    found = check_right(programs(seed))
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert stats.replays >= GOOD - 4 and not stats.refusals, stats


@pytest.mark.ranks(2)
def test_a_collective_is_under_way_while_the_step_computes() -> None:
    def script(capture: Capture) -> Calls:
        weight = torch.randn(4, 4)

        def step(x: Tensor) -> Tensor:
            first = funcol.all_reduce(x, "sum", dist.group.WORLD) * 2
            return first + (x @ weight).sin()

        captured = capture(step, state=weight, passes="+overlap", tail=False)
        for _ in range(GOOD):
            yield captured(torch.randn(4, 4))
        if not ORACLE_ONLY and hasattr(captured, "explain"):
            assert "2 ops run while a collective is under way, 0 as recorded" in captured.explain()

    check_right(script, replays=5)
