"""What passes gain on real process groups, where every collective takes a given time longer.

    python benches/collectives.py                    (about 10 minutes on 2 cores)
    python benches/collectives.py --ranks 2 --delays 0 200
    python benches/collectives.py --passes +overlap --at-once

Processes of one thread each train models of `benches/steps` over gloo on the loopback. Each
collective ends a delay after gloo has ended it (`late_group.cpp`), one collective after the
other, as on a stream of NCCL. With `--at-once`, the delays of collectives that are under way
together pass together, as over TCP. A process computes meanwhile, or sleeps.

Columns: milliseconds of a step with the default passes, and for each list of passes how many
times as fast a step is with it: above 1.00x is a gain. All are measured in one run and in turn,
round after round. Each figure is the median over rounds of the ratio of a round's medians, on
rank 0. `*`: the ratios of three quarters of the rounds lie on its side of 1.00x, and it is 2 % or
more away from it. `-`: the passes find nothing to do. Losses must have the bits of eager PyTorch's;
with `sums`, they must be close.

The second table says which share of the longest delay is hidden behind compute: 100 % where the
step takes no longer than without a delay, 0 % where all delays of its collectives (as many as were
recorded) add up.

With `--realtime`, the steps that count run before all other work of the machine (for a busy
machine; needs root).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from steps.extension import build
from steps.llama import config, data_parallel, full_dtensor, fully_sharded, llama
from steps.measure import local, same_as
from steps.networks import convolution, mlp
from steps.report import machine, note, save
from steps.subject import RANKS, Batch, Step, Subject, captured, eager

EAGER, DEFAULT = "eager", "default"
PASSES = ("+overlap", "+buckets", "+overlap,+buckets", "+overlap,+buckets,+sums")
WARM_UP = 7
SETTLE = 1
IN_TURN = 4


def subjects() -> Iterator[Subject]:
    yield llama("Llama, TP + SP")
    yield full_dtensor("Llama, all DTensor", RANKS, sizes=config(sequence=8), batch=8)
    yield full_dtensor("Llama, data parallel", RANKS, 1, batch=4)
    yield data_parallel("Llama, DDP", batch=4, group=lambda: None, bucket_cap_mb=0.1)
    yield fully_sharded("Llama, FSDP2", batch=4)
    yield fully_sharded("Llama, FSDP2, kept", batch=4, reshard_after_forward=False)
    if RANKS > 2:
        yield fully_sharded("Llama, FSDP2 over TP", tp=2, batch=4)
    if RANKS > 2:
        yield full_dtensor("Llama, 2-D mesh", 2, RANKS // 2, batch=4)
    yield mlp("MLP of 8 pairs, TP")
    yield convolution("4 convolutions, batch")
    yield convolution("the same, 8 times the batch", batch=128)


def changing(lists: Sequence[str], plan: Path) -> dict[str, str]:
    """Lists of passes that change a plan, and what they say: two numbers, which are equal if nothing changes."""
    found = {}
    for passes in lists:
        command = [str(Path(sys.executable).with_name("rote")), "show", f"--passes={DEFAULT},{passes}", str(plan)]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        names = [name.lstrip("+") for name in passes.split(",")]
        own = [line.strip() for line in shown.splitlines() if line.split()[0] in names]
        if any(len(set(re.findall(r"\b\d+", line))) > 1 for line in own):
            found[passes] = "; ".join(re.sub(" +", " ", line) for line in own)
    return found


def measured(subject: Subject, options: argparse.Namespace, late: Any, plans: Path) -> dict[str, Any]:
    """Milliseconds of rounds, by delay and passes."""
    batch = subject.batch()
    rows: dict[str, Any] = {}
    losses: dict[str, list[torch.Tensor]] = {}
    late.set_delay(0.0, True)

    def add(passes: str) -> None:
        if passes == EAGER:
            step = eager(subject)
        else:
            step = captured(subject, str(plans), passes if passes != DEFAULT else "")
        losses[passes] = [local(step(*batch)).clone() for _ in range(WARM_UP)]
        if passes != EAGER and not step.stats.replays:
            raise SystemExit(f"{subject.label} does not replay: {step.stats}\n{step.explain()}")
        same = same_as(losses[EAGER], losses[passes])
        if same != "bit for bit" and not (same == "close" and "sums" in passes):
            raise SystemExit(f"{subject.label}: losses with {passes} are not those of eager PyTorch")
        rows[passes] = step

    add(EAGER)
    add(DEFAULT)
    largest = max(plans.rglob("*.rote"), key=lambda path: path.stat().st_size)
    did = [changing(options.passes, largest)]
    dist.broadcast_object_list(did)  # the ranks measure the same
    for passes in did[0]:
        add(passes)
    rounds: dict[float, dict[str, list[float]]] = {}
    if options.realtime:
        schedule(os.SCHED_RR)
    for delay in options.delays:
        late.set_delay(delay, not options.at_once)
        rounds[delay] = {passes: [] for passes in rows}
        for turn in range(options.rounds):
            for at in range(len(rows)):
                passes = list(rows)[(at + turn) % len(rows)]
                rounds[delay][passes].append(median_of_turn(rows[passes], batch))
    if options.realtime:
        schedule(os.SCHED_OTHER)
    return {
        "label": subject.label,
        "plan": rows[DEFAULT].plan_counts(),
        "rounds_ms": rounds,
        "did": did[0],
    }


def schedule(policy: int) -> None:
    """How the threads of this process are scheduled: those of gloo, which move data, before the one that computes."""
    for thread in Path("/proc/self/task").iterdir():
        tid = int(thread.name)
        priority = 0 if policy == os.SCHED_OTHER else 1 + (tid != os.getpid())
        with contextlib.suppress(ProcessLookupError):  # a thread that has ended
            os.sched_setscheduler(tid, policy, os.sched_param(priority))


def median_of_turn(step: Step, batch: Batch) -> float:
    times = []
    for at in range(SETTLE + IN_TURN):
        start = time.perf_counter()
        step(*batch)
        if at >= SETTLE:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def figure(point: dict[str, Any], delay: float, passes: str) -> str:
    rounds = point["rounds_ms"][delay]
    if passes not in rounds:
        return "- "
    ratios = [before / after for before, after in zip(rounds[DEFAULT], rounds[passes], strict=True)]
    middle = statistics.median(ratios)
    low, _, high = statistics.quantiles(ratios, n=4)
    sure = abs(middle - 1) >= 0.02 and (low > 1 or high < 1)
    return f"{middle:.2f}x{'*' if sure else ' '}"


def columns(names: Sequence[str]) -> str:
    return "".join(f"{name:>{width(name)}}" for name in names)


def width(name: str) -> int:
    return max(9, len(name) + 2)


def table(points: list[dict[str, Any]], ranks: int, options: argparse.Namespace) -> str:
    others = (EAGER, *options.passes)
    lines = [f"{f'{ranks} ranks':<28}{'delay':>8}{'default':>11}{columns(others)}"]
    for point in points:
        for nth, delay in enumerate(options.delays):
            line = f"{point['label'] if nth == 0 else '':<28}{delay:5.0f} us"
            line += f"{statistics.median(point['rounds_ms'][delay][DEFAULT]):8.2f} ms"
            lines.append(line + "".join(f"{figure(point, delay, name):>{width(name)}}" for name in others))
    return "\n".join(lines)


def hidden(point: dict[str, Any], delay: float, name: str) -> str:
    """The share of the delays that a step does not wait for."""
    rounds = point["rounds_ms"]
    if name not in rounds[delay]:
        return "- "
    waited = statistics.median(rounds[delay][name]) - statistics.median(rounds[0.0][name])
    return f"{max(0.0, min(1.0, 1 - waited / (1e-3 * delay * point['plan']['collectives']))):.0%} "


def table_of_hidden(points: list[dict[str, Any]], ranks: int, options: argparse.Namespace) -> str:
    names, longest = (EAGER, DEFAULT, *options.passes), max(options.delays)
    lines = [f"{f'{ranks} ranks, {longest:.0f} us hidden':<28}{'collectives':>12}{columns(names)}"]
    for point in points:
        line = f"{point['label']:<28}{point['plan']['collectives']:>12}"
        lines.append(line + "".join(f"{hidden(point, longest, name):>{width(name)}}" for name in names))
    return "\n".join(lines)


def on_rank(rank: int, ranks: int, options: argparse.Namespace, shared: str) -> None:
    torch.set_num_threads(1)
    late = build("late_group", options.out)

    def group(store: Any, rank: int, size: int, timeout: Any) -> Any:
        return late.late(dist.ProcessGroupGloo(store, rank, size, timeout))

    dist.Backend.register_backend("late", group, devices=["cpu"])
    dist.init_process_group("late", store=dist.FileStore(f"{shared}/store", ranks), rank=rank, world_size=ranks)
    points = []
    for subject in subjects():
        if options.models and not any(name in subject.label for name in options.models):
            continue
        if rank == 0:
            note(f"{ranks} ranks: {subject.label}")
        points.append(measured(subject, options, late, Path(shared, str(rank), str(len(points)))))
    if rank == 0:
        print(table(points, ranks, options), "\n", flush=True)
        if 0.0 in options.delays and max(options.delays) > 0:
            print(table_of_hidden(points, ranks, options), "\n", flush=True)
        result = {"ranks": ranks, "at_once": options.at_once, "points": points, "machine": machine()}
        save(result, options.out / f"collectives-{ranks}.json")
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="processes")
    parser.add_argument("--delays", type=float, nargs="+", default=[0, 100, 1000], help="microseconds of a collective")
    parser.add_argument("--at-once", action="store_true", help="delays of collectives pass together")
    parser.add_argument("--passes", nargs="+", default=PASSES, help="lists to compare with the default")
    parser.add_argument("--models", nargs="+", help="parts of the labels of models to measure")
    parser.add_argument("--realtime", action="store_true", help="before all other work of the machine")
    parser.add_argument("--rounds", type=int, default=5, help=f"turns of {IN_TURN} steps of each row")
    parser.add_argument("--out", type=Path, default=Path("target/bench"), help="output directory")
    options = parser.parse_args()
    build("late_group", options.out)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for ranks in options.ranks:
        os.environ["WORLD_SIZE"] = str(ranks)
        with tempfile.TemporaryDirectory() as shared:
            torch.multiprocessing.spawn(on_rank, (ranks, options, shared), nprocs=ranks)


if __name__ == "__main__":
    main()
