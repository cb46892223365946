"""A script from a seed."""

import dataclasses
import random
import re
import textwrap

CALLS = 15
# Calls before which something changes.
CHANGES = (5, 10)
_NAMES = "abcde"
# How a name is kept: what reads it, what a change assigns to, whether the step takes it as an argument.
KEPT = {
    "cell": "{n}",
    "list": "items[{i}]",
    "dict": "kept['{n}']",
    "module": "model.{n}",
    "buffer": "model.buffers_of.{n}",
    "attribute": "holder.{n}",
    "tensor attribute": "w.{n}",
    "argument": "{n}",
    "list argument": "given[{i}]",
}
# Where a tensor of four elements lies. $T is another one of those made.
# (A tensor from DLPack holds the tensor it was made from, not its storage: `flat.data = ` would free that.)
PLACES = (
    ["torch.ones(4)", "torch.arange(4.0)", "torch.full((4,), 3.0)"] * 2
    + ["flat[:4]", "flat[4:]", "flat[2:6]", "flat[::2]", "flat.data[:4]", "flat[4:].detach()", "flat[:4].clone()"]
    + ["flat.view(2, 4)[1]", "flat.view(4, 2).t()[0]", "flat.unfold(0, 4, 4)[1]", "flat.as_strided((4,), (1,), 3)"]
    + ["$T", "$T", "$T.detach()", "$T.data", "$T.view(4)", "$T[:]", "$T.flip(0)", "$T.expand(4)"]
    + ["torch.from_numpy(array)[4:]", "torch.from_numpy(array[:4])", "torch.from_dlpack(flat.detach())[:4]"]
    + [
        "torch.empty(0).set_(flat.untyped_storage(), 2, (4,), (1,))",
        "torch.frombuffer(array, dtype=torch.float32)[2:6]",
    ]
    + ["torch.zeros(1).expand(4)", "torch.tensor(2.0).expand(4)", "torch.arange(4).float()"]
)
# Without what is no DTensor: wrapped, these are its local tensors.
GRADIENTS = ["None", *PLACES]
# What a step does. $T, $U, $P are tensors, $G one that requires grad, $V a place; r is what is returned.
PLAIN = [
    *["r = r + $T * 1"] * 3,
    *["r = r + $T.sum()"] * 2,
    *["$T.mul_(0.5)", "$T.add_(x)", "$T.add_(1)"] * 2,
    "$T.copy_($U)",
    "$T.add_($U)",
    "torch.add($T, 1, out=$U)",
    "$T[0].fill_(2)",
    "$T[1:3] += 1",
    "$T[::2].copy_($U[:2])",
    "r = r + $T.view(2, 2).t().reshape(4)",
    "y = $T[:2]\ny.add_(1)",
    "y = $T.detach()\n$U.add_(1)\nr = r + y",
    "y = torch.cat([$T[:2], $U[2:]])\nr = r + y",
    "torch._foreach_add_([$T, $U], 0.5)",
    "torch._foreach_mul_([$T, $U], [$U, $T])",
    "$T.data.add_(1)",
    "$T.detach().zero_()",
    *["($G * $T).sum().backward()", "($G * $T * x).sum().backward()"] * 3,
    "($G * $T + $U).sum().backward()",
    "y = torch.autograd.grad(($G * $T).sum(), $G)[0]\nr = r + y",
    *["$G.grad = None"] * 3,
    "$G.grad.zero_() if $G.grad is not None else None",
    "$G.grad.mul_(0.5) if $G.grad is not None else None",
    "$G.add_($G.grad, alpha=-0.5) if $G.grad is not None else None",
    "r = r + $G.grad if $G.grad is not None else r",
    "opt.step()",
    "opt.zero_grad()",
    "opt.zero_grad(set_to_none=False)",
    "r = r + (2 if $T is $U else 1)",
    "nn.utils.clip_grad_norm_([$G], 1.0)",
]
# Mostly refused.
ODD = [
    "$G.grad = $V",
    "$G.grad = $T",
    "$T.data = $U",
    "$T.data = $V",
    "$T.set_($U)",
    "$T = $U",
    "$T = $V",
    "$T = $T * 1",
    "$T = $T.detach()",
    "$T, $U = $U, $T",
    "torch.utils.swap_tensors($T, $U)",
    "$T.requires_grad_()",
    "$T.detach_()",
    "$T.fill_($U[0])",
    "array[1] += 1",
    "$T.numpy()[0] += 1",
    "r = r + $T.data_ptr() % 1",
    "r = r + (2 if $T.data_ptr() == $U.data_ptr() else 1)",
    "r = r + $T.storage_offset()",
    "r = r + $T._version",
    "out.append($T)",
    "out.append($T[:2])",
    "out.append($T.detach())",
    "out.append(r)",
    "out.append($T.clone())",
    "nn.utils.vector_to_parameters(torch.arange(4.0) + r.sum().detach(), [$G])",
    "$T.untyped_storage().fill_(0)",
    "r = r + torch.frombuffer(array, dtype=torch.float32)[:4]",
    "r = r + torch.from_numpy(array)[:4]",
    "array[:] = $T.detach().numpy().sum()",
    "w.held = $T",
    "model.register_buffer('late', $T)",
    "kept['late'] = $T",
    "holder.late = [$T, $U]",
    "$T.retain_grad()",
]
# What a caller does between two calls. (`swap_tensors`, which counts references, is in test_swapped.py.)
BETWEEN = [
    *["$T = $V"] * 6,
    *["$T.data = $V"] * 4,
    *["$T.set_($V)"] * 2,
    *["$G.grad = $V"] * 5,
    "$G.grad = None",
    "$T.grad = $V",
    "$T, $U = $U, $T",
    "$T.data, $U.data = $U.data, $T.data",
    "$G.grad, $T.grad = $T.grad, $G.grad",
    "$T.requires_grad_()",
    "$T.requires_grad_(False)",
    "$T.add_(1)",
    "flat.add_(1)",
    "flat.data = torch.arange(8.0)",
    "flat = torch.arange(8.0)",
    "array += 1",
    "$T.detach_()",
    "opt.zero_grad()",
    "opt.zero_grad(set_to_none=False)",
]
_HEADER = """
import sys
import types
import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from look import look


def attempt(do, *args):
    try:
        return do(*args)
    except Exception as error:
        return "raised " + type(error).__name__
"""
_DISTRIBUTED = """

def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    return init_device_mesh("cpu", (2,))


def wrapped(local):
    return DTensor.from_local(local, mesh(), [Replicate()], run_check=False)
"""
_MAIN = """

if __name__ == "__main__":  # with "eager", what eager gives
    import rote

    for found in run((lambda fn, **options: fn) if "eager" in sys.argv else rote.capture):
        print(found)
"""


@dataclasses.dataclass(frozen=True)
class Script:
    """What makes a script. Its lines may be left out one by one."""

    seed: int
    kept: tuple[tuple[str, str], ...]  # name, how it is kept
    made: tuple[str, ...]  # lines
    state: tuple[str, ...]  # expressions
    body: tuple[str, ...]
    changes: tuple[tuple[int, str], ...]
    distributed: bool

    @property
    def name(self) -> str:
        return str(self.seed)

    @property
    def quiet(self) -> bool:
        return not self.changes

    def source(self, main: bool = False) -> str:
        cells = [name for name, how in self.kept if how == "cell"]
        arguments = [name for name, how in self.kept if how == "argument"]
        reads = {name: read(name, how) for name, how in self.kept}
        everything = ", ".join(f"{name}={place}" for name, place in reads.items())
        lines = [
            "torch.manual_seed(0)",
            "flat, array = torch.arange(8.0) + 1, np.arange(8, dtype=np.float32)",
            "items, given, kept, out = [None] * 5, [None] * 5, {}, []",
            "model, holder = nn.Module(), types.SimpleNamespace()",
            "model.buffers_of = nn.Module()",
            "v, w = nn.Parameter(torch.full((4,), 0.5)), nn.Parameter(torch.full((4,), 2.0))",
            *(["v, w = nn.Parameter(wrapped(v.data)), nn.Parameter(wrapped(w.data))"] if self.distributed else []),
            "opt = torch.optim.SGD([v, w], 0.25, momentum=0.5)",
            *(f"{name} = None" for name in dict.fromkeys([*cells, *arguments])),
            *self.made,
        ]
        parameters = ", ".join(["x", "given", *arguments])
        body = "\n".join(["r = x * 1", *self.body, "return r"])
        cells += ["flat", "array"]
        used = [each for each in cells if re.search(rf"\\b{each}\\b", body)]
        step = f"def step({parameters}):\n" + textwrap.indent(
            (f"nonlocal {', '.join(used)}\n" if used else "") + body, "    "
        )
        named = ", ".join(self.state)
        lines += [
            step,
            f"named = [{named}]  # which lives as long as the step",
            "captured = capture(step, state=named)",
        ]
        for number, (_, change) in enumerate(self.changes):
            every = ", ".join(dict.fromkeys([*cells, *arguments]))
            lines += [f"def change_{number}():\n" + textwrap.indent(f"nonlocal {every}\n{change}", "    ")]
        x = "torch.ones(4) + call"
        loop = [f"x = {f'wrapped({x})' if self.distributed else x}", "changed = None"]
        for number, (call, _) in enumerate(self.changes):
            loop += [f"if call == {call}:\n    changed = attempt(change_{number})"]
        loop += [
            f"result = attempt(captured, {parameters})",
            f"yield attempt(lambda: look(changed=changed, result=result, v=v, w=w, flat=flat, "
            f"array=array.tolist(), out=out, {everything}))",
            "out.clear()",
        ]
        lines += [f"for call in range({CALLS}):\n" + textwrap.indent("\n".join(loop), "    ")]
        text = _HEADER + (_DISTRIBUTED if self.distributed else "")
        text += "\n\ndef run(capture):\n" + textwrap.indent("\n".join(lines), "    ") + "\n"
        return text + (_MAIN if main else "")


def read(name: str, how: str) -> str:
    return KEPT[how].format(n=name, i=_NAMES.index(name))


def generate(seed: int) -> Script:
    chance = random.Random(seed)
    distributed = chance.random() < 0.25
    names = _NAMES[: chance.randint(2, 5)]
    kept = tuple((name, chance.choice(list(KEPT))) for name in names)
    reads = [read(name, how) for name, how in kept]

    def place(known: list[str]) -> str:
        text = chance.choice(PLACES)
        while "$T" in text and not known:
            text = chance.choice(PLACES)
        if "$T" in text:
            return text.replace("$T", chance.choice(known))
        return f"wrapped({text})" if distributed else text

    def filled(text: str) -> str:
        choices = {
            "$T": lambda: chance.choice(reads),
            "$U": lambda: chance.choice(reads),
            "$G": lambda: chance.choice(["v", "w", "w", "w", chance.choice(reads)]),
            "$V": lambda: place(reads),
        }
        for mark, choose in choices.items():
            text = text.replace(mark, choose())  # the same wherever a line has it
        return text

    made = []
    for i, each in enumerate(reads):
        value = place(reads[:i])
        if chance.random() < 0.1:
            value = f"nn.Parameter({value})"
        made += [f"{each} = {value}"]
    made += [f"{each}.grad = {place(reads)}" for each, often in (("w", 0.4), ("v", 0.2)) if chance.random() < often]
    state = ["v", "w"] if chance.random() < 0.9 else ["w"]
    state += ["opt"] if chance.random() < 0.5 else []
    for (_, how), each in zip(kept, reads, strict=True):
        if chance.random() < 0.75:
            state += ["model" if how in ("module", "buffer") and chance.random() < 0.5 else each]
    state += ["flat"] if chance.random() < 0.6 else []
    body = []
    for lines in [PLAIN] * chance.randint(1, 5) + [ODD] * (chance.random() < 0.4):
        line = filled(chance.choice(lines))
        if re.search(r"_\(|\+=|out=", line) and "backward" not in line and chance.random() < 0.9:
            line = "with torch.no_grad():\n" + textwrap.indent(line, "    ")
        body.insert(chance.randint(0, len(body)), line)
    changes = []
    for call in CHANGES:
        for _ in range(chance.choice([0, 1, 1, 2])):
            line = filled(chance.choice(BETWEEN))
            if re.search(r"add_\(", line):
                line = "with torch.no_grad():\n" + textwrap.indent(line, "    ")
            changes += [(call, line)]
    return Script(seed, kept, tuple(made), tuple(dict.fromkeys(state)), tuple(body), tuple(changes), distributed)
