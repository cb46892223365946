"""Tables, plots and raw numbers."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import torch

from .subject import AOT_EAGER, BLOCKS, BY_HAND, EAGER, INDUCTOR, NO_PASSES, REGIONS, ROTE

FLOOR = "floor: kernels alone"
COLORS = {
    EAGER: "tab:gray",
    BY_HAND: "tab:brown",
    AOT_EAGER: "tab:purple",
    INDUCTOR: "tab:green",
    BLOCKS: "tab:olive",
    REGIONS: "tab:cyan",
    NO_PASSES: "tab:blue",
    ROTE: "tab:orange",
    FLOOR: "black",
}
SHORT = {
    EAGER: "eager",
    BY_HAND: "by hand",
    AOT_EAGER: "aot_eager",
    INDUCTOR: "inductor",
    BLOCKS: "compiled",
    REGIONS: "regions",
    NO_PASSES: "no passes",
}


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
    }


def save(result: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1))


def spread(row: dict[str, Any]) -> float:
    """How far the medians of a row's rounds lie apart: the range of the middle half of them, over their median."""
    low, middle, high = statistics.quantiles(row["rounds_ms"], n=4)
    return float((high - low) / middle)


def ways_table(point: dict[str, Any]) -> str:
    """One subject, a line for each way to run it. `spread`: between rounds, see `spread`."""
    rows, floor = point["rows"], point["floor"]["ms"]
    eager = rows[EAGER]["median_ms"]
    rote = rows[ROTE]["median_ms"] if ROTE in rows else None

    def against_rote(ms: float) -> str:
        return f"{ms / rote:.2f}x" if rote else "-"

    lines = [f"{'':<26}{'ms':>8}{'spread':>8}{'eager /':>10}{'/ rote':>9}{'erased':>9}{'runs':>7}   losses"]
    for name, row in rows.items():
        ms = row["median_ms"]
        lines.append(
            f"{name:<26}{ms:8.2f}{spread(row):8.0%}{eager / ms:9.1f}x{against_rote(ms):>9}"
            f"{row['erased_share']:9.1%}{row['runs']:7}   {row['losses']}"
        )
    lines.append(f"{FLOOR:<26}{floor:8.2f}{spread(point['floor']):8.0%}{eager / floor:9.1f}x{against_rote(floor):>9}")
    lines += [f"{name:<26} does not run: {reason}" for name, reason in point["missing"].items()]
    if rote:
        bound = rows[ROTE]["erased_share_floor_zero"]
        lines.append(f"\nerased by rote: {rows[ROTE]['erased_share']:.1%} (with a floor of 0: {bound:.1%})")
        calls = ", ".join(f"{ms / eager:.1f}" for ms in rows[ROTE]["calls_before_replay_ms"])
        lines.append(f"calls before the first replay, in eager steps: {calls}")
    return "\n".join(lines)


def points_table(result: dict[str, Any]) -> str:
    """A line for each subject: milliseconds of each way, and what came of it.

    `us/op`: rote's time over the local ops that eager runs. `record`: calls before the first replay,
    together, in eager steps.
    """
    points = result["points"]
    ways = [way for way in COLORS if any(way in point["rows"] for point in points)]
    title = f"{result['axis']:<28}{'ops':>7}"
    title += "".join(f"{SHORT.get(way, way):>11}" for way in ways) + f"{'floor':>9}"
    lines = [title + f"{'eager/rote':>12}{'erased':>9}{'us/op':>7}{'record':>8}{'plan':>9}{'runs':>6}   losses"]
    for point in points:
        rows, floor = point["rows"], point["floor"]
        line = f"{point['label']:<28}{floor['local_ops']:>7}"
        line += "".join(f"{rows[way]['median_ms']:11.2f}" if way in rows else f"{'-':>11}" for way in ways)
        line += f"{floor['ms']:9.2f}"
        if ROTE in rows:
            rote, eager = rows[ROTE], rows[EAGER]["median_ms"]
            line += f"{eager / rote['median_ms']:11.1f}x{rote['erased_share']:9.1%}"
            line += f"{1e3 * rote['median_ms'] / floor['local_ops']:7.2f}"
            line += f"{sum(rote['calls_before_replay_ms']) / eager:8.1f}"
            line += f"{point['plan']['bytes'] / 1024:6.0f} KiB{rote['runs']:4}   {rote['losses']}"
        lines.append(line)
    for point in points:
        for way, reason in point["missing"].items():
            lines.append(f"{point['label']}: {way} does not run: {reason}")
    return "\n".join(lines)


def _axes(width: float = 8, height: float = 3.6) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def plot_ways(point: dict[str, Any], title: str, path: Path) -> None:
    """Bars, a bar for each way to run one subject."""
    figure, axes = _axes(height=3.2)
    names = [*point["rows"], FLOOR]
    values = [row["median_ms"] for row in point["rows"].values()] + [point["floor"]["ms"]]
    bars = axes.barh(names, values, color=["tab:orange" if name == ROTE else "tab:gray" for name in names])
    axes.bar_label(bars, labels=[f"{value:.2f} ms" for value in values], padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per training step (median)")
    axes.set_title(title)
    axes.margins(x=0.15)
    figure.savefig(path, dpi=150)


def plot_points(result: dict[str, Any], path: Path) -> None:
    """Time of each way over the subjects: lines where they have an order, groups of bars where not."""
    figure, axes = _axes()
    points = result["points"]
    places = list(range(len(points)))
    for at, (way, color) in enumerate(COLORS.items()):
        of = [point["floor"] if way == FLOOR else point["rows"].get(way) for point in points]
        values = [None if row is None else row.get("median_ms", row.get("ms")) for row in of]
        if all(value is None for value in values):
            continue
        heights = [float("nan") if value is None else value for value in values]
        if result["ordered"]:
            style = "--" if way == FLOOR else "-"
            axes.plot(places, heights, style, marker="o", markersize=4, color=color, label=way)
        else:
            axes.bar([place + 0.12 * (at - 3) for place in places], heights, width=0.12, color=color, label=way)
    axes.set_yscale("log")
    axes.set_xticks(places, [point["label"] for point in points])
    axes.set_xlabel(result["axis"])
    axes.set_ylabel("milliseconds per step (median)")
    axes.set_title(result["title"])
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def memory_table(points: list[dict[str, Any]]) -> str:
    """A line for each subject: the peak of each way, and of it what stays between calls."""
    ways = list(points[0]["rows"])
    lines = [f"{'model':<26}" + "".join(f"{SHORT.get(way, way):>11}{'kept':>9}" for way in ways) + "   rote / eager"]
    for point in points:
        rows = point["rows"]
        whole = {way: row["kept"] + row["peak"] for way, row in rows.items()}
        line = f"{point['label']:<26}"
        line += "".join(f"{whole[way] / 1024:11.1f}{rows[way]['kept'] / 1024:9.1f}" for way in ways)
        lines.append(line + f"{whole[ROTE] / whole[EAGER]:14.2f}x")
    return "\n".join(lines)


def plot_memory(result: dict[str, Any], path: Path) -> None:
    """Groups of bars: the peak of each way, what is kept between calls hatched."""
    figure, axes = _axes()
    points = result["points"]
    for at, way in enumerate(points[0]["rows"]):
        places = [place + 0.25 * (at - 1) for place in range(len(points))]
        kept = [point["rows"][way]["kept"] / 1024 for point in points]
        peak = [point["rows"][way]["peak"] / 1024 for point in points]
        axes.bar(places, kept, width=0.25, color=COLORS[way], hatch="//")
        axes.bar(places, peak, width=0.25, bottom=kept, color=COLORS[way], label=way)
    axes.set_yscale("log")
    axes.set_xticks(range(len(points)), [point["label"] for point in points], fontsize=8)
    axes.set_ylabel("KiB")
    axes.set_title(result["title"], fontsize=10)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def bridge_table(result: dict[str, Any]) -> str:
    """A line for each kind of op: the replayed op, the bare call, and what lies between them."""
    lines = [f"{'':<22}{'replayed':>10}{'bare':>8}{'above':>8}{'ratio':>8}   goal: below {result['goal_ns']}"]
    for point in result["points"]:
        replayed, bare, above = point["replayed_ns"], point["bare_ns"], point["above_ns"]
        reached = "" if above < result["goal_ns"] else "   missed"
        lines.append(f"{point['label']:<22}{replayed:10.0f}{bare:8.0f}{above:8.0f}{replayed / bare:7.2f}x{reached}")
    return "\n".join(lines)


def plot_bridge(result: dict[str, Any], path: Path) -> None:
    """Bars: the bare call, and on it what a replayed op adds."""
    figure, axes = _axes(height=4)
    points = result["points"]
    names = [point["label"] for point in points]
    bare = [point["bare_ns"] for point in points]
    axes.barh(names, bare, color="tab:gray", label="bare call")
    # Left of the bare call's end where the replayed op is the cheaper one.
    bars = axes.barh(names, [point["above_ns"] for point in points], left=bare, color=COLORS[ROTE], label=ROTE)
    axes.bar_label(bars, labels=[f"{point['above_ns']:+.0f} ns" for point in points], padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("nanoseconds per op (median)")
    axes.set_title(result["title"], fontsize=10)
    axes.margins(x=0.15)
    axes.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
