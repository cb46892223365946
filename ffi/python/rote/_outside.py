"""Arguments that come with an autograd graph from outside of the step. A step that detaches them can be replayed."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch


class OutsideGraphs:
    """Watches these arguments while a step runs, and refuses the recording where the step goes on with their graphs."""

    def __init__(
        self,
        given: list[tuple[str, torch.Tensor]],
        refuse: Callable[[str, str, str], None],
        used_up: Callable[[Any], bool],
    ) -> None:
        """``given``: the tensors, with their paths; ``used_up``: whether a backward pass of the step has used a graph
        up."""
        self._given = [(path, tensor, tensor.grad_fn) for path, tensor in given]
        self._refuse, self._used_up = refuse, used_up

    def patches(self, stack: ExitStack, patched: object) -> None:
        """Watches until ``stack`` is left."""
        for path, _, node in self._given:
            if node is not None:
                hook = node.register_prehook(functools.partial(self._reached, path))
                stack.callback(hook.remove)
        stack.callback(self._check_graphs)

    def _reached(self, path: str, _: Any) -> None:
        self._refuse(
            "",
            f"goes backward into the autograd graph of {path}, which comes from outside the step",
            f"pass {path}.detach(), or compute {path} inside the captured function",
        )

    def _check_graphs(self) -> None:
        """A write may have added to a graph: `total += loss`. Nobody can use it, if the graph of what was added is used
        up."""
        for path, tensor, node in self._given:
            if tensor.grad_fn is not node and not self._used_up(tensor.grad_fn):
                self._refuse(
                    "",
                    f"adds to the autograd graph of {path}, which comes from outside the step",
                    f"pass {path}.detach(), or write to a copy",
                )
