"""PyTorch's optimizers with their defaults read a step counter on the host: a replay computes what follows from it."""

import copy
import importlib
import math
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import inputs, mesh, mlp, training
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over, rote_capture
from torch import Tensor, nn
from torch.optim import adam

Make = Callable[[Any], torch.optim.Optimizer]
# What a script does to the model and the optimizer before the call of a number.
Between = Callable[[int, nn.Module, torch.optim.Optimizer], None]

OPTIMIZERS: dict[str, Make] = {
    "Adafactor": lambda p: torch.optim.Adafactor(p),
    "Adafactor, clipping": lambda p: torch.optim.Adafactor(p, lr=0.3, d=1.5, beta2_decay=-0.5, eps=(1e-20, 0.2)),
    "Adafactor, maximizing": lambda p: torch.optim.Adafactor(p, maximize=True, weight_decay=0, eps=(None, 1)),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p),
    "Adagrad, decaying": lambda p: torch.optim.Adagrad(p, lr_decay=0.1, weight_decay=0.01),
    "Adam": lambda p: torch.optim.Adam(p),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.01, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "ASGD": lambda p: torch.optim.ASGD(p),
    "ASGD, averaging": lambda p: torch.optim.ASGD(p, lambd=0.01, t0=6, alpha=0.5, weight_decay=0.01),
    "ASGD, slowly": lambda p: torch.optim.ASGD(p, lambd=1e-9),
    "Muon": lambda p: torch.optim.Muon([each for each in p if each.dim() == 2]),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "NAdam, decoupled": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "RAdam, decoupled": lambda p: torch.optim.RAdam(p, decoupled_weight_decay=True, weight_decay=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.9),
    "Rprop": lambda p: torch.optim.Rprop(p),
    "SGD": lambda p: torch.optim.SGD(p, momentum=0.9),
}
# These read nothing.
READ_NOTHING = ("Adadelta", "Muon", "RMSprop", "Rprop", "SGD")


def with_lists(name: str, parameters: Any) -> torch.optim.Optimizer:
    """The form that works on lists of tensors."""
    optimizer = OPTIMIZERS[name](parameters)
    for group in optimizer.param_groups:
        if "foreach" in group:
            group["foreach"] = True
    return optimizer


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def nothing(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def loop(make: Make, calls: int, between: Between = nothing) -> Callable[[Capture], Calls]:
    """A script that trains the small model."""

    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = make(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        step = capture(training(model, optimizer), state=state)
        for i, x in enumerate(inputs(calls, 4, 8)):
            between(i, model, optimizer)
            yield step(x)
        return state

    return script


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("form", ["one by one", "lists"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_with_its_defaults(name: str, form: str, dtype: torch.dtype) -> None:
    make = OPTIMIZERS[name] if form == "one by one" else lambda p: with_lists(name, p)

    def script(capture: Capture) -> Calls:
        torch.set_default_dtype(dtype)
        try:
            model = small()
            optimizer = make(list(model.parameters()))
            state = {"model": model, "optimizer": optimizer}
            step = capture(training(model, optimizer), state=state)
            for x in inputs(32, 4, 8):
                yield step(x.to(dtype))
            return state
        finally:
            torch.set_default_dtype(torch.float32)

    check_equal(script, replays=20)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "Adamax", "ASGD"])
def test_on_sharded_parameters(name: str) -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = OPTIMIZERS[name](model.parameters())
        state = {"model": model, "optimizer": optimizer}
        return over(capture, training(model, optimizer), inputs(30, 4, 8), state=state)

    check_equal(script)


# What scripts do to an optimizer between two steps.
Change = Callable[[nn.Module, Any, random.Random], None]


def other_rate(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    for group in optimizer.param_groups:
        group["lr"] = draw.choice([0.1, 0.01, 1e-3, 0.5])


def counters_set(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    for held in optimizer.state.values():
        if "step" in held:
            held["step"].fill_(draw.choice([0, 1, 5, 6, 400, 50_000, 2**24 - 2]))


def one_counter_set(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    held = draw.choice([*optimizer.state.values(), {}])
    if "step" in held:
        held["step"] += draw.choice([1, 0.5, 1000])


def any_number_set(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    held = draw.choice([*optimizer.state.values(), {}])
    scalars = [value for value in held.values() if isinstance(value, Tensor) and value.dim() == 0]
    if scalars:
        draw.choice(scalars).fill_(draw.choice([1.0, 0.5, 0.25, 3.0]))


def one_frozen(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    parameter = draw.choice(list(model.parameters()))
    parameter.requires_grad_(not parameter.requires_grad)
    if not any(each.requires_grad for each in model.parameters()):
        parameter.requires_grad_(True)


def loaded(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def counters_replaced(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    for held in optimizer.state.values():
        if "step" in held:
            held["step"] = held["step"] + draw.choice([0, 3])


def counters_shared(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    states = [held for held in optimizer.state.values() if "step" in held]
    for held in states[1:]:
        held["step"] = states[0]["step"]


def other_beta(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    for group in optimizer.param_groups:
        if "betas" in group:
            group["betas"] = draw.choice([(0.9, 0.999), (0.8, 0.9), (0.0, 0.5)])


def state_dropped(model: nn.Module, optimizer: Any, draw: random.Random) -> None:
    if not isinstance(optimizer, torch.optim.Adagrad):  # makes its state once, in some versions
        optimizer.state.clear()


CHANGES: list[Change] = [
    other_rate,
    counters_set,
    one_counter_set,
    any_number_set,
    one_frozen,
    loaded,
    counters_replaced,
    counters_shared,
    other_beta,
    state_dropped,
]


@pytest.mark.sampled(5)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__ for change in CHANGES])
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name not in READ_NOTHING])
def test_changed_between_steps(name: str, change: Change) -> None:
    """Each change some calls apart, and then at each call."""

    def script(capture: Capture) -> Calls:
        draw = random.Random(hash_of(name))

        def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if i > 8 and (i % 6 == 0 or i > 34):
                change(model, optimizer, draw)

        return loop(OPTIMIZERS[name], 40, between)(capture)

    check_right(script, replays=3)


def hash_of(name: str) -> int:
    return sum(map(ord, name))


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("seed", range(30))
def test_changed_at_random(seed: int) -> None:
    def script(capture: Capture) -> Calls:
        draw = random.Random(seed)
        model = small()
        name = draw.choice([name for name in OPTIMIZERS if name not in READ_NOTHING])
        make = draw.choice([OPTIMIZERS[name], lambda p: with_lists(name, p)])
        halves = list(model.parameters())[:2], list(model.parameters())[2:]
        groups = [{"params": half, "lr": draw.choice([0.1, 0.01])} for half in halves]
        optimizer = make(groups if draw.random() < 0.5 else list(model.parameters()))
        state = {"model": model, "optimizer": optimizer}
        step = capture(training(model, optimizer), state=state)
        for x in inputs(60, 4, 8):
            if draw.random() < 0.2:
                draw.choice(CHANGES)(model, optimizer, draw)
            yield step(x)
        return state

    check_right(script)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "RAdam", "NAdam", "ASGD"])
def test_a_plan_that_is_found_in_the_store(name: str, trust: bool, tmp_path: Path) -> None:
    """A second session finds the plan of the first one, after more steps than that has seen."""

    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = OPTIMIZERS[name](model.parameters())
        state = {"model": model, "optimizer": optimizer}
        train_step = training(model, optimizer)
        xs = list(inputs(30, 4, 8))
        for part in (xs[:15], xs[15:]):
            step = capture(train_step, state=state, plans=tmp_path, trust_plans=trust)
            for x in part:
                yield step(x)
        return state

    def captured(fn: Any, *, state: Any = None, **options: Any) -> Any:
        return rote_capture(fn, state=state, strict=True, **options)

    found = check_right(script, captured)
    assert ORACLE_ONLY or found.steps[1].stats.replays >= (15 if trust else 14), found.steps[1].stats


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_loop_of_ones_own_that_reads_a_counter() -> None:
    """Only the code of PyTorch's optimizers is known to do no more than arithmetic with the number."""

    def script(capture: Capture) -> Calls:
        model = small()
        counter = torch.zeros(())

        def train_step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            counter.add_(1)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= parameter.grad * (0.1 / counter.item())
                    parameter.grad = None
            return loss.detach()

        state = {"model": model, "counter": counter}
        return over(capture, train_step, inputs(8, 4, 8), state=state, tail=False)

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays == 0
        assert "_local_scalar_dense" in found.steps[0].stats.refusals[0]


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_read_that_the_script_has_replaced() -> None:
    own = torch.Tensor.item
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "item", lambda tensor: own(tensor) + 1)
        check_right(loop(OPTIMIZERS["Adam"], 12))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", ["adam._get_value", "adam._single_tensor_adam", "asgd._get_value", "torch.as_tensor"])
def test_a_function_that_is_replaced_between_two_steps(name: str) -> None:
    module, function = name.split(".")
    owner = torch if module == "torch" else importlib.import_module(f"torch.optim.{module}")
    own = getattr(owner, function)

    def replaced(*args: Any, **kwargs: Any) -> Any:
        result = own(*args, **kwargs)
        return result if result is None else result * 2

    with pytest.MonkeyPatch.context() as patch:

        def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            patch.setattr(owner, function, own if i % 8 < 6 else replaced)

        check_right(loop(OPTIMIZERS["ASGD" if "asgd" in name or "torch" in name else "Adam"], 16, between))


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "ASGD"])
def test_counters_that_drift_apart_once(name: str) -> None:
    """A few recordings later all calls are replayed again."""

    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if i == 12:
            next(iter(optimizer.state.values()))["step"].fill_(40.0)

    check_right(loop(OPTIMIZERS[name], 40, between), replays=28)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", ["ASGD", "ASGD, averaging"])
def test_a_branch_that_a_counter_takes_now_and_then(name: str) -> None:
    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if i > 8 and i % 4 == 0:
            for held in optimizer.state.values():
                held["mu"].fill_(0.5)

    check_right(loop(OPTIMIZERS[name], 60, between), replays=25)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize(
    ("kind", "says"),
    [("bf16", "one f32 or f64"), ("view", "one f32 or f64"), ("rate", r"param_groups\[0\]\['lr'\] is a .*Rate")],
)
def test_a_refusal_names_the_counter(kind: str, says: str) -> None:
    class Rate(float):
        pass

    def between(i: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if i == 1 and kind != "rate":
            for held in optimizer.state.values():
                held["step"] = torch.ones(2)[1] if kind == "view" else held["step"].bfloat16()

    rate = Rate(0.1) if kind == "rate" else 0.1
    found = check_right(loop(lambda p: torch.optim.Adam(p, lr=rate), 8, between))
    if not ORACLE_ONLY:
        refusal = found.steps[0].stats.refusals[-1]
        assert re.search(rf"Adam reads optimizer.state\[0.weight\].step on the host.*{says}", refusal), refusal


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_counters_that_drift_apart_after_a_plan_was_trusted(tmp_path: Path) -> None:
    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        for part in range(2):
            step = capture(training(model, optimizer), state=state, plans=tmp_path, trust_plans=True)
            for i, x in enumerate(inputs(14, 4, 8)):
                if part and i == 4:
                    next(iter(optimizer.state.values()))["step"].fill_(77)
                yield step(x)
        return state

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[1].stats.replays >= 10, found.steps[1].stats


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("function", ["_get_value", "_single_tensor_adam"])
def test_a_function_of_the_optimizer_that_is_replaced(function: str) -> None:
    """What it does with the number is not known."""
    own = vars(adam)[function]
    seen: list[float] = []

    def replaced(*args: Any, **kwargs: Any) -> Any:
        if function == "_get_value":
            return math.floor(own(*args, **kwargs) / 5) * 5 + 5
        seen.append(kwargs.get("lr", args[0]))
        return own(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adam, function, replaced)
        check_right(loop(OPTIMIZERS["Adam"], 20))
