"""A number hidden where a walk over what a function reaches could miss it, and the check that its change is seen."""

from collections.abc import Callable

import torch
from oracle import ORACLE_ONLY, Calls, Capture, Run, check_right, over

BEFORE, AFTER = 6, 4
Hidden = tuple[Callable[[], float], Callable[[], object]]  # how to read the number, how to change it


def run_hidden(build: Callable[[], Hidden]) -> Run:
    """Captures a step that reads the number, changes it between calls, and compares with eager."""

    def script(capture: Capture) -> Calls:
        read, change = build()
        return over(capture, lambda x: x * read(), [torch.arange(4.0) + 1] * (BEFORE + AFTER), before={BEFORE: change})

    return check_right(script)


def check_seen(build: Callable[[], Hidden]) -> None:
    """The change is seen, and replays go on with the new number."""
    found = run_hidden(build)
    if not ORACLE_ONLY:
        before, after = found.stats[BEFORE - 1][0], found.stats[-1][0]
        assert before.replays and after.replays > before.replays, after
