"""Shorter programs than one that differs."""

import dataclasses
import re
from collections.abc import Iterator

from .generate import Program


def plainer(program: Program) -> Iterator[Program]:
    """The program without a result, without some lines, or with a line that only passes its input on."""
    results = re.findall(r"[^,\[\]]+(?:\[[^\]]*\])*[^,\[\]]*", program.returns[1:-1])
    if len(results) > 1:
        for at in range(len(results)):
            kept = [result.strip() for result in results[:at] + results[at + 1 :]]
            yield dataclasses.replace(program, returns=f"[{', '.join(kept)}]")
    for size in (8, 4, 2, 1):
        for at in range(len(program.lines) - size, -1, -size):
            kept = program.lines[:at] + program.lines[at + size :]
            yield dataclasses.replace(program, lines=kept)
    for at, line in enumerate(program.lines):
        result, _, rest = line.partition(" = ")
        inner = re.search(r"\b[avbpt]\d+\b", rest)
        if result.isidentifier() and inner and rest != inner[0]:
            yield dataclasses.replace(
                program, lines=[*program.lines[:at], f"{result} = {inner[0]}", *program.lines[at + 1 :]]
            )
