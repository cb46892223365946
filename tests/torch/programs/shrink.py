"""The fewest lines of a program that still differ."""

import dataclasses
import re
from collections.abc import Iterator

from torch.distributed.device_mesh import DeviceMesh

from .generate import Program
from .twins import Outcome, check


def shrink(program: Program, outcome: Outcome, mesh: DeviceMesh) -> tuple[Program, Outcome]:
    """Leaves out lines and results for as long as the captured program differs
    from the eager one."""
    smaller = True
    while smaller:
        smaller = False
        for candidate in candidates(program):
            found = check(candidate, mesh, outcome.passes)
            if found.wrong and not found.invalid:
                program, outcome, smaller = candidate, found, True
                break
    return program, outcome


def candidates(program: Program) -> Iterator[Program]:
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
