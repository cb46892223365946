"""The first step of an all-DTensor Llama, where each op is propagated for the first time: by DTensor, and by Rote.

    python benches/first_steps.py            (part of `make bench`)
    python benches/first_steps.py --meshes 8 2x4 --limit 60

The model is that of the headline figures: 4 blocks, every activation a DTensor, parameters sharded over the last mesh
dim, the batch over the others, on a fake process group. Each row is a process of its own, one after the other. The
first step asks for every op; the median of later steps, which ask for nothing, stands beside it. A row that takes
longer than the limit is stopped and says so. `rote, same` answers as DTensor would, and hands the rest on; `rote, best`
takes the cheapest strategy. `sent` is what a rank sends in one step, by the usual ring algorithms.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

MESHES = ("8", "2x4", "2x2x2", "4x4x4", "2x2x2x2")
WAYS = {"DTensor": None, "rote, same": "same", "rote, best": "best"}
BATCH, LATER_STEPS = 16, 8


def measure(shape: tuple[int, ...], policy: str | None) -> dict[str, Any]:
    """The steps of one row, in this process."""
    import rote
    import torch
    import torch.distributed as dist
    from steps import llama
    from steps.sent import sent
    from steps.subject import eager
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    names = tuple(f"dim{i}" for i in range(len(shape)))
    on = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def mesh(*_: int, device: str = "cpu") -> DeviceMesh:
        return on

    llama.mesh = mesh  # of more dims than the other benches have
    subject = llama.full_dtensor("x".join(map(str, shape)), *shape, batch=max(BATCH, math.prod(shape[:-1])))
    if policy is not None:
        rote.propagation.install(policy)  # type: ignore[arg-type]
    step, batch = eager(subject), subject.batch()
    times = []
    for _ in range(1 + LATER_STEPS):
        start = time.perf_counter()
        step(*batch)
        times.append(time.perf_counter() - start)
    row: dict[str, Any] = {"first_s": times[0], "later_s": statistics.median(times[2:])}
    with sent() as counted:
        step(*batch)
    row["sent"] = sum(counted.values())
    if policy is not None:
        stats = rote.propagation.stats()
        row["answered"], row["us"] = stats.answered, stats.microseconds
        row["handed_on"] = sum(stats.handed_on.values())
        row["strides"] = sum(stats.strides.values())
    return row


def run(mesh: str, way: str, limit: float) -> dict[str, Any] | None:
    """One row, in a process of its own; None if it was stopped."""
    command = [sys.executable, __file__, "--row", mesh, str(WAYS[way])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "8"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return None
    if ran.returncode != 0:
        raise SystemExit(f"{mesh}, {way}:\n{ran.stderr}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="for example 8 2x4 2x2x2")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a row is stopped")
    parser.add_argument("--out", type=Path, help="a folder for first_steps.json")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        mesh, policy = given.row
        shape = tuple(int(size) for size in mesh.split("x"))
        print(json.dumps(measure(shape, None if policy == "None" else policy)))
        return
    rows = []
    print(
        f"{'mesh':<9} {'propagation':<11} {'first step':>11} {'later steps':>11} {'faster':>7} {'sent':>9}  questions"
    )
    for mesh in given.meshes:
        theirs = None
        for way in WAYS:
            row = run(mesh, way, given.limit)
            rows.append({"mesh": mesh, "way": way, **(row or {"stopped_after_s": given.limit})})
            if row is None:
                print(f"{mesh:<9} {way:<11} {'> ' + text(given.limit):>11} {'stopped':>11}", flush=True)
                theirs = theirs or given.limit
                continue
            theirs = theirs or row["first_s"]
            ratio = "" if way == "DTensor" else f"{theirs / row['first_s']:.1f}x"
            asked = row.get("answered", 0) + row.get("handed_on", 0)
            said = f"{row['answered']} of {asked} answered, {row['us'] / asked:.0f} us each" if asked else ""
            times = f"{text(row['first_s']):>11} {text(row['later_s']):>11} {ratio:>7}"
            print(f"{mesh:<9} {way:<11} {times} {row['sent'] / 1e6:>6.2f} MB  {said}", flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "first_steps.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
