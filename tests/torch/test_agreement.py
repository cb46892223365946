"""Passes that alter collectives run only where all ranks follow.

`buckets` and `sums` put small collectives together. Whatever a rank does at a call (miss a
guard, record, give up, run under a profiler), the others neither hang nor
compute anything but what eager computes. A case that hangs fails by its timeout.
"""

import itertools
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import ORACLE_ONLY, Calls, Capture, Run, check_right, over, rote_capture
from ranks import Pools
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

WARM = 6
COUNT = itertools.count()


def summed(tensor: Tensor) -> Tensor:
    """The sum over ranks, for which nobody has waited yet."""
    return funcol.all_reduce(tensor, "sum", dist.group.WORLD)


def three_sums(x: Tensor, scale: float) -> list[Tensor]:
    """Sums over ranks that do not depend on each other. Of small whole numbers, which add up alike in any order."""
    scale = float(str(scale))  # so that its value is guarded
    sums = [summed(x * scale), summed(x + scale), summed(x - scale)]
    return [each + 1 for each in sums]


def named(step: Callable[..., Any]) -> Callable[..., Any]:
    """The step under a name of its own: decisions are remembered by name as long as the processes live."""
    step.__qualname__ = f"{step.__qualname__}{next(COUNT)}"
    return step


def with_buckets(fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Any:
    return rote_capture(fn, state=state, **{"passes": "+buckets,+sums", **options})


def numbers(call: int) -> Tensor:
    return torch.arange(12.0).reshape(3, 4) + 100 * dist.get_rank() + call


def sums(scales: list[float], step: Callable[..., Any] = three_sums, **options: Any) -> Run:
    """A step of three sums at every call, `scales[call]` on this rank."""

    def script(capture: Capture) -> Calls:
        def call(x: Tensor, scale: float) -> Any:
            return step(x, scale)

        return over(capture, named(call), ((numbers(i), scale) for i, scale in enumerate(scales)), **options)

    return check_right(script, with_buckets)


def quietly(run: Callable[..., Run], *args: Any, **options: Any) -> Run:
    """Runs it without its warnings, in a process of a rank, where pytest filters none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(*args, **options)


def scales_where(ranks: list[int], changed: float, calls: int = 4) -> list[float]:
    """The same scale at every call, but another one for some calls on these ranks."""
    other = changed if dist.get_rank() in ranks else 2.0
    return [2.0] * WARM + [other] * calls + [2.0] * WARM


def counted(run: Run) -> list[Any]:
    return [stats[0] for stats in run.stats]


@pytest.mark.ranks(2)
def test_ranks_that_follow_replay_what_the_passes_left() -> None:
    stats = counted(sums([2.0] * 12))[-1] if not ORACLE_ONLY else None
    if stats:
        assert stats.replays == 10
        assert (stats.altered, stats.kept, stats.exchanges) == (10, 0, 1)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("ranks", [[0], [1], [2], [0, 2]])
def test_a_rank_that_misses_and_records_anew(ranks: list[int]) -> None:
    run = sums(scales_where(ranks, 3.0))
    if ORACLE_ONLY:
        return
    stats = counted(run)
    warm, missed, recorded, end = stats[WARM - 1], stats[WARM], stats[WARM + 1], stats[-1]
    assert (warm.altered, warm.kept) == (WARM - 2, 0)
    if dist.get_rank() in ranks:
        assert missed.fallbacks == warm.fallbacks + 1
        assert recorded.recordings == warm.recordings + 1
        assert end.kept == 0
    else:
        assert missed.replays == warm.replays + 1
        assert (recorded.altered, recorded.kept) == (warm.altered, 2)
        assert end.kept == 2
    # The new variant issues the same collectives: nothing new is to be compared.
    assert end.altered == warm.altered + 2 + WARM
    assert end.exchanges == 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_gives_up(rank: int) -> None:
    scales = [2.0] * WARM + [float(i + 3) if dist.get_rank() == rank else 2.0 for i in range(8)] + [2.0] * 3
    run = quietly(sums, scales, max_variants=2)
    if ORACLE_ONLY:
        return
    stats = counted(run)[-1]
    assert stats.altered == WARM - 2 + 3, stats
    assert stats.kept == (0 if dist.get_rank() == rank else 8)
    assert stats.fallbacks == (8 if dist.get_rank() == rank else 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_record(rank: int) -> None:
    def step(x: Tensor, scale: float) -> list[Tensor]:
        if dist.get_rank() == rank and x.sum().item() < 0:
            scale = -scale
        return three_sums(x, scale)

    run = quietly(sums, [2.0] * 8, step)
    if ORACLE_ONLY:
        return
    stats = counted(run)[-1]
    assert stats.altered == 0 and stats.exchanges == 0
    if dist.get_rank() == rank:
        assert stats.replays == 0 and stats.refusals
    else:
        assert stats.kept == stats.replays == 6


@pytest.mark.ranks(2)
def test_a_rank_under_another_dispatch_mode() -> None:
    def script(capture: Capture) -> Calls:
        def call(x: Tensor, scale: float) -> Any:
            return three_sums(x, scale)

        captured = capture(named(call))
        for i in range(WARM):
            yield captured(numbers(i), 2.0)
        for i in range(3):
            if dist.get_rank() == 1:
                with FlopCounterMode(display=False):
                    yield captured(numbers(i), 2.0)
            else:
                yield captured(numbers(i), 2.0)
        yield captured(numbers(0), 2.0)

    run = check_right(script, with_buckets)
    if ORACLE_ONLY:
        return
    stats = counted(run)[-1]
    assert stats.altered == WARM - 2 + 1
    assert stats.kept == (0 if dist.get_rank() == 1 else 3)


def chained_on(rank: int) -> Callable[[Tensor, float], list[Tensor]]:
    """The same collectives, but on one rank the second needs the result of the first: no bucket takes both."""

    def step(x: Tensor, scale: float) -> list[Tensor]:
        first = summed(x * scale)
        if dist.get_rank() == rank:
            second = summed(x + scale + 0 * first)
        else:
            second = summed(x + scale)
        return [first + 1, second + 1]

    return step


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_altered_sequences_that_do_not_fit(rank: int) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = sums([2.0] * 10, chained_on(rank))
    if ORACLE_ONLY:
        return
    stats = counted(run)[-1]
    assert stats.replays == 8 and stats.altered == 0 and stats.exchanges == 1
    assert stats.kept == (0 if dist.get_rank() == rank else 8)  # its own passes altered nothing
    told = [str(each.message) for each in caught if "do not fit" in str(each.message)]
    assert len(told) == 1, told
    assert "rank 0 issues all_reduce" in told[0] and "rank 1 issues all_reduce" in told[0], told


@pytest.mark.ranks(2)
def test_explain_tells_of_the_agreement() -> None:
    if ORACLE_ONLY:
        return

    def call(x: Tensor, scale: float) -> Any:
        return three_sums(x, scale)

    captured = with_buckets(named(call))
    for i, scale in enumerate(scales_where([1], 3.0)):
        captured(numbers(i), scale)
    text = captured.explain()
    kept = captured.stats.kept
    assert kept == (0 if dist.get_rank() == 1 else 2)
    assert f"{captured.stats.altered} replays ran with altered collectives; {kept} replays kept" in text, text


@pytest.mark.ranks(2)
def test_decisions_are_those_of_the_ranks_not_of_a_session() -> None:
    def call(x: Tensor, scale: float) -> Any:
        return three_sums(x, scale)

    step = named(call)

    def script(capture: Capture) -> Calls:
        for _ in range(2):
            captured = capture(step)
            for i in range(WARM):
                yield captured(numbers(i), 2.0)

    run = check_right(script, with_buckets)
    if ORACLE_ONLY:
        return
    first, second = run.stats[-1]
    assert (first.altered, first.exchanges) == (WARM - 2, 1)
    assert (second.altered, second.exchanges) == (WARM - 2, 0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [0, 1])
def test_verify_runs_eager_beside_only_where_all_ranks_replay(rank: int) -> None:
    scales = [2.0] * 3 + ([3.0] * 2 if dist.get_rank() == rank else [2.0] * 2) + [2.0] * WARM
    run = sums(scales, verify=4)
    if ORACLE_ONLY:
        return
    stats = counted(run)[-1]
    assert stats.altered == 1 + WARM
    assert stats.kept == (0 if dist.get_rank() == rank else 2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("outer", ["kept", "altered"])
def test_captured_functions_within_another_that_some_ranks_replay(outer: str) -> None:
    """Rank 0 replays the outer function and makes no inner calls; rank 1 must not wait for them."""

    def script(capture: Capture) -> Calls:
        def inner(x: Tensor, scale: float) -> Any:
            return three_sums(x, scale)

        inner_step = capture(named(inner))

        def around(x: Tensor, flag: int) -> Any:
            first = summed(x * flag)
            return [each * 2 for each in inner_step(x, 2.0)], first + 1

        passes = {"passes": "default"} if outer == "kept" else {}
        outer_step = capture(named(around), **passes)
        for i in range(WARM):
            yield inner_step(numbers(i), 2.0)
        for i in range(10):
            flag = 1 if i < 3 or dist.get_rank() == 0 else i
            yield outer_step(numbers(i), flag)
        for i in range(3):
            yield inner_step(numbers(i), 2.0)

    run = quietly(check_right, script, with_buckets)
    if ORACLE_ONLY:
        return
    inner, around = run.stats[-1]
    assert inner.altered == WARM - 2 + 3
    if dist.get_rank() == 0:
        assert around.replays == 8 and inner.kept == 0


@torch.library.custom_op("rote_test_agreement::calls", mutates_args=())
def calls(x: Tensor) -> list[Tensor]:
    return [each * 2 for each in within["step"](x, 2.0)]


within: dict[str, Callable[..., Any]] = {}


@pytest.mark.ranks(2)
def test_kernels_of_a_replay_take_no_part() -> None:
    """Rank 0 replays a function whose kernel calls another one; rank 1 runs it eagerly."""

    def script(capture: Capture) -> Calls:
        def inner(x: Tensor, scale: float) -> Any:
            return three_sums(x, scale)

        inner_step = within["step"] = capture(named(inner))
        around = capture(named(lambda x, flag: calls(x * flag)), passes="default")
        for i in range(WARM):
            yield inner_step(numbers(i), 2.0)
        for i in range(10):
            yield around(numbers(i), 1 if i < 3 or dist.get_rank() == 0 else i)
        for i in range(3):
            yield inner_step(numbers(i), 2.0)

    run = quietly(check_right, script, with_buckets)
    if ORACLE_ONLY:
        return
    inner, around = run.stats[-1]
    assert inner.altered == WARM - 2 + 3
    assert around.replays == (8 if dist.get_rank() == 0 else 1), around


@pytest.mark.ranks(2)
def test_hooks_of_a_backward_pass_take_no_part() -> None:
    """A hook may run within a step that other ranks replay."""

    def script(capture: Capture) -> Calls:
        def inner(x: Tensor, scale: float) -> Any:
            return three_sums(x, scale)[0]

        inner_step = capture(named(inner))
        for i in range(WARM):
            with torch.no_grad():
                yield inner_step(numbers(i), 2.0)
        for i in range(3):
            x = numbers(i).requires_grad_()
            x.register_hook(lambda grad: inner_step(grad, 2.0))
            x.square().sum().backward()
            yield x.grad

    run = check_right(script, with_buckets)
    if ORACLE_ONLY:
        return
    stats = counted(run)[-1]
    assert stats.altered == WARM - 2 and stats.kept == 3, stats


@pytest.mark.ranks(2)
def test_a_trusted_plan_on_one_rank(tmp_path: Path) -> None:
    """The rank that trusts its stored plan replays where the other one records."""
    plans = tmp_path / str(dist.get_rank())

    def call(x: Tensor, scale: float) -> Any:
        return three_sums(x, scale)

    step = named(call)

    def script(capture: Capture) -> Calls:
        captured = capture(step, plans=plans)
        for i in range(WARM):
            yield captured(numbers(i), 2.0)
        captured = capture(step, plans=plans, trust_plans=dist.get_rank() == 0)
        for i in range(WARM):
            yield captured(numbers(i), 2.0)

    run = check_right(script, with_buckets)
    if ORACLE_ONLY:
        return
    again = run.stats[-1][1]
    if dist.get_rank() == 0:
        assert (again.recordings, again.kept, again.altered) == (0, 1, WARM - 1)
    else:
        assert (again.kept, again.altered) == (0, WARM - 1)


def random_faults(seed: int) -> None:
    """Every rank misses, records and gives up at calls of its own."""
    generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
    picks = torch.randint(0, 12, (60,), generator=generator).tolist()
    scales = [2.0] * 3 + [float(max(pick, 7)) - 5 for pick in picks]
    run = quietly(sums, scales, max_variants=3)
    if ORACLE_ONLY:
        return
    for stats in counted(run):
        assert stats.exchanges <= 1
    end = counted(run)[-1]
    assert end.altered > 0 and end.replays >= end.altered + end.kept


@pytest.mark.parametrize("world", [2, 3])
def test_faults_at_any_call_of_any_rank(pools: Pools, world: int) -> None:
    for seed in range(3):
        pools.run(world, random_faults, {"seed": seed})


# -- one process ------------------------------------------------------------------

FAKE = """
import warnings
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
dist.init_process_group("{backend}", store=FakeStore(), rank=0, world_size=4)
import rote
from test_agreement import three_sums

def step(x, scale):
    return {body}

captured = rote.capture(step, passes="+buckets,+sums")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for call in range(8):
        captured(torch.ones(4), 2.0)
print([str(each.message) for each in caught if "rote" in str(each.message)])
print(captured.stats)
"""


def in_one_process(backend: str, body: str) -> str:
    script = FAKE.format(backend=backend, body=body)
    here = Path(__file__).parent
    ended = subprocess.run([sys.executable, "-c", script], cwd=here, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.skipif(ORACLE_ONLY, reason="about statistics")
def test_the_fake_process_group_answers_at_once() -> None:
    text = in_one_process("fake", "three_sums(x, scale)")
    assert text.startswith("[]"), text
    assert "replays=6, altered=6, kept=0, exchanges=1" in text, text


@pytest.mark.skipif(ORACLE_ONLY, reason="about warnings")
def test_passes_stay_off_without_a_backend_on_the_cpu() -> None:
    text = in_one_process("cuda:fake", "[x * scale]")
    assert "passes that alter collectives stay off" in text, text
    assert 'init_process_group("cpu:gloo,cuda:nccl")' in text, text
    assert "replays=6, altered=0, kept=0, exchanges=0" in text, text
