"""Ops that go by a mode or a subclass of Tensor inside the step are recorded as what these make of them; ops
that are hidden from these are recorded too.

A recording sees ops below Python: it has to come back from each mode and subclass, on every version of PyTorch.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

CALLS = 10


class Doubled(torch.Tensor):
    """Holds a tensor, and shows twice its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Doubled":
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add_.Tensor:
            args[0].inner.add_(args[1], alpha=0.5)
            return args[0]
        args, kwargs = pytree.tree_map_only(Doubled, lambda t: t.inner * 2, (args, kwargs or {}))
        return func(*args, **kwargs)


class Scaling(TorchDispatchMode):
    """Multiplies what `exp` returns."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.ops.aten.exp.default else result


class Passing(TorchDispatchMode):
    """Changes nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


State = dict[str, Tensor]
Step = Callable[[State, Tensor], Any]
STEPS: dict[str, Step] = {}


def step(fn: Step) -> Step:
    STEPS[fn.__name__] = fn
    return fn


@step
def subclass(state: State, x: Tensor) -> Any:
    return Doubled(x).sin() + Doubled(state["memory"]).cos()


@step
def subclass_written_in_place(state: State, x: Tensor) -> Any:
    Doubled(state["memory"]).add_(x)
    return state["memory"].sin()


@step
def subclass_with_gradients(state: State, x: Tensor) -> Any:
    state["weight"].grad = None
    (Doubled(x) * state["weight"]).sum().backward()
    return state["weight"].grad.clone()  # type: ignore[union-attr]


@step
def subclass_in_a_subclass(state: State, x: Tensor) -> Any:
    return Doubled(Doubled(x)).sin()  # type: ignore[arg-type]


@step
def mode(state: State, x: Tensor) -> Any:
    with Scaling():
        return x.exp() + state["memory"]


@step
def modes_in_modes(state: State, x: Tensor) -> Any:
    with Scaling(), Passing(), Scaling():
        return x.exp()


@step
def mode_around_a_subclass(state: State, x: Tensor) -> Any:
    with Scaling():
        return Doubled(x).exp()


@step
def mode_around_a_write(state: State, x: Tensor) -> Any:
    with Passing():
        state["memory"].mul_(0.5).add_(x)
    return x.sin()


@step
def mode_around_a_factory(state: State, x: Tensor) -> Any:
    with Passing():
        return torch.full((4,), 2.0) + torch.arange(4.0) + x


@step
def mode_around_random_numbers(state: State, x: Tensor) -> Any:
    with Passing():
        return x * torch.rand(4)


@step
def mode_around_gradients(state: State, x: Tensor) -> Any:
    state["weight"].grad = None
    with Scaling():
        (x.exp() * state["weight"]).sum().backward()
    return state["weight"].grad.clone()  # type: ignore[union-attr]


@step
def hidden_write(state: State, x: Tensor) -> Any:
    with no_dispatch():
        state["memory"].add_(x)
    return state["memory"] * x


@step
def hidden_write_to_a_view(state: State, x: Tensor) -> Any:
    with no_dispatch():
        torch._foreach_add_([state["memory"][1:3]], 1.0)
    return x * 2


@step
def hidden_write_to_a_result(state: State, x: Tensor) -> Any:
    twice = x * 2
    with no_dispatch():
        twice.add_(x)
    return twice


@step
def hidden_result(state: State, x: Tensor) -> Any:
    with no_dispatch():
        return x * torch.rand(4) + state["memory"]


@step
def hidden_gradients(state: State, x: Tensor) -> Any:
    state["weight"].grad = None
    loss = (state["weight"] * x).sum()
    with no_dispatch():
        loss.backward()
    return state["weight"].grad.clone()  # type: ignore[union-attr]


@step
def hidden_in_a_mode(state: State, x: Tensor) -> Any:
    with Scaling():
        with no_dispatch():
            state["memory"].add_(x.exp())
        return x.exp()


@pytest.mark.parametrize("name", STEPS)
def test_what_python_makes_of_an_op_is_recorded(name: str) -> None:
    stats = stats_of(STEPS[name])
    assert ORACLE_ONLY or (stats.replays >= CALLS - 5 and not stats.refusals), stats


def stats_of(fn: Step) -> Any:
    """What became of a step, which gives what eager gives."""

    def script(capture: Capture) -> Calls:
        state = {"memory": torch.linspace(0.0, 1.0, 4), "weight": nn.Parameter(torch.ones(4))}
        return over(capture, lambda x: fn(state, x), (torch.rand(4) for _ in range(CALLS)), state=state)

    return check_right(script).stats[-1][0]


def hidden_item(state: State, x: Tensor) -> Any:
    above = (x.sum() > 2).float()
    with no_dispatch():
        return x * above.item()


def hidden_branch(state: State, x: Tensor) -> Any:
    with no_dispatch():
        return x * (2 if x.sum() > 2 else 3)


def hidden_count(state: State, x: Tensor) -> Any:
    with no_dispatch():
        count = (x > 0.5).nonzero().shape[0]
    return x * count


def hidden_comparison(state: State, x: Tensor) -> Any:
    with no_dispatch():
        same = torch.equal(x, state["memory"])
    state["memory"].copy_(x)
    return x * (2 if same else 3)


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("fn", [hidden_item, hidden_branch, hidden_comparison])
def test_what_is_read_on_the_host_is_checked_where_it_is_hidden_too(fn: Step) -> None:
    stats = stats_of(fn)
    assert ORACLE_ONLY or (stats.replays >= 6 and not stats.refusals), stats


@pytest.mark.filterwarnings("ignore:rote")
def test_a_shape_that_depends_on_data_is_checked_where_it_is_hidden_too() -> None:
    stats = stats_of(hidden_count)
    assert ORACLE_ONLY or (stats.replays and stats.guard_misses), stats
