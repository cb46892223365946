"""Which placements the tensors of a sample are asked with.

All combinations on meshes of one dim as far as they are few, random ones
otherwise; the same ones in every run.
"""

import math
import random
from collections.abc import Iterator
from itertools import product

from .engine import Question
from .samples import Sample, Tensor

MESHES = ((2,), (4,))
LARGER_MESHES = ((2, 2), (2, 4), (4, 2), (2, 2), (2, 4), (4, 2), (2, 2, 2))


def options(tensor: Tensor) -> list[str]:
    """What one mesh dim may hold of a tensor."""
    partial = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return ["R", *(f"S({d})" for d in range(len(tensor.shape))), *(["P(sum)"] if partial else [])]


def derived(sample: Sample) -> bool:
    """In-place and `out=` forms, whose rules are those of the functional op."""
    name = sample.op.overloadpacket.__name__
    return name.endswith("_") or sample.op._overloadname.endswith("out")


def chance(sample: Sample, sizes: tuple[int, ...]) -> random.Random:
    return random.Random(f"{sample.name} {' '.join(sample.words)} {sizes}")


def every(sample: Sample, sizes: tuple[int, ...], most: int) -> Iterator[Question]:
    """All placements on a mesh of one dim, or as many as allowed."""
    each = [options(t) for t in sample.tensors]
    if not each:
        return
    if derived(sample):
        most = max(1, most // 2)
    if math.prod(map(len, each)) <= most:
        chosen = [tuple((p,) for p in ps) for ps in product(*each)]
    else:
        draw = chance(sample, sizes)
        # The same on all, as far as each has it, then by chance.
        same = [tuple(((p if p in e else "R"),) for e in each) for p in max(each, key=len)]
        chance_made = [tuple((draw.choice(e),) for e in each) for _ in range(2 * most)]
        chosen = list(dict.fromkeys([*same, *chance_made]))[:most]
    for placements in chosen:
        yield sample, placements, sizes


def drawn(sample: Sample, sizes: tuple[int, ...], count: int) -> Iterator[Question]:
    """Random placements on a mesh of several dims, strided shards among them."""
    draw = chance(sample, sizes)
    tensors = sample.tensors
    for _ in range(count if tensors else 0):
        placements: list[tuple[str, ...]] = []
        for t in tensors:
            alike = [p for p, u in zip(placements, tensors, strict=False) if u.shape == t.shape]
            if alike and draw.random() < 0.5:
                placements.append(draw.choice(alike))
            else:
                placements.append(some(t, sizes, draw))
        yield sample, tuple(placements), sizes


def some(tensor: Tensor, sizes: tuple[int, ...], draw: random.Random) -> tuple[str, ...]:
    kinds = options(tensor)
    shards = [k for k in kinds if k.startswith("S(")]
    placed = [draw.choice(shards) if shards and draw.random() < 0.5 else draw.choice(kinds) for _ in sizes]
    style = draw.random()
    if style < 0.3:
        return strided(placed, sizes, draw)
    if style < 0.4 and shards and len(sizes) < 3:
        # As a view makes it: blocks that no mesh dim stands for. On three mesh
        # dims DTensor takes seconds to plan what follows from it.
        m = draw.randrange(len(sizes))
        dim = draw.randrange(len(shards))
        placed[m] = f"_S({dim},{draw.choice([2, 3, 4])})"
    return tuple(placed)


def strided(placed: list[str], sizes: tuple[int, ...], draw: random.Random) -> tuple[str, ...]:
    """The mesh dims that split one tensor dim in an order of their own: a mesh
    dim's blocks are those of the mesh dims to its right that go before it."""
    result = list(placed)
    for shard in {p for p in placed if p.startswith("S(")}:
        dims = [m for m, p in enumerate(placed) if p == shard]
        draw.shuffle(dims)
        for at, m in enumerate(dims):
            blocks = math.prod(sizes[i] for i in dims[:at] if i > m)
            if blocks > 1:
                result[m] = f"_S({shard[2:-1]},{blocks})"
    return tuple(result)
