"""Rote: record a distributed training step once, replay it from a plan.

step = rote.capture(train_step)
for tokens, labels in loader:
    loss = step(tokens, labels)  # records once, then replays
"""

from . import logging, propagation
from ._capture import capture, capture_module
from ._capture_loops import CapturedLoops, capture_loops
from ._captured import Captured
from ._captured_module import CapturedModule
from ._native import LogCallback, lib
from ._propagate import Propagation, propagate
from ._step import RecordingRefused, Stats, VerificationError
from ._validate import validate

__version__: str = lib.rote_version().decode()

logging.configure()
_log_callback = LogCallback(logging.deliver)  # held: the library calls it
lib.rote_set_log(_log_callback)

__all__ = [
    "Captured",
    "CapturedLoops",
    "CapturedModule",
    "Propagation",
    "RecordingRefused",
    "Stats",
    "VerificationError",
    "__version__",
    "capture",
    "capture_loops",
    "capture_module",
    "logging",
    "propagate",
    "propagation",
    "validate",
]
