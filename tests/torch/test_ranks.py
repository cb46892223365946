"""Pools of ranks: what they do when a rank is killed."""

import os
import signal
from pathlib import Path

import pytest
from ranks import CaseFailed, Pools, eager_side


def die(marker: str, eager: bool) -> int:
    """Kills the process, the first time; the number of times that it was called."""
    times = Path(marker).read_text() if Path(marker).exists() else ""
    Path(marker).write_text(times + "x")
    if eager:
        with eager_side():
            if not times:
                os.kill(os.getpid(), signal.SIGABRT)
    elif not times:
        with eager_side():
            pass
        os.kill(os.getpid(), signal.SIGABRT)
    return len(times) + 1


def test_a_case_whose_eager_side_died_runs_again(pools: Pools, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="die runs again: eager PyTorch died in it"):
        assert pools.run(1, die, {"marker": str(tmp_path / "marker"), "eager": True}) == [2]


def test_a_case_that_died_elsewhere_fails(pools: Pools, tmp_path: Path) -> None:
    with pytest.raises(CaseFailed, match="the process died, exit code -6"):
        pools.run(1, die, {"marker": str(tmp_path / "marker"), "eager": False})
