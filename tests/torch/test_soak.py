"""A long run: replays with random misses, reloads of plans and variants that make room.

`ROTE_TEST_EVERYTHING=1` makes it 100,000 replays, else it is a short form. Each call equals
eager, and neither memory nor files grow. `ROTE_TEST_SEED` makes another run.
"""

import copy
import logging
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import EVERYTHING, SEED
from oracle import ORACLE_ONLY, rote_capture
from test_memory import SMALL, held, in_use
from torch import Tensor, nn

REPLAYS = 100_000 if EVERYTHING else 1_500
SHAPES = 6  # more than there may be variants
CHECKED = 50  # calls between two comparisons of the whole state
ALLOWED = 1 << 20  # variants differ in size; in the long form, 20 bytes a replay


class Trained:
    """A model with its optimizer, and the step on them."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        # The last tanh bounds the loss, so that no drawn rate lets the numbers overflow.
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2), nn.Tanh())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.scale = 1.0

    def step(self, x: Tensor, flag: Any = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * flag * self.scale
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def leave(self) -> list[Tensor]:
        momenta = [entry["momentum_buffer"] for entry in self.optimizer.state.values()]
        return [*self.model.state_dict().values(), *momenta]


def used() -> int:
    return in_use() + SMALL * sys.getallocatedblocks()


def captured(trained: Trained, plans: Path) -> Any:
    state = {"model": trained.model, "optimizer": trained.optimizer}
    return rote_capture(trained.step, state=state, plans=plans, max_variants=4)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Without messages, which the test runner would keep: one for each stored plan that is not for a call."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.usefixtures("unlogged")
def test_soak(tmp_path: Path) -> None:
    print(f"seed {SEED}")
    draw = random.Random(SEED)
    eager, replayed = Trained(SEED), Trained(SEED)
    step = captured(replayed, tmp_path)
    before: tuple[int, tuple[int, int]] | None = None
    replays, calls, reloads = 0, 0, 0
    favourite = [1, 2]
    while replays + (0 if ORACLE_ONLY else step.stats.replays) < REPLAYS and calls < 4 * REPLAYS:
        calls += 1
        chance = draw.random()
        rows = draw.choice(favourite)
        flag = 1.0
        if chance < 0.01:
            rows = draw.randrange(1, SHAPES + 1)
        elif chance < 0.012:
            favourite = draw.sample(range(1, SHAPES + 1), 2)
        elif chance < 0.02:
            flag = draw.choice([2.0, 3.0, draw.random()])
        elif chance < 0.03:
            rate = draw.choice([0.0, 0.1, draw.random()])
            for one in (eager, replayed):
                one.optimizer.param_groups[0]["lr"] = rate
        elif chance < 0.032:
            for one in (eager, replayed):
                one.scale = draw.choice([1.0, 2.0]) if one is eager else eager.scale
        elif chance < 0.033:
            saved = copy.deepcopy(eager.model.state_dict())
            for one in (eager, replayed):
                one.model.load_state_dict(saved)
                one.optimizer.load_state_dict(one.optimizer.state_dict())
        elif chance < 0.0345:
            replays += 0 if ORACLE_ONLY else step.stats.replays
            reloads += 1
            step = captured(replayed, tmp_path)
        elif chance < 0.036:
            with torch.no_grad():
                for one in (eager, replayed):
                    one.model[0].weight.copy_(torch.full((4, 4), chance))
        x = torch.randn(rows, 4)
        expected, found = eager.step(x, flag), step(x, flag)
        assert expected.isfinite(), f"seed {SEED}, call {calls}: eager trains on {expected}"
        assert torch.equal(expected, found), f"seed {SEED}, call {calls}: {expected} and {found}"
        if calls % CHECKED == 0:
            for name, (one, other) in enumerate(zip(eager.leave(), replayed.leave(), strict=True)):
                assert torch.equal(one, other), f"seed {SEED}, call {calls}: tensor {name} of the state"
        if before is None and calls >= REPLAYS // 2:
            things = held()
            before = used(), things
    assert before is not None
    things = held()
    more = used() - before[0]
    print(f"{calls} calls, {reloads} reloads, {more} bytes more in the second half")
    assert more < ALLOWED, f"seed {SEED}: {more} bytes more"
    assert abs(things[0] - before[1][0]) < 100 and things[1] <= before[1][1] + 4, (before, things)
