"""Each op of a replay runs with gradients enabled or disabled as it was recorded: some kernels compute otherwise."""

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import inputs
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, rote_capture
from torch import Tensor, nn

CALLS = 8
library = torch.library.Library("rote_test_grad_modes", "FRAGMENT")


def asks(x: Tensor) -> Tensor:
    return x * 2 if torch.is_grad_enabled() else x * 3


def asks_in_place(x: Tensor) -> None:
    x.mul_(2 if torch.is_grad_enabled() else 3)


library.define("asks(Tensor x) -> Tensor")
library.impl("asks", asks, "CPU")
library.define("asks_in_place(Tensor(a!) x) -> ()")
library.impl("asks_in_place", asks_in_place, "CPU")


class Twice(torch.autograd.Function):
    """An op that is called with gradients disabled, both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _op()(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _op()(gradients[0])


class TwiceEnabled(Twice):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            return _op()(x.detach())


def _op() -> Callable[[Tensor], Tensor]:
    op: Callable[[Tensor], Tensor] = torch.ops.rote_test_grad_modes.asks
    return op


def under(mode: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with mode():
            return _op()(x) + 1

    return run


def in_place(x: Tensor) -> Tensor:
    y = x * 1
    torch.ops.rote_test_grad_modes.asks_in_place(y)
    with torch.no_grad():
        torch.ops.rote_test_grad_modes.asks_in_place(y)
    return y


def by_function(function: Any) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        leaf = (x * 1).requires_grad_()
        return torch.autograd.grad(function.apply(leaf).sum(), leaf)[0] + function.apply(leaf).detach()

    return run


def by_hook(x: Tensor) -> Tensor:
    leaf = (x * 1).requires_grad_()
    (found := leaf * 2).register_hook(lambda gradient: _op()(gradient))
    return torch.autograd.grad(found.sum(), leaf)[0]


def both(x: Tensor) -> Tensor:
    with torch.no_grad():
        first = _op()(x)
    return first + 10 * _op()(x)


STEPS: dict[str, Callable[[Tensor], Tensor]] = {
    "enabled": under(contextlib.nullcontext),
    "no_grad": under(torch.no_grad),
    "inference_mode": under(torch.inference_mode),
    "in place": in_place,
    "a function": by_function(Twice),
    "a function that enables": by_function(TwiceEnabled),
    "a hook": by_hook,
    "both": both,
}


@pytest.mark.parametrize("passes", ["none", "default", "all"])
@pytest.mark.parametrize("outside", [contextlib.nullcontext, torch.no_grad])
@pytest.mark.parametrize("name", STEPS)
def test_kernel_that_asks(name: str, outside: Callable[[], Any], passes: str) -> None:
    if outside is torch.no_grad and ("function" in name or "hook" in name):
        pytest.skip("there is no gradient to take")
    step = STEPS[name]
    captured = rote_capture(step, passes=passes)
    for call in range(CALLS):
        x = torch.randn(3, generator=torch.Generator().manual_seed(call))
        with outside():
            expected, found = step(x), captured(x)
        assert torch.equal(expected, found), f"call {call}: expected {expected}, found {found}"
    assert ORACLE_ONLY or captured.stats.replays >= CALLS - 4, captured.stats


@pytest.mark.parametrize("passes", ["none", "default", "all"])
@pytest.mark.parametrize("way", ["trained", "detached", "no_grad", "both"])
def test_lstm(way: str, passes: str) -> None:
    """oneDNN's LSTM computes otherwise, to the last bit, where gradients may be wanted."""

    def script(capture: Capture) -> Calls:
        lstm = nn.LSTM(4, 8, num_layers=2)
        optimizer = torch.optim.SGD(lstm.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Any:
            seen = []
            if way in ("no_grad", "both"):
                with torch.no_grad():
                    seen.append(lstm(x)[0])
            if way != "no_grad":
                found, (hidden, cell) = lstm(x)
                seen += [found.detach(), hidden.detach(), cell.detach()]
            if way in ("trained", "both"):
                found.square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return seen

        captured = capture(step, state={"lstm": lstm, "optimizer": optimizer}, passes=passes)
        for x in inputs(28, 28, 4):
            yield captured(x.view(7, 4, 4))
        return {"lstm": lstm}

    check_equal(script)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("norm", [torch.nn.functional.batch_norm, torch.nn.functional.instance_norm])
def test_running_statistics_whose_norm_is_not_used(mode: Any, norm: Callable[..., Tensor]) -> None:
    """In inference mode, composite ops are recorded as they are: what they write, no schema says."""

    def script(capture: Capture) -> Calls:
        mean, variance = torch.zeros(6), torch.ones(6)

        def step(x: Tensor) -> Tensor:
            norm(x, mean, variance, None, None, True, 0.1)
            return x * 2

        captured = capture(step, state=[mean, variance])
        with mode():
            for x in inputs(CALLS, 4, 6, 5):
                yield captured(x).clone()
        return [mean, variance]

    check_equal(script, replays=CALLS - 4)
