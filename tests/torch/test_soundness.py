"""No host state changes unseen: a step that reads it equals eager after a change.

Every case hides one number where a walk over what a function reaches could
miss it, replays, changes the number, and compares with eager. A step that
moves what cannot be guarded is refused.
"""

import array
import builtins
import collections
import contextvars
import enum
import functools
import itertools
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hidden import AFTER, BEFORE, Hidden, check_seen
from oracle import ORACLE_ONLY, Calls, Capture, check_right, rote_capture
from torch import Tensor, nn


class Holder:
    value = 2.0

    def read(self) -> float:
        return self.value


SCALE = 2.0


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


class Value:
    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.parametrize("what", ["global", "cell", "attribute"])
def test_captured_function_within_another(what: str) -> None:
    """What the inner function reads is seen by the outer one."""

    def script(capture: Capture) -> Calls:
        set_scale(2.0)
        cell = 2.0

        def change(value: float) -> None:
            nonlocal cell
            if what == "global":
                set_scale(value)
            elif what == "cell":
                cell = value
            else:
                holder.value = value

        holder = Value(2.0)
        functions = {"global": lambda x: x * SCALE, "cell": lambda x: x * cell, "attribute": lambda x: x * holder.value}
        inner = capture(functions[what])
        step = capture(lambda x: inner(x) + 1)
        for i in range(18):
            change(2.0 + i // 6)
            yield step(torch.arange(4.0))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.stats[-1][-1].replays > 6, found.stats[-1]


class Slots:
    __slots__ = ("__hidden", "maybe")

    def __init__(self) -> None:
        self.__hidden = 2.0
        self.maybe: float | None = None

    def read(self) -> float:
        return self.__hidden

    def write(self, value: float) -> None:
        self.__hidden = value


class Descriptor:
    def __init__(self) -> None:
        self.value = 2.0

    def __get__(self, instance: object, owner: type) -> float:
        return self.value


class Color(enum.Enum):
    RED = 2.0
    BLUE = 3.0


def defaults() -> Hidden:
    def read(value: float = 2.0) -> float:
        return value

    return lambda: read(), lambda: setattr(read, "__defaults__", (3.0,))


def keyword_defaults() -> Hidden:
    def read(*, value: float = 2.0) -> float:
        return value

    return lambda: read(), lambda: setattr(read, "__kwdefaults__", {"value": 3.0})


def code() -> Hidden:
    def read() -> float:
        return 2.0

    def other() -> float:
        return 3.0

    return lambda: read(), lambda: setattr(read, "__code__", other.__code__)


def attribute_of_a_function() -> Hidden:
    def read() -> float:
        return float(read.value)  # type: ignore[attr-defined]

    read.value = 2.0  # type: ignore[attr-defined]
    return lambda: read(), lambda: setattr(read, "value", 3.0)


def calls_nested_deep() -> Hidden:
    value = [2.0]
    function: Callable[[], float] = lambda: value[0]  # noqa: E731
    for _ in range(40):
        function = functools.partial(lambda inner: inner(), function) if _ % 2 else _calling(function)
    return function, lambda: value.__setitem__(0, 3.0)


def _calling(function: Callable[[], float]) -> Callable[[], float]:
    return lambda: function()


def private_slot() -> Hidden:
    held = Slots()
    return held.read, lambda: held.write(3.0)


def slot_that_was_none() -> Hidden:
    held = Slots()
    return lambda: held.maybe or 2.0, lambda: setattr(held, "maybe", 3.0)


def key_that_is_an_object() -> Hidden:
    key = Holder()
    held = {key: 2.0}
    return lambda: held[key], lambda: held.__setitem__(key, 3.0)


def key_that_is_none() -> Hidden:
    held = {None: 2.0}
    return lambda: held[None], lambda: held.__setitem__(None, 3.0)


def list_on_a_class() -> Hidden:
    class Owner:
        held = (2.0, [2.0])

    return lambda: Owner().held[1][0], lambda: Owner.held[1].__setitem__(0, 3.0)


def attribute_added_to_a_derived_class() -> Hidden:
    class Derived(Holder):
        pass

    return Derived().read, lambda: setattr(Derived, "value", 3.0)


def attribute_of_a_metaclass() -> Hidden:
    class Meta(type):
        value = 2.0

    class Owner(metaclass=Meta):
        pass

    return lambda: Owner.value, lambda: setattr(Meta, "value", 3.0)


def class_in_a_class() -> Hidden:
    class Config:
        class Optimizer:
            value = 2.0

    return lambda: Config.Optimizer.value, lambda: setattr(Config.Optimizer, "value", 3.0)


def method_replaced() -> Hidden:
    class Owner(Holder):
        pass

    held = Owner()
    Owner.read = lambda self: 2.0  # type: ignore[method-assign]
    return lambda: held.read(), lambda: setattr(Owner, "read", lambda self: 3.0)


def class_of_an_object_replaced() -> Hidden:
    class Other(Holder):
        value = 3.0

    held = Holder()
    return lambda: held.value, lambda: setattr(held, "__class__", Other)


def descriptor() -> Hidden:
    class Owner:
        held = Descriptor()

    return lambda: Owner().held, lambda: setattr(vars(Owner)["held"], "value", 3.0)


def enum_member() -> Hidden:
    held = types.SimpleNamespace(color=Color.RED)
    return lambda: held.color.value, lambda: setattr(held, "color", Color.BLUE)


def python_module(name: str = "rote_test_settings") -> types.ModuleType:
    module = types.ModuleType(name)
    exec("value = 2.0\ndef read(): return value\n", module.__dict__)
    sys.modules[name] = module
    return module


def module_in_a_closure() -> Hidden:
    module = python_module()
    return lambda: module.value, lambda: setattr(module, "value", 3.0)


def module_in_an_attribute() -> Hidden:
    held = types.SimpleNamespace(module=python_module())
    return lambda: held.module.read(), lambda: setattr(held.module, "value", 3.0)


def module_imported_by_the_step() -> Hidden:
    module = python_module()

    def read() -> float:
        import rote_test_settings

        return float(rote_test_settings.value)

    return read, lambda: setattr(module, "value", 3.0)


def value_imported_by_the_step() -> Hidden:
    module = python_module()

    def read() -> float:
        from rote_test_settings import value

        return float(value)

    return read, lambda: setattr(module, "value", 3.0)


def attribute_named_by_text() -> Hidden:
    module = python_module()
    return lambda: getattr(module, "value"), lambda: setattr(module, "value", 3.0)  # noqa: B009


def global_that_did_not_exist() -> Hidden:
    globals().pop("_later", None)

    def read() -> float:
        try:
            return float(_later)  # type: ignore[name-defined]
        except NameError:
            return 2.0

    return read, lambda: globals().__setitem__("_later", 3.0)


def cell_that_was_empty() -> Hidden:
    def read() -> float:
        try:
            return later
        except NameError:
            return 2.0

    def change() -> None:
        nonlocal later
        later = 3.0

    if len(sys.argv) < 0:
        later = 0.0
    return read, change


def environment() -> Hidden:
    os.environ["ROTE_TEST_VALUE"] = "2.0"
    return lambda: float(os.environ["ROTE_TEST_VALUE"]), lambda: os.environ.__setitem__("ROTE_TEST_VALUE", "3.0")


def environment_by_a_function() -> Hidden:
    os.environ["ROTE_TEST_VALUE"] = "2.0"
    return lambda: float(os.getenv("ROTE_TEST_VALUE", "0")), lambda: os.environ.__setitem__("ROTE_TEST_VALUE", "3.0")


def environment_by_name() -> Hidden:
    from os import environ, getenv

    environ["ROTE_TEST_VALUE"] = "2.0"
    return lambda: float(getenv("ROTE_TEST_VALUE", "0")), lambda: environ.__setitem__("ROTE_TEST_VALUE", "3.0")


def context_variable() -> Hidden:
    held = contextvars.ContextVar("held", default=2.0)
    held.set(2.0)
    return held.get, lambda: held.set(3.0)


def member_of_a_set() -> Hidden:
    held = {2.0}
    return lambda: next(iter(held)), lambda: (held.clear(), held.add(3.0))


def order_of_a_dict() -> Hidden:
    held = {"a": 2.0, "b": 3.0}
    return lambda: next(iter(held.values())), lambda: held.__setitem__("a", held.pop("a"))


def long_list() -> Hidden:
    held = [2.0] * 5000
    return lambda: held[4000], lambda: held.__setitem__(4000, 3.0)


def long_dict() -> Hidden:
    held = dict.fromkeys(range(5000), 2.0)
    return lambda: held[4000], lambda: held.__setitem__(4000, 3.0)


def deque() -> Hidden:
    held = collections.deque([2.0, 2.0])
    return lambda: held[0], lambda: held.__setitem__(0, 3.0)


def attribute_of_a_dict() -> Hidden:
    class Config(dict[str, float]):
        value = 2.0

    held = Config()
    held.value = 2.0
    return lambda: held.value, lambda: setattr(held, "value", 3.0)


def attribute_of_a_number() -> Hidden:
    class Number(int):
        value = 2.0

    held = Number(1)
    held.value = 2.0
    return lambda: held.value, lambda: setattr(held, "value", 3.0)


def view_of_a_dict() -> Hidden:
    held = {"value": 2.0}
    view = types.MappingProxyType(held)
    return lambda: view["value"], lambda: held.__setitem__("value", 3.0)


def weak_reference() -> Hidden:
    held = Holder()
    held.value = 2.0
    reference = weakref.ref(held)
    return lambda: reference().value, lambda: setattr(held, "value", 3.0)  # type: ignore[union-attr]


def array_of_numpy() -> Hidden:
    held = np.array([[1.0, 2.0], [3.0, 4.0]])
    return lambda: float(held[0, 1]), lambda: held.__setitem__((0, 1), 3.0)


def array_of_python() -> Hidden:
    held = array.array("d", [2.0])
    return lambda: held[0], lambda: held.__setitem__(0, 3.0)


def name_put_into_builtins() -> Hidden:
    builtins.put_there = 2.0
    return lambda: builtins.put_there, lambda: setattr(builtins, "put_there", 3.0)


def name_put_into_builtins_by_another_name() -> Hidden:
    builtins.put_there = 2.0
    found = __builtins__  # a dict, or the module

    def read() -> float:
        return __builtins__["put_there"] if isinstance(found, dict) else __builtins__.put_there

    return read, lambda: setattr(builtins, "put_there", 3.0)


held_here = 2.0


def its_own_module() -> Hidden:
    globals()["held_here"] = 2.0
    return lambda: sys.modules[__name__].held_here, lambda: globals().__setitem__("held_here", 3.0)


def globals_of_a_function() -> Hidden:
    globals()["held_here"] = 2.0
    return lambda: small_model.__globals__["held_here"], lambda: globals().__setitem__("held_here", 3.0)


def class_of_a_gradient() -> Hidden:
    held = nn.Parameter(torch.ones(4))
    held.grad = torch.ones(4)

    def change() -> None:
        held.grad = nn.Parameter(torch.ones(4), requires_grad=False)

    return lambda: 3.0 if isinstance(held.grad, nn.Parameter) else 2.0, change


def which_object_a_gradient_is() -> Hidden:
    held, other = nn.Parameter(torch.ones(4)), torch.ones(4)
    held.grad = torch.ones(4)
    return lambda: 3.0 if held.grad is other else 2.0, lambda: setattr(held, "grad", other)


def gradient_as_a_key() -> Hidden:
    held, other = nn.Parameter(torch.ones(4)), torch.ones(4)
    held.grad = torch.ones(4)
    known = {other: 3.0}
    return lambda: known.get(held.grad, 2.0), lambda: setattr(held, "grad", other)


SEEN = [
    defaults, keyword_defaults, code, attribute_of_a_function, calls_nested_deep, private_slot, slot_that_was_none,
    key_that_is_an_object, key_that_is_none, list_on_a_class, attribute_added_to_a_derived_class,
    attribute_of_a_metaclass, class_in_a_class, method_replaced, class_of_an_object_replaced, descriptor, enum_member,
    module_in_a_closure, module_in_an_attribute, module_imported_by_the_step, value_imported_by_the_step,
    attribute_named_by_text, global_that_did_not_exist, cell_that_was_empty, environment,
    environment_by_a_function, environment_by_name, context_variable, member_of_a_set, order_of_a_dict, long_list,
    long_dict, deque, attribute_of_a_dict, attribute_of_a_number, view_of_a_dict, weak_reference, array_of_numpy,
    array_of_python, name_put_into_builtins, name_put_into_builtins_by_another_name, its_own_module,
    globals_of_a_function, class_of_a_gradient, which_object_a_gradient_is, gradient_as_a_key,
]  # fmt: skip


@pytest.mark.parametrize("build", SEEN, ids=lambda build: build.__name__)
def test_hidden_number_is_seen(build: Callable[[], Hidden]) -> None:
    check_seen(build)


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def check_patched(change: Callable[[nn.Sequential, list[Callable[[], object]]], object]) -> None:
    def script(capture: Capture) -> Calls:
        undo: list[Callable[[], object]] = []
        model = small_model()
        step = capture(lambda x: torch.nn.functional.relu(model(x)).detach(), state=model)
        for call in range(BEFORE + AFTER):
            if call == BEFORE:
                change(model, undo)
            yield step(torch.ones(2, 4))
        for action in undo:
            action()
        return {"model": model}

    check_right(script)


def test_forward_of_a_library_class_replaced() -> None:
    def change(model: nn.Sequential, undo: list[Callable[[], object]]) -> None:
        original = nn.Tanh.forward
        undo.append(lambda: setattr(nn.Tanh, "forward", original))
        nn.Tanh.forward = lambda self, x: x  # type: ignore[method-assign]

    check_patched(change)


def test_function_of_the_library_replaced() -> None:
    def change(model: nn.Sequential, undo: list[Callable[[], object]]) -> None:
        original = torch.nn.functional.relu
        undo.append(lambda: setattr(torch.nn.functional, "relu", original))
        torch.nn.functional.relu = lambda x: original(x) + 1

    check_patched(change)


def test_hook_on_all_modules() -> None:
    def change(model: nn.Sequential, undo: list[Callable[[], object]]) -> None:
        hook = nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2)
        undo.append(hook.remove)

    check_patched(change)


def test_order_of_children() -> None:
    def change(model: nn.Sequential, undo: list[Callable[[], object]]) -> None:
        model._modules["0"] = model._modules.pop("0")

    check_patched(change)


def test_hook_exchanged_for_another() -> None:
    def script(capture: Capture) -> Calls:
        model = small_model()
        handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
        step = capture(lambda x: model(x).detach(), state=model)
        for call in range(BEFORE + AFTER):
            if call == BEFORE:
                handle.remove()
                model[0].register_forward_hook(lambda module, args, output: output * 3)
            yield step(torch.ones(2, 4))
        return {"model": model}

    check_right(script)


def adds_an_entry(module: nn.Module, found: Any, prefix: str, metadata: Any) -> None:
    found[f"{prefix}more"] = torch.ones(2)


def halves(*_: Any) -> None:
    with torch.no_grad():
        HALVED[0].mul_(0.5)


HALVED: list[Tensor] = []
SAVING: dict[str, Callable[[nn.Module], object]] = {
    "buffer": lambda model: model.register_buffer("scale", model.scale, persistent=False),
    "hook after saving": lambda model: model.register_state_dict_post_hook(adds_an_entry),
    "hook before saving": lambda model: model.register_state_dict_pre_hook(halves),
    "hook before loading": lambda model: model.register_load_state_dict_pre_hook(halves),
    "hook after loading": lambda model: model.register_load_state_dict_post_hook(halves),
}


@pytest.mark.parametrize("name", SAVING)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_modules_save_and_load_by(name: str) -> None:
    def script(capture: Capture) -> Calls:
        model, other, third = (nn.BatchNorm1d(4) for _ in range(3))
        model.register_buffer("scale", torch.ones(4))
        other.register_buffer("scale", torch.ones(4))
        HALVED[:] = [third.weight]

        def step(x: Tensor) -> Tensor:
            other.load_state_dict(model.state_dict(), strict=False)
            return x * len(model.state_dict()) * third.weight.detach()

        captured = capture(step, state=[model, other, third])
        for call in range(BEFORE + AFTER):
            if call == BEFORE:
                SAVING[name](other if "loading" in name else model)
            yield captured(torch.ones(2, 4))
        return {"model": model, "other": other}

    found = check_right(script)
    assert ORACLE_ONLY or found.stats[BEFORE - 1][0].replays, found.stats[-1]


def iterator() -> Callable[[], float]:
    held = iter([2.0] * 5 + [3.0] * 20)
    return lambda: next(held)


def generator() -> Callable[[], float]:
    held = (float(i // 5) for i in itertools.count())
    return lambda: next(held)


def pythons_random() -> Callable[[], float]:
    random.seed(0)
    return lambda: 2.0 if random.random() < 0.9 else 3.0


def random_object() -> Callable[[], float]:
    held = random.Random(1)
    return lambda: 2.0 if held.random() < 0.9 else 3.0


def numpys_random() -> Callable[[], float]:
    np.random.seed(1)
    return lambda: 2.0 if np.random.rand() < 0.9 else 3.0


def numpys_generator() -> Callable[[], float]:
    held = np.random.default_rng(1)
    return lambda: 2.0 if held.random() < 0.9 else 3.0


@pytest.mark.parametrize(
    "build",
    [iterator, generator, pythons_random, random_object, numpys_random, numpys_generator],
    ids=lambda build: build.__name__,
)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_moves_unseen_is_refused(build: Callable[[], Callable[[], float]]) -> None:
    def script(capture: Capture) -> Calls:
        read = build()
        step = capture(lambda x: x * read())
        for _ in range(12):
            yield step(torch.ones(4))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        (message,) = found.steps[0].stats.refusals
        assert "remedy" in message and not found.steps[0].stats.replays, message


def test_first_parameter_may_be_asked_for() -> None:
    """next() on an iterator that the step makes itself is no host state."""

    def script(capture: Capture) -> Calls:
        model = small_model()

        def step(x: Tensor) -> Tensor:
            return model(x.to(next(model.parameters()).dtype)).detach()

        captured = capture(step, state=model)
        for _ in range(6):
            yield captured(torch.ones(2, 4))
        return {"model": model}

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays, found.steps[0].stats


@pytest.mark.filterwarnings("ignore:rote")
def test_results_of_a_tensor_subclass_keep_their_class() -> None:
    class Labelled(torch.Tensor):
        pass

    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * 2)
        for _ in range(6):
            result = step(torch.ones(4).as_subclass(Labelled))
            yield type(result).__name__
        return {}

    check_right(script)


def test_threads_that_record_at_once_leave_torch_as_it_was() -> None:
    begun, done = threading.Event(), threading.Event()
    before = torch.get_rng_state, vars(torch.Tensor).get("numpy")

    def slow(x: Tensor) -> Tensor:
        begun.set()
        done.wait(10)
        return x * 2

    first, second = rote_capture(slow), rote_capture(lambda x: x + 1)
    thread = threading.Thread(target=first, args=(torch.ones(4),))
    thread.start()
    assert begun.wait(10)
    assert torch.equal(second(torch.ones(4)), torch.full((4,), 2.0))
    done.set()
    thread.join(10)
    assert (torch.get_rng_state, vars(torch.Tensor).get("numpy")) == before


def pops_from_a_batch(batch: dict[str, Tensor]) -> Tensor:
    y = batch.pop("y")
    return batch["x"] * y


def writes_to_a_batch(batch: dict[str, Tensor]) -> Tensor:
    batch["z"] = batch["x"]
    return batch["x"] * batch["y"]


def writes_to_a_library(batch: dict[str, Tensor]) -> Tensor:
    torch.nn.functional.written_here = 3  # type: ignore[attr-defined]
    return batch["x"] * 2


def asks_for_a_gradient(batch: dict[str, Tensor]) -> Tensor:
    batch["x"].requires_grad_(True)
    return batch["x"].detach() * batch["y"]


def leaves_grad_mode_off(batch: dict[str, Tensor]) -> Tensor:
    torch.set_grad_enabled(False)
    return batch["x"] * batch["y"]


def returns_the_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


@pytest.mark.parametrize(
    "step",
    [
        pops_from_a_batch,
        writes_to_a_batch,
        writes_to_a_library,
        asks_for_a_gradient,
        leaves_grad_mode_off,
        returns_the_batch,
    ],
    ids=lambda step: step.__name__,
)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_a_step_leaves_behind_is_left_behind(step: Callable[[dict[str, Tensor]], Any]) -> None:
    def script(capture: Capture) -> Calls:
        captured = capture(step)
        torch.nn.functional.written_here = 0  # type: ignore[attr-defined]
        for i in range(6):
            batch = {"x": torch.full((4,), float(i)), "y": torch.ones(4)}
            result = captured(batch)
            yield {"same": result is batch, "batch": dict(batch), "grads": torch.is_grad_enabled()}
            yield {"requires": {name: tensor.requires_grad for name, tensor in batch.items()}}
            yield getattr(torch.nn.functional, "written_here", 0)
            torch.nn.functional.written_here = i % 2  # type: ignore[attr-defined]
            torch.set_grad_enabled(True)
        return {}

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_identity_of_an_argument_is_not_asked_for() -> None:
    def script(capture: Capture) -> Calls:
        known = torch.ones(4)
        numbers = {id(known)}
        step = capture(lambda x: x * (3.0 if id(x) in numbers else 2.0))
        for call in range(12):
            yield step(known if call == 8 else torch.ones(4))
        return {}

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_list_that_is_in_the_result_twice() -> None:
    def script(capture: Capture) -> Calls:
        def twice(x: Tensor) -> Any:
            found = [x * 2]
            return found, {"again": found}

        step = capture(twice)
        for _ in range(6):
            first, second = step(torch.ones(4))
            yield first, first is second["again"]
        return {}

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_gradients_keep_their_class() -> None:
    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.ones(4))

        def step(x: Tensor) -> Tensor:
            weight.grad = nn.Parameter(x * 2, requires_grad=False)
            return x * 3

        captured = capture(step, state=[weight])
        for call in range(8):
            yield captured(torch.ones(4) + call), type(weight.grad).__name__, weight.grad
        return {}

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_gradients_that_are_one_tensor_stay_one() -> None:
    def script(capture: Capture) -> Calls:
        a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def share(x: Tensor) -> Tensor:
            (a * x).sum().backward()
            b.grad = a.grad
            return x * 1

        step = capture(share, state=[a, b])
        for _ in range(6):
            yield step(torch.ones(4))
            yield a.grad is b.grad
            a.grad = b.grad = None
        return {}

    check_right(script)


def test_op_that_returns_nothing_is_run_at_every_replay() -> None:
    seen: list[float] = []

    @torch.library.custom_op("rote_tests::note", mutates_args=())
    def note(x: Tensor) -> None:
        seen.append(x.sum().item())

    def step(x: Tensor) -> Tensor:
        torch.ops.rote_tests.note(x)
        return x * 2

    captured = rote_capture(step)
    for i in range(8):
        captured(torch.full((4,), float(i)))
    assert seen == [4.0 * i for i in range(8)]
    if not ORACLE_ONLY:
        assert captured.stats.replays > 0


def factorized(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x @ x.t() + x)


def asserted(x: Tensor) -> Tensor:
    torch._assert_async((x.diagonal() > 0).all())
    return x * 2


@pytest.mark.parametrize("checked", [factorized, asserted])
def test_what_an_op_checks_is_checked_at_every_replay(checked: Callable[[Tensor], Tensor]) -> None:
    captured = rote_capture(checked)
    for i in range(5):
        assert torch.equal(captured(torch.eye(4) * (i + 1)), checked(torch.eye(4) * (i + 1)))
    for step in (checked, captured):
        with pytest.raises(RuntimeError, match=r"positive-definite|nonzero value"):
            step(torch.eye(4) * -0.5)
    assert torch.equal(captured(torch.eye(4)), checked(torch.eye(4)))
    if not ORACLE_ONLY:
        assert captured.stats.replays > 2
