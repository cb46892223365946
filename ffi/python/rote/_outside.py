"""Arguments that come with an autograd graph from outside of the step. A step that detaches them can be replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ._memory import version_of


class OutsideGraphs:
    """Watches these arguments while a step runs, and refuses the recording where the step goes on with their graphs."""

    def __init__(self, given: list[tuple[str, torch.Tensor]], refuse: Callable[[str, str, str], None]) -> None:
        """``given``: the tensors, with their paths."""
        self._given = [(path, tensor, tensor.grad_fn, version_of(tensor)) for path, tensor in given]
        self._refuse = refuse

    def patches(self, stack: ExitStack, patched: object) -> None:
        """Watches until ``stack`` is left."""
        for path, _, node, _ in self._given:
            if node is not None:
                hook = node.register_prehook(functools.partial(self._reached, path))
                stack.callback(hook.remove)
        stack.callback(self._check_unchanged)

    def _reached(self, path: str, _: Any) -> None:
        self._refuse(
            "",
            f"goes backward into the autograd graph of {path}, which comes from outside the step",
            f"pass {path}.detach(), or compute {path} inside the captured function",
        )

    def _check_unchanged(self) -> None:
        for path, tensor, node, version in self._given:
            if tensor.grad_fn is not node or version_of(tensor) != version:
                self._refuse(
                    "",
                    f"writes to {path}, which carries an autograd graph from outside the step",
                    f"pass {path}.detach(), or write to a copy",
                )
