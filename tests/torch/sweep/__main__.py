"""Runs a slice of the sweep, one line of JSON for each case that is no plain success, counts at the end.

python -m tests.torch.sweep --names '^linalg' --most 5

Each op runs in a process of its own: one that dies is told, and the others go on.
"""

import argparse
import collections
import dataclasses
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from . import samples, twins

Counts = collections.Counter[str]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default="", help="only ops whose name matches this expression")
    parser.add_argument("--slice", default="0/1", help="i/n: only every n-th op, from the i-th on")
    parser.add_argument("--most", type=int, default=4, help="samples of an op for each dtype, at most")
    parser.add_argument("--full", action="store_true", help="every layout of every sample, with all of the passes")
    parser.add_argument("--handled", action="store_true", help="in a step that handles errors, with data out of range")
    parser.add_argument("--seed", type=int, default=0, help="chooses samples, layouts and passes")
    parser.add_argument("--passes", default="default,all")
    parser.add_argument("--case", default="", help="only the case of this name")
    parser.add_argument("--progress", action="store_true", help="a line for each op and case that begins")
    return parser.parse_args()


def say(**facts: Any) -> None:
    print(json.dumps(facts), flush=True)


def run_op(entry: Any, chosen: argparse.Namespace) -> Counts:
    """All cases of one op."""
    counts: Counts = collections.Counter()
    passes = chosen.passes.split(",")
    for case in samples.cases(entry, chosen.most, chosen.full):
        if chosen.handled:
            case = samples.handled(case)
        if chosen.case and chosen.case != case.name:
            continue
        for each in passes if chosen.full else [samples.choice(case.name, passes)]:
            if chosen.progress:
                say(case=case.name)
            outcome = twins.check(case, each)
            counts["cases"] += 1
            counts["replays"] += outcome.replays
            for kind in ("wrong", "invalid", "refusal"):
                counts[kind] += bool(getattr(outcome, kind))
            plain = not (outcome.wrong or outcome.invalid or outcome.refusal)
            if plain and not outcome.replays:
                counts["never replayed"] += 1
            if not plain or not outcome.replays:
                say(**dataclasses.asdict(outcome))
    return counts


def run_apart(name: str, entry: Any, chosen: argparse.Namespace) -> Counts:
    """The same in a process of its own, whose lines are passed on."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        os.dup2(writing, 1)
        say(counts=run_op(entry, chosen))
        os._exit(0)
    os.close(writing)
    counts: Counts = collections.Counter()
    begun = ""
    with os.fdopen(reading) as lines:
        for line in lines:
            if not line.startswith("{"):  # LAPACK's own words
                print(line, end="", file=sys.stderr)
                continue
            found = json.loads(line)
            begun = found.get("case", begun)
            if "counts" in found:
                counts.update(found["counts"])
            else:
                print(line, end="", flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        counts["died"] += 1
        say(died=name, case=begun, status=status)
    return counts


def main() -> None:
    chosen = options()
    samples.SEED = chosen.seed
    part, parts = map(int, chosen.slice.split("/"))
    counts: Counts = collections.Counter()
    entries = [(n, e) for n, e in samples.entries() if re.search(chosen.names, n)][part::parts]
    start = time.monotonic()
    for name, entry in entries:
        if chosen.progress:
            say(op=name)
        counts.update(run_apart(name, entry, chosen))
    counts["seconds"] = int(time.monotonic() - start)
    say(counts=counts)


main()
