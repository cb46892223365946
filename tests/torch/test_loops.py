"""Loops over batches, in functions that train or evaluate, whose turns are captured: `rote.capture_loops`."""

import contextlib
import copy
import math
import random
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from extent import EVERYTHING
from oracle import ORACLE_ONLY, Calls, Capture, Run, Script, check_right, eager
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]
SEEN: list[Any] = []
COUNT = 0


def captured(fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Any:
    """`rote.capture_loops`, or eager when only the oracle is under test."""
    if ORACLE_ONLY:
        return eager(fn)
    import rote

    return rote.capture_loops(fn, state=state, **options)


class Job:
    """What the functions below are called with."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.every, self.dry_run, self.total, self.steps = 4, False, 0.0, 0
        self.log: list[Any] = []
        self.weights: list[float] = []


def as_examples_have_it(job: Job, loader: Batches, epoch: int) -> None:
    job.model.train()
    for batch_idx, (data, target) in enumerate(loader):
        data, target = data.to("cpu"), target.to("cpu")
        job.optimizer.zero_grad()
        output = job.model(data)
        loss = F.cross_entropy(output, target)
        loss.backward()
        job.optimizer.step()
        if batch_idx % job.every == 0:
            job.log.append(
                "Train Epoch: {} [{}/{} ({:.0f}%)]\tLoss: {:.6f}".format(  # noqa: UP032
                    epoch, batch_idx * len(data), len(loader), 100.0 * batch_idx / len(loader), loss.item()
                )
            )
            if job.dry_run:
                break


def evaluates(job: Job, loader: Batches, epoch: int) -> Any:
    job.model.eval()
    test_loss = 0
    correct = 0
    with torch.no_grad():
        for data, target in loader:
            output = job.model(data)
            test_loss += F.cross_entropy(output, target, reduction="sum").item()
            pred = output.argmax(dim=1, keepdim=True)
            correct += pred.eq(target.view_as(pred)).sum().item()
    job.model.train()
    return test_loss / len(loader), correct


@torch.no_grad()
def evaluates_decorated(job: Job, loader: Batches, epoch: int) -> Any:
    model, losses = job.model, []
    for data, target in loader:
        loss = F.cross_entropy(model(data), target)
        losses.append(loss.item())
    return sum(losses) / len(losses), loss, torch.is_grad_enabled()


def epochs(job: Job, loader: Batches, epoch: int) -> Any:
    model, optimizer, criterion = job.model, job.optimizer, nn.CrossEntropyLoss()
    best = math.inf
    for turn in range(2):
        running_loss = 0.0
        for i, data in enumerate(loader, 0):
            inputs, labels = data
            optimizer.zero_grad()
            outputs = model(inputs)
            loss = criterion(outputs, labels)
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
            if i % 4 == 3:
                job.log.append((turn + 1, i + 1, running_loss / 4))
                running_loss = 0.0
        best = min(best, running_loss)
    return best, running_loss, i, loss


def accumulates(job: Job, loader: Batches, epoch: int) -> None:
    job.optimizer.zero_grad()
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y) / 3
        loss.backward()
        if (step + 1) % 3 == 0:
            norm = nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.log.append(norm.item())


def completes_steps(job: Job, loader: Batches, epoch: int) -> Any:
    completed, losses, last = 0, [], len(loader) - 1
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y) / 4
        loss.backward()
        if step % 4 == 0 or step == last:
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.steps += 1
            completed += 1
        else:
            losses.append(loss.item())
            job.total += losses[-1]
        if completed >= 4 + epoch:
            break
    return completed, losses, step


def clips_by_mixed(job: Job, loader: Batches, epoch: int) -> Any:
    norms = {}
    for step, (x, y) in enumerate(loader):
        F.cross_entropy(job.model(x), y).backward()
        if step % 2:
            norm = nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
            job.optimizer.step()
            if step % 3:
                norms[step] = norm.item()
            job.model.zero_grad()
            last = step
            if job.dry_run:
                return last, norm
        else:
            last = None
            job.log.append(step)
    return last, norms, norm.item()


def names_twice(job: Job, loader: Batches, epoch: int) -> Any:
    """Both loops set the same variables first, and what they hold is nothing that a plan can give."""
    total = 0.0
    for x, y in loader:
        out = Answer(job.model(x))
        loss = F.cross_entropy(out.logits, y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    for x, y in loader:
        with torch.no_grad():
            out = Answer(job.model(x))
        loss = F.cross_entropy(out.logits, y)
        total += loss.item()
    return total, loss


def backward(job: Job, loss: Tensor) -> None:
    """The loss is another one then."""
    loss.backward()
    with torch.no_grad():
        loss.mul_(0.5)


def sums_on_the_way(job: Job, loader: Batches, epoch: int) -> Any:
    train_loss, sums = 0.0, []
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        train_loss += loss.repeat(2).mean().item() / job.every * len(x) - (y == 1).sum().item()
        backward(job, loss)
        if step % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()
        sums.append(train_loss)
        if step % 4 == 3:
            train_loss = 0.0
    return sums, train_loss, loss


class Gauge:
    """Is read as a tensor is, and is another one then."""

    def __init__(self) -> None:
        self.value = 1.0

    def item(self) -> float:
        self.value += 0.5 if self.value < 4 else -3.0
        return self.value


def sums_of_other_kinds(job: Job, loader: Batches, epoch: int) -> Any:
    gauge, total, weighed, sums = Gauge(), 0.0, 0.0, []
    weight = torch.ones(())
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        total += gauge.item() + loss.item()
        weighed += loss.item() * weight
        gauge.value += 0.25
        backward(job, loss)
        weight.mul_(0.9)
        job.optimizer.step()
        sums.append((total, float(weighed)))
        if i % 3 == 2:
            weighed = 0.0
    return sums, weight, weighed


def fills_a_list_on_the_way(job: Job, loader: Batches, epoch: int) -> Any:
    losses, running = [], 0.0
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        job.log.append(loss.item() * 2)
        running += loss.item()
        loss.backward()
        job.optimizer.step()
    return losses, running


def fills_lists_of_its_own(job: Job, loader: Batches, epoch: int) -> Any:
    losses, norms = [], []  # not one by one: others may hold them
    seen = []
    sums = list()  # noqa: C408
    for x, y in loader:
        job.optimizer.zero_grad()
        output = job.model(x)
        loss = F.cross_entropy(output, y)
        with torch.no_grad():
            share = (output.argmax(1) == y).float().mean()
            seen += [share.item(), (share * 2).item()]
            share.mul_(3)
        sums.append(loss.item() + 1)
        losses.append(loss.item())
        backward(job, loss)
        norms.append(nn.utils.clip_grad_norm_(job.model.parameters(), 1.0).item())
        job.optimizer.step()
    job.log.append(f"{len(seen)} {seen[-1]} {sum(sums) / max(1, len(sums))} {seen}")
    return losses, norms


def as_ppo_has_it(job: Job, loader: Batches, epoch: int) -> Any:
    data, labels = torch.cat([x for x, _ in loader]), torch.cat([y for _, y in loader])
    with torch.no_grad():
        before = F.log_softmax(job.model(data), 1)
    places, shares = np.arange(len(data) // 8 * 8), []
    numbers = np.random.default_rng(epoch)
    for _ in range(3):
        numbers.shuffle(places)
        for start in range(0, len(places), 8):
            end = start + 8
            some = places[start:end]
            ratio = (F.log_softmax(job.model(data[some]), 1) - before[some]).exp()
            with torch.no_grad():
                shares += [((ratio - 1.0).abs() > 0.2).float().mean().item()]
            gain = ratio[torch.arange(8), labels.long()[some]]
            loss = -torch.min(gain, torch.clamp(gain, 0.8, 1.2)).mean()
            job.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
            job.optimizer.step()
    return np.mean(shares), loss.item()


class Environment:
    """Goes on by the actions of a model."""

    def __init__(self, loader: Batches) -> None:
        self.places, self.place = torch.cat([x for x, _ in loader]), 0

    def step(self, action: int) -> tuple[Tensor, float, bool]:
        self.place = (self.place + action + 1) % len(self.places)
        return self.places[self.place], self.place / 200, self.place % 5 == 0


def sampled(memory: list[Any], numbers: random.Random) -> list[Tensor]:
    some = numbers.sample(memory, 8)
    values = [torch.as_tensor([each[part] for each in some]) for part in (1, 2)]
    stacked = [torch.stack([each[part] for each in some]) for part in (0, 3)]
    return [stacked[0], values[0][:, None], values[1], stacked[1]]


def as_dqn_has_it(job: Job, loader: Batches, epoch: int) -> Any:
    environment = Environment(loader)
    memory: list[Any] = []
    numbers = random.Random(epoch)
    observation, loss, ends = environment.places[0], None, 0
    target = copy.deepcopy(job.model)
    for step in range(60):
        with torch.no_grad():
            action = int(job.model(observation[None])[0].argmax())
        following, reward, ended = environment.step(action)
        memory.append((observation, action, reward, following))
        observation = following
        ends += ended
        if step > 8:
            if step % 2 == 0:
                observations, actions, rewards, followings = sampled(memory, numbers)
                with torch.no_grad():
                    best, _ = target(followings).max(dim=1)
                    goal = rewards + 0.3 * best.clamp(-1, 1)
                value = job.model(observations).gather(1, actions).squeeze()
                loss = F.smooth_l1_loss(goal, value) * 0.1
                if step % 20 == 0:
                    job.log.append((step, loss.item(), value.mean().item(), ends))
                job.optimizer.zero_grad()
                loss.backward()
                job.optimizer.step()
                if step == 56 and epoch % 2:
                    break
            if step % 10 == 0:
                for mine, other in zip(target.parameters(), job.model.parameters(), strict=True):
                    mine.data.copy_(0.5 * other.data + 0.5 * mine.data)
        job.steps += 1
    return None if loss is None else loss.item(), step, ends, action


def acts_and_returns(job: Job, loader: Batches, epoch: int) -> Any:
    environment, total, count = Environment(loader), 0.0, 0
    observation = environment.places[0]
    while True:
        count += 1
        following, reward, ended = environment.step(count % 3)
        if not ended:
            loss = F.cross_entropy(job.model(observation[None]), torch.tensor([count % 4])) * (0.1 + reward)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            total += loss.item()
            if count > 40:
                return total, reward
            kept = count
        observation = following
        total += reward * kept
        if count > 50:
            break
    return total, observation


def deletes_in_a_turn(job: Job, loader: Batches, epoch: int) -> Any:
    kept = first = None
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        loss.backward()
        job.optimizer.step()
        if i == 4:
            del kept
        job.log.append(i)
        del x, loss
    return i, first


class Answer:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


def weighs(job: Job, loader: Batches, epoch: int) -> None:
    """By a list that is another one in each epoch, and holds the same."""
    job.weights = [0.5, 1.5]
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y) * job.weights[i % 2]
        loss.backward()
        if i % 2:
            job.optimizer.step()
            job.optimizer.zero_grad()


class Wrapper:
    """An optimizer of another library, around one of PyTorch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self) -> None:
        self.optimizer.step()


def of_wrapped(job: Job, loader: Batches, epoch: int) -> Any:
    optimizer = Wrapper(job.optimizer)
    for x, y in loader:
        job.optimizer.zero_grad()
        F.cross_entropy(job.model(x), y).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.99
    return optimizer.param_groups[0]["lr"]


def goes_on_and_stops(job: Job, loader: Batches, epoch: int) -> Any:
    count = 0
    for i, (x, y) in enumerate(loader):
        if i % 5 == 4:
            continue
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        count += 1
        if loss.item() < 0.05:
            return "low", loss.item()
        if count == 9 + epoch:
            break
    else:
        job.log.append("all")
    return count, i


def while_there_are_steps(job: Job, loader: Batches, epoch: int) -> Any:
    step, total = 0, 0.0
    batches = iter(loader)
    while step < 12:
        x, y = next(batches)
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        total += loss.item()
        step += 1
    return total, step


def carries(job: Job, loader: Batches, epoch: int) -> Any:
    hidden = torch.zeros(4, 8)
    total_loss = 0.0
    for x, y in loader:
        hidden = hidden.detach()
        hidden = torch.tanh(x[:4] + hidden * 0.5)
        loss = F.cross_entropy(job.model(hidden), y[:4])
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        total_loss += len(x) * loss.item()
    return hidden, total_loss


def of_globals(job: Job, loader: Batches, epoch: int) -> None:
    global COUNT
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        COUNT += 1
        SEEN.append(loss.item())
        del SEEN[:-3]


def sets_some_in_some_turns(job: Job, loader: Batches, epoch: int) -> Any:
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        loss.backward()
        job.optimizer.step()
        if i % 4 == 1:
            seldom = loss.item()
        if i % 4 == 2:
            job.log.append(seldom)
            message = f"{loss:.3f}"
        if i > 2:
            job.log.append(message)
        del loss
    try:
        return seldom, never  # type: ignore[name-defined]
    except NameError:
        return seldom


def under_a_try(job: Job, loader: Batches, epoch: int) -> Any:
    step = 0
    try:
        for x, y in loader:
            loss = F.cross_entropy(job.model(x), y)
            loss.backward()
            job.optimizer.step()
            step += 1
            if step == 7:
                raise KeyboardInterrupt
    except KeyboardInterrupt:
        job.log.append(step)
    return step


def until_the_user_ends_it(loader: Batches, epoch: int) -> Iterator[Any]:
    yield from loader[: 10 + epoch]
    if epoch % 2:
        raise KeyboardInterrupt


def until_interrupted(job: Job, loader: Batches, epoch: int) -> Any:
    step, running = 0, 0.0
    try:
        for x, y in until_the_user_ends_it(loader, epoch):
            job.optimizer.zero_grad()
            loss = F.cross_entropy(job.model(x), y)
            loss.backward()
            job.optimizer.step()
            step += 1
            running += loss.item()
    except KeyboardInterrupt:
        job.log.append(step)
    return step, running


def ends_in_any_case(job: Job, loader: Batches, epoch: int) -> Any:
    running = 0.0
    try:
        try:
            for i, (x, y) in enumerate(loader):
                job.optimizer.zero_grad()
                loss = F.cross_entropy(job.model(x), y)
                loss.backward()
                job.optimizer.step()
                running += loss.item()
                if i == 9:
                    return running
        finally:
            job.log.append(epoch)
    finally:
        job.log.append(-epoch)
    return running


def looks_at_the_end(job: Job, loader: Batches, epoch: int) -> Any:
    step = 0
    with contextlib.suppress(ArithmeticError):
        try:
            for x, y in loader:
                F.cross_entropy(job.model(x), y).backward()
                job.optimizer.step()
                step += 1
                if step == 7:
                    raise ArithmeticError
        finally:
            job.log.append(step)


def looks_at_the_end_alone(job: Job, loader: Batches, epoch: int) -> Any:
    step = 0
    try:
        for x, y in loader:
            F.cross_entropy(job.model(x), y).backward()
            job.optimizer.step()
            step += 1
    finally:
        job.log.append(step)


def deletes_at_the_end(job: Job, loader: Batches, epoch: int) -> Any:
    running = 0.0
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        x = x * 2
        loss = F.cross_entropy(job.model(x), y)
        loss.backward()
        job.optimizer.step()
        running += loss.item()
        if i % 3 == 0:
            continue
        del x, loss
        if i % 5 == 4:
            del y, i
    return running


def with_functions(job: Job, loader: Batches, epoch: int) -> Any:
    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(job.model(x), y)

    scale = 1.0 + epoch % 2
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = loss_of(x, y) * scale
        loss.backward()
        job.optimizer.step()
        SEEN.append(max([loss.item() * k for k in range(2)], key=lambda value: -value * scale))
        del SEEN[:-3]


def seen_by_a_function(job: Job, loader: Batches, epoch: int) -> Any:
    latest = lambda: loss.item()  # noqa: E731
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.log.append(latest())


def uses_them_later(job: Job, loader: Batches, epoch: int) -> Any:
    count = 0
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        count, norm = i, loss.item()
    del loss
    count += 1
    norm *= 2
    return count, norm, "loss" in job.log


def under_a_manager(job: Job, loader: Batches, epoch: int) -> Any:
    step = 0
    with contextlib.suppress(ArithmeticError):
        for x, y in loader:
            loss = F.cross_entropy(job.model(x), y)
            loss.backward()
            job.optimizer.step()
            step += 1
            if step == 7:
                raise ArithmeticError
    return step


class Meter:
    def __init__(self) -> None:
        self.val = self.avg = self.sum = self.count = 0.0

    def update(self, val: float, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def accuracy(output: Tensor, target: Tensor, topk: tuple[int, ...] = (1,)) -> list[Tensor]:
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(target)) for k in topk]


def as_imagenet_has_it(job: Job, loader: Batches, epoch: int) -> Any:
    data_time, losses, top1, batch_time = Meter(), Meter(), Meter(), Meter()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        data_time.update(time.time() - end)
        images = images.to("cpu", non_blocking=True)
        target = target.to("cpu", non_blocking=True)
        output = job.model(images)
        loss = F.cross_entropy(output, target)
        acc1, _ = accuracy(output, target, topk=(1, 2))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1[0], images.size(0))
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % job.every == 0:
            job.log.append((losses.val, losses.avg, top1.avg.item()))  # type: ignore[attr-defined]
    return losses.__dict__, top1.sum, batch_time.count, data_time.count


class Fitting(Job):
    def fit(self, loader: Batches, epoch: int) -> float:
        for x, y in loader:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.total += loss.item()
            self.steps += 1
            if self.steps % 5 == 0:
                self.log.append((self.steps, self.total))
        return self.total


def as_timm_has_it(job: Job, loader: Batches, epoch: int) -> Any:
    autocast, need_update = contextlib.suppress, True
    seen, losses = Meter(), Meter()
    for x, y in loader:
        x = x.to("cpu")
        seen.update(len(job.log))

        def _forward() -> Any:
            with autocast():
                result = {"loss": F.cross_entropy(job.model(x), y), "output": x}  # noqa: B023
                _loss = result["loss"]
            return _loss, result

        def _backward(_loss: Tensor) -> None:
            _loss.backward()
            if need_update:
                job.optimizer.step()

        if job.dry_run:
            loss, result = _forward()
        else:
            loss, result = _forward()
            _backward(loss)
        losses.update(loss.item() * 2, len(x))
        job.optimizer.zero_grad()
        job.steps += 1
        for group in job.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + job.steps // 8)
    job.log.append((seen.sum, losses.sum / losses.count))
    return result["loss"].detach()


def as_torchtune_has_it(job: Job, loader: Batches, epoch: int) -> None:
    running_loss: Any = 0
    num_tokens: Any = 0
    for idx, (x, y) in enumerate(loader):
        current_num_tokens = (y != 3).sum()
        num_tokens += current_num_tokens
        logits = job.model(x)
        current_loss = F.cross_entropy(logits, y) * current_num_tokens
        del logits
        running_loss += current_loss
        current_loss.backward()
        if (idx + 1) % 1 == 0:
            for parameter in job.model.parameters():
                parameter.grad *= 1 / num_tokens
            job.optimizer.step()
            job.optimizer.zero_grad(set_to_none=True)
            job.steps += 1
            loss_to_log = running_loss.item() / num_tokens
            job.log.append(f"{epoch}|{job.steps}|{loss_to_log}")
            running_loss = 0
            num_tokens = 0


def as_torchtune_accumulates(job: Job, loader: Batches, epoch: int) -> None:
    running_loss: Any = 0
    for idx, (x, y) in enumerate(loader):
        tokens = (y != 3).sum()
        loss = F.cross_entropy(job.model(x), y) * tokens
        running_loss += loss
        loss.backward()
        if (idx + 1) % 2 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad(set_to_none=True)
            loss_to_log = running_loss.item() / tokens
            job.log.append(f"{epoch}|{loss_to_log}")
            running_loss = 0


def sums_over_parts(job: Job, loader: Batches, epoch: int) -> None:
    running_loss: Any = 0
    for idx, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        running_loss += loss.detach()
        loss.backward()
        if (idx + 1) % 2 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
            job.log.append(running_loss.item())
            running_loss = 0


def of_a_method(job: Job, loader: Batches, epoch: int) -> Any:
    return None


def as_nanogpt_accumulates(job: Job, loader: Batches, epoch: int) -> Any:
    job.total, x, y, best = 0.0, *loader[0], math.inf
    turn = 0
    while True:
        for group in job.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + turn)
        for micro in range(3):
            loss = F.cross_entropy(job.model(x), y) / 3
            x, y = loader[(turn + micro) % len(loader)]
            loss.backward()
        norm = nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        job.optimizer.zero_grad()
        if turn % 4 == 0:
            value = loss.item() * 3
            best = min(best, value)
            job.log.append((turn, value, norm.item()))
        turn += 1
        if turn > 10:
            break
    return turn, best, loss


def accumulates_in_a_function(job: Job, loader: Batches, epoch: int) -> Any:
    total = 0.0
    for x, y in loader[:3]:
        loss = F.cross_entropy(job.model(x), y)
        loss.backward()
        total += loss.item()
    job.optimizer.step()
    job.optimizer.zero_grad()
    job.steps += 1
    if job.steps % 3 == 0:
        return total, job.steps
    return [p.sum().item() for p in job.model.parameters()]


def accumulates_and_goes_on(job: Job, loader: Batches, epoch: int) -> Any:
    skipped = done = 0
    for turn in range(12):
        for x, y in loader[turn % 3 : turn % 3 + 2]:
            loss = F.cross_entropy(job.model(x), y)
            loss.backward()
        if turn % 5 == 4:
            skipped += 1
            job.optimizer.zero_grad()
            continue
        job.optimizer.step()
        job.optimizer.zero_grad()
        done += 1
        job.log.append(loss.item() + skipped)
        if turn == 10 and epoch == 3:
            return "early", done
    else:
        done += 100
    return skipped, done


BODIES = [
    as_examples_have_it,
    evaluates,
    evaluates_decorated,
    epochs,
    goes_on_and_stops,
    carries,
    of_globals,
    sets_some_in_some_turns,
    with_functions,
    as_imagenet_has_it,
    uses_them_later,
    of_a_method,
    names_twice,
    sums_on_the_way,
    fills_a_list_on_the_way,
    fills_lists_of_its_own,
    as_ppo_has_it,
    as_dqn_has_it,
    acts_and_returns,
    weighs,
    of_wrapped,
    accumulates,
    completes_steps,
    clips_by_mixed,
    as_timm_has_it,
    as_torchtune_has_it,
    as_torchtune_accumulates,
    until_interrupted,
    ends_in_any_case,
    deletes_at_the_end,
    sums_over_parts,
    as_nanogpt_accumulates,
]
#: Which are right, and of which Rote replays little or nothing.
OTHERS = [while_there_are_steps, sums_of_other_kinds, accumulates_in_a_function, accumulates_and_goes_on]


def keeps_functions(job: Job, loader: Batches, epoch: int) -> Any:
    kept = []
    for i, (x, y) in enumerate(loader):
        kept.append(lambda: i)  # noqa: B023
        F.cross_entropy(job.model(x), y).backward()
    return [each() for each in kept]


def calls_one_of_another_turn(job: Job, loader: Batches, epoch: int) -> Any:
    found = []
    for i, (x, y) in enumerate(loader):
        if i:
            found.append(number())  # noqa: F821

        def number() -> int:
            return i  # noqa: B023

        F.cross_entropy(job.model(x), y).backward()
    return found


def hooks_in_a_turn(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        if epoch == i == 0:
            job.model[0].weight.register_hook(lambda gradient: gradient * i)  # noqa: B023
        F.cross_entropy(job.model(x), y).backward()
        job.optimizer.step()


def keeps_functions_of_another_loop(job: Job, loader: Batches, epoch: int) -> Any:
    kept = []
    for k in range(2):
        for x, y in loader:
            kept.append(lambda: k)  # noqa: B023
            F.cross_entropy(job.model(x), y).backward()
    return [each() for each in kept]


def hooks_what_is_set_behind(job: Job, loader: Batches, epoch: int) -> None:
    factor = 2.0
    for i, (x, y) in enumerate(loader):
        if epoch == i == 0:
            job.model[0].weight.register_hook(lambda gradient: gradient * factor)
        F.cross_entropy(job.model(x), y).backward()
        job.optimizer.step()
    factor = 0.0
    F.cross_entropy(job.model(x), y).backward()


#: Whose loops cannot be captured, and why.
WHOLE = {
    keeps_functions_of_another_loop: "may be called when k is another one",
    hooks_what_is_set_behind: "may be called when factor is another one",
    keeps_functions: "may be called when i is another one",
    calls_one_of_another_turn: "may be called when i is another one",
    hooks_in_a_turn: "may be called when i is another one",
    under_a_try: "under a `try`",
    looks_at_the_end: "under a `try`",
    looks_at_the_end_alone: "under a `try`",
    under_a_manager: "under a `try`",
    deletes_in_a_turn: "deletes a variable that is set before it",
    seen_by_a_function: "a variable that a function sees: loss",
}


def batches(number: int) -> Batches:
    sizes = [6] * (number - 1) + [4]  # a smaller one at the end
    return [(torch.randn(size, 8), torch.randint(4, (size,))) for size in sizes]


def nothing(job: Job, epoch: int) -> None:
    pass


def changes(job: Job, epoch: int) -> None:
    job.dry_run = epoch == 2
    job.every = 3 + epoch % 2
    job.optimizer.param_groups[0]["lr"] *= 0.9


def other_model(job: Job, epoch: int) -> None:
    if epoch == 2:
        job.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        job.optimizer = torch.optim.SGD(job.model.parameters(), lr=0.05)


def script_of(body: Callable[..., Any], between: Callable[[Job, int], None] = nothing, **options: Any) -> Any:
    def script(capture: Capture) -> Calls:
        global COUNT
        COUNT = 0
        SEEN.clear()
        job = Fitting()
        if body is of_a_method:
            run = types.MethodType(capture(Fitting.fit, **options), job)
        else:
            whole = capture(body, **options)
            run = lambda loader, epoch: whole(job, loader, epoch)  # noqa: E731
        for epoch in range(5):
            between(job, epoch)
            loader = batches(14)
            yield run(loader, epoch), [*job.log], job.total, job.steps, [*SEEN], COUNT
        return job.model, job.optimizer

    return script


def replays(step: Any) -> int:
    return sum(each.replays for each in step.stats.values())


def check_turns(script: Script, more_than: int) -> Run:
    """The promise of captured loops: equal to eager, and more turns than so many of the first function replayed."""
    found = check_right(script, captured)
    assert ORACLE_ONLY or replays(found.steps[0]) > more_than, found.steps[0].stats
    return found


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", BODIES)
def test_replayed(body: Callable[..., Any]) -> None:
    check_turns(script_of(body), more_than=20)


@pytest.mark.sampled(4)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("between", [changes, other_model])
@pytest.mark.parametrize("body", [*BODIES, *OTHERS])
def test_between_epochs(body: Callable[..., Any], between: Any) -> None:
    check_right(script_of(body, between), captured)


@pytest.mark.sampled(8)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("options", [{"verify": 4}, {"verify_every": 3}, {"passes": "all"}, {"passes": "none"}])
@pytest.mark.parametrize("body", BODIES)
def test_settings(body: Callable[..., Any], options: dict[str, Any]) -> None:
    check_right(script_of(body, **options), captured)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", [as_examples_have_it, evaluates, goes_on_and_stops])
def test_stored_plans(body: Callable[..., Any], tmp_path: Path) -> None:
    for _ in range(2):
        check_right(script_of(body, plans=str(tmp_path)), captured)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("body", WHOLE)
def test_not_captured(body: Callable[..., Any]) -> None:
    if not ORACLE_ONLY:
        with pytest.raises(ValueError, match=WHOLE[body]):
            captured(body)


class Refining:
    """Calls itself in a turn."""

    def __init__(self) -> None:
        torch.manual_seed(2)
        self.model = nn.Linear(4, 2)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.losses: list[float] = []

    def fit(self, depth: int, turns: int) -> None:
        scale, x = 1.0 + depth, torch.ones(3, 4)
        for i in range(turns):
            loss = self.model(x).pow(2).mean() * scale
            self.optimizer.zero_grad()
            loss.backward()
            if depth == 0 and i % 10 == 5:
                self.fit(1, 3)
            self.optimizer.step()
            self.losses.append(loss.item())


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.skipif(ORACLE_ONLY, reason="compares with eager itself")
def test_functions_that_run_within_themselves_or_in_two_threads() -> None:
    run = captured(Refining.fit)
    one, other = Refining(), Refining()
    run(one, 0, 40)
    other.fit(0, 40)
    assert one.losses == other.losses
    fitting = [Refining() for _ in range(3)]
    threads = [threading.Thread(target=run, args=(each, 1, 30)) for each in fitting]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = Refining()
    alone.fit(1, 30)
    assert [each.losses for each in fitting] == [alone.losses] * 3


@pytest.mark.ranks(1)
def test_of_no_loops() -> None:
    if ORACLE_ONLY:
        return
    with pytest.raises(ValueError, match="no loop of nothing can be captured: it has no loop that trains"):
        captured(nothing)
    with pytest.raises(ValueError, match="no loop of len can be captured: it is no function"):
        captured(len)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_errors_on_the_way() -> None:
    """An error in a turn leaves the function as it leaves eager's, and the next epoch goes on."""

    def script(capture: Capture) -> Calls:
        job = Job()

        def train(loader: Iterator[tuple[Tensor, Tensor]]) -> None:
            for x, y in loader:
                job.optimizer.zero_grad()
                loss = F.cross_entropy(job.model(x), y)
                loss.backward()
                job.optimizer.step()
                job.log.append(loss.item())
                if len(job.log) % 9 == 8:
                    raise ArithmeticError(len(job.log))

        def failing(number: int) -> Iterator[tuple[Tensor, Tensor]]:
            yield from batches(number)
            raise OSError("no more")

        step = capture(train)
        for _ in range(6):
            try:
                step(failing(14))
            except (ArithmeticError, OSError) as error:
                yield type(error).__name__, error.args, [*job.log]
        return job.model

    check_right(script, captured)


@pytest.mark.ranks(1)
def test_what_people_are_told() -> None:
    if ORACLE_ONLY:
        return
    job, run = Job(), captured(as_examples_have_it)
    for epoch in range(3):
        run(job, batches(14), epoch)
    (name,) = run.stats
    line = as_examples_have_it.__code__.co_firstlineno + 2
    assert name == f"as_examples_have_it (line {line})"
    stats = run.stats[name]
    assert stats.calls == 42
    assert stats.replays > 15
    assert stats.tail == f"{__file__}:{line + 7}"
    assert f"from {__file__}:{line + 7} on, the step runs as it is written" in run.explain()
    assert run.__name__ == "as_examples_have_it"
    assert run.__wrapped__ is as_examples_have_it


CLASS = """
import numpy as np
import torch

COUNT = 0

class Environment:
    place = 0

    def step(self, by):
        self.place += by
        return self.place

class Drawn:
    def __init__(self):
        self.weight, self.held = torch.ones(3), torch.zeros(3)
        self.total, self.seen, self.kept, self.limit = 0.0, [], [], None

    def helps(self, y):
        self.held.add_(y.detach(), alpha=1 + len(self.kept) % 2)
        return y * self.weight

    def backward(self, y):
        self.held.add_(y.detach(), alpha=0.1)

    def step(self):
        self.weight.add_(self.held.tanh(), alpha=0.01)
        self.held.zero_()

    def run(self, loader, scale=2.0):
        global COUNT
        total, last, n, kept = 0.0, None, 0, torch.zeros(3)
        losses, marks = [], []
        environment, table = Environment(), torch.arange(36.0).sin().view(12, 3)
        places = (np.arange(12) * 5 + self.seen.__len__()) % 12
{before}
        for i, x in enumerate(loader):
            some = places[i % 4 : i % 4 + 3]
{body}
{behind}
        return total, last, n, kept, losses, marks{returned}
"""


def drawn(seed: int) -> str:
    """A random loop: ops and the host in any order, variables that are carried, or set in some turns only."""
    draw = random.Random(seed)
    names, numbers, maybe = ["x", "kept", "x"], ["total", "scale", "n", "i", "self.total"], []
    names += draw.choice([[], [], ["table[some].mean(0)", "table[some, 1]"]])

    def indented(lines: list[str], by: int = 1) -> list[str]:
        return ["    " * by + line for line in lines]

    def tensor() -> str:
        return draw.choice(names)

    def number() -> str:
        forms = [f"{tensor()}.sum().item()", f"float({tensor()}.mean())", *numbers]
        return draw.choice(forms)

    def ops() -> list[str]:
        kind = draw.randrange(12)
        name = f"t{len(names)}"
        if kind == 11:
            return fills()
        if kind < 3:
            line = draw.choice([f"{name} = {tensor()} * 1.5", f"{name} = self.helps({tensor()})"])
            names.append(name)
            return [line]
        if kind == 3:
            return [f"kept = (kept + {tensor()}) * 0.5"]
        if kind == 4:
            return ["self.weight.mul_(0.99)", f"last = {tensor()}.sum()"]
        if kind == 5:
            return [f"if i % {draw.randint(2, 4)} == 1:", f"    {tensor()}.mul_(0.5)"]
        if kind == 6:
            maybe.append(name)
            return [f"if i % {draw.randint(2, 4)} == 1:", f"    {name} = {tensor()}.cos()"]
        if kind == 7:
            return [
                f"for k in range({draw.randint(1, 3)}):",
                "    self.held.add_(x)",
                "    if k == 1:",
                "        break",
            ]
        if kind == 8:
            return ["with torch.no_grad():", f"    inner = {tensor()}.sum()", "    self.weight.add_(0.01)"]
        if kind == 9 and draw.random() < 0.5:
            return [f"if i % {draw.randint(3, 5)} == 2:", "    n += 1", "    continue"]
        return [f"x = x + {tensor()}"]

    def fills() -> list[str]:
        value = draw.choice([f"{tensor()}.sum().item()", f"({tensor()} * 2).mean().item() + 1", number()])
        fill = draw.choice([f"losses.append({value})", f"losses += [{value}, {number()}]", f"marks += [{value}]"])
        kind = draw.randrange(8)
        if kind < 2:
            read = draw.choice(["sum().item()", "mean().cpu().numpy()", "mean().numpy()", "numpy()", "max().item()"])
            return [f"value = {tensor()}.{read}", draw.choice(["losses.append(value)", "marks.append(value)", fill])]
        if kind == 2:
            test = f"if i % {draw.randint(2, 4)} == 1:"
            otherwise = ["else:", f"    {fill}"] if draw.random() < 0.3 else []
            inner = draw.choice([fill, f"value = {tensor()}.sum().item()", "losses.append(value)", "x = x * 1.5"])
            return [test, f"    {fill}", f"    {inner}", *otherwise]
        if kind == 3:
            ends = draw.choice(["break", "continue", "losses.append(value)", f"return {number()}"])
            first = draw.choice(["n % 5 == 3", "i % 4 == 2", "self.limit is not None", "scale > 9"])
            test = draw.choice([f"{first} and value > 0.3", f"{first} and len(losses) % 2 and value > 0.1", first])
            return [f"if {test}:", "    n += 2", f"    {ends}"]
        in_block = ["with torch.no_grad():", f"    inner = {tensor()}.sum()", f"    {fill}", "    x = x * 1.0"]
        return in_block if draw.random() < 0.4 else [fill]

    def host() -> list[str]:
        kind = draw.randrange(15)
        if kind == 12:
            return fills()
        if kind == 13:
            return draw.choice(
                [
                    ["n += len(losses)"],
                    ["if len(marks) % 3 == 1:", "    n += 1"],
                    ["total += sum(marks)"],
                    ["losses = []"],
                    ["self.kept = losses"],
                    ["marks[-1:] = []"],
                ]
            )
        if kind == 14:
            return [
                draw.choice(["total += float(some.sum())", "n += int(some[0])", "places[:2] = places[1], places[0]"])
            ]
        if kind < 2:
            return [f"total += {number()}"]
        if kind == 2:
            return [f"self.seen.append({number()})", "del self.seen[:-4]"]
        if kind == 3:
            return ["n += 1", "COUNT += 1"]
        if kind == 4:
            return [f"if {tensor()}.max() > 0.5:", f"    last = {number()}"]
        if kind == 5:
            return ["if n % 4 == 3:", f"    self.seen.append(f'{{{number()}:.3f}}')"]
        if kind == 6 and draw.random() < 0.4:
            return [f"if i == {draw.randint(6, 20)}:", f"    {draw.choice(['break', f'return {number()}'])}"]
        if kind == 7 and maybe:
            return ["try:", f"    total -= {draw.choice(maybe)}.sum().item()", "except NameError:", "    n += 2"]
        if kind == 8:
            return ["if n % 3 == 1:", "    n += 1", "    continue"]
        if kind == 9:
            return [f"self.total = {number()} * 0.5"]
        if kind == 10:
            return [f"scale = {number()}" if draw.random() < 0.3 else f"last = {tensor()}"]
        return [f"value = {number()}", "total -= value"]

    body = [line for _ in range(draw.randint(2, 6)) for line in ops()]
    if draw.random() < 0.2:
        body += [*host(), *ops()]
    body += [line for _ in range(draw.randint(1, 5)) for line in host()]
    behind = ["else:", "    n += 100"] if draw.random() < 0.3 else []
    if draw.random() < 0.3:  # the loop that trains leaves the update to what stands behind it
        behind_it = [*(line for _ in range(draw.randint(0, 2)) for line in [*ops(), *host()]), "self.step()"]
        behind_it += [line for _ in range(draw.randint(0, 3)) for line in host()]
        body = ["for micro in range(3):", *indented([*body, f"self.backward({tensor()})"]), *behind_it]
    elif draw.random() < 0.3:  # it trains in a block
        body += [
            f"loss = {tensor()} * 2",
            "loss.backward",
            *(line for _ in range(draw.randint(0, 2)) for line in host()),
        ]
        around = [line for _ in range(draw.randint(0, 2)) for line in host()]
        test = draw.choice(["place % 3:", "i > 2:", "n < 20:", "place % 3 and i != 7:"])
        body = ["place = environment.step(i)", *around, f"if {test}", *indented(body)]
        body += [line for _ in range(draw.randint(0, 2)) for line in [*ops(), *host()]]
    before = [draw.choice(["inner = 1.0", "value = 0", "x = torch.zeros(3)", "scale = scale + 1"])]
    unset = [name for name in names if name.startswith("t")]
    returned = f", {draw.choice(unset)}" if unset and draw.random() < 0.3 else ""
    return CLASS.format(
        before="\n".join(indented(before, 2)),
        body="\n".join(indented(body, 3)),
        behind="\n".join(indented(behind, 2)),
        returned=returned,
    )


@pytest.mark.sampled(12)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("part", range(24))
def test_random_loops(part: int, tmp_path: Path) -> None:
    replayed = 0
    many = 40 if EVERYTHING else 16
    for seed in range(part * many, part * many + many):
        path = tmp_path / f"drawn_{seed}_{torch.distributed.get_rank()}.py"
        path.write_text(drawn(seed))

        def script(capture: Capture) -> Calls:
            scope: dict[str, Any] = {"__name__": f"drawn_{seed}"}  # noqa: B023
            exec(compile(path.read_text(), str(path), "exec"), scope)  # noqa: B023
            trainer = scope["Drawn"]()
            try:
                run = capture(scope["Drawn"].run)
            except ValueError as error:  # a loop that calls nothing
                assert "no loop that trains" in str(error), error
                run = scope["Drawn"].run
            for call in range(4):
                try:
                    result = run(trainer, [torch.randn(3) for _ in range(12)])
                except (RuntimeError, NameError, TypeError, AttributeError, ValueError) as error:
                    result = "NameError" if isinstance(error, NameError) else type(error).__name__
                yield result, trainer.total, [*trainer.seen], trainer.weight, trainer.held, scope["COUNT"], call
            return trainer.held

        found = check_right(script, captured)
        steps = [step for step in found.steps if hasattr(step, "stats")]
        replayed += any(replays(step) for step in steps) or ORACLE_ONLY
    assert replayed >= many // 4, replayed
