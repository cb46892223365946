"""What the walk over Python values reads in code is what `dis` says of it."""

import dis
import inspect
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from rote import _bytecode

MODULES = [
    "torch._tensor",
    "torch.functional",
    "torch.nn.modules.module",
    "torch.optim.adam",
    "dataclasses",
    "argparse",
]
# Of these, `dis` does not always know the constant.
UNKNOWN = ("KW_NAMES",)


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested(const)


def of_dis(code: types.CodeType) -> Iterator[_bytecode.Instruction]:
    for each in dis.get_instructions(code):
        if each.opname not in ("CACHE", "EXTENDED_ARG", *UNKNOWN):
            named = each.opcode in dis.hasname or each.opcode in dis.hasconst
            yield each.offset, each.opname, each.argval if named else None


@pytest.mark.parametrize("name", MODULES)
def test_instructions_are_those_of_dis(name: str) -> None:
    __import__(name)
    file = inspect.getsourcefile(sys.modules[name])
    assert file is not None
    with open(file) as source:
        top = compile(source.read(), file, "exec")
    compared = 0
    for code in nested(top):
        found = [each for each in _bytecode.instructions(code) if each[1] not in UNKNOWN]
        assert repr(found) == repr(list(of_dis(code)))  # the text, since a NaN differs from itself
        compared += len(found)
    assert compared > 500


def many() -> str:
    names = "\n    ".join(f"x = v{i}.a{i}" for i in range(300))  # numbers of names above 255 take two instructions
    return f"def f():\n    {names}\n    return 'a text', 1.5, frozenset((1, 2))\n"


def test_wide_arguments_are_read() -> None:
    code = next(each for each in nested(compile(many(), "<test>", "exec")) if each.co_name == "f")
    found = [about for _, name, about in _bytecode.instructions(code) if name == "LOAD_GLOBAL"]
    assert found.pop() == "frozenset"
    assert found == [f"v{i}" for i in range(300)]


def test_words_are_found_wherever_code_says_them() -> None:
    def names(evaluate: object) -> object:
        return evaluate, torch.tensor, "a text"

    code = names.__code__
    for word in ("evaluate", "tensor", "a text"):
        assert _bytecode.says(code, frozenset({word}))
    assert not _bytecode.says(code, frozenset({"eval"}))
