"""Special methods that are class methods, properties or other descriptors are followed as those of objects are."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hidden import Hidden, check_seen
from torch import Tensor
from torch.utils import _pytree as pytree

SCALE = 2.0


def set_scale() -> None:
    global SCALE
    SCALE = 3.0


def helper() -> float:
    return SCALE


def by_torch_function() -> Hidden:
    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> float:
            return SCALE

    duck: Any = Duck()
    return lambda: float(torch.sin(duck)), set_scale


def by_torch_function_of_a_base() -> Hidden:
    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> float:
            return helper()

    class Child(Duck):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> float:
            return super().__torch_function__(func, types, args, kwargs)

    duck: Any = Child()
    return lambda: float(torch.sin(duck)), set_scale


def by_torch_function_that_is_replaced() -> Hidden:
    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> float:
            return 2.0

    def other(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> float:
        return 3.0

    duck: Any = Duck()
    return lambda: float(torch.sin(duck)), lambda: setattr(Duck, "__torch_function__", classmethod(other))


def by_class_getitem() -> Hidden:
    class Table:
        @classmethod
        def __class_getitem__(cls, index: int) -> float:
            return SCALE

    return lambda: Table[0], set_scale  # type: ignore[misc, return-value]


def by_init_subclass() -> Hidden:
    class Base:
        scale: float

        def __init_subclass__(cls) -> None:
            cls.scale = SCALE

    return lambda: type("Child", (Base,), {}).scale, set_scale  # type: ignore[attr-defined]


def by_a_default() -> Hidden:
    class Duck:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None, s: float = 2.0) -> float:
            return s

    duck: Any = Duck()
    made: Any = Duck.__dict__["__torch_function__"].__func__
    return lambda: float(torch.sin(duck)), lambda: setattr(made, "__defaults__", ((), None, 3.0))


def by_a_partial_method() -> Hidden:
    def scaled(self: Any, scale: list[float]) -> int:
        return int(scale[0])

    held = [2.0]

    class Sized:
        __len__ = functools.partialmethod(scaled, held)

    sized: Any = Sized()
    return lambda: float(len(sized)), lambda: held.__setitem__(0, 3.0)


def by_a_property() -> Hidden:
    class Duck:
        @property
        def __torch_scale__(self) -> float:
            return SCALE

    duck = Duck()
    return lambda: duck.__torch_scale__, set_scale


def by_a_node_of_a_pytree() -> Hidden:
    class Node: ...

    pytree.register_pytree_node(Node, lambda node: ([SCALE], None), lambda leaves, context: Node())
    node = Node()
    return lambda: float(pytree.tree_leaves(node)[0]), set_scale


class Wrapper(torch.Tensor):
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Wrapper":
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> "Wrapper":
        return Wrapper(func(args[0].inner) * SCALE)


def by_torch_dispatch() -> Hidden:
    return lambda: Wrapper(torch.zeros(1)).exp().inner.sum(), set_scale  # type: ignore[return-value]


@pytest.mark.parametrize(
    "build",
    [
        by_torch_function,
        by_torch_function_of_a_base,
        by_torch_function_that_is_replaced,
        by_class_getitem,
        by_init_subclass,
        by_a_default,
        by_a_partial_method,
        by_a_property,
        by_a_node_of_a_pytree,
        by_torch_dispatch,
    ],
    ids=lambda build: build.__name__,
)
@pytest.mark.filterwarnings("ignore:rote")
def test_special_methods_are_followed(build: Callable[[], Hidden]) -> None:
    def from_the_start() -> Hidden:
        global SCALE
        SCALE = 2.0
        return build()

    check_seen(from_the_start)
