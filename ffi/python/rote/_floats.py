"""Floats that remember how they came about.

While a step is recorded, the hyperparameters in ``param_groups`` are replaced
by floats that report arithmetic on them. A number among an op's arguments that
changes from one recording to the next is then explained by the
hyperparameter, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import byref, c_uint32
from typing import Any, cast

from ._native import check, lib

_READ, _CONST, _NEG, _ADD, _SUB, _MUL, _DIV, _POW = range(8)


class Tape:
    """Where the floats of one recording report to; closed when it ends."""

    def __init__(self, session: Any) -> None:
        self.session: Any = session

    def close(self) -> None:
        """Floats that escaped become ordinary ones."""
        self.session = None


class TracedFloat(float):
    """A float that reports what is computed from it."""

    __slots__ = ("_index", "_tape")
    _tape: Tape
    _index: int

    def __neg__(self) -> float:
        return cast(float, _derive(self, _NEG, float.__neg__(self), self, None))

    def __pos__(self) -> float:
        return self

    def __reduce__(self) -> Any:
        return (float, (float.__float__(self),))

    def __deepcopy__(self, memo: Any) -> float:
        return self

    def __copy__(self) -> float:
        return self


def _make(tape: Tape, kind: int, value: float, a: int = 0, b: int = 0, path: str = "") -> TracedFloat:
    index = c_uint32()
    check(lib.rote_record_float(tape.session, kind, a, b, value, path.encode(), byref(index)))
    made = TracedFloat(value)
    made._tape = tape
    made._index = index.value
    return made


def read(tape: Tape, path: str, value: float) -> TracedFloat:
    """A float that was read from the state under ``path``."""
    return _make(tape, _READ, value, path=path)


def _operand(tape: Tape, value: Any) -> int | None:
    if isinstance(value, TracedFloat):
        return value._index if value._tape is tape else None
    if isinstance(value, int | float):
        return _make(tape, _CONST, float(value))._index
    return None


def _derive(self: TracedFloat, kind: int, value: Any, a: Any, b: Any) -> Any:
    if type(value) is not float or self._tape.session is None:  # NotImplemented, a complex power
        return value
    left = _operand(self._tape, a)
    right = 0 if b is None else _operand(self._tape, b)
    if left is None or right is None:
        return value
    return _make(self._tape, kind, value, left, right)


def _binary(name: str, kind: int) -> Callable[[TracedFloat, Any], Any]:
    plain = getattr(float, name)
    reflected = name.startswith("__r")

    def method(self: TracedFloat, other: Any) -> Any:
        value = plain(self, other)
        return _derive(self, kind, value, *((other, self) if reflected else (self, other)))

    method.__name__ = name
    return method


def _pinning(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: TracedFloat, *others: Any) -> Any:
        if self._tape.session is not None:
            lib.rote_record_pin(self._tape.session, self._index)
        return plain(self, *others)

    method.__name__ = name
    return method


for _name, _kind in (("add", _ADD), ("sub", _SUB), ("mul", _MUL), ("truediv", _DIV), ("pow", _POW)):
    for _prefix in ("", "r"):
        _full = f"__{_prefix}{_name}__"
        setattr(TracedFloat, _full, _binary(_full, _kind))
# What the program does with these may depend on the value itself.
for _name in [
    "__eq__",
    "__ne__",
    "__lt__",
    "__le__",
    "__gt__",
    "__ge__",
    "__bool__",
    "__int__",
    "__float__",
    "__abs__",
    "__floordiv__",
    "__rfloordiv__",
    "__mod__",
    "__rmod__",
    "__divmod__",
    "__rdivmod__",
    "__round__",
    "__trunc__",
    "__floor__",
    "__ceil__",
    "__hash__",
    "__str__",
    "__format__",
    "is_integer",
    "hex",
    "as_integer_ratio",
]:
    setattr(TracedFloat, _name, _pinning(_name))
