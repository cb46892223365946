"""A training step to measure, and the ways to run it. Each way builds its own model from the same seed."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

RANKS = int(os.environ.get("WORLD_SIZE", "8"))
"""Of the fake process group, or the processes that a bench has started."""

Step = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]

EAGER = "eager DTensor"
BY_HAND = "local eager, by hand"
AOT_EAGER = "torch.compile aot_eager"
INDUCTOR = "torch.compile inductor"
BLOCKS = "torch.compile, blocks"
REGIONS = "rote, by regions"
NO_PASSES = "rote, no passes"
ROTE = "rote"
WAYS = (EAGER, BY_HAND, AOT_EAGER, INDUCTOR, BLOCKS, REGIONS, NO_PASSES, ROTE)
"""In the order of the tables."""


@cache
def mesh(*shape: int, device: str = "cpu") -> DeviceMesh:
    """Meshes are made once: each makes process groups."""
    return init_device_mesh(device, shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


@dataclass(frozen=True)
class Subject:
    """One step: forward and loss, backward, an optimizer."""

    label: str
    model: Callable[[], nn.Module]
    """A fresh model, sharded, always of the same values."""
    loss: Callable[[Any, Tensor], Tensor]
    """Of the model's result and the second tensor of the batch."""
    batch: Callable[[], Batch]
    by_hand: Callable[[], Step] | None = None
    """The same step written for one rank, if somebody wrote it."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = fused_adamw


def training_step(forward: Step, opt: torch.optim.Optimizer, reduce: Callable[[], None] = lambda: None) -> Step:
    """`reduce`: what happens to gradients before the optimizer sees them."""

    def step(inputs: Tensor, labels: Tensor) -> Tensor:
        loss = forward(inputs, labels)
        loss.backward()
        reduce()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def forward_and_loss(model: Callable[[Tensor], Any], loss: Callable[[Any, Tensor], Tensor]) -> Step:
    def forward(inputs: Tensor, labels: Tensor) -> Tensor:
        return loss(model(inputs), labels)

    return forward


def eager(subject: Subject) -> Step:
    model = subject.model()
    return training_step(forward_and_loss(model, subject.loss), subject.optimizer(model))


def compiled(subject: Subject, backend: str) -> Step:
    """Forward and loss compiled, and with them the backward. PyTorch excludes the
    fused optimizer from compilation itself."""
    torch.compiler.reset()  # what other subjects compiled does not count as a recompilation
    model = subject.model()
    forward = torch.compile(forward_and_loss(model, subject.loss), backend=backend, dynamic=False)
    return training_step(forward, subject.optimizer(model))


def blocks_of(model: Any) -> list[nn.Module]:
    """The blocks of a model, in its wrapper."""
    return list(getattr(model, "module", model).blocks)


def by_compiled_blocks(subject: Subject) -> Step:
    """Each block compiled by itself, as torchtitan does it."""
    torch.compiler.reset()
    model = subject.model()
    for block in blocks_of(model):
        block.compile(backend="inductor", dynamic=False)
    return training_step(forward_and_loss(model, subject.loss), subject.optimizer(model))


def by_regions(subject: Subject, plans: str) -> Step:
    """Each block a region; the rest of the step stays eager."""
    import rote

    model = subject.model()
    for i, block in enumerate(blocks_of(model)):
        rote.capture_module(block, plans=f"{plans}/{i}")
    return training_step(forward_and_loss(model, subject.loss), subject.optimizer(model))


def captured(subject: Subject, plans: str, passes: str = "") -> Any:
    import rote

    model = subject.model()
    opt = subject.optimizer(model)
    step = training_step(forward_and_loss(model, subject.loss), opt)
    return rote.capture(step, state={"model": model, "opt": opt}, plans=plans, passes=passes)


def builders(subject: Subject, plans: str) -> dict[str, Callable[[], Step]]:
    """Each way to run the step. `plans`: a directory for what is recorded."""
    ways: dict[str, Callable[[], Step]] = {
        EAGER: partial(eager, subject),
        AOT_EAGER: partial(compiled, subject, "aot_eager"),
        INDUCTOR: partial(compiled, subject, "inductor"),
        BLOCKS: partial(by_compiled_blocks, subject),
        REGIONS: partial(by_regions, subject, f"{plans}/regions"),
        NO_PASSES: partial(captured, subject, f"{plans}/none", "none"),
        ROTE: partial(captured, subject, f"{plans}/default"),
    }
    if subject.by_hand is not None:
        ways[BY_HAND] = subject.by_hand
    return {way: ways[way] for way in WAYS if way in ways}
