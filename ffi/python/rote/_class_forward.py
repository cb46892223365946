"""The ``forward`` of a class of modules, in whose place regions run for some of the modules.

It stands in the class and not in the modules, so that copies of these are modules as any other."""

from __future__ import annotations

import threading
import types
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from ._captured import Captured, step_of

if TYPE_CHECKING:
    from ._region import Region
    from ._step import Step

# By what code gets at the class of an object.
_LOOKING = frozenset({"type", "__class__"})
_lock = threading.Lock()
# Of each class one for good: guards know it by its address.
_known: dict[type[nn.Module], ClassForward] = {}


class ClassForward:
    """What is called in the place of a class's ``forward``. It is to :class:`Captured` what a step is."""

    def __init__(self, kind: type[nn.Module]) -> None:
        self.function = self.stands_for = kind.forward
        self.kind = kind
        self.captured: Captured[..., Any] = Captured(cast("Step", self))
        self._inherits = "forward" not in vars(kind)
        self._regions: dict[int, list[Region]] = {}  # by their modules; those that serve stand last

    def call(self, args: Any, kwargs: Any) -> Any:
        regions = self._regions.get(id(args[0])) if args else None
        if not regions:
            return self.stands_for(*args, **kwargs)
        return regions[-1].call(args[1:], kwargs)

    def add(self, module: nn.Module, region: Region) -> None:
        if not self._regions:
            self.kind.forward = self.captured
        self._regions.setdefault(id(module), []).append(region)

    def remove(self, module: nn.Module, region: Region) -> None:
        """A ``forward`` that the class has been given since stays."""
        regions = self._regions[id(module)]
        regions.remove(region)
        if not regions:
            del self._regions[id(module)]
        if self._regions or vars(self.kind).get("forward") is not self.captured:
            return
        if self._inherits:
            del self.kind.forward
        else:
            self.kind.forward = self.stands_for


def of(kind: type[nn.Module]) -> Any:
    """The ``forward`` of a class itself, whatever is put in its place."""
    now: Any = kind.forward
    step: Any = step_of(now) if type(now) is Captured else None
    return step.stands_for if type(step) is ClassForward else now


def can_be_put(kind: type[nn.Module]) -> bool:
    """Whether :func:`put` is for modules of a class: not if their ``forward`` may look at that of the class."""
    own = of(kind)
    if type(own) is not types.FunctionType or own is nn.Module.forward or type(kind) is not type:
        return False
    return "forward" not in own.__code__.co_names or _LOOKING.isdisjoint(own.__code__.co_names)


def put(module: nn.Module, region: Region) -> ClassForward:
    """From now on, calls of a module are calls of a region. Both must live until :func:`take`."""
    kind = type(module)
    with _lock:
        forward = _known.get(kind)
        if forward is None or forward.stands_for is not of(kind):
            forward = _known[kind] = ClassForward(kind)
        forward.add(module, region)
        return forward


def take(forward: ClassForward, module: nn.Module, region: Region) -> None:
    """Undoes :func:`put`."""
    with _lock:
        forward.remove(module, region)
