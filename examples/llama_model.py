"""A small Llama-style language model and its tensor + sequence parallel plan.

The blocks are Llama's: RMSNorm, rotary position embedding, grouped-query
attention, SwiGLU feed-forward. `parallelize` shards it the way PyTorch's tensor
parallel tutorial does: weights by column and by row, activations by sequence
between the blocks. Shared by `train_llama.py`, `train_fsdp.py` and `benches/overhead.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of the model; `kv_heads` must be divisible by the number of ranks."""

    vocab: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 8
    kv_heads: int = 4
    feed_forward: int = 352
    max_sequence: int = 128
    tied: bool = False


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (RoFormer, arXiv:2104.09864) of (batch, heads, seq, dim)."""
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention; on a rank it sees that rank's heads only."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.queries_per_kv = config.heads // config.kv_heads
        kv_width = config.kv_heads * self.head_dim
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, kv_width, bias=False)
        self.wv = nn.Linear(config.width, kv_width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)
        frequency = 10_000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
        angle = torch.outer(torch.arange(config.max_sequence), frequency).repeat(1, 2)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        # -1: as many heads as this rank's shard of the weights has.
        q, k, v = (w(x).view(batch, sequence, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        cos, sin = self.cos[:sequence], self.sin[:sequence]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if self.queries_per_kv > 1:
            k = k.repeat_interleave(self.queries_per_kv, dim=1)
            v = v.repeat_interleave(self.queries_per_kv, dim=1)
        out = self.attend(q, k, v)
        return self.wo(out.transpose(1, 2).reshape(batch, sequence, -1))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class FeedForward(nn.Module):
    """SwiGLU: w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.width, config.feed_forward, bias=False)
        self.w2 = nn.Linear(config.feed_forward, config.width, bias=False)
        self.w3 = nn.Linear(config.width, config.feed_forward, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.feed_forward = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """(batch, sequence) token ids to (batch, sequence, vocab) logits."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocab, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        if config.tied:
            self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def parallelize(model: Llama, mesh: DeviceMesh) -> Llama:
    """Shards `model` over a one-dimensional mesh: tensor plus sequence parallel."""
    sequence, whole = Shard(1), Replicate()
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=sequence, output_layouts=whole),
        },
    )
    for block in model.blocks:
        gather = PrepareModuleInput(input_layouts=(sequence,), desired_input_layouts=(whole,))
        parallelize_module(
            block,
            mesh,
            {
                "attention_norm": SequenceParallel(),
                "attention": gather,
                "attention.wq": ColwiseParallel(),
                "attention.wk": ColwiseParallel(),
                "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(output_layouts=sequence),
                "feed_forward_norm": SequenceParallel(),
                "feed_forward": gather,
                "feed_forward.w1": ColwiseParallel(),
                "feed_forward.w2": RowwiseParallel(output_layouts=sequence),
                "feed_forward.w3": ColwiseParallel(),
            },
        )
    if model.config.tied:
        # Both are sharded by vocabulary; parallelize_module made two of them.
        model.output.weight = model.embedding.weight
    return model
