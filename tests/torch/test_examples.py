"""A framework that is not PyTorch replays through the C header alone (`examples/numpy_framework.py`)."""

import re
import subprocess
import sys
from pathlib import Path

from rote import _native

EXAMPLE = Path(__file__).parents[2] / "examples/numpy_framework.py"


def test_a_framework_on_numpy_is_recorded_and_replayed() -> None:
    library = _native.lib._name
    done = subprocess.run([sys.executable, EXAMPLE, library], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    found = re.search(r"400 steps: (\d+) replayed, (\d+) fell back; losses and weights are the same bits", done.stdout)
    assert found, done.stdout
    # Two batch sizes and two learning rates are recorded, all other steps replayed.
    assert int(found[1]) >= 390 and int(found[2]) <= 6, done.stdout
