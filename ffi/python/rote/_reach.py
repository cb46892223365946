"""The Python values that a step can reach, as facts to guard.

A threshold that is crossed at step 1,000 leaves no trace in two recordings, so
plain values in reach of the captured function are guarded: closure cells,
globals that its code names, attributes of captured modules and of objects, and
entries of dicts and lists, down to ``DEPTH`` hops. Containers with more than
``LARGE`` entries are guarded by identity and size.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DEPTH = 8
LARGE = 1024

# Kinds of facts, as facts.h numbers them.
DICT_ITEM, LIST_ITEM, CELL, ATTRIBUTE, SIZE, TENSOR_META, GRAD_META, GROUP = range(8)
# Kinds of guards, as GuardKind numbers them.
STATE, HOST, WORLD = 2, 3, 5

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
)
_LIBRARY_ROOTS = ("torch", "numpy", "rote", "typing", "builtins")
_OPAQUE_MODULES = (
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
    "weakref",
    "rote",
    "numpy",
    "abc",
    "contextlib",
    "tempfile",
)
_STDLIB = frozenset(sys.stdlib_module_names)
# What nn.Module keeps for itself and never decides by.
_MODULE_SKIP = frozenset({"_forward_hooks_with_kwargs", "_forward_hooks_always_called"})


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


def _is_library(module: str | None) -> bool:
    root = (module or "").split(".")[0]
    return root in _LIBRARY_ROOTS or (root in _STDLIB and root != "__main__")


def _is_opaque(kind: type) -> bool:
    module = kind.__module__ or ""
    return any(module == name or module.startswith(name + ".") for name in _OPAQUE_MODULES)


def plain(value: Any) -> bool:
    """Whether a value is compared by content."""
    if isinstance(value, tuple):
        return all(plain(item) for item in value)
    return isinstance(value, _PLAIN)


def describe(value: Any) -> str:
    """What a guard expects, in words that hold in another process too."""
    if plain(value):
        text = repr(value)
        return text if len(text) <= 120 else text[:117] + "..."
    if isinstance(value, types.FunctionType | type | types.ModuleType):
        return getattr(value, "__qualname__", value.__name__)
    return f"a {type(value).__qualname__}"


class Walk:
    """One walk over everything in reach."""

    def __init__(self, function: Any, ignore: tuple[str, ...]) -> None:
        self.facts: list[Fact] = []
        self._ignore = ignore
        self._seen: set[int] = set()
        self._classes: set[int] = set()
        self._codes: set[types.CodeType] = set()
        self._hold: list[Any] = []
        while isinstance(function, functools.partial):
            function = function.func
        self._globals = getattr(inspect.unwrap(function), "__globals__", None)  # named without their module

    # -- entry points ---------------------------------------------------------

    def optimizer(self, path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        """Guards an optimizer: hyperparameters, parameters and state."""
        self._visit(optimizer.param_groups)
        self._visit(optimizer.state)
        self._add(
            SIZE,
            optimizer.param_groups,
            None,
            STATE,
            f"{path}.param_groups",
            optimizer.param_groups,
        )
        for i, group in enumerate(optimizer.param_groups):
            self._visit(group)
            self._add(LIST_ITEM, optimizer.param_groups, i, STATE, f"{path}.param_groups[{i}]", group)
            self._add(SIZE, group, None, STATE, f"{path}.param_groups[{i}]", group)
            for key, value in group.items():
                subject = f"{path}.param_groups[{i}]['{key}']"
                if key == "params":
                    self._visit(value)
                    self._add(SIZE, value, None, STATE, subject, value)
                    for j, parameter in enumerate(value):
                        self._add(LIST_ITEM, value, j, STATE, f"{subject}[{j}]", parameter, "")
                    continue
                hyper = type(value) is float
                self._add(DICT_ITEM, group, key, STATE, subject, value, hyperparameter=hyper)
        self._add(SIZE, optimizer.state, None, STATE, f"{path}.state", optimizer.state)
        for number, (owner, entries) in enumerate(optimizer.state.items()):
            label = f"{path}.state[{names.get(id(owner), number)}]"
            self._add(DICT_ITEM, optimizer.state, owner, STATE, label, entries, "")
            if isinstance(entries, dict):
                self._visit(entries)
                self._add(SIZE, entries, None, STATE, label, entries)
                for key, value in entries.items():
                    text = "" if isinstance(value, torch.Tensor) else None
                    self._add(DICT_ITEM, entries, key, STATE, f"{label}.{key}", value, text)
        self._object(path, optimizer, 0, skip=("state", "param_groups"))

    def module(self, path: str, module: nn.Module) -> None:
        """Guards a module and its children, however deep."""
        self._value(path, module, 0)

    def tensor(self, path: str, tensor: torch.Tensor, text: str, reads_grad: bool) -> None:
        """Guards a tensor of the state by address and meta, and its ``.grad``."""
        self.facts.append(Fact(TENSOR_META, tensor, None, STATE, path, text))
        for hook in (getattr(tensor, "_backward_hooks", None) or {}).values():
            self._value(f"{path}.hooks", hook, 1)
        if tensor.requires_grad and tensor.is_leaf:
            grad = "no gradient" if tensor.grad is None else "a gradient"
            self.facts.append(Fact(GRAD_META, tensor, reads_grad, STATE, f"{path}.grad", grad))

    def function(self, function: Any) -> None:
        """Guards what a function can reach."""
        self._callable("", function, 0)

    def value(self, path: str, value: Any) -> None:
        """Guards what an object can reach."""
        self._value(path, value, 0)

    # -- the walk -------------------------------------------------------------

    def _visit(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._hold.append(value)
        return True

    def _ignored(self, subject: str) -> bool:
        if not self._ignore:
            return False
        name = subject
        for head in ("closure['", "globals['"):
            if name.startswith(head):
                name = name[len(head) :].replace("']", "", 1)
        return any(
            name == ignored
            or subject == ignored
            or name.endswith("." + ignored)
            or name.startswith((ignored + ".", ignored + "["))
            for ignored in self._ignore
        )

    def _add(
        self,
        kind: int,
        container: Any,
        key: Any,
        guard: int,
        subject: str,
        value: Any,
        text: str | None = None,
        hyperparameter: bool = False,
    ) -> bool:
        if self._ignored(subject):
            return False
        if kind == SIZE:
            text, subject = str(len(value)), f"len({subject})"
        elif text is None:
            text = describe(value)
        self.facts.append(Fact(kind, container, key, guard, subject, text, hyperparameter))
        return True

    def _value(self, path: str, value: Any, depth: int) -> None:
        if plain(value) or depth > DEPTH or self._ignored(path):
            return
        if isinstance(value, torch.Tensor | types.ModuleType) or not self._visit(value):
            return
        if isinstance(value, type):
            self._class(path, value, depth)
        elif isinstance(value, types.FunctionType | types.MethodType | functools.partial):
            self._callable(path, value, depth)
        elif isinstance(value, dict):
            self._dict(path, value, depth)
        elif isinstance(value, list):
            self._list(path, value, depth)
        elif isinstance(value, tuple | set | frozenset):
            if isinstance(value, set):
                self._add(SIZE, value, None, HOST, path, value)
            for i, item in enumerate(value):
                if i < LARGE:
                    self._value(f"{path}[{i}]", item, depth + 1)
        elif isinstance(value, nn.Module):
            self._module(path, value, depth)
        else:
            self._object(path, value, depth)

    def _dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        if not self._add(SIZE, value, None, HOST, path, value) or len(value) > LARGE:
            return
        for key, item in value.items():
            if isinstance(key, str | int | float | bool | tuple | enum.Enum):
                subject = f"{path}[{key!r}]"
                if self._add(DICT_ITEM, value, key, HOST, subject, item):
                    self._value(subject, item, depth + 1)
            else:
                self._value(f"{path}[...]", item, depth + 1)

    def _list(self, path: str, value: list[Any], depth: int) -> None:
        if not self._add(SIZE, value, None, HOST, path, value) or len(value) > LARGE:
            return
        for i, item in enumerate(value):
            subject = f"{path}[{i}]"
            if self._add(LIST_ITEM, value, i, HOST, subject, item):
                self._value(subject, item, depth + 1)

    def _module(self, path: str, module: nn.Module, depth: int) -> None:
        own = module.__dict__
        for key, value in own.items():
            if key in _MODULE_SKIP:
                continue
            subject = f"{path}.{key}"
            if key in ("_parameters", "_buffers", "_modules"):
                self._add(DICT_ITEM, own, key, HOST, subject, value, "")
                self._add(SIZE, value, None, HOST, subject, value)
                for name, item in value.items():
                    self._add(DICT_ITEM, value, name, STATE, f"{path}.{name}", item, "")
                    if isinstance(item, nn.Module):
                        self._value(f"{path}.{name}", item, depth)  # children are no hop
            elif (isinstance(value, dict) and key.endswith("_hooks")) or key.startswith("_backward"):
                if hasattr(value, "__len__"):
                    self._add(SIZE, value, None, HOST, subject, value)
                if isinstance(value, dict):
                    for hook in value.values():
                        self._value(f"{subject}[...]", hook, depth + 1)
            elif self._add(DICT_ITEM, own, key, HOST, subject, value):
                self._value(subject, value, depth + 1)
        self._add(SIZE, own, None, HOST, path, own)
        self._methods(type(module), depth)

    def _object(self, path: str, value: Any, depth: int, skip: tuple[str, ...] = ()) -> None:
        kind = type(value)
        if _is_opaque(kind) and not isinstance(value, torch.optim.Optimizer):
            return
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            if not skip and not self._add(SIZE, own, None, HOST, path, own):
                return
            for key, item in list(own.items()):
                if key in skip or not isinstance(key, str):
                    continue
                subject = f"{path}.{key}"
                if self._add(DICT_ITEM, own, key, HOST, subject, item):
                    self._value(subject, item, depth + 1)
        for name in _slots(kind):
            item = getattr(value, name, None)
            if item is not None and self._add(ATTRIBUTE, value, name, HOST, f"{path}.{name}", item):
                self._value(f"{path}.{name}", item, depth + 1)
        self._methods(kind, depth)

    def _class(self, path: str, kind: type, depth: int) -> None:
        if _is_library(kind.__module__):
            return
        self._methods(kind, depth)

    def _methods(self, kind: type, depth: int) -> None:
        """Plain attributes of a class, and what its methods name."""
        for base in kind.__mro__:
            if _is_library(base.__module__) or id(base) in self._classes:
                continue
            self._classes.add(id(base))
            for key, item in list(vars(base).items()):
                if plain(item) and not key.startswith("__"):
                    self._add(ATTRIBUTE, base, key, HOST, f"{base.__qualname__}.{key}", item)
                function = item
                if isinstance(item, staticmethod | classmethod):
                    function = item.__func__
                elif isinstance(item, property):
                    function = item.fget
                if isinstance(function, types.FunctionType):
                    self._callable("", function, depth + 1)

    def _callable(self, path: str, function: Any, depth: int) -> None:
        if depth > DEPTH:
            return
        if isinstance(function, functools.partial):
            self._callable(path, function.func, depth)
            for i, item in enumerate(function.args):
                self._value(f"{path}args[{i}]", item, depth + 1)
            self._value(f"{path}keywords", function.keywords, depth + 1)
            return
        if isinstance(function, types.MethodType):
            self._value("self", function.__self__, depth)
            function = function.__func__
        if not isinstance(function, types.FunctionType):
            if not isinstance(function, types.BuiltinFunctionType):
                self._value(path or "self", function, depth)
            return
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self._callable(path, wrapped, depth)
        library = _is_library(function.__module__)
        self._closure(function, depth)  # even of a library's function, it may be the user's
        if library or function.__code__ in self._codes:
            return
        self._codes.add(function.__code__)
        for i, item in enumerate(function.__defaults__ or ()):
            self._value(f"{function.__qualname__}.__defaults__[{i}]", item, depth + 1)
        if function.__kwdefaults__:
            self._value(f"{function.__qualname__}.__kwdefaults__", function.__kwdefaults__, depth + 1)
        own = function.__globals__
        place = "" if own is self._globals else f"{function.__module__}."
        for name, attributes in _names(function.__code__):
            if name not in own:
                continue
            item = own[name]
            subject = f"{place}globals['{name}']"
            if isinstance(item, types.ModuleType):
                self._add(DICT_ITEM, own, name, HOST, subject, item)
                if not _is_library(item.__name__):
                    self._module_attributes(subject, item, attributes, depth + 1)
                continue
            if _is_library(getattr(item, "__module__", None)) and isinstance(item, types.FunctionType | type):
                continue
            if self._add(DICT_ITEM, own, name, HOST, subject, item):
                self._value(subject, item, depth + 1)

    def _closure(self, function: types.FunctionType, depth: int) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                item = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            if id(cell) in self._seen or name == "__class__":
                continue
            place = "" if function.__globals__ is self._globals else f"{function.__qualname__}."
            subject = f"{place}closure['{name}']"
            self._seen.add(id(cell))
            self._hold.append(cell)
            if self._add(CELL, cell, None, HOST, subject, item):
                self._value(subject, item, depth + 1)

    def _module_attributes(self, path: str, module: types.ModuleType, names: set[str], depth: int) -> None:
        own = vars(module)
        for name in sorted(names):
            if name not in own:
                continue
            item = own[name]
            if self._add(DICT_ITEM, own, name, HOST, f"{path}.{name}", item):
                self._value(f"{path}.{name}", item, depth + 1)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if base.__module__ == "builtins":
            continue
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                yield name


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[tuple[str, set[str]], ...]:
    """The globals that code names, nested code included, and every attribute
    name in it (the attributes of a global module are among them)."""
    found: list[str] = []
    attributes: set[str] = set()
    pending = [code]
    while pending:
        current = pending.pop()
        for instruction in dis.get_instructions(current):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.append(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                attributes.add(instruction.argval)
        pending.extend(const for const in current.co_consts if isinstance(const, types.CodeType))
    return tuple((name, attributes) for name in dict.fromkeys(found))
