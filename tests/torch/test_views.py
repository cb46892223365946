"""What a step returns as a view is one to autograd: its base, its version counter, how it was made.

A sweep: ways to make a view, in modes of autograd, of all that a base can be, and all that the caller
may do then.
"""

import itertools
import random
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from extent import EVERYTHING
from models import as_dtensor, inputs, mesh
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over
from test_refusals import check_refused
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

CALLS = 5

View = Callable[[Tensor], Tensor | tuple[Tensor, ...]]
VIEWS: dict[str, View] = {
    "slice": lambda x: x[1:3],
    "select": lambda x: x[2],
    "t": lambda x: x.t(),
    "view": lambda x: x.view(-1),
    "expand": lambda x: x[0].expand(2, 4),
    "diagonal": lambda x: x.diagonal(),
    "unfold": lambda x: x.unfold(0, 2, 1),
    "as_strided": lambda x: x.as_strided((2, 2), (4, 1)),
    "alias": lambda x: x.view_as(x),
    "chain": lambda x: x[1:].t()[0],
    "two": lambda x: (x[1:], x[1:][1]),
    "split": lambda x: x.split(2),
    "unbind": lambda x: x.unbind(),
    "chunk": lambda x: (x.chunk(2)[1],),
    "unsafe_split": lambda x: x.unsafe_split(2),
    "detach": lambda x: x.detach(),
    "detach_slice": lambda x: x.detach()[1:],
    "slice_detach": lambda x: x[1:].detach(),
    "data": lambda x: x.data,
    "data_slice": lambda x: x.data[1:],
    "bytes": lambda x: x.view(torch.int32),
    "as_complex": lambda x: torch.view_as_complex(x.view(4, 2, 2)),
    "real": lambda x: torch.view_as_complex(x.view(4, 2, 2)).conj().real,
    "copy": lambda x: x[1:].clone(),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


def observed(name: str, tensor: Tensor, known: dict[str, Tensor]) -> list[Any]:
    """What autograd shows of a tensor; its base by its name."""
    base = tensor._base
    named = [other for other, each in known.items() if each is base]

    def graph() -> Any:
        return None if tensor.grad_fn is None else tensor.grad_fn.name()

    return [
        name,
        type(tensor).__name__,
        tensor._is_view(),
        named or (None if base is None else [list(base.shape), base._version, base.requires_grad, base.is_leaf]),
        "inference" if tensor.is_inference() else tensor._version,
        tensor.requires_grad,
        attempt(graph),
        attempt(lambda: tensor.is_leaf),
        attempt(lambda: None if not tensor.is_leaf or tensor.grad is None else tensor.grad.clone()),
    ]


def attempt(action: Callable[[], Any]) -> Any:
    """What an action gives, or what it raises or warns of."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            result = action()
        except RuntimeError as error:
            result = [type(error).__name__, str(error).split("\n")[0]]
    return [result, [str(warning.message).split("\n")[0] for warning in heard]]


def number(like: Tensor) -> Tensor:
    """A weight that can be added to it."""
    dtype = like.dtype if like.dtype.is_floating_point or like.dtype.is_complex else torch.float32
    return torch.full((), 0.5, dtype=dtype, requires_grad=True)


def in_place_on_view(view: Tensor, base: Tensor) -> Any:
    weight = number(view)
    view.mul_(weight)
    (base.sum() + view.sum()).abs().backward()
    return [weight.grad]


def in_place_on_base(view: Tensor, base: Tensor) -> Any:
    weight = number(base)
    base.mul_(weight)
    view.sum().abs().backward()
    return [weight.grad]


def without_gradients(view: Tensor, base: Tensor) -> Any:
    with torch.no_grad():
        view.mul_(2)
    with torch.no_grad():
        base.add_(1)
    return [view.clone(), base.clone()]


def saved_for_backward(view: Tensor, base: Tensor) -> Any:
    weight = number(view)
    loss = (view * weight).sum().abs()
    with torch.no_grad():
        base.add_(1)
    loss.backward()
    return [weight.grad]


def detached_in_place(view: Tensor, base: Tensor) -> Any:
    weight = number(view)
    loss = (base * weight.real).sum().abs()
    view.detach().mul_(3)
    loss.backward()
    return [weight.grad]


ACTIONS = [lambda view, base: None, in_place_on_view, in_place_on_base, without_gradients, saved_for_backward]
ACTIONS.append(detached_in_place)


class Case:
    """A step that returns views, and where their base comes from."""

    def __init__(self, base: str, view: View, mode: Callable[[], AbstractContextManager[Any]]) -> None:
        self.kind = base
        self._view, self._mode = view, mode
        self.state: dict[str, Tensor] = {}
        if base == "parameter":
            self.state = {"p": nn.Parameter(torch.arange(16.0).view(4, 4))}
        elif base == "buffer":
            self.state = {"p": torch.arange(16.0).view(4, 4)}
        elif base == "part of state":
            self.whole = torch.arange(20.0)
            self.state = {"p": self.whole[4:].view(4, 4)}

    def step(self, x: Tensor) -> Any:
        with self._mode():
            if self.state:
                x = self.state["p"]
            elif self.kind == "written argument":
                x.add_(1)
            elif self.kind in ("result", "hidden result"):
                x = x * 2
            made = self._view(x)
            return (x, made) if self.kind == "result" else made

    def argument(self, call: int) -> tuple[Tensor, dict[str, Tensor]]:
        """What a call is made with, and what the caller has beside it."""
        whole = torch.arange(40.0) + call
        if self.kind == "leaf argument":
            return whole[:16].view(4, 4).clone().requires_grad_(), {}
        if self.kind == "part of another":
            return whole[4 * (call % 3) :][:16].view(4, 4), {"whole": whole}
        if self.kind == "part made without gradients":
            with torch.no_grad():
                return whole[:16].view(4, 4), {"whole": whole}
        if self.kind == "detached":
            return whole[:16].view(4, 4).detach(), {"whole": whole}
        return whole[:16].view(4, 4).clone(), {}


BASES = [
    "argument",
    "written argument",
    "leaf argument",
    "part of another",
    "part made without gradients",
    "detached",
    "parameter",
    "buffer",
    "part of state",
    "result",
    "hidden result",
]
EVERY = list(itertools.product(BASES, MODES, VIEWS))
SOME = EVERY if EVERYTHING else random.Random(7).sample(EVERY, 70)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("base", "mode", "view"), SOME)
def test_views_are_what_they_are_in_eager(base: str, mode: str, view: str) -> None:
    def script(capture: Capture) -> Calls:
        for action in ACTIONS:
            case = Case(base, VIEWS[view], MODES[mode])
            step = capture(case.step, state=case.state, passes="default")
            for call in range(CALLS):
                x, beside = case.argument(call)
                out = step(x)
                views = [each for each in torch.utils._pytree.tree_leaves(out) if isinstance(each, Tensor)]
                known = {"x": x, **beside, **case.state, **{f"out{i}": each for i, each in enumerate(views)}}
                seen = [observed(name, tensor, known) for name, tensor in known.items()]
                root = views[0] if case.kind == "result" else case.state.get("p", beside.get("whole", x))
                done = attempt(lambda: action(views[-1], root))  # noqa: B023
                yield [seen, done, [observed(name, tensor, known) for name, tensor in known.items()]]
                for tensor in case.state.values():  # what the action did to them is no step's
                    tensor.grad = None
                    tensor.detach_() if tensor.grad_fn is not None and not tensor._is_view() else None
        return {}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = check_right(script)
    if not ORACLE_ONLY:
        for step in run.steps:
            assert step.stats.replays > 0 or step.stats.refusals or step.stats.fallbacks, step.stats


SHARDED: dict[str, Callable[[Tensor], Any]] = {
    "detached": lambda p: p.detach(),
    "transposed": lambda p: p.detach().t(),
    "local": lambda p: p.detach().to_local(),
    "both": lambda p: (whole := p.detach(), whole.to_local()),
    "part of local": lambda p: p.detach().to_local()[1:],
    "twice": lambda p: (p.detach().t(), p.detach().t().t()),
}


def local_without_gradients(p: Tensor) -> Tensor:
    with torch.no_grad():
        return p.to_local()  # type: ignore[attr-defined,no-any-return]


SHARDED["very local"] = local_without_gradients


def turned_in_place(x: Tensor, weight: Tensor) -> Any:
    """Ops that change in place how a tensor looks at memory, forward and backward."""
    hidden = (x @ weight).t_()
    mask = (x > 0).unsqueeze_(1).transpose_(0, 2)
    row = hidden[1].unsqueeze_(0)
    hidden.squeeze_(0)
    hidden.detach()[0].fill_(2)
    loss = (row * hidden.swapaxes_(0, 1)).square().sum() + mask.sum()
    loss.backward()
    return loss.detach(), hidden, row, mask


def test_tensors_of_the_step_may_be_turned_in_place() -> None:
    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.arange(16.0).view(4, 4) / 8)
        optimizer = torch.optim.SGD([weight], lr=0.01)

        def step(x: Tensor) -> Any:
            optimizer.zero_grad()
            left = turned_in_place(x, weight)
            optimizer.step()
            return left

        return over(capture, step, inputs(26, 4, 4), state={"weight": weight, "optimizer": optimizer})

    check_equal(script)


TURNED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "argument": (lambda x, p: x.unsqueeze_(0) * p, "aten::unsqueeze_"),
    "view of an argument": (lambda x, p: x[1:].t_() + 1, "aten::t_"),
    "view of a parameter": (lambda x, p: p.detach().t_() + x, "aten::t_"),
    "other memory": (lambda x, p: x.clone().resize_(2, 2) + 1, "aten::resize_"),
}


@pytest.mark.parametrize("what", TURNED)
def test_other_tensors_may_not(what: str) -> None:
    step, op = TURNED[what]

    def script(capture: Capture) -> Calls:
        p = nn.Parameter(torch.ones(4, 4))
        return over(capture, lambda x: step(x, p), inputs(6, 4, 4), state={"p": p})

    check_refused(script, op, r"test_views\.py:\d+", remedy="out-of-place")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", SHARDED)
def test_views_of_dtensors(case: str) -> None:
    def script(capture: Capture) -> Calls:
        p = nn.Parameter(as_dtensor(torch.arange(16.0).view(4, 4), mesh(2), Shard(0)))
        step = capture(lambda: SHARDED[case](p), state=p)
        for _ in range(CALLS):
            out = list(torch.utils._pytree.tree_leaves(step()))
            known = {f"out{i}": each for i, each in enumerate(out)}
            known |= {f"local{i}": each._local_tensor for i, each in enumerate(out) if isinstance(each, DTensor)}
            known |= {"p": p, "p.local": p._local_tensor}
            seen = [observed(name, tensor, known) for name, tensor in known.items()]
            with torch.no_grad():
                out[-1].mul_(2)
            yield [seen, [observed(name, tensor, known) for name, tensor in known.items()]]
        return {"p": p}

    check_right(script)


@pytest.mark.ranks(2)
def test_a_write_to_a_dtensor_shows_in_graphs_outside() -> None:
    """A graph that has saved a parameter which the step writes cannot go backward any more."""

    def script(capture: Capture) -> Calls:
        p = nn.Parameter(as_dtensor(torch.ones(4, 4), mesh(2), Shard(0)))

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                p.mul_(0.5).add_(x.sum())
            return x * 2

        captured = capture(step, state=p)
        for x in inputs(8, 4):
            loss = (p * p).sum().full_tensor()  # type: ignore[attr-defined]
            captured(x)
            yield [attempt(loss.backward), p._version, p._local_tensor._version]
            p.grad = None
        return {"p": p}

    run = check_right(script)
    assert "modified by an inplace operation" in str(run.outputs[-1])
    if not ORACLE_ONLY:
        assert run.stats[-1][0].replays


def test_version_counters_rise_as_often_as_in_eager() -> None:
    def script(capture: Capture) -> Calls:
        table, other = torch.zeros(4), torch.zeros(8)
        part = other[:4]
        weight = nn.Parameter(torch.ones(4))

        def step(x: Tensor) -> Tensor:
            table.add_(x).mul_(2)
            other.data.add_(1)
            part.add_(1)
            part[1:].mul_(2)
            x.data.add_(1)
            with torch.no_grad():
                weight.sub_(x)
                weight.grad.mul_(0.5)  # type: ignore[union-attr]
            return table * 1

        captured = capture(step, state={"table": table, "other": other, "part": part, "weight": weight})
        for x in inputs(8, 4):
            weight.grad = torch.ones(4)
            captured(x)
            yield [each._version for each in (x, table, other, part, weight, weight.grad)]
        return {"other": other, "weight": weight}

    check_right(script, replays=5)


def test_gradients_that_are_views_of_a_buffer() -> None:
    """One flat buffer for all gradients, as some optimizers keep."""

    def script(capture: Capture) -> Calls:
        flat = torch.zeros(16)
        weight = nn.Parameter(torch.ones(4, 4))

        def step(x: Tensor) -> Tensor:
            weight.grad = flat.view(4, 4)
            (weight * x).sum().backward()
            return x.sum()

        captured = capture(step, state={"flat": flat, "weight": weight})
        for x in inputs(8, 4):
            captured(x)
            known = {"flat": flat, "weight": weight}
            assert weight.grad is not None
            yield observed("grad", weight.grad, known)
            weight.grad.mul_(0.5)
            yield [flat._version, flat]
        return {"weight": weight}

    check_right(script)


def test_what_is_passed_twice_may_be_related_otherwise() -> None:
    """Two arguments in one storage: a view of the other, or not."""

    def script(capture: Capture) -> Calls:
        step = capture(lambda x, y: (y[1:], x.sum()))
        for i in range(24):
            x = torch.arange(8.0)
            y = [x[2:], x.detach()[2:], x.data[2:], x[2:].detach()][i // 3 % 4]
            view, _ = step(x, y)
            known = {"x": x, "y": y, "view": view}
            seen = [observed(name, tensor, known) for name, tensor in known.items()]
            done = attempt(lambda: in_place_on_view(view, x))  # noqa: B023
            yield [seen, done, [observed(name, tensor, known) for name, tensor in known.items()]]
        return {}

    check_right(script, replays=1)


def test_a_trusted_plan_makes_the_same_views(tmp_path: Any) -> None:
    def script(capture: Capture) -> Calls:
        for _ in range(2):
            step = capture(lambda x: (x[1:], (x * 2)[1:], x.detach()), plans=tmp_path, trust_plans=True)
            for x in inputs(5, 4):
                out = step(x)
                known = {"x": x, **{f"out{i}": each for i, each in enumerate(out)}}
                yield [observed(name, tensor, known) for name, tensor in known.items()]
        return {}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert run.steps[-1].stats.recordings == 0 and run.steps[-1].stats.replays == 5


@pytest.mark.parametrize("moved", ["base", "another view"])
@pytest.mark.parametrize("what", ["result", "gradient"])
def test_views_of_what_has_got_other_memory(what: str, moved: str) -> None:
    """Autograd still calls them views: no replay could make them so."""

    def script(capture: Capture) -> Calls:
        base, owner = torch.arange(8.0), nn.Parameter(torch.ones(4))
        held, other = base[4:], base[2:6]

        def step(x: Tensor) -> Any:
            if what == "gradient":
                owner.grad = held[:]
            return (held[:] if what == "result" else x * 2), other * x[0]

        captured = capture(step, state=[other, owner, *([base, held] if moved == "base" else [])])
        for call in range(2 * CALLS):
            if call == CALLS:
                (base if moved == "base" else other).data = torch.ones(8 if moved == "base" else 4)
            found, _ = captured(torch.ones(4) + call)
            yield found, found._is_view(), owner.grad, owner.grad is not None and owner.grad._is_view()
        return {}

    check_right(script)
