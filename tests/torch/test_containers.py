"""Containers of other classes than Python's own, as results, as arguments and as state."""

import collections
import dataclasses
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import inputs, mesh, mlp
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_equal, check_right, over, rote_capture
from torch import Tensor
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.utils import _pytree as pytree


class Named(NamedTuple):
    loss: Any
    extra: Any = None


@dataclasses.dataclass
class Data:
    loss: Any
    extra: Any = None


@dataclasses.dataclass
class Derived(Data):
    more: Any = 1.5
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.derived = (self.more, self.loss)
        self.beside = "an attribute that is no field"


@dataclasses.dataclass(frozen=True)
class Frozen:
    loss: Any
    extra: Any = None


@dataclasses.dataclass(slots=True)
class Slots:
    loss: Any
    extra: Any = None


@dataclasses.dataclass(slots=True, frozen=True)
class FrozenSlots:
    loss: Any
    extra: Any = None


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As the results of Hugging Face's models are: entries and attributes."""

    loss: Any = None
    extra: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                super().__setitem__(field.name, getattr(self, field.name))

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        super().__setattr__(key, value)


class OfDict(dict):  # type: ignore[type-arg]
    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("takes no entries")


class OfList(list):  # type: ignore[type-arg]
    pass


class OfTuple(tuple):  # type: ignore[type-arg]
    pass


class OfUserDict(collections.UserDict):  # type: ignore[type-arg]
    pass


class Node:
    """Registered as a node of pytrees; has no methods that Python's own containers have."""

    def __init__(self, loss: Any, extra: Any) -> None:
        self.loss, self.extra = loss, extra


pytree.register_pytree_node(Node, lambda node: ([node.loss, node.extra], None), lambda items, _: Node(*items))


def listed(loss: Any, extra: Any) -> Any:
    made = OfList([loss, extra])
    made.note = extra  # type: ignore[attr-defined]
    return made


KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "named tuple": Named,
    "dataclass": Data,
    "derived": Derived,
    "frozen": Frozen,
    "slots": Slots,
    "frozen slots": FrozenSlots,
    "output": Output,
    "ordered dict": lambda loss, extra: collections.OrderedDict(loss=loss, extra=extra),
    "of dict": lambda loss, extra: OfDict(loss=loss, extra=extra),
    "of list": listed,
    "of tuple": lambda loss, extra: OfTuple((loss, extra)),
    "user dict": lambda loss, extra: OfUserDict(loss=loss, extra=extra),
    "node": Node,
    "namespace": lambda loss, extra: types.SimpleNamespace(extra=extra, loss=loss),
}


def of_inputs(step: Callable[..., Any], calls: int = 8, **options: Any) -> Script:
    return lambda capture: over(capture, step, inputs(calls, 4), **options)


# -- results ------------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", KINDS)
def test_results(name: str) -> None:
    make = KINDS[name]

    def step(x: Tensor) -> Any:
        loss = x.mean()
        return make(loss, {"n": 3, "same": loss, "of": [make(x * 2, None)]})

    check_equal(of_inputs(step), replays=5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", KINDS)
def test_a_result_that_the_caller_changes(name: str) -> None:
    """The next call gives a fresh one."""
    make = KINDS[name]

    def step(x: Tensor) -> Any:
        return make(x + 1, [x * 2])

    def script(capture: Capture) -> Calls:
        captured = capture(step)
        for x in inputs(8, 4):
            result = captured(x)
            extra = result["extra"] if isinstance(result, dict | OfUserDict) else getattr(result, "extra", None)
            (result[1] if extra is None else extra).clear()
            if hasattr(result, "__dict__"):
                vars(result)["added"] = 1
            if hasattr(result, "data"):
                result.data.clear()
            yield len(vars(result)) if hasattr(result, "__dict__") else 0
            yield captured(x)

    check_equal(script, replays=5)


@pytest.mark.ranks(1)
def test_results_of_ops_and_settings() -> None:
    def step(x: Tensor) -> Any:
        found = torch.max(x[:, None] * x, 1)
        return found, type(found).__name__, x.shape, x.dtype, [x.device], torch.Size((1, 2))

    check_equal(of_inputs(step), replays=5)


@pytest.mark.ranks(1)
def test_one_object_in_two_places() -> None:
    def step(x: Tensor) -> Any:
        shared, items = Data(x + 1, [x]), [x * 2]
        return [shared, {"again": shared, "items": items}, items, Data(items, shared)]

    def script(capture: Capture) -> Calls:
        captured = capture(step)
        for x in inputs(8, 4):
            result = captured(x)
            one, entries, items, last = result
            yield result, one is entries["again"], items is entries["items"], last.extra is one, last.loss is items

    check_equal(script, replays=5)


@pytest.mark.ranks(1)
def test_classes_of_one_function() -> None:
    """Found by the closure, not by name."""

    @dataclasses.dataclass
    class Local:
        loss: Any

    def step(x: Tensor) -> Any:
        return Local(x + 1)

    check_equal(of_inputs(step), replays=5)


@pytest.mark.ranks(1)
def test_another_class_between_calls() -> None:
    def script(capture: Capture) -> Calls:
        kinds = [dataclasses.make_dataclass("Made", ["loss"], namespace={"__module__": __name__}) for _ in range(2)]
        kind = kinds[0]

        def step(x: Tensor) -> Any:
            return kind(x + 1)

        captured = capture(step)
        for i, x in enumerate(inputs(24, 4)):
            kind = kinds[i // 6 % 2]
            yield [type(captured(x)) is each for each in kinds]

    check_equal(script, replays=12)


class Hidden(collections.defaultdict):  # type: ignore[type-arg]
    pass


class Plain:
    pass


OLDER = Data(1.0)


def contains_itself(x: Tensor) -> Any:
    made = Data(x)
    made.extra = [made]
    return made


def made_now(x: Tensor) -> Any:
    class Now(NamedTuple):
        loss: Any

    return Now(x)


# A step, and why its result is refused.
REFUSED: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "contains itself": (contains_itself, "a Data that contains itself"),
    "made inside": (
        lambda x: dataclasses.make_dataclass("Inside", ["loss"])(x),
        "a class that the step has not in reach",
    ),
    "made now": (made_now, "a class that the step has not in reach"),
    "not made": (lambda x: {"loss": Hidden(list, a=x)}, "returns a type"),
    "of another object": (lambda x: Data(x, Plain()), "returns a Plain"),
    "as a key": (lambda x: {Frozen(1): x}, "a dict with a Frozen for a key"),
    "older": (lambda x: (OLDER, x), "a Data that is older than the step"),
}


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", REFUSED)
def test_results_that_are_refused(name: str) -> None:
    step, why = REFUSED[name]

    def script(capture: Capture) -> Calls:
        captured = capture(step)
        for x in inputs(6, 4):
            captured(x)
        yield "the same"

    found = check_right(script)
    if not ORACLE_ONLY:
        assert not found.steps[0].stats.replays
        assert why in str(found.steps[0].stats.refusals), found.steps[0].stats


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("trusts", [False, True])
def test_stored_plans(name: str, trusts: bool, tmp_path: Path) -> None:
    make = KINDS[name]

    def step(x: Tensor) -> Any:
        return make(x + 1, ["text", 2.5])

    for later in (False, True):
        captured = rote_capture(step, plans=tmp_path, trust_plans=trusts and later, strict=True)
        for x in inputs(4, 4):
            expected, found = step(x), captured(x)
            assert type(found) is type(expected)
            if name != "node":
                assert repr(found) == repr(expected)
        if not ORACLE_ONLY:
            # Code that asks for a hash is not told by a plan, and is recorded in each process.
            asks_for_hashes = name in ("frozen", "frozen slots", "user dict")
            asks_for_hashes &= name != "user dict" or sys.version_info < (3, 13)
            assert captured.stats.replays == 2 + later + (later and trusts and not asks_for_hashes), captured.stats


@pytest.mark.ranks(1)
def test_a_stored_plan_of_a_local_class_is_recorded_first(tmp_path: Path) -> None:
    for _ in range(2):

        @dataclasses.dataclass
        class Local:
            loss: Any

        def step(x: Tensor, kind: Any = Local) -> Any:
            return kind(x + 1)

        captured = rote_capture(step, plans=tmp_path, trust_plans=True, strict=True)
        for x in inputs(6, 4):
            result = captured(x)
            assert type(result) is Local
            assert torch.equal(result.loss, x + 1)
        assert ORACLE_ONLY or captured.stats.replays >= 3, captured.stats


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", KINDS)
def test_verified(name: str) -> None:
    make = KINDS[name]

    def step(x: Tensor) -> Any:
        return make(x + 1, [x * 2, 1.5])

    check_equal(of_inputs(step, verify=2), replays=5)


# -- arguments ----------------------------------------------------------------


def both(batch: Any) -> tuple[Any, Any]:
    """The parts of a batch of any kind, as code reads them."""
    if isinstance(batch, dict | OfUserDict):
        return batch["loss"], batch["extra"]
    return (batch.loss, batch.extra) if hasattr(batch, "loss") else (batch[0], batch[1])


def of_batches(
    make: Callable[[int, Tensor], Any], change: Callable[[Any], object] | None = None, calls: int = 12
) -> Callable[[Capture], Calls]:
    """Calls a step with a batch; ``change`` is made by the step."""

    def script(capture: Capture) -> Calls:
        def step(batch: Any) -> Any:
            x, extra = both(batch)
            result = x * 2 + extra["by"]
            if change is not None:
                change(batch)
            return result, type(batch).__name__

        captured = capture(step)
        for i, x in enumerate(inputs(calls, 4)):
            batch = make(i, x)
            yield captured(batch), batch

    return script


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", KINDS)
def test_arguments(name: str) -> None:
    make = KINDS[name]
    check_equal(of_batches(lambda _, x: make(x, {"by": 2.0})), replays=9)


CHANGES: dict[str, Callable[[int, Tensor], Any]] = {
    "a number": lambda i, x: Data(x, {"by": float(i // 6 % 2)}),
    "a tensor in place of a number": lambda i, x: Data(x, {"by": x if i // 6 % 2 else 2.0}),
    "another class": lambda i, x: (Data if i // 6 % 2 else Derived)(x, {"by": 2.0}),
    "frozen": lambda i, x: (Data if i // 6 % 2 else Frozen)(x, {"by": 2.0}),
    "an attribute more": lambda i, x: with_more(Data(x, {"by": 2.0}), i // 6 % 2),
    "the order of keys": lambda i, x: OfDict(
        [("loss", x), ("extra", {"by": 2.0}), ("a", x)][:: 1 if i // 6 % 2 else -1]
    ),
    "a shape": lambda i, x: Data(x[: 2 + i // 6 % 2], {"by": 2.0}),
    "a slot": lambda i, x: Slots(x, {"by": float(i // 6 % 2)}),
    "an entry and an attribute": lambda i, x: output_of_two(x, i // 6 % 2),
    "one tensor twice": lambda i, x: Data(x, {"by": x if i // 6 % 2 else x.clone()}),
    "one object twice": lambda i, x: Data(x, {"by": 1.0, "of": shared_or_not(x, i // 6 % 2)}),
    "the attributes of a list": lambda i, x: listed_with(x, i // 6 % 2),
}


def with_more(data: Data, more: int) -> Data:
    if more:
        data.more = 1  # type: ignore[attr-defined]
    return data


def output_of_two(x: Tensor, other: int) -> Output:
    """The entry says one thing, the attribute another."""
    made = Output(x, {"by": 1.0})
    object.__setattr__(made, "extra", {"by": 1.0 + other})
    return made


def shared_or_not(x: Tensor, shared: int) -> list[Data]:
    one = Data(x)
    return [one, one if shared else Data(x)]


def listed_with(x: Tensor, other: int) -> Any:
    made = listed(x, {"by": 1.0})
    made.note = other
    return made


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", CHANGES)
def test_arguments_that_change(name: str) -> None:
    def script(capture: Capture) -> Calls:
        def step(batch: Any) -> Any:
            x, extra = both(batch)
            found = x * 2 + extra["by"]
            more = getattr(batch, "more", None), getattr(batch, "note", None), isinstance(batch, Frozen)
            same = [one is other for one, other in [extra.get("of", (1, 2))]], extra["by"] is x
            if isinstance(batch, Output):
                found = found + batch.extra["by"] * 10
            keys = list(batch) if isinstance(batch, dict) else []
            return found, str(more), str(same), str(keys)

        return over(capture, step, (CHANGES[name](i, x) for i, x in enumerate(inputs(36, 4))))

    check_right(script, replays=16)


def write_attribute(batch: Any) -> None:
    batch.loss = batch.loss + 1


def write_slot(batch: Any) -> None:
    batch.extra = None


# An argument, and how the step changes it.
MUTATIONS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], object]]] = {
    "popped": (lambda x: OfUserDict(loss=x, extra={"by": 1.0}, more=x), lambda batch: batch.data.pop("more")),
    "set": (lambda x: Data(x, {"by": 1.0}), write_attribute),
    "added": (lambda x: Data(x, {"by": 1.0}), lambda batch: setattr(batch, "added", 1)),
    "replaced": (lambda x: Data(x, {"by": 1.0, "of": [x]}), lambda batch: batch.extra.update(of=[*batch.extra["of"]])),
    "slot": (lambda x: Slots(x, {"by": 1.0}), write_slot),
    "entry": (lambda x: OfDict(loss=x, extra={"by": 1.0}), lambda batch: dict.__setitem__(batch, "new", 1)),
    "class": (lambda x: Data(x, {"by": 1.0}), lambda batch: setattr(batch, "__class__", Derived)),
}


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", MUTATIONS)
def test_arguments_that_the_step_changes(name: str) -> None:
    make, change = MUTATIONS[name]
    found = check_right(of_batches(lambda _, x: make(x), change))
    if not ORACLE_ONLY:
        assert not found.steps[0].stats.replays
        assert "of its arguments: a replay would not change" in str(found.steps[0].stats.refusals)


@pytest.mark.ranks(1)
def test_tensors_in_arguments_are_written_and_returned() -> None:
    def step(batch: Data, *, other: Any) -> Any:
        batch.loss.add_(1)
        (batch.extra.loss * other.x).sum().backward()
        return Data(batch.loss, other.x), batch.extra.loss.grad

    def script(capture: Capture) -> Calls:
        captured = capture(step)
        for x in inputs(10, 4):
            batch = Data(x, Frozen(torch.full((4,), 2.0, requires_grad=True)))
            result = captured(batch, other=types.SimpleNamespace(x=x + 1, grad=x))
            yield result, batch, result[0].loss is x, result[1] is batch.extra.loss.grad

    check_equal(script, replays=7)


SCALE = 2.0


class WithMethods(NamedTuple):
    x: Tensor

    def scaled(self) -> Tensor:
        return self.x * SCALE


@dataclasses.dataclass
class WithProperty:
    x: Tensor

    @property
    def scaled(self) -> Tensor:
        return self.x * SCALE


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", [WithMethods, WithProperty])
def test_what_methods_of_arguments_read_is_guarded(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def script(capture: Capture) -> Calls:
        def step(batch: Any) -> Any:
            return batch.scaled() if kind is WithMethods else batch.scaled

        captured = capture(step)
        for i, x in enumerate(inputs(24, 4)):
            globals()["SCALE"] = 2.0 + i // 6 % 2
            yield captured(kind(x))

    check_equal(script, replays=15)


@dataclasses.dataclass
class Trainer:
    """Holds a module: it is the step's own, and is guarded as what is in reach."""

    model: torch.nn.Module
    scale: float
    mask: Tensor


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_an_object_that_holds_a_module_is_one_value() -> None:
    def script(capture: Capture) -> Calls:
        mask = torch.ones(4)
        trainer = Trainer(torch.nn.Linear(4, 4), 1.0, mask)

        def step(trainer: Trainer, x: Tensor) -> Any:
            with torch.no_grad():
                return trainer.model(x) * trainer.scale * trainer.mask

        captured = capture(step, state={"model": trainer.model, "mask": mask})
        for i, x in enumerate(inputs(18, 4)):
            trainer.scale = 1.0 + i // 6 % 2
            yield captured(trainer, x)

    check_right(script, replays=9)


@dataclasses.dataclass
class Tree:
    x: Tensor
    parent: Any = None
    children: Any = ()


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_objects_that_contain_themselves_are_one_value() -> None:
    def script(capture: Capture) -> Calls:
        captured = capture(lambda tree: tree.x + tree.children[0].x)
        for x in inputs(6, 4):
            tree = Tree(x)
            tree.children = [Tree(x, tree), Tree(x, tree)]
            yield captured(tree)

    check_right(script)


class Odd(dict):  # type: ignore[type-arg]
    """Raises wherever it can."""

    def __iter__(self) -> Any:
        raise ValueError("no iteration")

    keys = values = items = __len__ = __eq__ = __iter__  # type: ignore[assignment]
    __hash__ = __iter__  # type: ignore[assignment]


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_no_code_of_the_class_runs() -> None:
    def script(capture: Capture) -> Calls:
        return over(capture, lambda odd: dict.__getitem__(odd, "x") + 1, ((Odd(x=x),) for x in inputs(8, 4)))

    check_equal(script, replays=5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("trusts", [False, True])
def test_stored_plans_with_arguments(trusts: bool, tmp_path: Path) -> None:
    def step(batch: Any) -> Any:
        return batch.loss * batch.extra

    for kind, later in ((Data, False), (Data, True), (Derived, False), (Derived, True)):
        captured = rote_capture(step, plans=tmp_path, trust_plans=trusts, strict=True)
        for x in inputs(4, 4):
            assert torch.equal(captured(kind(x, 2.0)), x * 2)
        if not ORACLE_ONLY:
            assert captured.stats.replays == 2 + later + (later and trusts), captured.stats


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("first", [0, 7])
def test_an_argument_that_is_an_object_in_reach(first: int) -> None:
    """Code may ask which object it is given."""

    def script(capture: Capture) -> Calls:
        special = Node(torch.ones(4), 1.0)
        known = {special}

        def step(batch: Any) -> Any:
            return batch.loss * (2 if batch is special else 3) * (5 if batch in known else 7)

        captured = capture(step)
        for i, x in enumerate(inputs(20, 4)):
            yield captured(special if (i + first) % 10 == 9 or i == first == 0 else Node(x, 1.0))

    check_right(script, replays=9)


@pytest.mark.ranks(1)
def test_attributes_with_odd_names() -> None:
    def step(batch: Any) -> Any:
        (batch.loss * getattr(batch, "a.grad")).sum().backward()
        getattr(batch, "a.grad").add_(1)
        return batch.loss.grad, batch.grad, getattr(batch, "a.grad"), batch.grad

    def script(capture: Capture) -> Calls:
        captured = capture(step)
        for x in inputs(8, 4):
            batch = Data(torch.ones(4, requires_grad=True))
            vars(batch).update({"a.grad": x, "grad": x + 1, "args[0].loss": x * 2})
            yield captured(batch), batch

    check_equal(script, replays=5)


# -- state --------------------------------------------------------------------


class Optimizers:
    """As torchtitan keeps optimizers."""

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self.optimizers = list(optimizers)

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()


class OptimizersThatAreOne(torch.optim.Optimizer):
    """Inherits from the class of an optimizer, and keeps the ones that do the work."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__([p for group in optimizer.param_groups for p in group["params"]], {})
        self.optimizers = [optimizer]

    def step(self) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


class Run:
    def __init__(self, model: Any, optimizer: Any) -> None:
        self.log: list[Any] = []
        self.model, self.opt = model, optimizer
        self.itself = self
        self.mean = torch.zeros(4)


@dataclasses.dataclass
class Setup:
    model: Any
    opt: Any
    mean: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(4))


@dataclasses.dataclass(slots=True)
class SlottedSetup:
    model: Any
    opt: Any
    mean: Tensor = dataclasses.field(default_factory=lambda: torch.zeros(4))


HOLDERS: dict[str, Callable[[Any, Any], Any]] = {
    "an object": Run,
    "a dataclass": Setup,
    "slots": SlottedSetup,
    "a namespace": lambda model, opt: types.SimpleNamespace(model=model, opt=opt, mean=torch.zeros(4)),
    "optimizers in an object": lambda model, opt: Run(model, Optimizers(opt)),
    "an optimizer of optimizers": lambda model, opt: Run(model, OptimizersThatAreOne(opt)),
    "objects in objects": lambda model, opt: Run(Setup(model, None), {"all": [Optimizers(opt)]}),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("place", ["itself", "tuple", "dict", "ordered dict"])
@pytest.mark.parametrize("name", HOLDERS)
def test_state_in_objects(name: str, place: str) -> None:
    def script(capture: Capture) -> Calls:
        model = torch.nn.Linear(4, 4)
        opt = torch.optim.AdamW(model.parameters())
        run = HOLDERS[name](model, opt)
        state = {
            "itself": run,
            "tuple": (run,),
            "dict": {"run": [run]},
            "ordered dict": collections.OrderedDict(run=run),
        }[place]
        model_of = run.model.model if isinstance(run.model, Setup) else run.model
        opt_of = run.opt["all"][0] if isinstance(run.opt, dict) else run.opt

        def step(x: Tensor) -> Any:
            opt_of.zero_grad()
            loss = model_of(x).square().mean()
            loss.backward()
            opt_of.step()
            run.mean.lerp_(x.detach(), 0.5)
            return loss.detach()

        captured = capture(step, state=state)
        for x in inputs(10, 4):
            yield captured(x), run.mean.clone()
        return {"model": model, "opt": opt}

    check_equal(script, replays=6)


@pytest.mark.ranks(1)
def test_a_model_that_the_object_gets_between_calls() -> None:
    def script(capture: Capture) -> Calls:
        models = [torch.nn.Linear(4, 4) for _ in range(2)]
        run = types.SimpleNamespace(model=models[0])

        def step(x: Tensor) -> Any:
            with torch.no_grad():
                return run.model(x)

        captured = capture(step, state=run, verify=3)
        for i, x in enumerate(inputs(36, 4)):
            run.model = models[i // 6 % 2]
            yield captured(x)

    check_equal(script, replays=20)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("state", [5, "text", {"lr": 0.5}, [object()], types.SimpleNamespace(x=1), print])
def test_nothing_that_is_state(state: Any) -> None:
    if not ORACLE_ONLY:
        with pytest.raises(TypeError, match="state= has a"):
            rote_capture(lambda x: x, state=state)


@pytest.mark.ranks(1)
def test_names() -> None:
    if ORACLE_ONLY:
        return
    from rote import _state

    model = torch.nn.Linear(2, 2)
    model.cache = {"k": [torch.zeros(1)]}  # type: ignore[assignment]
    opt = torch.optim.SGD(model.parameters())
    run = Run(model, Optimizers(opt))
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1)
    found = _state.collect({"run": run, "scheduler": scheduler}, as_it_is=False)
    assert [path for path, _ in found.modules] == ["run.model"]
    assert [path for path, _ in found.optimizers] == ["scheduler.optimizer"]  # fewer objects away
    names = [path for path, _ in found.tensors()]
    assert names[:4] == ["run.model.weight", "run.model.bias", "run.model.cache['k'][0]", "run.mean"]
    assert [path for path, _ in _state.collect([run], as_it_is=False).optimizers] == ["[0].opt.optimizers[0]"]


class Cached(torch.nn.Module):
    def __init__(self, change: str = "") -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.cache = torch.zeros(3, 4)
        self.other = torch.ones(3, 4)
        self.caches = [{"k": torch.zeros(4)}, (torch.zeros(4),)]
        self.change = change

    def forward(self, x: Tensor, place: Tensor) -> Tensor:
        x = self.linear(x)
        self.cache.index_copy_(0, place, x[None])
        self.caches[0]["k"].add_(x)
        self.caches[1][0].copy_(x)
        if self.change == "cat":
            self.cache = torch.cat([self.cache[1:], x[None]])
        elif self.change == "swap":
            self.cache, self.other = self.other, self.cache
        elif self.change == "view":
            self.cache = self.cache.view(3, 4)
        elif self.change == "list":
            self.caches = self.caches[:]
        elif self.change == "item":
            self.caches[0]["k"] = self.caches[0]["k"] + 1
        return self.cache.sum(0) + self.caches[0]["k"] + self.caches[1][0]


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("rebinds", [False, True])
def test_tensors_in_attributes_of_modules(rebinds: bool) -> None:
    def script(capture: Capture) -> Calls:
        model = torch.nn.Sequential(Cached())
        inner: Any = model[0]
        kept = [torch.zeros(3, 4), torch.ones(3, 4)]

        @torch.no_grad()
        def step(x: Tensor, place: Tensor) -> Any:
            return model[0](x, place)

        captured = capture(step, state=model)
        for i, x in enumerate(inputs(40, 4)):
            if rebinds:
                inner.cache = kept[i // 8 % 2]
                if i == 20:
                    inner.caches[0]["k"] = torch.ones(4)
            yield captured(x, torch.tensor([i % 3])), inner.cache.clone(), *inner.caches[0].values()
        return inner.caches, kept

    check_right(script, replays=21)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("change", ["cat", "swap", "view", "list", "item"])
def test_a_step_that_rebinds_such_a_tensor(change: str) -> None:
    def script(capture: Capture) -> Calls:
        model = Cached(change)

        @torch.no_grad()
        def step(x: Tensor, place: Tensor) -> Any:
            return model(x, place)

        captured = capture(step, state={"m": model})
        for i, x in enumerate(inputs(24, 4)):
            yield captured(x, torch.tensor([i % 3])), model.cache.clone(), model.other.clone()
        return model.caches

    check_right(script)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_objects_in_state_whose_tensors_the_step_swaps() -> None:
    def script(capture: Capture) -> Calls:
        run = types.SimpleNamespace(a=torch.zeros(4), b=torch.ones(4))

        def step(x: Tensor) -> Any:
            run.a.add_(x)
            run.a, run.b = run.b, run.a
            return run.a * 2

        return over(capture, step, inputs(24, 4), state=run, seen=lambda: (run.a.clone(), run.b.clone()))

    check_right(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", [Data, Output, Slots])
def test_distributed_tensors(kind: Any) -> None:
    """As parts of an argument, of the result, and of an attribute of a module."""

    def script(capture: Capture) -> Calls:
        on = mesh(2)
        model = mlp(on)
        model.kept = distribute_tensor(torch.zeros(8), on, [Replicate()])
        setup = Setup(model, Optimizers(torch.optim.AdamW(model.parameters())))

        def step(batch: Any) -> Any:
            setup.opt.zero_grad()
            out = setup.model(batch.loss)
            loss = out.square().mean()
            loss.backward()
            setup.opt.step()
            setup.model.kept.add_(batch.loss.detach().mean(0).redistribute(on, [Replicate()]))
            return kind(loss.detach(), [out.detach(), batch.extra])

        captured = capture(step, state=setup)
        for x in inputs(10, 4, 8):
            batch = kind(distribute_tensor(x, on, [Replicate()]), "text")
            yield captured(batch), setup.model.kept.to_local().clone()
        return model

    check_equal(script, replays=5)


# -- refusals -----------------------------------------------------------------


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("where", ["closure", "self", "entry", "view", "slot"])
def test_a_refusal_names_the_place_of_a_tensor(where: str) -> None:
    leaf = torch.ones(4, requires_grad=True)
    with_graph = leaf * 2  # of a call that is none of the step's
    holder = types.SimpleNamespace(scale=with_graph, entries={"a": [leaf * 3]})
    slots, view = Slots(with_graph), (torch.ones(8, requires_grad=True) * 2)[4:]

    class Step:
        def __init__(self) -> None:
            self.cache = with_graph

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.cache.detach()

    step, place = {
        "closure": (lambda x: x * holder.scale.detach(), "closure['holder'].scale"),
        "self": (Step(), "self.cache"),
        "entry": (lambda x: x * holder.entries["a"][0].detach(), "closure['holder'].entries['a'][0]"),
        "view": (lambda x: x * view.detach(), "closure['view']"),
        "slot": (lambda x: x * slots.loss.detach(), "closure['slots'].loss"),
    }[where]
    found = check_right(of_inputs(step))
    if not ORACLE_ONLY:
        refusals = str(found.steps[0].stats.refusals)
        assert f"no recorded op made it; it lies in the memory of {place}; remedy" in refusals.replace('\\"', '"'), (
            refusals
        )


class Wrapper(torch.optim.Optimizer):
    """Hands all on to another optimizer, as that of `accelerate` does, and has no groups of its own."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.skips = False

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.skips:
            self.inner.step()


@pytest.mark.parametrize("how", ["alone", "in a list", "in an object"])
def test_an_optimizer_that_wraps_another(how: str) -> None:
    def script(capture: Capture) -> Any:
        model = torch.nn.Linear(4, 3)
        opt = Wrapper(torch.optim.AdamW(model.parameters(), lr=0.01))

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().sum()
            opt.zero_grad()
            loss.backward()
            opt.step()
            return loss.detach()

        given = {"alone": opt, "in a list": [opt], "in an object": types.SimpleNamespace(opt=opt)}[how]
        captured = capture(step, state={"model": model, "opt": given})
        for i in range(30):
            opt.skips = i in (20, 21, 22)
            yield captured(torch.randn(2, 4))
        return model, opt.inner

    check_equal(script, replays=20)


@pytest.mark.parametrize("at", [1, 2, 5])
@pytest.mark.parametrize("within", [False, True])
def test_a_class_that_is_registered_as_a_node_between_calls(at: int, within: bool) -> None:
    """``within``: the step makes the container. Each run registers a class of its own."""

    def script(capture: Capture) -> Calls:
        @dataclasses.dataclass
        class Batch:
            x: Tensor
            y: Tensor

        def halved(batch: Any) -> Tensor:
            if within:
                batch = Batch(batch, batch + 1)
            halves: Any = pytree.tree_map_only(Tensor, lambda tensor: tensor * 0.5, batch)
            return halves.x + halves.y

        step = capture(halved)
        for call in range(9):
            if call == at:
                pytree.register_pytree_node(Batch, lambda b: ([b.x, b.y], None), lambda items, _: Batch(*items))
            x = torch.arange(4.0) + call
            yield step(x if within else Batch(x, x + 1))
        pytree._deregister_pytree_node(Batch)
        return {}

    check_right(script)
