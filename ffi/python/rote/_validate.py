"""The truth table of sharding rules: `rote.validate`, and what `rote validate` runs."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.tensor.placement_types import Placement

from . import _bridge
from ._arguments import written_placement
from ._native import ReportCallback, check, lib
from ._own_placements import go_on
from ._own_rules import Stating
from ._propagate import read_placement


def _ask(request: dict[str, Any], tell: Callable[[str], None]) -> None:
    _bridge.bridge()
    for text in request.get("placements", ()):
        try:
            read_placement(text)
        except ValueError as problem:
            raise ValueError(f"rote: {text}: {problem}") from problem
    callback = ReportCallback(lambda _, line: tell(line.decode()))
    stating = Stating(request["ops"], request.get("mesh", "2"), judged=True)
    request = request | {"own": list(stating.ops)}
    status = lib.rote_validate(json.dumps(request).encode(), callback, stating.callback, None)
    go_on()
    check(status)
    if stating.problem is not None:
        raise ValueError(f"rote: {stating.problem}") from stating.problem


def validate(
    *ops: str,
    mesh: str = "2",
    args: str | None = None,
    only: str | None = None,
    missing: bool = True,
    changes: Sequence[tuple[str, str, str]] = (),
    placements: Sequence[Placement] = (),
) -> list[dict[str, Any]]:
    """Judges the sharding rules of ops by running their local ops on pieces of random tensors.

    ``ops`` are names such as ``aten::mm`` or ``add``; none means all that have samples. ``mesh`` is a world size or
    sizes per mesh dim (``"2,2"``). ``args`` are the arguments of one op in the notation of the samples
    (``"f32[8,4] f32[4,6]"``); without, its samples are judged. ``only`` is one combination (``"S(0),R -> S(0)"``).
    ``missing=False`` looks for wrong rules alone. ``changes`` put wrong strategies in place of right ones, to see that
    they are found: op, strategy, strategy.

    ``placements`` are of classes that the script has registered (`rote.propagation.register_sharding`,
    `rote.propagation.register_partial`): rules are judged with such shards too, of any dim, and with such partials.

    Rules that the script has registered, with `rote.propagation.register` or with PyTorch's
    ``register_single_dim_strategy``, are judged in the place of Rote's. If a named op has no rule, the strategies are
    judged that PyTorch's decomposition leads to.

    Returns a report per op: ``correct`` counts claims that hold; ``wrong`` lists claims that do not, ``missing`` what
    holds and is not claimed, ``left_out`` the same where a reason is on record, ``untrue`` what ``only`` asks for and
    is neither, ``unjudged`` what could not be run.

    Raises `ValueError` if a registered rule does not fit its op, or has a registered partial of which it is not known
    how parts combine; `RuntimeError` if a placement is of no registered class or such a partial, or if the request
    cannot be read.
    """
    request: dict[str, Any] = {"ops": list(ops) or ["all"], "mesh": mesh, "missing": missing, "changes": list(changes)}
    request |= {key: text for key, text in (("args", args), ("only", only)) if text is not None}
    request["placements"] = [written_placement(one) for one in placements]
    lines: list[dict[str, Any]] = []
    _ask(request, lambda line: lines.append(json.loads(line)))
    return [line for line in lines if "op" in line]


def main() -> None:
    """Answers the request that the command line passes, a line per event."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # kernels run in one call, which only a signal's default can end
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write among the lines

    def tell(line: str) -> None:
        print(line, file=out, flush=True)

    request = json.loads(sys.argv[1])
    for module in request.pop("import", []):
        importlib.import_module(module)
    try:
        _ask(request, tell)
    except (RuntimeError, ValueError) as error:
        sys.exit(str(error))
