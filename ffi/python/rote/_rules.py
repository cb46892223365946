"""Sharding rules from Python: what a script has registered for an op, with Rote or with PyTorch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor._ops._math_ops import _NormPartial
from torch.distributed.tensor._ops.single_dim_strategy import _ShardingPlaceholder
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_leaves, tree_map_only

from ._native import error, lib
from ._own_placements import KNOWN, SHARDINGS

Strategies = Callable[..., Sequence[Sequence[Any]]]

#: The functions that scripts have registered with Rote.
OWN: dict[OpOverload, Strategies] = {}
#: Further strategies of ops, by registered class of partials.
PASSES: dict[OpOverload, dict[type, Strategies]] = {}
#: What DTensor's tables of schema infos held before, by op.
_BEFORE: dict[OpOverload, tuple[RuntimeSchemaInfo | None, ...]] = {}
#: What was warned of.
_WARNED: set[str] = set()
#: Those of `Partial`, in the order of their numbers in C.
REDUCTIONS = ("sum", "avg", "max", "min", "product")


class RuleError(ValueError):
    """A rule of the script's own does not fit its op."""


def put(op: OpOverload, function: Strategies, replace: bool) -> None:
    """Keeps a function for an op."""
    if not isinstance(op, OpOverload):
        raise TypeError(f"rote: expected an op with its overload, such as torch.ops.aten.mm.default, found {op!r}")
    if not callable(function):
        raise TypeError(f"rote: {name_of(op)}: expected a function that returns strategies, found {function!r}")
    if not replace and op in OWN:
        raise ValueError(
            f"rote: {name_of(op)}: {_described(OWN[op])} is registered already; replace=True puts another in its place"
        )
    if not replace and has_rule(op):
        raise ValueError(f"rote: {name_of(op)}: Rote has a rule for this op; replace=True puts another in its place")
    OWN[op] = function
    cache_by_all_arguments(op)


@functools.cache
def has_rule(op: OpOverload) -> bool:
    """Whether Rote has a rule for an op, of its own or by a decomposition of its own."""
    answer = lib.rote_has_rule(name_of(op).encode())
    if answer < 0:
        raise RuntimeError(f"rote: {error()}")
    return bool(answer)


def remove(op: OpOverload) -> None:
    """Forgets the function of an op, and lets DTensor cache its answers as before."""
    if OWN.pop(op, None) is None:
        raise ValueError(f"rote: {name_of(op) if isinstance(op, OpOverload) else op}: no rule is registered")
    cache_unless_needed(op)


def _schema_infos() -> tuple[dict[OpOverload, RuntimeSchemaInfo], ...]:
    propagator = DTensor._op_dispatcher.sharding_propagator
    return propagator.op_to_schema_info, propagator.op_to_schema_info_for_single_dim_strategy


def cache_by_all_arguments(op: OpOverload) -> None:
    """Lets DTensor keep an answer for each combination of arguments: a function may look at all of them."""
    tables = _schema_infos()
    _BEFORE.setdefault(op, tuple(table.get(op) for table in tables))
    keywords = [argument.name for argument in op._schema.arguments if argument.kwarg_only]
    tables[0][op] = RuntimeSchemaInfo(0, keywords or None, needs_pytree=True)


def cache_unless_needed(op: OpOverload) -> None:
    """Lets DTensor keep the answers for an op as before, unless a function of the script's answers."""
    if op not in OWN and op not in PASSES:
        cache_as_before(op)


def cache_as_before(op: OpOverload) -> None:
    """Lets DTensor keep the answers for an op as it did before `cache_by_all_arguments`."""
    for table, before in zip(_schema_infos(), _BEFORE.pop(op), strict=True):
        if before is None:
            table.pop(op, None)
        else:
            table[op] = before


def name_of(op: OpOverload) -> str:
    """`aten::sum.dim_IntList`; the default overload has no suffix."""
    suffix = op._schema.overload_name
    return f"{op._schema.name}.{suffix}" if suffix else str(op._schema.name)


def comes_with_torch(registered: Any) -> bool:
    """Whether what is registered for an op with DTensor comes with PyTorch."""
    if isinstance(registered, functools.partial):
        # PyTorch's `register_sharding` keeps the script's function among the arguments.
        parts = (registered.func, *registered.args, *registered.keywords.values())
        return all(comes_with_torch(part) for part in parts if callable(part))
    function = getattr(registered, "func", registered)
    if isinstance(function, functools.partial):
        return comes_with_torch(function)
    return function is None or str(getattr(function, "__module__", "")).startswith("torch.")


def _described(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    name = getattr(function, "__qualname__", repr(function))
    code = getattr(function, "__code__", None)
    return f"{name} ({code.co_filename}:{code.co_firstlineno})" if code else str(name)


def state(
    propagator: Any, schema: Any, passes_alone: bool = False
) -> tuple[list[tuple[Any, ...]], list[TensorMeta | None], Any] | str:
    """What the script's rule says of a schema, with what passes its partials: the strategies, and the metas of the
    results, as a list and as the op returns them. Or why there is no such rule, or none that fits: DTensor then
    answers. `passes_alone`: the strategies are added to Rote's rule."""
    op = schema.op
    args = tree_map_only(DTensorSpec, lambda spec: spec.tensor_meta, schema.args_schema)
    kwargs = tree_map_only(DTensorSpec, lambda spec: spec.tensor_meta, schema.kwargs_schema)
    tensors = [leaf for leaf in tree_leaves((args, kwargs), is_meta) if is_meta(leaf)]
    function = None if passes_alone else function_of(op)
    if isinstance(function, str):
        return function
    if not _gives_tensors(op):
        return "a rule of the script's own, for an op with a result that is no tensor"
    metas = propagator._propagate_tensor_meta_non_cached(schema)
    results = [metas] if is_meta(metas) else list(metas or ())
    try:
        stated = [] if function is None else strategies_of(op, function, args, kwargs, results, tensors)
        return [*stated, *passes_of(op, args, kwargs, results, tensors)], results, metas
    except RuleError as problem:
        message = f"rote: {problem}"
        if message not in _WARNED:
            _WARNED.add(message)
            warnings.warn(f"{message}. DTensor's own propagation answers instead", RuntimeWarning, stacklevel=2)
        return f"a rule that does not fit: {problem}"


def function_of(op: OpOverload) -> Strategies | str:
    """The function that a script has registered for an op, or why Rote does not ask it."""
    if op in OWN:
        return OWN[op]
    info = DTensor._op_dispatcher.sharding_propagator.op_single_dim_strategy_funcs.get(op)
    if info is None or comes_with_torch(info):
        return "a strategy of the script's own is registered"
    for option in ("full_mesh_strategy_filter", "different_mesh_args"):
        if getattr(info, option, None):
            return f"a strategy of the script's own is registered, with {option}"
    return _FromPyTorch(op, info.func)


def _gives_tensors(op: OpOverload) -> bool:
    return all("Tensor" in str(result.type) for result in op._schema.returns)


class _FromPyTorch:
    """A function as PyTorch's `register_single_dim_strategy` takes it, called as one that is registered with Rote."""

    def __init__(self, op: OpOverload, func: Callable[..., Any]) -> None:
        self.op = op
        self.func = func

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.func(self.op, args, kwargs)


def is_meta(leaf: Any) -> bool:
    """Whether a leaf of arguments or results is the meta of a tensor."""
    return isinstance(leaf, TensorMeta)


def strategies_of(
    op: OpOverload,
    function: Strategies,
    args: Any,
    kwargs: Any,
    results: Sequence[TensorMeta | None],
    tensors: Sequence[TensorMeta],
) -> list[tuple[Any, ...]]:
    """What a function says of an op with these arguments. Raises `RuleError` if it says what no rule can be."""
    who = f"{name_of(op)}: {_described(getattr(function, 'func', function))}"
    try:
        said = function(*args, **kwargs)
        strategies = [tuple(strategy) for strategy in said]
    except Exception as problem:
        raise RuleError(f"{who} raised {type(problem).__name__}: {problem}") from problem
    metas = [*results, *tensors]
    for at, strategy in enumerate(strategies):
        if len(strategy) != len(metas):
            raise RuleError(
                f"{who}: strategy {at} has {len(strategy)} placements, expected {len(metas)}: of {len(results)} "
                f"results and {len(tensors)} tensor inputs"
            )
    return [tuple(_placements(f"{who}: strategy {at}", strategy, metas)) for at, strategy in enumerate(strategies)]


class Listed:
    """Strategies for each number of tensors that an op may be given."""

    def __init__(self, strategies: Sequence[Sequence[Any]]) -> None:
        self.strategies = strategies

    def of(self, width: int) -> Listed:
        """Those of so many results and tensor inputs."""
        return Listed([strategy for strategy in self.strategies if len(strategy) == width])

    def __call__(self, *_: Any, **__: Any) -> Sequence[Sequence[Any]]:
        return self.strategies

    def __repr__(self) -> str:
        return "passes="


def passes_of(
    op: OpOverload,
    args: Any,
    kwargs: Any,
    results: Sequence[TensorMeta | None],
    tensors: Sequence[TensorMeta],
    of: Callable[[type], bool] = lambda cls: True,
) -> list[tuple[Any, ...]]:
    """The further strategies of an op with these arguments, by classes `of` which is true. Raises `RuleError` as
    `strategies_of`."""
    width = len(results) + len(tensors)
    stated = (strategies for cls, strategies in PASSES.get(op, {}).items() if of(cls))
    functions = [one.of(width) if isinstance(one, Listed) else one for one in stated]
    return [one for function in functions for one in strategies_of(op, function, args, kwargs, results, tensors)]


def _placements(where: str, strategy: Sequence[Any], metas: Sequence[TensorMeta | None]) -> Iterator[Any]:
    """The placements of a strategy, with dims counted from the front."""
    for at, (placement, meta) in enumerate(zip(strategy, metas, strict=True)):
        here = f"{where}, placement {at}"
        kind = type(placement)
        if meta is None:
            if placement is not None and kind is not Replicate:
                raise RuleError(f"{here}: expected None, as there is no such result, found {placement}")
            yield None
        elif kind in (Shard, _StridedShard, _ShardingPlaceholder):
            ndim = len(meta.shape)
            if not -ndim <= placement.dim < ndim:
                raise RuleError(f"{here}: {placement} is no shard of a tensor with {ndim} dims")
            dim = placement.dim % ndim
            yield _StridedShard(dim, split_factor=placement.split_factor) if kind is _StridedShard else kind(dim)
        elif kind in SHARDINGS:
            ndim = len(meta.shape)
            if not 0 <= placement.dim < ndim:
                raise RuleError(f"{here}: {placement!r} is no shard of a tensor with {ndim} dims")
            yield placement
        elif kind is Partial and placement.reduce_op not in REDUCTIONS:
            raise RuleError(f"{here}: {placement}: expected a reduction among {', '.join(REDUCTIONS)}")
        elif kind in (Replicate, Partial, _NormPartial) or kind in KNOWN:
            yield placement
        else:
            found = "None" if placement is None else f"{placement!r} of class {kind.__name__}"
            raise RuleError(
                f"{here}: expected Shard, _StridedShard, _ShardingPlaceholder, Replicate, Partial, _NormPartial or a "
                f"registered class, found {found}"
            )


__all__ = [
    "OWN",
    "PASSES",
    "REDUCTIONS",
    "Listed",
    "RuleError",
    "cache_as_before",
    "cache_by_all_arguments",
    "cache_unless_needed",
    "comes_with_torch",
    "function_of",
    "has_rule",
    "is_meta",
    "name_of",
    "passes_of",
    "put",
    "remove",
    "state",
    "strategies_of",
]
