"""What is the user's and what a library's, and which libraries' objects are not looked into."""

from __future__ import annotations

import functools
import sys

from . import _look

_ROOTS = ("torch", "numpy", "rote", "typing", "builtins")
_STDLIB = frozenset(sys.stdlib_module_names)
_OPAQUE = (
    "torch.distributed",
    "torch.utils.data",
    "torch._C",
    "torch.autograd",
    "torch._dynamo",
    "logging",
    "threading",
    "multiprocessing",
    "concurrent",
    "io",
    "_io",
    "rote",
    "numpy",
    "abc",
    "tempfile",
)
# Of these, what is set is looked at: levels, flags, names.
_SET = ("logging", "threading", "concurrent.futures._base", "multiprocessing.sharedctypes")


@functools.lru_cache(maxsize=4096)
def _library(module: str) -> bool:
    root = module.split(".")[0]
    return root in _ROOTS or (root in _STDLIB and root != "__main__")


def is_library(module: object) -> bool:
    """Whether a Python module of this name is torch's, NumPy's, Rote's or Python's own."""
    return _library(module) if type(module) is str else True


def is_library_class(kind: type) -> bool:
    """Whether a class is a library's."""
    return _library(_look.module_of(kind))


@functools.lru_cache(maxsize=4096)
def _closed(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _OPAQUE)


def is_opaque(kind: type) -> bool:
    """Whether objects of a class are not looked into."""
    return _closed(_look.module_of(kind))


def has_settings(kind: type) -> bool:
    """Whether what is set in objects of a class that are not looked into is looked at."""
    return _look.module_of(kind) in _SET
