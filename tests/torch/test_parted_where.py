"""Where turns and steps are parted that draw on the host, wait for data, or count behind the optimizer's step."""

import collections
import copy
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from test_loops import check_turns
from torch import Tensor, nn


class Averages:
    """Averages of the weights, with a counter and a share of its own."""

    def __init__(self, model: nn.Module, grows: bool) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.grows, self.updates = grows, 0

    def update(self, model: nn.Module) -> None:
        self.updates += 1
        if self.updates < 8:
            self.model.load_state_dict(model.state_dict())
            return
        share = 0.9 * (1 - math.exp(-self.updates / 20)) if self.grows else 0.9
        for average, parameter in zip(self.model.parameters(), model.parameters(), strict=True):
            average.mul_(share).add_(parameter.detach(), alpha=1 - share)


class Nets:
    def __init__(self, grows: bool = False) -> None:
        self.makes = nn.Sequential(nn.Linear(3, 8), nn.LeakyReLU(0.2), nn.Linear(8, 5), nn.Tanh())
        self.judges = nn.Sequential(nn.Linear(5, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1))
        self.of_makes = torch.optim.Adam(self.makes.parameters(), lr=0.01)
        self.of_judges = torch.optim.Adam(self.judges.parameters(), lr=0.01)
        self.averages = Averages(self.judges, grows)
        self.told: list[str] = []


def with_noise_of_numpy(nets: Nets, data: list[Tensor]) -> None:
    for i, x in enumerate(data):
        real, made_up = torch.ones(x.size(0), 1), torch.zeros(x.size(0), 1)
        nets.of_makes.zero_grad()
        noise = torch.tensor(np.random.normal(0, 1, (x.shape[0], 3)), dtype=torch.float32)
        made = nets.makes(noise)
        loss = F.binary_cross_entropy_with_logits(nets.judges(made), real)
        loss.backward()
        nets.of_makes.step()
        nets.of_judges.zero_grad()
        of_real = F.binary_cross_entropy_with_logits(nets.judges(x), real)
        of_made = F.binary_cross_entropy_with_logits(nets.judges(made.detach()), made_up)
        total = (of_real + of_made) / 2
        total.backward()
        nets.of_judges.step()
        nets.told.append(f"{i} {total.item():.6f} {loss.item():.6f}")


def with_averages_behind(nets: Nets, data: list[Tensor]) -> None:
    for x in data:
        times = torch.randint(1, 9, (x.size(0), 1))
        loss = (nets.judges(x) - times / 9).square().mean()
        nets.of_judges.zero_grad()
        loss.backward()
        nets.of_judges.step()
        nets.averages.update(nets.judges)
        nets.told.append(f"{loss.item():.6f}")


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("grows", [False, True])
@pytest.mark.parametrize("body", [with_noise_of_numpy, with_averages_behind])
def test_loops(body: Callable[..., Any], grows: bool) -> None:
    def script(capture: Capture) -> Calls:
        np.random.seed(0)
        nets, run = Nets(grows), capture(body)
        for _ in range(4):
            run(nets, [torch.randn(4, 5) for _ in range(12)])
            yield [*nets.told], nets.averages.updates, np.random.get_state()[2]
        return nets.makes, nets.judges, nets.of_makes, nets.of_judges, nets.averages.model

    check_turns(script, more_than=15)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("waits", [3, 40, 150])
def test_a_step_that_waits_for_samples(waits: int) -> None:
    """Calls that do nothing yet tell nothing of where the step may be parted."""

    def script(capture: Capture) -> Calls:
        random.seed(0)
        nets: Any = Nets()
        kept: collections.deque[Any] = collections.deque(maxlen=180)

        def learn() -> None:
            if len(kept) < waits:
                return
            samples = random.sample(kept, 3)
            x, chosen, rewards = map(torch.cat, zip(*samples, strict=True))
            values = nets.judges(x).gather(1, chosen)
            loss = F.smooth_l1_loss(values, rewards[:, None])
            nets.of_judges.zero_grad()
            loss.backward()
            nn.utils.clip_grad_value_(nets.judges.parameters(), 100)
            nets.of_judges.step()

        step = capture(learn)
        for _ in range(waits + 60):
            kept.append((torch.randn(1, 5), torch.zeros(1, 1, dtype=torch.long), torch.rand(1)))
            yield step(), random.getstate()[1][-1], len(kept)
        return nets.judges, nets.of_judges

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[0].stats.replays > 5, found.steps[0].stats
