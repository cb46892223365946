"""Facts to guard: the kinds of them, and what each expects, in words that hold in another process too."""

from __future__ import annotations

import builtins
import enum
import functools
import hashlib
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from . import _code, _look
from ._specs import short_text

# Kinds of facts, as facts.h numbers them.
DICT_ITEM, LIST_ITEM, CELL, ATTRIBUTE, SIZE, TENSOR_META, GRAD_META, GROUP = range(8)
# Other things about an object itself than its size.
ITEMS, FUNCTION, BUFFER, TYPE_OF, CONTEXT_VAR, OWN, MEMBER, ENTRY_SIZE, BASES, CLASS, WEAK, REFERENTS, LOOK = range(
    8, 21
)
# Kinds of guards, as GuardKind numbers them.
STATE, HOST, WORLD = 2, 3, 5

ABSENT: Any = object()
PARTS = {
    SIZE: "len", ITEMS: "entries", FUNCTION: "code", BUFFER: "bytes", TYPE_OF: "type", OWN: "len", ENTRY_SIZE: "len",
    BASES: "bases", CLASS: "class", WEAK: "alive", REFERENTS: "parts", LOOK: "look",
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
    slice,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
_ATOM_IDS = frozenset(map(id, _ATOMS))
_CONTENT = (bool, int, float, complex, str, bytes)


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


def atom(value: Any) -> bool:
    """Whether a value is all that there is to it."""
    return id(type(value)) in _ATOM_IDS


def fixed(value: Any) -> bool:
    """Whether a value is made of atoms and nothing else."""
    return atom(value) or (type(value) is tuple and all(map(fixed, value)))


def plain(value: Any) -> bool:
    """Whether a value can be told by its text, here and in another process."""
    kind = type(value)
    if id(kind) in _ATOM_IDS or issubclass(kind, enum.Enum) or _look.numpy_scalar(kind):
        return True
    if kind is tuple or kind is torch.Size:
        return all(map(plain, value))
    return issubclass(kind, _CONTENT)


def text_of(value: Any) -> str:
    """A plain value as text; ``repr`` of no class but Python's, NumPy's and torch's own."""
    kind = type(value)
    if id(kind) in _ATOM_IDS or kind is torch.Size:
        return repr(value)
    if kind is tuple:
        return "(" + "".join(f"{text_of(item)}, " for item in value) + ")"
    if issubclass(kind, enum.Enum):
        own = _look.own(value) or {}
        return f"{kind.__qualname__}.{own.get('_name_')}"
    base = next((base for base in _CONTENT if issubclass(kind, base)), None)
    inner = base.__repr__(value) if base is not None else value.tobytes().hex()
    return f"{type.__dict__['__name__'].__get__(kind)}({inner})"


def describe(value: Any) -> str:
    """What a guard expects, in words that hold in another process too."""
    if value is ABSENT:
        return "absent"
    if plain(value):
        text = text_of(value)
        # What is cut off counts too.
        return text if len(text) <= 120 else f"{text[:100]}... {_hash(text.encode())}"
    kind = type(value)
    if kind is types.FunctionType:
        return str(value.__qualname__)
    if issubclass(kind, type | types.ModuleType):
        return _look.name(value)
    return f"a {_look.name(kind)}"


def _hash(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _all_plain(items: Iterable[Any]) -> str:
    texts = []
    for item in items:
        if not plain(item):
            return ""
        texts.append(text_of(item))
    return _hash("\n".join(texts).encode())


def expects(kind: int, value: Any, key: Any) -> str:
    """What a fact about an object itself expects, where other processes can tell; otherwise nothing."""
    if kind == TYPE_OF:
        return _look.name(type(value))
    if kind == LOOK and issubclass(type(value), torch.Tensor):
        tensor = value.detach()
        grad = ", a gradient" if value.is_leaf and value.grad is not None else ""
        return f"{short_text(tensor)}{', requires grad' if value.requires_grad else ''}{grad}"
    if kind in (SIZE, ENTRY_SIZE):
        return str(_look.size(value))
    if kind == OWN:
        return str(len(_look.own(value) or ()))
    if kind == FUNCTION:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).items())
        return _code.digest(value.__code__) + _all_plain(item for item in defaults if plain(item))
    if kind == BUFFER:
        return "" if key else _hash(memoryview(value).tobytes() + str(getattr(value, "dtype", "")).encode())
    if kind == BASES:
        return ", ".join(_look.name(base) for base in _look.mro(value))
    if kind == ITEMS:
        if issubclass(type(value), dict):
            return _all_plain(part for item in dict.items(value) for part in (item if key else item[:1]))
        found = list(_look.entries(value))
        if issubclass(type(value), set):
            return _hash("\n".join(sorted(map(text_of, found))).encode()) if all(map(plain, found)) else ""
        return _all_plain(found)
    return ""


def is_builtin(name: str) -> bool:
    """Whether a name is one of Python's builtins."""
    return name in vars(builtins)


FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
