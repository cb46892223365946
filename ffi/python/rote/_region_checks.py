"""Whether a function can be a region: what one call of it shows from outside, and hooks for what autograd saves."""

from __future__ import annotations

import contextlib
import functools
import gc
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node
from torch.utils import _pytree

from . import _graph
from ._memory import extent_of_tensor, storage_of, version_of
from ._record import uncollected, unrecorded
from ._specs import has_strides, local_of, short_text
from ._wrappers import REMEDY_INSIDE

# What a result may hold beside tensors: it has no tensors in it.
_ATOMS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size)


OUTSIDE = "uses a tensor with an autograd graph from outside that is no argument", "pass the tensor as an argument"


def is_fixed(value: Any) -> bool:
    """Whether a function cannot change what it is given, but for tensors."""
    if isinstance(value, tuple):
        return all(map(is_fixed, value))
    return isinstance(value, (torch.Tensor, *_ATOMS))


class Look:
    """One call of a function, looked at from outside: whether the function can be a region."""

    def __init__(self, args: Any, kwargs: Any, state: list[torch.Tensor]) -> None:
        self._arguments, self._state = (args, kwargs), state
        self._leaves, self._structure = _pytree.tree_flatten(self._arguments)
        self._given = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self._versions = [version_of(tensor) for tensor in (*self._given, *state)]
        with unrecorded():  # batch norm writes its statistics without a trace in their versions
            plain = filter(has_strides, (tensor for tensor in state if not tensor.requires_grad))
            buffers = [tensor for tensor in plain if extent_of_tensor(tensor) is not None]
            self._buffers = [(tensor, local_of(tensor).clone()) for tensor in buffers]
        #: The first sequence number of the graph that the call makes.
        self.begin = sequence_number()

    def changes_arguments(self) -> bool:
        """Whether the function has changed lists or dicts in its arguments."""
        leaves, structure = _pytree.tree_flatten(self._arguments)
        same = len(leaves) == len(self._leaves) and all(map(operator.is_, leaves, self._leaves))
        return not same or structure != self._structure

    def writes_state(self) -> bool:
        """Whether the function has written to the state."""
        first = len(self._given)
        if any(map(operator.ne, map(version_of, self._state), self._versions[first:])):
            return True
        with unrecorded():
            return not all(torch.equal(local_of(tensor), before) for tensor, before in self._buffers)

    def results(self, result: Any) -> list[torch.Tensor]:
        """The tensors of a result that have a graph and that the caller does not have already, each once."""
        known = {*map(id, self._given), *map(id, self._state)}
        found = {id(tensor): tensor for tensor in tensors_in(result, None) if tensor.grad_fn is not None}
        return [tensor for key, tensor in found.items() if key not in known]

    def graph(self, results: list[torch.Tensor]) -> tuple[set[Node], set[Node]]:
        """The nodes that the call has made for these, and those at which their graph ends."""
        return _graph.reached([tensor.grad_fn for tensor in results], self._ends)

    @property
    def _ends(self) -> _graph.Ends:
        return _graph.Ends({tensor.grad_fn for tensor in self._given}, self.begin)

    def problem(self, result: Any) -> tuple[str, str] | None:
        """Why the function can be no region, with the remedy."""
        leaves = _pytree.tree_leaves(result)
        other = next((leaf for leaf in leaves if not isinstance(leaf, (torch.Tensor, *_ATOMS))), None)
        if other is not None:
            return (
                f"returns a {type(other).__qualname__}, in which Rote does not see tensors",
                "return tensors, and tuples, lists and dicts of them, or register the class with "
                "torch.utils._pytree.register_pytree_node",
            )
        if self.changes_arguments():
            return "writes to a list or dict in its arguments", "return what it writes"
        for tensor, version in zip(self._given, self._versions, strict=False):
            if tensor.requires_grad and version_of(tensor) != version:
                return "writes an argument that requires grad in place", "write to a copy"
        results = self.results(result)
        known = {*map(storage_of, self._given), *map(storage_of, self._state)}
        if not known.isdisjoint(map(storage_of, results)):
            return "returns a view of an argument or of the state", "return a copy, or make the view outside"
        what = _graph.apart(results, self._ends)
        if what:
            return what, "make regions of the parts, or return one result"
        nodes, ends = self.graph(results)
        own = {tensor.grad_fn for tensor in self._given}
        if not all(node in own or _graph.is_leaf(node) or _graph.is_cast(node) for node in ends):
            return OUTSIDE
        return _graph.unfit(nodes)

    def problem_of_eager(self, result: Any) -> tuple[str, str] | None:
        """The same, after a call that nothing else has watched and during which no objects were collected."""
        problem = self.problem(result)
        if problem is not None:
            return problem
        kept = self._kept({*map(id, _pytree.tree_leaves(result)), *map(id, self._given)})
        if kept is not None:
            return f"keeps a tensor ({short_text(kept)}) with its autograd graph", "return the tensor"
        return None

    def _kept(self, results: set[int]) -> torch.Tensor | None:
        """A tensor with a graph of the call that is no result and outlives the call."""
        for tensor, references in _youngest(self.begin):
            if id(tensor) not in results and references != _of_graph():
                return tensor
        return None


def _youngest(begin: int) -> list[tuple[torch.Tensor, tuple[int, bool]]]:
    """The tensors with a graph made since a sequence number, among the youngest objects. Of each: how many references
    are counted here, and whether C++ has some. No generator, which would stand in its own list of objects."""
    found = []
    for each in gc.get_objects(generation=0):
        if issubclass(type(each), torch.Tensor):
            references, node = sys.getrefcount(each), each.grad_fn
            if node is not None and node._sequence_nr() >= begin:
                found.append((each, (references, each._use_count() > 1)))
    return found


@functools.cache
def _of_graph() -> tuple[int, bool]:
    """The references to a tensor that nothing but a graph has, as :func:`_youngest` counts them."""
    with uncollected():
        begin = sequence_number()
        result = torch.ones(1, requires_grad=True).exp().sin()
        return next(references for tensor, references in _youngest(begin) if tensor is not result)


def tensors_in(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for leaf in _pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor):
            yield leaf


def sequence_number() -> int:
    """The number of the next node of autograd that this thread makes."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]


# -- hooks for what autograd saves ------------------------------------------------

Hooks = list[tuple[Any, Any]]


def take_hooks() -> Hooks:
    """Takes away the hooks that code around has set for saved tensors: the node of the region calls them, and not the
    graph inside."""
    taken = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    return taken


def put_hooks(hooks: Hooks) -> None:
    """Puts them back."""
    for pack, unpack in reversed(hooks):
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextlib.contextmanager
def versions_of_packed(hooks: Hooks) -> Iterator[Callable[[], bool]]:
    """Within, the first of the hooks for saved tensors notes the versions of what it is called with. Comes back: a
    function that says whether any of that was written since."""
    packed: list[tuple[torch.Tensor, int]] = []

    def written() -> bool:
        return any(version_of(tensor) != version for tensor, version in packed)

    if not hooks:
        yield written
        return
    pack, unpack = hooks[0]

    def noting(tensor: torch.Tensor) -> Any:
        packed.append((tensor, version_of(tensor)))
        return pack(tensor)

    hooks[0] = noting, unpack
    try:
        yield written
    finally:
        hooks[0] = pack, unpack


@contextlib.contextmanager
def transforms() -> Iterator[Callable[[], bool]]:
    """Comes back: a function that says whether a transform of torch.func began within that differentiates, which allows
    no hooks for saved tensors."""
    begun: list[str] = []
    with _noting(torch._functorch.eager_transforms, "_grad_increment_nesting", "", begun):
        yield lambda: bool(begun)


@contextlib.contextmanager
def wrappers() -> Iterator[Callable[[], tuple[str, str] | None]]:
    """Comes back: a function that says which wrapper of modules ran its hooks within, with the remedy. In the backward,
    its hooks read gradients that a region hands out only at its end."""
    run: list[str] = []
    with contextlib.ExitStack() as stack:
        for name, package, of, method in _WRAPPERS:
            owner: Any = sys.modules.get(package)
            if owner is not None:
                stack.enter_context(_noting(getattr(owner, of) if of else owner, method, name, run))
        yield lambda: (f"uses {run[0]} inside the region", REMEDY_INSIDE) if run else None


# What runs in each forward of a module with such a wrapper: its name, and the package, class and function.
_WRAPPERS = (
    ("FSDP2 (fully_shard)", "torch.distributed.fsdp._fully_shard._fsdp_state", "FSDPState", "_root_pre_forward"),
    ("DistributedDataParallel", "torch.nn.parallel.distributed", "DistributedDataParallel", "_pre_forward"),
    ("FullyShardedDataParallel", "torch.distributed.fsdp.fully_sharded_data_parallel", "", "_root_pre_forward"),
)


@contextlib.contextmanager
def _noting(owner: Any, name: str, what: str, noted: list[str]) -> Iterator[None]:
    """Within, calls of a function of a module or class are noted as ``what``."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def noting(*args: Any, **kwargs: Any) -> Any:
        noted.append(what)
        return original(*args, **kwargs)

    setattr(owner, name, noting)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def other_hooks(tape: _graph.Tape) -> Iterator[None]:
    """Within, the tape is told when code sets hooks for saved tensors of its own."""
    kind = torch.autograd.graph.saved_tensors_hooks
    original = kind.__enter__

    def enter(self: Any) -> Any:
        tape.has_other_hooks = True
        return original(self)

    kind.__enter__ = enter  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.__enter__ = original  # type: ignore[method-assign]
