"""Names for the tensors of ``state=``, which a step reads and writes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass
class State:
    """The objects in ``state=``, flattened, with their paths."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, torch.optim.Optimizer]] = field(default_factory=list)
    loose: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    scalers: list[tuple[str, torch.amp.GradScaler]] = field(default_factory=list)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the state with its path; parameters first. No two go by one path."""
        known: dict[str, int] = {}
        for path, tensor in self._named():
            yield _unique(path, id(tensor), known), tensor

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[int, str] = {}
        full_names: dict[int, str] = {}
        owners: dict[str, int] = {}
        ambiguous: set[str] = set()  # names of parameters of two modules
        for path, module in self.modules:
            for name, parameter in module.named_parameters(remove_duplicate=False):
                full = f"{path}.{name}" if path else name
                names.setdefault(id(parameter), name)
                full_names.setdefault(id(parameter), full)
                if owners.setdefault(name, id(parameter)) != id(parameter):
                    ambiguous.add(name)
                yield full, parameter
            for name, buffer in module.named_buffers(remove_duplicate=False):
                yield (f"{path}.{name}" if path else name), buffer
        yield from self.loose
        for path, scaler in self.scalers:
            for name, value in vars(scaler).items():
                if isinstance(value, torch.Tensor):  # made by the first call
                    yield f"{path}.{name}", value
        for path, optimizer in self.optimizers:
            for i, group in enumerate(optimizer.param_groups):
                for j, parameter in enumerate(group["params"]):
                    yield f"{path}.param_groups[{i}]['params'][{j}]", parameter
                for key, value in group.items():
                    if issubclass(type(value), torch.Tensor):
                        yield f"{path}.param_groups[{i}]['{key}']", value
            for number, (owner, entries) in enumerate(optimizer.state.items()):
                if not isinstance(entries, dict):
                    continue
                label = names.get(id(owner), str(number))
                if label in ambiguous:
                    label = full_names[id(owner)]
                for key, value in entries.items():
                    if issubclass(type(value), torch.Tensor):
                        yield f"{path}.state[{label}].{key}", value


def _unique(path: str, owner: int, known: dict[str, int]) -> str:
    """A path that stands for one object only."""
    name, copies = path, 1
    while known.setdefault(name, owner) != owner:
        copies += 1
        name = f"{path}#{copies}"
    return name


def collect(state: Any) -> State:
    """Flattens ``state=``: modules, optimizers, GradScalers, tensors, dicts and lists."""
    found = State()
    _collect(found, "", state)
    known: dict[str, int] = {}
    found.modules = [(_unique(path, id(module), known), module) for path, module in found.modules]
    found.optimizers = [(_unique(path, id(optimizer), known), optimizer) for path, optimizer in found.optimizers]
    return found


def _collect(found: State, path: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, nn.Module):
        found.modules.append((path or "module", value))
    elif isinstance(value, torch.optim.Optimizer):
        found.optimizers.append((path or "optimizer", value))
    elif isinstance(value, torch.Tensor):
        found.loose.append((path or "tensor", value))
    elif isinstance(value, torch.amp.GradScaler):
        found.scalers.append((path or "scaler", value))
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(found, f"{path}.{key}" if path else str(key), item)
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            _collect(found, f"{path}[{i}]", item)
    else:
        raise TypeError(
            f"state= has a {type(value).__name__} at {path or 'its top'}: expected modules, optimizers, GradScalers, "
            "tensors, and dicts and lists of these"
        )


def unsupported(state: State) -> str | None:
    """The name of a wrapper whose steps cannot be recorded yet."""
    from torch.nn.parallel import DistributedDataParallel

    try:
        from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
    except ImportError:  # pragma: no cover - older torch
        return None
    for path, module in state.modules:
        for name, inner in module.named_modules():
            where = f"{path}.{name}" if name else path
            if isinstance(inner, DistributedDataParallel):
                return f"DistributedDataParallel at {where}"
            if isinstance(inner, FSDPModule):
                return f"FSDP2 (fully_shard) at {where}"
            if isinstance(inner, FullyShardedDataParallel):
                return f"FullyShardedDataParallel at {where}"
    return None
