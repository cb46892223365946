"""What the Llamas and the scripts in `zoo/` share: a text to learn, timed training, a comparison of two runs."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

Step = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]


def parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plans", default="target/demo/plans", help="plan store directory")
    parser.add_argument("--steps", type=int, default=60, help="training steps of each run")
    parser.add_argument("--batch", type=int, default=4, help="sequences in a batch")
    parser.add_argument("--sequence", type=int, default=32, help="characters in a sequence")
    parser.add_argument("--eager-only", action="store_true", help="leave Rote out")
    return parser


def batches(steps: int, batch: int, sequence: int, seed: int = 0) -> list[Batch]:
    """Random passages of the standard library: characters, and those that follow them.

    The last batch has half the sequences of the others, as at the end of a data
    set whose size is not a multiple of the batch size.
    """
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    text = bytearray().join(source.read_bytes() for source in sources)
    characters = torch.frombuffer(text, dtype=torch.uint8).long()
    passages = (steps - 1) * batch + (batch + 1) // 2
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(characters) - sequence, (passages, 1), generator=generator)
    tokens = starts + torch.arange(sequence)
    inputs, labels = characters[tokens], characters[tokens + 1]
    return list(zip(inputs.split(batch), labels.split(batch), strict=True))


@dataclass
class Run:
    """A model after its training, with the step that has trained it."""

    model: nn.Module
    step: Any
    losses: list[Tensor]
    milliseconds: float
    """Of a step: the median."""


def train(name: str, model: nn.Module, step: Step, data: list[Batch]) -> Run:
    """Runs `step`, which trains `model`, over `data`."""
    losses, milliseconds = [], []
    for index, (tokens, labels) in enumerate(data, start=1):
        dist.barrier()
        start = time.perf_counter()
        losses.append(step(tokens, labels))
        milliseconds.append(1e3 * (time.perf_counter() - start))
        if dist.get_rank() == 0 and (index == 1 or index % 10 == 0 or index == len(data)):
            line = f"step {index:3}/{len(data)}  loss {losses[-1].item():.4f}"
            print(f"{name:>6}  {line}  {milliseconds[-1]:7.1f} ms", flush=True)
    return Run(model, step, losses, statistics.median(milliseconds))


Built = tuple[nn.Module, torch.optim.Optimizer, Step]
"""A model, its optimizer and the step that trains it."""


def train_twice(
    arguments: argparse.Namespace, data: list[Batch], build: Callable[[], Built], capture: Callable[..., Any]
) -> int:
    """Trains what `build` makes, equal at every call, over `data`: as it is, then with Rote. The exit status.

    `capture` takes what `build` makes and returns the captured step, or the regions that it has made of the model.
    """
    model, _, step = build()
    eager = train("eager", model, step, data)
    if arguments.eager_only:
        return 0
    model, opt, step = build()
    captured = capture(model, opt, step)
    if isinstance(captured, list):
        return compare_regions(eager, train("rote", model, step, data), captured)
    return compare(eager, train("rote", model, captured, data), data[0])


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


def compare(eager: Run, rote: Run, batch: Batch) -> int:
    """Prints both runs side by side: 0 if they are equal bit for bit, else 1.

    The eager step runs once more with `batch`, behind the comparison, to count its ops.
    """
    equal = same_training(eager, rote)
    eager_ops, replayed, stats = local_ops(eager.step, batch), rote.step.plan_counts(), rote.step.stats
    rows = [
        ("ops per step", str(eager_ops), str(replayed["local"] + replayed["collectives"])),
        ("views per step, without a kernel", "", str(replayed["views"])),
        ("new recordings", "", str(stats.recordings)),
        ("replays", "", str(stats.replays)),
        ("fallbacks", "", str(stats.fallbacks)),
    ]
    return show(eager, rote, rows, equal)


def compare_regions(eager: Run, rote: Run, regions: list[Any]) -> int:
    """The same for a step that is not captured as a whole; counts the `regions` of all ranks together."""
    parts = [(region.stats, region.stats.backward) for region in regions]
    counts = [(1, forward.calls, forward.replays, backward.replays) for forward, backward in parts]
    total = torch.tensor(counts).reshape(-1, 4).sum(0)
    dist.all_reduce(total)
    number, calls, forwards, backwards = total.tolist()
    rows = [
        ("regions, on all ranks", "", str(number)),
        ("forwards replayed", "", f"{forwards} of {calls}"),
        ("backwards replayed", "", str(backwards)),
    ]
    return show(eager, rote, rows, same_training(eager, rote))


def same_training(eager: Run, rote: Run) -> tuple[bool, bool]:
    """Whether the losses and the parameters of both runs are equal bit for bit."""
    parameters = list(eager.model.parameters()), list(rote.model.parameters())
    return same_bits(eager.losses, rote.losses), same_bits(*parameters)


def show(eager: Run, rote: Run, counts: list[tuple[str, str, str]], equal: tuple[bool, bool]) -> int:
    """Prints the table; `counts` are its rows between the times and what is `equal`."""
    rows = [
        ("", "eager", "rote"),
        ("loss, first step", f"{eager.losses[0]:.4f}", f"{rote.losses[0]:.4f}"),
        ("loss, last step", f"{eager.losses[-1]:.4f}", f"{rote.losses[-1]:.4f}"),
        ("milliseconds per step (median)", f"{eager.milliseconds:.1f}", f"{rote.milliseconds:.1f}"),
        *counts,
        ("losses equal bit for bit", "", "yes" if equal[0] else "NO"),
        ("parameters equal bit for bit", "", "yes" if equal[1] else "NO"),
    ]
    if dist.get_rank() == 0:
        print()
        for name, of_eager, of_rote in rows:
            print(f"{name:<34}{of_eager:>14}{of_rote:>14}")
    return 0 if all(equal) else 1


def leave(status: int) -> NoReturn:
    """Ends the process.

    An ordinary exit races with gloo's worker threads, which may still hold a
    tensor, and aborts now and then (pytorch/pytorch#179291).
    """
    sys.stdout.flush()
    dist.barrier()
    os._exit(status)
