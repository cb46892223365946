"""Shorter scripts than one that differs."""

import dataclasses
from collections.abc import Iterator

from .generate import Script


def plainer(script: Script) -> Iterator[Script]:
    """The script without one of its lines."""
    for field in ("changes", "body", "state", "made"):
        lines = getattr(script, field)
        for i in range(len(lines)):
            yield dataclasses.replace(script, **{field: lines[:i] + lines[i + 1 :]})
