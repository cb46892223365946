"""Steps that return their learning rate, as many do to log it."""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
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
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(decorator(made(train, optimizer)), state=[model, optimizer], **options)
        for _ in range(40):
            for group in optimizer.param_groups:
                group["lr"] = kind(group["lr"] * 0.97)
            yield captured(torch.randn(3, 5))
        return model, optimizer

    return script


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
