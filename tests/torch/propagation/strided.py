"""The calls of `validation/src/samples/*.txt` with tensors that lie otherwise: in other strides, sizes and ranks."""

import random
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from .samples import Sample, Tensor

Shape = tuple[int, ...]
Strides = tuple[int, ...]
FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "preserve_format": torch.preserve_format,
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
}
# How one tensor lies, of its shape and a source of chance.
Lie = Callable[[Shape, random.Random], Strides]


@dataclass(frozen=True)
class Call:
    """A sample whose tensors have these strides."""

    sample: Sample
    strides: tuple[Strides, ...]
    variant: str

    def written(self) -> list[str]:
        """The arguments as `rote propagate` reads them, all replicated on one mesh dim."""
        rest = iter(self.strides)

        def one(arg: Any) -> Any:
            if isinstance(arg, list):
                return [one(a) for a in arg]
            if not isinstance(arg, Tensor):
                return arg
            shape, strides = ",".join(map(str, arg.shape)), ",".join(map(str, next(rest)))
            return replace(arg, written=f"{arg.written.split('[')[0]}[{shape}]{{{strides}}}")

        args = tuple(one(a) for a in self.sample.args)
        kwargs = {key: one(value) for key, value in self.sample.kwargs.items()}
        sample = replace(self.sample, args=args, kwargs=kwargs)
        return sample.written(["R"] * len(self.strides))


def packed(shape: Shape, order: list[int]) -> Strides:
    """Strides without gaps; the last dim of the order lies innermost."""
    strides, step = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def contiguous(shape: Shape, _: random.Random) -> Strides:
    return packed(shape, list(range(len(shape))))


def transposed(shape: Shape, _: random.Random) -> Strides:
    order = list(range(len(shape)))
    return packed(shape, order[:-2] + order[-2:][::-1])


def channels_last(shape: Shape, chance: random.Random) -> Strides:
    if len(shape) not in (4, 5):
        return contiguous(shape, chance)
    return packed(shape, [0, *range(2, len(shape)), 1])


def permuted(shape: Shape, chance: random.Random) -> Strides:
    return packed(shape, chance.sample(range(len(shape)), len(shape)))


def broadcast(shape: Shape, chance: random.Random) -> Strides:
    """Some dims have stride 0."""
    kept = [chance.random() < 0.5 for _ in shape]
    strides = packed(tuple(n if k else 1 for n, k in zip(shape, kept, strict=True)), list(range(len(shape))))
    return tuple(s if k else 0 for s, k in zip(strides, kept, strict=True))


def gaps(shape: Shape, chance: random.Random) -> Strides:
    """A piece of a larger tensor."""
    return packed(tuple(n + chance.randint(0, 2) for n in shape), list(range(len(shape))))


def gaps_permuted(shape: Shape, chance: random.Random) -> Strides:
    return packed(tuple(n + chance.randint(0, 2) for n in shape), chance.sample(range(len(shape)), len(shape)))


def odd(shape: Shape, chance: random.Random) -> Strides:
    """Dims of size 1 have any stride."""
    strides = chance.choice((contiguous, permuted, channels_last))(shape, chance)
    return tuple(chance.choice((0, 1, 2, 7, 64, s)) if n == 1 else s for n, s in zip(shape, strides, strict=True))


def any_way(shape: Shape, chance: random.Random) -> Strides:
    return chance.choice(LIES)(shape, chance)


LIES: list[Lie] = [contiguous, transposed, channels_last, permuted, broadcast, gaps, gaps_permuted, odd]


def mapped(sample: Sample, change: Callable[[Shape], Shape]) -> Sample:
    """The sample with other shapes."""

    def one(arg: Any) -> Any:
        if isinstance(arg, list):
            return [one(a) for a in arg]
        return replace(arg, shape=change(arg.shape)) if isinstance(arg, Tensor) else arg

    args = tuple(one(a) for a in sample.args)
    return replace(sample, args=args, kwargs={key: one(value) for key, value in sample.kwargs.items()})


def renamed(size: int, other: int, shape: Shape) -> Shape:
    return tuple(other if n == size else n for n in shape)


def deeper(front: Shape, shape: Shape) -> Shape:
    return front + shape


def shaped(sample: Sample, chance: random.Random) -> Iterator[tuple[str, Sample]]:
    """The sample, and forms of it in which a size is 1 or 0 everywhere, or tensors have more dims. Some of these are
    no valid calls; PyTorch refuses them."""
    yield "", sample
    if sample.name == "aten::convolution_backward":
        return  # a list among its arguments repeats a shape
    sizes = sorted({n for t in sample.tensors for n in t.shape} - {0, 1})
    for size in sizes:
        yield f"{size}=1 ", mapped(sample, partial(renamed, size, 1))
    if sizes:
        size = chance.choice(sizes)
        yield f"{size}=0 ", mapped(sample, partial(renamed, size, 0))
    if all(len(t.shape) <= 3 for t in sample.tensors):
        for front in ((2, 3), (3, 1), (5,)):
            yield f"{front}+ ", mapped(sample, partial(deeper, front))
        yield "(2, 3)+ but 0-d ", mapped(sample, lambda s: (2, 3, *s) if s else s)


def calls(sample: Sample, chance: random.Random, rounds: int) -> Iterator[Call]:
    """The sample's forms, with tensors that lie alike, and that lie each in its own way."""
    seen: set[tuple[tuple[Shape, ...], tuple[Strides, ...]]] = set()
    for how, form in shaped(sample, chance):
        shapes = tuple(t.shape for t in form.tensors)
        ways: list[Lie] = [*LIES, *[any_way] * rounds]
        for lie in ways:
            strides = tuple(lie(shape, chance) for shape in shapes)
            if (shapes, strides) not in seen:
                seen.add((shapes, strides))
                yield Call(form, strides, how + lie.__name__)


def pytorchs(mode: FakeTensorMode, call: Call, device: str) -> list[tuple[Shape, Strides]] | None:
    """The shapes and strides that fake tensors give the outputs that are tensors; `None` if PyTorch refuses the
    call."""
    shapes = [(t.shape, t.dtype) for t in call.sample.tensors]
    with mode, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensors = [
            torch.empty_strided(shape, strides, dtype=dtype, device=device)
            for (shape, dtype), strides in zip(shapes, call.strides, strict=True)
        ]
        args, kwargs = call.sample.filled(tensors)
        args = [FORMATS.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
        kwargs = {key: FORMATS.get(arg, arg) if isinstance(arg, str) else arg for key, arg in kwargs.items()}
        try:
            found = call.sample.op(*args, **kwargs)
        except Exception:  # Whatever PyTorch says of a call that is none.
            return None
    found = found if isinstance(found, (tuple, list)) else [found]
    flat = [o for one in found for o in (one if isinstance(one, (tuple, list)) else [one])]
    return [(tuple(o.shape), tuple(o.stride())) for o in flat if isinstance(o, torch.Tensor)]
