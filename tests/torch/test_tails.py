"""What a step does on the host after its last op, which runs as it is written: ``self.total += loss.item()``, meters,
logs, the best loss so far."""

import collections
import contextlib
import itertools
import math
import random
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
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_right
from torch import Tensor, nn

CALLS = 32
SCALE = 3.0
LOG: list[Any] = []


class Meter:
    """As `pytorch/examples` has it."""

    def __init__(self) -> None:
        self.value = self.sum = self.average = 0.0
        self.count = 0

    def update(self, value: float, n: int = 1) -> None:
        self.value = value
        self.sum += value * n
        self.count += n
        self.average = self.sum / self.count


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.meter, self.other, self.strange = Meter(), Meter(), Strange()
        self.total, self.best = 0.0, math.inf
        self.correct = self.seen = self.steps = 0
        self.looks, self.wrapped, self.every = 0, Wrapped(self), Every(3)
        self.losses: list[Any] = []
        self.log: list[Any] = []
        self.history: dict[str, list[float]] = collections.defaultdict(list)
        self.last: collections.deque[Any] = collections.deque(maxlen=3)
        self.batches = ((torch.randn(6, 8), torch.randint(4, (6,))) for _ in itertools.count())
        self.data = np.random.RandomState(3).randn(100, 8).astype(np.float32)

    def update(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad()
        out = self.model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        self.optimizer.step()
        return out, loss

    def seldom(self) -> None:
        self.looks += 1
        if self.looks % 9 == 8:
            self.log.append(self.total)

    def entered(self, manager: Any) -> Any:
        return manager

    def look(self) -> None:
        self.log.append(self.total)

    def told(self) -> Any:
        """What people look at, and what the next calls find."""
        meters = [dict(vars(each)) for each in (self.meter, self.other, self.strange)]
        numbers = (self.total, self.best, self.correct, self.seen, self.steps, meters)
        every = {**vars(self.every), "left": [*self.every.left]}
        return *numbers, every, [*self.losses], [*self.log], dict(self.history), [*self.last], [*LOG]


def adds_up(self: Trainer, x: Tensor, y: Tensor) -> None:
    _, loss = self.update(x, y)
    self.total += loss.item()


def as_examples_have_it(self: Trainer, x: Tensor, y: Tensor) -> Any:
    self.optimizer.zero_grad()
    out = self.model(x)
    loss = F.cross_entropy(out, y)
    loss.backward()
    self.optimizer.step()

    self.meter.update(loss.item(), x.size(0))
    self.correct += (out.argmax(1) == y).sum().item()
    self.seen += y.numel()
    self.steps += 1
    if self.steps % 4 == 0:
        self.log.append(f"{self.steps}: {loss:.4f} ({self.meter.average:.3f}), {100 * self.correct / self.seen:.1f} %")
    if loss < self.best:
        self.best = loss.item()
    return self.meter.average


def evaluates(self: Trainer, x: Tensor, y: Tensor) -> None:
    with torch.no_grad():
        out = self.model(x)
        loss = F.cross_entropy(out, y, reduction="sum")
    self.correct += out.argmax(1).eq(y).sum().item()
    self.total += loss.item()
    self.seen += len(y)


@torch.no_grad()
def without_grad(self: Trainer, x: Tensor, y: Tensor) -> Any:
    out = self.model(x)
    self.total += F.cross_entropy(out, y).item()
    extra = out + self.model[0].weight.sum()
    return extra.requires_grad, torch.is_grad_enabled()


def unused_graph(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    self.total += loss.item() * x.size(0)
    return self.total


def read_before_the_update(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    value = loss.item()
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    self.total += value
    return value / 2


def read_in_a_loop(self: Trainer, x: Tensor, y: Tensor) -> float:
    losses = []
    for _ in range(2):
        _, loss = self.update(x, y)
        losses.append(loss.item())
    self.history["loss"].append(sum(losses) / len(losses))
    self.last.append(max(losses))
    return self.history["loss"][-1]


def keeps_tensors(self: Trainer, x: Tensor, y: Tensor) -> None:
    _, loss = self.update(x, y)
    self.losses.append(loss.detach())


def keeps_numbers(self: Trainer, x: Tensor, y: Tensor) -> Any:
    out, loss = self.update(x, y)
    self.log.extend(out.argmax(1).tolist())
    self.log.append(float(out.detach().numpy().sum()))
    return [each.item() for each in (loss, loss * 2)]


def with_a_scheduler(self: Trainer, x: Tensor, y: Tensor) -> None:
    _, loss = self.update(x, y)
    self.total += loss.item()
    self.scheduler.step()
    self.log.append(self.optimizer.param_groups[0]["lr"])


def stops_at_no_number(self: Trainer, x: Tensor, y: Tensor) -> float:
    _, loss = self.update(x, y)
    if not math.isfinite(loss.item()):
        raise RuntimeError("no number")
    return loss.item()


def clears_last(self: Trainer, x: Tensor, y: Tensor) -> None:
    loss = F.cross_entropy(self.model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
    self.optimizer.step()
    self.log.append({"loss": loss.item(), "norm": float(norm), "weight": self.model[0].weight.norm().item()})
    self.optimizer.zero_grad()


def decides_by_what_counts_later(self: Trainer, x: Tensor, y: Tensor) -> None:
    scale = 1.0 if self.steps % 4 else 0.5
    self.optimizer.zero_grad()
    loss = F.cross_entropy(self.model(x), y) * scale
    loss.backward()
    self.optimizer.step()
    self.total += loss.item()
    self.steps += 1
    if self.steps % 3 == 0:
        self.log.append((self.steps, self.total))


def decides_by_what_counts_before(self: Trainer, x: Tensor, y: Tensor) -> None:
    self.steps += 1
    scale = 1.0 if self.steps % 4 else 0.5
    self.optimizer.zero_grad()
    loss = F.cross_entropy(self.model(x), y) * scale
    loss.backward()
    self.optimizer.step()
    self.total += loss.item() * self.steps


def returns_early(self: Trainer, x: Tensor, y: Tensor) -> Any:
    if y[0] == 0:
        return "nothing"
    out, loss = self.update(x, y)
    if x.size(0) > 6:
        return out.detach(), loss.item()
    self.total += loss.item()
    return self.total


def sets_sometimes(self: Trainer, x: Tensor, y: Tensor) -> Any:
    if y[0] == 0:
        extra = x.sum()
    _, loss = self.update(x, y)
    self.total += loss.item()
    if y[0] == 0:
        self.total += extra.item()
    try:
        return extra.item()
    except UnboundLocalError:
        return "unset"


def sets_its_arguments(self: Trainer, x: Tensor, y: Tensor, *more: float, scale: float = 2.0, **others: float) -> Any:
    x = x * scale
    for each in more:
        scale += each
    _, loss = self.update(x, y)
    self.total += loss.item() * scale + sum(more) + others.get("other", 0.0)
    scale = 0
    return x.sum().item() + scale, more, others


def with_functions_inside(self: Trainer, x: Tensor, y: Tensor) -> Any:
    def loss_of(out: Tensor) -> Tensor:
        return F.cross_entropy(out, y)

    self.optimizer.zero_grad()
    loss = loss_of(self.model(x))
    loss.backward()
    self.optimizer.step()
    more = lambda: self.total + loss.item() * SCALE  # noqa: E731
    self.total = more()
    return [more() + value for value in range(2)]


def with_other_names(self: Trainer, x: Tensor, y: Tensor) -> None:
    model, optimizer, log = self.model, self.optimizer, self.log
    meter = self.meter
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    meter.update(loss.item())
    self.log.append((optimizer.param_groups[0]["lr"], log is self.log, model is self.model))


def names_what_it_has(self: Trainer, x: Tensor, y: Tensor) -> None:
    model = self.model
    optimizer = self.optimizer
    meter = self.meter
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    meter.update(loss.item())
    self.log.append((optimizer.param_groups[0]["lr"], meter is self.meter, model[0].weight[0, 0].item()))


def of_a_global(self: Trainer, x: Tensor, y: Tensor) -> None:
    global LAST
    _, loss = self.update(x, y)
    LAST = loss.item()
    LOG.append(LAST)
    del LOG[:-3]


def changes_a_result(self: Trainer, x: Tensor, y: Tensor) -> Any:
    out, _ = self.update(x, y)
    out[out < 0] = 0
    self.total += out.sum().item()
    return out.requires_grad, out.is_leaf


def several_in_a_line(self: Trainer, x: Tensor, y: Tensor) -> None:
    out = self.model(x); loss = F.cross_entropy(out, y)  # fmt: skip  # noqa: E702
    self.optimizer.zero_grad(); loss.backward(); self.optimizer.step()  # fmt: skip  # noqa: E702
    self.total += loss.item(); self.seen += 1  # fmt: skip  # noqa: E702


def in_parts(self: Trainer, x: Tensor, y: Tensor) -> Any:
    out, loss = self.update(x, y)
    parts = {"loss": loss, "list": [loss, out.detach().mean()], "twice": (loss, loss)}
    self.total += parts["loss"].item() + parts["list"][1].item()
    parts["list"].append(3)
    return parts["twice"][0] is parts["twice"][1], parts["loss"] is parts["list"][0], len(parts["list"])


def measures_time(self: Trainer, x: Tensor, y: Tensor) -> None:
    begin = time.perf_counter()
    _, loss = self.update(x, y)
    self.total += loss.item()
    self.log.append(time.perf_counter() > begin)


def takes_a_number_first(self: Trainer, x: Tensor, y: Tensor) -> int:
    before = self.steps
    _, loss = self.update(x, y)
    self.steps += 1
    self.log.append((before, loss.item()))
    return before


def takes_a_batch(self: Trainer, x: Tensor, y: Tensor) -> float:
    x, y = next(self.batches)
    _, loss = self.update(x, y)
    self.total += loss.item()
    return self.total


def makes_a_batch(self: Trainer, x: Tensor, y: Tensor) -> float:
    """As `nanoGPT` has it."""
    places = torch.randint(90, (len(y),))
    x = torch.stack([torch.from_numpy(self.data[place]) for place in places])
    _, loss = self.update(x, y)
    return loss.item()


def sets_the_rate(self: Trainer, x: Tensor, y: Tensor) -> float:
    rate = 0.01 * math.exp(-self.steps / 10)
    for group in self.optimizer.param_groups:
        group["lr"] = rate
    _, loss = self.update(x, y)
    self.steps += 1
    self.log.append((rate, loss.item()))
    return rate


def decides_by_chance(self: Trainer, x: Tensor, y: Tensor, *more: int, scale: float = 1.0) -> Any:
    chance = random.randint(0, 3)
    if chance == 2:
        return None
    noise = torch.from_numpy(np.random.randn(*x.shape)).float()
    x = x + noise * 0.1
    _, loss = self.update(x * scale, y)
    self.total += loss.item() + chance
    return chance, more, scale


def takes_arrays(self: Trainer, x: Any, y: Any) -> float:
    x, y = torch.as_tensor(x.numpy()), torch.as_tensor(y.numpy())
    with torch.enable_grad():
        _, loss = self.update(x, y)
    self.total += loss.item()
    return self.total


def measured_before(self: Trainer, x: Tensor, y: Tensor) -> None:
    """As the example for ImageNet has it."""
    begin = time.perf_counter()
    out = self.model(x)
    loss = F.cross_entropy(out, y)
    found = [(out.argmax(1) == y).float().mean(0, keepdim=True)]
    self.meter.update(loss.item(), x.size(0))
    self.other.update(found[0].item(), n=len(x))
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    self.log.append((time.perf_counter() > begin, self.other.average))


def added_up_before(self: Trainer, x: Tensor, y: Tensor) -> float:
    out = self.model(x)
    loss = F.cross_entropy(out, y)
    self.total += loss.item() * len(x)
    self.correct += (out.argmax(1) == y).sum().item()
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    return self.total


def added_up_and_looked_at(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    self.total += loss.item()
    self.look()
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    return self.total


def of_what_is_written(self: Trainer, x: Tensor, y: Tensor) -> float:
    weight = self.model[0].weight.detach()
    loss = F.cross_entropy(self.model(x), y)
    self.total += weight.sum().item()
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    return self.total


def of_a_list_that_is_filled(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    parts = [loss.item()]
    self.total += parts[0] * len(parts)
    parts.append(1.0)
    self.optimizer.zero_grad()
    loss.backward()
    parts[0] = 2.0
    self.optimizer.step()
    return self.total


class Strange(Meter):
    def update(self, value: float, n: int = 1) -> None:
        super().update(value, n)
        LOG.append(value)
        del LOG[:-3]


def measured_strangely(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    self.strange.update(loss.item())
    LOG.append("before")
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    return self.strange.average


def looked_at_now_and_then(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    self.total += loss.item()
    self.seldom()
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    return self.total


def looked_at_by_a_hook(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    self.meter.update(loss.item())
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    return self.meter.average


def looked_at_by_an_optimizer(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    self.total += loss.item()
    self.wrapped.zero_grad()
    loss.backward()
    self.wrapped.step()
    return self.total


def left_in_some_calls(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    self.total += loss.item()
    self.optimizer.zero_grad()
    if self.steps % 9 == 8 and self.optimizer is not None:
        self.steps += 1
        return -1.0
    loss.backward()
    self.optimizer.step()
    self.steps += 1
    return self.total


def of_a_view_that_is_written(self: Trainer, x: Tensor, y: Tensor) -> float:
    loss = F.cross_entropy(self.model(x), y)
    kept = loss.detach().clone()
    part = kept.view(1)
    self.total += kept.item()
    if y[0] == 0:
        part.mul_(2)
    self.optimizer.zero_grad()
    loss.backward()
    self.optimizer.step()
    return self.total


class Wrapped:
    def __init__(self, trainer: Any) -> None:
        self.trainer, self.steps = trainer, 0

    def zero_grad(self) -> None:
        self.trainer.optimizer.zero_grad()

    def step(self) -> None:
        self.steps += 1
        if self.steps % 7 == 6:
            self.trainer.optimizer.param_groups[0]["lr"] = 0.1 / (1 + self.trainer.total)
        self.trainer.optimizer.step()


class Every:
    """A manager that counts on the host, as that of `accelerate` does."""

    def __init__(self, number: int) -> None:
        self.number, self.calls, self.syncs = number, 0, True
        self.left: list[Any] = []

    def __enter__(self) -> "Every":
        self.calls += 1
        self.syncs = self.calls % self.number == 0
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        self.left.append(kind)

    @contextlib.contextmanager
    def block(self) -> Iterator[int]:
        self.calls += 1
        self.syncs = self.calls % self.number == 0
        try:
            yield self.calls
        finally:
            self.left.append(self.calls)


def under_a_manager(self: Trainer, x: Tensor, y: Tensor) -> Any:
    with self.every.block():
        loss = F.cross_entropy(self.model(x), y)
        self.total += loss.detach()
        loss.backward()
        if self.every.syncs:
            self.optimizer.step()
            self.optimizer.zero_grad()
    if self.every.syncs:
        self.steps += 1
    return loss.detach()


def under_a_manager_with_a_name(self: Trainer, x: Tensor, y: Tensor) -> Any:
    begin = len(self.log)
    with self.entered(self.every) as every:
        scale = 0.5 if every.syncs else 1.0
        out = self.model(x)
        loss = F.cross_entropy(out, y) * scale
        loss.backward()
        if every.syncs:
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.log.append((begin, every.calls, loss.item()))
        self.correct += int((out.argmax(1) == y).sum())
    self.seen += len(x)
    return begin, self.correct


def leaves_a_block_early(self: Trainer, x: Tensor, y: Tensor) -> Any:
    if self.steps % 2:
        scale = 2.0
    with self.every.block():
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        if len(x) == 8:
            return "large"
        self.log.append(loss.item())
        if len(self.log) % 5 == 4:
            return self.log[-1]
    self.steps += 1
    return loss.item() if self.steps % 2 else scale


def returns_within_a_block(self: Trainer, x: Tensor, y: Tensor) -> Any:
    with self.every.block():
        begin = len(self.log)
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log.append(begin)
        return begin, loss.detach()


def is_named_and_returns_within_a_block(self: Trainer, x: Tensor, y: Tensor) -> Any:
    with self.every as every:
        times = str(every.calls)
        loss = F.cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return times, loss.item()


class WithBase(Trainer):
    def step(self, x: Tensor, y: Tensor) -> Any:
        _, loss = super().update(x, y)
        self.total += loss.item()
        return super().told()[0]


def of_a_base(self: Trainer, x: Tensor, y: Tensor) -> Any:
    return WithBase.step(self, x, y)


BODIES: list[Callable[..., Any]] = [
    adds_up,
    as_examples_have_it,
    evaluates,
    without_grad,
    unused_graph,
    read_before_the_update,
    read_in_a_loop,
    keeps_tensors,
    keeps_numbers,
    with_a_scheduler,
    stops_at_no_number,
    clears_last,
    decides_by_what_counts_later,
    decides_by_what_counts_before,
    returns_early,
    sets_sometimes,
    sets_its_arguments,
    with_functions_inside,
    names_what_it_has,
    of_a_global,
    changes_a_result,
    several_in_a_line,
    in_parts,
    measured_before,
    added_up_before,
    WithBase.step,
    under_a_manager_with_a_name,
    returns_within_a_block,
    is_named_and_returns_within_a_block,
]
#: With a front.
WITH_FRONT: list[Callable[..., Any]] = [
    measures_time,
    takes_a_number_first,
    takes_a_batch,
    makes_a_batch,
    sets_the_rate,
    decides_by_chance,
    takes_arrays,
    under_a_manager,
    leaves_a_block_early,
]
#: Of which nothing is replayed, or the optimizer's step alone: a list that is older than the step, by a second name;
#: and statements that may not be moved.
LEFT_WHOLE = [
    with_other_names,
    added_up_and_looked_at,
    of_what_is_written,
    of_a_list_that_is_filled,
    measured_strangely,
    looked_at_now_and_then,
    looked_at_by_a_hook,
    looked_at_by_an_optimizer,
    left_in_some_calls,
    of_a_view_that_is_written,
]


def nothing(trainer: Trainer, call: int) -> None:
    pass


def starts_again(trainer: Trainer, call: int) -> None:
    if call % 9 == 8:
        trainer.total, trainer.steps, trainer.meter = 0.0, 0, Meter()
        trainer.losses, trainer.log = [], []


def loads(trainer: Trainer, call: int) -> None:
    if call % 7 == 5:
        trainer.model.load_state_dict({name: each * 0.9 for name, each in trainer.model.state_dict().items()})


def other_rate(trainer: Trainer, call: int) -> None:
    if call % 5 == 3:
        trainer.optimizer.param_groups[0]["lr"] *= 0.8


def evaluates_between(trainer: Trainer, call: int) -> None:
    trainer.model.train(call % 8 != 6)


def no_grads(trainer: Trainer, call: int) -> None:
    if call % 6 == 2:
        trainer.optimizer.zero_grad(set_to_none=call % 4 == 0)


def script_of(
    body: Callable[..., Any],
    between: Callable[[Trainer, int], None] = nothing,
    *,
    arguments: Callable[[int], dict[str, Any]] = lambda call: {},
    calls: int = CALLS,
    **options: Any,
) -> Script:
    class Own(WithBase if body is WithBase.step else Trainer):  # type: ignore[misc]
        step = body

    def script(capture: Capture) -> Calls:
        LOG.clear()
        random.seed(4), np.random.seed(4)
        trainer = Own()
        if body is looked_at_by_a_hook:
            hooked = itertools.count()
            scale = lambda grad: grad * (trainer.meter.average if next(hooked) % 9 == 8 else 1.0)  # noqa: E731
            trainer.model[0].weight.register_hook(scale)
        step = capture(trainer.step, **options)
        for call in range(calls):
            between(trainer, call)
            size = 8 if call % 11 == 10 else 6
            x, y = torch.randn(size, 8), torch.randint(4, (size,))
            yield step(x, y, **arguments(call)), trainer.told(), random.random(), np.random.rand()
        return trainer.model, trainer.optimizer

    return script


@pytest.mark.sampled(2)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", BODIES)
def test_replayed(body: Callable[..., Any]) -> None:
    found = check_right(script_of(body, calls=CALLS + 16 if body is measured_before else CALLS), replays=6)
    if not ORACLE_ONLY:
        (step,) = found.steps
        assert step.stats.calls == len(found.outputs)
        assert step.stats.tail.startswith(f"{__file__}:") or body is stops_at_no_number, step.stats


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", WITH_FRONT)
def test_behind_a_front(body: Callable[..., Any]) -> None:
    found = check_right(script_of(body, calls=56), replays=10)
    assert ORACLE_ONLY or found.steps[0].stats.front.startswith(f"{__file__}:"), found.steps[0].stats


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", LEFT_WHOLE)
def test_left_whole(body: Callable[..., Any]) -> None:
    check_right(script_of(body, calls=50))


@pytest.mark.sampled(12)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("between", [starts_again, loads, other_rate, evaluates_between, no_grads])
@pytest.mark.parametrize("body", [*BODIES, *WITH_FRONT])
def test_between_calls(body: Callable[..., Any], between: Any) -> None:
    check_right(script_of(body, between, calls=56 if body in WITH_FRONT else CALLS))


@pytest.mark.sampled(8)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("options", [{"verify": 4}, {"verify_every": 3}, {"passes": "all"}, {"passes": "none"}])
@pytest.mark.parametrize("body", [*BODIES, *WITH_FRONT])
def test_settings(body: Callable[..., Any], options: dict[str, Any]) -> None:
    check_right(script_of(body, calls=56 if body in WITH_FRONT else CALLS, **options))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_arguments() -> None:
    check_right(script_of(sets_its_arguments, arguments=lambda call: {"scale": 0.5, "other": 2.0}), replays=8)
    check_right(script_of(sets_its_arguments, arguments=lambda call: {} if call % 5 else {"other": 1.0}), replays=4)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("body", [adds_up, as_examples_have_it, evaluates, returns_early])
def test_stored_plans(body: Callable[..., Any], trust: bool, tmp_path: Path) -> None:
    for _ in range(2):
        check_right(script_of(body, plans=str(tmp_path), trust_plans=trust), replays=4)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:rote")
def test_of_one_rank() -> None:
    """The first rank looks at the loss, and the others do not; gradients are reduced in every step."""
    rank = torch.distributed.get_rank()

    def script(capture: Capture) -> Calls:
        trainer = Trainer()
        model = nn.parallel.DistributedDataParallel(trainer.model)

        def train(x: Tensor, y: Tensor) -> None:
            trainer.optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            trainer.optimizer.step()
            if rank == 0:
                trainer.meter.update(loss.item())
                trainer.log.append(f"{loss:.3f}")

        step = capture(train)
        for _ in range(CALLS):
            yield step(torch.randn(6, 8) + rank, torch.randint(4, (6,))), trainer.told()
        return trainer.model

    check_right(script, replays=8)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_errors() -> None:
    """An error in the tail leaves what eager leaves, and the next calls are replayed."""

    def script(capture: Capture) -> Calls:
        trainer = Trainer()

        def train(x: Tensor, y: Tensor) -> float:
            _, loss = trainer.update(x, y)
            trainer.total += loss.item()
            if trainer.fails:  # type: ignore[attr-defined]
                raise KeyError(trainer.total)
            return trainer.total

        step = capture(train)
        for call in range(CALLS):
            trainer.fails = call % 6 == 5  # type: ignore[attr-defined]
            try:
                yield step(torch.randn(6, 8), torch.randint(4, (6,)))
            except KeyError as error:
                yield error.args
        return trainer.model, trainer.optimizer

    check_right(script, replays=12)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("where", ["front", "head", "tail", "leaving"])
def test_errors_in_a_block(where: str) -> None:
    """A manager hears of an error wherever it is raised, and only once."""

    def script(capture: Capture) -> Calls:
        trainer = Trainer()

        def train(x: Tensor, y: Tensor) -> Any:
            with trainer.every:
                trainer.seen += len(x)
                if trainer.fails == "front":  # type: ignore[attr-defined]
                    raise KeyError(trainer.every.calls)
                trainer.optimizer.zero_grad()
                loss = F.cross_entropy(trainer.model(x), y)
                loss.backward()
                trainer.optimizer.step()
                trainer.losses.append(loss.item())
                if trainer.fails == "tail":  # type: ignore[attr-defined]
                    raise KeyError(trainer.every.calls)
            trainer.every.left.append("behind")
            if trainer.fails == "leaving":  # type: ignore[attr-defined]
                raise KeyError(trainer.every.calls)
            return trainer.losses[-1]

        step = capture(train)
        for call in range(60):
            trainer.fails = where if call % 9 == 8 else ""  # type: ignore[attr-defined]
            x, y = torch.randn(6, 8), torch.randint(4, (6,))
            if trainer.fails == "head":  # type: ignore[attr-defined]
                y[2] = 7
            try:
                result = step(x, y)
            except (KeyError, IndexError) as error:
                result = type(error).__name__
            yield result, trainer.told()
        return trainer.model, trainer.optimizer

    check_right(script, replays=10)


class Strict(Every):
    """Raises where it is left, now and then."""

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)
        if self.calls % 9 == 8:
            raise KeyError(self.calls)


class Lenient(Every):
    def __exit__(self, kind: Any, *error: Any) -> Any:  # type: ignore[override]
        super().__exit__(kind, *error)
        return self.calls % 2


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("kind", [Every, Strict, Lenient])
@pytest.mark.parametrize("where", ["inside", "behind"])
def test_managers_that_see_errors(kind: type[Every], where: str) -> None:
    """Ops stand behind the block too, and an error is raised among them, or in the block."""

    def script(capture: Capture) -> Calls:
        trainer = Trainer()
        trainer.every = kind(3)

        def train(x: Tensor, y: Tensor) -> Any:
            loss = None
            with trainer.every:
                loss = F.cross_entropy(trainer.model(x), y)
                loss.backward()
                with torch.no_grad():
                    trainer.model[0].bias.grad.mul_(0.5)
                    trainer.seen += 1
                if trainer.fails == "inside":  # type: ignore[attr-defined]
                    raise ValueError(trainer.every.calls)
            if trainer.every.syncs:
                trainer.optimizer.step()
                trainer.optimizer.zero_grad()
                if trainer.fails == "behind":  # type: ignore[attr-defined]
                    raise ValueError(trainer.every.calls)
            return loss.item()

        step = capture(train)
        for call in range(60):
            trainer.fails = where if call % 7 == 5 else ""  # type: ignore[attr-defined]
            try:
                result: Any = step(torch.randn(6, 8), torch.randint(4, (6,)))
            except (KeyError, ValueError) as error:
                result = repr(error), repr(error.__context__)
            yield result, trainer.told()
        return trainer.model, trainer.optimizer

    check_right(script)


@pytest.mark.ranks(1)
def test_what_people_are_told() -> None:
    if ORACLE_ONLY:
        return
    import rote

    trainer = Trainer()
    whole, halved = (rote.capture(types.MethodType(adds_up, trainer), tail=tail, strict=tail) for tail in (False, True))
    with pytest.warns(UserWarning, match=r"recording refused.*self\.total"):
        for _ in range(8):
            whole(torch.randn(6, 8), torch.randint(4, (6,)))
    assert whole.stats.refusals
    assert not whole.stats.tail
    for _ in range(20):
        halved(torch.randn(6, 8), torch.randint(4, (6,)))
    line = adds_up.__code__.co_firstlineno + 2
    assert halved.stats.tail == f"{__file__}:{line}"
    assert not halved.stats.refusals
    assert halved.stats.replays > 2
    assert halved.stats.calls == 20
    assert f"from {__file__}:{line} on, the step runs as it is written: the step changes" in halved.explain()
    assert halved.plan_counts()["local"]


@pytest.mark.ranks(1)
def test_refused_as_a_whole() -> None:
    """Where no halves serve, the step is refused for what the whole is refused for, once."""
    if ORACLE_ONLY:
        return
    import rote

    trainer = Trainer()

    def train(x: Tensor, y: Tensor) -> None:
        x = x * 2
        for _ in range(1):
            loss = F.cross_entropy(trainer.model(x), y)
            trainer.total += loss.item()
            trainer.optimizer.zero_grad()
            loss.backward()
            trainer.optimizer.step()

    step = rote.capture(train)
    with pytest.warns(UserWarning, match=r"recording refused") as caught:
        for _ in range(40):
            step(torch.randn(6, 8), torch.randint(4, (6,)))
    assert len([each for each in caught if "refused" in str(each.message)]) == 1
    assert not step.stats.replays
    assert not (step.stats.front or step.stats.tail)
    assert step.stats.calls == 40


CLASS = """
import random
import time
import torch

COUNT = 0

class Drawn:
    def __init__(self):
        self.held, self.weight = torch.zeros(3), torch.ones(3)
        self.total, self.steps, self.seen, self.best = 0.0, 0, [], 10.0
        self.batches = (torch.randn(3) for _ in range(100))

    def helps(self, y):
        self.held.add_(y.detach())
        return y * self.weight

    def step(self, x, i, *more, scale=2.0):
        global COUNT
{body}
"""


def drawn(seed: int) -> str:
    """A random step: ops, then the host, in any statements; variables that are set in branches and loops."""
    draw = random.Random(seed)
    names = ["x"]
    numbers = ["scale", "self.total", "len(self.seen)"]
    maybe: list[str] = []

    def indented(lines: list[str]) -> list[str]:
        return ["    " + line for line in lines]

    def tensor() -> str:
        return draw.choice(names)

    def ops() -> list[str]:
        kind = draw.randrange(10)
        name = f"t{len(names)}"
        if kind < 3:
            line = draw.choice([f"{name} = {tensor()} * 1.5", f"{name} = self.helps({tensor()})"])
            names.append(name)
            return [line]
        if kind == 3:
            names.extend([name, f"{name}b"])
            return [f"{name}, {name}b = {tensor()}.sin(), {tensor()} + {tensor()}"]
        if kind == 4:
            maybe.append(name)
            return [f"if x.shape[0] == 3 and i % {draw.randint(2, 4)} == 0:", f"    {name} = {tensor()}.cos()"]
        if kind == 5:
            return [f"for k in range({draw.randint(1, 3)}):", "    self.weight.mul_(0.99)", "    last = k"]
        if kind == 6:
            return ["self.held.add_(x)"]
        if kind == 7:
            return [f"x = x + {tensor()}"]
        if kind == 8 and draw.random() < 0.4:
            return ["if x.shape[0] == 4:", f"    return {tensor()}, 'early'"]
        return ["with torch.no_grad():", "    self.weight.add_(0.01)", f"    inner = {tensor()}.sum()"]

    def number() -> str:
        forms = [f"{tensor()}.sum().item()", f"float({tensor()}.mean())", *numbers]
        if maybe and draw.random() < 0.2:
            forms = [f"{draw.choice(maybe)}.sum().item()"]
        return draw.choice(forms)

    def host() -> list[str]:
        kind = draw.randrange(13)
        if kind < 2:
            return [f"self.total += {number()}"]
        if kind == 2:
            return [f"self.seen.append({number()})", "del self.seen[:-4]"]
        if kind == 3:
            name = f"n{len(numbers)}"
            numbers.append(name)
            return [f"{name} = {number()} * 2"]
        if kind == 4:
            return [f"if {tensor()}.max() > {draw.choice(['self.best', '0.5'])}:", f"    self.best = {number()}"]
        if kind == 5:
            return ["self.steps += 1", "COUNT += 1"]
        if kind == 6:
            return ["if self.steps % 3 == 0:", f"    self.seen.append(f'{{{number()}:.3f}}')"]
        if kind == 7:
            return ["try:", *indented([f"self.total += {number()}"]), "except NameError:", "    self.steps += 2"]
        if kind == 8:
            return [f"f = lambda v: v + {number()}", "self.total = f(self.total) * 0.5"]
        if kind == 9 and draw.random() < 0.4:
            return ["if self.steps % 4 == 1:", f"    return {number()}"]
        if kind == 10:
            return [f"self.seen = [{number()} for k in range(2)]"]
        if kind == 11:
            return [f"{tensor()}.mul_(1.5)" if draw.random() < 0.3 else f"scale = {number()}"]
        return [f"inner = {number()}", "self.total -= inner"]

    lines = []
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, 3)):
            lines += draw.choice(
                [
                    ["first = self.steps"],
                    ["k = random.randint(0, 3)", "if k == 3:", "    return k, self.total"],
                    ["x = x * random.choice([1.0, 2.0])"],
                    ["begin = time.perf_counter()", "self.steps += begin > 0"],
                    ["self.total += random.random()"],
                    ["x = next(self.batches)", "numbers = [1]"],
                ]
            )
        numbers.extend(name for name in ("first", "k") if any(line.startswith(name) for line in lines))
    lines += [line for _ in range(draw.randint(2, 6)) for line in ops()]
    if draw.random() < 0.4:
        lines += [*host(), *ops(), *ops()]
    lines += [line for _ in range(draw.randint(1, 5)) for line in host()]
    if draw.random() < 0.7:
        given = draw.choice([tensor(), number(), f"{tensor()}, {number()}", "more, scale", "self.total", "locals"])
        lines.append(f"return {given}" if given != "locals" else f"return {{'a': {number()}, 'b': {tensor()}}}")
    return CLASS.format(body="\n".join(indented(indented(lines))))


@pytest.mark.sampled(8)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("part", range(24))
def test_random_steps(part: int, tmp_path: Path) -> None:
    halved = 0
    many = 40 if EVERYTHING else 16
    for seed in range(part * many, part * many + many):
        path = tmp_path / f"drawn_{seed}_{torch.distributed.get_rank()}.py"
        path.write_text(drawn(seed))

        def script(capture: Capture) -> Calls:
            scope: dict[str, Any] = {"__name__": f"drawn_{seed}"}  # noqa: B023
            exec(compile(path.read_text(), str(path), "exec"), scope)  # noqa: B023
            random.seed(2)
            trainer = scope["Drawn"]()
            step = capture(trainer.step)
            for call in range(30):
                if call % 10 == 9:
                    trainer.steps, trainer.total = 0, 0.0
                x = torch.randn(4 if call % 13 == 12 else 3)
                x = x[:3] if x.shape[0] == 4 and "self.helps" in path.read_text() else x  # noqa: B023
                try:
                    result = step(x, call % 6, *((2,) if call % 8 == 7 else ()))
                except (RuntimeError, NameError, TypeError) as error:
                    result = type(error).__name__
                told = trainer.total, trainer.steps, [*trainer.seen], trainer.best, scope["COUNT"], trainer.held
                yield result, told, trainer.weight, random.random()
            return trainer.held

        found = check_right(script)
        halved += any(step.stats.tail and step.stats.replays for step in found.steps) if not ORACLE_ONLY else 1
    assert halved >= many // 6, halved
