"""Plans that somebody altered and that still pass every check: a replay stays inside the caller's tensors.

A plan file with a fitting checksum is replayed at once with `trust_plans=True`, on tensors whose memory lies
between bytes that must not change. What it computes does not matter; it may also be refused, or raise. It must
not crash, hang, or write beyond a storage. `scripts/sanitize.sh` runs this file with the bridge under
AddressSanitizer, which sees reads too. The seed is printed.
"""

import os
import random
import struct
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import xxhash
from extent import EVERYTHING
from oracle import ORACLE_ONLY
from torch import Tensor

BATCH = 250  # files that a process replays
BATCHES = 40 if EVERYTHING else 1
HEADER_BYTES = 64
MARGIN = 4096
CANARY = 0xA5

Step = Callable[[Tensor, Tensor], Tensor]


class Guarded:
    """Tensors of exactly their bytes, with canaries before and behind."""

    def __init__(self) -> None:
        self.memory: list[bytearray] = []

    def tensor(self, *shape: int) -> Tensor:
        n = torch.Size(shape).numel() * 4
        memory = bytearray([CANARY]) * (n + 2 * MARGIN)
        self.memory.append(memory)
        made = torch.frombuffer(memory, dtype=torch.float32, count=n // 4, offset=MARGIN).view(shape)
        with torch.no_grad():
            made.copy_(torch.randn(shape))
        return made

    def check(self) -> None:
        for memory in self.memory:
            for margin in (memory[:MARGIN], memory[-MARGIN:]):
                assert margin.count(CANARY) == MARGIN, "a replay wrote beyond a storage"


def views(x: Tensor, w: Tensor) -> Tensor:
    part = x[1:3].t()
    part.mul_(0.5)
    x.as_strided((2, 2), (4, 1), 3).add_(1.0)
    return (x @ w).narrow(0, 1, 2).relu() + x.select(1, 2).sum()


def reduces(x: Tensor, w: Tensor) -> Tensor:
    parts = torch.cat([x.flatten(), w.flatten()]).split(8)
    w.sub_(0.1 * (x.t() @ x))
    return torch.stack([part.sum() for part in parts[:3]]).softmax(0)


def trains(x: Tensor, w: Tensor) -> Tensor:
    weight = w.detach().requires_grad_()
    loss = (x @ weight).square().mean()
    (grad,) = torch.autograd.grad(loss, weight)
    torch._foreach_add_([w], [grad], alpha=-0.1)
    return loss.detach()


STEPS: dict[str, Step] = {"views": views, "reduces": reduces, "trains": trains}


def seal(data: bytearray) -> None:
    """Makes length and checksum fit, by docs/plan-format.md."""
    data[16:24] = struct.pack("<Q", len(data) - HEADER_BYTES)
    data[24:32] = bytes(8)
    seed = xxhash.xxh3_64_intdigest(bytes(data[:HEADER_BYTES]))
    data[24:32] = struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[HEADER_BYTES:]), seed))


def is_text(word: bytes) -> bool:
    """Names of guards, mostly: files with others of them are valid, and not for this process."""
    return sum(32 <= byte < 127 for byte in word) >= 3


def altered(data: bytes, draw: random.Random) -> bytes:
    """Some numbers of a file changed, or exchanged with others of it."""
    found = bytearray(data)
    numbers = [at for at in range(HEADER_BYTES, len(data) - 8, 4) if not is_text(data[at : at + 4])]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        width = draw.choice((4, 4, 8))
        at = draw.choice(numbers) // width * width
        old = int.from_bytes(found[at : at + width], "little")
        other = draw.choice(numbers) // width * width
        new = draw.choice(
            (
                old + 1,
                old - 1,
                old ^ (1 << draw.randrange(8 * width)),
                draw.randrange(64),
                -draw.randrange(64),
                old * 2,
                old * 1024,
                int.from_bytes(found[other : other + width], "little"),
            )
        )
        found[at : at + width] = (new % (1 << 8 * width)).to_bytes(width, "little")
    seal(found)
    return bytes(found)


def replays_altered(seed: int, folder: Path) -> None:
    """Replays `BATCH` altered files, each checked; says how many a session took as they are."""
    import rote
    from rote._native import lib

    draw = random.Random(seed)
    name, step = draw.choice(sorted(STEPS.items()))
    passes = draw.choice(("none", "default", "all"))
    store = folder / f"plans{seed}"
    recorder = rote.capture(step, plans=store, passes=passes)
    memory = Guarded()
    for _ in range(3):
        recorder(memory.tensor(4, 4), memory.tensor(4, 4))
    [path] = store.glob("*/rank0.rote")
    original = path.read_bytes()
    valid = replayed = 0
    for _ in range(BATCH):
        data = altered(original, draw)
        path.unlink()
        path.write_bytes(data)
        if lib.rote_plan_check(os.fsencode(path)) != 0:
            continue
        valid += 1
        (folder / f"last{seed}.rote").write_bytes(data)  # what a crash leaves
        captured = rote.capture(step, plans=store, passes=passes, trust_plans=True)
        memory = Guarded()
        for _ in range(4):
            try:
                captured(memory.tensor(4, 4), memory.tensor(4, 4))
            except Exception:  # PyTorch's own checks of an op's arguments
                break
        replayed += captured.stats.replays > 0 and captured.stats.recordings == 0
        memory.check()
    print(f"{name}, passes {passes}: {valid} of {BATCH} files are valid, {replayed} replayed as they are", flush=True)
    assert valid > BATCH // 20 and replayed > 0, (valid, replayed)


@pytest.mark.skipif(ORACLE_ONLY, reason="eager PyTorch reads no plans")
@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_replay_stays_inside_storages(batch: int, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30) if EVERYTHING else 20 + batch
    command = [sys.executable, __file__, str(seed), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=900)
    print(f"seed {seed}: {ended.stdout}")
    assert ended.returncode == 0, f"seed {seed}, {tmp_path}/last{seed}.rote: {ended.stdout}{ended.stderr[-6000:]}"


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    replays_altered(int(sys.argv[1]), Path(sys.argv[2]))
