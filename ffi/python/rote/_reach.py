"""The Python values that a step can reach, as facts to guard.

A threshold that is crossed at step 1,000 leaves no trace in two recordings, so
plain values in reach of the captured function are guarded: closure cells,
globals that its code names, attributes of captured modules, tensors, objects,
classes and Python modules, and entries of containers, down to ``DEPTH`` hops (a
call is no hop). Of containers with more than ``LARGE`` entries, which entries
they hold is guarded, not what these hold.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import copyreg
import functools
import gc
import itertools
import mmap
import os
import pickle
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import _look, _memory
from ._classes import Classes
from ._facts import (
    ABSENT,
    ATTRIBUTE,
    BUFFER,
    CONTEXT_VAR,
    DICT_ITEM,
    ENTRY_SIZE,
    FUNCTIONS,
    GRAD_META,
    HOST,
    ITEMS,
    LIST_ITEM,
    LOOK,
    MEMBER,
    OWN,
    PARTS,
    REFERENTS,
    SIZE,
    STATE,
    TENSOR_META,
    TYPE_OF,
    WEAK,
    Fact,
    atom,
    describe,
    ends,
    expects,
    in_full,
    look,
    look_of_gradient,
    parts_of,
    plain,
    shortened,
)
from ._frames import Handlers
from ._libraries import is_library_class
from ._named import Named
from ._policy import (
    BYTES,
    DEPTH,
    LARGE,
    MODULE_PARTS,
    MODULE_STORES,
    MOST,
    OP_PARTS,
    OUTCOMES,
    Asked,
    Refused,
    Way,
    asked_of_definitions,
    asks,
    asks_for_stores,
    has_parts,
    has_settings,
    hashes_alike,
    hides_functions,
    holds_hooks,
    is_opaque,
    is_part,
    is_setting,
    names_attributes,
    never_changes,
    reads_environment,
    runs_text,
    way_of,
)
from ._specs import local_of, short_text
from ._uses import is_number

_Reader = Callable[[str, Any, int], None]  # of a path, an object and how many hops away it is


class Walk:
    """One walk over everything in reach."""

    def __init__(self, function: Any, ignore: tuple[str, ...]) -> None:
        self.facts: list[Fact] = []
        self._ignore = ignore
        self.seen: set[int] = set()
        self._once: set[Any] = set()
        self._hold: list[Any] = []
        self._later: collections.deque[Callable[[], None]] = collections.deque()
        self._weak: list[tuple[str, Any, int]] = []
        self._objects: list[tuple[str, Any]] = []
        self._generators: list[tuple[str, torch.Generator]] = []
        self._standing: list[tuple[str, Any]] = []
        self._asked_only: list[tuple[str, str, frozenset[str]]] = []  # what can't be guarded, and who asks for it
        self.iterators: list[Any] = []
        self.functions: list[types.FunctionType] = []  # whose code is the user's
        self._reads_environment = False
        self._known: dict[int, tuple[type, _Reader]] = {}  # by the addresses of classes, which it holds
        self._first: dict[int, tuple[str, Any]] = {}  # where objects were found first
        self._memory: dict[int, tuple[str, int]] = {}  # storages: the first tensor found in each, and where it starts
        self.handlers = Handlers()
        self.watched: set[int] = set()  # objects of which it matters who else holds them,
        self.aliases: list[tuple[str, int]] = []  # and where they were found
        self.moving: list[tuple[str, Callable[[], Any]]] = []  # generators of random numbers, and their state
        self._stores: list[tuple[str, Any]] = []  # what modules save and load by
        self.buffers: list[tuple[int, int, str]] = []  # where they begin and end in memory, and their paths
        self.advancing: list[tuple[str, Callable[[], Any]]] = []  # iterators, and where they stand
        self.stopped: list[str] = []  # where the walk went no further
        self.untold: list[str] = []  # what holds more than the facts say in words
        self.unseen: list[tuple[str, str]] = []  # what could not be looked into, and why
        while issubclass(type(function), functools.partial):
            function = function.func
        self._named = Named(self, _innermost(function))
        self.classes = Classes(self, self._named)
        self._readers: dict[Way, _Reader] = {
            Way.SLICE: self._slice,
            Way.WEAK_REFERENCE: self._weak_reference,
            Way.CLASS: self._class,
            Way.CALLABLE: self._named.callable,
            Way.DICT: self._dict,
            Way.LIST: self._list,
            Way.COLLECTION: self._collection,
            Way.CONTEXT_VAR: self._context_var,
            Way.ARRAY: self._array,
            Way.UFUNC: self._ufunc,
            Way.BUFFER: self._bytes,
            Way.MODULE: self._module,
            Way.NUMPY_GENERATOR: self._numpy_generator,
            Way.THREAD_LOCAL: self._thread_local,
            Way.GENERATOR: self._generator,
            Way.OP: self.op,
            Way.OP_DEFINITION: self._definition,
            Way.CAPTURED: self._captured,
            Way.CELL: self._named.cell,
            Way.BUILT_IN: self._built_in,
            Way.OBJECT: self._any_object,
        }

    # -- entry points ---------------------------------------------------------

    def optimizer(self, path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        """Guards an optimizer: hyperparameters, parameters and state."""
        own = _look.own(optimizer) or {}
        self.add(OWN, optimizer, None, STATE, path, optimizer)
        for key in ("param_groups", "state"):  # loading a state dict replaces both
            self.add(ENTRY_SIZE, own, key, STATE, f"{path}.{key}", own.get(key))
        groups = optimizer.param_groups
        self.visit(groups)
        self.visit(optimizer.state)
        for i, group in enumerate(groups):
            self.visit(group)
            self.add(LIST_ITEM, groups, i, STATE, f"{path}.param_groups[{i}]", group)
            self.add(SIZE, group, None, STATE, f"{path}.param_groups[{i}]", group)
            for key, value in group.items():
                subject = f"{path}.param_groups[{i}]['{key}']"
                if key == "params":
                    self.visit(value)
                    self.add(ENTRY_SIZE, group, key, STATE, subject, value)
                    for j, parameter in enumerate(value):
                        self.add(LIST_ITEM, value, j, STATE, f"{subject}[{j}]", parameter, names.get(id(parameter), ""))
                    continue
                hyper = is_number(value)
                self.add(DICT_ITEM, group, key, STATE, subject, value, hyperparameter=hyper)
                self.value(subject, value, 1)
        for number, (owner, entries) in enumerate(optimizer.state.items()):
            label = f"{path}.state[{names.get(id(owner), number)}]"
            self.add(DICT_ITEM, optimizer.state, owner, STATE, label, entries, "")
            if not isinstance(entries, dict):
                self.value(label, entries, 1)
                continue
            self.visit(entries)
            self.add(SIZE, entries, None, STATE, label, entries)
            for key, value in entries.items():
                self.add(DICT_ITEM, entries, key, STATE, f"{label}.{key}", value)
                if not issubclass(type(value), torch.Tensor):
                    self.value(f"{label}.{key}", value, 1)
        self._object(path, optimizer, 0, skip=("state", "param_groups"))

    def module(self, path: str, module: nn.Module) -> None:
        """Guards a module and its children, however deep."""
        self.value(path, module, 0)

    def name(self, path: str, named: Any) -> None:
        """Names a tensor, module or optimizer of the state, before anything is described that may refer to it."""
        self._first.setdefault(id(named), (path, named))

    def tensor(self, path: str, tensor: torch.Tensor) -> None:
        """Guards a tensor of the state by address and meta, its attributes and its ``.grad``."""
        grad = tensor.grad if tensor.is_leaf else None
        text = short_text(tensor) + self.sharing(path, tensor)
        shared = "" if grad is None else self.memory(f"{path}.grad", grad)
        self.facts.append(Fact(TENSOR_META, tensor, None, STATE, path, text))
        self.visit(tensor)
        self._entries_of_own(path, tensor, 0)
        self._tensor_class(path, tensor, 0)
        self._hooks_of(path, tensor, 0)
        # One that requires no gradient may have one from before; that there is none is part of its meta.
        if tensor.is_leaf and (tensor.requires_grad or grad is not None):
            text = look_of_gradient(tensor) + shared
            self.facts.append(Fact(GRAD_META, tensor, grad is not None, STATE, f"{path}.grad", text))
        self._inside(path, tensor, 0)

    def argument(self, path: str, tensor: torch.Tensor) -> None:
        """Guards what the attributes of an argument hold; which they are, each call says itself."""
        self.visit(tensor)
        for key, item in (_look.own(tensor) or {}).items():
            self.value(f"{path}.{key}", item, 1)
        self._tensor_class(path, tensor, 0, argument=True)
        self._inside(path, tensor, 0)

    def argument_in_words(self, path: str, value: Any) -> str:
        """What an argument is; of a tensor, what its attributes are too, and where it lies in memory."""
        if not issubclass(type(value), torch.Tensor):
            return self.described(path, value)
        own = (_look.own(value) or {}).items()
        attributes = (f", .{key} = {self.described(f'{path}.{key}', item)}" for key, item in own)
        return self.described(path, value, look(value)) + "".join(attributes) + self.memory(path, value)

    def memory(self, path: str, tensor: torch.Tensor) -> str:
        """Where a tensor, and its gradient, lie in memory that another one was found in before, in words."""
        grad = tensor.grad if tensor.is_leaf else None
        return self.sharing(path, tensor) + ("" if grad is None else self.memory(f"{path}.grad", grad))

    def sharing(self, path: str, tensor: torch.Tensor) -> str:
        """Where a tensor lies in memory that another one was found in before, in words."""
        local = local_of(tensor)
        if local.layout is not torch.strided or not torch._C._has_storage(local):
            return ""
        start = int(local.storage_offset()) * local.element_size()
        first, offset = self._memory.setdefault(local.untyped_storage()._cdata, (path, start))
        return "" if first == path else f", {start - offset} bytes from {first}"

    def function(self, function: Any) -> None:
        """Guards what a function can reach."""
        self.value("" if issubclass(type(function), FUNCTIONS) else "self", function, 0)

    @property
    def not_told(self) -> str:
        """What a stored plan cannot say of the step, so that another process cannot tell whether it is the same;
        empty if there is nothing."""
        if self._named.hashes and sys.flags.hash_randomization:
            return "the order of a set or a hash, on which it may depend, is another one in every process"
        if self.untold:
            return f"what {self.untold[0]} holds, only its C code knows"
        return f"{self.stopped[0]}, too much to follow" if self.stopped else ""

    def finish(self) -> list[Fact]:
        """Follows what is left to follow; every fact."""
        for owner in (nn.modules.module, sys.modules["torch.optim.optimizer"]):
            for name, hooks in vars(owner).items():
                if name.startswith("_global_") and name.endswith("_hooks") and isinstance(hooks, dict):
                    self._hooks(f"torch.{name}", hooks, 1)
        self._follow()
        while self._weak:  # what is held strongly too has been seen by now
            for path, value, depth in self._weak:
                self._guarded(path, functools.partial(self._weakly, path, value, depth))
            self._follow(clear=self._weak)
        self.classes.finish()
        if self._reads_environment:
            self._environment()
        self.handlers.of_names(self._named.said)
        self._said()
        for function in self.functions:
            self.handlers.of_function(function)
        # Seeds and iterators may change as they like where nobody asks.
        if asks(Asked.POSITIONS, self._named.said):
            for path, iterator in self._standing:
                self.add(REFERENTS, iterator, True, HOST, path, iterator)
        if asks_for_stores(self._named.said):
            for path, value in self._stores:
                self._hooks(path, value, 1) if isinstance(value, dict) else self.value(path, value, 1)
            self._follow()
        if asks(Asked.SEEDS, self._named.said):
            for path, generator in self._generators:
                self.add(LOOK, generator, None, HOST, path, generator)
        for path, what, asking in self._asked_only:
            if not asking.isdisjoint(self._named.attributes):
                self.unseen.append((path, what))
        if self._named.sees_own:
            for path, value in self._objects:
                self.add(OWN, value, True, HOST, path, value)
        return self.facts

    def _said(self) -> None:
        """Guards what functions and classes say of themselves, where code asks for it."""
        asked = asked_of_definitions(self._named.attributes, self._named.said)
        if asks(Asked.COPIES, self._named.said):
            self.add(ITEMS, copyreg.dispatch_table, True, HOST, "copyreg.dispatch_table", copyreg.dispatch_table)
        if "__annotations__" in asked:
            for function in self.functions:
                subject, found = f"{function.__qualname__}.__annotations__", function.__annotations__
                if self.add(ATTRIBUTE, function, "__annotations__", HOST, subject, found):
                    self.value(subject, found, 1)
        self.classes.said(asked, self._named.said)
        self._follow()

    def _follow(self, clear: list[Any] | None = None) -> None:
        if clear is not None:
            clear.clear()
        while self._later or self._named.modules():
            while self._later:
                self._later.popleft()()

    # -- what the parts of a walk share -----------------------------------------

    def soon(self, path: str, value: Any, depth: int) -> None:
        """Visits a value once the present visit is over: calls nest without end, and are no hops."""
        if not atom(value):
            depth -= issubclass(type(value), FUNCTIONS)
            self._later.append(lambda: self.value(path, value, depth))

    def hold(self, value: Any) -> None:
        """Keeps an object while the walk lasts, so that its address stays its own."""
        self._hold.append(value)

    def forget(self) -> None:
        """Lets go of everything."""
        self._hold.clear()
        self._first.clear()
        self._known.clear()
        self._objects.clear()
        self.facts = []

    def visit(self, value: Any) -> bool:
        """Whether an object is seen for the first time."""
        if id(value) in self.seen:
            return False
        self.seen.add(id(value))
        self._hold.append(value)
        return True

    def visit_once(self, key: Any) -> bool:
        """Whether a key is seen for the first time."""
        if key in self._once:
            return False
        self._once.add(key)
        return True

    def environment(self) -> None:
        """Guards the environment variables."""
        self._reads_environment = True

    def _environment(self) -> None:
        """Guards all variables, and tells other processes of those that code in reach names."""
        data = vars(os.environ)["_data"]
        named = {os.environ.encodekey(text) for text in self._named.texts if text.isidentifier()}
        self.add(SIZE, data, None, HOST, "os.environ", data, "")
        for key in (*data, *sorted(named - data.keys())):
            text = None if key in named else ""
            self.add(DICT_ITEM, data, key, HOST, f"os.environ[{key!r}]", data.get(key, ABSENT), text)

    def op(self, path: str, packet: Any, depth: int) -> None:
        """Guards the Python functions behind an op: its gradient, and what sets it up."""
        name = getattr(packet, "_qualified_op_name", None) or packet._schema.name
        definitions = sys.modules.get("torch._library.custom_ops")
        found = getattr(definitions, "OPDEFS", {}).get(name)
        if found is not None:
            self.value(path, found, depth)
        elif hides_functions(name):
            self.unseen.append(
                (path, "an op whose gradient or parts are a Python function; torch.library.custom_op names it")
            )

    def _definition(self, path: str, definition: Any, depth: int) -> None:
        """What an op's gradient does; what the op itself does, every replay does anew."""
        for name in OP_PARTS:
            own = vars(definition)
            if name in own and self.add(DICT_ITEM, own, name, HOST, f"{path}.{name}", own[name]):
                self.value(f"{path}.{name}", own[name], depth)

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

    def add(
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
        """Adds a fact. False: the user has said to ignore it."""
        if self._ignored(subject):
            return False
        part = PARTS.get(kind)
        if text is None:
            if part is None:
                text = self.described(subject, value)
            else:
                inside = (f"{subject}({i})" for i in itertools.count())
                text = expects(kind, value, key, lambda item: self.described(next(inside), item))
        if part is not None:
            subject = f"{part}({subject})"
        self.facts.append(Fact(kind, container, key, guard, subject, text, hyperparameter))
        return True

    def described(self, subject: str, value: Any, text: str | None = None) -> str:
        """What a guard expects of a value, which of the objects found before it is, and what it is made of."""
        text = describe(value) if text is None else text
        if value is ABSENT or atom(value) or plain(value):
            return text
        first, _ = self._first.setdefault(id(value), (subject, value))
        if first != subject:
            return f"{text}, {first}"
        parts = parts_of(value)
        if parts is None:
            return text
        inside = [self.described(f"{subject}[{i}]", part) for i, part in enumerate(parts)]
        return shortened(f"{text} of {', '.join(inside)}")

    # -- the walk -------------------------------------------------------------

    def value(self, path: str, value: Any, depth: int) -> None:
        """Guards what an object can reach. Nothing that it is raises."""
        if id(value) in self.watched:
            self.aliases.append((path, id(value)))
        if atom(value) or self._ignored(path):
            return
        if runs_text(value):
            self.unseen.append((path, "it runs any text"))
            return
        if depth > DEPTH:
            if id(value) not in self.seen:
                self._stop(f"{path} is {depth} objects deep")
            return
        if len(self._hold) > MOST:
            self._stop(f"more than {MOST} objects are in reach", once=True)
            return
        self._first.setdefault(id(value), (path, value))
        self._guarded(path, lambda: self._read(path, value, depth))

    def _guarded(self, path: str, visit: Callable[[], None]) -> None:
        try:
            visit()
        except Exception as problem:  # an object may be anything
            self.unseen.append((path or "the function", type(problem).__name__))

    def _stop(self, why: str, once: bool = False) -> None:
        if why not in self.stopped if once else len(self.stopped) < 20:
            self.stopped.append(why)

    def _read(self, path: str, value: Any, depth: int) -> None:
        kind = type(value)
        if issubclass(kind, types.ModuleType):
            self._named.python_module(value, depth)
            return
        if issubclass(kind, torch.Tensor):
            self._tensor(path, value, depth)
            return
        if never_changes(value) or not self.visit(value):
            return
        if reads_environment(value):
            self.environment()
            return
        known = self._known.get(id(kind))
        (self._reader(kind) if known is None else known[1])(path, value, depth)

    def _reader(self, kind: type) -> _Reader:
        way = way_of(kind)
        reader = self._readers[way] if isinstance(way, Way) else functools.partial(self._refuse, way)
        self._known[id(kind)] = (kind, reader)
        return reader

    def _refuse(self, refused: Refused, path: str, value: Any, depth: int) -> None:
        if refused.asking is None:
            self.unseen.append((path, refused.why))
        else:
            self._asked_only.append((path, refused.why, refused.asking))

    def _slice(self, path: str, value: slice, depth: int) -> None:
        for name, item in zip(("start", "stop", "step"), ends(value), strict=True):
            self.value(f"{path}.{name}", item, depth + 1)

    def _context_var(self, path: str, value: contextvars.ContextVar[Any], depth: int) -> None:
        try:
            inner = value.get()
        except LookupError:
            inner = ABSENT
        if self.add(CONTEXT_VAR, value, None, HOST, path, inner) and inner is not ABSENT:
            self.value(path, inner, depth + 1)

    def _thread_local(self, path: str, value: Any, depth: int) -> None:
        own = threading.local.__getattribute__(value, "__dict__")  # of this thread
        if self.add(ATTRIBUTE, value, "__dict__", HOST, f"{path}.__dict__", own):
            self.entries(path, own, depth)
            self.classes.of(type(value), depth)

    def _captured(self, path: str, value: Any, depth: int) -> None:
        step = _look.class_dict(type(value))["_step"].__get__(value)
        self.value(path, step.function, depth)  # called within the step, as any function

    def _untold(self, path: str, value: Any) -> None:
        """Notes an object that holds what no fact says."""
        if _look.hides(type(value)) and in_full(value) is None:
            self.untold.append(path)

    def attributes(self, path: str, value: Any, depth: int) -> None:
        """What an object that is no plain one of Python's classes holds beside its content."""
        if type(value) is collections.OrderedDict:
            self.add(OWN, value, None, HOST, f"{path}.__dict__", value)
        elif _look.own(value) is not None or _look.can_change(type(value)) or type(value) is collections.defaultdict:
            self._object(path, value, depth)

    def _built_in(self, path: str, value: Any, depth: int) -> None:
        """An object of Python's own classes: iterators, getters, views, caches, what decorators make."""
        kind = type(value)
        if not has_parts(kind):
            return
        if hasattr(kind, "__next__"):
            self.iterators.append(value)
            self._standing.append((path, value))
            self.advancing.append((path, functools.partial(_position, value)))
        if names_attributes(kind):
            for text in value.__reduce__()[1]:
                if type(text) is str:
                    self._named.attributes.update(text.split("."))
        if not self.add(REFERENTS, value, None, HOST, path, value):
            return
        for i, item in enumerate(gc.get_referents(value)):
            if is_part(type(item)):
                self.value(f"{path}.parts[{i}]", item, depth + (not issubclass(type(item), FUNCTIONS)))

    def _weak_reference(self, path: str, reference: Any, depth: int) -> None:
        self._weak.append((path, reference, depth))

    def _weakly(self, path: str, reference: Any, depth: int) -> None:
        """What a weak reference refers to, without holding it."""
        found = _look.referent(reference)
        text = "gone" if found is None else f"alive, {self.described(f'{path}()', found)}"
        if not self.add(WEAK, reference, None, HOST, path, found, text):
            return
        if found is None or atom(found):
            return
        if id(found) in self.seen:
            return
        own = _look.own(found)
        kind = type(found)
        if issubclass(kind, (torch.Tensor, nn.Module, type, types.ModuleType, *FUNCTIONS)) or own is None:
            self.value(f"{path}()", found, depth + 1)
            return
        self.visit(found)
        self.entries(f"{path}()", own, depth + 1)
        self.classes.of(kind, depth)

    def entries(self, path: str, own: dict[Any, Any], depth: int) -> None:
        self.add(SIZE, own, None, HOST, path, own)
        for key, item in own.items():
            if type(key) is str and self.add(DICT_ITEM, own, key, HOST, f"{path}.{key}", item):
                self.value(f"{path}.{key}", item, depth + 1)

    # -- tensors and arrays -----------------------------------------------------

    def _tensor(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        if not self.visit(tensor):
            return
        if self.add(OWN, tensor, None, HOST, path, tensor):
            self.add(TYPE_OF, tensor, None, HOST, path, tensor)
            self.add(LOOK, tensor, None, HOST, path, tensor, look(tensor) + self.memory(path, tensor))
            self._hooks_of(path, tensor, depth)
            self._entries_of_own(path, tensor, depth)
            self._tensor_class(path, tensor, depth)
            self._inside(path, tensor, depth)

    def _inside(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        """The attributes of a gradient, and of what is inside a DTensor; one without any is not held."""
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and _look.own(grad):
            self.value(f"{path}.grad", grad, depth)
        if isinstance(tensor, DTensor) and _look.own(tensor._local_tensor):
            self.value(f"{path}._local_tensor", tensor._local_tensor, depth)

    def _entries_of_own(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        own = _look.own(tensor)
        for key, item in list((own or {}).items()):
            if type(key) is str and self.add(DICT_ITEM, own, key, HOST, f"{path}.{key}", item):
                self.value(f"{path}.{key}", item, depth + 1)

    def _tensor_class(self, path: str, tensor: torch.Tensor, depth: int, argument: bool = False) -> None:
        kind = type(tensor)
        if is_library_class(kind):
            self.classes.of_library(kind)
            return
        for name, member, base in _look.members(kind):
            if is_library_class(base):
                continue
            if argument:
                self.unseen.append((f"{path}.{name}", "a slot of a tensor that is an argument"))
                return
            self._member(path, tensor, name, member, depth)
        self.classes.of(kind, depth)

    def _array(self, path: str, value: Any, depth: int) -> None:
        import numpy

        flat = numpy.ndarray.view(value, numpy.ndarray)
        if value.dtype.hasobject:
            if value.dtype != object or not flat.flags.c_contiguous:
                self.unseen.append((path, "objects in fields or strides of a NumPy array"))
                return
            self.add(BUFFER, value, True, HOST, path, value)
            flat = flat.reshape(-1)
            self.add(ITEMS, flat, None, HOST, path, flat)
            if flat.size > LARGE:
                self._stop(f"{path} has {flat.size} entries")
            for i, item in enumerate(flat.tolist() if flat.size <= LARGE else ()):
                self.value(f"{path}[{i}]", item, depth + 1)
        elif not self._buffer(path, value):
            try:
                self._buffer(path, flat.view(numpy.uint8))  # dates, which the protocol of buffers does not know
            except (TypeError, ValueError):
                self.unseen.append((path, f"a NumPy array of {value.dtype}"))
        if type(value) is not numpy.ndarray:
            self.attributes(path, value, depth)

    def _ufunc(self, path: str, value: Any, depth: int) -> None:
        if in_full(value) is None:  # it may stand for a Python function
            self._untold(path, value)
            for part in gc.get_referents(value):
                self.value(path, part, depth)

    def _bytes(self, path: str, value: Any, depth: int) -> None:
        if not self._buffer(path, value):
            self._untold(path, value)
        self.attributes(path, value, depth)

    def _buffer(self, path: str, value: Any) -> bool:
        try:
            view = memoryview(value)
        except (TypeError, ValueError, BufferError, NotImplementedError):
            return False
        with view:
            extent = _memory.extent_of_buffer(view)
            nbytes, constant = view.nbytes, view.readonly and _constant(value)
        if extent is not None:
            self.buffers.append((*extent, path))
        if nbytes > BYTES and not constant:
            self.unseen.append(
                (path, f"{nbytes >> 20} MiB that may change: with array.flags.writeable = False they would not")
            )
            return True
        return self.add(BUFFER, value, True if constant else None, HOST, path, value) or True

    # -- generators of random numbers ---------------------------------------------

    def _generator(self, path: str, value: torch.Generator, depth: int) -> None:
        self._generators.append((path, value))

    def _numpy_generator(self, path: str, value: Any, depth: int) -> None:
        self.moving.append((path, functools.partial(pickle.dumps, value)))
        self._untold(path, value)

    # -- containers -------------------------------------------------------------

    def _collection(self, path: str, value: Any, depth: int) -> None:
        self._items(path, value, depth)
        self.attributes(path, value, depth)

    def _items(self, path: str, value: Any, depth: int) -> None:
        size = _look.size(value)
        if issubclass(type(value), set | frozenset) and size > 1:
            self._named.hashes |= not all(hashes_alike(type(item)) for item in _look.entries(value))
        if not issubclass(type(value), tuple | frozenset):
            if not self.add(SIZE, value, None, HOST, path, value):
                return
            if size:
                self.add(ITEMS, value, None, HOST, path, value)
        self._inner(path, enumerate(_look.entries(value)), size, depth)

    def _dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        self._items_of_dict(path, value, depth)
        self.attributes(path, value, depth)

    def _items_of_dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        size = _look.size(value)
        if not self.add(SIZE, value, None, HOST, path, value):
            return
        if size > LARGE:
            self.add(ITEMS, value, True, HOST, path, value)
            self._inner(path, dict.items(value), size, depth)
            return
        if size > 1 or any(type(key) is not str for key in dict.keys(value)):  # their order; 1, 1.0 and True are equal
            self.add(ITEMS, value, None, HOST, path, value)
        for i, (key, item) in enumerate(list(dict.items(value))):
            subject = f"{path}[{describe(key)}]" if plain(key) else f"{path}[key {i}]"
            of_python = value is vars(builtins) and runs_text(item)
            if self.add(DICT_ITEM, value, key, HOST, subject, item) and not of_python:
                self.value(subject, item, depth + 1)
            if not atom(key):
                self.value(f"{path}[key {i}]", key, depth + 1)

    def _list(self, path: str, value: list[Any], depth: int) -> None:
        self._items_of_list(path, value, depth)
        self.attributes(path, value, depth)

    def _items_of_list(self, path: str, value: list[Any], depth: int) -> None:
        size = _look.size(value)
        if not self.add(SIZE, value, None, HOST, path, value):
            return
        if size > LARGE:
            self.add(ITEMS, value, None, HOST, path, value)
            self._inner(path, enumerate(list.__iter__(value)), size, depth)
            return
        for i, item in enumerate(list.__iter__(value)):
            subject = f"{path}[{i}]"
            if self.add(LIST_ITEM, value, i, HOST, subject, item):
                self.value(subject, item, depth + 1)

    def _inner(self, path: str, items: Any, size: int, depth: int) -> None:
        """What the entries of a container hold, unless there are too many."""
        if size <= LARGE:
            for i, item in list(items):
                self.value(f"{path}[{i}]", item, depth + 1)
        elif not all(plain(item) for _, item in items):
            self._stop(f"{path} has {size} entries, which may change inside")

    # -- objects ----------------------------------------------------------------

    def _hooks_of(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks is not None:
                self._hooks(f"{path}.hooks", hooks, depth + 1)

    def _hooks(self, path: str, hooks: Any, depth: int) -> None:
        if not hooks:
            self.add(SIZE, hooks, None, HOST, path, hooks)
            return
        self.add(ITEMS, hooks, True, HOST, path, hooks, str(len(hooks)))  # numbered in each process
        for hook in hooks.values():
            self.value(f"{path}[...]", hook, depth)

    def _module(self, path: str, module: nn.Module, depth: int) -> None:
        own = _look.own(module)
        if own is None:
            return
        for key, value in list(own.items()):
            subject = f"{path}.{key}"
            if key in MODULE_STORES:
                self._stores.append((subject, value))
                continue
            if key in MODULE_PARTS and issubclass(type(value), dict):
                self.add(ENTRY_SIZE, own, key, HOST, subject, value)
                if len(value) > 1:  # their order
                    self.add(ITEMS, value, None, HOST, subject, value)
                for name, item in value.items():
                    self.add(DICT_ITEM, value, name, STATE, f"{path}.{name}", item)
                    if issubclass(type(item), nn.Module | torch.Tensor):
                        self.value(f"{path}.{name}", item, depth)  # children are no hop
            elif issubclass(type(value), dict) and holds_hooks(key):
                self.add(ENTRY_SIZE, own, key, HOST, subject, value)
                if value:
                    self._hooks(subject, value, depth + 1)
            elif self.add(DICT_ITEM, own, key, HOST, subject, value):
                self.value(subject, value, depth + 1)
        self.add(OWN, module, None, HOST, path, module)
        self.add(TYPE_OF, module, None, HOST, path, module)
        self.classes.of(type(module), depth)
        if issubclass(type(module), torch.jit.ScriptModule):
            self._script(path, module)

    def _script(self, path: str, module: Any) -> None:
        """The attributes of a compiled module, which C++ keeps."""
        concrete = _look.own(module).get("_concrete_type")  # type: ignore[union-attr]
        for name in concrete.get_attributes() if concrete is not None else ():
            item = getattr(module, name)
            if issubclass(type(item), torch.Tensor | nn.Module):
                continue
            if not plain(item):
                self.unseen.append((f"{path}.{name}", "a container in a compiled module"))
            else:
                self.add(ATTRIBUTE, module, name, HOST, f"{path}.{name}", item)

    def _any_object(self, path: str, value: Any, depth: int) -> None:
        if any("__next__" in _look.class_dict(base) for base in _look.mro(type(value))):
            self.iterators.append(value)
        self._untold(path, value)
        self._object(path, value, depth)

    def _object(self, path: str, value: Any, depth: int, skip: tuple[str, ...] = ()) -> None:
        kind = type(value)
        if is_opaque(kind):
            if has_settings(kind):
                self._settings(path, value, depth)
            if _look.own(value) is not None:
                self._named.of_object(path, value, depth)
            return
        own = _look.own(value)
        if own is not None:
            if not skip and not self.add(OWN, value, None, HOST, path, value):
                return
            if not skip and len(own) > 1:
                self._objects.append((path, value))
            for key, item in list(own.items()):
                if key in skip or type(key) is not str:
                    continue
                subject = f"{path}.{key}"
                if self.add(DICT_ITEM, own, key, HOST, subject, item):
                    self.value(subject, item, depth + 1)
        for name, member, _ in _look.members(kind):
            self._member(path, value, name, member, depth)
        self.add(TYPE_OF, value, None, HOST, path, value)
        if issubclass(kind, random.Random):
            self.moving.append((path, value.getstate))
        self.classes.of(kind, depth)

    def _settings(self, path: str, value: Any, depth: int) -> None:
        """What is set in an object of the system's, such as a logger, an event or a future: the rest is its own."""
        own = _look.own(value) or {}
        if not self.add(OWN, value, None, HOST, path, value):  # what is not set may be asked for too
            return
        for key, item in list(own.items()):
            if type(key) is not str or not is_setting(key, item):
                continue
            if self.add(DICT_ITEM, own, key, HOST, f"{path}.{key}", item):
                if type(item) is list and key not in OUTCOMES:
                    self.add(SIZE, item, None, HOST, f"{path}.{key}", item)
                else:
                    self.value(f"{path}.{key}", item, depth + 1)

    def _member(self, path: str, value: Any, name: str, member: Any, depth: int) -> None:
        try:
            item = member.__get__(value)
        except AttributeError:
            item = ABSENT
        if self.add(MEMBER, value, member, HOST, f"{path}.{name}", item) and item is not ABSENT:
            self.value(f"{path}.{name}", item, depth + 1)

    def _class(self, path: str, kind: type, depth: int) -> None:
        self.classes.of(kind, depth)
        if type(kind) is not type:
            self.classes.of(type(kind), depth)


def _innermost(function: Any) -> Any:
    """The function that decorators wrap, if they say so."""
    seen = set()
    while type(function) is types.FunctionType and "__wrapped__" in function.__dict__ and id(function) not in seen:
        seen.add(id(function))
        function = function.__dict__["__wrapped__"]
    return function.__func__ if type(function) is types.MethodType else function


def _constant(array: Any) -> bool:
    """Whether nobody can write to an array of NumPy, unless by saying so first."""
    while _look.numpy_array(type(array)):
        if array.flags.writeable:
            return False
        array = array.base
    return array is None or type(array) in (bytes, mmap.mmap)


def _position(iterator: Any) -> Any:
    """Where an iterator stands."""
    if isinstance(iterator, types.GeneratorType):
        frame = iterator.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    kind = type(iterator)
    if kind.__name__ in ("count", "repeat"):
        return repr(iterator)
    if hasattr(kind, "__length_hint__"):
        return kind.__length_hint__(iterator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return tuple(part if type(part) is int else id(part) for part in iterator.__reduce__()[1:])
        except (TypeError, AttributeError):
            return None
