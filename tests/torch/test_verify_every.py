"""`verify_every=` finds a replay that has gone wrong, names the instruction, and goes on eagerly."""

import json
import re
import warnings
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint32, c_void_p
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY, Calls, Capture, check_right, rote_capture
from test_agreement import numbers, summed
from torch import Tensor, nn

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="about faults of replays")

EVERY = 4
WARM = 11  # calls before the fault, the last right one of them beside eager


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.table = nn.Embedding(8, 6)
        self.register_buffer("seen", torch.zeros(6))
        self.register_buffer("fixed", torch.linspace(0.5, 1.5, 6))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.sum(0), alpha=0.1)
        x = self.first(x) * 1.25 - self.table(ids)
        x = torch.softmax(x, 1) @ self.second.weight[1:4].t()
        # An op on constants alone: passes run it once.
        x = x + torch.arange(3, dtype=torch.float32) / 7
        return (x.relu() / (self.seen[:3].abs() + 2)).exp()


def script_of(passes: str, plant: Callable[[Any], None] | None, found: list[Any]) -> Callable[[Capture], Calls]:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(1)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

        def step(x: Tensor, ids: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x, ids).mean()
            loss.backward()
            optimizer.step()
            return loss

        captured = capture(step, state={"model": model, "opt": optimizer}, verify_every=EVERY, passes=passes)
        for i in range(WARM + 6):
            if i == WARM and plant is not None and captured is not step:
                plant(captured)
            yield captured(torch.randn(5, 6), torch.randint(0, 8, (5,)))
        found.append(captured)
        return {"model": model, "opt": optimizer}

    return script


def planted(captured: Any, op: str, fault: str, bound: bool, nth: int) -> int:
    """Makes the plan wrong; the instruction."""
    from rote._captured import step_of
    from rote._native import lib

    step = step_of(captured)
    variant = step.variant.value
    program = json.loads(lib.rote_session_program(step.session, variant))
    places = [i for i, row in enumerate(program) if op in row["text"]]
    lib.rote_session_plant.argtypes = [c_void_p, c_uint32, c_uint32, c_int, c_char_p]
    status = lib.rote_session_plant(step.session, variant, places[nth], bound, fault.encode())
    assert status == 0, (op, fault, places)
    return places[nth]


# The op, what is made wrong, which of these ops, and whether it is wrong in what passes have made only.
FAULTS = [
    ("aten::add.Tensor(", "number", 1, False),
    ("aten::mul.Tensor(", "number", 0, False),
    ("aten::mul_.", "number", 0, False),
    ("aten::add_.", "number", 0, False),
    ("aten::add_.", "drop", 0, False),
    ("aten::sub.Tensor(", "swap", 0, False),
    ("aten::sub.Tensor(", "aten::add.Tensor", 0, False),
    ("aten::relu(", "aten::neg", 0, False),
    ("aten::exp(", "aten::sin", 0, False),
    ("aten::div.Tensor(", "swap", 1, False),
    ("aten::threshold_backward(", "swap", 0, False),
    ("view %", "offset", 2, False),
    ("aten::mul_.", "drop", 0, True),
    ("aten::add_.", "drop", 0, True),
    ("aten::add_.", "drop", -1, True),
    ("aten::add_.", "number", -1, True),
    ("aten::sub.Tensor(", "swap", 0, True),
    ("aten::sub.Tensor(", "aten::add.Tensor", 0, True),
    ("aten::relu(", "aten::neg", 0, True),
    ("aten::exp(", "aten::sin", 0, True),
    ("aten::exp(", "stale", 0, True),
    ("aten::sub.Tensor(", "stale", 0, True),
    ("aten::_softmax(", "stale", 0, True),
    ("aten::threshold_backward(", "swap", 0, True),
    ("aten::div.Tensor(", "number", 0, True),
    ("view %", "offset", 2, True),
]


@pytest.mark.sampled(12)
@pytest.mark.ranks(1, faults=True)
@pytest.mark.parametrize("passes", ["default", "none"])
@pytest.mark.parametrize(("op", "fault", "nth", "bound"), FAULTS)
def test_planted_faults_are_named(op: str, fault: str, nth: int, bound: bool, passes: str) -> None:
    planned: list[int] = []
    found: list[Any] = []
    plant = lambda captured: planned.append(planted(captured, op, fault, bound, nth))  # noqa: E731
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script = script_of(passes, plant, found)
        # The call that is verified goes on with eager's results, and so do all later ones.
        run_until_wrong(script)
    told = [str(each.message) for each in caught if "differs from eager" in str(each.message)]
    assert len(told) == 1, told
    named = re.search(r"instruction (\d+) \(", told[0])
    assert named is not None, told
    captured = found[0]
    assert int(named[1]) == planned[0], told
    path = Path(told[0].split("; see ")[1].split(";")[0])
    report = path.read_text()
    assert f"first difference: instruction {planned[0]} (" in report
    assert "elements differ" in report or fault == "drop" or not bound, report
    stats = captured.stats
    assert stats.verified >= 3 and stats.refusals, stats
    # What the first replay keeps is right then, and wrong at the next call beside eager.
    assert stats.replays == WARM - 2 + (EVERY if fault == "stale" else 0), stats


def run_until_wrong(script: Callable[[Capture], Calls]) -> None:
    for _ in script(rote_capture):
        pass


def test_without_a_fault_all_is_equal_and_counted() -> None:
    found: list[Any] = []
    run = check_right(script_of("default", None, found))
    assert run.stats[-1][0].verified == (WARM + 6) // EVERY
    assert not run.stats[-1][0].refusals


@pytest.mark.ranks(2, timeout=90, faults=True)
@pytest.mark.parametrize("passes", ["default", "+buckets,+sums"])
def test_ranks_stop_together(passes: str, tmp_path: Path) -> None:
    """The plan of one rank goes wrong: all ranks go on eagerly, and this one reports."""

    def step(x: Tensor) -> list[Tensor]:
        y = x * 2
        total = summed(y) + summed(y - 1)
        return [total.sin(), summed(total.cos())]

    def script(capture: Capture) -> Calls:
        captured = capture(step, verify_every=EVERY, passes=passes, plans=tmp_path / str(dist.get_rank()))
        for i in range(WARM + 6):
            if i == WARM and captured is not step and dist.get_rank() == 1:
                planted(captured, "aten::sin(", "aten::cos", False, 0)
            yield captured(numbers(i))
        return {}

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = check_right(script)
    told = [str(each.message) for each in caught if "differs from eager" in str(each.message)]
    assert len(told) == 1, [str(each.message) for each in caught]
    assert ("instruction" in told[0]) == (dist.get_rank() == 1), told
    assert "rank 1" in told[0] or dist.get_rank() == 1, told
    assert run.stats[-1][0].refusals


class Counted:
    steps = 0


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:rote")
def test_another_rank_raises_and_the_host_counts_once() -> None:
    """The rank whose call did not raise has counted, and has stepped its scheduler."""

    def script(capture: Capture) -> Any:
        torch.manual_seed(0)
        model = nn.Embedding(5, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        counted = Counted()

        def step(words: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
            counted.steps += 1
            optimizer.zero_grad()
            loss = model(words).square().mean()
            loss.backward()
            dist.all_reduce(model.weight.grad)
            optimizer.step()
            found = torch.nn.functional.embedding(more, model.weight.detach())
            scheduler.step()
            return found.sum()

        captured = capture(step, state={"model": model, "optimizer": optimizer}, verify_every=2)
        for call in range(14):
            more = torch.tensor([9 if dist.get_rank() == 0 and call == 9 else call % 5])
            try:
                found: Any = captured(torch.tensor([call % 5]), more)
            except IndexError:
                found = "raised"
            if dist.get_rank() == 1:  # what the other rank's host has done before it raised is not put back
                yield found, counted.steps, scheduler.last_epoch
            else:
                yield None
        return model if dist.get_rank() == 1 else None

    check_right(script)
