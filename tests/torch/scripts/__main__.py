"""Checks random scripts: `python -m tests.torch.scripts --help`."""

import argparse
import faulthandler
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from scripts.corpus import CORPUS, STORED
from scripts.generate import from_name, generate
from scripts.shrink import shrink
from scripts.twins import Outcome, check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first script")
    parser.add_argument("--scripts", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="check each so many seeds")
    parser.add_argument("--name", action="append", default=[], help="check the script of this name; may be repeated")
    parser.add_argument("--corpus", action="store_true", help="check those that were wrong once")
    parser.add_argument("--stored", action="store_true", help="change before a stored plan is trusted")
    parser.add_argument("--source", action="store_true", help="print the scripts, check nothing")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--whole", action="store_true", help="do not make failing scripts plainer")
    parser.add_argument("--list", action="store_true", help="print what became of each")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    names = (STORED if options.stored else CORPUS) if options.corpus else options.name
    seeds = range(options.seed, options.seed + options.scripts, options.every)
    scripts = [(None, from_name(name)) for name in names] if names else [(seed, generate(seed)) for seed in seeds]
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failures = []
    if not options.source:  # which may compile the bridge
        check(from_name("itself/cell/direct/set/number/never/plain"))
    begin = time.monotonic()
    for number, (seed, script) in enumerate(scripts):
        if options.source:
            print(script.source(main=True))
            continue
        print(
            f"script {seed if seed is not None else ''} {script.name}", file=sys.stderr, flush=True
        )  # should the process die
        if number % 500 == 499:
            print(
                f"{number + 1} of {len(scripts)} scripts in {time.monotonic() - begin:.0f} s: {dict(counts)}",
                file=sys.stderr,
            )
        faulthandler.dump_traceback_later(120, exit=True)
        outcome = check(script, options.stored)
        kind = kind_of(outcome)
        counts.update(["scripts", kind])
        if script.quiet:
            counts.update(["quiet", f"quiet, {kind}"])
        if options.list:
            print(kind, script.name, outcome.refusal, sep="\t")
        if outcome.wrong:
            if not options.whole:
                script, outcome = shrink(script, outcome, options.stored)
            report = f"seed {seed}, {script.name}: {outcome.wrong}\n{script.source(main=True)}"
            failures.append(report)
            print(report, file=sys.stderr, flush=True)
        elif outcome.refusal:
            refusals[outcome.refusal.split("\n")[0]] += 1
    if options.source:
        return 0
    counts["seconds"] = round(time.monotonic() - begin)
    if options.json:
        print(json.dumps({"counts": counts, "refusals": refusals, "failures": failures}))
    else:
        print(dict(counts), *(f"{n}x {text}" for text, n in refusals.most_common(20)), *failures, sep="\n")
    return bool(failures)


def kind_of(outcome: Outcome) -> str:
    if outcome.wrong:
        return "wrong"
    if outcome.raised:
        return "raised"
    if outcome.before and outcome.after:
        return "replayed before and after"
    if outcome.refusal:
        return "refused"
    return "replayed" if outcome.before or outcome.after else "never replayed"


if __name__ == "__main__":
    sys.exit(main())
