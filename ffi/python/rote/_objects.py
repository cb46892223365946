"""What each kind of object in reach holds, as facts to guard: tensors, containers, modules and all others.

`_policy.way_of` says how the objects of a class are read.
"""

from __future__ import annotations

import builtins
import collections
import contextvars
import functools
import gc
import itertools
import mmap
import pickle
import random
import sys
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import _containers, _fsdp, _introspect, _memory, _modules, _reads, _schedulers, _unread, _within
from ._classes import Classes
from ._executed_code import Codes
from ._facts import ABSENT, FUNCTIONS, Attribute, all_of, atom, describe, ends, in_full, metadata, plain, unique_path
from ._libraries import is_library_class
from ._named import Named
from ._numbers import (
    ATTRIBUTE,
    BUFFER,
    CONTEXT_VAR,
    DICT_ITEM,
    ENTRY_COUNT,
    ENTRY_SIZE,
    HOST,
    ITEMS,
    LIST_ITEM,
    MEMBER,
    METADATA,
    OWN,
    REDUCER,
    REFERENTS,
    SIZE,
    STATE,
    TYPE_OF,
    WEAK,
    WITHIN,
)
from ._policy import (
    AS_MADE,
    BYTES,
    LARGE,
    MODULE_PARTS,
    MODULE_STORES,
    OP_PARTS,
    OUTCOMES,
    Refused,
    Way,
    has_parts,
    has_settings,
    hashes_alike,
    hides_functions,
    holds_hooks,
    is_opaque,
    is_part,
    is_renewed,
    is_setting,
    names_attributes,
    never_changes,
    reads_environment,
    runs_text,
    way_of,
)
from ._specs import local_of
from ._walk import Walk
from ._wrappers import DERIVED

# Schedulers that a step may read before none is thought to be only called: a step may make a new one in each call.
_MOST_READ = 8
_Reader = Callable[[str, Any, int], None]  # of a path, an object and how many hops away it is


class Objects(Walk):
    """The part of a walk that reads objects."""

    def __init__(
        self,
        function: Any,
        ignore: tuple[str, ...],
        ran: Codes | None,
        read: Sequence[Any],
        missed: frozenset[str],
        unread: _unread.Unread,
    ) -> None:
        """``read``: schedulers whose numbers the step has read; ``missed``: names of what it has asked others for, and
        not found; ``unread``: attributes that get no guard."""
        super().__init__(ignore, ran, unread.carried)
        self._read = read
        self._missed = missed
        self._unread = unread
        self.left: list[Attribute] = []  # which get no guard
        self.shared_dicts: set[int] = set()  # by address: of attributes of more than one object
        self._plain: dict[type, bool] = {}  # whether such attributes are those of a class's objects
        self.schedulers: list[tuple[str, torch.optim.lr_scheduler.LRScheduler]] = []  # the others
        self._known: dict[int, tuple[type, _Reader]] = {}  # by the addresses of classes, which it holds
        self._slots: dict[int, tuple[type, list[tuple[str, Any, type]]]] = {}
        self._hiding: dict[int, bool] = {}  # by the addresses of classes of objects that it holds
        self._memory: dict[int, tuple[str, int]] = {}  # storages: the first tensor found in each, and where it starts
        self._weak: list[tuple[str, Any, int]] = []
        self._arguments: set[int] = set()  # tensors, by their identities
        # What is guarded only where code asks for it:
        self._objects: list[tuple[str, Any]] = []
        self._generators: list[tuple[str, torch.Generator]] = []
        self._standing: list[tuple[str, Any]] = []  # iterators
        self._stores: list[tuple[str, Any]] = []  # what modules save and load by
        self._asked_only: list[tuple[str, str, frozenset[str]]] = []  # what can't be guarded, and who asks for it
        self.iterators: list[Any] = []
        self.advancing: list[tuple[str, Callable[[], Any]]] = []  # iterators, and where they stand
        self.moving: list[tuple[str, Callable[[], Any]]] = []  # generators of random numbers, and their state
        self.fetched: set[str] = set()  # names of attributes that objects in reach ask for, as `attrgetter` does
        self.reducers: list[tuple[str, DistributedDataParallel]] = []  # modules that reduce gradients in buckets
        self.fsdp_states: list[tuple[str, Any]] = []  # what FSDP2 keeps for modules
        self.entered: set[int] = set()  # modules of which only the forward is called, and no hooks
        self.holders: dict[int, Any] = {}  # objects by the identities of the dicts of their attributes
        self.buffers: list[tuple[int, int, str]] = []  # where they begin and end in memory, and their paths
        self._named = Named(self, function)
        self._classes = Classes(self, self._named)
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
            Way.SCHEDULER: self._scheduler,
            Way.NUMPY_GENERATOR: self._numpy_generator,
            Way.THREAD_LOCAL: self._thread_local,
            Way.GENERATOR: self._generator,
            Way.OP: self.op,
            Way.OP_DEFINITION: self._definition,
            Way.CAPTURED: self._captured,
            Way.CAPTURED_LOOPS: self._captured_loops,
            Way.CELL: self._named.cell,
            Way.FSDP: self._of_fsdp,
            Way.BUILT_IN: self._built_in,
            Way.OBJECT: self._any_object,
        }

    def forget(self) -> None:
        """Lets go of everything."""
        super().forget()
        self._objects.clear()
        self._known.clear()
        self.holders.clear()
        self.left = []

    def read(self, path: str, value: Any, depth: int) -> None:
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
        _containers.reached(value)
        known = self._known.get(id(kind))
        (self._reader(kind) if known is None else known[1])(path, value, depth)

    def _reader(self, kind: type) -> _Reader:
        way = way_of(kind)
        reader = self._readers[way] if isinstance(way, Way) else functools.partial(self._refuse, way)
        self._known[id(kind)] = (kind, reader)
        return reader

    def _refuse(self, refused: Refused, path: str, value: Any, depth: int) -> None:
        if refused.asking is None:
            self.unguarded.append((path, refused.why))
        else:
            self._asked_only.append((path, refused.why, refused.asking))

    # -- tensors --------------------------------------------------------------

    def _tensor(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        if id(tensor) in self._arguments:
            if self.visit_once((METADATA, id(tensor))):  # the next call may have another argument
                self.add(METADATA, tensor, True, HOST, path, tensor, self.sharing(path, tensor))
            return
        if not self.visit(tensor):
            return
        if self.add(OWN, tensor, None, HOST, path, tensor):
            self.add(TYPE_OF, tensor, None, HOST, path, tensor)
            self.add(METADATA, tensor, None, HOST, path, tensor, metadata(tensor) + self.memory(path, tensor))
            self._hooks_of(path, tensor, depth)
            self._entries_of_own(path, tensor, depth)
            self._tensor_class(path, tensor, depth)
            self._inside(path, tensor, depth)

    def _inside(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        """The attributes of a gradient, and of what is inside a DTensor; one without any is not held."""
        grad = tensor.grad if tensor.is_leaf else None
        if grad is not None and _introspect.own(grad):
            self.value(f"{path}.grad", grad, depth)
        if isinstance(tensor, DTensor) and _introspect.own(tensor._local_tensor):
            self.value(f"{path}._local_tensor", tensor._local_tensor, depth)

    def _entries_of_own(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        own = _introspect.own(tensor)
        for key, item in list((own or {}).items()):
            if type(key) is str and self.add(DICT_ITEM, own, key, HOST, f"{path}.{key}", item):
                self.value(f"{path}.{key}", item, depth + 1)

    def _tensor_class(self, path: str, tensor: torch.Tensor, depth: int, argument: bool = False) -> None:
        kind = type(tensor)
        if is_library_class(kind):
            self._classes.of_library(kind)
            return
        for name, member, base in _introspect.members(kind):
            if is_library_class(base):
                continue
            if argument:
                self.unguarded.append((f"{path}.{name}", "a slot of a tensor that is an argument"))
                return
            self._member(path, tensor, name, member, depth)
        self._classes.of(kind, depth)

    def _hooks_of(self, path: str, tensor: torch.Tensor, depth: int) -> None:
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(tensor, name, None)
            if hooks is not None:
                self._hooks(f"{path}.hooks", hooks, depth + 1)

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

    def places(self) -> Iterator[tuple[str, int]]:
        """Where the storages of tensors were found first, by their addresses."""
        for storage, (path, _) in self._memory.items():
            yield path, storage

    def tensors_in_reach(self, storages: Set[int], those: Set[int]) -> list[tuple[str, torch.Tensor]]:
        """The tensors that lie in some storages, or whose gradients do, and some more, by their identities; with their
        paths. Those with a graph are left out: they come from a call."""
        if not storages and not those:
            return []
        found: list[tuple[str, torch.Tensor]] = []
        known: dict[str, Any] = {}
        for tensor in self._held_firmly():
            if not issubclass(type(tensor), torch.Tensor) or tensor.grad_fn is not None:
                continue
            storage, grad = _memory.storage_of(tensor), tensor.grad if tensor.is_leaf else None
            if (
                id(tensor) in those
                or storage in storages
                or (grad is not None and _memory.storage_of(grad) in storages)
            ):
                path = self.path_of(tensor) or self._memory.get(storage, ("tensor", 0))[0]
                found.append((unique_path(path, id(tensor), known), tensor))
        return found

    def _held_firmly(self) -> Iterator[Any]:
        """What is in reach by more than weak references: the state keeps it alive."""
        weakly = set(map(id, self.held_weakly))
        return (value for value in self._hold if id(value) not in weakly)

    def optimizers_beyond(self, known: Set[int]) -> list[tuple[str, torch.optim.Optimizer]]:
        """The optimizers in reach that are not known and whose reads can be seen, with their paths."""
        return [
            (self.path_of(value), value)
            for value in self._held_firmly()
            if issubclass(type(value), torch.optim.Optimizer) and id(value) not in known and _reads.is_plain(value)
        ]

    def modules_beyond(self, known: Set[int]) -> list[tuple[str, nn.Module]]:
        """The modules in reach that are neither known nor within others of them, with their paths."""
        found, inside = [], set(known)
        for value in self._held_firmly():
            if issubclass(type(value), nn.Module) and id(value) not in inside:
                found.append((self.path_of(value), value))
                inside.update(id(inner) for _, inner in _modules.within(value))
        return found

    # -- arrays and buffers ---------------------------------------------------

    def _array(self, path: str, value: Any, depth: int) -> None:
        import numpy

        flat = numpy.ndarray.view(value, numpy.ndarray)
        if value.dtype.hasobject:
            if value.dtype != object or not flat.flags.c_contiguous:
                self.unguarded.append((path, "objects in fields or strides of a NumPy array"))
                return
            self.add(BUFFER, value, True, HOST, path, value)
            flat = flat.reshape(-1)
            self.add(ITEMS, flat, None, HOST, path, flat)
            self._inner(path, flat, enumerate(flat.tolist()), flat.size, depth)
        elif not self._buffer(path, value):
            try:
                self._buffer(path, flat.view(numpy.uint8))  # dates, which the protocol of buffers does not know
            except (TypeError, ValueError):
                self.unguarded.append((path, f"a NumPy array of {value.dtype}"))
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
            self.unguarded.append(
                (path, f"{nbytes >> 20} MiB that may change; set array.flags.writeable = False if they do not")
            )
            return True
        return self.add(BUFFER, value, True if constant else None, HOST, path, value) or True

    # -- generators of random numbers -----------------------------------------

    def _generator(self, path: str, value: torch.Generator, depth: int) -> None:
        self._generators.append((path, value))

    def _numpy_generator(self, path: str, value: Any, depth: int) -> None:
        self.moving.append((path, functools.partial(pickle.dumps, value)))
        self._untold(path, value)

    # -- containers -----------------------------------------------------------

    def _collection(self, path: str, value: Any, depth: int) -> None:
        self._items(path, value, depth)
        self.attributes(path, value, depth)

    def _items(self, path: str, value: Any, depth: int) -> None:
        size = _introspect.size(value)
        if issubclass(type(value), set | frozenset) and size > 1:
            self._named.hashes |= not all(hashes_alike(type(item)) for item in _introspect.entries(value))
        if not issubclass(type(value), tuple | frozenset):
            if not self.add(SIZE, value, None, HOST, path, value):
                return
            if size:
                self.add(ITEMS, value, None, HOST, path, value)
        self._inner(path, value, enumerate(_introspect.entries(value)), size, depth)

    def _dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        self._items_of_dict(path, value, depth)
        self.attributes(path, value, depth)

    def _items_of_dict(self, path: str, value: dict[Any, Any], depth: int) -> None:
        size = _introspect.size(value)
        if not self.add(SIZE, value, None, HOST, path, value):
            return
        if size > LARGE:
            self.add(ITEMS, value, True, HOST, path, value)
            self._inner(path, value, dict.items(value), size, depth)
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
        size = _introspect.size(value)
        if not self.add(SIZE, value, None, HOST, path, value):
            return
        if size > LARGE:
            self.add(ITEMS, value, None, HOST, path, value)
            self._inner(path, value, enumerate(list.__iter__(value)), size, depth)
            return
        for i, item in enumerate(list.__iter__(value)):
            subject = f"{path}[{i}]"
            if self.add(LIST_ITEM, value, i, HOST, subject, item):
                self.value(subject, item, depth + 1)

    def _inner(self, path: str, value: Any, items: Any, size: int, depth: int) -> None:
        """What the entries of a container hold: one after the other, or all at once where there are many."""
        if size <= LARGE:
            for i, item in list(items):
                self.value(f"{path}[{i}]", item, depth + 1)
        elif not all(map(_within.never_changes, itertools.chain.from_iterable(items))):
            self._within(path, value, size, depth)

    def _within(self, path: str, value: Any, size: int, depth: int) -> None:
        within = _within.look(value)
        if within is None or not within.whole:
            self._stop(f"{path} has {size} entries, which may change inside")
        if within is None:
            return
        told = (
            self.described(f"{path}({i})", item) + ("" if inside is None else f" of {inside}")
            for i, (item, inside) in enumerate(within.found)
        )
        if not self.add(WITHIN, value, tuple(within.holders), HOST, path, value, all_of(told)):
            return
        self.aliases += [(path, id(item)) for item, _ in within.found if id(item) in self.watched]
        for kind, objects in within.objects.items():
            self._classes.of(kind, depth + 1)
            for each in objects:
                _containers.reached(each)

    def _slice(self, path: str, value: slice, depth: int) -> None:
        for name, item in zip(("start", "stop", "step"), ends(value), strict=True):
            self.value(f"{path}.{name}", item, depth + 1)

    # -- modules, ops and captured functions ----------------------------------

    def _module(self, path: str, module: nn.Module, depth: int) -> None:
        own = _introspect.own(module)
        if own is None:
            return
        self.holders[id(own)] = module
        if isinstance(module, DistributedDataParallel):
            self.reducers.append((path, module))
            self.add(REDUCER, own["reducer"], None, HOST, f"the state of {path}.reducer", None)
        for key, value in list(own.items()):
            subject = f"{path}.{key}"
            if key in DERIVED and isinstance(module, DistributedDataParallel):
                continue
            if key.startswith(_fsdp.REGISTRY):
                continue
            if key in MODULE_STORES:
                self._stores.append((subject, value))
                continue
            if key in MODULE_PARTS and issubclass(type(value), dict):
                self.add(ENTRY_SIZE, own, key, HOST, subject, value)
                if len(value) > 1:  # their order
                    self.add(ITEMS, value, None, HOST, subject, value)
                for name, item in value.items():
                    self.add(DICT_ITEM, value, name, STATE, f"{path}.{name}", item)
                    if issubclass(type(item), nn.Module | torch.Tensor) and (value, name) not in self.carried:
                        self.value(f"{path}.{name}", item, depth)  # children are no hop
            elif issubclass(type(value), dict) and holds_hooks(key):
                if id(module) in self.entered:
                    continue
                self.add(ENTRY_SIZE, own, key, HOST, subject, value)
                if value:
                    self._hooks(subject, value, depth + 1)
            else:
                self._attribute(subject, module, key, value, depth)
        self.add(OWN, module, None, HOST, path, module)
        self.add(TYPE_OF, module, None, HOST, path, module)
        self._classes.of(type(module), depth)
        if issubclass(type(module), torch.jit.ScriptModule):
            self._script(path, module)

    def _script(self, path: str, module: Any) -> None:
        """The attributes of a compiled module, which C++ keeps."""
        concrete = _introspect.own(module).get("_concrete_type")  # type: ignore[union-attr]
        for name in concrete.get_attributes() if concrete is not None else ():
            item = getattr(module, name)
            if issubclass(type(item), torch.Tensor | nn.Module):
                continue
            if not plain(item):
                self.unguarded.append((f"{path}.{name}", "a container in a compiled module"))
            else:
                self.add(ATTRIBUTE, module, name, HOST, f"{path}.{name}", item)

    def _hooks(self, path: str, hooks: Any, depth: int) -> None:
        if not hooks:
            self.add(SIZE, hooks, None, HOST, path, hooks)
            return
        self.add(ITEMS, hooks, True, HOST, path, hooks, str(len(hooks)))  # numbered in each process
        for hook in hooks.values():
            self.value(f"{path}[...]", hook, depth)

    def op(self, path: str, packet: Any, depth: int) -> None:
        name = getattr(packet, "_qualified_op_name", None) or packet._schema.name
        definitions = sys.modules.get("torch._library.custom_ops")
        found = getattr(definitions, "OPDEFS", {}).get(name)
        if found is not None:
            self.value(path, found, depth)
        elif hides_functions(name):
            self.unguarded.append(
                (path, "an op whose gradient or parts are a Python function; torch.library.custom_op names it")
            )

    def _definition(self, path: str, definition: Any, depth: int) -> None:
        """What an op's gradient does; what the op itself does, every replay does anew."""
        for name in OP_PARTS:
            own = vars(definition)
            if name in own and self.add(DICT_ITEM, own, name, HOST, f"{path}.{name}", own[name]):
                self.value(f"{path}.{name}", own[name], depth)

    def _captured(self, path: str, value: Any, depth: int) -> None:
        step = _introspect.class_dict(type(value))["_step"].__get__(value)
        self.value(path, step.function, depth)  # called within the step, as any function

    def _captured_loops(self, path: str, value: Any, depth: int) -> None:
        own = _introspect.own(value) or {}
        if self.add(DICT_ITEM, own, "__wrapped__", HOST, f"{path}.__wrapped__", own["__wrapped__"]):
            self.value(path, own["__wrapped__"], depth)  # whose variables are those of what runs

    def _of_fsdp(self, path: str, value: Any, depth: int) -> None:
        """An object of FSDP2's own: what it does is decided by its attributes. To go from one to the next is no hop."""
        own = _introspect.own(value)
        if own is None:
            return
        if _fsdp.is_state(value):
            self.fsdp_states.append((path, value))
        self.add(TYPE_OF, value, None, HOST, path, value)
        for key, item in list(own.items()):
            guarded = _fsdp.is_guarded(key) and self.add(DICT_ITEM, own, key, HOST, f"{path}.{key}", item)
            if guarded and _fsdp.is_looked_into(key):
                self.value(f"{path}.{key}", item, depth)
        self.add(OWN, value, None, HOST, path, value)
        self._classes.of(type(value), depth)
        if self.visit_once("the functions of FSDP2"):
            for function in _fsdp.functions():
                self._named.borrow(function)

    def _scheduler(self, path: str, value: torch.optim.lr_scheduler.LRScheduler, depth: int) -> None:
        """A scheduler runs live: its numbers are guarded only where the step has read them."""
        many = len(self._read) >= _MOST_READ
        if many or any(value is one for one in self._read) or not _schedulers.is_followed(value):
            self._any_object(path, value, depth)
        else:
            self.schedulers.append((path, value))
            if self._missed:
                self.add(TYPE_OF, value, None, HOST, path, value)
                self._classes.of(type(value), depth)
            own = _introspect.own(value) or {}
            for name in sorted(self._missed - own.keys()):
                self.add(DICT_ITEM, own, name, HOST, f"{path}.{name}", ABSENT)

    # -- objects of Python's own ----------------------------------------------

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
                    self._named.looks_up(text)
                    self.fetched.update(text.split("."))
        if issubclass(kind, types.GeneratorType):
            _position(value)  # makes an object of its frame, which is a part from then on
        if not self.add(REFERENTS, value, None, HOST, path, value):
            return
        for i, item in enumerate(gc.get_referents(value)):
            if is_part(type(item)):
                self.value(f"{path}.parts[{i}]", item, depth + (not issubclass(type(item), FUNCTIONS)))

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
            self._classes.of(type(value), depth)

    def _weak_reference(self, path: str, reference: Any, depth: int) -> None:
        self._weak.append((path, reference, depth))

    def _weakly(self, path: str, reference: Any, depth: int) -> None:
        """What a weak reference refers to, without holding it."""
        found = _introspect.referent(reference)
        text = "gone" if found is None else f"alive, {self.described(f'{path}()', found)}"
        if not self.add(WEAK, reference, None, HOST, path, found, text):
            return
        if found is None or atom(found):
            return
        if id(found) in self.seen:
            return
        own = _introspect.own(found)
        kind = type(found)
        if own is None or not _all_in_attributes(kind):
            self.value(f"{path}()", found, depth + 1)
            return
        self.visit(found)
        self.entries(f"{path}()", own, depth + 1)
        self._classes.of(kind, depth)

    # -- all other objects ----------------------------------------------------

    def _any_object(self, path: str, value: Any, depth: int) -> None:
        if any("__next__" in _introspect.class_dict(base) for base in _introspect.mro(type(value))):
            self.iterators.append(value)
        self._untold(path, value)
        self._object(path, value, depth)

    def _object(self, path: str, value: Any, depth: int, skip: tuple[str, ...] = ()) -> None:
        kind = type(value)
        if is_opaque(kind):
            if has_settings(kind):
                self._settings(path, value, depth)
            if _introspect.own(value) is not None:
                self._named.of_object(path, value, depth)
            return
        own = _introspect.own(value)
        if own is not None:
            if not skip and not self.add(OWN, value, None, HOST, path, value):
                return
            if self.holders.get(id(own), value) is not value:
                self.shared_dicts.add(id(own))
            self.holders[id(own)] = value
            if not skip and len(own) > 1:
                self._objects.append((path, value))
            for key, item in list(own.items()):
                if key not in skip and type(key) is str:
                    self._attribute(f"{path}.{key}", value, key, item, depth)
        for name, member, _ in self._slots_of(kind):
            self._member(path, value, name, member, depth)
        if kind in AS_MADE:
            return
        self.add(TYPE_OF, value, None, HOST, path, value)
        if issubclass(kind, random.Random):
            self.moving.append((path, value.getstate))
        self._classes.of(kind, depth)

    def _attribute(self, subject: str, holder: Any, key: str, item: Any, depth: int) -> None:
        before, kind = self.origin, type(holder)
        if self._leaves(kind):
            self.origin = Attribute(holder, key, subject)
            if (holder, key) in self._unread:
                self.left.append(self.origin)
                self.origin = before
                return
        try:
            own = _introspect.own(holder)
            if is_renewed(kind, key, item):
                self.add(ENTRY_COUNT, own, key, HOST, subject, item)
            elif self.add(DICT_ITEM, own, key, HOST, subject, item):
                self.value(subject, item, depth + 1)
        finally:
            self.origin = before

    def _slots_of(self, kind: type) -> list[tuple[str, Any, type]]:
        known = self._slots.get(id(kind))
        if known is None:
            known = self._slots[id(kind)] = (kind, list(_introspect.members(kind)))
        return known[1]

    def _leaves(self, kind: type) -> bool:
        """Whether attributes of a class's objects may be left without a guard."""
        found = self._plain.get(kind)
        if found is None:
            found = self._plain[kind] = _unread.may_be_left(kind)
        return found

    def attributes(self, path: str, value: Any, depth: int) -> None:
        if type(value) is collections.OrderedDict:
            self.add(OWN, value, None, HOST, f"{path}.__dict__", value)
        elif (
            _introspect.own(value) is not None
            or _introspect.can_change(type(value))
            or type(value) is collections.defaultdict
        ):
            self._object(path, value, depth)

    def _settings(self, path: str, value: Any, depth: int) -> None:
        """What is set in an object of the system's, such as a logger, an event or a future: the rest is its own."""
        own = _introspect.own(value) or {}
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
        made = type(value) in AS_MADE
        if (made or self.add(MEMBER, value, member, HOST, f"{path}.{name}", item)) and item is not ABSENT:
            self.value(f"{path}.{name}", item, depth + 1)

    def _untold(self, path: str, value: Any) -> None:
        """Notes an object that holds what no fact says."""
        kind = type(value)
        hides = self._hiding.get(id(kind))
        if hides is None:
            hides = self._hiding[id(kind)] = _introspect.hides(kind)
        if hides and in_full(value) is None:
            self.untold.append(path)

    def _class(self, path: str, kind: type, depth: int) -> None:
        self._classes.of(kind, depth)
        if type(kind) is not type:
            self._classes.of(type(kind), depth)

    def of_class(self, kind: type, depth: int) -> None:
        self._classes.of(kind, depth)


def _all_in_attributes(kind: type) -> bool:
    """Whether objects of a class hold nothing but the attributes in their dicts."""
    return (
        way_of(kind) in (Way.OBJECT, Way.MODULE)
        and not is_opaque(kind)
        and not _introspect.hides(kind)
        and not any(_introspect.members(kind))
    )


def _constant(array: Any) -> bool:
    """Whether nobody can write to an array of NumPy, unless by saying so first."""
    while _introspect.numpy_array(type(array)):
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
