"""Measuring a subject: every way to run its step in one process, in turn, against the floor."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .floor import Floor
from .report import note
from .subject import EAGER, NO_PASSES, ROTE, Batch, Step, Subject, builders

WARM_UP = 8
"""Steps of each row before the first that counts; their losses are compared."""
SETTLE = 4
"""Steps that open a row's turn and do not count: they bring its code and data back into the caches, and the heap
into the order that its own steps leave."""
IN_TURN = 8
"""Steps of a row that count, before the next row's turn."""


@dataclass(frozen=True)
class Effort:
    """How long to measure a subject."""

    rounds: int = 20
    """Turns of each row at most."""
    seconds: float = 20.0
    """All rows together about, once warm."""
    cpu_time: bool = False
    """CPU time of the thread in place of time on the wall, for a busy machine. Steps
    run on one thread and wait for nothing, so on an idle machine both agree."""

    @property
    def clock(self) -> Callable[[], float]:
        return time.thread_time if self.cpu_time else time.perf_counter


def same_as(reference: list[Tensor], losses: list[Tensor]) -> str:
    if all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(reference, losses, strict=True)):
        return "bit for bit"
    close = all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(reference, losses, strict=True))
    return "close" if close else "NO"


def in_turn(rows: dict[str, Step], batch: Batch, effort: Effort, floor: Floor | None = None) -> dict[str, Any]:
    """Milliseconds of every step; the rows and the floor take turns so that drift hits them alike."""
    clock = effort.clock
    rounds: dict[str, list[list[float]]] = {name: [] for name in rows}
    began = time.perf_counter()
    done = 0
    while done < effort.rounds and (done < 3 or time.perf_counter() - began < effort.seconds):
        done += 1
        for name, step in rows.items():
            for _ in range(SETTLE):
                step(*batch)
            times = []
            for _ in range(IN_TURN):
                start = clock()
                step(*batch)
                times.append(1e3 * (clock() - start))
            rounds[name].append(times)
        if floor is not None:
            floor.measure()
    note(f"  {done} rounds of {IN_TURN} steps a row")
    found = {}
    for name, turns in rounds.items():
        times = [each for turn in turns for each in turn]
        found[name] = {
            "median_ms": statistics.median(times),
            "quartiles_ms": statistics.quantiles(times, n=4)[::2],
            "rounds_ms": [statistics.median(turn) for turn in turns],
            "runs": len(times),
            "samples_ms": times,
        }
    return found


def local(loss: Tensor) -> Tensor:
    return loss.to_local() if hasattr(loss, "to_local") else loss


def warm_up(
    subject: Subject, ways: tuple[str, ...], batch: Batch, plans: str, effort: Effort
) -> tuple[dict[str, Step], dict[str, Any]]:
    """The rows that run, and what is known of each: whether its losses are eager's, the times of
    its first steps, or why it does not run (`missing`)."""
    rows: dict[str, Step] = {}
    known: dict[str, Any] = {}
    losses: dict[str, list[Tensor]] = {}
    for name, build in builders(subject, plans).items():
        if name not in ways:
            continue
        note(f"  warming up: {name}")
        try:
            step = build()
            losses[name], first_ms, replays = [], [], []
            for _ in range(WARM_UP):
                start = effort.clock()
                losses[name].append(local(step(*batch)))
                first_ms.append(1e3 * (effort.clock() - start))
                if name in (NO_PASSES, ROTE):
                    replays.append(step.stats.replays)  # type: ignore[attr-defined]
        except Exception as error:  # a row that cannot run is said so in the table
            if name == EAGER:
                raise
            reason = f"{type(error).__name__}: {error}".strip().splitlines()[0][:160]
            known[name] = {"missing": reason}
            note(f"    does not run: {reason}")
            continue
        rows[name] = step
        known[name] = {"losses": same_as(losses[EAGER], losses[name]), "first_ms": first_ms}
        if replays and not replays[-1]:
            known[name] = {"missing": f"never replayed: {step.stats.refusals}"}  # type: ignore[attr-defined]
            note(f"    {known[name]['missing']}")
            del rows[name]
        elif replays:
            known[name]["calls_before_replay_ms"] = first_ms[: replays.count(0)]
    return rows, known


def plan_figures(step: Any, plans: str) -> dict[str, Any]:
    """What was recorded: bytes of the plan file, and its instructions by kind."""
    files = list(Path(plans).rglob("*.rote"))
    return {"bytes": sum(file.stat().st_size for file in files), **step.plan_counts()}


def measured(subject: Subject, ways: tuple[str, ...], kernel_time: Any, effort: Effort) -> dict[str, Any]:
    """All that is measured of one subject, in the form of the raw numbers."""
    note(subject.label)
    began = time.perf_counter()
    batch = subject.batch()
    with tempfile.TemporaryDirectory() as plans:
        rows, known = warm_up(subject, ways, batch, plans, effort)
        note("  preparing the floor")
        floor = Floor(kernel_time, rows[EAGER], batch)
        times = in_turn(rows, batch, effort, floor)
        floor_of = floor.figures()
        plan = plan_figures(rows[ROTE], f"{plans}/default") if ROTE in rows else {}
    eager = times[EAGER]["median_ms"]
    for name, row in times.items():
        row |= known[name]
        row["erased_share"] = (eager - row["median_ms"]) / (eager - floor_of["ms"])
        row["erased_share_floor_zero"] = (eager - row["median_ms"]) / eager
    note(f"  {time.perf_counter() - began:.0f} s")
    return {
        "label": subject.label,
        "rows": times,
        "missing": {name: row["missing"] for name, row in known.items() if "missing" in row},
        "floor": floor_of,
        "plan": plan,
    }
