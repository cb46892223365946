"""Numbers that follow hyperparameters are those of eager, whatever the step does with these.

Every case changes ``lr`` between calls, by steps so small that a rounding does not show
them at first and then by large ones, and compares with eager. What only computes with it
replays at new values; anything else misses.
"""

import collections
import copy
import decimal
import fractions
import io
import json
import math
import operator
import pickle
import statistics
import struct
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from models import inputs, training
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn

# Recorded, seen to change, and replayed. 0.1001 and 0.1002 agree in all that is rounded.
RATES = [0.1001] * 5 + [0.1002, 0.1003, 0.1004, 0.1005, 0.2, 0.3, 0.7, 0.7, 0.3, 1.5, 1.5, 1.5, 1e-3, 1e-3, 1e-3, 0.3]


Run = collections.namedtuple("Run", "model optimizer")


def following(
    step_of: Callable[[Any], Callable[[Tensor], Any]],
    optimizer_of: Any = None,
    rates: Any = None,
    raises: type[Exception] | tuple[()] = (),
) -> Any:
    """A script that changes `lr` before each call. ``raises`` is the error that it handles."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = (optimizer_of or (lambda p: torch.optim.SGD(p, lr=0.1)))(model.parameters())
        step = capture(step_of(Run(model, optimizer)), state={"model": model, "optimizer": optimizer})
        x = next(iter(inputs(1, 2, 4)))
        for rate in rates or RATES:
            for group in optimizer.param_groups:
                group["lr"] = rate
            try:
                yield step(x)
            except raises as error:
                yield type(error).__name__, str(error)
        return {"model": model, "optimizer": optimizer}

    return script


def rounded(value: float) -> float:
    return float(f"{value:.2f}")


Numpy = np.float64
ESCAPES: dict[str, Callable[[Any], Any]] = {
    "isclose": lambda lr: 1.0 if math.isclose(lr, 0.1, rel_tol=0.05) else 2.0,
    "sqrt": lambda lr: rounded(math.sqrt(lr)),
    "log": lambda lr: rounded(math.log(lr)),
    "exp": lambda lr: rounded(math.exp(lr)),
    "fabs": lambda lr: rounded(math.fabs(lr)),
    "copysign": lambda lr: math.copysign(2.0, lr - 0.5),
    "fsum": lambda lr: rounded(math.fsum([lr, 1.0])),
    "floor": lambda lr: math.floor(lr * 2),
    "frexp": lambda lr: math.frexp(lr)[1],
    "repr": lambda lr: float(repr(lr)[:3]),
    "str": lambda lr: float(str(lr)[:3]),
    "percent": lambda lr: float("%.2f" % lr),  # noqa: UP031
    "percent_tuple": lambda lr: float("%s %.2f" % ("", lr)),  # noqa: UP031
    "f_string": lambda lr: float(f"{lr:.2f}"),
    "format": lambda lr: float(format(lr, ".2f")),
    "str_format": lambda lr: float(f"{lr:.2f}"),
    "json": lambda lr: float(json.dumps([lr])[1:4]),
    "decimal": lambda lr: float(decimal.Decimal(lr).quantize(decimal.Decimal("0.01"))),
    "fraction": lambda lr: rounded(float(fractions.Fraction(lr))),
    "struct": lambda lr: struct.unpack("e", struct.pack("e", round(lr, 2)))[0],
    "half": lambda lr: struct.unpack("<e", struct.pack("<e", lr * 1e-3))[0] > 1e-4,
    "float_add": lambda lr: rounded(float.__add__(0.0, lr)),
    "real": lambda lr: rounded(lr.real),
    "conjugate": lambda lr: rounded(lr.conjugate()),
    "hex": lambda lr: float.fromhex(lr.hex()[:6] + "p-4"),
    "float": lambda lr: rounded(float(lr)),
    "sum": lambda lr: rounded(sum([lr, 1.0])),
    "min": lambda lr: min(lr, 0.15),
    "max": lambda lr: max(0.15, lr),
    "sorted": lambda lr: sorted([0.5, lr])[1],
    "numpy": lambda lr: rounded(float(np.asarray(lr))),
    "numpy_times": lambda lr: rounded(Numpy(2.0) * lr),
    "numpy_array": lambda lr: rounded(float((np.ones(2) * lr)[0])),
    "dict_key": lambda lr: {0.1001: 1.0, 0.1002: 1.0}.get(lr, 2.0),
    "set": lambda lr: 1.0 if lr in {0.1001, 0.1002} else 2.0,
    "pickle": lambda lr: rounded(pickle.loads(pickle.dumps(lr))),
    "complex": lambda lr: rounded(complex(lr, 0).real),
    "round": lambda lr: round(lr, 2),
    "int": lambda lr: int(lr * 2),
    "compare": lambda lr: 1.0 if lr < 0.5 else 2.0,
    "divmod": lambda lr: divmod(lr, 0.25)[0],
    "statistics": lambda lr: rounded(statistics.mean([lr, lr])),
    "deepcopy": lambda lr: rounded(copy.deepcopy([lr])[0]),
    "array": lambda lr: rounded(np.array([lr])[0]),
    "ratio": lambda lr: lr.as_integer_ratio()[1] % 7,
    "operator": lambda lr: rounded(operator.add(lr, 1)),
    "print": lambda lr: float((stream := io.StringIO(), print(lr, file=stream), stream.getvalue()[:3])[2]),
    "type": lambda lr: 1.0 if type(lr) is float else 2.0,
    "tiny": lambda lr: 1 + lr * 1e-16,
    "lossy": lambda lr: (lr * 1e-300) * 1e-300 + 1,
}


@pytest.mark.sampled(2)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", ESCAPES)
@pytest.mark.parametrize("through", ["name", "alias", "argument"])
def test_what_escapes_is_never_stale(how: str, through: str) -> None:
    read = ESCAPES[how]

    def by_name(run: Run) -> Callable[[Tensor], Any]:
        return lambda x: x * read(run.optimizer.param_groups[0]["lr"])

    def by_alias(run: Run) -> Callable[[Tensor], Any]:
        group = run.optimizer.param_groups[0]
        return lambda x: x * read(group["lr"])

    check_right({"name": following(by_name), "alias": following(by_alias), "argument": by_an_argument(read)}[through])


def by_an_argument(read: Callable[[Any], Any]) -> Any:
    """The group itself is passed to the step."""

    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = capture(lambda x, groups: x * read(groups[0]["lr"]), state={"model": model, "optimizer": optimizer})
        x = torch.ones(2)
        for rate in RATES:
            optimizer.param_groups[0]["lr"] = rate
            yield step(x, optimizer.param_groups)
        return {}

    return script


# Ways to the number that do not name it.
def loop_over_values(run: Run) -> Callable[[Tensor], Any]:
    return lambda x: x * sum(round(v, 2) for g in run.optimizer.param_groups for v in g.values() if type(v) is float)


def unpacked(run: Run) -> Callable[[Tensor], Any]:
    def read(*, lr: float, **others: Any) -> float:
        return round(lr, 2)

    return lambda x: x * read(**run.optimizer.param_groups[0])


def by_variables(run: Run) -> Callable[[Tensor], Any]:
    return lambda x: x * round(next(iter(v for k, v in vars(run.optimizer).items() if k[:3] == "par"))[0]["lr"], 2)


def by_state_dict(run: Run) -> Callable[[Tensor], Any]:
    return lambda x: x * round(next(reversed(run.optimizer.state_dict().values()))[0]["lr"], 2)


def by_hook(run: Run) -> Callable[[Tensor], Any]:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        with torch.no_grad():
            run.model.bias.mul_(round(optimizer.param_groups[0]["lr"], 2))

    run.optimizer.register_step_post_hook(hook)
    return sgd_step(run)


def sgd_step(run: Run) -> Callable[[Tensor], Any]:
    return training(*run)


class Weird(torch.Tensor):
    """Sees the arguments of ops, and rounds them."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {k: round(v, 2) if isinstance(v, float) else v for k, v in (kwargs or {}).items()}
        return super().__torch_function__(func, types, args, kwargs)


def by_subclass(run: Run) -> Callable[[Tensor], Any]:
    weird = torch.ones(4).as_subclass(Weird)

    def step(x: Tensor) -> Tensor:
        return torch.add(weird, x, alpha=run.optimizer.param_groups[0]["lr"]).as_subclass(torch.Tensor)

    return step


WAYS = [loop_over_values, unpacked, by_variables, by_state_dict, by_hook, by_subclass]


@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", WAYS, ids=[way.__name__ for way in WAYS])
def test_ways_to_a_hyperparameter(way: Any) -> None:
    check_right(following(way))


@pytest.mark.ranks(1)
def test_methods_of_an_optimizer_that_are_given_a_group() -> None:
    class Rounding(torch.optim.SGD):
        def _init_group(self, group: Any, *others: Any) -> Any:
            for value in group.values():
                if type(value) is float and 0 < value < 9:
                    self.scale = round(value, 2)
            return super()._init_group(group, *others)

    def step_of(run: Run) -> Callable[[Tensor], Any]:
        def step(x: Tensor) -> Tensor:
            sgd_step(run)(x)
            return x * run.optimizer.scale

        return step

    check_right(following(step_of, lambda p: Rounding(p, lr=0.1)))


# What is proven replays at values that were never recorded.


def loop(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        loss = run.model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for group in run.optimizer.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=-group["lr"])
                    p.grad = None
        return loss.detach()

    return step


def in_place_loop(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        run.model.zero_grad()
        loss = run.model(x).square().mean()
        loss.backward()
        lr = run.optimizer.param_groups[0]["lr"]
        with torch.no_grad():
            for p in run.model.parameters():
                p -= lr * p.grad
                p *= 1 - lr * 1e-16
        return loss.detach()

    return step


def foreach_loop(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        loss = run.model(x).square().mean()
        loss.backward()
        for _, group in enumerate(run.optimizer.param_groups):
            lr, decay = group["lr"], group.get("weight_decay", 0.0)
            params = [p for p in group["params"] if p.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(params, [p.grad for p in params], alpha=-(lr + decay) / 2)
        run.optimizer.zero_grad()
        return loss.detach()

    return step


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "power": 2.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            rate = group["lr"] ** group["power"]
            if group["lr"] is None:
                continue
            for p in group["params"]:
                if p.grad is None:
                    continue
                p.add_(p.grad, alpha=-rate)


def clipped(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        run.optimizer.zero_grad()
        loss = run.model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_([p for g in run.optimizer.param_groups for p in g["params"]], 0.5)
        run.optimizer.step()
        return loss.detach()

    return step


PROVEN: dict[str, tuple[Any, Any]] = {
    "sgd": (sgd_step, None),
    "loop": (loop, None),
    "in_place_loop": (in_place_loop, None),
    "foreach_loop": (foreach_loop, None),
    "own_optimizer": (sgd_step, lambda p: OwnOptimizer(p, 0.1)),
    "clipped": (clipped, None),
    "numpy_rates": (sgd_step, None),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("case", PROVEN)
def test_arithmetic_follows(case: str) -> None:
    step_of, optimizer_of = PROVEN[case]
    rates = [0.1 / (1 + i) for i in range(30)]
    if case == "numpy_rates":
        rates = [np.float64(rate) for rate in rates]
    found = check_right(following(step_of, optimizer_of, rates))
    stats = found.stats[-1][0]
    assert ORACLE_ONLY or (stats.replays >= 22 and stats.variants <= 2), stats


def fused(kind: Any, **options: Any) -> Any:
    return lambda p: kind(p, lr=0.1, **options)


OPTIMIZERS: dict[str, Any] = {
    "sgd_momentum": fused(torch.optim.SGD, momentum=0.9, weight_decay=0.1),
    "sgd_foreach": fused(torch.optim.SGD, momentum=0.9, foreach=True),
    "sgd_fused": fused(torch.optim.SGD, momentum=0.9, fused=True),
    "sgd_nesterov": fused(torch.optim.SGD, momentum=0.9, nesterov=True, foreach=False),
    "adamw_fused": fused(torch.optim.AdamW, fused=True),
    "adam_fused": fused(torch.optim.Adam, fused=True, amsgrad=True),
    "adagrad_fused": fused(torch.optim.Adagrad, fused=True),
    "rmsprop": fused(torch.optim.RMSprop, momentum=0.9, centered=True),
    "adadelta": fused(torch.optim.Adadelta),
    "adamax": fused(torch.optim.Adamax),
    "nadam": fused(torch.optim.NAdam),
    "radam": fused(torch.optim.RAdam),
    "asgd": fused(torch.optim.ASGD),
    "rprop": fused(torch.optim.Rprop),
    "adafactor": fused(torch.optim.Adafactor),
}
NOT_REPLAYED = ("adafactor",)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.filterwarnings("ignore:rote")
def test_every_float_of_an_optimizer(name: str) -> None:
    """Each float of the group varies in turn, and takes special values."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = OPTIMIZERS[name](model.parameters())
        group = optimizer.param_groups[0]
        step = capture(sgd_step(Run(model, optimizer)), state={"model": model, "optimizer": optimizer})
        x = next(iter(inputs(1, 2, 4)))
        for _ in range(4):
            yield step(x)
        for key in [key for key, value in group.items() if type(value) is float]:
            usual = group[key]
            for value in (0.1, 0.11, 0.12, 1e-12, 2e-12, 0.5, 1.0, 0.0, -0.0, 0.3):
                group[key] = value
                try:
                    yield step(x)
                except ArithmeticError as error:
                    yield str(error)
            group[key] = usual
        return {"model": model, "optimizer": optimizer}

    found = check_right(script)
    replays = ORACLE_ONLY or found.steps[0].stats.replays
    assert ORACLE_ONLY or name in NOT_REPLAYED or replays > 5, found.steps[0].stats


# Numbers that cannot be told apart at first.


@pytest.mark.ranks(1)
def test_two_groups_that_change_alike_and_then_apart() -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        groups = [{"params": layer.parameters()} for layer in model]
        optimizer = torch.optim.SGD(groups, lr=0.1)
        step = capture(sgd_step(Run(model, optimizer)), state={"model": model, "optimizer": optimizer})
        x = next(iter(inputs(1, 2, 4)))
        rates = [(0.1 / (1 + i), 0.1 / (1 + i)) for i in range(8)] + [(0.1, 0.2 + i) for i in range(8)]
        for one, other in rates:
            optimizer.param_groups[0]["lr"], optimizer.param_groups[1]["lr"] = one, other
            yield step(x)
        return {"model": model}

    check_right(script, replays=8)


@pytest.mark.ranks(1)
def test_a_product_that_is_rounded_away_at_first() -> None:
    check_right(following(in_place_loop, None, [0.1 / (1 + i) for i in range(8)] + [1e14, 1e15, 0.1, 0.1]), replays=5)


# Where eager raises, so does the captured step.


def reciprocal(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        for group in run.optimizer.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.mul_(1 / (1 / group["lr"]))
        return x * 2

    return step


def powers(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        for group in run.optimizer.param_groups:
            unused = group["lr"] ** 2000  # noqa: F841
            for p in group["params"]:
                with torch.no_grad():
                    p.add_(p, alpha=group["lr"] * 0.5)
        return x * 2

    return step


def roots(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        for group in run.optimizer.param_groups:
            for p in group["params"]:
                with torch.no_grad():
                    p.add_(p, alpha=group["lr"] ** 0.5)
        return x * 2

    return step


def far(run: Run) -> Callable[[Tensor], Any]:
    def step(x: Tensor) -> Tensor:
        for group in run.optimizer.param_groups:
            scaled = group["lr"] * 1000
            for p in group["params"]:
                with torch.no_grad():
                    p.add_(p, alpha=1 / (10**scaled) - (-scaled))
        return x * 2

    return step


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [float, np.float64], ids=["python", "numpy"])
@pytest.mark.parametrize("always", [False, True], ids=["at times", "from the first call on"])
@pytest.mark.parametrize("step_of", [reciprocal, powers, roots, far], ids=lambda step_of: step_of.__name__)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_eager_raises(step_of: Any, always: bool, kind: Any) -> None:
    """And where NumPy's floats warn and go on."""
    wrong = {"reciprocal": 0.0, "powers": 9.0, "roots": -0.5, "far": 500.0}[step_of.__name__]
    rates = [kind(wrong if always or i in (3, 10, 11) else 0.5 / (1 + i)) for i in range(16)]
    found = check_right(following(step_of, rates=rates, raises=Exception))
    if not (ORACLE_ONLY or always or kind is np.float64):
        assert found.stats[9][0].replays >= 4, found.stats[9]
        assert found.stats[-1][0].replays >= found.stats[9][0].replays + 3, "it goes on afterwards"


@pytest.mark.parametrize("shape", ["plain", "tuple", "nested", "list", "dict"])
def test_rates_that_are_returned(shape: str) -> None:
    def step_of(types: Any) -> Callable[[Tensor], Any]:
        model, optimizer, *_ = types

        def step(x: Tensor) -> Any:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rate = optimizer.param_groups[0]["lr"] * 2
            found = {
                "plain": rate,
                "tuple": (rate,),
                "nested": (1, ({"rate": (rate,)}, [rate])),
                "list": [rate],
                "dict": {"rate": rate},
            }[shape]
            return [loss.detach(), repr(found), found] if shape == "list" else found

        return step

    check_right(following(step_of), replays=6)


@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR", "ExponentialLR"])
def test_what_the_step_stores_is_plain_afterwards(scheduler: str) -> None:
    """A scheduler inside the step computes with the rates, and keeps what it computes."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model, kept = nn.Linear(4, 4), {}
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        schedule: Any = {
            "OneCycleLR": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=40),
            "CyclicLR": lambda: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.1, 0.2, cycle_momentum=False),
            "ExponentialLR": lambda: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        }[scheduler]()

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            kept["rate"] = [(optimizer.param_groups[0]["lr"] * 2,)]
            return loss.detach()

        captured = capture(step, state={"model": model, "optimizer": optimizer})
        for _ in range(4):
            loss = captured(torch.ones(2, 4))
            saved = io.BytesIO()
            torch.save([optimizer.state_dict(), schedule.state_dict(), kept], saved)
            saved.seek(0)
            states = torch.load(saved)
            yield [loss, json.loads(json.dumps(states[1:])), states[0]["param_groups"]]
        return {"model": model}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a step that changes a rate is refused
        check_right(script)


def of_float(name: str, base: Any = float) -> Any:
    """A class of floats with a method of its own, which computes otherwise."""

    def method(self: Any, *others: Any) -> Any:
        return 3 * getattr(base, name)(self, *others)

    return type("Own", (base,), {name: method})


@pytest.mark.ranks(1)
@pytest.mark.parametrize("base", [float, np.float64])
@pytest.mark.parametrize("name", ["__neg__", "__mul__", "__rmul__", "__add__", "__rsub__", "__pow__", "__rtruediv__"])
def test_a_rate_of_a_class_that_computes_otherwise(name: str, base: Any) -> None:
    own = of_float(name, base)

    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.SGD([weight], lr=0.1)

        def step(x: Tensor) -> Tensor:
            for group in optimizer.param_groups:
                rate = group["lr"]
                with torch.no_grad():
                    group["params"][0].add_(
                        x, alpha=-rate * 0.5 + 2 * rate + (1 - rate) + 1 / rate + rate**2 + (rate + 1)
                    )
            return x * 2

        captured = capture(step, state=[weight, optimizer])
        for i in range(16):
            rate = 0.1 / (1 + i)
            optimizer.param_groups[0]["lr"] = own(rate) if i in (8, 9, 10) else rate
            yield captured(torch.ones(4)), weight
        return {}

    check_right(script, replays=6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("other", [1, torch.tensor(0.5), "0.5", None, np.float64(0.25)], ids=repr)
def test_a_rate_of_another_type(other: Any) -> None:
    rates = [other if i in (8, 9) else 0.1 / (1 + i) for i in range(14)]
    check_right(following(sgd_step, rates=rates, raises=Exception), replays=6)
