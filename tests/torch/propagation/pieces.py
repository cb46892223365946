"""What each rank of a mesh holds of a tensor, and the tensor back from that.

Placements apply from left to right, each to what the ones before it left.
"""

from collections.abc import Sequence
from itertools import product

import torch

Coordinate = tuple[int, ...]
Held = dict[Coordinate, torch.Tensor]


class Unmade(Exception):
    """Pieces that this module cannot make, or join."""


def shard(placement: str) -> tuple[int, int] | None:
    """Tensor dim and number of blocks of a shard."""
    if placement.startswith("S("):
        return int(placement[2:-1]), 1
    if placement.startswith("_S("):
        dim, blocks = placement[3:-1].split(",")
        return int(dim), int(blocks)
    return None


def chunks(size: int, count: int) -> list[int]:
    """Sizes of the chunks of a dim: rounded up, then what is left."""
    most = -(-size // count) if size else 0
    return [max(0, min(most, size - most * i)) for i in range(count)]


def order(placement: str) -> float | None:
    """The order of a partial of norms."""
    return float(placement[len("P(norm") : -1]) if placement.startswith("P(norm") else None


def split(whole: torch.Tensor, placement: str, ranks: int) -> list[torch.Tensor]:
    """What the ranks of one mesh dim hold."""
    if placement == "R":
        return [whole] * ranks
    if found := shard(placement):
        dim, blocks = found
        held: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for block in whole.split(chunks(whole.shape[dim], blocks), dim):
            for rank, piece in enumerate(block.split(chunks(block.shape[dim], ranks), dim)):
                held[rank].append(piece)
        return [torch.cat(parts, dim) for parts in held]
    return summands(whole, placement, ranks)


def summands(whole: torch.Tensor, placement: str, ranks: int) -> list[torch.Tensor]:
    """Unequal parts of mixed sign that reduce to the whole."""
    if whole.dtype == torch.bool:
        raise Unmade(f"{placement} of truth values")
    if whole.is_floating_point() and whole.itemsize == 1:
        raise Unmade(f"{placement} of {whole.dtype}, which cannot be added")
    if p := order(placement):
        if not whole.is_floating_point() or not (whole >= 0).all():
            raise Unmade(f"{placement} of what is no norm")
        shares = torch.rand(ranks, *whole.shape, dtype=whole.dtype) + 0.05
        return list(whole * (shares / shares.sum(0)) ** (1 / p))
    if not (whole.is_floating_point() or whole.is_complex()):
        noise = [torch.randint_like(whole, 1, 5) for _ in range(ranks)]
    else:
        noise = [torch.randn_like(whole) + 0.1 for _ in range(ranks)]
    if not (whole.dtype.is_signed or whole.dtype == torch.bool):
        return unsigned(whole, placement, ranks)
    if placement == "P(sum)":
        return [*noise[1:], whole - sum(noise[1:])]
    if placement == "P(avg)":
        return [*noise[1:], whole * ranks - sum(noise[1:])]
    if placement in ("P(max)", "P(min)"):
        sign = -1 if placement == "P(max)" else 1
        owner = torch.randint(0, ranks, whole.shape)
        moved = [whole + sign * n.abs() for n in noise]
        # What wraps around is no smaller, or no larger.
        moved = [torch.where((m > whole) == (sign > 0), m, whole) for m in moved]
        return [torch.where(owner == r, whole, m) for r, m in enumerate(moved)]
    if placement == "P(product)" and (whole.is_floating_point() or whole.is_complex()):
        factors = [torch.where(n.abs() < 0.3, torch.full_like(n, -0.5), n) for n in noise[1:]]
        last = whole
        for factor in factors:
            last = last / factor
        return [*factors, last]
    raise Unmade(f"{placement} of {whole.dtype}")


def unsigned(whole: torch.Tensor, placement: str, ranks: int) -> list[torch.Tensor]:
    """Parts none of which wraps around."""
    shares = [(whole * torch.rand(whole.shape) / ranks).to(whole.dtype) for _ in range(ranks)]
    if placement == "P(sum)":
        return [*shares[1:], whole - sum(shares[1:])]
    if placement == "P(max)":
        owner = torch.randint(0, ranks, whole.shape)
        return [torch.where(owner == r, whole, share) for r, share in enumerate(shares)]
    raise Unmade(f"{placement} of {whole.dtype}")


def pieces(whole: torch.Tensor, placements: Sequence[str], mesh: Sequence[int]) -> Held:
    """What every rank holds."""
    held: Held = {(): whole}
    for placement, ranks in zip(placements, mesh, strict=True):
        held = {(*at, r): p for at, t in held.items() for r, p in enumerate(split(t, placement, ranks))}
    return held


def reduce(parts: list[torch.Tensor], placement: str) -> torch.Tensor:
    """The tensor of one mesh dim whose ranks hold these parts."""
    if placement == "R":
        first = parts[0]
        if any(not same(first, p) for p in parts):
            raise ValueError("ranks differ where the placement says that they do not")
        return first
    if found := shard(placement):
        dim, blocks = found
        total = sum(p.shape[dim] for p in parts)
        rows = [chunks(n, len(parts)) for n in chunks(total, blocks)]
        if any(p.shape[dim] != sum(row[r] for row in rows) for r, p in enumerate(parts)):
            raise ValueError(f"pieces of sizes {[p.shape[dim] for p in parts]} on dim {dim} are no {placement}")
        cut = [p.split([row[r] for row in rows], dim) for r, p in enumerate(parts)]
        return torch.cat([cut[r][b] for b in range(blocks) for r in range(len(parts))], dim)
    if parts[0].dtype == torch.complex32:
        raise Unmade(f"{placement} of {parts[0].dtype}, which cannot be added")
    stacked = torch.stack(parts)
    if p := order(placement):
        if (stacked < 0).any():
            raise ValueError("a part of a norm is negative")
        return (stacked**p).sum(0) ** (1 / p)
    match placement:
        case "P(sum)":
            return stacked.sum(0, dtype=stacked.dtype)
        case "P(avg)":
            return (
                stacked.mean(0) if stacked.is_floating_point() or stacked.is_complex() else stacked.sum(0) // len(parts)
            )
        case "P(max)":
            return stacked.amax(0)
        case "P(min)":
            return stacked.amin(0)
        case "P(product)":
            return stacked.prod(0)
    raise Unmade(placement)


def joined(held: Held, placements: Sequence[str], mesh: Sequence[int]) -> torch.Tensor:
    """The whole tensor.

    Raises ValueError when the pieces are not what the placements say.
    """
    for m in reversed(range(len(mesh))):
        left = product(*(range(n) for n in mesh[:m]))
        held = {at: reduce([held[(*at, r)] for r in range(mesh[m])], placements[m]) for at in left}
    return held[()]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same values, up to rounding."""
    if one.shape != other.shape:
        return False
    coarse = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
    tolerance = max(coarse.get(t.dtype, 1e-3) for t in (one, other))
    if not one.is_complex() and not other.is_complex():
        one, other = one.double(), other.double()
    return torch.allclose(one, other.to(one.dtype), tolerance, tolerance / 10, equal_nan=True)
