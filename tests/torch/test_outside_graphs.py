"""Arguments that come with an autograd graph of an earlier step, as the hidden state of a recurrent network does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Capture, check_right
from torch import Tensor, nn

CALLS = 28


class Words(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.rnn = getattr(nn, kind)(6, 6, 2)
        self.out = nn.Linear(6, 12)

    def forward(self, tokens: Tensor, hidden: Any) -> Any:
        output, hidden = self.rnn(self.embedding(tokens), hidden)
        return self.out(output), hidden

    def first(self) -> Any:
        zeros = torch.zeros(2, 3, 6)
        return (zeros, zeros.clone()) if isinstance(self.rnn, nn.LSTM) else zeros


def detached(hidden: Any) -> Any:
    return hidden.detach() if isinstance(hidden, Tensor) else tuple(map(detached, hidden))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_hidden_states(kind: str) -> None:
    def script(capture: Capture) -> Any:
        torch.manual_seed(0)
        model = Words(kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(tokens: Tensor, targets: Tensor, hidden: Any) -> Any:
            optimizer.zero_grad()
            scores, hidden = model(tokens, detached(hidden))
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            return loss.detach(), hidden

        step = capture(step, state=[model, optimizer])
        hidden = model.first()
        for i in range(CALLS):
            hidden = model.first() if i % 10 == 9 else hidden
            loss, hidden = step(torch.randint(12, (5, 3)), torch.randint(12, (5, 3)), hidden)
            flags = [each.requires_grad for each in (hidden if isinstance(hidden, tuple) else (hidden,))]
            yield loss, detached(hidden), flags
        with pytest.raises(RuntimeError):  # eager has freed the graph
            (hidden[0] if isinstance(hidden, tuple) else hidden).sum().backward()
        return model, optimizer

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays > CALLS // 2, found.steps[0].explain()


def goes_on(y: Tensor, old: Tensor) -> Tensor:
    return (y + old).square().mean()


def looks(y: Tensor, old: Tensor) -> Tensor:
    """Makes something of the graph, and goes on without it."""
    return (y + (old * 2).detach()).square().mean()


def writes(y: Tensor, old: Tensor) -> Tensor:
    with torch.no_grad():
        old.mul_(0.5)
    return (y + old.detach()).square().mean()


def writes_data(y: Tensor, old: Tensor) -> Tensor:
    old.data.mul_(0.5)
    return (y + old.detach()).square().mean()


def adds(y: Tensor, old: Tensor) -> Tensor:
    loss = (y + old.detach()).square().mean()
    old.add_(loss)
    return loss


def hooks(y: Tensor, old: Tensor) -> Tensor:
    old.register_hook(lambda gradient: gradient * 3)
    return looks(y, old)


def retains(y: Tensor, old: Tensor) -> Tensor:
    old.retain_grad()
    return looks(y, old)


def asks(y: Tensor, old: Tensor) -> Tensor:
    return looks(y, old) * (2 if "Addmm" in str(old.grad_fn) else 1)


def adds_to_the_graph(y: Tensor, old: Tensor) -> Tensor:
    old.mul_(0.5)
    return (y + old.detach()).square().mean()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("body", "why"),
    [
        (goes_on, "goes backward into the autograd graph of args[1]"),
        (looks, ""),
        (writes, ""),
        (writes_data, ""),
        (adds, ""),
        (hooks, "calls register_hook of args[1]"),
        (retains, "calls retain_grad of args[1]"),
        (asks, "asks for grad_fn of args[1]"),
        (adds_to_the_graph, "adds to the autograd graph of args[1]"),
    ],
)
def test_what_a_step_does_with_a_graph_from_outside(body: Callable[[Tensor, Tensor], Tensor], why: str) -> None:
    def script(capture: Capture) -> Any:
        torch.manual_seed(0)
        outer, model = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.SGD([*model.parameters(), *outer.parameters()], lr=0.1)

        def step(x: Tensor, old: Tensor) -> Tensor:
            loss = body(model(x), old)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = capture(step, state=[model, optimizer])
        for _ in range(CALLS):
            old = outer(torch.randn(3, 4))
            yield step(torch.randn(3, 4), old), old.detach(), old.requires_grad
        return model, outer, optimizer

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert (why in str(stats.refusals) and not stats.replays) if why else stats.replays, stats


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("part", ["used", "unused", "another", "nothing saved"])
def test_results_with_a_part_of_a_graph(part: str) -> None:
    """One whose graph meets what the backward pass has freed cannot be used again; another one can."""

    def script(capture: Capture) -> Any:
        torch.manual_seed(0)
        model, other = nn.Linear(4, 4), nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor) -> Any:
            y = model(x)
            loss = model.weight.sum() + model.bias.sum() if part == "nothing saved" else y.square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return {"used": y + 1, "unused": model.bias + 1, "another": y + other(x), "nothing saved": loss}[part]

        step = capture(step, state=[model, other, optimizer], tail=False)
        for _ in range(CALLS):
            result = step(torch.randn(3, 4))
            yield result.detach(), result.requires_grad
        if part == "used":
            with pytest.raises(RuntimeError):
                result.sum().backward()
        elif part == "another":
            yield torch.autograd.grad(result.sum(), other.weight)
        else:
            result.sum().backward()
        return model, optimizer

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert stats.replays if part == "used" else "autograd graph" in str(stats.refusals), stats
