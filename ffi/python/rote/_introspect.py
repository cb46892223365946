"""Looks into objects without running code of their classes, which may answer anything, raise or change things."""

from __future__ import annotations

import collections
import ctypes
import functools
import gc
import inspect
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from . import _code

_mro_of = type.__dict__["__mro__"].__get__
_dict_of = type.__dict__["__dict__"].__get__
_name_of = type.__dict__["__qualname__"].__get__
_flags_of = type.__dict__["__flags__"].__get__
_DESCRIPTORS = (types.GetSetDescriptorType, types.MemberDescriptorType)
# How an object and a plain namespace of Python look up an attribute.
_PLAIN: tuple[Any, ...] = (object.__getattribute__, types.SimpleNamespace.__getattribute__)
_module_of = type.__dict__["__module__"].__get__
_POINTER = ctypes.sizeof(ctypes.c_void_p)
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # Py_TPFLAGS_HEAPTYPE and _IMMUTABLETYPE

_referent = ctypes.pythonapi.PyWeakref_GetObject if sys.version_info < (3, 13) else None
if _referent is not None:
    _referent.argtypes = [ctypes.py_object]
    _referent.restype = ctypes.c_void_p


def mro(kind: type) -> tuple[type, ...]:
    """A class and its bases in their order."""
    return _mro_of(kind) or (kind,)


def class_dict(kind: type) -> types.MappingProxyType[str, Any]:
    """The attributes of a class itself."""
    found: types.MappingProxyType[str, Any] = _dict_of(kind)
    return found


def flags(kind: type) -> int:
    """The flags of a class."""
    found: int = _flags_of(kind)
    return found


def can_change(kind: type) -> bool:
    """Whether attributes of a class can be set."""
    return bool(_flags_of(kind) & (_HEAP | _IMMUTABLE) == _HEAP)


def sets_plainly(kind: type, attribute: str) -> bool:
    """Whether setting an attribute of a class's objects does nothing else. Modules set parameters, buffers and modules
    in another way: they are no attributes of their own."""
    sets: Any = kind.__setattr__
    module: Any = getattr(sys.modules.get("torch.nn"), "Module", None)
    if sets is not object.__setattr__ and sets is not getattr(module, "__setattr__", None):
        return False
    return not any(hasattr(type(class_dict(base).get(attribute)), "__set__") for base in mro(kind))


def module_of(kind: type) -> str:
    """The name of the Python module that a class is from."""
    found = _module_of(kind)
    return found if type(found) is str else ""


def name(thing: Any) -> str:
    """The name of a class or a Python module."""
    if issubclass(type(thing), type):
        return str(_name_of(thing))
    found = (own(thing) or {}).get("__name__")
    return found if type(found) is str else "a module"


_NOTHING = object()


def own(value: Any) -> dict[Any, Any] | None:
    """The dict of an object's own attributes; None where its class has none."""
    for base in _mro_of(type(value)):
        descriptor = _dict_of(base).get("__dict__")
        if descriptor is not None and type(descriptor) in _DESCRIPTORS:
            found = descriptor.__get__(value)
            return found if issubclass(type(found), dict) else None
    return None


def attribute(holder: Any, name: str) -> Any:
    """An attribute of an object, module or class, if it is there without any code that finds or makes it; of a method
    its function. Otherwise None."""
    return _as_called(inspect.getattr_static(holder, name, None))


def plain_value(holder: Any, name: str) -> Any:
    """What an object or module holds as an attribute, if that is all there is to it: it is found without any code.
    Otherwise ``AttributeError``."""
    kind = type(holder)
    if issubclass(kind, types.ModuleType):
        return dict.__getitem__(vars(holder), name) if name in vars(holder) else _not_there(name)
    reads: Any = kind.__getattribute__
    if reads not in _PLAIN:
        return _not_there(name)
    of_class = next((_dict_of(base)[name] for base in _mro_of(kind) if name in _dict_of(base)), _NOTHING)
    if of_class is not _NOTHING and hasattr(type(of_class), "__get__"):
        return _not_there(name)
    attributes = own(holder) or {}
    for held in (attributes, attributes.get("_modules") or {}):  # as modules hold modules
        if name in held:
            return held[name]
    return _not_there(name) if of_class is _NOTHING else of_class


def found_by_names(function: types.FunctionType, given: Mapping[str, Any], chain: Sequence[str]) -> Any:
    """What names stand for at the begin of a call of a function that takes ``given``, found without any code; None if
    that is not known."""
    code, (name, *more) = function.__code__, chain
    try:
        if name in given:
            found = given[name]
        elif name in code.co_freevars:
            found = (function.__closure__ or ())[code.co_freevars.index(name)].cell_contents
        elif name in (*code.co_varnames, *code.co_cellvars):
            return None
        else:
            found = function.__globals__.get(name)
        for each in more:
            found = plain_value(found, each)
    except (AttributeError, ValueError):
        return None
    return found


def _not_there(name: str) -> Any:
    raise AttributeError(name)


def inherited(holder: Any, owner: Any, name: str) -> Any:
    """The function that ``super()`` finds in the methods of a class, ``owner``, whose first argument is ``holder``;
    None where it finds something else."""
    order = _mro_of(holder if isinstance(holder, type) else type(holder))
    behind = order[order.index(owner) + 1 :] if owner in order else ()
    return next((_as_called(_dict_of(base)[name]) for base in behind if name in _dict_of(base)), None)


def _as_called(found: Any) -> Any:
    """What runs when what an object or a class holds is called as an attribute: None where a descriptor decides."""
    if isinstance(found, staticmethod | classmethod):
        return found.__func__
    is_plain = isinstance(found, types.FunctionType | types.MethodType | functools.partial)
    return found if is_plain or not hasattr(type(found), "__get__") else None


def of_function(function: types.FunctionType) -> dict[str, Any]:
    """The attributes of a function. Asked for them, it makes a dict: this asks only where there is one."""
    known = (function.__globals__, _code.builtins_of(function), function.__kwdefaults__)
    for part in gc.get_referents(function):
        if type(part) is dict and not any(part is each for each in known):
            return function.__dict__
    return {}


def members(kind: type) -> Iterator[tuple[str, Any, type]]:
    """The slots of a class and its bases: name, descriptor, and the class they are from."""
    for base in _mro_of(kind):
        for key, item in _dict_of(base).items():
            if type(item) is types.MemberDescriptorType and key != "__dict__" and type(key) is str:
                yield key, item, base


def hides(kind: type) -> bool:
    """Whether objects of a class hold more than attributes and slots: what only its C code reads."""
    slots = sum(1 for _ in members(kind)) + (kind.__dictoffset__ > 0) + (kind.__weakrefoffset__ > 0)
    return kind.__basicsize__ > object.__basicsize__ + slots * _POINTER


def size(container: Any) -> int:
    """The number of entries, by the container's own class of Python's."""
    for kind in (dict, list, set, frozenset, tuple, collections.deque):
        if issubclass(type(container), kind):
            return kind.__len__(container)
    return len(container)


def entries(container: Any) -> Iterable[Any]:
    """The entries of a list, set, tuple or deque; the keys of a dict."""
    for kind in (collections.OrderedDict, dict, list, set, frozenset, tuple, collections.deque):
        if issubclass(type(container), kind):
            return list(kind.__iter__(container))
    return list(container)


def referent(reference: Any) -> Any:
    """What a weak reference or proxy refers to; None where that is gone."""
    if issubclass(type(reference), weakref.ref):
        return weakref.ref.__call__(reference)
    if _referent is None:  # the method is bound to what the proxy stands for
        try:
            return reference.__init__.__self__
        except ReferenceError:
            return None
    found = _referent(reference)
    return ctypes.cast(found, ctypes.py_object).value if found else None


# The base of NumPy's scalars, once NumPy is there.
_generic: list[type] = []


def numpy_scalar(kind: type) -> bool:
    """Whether a class is one of NumPy's scalars, which never change."""
    if not _generic:
        found = getattr(sys.modules.get("numpy"), "generic", None)
        if not isinstance(found, type):
            return False
        _generic.append(found)
    if not issubclass(kind, _generic[0]):
        return False
    return kind.__module__ == "numpy" and not issubclass(kind, sys.modules["numpy"].void)


def numpy_array(kind: type) -> bool:
    """Whether a class is NumPy's array or inherits from it."""
    array = getattr(sys.modules.get("numpy"), "ndarray", None)
    return isinstance(array, type) and issubclass(kind, array)
