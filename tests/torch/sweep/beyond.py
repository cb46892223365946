"""What ops do beyond what their schemas and tags say, found by running them.

| finding | the op |
|---|---|
| `writes` | changes a tensor that its schema calls read |
| `draws` | moves the generator of random numbers without the tag for it |
| `shapes` | makes results of another meta from arguments of the same meta, without a tag for it |
| `memory` | reads the memory of its tensors below the dispatcher: it fails on tensors without data |
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from .samples import UNCHECKED, data_of, flat_call, sets_of_samples

#: Tags of ops whose results depend on data in their shape or on the host.
DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@dataclasses.dataclass
class Finding:
    """An op, and sets of tensors of one meta to call it with."""

    kind: str
    op: str
    call: Callable[..., Any]  # of tensors
    data: list[list[Tensor]]


def plain(tree: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(tree)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested
    ]


def storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def look(tree: Any) -> str:
    """Everything about results and arguments but the data of tensors."""
    return str(
        [
            (leaf.dtype, leaf.shape, leaf.layout, leaf.stride() if leaf.layout is torch.strided else 0)
            if isinstance(leaf, Tensor)
            else leaf
            for leaf in pytree.tree_leaves(tree)
        ]
    )


def own_copies(arguments: Any) -> Any:
    """The arguments with copies of all tensors, which share what those share."""
    return pytree.tree_map(
        lambda leaf: leaf.detach().clone(memory_format=torch.preserve_format) if isinstance(leaf, Tensor) else leaf,
        arguments,
    )


class Spy(TorchDispatchMode):
    """Sees the ops that calls are made of, and compares what each does with what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[tuple[str, str], Finding] = {}
        self._results: dict[str, tuple[str, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = (args, kwargs)
        before = own_copies(given)
        written = self._written(func, args, kwargs)
        read = [tensor for tensor in plain(given) if storage(tensor) not in written]
        contents = [tensor.clone() for tensor in read]
        state = torch.get_rng_state()
        result = func(*args, **kwargs)
        tags = set(func.tags)
        if torch.Tag.nondeterministic_seeded not in tags and not torch.equal(state, torch.get_rng_state()):
            self._add("draws", func, [before])
        if any(not same(a, b) for a, b in zip(contents, read, strict=True)):
            self._add("writes", func, [before])
        if not tags & DEPENDS:
            key = f"{func} {look(given)}"
            seen = self._results.setdefault(key, (look(result), before))
            if seen[0] != look(result):
                self._add("shapes", func, [seen[1], before])
        return result

    @staticmethod
    def _written(func: Any, args: Any, kwargs: Any) -> set[int]:
        written = set()
        for i, formal in enumerate(func._schema.arguments):
            if formal.alias_info is not None and formal.alias_info.is_write:
                actual = args[i] if i < len(args) else kwargs.get(formal.name)
                written |= {storage(tensor) for tensor in plain(actual)}
        return written

    def _add(self, kind: str, func: Any, arguments: list[Any]) -> None:
        calls = [flat_call(func, each) for each in arguments]
        self.found.setdefault((kind, str(func)), Finding(kind, str(func), calls[0][0], [t for _, t in calls]))


def same(a: Tensor, b: Tensor) -> bool:
    dense = [t.resolve_conj().resolve_neg().contiguous().view(-1) for t in (a, b)]
    return torch.equal(*(t.view(torch.uint8) if t.numel() else t for t in dense))


def reads_memory(call: Callable[..., Any], tensors: list[Tensor]) -> bool:
    """Whether a call cannot be made on tensors without data, though its results need none."""
    try:
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            call(*[mode.from_tensor(tensor.detach()) for tensor in tensors])
    except Exception as error:
        return "data is not allocated" in str(error) or "data pointer" in str(error)
    return False


def calls_of(entry: Any, most: int) -> Iterator[tuple[Callable[..., Any], list[list[Tensor]]]]:
    """Calls of an entry of PyTorch's database, with tensors from several seeds that have one meta."""
    for dtype in (torch.float32, torch.complex64, torch.int64):
        if dtype not in entry.supported_dtypes("cpu"):
            continue
        grads = entry.supports_autograd and dtype in entry.supported_backward_dtypes("cpu")
        made = sets_of_samples(lambda grads=grads, dtype=dtype: entry.sample_inputs("cpu", dtype, requires_grad=grads))
        for number, samples in enumerate(made):
            if number == most:
                break
            calls = [flat_call(entry.op, ((s.input, *s.args), s.kwargs)) for s in samples]
            yield calls[0][0], data_of([tensors for _, tensors in calls], not entry.name.startswith(UNCHECKED))


def findings(calls: Iterator[tuple[Callable[..., Any], list[list[Tensor]]]]) -> list[Finding]:
    """What the ops in these calls, and in their gradients, do beyond what they say."""
    spy = Spy()
    found = []
    for call, sets in calls:
        ran = False
        for tensors in sets:
            try:
                with spy:
                    ends = [t for t in plain(call(*tensors)) if t.requires_grad]
                    leaves = [t for t in tensors if t.requires_grad and t.is_leaf]
                    if ends and leaves:
                        torch.autograd.grad(ends, leaves, [torch.ones_like(e) for e in ends], allow_unused=True)
                ran = True
            except Exception:  # on this machine, or not with this data
                continue
        if ran and reads_memory(call, sets[0]):
            found.append(Finding("memory", "", call, sets))
    return [*spy.found.values(), *found]
