"""The first instruction of a plan whose result differs from eager's, and a report of it.

The call runs three times from the state that it began in: eagerly, under observation; by the plan as it was recorded;
and by what passes have made of the plan. Every result is kept as a digest. Eager and the plan are compared by the
order of their ops, the plan and its passes by values. Further runs keep the two tensors that differ.
"""

from __future__ import annotations

import hashlib
import json
from ctypes import byref, c_uint32
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import _ranks
from ._native import ShowCallback, check, error, lib
from ._numbers import NO_INDEX
from ._recording import Recording
from ._verify import Snapshot, bits

if TYPE_CHECKING:
    from ._step import Step

# A value, by its number in the recorded plan, and how many instructions have shown it before.
_Key = tuple[int, int]


@dataclass
class Finding:
    """What differs first."""

    instr: int | None = None  # of the recorded plan
    where: str = ""
    text: str = ""
    source: str = ""
    statistics: str = ""

    def __str__(self) -> str:
        if self.instr is None:
            return self.where
        line = f", {self.source}" if self.source else ""
        return f"instruction {self.instr} ({self.text}{line}): {self.where}"


@dataclass
class _Eager:
    """What eager's ops gave: for each that a plan counts, digests of results and of what it wrote."""

    ops: list[tuple[list[bytes | None], list[bytes | None]]] = field(default_factory=list)
    kept: torch.Tensor | None = None


@dataclass
class _Shown:
    """What a plan's instructions gave."""

    digests: dict[_Key, bytes] = field(default_factory=dict)
    by_instr: dict[int, list[_Key]] = field(default_factory=dict)
    kept: torch.Tensor | None = None
    problem: str = ""


def _digest(tensor: torch.Tensor) -> bytes:
    with _disable_current_modes():
        content = bits(tensor).cpu().numpy().tobytes()
    return hashlib.blake2b(content, digest_size=16).digest()


def _flat(value: Any) -> list[torch.Tensor | None]:
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _flat(item)]
    return [value if isinstance(value, torch.Tensor) else None]


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor | None]:
    found: list[torch.Tensor | None] = []
    for i, formal in enumerate(func._schema.arguments):
        if formal.alias_info is not None and formal.alias_info.is_write:
            found += _flat(args[i] if i < len(args) else kwargs.get(formal.name))
    return [tensor for tensor in found if tensor is not None]


class _Search:
    def __init__(self, step: Step, args: Any, kwargs: Any, before: Snapshot) -> None:
        self._step, self._args, self._kwargs, self._before = step, args, kwargs, before
        self._session, self._variant = step.session, step.variant.value
        text = lib.rote_session_program(self._session, self._variant)
        if text is None:
            raise RuntimeError(f"rote: {error()}")
        self.program: list[dict[str, Any]] = json.loads(text)
        self.counted = [i for i, row in enumerate(self.program) if row["counted"]]

    def eager(self, keep: tuple[int, int] | None = None) -> tuple[_Eager, dict[str, Any] | None]:
        """Runs the call eagerly. Also says where its recording differs from the plan. ``keep``: the op and the place
        among its results and writes of a tensor to keep."""
        self._before.restore()
        found, count = _Eager(), c_uint32()

        def seen(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            check(lib.rote_record_executed(self._session, byref(count)))
            if count.value <= len(found.ops):
                return
            tensors = _flat(result), _written(func, args, kwargs)
            outs, writes = ([None if t is None else _digest(t) for t in each] for each in tensors)
            if keep is not None and keep[0] == len(found.ops):
                tensor = [*tensors[0], *tensors[1]][keep[1]]
                with _disable_current_modes():
                    found.kept = None if tensor is None else tensor.detach().clone()
            found.ops.append((outs, writes))

        check(lib.rote_record_begin(self._session))
        recording = Recording(self._step, self._args, self._kwargs)
        try:
            recording.prepare()
            recording.schedulers.rehearses = True
            recording.run(seen)
            changed = recording.compare(self._variant)
        except BaseException:
            recording.close()
            lib.rote_record_abort(self._session)
            raise
        return found, changed

    def shown(self, recorded: bool, keep: _Key | None = None) -> _Shown:
        """Runs the call by the plan, or by what passes have made of it."""
        self._before.restore()
        found = _Shown()
        count: dict[int, int] = {}
        last: dict[int, int] = {}

        def seen(_: Any, instr: int, value: int, tensor: Any) -> None:
            if value == NO_INDEX or last.get(value) == instr:
                return
            try:
                last[value] = instr
                key = value, count.get(value, 0)
                count[value] = key[1] + 1
                found.digests[key] = _digest(tensor)
                found.by_instr.setdefault(instr, []).append(key)
                if key == keep:
                    found.kept = tensor.detach().clone()
            except Exception as problem:
                found.problem = repr(problem)

        session, call = self._session, (self._args, self._kwargs)
        try:
            check(lib.rote_session_show(session, self._variant, *call, recorded, ShowCallback(seen), None))
        except Exception as problem:
            found.problem = f"raises {problem!r}"
        return found

    def finding(self) -> Finding:
        eager, changed = self.eager()
        recorded = self.shown(True)
        passed = self.shown(False)
        end = len(self.program) if changed is None else int(changed["instr"])
        eager_at = self._against_eager(eager, recorded, end)
        key = None
        if eager_at is not None:
            key = eager_at[2]
            found = self._named(eager_at[0], "the plan computes something else here")
        elif changed is not None:
            found = self._named(end, f"the plan has `{changed['plan']}`, eager does `{changed['now']}` now")
        else:
            instr_, key, what = self._against_passes(recorded, passed)
            found = Finding(where=what) if instr_ is None else self._named(instr_, what)
        # The same runs on every rank, whatever it has found.
        kept = None if eager_at is None else (self.counted.index(eager_at[0]), eager_at[1])
        tensors = [self.eager(kept)[0].kept, self.shown(True, key).kept, self.shown(False, key).kept]
        pair = tensors[:2] if eager_at is not None else tensors[1:]
        if pair[0] is not None and pair[1] is not None:
            found.statistics = statistics(pair[0], pair[1])
        problem = recorded.problem or passed.problem
        if problem:
            found.where += f"; replayed one by one: {problem}"
        return found

    def _named(self, instr: int, where: str) -> Finding:
        row = self.program[instr] if instr < len(self.program) else {"text": "the end of the plan", "source": ""}
        return Finding(instr, where, row["text"], row["source"])

    def _against_eager(self, eager: _Eager, recorded: _Shown, end: int) -> tuple[int, int, _Key] | None:
        """The first instruction that differs, the place of the tensor among its results and writes, and its key."""
        for (outs, writes), instr in zip(eager.ops, self.counted, strict=False):
            if instr >= end:
                return None
            row = self.program[instr]
            keys = {value: (value, nth) for value, nth in recorded.by_instr.get(instr, [])}
            made = row["outs"] if row["outs"] or writes else len(row["shown"])  # a wait makes nothing, and shows one
            pairs = [*zip(row["shown"][:made], enumerate(outs), strict=False)]
            pairs += zip(row["shown"][made:], enumerate(writes, len(outs)), strict=False)
            for (value, _), (place, digest) in pairs:
                key = keys.get(value)
                if key is not None and digest is not None and recorded.digests[key] != digest:
                    return instr, place, key
        return None

    def _against_passes(self, recorded: _Shown, passed: _Shown) -> tuple[int | None, _Key | None, str]:
        """The first instruction whose result passes have changed: one that is left out, or that differs."""
        what = "the program that passes have made of the plan computes something else"
        left_out: dict[int, int] = {}  # of each root, the last write, if passes left it out
        for instr, row in enumerate(self.program):
            keys = recorded.by_instr.get(instr, [])
            for key in keys:
                if key in passed.digests and passed.digests[key] != recorded.digests[key]:
                    roots = [*row["reads"], *(root for _, root in row["shown"])]
                    gone = max((left_out[root] for root in roots if root in left_out), default=None)
                    if gone is not None:
                        return gone, None, "passes have left it out"
                    return instr, key, what
            roots_of = dict(row["shown"])
            for key in keys:
                root = roots_of.get(key[0])
                written = key[1] > 0 or key[0] in row["reads"]
                if root is None or row["view"] or not row["counted"]:
                    continue
                if key in passed.digests:
                    left_out.pop(root, None)
                elif written:
                    left_out[root] = instr
        if left_out:
            return min(left_out.values()), None, "passes have left it out"
        return None, None, "no instruction gave another result when the call was run again"


def statistics(expected: torch.Tensor, found: torch.Tensor) -> str:
    """How two tensors differ."""
    lines = [f"expected {expected.dtype}{list(expected.shape)}, found {found.dtype}{list(found.shape)}"]
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return lines[0]
    a, b = (t.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1) for t in (expected, found))
    size = a.element_size()
    differs = (bits(a).reshape(-1, size) != bits(b).reshape(-1, size)).any(1)
    count = int(differs.sum())
    lines.append(f"{count} of {a.numel()} elements differ")
    if not count:
        return "\n".join(lines)
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.to(wide), b.to(wide)
    apart = (x - y).abs()
    finite = apart.isfinite()
    if bool(finite.any()):
        relative = torch.where(apart == 0, 0.0, apart / x.abs().clamp(min=torch.finfo(torch.float64).tiny))
        lines.append(f"largest difference {float(apart[finite].max()):.6g}")
        lines.append(f"largest relative difference {float(relative[finite].max()):.6g}")
    lines.append(f"NaN: {int(x.isnan().sum())} expected, {int(y.isnan().sum())} found")
    at = int(differs.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), expected.shape)] if expected.dim() else []
    lines.append(f"first at {index}: expected {a[at].item()!r}, found {b[at].item()!r}")
    return "\n".join(lines)


def find(step: Step, args: Any, kwargs: Any, before: Snapshot) -> Finding:
    """The first instruction that differs from eager. To be called on all ranks; the state is that of some point of
    the call afterwards."""
    try:
        return _Search(step, args, kwargs, before).finding()
    except Exception as problem:
        return Finding(where=f"the instruction was not found: {problem!r}")


def write(step: Step, what: str, finding: Finding, before: Snapshot) -> Path:
    """Writes the report into the plan directory; its path."""
    stats, rank = step.stats, torch.distributed.get_rank() if _ranks.world_size() > 1 else 0
    variant = json.loads(lib.rote_session_variant(step.session, step.variant.value) or b"{}")
    generator = hashlib.blake2b(before.cpu_generator.numpy().tobytes(), digest_size=8).hexdigest()
    cuda = "" if before.cuda_generator is None else f", of the GPU {before.cuda_generator.tolist()}"
    lines = [
        f"A replay of {step.name()} differs from eager in {what}.",
        "",
        f"first difference: {finding}",
        *(f"  {line}" for line in finding.statistics.splitlines()),
        "",
        f"plan: {Path(step.plans) / variant.get('key', '?')}, rank {rank} of {_ranks.world_size()}",
        f"call: {stats.calls}, replay {stats.replays}; passes: {step.passes or 'ROTE_PASSES or the default'}",
        f"generators before the call: digest of the CPU's state {generator}{cuda}; "
        f"torch.initial_seed() {torch.initial_seed()}",
        f"torch {torch.__version__}",
        "",
        "To reproduce: restore the state, the arguments and the generators (torch.set_rng_state) from before this",
        "call, for example from a checkpoint. Capture the function with verify=1 and this plan directory, and with",
        "trust_plans=True if this run used it. The call raises at the same difference. If it does not raise with",
        "passes='none', a pass is wrong. `rote show --ops PLAN` prints the instructions of the plan.",
        "",
    ]
    directory = Path(step.plans)
    directory.mkdir(parents=True, exist_ok=True)
    number = 0
    while (path := directory / f"difference-rank{rank}-{number}.txt").exists():
        number += 1
    path.write_text("\n".join(lines))
    return path
