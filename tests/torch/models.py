"""Small models, and the ways to shard them that training scripts use."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement
from torch.utils.checkpoint import checkpoint


@functools.cache
def mesh(*shape: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Meshes are made once per process: each makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names or ("dp", "tp")[-len(shape) :])


@dataclasses.dataclass(frozen=True)
class Sizes:
    vocabulary: int = 64
    hidden: int = 32
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    feed_forward: int = 48
    sequence: int = 16
    batch: int = 2
    dropout: float = 0.0
    checkpoint: bool = False
    tied: bool = False
    complex_rope: bool = False
    fused_attention: bool = True


class RMSNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(hidden))

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return (x.float() * scale).type_as(x) * self.weight


def rope_table(sizes: Sizes) -> Tensor:
    """Angles as (sequence, head_dim / 2) complex, or cos and sin stacked in front."""
    rates = 10000 ** (-torch.arange(0, sizes.head_dim, 2).float() / sizes.head_dim)
    angles = torch.outer(torch.arange(2 * sizes.sequence).float(), rates)
    if sizes.complex_rope:
        return torch.polar(torch.ones_like(angles), angles)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotary embedding of x: (batch, sequence, heads, head_dim)."""
    if table.is_complex():
        pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
        turned = pairs * table[: x.shape[1]].unsqueeze(1)
        return torch.view_as_real(turned).flatten(3).type_as(x)
    cos, sin = (part[: x.shape[1]].unsqueeze(1) for part in table.unbind())
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.wq = nn.Linear(sizes.hidden, sizes.heads * sizes.head_dim, bias=False)
        self.wk = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.wv = nn.Linear(sizes.hidden, sizes.kv_heads * sizes.head_dim, bias=False)
        self.wo = nn.Linear(sizes.heads * sizes.head_dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        split = (batch, sequence, -1, self.sizes.head_dim)
        q = rotate(self.wq(x).view(split), table).transpose(1, 2)
        k = rotate(self.wk(x).view(split), table).transpose(1, 2)
        v = self.wv(x).view(split).transpose(1, 2)
        groups = self.sizes.heads // self.sizes.kv_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        dropout = self.sizes.dropout if self.training else 0.0
        if self.sizes.fused_attention:
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) * self.sizes.head_dim**-0.5
            mixed = F.dropout(scores.softmax(-1), dropout) @ v
        return self.wo(mixed.transpose(1, 2).reshape(batch, sequence, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.w2 = nn.Linear(sizes.feed_forward, sizes.hidden, bias=False)
        self.w3 = nn.Linear(sizes.hidden, sizes.feed_forward, bias=False)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.dropout(F.silu(self.w1(x)) * self.w3(x)))


class Block(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(sizes.hidden)
        self.attention = Attention(sizes)
        self.ffn_norm = RMSNorm(sizes.hidden)
        self.feed_forward = FeedForward(sizes)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor, table: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), table))
        return x + self.dropout(self.feed_forward(self.ffn_norm(x)))


class Llama(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.hidden)
        self.output = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        self.register_buffer("table", rope_table(sizes), persistent=False)
        if sizes.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            if self.sizes.checkpoint:
                x = checkpoint(layer, x, self.table, use_reentrant=False)
            else:
                x = layer(x, self.table)
        return self.output(self.norm(x))


def llama(
    sizes: Sizes,
    on: DeviceMesh,
    *,
    local_activations: bool = True,
    logits: Placement | None = None,
) -> Llama:
    """Tensor and sequence parallel, as torchtitan does it, on a one-dim mesh.

    `local_activations=False` keeps every activation a DTensor. `logits` other
    than None leaves them a DTensor so placed, as `loss_parallel` wants.
    """
    model = Llama(sizes)
    local = {"use_local_output": local_activations}
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **local)
    parallelize_module(
        model,
        on,
        {
            "embedding": embedding,
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1),
                output_layouts=logits or Replicate(),
                use_local_output=local_activations and logits is None,
            ),
        },
    )
    for layer in model.layers:
        table = None if local_activations else Replicate()
        parallelize_module(
            layer,
            on,
            {
                "attention_norm": SequenceParallel(),
                "attention": PrepareModuleInput(
                    input_layouts=(Shard(1), table),
                    desired_input_layouts=(Replicate(), table),
                ),
                "attention.wq": ColwiseParallel(**local),
                "attention.wk": ColwiseParallel(**local),
                "attention.wv": ColwiseParallel(**local),
                "attention.wo": RowwiseParallel(output_layouts=Shard(1), **local),
                "ffn_norm": SequenceParallel(),
                "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
                "feed_forward.w1": ColwiseParallel(**local),
                "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1), **local),
                "feed_forward.w3": ColwiseParallel(**local),
            },
        )
    if sizes.tied:
        model.output.weight = model.embedding.weight
    return model


ROWWISE = ("embedding.weight", "wo.weight", "w2.weight", "down.weight")


def sharded_over_last(model: nn.Module, on: DeviceMesh) -> nn.Module:
    """Every parameter and buffer a DTensor on a mesh of any number of dims: matrices are sharded over the last one, and
    all is replicated over the others. Activations follow from them."""

    def shard(name: str, module: nn.Module, on: DeviceMesh) -> None:
        for key, parameter in module.named_parameters(recurse=False):
            if parameter.dim() != 2:
                last: Placement = Replicate()
            else:
                last = Shard(1) if f"{name}.{key}".endswith(ROWWISE) else Shard(0)
            placed = distribute_tensor(parameter, on, [*[Replicate()] * (on.ndim - 1), last])
            module.register_parameter(key, nn.Parameter(placed))

    return distribute_module(model, on, shard)


def llama_over_last(sizes: Sizes, on: DeviceMesh) -> Llama:
    """As `sharded_over_last` places it."""
    model = sharded_over_last(Llama(sizes), on)
    model.table = as_dtensor(model.table, on, *[Replicate()] * on.ndim)
    if sizes.tied:
        model.output.weight = model.embedding.weight
    return model


class Mlp(nn.Module):
    """Column then row parallel: the smallest model with a collective each way."""

    def __init__(self, width: int = 8, inner: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def mlp(on: DeviceMesh, width: int = 8, inner: int = 16) -> Mlp:
    return column_then_row(Mlp(width, inner), on)


def column_then_row(model: Mlp, on: DeviceMesh) -> Mlp:
    parallelize_module(model, on, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class ConvNet(nn.Module):
    """Images (batch, 3, 8, 8) to ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.head(F.relu(self.second(x)).flatten(1))


def training(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    none: bool = True,
    parts: int = 1,
    within: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
    clip: bool = False,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[Tensor], Tensor]:
    """The plainest step that trains. ``none``: gradients are None at its begin; ``parts``: of a batch, each with a
    backward pass of its own ``within(last)``; ``clip``: by a norm of 0.1; ``forward``: in place of the model itself."""

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=none)
        for part in range(parts):
            with within(part == parts - 1):
                loss = (forward or model)(x if parts == 1 else x[part::parts]).square().mean()
                loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        return loss.detach()

    return train_step


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Trains once: the loss, and what the model has given, whose graph is used up."""
    optimizer.zero_grad()
    given = model(x)
    loss = given.square().mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), given


def replicated(model: nn.Module, on: DeviceMesh) -> nn.Module:
    return distribute_module(model, on)


def token_batches(
    sizes: Sizes,
    steps: int,
    on: DeviceMesh | None = None,
    placements: list[Placement] | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels, the same on every rank; as DTensors when `on` is given."""
    random = torch.Generator().manual_seed(11)
    for _ in range(steps):
        text = torch.randint(sizes.vocabulary, (sizes.batch, sizes.sequence + 1), generator=random)
        pair = text[:, :-1].contiguous(), text[:, 1:].contiguous()
        if on is None:
            yield pair
        else:
            yield tuple(distribute_tensor(part, on, placements) for part in pair)


def inputs(steps: int, *shape: int, seed: int = 5) -> Iterator[Tensor]:
    random = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randn(*shape, generator=random)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(0, 1))


def as_dtensor(tensor: Tensor, on: DeviceMesh, *placements: Placement) -> DTensor:
    return distribute_tensor(tensor, on, list(placements))
