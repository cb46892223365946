"""The examples that need no library besides PyTorch: a framework on NumPy that replays through the C header alone, and
Llamas in DistributedDataParallel and FSDP2 (`make demo` runs the one in DTensor)."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from rote import _native

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_a_framework_on_numpy_is_recorded_and_replayed() -> None:
    library = _native.lib._name
    done = subprocess.run(
        [sys.executable, EXAMPLES / "numpy_framework.py", library], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    found = re.search(r"400 steps: (\d+) replayed, (\d+) fell back; losses and weights are the same bits", done.stdout)
    assert found, done.stdout
    # Two batch sizes and two learning rates are recorded, all other steps replayed.
    assert int(found[1]) >= 390 and int(found[2]) <= 6, done.stdout


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "script, ranks, options",
    [
        ("train_llama.py", 2, ["--parallel", "data"]),
        ("train_fsdp.py", 2, []),
        ("train_fsdp.py", 4, ["--tp", "2", "--mixed"]),
        ("train_fsdp.py", 4, ["--replicas", "2"]),
    ],
)
def test_a_llama(script: str, ranks: int, options: list[str], tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(EXAMPLES / script)]
    options = [*options, "--steps", "24", "--plans", str(tmp_path)]
    done = subprocess.run([sys.executable, *launch, *options], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"replays +(\d+)", done.stdout)
    assert found and int(found[1]) >= 16, done.stdout
