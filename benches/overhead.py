"""What one training step costs beyond its kernels: eager DTensor, and the ways to be rid of it.

    python benches/overhead.py            (part of `make bench`)

The step is a Llama's: 4 blocks, batch 2, sequence 32, width 64, 8 heads,
feed-forward 128, tensor plus sequence parallel over 8 ranks, fused AdamW, one
thread. The process group is PyTorch's fake one, which answers at once with a
local copy, so what is measured is the host's work and not a network.

Rows, all in one process and taken in turn, round after round:

- eager DTensor: the script as written.
- local eager: the same step written by hand for one rank. Local shards in plain
  `nn.Module`s, the same collectives called on the process group directly. The
  fastest that a person gets in eager PyTorch without DTensor.
- torch.compile: forward and loss compiled (and with them the backward), with
  static shapes. PyTorch excludes the fused optimizer from compilation itself.
- rote: the eager DTensor step under `rote.capture`.

Floor: what the kernels alone cost. Every local op of one eager step that does
work (no views) is called again by itself from C++ with its recorded arguments,
into a preallocated result where ATen has such an overload, less the cost of
calling an op that does nothing (`kernel_time.cpp`). To their sum come the
copies that the fake process group makes in a collective: its time less that of
an all-reduce, for which the fake group does nothing.

Erased share: (eager - row) / (eager - floor). It could only be lower with a
floor of zero; that bound is reported beside it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import cpp_extension
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
from llama_model import Llama, LlamaConfig, parallelize

RANKS = 8
BATCH, SEQUENCE = 2, 32
CONFIG = LlamaConfig(vocab=256, layers=4, width=64, heads=8, kv_heads=8, feed_forward=128, max_sequence=SEQUENCE)

Step = Callable[[Tensor, Tensor], Tensor]


def note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# The rows. Each builds its own model from the same seed.


def sharded_model(mesh: DeviceMesh) -> Llama:
    torch.manual_seed(0)
    return parallelize(Llama(CONFIG), mesh)


def fused_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def training_step(forward: Step, opt: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = forward(tokens, labels)
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


def forward_and_loss(model: Callable[[Tensor], Tensor]) -> Step:
    def forward(tokens: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())

    return forward


def eager_row(mesh: DeviceMesh) -> Step:
    model = sharded_model(mesh)
    return training_step(forward_and_loss(model), fused_adamw(model))


def compiled_row(mesh: DeviceMesh, backend: str) -> Step:
    model = sharded_model(mesh)
    forward = torch.compile(forward_and_loss(model), backend=backend, dynamic=False)
    return training_step(forward, fused_adamw(model))


def rote_row(mesh: DeviceMesh, plans: str) -> Any:
    import rote

    model = sharded_model(mesh)
    opt = fused_adamw(model)
    step = training_step(forward_and_loss(model), opt)
    return rote.capture(step, state={"model": model, "opt": opt}, plans=plans)


def gather_sequence(x: Tensor) -> Tensor:
    """(batch, sequence / ranks, width) of every rank to (batch, sequence, width)."""
    batch, part, width = x.shape
    out = x.new_empty(RANKS * batch, part, width)
    dist.all_gather_into_tensor(out, x.contiguous())
    return out.view(RANKS, batch, part, width).transpose(0, 1).reshape(batch, RANKS * part, width)


def reduce_scatter_sequence(x: Tensor) -> Tensor:
    """The sum over ranks of (batch, sequence, width), this rank's part of the sequence."""
    batch, sequence, width = x.shape
    part = sequence // RANKS
    parts = x.view(batch, RANKS, part, width).transpose(0, 1).contiguous()
    out = x.new_empty(batch, part, width)
    dist.reduce_scatter_tensor(out, parts.view(RANKS * batch, part, width))
    return out


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return gather_sequence(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return reduce_scatter_sequence(grad)


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return reduce_scatter_sequence(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return gather_sequence(grad)


class GatherVocabulary(torch.autograd.Function):
    """Logits of this rank's part of the vocabulary to all logits, known to every rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        batch, sequence, part = x.shape
        out = x.new_empty(RANKS * batch, sequence, part)
        dist.all_gather_into_tensor(out, x)
        return out.view(RANKS, batch, sequence, part).permute(1, 2, 0, 3).reshape(batch, sequence, RANKS * part)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.chunk(RANKS, dim=-1)[dist.get_rank()]


def local_row(mesh: DeviceMesh) -> Step:
    """The step of `eager_row`, written by hand for one rank."""
    model = Llama(CONFIG)
    shards = dict(sharded_model(mesh).named_parameters())
    for name, shard in shards.items():
        owner, _, leaf = name.rpartition(".")
        local = torch.nn.Parameter(shard.to_local().detach().clone())
        setattr(model.get_submodule(owner), leaf, local)
    vocab_part = CONFIG.vocab // RANKS
    vocab_start = dist.get_rank() * vocab_part
    gather, scatter = Gather.apply, Scatter.apply
    replicated = [p for name, p in model.named_parameters() if "norm" in name]

    def embed(tokens: Tensor) -> Tensor:
        local = tokens - vocab_start
        elsewhere = (local < 0) | (local >= vocab_part)
        rows = model.embedding(local.masked_fill(elsewhere, 0))
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    def logits(tokens: Tensor) -> Tensor:
        x = scatter(embed(tokens))
        for block in model.blocks:
            x = x + scatter(block.attention(gather(block.attention_norm(x))))
            x = x + scatter(block.feed_forward(gather(block.feed_forward_norm(x))))
        return GatherVocabulary.apply(model.output(gather(model.norm(x))))

    forward, opt = forward_and_loss(logits), fused_adamw(model)

    def step(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = forward(tokens, labels)
        loss.backward()
        for parameter in replicated:  # each rank saw its part of the sequence
            dist.all_reduce(parameter.grad)
        opt.step()
        opt.zero_grad()
        return loss.detach()

    return step


# The floor.


class Recorder(TorchDispatchMode):
    """Every op that DTensor runs on plain tensors, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor runs it, and its local ops come back here.
        self.calls.append((func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


NO_WORK = ("_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd", "profiler::")


def works(func: Any) -> bool:
    return not func.is_view and not func.name().startswith(NO_WORK)


def signature(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """Calls of equal signature cost the same and are measured once."""
    leaves, _ = tree_flatten((args, kwargs))
    return func, *((x.dtype, x.shape, x.stride()) if isinstance(x, Tensor) else repr(x) for x in leaves)


def build_kernel_time(directory: Path) -> Any:
    """The module of `kernel_time.cpp`, compiled against the installed torch."""
    source = Path(__file__).with_name("kernel_time.cpp")
    library = directory / f"kernel_time-{torch.__version__}.so"
    if not library.exists() or library.stat().st_mtime < source.stat().st_mtime:
        note("compiling kernel_time.cpp")
        directory.mkdir(parents=True, exist_ok=True)
        includes = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-O2", "-shared", "-fPIC"]
        command += ["-DTORCH_EXTENSION_NAME=kernel_time", *(f"-I{path}" for path in includes)]
        command += [str(source), "-o", str(library)]
        command += [f"-L{path}" for path in cpp_extension.library_paths()]
        command += ["-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"]
        subprocess.run(command, check=True)
    spec = importlib.util.spec_from_file_location("kernel_time", library)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def out_overload(func: Any) -> Any | None:
    """The overload of `func` that writes into results it is given, if ATen has one."""
    packet = func.overloadpacket
    wanted = [(a.name, str(a.type)) for a in func._schema.arguments]
    for name in packet.overloads():
        other = getattr(packet, name)
        inputs = [(a.name, str(a.type)) for a in other._schema.arguments if not a.is_out]
        if inputs == wanted and len(inputs) < len(other._schema.arguments):
            return other
    return None


def kernel_microseconds(kernel_time: Any, func: Any, args: Any, kwargs: Any) -> float:
    """Time of one call without dispatch; the better of allocating and preallocated results."""
    # Copies, because some ops write to their arguments; and a Python number where
    # the schema says tensor (`x - 0`) becomes the tensor that Python makes of it.
    args, kwargs = tree_map_only(Tensor, torch.clone, (args, kwargs))
    args = tuple(
        torch.tensor(x) if str(a.type) == "Tensor" and isinstance(x, int | float) else x
        for x, a in zip(args, func._schema.arguments, strict=False)
    )
    variants = [(func, kwargs)]
    if (out := out_overload(func)) is not None:
        results = func(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        names = [a.name for a in out._schema.arguments if a.is_out]
        variants.append((out, kwargs | dict(zip(names, results, strict=True))))
    times = []
    for op, keywords in variants:
        name, _, overload = op.name().partition(".")
        runs = [kernel_time.time_call(name, overload, 50, args, **keywords) for _ in range(9)]
        times.append(statistics.median(call - empty for call, empty in runs))
    return max(0.0, min(times))


def microseconds(call: Callable[[], Any]) -> float:
    means = []
    for _ in range(9):
        start = time.perf_counter()
        for _ in range(50):
            call()
        means.append(1e6 * (time.perf_counter() - start) / 50)
    return statistics.median(means)


def collective_microseconds(func: Any, x: Tensor) -> float:
    """The copies that the fake group makes in one collective on `x`."""
    group, x = dist.group.WORLD, x.contiguous()
    nothing = microseconds(lambda: group.allreduce([x]))
    match func.name().removeprefix("_c10d_functional::"):
        case "all_reduce":
            return 0.0
        case "all_gather_into_tensor":
            out = x.new_empty(RANKS * x.shape[0], *x.shape[1:])
            whole = microseconds(lambda: group._allgather_base(out, x))
        case "reduce_scatter_tensor":
            out = x.new_empty(x.shape[0] // RANKS, *x.shape[1:])
            whole = microseconds(lambda: group._reduce_scatter_base(out, x))
        case other:
            raise NotImplementedError(f"the floor knows no collective {other}")
    return max(0.0, whole - nothing)


def floor_milliseconds(kernel_time: Any, step: Step, batch: tuple[Tensor, Tensor]) -> tuple[float, dict[str, Any]]:
    with Recorder() as recorder:
        step(*batch)
    calls = {signature(*call): call for call in recorder.calls if works(call[0])}
    counts = Counter(signature(*call) for call in recorder.calls if works(call[0]))
    by_op: Counter[str] = Counter()
    with torch.no_grad():
        for key, (func, args, kwargs) in calls.items():
            if func.namespace == "_c10d_functional":
                each = collective_microseconds(func, args[0])
            else:
                each = kernel_microseconds(kernel_time, func, args, kwargs)
            by_op[str(func)] += counts[key] * each / 1e3
    return sum(by_op.values()), {
        "local_ops": len(recorder.calls),
        "working_ops": sum(counts.values()),
        "milliseconds_by_op": dict(by_op.most_common()),
    }


# Measuring.


def same_as(reference: list[Tensor], losses: list[Tensor]) -> str:
    if all(map(torch.equal, reference, losses)):
        return "bit for bit"
    close = all(torch.allclose(a, b, rtol=1e-3) for a, b in zip(reference, losses, strict=True))
    return "close" if close else "NO"


def measure(rows: dict[str, Step], batch: tuple[Tensor, Tensor], rounds: int) -> dict[str, Any]:
    """Milliseconds of every step; the rows take turns so that drift hits them alike."""
    samples: dict[str, list[float]] = {name: [] for name in rows}
    for done in range(rounds):
        for name, step in rows.items():
            step(*batch)  # brings this row's code and data back into the caches
            for _ in range(4):
                start = time.perf_counter()
                step(*batch)
                samples[name].append(1e3 * (time.perf_counter() - start))
        if (done + 1) % 10 == 0:
            note(f"round {done + 1}/{rounds}")
    return {
        name: {
            "median_ms": statistics.median(times),
            "quartiles_ms": statistics.quantiles(times, n=4)[::2],
            "runs": len(times),
            "samples_ms": times,
        }
        for name, times in samples.items()
    }


def recording_milliseconds(mesh: DeviceMesh, batch: tuple[Tensor, Tensor]) -> list[float]:
    """Times of the calls of a fresh capture up to, not including, its first replay."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as plans:
        step = rote_row(mesh, plans)
        while len(times) < 10:
            start = time.perf_counter()
            step(*batch)
            elapsed = 1e3 * (time.perf_counter() - start)
            if step.stats.replays:
                break
            times.append(elapsed)
    return times


def build_rows(
    mesh: DeviceMesh, batch: tuple[Tensor, Tensor], plans: str
) -> tuple[dict[str, Step], dict[str, str], dict[str, str]]:
    """The rows that run, how their first losses compare, and why others do not run."""
    builders: dict[str, Callable[[], Step]] = {
        "eager DTensor": lambda: eager_row(mesh),
        "local eager, by hand": lambda: local_row(mesh),
        "torch.compile aot_eager": lambda: compiled_row(mesh, "aot_eager"),
        "torch.compile inductor": lambda: compiled_row(mesh, "inductor"),
        "rote": lambda: rote_row(mesh, plans),
    }
    rows: dict[str, Step] = {}
    losses: dict[str, list[Tensor]] = {}
    missing: dict[str, str] = {}
    for name, build in builders.items():
        note(f"warming up: {name}")
        start = time.perf_counter()
        try:
            step = build()
            losses[name] = [step(*batch) for _ in range(8)]
            rows[name] = step
        except Exception as error:  # a row that cannot run is said so in the table
            missing[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            note(f"  does not run: {missing[name]}")
        note(f"  {time.perf_counter() - start:.1f} s")
    same = {name: same_as(losses["eager DTensor"], ours) for name, ours in losses.items()}
    return rows, same, missing


# Reporting.


def print_table(result: dict[str, Any]) -> None:
    rows, eager = result["rows"], result["rows"]["eager DTensor"]["median_ms"]
    rote = rows["rote"]["median_ms"] if "rote" in rows else None

    def against_rote(ms: float) -> str:
        return f"{ms / rote:.2f}x" if rote else "-"

    print(f"\n{'':<26}{'ms':>8}{'eager /':>10}{'/ rote':>9}{'erased':>9}{'runs':>7}   losses")
    for name, row in rows.items():
        ms = row["median_ms"]
        print(
            f"{name:<26}{ms:8.2f}{eager / ms:9.1f}x{against_rote(ms):>9}"
            f"{row['erased_share']:9.1%}{row['runs']:7}   {row['losses']}"
        )
    floor = result["floor_ms"]
    print(f"{'floor: kernels alone':<26}{floor:8.2f}{eager / floor:9.1f}x{against_rote(floor):>9}")
    for name, reason in result["missing"].items():
        print(f"{name:<26} does not run: {reason}")
    if "rote" in rows:
        bound = rows["rote"]["erased_share_floor_zero"]
        print(f"\nerased by rote: {rows['rote']['erased_share']:.1%} (with a floor of 0: {bound:.1%})")
        calls = ", ".join(f"{ms / eager:.1f}" for ms in result["recording_ms"])
        print(f"calls before the first replay, in eager steps: {calls}")


def plot(result: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [*result["rows"], "floor: kernels alone"]
    values = [row["median_ms"] for row in result["rows"].values()] + [result["floor_ms"]]
    colors = ["tab:orange" if name == "rote" else "tab:gray" for name in names]
    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, labels=[f"{value:.2f} ms" for value in values], padding=4)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds per training step (median)")
    axes.set_title("4 Llama blocks, TP + sequence parallel, fake group of 8, one thread")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.15)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("target/bench"), help="output directory")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of 4 steps of each row")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    generator = torch.Generator().manual_seed(1)
    batch = (
        torch.randint(CONFIG.vocab, (BATCH, SEQUENCE), generator=generator),
        torch.randint(CONFIG.vocab, (BATCH, SEQUENCE), generator=generator),
    )

    with tempfile.TemporaryDirectory() as plans:
        rows, same, missing = build_rows(mesh, batch, plans)
        kernel_time = build_kernel_time(arguments.out)
        note("measuring the floor")
        floor, floor_detail = floor_milliseconds(kernel_time, rows["eager DTensor"], batch)
        measured = measure(rows, batch, arguments.rounds)
    eager = measured["eager DTensor"]["median_ms"]
    for name, row in measured.items():
        row["losses"] = same[name]
        row["erased_share"] = (eager - row["median_ms"]) / (eager - floor)
        row["erased_share_floor_zero"] = (eager - row["median_ms"]) / eager
    result = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rows": measured,
        "missing": missing,
        "floor_ms": floor,
        "floor": floor_detail,
        "recording_ms": recording_milliseconds(mesh, batch) if "rote" in rows else [],
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "overhead.json").write_text(json.dumps(result, indent=1))
    plot(result, arguments.out / "overhead.png")
    print_table(result)
    print(f"\nsaved {arguments.out / 'overhead.json'} and {arguments.out / 'overhead.png'}")


if __name__ == "__main__":
    main()
