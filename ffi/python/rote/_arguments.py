"""An op's arguments in the notation of ``rote propagate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor.placement_types import Placement

from . import _own_placements

# The names of rote_plans::DType.
DTYPES = {
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.complex32: "c32",
    torch.complex64: "c64",
    torch.complex128: "c128",
    torch.bool: "bool",
    torch.bfloat16: "bf16",
    torch.float8_e5m2: "f8e5m2",
    torch.float8_e4m3fn: "f8e4m3fn",
    torch.float8_e5m2fnuz: "f8e5m2fnuz",
    torch.float8_e4m3fnuz: "f8e4m3fnuz",
    torch.uint16: "u16",
    torch.uint32: "u32",
    torch.uint64: "u64",
}
#: Dtypes by these names.
DTYPES_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}
# No result depends on these, as propagation sees it.
_WHERE = (torch.device, torch.Generator)


def notation(args: Any) -> bytes:
    """Arguments, a line each."""
    return "\n".join(map(written, args)).encode()


class Written(str):
    """A tensor among the arguments that is written already."""


def written(value: Any) -> str:
    """An argument."""
    if isinstance(value, Written):
        return value
    if isinstance(value, torch.Tensor):
        return _tensor(value)
    if isinstance(value, list | tuple):
        if any(isinstance(item, torch.Tensor | Written) for item in value):
            return "{" + "; ".join(map(written, value)) + "}"
        return "[" + ",".join(map(written, value)) + "]"
    if value is None or isinstance(value, _WHERE):
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if isinstance(value, float):
        return repr(value)  # which, of a float that is followed, is no use of it
    if isinstance(value, torch.layout | torch.memory_format):
        return f"'{str(value).removeprefix('torch.')}'"
    if isinstance(value, complex):
        return f"{value.real!r}{value.imag:+}j"
    if isinstance(value, torch.dtype):
        return DTYPES.get(value, str(value))
    return "'" + " ".join(str(value).split()) + "'"


def _tensor(tensor: torch.Tensor) -> str:
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        dtype, shape = tensor.dtype, () if spec.tensor_meta is None else spec.tensor_meta.shape
        placed = written_placements(spec.placements)
    else:  # which DTensor takes for a replicated one
        dtype, shape, placed = tensor.dtype, tensor.shape, ""
    return written_meta(dtype, shape) + placed


def written_meta(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """`f32[64,32]`"""
    return f"{DTYPES.get(dtype, dtype)}[{','.join(map(str, shape))}]"


def written_placements(placements: Sequence[Placement]) -> str:
    """` @ S(0),R`"""
    return " @ " + ",".join(map(written_placement, placements))


def written_placement(placement: Placement) -> str:
    """`S(0)`"""
    if type(placement).__name__ == "_MaskPartial":  # its module depends on the version
        return "P(mask)"
    own = _own_placements.written(placement)
    if own is not None:
        return own
    if isinstance(placement, _NormPartial):
        return f"P(norm{placement.norm_type!r})".replace(".0)", ")")
    return str(placement).replace(" ", "")
