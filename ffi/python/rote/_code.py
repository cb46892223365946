"""The names and the constants in a function's code, nested code included."""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import _assertions, _bytecode
from ._identity import by_identity

# With these, code asks for attributes by their text, or whether there are any.
_ASKING = frozenset(
    {"getattr", "hasattr", "vars", "__dict__", "globals", "locals", "attrgetter", "getattr_static", "dir"}
    | {"__getattribute__"}
)
# These take the name of an attribute as text.
_GETTING = frozenset({"getattr", "hasattr", "attrgetter", "__getattribute__"})
# With these, text is code.
_RUNNING = frozenset({"eval", "exec", "compile"})
# These run what they are given; the others make functions of code.
_RUN_GIVEN = frozenset({"eval", "exec"})
_MAKE_FUNCTIONS = frozenset({"FunctionType", "LambdaType"})
_NO_STEPS = frozenset({"PRECALL", "CACHE", "NOP", "EXTENDED_ARG"})
# With these, text names a Python module.
_IMPORTING = frozenset({"import_module", "__import__", "modules", "reload"})


@dataclass(frozen=True)
class Names:
    """What code names, nested code included."""

    globals: tuple[str, ...]
    attributes: frozenset[str]  # of anything; text counts, getattr may use it
    pairs: frozenset[tuple[str, str]]  # globals, and attributes that are asked of them at once
    imports: tuple[str, ...]
    texts: frozenset[str]
    asks: bool  # for attributes that there may be or not
    catches: bool  # exceptions, as those for attributes that are not there
    sees_own: bool  # the dict of an object's attributes
    computes: bool  # names of attributes
    hashes: bool  # it may go through a set, or asks for a hash: both differ among processes
    runs_text: bool  # constants of its are code too
    runs: frozenset[str]  # by these names, it runs text that is no constant, or code of anywhere


def _identifiers(text: str) -> list[str]:
    parts = text.split(".")
    return parts if all(part.isidentifier() for part in parts) else []


@by_identity
def names(code: types.CodeType) -> Names:
    """The names in code."""
    return _names(code, whole=True)


@by_identity
def names_without_messages(code: types.CodeType) -> Names:
    """The names in code, without those that only the message of an ``AssertionError`` needs."""
    return _names(code, whole=False)


def _names(code: types.CodeType, whole: bool) -> Names:
    found = _Found(whole)
    pending, done = [code], 0
    while pending:
        while pending:
            pending += found.add(pending.pop())
        if found.runs_text:
            for text in found.strings[done:]:
                try:
                    pending.append(compile(text, "<text>", "exec"))
                except (SyntaxError, ValueError, RecursionError, MemoryError):
                    continue
            done = len(found.strings)
    return found.names()


class _Found:
    """What some code names, nested code apart. ``whole``: with what only the message of an ``AssertionError`` needs."""

    def __init__(self, whole: bool) -> None:
        self.strings: list[str] = []
        self._whole = whole
        self._globals: list[str] = []
        self._attributes: set[str] = set()
        self._pairs: set[tuple[str, str]] = set()
        self._imports: list[str] = []
        self._runs: set[str] = set()
        self._catches = self._matches = self._hashes = self._computes = False

    def mentions(self, names: frozenset[str]) -> bool:
        """Whether one of these is a global or an attribute in the code."""
        return not (names.isdisjoint(self._attributes) and names.isdisjoint(self._globals))

    @property
    def runs_text(self) -> bool:
        """Whether the code names ``eval``, ``exec`` or ``compile`` of Python (not ``model.eval()``)."""
        if not _RUNNING.isdisjoint(self._globals):
            return True
        return any(owner == "builtins" and name in _RUNNING for owner, name in self._pairs)

    def add(self, code: types.CodeType) -> list[types.CodeType]:
        """Adds the names and constants of code. Gives the code that is nested in it."""
        self._runs.update(_running(code))
        self._computes |= not _GETTING.isdisjoint(code.co_varnames + code.co_cellvars + code.co_freevars)
        left_out = frozenset() if self._whole else _assertions.failing(code)
        steps = [(name, argument) for at, name, argument in _bytecode.instructions(code) if at not in left_out]
        self._add_names(steps)
        self._add_uses(steps)
        of_constants = _bytecode.OF_CONSTANTS
        stack = [argument for name, argument in steps if name in of_constants] if left_out else list(code.co_consts)
        nested = []
        while stack:
            const = stack.pop()
            if isinstance(const, types.CodeType):
                nested.append(const)
            elif isinstance(const, str):
                self.strings.append(const)
            elif isinstance(const, tuple | frozenset):
                stack.extend(const)
        return nested

    def _add_names(self, steps: list[tuple[str, Any]]) -> None:
        owner, enters = "", False
        for opname, argument in steps:
            owner, before = (argument if opname == "LOAD_GLOBAL" else ""), owner
            if opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL"):
                self._globals.append(argument)
            elif opname in ("STORE_ATTR", "DELETE_ATTR"):
                self._attributes.add(argument)
            elif opname in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM", "LOAD_SUPER_ATTR"):
                self._attributes.add(argument)
                if before:
                    self._pairs.add((before, argument))
            elif opname == "IMPORT_NAME":
                self._imports.append(argument)
            elif opname == "MATCH_CLASS":
                self._matches = True
                self._attributes.add("__match_args__")
            elif opname == "CHECK_EXC_MATCH":
                self._catches = True
            elif opname == "PUSH_EXC_INFO":
                enters = True
            elif enters and opname != "NOP":  # an except that names no exception catches all
                self._catches |= opname == "POP_TOP"
                enters = False

    def _add_uses(self, steps: list[tuple[str, Any]]) -> None:
        constant = asking = False
        for opname, argument in steps:
            self._hashes |= opname == "BUILD_SET" or (constant and opname != "CONTAINS_OP")
            constant = type(argument) is frozenset
            if opname.startswith("CALL"):  # no text before it
                self._computes |= asking
                asking = False
            elif opname == "LOAD_CONST" and type(argument) is str:
                asking = False
            elif type(argument) is str and argument in _GETTING:
                asking = True

    def names(self) -> Names:
        texts = {part for text in self.strings for part in _identifiers(text)}
        texts_of_modules = (text for text in self.strings if _identifiers(text)) if self.mentions(_IMPORTING) else ()
        return Names(
            globals=tuple(dict.fromkeys(self._globals)),
            attributes=frozenset(self._attributes | texts),
            pairs=frozenset(self._pairs),
            imports=tuple(dict.fromkeys((*self._imports, *texts_of_modules))),
            texts=frozenset(texts),
            asks=self._matches or self.runs_text or self.mentions(_ASKING),
            catches=self._catches or self.mentions(frozenset({"suppress"})),
            sees_own=self.mentions(frozenset({"vars", "__dict__", "dir", "__dir__", "getmembers"})),
            computes=self._computes,
            hashes=self._hashes or self.mentions(frozenset({"set", "frozenset", "hash", "__hash__"})),
            runs_text=self.runs_text,
            runs=frozenset(self._runs),
        )


def builtins_of(function: types.FunctionType) -> dict[str, Any]:
    """The built-in names that a function sees. (The types of Python do not always tell of this attribute.)"""
    found: dict[str, Any] = getattr(function, "__builtins__")  # noqa: B009
    return found


def _running(code: types.CodeType) -> Iterator[str]:
    """By which names code runs something of which its constants do not tell what it names."""
    if not _bytecode.says(code, _RUN_GIVEN | _MAKE_FUNCTIONS):
        return
    every = [each for each in dis.get_instructions(code) if each.opname not in _NO_STEPS]
    steps = [each for each in every if each.opname != "PUSH_NULL"]
    for i, step in enumerate(steps):
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME") and step.argval in _RUN_GIVEN:
            given, call = (*steps[i + 1 : i + 3], step, step)[:2]
            literal = given.opname == "LOAD_CONST" and isinstance(given.argval, str)
            if not (literal and call.opname == "CALL" and call.arg == 1):
                yield step.argval
    for i, step in enumerate(every):
        if step.argval in _MAKE_FUNCTIONS and step.opname.startswith("LOAD_"):
            of_module = step.opname == "LOAD_ATTR"
            around = (*every[max(i - 1 - of_module, 0) :][:1], *every[i + 1 : i + 2])  # where a call leaves a place
            if step.opname == "LOAD_METHOD" or "NULL" in step.argrepr or any(s.opname == "PUSH_NULL" for s in around):
                yield step.argval


def _constant(value: object) -> str:
    if isinstance(value, types.CodeType):
        return _text(value)
    if isinstance(value, frozenset):
        return "{" + ",".join(sorted(map(_constant, value))) + "}"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_constant, value)) + ")"
    return f"{type(value).__name__} {value!r}"


def _text(code: types.CodeType) -> str:
    return "\n".join(
        (
            code.co_code.hex(),
            _constant(code.co_consts),
            repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)),
            repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)),
            getattr(code, "co_exceptiontable", b"").hex(),
        )
    )


@by_identity
def digest(code: types.CodeType) -> str:
    """What code does, as text that is the same in every process: no line numbers, files or addresses."""
    return hashlib.blake2b(_text(code).encode(errors="surrogatepass"), digest_size=12).hexdigest()
