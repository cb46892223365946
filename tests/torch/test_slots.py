"""Recordings leave the slots of all classes as they are.

A function that is put into a class for a while may leave more than it took. `Tensor.__getitem__` was such a one: once
it had been replaced and put back, each tensor was a sequence to C code, so that `torch.tensor([x.sum()])` raised for
the rest of the process.
"""

import ctypes
import json
import operator
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rote
import torch

# Of PyTypeObject in CPython's `object.h`: places of functions, in words, and of tables of functions with their sizes
# (`cpython/object.h`). Without getattro, which Python itself changes as attributes are first read.
FUNCTIONS = [6, 8, 9, 11, 15, 16, 17, 19]  # dealloc, getattr, setattr, repr, hash, call, str, setattro
TABLES = {10: 4, 12: 36, 13: 10, 14: 3, 20: 2}  # async, number, sequence, mapping, buffer
MORE = [23, 24, 25, 27, 28, 34, 35, 37]  # traverse, clear, richcompare, iter, iternext, descr_get, descr_set, init


def words(address: int, count: int) -> list[int]:
    return list((ctypes.c_size_t * count).from_address(address))


def slots(kind: type) -> list[Any]:
    of_kind = words(id(kind), 40)
    tables = [words(of_kind[place], size) if of_kind[place] else None for place, size in TABLES.items()]
    return [*(of_kind[place] for place in FUNCTIONS + MORE), *tables]


def classes() -> list[type]:
    found: dict[int, type] = {}
    pending: list[type] = [object]
    while pending:
        kind = pending.pop()
        if id(kind) not in found:
            found[id(kind)] = kind
            pending += type.__subclasses__(kind)
    return list(found.values())


def changed() -> list[str]:
    """Records steps, and gives the classes whose slots are others then."""
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4))
    optimizer = torch.optim.Adafactor(model.parameters())
    before = {kind: slots(kind) for kind in classes()}

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (model(x)[[0, 1]] * torch.tensor([0.5, 0.25, 1.0, 2.0]))[:, [0, -1]].square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = rote.capture(step, state=[model, optimizer], strict=True)
    region = rote.capture_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for _ in range(8):
        captured(torch.randn(4, 4))
    for _ in range(8):
        region._module(torch.randn(4, 4)).sum().backward()
    assert captured.stats.replays > 2 and region.stats.replays > 2
    return [f"{kind.__module__}.{kind.__qualname__}" for kind, of_kind in before.items() if slots(kind) != of_kind]


def test_recordings_leave_all_slots() -> None:
    """In a process of its own: others may have recorded already."""
    found = subprocess.run([sys.executable, __file__], capture_output=True, text=True, cwd=Path(__file__).parent)
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout.splitlines()[-1]) == []


def test_tensors_are_no_sequences() -> None:
    step = rote.capture(lambda x: x[[1, 0]] * 2)
    for x in torch.ones(6, 2).unbind():
        step(x)
        with pytest.raises(TypeError, match="can't be concatenated"):
            operator.concat(x, x)  # type: ignore[call-overload]
        assert torch.tensor([x.sum(), x.max()]).tolist() == [2.0, 1.0]


def test_slots_can_be_read() -> None:
    """What the first test compares is what it takes it for."""

    class Plain:
        pass

    before = slots(Plain)
    Plain.__getitem__ = lambda self, key: key  # type: ignore[attr-defined]
    assert slots(Plain) != before


if __name__ == "__main__":
    print(json.dumps(changed()))
