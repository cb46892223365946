"""Modules whose ``forward`` is a region."""

from __future__ import annotations

import types
from typing import Any

from torch import nn

from . import _checkpointed
from ._captured import Captured
from ._checkpointed import CheckpointedRegion
from ._region import Region
from ._step import Stats


class CapturedModule:
    """The handle of a module whose ``forward`` is a region."""

    def __init__(self, module: nn.Module, region: Region) -> None:
        self._module, self._region = module, region
        self._own = vars(module).get("forward")  # None where it is that of the module's class
        module.forward = Captured(region)

    @property
    def stats(self) -> Stats:
        """The present values of the counters; ``stats.backward`` has those of the backward."""
        return self._region.stats

    def explain(self) -> str:
        """A report on the forward and the backward: plans, guards, misses, refusals."""
        return self._region.explain()

    def release(self) -> None:
        """Gives the module its own ``forward`` back. Backward passes of earlier forwards still work."""
        self._module.__dict__.pop("forward", None)
        if self._own is not None:
            self._module.forward = self._own


def region_of(module: nn.Module, *, is_quiet: bool = False, **options: Any) -> Region:
    """The region of a module's forward, which is not called yet in the place of it. ``is_quiet``: whether nobody is
    warned where it stays eager. Raises ``ValueError`` where the forward is captured already."""
    own = vars(module).get("forward")  # of the module itself: hooks of libraries stand there
    if isinstance(own, Captured):
        raise ValueError("rote.capture_module takes a module whose forward is not captured yet")
    inside = _checkpointed.inside_of(module) if own is None else None
    kind = Region if inside is None else CheckpointedRegion
    region = kind(module.forward if inside is None else types.MethodType(inside, module), module, **options)
    region.is_quiet = is_quiet
    region.in_place = own is None and not is_quiet
    return region
