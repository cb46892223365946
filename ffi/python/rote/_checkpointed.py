"""Regions of modules that set an activation checkpoint in their own ``forward``, as layers of transformers do
(``GradientCheckpointingLayer``): the region is what runs inside of the checkpoint."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from torch import nn

from . import _class_forward, _record
from ._region import Region

# The attribute with the checkpoint that such a module sets around its forward.
_CHECKPOINT = "_gradient_checkpointing_func"


def inside_of(module: nn.Module) -> Callable[..., Any] | None:
    """The function that a module's forward runs within a checkpoint, or as it is where checkpoints are off; None for a
    module that sets none."""
    forward = _class_forward.of(type(module))
    names = forward.__code__.co_names if isinstance(forward, types.FunctionType) else ()
    inside = getattr(forward, "__wrapped__", None)
    sets_one = _CHECKPOINT in names and type(getattr(module, "gradient_checkpointing", None)) is bool
    return inside if sets_one and isinstance(inside, types.FunctionType) else None


class CheckpointedRegion(Region):
    """The region of a module whose class sets a checkpoint. It captures what :func:`inside_of` finds, as a method."""

    def __init__(self, function: Callable[..., Any], state: nn.Module, **options: Any) -> None:
        super().__init__(function, state, **options)
        self._module = state
        self._checkpoints: tuple[Any, Any] | None = None  # the module's own, and the same with the region inside

    @property
    def stands_for(self) -> Callable[..., Any]:
        return types.MethodType(_class_forward.of(type(self._module)), self._module)

    def call(self, args: Any, kwargs: Any) -> Any:
        module: Any = self._module
        if _record.in_step():
            return self.stands_for(*args, **kwargs)
        own = vars(module).get(_CHECKPOINT)
        if own is None or not (module.gradient_checkpointing and module.training):
            return super().call(args, kwargs)
        if self._checkpoints is None or self._checkpoints[0] is not own:
            self._checkpoints = own, functools.partial(self._checkpoint, own)
        setattr(module, _CHECKPOINT, self._checkpoints[1])
        try:
            return self.stands_for(*args, **kwargs)
        finally:
            setattr(module, _CHECKPOINT, own)

    def _checkpoint(self, own: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """What the module calls in the place of its checkpoint."""
        inside = self._of_class(), (self._module,)
        if type(function) is functools.partial and (function.func, function.args) == inside:
            function = functools.partial(self._inside, **function.keywords)
        return own(function, *args, **kwargs)

    def _inside(self, *args: Any, **kwargs: Any) -> Any:
        return super().call(args, kwargs)

    def _of_class(self) -> Any:
        return inside_of(self._module) or super()._of_class()
