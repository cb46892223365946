"""Choices of DTensor's that Rote's rules refute. Policy "same" leaves them to DTensor, and warns of each once."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._pytree import tree_leaves

from ._arguments import written_placement
from ._frames import user_line
from ._rules import name_of


class Refuted:
    """Asks Rote about the placements in which DTensor runs an op on partial sums.

    If Rote's rule for the op reduces one of these first, no rank's summand gives a summand of the result: the truth
    table finds no such strategy right. If DTensor makes a partial sum of integers, it divides them.
    """

    def __init__(self, ask: Callable[[Any], Any]) -> None:
        self.ask = ask
        self.found: Counter[str] = Counter()
        """How often each was met: the op, and the placements of its tensors."""

    def look(self, schema: Any, answer: Any) -> None:
        """Looks at DTensor's answer to a question."""
        local = answer.redistribute_schema or schema
        taken = _specs(local)
        if not any(_is_sum(placement) for spec in taken for placement in spec.placements):
            return
        divided = _divided(_specs(schema), taken)
        if divided is not None:
            given = enumerate(_specs(schema))
            partial = next((at for at, spec in given if any(map(_is_sum, spec.placements))), None)
            self._warn(
                schema,
                taken,
                partial,
                f"it divides tensor {divided}, of integers, by the number of ranks to make summands",
            )
            return
        ours = self.ask(local)
        if ours is None or ours.redistribute_schema is None:
            return
        reduced = _reduced(taken, _specs(ours.redistribute_schema))
        if reduced is not None:
            self._warn(schema, taken, reduced, "the parts of the ranks then give another result than the whole tensors")

    def _warn(self, schema: Any, taken: list[DTensorSpec], partial: int | None, because: str) -> None:
        what = f"{name_of(schema.op)} on {' '.join(_written(spec) for spec in taken)}"
        self.found[what] += 1
        if self.found[what] == 1:
            line = user_line().decode(errors="replace")
            remedy = 'use rote.propagation.install("best")'
            if partial is not None:
                first = f"redistribute tensor {partial} of the call first, with Replicate() in the place of the partial"
                remedy = f"{first}, or {remedy}"
            where = f" ({line})" if line else ""
            warnings.warn(
                f"rote: DTensor runs {what}{where}: {because}. {remedy[0].upper()}{remedy[1:]}",
                RuntimeWarning,
                stacklevel=3,
            )


def _divided(given: list[DTensorSpec], taken: list[DTensorSpec]) -> int | None:
    """The first tensor of integers or truth values that DTensor makes a partial sum of."""
    for at, (before, after) in enumerate(zip(given, taken, strict=False)):
        meta = after.tensor_meta
        if meta is None or meta.dtype.is_floating_point or meta.dtype.is_complex:
            continue
        if any(_is_sum(q) and not p.is_partial() for p, q in zip(before.placements, after.placements, strict=False)):
            return at
    return None


def _reduced(taken: list[DTensorSpec], ours: list[DTensorSpec]) -> int | None:
    """The first tensor of which Rote reduces a partial sum that DTensor takes as it is."""
    for at, (theirs, mine) in enumerate(zip(taken, ours, strict=False)):
        if any(_is_sum(p) and q != p for p, q in zip(theirs.placements, mine.placements, strict=False)):
            return at
    return None


def _written(spec: DTensorSpec) -> str:
    return ",".join(written_placement(placement) for placement in spec.placements)


def _specs(schema: Any) -> list[DTensorSpec]:
    leaves = tree_leaves((schema.args_schema, schema.kwargs_schema))
    return [leaf for leaf in leaves if isinstance(leaf, DTensorSpec)]


def _is_sum(placement: Any) -> bool:
    return type(placement) is Partial and placement.reduce_op == "sum"


__all__ = ["Refuted"]
