"""Rules from Python, stated to the truth table in JSON: what `src/own_rules.rs` asks and reads.

These are scripts' own sharding rules, and strategies by PyTorch's decompositions.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.utils._pytree import tree_leaves, tree_map_only

from ._arguments import DTYPES_BY_NAME, written_meta, written_placement
from ._native import RuleCallback
from ._own_partials import OwnPartial
from ._own_placements import KNOWN
from ._rules import (
    OWN,
    PASSES,
    RuleError,
    comes_with_torch,
    function_of,
    is_meta,
    name_of,
    passes_of,
    strategies_of,
)
from .propagation import decompositions


class Stating:
    """States the rules that the script has registered for the ops of a request, and those by decompositions for a mesh
    such as `dp=2,tp=2`, and what is added to Rote's rules. Keeps what goes wrong. `judged`: for the truth table, which
    cannot judge registered partials of which it is not known how parts combine."""

    def __init__(self, names: Iterable[str], mesh: str, judged: bool = False) -> None:
        self.judged = judged
        self.decompositions = decompositions()
        self.sizes = mesh
        found = [op for name in names for op in overloads(name)]
        self.ops = {name_of(op): op for op in found if self._states(op)}
        self.problem: Exception | None = None
        self.callback = RuleCallback(self._answer)
        self._text = ctypes.create_string_buffer(b"")

    def _states(self, op: OpOverload) -> bool:
        return _is_own(op) or self.decompositions.has(op) or self._is_added_to(op)

    def _is_added_to(self, op: OpOverload) -> bool:
        return any(self._may_name(cls) for cls in PASSES.get(op, ()))

    def _may_name(self, cls: type) -> bool:
        """Whether the strategies may have placements of a registered class."""
        own = KNOWN.get(cls)
        return not self.judged or not isinstance(own, OwnPartial) or own.combine is not None

    def _answer(self, _: Any, question: bytes) -> int:
        try:
            asked = json.loads(question)
            answer = self._state(self.ops[asked["op"]], [_argument(arg) for arg in asked["args"]])
        except Exception as problem:  # no exception crosses C
            self.problem = self.problem or problem
            answer = {"error": str(problem)}
        self._text = ctypes.create_string_buffer(json.dumps(answer).encode())
        return ctypes.addressof(self._text)

    def _state(self, op: OpOverload, given: list[Any]) -> dict[str, Any]:
        formals = op._schema.arguments
        if len(given) > len(formals):
            raise RuleError(f"{name_of(op)}: expected at most {len(formals)} arguments, found {len(given)}")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        written: list[tuple[int, int | None]] = []
        tensors: list[TensorMeta] = []
        for formal, arg in zip(formals, given, strict=False):
            if formal.kwarg_only:
                kwargs[formal.name] = arg
            else:
                args.append(arg)
            own = [leaf for leaf in tree_leaves(arg, is_meta) if is_meta(leaf)]
            if formal.alias_info is not None and formal.alias_info.is_write:
                written += [(len(tensors) + at, _returned_as(op, formal, at)) for at in range(len(own))]
            tensors += own
        results = _results(op, args, kwargs)
        strategies: list[tuple[Any, ...]]
        added = self._is_added_to(op) and not _is_own(op)
        if added:
            strategies = []
        elif not _is_own(op):
            sizes = [int(size.rpartition("=")[2]) for size in self.sizes.split(",")]
            strategies = self.decompositions.strategies(op, args, kwargs, "cpu", sizes)
        else:
            function = function_of(op)
            if isinstance(function, str):
                raise RuleError(f"{name_of(op)}: {function}")
            strategies = strategies_of(op, function, args, kwargs, results, tensors)
        strategies += passes_of(op, args, kwargs, results, tensors, self._may_name)
        for one in tree_leaves(strategies):
            if not self._may_name(type(one)):
                raise RuleError(
                    f"{name_of(op)}: the truth table cannot judge a rule with {one}: register "
                    f"{type(one).__name__} with combine="
                )
        there = [at for at, meta in enumerate(results) if meta is not None]
        strategies = [(*(strategy[at] for at in there), *strategy[len(results) :]) for strategy in strategies]
        places = {result: place for place, result in enumerate(there)}
        outputs = [results[at] for at in there]
        if not op._schema.returns:
            # The truth table judges what such an op writes as its results.
            outputs = [tensors[at] for at, _ in written]
            strategies = [(*(strategy[at] for at, _ in written), *strategy) for strategy in strategies]
            written = [(at, place) for place, (at, _) in enumerate(written)]
            places = {place: place for place in range(len(outputs))}
        return {
            "outputs": [written_meta(meta.dtype, meta.shape) for meta in outputs if meta is not None],
            "strategies": [[_slot(placement) for placement in strategy] for strategy in strategies],
            "added": added,
            "written": [(at, None if output is None else places[output]) for at, output in written],
        }


def overloads(name: str) -> list[OpOverload]:
    """The ops that a name stands for, with or without namespace and overload."""
    space, _, rest = name.rpartition("::")
    packet_name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space or "aten"), packet_name, None)
    if packet is None:
        return []
    names = [overload or "default"] if overload or "default" in packet.overloads() else packet.overloads()
    return [getattr(packet, one) for one in names if one in packet.overloads()]


def _is_own(op: OpOverload) -> bool:
    registered = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.get(op)
    return op in OWN or not comes_with_torch(registered)


def _argument(asked: Any) -> Any:
    """An argument of a question, with a meta in the place of each tensor."""
    match asked:
        case {"tensor": text}:
            return _meta(text)
        case {"tensors": texts}:
            return [None if text is None else _meta(text) for text in texts]
        case {"float": text}:
            return float(text)
        case {"dtype": text}:
            return DTYPES_BY_NAME[text]
        case list():
            return [_argument(item) for item in asked]
        case _:
            return asked


def _meta(text: str) -> TensorMeta:
    """The meta of `f64[8,4]`, contiguous."""
    dtype, _, dims = text.removesuffix("]").partition("[")
    shape = [int(dim) for dim in dims.split(",") if dim]
    like = torch.empty(shape, dtype=DTYPES_BY_NAME[dtype], device="meta")
    return TensorMeta(like.shape, like.stride(), like.dtype)


def _results(op: OpOverload, args: list[Any], kwargs: dict[str, Any]) -> list[TensorMeta | None]:
    """The results of an op, as its fake function has them."""
    with FakeTensorMode():

        def tensor(meta: TensorMeta) -> torch.Tensor:
            return torch.empty_strided(meta.shape, meta.stride, dtype=meta.dtype)

        fake_args, fake_kwargs = tree_map_only(TensorMeta, tensor, (args, kwargs), is_meta)
        made = op(*fake_args, **fake_kwargs)
    results = made if isinstance(made, list | tuple) else [] if made is None else [made]
    if any(result is not None and not isinstance(result, torch.Tensor) for result in results):
        raise RuleError(f"{name_of(op)}: a result is no tensor")
    return [None if one is None else TensorMeta(one.shape, one.stride(), one.dtype) for one in results]


def _returned_as(op: OpOverload, formal: Any, at: int) -> int | None:
    """The result that a written argument, or entry `at` of a written list, is returned as."""
    for place, result in enumerate(op._schema.returns):
        if result.alias_info is not None and result.alias_info.before_set == formal.alias_info.before_set:
            return place + at
    return None


def _slot(placement: Any) -> str | int:
    if type(placement).__name__ == "_ShardingPlaceholder":
        return int(placement.dim)
    return written_placement(placement)


__all__ = ["Stating", "overloads"]
