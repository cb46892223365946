"""The calls of `validation/src/samples/*.txt`, as PyTorch takes them."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "validation" / "src" / "samples"

DTYPES = {
    "u8": torch.uint8,
    "i8": torch.int8,
    "i16": torch.int16,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "f32": torch.float32,
    "f64": torch.float64,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "bool": torch.bool,
    "bf16": torch.bfloat16,
    "f8e4m3fn": torch.float8_e4m3fn,
}
TENSOR = re.compile(r"(\w+)\[([\d,]*)\](.*)")


@dataclass(frozen=True)
class Tensor:
    """A tensor argument: its meta, and what its values must be."""

    written: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    values: str

    def make(self, generator: torch.Generator) -> torch.Tensor:
        """Values as the suffix asks for them."""
        if self.values.startswith("<"):
            return torch.randint(0, int(self.values[1:]), self.shape, generator=generator).to(self.dtype)
        if self.values == ":perm":
            return torch.rand(self.shape, generator=generator).argsort(-1).to(self.dtype)
        if self.dtype == torch.bool:
            return torch.rand(self.shape, generator=generator) < 0.5
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return torch.randint(1, 5, self.shape, generator=generator).to(self.dtype)
        if self.dtype.is_complex:
            normal = torch.randn(self.shape, dtype=torch.complex128, generator=generator)
        else:
            normal = torch.randn(self.shape, dtype=torch.float64, generator=generator)
        return MAKERS[self.values](normal).to(self.dtype)


def spread(normal: torch.Tensor) -> torch.Tensor:
    """Normal values pushed away from zero, so that products stay sensible."""
    return normal + 0.1 * torch.sgn(normal.real)


def definite(normal: torch.Tensor) -> torch.Tensor:
    return normal @ normal.mH + normal.shape[-1] * torch.eye(normal.shape[-1], dtype=normal.dtype)


def triangle(normal: torch.Tensor) -> torch.Tensor:
    return normal / 4 + torch.diag_embed(2 + normal.diagonal(dim1=-2, dim2=-1).abs())


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": spread,
    ">0": lambda n: n.abs() + 0.1,
    ":unit": lambda n: torch.sigmoid(n),
    ":sorted": lambda n: n.sort(-1).values,
    ":spd": definite,
    ":lower": lambda n: triangle(n).tril(),
    ":upper": lambda n: triangle(n).triu(),
}


@dataclass(frozen=True)
class Sample:
    """One call: an op with its positional and keyword-only arguments, in
    which `Tensor`s stand for tensors."""

    family: str
    line: int
    name: str
    words: tuple[str, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def op(self) -> Any:
        """The overload; samples travel between processes, overloads do not."""
        return overload(self.name)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in schema order, those of lists one by one."""
        found: list[Tensor] = []
        for arg in (*self.args, *self.kwargs.values()):
            found += [t for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]
        return found

    def filled(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """The arguments with values in place of the tensors."""
        rest = iter(values)

        def one(arg: Any) -> Any:
            if isinstance(arg, list):
                return [one(a) for a in arg]
            return next(rest) if isinstance(arg, Tensor) else arg

        return [one(a) for a in self.args], {k: one(a) for k, a in self.kwargs.items()}

    def written(self, placements: Sequence[str]) -> list[str]:
        """The arguments as `rote propagate` reads them."""
        rest = iter(zip(self.tensors, placements, strict=True))

        def one(word: str) -> str:
            if word.startswith("{"):
                return "{" + "; ".join(one(w) for w in word[1:-1].split(";") if w) + "}"
            if TENSOR.fullmatch(word) and not word.startswith("'"):
                tensor, placed = next(rest)
                return f"{tensor.written} @ {placed}"
            return word

        return [one(word) for word in self.words]


def overload(name: str) -> Any:
    """The overload of a name such as `aten::sum.dim_IntList`."""
    namespace, _, rest = name.partition("::")
    packet, _, suffix = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), suffix or "default")


def argument(word: str, kind: str) -> Any:
    """One argument, read as the type that the schema gives it."""
    if word == "none":
        return None
    if word.startswith("{"):
        return [argument(w, "Tensor") for w in word[1:-1].split(";") if w]
    if word.startswith("'"):
        return word[1:-1]
    if word.startswith("["):
        items = [argument(w, kind) for w in word[1:-1].split(",") if w]
        return [float(i) for i in items] if "float" in kind else items
    if word in ("true", "false"):
        return word == "true"
    if found := TENSOR.fullmatch(word):
        dtype, shape, values = found.groups()
        sizes = tuple(int(n) for n in shape.split(",") if n)
        return Tensor(f"{dtype}[{shape}]", sizes, DTYPES[dtype], values)
    if word in DTYPES:
        return DTYPES[word]
    if word.endswith("j"):
        return complex(word)
    number = float(word)
    if "float" in kind or any(c in word for c in ".einf"):
        return number
    return int(word)


def parse(family: str, line: int, text: str) -> Sample | None:
    """The sample on one line, if there is one."""
    name, *words = text.split("#")[0].split() or [""]
    if not name:
        return None
    schema = overload(name)._schema.arguments
    if len(words) > len(schema):
        raise ValueError(f"{family}.txt:{line}: {name} takes {len(schema)} arguments, found {len(words)}")
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for word, formal in zip(words, schema, strict=False):
        value = argument(word, str(formal.type))
        if not formal.kwarg_only:
            args.append(value)
        elif value is not None:
            kwargs[formal.name] = value
    return Sample(family, line, name, tuple(words), tuple(args), kwargs)


def read(op: str | None = None) -> Iterator[Sample]:
    """All samples, or those of one op: of its name, or of one overload."""
    for path in sorted(FOLDER.glob("*.txt")):
        for number, text in enumerate(path.read_text().splitlines(), 1):
            name = (text.split("#")[0].split() or [""])[0]
            if name and (op is None or op in (name, name.split(".")[0])):
                sample = parse(path.stem, number, text)
                if sample is not None:
                    yield sample
