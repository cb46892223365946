"""Checks random scripts: `python -m tests.torch.scripts --help`."""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from checker import Report, parser, plainest
from rote import _policy

from scripts.corpus import CORPUS, STORED
from scripts.generate import Script, each, from_name, generate
from scripts.places import REFUSED, REFUSED_AS_CALLED
from scripts.shrink import plainer
from scripts.twins import Outcome, check


def main() -> int:
    known = parser(__doc__, "scripts")
    known.add_argument("--name", action="append", default=[], help="check the script of this name; may be repeated")
    known.add_argument("--each", action="store_true", help="check each place, holder, read and sort of values once")
    known.add_argument("--corpus", action="store_true", help="check those that were wrong once")
    known.add_argument("--stored", action="store_true", help="change before a stored plan is trusted")
    known.add_argument("--called", action="store_true", help="follow code that runs only, as where much is in reach")
    known.add_argument("--list", action="store_true", help="print what became of each")
    options = known.parse_args()
    if options.called:
        _policy.MOST_FUNCTIONS = 0
    names = (STORED if options.stored else CORPUS) if options.corpus else options.name
    seeds = range(options.seed, options.seed + options.scripts, options.every)
    scripts = [(None, script) for script in [*map(from_name, names), *(each() if options.each else ())]]
    scripts = scripts or [(seed, generate(seed)) for seed in seeds]
    if options.source:
        for _, script in scripts:
            print(script.source(main=True))
        return 0
    check(from_name("itself/cell/direct/set/number/never/plain"))  # which may compile the bridge
    report = Report()
    for number, (seed, script) in enumerate(scripts):
        report.checks(f"script {seed if seed is not None else ''} {script.name}")
        outcome = check(script, options.stored)
        kind = kind_of(outcome)
        report.counts.update(["scripts", kind])
        if script.quiet:
            report.counts.update(["quiet", f"quiet, {kind}"])
        if options.list:
            print(kind, script.name, outcome.refusal, sep="\t")
        if outcome.wrong:
            if not options.whole:
                script, outcome = plainest(script, outcome, plainer, partial(_wrong, stored=options.stored))
            report.failed(f"seed {seed}, {script.name}: {outcome.wrong}\n{script.source(main=True)}")
        elif options.each and not options.stored and not outcome.raised and kind != expected(script, options.called):
            report.failed(f"{script.name} is {kind}: {outcome.refusal}")
        elif outcome.refusal:
            report.refused(outcome.refusal)
        report.progress(number + 1, len(scripts))
    return report.end(options.json)


def expected(script: Script, called: bool) -> str:
    """What becomes of a script of `--each` that does not raise."""
    refused = script.place in (REFUSED_AS_CALLED if called else REFUSED) or script.read == "exec"
    return "refused" if refused else "replayed before and after"


def _wrong(script: Script, stored: bool) -> Outcome | None:
    outcome = check(script, stored)
    return outcome if outcome.wrong else None


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
