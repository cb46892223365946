"""A profiler sees in a replay what it sees in eager: the ops by their names, the
collectives, the lines of the script; and a replay is the same with it."""

import inspect
import json
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import Mlp, column_then_row, inputs, mesh
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, rote_capture
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, schedule
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="only replays have these ranges")

Step = Callable[[Tensor], Tensor]
Names = Counter[str]

KERNELS = {"aten::addmm", "aten::mm", "aten::relu", "aten::threshold_backward", "aten::sum", "aten::_fused_adamw_"}
"""What the step of these tests computes with, whatever passes do."""


def training(capture: Callable[..., Any], **options: Any) -> Step:
    """A model with a collective each way, and its optimizer."""
    torch.manual_seed(0)
    model = column_then_row(Mlp(), mesh(2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    step = capture(train_step, state={"model": model, "optimizer": optimizer}, **options)
    for x in inputs(5, 4, 8):
        step(x)
    return step


def eager(fn: Step, **_: Any) -> Step:
    return fn


def profiled(step: Step, **options: Any) -> profile:
    x = next(inputs(1, 4, 8, seed=7))
    with profile(activities=[ProfilerActivity.CPU], **options) as profiler:
        step(x)
    return profiler


def is_op(name: str) -> bool:
    return name.startswith(("aten::", "_c10d_functional::")) and " " not in name


def called(profiler: profile) -> Names:
    """Ops that no other op called."""
    names: Names = Counter()
    for event in profiler.events():
        above = event.cpu_parent
        while above is not None and not is_op(above.name):
            above = above.cpu_parent
        if is_op(event.name) and above is None:
            names[event.name] += 1
    return names


class LocalOps(TorchDispatchMode):
    """The ops that do work which DTensor runs on plain tensors, by the names that profilers use."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Names = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        if not func.is_view and func.namespace == "aten":
            self.names[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def collectives(names: Names) -> Names:
    return Counter({name: n for name, n in names.items() if name.startswith("_c10d_functional::")})


def everything(profiler: profile) -> Names:
    return Counter(event.name for event in profiler.events())


@pytest.mark.ranks(2)
def test_a_replay_shows_the_ops_of_eager() -> None:
    reference = training(eager)
    x = next(inputs(1, 4, 8))
    with LocalOps() as local:
        reference(x)
    # In eager, each stands below a global op of the same name, among much else.
    expected = everything(profiled(reference))
    recorded = called(profiled(training(rote_capture, strict=True, passes="none")))
    assert recorded == local.names + collectives(expected)
    assert recorded.keys() <= expected.keys()
    assert collectives(recorded).total() >= 2

    optimized = called(profiled(training(rote_capture, strict=True)))
    assert recorded.keys() >= KERNELS
    for name in [*KERNELS, *collectives(recorded)]:
        assert optimized[name] == recorded[name], name
    assert optimized.total() < recorded.total()


@pytest.mark.ranks(2)
def test_one_range_is_the_step_and_ranges_in_it_say_why() -> None:
    profiler = profiled(training(rote_capture, strict=True))
    (step,) = [event for event in profiler.events() if event.name.startswith("rote::")]
    assert step.name.startswith("rote::replay test_profiler.py:training.")
    roots = {event.name for event in profiler.events() if event.cpu_parent is None}
    assert {name for name in roots if not name.startswith("gloo:")} == {step.name}, roots  # gloo has threads

    def above(event: Any) -> list[str]:
        return [] if event.cpu_parent is None else [*above(event.cpu_parent), event.cpu_parent.name]

    here, models = Path(__file__).name, Path(inspect.getfile(Mlp)).name
    paths = {(*above(event), event.name) for event in profiler.events()}
    up = line_of("self.down(F.relu(self.up(x)))", Mlp.forward)
    backward = line_of("loss.backward()", training)
    assert (step.name, f"aten::addmm ({models}:{up})", "aten::addmm") in paths
    assert (step.name, f"aten::mm ({here}:{backward})", "aten::mm") in paths
    reduction = f"redistribute P(sum) -> R ({models}:{up})"
    assert any(reduction in path and path[-1].startswith("_c10d_functional::all_reduce") for path in paths), paths


def line_of(text: str, function: Any) -> int:
    lines, first = inspect.getsourcelines(function)
    (at,) = [at for at, line in enumerate(lines) if text in line]
    return first + at


@pytest.mark.ranks(2)
def test_what_is_shown_are_the_steps_in_the_window() -> None:
    step = training(rote_capture, strict=True)
    x = next(inputs(1, 4, 8))
    with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=2, warmup=1, active=2)) as profiler:
        for _ in range(5):
            step(x)
            profiler.step()
    assert sum(event.name.startswith("rote::replay") for event in profiler.events()) == 2

    table = profiler.key_averages().table(sort_by="self_cpu_time_total")
    assert "aten::addmm" in table and "_c10d_functional::all_reduce" in table


@pytest.mark.ranks(2)
def test_the_exported_trace_is_json_with_shapes_of_collectives() -> None:
    profiler = profiled(training(rote_capture, strict=True), record_shapes=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    named: dict[str, list[Any]] = {}
    for event in events:
        named.setdefault(event.get("name", ""), []).append(event)
    (step,) = [event for name, found in named.items() if name.startswith("rote::replay") for event in found]
    assert step["cat"] == "user_annotation"
    (reduced, *_) = named["_c10d_functional::all_reduce"]
    assert reduced["cat"] == "cpu_op"
    assert reduced["args"]["Input Dims"] == [[4, 8]]
    assert step["ts"] <= reduced["ts"] <= step["ts"] + step["dur"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", [0, 1, 2])  # of a replay without an arena, with one, or neither
def test_a_profiler_changes_no_bit(first: int) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = column_then_row(Mlp(), mesh(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = F.dropout(model(x), 0.5).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        state = {"model": model, "optimizer": optimizer}
        step = capture(train_step, state=state)
        for i, x in enumerate(inputs(26, 4, 8)):
            if i % 3 == first and step is not train_step:
                with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=i % 2 == 0):
                    result = step(x)
            else:
                result = step(x)
            yield result
        return state

    check_equal(script)


@pytest.mark.ranks(2)
def test_a_step_that_fails_ends_its_ranges() -> None:
    """What is profiled after a replay that fails does not lie in its ranges."""

    table = torch.randn(4, 4)

    def step(tokens: Tensor) -> Tensor:
        return F.embedding(tokens, table)

    captured = rote_capture(step, state={"table": table}, strict=True)
    for _ in range(4):
        captured(torch.tensor([3, 1]))
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        with pytest.raises(IndexError, match="index out of range"):
            captured(torch.tensor([4, 1]))
        torch.ones(3).neg()
    names = [event.name for event in profiler.events()]
    assert sum(name.startswith("rote::replay") for name in names) == 1
    (after,) = [event for event in profiler.events() if event.name == "aten::neg"]
    assert after.cpu_parent is None
