"""`rote.propagate` says what `rote propagate` says, and what DTensor's tensors show."""

import json
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
import rote
import torch
from extent import EVERYTHING, SEED
from models import mesh
from rote._arguments import written_placement
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import TensorMeta

from propagation import calls, engine, torch_calls

aten = torch.ops.aten
OP_TESTS, SAMPLES = (None, 10) if EVERYTHING else (30, 2)


def test_a_product() -> None:
    found = rote.propagate("aten::mm", ("f32[64,32] @ S(0)", "f32[32,128] @ S(1)"), mesh="tp=4")
    gathered, kept = found.inputs
    assert (gathered.before, gathered.placements) == ((Shard(0),), (Replicate(),))
    [step] = gathered.steps
    # 64 x 32 floats over 4 ranks: each sends its 2,048 bytes to 3 others.
    assert (step.kind, step.mesh_dim, step.bytes) == ("all_gather", "tp", 6144) and found.bytes == 6144
    assert kept.placements == (Shard(1),) and not kept.steps and kept.argument == 1
    [output] = found.outputs
    assert (output.dtype, output.shape, output.strides) == (torch.float32, (64, 128), (128, 1))
    assert (output.placements, output.local_shape) == ((Shard(1),), (64, 32))
    assert output.partition_spec == "PartitionSpec(None, 'tp')"
    assert found.mesh == {"tp": 4} and found.cost_us > 0 and found.why is None


def test_it_prints_as_the_command_line_does() -> None:
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    tensors = ["f32[64,32] @ S(0),P(sum)", "f32[32,128] @ S(1),R"]
    found = rote.propagate("aten::mm", tensors, mesh="dp=2,tp=4", why=True)
    command = [str(engine.binary()), "propagate", "aten::mm", "--mesh", "dp=2,tp=4", "--why", *tensors]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    same = [line for line in printed if not line.startswith(("time", "rule"))]
    shown = str(found).splitlines()
    assert shown[0] == "aten::mm on dp=2, tp=4" and sorted(shown[1:]) == sorted(same)
    assert found.why is not None and found.why.family == "matmul" and len(found.why.choices) == 2
    assert any(other.cost_us is not None for other in found.why.choices[0].others)


@pytest.mark.ranks(2)
def test_it_says_what_dtensor_does() -> None:
    on = mesh(2)
    x = distribute_tensor(torch.randn(8, 6).t().contiguous().t(), on, [Shard(0)])
    weight = distribute_tensor(torch.randn(6, 5), on, [Replicate()])
    bias = distribute_tensor(torch.randn(5), on, [Replicate()])
    partial = DTensor.from_local(torch.randn(8, 5), on, [Partial()])
    cases: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (aten.mm.default, (x, weight), {}),
        (aten.addmm.default, (bias, x, weight), {"beta": 2}),
        (aten.sum.dim_IntList, (x, [0]), {"keepdim": True}),
        (aten.t.default, (x,), {}),
        (aten.add.Tensor, (partial, partial), {}),
        (aten.cat.default, ([weight, weight], 1), {}),
        (aten.split.Tensor, (x, 3, 1), {}),
        (aten.view.default, (weight, [30]), {}),
    ]
    for op, args, kwargs in cases:
        result = op(*args, **kwargs)
        made = result if isinstance(result, list | tuple) else [result]
        found = rote.propagate(op, args, kwargs)
        assert len(found.outputs) == len(made), op
        for output, tensor in zip(found.outputs, made, strict=True):
            assert output.placements == tensor.placements, (op, found)
            assert output.shape == tensor.shape and output.dtype == tensor.dtype, (op, found)
            assert output.strides == tensor.stride(), (op, found)
            assert output.local_shape == tensor.to_local().shape, (op, found)
    given = rote.propagate(aten.mm.default, (x._spec, weight._spec))
    assert given == rote.propagate(aten.mm.default, (x, weight)) and given.mesh == {"tp": 2}
    with pytest.raises(ValueError, match="expected tensors on"):
        rote.propagate(aten.mm.default, (x, weight), mesh=mesh(1, 2))


def test_tensors_in_all_forms_and_arguments_by_name() -> None:
    meta = torch.empty(4, 8, device="meta")
    forms = [
        "f32[4,8]{8,1} @ R",
        "f32[4,8]",
        meta,
        torch.empty(4, 8),
        TensorMeta(meta.shape, meta.stride(), meta.dtype),
    ]
    answers = [rote.propagate(aten.add.Tensor, (form, "f32[4,8] @ S(1)"), {"alpha": 3}, mesh="2") for form in forms]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0].outputs[0].placements == (Shard(1),)
    turned = rote.propagate(aten.relu.default, (meta.t(),), mesh="2")
    assert turned.outputs[0].strides == (1, 8)
    nhwc = rote.propagate(
        aten.clone.default, ("f32[2,3,4,5] @ S(0)",), {"memory_format": torch.channels_last}, mesh="2"
    )
    assert nhwc.outputs[0].strides == (60, 1, 15, 3)
    lists = rote.propagate(aten._foreach_add.List, (["f32[4] @ S(0)", "f32[2]"], ["f32[4] @ S(0)", "f32[2]"]), mesh="2")
    assert [output.placements for output in lists.outputs] == [(Shard(0),), (Replicate(),)]
    assert [tensor.argument for tensor in lists.inputs] == [0, 0, 1, 1]
    assert rote.propagate(aten.add.Tensor, ("c64[4] @ S(0)", "c64[4]"), {"alpha": 1 - 2j}, mesh="2").bytes == 0
    masked = rote.propagate(aten.embedding.default, ("f32[16,4] @ S(0)", "i64[3]"), mesh="2")
    assert type(masked.outputs[0].placements[0]).__name__ == "_MaskPartial"
    norm = rote.propagate(aten.linalg_vector_norm.default, ("f32[16,4] @ S(0)", 2), mesh="2")
    assert type(norm.outputs[0].placements[0]).__name__ == "_NormPartial"
    assert "P(norm2)" in str(norm) and "P(mask)" in str(masked)


@pytest.mark.parametrize(
    ("op", "args", "kwargs", "why"),
    [
        ("aten::no_such_op", (), {}, "there is no such op"),
        ("aten::sum.nothing", ("f32[2]",), {}, "there is no such op"),
        ("aten::add.Tensor", ("f32[2]",), {}, "expected 2 to 3 arguments, found 1"),
        ("aten::add.Tensor", ("f32[2]", "f32[2]", 3), {}, "expected at most 2 arguments, found 3"),
        ("aten::add.Tensor", ("f32[2]",), {"self": "f32[2]"}, "self is given twice"),
        ("aten::add.Tensor", ("f32[2]",), {"gamma": 1}, "gamma is no argument"),
        ("aten::mm", ("f32[2,2] @ S(7)", "f32[2,2]"), {}, "argument 0"),
        ("aten::mm", ("f32[2,2] @ X", "f32[2,2]"), {}, "cannot read"),
        ("aten::all_close_calls", (), {}, "there is no such op"),
        ("aten::bitwise_and", ("i64[2]", "i64[2]"), {}, "expected an overload, one of"),
        ("aten::nonzero", ("f32[2,2]",), {}, "no sharding rule"),
        ("aten::gelu", ("f32[4] @ P(sum)",), {}, "expected no partial"),
    ],
)
def test_what_is_wrong_is_named(op: str, args: Any, kwargs: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        rote.propagate(op, args, kwargs, mesh="2", strict=True)


def test_a_mesh_is_asked_for() -> None:
    with pytest.raises(ValueError, match="expected mesh="):
        rote.propagate("aten::relu", ("f32[2]",))
    with pytest.raises(ValueError, match="mesh"):
        rote.propagate("aten::relu", ("f32[2]",), mesh="nonsense=x")
    with pytest.raises(TypeError, match="tuple or list of arguments"):
        rote.propagate("aten::relu", "f32[2]", mesh="2")
    with pytest.raises(TypeError, match="expected a dict of keyword arguments"):
        rote.propagate("aten::relu", ("f32[2]",), [("a", 1)], mesh="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected mesh="):
        rote.propagate("aten::relu", ("f32[2]",), mesh=(2, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected strided tensors"):
        rote.propagate("aten::relu", (torch.eye(4).to_sparse(),), mesh="2")
    with pytest.raises(TypeError, match="with its overload"):
        rote.propagate(aten.relu, ("f32[2]",), mesh="2")  # type: ignore[arg-type]


def test_rules_of_the_script_answer() -> None:
    library = torch.library.Library("rote_tests", "FRAGMENT")
    library.define("doubled(Tensor x, int n) -> Tensor")
    library.impl("doubled", lambda x, n: x * n, "CompositeExplicitAutograd")
    op = torch.ops.rote_tests.doubled.default
    with pytest.raises(ValueError, match="no sharding rule"):
        rote.propagate(op, ("f32[4] @ S(0)", 2), mesh="2")
    rote.propagation.register(op, lambda x, n: [[Shard(0), Shard(0)]] if n == 2 else [])
    try:
        assert rote.propagate(op, ("f32[4] @ S(0)", 2), mesh="2").outputs[0].placements == (Shard(0),)
        assert rote.propagate(op, ("f32[4] @ S(0)", 3), mesh="2").outputs[0].placements == (Replicate(),)
        rote.propagation.register(op, lambda x, n: [[Shard(7), Shard(0)]], replace=True)
        with pytest.raises(ValueError, match="is no shard of a tensor with 1 dims"):
            rote.propagate(op, ("f32[4] @ S(0)", 2), mesh="2")
    finally:
        rote.propagation.unregister(op)


def asked() -> Iterator[tuple[calls.Call, list[str]]]:
    """Calls of PyTorch's op tests, with their tensors placed on two mesh dims."""
    draw = random.Random(SEED)
    tests = list(range(len(calls.ops())))
    for at in tests if OP_TESTS is None else draw.sample(tests, OP_TESTS):
        for call in calls.of_op(at, calls.WANTED, SAMPLES, draw):
            yield call, [",".join(draw.choices(torch_calls.options(tensor), k=2)) for tensor in call.tensors]


def test_it_says_what_the_command_line_says_of_the_op_tests() -> None:
    """Arguments of every kind find their way: each answer, and each error, is that of the command line."""
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    questions = list(asked())
    lines = [{"op": call.name, "mesh": "a=2,b=3", "args": call.written(placed)} for call, placed in questions]
    answers = engine.answered([json.dumps(line) for line in lines])
    compared = 0
    for (call, placed), answer in zip(questions, answers, strict=True):
        if "no sharding rule" in answer.get("error", ""):
            continue  # Python has PyTorch's decompositions
        args, kwargs = call.filled([f"{t.written} @ {p}" for t, p in zip(call.tensors, placed, strict=True)])
        try:
            found = rote.propagate(call.op, args, kwargs, mesh="a=2,b=3")
        except ValueError as error:
            assert str(error) == f"rote: {answer.get('error')}", (call.name, call.words)
            continue
        told = [
            {
                "placements": [*map(written_placement, each.placements)],
                "strides": None if each.strides is None else [*each.strides],
            }
            for each in found.outputs
        ]
        said = [{key: output[key] for key in ("placements", "strides")} for output in answer["outputs"]]
        assert told == said, (call.name, call.words, placed)
        assert [[*map(written_placement, each.placements)] for each in found.inputs] == [
            each["to"] for each in answer["inputs"]
        ], (call.name, call.words, placed)
        compared += 1
    print(f"\nseed {SEED}: {compared} answers and {len(questions) - compared} errors are those of the command line")
    assert compared > 500
