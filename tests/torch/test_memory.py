"""Memory does not grow with the number of replays, and a replay needs no more of it than eager."""

import contextlib
import ctypes
import functools
import gc
import os
import re
import sys
import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import inputs, mesh, mlp, replicated, training
from oracle import ORACLE_ONLY, rote_capture
from ranks import CaseSkipped
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

REPLAYS = 500 if ORACLE_ONLY else 5000
WARM = 2500  # PyTorch itself grows by 3 MB over its first 2000 collectives
ALLOWED = 1 << 16  # 13 bytes a replay: less than one lost object
SMALL = 64  # bytes of one of Python's small objects, about


class Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    NAMES = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    _fields_: ClassVar = [(name, ctypes.c_size_t) for name in NAMES]


def in_use() -> int:
    """Bytes handed out by malloc and not yet freed. The process's resident size also has what lies free
    between them, which differs from run to run when several threads allocate."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallinfo2"):
        raise CaseSkipped("needs mallinfo2, which glibc has since 2.33")
    libc.mallinfo2.restype = Mallinfo
    info = libc.mallinfo2()
    return int(info.uordblks + info.hblkhd)


def held() -> tuple[int, int]:
    """Live tensors and open files."""
    gc.collect()
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    return tensors, len(os.listdir("/proc/self/fd"))


def warm_up(calls: Callable[[], None]) -> None:
    """Runs calls as deep in the stack as :func:`grown` does: PyTorch keeps the stacks of the last 2000 collectives."""
    calls()


def grown(calls: Callable[[], None]) -> int:
    """Bytes that the calls add, Python's small objects included, on top of what measuring itself needs."""
    for _ in range(2):
        held()
    before, blocks, things = in_use(), sys.getallocatedblocks(), held()
    calls()
    assert held() == things, (things, held())
    return in_use() - before + SMALL * (sys.getallocatedblocks() - blocks)


@pytest.mark.ranks(2, timeout=240)
def test_memory_is_flat() -> None:
    model = mlp(mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = rote_capture(training(model, optimizer), state={"model": model, "optimizer": optimizer})
    xs = list(inputs(10, 4, 8))

    def calls(count: int) -> None:
        for i in range(count):
            step(xs[i % 10])

    warm_up(lambda: calls(WARM))
    more = grown(lambda: calls(REPLAYS))
    assert more < ALLOWED, f"{more} bytes more after {REPLAYS} replays"
    assert ORACLE_ONLY or step.stats.replays >= REPLAYS


@pytest.mark.ranks(1, timeout=240)
def test_memory_is_flat_over_guard_misses() -> None:
    """Beyond `max_variants` every call is a miss, and none of them is kept."""
    step = rote_capture(lambda x: (x @ x.t()).sum(), max_variants=2)
    xs = [torch.randn(1 + i, 4) for i in range(8)]

    def calls(count: int) -> None:
        for i in range(count):
            step(xs[i % 8])

    calls(500)
    more = grown(lambda: calls(2000))
    assert more < ALLOWED, f"{more} bytes more after 2000 misses"


def changes(call: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation of tensor memory, negative for a free, in order."""
    gc.collect()  # what earlier tests have left is not freed meanwhile
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def peak(call: Callable[[], Any]) -> int:
    return max(accumulate(changes(call), initial=0))


class Convolutions(nn.Module):
    """Convolutions allocate for themselves: more than anything else, in the backward of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(i, o, 3, stride=s, padding=1) for i, o, s in [(3, 8, 1), (8, 16, 2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.relu(layer(x))
        return x.mean((1, 2, 3)).square().sum()


class Words(nn.Module):
    """The gradient of an embedding is larger than all activations, and made last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 32)
        self.layers = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


class Squares(nn.Module):
    """Column and row parallel layers under a loss that allocates for itself."""

    def __init__(self, on: DeviceMesh) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(mlp(on, width=64, inner=128) for _ in range(3)))

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.layers(x), x)


def on_fake_ranks() -> DeviceMesh:
    """Collectives answer at once: no other thread frees tensors, which a profiler would not see."""
    # The name tells this mesh from others: DTensor's remembered answers hold the mesh of who asked first.
    return DeviceMesh.from_group(dist.new_group(backend="fake"), "cpu", mesh_dim_names=("fake",))


def step_of(model: nn.Module) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def train_step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return train_step, {"model": model, "optimizer": optimizer}


@pytest.mark.skipif(ORACLE_ONLY, reason="there is no replay")
@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["convolutions", "words", "squares"])
def test_a_replay_needs_no_more_memory_than_eager(kind: str) -> None:
    on = on_fake_ranks()

    def made() -> tuple[nn.Module, Tensor]:
        torch.manual_seed(0)
        if kind == "convolutions":
            images = DTensor.from_local(torch.randn(4, 3, 16, 16), on, [Shard(0)])
            return replicated(Convolutions(), on), images
        if kind == "words":
            words = DTensor.from_local(torch.randint(512, (4, 16)), on, [Shard(0)])
            return replicated(Words(), on), words
        return Squares(on), torch.randn(64, 64)

    model, x = made()
    step, _ = step_of(model)
    for _ in range(3):
        step(x)
    expected = peak(lambda: step(x))

    model, x = made()
    train_step, state = step_of(model)
    replayed = rote_capture(train_step, state=state, strict=True)
    while not replayed.stats.replays:
        replayed(x)
    # The first replay shows what ops allocate for themselves; then results get their places.
    first = changes(lambda: [replayed(x) for _ in range(3)] and None)
    kept = sum(first)
    found = kept + peak(lambda: replayed(x))
    arena = re.search(r"to an arena of (\d+) bytes", replayed.explain())
    assert arena is not None and max(first) >= int(arena[1]), f"the arena counts: {first}\n{replayed.explain()}"
    allowed = expected + max(512, expected // 256)  # rounding, and numbers that are wrapped once
    assert found <= allowed, f"{found} bytes, {kept} of them kept, where eager needs {expected}\n{replayed.explain()}"
    assert replayed.stats.fallbacks == 0


@pytest.mark.parametrize("how", ["recorded", "refused", "raised"])
def test_a_recording_lets_go_of_what_it_saw(how: str) -> None:
    """At once, not when cycles are collected: gradients, graphs, and what counts the holders of a tensor."""
    weight, held = nn.Parameter(torch.ones(4)), torch.ones(4)
    weight.grad = torch.ones(4)

    def step(x: Tensor) -> Tensor:
        weight.grad = None
        (weight * x).sum().backward()
        if how == "raised":
            raise ValueError
        return held * x if how == "refused" else x * 2

    captured = rote_capture(step, state=[weight])
    gc.collect()
    gc.disable()
    try:
        before = weakref.ref(weight.grad)
        with contextlib.suppress(ValueError):
            captured(torch.ones(4))
        assert before() is None
        assert weight._use_count() == 1  # not counting Python's own
    finally:
        gc.enable()


class Trainer:
    """What owns a model, an optimizer and a captured step, each of which leads to it."""

    def __init__(self, how: str) -> None:
        self.model = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        state: Any = [self.model, self.optimizer]
        if how == "method":
            self.step = rote_capture(self.step, state=state)  # type: ignore[method-assign]
        elif how == "closure":
            self.step = rote_capture(lambda x: Trainer.step(self, x), state=state)  # type: ignore[assignment,method-assign]
        else:
            self.step = rote_capture(functools.partial(Trainer.step, self), state=state)  # type: ignore[assignment,method-assign]

    def step(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().sum()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@pytest.mark.parametrize("calls", [0, 1, 2, 8])
@pytest.mark.parametrize("how", ["method", "closure", "partial"])
def test_a_captured_function_goes_with_the_object_that_holds_it(how: str, calls: int) -> None:
    trainer = Trainer(how)
    for _ in range(calls):
        trainer.step(torch.ones(3, 8))
    assert (trainer.step.stats.replays > 0) is (calls == 8)  # type: ignore[attr-defined]
    gone = [weakref.ref(each) for each in (trainer, trainer.model, trainer.optimizer, trainer.model.weight)]
    del trainer
    gc.collect()
    assert [each() for each in gone] == [None] * len(gone)


def test_a_finalizer_may_call_the_captured_function() -> None:
    found: list[float] = []

    class Last(Trainer):
        def __del__(self) -> None:
            found.append(float(self.step(torch.ones(3, 8))))

    twin, trainer = Trainer("method"), Last("method")
    twin.model.load_state_dict(trainer.model.state_dict())
    for _ in range(8):
        assert torch.equal(trainer.step(torch.ones(3, 8)), Trainer.step(twin, torch.ones(3, 8)))
    del trainer
    gc.collect()
    assert found == [float(Trainer.step(twin, torch.ones(3, 8)))]
