"""Names that code looks up in globals, in the dict of a Python module or in `sys.modules` are guarded, wherever the
name stands: in a getter of `operator`, or in the text of another function than that which hands out the dict."""

import functools
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

import elsewhere
import pytest
from hidden import Hidden, check_seen

SCALE = 2.0
CONFIG = {"scale": 2.0}
MODULE = "rote_test_looked_up"


def set_scale() -> None:
    global SCALE
    SCALE = 3.0


def set_config() -> None:
    CONFIG["scale"] = 3.0


def look(own: Any) -> float:
    return own["SCALE"]  # type: ignore[no-any-return]


def look_at_module(modules: Any) -> float:
    return modules["rote_test_looked_up"].scale  # type: ignore[no-any-return]


def made_module() -> types.ModuleType:
    made = types.ModuleType(MODULE)
    made.scale, made.config = 2.0, {"scale": 2.0}  # type: ignore[attr-defined]
    return made


def getter() -> Hidden:
    get = operator.itemgetter("SCALE")
    return lambda: get(globals()), set_scale


def getters_one_after_the_other() -> Hidden:
    outer, inner = operator.itemgetter("CONFIG"), operator.itemgetter("scale")
    return lambda: inner(outer(globals())), set_config


def partial_of_getattr() -> Hidden:
    get = functools.partial(getattr, sys.modules[__name__], "SCALE")
    return lambda: get(), set_scale


def picked(SCALE: float = 0.0, **others: Any) -> float:
    return SCALE


def globals_as_arguments() -> Hidden:
    return lambda: picked(**globals()), set_scale


def getters_in_a_list() -> Hidden:
    getters = [operator.itemgetter("CONFIG"), operator.itemgetter("scale")]
    return lambda: functools.reduce(lambda value, get: get(value), getters, globals()), set_config  # type: ignore[arg-type, return-value]


def getter_of_several() -> Hidden:
    get = operator.itemgetter("CONFIG", "SCALE")
    return lambda: get(globals())[1], set_scale


def getter_in_a_partial() -> Hidden:
    each = functools.partial(map, operator.itemgetter("SCALE"))
    return lambda: sum(each([globals()])), set_scale


def getter_in_a_class() -> Hidden:
    class Reader:
        read = operator.itemgetter("SCALE")

    return lambda: Reader.read(globals()), set_scale


def method_with_a_default() -> Hidden:
    get = operator.methodcaller("get", "LATE", 2.0)
    globals().pop("LATE", None)
    return lambda: get(globals()), lambda: globals().__setitem__("LATE", 3.0)


def text_in_another_function() -> Hidden:
    return lambda: look(globals()), set_scale


def globals_of_another_function() -> Hidden:
    get = operator.itemgetter("SCALE")
    elsewhere.SCALE = 2.0
    return lambda: get(elsewhere.function.__globals__), lambda: setattr(elsewhere, "SCALE", 3.0)


def getter_of_a_module() -> Hidden:
    module, get = made_module(), operator.itemgetter("config")
    return lambda: get(vars(module))["scale"], lambda: module.config.__setitem__("scale", 3.0)


def getter_of_a_loaded_module() -> Hidden:
    module = sys.modules[MODULE] = made_module()
    get = operator.itemgetter(MODULE)
    return lambda: get(sys.modules).scale, lambda: setattr(module, "scale", 3.0)


def getter_of_a_loaded_module_that_is_replaced() -> Hidden:
    sys.modules[MODULE], other = made_module(), made_module()
    other.scale = 3.0  # type: ignore[attr-defined]
    get = operator.itemgetter(MODULE)
    return lambda: get(sys.modules).scale, lambda: sys.modules.__setitem__(MODULE, other)


def text_of_a_loaded_module_in_another_function() -> Hidden:
    module = sys.modules[MODULE] = made_module()
    return lambda: look_at_module(sys.modules), lambda: setattr(module, "scale", 3.0)


CASES = [
    getter, getters_one_after_the_other, getters_in_a_list, getter_of_several, getter_in_a_partial, getter_in_a_class,
    partial_of_getattr, globals_as_arguments,
    method_with_a_default, text_in_another_function, globals_of_another_function, getter_of_a_module,
    getter_of_a_loaded_module, getter_of_a_loaded_module_that_is_replaced, text_of_a_loaded_module_in_another_function,
]  # fmt: skip


@pytest.mark.parametrize("build", CASES, ids=lambda build: build.__name__)
def test_a_name_that_is_looked_up_is_seen(build: Callable[[], Hidden]) -> None:
    def fresh() -> Hidden:
        globals().update(SCALE=2.0, CONFIG={"scale": 2.0})
        return build()

    check_seen(fresh)
