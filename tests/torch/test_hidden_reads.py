"""Rates that change at every call, beside code that gets at attributes without naming them: of the optimizer, or of
other objects."""

import copy
import functools
import math
import operator
import pickle
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from oracle import Capture, Script, check_equal, check_right
from torch import nn
from torch.nn import functional as F

CALLS = 30
GROUPS = "_".join(["param", "groups"])  # no constant of any code below
Rate = Callable[[Any], float]


class Own(torch.optim.SGD):
    def held(self, name: str) -> Any:
        return super().__getattribute__(name)


class Config:
    """As configs of `transformers` read themselves."""

    names: ClassVar = {"size": "hidden"}

    def __init__(self) -> None:
        self.hidden = 7

    def __getattribute__(self, key: str) -> Any:
        own = super().__getattribute__("__dict__")
        names = super().__getattribute__("names")
        return own[names[key]] if key in names else super().__getattribute__(key)


class Shared:
    """As the state of an `Accelerator` is kept."""

    kept: ClassVar = {"scale": 2.0}

    def __init__(self) -> None:
        self.__dict__ = self.kept


def of_groups(value: Any) -> float:
    return next(each for each in value if isinstance(each, dict))["lr"]


def found_among(own: Any) -> float:
    return of_groups(next(value for value in own.values() if isinstance(value, list) and value))


READS: dict[str, Rate] = {
    "getattr": lambda o: of_groups(getattr(o, "param_groups")),  # noqa: B009
    "vars by name": lambda o: of_groups(vars(o)["param_groups"]),
    "vars": lambda o: of_groups(vars(o)[GROUPS]),
    "__dict__": lambda o: of_groups(o.__dict__[GROUPS]),
    "values": lambda o: found_among(vars(o)),
    "__getstate__": lambda o: found_among(o.__getstate__()),
    "object": lambda o: of_groups(object.__getattribute__(o, GROUPS)),
    "super": lambda o: of_groups(o.held(GROUPS)),
    "descriptor": lambda o: found_among(torch.optim.Optimizer.__dict__["__dict__"].__get__(o)),
    "attrgetter": lambda o: of_groups(operator.attrgetter(GROUPS)(o)),
    "copy": lambda o: found_among(vars(copy.copy(o))),
    "pickle": lambda o: found_among(vars(pickle.loads(pickle.dumps(o)))),
}


def training(body: Callable[[Any], float], kind: Any = torch.optim.SGD) -> Script:
    """``body`` gives a number, which C code looks at: it is the same one for long, and then another one."""

    def script(capture: Capture) -> Any:
        net = nn.Linear(6, 3)
        opt = kind(net.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = F.mse_loss(net(x), x[:, :3]) * (3.0 if math.isclose(body(opt), 0.0, abs_tol=0.03) else 1.0)
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        captured = capture(step, state={"net": net, "opt": opt})
        for i in range(CALLS):
            for group in opt.param_groups:
                group["lr"] = 0.1 * 0.93**i
            yield captured(torch.randn(4, 6))
        return net, opt

    return script


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", READS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reads_of_the_optimizer(name: str) -> None:
    """The step changes when the rate falls below a limit: a replay must see it."""
    check_right(training(READS[name], Own if name == "super" else torch.optim.SGD))


def of_config(config: Config, shared: Shared, net: nn.Module) -> Rate:
    def body(_: Any) -> float:
        return config.size + shared.scale + len(vars(net)) + len(net.__dict__)  # type: ignore[attr-defined, no-any-return]

    return body


@pytest.mark.parametrize("outer", [False, True])
def test_reads_of_other_objects(outer: bool) -> None:
    body = of_config(Config(), Shared(), nn.Linear(1, 1))
    check_equal(training(functools.partial(body) if outer else body), replays=20)


def test_a_number_of_such_an_object_that_changes() -> None:
    def script(capture: Capture) -> Any:
        config, net = Config(), nn.Linear(6, 3)
        opt = torch.optim.AdamW(net.parameters())
        scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)

        def step(x: torch.Tensor) -> torch.Tensor:
            opt.zero_grad()
            loss = F.mse_loss(net(x), x[:, :3]) * config.size
            loss.backward()
            opt.step()
            scheduler.step()
            return loss.detach()

        captured = capture(step, state={"net": net, "opt": opt})
        for i in range(2 * CALLS):
            if i == CALLS:
                config.hidden = 8
            yield captured(torch.randn(4, 6))
        return net, opt

    check_right(script, replays=2 * CALLS - 12)
