"""Tensors that a step uses and that nobody has named in ``state=``."""

import collections
import copy
import dataclasses
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import inputs, mesh, mlp, update
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_equal_with_each, check_right, over
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CALLS = 28
Pair = collections.namedtuple("Pair", "first second")


@dataclasses.dataclass
class Data:
    first: Tensor


class Slots:
    __slots__ = ("first",)
    first: Tensor


class Trainer:
    """The step multiplies by the tensor that it holds in some way, and then writes to it."""

    def __init__(self) -> None:
        self.net = nn.Linear(4, 8)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.other: Any = None
        self.put(torch.ones(8))

    def put(self, tensor: Tensor) -> None:
        self.held = tensor

    def get(self) -> Tensor:
        return self.held

    def step(self, x: Tensor) -> Any:
        self.optimizer.zero_grad()
        loss = (self.net(x) * self.get()).square().mean()
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            self.get().mul_(0.99)
        return loss.detach()


class InAList(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.items = [torch.zeros(8), tensor]

    def get(self) -> Tensor:
        return self.items[1]


class InADict(Trainer):
    def put(self, tensor: Tensor) -> None:
        vars(self).setdefault("items", {})["a"] = tensor

    def get(self) -> Tensor:
        return self.items["a"]


class InANamedTuple(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.items = Pair(torch.zeros(8), tensor)

    def get(self) -> Tensor:
        return self.items.second


class InADataclass(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.items = Data(tensor)

    def get(self) -> Tensor:
        return self.items.first


class InASlot(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.items = vars(self).get("items") or Slots()
        self.items.first = tensor

    def get(self) -> Tensor:
        return self.items.first


class InANamespace(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.items = types.SimpleNamespace(first=tensor)

    def get(self) -> Tensor:
        return self.items.first


class InAClass(Trainer):
    def put(self, tensor: Tensor) -> None:
        type(self).items = tensor

    def get(self) -> Tensor:
        return self.items


class InADefault(Trainer):
    def put(self, tensor: Tensor) -> None:
        def get(held: Tensor = tensor) -> Tensor:
            return held

        self.get = get


class InAClosure(Trainer):
    def put(self, tensor: Tensor) -> None:
        if "get" in vars(self):
            return self.change(tensor)

        def get() -> Tensor:
            return tensor

        def change(other: Tensor) -> None:
            nonlocal tensor
            tensor = other

        vars(self).update(get=get, change=change)


held: Any = None


class InAGlobal(Trainer):
    def put(self, tensor: Tensor) -> None:
        globals()["held"] = tensor

    def get(self) -> Tensor:
        return held


class AView(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.whole = torch.cat([tensor, tensor])
        self.held = self.whole[8:]


class InAModule(Trainer):
    """Of no state."""

    def put(self, tensor: Tensor) -> None:
        self.loss = nn.CrossEntropyLoss(weight=tensor)

    def get(self) -> Tensor:
        return self.loss.weight


class ALeaf(Trainer):
    """It gets gradients, which nobody uses but the script."""

    def put(self, tensor: Tensor) -> None:
        self.held = tensor.requires_grad_()


class AParameter(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.held = nn.Parameter(tensor)


class ATotal(Trainer):
    def step(self, x: Tensor) -> Any:
        loss, _ = update(self.net, self.optimizer, x)
        self.held += loss
        return loss


class AShadow(Trainer):
    """The list of an average, as that of torch_ema."""

    def put(self, tensor: Tensor) -> None:
        self.shadow = [parameter.detach().clone() * tensor.mean() for parameter in self.net.parameters()]

    def get(self) -> Tensor:
        return self.shadow[0]

    def step(self, x: Tensor) -> Any:
        loss, _ = update(self.net, self.optimizer, x)
        with torch.no_grad():
            for average, parameter in zip(self.shadow, self.net.parameters(), strict=True):
                average.sub_(0.1 * (average - parameter))
        return loss


class ATeacher(Trainer):
    def put(self, tensor: Tensor) -> None:
        self.teacher = copy.deepcopy(self.net)
        self.teacher.weight.data.mul_(tensor.mean())

    def get(self) -> Tensor:
        return self.teacher.bias.data

    def step(self, x: Tensor) -> Any:
        with torch.no_grad():
            target = self.teacher(x)
        self.optimizer.zero_grad()
        loss = F.mse_loss(self.net(x), target)
        loss.backward()
        self.optimizer.step()
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                old.lerp_(new, 0.1)
        return loss.detach()


class AsksForData(Trainer):
    def step(self, x: Tensor) -> Any:
        loss, _ = update(self.net, self.optimizer, x)
        if self.get()[0] > 0.9:
            self.get().mul_(0.99)
        return loss


def nothing(trainer: Trainer, i: int) -> None: ...


def writes(trainer: Trainer, i: int) -> None:
    if i % 9 == 8:
        with torch.no_grad():
            trainer.get().mul_(1.5)


def puts_another(trainer: Trainer, i: int) -> None:
    if i == 12:
        trainer.put(torch.full((8,), 0.5))


def puts_another_of_old(trainer: Trainer, i: int) -> None:
    """While the old one is still there."""
    if i == 12:
        trainer.other = trainer.get()
        trainer.put(torch.full((8,), 0.5))


def puts_one_in_each_call(trainer: Trainer, i: int) -> None:
    trainer.put(torch.full((8,), 0.5 + i / 100))


def puts_new_data(trainer: Trainer, i: int) -> None:
    if i == 12:
        trainer.get().data = torch.full_like(trainer.get(), 0.3)


def puts_another_dtype(trainer: Trainer, i: int) -> None:
    if i == 12:
        trainer.put(torch.full((8,), 0.5, dtype=torch.float64))


def shares(trainer: Trainer, i: int) -> None:
    """It is a parameter's memory from now on."""
    if i == 12:
        trainer.put(trainer.net.bias.detach())


KINDS = [
    *(Trainer, InAList, InADict, InANamedTuple, InADataclass, InASlot, InANamespace, InAClass, InADefault, InAClosure),
    *(InAGlobal, AView, InAModule, ALeaf, AParameter, ATotal, AShadow, ATeacher, AsksForData),
]
BETWEEN = [
    *(nothing, writes, puts_another, puts_another_of_old, puts_one_in_each_call, puts_new_data, puts_another_dtype),
    shares,
]


def script_of(kind: type[Trainer], between: Callable[[Trainer, int], None], **options: Any) -> Any:
    def script(capture: Capture) -> Any:
        trainer = kind()
        captured = capture(trainer.step, state=[trainer.net, trainer.optimizer], **options)
        for i in range(CALLS):
            between(trainer, i)
            yield captured(torch.randn(3, 4)), trainer.get(), trainer.get().grad
        return trainer.net, trainer.optimizer

    return script


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("kind", KINDS)
def test_finds(kind: type[Trainer], between: Callable[[Trainer, int], None]) -> None:
    refused = between is puts_one_in_each_call and kind in (InASlot, InADefault, InAModule, AParameter, ATeacher)
    check_right(script_of(kind, between), replays=0 if refused else 8)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_with_each_selection_of_passes(kind: type[Trainer]) -> None:
    check_equal_with_each(script_of(kind, nothing), replays=16)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{"verify": 5}, {"verify_every": 3}])
@pytest.mark.parametrize("kind", KINDS)
def test_verified(kind: type[Trainer], options: dict[str, Any]) -> None:
    check_right(script_of(kind, writes, **options), replays=8)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("kind", [Trainer, InASlot, AShadow, ATeacher])
def test_stored_plans(kind: type[Trainer], trust: bool, tmp_path: Any) -> None:
    for _ in range(3):
        found = check_right(script_of(kind, nothing, plans=tmp_path, trust_plans=trust), replays=12)
        if not ORACLE_ONLY:
            assert not found.steps[0].stats.refusals


@pytest.mark.ranks(2)
def test_of_ranks() -> None:
    def script(capture: Capture) -> Calls:
        model, hidden = mlp(mesh(2)), torch.ones(7, 11)

        def step(x: Tensor) -> Tensor:
            hidden.add_(1)
            with torch.no_grad():
                return model(x).sum() * hidden.sum()

        captured = capture(step, state={"model": model})
        for x in inputs(CALLS, 4, 8):
            yield captured(x)
        return {"hidden": hidden}

    check_equal(script)


@pytest.mark.ranks(2)
def test_an_optimizer_that_is_not_named() -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        return over(
            capture,
            train_step,
            inputs(CALLS, 4, 8),
            state={"model": model},
            before={14: lambda: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))},
            end=lambda: {"model": model, "optimizer": optimizer},
        )

    check_equal(script, replays=16)


@pytest.mark.ranks(2)
def test_under_data_parallel() -> None:
    def script(capture: Capture) -> Any:
        net = nn.Linear(4, 8)
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        shadow = [parameter.detach().clone() for parameter in net.parameters()]

        def step(x: Tensor) -> Tensor:
            loss, _ = update(model, optimizer, x)
            with torch.no_grad():
                for average, parameter in zip(shadow, net.parameters(), strict=True):
                    average.lerp_(parameter, 0.1)
            return loss

        captured = capture(step, state=[model, optimizer])
        for _ in range(32):
            yield captured(torch.randn(4, 4)), list(shadow)
        return model, optimizer

    check_equal(script, replays=20)


@pytest.mark.filterwarnings("ignore:rote")
def test_what_only_a_weak_reference_leads_to() -> None:
    """It goes when the script lets go of it."""

    def script(capture: Capture) -> Any:
        holder = [torch.ones(4)]
        reference = weakref.ref(holder[0])

        def step(x: Tensor) -> Tensor:
            held = reference()
            return x if held is None else x * held

        captured = capture(step)
        for i in range(CALLS):
            if i == 14:
                holder.clear()
            yield captured(torch.randn(4)), reference() is None

    check_right(script)


def test_a_result_that_was_there_before() -> None:
    """It is that very tensor, though an argument lies in its memory too."""

    def script(capture: Capture) -> Any:
        whole = torch.randn(2, 4)
        holder = types.SimpleNamespace(held=torch.randn(4), other=whole[1])

        def step(x: Tensor) -> tuple[Tensor, Tensor]:
            holder.held.mul_(0.5)
            return x * 2, holder.held if x.sum() > -100 else holder.other

        captured = capture(step)
        for i in range(CALLS):
            if i == 10:
                holder.held = whole[0]
            y, held = captured(whole[0])
            yield y, held, held is holder.held

    check_equal(script, replays=16)


@pytest.mark.parametrize("kind", [Trainer, InASlot, InAGlobal, AsksForData])
def test_in_a_region(kind: type[Trainer]) -> None:
    def script(capture: Capture) -> Any:
        trainer = kind()
        trainer.get().requires_grad_(False)
        region = capture(lambda x: (trainer.net(x) * trainer.get()).tanh(), state=trainer.net, region=True)
        for i in range(CALLS):
            writes(trainer, i)
            loss = region(torch.randn(3, 4)).square().mean()
            loss.backward()
            trainer.optimizer.step()
            yield loss
        return trainer.net

    check_equal(script, replays=16)
