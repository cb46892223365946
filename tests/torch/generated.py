"""Runs a checker of generated steps (`scripts`, `programs`) in a process of its own, which may die."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


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
