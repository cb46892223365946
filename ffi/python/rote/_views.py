"""Results of a step that are views for autograd: of arguments, of the state, of each other.

A view and its base have one version counter. A write to one, seen by autograd, changes the history of the other. A
recording notes of which tensor each result is a view in eager. A replay makes its results views in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ._bridge import bridge
from ._memory import storage_of
from ._specs import local_of

_BACKWARD, _INFERENCE, _CREATED = 1, 16, 32


class Unknown(Exception):
    """A result that a replay cannot make what it is to autograd: what it is, and the remedy."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.what, self.remedy = what, remedy


def _moved() -> Unknown:
    return Unknown(
        "leaves a view of a tensor that was given other memory (`.data = ...`): a replay cannot make such a view",
        "leave a copy: tensor.clone()",
    )


@dataclass
class View:
    """What a tensor is to autograd."""

    counter: int  # the number of its version counter, 0 without one
    shared: bool  # whether another tensor has that
    how: int  # as view_of of the bridge has it (views.h)
    base: torch.Tensor | None
    own: bool  # whether it requires grad other than by its base
    rebuild: Any

    @property
    def backward(self) -> bool:
        """Whether gradients go to its base: it is a view to whoever asks."""
        return bool(self.how & _BACKWARD)

    @property
    def follows(self) -> bool:
        """Whether it requires grad because its base does, and has no graph of its own."""
        return self.backward and not self.own and self.how >= _CREATED


def view_of(tensor: torch.Tensor) -> View:
    """What a tensor is to autograd now."""
    return View(*bridge().view_of(tensor))


@dataclass
class Made:
    """How a replay makes one tensor a view of another, or gives it its version counter."""

    tensor: Any  # a node of the result: {"t": 0}, {"b": "x.grad"}, or {"local": ...} of one
    base: Any
    how: int
    rebuild: Any

    def to_json(self) -> dict[str, Any]:
        """As the structure of the result has it."""
        rebuilt = [] if self.rebuild is None else [{"c": "rebuilt"}]
        return {"tuple": [self.tensor, self.base, {"c": self.how}, *rebuilt]}

    @classmethod
    def from_json(cls, node: dict[str, Any]) -> Made:
        """From a plan, which holds all of those whose strides say how they lie in their bases."""
        tensor, base, how = node["tuple"]
        return cls(tensor, base, how["c"], None)


def parts(node: Any, tensor: torch.Tensor) -> Iterator[tuple[Any, torch.Tensor]]:
    """A tensor, and the local tensor inside of it."""
    yield node, tensor
    if isinstance(tensor, DTensor):
        yield {"local": node}, local_of(tensor)


class _Kin:
    """Tensors that results may be views of, by what autograd knows of them."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._roots: dict[int, Any] = {}
        self._counters: dict[int, dict[int, Any]] = {}  # by the memory too
        self._hold: list[torch.Tensor] = []  # what ids stand for

    def add(self, node: Any, tensor: torch.Tensor, view: View) -> None:
        """A tensor that a replay can name."""
        self._objects.setdefault(id(tensor), node)
        memory = _own_memory(tensor)
        if view.backward and view.base is not None and memory == _own_memory(view.base):  # not after `.data = ...`
            self._roots.setdefault(id(view.base), node)
            self._hold.append(view.base)
        if view.counter:
            self._counters.setdefault(view.counter, {}).setdefault(memory, node)

    def knows(self, base: torch.Tensor) -> bool:
        """Whether a replay has the base, or a view of it."""
        return id(base) in self._objects or id(base) in self._roots

    def made(self, node: Any, tensor: torch.Tensor, view: View) -> Iterator[Made]:
        """How a replay makes a tensor what it is. Raises :class:`Unknown`."""
        if view.base is not None:
            if _own_memory(tensor) != _own_memory(view.base):
                raise _moved()
            base = self._objects.get(id(view.base))
            if base is not None and view.rebuild is not False and (view.backward or view.rebuild is None):
                yield Made(node, base, view.how, view.rebuild)
                return
            through = self._roots.get(id(view.base))
            if through is not None and view.backward and view.rebuild is None:
                yield Made(node, through, view.how, None)
                return
            if view.backward:
                raise Unknown(
                    "returns a view of a view, by an op that reinterprets elements: a replay cannot tell autograd how "
                    "the result lies in its base",
                    "return a copy: tensor.clone()",
                )
        if view.counter in self._counters:
            counted = self._counters[view.counter].get(_own_memory(tensor))
            if counted is None:
                raise _moved()
            yield Made(node, counted, 0, None)


def note(
    outputs: list[torch.Tensor], grads: list[tuple[str, torch.Tensor]], named: Callable[[], Iterable[tuple[str, Any]]]
) -> list[Made]:
    """What a replay makes of its results. Bases that nobody else has are added to ``outputs``.

    ``grads``: what the step leaves in ``.grad``, by name; ``named``: the tensors that the caller has. Raises
    :class:`Unknown`.
    """
    made = list(_of_inference(outputs, grads, named))
    given = [({"t": i}, tensor) for i, tensor in enumerate(outputs)] + [({"b": name}, grad) for name, grad in grads]
    found = [(at, part, view_of(part)) for node, tensor in given for at, part in parts(node, tensor)]
    if not any(view.how or view.shared for _, _, view in found):
        return made
    kin = _Kin()
    for name, tensor in named():
        for at, part in parts({"b": name}, tensor):
            kin.add(at, part, view_of(part))
    results = {id(part) for _, part, _ in found}
    for _, _, view in tuple(found):
        if view.backward and view.base is not None and id(view.base) not in results and not kin.knows(view.base):
            outputs.append(view.base)
            hidden = [(at, part, view_of(part)) for at, part in parts({"t": len(outputs) - 1}, view.base)]
            results.update(id(part) for _, part, _ in hidden)
            found += hidden
    for at, part, view in sorted(found, key=lambda each: each[2].backward):  # bases first: no view is one
        made += kin.made(at, part, view)
        kin.add(at, part, view)
    return made


def _of_inference(
    outputs: list[torch.Tensor], grads: list[tuple[str, torch.Tensor]], named: Callable[[], Iterable[tuple[str, Any]]]
) -> Iterator[Made]:
    """Which results are tensors of inference mode in a step that is called outside of it.

    A replay makes new tensors in the mode of the call. Raises :class:`Unknown` where that cannot be mended.
    """
    inference = torch.is_inference_mode_enabled()
    others = [tensor for tensor in outputs if tensor.is_inference() != inference]
    if inference and others:
        memory = {storage_of(tensor) for _, tensor in named()}
        others = [tensor for tensor in others if storage_of(tensor) not in memory]
    if (inference and others) or any(grad.is_inference() != inference for _, grad in grads):
        raise Unknown(
            "changes inference mode, and leaves tensors that were made in another mode than the mode of the call",
            "enter and leave torch.inference_mode() outside of the captured function",
        )
    for i, tensor in enumerate(outputs):
        if any(tensor is other for other in others):
            yield Made({"t": i}, {"t": i}, _INFERENCE, None)


def _own_memory(tensor: torch.Tensor) -> int:
    """The same of a plain tensor; 0 of one that holds others, whose views may be copies."""
    return 0 if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python) else storage_of(tensor)


def of_inference(made: list[Made]) -> set[int]:
    """The outputs that are tensors of inference mode, by their places."""
    return {each.tensor["t"] for each in made if each.how == _INFERENCE}


def as_inference(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, as one of inference mode."""
    made: torch.Tensor = bridge().as_inference(tensor)
    return made


def make(made: list[Made], find: Callable[[Any], torch.Tensor]) -> None:
    """Makes the results of a replay what eager makes of them."""
    for each in made:
        if each.how == _INFERENCE:
            continue
        bridge().make_view(find(each.tensor), find(each.base), each.how, each.rebuild)
