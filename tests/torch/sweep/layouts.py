"""The same values laid out otherwise: other strides, storages, offsets, and lazy conjugation and negation."""

from collections.abc import Callable

import torch
from torch import Tensor


def plain(tensor: Tensor) -> Tensor:
    return tensor.clone()


def transposed(tensor: Tensor) -> Tensor:
    """The last dim is no longer the dense one."""
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else strided(tensor)


def strided(tensor: Tensor) -> Tensor:
    """Every second element of a storage, from its fourth on."""
    if tensor.dim() == 0:
        return torch.stack([tensor] * 4)[3]
    space = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 3))
    view = space[..., 3::2][..., : tensor.shape[-1]]
    return view.copy_(tensor)


def sliced(tensor: Tensor) -> Tensor:
    """A dense tensor that does not start where its storage does."""
    space = tensor.new_zeros(tensor.numel() + 5)
    return space[5:].view(tensor.shape).copy_(tensor)


def conjugated(tensor: Tensor) -> Tensor:
    """A lazily conjugated view with the same values."""
    return tensor.conj().resolve_conj().conj() if tensor.is_complex() else tensor.clone()


def negated(tensor: Tensor) -> Tensor:
    """A lazily negated view with the same values."""
    if tensor.is_floating_point() or tensor.is_complex():
        return torch._neg_view(tensor.neg().resolve_neg())
    return tensor.clone()


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": plain,
    "transposed": transposed,
    "strided": strided,
    "sliced": sliced,
    "conj": conjugated,
    "neg": negated,
}


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A tensor of its own with the values of `tensor`; sparse and other ones keep their layout."""
    source = tensor.detach()
    if source.layout is not torch.strided or source.is_quantized:
        made = source.clone()
    else:
        made = LAYOUTS[layout](source)
    return made.requires_grad_(tensor.requires_grad)
