"""Arguments that require grad, and the autograd graphs that they bring from outside of the step. A step that only
detaches them can be replayed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from ._frames import is_users_own
from ._metadata_reads import Patch, of_tensors

# What a step may ask of a graph, or put into one.
_ASKED = ("grad_fn", "output_nr", "_backward_hooks")
_PUT = ("register_hook", "register_post_accumulate_grad_hook", "retain_grad")


class Outside:
    """Watches these arguments while a step runs, and refuses the recording where the step goes on with their graphs."""

    def __init__(
        self,
        given: list[tuple[str, torch.Tensor]],
        refuse: Callable[[str, str, str], None],
        used_up: Callable[[Any], bool],
    ) -> None:
        """``given``: the tensors, with their paths; ``used_up``: whether a backward pass of the step has used a graph
        up, but for what is outside."""
        self._paths = {id(tensor): path for path, tensor in given}
        self._graphs = [(path, tensor, node) for path, tensor in given if (node := _node(tensor)) is not None]
        #: The nodes at which the graphs outside begin.
        self.nodes = {node for _, _, node in self._graphs}
        self._refuse, self._used_up = refuse, used_up

    def patches(self, stack: ExitStack, patched: Patch) -> None:
        """Watches until ``stack`` is left."""
        if not self._paths:
            return
        for path, _, node in self._graphs:
            hook = node.register_prehook(functools.partial(self._reached, path))
            stack.callback(hook.remove)
        for name in _ASKED if self._graphs else ():
            stack.enter_context(patched(torch.Tensor, name, self._asked(name)))
        for name in _PUT:
            stack.enter_context(patched(torch.Tensor, name, self._put(name)))
        stack.callback(self._check_graphs)

    def _asked(self, name: str) -> Any:
        original = of_tensors(name)

        def get(tensor: torch.Tensor) -> Any:
            if id(tensor) in self._paths and is_users_own(sys._getframe(1).f_code):
                self._refuse(
                    f"Tensor.{name}",
                    f"asks for {name} of {self._paths[id(tensor)]}, whose autograd graph comes from outside the step",
                    "ask outside the captured function, and pass the answer as an argument",
                )
            return original.__get__(tensor)

        def put(tensor: torch.Tensor, value: Any) -> None:
            original.__set__(tensor, value)

        return property(get, put)

    def _put(self, name: str) -> Any:
        original = of_tensors(name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if id(tensor) in self._paths:
                self._refuse(
                    f"Tensor.{name}",
                    f"calls {name} of {self._paths[id(tensor)]}, which outlives the step: a replay does not call it",
                    "call it outside the captured function",
                )
            return original(tensor, *args, **kwargs)

        return call

    def _reached(self, path: str, _: Any) -> None:
        self._refuse(
            "",
            f"goes backward into the autograd graph of {path}, which comes from outside the step",
            f"pass {path}.detach(), or compute {path} inside the captured function",
        )

    def _check_graphs(self) -> None:
        """A write may have added to a graph: `total += loss`. Nobody can use it, if the graph of what was added is used
        up."""
        for path, tensor, node in self._graphs:
            now = _node(tensor)
            if now is not node and (now is None or not self._used_up(now)):
                self._refuse(
                    "",
                    f"adds to the autograd graph of {path}, which comes from outside the step",
                    f"pass {path}.detach(), or write to a copy",
                )


def _node(tensor: torch.Tensor) -> Any:
    """The node of a tensor's graph; None where there is none, or none is left after a write to what it is a view of."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None
