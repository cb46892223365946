"""Over optimizers: with their defaults on a CPU, they update one parameter after the other and read a step counter."""

import dataclasses
from collections.abc import Callable, Iterator

import torch
from steps.llama import llama
from steps.subject import Subject, fused_adamw
from steps.sweep import Sweep
from torch import nn

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "AdamW, fused": fused_adamw,
    "AdamW, its defaults": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "AdamW, foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
    "NAdam, its defaults": lambda model: torch.optim.NAdam(model.parameters()),
    "SGD, momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
}


def subjects() -> Iterator[Subject]:
    for label, optimizer in OPTIMIZERS.items():
        yield dataclasses.replace(llama(label), by_hand=None, optimizer=optimizer)


SWEEP = Sweep(
    "optimizers", "Step time over optimizers, the headline step", "optimizer", subjects, quick=(0, 1, 2), ordered=False
)
