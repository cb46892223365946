"""Wherever a script keeps a value, however its step reads it and however it changes, a captured step equals eager.

    ROTE_TEST_SCRIPTS=20000 ROTE_TEST_SEED=5000 pytest tests/torch/test_state_sweep.py

checks others than the usual ones. A script that differs is printed as Python,
made as plain as it gets. Those that were wrong once always run.
"""

import functools
import os

import pytest
from extent import EVERYTHING, SEED
from generated import command, in_batches
from scripts.places import OUT_OF_SIGHT

SCRIPTS = int(os.environ.get("ROTE_TEST_SCRIPTS", "5000" if EVERYTHING else "120"))
#: Scripts of one process.
BATCH = 500
#: At least so many are replayed both before and after the change, of all and of those in which nothing changes.
LEAST_REPLAYED, LEAST_QUIET = 0.5, 0.8

pytestmark = pytest.mark.skipif(os.environ.get("ROTE_TEST_ORACLE_ONLY") == "1", reason="compares two ways of running")


def test_scripts_see_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        counts, failures = in_batches("scripts", SEED, SCRIPTS, BATCH, functools.partial(print, flush=True))
    assert not failures, "\n\n".join(failures[:5])
    assert counts["scripts"] == SCRIPTS
    assert counts["replayed before and after"] >= LEAST_REPLAYED * SCRIPTS, counts
    assert counts["quiet, replayed before and after"] >= LEAST_QUIET * counts["quiet"], counts


def test_scripts_whose_code_is_followed_as_it_runs() -> None:
    found = command("scripts", "--called", "--seed", SEED + SCRIPTS, "--scripts", SCRIPTS // 3)
    assert not found["failures"], "\n\n".join(found["failures"][:5])
    assert found["counts"]["replayed before and after"] >= LEAST_REPLAYED * (SCRIPTS // 3), found["counts"]


def test_changes_before_a_stored_plan_is_trusted() -> None:
    found = command("scripts", "--stored", "--seed", SEED, "--scripts", SCRIPTS)
    assert not found["failures"], "\n\n".join(found["failures"][:5])
    assert found["counts"]["replayed before and after"] >= LEAST_REPLAYED * SCRIPTS, found["counts"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["", "--called", "--stored"])
def test_each_place_holder_read_and_sort_of_values_once(how: str) -> None:
    """As plain as can be: a call sees the change, and replays go on, but for what is refused."""
    found = command("scripts", "--each", *filter(None, [how]))
    assert not found["failures"], "\n\n".join(found["failures"])
    assert found["counts"]["scripts"] > 1000, found["counts"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("how", ["", "--stored", "--called"])
def test_scripts_that_were_wrong_once(how: str) -> None:
    found = command("scripts", "--corpus", *filter(None, [how]))
    assert not found["failures"], "\n\n".join(found["failures"])


@pytest.mark.parametrize("what", OUT_OF_SIGHT)
def test_what_the_guide_calls_out_of_sight_is(what: str) -> None:
    """docs/guards.md says so. One that is seen by now belongs into the sweep."""
    from scripts.generate import from_name
    from scripts.twins import check

    assert check(from_name(OUT_OF_SIGHT[what])).wrong
