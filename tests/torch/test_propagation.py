"""`rote propagate` against DTensor's own sharding propagation, and against
arithmetic: on 1-D meshes of 2 and 4 ranks, every covered op with every
placement of its inputs among replicated, sharded and partial sums.

Where the two choose differently, Rote's choice must cost no more under DTensor's
cost model, or fall into a class that docs/propagation.md explains. Whatever Rote
chooses must give the right numbers: the local op runs on pieces of random
tensors and the pieces of its output are put together.
"""

import json
import math
import os
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor._collective_utils import MeshTopoInfo, redistribute_cost
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]


class T(tuple[int, ...]):
    """The shape of a tensor argument; its dtype if not f32."""

    dtype: torch.dtype = torch.float32


def typed(dtype: torch.dtype, *shape: int) -> T:
    tensor = T(shape)
    tensor.dtype = dtype
    return tensor


NAMES = {torch.float32: "f32", torch.int64: "i64", torch.bool: "bool"}


Op = tuple[Any, Sequence[Any]]

# fmt: off
UNARY = [
    "relu", "sigmoid", "tanh", "exp", "neg", "gelu", "silu", "abs", "sqrt", "rsqrt", "log", "sin", "cos",
    "reciprocal", "erf", "sign", "floor", "clone", "detach",
]
BINARY = [
    "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "maximum", "minimum", "eq.Tensor", "gt.Tensor",
    "pow.Tensor_Tensor",
]
# fmt: on
INPLACE = ["add_.Tensor", "mul_.Tensor", "sub_.Tensor", "copy_.default"]


def overload(name: str) -> Any:
    packet, _, suffix = name.partition(".")
    return getattr(getattr(aten, packet), suffix or "default")


def ops() -> Iterator[Op]:
    for shape in [(8, 4), (6, 5), (3, 8)]:
        for name in UNARY:
            yield overload(name), [T(shape)]
        for name in BINARY:
            yield overload(name), [T(shape), T(shape)]
            yield overload(name), [T(shape), T(shape[1:])]
            yield overload(name), [T((*shape[:1], 1)), T(shape)]
        for name in INPLACE:
            yield overload(name), [T(shape), T(shape)]
        yield aten.mul.Scalar, [T(shape), 2.0]
        yield aten.add.Scalar, [T(shape), 2.0]
        yield aten.where.self, [typed(torch.bool, *shape), T(shape), T(shape)]
        yield aten.addcmul.default, [T(shape), T(shape), T(shape)]
        m, k = shape
        for n in (4, 7):
            yield aten.mm.default, [T((m, k)), T((k, n))]
            yield aten.addmm.default, [T((n,)), T((m, k)), T((k, n))]
            yield aten.addmm.default, [T((m, n)), T((m, k)), T((k, n))]
            yield aten.bmm.default, [T((4, m, k)), T((4, k, n))]
        yield aten.baddbmm.default, [T((2, m, 4)), T((2, m, k)), T((2, k, 4))]
        yield aten.dot.default, [T((m,)), T((m,))]
        for name in ("sum", "mean", "max", "min"):
            yield overload(name), [T(shape)]
        for dim, keep in product(([0], [1], [0, 1], [-1]), (False, True)):
            yield aten.sum.dim_IntList, [T(shape), dim, keep]
            yield aten.mean.dim, [T(shape), dim, keep]
            yield aten.amax.default, [T(shape), dim, keep]
            yield aten.amin.default, [T(shape), dim, keep]
        for dim, keep in product((0, 1), (False, True)):
            yield aten.max.dim, [T(shape), dim, keep]
            yield aten.min.dim, [T(shape), dim, keep]
            yield aten.argmax.default, [T(shape), dim, keep]
            yield aten.prod.dim_int, [T(shape), dim, keep]
            yield aten.all.dim, [T(shape), dim, keep]
        for dim in (0, 1, -1):
            yield aten._softmax.default, [T(shape), dim, False]
            yield aten._log_softmax.default, [T(shape), dim, False]
            yield aten._softmax_backward_data.default, [T(shape), T(shape), dim, torch.float32]
            yield aten._log_softmax_backward_data.default, [T(shape), T(shape), dim, torch.float32]
            yield aten.cumsum.default, [T(shape), dim]
            yield aten.cumprod.default, [T(shape), dim]
            yield aten.sort.default, [T(shape), dim]
            yield aten.topk.default, [T(shape), 2, dim]
            yield aten.unsqueeze.default, [T(shape), dim]
            yield aten.select.int, [T(shape), dim, 1]
            yield aten.slice.Tensor, [T(shape), dim, 1, 3]
            yield aten.slice.Tensor, [T(shape), dim, 0, 100]
            yield aten.split.Tensor, [T(shape), 2, dim]
            yield aten.unbind.int, [T(shape), dim]
            yield aten.cat.default, [[T(shape), T(shape)], dim]
            yield aten.stack.default, [[T(shape), T(shape)], dim]
        yield aten.split_with_sizes.default, [T(shape), [1, shape[0] - 1], 0]
        yield aten.t.default, [T(shape)]
        yield aten.transpose.int, [T((2, *shape)), 0, 2]
        yield aten.permute.default, [T((2, *shape)), [2, 0, 1]]
        yield aten.expand.default, [T((1, *shape)), [3, *shape]]
        yield aten.expand.default, [T(shape), [2, -1, -1]]
        for view in (aten.view.default, aten._unsafe_view.default, aten.reshape.default):
            yield view, [T(shape), [math.prod(shape)]]
            yield view, [T((math.prod(shape),)), [*shape]]
            yield view, [T((2, *shape)), [2 * shape[0], shape[1]]]
            yield view, [T((2, *shape)), [2, -1]]
            yield view, [T((2 * shape[0], shape[1])), [2, shape[0], shape[1]]]
        yield aten.squeeze.dim, [T((1, *shape)), 0]
        yield aten.squeeze.default, [T((1, *shape))]
        for affine in (True, False):
            weights = [T(shape[1:]), T(shape[1:])] if affine else [None, None]
            yield aten.native_layer_norm.default, [T((2, *shape)), [shape[1]], *weights, 1e-5]
            yield aten._fused_rms_norm.default, [T((2, *shape)), [shape[1]], weights[0], 1e-5]
        yield aten.embedding.default, [T(shape), typed(torch.int64, 4, 3)]
        yield aten.embedding_dense_backward.default, [T((4, 3, 8)), typed(torch.int64, 4, 3), 12, -1, False]
        for like in (aten.zeros_like.default, aten.ones_like.default, aten.empty_like.default):
            yield like, [T(shape)]
        yield aten.new_zeros.default, [T(shape), [*shape]]
        yield aten.new_zeros.default, [T(shape), [3]]
        yield aten.new_empty.default, [T(shape), [*shape]]


def tensors(args: Sequence[Any]) -> list[T]:
    flat: list[T] = []
    for arg in args:
        flat += [arg] if isinstance(arg, T) else arg if isinstance(arg, list) and arg and isinstance(arg[0], T) else []
    return flat


def filled(args: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """The arguments with values in place of the tensors."""
    rest = iter(values)

    def one(arg: Any) -> Any:
        if isinstance(arg, T):
            return next(rest)
        if isinstance(arg, list) and arg and isinstance(arg[0], T):
            return [next(rest) for _ in arg]
        return arg

    return [one(arg) for arg in args]


def text(placement: Placement) -> str:
    if isinstance(placement, _StridedShard):
        return f"_S({placement.dim},{placement.split_factor})"
    if isinstance(placement, Shard):
        return f"S({placement.dim})"
    if type(placement).__name__ == "_MaskPartial":
        return "P(mask)"
    if isinstance(placement, Partial):
        return f"P({placement.reduce_op})"
    return "R"


def written(arg: Any) -> str:
    if isinstance(arg, list):
        return f"[{','.join(str(n) for n in arg)}]" if not arg or isinstance(arg[0], int) else f"{{{'; '.join(arg)}}}"
    if isinstance(arg, bool) or arg is None:
        return str(arg).lower()
    return "f32" if arg is torch.float32 else str(arg)


def binary() -> Path:
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    built = [p for p in (target / "release" / "rote", target / "debug" / "rote") if p.exists()]
    if not built:
        pytest.skip("no rote binary: cargo build --release")
    return max(built, key=lambda p: p.stat().st_mtime)


class DTensorSide:
    """DTensor's answers, from a process group that moves nothing."""

    def __init__(self, ranks: int) -> None:
        self.mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False)
        topology = MeshTopoInfo.build_from_mesh(self.mesh)
        self.links = [[topology.mesh_dim_latency[0], topology.mesh_dim_bandwidth[0]]]

    def spec(self, tensor: T, placement: Placement) -> DTensorSpec:
        strides = torch.empty(tensor, device="meta").stride()
        meta = TensorMeta(torch.Size(tensor), strides, tensor.dtype)
        return DTensorSpec(self.mesh, (placement,), tensor_meta=meta)

    def ask(self, op: Any, args: Sequence[Any], placements: Sequence[Placement]) -> dict[str, Any]:
        specs = [self.spec(t, p) for t, p in zip(tensors(args), placements, strict=True)]
        propagator = DTensor._op_dispatcher.sharding_propagator
        info = propagator.op_to_schema_info.get(op)
        info = info or propagator.op_to_schema_info_for_single_dim_strategy.get(op)
        schema = OpSchema(op, tuple(filled(args, specs)), {}, schema_info=info)
        try:
            found = propagator.propagate_op_sharding_non_cached(schema)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        taken = specs
        if found.redistribute_schema is not None:
            taken = [
                s
                for a in found.redistribute_schema.args_schema
                for s in (a if isinstance(a, (tuple, list)) else (a,))
                if isinstance(s, DTensorSpec)
            ]
        outputs = found.output_spec if isinstance(found.output_spec, (tuple, list)) else [found.output_spec]
        return {
            "to": [text(s.placements[0]) for s in taken],
            "outputs": [text(s.placements[0]) for s in outputs if s is not None],
            "cost": sum(redistribute_cost(a, b) for a, b in zip(specs, taken, strict=True)),
        }


def pieces(whole: torch.Tensor, placement: str, ranks: int) -> list[torch.Tensor] | None:
    """What each rank holds; None for what this test cannot make."""
    if placement == "R":
        return [whole] * ranks
    if placement == "P(sum)":
        parts = [torch.randn_like(whole) for _ in range(ranks - 1)]
        return [*parts, whole - sum(parts)]
    if placement.startswith("S("):
        dim = int(placement[2:-1])
        chunks = list(whole.chunk(ranks, dim))
        empty = chunks[0].narrow(dim, 0, 0)
        return chunks + [empty] * (ranks - len(chunks))
    return None


JOIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "P(sum)": lambda t: t.sum(0),
    "P(avg)": lambda t: t.mean(0),
    "P(max)": lambda t: t.amax(0),
    "P(min)": lambda t: t.amin(0),
    "P(product)": lambda t: t.prod(0),
}


def joined(parts: list[torch.Tensor], placement: str) -> torch.Tensor | None:
    if placement == "R":
        return parts[-1]
    if placement in JOIN:
        return JOIN[placement](torch.stack(parts))
    if placement.startswith("S("):
        return torch.cat(parts, int(placement[2:-1]))
    if placement.startswith("_S("):
        dim, blocks = (int(n) for n in placement[3:-1].split(","))
        split = [p.chunk(blocks, dim) for p in parts]
        return torch.cat([split[r][b] for b in range(blocks) for r in range(len(parts))], dim)
    return None


# Ops whose argument is the shape of the output, which is local on each rank;
# and those whose output has no defined values.
SHAPED = {"view", "_unsafe_view", "reshape", "expand", "new_zeros"}
UNDEFINED = {"empty_like", "new_empty"}


def is_right(op: Any, args: Sequence[Any], to: Sequence[str], outputs: Sequence[str], ranks: int) -> bool | None:
    """Whether running the op on pieces gives the whole; None if not testable."""
    name = op.overloadpacket.__name__
    if name in UNDEFINED or "P(mask)" in outputs:
        return None
    torch.manual_seed(0)
    wholes = [
        torch.randn(t).abs() + 0.1 if t.dtype.is_floating_point else torch.randint(0, 2, t) for t in tensors(args)
    ]
    wholes = [w.to(t.dtype) for w, t in zip(wholes, tensors(args), strict=True)]
    held = [pieces(w, p, ranks) for w, p in zip(wholes, to, strict=True)]
    expected = op(*filled(args, [w.clone() for w in wholes]))
    expected = list(expected) if isinstance(expected, (tuple, list)) else [expected]
    results: list[list[torch.Tensor]] = []
    for rank in range(ranks):
        local = []
        for parts in held:
            if parts is None:
                return None
            local.append(parts[rank].clone())
        run, own = op, list(args)
        if name in SHAPED:
            shape = list(expected[0].shape)
            if "S(" in outputs[0]:
                dim, *factor = (int(n) for n in outputs[0].strip("_S()").split(","))
                blocks = factor[0] if factor else 1
                block = shape[dim] // blocks
                most = -(-block // ranks)
                shape[dim] = blocks * max(0, min(most, block - most * rank))
            own[1] = shape
        if op is aten.squeeze.default:  # a shard of size 1 is no dim of size 1
            run, own = aten.squeeze.dims, [*args, [d for d, n in enumerate(args[0]) if n == 1]]
        result = run(*filled(own, local))
        results.append(list(result) if isinstance(result, (tuple, list)) else [result])
    for i, (want, placement) in enumerate(zip(expected, outputs, strict=True)):
        whole = joined([r[i] for r in results], placement)
        if whole is None:
            return None
        if whole.shape != want.shape or not torch.allclose(whole.double(), want.double(), 1e-3, 1e-4, equal_nan=True):
            return False
    return True


@pytest.fixture(scope="module", autouse=True)
def fake_group() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def explained(op: Any, ours: dict[str, Any], theirs: dict[str, Any]) -> str | None:
    """The class of docs/propagation.md that a difference belongs to."""
    name = op.overloadpacket.__name__
    if "error" in ours:
        if "error" in theirs:
            return "both refuse"
        # A shard made partial in place: DTensor's own cost for it is infinite.
        return "in place on a partial" if math.isinf(theirs["cost"]) else None
    if "error" in theirs:
        return "DTensor refuses"
    if ours["cost"] <= theirs["cost"] + 1e-6:
        return "ours costs no more"
    if name in {"max", "min", "amax", "amin"}:
        return "empty shards of an extremum"
    if name in {"stack", "embedding"}:
        return "fewer elements than ranks"
    return None


@pytest.mark.parametrize("ranks", [2, 4])
def test_same_choices_or_no_dearer(ranks: int) -> None:
    theirs = DTensorSide(ranks)
    questions = []
    for op, args in ops():
        each: list[list[Placement]] = []
        for t in tensors(args):
            each.append([Replicate(), *(Shard(d) for d in range(len(t)))])
            each[-1] += [Partial()] if t.dtype.is_floating_point else []
        if math.prod(len(e) for e in each) > 80:
            each = [[e[0], e[1], e[-1]] for e in each]
        questions += [(op, args, list(placements)) for placements in product(*each)]
    lines = []
    for op, args, placements in questions:
        shown = [
            f"{NAMES[t.dtype]}[{','.join(map(str, t))}] @ {text(p)}"
            for t, p in zip(tensors(args), placements, strict=True)
        ]
        name = str(op).replace(".", "::", 1).removesuffix(".default")
        given = [written(a) for a in filled(args, shown)]
        lines.append(json.dumps({"op": name, "mesh": f"d={ranks}", "args": given, "links": theirs.links}))
    command = [binary(), "propagate", "--batch", "--json"]
    ran = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(answers) == len(questions)

    classes: Counter[str] = Counter()
    wrong: list[Any] = []
    dearer: list[Any] = []
    judged: dict[Any, bool | None] = {}
    for (op, args, placements), line, answer in zip(questions, lines, answers, strict=True):
        ours = answer
        if "error" not in answer:
            ours = {
                "to": [i["to"][0] for i in answer["inputs"]],
                "outputs": [o["placements"][0] for o in answer["outputs"]],
                "cost": answer["cost_us"],
            }
            key = (str(op), str(args), str(ours["to"]), str(ours["outputs"]))
            if key not in judged:
                try:
                    judged[key] = is_right(op, args, ours["to"], ours["outputs"], ranks)
                except RuntimeError as error:
                    judged[key] = False
                    ours["failed"] = str(error)
                if judged[key] is False:
                    wrong.append((line, ours))
        other = theirs.ask(op, args, placements)
        # The indices of an embedding carry its mask in DTensor's rule.
        to = [t.replace("P(mask)", "R") for t in other.get("to", [])]
        if "error" not in ours and (ours["to"], ours["outputs"]) == (to, other.get("outputs")):
            classes["same"] += 1
            continue
        reason = explained(op, ours, other)
        classes[reason or "unexplained"] += 1
        if os.environ.get("ROTE_TEST_DIFFERENCES"):
            print(reason, line, ours, other)
        if reason is None:
            dearer.append((line, ours, other))
    print(f"{ranks} ranks, {len(questions)} questions, {len(judged)} strategies judged by arithmetic: {dict(classes)}")
    assert not wrong, wrong[:5]
    assert not dearer, (len(dearer), dearer[:5])
    assert classes["same"] >= 0.94 * len(questions)
