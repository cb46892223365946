"""What a walk over the values in reach looks into: what it leaves out, refuses, or reads in a way of its own.

Tables, and questions that they answer. No walk changes them.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import dataclasses
import enum
import functools
import gc
import inspect
import itertools
import mmap
import os
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _fsdp, _introspect
from ._bytecode import instructions
from ._code import Names
from ._facts import FUNCTIONS, fixed, plain
from ._libraries import is_library_class

# -- how far a walk goes ------------------------------------------------------

# Hops from the captured function. A call is no hop.
DEPTH = 12
# Of containers with more entries, which entries they hold is guarded, not what these hold.
LARGE = 1024
# Objects that a walk looks at, at most.
MOST = 100_000
# Functions whose code a walk follows as far as it reaches. Where there are more, a call shows which code the step
# runs, and the next walks follow that alone.
MOST_FUNCTIONS = 200
# Bytes of an array that are compared at every call: some 15 GB a second.
BYTES = 64 << 20


# -- how objects are read, by their classes -----------------------------------


class Way(enum.Enum):
    """How an object is read."""

    SLICE = enum.auto()
    WEAK_REFERENCE = enum.auto()
    CLASS = enum.auto()
    CALLABLE = enum.auto()
    DICT = enum.auto()
    LIST = enum.auto()
    COLLECTION = enum.auto()
    CONTEXT_VAR = enum.auto()
    ARRAY = enum.auto()
    UFUNC = enum.auto()
    BUFFER = enum.auto()
    MODULE = enum.auto()
    SCHEDULER = enum.auto()
    NUMPY_GENERATOR = enum.auto()
    THREAD_LOCAL = enum.auto()
    GENERATOR = enum.auto()
    OP = enum.auto()
    OP_DEFINITION = enum.auto()
    CAPTURED = enum.auto()
    CAPTURED_LOOPS = enum.auto()
    CELL = enum.auto()
    FSDP = enum.auto()
    BUILT_IN = enum.auto()
    OBJECT = enum.auto()


@dataclass(frozen=True)
class Refused:
    """An object that is not read: nothing guards what code may see of it."""

    why: str
    asking: frozenset[str] | None = None
    """The attributes by which code sees it; None: any use of it may."""


_Test = Callable[[type], bool]


def _is(*kinds: type) -> _Test:
    return lambda kind: any(kind is each for each in kinds)


def _inherits(*kinds: type) -> _Test:
    return lambda kind: issubclass(kind, kinds)


def _called(*names: str, module: str | None = None) -> _Test:
    return lambda kind: kind.__name__ in names and (module is None or _introspect.module_of(kind) == module)


def _from(*modules: str) -> _Test:
    return lambda kind: _introspect.module_of(kind) in modules


def _from_below(prefix: str) -> _Test:
    return lambda kind: _introspect.module_of(kind).startswith(prefix)


def _fixed_from(*modules: str) -> _Test:
    return lambda kind: _introspect.module_of(kind) in modules and not _introspect.can_change(kind)


# The last is what all classes of ctypes have in common.
_BUFFERS = (bytearray, array.array, memoryview, mmap.mmap, ctypes.Structure.__mro__[1])
_PROXIES = (weakref.ProxyType, weakref.CallableProxyType)
# Classes of Python's own, whose objects point to others without attributes.
_BUILT_IN = ("builtins", "itertools", "functools", "operator", "collections", "_collections", "_functools")
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_ONLY_C_CODE = Refused("what only C code knows")

# The first row whose test a class passes says how its objects are read.
_WAYS: tuple[tuple[_Test, Way | Refused], ...] = (
    (_is(slice), Way.SLICE),
    (_inherits(weakref.ref, *_PROXIES), Way.WEAK_REFERENCE),
    (_inherits(type), Way.CLASS),
    (_inherits(*FUNCTIONS), Way.CALLABLE),
    (_inherits(dict), Way.DICT),
    (_inherits(list), Way.LIST),
    (_inherits(tuple, set, frozenset, collections.deque), Way.COLLECTION),
    (_inherits(contextvars.ContextVar), Way.CONTEXT_VAR),
    (_inherits(contextvars.Context), _ONLY_C_CODE),
    (_from("_asyncio"), _ONLY_C_CODE),
    (_is(weakref.finalize), Refused("what a finalizer holds", frozenset({"peek", "alive", "detach"}))),
    (_introspect.numpy_array, Way.ARRAY),
    (_called("ufunc", module="numpy"), Way.UFUNC),
    (_called("flatiter", "nditer", module="numpy"), Refused("an iterator over a NumPy array")),
    (_inherits(*_BUFFERS), Way.BUFFER),
    (_from("numpy"), Way.BUFFER),
    (_inherits(nn.Module), Way.MODULE),
    (_inherits(torch.optim.lr_scheduler.LRScheduler), Way.SCHEDULER),
    (_from_below("numpy.random"), Way.NUMPY_GENERATOR),
    (_inherits(threading.local), Way.THREAD_LOCAL),
    (_is(torch.Generator), Way.GENERATOR),
    # To enter a lock and leave it does not tell whether it is held.
    (_is(*_LOCKS), Refused("whether a lock is held", frozenset({"locked", "acquire", "acquire_lock", "_is_owned"}))),
    (_called("OpOverload", "OpOverloadPacket"), Way.OP),
    (_called("CustomOpDef"), Way.OP_DEFINITION),
    (_called("Captured", module="rote._captured"), Way.CAPTURED),
    (_called("CapturedLoops", module="rote._capture_loops"), Way.CAPTURED_LOOPS),
    (_is(types.CellType), Way.CELL),
    (_fsdp.is_of_fsdp, Way.FSDP),
    (_fixed_from(*_BUILT_IN), Way.BUILT_IN),
)


def way_of(kind: type) -> Way | Refused:
    """How objects of a class are read, Python modules and tensors apart."""
    return next((way for test, way in _WAYS if test(kind)), Way.OBJECT)


def never_changes(value: Any) -> bool:
    """Whether a value is all that there is to it, though its class is none of atoms."""
    kind = type(value)
    return (kind in (tuple, slice) and fixed(value)) or _introspect.numpy_scalar(kind)


# -- functions and values that are told by themselves -------------------------

_ENVIRONMENT = frozenset(map(id, (os.environ, os.environb, os.getenv, os.getenvb)))
# Entries of Python modules that everything passes through: what they hold is nobody's setting.
_REGISTRIES = frozenset({id(sys.modules), id(sys.path_importer_cache)})


def reads_environment(value: Any) -> bool:
    """Whether a value is one of Python's ways to read environment variables."""
    return id(value) in _ENVIRONMENT


def runs_text(value: Any) -> bool:
    """Whether a value is one of the functions that run what they are given, under whatever name."""
    return value is eval or value is exec


def is_registry(value: Any) -> bool:
    """Whether a value is one of Python's registries, which are not looked into."""
    return id(value) in _REGISTRIES


# What reads or writes memory, or asks where it lies, without an op: a recording sees it as a method of `torch.Tensor`
# or of a storage, and by no other name.
_BASES: dict[type, tuple[str, ...]] = {
    torch._C.TensorBase: (
        *("tolist", "numpy", "apply_", "map_", "map2_", "data_ptr", "const_data_ptr", "_version", "_base"),
        *("storage_offset", "untyped_storage", "_is_view", "is_inference", "_use_count"),
    ),
    torch._C.StorageBase: ("data_ptr", "copy_", "fill_", "resize_"),
}
WITHOUT_OPS = frozenset(name for names in _BASES.values() for name in names)
_BASE_IDS = frozenset(map(id, _BASES))
_RENAMED = {id(vars(base)[name]): name for base, names in _BASES.items() for name in names if name in vars(base)}
_RENAMED[id(torch._C._to_dlpack)] = "to_dlpack"
_UNDER_THEIR_NAMES = frozenset(id(vars(module)) for module in (torch, torch._C, torch.utils.dlpack))
_BOUND_OR_NOT = (types.MethodDescriptorType, types.GetSetDescriptorType, types.BuiltinFunctionType)


def renamed(container: Any, value: Any) -> str | None:
    """What a value is that reads memory without an op, if ``container`` has it under a name of its own."""
    if type(value) in _BOUND_OR_NOT:
        name = _RENAMED.get(id(value))
        owner = getattr(value, "__self__", None)
        if name is None and isinstance(owner, torch._C.TensorBase | torch._C.StorageBase):
            name = value.__name__ if value.__name__ in WITHOUT_OPS else None
        return name if id(container) not in _UNDER_THEIR_NAMES else None
    if id(value) in _BASE_IDS and id(container) not in _UNDER_THEIR_NAMES:
        return str(value.__name__)
    return None


_LOOKING = frozenset(map(id, (inspect.getattr_static, gc.get_objects, gc.get_referents, gc.get_referrers)))


def reads_unseen(value: Any) -> bool:
    """Whether a value reads attributes of objects past what their classes say, under whatever name code has it."""
    if type(value) is types.WrapperDescriptorType:
        return (value.__name__ == "__getattribute__" and value.__objclass__ is object) or value.__name__ == "__get__"
    if type(value) is types.MethodWrapperType:
        owner = value.__self__
        # Of a `__get__`, only that of a `__dict__` leads to attributes that a recording watches.
        is_dict = type(owner) is types.GetSetDescriptorType and owner.__name__ == "__dict__"
        return value.__name__ == "__getattribute__" or (value.__name__ == "__get__" and is_dict)
    return id(value) in _LOOKING


_MAY_REACH_MEMORY = frozenset({*_BOUND_OR_NOT, types.WrapperDescriptorType, types.MethodWrapperType})
_MAY_REACH_MEMORY_IDS = _BASE_IDS | _LOOKING


def reaches_no_memory(value: Any) -> bool:
    """Whether a value is none of those that `renamed` and `reads_unseen` tell of, as most are."""
    return type(value) not in _MAY_REACH_MEMORY and id(value) not in _MAY_REACH_MEMORY_IDS


def without_ops(function: types.FunctionType, names: Names) -> str | None:
    """What a function's code, with these ``names``, names to reach the memory of a tensor past the methods that a
    recording sees, if it does."""
    for base in _BASES:
        if base.__name__ in names.attributes:
            return base.__name__
    said = sorted(WITHOUT_OPS & names.attributes) if "super" in names.globals else []
    return f"super().{said[0]}" if said and not _super_is_no_tensor(function) else None


# What follows the name `super` in code that calls it without arguments.
_CALLED_BARE = ("PRECALL", "CALL", "LOAD_DEREF")


def _super_is_no_tensor(function: types.FunctionType) -> bool:
    """Whether `super` in a function stands for no tensor: it is called without arguments alone, in a method of a class
    that no class of tensors inherits from."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    try:
        kind = cells["__class__"].cell_contents
    except (KeyError, ValueError):
        return False
    if not isinstance(kind, type) or _may_be_tensor(kind):
        return False
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        pending += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        steps = instructions(code)
        for (_, _, name), (_, following, _) in itertools.pairwise([*steps, (0, "", None)]):
            if name == "super" and following not in _CALLED_BARE:
                return False
    return True


def _may_be_tensor(kind: type) -> bool:
    """Whether objects of a class may be tensors."""
    return issubclass(kind, torch.Tensor) or any(map(_may_be_tensor, type.__subclasses__(kind)))


# -- objects of libraries -----------------------------------------------------

# Python modules, with those below them, whose classes' objects are not looked into: of them, what code names is
# guarded.
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
# Of the objects of these, what is set is looked at: levels, flags, names.
# What Python made from the text of a class: nobody alters it afterwards.
AS_MADE = frozenset({dataclasses.Field, types.GenericAlias, types.UnionType})

_SET = ("logging", "threading", "concurrent.futures._base", "multiprocessing.sharedctypes")
# Where a future keeps what has become of it.
OUTCOMES = frozenset({"_result", "_exception"})
# What these hold differs among ranks; they have guards of their own.
_GUARDED_BY_THEMSELVES = (DeviceMesh, dist.ProcessGroup)
# Of objects of a library's class, all of these is guarded, not only what code names.
_LOOKED_INTO = (list, dict, set, frozenset, tuple, collections.deque, nn.Module)


@functools.lru_cache(maxsize=4096)
def _closed(module: str) -> bool:
    return any(module == name or module.startswith(name + ".") for name in _OPAQUE)


def is_opaque(kind: type) -> bool:
    """Whether objects of a class are not looked into."""
    if not _closed(_introspect.module_of(kind)) or not is_library_class(kind):
        return issubclass(kind, torch.utils.data.DataLoader)  # those of accelerate hold the data as PyTorch's do
    return not issubclass(kind, torch.optim.Optimizer) and not _introspect.numpy_array(kind)


def has_settings(kind: type) -> bool:
    """Whether what is set in objects of a class that are not looked into is looked at."""
    return _introspect.module_of(kind) in _SET


def is_renewed(kind: type, key: str, item: Any) -> bool:
    """Whether an attribute holds a container that is empty, and that a step replaces by an empty one: what a scaler of
    gradients notes of optimizers between ``unscale_`` and ``update``."""
    return (
        issubclass(kind, torch.amp.GradScaler)
        and key == "_per_optimizer_states"
        and type(item) is collections.defaultdict
        and not item
    )


def is_setting(key: str, item: Any) -> bool:
    """Whether an attribute of an object with settings is one of these."""
    kind = type(item)
    return plain(item) or has_settings(kind) or kind is list or issubclass(kind, _BUFFERS) or key in OUTCOMES


def is_looked_into(kind: type) -> bool:
    """Whether of an object of a library's class all is guarded, not only what code names."""
    return issubclass(kind, _LOOKED_INTO) or _introspect.numpy_array(kind) or has_settings(kind)


def is_asked_by_methods(kind: type) -> bool:
    """Whether what the methods of a class name of an object counts as what code names of it."""
    return kind is not types.ModuleType and not issubclass(kind, _GUARDED_BY_THEMSELVES) and not has_settings(kind)


# -- objects of Python's own --------------------------------------------------

_NO_PARTS = (types.FrameType, types.TracebackType, types.CodeType, types.GetSetDescriptorType)
_PARTS_LEFT_OUT = (type, types.ModuleType, types.CodeType, types.FrameType)
# Of these, the texts that they are made with are names: of attributes, of globals, of Python modules.
_NAME_ATTRIBUTES = ("attrgetter", "itemgetter", "methodcaller")
_NUMBERS = (bool, int, float, complex)


def has_parts(kind: type) -> bool:
    """Whether objects of one of Python's own classes point to others that count."""
    return not issubclass(kind, _NO_PARTS) and kind is not object


def is_part(kind: type) -> bool:
    """Whether an object of a class counts where one of Python's own points to it."""
    return not issubclass(kind, _PARTS_LEFT_OUT)


def names_attributes(kind: type) -> bool:
    """Whether objects of a class read what they are given the names of."""
    return kind.__name__ in _NAME_ATTRIBUTES


def hashes_alike(kind: type) -> bool:
    """Whether hashes of a class's objects are the same in every process."""
    return kind in _NUMBERS


# -- modules of torch.nn ------------------------------------------------------

# Where a module keeps what it is made of. To go there is no hop.
MODULE_PARTS = ("_parameters", "_buffers", "_modules")
# What nn.Module decides by only where it saves or loads.
MODULE_STORES = frozenset(
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


def holds_hooks(key: str) -> bool:
    """Whether an attribute of a module holds its hooks."""
    return "_hooks" in key or key.startswith("_backward")


# -- ops ----------------------------------------------------------------------

# Namespaces of ops that are PyTorch's own.
_OPS_OF_TORCH = (
    "aten",
    "prim",
    "prims",
    "c10d",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "quantized",
)
# Kernels above those that a replay calls, in PyTorch's own list of an op's kernels.
_PYTHON_KERNEL = re.compile(r"^(CompositeImplicitAutograd|Autograd)\S*: registered at \S*\.py:", re.MULTILINE)
# Attributes of a custom op's definition that are followed; the op itself, every replay does anew.
OP_PARTS = ("_backward_fn", "_setup_context_fn")


def hides_functions(op: str) -> bool:
    """Whether an op without a definition in Python has a gradient or parts that are functions of Python."""
    return op.split("::")[0] not in _OPS_OF_TORCH and bool(_PYTHON_KERNEL.search(torch._C._dispatch_dump(op)))


# -- classes ------------------------------------------------------------------

# What PyTorch calls of a library's class without the user's code naming it.
_METHODS = frozenset({"forward", "__call__", "_call_impl", "step"})
# Methods that code calls without their names.
UNNAMED_METHODS = ("__len__", "__getitem__", "__contains__", "__bool__", "__call__")


def called_methods(kind: type, named: Collection[str]) -> frozenset[str]:
    """Names under which methods of a library's class may be called. ``named``: the attributes that code names."""
    if _introspect.module_of(kind).startswith("torch.distributed."):
        return _METHODS
    return _METHODS.union(name for name in named if not name.startswith("__"))


# -- what is guarded only where code asks for it ------------------------------


class Asked(enum.Enum):
    """What code has to name for it to be guarded."""

    POSITIONS = enum.auto()
    """Where iterators stand."""
    SEEDS = enum.auto()
    """What generators of torch were seeded with."""
    COPIES = enum.auto()
    """What `copyreg` says of classes."""
    ANNOTATIONS = enum.auto()
    """Annotations, by another name."""
    FIELDS = enum.auto()
    """Fields of `dataclasses`, by another name."""
    FUNCTIONS = enum.auto()
    """What the defaults and closures of functions hold that the step has not called."""


# The names that ask.
_ASKING = {
    # With these, code sees where an iterator stands and does not advance it.
    Asked.POSITIONS: frozenset(
        {"length_hint", "__length_hint__", "__reduce__", "copy", "deepcopy", "dumps", "repr", "str"}
    ),
    Asked.SEEDS: frozenset({"initial_seed"}),
    Asked.COPIES: frozenset({"copy", "deepcopy", "dumps", "__reduce_ex__"}),
    Asked.ANNOTATIONS: frozenset({"get_type_hints", "get_annotations"}),
    Asked.FIELDS: frozenset({"asdict", "astuple", "fields", "is_dataclass", "replace"}),
    Asked.FUNCTIONS: frozenset(
        {
            "__defaults__",
            "__kwdefaults__",
            "__closure__",
            "signature",
            "getfullargspec",
            "getcallargs",
            "getclosurevars",
        }
    ),
}


def asks(what: Asked, names: set[str]) -> bool:
    """Whether code asks for something. ``names``: all that it names."""
    return not _ASKING[what].isdisjoint(names)


def asks_for_stores(names: set[str]) -> bool:
    """Whether code saves or loads modules, or names what these decide by then."""
    return any("state_dict" in name or name in MODULE_STORES for name in names)


def asked_of_definitions(attributes: set[str], names: set[str]) -> set[str]:
    """The attributes of functions and classes that code asks for, by their names or others."""
    asked = set(attributes)
    if asks(Asked.FIELDS, names):
        asked.add("__dataclass_fields__")
    if asks(Asked.ANNOTATIONS, names):
        asked.add("__annotations__")
    return asked
