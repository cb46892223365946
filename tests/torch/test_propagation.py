"""`rote propagate` against DTensor's own sharding propagation, and against
arithmetic: every op of `validation/src/samples/*.txt` with its tensors replicated,
sharded and partial on meshes of 2 and of 4 ranks, and at random on meshes of
two and three dims.

Where the two choose differently, Rote's choice must cost no more under DTensor's
cost model, or fall into a class that docs/propagation.md explains. Whatever Rote
chooses must give the right numbers: the op runs on pieces of random tensors and
the pieces of its outputs are put together.

    ROTE_TEST_EVERYTHING=1 pytest tests/torch/test_propagation.py

leaves no combination on meshes of one dim out, and asks more on the others.
"""

import pytest
from extent import EVERYTHING

from propagation import compare, engine, samples

# Questions per sample on a mesh of one dim; on larger meshes in all.
MOST, LARGER = (10_000, 50_000) if EVERYTHING else (3, 1_000)


@pytest.fixture(scope="module")
def tally() -> compare.Tally:
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    found = compare.compare_all(list(samples.read()), MOST, LARGER)
    print("\n" + found.table())
    return found


def test_what_rote_chooses_is_right(tally: compare.Tally) -> None:
    assert not tally.wrong, "\n".join([f"{len(tally.wrong)} wrong", *tally.wrong[:5]])


def test_every_difference_is_explained(tally: compare.Tally) -> None:
    left = [d for d in tally.differences if d.kind == compare.UNEXPLAINED]
    assert not left, "\n".join([f"{len(left)} unexplained", *map(str, left[:5])])


def test_most_answers_are_the_same(tally: compare.Tally) -> None:
    assert tally.identity(known=True) >= 0.97, "\n" + tally.table()
