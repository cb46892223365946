"""Calls of ops from the samples that PyTorch tests itself with, and other data of the same meta."""

import dataclasses
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .layouts import LAYOUTS

SEEDS = (0, 1, 2)
SEED = 0  # of the choice of samples, layouts and passes
DTYPES = (torch.float32, torch.complex64, torch.int64, torch.bool, torch.bfloat16)


T = TypeVar("T")

#: Ops that read beyond their tensors in eager where integers do not fit each other, or where a number is none.
#: Of theirs only the order along the last dim changes.
UNCHECKED = ("_segment_reduce", "linalg.eig", "linalg.ldl_solve", "nn.functional.ctc_loss")
#: Numbers out of the range of many ops: of indices, of probabilities, of matrices that have an inverse.
OUTSIDE = (-5.0, 0.0, 1e4, float("nan"))


@dataclasses.dataclass
class Case:
    """A call, and sets of tensors to make it with."""

    name: str
    call: Callable[..., Any]  # of tensors
    data: list[list[Tensor]]  # all of one meta; the first is recorded
    backward: bool = False
    layout: str = "plain"
    inside: bool = False  # the tensors that the op gets are made in the step
    twice: bool = False  # tensors of one meta are one tensor
    handled: bool = False  # the step writes before the call, and goes on where the call raises


def handled(case: Case) -> Case:
    """The same call in a step that handles what it raises, with data of which much is out of range as well."""
    numbers = () if case.name.startswith(UNCHECKED) else OUTSIDE
    outside = [[tensor_of(number, t) for t in case.data[0]] for number in numbers]
    return dataclasses.replace(case, handled=True, name=f"{case.name}, handled", data=[*case.data[:2], *outside])


def tensor_of(number: float, like: Tensor) -> Tensor:
    if like.layout is not torch.strided or like.is_quantized or like.dtype is torch.bool:
        return like
    if whole(like):
        limits = torch.iinfo(like.dtype)
        number = 0 if number != number else min(max(number, limits.min), limits.max)
    return torch.full_like(like.detach(), number).requires_grad_(like.requires_grad)


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def number_of(text: str) -> int:
    """A number that depends on the seed and on nothing else."""
    return zlib.crc32(f"{SEED or ''}{text}".encode())


def choice(text: str, things: Sequence[T]) -> T:
    return things[number_of(text) % len(things)]


def flat_call(op: Callable[..., Any], arguments: Any) -> tuple[Callable[..., Any], list[Tensor]]:
    """`op` as a function of its tensors alone."""
    leaves, spec = pytree.tree_flatten(arguments)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def filled(*tensors: Tensor) -> Any:
        filling = list(rest)
        for position, tensor in zip(positions, tensors, strict=True):
            filling[position] = tensor
        args, kwargs = pytree.tree_unflatten(filling, spec)
        return op(*args, **kwargs)

    return filled, tensors


def meta(tensor: Tensor) -> Any:
    facts: list[Any] = [tensor.dtype, tensor.shape, tensor.layout, tensor.requires_grad]
    if tensor.layout is torch.strided:
        facts.append(tensor.stride())
    elif tensor.layout is torch.sparse_coo:
        facts.append(tensor._nnz())
    return facts


def other_integers(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Other integers in the range that `tensor` has, those of one multiset first."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    if tensor.dtype is torch.bool:
        return torch.rand(tensor.shape, generator=generator) < 0.5
    values = tensor.flatten().tolist()
    low, high = min(0, *values), max(values)
    if high - low >= 2**62:
        return tensor
    return torch.randint(low, high + 1, tensor.shape, generator=generator, dtype=torch.int64).to(tensor.dtype)


def whole(tensor: Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.is_quantized)


def rolled(tensor: Tensor) -> Tensor:
    """The same numbers in another order along the last dim."""
    return tensor.roll(1, -1) if tensor.dim() else tensor


def data_of(sets: list[list[Tensor]], checked: bool) -> list[list[Tensor]]:
    """The sets of one meta, and more with other integers; with any, if the op has a look at them."""
    first = [meta(t) for t in sets[0]]
    found = [tensors for tensors in sets if [meta(t) for t in tensors] == first]
    generator = torch.Generator().manual_seed(7)
    if any(whole(t) for t in sets[0]):
        last = found[-1]
        found.append([rolled(t) if whole(t) and t.layout is torch.strided else t for t in last])
        if checked:
            found.append([other_integers(t, generator) if whole(t) else t for t in last])
    elif len(found) == 1:  # constants: what eager says of other numbers is to be said too
        found.append(
            [
                t
                if t.layout is not torch.strided
                else t.detach().flip(0).requires_grad_(t.requires_grad)
                if t.dim()
                else t
                for t in sets[0]
            ]
        )
    return found


def sets_of_samples(make: Callable[[], Any]) -> Iterator[list[Any]]:
    """Samples made from several seeds, those of one position together."""
    lists = []
    for number in SEEDS:
        seed(number)
        try:
            lists.append(list(make()))
        except Exception:  # for some dtypes that they say they take, some have no samples
            return
    yield from (list(samples) for samples in zip(*lists, strict=False))


def cases_of(name: str, op: Callable[..., Any], arguments: list[Any], backward: bool, full: bool) -> Iterator[Case]:
    """The ways to make one call with the arguments of several seeds."""
    calls = [flat_call(op, each) for each in arguments]
    call = calls[0][0]
    sets = data_of([tensors for _, tensors in calls], not name.startswith(UNCHECKED))
    if not sets[0] or any(t.layout is torch.jagged or t.is_nested for t in sets[0]):
        return
    layouts = list(LAYOUTS)
    if not any(t.is_complex() for t in sets[0]):
        layouts.remove("conj")
    if not full:
        layouts = [choice(name, layouts)]
    for layout in layouts:
        inside = number_of(name + layout) % 2 == 1
        yield Case(f"{name}, {layout}{', inside' if inside else ''}", call, sets, backward, layout, inside)
    metas = [str(meta(t)) for t in sets[0]]
    if len(set(metas)) < len(metas) and (full or number_of(name) % 3 == 0):
        yield Case(f"{name}, twice", call, sets, backward, twice=True)


def op_cases(op: Any, dtype: torch.dtype, most: int, full: bool) -> Iterator[Case]:
    """All cases of one entry of PyTorch's database of ops."""
    label = f"{op.name}{'.' + op.variant_test_name if op.variant_test_name else ''} {str(dtype)[6:]}"
    backward = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    samples = list(sets_of_samples(lambda: op.sample_inputs("cpu", dtype, requires_grad=backward)))
    if len(samples) > most:  # some from everywhere, others for other names
        samples = random.Random(number_of(label)).sample(samples, most)
    for i, several in enumerate(samples):
        arguments = [((s.input, *s.args), s.kwargs) for s in several]
        name = f"{label} {i}"
        yield from cases_of(name, op.op, arguments, backward, full)
        if full or number_of(name) % 4 == 0:
            yield from written(op, name, arguments, full)


def written(op: Any, name: str, arguments: list[Any], full: bool) -> Iterator[Case]:
    """The in-place variant, and the one that writes its results to tensors it is given."""
    free = [pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, each) for each in arguments]
    inplace = op.inplace_variant
    if inplace is not None:
        yield from cases_of(f"{name} in place", inplace, free, False, full)
    if not op.supports_out:
        return
    try:
        results = op.op(*free[0][0], **free[0][1])
    except Exception:
        return
    several = isinstance(results, (list, tuple))
    if not all(isinstance(r, Tensor) and r.layout is torch.strided for r in (results if several else [results])):
        return

    def into(out: Any, args: Any, kwargs: Any) -> Any:
        return op.op(*args, **kwargs, out=out)

    def spaces() -> Any:
        if several:
            return tuple(torch.zeros_like(r) for r in results)
        return torch.zeros_like(results)

    given = [((spaces(), list(args), kwargs), {}) for args, kwargs in free]
    yield from cases_of(f"{name} out=", into, given, False, full)


def entries() -> list[tuple[str, Any]]:
    """What PyTorch has samples for: names, and entries of its databases."""
    from torch.testing._internal import common_methods_invocations as database
    from torch.testing._internal.custom_op_db import custom_op_db

    return [(op.full_name if hasattr(op, "full_name") else op.name, op) for op in [*database.op_db, *custom_op_db]]


def cases(entry: Any, most: int, full: bool) -> Iterator[Case]:
    """The cases of an entry, of each dtype that it takes."""
    supported = entry.supported_dtypes("cpu")
    for dtype in DTYPES:
        if dtype in supported:
            yield from op_cases(entry, dtype, most, full)
