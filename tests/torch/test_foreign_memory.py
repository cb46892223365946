"""Memory that PyTorch has not allocated: two storages may lie in it."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn

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
