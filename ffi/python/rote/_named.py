"""Values that code names: the globals, closures and Python modules behind a function."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import functools
import gc
import importlib.util
import sys
import types
from typing import Any

import torch

from . import _code, _introspect, _policy
from ._code import Names
from ._facts import ABSENT, NAMED, Attribute, plain
from ._libraries import is_library_class, is_library_function, is_library_module
from ._numbers import ATTRIBUTE, CELL, DICT_ITEM, FUNCTION, HOST, OWN, REFERENTS, SIZE, TYPE_OF
from ._policy import (
    DEPTH,
    UNNAMED_METHODS,
    Asked,
    asks,
    is_asked_by_methods,
    is_looked_into,
    is_registry,
    reads_environment,
    runs_text,
)
from ._sources import only_measured
from ._walk import TooMuchError, Walk

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)


@dataclasses.dataclass
class _Absent:
    """What code may ask of a Python module or an object, and what this does not have."""

    name: str
    own: dict[str, Any]
    origin: Attribute | None
    keys: set[str]


class _Measured:
    """Where a function finds what it asks for its length and nothing else."""

    def __init__(self, container: Any, key: str | None) -> None:
        self._container, self._key = container, key

    @property
    def length(self) -> int:
        """Below 0 where there is no list or dict."""
        try:
            found = self._container.cell_contents if self._key is None else self._container.get(self._key)
        except ValueError:  # not filled yet
            return -1
        return len(found) if type(found) in (list, dict) else -1


class Named:
    """The part of a walk that follows names."""

    def __init__(self, walk: Walk, function: Any) -> None:
        self._walk = walk
        self._noted: dict[int, Names] = {}  # by their addresses
        self._asserting: list[tuple[types.FunctionType, int]] = []
        self._borrowed: set[int] = set()
        # Functions that the step has not called, how many hops away, and the attributes that lead to them.
        self._uncalled: list[tuple[types.FunctionType, int, Attribute | None]] = []
        self.attributes: set[str] = set()  # that the code seen so far names
        self.names: set[str] = set()  # these and globals
        self.texts: set[str] = set()  # constants of this code
        self._asks = False
        self._catches = False
        self.hashes = False  # some code may depend on the seed of hashes
        self._computes = False  # some code computes names of attributes
        self.sees_own = False  # some code reads the dict of an object's attributes
        self._asked_of: dict[int, frozenset[str]] = {}  # what closures of libraries name of what they hold
        self._asked: dict[tuple[type, frozenset[str]], tuple[int, set[str]]] = {}  # with how many attributes are named
        self._modules: dict[int, tuple[Any, str, int, Attribute | None]] = {}
        self._entries: set[tuple[int, str]] = set()
        self._absent: dict[int, _Absent] = {}  # by the identities of dicts
        self._parameters: set[str] = set()  # of this code
        self._owners: dict[int, tuple[types.FunctionType, str, int]] = {}  # a function of each dict of globals
        self._handing_out: set[int] = set()  # dicts of globals that their functions ask for
        self._modules_handed_out: int | None = None  # how many hops away code asks for `sys.modules`
        self._globals = getattr(function, "__globals__", None) if type(function) is types.FunctionType else None

    # -- functions ------------------------------------------------------------

    def callable(self, path: str, function: Any, depth: int) -> None:
        """Guards what a function, method or partial can reach."""
        walk = self._walk
        kind = type(function)
        if issubclass(kind, functools.partial):
            self._partial(path, function, depth)
        elif kind is types.MethodType:
            walk.value("self", function.__self__, depth)
            walk.value(path, function.__func__, depth)
        elif kind is types.FunctionType:
            self._function(path, function, depth)
        elif kind is types.BuiltinFunctionType:
            owner = function.__self__
            if owner is not None and not issubclass(type(owner), types.ModuleType | type):
                walk.value(f"{path}.__self__", owner, depth + 1)

    def _partial(self, path: str, function: Any, depth: int) -> None:
        walk = self._walk
        inner, args, keywords = (
            vars(functools.partial)[name].__get__(function) for name in ("func", "args", "keywords")
        )
        walk.add(REFERENTS, function, None, HOST, path or "partial", function)
        walk.value(path, inner, depth)
        for text in (*args, *keywords.values()):
            if type(text) is str:
                self.looks_up(text)
        for i, item in enumerate(args):
            walk.soon(f"{path}args[{i}]", item, depth + 1)
        walk.value(f"{path}keywords", keywords, depth + 1)
        if type(function) is not functools.partial:
            walk.attributes(path, function, depth)
            return
        # To ask for its attributes makes a dict; one that comes later is another part.
        for part in gc.get_referents(function):
            if type(part) is dict and part is not keywords:
                walk.entries(path or "partial", part, depth)

    def _function(self, path: str, function: types.FunctionType, depth: int) -> None:
        walk = self._walk
        own = _introspect.of_function(function)
        label = path or function.__qualname__
        wrapped = own.get("__wrapped__")
        if wrapped is not None:
            walk.add(DICT_ITEM, own, "__wrapped__", HOST, f"{label}.__wrapped__", wrapped)
            walk.value(path, wrapped, depth)
        library = is_library_function(function)
        # A function that the step has not called: for the step to call it, code that ran would have to go another way,
        # by a value that it reads.
        if walk.ran is not None and not library and id(function.__code__) not in walk.ran:
            if own.keys() - {"__wrapped__"}:
                walk.value(label, own, depth + 1)
            walk.add(FUNCTION, function, True, HOST, label, function)
            self._uncalled.append((function, depth, walk.origin))
            self._owners.setdefault(id(function.__globals__), (function, self._place_of(function), depth))
            return
        self._closure(function, depth)  # even of a library's function, it may be the user's
        if own.keys() - {"__wrapped__"}:
            walk.value(label, own, depth + 1)
        elif own:  # a library's decorator makes functions that a script may keep values in
            walk.add(SIZE, own, None, HOST, f"{label}.__dict__", own)
        if library:
            self.borrow(function)
            return
        walk.add(FUNCTION, function, None, HOST, label, function)
        self._defaults(function, depth)
        self._code(function, depth)

    def _defaults(self, function: types.FunctionType, depth: int) -> None:
        walk = self._walk
        for i, item in enumerate(function.__defaults__ or ()):
            walk.value(f"{function.__qualname__}.__defaults__[{i}]", item, depth + 1)
        if function.__kwdefaults__:
            walk.value(f"{function.__qualname__}.__kwdefaults__", function.__kwdefaults__, depth + 1)

    def of_uncalled(self) -> bool:
        """Guards what the defaults and closures of functions hold that the step has not called, where code asks for it.
        False: there was nothing new."""
        if not self._uncalled or not asks(Asked.FUNCTIONS, self.names):
            return False
        uncalled, self._uncalled = self._uncalled, []
        before = self._walk.origin
        for function, depth, origin in uncalled:
            self._walk.origin = origin
            self._closure(function, depth)
            self._defaults(function, depth)
        self._walk.origin = before
        return True

    def _closure(self, function: types.FunctionType, depth: int) -> None:
        asked = _code.names(function.__code__).attributes if is_library_function(function) else frozenset()
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            place = "" if function.__globals__ is self._globals else f"{function.__qualname__}."
            subject = f"{place}closure['{name}']"
            if self._is_measured(function, name, subject, cell, None):
                continue
            self.cell(subject, cell, depth)
            if asked:
                with contextlib.suppress(ValueError):  # not filled yet
                    held = id(cell.cell_contents)
                    self._asked_of[held] = self._asked_of.get(held, frozenset()) | asked

    def cell(self, subject: str, cell: types.CellType, depth: int) -> None:
        """Guards what a cell holds."""
        walk = self._walk
        if not walk.visit_once(id(cell)):
            return
        walk.hold(cell)
        try:
            item = cell.cell_contents
        except ValueError:  # not filled yet
            item = ABSENT
        if walk.add(CELL, cell, None, HOST, subject, item) and item is not ABSENT:
            walk.soon(subject, item, depth + 1)

    def _is_measured(
        self, function: types.FunctionType, name: str, subject: str, container: Any, key: str | None
    ) -> bool:
        """Whether all that a function does with a list or dict is to ask how long it is, as a loop may with the one
        that its batches come from. Then its length is guarded, and not what is in it."""
        is_plain = not is_library_function(function) and "len" not in function.__globals__
        if not is_plain or name not in only_measured(function.__code__):
            return False
        place = _Measured(container, key)
        if place.length < 0:
            return False
        self._walk.hold(container)
        self._walk.add(ATTRIBUTE, place, "length", HOST, f"len({subject})", place.length)
        return True

    def _code(self, function: types.FunctionType, depth: int) -> None:
        if self._walk.ran is None and len(self._walk.functions) >= _policy.MOST_FUNCTIONS:
            raise TooMuchError
        self._walk.functions.append(function)
        self._catches |= _code.names(function.__code__).catches
        self._asserting.append((function, depth))
        self._names(function, depth, "AssertionError" in function.__globals__)

    def _names(self, function: types.FunctionType, depth: int, whole: bool) -> None:
        own = function.__globals__
        names = self.note(function.__code__, whole)
        place = self._place_of(function)
        for name in names.imports:
            self._imported(name, own, names, depth)
        found = names.globals
        if "__name__" in found:  # sys.modules[__name__]
            module = sys.modules.get(own.get("__name__", ""))
            if module is not None and issubclass(type(module), types.ModuleType):
                self.python_module(module, depth)
        if "globals" in names.globals or "__globals__" in names.attributes:
            found = (*found, *sorted(names.texts - set(found)))
            self._handing_out.add(id(own))
        self._owners.setdefault(id(own), (function, place, depth))
        for name in found:
            self._global(function, place, name, depth)

    def _place_of(self, function: types.FunctionType) -> str:
        return "" if function.__globals__ is self._globals else f"{function.__module__}."

    def _global(self, function: types.FunctionType, place: str, name: str, depth: int) -> None:
        walk, own = self._walk, function.__globals__
        subject = f"{place}globals['{name}']"
        if self._is_measured(function, name, subject, own, name) or not walk.visit_once((id(own), name)):
            return
        item = own.get(name, ABSENT)
        if not walk.add(DICT_ITEM, own, name, HOST, subject, item):
            return
        if item is vars(builtins):  # as `__builtins__` of a module that is not __main__
            self.python_module(builtins, depth)
        elif item is ABSENT:
            self._builtin(name, _code.builtins_of(function))
        elif issubclass(type(item), types.ModuleType):
            self.python_module(item, depth)
        elif not (issubclass(type(item), type) and is_library_class(item)):
            walk.soon(subject, item, depth + 1)
        else:
            walk.soon(subject, item, depth)

    def looks_up(self, text: str) -> None:
        """Remembers a text by which an object in reach looks something up: names count wherever they stand."""
        self.attributes.update(text.split("."))
        self.texts.update({text, *text.split(".")})

    def _handed_out(self) -> None:
        """Guards what other code than that which asks for globals, or for `sys.modules`, may look up there."""
        all_are = "__globals__" in self.attributes
        names = self.texts | self._parameters  # `f(**globals())`
        for function, place, depth in list(self._owners.values()):
            own = function.__globals__
            if not all_are and id(own) not in self._handing_out:
                continue
            for name in sorted(names & own.keys()):
                if self._entry(id(own), name):
                    self._global(function, place, name, depth)
            self._lacks(f"{place}globals", own, names - own.keys())
        if self._modules_handed_out is None:
            return
        for name in sorted(self.texts & sys.modules.keys()):
            self._loaded(name, sys.modules[name], self._modules_handed_out)

    def note(self, code: types.CodeType, whole: bool = True) -> Names:
        """Remembers what code names."""
        names = _code.names(code) if whole else _code.names_without_messages(code)
        if id(names) not in self._noted:
            self._noted[id(names)] = names
            self.attributes |= names.attributes
            self.names.update(names.attributes, names.globals)
            self.texts |= names.texts
            self._parameters.update(code.co_varnames[: code.co_argcount + code.co_kwonlyargcount])
            self._asks |= names.asks
            self._catches |= names.catches
            self.sees_own |= names.sees_own
            self._computes |= names.computes
            self.hashes |= names.hashes
        return names

    def _builtin(self, name: str, own: dict[str, Any]) -> None:
        """``own``: Python's, unless the function has its own."""
        if not self._entry(id(own), name):
            return
        item, path = own.get(name, ABSENT), f"builtins.{name}"
        self._walk.add(DICT_ITEM, own, name, HOST, path, item)
        if own is not vars(builtins):
            self._walk.hold(own)
            self._walk.soon(path, item, 1)

    def borrow(self, function: types.FunctionType) -> None:
        """Guards the functions that a library's function, and what it wraps, call by name, as patches replace them."""
        while type(function) is types.FunctionType and id(function) not in self._borrowed:
            self._borrowed.add(id(function))
            self._walk.hold(function)
            self._borrow(function)
            function = function.__dict__.get("__wrapped__")  # type: ignore[assignment]

    def _borrow(self, function: types.FunctionType) -> None:
        names = _code.names(function.__code__)
        own = function.__globals__
        for name in names.globals:
            item = own.get(name)
            if type(item) in _FUNCTIONS and self._entry(id(own), name):
                self._walk.add(DICT_ITEM, own, name, HOST, f"{function.__module__}.{name}", item)
            elif type(item) is types.ModuleType:
                inner = vars(item)
                for key in sorted(key for owner, key in names.pairs if owner == name and key in inner):
                    if type(inner[key]) in _FUNCTIONS and self._entry(id(inner), key):
                        self._walk.add(DICT_ITEM, inner, key, HOST, f"{_introspect.name(item)}.{key}", inner[key])

    def _entry(self, owner: int, key: str) -> bool:
        if (owner, key) in self._entries:
            return False
        self._entries.add((owner, key))
        return True

    # -- Python modules -------------------------------------------------------

    def _imported(self, name: str, own: dict[str, Any], names: Names, depth: int) -> None:
        package = own.get("__package__")
        found = False
        for level in range(4):
            try:
                full = importlib.util.resolve_name("." * level + name, package if type(package) is str else "")
            except (ImportError, ValueError):
                continue
            found |= full in sys.modules
            for part in (full, *(f"{full}.{child}" for child in sorted(names.attributes))):
                module = sys.modules.get(part)
                if module is None:
                    continue
                self._child(part)
                self._loaded(part, module, depth)
        if names.catches and not found and self._entry(id(sys.modules), name):  # the import may fail, and later not
            self._walk.add(DICT_ITEM, sys.modules, name, HOST, f"sys.modules['{name}']", sys.modules.get(name, ABSENT))

    def _loaded(self, name: str, module: Any, depth: int) -> None:
        """Guards what `sys.modules` has under a name, and what that holds."""
        subject = f"sys.modules['{name}']"
        if not is_library_module(module, name) and self._entry(id(sys.modules), name):
            self._walk.add(DICT_ITEM, sys.modules, name, HOST, subject, module)
        if issubclass(type(module), types.ModuleType):
            self.python_module(module, depth)
        else:  # any object may be put in place of a module
            self._walk.soon(subject, module, depth + 1)

    def _child(self, name: str) -> None:
        """Guards what a package has under the name of a module in it, which an import looks up first."""
        package, _, child = name.rpartition(".")
        own = _introspect.own(sys.modules.get(package))
        if package and own is not None and self._entry(id(own), child):
            self._walk.add(DICT_ITEM, own, child, HOST, name, own.get(child, ABSENT))

    def python_module(self, module: types.ModuleType, depth: int) -> None:
        """Guards what code names in a Python module, once all code is known."""
        if depth <= DEPTH and id(module) not in self._modules:
            self._walk.hold(module)
            self._modules[id(module)] = (module, _introspect.name(module), depth, None)

    def of_object(self, path: str, value: Any, depth: int) -> None:
        """Guards of an object of a library's what code names of it, once all code is known."""
        if depth <= DEPTH and id(value) not in self._modules:
            self._walk.hold(value)
            self._modules[id(value)] = (value, path, depth, self._walk.origin)

    def modules(self) -> bool:
        """Guards what code names in Python modules. False: there was nothing new."""
        before = len(self._entries) + len(self._modules)
        if self._catches:  # a failing assertion may not be the end of the step: its message counts too
            asserting, self._asserting = self._asserting, []
            for function, depth in asserting:
                if _code.names(function.__code__) != _code.names_without_messages(function.__code__):
                    self._names(function, depth, True)
                    before = -1
        self._handed_out()
        walk, before_these = self._walk, self._walk.origin
        for module, name, depth, origin in list(self._modules.values()):
            walk.origin = origin
            own = _introspect.own(module)
            if own is not None:
                self._module(module, name, own, depth)
        walk.origin = before_these
        return len(self._entries) + len(self._modules) > before

    def _module(self, module: Any, name: str, own: dict[str, Any], depth: int) -> None:
        walk = self._walk
        library = is_library_module(module, name)
        if not library and self._entry(id(own), ""):
            walk.add(TYPE_OF, module, None, HOST, name, module)
            walk.of_class(type(module), depth)
        asked, absent = set(self.attributes), self._maybe()
        kind = type(module)
        if is_asked_by_methods(kind):
            asked |= self._asked_by_methods(type(module), self._asked_of.get(id(module), frozenset()))
        if not library:
            asked.add("__getattr__")
            if "__getattr__" in own:  # answers for what is absent
                absent |= asked
        for key in sorted(asked & own.keys()):
            item = own[key]
            if runs_text(item) and own is vars(builtins) and not self._names_of_builtins(key):
                continue  # `eval` is the name of a method of modules too
            if not self._entry(id(own), key):
                continue
            subject = f"{name}.{key}"
            if not library:
                if walk.add(DICT_ITEM, own, key, HOST, subject, item):
                    walk.soon(subject, item, depth + 1)
            elif not is_registry(item):
                self._of_library(subject, own, key, item, depth)
            elif item is sys.modules:
                self._modules_handed_out = depth
        inner = own.get("m")
        if issubclass(type(module), torch.backends.PropModule) and type(inner) is types.ModuleType:
            self.python_module(inner, depth)  # what it has is asked of it once `module` has none
            absent |= asked & vars(inner).keys()
        whole = self.sees_own or (self._computes and not issubclass(type(module), types.ModuleType))
        if whole and not library and self._entry(id(own), "*"):
            walk.add(OWN, module, True, HOST, name, module, "")
            for key, item in list(own.items()):
                if type(key) is str and plain(item) and self._entry(id(own), key):
                    walk.add(DICT_ITEM, own, key, HOST, f"{name}.{key}", item)
        self._lacks(name, own, absent - own.keys())

    def _names_of_builtins(self, key: str) -> bool:
        """Whether code says `builtins.eval`, by whatever name the module has there."""
        owners = {owner for names in self._noted.values() for owner, name in names.pairs if name == key}
        every = [function.__globals__ for function, _, _ in self._owners.values()]
        return "builtins" in owners or any(own.get(owner) is builtins for own in every for owner in owners)

    def _lacks(self, name: str, own: dict[str, Any], keys: set[str]) -> None:
        """Guards that there is nothing under some names."""
        known = self._absent.get(id(own))
        if known is None:
            self._absent[id(own)] = _Absent(name, own, self._walk.origin, keys)
        else:
            known.keys |= keys

    def finish(self) -> None:
        """Guards what Python modules and objects do not have, once all names are known."""
        for each in self._absent.values():
            self._walk.lacks(each.name, each.own, each.keys, each.origin)
        self._absent.clear()

    def _asked_by_methods(self, kind: type, named: frozenset[str]) -> set[str]:
        """Names that the methods of a library's class ask for, of those that code calls or may call unnamed; and what
        a library's closure names of the object."""
        known = self._asked.get((kind, named))
        if known is not None and known[0] == len(self.attributes):  # to which names are only added
            return known[1]
        asked = set(named)
        called = {*self.attributes, *UNNAMED_METHODS, *named}
        classes = [_introspect.class_dict(each) for each in _introspect.mro(kind)]
        while called:
            name = called.pop()
            method = next((own[name] for own in classes if name in own), None)
            if type(method) is property:
                method = method.fget
            if type(method) is types.FunctionType:
                names = _code.names(method.__code__).attributes
                called |= names - asked
                asked |= names
        self._asked[kind, named] = (len(self.attributes), asked)
        return asked

    def _maybe(self) -> set[str]:
        """Names that code may ask for where there are none."""
        found = set(self.texts) if self._asks or self._catches else set()
        if self._catches:
            found |= self.attributes
        return found | {"__getattr__"} if found else found

    def _of_library(self, subject: str, own: dict[str, Any], key: str, item: Any, depth: int) -> None:
        walk = self._walk
        if reads_environment(item):
            walk.environment()
        if runs_text(item):
            walk.value(subject, item, depth)
            return
        if issubclass(type(item), types.ModuleType):
            self.python_module(item, depth)
            return
        if not walk.add(DICT_ITEM, own, key, HOST, subject, item):
            return
        kind = type(item)
        if kind is types.FunctionType or issubclass(kind, type):
            walk.soon(subject, item, depth + 1)
        elif kind.__name__ == "OpOverloadPacket":
            walk.op(subject, item, depth)
        elif plain(item) or kind in NAMED:
            return
        elif _introspect.own(item) and is_library_class(kind) and not is_looked_into(kind):
            self.of_object(subject, item, depth)
        else:
            walk.soon(subject, item, depth + 1)
