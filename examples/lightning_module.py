"""A LightningModule with manual optimization, with one line for Rote: it captures the forward and backward passes.

    python examples/lightning_module.py --steps 40

Lightning counts steps where its optimizer steps, so that stays outside. With automatic optimization, `training_step`
returns a loss with its graph, and a replay has no graph: Rote cannot capture it.
"""

import argparse
import logging
import warnings
from collections.abc import Callable
from typing import Any

import lightning
import torch
from torch import nn
from torch.nn import functional as F


class Classifier(lightning.LightningModule):
    def __init__(self, capture: Callable[..., Any]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 4))
        self.losses: list[torch.Tensor] = []
        self.gradients = capture(self.gradients, state=self.net)

    def gradients(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(self.net(inputs), labels)
        self.manual_backward(loss)
        return loss.detach()

    def training_step(self, batch: Any, index: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.gradients(*batch)
        self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer.step()
        self.lr_schedulers().step()
        self.losses.append(loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.9)]


def train(steps: int, capture: Callable[..., Any]) -> Classifier:
    """Trains; `capture` is `rote.capture`."""
    torch.manual_seed(0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    data = torch.utils.data.TensorDataset(torch.randn(16 * steps, 16), torch.randint(0, 4, (16 * steps,)))
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        strategy="auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    model = Classifier(capture)
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=16))
    return model


def main() -> None:
    import rote

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    model = train(parser.parse_args().steps, rote.capture)
    print(f"loss {model.losses[0]:.4f} to {model.losses[-1]:.4f}")
    print(f"{model.gradients.stats.calls} steps: {model.gradients.stats.replays} replayed")


if __name__ == "__main__":
    main()
