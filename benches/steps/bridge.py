"""What one replayed op costs above its kernel, through the bridge to PyTorch.

A captured function runs a row of one kind of op, once n and once 2n of them; the
difference of the two replays, over n, is what one op costs, and what a replay
costs by itself falls out. Beside it, in the same round, the bare calls: at::'s
own functions in a C++ loop over tensors of the same shapes that exist already
(`bridge_time.cpp`). What is left is the executor's: its loop in Rust, the
border to C++, finding the tensors, and keeping results.

A dynamic result and a view are measured without passes, since with them the one
gets a fixed place and the other is made once. Their rows drop each result too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_group

from . import report
from .extension import build

TITLE = "One replayed op through the bridge, nanoseconds above the bare kernel call"
GOAL_NS = 60
OPS = 1000
"""In a row; and twice as many."""
ROUNDS = 200

Row = Callable[[Tensor, Tensor, int], Tensor]


@dataclass(frozen=True)
class Kind:
    """A kind of op: the row of n of them that is captured."""

    name: str
    row: Row
    passes: str = ""


def multiplied(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x * w
    return x


def added(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x + w
    return x


def matrix_products(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x @ w
    return x


def copied(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        w.copy_(x)
    return x


def added_in_place(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        w.add_(x)
    return x


def joined(x: Tensor, w: Tensor, n: int) -> Tensor:
    half = x.shape[0] // 2
    for _ in range(n):
        x = torch.cat([x[half:], w[half:]])
    return x


def viewed(x: Tensor, w: Tensor, n: int) -> Tensor:
    for _ in range(n):
        x = x.t() * w
    return x


def reduced(x: Tensor, w: Tensor, n: int) -> Tensor:
    functional = torch.ops._c10d_functional
    group = _get_default_group().group_name
    for _ in range(n):
        x = functional.wait_tensor(functional.all_reduce(x, "sum", group))
    return x


KINDS = (
    Kind("mul.out", multiplied),
    Kind("add.out", added),
    Kind("mm.out", matrix_products),
    Kind("copy_", copied),
    Kind("add_.Tensor", added_in_place),
    Kind("cat.out", joined),
    Kind("a result of its own", multiplied, passes="none"),
    Kind("a view and a result", viewed, passes="none"),
    Kind("all-reduce", reduced),
)


def captured(kind: Kind, w: Tensor, n: int) -> Any:
    import rote

    def step(x: Tensor) -> Tensor:
        return kind.row(x, w, n)

    return rote.capture(step, state={"w": w}, passes=kind.passes, strict=True)


def nanoseconds(step: Callable[[Tensor], Tensor], x: Tensor) -> int:
    start = time.thread_time_ns()
    step(x)
    return time.thread_time_ns() - start


def measured(kind: Kind, bare: Any, rounds: int) -> dict[str, Any]:
    """Nanoseconds of each round: one replayed op, and one bare call."""
    x = torch.full((8, 8), 0.125)
    # Products with it and sums stay what they are, and finite.
    w = torch.full((8, 8), 0.125) if kind.row is matrix_products else torch.zeros(8, 8)
    steps = [captured(kind, w, n) for n in (OPS, 2 * OPS)]
    for step in steps:
        for _ in range(5):
            step(x)
        if step.stats.replays < 2:
            raise RuntimeError(f"{kind.name} is not replayed: {step.stats}")
    group = _get_default_group().group_name
    tensors = [t.clone() for t in (x, x, w)]
    replayed, called = [], []
    for _ in range(rounds):
        once, twice = (nanoseconds(step, x) for step in steps)
        replayed.append((twice - once) / OPS)
        called.append(bare(kind.name, *tensors, group, OPS))
    return {
        "label": kind.name,
        "ops": steps[0].plan_counts(),
        "replayed_ns": statistics.median(replayed),
        "bare_ns": statistics.median(called),
        "above_ns": statistics.median(a - b for a, b in zip(replayed, called, strict=True)),
        "samples_ns": {"replayed": replayed, "bare": called},
    }


def run(quick: bool, out: Path) -> dict[str, Any]:
    """Measures every kind, prints the table, and saves plot and raw numbers."""
    report.note(f"== {TITLE}")
    bare = build("bridge_time", out).bare
    points = [measured(kind, bare, ROUNDS // 4 if quick else ROUNDS) for kind in KINDS]
    result = {"title": TITLE, "goal_ns": GOAL_NS, "machine": report.machine(), "points": points}
    report.save(result, out / "bridge.json")
    print(f"\n{TITLE}\n\n{report.bridge_table(result)}", flush=True)
    report.plot_bridge(result, out / "bridge.png")
    return result
