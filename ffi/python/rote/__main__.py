"""``python -m rote train.py``: runs a script as it is, with its training loops captured."""

from __future__ import annotations

import argparse
import builtins
import os
import sys
import tokenize
import types
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ._script import Captures

_ABOUT = """\
Runs a script as `python script.py` does, and captures what trains in it: loops that call backward(), in functions and
in the text of the script, and functions that run a whole step. The script stays as it is. So do modules of your own
that it imports: these are captured too. At the end, a table tells how many turns of each loop were replayed, and why
others were not.

    python -m rote train.py --epochs 3
    torchrun --nproc-per-node 2 -m rote train.py --epochs 3
    python -m rote -m package.train --epochs 3
"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m rote", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plans", metavar="DIR", help="keep plans in this directory, for later runs too")
    parser.add_argument("--verify", metavar="N", type=int, default=0, help="compare the first N replays with eager")
    parser.add_argument("--strict", action="store_true", help="raise an error where a captured step cannot be replayed")
    parser.add_argument(
        "--no-regions", action="store_true", help="leave modules as they are where a step cannot be replayed"
    )
    parser.add_argument(
        "--package",
        metavar="NAME",
        action="append",
        default=[],
        help="capture what trains in this installed package, or module of one, too (may be given several times)",
    )
    parser.add_argument("--report", metavar="FILE", help="write a report on each step and loop to this file")
    parser.add_argument("--quiet", action="store_true", help="print no table at the end")
    parser.add_argument("-m", dest="is_module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="the script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is called with")
    return parser.parse_args()


def _location(script: str, is_module: bool) -> tuple[str, str | None, ModuleSpec | None]:
    """The file of a script, and of a module the package that it is in, and its specification."""
    if not is_module:
        return os.path.abspath(script), None, None
    from importlib.util import find_spec

    spec = find_spec(script)
    if spec is not None and spec.submodule_search_locations is not None:
        script += ".__main__"
        spec = find_spec(script)
    if spec is None or spec.origin is None:
        sys.exit(f"rote: no module named {script}")
    return spec.origin, spec.parent, spec


def _rows(name: str, stats: Any) -> list[str]:
    if not stats.calls:
        return [f"  {name}: not called"]
    told = f"  {name}: {stats.replays} of {stats.calls} calls replayed"
    why = "" if stats.replays or not stats.refusals else f": {stats.refusals[-1]}"
    return [told + why, *(_row_of_region(path, each) for path, each in stats.regions.items())]


def _row_of_region(path: str, stats: Any) -> str:
    told = f"    region {path}: {stats.replays} of {stats.calls} forwards replayed"
    back = stats.backward
    return f"{told}, {back.replays} of {back.calls} backwards" if back is not None and back.calls else told


def _report(captures: Captures, file: str | None, quiet: bool) -> None:
    """Says what was captured, on the first rank."""
    if file is not None:
        with open(file, "w", encoding="utf-8") as out:
            for name, step in captures.found:
                out.write(f"{name}: {step.__qualname__}\n{step.explain()}\n\n")
    if quiet or os.environ.get("RANK", "0") != "0":
        return
    rows = [row for name, step in captures.found for row in _rows(f"{name}: {step.__qualname__}", step.stats)]
    rows += [f"  {why}" for why in captures.why]
    rows += [f"  package {name}: not imported by the script" for name in captures.not_imported()]
    if not rows:
        rows = [
            "  nothing: no loop or function of this script's own files calls backward() (docs/integrations.md has the "
            "line for frameworks)"
        ]
        if packages := captures.packages_that_train():
            rows.append(f"  packages that do: {', '.join(packages)} (--package NAME captures what trains in one)")
    print("rote: what was captured", *rows, sep="\n", file=sys.stderr)


def main() -> None:
    """Runs a script."""
    arguments = _arguments()
    if not (arguments.is_module or sys.flags.safe_path):
        sys.path[0] = os.path.dirname(os.path.abspath(arguments.script))
    from ._script import Captures, Finder

    captures = Captures(
        arguments.package,
        plans=arguments.plans,
        verify=arguments.verify,
        strict=arguments.strict,
        regions=not arguments.no_regions,
    )
    path, package, spec = _location(arguments.script, arguments.is_module)
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except OSError as problem:
        sys.exit(f"rote: {problem}")
    module = types.ModuleType("__main__")
    module.__file__, module.__package__, module.__spec__ = path, package, spec
    module.__loader__ = SourceFileLoader("__main__", path)
    vars(module).update(__builtins__=builtins, __cached__=None)
    own = sys.modules["__main__"]  # held: whoever runs has its globals
    sys.modules["__main__"] = module
    sys.argv = [path if arguments.is_module else arguments.script, *arguments.arguments]
    sys.meta_path.insert(0, Finder(captures))
    try:
        exec(captures.code(source, path, vars(module)), vars(module))
    finally:
        _report(captures, arguments.report, arguments.quiet)
        del own


if __name__ == "__main__":
    main()
