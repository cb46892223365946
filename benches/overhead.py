"""What one training step costs beyond its kernels: eager DTensor, and the ways to be rid of it.

    python benches/overhead.py            (part of `make bench`: all of it, about 15 minutes)
    python benches/overhead.py --quick    (fewer subjects, no torch.compile)
    python benches/overhead.py step       (one of the series below)

The headline step is a Llama's: 4 blocks, batch 2, sequence 32, width 64, 8 heads,
feed-forward 128, tensor plus sequence parallel over 8 ranks, fused AdamW, one
thread. The process group is PyTorch's fake one, which answers at once with a
local copy, so what is measured is the host's work and not a network.

Series: `step`, then over `models`, `optimizers`, `sizes`, `layers`, `meshes` and `wrappers`, `memory`, and
`bridge`: what single ops cost above their kernels (`steps/bridge.py`).

Rows, all in one process and taken in turn, round after round:

- eager DTensor: the script as written.
- local eager: the same step written by hand for one rank. Local shards in plain
  `nn.Module`s, the same collectives called on the process group directly. The
  fastest that a person gets in eager PyTorch without DTensor.
- torch.compile: forward and loss compiled (and with them the backward), with
  static shapes. In `step` and `models` only: it compiles for a minute each time.
  "torch.compile, blocks", for wrapped models, compiles each block by itself.
- rote, by regions: each block a region (`rote.capture_module`), the rest of the step eager.
- rote: the eager DTensor step under `rote.capture`; and with `passes="none"`.

Floor: what the kernels alone cost (`steps/floor.py`), measured in turn with the rows.

Spread: how far the medians of a row's rounds lie apart, as the range of the middle
half of them over their median. It says how much the machine did besides.

Erased share: (eager - row) / (eager - floor). It could only be lower with a
floor of zero; for the headline step that bound is reported beside it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from steps import bridge, memory, sweep
from steps.extension import build
from steps.measure import Effort
from steps.networks import mlp
from steps.report import note
from steps.subject import RANKS, captured
from sweeps import layers, meshes, models, optimizers, sizes, step, wrappers
from torch.testing._internal.distributed.fake_pg import FakeStore

OTHERS = {"memory": memory, "bridge": bridge}
SWEEPS = {
    "step": step,
    "models": models,
    "optimizers": optimizers,
    "sizes": sizes,
    "layers": layers,
    "meshes": meshes,
    "wrappers": wrappers,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("series", nargs="*", help="which to measure; by default all")
    parser.add_argument("--out", type=Path, default=Path("target/bench"), help="output directory")
    parser.add_argument("--rounds", type=int, default=20, help="turns of 8 steps of each row, at most")
    parser.add_argument("--seconds", type=float, default=20.0, help="about so long for each subject, once warm")
    parser.add_argument("--quick", action="store_true", help="fewer subjects, 3 seconds each, no torch.compile")
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of the thread, for a busy machine")
    arguments = parser.parse_args()
    chosen = arguments.series or [*SWEEPS, *OTHERS]
    if unknown := set(chosen) - {*SWEEPS, *OTHERS}:
        parser.error(f"unknown series {', '.join(sorted(unknown))}: expected {', '.join([*SWEEPS, *OTHERS])}")
    effort = Effort(arguments.rounds, 3.0 if arguments.quick else arguments.seconds, arguments.cpu_time)

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    arguments.out.mkdir(parents=True, exist_ok=True)
    kernel_time = build("kernel_time", arguments.out)
    note("compiling the bridge, unless it is cached")
    with tempfile.TemporaryDirectory() as plans:
        small = mlp("", layers=1)
        captured(small, plans)(*small.batch())
    for name in chosen:
        if name in OTHERS:
            OTHERS[name].run(arguments.quick, arguments.out)
        else:
            sweep.run(SWEEPS[name].SWEEP, kernel_time, effort, arguments.quick, arguments.out)
    print(f"\nsaved tables' numbers and plots in {arguments.out}")


if __name__ == "__main__":
    main()
