"""Numbers that functions read from tensors, and whose results the step only returns: ``return self.update(batch)``."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_equal, check_right, over
from torch import Tensor, nn

SEEN: list[Any] = []


def inputs(calls: int) -> list[tuple[Tensor]]:
    draw = torch.Generator().manual_seed(4)
    return [(torch.randn(4, generator=draw) * 3,) for _ in range(calls)]


def number(x: Tensor) -> float:
    return x.sum().item()  # type: ignore[no-any-return]


def numbers(x: Tensor, scale: float = 1.0) -> dict[str, Any]:
    logs = {"mean": (x * scale).mean().item(), "count": (x > 0).sum().item()}
    logs["max"] = float(x.max())
    return logs


def as_arrays(x: Tensor) -> dict[str, float]:
    return {"loss": float(x.mean().detach().cpu().numpy()), "double": float(x.double().sum().numpy())}


@dataclasses.dataclass(frozen=True)
class Losses:
    one: Tensor
    other: Tensor


def as_floats(losses: Any) -> dict[str, float]:
    """As libraries of reinforcement learning have it."""
    found: dict[str, float] = {}
    for field in dataclasses.fields(losses):
        value = getattr(losses, field.name)
        if isinstance(value, Tensor):
            found[field.name] = float(value.cpu().detach().numpy())
        else:
            found[field.name] = float(value)
    return found


def timed(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result

    return wrapper


class Base:
    def __init__(self) -> None:
        self.part = Part()

    def losses(self, x: Tensor) -> dict[str, Any]:
        return {"base": x.abs().sum().item()}

    @torch.no_grad()
    def without_grad(self, x: Tensor) -> Any:
        return x.prod().item()

    @staticmethod
    def static(x: Tensor) -> Any:
        return (x * 3).sum().item()

    @classmethod
    def of_class(cls, x: Tensor) -> Any:
        return [x.min().item(), cls.__name__]

    @timed
    def measured(self, x: Tensor) -> Any:
        return numbers(x)


class Part:
    def value(self, x: Tensor) -> tuple[Any, Any]:
        return x.std().item(), x.var().item()


class Derived(Base):
    def losses(self, x: Tensor) -> dict[str, Any]:
        found = super().losses(x)
        return {**found, "derived": 1} if not isinstance(found, dict) else super().losses(x)

    def filled(self, x: Tensor) -> Any:
        metrics: dict[str, Any] = {}
        metrics.update(super().losses(x))
        metrics.update(numbers(x))
        metrics["more"] = self.part.value(x)
        return metrics

    def displayed(self, x: Tensor) -> Any:
        return {**numbers(x), "more": [*self.part.value(x), self.static(x)]}, self.without_grad(x)

    def extended(self, x: Tensor) -> Any:
        values = [x.sum().item()]
        values.extend(self.of_class(x))
        values.append(self.measured(x))
        return values

    def unpacked(self, x: Tensor) -> Any:
        deviation, variance = self.part.value(x)
        return {"std": deviation, "var": variance}

    def deep(self, x: Tensor) -> Any:
        return self.deeper(x)

    def deeper(self, x: Tensor) -> Any:
        found = self.filled(x)
        return found, self.displayed(x)

    def of_several(self, x: Tensor) -> Any:
        return [self.static(each) for each in x.view(2, 2)]

    def by_keywords(self, x: Tensor) -> Any:
        logs = numbers(x, scale=2.0)
        return logs


def of_dataclasses(x: Tensor) -> Any:
    metrics = {}
    metrics.update(as_floats(Losses(x.sum(), x.mean())))
    return metrics


FOLLOWED: dict[str, Callable[[Tensor], Any]] = {
    "function": lambda x: number(x),
    "dict": lambda x: numbers(x),
    "among others": lambda x: (number(x), x * 2, [numbers(x)]),
    "arrays": as_arrays,
    "arrays by a function": lambda x: as_arrays(x),
    "dataclass": of_dataclasses,
    "wrapped": timed(numbers),
    "wrapped twice": timed(timed(lambda x: numbers(x))),
    "without grad": torch.no_grad()(lambda x: numbers(x)),
    "partial": functools.partial(numbers, scale=2.0),
    **{
        name: getattr(Derived(), name)
        for name in (
            "losses",
            "filled",
            "displayed",
            "extended",
            "unpacked",
            "deep",
            "of_several",
            "by_keywords",
            "measured",
            "without_grad",
        )
    },
}
FEWER = {"losses"}  # where the step looks at what it has


def of_inputs(step: Callable[..., Any], **options: Any) -> Script:
    return lambda capture: over(capture, step, inputs(12), **options)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", FOLLOWED)
def test_returned(name: str) -> None:
    if name in FEWER:
        check_right(of_inputs(FOLLOWED[name]))
    else:
        check_equal(of_inputs(FOLLOWED[name]), replays=9)


@functools.lru_cache
def cached(x: Tensor) -> Any:
    return x.sum().item()


def printing(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(x: Tensor) -> Any:
        result = function(x)
        SEEN.append(str(result))
        return result

    return wrapper


def piece_by_piece(x: Tensor) -> Iterator[Any]:
    yield x.sum().item()


class Looking(Base):
    def compares(self, x: Tensor) -> Any:
        value = self.static(x)
        return {"large": value > 3}

    def takes_a_part(self, x: Tensor) -> Any:
        return numbers(x)["mean"] * 2

    def keeps(self, x: Tensor) -> Any:
        self.last = found = numbers(x)
        return found["mean"] + 1

    def adds_later(self, x: Tensor) -> Any:
        logs = {}
        logs.update(numbers(x))
        logs["mean"] += 1
        return logs

    def looks_through(self, x: Tensor) -> Any:
        logs = {}
        logs.update(numbers(x))
        return sum(logs.values())

    def unpacks_and_uses(self, x: Tensor) -> Any:
        one, other = self.part.value(x)
        return one, other + 1

    @property
    def wrapped(self) -> Any:
        return lambda x: round(numbers(x)["mean"], 1)

    def by_a_property(self, x: Tensor) -> Any:
        return self.wrapped(x)


class Rounding(dict[str, Any]):
    def update(self, *args: Any, **kwargs: Any) -> None:
        super().update({key: str(value) for key, value in dict(*args, **kwargs).items()})


def into_a_dict_of_its_own(x: Tensor) -> Any:
    logs = Rounding()
    logs.update(numbers(x))
    return logs


def by_another_function(x: Tensor) -> Any:
    number = lambda x: str(x.sum().item())  # noqa: E731
    return number(x)


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "cached": lambda x: cached(x),
    "printed": printing(numbers),
    "mapped": lambda x: list(map(number, [x, x])),
    "sorted by": lambda x: sorted([1, 2], key=lambda _: number(x)),
    "reduced": lambda x: functools.reduce(operator.add, map(number, [x, x])),
    "piece by piece": lambda x: list(piece_by_piece(x)),
    "added up": lambda x: number(x) + 1,
    "array": lambda x: str(x.sum().numpy()),
    "array that is computed": lambda x: float(x.sum().numpy() * 2),
    "array that is rounded": lambda x: float(x.sum().numpy().round(1)),
    "into a dict of its own": into_a_dict_of_its_own,
    "by another function": by_another_function,
    "by a caller": lambda x: str(Derived().deep(x)),
    **{
        name: getattr(Looking(), name)
        for name in (
            "compares",
            "takes_a_part",
            "keeps",
            "adds_later",
            "looks_through",
            "unpacks_and_uses",
            "by_a_property",
        )
    },
}


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", REFUSED)
def test_used_otherwise(name: str) -> None:
    found = check_right(of_inputs(REFUSED[name], tail=False))
    assert ORACLE_ONLY or not found.steps[0].stats.replays
    check_right(of_inputs(REFUSED[name]))


@pytest.mark.ranks(1)
def test_an_update_of_two_optimizers() -> None:
    """As `d3rlpy` has it: a critic, then an actor whose distribution checks its arguments, then numbers."""

    class Agent:
        def __init__(self) -> None:
            self.actor, self.critic = nn.Linear(4, 2), nn.Linear(6, 1)
            self.of_actor = torch.optim.Adam(self.actor.parameters())
            self.of_critic = torch.optim.Adam(self.critic.parameters())

        def update_critic(self, x: Tensor, wanted: Tensor) -> dict[str, float]:
            self.of_critic.zero_grad(set_to_none=False)
            loss = (self.critic(torch.cat([x, self.actor(x).detach()], 1)) - wanted).square().mean()
            loss.backward()
            self.of_critic.step()
            return as_floats(Losses(loss, loss * 2))

        def update_actor(self, x: Tensor) -> dict[str, float]:
            self.of_actor.zero_grad(set_to_none=False)
            drawn = torch.distributions.Normal(self.actor(x), 0.1).rsample()
            loss = -self.critic(torch.cat([x, drawn], 1)).mean()
            loss.backward()
            self.of_actor.step()
            return {"actor": float(loss.cpu().detach().numpy())}

        def update(self, x: Tensor, wanted: Tensor) -> dict[str, float]:
            metrics: dict[str, float] = {}
            metrics.update(self.update_critic(x, wanted))
            metrics.update(self.update_actor(x))
            return metrics

    def script(capture: Capture) -> Calls:
        agent = Agent()
        step = capture(agent.update)
        for _ in range(30):
            yield step(torch.randn(8, 4), torch.randn(8, 1))
        return agent.actor, agent.critic, agent.of_actor, agent.of_critic

    check_equal(script, replays=24)
