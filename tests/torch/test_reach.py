"""What a step can reach is looked at, wherever Python keeps it: attributes of tensors and numbers, names that
appear, classes of libraries, NumPy, weak references, what C code holds."""

import array
import collections
import concurrent.futures
import contextlib
import ctypes
import dataclasses
import enum
import functools
import itertools
import operator
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rote
import torch
from hidden import AFTER, BEFORE, Hidden, check_seen
from oracle import ORACLE_ONLY, Calls, Capture, check_right, rote_capture
from torch import Tensor, nn

setting = types.SimpleNamespace


def tensor_attribute() -> Hidden:
    held = torch.ones(1)
    held.scale = 2.0  # type: ignore[attr-defined]
    return lambda: held.scale, lambda: setattr(held, "scale", 3.0)  # type: ignore[attr-defined]


def tensor_attribute_that_appears() -> Hidden:
    held = torch.ones(1)
    return lambda: getattr(held, "scale", 2.0), lambda: setattr(held, "scale", 3.0)


def tensor_attribute_in_a_list() -> Hidden:
    held = [torch.ones(1)]
    return lambda: getattr(held[0], "scale", 2.0), lambda: setattr(held[0], "scale", 3.0)


def list_on_a_tensor() -> Hidden:
    held = nn.Parameter(torch.ones(1))
    held.scale = [2.0]
    return lambda: held.scale[0], lambda: held.scale.__setitem__(0, 3.0)


def slot_of_a_tensor_class() -> Hidden:
    class Scaled(Tensor):
        __slots__ = ("scale",)

    held = torch.ones(1).as_subclass(Scaled)
    held.scale = 2.0
    return lambda: held.scale, lambda: setattr(held, "scale", 3.0)


def class_of_a_tensor() -> Hidden:
    class One(Tensor):
        scale = 2.0

    class Other(Tensor):
        scale = 3.0

    held = torch.ones(1).as_subclass(One)
    return lambda: held.scale, lambda: setattr(held, "__class__", Other)


def attribute_of_all_tensors() -> Hidden:
    held = torch.ones(1)

    def change() -> None:
        Tensor.rote_test_scale = 3.0  # type: ignore[attr-defined]

    if hasattr(Tensor, "rote_test_scale"):
        del Tensor.rote_test_scale
    return lambda: getattr(held, "rote_test_scale", 2.0), change


class Text(str):
    scale: float


class Number(float):
    scale: float


class Whole(int):
    scale: float


class Pair(tuple[float, float]):
    scale: float


@pytest.mark.parametrize("make", [lambda: Text("a"), lambda: Number(1.0), lambda: Whole(1), lambda: Pair((1.0, 2.0))])
@pytest.mark.parametrize("replaced", [False, True])
def test_attribute_of_a_number_or_text(make: Callable[[], Any], replaced: bool) -> None:
    def build() -> Hidden:
        held = [make()]
        held[0].scale = 2.0

        def change() -> None:
            if replaced:
                held[0] = make()
            held[0].scale = 3.0

        return lambda: held[0].scale, change

    check_seen(build)


def name_in_an_object_that_appears() -> Hidden:
    held = setting()
    return lambda: getattr(held, "scale", 2.0), lambda: setattr(held, "scale", 3.0)


def name_in_a_dict_that_appears() -> Hidden:
    held: dict[str, float] = {}
    return lambda: 3.0 if "scale" in held else 2.0, lambda: held.__setitem__("scale", 1.0)


def name_in_a_module_that_appears() -> Hidden:
    held = nn.Linear(2, 2)
    return lambda: getattr(held, "scale", 2.0), lambda: setattr(held, "scale", 3.0)


@pytest.fixture(autouse=True)
def no_module_is_left() -> Iterator[None]:
    """`inspect` looks at every one, and some answer anything."""
    yield
    sys.modules.pop("rote_test_names", None)


def python_module() -> types.ModuleType:
    module = types.ModuleType("rote_test_names")
    sys.modules["rote_test_names"] = module
    return module


def name_in_a_python_module_that_appears() -> Hidden:
    held = python_module()
    return lambda: getattr(held, "scale", 2.0), lambda: setattr(held, "scale", 3.0)


def name_in_a_python_module_that_is_tried() -> Hidden:
    held = python_module()

    def read() -> float:
        try:
            return float(held.scale)
        except AttributeError:
            return 2.0

    return read, lambda: setattr(held, "scale", 3.0)


def name_tried_by_the_caller() -> Hidden:
    held = python_module()

    def inner() -> float:
        return float(held.scale)

    def read() -> float:
        with contextlib.suppress(AttributeError):
            return inner()
        return 2.0

    return read, lambda: setattr(held, "scale", 3.0)


def name_in_a_library_that_appears() -> Hidden:
    vars(torch).pop("rote_test_scale", None)
    return lambda: getattr(torch, "rote_test_scale", 2.0), lambda: setattr(torch, "rote_test_scale", 3.0)


def number_in_a_library() -> Hidden:
    torch.rote_test_scale = 2.0  # type: ignore[attr-defined]
    return lambda: torch.rote_test_scale, lambda: setattr(torch, "rote_test_scale", 3.0)  # type: ignore[attr-defined]


def list_in_a_library() -> Hidden:
    torch.nn.rote_test_scale = [2.0]  # type: ignore[attr-defined]
    held = torch.nn.rote_test_scale  # type: ignore[attr-defined]
    return lambda: nn.rote_test_scale[0], lambda: held.__setitem__(0, 3.0)  # type: ignore[attr-defined]


def attribute_of_a_class_of_the_library() -> Hidden:
    held = nn.Linear(2, 2)
    if "rote_test_scale" in vars(nn.Module):
        del nn.Module.rote_test_scale
    return lambda: getattr(held, "rote_test_scale", 2.0), lambda: setattr(nn.Module, "rote_test_scale", 3.0)


def private_attribute_of_a_class_of_the_library() -> Hidden:
    held = nn.Linear(2, 2)
    nn.Linear._rote_test_scale = 2.0  # type: ignore[assignment]
    return lambda: held._rote_test_scale, lambda: setattr(nn.Linear, "_rote_test_scale", 3.0)  # type: ignore


def function_that_modules_get_names_from() -> Hidden:
    held = python_module()
    values = {"scale": 2.0}
    held.__getattr__ = lambda name: values[name]  # type: ignore[method-assign]
    return lambda: held.scale, lambda: values.__setitem__("scale", 3.0)


def function_that_modules_get_names_from_appears() -> Hidden:
    held = python_module()
    return lambda: getattr(held, "scale", 2.0), lambda: setattr(held, "__getattr__", lambda name: 3.0)


def builtin_that_is_replaced() -> Hidden:
    import builtins

    def change() -> None:
        builtins.rote_test_scale = lambda: 3.0  # type: ignore[attr-defined]

    builtins.rote_test_scale = lambda: 2.0  # type: ignore[attr-defined]
    return lambda: rote_test_scale(), change  # type: ignore[name-defined] # noqa: F821


def global_that_hides_a_builtin() -> Hidden:
    globals().pop("abs", None)
    return lambda: abs(-2.0), lambda: globals().__setitem__("abs", lambda x: 3.0)


def order_of_an_ordered_dict() -> Hidden:
    held = collections.OrderedDict(a=2.0, b=3.0)
    return lambda: next(iter(held.values())), lambda: held.move_to_end("a")


def order_of_attributes() -> Hidden:
    held = setting(a=2.0, b=3.0)

    def change() -> None:
        del held.a
        held.a = 2.0

    return lambda: next(iter(vars(held).values())), change


def attributes_replaced_as_a_whole() -> Hidden:
    held = setting(scale=2.0)
    inner = Plain()
    inner.__dict__ = vars(held)
    return lambda: inner.scale, lambda: setattr(inner, "__dict__", {"scale": 3.0})


class Plain:
    scale: float = 1.0


def bases_replaced() -> Hidden:
    class One:
        scale = 2.0

    class Other:
        scale = 3.0

    class Derived(One):
        pass

    held = Derived()
    return lambda: held.scale, lambda: setattr(Derived, "__bases__", (Other,))


def any_attribute() -> Hidden:
    class Config:
        def __init__(self) -> None:
            self.values = {"scale": 2.0}

        def __getattr__(self, name: str) -> float:
            return self.values[name]

    held = Config()
    return lambda: held.scale, lambda: held.values.__setitem__("scale", 3.0)


def every_attribute() -> Hidden:
    values = {"scale": 2.0}

    class Config:
        def __getattribute__(self, name: str) -> Any:
            return values[name]

    held = Config()
    return lambda: held.scale, lambda: values.__setitem__("scale", 3.0)


def attribute_of_an_enum_member() -> Hidden:
    class Color(enum.Enum):
        RED = 1

    Color.RED.scale = 2.0  # type: ignore[attr-defined]
    return lambda: Color.RED.scale, lambda: setattr(Color.RED, "scale", 3.0)  # type: ignore[attr-defined]


def name_in_a_getter() -> Hidden:
    held = python_module()
    held.scale = 2.0  # type: ignore[attr-defined]
    get = operator.attrgetter("scale")
    return lambda: get(held), lambda: setattr(held, "scale", 3.0)


def names_with_dots_in_a_getter() -> Hidden:
    held = python_module()
    held.inner = setting(scale=2.0)  # type: ignore[attr-defined]
    return lambda: operator.attrgetter("inner.scale")(held), lambda: setattr(held.inner, "scale", 3.0)


def name_in_text_that_is_run() -> Hidden:
    held = python_module()
    held.scale = 2.0  # type: ignore[attr-defined]
    globals()["rote_test_module"] = held
    return lambda: eval("rote_test_module.scale"), lambda: setattr(held, "scale", 3.0)


def module_imported_by_text() -> Hidden:
    import importlib

    held = python_module()
    held.scale = 2.0  # type: ignore[attr-defined]
    return lambda: importlib.import_module("rote_test_names").scale, lambda: setattr(held, "scale", 3.0)


def module_in_the_list_of_modules() -> Hidden:
    held = python_module()
    held.scale = 2.0  # type: ignore[attr-defined]
    return lambda: sys.modules["rote_test_names"].scale, lambda: setattr(held, "scale", 3.0)


def module_replaced() -> Hidden:
    held = python_module()
    held.scale = 2.0  # type: ignore[attr-defined]

    def read() -> float:
        import rote_test_names

        return float(rote_test_names.scale)

    def change() -> None:
        python_module().scale = 3.0  # type: ignore[attr-defined]

    return read, change


def default_of_a_defaultdict() -> Hidden:
    held: Any = collections.defaultdict(lambda: 2.0)
    return lambda: held.default_factory(), lambda: setattr(held, "default_factory", lambda: 3.0)


def counter() -> Hidden:
    held = collections.Counter({"scale": 2})
    return lambda: held["scale"], lambda: held.update(["scale"])


def chain_of_dicts() -> Hidden:
    held = collections.ChainMap({}, {"scale": 2.0})
    return lambda: held["scale"], lambda: held.maps[1].__setitem__("scale", 3.0)


def user_dict() -> Hidden:
    held = collections.UserDict({"scale": 2.0})
    return lambda: held["scale"], lambda: held.__setitem__("scale", 3.0)


def deque_of_a_class() -> Hidden:
    class Window(collections.deque[float]):
        def __len__(self) -> int:
            raise RuntimeError("has no length")

        def __iter__(self) -> Iterator[float]:
            raise RuntimeError("has no items")

    held = Window([2.0])
    return lambda: held[0], lambda: held.__setitem__(0, 3.0)


def dataclass_with_slots() -> Hidden:
    @dataclasses.dataclass(slots=True)
    class Config:
        scale: float = 2.0

    held = Config()
    return lambda: held.scale, lambda: setattr(held, "scale", 3.0)


def frozen_dataclass() -> Hidden:
    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float = 2.0

    held = Config()
    return lambda: held.scale, lambda: object.__setattr__(held, "scale", 3.0)


def local_of_a_thread() -> Hidden:
    held = threading.local()
    held.scale = 2.0
    return lambda: held.scale, lambda: setattr(held, "scale", 3.0)


def cached_result() -> Hidden:
    value = [2.0]
    held = functools.lru_cache(lambda: value[0])
    held()
    value[0] = 3.0
    return lambda: held(), held.cache_clear


def argument_of_a_partial() -> Hidden:
    held = functools.partial(lambda pair: pair[0], [2.0])
    return lambda: held(), lambda: held.args[0].__setitem__(0, 3.0)


def state_of_a_partial() -> Hidden:
    held = functools.partial(float, 2.0)
    return lambda: held(), lambda: held.__setstate__((float, (3.0,), {}, {}))  # type: ignore[attr-defined]


def attribute_of_a_partial() -> Hidden:
    held = functools.partial(float, 2.0)
    held.scale = 2.0  # type: ignore[attr-defined]
    return lambda: held.scale, lambda: setattr(held, "scale", 3.0)  # type: ignore[attr-defined]


def number_of_ctypes() -> Hidden:
    held = ctypes.c_double(2.0)
    return lambda: held.value, lambda: setattr(held, "value", 3.0)


def view_of_memory() -> Hidden:
    held = memoryview(bytearray(b"\2\0"))
    return lambda: held[0], lambda: held.__setitem__(0, 3)


def long_array_of_python() -> Hidden:
    held = array.array("d", [2.0] * 100_000)
    return lambda: held[70_000], lambda: held.__setitem__(70_000, 3.0)


def long_array_of_numpy() -> Hidden:
    held = np.full(1_000_000, 2.0)
    return lambda: float(held[900_000]), lambda: held.__setitem__(900_000, 3.0)


def shape_of_an_array() -> Hidden:
    held = np.ones((2, 3))
    return lambda: held.shape[0], lambda: setattr(held, "shape", (3, 2))


def dtype_of_an_array() -> Hidden:
    held = np.full(2, 2.0).view(np.int64)
    return lambda: float(held[0]), lambda: setattr(held, "dtype", np.float64)


def array_of_objects() -> Hidden:
    held = np.array([[2.0], "x"], dtype=object)
    return lambda: held[0][0], lambda: held[0].__setitem__(0, 3.0)


def object_in_an_array() -> Hidden:
    held = np.array([2.0, "x"], dtype=object)
    return lambda: held[0], lambda: held.__setitem__(0, 3.0)


def field_of_an_array() -> Hidden:
    held = np.zeros(2, dtype=[("scale", "f8"), ("name", "U4")])
    held["scale"] = 2.0
    return lambda: float(held[1]["scale"]), lambda: held["scale"].__setitem__(1, 3.0)


def record() -> Hidden:
    held = np.zeros(1, dtype=[("scale", "f8")])[0]
    held["scale"] = 2.0
    return lambda: float(held["scale"]), lambda: held.__setitem__("scale", 3.0)


def date_in_an_array() -> Hidden:
    held = np.array(["2020-01-02"], dtype="M8[D]")
    return lambda: held[0].astype(int) % 7, lambda: held.__setitem__(0, np.datetime64("2020-01-03"))


def mask_of_an_array() -> Hidden:
    held = np.ma.masked_array([2.0, 3.0], mask=[False, True])
    return lambda: float(held.sum()), lambda: held.mask.__setitem__(1, False)


def attribute_of_an_array() -> Hidden:
    class Table(np.ndarray[Any, Any]):
        scale: float

    held = np.ones(2).view(Table)
    held.scale = 2.0
    return lambda: held.scale, lambda: setattr(held, "scale", 3.0)


def number_of_numpy() -> Hidden:
    held = [np.float64(2.0)]
    return lambda: float(held[0]), lambda: held.__setitem__(0, np.float64(3.0))


def sign_of_zero(zero: Callable[[float], Any]) -> Callable[[], Hidden]:
    def build() -> Hidden:
        held = [zero(0.0)]
        return lambda: float(np.copysign(2.0, np.real(held[0]))), lambda: held.__setitem__(0, zero(-0.0))

    return build


def weak_proxy() -> Hidden:
    held = Plain()
    held.scale = 2.0
    proxy = weakref.proxy(held)
    return lambda: proxy.scale, lambda: setattr(held, "scale", 3.0)


def weak_value() -> Hidden:
    held = Plain()
    held.scale = 2.0
    weak = weakref.WeakValueDictionary({"a": held})
    return lambda: weak["a"].scale, lambda: setattr(held, "scale", 3.0)


def weak_key() -> Hidden:
    held = Plain()
    weak = weakref.WeakKeyDictionary({held: 2.0})
    return lambda: weak[held], lambda: weak.__setitem__(held, 3.0)


def member_of_a_weak_set() -> Hidden:
    held, other = Plain(), Plain()
    weak = weakref.WeakSet([held])
    return lambda: 1.0 + len(weak), lambda: weak.add(other)


def object_that_goes() -> Hidden:
    held = [Plain()]
    reference = weakref.ref(held[0])
    return lambda: 2.0 if reference() is not None else 3.0, held.clear


def cell() -> Hidden:
    value = 2.0

    def inner() -> float:
        return value

    held = inner.__closure__[0]  # type: ignore[index]
    return lambda: held.cell_contents, lambda: setattr(held, "cell_contents", 3.0)


def list_that_an_iterator_reads() -> Hidden:
    held = [2.0]
    return lambda: float(sum(reversed(held))), lambda: held.__setitem__(0, 3.0)


def hook_exchanged_in_its_dict() -> Hidden:
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, output: output * 2)

    def change() -> None:
        (key,) = module._forward_hooks
        module._forward_hooks[key] = lambda module, args, output: output * 3

    return lambda: module(1.0), change


def dict_of_hooks_exchanged() -> Hidden:
    module = nn.Identity()
    module.register_forward_hook(lambda module, args, output: output * 2)

    def change() -> None:
        module._forward_hooks = collections.OrderedDict({7: lambda module, args, output: output * 3})

    return lambda: module(1.0), change


def huge_list() -> Hidden:
    held = [2.0] * 100_000
    return lambda: held[90_000], lambda: held.__setitem__(90_000, 3.0)


def huge_dict() -> Hidden:
    held = dict.fromkeys(range(100_000), 2.0)
    return lambda: held[90_000], lambda: held.__setitem__(90_000, 3.0)


SEEN = [
    tensor_attribute, tensor_attribute_that_appears, tensor_attribute_in_a_list, list_on_a_tensor,
    slot_of_a_tensor_class, class_of_a_tensor, attribute_of_all_tensors, name_in_an_object_that_appears,
    name_in_a_dict_that_appears, name_in_a_module_that_appears, name_in_a_python_module_that_appears,
    name_in_a_python_module_that_is_tried, name_tried_by_the_caller, name_in_a_library_that_appears,
    number_in_a_library, list_in_a_library, attribute_of_a_class_of_the_library,
    private_attribute_of_a_class_of_the_library, function_that_modules_get_names_from,
    function_that_modules_get_names_from_appears, builtin_that_is_replaced, global_that_hides_a_builtin,
    order_of_an_ordered_dict, order_of_attributes, attributes_replaced_as_a_whole, bases_replaced, any_attribute,
    every_attribute, attribute_of_an_enum_member, name_in_a_getter, names_with_dots_in_a_getter,
    name_in_text_that_is_run, module_imported_by_text, module_in_the_list_of_modules, module_replaced,
    default_of_a_defaultdict, counter, chain_of_dicts, user_dict, deque_of_a_class, dataclass_with_slots,
    frozen_dataclass, local_of_a_thread, cached_result, argument_of_a_partial, state_of_a_partial,
    attribute_of_a_partial, number_of_ctypes, view_of_memory, long_array_of_python, long_array_of_numpy,
    shape_of_an_array, dtype_of_an_array, array_of_objects, object_in_an_array, field_of_an_array, record,
    date_in_an_array, mask_of_an_array, attribute_of_an_array, number_of_numpy, weak_proxy, weak_value, weak_key,
    member_of_a_weak_set, object_that_goes, cell, list_that_an_iterator_reads, hook_exchanged_in_its_dict,
    dict_of_hooks_exchanged, huge_list, huge_dict,
]  # fmt: skip


@pytest.mark.parametrize("build", SEEN, ids=lambda build: build.__name__)
def test_hidden_number_is_seen(build: Callable[[], Hidden]) -> None:
    check_seen(build)


@pytest.mark.parametrize("zero", [float, complex, np.float64, np.float32, np.complex64], ids=lambda zero: zero.__name__)
def test_sign_of_zero_is_seen(zero: Callable[[float], Any]) -> None:
    check_seen(sign_of_zero(zero))


def counted() -> Callable[[], float]:
    held = itertools.count()
    return lambda: 2.0 if next(held) < BEFORE else 3.0


def sent() -> Callable[[], float]:
    def values() -> Iterator[float]:
        total = 0.0
        while True:
            total += yield 2.0 if total < BEFORE else 3.0

    held: Any = values()
    next(held)
    return lambda: held.send(1.0)


def read_by_a_loop() -> Callable[[], float]:
    held = iter([2.0] * BEFORE + [3.0] * AFTER)

    def read() -> float:
        for value in held:
            return value
        return 0.0

    return read


def read_from_a_slice() -> Callable[[], float]:
    held = iter([2.0] * BEFORE + [3.0] * AFTER)
    return lambda: sum(itertools.islice(held, 1))


@pytest.mark.parametrize("build", [counted, sent, read_by_a_loop, read_from_a_slice], ids=lambda build: build.__name__)
@pytest.mark.filterwarnings("ignore:rote")
def test_iterator_that_the_step_advances_is_refused(build: Callable[[], Callable[[], float]]) -> None:
    def script(capture: Capture) -> Calls:
        read = build()
        step = capture(lambda x: x * read())
        for _ in range(BEFORE + AFTER):
            yield step(torch.ones(4))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        assert not found.steps[0].stats.replays
        assert "remedy" in found.steps[0].stats.refusals[0]


@pytest.mark.skipif(ORACLE_ONLY, reason="asks what is refused")
@pytest.mark.parametrize("asks", [False, True])
def test_step_may_hold_a_lock_but_not_ask_for_it(asks: bool) -> None:
    held, other = threading.Lock(), threading.RLock()

    def holds(x: Tensor) -> Tensor:
        with held, other:
            return x * 2

    def looks(x: Tensor) -> Tensor:
        return x * (3 if held.locked() else 2)

    captured = rote_capture(looks if asks else holds)
    for i in range(6):
        assert torch.equal(captured(torch.ones(2) + i), (torch.ones(2) + i) * 2)
    if asks:
        with held:
            assert torch.equal(captured(torch.ones(2)), torch.ones(2) * 3)
        assert "whether a lock is held" in captured.stats.refusals[0]
    else:
        assert captured.stats.replays >= 3


def test_weak_reference_does_not_keep_its_object() -> None:
    held = [Plain()]
    reference = weakref.ref(held[0])
    step = rote_capture(lambda x: x * (2 if reference() is not None else 3))
    for _ in range(5):
        assert step(torch.ones(1)).item() == 2
    held.clear()
    assert reference() is None
    assert step(torch.ones(1)).item() == 3


@pytest.mark.parametrize("composite", [False, True])
@pytest.mark.filterwarnings("ignore:rote")
def test_python_behind_an_op_is_seen(composite: bool) -> None:
    def script(capture: Capture) -> Calls:
        held = [2.0]
        name = f"rote_tests::scaled{next(numbers)}"
        if composite:
            library = torch.library.Library("rote_tests", "FRAGMENT")
            library.define(name.split("::")[1] + "(Tensor x) -> Tensor")
            library.impl(name.split("::")[1], lambda x: x * held[0], "CompositeImplicitAutograd")
        else:
            scaled = torch.library.custom_op(name, lambda x: x * 1, mutates_args=(), schema="(Tensor x) -> Tensor")
            scaled.register_autograd(lambda ctx, grad: grad * held[0])
        op = getattr(torch.ops.rote_tests, name.split("::")[1])

        def step(x: Tensor) -> Tensor:
            y = x.detach().requires_grad_()
            z = op(y).sum()
            z.backward()
            return y.grad  # type: ignore[return-value]

        captured = capture(step)
        for call in range(BEFORE + AFTER):
            if call == BEFORE:
                held[0] = 3.0
            yield captured(torch.ones(4))
        return {}

    check_right(script)


numbers = itertools.count()


@pytest.mark.filterwarnings("ignore")
def test_attribute_of_a_compiled_module_is_seen() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = 2.0

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    def script(capture: Capture) -> Calls:
        module: Any = torch.jit.script(Scaled())
        step = capture(lambda x: module(x) * 1, state=module)
        for call in range(BEFORE + AFTER):
            if call == BEFORE:
                module.scale = 3.0
            yield step(torch.ones(4))
        return {}

    check_right(script)


def message_of_a_failed_assertion() -> Hidden:
    held = setting(scale=2.0)

    def check() -> None:
        if held is not None:
            raise AssertionError(held.scale)

    def read() -> float:
        try:
            check()
        except AssertionError as error:
            return float(str(error).split("\n")[0])
        return 0.0

    return read, lambda: setattr(held, "scale", 3.0)


def test_message_of_an_assertion_that_is_caught_is_seen() -> None:
    check_seen(message_of_a_failed_assertion)


def test_message_of_an_assertion_is_not_in_reach() -> None:
    """pytest makes the messages of assertions, and so all of pytest would be in reach."""

    def step(x: Tensor) -> Tensor:
        assert x.dim() == 1
        return x * 2

    captured = rote_capture(step)
    for _ in range(6):
        captured(torch.ones(3))
    if not ORACLE_ONLY:
        assert captured.stats.replays, captured.stats
        assert "_pytest" not in captured.explain()


def nested(levels: int) -> Any:
    held: Any = [2.0]
    for _ in range(levels):
        held = [held]
    return held


def deep_value(held: Any, levels: int) -> float:
    for _ in range(levels):
        held = held[0]
    return float(held[0])


def test_walk_says_where_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    held = nested(20)
    many = [lambda: 2.0 for _ in range(5000)]
    step = rote_capture(lambda x: x * deep_value(held, 20) * many[0]())
    for _ in range(4):
        step(torch.ones(2))
    if ORACLE_ONLY:
        return
    (record,) = [record for record in caplog.records if "not guarded" in record.message]
    for text in (record.message, step.explain()):
        assert "closure['many'] has 5000 entries" in text
        assert "closure['held'][0][0]" in text and "objects deep" in text


def test_large_array_that_may_change_is_refused_with_the_remedy() -> None:
    held = np.zeros(9 << 20)
    step = rote_capture(lambda x: x * float(held[5] + 2))
    if ORACLE_ONLY:
        return
    with pytest.warns(UserWarning, match=r"flags\.writeable = False"):
        for _ in range(4):
            step(torch.ones(2))
    held.flags.writeable = False
    step = rote_capture(lambda x: x * float(held[5] + 2))
    for _ in range(6):
        assert step(torch.ones(2))[0].item() == 2.0
    assert step.stats.replays
    held.flags.writeable = True
    held[5] = 1.0
    with pytest.warns(UserWarning, match=r"flags\.writeable = False"):
        assert step(torch.ones(2))[0].item() == 3.0


def test_limit_of_depth_is_as_documented() -> None:
    """What lies deeper than the walk goes is out of sight, and said to be."""
    if ORACLE_ONLY:
        return
    held = nested(20)
    step = rote_capture(lambda x: x * deep_value(held, 20))
    for _ in range(6):
        step(torch.ones(1))
    inner = held
    for _ in range(20):
        inner = inner[0]
    inner[0] = 3.0
    assert step(torch.ones(1)).item() == 2.0  # eager: 3.0
    assert "objects deep" in step.explain()


def doubled_or_tripled(times: int, inner: bool) -> Callable[[Tensor], Tensor]:
    if inner:
        if times == 2:

            def factor() -> int:
                return 2
        else:

            def factor() -> int:
                return 3

        def step(x: Tensor) -> Tensor:
            return x * factor()
    elif times == 2:

        def step(x: Tensor) -> Tensor:
            return x * 2
    else:

        def step(x: Tensor) -> Tensor:
            return x * 3

    return step


@pytest.mark.parametrize("inner", [False, True])
def test_trusted_plans_are_those_of_the_same_code(inner: bool, tmp_path: Path) -> None:
    for times in (2, 3, 2):
        step = rote_capture(doubled_or_tripled(times, inner), plans=tmp_path, trust_plans=True)
        for _ in range(5):
            assert step(torch.ones(1)).item() == times
        if not ORACLE_ONLY:
            assert step.stats.replays, step.stats


def test_attribute_of_a_decorated_function() -> None:
    """A decorator of PyTorch's makes a function of its own; what a script keeps in that is the script's."""

    def script(capture: Capture) -> Calls:
        @torch.no_grad()
        def scaled(x: Tensor) -> Tensor:
            return x * getattr(scaled, "scale", 1.0)

        step = capture(lambda x: scaled(x) + 1)
        for call in range(15):
            if call in (5, 10):
                scaled.scale = float(call)  # type: ignore[attr-defined]
            yield step(torch.ones(2))
        return {}

    run = check_right(script)
    assert ORACLE_ONLY or run.stats[-1][0].replays >= 6, run.stats[-1][0]


@pytest.mark.parametrize("held", [torch.utils.data.Dataset, concurrent.futures.ThreadPoolExecutor, torch.nn.Identity])
def test_attribute_by_a_computed_name(held: Callable[[], Any]) -> None:
    """Of an object of a library's class, of which only what code names is guarded."""

    def script(capture: Capture) -> Calls:
        kept, names = held(), ["scale"]
        kept.scale = 2.0
        step = capture(lambda x: x * getattr(kept, names[0], 1.0))
        for call in range(15):
            if call == 5:
                kept.scale = 3.0
            elif call == 10:
                del kept.scale
            yield step(torch.ones(2))
        return {}

    run = check_right(script)
    assert ORACLE_ONLY or run.stats[-1][0].replays >= 6, run.stats[-1][0]


@pytest.mark.ranks(1)
def test_a_miss_names_what_a_module_has_now(monkeypatch: pytest.MonkeyPatch) -> None:
    def step(x: Tensor) -> Tensor:
        return x * getattr(torch, "rote_test_other", 2.0) + getattr(torch, "rote_test_third", 1.0)

    captured = rote.capture(step)
    x = torch.ones(3)
    for _ in range(4):
        captured(x)
    assert captured.stats.replays
    monkeypatch.setattr(torch, "rote_test_third", 5.0, raising=False)
    assert torch.equal(captured(x), torch.full((3,), 7.0))
    assert list(captured.stats.guard_misses) == ["torch.rote_test_third"]
