"""One rank of a wrapped model alone misses a guard, raises or is killed, in the middle of the collectives of a step.

The model is wrapped by FSDP2 or DDP. A rank that only misses a guard leaves no trace: every rank ends as eager does,
and the others replay meanwhile. Where a rank raises or is killed, the others end within the timeout of their process
group, with gloo's error: the address of the peer that is gone, or a timeout. Rote adds which collective has failed.
"""

import os
import re
import time
import warnings
from datetime import timedelta
from typing import Any

import pytest
import test_ddp
import test_fsdp
import torch
import torch.distributed as dist
from extent import EVERYTHING
from models import inputs
from oracle import ORACLE_ONLY, compare, facts
from test_divergence import Fault, Planted, meet, pass_on, run_ranks, set_timeout
from torch import Tensor, nn

TIMEOUT_S = 3.0
GRACE_S = 5.0
END_S = 60.0
CALLS = 11
AT = 8  # the call with the fault
HARMLESS = ("another value", "another shape")
FOUR = pytest.param(4, marks=pytest.mark.skipif(not EVERYTHING, reason="takes minutes: make test-all"))


class PassesOn(torch.autograd.Function):
    """The op with the fault, in the forward or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return pass_on(x) if place == "forward" else x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return pass_on(grads[0]) if ctx.place == "backward" else grads[0], None


class Middle(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place

    def forward(self, x: Tensor) -> Tensor:
        return PassesOn.apply(x, self.place)  # type: ignore[no-any-return]


def wrapped(wrapper: str, place: str) -> Any:
    torch.manual_seed(0)
    net: Any = test_fsdp.Net() if wrapper == "FSDP2" else test_ddp.Net()
    if wrapper == "FSDP2":
        net.blocks[1].dropout = Middle(place)
        return test_fsdp.sharded(net, test_fsdp.line())
    net.dropout = Middle(place)
    return test_ddp.Setting(net=lambda: net).wrapped()


def run(what: dict[str, str], faulty: bool, capture: Any, found: list[Any]) -> Any:
    """Trains; `found` gets the loss of each call. Returns the state."""
    model = wrapped(what["wrapper"], what["place"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: Tensor, scale: float) -> Tensor:
        loss = (model(x) * scale).square().mean()
        if scale < 0:
            raise Planted("between the passes")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = capture(step, state=[model, optimizer])
    for call, x in enumerate(inputs(CALLS, 12, 8)):
        now = faulty and call == AT
        kind = what["kind"]
        scale = 1.0
        if call == AT and capture is not plain:
            assert captured.stats.replays >= 2, captured.stats
            set_timeout(TIMEOUT_S)
        if now and kind == "another value":
            scale = 2.0
        if now and kind == "another shape":
            x = x[:5]
        if now and kind == "raises eagerly":
            scale = -1.0
            Fault.at.value = time.monotonic()
        Fault.kind, Fault.now = kind, now and kind in ("raises", "killed")
        found.append(captured(x + dist.get_rank(), scale))
    if capture is not plain:
        found.append(captured.stats)
    return [model, optimizer]


def plain(function: Any, state: Any) -> Any:
    return function


def one_rank(rank: int, port: Any, what: dict[str, Any], at: Any, answers: Any) -> None:
    Fault.at = at
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", store=meet(rank, port), rank=rank, world_size=what["world"], timeout=timedelta(seconds=60)
    )
    import rote

    def captured(function: Any, state: Any) -> Any:
        return rote.capture(function, state=state, ignore=["kind", "now", "at"])

    faulty = rank == what["faulty"]
    found: list[Any] = []
    try:
        if what["kind"] in HARMLESS:
            losses: list[Any] = []
            expected = facts([losses, run(what, faulty, plain, losses)], kept=True)
            state = run(what, faulty, captured, found)
            stats = found.pop()
            compare(expected, facts([found, state], kept=True))
            answers.put((rank, "done", stats.replays, 0.0, ""))
        else:
            run(what, faulty, captured, found)
            answers.put((rank, "done", 0, 0.0, ""))
    except BaseException as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        answers.put((rank, type(error).__name__, len(found), time.monotonic() - at.value, text))
    answers.close()
    answers.join_thread()
    if what["kind"].startswith("raises") and faulty:
        time.sleep(TIMEOUT_S + 1)  # it does other things, and its connections stay open
    os._exit(0)  # the group may be beyond a proper end


@pytest.mark.sampled(2)
@pytest.mark.skipif(ORACLE_ONLY, reason="about replays")
@pytest.mark.parametrize("world", [2, FOUR])
@pytest.mark.parametrize("kind", HARMLESS)
@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP"])
def test_one_rank_misses_a_guard(wrapper: str, kind: str, world: int) -> None:
    what = {"wrapper": wrapper, "kind": kind, "world": world, "faulty": world - 1, "place": "forward"}
    found = run_ranks(one_rank, what, END_S)
    assert all(outcome == "done" for outcome, *_ in found.values()) and len(found) == world, found
    alone = found.pop(world - 1)
    assert {replays for _, replays, *_ in found.values()} == {alone[1] + 1}, (found, alone)


@pytest.mark.sampled(3)
@pytest.mark.skipif(ORACLE_ONLY, reason="about replays")
@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("raises eagerly", "forward"),
        ("raises", "forward"),
        ("raises", "backward"),
        ("killed", "forward"),
        ("killed", "backward"),
    ],
)
@pytest.mark.parametrize("world", [2, FOUR])
@pytest.mark.parametrize("wrapper", ["FSDP2", "DDP"])
def test_one_rank_is_gone(wrapper: str, kind: str, place: str, world: int) -> None:
    what = {"wrapper": wrapper, "kind": kind, "world": world, "faulty": world - 1, "place": place}
    found = run_ranks(one_rank, what, END_S)
    alone = found.pop(world - 1, None)
    assert alone is None if kind == "killed" else alone is not None and alone[0] == "Planted", (what, alone)
    assert len(found) == world - 1, found
    for outcome, calls, waited, text in found.values():
        assert calls == AT and waited < TIMEOUT_S + GRACE_S, (what, found)
        assert outcome in ("RuntimeError", "DistBackendError", "DistNetworkError"), (what, found)
        assert re.search(r"by peer|Timed out waiting|timeout caused pair closure", text), (what, found)
        by = r"rote: raised in a replay of the step, by (the wait for )?(all_gather|all_reduce|reduce_scatter) over"
        assert re.search(by, text), (what, found)
