"""A step that reads tensors and puts others in their place, for its next call."""

import collections
import dataclasses
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import update
from oracle import ORACLE_ONLY, Capture, check_equal, check_equal_with_each, check_right, rote_capture
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CALLS = 28


class Normed(nn.Module):
    """Norms by a mean that it has seen: each forward puts another buffer in its place."""

    mean: Tensor

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.register_buffer("mean", torch.zeros(8), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.mean(0).detach()
        return y - self.mean


class Average:
    """An average of parameters, as scripts have it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.shadow = {name: parameter.data.clone() for name, parameter in model.named_parameters()}

    def update(self) -> None:
        for name, parameter in self.model.named_parameters():
            average = 0.1 * parameter.data + 0.9 * self.shadow[name]
            self.shadow[name] = average.clone()


class Trainer:
    """``held`` is what the step carries."""

    def __init__(self) -> None:
        self.net = self.model()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.held: Any = self.first()
        self.other: Any = None

    def model(self) -> nn.Module:
        return nn.Linear(4, 8)

    def first(self) -> Any:
        return torch.zeros(8)

    def train(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return update(self.net, self.optimizer, x)

    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + self.held.mean())
        self.held = y.detach().mean(0)
        return loss

    def seen(self) -> Any:
        return self.held


class Recurrent(Trainer):
    def model(self) -> nn.Module:
        return nn.GRUCell(4, 8)

    def first(self) -> Any:
        return torch.zeros(3, 8)

    def step(self, x: Tensor) -> Any:
        self.optimizer.zero_grad()
        new = self.net(x, self.held)
        loss = new.square().mean()
        loss.backward()
        self.optimizer.step()
        self.held = new.detach()
        return loss.detach()


class RecurrentOfTwo(Trainer):
    def model(self) -> nn.Module:
        return nn.LSTMCell(4, 8)

    def first(self) -> Any:
        return torch.zeros(3, 8), torch.zeros(3, 8)

    def step(self, x: Tensor) -> Any:
        self.optimizer.zero_grad()
        new = self.net(x, self.held)
        loss = new[0].square().mean()
        loss.backward()
        self.optimizer.step()
        self.held = tuple(each.detach() for each in new)
        return loss.detach()


class FromNothing(RecurrentOfTwo):
    def first(self) -> Any:
        return None


class OfAList(RecurrentOfTwo):
    def step(self, x: Tensor) -> Any:
        self.held = tuple(self.held)
        loss = super().step(x)
        self.held = list(self.held)
        return loss


class OfADict(RecurrentOfTwo):
    def step(self, x: Tensor) -> Any:
        self.held = tuple(self.held.values()) if isinstance(self.held, dict) else self.held
        loss = super().step(x)
        self.held = {"h": self.held[0], "c": self.held[1]}
        return loss


class Items(Trainer):
    def first(self) -> Any:
        return [torch.zeros(8), torch.ones(8)]

    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + self.held[0].mean())
        self.held[0] = self.held[1]
        self.held[1] = y.detach().mean(0)
        return loss

    def seen(self) -> Any:
        return list(self.held)


class Window(Items):
    """The last two of what was seen."""

    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + sum(self.held).mean())
        self.held.append(y.detach().mean(0))
        self.held.pop(0)
        return loss


class Closure(Trainer):
    def __init__(self) -> None:
        super().__init__()
        before = torch.zeros(8)

        def step(x: Tensor) -> Any:
            nonlocal before
            loss, y = self.train(x + before.mean())
            before = y.detach().mean(0)
            return loss

        def seen() -> Any:
            return before

        vars(self).update(step=step, seen=seen)


class Buffer(Trainer):
    def model(self) -> nn.Module:
        return Normed()

    def step(self, x: Tensor) -> Any:
        return self.train(x)[0]

    def seen(self) -> Any:
        return self.net.mean, self.net.state_dict(), dict(self.net.named_buffers())


class BufferThatIsNotSaved(Buffer):
    def model(self) -> nn.Module:
        return Normed(persistent=False)


class AverageOfParameters(Trainer):
    def first(self) -> Any:
        return Average(self.net)

    def step(self, x: Tensor) -> Any:
        loss, _ = self.train(x)
        self.held.update()
        return loss

    def seen(self) -> Any:
        return dict(self.held.shadow)


class Momentum(Trainer):
    """An optimizer by hand, whose dict has parameters as keys."""

    def first(self) -> Any:
        return {parameter: torch.zeros_like(parameter) for parameter in self.net.parameters()}

    def step(self, x: Tensor) -> Any:
        loss = self.net(x).square().mean()
        gradients = torch.autograd.grad(loss, list(self.net.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(self.net.parameters(), gradients, strict=True):
                self.held[parameter] = 0.9 * self.held[parameter] + gradient
                parameter -= 0.1 * self.held[parameter]
        return loss.detach()

    def seen(self) -> Any:
        return list(self.held.values())


class Total(Trainer):
    def first(self) -> Any:
        return {"loss": torch.zeros(())}

    def step(self, x: Tensor) -> Any:
        loss, _ = self.train(x)
        self.held["loss"] = self.held["loss"] + loss
        return loss

    def seen(self) -> Any:
        return dict(self.held)


class DefaultDict(Total):
    def first(self) -> Any:
        return collections.defaultdict(int, {"loss": torch.zeros(())})


class Swapped(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.other = torch.ones(8)

    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + self.held.mean() - self.other.mean())
        self.held, self.other = self.other, self.held + y.detach().mean(0)
        return loss

    def seen(self) -> Any:
        return self.held, self.other


class Returned(Trainer):
    def step(self, x: Tensor) -> Any:
        before = self.held
        return super().step(x), before, self.held


class Before(Trainer):
    def step(self, x: Tensor) -> Any:
        self.other = self.held
        return super().step(x)

    def seen(self) -> Any:
        return self.held, self.other


class WrittenFirst(Trainer):
    def step(self, x: Tensor) -> Any:
        self.held.add_(1)
        return super().step(x)


class OfAView(Trainer):
    def first(self) -> Any:
        return torch.zeros(3, 8)

    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + self.held.mean())
        self.held = torch.cat([self.held, y.detach()])[3:]
        return loss


class ByVars(Trainer):
    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + self.held.mean())
        vars(self)["held"] = y.detach().mean(0)
        return loss


class ByData(Trainer):
    """It goes on with what it has, or begins anew."""

    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + self.held.mean())
        self.held = y.detach().mean(0) if self.held.sum() < 0.5 else torch.zeros(8)
        return loss


module_held: Any = None


class OfTheModule(Trainer):
    def first(self) -> Any:
        globals()["module_held"] = torch.zeros(8)

    def step(self, x: Tensor) -> Any:
        global module_held
        loss, y = self.train(x + module_held.mean())
        module_held = y.detach().mean(0)
        return loss

    def seen(self) -> Any:
        return module_held


class OfAClass(Trainer):
    """The interpreter keeps where the attributes of classes are."""

    kept: Any = None

    def first(self) -> Any:
        type(self).kept = torch.zeros(8)

    def step(self, x: Tensor) -> Any:
        loss, y = self.train(x + self.kept.mean())
        type(self).kept = y.detach().mean(0)
        return loss

    def seen(self) -> Any:
        return self.kept, type(self).kept


class SwappedWithAClass(OfAClass):
    def first(self) -> Any:
        super().first()
        globals()["module_held"] = torch.ones(8)

    def step(self, x: Tensor) -> Any:
        global module_held
        loss, y = self.train(x + self.kept.mean())
        module_held = y.detach().mean(0) + module_held
        type(self).kept, module_held = module_held, self.kept
        return loss

    def seen(self) -> Any:
        return SwappedWithAClass.kept, module_held


def nothing(trainer: Any, i: int) -> None: ...


def resets(trainer: Any, i: int) -> None:
    """As at the begin of each epoch."""
    if i % 9 == 8:
        trainer.held = trainer.first()


def writes(trainer: Any, i: int) -> None:
    if i % 7 == 6:
        for tensor in tensors_of(trainer):
            tensor.mul_(2)


def loads(trainer: Any, i: int) -> None:
    if i % 9 == 8:
        trainer.net.load_state_dict({key: torch.ones_like(one) for key, one in trainer.net.state_dict().items()})


def evaluates(trainer: Any, i: int) -> None:
    trainer.net.train(i % 8 < 6)


def shares(trainer: Any, i: int) -> None:
    """Two places hold one tensor for some calls; so do a place and something constant."""
    if i in (8, 9, 16):
        trainer.other = trainer.held
    if i in (12, 19):
        trainer.held = trainer.other


def takes_parameters(trainer: Any, i: int) -> None:
    """As scripts do it that evaluate by averages; and then with the averages' own memory."""
    if i in (9, 18) and isinstance(trainer, AverageOfParameters):
        for name, parameter in trainer.net.named_parameters():
            average = trainer.held.shadow[name]
            parameter.data = average.clone() if i == 9 else average


def changes_dtype(trainer: Any, i: int) -> None:
    if i in (9, 18) and isinstance(trainer.held, Tensor) and not isinstance(trainer, Recurrent):
        trainer.held = trainer.held.double() if i == 9 else trainer.held.float()


def tensors_of(trainer: Any) -> list[Tensor]:
    held = trainer.held
    if isinstance(held, Tensor):
        return [held]
    return [each for each in held if isinstance(each, Tensor)] if isinstance(held, tuple | list) else []


KINDS = [
    *(Trainer, Recurrent, RecurrentOfTwo, FromNothing, OfAList, OfADict, Buffer, BufferThatIsNotSaved),
    *(AverageOfParameters, DefaultDict, Momentum, Total, Swapped, Returned, Before, WrittenFirst, OfAView, ByVars),
    *(ByData, OfTheModule, Items, Window, Closure, OfAClass, SwappedWithAClass),
]
OF_CONTAINERS = [AverageOfParameters, Momentum, Total, DefaultDict, Items, Window]
BETWEEN = [nothing, resets, writes, loads, evaluates, shares, takes_parameters, changes_dtype]


def script_of(kind: type[Trainer], between: Callable[[Any, int], None], **options: Any) -> Any:
    def script(capture: Capture) -> Any:
        trainer = kind()
        captured = capture(trainer.step, state=[trainer.net, trainer.optimizer], **options)
        for i in range(CALLS):
            between(trainer, i)
            result = captured(torch.randn(3, 4))
            yield result, trainer.seen(), trainer.held is trainer.other, trainer.other is result
        return trainer.net, trainer.optimizer

    return script


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_carries(kind: type[Trainer], between: Callable[[Any, int], None]) -> None:
    replays = 8
    if between is resets and kind in OF_CONTAINERS:
        replays = 0  # another dict is another place
    if between is shares and kind in (Trainer, Swapped, Returned, Before, ByData, ByVars):
        replays = 4
    check_right(script_of(kind, between), replays=replays)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_with_each_selection_of_passes(kind: type[Trainer]) -> None:
    check_equal_with_each(script_of(kind, nothing), replays=16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{"verify": 5}, {"verify_every": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_verified(kind: type[Trainer], options: dict[str, Any]) -> None:
    check_right(script_of(kind, resets, **options), replays=0 if kind in OF_CONTAINERS else 8)


Pair = collections.namedtuple("Pair", "x y")


@dataclasses.dataclass
class Batch:
    x: Tensor
    y: Tensor
    number: int = 0


class OfABatch(Trainer):
    """The script puts the step's input into a place before each call."""

    def __init__(self, makes: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.makes = makes

    def put(self, x: Tensor, y: Tensor) -> None:
        self.batch = self.makes(x, y)

    def parts(self) -> Any:
        batch = self.batch
        if isinstance(batch, dict | collections.UserDict):
            return batch["x"], batch["y"]
        return (batch.x, batch.y) if hasattr(batch, "x") else (batch[0], batch[1])

    def step(self) -> Any:
        x, y = self.parts()
        self.optimizer.zero_grad()
        loss = (self.net(x) - y).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


class OfTwoAttributes(OfABatch):
    def put(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def parts(self) -> Any:
        return self.x, self.y


class OfADictThatStays(OfABatch):
    def put(self, x: Tensor, y: Tensor) -> None:
        batch = vars(self).setdefault("batch", {})
        batch["x"], batch["y"] = x, y


class OfAnAttributeOfAModule(OfABatch):
    def put(self, x: Tensor, y: Tensor) -> None:
        self.net.batch = self.makes(x, y)

    def parts(self) -> Any:
        return self.net.batch.x, self.net.batch.y


class OfAGlobal(OfABatch):
    def put(self, x: Tensor, y: Tensor) -> None:
        global module_held
        module_held = self.makes(x, y)

    def parts(self) -> Any:
        return module_held


MAKES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered dict": lambda x, y: collections.OrderedDict(x=x, y=y),
    "user dict": lambda x, y: collections.UserDict(x=x, y=y),
    "named tuple": Pair,
    "dataclass": Batch,
    "namespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
}
BATCHES: dict[str, Callable[[], OfABatch]] = {
    **{name: functools.partial(OfABatch, makes) for name, makes in MAKES.items()},
    "two attributes": functools.partial(OfTwoAttributes, Pair),
    "dict that stays": functools.partial(OfADictThatStays, Pair),
    "of a module": functools.partial(OfAnAttributeOfAModule, Batch),
    "global": functools.partial(OfAGlobal, Pair),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", ["same", "another", "twice", "kept"])
@pytest.mark.parametrize("name", BATCHES)
def test_put_before_each_call(name: str, shape: str) -> None:
    """Batches of one shape, of another now and then, the same twice, and all that the step keeps the script keeps
    too."""

    def script(capture: Capture) -> Any:
        trainer, kept = BATCHES[name](), []
        captured = capture(trainer.step, state=[trainer.net, trainer.optimizer])
        for i in range(CALLS):
            if shape != "twice" or i % 2 == 0:
                rows = 5 if shape == "another" and i % 5 == 4 else 3
                trainer.put(torch.randn(rows, 4), torch.randn(rows, 8))
            if shape == "kept":
                kept.append(trainer.batch if hasattr(trainer, "batch") else None)
            yield captured(), trainer.parts()
        return trainer.net, trainer.optimizer

    check_equal(script, replays=8)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("kind", [Trainer, RecurrentOfTwo, Buffer, AverageOfParameters])
def test_stored_plans(kind: type[Trainer], trust: bool, tmp_path: Any) -> None:
    for _ in range(3):
        found = check_right(script_of(kind, nothing, plans=tmp_path, trust_plans=trust), replays=12)
        if not ORACLE_ONLY:
            assert not found.steps[0].stats.refusals


def test_two_functions_carry_one_place() -> None:
    def script(capture: Capture) -> Any:
        trainer = Recurrent()

        def look(x: Tensor) -> Tensor:
            with torch.no_grad():
                trainer.held = trainer.net(x, trainer.held)
            return trainer.held.sum()

        train = capture(trainer.step, state=[trainer.net, trainer.optimizer])
        evaluate = capture(look, state=trainer.net)
        for i in range(40):
            yield (evaluate if i % 4 == 3 else train)(torch.randn(3, 4)), trainer.held
        return trainer.net

    check_equal(script, replays=5)


def test_a_replay_that_fails_leaves_the_tensor_of_before() -> None:
    trainer = Recurrent()

    def step(x: Tensor, index: Tensor) -> Tensor:
        trainer.step(x)
        return trainer.net.weight_hh.detach()[index]

    captured = step if ORACLE_ONLY else rote_capture(step, state=[trainer.net, trainer.optimizer])
    for _ in range(10):
        captured(torch.randn(3, 4), torch.tensor([1]))
    before = trainer.held
    with pytest.raises(IndexError):
        captured(torch.randn(3, 4), torch.tensor([100]))
    if not ORACLE_ONLY:
        assert captured.stats.replays
    assert trainer.held is before or ORACLE_ONLY


def test_a_graph_that_no_call_goes_on_with() -> None:
    class Kept(Trainer):
        def step(self, x: Tensor) -> Any:
            loss, y = self.train(x + self.held.detach().mean())
            self.held = y
            return loss

    found = check_right(script_of(Kept, nothing))
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays


@pytest.mark.ranks(2)
def test_under_data_parallel() -> None:
    def script(capture: Capture) -> Any:
        net = Normed()
        model = DistributedDataParallel(net, broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        average = Average(net)

        def step(x: Tensor) -> Tensor:
            loss, _ = update(model, optimizer, x)
            average.update()
            return loss

        captured = capture(step, state=[model, optimizer])
        for _ in range(32):
            yield captured(torch.randn(4, 4)), net.mean, dict(average.shadow)
        return model, optimizer

    check_equal(script, replays=20)


@pytest.mark.filterwarnings("ignore:rote")
def test_a_leaf_that_requires_grad_is_refused() -> None:
    class Leaf(Trainer):
        def step(self, x: Tensor) -> Any:
            loss, y = self.train(x + self.held.detach().mean())
            self.held = y.detach().requires_grad_()
            return loss

    found = check_right(script_of(Leaf, nothing, tail=False))
    if not ORACLE_ONLY:
        assert "that the step has made and that requires grad" in found.steps[0].stats.refusals[0]


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("kind", OF_CONTAINERS)
def test_another_container_in_each_epoch(kind: type[Trainer]) -> None:
    """Its items are carried, and not the container, into which the step puts them."""

    def script(capture: Capture) -> Any:
        trainer = kind()
        captured = capture(trainer.step)
        for i in range(80):
            if i % 16 == 15:
                trainer.held = trainer.first()
            yield captured(torch.randn(3, 4)), trainer.seen()
        return trainer.net, trainer.optimizer

    check_right(script, replays=40)


ORDERS: dict[str, Callable[[int], bool]] = {
    "one after the other": lambda i: i >= 24,
    "in turn": lambda i: i % 2 == 1,
    "in turn later": lambda i: i >= 15 if i < 30 else i % 2 == 1,
    "back": lambda i: 15 <= i < 30,
    "turn and turn about": lambda i: i // 2 % 2 == 1,
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [Trainer, RecurrentOfTwo, AverageOfParameters])
@pytest.mark.parametrize("how", ["of the class", "a closure"])
def test_of_two_trainers(how: str, kind: type[Trainer], order: str) -> None:
    """Places of two objects have one path."""

    def script(capture: Capture) -> Any:
        two = [kind(), kind()]
        trainer = two[0]

        def step(x: Tensor) -> Any:
            return trainer.step(x)

        def of_class(self: Trainer, x: Tensor) -> Any:
            return kind.step(self, x)

        captured = capture(of_class if how == "of the class" else step)
        for i in range(60):
            trainer = two[ORDERS[order](i)]
            x = torch.randn(3, 4)
            yield captured(trainer, x) if how == "of the class" else captured(x), [each.seen() for each in two]
        return [(each.net, each.optimizer) for each in two]

    # Places that are no argument's are forgotten when they are out of reach.
    check_right(script, replays=0 if how == "a closure" and "turn" in order else 8)


@pytest.mark.parametrize("order", ORDERS)
def test_batches_of_two_trainers(order: str) -> None:
    def script(capture: Capture) -> Any:
        two = [OfABatch(Pair), OfABatch(Pair)]
        captured = capture(OfABatch.step)
        for i in range(60):
            trainer = two[ORDERS[order](i)]
            trainer.put(torch.randn(3, 4), torch.randn(3, 8))
            yield captured(trainer)
        return [(each.net, each.optimizer) for each in two]

    check_equal(script, replays=8)


@pytest.mark.filterwarnings("ignore:rote")
def test_another_dict_at_every_call_is_not_looked_at_for_ever() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def step(x: Tensor) -> Tensor:
            loss, _ = trainer.train(x)
            trainer.other["loss"] = loss
            return loss

        captured = capture(step, state=[trainer.net, trainer.optimizer])
        for _ in range(80):
            trainer.other = {"loss": None}
            yield captured(torch.randn(3, 4)), trainer.other
        return trainer.net

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[0].stats.refusals or found.steps[0].stats.replays
