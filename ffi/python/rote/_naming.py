"""Names for the arguments of a call and for the tensors that exist before it."""

from __future__ import annotations

import abc
import collections
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from . import _containers, _introspect, _memory, _record
from ._native import c_text, check, lib
from ._numbers import BINDING_ARG, BINDING_GRAD, BINDING_STATE, NO_INDEX
from ._specs import local_of

_MOST_DEPTH = 64  # what contains itself is a leaf in the end
#: Where memory begins and ends, the storage, and whose it is.
Extent = tuple[int, int, int, str]


def _is_named_tuple(value: Any) -> bool:
    """Whether a tuple of a class of its own is nothing but its items, which have names."""
    kind = type(value)
    return (
        isinstance(value, tuple)
        and kind is not tuple
        and hasattr(kind, "_fields")
        and kind.__basicsize__ == tuple.__basicsize__ + 8 * (kind.__dictoffset__ != 0)
        and not getattr(value, "__dict__", None)
    )


def flatten(
    path: str, value: Any, leaves: list[tuple[str, Any]], depth: int = 0, containers: list[Any] | None = None
) -> str:
    """Leaves in the order of the bridge (arguments.h), and the structure as text. ``containers`` takes opened ones."""
    kind = type(value)

    def each(ends_and_items: Iterable[tuple[str, Any]]) -> list[str]:
        if containers is not None:
            containers.append(value)
        return [flatten(path + end, item, leaves, depth + 1, containers) for end, item in ends_and_items]

    if depth <= _MOST_DEPTH:
        if kind in (tuple, list) or _is_named_tuple(value):
            inner = each((f"[{i}]", item) for i, item in enumerate(value))
            form = "[{}]" if kind is list else "({})" if kind is tuple else kind.__qualname__ + "({})"
            return form.format(", ".join(inner))
        if kind is dict or (kind is collections.OrderedDict and not vars(value)):
            inner = each((f"[{key!r}]", item) for key, item in value.items())
            said = ", ".join(f"{key!r}: {text}" for key, text in zip(value, inner, strict=True))
            return ("" if kind is dict else "OrderedDict") + "{" + said + "}"
        parts = _containers.parts_of(value)
        if parts is not None:
            paths = parts.paths()
            inner = each(zip(paths, parts.values, strict=True))
            said = ", ".join(f"{end}: {text}" for end, text in zip(paths, inner, strict=True))
            return f"{_introspect.module_of(kind)}.{_introspect.name(kind)}({said})"
    leaves.append((path, value))
    return "tensor" if isinstance(value, torch.Tensor) else "*"


def modes() -> list[tuple[str, str]]:
    """The modes of PyTorch that a call runs under, as text."""
    autocast = [
        f"{kind} {torch.get_autocast_dtype(kind)}" for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    ]
    group = f"of {dist.get_world_size()}" if dist.is_initialized() else "none"
    return [
        ("default process group", group),
        ("grad_mode", str(torch.is_grad_enabled())),
        ("inference_mode", str(torch.is_inference_mode_enabled())),
        ("autocast", ", ".join(autocast) or "off"),
        ("deterministic", str(torch.are_deterministic_algorithms_enabled())),
        ("default_dtype", str(torch.get_default_dtype())),
    ]


class Naming(abc.ABC):
    """The names of one call, for the recording of a session."""

    def __init__(
        self, session: Any, tensors: list[tuple[str, torch.Tensor]], args: Any, kwargs: Any, *, is_region: bool
    ) -> None:
        """``tensors``: the state's; ``is_region``: gradients, and graphs of arguments, are outside."""
        self.session, self.tensors, self._is_region = session, tensors, is_region
        self.args, self.kwargs = args, kwargs
        self.leaves: list[tuple[str, Any]] = []
        self.specs = _record.Specs(session)
        self.with_grad: list[tuple[str, torch.Tensor]] = []  # arguments of a whole step that require grad
        self.versions: list[tuple[torch.Tensor, int, int]] = []  # of named tensors, and their local ones
        self.grads: list[tuple[str, torch.Tensor, torch.Tensor | None]] = []

    @abc.abstractmethod
    def refuse(self, op: str, reason: str, remedy: str) -> None:
        """Says that the call cannot be replayed."""

    def name_leaves(self) -> str:
        """Names the leaves of the arguments; the structure as text."""
        structure = flatten("args", self.args, self.leaves)
        structure += " " + flatten("kwargs", self.kwargs, self.leaves)
        for path, leaf in self.leaves:
            check(lib.rote_record_leaf(self.session, c_text(path), leaf))
        return structure

    def name_all(self) -> None:
        """Names the tensors of the state, the arguments, and their gradients."""
        seen: set[int] = set()
        for path, tensor in self.tensors:
            if id(tensor) not in seen:
                seen.add(id(tensor))
                self.name(BINDING_STATE, path, tensor, tensor, NO_INDEX)
                self._track_grad(path, tensor, NO_INDEX)
        for i, (path, leaf) in enumerate(self.leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad and not self._is_region:
                    self.with_grad.append((path, leaf))
                self.name(BINDING_ARG, path, leaf, leaf, i)
                self._track_grad(path, leaf, i)

    def name(self, kind: int, path: str, owner: torch.Tensor, tensor: torch.Tensor, leaf: int) -> None:
        spec = self.specs.of_tensor(tensor)
        local = local_of(tensor)
        check(lib.rote_record_tensor(self.session, kind, c_text(path), owner, local, spec, leaf))
        self.versions.append((tensor, _memory.version_of(tensor), _memory.version_of(local)))

    def _track_grad(self, path: str, tensor: torch.Tensor, leaf: int) -> None:
        if not tensor.is_leaf or self._is_region:
            return
        self.grads.append((path, tensor, tensor.grad))
        if tensor.grad is not None:
            self.name(BINDING_GRAD, path, tensor, tensor.grad, leaf)
            if tensor.grad.requires_grad:
                self.refuse(
                    "",
                    f"finds a gradient in {path}.grad that itself requires a gradient",
                    f"detach the gradient outside of the captured function: {path}.grad = {path}.grad.detach()",
                )

    def extents(self) -> list[Extent]:
        """Where the step's tensors and gradients lie, each of those with memory of its own, in order."""
        found = []
        for path, tensor in [*self.tensors, *self.leaves, *((path, grad) for path, _, grad in self.grads)]:
            extent = _memory.extent_of_tensor(tensor) if isinstance(tensor, torch.Tensor) else None
            if extent is not None:
                found.append((*extent, path))
        return sorted(found)

    def check_storages(self, extents: list[Extent]) -> None:
        """Refuses tensors in the same memory by way of different storages: what shares memory is told by storages."""
        end, storage, first = 0, 0, ""
        for begin, last, own, path in extents:
            if begin < end and own != storage:
                self.refuse(
                    "",
                    f"takes {first} and {path}, which share memory through different storages (for example by two "
                    "calls of torch.from_numpy on one array): Rote cannot see that a write to one changes the other",
                    "make one tensor of the memory, and make the other a view of that tensor",
                )
                return
            if last > end:
                end, storage, first = last, own, path

    def own(self) -> Callable[[str], Any]:
        """Finds the state's tensors by path."""
        tensors = dict(reversed(self.tensors))

        def find(path: str) -> Any:
            found = tensors.get(path)
            return tensors[path.removesuffix(".grad")].grad if found is None else found

        return find
