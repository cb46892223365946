"""Distributions of PyTorch that a step makes, keeps in attributes, takes and gives back."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn
from torch import distributions as D


class Policy(nn.Module):
    """Keeps its last distribution in an attribute, as agents do."""

    def __init__(self, make: Callable[[Tensor], D.Distribution]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4))
        self.make = make
        self.distribution: Any = None

    def log_prob(self, x: Tensor, actions: Tensor) -> Tensor:
        self.distribution = self.make(self.net(x))
        return self.distribution.log_prob(actions)

    def entropy(self) -> Tensor:
        return self.distribution.entropy()


MAKERS: dict[str, Callable[[Tensor], D.Distribution]] = {
    "normal": lambda y: D.Normal(y, torch.ones_like(y)),
    "two of one tensor": lambda y: D.Normal(y, y.exp()),
    "independent": lambda y: D.Independent(D.Normal(y, y.exp()), 1),
    "categorical": lambda y: D.Categorical(logits=y),
    "by probabilities": lambda y: D.Categorical(y.softmax(-1)),
    "bernoulli": lambda y: D.Bernoulli(logits=y),
    "multivariate": lambda y: D.MultivariateNormal(y, torch.eye(4)),
    "mixture": lambda y: D.MixtureSameFamily(D.Categorical(logits=y), D.Normal(y, torch.ones_like(y))),
    "transformed": lambda y: D.TransformedDistribution(D.Normal(y, torch.ones_like(y)), [D.TanhTransform()]),
}
MAY_STAY_EAGER = {"transformed", "multivariate", "mixture"}


def updated(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def actions_of(name: str, policy: Policy, x: Tensor) -> Tensor:
    with torch.no_grad():
        return policy.make(policy.net(x)).sample()


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", MAKERS)
def test_in_an_attribute(name: str) -> None:
    def script(capture: Capture) -> Calls:
        policy = Policy(MAKERS[name])
        optimizer = torch.optim.Adam(policy.parameters(), lr=0.01)

        def step(x: Tensor, actions: Tensor) -> Tensor:
            loss = -policy.log_prob(x, actions).mean()
            if name not in MAY_STAY_EAGER:
                loss = loss - 0.01 * policy.entropy().mean()
            return updated(optimizer, loss)

        run = capture(step)
        for _ in range(14):
            x = torch.randn(5, 6)
            actions = actions_of(name, policy, x)
            loss = run(x, actions)
            kept = policy.distribution
            yield loss, kept.log_prob(actions).detach(), type(kept).__name__, tuple(kept.batch_shape), kept.event_shape
        return policy, optimizer

    found = check_right(script)
    assert ORACLE_ONLY or name in MAY_STAY_EAGER or found.steps[0].stats.replays > 6, found.steps[0].stats


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", MAKERS)
def test_given_and_taken(name: str) -> None:
    """The distribution that a call gives is the next one's argument, as an older policy's."""

    def script(capture: Capture) -> Calls:
        policy = Policy(MAKERS[name])

        def step(x: Tensor, actions: Tensor, older: D.Distribution) -> Any:
            with torch.no_grad():
                now = policy.make(policy.net(x))
                ratio = (now.log_prob(actions) - older.log_prob(actions)).exp()
                for each in policy.parameters():
                    each.mul_(0.99)
            return now, ratio

        run = capture(step)
        x = torch.randn(5, 6)
        with torch.no_grad():
            older = policy.make(policy.net(x))
        for _ in range(14):
            actions = actions_of(name, policy, x)
            older, ratio = run(x, actions, older)
            yield ratio, older.log_prob(actions), type(older).__name__
        return policy

    found = check_right(script)
    assert ORACLE_ONLY or name in MAY_STAY_EAGER or found.steps[0].stats.replays > 6, found.steps[0].stats


class Variational(nn.Module):
    """Has distributions that stay: one of its parameters, one of buffers, one of tensors that nobody has named."""

    def __init__(self) -> None:
        super().__init__()
        self.loc, self.scale = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.ones(4))
        self.register_buffer("mean", torch.full((4,), 0.5))
        self.own = D.Normal(self.loc, self.scale)
        self.prior = D.Normal(self.mean, torch.ones(4))
        self.classes = D.Categorical(logits=torch.linspace(0, 1, 4))
        self.net = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x)
        kl = D.kl_divergence(self.own, self.prior).sum()
        return kl - self.own.log_prob(y).mean() + (self.classes.probs * y).mean() - self.classes.entropy() * 0.1


def changed_by(policy: Variational, call: int) -> None:
    """What a script may do with distributions between two calls."""
    if call == 6:
        policy.prior = D.Normal(policy.mean + 1, torch.ones(4))
    if call == 9:
        policy.prior.loc = policy.prior.loc * 2
    if call == 12:
        policy.classes.logits.mul_(2)
    if call == 15:
        policy.classes = D.Categorical(logits=torch.linspace(1, 0, 4))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("changes", [False, True])
def test_that_stay(changes: bool) -> None:
    def script(capture: Capture) -> Calls:
        model = Variational()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def step(x: Tensor) -> Tensor:
            return updated(optimizer, model(x))

        run = capture(step)
        for call in range(22):
            if changes:
                changed_by(model, call)
            yield run(torch.randn(5, 6)), model.own.loc.detach().clone(), model.classes.probs
        return model, optimizer

    found = check_right(script)
    assert ORACLE_ONLY or changes or found.steps[0].stats.replays > 10, found.steps[0].stats


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_in_two_places() -> None:
    """Two attributes hold one object, and the script changes it."""

    def script(capture: Capture) -> Calls:
        policy = Policy(MAKERS["normal"])
        policy.last = None  # type: ignore[assignment]

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                before = 0.0 if policy.last is None else policy.last.loc.sum()  # type: ignore[union-attr]
                policy.distribution = policy.last = policy.make(policy.net(x))  # type: ignore[assignment]
                return policy.distribution.log_prob(x[:, :4]) + before

        run = capture(step)
        for call in range(16):
            value = run(torch.randn(5, 6))
            if call % 4 == 3:
                policy.distribution.loc = policy.distribution.loc + 1
            yield value, policy.distribution is policy.last, policy.distribution.loc, policy.last.loc  # type: ignore
        return policy

    check_right(script)


class Named(D.Normal):
    """A class of the script's own, with more in it."""

    def __init__(self, loc: Tensor, name: str) -> None:
        super().__init__(loc, torch.ones_like(loc))
        self.name = name
        self.calls = [0]


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_of_the_script() -> None:
    def script(capture: Capture) -> Calls:
        net = nn.Linear(6, 4)

        def step(x: Tensor) -> Any:
            with torch.no_grad():
                made = Named(net(x), "own")
                made.calls.append(1)
                return made, made.log_prob(x[:, :4])

        run = capture(step)
        for _ in range(10):
            made, value = run(torch.randn(5, 6))
            made.calls.append(2)
            yield made.loc, made.name, tuple(made.calls), type(made).__name__, value
        return net

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[0].stats.replays > 4, found.steps[0].stats
