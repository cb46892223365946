"""What the command lines of `scripts`, `sharing` and `programs` share: options, how they start, what they report, and
how a failing case is made plainer."""

import argparse
import faulthandler
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

_Case = TypeVar("_Case")
_Outcome = TypeVar("_Outcome")


def parser(description: str | None, cases: str) -> argparse.ArgumentParser:
    """The options of all; `cases` is what they call them, in the plural."""
    options = argparse.ArgumentParser(description=description)
    options.add_argument("--seed", type=int, default=0, help=f"of the first of the {cases}")
    options.add_argument(f"--{cases}", type=int, default=100, help="how many seeds there are")
    options.add_argument("--every", type=int, default=1, help="check each so many seeds")
    options.add_argument("--source", action="store_true", help=f"print the {cases}, check nothing")
    options.add_argument("--json", action="store_true", help="print the counts as JSON")
    options.add_argument("--whole", action="store_true", help=f"do not make failing {cases} plainer")
    return options


class Report:
    """What was found, counted from here on; failures are printed at once."""

    def __init__(self) -> None:
        faulthandler.enable()
        torch.set_num_threads(1)
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self._refusals: Counter[str] = Counter()
        self._begin = time.monotonic()

    def checks(self, case: str) -> None:
        """Names the case, should the process die in it; one that hangs ends it."""
        print(case, file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(120, exit=True)

    def progress(self, done: int, of: int) -> None:
        """Prints how far it is, now and then."""
        if done % 500 == 0:
            print(f"{done} of {of} in {self._seconds()} s: {dict(self.counts)}", file=sys.stderr)

    def refused(self, why: str) -> None:
        """Counts a refusal by its first line."""
        self._refusals[why.split("\n")[0][:160]] += 1

    def failed(self, text: str) -> None:
        """Keeps what differs, and how to see it again."""
        self.failures.append(text)
        print(text, file=sys.stderr, flush=True)

    def end(self, as_json: bool) -> int:
        """Prints everything; the exit status."""
        self.counts["seconds"] = self._seconds()
        refusals = self._refusals
        if as_json:
            print(json.dumps({"counts": self.counts, "refusals": refusals, "failures": self.failures}))
        else:
            common = (f"{n}x {text}" for text, n in refusals.most_common(20))
            print(dict(self.counts), *common, *self.failures, sep="\n")
        return bool(self.failures)

    def _seconds(self) -> int:
        return round(time.monotonic() - self._begin)


def plainest(
    case: _Case,
    outcome: _Outcome,
    plainer: Callable[[_Case], Iterable[_Case]],
    wrong: Callable[[_Case], _Outcome | None],
) -> tuple[_Case, _Outcome]:
    """The plainest case that is still wrong: takes the first plainer one again and again. `wrong` gives the outcome of
    a case, or None if it is right."""
    found: Any = True
    while found:
        found = None
        for each in plainer(case):
            found = wrong(each)
            if found:
                case, outcome = each, found
                break
    return case, outcome
