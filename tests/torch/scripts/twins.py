"""A script, once eager and once captured, each in a Python module of its own."""

import contextlib
import dataclasses
import functools
import gc
import itertools
import linecache
import logging
import sys
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .changes import AFTER
from .generate import Script

_MODULE = "rote_script_main"


@dataclasses.dataclass
class Outcome:
    """What became of a script."""

    name: str
    wrong: str = ""  # where the two differ
    raised: int = 0  # calls in which eager raises
    before: int = 0  # replays before the change
    after: int = 0  # replays after it
    refusal: str = ""


def check(script: Script, stored: bool = False) -> Outcome:
    """``stored``: the change comes before the first call, and what is trusted is a plan of a run without it."""
    import rote

    outcome = Outcome(script.name)
    source = (dataclasses.replace(script, when="before") if stored else script).source()
    expected, _ = _run(source, lambda fn, **options: fn)
    if stored:
        with tempfile.TemporaryDirectory() as plans:
            unchanged = dataclasses.replace(script, when="never").source()
            _run(unchanged, functools.partial(rote.capture, plans=plans))
            found, stats = _run(source, functools.partial(rote.capture, plans=plans, trust_plans=True))
    else:
        found, stats = _run(source, rote.capture)
    outcome.raised = sum(result.startswith("raised") for result, _ in expected)
    if stats and all(stats):
        last, then = stats[-1][-1], stats[min(AFTER, len(stats)) - 1][-1]
        outcome.before, outcome.after = then.replays, last.replays - then.replays
        outcome.refusal = next((reason for each in stats[-1] for reason in each.refusals), "")
    for call, (want, got) in enumerate(zip(expected, found, strict=False)):
        if want != got:
            outcome.wrong = f"call {call}: " + (
                "the generator's state" if want[0] == got[0] else _difference(want[0], got[0])
            )
            return outcome
    if len(expected) != len(found):
        outcome.wrong = f"{len(expected)} calls, then {len(found)}"
    return outcome


def _difference(want: str, got: str) -> str:
    """The lines that differ."""
    lines = list(itertools.zip_longest(want.splitlines(), got.splitlines(), fillvalue="nothing"))
    return "\n".join(f"expected {one}, found {other}" for one, other in lines if one != other)


def _run(source: str, capture: Callable[..., Any]) -> tuple[list[tuple[str, bytes]], list[list[Any]]]:
    """What each call gave, with the generator's state, and the counters of the captured steps."""
    module = types.ModuleType(_MODULE)
    file = f"<{_MODULE}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    steps: list[Any] = []

    def remember(fn: Any, **options: Any) -> Any:
        steps.append(capture(fn, **options))
        return steps[-1]

    results: list[tuple[str, bytes]] = []
    stats: list[list[Any]] = []
    with _as_it_was() as said:
        sys.modules[_MODULE] = module
        torch.manual_seed(0)
        exec(compile(source, file, "exec"), vars(module))
        try:
            for result in module.run(remember):
                results.append((told(result), torch.get_rng_state().numpy().tobytes()))
                stats.append([getattr(step, "stats", None) for step in steps])
        except Exception as problem:
            results.append((f"the script raised {type(problem).__name__}", b""))
    failed = [str(each.message) for each in said or () if "times in a row" in str(each.message)]
    if failed:
        results.append((failed[0], b""))  # an error of Rote's own
    return results, stats


@contextlib.contextmanager
def _as_it_was() -> Iterator[list[warnings.WarningMessage]]:
    """Leaves the process as it was, whatever a script does to it."""
    arguments = sys.argv
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            sys.argv = ["script"]
            yield said
    finally:
        sys.argv = arguments
        sys.modules.pop(_MODULE, None)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        logging.disable(logging.NOTSET)
        gc.enable()


def told(result: Any) -> str:
    """A result as text that says every bit of it."""
    if isinstance(result, torch.Tensor):
        content = result.detach().contiguous().reshape(-1)
        bits = content.view(torch.uint8).numpy().tobytes().hex() if content.numel() else ""
        return f"{result.dtype}{list(result.shape)} {content[:4].tolist()} {bits}"
    if type(result) in (tuple, list):
        return "(" + ", ".join(map(told, result)) + ")"
    if result is None or type(result) is str:
        return str(result)
    return f"{type(result).__qualname__} {result!r}"
