"""Rote's answers, from `rote propagate`."""

import json
import os
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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
    found = binary()
    if found is None:
        raise RuntimeError("no rote binary: cargo build --release")
    command = [found, "propagate", "--batch", "--json"]
    lines = "\n".join(written(q) for q in questions)
    ran = subprocess.run(command, input=lines, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    if len(answers) != len(questions):
        raise RuntimeError(f"{len(questions)} questions, {len(answers)} answers")
    return [read(answer) for answer in answers]


def read(answer: dict) -> Answer:
    if "error" in answer:
        return Answer(error=answer["error"])
    return Answer(
        to=[tuple(i["to"]) for i in answer["inputs"]],
        outputs=[tuple(o["placements"]) for o in answer["outputs"]],
        cost=answer["cost_us"],
        steps=[f"{s['kind']}@{s['mesh_dim']}" for i in answer["inputs"] for s in i["steps"]],
    )
