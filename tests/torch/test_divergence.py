"""One rank alone misses a guard, refuses, raises, is killed or stalls: no other rank hangs, and each says why.

A run is a job of its own: 2 to 4 gloo processes with a short timeout of their process group, a step with collectives,
options and a fault from a seed, which is printed. A rank that goes on after its own fault leaves no trace: all
results are eager's. Where others are left alone with a collective, each raises within the timeout and five seconds.
"""

import contextlib
import multiprocessing
import os
import queue
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from extent import EVERYTHING, SEED
from oracle import ORACLE_ONLY
from ranks import PRELOAD
from torch import Tensor

RUNS = 1000 if EVERYTHING else 8
TIMEOUT_S = 5.0
GRACE_S = 5.0
CALLS = 12
HARMLESS = ("misses", "refuses", "observed")
FATAL = ("raises", "raises between", "killed", "exits", "stalls", "stalls between")
OPTIONS: list[dict[str, Any]] = [
    {},
    {"passes": "none"},
    {"passes": "+buckets,+sums"},
    {"passes": "all"},
    {"verify": 3},
    {"verify_every": 3},
    {"verify_every": 2, "passes": "+buckets,+sums"},
    {"max_variants": 2},
]


class Fault:
    """What happens in an op, at which call; a replay runs it too."""

    kind = ""
    now = False
    at: Any = None  # when, shared by all ranks


class Planted(Exception):
    """The fault of this rank."""


def act(kind: str) -> None:
    Fault.at.value = time.monotonic()
    if kind.startswith("raises"):
        raise Planted(kind)
    if kind == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exits":
        os._exit(7)
    if kind.startswith("stalls"):
        time.sleep(TIMEOUT_S + 3 * GRACE_S)
        raise Planted(kind)


@torch.library.custom_op("rote_divergence::pass_on", mutates_args=())
def pass_on(x: Tensor) -> Tensor:
    if Fault.now:
        act(Fault.kind)
    return x.clone()


@pass_on.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def summed(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", dist.group.WORLD)


def step(x: Tensor, scale: float, place: int, reads: bool) -> list[Tensor]:
    """Three sums over ranks; the fault is in front of one of them, or behind."""
    if reads and x.sum().item() < 0:
        scale = -scale
    parts = []
    for i in range(3):
        if place == i:
            x = pass_on(x)
        parts.append(summed(x * scale + i))
    if place == 3:
        x = pass_on(x)
    return [part + 1 for part in parts] + [summed(parts[0] - parts[1]), x]


def job(seed: int) -> dict[str, Any]:
    pick = random.Random(seed)
    return {
        "seed": seed,
        "world": pick.choice([2, 2, 3, 4]),
        "kind": pick.choice(HARMLESS + FATAL),
        "call": pick.randrange(CALLS - 1),
        "place": pick.randrange(4),
        "options": pick.choice(OPTIONS),
        "rank": pick.random(),
    }


def set_timeout(seconds: float) -> None:
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=seconds))


def script(captured: Any, rank: int, faulty: bool, what: dict[str, Any]) -> Iterator[list[Tensor]]:
    for i in range(CALLS):
        now = faulty and i == what["call"]
        kind = what["kind"]
        if i == what["call"]:  # ranks record at different speeds on a busy machine
            set_timeout(TIMEOUT_S)
        if now and kind.endswith("between"):
            act(kind)
        Fault.kind, Fault.now = kind, now
        around: Any = contextlib.nullcontext()
        if now and kind == "observed":
            from torch.utils.flop_counter import FlopCounterMode

            around = FlopCounterMode(display=False)
        x = torch.arange(64.0) + 10 * rank + i
        scale = 3.0 if now and kind == "misses" else 2.0
        with around:
            yield captured(x, scale, what["place"], faulty and kind == "refuses")


def meet(rank: int, port: Any) -> dist.Store:
    """A store that lives and dies with rank 0, which says its port as soon as it has one."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.value = store.port
        return store
    while port.value == 0:
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", port.value)


def one_rank(rank: int, port: Any, what: dict[str, Any], at: Any, answers: Any) -> None:
    Fault.at = at
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo",
        store=meet(rank, port),
        rank=rank,
        world_size=what["world"],
        timeout=timedelta(seconds=60),
    )
    import rote

    faulty = rank == int(what["rank"] * what["world"])
    harmless = what["kind"] in HARMLESS
    expected = list(script(step, rank, faulty, what)) if harmless else []
    set_timeout(60)
    rote.capture(lambda x: x + 1)(torch.ones(1))  # loads the bridge
    dist.barrier()
    captured = rote.capture(step, ignore=["kind", "now", "at"], **what["options"])
    done = 0
    try:
        for i, found in enumerate(script(captured, rank, faulty, what)):
            done = i + 1
            if harmless:
                same = all(torch.equal(a, b) for a, b in zip(expected[i], found, strict=True))
                assert same, f"call {i} differs from eager"
        answers.put((rank, "done", done, 0.0, ""))
    except BaseException as error:
        answers.put((rank, type(error).__name__, done, time.monotonic() - at.value, str(error)))
    answers.close()
    answers.join_thread()
    os._exit(0)  # the group may be beyond a proper end


def run_ranks(one_rank: Callable[..., None], what: dict[str, Any], within: float) -> dict[int, Any]:
    """What each rank has said of its end; fails if one has not ended within so many seconds. ``one_rank``: called with
    the rank, where rank 0 tells its port, ``what``, the time of the fault, and the queue for what a rank says."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    answers, at, port = context.Queue(), context.Value("d", 0.0), context.Value("i", 0)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    ranks = [
        context.Process(target=one_rank, args=(rank, port, what, at, answers), daemon=True)
        for rank in range(what["world"])
    ]
    for rank in ranks:
        rank.start()
    end = time.monotonic() + within
    for rank in ranks:
        rank.join(max(0.0, end - time.monotonic()))
    hung = [i for i, rank in enumerate(ranks) if rank.is_alive()]
    for i in hung:
        ranks[i].kill()
    told = {}
    with contextlib.suppress(queue.Empty):  # a rank that was killed says nothing
        while len(told) < what["world"]:
            answer = answers.get(timeout=0.5)
            told[answer[0]] = answer[1:]
    assert not hung, f"ranks {hung} hang: {what}, others: {told}"
    return told


def check(seed: int) -> None:
    what = job(seed)
    print(f"seed {seed}: {what}", flush=True)
    told = run_ranks(one_rank, what, 90 + 3 * TIMEOUT_S + 4 * GRACE_S)
    faulty = int(what["rank"] * what["world"])
    for rank in range(what["world"]):
        if rank == faulty and what["kind"] in ("killed", "exits"):
            assert rank not in told, told
            continue
        assert rank in told, (rank, what, told)
        outcome, done, waited, text = told[rank]
        if what["kind"] in HARMLESS:
            assert (outcome, done) == ("done", CALLS), (what, told)
        elif rank == faulty:
            assert outcome == "Planted", (what, told)
        else:
            # The rest ends with the last collective that all took part in, or says that others are gone.
            assert outcome == "done" or text, (what, told)
            assert outcome in ("done", "RuntimeError", "DistBackendError", "DistNetworkError"), (what, told)
            assert waited < TIMEOUT_S + GRACE_S, (what, told)


@pytest.mark.sampled(5)
@pytest.mark.skipif(ORACLE_ONLY, reason="about replays")
@pytest.mark.parametrize("part", range(10))
def test_one_rank_alone(part: int) -> None:
    for seed in range(SEED + part, SEED + RUNS, 10):
        check(seed)
