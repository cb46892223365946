"""Where gradients, and tensors that no name in `state=` reaches, lie: in tensors of the state, in arguments, in each
other's memory, or in their own."""

import itertools
from collections.abc import Callable

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn

# The gradients of two parameters, from two tensors and a flat one of the state, and an argument.
PLACES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor | None, Tensor | None]]] = {
    "none": lambda a, b, flat, x: (None, None),
    "own": lambda a, b, flat, x: (torch.ones(4), torch.ones(4)),
    "named": lambda a, b, flat, x: (a, b),
    "swapped": lambda a, b, flat, x: (b, a),
    "one": lambda a, b, flat, x: (a, torch.ones(4)),
    "same": lambda a, b, flat, x: (own := torch.ones(4), own),
    "views of one": lambda a, b, flat, x: ((own := torch.ones(8))[:4], own[4:]),
    "overlapping": lambda a, b, flat, x: ((own := torch.ones(8))[:4], own[2:6]),
    "halves": lambda a, b, flat, x: (flat[:4], flat[4:]),
    "other halves": lambda a, b, flat, x: (flat[4:], flat[:4]),
    "shifted": lambda a, b, flat, x: (flat[1:5], None),
    "view of a named one": lambda a, b, flat, x: (a.view(4), b),
    "argument": lambda a, b, flat, x: (x, None),
    "both in an argument": lambda a, b, flat, x: (x, x.view(4)),
}
CHANGED = 5


@pytest.mark.sampled(3)
@pytest.mark.parametrize("first", PLACES)
@pytest.mark.parametrize("whose", ["the state's", "an argument's"])
def test_gradients_move(first: str, whose: str) -> None:
    """To every other place, and back."""
    names = [first, *itertools.chain.from_iterable((name, first) for name in PLACES if name != first)]

    def script(capture: Capture) -> Calls:
        v, w = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))
        a, b, flat, x = torch.ones(4), torch.full((4,), 3.0), torch.arange(8.0), torch.ones(4)

        def step(x: Tensor, *given: Tensor) -> Tensor:
            one, other = given or (v, w)
            sums = a.sum() + flat.sum()
            factor = x * 1
            (one * factor * 2 + other * other * factor).sum().backward()
            with torch.no_grad():
                b.mul_(0.5)
                flat.add_(0.25)
                x = x + 0
            return sums * 2 + a.sum() - b.sum() + flat.prod() + x

        state = [a, b, flat] if whose == "an argument's" else [v, w, a, b, flat]
        step = capture(step, state=state, max_variants=64)
        for name in names:
            for call in range(CHANGED):
                if call == 0 or "argument" in name or whose == "an argument's":
                    for tensor, value in ((a, 1.0), (b, 3.0), (flat, 1.5)):
                        tensor.fill_(value)
                    x = torch.ones(4) + call
                    v.grad, w.grad = PLACES[name](a, b, flat, x)
                yield step(x, *([v, w] if whose == "an argument's" else [])), a, b, flat, v.grad, w.grad
        return {"v": v, "w": w}

    found = check_right(script)
    assert ORACLE_ONLY or found.stats[-1][0].replays >= 2 * len(names), found.stats[-1][0]


def test_gradients_of_gradients_and_of_tensors_in_reach() -> None:
    """Of a tensor that no name in ``state=`` reaches, too."""

    def script(capture: Capture) -> Calls:
        a, b, held, w = (
            torch.ones(4),
            torch.full((4,), 3.0),
            torch.ones(4, requires_grad=True),
            nn.Parameter(torch.ones(4)),
        )
        w.grad = torch.ones(4)
        step = capture(lambda x: (held.grad.mul_(0.5), w.grad.grad.mul_(0.25))[0].sum() * x, state=[a, b, w])  # type: ignore[union-attr]
        for first, second in ((a, b), (b, a), (a, a), (b, b), (a, b)):
            held.grad, w.grad.grad = first, second
            for call in range(CHANGED):
                yield step(torch.ones(2) + call), a, b
        return {}

    check_right(script, replays=4)


MOVES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": lambda held, now: setattr(held, "data", now),
    "gradient": lambda held, now: setattr(held, "grad", now),
}


@pytest.mark.parametrize("move", MOVES)
def test_step_that_moves_a_tensor_in_reach(move: str) -> None:
    """A replay would leave it where it was."""

    def script(capture: Capture) -> Calls:
        a, b, held = torch.ones(4), torch.full((4,), 3.0), torch.ones(4, requires_grad=True)

        def step(x: Tensor) -> Tensor:
            found = held.detach() if move == "data" else held.grad
            MOVES[move](held, b)
            return x * found

        captured = capture(step, state=[a, b])
        for call in range(12):
            if call % 3 == 0:
                MOVES[move](held, a)
            yield captured(torch.ones(4) + call), held.detach(), held.grad
        return {}

    check_right(script)


WAYS: dict[str, Callable[[Tensor, Tensor], object]] = {
    "data": lambda held, now: setattr(held, "data", now),
    "view": lambda held, now: setattr(held, "data", now[:]),
    "set": lambda held, now: held.set_(now),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", ["closure", "module", "attribute of a named module"])
def test_memory_of_tensors_in_reach(place: str, way: str) -> None:
    """As an evaluation with averaged weights does, which are named and the model is not."""

    def script(capture: Capture) -> Calls:
        live, averaged = torch.ones(4), torch.full((4,), 3.0)
        model = nn.Module()
        model.weight = nn.Parameter(live, requires_grad=False) if place == "module" else live[:]
        held = model.weight.detach() if place == "closure" else model.weight

        def step(x: Tensor) -> Tensor:
            used = held if place == "closure" else model.weight
            used.mul_(0.5)
            return x * used + live.sum() - averaged.sum()

        state = [live, averaged, model] if place == "attribute of a named module" else [live, averaged]
        captured = capture(step, state=state, tail=False)
        for now in (live, averaged, live, averaged):
            WAYS[way](held, now)
            for call in range(CHANGED):
                live.fill_(2.0)
                averaged.fill_(5.0)
                yield captured(torch.ones(4) + call), live, averaged
        return {}

    check_right(script, replays=6)
