"""Facts to guard: the kinds of them, and what each expects, in words that hold in another process too."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import functools
import gc
import hashlib
import io
import re
import struct
import sys
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from . import _code, _introspect
from ._libraries import is_library_class
from ._numbers import (
    BASES,
    BUFFER,
    CLASS,
    ENTRY_COUNT,
    ENTRY_SIZE,
    FUNCTION,
    ITEMS,
    METADATA,
    OWN,
    REFERENTS,
    SIZE,
    TYPE_OF,
    WEAK,
    WITHIN,
)
from ._specs import mesh_text, short_text

ABSENT: Any = object()
PARTS = {
    SIZE: "len", ITEMS: "entries", FUNCTION: "code", BUFFER: "bytes", TYPE_OF: "type", OWN: "len", ENTRY_SIZE: "len",
    ENTRY_COUNT: "len", BASES: "bases", CLASS: "class", WEAK: "alive", REFERENTS: "parts", METADATA: "metadata",
    WITHIN: "contents",
}  # fmt: skip

# Objects of exactly these classes never change and have no attributes of their own.
_ATOMS: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type(NotImplemented),
    type(...),
    range,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_ATOM_IDS = frozenset(map(id, _ATOMS))
_CONTENT = (bool, int, float, complex, str, bytes)
# Told by the names under which Python or PyTorch knows them.
NAMED = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType,
    types.ClassMethodDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType,
)  # fmt: skip
# Classes of C code that never change, and whose text says all.
_SAID_BY_REPR = (decimal.Decimal, datetime.date, datetime.timedelta, datetime.timezone)
_NUMPY = ("numpy", "numpy.linalg", "numpy.fft", "numpy.random")
_most_of = collections.deque.__dict__["maxlen"].__get__
_OF_A_ZONE = (datetime.time, datetime.datetime)
# What these stand for is outside the process, or on a device; all else of a pattern is made of its slots.
_FILES = (io.FileIO, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.TextIOWrapper)
_HANDLES = (torch.Stream, torch.Event, dist.Store, dist.Work, re.Pattern)  # type: ignore[attr-defined]


@dataclass(frozen=True, eq=False)
class Attribute:
    """An attribute of an object. Its value is not held: the step may let go of it."""

    holder: Any
    key: str
    path: str


def is_of_argument(path: str) -> bool:
    """Whether a path leads to an argument of the call, or into one."""
    return path.startswith(("args[", "kwargs["))


def unique_path(path: str, owner: Any, known: dict[str, Any]) -> str:
    """A path that stands for one owner only. ``known``: the owners of those that are given away."""
    name, copies = path, 1
    while known.setdefault(name, owner) != owner:
        copies += 1
        name = f"{path}#{copies}"
    return name


@dataclass
class Fact:
    """One thing to look at, at every call."""

    kind: int
    container: Any
    key: Any
    guard: int
    subject: str
    expected: str
    hyperparameter: bool = False
    origin: Attribute | None = None
    """The attribute through which the walk came by it, the nearest of those whose reads can be seen."""


def atom(value: Any) -> bool:
    """Whether a value is all that there is to it."""
    return id(type(value)) in _ATOM_IDS


def fixed(value: Any) -> bool:
    """Whether a value is made of atoms and nothing else."""
    if type(value) is slice:
        return all(map(fixed, ends(value)))
    return atom(value) or (type(value) is tuple and all(map(fixed, value)))


def ends(value: slice) -> tuple[Any, Any, Any]:
    """What a slice is made of."""
    return value.start, value.stop, value.step


def plain(value: Any) -> bool:
    """Whether a value can be told by its text, here and in another process."""
    kind = type(value)
    if id(kind) in _ATOM_IDS or issubclass(kind, enum.Enum) or _introspect.numpy_scalar(kind):
        return True
    if kind is tuple or kind is torch.Size or kind is slice:
        return all(map(plain, ends(value) if kind is slice else value))
    return issubclass(kind, _CONTENT)


def text_of(value: Any) -> str:
    """A plain value as text; ``repr`` of no class but Python's, NumPy's and torch's own."""
    kind = type(value)
    if kind in (float, complex) and value != value:  # the text of a NaN does not tell its sign
        return f"{value!r} {struct.pack('dd', value.real, value.imag).hex()}"
    if id(kind) in _ATOM_IDS or kind is torch.Size:
        return repr(value)
    if kind is tuple:
        return "(" + "".join(f"{text_of(item)}, " for item in value) + ")"
    if kind is slice:
        return f"slice{text_of(ends(value))}"
    if issubclass(kind, enum.Enum):
        own = _introspect.own(value) or {}
        return f"{kind.__qualname__}.{own.get('_name_')}"
    base = next((base for base in _CONTENT if issubclass(kind, base)), None)
    inner = base.__repr__(value) if base is not None else value.tobytes().hex()
    return f"{type.__dict__['__name__'].__get__(kind)}({inner})"


def describe(value: Any) -> str:
    """What a guard expects of a value alone, in words that hold in another process too."""
    return describe_plain(value) if value is ABSENT or plain(value) else describe_object(value)


def describe_plain(value: Any) -> str:
    """The same of a plain value."""
    return "absent" if value is ABSENT else shortened(text_of(value))


def describe_object(value: Any) -> str:
    """The same of a value that its text does not tell."""
    kind = type(value)
    if kind is types.FunctionType:
        return str(value.__qualname__)
    if issubclass(kind, type | types.ModuleType):
        return _introspect.name(value)
    if kind in NAMED:
        return f"{value.__module__}.{value.__qualname__}" if hasattr(value, "__module__") else value.__qualname__
    if kind is types.CodeType:
        return _code.digest(value)
    if kind.__name__ in ("OpOverload", "OpOverloadPacket"):
        return f"{_introspect.name(kind)} {value}"
    if issubclass(kind, collections.deque):
        return f"a {_introspect.name(kind)} of at most {_most_of(value)}"
    if issubclass(kind, frozenset):
        return shortened(f"{_introspect.name(kind)}({', '.join(sorted(map(describe, frozenset.__iter__(value))))})")
    return shortened(in_full(value) or f"a {_introspect.name(kind)}")


def in_full(value: Any) -> str | None:
    """All that an object of C code holds, as text; None where nothing says it."""
    kind = type(value)
    name = _introspect.name(kind)
    if kind in _SAID_BY_REPR or (is_library_class(kind) and issubclass(kind, Placement)):
        return f"{name} {value!r}"
    if kind in _OF_A_ZONE and (value.tzinfo is None or type(value.tzinfo) is datetime.timezone):
        return f"{name} {value!r}"
    if kind in (torch.finfo, torch.iinfo):
        return f"{name} of {value.dtype}"
    if kind is DeviceMesh:
        return f"a DeviceMesh {mesh_text(value)}"
    if kind is dist.ProcessGroup:
        ranks = dist.distributed_c10d._world.pg_group_ranks.get(value)
        return None if ranks is None else f"a ProcessGroup {value.group_name} of {sorted(ranks)}"
    if kind.__name__ in ("ufunc", "_ArrayFunctionDispatcher") and _introspect.module_of(kind).startswith("numpy"):
        known = any(vars(each).get(value.__name__) is value for each in map(sys.modules.get, _NUMPY) if each)
        return f"{name} {value.__name__}" if known else None
    if _introspect.module_of(kind) == "numpy.dtypes":
        return f"{name} {value!r}" if value.metadata is None else None
    if type(kind).__name__ == "pybind11_type" and "__entries" in _introspect.class_dict(kind):
        return f"{name} {int(value)}"
    if _introspect.module_of(kind) == "_abc" or issubclass(kind, _HANDLES) or kind in _FILES:
        return f"a {name}"
    return None


def shortened(text: str) -> str:
    """A text of at most some 120 characters; what is cut off counts too."""
    return text if len(text) <= 120 else f"{text[:100]}... {_hash(text.encode())}"


def parts_of(value: Any) -> list[Any] | None:
    """What an object is made of that is told by nothing else, and never becomes other objects."""
    kind = type(value)
    if issubclass(kind, tuple):
        return list(tuple.__iter__(value))
    if kind is slice:
        return list(ends(value))
    if issubclass(kind, frozenset):
        return [part for part in frozenset.__iter__(value) if not plain(part)]
    if issubclass(kind, types.MethodType):
        return [value.__func__, value.__self__]
    if kind is types.BuiltinFunctionType or kind is types.MethodWrapperType:
        owner = value.__self__
        return None if owner is None or issubclass(type(owner), type | types.ModuleType) else [owner]
    return None


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def all_of(texts: Iterable[str]) -> str:
    """Many texts as one short text, which is another one where any of them is."""
    return _hash("\n".join(texts).encode())


def expects(kind: int, value: Any, key: Any, tell: Callable[[Any], str]) -> str:
    """What a fact about an object itself expects, where other processes can tell; otherwise nothing.
    ``tell`` says what is expected of an object in it."""
    if kind == TYPE_OF:
        return _introspect.name(type(value))
    if kind == METADATA and issubclass(type(value), torch.Tensor):
        return metadata(value)
    if kind == FUNCTION:
        named = (value.__kwdefaults__ or {}).items()
        defaults = [*(value.__defaults__ or ()), *(part for item in named for part in item)]
        said = () if key else (value.__name__, text_of(value.__doc__) if plain(value.__doc__) else "")
        return _code.digest(value.__code__) + all_of((*said, *map(tell, defaults)))
    if kind == BUFFER:
        return _content(value)
    if kind == BASES:
        return ", ".join(_introspect.name(base) for base in _introspect.mro(value))
    if kind == ITEMS:
        found = list(_introspect.entries(value))
        if issubclass(type(value), set):
            return all_of(sorted(map(tell, found)))
        if issubclass(type(value), dict) and key:
            found = [part for item in found for part in (item, dict.__getitem__(value, item))]
        return all_of(map(tell, found))
    if kind == REFERENTS:
        return position(value) if key else shortened("; ".join(map(tell, gc.get_referents(value))))
    return ""


SAYS_SIZE = frozenset({SIZE, ENTRY_SIZE, ENTRY_COUNT, OWN})


def size_in_words(kind: int, value: Any) -> str:
    """What a fact about a number of entries expects."""
    return str(len(_introspect.own(value) or ()) if kind == OWN else _introspect.size(value))


def metadata(tensor: torch.Tensor) -> str:
    """The metadata of a tensor, as text."""
    return f"{short_text(tensor)}, {metadata_of_gradient(tensor)}" if tensor.is_leaf else short_text(tensor)


def metadata_of_gradient(tensor: torch.Tensor) -> str:
    """The metadata of the gradient of a leaf, as text."""
    grad = tensor.grad
    if grad is None:
        return "no gradient"
    kind = "" if type(grad) in (torch.Tensor, DTensor) else f" {_introspect.name(type(grad))}"
    return f"a gradient{kind} {short_text(grad)}"


def _content(value: Any) -> str:
    """The bytes of a buffer, and how it looks at them."""
    view = memoryview(value)
    looks = f"{getattr(value, 'dtype', view.format)} {view.shape} {view.strides}"
    if "O" in view.format:  # addresses
        return looks
    return f"{looks} {_hash(view.tobytes())}"


def position(iterator: Any) -> str:
    """Where an iterator of Python's own stands, in words."""
    kind = type(iterator)
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return "at its end" if frame is None else f"at {frame.f_lasti}"
    if kind.__name__ in ("count", "repeat"):
        return repr(iterator)
    if hasattr(kind, "__length_hint__"):
        return f"{kind.__length_hint__(iterator)} left"
    return ""


FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
