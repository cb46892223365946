"""Whichever tensors share memory, by whatever way, and whatever the step or its caller does to them, a captured step
equals eager.

    ROTE_TEST_SHARING=20000 ROTE_TEST_SEED=5000 pytest tests/torch/test_sharing_sweep.py

checks others than the usual scripts. One that differs is printed as Python, cut down.
"""

import functools
import os

import pytest
from extent import EVERYTHING, SEED
from generated import in_batches

SCRIPTS = int(os.environ.get("ROTE_TEST_SHARING", "10000" if EVERYTHING else "120"))
#: Scripts of one process.
BATCH = 1000
#: Of the others, eager raises in most, or the step is refused.
LEAST_REPLAYED = 0.3

pytestmark = pytest.mark.skipif(os.environ.get("ROTE_TEST_ORACLE_ONLY") == "1", reason="compares two ways of running")


def test_scripts_that_share_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        counts, failures = in_batches("sharing", SEED, SCRIPTS, BATCH, functools.partial(print, flush=True))
    assert not failures, "\n\n".join(failures[:5])
    assert counts["scripts"] == SCRIPTS
    assert counts["replayed"] >= LEAST_REPLAYED * SCRIPTS, counts
