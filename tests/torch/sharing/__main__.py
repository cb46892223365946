"""Checks random scripts: `python -m tests.torch.sharing --help`."""

import argparse
import faulthandler
import json
import sys
import time
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules
sys.path.insert(0, str(Path(__file__).parent))  # and the scripts'

from scripts.twins import check

from sharing.generate import generate
from sharing.shrink import shrink


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first script")
    parser.add_argument("--scripts", type=int, default=100)
    parser.add_argument("--source", action="store_true", help="print the scripts, check nothing")
    parser.add_argument("--json", action="store_true", help="print the counts as JSON")
    parser.add_argument("--whole", action="store_true", help="do not cut failing scripts down")
    options = parser.parse_args()
    faulthandler.enable()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failures = []
    begin = time.monotonic()
    for seed in range(options.seed, options.seed + options.scripts):
        script = generate(seed)
        if options.source:
            print(script.source(main=True))
            continue
        print(f"script {seed}", file=sys.stderr, flush=True)  # should the process die
        faulthandler.dump_traceback_later(120, exit=True)
        outcome = check(script)
        counts.update({"scripts": 1, "replayed": bool(outcome.before or outcome.after)})
        counts.update({"replays": outcome.before + outcome.after})
        if outcome.refusal:
            refusals[outcome.refusal.split("\n")[0][:160]] += 1
        if outcome.wrong:
            counts["wrong"] += 1
            if not options.whole:
                script = shrink(script, lambda simpler: bool(check(simpler).wrong))
                outcome = check(script)
            failures.append(f"seed {seed}: {outcome.wrong}\n{script.source(main=True)}")
            print(failures[-1], file=sys.stderr, flush=True)
    if options.source:
        return 0
    counts["seconds"] = round(time.monotonic() - begin)
    if options.json:
        print(json.dumps({"counts": counts, "refusals": refusals, "failures": failures}))
    else:
        print(dict(counts), *(f"{n}x {text}" for text, n in refusals.most_common(20)), *failures, sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
