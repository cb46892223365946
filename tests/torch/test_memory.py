"""Memory does not grow with the number of replays."""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from models import inputs, mesh, mlp
from oracle import ORACLE_ONLY, rote_capture
from torch import Tensor

PAGE = os.sysconf("SC_PAGE_SIZE")
REPLAYS = 500 if ORACLE_ONLY else 5000
WARM = 2500  # PyTorch itself grows by 3 MB over its first 2000 collectives
ALLOWED = 1 << 20  # 200 bytes a replay: less than one lost tensor


def held() -> tuple[int, int]:
    """Live tensors and open files."""
    gc.collect()
    tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
    return tensors, len(os.listdir("/proc/self/fd"))


def grown(calls: Callable[[], None]) -> int:
    """Bytes of RSS that the calls add, on top of what measuring itself needs."""
    for _ in range(2):
        held()
    before, things = resident(), held()
    calls()
    assert held() == things, (things, held())
    return resident() - before


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


@pytest.mark.ranks(2, timeout=240)
def test_rss_is_flat() -> None:
    model = mlp(mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = rote_capture(train_step, state={"model": model, "optimizer": optimizer})
    xs = list(inputs(10, 4, 8))

    def calls(count: int) -> None:
        for i in range(count):
            step(xs[i % 10])

    calls(WARM)
    more = grown(lambda: calls(REPLAYS))
    assert more < ALLOWED, f"{more} bytes more after {REPLAYS} replays"
    assert ORACLE_ONLY or step.stats.replays >= REPLAYS


@pytest.mark.ranks(1, timeout=240)
def test_rss_is_flat_over_guard_misses() -> None:
    """Beyond `max_variants` every call is a miss, and none of them is kept."""
    step = rote_capture(lambda x: (x @ x.t()).sum(), max_variants=2)
    xs = [torch.randn(1 + i, 4) for i in range(8)]

    def calls(count: int) -> None:
        for i in range(count):
            step(xs[i % 8])

    calls(500)
    more = grown(lambda: calls(2000))
    assert more < ALLOWED, f"{more} bytes more after 2000 misses"
