"""One byte of every rank of the default process group, to all of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from ._bridge import bridge


class _Exchanges:
    """How many there were over the store of a process group."""

    group: Any = None
    count = 0


_exchanges = _Exchanges()


def world_size() -> int:
    """How many ranks the default process group has; 1 where there is none."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather(byte: int) -> bytes:
    """The byte of every rank, in their order. Every rank must call it equally often and in the same order as
    whatever else it calls of this kind."""
    ranks = world_size()
    if ranks == 1:
        return bytes([byte])
    group = dist.distributed_c10d._get_default_group()
    answers: bytes | None = bridge().gather(group.group_name, bytes([byte]))
    return _by_store(group, ranks, byte) if answers is None else answers


def _by_store(group: Any, ranks: int, byte: int) -> bytes:
    """For a group without a backend for the CPU. As a rank answers only when it has read all earlier answers, what
    it has answered before the last time is read by all."""
    if _exchanges.group is not group:
        _exchanges.group, _exchanges.count = group, 0
    store = dist.distributed_c10d._get_default_store()
    number, rank = _exchanges.count, dist.get_rank()
    _exchanges.count += 1
    store.set(f"rote/{number}/{rank}", str(byte))
    answers = bytes(int(store.get(f"rote/{number}/{other}")) for other in range(ranks))
    if number > 0:
        store.delete_key(f"rote/{number - 1}/{rank}")
    return answers
