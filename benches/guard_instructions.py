"""Instructions that the guards of one replayed call take, counted by callgrind.

    python benches/guard_instructions.py            the training step of 4 Llama blocks on a fake mesh of 8 ranks

Counted is what the bridge executes to read the facts of the state and of the host
(`rote_bridge_table_read`) and those of the arguments (`rote_bridge_call_collect`).
Counts do not depend on the machine's load, so two commits can be compared by two runs.
It takes some minutes, and needs valgrind and a wheel (or a library) with symbols.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

COUNTED = ("rote_bridge_table_read", "rote_bridge_call_collect")
FEW, MORE = 20, 70


def replay(calls: int) -> None:
    """The child: records the step, then replays it so many times."""
    import torch
    import torch.distributed as dist
    from steps import llama, subject
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    step = llama.llama("x")
    batch = step.batch()
    with tempfile.TemporaryDirectory() as plans:
        captured = subject.captured(step, plans)
        for _ in range(8 + calls):
            captured(*batch)
    assert captured.stats.replays >= calls, captured.stats


def counted(calls: int, folder: str) -> int:
    """Instructions of a run of so many replays."""
    out = Path(folder) / f"{calls}.out"
    line = ["valgrind", "--tool=callgrind", "--smc-check=all-non-file", f"--callgrind-out-file={out}"]
    line += [f"--toggle-collect={name}" for name in COUNTED]
    line += [sys.executable, __file__, "--replay", str(calls)]
    # Where the entries of dicts lie depends on the seed of hashes, and how long it takes to find them.
    done = subprocess.run(line, capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "0"})
    if done.returncode != 0:
        sys.exit(f"{' '.join(line)} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    found = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    if found is None:
        sys.exit(f"{out} has no summary")
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replay", type=int, metavar="CALLS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay is not None:
        replay(options.replay)
        return
    if shutil.which("valgrind") is None:
        print("guard_instructions: valgrind is not installed; skipped", file=sys.stderr)
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        print(f"guard_instructions: {FEW} and {MORE} replays under callgrind, some minutes", file=sys.stderr)
        more = counted(MORE, folder) - counted(FEW, folder)
    print(f"{more / (MORE - FEW):,.0f} instructions of guards per replayed call (4 Llama blocks, 8 ranks)")


if __name__ == "__main__":
    main()
