"""`rote propagate` against PyTorch itself, on the calls that the samples of PyTorch's own op tests make: shapes
and dtypes of the outputs are PyTorch's, and the strategies chosen give the right numbers. A call that PyTorch runs is
answered, unless `REFUSED` says why not.

    ROTE_TEST_EVERYTHING=1 pytest tests/torch/test_propagation_calls.py

takes every sample of every op test in eight dtypes.
"""

import random

import pytest
from extent import EVERYTHING, SEED

from propagation import calls, engine, torch_calls

# Op tests, samples of each, and placements for each call; in all of 703 op tests.
TESTS, SAMPLES, PLACEMENTS = (None, 10_000, 20) if EVERYTHING else (30, 3, 4)
# Parts of the messages of refusals, with the reason.
REFUSED = {
    "as the shape would depend on the values of a mask": "a result has a shape before it has values",
    "no label smoothing of classes by index": "the mean of a smoothed loss has weights of its own",
}


@pytest.fixture(scope="module")
def found() -> torch_calls.Findings:
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    tests = list(range(len(calls.ops())))
    if TESTS is not None:
        tests = random.Random(SEED).sample(tests, TESTS)
    result = torch_calls.of_all(tests, SAMPLES, PLACEMENTS, None if EVERYTHING else SEED)
    print(f"\nseed {SEED}: {result.summary()}")
    return result


def test_answers_are_what_pytorch_makes(found: torch_calls.Findings) -> None:
    assert found.judged > 1_000
    assert not found.wrong, "\n".join([f"{len(found.wrong)} wrong", *found.wrong[:5]])


def test_calls_that_pytorch_runs_are_answered(found: torch_calls.Findings) -> None:
    lines = [line for lines in found.refused.values() for line in lines]
    left = [line for line in lines if not any(part in line for part in REFUSED)]
    assert not left, "\n".join([f"{len(left)} refused", *left[:5]])
