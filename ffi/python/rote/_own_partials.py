"""Partials of the script's own: subclasses of `Partial` that `rote.propagation.register_partial` makes known."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from . import _rules
from ._native import CombineCallback, error, lib
from ._own_placements import INTERRUPTS, KEPT, KNOWN, Own, Values, check_parameters

Combine = Callable[[Any, list[torch.Tensor]], torch.Tensor]
Passes = Mapping[OpOverload, _rules.Strategies | Sequence[Sequence[Any]]]

#: What a class has to define otherwise than `Partial`.
_NEEDED = ("__eq__", "__hash__", "_reduce_value", "_reduce_shard_value", "_partition_value")
#: The placement of each number.
_MADE: dict[int, Any] = {}


class OwnPartial(Own):
    """A registered class of partials."""

    def __init__(self, cls: type[Partial], parameters: Sequence[str], combine: Combine | None) -> None:
        super().__init__(cls, parameters)
        self.combine = combine
        self.callback = CombineCallback() if combine is None else CombineCallback(self._combine)
        self._text = ctypes.create_string_buffer(b"")

    def like(self, placement: Any, values: Values) -> Any:
        return self.construct(values)

    def others(self, made: Any) -> list[Any]:
        registered = (own for own in KNOWN.values() if isinstance(own, OwnPartial))
        return [
            *map(Partial, _rules.REDUCTIONS),
            *(own.construct(other) for own in registered for other in own.numbers),
        ]

    def ask(self, text: bytes, number: Any) -> int:
        return int(lib.rote_partial(self.name.encode(), text, number))

    def keep(self, number: int, placement: Any) -> None:
        _MADE[number] = placement

    def _combine(self, _: Any, parameters: bytes, parts: Any, ranks: int, count: int, combined: Any) -> int | None:
        assert self.combine is not None
        try:
            held = torch.tensor(parts[: ranks * count], dtype=torch.float64).reshape(ranks, count)
            found = self.combine(self.construct(self.read(parameters.decode())), list(held))
            if not isinstance(found, torch.Tensor) or found.shape != (count,) or found.dtype != held.dtype:
                raise TypeError(f"expected combine= to return {held.dtype} of shape [{count}], found {found!r}")
            for at, number in enumerate(found.tolist()):
                combined[at] = number
        except BaseException as problem:  # no exception crosses C
            if not isinstance(problem, Exception):
                INTERRUPTS.append(problem)
            self._text = ctypes.create_string_buffer(f"{self.name}: {type(problem).__name__}: {problem}".encode())
            return ctypes.addressof(self._text)
        return None

    def written(self, placement: Any) -> str:
        text = self.text(self.values(placement))
        return f"P({self.name},{text})" if text else f"P({self.name})"


def put(cls: Any, reduction: str, parameters: Sequence[str], passes: Passes | None, combine: Combine | None) -> None:
    """Registers a class."""
    if not (isinstance(cls, type) and issubclass(cls, Partial)) or cls.__module__.startswith("torch."):
        raise TypeError(f"rote: expected a subclass of Partial, found {cls!r}")
    name = cls.__name__
    if cls in KNOWN:
        raise ValueError(f"rote: {name} is registered already")
    check_parameters(name, parameters)
    if reduction not in _rules.REDUCTIONS:
        known = ", ".join(_rules.REDUCTIONS)
        raise ValueError(f"rote: {name}: expected reduction=, one of {known}, found {reduction!r}")
    lacking = [one for one in _NEEDED if getattr(cls, one) is getattr(Partial, one)]
    if lacking:
        raise TypeError(f"rote: {name}: expected a class with {' and '.join(lacking)} of its own, not Partial's")
    if not isinstance(passes, Mapping | None):
        raise TypeError(f"rote: {name}: expected passes=, strategies by op, found {passes!r}")
    if combine is not None and not callable(combine):
        raise TypeError(f"rote: {name}: expected combine=, a function, found {combine!r}")
    added = {op: _checked(name, op, strategies) for op, strategies in (passes or {}).items()}
    own = OwnPartial(cls, parameters, combine)
    if lib.rote_register_partials(name.encode(), _rules.REDUCTIONS.index(reduction), own.callback, None) < 0:
        raise ValueError(f"rote: {error()}")
    KEPT.append(own)
    KNOWN[cls] = own
    for op, strategies in added.items():
        _rules.PASSES.setdefault(op, {})[cls] = strategies
        _rules.cache_by_all_arguments(op)


def _checked(name: str, op: Any, strategies: Any) -> _rules.Strategies:
    """Strategies as a function."""
    if not isinstance(op, OpOverload):
        raise TypeError(f"rote: {name}: expected passes= of ops with their overloads, found {op!r}")
    if not _rules.has_rule(op) and isinstance(_rules.function_of(op), str):
        raise ValueError(f"rote: {name}: passes= of {_rules.name_of(op)}: there is no rule to add to: register one")
    if "_foreach_" in op._schema.name:
        raise ValueError(f"rote: {name}: passes= of {_rules.name_of(op)}: expected ops on single tensors")
    if callable(strategies):
        function: _rules.Strategies = strategies
        return function
    if isinstance(strategies, str) or not isinstance(strategies, Sequence):
        raise TypeError(
            f"rote: {name}: passes= of {_rules.name_of(op)}: expected a list of strategies or a function, found "
            f"{strategies!r}"
        )
    formals, results = op._schema.arguments, op._schema.returns
    tensors = sum("Tensor" in str(formal.type) for formal in formals)
    lists = any("List[" in str(part.type) for part in [*formals, *results] if "Tensor" in str(part.type))
    for at, strategy in enumerate(strategies):
        if not lists and not len(results) < len(strategy) <= len(results) + tensors:
            raise ValueError(
                f"rote: {name}: passes= of {_rules.name_of(op)}: strategy {at} has {len(strategy)} placements, "
                f"expected those of {len(results)} results and up to {tensors} tensor inputs"
            )
    return _rules.Listed(strategies)


def remove(cls: Any) -> list[OpOverload]:
    """Forgets a class. Returns the ops that have lost strategies."""
    own = KNOWN.get(cls)
    if not isinstance(own, OwnPartial):
        raise ValueError(f"rote: {getattr(cls, '__name__', cls)}: no partial is registered")
    del KNOWN[cls]
    lib.rote_forget_partials(own.name.encode())
    ops = [op for op, by_class in _rules.PASSES.items() if cls in by_class]
    for op in ops:
        del _rules.PASSES[op][cls]
        if not _rules.PASSES[op]:
            del _rules.PASSES[op]
        _rules.cache_unless_needed(op)
    return ops


def made(number: int) -> Any:
    """The placement of a number."""
    return _MADE[number]


def read(inside: str) -> Placement | None:
    """The placement `P(LogSumExp,2)` of what stands in brackets; None if no such class is registered."""
    name, _, text = inside.partition(",")
    for own in KNOWN.values():
        if isinstance(own, OwnPartial) and own.name == name:
            placement: Placement = own.construct(own.read(text))
            return placement
    return None


__all__ = ["Combine", "OwnPartial", "Passes", "made", "put", "read", "remove"]
