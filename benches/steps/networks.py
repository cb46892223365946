"""Networks other than language models: column and row parallel layers, and convolutions over a sharded batch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .subject import RANKS, Batch, Subject, mesh


class Pair(nn.Module):
    """Up by column, down by row, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def mlp(label: str, layers: int = 8, width: int = 64, batch: int = 32) -> Subject:
    def model() -> nn.Module:
        torch.manual_seed(0)
        network = nn.Sequential(*(Pair(width) for _ in range(layers)))
        for pair in network:
            parallelize_module(pair, mesh(RANKS), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return network

    def data() -> Batch:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)

    return Subject(label, model, F.mse_loss, data)


class ConvNet(nn.Module):
    """Images (batch, 3, 16, 16) to ten classes: four convolutions, two of them strided."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(3, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2)]
        self.convolutions = nn.ModuleList(nn.Conv2d(i, o, 3, stride=s, padding=1) for i, o, s in sizes)
        self.head = nn.Linear(32 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        for convolution in self.convolutions:
            x = F.relu(convolution(x))
        return self.head(x.flatten(1))


def convolution(label: str, batch: int = 16) -> Subject:
    """Parameters replicated, images sharded by batch: every activation a DTensor."""

    def model() -> nn.Module:
        torch.manual_seed(0)
        return distribute_module(ConvNet(), mesh(RANKS))

    def data() -> Batch:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(batch, 3, 16, 16, generator=generator)
        classes = torch.randint(10, (batch,), generator=generator)
        return distribute_tensor(images, mesh(RANKS), [Shard(0)]), distribute_tensor(classes, mesh(RANKS), [Shard(0)])

    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        value = F.cross_entropy(logits, classes)
        return value.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]

    return Subject(label, model, loss, data)
