"""Tensors that a step makes of numbers which are written in its code, or follow from guarded values."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over
from torch import Tensor

WAYS: dict[str, Callable[..., Tensor]] = {
    "tensor": lambda data, **options: torch.tensor(data, **options),
    "as_tensor": lambda data, **options: torch.as_tensor(data, **options),
    "asarray": lambda data, **options: torch.asarray(data, **options),
    "by name": lambda data, **options: torch.tensor(data=data, **options),
    "new_tensor": lambda data, **options: torch.ones(2).new_tensor(data, **options),
    "new_tensor by name": lambda data, **options: torch.ones(2, dtype=torch.int64).new_tensor(data=data, **options),
}
DATA: dict[str, Any] = {
    "number": 0.1,
    "integer": 7,
    "flag": True,
    "complex": 1 - 2j,
    "list": [1.5, -0.0, float("inf"), float("nan")],
    "nested": [[1, 2, 3], (4, 5, 6)],
    "large": [2**53 + 1, -(2**63)],
    "flags": [True, False],
    "empty": [],
    "empty rows": [[], []],
    "one": [[[3.0]]],
    "mixed": [1, 2.5, True],
    "many": list(range(64)),
    "size": torch.Size([4, 2]),
}
DTYPES = [None, torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]
DTYPES += [torch.complex64]


def fits(way: str, data: Any, dtype: torch.dtype | None) -> bool:
    try:
        WAYS[way](data, dtype=dtype)
    except (RuntimeError, ValueError, OverflowError, TypeError):
        return False
    return True


def each_call(step: Callable[[Tensor], Any], calls: int = 8) -> Callable[[Capture], Calls]:
    return lambda capture: over(capture, step, (torch.full((2, 2), float(i)) for i in range(calls)))


@pytest.mark.sampled(4)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", DATA)
def test_data_and_dtypes(name: str, way: str) -> None:
    """As a result, as an operand, and written in place: each replay makes another one."""
    data = DATA[name]
    for dtype in DTYPES:
        if not fits(way, data, dtype):
            continue

        def step(x: Tensor, dtype: torch.dtype | None = dtype) -> Any:
            made, other = (WAYS[way](data, dtype=dtype) for _ in range(2))
            other.zero_()
            return made, made == other, x + 1, other

        check_equal(each_call(step), replays=5)


@pytest.mark.ranks(1)
def test_written_in_place_and_part_of_a_graph() -> None:
    def step(x: Tensor) -> Any:
        sums = torch.tensor([1.0, 2.0])
        sums += x.sum(0)
        weight = torch.tensor([[0.5, 0.25]], requires_grad=True)
        (weight * x).sum().backward()
        return sums, sums[1:].clone(), weight.grad

    check_equal(each_call(step), replays=5)


def written(x: Tensor) -> Tensor:
    y = x.clone()
    y[[0, 1]] = 2.0
    y[:, [3]] += x[:, [0]]
    y[..., (1, 2)] = x[[0], 0]
    return y


def a_number_written(x: Tensor) -> Tensor:
    y = x.clone()
    y[x > 0.5] = 0
    y[0] = 2.5
    y[torch.arange(2), [1, 2]] = 0.1
    return y


def in_a_graph(x: Tensor) -> Tensor:
    y = x.clone().requires_grad_()
    (y[:, [0, 0, 1]] * y[[2]][:, [1]]).sum().backward()
    assert y.grad is not None
    return y.grad


INDICES: dict[str, Callable[[Tensor], Any]] = {
    "columns": lambda x: x[:, [0, -1]],
    "rows": lambda x: x[[3, 0]],
    "a tuple": lambda x: x[..., (1, 2)],
    "pairs": lambda x: x[[0, 1], [2, 3]],
    "of two dims": lambda x: x[:, [[0, 1], [1, 0]]],
    "empty": lambda x: x[[]],
    "a range": lambda x: x[range(1, 4, 2)],
    "flag": lambda x: x[True],
    "new dims": lambda x: x[None, [1], ...],
    "beside a tensor": lambda x: x[torch.arange(2), [0, 3]],
    "in a graph": in_a_graph,
    "written": written,
    "a number written": a_number_written,
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("how", INDICES)
def test_an_index_of_numbers(how: str) -> None:
    draw = torch.Generator().manual_seed(1)
    calls = [torch.randn(4, 4, generator=draw) for _ in range(8)]
    check_equal(lambda capture: over(capture, INDICES[how], calls), replays=5)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_the_numbers_of_an_index_are_guarded() -> None:
    def script(capture: Capture) -> Calls:
        places = [0, 1]
        step = capture(lambda x, last: x[:, places] * x[:, [last]])
        for i in range(24):
            places[1] = 1 if i < 6 or i > 18 else 3
            yield step(torch.arange(16.0).reshape(4, 4) + i, 2 if i % 3 else 0)

    check_right(script, replays=6)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_the_numbers_follow_from_is_guarded() -> None:
    lists = [1.0, 2.0], [3.0, 4.0]
    held = {"scale": 0.5, "list": lists[0]}

    def script(capture: Capture) -> Calls:
        def step(x: Tensor, by: float) -> Tensor:
            return x * torch.tensor([held["scale"], by]) + torch.tensor(held["list"])

        captured = capture(step)
        for i in range(24):
            held["scale"] = 0.5 if i < 6 or i > 18 else 0.25
            held["list"] = lists[i % 12 >= 10]
            yield captured(torch.full((2, 2), float(i)), 1.0 if i % 3 else 2.0)

    check_right(script, replays=6)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_function_that_the_script_has_replaced() -> None:
    shared = np.zeros(2, dtype=np.float32)

    def script(capture: Capture) -> Calls:
        shared[:] = 0

        def step(x: Tensor) -> Tensor:
            return x + torch.tensor([1.0, 2.0]).add_(1)

        return over(capture, step, (torch.full((2, 2), float(i)) for i in range(8)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "tensor", lambda data, **options: torch.from_numpy(shared))
        check_right(script)


class Counting(Tensor):
    """Adds what NumPy holds to each part of it."""

    held = np.zeros(1, dtype=np.float32)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            args = [each.as_subclass(Tensor) if isinstance(each, Tensor) else each for each in args]
            result = func(*args, **(kwargs or {}))
            return result + torch.from_numpy(cls.held) if func is Tensor.__getitem__ else result


def counted(x: Tensor, array: Any, counter: Any) -> Tensor:
    Counting.held[0] = counter.__next__()
    return x.as_subclass(Counting)[[0, 1]]


OTHERS: dict[str, Callable[..., Tensor]] = {
    "new_tensor of an array": lambda x, array, counter: x + x.new_tensor(array),
    "new_tensor that counts": lambda x, array, counter: x + x.new_tensor([float(counter.__next__()), 1.0]),
    "index that counts": lambda x, array, counter: x[[0, counter.__next__() % 2]],
    "index by an array": lambda x, array, counter: x[array.astype(np.int64)],
    "index by a number of an array": lambda x, array, counter: x[[np.int64(counter.__next__() % 2)]],
    "index with code of its own": counted,
    "index of many": lambda x, array, counter: x[[0] * 65][: 1 + counter.__next__() % 2],
    "flags": lambda x, array, counter: x[[True, counter.__next__() % 2 == 0]],
}


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize(
    "what", ["counter", "array", "a view of an array", "number of an array", "read", "too many", *OTHERS]
)
def test_what_is_still_refused(what: str) -> None:
    def script(capture: Capture) -> Calls:
        counter = itertools.count()
        array = np.zeros(2)

        def step(x: Tensor) -> Tensor:
            if what == "counter":
                return x + torch.tensor([float(counter.__next__()), 1.0])
            if what == "array":
                return x + torch.as_tensor(array)
            if what == "a view of an array":
                made = torch.as_tensor(array)
                made += 1
                return x + made
            if what == "number of an array":
                return x + torch.as_tensor(np.array(float(counter.__next__())))
            if what in OTHERS:
                return OTHERS[what](x, array, counter)
            if what == "read":
                return x + torch.tensor([x[0, 0].item(), 1.0])
            return x.view(-1)[:1] + torch.tensor([1.0] * 65)

        calls = (torch.full((2, 2), float(i)) for i in range(8))
        return over(capture, step, calls, end=lambda: torch.tensor(array), tail=False)

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[0].stats.replays == 0, found.steps[0].stats
    assert ORACLE_ONLY or found.steps[0].stats.refusals, found.steps[0].stats
