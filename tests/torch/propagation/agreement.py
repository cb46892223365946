"""Which answers of `rote.propagation` are DTensor's own, op by op.

    python -m propagation.agreement                    # from tests/torch; writes ffi/python/rote/_agreement.py
    python -m propagation.agreement --refine --seed 1  # leaves out of it what differs for other questions
    python -m propagation.agreement --several          # asks on meshes of several dims alone, and keeps the rest
    python -m propagation.agreement --op aten::mm --show 5          # asks about one op; --put writes what was found

Both are asked about the samples of `validation/src/samples`, with tensors replicated, sharded, strided and partial, on
meshes of one, two and three dims. An answer is DTensor's own if all of it is the same: placements of inputs and
outputs, shapes, strides and dtypes, and the arguments of the local op.
"""

import argparse
import functools
import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rote._agreement import AGREED
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor._op_schema import OpSchema, OutputSharding
from torch.utils._pytree import tree_leaves

from . import dtensor, questions, samples, workers
from .dtensor import Placements
from .samples import ROOT, Sample, Tensor

TABLE = ROOT / "ffi" / "python" / "rote" / "_agreement.py"
# How many questions of a kind must agree before the table says that the kind does.
LEAST = 2
# Kinds that are taken at all (`kind_of_answer`). Others hold too often for some questions and not for the next ones:
# partials that are no sums, uneven shards of which something moves on several mesh dims, or which several mesh dims
# make of one dim, strided shards that move.
ON_ONE_DIM = (0b0000000, 0b0000001, 0b0001000, 0b0001001, 0b0100001)
ON_SEVERAL_DIMS = (0b0000100, 0b0000101, 0b0000110, 0b0001100, 0b0100101, 0b1000100, 0b1000110)
TAKEN = ON_ONE_DIM + ON_SEVERAL_DIMS
# A kind that is taken of products alone: something moves, and several mesh dims split one dim.
OF_PRODUCTS: dict[str, tuple[int, ...]] = dict.fromkeys(
    ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"), (0b1000101,)
)
# DTensor's rule is wrong for some arguments, which the samples do not have.
NEVER_TAKEN = {"aten::logsumexp", "aten::linalg_cross"}
# The kind of answers that are never taken (`kNeverAgreed`).
NEVER = 128
MESHES = ((2,), (4,), (2, 2), (2, 4), (2, 2, 2))
# Questions per sample on a mesh of as many dims.
MOST = {1: 16, 2: 30, 3: 3}
# How all tensors lie alike on two mesh dims, where they have these dims.
ALIKE = (
    ("R", "R"), ("R", "S(0)"), ("S(0)", "R"), ("R", "S(1)"), ("S(0)", "S(1)"), ("S(0)", "S(0)"), ("S(1)", "S(1)"),
    ("_S(0,4)", "S(0)"),
    ("R", "P(sum)"), ("P(sum)", "P(sum)"), ("S(0)", "P(sum)"), ("_S(1,4)", "S(1)"),
)  # fmt: skip

# How the first tensor and the others lie on two mesh dims, where they have these dims.
APART = (
    (("S(0)", "S(0)"), ("R", "R")), (("S(0)", "S(0)"), ("R", "S(0)")), (("S(0)", "S(0)"), ("R", "S(1)")),
    (("S(1)", "S(1)"), ("S(0)", "S(0)")), (("S(0)", "R"), ("R", "S(1)")), (("S(0)", "S(1)"), ("R", "S(0)")),
    (("R", "S(1)"), ("S(0)", "R")), (("R", "R"), ("S(0)", "S(0)")),
)  # fmt: skip

# Products as large as in training, where moving one tensor costs clearly less than moving another.
LARGE = """
aten::mm      f32[512,64] f32[64,128]
aten::mm      f32[256,1024] f32[1024,512]
aten::mm      f32[64,512] f32[512,256]
aten::bmm     f32[128,32,8] f32[128,8,32]
aten::bmm     f32[64,128,16] f32[64,16,128]
aten::addmm   f32[128] f32[512,64] f32[64,128]
aten::addmm   f32[1024] f32[256,512] f32[512,1024]
""".strip().splitlines()


def all_samples(name: str | None) -> list[Sample]:
    """The samples, of one op or of all."""
    large = (samples.parse("large", at, text) for at, text in enumerate(LARGE))
    return [*samples.read(name), *(one for one in large if one is not None and name in (None, one.name))]


def options(tensor: Tensor) -> list[str]:
    """What one mesh dim may hold of a tensor."""
    kinds = questions.options(tensor)
    return [*kinds, "P(avg)", "P(max)"] if "P(sum)" in kinds else kinds


def alike(each: Sequence[list[str]], dims: int) -> Iterator[list[Placements]]:
    """All tensors in the same placements, and the first in others than the rest, as far as each has them."""
    ways = [(kind,) * dims for kind in max(each, key=len)] if dims != 2 else ALIKE
    pairs = [(way, way) for way in ways] + list(APART if dims == 2 and len(each) > 1 else ())
    for first, rest in pairs:
        yield [so_far_as_there(way, kinds) for way, kinds in zip([first, *[rest] * (len(each) - 1)], each, strict=True)]


def so_far_as_there(way: Placements, kinds: list[str]) -> Placements:
    """Placements of a tensor that has these kinds; replicated if it does not have all."""
    wanted = [kind.replace("_S(", "S(").split(",")[0].rstrip(")") + ")" if "S(" in kind else kind for kind in way]
    return way if all(kind == "R" or kind in kinds for kind in wanted) else ("R",) * len(way)


def asked(sample: Sample, sizes: tuple[int, ...], most: int, seed: int) -> Iterator[list[Placements]]:
    """Placements of a sample's tensors: all alike first, then by chance; the same in every run with a seed. With
    another seed than 0, by chance alone."""
    draw = random.Random(f"agreement {sample.name} {' '.join(sample.words)} {sizes} {seed or ''}".rstrip())
    each = [options(t) for t in sample.tensors]
    if not each:
        return
    seen = set()
    chance = ([placed(t, sizes, draw) for t in sample.tensors] for _ in range(4 * most))
    first = itertools.islice(alike(each, len(sizes)), 0 if seed else 2 * most // 3)
    for placements in itertools.chain(first, chance):
        if len(seen) == most:
            return
        if tuple(placements) not in seen:
            seen.add(tuple(placements))
            yield placements


def placed(tensor: Tensor, sizes: tuple[int, ...], draw: random.Random) -> Placements:
    kinds = options(tensor)
    placements = [draw.choice(kinds) if draw.random() < 0.6 else "R" for _ in sizes]
    if len(sizes) > 1 and draw.random() < 0.3:
        return questions.strided(placements, sizes, draw)
    return tuple(placements)


def schema(sample: Sample, placements: Sequence[Placements], sizes: tuple[int, ...]) -> OpSchema:
    """The question as DTensor's dispatcher puts it."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    info = propagator.op_to_schema_info.get(sample.op)
    info = info or propagator.op_to_schema_info_for_single_dim_strategy.get(sample.op)
    specs = [dtensor.spec(t, p, sizes) for t, p in zip(sample.tensors, placements, strict=True)]
    args, kwargs = sample.filled(specs)
    return OpSchema(sample.op, tuple(args), kwargs, schema_info=info)


def everything(answer: OutputSharding, asked_schema: OpSchema) -> list[Any]:
    """All that an answer says, in a form that can be compared."""
    local = answer.redistribute_schema or asked_schema
    specs_in = [leaf for leaf in tree_leaves(local.args_schema) if isinstance(leaf, DTensorSpec)]
    arguments: list[Any] = []
    if answer.use_val_from_redistribute_schema:
        arguments = [leaf for leaf in tree_leaves(local.args_schema) if not isinstance(leaf, DTensorSpec)]
    output = answer.output_spec
    outputs = list(output) if isinstance(output, (list, tuple)) else [output]
    return [
        str(local.op),
        [described(spec) for spec in specs_in],
        [described(spec) for spec in outputs],
        isinstance(output, (list, tuple)),
        answer.needs_redistribute,
        arguments,
    ]


def described(spec: DTensorSpec | None) -> Any:
    if spec is None:
        return None
    order = None if spec.use_strided_shard_as_shard_order else spec.shard_order
    meta = spec.tensor_meta
    return (
        spec.placements,
        tuple(meta.shape),
        tuple(meta.stride),
        meta.dtype,
        spec.use_strided_shard_as_shard_order,
        order,
    )


@dataclass
class Tally:
    """What came of the questions: by op and kind of answer (`kind_of_answer` of `propagate.h`), how many agree and how
    many do not."""

    same: Counter[tuple[str, int]] = field(default_factory=Counter)
    other: Counter[tuple[str, int]] = field(default_factory=Counter)
    handed_on: Counter[tuple[str, str]] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        for mine, theirs in ((self.same, other.same), (self.other, other.other), (self.handed_on, other.handed_on)):
            mine.update(theirs)
        self.shown += other.shown

    def table(self) -> dict[str, int]:
        """The kinds of answers that agree, by op."""
        bits: defaultdict[str, int] = defaultdict(int)
        for (op, kind), count in self.same.items():
            if (
                kind in TAKEN + OF_PRODUCTS.get(op, ())
                and count >= LEAST
                and not self.other[op, kind]
                and op not in NEVER_TAKEN
            ):
                bits[op] |= 1 << kind
        return dict(sorted(bits.items()))


def compare(part: list[tuple[Sample, tuple[int, ...], int]], seed: int = 0) -> Tally:
    """Asks both about samples, each on one mesh with so many placements."""
    import rote.propagation

    dtensor.start()
    propagator = DTensor._op_dispatcher.sharding_propagator
    tally = Tally()
    rote.propagation.install("same")
    try:
        installed = rote.propagation._installed
        assert installed is not None
        # What "same" would answer if it took every kind.
        answers = installed.judge
        ask, otherwise = answers.answer, type(propagator).propagate_op_sharding_non_cached
        for sample, sizes, most in part:
            for placements in asked(sample, sizes, most, seed):
                question = schema(sample, placements, sizes)
                ours = ask(question)
                kind = answers.kind()
                if ours is None or kind == NEVER:
                    continue
                try:
                    theirs: Any = otherwise(propagator, question)
                except Exception as error:
                    theirs = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                mine = everything(ours, question)
                their = theirs if isinstance(theirs, str) else everything(theirs, question)
                if mine == their:
                    tally.same[sample.name, kind] += 1
                    continue
                tally.other[sample.name, kind] += 1
                if tally.other[sample.name, kind] <= 3:
                    given = " ".join(sample.written([",".join(p) for p in placements]))
                    tally.shown.append(
                        f"{sample.name} {given} on {sizes}, kind {kind:07b}\n    ours   {mine}\n    theirs {their}"
                    )
        *_, handed_on = answers.stats()
        tally.handed_on.update(handed_on)
    finally:
        rote.propagation.uninstall()
    return tally


def compare_all(
    chosen: Sequence[Sample],
    share: float = 1.0,
    progress: bool = False,
    seed: int = 0,
    meshes: Sequence[tuple[int, ...]] = MESHES,
) -> Tally:
    """Compares on several processes; with a `share` of the questions."""
    work = [(s, sizes, max(1, math.ceil(share * MOST[len(sizes)]))) for sizes in meshes for s in chosen]
    random.Random("agreement").shuffle(work)
    parts = [work[at : at + 60] for at in range(0, len(work), 60)]
    tally = Tally()
    for done, result in enumerate(workers.each(functools.partial(compare, seed=seed), parts), 1):
        tally.add(result)
        if progress:
            print(f"\r{done} of {len(parts)} parts", end="", file=sys.stderr, flush=True)
    return tally


HEAD = '''"""Which answers of `rote.propagation` are DTensor's own, by version of PyTorch and op.

Generated by `python -m propagation.agreement` (from tests/torch). A bit for each kind of answer (`kind_of_answer` in
`propagate.h`). An op or a kind of answer that is not here is handed on to DTensor.
"""
'''


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m propagation.agreement", description=__doc__)
    parser.add_argument("--op", help="only this op or overload; the table is not written then")
    parser.add_argument("--put", action="store_true", help="with --op: put what was found of it into the table")
    parser.add_argument("--show", type=int, default=0, help="how many differences to print")
    parser.add_argument("--share", type=float, default=1.0, help="the share of the questions to ask")
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed asks other questions; nothing is written then"
    )
    parser.add_argument("--refine", action="store_true", help="leave what differs out of the table that is there")
    parser.add_argument("--several", action="store_true", help="ask on meshes of several dims alone")
    given = parser.parse_args()
    meshes = [sizes for sizes in MESHES if len(sizes) > 1 or not given.several]
    tally = compare_all(all_samples(given.op), given.share, progress=True, seed=given.seed, meshes=meshes)
    for line in tally.shown[: given.show]:
        print(line)
    same, other = tally.same.total(), tally.other.total()
    print(f"{same + other:,} answers, {same:,} of them DTensor's own; {tally.handed_on.total():,} questions handed on")
    for (op, reason), count in tally.handed_on.most_common(given.show):
        print(f"  handed on {count:>5}  {op}: {reason}")
    version = ".".join(torch.__version__.split(".")[:2])
    if given.refine:
        table = dict(AGREED.get(version, {}))
        before = sum(bits.bit_count() for bits in table.values())
        for op in table:
            taken = sum(1 << kind for kind in TAKEN + OF_PRODUCTS.get(op, ()))
            table[op] &= taken & ~sum(1 << kind for other_op, kind in tally.other if other_op == op)
        table = {op: bits for op, bits in table.items() if bits}
        left = sum(bits.bit_count() for bits in table.values())
        print(f"{before - left:,} kinds of answers left out; {left:,} kinds are left")
        write(version, table)
    elif given.put and given.op and given.share == 1.0 and given.seed == 0:
        before = AGREED.get(version, {})
        of_one_dim = sum(1 << kind for kind in ON_ONE_DIM) if given.several else 0
        found = {op: bits | before.get(op, 0) & of_one_dim for op, bits in tally.table().items()}
        write(version, {op: bits for op, bits in sorted({**before, **found}.items()) if bits})
    elif given.op is None and given.share == 1.0 and given.seed == 0:
        table = tally.table()
        of_one_dim = sum(1 << kind for kind in ON_ONE_DIM)
        for op, bits in AGREED.get(version, {}).items() if given.several else ():
            table[op] = table.get(op, 0) | bits & of_one_dim
        write(version, {op: bits for op, bits in sorted(table.items()) if bits})


def write(version: str, table: dict[str, int]) -> None:
    tables = {**AGREED, version: table}
    text = "".join(
        f'    "{name}": {{\n' + "".join(f'        "{op}": {bits:#x},\n' for op, bits in found.items()) + "    },\n"
        for name, found in sorted(tables.items())
    )
    TABLE.write_text(f"{HEAD}\nAGREED: dict[str, dict[str, int]] = {{\n{text}}}\n")
    print(f"{TABLE} written: {len(table):,} ops")


if __name__ == "__main__":
    main()
