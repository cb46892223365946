"""Every op for which DTensor has a sharding rule has one here, or stands in
`propagation_uncovered.txt` with a reason.

Covered means that the op's name has two samples at least, that its rule answers
for them, and that what it says of the outputs is what PyTorch returns.
"""

import json
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from propagation import engine, samples

LIST = Path(__file__).with_name("propagation_uncovered.txt")
# Ops that PyTorch has no CPU kernel for.
NOT_ON_CPU = {"aten::_fused_rms_norm_backward"}
# Ops that are there once torch.compile has been imported.
WITH_THE_COMPILER = {"prims::fma"}
FACTORY = ("dtype", "layout", "device", "pin_memory")
NAMES = {dtype: name for name, dtype in samples.DTYPES.items()}


def qualified(op: Any) -> str:
    """`aten::add.Tensor`; the default overload has no suffix."""
    name: str = op._schema.name
    return f"{name}.{op._overloadname}" if op._overloadname != "default" else name


def without_overload(name: str) -> str:
    return name.split(".")[0]


@cache
def registered() -> list[str]:
    """The overloads that DTensor has rules for."""
    propagator = DTensor._op_dispatcher.sharding_propagator
    registries = (
        propagator.op_to_rules,
        propagator.op_strategy_funcs,
        propagator.op_single_dim_strategy_funcs,
    )
    return sorted({qualified(op) for registry in registries for op in registry} - WITH_THE_COMPILER)


def uncovered() -> dict[str, str]:
    """Names of the list, with their reasons."""
    lines = (line.split("#")[0].strip() for line in LIST.read_text().splitlines())
    return {name: reason.strip() for name, _, reason in (line.partition(" ") for line in lines if line)}


def rote(*arguments: str, stdin: str = "") -> list[dict[str, Any]]:
    binary = engine.binary()
    if binary is None:
        pytest.skip("no rote binary: cargo build --release")
    command = [str(binary), "propagate", "--json", *arguments]
    ran = subprocess.run(command, input=stdin, capture_output=True, text=True)
    return [json.loads(line) for line in ran.stdout.splitlines()]


@cache
def answers() -> dict[str, dict[str, Any]]:
    """Which rule answers for each overload, and how many samples there are."""
    rows = rote("--ops", "-", stdin="\n".join(registered()))
    assert [row["op"] for row in rows] == registered()
    return {row["op"]: row for row in rows}


def is_covered(overload: str) -> bool:
    row = answers()[overload]
    return row["rule"] is not None and row["samples"] >= 2 and row["samples_of_rule"] >= 2


def test_dtensors_registries_are_read() -> None:
    names = {without_overload(op) for op in registered()}
    # As counted with torch 2.15: aten::abs and prims::abs are one of 632 names.
    assert len(registered()) >= 1239
    assert len({name.split("::")[1] for name in names}) >= 632


def test_every_op_of_dtensor_is_covered_or_listed() -> None:
    listed = uncovered()
    missing = {op for op in registered() if not is_covered(op)}
    unlisted = sorted(op for op in missing if without_overload(op) not in listed)
    assert not unlisted, f"neither covered nor in {LIST.name}: {unlisted}"


def test_the_list_holds_only_what_is_not_covered() -> None:
    overloads = defaultdict(list)
    for op in registered():
        overloads[without_overload(op)].append(op)
    for name, reason in uncovered().items():
        assert name in overloads, f"{name}: DTensor has no rule either"
        assert not all(is_covered(op) for op in overloads[name]), f"{name} is covered"
        assert reason, f"{name} is listed without a reason"


def test_the_list_is_shorter_than_three_percent_of_the_names() -> None:
    names = {without_overload(op).split("::")[1] for op in registered()}
    assert len(uncovered()) < 0.03 * len(names)


def kinds(arguments: list[Any]) -> list[str]:
    return [str(argument.type) for argument in arguments]


def test_forms_take_the_arguments_of_the_op_they_follow_from() -> None:
    compared = 0
    for name, row in answers().items():
        try:
            base = samples.overload(row["rule"] or "")._schema.arguments
        except (AttributeError, ValueError):
            continue  # Some in-place and out= forms have no functional op.
        own = samples.overload(name)._schema.arguments
        if row["form"] == "out":
            written = [a for a in own if a.kwarg_only and a.alias_info is not None and a.alias_info.is_write]
            assert written, name
            own = [a for a in own if a not in written]
        elif row["form"] != "in place":
            continue
        # Where a tensor is given, it says dtype and device; trailing defaults
        # need not be there.
        names = {a.name for a in own}
        base = [a for a in base if a.name in names or a.name not in FACTORY]
        base = [a for at, a in enumerate(base) if at < len(own) or not a.has_default_value()]
        # polygamma_ has the tensor first, polygamma the order.
        assert sorted(kinds(own)) == sorted(kinds(base)), f"{name} as {row['rule']}"
        compared += 1
    assert compared > 400


def returned(value: Any, sample: samples.Sample) -> list[tuple[str, list[int]]]:
    """Dtype and shape of what an op returned; numbers have no dims."""
    if isinstance(value, torch.Tensor):
        return [(NAMES[value.dtype], list(value.shape))]
    if isinstance(value, (list, tuple)):
        return [meta for v in value if v is not None for meta in returned(v, sample)]
    if isinstance(value, bool):
        return [("bool", [])]
    return [] if value is None else [(NAMES[sample.tensors[0].dtype], [])]


def test_outputs_are_those_of_pytorch() -> None:
    generator = torch.Generator().manual_seed(0)
    # What runs on other devices only is not run here.
    chosen = [s for s in samples.read() if s.family != "nn_cuda"]
    placed = [s.written(["R"] * len(s.tensors)) for s in chosen]
    questions = [{"op": s.name, "mesh": "2", "args": args} for s, args in zip(chosen, placed, strict=True)]
    rows = rote("--batch", stdin="\n".join(json.dumps(q) for q in questions))
    wrong, absent = [], set()
    for sample, row in zip(chosen, rows, strict=True):
        args, kwargs = sample.filled([t.make(generator) for t in sample.tensors])
        try:
            expected = returned(sample.op(*args, **kwargs), sample)
        except NotImplementedError:
            absent.add(sample.name)
            continue
        found = [(o["dtype"], o["shape"]) for o in row.get("outputs", [])]
        if found != expected:
            wrong.append(f"{sample.family}.txt:{sample.line}: {found} instead of {expected}")
    assert not wrong, "\n".join(wrong)
    assert absent <= NOT_ON_CPU
