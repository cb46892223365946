"""The structure of a step's result, and how a replay gives it back."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from ._native import check, lib
from ._returns import Read
from ._specs import local_of, mesh_text
from ._views import Made, as_inference, make, of_inference

# What a replay does when it has ended: the step of the scheduler at a path, or to add a number to the counter there.
Late = tuple[str, int | None]


class Unsupported(Exception):
    """A result that a plan cannot give back."""


def encode(result: Any, names: dict[int, Any], outputs: list[torch.Tensor], outlives: set[int]) -> Any:
    """The structure as docs/plan-format.md defines it. ``names`` are nodes of
    the caller's own tensors by id; other tensors are appended to ``outputs``.
    ``outlives`` are objects from before the step, by id."""
    given: set[int] = set()  # lists and dicts

    def node(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return names.get(id(value)) or tensor(value)
        if isinstance(value, Read):
            return {"item": tensor(value.tensor)}
        kind = type(value)
        if kind is float and not math.isfinite(value):
            return {"f": "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")}
        if kind is str and not _is_unicode(value):
            raise Unsupported("text that is not Unicode")
        if value is None or kind in (bool, int, float, str):
            return {"c": value}
        if kind in (list, dict):
            if id(value) in outlives:
                raise Unsupported(f"{kind.__qualname__} that is older than the step")
            if id(value) in given:
                raise Unsupported(f"{kind.__qualname__} twice")
            given.add(id(value))
        if kind in (tuple, list):
            return {kind.__name__: [node(item) for item in value]}
        if kind is dict:
            return {"dict": [[node(key), node(item)] for key, item in value.items()]}
        raise Unsupported(kind.__qualname__)

    def tensor(value: torch.Tensor) -> Any:
        for i, other in enumerate(outputs):
            if other is value:
                return {"t": i}
        outputs.append(value)
        return {"t": len(outputs) - 1}

    return node(result)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _decode(node: Any, tensors: list[Any], own: Callable[[str], Any]) -> Any:
    ((kind, value),) = node.items()
    if kind == "t":
        return tensors[value]
    if kind == "c":
        return value
    if kind == "f":
        return float(value)
    if kind == "b":
        return own(value)
    if kind == "local":
        return local_of(_decode(value, tensors, own))
    if kind == "item":
        return _decode(value, tensors, own).item()
    if kind == "tuple":
        return tuple(_decode(item, tensors, own) for item in value)
    if kind == "list":
        return [_decode(item, tensors, own) for item in value]
    return {_decode(k, tensors, own): _decode(v, tensors, own) for k, v in value}


class StoredSpec:
    """A spec of a plan file, on a mesh of this process."""

    def __init__(self, text: str, example_specs: list[Any]) -> None:
        """``example_specs`` are specs of the caller's tensors: their meshes are
        the ones that a result can lie on. Raises :class:`Unsupported`."""
        *mesh, placements, shape, strides = text.split("|")
        found = next((spec.mesh for spec in example_specs if mesh_text(spec.mesh) == "|".join(mesh)), None)
        if found is None:
            raise Unsupported(f"a tensor on the mesh {'|'.join(mesh)}, which no tensor of the state lies on")
        self._mesh = found
        self._placements = tuple(_placement(text) for text in placements.split(";"))
        self._shape = torch.Size(int(size) for size in shape.split(",") if size)
        self._strides = tuple(int(stride) for stride in strides.split(",") if stride)

    def of(self, local: torch.Tensor) -> Any:
        """The spec of a DTensor with this local tensor."""
        return DTensorSpec(self._mesh, self._placements, TensorMeta(self._shape, self._strides, local.dtype))


def _placement(text: str) -> Any:
    kind, _, inside = text.partition("(")
    if text == "R":
        return Replicate()
    if kind == "S":
        return Shard(int(inside[:-1]))
    if kind == "_S":
        dim, split_factor = inside[:-1].split(",")
        return _StridedShard(int(dim), split_factor=int(split_factor))
    if kind == "P":
        return Partial(inside[:-1])
    raise Unsupported(f"a tensor placed {text}")


class Results:
    """What one variant gives back: the result and the gradients it leaves."""

    def __init__(
        self,
        structure: Any,
        outputs: list[tuple[Any, bool]],
        grads: list[tuple[str, Any, bool]],
        own: Callable[[str], Any],
        views: list[Made],
        after: list[Callable[[], Any]],
    ) -> None:
        """``outputs``: spec (or None) and requires_grad of each; ``grads``:
        owner's path, spec (or None), and whether ``.grad`` becomes None;
        ``after``: what runs after a replay."""
        self.after = after
        self._structure = structure
        self._views = views
        self._inference = of_inference(views)
        self._outputs = outputs
        self._own = own
        self._single = structure == {"t": 0} and len(outputs) == 1
        self._grads = grads
        self._owners: list[Any] | None = None
        if all(not path.startswith(("args", "kwargs")) for path, _, _ in grads):
            self._owners = [own(path) for path, _, _ in grads]

    def deliver(self, locals_: list[torch.Tensor], own_argument: Callable[[str], Any]) -> Any:
        """Puts gradients where eager leaves them and returns the result."""
        at = len(self._outputs)
        owners = self._owners
        if owners is None:
            owners = [self._find(path, own_argument) for path, _, _ in self._grads]
        for owner, (_, spec, none) in zip(owners, self._grads, strict=True):
            if none:
                if owner.grad is not None:  # setting it takes longer than looking
                    owner.grad = None
                continue
            local = locals_[at]
            at += 1
            owner.grad = local if spec is None else DTensor(local, spec, requires_grad=False)
        tensors = [
            self._tensor(i, local, spec)
            for i, (local, (spec, _)) in enumerate(zip(locals_, self._outputs, strict=False))
        ]
        if self._views:
            make(self._views, lambda node: _decode(node, tensors, lambda path: self._find(path, own_argument)))
        for tensor, (_, requires_grad) in zip(tensors, self._outputs, strict=True):
            if requires_grad:
                check(lib.rote_mark_replayed(tensor))
        if self._single:
            return tensors[0]
        return _decode(self._structure, tensors, lambda path: self._find(path, own_argument))

    def _tensor(self, place: int, local: torch.Tensor, spec: Any) -> torch.Tensor:
        """The output at a place."""
        if place not in self._inference:
            return local if spec is None else DTensor(local, spec, requires_grad=False)
        local = as_inference(local)
        if spec is None:
            return local
        with torch.inference_mode():
            return DTensor(local, spec, requires_grad=False)

    def leave(self, made: dict[int, torch.Tensor], nothing: list[int], own_argument: Callable[[str], Any]) -> None:
        """Puts some of the gradients where eager leaves them, and takes others away, by their places."""
        for place, (path, spec, _) in enumerate(self._grads):
            if place in made:
                local = made[place]
                grad = local if spec is None else DTensor(local, spec, requires_grad=False)
                self._find(path, own_argument).grad = grad
            elif place in nothing:
                self._find(path, own_argument).grad = None

    def _find(self, path: str, own_argument: Callable[[str], Any]) -> Any:
        if not path.startswith(("args", "kwargs")):
            return self._own(path)
        return own_argument(path.removesuffix(".grad")).grad if path.endswith(".grad") else own_argument(path)


def to_json(structure: Any, late: list[Late], views: list[Made]) -> bytes:
    """The structure as the library takes it."""
    if late:
        calls = [{"c": path} if n is None else {"tuple": [{"c": path}, {"c": n}]} for path, n in late]
        structure = {"after": [structure, *calls]}
    return json.dumps({"views": [structure, *(view.to_json() for view in views)]} if views else structure).encode()


def from_json(node: Any) -> tuple[Any, list[Late], list[Made]]:
    """The structure in a plan, what a replay does when it has ended, and what it makes of its tensors."""
    views: list[Any] = []
    late: list[Any] = []
    if isinstance(node, dict) and "views" in node:
        node, *views = node["views"]
    if isinstance(node, dict) and "after" in node:
        node, *late = node["after"]
    calls = [(one["c"], None) if "c" in one else (one["tuple"][0]["c"], one["tuple"][1]["c"]) for one in late]
    return node, calls, [Made.from_json(view) for view in views]
