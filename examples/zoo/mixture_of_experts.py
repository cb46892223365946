"""Train a mixture of experts with expert parallel, first eager, then with its dense parts replayed by Rote.

    torchrun --standalone --nproc-per-node 2 examples/zoo/mixture_of_experts.py

Each rank has a text of its own and some of the experts of each block. A router
chooses two experts for each token, and an all-to-all sends the tokens to the
ranks of their experts. How many go where is known only on the host, from the
router's choice: this part stays live. The experts get their tokens padded to a
multiple of `--bucket`, so that few shapes occur. Attention with its norms is a
region, and so are the experts of a rank: one variant for each padded shape.

Everything Rote needs is in `main`: the calls of `rote.capture_module`.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd as all_to_all

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Built, Step, batches, leave, parser, train_twice
from llama_model import Attention, LlamaConfig

ACTIVE = 2  # experts of a token


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--experts", type=int, default=4, help="experts of a block, on all ranks")
    options.add_argument("--bucket", type=int, default=128, help="experts get a multiple of so many tokens")
    return options.parse_args()


class Dense(nn.Module):
    """What a block does before its experts. The norm of what they get is outside: of results that are computed of each
    other, a region has one."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.attention_norm(x))


class Experts(nn.Module):
    """The experts of one rank: SwiGLU of (expert, token, width)."""

    def __init__(self, config: LlamaConfig, count: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(count, config.width, config.feed_forward) * config.width**-0.5)
        self.w3 = nn.Parameter(torch.randn(count, config.width, config.feed_forward) * config.width**-0.5)
        self.w2 = nn.Parameter(torch.randn(count, config.feed_forward, config.width) * config.feed_forward**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(x @ self.w1) * (x @ self.w3) @ self.w2


class Block(nn.Module):
    """Attention, and for each token the weighted sum of its experts."""

    def __init__(self, config: LlamaConfig, experts: int, bucket: int) -> None:
        super().__init__()
        self.dense = Dense(config)
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.router = nn.Linear(config.width, experts, bias=False)
        self.count = experts // dist.get_world_size()
        self.bucket = bucket
        with torch.random.fork_rng():
            torch.manual_seed(1 + dist.get_rank())  # ranks have other experts, and the same dense parts
            self.experts = Experts(config, self.count)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        # From here to the experts all is live: Rote refuses counts that the host reads, and shapes that follow them.
        tokens = self.norm(x).flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(ACTIVE)
        order = chosen.flatten().argsort(stable=True)  # the choices of this rank, expert by expert
        sent = chosen.flatten().bincount(minlength=self.router.out_features)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        outgoing, incoming = (each.view(-1, self.count).sum(1).tolist() for each in (sent, received))

        rows = all_to_all(tokens[order // ACTIVE], incoming, outgoing, dist.group.WORLD)
        rows = self.compute(rows, received.view(-1, self.count))
        back = all_to_all(rows, outgoing, incoming, dist.group.WORLD)

        weighted = back * weights.flatten()[order, None]
        return x + torch.zeros_like(tokens).index_add(0, order // ACTIVE, weighted).view_as(x)

    def compute(self, rows: Tensor, counts: Tensor) -> Tensor:
        """What the experts of this rank make of `rows`; `counts` has how many are for each (rank, expert)."""
        capacity = self.bucket * max(1, -(-int(counts.sum(0).max()) // self.bucket))
        expert = torch.arange(self.count).repeat(len(counts)).repeat_interleave(counts.flatten())
        before = F.one_hot(expert, self.count).cumsum(0).gather(1, expert[:, None])[:, 0] - 1
        place = expert * capacity + before
        padded = rows.new_zeros(self.count * capacity, rows.shape[1]).index_copy(0, place, rows)
        return self.experts(padded.view(self.count, capacity, -1)).flatten(0, 1)[place]


class Model(nn.Module):
    """(batch, sequence) token ids to (batch, sequence, vocab) logits."""

    def __init__(self, config: LlamaConfig, experts: int, bucket: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab, config.width)
        self.blocks = nn.ModuleList(Block(config, experts, bucket) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.output = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def build(config: LlamaConfig, experts: int, bucket: int) -> Built:
    """A model, its optimizer and its training step; equal at every call."""
    torch.manual_seed(0)
    model = Model(config, experts, bucket)
    opt = torch.optim.AdamW(model.parameters())
    shared = [parameter for name, parameter in model.named_parameters() if ".experts." not in name]

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten()) / dist.get_world_size()
        loss.backward()
        for parameter in shared:  # an expert's gradient has the tokens of all ranks already
            dist.all_reduce(parameter.grad)
        opt.step()
        opt.zero_grad()
        loss = loss.detach()
        dist.all_reduce(loss)
        return loss

    return model, opt, train_step


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    config = LlamaConfig(max_sequence=arguments.sequence)
    data = batches(arguments.steps, arguments.batch, arguments.sequence, seed=dist.get_rank())

    def capture(model: Model, opt: torch.optim.Optimizer, step: Step) -> Any:
        import rote

        parts = [part for block in model.blocks for part in (block.dense, block.experts)]
        return [rote.capture_module(part, plans=arguments.plans) for part in parts]

    return train_twice(arguments, data, partial(build, config, arguments.experts, arguments.bucket), capture)


if __name__ == "__main__":
    leave(main())
