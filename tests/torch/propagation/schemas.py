"""PyTorch's schemas of the overloads that have rules, as `propagation/src/schemas.txt` holds them.

    python -m tests.torch.propagation.schemas

writes the file anew.
"""

import json
import re
import subprocess

import torch
import torch._prims

from . import engine
from .samples import ROOT

FILE = ROOT / "propagation" / "src" / "schemas.txt"
HEAD = """\
# The arguments of every overload that has a rule, from PyTorch's schemas. `python -m tests.torch.propagation.schemas`
# writes this file.
"""


def known() -> dict[str, str]:
    """The arguments of every overload of `aten` and `prims`, as in `(Tensor self, int dim=0)`."""
    schemas = [s for s in torch._C._jit_get_all_schemas() if s.name.startswith(("aten::", "prims::"))]
    return {s.name + (f".{s.overload_name}" if s.overload_name else ""): arguments(str(s)) for s in schemas}


def arguments(schema: str) -> str:
    """The part in parentheses, without what is said of aliases."""
    inside = schema[schema.index("(") : schema.rindex(" -> ")]
    return re.sub(r"\((?:\w+(?:\|\w+)*)?[!]?(?: -> [^)]*)?\)(?=[\[\]? ])", "", inside.replace("SymInt", "int"))


def text() -> str:
    """What the file should hold."""
    all_known = known()
    binary = engine.binary()
    if binary is None:
        raise RuntimeError("no rote binary: cargo build --release")
    command = [str(binary), "propagate", "--json", "--ops", "-"]
    ran = subprocess.run(command, input="\n".join(sorted(all_known)), capture_output=True, text=True)
    rows = [json.loads(line) for line in ran.stdout.splitlines()]
    return HEAD + "".join(f"{row['op']}{all_known[row['op']]}\n" for row in rows if row["rule"] is not None)


if __name__ == "__main__":
    FILE.write_text(text())
