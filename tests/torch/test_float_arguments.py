"""Floats among the arguments of a step that are others at every call, and all that a step may do with one."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import Sizes, cross_entropy, llama, mesh, token_batches
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_right
from torch import Tensor, nn

VALUES = [0.3, 0.31, 0.32, 0.33, math.nan, 0.7, 0.5, 1.0, 0.0, -0.0, -0.3, 0.3, math.inf, 1e-320, 1e308, 0.2, 0.2, 0.4]
#: What a step makes of tensor `x` and float `w`, where every use is followed; at the calls before the first replay, all
#: comparisons come out alike. `v` is another float, `k` a tensor of whole numbers, `helper` a function of the script.
FOLLOWED = {
    "w * x": 0,
    "x * w": 0,
    "x + w": 0,
    "w + x": 0,
    "x - w": 0,
    "w - x": 0,
    "x / w": 0,
    "w / x": 0,
    "-w * x": 0,
    "(1 - w) * x + w * w * x.abs()": 0,
    "w**2 * x": 3,
    "1 / w * x": 4,
    "w * x + v * x": 0,
    "w / v * x": 0,
    "x * (w + 0.0)": 0,
    "(w * k).sum() + x": 0,
    "torch.lerp(x, x * 2, w)": 0,
    "torch.add(x, x.abs(), alpha=w)": 0,
    "x.abs().mul(w).add(x, alpha=1 - w)": 0,
    "x.clone().mul_(w).add_(x, alpha=1 - w)": 0,
    "torch.addcmul(x, x, x, value=w)": 0,
    "x * w if w > 0.25 else x": 6,
    "x * w if 0.2 < w <= 0.6 else x - w": 8,
    "min(w, 0.9) * x": 6,
    "max(0.1, w, 0.3) * x": 8,
    "x * (w / 3) * len('abc')": 0,
    "x * (w if n > 2 else 0.5)": 0,
    "helper(x, x.abs(), part=1 - w, more=w * 2)": 0,
    "deep(x, w)": 0,
    "nested(x, w)": 0,
    "(lambda other: other * w)(x)": 0,
    "sum([w * x for _ in range(2)])": 0,
    "x * (q := w * 2) + q": 0,
    "x * (w * FACTOR * box.factor)": 0,
    "F.gumbel_softmax(x, tau=w)": 0,
}
#: Uses of which none can be followed, or that look at the value.
GUARDED = [
    "x**w",
    "x * (w * n)",
    "x * (n / w)",
    "x * (w * x.detach().abs().sum().item())",
    "x * w if w else x",
    "x * math.sqrt(abs(w))",
    "x * len('%.9f' % w)",
    "x * len(f'{w:.3e}')",
    "x * len(str(w))",
    "x * int(w * 10)",
    "x * round(w, 1)",
    "x * abs(w)",
    "x * (w % 0.3)",
    "x * (w // 0.3)",
    "x * torch.tensor(w)",
    "x * float(np.float64(2) * w)",
    "x * float(np.float32(2) * w)",
    "x * float(np.add(w, 1.0))",
    "x + torch.from_numpy(np.ones(8, dtype=np.float32) * w)",
    "x if np.float64(0.5) < w else x * 2",
    "x if np.float64(2) * w > 1 else x * 2",
    "x if w * np.float64(2) > 1 else x * 2",
    "x * (odd * w)",
    "x * (w + odd)",
    "looks(x, w)",
    "x * sign(w)",
    "swaps(x, w)",
    "switch.net(x, w) * (switch.use('good') or 1)",
    "by_an_argument(x, w, np)",
    "by_an_object(x, w)",
    "x.mul(w)",
    "shadows(x, w)",
    "shadows_by_a_definition(x, w)",
    "shadows_by_an_attribute(x, w)",
    "shadows_by_an_import(x, w)",
    "recursive(x, w, 2)",
    "x * abs(1j * w)",
    "x * abs(ONE * w)",
    "x * abs(complex(1, 1) * w)",
    "x * abs(c * w)",
    "x * [1.0, 2.0, 3.0][int(w * 2) % 3]",
    "x * (hash(w) % 7)",
    "x * (1.0 if w is w else 2.0)",
    "x if w in (0.3, 0.5) else x * 2",
    "x * {0.3: 1.0}.get(w, 2.0)",
    "x.clamp(max=w)",
    "x * torch.full((8,), w)",
    "F.dropout(x, min(0.9, max(w, 0.1)))",
    "F.gumbel_softmax(x, tau=max(w, 0.1))",
    "x * (w, 2.0)[0]",
    "x * (not w)",
    "x * (w and 2.0)",
    "x if math.isfinite(w) else -x",
    "helper(x, x.abs(), w)",
    "helper(*(x, x), w)",
    "helper(x, x, **{'part': w})",
    "x * w.real",
    "x * float(w)",
    "x * math.fsum([w, w])",
    "x * sorted([w, 0.5])[0]",
    "x * sum([w, w])",
    "x * box.keep(w)",
    "x * (box.__setattr__('w', w) or box.w)",
    "x * eval('w')",
    "x * locals()['w']",
]
PREFIX = """
import math
import numpy as np
import torch
from torch.nn import functional as F

class Odd:
    def weigh(self, w):
        return w * 2

    def __mul__(self, other):
        return int(other * 10) * 1.0 if math.isfinite(other) else 1.0
    def __radd__(self, other):
        return math.sqrt(abs(other))

class Box:
    factor = 0.5

    def keep(self, w):
        self.w = w
        return w

odd, box, FACTOR, ONE = Odd(), Box(), 3, 1 + 0j

def helper(a, b, part=0.5, *, more=1.0):
    return a * part + (1 - part) * more * b

def deep(a, w):
    return helper(a, a, w) + helper(a, a, part=w * 2, more=1 - w)

def nested(a, w):
    def inner(b):
        return b * w
    return inner(a) + sum(w * each for each in (a, a))

def recursive(a, w, n):
    return a if n == 0 else recursive(a * w, w, n - 1)

def sign(w):
    return math.copysign(1.0, w)

def shadows(a, w):
    def inner(helper):
        return helper(w, 1.0)
    return a * inner(lambda value, _: sign(value))

def shadows_by_a_definition(a, w):
    def helper(value, _):
        return sign(value)
    return a * sum(helper(w, 1.0) for _ in range(1))

def shadows_by_an_attribute(a, w):
    odd.weigh = sign
    try:
        return a * odd.weigh(w)
    finally:
        del odd.weigh

def shadows_by_an_import(a, w):
    from math import copysign as helper
    return a * sum(helper(1.0, w) for _ in range(1))

class Switch:
    def __init__(self):
        self.net, self.nets = good, {"good": good, "sign": signed}

    def use(self, name):
        self.net = self.nets[name]

def good(a, w):
    return a * w

def signed(a, w):
    return a * sign(w)

switch, ops = Switch(), type("Ops", (), {"mul": staticmethod(signed)})

def swaps(a, w):
    switch.use("sign")
    try:
        return switch.net(a, w)
    finally:
        switch.use("good")

def by_an_argument(a, w, xp):
    return a * float(xp.add(w, 0.5))

def by_an_object(a, w):
    other = ops
    return other.mul(a, w)

def looks(a, w):
    return a * math.cos(w)
"""


def made(body: str, directory: Path, name: str = "use") -> Any:
    """A function of a file of its own."""
    file = directory / f"{name}.py"
    file.write_text(f"{PREFIX}\n{body}\n")
    names: dict[str, Any] = {"__name__": name, "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names[name]


def script_of(use: Any, values: list[Any] = VALUES, c: complex = 2.0) -> Script:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        layer = nn.Linear(8, 8)
        step = capture(use, state=layer)
        x, k = torch.randn(4, 8), torch.arange(4)
        for i, w in enumerate(values):
            torch.manual_seed(i)
            v = w * 0.5 + 0.1
            try:
                yield step(layer, x, w, v, 3, c, k), layer.weight.grad
            except Exception as error:
                yield f"{type(error).__name__}: {error}"
        return layer

    return script


def use_of(expression: str, directory: Path) -> Any:
    return made(
        f"def use(layer, x, w, v, n, c, k):\n"
        f"    y = {expression}\n"
        f"    layer.zero_grad()\n"
        f"    loss = layer(y).square().mean()\n"
        f"    loss.backward()\n"
        f"    return loss.detach()\n",
        directory,
    )


@pytest.mark.sampled(4)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expression", FOLLOWED)
def test_followed(expression: str, tmp_path: Path) -> None:
    least = len(VALUES) - 4 - FOLLOWED[expression]
    check_right(script_of(use_of(expression, tmp_path)), replays=least)


@pytest.mark.sampled(7)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expression", GUARDED)
def test_guarded(expression: str, tmp_path: Path) -> None:
    check_right(script_of(use_of(expression, tmp_path), c=2 + 0j))


class Warm(nn.Module):
    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.seen: list[float] = []

    def forward(self, x: Tensor, temperature: float) -> Tensor:
        return self.layer(x).div(temperature).tanh()


class Trainer:
    def __init__(self) -> None:
        self.layer = nn.Linear(8, 8)
        self.optimizer = torch.optim.AdamW(self.layer.parameters(), lr=1e-2)
        self.scale = 2.0
        self.warm = Warm(self.layer)

    def step(self, x: Tensor, weight: float, /, *, share: float = 0.5) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.layer(x).square().mean() * weight * self.scale + (1 - share) * self.layer.weight.abs().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def by_others(self, x: Tensor, weight: float, share: float = 0.5) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.weighed(self.warm(x, weight), share)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def weighed(self, out: Tensor, share: float) -> Tensor:
        return out.square().mean() * share * self.scale + (1 - share) * self.layer.weight.abs().sum()

    def by_any_name(self, x: Tensor, *rest: float, **more: float) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.layer(x).square().mean() * rest[0] + more["share"] * self.layer.weight.abs().sum()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def annealed(i: int) -> float:
    return min(1.0, (i + 1) / 12)


KINDS: list[Callable[[int], Any]] = [
    annealed,
    lambda i: np.float64(annealed(i)),
    lambda i: np.float32(annealed(i)),
    lambda i: annealed(i) if i % 7 < 5 else 2,
    lambda i: annealed(i) if i % 7 < 5 else np.float64(annealed(i)),
    lambda i: annealed(i) if i % 7 < 5 else torch.tensor(annealed(i)),
    lambda i: annealed(i) if i % 7 < 5 else True,
]


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", ["step", "by_others", "by_any_name"])
@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_kinds_of_numbers(kind: int, name: str) -> None:
    def script(capture: Capture) -> Calls:
        trainer = Trainer()
        step = capture(getattr(trainer, name), state=[trainer.layer, trainer.optimizer])
        for i in range(24):
            x = torch.randn(4, 8)
            if i == 19:
                trainer.scale = 3.0
            yield step(x, KINDS[kind](i), share=KINDS[kind](i + 3)) if i % 5 else step(x, 0.25, share=1.0)
        return trainer.layer, trainer.optimizer

    found = check_right(script)
    if kind in (0, 1) and name != "by_any_name" and not ORACLE_ONLY:
        assert found.steps[0].stats.replays >= 10, found.steps[0].stats


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("first", [float, np.float64])
@pytest.mark.parametrize(
    "expression",
    [
        "x * ((w > 0.1) + (w > 0.2))",
        "x if (w > 0.1) is True else -x",
        "x * ((w > 0.31) / (w > 0.25))",
        "x * ((w > 0.31) - (w > 0.2))",
        "x * torch.ones(8)[: 7 + (w > 0.31)].sum()",
        "F.dropout(x, 0.3, training=(w > 0.31))",
        "x * min(w, 0.5) * (-1 if w < 0 else 1 / w)",
    ],
)
def test_numpy_has_its_own_truth(expression: str, first: type, tmp_path: Path) -> None:
    other = np.float64 if first is float else float
    values = [first(value) for value in VALUES[:12]] + [other(value) for value in VALUES[:12]]
    check_right(script_of(use_of(expression, tmp_path), values))


@pytest.mark.filterwarnings("ignore:rote")
def test_what_a_name_stands_for_changes(tmp_path: Path) -> None:
    """A function that a float is passed on to, and a number that it is combined with, are others later."""
    body = (
        "def weigh(a, w):\n    return a * w\n\n"
        "def use(layer, x, w, v, n, c, k):\n"
        "    layer.zero_grad()\n"
        "    loss = weigh(layer(x).square().mean(), min(w, 9.0)) + FACTOR * w * layer.weight.abs().sum()\n"
        "    loss.backward()\n"
        "    return loss.detach()\n"
    )

    def script(capture: Capture) -> Calls:
        use = made(body, tmp_path)
        use.__globals__["min"] = min  # of the script's own, from then on
        others = iter(
            [
                ("FACTOR", 1.5),
                ("min", lambda a, b: math.sqrt(abs(a))),
                ("weigh", lambda a, w: a * (w > 0.25)),
                ("FACTOR", torch.tensor(2.0)),
            ]
        )
        layer = nn.Linear(8, 8)
        step = capture(use, state=layer)
        for i, w in enumerate(itertools.islice(itertools.cycle(VALUES), 60)):
            if i % 10 == 9:
                use.__globals__.update([next(others, ("FACTOR", 1))])
            yield step(layer, torch.randn(4, 8), w, w, 3, 2.0, None), layer.weight.grad

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_the_code_of_a_function_changes(tmp_path: Path) -> None:
    weigh = "def weigh(a, w):\n    return a * w\n"
    body = f"{weigh}\ndef use(layer, x, w, v, n, c, k):\n    return weigh(layer(x).detach(), w)\n"

    def script(capture: Capture) -> Calls:
        use = made(body, tmp_path)
        layer = nn.Linear(8, 8)
        step = capture(use, state=layer)
        for i in range(34):
            if i == 12:
                weigh = use.__globals__["weigh"]
                weigh.__code__ = made(
                    "def weigh(a, w):\n    return a * math.copysign(1.0, w)\n", tmp_path, "weigh"
                ).__code__
            yield step(layer, torch.randn(4, 8), annealed(i % 11) * (1 if i < 25 else -1), 0.5, 3, 2.0, None)

    check_right(script, replays=8)


@pytest.mark.filterwarnings("ignore:rote")
def test_a_module_that_takes_a_float_gets_a_hook() -> None:
    def script(capture: Capture) -> Calls:
        trainer = Trainer()
        step = capture(trainer.by_others, state=[trainer.warm, trainer.optimizer])
        for i in range(40):
            if i == 12:
                hook = trainer.warm.register_forward_pre_hook(lambda _, args: (args[0], math.sqrt(args[1])))
            if i == 28:
                hook.remove()
                trainer.warm.forward = lambda x, t: trainer.layer(x) * math.cos(t)  # type: ignore[method-assign]
            yield step(torch.randn(4, 8), annealed(i))
        return trainer.layer, trainer.optimizer

    check_right(script, replays=6)


@pytest.mark.ranks(2)
def test_on_two_ranks() -> None:
    def script(capture: Capture) -> Calls:
        sizes = Sizes()
        model = llama(sizes, mesh(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def train(tokens: Tensor, labels: Tensor, weight: float) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens), labels) * weight
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = capture(train, state=[model, optimizer])
        for i, (tokens, labels) in enumerate(token_batches(sizes, 20)):
            yield step(tokens, labels, annealed(i))
        return model, optimizer

    check_right(script, replays=14)
