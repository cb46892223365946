"""Which code and objects belong to the user, and which to a library."""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import types

from . import _introspect

PACKAGES = tuple(f"{sysconfig.get_path(name)}/" for name in ("purelib", "platlib"))
"""Where packages are installed."""
_OWN = os.path.dirname(__file__) + os.sep
_INSTALLED = frozenset({"site-packages", "dist-packages"})
_ROOTS = ("torch", "numpy", "rote", "typing", "builtins")
_NAMES_OF_STDLIB = frozenset(sys.stdlib_module_names)
_STDLIB = str(types.__file__).rsplit("/", 1)[0] + "/"
_known: dict[int, type] = {}  # classes of libraries, which stay


@functools.lru_cache(maxsize=4096)
def _library(module: str) -> bool:
    root = module.split(".")[0]
    return root in _ROOTS or (root in _NAMES_OF_STDLIB and _is_of_python(root))


def _is_of_python(root: str) -> bool:
    """Whether a Python module is the standard library's, not one of a script's that has its name."""
    module = sys.modules.get(root)
    file = None if module is None else (_introspect.own(module) or {}).get("__file__")
    return root != "__main__" and module is not None and (type(file) is not str or is_file_of_python(file))


def is_file_of_python(file: str) -> bool:
    """Whether a file is one of Python's standard library."""
    return file.startswith(_STDLIB) and "site-packages" not in file


def is_own_file(file: str) -> bool:
    """Whether a file is the user's: none of an installed package, of Python or of Rote."""
    if file.startswith((*PACKAGES, _OWN)) or is_file_of_python(file):
        return False
    return _INSTALLED.isdisjoint(file.split(os.sep))


def is_library_module(module: object, name: str) -> bool:
    """Whether a Python module, or what stands in its place, is torch's, NumPy's, Rote's or Python's own: not one that
    a script has made and called so."""
    return _library(name) and (type(module) is not types.ModuleType or sys.modules.get(name) is module)


def is_library_function(function: types.FunctionType) -> bool:
    """Whether a function is a library's: its globals are a library's. What it says of itself may be what
    ``functools.wraps`` has made it say."""
    own = function.__globals__
    name = own.get("__name__")
    return type(name) is str and _library(name) and _introspect.own(sys.modules.get(name)) is own


def is_library_class(kind: type) -> bool:
    """Whether a class is a library's: it says so, and has functions of the module that it names, or of libraries
    only. Text that runs without a name of its own makes classes that say ``builtins``."""
    name = _introspect.module_of(kind)
    if not _library(name):
        return False
    if id(kind) not in _known:
        if not _is_found(kind, name):
            return False
        functions = [each for each in _introspect.class_dict(kind).values() if type(each) is types.FunctionType]
        own = _introspect.own(sys.modules.get(name))
        if not any(each.__globals__ is own for each in functions) and not all(map(is_made_by_library, functions)):
            return False
        _known[id(kind)] = kind
    return True


def _is_found(kind: type, module: str) -> bool:
    """Whether a class of Python's standard library is where it says. `make_dataclass` and `types.new_class` make some
    for scripts that say `types`."""
    if (
        module.split(".")[0] not in _NAMES_OF_STDLIB
        or not _introspect.can_change(kind)
        or "<" in _introspect.name(kind)
    ):
        return True
    found: object = sys.modules.get(module)
    for part in _introspect.name(kind).split("."):
        found = (_introspect.class_dict(found) if isinstance(found, type) else _introspect.own(found) or {}).get(part)
    return found is kind


def is_made_by_library(function: types.FunctionType) -> bool:
    """Whether a function is a library's, or one that a library has made from a few words: how named tuples are made."""
    made = function.__globals__.get("__name__")
    return is_library_function(function) or (type(made) is str and made.startswith("namedtuple_"))
