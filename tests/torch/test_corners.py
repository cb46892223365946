"""Numbers in the corners of Python where few programs keep any: a change of each is seen, or the step is refused."""

import asyncio
import builtins
import collections
import concurrent.futures
import contextvars
import copy
import copyreg
import random
import types
import typing
import weakref
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hidden import Hidden, check_seen, run_hidden
from oracle import ORACLE_ONLY

NUMBER = 2.0
TEXT = "NUMBER"
CODE = compile("NUMBER", "corner", "eval")


class First:
    pass


class Noted:
    a: float = 0.0


def set_number() -> None:
    globals()["NUMBER"] = 3.0


def put_back() -> None:
    """Undoes what cases change."""
    globals()["NUMBER"] = 2.0
    Noted.__annotations__.pop("b", None)
    copyreg.dispatch_table.pop(First, None)
    torch.__future__.set_swap_module_params_on_conversion(False)
    random.seed(3)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    put_back()


def anew(build: Callable[[], Hidden]) -> Callable[[], Hidden]:
    """The case, eager and captured alike from the same state."""

    def built() -> Hidden:
        put_back()
        return build()

    return built


# --- guarded -------------------------------------------------------------------------


def type_hints() -> Hidden:
    return lambda: float(len(typing.get_type_hints(Noted))), lambda: Noted.__annotations__.__setitem__("b", float)


def list_in_a_slice() -> Hidden:
    held = slice(0, [2.0])
    return lambda: held.stop[0], lambda: held.stop.__setitem__(0, 3.0)


def object_in_a_slice() -> Hidden:
    held = slice(types.SimpleNamespace(k=2.0), None)
    return lambda: held.start.k, lambda: setattr(held.start, "k", 3.0)


def result_of_a_future() -> Hidden:
    held: concurrent.futures.Future[dict[str, float]] = concurrent.futures.Future()
    held.set_result({"k": 2.0})
    return lambda: held.result()["k"], lambda: held.result().__setitem__("k", 3.0)


def error_of_a_future() -> Hidden:
    held: concurrent.futures.Future[float] = concurrent.futures.Future()
    held.set_exception(ValueError(2.0))
    return lambda: held.exception().args[0], lambda: setattr(held.exception(), "args", (3.0,))  # type: ignore[union-attr]


def function_behind_a_ufunc() -> Hidden:
    held = [2.0]
    function = np.frompyfunc(lambda x: x * held[0], 1, 1)
    return lambda: float(function(1.0)), lambda: held.__setitem__(0, 3.0)


def swapped_parameters() -> Hidden:
    future = torch.__future__
    return (
        lambda: 3.0 if future.get_swap_module_params_on_conversion() else 2.0,
        lambda: future.set_swap_module_params_on_conversion(True),
    )


def builtins_of_a_function() -> Hidden:
    own = {**vars(builtins), "number": 2.0}
    read = types.FunctionType((lambda: number).__code__, {"__builtins__": own})  # type: ignore[name-defined] # noqa: F821
    return read, lambda: own.__setitem__("number", 3.0)


def how_copies_are_made() -> Hidden:
    held = First()

    def made_otherwise(_: First) -> tuple[type, tuple[()]]:
        return collections.OrderedDict, ()

    return (
        lambda: 2.0 if type(copy.copy(held)) is First else 3.0,
        lambda: copyreg.pickle(First, made_otherwise),  # type: ignore[arg-type]
    )


GUARDED = [
    type_hints,
    list_in_a_slice,
    object_in_a_slice,
    result_of_a_future,
    error_of_a_future,
    function_behind_a_ufunc,
    swapped_parameters,
    builtins_of_a_function,
    how_copies_are_made,
]


@pytest.mark.parametrize("build", GUARDED, ids=lambda build: build.__name__)
def test_seen(build: Callable[[], Hidden]) -> None:
    check_seen(anew(build))


# --- refused -------------------------------------------------------------------------


def text_that_runs() -> Hidden:
    return lambda: float(eval(TEXT)), set_number


def code_that_runs() -> Hidden:
    return lambda: float(eval(CODE)), set_number


def text_that_is_executed() -> Hidden:
    found: dict[str, float] = {}

    def read() -> float:
        exec("found['k'] = " + TEXT, {**globals(), "found": found})
        return found["k"]

    return read, set_number


def text_that_runs_by_an_attribute() -> Hidden:
    return lambda: float(builtins.eval(TEXT)), set_number


def text_that_runs_by_another_name() -> Hidden:
    held = eval
    return lambda: float(held(TEXT)), set_number


def text_that_runs_by_an_entry() -> Hidden:
    held = [eval]
    return lambda: float(held[0](TEXT)), set_number


def function_of_code() -> Hidden:
    held = [(lambda: NUMBER).__code__]
    return lambda: types.FunctionType(held[0], globals())(), set_number


def state_of_the_generator() -> Hidden:
    return lambda: 1.0 + random.getstate()[1][-1] / 624, random.random


def state_of_a_generator() -> Hidden:
    held = random.Random(3)
    return lambda: 1.0 + held.getstate()[1][-1] / 624, held.random


def context() -> Hidden:
    held = contextvars.ContextVar("held", default=2.0)
    inside = contextvars.copy_context()
    return lambda: inside.run(held.get), lambda: inside.run(held.set, 3.0)


def future_of_asyncio() -> Hidden:
    loop = asyncio.new_event_loop()
    held: asyncio.Future[float] = loop.create_future()
    loop.close()
    return lambda: 3.0 if held.done() else 2.0, lambda: held.set_result(1.0)


def arguments_of_a_finalizer() -> Hidden:
    owner, held = First(), [2.0]
    finalizer = weakref.finalize(owner, print, held)
    finalizer.atexit = False

    def read() -> float:
        peeked = finalizer.peek()
        assert peeked is not None
        return float(peeked[2][0][0])

    return read, lambda: held.__setitem__(0, 3.0 if owner else 0.0)


REFUSED = [
    text_that_runs,
    code_that_runs,
    text_that_is_executed,
    text_that_runs_by_an_attribute,
    text_that_runs_by_another_name,
    text_that_runs_by_an_entry,
    function_of_code,
    state_of_the_generator,
    state_of_a_generator,
    context,
    future_of_asyncio,
    arguments_of_a_finalizer,
]


@pytest.mark.parametrize("build", REFUSED, ids=lambda build: build.__name__)
def test_refused(build: Callable[[], Hidden]) -> None:
    found = run_hidden(anew(build))
    if not ORACLE_ONLY:
        stats = found.stats[-1][0]
        assert not stats.replays and stats.refusals, stats
