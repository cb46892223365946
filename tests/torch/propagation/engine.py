"""Rote's answers, from `rote propagate`."""

import json
import math
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from .dtensor import Answer, Placements, links
from .samples import ROOT, Sample

Question = tuple[Sample, tuple[Placements, ...], tuple[int, ...]]


@cache
def binary() -> Path | None:
    """The newest `rote` that was built."""
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [p for p in (target / "release" / "rote", target / "debug" / "rote") if p.exists()]
    return max(built, key=lambda p: p.stat().st_mtime) if built else None


def written(question: Question) -> str:
    """A question as `rote propagate --batch` reads it."""
    sample, placements, sizes = question
    mesh = ",".join(f"d{i}={n}" for i, n in enumerate(sizes))
    args = sample.written([",".join(p) for p in placements])
    return json.dumps({"op": sample.name, "mesh": mesh, "args": args, "links": links(sizes)})


def ask(questions: Sequence[Question]) -> list[Answer]:
    """The answers, one per question."""
    return [read(answer) for answer in answered([written(q) for q in questions])]


def prices(questions: Sequence[Question], taken: Sequence[Sequence[Placements]]) -> list[float]:
    """What it costs, in Rote's model, to bring the inputs of each question into
    other placements; infinity where there is no way."""
    lines, owners = [], []
    for at, ((sample, placements, sizes), to) in enumerate(zip(questions, taken, strict=True)):
        mesh = ",".join(f"d{i}={n}" for i, n in enumerate(sizes))
        for tensor, before, after in zip(sample.tensors, placements, to, strict=True):
            question = {"tensor": f"{tensor.written} @ {','.join(before)}", "to": ",".join(after), "mesh": mesh}
            lines.append(json.dumps({**question, "links": links(sizes)}))
            owners.append(at)
    total = [0.0] * len(questions)
    for at, answer in zip(owners, answered(lines), strict=True):
        total[at] += answer.get("cost_us", math.inf)
    return total


def answered(lines: Sequence[str]) -> list[dict[str, Any]]:
    found = binary()
    if found is None:
        raise RuntimeError("no rote binary: cargo build --release")
    command = [found, "propagate", "--batch", "--json"]
    ran = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    if len(answers) != len(lines):
        raise RuntimeError(f"{len(lines)} questions, {len(answers)} answers")
    return answers


def read(answer: dict[str, Any]) -> Answer:
    if "error" in answer:
        return Answer(error=answer["error"])
    return Answer(
        to=[tuple(i["to"]) for i in answer["inputs"]],
        outputs=[tuple(o["placements"]) for o in answer["outputs"]],
        cost=answer["cost_us"],
        steps=[f"{s['kind']}@{s['mesh_dim']}" for i in answer["inputs"] for s in i["steps"]],
    )
