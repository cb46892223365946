"""The code that a call of a step runs, and what of it a walk has followed."""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ._bridge import bridge
from ._libraries import is_file_of_python, is_made_by_library

Codes = dict[int, types.CodeType]  # by their addresses: equal code of two functions may read other globals

_SPECS = [importlib.util.find_spec(name) for name in ("torch", "numpy", "rote")]  # NumPy may not be there
_LIBRARIES = tuple(f"{Path(spec.origin).parent}/" for spec in _SPECS if spec is not None and spec.origin)


# The thread of tqdm that looks after stalled bars runs beside any step, with these locks for what bars print.
_MONITOR, _OF_BARS = "/tqdm/_monitor.py", "/tqdm/std.py"
_LOCKS = ("TqdmDefaultWriteLock.", "tqdm.get_lock")


def _is_of_monitor(code: types.CodeType) -> bool:
    file = code.co_filename
    return file.endswith(_MONITOR) or (file.endswith(_OF_BARS) and code.co_qualname.startswith(_LOCKS))


def _is_of_library(code: types.CodeType) -> bool:
    file = code.co_filename
    if code.co_name == "<module>":  # text that is run, which the walk reads as a constant, or an import
        return True
    if _is_of_monitor(code):
        return True
    return file.startswith(_LIBRARIES) or is_file_of_python(file) or file.startswith("<frozen ")


# Code made of text, by whether libraries have made all of it; held so that their addresses stay theirs.
_of_libraries: Codes = {}
_of_others: Codes = {}


def _generated(codes: Codes) -> Codes:
    """Code that libraries have made of text: methods of their dataclasses, and of named tuples."""
    known = _of_libraries.keys() | _of_others.keys()
    new = {address: code for address, code in codes.items() if code.co_filename == "<string>" and address not in known}
    for function in (others := functions_of(new)):
        code = function.__code__
        whose = all(is_made_by_library(other) for other in others if other.__code__ is code)
        (_of_libraries if whose else _of_others)[id(code)] = code
    return _of_libraries


class ExecutedCode:
    """What Python runs while a ``with`` block lasts, on all threads; code of libraries apart."""

    running = False
    """Whether such a block is under way."""

    def __init__(self) -> None:
        self.codes: Codes | None = None
        """The code; None where not all of it was seen: another profiler listened."""
        self.interrupted = False
        """Whether a thread came in between that was not seen."""
        self._begun = False

    def __enter__(self) -> ExecutedCode:
        if threading.getprofile() is not None:
            return self
        self._begun = bridge().calls_begin()
        if self._begun:
            ExecutedCode.running = True
            threading.setprofile(self._joins)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._begun:
            return
        self._begun = ExecutedCode.running = False
        threading.setprofile(None)
        codes = bridge().calls_end()
        self.interrupted = codes is None
        if codes is not None:
            found = {id(code): code for code in codes if not _is_of_library(code)}
            generated = _generated(found)
            self.codes = {address: code for address, code in found.items() if address not in generated}

    def _joins(self, frame: types.FrameType, event: str, arg: Any) -> None:
        """At the first event of a thread that was started meanwhile."""
        sys.setprofile(None)
        if self._begun:
            bridge().calls_join()


def _with_inner(codes: Iterable[types.CodeType]) -> Codes:
    """Code, with what is defined in it."""
    found: Codes = {}
    left = list(codes)
    while left:
        code = left.pop()
        if id(code) not in found:
            found[id(code)] = code
            left += [inner for inner in code.co_consts if type(inner) is types.CodeType]
    return found


def missing(codes: Codes, functions: list[types.FunctionType]) -> Codes:
    """Of code that ran, what is none of these functions' and not defined in one of them."""
    followed = _with_inner(function.__code__ for function in functions)
    return {address: code for address, code in codes.items() if address not in followed}


def functions_of(codes: Codes) -> list[types.FunctionType]:
    """All functions of this code."""
    found = gc.get_referrers(*codes.values()) if codes else []
    functions = [each for each in found if type(each) is types.FunctionType and id(each.__code__) in codes]
    return sorted(functions, key=lambda function: (function.__module__ or "", function.__qualname__))
