"""What a recording observes of collectives that the step calls by hand.

The bridge sees the ops of process groups (``c10d::allreduce_``). A wait for such an op is no op: it is a method of
the handle that the op returned. So are questions to a handle, and calls of what lies below a process group.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
import torch.distributed as dist

Patch = Callable[[Any, str, Any], AbstractContextManager[None]]

# Questions to a handle whose answers depend on time, and other ways to wait with it.
_ASKED = (
    *("is_completed", "is_success", "exception", "result", "get_future", "get_future_result"),
    *("synchronize", "block_current_stream", "source_rank", "boxed"),
)
# What a process group does without an op.
_GROUPED = ("_start_coalescing", "_end_coalescing")
# Calls of the backend of a process group: none of them is an op.
_OF_BACKENDS = (
    *("allreduce", "allreduce_coalesced", "allreduce_sparse", "allgather", "_allgather_base", "allgather_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "alltoall", "alltoall_base"),
    *("barrier", "monitored_barrier", "broadcast", "gather", "gather_into_tensor", "gather_single", "recv"),
    *("recv_anysource", "reduce", "reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "scatter", "send", "_start_coalescing", "_end_coalescing", "new_window"),
)


class ByHand:
    """Watches handles and backends of process groups while a step is recorded.

    ``waited`` is told of each handle that the step has waited with. ``in_step`` says whether the caller is the step,
    and neither another thread nor a kernel. Within ``unrecorded()``, ops are not recorded.
    """

    def __init__(
        self,
        waited: Callable[[Any], None],
        refuse: Callable[[str, str, str], None],
        in_step: Callable[[], bool],
        unrecorded: Callable[[], Any],
    ) -> None:
        self._waited = waited
        self._refuse = refuse
        self._in_step = in_step
        self._unrecorded = unrecorded

    def patches(self, stack: ExitStack, patched: Patch) -> None:
        """Enters every patch."""
        if not dist.is_available():
            return
        stack.enter_context(patched(dist.Work, "wait", self._wait(dist.Work.wait)))
        fake = getattr(torch._C._distributed_c10d, "FakeWork", dist.Work)  # of the process group that answers at once
        if "wait" in vars(fake) and fake is not dist.Work:
            stack.enter_context(patched(fake, "wait", self._wait(fake.wait)))
        backend = torch._C._distributed_c10d.Backend
        for owner, names, reason, remedy in (
            (
                dist.Work,
                _ASKED,
                "asks the handle of a collective: the answer depends on time, and a plan cannot hold it",
                "call wait(), or ask outside the captured function",
            ),
            (
                dist.ProcessGroup,
                _GROUPED,
                "puts calls of a process group together, which a recording does not see",
                "call the process group once for each tensor (no _coalescing_manager with a device, no "
                "batch_isend_irecv on a backend that supports coalescing), or outside the captured function",
            ),
            (
                backend,
                _OF_BACKENDS,
                "calls the backend of a process group directly, which a recording does not see",
                "use the functions of torch.distributed",
            ),
        ):
            for name in names:
                if hasattr(owner, name):
                    refused = self._refused(owner, name, reason, remedy)
                    stack.enter_context(patched(owner, name, refused))

    def _wait(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._in_step():
                return original(work, *args, **kwargs)
            with self._unrecorded():  # gloo may reduce or copy now, and does so in a replay
                done = original(work, *args, **kwargs)
            self._waited(work)
            return done

        return wait

    def _refused(self, owner: Any, name: str, reason: str, remedy: str) -> Callable[..., Any]:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if self._in_step():
                self._refuse(f"{owner.__name__}.{name}", reason, remedy)
            return original(*args, **kwargs)

        return call
