"""Attributes in reach that change at every call: guarded where the step reads them, by whatever way, and only there."""

import copy
import dataclasses
import gc
import inspect
import operator
import pickle
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from oracle import Capture, check_equal, check_right
from torch import Tensor, nn

CALLS = 34
NAME = "".join(["epo", "ch"])  # no constant of any code below
CROSSED = 20


@dataclasses.dataclass
class Progress:
    epoch: int = 0
    history: list[Any] = dataclasses.field(default_factory=list)


class Callback:
    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.seen: list[float] = []

    def after(self) -> None:
        self.seen.append(self.trainer.progress.epoch / 7)


class Trainer:
    def __init__(self) -> None:
        self.net = nn.Linear(5, 3)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.other = torch.optim.AdamW([torch.zeros(2, requires_grad=True)])
        self.progress = Progress()
        self.callbacks = [Callback(self)]
        self.late = False

    def train_step(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        if self.late and self.progress.epoch > CROSSED + 4:
            loss = loss * 3
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def after(self) -> None:
        """What a trainer does between two steps."""
        self.progress.epoch += 1
        self.progress.history.append({"epoch": self.progress.epoch})
        self.other.param_groups[0]["lr"] *= 0.9
        for callback in self.callbacks:
            callback.after()


def training(prepare: Callable[[Trainer, int], None] = lambda trainer, i: None) -> Any:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        trainer.train_step = capture(trainer.train_step, state=[trainer.net, trainer.opt])  # type: ignore[method-assign]
        for i in range(CALLS):
            prepare(trainer, i)
            yield trainer.train_step(torch.randn(4, 5))
            trainer.after()
        return trainer.net, trainer.opt

    return script


def test_what_a_trainer_counts_and_logs() -> None:
    check_equal(training(), replays=25)


def test_read_from_some_call_on() -> None:
    """Another value leads to code that reads the number."""

    def prepare(trainer: Trainer, i: int) -> None:
        trainer.late = i >= CROSSED

    check_right(training(prepare), replays=12)


def test_another_object_in_the_place() -> None:
    """The attribute that is read holds another object from then on."""

    def prepare(trainer: Trainer, i: int) -> None:
        if i == CROSSED:
            trainer.net = nn.Linear(5, 3)
            trainer.opt = torch.optim.SGD(trainer.net.parameters(), lr=0.3)
            trainer.late = True

    check_right(training(prepare))


class Looks:
    """Reads a number in some way, and does another thing when it has crossed a limit."""

    def __init__(self, look: Callable[[Progress], Any]) -> None:
        self.look = look
        self.progress = Progress()
        self.net = nn.Linear(5, 3)

    def step(self, x: Tensor) -> Tensor:
        loss = self.net(x).square().mean()
        return (loss * 2 if self.look(self.progress) > CROSSED else loss).detach()


def matched(progress: Progress) -> int:
    match progress:
        case Progress(epoch=found):
            return found
    return 0


read_of_object = object.__getattribute__
look_for = inspect.getattr_static
referents_of = gc.get_referents


LOOKS: dict[str, Callable[[Progress], Any]] = {
    "attribute": lambda p: p.epoch,
    "getattr": lambda p: getattr(p, NAME),
    "attrgetter": lambda p: operator.attrgetter(NAME)(p),
    "vars": lambda p: vars(p)[NAME],
    "__dict__": lambda p: p.__dict__[NAME],
    "object": lambda p: object.__getattribute__(p, NAME),
    "descriptor": lambda p: type(p).__dict__["__dict__"].__get__(p)[NAME],
    "asdict": lambda p: dataclasses.asdict(p)[NAME],
    "repr": lambda p: int(repr(p).split("=")[1].split(",")[0]),
    "format": lambda p: int(f"{p!s}".split("=")[1].split(",")[0]),
    "match": matched,
    "copy": lambda p: getattr(copy.copy(p), NAME),
    "deepcopy": lambda p: getattr(copy.deepcopy(p), NAME),
    "pickle": lambda p: getattr(pickle.loads(pickle.dumps(p)), NAME),
    "getmembers": lambda p: dict(inspect.getmembers(p))[NAME],
    "getattr_static": lambda p: inspect.getattr_static(p, NAME),
    "referents": lambda p: next(
        each if type(each) is int else each[NAME]
        for each in gc.get_referents(p)
        if type(each) is int or (type(each) is dict and NAME in each)
    ),
    "object, renamed": lambda p: read_of_object(p, NAME),
    "getattr_static, renamed": lambda p: look_for(p, NAME),
    "referents, renamed": lambda p: next(
        each if type(each) is int else each[NAME]
        for each in referents_of(p)
        if type(each) is int or (type(each) is dict and NAME in each)
    ),
    "weak": lambda p: getattr(weakref.proxy(p), NAME),
    "history": lambda p: len(p.history),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", LOOKS)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reads(name: str) -> None:
    def script(capture: Capture) -> Any:
        one = Looks(LOOKS[name])
        step = capture(one.step, state=one.net)
        for _ in range(CALLS):
            with torch.no_grad():
                yield step(torch.randn(4, 5))
            one.progress.epoch += 1
            one.progress.history.append(one.progress.epoch)
        return one.net

    check_right(script)


@pytest.mark.parametrize("name", ["bound", "dict", "items", "descriptor"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_reads_by_what_was_taken_before(name: str) -> None:
    def script(capture: Capture) -> Any:
        one = Looks(lambda p: 0)
        own = vars(one.progress)
        items, found, bound = own.items(), vars(Progress)["__dict__"].__get__, one.progress.__getattribute__
        ways = {
            "bound": lambda p: bound(NAME),
            "dict": lambda p: own[NAME],
            "items": lambda p: dict(items)[NAME],
            "descriptor": lambda p: found(p)[NAME],
        }
        one.look = ways[name]
        step = capture(one.step, state=one.net)
        for _ in range(CALLS):
            with torch.no_grad():
                yield step(torch.randn(4, 5))
            one.progress.epoch += 1
        return one.net

    check_right(script)


class Sets(Looks):
    def step(self, x: Tensor) -> Tensor:
        self.progress.epoch = int(x.shape[0])
        return self.net(x).square().mean().detach()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_that_sets_what_it_does_not_read() -> None:
    def script(capture: Capture) -> Any:
        one = Sets(lambda p: 0)
        step = capture(one.step, state=one.net)
        for i in range(CALLS):
            with torch.no_grad():
                yield step(torch.randn(4 + i % 2, 5)), one.progress.epoch
            if i > 4:
                one.progress.epoch = 100 + i
        return one.net

    check_right(script)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.drop = nn.Dropout(0.3)
        self.seen: list[Any] = []
        self.calls = 0
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out = self.drop(self.inner(x))
        return out * 2 if len(vars(self)["_modules"]) > CROSSED else out


@pytest.mark.parametrize("changes", ["what is not read", "training"])
def test_attributes_of_modules(changes: str) -> None:
    def script(capture: Capture) -> Any:
        net = Net() if changes == "training" else nn.Sequential(Net())
        one: Any = net if changes == "training" else net[0]

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                return net(x).square().mean()

        step = capture(run, state=net)
        for i in range(CALLS):
            yield step(torch.randn(4, 5))
            one.calls += 1
            one.seen.append(i)
            if changes == "training":
                net.train(i % 5 < 3)
        return net

    check_right(script)


def test_a_list_that_a_module_keeps() -> None:
    def script(capture: Capture) -> Any:
        net = Net()
        net.forward = lambda x: net.drop(net.inner(x))  # type: ignore[method-assign]

        def run(x: Tensor) -> Tensor:
            with torch.no_grad():
                return net(x).square().mean()

        step = capture(run, state=net)
        for i in range(CALLS):
            yield step(torch.randn(4, 5))
            net.seen.append(i)
        return net

    check_equal(script, replays=25)


class Shared:
    """As the state of `accelerate` is: all objects have one dict."""

    kept: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        self.__dict__ = self.kept
        self.scale = 2.0


def test_objects_that_share_their_attributes() -> None:
    """What these hold is guarded; what others hold, and the step does not read, is not."""

    def script(capture: Capture) -> Any:
        Shared.kept.clear()
        trainer = Trainer()
        trainer.one, trainer.other_one = Shared(), Shared()  # type: ignore[attr-defined]
        body = lambda x: trainer.train_step(x) * trainer.one.scale  # type: ignore[attr-defined]  # noqa: E731
        step = capture(body, state=[trainer.net, trainer.opt])
        for call in range(CALLS):
            if call == CROSSED:
                trainer.other_one.scale = 3.0  # type: ignore[attr-defined]
            yield step(torch.randn(4, 5))
            trainer.after()
        return trainer.net

    check_equal(script, replays=18)


def test_attributes_that_lead_to_the_same_objects() -> None:
    """Where one of them is left unguarded, the others lead to the object first: they have not changed."""

    def script(capture: Capture) -> Any:
        net = nn.Sequential(*(nn.Linear(5, 5) for _ in range(12)))
        config = {"steps": 0}
        for layer in net:
            layer.config = config
        step = capture(lambda x: net(x).square().mean(), state=net)
        for _ in range(CALLS):
            with torch.no_grad():
                yield step(torch.randn(4, 5))
            config["steps"] += 1
        return net

    check_equal(script, replays=22)
