"""The instructions of code with what the code names in them: `dis` tells more of each, and takes some ten times as
long."""

from __future__ import annotations

import dis
import sys
import types
from typing import Any

# Of an instruction by its number: the first is no instruction but a place for the interpreter's own notes.
_CACHE, _EXTENDS = 0, dis.EXTENDED_ARG
_NAMES = dis.opname
# By how many bits the number of a name is shifted, where other bits say more.
_SHIFTED = {"LOAD_GLOBAL": 1, "LOAD_SUPER_ATTR": 2}
if sys.version_info >= (3, 12):
    _SHIFTED["LOAD_ATTR"] = 1
_SHIFTS = {number: _SHIFTED.get(_NAMES[number], 0) for number in dis.hasname}
_CONSTS = frozenset(dis.hasconst)
OF_CONSTANTS = frozenset(_NAMES[number] for number in _CONSTS)
# A small number is a part of the instruction from Python 3.14 on.
_WITHOUT_CONST = frozenset(number for number in _CONSTS if _NAMES[number] == "LOAD_SMALL_INT")

Instruction = tuple[int, str, Any]
"""Its offset, its name, and the name or constant that it is about; of all others, nothing."""


def instructions(code: types.CodeType) -> list[Instruction]:
    """The instructions of code, of nested code none."""
    raw, names, consts = code.co_code, code.co_names, code.co_consts
    found: list[Instruction] = []
    more = 0
    for offset in range(0, len(raw), 2):
        number = raw[offset]
        if number == _CACHE:
            continue
        argument = more | raw[offset + 1]
        if number == _EXTENDS:
            more = argument << 8
            continue
        more = 0
        shift = _SHIFTS.get(number)
        about: Any = None
        if shift is not None:
            about = names[argument >> shift]
        elif number in _CONSTS:
            about = argument if number in _WITHOUT_CONST else consts[argument]
        found.append((offset, _NAMES[number], about))
    return found


def says(code: types.CodeType, words: frozenset[str]) -> bool:
    """Whether a name or a text in code is one of some words, of nested code none."""
    said = (code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
    return any(not words.isdisjoint(each) for each in said) or any(
        type(each) is str and each in words for each in code.co_consts
    )
