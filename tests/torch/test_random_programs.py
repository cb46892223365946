"""Random DTensor programs are replayed as eager runs them, bit for bit, through
every choice of passes.

    ROTE_TEST_PROGRAMS=20000 ROTE_TEST_SEED=5000 pytest tests/torch/test_random_programs.py

checks others than the usual ones. A program that differs is printed as Python,
cut down, with the command that runs it again.
"""

import collections
import concurrent.futures
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from extent import EVERYTHING, SEED
from generated import ROOT, command
from ranks import Pools

PROGRAMS = int(os.environ.get("ROTE_TEST_PROGRAMS", "20000" if EVERYTHING else "250"))
#: Of these, so many run on two gloo ranks as well.
ON_RANKS = min(100, PROGRAMS // 20)
PROCESSES = 2
#: There more are refused: tensors of collectives under way outlive the call.
LEAST_ON_RANKS = 0.5
#: More than these refused, and the programs are no test of replay.
MOST_REFUSED = 0.25


def report(found: list[dict[str, Any]]) -> tuple[collections.Counter[str], list[str]]:
    counts: collections.Counter[str] = collections.Counter()
    for part in found:
        counts.update(part["counts"])
    return counts, [failure for part in found for failure in part["failures"]]


@pytest.mark.skipif(os.environ.get("ROTE_TEST_ORACLE_ONLY") == "1", reason="compares two ways of running")
def test_programs_are_replayed_as_eager_runs_them() -> None:
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        parts = [
            pool.submit(command, "programs", "--seed", SEED + part, "--programs", PROGRAMS - part, "--every", PROCESSES)
            for part in range(PROCESSES)
        ]
        counts, failures = report([part.result() for part in parts])
    print(f"seed {SEED}: {dict(sorted(counts.items()))}")
    assert not failures, "\n\n".join(failures[:5])
    assert counts["programs"] == PROGRAMS
    assert counts["invalid"] <= 0.01 * PROGRAMS, "eager refuses in a later call what it took in the first"
    assert counts["refused"] + counts["never replayed"] <= MOST_REFUSED * PROGRAMS, counts
    assert counts["replays"] >= 3 * (1 - MOST_REFUSED) * PROGRAMS, counts


@pytest.mark.skipif(os.environ.get("ROTE_TEST_ORACLE_ONLY") == "1", reason="compares two ways of running")
def test_programs_on_two_ranks(pools: Pools) -> None:
    line = [sys.executable, "-m", "tests.torch.programs", "--source", "--json", "--world", "2"]
    line += ["--seed", str(SEED), "--programs", str(ON_RANKS)]
    made = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True)
    sources = [text for text in made.stdout.splitlines() if text.startswith("{")]
    assert len(sources) == ON_RANKS
    ranks = pools.run(2, on_ranks, {"sources": sources}, timeout=900)
    for counts, failures in ranks:
        print(f"seed {SEED}: {counts}")
        assert not failures, "\n\n".join(failures[:5])
        assert counts["replayed"] >= LEAST_ON_RANKS * ON_RANKS, counts


def on_ranks(sources: list[str]) -> tuple[dict[str, int], list[str]]:
    from models import mesh
    from programs.generate import Program
    from programs.twins import check, passes

    counts: collections.Counter[str] = collections.Counter()
    failures = []
    for i, text in enumerate(sources):
        program = Program(**json.loads(text))
        outcome = check(program, mesh(2), passes()[i % len(passes())])
        counts["invalid"] += bool(outcome.invalid)
        counts["replayed"] += outcome.replays > 0
        if outcome.wrong:
            failures.append(f"seed {program.seed}, passes {outcome.passes}, {outcome.wrong}\n{program.source()}")
    return dict(counts), failures


@pytest.mark.skipif(os.environ.get("ROTE_TEST_ORACLE_ONLY") == "1", reason="compares two ways of running")
def test_planted_bugs_are_seen() -> None:
    """Captures that are wrong in one way each: the comparison sees all of them."""
    found = command("programs", "--seed", SEED, "--programs", 40, "--planted")
    assert not found["failures"], "\n\n".join(found["failures"])
    print(f"seed {SEED}: {found['counts']}")
