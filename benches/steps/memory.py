"""Bytes that a step holds at its peak, beyond the model and the optimizer's state.

PyTorch's allocator reports each allocation and each free of a tensor's memory
to the profiler; their running sum is exact. A replay also counts what the plan
keeps between calls (arena, constants): what is left of the calls after the first
replay, which makes the arena.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from . import report
from .llama import config, full_dtensor, fully_sharded, llama
from .measure import WARM_UP
from .networks import convolution, mlp
from .subject import EAGER, NO_PASSES, RANKS, ROTE, Subject, builders

TITLE = "Memory of a step beyond parameters and optimizer state, KiB at the peak"
WAYS = (EAGER, NO_PASSES, ROTE)


def subjects(quick: bool) -> list[Subject]:
    small = [llama("Llama, TP + SP"), mlp("MLP of 8 pairs, TP"), convolution("4 convolutions, batch")]
    small.append(fully_sharded("Llama, FSDP2"))
    if quick:
        return small
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return [
        *small,
        fully_sharded("Llama, FSDP2, mixed", mp_policy=half),
        fully_sharded("Llama, FSDP2 over TP", tp=4),
        full_dtensor("Llama, all DTensor", RANKS, batch=4),
        llama("Llama, width 256", config(width=256)),
    ]


def changes(call: Callable[[], Any]) -> list[int]:
    """Bytes of each allocation, negative for a free, in order."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def held(subject: Subject, way: str, plans: str) -> dict[str, int]:
    """Bytes kept between calls, and the peak of one call above them."""
    batch = subject.batch()
    step = builders(subject, plans)[way]()
    step(*batch)  # makes the optimizer's state
    if way != EAGER:
        while not step.stats.replays:  # type: ignore[attr-defined]
            step(*batch)  # the first replay shows, where nothing profiles it, what the arena may need

    def several() -> None:
        for _ in range(WARM_UP):
            step(*batch)

    kept = sum(changes(several))  # results are dropped: what is left, the plan holds
    gc.collect()
    peak = max(accumulate(changes(lambda: step(*batch)), initial=0))
    return {"kept": kept if way != EAGER else 0, "peak": peak}


def run(quick: bool, out: Path) -> dict[str, Any]:
    """Measures every subject, prints the table, and saves plot and raw numbers."""
    report.note(f"== {TITLE}")
    points = []
    for subject in subjects(quick):
        report.note(subject.label)
        rows = {}
        for way in WAYS:
            with tempfile.TemporaryDirectory() as plans:
                rows[way] = held(subject, way, plans)
        points.append({"label": subject.label, "rows": rows})
    result = {"title": TITLE, "machine": report.machine(), "points": points}
    report.save(result, out / "memory.json")
    print(f"\n{TITLE}\n\n{report.memory_table(points)}", flush=True)
    report.plot_memory(result, out / "memory.png")
    return result
