"""What Python says of the library's functions is what the C header says: the number, order and types of arguments."""

import ctypes
import re
from pathlib import Path
from typing import Any

import pytest
from rote import _native

HEADERS = [Path(__file__).parents[2] / "ffi/include" / name for name in ("rote.h", "rote_torch.h")]
NUMBERS = {
    "int": ctypes.c_int,
    "uint8_t": ctypes.c_uint8,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "int64_t": ctypes.c_int64,
    "uint64_t": ctypes.c_uint64,
    "size_t": ctypes.c_size_t,
    "double": ctypes.c_double,
}
# Functions and pointers to functions: result, name, arguments.
DECLARED = re.compile(r"^(?:typedef )?([A-Za-z][\w ]*[ *]+?)(?:\(\*)?([rR]ote\w+)\)?\(([^)]*)\);", re.MULTILINE)
CALLBACKS = {
    "RoteLogCallback": _native.LogCallback,
    "RoteReportCallback": _native.ReportCallback,
    "RoteRuleCallback": _native.RuleCallback,
    "RoteShardingCallback": _native.RuleCallback,
    "RoteCombineCallback": _native.CombineCallback,
    "RoteShowCallback": _native.ShowCallback,
}


def declarations() -> dict[str, tuple[str, list[str]]]:
    """The types of each function's result and arguments, without the names of arguments."""
    text = "\n".join(header.read_text() for header in HEADERS)
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    found = {}
    for result, name, arguments in DECLARED.findall(text):
        listed = [] if arguments.strip() == "void" else [plain(each) for each in arguments.split(",")]
        found[name] = (plain(result + " result"), listed)
    return found


def plain(declared: str) -> str:
    """A declared type without `const`, `struct` and the name of what has it."""
    words = re.sub(r"\b(const|struct)\b", "", declared).replace("*", " * ").split()
    return " ".join(words[:-1])


def fits(declared: str, said: Any) -> bool:
    """Whether a type of C is what Python says it is."""
    if declared in CALLBACKS:
        return said is CALLBACKS[declared]
    if declared in NUMBERS:
        return said is NUMBERS[declared]
    if declared == "void":
        return said is None
    if declared in ("char *", "uint8_t *"):
        return said is ctypes.c_char_p
    inner = declared.removesuffix(" *")
    assert inner != declared, declared
    if issubclass(said, ctypes._Pointer):
        return fits(inner, said._type_)  # type: ignore[attr-defined]
    return said in (ctypes.c_void_p, ctypes.py_object) and inner not in NUMBERS


DECLARATIONS = declarations()


@pytest.mark.parametrize("name", _native._SIGNATURES)
def test_function(name: str) -> None:
    result, arguments = DECLARATIONS[name]
    said_result, said = _native._SIGNATURES[name]
    assert fits(result, said_result), (result, said_result)
    assert len(arguments) == len(said), (arguments, said)
    for declared, kind in zip(arguments, said, strict=True):
        assert fits(declared, kind), (declared, kind)


@pytest.mark.parametrize("name", CALLBACKS)
def test_callback(name: str) -> None:
    result, arguments = DECLARATIONS[name]
    said: Any = CALLBACKS[name]
    # A text that Python gives back goes by its address: ctypes would keep its bytes for good.
    by_address = result == "char *" and said._restype_ is ctypes.c_void_p
    assert by_address or fits(result, said._restype_), (result, said._restype_)
    assert len(arguments) == len(said._argtypes_), (arguments, said._argtypes_)
    for declared, kind in zip(arguments, said._argtypes_, strict=True):
        assert fits(declared, kind), (declared, kind)
