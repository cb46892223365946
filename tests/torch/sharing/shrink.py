"""The shortest script that still differs."""

import dataclasses
from collections.abc import Callable, Iterator

from .generate import Script


def shrink(script: Script, differs: Callable[[Script], bool]) -> Script:
    """Leaves one line after the other out, as long as the script differs."""
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(script):
            if differs(simpler):
                script, changed = simpler, True
                break
    return script


def _simpler(script: Script) -> Iterator[Script]:
    for field in ("changes", "body", "state", "made"):
        lines = getattr(script, field)
        for i in range(len(lines)):
            yield dataclasses.replace(script, **{field: lines[:i] + lines[i + 1 :]})
