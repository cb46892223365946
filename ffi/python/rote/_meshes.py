"""Device meshes that a step asks for, while the step is recorded.

``mesh["tp"]`` makes a mesh by ops on tensors that PyTorch keeps in ``mesh``. They are no data of the step: what comes
out follows from the mesh and from names, which are guarded. A mesh that the step makes by itself brings process groups,
which a replay would not make.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from ._by_hand import Patch

# These make no process group.
_ASKED = (
    *("__getitem__", "get_group", "get_all_groups", "get_local_rank", "get_coordinate", "_get_all_submeshes"),
    "__repr__",
)


class Meshes:
    """Watches meshes: ops of what a mesh answers are no ops of the step. The arguments are those of ``ByHand``."""

    def __init__(
        self, refuse: Callable[[str, str, str], None], in_step: Callable[[], bool], unrecorded: Callable[[], Any]
    ) -> None:
        self._refuse = refuse
        self._in_step = in_step
        self._unrecorded = unrecorded

    def patches(self, stack: ExitStack, patched: Patch) -> None:
        """Enters every patch."""
        for name in _ASKED:
            if name in vars(DeviceMesh):
                stack.enter_context(patched(DeviceMesh, name, self._asked(vars(DeviceMesh)[name])))
        stack.enter_context(patched(DeviceMesh, "__init__", self._made(DeviceMesh.__init__)))
        if hasattr(DeviceMesh, "_flatten"):
            stack.enter_context(patched(DeviceMesh, "_flatten", self._flattened(DeviceMesh._flatten)))

    def _asked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def ask(mesh: Any, *args: Any, **kwargs: Any) -> Any:
            has_data = (args or kwargs) and not _are_plain((*args, *kwargs.values()))
            if has_data or not self._in_step():
                return original(mesh, *args, **kwargs)
            with self._unrecorded():
                return original(mesh, *args, **kwargs)

        return ask

    def _flattened(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A mesh that is flattened already; the first time, PyTorch makes a process group."""
        ask = self._asked(original)

        def flatten(mesh: Any, mesh_dim_name: str | None = None, *args: Any, **kwargs: Any) -> Any:
            name = mesh_dim_name or "_".join(mesh.mesh_dim_names or ())
            root = mesh._get_root_mesh() if hasattr(mesh, "_get_root_mesh") else mesh
            known = name in getattr(root, "_flatten_mapping", ())
            return (ask if known else original)(mesh, mesh_dim_name, *args, **kwargs)

        return flatten

    def _made(self, original: Callable[..., None]) -> Callable[..., None]:
        def make(mesh: Any, *args: Any, **kwargs: Any) -> None:
            if self._in_step():
                self._refuse(
                    "DeviceMesh",
                    "makes a device mesh, and process groups for it: a replay would not make them",
                    "make the mesh outside the captured function",
                )
            original(mesh, *args, **kwargs)

        return make


def _are_plain(values: tuple[Any, ...]) -> bool:
    """Whether values are names and numbers, and no data."""
    return all(_are_plain(each) if type(each) is tuple else type(each) in (str, int, type(None)) for each in values)
