"""With `trust_plans=True` a plan is replayed at once: only for a step that is what it was when the plan was stored.

`test_state_sweep.py` has the values; these are the things that values do not tell.
"""

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import hashlib
import io
import json
import math
import operator
import os
import pickle
import queue
import re
import struct
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn.attention import SDPBackend

CALLS = 6
Build = Callable[[int], tuple[Callable[[Tensor], Any], Any]]  # a step and its state; in two ways

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="about stored plans")


def linears() -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Linear(4, 4), nn.Linear(4, 4)]


def modules_in_a_list(way: int) -> Any:
    model = nn.Module()
    model.a, model.b = linears()
    model.order = [model.a, model.b] if way == 0 else [model.b, model.a]
    return lambda x: model.order[0](model.order[1](x)).detach(), model


def modules_in_a_dict(way: int) -> Any:
    a, b = linears()
    named = {"first": a, "second": b} if way == 0 else {"first": b, "second": a}
    return lambda x: named["first"](named["second"](x)).detach(), {"a": a, "b": b}


def tensors(way: int, hold: Callable[[Tensor, Tensor], Callable[[], tuple[Tensor, Tensor]]]) -> Any:
    a, b = torch.ones(4, 4), torch.full((4, 4), 2.0)
    both = hold(a, b) if way == 0 else hold(b, a)

    def step(x: Tensor) -> Tensor:
        first, second = both()
        first.add_(second * 0.1)
        return x * first

    return step, {"a": a, "b": b}


def in_defaults(first: Tensor, second: Tensor) -> Any:
    return lambda p=first, q=second: (p, q)


def in_keywords(first: Tensor, second: Tensor) -> Any:
    def both(*, p: Tensor = first, q: Tensor = second) -> tuple[Tensor, Tensor]:
        return p, q

    return both


class Held:
    def __init__(self, first: Tensor, second: Tensor) -> None:
        self.first, self.second = first, second

    def both(self) -> tuple[Tensor, Tensor]:
        return self.first, self.second


HOLDING: dict[str, Any] = {
    "a closure": lambda p, q: lambda: (p, q),
    "a list": lambda p, q: functools.partial(tuple, [p, q]),
    "a tuple": lambda p, q: functools.partial(lambda both: both, (p, q)),
    "a partial": lambda p, q: functools.partial(lambda one, other: (one, other), p, other=q),
    "an object": lambda p, q: Held(p, q).both,
    "defaults": in_defaults,
    "keywords": in_keywords,
}


def overlap(way: int) -> Any:
    flat = torch.arange(8.0)
    a, b = flat[:4], flat[4:] if way == 0 else flat[2:6]

    def step(x: Tensor) -> Tensor:
        a.add_(1)
        return x[0] * b

    return step, [a, b]


def gradient_that_requires_one(way: int) -> Any:
    weight = nn.Parameter(torch.ones(4))
    weight.grad = torch.ones(4, requires_grad=way == 1)

    def step(x: Tensor) -> Any:
        assert weight.grad is not None
        (weight * x[0] + weight.grad.square() * weight).sum().backward()
        return weight.grad.detach().clone(), weight.grad.grad if weight.grad.is_leaf else None

    return step, weight


def attribute_of_a_parameter(way: int) -> Any:
    """As Megatron keeps `main_grad`: a part of a buffer."""
    weight, buffers = nn.Parameter(torch.ones(4)), torch.arange(8.0).view(2, 4)
    weight.main_grad = buffers[way]  # type: ignore[attr-defined]

    def step(x: Tensor) -> Tensor:
        weight.main_grad.add_(x[0])  # type: ignore[attr-defined]
        return buffers.sum(1) + 0

    return step, {"weight": weight, "buffers": buffers}


def named_attribute(way: int) -> Any:
    weight, a, b = nn.Parameter(torch.ones(4)), torch.ones(4), torch.full((4,), 2.0)
    weight.scale = [a, b][way]  # type: ignore[attr-defined]
    return lambda x: (weight * weight.scale * x[0]).detach(), {"weight": weight, "a": a, "b": b}  # type: ignore[attr-defined]


def gradients_in_a_buffer(way: int) -> Any:
    weight, flat = nn.Parameter(torch.ones(4)), torch.zeros(8)
    weight.grad = flat[:4] if way == 0 else flat[4:]

    def step(x: Tensor) -> Tensor:
        (weight * x[0]).sum().backward()
        return flat * 1

    return step, {"weight": weight, "flat": flat}


def hook_with_a_mask(way: int) -> Any:
    weight, a, b = nn.Parameter(torch.ones(4)), torch.ones(4), torch.tensor([0.0, 1.0, 0.0, 1.0])
    mask, weight.grad = [a, b][way], torch.zeros(4)
    weight.register_hook(lambda grad: grad * mask)

    def step(x: Tensor) -> Any:
        weight.grad = None
        (weight * x[0]).sum().backward()
        assert weight.grad is not None
        return weight.grad.clone()

    return step, {"weight": weight, "a": a, "b": b}


def gradient_of_a_tensor_in_reach(way: int) -> Any:
    held, a, b = torch.ones(4, requires_grad=True), torch.ones(4), torch.full((4,), 2.0)
    held.grad = [a, b][way]

    def step(x: Tensor) -> Tensor:
        assert held.grad is not None
        return x[0] * held.grad

    return step, {"a": a, "b": b}


def state_of_an_optimizer(way: int) -> Any:
    weight, a, b = nn.Parameter(torch.ones(4)), torch.ones(4), torch.full((4,), 2.0)
    weight.grad = torch.zeros(4)
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    optimizer.state[weight]["momentum_buffer"] = [a, b][way]

    def step(x: Tensor) -> Tensor:
        weight.grad = x[0].clone()
        optimizer.step()
        return weight.detach() + a - b

    return step, {"weight": weight, "a": a, "b": b, "optimizer": optimizer}


def held(first: Any, second: Any, use: Callable[[Any, Tensor], Any]) -> Build:
    def build(way: int) -> Any:
        things = {"it": [first, second][way]}
        return lambda x: use(things["it"], x), None

    return build


def members(way: int, hold: Callable[[nn.Module], Any]) -> Any:
    a, b = linears()
    chosen = hold([a, b][way])

    def step(x: Tensor) -> Tensor:
        for each in (a, b):
            x = each(x) * (2 if each in chosen else 3)
        return x.detach()

    return step, {"a": a, "b": b}


def scale(value: float) -> enum.Enum:
    class Scale(enum.Enum):
        ONLY = value

    return Scale.ONLY


def zone(hours: int) -> datetime.timezone:
    return datetime.timezone(datetime.timedelta(hours=hours))


def compiled(factor: int) -> Any:
    return torch.jit.trace(lambda x: x * factor, torch.ones(2))


def queue_of(size: int) -> Any:
    found = queue.SimpleQueue[int]()
    for i in range(size):
        found.put(i)
    return found


def annotated(what: Any) -> Callable[..., Any]:
    def function(a: what) -> None:
        pass

    return function


def described(what: Any) -> type:
    return dataclasses.make_dataclass("D", [("a", float, dataclasses.field(default=1.0, metadata={"k": what}))])


CASES: dict[str, Build] = {
    "modules in a list": modules_in_a_list,
    "modules in a dict": modules_in_a_dict,
    **{f"tensors in {name}": functools.partial(tensors, hold=hold) for name, hold in HOLDING.items()},
    "overlap": overlap,
    "part of a buffer in an attribute": attribute_of_a_parameter,
    "named tensor in an attribute": named_attribute,
    "gradients in a buffer": gradients_in_a_buffer,
    "hook with a mask": hook_with_a_mask,
    "gradient of a tensor in reach": gradient_of_a_tensor_in_reach,
    "state of an optimizer": state_of_an_optimizer,
    "gradient": gradient_that_requires_one,
    "function of torch": held(torch.relu, torch.tanh, lambda f, x: f(x)),
    "method of Tensor": held(Tensor.relu, Tensor.tanh, lambda f, x: f(x)),
    "op": held(torch.ops.aten.relu.default, torch.ops.aten.tanh.default, lambda f, x: f(x)),
    "packet": held(torch.ops.aten.relu, torch.ops.aten.tanh, lambda f, x: f(x)),
    "operator": held(operator.add, operator.mul, lambda f, x: f(x, 3)),
    "decimal": held(decimal.Decimal("1.5"), decimal.Decimal("2.5"), lambda d, x: x * float(d)),
    "enum": held(scale(0.5), scale(0.7), lambda e, x: x * e.value),
    "date": held(datetime.date(2020, 1, 5), datetime.date(2020, 1, 6), lambda d, x: x * d.day),
    "time": held(datetime.time(1), datetime.time(2), lambda d, x: x * d.hour),
    "zone": held(zone(1), zone(2), lambda z, x: x * z.utcoffset(None).seconds),
    "deque": held(collections.deque([1], 3), collections.deque([1], 4), lambda d, x: x * d.maxlen),
    "finfo": held(torch.finfo(torch.float32), torch.finfo(torch.float16), lambda f, x: x * f.eps),
    "placement": held(Shard(0), Shard(1), lambda p, x: x * (p.dim + 2)),
    "C++ enum": held(SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, lambda e, x: x * e.value),
    "NumPy dtype": held(numpy.dtype("f4"), numpy.dtype([("a", "f8")]), lambda d, x: x * d.itemsize),
    "ufunc": held(numpy.add, numpy.multiply, lambda f, x: x * float(f(3, 4))),
    "function of NumPy": held(numpy.mean, numpy.sum, lambda f, x: x * float(f([3, 4]))),
    "regular expression": held(re.compile("a"), re.compile("b"), lambda e, x: x * (2 if e.match("a") else 3)),
    "many objects": held([Held(2, 0)] * 2000, [Held(3, 0)] * 2000, lambda many, x: x * many[0].first),
    "many lists": held([[2]] * 2000, [*[[2]] * 1999, [3]], lambda many, x: x * many[-1][0]),
    "weak reference": held(weakref.ref(Held), weakref.ref(Path), lambda r, x: x * len(r().__name__)),
    "set of modules": lambda way: members(way, lambda one: {one}),
    "frozen set of modules": lambda way: members(way, lambda one: frozenset([one])),
    "weak set of modules": lambda way: members(way, lambda one: weakref.WeakSet([one])),
    "weak reference to a module": lambda way: members(way, lambda one: [weakref.proxy(one)]),
    "slice": held(slice(0, 2), slice(1, 3), lambda s, x: x[s]),
    "made data class": held(
        *(dataclasses.make_dataclass("D", [("a", float, v)]) for v in (2.0, 3.0)), lambda d, x: x * d().a
    ),
    "text of a class": held(
        *(type("C", (), {"__doc__": text}) for text in ("a", "bc")), lambda c, x: x * len(c.__doc__)
    ),
    "annotations of a class": held(
        *(type("C", (), {"__annotations__": {"a": v}}) for v in (2, 3)), lambda c, x: x * c.__annotations__["a"]
    ),
    "annotations of a function": held(*map(annotated, (2, 3)), lambda f, x: x * f.__annotations__["a"]),
    "metadata of a field": held(*map(described, (2, 3)), lambda d, x: x * dataclasses.fields(d)[0].metadata["k"]),
    "sign of a NaN": held(math.nan, -math.nan, lambda v, x: x * math.copysign(2, v)),
    "method": held("ab".upper, "cd".upper, lambda f, x: x * ord(f()[0])),
}


def trusting(build: Build, plans: Path | str) -> Callable[..., Calls]:
    """A script that calls the step that is built in one way, with what is stored in ``plans``."""

    def script(capture: Capture, way: int) -> Calls:
        fn, state = build(way)
        step = capture(fn, state=state, plans=plans, trust_plans=True)
        for call in range(CALLS):
            yield step(torch.arange(16.0).view(4, 4) + call)
        return {}

    return script


@pytest.mark.parametrize("name", CASES)
def test_another_step_is_recorded(name: str, tmp_path: Path) -> None:
    script = trusting(CASES[name], tmp_path)
    first = check_right(functools.partial(script, way=0))
    assert first.stats[-1][0].replays, first.stats[-1][0]
    check_right(functools.partial(script, way=1))
    again = check_right(functools.partial(script, way=0))
    assert again.stats[-1][0].replays == CALLS, again.stats[-1][0]


# Objects of which only C code knows what they hold.
UNTOLD: dict[str, Build] = {
    "compiled function": held(*map(compiled, (2, 3)), lambda f, x: f(x)),
    "struct": held(struct.Struct("i"), struct.Struct("d"), lambda s, x: x * s.size),
    "bytes in memory": held(io.BytesIO(b"1"), io.BytesIO(b"23"), lambda b, x: x * len(b.getvalue())),
    "text in memory": held(io.StringIO("1"), io.StringIO("23"), lambda b, x: x * float(b.getvalue())),
    "queue": held(queue_of(1), queue_of(2), lambda q, x: x * q.qsize()),
    "hash": held(hashlib.sha1(b"a"), hashlib.sha1(b"b"), lambda h, x: x * h.digest()[0]),
    "context of decimals": held(decimal.Context(3), decimal.Context(4), lambda c, x: x * c.prec),
    "XML": held(ElementTree.XML("<a b='1'/>"), ElementTree.XML("<a b='2'/>"), lambda e, x: x * float(e.get("b"))),
    "storage": held(torch.ones(1).untyped_storage(), torch.ones(2).untyped_storage(), lambda s, x: x * len(s)),
    "buffer": held(pickle.PickleBuffer(b"a"), pickle.PickleBuffer(b"b"), lambda b, x: x * bytes(b)[0]),
    "metadata": held(*(numpy.dtype("f4", metadata={"a": v}) for v in (2, 3)), lambda d, x: x * d.metadata["a"]),  # type: ignore[call-overload]
    "many functions": held([lambda: 2] * 2000, [lambda: 3] * 2000, lambda many, x: x * many[0]()),
}


@pytest.mark.parametrize("name", UNTOLD)
def test_what_cannot_be_told_is_not_trusted(name: str, tmp_path: Path) -> None:
    script = trusting(UNTOLD[name], tmp_path)
    for way in (0, 1, 0):
        counts = check_right(functools.partial(script, way=way)).stats[-1][0]
        assert 0 < counts.replays < CALLS, counts


def test_writes_are_counted_as_eager_counts_them(tmp_path: Path) -> None:
    """`native_batch_norm` and fused optimizers write without raising the version counter, the second write raises it
    twice."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.Adam(model.parameters(), fused=True)

        def step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            with torch.no_grad():
                model[0].weight.mul_(0.9).add_(0.1)
            return loss.detach()

        captured = capture(step, state=(model, optimizer), plans=tmp_path, trust_plans=True)
        for call in range(8):
            captured(torch.arange(16.0).view(4, 4) + call)
            yield [each._version for each in (*model.parameters(), *model.buffers())]
        return {}

    check_right(script)
    again = check_right(script).stats[-1][0]
    assert again.replays and not again.recordings, again


HASHES = """
import json, sys, torch, rote
scales = {name: torch.tensor(1.0 + i) for i, name in enumerate(("alpha", "beta", "gamma", "delta"))}
of_names = frozenset(scales)

def literal(x):
    for name in {"alpha", "beta", "gamma", "delta"}:
        x = x * 3 + scales[name]
    return x

def built(x):
    for name in of_names:
        x = x * 3 + scales[name]
    return x

def hashed(x):
    return x * (hash("alpha") % 1000)

def member(x):
    return x * 2 if "alpha" in {"alpha", "beta"} else x

x, recordings = torch.ones(2), {}
for step in (literal, built, hashed, member):
    plans = f"{sys.argv[1]}/{step.__name__}"
    captured = rote.capture(step, state=list(scales.values()), plans=plans, trust_plans=True)
    assert all(torch.equal(captured(x), step(x)) for _ in range(5)), "differs"
    recordings[step.__name__] = captured.stats.recordings
print(json.dumps(recordings))
"""


def test_hashes_of_another_process(tmp_path: Path) -> None:
    for seed in range(1, 4):
        environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
        line = [sys.executable, "-c", HASHES, str(tmp_path)]
        done = subprocess.run(line, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        recordings = json.loads(done.stdout)
    assert recordings.pop("member") == 0, recordings
    assert all(recordings.values()), recordings


def by_size(way: int) -> tuple[Callable[[Tensor], Any], Any]:
    mesh = init_device_mesh("cpu", (2, 1) if way == 0 else (1, 2))
    return lambda x: x * mesh.size(0), None


def by_ranks(way: int) -> tuple[Callable[[Tensor], Any], Any]:
    mesh = DeviceMesh("cpu", [0, 1] if way == 0 else [1, 0])
    weight = DTensor.from_local(torch.ones(4) + dist.get_rank(), mesh, [Shard(0)])
    return lambda x: weight.full_tensor() * x[0, 0], {"weight": weight}


def by_placement(way: int) -> tuple[Callable[[Tensor], Any], Any]:
    mesh = init_device_mesh("cpu", (2,))
    weight = DTensor.from_local(torch.ones(4) + dist.get_rank(), mesh, [Partial("sum" if way == 0 else "max")])
    return lambda x: weight.full_tensor() * x[0, 0], {"weight": weight}


def by_group(way: int) -> tuple[Callable[[Tensor], Any], Any]:
    groups = [dist.new_group([0, 1]), dist.new_group([dist.get_rank()], use_local_synchronization=True)]
    return lambda x: funcol.all_reduce(x + dist.get_rank(), "sum", groups[way]) * 1, None


def by_layout(way: int) -> tuple[Callable[[Tensor], Any], Any]:
    """Partial sums are reduced along one dim or the other, and come back as they are."""
    torch.manual_seed(0)
    mesh, model = init_device_mesh("cpu", (2,)), nn.Linear(4, 4)
    style = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(way))
    parallelize_module(model, mesh, style)
    return lambda x: model(x).detach(), model


def by_layout_of_inputs(way: int) -> tuple[Callable[[Tensor], Any], Any]:
    mesh, model = init_device_mesh("cpu", (2,)), nn.Identity()
    layouts = {"input_layouts": (Replicate(),), "desired_input_layouts": (Shard(way),)}
    parallelize_module(model, mesh, PrepareModuleInput(**layouts, use_local_output=True))
    return lambda x: model(x) * 2, None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("build", [by_size, by_ranks, by_placement, by_group, by_layout, by_layout_of_inputs])
def test_ranks_record_another_step(build: Build) -> None:
    with tempfile.TemporaryDirectory() as plans:
        script = trusting(build, plans)
        for way in (0, 1):
            counts = check_right(functools.partial(script, way=way)).stats[-1][0]
            assert counts.replays, counts
