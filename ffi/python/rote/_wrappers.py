"""Wrappers of modules: which of them a recording can follow, and what it has to know of them."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import CodeType
from typing import Any

from torch import nn
from torch.autograd import graph
from torch.nn.parallel import DistributedDataParallel

from . import _fsdp, _introspect, _modules

_Modules = list[tuple[str, nn.Module]]
#: The DDP modules in reach of a step, with their paths.
Reducers = list[tuple[str, DistributedDataParallel]]
#: Where a region meets a module with a wrapper.
REMEDY_INSIDE = "make regions of modules inside of it, whose forward runs no hooks of the wrapper"
# Whether the next forward broadcasts buffers: DDP sets it in every forward.
_FLAG = "require_forward_param_sync"
# What DDP makes anew of the model's buffers, which are guarded, before each use; and what it only writes.
DERIVED = frozenset({"modules_buffers", "named_module_buffers", "_has_rebuilt_buckets"})

# Functions of PyTorch that call C++ which waits for its collectives itself: what runs while one of them is the
# innermost function of Python is that code's, and so is what a thread of the autograd engine runs outside of any.
_CALL_REDUCERS = (graph._engine_run_backward, DistributedDataParallel._distributed_broadcast_coalesced)


def unsupported(modules: _Modules) -> tuple[str, str] | None:
    """A wrapper whose steps cannot be recorded, with the remedy."""
    fsdp1 = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", ())
    for path, module in _modules.within_each(modules):
        if _is_fused(module):
            what = f"torch.compile with the backend inductor at {path}, whose kernels are no recorded ops"
            return f"uses {what}", "apply rote.capture to the model as it is before torch.compile"
        if isinstance(module, fsdp1):
            return f"uses FullyShardedDataParallel at {path}, which is not supported", "use fully_shard (FSDP2)"
    try:
        beyond, begun = _fsdp.unsupported(modules), _fsdp.unrest(modules)
    except _fsdp.OTHERWISE as problem:
        return f"uses FSDP2 (fully_shard) of a version of PyTorch that Rote does not know ({problem})", "update Rote"
    if beyond is not None:
        path, what, remedy = beyond
        return f"uses FSDP2 (fully_shard) at {path} with {what}", remedy
    return None if begun is None else (f"begins while FSDP2 (fully_shard) has {begun[0]}", begun[1])


def left(modules: _Modules) -> tuple[str, str] | None:
    """What a wrapper has left to do when the step has ended, with the remedy: a replay would not do it."""
    found = _fsdp.unrest(modules)
    return None if found is None else (f"ends while FSDP2 (fully_shard) has {found[0]}", found[1])


def begins(modules: _Modules) -> bool:
    """Whether the next call may be the first that uses a wrapper, which then makes what it keeps."""
    with suppress(*_fsdp.OTHERWISE):  # the recording refuses it
        return _fsdp.begins(modules)
    return False


def is_busy(modules: _Modules) -> bool:
    """Whether a wrapper is in the middle of something, from which a recording cannot begin."""
    with suppress(*_fsdp.OTHERWISE):
        return _fsdp.unrest(modules) is not None
    return False


def refused_of_ddp(path: str, module: DistributedDataParallel) -> tuple[str, str] | None:
    """What a DDP module does that a recording cannot follow, with the remedy."""
    found = _ddp_setting(module)
    return None if found is None else (f"uses DistributedDataParallel at {path} with {found[0]}", found[1])


def _ddp_setting(module: DistributedDataParallel) -> tuple[str, str] | None:
    """What a DDP module does that ops of the calling thread do not show, with the remedy."""
    own = _introspect.own(module) or {}
    hook = module._get_ddp_logging_data().get("comm_hook", "")
    if own.get("_comm_hooks") or hook:
        return (
            f"the communication hook {hook or 'of register_comm_hook'}, which works in other threads",
            "leave the hook out, or keep the step eager",
        )
    if own.get("mixed_precision") is not None:
        return "mixed_precision=, which works in streams of its own", "use torch.autocast"
    if getattr(own.get("_join_config"), "enable", False):
        return "join(), which asks the other ranks", "give all ranks equally many batches"
    if own.get("_use_python_reducer"):
        return "compiled autograd", "leave torch._dynamo.config.optimize_ddp at its default"
    if own.get("_delay_all_reduce_all_params"):
        return "delay_all_reduce_named_params=", "leave the argument out"
    return None


@dataclass
class Flag:
    """An attribute that a wrapper, or the step, sets for the next step."""

    path: str
    holder: dict[str, Any]
    name: str
    before: bool

    @property
    def value(self) -> bool:
        return bool(self.holder[self.name])

    def put(self, value: bool) -> None:
        self.holder[self.name] = value


class Flags:
    """Such attributes during one recording: guarded as they are before the step, and left as the step leaves them."""

    def __init__(self, reducers: Reducers, modules: _Modules) -> None:
        of_ddp = [(f"{path}.{_FLAG}", vars(module), _FLAG) for path, module in reducers]
        found = [*of_ddp, *_fsdp.flags(modules)]
        self.all = [Flag(path, holder, name, bool(holder[name])) for path, holder, name in found]

    def changed(self) -> list[tuple[str, bool]]:
        """Those that the step has set otherwise, and how."""
        return [(flag.path, flag.value) for flag in self.all if flag.value != flag.before]

    @contextmanager
    def put_back(self) -> Iterator[None]:
        """Within it, all are as before the step."""
        after = [flag.value for flag in self.all]
        for flag in self.all:
            flag.put(flag.before)
        try:
            yield
        finally:
            for flag, value in zip(self.all, after, strict=True):
                flag.put(value)


def settled(reducers: Reducers) -> int:
    """How many of the modules have made their buckets as they stay: DDP does that once, in its second iteration."""
    return sum(module._has_rebuilt_buckets for _, module in reducers)


def hooked(reducers: Reducers) -> Counter[int]:
    """How many hooks of C++ the node that adds up a parameter's gradient has, by the parameter's `id`."""
    found: Counter[int] = Counter()
    for _, module in reducers:
        found.update({id(parameter) for parameter in module._module_parameters})
    return found


def internal_code(reducers: Reducers) -> set[CodeType]:
    """Code that calls functions of C++ which wait for their collectives themselves."""
    return {inspect.unwrap(function).__code__ for function in _CALL_REDUCERS} if reducers else set()


def _is_fused(module: nn.Module) -> bool:
    """Whether a module is compiled by inductor."""
    callback: Any = getattr((_introspect.own(module) or {}).get("dynamo_ctx"), "callback", None)
    while callback is not None:
        if getattr(callback, "compiler_name", None) == "inductor":
            return True
        callback = getattr(callback, "_torchdynamo_orig_backend", None)
    return False
