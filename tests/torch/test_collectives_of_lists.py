"""Collectives that a step calls by hand on lists of tensors, `dist.reduce` and `dist.barrier`.

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
    OPS,
    REPLAYS,
    check_beside_a_miss,
    check_drawn,
    check_in_a_group_made_anew,
    check_replayed_variants,
    check_stays_refused,
    check_verified,
    check_waited_outside,
    drawn,
    ended,
    group_of,
)
from torch import Tensor, nn

Collective = Callable[[Tensor, bool, Any], Tensor]


def reduce(t: Tensor, is_async: bool, group: Any) -> Tensor:
    ended(dist.reduce(t, group_dst=1, group=group, async_op=is_async))
    # On other ranks than the last one, the contents are up to the backend.
    return t if dist.get_rank(group) == 1 else t * 0


def all_gather(t: Tensor, is_async: bool, group: Any) -> Tensor:
    outs = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
    ended(dist.all_gather(outs, t, group=group, async_op=is_async))
    return torch.cat(outs)


def all_gather_into_rows(t: Tensor, is_async: bool, group: Any) -> Tensor:
    out = t.new_zeros(dist.get_world_size(group), *t.shape)
    ended(dist.all_gather(list(out.unbind()), t, group=group, async_op=is_async))
    return out


def reduce_scatter(t: Tensor, is_async: bool, group: Any) -> Tensor:
    out = torch.empty_like(t)
    ins = [t + i for i in range(dist.get_world_size(group))]
    ended(dist.reduce_scatter(out, ins, group=group, async_op=is_async))
    return out


def gather(t: Tensor, is_async: bool, group: Any) -> Tensor:
    root = dist.get_rank(group) == 1
    outs = [torch.empty_like(t) for _ in range(dist.get_world_size(group))] if root else None
    ended(dist.gather(t, outs, group_dst=1, group=group, async_op=is_async))
    return torch.stack(outs) if outs else t + 1


def scatter(t: Tensor, is_async: bool, group: Any) -> Tensor:
    out = torch.empty_like(t)
    ins = [t + i for i in range(dist.get_world_size(group))] if dist.get_rank(group) == 0 else None
    ended(dist.scatter(out, ins, group_src=0, group=group, async_op=is_async))
    return out


def all_to_all(t: Tensor, is_async: bool, group: Any) -> Tensor:
    outs = [torch.empty_like(t) for _ in range(dist.get_world_size(group))]
    ins = [t + i for i in range(dist.get_world_size(group))]
    ended(dist.all_to_all(outs, ins, group=group, async_op=is_async))
    return torch.cat(outs)


def barrier(t: Tensor, is_async: bool, group: Any) -> Tensor:
    ended(dist.barrier(group, async_op=is_async))
    return t * 3


COLLECTIVES: dict[str, Collective] = {
    "reduce": reduce,
    "all_gather": all_gather,
    "all_gather_into_rows": all_gather_into_rows,
    "reduce_scatter": reduce_scatter,
    "gather": gather,
    "scatter": scatter,
    "all_to_all": all_to_all,
    "barrier": barrier,
}


@pytest.mark.sampled(4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_metric(name: str, dtype: torch.dtype, is_async: bool) -> None:
    """In a step without gradients."""

    @torch.no_grad()
    def metric(x: Tensor) -> Tensor:
        y = x * 2
        return COLLECTIVES[name](y, is_async, None) + 1

    check_drawn(metric, dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=lambda dtype: str(dtype)[6:])
def test_reductions(op: str, dtype: torch.dtype) -> None:
    def body(x: Tensor) -> Tensor:
        y, out = x * 2, torch.empty_like(x)
        dist.reduce(y, dst=0, op=OPS[op])
        dist.reduce_scatter(out, [x, x + 1], op=OPS[op])
        return out + y if dist.get_rank() == 0 else out

    check_drawn(body, dtype)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_subgroups(is_async: bool) -> None:
    check_in_subgroups(COLLECTIVES, is_async)


def check_in_subgroups(collectives: dict[str, Any], is_async: bool) -> None:
    """All of them on the world, and on two pairs of ranks, of which one is in another order."""
    own = [group_of(0, 1), group_of(3, 2)][dist.get_rank() // 2]

    def body(x: Tensor) -> Tensor:
        total = x.sum()
        for group in (None, own, None):
            for collective in collectives.values():
                total = total + collective(x + 1, is_async, group).sum()
        return total

    check_drawn(body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("passes", ["none", "", "all", "+buckets,+sums,+overlap"], ids=str)
def test_among_others(passes: str) -> None:
    """Between collectives that passes merge and move, with compute while they are under way."""

    def script(capture: Capture) -> Calls:
        total = torch.zeros(4, 6)

        def body(x: Tensor) -> Tensor:
            a, b, c = x * 2, x + 1, x.sin()
            outs = [torch.empty_like(x), torch.empty_like(x)]
            one = dist.all_reduce(a, async_op=True)
            two = dist.all_gather(outs, c, async_op=True)
            three = dist.all_reduce(b, async_op=True)
            other = x.cos() @ x.T
            three.wait()
            dist.barrier()
            other = other + b.sum()
            two.wait()
            one.wait()
            two.wait()  # again, which does nothing
            total.add_(a)
            dist.all_reduce(total)
            dist.all_gather(outs, b)
            return other + outs[0].sum() + outs[1].sum()

        return over(capture, body, map(drawn, range(2 * CALLS)), state=[total], **{"passes": passes} if passes else {})

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_state_arguments_and_gradients() -> None:
    """Into the state, arguments and gradients, and into parts of them."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        state = {"model": model, "optimizer": optimizer, "both": torch.zeros(8, 6)}

        def train(x: Tensor) -> Tensor:
            dist.all_gather(list(state["both"].chunk(2)), x)
            optimizer.zero_grad()
            loss = model(state["both"]).square().mean()
            loss.backward()
            for p in model.parameters():
                dist.reduce(p.grad, dst=0)
                parts = [p.grad / 2, p.grad / 2] if dist.get_rank() == 0 else None
                dist.scatter(p.grad, parts, src=0)
            optimizer.step()
            dist.scatter(x[1], [x[0] + 1, x[2] + 2] if dist.get_rank() == 1 else None, src=1)
            return loss.detach()

        step = capture(train, state=state)
        for call in range(CALLS + 2):
            x = drawn(call)
            yield step(x), x
        return state

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_ranks_of_other_shapes() -> None:
    """Of which one sends the sum of its rows, and the other as many rows as it has: these change between calls."""

    def script(capture: Capture) -> Calls:
        def body(x: Tensor, rows: int) -> Tensor:
            part = x[:rows] if dist.get_rank() == 0 else x[rows:].sum(0).expand(rows, 6)
            outs = [x.new_empty(rows, 6) for _ in range(2)]
            dist.all_to_all(outs, [part * 2, part + 1])
            dist.all_gather(outs, outs[0] * part)
            return torch.cat(outs[dist.get_rank() :])

        return over(capture, body, ((drawn(call), 1 + call % 3) for call in range(3 * CALLS)))

    check_replayed_variants(script, 3 * REPLAYS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("alone", [0, 1])
@pytest.mark.parametrize("passes", ["", "+buckets,+sums"], ids=["default", "buckets and sums"])
def test_one_rank_misses_while_the_other_replays(alone: int, passes: str) -> None:
    def body(x: Tensor, scale: float) -> Tensor:
        total = x.sum()
        for collective in COLLECTIVES.values():
            y = x * scale
            dist.all_reduce(y)
            total = total + collective(y, True, None).sum()
        return total

    check_beside_a_miss(body, alone, passes)


@pytest.mark.ranks(2)
def test_a_group_made_anew_between_calls() -> None:
    check_in_a_group_made_anew(lambda y, group: all_gather(y, False, group))


@pytest.mark.ranks(2)
def test_other_groups_and_roots_are_misses() -> None:
    def script(capture: Capture) -> Calls:
        chosen: dict[str, Any] = {}

        def body(x: Tensor) -> Tensor:
            outs = [torch.empty_like(x) for _ in range(dist.get_world_size(chosen["group"]))]
            dist.all_gather(outs, x + 1, group=chosen["group"])
            out = torch.empty_like(x)
            mine = dist.get_rank(chosen["group"]) == chosen["root"]
            dist.scatter(out, outs if mine else None, group=chosen["group"], group_src=chosen["root"])
            return out

        step = capture(body)
        both, own = group_of(0, 1), [group_of(0), group_of(1)][dist.get_rank()]
        choices = [{"group": both, "root": 0}, {"group": both, "root": 1}, {"group": own, "root": 0}]
        for call in range(3 * 4 + 9):
            chosen.update(choices[call // 4 % 3 if call < 12 else call % 3])
            yield step(drawn(call))
        return {}

    check_replayed_variants(script, 13, variants=3)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"verify": 3}, {"verify_every": 2}], ids=["verify", "verify every"])
def test_verified(options: dict[str, Any]) -> None:
    def body(x: Tensor, total: Tensor) -> Tensor:
        out = all_gather(x, True, None)
        dist.reduce(total.add_(x), dst=dist.get_world_size() - 1)
        dist.broadcast(total, src=1)
        return out

    check_verified(body, options)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trust", [False, True], ids=["compared", "trusted"])
def test_stored(tmp_path: Path, trust: bool) -> None:
    def script(capture: Capture) -> Calls:
        for again in range(2):

            def body(x: Tensor) -> Tensor:
                total = x.sum()
                for collective in COLLECTIVES.values():
                    total = total + collective(x + 1, True, None).sum()
                return total

            step = capture(body, plans=str(tmp_path), trust_plans=bool(again) and trust)
            for call in range(6):
                yield step(drawn(call))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[1].stats
        assert stats.recordings == 0 and stats.replays == (6 if trust else 5), stats
        told = found.steps[1].explain()
        for row in ("2      192 B  allgather_ on", "1       96 B  reduce_ on", "1      192 B  alltoall_ on"):
            assert row in told, told


def read_early(x: Tensor) -> Tensor:
    outs = [torch.zeros_like(x), torch.zeros_like(x)]
    work = dist.all_gather(outs, x * 2, async_op=True)
    z = outs[1].mul(0)  # how much of it is there depends on time
    work.wait()
    return outs[0] + z


def sent_overwritten(x: Tensor) -> Tensor:
    y, outs = x * 2, [torch.zeros_like(x), torch.zeros_like(x)]
    work = dist.all_gather(outs, y, async_op=True)
    y.add_(0)
    work.wait()
    return outs[0]


def by_bits(x: Tensor) -> Tensor:
    y = x.to(torch.int32)
    dist.reduce(y, dst=0, op=dist.ReduceOp.BXOR)
    return y


def objects(x: Tensor) -> Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, x.shape)
    return x * len(found)


def monitored(x: Tensor) -> Tensor:
    dist.monitored_barrier()
    return x * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("body", "words", "remedy"),
    [
        (read_early, "aten::mul.*uses the result of a collective before", "wait for the collective first"),
        (sent_overwritten, "aten::add_.*writes what a collective still sends", "wait for the collective first"),
        (by_bits, "c10d::reduce_.*another reduction", "one of these"),
        (objects, "aten::set_.*changes the shape", "out-of-place"),
        (monitored, "monitored_barrier.*", "outside the captured function"),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
def test_refused(body: Callable[[Tensor], Tensor], words: str, remedy: str) -> None:
    check_stays_refused(body, words, remedy)


@pytest.mark.ranks(2)
def test_never_waited_for() -> None:
    def body(x: Tensor, kept: list[Any]) -> list[Tensor]:
        outs = [torch.zeros_like(x), torch.zeros_like(x)]
        kept[:] = [dist.all_gather(outs, x, async_op=True)]
        return outs

    check_waited_outside(body, 1)


def summed(t: Tensor, is_async: bool, group: Any, device: Any = None) -> Tensor:
    parts = [t + 1, t * 2, t.sum(0, dtype=t.dtype)]
    with dist._coalescing_manager(group, device, async_ops=is_async) as manager:
        for part in parts:
            dist.all_reduce(part, op=dist.ReduceOp.MAX, group=group)
    if is_async:
        manager.wait()
    return torch.cat(parts[:2]) + parts[2]


def gathered(t: Tensor, is_async: bool, group: Any, device: Any = None) -> Tensor:
    ranks, parts = dist.get_world_size(group), [t, t[:1] * 2]
    outs = [t.new_empty(ranks * part.shape[0], *part.shape[1:]) for part in parts]
    with dist._coalescing_manager(group, device, async_ops=is_async) as manager:
        for out, part in zip(outs, parts, strict=True):
            dist.all_gather_into_tensor(out, part, group=group)
    if is_async:
        manager.wait()
    return torch.cat(outs)


def scattered(t: Tensor, is_async: bool, group: Any, device: Any = None) -> Tensor:
    ranks, parts = dist.get_world_size(group), [t, t + 1]
    outs = [t.new_empty(part.shape[0] // ranks, *part.shape[1:]) for part in parts]
    with dist._coalescing_manager(group, device, async_ops=is_async) as manager:
        for out, part in zip(outs, parts, strict=True):
            dist.reduce_scatter_tensor(out, part, group=group)
    if is_async:
        manager.wait()
    return torch.cat(outs)


COALESCED: dict[str, Callable[..., Tensor]] = {"summed": summed, "gathered": gathered, "scattered": scattered}


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", COALESCED)
def test_coalesced(name: str, dtype: torch.dtype, is_async: bool) -> None:
    check_drawn(lambda x: COALESCED[name](x * 2, is_async, None) + 1, dtype)


@pytest.mark.ranks(4, timeout=60)
def test_coalesced_in_subgroups() -> None:
    check_in_subgroups(COALESCED, True)
