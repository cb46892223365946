"""Captures that are wrong in one way each, to see that the twins would tell."""

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from .generate import Program, local_of
from .twins import compare, run


def frozen(step: Callable[..., Any]) -> Callable[..., Any]:
    """What depends on the arguments is computed in the first calls only."""
    kept: list[Any] = []

    def call(*arguments: Any) -> Any:
        results = step(*arguments)
        if len(kept) < 3:
            kept.append([result.detach().clone() for result in results])
            return results
        return [result.clone() for result in kept[-1]]

    return call


def reused(step: Callable[..., Any]) -> Callable[..., Any]:
    """Results lie where those of the call before lie."""
    kept: list[Any] = []

    def call(*arguments: Any) -> Any:
        results = step(*arguments)
        if not kept:
            kept.extend(results)
            return results
        for old, new in zip(kept, results, strict=True):
            if 0 not in local_of(old).stride():
                local_of(old).copy_(local_of(new))
        return list(kept)

    return call


def late(program: Program) -> tuple[Program, Program] | None:
    """The program, and it with the first write that the next line reads after that
    line. Both return what was read."""
    for at, line in enumerate(program.lines[:-1]):
        written = re.search(r"(\w+)(?:\[[^=]*\] = |[.\w()\[\]:, -]*_\()", line.removeprefix("with torch.no_grad(): "))
        following = program.lines[at + 1]
        if not re.match(r"v\d+ = ", line) and written and re.match(rf"v\d+ = .*\b{written[1]}\b", following):
            read = f"{following.split(' = ')[0]}.detach()"
            returns = f"[{read}, {program.returns[1:]}"
            lines = [*program.lines[:at], following, line, *program.lines[at + 2 :]]
            whole = dataclasses.replace(program, returns=returns)
            return whole, dataclasses.replace(whole, lines=lines)
    return None


def plant(program: Program, mesh: DeviceMesh, counts: Counter[str]) -> None:
    """Counts the bugs planted and those seen."""
    try:
        expected = run(program, mesh, lambda fn, state: fn)
    except RuntimeError:
        return  # eager refuses a later call
    for bug in (frozen, reused):
        found = run(program, mesh, lambda fn, state, bug=bug: bug(fn))
        if program.returns != "[]":
            counts[bug.__name__] += 1
            counts[f"{bug.__name__} seen"] += bool(compare(expected, found))
    moved = late(program)
    if moved is not None:
        try:
            expected, found = (run(each, mesh, lambda fn, state: fn) for each in moved)
        except (RuntimeError, NameError):
            return  # the line read what is not made yet, or autograd refuses
        counts["late"] += 1
        counts["late seen"] += bool(compare(expected, found))


def unseen(counts: Counter[str]) -> list[str]:
    """The bugs that were seen too rarely: some change nothing (a result that is
    a constant, a write that a view sees anyway, a line that nothing reads)."""
    kinds = {"frozen": 0.5, "reused": 0.5, "late": 0.2}
    return [
        f"planted {kind} {counts[kind]} times, seen {counts[f'{kind} seen']} times"
        for kind, least in kinds.items()
        if counts[kind] == 0 or counts[f"{kind} seen"] < least * counts[kind]
    ]
