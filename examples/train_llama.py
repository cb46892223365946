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
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama_model import Llama, LlamaConfig, parallelize
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="target/demo/plans", help="plan store directory")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--sequence", type=int, default=32, help="characters in a sequence")
    parser.add_argument("--parallel", choices=["tensor", "data"], default="tensor", help="what the ranks share")
    parser.add_argument("--tied", action="store_true", help="one weight embeds and predicts")
    parser.add_argument("--eager-only", action="store_true", help="leave Rote out")
    return parser.parse_args()


def batches(steps: int, batch: int, sequence: int) -> list[Batch]:
    """Random passages of the standard library: characters, and those that follow them.

    The last batch has half the sequences of the others, as at the end of a data
    set whose size is not a multiple of the batch size.
    """
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray().join(source.read_bytes() for source in sources)
    characters = torch.frombuffer(text, dtype=torch.uint8).long()
    passages = (steps - 1) * batch + (batch + 1) // 2
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(len(characters) - sequence, (passages, 1), generator=generator)
    tokens = starts + torch.arange(sequence)
    inputs, labels = characters[tokens], characters[tokens + 1]
    return list(zip(inputs.split(batch), labels.split(batch), strict=True))


def build(config: LlamaConfig, mesh: DeviceMesh, parallel: str) -> tuple[nn.Module, torch.optim.Optimizer, Step]:
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


def train(name: str, step: Step, data: list[Batch]) -> tuple[list[Tensor], float]:
    """Runs `step` over `data`: its losses and the median milliseconds of a step."""
    losses, milliseconds = [], []
    for index, (tokens, labels) in enumerate(data, start=1):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(tokens, labels))
        milliseconds.append(1e3 * (time.perf_counter() - start))
        if dist.get_rank() == 0 and (index == 1 or index % 10 == 0 or index == len(data)):
            line = f"step {index:3}/{len(data)}  loss {losses[-1].item():.4f}"
            print(f"{name:>6}  {line}  {milliseconds[-1]:7.1f} ms", flush=True)
    return losses, statistics.median(milliseconds)


class LocalOps(TorchDispatchMode):
    """Counts what DTensor runs on plain tensors: kernels, views and collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor runs it, and its local ops come back here.
        self.count += 1
        return func(*args, **(kwargs or {}))


def local_ops(step: Step, batch: Batch) -> int:
    with LocalOps() as ops:
        step(*batch)
    return ops.count


def same_bits(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    """Whether two lists of tensors are equal bit for bit, on every rank."""
    local = [[t.to_local() if isinstance(t, DTensor) else t for t in ts] for ts in (ours, theirs)]
    equal = len(ours) == len(theirs) and all(map(torch.equal, *local))
    everywhere = torch.tensor(int(equal))
    dist.all_reduce(everywhere, dist.ReduceOp.MIN)
    return bool(everywhere)


def print_table(rows: list[tuple[str, str, str]]) -> None:
    print()
    for name, eager, replayed in rows:
        print(f"{name:<34}{eager:>14}{replayed:>14}")


def main() -> int:
    arguments = parse_arguments()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    config = LlamaConfig(max_sequence=arguments.sequence, tied=arguments.tied)
    data = batches(arguments.steps, arguments.batch, arguments.sequence)

    if arguments.parallel == "data":  # each rank has sequences of its own
        own = slice(dist.get_rank(), None, dist.get_world_size())
        data = [(tokens[own], labels[own]) for tokens, labels in data]

    model, opt, eager_step = build(config, mesh, arguments.parallel)
    losses, eager_ms = train("eager", eager_step, data)
    if arguments.eager_only:
        return 0

    import rote

    twin, opt, train_step = build(config, mesh, arguments.parallel)
    step = rote.capture(train_step, state={"model": twin, "opt": opt}, plans=arguments.plans)
    twin_losses, rote_ms = train("rote", step, data)

    equal_losses = same_bits(losses, twin_losses)
    equal_parameters = same_bits(list(model.parameters()), list(twin.parameters()))
    eager_ops, replayed = local_ops(eager_step, data[0]), step.plan_counts()
    if dist.get_rank() == 0:
        print_table(
            [
                ("", "eager", "rote"),
                ("loss, first step", f"{losses[0]:.4f}", f"{twin_losses[0]:.4f}"),
                ("loss, last step", f"{losses[-1]:.4f}", f"{twin_losses[-1]:.4f}"),
                ("milliseconds per step (median)", f"{eager_ms:.1f}", f"{rote_ms:.1f}"),
                ("ops per step", str(eager_ops), str(replayed["local"] + replayed["collectives"])),
                ("views per step, without a kernel", "", str(replayed["views"])),
                ("new recordings", "", str(step.stats.recordings)),
                ("replays", "", str(step.stats.replays)),
                ("fallbacks", "", str(step.stats.fallbacks)),
                ("losses equal bit for bit", "", "yes" if equal_losses else "NO"),
                ("parameters equal bit for bit", "", "yes" if equal_parameters else "NO"),
            ]
        )
    return 0 if equal_losses and equal_parameters else 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    dist.barrier()
    # An ordinary exit races with gloo's worker threads, which may still hold a
    # tensor, and aborts now and then (pytorch/pytorch#179291).
    os._exit(status)
