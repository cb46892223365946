"""Which instructions of code only run on the way to an ``AssertionError``.

Only the message of the error depends on the values that they read. (pytest
rewrites an ``assert`` so that its message comes from pytest itself, with all
values that this reaches.)
"""

from __future__ import annotations

import dis
import types

_LOADS = {dis.opmap[name] for name in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT") if name in dis.opmap}
_LEAVES = ("RETURN_VALUE", "RETURN_CONST", "RERAISE")
_ALWAYS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT", "JUMP_ABSOLUTE")
_BEGINS = ("STORE_", "POP_", "JUMP_", "NOP", "NOT_TAKEN", "RESUME", "CACHE")


def failing(code: types.CodeType) -> frozenset[int]:
    """The offsets of these instructions, of nested code none."""
    if not _names_the_error(code):
        return frozenset()
    instructions = list(dis.get_instructions(code))
    raising = _leading(instructions, {i for i, each in enumerate(instructions) if each.opname == "RAISE_VARARGS"})
    errors = {
        i
        for i, each in enumerate(instructions)
        if i in raising and _is_error(each) and i and instructions[i - 1].opname.startswith(_BEGINS)
    }
    found = _leading(instructions, errors)
    pending = list(errors)
    while pending:  # from the error to where it is raised
        for after in _next(instructions, pending.pop()):
            if after not in found:
                found.add(after)
                pending.append(after)
    return frozenset(instructions[i].offset for i in found)


def _names_the_error(code: types.CodeType) -> bool:
    return "AssertionError" in code.co_names or not _LOADS.isdisjoint(code.co_code[::2])


def _is_error(instruction: dis.Instruction) -> bool:
    if instruction.opname == "LOAD_ASSERTION_ERROR":
        return True
    return instruction.opname in ("LOAD_GLOBAL", "LOAD_COMMON_CONSTANT") and "AssertionError" in instruction.argrepr


def _next(instructions: list[dis.Instruction], i: int) -> list[int]:
    """The instructions that may come after one, unless that raises."""
    instruction = instructions[i]
    if instruction.opname in (*_LEAVES, "RAISE_VARARGS"):
        return []
    found = [] if instruction.opname in _ALWAYS or i + 1 == len(instructions) else [i + 1]
    if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
        found += [j for j, each in enumerate(instructions) if each.offset == instruction.argval]
    return found


def _leading(instructions: list[dis.Instruction], ends: set[int]) -> set[int]:
    """The instructions from which every way leads to one of these."""
    found = set(ends)
    grows = True
    while grows:
        before = len(found)
        for i in range(len(instructions) - 1, -1, -1):
            after = _next(instructions, i) if i not in found else []
            if after and found.issuperset(after):
                found.add(i)
        grows = len(found) > before
    return found
