"""What a recording has to know of FSDP2 (``fully_shard``): its objects, and how they are read.

FSDP2 keeps its sharded parameters in the modules between steps. Within a step it gathers them into memory that it takes
and gives back by ``UntypedStorage.resize_``, and puts unsharded parameters in the modules meanwhile. A recording
follows that memory (tracer/src/recorder/generations.rs). A plan is for steps that begin and end at rest: everything is
sharded, and no gather or reduction is under way. How FSDP2 works in the step is decided by attributes of its objects,
all of which are guarded but for those that it makes anew before it uses them.
"""

from __future__ import annotations

import enum
import sys
import types
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from . import _introspect, _modules

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

_Modules = list[tuple[str, nn.Module]]
_PACKAGE = "torch.distributed.fsdp._fully_shard"


class _Read(enum.Enum):
    """How an attribute of FSDP2's objects is guarded."""

    NOT = enum.auto()
    """Not at all."""
    WHICH = enum.auto()
    """Which object it is, and not what that holds."""


# Handles by which hooks are taken away: the hooks are guarded where they are.
_HANDLES = dict.fromkeys(
    (
        *("_pre_forward_hook_handle", "_post_forward_hook_handle", "_post_load_hook_handle"),
        *("_module_to_pre_save_state_dict_hook_handle", "_module_to_pre_load_state_dict_hook_handle"),
    ),
    _Read.NOT,
)
_ATTRIBUTES: dict[str, _Read] = {
    **_HANDLES,
    "_device_handle": _Read.WHICH,
    "device_handle": _Read.WHICH,
    "all_gather_copy_in_stream": _Read.WHICH,
    "all_gather_stream": _Read.WHICH,
    "reduce_scatter_stream": _Read.WHICH,
    "all_reduce_stream": _Read.WHICH,
    # Another dict after every backward, in PyTorch 2.13: empty where a step begins and ends (`unrest`).
    "_last_post_reduce_events": _Read.NOT,
    # Lists of tensors, whose memory is taken and filled in every step.
    "all_gather_outputs": _Read.NOT,
    "_all_gather_output": _Read.WHICH,
    # The state has these.
    "sharded_param": _Read.WHICH,
    "_unsharded_param": _Read.WHICH,
    "_sharded_param_data": _Read.WHICH,
    "_orig_param_uid": _Read.NOT,  # counted in the process, and asked for before the first forward only
    "_unsharded_inner_tensors": _Read.NOT,  # of extensions only, which are refused
    # Specs do not change; they keep their hashes, which are others in each process.
    "_sharding_spec": _Read.WHICH,
    "_unsharded_dtensor_spec": _Read.WHICH,
    # Found again by their dtypes, made of a spec that is guarded.
    "_sharding_spec_by_dtype": _Read.NOT,
    # Written by each reshard to a smaller mesh, and read before the next.
    "_sharded_post_forward_param_data": _Read.WHICH,
    "_sharded_post_forward_param": _Read.WHICH,
}
# What asking FSDP2's objects raises in a version of PyTorch where their attributes have other names.
OTHERWISE = (AttributeError, KeyError)
# Where a module keeps which wrappers it has; another name in each process. What the wrappers keep is reached by hooks.
REGISTRY = "__composable_api_state_key_"
# What a step may set for the next one.
_FLAGS = ("reduce_grads", "all_reduce_grads", "reshard_after_backward", "_post_backward_pending")


def _part(name: str) -> Any:
    """A module of FSDP2's package, if a script has imported the package: few scripts do, and it takes long."""
    return sys.modules.get(f"{_PACKAGE}.{name}")


def states(modules: _Modules) -> list[tuple[str, FSDPState]]:
    """What FSDP2 keeps for these modules and those in them, each once, with the path of a module."""
    found: dict[int, tuple[str, FSDPState]] = {}
    part = _part("_fsdp_state")
    if part is None:
        return []
    for path, module in _modules.within_each(modules):
        state = part._get_module_fsdp_state(module)
        if state is not None:
            found.setdefault(id(state), (path, state))
    return list(found.values())


def _groups_of(state: FSDPState) -> list[FSDPParamGroup]:
    own = vars(state)
    if "_fsdp_param_groups" in own:
        return state._fsdp_param_groups
    group = own.get("_fsdp_param_group")  # until PyTorch 2.12
    return [] if group is None else [group]


def groups(modules: _Modules) -> list[tuple[str, FSDPParamGroup]]:
    """The groups of parameters that are gathered together, with the paths of their modules."""
    return [(path, group) for path, state in states(modules) for group in _groups_of(state)]


def parameters(modules: _Modules) -> Iterator[tuple[str, Any]]:
    """What FSDP2 keeps for each of its parameters, with the parameter's path."""
    with suppress(*OTHERWISE):
        found = groups(modules)
        paths = {id(module): path for path, module in _modules.within_each(modules)} if found else {}
        for path, group in found:
            for each in group.fsdp_params:
                info = each._module_info
                yield f"{paths.get(id(info.module), path)}.{info.param_name}", each


def unsharded(modules: _Modules) -> dict[int, torch.Tensor]:
    """The sharded parameters, by the identities of those that stand for them in modules while they are gathered."""
    found = {}
    for _, each in parameters(modules):
        own = _introspect.own(each) or {}
        for name in ("_unsharded_param", "_sharded_post_forward_param"):
            if own.get(name) is not None:
                found[id(own[name])] = own["sharded_param"]
    return found


def gathered(modules: _Modules) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters that stand in modules while they are gathered: their gradients may be kept between steps."""
    for path, each in parameters(modules):
        tensor = (_introspect.own(each) or {}).get("_unsharded_param")
        if tensor is not None:
            yield f"{path}.unsharded", tensor


def is_of_fsdp(kind: type) -> bool:
    """Whether objects of a class are FSDP2's own, which are read attribute by attribute."""
    inside = _introspect.module_of(kind).startswith(f"{_PACKAGE}.") or issubclass(kind, _state_class())
    return inside and not issubclass(kind, enum.Enum | nn.Module)


def is_state(value: Any) -> bool:
    """Whether an object is what FSDP2 keeps for a module."""
    return isinstance(value, _state_class())


def _state_class() -> Any:
    """The class of what FSDP2 keeps for a module; no class where nobody uses FSDP2."""
    return getattr(_part("_fsdp_state"), "FSDPState", ())


def is_guarded(name: str) -> bool:
    """Whether an attribute of such an object is guarded."""
    return _ATTRIBUTES.get(name) is not _Read.NOT


def is_looked_into(name: str) -> bool:
    """Whether what such an attribute holds is guarded too."""
    return name not in _ATTRIBUTES


def functions() -> Iterator[types.FunctionType]:
    """The functions of which FSDP2 is made: what they call by name may be patched."""
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{_PACKAGE}."):
            for value in vars(module).values():
                own = getattr(value, "__module__", None) == name
                for each in vars(value).values() if own and isinstance(value, type) else [value] if own else []:
                    function = getattr(each, "fget", getattr(each, "__func__", each))
                    if isinstance(function, types.FunctionType):
                        yield function


def flags(modules: _Modules) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Attributes that a step may set for the next one: their paths, and the dicts and names by which they are found."""
    contexts = set()
    for path, state in states(modules):
        for i, group in enumerate(_groups_of(state)):
            for name in _FLAGS:
                if type(vars(group).get(name)) is bool:
                    yield f"{path}.fsdp[{i}].{name}", vars(group), name
        context = getattr(state, "_state_ctx", None)
        if context is not None and id(context) not in contexts:
            contexts.add(id(context))
            if type(vars(context).get("is_last_backward")) is bool:
                yield f"{path}.fsdp.is_last_backward", vars(context), "is_last_backward"


def begins(modules: _Modules) -> bool:
    """Whether the next call may be the first that uses these modules: FSDP2 then makes what it keeps."""
    return any(
        state._is_root is None
        or any("_unsharded_param" not in vars(each) for group in _groups_of(state) for each in group.fsdp_params)
        for _, state in states(modules)
    )


def unrest(modules: _Modules) -> tuple[str, str] | None:
    """What FSDP2 has left to do, or to give back, if it is not at rest, with the remedy."""
    for path, state in states(modules):
        comm, context = vars(state._comm_ctx), vars(state._state_ctx)
        for group in _groups_of(state):
            own = vars(group)
            if own["_sharded_state"].name != "SHARDED":
                return (
                    f"the parameters of {path} unsharded",
                    "call reshard() on the modules first (a forward without a backward leaves the root unsharded), and "
                    "set_reshard_after_backward(True) before the last backward of a step",
                )
            if own.get("_partial_reduce_output") is not None:
                return (
                    f"gradients of {path} reduced in part",
                    "reduce them in the same step: set_requires_all_reduce(True) before its last backward",
                )
            under_way = (
                "_all_gather_result",
                "_post_reduce_event",
                "_reshard_after_forward_event",
                "_all_reduce_state",
            )
            if own["_training_state"].name != "IDLE" or any(own.get(name) is not None for name in under_way):
                return f"a forward or backward of {path} unfinished", _FINISH
        if context.get("post_optim_event") is not None:
            return f"an event of set_post_optim_event() at {path}", "leave the event out"
        waiting = ("iter_forward_root", "manual_backward_finalization_active")
        busy = any(context.get(name) is not None for name in waiting) or any(
            context.get(name) for name in ("post_backward_final_callback_queued", "gradient_reduction_pending")
        )
        kept = ("_last_post_reduce_events", "reduce_scatter_states", "all_gather_state", "active_gradient_reduction")
        if busy or any(comm.get(name) for name in kept):
            return f"a forward or backward of {path} unfinished", _FINISH
        if comm.get("post_forward_order"):
            return (
                f"noted a forward of {path} without a backward, which changes what the next backward gathers",
                f"leave forward passes without a backward eager; with gradients, {_FINISH}",
            )
    return None


_FINISH = "call backward() in the same step, and set_is_last_backward(True) before the last backward of a step"


def unsupported(modules: _Modules) -> tuple[str, str, str] | None:
    """A module of which FSDP2 does what a recording cannot follow: its path, what that is, and the remedy."""
    for path, state in states(modules):
        if vars(state._state_ctx).get("manual_backward_finalization"):
            return path, "set_manual_backward_finalization()", "leave it out"
        for group in _groups_of(state):
            found = _beyond(group)
            if found is not None:
                return path, *found
    return None


def _beyond(group: FSDPParamGroup) -> tuple[str, str] | None:
    own = vars(group)
    collectives, policies = _part("_fsdp_collectives"), _part("_fsdp_api")
    plain = "leave it out: FSDP2's own collectives are recorded"
    if isinstance(own.get("offload_policy"), policies.CPUOffloadPolicy):
        return "CPUOffloadPolicy, which copies beside the step", "leave offload_policy= out"
    if type(own.get("_all_gather_comm")) is not collectives.DefaultAllGather:
        return "set_custom_all_gather() or other memory for gathers", plain
    if type(own.get("_reduce_scatter_comm")) is not collectives.DefaultReduceScatter:
        return "set_custom_reduce_scatter() or other memory for reductions", plain
    if own.get("_all_reduce_hook") is not None:
        return "set_all_reduce_hook(), which works in a stream of its own", "leave the hook out"
    for each in group.fsdp_params:
        if getattr(each, "is_spmd_types", False):
            return "parameters annotated with spmd_types", "shard plain parameters or DTensors"
        if hasattr(each._sharded_local_tensor, "fsdp_pre_all_gather"):
            return (
                "parameters whose class gathers them in a way of its own (fsdp_pre_all_gather)",
                "use plain parameters",
            )
    return None
