"""Plainer scripts than one that differs."""

import dataclasses
from collections.abc import Iterator

from .generate import Script, fits

_PLAIN = {
    "step": "plain",
    "holder": "cell",
    "when": "after",
    "values": "number",
    "read": "direct",
    "how": "set",
    "place": "itself",
}


def plainer(script: Script) -> Iterator[Script]:
    """The script with one choice the plainest."""
    for field, plain in _PLAIN.items():
        now = getattr(script, field)
        for value in ("cell", "global") if field == "holder" else (plain,):
            if now == value:
                break
            simpler = dataclasses.replace(script, **{field: value})
            if fits(simpler):
                yield simpler
