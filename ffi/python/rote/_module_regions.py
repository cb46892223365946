"""Regions in the place of a step that cannot be replayed: the modules that it calls, captured by themselves."""

from __future__ import annotations

import contextlib
import functools
import linecache
import logging
import re
import sys
import types
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from . import _checkpointed, _class_forward, _introspect, _modules
from ._captured_module import region_of
from ._class_forward import ClassForward
from ._libraries import is_own_file
from ._region import Region, Watch
from ._region_checks import tensors_in
from ._step import Stats

# Turns with calls of a module that are watched before it becomes a region.
_WATCHED = 2
# Calls of a region until it has a plan; of one that has none by then, the modules inside become regions.
_PATIENCE = 24
# A region with fewer instructions costs about what it saves, if none of them is for a DTensor.
_FEW = 8
_TWICE = "create_graph"
_VARIABLE = re.compile(r"^(?:globals|closure)\['(\w+)'\]")


class _Watched(Watch):
    """The calls of a module before it becomes a region: whether what they give is differentiated twice."""

    def __init__(self) -> None:
        self.twice = False
        self._is_called = False
        self._turns = 0

    def run(self, region: Region, args: Any, kwargs: Any) -> Any:
        self._is_called = True
        result = region.stands_for(*args, **kwargs)
        if torch.is_grad_enabled():
            for tensor in tensors_in(result, None):
                if tensor.grad_fn is not None:
                    tensor.register_hook(self._look_at_mode)
        return result

    def has_seen_enough(self) -> bool:
        """Whether a turn that has just ended was the last one to be watched."""
        self._turns += self._is_called
        self._is_called = False
        return self._turns == _WATCHED

    def _look_at_mode(self, _: torch.Tensor) -> None:
        self.twice |= torch.is_grad_enabled()


class _Module:
    """A module whose forward is a region while the step runs as it is written, and its own at all other times: also
    while a replay looks at it, or a recording."""

    def __init__(self, path: str, module: nn.Module, options: dict[str, Any]) -> None:
        self.path, self.module = path, module
        self.region = region_of(module, is_quiet=True, strict=False, **options)
        self._kind, self._own = type(module), _class_forward.of(type(module))
        self._parameters = [each for _, each in _modules.parameters(module)]
        self._forward: ClassForward | None = None
        self.is_over = False

    def put(self) -> None:
        """The step runs. A module that has been given another forward keeps it. One with hooks of parameters is none: a
        region does not keep their order."""
        if type(self.module) is not self._kind or _class_forward.of(self._kind) is not self._own:
            self.is_over = True
        elif _can_be_one(self.module) and not any(map(_has_hooks, self._parameters)):
            self._forward = _class_forward.put(self.module, self.region)

    def take(self) -> None:
        """It has ended."""
        if self._forward is not None:
            forward, self._forward = self._forward, None
            _class_forward.take(forward, self.module, self.region)

    def is_slight(self) -> bool:
        """Whether the region, which has a plan, has little to replay."""
        few = sum(self.region.plan_counts().values()) < _FEW
        return few and not _has_dtensors(self.module)


class ModuleRegions:
    """The modules that a step calls, as regions while it runs.

    These are the modules that the step names, and in the place of one that can be no region those inside of it. What is
    differentiated twice stays as it is: regions cannot be."""

    def __init__(self, **options: Any) -> None:
        """``options``: those of regions, but for ``strict``."""
        self._options = options
        self._open: list[_Module] = []  # of which it is not known yet whether they serve
        self._serve: list[_Module] = []
        self._put: list[_Module] = []  # by the call that is under way
        self._depth = 0  # of parts of the step within others
        self._why: list[str] = []  # others do not
        self._known: set[int] = set()

    def begin(self, function: Any, modules: list[tuple[str, nn.Module]]) -> None:
        """Finds the modules of a step that are regions from its next call on. Raises nothing."""
        try:
            self._begin(function, modules)
        except Exception as problem:  # which is not the step's
            self._stop(f"{type(problem).__name__}: {problem}")

    def _begin(self, function: Any, modules: list[tuple[str, nn.Module]]) -> None:
        kinds = [type(inner) for _, inner in _modules.within_each(modules)]
        if _names_second_derivatives([getattr(each, "__module__", None) for each in (function, *kinds)]):
            self._why.append(f"{_TWICE} stands in the script, and regions cannot be differentiated twice")
            return
        for path, module in modules:
            self._add(_VARIABLE.sub(r"\1", path), module, is_watched=True)

    def __enter__(self) -> None:
        """A part of the step runs as it is written."""
        self._depth += 1
        if self._depth > 1:
            return
        self._put = [*self._open, *self._serve]
        for each in self._put:
            try:
                each.put()
            except Exception:  # of a class that is none as any other
                each.is_over = True

    def __exit__(self, *_: object) -> None:
        """It has ended."""
        self._depth -= 1
        if self._depth:
            return
        put, self._put = self._put, []
        for each in put:
            each.take()
        if any(each.is_over for each in put):
            self._open = [each for each in self._open if not each.is_over]
            self._serve = [each for each in self._serve if not each.is_over]
        try:
            self._look()
        except Exception as problem:  # which is not the step's
            self._stop(f"{type(problem).__name__}: {problem}")

    def _look(self) -> None:
        """Looks at what a call has told of regions that are not known to serve."""
        for each in [each for each in self._serve if each.region.has_given_up()]:
            self._serve.remove(each)
            self._open.append(each)
        for each in self._open[:]:
            watch = each.region.watch
            if not isinstance(watch, _Watched):
                self._judge(each)
            elif watch.twice:
                self._stop(f"{each.path} is differentiated twice, which regions cannot be")
                return
            elif watch.has_seen_enough():
                each.region.watch = None

    def _judge(self, each: _Module) -> None:
        if each.region.results and not each.region.has_given_up():
            self._open.remove(each)
            if not each.is_slight():
                self._serve.append(each)
        elif why := each.region.cannot_be_replayed(_PATIENCE):
            self._open.remove(each)
            self._why.append(f"{each.path}: {why}")
            for path, inner in _inside(each.path, each.module):
                self._add(path, inner, is_watched=False)

    def _stop(self, why: str) -> None:
        self._open, self._serve = [], []
        self._why.append(why)

    def _add(self, path: str, module: nn.Module, is_watched: bool) -> None:
        """Makes a region of a module, or of those inside of one that has no forward of its own or is a wrapper."""
        if id(module) in self._known or isinstance(module, nn.DataParallel) or "dynamo_ctx" in vars(module):
            return
        self._known.add(id(module))
        inside = _inside(path, module)
        if isinstance(module, DistributedDataParallel) or not _can_be_one(module):
            for inner_path, inner in inside:
                self._add(inner_path, inner, is_watched)
        elif inside or _has_dtensors(module):
            with contextlib.suppress(Exception):  # modules may be anything: this one stays as it is
                added = _Module(path, module, self._options)
                added.region.watch = _Watched() if is_watched else None
                self._open.append(added)
                logging.getLogger("rote.record").info("%s becomes a region", path)

    # -- what people look at ----------------------------------------------------

    @property
    def stats(self) -> dict[str, Stats]:
        """The counters of the regions that serve, by the paths of their modules."""
        return {each.path: each.region.stats for each in self._serve}

    def explain(self) -> str:
        """The reports of the regions, and why other modules are none."""
        reports = [f"region {each.path}:\n{each.region.explain()}" for each in self._serve]
        return "\n".join([*reports, *(f"no region: {why}" for why in self._why)])


def _inside(path: str, module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that a module holds itself."""
    return [(f"{path}.{name}", child) for name, child in module._modules.items() if child is not None]


def _can_be_one(module: nn.Module) -> bool:
    """Whether a module can be a region: it has no ``forward`` of its own, which libraries put around that of the class,
    and sets no checkpoint around itself."""
    if "forward" in vars(module):
        return False
    if _checkpointed.inside_of(module) is not None:
        return getattr(module, "gradient_checkpointing", None) is False
    return _class_forward.can_be_put(type(module))


def _has_hooks(parameter: torch.Tensor) -> bool:
    return bool(parameter._backward_hooks or parameter._post_accumulate_grad_hooks)


def _has_dtensors(module: nn.Module) -> bool:
    return any(isinstance(each, DTensor) for _, each in _modules.parameters(module))


@functools.cache
def _names(file: str) -> bool:
    return any(_TWICE in line for line in linecache.getlines(file))


def _names_second_derivatives(names: list[Any]) -> bool:
    """Whether the user's own code names what differentiates twice, now or some day: files of modules of these names, of
    ``__main__``, and of what these have among their globals."""
    known: set[str] = set()
    left = ["__main__", *names]
    while left:
        name = left.pop()
        if type(name) is not str or name in known:
            continue
        known.add(name)
        own = _introspect.own(sys.modules.get(name)) or {}
        file = own.get("__file__")
        if type(file) is str and is_own_file(file):
            if _names(file):
                return True
            left += [_module_of(value) for value in list(own.values())]
    return False


def _module_of(value: Any) -> Any:
    """The name of the Python module that a value is, or that it or its class is of."""
    if isinstance(value, types.ModuleType):
        return (_introspect.own(value) or {}).get("__name__")
    return getattr(value if isinstance(value, type | types.FunctionType) else type(value), "__module__", None)
