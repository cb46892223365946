"""Steps that return their learning rate, as many do to log it."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import update
from oracle import Capture, check_right
from torch import Tensor, nn

Train = Callable[[Tensor], Tensor]
Step = Callable[[Tensor], Any]
Optimizer = torch.optim.Optimizer


def in_a_tuple(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        return loss, optimizer.param_groups[0]["lr"]

    return step


def in_a_dict(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        rate = optimizer.param_groups[0]["lr"]
        return {
            "loss": loss.item(),
            "rates": [rate, (-rate, rate * 2 + optimizer.param_groups[0]["eps"])],
            "none": None,
        }

    return step


def before_the_step(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        rate = optimizer.param_groups[1]["lr"]
        return train(x), rate

    return step


def of_all_groups(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        train(x)
        return [group["lr"] for group in optimizer.param_groups]

    return step


def by_a_condition(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        if optimizer.param_groups[0]["lr"] > 0.005:
            return optimizer.param_groups[0]["lr"], loss
        return loss, optimizer.param_groups[0]["lr"]

    return step


def rounded(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        return train(x), round(optimizer.param_groups[0]["lr"], 3)

    return step


def in_c(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        return train(x), math.sqrt(optimizer.param_groups[0]["lr"])

    return step


def from_a_function_inside(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        def rate() -> Any:
            return optimizer.param_groups[0]["lr"]

        return train(x), math.sqrt(rate())

    return step


def from_a_generator(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        return train(x), tuple(group["lr"] for group in optimizer.param_groups)

    return step


def in_a_named_dict(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        found = {"rate": optimizer.param_groups[0]["lr"]}
        return train(x), found

    return step


def in_a_dict_that_is_read(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        found = {"rate": optimizer.param_groups[0]["lr"]}
        return train(x), math.sqrt(found["rate"])

    return step


def in_a_dict_that_is_filled(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        logs: dict[str, Any] = {"rate": optimizer.param_groups[0]["lr"]}
        logs["loss"] = train(x).item()
        for i, group in enumerate(optimizer.param_groups):
            logs[f"rate {i}"] = group["lr"] * 100
        return logs

    return step


def as_a_key(train: Train, optimizer: Optimizer) -> Step:
    def step(x: Tensor) -> Any:
        return {optimizer.param_groups[0]["lr"]: train(x)}

    return step


def by_another_function(train: Train, optimizer: Optimizer) -> Step:
    def inner(x: Tensor) -> Any:
        return train(x), optimizer.param_groups[0]["lr"]

    def step(x: Tensor) -> Any:
        loss, rate = inner(x)
        return loss, math.sqrt(rate)

    return step


# How often a plan replays, at least; those that are not followed have a plan for each rate.
STEPS: dict[Callable[..., Any], int] = {
    in_a_tuple: 30,
    in_a_dict: 30,
    before_the_step: 30,
    of_all_groups: 30,
    by_a_condition: 25,
    rounded: 0,
    in_c: 0,
    from_a_function_inside: 0,
    from_a_generator: 0,
    in_a_named_dict: 30,
    in_a_dict_that_is_filled: 30,
    in_a_dict_that_is_read: 0,
    as_a_key: 0,
    by_another_function: 0,
}


def keeps(function: Any) -> Any:
    return function


def enables(function: Any) -> Any:
    return torch.enable_grad()(torch.enable_grad()(functools.partial(function)))


def takes_roots(function: Any) -> Any:
    @functools.wraps(function)
    def run(x: Tensor) -> Any:
        loss, rate = function(x)
        return loss, math.sqrt(rate)

    return run


def training(made: Callable[..., Any], decorator: Any, kind: Any = float, **options: Any) -> Any:
    def script(capture: Capture) -> Any:
        model = nn.Linear(5, 2)
        groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}]
        optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.1)

        def train(x: Tensor) -> Tensor:
            return update(model, optimizer, x)[0]

        captured = capture(decorator(made(train, optimizer)), state=[model, optimizer], **options)
        for _ in range(40):
            for group in optimizer.param_groups:
                group["lr"] = kind(group["lr"] * 0.97)
            yield captured(torch.randn(3, 5))
        return model, optimizer

    return script


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [float, np.float64])
@pytest.mark.parametrize("decorator", [keeps, enables])
@pytest.mark.parametrize("made", STEPS)
def test_returned(made: Callable[..., Any], decorator: Any, kind: Any) -> None:
    check_right(training(made, decorator, kind), replays=STEPS[made] if kind is float else 0)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_decorator_sees_the_rate() -> None:
    check_right(training(in_a_tuple, takes_roots))


@pytest.mark.parametrize("options", [{"verify": 8}, {"verify_every": 3}, {"passes": "none"}, {"passes": "all"}])
@pytest.mark.parametrize("made", [in_a_tuple, in_a_dict])
def test_settings(made: Callable[..., Any], options: dict[str, Any]) -> None:
    check_right(training(made, keeps, **options), replays=20)


def test_stored_plans(tmp_path: Any) -> None:
    for trust in (False, False, True, True):
        check_right(training(in_a_dict, keeps, plans=tmp_path, trust_plans=trust), replays=30)


Made = Callable[[Train, Optimizer, Any], Step]


def last_rate(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        return {"loss": loss.item(), "lr": scheduler.get_last_lr()[0]}

    return step


def last_rates(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        logs: dict[str, Any] = {"all": scheduler.get_last_lr()}
        logs["loss"] = loss
        logs["last"] = scheduler.get_last_lr()[-1]
        return logs

    return step


def of_a_group(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        decay = optimizer.param_groups[1]["weight_decay"]
        return loss, (optimizer.param_groups[0]["lr"], optimizer.param_groups[-1]["initial_lr"]), decay

    return step


def other_entries(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        return loss, optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["betas"]

    return step


def without_a_call(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        rate = scheduler.get_last_lr()[0]
        return train(x), rate

    return step


def before_the_call(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        rate = scheduler.get_last_lr()[0]
        loss = train(x)
        scheduler.step()
        return loss, rate

    return step


def between_two_calls(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        rate = optimizer.param_groups[0]["lr"]
        scheduler.step()
        return loss, rate

    return step


def called_at_the_end(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        with contextlib.ExitStack() as stack:
            stack.callback(scheduler.step)
            return train(x), scheduler.get_last_lr()[0]

    return step


def used_too(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        rate = scheduler.get_last_lr()[0]
        return loss, math.sqrt(rate), rate

    return step


def entry_by_name(train: Train, optimizer: Optimizer, scheduler: Any) -> Step:
    key = "".join(["l", "r"])

    def step(x: Tensor) -> Any:
        loss = train(x)
        scheduler.step()
        return loss, optimizer.param_groups[0][key]

    return step


LAST: dict[Made, int] = {last_rate: 28, last_rates: 28, of_a_group: 28, without_a_call: 28}
LAST |= dict.fromkeys(
    [other_entries, before_the_call, between_two_calls, called_at_the_end, used_too, entry_by_name], 0
)
schedulers = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "cosine": lambda optimizer: schedulers.CosineAnnealingLR(optimizer, 90),
    "one cycle": lambda optimizer: schedulers.OneCycleLR(optimizer, [0.1, 0.2], total_steps=100),
    "lambda": lambda optimizer: schedulers.LambdaLR(optimizer, lambda epoch: 0.97**epoch),
    "sequence": lambda optimizer: schedulers.SequentialLR(
        optimizer,
        [schedulers.LinearLR(optimizer, total_iters=5), schedulers.ExponentialLR(optimizer, 0.95)],
        milestones=[5],
    ),
}


def adamw(groups: Any) -> Optimizer:
    return torch.optim.AdamW(groups, lr=0.01)


def sgd(groups: Any) -> Optimizer:
    return torch.optim.SGD(groups, lr=0.01)  # whose other numbers are whole ones


def scheduled(made: Made, name: str, optimizer_of: Callable[[Any], Optimizer] = adamw, **options: Any) -> Any:
    def script(capture: Capture) -> Any:
        model = nn.Linear(5, 2)
        optimizer = optimizer_of([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.02}])
        scheduler = SCHEDULERS[name](optimizer)

        def train(x: Tensor) -> Tensor:
            return update(model, optimizer, x)[0]

        captured = capture(made(train, optimizer, scheduler), state=[model, optimizer], **options)
        for i in range(40):
            if i in (20, 27):
                optimizer.param_groups[0]["lr"] = 0.003
            if made is without_a_call and i % 2:
                scheduler.step()
            yield captured(torch.randn(3, 5)), scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]
        return model, optimizer

    return script


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("made", LAST)
def test_rates_of_schedulers(made: Made, name: str) -> None:
    check_right(scheduled(made, name), replays=LAST[made])


@pytest.mark.parametrize("options", [{"verify": 8}, {"verify_every": 3}, {"passes": "none"}, {"passes": "all"}])
@pytest.mark.parametrize("made", [last_rates, of_a_group])
def test_rates_of_schedulers_in_settings(made: Made, options: dict[str, Any]) -> None:
    check_right(scheduled(made, "cosine", **options), replays=20)


def test_the_warning_says_why_a_scheduler_is_not_followed() -> None:
    with pytest.warns(UserWarning, match=r"\.step\(\) cannot wait for the end of a replay: the step reads get_last_lr"):
        check_right(scheduled(used_too, "cosine", tail=False))


def test_the_list_of_rates_is_the_schedulers() -> None:
    def script(capture: Capture) -> Any:
        model = nn.Linear(5, 2)
        optimizer = adamw(model.parameters())
        scheduler = SCHEDULERS["cosine"](optimizer)

        def step(x: Tensor) -> Any:
            loss = model(x).mean().detach()
            scheduler.step()
            return loss, scheduler.get_last_lr()

        captured = capture(step, state=[model, optimizer])
        for i in range(20):
            loss, rates = captured(torch.randn(3, 5))
            yield loss, rates, rates is scheduler.get_last_lr()
            if i % 4 == 3:
                rates[0] = 5.0
            yield scheduler.get_last_lr()

    check_right(script, replays=12)


@pytest.mark.parametrize("made", [last_rates, of_a_group])
def test_rates_of_sgd(made: Made) -> None:
    check_right(scheduled(made, "cosine", sgd), replays=28)
    check_right(scheduled(made, "cosine", sgd, verify_every=3), replays=20)


@pytest.mark.parametrize("made", [last_rates, of_a_group])
def test_rates_of_schedulers_and_stored_plans(made: Made, tmp_path: Any) -> None:
    for trust in (False, False, True, True):
        check_right(scheduled(made, "cosine", plans=tmp_path, trust_plans=trust), replays=28)
