"""Regions that are equal share a plan without a recording of each; one that differs in anything has its own."""

import gc
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Llama, Sizes, cross_entropy, token_batches
from oracle import ORACLE_ONLY, Calls, Capture, Run, check_same, over, run, run_eager
from test_regions import region, trained
from torch import Tensor, nn

BLOCKS = 6
ODD = 4  # the number of the block that is not as the others
CALLS = 12
FACTORS: dict[Any, float] = {}
FIRST: list[Any] = []


@dataclass
class Config:
    power: int = 2
    scale: float = 0.5


class Part(nn.Module):
    """A module inside of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x))


class OtherPart(Part):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sin()


class Block(nn.Module):
    """A block that depends on values of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Part(), Part()
        self.register_buffer("shift", torch.full((8,), 0.25))
        self.register_buffer("parts", self.shift.new_ones(2, 8))
        self.config = Config()
        self.settings = {"gain": 1.5, "act": torch.tanh}
        self.weights = [1.0, 0.5]
        self.sign = 0.0
        self.mode = "add"
        self.kind = torch.float32
        self.options = SimpleNamespace(deep=[1, 2])
        self.names = {"one"}
        self.bend: Callable[[Tensor], Tensor] = torch.relu

    def forward(self, x: Tensor) -> Tensor:
        h = self.settings["act"](self.one(x)) * self.settings["gain"]
        h = self.bend(self.two(h)).to(self.kind) ** self.config.power * self.config.scale
        h = h + self.shift + self.parts.sum(0) * self.weights[0] * self.options.deep[0]
        h = h * FACTORS.get(self, 1.0) + (FIRST[0].config.scale if FIRST else 0.0)
        h = torch.copysign(h, torch.full_like(h, self.sign)) * len(self.names)
        h = h.to(x.dtype)
        return x + h * self.weights[1] if self.mode == "add" else x - h


class OtherBlock(Block):
    """The same code."""


def negated(block: Block) -> None:
    block.sign = -0.0


def hooked(block: Block) -> None:
    block.one.register_forward_hook(lambda module, args, result: result * 2)


def hooked_before(block: Block) -> None:
    block.two.linear.register_forward_pre_hook(lambda module, args: (args[0] + 1,))


def hooked_backward(block: Block) -> None:
    block.two.register_full_backward_hook(lambda module, given, made: (given[0] * 2,))


def in_one_memory(block: Block) -> None:
    memory = torch.full((3, 8), 0.25)
    block.shift, block.parts = memory[0].detach(), memory[:2].detach()


def elsewhere_in_memory(block: Block) -> None:
    block.parts = torch.full((3, 8), 1.0)[1:]


def with_attribute(block: Block) -> None:
    block.one.linear.weight.tag = 1  # type: ignore[attr-defined]


def patched(block: Block) -> None:
    block.two.forward = lambda x: x * 2  # type: ignore[method-assign]


def tied(block: Block) -> None:
    block.two.linear.weight = block.one.linear.weight


def with_one_part(block: Block) -> None:
    block.two = block.one


def registered(block: Block) -> None:
    FACTORS[block] = 3.0


def set_item(path: str, key: Any, value: Any) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        getattr(block, path)[key] = value

    return change


def set_value(path: str, value: Any) -> Callable[[Block], None]:
    def change(block: Block) -> None:
        *holders, name = path.split(".")
        holder: Any = block
        for each in holders:
            holder = getattr(holder, each)
        setattr(holder, name, value() if type(value) is partial else value)

    return change


DIFFERENCES: dict[str, Callable[[Block], None]] = {
    "number": set_value("config.scale", 0.75),
    "sign of zero": negated,
    "class of a number": set_value("config.power", 2.0),
    "boolean in place of a number": set_item("weights", 0, True),
    "text": set_value("mode", "subtract"),
    "dtype": set_value("kind", torch.float64),
    "item of a list": set_item("weights", 1, 0.25),
    "entry of a dict": set_item("settings", "gain", 2.5),
    "function in a dict": set_item("settings", "act", torch.sigmoid),
    "one more entry": set_item("settings", "more", 1),
    "attribute of a namespace": set_value("options", partial(SimpleNamespace, deep=[3, 2])),
    "set": set_value("names", partial(set, ("one", "two"))),
    "function": set_value("bend", F.silu),
    "function of its own": set_value("bend", lambda h: h * h),
    "one more attribute": set_value("more", 1),
    "class of an attribute": set_value("config", partial(SimpleNamespace, power=2, scale=0.5)),
    "module": set_value("two", partial(OtherPart)),
    "probability": set_value("one.dropout.p", 0.5),
    "training": lambda block: block.one.eval() and None,
    "forward hook": hooked,
    "forward hook before": hooked_before,
    "backward hook": hooked_backward,
    "frozen parameter": lambda block: block.one.linear.requires_grad_(False) and None,
    "dtype of a buffer": set_value("shift", partial(torch.full, (8,), 0.25, dtype=torch.float64)),
    "strides": set_value("parts", partial(lambda: torch.ones(8, 2).t())),
    "shared memory": in_one_memory,
    "shared parameter": tied,
    "shared module": with_one_part,
    "attribute of a parameter": with_attribute,
    "forward of its own": patched,
    "entry of a registry": registered,
}


def blocks(change: Callable[[Block], object], first: Callable[[list[Block]], object] = len) -> nn.Sequential:
    made = [Block() for _ in range(BLOCKS)]
    change(made[ODD])
    first(made)
    return nn.Sequential(*made)


def script(capture: Capture, make: Callable[[], nn.Module], **options: Any) -> Calls:
    model = make()
    batches = [torch.randn(4, 8, dtype=torch.float64) for _ in range(CALLS)]
    for block in model:
        capture(block)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x.float()).tanh().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return over(lambda fn, **_: fn, step, batches, state={"model": model}, **options)


def compared(make: Callable[[], nn.Module], **options: Any) -> Run:
    def once(capture: Capture) -> Calls:
        FACTORS.clear()
        FIRST.clear()
        return script(capture, make, **options)

    expected, found = run_eager(once), run(once, region)
    check_same(expected, found)
    return found


def taken_over(found: Run, eager: int = 2) -> list[int]:
    """The blocks that no recording was made of: all calls but the first ones were replayed."""
    return [i for i, handle in enumerate(found.steps) if handle.stats.replays == CALLS - eager]


def test_equal_blocks_take_a_plan_over() -> None:
    found = compared(partial(blocks, lambda block: None))
    if not ORACLE_ONLY:
        # The input of the first block needs no gradient: it is another kind.
        assert taken_over(found) == [3, 4, 5]
        assert [handle.stats.recordings for handle in found.steps] == [1, 1, 0, 0, 0, 0]
        replayed = [handle.stats.backward.replays for handle in found.steps]
        assert min(replayed) >= CALLS - 7, replayed


@pytest.mark.sampled(4)
@pytest.mark.parametrize("difference", DIFFERENCES)
def test_a_block_that_differs_is_recorded_itself(difference: str) -> None:
    found = compared(partial(blocks, DIFFERENCES[difference]))
    if not ORACLE_ONLY:
        others = {3, 5} if difference != "entry of a registry" else set()
        assert others <= {*taken_over(found)} and ODD not in taken_over(found)
        stats = [handle.stats for handle in found.steps]
        assert all(each.replays >= CALLS - 6 and not each.refusals for i, each in enumerate(stats) if i != ODD)


def change_later(block: Block) -> None:
    block.weights[0] = 4.0


def test_a_value_that_changes_later_is_found() -> None:
    made: list[nn.Sequential] = []

    def make() -> nn.Sequential:
        made[:] = [blocks(lambda block: None)]
        return made[0]

    found = compared(make, before={8: lambda: change_later(made[0][ODD])})
    if not ORACLE_ONLY:
        misses = [sum(handle.stats.guard_misses.values()) for handle in found.steps]
        assert misses[ODD] > misses[3] == misses[5]


def test_objects_of_one_block_that_all_blocks_reach_are_found() -> None:
    """The blocks read a number of the second one, which is the first of its kind to be recorded."""
    made: list[nn.Sequential] = []

    def make() -> nn.Sequential:
        made[:] = [blocks(lambda block: None, lambda made: FIRST.append(made[1]))]
        return made[0]

    compared(make, before={7: lambda: set_value("config.scale", 0.125)(made[0][1])})


def test_modules_that_blocks_share() -> None:
    """A parameter, a module and a configuration that several blocks have: gradients are those of eager."""

    def share(made: list[Block]) -> None:
        for block in made[1:]:
            block.config = made[0].config
            block.two = made[0].two
        made[3].one.linear.weight = made[5].one.linear.weight

    found = compared(partial(blocks, lambda block: None, share))
    if not ORACLE_ONLY:
        assert 4 in taken_over(found)


@pytest.mark.parametrize("odd", [False, True])
def test_equal_blocks_under_an_autocast(odd: bool) -> None:
    """Autocast keeps the casts of parameters, which the blocks get as arguments."""

    def once(capture: Capture) -> Calls:
        FACTORS.clear()
        FIRST.clear()
        model = blocks(DIFFERENCES["number"] if odd else lambda block: None)
        for block in model:
            capture(block)
        for _ in range(CALLS):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(torch.randn(4, 8)).tanh().sum()
            loss.backward()
            yield [loss.detach(), *(parameter.grad for parameter in model.parameters())]
            model.zero_grad()
        return model

    expected, found = run_eager(once), run(once, region)
    check_same(expected, found)
    if not ORACLE_ONLY:
        # The casts are known once a call was looked at.
        assert {3, 5} <= {*taken_over(found, 3)} and (ODD in taken_over(found, 3)) != odd


def test_each_directory_has_its_plans(tmp_path: Path) -> None:
    """Two models at once, equal but for the directories of their plans: neither takes a plan over from the other."""

    def once(capture: Capture) -> Calls:
        FACTORS.clear()
        FIRST.clear()
        models = [blocks(lambda block: None) for _ in range(2)]
        for number, model in enumerate(models):
            for block in model:
                capture(block, plans=tmp_path / str(number))
        for _ in range(CALLS):
            losses = [model(torch.randn(4, 8)).sum() for model in models]
            sum(losses).backward()
            yield [loss.detach() for loss in losses]
        return nn.ModuleList(models)

    expected, found = run_eager(once), run(once, region)
    check_same(expected, found)
    if not ORACLE_ONLY:
        plans = [sorted(path.parts[-3:] for path in (tmp_path / each).rglob("*.rote")) for each in "01"]
        assert plans[0] == plans[1] and plans[0]


def test_another_class_with_the_same_code() -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(*(OtherBlock() if i == ODD else Block() for i in range(BLOCKS)))

    found = compared(make)
    if not ORACLE_ONLY:
        assert {3, 5} <= {*taken_over(found)} and ODD not in taken_over(found)


def test_training_and_evaluation() -> None:
    """Each variant is taken over by itself."""

    def once(capture: Capture) -> Calls:
        FACTORS.clear()
        FIRST.clear()
        model = blocks(lambda block: None)
        for block in model:
            block.one.dropout.p = 0.5
            capture(block)

        def step(x: Tensor) -> Tensor:
            if len(seen) % 2:
                with torch.no_grad():
                    result: Tensor = model.eval()(x)
                return result
            loss = model.train()(x).tanh().sum()
            loss.backward()
            return loss.detach()

        seen: list[Tensor] = []
        for _ in range(2 * CALLS):
            seen.append(step(torch.randn(4, 8)))
            yield seen[-1]
        return model

    expected, found = run_eager(once), run(once, region)
    check_same(expected, found)
    for handle in found.steps if not ORACLE_ONLY else []:
        assert handle.stats.replays >= 2 * CALLS - 10


def test_a_backward_that_is_not_replayed_uses_what_its_own_forward_has_saved() -> None:
    """Gradients of other strides at each call: the backwards run over the graph that equal blocks share."""

    def once(capture: Capture) -> Calls:
        FACTORS.clear()
        FIRST.clear()
        model = blocks(lambda block: None)
        for block in model:
            capture(block)
        for call in range(CALLS):
            x = torch.randn(4, 8)
            hidden = [model[0](x)]
            for block in model[1:]:
                hidden.append(block(hidden[-1]))
            weight = torch.randn(4 + call, 8)[:4] if call % 2 else torch.randn(8, 4 + call).t()[:4]
            sum((each * weight).sum() for each in reversed(hidden)).backward()
            yield [parameter.grad.clone() for parameter in model.parameters()]
            model.zero_grad()
        return model

    expected, found = run_eager(once), run(once, region)
    check_same(expected, found)


def test_a_block_may_go_before_the_others() -> None:
    """The block that was recorded goes; the others train on, and the captured functions of all can go."""

    def once(capture: Capture) -> Calls:
        sizes = Sizes(layers=5)
        model = Llama(sizes)
        calls = trained(capture, model, token_batches(sizes, CALLS), lambda model: model.layers, cross_entropy)
        for number, found in enumerate(calls):
            yield found
            if number == 6:
                del model.layers[1]
        return model

    expected, found = run_eager(once), run(once, region)
    check_same(expected, found)
    gone = [weakref.ref(handle._module) for handle in found.steps if not ORACLE_ONLY]
    found.steps.clear()
    gc.collect()
    assert all(reference() is None for reference in gone)
