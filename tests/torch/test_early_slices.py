"""Slices of data in the middle of a turn are taken at its begin where that is the same, so that it is replayed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import Calls, Capture, check_right
from test_loops import captured, check_turns
from torch import Tensor, nn

N, SIZE = 60, 6


class Trainer:
    """What the functions below are called with."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.told: list[Any] = []

    def update(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


def labels_behind_the_model(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), SIZE):
        batch = x[i : i + SIZE]
        out = of.model(batch)
        labels = y[i : i + SIZE]
        of.update(F.mse_loss(out, labels))


def inside_of_calls(of: Trainer, x: Any, y: Any) -> float:
    total = 0.0
    for i in range(0, x.size(0), SIZE):
        of.optimizer.zero_grad()
        loss = F.mse_loss(of.model(x[i : i + SIZE]), y[i : i + SIZE])
        loss.backward()
        of.optimizer.step()
        total += loss.item()
    return total


def single_samples(of: Trainer, x: Any, y: Any) -> None:
    for i in range(len(x) // 2):
        out = of.model(x[i])
        of.update((out - y[-i - 1]).square().mean())


def numbers_that_the_turn_sets(of: Trainer, x: Any, y: Any) -> None:
    for step in range(len(x) // SIZE):
        begin = step * SIZE
        end = begin + SIZE
        out = of.model(x[begin:end])
        of.update(F.mse_loss(out[:, :2], y[begin:end, :2]))


def a_last_batch_that_is_smaller(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), 7):
        out = of.model(x[i : i + 7])
        of.update(F.mse_loss(out, y[i : i + 7]))


def numbers_of_numpy(of: Trainer, x: Any, y: Any) -> None:
    for i in np.random.default_rng(1).permutation(len(x)):
        out = of.model(x[i])
        of.update((out - y[i]).square().mean())


# Most of their turns are replayed.
REPLAYED = [
    numbers_of_numpy,
    labels_behind_the_model,
    inside_of_calls,
    single_samples,
    numbers_that_the_turn_sets,
    a_last_batch_that_is_smaller,
]


def of_data_that_the_turn_writes(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        with torch.no_grad():
            y.add_(0.01)
        of.update(F.mse_loss(out, y[i : i + SIZE]))


def of_data_that_the_turn_replaces(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        y = y * 1.01
        of.update(F.mse_loss(out, y[i : i + SIZE]))


def of_data_that_moves(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        y.data = y.data * 1.01
        of.update(F.mse_loss(out, y[i : i + SIZE]))


def moved(data: Tensor) -> None:
    data.data = data.data.flip(0)


def of_data_that_a_function_moves(of: Trainer, x: Any, y: Any) -> None:
    kept = [y]
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        moved(kept[0])
        of.update(F.mse_loss(out, y[i : i + SIZE]))


def of_data_that_is_made_smaller(of: Trainer, x: Any, y: Any) -> None:
    kept = [y]
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        kept[0].set_(y.flip(0)[: len(y) - 1])
        of.update(F.mse_loss(out[:1], y[i : i + 1]))


def of_a_number_that_is_set_again(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x) - SIZE, SIZE):
        out = of.model(x[i : i + SIZE])
        i += 1
        of.update(F.mse_loss(out, y[i : i + SIZE]))


def of_a_number_that_a_block_sets(of: Trainer, x: Any, y: Any) -> None:
    begin = 0
    for i in range(0, len(x) - SIZE, SIZE):
        out = of.model(x[i : i + SIZE])
        if i % 4 == 0:
            begin = i
        of.update(F.mse_loss(out, y[begin : begin + SIZE]))


def of_lists(of: Trainer, x: Any, y: Any) -> None:
    rows = [list(row) for row in np.eye(3)] * (N // 3)
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        rows[i][0] += 0.5
        of.update(F.mse_loss(out, torch.tensor(rows[i : i + SIZE], dtype=torch.float32)))


class Drawn:
    """Data that is drawn where it is asked for."""

    def __getitem__(self, key: slice) -> Tensor:
        return torch.rand(key.stop - key.start, 3)


def of_an_object_that_draws(of: Trainer, x: Any, y: Any) -> None:
    data, noise = Drawn(), nn.Dropout(0.5)
    for i in range(0, len(x), SIZE):
        out = of.model(noise(x[i : i + SIZE]))
        of.update(F.mse_loss(out, data[i : i + SIZE]))


def of_what_has_a_graph(of: Trainer, x: Any, y: Any) -> None:
    weight = of.model[2].weight
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        of.update((out @ weight[:, i % 4 : i % 4 + 2]).square().mean())


def of_a_scalar(of: Trainer, x: Any, y: Any) -> None:
    scalar = y.sum()
    for i in range(0, len(x), SIZE):
        of.told.append(i)
        out = of.model(x[i : i + SIZE])
        of.update(out.square().mean())
        if i == 24:
            of.update(out.sum() * scalar[i : i + 1])


def in_lambdas_and_lists(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        parts = [y[i + j : i + j + 1] for j in range(SIZE)]
        last = (lambda k: y[i + k : i + k + 1])(SIZE - 1)
        of.update(F.mse_loss(out, torch.cat(parts)) + last.mean())


def under_if(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        loss = F.mse_loss(out, y[i : i + SIZE]) if i % 4 else F.l1_loss(out, y[i : i + SIZE])
        if i % 3 == 0:
            loss = loss + y[i : i + 1].mean()
        of.update(loss)


def beyond_the_end(of: Trainer, x: Any, y: Any) -> None:
    for i in range(len(x) + 3):
        of.told.append(i)
        out = of.model(x[i - 3])
        of.update((out - y[i]).square().mean())


DATA = torch.linspace(-1, 1, N * 3).reshape(N, 3)
BEGIN = 0


def go_on() -> None:
    global BEGIN
    BEGIN = (BEGIN + 1) % 5


def at_a_global_number(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x) - 5, SIZE):
        out = of.model(x[i : i + SIZE])
        go_on()
        of.update(F.mse_loss(out, y[i + BEGIN : i + BEGIN + SIZE][: len(out)]))


def replace_data() -> None:
    global DATA
    DATA = DATA * 1.01


def of_a_global_that_is_replaced(of: Trainer, x: Any, y: Any) -> None:
    for i in range(0, len(x), SIZE):
        out = of.model(x[i : i + SIZE])
        replace_data()
        of.update(F.mse_loss(out, DATA[i : i + SIZE]))


OTHERS = [
    of_data_that_the_turn_writes,
    of_data_that_the_turn_replaces,
    of_data_that_moves,
    of_data_that_a_function_moves,
    of_data_that_is_made_smaller,
    of_a_number_that_is_set_again,
    of_a_number_that_a_block_sets,
    of_lists,
    of_an_object_that_draws,
    of_what_has_a_graph,
    of_a_scalar,
    in_lambdas_and_lists,
    under_if,
    beyond_the_end,
    of_a_global_that_is_replaced,
    at_a_global_number,
]


def script_of(body: Callable[..., Any], kinds: tuple[Callable[[Tensor], Any], ...] = ()) -> Any:
    """``kinds``: what the labels are made of, in the calls from the fourth on."""

    def script(capture: Capture) -> Calls:
        global DATA
        DATA = torch.linspace(-1, 1, N * 3).reshape(N, 3)
        of, run = Trainer(), capture(body)
        for call in range(5 + len(kinds)):
            x, y = torch.randn(N, 5), torch.rand(N, 3)
            labels = kinds[call - 5](y) if call >= 5 else y
            try:
                result = run(of, x, labels)
            except (IndexError, TypeError, RuntimeError, AttributeError) as error:
                result = type(error), str(error)
            yield result, [*of.told], y, DATA
        return of.model, of.optimizer

    return script


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", REPLAYED)
def test_replayed(body: Callable[..., Any]) -> None:
    check_turns(script_of(body), more_than=5)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", OTHERS)
def test_right(body: Callable[..., Any]) -> None:
    check_right(script_of(body), captured)


def as_parameter(y: Tensor) -> Tensor:
    return nn.Parameter(y)


def as_transposed(y: Tensor) -> Tensor:
    return y.t().contiguous().t()


def as_doubles(y: Tensor) -> Tensor:
    return y.double()


def as_array(y: Tensor) -> Any:
    return y.numpy()


def as_list(y: Tensor) -> Any:
    return [*y]


def as_scalar(y: Tensor) -> Tensor:
    return y.sum()


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("body", REPLAYED)
def test_other_data_later(body: Callable[..., Any]) -> None:
    """Once turns are replayed, the data is of another kind."""
    kinds = (as_parameter, as_transposed, as_doubles, as_array, as_list, as_scalar, torch.clone)
    check_right(script_of(body, kinds), captured)
