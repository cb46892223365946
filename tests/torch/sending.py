"""`sent` of the benches: the bytes that a rank sends."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benches"))  # behind this folder, which has modules of the same names
from steps.sent import sent

__all__ = ["sent"]
