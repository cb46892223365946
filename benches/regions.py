"""What regions cost by themselves: a call of a small one, and the recording of many equal blocks, on one thread.

    python benches/regions.py                (part of `make bench`)
    python benches/regions.py --blocks 20    fewer blocks

Call: a linear layer and a tanh, which take so little time that the region's own work shows. Its eager twin runs in turn
with it. Blocks: those of the Llama of `benches/overhead.py`, each a region, with the store that they share. What a
further equal block costs until it is replayed is the difference between chains of few and of many blocks, above what as
many eager calls take. Times are those of the thread: other processes do not count.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import rote
import torch
from steps.llama import BATCH, SMALL, plain_model, token_batch
from steps.subject import blocks_of
from torch import Tensor, nn

CALLS = 300
MOST_STEPS = 16
"""Until all blocks are replayed."""
FEW = 8
RUNS = 5


def microseconds(run: Callable[[], object]) -> float:
    start = time.thread_time_ns()
    run()
    return (time.thread_time_ns() - start) / 1e3


def call() -> None:
    eager = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    captured = copy.deepcopy(eager)
    rote.capture_module(captured)
    x = torch.randn(4, 8, requires_grad=True)

    def both(module: nn.Module) -> None:
        module(x).backward(torch.ones(4, 8))
        x.grad = None
        module.zero_grad()

    for module in (eager, captured):
        for _ in range(30):
            both(module)
    print(f"\na call of linear + tanh, microseconds (medians of {CALLS} calls in turn)\n")
    print(f"{'':<24}{'eager':>8}{'region':>8}")
    runs: dict[str, Callable[[nn.Module], object]] = {"forward": lambda module: module(x), "forward and backward": both}
    for name, run in runs.items():
        times = [[microseconds(lambda: run(module)) for module in (eager, captured)] for _ in range(CALLS)]  # noqa: B023
        print(f"{name:<24}" + "".join(f"{statistics.median(column):8.1f}" for column in zip(*times, strict=True)))


@dataclass
class Chain:
    """Equal blocks, each a region: milliseconds of a step of all."""

    number: int
    eager: float
    until_replayed: list[float]
    replayed: float
    stored: int

    @property
    def recording(self) -> float:
        """What recording took, above as many eager steps."""
        return sum(self.until_replayed) - self.eager * len(self.until_replayed)


def chain_of(number: int) -> Chain:
    model = plain_model(SMALL)
    first = blocks_of(model)[0]
    chain = nn.Sequential(*(copy.deepcopy(first) for _ in range(number)))
    tokens, _ = token_batch(SMALL, BATCH)
    inputs = model.embedding(tokens).detach()

    def step() -> Tensor:
        chain(inputs).sum().backward()
        chain.zero_grad()
        return inputs

    def milliseconds() -> float:
        return microseconds(step) / 1e3

    for _ in range(3):
        step()
    eager = statistics.median(milliseconds() for _ in range(5))
    with tempfile.TemporaryDirectory() as plans:
        handles = [rote.capture_module(block, plans=plans) for block in chain]
        times = []
        while len(times) < MOST_STEPS and not all(handle.stats.backward.replays for handle in handles):
            times.append(milliseconds())
        replayed = statistics.median(milliseconds() for _ in range(5))
        stored = sum(path.stat().st_size for path in Path(plans).rglob("*") if path.is_file())
    return Chain(number, eager, times, replayed, stored)


def blocks(number: int) -> None:
    chain_of(2)  # what is done once in a process
    runs = [(chain_of(FEW), chain_of(number)) for _ in range(RUNS)]
    many = runs[-1][1]
    further = sorted((many.recording - few.recording) / (number - FEW) for few, many in runs)
    print(f"\n{number} equal blocks of a Llama, milliseconds a block, forward and backward\n")
    print(f"{'eager':<40}{many.eager / number:8.2f}")
    each = (f"{time / number:8.2f}" for time in many.until_replayed)
    print(f"{'each call until all are replayed':<40}" + "".join(each))
    print(f"{'replayed':<40}{many.replayed / number:8.2f}")
    print(f"{f'a further block, median of {RUNS} runs':<40}{statistics.median(further):8.2f}", end="")
    print(f"   ({further[0]:.2f} to {further[-1]:.2f})")
    print(f"{'the store, KiB':<40}{many.stored / 1024:8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=80, help="how many blocks")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    call()
    blocks(arguments.blocks)


if __name__ == "__main__":
    main()
