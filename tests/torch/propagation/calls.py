"""The calls that the samples of PyTorch's own op tests make (`op_db`), as samples.

Each sample runs without autograd, where composite ops are seen as such, and with
autograd and its backward, where the ops inside are seen.
"""

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from .samples import DTYPES, Sample, Tensor

NAMES = {dtype: name for name, dtype in DTYPES.items()}
WANTED = (
    torch.float32,
    torch.int64,
    torch.bool,
    torch.complex64,
    torch.uint8,
    torch.int32,
    torch.float64,
    torch.bfloat16,
)
# Larger tensors take long, and show nothing that smaller ones do not.
LARGEST = 20_000


class Unwritten(Exception):
    """A call that `rote propagate` has no notation for, or that is too large."""


@dataclass(frozen=True)
class Recorded(Tensor):
    """A tensor argument with the values that it had."""

    value: torch.Tensor = field(compare=False)

    def make(self, generator: torch.Generator) -> torch.Tensor:
        return self.value.clone()


@dataclass(frozen=True)
class Call(Sample):
    """A sample that names its overload itself, as there are overloads that no name finds."""

    target: Any = field(compare=False, default=None)

    @property
    def op(self) -> Any:
        return self.target


@cache
def ops() -> list[Any]:
    """PyTorch's op tests."""
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


class Recorder(TorchDispatchMode):  # type: ignore[misc]
    """Hands every call to `see` before it runs."""

    def __init__(self, see: Callable[[Any, Sequence[Any], dict[str, Any]], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.see(func, args, kwargs)
        return func(*args, **kwargs)


def recorded(tensor: torch.Tensor) -> Recorded:
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
    if not plain or tensor.device.type != "cpu" or tensor.is_quantized or tensor.dtype not in NAMES:
        raise Unwritten
    if tensor.numel() > LARGEST:
        raise Unwritten
    value = tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    shape = tuple(tensor.shape)
    written = f"{NAMES[tensor.dtype]}[{','.join(map(str, shape))}]"
    return Recorded(written, shape, tensor.dtype, "", value)


def word(value: Any) -> str:
    """An argument as `rote propagate` reads it."""
    if value is None:
        return "none"
    if isinstance(value, Tensor):
        return value.written
    if isinstance(value, (list, tuple)):
        if any(isinstance(v, Tensor) for v in value):
            return "{" + ";".join(map(word, value)) + "}"
        return "[" + ",".join(map(word, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, complex):
        return repr(value).strip("()")
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, torch.dtype) and value in NAMES:
        return NAMES[value]
    if isinstance(value, (torch.layout, torch.memory_format)):
        return f"'{str(value).removeprefix('torch.')}'"
    if isinstance(value, torch.device):
        return f"'{value}'"
    if isinstance(value, str) and not set(value) & set("'{};@"):
        return f"'{value}'"
    raise Unwritten


def call(family: str, number: int, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Call:
    """A call as a sample.

    Raises `Unwritten` where it has no notation.
    """
    schema = func._schema
    held = tree_map(lambda leaf: recorded(leaf) if isinstance(leaf, torch.Tensor) else leaf, (list(args), kwargs))
    args, kwargs = [list(a) if isinstance(a, tuple) else a for a in held[0]], held[1]
    words: list[str] = []
    for at, formal in enumerate(schema.arguments):
        given = args[at] if at < len(args) else kwargs.get(formal.name)
        listed = "List[" in str(formal.type) and "Tensor" in str(formal.type)
        words.append("{" + word(given)[1:-1] + "}" if listed and given is not None else word(given))
    required = [at for at, formal in enumerate(schema.arguments) if not formal.has_default_value()]
    while words[max(required, default=-1) + 1 :] and words[-1] == "none":
        words.pop()
    name = schema.name if func._overloadname == "default" else f"{schema.name}.{func._overloadname}"
    # In the order of the schema, as the tensors are counted.
    kwargs = {formal.name: kwargs[formal.name] for formal in schema.arguments if formal.name in kwargs}
    return Call(family, number, name, tuple(words), tuple(args), kwargs, func)


def of_op(at: int, dtypes: Sequence[torch.dtype], most: int, draw: random.Random | None = None) -> Iterator[Call]:
    """The different calls that up to `most` samples per dtype of an op test make; with `draw`, random samples."""
    test = ops()[at]
    seen: dict[tuple[str, tuple[str, ...]], Call] = {}

    def see(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if func.namespace not in ("aten", "prims") or any(
            isinstance(leaf, torch.Generator) for leaf in kwargs.values()
        ):
            return
        try:
            made = call(f"op_db[{at}] {test.name}", len(seen), func, args, kwargs)
        except Unwritten:
            return
        seen.setdefault((made.name, made.words), made)

    for dtype in dtypes:
        for sample in samples_of(test, dtype, most, draw):
            for run in (plainly, with_backward):
                torch.manual_seed(0)
                with warnings.catch_warnings(), Recorder(see):
                    warnings.simplefilter("ignore")
                    try:
                        run(test, sample)
                    except Exception:
                        # What PyTorch refuses is no question; what it ran until then is.
                        continue
    yield from seen.values()


def samples_of(test: Any, dtype: torch.dtype, most: int, draw: random.Random | None) -> list[Any]:
    if dtype not in test.supported_dtypes("cpu"):
        return []
    torch.manual_seed(0)
    try:
        found = list(test.sample_inputs("cpu", dtype, requires_grad=False))
    except Exception:
        # Samples that this build of PyTorch cannot make.
        return []
    if len(found) > most:
        found = draw.sample(found, most) if draw else found[:most]
    return found


def plainly(test: Any, sample: Any) -> None:
    with torch.inference_mode():
        test.op(*copied((sample.input, *sample.args)), **copied(sample.kwargs))


def with_backward(test: Any, sample: Any) -> None:
    def wanted(leaf: Any) -> Any:
        differentiable = isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
        return leaf.detach().clone().requires_grad_() if differentiable else leaf

    given = tree_map(wanted, (sample.input, *sample.args))
    result = test.op(*given, **copied(sample.kwargs))
    inputs = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if inputs and outputs:
        torch.autograd.grad(outputs, inputs, [torch.randn_like(o) for o in outputs], allow_unused=True)


def copied(given: Any) -> Any:
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, given)
