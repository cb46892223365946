"""Processes that stay up between tests: starting torch costs seconds, a case milliseconds.

A pool is `world` processes joined by gloo on loopback. It runs one case at a
time: every rank calls the same function and answers with its result or its
traceback. A pool whose case failed, hung or crashed is thrown away, so that
the next case starts in fresh processes.
"""

import contextlib
import ctypes
import faulthandler
import functools
import importlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

PRELOAD = ["torch", "torch.distributed.tensor.parallel", "torch.distributed.fsdp", "torch._inductor.config", "numpy"]
GRACE_S = 5.0  # for the other ranks, once one rank has failed
START_S = 120.0


class CaseFailed(Exception):
    """What went wrong on which rank, with the end of the ranks' output."""


class EagerDied(CaseFailed):
    """A rank was killed by PyTorch itself, without Rote, while it ran the eager side of a case, or all that did not
    answer hung there.

    `ProcessGroupGloo::allgather_coalesced`, which each functional all-gather is, damages the heap when it runs beside
    another collective (PyTorch 2.15: `eager_gloo.py` beside this file shows it without Rote).
    """


class CaseSkipped(Exception):
    """Raised in a case to skip it, with the reason."""


class Pool:
    def __init__(self, world: int, faults: bool = False) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.world = world
        self.broken = False
        self.output = Path(tempfile.mkdtemp(prefix="rote-ranks-"))
        self.connections: list[Connection] = []
        self.processes = []
        # The store is ours, so that its port is taken from the moment it is known.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=serve,
                args=(rank, world, self.store.port, theirs, str(self.log(rank)), faulty_library() if faults else None),
                daemon=True,
            )
            process.start()
            theirs.close()
            self.connections.append(ours)
            self.processes.append(process)
        self.collect("start of the pool", START_S)

    def log(self, rank: int) -> Path:
        return self.output / f"rank{rank}.log"

    def run(self, case: Callable[..., Any], kwargs: dict[str, Any], timeout: float) -> list[Any]:
        """Runs `case(**kwargs)` on every rank; the ranks' results, in rank order."""
        self.send(case, kwargs)
        return self.collect(case.__qualname__, timeout)

    def send(self, case: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        for rank, connection in enumerate(self.connections):
            self.log(rank).write_text("")
            connection.send((case.__module__, case.__qualname__, kwargs))

    def collect(self, what: str, timeout: float) -> list[Any]:
        answers: dict[int, tuple[str, Any]] = {}
        died_in_eager = False
        begin = time.monotonic()
        deadline = begin + timeout
        while len(answers) < self.world:
            pending = {c: r for r, c in enumerate(self.connections) if r not in answers}
            ready = wait(list(pending), max(0.0, deadline - time.monotonic()))
            if not ready:
                failed = any(kind == "fail" for kind, _ in answers.values())
                died_in_eager |= not failed and all(in_eager(self.log(rank)).exists() for rank in pending.values())
                for rank in pending.values():
                    waited = time.monotonic() - begin
                    answers[rank] = ("fail", f"no answer in {waited:.0f} s from {what}")
                    os.kill(self.processes[rank].pid, signal.SIGUSR1)  # prints its stacks
                time.sleep(0.5)
            for connection in ready:
                rank = pending[connection]
                try:
                    answers[rank] = connection.recv()
                except EOFError:
                    self.processes[rank].join(5)
                    code = self.processes[rank].exitcode
                    died_in_eager |= code in (-signal.SIGABRT, -signal.SIGSEGV) and in_eager(self.log(rank)).exists()
                    answers[rank] = ("fail", f"the process died, exit code {code}")
                if answers[rank][0] == "fail":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        kinds = {kind for kind, _ in answers.values()}
        if "fail" in kinds:
            self.broken = True
            report = [
                f"rank {rank} of {self.world}: {kind}\n{value}\n{self.tail(rank)}"
                for rank, (kind, value) in sorted(answers.items())
                if kind == "fail"
            ]
            raise (EagerDied if died_in_eager else CaseFailed)("\n".join(report))
        if "skip" in kinds:
            raise CaseSkipped(next(value for kind, value in answers.values() if kind == "skip"))
        return [answers[rank][1] for rank in range(self.world)]

    def tail(self, rank: int) -> str:
        text = self.log(rank).read_text(errors="replace")[-8000:]
        return f"--- output of rank {rank} ---\n{text}" if text.strip() else ""

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self.output)


class Pools:
    """The pools of one test session, one per world size; others have the library in which plans can be made wrong."""

    def __init__(self) -> None:
        self.pools: dict[tuple[int, bool], Pool] = {}

    def run(
        self,
        world: int,
        case: Callable[..., Any],
        kwargs: dict[str, Any] | None = None,
        timeout: float = 120,
        faults: bool = False,
        last: bool = False,
    ) -> list[Any]:
        """Runs `case(**kwargs)` on every rank of this world size's pool; once more if PyTorch's eager died in it.

        `last`: the next case runs in new processes, because this one leaves what cannot be put back.
        """
        try:
            return self.run_once(world, case, kwargs or {}, timeout, faults)
        except EagerDied as died:
            warnings.warn(f"{case.__qualname__} runs again: eager PyTorch died in it\n{died}", stacklevel=2)
            return self.run_once(world, case, kwargs or {}, timeout, faults)
        finally:
            if last:
                self.restart(world, faults)

    def run_once(
        self, world: int, case: Callable[..., Any], kwargs: dict[str, Any], timeout: float, faults: bool
    ) -> list[Any]:
        pool = self.pool(world, faults)
        try:
            return pool.run(case, kwargs, timeout)
        finally:
            if pool.broken:
                self.restart(world, faults)

    def pool(self, world: int, faults: bool = False) -> Pool:
        if (world, faults) not in self.pools:
            self.pools[world, faults] = Pool(world, faults)
        return self.pools[world, faults]

    def kill_during(self, world: int, case: Callable[..., Any], kwargs: dict[str, Any], after: float) -> None:
        """Starts a case and sends its processes SIGKILL `after` seconds later."""
        self.pool(world).send(case, kwargs)
        time.sleep(after)
        self.restart(world)

    def restart(self, world: int, faults: bool = False) -> None:
        """The next case of this world size runs in new processes."""
        if pool := self.pools.pop((world, faults), None):
            pool.close()

    def close(self) -> None:
        for key in list(self.pools):
            self.restart(*key)


@functools.cache
def faulty_library() -> str:
    """The library, built so that plans can be made wrong in it: the shipped one has no code for that."""
    line = "cargo build --package rote-ffi --lib --features faults --message-format json-render-diagnostics"
    done = subprocess.run(line.split(), cwd=Path(__file__).parents[2], check=True, stdout=subprocess.PIPE, text=True)
    made = (name for message in done.stdout.splitlines() for name in json.loads(message).get("filenames", ()))
    return str(next(name for name in made if name.endswith("librote.so")))


def in_eager(log: Path) -> Path:
    """The file that exists while the rank with this log runs the eager side of a case."""
    return log.with_suffix(".eager")


@contextlib.contextmanager
def eager_side() -> Iterator[None]:
    """Around the eager side of a case, in the rank's process."""
    marker = in_eager(Path(_log)) if _log else None
    if marker:
        marker.touch()
    try:
        yield
    finally:  # what is killed leaves it
        if marker:
            marker.unlink()


_log = ""  # of this process, if it is a rank


def serve(rank: int, world: int, port: int, connection: Connection, log: str, library: str | None) -> None:
    """The life of one rank."""
    import torch
    import torch.distributed as dist

    global _log
    _log = log
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: never outlive the parent
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable(sys.__stderr__)
    faulthandler.register(signal.SIGUSR1, sys.__stderr__, all_threads=True)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        GLOO_SOCKET_IFNAME="lo",
    )
    if library:
        os.environ["ROTE_LIBRARY"] = library
    # A rank ends by SIGKILL: what it leaves in temporary directories goes with the pool's.
    tempfile.tempdir = os.path.dirname(log)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    connection.send(("pass", None))
    while True:
        try:
            module, name, kwargs = connection.recv()
        except EOFError:
            return
        reset()
        try:
            case: Any = importlib.import_module(module)
            for part in name.split("."):
                case = getattr(case, part)
            answer = ("pass", case(**kwargs))
        except CaseSkipped as skipped:
            answer = ("skip", str(skipped))
        except BaseException:
            answer = ("fail", traceback.format_exc())
        reset()
        connection.send(answer)


def reset() -> None:
    """Settings of the process that a case may have left changed."""
    import logging
    import warnings

    import torch

    torch.manual_seed(0)
    random.seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)
    torch.set_autocast_enabled("cpu", False)
    torch.use_deterministic_algorithms(False)
    warnings.resetwarnings()
    logging.getLogger("rote").handlers.clear()
