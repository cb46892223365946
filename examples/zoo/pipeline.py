"""Train a small Llama in pipeline stages, first eager, then replayed by Rote.

    torchrun --standalone --nproc-per-node 2 examples/zoo/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/zoo/pipeline.py --schedule gpipe
    torchrun --standalone --nproc-per-node 2 examples/zoo/pipeline.py --whole
    torchrun --standalone --nproc-per-node 4 examples/zoo/pipeline.py --tp 2

Each rank has one stage: as many blocks as the others, the first rank the
embedding too, the last one the output. `torch.distributed.pipelining` sends the
micro-batches. Each block is a region. The schedule, its sends and receives, the
loss and the optimizer stay live. Several forwards wait for their backwards, as
many as the schedule has under way. With `--tp 2`, pairs of ranks share each
stage (tensor plus sequence parallel).

With `--whole`, the step is captured as a whole: each rank replays its part of
the schedule, sends and receives included. The stages must then have made their
buffers, which they do in the first call, and must not keep the outputs
(`return_outputs=False`).

Everything Rote needs is in `main`: the calls of `rote.capture_module`, or the
one of `rote.capture`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Step, batches, compare, compare_regions, leave, parser, train
from llama_model import Llama, LlamaConfig, parallelize

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__, plans=False)
    options.add_argument("--schedule", choices=SCHEDULES, default="1f1b", help="the order of the micro-batches")
    options.add_argument("--micro-batches", type=int, default=4, help="parts of a batch")
    options.add_argument("--tp", type=int, default=1, help="ranks that share each stage")
    options.add_argument("--whole", action="store_true", help="capture the whole step, not the blocks")
    return options.parse_args()


class Stage(nn.Module):
    """The blocks of one rank, with what stands before or behind them."""

    def __init__(self, llama: Llama, rank: int, ranks: int) -> None:
        super().__init__()
        count = len(llama.blocks) // ranks
        self.embedding = llama.embedding if rank == 0 else nn.Identity()
        self.blocks = llama.blocks[rank * count : (rank + 1) * count]
        self.head = nn.Sequential(llama.norm, llama.output) if rank == ranks - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(
    config: LlamaConfig, mesh: DeviceMesh, schedule: str, micro_batches: int
) -> tuple[Stage, torch.optim.Optimizer, Step]:
    """A stage, its optimizer and the step that trains all stages; equal at every call."""
    torch.manual_seed(0)
    llama = Llama(config)
    if mesh["tp"].size() > 1:
        parallelize(llama, mesh["tp"])
    group = mesh.get_group("pp")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    stage = Stage(llama, rank, ranks)
    opt = torch.optim.AdamW(stage.parameters())
    part = PipelineStage(stage, rank, ranks, torch.device("cpu"), group=group)
    pipeline = SCHEDULES[schedule](part, micro_batches, loss_fn=loss_of)

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        losses: list[Tensor] = []
        if rank == ranks - 1:
            pipeline.step(target=labels, losses=losses, return_outputs=False)
            loss = torch.stack(losses).mean().detach()
        else:
            pipeline.step(*[tokens] if rank == 0 else [], return_outputs=False)
            loss = torch.zeros(())
        opt.step()
        opt.zero_grad()
        dist.broadcast(loss, group=group, group_src=ranks - 1)
        return loss

    return stage, opt, train_step


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // arguments.tp, arguments.tp), mesh_dim_names=("pp", "tp"))
    config = LlamaConfig(max_sequence=arguments.sequence)
    # Stages expect micro-batches of one size: without the last batch, which is shorter.
    data = batches(arguments.steps + 1, arguments.batch, arguments.sequence)[:-1]

    stage, _, train_step = build(config, mesh, arguments.schedule, arguments.micro_batches)
    eager = train("eager", stage, train_step, data)
    if arguments.eager_only:
        return 0

    import rote

    stage, opt, train_step = build(config, mesh, arguments.schedule, arguments.micro_batches)
    if arguments.whole:
        step = rote.capture(train_step, state={"stage": stage, "opt": opt})
        return compare(eager, train("rote", stage, step, data), data[0])
    regions = [rote.capture_module(block) for block in stage.blocks]
    return compare_regions(eager, train("rote", stage, train_step, data), regions)


if __name__ == "__main__":
    leave(main())
