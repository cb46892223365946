"""Tensors of the state that the caller swaps for others, moves or loads: no replay holds on to the old ones."""

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import inputs
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn


@contextmanager
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def swap(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach().clone() + 1))


def move(model: nn.Module) -> None:
    with swapping():
        model.double()
        model.float()


def load(model: nn.Module) -> None:
    state = {name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}
    with swapping():
        model.load_state_dict(state)


def assign(model: nn.Module) -> None:
    model.load_state_dict({name: tensor.clone() + 1 for name, tensor in model.state_dict().items()}, assign=True)


def set_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() + 1


CHANGES: list[Callable[[nn.Module], None]] = [swap, move, load, assign, set_data]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("passes", ["none", "default"])
def test_state_that_is_swapped(change: Callable[[nn.Module], None], passes: str) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=0.1)  # type: ignore[arg-type]
            return loss.detach()

        captured = capture(step, state=model, passes=passes)
        for i, x in enumerate(inputs(18, 2, 4)):
            if i in (6, 12):
                change(model)
            yield [captured(x), *(parameter.detach().clone() for parameter in model.parameters())]
        return {"model": model}

    run = check_right(script)
    if not ORACLE_ONLY:
        before, after = run.stats[5][0].replays, run.stats[-1][0]
        assert before >= 3 and after.replays > before, after


def test_a_copy_of_the_model_shares_nothing() -> None:
    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 4)
        step = capture(lambda x: model(x).detach(), state=model)
        for x in inputs(6, 2, 4):
            with torch.no_grad():
                yield [step(x), copy.deepcopy(model).weight.detach()]
        return {"model": model}

    check_right(script)


def train_a_part(capture: Capture, part: int, then: int, **options: Any) -> Calls:
    """Trains one layer of two; half-way, what the optimizer's group lists is another one."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model[part].parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = capture(step, state={"model": model, "optimizer": optimizer}, **options)
    for i, x in enumerate(inputs(12, 3, 4)):
        if i == 6 and then != part:
            optimizer.param_groups[0]["params"] = list(model[then].parameters())
        yield captured(x)
    return {"model": model}


def test_parameters_of_a_group_replaced() -> None:
    """The list itself, by one of other parameters."""
    check_right(functools.partial(train_a_part, part=0, then=1), replays=6)


def test_trusted_plans_know_which_parameters_a_group_has(tmp_path: Path) -> None:
    for part in (0, 1):
        check_right(functools.partial(train_a_part, part=part, then=part, plans=tmp_path, trust_plans=True))
