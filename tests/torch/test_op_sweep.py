"""Every op that PyTorch has samples for is replayed as eager runs it, with other data than it was recorded with.

    pytest -s tests/torch/test_op_sweep.py                            some ops
    ROTE_TEST_EVERYTHING=1 pytest -v tests/torch/test_op_sweep.py     all samples of all ops, which takes hours

`ROTE_TEST_SEED` takes other ops for the part, and other data.

    python -m tests.torch.sweep --names '^linalg.svd$' --full

runs the samples of some ops in all layouts and prints what is no plain success.
"""

import collections
import json
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from extent import EVERYTHING, SEED
from oracle import ORACLE_ONLY

TESTS = Path(__file__).parent
SLICES = 40
#: Ops of the part, so that it takes less than a minute.
PART = 10
#: Ops for which recording once took another way than eager, and ones that once replayed with old values.
ONCE_WRONG = (
    "NumpyCatCustomOp",
    "addbmm",
    "clamp",
    "linalg.cond",
    "linalg.eig",
    "linalg.householder_product",
    "masked.prod",
    "max.binary",
    "nn.functional.instance_norm",
    "ormqr",
    "prod",
    "tensor_split",
)
#: Ops that once raised in a replay what the step would have handled.
ONCE_UNHANDLED = ("bernoulli", "floor_divide", "linspace.tensor_overload", "normal", "poisson", "searchsorted")
#: Ops of which two calls in eager differ, and why.
UNLIKE_ITSELF = {
    "empty": "its memory is whatever was there",
    "empty_like": "its memory is whatever was there",
    "empty_permuted": "its memory is whatever was there",
    "empty_strided": "its memory is whatever was there",
    "new_empty": "its memory is whatever was there",
    "new_empty_strided": "its memory is whatever was there",
    "linalg.ldl_solve": "it uses pivots unseen, and reads beyond its tensors by those of another matrix",
    "searchsorted": "it does not check that out= is none of its arguments, and reads what it has written",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu": "two calls differ on some bfloat16",
}

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="compares two ways of running")


Lines = list[dict[str, Any]]


def sweep(*arguments: object) -> tuple[Lines, collections.Counter[str]]:
    """Runs `python -m tests.torch.sweep`, fails at what differs or dies, and gives its lines and counts."""
    line = [sys.executable, "-m", "tests.torch.sweep", "--seed", str(SEED), *map(str, arguments)]
    done = subprocess.run(line, cwd=TESTS.parents[1], capture_output=True, text=True)
    found: Lines = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
    ended = bool(found) and "counts" in found[-1] and done.returncode == 0
    assert ended, f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr[-3000:]}"
    counts = collections.Counter[str](found[-1]["counts"])
    print(f"seed {SEED}: {dict(counts)}")
    died = [f"{each['died']} died of {-each['status']} at {each['case']}" for each in found if "died" in each]
    wrong = [
        f"{each['name']}: {each['wrong']}" for each in found if each.get("wrong") and not reads_its_own(each["name"])
    ]
    unlike = {each["name"].split(" ")[0] for each in found if "differs from eager" in each.get("invalid", "")}
    assert not died and not wrong, f"seed {SEED}: {len(wrong)} differ:\n" + "\n".join([*died, *wrong][:20])
    assert unlike <= UNLIKE_ITSELF.keys(), f"seed {SEED}: of {unlike}, two calls in eager differ"
    return found, counts


def are_replayed(found: Lines, counts: collections.Counter[str]) -> None:
    # Ops have from one to some thousands of samples, and a few are refused with all of them.
    ops = collections.Counter(each["case"].split(" ")[0] for each in found if "case" in each and "died" not in each)
    without = collections.Counter(each["name"].split(" ")[0] for each in found if "name" in each)
    hardly = [op for op, cases in ops.items() if without[op] > 0.5 * cases]
    assert len(hardly) <= 0.3 * len(ops), hardly
    assert counts["replays"] >= 3 * (counts["cases"] - without.total()), counts


def reads_its_own(case: str) -> bool:
    """Whether a case writes its result over what it still reads, so that results depend on the order."""
    return case.startswith("searchsorted ") and " out=, twice" in case


def named(names: list[str]) -> str:
    return f"^({'|'.join(map(re.escape, names))})$"


@pytest.mark.skipif(EVERYTHING, reason="all of them are")
def test_some_ops_are_replayed_with_other_data() -> None:
    from sweep import samples

    names = sorted({name for name, _ in samples.entries()})
    are_replayed(
        *sweep("--names", named([*ONCE_WRONG, *random.Random(SEED).sample(names, PART)]), "--most", 2, "--progress")
    )


@pytest.mark.skipif(EVERYTHING, reason="all of them are")
def test_some_ops_raise_where_a_step_handles_it() -> None:
    from sweep import samples

    names = sorted({name for name, _ in samples.entries()})
    chosen = [*ONCE_UNHANDLED, *random.Random(SEED).sample(names, PART)]
    _, counts = sweep("--handled", "--names", named(chosen), "--most", 2, "--progress")
    assert counts["replays"], counts


@pytest.mark.skipif(not EVERYTHING, reason="takes hours: make test-all")
@pytest.mark.parametrize("part", range(SLICES))
def test_all_ops_are_replayed_with_other_data(part: int) -> None:
    are_replayed(*sweep("--slice", f"{part}/{SLICES}", "--most", 10**6, "--progress"))


@pytest.mark.skipif(not EVERYTHING, reason="takes hours: make test-all")
@pytest.mark.parametrize("part", range(SLICES))
def test_all_ops_raise_where_a_step_handles_it(part: int) -> None:
    sweep("--handled", "--slice", f"{part}/{SLICES}", "--most", 40, "--progress")
