"""Messages of Rote, through Python's own logging.

Loggers: ``rote.guards`` (each miss, expected and found), ``rote.record`` (the
outcome of recordings) and ``rote.replay`` (plan files). Warnings are always
printed. ``ROTE_LOG=guards,record,replay`` also prints the other messages of the
named loggers on stderr.
"""

from __future__ import annotations

import logging
import os
import sys

_TARGETS = ("guards", "record", "replay")


def configure(names: str | None = None) -> None:
    """Turns on the named loggers; by default those in ``ROTE_LOG``."""
    wanted = os.environ.get("ROTE_LOG", "") if names is None else names
    chosen = {name.strip() for name in wanted.split(",") if name.strip()}
    unknown = chosen - set(_TARGETS) - {"all"}
    root = logging.getLogger("rote")
    if not any(getattr(handler, "rote", False) for handler in root.handlers):
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
        handler.rote = True  # type: ignore[attr-defined]
        root.addHandler(handler)
        root.propagate = True
    if unknown:
        root.warning(
            "ROTE_LOG: there is no logger named %s: expected %s",
            ", ".join(sorted(unknown)),
            ", ".join(_TARGETS),
        )
    root.setLevel(logging.WARNING)
    for name in _TARGETS:
        logger = logging.getLogger(f"rote.{name}")
        logger.setLevel(logging.DEBUG if name in chosen or "all" in chosen else logging.NOTSET)


def deliver(level: int, target: bytes, message: bytes) -> None:
    """Takes a message of the library."""
    name = target.decode(errors="replace").replace("::", ".")
    logging.getLogger(name).log(level, "%s", message.decode(errors="replace"))
