"""Whether an op run on pieces gives the whole: arithmetic, not rules."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from .dtensor import Placements
from .pieces import Held, Unmade, joined, pieces, same
from .samples import Sample, Tensor

UPSAMPLING = [
    *(f"upsample_nearest{n}d" for n in (1, 2, 3)),
    *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3)),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_bicubic2d", "upsample_trilinear3d"),
    *(f"_upsample_{way}2d_aa" for way in ("bilinear", "bicubic", "lanczos")),
]
# Ops with the shape of the output among the arguments, which a rank calls with
# the shape of its piece; and where it stands.
SHAPED = {
    **dict.fromkeys(["view", "_unsafe_view", "reshape", "expand", "expand_copy", "view_copy", "broadcast_to"], 1),
    **dict.fromkeys(["new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided"], 1),
    **dict.fromkeys(["select_backward", "slice_backward", "diagonal_backward", "unfold_backward"], 1),
    **dict.fromkeys([f"{way}_backward" for way in UPSAMPLING], 2),
}
# Of these, batch, channels and places of the first output.
SIZED = {"native_group_norm": 3}
# Of these, the batch of the first input.
BATCHED = {"native_group_norm_backward": 5}
# Ops whose output has no defined values.
UNDEFINED = {"empty_like", "new_empty", "new_empty_strided", "empty"}


def is_right(
    sample: Sample, to: Sequence[Placements], outputs: Sequence[Placements], sizes: tuple[int, ...]
) -> str | None:
    """None if the pieces give the whole, else what is wrong.

    Raises `Unmade` where that cannot be told: masked partials, and values that
    are random or undefined.
    """
    if any("P(mask)" in p for p in (*to, *outputs)):
        raise Unmade("masked partial")
    wholes, expected = whole(sample)
    torch.manual_seed(0)
    held = [pieces(w, p, sizes) for w, p in zip(wholes, to, strict=True)]
    if name(sample) == "_scaled_mm" and any(0 in piece.shape for piece in held[0].values()):
        raise Unmade("the CPU kernel leaves the result of an empty product unwritten")
    places = [*outputs, *(to[i] for i in written(sample))]
    if len(places) != len(expected):
        return f"{len(outputs)} outputs, expected {len(expected)}"
    shapes = pieces(expected[0].new_empty(expected[0].shape), shards(places[0]), sizes) if expected else {}
    found: list[Held] = [{} for _ in expected]
    for at in pieces(torch.empty(0), ["R"] * len(sizes), sizes):
        local = [h[at].clone() for h in held]
        try:
            ran = results(sample, run(sample, sample.op, local, shapes.get(at)))
        except (RuntimeError, IndexError) as error:
            if "INTERNAL ASSERT FAILED" in str(error):  # index_reduce of one row in half precision, in PyTorch 2.15
                raise Unmade("a kernel of PyTorch's fails by a fault of its own") from error
            return f"rank {at}: {error}"
        for parts, piece in zip(found, ran, strict=True):
            parts[at] = piece
    for i, (want, parts) in enumerate(zip(expected, found, strict=True)):
        try:
            got = joined(parts, places[i], sizes)
        except (ValueError, RuntimeError) as error:
            return f"output {i}: {error}"
        if not same(got, want):
            return f"output {i} differs from the whole op's"
    return None


KNOWN: dict[tuple[str, int], tuple[list[torch.Tensor], list[torch.Tensor]] | None] = {}


def whole(sample: Sample) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Tensors for a sample, and what the op makes of them."""
    key = (sample.family, sample.line)
    if key not in KNOWN:
        generator = torch.Generator().manual_seed(0)
        wholes = [t.make(generator) for t in sample.tensors]
        try:
            twice = [results(sample, run(sample, sample.op, [w.clone() for w in wholes])) for _ in range(2)]
        except NotImplementedError as error:
            raise Unmade("no kernel on this device") from error
        defined = name(sample) not in UNDEFINED and all(same(a, b) for a, b in zip(*twice, strict=True))
        KNOWN[key] = (wholes, twice[0]) if defined else None
    found = KNOWN[key]
    if found is None:
        raise Unmade("values are random or undefined")
    return found


def name(sample: Sample) -> str:
    return sample.op.overloadpacket.__name__


def shards(placements: Placements) -> list[str]:
    """Placements that give pieces of the same shapes."""
    return [p if "S(" in p else "R" for p in placements]


def run(sample: Sample, op: Any, tensors: list[torch.Tensor], piece: torch.Tensor | None = None) -> Any:
    """What the op returns, and its arguments; with local shapes where a piece
    of the output is given."""
    args, kwargs = sample.filled(tensors)
    if piece is not None:
        if name(sample) in SHAPED and sample.op._overloadname != "dtype":
            args[SHAPED[name(sample)]] = list(piece.shape)
        if at := SIZED.get(name(sample)):
            batch, channels, *places = piece.shape
            args[at : at + 3] = [batch, channels, math.prod(places)]
        if at := BATCHED.get(name(sample)):
            args[at] = tensors[0].shape[0]
        if name(sample) in ("squeeze", "squeeze_"):
            op, args = getattr(torch.ops.aten, name(sample)).dims, [args[0], squeezed(sample)]
    return op(*args, **kwargs), args, kwargs


def squeezed(sample: Sample) -> list[int]:
    """The dims that go: those of size 1 in the whole, not in a shard."""
    shape = sample.tensors[0].shape
    dims = sample.args[1] if len(sample.args) > 1 else list(range(len(shape)))
    dims = dims if isinstance(dims, list) else [dims]
    return [d for d in dims if shape and shape[d] == 1]


def results(sample: Sample, ran: Any) -> list[torch.Tensor]:
    """The tensors that an op returned, then those that it wrote."""
    returned, args, kwargs = ran
    # What is no tensor counts as one without dims.
    found = [torch.tensor(returned)] if isinstance(returned, (bool, int, float, complex)) else tensors_in([returned])
    if not sample.op._schema.returns:
        for i, formal in enumerate(sample.op._schema.arguments):
            if formal.alias_info is not None and formal.alias_info.is_write:
                given = kwargs.get(formal.name) if formal.kwarg_only else args[i] if i < len(args) else None
                found += tensors_in([given])
    return found


def written(sample: Sample) -> list[int]:
    """The tensors that an op writes and does not return."""
    found: list[int] = []
    position = 0
    for i, formal in enumerate(sample.op._schema.arguments):
        given = sample.kwargs.get(formal.name) if formal.kwarg_only else [*sample.args, *[None] * (i + 1)][i]
        count = sum(isinstance(g, Tensor) for g in (given if isinstance(given, list) else [given]))
        if formal.alias_info is not None and formal.alias_info.is_write and not sample.op._schema.returns:
            found += range(position, position + count)
        position += count
    return found


def tensors_in(found: Any) -> list[torch.Tensor]:
    flat: list[torch.Tensor] = []
    for item in found:
        if isinstance(item, torch.Tensor):
            flat.append(item)
        elif isinstance(item, (tuple, list)):
            flat += tensors_in(item)
    return flat
