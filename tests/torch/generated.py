"""Runs a checker of generated steps (`scripts`, `sharing`, `programs`) in a process of its own, which may die."""

import collections
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Counted = tuple[collections.Counter[str], list[str]]


def command(checker: str, *arguments: object) -> dict[str, Any]:
    """`python -m tests.torch.CHECKER`; its counts and failures, or how it died."""
    line = [sys.executable, "-m", f"tests.torch.{checker}", *map(str, arguments), "--json"]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    try:
        return dict(json.loads(done.stdout.splitlines()[-1]))
    except (IndexError, ValueError):
        end = done.stderr[-4000:]
        died = f"{' '.join(line)} ended with {done.returncode}; the last one that it names died:\n{end}"
        return {"counts": {}, "refusals": {}, "failures": [died]}


def in_batches(checker: str, first: int, scripts: int, batch: int, progress: Callable[[str], None]) -> Counted:
    """The counts and failures of `scripts` seeds from `first` on, `batch` of them in each process."""
    counts: collections.Counter[str] = collections.Counter()
    failures: list[str] = []
    for seed in range(first, first + scripts, batch):
        found = command(checker, "--seed", seed, "--scripts", min(batch, first + scripts - seed))
        counts.update(found["counts"])
        failures += found["failures"]
        progress(f"\nseed {first}, up to {seed + batch}: {len(failures)} wrong, {dict(sorted(counts.items()))}")
    return counts, failures
