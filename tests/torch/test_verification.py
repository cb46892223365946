"""`verify=` runs replays beside eager, on all ranks or on none."""

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY, Calls, Capture, Run, check_right
from test_agreement import numbers, three_sums
from torch import Tensor

CALLS = 14


def sums_of(scales: list[float], plans: Path | None = None, passes: str = "default") -> Run:
    def step(x: Tensor, scale: float) -> list[Tensor]:
        return three_sums(x, scale)

    def script(capture: Capture) -> Calls:
        captured = capture(step, verify=6, plans=plans, passes=passes)
        for i, scale in enumerate(scales):
            yield captured(numbers(i), scale)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return check_right(script)


@pytest.mark.ranks(3, timeout=60)
@pytest.mark.parametrize("passes", ["default", "+buckets,+sums"])
@pytest.mark.parametrize("rank", [0, 2])
def test_one_rank_that_misses(rank: int, passes: str) -> None:
    """The others replay meanwhile, once: what it issues once has one answer."""
    odd = [3.0 if i in (4, 5, 8) else 2.0 for i in range(CALLS)]
    run = sums_of(odd if dist.get_rank() == rank else [2.0] * CALLS, passes=passes)
    if not ORACLE_ONLY:
        assert run.stats[-1][0].replays >= CALLS - 5


@pytest.mark.ranks(2, timeout=60)
def test_plans_that_one_rank_lacks(tmp_path: Path) -> None:
    """It records twice what the other records once."""
    plans = tmp_path / str(dist.get_rank())
    sums_of([2.0] * CALLS, plans)
    if dist.get_rank() == 1:
        for file in sorted(plans.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
    run = sums_of([2.0] * CALLS, plans)
    if not ORACLE_ONLY:
        assert run.stats[-1][0].recordings == dist.get_rank()


@pytest.mark.ranks(3, timeout=60)
def test_ranks_without_a_backend_on_the_cpu_exchange_by_the_store() -> None:
    from rote import _ranks

    group, rank = dist.distributed_c10d._get_default_group(), dist.get_rank()
    for i in range(5):
        assert _ranks._by_store(group, 3, rank + i) == bytes([i, 1 + i, 2 + i])
        assert _ranks.gather(rank * i) == bytes([0, i, 2 * i])


def test_arguments_that_cannot_be_written_are_put_back_by_leaving_them() -> None:
    def script(capture: Capture) -> Calls:
        captured = capture(lambda x, z: [x * 2, z + 1], verify=3)
        for i in range(8):
            yield captured((torch.ones(1, 3) + i).expand(4, 3), torch.tensor([1 + 1j, 2j]).conj())
        return {}

    check_right(script)


@pytest.mark.skipif(ORACLE_ONLY, reason="Rote's own comparison")
@pytest.mark.parametrize("generator", ["CPU", "CUDA"])
def test_generators_are_compared(generator: str) -> None:
    from rote._verify import Snapshot, compare

    state, other = torch.zeros(16, dtype=torch.uint8), torch.ones(16, dtype=torch.uint8)
    taken = Snapshot({}, {}, [], state, state)
    moved = dataclasses.replace(taken, **{f"{generator.lower()}_generator": other})
    assert compare(taken, taken) is None
    assert compare(moved, taken) == f"the state of the {generator} generator"
    assert compare(dataclasses.replace(taken, cuda_generator=None), taken) is None  # CUDA began in between
