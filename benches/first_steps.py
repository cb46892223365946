"""The first step of an all-DTensor Llama, where each op is propagated for the first time: by DTensor, and by Rote.

    python benches/first_steps.py            (part of `make bench`)
    python benches/first_steps.py --meshes 8 2x4 --limit 60

The model is that of the headline figures: 4 blocks, every activation a DTensor, parameters sharded over the last mesh
dim, the batch over the others, on a fake process group. Each row is a process of its own, one after the other. The
first step asks for every op; the median of later steps, which ask for nothing, stands beside it. A row that takes
longer than the limit is stopped and says so. `rote, same` answers as DTensor would, and hands the rest on; `rote, best`
takes the cheapest strategy. Beside the microseconds of an answer in the first step stand those in a step for which
DTensor has forgotten all answers (`again`). `sent` is what a rank sends in one step, by the usual ring algorithms.

A second table captures the step and gives it a new batch size at every call, eight in turn, until all are replayed:
beside it stands what the same calls take eagerly, after these.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MESHES = ("8", "2x4", "2x2x2", "4x4x4", "2x2x2x2")
WAYS = {"DTensor": None, "rote, same": "same", "rote, best": "best"}
BATCH, LATER_STEPS = 16, 8
CAPTURED = ("8", "2x4", "2x2x2")
"""The meshes of the second table."""
SIZES, MOST_ROUNDS = 8, 12


def subjects(shape: tuple[int, ...]) -> Callable[[int], Any]:
    """Starts a fake process group for a mesh. Returns what makes the subject for a size of batches."""
    import torch
    import torch.distributed as dist
    from steps import llama
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=math.prod(shape), store=FakeStore())
    names = tuple(f"dim{i}" for i in range(len(shape)))
    on = init_device_mesh("cpu", shape, mesh_dim_names=names)

    def mesh(*_: int, device: str = "cpu") -> DeviceMesh:
        return on

    llama.mesh = mesh  # of more dims than the other benches have
    return lambda batch: llama.full_dtensor("x".join(map(str, shape)), *shape, batch=batch)


def measure(shape: tuple[int, ...], policy: str | None) -> dict[str, Any]:
    """The steps of one row, in this process."""
    import rote
    from steps.sent import sent
    from steps.subject import eager

    subject = subjects(shape)(max(BATCH, math.prod(shape[:-1])))
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
        row["us_again"] = statistics.median(asked_again(lambda: step(*batch)) for _ in range(5))
    return row


def measure_captured(shape: tuple[int, ...], way: str) -> dict[str, Any]:
    """A captured step that gets a new batch size at every call, in turn, until a round of all sizes is replayed."""
    import rote
    from steps.subject import eager, forward_and_loss, training_step

    subject_of = subjects(shape)
    made = [subject_of(math.prod(shape) * count) for count in range(1, SIZES + 1)]
    batches = [subject.batch() for subject in made]
    if way == "rote, best":
        rote.propagation.install("best")
    model = made[0].model()
    opt = made[0].optimizer(model)
    step = training_step(forward_and_loss(model, made[0].loss), opt)
    with tempfile.TemporaryDirectory() as plans:
        propagation: Any = "torch" if way == "DTensor" else "rote"
        captured = rote.capture(step, state={"model": model, "opt": opt}, plans=plans, propagation=propagation)
        began, rounds, replayed = time.perf_counter(), 0, -1
        while captured.stats.replays < replayed + SIZES and rounds < MOST_ROUNDS:
            replayed, rounds = captured.stats.replays, rounds + 1
            for batch in batches:
                captured(*batch)
        row: dict[str, Any] = {"s": time.perf_counter() - began, "rounds": rounds}
        row["replayed"] = captured.stats.replays - replayed
    plain = eager(made[0])
    began = time.perf_counter()
    for batch in batches * rounds:
        plain(*batch)
    row["eager_s"] = time.perf_counter() - began
    return row


def asked_again(step: Callable[[], Any]) -> float:
    """The microseconds per answer in a step for which DTensor has forgotten all answers, and Rote knows the ops."""
    import rote
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    before = rote.propagation.stats()
    _clear_sharding_prop_cache()
    step()
    after = rote.propagation.stats()
    asked = after.answered + sum(after.handed_on.values()) - before.answered - sum(before.handed_on.values())
    return (after.microseconds - before.microseconds) / max(asked, 1)


def run(mesh: str, way: str, limit: float, row: str = "--row") -> dict[str, Any] | None:
    """One row, in a process of its own; None if it was stopped."""
    command = [sys.executable, __file__, row, mesh, way]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "8"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=environment, check=False)
    except subprocess.TimeoutExpired:
        return None
    if ran.returncode != 0:
        raise SystemExit(f"{mesh}, {way}:\n{ran.stderr}")
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def shape_of(mesh: str) -> tuple[int, ...]:
    return tuple(int(size) for size in mesh.split("x"))


def text(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="for example 8 2x4 2x2x2")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds after which a row is stopped")
    parser.add_argument("--out", type=Path, help="a folder for first_steps.json")
    parser.add_argument("--row", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--captured-row", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row is not None:
        mesh, way = given.row
        print(json.dumps(measure(shape_of(mesh), WAYS[way])))
        return
    if given.captured_row is not None:
        mesh, way = given.captured_row
        print(json.dumps(measure_captured(shape_of(mesh), way)))
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
            said = ""
            if asked:
                each = f"{row['us'] / asked:.0f} us each, {row['us_again']:.0f} again"
                said = f"{row['answered']} of {asked} answered, {each}"
            times = f"{text(row['first_s']):>11} {text(row['later_s']):>11} {ratio:>7}"
            print(f"{mesh:<9} {way:<11} {times} {row['sent'] / 1e6:>6.2f} MB  {said}", flush=True)
    print(f"\nA captured step with {SIZES} batch sizes in turn, until all are replayed")
    print(f"{'mesh':<9} {'propagation':<11} {'took':>11} {'eager took':>11}  rounds")
    for mesh in [mesh for mesh in given.meshes if mesh in CAPTURED]:
        for way in WAYS:
            row = run(mesh, way, given.limit, "--captured-row")
            rows.append({"mesh": mesh, "way": f"captured, {way}", **(row or {"stopped_after_s": given.limit})})
            if row is None:
                print(f"{mesh:<9} {way:<11} {'> ' + text(given.limit):>11} {'stopped':>11}", flush=True)
                continue
            all_are = "" if row["replayed"] == SIZES else f", {row['replayed']} of {SIZES} replayed"
            times = f"{text(row['s']):>11} {text(row['eager_s']):>11}"
            print(f"{mesh:<9} {way:<11} {times}  {row['rounds']}{all_are}", flush=True)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "first_steps.json").write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
