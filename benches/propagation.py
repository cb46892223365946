"""One uncached propagation, by DTensor and by Rote, as the mesh gets more dims.

    python benches/propagation.py            (part of `make bench`)

`mm` and `add` of 1024 x 1024 floats on meshes of 2 ranks per dim: inputs that
match a strategy, and inputs that have to be redistributed. DTensor is asked
through `propagate_op_sharding_non_cached`, on a mesh of ranks that exist in name
only. Rote is asked through `rote propagate --batch`, which reports the time that
the question took inside. Both answer questions in turn, round after round, until
a question's time is spent; the numbers of runs stand in the table. On a 5-D mesh
only Rote is asked: DTensor takes most of a second on a 4-D one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.testing._internal.distributed.fake_pg import FakeStore

SIZE = 1024
PER_ROUND = {"torch": 1, "rote": 20}
DIMS = range(1, 6)
DTENSOR_DIMS = range(1, 5)
OPS = {"mm": (torch.ops.aten.mm.default, "aten::mm"), "add": (torch.ops.aten.add.Tensor, "aten::add.Tensor")}
# Placements of the two inputs on the first, second, ... mesh dim.
PLACEMENTS = {
    ("mm", "matching"): [("S(0)", "R"), ("R", "S(1)"), ("S(1)", "S(0)"), ("S(0)", "R"), ("R", "S(1)")],
    ("mm", "redistributed"): [("S(0)", "S(0)"), ("S(0)", "S(1)"), ("S(1)", "S(1)"), ("R", "R"), ("S(0)", "S(1)")],
    ("add", "matching"): [("S(0)", "S(0)"), ("S(1)", "S(1)"), ("S(0)", "S(0)"), ("R", "R"), ("P(sum)", "P(sum)")],
    ("add", "redistributed"): [("S(0)", "S(1)"), ("P(sum)", "R"), ("S(1)", "S(1)"), ("R", "S(0)"), ("R", "P(sum)")],
}
CONCRETE: dict[str, Placement] = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1), "P(sum)": Partial("sum")}


@dataclass(frozen=True)
class Question:
    op: str
    inputs: str
    dims: int

    @property
    def placements(self) -> list[tuple[str, ...]]:
        per_mesh_dim = PLACEMENTS[self.op, self.inputs][: self.dims]
        return list(zip(*per_mesh_dim, strict=True))


class Rote:
    """A `rote propagate --batch`, asked line by line."""

    def __init__(self, command: Path) -> None:
        self.process = subprocess.Popen(
            [command, "propagate", "--batch", "--json"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def microseconds(self, question: Question) -> float:
        asked = {
            "op": OPS[question.op][1],
            "mesh": ",".join(["2"] * question.dims),
            "args": [f"f32[{SIZE},{SIZE}] @ {','.join(p)}" for p in question.placements],
        }
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        check(question, answer["cost_us"] > 0)
        return float(answer["time_ns"]) / 1e3

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


class Torch:
    """DTensor's propagator, without its cache."""

    def __init__(self) -> None:
        dist.init_process_group("fake", rank=0, world_size=2 ** max(DTENSOR_DIMS), store=FakeStore())
        self.propagator = DTensor._op_dispatcher.sharding_propagator
        self.schemas: dict[Question, OpSchema] = {}

    def schema(self, question: Question) -> OpSchema:
        ranks = torch.arange(2**question.dims).reshape((2,) * question.dims)
        mesh = DeviceMesh("cpu", ranks, _init_backend=False)
        meta = TensorMeta(torch.Size((SIZE, SIZE)), (SIZE, 1), torch.float32)
        specs = [DTensorSpec(mesh, tuple(CONCRETE[p] for p in ps), tensor_meta=meta) for ps in question.placements]
        op = OPS[question.op][0]
        info = self.propagator.op_to_schema_info.get(op)
        info = info or self.propagator.op_to_schema_info_for_single_dim_strategy.get(op)
        return OpSchema(op, tuple(specs), {}, schema_info=info)

    def microseconds(self, question: Question) -> float:
        if question not in self.schemas:
            self.schemas[question] = self.schema(question)
        schema = self.schemas[question]
        start = time.perf_counter_ns()
        found = self.propagator.propagate_op_sharding_non_cached(schema)
        taken = (time.perf_counter_ns() - start) / 1e3
        check(question, bool(found.needs_redistribute))
        return taken


def check(question: Question, moves: bool) -> None:
    assert moves == (question.inputs == "redistributed"), question


def measure(question: Question, engines: dict[str, Any], seconds: float, most: int) -> dict[str, Any]:
    """Median, least and most microseconds of each engine, and how many runs."""
    times: dict[str, list[float]] = {name: [] for name in engines}
    cold: dict[str, list[float]] = {name: [] for name in engines}
    for engine in engines.values():
        engine.microseconds(question)
    end = time.monotonic() + seconds
    rounds = 0
    while rounds < 3 or (time.monotonic() < end and rounds < most):
        rounds += 1
        for name, engine in engines.items():
            taken = [engine.microseconds(question) for _ in range(PER_ROUND[name])]
            times[name] += taken
            cold[name].append(taken[0])
    return {
        name: {
            "median_us": statistics.median(t),
            "least_us": min(t),
            "most_us": max(t),
            "cold_us": statistics.median(cold[name]),
            "runs": len(t),
        }
        for name, t in times.items()
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(1, 2, figsize=(9, 3.8), sharey=True, layout="constrained")
    for axes, inputs in zip(panels, ("matching", "redistributed"), strict=True):
        for name, color in (("torch", "tab:gray"), ("rote", "tab:orange")):
            for op, style in (("mm", "o-"), ("add", "s--")):
                own = [r for r in rows if r["op"] == op and r["inputs"] == inputs and name in r]
                label = f"{op}, {'DTensor' if name == 'torch' else 'Rote'}"
                axes.plot(
                    [r["dims"] for r in own], [r[name]["median_us"] for r in own], style, color=color, label=label
                )
        axes.set_yscale("log")
        axes.set_xticks(list(DIMS))
        axes.set_xlabel("mesh dims, 2 ranks each")
        axes.set_title(f"inputs {inputs}")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("microseconds per propagation (median)")
    panels[1].legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def print_table(rows: list[dict[str, Any]]) -> None:
    theirs_head, ours_head = f"{'DTensor':>13} {'runs':>5}", f"{'Rote':>11} {'cold':>8} {'runs':>5}"
    print(f"\n{'op':<4} {'inputs':<14} {'mesh':<5} {theirs_head} {ours_head} {'ratio':>9}")
    for row in rows:
        theirs, ours = row.get("torch"), row["rote"]
        line = f"{row['op']:<4} {row['inputs']:<14} {row['dims']}-D   "
        line += f"{theirs['median_us']:>10.0f} us {theirs['runs']:>5}" if theirs else f"{'not asked':>13} {'':>5}"
        line += f" {ours['median_us']:>8.1f} us {ours['cold_us']:>8.1f} {ours['runs']:>5}"
        print(line + (f" {row['ratio']:>8.0f}x" if theirs else ""))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    target = Path(os.environ.get("CARGO_TARGET_DIR", "target"))
    parser.add_argument("--out", type=Path, default=Path("target/bench"), help="output directory")
    parser.add_argument("--rote", type=Path, default=target / "release" / "rote", help="the rote command")
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each question")
    parser.add_argument("--rounds", type=int, default=200, help="the most rounds of each question")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    rote, theirs = Rote(arguments.rote), Torch()
    rows = []
    for op, inputs in PLACEMENTS:
        for dims in DIMS:
            question = Question(op, inputs, dims)
            engines: dict[str, Any] = {"rote": rote}
            if dims in DTENSOR_DIMS:
                engines["torch"] = theirs
            row: dict[str, Any] = {"op": op, "inputs": inputs, "dims": dims}
            row |= measure(question, engines, arguments.seconds, arguments.rounds)
            if "torch" in row:
                row["ratio"] = row["torch"]["median_us"] / row["rote"]["median_us"]
            rows.append(row)
    rote.close()
    result = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rows": rows,
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "propagation.json").write_text(json.dumps(result, indent=1))
    plot(rows, arguments.out / "propagation.png")
    print_table(rows)
    print(f"\nsaved {arguments.out / 'propagation.json'} and {arguments.out / 'propagation.png'}")


if __name__ == "__main__":
    main()
