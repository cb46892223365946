"""Floats that remember how they were computed.

While a step is recorded, hyperparameters in ``param_groups`` are replaced by
floats that report arithmetic on them. So are numbers that an optimizer reads
from tensors of its state, such as step counters. This is done only if they reach
no code whose use of them is unseen (:mod:`._uses`). A number among an op's
arguments may change from one recording to the next. It is then explained by a
hyperparameter or by such a tensor, or refused.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import sys
import types
from collections.abc import Callable
from ctypes import byref, c_double, c_uint32
from typing import Any, cast

import torch

from . import _containers
from ._native import c_text, check, lib
from ._numbers import (
    COMPARE_EQUAL,
    COMPARE_LESS,
    COMPARE_LESS_OR_EQUAL,
    FLOAT_ADD,
    FLOAT_CONST,
    FLOAT_DIV,
    FLOAT_MUL,
    FLOAT_NEG,
    FLOAT_POW,
    FLOAT_READ,
    FLOAT_SUB,
    NO_INDEX,
)
from ._returns import Read
from ._sources import Position, position_in
from ._uses import is_followed

_EXACT = 1 << 53  # integers beyond this are not all floats
_DEEP = 16  # levels of a result


class Tape:
    """Where the floats of one recording report to; closed when it ends."""

    def __init__(self, session: Any, proven: frozenset[types.CodeType], refuse: Callable[..., None]) -> None:
        self.session: Any = session
        self.proven = proven
        #: Where floats of arguments are combined with other numbers than tensors, by file and position.
        self.places: frozenset[tuple[str, Position]] = frozenset()
        self.refuse = refuse
        self.made: list[TracedFloat] = []

    def close(self) -> None:
        """Floats that escaped become ordinary ones: they report nothing any more, and where the step has stored
        them there are plain ones."""
        self.session = None
        escaped = []
        while self.made:
            one = self.made.pop()
            if sys.getrefcount(one) > 2:  # this name, and the argument
                escaped.append(one)
        if escaped:
            _replace(escaped)


class TracedFloat(float):
    """A float that reports what is computed from it."""

    __slots__ = ("_index", "_of_argument", "_of_tensor", "_plain", "_tape")
    __array_ufunc__ = None  # NumPy would read it unseen, and gives way
    _tape: Tape
    _index: int
    _of_argument: bool  # whether it depends on an argument of the step
    _of_tensor: bool  # whether it depends on what a tensor holds
    _plain: float  # what it stands for, which may be NumPy's

    def __getattr__(self, name: str) -> Any:
        """Of one that other code has made, as ``type(rate)(0.1)`` does: it stands for itself."""
        if name not in TracedFloat.__slots__:
            raise AttributeError(f"'float' object has no attribute '{name}'")
        here = {"_tape": _CLOSED, "_of_argument": False, "_of_tensor": False, "_index": 0}
        return float.__pos__(self) if name == "_plain" else here[name]

    def __neg__(self) -> float:
        return cast(float, _derive(self, FLOAT_NEG, float.__neg__(self), self, None, sys._getframe(1)))

    def __pos__(self) -> float:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        _pin(self)
        return type(self._plain), (self._plain,)

    def __deepcopy__(self, memo: Any) -> float:
        _pin(self)
        return self._plain

    def __copy__(self) -> float:
        _pin(self)
        return self._plain

    @property
    def real(self) -> float:
        _pin(self)
        return self._plain

    @property
    def imag(self) -> float:
        return 0.0

    def conjugate(self) -> float:
        _pin(self)
        return self._plain


_CLOSED = Tape(None, frozenset(), lambda *_: None)


def _replace(escaped: list[TracedFloat]) -> None:
    """Puts plain floats in the place of traced ones, in dicts, lists and attributes; where a tuple has one, in what
    has the tuple."""
    for holder in gc.get_referrers(*escaped):
        if holder is escaped or isinstance(holder, types.FrameType):
            continue
        if type(holder) is tuple:
            for outer in gc.get_referrers(holder):
                _put(outer)
        else:
            _put(holder)


def _put(holder: Any) -> None:
    with contextlib.suppress(Exception):  # of classes that have methods of their own
        _put_into(holder)


def _put_into(holder: Any) -> None:
    entries = holder if isinstance(holder, dict | list) else getattr(holder, "__dict__", None)
    if isinstance(entries, dict):
        for key, value in list(entries.items()):
            if (plain := _plain(value)) is not value:
                entries[key] = plain
    elif isinstance(entries, list):
        entries[:] = map(_plain, entries)


def _plain(value: Any) -> Any:
    if isinstance(value, TracedFloat):
        return value._plain
    if type(value) is tuple:
        parts = tuple(map(_plain, value))
        return value if all(map(operator.is_, parts, value)) else parts
    return value


def in_result(value: Any) -> Read | None:
    """What gives a hyperparameter, or a number that follows from some, as a result: a tensor that an op makes of it."""
    if not isinstance(value, TracedFloat) or value._of_tensor or value._tape.session is None:
        return None
    if type(value._plain) is not float:
        return None
    return Read(torch.ones((), dtype=torch.float64, device="cpu").mul(value), value._plain)


def returned(value: Any, depth: int = 0) -> Any:
    """What a step returns, with plain floats in its tuples (lists and dicts get them when the tape is closed): what
    they depend on must not vary."""
    if isinstance(value, TracedFloat):
        _pin(value)
        return value._plain
    if depth == _DEEP:
        return value
    if type(value) not in (tuple, list, dict):
        for each in _containers.held(value) or ():
            returned(each, depth + 1)
        return value
    parts = [returned(each, depth + 1) for each in (value.values() if type(value) is dict else value)]
    return tuple(parts) if type(value) is tuple and not all(map(operator.is_, parts, value)) else value


def _make(
    tape: Tape, kind: int, plain: float, a: int = 0, b: int = 0, path: str = "", of_tensor: bool = False
) -> TracedFloat:
    made = _made(tape, _index(tape, kind, float(plain), a, b, path), plain)
    made._of_tensor = of_tensor
    return made


def _index(tape: Tape, kind: int, value: float, a: int = 0, b: int = 0, path: str = "") -> int:
    """The number of a float that is followed from now on."""
    index = c_uint32()
    check(lib.rote_record_float(tape.session, kind, a, b, value, c_text(path) if path else b"", byref(index)))
    return index.value


def _made(tape: Tape, index: int, plain: float) -> TracedFloat:
    made = TracedFloat(plain)
    made._tape = tape
    made._plain = plain
    made._of_argument = made._of_tensor = False
    tape.made.append(made)
    made._index = index
    return made


def read(tape: Tape, path: str, value: float) -> TracedFloat:
    """A float that was read from the state under ``path``."""
    return _make(tape, FLOAT_READ, value, path=path)


def argument(tape: Tape, path: str, value: float) -> TracedFloat:
    """A float that the step has taken as an argument."""
    made = read(tape, path, value)
    made._of_argument = True
    return made


def in_tensor(tape: Tape, tensor: torch.Tensor) -> TracedFloat | None:
    """The number in a tensor, if Rote knows how it came about."""
    index, value = c_uint32(), c_double()
    check(lib.rote_record_item(tape.session, tensor, byref(index), byref(value)))
    if index.value == NO_INDEX:
        return None
    made = _made(tape, index.value, value.value)
    made._of_tensor = True
    return made


def is_of_tensor(value: Any) -> bool:
    """Whether a number follows from what a tensor holds."""
    return isinstance(value, TracedFloat) and value._of_tensor


def plain_of(value: Any) -> float | None:
    """The plain float behind a traced one."""
    return float(value._plain) if isinstance(value, TracedFloat) else None


def _pin(traced: TracedFloat) -> None:
    """More than arithmetic is done with a float: what it depends on must not vary."""
    if traced._tape.session is None:
        return
    if traced._of_tensor:
        traced._tape.refuse(
            "Tensor.item",
            "reads a number from a tensor and uses it for more than arithmetic and comparisons: a plan cannot hold the "
            "host's use of the value",
            "return the tensor and read it outside the captured function, or compute with tensors",
        )
    lib.rote_record_pin(traced._tape.session, traced._index)


def check_not_zero(traced: TracedFloat) -> None:
    """A replay begins only if a float is not 0."""
    tape = traced._tape
    if tape.session is not None:
        zero = _index(tape, FLOAT_CONST, 0.0)
        check(lib.rote_record_compared(tape.session, COMPARE_EQUAL, traced._index, zero, False))


def _operand(tape: Tape, value: Any) -> int | None:
    if isinstance(value, TracedFloat):
        return value._index if value._tape is tape else None
    return _index(tape, FLOAT_CONST, float(value))


def _derive(self: TracedFloat, kind: int, value: Any, a: Any, b: Any, by: types.FrameType) -> Any:
    tape = self._tape
    traced = [each for each in (a, b) if isinstance(each, TracedFloat)]
    of_argument = any(each._of_argument for each in traced)
    if type(value) is not float or tape.session is None or not _is_followed(tape, by, of_argument):
        for each in traced:
            _pin(each)  # a complex power, or code that was not expected to come by it
        return value
    left = _operand(tape, a)
    right = 0 if b is None else _operand(tape, b)
    if left is None or right is None:
        _pin(self)
        return value
    like = next((each for each in (a, b) if isinstance(each, TracedFloat) and type(each._plain) is not float), None)
    of_tensor = is_of_tensor(a) or is_of_tensor(b)
    made = _make(tape, kind, value if like is None else type(like._plain)(value), left, right, of_tensor=of_tensor)
    made._of_argument = of_argument
    return made


def _is_followed(tape: Tape, frame: types.FrameType, of_argument: bool) -> bool:
    """Whether what becomes of a number that a frame computes now is known."""
    if not is_followed(frame.f_code, tape.proven):
        return False
    return not of_argument or (frame.f_code.co_filename, position_in(frame)) in tape.places


def _binary(name: str, kind: int) -> Callable[[TracedFloat, Any], Any]:
    reflected = name.startswith("__r")
    plain = getattr(float, name)
    apply = getattr(operator, name.replace("__r", "__", 1) if reflected else name)

    def method(self: TracedFloat, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented  # which gives the number to an op
        if type(other) in (float, int, bool, TracedFloat):
            with_numpy = type(self._plain) is not float or type(_plain(other)) is not float
            try:
                value = plain(self, other)
            except ArithmeticError:
                if not with_numpy:
                    raise
                value = None  # NumPy warns
            if type(value) is float or not with_numpy:
                left, right = (other, self) if reflected else (self, other)
                return _derive(self, kind, value, left, right, sys._getframe(1))
        _pin(self)
        if isinstance(other, TracedFloat):
            _pin(other)
            other = other._plain
        return apply(other, self._plain) if reflected else apply(self._plain, other)

    method.__name__ = name
    return method


def _comparing(name: str, how: int, exchanged: bool, negated: bool) -> Callable[..., Any]:
    """A comparison. A replay repeats it, and must find the same."""
    pinned = _pinning(name)
    plain = getattr(float, name)
    apply = getattr(operator, name)

    def method(self: TracedFloat, other: Any) -> Any:
        exact = type(other) in (float, bool, TracedFloat) or (type(other) is int and abs(other) <= _EXACT)
        tape = self._tape
        if not (exact and tape.session is not None and is_followed(sys._getframe(1).f_code, tape.proven)):
            return pinned(self, other)
        operand = _operand(tape, other)
        if operand is None:
            return pinned(self, other)
        holds = plain(self, other)
        a, b = (operand, self._index) if exchanged else (self._index, operand)
        check(lib.rote_record_compared(tape.session, how, a, b, holds != negated))
        theirs = _plain(other)
        with_numpy = type(self._plain) is not float or (isinstance(theirs, float) and type(theirs) is not float)
        return apply(self._plain, theirs) if with_numpy else holds  # NumPy's own truth

    method.__name__ = name
    return method


def _pinning(name: str) -> Callable[..., Any]:
    def method(self: TracedFloat, *others: Any) -> Any:
        _pin(self)
        plain = [other._plain if isinstance(other, TracedFloat) else other for other in others]
        for other in others:
            if isinstance(other, TracedFloat):
                _pin(other)
        return getattr(type(self._plain), name)(self._plain, *plain)

    method.__name__ = name
    return method


for _name, _kind in (
    ("add", FLOAT_ADD),
    ("sub", FLOAT_SUB),
    ("mul", FLOAT_MUL),
    ("truediv", FLOAT_DIV),
    ("pow", FLOAT_POW),
):
    for _prefix in ("", "r"):
        _full = f"__{_prefix}{_name}__"
        setattr(TracedFloat, _full, _binary(_full, _kind))
for _name, _how, _exchanged, _negated in (
    ("__eq__", COMPARE_EQUAL, False, False),
    ("__ne__", COMPARE_EQUAL, False, True),
    ("__lt__", COMPARE_LESS, False, False),
    ("__le__", COMPARE_LESS_OR_EQUAL, False, False),
    ("__gt__", COMPARE_LESS, True, False),
    ("__ge__", COMPARE_LESS_OR_EQUAL, True, False),
):
    setattr(TracedFloat, _name, _comparing(_name, _how, _exchanged, _negated))
# What the program does with these may depend on the value itself.
for _name in [
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
    "__repr__",
    "__str__",
    "__format__",
    "is_integer",
    "hex",
    "as_integer_ratio",
]:
    setattr(TracedFloat, _name, _pinning(_name))
