"""What a recording finds in reach of a step. The next recording takes it over while its guards hold."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _facts, _fsdp, _introspect, _modules, _reach, _uses, _wrappers
from ._bridge import bridge
from ._frames import TORCH
from ._libraries import PACKAGES
from ._numbers import ARGUMENT

if TYPE_CHECKING:
    from ._step import Step

_Named = list[tuple[str, Any]]


def much_code(modules: list[tuple[str, nn.Module]]) -> bool:
    """Whether modules are of an installed package other than PyTorch: then there is most often too much code in reach
    to follow it before a call has shown which of it runs."""
    kinds = {type(inner) for _, inner in _modules.within_each(modules)}
    return any(_is_of_package(kind) for kind in kinds)


def _is_of_package(kind: type) -> bool:
    file = getattr(sys.modules.get(_introspect.module_of(kind)), "__file__", None)
    return isinstance(file, str) and file.startswith(PACKAGES) and not file.startswith(TORCH)


class Survey:
    """One walk over all that a step can reach, and the facts that it has found."""

    def __init__(self, step: Step) -> None:
        self._step = step
        self.number: int | None = None
        """The library's, once it waits for a recording."""
        self.facts: list[_facts.Fact] = []
        self.told: list[_facts.Fact] = []
        """What the library was told, in order: these facts, and others."""
        self.guards: list[tuple[int, str, str]] = []
        """The same of guards that are text."""
        self.groups: set[str] = set()
        """Process groups that are guarded."""
        self._leaves: _Named = []
        self._modules: list[str] = []  # that were imported
        self.walk = _reach.Reach(
            step.function,
            step.ignore,
            step.ran,
            step.read_schedulers,
            step.missed_by_schedulers,
            step.unread,
            step.is_region,
        )

    def make(
        self,
        tensors: list[tuple[str, torch.Tensor]],
        leaves: _Named,
        containers: Iterable[Any],
        refuse: Callable[[str, str, str], None],
        guard: Callable[[int, str, str], None],
    ) -> None:
        """Follows everything. ``tensors``: the state's; ``leaves``: the arguments'; ``containers``: those in the
        arguments; ``refuse``: refuses the recording; ``guard``: adds a guard that is text."""
        walk, state, self._leaves = self.walk, self._step.state, leaves
        self._modules = list(sys.modules)
        walk.watched = _uses.watched(optimizer for _, optimizer in state.optimizers)
        for path, named in (*tensors, *state.modules, *state.optimizers):
            walk.name(path, named)
        seen: set[int] = set()
        for path, tensor in tensors:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                walk.tensor(path, tensor)
        for path, leaf in leaves:
            guard(ARGUMENT, path, walk.argument_in_words(path, leaf))
        in_c = [
            (path, tensor, self._hooks(path, tensor))
            for path, tensor in ([] if self._step.is_region else [*tensors, *leaves])
            if isinstance(tensor, torch.Tensor)
        ]
        names = {id(tensor): path.split(".", 1)[-1] for path, tensor in reversed(tensors)}
        for path, optimizer in state.optimizers:  # first: a module may hold one
            walk.optimizer(path, optimizer, names)
        for path, module in state.modules:
            walk.module(path, module)
        walk.function(self._step.function)
        for path, leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                walk.argument(path, leaf)
            else:
                walk.value(path, leaf, 0)
        for container in containers:
            walk.of_class(type(container), 0)
        self.facts = walk.finish()
        for path, reducer in walk.reducers:
            if self._step.is_region:
                refuse("", f"uses DistributedDataParallel at {path}, inside the region", _wrappers.REMEDY_INSIDE)
            unsupported = _wrappers.refused_of_ddp(path, reducer)
            if unsupported is not None:
                refuse("", *unsupported)
        named = {id(fsdp_state) for _, fsdp_state in _fsdp.states(self._step.wrapped)}
        for path, fsdp_state in walk.fsdp_states:
            if self._step.is_region:
                refuse("", f"uses FSDP2 (fully_shard) at {path}, inside the region", _wrappers.REMEDY_INSIDE)
            elif id(fsdp_state) not in named:
                refuse("", f"uses FSDP2 (fully_shard) at {path}, beyond the state", "name the model in state=")
        known = _wrappers.hooked(walk.reducers)
        for path, tensor, number in in_c:
            if number > known[id(tensor)]:
                refuse(
                    "",
                    f"takes the gradient of {path} under a C++ hook, which a replay would not call",
                    "name the DistributedDataParallel module that has registered the hook in state=, or apply "
                    "rote.capture to a model without the wrapper that registers it",
                )

    def _hooks(self, path: str, tensor: torch.Tensor) -> int:
        """Guards what the hooks of a tensor, and of the node that adds up its gradient, can reach. Comes back: how many
        of them are C++."""
        hooks = bridge().hooks_of(tensor)
        for hook in hooks:
            if hook is not None:
                self.walk.value(f"{path}.hooks", hook, 0)
        return sum(hook is None for hook in hooks)

    def wait(self, number: int | None) -> Survey | None:
        """Waits for the next recording: keeps what a plan would hold too, and not the tensors of the call. ``number``:
        the library's; none where the next recording has to look for itself."""
        self.number = number
        if number is None:
            return None
        self.walk.let_go(leaf for _, leaf in self._leaves if isinstance(leaf, torch.Tensor))
        self._leaves = []
        return self

    def is_up_to_date(self) -> bool:
        """Whether no Python module was imported since: code may name it, and none of it is guarded."""
        return self._modules == list(sys.modules)

    def forget(self) -> None:
        """Lets go of everything."""
        self.walk.forget()
        self.facts, self.told, self.guards, self._leaves = [], [], [], []
