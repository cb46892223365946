"""Examples of ways to distribute training (`examples/zoo/`): Rote replays, and leaves the same bits as eager."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from extent import EVERYTHING

EXAMPLES = Path(__file__).parents[2] / "examples"


def table_of(script: str, ranks: int, plans: Path, *options: str) -> str:
    """What a script prints; it fails where losses or parameters differ, and where Rote refuses something."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(EXAMPLES / script)]
    launch += ["--plans", str(plans), *options]
    done = subprocess.run([sys.executable, *launch], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("bit for bit") == 2 and "rote: " not in done.stderr, done.stdout + done.stderr
    return done.stdout


def check_whole(table: str, replays: int) -> None:
    found = re.search(r"replays +(\d+)", table)
    assert found and int(found[1]) >= replays, table


def check_regions(table: str, share: float) -> None:
    """At least this share of the forwards, and as many backwards, are replayed."""
    found = re.search(r"forwards replayed +(\d+) of (\d+)\nbackwards replayed +(\d+)", table)
    assert found, table
    forwards, calls, backwards = map(int, found.groups())
    assert min(forwards, backwards) >= share * calls, table


PIPELINES = [
    (2, ["--schedule", "1f1b"]),
    (2, ["--schedule", "gpipe"]),
    (2, ["--schedule", "interleaved"]),
    (2, ["--schedule", "zero-bubble"]),
    (4, ["--tp", "2"]),
]


@pytest.mark.parametrize(
    "ranks, options",
    PIPELINES if EVERYTHING else PIPELINES[:1],
    ids=lambda value: " ".join(value)[2:] if isinstance(value, list) else None,
)
def test_pipeline(ranks: int, options: list[str], tmp_path: Path) -> None:
    options = [*options, "--steps", "16"]
    check_regions(table_of("zoo/pipeline.py", ranks, tmp_path / "blocks", *options), share=0.9)
    check_whole(table_of("zoo/pipeline.py", ranks, tmp_path / "whole", *options, "--whole"), replays=12)


@pytest.mark.parametrize("ranks", [2, 4] if EVERYTHING else [2])
def test_mixture_of_experts(ranks: int, tmp_path: Path) -> None:
    table = table_of("zoo/mixture_of_experts.py", ranks, tmp_path, "--steps", "24")
    check_regions(table, share=0.6)  # each padded shape is a variant


@pytest.mark.sampled(2)
@pytest.mark.parametrize("attention", ["ring", "ulysses"])
def test_context_parallel(attention: str, tmp_path: Path) -> None:
    first = []
    for ranks in (1, 4 if EVERYTHING else 2):
        options = ["--attention", attention, "--steps", "16"]
        table = table_of("zoo/context_parallel.py", ranks, tmp_path / str(ranks), *options)
        check_whole(table, replays=10)
        first.append(float(re.findall(r"loss, first step +(\S+)", table)[0]))
    assert first[0] == pytest.approx(first[1], abs=1e-3)  # each rank attends to all tokens before its own
