"""What other threads of Python do with a step's tensors is refused, what they do with their own is not.

A recording sees the thread that runs the step, and those of autograd.
"""

import concurrent.futures
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import training
from oracle import ORACLE_ONLY, rote_capture
from torch import Tensor, nn

CALLS = 8
pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="what eager does with threads is no question")

Work = Callable[[nn.Linear, Tensor, concurrent.futures.Executor], Tensor]


@pytest.fixture(scope="module")
def pool() -> Iterator[concurrent.futures.Executor]:
    with concurrent.futures.ThreadPoolExecutor(1) as found:
        yield found


@torch.no_grad()
def double(x: Tensor) -> None:
    x.mul_(2)


def writes_state(model: nn.Linear, x: Tensor, pool: concurrent.futures.Executor) -> Tensor:
    pool.submit(double, model.weight).result()
    return model(x)


def writes_state_early(model: nn.Linear, x: Tensor, pool: concurrent.futures.Executor) -> Tensor:
    y = x * 2
    pool.submit(double, model.bias).result()
    return model(y)


def writes_argument(model: nn.Linear, x: Tensor, pool: concurrent.futures.Executor) -> Tensor:
    y = model(x)
    pool.submit(double, x).result()
    return y + x


def writes_result(model: nn.Linear, x: Tensor, pool: concurrent.futures.Executor) -> Tensor:
    y = model(x)
    pool.submit(double, y.detach()).result()
    return y


def writes_view(model: nn.Linear, x: Tensor, pool: concurrent.futures.Executor) -> Tensor:
    y = (x * 2).t()
    pool.submit(torch._foreach_mul_, [y[0], y[1:]], 3.0).result()
    return model(y.t())


def reads_result(model: nn.Linear, x: Tensor, pool: concurrent.futures.Executor) -> Tensor:
    y = model(x)
    pool.submit(lambda: LOGGED.put(y.sum().item())).result()
    return y * 1


LOGGED: "queue.Queue[float]" = queue.Queue()


@pytest.mark.parametrize(
    "work", [writes_state, writes_state_early, writes_argument, writes_result, writes_view, reads_result]
)
def test_work_of_another_thread_is_refused(work: Work, pool: concurrent.futures.Executor) -> None:
    model = nn.Linear(3, 3)

    @torch.no_grad()
    def step(x: Tensor) -> Tensor:
        return work(model, x, pool)

    found = []
    with pytest.warns(UserWarning, match=r"another thread"):
        torch.manual_seed(0)
        captured, before = rote_capture(step, state=model), model.state_dict()
        before = {name: tensor.clone() for name, tensor in before.items()}
        for call in range(CALLS):
            found.append(captured(torch.randn(3, 3, generator=torch.Generator().manual_seed(call))))
    model.load_state_dict(before)
    for call in range(CALLS):
        expected = step(torch.randn(3, 3, generator=torch.Generator().manual_seed(call)))
        assert torch.equal(expected, found[call]), call
    assert captured.stats.replays == 0, captured.stats


def busy(stop: threading.Event, model: nn.Linear, given: Tensor, made: "queue.Queue[Tensor]") -> None:
    """Loads data, and looks at the model, as threads beside a training do."""
    while not stop.is_set():
        batch = torch.zeros(3, 3).add_(1).mul_(2)
        batch[0].fill_(3)
        if made.empty():
            made.put(batch)
        with torch.no_grad():
            model(given).sum().item()


def test_threads_with_tensors_of_their_own_are_let_be() -> None:
    model, stop, made, given = nn.Linear(3, 3), threading.Event(), queue.Queue[Tensor](), torch.ones(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(x: Tensor) -> Any:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    captured = rote_capture(step, state={"model": model, "optimizer": optimizer}, strict=True)
    thread = threading.Thread(target=busy, args=(stop, model, given, made))
    thread.start()
    try:
        for _ in range(50):
            captured(made.get(timeout=60))
    finally:
        stop.set()
        thread.join()
    assert captured.stats.replays >= 40, captured.stats


def test_every_thread_replays() -> None:
    model = nn.Linear(3, 2)
    step = rote_capture(lambda x: model(x).detach(), state=model)

    def call() -> None:
        x = torch.rand(2, 3)
        assert torch.equal(step(x), model(x))

    for _ in range(CALLS):
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
    assert step.stats.replays >= CALLS - 3 and not step.stats.guard_misses, step.stats


def test_optimizers_that_read_numbers_are_recorded_in_two_threads() -> None:
    """What one thread reads on the host is no read of the step that another one records."""

    def make() -> Any:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return rote_capture(training(model, optimizer), state={"model": model, "optimizer": optimizer})

    def train(step: Any) -> None:
        for _ in range(100):
            step(x)

    x = torch.rand(4, 3)  # numbers that one thread draws, another one would not record
    steps = [make() for _ in range(3)]
    threads = [threading.Thread(target=train, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for step in steps:
        train(step)
        assert step.stats.replays >= 50 and not step.stats.refusals, step.stats
