"""The plainest script that still differs."""

import dataclasses
from collections.abc import Iterator

from .generate import Script, fits
from .twins import Outcome, check

_PLAIN = {
    "step": "plain",
    "holder": "cell",
    "when": "after",
    "values": "number",
    "read": "direct",
    "how": "set",
    "place": "itself",
}


def shrink(script: Script, outcome: Outcome, stored: bool) -> tuple[Script, Outcome]:
    """Makes one choice after the other the plainest, as long as the script differs."""
    changed = True
    while changed:
        changed = False
        for simpler in _simpler(script):
            found = check(simpler, stored)
            if found.wrong:
                script, outcome, changed = simpler, found, True
                break
    return script, outcome


def _simpler(script: Script) -> Iterator[Script]:
    for field, plain in _PLAIN.items():
        now = getattr(script, field)
        for value in ("cell", "global") if field == "holder" else (plain,):
            if now == value:
                break
            simpler = dataclasses.replace(script, **{field: value})
            if fits(simpler):
                yield simpler
