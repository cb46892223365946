"""DTensor specs as text, and back."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._collective_utils import MeshTopoInfo
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import _disable_current_modes

from ._identity import by_identity
from ._own_placements import written


@by_identity
def mesh_text(mesh: Any) -> str:
    """A mesh as text: device type, shape, dim names, ranks."""
    with _disable_current_modes():
        ranks = torch._C.TensorBase.tolist(mesh.mesh.flatten())
    return "|".join(
        (
            mesh.device_type,
            ",".join(map(str, mesh.mesh.shape)),
            ",".join(mesh.mesh_dim_names or ()),
            ",".join(map(str, ranks)),
        )
    )


@by_identity
def _mesh_in_words(mesh: Any) -> str:
    words = f"{','.join(mesh.mesh_dim_names or ())}{list(mesh.mesh.shape)}"
    ranks = mesh_text(mesh).rsplit("|", 1)[1]
    if ranks != ",".join(map(str, range(mesh.mesh.numel()))):
        words += f" of ranks {ranks}"
    return words


def links_of(mesh: Any) -> list[tuple[float, float]]:
    """What DTensor estimates of the links of each mesh dim: microseconds per hop, and GiB per second."""
    topology = MeshTopoInfo.build_from_mesh(mesh)
    return list(zip(topology.mesh_dim_latency, topology.mesh_dim_bandwidth, strict=True))


def spec_text(spec: Any) -> str:
    """The form that the C ABI reads (``rote_record_spec``)."""
    shape = spec.tensor_meta.shape if spec.tensor_meta is not None else ()
    stride = spec.tensor_meta.stride if spec.tensor_meta is not None else ()
    return "|".join(
        (
            mesh_text(spec.mesh),
            ";".join(written(placement) or str(placement) for placement in spec.placements),
            ",".join(map(str, shape)),
            ",".join(map(str, stride)),
        )
    )


def short_text(tensor: torch.Tensor) -> str:
    """A tensor's meta for guards: global shape, dtype, device, placements."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{dtype}{list(tensor.shape)} strides {list(tensor.stride()) if tensor.layout is torch.strided else '?'}"
    text += f" on {tensor.device.type}"
    if isinstance(tensor, DTensor):
        spec = tensor._spec
        placed = ",".join(written(one) or str(one) for one in spec.placements)
        text += f" placed {placed} on mesh {_mesh_in_words(spec.mesh)}"
    return text + (" requires grad" if tensor.requires_grad else "")


def has_strides(tensor: torch.Tensor) -> bool:
    """Whether a tensor has a shape and strides to speak of: it is not sparse, nested, or yet to be made."""
    return tensor.layout is torch.strided and not tensor.is_nested and not is_lazy(tensor)


def looks_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a tensor looks: shape, strides and dtype; of one without strides, what it has."""
    if has_strides(tensor):
        return tensor.shape, tensor.stride(), tensor.dtype
    has_shape = tensor.layout is not torch.strided
    return tensor.layout, tensor.dtype, tensor.shape if has_shape else None


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, the tensor itself otherwise."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a plain tensor lies, and how it looks at its memory; equal as long as it stays the same tensor."""
    if not has_strides(tensor):
        return (tensor.layout, tensor.dtype)
    storage = torch._C.TensorBase.untyped_storage(tensor)
    return (
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        torch._C.TensorBase.storage_offset(tensor),
        tensor.is_conj(),
        tensor.is_neg(),
        storage._cdata,
        storage.nbytes(),
    )
