"""A program from a seed.

Lines are drawn at random and run at once on a trial state, so that shapes and
placements are those of real tensors; what eager PyTorch refuses is drawn again.
A program is Python source with three functions: `state(mesh)` makes what the
step keeps, `arguments(mesh, call, state)` what a call is given, and
`captured(mesh, state)` returns the step.
"""

import dataclasses
import random
import re
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed._functional_collectives as functional
import torch.distributed.tensor as distributed
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from . import ops

MOST_ELEMENTS = 512
FIELD = re.compile(r"{(\w+)}")

#: What programs may name.
NAMES: dict[str, Any] = {
    "DTensor": DTensor,
    "F": F,
    "Partial": Partial,
    "Replicate": Replicate,
    "Shard": Shard,
    "distribute_tensor": distribute_tensor,
    "distributed": distributed,
    "functional": functional,
    "torch": torch,
}


@dataclasses.dataclass
class Program:
    seed: int
    world: int
    state: list[str]  # entries of the dict
    arguments: list[str]  # expressions
    unpack: list[str]  # the step's first lines: names for the state
    lines: list[str]
    returns: str

    def source(self) -> str:
        names = ", ".join(f"a{i}" for i in range(len(self.arguments)))
        body = [*self.unpack, *self.lines, f"return {self.returns}"]
        return "\n".join(
            [
                "def state(mesh):",
                f"    torch.manual_seed({self.seed})",
                "    return {",
                *(f"        {entry}," for entry in self.state),
                "    }",
                "",
                "def arguments(mesh, call, state):",
                f"    torch.manual_seed({self.seed} * 100 + call)",
                f"    return [{', '.join(self.arguments)}]",
                "",
                "def captured(mesh, state):",
                f"    def step({names}):",
                textwrap.indent("\n".join(body), " " * 8),
                "    return step",
            ]
        )

    def functions(self) -> dict[str, Any]:
        env = dict(NAMES)
        exec(compile(self.source(), f"<program {self.seed}>", "exec"), env)
        return env


def local_of(tensor: Tensor) -> Tensor:
    """This rank's plain tensor."""
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local.wait() if isinstance(local, functional.AsyncCollectiveTensor) else local


def usable(tensor: Tensor) -> bool:
    """Whether autograd still allows the tensor: some views may not be used once
    what they look at was written."""
    try:
        return tensor.grad_fn is None or True
    except RuntimeError:
        return False


class Generator:
    def __init__(self, seed: int, mesh: DeviceMesh) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.mesh = mesh
        self.shapes = self.rng.sample(ops.SHAPES, 2)
        self.count = 0
        self.env: dict[str, Any] = {}
        self.state: list[str] = []
        self.arguments: list[str] = []
        self.unpack: list[str] = []
        self.lines: list[str] = []
        self.parameters: list[str] = []
        self.ints: list[str] = []

    def program(self) -> Program:
        rng = self.rng
        self.prepare()
        found = Program(self.seed, self.mesh.size(), self.state, self.arguments, self.unpack, self.lines, "None")
        functions = found.functions()
        torch.manual_seed(0)
        state = functions["state"](self.mesh)
        arguments = functions["arguments"](self.mesh, 0, state)
        self.env = {**NAMES, "mesh": self.mesh, "state": state}
        self.env.update((f"a{i}", value) for i, value in enumerate(arguments))
        for line in self.unpack:
            exec(line, self.env)
        length = rng.choice([rng.randint(5, 15), rng.randint(5, 30), rng.randint(20, 60)])
        trains = bool(self.parameters) and rng.random() < 0.5
        if trains and rng.random() < 0.6:
            self.lines.extend(f"{p}.grad = None" for p in self.parameters)
        backward_at = rng.randint(length // 3, length) if trains else -1
        stepped = False
        for _ in range(3 * length):
            if len(self.lines) >= length:
                break
            if 0 <= backward_at <= len(self.lines):
                backward_at = -1
                stepped = self.backward()
            elif stepped and rng.random() < 0.25:
                self.step()
            elif rng.random() < 0.27:
                self.write()
            else:
                self.make()
        if backward_at >= 0:
            self.backward()
        found.returns = self.returns()
        return found

    # -- what there is at the start ---------------------------------------------

    def prepare(self) -> None:
        rng = self.rng
        for i in range(rng.randint(1, 3)):
            if rng.random() < 0.75:
                name, text = f"p{i}", f"torch.nn.Parameter({self.start()})"
                self.parameters.append(name)
            else:
                name, text = f"b{i}", self.start()
            self.bind(name, text)
        if rng.random() < 0.7:
            self.bind("b9", self.start())
        if rng.random() < 0.5:
            self.bind("t9", f"torch.randn{rng.choice(self.shapes)}")
        for i in range(rng.randint(1, 3)):
            kind = rng.random()
            if kind < 0.6 or i == 0:
                text = self.start()
            elif kind < 0.75:
                text = "torch.randint(0, 4, (4,))"
                self.ints.append(f"a{i}")
            else:
                text = f"torch.randn{rng.choice(self.shapes)}"
            self.arguments.append(text)
        alias = rng.random()
        if alias < 0.08:
            self.arguments.append(f"state[{rng.choice(self.unpack).split(' = ')[0]!r}].detach()")
        elif alias < 0.16:
            self.arguments = ["(x := torch.randn(4, 4))", "x[1:3]", "x.t()"]
            self.ints = []

    def bind(self, name: str, text: str) -> None:
        self.state.append(f"{name!r}: {text}")
        self.unpack.append(f"{name} = state[{name!r}]")

    def start(self) -> str:
        shape = self.rng.choice(self.shapes)
        if self.rng.random() < 0.15:
            return f"torch.randn{shape}"
        dims = shape.count(",") + (shape[-2] != ",")
        place = self.rng.choice(ops.PLACEMENTS[: dims + 1])
        return f"distribute_tensor(torch.randn{shape}, mesh, [{place}])"

    # -- lines ------------------------------------------------------------------

    def tensors(self) -> list[str]:
        """Names of tensors of floats, the newest most often."""
        names = [
            name
            for name, value in self.env.items()
            if isinstance(value, Tensor) and value.is_floating_point() and name not in NAMES
        ]
        weights = [1 + 3 * (at / max(1, len(names))) ** 2 for at in range(len(names))]
        return self.rng.choices(names, weights, k=min(12, 3 * len(names)))

    def fill(self, line: str) -> str | None:
        """The line with its fields filled in, or None where nothing fits."""
        rng = self.rng
        chosen: dict[str, str] = {}
        names = self.tensors()
        first: str | None = None

        def fits(field: str, name: str) -> bool:
            value = self.env[name]
            if field == "d":
                return isinstance(value, DTensor)
            if field == "t":
                return not isinstance(value, DTensor) and value.numel() >= 4
            if field == "m":
                return bool(value.ndim == 2)
            if field == "w":
                left = self.env[chosen["m"]]
                same = isinstance(value, DTensor) == isinstance(left, DTensor) and value.dtype == left.dtype
                return value.ndim == 2 and same and value.shape[0] == left.shape[1]
            if field in "yz":
                left = self.env[chosen.get("x", first or "")]
                same = isinstance(value, DTensor) == isinstance(left, DTensor)
                return bool(same and value.shape == left.shape)
            return True

        out = line
        for field in dict.fromkeys(FIELD.findall(line)):
            if field == "dim":
                ndim = self.env[first].ndim if first else 0
                if ndim == 0:
                    return None
                text = str(rng.randrange(-ndim, ndim))
            elif field == "at":
                text = rng.choice(["0", "1", "-1"])
            elif field == "n":
                text = rng.choice(ops.NUMBERS)
            elif field == "s":
                text = rng.choice(self.shapes)
            elif field == "i":
                if not self.ints:
                    return None
                text = rng.choice(self.ints)
            elif field == "p":
                text = rng.choice(self.parameters)
            elif field == "k":
                text = str(self.count)
            elif field == "place":
                while "{place}" in out:
                    out = out.replace("{place}", rng.choice(ops.PLACEMENTS), 1)
                continue
            else:
                fitting = [name for name in names if fits(field, name)]
                if not fitting and field in "yzw":
                    every = [n for n, v in self.env.items() if isinstance(v, Tensor) and v.is_floating_point()]
                    fitting = [name for name in every if fits(field, name)]
                if not fitting:
                    return None
                others = [name for name in fitting if name not in chosen.values()]
                text = rng.choice(others or fitting)
                chosen[field] = text
                first = first or text
            out = out.replace("{" + field + "}", text)
        return out

    def attempt(self, line: str) -> bool:
        """Runs a line on the trial state; keeps it if eager takes it."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exec(line, self.env)
        except Exception:
            return False
        self.lines.append(line)
        return True

    def make(self) -> None:
        kinds = list(ops.MAKES.values())
        lines = self.rng.choices(kinds, [weight for weight, _ in kinds])[0][1]
        text = self.fill(self.rng.choice(lines))
        if text is None:
            return
        name = f"v{self.count}"
        if not self.attempt(f"{name} = {text}"):
            self.env.pop(name, None)
            return
        value = self.env[name]
        local = local_of(value) if isinstance(value, Tensor) else None
        if local is None or not 0 < local.numel() <= MOST_ELEMENTS or not bool(local.isfinite().all()):
            self.lines.pop()
            del self.env[name]
            return
        self.count += 1

    def write(self) -> None:
        text = self.fill(self.rng.choice(ops.WRITES))
        if text is None:
            return
        if self.parameters and (self.rng.random() < 0.6 or text.startswith("a")):
            text = f"with torch.no_grad(): {text}"
        self.attempt(text)
        for name, value in list(self.env.items()):
            if isinstance(value, Tensor) and not usable(value):
                del self.env[name]

    def backward(self) -> bool:
        """A loss of what depends on parameters; whether there is one."""
        names = [name for name in dict.fromkeys(self.tensors()) if self.env[name].grad_fn is not None]
        if not names:
            return False
        terms = [f"{name}.float().square().mean()" for name in self.rng.sample(names, min(len(names), 2))]
        if len(terms) == 2 and isinstance(self.env[names[0]], DTensor) != isinstance(self.env[names[1]], DTensor):
            terms = terms[:1]
        name = f"loss{self.count}"
        self.count += 1
        kept = len(self.lines)
        if self.attempt(f"{name} = {' + '.join(terms)}") and self.attempt(f"{name}.backward()"):
            if self.rng.random() < 0.3 and self.attempt(f"{name} = {name}.detach()"):
                pass
            return True
        del self.lines[kept:]
        self.env.pop(name, None)
        for parameter in self.parameters:
            self.env[parameter].grad = None
        return False

    def step(self) -> None:
        if self.rng.random() < 0.3:
            line = self.fill(self.rng.choice(ops.NEW_GRADIENTS))
            self.count += 1
            if line is not None and self.attempt(line) and self.env[line.split(" = ")[0]] is None:
                del self.env[line.split(" = ")[0]]
                self.lines.pop()
            return
        line = self.fill(self.rng.choice(ops.STEPS))
        if line is not None:
            self.attempt(f"with torch.no_grad(): {line}")

    # -- results ----------------------------------------------------------------

    def returns(self) -> str:
        names = [name for name, value in self.env.items() if isinstance(value, Tensor)]
        rng = self.rng
        count = rng.choice([0, 1, 2, 3, 4, 8, 12])
        chosen = [rng.choice(names[-8:] if rng.random() < 0.5 else names) for _ in range(count)]
        if chosen and rng.random() < 0.25:
            chosen.append(chosen[0])  # twice
        return f"[{', '.join(self.result(name) for name in chosen)}]"

    def result(self, name: str) -> str:
        value = self.env[name]
        text = f"{name}.detach()" if value.grad_fn is not None else name
        forms = ["", "", ""]
        if value.grad_fn is not None or not value.requires_grad:
            forms.append(".clone()")
        if value.ndim > 0 and not value.requires_grad:
            forms += ["[0]", "[:1]", ".view(-1)"]
            if value.ndim == 2:
                forms += [".t()"]
        text += self.rng.choice(forms)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                eval(text, self.env)
        except Exception:
            return name if value.grad_fn is None else f"{name}.detach()"
        return text


def generate(seed: int, mesh: DeviceMesh) -> Program:
    """The program of a seed on a mesh of one dim."""
    return Generator(seed, mesh).program()


def generated(seed: int, count: int, mesh: DeviceMesh) -> Iterator[Program]:
    """The programs of `seed`, `seed + 1` and so on."""
    return (generate(seed + i, mesh) for i in range(count))
