"""Functions that run: whose code it is, the user's current line, and where they handle errors."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import sys
import types

import torch

from . import _look
from ._libraries import is_file_of_python
from ._native import c_text

# The slash at the end tells them from packages whose names begin alike.
TORCH = f"{torch.__path__[0]}/"
_ROTE = f"{__file__.rsplit('/', 1)[0]}/"
_lines: dict[tuple[types.CodeType, int], bytes] = {}

# Of the library, these swallow errors, or may.
_SWALLOWING = (contextlib.suppress, contextlib.ExitStack, contextlib.AsyncExitStack)
LENIENT = frozenset({kind.__name__ for kind in _SWALLOWING} | {"assertRaises", "assertRaisesRegex"})
_GENERATES = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
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


def handler_since(end: types.CodeType, lenient: bool) -> str | None:
    """``file:line`` of the innermost call, of those since one of ``end``, that lies where a function of the user's or
    of Python's own library handles errors: under ``except``, a ``finally`` that returns, or, if ``lenient``, a
    ``with``; iteration handles those of ``__getitem__``. ``lenient``: whether some manager in reach may swallow
    errors."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        code = frame.f_code
        handles = code.co_name == "__getitem__" or any(
            start <= frame.f_lasti < stop and (catches or lenient) for start, stop, catches in _regions(code)
        )
        if handles and not code.co_filename.startswith((TORCH, _ROTE)):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


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


def is_lenient_class(kind: type) -> bool:
    """Whether a class itself makes managers that may swallow errors."""
    if kind in _SWALLOWING:
        return True
    leave = _look.class_dict(kind).get("__exit__")
    own = type(leave) is types.FunctionType and not leave.__code__.co_filename.startswith((TORCH, _ROTE))
    return own and not _returns_nothing(leave.__code__)  # type: ignore[union-attr]


def is_lenient_function(function: types.FunctionType) -> bool:
    """Whether a function, with ``contextlib.contextmanager``, makes managers that may swallow errors."""
    code = function.__code__
    return bool(code.co_flags & _GENERATES) and any(catches for _, _, catches in _regions(code))


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
