"""Train a small Llama on two processes, first eager, then replayed by Rote.

    torchrun --standalone --nproc-per-node 2 examples/train_llama.py

The model is sharded with DTensor (tensor plus sequence parallel), or with
`--parallel data` wrapped in DistributedDataParallel. It learns to predict the
characters of Python's own standard library. The same batches are trained on
twice from the same seed: once as they are, once through `rote.capture`. The
last batch is shorter, so a guard misses there and that step falls back to
ordinary PyTorch. The script ends with a table and exits with status 1 unless
every loss and every parameter of both runs is equal bit for bit.

Everything Rote needs is in `main`: the one call of `rote.capture`.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from comparison import Built, Step, batches, leave, parser, train_twice
from llama_model import Llama, LlamaConfig, parallelize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.parallel import DistributedDataParallel


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--parallel", choices=["tensor", "data"], default="tensor", help="what the ranks share")
    options.add_argument("--tied", action="store_true", help="one weight embeds and predicts")
    return options.parse_args()


def build(config: LlamaConfig, mesh: DeviceMesh, parallel: str) -> Built:
    """A model, its optimizer and its training step; equal at every call."""
    torch.manual_seed(0)
    llama = Llama(config)
    model = parallelize(llama, mesh) if parallel == "tensor" else DistributedDataParallel(llama)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return model, opt, train_step


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = LlamaConfig(max_sequence=arguments.sequence, tied=arguments.tied)
    seed = dist.get_rank() if arguments.parallel == "data" else 0  # each rank has sequences of its own
    data = batches(arguments.steps, arguments.batch, arguments.sequence, seed)

    def capture(model: nn.Module, opt: torch.optim.Optimizer, step: Step) -> Any:
        import rote

        return rote.capture(step, state={"model": model, "opt": opt}, plans=arguments.plans)

    return train_twice(arguments, data, partial(build, config, mesh, arguments.parallel), capture)


if __name__ == "__main__":
    leave(main())
