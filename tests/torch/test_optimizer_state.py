"""What an optimizer holds is guarded through `state=`, wherever the step gets the optimizer from."""

import copy
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn

CALLS = 16
Train = Callable[[Tensor], Tensor]
SOURCE = """
def train(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


def found_by(find: Callable[[], Any], model: nn.Module) -> Train:
    def train(x: Tensor) -> Tensor:
        optimizer = find()
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return train


def in_a_closure(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    return found_by(lambda: optimizer, model)


def in_text(model: nn.Module, optimizer: torch.optim.Optimizer, **names: Any) -> Train:
    names |= {"model": model, "optimizer": optimizer}
    exec(SOURCE, names)
    found: Train = names["train"]
    return found


def in_text_that_says_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    return in_text(model, optimizer, __name__="torch.optim.own")


def deep(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    held = Holder(optimizer)
    for _ in range(15):
        held = Holder(held)

    def find() -> Any:
        found: Any = held
        while isinstance(found, Holder):
            found = found.held
        return found

    return found_by(find, model)


def in_a_dataset(model: nn.Module, optimizer: torch.optim.Optimizer) -> Train:
    data = torch.utils.data.TensorDataset(torch.ones(1))
    data.optimizer = optimizer  # type: ignore[attr-defined]

    return found_by(lambda: data.optimizer, model)  # type: ignore[attr-defined]


WAYS = [in_a_closure, in_text, in_text_that_says_torch, deep, in_a_dataset]


def loads(optimizer: Any, kept: Any) -> None:
    optimizer.load_state_dict(kept)


def replaces_a_buffer(optimizer: Any, kept: Any) -> None:
    entries = next(iter(optimizer.state.values()))
    key = next(key for key, value in entries.items() if isinstance(value, Tensor))
    entries[key] = entries[key] + 1


def replaces_the_state(optimizer: Any, kept: Any) -> None:
    optimizer.state = type(optimizer.state)(
        optimizer.state.default_factory, {p: copy.deepcopy(entries) for p, entries in optimizer.state.items()}
    )


def clears_the_state(optimizer: Any, kept: Any) -> None:
    optimizer.state.clear()


def replaces_the_groups(optimizer: Any, kept: Any) -> None:
    optimizer.param_groups = [{**group, "lr": 0.5} for group in optimizer.param_groups]


def replaces_the_parameters(optimizer: Any, kept: Any) -> None:
    optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]


def takes_all_attributes_of_another(optimizer: Any, kept: Any) -> None:
    optimizer.__dict__ = {
        **vars(optimizer),
        "param_groups": [{**group, "lr": 0.25} for group in optimizer.param_groups],
    }


CHANGES = [
    loads,
    replaces_a_buffer,
    replaces_the_state,
    clears_the_state,
    replaces_the_groups,
    replaces_the_parameters,
    takes_all_attributes_of_another,
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_what_an_optimizer_holds(way: Callable[..., Train], change: Callable[[Any, Any], None]) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        step = capture(way(model, optimizer), state={"model": model, "optimizer": optimizer})
        kept: Any = None
        for call in range(CALLS):
            if call == 2:
                kept = copy.deepcopy(optimizer.state_dict())
            if call in (7, 12):
                change(optimizer, kept)
            yield [step(torch.randn(3, 4)), copy.deepcopy([*optimizer.state.values()])]
        return {"model": model, "state": [*optimizer.state.values()]}

    check_right(script, replays=3)


@pytest.mark.parametrize("kind", ["SGD", "Adadelta", "Adagrad", "Adam", "RMSprop", "Rprop"])
def test_function_that_an_optimizer_calls_by_name_is_replaced(kind: str) -> None:
    """`step` is wrapped, and names the function inside."""
    file = sys.modules[getattr(torch.optim, kind).__module__]
    name = kind.lower()

    def halved(params: list[Tensor], grads: list[Tensor], *rest: Any, **options: Any) -> None:
        for param in params:
            param.mul_(0.5)

    def script(capture: Capture) -> Calls:
        torch.manual_seed(3)
        model = nn.Linear(4, 2)
        options = {"fused": True} if "Ada" in kind and kind != "Adadelta" else {}
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)
        step = capture(in_a_closure(model, optimizer), state={"model": model, "optimizer": optimizer})
        with pytest.MonkeyPatch.context() as patch:
            for call in range(CALLS):
                if call == 6:
                    patch.setattr(file, name, halved)
                if call == 11:
                    patch.undo()
                yield step(torch.ones(3, 4) * call)
        return {"model": model}

    run = check_right(script)
    if not ORACLE_ONLY and kind in ("SGD", "Adagrad", "Adam"):
        assert run.stats[5][0].replays, run.stats[5][0]


class Mixing(torch.optim.Optimizer):
    """One of the user's own, which keeps numbers in containers."""

    def __init__(self, parameters: Any, kept: Callable[[], Any]) -> None:
        super().__init__(parameters, {})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["kept"] = kept()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]["kept"]
                parameter.add_(parameter.grad, alpha=-(kept.held if isinstance(kept, Holder) else kept[0]))


@pytest.mark.parametrize("kept", [lambda: [0.1], lambda: {0: 0.1}, lambda: Holder(0.1)], ids=["list", "dict", "object"])
def test_numbers_that_change_inside_an_optimizers_state(kept: Callable[[], Any]) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Mixing(model.parameters(), kept)
        step = capture(in_a_closure(model, optimizer), state={"model": model, "optimizer": optimizer})
        for call in range(12):
            for entries in optimizer.state.values() if call == 7 else ():
                if isinstance(entries["kept"], Holder):
                    entries["kept"].held = 0.5
                else:
                    entries["kept"][0] = 0.5
            yield step(torch.randn(2, 4))
        return {"model": model}

    check_right(script, replays=6)
