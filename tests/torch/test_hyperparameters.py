"""Every number in the groups of every optimizer changes between calls, in every way that a script may change it."""

from typing import Any

import numpy as np
import pytest
import torch
from oracle import ORACLE_ONLY, Capture, Script, check_right
from torch import nn
from torch.nn import functional as F

CALLS = 26
# PyTorch's optimizers that do not read gradients or parameters on the host, and take dense gradients.
KINDS = ["ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"]
FORMS: dict[str, dict[str, Any]] = {"default": {}, "foreach": {"foreach": True}}
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9, "weight_decay": 0.01}}


def made(kind: str, form: str, parameters: Any) -> torch.optim.Optimizer:
    found: torch.optim.Optimizer = getattr(torch.optim, kind)(
        parameters, lr=0.01, **FORMS[form], **OPTIONS.get(kind, {})
    )
    return found


def keys_of(kind: str) -> list[str]:
    group = made(kind, "default", nn.Linear(1, 1).parameters()).param_groups[0]
    numbers = [key for key, value in group.items() if type(value) is float]
    return numbers + [key for key, value in group.items() if type(value) is tuple]


CASES = [(kind, key) for kind in KINDS for key in keys_of(kind)]


def scaled(value: Any, by: float) -> Any:
    return tuple(item * by for item in value) if isinstance(value, tuple) else value * by


def drifting(start: Any, i: int) -> Any:
    return scaled(start, 1 - 0.002 * i)


def now_and_then(start: Any, i: int) -> Any:
    return scaled(start, 0.99) if i in (9, 10, 17) else start


def to_zero(start: Any, i: int) -> Any:
    zero = tuple(0.0 for _ in start) if isinstance(start, tuple) else 0.0
    return zero if i in (7, 8, 9, 10, 18, 19, 20) else start


def other_class(start: Any, i: int) -> Any:
    if i < 9:
        return start
    if isinstance(start, tuple):
        return list(start) if i < 17 else tuple(map(np.float64, start))
    return np.float64(start) if i < 17 else float(np.float32(start))


def both(start: Any, i: int) -> Any:
    """Drifts, and then stands still at another value."""
    return scaled(start, 1 - 0.003 * min(i, 14))


CHANGES = [drifting, now_and_then, to_zero, other_class, both]


def training(kind: str, form: str, key: str, change: Any) -> Script:
    def script(capture: Capture) -> Any:
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2))
        optimizer = made(kind, form, model.parameters())
        group = optimizer.param_groups[0]
        start = group[key]

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x[:, :2])
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state={"model": model, "optimizer": optimizer})
        for i in range(CALLS):
            group[key] = change(start, i)
            try:
                result: Any = captured(torch.randn(3, 5))
            except (ZeroDivisionError, ValueError, RuntimeError, TypeError) as error:
                result = type(error).__name__
            yield result
        return model, optimizer

    return script


@pytest.mark.sampled(5)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("kind", "key"), CASES)
def test_a_number_changes(kind: str, key: str, form: str, change: Any) -> None:
    check_right(training(kind, form, key, change))


# These numbers decide what an optimizer does, or are turned into tensors: each value has a plan of its own.
DECIDING = {("SGD", "dampening"), ("Rprop", "etas"), ("Rprop", "step_sizes")}


@pytest.mark.parametrize(("kind", "key"), [case for case in CASES if case not in DECIDING])
def test_a_number_that_drifts_is_followed(kind: str, key: str) -> None:
    found = check_right(training(kind, "default", key, drifting))
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays >= 15, (found.steps[0].stats, found.steps[0].explain()[-1500:])


@pytest.mark.parametrize("kind", ["AdamW", "NAdam", "RAdam", "Adamax"])
def test_a_tuple_of_another_size(kind: str) -> None:
    """Eager raises, and so does the captured step."""

    def change(start: Any, i: int) -> Any:
        return (*start, 0.5) if i in (8, 15) else scaled(start, 1 - 0.001 * i)

    check_right(training(kind, "default", "betas", change), replays=8)


class Trainer:
    """With methods beside the step that get at hyperparameters as any code may."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.2), nn.Linear(7, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.seen: list[Any] = []
        self.logs = False

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean()
        loss.backward()
        self.optimizer.step()
        if self.logs:
            self.log()
        return loss.detach()

    def log(self) -> None:
        self.seen.append([round(group["lr"], 3) for group in self.optimizer.param_groups])

    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        self.model.eval()
        result = self.model(x).mean()
        self.model.train()
        return result

    def save(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def rates(self) -> str:
        return ", ".join(f"{group['lr']:.3f}" for group in self.optimizer.param_groups)

    def copied(self) -> dict[str, Any]:
        return dict(vars(self.optimizer))


@pytest.mark.parametrize("logging", [False, True])
def test_methods_that_the_step_does_not_call(logging: bool) -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        captured = capture(trainer.step, state=trainer)
        for i in range(40):
            trainer.optimizer.param_groups[0]["lr"] = 0.01 * 0.95**i
            trainer.logs = logging and i % 9 == 8
            yield captured(torch.randn(3, 5))
            yield trainer.rates(), list(trainer.seen), trainer.save()
            if i % 5 == 0:
                yield trainer.evaluate(torch.randn(3, 5))
        return trainer.model, trainer.optimizer

    check_right(script, replays=3 if logging else 24)  # what logs is not followed


def test_a_step_that_evaluates_a_teacher() -> None:
    def script(capture: Capture) -> Any:
        model, teacher = nn.Linear(5, 2), nn.Sequential(nn.Linear(5, 2), nn.Dropout())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, phase: str) -> torch.Tensor:
            teacher.eval()
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), teacher(x).detach())
            if phase != "eval":
                loss.backward()
                optimizer.step()
            return loss.detach()

        captured = capture(step, state={"model": model, "teacher": teacher, "optimizer": optimizer})
        for i in range(40):
            optimizer.param_groups[0]["lr"] = 0.1 * 0.95**i
            yield captured(torch.randn(3, 5), "eval" if i % 4 == 3 else "train")
        return model, optimizer

    check_right(script, replays=25)


def test_code_that_takes_a_tuple_apart_is_not_followed() -> None:
    """An optimizer of the user's own, which uses the tuple for more than arithmetic."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1, "betas": (0.9, 0.5)})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                first, second = group["betas"]
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.add_(parameter.grad, alpha=-group["lr"] * round(first * 10) * int(second * 8))

    def script(capture: Capture) -> Any:
        model = nn.Linear(4, 4)
        optimizer = Own(model.parameters())

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state={"model": model, "optimizer": optimizer})
        for i in range(30):
            optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * i, 0.5 + 0.02 * (i // 4))
            yield captured(torch.randn(2, 4))
        return model, optimizer

    check_right(script)
