"""What a step changes and puts back before it ends: looking before and after a call does not tell it.

(Arrays in the memory of tensors: `test_foreign_memory.py`.)
"""

import contextlib
import copy
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over
from test_surroundings import SETTINGS, setting
from torch import Tensor, nn

CALLS = 8

INSIDE: dict[str, Callable[[], Any]] = {
    **SETTINGS,
    "default_dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True
    ),
    "matmul_precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
}
# Those by which composites and Python choose: what they chose is recorded.
CHOICES = ("mha_fastpath", "math_sdp", "sparse_invariants", "multithreaded_autograd", "default_device")


def forward(x: Tensor) -> Tensor:
    return torch.nn.functional.conv1d(x, torch.ones(2, 3, 3, dtype=x.dtype)) @ x.new_ones(6, 2) / torch.arange(1, 3)


def backward(x: Tensor) -> Tensor:
    weight = torch.ones(2, 3, 3, dtype=x.dtype).requires_grad_()
    torch.nn.functional.conv1d(x, weight).square().sum().backward()
    return weight.grad.detach()  # type: ignore[union-attr]


def made(x: Tensor) -> Tensor:
    return torch.cat([torch.zeros(2).flatten(), torch.full((2,), 0.1)])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("does", [forward, backward, made])
@pytest.mark.parametrize("name", [each for each in INSIDE if each != "default_device"])
@pytest.mark.filterwarnings("ignore:rote")
def test_settings(name: str, does: Callable[[Tensor], Tensor]) -> None:
    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            before = does(x)
            with INSIDE[name]():
                return before, does(x)

        return over(capture, step, (torch.ones(2, 3, 8) + call for call in range(CALLS)), tail=False)

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert bool(stats.replays) == (name in CHOICES), stats
        assert stats.replays or any("settings" in reason for reason in stats.refusals), stats


@pytest.mark.filterwarnings("ignore:rote")
def test_setting_that_is_changed_after_the_last_op() -> None:
    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> Tensor:
            y = x * 2
            torch.set_num_threads(3)
            return y

        captured, before = capture(step), torch.get_num_threads()
        for call in range(CALLS):
            torch.set_num_threads(2)
            yield captured(torch.ones(2) + call), torch.get_num_threads()
        torch.set_num_threads(before)
        return {}

    check_right(script)


def of_python() -> tuple[Callable[[], float], Callable[[], object]]:
    random.seed(3)

    def draw() -> float:
        state = random.getstate()
        found = random.random()
        random.setstate(state)
        return found

    return draw, random.random


def of_numpy() -> tuple[Callable[[], float], Callable[[], object]]:
    np.random.seed(3)

    def draw() -> float:
        state = np.random.get_state()
        found = np.random.rand()
        np.random.set_state(state)
        return found

    return draw, np.random.rand


def of_an_object() -> tuple[Callable[[], float], Callable[[], object]]:
    held = random.Random(3)

    def draw() -> float:
        state = held.getstate()
        found = held.random()
        held.setstate(state)
        return found

    return draw, held.random


def of_a_random_state() -> tuple[Callable[[], float], Callable[[], object]]:
    held = np.random.RandomState(3)

    def draw() -> float:
        state = held.get_state()
        found = held.rand()
        held.set_state(state)
        return found

    return draw, held.rand


def of_a_generator() -> tuple[Callable[[], float], Callable[[], object]]:
    held = np.random.default_rng(3)

    def draw() -> float:
        state = held.bit_generator.state
        found = held.random()
        held.bit_generator.state = state
        return found

    return draw, held.random


def of_a_copy() -> tuple[Callable[[], float], Callable[[], object]]:
    held = np.random.default_rng(3)
    return lambda: copy.deepcopy(held).random(), held.random


def of_a_pickled_copy() -> tuple[Callable[[], float], Callable[[], object]]:
    held = random.Random(3)
    return lambda: pickle.loads(pickle.dumps(held)).random(), held.random


@pytest.mark.parametrize(
    "build", [of_python, of_numpy, of_an_object, of_a_random_state, of_a_generator, of_a_copy, of_a_pickled_copy]
)
@pytest.mark.filterwarnings("ignore:rote")
def test_generators_of_the_host(build: Callable[[], tuple[Callable[[], float], Callable[[], object]]]) -> None:
    def script(capture: Capture) -> Calls:
        draw, moves = build()
        captured = capture(lambda x: x * draw())
        for call in range(2 * CALLS):
            if call >= CALLS:
                moves()
            yield captured(torch.ones(2))
        return {}

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_parameters_that_are_swapped() -> None:
    """The graphs of a recording hold no node that eager lets go of."""

    def script(capture: Capture) -> Calls:
        one, other, weight = torch.ones(4), nn.Parameter(torch.full((4,), 2.0)), nn.Parameter(torch.full((4,), 3.0))

        def step(x: Tensor) -> Tensor:
            (weight * other * x).sum().backward()
            torch.utils.swap_tensors(one, other)
            torch.utils.swap_tensors(one, other)
            (weight * other * x).sum().backward()
            return x * 2

        captured = capture(step, state=[one, other, weight])
        for call in range(CALLS):
            with contextlib.suppress(RuntimeError):
                yield captured(torch.ones(4) + call), other.grad, weight.grad
        return {}

    check_right(script)
