"""Statements of a loop that read tensors for variables of its own, and run behind the last op."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import ORACLE_ONLY, check_right
from test_loops import Batches, Job, captured, check_turns, script_of
from torch import Tensor


def as_stable_baselines_have_ppo(job: Job, loader: Batches, epoch: int) -> Any:
    losses, shares, kept = [], [], []
    goes_on = True
    for _ in range(2):
        kls = []
        for x, y in loader:
            output = job.model(x)
            loss = F.cross_entropy(output, y)
            losses.append(loss.item())
            share = torch.mean((output.abs() > 0.5).float()).item()
            shares.append(share)
            with torch.no_grad():
                ratio = output - output.mean()
                kl = torch.mean((torch.exp(ratio) - 1) - ratio).cpu().numpy()
                kls.append(kl)

            if job.limit is not None and kl > 1.5 * job.limit:
                goes_on = False
                kept.append(f"{kl:.3f}")
                break

            job.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
            job.optimizer.step()
        job.steps += 1
        if not goes_on:
            break
    return losses, np.mean(shares), [float(kl) for kl in kls], kept


def as_stable_baselines_have_sac(job: Job, loader: Batches, epoch: int) -> Any:
    losses, some, others = [], [], []
    numbers = np.random.default_rng(epoch)
    data, labels = torch.cat([x for x, _ in loader]).numpy(), torch.cat([y for _, y in loader]).numpy()
    for i in range(24):
        places = numbers.integers(0, len(data), 8)
        x, y = torch.tensor(data[places]), torch.tensor(labels[places])
        output = job.model(x)
        weight = None
        if job.every > 1:
            weight = output.detach().sigmoid().mean()
            some.append(weight.item())
        else:
            others.append(output.mean().item())
        loss = F.cross_entropy(output, y)
        if weight is not None:
            loss = loss * weight
        losses.append(loss.item())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        if i % 2 == 0:
            with torch.no_grad():
                for each in job.model.parameters():
                    each.mul_(0.999)
    return losses, some, others


def as_stable_baselines_have_td3(job: Job, loader: Batches, epoch: int) -> Any:
    losses, others = [], []
    for x, y in loader:
        job.steps += 1
        x, y = torch.tensor(x.numpy()), torch.tensor(y.numpy())
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()

        if job.steps % job.every == 0:
            other = job.model(x).square().mean()
            others.append(other.item())
            job.optimizer.zero_grad()
            other.backward()
            job.optimizer.step()
            with torch.no_grad():
                for each in job.model.parameters():
                    each.mul_(0.999)
    return losses, others


def adds_under_a_question(job: Job, loader: Batches, epoch: int) -> Any:
    losses, total, n = [], 0.0, 0
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        if i % 3 == 1:
            n += 1
            total += loss.item()
            value = loss.item()
            losses.append(value)
        elif i % 3 == 2:
            losses.append(loss.item() * 2)
        loss = loss * 1.5
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return losses, total, n, value


def stops_early(job: Job, loader: Batches, epoch: int) -> Any:
    losses, values = [], []
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        losses.append(value)
        if i % 5 == 4 and epoch % 2 and value > 0.1:
            losses.append(loss.item() * 2)
            continue
        values += [loss.item()]
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return losses, values, value


REPLAYED = [
    as_stable_baselines_have_ppo,
    as_stable_baselines_have_sac,
    as_stable_baselines_have_td3,
    adds_under_a_question,
    stops_early,
]


def uses_what_it_read(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        losses.append(value)
        job.optimizer.zero_grad()
        (loss * value).backward()
        job.optimizer.step()
    return losses


def keeps_an_older_value(job: Job, loader: Batches, epoch: int) -> Any:
    losses, value = [], -1.0
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        if i % 3 == 1:
            value = loss.item()
        losses.append(value)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return losses, value


def reads_memory_that_changes(job: Job, loader: Batches, epoch: int) -> Any:
    seen, means = [], []
    for x, y in loader:
        output = job.model(x)
        loss = F.cross_entropy(output, y)
        weight = job.model[0].weight.detach()
        seen.append(weight.numpy())
        flat = weight.view(-1)[:4].numpy()
        means.append(flat)
        mean = weight.mean().numpy()
        means.append(mean)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return seen, means


def appends_a_tensor_by_a_name(job: Job, loader: Batches, epoch: int) -> Any:
    seen = []
    value: Any = 0.0
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        if i % 2:
            value = loss.detach()
        seen.append(value)
        loss.detach().mul_(2)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return seen


def asks_something_else(job: Job, loader: Batches, epoch: int) -> Any:
    losses, asked = [], []

    def ask(i: int) -> bool:
        asked.append(i)
        return i % 4 == 1

    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        losses.append(value)
        if ask(i) and value > 0.2:
            losses.append(0.0)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return losses, asked


def sets_what_it_asks_for(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []

    def watched(loss: Tensor) -> Tensor:
        job.limit = 0.5 if job.steps % 4 == 3 else None
        return loss * 1.0

    for x, y in loader:
        job.steps += 1
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        losses.append(value)
        loss = watched(loss)
        if job.limit is not None and value > job.limit:
            losses.append(-1.0)
            continue
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return losses


def reads_what_has_a_graph(job: Job, loader: Batches, epoch: int) -> Any:
    seen = []
    for i, (x, y) in enumerate(loader):
        try:
            loss = F.cross_entropy(job.model(x), y)
            if i % 7 == 6 and epoch > 2:
                value = job.model[0].bias.sum().cpu().numpy()
                seen.append(value)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
        except RuntimeError as error:
            seen.append(str(error)[:30])
    return seen


def reads_numbers_of_others(job: Job, loader: Batches, epoch: int) -> Any:
    seen = []
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = np.mean(y.numpy()).item()
        seen.append(value)
        with torch.no_grad():
            other = job.model[0].bias.sum().numpy()
            seen.append(other)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return seen


def raises_in_between(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    for i, (x, y) in enumerate(loader):
        try:
            loss = F.cross_entropy(job.model(x), y)
            losses.append(loss.item())
            if i % 6 == 5 and losses[-1] > 0:
                raise ValueError("too much")
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
        except ValueError:
            losses.append(-1.0)
    return losses


OTHERS = [
    uses_what_it_read,
    keeps_an_older_value,
    reads_memory_that_changes,
    appends_a_tensor_by_a_name,
    asks_something_else,
    sets_what_it_asks_for,
    reads_what_has_a_graph,
    reads_numbers_of_others,
    raises_in_between,
]


def nothing(job: Any, epoch: int) -> None:
    job.limit = None


def limits(job: Any, epoch: int) -> None:
    job.limit = [None, None, 0.01, None, 0.02][epoch]
    job.every = 2 - epoch % 2


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", REPLAYED)
def test_replayed(body: Callable[..., Any]) -> None:
    check_turns(script_of(body, nothing), more_than=20)


@pytest.mark.sampled(2)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("between", [nothing, limits])
@pytest.mark.parametrize("body", [*REPLAYED, *OTHERS])
def test_right(body: Callable[..., Any], between: Any) -> None:
    check_right(script_of(body, between), captured)


class Trainer(Job):
    """Its method is captured in its class, and is called for each turn of its loop."""

    def train(self, loader: Batches, many: int) -> list[float]:
        losses = []
        for _ in range(many):
            x, y = loader[self.steps % len(loader)]
            loss = F.cross_entropy(self.model(x), y)
            losses.append(loss.item())
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.steps += 1
        return losses


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_method_captured_in_its_class() -> None:
    def script(capture: Any) -> Any:
        class Captured(Trainer):
            train = capture(Trainer.train)

        trainer = Captured()
        loader = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(3)]
        for _ in range(60):
            yield trainer.train(loader, 1)
        return trainer.model, trainer.optimizer

    check_turns(script, more_than=20)


SCALE = 1.0


def scaled(model: torch.nn.Module, xs: list[Tensor], by: float = 1.0) -> Tensor:
    """A function with a loop of its own, which a step calls."""
    total = torch.zeros(4)
    for x in xs:
        y = model(x)
        total = total + y.mean(0) * by * SCALE
    return total


def global_variable(captured_loops: Any, job: Any) -> None:
    global SCALE
    SCALE = 2.0


def another_function(captured_loops: Any, job: Any) -> None:
    job.scaled = lambda model, xs: scaled(model, xs, 5.0)


def another_wrapped(captured_loops: Any, job: Any) -> None:
    job.scaled = captured_loops(doubled)


def doubled(model: torch.nn.Module, xs: list[Tensor]) -> Tensor:
    total = torch.zeros(4)
    for x in xs:
        y = model(x)
        total = total + y.mean(0) * 2
    return total


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("change", [global_variable, another_function, another_wrapped])
def test_called_by_a_step(change: Callable[[Any, Any], None]) -> None:
    """What a function with captured loops uses is guarded in a step that calls it."""

    sides = [captured, lambda fn: fn]  # eager runs first

    def script(capture: Any) -> Any:
        global SCALE
        SCALE = 1.0
        loops, job = sides.pop(), Job()
        job.scaled = loops(scaled)  # type: ignore[attr-defined]

        def step(xs: list[Tensor]) -> Tensor:
            loss = job.scaled(job.model, xs).square().sum()  # type: ignore[attr-defined]
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            return loss.detach()

        run = capture(step)
        for call in range(16):
            if call == 8:
                change(loops, job)
            yield run([torch.randn(3, 8) for _ in range(2)])
        SCALE = 1.0
        return job.model, job.optimizer

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[0].stats.replays > 4, found.steps[0].stats
