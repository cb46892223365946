"""The Python values that a step can reach, as facts to guard.

A threshold that is crossed at step 1,000 leaves no trace in two recordings, so
plain values in reach of the captured function are guarded: closure cells,
globals that its code names, attributes of captured modules, objects, classes and Python modules, and entries
of containers, down to ``DEPTH`` hops (a call is no hop). Of containers with more
than ``LARGE`` entries, and of arrays, which entries they hold is guarded, not
what these hold; beyond ``HUGE`` only identity and size.
"""

from __future__ import annotations

import array
import builtins
import collections
import contextvars
import dis
import enum
import functools
import gc
import hashlib
import importlib.util
import inspect
import os
import pickle
import random
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

DEPTH = 12
LARGE = 1024
HUGE = 65536

# Kinds of facts, as facts.h numbers them.
DICT_ITEM, LIST_ITEM, CELL, ATTRIBUTE, SIZE, TENSOR_META, GRAD_META, GROUP = range(8)
# Other things about an object itself than its size.
ITEMS, FUNCTION, BUFFER, TYPE_OF, CONTEXT_VAR = range(8, 13)
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
_ENVIRONMENT = (os.environ, os.environb, os.getenv, os.getenvb)
_PARTS = {ITEMS: "entries", FUNCTION: "code", BUFFER: "bytes", TYPE_OF: "type"}
_STDLIB = frozenset(sys.stdlib_module_names)
# What nn.Module keeps for itself and never decides by.
_MODULE_SKIP = frozenset(
    {
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
        "_non_persistent_buffers_set",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
    }
)


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


def _reads_environment(value: Any) -> bool:
    return any(value is reader for reader in _ENVIRONMENT)


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


_ABSENT: Any = object()
_FUNCTIONS = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)


def describe(value: Any) -> str:
    """What a guard expects, in words that hold in another process too."""
    if value is _ABSENT:
        return "absent"
    if plain(value):
        text = repr(value)
        return text if len(text) <= 120 else text[:117] + "..."
    if isinstance(value, types.FunctionType | type | types.ModuleType):
        return getattr(value, "__qualname__", value.__name__)
    return f"a {type(value).__qualname__}"


def _digest(kind: int, value: Any) -> str:
    """What a fact about an object itself expects, where other processes can tell."""
    if kind == TYPE_OF:
        return type(value).__qualname__
    if kind == BUFFER:
        content = bytes(memoryview(value).tobytes())
    elif len(value) <= LARGE and all(plain(item) for item in value):
        names = [repr(item) for item in value]
        content = repr(sorted(names) if isinstance(value, set) else names).encode()
    else:
        return ""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


class Walk:
    """One walk over everything in reach."""

    def __init__(self, function: Any, ignore: tuple[str, ...]) -> None:
        self.facts: list[Fact] = []
        self._ignore = ignore
        self.seen: set[int] = set()
        self._classes: set[int] = set()
        self._codes: set[types.CodeType] = set()
        self._hold: list[Any] = []
        self._later: collections.deque[Callable[[], None]] = collections.deque()
        self._named: set[str] = set()  # names of attributes in the code that was seen
        self._modules: dict[str, tuple[types.ModuleType, int]] = {}
        self._module_entries: set[tuple[str, str]] = set()
        self.iterators: list[Any] = []
        self.moving: list[tuple[str, Callable[[], Any]]] = []
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
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks:
                self._hooks(f"{path}.hooks", hooks, 1)
        if tensor.requires_grad and tensor.is_leaf:
            grad = "no gradient" if tensor.grad is None else "a gradient"
            self.facts.append(Fact(GRAD_META, tensor, reads_grad, STATE, f"{path}.grad", grad))

    def function(self, function: Any) -> None:
        """Guards what a function can reach."""
        self._callable("", function, 0)

    def value(self, path: str, value: Any) -> None:
        """Guards what an object can reach."""
        self._value(path, value, 0)

    def finish(self) -> list[Fact]:
        """Follows what is left to follow; every fact."""
        for owner, suffix in ((nn.modules.module, "_hooks"), (sys.modules["torch.optim.optimizer"], "_hooks")):
            for name, hooks in vars(owner).items():
                if name.startswith("_global_") and name.endswith(suffix) and isinstance(hooks, dict):
                    self._hooks(f"torch.{name}", hooks, 1)
        while self._later or self._modules_left():
            while self._later:
                self._later.popleft()()
        return self.facts

    # -- the walk -------------------------------------------------------------

    def _hooks(self, path: str, hooks: Any, depth: int) -> None:
        self._add(SIZE, hooks, None, HOST, path, hooks)
        if hooks:
            self._add(ITEMS, hooks, None, HOST, path, hooks, "")  # numbered in each process
        for hook in hooks.values():
            self._value(f"{path}[...]", hook, depth)

    def _modules_left(self) -> bool:
        """Guards what code names in Python modules. False: there was nothing new."""
        known = len(self._modules)
        for name, (module, depth) in list(self._modules.items()):
            own = vars(module)
            library = _is_library(name)
            for key in sorted(self._named & own.keys()):
                if (name, key) in self._module_entries:
                    continue
                self._module_entries.add((name, key))
                item = own[key]
                if library:
                    if _reads_environment(item):
                        self._environment()
                    if isinstance(item, types.FunctionType | types.BuiltinFunctionType):
                        # Replaced by another function, as patches do.
                        self._add(DICT_ITEM, own, key, HOST, f"{name}.{key}", item)
                    elif isinstance(item, types.ModuleType):
                        self._python_module(item, depth)
                elif self._add(DICT_ITEM, own, key, HOST, f"{name}.{key}", item):
                    self._soon(f"{name}.{key}", item, depth + 1)
        return bool(self._later) or len(self._modules) > known

    def _python_module(self, module: types.ModuleType, depth: int) -> None:
        if depth <= DEPTH and module is not builtins:
            self._modules.setdefault(module.__name__, (module, depth))

    def _environment(self) -> None:
        data = vars(os.environ)["_data"]
        if self._visit(data):
            self._add(SIZE, data, None, HOST, "os.environ", data, "")
            for key, item in data.items():
                self._add(DICT_ITEM, data, key, HOST, f"os.environ[{key!r}]", item, "")

    def _soon(self, path: str, value: Any, depth: int) -> None:
        """Visits a value once the present visit is over: calls nest without end, and are no hops."""
        depth -= isinstance(value, _FUNCTIONS)
        self._later.append(lambda: self._value(path, value, depth))

    def _visit(self, value: Any) -> bool:
        if id(value) in self.seen:
            return False
        self.seen.add(id(value))
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
            text, subject = str(len(value)) if text is None else text, f"len({subject})"
        elif kind in (ITEMS, FUNCTION, BUFFER, TYPE_OF):
            text, subject = _digest(kind, value) if text is None else text, f"{_PARTS[kind]}({subject})"
        elif text is None:
            text = describe(value)
        self.facts.append(Fact(kind, container, key, guard, subject, text, hyperparameter))
        return True

    def _value(self, path: str, value: Any, depth: int) -> None:
        if depth > DEPTH or self._ignored(path):
            return
        if isinstance(value, types.ModuleType):
            self._python_module(value, depth)
            return
        if plain(value):
            if not isinstance(value, tuple | enum.Enum) and hasattr(value, "__dict__") and self._visit(value):
                self._object(path, value, depth)
            return
        if isinstance(value, torch.Tensor) or not self._visit(value):
            return
        if _reads_environment(value):
            self._environment()
        elif isinstance(value, type):
            self._class(path, value, depth)
        elif isinstance(value, _FUNCTIONS):
            self._callable(path, value, depth)
        elif isinstance(value, dict):
            self._dict(path, value, depth)
            self._attributes(path, value, depth)
        elif isinstance(value, list):
            self._list(path, value, depth)
            self._attributes(path, value, depth)
        elif isinstance(value, tuple | set | frozenset | collections.deque):
            self._collection(path, value, depth)
            self._attributes(path, value, depth)
        elif isinstance(value, types.MappingProxyType):
            for inner in gc.get_referents(value):
                self._value(path, inner, depth)
        elif isinstance(value, weakref.ref):
            self._value(f"{path}()", value(), depth + 1)
        elif isinstance(value, contextvars.ContextVar):
            inner = value.get(None)
            if self._add(CONTEXT_VAR, value, None, HOST, path, inner):
                self._value(path, inner, depth + 1)
        elif isinstance(value, bytearray | array.array) or type(value).__module__ == "numpy":
            self._buffer(path, value)
        elif isinstance(value, nn.Module):
            self._module(path, value, depth)
        elif (type(value).__module__ or "").startswith("numpy.random"):
            self.moving.append((path, functools.partial(pickle.dumps, value)))
        else:
            if hasattr(type(value), "__next__"):
                self.iterators.append(value)
            self._object(path, value, depth)

    def _attributes(self, path: str, value: Any, depth: int) -> None:
        """What a container of a class of its own holds beside its entries."""
        if type(value).__module__ not in ("builtins", "collections"):
            self._object(path, value, depth)

    def _buffer(self, path: str, value: Any) -> None:
        try:
            size = memoryview(value).nbytes
        except (TypeError, ValueError, BufferError):
            return
        if size <= HUGE:
            self._add(BUFFER, value, None, HOST, path, value)

    def _collection(self, path: str, value: Any, depth: int) -> None:
        if not isinstance(value, tuple | frozenset):
            if not self._add(SIZE, value, None, HOST, path, value):
                return
            if 0 < len(value) <= HUGE:
                self._add(ITEMS, value, None, HOST, path, value)
        if len(value) <= LARGE:
            for i, item in enumerate(value):
                self._value(f"{path}[{i}]", item, depth + 1)

    def _dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        if not self._add(SIZE, value, None, HOST, path, value) or len(value) > HUGE:
            return
        if len(value) > 1:  # their order
            self._add(ITEMS, value, None, HOST, path, value)
        for i, (key, item) in enumerate(value.items()):
            subject = f"{path}[{key!r}]" if plain(key) else f"{path}[key {i}]"
            if self._add(DICT_ITEM, value, key, HOST, subject, item) and len(value) <= LARGE:
                self._value(subject, item, depth + 1)

    def _list(self, path: str, value: list[Any], depth: int) -> None:
        if not self._add(SIZE, value, None, HOST, path, value):
            return
        if len(value) > LARGE:
            if len(value) <= HUGE:
                self._add(ITEMS, value, None, HOST, path, value)
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
                if len(value) > 1:  # their order
                    self._add(ITEMS, value, None, HOST, subject, value)
                for name, item in value.items():
                    self._add(DICT_ITEM, value, name, STATE, f"{path}.{name}", item, "")
                    if isinstance(item, nn.Module):
                        self._value(f"{path}.{name}", item, depth)  # children are no hop
            elif (isinstance(value, dict) and key.endswith("_hooks")) or key.startswith("_backward"):
                if isinstance(value, dict):
                    self._hooks(subject, value, depth + 1)
            elif self._add(DICT_ITEM, own, key, HOST, subject, value):
                self._value(subject, value, depth + 1)
        self._add(SIZE, own, None, HOST, path, own)
        self._add(TYPE_OF, module, None, HOST, path, module)
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
            item = getattr(value, name, _ABSENT)
            if self._add(ATTRIBUTE, value, name, HOST, f"{path}.{name}", item) and item is not _ABSENT:
                self._value(f"{path}.{name}", item, depth + 1)
        self._add(TYPE_OF, value, None, HOST, path, value)
        if isinstance(value, random.Random):
            self.moving.append((path, value.getstate))
        self._methods(kind, depth)

    def _class(self, path: str, kind: type, depth: int) -> None:
        if _is_library(kind.__module__):
            return
        self._methods(kind, depth)
        self._methods(type(kind), depth)

    def _methods(self, kind: type, depth: int) -> None:
        """The attributes of a class, and what its methods name."""
        for base in kind.__mro__:
            if id(base) in self._classes:
                continue
            library = _is_library(base.__module__)
            if library and not issubclass(base, nn.Module | torch.optim.Optimizer):
                continue
            self._classes.add(id(base))
            own = next((inner for inner in gc.get_referents(vars(base)) if isinstance(inner, dict)), None)
            if own is None:
                continue
            if library:  # replaced by another function, as patches do
                for key in ("forward", "__call__", "_call_impl", "step"):
                    if key in own:
                        self._add(DICT_ITEM, own, key, HOST, f"{base.__qualname__}.{key}", own[key])
                continue
            self._add(SIZE, own, None, HOST, base.__qualname__, own, "")
            for key, item in list(own.items()):
                if key.startswith("__") and key.endswith("__") and not callable(item):
                    continue
                subject = f"{base.__qualname__}.{key}"
                if not self._add(DICT_ITEM, own, key, HOST, subject, item):
                    continue
                if isinstance(item, staticmethod | classmethod):
                    self._soon(subject, item.__func__, depth + 1)
                elif isinstance(item, property):
                    for accessor in (item.fget, item.fset):
                        self._soon(subject, accessor, depth + 1)
                elif not isinstance(item, types.GetSetDescriptorType | types.MemberDescriptorType):
                    self._soon(subject, item, depth + 1)

    def _callable(self, path: str, function: Any, depth: int) -> None:
        if depth > DEPTH:
            return
        if isinstance(function, functools.partial):
            self._callable(path, function.func, depth)
            for i, item in enumerate(function.args):
                self._soon(f"{path}args[{i}]", item, depth + 1)
            self._value(f"{path}keywords", function.keywords, depth + 1)
            return
        if isinstance(function, types.MethodType):
            self._value("self", function.__self__, depth)
            function = function.__func__
        if not isinstance(function, types.FunctionType):
            if isinstance(function, types.BuiltinFunctionType):
                owner = function.__self__
                if owner is not None and not isinstance(owner, types.ModuleType | type):
                    self._value(f"{path}.__self__", owner, depth + 1)
            else:
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
        label = path or function.__qualname__
        self._add(FUNCTION, function, None, HOST, label, function, "")  # a stored plan of other code is compared
        if function.__dict__.keys() - {"__wrapped__"}:
            self._dict(label, function.__dict__, depth + 1)
        else:
            self._add(SIZE, function.__dict__, None, HOST, f"{label}.__dict__", function.__dict__)
        for i, item in enumerate(function.__defaults__ or ()):
            self._value(f"{function.__qualname__}.__defaults__[{i}]", item, depth + 1)
        if function.__kwdefaults__:
            self._value(f"{function.__qualname__}.__kwdefaults__", function.__kwdefaults__, depth + 1)
        own = function.__globals__
        place = "" if own is self._globals else f"{function.__module__}."
        names = _names(function.__code__)
        self._named |= names.attributes
        for name in names.imports:
            for level in range(4):
                try:
                    full = importlib.util.resolve_name("." * level + name, own.get("__package__") or "")
                except (ImportError, ValueError):
                    continue
                for part in (full, *(f"{full}.{child}" for child in names.attributes)):
                    if isinstance(module := sys.modules.get(part), types.ModuleType):
                        self._python_module(module, depth)
        found = names.globals if "globals" not in names.globals else (*names.globals, *(names.texts & own.keys()))
        for name in found:
            item = own.get(name, _ABSENT)
            subject = f"{place}globals['{name}']"
            if isinstance(item, types.ModuleType):
                self._add(DICT_ITEM, own, name, HOST, subject, item)
                self._python_module(item, depth)
                continue
            if self._add(DICT_ITEM, own, name, HOST, subject, item) and not (
                _is_library(getattr(item, "__module__", None)) and isinstance(item, types.FunctionType | type)
            ):
                self._soon(subject, item, depth + 1)

    def _closure(self, function: types.FunctionType, depth: int) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            if id(cell) in self.seen or name == "__class__":
                continue
            try:
                item = cell.cell_contents
            except ValueError:  # not filled yet
                item = _ABSENT
            place = "" if function.__globals__ is self._globals else f"{function.__qualname__}."
            subject = f"{place}closure['{name}']"
            self.seen.add(id(cell))
            self._hold.append(cell)
            if self._add(CELL, cell, None, HOST, subject, item) and item is not _ABSENT:
                self._soon(subject, item, depth + 1)


def _slots(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        if base.__module__ == "builtins":
            continue
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name.startswith("__") and not name.endswith("__"):
                yield f"_{base.__name__.lstrip('_')}{name}"
            elif name not in ("__dict__", "__weakref__"):
                yield name


@dataclass(frozen=True)
class _Names:
    """What code names, nested code included."""

    globals: tuple[str, ...]
    attributes: frozenset[str]  # of anything; text counts, getattr may use it
    imports: tuple[str, ...]
    texts: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> _Names:
    found: list[str] = []
    attributes: set[str] = set()
    imports: list[str] = []
    texts: set[str] = set()
    pending = [code]
    while pending:
        current = pending.pop()
        for instruction in dis.get_instructions(current):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                found.append(instruction.argval)
            elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
                attributes.add(instruction.argval)
            elif instruction.opname == "IMPORT_NAME":
                imports.append(instruction.argval)
        pending.extend(const for const in current.co_consts if isinstance(const, types.CodeType))
        texts.update(const for const in current.co_consts if isinstance(const, str) and const.isidentifier())
    return _Names(tuple(dict.fromkeys(found)), frozenset(attributes | texts), tuple(imports), frozenset(texts))
