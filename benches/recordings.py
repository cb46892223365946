"""What recordings cost, and the guards of one call: in steps of the script as written, on one thread.

    python benches/recordings.py                  (part of `make bench`)
    python benches/recordings.py --captures 9     more runs

Steps: the headline Llama of `benches/overhead.py`, and the Llama of Hugging Face's
`transformers` of the same size, tensor parallel over a fake group of 8, with default
AdamW (skipped where `transformers` is not installed; `make test-wild` installs it).

For each step, a process captures it anew several times. Counted is the CPU time of each call
until calls are replayed, over the median of eager steps that run in turn with the captures. The
first capture of the process is told apart: then Rote decodes code, and parses source, that
later recordings of the process find decoded. Guards: what one check of all guards takes.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from ctypes import byref, c_int
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from steps.llama import llama
from steps.subject import RANKS, forward_and_loss, mesh, training_step
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

CALLS = 16
"""At most so many calls until one is replayed."""
EAGER_STEPS = 9
CHECKS = 500


@dataclass(frozen=True)
class Script:
    """A step, the state that it trains, and what it is called with."""

    label: str
    step: Callable[..., Any]
    state: dict[str, Any]
    batch: Callable[[], tuple[Any, ...]]


def headline() -> Script:
    subject = llama("Llama of examples/, TP + SP, fused AdamW")
    model = subject.model()
    opt = subject.optimizer(model)
    step = training_step(forward_and_loss(model, subject.loss), opt)
    return Script(subject.label, step, {"model": model, "opt": opt}, subject.batch)


def hugging_face() -> Script | None:
    try:
        import transformers
    except ImportError:
        return None
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8}
    config = transformers.LlamaConfig(vocab_size=256, num_key_value_heads=8, max_position_embeddings=32, **sizes)
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config).train()
    plan: dict[str, Any] = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
    parallelize_module(model, mesh(RANKS), plan)
    opt = torch.optim.AdamW(model.parameters())

    def step(ids: Tensor) -> Any:
        opt.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        opt.step()
        return loss.item()

    def batch() -> tuple[Tensor]:
        return (torch.randint(0, 256, (2, 32)),)

    label = f"Llama of transformers {transformers.__version__}, TP, default AdamW"
    return Script(label, step, {"model": model, "opt": opt}, batch)


def seconds(call: Callable[..., Any], *args: Any) -> float:
    began = time.thread_time()
    call(*args)
    return time.thread_time() - began


def recorded(script: Script) -> tuple[list[float], float]:
    """Seconds of the calls up to the last recording, and of one check of all guards."""
    import rote
    from rote._native import check, lib

    with tempfile.TemporaryDirectory() as plans:
        captured: Any = rote.capture(script.step, state=script.state, plans=plans)
        costs = []
        while captured.stats.replays == 0:
            if len(costs) == CALLS:
                raise SystemExit(f"{script.label} does not replay: {captured.stats}")
            costs.append(seconds(captured, *script.batch()))
        for _ in range(3):
            captured(*script.batch())
        step = type(captured).__dict__["_step"].__get__(captured)
        batch, holds = script.batch(), c_int()
        began = time.thread_time()
        for _ in range(CHECKS):
            check(lib.rote_session_holds(step.session, batch, {}, byref(holds)))
        guards = (time.thread_time() - began) / CHECKS
        if not holds.value:
            raise SystemExit(f"the guards of {script.label} do not hold")
    return costs[:-1], guards


def measure(script: Script, captures: int) -> None:
    for _ in range(3):
        script.step(*script.batch())
    steps: list[float] = []
    runs: list[list[float]] = []
    guards: list[float] = []
    for _ in range(captures):
        steps += [seconds(script.step, *script.batch()) for _ in range(EAGER_STEPS)]
        costs, check = recorded(script)
        runs.append(costs)
        guards.append(check)
    eager = statistics.median(steps)
    print(f"{script.label}: eager step {eager * 1e3:.1f} ms, {len(steps)} steps; {captures} captures")
    print("  call       first capture   later captures, in eager steps")
    for call in range(max(map(len, runs))):
        later = [costs[call] for costs in runs[1:] if call < len(costs)]
        first = f"{runs[0][call] / eager:13.1f}" if call < len(runs[0]) else " " * 13
        rest = f"{statistics.median(later) / eager:17.1f}" if later else ""
        print(f"  {call:4} {first}{rest}")
    print(f"  guards of one call: {statistics.median(guards) * 1e6:.0f} us, median of {captures} times {CHECKS} checks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captures", type=int, default=5, help="how often each step is captured anew")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    for script in (headline(), hugging_face()):
        if script is None:
            print("Llama of transformers: skipped, transformers is not installed (make test-wild installs it)")
            continue
        measure(script, options.captures)


if __name__ == "__main__":
    main()
