"""A series of subjects, measured alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import report
from .measure import Effort, measured
from .subject import BY_HAND, EAGER, NO_PASSES, REGIONS, ROTE, Subject

QUICK = (EAGER, BY_HAND, REGIONS, NO_PASSES, ROTE)
"""What a quick run measures: everything but `torch.compile`."""


@dataclass(frozen=True)
class Sweep:
    """What is measured, and how it is called."""

    name: str
    """Of its files, and on the command line."""
    title: str
    axis: str
    """What tells the subjects apart."""
    subjects: Callable[[], Iterator[Subject]]
    quick: tuple[int, ...]
    """Which of the subjects a quick run takes."""
    ways: tuple[str, ...] = (EAGER, BY_HAND, NO_PASSES, ROTE)
    ordered: bool = True
    """Whether the subjects lie on a scale."""


def run(sweep: Sweep, kernel_time: Any, effort: Effort, quick: bool, out: Path) -> dict[str, Any]:
    """Measures a sweep, prints its table, and saves its plot and raw numbers."""
    subjects = list(sweep.subjects())
    if quick:
        sweep = replace(sweep, ways=tuple(way for way in sweep.ways if way in QUICK))
        subjects = [subjects[i] for i in sweep.quick]
    report.note(f"== {sweep.title}")
    result: dict[str, Any] = {
        "title": sweep.title,
        "axis": sweep.axis,
        "ordered": sweep.ordered,
        "cpu_time": effort.cpu_time,
        "machine": report.machine(),
        "points": [measured(subject, sweep.ways, kernel_time, effort) for subject in subjects],
    }
    report.save(result, out / f"{sweep.name}.json")
    print(f"\n{sweep.title}\n")
    if len(subjects) == 1:
        print(report.ways_table(result["points"][0]), flush=True)
        report.plot_ways(result["points"][0], sweep.title, out / f"{sweep.name}.png")
    else:
        print(report.points_table(result), flush=True)
        report.plot_points(result, out / f"{sweep.name}.png")
    return result
