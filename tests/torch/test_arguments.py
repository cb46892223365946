"""Whatever is passed to a step, a call equals eager: however the argument
changed since it was recorded.

Each kind of value comes with two factories, of equal values and of another
one, and is passed in turn as one object again and again, as a new equal one,
as another one at the same address perhaps, changed in place and back, twice,
and swapped with its neighbour. What the step returns depends on all that
Python can read of the value.
"""

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import functools
import gc
import operator
import pathlib
import random
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from extent import EVERYTHING, SEED
from oracle import Calls, Capture, check_equal, check_right, over
from torch import Tensor, nn


class Pair(NamedTuple):
    a: Any
    b: Any


class WithMethods(collections.namedtuple("WithMethods", "a b")):  # it has a dict: no __slots__
    def total(self) -> Any:
        return self.a + self.b


class Row(tuple[Any, ...]):
    """A tuple that may have attributes."""


class Text(str):
    pass


class Number(float):
    pass


class Count(int):
    pass


class SlottedText(str):
    __slots__ = ("scale",)


class Color(enum.Enum):
    RED = 2.0
    BLUE = 3.0


class Level(enum.IntEnum):
    LOW = 2
    HIGH = 3


class Access(enum.Flag):
    READ = 1
    WRITE = 2
    RUN = 4


class Object:
    def __init__(self, value: Any) -> None:
        self.value = value

    def read(self) -> Any:
        return self.value


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


@dataclasses.dataclass
class Config:
    value: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: Any


class Table(dict[str, Any]):
    pass


class Stack(list[Any]):
    pass


class Measured(np.ndarray):
    pass


class Marked(torch.Tensor):
    pass


def double(x: Any) -> Any:
    return x * 2


def triple(x: Any) -> Any:
    return x * 3


def scaled(factor: float, x: Any) -> Any:
    return x * factor


def shifted(x: Any, by: float) -> Any:
    return x + by


def attribute(value: Any, scale: Any) -> Any:
    value.scale = scale
    return value


def number(value: Any, depth: int = 0) -> float:
    """A number that depends on everything in a value, the signs of zeros and the order of entries included."""
    own = vars(value) if hasattr(value, "__dict__") and not isinstance(value, type | types.FunctionType) else {}
    extra = number(dict(own), depth + 1) * 0.3 if own and depth < 8 else 0.0
    if isinstance(value, SlottedText):
        extra += number(value.scale, depth + 1)
    if value is None or depth > 8:
        return 0.5 + extra
    if isinstance(value, Tensor):
        return 0.1 * value.dim() + extra + (0.7 if type(value) is Marked else 0.0)
    if isinstance(value, bool | np.bool_):
        return 1.25 + value
    if isinstance(value, enum.Enum):
        return number(value.value, depth + 1)
    if isinstance(value, int | np.integer):
        return float(value % 1009) + extra + (value == 0)
    if isinstance(value, float | np.floating):
        return float(np.copysign(1.0, value)) * 0.01 + float(value) + extra
    if isinstance(value, complex | np.complexfloating):
        return number(float(value.real)) + 2 * number(float(value.imag))
    if isinstance(value, str | bytes | bytearray):
        return sum((i + 1) * ord(c) for i, c in enumerate(str(value))) % 251 / 10 + extra
    if isinstance(value, np.ndarray):
        return entries([number(x) for x in np.ma.getdata(value).ravel().tolist()]) + number(tuple(value.shape)) + extra
    if isinstance(value, functools.partial):
        return number((value(1.0), value.args, value.keywords), depth + 1) + extra
    if isinstance(value, range | slice):
        return number((value.start, value.stop, value.step), depth + 1)
    if isinstance(value, dict | types.MappingProxyType):
        return entries([number(k, depth + 1) * 1.5 + number(v, depth + 1) for k, v in value.items()]) + extra
    if isinstance(value, weakref.ref):
        return number(value(), depth + 1)
    if isinstance(value, nn.Module):
        return float(value.training) + extra
    if isinstance(value, Slots):
        return number(value.value, depth + 1)
    if isinstance(value, torch.dtype | torch.device | torch.layout | torch.memory_format | pathlib.PurePath):
        return number(str(value))
    if isinstance(value, type):
        return number(value.__name__)
    if isinstance(value, decimal.Decimal | fractions.Fraction | datetime.date):
        return number(str(value))
    if isinstance(value, operator.itemgetter):
        return float(value([1.0, 2.0, 3.0]))
    if callable(value):
        bound = isinstance(value, types.MethodType | types.BuiltinMethodType | types.MethodWrapperType)
        return float(value() if bound else value(1.0)) + extra
    try:
        return entries([number(item, depth + 1) for item in value]) + extra
    except TypeError:
        return extra


def entries(numbers: list[float]) -> float:
    return sum((i + 1) * x for i, x in enumerate(numbers)) + 0.01 * len(numbers)


Make = Callable[[], Any]
Change = Callable[[Any], Any] | None
# A value, another one, and what changes the first in place and back, if anything does.
Kind = tuple[Make, Make, Change, Change]


def kind(a: Make, b: Make, change: Change = None, back: Change = None) -> Kind:
    return a, b, change, back


def scaled_attribute(make: Make) -> Kind:
    """The attribute of a value of some class."""
    a, b = (lambda scale=scale: attribute(make(), scale) for scale in (2.0, 3.0))
    return kind(a, b, assign("scale", 4.0), assign("scale", 2.0))


def attribute_value(make: Callable[[Any], Any]) -> Kind:
    return kind(lambda: make(1.0), lambda: make(2.0), assign("value", 5.0), assign("value", 1.0))


def put(key: Any, value: Any) -> Callable[[Any], Any]:
    return lambda target: target.__setitem__(key, value)


def assign(name: str, value: Any) -> Callable[[Any], Any]:
    return lambda target: setattr(target, name, value)


def text(*parts: str) -> str:
    """A text that is a new object every time."""
    return "".join(parts)


def float_array(*values: float) -> Any:
    return np.array(values)


class Reaches:
    """Objects that outlive the factories, for what only refers to one."""

    objects = (Object(2.0), Object(3.0))


KINDS: dict[str, Kind] = {
    # numbers and text
    "float": kind(lambda: float("2.5"), lambda: float("3.5")),
    "float_zero": kind(lambda: 0.0, lambda: -0.0),
    "nan": kind(lambda: float("nan"), lambda: 1.0),
    "int": kind(lambda: int("3000"), lambda: int("3001")),
    "large_int": kind(lambda: 1 << 80, lambda: (1 << 80) + 1),
    "large_int_of_one_hash": kind(lambda: 1 << 80, lambda: (1 << 80) + (1 << 61) - 1),
    "bool": kind(lambda: True, lambda: False),
    "bool_and_int": kind(lambda: True, lambda: 1),
    "int_and_float": kind(lambda: 1, lambda: 1.0),
    "none": kind(lambda: None, lambda: 1.0),
    "complex": kind(lambda: complex(1, 2), lambda: complex(1, 3)),
    "complex_zero": kind(lambda: complex(0.0, 0.0), lambda: complex(-0.0, 0.0)),
    "complex_zero_imaginary": kind(lambda: complex(0.0, 0.0), lambda: complex(0.0, -0.0)),
    "str": kind(lambda: text("ab", "c"), lambda: text("ab", "d")),
    "bytes": kind(lambda: text("ab", "c").encode(), lambda: text("ab", "d").encode()),
    "str_subclass": kind(lambda: Text("abc"), lambda: Text("abd")),
    "str_attribute": scaled_attribute(lambda: Text("abc")),
    "str_slot": scaled_attribute(lambda: SlottedText("abc")),
    "float_attribute": scaled_attribute(lambda: Number(1.5)),
    "float_subclass_zero": kind(lambda: Number(0.0), lambda: Number(-0.0)),
    "int_attribute": kind(
        lambda: attribute(Count(5), [2.0]),
        lambda: attribute(Count(5), [3.0]),
        lambda v: v.scale.append(4.0),
        lambda v: v.scale.pop(),
    ),
    "decimal": kind(lambda: decimal.Decimal("1.0"), lambda: decimal.Decimal("1.00")),
    "fraction": kind(lambda: fractions.Fraction(1, 3), lambda: fractions.Fraction(2, 3)),
    "date": kind(lambda: datetime.date(2020, 1, 1), lambda: datetime.date(2020, 1, 2)),
    "path": kind(lambda: pathlib.PurePath("a/b"), lambda: pathlib.PurePath("a/c")),
    # NumPy's
    "float64": kind(lambda: np.float64(2.5), lambda: np.float64(3.5)),
    "float64_zero": kind(lambda: np.float64(0.0), lambda: np.float64(-0.0)),
    "float64_and_float": kind(lambda: np.float64(2.5), lambda: 2.5),
    "float32": kind(lambda: np.float32(2.5), lambda: np.float32(3.5)),
    "float32_zero": kind(lambda: np.float32(0.0), lambda: np.float32(-0.0)),
    "int64": kind(lambda: np.int64(5), lambda: np.int64(6)),
    "int64_and_int32": kind(lambda: np.int64(5), lambda: np.int32(5)),
    "numpy_bool": kind(lambda: np.bool_(True), lambda: np.bool_(False)),
    "complex128": kind(lambda: np.complex128(complex(0.0, 0.0)), lambda: np.complex128(complex(0.0, -0.0))),
    "array": kind(lambda: float_array(1, 2), lambda: float_array(1, 3), put(0, 5.0), put(0, 1.0)),
    "array_shape": kind(
        lambda: float_array(1, 2, 3, 4),
        lambda: float_array(1, 2, 3, 4).reshape(2, 2),
        assign("shape", (2, 2)),
        assign("shape", (4,)),
    ),
    "array_zero_dim": kind(lambda: np.array(2.0), lambda: np.array(3.0), put((), 4.0), put((), 2.0)),
    "array_subclass": kind(
        lambda: float_array(1, 2).view(Measured),
        lambda: float_array(1, 3).view(Measured),
        put(0, 5.0),
        put(0, 1.0),
    ),
    "masked_array": kind(
        lambda: np.ma.array([1.0, 2.0], mask=[0, 1]),
        lambda: np.ma.array([1.0, 3.0], mask=[0, 1]),
        put(0, 5.0),
        put(0, 1.0),
    ),
    "object_array": kind(
        lambda: np.array([1.5, Object(2.0)], dtype=object)[:1],
        lambda: np.array([2.5, Object(2.0)], dtype=object)[:1],
        put(0, 7.5),
        put(0, 1.5),
    ),
    # immutable containers
    "tuple": kind(lambda: (1.0, 2.0), lambda: (1.0, 3.0)),
    "tuple_empty": kind(lambda: (), lambda: (1.0,)),
    "tuple_zero": kind(lambda: (0.0,), lambda: (-0.0,)),
    "namedtuple": kind(lambda: Pair(float("1"), 2.0), lambda: Pair(float("2"), 2.0)),
    "namedtuple_and_tuple": kind(lambda: Pair(1.0, 2.0), lambda: (1.0, 2.0)),
    "namedtuple_of_a_list": kind(
        lambda: Pair([1.0], 2.0), lambda: Pair([3.0], 2.0), lambda v: v.a.append(4.0), lambda v: v.a.pop()
    ),
    "namedtuple_of_an_object": kind(
        lambda: Pair(Object(1.0), 2.0),
        lambda: Pair(Object(3.0), 2.0),
        lambda v: assign("value", 9.0)(v.a),
        lambda v: assign("value", 1.0)(v.a),
    ),
    "namedtuple_with_methods": kind(lambda: WithMethods(1.0, 2.0), lambda: WithMethods(1.0, 3.0)),
    "tuple_attribute": scaled_attribute(lambda: Row((1.0, 2.0))),
    "tuple_subclass": kind(lambda: Row((1.0, 2.0)), lambda: Row((1.0, 3.0))),
    "tuple_of_many": kind(lambda: tuple(range(3000)), lambda: tuple(range(1, 3001))),
    "frozenset": kind(lambda: frozenset([1.0, 2.0]), lambda: frozenset([1.0, 3.0])),
    "frozenset_of_types": kind(lambda: frozenset([1]), lambda: frozenset([1.0])),
    "frozenset_order": kind(lambda: frozenset([0, 8]), lambda: frozenset([8, 0])),
    "size": kind(lambda: torch.Size([2, 3]), lambda: torch.Size([2, 4])),
    "size_and_tuple": kind(lambda: torch.Size([2, 3]), lambda: (2, 3)),
    "range": kind(lambda: range(3), lambda: range(4)),
    "range_equal": kind(lambda: range(0, 3, 2), lambda: range(0, 4, 2)),
    "slice": kind(lambda: slice(0, 3), lambda: slice(0, 4)),
    "proxy": kind(lambda: types.MappingProxyType({"a": 1.0}), lambda: types.MappingProxyType({"a": 2.0})),
    "partial": kind(
        lambda: functools.partial(scaled, 2.0),
        lambda: functools.partial(scaled, 3.0),
    ),
    "partial_keywords": kind(
        lambda: functools.partial(shifted, by=2.0),
        lambda: functools.partial(shifted, by=3.0),
        lambda v: put("by", 5.0)(v.keywords),
        lambda v: put("by", 2.0)(v.keywords),
    ),
    "bound_method": kind(
        lambda: Object(2.0).read,
        lambda: Object(3.0).read,
        lambda v: assign("value", 5.0)(v.__self__),
        lambda v: assign("value", 2.0)(v.__self__),
    ),
    "method_of_one_object": kind(lambda: Reaches.objects[0].read, lambda: Reaches.objects[1].read),
    "builtin_method": kind(lambda: [1.0, 2.0].copy().__sizeof__, lambda: [1.0, 2.0, 3.0].copy().__sizeof__),
    "method_wrapper": kind(lambda: [1.0, 2.0].__len__, lambda: [1.0, 2.0, 3.0].__len__),
    "dict_view": kind(lambda: {"a": 1.0}.values(), lambda: {"a": 2.0}.values()),
    "itemgetter": kind(lambda: operator.itemgetter(1), lambda: operator.itemgetter(2)),
    # mutable containers
    "list": kind(lambda: [1.0, 2.0], lambda: [1.0, 3.0], lambda v: v.append(4.0), lambda v: v.pop()),
    "list_order": kind(lambda: [1.0, 2.0], lambda: [2.0, 1.0], lambda v: v.reverse(), lambda v: v.reverse()),
    "list_subclass": kind(
        lambda: Stack([1.0, 2.0]), lambda: Stack([1.0, 3.0]), lambda v: v.append(4.0), lambda v: v.pop()
    ),
    "dict": kind(lambda: {"a": 1.0}, lambda: {"a": 2.0}, put("a", 5.0), put("a", 1.0)),
    "dict_order": kind(lambda: {"a": 1.0, "b": 2.0}, lambda: {"b": 2.0, "a": 1.0}),
    "dict_keys": kind(lambda: {1: 2.0}, lambda: {1.0: 2.0}),
    "dict_subclass": kind(lambda: Table(a=1.0), lambda: Table(a=2.0), put("a", 5.0), put("a", 1.0)),
    "ordered_dict": kind(
        lambda: collections.OrderedDict(a=1.0, b=2.0),
        lambda: collections.OrderedDict(b=2.0, a=1.0),
        lambda v: v.move_to_end("a"),
        lambda v: v.move_to_end("a", last=False),
    ),
    "default_dict": kind(
        lambda: collections.defaultdict(float, a=1.0),
        lambda: collections.defaultdict(float, a=2.0),
        put("a", 5.0),
        put("a", 1.0),
    ),
    "set": kind(lambda: {1.0}, lambda: {2.0}, lambda v: v.add(3.0), lambda v: v.remove(3.0)),
    "deque": kind(
        lambda: collections.deque([1.0]), lambda: collections.deque([2.0]), lambda v: v.append(3.0), lambda v: v.pop()
    ),
    "bytearray": kind(lambda: bytearray(b"abc"), lambda: bytearray(b"abd"), put(0, 98), put(0, 97)),
    "array_array": kind(lambda: array.array("d", [1.0]), lambda: array.array("d", [2.0]), put(0, 3.0), put(0, 1.0)),
    "chain_map": kind(
        lambda: collections.ChainMap({"a": 1.0}), lambda: collections.ChainMap({"a": 2.0}), put("a", 5.0), put("a", 1.0)
    ),
    "namespace": attribute_value(lambda value: types.SimpleNamespace(value=value)),
    # objects
    "object": attribute_value(Object),
    "slots": attribute_value(Slots),
    "dataclass": attribute_value(Config),
    "frozen_dataclass": kind(lambda: Frozen(1.0), lambda: Frozen(2.0)),
    "enum": kind(lambda: Color.RED, lambda: Color.BLUE),
    "int_enum": kind(lambda: Level.LOW, lambda: Level.HIGH),
    "int_enum_and_int": kind(lambda: Level.LOW, lambda: 2),
    "flag": kind(lambda: Access.READ | Access.WRITE, lambda: Access.READ | Access.RUN),
    "class": kind(lambda: Object, lambda: Slots),
    "function": kind(lambda: double, lambda: triple),
    "lambda": kind(lambda: lambda x: x * 2, lambda: lambda x: x * 3),
    "closure": kind(lambda: _closure(2.0), lambda: _closure(3.0)),
    "weak_reference": kind(lambda: weakref.ref(Reaches.objects[0]), lambda: weakref.ref(Reaches.objects[1])),
    "module": kind(lambda: nn.Linear(2, 2), lambda: nn.Linear(2, 2).eval(), nn.Module.eval, nn.Module.train),
    # torch's
    "dtype": kind(lambda: torch.float32, lambda: torch.float64),
    "device": kind(lambda: torch.device("cpu"), lambda: torch.device("cpu:0")),
    "layout": kind(lambda: torch.strided, lambda: torch.sparse_coo),
    "memory_format": kind(lambda: torch.contiguous_format, lambda: torch.channels_last),
    "tensor": kind(lambda: torch.ones(2), lambda: torch.ones(2, 2)),
    "tensor_subclass": kind(lambda: torch.ones(2).as_subclass(Marked), lambda: torch.ones(2)),
    "tensor_attribute": scaled_attribute(lambda: torch.ones(2)),
    "tensor_attribute_absent": kind(
        lambda: torch.ones(2),
        lambda: attribute(torch.ones(2), 3.0),
        assign("scale", 4.0),
        lambda v: delattr(v, "scale"),
    ),
    "tensor_attribute_list": kind(
        lambda: attribute(torch.ones(2), [2.0]),
        lambda: attribute(torch.ones(2), [3.0]),
        lambda v: v.scale.append(1.0),
        lambda v: v.scale.pop(),
    ),
    "parameter_attribute": scaled_attribute(lambda: nn.Parameter(torch.ones(2))),
    "subclass_attribute": scaled_attribute(lambda: torch.ones(2).as_subclass(Marked)),
    "namedtuple_of_tensors": kind(lambda: Pair(torch.ones(2), 2.0), lambda: Pair(torch.ones(2), 3.0)),
    "return_type": kind(lambda: torch.ones(2, 2).max(0), lambda: torch.ones(2, 2).min(0)),
    "tuple_subclass_of_tensors": kind(lambda: Row((torch.ones(2), 2.0)), lambda: Row((torch.ones(2), 3.0))),
}


def _closure(factor: float) -> Callable[[float], float]:
    return lambda x: x * factor


def new_equal(case: Kind) -> Iterator[Any]:
    """Equal values, each a new object, then other ones, then the first again."""
    a, b, _, _ = case
    for make in (a, b, a):
        for _ in range(5):
            yield make()


def reused_address(case: Kind) -> Iterator[Any]:
    """Values that replace each other, so that their addresses are used again."""
    a, b, _, _ = case
    for i in range(16):
        value = (a if i < 6 or i % 4 == 0 else b)()
        yield value
        del value
        gc.collect(0)


def changed_in_place(case: Kind) -> Iterator[Any]:
    a, _, change, back = case
    value = a()
    for i in range(15):
        if i == 5 and change is not None:
            change(value)
        if i == 10 and back is not None:
            back(value)
        yield value


def two_in_turn(case: Kind) -> Iterator[Any]:
    a, b, _, _ = case
    values = a(), b()
    for i in range(20):
        yield values[(i // 5) % 2]


CHANGES = [new_equal, reused_address, changed_in_place, two_in_turn]
CASES = [(name, change) for name in KINDS for change in CHANGES if change is not changed_in_place or KINDS[name][2]]
if not EVERYTHING:
    CASES = random.Random(SEED).sample(CASES, len(CASES) // 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "change"), CASES, ids=[f"{name}-{change.__name__}" for name, change in CASES])
def test_value(name: str, change: Callable[[Kind], Iterator[Any]]) -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x, value: (x * number(value), _total(x, value)))
        x = torch.arange(3.0) + 1
        for value in change(KINDS[name]):
            yield step(x, value)
        return None

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_right(script)


@pytest.mark.parametrize("how", ["argument", "in a list", "by name", "of an attribute"])
def test_shapes_are_compared_by_their_sizes(how: str) -> None:
    """Each call has an object of its own."""

    def script(capture: Capture) -> Calls:
        held = Object(None)

        def step(x: Tensor, shapes: Any = None, *, shape: Any = None) -> Tensor:
            last = held.value or shape or (shapes[0] if isinstance(shapes, list) else shapes)
            return x.reshape(last) * last[0]

        captured = capture(step)
        for i in range(26):
            x = torch.arange(6.0) + i
            like = torch.ones((2, 3) if i < 13 else (3, 2)).shape
            if how == "of an attribute":
                held.value = like
                yield captured(x)
            elif how == "by name":
                yield captured(x, shape=like)
            else:
                yield captured(x, [like] if how == "in a list" else like)

    check_equal(script, replays=18)


def _total(x: Tensor, value: Any) -> Tensor:
    """What the tensors in a value add up to."""
    if isinstance(value, Tensor):
        return x.sum() + value.as_subclass(Tensor).detach().sum()
    if isinstance(value, tuple):
        return sum((_total(x, item) for item in value), x.sum())
    return x.sum()


constant = torch.ones(3, 4)


def through_a_global() -> Callable[[Tensor], bool]:
    return lambda x: x is constant


def through_a_closure() -> Callable[[Tensor], bool]:
    held = constant
    return lambda x: x is held


def through_a_function_in_a_list() -> Callable[[Tensor], bool]:
    held = constant
    functions = [lambda: held]
    return lambda x: x is functions[0]()


def through_an_attribute() -> Callable[[Tensor], bool]:
    held = types.SimpleNamespace(one=constant)
    return lambda x: x is held.one


def through_a_weak_reference() -> Callable[[Tensor], bool]:
    reference = weakref.ref(constant)
    return lambda x: x is reference()


def through_a_partial() -> Callable[[Tensor], bool]:
    return functools.partial(operator.is_, constant)


def by_memory() -> Callable[[Tensor], bool]:
    held = constant[:2]
    return lambda x: x.untyped_storage() is held.untyped_storage() or x is constant


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "through",
    [
        *(through_a_global, through_a_closure, through_a_function_in_a_list, through_an_attribute),
        *(through_a_weak_reference, through_a_partial, by_memory),
    ],
)
@pytest.mark.filterwarnings("ignore:rote")
def test_an_argument_that_is_something_else_in_reach(through: Callable[..., Any], first: bool) -> None:
    def script(capture: Capture) -> Calls:
        is_it = through()

        def step(x: Tensor) -> Tensor:
            return x * (2 if is_it(x) else 3)

        calls = [constant if (i < 7) == first else constant.clone() for i in range(14)]
        return over(capture, step, calls)

    check_right(script, replays=0 if through is by_memory else 8)
