"""What lies in `.grad`, of tensors that require a gradient and of those that no longer or never do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from test_failures import attempt
from torch import Tensor, nn

CALLS = 20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.register_buffer("scale", torch.full((2,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) * self.scale


Train = Callable[[Model, torch.optim.Optimizer, Tensor], Tensor]


def adds_up(model: Model, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()


def clears_first(model: Model, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad()
    return adds_up(model, optimizer, x)


def clears_last(model: Model, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = adds_up(model, optimizer, x)
    optimizer.zero_grad()
    return loss


def zeroes(model: Model, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    optimizer.zero_grad(set_to_none=False)
    return adds_up(model, optimizer, x)


def counts(model: Model, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """As logging does: how many have one, and how large they are."""
    loss = model(x).square().mean()
    loss.backward()
    found = [t.grad for t in (*model.parameters(), *model.buffers()) if t.grad is not None]
    norm = torch.stack([grad.norm() for grad in found]).sum()
    model.zero_grad()
    return norm * len(found) + loss.detach()


def penalizes(model: Model, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    """What the gradients of the step before take part in, they may get gradients of."""
    old = [t.grad for t in model.parameters() if t.grad is not None]
    loss = model(x).square().mean() + 0.1 * sum(grad.square().sum() for grad in old)
    loss.backward()
    optimizer.step()
    return loss.detach()


STEPS: list[Train] = [clears_first, clears_last, zeroes, adds_up, counts, penalizes]


def freeze(model: Model, call: int) -> None:
    """Fine-tuning in turns."""
    model.layers[0].requires_grad_(call // 4 % 2 == 0)


def freeze_and_leave_a_gradient(model: Model, call: int) -> None:
    if call == 4:
        model.layers[0].requires_grad_(False)
    if call in (8, 14):
        model.layers[0].weight.grad = torch.ones(6, 4)


def gradient_of_a_buffer(model: Model, call: int) -> None:
    model.scale.grad = torch.ones(2) * call if call in (5, 6, 12) else None


def gradient_of_another_dtype(model: Model, call: int) -> None:
    if call == 6:
        model.layers[2].requires_grad_(False)
        model.layers[2].bias.grad = torch.ones(2)
    if call == 12:
        model.layers[2].bias.grad = None


def gradient_that_requires_one(model: Model, call: int) -> None:
    if call in (6, 12):
        model.layers[0].weight.grad = torch.ones(6, 4, requires_grad=True)
    if call in (8, 14):
        model.zero_grad()


def gradient_with_a_graph(model: Model, call: int) -> None:
    if call in (6, 12):
        model.zero_grad()
        model(torch.ones(3, 4)).square().mean().backward(create_graph=True)
    if call in (8, 14):
        model.zero_grad()


def gradient_made_for_inference(model: Model, call: int) -> None:
    """Eager adds nothing up in one."""
    if call in (6, 12):
        with torch.inference_mode():
            model.layers[0].weight.grad = torch.ones(6, 4)
    if call in (8, 14):
        model.zero_grad()


def gradient_with_a_hook(model: Model, call: int) -> None:
    grad = model.layers[0].weight.grad
    if call in (6, 12) and grad is not None:
        grad.requires_grad_().register_hook(lambda g: g * 2)
    if call in (8, 14):
        model.zero_grad()


CHANGES = [
    freeze,
    freeze_and_leave_a_gradient,
    gradient_of_a_buffer,
    gradient_of_another_dtype,
    gradient_that_requires_one,
    gradient_with_a_graph,
    gradient_made_for_inference,
    gradient_with_a_hook,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("train", STEPS)
def test_gradients_of_what_requires_none(train: Train, change: Callable[[Model, int], None]) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(1)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        step = capture(lambda x: train(model, optimizer, x), state={"model": model, "optimizer": optimizer})
        for call in range(CALLS):
            change(model, call)
            loss = attempt(lambda: step(torch.randn(3, 4)))
            grads = [t.grad for t in (*model.parameters(), *model.buffers())]
            yield [
                loss,
                grads,
                [grad.requires_grad and (grad.is_leaf, grad.grad) for grad in grads if grad is not None],
            ]
        return {"model": model, "optimizer": optimizer.state_dict()}

    check_right(script, replays=4)


@pytest.mark.parametrize("requires", [True, False])
@pytest.mark.parametrize("where", ["argument", "list"])
def test_gradients_of_arguments(where: str, requires: bool) -> None:
    def script(capture: Capture) -> Calls:
        def step(given: Any) -> Tensor:
            x = given[0] if isinstance(given, list) else given
            found = x * 2 if x.grad is None else x + x.grad
            x.grad = None
            return found.detach()

        captured = capture(step)
        for call in range(CALLS):
            x = torch.arange(3.0).requires_grad_(requires)
            if call % 3 == 2:
                x.grad = torch.full((3,), float(call))
            yield [captured(x if where == "argument" else [x]), x.grad]
        return {}

    check_right(script, replays=8)


def with_attribute(tensor: Tensor, value: float) -> Tensor:
    tensor.scale = value  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize("owner", ["argument", "state"])
def test_gradients_with_attributes_are_kept(owner: str) -> None:
    """A gradient that the step makes is eager's, with what hangs on it."""

    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.ones(3))

        def step(x: Tensor, given: Tensor) -> Tensor:
            w = given if owner == "argument" else weight
            w.grad = with_attribute(x * 2, 3.0)
            return (w.detach() * x).sum()

        captured = capture(step, state=weight if owner == "state" else None, tail=False)
        for call in range(8):
            loss = captured(torch.arange(3.0) + call, weight if owner == "argument" else torch.ones(1))
            assert weight.grad is not None
            yield [loss, weight.grad, weight.grad.scale]  # type: ignore[attr-defined]
        return {"weight": weight}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert "with Python attributes (scale)" in str(run.stats[-1][0].refusals)


HOOKS: dict[str, Callable[[Tensor, Any], Any]] = {
    "backward": lambda held, hook: held.register_hook(hook),
    "accumulate": lambda held, hook: held.register_post_accumulate_grad_hook(hook),
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("where", ["state", "closure", "argument"])
def test_hooks_are_counted_and_told_apart(where: str, kind: str) -> None:
    """Wherever the tensor is held, and whoever asks: one hook more, or another one."""
    add = HOOKS[kind]

    def script(capture: Capture) -> Calls:
        held = nn.Parameter(torch.ones(3))
        handles = [add(held, lambda g: None)]

        def step(x: Tensor, given: Tensor) -> Tensor:
            tensor = given if where == "argument" else held
            hooks = (tensor._backward_hooks if kind == "backward" else tensor._post_accumulate_grad_hooks) or {}
            return x * (len(hooks) + 10 * sum(getattr(hook, "weight", 0) for hook in hooks.values()))

        captured = capture(step, state=held if where == "state" else None)
        for call in range(CALLS):
            if call in (6, 8, 14):
                handles.append(add(held, lambda g: None))
            if call in (10, 16):  # as many as before, another one
                handles.pop().remove()

                def heavy(g: Tensor, weight: int = call) -> None:
                    pass

                heavy.weight = call  # type: ignore[attr-defined]
                handles.append(add(held, heavy))
            yield captured(torch.arange(3.0), held if where == "argument" else torch.ones(1))
        return {}

    check_right(script, replays=3)
