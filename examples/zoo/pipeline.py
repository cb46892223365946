"""Train a small Llama in pipeline stages, first eager, then replayed by Rote.

    torchrun --standalone --nproc-per-node 2 examples/zoo/pipeline.py
    torchrun --standalone --nproc-per-node 2 examples/zoo/pipeline.py --schedule zero-bubble
    torchrun --standalone --nproc-per-node 2 examples/zoo/pipeline.py --whole
    torchrun --standalone --nproc-per-node 4 examples/zoo/pipeline.py --tp 2

Each rank has one stage, or two of the schedules `interleaved` and `zero-bubble`.
All stages have as many blocks; the first one has the embedding too, the last
one the output. With `--tp 2`, pairs of ranks share each stage (tensor plus
sequence parallel). `torch.distributed.pipelining` sends the micro-batches.

Each block is a region. The schedule, its sends and receives, the loss and the
optimizer stay live. Several forwards wait for their backwards, as many as the
schedule has under way.

With `--whole`, the step is captured as a whole: each rank replays its part of
the schedule, sends and receives included. The step must not keep the outputs of
the last stage (`return_outputs=False`).

Everything Rote needs is in `main`: the calls of `rote.capture_module`, or the
one of `rote.capture`.
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)

sys.path.append(str(Path(__file__).parents[1]))
from comparison import Built, Step, batches, leave, parser, train_twice
from llama_model import Llama, LlamaConfig, parallelize

SCHEDULES: dict[str, Any] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
OF_TWO_STAGES: dict[str, Any] = {"interleaved": ScheduleInterleaved1F1B, "zero-bubble": ScheduleInterleavedZeroBubble}


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument(
        "--schedule", choices=[*SCHEDULES, *OF_TWO_STAGES], default="1f1b", help="the order of the micro-batches"
    )
    options.add_argument("--micro-batches", type=int, default=4, help="parts of a batch")
    options.add_argument("--tp", type=int, default=1, help="ranks that share each stage")
    options.add_argument("--whole", action="store_true", help="capture the whole step, not the blocks")
    return options.parse_args()


class Stage(nn.Module):
    """Some blocks of a Llama, with what stands before or behind them."""

    def __init__(self, llama: Llama, place: int, stages: int) -> None:
        super().__init__()
        count = len(llama.blocks) // stages
        self.embedding = llama.embedding if place == 0 else nn.Identity()
        self.blocks = llama.blocks[place * count : (place + 1) * count]
        self.head = nn.Sequential(llama.norm, llama.output) if place == stages - 1 else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def build(config: LlamaConfig, mesh: DeviceMesh, schedule: str, micro_batches: int) -> Built:
    """The stages of this rank, their optimizer and the step that trains all stages; equal at every call."""
    torch.manual_seed(0)
    llama = Llama(config)
    if mesh["tp"].size() > 1:
        parallelize(llama, mesh["tp"])
    group = mesh.get_group("pp")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    count = 2 * ranks if schedule in OF_TWO_STAGES else ranks
    places = range(rank, count, ranks)
    stages = nn.ModuleList(Stage(llama, place, count) for place in places)
    opt = torch.optim.AdamW(stages.parameters())
    parts = [
        PipelineStage(stage, place, count, torch.device("cpu"), group=group)
        for stage, place in zip(stages, places, strict=True)
    ]
    if schedule in OF_TWO_STAGES:
        pipeline = OF_TWO_STAGES[schedule](parts, micro_batches, loss_fn=loss_of)
    else:
        pipeline = SCHEDULES[schedule](*parts, micro_batches, loss_fn=loss_of)

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

    return stages, opt, train_step


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // arguments.tp, arguments.tp), mesh_dim_names=("pp", "tp"))
    config = LlamaConfig(max_sequence=arguments.sequence)
    # Stages expect micro-batches of one size: without the last batch, which is shorter.
    data = batches(arguments.steps + 1, arguments.batch, arguments.sequence)[:-1]

    def capture(stages: nn.ModuleList, opt: torch.optim.Optimizer, step: Step) -> Any:
        import rote

        if arguments.whole:
            return rote.capture(step, state={"stages": stages, "opt": opt}, plans=arguments.plans)
        blocks = [block for stage in stages for block in stage.blocks]
        return [rote.capture_module(block, plans=arguments.plans) for block in blocks]

    return train_twice(
        arguments, data, partial(build, config, mesh, arguments.schedule, arguments.micro_batches), capture
    )


if __name__ == "__main__":
    leave(main())
