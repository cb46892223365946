"""The step of `overhead.py` on a GPU: eager DTensor, written by hand, and replayed.

    python benches/overhead_cuda.py            (part of `scripts/gpu_checks.sh`)

Same model, same fake process group of 8 ranks, same rounds in turn. The kernels
are a GPU's, so a step's time is the longer of the host's work and the GPU's;
each step is timed until the GPU is done. There is no floor here: what
`overhead.py` calls one is measured on a CPU. `--device cpu` checks the script.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from steps.llama import llama
from steps.measure import Effort, in_turn, same_as
from steps.subject import BY_HAND, EAGER, RANKS, ROTE, Step, builders
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore


def finished(step: Step, synchronize: Callable[[], None]) -> Step:
    def whole(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = step(tokens, labels)
        synchronize()
        return loss

    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("target/bench"), help="output directory")
    parser.add_argument("--rounds", type=int, default=20, help="turns of 8 steps of each row, at most")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        sys.exit("needs a GPU: torch.cuda.is_available() is False")

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    subject = llama("Llama, TP + SP", device=arguments.device)
    batch = subject.batch()
    device = torch.get_device_module(arguments.device)

    with tempfile.TemporaryDirectory() as plans:
        ways = builders(subject, plans)
        rows, losses, captured = {}, {}, None
        for name in (EAGER, BY_HAND, ROTE):
            step = ways[name]()
            losses[name] = [step(*batch) for _ in range(8)]
            rows[name] = finished(step, device.synchronize)
            captured = step
        measured = in_turn(rows, batch, Effort(arguments.rounds, seconds=120))

    eager = measured[EAGER]["median_ms"]
    print(f"\n{'':<26}{'ms':>8}{'eager /':>10}   losses")
    for name, row in measured.items():
        row["losses"] = same_as(losses[EAGER], losses[name])
        print(f"{name:<26}{row['median_ms']:8.2f}{eager / row['median_ms']:9.1f}x   {row['losses']}")
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"overhead-{arguments.device}.json"
    path.write_text(json.dumps({"device": name, "torch": torch.__version__, "rows": measured}))
    print(f"\non {name}, torch {torch.__version__}; saved {path}")
    if not captured.stats.replays:
        sys.exit(f"the rote row never replayed: {captured.stats}")


if __name__ == "__main__":
    main()
