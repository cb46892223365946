"""Collectives that a step calls by hand: `dist.all_reduce(p.grad)`, a loss averaged for a log, handles and waits.

Each is compared with an eager twin, bit for bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_equal, check_right, over
from test_refusals import check_refused
from torch import Tensor, nn

CALLS = 9
REPLAYS = 5
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "product": dist.ReduceOp.PRODUCT}
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def ended(work: Any) -> None:
    if work is not None:
        work.wait()


def all_reduce(t: Tensor, is_async: bool, op: str = "sum") -> Tensor:
    ended(dist.all_reduce(t, op=OPS[op], async_op=is_async))
    return t


def broadcast(t: Tensor, is_async: bool) -> Tensor:
    ended(dist.broadcast(t, src=1, async_op=is_async))
    return t


def all_gather_into_tensor(t: Tensor, is_async: bool) -> Tensor:
    out = t.new_empty((dist.get_world_size() * t.shape[0], *t.shape[1:]))
    ended(dist.all_gather_into_tensor(out, t, async_op=is_async))
    return out


def reduce_scatter_tensor(t: Tensor, is_async: bool) -> Tensor:
    out = t.new_empty((t.shape[0] // dist.get_world_size(), *t.shape[1:]))
    ended(dist.reduce_scatter_tensor(out, t, async_op=is_async))
    return out


def all_to_all_single(t: Tensor, is_async: bool) -> Tensor:
    out = torch.empty_like(t)
    ended(dist.all_to_all_single(out, t, async_op=is_async))
    return out


def uneven(t: Tensor, is_async: bool) -> Tensor:
    sent, received = ([1, 3], [1, 1]) if dist.get_rank() == 0 else ([1, 3], [3, 3])
    out = t.new_zeros((sum(received), *t.shape[1:]))
    ended(dist.all_to_all_single(out, t, received, sent, async_op=is_async))
    return out


COLLECTIVES: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "all_reduce": all_reduce,
    "broadcast": broadcast,
    "all_gather_into_tensor": all_gather_into_tensor,
    "reduce_scatter_tensor": reduce_scatter_tensor,
    "all_to_all_single": all_to_all_single,
    "uneven": uneven,
}


def drawn(call: int, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = (4, 6)) -> Tensor:
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(100 * call + dist.get_rank())) * 4
    return numbers.abs().to(dtype) if dtype == torch.uint8 else numbers.to(dtype)


def check_drawn(body: Callable[[Tensor], Any], dtype: torch.dtype = torch.float32, **options: Any) -> None:
    """Equal to eager on random tensors, and replayed."""
    check_equal(
        lambda capture: over(capture, body, (drawn(call, dtype) for call in range(CALLS)), **options), replays=REPLAYS
    )


def check_beside_a_miss(body: Callable[[Tensor, float], Tensor], alone: int, passes: str) -> None:
    """Equal to eager where one rank misses a guard in some calls, and the other goes on to replay."""
    body.__qualname__ = f"{body.__qualname__} of {alone} {passes}"
    misses = range(8, 12) if dist.get_rank() == alone else ()

    def script(capture: Capture) -> Calls:
        calls = ((drawn(call), 3.0 + call if call in misses else 2.0) for call in range(22))
        return over(capture, body, calls, **({"passes": passes} if passes else {}))

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert not stats.refusals, stats
        assert stats.replays >= (12 if dist.get_rank() == alone or passes else 16), stats


def check_in_a_group_made_anew(collective: Callable[[Tensor, Any], Tensor]) -> None:
    """Equal to eager where the group is destroyed and made anew between calls."""

    def script(capture: Capture) -> Calls:
        holder = {"group": dist.new_group([0, 1])}
        step = capture(lambda x: collective(x * 2, holder["group"]))
        for call in range(3 * CALLS):
            if call and call % CALLS == 0:
                dist.destroy_process_group(holder["group"])
                holder["group"] = dist.new_group([0, 1])
            yield step(drawn(call))
        return {}

    check_replayed_variants(script, 3 * REPLAYS)


def check_replayed_variants(script: Script, replays: int, variants: int | None = None) -> None:
    """Equal to eager, never refused, and replayed so often."""
    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert not stats.refusals and stats.replays >= replays, stats
        assert variants in (None, stats.variants), stats


def check_verified(body: Callable[[Tensor, Tensor], Tensor], options: dict[str, Any]) -> None:
    """Equal to eager, and verified, with a total in the state."""

    def script(capture: Capture) -> Calls:
        total = torch.zeros(4, 6)
        return over(capture, lambda x: body(x, total), map(drawn, range(14)), state=[total], **options)

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[0].stats.verified >= 3, found.steps[0].stats


def check_stays_refused(body: Callable[[Tensor], Tensor], words: str, remedy: str) -> None:
    """Right and refused at every call, with these words."""
    check_refused(lambda capture: over(capture, lambda x: body(x), map(drawn, range(6))), words, remedy=remedy)


def check_waited_outside(body: Callable[[Tensor, list[Any]], Any], handles: int) -> None:
    """Refused where the step only keeps its handles, for the script to wait for."""

    def script(capture: Capture) -> Calls:
        kept: list[Any] = []
        step = capture(lambda x: body(x, kept), ignore=["kept"])
        for call in range(6):
            result = step(drawn(call))
            for work in kept:
                work.wait()
            yield result
        return {}

    check_refused(script, f"does not wait for {handles} of the collectives", remedy="wait for each")


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
        return COLLECTIVES[name](y, is_async) + 1

    check_drawn(metric, dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_reductions(op: str, dtype: torch.dtype) -> None:
    check_drawn(lambda x: all_reduce(x + 1, False, op) * 2, dtype)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("passes", ["", "+buckets,+sums,+overlap"], ids=["default", "all passes"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", ["all_reduce", "broadcast"])
def test_gradients(name: str, is_async: bool, passes: str) -> None:
    """Averaged by hand after the backward pass; the loss averaged for a log."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            for p in model.parameters():
                COLLECTIVES[name](p.grad, is_async)
                p.grad /= dist.get_world_size()
            optimizer.step()
            logged = loss.detach().clone()
            all_reduce(logged, is_async)
            return logged / dist.get_world_size()

        options = {"passes": passes} if passes else {}
        return over(capture, train, map(drawn, range(CALLS + 2)), state=[model, optimizer], **options)

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kept", [False, True], ids=["set to none", "set to zero"])
def test_gradients_started_in_hooks(kept: bool) -> None:
    """Sums start in hooks, and are waited for before the optimizer."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        works: list[Any] = []
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: works.append(dist.all_reduce(p.grad, async_op=True)))

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad(set_to_none=not kept)
            loss = model(x).square().mean()
            loss.backward()
            for work in works:
                work.wait()
            works.clear()
            optimizer.step()
            return loss.detach()

        return over(capture, train, map(drawn, range(CALLS + 2)), state={"model": model, "optimizer": optimizer})

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_compute_between_start_and_wait() -> None:
    def script(capture: Capture) -> Calls:
        total = torch.zeros(4, 6)

        def body(x: Tensor) -> Tensor:
            a, b, gathered = x + 1, x * 3, x.new_zeros(8, 6)
            one = dist.all_reduce(a, async_op=True)
            two = dist.all_reduce(b, op=dist.ReduceOp.MAX, async_op=True)
            three = dist.all_gather_into_tensor(gathered, x, async_op=True)
            other = x.sin() @ x.T
            two.wait()
            other = other + b.sum()
            three.wait()
            one.wait()
            one.wait()  # again, which does nothing
            total.add_(a)
            return other + a.sum() + gathered.sum()

        return over(capture, body, map(drawn, range(CALLS)), state=[total])

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_state_and_views() -> None:
    """Of the state and of arguments, in place; into a part of a tensor."""

    def script(capture: Capture) -> Calls:
        state = {"sum": torch.zeros(3, 6), "both": torch.zeros(12, 6), "count": torch.zeros(())}

        def body(x: Tensor) -> Tensor:
            state["sum"][1].add_(x[0])
            dist.all_reduce(state["sum"][1])
            dist.all_gather_into_tensor(state["both"][4:], x)
            dist.all_reduce(x[2:])
            dist.broadcast(x[0], src=0)
            state["count"] += 1
            dist.all_reduce(state["count"])
            return x.sum()

        step = capture(body, state=state)
        for call in range(CALLS):
            x = drawn(call)
            yield step(x), x
        return state

    check_equal(script, replays=REPLAYS)


GROUPS: dict[tuple[int, ...], Any] = {}


def group_of(*ranks: int) -> Any:
    """Made once per process."""
    if ranks not in GROUPS:
        GROUPS[ranks] = dist.new_group(list(ranks))
    return GROUPS[ranks]


@pytest.mark.ranks(4)
def test_subgroups() -> None:
    groups = [group_of(0, 1), group_of(3, 2)]
    own = groups[0 if dist.get_rank() < 2 else 1]
    source = dist.get_global_rank(own, 1)

    def body(x: Tensor) -> Tensor:
        y = x * 2
        dist.all_reduce(y, group=own)
        for group in groups:
            dist.all_reduce(y, group=group)  # nothing on ranks that are in no such group
        dist.broadcast(y, src=source, group=own)
        out = y.new_empty(8, 6)
        dist.all_gather_into_tensor(out, y + dist.get_rank(), group=own)
        dist.all_reduce(out)
        return out

    check_drawn(body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("passes", ["", "+buckets,+sums"], ids=["default", "buckets and sums"])
@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_misses_while_the_other_replays(alone: int, passes: str) -> None:
    def body(x: Tensor, scale: float) -> Tensor:
        a, b = x * scale, x + scale
        dist.all_reduce(a)
        work = dist.all_reduce(b, async_op=True)
        out = x.new_empty(8, 6)
        dist.all_gather_into_tensor(out, a)
        work.wait()
        dist.broadcast(a, src=alone)
        return out.sum() + a + b

    check_beside_a_miss(body, alone, passes)


@pytest.mark.ranks(2)
def test_a_group_made_anew_between_calls() -> None:
    def collective(y: Tensor, group: Any) -> Tensor:
        dist.all_reduce(y, group=group)
        return y

    check_in_a_group_made_anew(collective)


@pytest.mark.ranks(2)
def test_other_groups_reductions_and_sources_are_misses() -> None:
    def script(capture: Capture) -> Calls:
        chosen: dict[str, Any] = {}

        def body(x: Tensor) -> Tensor:
            y, z = x * 2, x + 1
            dist.all_reduce(y, op=chosen["op"], group=chosen["group"])
            dist.broadcast(z, src=chosen["src"])
            return y + z

        step = capture(body)
        both, own = group_of(0, 1), [group_of(0), group_of(1)][dist.get_rank()]
        choices = [
            {"op": dist.ReduceOp.SUM, "group": both, "src": 0},
            {"op": dist.ReduceOp.MAX, "group": both, "src": 0},
            {"op": dist.ReduceOp.MAX, "group": own, "src": 0},
            {"op": dist.ReduceOp.MAX, "group": own, "src": 1},
        ]
        for call in range(4 * 4 + 12):
            chosen.update(choices[call // 4 % 4 if call < 16 else call % 4])
            yield step(drawn(call))
        return {}

    check_replayed_variants(script, 18, variants=4)


@pytest.mark.ranks(2)
def test_complex_numbers() -> None:
    def body(x: Tensor) -> Tensor:
        y = torch.complex(x, -x)
        dist.all_reduce(y)
        return y * 2

    check_drawn(body)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [{"verify": 3}, {"verify_every": 2}], ids=["verify", "verify every"])
def test_verified(options: dict[str, Any]) -> None:
    def body(x: Tensor, total: Tensor) -> Tensor:
        y, out = x * 2, x.new_empty(8, 6)
        dist.all_reduce(y)
        dist.all_gather_into_tensor(out, y, async_op=True).wait()
        total.add_(y)
        dist.all_reduce(total)
        return out

    check_verified(body, options)


@pytest.mark.ranks(2)
def test_stored(tmp_path: Path) -> None:
    def script(capture: Capture) -> Calls:
        for again in range(2):

            def body(x: Tensor) -> Tensor:
                y, out = x * 2, x.new_empty(8, 6)
                dist.all_reduce(y)
                dist.all_gather_into_tensor(out, y)
                return out + y.repeat(2, 1)

            step = capture(body, plans=str(tmp_path), trust_plans=bool(again))
            for call in range(6):
                yield step(drawn(call))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[1].stats.recordings == 0, found.steps[1].stats


def read_early(x: Tensor) -> Tensor:
    y = x * 2
    out = y.new_zeros(8, 6)
    work = dist.all_gather_into_tensor(out, y, async_op=True)
    z = out[:4].mul(0)  # how much of it is there depends on time
    work.wait()
    return out + z.repeat(2, 1)


def sent_overwritten(x: Tensor) -> Tensor:
    y, out = x * 2, x.new_zeros(8, 6)
    work = dist.all_gather_into_tensor(out, y, async_op=True)
    y.add_(0)
    work.wait()
    return out


def asked(x: Tensor) -> Tensor:
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    while not work.is_completed():
        pass
    work.wait()
    return y


def by_future(x: Tensor) -> Tensor:
    y = x * 2
    dist.all_reduce(y, async_op=True).get_future().wait()
    return y


def by_backend(x: Tensor) -> Tensor:
    y = x * 2
    group = dist.distributed_c10d._get_default_group()
    group._get_backend(torch.device("cpu")).allreduce([y]).wait()
    return y


def in_its_own_memory(x: Tensor) -> Tensor:
    y = x * 2
    dist.reduce_scatter_tensor(y[:2], y)
    return y * 1


def by_bits(x: Tensor) -> Tensor:
    y = x.to(torch.int32)
    dist.all_reduce(y, op=dist.ReduceOp.BXOR)
    return y


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("body", "words", "remedy"),
    [
        (read_early, "aten::mul.*uses the result of a collective before", "wait for the collective first"),
        (sent_overwritten, "aten::add_.*writes what a collective still sends", "wait for the collective first"),
        (asked, "Work.is_completed.*asks the handle", "wait()"),
        (by_future, "Work.get_future.*asks the handle", "wait()"),
        (by_backend, "Backend.allreduce.*directly", "torch.distributed"),
        (in_its_own_memory, "_reduce_scatter_base_.*memory into which it writes", "output of its own"),
        (by_bits, "c10d::allreduce_.*another reduction", "one of these"),
    ],
)
def test_refused(body: Callable[[Tensor], Tensor], words: str, remedy: str) -> None:
    check_stays_refused(body, words, remedy)


@pytest.mark.ranks(2)
def test_started_outside() -> None:
    def script(capture: Capture) -> Calls:
        def body(x: Tensor, work: Any) -> Tensor:
            work.wait()
            return x * 2

        step = capture(body, ignore=["work"], tail=False)
        for call in range(6):
            x = drawn(call)
            yield step(x, dist.all_reduce(x, async_op=True))
        return {}

    check_refused(script, "Work.wait.*no recorded op started", remedy="same captured function")


@pytest.mark.ranks(2)
def test_never_waited_for() -> None:
    def body(x: Tensor, kept: list[Any]) -> Tensor:
        y = x * 2
        kept[:] = [dist.all_reduce(y, async_op=True)]
        return x + 1

    check_waited_outside(body, 1)
