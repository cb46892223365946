"""Llamas: tensor plus sequence parallel, with every activation a DTensor, and by hand for one rank.

The model is that of `examples/llama_model.py`; `SMALL` is the size of the
headline figures. In the script as people write it, what happens between the
sharded layers (rotary embedding, attention, activation) runs on local tensors.
Where every activation is a DTensor, attention is written out, because DTensor
has no strategy for PyTorch's fused attention on CPU.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from .subject import RANKS, Batch, Step, Subject, forward_and_loss, fused_adamw, mesh, training_step

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from llama_model import Attention, Llama, LlamaConfig, parallelize, rotate

BATCH, SEQUENCE = 2, 32
SMALL = LlamaConfig(vocab=256, layers=4, width=64, heads=8, kv_heads=8, feed_forward=128, max_sequence=SEQUENCE)


def config(width: int = 64, layers: int = 4, sequence: int = SEQUENCE) -> LlamaConfig:
    return replace(SMALL, width=width, layers=layers, feed_forward=2 * width, max_sequence=sequence)


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def token_batch(sizes: LlamaConfig, batch: int, device: str = "cpu") -> Batch:
    """Tokens of the first rank's part of the vocabulary: the fake group adds no other rank's rows, and
    through norms of zeros the gradients of deep models overflow."""
    generator = torch.Generator().manual_seed(1)
    shape = (batch, sizes.max_sequence)
    tokens = torch.randint(sizes.vocab // RANKS, shape, generator=generator)
    labels = torch.randint(sizes.vocab, shape, generator=generator)
    return tokens.to(device), labels.to(device)


def sharded_model(sizes: LlamaConfig, device: str) -> Llama:
    torch.manual_seed(0)
    with torch.device(device):
        return parallelize(Llama(sizes), mesh(RANKS, device=device))


def llama(label: str, sizes: LlamaConfig = SMALL, batch: int = BATCH, device: str = "cpu") -> Subject:
    """Tensor plus sequence parallel over all ranks."""
    return Subject(
        label,
        model=partial(sharded_model, sizes, device),
        loss=cross_entropy,
        batch=partial(token_batch, sizes, batch, device),
        by_hand=partial(by_hand, sizes, device),
    )


# Wrapped by PyTorch.


def plain_model(sizes: LlamaConfig) -> Llama:
    torch.manual_seed(0)
    return Llama(sizes)


@cache
def alone() -> dist.ProcessGroup:
    """The group of this rank."""
    return dist.new_group([dist.get_rank()], backend="gloo")


def data_parallel(
    label: str,
    sizes: LlamaConfig = SMALL,
    batch: int = BATCH,
    group: Callable[[], dist.ProcessGroup | None] = alone,
    **options: Any,
) -> Subject:
    """DistributedDataParallel with these options, by default on a gloo group of one rank: the fake group's answers are
    none that DDP takes. `group`: None is the default group."""
    return Subject(
        label,
        model=lambda: DistributedDataParallel(plain_model(sizes), process_group=group(), **options),
        loss=cross_entropy,
        batch=partial(token_batch, sizes, batch),
    )


def fully_sharded(label: str, tp: int = 1, sizes: LlamaConfig = SMALL, batch: int = BATCH, **options: Any) -> Subject:
    """FSDP2 with these options, over what tensor plus sequence parallel over `tp` ranks leaves of the ranks."""

    def model() -> Llama:
        llama, on = plain_model(sizes), mesh(RANKS // tp, tp)
        if tp > 1:
            parallelize(llama, on["tp"])
        for part in (*llama.blocks, llama):
            fully_shard(part, mesh=on["dp"], **options)
        return llama

    return Subject(
        label,
        model=model,
        loss=lambda logits, labels: cross_entropy(logits.float(), labels),
        batch=partial(token_batch, sizes, batch),
    )


# Every activation a DTensor.


class WrittenOutAttention(Attention):
    """`Attention` in ops that DTensor has strategies for, on whatever mesh."""

    mask: Tensor

    def __init__(self, sizes: LlamaConfig) -> None:
        super().__init__(sizes)
        length = sizes.max_sequence
        self.register_buffer("mask", torch.full((length, length), -math.inf).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = (w(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        cos, sin = self.cos[:sequence], self.sin[:sequence]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.head_dim) + self.mask
        return self.wo((scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, sequence, -1))


class WrittenOutNorm(nn.RMSNorm):
    """`nn.RMSNorm` for activations sharded by width, which DTensor's own decomposition cannot reduce."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def written_out(sizes: LlamaConfig) -> Llama:
    torch.manual_seed(0)
    model = Llama(sizes)
    model.norm = WrittenOutNorm(sizes.width, eps=1e-5)
    for block in model.blocks:
        block.attention = WrittenOutAttention(sizes)
        block.attention_norm = WrittenOutNorm(sizes.width, eps=1e-5)
        block.feed_forward_norm = WrittenOutNorm(sizes.width, eps=1e-5)
    return model


ROWWISE = ("embedding.weight", "wo.weight", "w2.weight")


def tensor_parallel(name: str, parameter: Tensor) -> Placement:
    """How a parameter lies on the tensor parallel mesh dim."""
    if parameter.dim() == 1:
        return Replicate()
    return Shard(1) if name.endswith(ROWWISE) else Shard(0)


def distributed_model(sizes: LlamaConfig, on: DeviceMesh) -> Llama:
    """Every parameter and buffer a DTensor: replicated over all mesh dims but the last."""
    model = written_out(sizes)
    replicated = [Replicate()] * (on.ndim - 1)
    for name, parameter in list(model.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        placements = [*replicated, tensor_parallel(name, parameter)]
        sharded = nn.Parameter(distribute_tensor(parameter.detach(), on, placements))
        model.get_submodule(owner).register_parameter(leaf, sharded)
    for name, buffer in list(model.named_buffers()):
        owner, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(owner), leaf, distribute_tensor(buffer, on, [*replicated, Replicate()]))
    return model


def distributed_batch(sizes: LlamaConfig, batch: int, on: DeviceMesh) -> Batch:
    """Sharded by batch over all mesh dims but the last."""
    placements: list[Placement] = [*([Shard(0)] * (on.ndim - 1)), Replicate()]
    tokens, labels = (distribute_tensor(x, on, placements) for x in token_batch(sizes, batch))
    return tokens, labels


def full_dtensor(label: str, *shape: int, sizes: LlamaConfig = SMALL, batch: int = BATCH) -> Subject:
    """No local sections; parameters sharded over the last dim of a mesh, the batch over the others."""

    def loss(logits: Any, labels: Tensor) -> Tensor:
        return cross_entropy(logits, labels)

    return Subject(
        label,
        model=lambda: distributed_model(sizes, mesh(*shape)),
        loss=loss,
        batch=lambda: distributed_batch(sizes, batch, mesh(*shape)),
    )


# By hand.


def gather_sequence(x: Tensor) -> Tensor:
    """(batch, sequence / ranks, width) of every rank to (batch, sequence, width)."""
    batch, part, width = x.shape
    out = x.new_empty(RANKS * batch, part, width)
    dist.all_gather_into_tensor(out, x.contiguous())
    return out.view(RANKS, batch, part, width).transpose(0, 1).reshape(batch, RANKS * part, width)


def reduce_scatter_sequence(x: Tensor) -> Tensor:
    """The sum over ranks of (batch, sequence, width), this rank's part of the sequence."""
    batch, sequence, width = x.shape
    part = sequence // RANKS
    parts = x.view(batch, RANKS, part, width).transpose(0, 1).contiguous()
    out = x.new_empty(batch, part, width)
    dist.reduce_scatter_tensor(out, parts.view(RANKS * batch, part, width))
    return out


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather_sequence(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return reduce_scatter_sequence(grad)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return reduce_scatter_sequence(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gather_sequence(grad)


class GatherVocabulary(torch.autograd.Function):
    """Logits of this rank's part of the vocabulary to all logits, known to every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        batch, sequence, part = x.shape
        out = x.new_empty(RANKS * batch, sequence, part)
        dist.all_gather_into_tensor(out, x)
        return out.view(RANKS, batch, sequence, part).permute(1, 2, 0, 3).reshape(batch, sequence, RANKS * part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(RANKS, dim=-1)[dist.get_rank()]


def by_hand(sizes: LlamaConfig, device: str) -> Step:
    """The step of `llama`, written by hand for one rank: local shards in plain modules, the same
    collectives called on the process group directly."""
    with torch.device(device):
        model = Llama(sizes)
    shards = dict(sharded_model(sizes, device).named_parameters())
    for name, shard in shards.items():
        owner, _, leaf = name.rpartition(".")
        local = nn.Parameter(shard.to_local().detach().clone())
        setattr(model.get_submodule(owner), leaf, local)
    vocab_part = sizes.vocab // RANKS
    vocab_start = dist.get_rank() * vocab_part
    gather, scatter = Gather.apply, Scatter.apply
    replicated = [p for name, p in model.named_parameters() if "norm" in name]

    def embed(tokens: Tensor) -> Tensor:
        local = tokens - vocab_start
        elsewhere = (local < 0) | (local >= vocab_part)
        rows = model.embedding(local.masked_fill(elsewhere, 0))
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def logits(tokens: Tensor) -> Tensor:
        x = scatter(embed(tokens))
        for block in model.blocks:
            x = x + scatter(block.attention(gather(block.attention_norm(x))))
            x = x + scatter(block.feed_forward(gather(block.feed_forward_norm(x))))
        return GatherVocabulary.apply(model.output(gather(model.norm(x))))

    def reduce_replicated() -> None:
        for parameter in replicated:  # each rank saw its part of the sequence
            dist.all_reduce(parameter.grad)

    return training_step(forward_and_loss(logits, cross_entropy), fused_adamw(model), reduce_replicated)
