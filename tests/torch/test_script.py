"""Scripts as they are, run by ``python -m rote``: they print and leave what they print and leave without it."""

import os
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import EVERYTHING
from oracle import ORACLE_ONLY
from rote._script import MOST_MADE, Captures

MODEL = """
import argparse
import torch
from torch import nn
torch.manual_seed(0)
parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30)
args = parser.parse_args()
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

def batches(number):
    for _ in range(number):
        x = torch.randn(6, 4)
        yield x, x.sum(1, keepdim=True)
"""
LEFT = """
print(__name__, __file__[-6:], *(parameter.sum().item() for parameter in model.parameters()))
"""
TEXT = """
running, best = 0.0, None
for epoch in range(3):
    for i, (x, y) in enumerate(batches(args.steps)):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
        if i % 10 == 9:
            print(epoch, i, f"{running / 10:.8f}")
            best = min(best or running, running)
            running = 0.0
print(best, loss.item(), x.sum().item())
"""
SEEN_BY_FUNCTIONS = """
exec("scale = 2.0")
steps, names = 0, [name for name in globals() if name == "scale"]

def log():
    global logged
    logged = loss.item(), steps

if __name__ == "__main__":
    for epoch in range(3):
        for x, y in batches(args.steps):
            loss = nn.functional.mse_loss(model(x), y) * scale
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            log()
        print(names, logged, steps)
"""
FUNCTION = """
from engine import train_one_epoch, evaluate

def main():
    for epoch in range(3):
        print(epoch, train_one_epoch(model, optimizer, batches(args.steps)), evaluate(model, batches(3)))

main()
"""
ENGINE = """
import torch

def train_one_epoch(model, optimizer, loader):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        loss = torch.nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total

@torch.no_grad()
def evaluate(model, loader):
    return sum((model(x) - y).abs().sum().item() for x, y in loader)
"""
STEP = """
class Trainer:
    def train_step(self, x, y):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

trainer = Trainer()
for x, y in batches(args.steps * 3):
    print(trainer.train_step(x, y).item())
"""
PRINTS = """
for i, (x, y) in enumerate(batches(args.steps * 3)):
    loss = nn.functional.mse_loss(model(x), y)
    if i % 10 == 5:
        print("forward", i)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if i % 10 == 9:
        print(i, loss.item(), {name for name, value in globals().items() if isinstance(value, int)})
"""
LOOKS_UP = """
for x, y in batches(args.steps):
    loss = nn.functional.mse_loss(model(x), y)
    if "least" not in dir():
        least = loss.detach()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    least = torch.minimum(least, loss.detach())
print(least.item())
"""
IMPORTS = """
import inner
from inner import loss, main
main(2, "3")
print(loss.item(), inner.x.sum().item(), main.__annotations__, main.__doc__)
print(__builtins__.__name__, __loader__.path[-8:])
"""
INNER = """
def main(turns: int, text: str = "") -> None:
    'Trains.'
    for x, y in batches(30 * turns):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

for x, y in batches(60):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CAPTURES = """
import rote

@rote.capture
def train_step(x, y):
    loss = nn.functional.mse_loss(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()

for x, y in batches(args.steps):
    print(train_step(x, y).item())
"""
ACCUMULATES = """
import contextlib
layers = [(nn.Linear(4, 4), nn.LayerNorm(4), nn.Tanh()) for i in range(4)]
model = nn.Sequential(*(each for layer in layers for each in layer), nn.Linear(4, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(200, 4)
exec("accumulation, ctx = 3, contextlib.nullcontext()")

def get_batch():
    at = torch.randint(len(data) - 6, (6,))
    x = torch.stack([data[i] for i in at])
    return x, x.sum(1, keepdim=True)

turn, norms = 0, []
X, Y = get_batch()
while True:
    for group in optimizer.param_groups:
        group["lr"] = 0.01 / (1 + turn / 100)
    for micro_step in range(accumulation):
        with ctx:
            loss = nn.functional.mse_loss(model(X), Y) / accumulation
        X, Y = get_batch()  # between the forward and the backward
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if turn % 10 == 0:
        print(turn, loss.item() * accumulation, norm.item())
    turn += 1
    if turn >= 3 * args.steps:
        break
"""
NESTED = """
def main():
    def train_step(x, y):
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()

    for epoch in range(3):
        for x, y in batches(args.steps):
            loss = train_step(x, y)
    print(loss.item())

main()
"""
SCRIPTS = {
    "nested": (NESTED, r"train.py: main.<locals>.train_step: (\d+) of 90"),
    "accumulates": (ACCUMULATES, r"(?s)region model: (\d+) of .*train.py: module \(line \d+\): (\d+) of 90"),
    "text": (TEXT, r"train.py: module \(line \d+\): (\d+) of 90"),
    "seen by functions": (SEEN_BY_FUNCTIONS, r"train.py: module \(line \d+\): (\d+) of 90"),
    "function": (FUNCTION, r"engine.py: train_one_epoch \(line 6\): (\d+) of 90"),
    "step": (STEP, r"train.py: Trainer.train_step: (\d+) of 90"),
    "prints": (PRINTS, r"train.py: module \(line \d+\): (\d+) of 90"),
    "looks up": (LOOKS_UP, "gets at variables otherwise than by their names"),
    "imports": (IMPORTS, r"inner.py: module \(line \d+\): (\d+) of 60"),
    "captures": (CAPTURES, "nothing: no loop"),
}


def ran(directory: Path, *how: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """What Python does in a directory. ``path``: where it finds more packages."""
    places = [str(path), os.environ.get("PYTHONPATH", "")] if path else []
    more = {"env": {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places))}} if path else {}
    return subprocess.run([sys.executable, *how], cwd=directory, capture_output=True, text=True, timeout=300, **more)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name: str, tmp_path: Path) -> None:
    source, told = SCRIPTS[name]
    (tmp_path / "train.py").write_text(MODEL + source + LEFT)
    (tmp_path / "engine.py").write_text(ENGINE)
    (tmp_path / "inner.py").write_text(MODEL + INNER)
    eager = ran(tmp_path, "train.py", "--steps", "30")
    found = ran(tmp_path, "-m", "rote", "--report", "report.txt", "train.py", "--steps", "30")
    assert (eager.returncode, found.returncode) == (0, 0), eager.stderr + found.stderr
    assert found.stdout == eager.stdout
    match = re.search(told, found.stderr)
    assert match, found.stderr
    for replayed in match.groups():
        assert int(replayed) > 45, found.stderr
        assert "guards" in (tmp_path / "report.txt").read_text()


def test_modules_by_name(tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("NUMBER = 20")
    whole = MODEL.replace("import argparse", "import argparse\nfrom .sizes import NUMBER") + TEXT
    (package / "train.py").write_text(whole + "print(NUMBER, __package__)")
    eager = ran(tmp_path, "-m", "package.train")
    found = ran(tmp_path, "-m", "rote", "--quiet", "-m", "package.train")
    assert (found.stdout, found.stderr, found.returncode) == (eager.stdout, "", 0), eager.stderr + found.stderr


TRAINER = """
from .loop import train_one_epoch
"""
FITS = """
import trainer

for epoch in range(3):
    print(trainer.train_one_epoch(model, optimizer, batches(args.steps)))
"""


def test_installed_packages(tmp_path: Path) -> None:
    """What trains in them is captured if they are named, and else they are named."""
    package = tmp_path / "site-packages" / "trainer"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(TRAINER)
    (package / "loop.py").write_text(ENGINE)
    (tmp_path / "train.py").write_text(MODEL + FITS + LEFT)
    eager = ran(tmp_path, "train.py", path=package.parent)
    without = ran(tmp_path, "-m", "rote", "train.py", path=package.parent)
    found = ran(tmp_path, "-m", "rote", "--package", "trainer.loop", "train.py", path=package.parent)
    other = ran(tmp_path, "-m", "rote", "--package", "train-ers", "train.py", path=package.parent)
    assert other.stdout == eager.stdout and "package train_ers: not imported by the script" in other.stderr
    assert eager.stdout == without.stdout == found.stdout and not eager.returncode, eager.stderr + found.stderr
    assert "nothing" in without.stderr and "packages that do: trainer (--package" in without.stderr
    match = re.search(r"trainer/loop.py: train_one_epoch \(line 6\): (\d+) of 90", found.stderr)
    assert match and int(match[1]) > 45, found.stderr


def test_steps_that_are_made_many_times(tmp_path: Path) -> None:
    many = """
for run in range(12):
    main()
"""
    (tmp_path / "train.py").write_text(MODEL + NESTED + many + LEFT)
    eager = ran(tmp_path, "train.py", "--steps", "4")
    found = ran(tmp_path, "-m", "rote", "train.py", "--steps", "4")
    assert eager.stdout == found.stdout and not eager.returncode, eager.stderr + found.stderr
    assert len(re.findall("main.<locals>.train_step", found.stderr)) == MOST_MADE


def test_how_scripts_end(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL + TEXT + "raise KeyError(args.steps)")
    found = ran(tmp_path, "-m", "rote", "train.py", "--steps", "4")
    assert found.returncode == 1 and "KeyError: 4" in found.stderr and 'train.py", line 30' in found.stderr
    (tmp_path / "train.py").write_text("import sys; sys.exit(7)")
    assert ran(tmp_path, "-m", "rote", "train.py").returncode == 7
    assert "No such file" in ran(tmp_path, "-m", "rote", "none.py").stderr
    assert "no module named none" in ran(tmp_path, "-m", "rote", "-m", "none").stderr
    assert "train.py --epochs 3" in ran(tmp_path, "-m", "rote", "--help").stdout


PARALLEL = """
import sys, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
sys.stdout = open(f"told by {dist.get_rank()}", "w")
model = DistributedDataParallel(model)
torch.manual_seed(dist.get_rank())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
"""


def test_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(MODEL + PARALLEL + TEXT + LEFT + "dist.destroy_process_group()\n")
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    for _ in range(3):  # PyTorch itself aborts at the end now and then ("terminate called")
        eager = ran(tmp_path, *run, "train.py")
        if eager.returncode == 0:
            break
    told = [(tmp_path / f"told by {rank}").read_text() for rank in (0, 1)]
    found = ran(tmp_path, *run, "-m", "rote", "train.py")
    assert (eager.returncode, found.returncode) == (0, 0), eager.stderr + found.stderr
    assert [(tmp_path / f"told by {rank}").read_text() for rank in (0, 1)] == told and all(told)
    rows = re.findall(r"train.py: module \(line \d+\): (\d+) of 90", found.stderr)
    assert len(rows) == 1 and int(rows[0]) > 40, found.stderr  # of the first rank


# -- texts of random modules ------------------------------------------------------------


HEAD = """
import torch
weight, held, seen = torch.ones(3), torch.zeros(3), []
total, last, n, kept, count = 0.0, None, 0, torch.zeros(3), 0

def looks():
    return [{looks}]

def adds():
    global count
    count += 1

class optimizer:
    @staticmethod
    def step():
        weight.add_(held.tanh(), alpha=0.01)
        held.zero_()
"""


def drawn(seed: int) -> str:
    """A random text: variables of its own, and others that functions see."""
    draw = random.Random(seed)
    names = ["x", "kept", "weight"]

    def tensor() -> str:
        return draw.choice(names)

    def number() -> str:
        return draw.choice([f"{tensor()}.sum().item()", "total", "n", "i", "len(seen)"])

    def op() -> list[str]:
        kind, name = draw.randrange(8), f"t{len(names)}"
        if kind < 2:
            made = f"{name} = {tensor()} * 1.5 + {tensor()}"
            names.append(name)
            return [made]
        return [
            [f"kept = (kept + {tensor()}) * 0.5"],
            ["weight.mul_(0.99)", f"last = {tensor()}.sum()"],
            [f"if i % {draw.randint(2, 4)} == 1:", f"    held.add_({tensor()})"],
            [f"x = x + {tensor()}"],
            [f"if i % {draw.randint(3, 5)} == 2:", "    n += 1", "    continue"],
            fills(),
        ][kind - 2]

    def fills() -> list[str]:
        fill = draw.choice(
            [f"losses.append({number()})", f"losses += [{number()}, {number()}]", f"marks += [{number()}]"]
        )
        in_block = ["with torch.no_grad():", f"    inner = {tensor()}.sum()", f"    {fill}", "    x = x * 1.0"]
        return in_block if draw.random() < 0.4 else [fill]

    def host() -> list[str]:
        return draw.choice(
            [
                [f"total += {number()}"],
                [f"seen.append({number()})", "del seen[:-4]"],
                ["n += 1"],
                ["adds()"],
                ["last = looks()[-1]"],
                ["if n % 4 == 3:", f"    seen.append(f'{{{number()}:.3f}}')"],
                [f"if i == {draw.randint(6, 20)}:", "    break"],
                ["hook = lambda: (n, total)", "seen.append(hook())", "del seen[:-3]"],
                ["n += len(losses)"],
                ["total += sum(marks)"],
                fills(),
            ]
        )

    body = [line for _ in range(draw.randint(2, 6)) for line in op()]
    if draw.random() < 0.2:
        body += [*host(), *op()]
    body += ["x.backward", *(line for _ in range(draw.randint(1, 5)) for line in host())]
    if draw.random() < 0.3:  # the loop that trains leaves the update to what stands behind it
        behind = [line for _ in range(draw.randint(0, 2)) for line in [*op(), *host()]]
        behind += ["optimizer.step()", *(line for _ in range(draw.randint(0, 3)) for line in host())]
        body = ["for micro in range(3):", *("    " + line for line in body), *behind]
    looks = draw.sample(
        ["total", "last", "n", "kept.clone()", "count", *["len(losses)"] * (seed % 2)], draw.randint(1, 3)
    )
    text = "for epoch in range(4):\n    losses, marks = [], []\n"
    text += "    for i, x in enumerate(torch.randn(3) for _ in range(12)):\n"
    text += textwrap.indent("\n".join(body), "        ")
    text += "\n    told.append((total, last, n, kept.clone(), count, [*seen], weight.clone(), held.clone(), i, x))\n"
    text += "    told.append(f'{losses} {marks}')\n"
    if draw.random() < 0.3:
        text = "with torch.no_grad():\n" + textwrap.indent(text, "    ")
    return HEAD.format(looks=", ".join(looks)) + text


def told_by(path: Path, captures: Captures | None) -> list[Any]:
    torch.manual_seed(3)
    names: dict[str, Any] = {"__name__": path.stem, "told": []}
    source = path.read_text()
    plain = compile(source, str(path), "exec", dont_inherit=True)
    code = plain if captures is None else captures.code(source, str(path), names)
    try:
        exec(code, names)
    except (RuntimeError, NameError, TypeError, AttributeError) as error:
        names["told"].append(type(error).__name__)
    return names["told"]  # type: ignore[no-any-return]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list | tuple) and type(one) is type(other):
        return len(one) == len(other) and all(map(is_same, one, other))
    return bool(type(one) is type(other) and one == other)


@pytest.mark.skipif(ORACLE_ONLY, reason="compares with eager itself")
@pytest.mark.sampled(24)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("part", range(24))
def test_random_texts(part: int, tmp_path: Path) -> None:
    many, replayed = 40 if EVERYTHING else 16, 0
    for seed in range(part * many, part * many + many):
        path = tmp_path / f"drawn_{seed}.py"
        path.write_text(drawn(seed))
        captures = Captures()
        eager, found = told_by(path, None), told_by(path, captures)
        assert is_same(eager, found), f"seed {seed}: {eager} and {found}\n{path.read_text()}"
        assert not captures.why, captures.why
        replayed += any(step.stats.replays for _, step in captures.found)
    assert replayed >= many // 8, replayed
