"""Numbers that Adafactor reads from tensors in the middle of its step."""

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import training
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over
from torch import Tensor, nn
from torch.optim import _adafactor

FORMS = pytest.mark.parametrize("foreach", [False, True], ids=["one by one", "lists"])
CALLS = 40


class Net(nn.Module):
    """A matrix, a vector, a scalar, a cube, and a matrix that is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 4))
        self.vector = nn.Parameter(torch.randn(4))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.cube = nn.Parameter(torch.randn(2, 4, 3))
        self.zero = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        y = (x @ self.matrix + self.vector) * self.scalar
        return torch.tanh(y @ self.cube).sum(0) @ self.zero


Between = Callable[[int, nn.Module, torch.optim.Optimizer], Any]


def loop(between: Between | None = None, calls: int = CALLS, options: Any = None, **arguments: Any) -> Any:
    def script(capture: Capture) -> Calls:
        net = Net()
        optimizer = torch.optim.Adafactor(net.parameters(), **arguments)
        state = {"net": net, "optimizer": optimizer}

        def step(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (net(x) - y).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state=state, **(options or {}))
        for i in range(calls):
            scale = between(i, net, optimizer) if between is not None else None
            try:
                result: Any = captured(torch.randn(5, 6) * (1.0 if scale is None else scale), torch.randn(5, 2))
            except ZeroDivisionError as error:
                result = str(error)
            yield result, {name: each.detach().clone() for name, each in net.named_parameters()}
        return state

    return script


def data_that_is_bad_at_times(i: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> float:
    return {9: 1e20, 10: 0.0, 17: 1e-30, 25: math.inf, 30: math.nan}.get(i, 1.0)


def parameters_that_are_set(i: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        if i % 5 == 3:
            for p in net.parameters():
                p.mul_([0.0, 1e-9, 1e9, -2.0][i // 5 % 4])
        if i == 31:
            next(net.parameters())[0, 0] = math.nan


def numbers_that_vary(i: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    group = optimizer.param_groups[0]
    group["lr"] = 0.02 + 0.01 * i
    group["d"] = 0.1 + 0.2 * (i % 7)
    group["beta2_decay"] = -0.5 - 0.01 * i


def a_divisor_that_is_zero_at_times(i: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["d"] = 0.0 if i in (20, 28) else 0.5 + 0.1 * (i % 3)


def steps_that_are_set(i: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The rate is the least of two numbers: at 10,000 steps it becomes the other one."""
    if i in (12, 25):
        for state in optimizer.state.values():
            state["step"].fill_(9995.0 if i == 12 else 3.0)


def epsilons_that_vary(i: int, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["eps"] = (1e-20 * (1 + i % 3), 0.001 * i)
    optimizer.param_groups[0]["weight_decay"] = 0.01 * (1 + i)


CHANGES = [data_that_is_bad_at_times, parameters_that_are_set, numbers_that_vary, a_divisor_that_is_zero_at_times]
CHANGES += [steps_that_are_set, epsilons_that_vary]


@FORMS
@pytest.mark.parametrize("between", CHANGES)
def test_what_changes_between_calls(between: Between, foreach: bool) -> None:
    check_equal(loop(between, foreach=foreach), replays=15)


@FORMS
@pytest.mark.parametrize("options", [{"verify": 6}, {"passes": "none"}, {"passes": "all"}], ids=str)
def test_options(options: Any, foreach: bool) -> None:
    check_equal(loop(options=options, foreach=foreach), replays=20)


@FORMS
@pytest.mark.parametrize("trust", [False, True])
def test_a_stored_plan(foreach: bool, trust: bool, tmp_path: Path) -> None:
    options = {"plans": str(tmp_path)}
    check_equal(loop(numbers_that_vary, options=options, foreach=foreach), replays=20)
    check_right(loop(numbers_that_vary, options={**options, "trust_plans": trust}, foreach=foreach), replays=30)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types(dtype: torch.dtype, foreach: bool) -> None:
    def script(capture: Capture) -> Calls:
        net = Net().to(dtype)
        optimizer = torch.optim.Adafactor(net.parameters(), foreach=foreach)
        return over(
            capture,
            training(net, optimizer),
            (torch.randn(5, 6, dtype=dtype) for _ in range(30)),
            state={"net": net, "optimizer": optimizer},
        )

    check_equal(script, replays=20)


def looks_into_a_number(*args: Any, **kwargs: Any) -> None:
    """Adafactor's own function, but with C code that gets a number."""
    params, grads = args[0], args[1]
    for param, grad in zip(params, grads, strict=True):
        param.add_(grad, alpha=-0.01 / math.sqrt(1 + max(0.5, grad.norm(2).item())))


def gives_a_number_to_another_op(*args: Any, **kwargs: Any) -> None:
    params, grads = args[0], args[1]
    for param, grad in zip(params, grads, strict=True):
        param.sub_(grad, alpha=max(1.0, grad.norm(2).item()) * 0.01)


def gives_a_number_in_a_list(*args: Any, **kwargs: Any) -> None:
    params, grads = args[0], args[1]
    numbers = [max(1.0, grad.norm(2).item()) * -0.01 for grad in grads]
    torch._foreach_add_(params, torch._foreach_mul(grads, numbers))


def decides_by_a_number(*args: Any, **kwargs: Any) -> None:
    params, grads = args[0], args[1]
    for param, grad in zip(params, grads, strict=True):
        if min(0.1, grad.norm(2).item()) != 0.1:
            param.add_(grad, alpha=-0.01)


def divides_by_a_number(*args: Any, **kwargs: Any) -> None:
    params, grads = args[0], args[1]
    param, grad = params[-1], grads[-1]
    param.add_(grad, alpha=-grad.norm(2).item() / grad.norm(1).item())


OTHERS = [looks_into_a_number, gives_a_number_to_another_op, gives_a_number_in_a_list, decides_by_a_number]
OTHERS += [divides_by_a_number]


def as_in_file(code: types.CodeType, name: str) -> types.CodeType:
    consts = (as_in_file(each, name) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=tuple(consts))


@pytest.mark.parametrize("function", OTHERS)
@pytest.mark.parametrize("as_torch", [False, True])
def test_another_function_in_its_place(function: Any, as_torch: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that claims to stand in PyTorch's file, and may name all that PyTorch's own names."""
    if as_torch:
        code = as_in_file(function.__code__, _adafactor.__file__)
        function = type(function)(code, vars(_adafactor), function.__name__)
        monkeypatch.setattr(_adafactor, "math", math, raising=False)
    monkeypatch.setattr(_adafactor, "_single_tensor_adafactor", function)
    found = check_right(loop(foreach=False))
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays == 0


def test_an_optimizer_of_ones_own_that_is_derived() -> None:
    def script(capture: Capture) -> Calls:
        class Own(torch.optim.Adafactor):
            @torch.no_grad()
            def step(self, closure: Any = None) -> Any:
                for group in self.param_groups:
                    for p in group["params"]:
                        p.add_(p.grad, alpha=-0.1 / max(1.0, p.grad.norm(2).item()))

        net = Net()
        optimizer = Own(net.parameters())
        return over(
            capture,
            training(net, optimizer),
            (torch.randn(5, 6) for _ in range(20)),
            state={"net": net, "optimizer": optimizer},
        )

    check_right(script)
