"""A script from a seed, or from its name."""

import dataclasses
import random
import re
import string
import textwrap
from collections.abc import Iterator

from .changes import CALLS, VALUES, WHEN
from .holders import HOLDERS
from .places import OUT_OF_SIGHT, PLACES
from .reads import READS
from .things import DEFINED, INSIDE, STATE, THINGS, UNSEEN

# What the step makes of the number.
STEPS = {
    "plain": "return x * s, n * s",
    "train": "w.grad = None\nloss = (w * x).sum() * s\nloss.backward()\nreturn loss.detach()",
    "random": "return x * s + torch.rand(4)",
    "returned": "return x * 2, s",
    "no_grad": "with torch.no_grad():\n    return x * s + w",
}
_IMPORTS = """
abc array asyncio builtins collections concurrent.futures contextlib contextvars copy copyreg ctypes dataclasses
datetime decimal enum fractions functools gc hashlib heapq importlib inspect io ipaddress itertools json logging math
multiprocessing operator os pathlib queue random re string struct sys threading types typing uuid warnings weakref
torch
""".split()  # noqa: SIM905
_PREAMBLE = {
    **DEFINED,
    r"\bwith_scale\b": "def with_scale(thing, value):\n    thing.scale = value\n    return thing\n",
    r"\bDerived2\b": "class Derived2(float):\n    pass\n",
    r"\bLevel\b": "class Level(enum.IntEnum):\n    TWO = 2\n    THREE = 3\n",
    r"\bmesh\(": (
        "def mesh(shape=(2,)):\n    from torch.distributed.device_mesh import init_device_mesh\n"
        "    from torch.testing._internal.distributed.fake_pg import FakeStore\n\n"
        "    if not torch.distributed.is_initialized():\n"
        "        torch.distributed.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)\n"
        "    return init_device_mesh('cpu', shape)\n"
    ),
}
_ATTEMPT = """
def attempt(step, *args, **kwargs):
    try:
        return step(*args, **kwargs)
    except Exception as error:
        return "raised " + type(error).__name__
"""
_MAIN = """
if __name__ == "__main__":  # with "eager", what eager gives
    import rote

    torch.manual_seed(0)
    for found in run((lambda fn, **options: fn) if "eager" in sys.argv else rote.capture):
        print(found)
"""
# Of these, names that are kept in data are out of sight.
_PYTHON_MODULES = ("python_module", "module_getattr", "torch_attribute", "library_named_module")
# What nobody sees there.
_UNSEEN = {name.split("/")[0] for name in OUT_OF_SIGHT.values() if "/direct/" in name}


@dataclasses.dataclass(frozen=True)
class Script:
    """The choices that make a script; its name is what they are called."""

    place: str
    holder: str
    read: str
    how: str
    values: str
    when: str
    step: str

    @property
    def name(self) -> str:
        return "/".join(dataclasses.astuple(self))

    @property
    def quiet(self) -> bool:
        """Whether nothing changes that the step reads."""
        return self.when == "never"

    def source(self, main: bool = False) -> str:
        place, holder, read = PLACES[self.place], HOLDERS[self.holder], READS[self.read]
        thing = THINGS.get(self.values)
        values = VALUES[place.takes][self.values] if thing is None else thing.values

        def fill(text: str, held: str, value: str) -> str:
            return string.Template(text).safe_substitute(H=held, V=value, V0=values[0])

        def change(which: int) -> str:
            value, out = values[which], holder.outside
            if self.how == "inside" and which == 1:
                return string.Template({**INSIDE, **UNSEEN}[self.values]).safe_substitute(
                    E=f"({fill(place.get, out, value)})"
                )
            if self.how == "replace":
                return f"{out} = {fill(place.fresh, out, value)}"
            if self.how in ("delete", "appear") and place.delete and which == (1 if self.how == "delete" else 0):
                return fill(place.delete, out, value)
            if self.how.startswith("patch ") and which == 1:
                return fill(place.patches[self.how[6:]], out, value)
            return fill(place.set or "pass", out, value)

        made = fill((place.absent if self.how == "appear" else place.fresh) or "None", "held", values[0])
        owner, key = place.attribute or place.item or ("", "")
        holds = holder.inside
        value = fill(place.get, holds, values[0])
        reading = {
            "E": f"({value})" if " " in value else value,
            "O": fill(owner, holds, values[0]),
            "K": key,
            "I": fill(place.entries or "", holds, values[0]),
        }
        body = string.Template(read.text if thing is None else thing.ask).safe_substitute(reading)
        if self.when == "inside":
            body += "\nchange_b()"
        tail = STEPS[self.step]
        named = "\n".join((made, body, *values))
        state = [each for each in (holder.state, "w" if "w" in re.findall(r"\b\w\b", tail) else "") if each]
        state += [each for each in STATE if re.search(rf"(?<!\.)\b{each}\b", named)]
        names = holder.names
        lines = [f"global {names}"] if holder.top else []
        lines += [holder.setup.replace("$F", made)]
        lines += [string.Template(read.before).safe_substitute(reading)] if read.before else []
        lines += ["w = nn.Parameter(torch.ones(4))"] if "w" in state else []
        for which, letter in enumerate("abc"):
            place_of = "global" if holder.top else "nonlocal"
            lines += [f"def change_{letter}():\n    {place_of} {names}\n" + textwrap.indent(change(which), "    ")]
        lines += [f"def step({holder.parameters}):\n" + textwrap.indent(f"{body}\n{tail}", "    ")]
        given = f", state=[{', '.join(state)}]" if state else ""
        lines += [f"captured = capture({holder.captured}{given})"]
        when = re.sub(r"\$([ABC])", lambda letter: f"attempt(change_{letter[1].lower()})", WHEN[self.when])
        result = f"attempt(captured, {holder.call})"
        loop = f"{when}\nx, n = torch.arange(4.0) + call, torch.arange(4)\n"
        loop += f"yield {result}, w.grad" if self.step == "train" else f"yield {result}"
        lines += [f"for call in range({CALLS}):\n" + textwrap.indent(loop, "    ")]
        run = "def run(capture):\n" + textwrap.indent("\n".join(lines), "    ")
        if place.undo:
            run = "def run(capture):\n    try:\n" + textwrap.indent("\n".join(lines), "        ")
            run += "\n    finally:\n" + textwrap.indent(fill(place.undo, "held", values[0]), "        ")
        parts = [fill(place.define, "held", values[0]), holder.define, read.define, _ATTEMPT, run]
        text = "\n\n".join(part.strip("\n") for part in parts if part)
        for word, definition in reversed(_PREAMBLE.items()):
            if re.search(word, text):
                text = f"{definition}\n\n{text}"
        imports = [
            f"import {name}"
            for name in _IMPORTS
            if re.search(rf"\b{name}\.", text) or (main and name in ("sys", "torch"))
        ]
        imports += ["import numpy as np"] if "np." in text else []
        imports += ["import dataclasses"] if "@dataclasses" in text and "import dataclasses" not in imports else []
        imports += ["from torch import nn"] if "nn." in text else []
        imports += (
            ["from torch.distributed.tensor import placement_types as placements"] if "placements." in text else []
        )
        return "\n".join(imports) + f"\n\n\n{text}\n" + (f"\n{_MAIN}" if main else "")


def from_name(name: str) -> Script:
    return Script(*name.split("/"))


def hows(place_name: str) -> list[str]:
    place = PLACES[place_name]
    found = ["set"] * 3 if place.set else []
    found += ["replace"] if not place.alone and place_name != "itself" else []
    found += ["delete"] if place.delete else []
    found += ["appear"] if place.absent and place.set else []
    return found + [f"patch {name}" for name in place.patches]


def fits(script: Script) -> bool:
    """Whether the choices make a script."""
    place, holder, read = PLACES[script.place], HOLDERS[script.holder], READS[script.read]
    if place.alone and script.holder != "cell":
        return False
    if holder.fixed and (script.how == "replace" or ("$H =" in (place.set or "") and script.how == "set")):
        return False
    if (read.of == "attribute" and not place.attribute) or (read.of == "item" and not place.item):
        return False
    if read.of == "entries" and not place.entries:
        return False
    if read.where == "global" and not (holder.top and "'" not in place.get and "\n" not in place.get):
        return False
    if read.where == "reach" and ("," in holder.parameters[4:] or "self" in holder.parameters):
        return False
    if script.read == "hash" and "nan" in "".join(VALUES[place.takes].get(script.values, ())):
        return False  # that is its address
    if script.read == "getattr_computed" and script.place in _PYTHON_MODULES:
        return False  # out of sight
    if script.read == "own_dict_len" and script.place == "torch_attribute":
        return False  # out of sight
    asked = script.read == "asked"
    if asked != (script.values in THINGS) or (asked and place.takes != "any"):
        return False
    if script.how == "inside":  # what entries of large containers hold is out of sight
        return script.values in INSIDE and not script.place.startswith("long_")
    return script.how in hows(script.place) and (asked or script.values in VALUES[place.takes])


def each() -> Iterator[Script]:
    """Each place with each way to change it, each holder, each read and each sort of values, as plain as can be."""
    found = [Script(place, "cell", _read(how), how, "", "after", "plain") for place in PLACES for how in hows(place)]
    found += [
        Script(place, holder, "direct", "set", "", "after", "plain")
        for place in ("itself", "object", "list", "tensor")
        for holder in HOLDERS
    ]
    places = {"value": ["itself"], "attribute": ["object", "python_module"], "item": ["dict"], "entries": ["list"]}
    found += [
        Script(place, "global" if read.where == "global" else "cell", name, how, "", "after", "plain")
        for name, read in READS.items()
        for place in places.get(read.of, ())
        for how in ("set", "appear")
    ]
    found += [
        Script(place, "cell", "direct", "set", values, "after", "plain")
        for place in ("itself", "complex", "numpy_scalar", "numpy_float32", "numpy_complex")
        for values in VALUES[PLACES[place].takes]
    ]
    for script in dict.fromkeys(found):
        values = script.values or next(iter(VALUES[PLACES[script.place].takes]))
        script = dataclasses.replace(script, values=values)
        if fits(script) and script.place not in _UNSEEN:
            yield script


def _read(how: str) -> str:
    return "try" if how in ("delete", "appear") else "direct"


def generate(seed: int) -> Script:
    """A random one."""
    chance = random.Random(seed)
    while True:
        name = chance.choice([name for name in PLACES if name not in _UNSEEN])
        place = PLACES[name]
        reads = [read for read, each in READS.items() if each.of == "value"]
        special = [read for read, each in READS.items() if each.of not in ("value", "thing")]
        values = list(VALUES[place.takes])
        asked = place.takes == "any" and chance.random() < 0.4
        script = Script(
            name,
            "cell" if place.alone else chance.choice(list(HOLDERS)),
            "asked" if asked else chance.choice(special if chance.random() < 0.4 else reads),
            chance.choice(hows(name) if not asked or chance.random() < 0.5 else ["inside"]),
            chance.choice(list(THINGS)) if asked else chance.choice([*values, *["number"] * len(values)]),
            chance.choice(list(WHEN)),
            chance.choice(["plain", "plain", *STEPS]),
        )
        if fits(script):
            return script
