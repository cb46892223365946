"""What a rank sends in a step, by the usual ring algorithms."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

SHARES: dict[str, Callable[[int], float]] = {
    "all_gather_into_tensor": lambda n: n - 1,
    "reduce_scatter_tensor": lambda n: (n - 1) / n,
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "shard_dim_alltoall": lambda n: (n - 1) / n,
}
"""What a rank sends of its input, by the number of ranks."""


@contextlib.contextmanager
def sent() -> Iterator[Counter[str]]:
    """The bytes that this rank sends within, by collective: among `n` ranks, `n - 1` times its input to gather, and
    `(n - 1) / n` of it to reduce or to exchange, twice that to all-reduce. Collectives are those of DTensor. On a CPU,
    DTensor gathers where it would exchange."""
    bytes_of: Counter[str] = Counter()

    def ranks(group: Any) -> int:
        found = torch._C._distributed_c10d._resolve_process_group(group) if isinstance(group, str) else group
        return int(found.size())

    class Counting(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if DTensor in types:
                return NotImplemented  # and its collectives come here
            name = func._schema.name.rpartition("::")[2]
            if name in SHARES:
                n = ranks(args[-1])
                bytes_of[name] += round(args[0].numel() * args[0].element_size() * SHARES[name](n))
            return func(*args, **(kwargs or {}))

    with Counting():
        yield bytes_of
