"""Every method of a tensor, called inside a step on a result, an argument and a parameter: equal to eager, or refused.

    pytest tests/torch/test_tensor_methods.py                            some methods; ROTE_TEST_SEED takes others
    ROTE_TEST_EVERYTHING=1 pytest tests/torch/test_tensor_methods.py     all of them

Most go through the dispatcher, where a recording sees them. This finds those that do not.
"""

import contextlib
import inspect
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from extent import EVERYTHING, SEED
from oracle import ORACLE_ONLY, rote_capture
from torch import Tensor

CALLS = 7
ONCE_WRONG = ("apply_", "map_", "map2_")
pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="compares two ways of running")

#: What ends the process or its streams, hands out memory that nothing has written, or needs another device.
LEFT_OUT = {
    *("__class__", "__del__", "__delattr__", "__init__", "__init_subclass__", "__new__", "__subclasshook__"),
    *("__weakref__", "__setattr__", "__getattribute__", "__getattr__", "__dir__"),
    *("cuda", "xpu", "mtia", "ipu", "hpu", "vulkan", "record_stream"),
    *("_make_dtensor", "_make_subclass", "_make_wrapper_subclass", "as_subclass"),
    *("new", "new_empty", "new_empty_strided"),
}


def plus(*numbers: float) -> float:
    return sum(numbers) + 0.5


#: Arguments to try, after the tensor itself.
GIVEN: list[Callable[[Tensor], tuple[Any, ...]]] = [
    lambda x: (),
    lambda x: (x.detach() * 2,),
    lambda x: (2,),
    lambda x: (0, 1),
    lambda x: (plus,),
    lambda x: (x.detach() + 1, plus),
    lambda x: (x.detach() + 1, x.detach() + 2, plus),
    lambda x: (0, torch.tensor([0, 1]), x.detach() * 3),
    lambda x: ((0, 1), torch.ones(2)),
    lambda x: (torch.float64,),
]

NAMES = sorted(
    name
    for name in dir(Tensor)
    if name not in LEFT_OUT and callable(inspect.getattr_static(Tensor, name, None)) and callable(getattr(Tensor, name))
)


def seen(value: Any, depth: int = 0) -> Any:
    """What a caller can compare of a result."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_quantized or value.is_nested:
            return str(value.layout)
        plain = value.detach().resolve_conj().resolve_neg()
        return (str(plain.dtype), tuple(plain.shape), plain.tolist())
    if isinstance(value, list | tuple) and depth < 3:
        return [seen(each, depth + 1) for each in value]
    return value if isinstance(value, bool | int | float | str | complex | type(None)) else type(value).__name__


def run(name: str, place: str, given: int, capture: Callable[..., Any]) -> Iterator[Any]:
    torch.manual_seed(0)
    own = torch.arange(4.0).view(2, 2) + 1

    def step(x: Tensor) -> Any:
        y = {"result": lambda: x * 2, "argument": lambda: x, "state": lambda: own}[place]()
        found = getattr(y, name)(*GIVEN[given](y))
        return [found if isinstance(found, Tensor | bool | int | float) else None, y * 1, own * 1]

    captured = capture(step, state=own)
    for call in range(CALLS):
        x = torch.tensor([[1.0, -2.0], [0.5, 3.0]]) + call
        torch.manual_seed(call)
        try:
            found = seen(captured(x))
        except Exception as error:
            found = type(error).__name__
        yield str([found, seen(x), seen(own), torch.initial_seed(), seen(torch.get_rng_state().sum())])


@pytest.mark.parametrize("place", ["result", "argument", "state"])
def test_methods(place: str) -> None:
    assert len(NAMES) > 500
    wrong, replayed = [], 0
    names = NAMES if EVERYTHING else sorted({*ONCE_WRONG, *random.Random(SEED).sample(NAMES, 30)})
    for name in names:
        for given in range(len(GIVEN)):
            steps = []

            def capture(step: Any, state: Any) -> Any:
                steps.append(rote_capture(step, state=state))  # noqa: B023
                return steps[-1]  # noqa: B023

            with warnings.catch_warnings(), contextlib.redirect_stdout(None):
                warnings.simplefilter("ignore")
                expected = list(run(name, place, given, lambda step, state: step))
                if all("Error" in each[:30] for each in expected):
                    continue  # it does not take such arguments
                if expected != list(run(name, place, given, lambda step, state: step)):
                    continue  # addresses, and memory that nothing has written
                found = list(run(name, place, given, capture))
            replayed += steps[0].stats.replays > 0
            differs = [call for call in range(CALLS) if expected[call] != found[call]]
            if differs:
                call = differs[0]
                wrong.append(f"{name}, arguments {given}, call {call}: {expected[call]}, found {found[call]}")
    print(f"{place}: {replayed} replayed")
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong[:30])
    assert replayed > len(names) // 2, replayed
