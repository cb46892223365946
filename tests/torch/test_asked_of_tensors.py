"""Loops that ask something about a number read of a tensor: the tensor is asked, and the turn is replayed."""

import math
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import Calls, Capture, check_right
from test_loops import Batches, Job, captured, check_turns
from torch import Tensor

LIMIT = 14


class StoppedError(Exception):
    """What `sys.exit(1)` is in scripts."""


def as_torchvision_trains_detectors(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss_dict = {"class": F.cross_entropy(job.model(x), y), "norm": job.model[0].weight.square().mean()}
        losses = sum(loss for loss in loss_dict.values())
        loss_value = losses.item()
        if not math.isfinite(loss_value):
            job.log.append(f"Loss is {loss_value}, stopping training")
            raise StoppedError
        job.optimizer.zero_grad()
        losses.backward()
        job.optimizer.step()
        job.log.append(loss_value)


def with_prints(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            raise StoppedError(i)
        loss /= 2
        loss.backward()
        if (i + 1) % 2 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()


def skips_the_turn(job: Job, loader: Batches, epoch: int) -> float:
    total = 0.0
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        if np.isnan(value) or value > 50:
            job.log.append("skipped")
            continue
        total += value
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return total


def stops(job: Job, loader: Batches, epoch: int) -> Any:
    values = []
    for x, y in loader:
        output = job.model(x)
        loss = F.cross_entropy(output, y)
        wrong = (output.argmax(1) != y).sum()
        count = wrong.item()
        values.append(loss.item())
        if count > 100 or math.isinf(count):
            break
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return values


class Scaler:
    """What goes backward and steps, as many repositories for vision have it around `GradScaler`."""

    def __call__(self, loss: Tensor, optimizer: Any, parameters: Any, updates: bool = True) -> Tensor | None:
        loss.backward()
        if not updates:
            return None
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return norm


SCALER = Scaler()


def by_a_scaler(job: Job, loader: Batches, epoch: int) -> None:
    loss_scaler, model, optimizer = SCALER, job.model, job.optimizer
    optimizer.zero_grad()
    for i, (x, y) in enumerate(loader):
        if i % 2 == 0:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 / (1 + epoch + i / LIMIT)
        loss = F.cross_entropy(model(x), y)
        loss_value = loss.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            raise StoppedError
        loss /= 2
        loss_scaler(loss, optimizer, parameters=model.parameters(), updates=(i + 1) % 2 == 0)
        if (i + 1) % 2 == 0:
            optimizer.zero_grad()
        job.log.append((loss_value, optimizer.param_groups[0]["lr"]))


# Most of their turns are replayed.
REPLAYED = [by_a_scaler, as_torchvision_trains_detectors, with_prints, skips_the_turn, stops]


def of_another_value(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        value *= 0.5
        if value > 0.7:
            job.log.append("large")
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def of_one_of_two(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        if i % 2:
            value = (loss * 3).item()
        if value > 4:
            job.log.append(value)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def of_a_close_number(job: Job, loader: Batches, epoch: int) -> None:
    """0.1 is no `float32`: as one it is larger than as Python's number."""
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        tenth = loss.detach() * 0 + torch.tensor(0.1 if i % 2 else 0.05)
        value = tenth.item()
        if value > 0.1:
            job.log.append("above")
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def by_another_library(job: Job, loader: Batches, epoch: int) -> None:
    math = types.SimpleNamespace(isfinite=lambda value: value < 1.4)
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        if not math.isfinite(value):
            job.log.append(value)
            continue
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def otherwise(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        if math.isfinite(value):
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
        else:
            job.log.append(value)


def before_it_is_changed(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        loss.detach().add_(100)
        if value > 50:
            job.log.append(value)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def of_numbers_of_others(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        first = np.float64(x.numel() / 48)
        value = first.item()
        if value > 1:
            job.log.append(value)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


OTHERS = [
    of_another_value,
    of_one_of_two,
    of_a_close_number,
    by_another_library,
    otherwise,
    before_it_is_changed,
    of_numbers_of_others,
]


def batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """In some epochs, one of them makes the loss what is no number, or large."""
    torch.manual_seed(epoch)
    for i in range(LIMIT):
        x, y = torch.randn(6, 8), torch.randint(4, (6,))
        if epoch > 2 and i == 9:
            x = x * (1e4 if epoch == 4 else math.inf if epoch == 5 else math.nan)
        yield x, y


def script_of(body: Callable[..., Any]) -> Any:
    def script(capture: Capture) -> Calls:
        job, run = Job(), capture(body)
        for epoch in range(7):
            try:
                result = run(job, [*batches(epoch)], epoch)
            except StoppedError as error:
                result = repr(error)
            with torch.no_grad():
                weights = [p.nan_to_num(0, 0, 0).clamp(-1, 1) for p in job.model.parameters()]
                for p, old in zip(job.model.parameters(), weights, strict=True):
                    p.copy_(old)
                for state in job.optimizer.state.values():
                    state["momentum_buffer"].nan_to_num_(0, 0, 0).clamp_(-1, 1)
            yield str(result), list(map(str, job.log))
        return job.model, job.optimizer

    return script


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", REPLAYED)
def test_replayed(body: Callable[..., Any]) -> None:
    check_turns(script_of(body), more_than=35)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", OTHERS)
def test_right(body: Callable[..., Any]) -> None:
    check_right(script_of(body), captured)
