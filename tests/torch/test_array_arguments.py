"""NumPy arrays among the arguments of a step that are others at every call, and all that a step may do with one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import Calls, Capture, Script, check_right, eager
from torch import nn

CALLS = 16
#: What a step makes of a table `t`, arrays of indices `i` and `j` and of labels `y`, where every use is followed.
FOLLOWED = [
    "t[i]",
    "t[i, 0, None] * t[i]",
    "t[i, :4].repeat(1, 2)",
    "t[..., j].repeat(1, 2)[:4]",
    "t[i, j].view(4, 1) * t[:4]",
    "t[None, i][0]",
    "t.double().float()[i]",
    "t[i] + t[i] * t[j]",
    "t[i] * torch.tensor(y).float()[:, None]",
    "t[i] * torch.tensor(y, dtype=torch.float64).float()[:, None]",
    "t[i] * torch.as_tensor(y, dtype=torch.float32)[:, None]",
    "t[torch.tensor(i)]",
    "(t * 2)[i]",
    "made(t)[i]",
    "t[i] * i.shape[0] * y.ndim",
    "t[i] if i.dtype == np.int64 else t[j]",
    "t[i] if flag else t[j]",
    "held.table[i]",
]
#: What is not followed, or looks at the values: on others every call must be right all the same.
GUARDED = [
    "t[i] + sum([torch.tensor(y).sum() for _ in range(2)])",
    "put(t.clone(), i, 0.5)[i]",
    "t[:4] * float(n[i].sum())",
    "t[:4] if n[i].sum() > 20 else t[4:8]",
    "t[:4] if i[0] > 7 else t[4:8]",
    "t[:4] if i.sum() > 20 else t[4:8]",
    "t[i[::2]].repeat(2, 1)",
    "t[i + 0]",
    "t[list(i)]",
    "t[i.tolist()]",
    "t[[*i]]",
    "t[torch.from_numpy(i)]",
    "t[i] * torch.as_tensor(y)[:, None]",
    "t[i] * torch.from_numpy(y)[:, None]",
    "t[i] * torch.as_tensor(y).mul_(2)[:, None]",
    "t[i] * torch.Tensor(y)[:, None]",
    "t[i] * float(y.mean())",
    "t[i] * y.tolist()[0]",
    "t[i] * float(np.float64(y[0]))",
    "t[i] * len(str(y))",
    "sum([b[i].sum() if b is t else float(b[i].sum()) for b in (t, n)]) * t[:4]",
    "t[:4] * float(either(0)[i].sum())",
    "odd[i] * t[:4]",
    "odd_of(t, i)[:4] * t[:4]",
    "t[i] * (1.0 if i is j else 2.0)",
    "t[i] * (1.0 if 3 in i else 2.0)",
    "t[i] * int(repr(i) > '')",
    "(lambda: t[i])()",
    "t[([0, 1, 2, 3], i % 8)][:, None] * t[:4]",
    "t[[0, 1, 2, 3], j][:, None] * t[:4]",
    "t[i, [0, 1, 2, 3]][:, None] * t[:4]",
    "t[locals()['i']]",
    "t[eval('i')]",
    "t[(k := i)] * float(k[0])",
    "t.numpy()[i].sum() * t[:4]",
    "t[i] * float(t.tolist()[int(i[0])][0])",
]
PREFIX = """
import numpy as np
import torch

def made(t):
    return t * 2

def put(t, i, value):
    t[i] = value
    t[i] += 1
    return t

class Odd:
    def __getitem__(self, i):
        return float(i.sum()) if isinstance(i, np.ndarray) else 1.0

class Held:
    pass

odd, held = Odd(), Held()
tables = [np.arange(16.0)]

def either(n):
    return tables[n]

def odd_of(t, i):
    return t[i] * float(i[0])
"""
#: Kinds of arrays, of given whole numbers below 8.
KINDS: dict[str, Callable[[Any], Any]] = {
    "int64": lambda a: a.astype(np.int64),
    "int32": lambda a: a.astype(np.int32),
    "int16": lambda a: a.astype(np.int16),
    "uint8": lambda a: a.astype(np.uint8),
    "uint16": lambda a: a.astype(np.uint16),
    "bool": lambda a: a > 3,
    "float32": lambda a: a.astype(np.float32),
    "sliced": lambda a: np.repeat(a, 2)[::2],
    "reversed": lambda a: a[::-1],
    "read only": lambda a: np.frombuffer(a.astype(np.int64).tobytes(), np.int64),
    "big endian": lambda a: a.astype(">i8"),
    "objects": lambda a: a.astype(object),
    "empty": lambda a: a[:0],
    "one": lambda a: a[:1],
    "square": lambda a: a.reshape(2, 2),
    "transposed": lambda a: a.reshape(2, 2).T,
    "scalar": lambda a: np.array(a[0]),
    "number": lambda a: a[0],
    "matrix": lambda a: a.reshape(2, 2).view(np.matrix),
    "masked": lambda a: np.ma.masked_array(a, a > 3),
    "long": lambda a: np.tile(a, 16),
}


def use_of(expression: str, directory: Path, name: str = "use") -> Any:
    file = directory / f"{name}.py"
    file.write_text(
        f"{PREFIX}\n"
        f"def use(layer, t, i, j, y, n, flag):\n"
        f"    z = {expression}\n"
        f"    layer.zero_grad()\n"
        f"    loss = layer(z.float()).square().mean()\n"
        f"    loss.backward()\n"
        f"    return loss.detach(), z\n"
    )
    names: dict[str, Any] = {"__name__": name, "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), names)
    return names["use"]


def script_of(use: Any, of: Callable[[Any], Any] = KINDS["int64"]) -> Script:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        numbers = np.random.default_rng(0)
        layer = nn.Linear(8, 8)
        use.__globals__["held"].table = torch.randn(16, 8)
        step = capture(use, state=layer)
        table = torch.randn(16, 8)
        for _ in range(CALLS):
            i, j = (of(numbers.integers(0, 8, 4)) for _ in range(2))
            y = numbers.random(4)
            try:
                yield step(layer, table, i, j, y, np.arange(16.0), True), layer.weight.grad, y.tolist()
            except Exception as error:
                yield f"{type(error).__name__}: {error}"
        return layer

    return script


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expression", FOLLOWED)
def test_followed(expression: str, tmp_path: Path) -> None:
    check_right(script_of(use_of(expression, tmp_path)), replays=CALLS - 4)


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("expression", GUARDED)
def test_guarded(expression: str, tmp_path: Path) -> None:
    script = script_of(use_of(expression, tmp_path))
    assert not isinstance(next(script(eager)), str), "eager cannot run it"
    check_right(script)


def by_two_names(t: torch.Tensor, i: Any, j: Any) -> torch.Tensor:
    return t[i] - 2 * t[j]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("same", [lambda call: call < 8, lambda call: call % 5 == 0, lambda call: call > 7])
def test_one_array_by_two_names(same: Callable[[int], bool]) -> None:
    def script(capture: Capture) -> Calls:
        step, numbers = capture(by_two_names), np.random.default_rng(0)
        for call in range(24):
            i = numbers.integers(0, 8, 4)
            yield step(torch.randn(10, 8), i, i if same(call) else numbers.integers(0, 8, 4))

    check_right(script, replays=12)


def goes_into_a_gradient(t: torch.Tensor, i: Any, y: Any) -> list[Any]:
    w, table = torch.tensor(y, requires_grad=True), t.requires_grad_()
    (table[i, 0] * w * w).sum().backward()
    return [w.grad, table.grad]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"verify": 4}, {"verify_every": 3}, {"passes": "all"}, {"plans": True}])
def test_settings(options: dict[str, Any], tmp_path: Path) -> None:
    def script(capture: Capture) -> Calls:
        step, numbers = capture(goes_into_a_gradient, **options), np.random.default_rng(0)
        for call in range(20):
            try:
                yield step(torch.randn(10, 8), numbers.integers(-3, 8, 4) + 4 * (call == 15), numbers.random(4))
            except IndexError as error:
                yield str(error)

    if "plans" in options:
        options = {"plans": str(tmp_path)}
        check_right(script, replays=10)
    check_right(script, replays=10)


def moves_on(t: torch.Tensor, i: Any) -> torch.Tensor:
    """The array lies in the memory of an argument that is written."""
    first = t[i]
    i_as_tensor.add_(1).remainder_(8)
    return first + t[i]


i_as_tensor = torch.arange(4)


@pytest.mark.filterwarnings("ignore")
def test_in_the_memory_of_a_tensor() -> None:
    def script(capture: Capture) -> Calls:
        i_as_tensor.copy_(torch.arange(4))
        step = capture(moves_on, state=[i_as_tensor])
        for call in range(CALLS):
            yield step(torch.arange(80.0).view(10, 8) + call, i_as_tensor.numpy())

    check_right(script)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("expression", ["t[i].sum() * t[:2]", "t[:, i].sum() * t[:2]", "t[:4] * torch.tensor(i).sum()"])
def test_kinds(expression: str, kind: str, tmp_path: Path) -> None:
    check_right(script_of(use_of(expression, tmp_path), KINDS[kind]))
