"""A loop of Hugging Face's accelerate, with one line for Rote.

python examples/accelerate_loop.py --steps 40
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F


def train(steps: int, capture: Callable[..., Any]) -> tuple[Any, list[torch.Tensor]]:
    """Trains; `capture` is `rote.capture`. Comes back: the captured step and the losses."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    data = torch.utils.data.TensorDataset(torch.randn(16 * steps, 16), torch.randint(0, 4, (16 * steps,)))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

    def train_step(inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    step = capture(train_step, state=[model, optimizer])
    return step, [step(inputs, labels) for inputs, labels in loader]


def main() -> None:
    import rote

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    step, losses = train(parser.parse_args().steps, rote.capture)
    print(f"loss {losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"{step.stats.calls} steps: {step.stats.replays} replayed")


if __name__ == "__main__":
    main()
