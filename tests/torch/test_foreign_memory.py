"""Memory that PyTorch has not allocated: two storages may lie in it."""

import array
import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn
from torch.utils.dlpack import to_dlpack  # type: ignore[attr-defined]

READ_LIST, READ_ARRAY, HAND_OUT = torch.Tensor.tolist, torch.Tensor.numpy, to_dlpack
BASE = torch._C.TensorBase
FIXED = torch.ones(4)
BOUND = FIXED.tolist


class Reader:
    read = torch.Tensor.tolist

    def __init__(self) -> None:
        self.numpy = torch.Tensor.numpy


READER = Reader()
PARTIAL = functools.partial(torch.Tensor.tolist)
LISTED = [torch.Tensor.numpy]


def by_default(x: Tensor, read: Any = torch.Tensor.tolist) -> float:
    return float(read(x)[0])


# Reads of memory, and reads by another name than that of the method.
RENAMED: dict[str, Callable[[Tensor], Any]] = {
    "list": lambda x: READ_LIST(x)[0],
    "array": lambda x: READ_ARRAY(x)[0],
    "base class": lambda x: BASE.tolist(x)[0],
    "base class of torch": lambda x: torch._C.TensorBase.tolist(x)[0],
    "super": lambda x: super(Tensor, x).tolist()[0],  # type: ignore[misc]
    "class": lambda x: Reader.read(x)[0],
    "object": lambda x: READER.numpy(x)[0],
    "bound": lambda x: BOUND()[0],
    "partial": lambda x: PARTIAL(x)[0],
    "in a list": lambda x: LISTED[0](x)[0],
    "default": by_default,
    "DLPack": lambda x: numpy.from_dlpack(_Capsule(HAND_OUT(x)))[0],
}


class _Capsule:
    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **options: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", RENAMED)
def test_a_read_by_another_name(name: str) -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * (2.0 if RENAMED[name](x) > 0 else 1.0))
        for i in range(8):
            x = torch.ones(4) if i < 5 else -torch.ones(4)
            FIXED.copy_(x)
            yield step(x)

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[0].stats.replays == 0, found.steps[0].stats


# Two tensors: in memory of their own, or in the same by way of different storages.
PAIRS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "arrays of their own": lambda: (torch.from_numpy(numpy.ones(8)), torch.from_numpy(numpy.ones(8))),
    "one array": lambda: (torch.from_numpy(a := numpy.ones(8)), torch.from_numpy(a)),
    "overlapping": lambda: (torch.from_numpy((a := numpy.ones(12))[:8]), torch.from_numpy(a[4:])),
    "beside each other": lambda: (torch.from_numpy((a := numpy.ones(16))[:8]), torch.from_numpy(a[8:])),
    "a tensor's own array": lambda: (a := torch.ones(8, dtype=torch.double), torch.from_numpy(a.numpy())),
    "the other way round": lambda: (torch.from_numpy((a := torch.ones(8, dtype=torch.double)).numpy()), a),
    "a buffer": lambda: (
        torch.frombuffer(a := bytearray(64), dtype=torch.double),
        torch.frombuffer(a, dtype=torch.double),
    ),
    "DLPack": lambda: (a := torch.ones(8, dtype=torch.double), torch.from_dlpack(a.numpy())),
}
SEPARATE = ("arrays of their own", "beside each other")
KINDS = ("state", "state and argument", "arguments", "gradient", "argument's gradient")
CALLS = 5


def stepped(capture: Capture, kind: str) -> Callable[[Tensor, Tensor], Any]:
    """A function of two tensors that writes to the second, between two reads of the first."""
    held: list[Any] = [None, None, None]

    def step(*given: Tensor) -> Tensor:
        both = (*held[2], *given)
        first, second = (each.grad if each.requires_grad else each for each in both[:2])
        before = (first * 2).sum()
        second.mul_(0.5)
        return before + (first * 2).sum() * 3

    captured: Any = None
    state: tuple[Tensor, ...] = ()

    def call(a: Tensor, b: Tensor) -> Any:
        nonlocal captured, state
        owner = nn.Parameter(torch.ones(8, dtype=torch.double))
        owner.grad = b
        named: tuple[Tensor, ...]
        named, given = {
            "state": ((a, b), ()),
            "state and argument": ((a,), (b,)),
            "arguments": ((), (a, b)),
            "gradient": ((a, owner), ()),
            "argument's gradient": ((a,), (owner,)),
        }[kind]
        if captured is None:
            state, held[2] = named, named
            captured = capture(step, state=list(named))
        else:  # the same objects with other memory
            for old, new in zip(state, named, strict=True):
                if old.requires_grad:
                    old.grad = new.grad
                else:
                    old.data = new
        return captured(*given)

    return call


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pair", PAIRS)
def test_writes_are_seen_through_the_other(pair: str, kind: str) -> None:
    """From the first call on, and after calls with memory of their own."""

    def script(capture: Capture) -> Calls:
        for names in ([pair], ["arrays of their own", pair, "arrays of their own"]):
            call = stepped(capture, kind)
            for name in names:
                a, b = PAIRS[name]()
                for _ in range(CALLS):
                    yield call(a, b), a, b
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        replays = [stats.replays for stats in found.stats[-1]]
        assert replays[1] > 0 and (replays[0] > 0) == (pair in SEPARATE), replays


# A tensor of eight doubles, and what else shows its memory, to read and to write its first number by.
BUFFERS: dict[str, Callable[[], tuple[Tensor, Any]]] = {
    "array of the tensor": lambda: (t := torch.zeros(8, dtype=torch.double), t.numpy()),
    "tensor of the array": lambda: (torch.from_numpy(a := numpy.zeros(8)), a),
    "every third": lambda: (torch.from_numpy(a := numpy.zeros(8)), a[1::3]),
    "backwards": lambda: (torch.from_numpy(a := numpy.zeros(8)), a[::-1]),
    "memoryview": lambda: (torch.from_numpy(a := numpy.zeros(8)), memoryview(a)),
    "array.array": lambda: (torch.frombuffer(a := array.array("d", [0.0] * 8), dtype=torch.double), a),
    "ctypes": lambda: (torch.frombuffer(a := (ctypes.c_double * 8)(), dtype=torch.double), a),
    "separate": lambda: (torch.zeros(8, dtype=torch.double), numpy.zeros(8)),
}


def host_writes(buffer: Any, tensor: Tensor, x: Tensor) -> Tensor:
    """Which the step takes back before it ends."""
    before = buffer[0]
    buffer[0] = 2.0
    found = x * tensor.sum()
    buffer[0] = before
    return found


def host_reads(buffer: Any, tensor: Tensor, x: Tensor) -> Tensor:
    """What an op has written, and what is the same in the first calls."""
    tensor.copy_(x.clamp(max=5.0))
    found = x * 2 if buffer[0] < 4.0 else x * 3
    tensor.zero_()
    return found


def stepped_by(
    use: Callable[[Any, Tensor, Tensor], Tensor],
    place: str,
    buffer: Any,
    owner: Tensor,
    held: Tensor,
    x: Tensor,
    y: Any,
) -> Tensor:
    return use(buffer, {"state": held, "argument": y, "gradient": owner.grad}[place], x)


@pytest.mark.parametrize("place", ["state", "argument", "gradient"])
@pytest.mark.parametrize("use", [host_writes, host_reads])
@pytest.mark.parametrize("name", BUFFERS)
def test_buffers_in_the_memory_of_tensors(name: str, use: Callable[[Any, Tensor, Tensor], Tensor], place: str) -> None:
    """From the first call on, and when a tensor moves there later."""

    def script(capture: Capture) -> Calls:
        for later in (False, True):
            tensor, buffer = BUFFERS[name]()
            owner = nn.Parameter(torch.zeros(8, dtype=torch.double))

            step = functools.partial(stepped_by, use, place, buffer, owner, tensor)
            elsewhere = torch.zeros(8, dtype=torch.double)
            captured = capture(step, state={"state": [tensor], "argument": [], "gradient": [owner]}[place])
            for call in range(12):
                here = tensor if call >= 6 or not later else elsewhere
                owner.grad = here
                x = torch.full((8,), float(call), dtype=torch.double)
                yield captured(x, here if place == "argument" else None), tensor, buffer[0]
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        replays = [stats.replays for stats in found.stats[-1]]
        assert (replays[0] > 0) == (name == "separate"), found.stats[-1]
