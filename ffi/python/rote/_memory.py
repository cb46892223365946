"""Where tensors and buffers lie in memory, and how often they were written. (`views.h` says the same of those of a
later call.)"""

import ctypes
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ._specs import local_of

_FULL_READ_ONLY = 0x11C  # PyBUF_FULL_RO


class _Buffer(ctypes.Structure):
    """Python's `Py_buffer`."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.POINTER(ctypes.c_ssize_t)),
        ("strides", ctypes.POINTER(ctypes.c_ssize_t)),
        ("suboffsets", ctypes.POINTER(ctypes.c_ssize_t)),
        ("internal", ctypes.c_void_p),
    )


def storage_of(tensor: torch.Tensor) -> int:
    """The storage of a tensor, by its address; of one without, an address of nothing else."""
    local = local_of(tensor)
    has_storage = local.layout == torch.strided and not is_lazy(local)
    return int(local.untyped_storage()._cdata) if has_storage else id(tensor)


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was written, as autograd counts it."""
    return 0 if is_lazy(tensor) or tensor.is_inference() else tensor._version


def extent_of_tensor(tensor: torch.Tensor) -> tuple[int, int, int] | None:
    """Where a tensor's storage begins and ends, and which it is; None for one without memory of its own."""
    local = local_of(tensor)
    if local.layout is not torch.strided or local.device.type not in ("cpu", "cuda"):
        return None
    if not torch._C._has_storage(local):
        return None
    storage = local.untyped_storage()
    try:
        begin = storage.data_ptr()
    except RuntimeError:  # of a subclass that wraps others
        return None
    return (begin, begin + storage.nbytes(), storage._cdata) if begin and storage.nbytes() else None


def extent_of_buffer(value: Any) -> tuple[int, int] | None:
    """Where the memory of what has the protocol of buffers begins and ends; None for an empty one.

    Raises what the object raises that gives no buffer: TypeError, ValueError or BufferError.
    """
    view = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(value), ctypes.byref(view), _FULL_READ_ONLY)
    try:
        if not view.len:
            return None
        if not view.strides:
            return view.buf, view.buf + view.len
        begin, end = view.buf, view.buf + view.itemsize
        for i in range(view.ndim):
            last = view.strides[i] * (view.shape[i] - 1)
            begin, end = (begin + last, end) if last < 0 else (begin, end + last)
        return begin, end
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(view))
