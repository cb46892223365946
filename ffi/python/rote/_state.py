"""Names for the tensors of ``state=``, which a step reads and writes."""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _found, _fsdp, _introspect, _modules, _unread
from ._facts import FUNCTIONS, atom, is_of_argument, unique_path
from ._policy import DEPTH, LARGE, MODULE_PARTS, MOST, holds_hooks, is_opaque

_MAY_HOLD_TENSORS = (torch.Tensor, dict, list, tuple)


@dataclass
class State:
    """The objects in ``state=``, flattened, with their paths."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[tuple[str, torch.optim.Optimizer]] = field(default_factory=list)
    loose: list[tuple[str, torch.Tensor]] = field(default_factory=list)
    scalers: list[tuple[str, torch.amp.GradScaler]] = field(default_factory=list)
    unread: _unread.Unread = field(default_factory=_unread.Unread)
    """Attributes in which no tensor is part of the state."""
    found: _found.Found = field(default_factory=_found.Found)
    """What nobody has named."""
    as_it_is: bool = False
    """Whether parameters are those that stand in the modules now, even where FSDP2 has gathered them."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor of the state with its path; parameters first. No two go by one path."""
        known: dict[str, Any] = {}
        carried = self.unread.carried.tensors()  # arguments
        for path, tensor in itertools.chain(self._named(), self.found.tensors()):
            if id(tensor) in carried:
                continue
            name = f"state.{path}" if is_of_argument(path) else path
            yield unique_path(name, id(tensor), known), tensor

    def of_optimizers(self) -> set[int]:
        """The identities of the tensors in which optimizers and scalers keep what they know, which a script replaces
        only as a whole."""
        holders = [group for _, optimizer in self.optimizers for group in optimizer.param_groups]
        holders += [each for _, optimizer in self.optimizers for each in optimizer.state.values() if type(each) is dict]
        holders += [vars(scaler) for _, scaler in self.scalers]
        return {id(value) for each in holders for value in each.values() if issubclass(type(value), torch.Tensor)}

    def parts(self) -> set[int]:
        """The identities of its modules, inner ones too, and of its optimizers."""
        within = {id(inner) for _, inner in _modules.within_each(self.modules)}
        return within.union(id(optimizer) for _, optimizer in self.optimizers)

    def _named(self) -> Iterator[tuple[str, torch.Tensor]]:
        names: dict[int, str] = {}
        full_names: dict[int, str] = {}
        owners: dict[str, int] = {}
        ambiguous: set[str] = set()  # names of parameters of two modules
        sharded = {} if self.as_it_is else _fsdp.unsharded(self.modules)
        for path, module in self.modules:
            for name, found in _modules.parameters(module):
                parameter = sharded.get(id(found), found)
                full = f"{path}.{name}" if path else name
                names.setdefault(id(parameter), name)
                full_names.setdefault(id(parameter), full)
                if owners.setdefault(name, id(parameter)) != id(parameter):
                    ambiguous.add(name)
                yield full, parameter
            for name, buffer in _modules.buffers(module):
                yield (f"{path}.{name}" if path else name), buffer
        if not self.as_it_is:
            yield from _fsdp.gathered(self.modules)
        for path, inner in _modules.within_each(self.modules):
            yield from _attributes(path, inner, self.unread)
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


def _attributes(path: str, module: nn.Module, unread: _unread.Unread) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that are attributes of a module and neither parameters nor buffers, in tuples, lists and dicts too. One
    with a graph is none of the state: it is left from a call. So is one in an attribute that the step does not read."""
    pending = [
        (f"{path}.{name}", value)
        for name, value in reversed((_introspect.own(module) or {}).items())
        if issubclass(type(value), _MAY_HOLD_TENSORS)
        and name not in MODULE_PARTS
        and not holds_hooks(str(name))
        and (module, name) not in unread
    ]
    above: set[int] = set()
    while pending:
        where, value = pending.pop()
        if issubclass(type(value), torch.Tensor):
            if value.grad_fn is None:
                yield where, value
        elif id(value) not in above and issubclass(type(value), _MAY_HOLD_TENSORS) and _introspect.size(value) <= LARGE:
            above.add(id(value))
            pending += reversed([(f"{where}[{_text(key)}]", item) for key, item in _items(value)])


def _items(container: Any) -> list[tuple[Any, Any]]:
    """The entries of a container with their keys or places, by no code of its class."""
    if issubclass(type(container), dict):
        return [(key, dict.__getitem__(container, key)) for key in _introspect.entries(container)]
    return list(enumerate(_introspect.entries(container)))


def _text(key: Any) -> str:
    return repr(key) if type(key) in (str, int, float, bool, type(None)) else f"a {_introspect.name(type(key))}"


def collect(
    state: Any, unread: _unread.Unread | None = None, found: _found.Found | None = None, *, as_it_is: bool
) -> State:
    """Flattens ``state=``: modules, optimizers, GradScalers and tensors, in dicts, lists, tuples and the attributes of
    objects. Entries of dicts, lists and tuples come first, then the attributes and slots of objects, level by level.
    ``unread``, ``found`` and ``as_it_is``: as :class:`State` has them."""
    whole = State(unread=unread or _unread.Unread(), found=found or _found.Found(), as_it_is=as_it_is)
    search = _Search(whole)
    search.given("", state)
    search.attributes()
    for path, part in whole.found.parts():
        search._held(path, part, 0)
    search.attributes()
    known = dict[str, Any]()
    whole.modules = [(unique_path(path, id(module), known), module) for path, module in whole.modules]
    whole.optimizers = [(unique_path(path, id(optimizer), known), optimizer) for path, optimizer in whole.optimizers]
    whole.scalers = [(unique_path(path, id(scaler), known), scaler) for path, scaler in whole.scalers]
    return whole


class _Search:
    """Looks for modules, optimizers, GradScalers and tensors."""

    def __init__(self, whole: State) -> None:
        """``whole``: what is to be filled."""
        self.whole = whole
        self._seen: dict[int, Any] = {}  # which keep their addresses
        self._objects: collections.deque[tuple[str, Any, int]] = collections.deque()

    def given(self, path: str, value: Any) -> None:
        """What the user names. Raises where there is nothing that belongs to a state."""
        if value is None or self._part(path, value):
            return
        if isinstance(value, dict):
            for key, item in value.items():
                self.given(f"{path}.{key}" if path else str(key), item)
        elif isinstance(value, list | tuple):
            for i, item in enumerate(value):
                self.given(f"{path}[{i}]", item)
        elif not _has_attributes(value) or not (_holds_state(value) or isinstance(value, torch.optim.Optimizer)):
            raise TypeError(
                f"state= has a {type(value).__name__} at {path or 'its top'}: expected modules, optimizers, "
                "GradScalers, tensors, and dicts, lists and objects that hold these"
            )
        else:
            self._objects.append((path, value, 0))

    def attributes(self) -> None:
        """Looks into the objects that were found, each of them once."""
        while self._objects and len(self._seen) < MOST:
            path, value, depth = self._objects.popleft()
            if id(value) in self._seen or depth > DEPTH:
                continue
            self._seen[id(value)] = value
            skip = ("param_groups", "state", "defaults") if _is_optimizer(value) else ()
            for name, item in _attributes_of(value):
                if name not in skip and (value, name) not in self.whole.unread:
                    self._held(f"{path}.{name}" if path else name, item, depth + 1)

    def _held(self, path: str, value: Any, depth: int) -> None:
        if depth > DEPTH or id(value) in self._seen:
            return
        kind = type(value)
        if issubclass(kind, (nn.Module, torch.Tensor, torch.amp.GradScaler)) or _is_optimizer(value):
            left = issubclass(kind, torch.Tensor) and value.grad_fn is not None  # from a call
            if not left and not any(value is known for known in self._of(kind)):
                self._part(path, value)
        elif issubclass(kind, dict | list | tuple):
            if _introspect.size(value) <= LARGE:
                self._seen[id(value)] = value
                for key, item in _items(value):
                    self._held(f"{path}[{_text(key)}]", item, depth + 1)
        elif _has_attributes(value):
            self._objects.append((path, value, depth))

    def _of(self, kind: type) -> list[Any]:
        found = self.whole
        if issubclass(kind, nn.Module):
            return [inner for _, inner in _modules.within_each(found.modules)]
        stores: list[Any] = [found.optimizers, found.scalers, found.loose]
        kinds = (torch.optim.Optimizer, torch.amp.GradScaler, torch.Tensor)
        return [
            known
            for _, known in next(store for store, each in zip(stores, kinds, strict=True) if issubclass(kind, each))
        ]

    def _part(self, path: str, value: Any) -> bool:
        found = self.whole
        if isinstance(value, nn.Module):
            path = path or "module"
            found.modules.append((path, value))
            if not found.as_it_is:
                self._optimizers_in(path, value)
        elif _is_optimizer(value):
            found.optimizers.append((path or "optimizer", value))
            self._objects.append((path or "optimizer", value, 0))  # it may hold others
        elif isinstance(value, torch.Tensor):
            found.loose.append((path or "tensor", value))
        elif isinstance(value, torch.amp.GradScaler):
            found.scalers.append((path or "scaler", value))
        else:
            return False
        return True

    def _optimizers_in(self, path: str, module: nn.Module) -> None:
        """Optimizers that modules have as attributes: models that train themselves."""
        for place, inner in _modules.within_each([(path, module)]):
            for key, item in list((_introspect.own(inner) or {}).items()):
                if _is_optimizer(item) and not any(item is known for known in self._of(type(item))):
                    self._part(f"{place}.{key}", item)


def _is_optimizer(value: Any) -> bool:
    """Whether an object is an optimizer with groups of its own. One that hands all on to another optimizer, as that of
    `accelerate` does, is an object that holds the other."""
    own = _introspect.own(value) or {}
    return issubclass(type(value), torch.optim.Optimizer) and "param_groups" in own and "state" in own


def _has_attributes(value: Any) -> bool:
    """Whether an object may hold a part of the state: none of Python's own, of the system's or of a registry's."""
    kind = type(value)
    if atom(value) or issubclass(kind, (*FUNCTIONS, type, types.ModuleType)) or is_opaque(kind):
        return False
    return _introspect.own(value) is not None or any(True for _ in _introspect.members(kind))


def _attributes_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes and the filled slots of an object, by no code of its class."""
    for name, item in list((_introspect.own(value) or {}).items()):
        if type(name) is str:
            yield name, item
    for name, member, _ in _introspect.members(type(value)):
        try:
            item = member.__get__(value)
        except AttributeError:
            continue
        yield name, item


def _holds_state(value: Any) -> bool:
    """Whether an object holds a part of a state at all."""
    search = _Search(State())
    search._objects.append(("", value, 0))
    search.attributes()
    found = search.whole
    return bool(found.modules or found.optimizers or found.scalers or found.loose)
