"""Lists that a loop fills before its last op, and that others look at meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import check_right
from test_loops import Batches, Job, captured, script_of
from torch import Tensor


class Holder:
    """Looks at a list between the statement that adds to it and the end of the ops."""

    def __init__(self) -> None:
        self.held: Any = []

    def weighed(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + 0.1 * (len(self.held) % 3))


HOLDER = Holder()


def list_in_an_attribute(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    HOLDER.held = losses
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_from_an_attribute(job: Job, loader: Batches, epoch: int) -> Any:
    HOLDER.held = []
    losses = HOLDER.held
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses += [loss.item()]
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_by_two_names(job: Job, loader: Batches, epoch: int) -> Any:
    losses = HOLDER.held = []
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_in_a_list(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    HOLDER.held = [losses, *[0] * epoch]
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        (HOLDER.weighed(loss) * (1 + len(HOLDER.held[0]) % 2)).backward()
        job.optimizer.step()
    return losses


def list_seen_by_a_function(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []

    def weighed(loss: Tensor) -> Tensor:
        return loss * (1.0 + 0.1 * (len(losses) % 3))

    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_held_by_a_turn(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        HOLDER.held = losses
        losses.append(loss.item())
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_held_behind(job: Job, loader: Batches, epoch: int) -> Any:
    HOLDER.held = [] if epoch == 0 else HOLDER.held
    for _ in range(2):
        losses: list[float] = []
        for x, y in loader:
            job.optimizer.zero_grad()
            loss = F.cross_entropy(job.model(x), y)
            losses.append(loss.item())
            HOLDER.weighed(loss).backward()
            job.optimizer.step()
        HOLDER.held = losses
    return losses


def list_before_the_turn_ends_early(job: Job, loader: Batches, epoch: int) -> Any:
    losses, shares, total = [], [], 0.0
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        output = job.model(x)
        loss = F.cross_entropy(output, y)
        losses.append(loss.item())
        with torch.no_grad():
            shares += [output.mean().item()]
        total += loss.item()
        if i % 5 == 4:
            continue
        loss.backward()
        job.optimizer.step()
        if i == 11 and epoch % 2:
            break
    return losses, shares, total


def list_alone_before_the_turn_ends_early(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        if i % 5 == 4:
            continue
        loss.backward()
        job.optimizer.step()
    return losses


def list_passed_on(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []

    def weighed(loss: Tensor, losses: list[float]) -> Tensor:
        return loss * (1.0 + 0.1 * (len(losses) % 3))

    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        weighed(loss, losses).backward()
        job.optimizer.step()
    return losses


CASES = [
    list_in_an_attribute,
    list_from_an_attribute,
    list_by_two_names,
    list_in_a_list,
    list_seen_by_a_function,
    list_held_by_a_turn,
    list_held_behind,
    list_before_the_turn_ends_early,
    list_alone_before_the_turn_ends_early,
    list_passed_on,
]


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", CASES)
def test_right(body: Callable[..., Any]) -> None:
    HOLDER.held = []
    check_right(script_of(body), captured)
