"""Ops of other libraries, of every kind of signature: replayed as eager runs them, or refused.

Each schema has an implementation and arguments; `results` of the call, and what it wrote to its
arguments, must be eager's at every call.
"""

import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from extent import EVERYTHING
from oracle import ORACLE_ONLY, rote_capture
from torch import Tensor
from torch.utils import _pytree as pytree

CALLS = 8
library = torch.library.Library("rote_test_signatures", "FRAGMENT")
numbers = itertools.count()


@dataclasses.dataclass
class Op:
    schema: str
    body: Callable[..., Any]
    arguments: Callable[[], tuple[Any, ...]]
    refused: str = ""  # what the refusal says

    def make(self) -> Any:
        name = f"op{next(numbers)}"
        library.define(name + self.schema)
        library.impl(name, self.body, "CPU")
        return getattr(torch.ops.rote_test_signatures, name)


def one() -> tuple[Any, ...]:
    return (torch.randn(3),)


def two() -> tuple[Any, ...]:
    return torch.randn(3), torch.randn(3)


def three() -> tuple[Any, ...]:
    return torch.randn(3), torch.randn(3), torch.randn(3)


def nothing(*done: Any) -> None:
    return None


MUTATING = [
    Op("(Tensor(a!) x) -> ()", lambda x: nothing(x.mul_(2)), one),
    Op("(Tensor(a!) x, Tensor y) -> ()", lambda x, y: nothing(x.mul_(y)), two),
    Op("(Tensor x, Tensor(a!) y) -> ()", lambda x, y: nothing(y.add_(x)), two),
    Op("(Tensor x, Tensor y, Tensor(a!) z) -> ()", lambda x, y, z: nothing(z.add_(x * y)), three),
    Op("(Tensor(a!) x, Tensor(b!) y) -> ()", lambda x, y: nothing(x.mul_(y), y.add_(1)), two),
    Op("(Tensor(a!) x, Tensor(b!) y, Tensor z) -> ()", lambda x, y, z: nothing(x.mul_(z), y.add_(z)), three),
    Op("(Tensor(a!) x, float s) -> ()", lambda x, s: nothing(x.mul_(s)), lambda: (torch.randn(3), 2.5)),
    Op("(Tensor(a!) x, Scalar s) -> ()", lambda x, s: nothing(x.mul_(s)), lambda: (torch.randn(3), 2.5)),
    Op("(Tensor(a!) x, Tensor y, Scalar s) -> ()", lambda x, y, s: nothing(x.add_(y, alpha=s)), lambda: (*two(), 3)),
    Op("(Tensor(a!) x, Tensor y, bool b) -> ()", lambda x, y, b: nothing(x.add_(y)), lambda: (*two(), True)),
    Op("(Tensor(a!)[] xs) -> ()", lambda xs: nothing([x.mul_(2) for x in xs]), lambda: ([*two()],)),
    Op("(Tensor(a!)? x, Tensor y) -> ()", lambda x, y: nothing(x.mul_(y)), two),
    Op("(Tensor(a!)? x, Tensor(b!) y) -> ()", lambda x, y: nothing(y.mul_(2)), lambda: (None, torch.randn(3))),
    Op("(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: (x.mul_(y), y + 1)[1], two),
    Op("(Tensor(a!) x, Tensor y) -> (Tensor, Tensor)", lambda x, y: (x.mul_(y) * 1, y + 1), two),
    Op("(Tensor(a!) x) -> Tensor(a!)", lambda x: x.mul_(2), one),
    Op("(Tensor(a!) x, Tensor y) -> Tensor(a!)", lambda x, y: x.mul_(y), two),
    Op("(Tensor x) -> ()", lambda x: nothing(), one),
]

MAKING = [
    Op("(Tensor x, Tensor[][] s) -> Tensor", lambda x, s: x * s[0][0], lambda: (*one(), [[torch.ones(3) * 2]])),
    Op("(Tensor x) -> Tensor", lambda x: x * 2, one),
    Op("(Tensor x, Tensor y) -> (Tensor, Tensor)", lambda x, y: (x + y, x - y), two),
    Op("(Tensor x) -> Tensor[]", lambda x: [x + 1], one),
    Op("(Tensor x) -> Tensor[]", lambda x: [x + 1, x + 2], one),
    Op("(Tensor? x, Tensor y) -> Tensor", lambda x, y: y + 1, lambda: (None, torch.randn(3))),
    Op("(Tensor? x, Tensor y) -> Tensor", lambda x, y: x + y, two),
    Op("(Tensor[] xs) -> Tensor", lambda xs: xs[0] + xs[1], lambda: ([*two()],)),
    Op("(Tensor?[] xs) -> Tensor", lambda xs: xs[0] + 1, lambda: ([torch.randn(3), None],)),
    Op("(Tensor x, int i, int? j, SymInt k) -> Tensor", lambda x, i, j, k: x * (i + k), lambda: (*one(), 2, None, 3)),
    Op("(Tensor x, int[] s, SymInt[] k) -> Tensor", lambda x, s, k: x * s[0] + k[1], lambda: (*one(), [2], [3, 4])),
    Op(
        "(Tensor x, float f, float[] g, complex c) -> Tensor",
        lambda x, f, g, c: x * f + g[0],
        lambda: (*one(), 0.5, [1.5, 2.5], 1j),
    ),
    Op(
        "(Tensor x, bool b, bool[] bs) -> Tensor", lambda x, b, bs: x * b + bs[0], lambda: (*one(), True, [True, False])
    ),
    Op(
        "(Tensor x, str s, str? t, str[] u) -> Tensor",
        lambda x, s, t, u: x * len(s) + len(u),
        lambda: (*one(), "ab", None, ["a", "b"]),
    ),
    Op(
        "(Tensor x, Scalar s, Scalar? t, Scalar[] u) -> Tensor",
        lambda x, s, t, u: x * s + u[0],
        lambda: (*one(), 2, None, [1.5, 2]),
    ),
    Op(
        "(Tensor x, ScalarType d, Layout layout, MemoryFormat m, Device v) -> Tensor",
        lambda x, d, layout, m, v: x * 2,
        lambda: (*one(), torch.float32, torch.strided, torch.contiguous_format, CPU),
    ),
    Op("(Tensor x, float s=2.0, *, int k=3) -> Tensor", lambda x, s=2.0, k=3: x * s + k, one),
]
CPU = torch.device("cpu")

REFUSED = [
    Op("(Tensor x) -> int", lambda x: int(x.sum() > 0), one, "returns a result to the host"),
    Op("(Tensor x) -> bool", lambda x: bool(x.sum() > 0), one, "returns a result to the host"),
    Op("(Tensor x) -> float", lambda x: float(x.sum() > 0), one, "returns a result to the host"),
    Op("(Tensor x) -> str", lambda x: "a" if x.sum() > 0 else "b", one, "returns a result to the host"),
    Op("(Tensor x) -> (Tensor, int)", lambda x: (x + 1, int(x.sum() > 0)), one, "returns a result to the host"),
    Op("(Tensor x) -> Tensor?", lambda x: None if x.sum() < 99 else x + 1, one, "returns a result to the host"),
    Op("(Tensor x) -> (Tensor, Tensor[])", lambda x: (x + 1, [x + 2]), one, "returns a list among other results"),
    Op(
        "(Tensor x, Tensor[][] s) -> Tensor",
        lambda x, s: x * s[0][0],
        lambda: (*one(), [[torch.ones(3)], [torch.ones(3)]]),
        "which a plan cannot hold",
    ),
]


def ids(ops: list[Op]) -> list[str]:
    return [op.schema for op in ops]


def values(tree: Any) -> list[Any]:
    return [leaf.tolist() if isinstance(leaf, Tensor) else leaf for leaf in pytree.tree_leaves(tree)]


def check(op: Op) -> Any:
    call = op.make()
    step = rote_capture(call_of(call))
    for number in range(CALLS):
        torch.manual_seed(number)
        expected_arguments = op.arguments()
        torch.manual_seed(number)
        arguments = op.arguments()
        expected, found = call_of(call)(*expected_arguments), step(*arguments)
        assert values(found) == values(expected), number
        assert values(arguments) == values(expected_arguments), number
    return step


def call_of(call: Any) -> Callable[..., Any]:
    return lambda *arguments: call(*arguments)


@pytest.mark.parametrize("op", [*MUTATING, *MAKING], ids=ids([*MUTATING, *MAKING]))
def test_signature(op: Op) -> None:
    step = check(op)
    if not ORACLE_ONLY:
        assert not step.stats.refusals
        assert step.stats.replays >= CALLS - 4, step.stats


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("op", REFUSED, ids=ids(REFUSED))
def test_refused_signature(op: Op) -> None:
    step = check(op)
    if not ORACLE_ONLY:
        assert not step.stats.replays
        assert any(op.refused in refusal for refusal in step.stats.refusals), step.stats


def generated() -> Iterator[Op]:
    """Every order of up to three arguments of these kinds, returning nothing or a tensor."""
    kinds: dict[str, Callable[[], Any]] = {
        "Tensor {}": lambda: torch.randn(3),
        "Tensor(a{}!) {}": lambda: torch.randn(3),
        "Scalar {}": lambda: 2.5,
        "bool {}": lambda: True,
        "Tensor[] {}": lambda: [torch.randn(3)],
        "int {}": lambda: 3,
    }

    def body(*arguments: Any, returns: bool, written: tuple[bool, ...]) -> Any:
        total = sum(pytree.tree_leaves(arguments)) + torch.zeros(3)
        for argument, write in zip(arguments, written, strict=True):
            if write:
                argument.add_(total)
        return total if returns else None

    for size in (1, 2, 3):
        for chosen in itertools.product(kinds, repeat=size):
            written = tuple("!" in kind for kind in chosen)
            for returns in (False, True):
                if not any("Tensor" in kind for kind in chosen) or not (returns or any(written)):
                    continue
                formals = ", ".join(kind.replace("(a{}!)", f"(a{i}!)").format(f"x{i}") for i, kind in enumerate(chosen))
                schema = f"({formals}) -> {'Tensor' if returns else '()'}"

                def make(chosen: tuple[str, ...] = chosen) -> tuple[Any, ...]:
                    return tuple(kinds[kind]() for kind in chosen)

                def run(*arguments: Any, returns: bool = returns, written: tuple[bool, ...] = written) -> Any:
                    return body(*arguments, returns=returns, written=written)

                yield Op(schema, run, make)


def test_generated_signatures() -> None:
    ops = list(generated())
    assert len(ops) > 200
    for op in ops[:: 1 if EVERYTHING else 8]:
        try:
            step = check(op)
        except Exception as error:
            raise AssertionError(op.schema) from error
        assert ORACLE_ONLY or step.stats.replays >= CALLS - 4, (op.schema, step.stats)


# -- kernels in Python, which read and write memory as they like -------------------------


@torch.library.custom_op("rote_test_kernels::in_numpy", mutates_args=())
def in_numpy(x: Tensor) -> Tensor:
    return torch.from_numpy(x.numpy() * 2 + x.tolist()[0])


in_numpy.register_autograd(lambda ctx, gradient: gradient * 2)


@torch.library.custom_op("rote_test_kernels::by_address", mutates_args={"x"})
def by_address(x: Tensor) -> None:
    elements = (ctypes.c_float * x.numel()).from_address(x.data_ptr())
    for i in range(len(elements)):
        elements[i] *= 2


@torch.library.custom_op("rote_test_kernels::by_value", mutates_args=())
def by_value(x: Tensor) -> Tensor:
    return x * x.sum().item() if x[0] > 0 else x * 3


def _by_address(x: Tensor) -> Tensor:
    y = x * 1
    by_address(y)
    return y + x


KERNELS: dict[str, Callable[[Tensor], Any]] = {
    "numpy": lambda x: in_numpy(x) + 1,
    "numpy, of a result": lambda x: in_numpy(x * 2) + 1,
    "numpy, with a gradient": lambda x: torch.autograd.grad(in_numpy(x.requires_grad_()).sum(), x)[0] * 1,
    "numpy, with a gradient of a result": lambda x: torch.autograd.grad(in_numpy(x.requires_grad_() * 2).sum(), x)[0],
    "an address": _by_address,
    "values": lambda x: by_value(x * 2) + 1,
}


@pytest.mark.parametrize("passes", ["none", "default", "all"])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_in_python(name: str, requires_grad: bool, passes: str) -> None:
    def step(x: Tensor) -> Any:
        found = KERNELS[name](x)
        return found.detach()

    def arguments(call: int) -> Tensor:
        made = torch.randn(3, generator=torch.Generator().manual_seed(call))
        return made.requires_grad_(requires_grad or "gradient" in name)

    captured = rote_capture(step, passes=passes)
    for call in range(CALLS):
        expected, found = step(arguments(call)), captured(arguments(call))
        assert torch.equal(expected, found), f"call {call}: expected {expected}, found {found}"
    if not ORACLE_ONLY:
        assert captured.stats.replays >= CALLS - 4, captured.stats


# -- kernels whose results look other than when they were recorded -------------------------

LOOKS: dict[str, Callable[[Tensor], Tensor]] = {
    "strides": lambda y: y.t().contiguous().t(),
    "shape": lambda y: y[:1].clone(),
    "one more dim": lambda y: y[None].clone(),
    "dtype": lambda y: y.double(),
    "conjugate": lambda y: torch.complex(y, y).conj(),
}
otherwise: dict[str, bool] = {}  # whether a kernel makes another look
looks = torch.library.Library("rote_test_looks", "DEF")
for number, change in enumerate(LOOKS.values()):

    def twice(x: Tensor, change: Callable[[Tensor], Tensor] = change) -> Tensor:
        return change(x * 2) if otherwise["now"] else x * 2

    def both(x: Tensor, change: Callable[[Tensor], Tensor] = change) -> list[Tensor]:
        return [x + 1, twice(x, change)]

    looks.define(f"twice{number}(Tensor x) -> Tensor")
    looks.define(f"both{number}(Tensor x) -> Tensor[]")
    looks.impl(f"twice{number}", twice, "CPU")
    looks.impl(f"both{number}", both, "CPU")

READERS: dict[str, Callable[[Any, Any, Tensor], Tensor]] = {
    "viewed": lambda one, list_, x: one(x).reshape(-1) + 1,
    "computed with, then viewed": lambda one, list_, x: (one(x) + 1).reshape(-1) * 1,
    "returned": lambda one, list_, x: one(x),
    "in a list": lambda one, list_, x: list_(x)[1].reshape(-1) + 1,
    "written": lambda one, list_, x: one(x).add_(1).reshape(-1) * 1,
}


looks.define("some(Tensor x) -> Tensor[]")
looks.impl("some", lambda x: [x * 2 for _ in range(3 if otherwise["now"] else 2)], "CPU")


@pytest.mark.parametrize("first", [2, 7])
def test_another_number_of_results_ends_the_replay(first: int) -> None:
    def step(x: Tensor) -> Tensor:
        return torch.stack(torch.ops.rote_test_looks.some(x)).sum(0)

    captured = rote_capture(step)
    for call in range(12):
        otherwise["now"] = call >= first
        x = torch.arange(6.0) + call
        if call == first and not ORACLE_ONLY:
            with pytest.raises(RuntimeError, match="has made 3 tensors, and 2 when the step was recorded"):
                captured(x)
            continue
        assert torch.equal(captured(x), step(x)), call
    assert ORACLE_ONLY or captured.stats.replays >= 6, captured.stats


@pytest.mark.parametrize("passes", ["none", "default"])
@pytest.mark.parametrize("first", [2, 7])  # the first replay, a later one
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("look", LOOKS)
def test_a_result_that_looks_otherwise_ends_the_replay(look: str, reader: str, first: int, passes: str) -> None:
    number = list(LOOKS).index(look)
    one, list_ = (getattr(torch.ops.rote_test_looks, f"{name}{number}") for name in ("twice", "both"))
    read = READERS[reader]
    captured = rote_capture(lambda x: read(one, list_, x), passes=passes)
    for call in range(12):
        otherwise["now"] = call >= first
        x = torch.arange(6.0).reshape(2, 3) + call
        expected = read(one, list_, x)
        if call == first and not ORACLE_ONLY:
            with pytest.raises(RuntimeError, match="when the step was recorded"):
                captured(x)
            continue
        found = captured(x)
        assert expected.dtype == found.dtype and expected.stride() == found.stride(), call
        assert torch.equal(expected, found), f"call {call}: expected {expected}, found {found}"
    assert ORACLE_ONLY or captured.stats.replays >= 6, captured.stats


IN_PLACE: dict[str, Callable[[Tensor], object]] = {
    "strides": lambda x: x.t_(),
    "shape": lambda x: x.resize_(1, 3),
    "memory": lambda x: x.set_(torch.full((2, 3), 7.0)),  # type: ignore[call-overload]
}


@torch.library.custom_op("rote_test_kernels::doubled", mutates_args={"xs"})
def doubled(xs: list[Tensor], how: str) -> None:
    for x in xs:
        x.mul_(2)
        if otherwise["now"]:
            IN_PLACE[how](x)


@pytest.mark.parametrize("passes", ["none", "default"])
@pytest.mark.parametrize("how", IN_PLACE)
def test_an_argument_that_is_changed_otherwise_ends_the_replay(how: str, passes: str) -> None:
    def step(x: Tensor) -> Tensor:
        y = x * 1
        doubled([y], how)
        return y.reshape(-1) + 1

    captured = rote_capture(step, passes=passes)
    x = torch.arange(6.0).reshape(2, 3)
    for call in range(CALLS):
        otherwise["now"] = call == CALLS - 1
        if call < CALLS - 1 or ORACLE_ONLY:
            assert torch.equal(captured(x + call), step(x + call))
    if not ORACLE_ONLY:
        assert captured.stats.replays >= 4, captured.stats
        with pytest.raises(RuntimeError, match="has changed the shape, strides or memory"):
            captured(x)


# -- kernels in Python that call captured functions ---------------------------------------

within: dict[str, Callable[[Tensor, int], Tensor]] = {}


@torch.library.custom_op("rote_test_kernels::calls", mutates_args=())
def calls(x: Tensor, left: int) -> Tensor:
    return within["step"](x, left - 1) if left else x * 2


def _around(x: Tensor, left: int) -> Tensor:
    return calls(x * 3, left) + 1


def _by_itself(capture: Callable[..., Any]) -> Any:
    return capture(_around)


def _by_another(capture: Callable[..., Any]) -> Any:
    """Two captured functions call each other."""
    first, second = capture(_around), capture(lambda x, left: calls(x + 1, left) * 2)
    return lambda x, left: (first if left % 2 else second)(x, left)


@pytest.mark.parametrize("options", [{}, {"passes": "none"}, {"verify": 4}, {"verify_every": 2}], ids=str)
@pytest.mark.parametrize("make", [_by_itself, _by_another])
def test_kernels_that_call_captured_functions(make: Callable[..., Any], options: dict[str, Any]) -> None:
    steps: list[Any] = []

    def remember(step: Callable[..., Any]) -> Any:
        steps.append(rote_capture(step, **options))
        return steps[-1]

    plain, captured = make(lambda step: step), make(remember)
    for number in range(12):
        x, found = torch.arange(3.0) + number, []
        for step in (plain, captured):
            within["step"] = step
            found.append(step(x, 3))
        assert torch.equal(*found), f"call {number}: expected {found[0]}, found {found[1]}"
    if not ORACLE_ONLY:
        assert steps[0].stats.replays >= 6, steps[0].stats


def test_a_kernel_that_asks_how_often_its_step_was_replayed() -> None:
    replays: list[int] = []

    def look(x: Tensor, left: int) -> Tensor:
        if not ORACLE_ONLY:
            replays.append(captured.stats.replays)
            captured.explain()
        return x * 2

    within["step"] = look
    captured = rote_capture(_around)
    for number in range(CALLS):
        x = torch.arange(3.0) + number
        assert torch.equal(captured(x, 1), x * 6 + 1)
    assert ORACLE_ONLY or replays[-1] == captured.stats.replays - 1
