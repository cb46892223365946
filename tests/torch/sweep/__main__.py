"""Runs a slice of the sweep, one line of JSON for each case that is no plain success, counts at the end.

python -m tests.torch.sweep --names 'linalg' --most 5
"""

import argparse
import collections
import dataclasses
import json
import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from . import samples, twins


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", default="", help="only ops whose name matches this expression")
    parser.add_argument("--slice", default="0/1", help="i/n: only every n-th op, from the i-th on")
    parser.add_argument("--most", type=int, default=4, help="samples of an op for each dtype, at most")
    parser.add_argument("--full", action="store_true", help="every layout of every sample")
    parser.add_argument("--passes", default="default,all")
    parser.add_argument("--case", default="", help="only the case of this name")
    parser.add_argument("--progress", action="store_true")
    options = parser.parse_args()
    part, parts = map(int, options.slice.split("/"))
    counts: collections.Counter[str] = collections.Counter()
    chosen = [(n, e) for n, e in samples.entries() if re.search(options.names, n)][part::parts]
    passes = options.passes.split(",")
    for name, entry in chosen:
        start = time.monotonic()
        if options.progress:
            print(json.dumps({"op": name}), flush=True)
        for case in samples.cases(entry, options.most, options.full):
            if options.case and options.case != case.name:
                continue
            which = passes if options.full else [passes[samples.number_of(case.name) % len(passes)]]
            for each in which:
                if options.progress:
                    print(json.dumps({"case": case.name}), flush=True)
                outcome = twins.check(case, each)
                counts["cases"] += 1
                counts["replays"] += outcome.replays
                for kind in ("wrong", "invalid", "refusal"):
                    counts[kind] += bool(getattr(outcome, kind))
                if not (outcome.wrong or outcome.invalid or outcome.refusal) and not outcome.replays:
                    counts["never replayed"] += 1
                if outcome.wrong or outcome.invalid or outcome.refusal or not outcome.replays:
                    print(json.dumps(dataclasses.asdict(outcome)), flush=True)
        counts["seconds"] += int(time.monotonic() - start)
    print(json.dumps({"counts": counts}), flush=True)


main()
