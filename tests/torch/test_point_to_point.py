"""Point to point by hand: `dist.send`, `recv`, `isend`, `irecv` and `batch_isend_irecv`, and steps of pipelines.

Each is compared with an eager twin, bit for bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over
from test_collectives_by_hand import (
    CALLS,
    DTYPES,
    REPLAYS,
    check_beside_a_miss,
    check_drawn,
    check_replayed_variants,
    check_stays_refused,
    check_verified,
    check_waited_outside,
    drawn,
    group_of,
)
from torch import Tensor, nn

Exchange = Callable[[Tensor, Any], Tensor]


def peer(group: Any) -> int:
    """The other rank of a group of two."""
    return dist.get_global_rank(group or dist.group.WORLD, 1 - dist.get_rank(group))


def blocking(t: Tensor, group: Any) -> Tensor:
    got = torch.empty_like(t)
    if dist.get_rank(group) == 0:
        dist.send(t, peer(group), group=group)
        dist.recv(got, peer(group), group=group)
    else:
        dist.recv(got, peer(group), group=group)
        dist.send(t + got, peer(group), group=group)
    return got


def at_once(t: Tensor, group: Any) -> Tensor:
    got = torch.empty_like(t)
    sent = dist.isend(t, peer(group), group=group)
    received = dist.irecv(got, peer(group), group=group)
    assert sent is not None and received is not None
    received.wait()
    sent.wait()
    return got


def in_any_order(t: Tensor, group: Any) -> Tensor:
    """Three each way, with tags, and waits in another order than the starts."""
    got = [torch.empty_like(t) for _ in range(3)]
    works = [dist.isend(t * i, peer(group), group=group, tag=i) for i in range(3)]
    works += [dist.irecv(got[i], peer(group), group=group, tag=i) for i in (2, 0, 1)]
    for at in (5, 0, 3, 2, 4, 1):
        work = works[at]
        assert work is not None
        work.wait()
    return torch.stack(got)


def batched(t: Tensor, group: Any) -> Tensor:
    both = t.new_empty(2, *t.shape)
    ops = [
        dist.P2POp(dist.isend, t, peer(group), group),
        dist.P2POp(dist.irecv, both[0], peer(group), group),
        dist.P2POp(dist.irecv, both[1], peer(group), group, tag=7),
        dist.P2POp(dist.isend, t * 2, peer(group), group, tag=7),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return both


def one_way(t: Tensor, group: Any) -> Tensor:
    if dist.get_rank(group) == 0:
        dist.send(t, group_dst=1, group=group)
        return t
    got = torch.zeros_like(t)
    assert dist.recv(got, group_src=0, group=group) == dist.get_global_rank(group or dist.group.WORLD, 0)
    return got


EXCHANGES: dict[str, Exchange] = {
    "blocking": blocking,
    "at_once": at_once,
    "in_any_order": in_any_order,
    "batched": batched,
    "one_way": one_way,
}


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", EXCHANGES)
def test_exchange(name: str, dtype: torch.dtype) -> None:
    check_drawn(lambda x: EXCHANGES[name](x * 2, None) + 1, dtype)


@pytest.mark.ranks(4)
def test_subgroups() -> None:
    """In pairs of ranks, and from rank to rank around the world."""
    own = [group_of(0, 1), group_of(3, 2)][dist.get_rank() // 2]

    def body(x: Tensor) -> Tensor:
        total = x.sum()
        for exchange in EXCHANGES.values():
            total = total + exchange(x + 1, own).sum()
        got = torch.empty_like(x)
        world, rank = dist.get_world_size(), dist.get_rank()
        sent = dist.isend(x * rank, (rank + 1) % world)
        dist.recv(got, (rank - 1) % world)
        assert sent is not None
        sent.wait()
        dist.all_reduce(got, group=own)
        return got + total

    check_drawn(body)


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("passes", ["none", "", "all", "+buckets,+sums,+overlap"], ids=str)
def test_among_collectives(passes: str) -> None:
    """Between collectives that passes merge and move, with compute while they are under way."""

    def script(capture: Capture) -> Calls:
        total = torch.zeros(4, 6)

        def body(x: Tensor) -> Tensor:
            a, b, got = x * 2, x + 1, torch.empty_like(x)
            one = dist.all_reduce(a, async_op=True)
            two = dist.irecv(got, peer(None))
            three = dist.isend(b.sin(), peer(None))
            four = dist.all_reduce(b, async_op=True)
            other = x.cos() @ x.T
            assert one is not None and two is not None and three is not None and four is not None
            four.wait()
            other = other + b.sum()
            two.wait()
            three.wait()
            one.wait()
            total.add_(got)
            got.zero_()
            return other + a.sum() + at_once(total, None).sum()

        return over(capture, body, map(drawn, range(2 * CALLS)), state=[total], **{"passes": passes} if passes else {})

    check_equal(script, replays=REPLAYS)


def train_stage(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, micro: int, ahead: bool) -> Tensor:
    """A step of a pipeline of two stages, over micro-batches: all forward, then all backward (GPipe)."""
    first = dist.get_rank() == 0
    optimizer.zero_grad()
    parts, kept, works = x.chunk(micro), [], []
    losses = []
    for part in parts:
        if first:
            out = model(part)
            works.append(dist.isend(out.detach(), 1))
            kept.append((part, out))
        else:
            got = x.new_empty(part.shape[0], 8)
            dist.recv(got, 0)
            got.requires_grad_()
            loss = model(got).square().mean() / micro
            kept.append((got, loss))
            losses.append(loss.detach())
    for given, out in kept:
        if first:
            grad = torch.empty_like(out)
            dist.recv(grad, 1)
            out.backward(grad)
        else:
            out.backward()
            assert given.grad is not None
            work = dist.isend(given.grad, 0)
            assert work is not None
            if ahead:
                works.append(work)
            else:
                work.wait()
    for work in works:
        assert work is not None
        work.wait()
    optimizer.step()
    return torch.stack(losses).sum() if losses else x.new_zeros(())


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("ahead", [False, True], ids=["waits", "sends ahead"])
@pytest.mark.parametrize("passes", ["", "all"], ids=["default", "all passes"])
def test_pipeline(passes: str, ahead: bool) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(dist.get_rank())
        sizes = [(6, 8, 8), (8, 8, 1)][dist.get_rank()]
        model = nn.Sequential(nn.Linear(sizes[0], sizes[1]), nn.Tanh(), nn.Linear(sizes[1], sizes[2]))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        state = {"model": model, "optimizer": optimizer}
        options = {"passes": passes} if passes else {}
        return over(
            capture,
            lambda x: train_stage(model, optimizer, x, 2, ahead),
            map(drawn, range(CALLS + 2)),
            state=state,
            **options,
        )

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2, timeout=60)
def test_ranks_of_other_shapes() -> None:
    """Each rank sends other shapes and another number of tensors, which change between calls."""

    def script(capture: Capture) -> Calls:
        def body(x: Tensor, rows: int) -> Tensor:
            rank = dist.get_rank()
            sent = [x[:rows] * 2] if rank == 0 else [x[0, :3], x.new_ones(rows, 2, 2)]
            got = [x.new_empty(3), x.new_empty(rows, 2, 2)] if rank == 0 else [x.new_empty(rows, 6)]
            ops = [dist.P2POp(dist.isend, each, 1 - rank, tag=tag) for tag, each in enumerate(sent)]
            ops += [dist.P2POp(dist.irecv, each, 1 - rank, tag=tag) for tag, each in enumerate(got)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return torch.stack([each.sum() for each in got])

        return over(capture, body, ((drawn(call), 1 + call % 3) for call in range(3 * CALLS)))

    check_replayed_variants(script, 3 * REPLAYS)


@pytest.mark.ranks(2, timeout=60)
def test_one_rank_sends_and_the_other_receives_in_other_variants() -> None:
    """Which way depends on an argument: each rank replays the variant for it."""

    def script(capture: Capture) -> Calls:
        def body(x: Tensor, source: int) -> Tensor:
            y = x * 2
            if dist.get_rank() == source:
                dist.send(y, 1 - source)
            else:
                dist.recv(y, source)
            return y

        return over(capture, body, ((drawn(call), call // 2 % 2) for call in range(3 * CALLS)))

    check_replayed_variants(script, 3 * REPLAYS, variants=2)


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("passes", ["", "+buckets,+sums"], ids=["default", "buckets and sums"])
@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_misses_while_the_other_replays(alone: int, passes: str) -> None:
    def body(x: Tensor, scale: float) -> Tensor:
        a, b = x * scale, x + scale
        dist.all_reduce(a)
        total = sum(exchange(a, None).sum() for exchange in EXCHANGES.values())
        dist.all_reduce(b)
        return total + a + b

    check_beside_a_miss(body, alone, passes)


@pytest.mark.ranks(3, timeout=40)
def test_a_rank_that_sends_nothing() -> None:
    """Passes may merge the collectives of a rank without point to point, and not those of the others."""

    def script(capture: Capture) -> Calls:
        def body(x: Tensor) -> Tensor:
            a, b, got = x * 2, x + 1, x * 0
            one = dist.all_reduce(a, op=dist.ReduceOp.MAX, async_op=True)
            if dist.get_rank() == 0:
                dist.send(x, 1)
            elif dist.get_rank() == 1:
                dist.recv(got, 0)
            two = dist.all_reduce(b, op=dist.ReduceOp.MAX, async_op=True)
            assert one is not None and two is not None
            one.wait()
            two.wait()
            return a + b + got

        return over(capture, body, map(drawn, range(2 * CALLS)), passes="+buckets,+sums,+overlap")

    found = check_right(script)
    if not ORACLE_ONLY:
        assert not found.steps[0].stats.refusals, found.steps[0].stats


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("options", [{"verify": 3}, {"verify_every": 2}], ids=["verify", "verify every"])
def test_verified(options: dict[str, Any]) -> None:
    def body(x: Tensor, total: Tensor) -> Tensor:
        total.add_(blocking(x, None))
        return batched(total, None)

    check_verified(body, options)


@pytest.mark.ranks(2, timeout=60)
def test_stored(tmp_path: Path) -> None:
    def script(capture: Capture) -> Calls:
        for again in range(2):

            def body(x: Tensor) -> Tensor:
                return sum((each(x + 1, None).sum() for each in EXCHANGES.values()), x)

            step = capture(body, plans=str(tmp_path), trust_plans=bool(again))
            for call in range(6):
                yield step(drawn(call))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[1].stats
        assert stats.recordings == 0 and stats.replays == 6, stats


def read_early(x: Tensor) -> Tensor:
    got = torch.zeros_like(x)
    sent, received = dist.isend(x * 2, peer(None)), dist.irecv(got, peer(None))
    z = got.mul(0)  # how much of it is there depends on time
    assert sent is not None and received is not None
    sent.wait()
    received.wait()
    return got + z


def sent_overwritten(x: Tensor) -> Tensor:
    y, got = x * 2, torch.zeros_like(x)
    sent = dist.isend(y, peer(None))
    y.add_(0)
    dist.recv(got, peer(None))
    assert sent is not None
    sent.wait()
    return got


def from_anyone(x: Tensor) -> Tensor:
    got = torch.zeros_like(x)
    sent = dist.isend(x * 2, peer(None))
    dist.recv(got)
    assert sent is not None
    sent.wait()
    return got


def asked(x: Tensor) -> Tensor:
    got = torch.zeros_like(x)
    sent, received = dist.isend(x * 2, peer(None)), dist.irecv(got, peer(None))
    assert sent is not None and received is not None
    sent.wait()
    received.wait()
    return got if received.is_completed() else got + 1


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize(
    ("body", "words", "remedy"),
    [
        (read_early, "aten::mul.*uses the result of a collective before", "wait for the collective first"),
        (sent_overwritten, "aten::add_.*writes what a collective still sends", "wait for the collective first"),
        (from_anyone, "c10d::recv_any_source_.*plans cannot hold", "name the rank"),
        (asked, "Work.is_completed.*asks the handle", "wait()"),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
def test_refused(body: Callable[[Tensor], Tensor], words: str, remedy: str) -> None:
    check_stays_refused(body, words, remedy)


@pytest.mark.ranks(2, timeout=60)
def test_never_waited_for() -> None:
    """The step hands back what it sends and receives, with the handles."""

    def body(x: Tensor, kept: list[Any]) -> tuple[Tensor, Tensor]:
        y, got = x * 2, torch.zeros_like(x)
        kept[:] = [dist.isend(y, peer(None)), dist.irecv(got, peer(None))]
        return y, got

    check_waited_outside(body, 2)
