"""The tables of docs/optimizers.md: each optimizer of torch.optim with its defaults, and each learning rate scheduler.

``ROTE_BLESS=1`` writes the page anew. Every row is also a comparison with eager.
"""

import os
import re
import warnings
from pathlib import Path
from typing import Any

import torch
from oracle import IS_TESTED, ORACLE_ONLY, TESTED, Capture, Script, check_right, rote_capture
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

PAGE = Path(__file__).parents[2] / "docs" / "optimizers.md"
CALLS = 26
ENOUGH = 20

HEAD = """# Optimizers and schedulers

A step of `zero_grad`, forward, backward and `step()`, on one rank. The tables are made by
`tests/torch/test_optimizer_table.py`, which compares every call with eager, bit for bit. *Replays* means: at least
{enough} of {calls} calls were replayed.

[Hyperparameters](guards.md#hyperparameters), [step counters](guards.md#step-counters) and [learning rate
schedulers](guards.md#learning-rate-schedulers) say how.
"""

# What a scheduler needs beside the optimizer.
ARGUMENTS: dict[str, dict[str, Any]] = {
    "LambdaLR": {"lr_lambda": lambda epoch: 0.97**epoch},
    "MultiplicativeLR": {"lr_lambda": lambda epoch: 0.97},
    "StepLR": {"step_size": 3},
    "MultiStepLR": {"milestones": [5, 12]},
    "ExponentialLR": {"gamma": 0.97},
    "CosineAnnealingLR": {"T_max": 50},
    "CosineAnnealingWarmRestarts": {"T_0": 7},
    "CyclicLR": {"base_lr": 1e-4, "max_lr": 1e-2, "step_size_up": 5},
    "OneCycleLR": {"max_lr": 1e-2, "total_steps": 100},
}


def subclasses(module: Any, base: type) -> list[type]:
    found = {value for value in vars(module).values() if isinstance(value, type) and issubclass(value, base)}
    return sorted(
        (each for each in found - {base} if not each.__name__.startswith("_")), key=lambda each: each.__name__
    )


def made(name: str, optimizer: torch.optim.Optimizer) -> Any:
    parts = [lr_scheduler.LinearLR(optimizer, total_iters=6), lr_scheduler.ExponentialLR(optimizer, 0.98)]
    if name == "SequentialLR":
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[6])
    if name == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler(parts, optimizer)
    return getattr(lr_scheduler, name)(optimizer, **ARGUMENTS.get(name, {}))


def of_optimizer(kind: Any) -> Script:
    def script(capture: Capture) -> Any:
        sparse = kind.__name__ == "SparseAdam"
        table = nn.Embedding(6, 5, sparse=sparse)
        linear = nn.Linear(5, 3, bias=kind.__name__ != "Muon")
        model = table if sparse else nn.Sequential(linear, nn.Tanh(), nn.Linear(3, 2, bias=False))
        optimizer = kind(model.parameters())

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        def step_by_closure(x: torch.Tensor) -> torch.Tensor:
            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(x)
                loss.backward()
                return loss

            loss: torch.Tensor = optimizer.step(closure)
            return loss.detach()

        function = step_by_closure if kind.__name__ == "LBFGS" else step
        captured = capture(function, state={"model": model, "optimizer": optimizer}, tail=False)
        for _ in range(CALLS):
            yield captured(torch.randint(0, 6, (4,)) if sparse else torch.randn(4, 5))
        if sparse:  # the comparison does not know sparse gradients
            optimizer.zero_grad()
        return model, optimizer

    return script


def of_scheduler(name: str, inside: bool) -> Script:
    def script(capture: Capture) -> Any:
        model = nn.Linear(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        scheduler = made(name, optimizer)

        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x[:, :3])
            loss.backward()
            optimizer.step()
            if inside:
                scheduler.step(*[loss.detach()] * (name == "ReduceLROnPlateau"))
            return loss.detach()

        captured = capture(step, state={"model": model, "optimizer": optimizer}, tail=False)
        for _ in range(CALLS):
            loss = captured(torch.randn(4, 5))
            if not inside:
                scheduler.step(*[loss] * (name == "ReduceLROnPlateau"))
            yield loss, [group["lr"] for group in optimizer.param_groups]
        return model, optimizer

    return script


def outcome(script: Script) -> str:
    """What becomes of a script: replayed, or why not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_right(script, rote_capture)
    stats = found.steps[0].stats
    if stats.replays >= ENOUGH:
        return "replays"
    reasons = [str(each) for each in stats.refusals] or ["not replayed"]
    return "stays eager: " + re.sub(r" at [^ ]*\.py:\d+| at <[^ ]*>|\(.*?\) ", "", reasons[0]).split(": ")[0].replace(
        "|", "\\|"
    )


def page() -> str:
    optimizers = subclasses(torch.optim, torch.optim.Optimizer)
    schedulers = [each.__name__ for each in subclasses(lr_scheduler, lr_scheduler.LRScheduler)]
    lines = [HEAD.format(enough=ENOUGH, calls=CALLS), "| optimizer, with its defaults | |", "|---|---|"]
    lines += [f"| `{kind.__name__}` | {outcome(of_optimizer(kind))} |" for kind in optimizers]
    lines += [
        "",
        "| scheduler | `scheduler.step()` after the captured step | `scheduler.step()` inside |",
        "|---|---|---|",
    ]
    for name in schedulers:
        lines.append(f"| `{name}` | {outcome(of_scheduler(name, False))} | {outcome(of_scheduler(name, True))} |")
    return "\n".join(lines) + "\n"


def test_the_page_says_what_holds() -> None:
    if ORACLE_ONLY or not IS_TESTED:
        import pytest

        pytest.skip(f"the page is about torch {TESTED}, and about Rote")
    found = page()
    if os.environ.get("ROTE_BLESS") == "1":
        PAGE.write_text(found)
    assert PAGE.read_text() == found, (
        "ROTE_BLESS=1 pytest tests/torch/test_optimizer_table.py renews docs/optimizers.md"
    )
