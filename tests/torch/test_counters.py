"""Whole numbers that a step counts up."""

import operator
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Capture, Script, check_equal, check_right
from torch import nn
from torch.nn import functional as F

CALLS = 30
count = 0
held: Any = None


class Inner:
    def __init__(self) -> None:
        self.steps = 0


class Trainer:
    """A trainer with a step, and methods beside it that read what the step counts."""

    limit = 1000

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.steps = 0
        self.seen = 7
        self.inner = Inner()

    def update(self, x: torch.Tensor) -> torch.Tensor:
        self.opt.zero_grad()
        loss = F.mse_loss(self.model(x), x[:, :2])
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self) -> None:
        while self.steps < self.limit:
            print(self.steps, vars(self))

    @property
    def progress(self) -> float:
        return self.steps / self.limit


def counts(self: Trainer, x: torch.Tensor) -> Any:
    loss = self.update(x)
    self.steps += 1
    return loss


def counts_down(self: Trainer, x: torch.Tensor) -> Any:
    self.steps -= 2
    return self.update(x)


def assigns(self: Trainer, x: torch.Tensor) -> Any:
    self.steps = self.steps + 1
    return self.update(x)


def counts_samples(self: Trainer, x: torch.Tensor) -> Any:
    self.seen += x.shape[0]
    self.steps += 1
    return self.update(x)


def counts_in_a_loop(self: Trainer, x: torch.Tensor) -> Any:
    for each in self.model:
        self.seen += sum(parameter.numel() for parameter in each.parameters())
        self.inner.steps += 1
    return self.update(x)


def counts_globally(self: Trainer, x: torch.Tensor) -> Any:
    global count
    count += 1
    return self.update(x)


def counts_batches(self: Trainer, x: torch.Tensor) -> Any:
    if x.shape[0] == 5:
        self.seen += 1
    self.steps += 1
    return self.update(x)


def logs(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return {"steps": self.update(x)}


COUNTING = [counts, counts_down, assigns, counts_samples, counts_in_a_loop, counts_globally, counts_batches, logs]


def decides(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    loss = self.update(x)
    return loss * 2 if self.steps % 5 == 0 else loss


def returns(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), self.steps


def scales(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x * self.steps)


def by_property(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), self.progress


def by_text(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), getattr(self, "steps")  # noqa: B009


def by_computed_text(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), getattr(self, "ste" + x.new_zeros(1).new_tensor([]).dtype.__class__.__name__[:0] + "ps")


def set_by_text(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    if x.shape[0] == 3:
        setattr(self, "steps", 4)  # noqa: B010
    return self.update(x)


get_steps = operator.attrgetter("steps")


def by_getter(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), get_steps(self)


def by_vars(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), max(vars(self).get("steps", 0), 0)


def by_format(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), "{0.steps}".format(self)  # noqa: UP030, UP032


def by_chain(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    self.seen += self.steps
    return self.update(x)


def resets(self: Trainer, x: torch.Tensor) -> Any:
    self.steps = 0
    self.steps += 1
    return self.update(x)


def multiplies(self: Trainer, x: torch.Tensor) -> Any:
    self.steps *= 2
    self.steps += 1
    return self.update(x)


def becomes_a_float(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 0.5
    return self.update(x)


def of_data(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += int(x[0, 0] > 0)
    return self.update(x)


def of_a_rate(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += round(self.opt.param_groups[0]["lr"] * 1000)
    return self.update(x)


def in_a_message(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    return self.update(x), f"{self.steps}"


def through_another(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    other = held
    return self.update(x) * (1 + other.steps)


def matched(self: Trainer, x: torch.Tensor) -> Any:
    self.steps += 1
    loss = self.update(x)
    match self:
        case Trainer(steps=5):
            return loss + 1
    return loss


READING = [
    decides,
    returns,
    scales,
    by_property,
    by_text,
    set_by_text,
    by_computed_text,
    by_getter,
    by_vars,
    by_format,
    by_chain,
]
READING += [
    resets,
    multiplies,
    becomes_a_float,
    of_data,
    of_a_rate,
    in_a_message,
    through_another,
    matched,
]


class Counting(torch.optim.AdamW):
    count = 0

    def step(self, closure: Any = None) -> Any:
        self.count += 1
        return super().step(closure)


def test_a_counter_under_two_paths() -> None:
    """The step reaches an optimizer of the state by itself, and by its bound method."""

    def script(capture: Capture) -> Any:
        model = nn.Linear(4, 2)
        optimizer = Counting(model.parameters(), lr=1e-2)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state={"model": model, "optimizer": optimizer})
        for _ in range(14):
            yield captured(torch.randn(3, 4)), optimizer.count
        return model, optimizer

    check_equal(script, replays=6)


Between = Callable[[Trainer, int], None]


def nothing(trainer: Trainer, i: int) -> None:
    pass


def sets(trainer: Trainer, i: int) -> None:
    if i % 11 == 7:
        trainer.steps, trainer.seen = 100 * i, -i


def sets_other_classes(trainer: Trainer, i: int) -> None:
    values = {6: 1.5, 9: 3, 12: True, 15: None, 16: 4, 19: np.int64(3), 22: 5}
    if i in values:
        trainer.steps = values[i]  # type: ignore[assignment]


def deletes(trainer: Trainer, i: int) -> None:
    if i == 12:
        del trainer.steps
    if i == 14:
        trainer.steps = 2


def changes_the_rate(trainer: Trainer, i: int) -> None:
    trainer.opt.param_groups[0]["lr"] = 0.01 / (1 + i)


BETWEEN = [nothing, sets, sets_other_classes, deletes, changes_the_rate]


def numbers(trainer: Trainer) -> Any:
    return repr(getattr(trainer, "steps", "none")), trainer.seen, trainer.inner.steps, count


def training(body: Any, between: Between = nothing, **options: Any) -> Script:
    def script(capture: Capture) -> Any:
        global count, held
        count = 0
        trainer = held = Trainer()
        bound = types.MethodType(body, trainer)
        step = capture(bound, state={"model": trainer.model, "opt": trainer.opt}, **options)
        for i in range(CALLS):
            between(trainer, i)
            x = torch.randn(5 if i % 4 == 3 and body is counts_batches else 3, 4)
            try:
                result: Any = step(x)
            except (TypeError, AttributeError) as error:
                result = type(error).__name__
            yield result, numbers(trainer)
        return trainer.model, trainer.opt, numbers(trainer)

    return script


@pytest.mark.parametrize("body", COUNTING)
def test_counters_are_counted(body: Any) -> None:
    check_equal(training(body), replays=20)


@pytest.mark.sampled(16)
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("body", COUNTING + READING)
def test_counters_are_right(body: Any, between: Between) -> None:
    check_right(training(body, between))


def test_counters_set_between_calls_are_counted_on() -> None:
    check_equal(training(counts_samples, sets), replays=20)


def test_a_step_that_evaluates_a_teacher_counts() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.calls = 0
            self.model, self.teacher = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Dropout())

        def step(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.teacher.eval()
            return (self.model(x) - self.teacher(x)).square().mean().detach()

    def script(capture: Capture) -> Any:
        trainer = Trainer()
        captured = capture(trainer.step, state=trainer)
        for _ in range(20):
            yield captured(torch.randn(3, 4))
            yield trainer.calls

    check_right(script, replays=12)


def test_a_cell_and_a_module() -> None:
    def script(capture: Capture) -> Any:
        class Counting(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(4, 4)
                self.calls = 0

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.calls += 1
                return torch.tanh(self.linear(x))

        net = Counting()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        done = 0

        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal done
            opt.zero_grad()
            loss = net(net(x)).square().sum()
            loss.backward()
            opt.step()
            done += 1
            return loss.detach()

        captured = capture(step, state={"net": net, "opt": opt})
        for _ in range(CALLS):
            yield captured(torch.randn(2, 4)), net.calls, done
        return net, opt

    check_equal(script, replays=20)


def test_the_function_of_a_scheduler_reads_a_counter() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.opt, lambda epoch: 1 / (1 + trainer.steps))

        def step(x: torch.Tensor) -> Any:
            loss = trainer.update(x)
            scheduler.step()
            trainer.steps += 1
            return loss

        captured = capture(step, state={"model": trainer.model, "opt": trainer.opt})
        for _ in range(CALLS):
            yield captured(torch.randn(3, 4)), numbers(trainer), scheduler.get_last_lr()
        return trainer.model, trainer.opt

    check_right(script)


def test_setting_the_number_does_more() -> None:
    def script(capture: Capture) -> Any:
        class Noting(Trainer):
            def __setattr__(self, name: str, value: Any) -> None:
                object.__setattr__(self, name, value)
                if name == "steps":
                    object.__setattr__(self, "noted", [*getattr(self, "noted", []), value])

        trainer = Noting()
        step = capture(types.MethodType(counts, trainer), state={"model": trainer.model, "opt": trainer.opt})
        for _ in range(CALLS):
            yield step(torch.randn(3, 4)), numbers(trainer), list(vars(trainer)["noted"])
        return trainer.model, trainer.opt

    check_right(script)


def test_verified_calls_count_once() -> None:
    check_equal(training(counts_samples, verify=5), replays=20)


def test_stored_plans(tmp_path: Any) -> None:
    store = str(tmp_path / "plans")
    check_equal(training(counts_samples, plans=store), replays=20)
    check_equal(training(counts_samples, plans=store), replays=20)
    check_right(training(counts_samples, plans=store, trust_plans=True), replays=20)
