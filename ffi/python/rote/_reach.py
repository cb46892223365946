"""The Python values that a step can reach, as facts to guard.

A threshold that is crossed at step 1,000 leaves no trace in two recordings, so
plain values in reach of the captured function are guarded: closure cells,
globals that its code names, attributes of captured modules, tensors, objects,
classes and Python modules, and entries of containers, down to ``DEPTH`` hops (a
call is no hop). Of containers with more than ``LARGE`` entries, which entries
they hold is guarded, not what these hold.
"""

from __future__ import annotations

import copyreg
import functools
import os
import sys
import types
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from . import _executed_code, _introspect, _unread
from ._executed_code import Codes
from ._facts import ABSENT, FUNCTIONS, Fact, metadata, metadata_of_gradient
from ._numbers import (
    ATTRIBUTE,
    DICT_ITEM,
    ENTRY_SIZE,
    GRAD_META,
    HOST,
    ITEMS,
    LIST_ITEM,
    METADATA,
    OWN,
    REFERENTS,
    SIZE,
    STATE,
    TENSOR_META,
    TUPLE_ITEM,
)
from ._objects import Objects
from ._policy import (
    Asked,
    asked_of_definitions,
    asks,
    asks_for_stores,
)
from ._specs import short_text
from ._uses import is_number, is_numbers


class Reach(Objects):
    """The walk over everything that one step can reach."""

    def __init__(
        self,
        function: Any,
        ignore: tuple[str, ...],
        ran: Codes | None = None,
        read: Sequence[Any] = (),
        missed: frozenset[str] = frozenset(),
        unread: _unread.Unread | None = None,
        is_region: bool = False,
    ) -> None:
        """``is_region``: gradients, and hooks of tensors and of the state's modules, are outside."""
        while issubclass(type(function), functools.partial):
            function = function.func
        super().__init__(_innermost(function), ignore, ran, read, missed, unread or _unread.Unread())
        self._is_region = is_region

    # -- where it starts ------------------------------------------------------

    def module(self, path: str, module: nn.Module) -> None:
        """Guards a module and its children, however deep."""
        if self._is_region:
            self.entered.add(id(module))
        self.value(path, module, 0)

    def optimizer(self, path: str, optimizer: torch.optim.Optimizer, names: dict[int, str]) -> None:
        """Guards an optimizer: hyperparameters, parameters and state."""
        own = _introspect.own(optimizer) or {}
        self.add(OWN, optimizer, None, STATE, path, optimizer)
        for key in ("param_groups", "state"):  # loading a state dict replaces both
            self.add(ENTRY_SIZE, own, key, STATE, f"{path}.{key}", own.get(key))
        groups = optimizer.param_groups
        self.visit(groups)
        self.visit(optimizer.state)
        for i, group in enumerate(groups):
            self.visit(group)
            self.add(LIST_ITEM, groups, i, STATE, f"{path}.param_groups[{i}]", group)
            self.add(SIZE, group, None, STATE, f"{path}.param_groups[{i}]", group)
            for key, value in group.items():
                subject = f"{path}.param_groups[{i}]['{key}']"
                if key == "params":
                    self.visit(value)
                    self.add(ENTRY_SIZE, group, key, STATE, subject, value)
                    for j, parameter in enumerate(value):
                        self.add(LIST_ITEM, value, j, STATE, f"{subject}[{j}]", parameter, names.get(id(parameter), ""))
                    continue
                hyper = is_number(value)
                self.add(DICT_ITEM, group, key, STATE, subject, value, hyperparameter=hyper)
                self.value(subject, value, 1)
                if is_numbers(value):
                    for j, item in enumerate(value):
                        place = (key, j, len(value))
                        self.add(TUPLE_ITEM, group, place, STATE, f"{subject}[{j}]", item, hyperparameter=True)
        for number, (owner, entries) in enumerate(optimizer.state.items()):
            label = f"{path}.state[{names.get(id(owner), number)}]"
            self.add(DICT_ITEM, optimizer.state, owner, STATE, label, entries, "")
            if not isinstance(entries, dict):
                self.value(label, entries, 1)
                continue
            self.visit(entries)
            self.add(SIZE, entries, None, STATE, label, entries)
            for key, value in entries.items():
                self.add(DICT_ITEM, entries, key, STATE, f"{label}.{key}", value)
                if not issubclass(type(value), torch.Tensor):
                    self.value(f"{label}.{key}", value, 1)
        self._object(path, optimizer, 0, skip=("state", "param_groups"))

    def tensor(self, path: str, tensor: torch.Tensor) -> None:
        """Guards a tensor of the state by address and meta, its attributes and its ``.grad``."""
        grad = tensor.grad if tensor.is_leaf and not self._is_region else None
        text = short_text(tensor) + self.sharing(path, tensor)
        shared = "" if grad is None else self.memory(f"{path}.grad", grad)
        self.facts.append(Fact(TENSOR_META, tensor, self._is_region or None, STATE, path, text))
        self.visit(tensor)
        self._entries_of_own(path, tensor, 0)
        self._tensor_class(path, tensor, 0)
        if self._is_region:
            return
        self._hooks_of(path, tensor, 0)
        # One that requires no gradient may have one from before; that there is none is part of its meta.
        if tensor.is_leaf and (tensor.requires_grad or grad is not None):
            text = metadata_of_gradient(tensor) + shared
            self.facts.append(Fact(GRAD_META, tensor, grad is not None, STATE, f"{path}.grad", text))
        self._inside(path, tensor, 0)

    def argument(self, path: str, tensor: torch.Tensor) -> None:
        """Guards what the attributes of an argument hold; which they are, each call says itself."""
        if id(tensor) not in self.seen:
            self.hold(tensor)
            self._arguments.add(id(tensor))  # not visited: what leads to it otherwise may lead to something else
        for key, item in (_introspect.own(tensor) or {}).items():
            self.value(f"{path}.{key}", item, 1)
        self._tensor_class(path, tensor, 0, argument=True)
        self._inside(path, tensor, 0)

    def argument_in_words(self, path: str, value: Any) -> str:
        """What an argument is; of a tensor, what its attributes are too, and where it lies in memory."""
        if not issubclass(type(value), torch.Tensor):
            return self.described(path, value)
        own = (_introspect.own(value) or {}).items()
        attributes = (f", .{key} = {self.described(f'{path}.{key}', item)}" for key, item in own)
        return self.described(path, value, metadata(value)) + "".join(attributes) + self.memory(path, value)

    def function(self, function: Any) -> None:
        """Guards what a function can reach."""
        self.value("" if issubclass(type(function), FUNCTIONS) else "self", function, 0)

    # -- where it ends --------------------------------------------------------

    def finish(self) -> list[Fact]:
        """Follows what is left to follow; every fact."""
        for owner in (nn.modules.module, sys.modules["torch.optim.optimizer"]):
            for name, hooks in vars(owner).items():
                if name.startswith("_global_") and name.endswith("_hooks") and isinstance(hooks, dict):
                    self._hooks(f"torch.{name}", hooks, 1)
        self._follow()
        self._follow_unfound()
        self._follow_weak()  # what is held strongly too has been seen by now
        self._classes.finish()
        self._follow()
        self._follow_weak()
        if self._reads_environment:
            self._environment()
        self.handlers.of_names(self._named.names)
        self._definitions()
        for function in self.functions:
            self.handlers.of_function(function)
        # Seeds and iterators may change as they like where nobody asks.
        if asks(Asked.POSITIONS, self._named.names):
            for path, iterator in self._standing:
                self.add(REFERENTS, iterator, True, HOST, path, iterator)
        if asks_for_stores(self._named.names):
            for path, value in self._stores:
                self._hooks(path, value, 1) if isinstance(value, dict) else self.value(path, value, 1)
            self._follow()
        if asks(Asked.SEEDS, self._named.names):
            for path, generator in self._generators:
                self.add(METADATA, generator, None, HOST, path, generator)
        for path, what, asking in self._asked_only:
            if not asking.isdisjoint(self._named.attributes):
                self.unguarded.append((path, what))
        if self._named.sees_own:
            for path, value in self._objects:
                self.add(OWN, value, True, HOST, path, value)
        self._named.finish()
        return self.facts

    def _follow_weak(self) -> None:
        """Follows weak references."""
        firmly = len(self._hold)
        while self._weak:
            for path, value, depth in self._weak:
                try:
                    self._weakly(path, value, depth)
                except Exception as problem:  # an object may be anything
                    self._note_unseen(path, problem)
            self._weak.clear()
            self._follow()
        self.held_weakly += self._hold[firmly:]

    def _follow_unfound(self) -> None:
        """Follows functions that the step runs and that no name has led to."""
        asked: set[int] = set()
        while self.ran is not None:
            missing = _executed_code.missing(self.ran, self.functions)
            unfound = {address: code for address, code in missing.items() if address not in asked}
            if not unfound:
                return
            asked |= unfound.keys()
            for function in _executed_code.functions_of(unfound):
                self.soon(f"{function.__module__}.{function.__qualname__}", function, 1)
            self._follow()

    def _definitions(self) -> None:
        """Guards what functions and classes say of themselves, where code asks for it."""
        asked = asked_of_definitions(self._named.attributes, self._named.names)
        if asks(Asked.COPIES, self._named.names):
            self.add(ITEMS, copyreg.dispatch_table, True, HOST, "copyreg.dispatch_table", copyreg.dispatch_table)
        if "__annotations__" in asked:
            for function in self.functions:
                subject, found = f"{function.__qualname__}.__annotations__", function.__annotations__
                if self.add(ATTRIBUTE, function, "__annotations__", HOST, subject, found):
                    self.value(subject, found, 1)
        self._classes.of_definitions(asked)
        self._follow()

    def _environment(self) -> None:
        """Guards all variables, and tells other processes of those that code in reach names."""
        data = vars(os.environ)["_data"]
        named = {os.environ.encodekey(text) for text in self._named.texts if text.isidentifier()}
        self.add(SIZE, data, None, HOST, "os.environ", data, "")
        for key in (*data, *sorted(named - data.keys())):
            text = None if key in named else ""
            self.add(DICT_ITEM, data, key, HOST, f"os.environ[{key!r}]", data.get(key, ABSENT), text)

    def _follow(self) -> None:
        while True:
            self.catch_up()
            if not self._named.modules() | self._named.of_uncalled():
                return

    @property
    def not_told(self) -> str:
        """What a stored plan cannot say of the step, so that another process cannot tell whether it is the same;
        empty if there is nothing."""
        if self._named.hashes and sys.flags.hash_randomization:
            return "the step may depend on the order of a set or on a hash, which differs in every process"
        if self.untold:
            return f"only C code knows the contents of {self.untold[0]}"
        return f"{self.stopped[0]}, too much to follow" if self.stopped else ""


def _innermost(function: Any) -> Any:
    """The function that decorators wrap, if they say so."""
    seen = set()
    while type(function) is types.FunctionType and "__wrapped__" in function.__dict__ and id(function) not in seen:
        seen.add(id(function))
        function = function.__dict__["__wrapped__"]
    return function.__func__ if type(function) is types.MethodType else function
