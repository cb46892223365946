"""Train a small Llama with FSDP2 (`fully_shard`), first eager, then replayed by Rote.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py
    torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py --tp 2 --mixed
    torchrun --standalone --nproc-per-node 4 examples/train_fsdp.py --replicas 2

FSDP2 shards the parameters over all ranks. With `--tp 2`, pairs of ranks share
each layer (tensor plus sequence parallel), and FSDP2 shards the parameters over
the pairs: a 2-D mesh. With `--replicas 2`, FSDP2 shards the parameters over each
half of the ranks, and the halves reduce their gradients (HSDP). Gradients are
clipped by their norm, and AdamW has its defaults. The text, the two runs, the
shorter last batch, the table and the exit status are those of `train_llama.py`;
each data parallel rank has a text of its own.

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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def parse_arguments() -> argparse.Namespace:
    options = parser(__doc__)
    options.add_argument("--tp", type=int, default=1, help="ranks that share each layer; FSDP2 has what is left")
    options.add_argument("--replicas", type=int, default=1, help="groups of ranks; FSDP2 shards within each (HSDP)")
    options.add_argument("--mixed", action="store_true", help="compute in bfloat16, reduce in float32")
    return options.parse_args()


def mesh_of(replicas: int, tp: int) -> DeviceMesh:
    """Data parallel, behind replicas and over tensor parallel where there are some."""
    sizes = {"replicas": replicas, "dp": dist.get_world_size() // (replicas * tp), "tp": tp}
    sizes = {name: size for name, size in sizes.items() if name == "dp" or size > 1}
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def build(config: LlamaConfig, mesh: DeviceMesh, mixed: bool) -> Built:
    """A model, its optimizer and its training step; equal at every call."""
    torch.manual_seed(0)
    model = Llama(config)
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        parallelize(model, mesh["tp"])
    shards = mesh["replicas", "dp"] if "replicas" in names else mesh["dp"]
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    policy = half if mixed else MixedPrecisionPolicy()
    for part in (*model.blocks, model):
        fully_shard(part, mesh=shards, mp_policy=policy)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return model, opt, train_step


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    mesh = mesh_of(arguments.replicas, arguments.tp)
    config = LlamaConfig(max_sequence=arguments.sequence)
    data = batches(arguments.steps, arguments.batch, arguments.sequence, seed=dist.get_rank() // arguments.tp)

    def capture(model: nn.Module, opt: torch.optim.Optimizer, step: Step) -> Any:
        import rote

        return rote.capture(step, state={"model": model, "opt": opt}, plans=arguments.plans)

    return train_twice(arguments, data, partial(build, config, mesh, arguments.mixed), capture)


if __name__ == "__main__":
    leave(main())
