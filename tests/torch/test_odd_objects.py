"""Nothing that is in reach of a step makes recording raise, or runs code of the user's classes to look at it."""

import collections
import ctypes
import functools
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right, rote_capture
from torch import Tensor, nn


class Raises:
    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


class RaisesAlways:
    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")


class AnswersAnything:
    def __getattr__(self, name: str) -> Any:
        return self


class LiesAboutItsClass:
    @property
    def __class__(self) -> type:  # type: ignore[override]
        return dict

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("no dict")


class CannotBeShown:
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __str__(self) -> str:
        raise RuntimeError("no text")


class CannotBeCompared:
    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not equal to anything")

    def __hash__(self) -> int:
        return 1

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


class CannotBeHashed:
    def __hash__(self) -> int:
        raise RuntimeError("no hash")


class Meta(type):
    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(f"asked for {name}")

    def __eq__(cls, other: object) -> bool:
        raise RuntimeError("not equal to anything")

    def __hash__(cls) -> int:
        raise RuntimeError("no hash")

    def __instancecheck__(cls, instance: object) -> bool:
        raise RuntimeError("no check")


class OddClass(metaclass=Meta):
    pass


class OddDict(dict[Any, Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")

    def items(self) -> Any:
        raise RuntimeError("no items")

    def __getitem__(self, key: Any) -> Any:
        raise RuntimeError("no items")


class OddText(str):
    def __repr__(self) -> str:
        raise RuntimeError("no text")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("not equal to anything")

    def __hash__(self) -> int:
        return 1


class OddList(list[Any]):
    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __iter__(self) -> Any:
        raise RuntimeError("no items")


def odd_module() -> types.ModuleType:
    module = types.ModuleType("odd")
    vars(module).clear()
    return module


def opened() -> Any:
    return open(__file__)


def re_match() -> Any:
    import re

    return re.match("a", "a")


ODD: list[Callable[[], Any]] = [
    Raises, RaisesAlways, AnswersAnything, LiesAboutItsClass, CannotBeShown, CannotBeCompared,
    lambda: {CannotBeCompared(): 1, "a": 2}, CannotBeHashed, lambda: OddClass, lambda: OddClass(),
    lambda: OddDict(a=1, b=2), lambda: OddText("a"), lambda: {OddText("a"): 1}, lambda: OddList([1]),
    lambda: [OddClass],
    odd_module, lambda: torch.ops, lambda: torch.ops.aten.add, lambda: sys.modules, lambda: sys, lambda: torch,
    lambda: sys._getframe(), object, lambda: NotImplemented, lambda: object.__new__(nn.Linear), lambda: type,
    lambda: types.SimpleNamespace, lambda: weakref.proxy(OddList()), lambda: weakref.ref(OddDict()),
    lambda: memoryview(b"a"), lambda: torch._C, lambda: np, lambda: np.dtype("f8"), lambda: np.random.default_rng(0),
    opened, threading.Lock, threading.current_thread, lambda: torch.ones(1).storage(),
    lambda: torch.Generator(), lambda: classmethod(print), lambda: property(), lambda: slice([1], None),
    lambda: (lambda: (yield))(), lambda: iter([]), lambda: range(3), lambda: Exception("a", [1]), lambda: ...,
    lambda: functools.reduce, lambda: type("Empty", (), {"__slots__": ()})(), re_match,
    lambda: ctypes.CDLL(None),
    lambda: torch.nn.utils.parametrizations, lambda: collections.namedtuple("Point", "x y")(1, [2]),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(ODD)))
@pytest.mark.parametrize("place", ["closure", "attribute", "list"])
@pytest.mark.filterwarnings("ignore")
def test_nothing_in_reach_makes_recording_raise(number: int, place: str) -> None:
    def script(capture: Capture) -> Calls:
        odd = ODD[number]()
        held = types.SimpleNamespace(odd=odd)
        listed = [odd, 1]

        def closure(x: Tensor) -> Tensor:
            odd  # noqa: B018
            return x * 2

        def attribute(x: Tensor) -> Tensor:
            return x * (2 if held.odd is not None else 3)

        def listing(x: Tensor) -> Tensor:
            return x * (2 if listed[0] is not None else 3)

        step = capture({"closure": closure, "attribute": attribute, "list": listing}[place])
        for _ in range(5):
            yield step(torch.ones(3))
        return {}

    check_right(script)


def test_looking_runs_no_code_of_a_class() -> None:
    """Looking calls no property, and no method that answers for attributes."""
    asked: list[str] = []

    class Watched:
        @property
        def scale(self) -> float:
            asked.append("scale")
            return 2.0

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            raise AttributeError(name)

        def __eq__(self, other: object) -> bool:
            asked.append("==")
            return self is other

        def __hash__(self) -> int:
            return 1

    held = Watched()
    step = rote_capture(lambda x: x * (2 if held is not None else 3))
    for _ in range(6):
        step(torch.ones(2))
    assert not asked
    if not ORACLE_ONLY:
        assert step.stats.replays, step.stats
