"""Networks other than language models: column and row parallel layers, and convolutions over a sharded batch; and
both by hand for one rank, in local tensors with the same collectives called on the process group directly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from .subject import RANKS, Batch, Step, Subject, forward_and_loss, fused_adamw, mesh, training_step


class Pair(nn.Module):
    """Up by column, down by row, added to what came in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def column_then_row(layers: int, width: int) -> nn.Sequential:
    torch.manual_seed(0)
    network = nn.Sequential(*(Pair(width) for _ in range(layers)))
    for pair in network:
        parallelize_module(pair, mesh(RANKS), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return network


def mlp(label: str, layers: int = 8, width: int = 64, batch: int = 32) -> Subject:
    def data() -> Batch:
        generator = torch.Generator().manual_seed(1)
        return torch.randn(batch, width, generator=generator), torch.randn(batch, width, generator=generator)

    return Subject(
        label,
        model=lambda: column_then_row(layers, width),
        loss=F.mse_loss,
        batch=data,
        by_hand=lambda: mlp_by_hand(layers, width),
    )


class SumGradient(torch.autograd.Function):
    """What goes to the columns of every rank: the gradient is the sum of what comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class Sum(torch.autograd.Function):
    """The sum of what the rows of every rank make."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class LocalPair(nn.Module):
    """`Pair` with the shards of one rank."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        sharded = (pair.up.weight, pair.up.bias, pair.down.weight, pair.down.bias)
        local = [nn.Parameter(p.to_local().detach().clone()) for p in sharded]  # type: ignore[operator]
        self.up, self.up_bias, self.down, self.down_bias = local

    def forward(self, x: Tensor) -> Tensor:
        inner = F.gelu(F.linear(SumGradient.apply(x), self.up, self.up_bias))
        return x + Sum.apply(F.linear(inner, self.down, self.down_bias / RANKS))


def mlp_by_hand(layers: int, width: int) -> Step:
    model = nn.Sequential(*(LocalPair(pair) for pair in column_then_row(layers, width)))
    return training_step(forward_and_loss(model, F.mse_loss), fused_adamw(model))


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


def initial_network() -> ConvNet:
    torch.manual_seed(0)
    return ConvNet()


def convolution(label: str, batch: int = 16) -> Subject:
    """Parameters replicated, images sharded by batch: every activation a DTensor."""

    def data() -> Batch:
        generator = torch.Generator().manual_seed(1)
        images = torch.randn(batch, 3, 16, 16, generator=generator)
        classes = torch.randint(10, (batch,), generator=generator)
        return distribute_tensor(images, mesh(RANKS), [Shard(0)]), distribute_tensor(classes, mesh(RANKS), [Shard(0)])

    def loss(logits: Tensor, classes: Tensor) -> Tensor:
        value = F.cross_entropy(logits, classes)
        return value.redistribute(placements=[Replicate()])  # type: ignore[attr-defined]

    return Subject(
        label,
        model=lambda: distribute_module(initial_network(), mesh(RANKS)),
        loss=loss,
        batch=data,
        by_hand=convolution_by_hand,
    )


def convolution_by_hand() -> Step:
    model = initial_network()

    def forward(images: Tensor, classes: Tensor) -> Tensor:
        logits = model(images.to_local())  # type: ignore[attr-defined]
        return F.cross_entropy(logits, classes.to_local())  # type: ignore[attr-defined]

    def average_gradients() -> None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG)

    train = training_step(forward, fused_adamw(model), average_gradients)

    def step(images: Tensor, classes: Tensor) -> Tensor:
        loss = train(images, classes)
        dist.all_reduce(loss, dist.ReduceOp.AVG)
        return loss

    return step
