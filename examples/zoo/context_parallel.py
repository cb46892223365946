"""Train a small Llama with each sequence split over the ranks, first eager, then replayed by Rote.

    torchrun --standalone --nproc-per-node 2 examples/zoo/context_parallel.py
    torchrun --standalone --nproc-per-node 2 examples/zoo/context_parallel.py --attention ulysses

All but attention works on the tokens of one rank. There are two ways to attend
to the others:

- `ring`: keys and values go from rank to rank, once around. Each rank attends to
  one part of the sequence after the other, and weighs what it has by the sums of
  the exponentials. The gradients of keys and values go around the other way.
- `ulysses` (arXiv:2309.14509): an all-to-all gives each rank the whole sequence
  for some of the heads, and another one brings the results back.

The ranks share the parameters: `DistributedDataParallel` averages the gradients.
The step is captured as a whole, with its sends, receives and all-to-alls in both
directions.

Everything Rote needs is in `main`: the one call of `rote.capture`.
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
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Built, Step, batches, leave, parser, train_twice
from llama_model import Attention, Llama, LlamaConfig


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--attention", choices=ATTENTIONS, default="ring", help="how ranks attend to other tokens")
    return options.parse_args()


class Around(torch.autograd.Function):
    """Sends a tensor to the next rank, and its gradient back; gives what the rank before has sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return shift(x, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return shift(gradient, -1)


def shift(x: Tensor, by: int) -> Tensor:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x, received = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    ops = dist.P2POp(dist.isend, x, (rank + by) % ranks), dist.P2POp(dist.irecv, received, (rank - by) % ranks)
    for work in dist.batch_isend_irecv(list(ops)):
        work.wait()
    return received


class Ring(Attention):
    """Keys and values go around; (batch, heads, tokens of this rank, dim)."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rank, ranks, tokens = dist.get_rank(), dist.get_world_size(), q.shape[2]
        places = torch.arange(tokens)
        outs, sums = [], []
        both = torch.stack((k, v))
        for turn in range(ranks):
            k, v = both
            seen = places[:, None] + rank * tokens >= places + (rank - turn) % ranks * tokens
            # A finite number, so that no rank has a row of nothing: what it gives has no weight below.
            scores = (q @ k.mT * self.head_dim**-0.5).masked_fill(~seen, torch.finfo(q.dtype).min)
            sums.append(scores.logsumexp(-1, keepdim=True))
            outs.append(scores.softmax(-1) @ v)
            if turn + 1 < ranks:
                both = Around.apply(both)
        weights = torch.stack(sums).softmax(0)
        return (torch.stack(outs) * weights).sum(0)


class Exchange(torch.autograd.Function):
    """An all-to-all of equal parts along the first dim, in both directions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        dist.all_to_all_single(received, x)
        return received

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return Exchange.apply(gradient.contiguous())


class Ulysses(Attention):
    """Each rank has the whole sequence for some of the heads."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ranks = dist.get_world_size()
        parts = torch.stack((q, k, v)).unflatten(2, (ranks, -1))  # (3, batch, ranks, heads, tokens, dim)
        whole = Exchange.apply(parts.movedim(2, 0).contiguous()).movedim(0, 3).flatten(3, 4)
        out = F.scaled_dot_product_attention(*whole, is_causal=True)
        back = Exchange.apply(out.unflatten(2, (ranks, -1)).movedim(2, 0).contiguous())
        return back.movedim(0, 1).flatten(1, 2)


ATTENTIONS: dict[str, type[Attention]] = {"ring": Ring, "ulysses": Ulysses}


def build(config: LlamaConfig, attention: type[Attention]) -> Built:
    """A model, its optimizer and its training step; equal at every call."""
    torch.manual_seed(0)
    llama = Llama(config)
    rank, tokens = dist.get_rank(), config.max_sequence // dist.get_world_size()
    for block in llama.blocks:
        block.attention = attention(config)
        for angles in (block.attention.cos, block.attention.sin):  # of the tokens of this rank
            angles.copy_(angles.roll(-rank * tokens, 0))
    model = DistributedDataParallel(llama, broadcast_buffers=False)  # ranks have other angles
    opt = torch.optim.AdamW(model.parameters())

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        loss = loss.detach() / dist.get_world_size()
        dist.all_reduce(loss)
        return loss

    return model, opt, train_step


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    config, attention = LlamaConfig(max_sequence=arguments.sequence), ATTENTIONS[arguments.attention]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = batches(arguments.steps, arguments.batch, arguments.sequence)
    data = [(tokens.chunk(ranks, 1)[rank], labels.chunk(ranks, 1)[rank]) for tokens, labels in whole]

    def capture(model: nn.Module, opt: torch.optim.Optimizer, step: Step) -> Any:
        import rote

        return rote.capture(step, state={"model": model, "opt": opt}, plans=arguments.plans)

    return train_twice(arguments, data, partial(build, config, attention), capture)


if __name__ == "__main__":
    leave(main())
