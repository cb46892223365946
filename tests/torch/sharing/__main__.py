"""Checks random scripts: `python -m tests.torch.sharing --help`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules
sys.path.insert(0, str(Path(__file__).parent))  # and the scripts'

from checker import Report, parser, plainest
from scripts.twins import Outcome, check

from sharing.generate import Script, generate
from sharing.shrink import plainer


def main() -> int:
    options = parser(__doc__, "scripts").parse_args()
    report = Report()
    seeds = range(options.seed, options.seed + options.scripts, options.every)
    for number, seed in enumerate(seeds):
        script = generate(seed)
        if options.source:
            print(script.source(main=True))
            continue
        report.checks(f"script {seed}")
        outcome = check(script)
        report.counts.update({"scripts": 1, "replayed": bool(outcome.before or outcome.after)})
        report.counts.update({"replays": outcome.before + outcome.after})
        if outcome.refusal:
            report.refused(outcome.refusal)
        if outcome.wrong:
            report.counts["wrong"] += 1
            if not options.whole:
                script, outcome = plainest(script, outcome, plainer, _wrong)
            report.failed(f"seed {seed}: {outcome.wrong}\n{script.source(main=True)}")
        report.progress(number + 1, len(seeds))
    return 0 if options.source else report.end(options.json)


def _wrong(script: Script) -> Outcome | None:
    outcome = check(script)
    return outcome if outcome.wrong else None


if __name__ == "__main__":
    sys.exit(main())
