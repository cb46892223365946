"""How much the sweeps run, and which part of it.

`ROTE_TEST_EVERYTHING=1` runs all that takes hours; `ROTE_TEST_SEED` takes other parts, and other data.
"""

import os

EVERYTHING = os.environ.get("ROTE_TEST_EVERYTHING") == "1"
SEED = int(os.environ.get("ROTE_TEST_SEED", "1"))
