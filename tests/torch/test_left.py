"""A step leaves its arguments and its state where eager leaves them.

Ops that write what their schemas call read; steps that give an existing tensor
other memory, another shape or other strides, which a replay does not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right
from torch import Tensor, nn

CALLS = 7


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Norm = Callable[[nn.Module, Tensor], Any]
NORMS: dict[str, Norm] = {
    "for its statistics alone": lambda m, x: (m(x), x * 2)[1],
    "between two reads of its statistics": lambda m, x: (m.running_mean + 1, m(x), m.running_mean + 1)[::2],
    "twice with one batch": lambda m, x: (m(x), m(x)),
    "between two copies of its statistics": lambda m, x: (m.running_var.clone() * 2, m(x), m.running_var.clone() * 2),
    "and read from its result": lambda m, x: m(x) * m.running_mean.sum(),
}


@pytest.mark.parametrize("passes", ["none", "default", "all"])
@pytest.mark.parametrize("name", NORMS)
def test_running_statistics_are_written(name: str, passes: str) -> None:
    def script(capture: Capture) -> Calls:
        norm = nn.BatchNorm1d(3)

        def step(x: Tensor) -> Any:
            with torch.no_grad():
                return NORMS[name](norm, x)

        captured = capture(step, state=norm, passes=passes, tail=False)
        for call in range(CALLS):
            if call == CALLS - 2:
                norm.eval()
            yield captured(draw(call, 4, 3))
        return norm

    check_equal(script, replays=3)


@pytest.mark.parametrize("passes", ["none", "default", "all"])
def test_one_tensor_as_mean_and_variance(passes: str) -> None:
    def script(capture: Capture) -> Calls:
        def step(x: Tensor, both: Tensor) -> Tensor:
            return torch.nn.functional.instance_norm(x, both, both, use_input_stats=True, momentum=0.5)

        captured = capture(step, passes=passes, tail=False)
        for call in range(CALLS):
            both = draw(call + 9, 3).abs()
            yield captured(draw(call, 2, 3, 4), both), both
        return {}

    check_equal(script, replays=3)


def _swap_data(a: Tensor, b: Tensor) -> None:
    a.data, b.data = b.data, a.data


def _other_memory(a: Tensor, b: Tensor) -> None:
    a.data = b.data


MOVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    ".data of another": _other_memory,
    ".data swapped": _swap_data,
    ".data viewed": lambda a, b: setattr(a, "data", a.data.view(-1)),
    ".data transposed": lambda a, b: setattr(a, "data", a.data.mT),
    ".data sliced": lambda a, b: setattr(a, "data", a.data[1:]),
    ".data negated": lambda a, b: setattr(a, "data", torch._neg_view(a.data)),
    "swap_tensors": lambda a, b: torch.utils.swap_tensors(a, b),
    "out= of another shape": lambda a, b: torch.add(b[0], 1, out=a),
    "out= of a larger shape": lambda a, b: torch.add(b.unsqueeze(0).expand(2, 3, 3), 1, out=a),
    "out= a view that becomes larger": lambda a, b: torch.add(b, 1, out=a[2:]),
    "addbmm_": lambda a, b: a[2, 2].addbmm_(b[None], b[None]),
}


@pytest.mark.filterwarnings("ignore")  # out= of another shape is deprecated
@pytest.mark.parametrize("where", ["arguments", "state"])
@pytest.mark.parametrize("name", MOVES)
def test_tensors_that_the_step_moves(name: str, where: str) -> None:
    def script(capture: Capture) -> Calls:
        a, b = draw(1, 3, 3), draw(2, 3, 3)

        def step(x: Tensor, *given: Tensor) -> Any:
            first, second = given or (a, b)
            MOVES[name](first, second)
            return x.sum() + first.sum() * second.sum()

        captured = capture(step, state=[a, b], tail=False)
        for call in range(CALLS):
            if where == "arguments":
                c, d = draw(call, 3, 3), draw(call + 50, 3, 3)
                yield captured(draw(call, 4), c, d), c, d
            else:
                if name != ".data swapped" and name != "swap_tensors":
                    a.data, b.data = draw(call, 3, 3), b.data
                yield captured(draw(call, 4)), a.clone(), b.clone()
        return {"a": a, "b": b}

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.stats[-1][-1].refusals, found.stats[-1]
