"""Functions that run: whose code it is, the user's current line, and where they handle errors."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from . import _look
from ._libraries import is_file_of_python
from ._native import c_text

# The slash at the end tells them from packages whose names begin alike.
TORCH = f"{torch.__path__[0]}/"
_ROTE = f"{__file__.rsplit('/', 1)[0]}/"
_lines: dict[tuple[types.CodeType, int], bytes] = {}

# Of the library, these swallow errors.
_SWALLOWING = (contextlib.suppress, contextlib.ExitStack, contextlib.AsyncExitStack)
_MOST_DEPTH = 4  # of managers within managers
_FIRST = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT", "RERAISE", "WITH_EXCEPT_START")


@functools.lru_cache(maxsize=1 << 16)
def is_users_own(code: types.CodeType) -> bool:
    """Whether code is neither torch's, nor Rote's, nor Python's own."""
    name = code.co_filename
    return not (name.startswith((TORCH, _ROTE, "<frozen")) or is_file_of_python(name))


def user_line() -> bytes:
    """The innermost line of the user's own code, as ``file:line``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_own(frame.f_code):
            key = (frame.f_code, frame.f_lineno)
            line = _lines.get(key)
            if line is None:
                line = _lines[key] = c_text(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            return line
        frame = frame.f_back
    return b""


# For `with` statements by their functions and places: whether their manager may swallow errors.
Managers = dict[tuple[types.CodeType, int], bool]


def handler_since(end: types.CodeType, known: Managers) -> str | None:
    """``file:line`` of the innermost call, of those since one of ``end``, that lies where a function of the user's
    handles errors: under ``except``, a ``finally`` that returns, or a ``with`` that may swallow them. What it finds
    of these is ``known`` to later calls."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        if is_users_own(frame.f_code) and _handles(frame, known):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _handles(frame: types.FrameType, known: Managers) -> bool:
    for start, stop, catches in _regions(frame.f_code):
        if not start <= frame.f_lasti < stop:
            continue
        key = (frame.f_code, start)
        if not catches and key not in known:
            known[key] = _swallows(_in_frame(frame))
        if catches or known[key]:
            return True
    return False


@functools.lru_cache(maxsize=4096)
def _regions(code: types.CodeType) -> list[tuple[int, int, bool]]:
    """Ranges of instructions under a handler, and whether it is one that catches by itself: else it is that of a
    ``with`` statement, whose manager decides."""
    if not code.co_exceptiontable:
        return []
    instructions = list(dis.get_instructions(code))
    at = {each.offset: i for i, each in enumerate(instructions)}
    regions = []
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        first = at.get(entry.target)
        if first is None or instructions[first].opname != "PUSH_EXC_INFO":
            continue  # tidies up behind another handler
        name = next((each.opname for each in instructions[first:] if each.opname in _FIRST), "RERAISE")
        if name != "RERAISE":  # `finally` raises again
            regions.append((entry.start, entry.end, name != "WITH_EXCEPT_START"))
    return regions


def _in_frame(frame: types.FrameType) -> Iterator[Any]:
    code = frame.f_code
    values = [frame.f_locals.get(name) for name in (*code.co_varnames, *code.co_freevars)]
    return _named(code, (frame.f_globals, frame.f_builtins), values)


def _in_function(function: types.FunctionType) -> Iterator[Any]:
    cells = []
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # an empty one
            cells.append(cell.cell_contents)
    return _named(function.__code__, (function.__globals__,), cells)


def _named(code: types.CodeType, spaces: tuple[dict[str, Any], ...], values: list[Any]) -> Iterator[Any]:
    """``values``, what a function's code names in ``spaces``, and what it may name of those."""
    names = code.co_names
    for value in [*values, *(space[name] for name in names for space in spaces if name in space)]:
        yield value
        own: list[Mapping[str, Any]] = [_look.class_dict(kind) for kind in _look.mro(type(value))]
        if type(value) is types.ModuleType:
            own = [vars(value)]
        yield from (space[name] for space in own for name in names if name in space)


def _swallows(found: Iterator[Any], depth: int = 0) -> bool:
    """Whether something there may be a manager that swallows errors, or make one."""
    return any(_may_swallow(each, depth) for each in found)


def _may_swallow(found: Any, depth: int) -> bool:
    if type(found) is types.FunctionType:
        made = vars(found).get("__wrapped__")
        if type(made) is not types.FunctionType or not made.__code__.co_flags & inspect.CO_GENERATOR:
            return False
        return any(
            catches or depth == _MOST_DEPTH or _swallows(_in_function(made), depth + 1)
            for _, _, catches in _regions(made.__code__)
        )
    kind = found if issubclass(type(found), type) else type(found)
    for base in _look.mro(kind):
        if base in _SWALLOWING:
            return True
        leave = _look.class_dict(base).get("__exit__")
        if leave is not None:
            own = type(leave) is types.FunctionType and is_users_own(leave.__code__)
            return own and not _returns_nothing(leave.__code__)
    return False


@functools.lru_cache(maxsize=4096)
def _returns_nothing(code: types.CodeType) -> bool:
    """Whether a function returns ``None`` or ``False``, wherever it ends."""
    instructions = list(dis.get_instructions(code))
    for before, each in itertools.pairwise(instructions):
        if each.opname == "RETURN_VALUE" and not (before.opname == "LOAD_CONST" and before.argval in (None, False)):
            return False
        if each.opname == "RETURN_CONST" and each.argval not in (None, False):
            return False
    return True
