"""Random steps of trainers that keep, fill, read and return what they compute leave what eager leaves.

    ROTE_TEST_TRAINERS=2000 ROTE_TEST_SEED=5000 pytest tests/torch/test_random_trainers.py

checks others than the usual ones. Each step is text, written to a file, as code whose source is known. Its statements
set attributes of several objects, put things into lists and dicts there, read these again, and go into dicts that are
returned. Between calls, the script deletes, replaces and writes some of it.
"""

import importlib.util
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import EVERYTHING, SEED
from models import update
from oracle import ORACLE_ONLY, Capture, check_same, rote_capture, run, run_eager
from torch import Tensor, nn

PROGRAMS = int(os.environ.get("ROTE_TEST_TRAINERS", "2000" if EVERYTHING else "25"))
#: A test each.
AT_ONCE = 20
CALLS = 28
#: Fewer programs that replay at all, and they are no test.
LEAST_REPLAYED = 0.4


class Holder:
    def __init__(self) -> None:
        self.a: Any = None
        self.b: Any = 0.0
        self.list: list[Any] = []
        self.dict: dict[Any, Any] = {"first": 0}


class Trainer(Holder):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Holder()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.1), nn.Linear(5, 2))
        self.net.__dict__.update(vars(Holder()))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)

    def train(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loss, y = update(self.net, self.optimizer, x)
        return loss, y.detach()


def number(value: Any) -> Any:
    """What is read of a value, as a number or a tensor of one element."""
    if isinstance(value, Tensor):
        return value.detach().double().mean().float()
    if isinstance(value, list | dict):
        return len(value)
    return value if isinstance(value, int | float) else 0.25


HOLDERS = ["trainer", "trainer.inner", "trainer.net"]
VALUES = [
    "loss",
    "y",
    "y[0]",
    "x",
    "loss * 2",
    "loss.item()",
    "y.sum().item()",
    "7",
    "'text'",
    "None",
    "n",
    "x.shape[0]",
]
VALUES += ["[loss, n]", "{'loss': loss.item(), 'y': [y, (loss, 1)]}", "(loss, loss)", "y.argmax().item()", "rate"]


def statement(draw: random.Random) -> str:
    holder, value = draw.choice(HOLDERS), draw.choice(VALUES)
    name = draw.choice("ab")
    kinds = {
        f"{holder}.{name} = {value}": 8,
        f"{holder}.list.append({value})": 0.4,
        f"{holder}.dict[{draw.choice(['n', repr('k'), repr('first')])}] = {value}": 0.4,
        f"logs[{draw.choice(['n', repr('k'), repr('l')])}] = {value}": 4,
        f"loss = loss + number({holder}.{name})": 1,
        f"loss = loss + len({holder}.list)": 0.5,
        f"loss = loss * number({holder}.dict.get('k'))": 0.5,
        f"loss = loss + number(vars({holder})['{name}'])": 0.3,
        f"{holder}.{name} = trainer.inner.a": 0.5,
        f"del {holder}.{name}": 0.3,
        "loss = loss * 1.5": 1,
    }
    made = draw.choices(list(kinds), list(kinds.values()))[0]
    condition = draw.choice(["", "", "", "", "if n: ", "if flag: "])
    return condition + made


def program(seed: int) -> str:
    """The source of a step, and of what comes between two calls."""
    draw = random.Random(seed)
    lines = ["loss, y = trainer.train(x)", "logs = {}", "rate = trainer.optimizer.param_groups[0]['lr']"]
    lines += [statement(draw) for _ in range(draw.randint(2, 7))]
    lines.append(draw.choice(["return loss", "return loss, logs", "return logs", "return [loss.item(), logs], y"]))
    between = [f"trainer.optimizer.param_groups[0]['lr'] *= {draw.choice(['1', '0.97'])}"]
    for _ in range(draw.randint(0, 3)):
        holder, name = draw.choice(HOLDERS), draw.choice("ab")
        change = draw.choice(
            [
                f"{holder}.{name} = {draw.choice(['None', '3.5', 'torch.ones(2)', '[1]'])}",
                f"vars({holder}).pop('{name}', None)",
                f"{holder}.list = []",
                f"{holder}.dict.clear()",
                f"{holder}.list.append(i)",
                "trainer.net.train(i % 2 == 0)",
            ]
        )
        between.append(f"if i % {draw.randint(3, 9)} == 2: {change}")
    flags, numbers = draw.choice(["[0]", "[0, 0, 0, 1]", "[0] * 12 + [1] * 6"]), draw.choice(["[0]", "[0, 1]"])
    return "\n".join(
        [
            "import torch",
            "from test_random_trainers import number",
            f"FLAGS, NUMBERS = {flags}, {numbers}",
            "def made(trainer):",
            "    def step(x, n, flag):",
            *(f"        {line}" for line in lines),
            "    return step",
            "def between(trainer, i):",
            *(f"    {line}" for line in between),
        ]
    )


def seen(trainer: Trainer) -> list[Any]:
    holders: list[Any] = [trainer, trainer.inner, trainer.net]
    found = [[vars(each).get(name, "absent") for name in ("a", "b")] for each in holders]
    return [*found, *([each.list[-4:], list(each.dict), list(each.dict.values())] for each in holders)]


def script_of(module: Any, options: dict[str, Any]) -> Any:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        captured = capture(module.made(trainer), state=trainer, **options)
        for i in range(CALLS):
            flag, n = module.FLAGS[i % len(module.FLAGS)], module.NUMBERS[i % len(module.NUMBERS)]
            try:
                result = captured(torch.randn(3, 4), n, flag)
            except (AttributeError, KeyError, TypeError) as error:  # of eager too
                result = f"{type(error).__name__}: {error}"
            yield result, seen(trainer)
            module.between(trainer, i)
        return trainer.net, trainer.optimizer

    return script


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", range(0, PROGRAMS, AT_ONCE))
def test_programs(first: int, tmp_path: Path) -> None:
    replayed = 0
    seeds = range(SEED + first, SEED + min(first + AT_ONCE, PROGRAMS))
    for seed in seeds:
        path = tmp_path / f"program_{seed}.py"
        path.write_text(program(seed))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        options: dict[str, Any] = [{}, {"verify": 4}, {"verify_every": 3}, {"passes": "none"}][seed % 4]
        try:
            found = run(script_of(module, options), rote_capture)
            check_same(run_eager(script_of(module, {})), found)
        except Exception as error:
            error.add_note(path.read_text())
            raise
        replayed += ORACLE_ONLY or found.steps[0].stats.replays > 0
    assert replayed >= LEAST_REPLAYED * len(seeds), f"{replayed} of {len(seeds)} programs replayed"
