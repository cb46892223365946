"""The floor: what the kernels of a step cost by themselves.

Every local op of one eager step that does work (no views) is called again by
itself from C++ with its recorded arguments, into a preallocated result where
ATen has such an overload, less the cost of calling an op that does nothing
(`kernel_time.cpp`). To their sum come the copies that the fake process group
makes in a collective: its time less that of an all-reduce, for which the fake
group does nothing. The ops in which FSDP2 packs and unpacks parameters are made
of other ops, which are measured in their place.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey
from torch._ops import resolve_key
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from .subject import Batch, Step

CALLS = 50
"""Calls in one measurement of a cheap op."""
SECONDS = 0.02
"""A measurement of a dear op takes about so long, with fewer calls."""

Measure = Callable[[], float]
"""Measures one kernel, in microseconds a call."""


class Recorder(TorchDispatchMode):
    """Every op that DTensor runs on plain tensors: how many there are, and those that do work by their signatures."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = 0
        self.counts: Counter[Any] = Counter()
        self.calls: dict[Any, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {}
        """With copies of their arguments: some ops write to these, and FSDP2 takes the memory of gathered parameters
        away."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor runs it, and its local ops come back here.
        kwargs = kwargs or {}
        if func.namespace == "fsdp":
            with self:  # its own ops come back here
                return func._op_dk(resolve_key(func, DispatchKey.CPU), *args, **kwargs)
        self.ops += 1
        if works(func):
            key = signature(func, args, kwargs)
            self.counts[key] += 1
            if key not in self.calls:
                self.calls[key] = (func, *tree_map_only(Tensor, torch.clone, (args, kwargs)))
        return func(*args, **kwargs)


NO_WORK = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "profiler::")


def works(func: Any) -> bool:
    return not func.is_view and not func.name().startswith(NO_WORK)


def signature(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Calls of equal signature cost the same and are measured once."""
    leaves, _ = tree_flatten((args, kwargs))
    return func, *((x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else repr(x) for x in leaves)


def out_overload(func: Any) -> Any | None:
    """The overload of `func` that writes into results it is given, if ATen has one that works."""
    if func is torch.ops.aten.mse_loss.default:
        return None  # it resizes the result for all losses before it reduces them, with a warning
    packet = func.overloadpacket
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        inputs = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if inputs == wanted and len(inputs) < len(other._schema.arguments):
            return other
    return None


def kernel(kernel_time: Any, func: Any, args: Any, kwargs: Any) -> list[Measure]:
    """Ways to measure one call without dispatch: with allocating and with preallocated results. The better counts."""
    # A Python number where the schema says tensor (`x - 0`) becomes the tensor that Python makes of it.
    args = tuple(
        torch.tensor(x) if str(a.type) == "Tensor" and isinstance(x, int | float) else x
        for x, a in zip(args, func._schema.arguments, strict=False)
    )
    variants = [(func, kwargs)]
    if (out := out_overload(func)) is not None:
        results = func(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        names = [a.name for a in out._schema.arguments if a.is_out]
        if all(isinstance(result, Tensor) for result in results):  # none left out by a mask
            variants.append((out, kwargs | dict(zip(names, results, strict=True))))

    def way(op: Any, keywords: dict[str, Any]) -> Measure:
        name, _, overload = op.name().partition(".")
        once, _ = kernel_time.time_call(name, overload, 1, args, **keywords)
        calls = max(1, min(CALLS, int(1e6 * SECONDS / max(once, 0.1))))

        def measure() -> float:
            call, empty = kernel_time.time_call(name, overload, calls, args, **keywords)
            return float(call - empty)

        return measure

    return [way(op, keywords) for op, keywords in variants]


def microseconds(call: Callable[[], Any]) -> float:
    start = time.thread_time()
    for _ in range(CALLS):
        call()
    return 1e6 * (time.thread_time() - start) / CALLS


def copies(group: dist.ProcessGroup, x: Tensor, whole: Callable[[], Any]) -> list[Measure]:
    """How to measure the copies that the fake group makes in one collective, `whole`."""
    return [lambda: microseconds(whole) - microseconds(lambda: group.allreduce([x]))]


def collective(func: Any, args: Any) -> list[Measure]:
    """How to measure a collective of DTensor; nothing where the fake group makes no copies."""
    x = args[0].contiguous()
    # `group_name` and, before it, the group's size.
    group = _resolve_process_group(next(a for a in reversed(args) if isinstance(a, str)))
    ranks = group.size()
    whole: Callable[[], Any]
    match func.name().removeprefix("_c10d_functional::"):
        case "all_reduce" | "all_reduce_" | "broadcast" | "broadcast_":
            return []
        case "all_gather_into_tensor":
            out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
            whole = functools.partial(group._allgather_base, out, x)
        case "reduce_scatter_tensor":
            out = x.new_empty(x.shape[0] // ranks, *x.shape[1:])
            whole = functools.partial(group._reduce_scatter_base, out, x)
        case "all_to_all_single":
            out = torch.empty_like(x)
            whole = functools.partial(group.alltoall_base, out, x, [], [])
        case other:
            raise NotImplementedError(f"the floor knows no collective {other}")
    return copies(group, x, whole)


def by_hand(func: Any, args: Any) -> list[Measure]:
    """How to measure a collective of a wrapper. DDP's are one all-reduce each, which it starts and waits for; FSDP2's
    are copies."""
    match func.name():
        case "c10d::allreduce_" | "c10d::broadcast_":
            tensors, group = args[0], dist.ProcessGroup.unbox(args[1])
            return [lambda: microseconds(lambda: group.allreduce(tensors).wait())]
        case "c10d::_allgather_base_" | "c10d::_reduce_scatter_base_":
            out, x, group = *args[:2], dist.ProcessGroup.unbox(args[2])
            whole = group._allgather_base if "gather" in func.name() else group._reduce_scatter_base
            return copies(group, x, functools.partial(whole, out, x))
        case other:
            raise NotImplementedError(f"the floor knows no collective {other}")


class Floor:
    """The kernels of one step, to be measured again and again: between the rows that it is compared with, so that
    whatever else the machine does hits them alike."""

    def __init__(self, kernel_time: Any, step: Step, batch: Batch) -> None:
        with Recorder() as recorder:
            step(*batch)
        self._counts = recorder.counts
        self._local_ops = recorder.ops
        self._names = {key: str(func) for key, (func, _, _) in recorder.calls.items()}
        self._ways: dict[Any, list[Measure]] = {}
        with torch.no_grad():
            for key, (func, args, kwargs) in recorder.calls.items():
                if func.namespace == "c10d":
                    self._ways[key] = by_hand(func, args)
                elif func.namespace == "_c10d_functional":
                    self._ways[key] = collective(func, args)
                else:
                    self._ways[key] = kernel(kernel_time, func, args, kwargs)
        self._rounds: list[dict[Any, list[float]]] = []

    def measure(self) -> None:
        """Measures each kernel once."""
        with torch.no_grad():
            self._rounds.append({key: [way() for way in ways] for key, ways in self._ways.items()})

    def figures(self) -> dict[str, Any]:
        """Milliseconds of all kernels, medians over the rounds (`ms`), of each round (`rounds_ms`), and of each op."""
        by_op: Counter[str] = Counter()
        for key, name in self._names.items():
            ways = zip(*(found[key] for found in self._rounds), strict=True)
            each = min((statistics.median(way) for way in ways), default=0.0)
            by_op[name] += self._counts[key] * max(0.0, each) / 1e3
        return {
            "ms": sum(by_op.values()),
            "rounds_ms": [
                sum(self._counts[key] * max(0.0, min(ways, default=0.0)) / 1e3 for key, ways in found.items())
                for found in self._rounds
            ],
            "local_ops": self._local_ops,
            "working_ops": sum(self._counts.values()),
            "milliseconds_by_op": dict(by_op.most_common()),
        }
