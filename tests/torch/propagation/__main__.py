"""Compares the two engines on the samples of an op, and prints the differences."""

import argparse
from collections import Counter

from . import compare, samples


def mesh(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.replace("x", ",").split(","))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.torch.propagation", description=__doc__)
    parser.add_argument("--op", help="an op, or one overload, as aten::gather or aten::sum.dim_IntList")
    parser.add_argument("--family", help="one file of validation/src/samples, as einsum")
    parser.add_argument("--mesh", type=mesh, action="append", default=[], help="as 2, or 2,4; several times")
    parser.add_argument("--most", type=int, default=10_000, help="questions per sample on a mesh of one dim")
    parser.add_argument("--larger", type=int, default=None, help="questions on meshes of several dims in all")
    parser.add_argument("--show", type=int, default=20, help="differences to print per class")
    parser.add_argument("--by-op", action="store_true", help="count the differences of each op")
    given = parser.parse_args()
    chosen = [s for s in samples.read(given.op) if given.family in (None, s.family)]
    if not chosen:
        parser.error("no samples of that name")
    larger = 20 * len(chosen) if given.larger is None else given.larger
    tally = compare.compare_all(chosen, given.most, larger, given.mesh)
    shown: Counter[str] = Counter()
    for difference in tally.differences:
        shown[difference.kind] += 1
        if shown[difference.kind] <= given.show:
            print(difference)
    if given.by_op:
        for (kind, op), count in Counter((d.kind, d.op) for d in tally.differences).most_common():
            print(f"{count:6} {kind:30} {op}")
    for wrong in tally.wrong:
        print(f"WRONG: {wrong}")
    print(tally.table())


if __name__ == "__main__":
    main()
