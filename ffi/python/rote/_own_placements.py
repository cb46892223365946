"""Shardings of the script's own: subclasses of `Shard` that `rote.propagation.register_sharding` makes known.

Rust asks here which indices each rank holds. `_own_shards_in_dtensor.py` has what DTensor is told of them.
"""

from __future__ import annotations

import ctypes
import json
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from ._native import RuleCallback, byref, c_uint32, error, lib

Indices = Callable[[Any, int, int], Sequence[Sequence[int]]]
Fills = Collection[OpOverload] | Callable[[OpOverload], bool]
Values = tuple[int | tuple[int, ...], ...]

#: What is registered, by class: all placements, and shardings alone.
KNOWN: dict[type, Own] = {}
SHARDINGS: dict[type, OwnSharding] = {}
#: What a class has to define otherwise than `Shard`.
NEEDED = ("__eq__", "__hash__", "_split_tensor", "_to_replicate_tensor", "_local_shard_size_and_offset")
#: The placement of each number by its dim.
_MADE: dict[int, dict[int, Any]] = {}
_WARNED: set[str] = set()
#: What has ended a function that Rust has called, to be raised once Rust has returned.
INTERRUPTS: list[BaseException] = []
#: Rust may call back for a class that was forgotten.
KEPT: list[Any] = []


class Own:
    """A registered class."""

    def __init__(self, cls: type[Any], parameters: Sequence[str]) -> None:
        self.cls = cls
        self.parameters = tuple(parameters)
        self.numbers: dict[Values, int] = {}

    @property
    def name(self) -> str:
        return self.cls.__name__

    def like(self, placement: Any, values: Values) -> Any:
        """A placement that is made of parameters, and of the dim of another if it has one."""
        raise NotImplementedError

    def others(self, made: Any) -> list[Any]:
        """What a placement has to differ from."""
        raise NotImplementedError

    def ask(self, text: bytes, number: Any) -> int:
        """Asks the library for the number of the placement with parameters that are written so."""
        raise NotImplementedError

    def keep(self, number: int, placement: Any) -> None:
        """Keeps a placement, to answer with."""
        raise NotImplementedError

    def written(self, placement: Any) -> str:
        """The notation of a placement."""
        raise NotImplementedError

    def number(self, placement: Any) -> int:
        """The number of a placement of the class. Raises `ValueError` if the parameters do not say what it is."""
        values = self.values(placement)
        made = self.like(placement, values)
        if not (made == placement and placement == made):
            raise ValueError(
                f"{placement!r} is not equal to a {self.name} that is made of its parameters: name all "
                "attributes that matter in parameters="
            )
        known = self.numbers.get(values)
        if known is not None:
            return known
        if any(made == other or other == made for other in self.others(made)):
            raise ValueError(f"{placement!r} is equal to another placement: __eq__ has to compare class and parameters")
        number = c_uint32()
        if self.ask(self.text(values).encode(), byref(number)) < 0:
            raise ValueError(error())
        self.keep(number.value, placement)
        self.numbers[values] = number.value
        return number.value

    def values(self, placement: Any) -> Values:
        """The parameters of a placement."""
        return tuple(self._value(name, getattr(placement, name)) for name in self.parameters)

    def _value(self, name: str, value: Any) -> int | tuple[int, ...]:
        if isinstance(value, int) and not isinstance(value, bool):
            return int(value)
        if isinstance(value, tuple) and all(isinstance(one, int) and not isinstance(one, bool) for one in value):
            return tuple(int(one) for one in value)
        raise ValueError(f"{self.name}.{name}: expected an integer or a tuple of integers, found {value!r}")

    def construct(self, values: Values, **dim: int) -> Any:
        """A placement of the class."""
        made = self.cls(*dim.values(), **dict(zip(self.parameters, values, strict=True)))
        if type(made) is not self.cls or getattr(made, "dim", None) != dim.get("dim") or self.values(made) != values:
            named = ", ".join([*dim, *(f"{name}=..." for name in self.parameters)])
            raise ValueError(f"expected {self.name}({named}) to make a placement of these, found {made!r}")
        return made

    def text(self, values: Values) -> str:
        """Parameters as placements are written: `1,3` of a tuple alone, `2,[1,3]` of several."""
        if len(values) == 1 and isinstance(values[0], tuple):
            return _numbers(values[0])
        return ",".join(f"[{_numbers(value)}]" if isinstance(value, tuple) else str(value) for value in values)

    def read(self, text: str) -> Values:
        """Parameters that are written so."""
        if len(self.parameters) == 1 and "," in text:
            return (tuple(int(one) for one in text.split(",") if one),)
        if len(self.parameters) == 1 and not text:
            return ((),)
        found: list[int | tuple[int, ...]] = []
        for many, one in re.findall(r"\[([-\d,]*)\]|(-?\d+)", text):
            found.append(int(one) if one else tuple(int(each) for each in many.split(",") if each))
        if len(found) != len(self.parameters) or self.text(tuple(found)) != text:
            raise ValueError(f"expected {len(self.parameters)} parameters of {self.name}, found {text!r}")
        return tuple(found)


class OwnSharding(Own):
    """A registered class of shards."""

    def __init__(self, cls: type[Shard], indices: Indices, parameters: Sequence[str], fills: Fills | None) -> None:
        super().__init__(cls, parameters)
        self.indices = indices
        self.fills = fills
        self.callback = RuleCallback(self._answer)
        self._text = ctypes.create_string_buffer(b"")

    def made(self, dim: int, values: Values) -> Any:
        """A placement of the class."""
        return self.construct(values, dim=dim)

    def like(self, placement: Any, values: Values) -> Any:
        return self.made(placement.dim, values)

    def others(self, made: Any) -> list[Any]:
        return [
            Shard(made.dim),
            *(own.made(made.dim, other) for own in SHARDINGS.values() for other in own.numbers),
        ]

    def ask(self, text: bytes, number: Any) -> int:
        return int(lib.rote_sharding(self.name.encode(), text, number))

    def keep(self, number: int, placement: Any) -> None:
        _MADE.setdefault(number, {})[placement.dim] = placement

    def written(self, placement: Any) -> str:
        text = self.text(self.values(placement))
        return f"{self.name}({placement.dim},{text})" if text else f"{self.name}({placement.dim})"

    def _runs(self, placement: Any, size: int, ranks: int) -> list[list[tuple[int, int, int]]]:
        return [list(_ranges(held)) for held in self.indices(placement, size, ranks)]

    def _answer(self, _: Any, question: bytes) -> int:
        try:
            answer = self._said(json.loads(question))
        except Exception as problem:  # no exception crosses C
            answer = {"error": f"{type(problem).__name__}: {problem}"}
        except BaseException as problem:  # an interrupt
            INTERRUPTS.append(problem)
            answer = {"error": f"{type(problem).__name__}"}
        self._text = ctypes.create_string_buffer(json.dumps(answer).encode())
        return ctypes.addressof(self._text)

    def _said(self, asked: dict[str, Any]) -> dict[str, Any]:
        if "op" in asked:
            return {"fills": self._may_fill(asked["base"], asked["op"])}
        placement = self.made(0, self.read(asked["parameters"]))
        try:
            return {"ranks": self._runs(placement, asked["size"], asked["ranks"])}
        except ValueError:
            return {"unfit": True}

    def _may_fill(self, base: str, op: str) -> bool:
        from ._own_rules import overloads
        from ._rules import name_of

        if self.fills is None:
            return True
        if callable(self.fills):
            return all(bool(self.fills(one)) for one in overloads(op))
        names = {name_of(one) for one in self.fills}
        return op in names or base in names or any(name.partition(".")[0] == base for name in names)


def _numbers(values: Sequence[int]) -> str:
    return ",".join(map(str, values)) + ("," if len(values) == 1 else "")


def _ranges(held: Iterable[int]) -> Iterable[tuple[int, int, int]]:
    """What a rank holds, as start, step and count of ranges."""
    if isinstance(held, range):
        if len(held):
            yield held.start, held.step, len(held)
        return
    if isinstance(held, torch.Tensor):
        held = held.tolist()
    start, count = 0, 0
    for index in held:
        if not hasattr(index, "__index__"):
            raise TypeError(f"expected indices, found {index!r}")
        index = index.__index__()
        if count and index == start + count:
            count += 1
            continue
        if count:
            yield start, 1, count
        start, count = index, 1
    if count:
        yield start, 1, count


def number_of(placement: Any) -> int | str | None:
    """The number of a placement of a registered class; or why it has none, which is warned of once. None: the class is
    not registered."""
    own = KNOWN.get(type(placement))
    if own is None:
        return None
    try:
        return own.number(placement)
    except Exception as problem:
        reason = f"a placement of class {own.name}: {type(problem).__name__}: {problem}"
        warn(reason)
        return reason


def go_on() -> None:
    """Raises what has ended a function of the script's, other than an error."""
    if INTERRUPTS:
        interrupt = INTERRUPTS[0]
        INTERRUPTS.clear()
        raise interrupt


def made(number: int, dim: int) -> Any:
    """The placement of a number and a dim."""
    known = _MADE[number]
    if dim not in known:
        first = next(iter(known.values()))
        own = SHARDINGS[type(first)]
        known[dim] = own.made(dim, own.values(first))
    return known[dim]


def warn(reason: str) -> None:
    """Warns once of what a registered class cannot say. DTensor then answers."""
    if reason not in _WARNED:
        _WARNED.add(reason)
        warnings.warn(f"rote: {reason}. DTensor's own propagation answers instead", RuntimeWarning, stacklevel=3)


def written(placement: Any) -> str | None:
    """`RaggedShard(0,1,3)`; None for a placement that is not of a registered class."""
    own = KNOWN.get(type(placement))
    if own is None:
        return None
    own.number(placement)
    return own.written(placement)


def read(name: str, inside: str) -> Placement:
    """The placement that is written so. Raises `ValueError` if no class makes it."""
    own = next((own for own in SHARDINGS.values() if own.name == name), None)
    if own is None:
        raise ValueError(f"no sharding {name} is registered")
    dim, _, text = inside.partition(",")
    placement: Placement = own.made(int(dim), own.read(text))
    return placement


def put(cls: Any, indices: Indices, parameters: Sequence[str], fills: Fills | None) -> None:
    """Registers a class."""
    if not (isinstance(cls, type) and issubclass(cls, Shard)) or cls is Shard or issubclass(cls, _StridedShard):
        raise TypeError(f"rote: expected a subclass of Shard, found {cls!r}")
    name = cls.__name__
    if cls in SHARDINGS:
        raise ValueError(f"rote: {name} is registered already")
    check_parameters(name, parameters)
    if not callable(indices):
        raise TypeError(f"rote: {name}: expected indices=, a function, found {indices!r}")
    if fills is not None and not callable(fills) and not all(isinstance(op, OpOverload) for op in fills):
        raise TypeError(f"rote: {name}: expected fills=, ops with their overloads or a function, found {fills!r}")
    lacking = [one for one in NEEDED if is_shards(cls, one)]
    if lacking:
        raise TypeError(f"rote: {name}: expected a class with {' and '.join(lacking)} of its own, not Shard's")
    own = OwnSharding(cls, indices, parameters, fills)
    if lib.rote_register_shardings(name.encode(), own.callback, None) < 0:
        raise ValueError(f"rote: {error()}")
    KEPT.append(own)
    SHARDINGS[cls] = KNOWN[cls] = own


def check_parameters(name: str, parameters: Any) -> None:
    """Raises `TypeError` unless these are names of attributes."""
    if isinstance(parameters, str) or not all(isinstance(one, str) and one.isidentifier() for one in parameters):
        raise TypeError(f"rote: {name}: expected names of attributes in parameters=, found {parameters!r}")


def is_shards(cls: type, name: str) -> bool:
    return getattr(cls, name, None) is getattr(Shard, name)


def remove(cls: Any) -> None:
    """Forgets a class."""
    own = SHARDINGS.pop(cls, None)
    if own is None:
        raise ValueError(f"rote: {getattr(cls, '__name__', cls)}: no sharding is registered")
    del KNOWN[cls]
    lib.rote_forget_shardings(own.name.encode())


__all__ = [
    "INTERRUPTS",
    "KEPT",
    "KNOWN",
    "NEEDED",
    "SHARDINGS",
    "Fills",
    "Indices",
    "Own",
    "Values",
    "check_parameters",
    "go_on",
    "is_shards",
    "made",
    "number_of",
    "put",
    "read",
    "remove",
    "warn",
    "written",
]
