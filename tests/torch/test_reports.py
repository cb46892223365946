"""Statements in the middle of a turn that only tell numbers: what is told, and its order, is eager's."""

import builtins
import contextlib
import importlib.util
import io
import logging
import sys
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from oracle import Calls, Capture, check_right
from test_loops import Batches, Job, captured, check_turns
from torch import Tensor, nn

LIMIT = 14
NAMES = types.SimpleNamespace(epochs=5, name="net")
logger = logging.getLogger("test_reports")


def as_gpytorch_has_it(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        output = job.model(x)
        loss = F.cross_entropy(output, y)
        loss.backward()
        print(
            "Iter %d/%d - Loss: %.3f   noise: %.3f"  # noqa: UP031
            % (i + 1, LIMIT, loss.item(), job.model[0].weight.detach().exp().mean().item())
        )
        job.optimizer.step()


def under_if(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        if i % 3 == 0:
            print(f"{epoch}/{NAMES.epochs} {NAMES.name:>6} [{i:02d}/{len(loader)}] {loss.item():.6f}", flush=True)
        else:
            print(i, loss.item(), sep="; ", end="!\n")
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def of_sums(job: Job, loader: Batches, epoch: int) -> float:
    total, count = 0.0, 0
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        total += loss.item()
        count += 1  # noqa: SIM113
        print("mean {:.4f} of {n}".format(total / count, n=count))  # noqa: UP032
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
    return total


def of_a_number_that_was_read(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        print("loss", round(value, 3), -value)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def two_in_a_row(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        print("first", loss.item())
        job.optimizer.zero_grad()
        print("second", i)
        loss.backward()
        job.optimizer.step()
        print("third", loss.item())


def by_a_logger(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        logger.info("turn %d: %.5f", i, loss.item())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def in_a_block_of_another_mode(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        with torch.no_grad():
            norm = job.model[0].weight.norm()
            print(norm.item())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


# All of their turns are replayed but for the first ones.
REPLAYED = [as_gpytorch_has_it, under_if, of_sums, of_a_number_that_was_read, two_in_a_row, by_a_logger]


def of_tensors(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        print(loss, loss.detach())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def of_a_list_that_grows(job: Job, loader: Batches, epoch: int) -> None:
    losses: list[float] = []
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        print(losses)
        losses.append(round(loss.item(), 3))
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def of_a_name_that_is_set_again(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        print(i, loss.item())
        i = -1
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        print(i)


def of_what_the_step_sets(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        print(job.steps, job.total, loss.item())
        job.steps += 1
        job.total = job.steps / 2
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def reads_by_a_function_inside(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        shown = sorted([i, 0, -i], key=lambda each: each * i)
        print(i, shown[0], loss.item())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def before_another_that_stays(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        print("loss", loss.item())
        job.optimizer.zero_grad()
        print("data", x.sum(), job.optimizer)
        loss.backward()
        job.optimizer.step()


def tells() -> None:
    print("told")


def before_a_function_that_tells(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        print("loss", loss.item())
        tells()
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def before_a_hook_that_tells(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        output = job.model(x)
        output.register_hook(lambda grad: tells())
        loss = F.cross_entropy(output, y)
        print("loss", loss.item())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def by_a_function_of_ones_own(job: Job, loader: Batches, epoch: int) -> None:
    def print(*what: Any) -> None:
        job.log.append((job.steps, *what))

    for x, y in loader:
        loss = F.cross_entropy(job.model(x), y)
        print("loss", loss.item())
        job.steps += 1
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def by_a_builtin_that_was_replaced(job: Job, loader: Batches, epoch: int) -> None:
    def noting(*what: Any) -> None:
        job.log.append((job.steps, *what))

    with mock.patch.object(builtins, "print", noting):
        for x, y in loader:
            loss = F.cross_entropy(job.model(x), y)
            print("loss", loss.item())
            job.steps += 1
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()


class Own:
    def info(self, *what: Any) -> None:
        print(*what, len(SEEN))


SEEN: list[int] = []


def by_an_object_of_ones_own(job: Job, loader: Batches, epoch: int) -> None:
    own = Own()
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        own.info("loss", loss.item())
        SEEN.append(i)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def may_leave_behind_it(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        print(i, loss.item())
        if i % 5 == 4:
            continue
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def may_raise_behind_it(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        try:
            loss = F.cross_entropy(job.model(x), y)
            print(i, loss.item())
            job.optimizer.zero_grad()
            loss.backward()
            if i % 5 == 4:
                raise ValueError(i)
            job.optimizer.step()
        except ValueError as error:
            print("raised", error)


def of_a_rate(job: Job, loader: Batches, epoch: int) -> None:
    for x, y in loader:
        for group in job.optimizer.param_groups:
            group["lr"] *= 0.99
        loss = F.cross_entropy(job.model(x), y)
        print(loss.item(), job.optimizer.param_groups[0]["lr"])
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def puts_its_output_elsewhere(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        print("to one", loss.item())
        if i == 5:
            sys.stdout = io.StringIO()
        if i == 9:
            sys.stdout = job.told  # type: ignore[attr-defined]
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


OTHERS = [
    puts_its_output_elsewhere,
    in_a_block_of_another_mode,
    of_tensors,
    of_a_list_that_grows,
    of_a_name_that_is_set_again,
    of_what_the_step_sets,
    reads_by_a_function_inside,
    before_another_that_stays,
    before_a_function_that_tells,
    before_a_hook_that_tells,
    by_a_function_of_ones_own,
    by_a_builtin_that_was_replaced,
    by_an_object_of_ones_own,
    may_leave_behind_it,
    may_raise_behind_it,
    of_a_rate,
]


def script_of(body: Callable[..., Any]) -> Any:
    def script(capture: Capture) -> Calls:
        SEEN.clear()
        job, told = Job(), io.StringIO()
        job.told = told  # type: ignore[attr-defined]
        handler = logging.StreamHandler(told)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        run = capture(body)
        for epoch in range(5):
            torch.manual_seed(epoch)
            loader = [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(LIMIT)]
            with contextlib.redirect_stdout(told):
                result = run(job, loader, epoch)
            yield result, [*job.log], job.total, job.steps, told.getvalue().splitlines()
        logger.removeHandler(handler)
        return job.model, job.optimizer

    return script


def raises(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        print("loss", i, loss.item(), len(loader), NAMES.name)
        if epoch == 3 and i == 10:
            raise ValueError(loss.item())
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def raises_in_a_block(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        with torch.no_grad():
            print("norm", loss.item())
        if epoch == 3 and i == 10:
            print("last", loss.item())
            raise ValueError(i)
        job.optimizer.zero_grad()
        loss.backward()
        print("not reached", i)
        job.optimizer.step()


def asserts(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        logger.info("value %s", value)
        print("value", value)
        assert epoch < 3 or i < 10, "the tenth"
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def an_op_raises(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        print("before", i)
        job.optimizer.zero_grad()
        if epoch == 3 and i == 10:
            loss = loss + torch.zeros(3)
        loss.backward()
        job.optimizer.step()


def backward_raises(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        if epoch == 3 and i == 10:
            loss = loss.detach()
        job.total += loss.item()
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def is_interrupted(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        print(f"{i}: {loss.item():.4f}")
        if epoch == 3 and i == 10:
            raise KeyboardInterrupt
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


def raises_with_nothing(job: Job, loader: Batches, epoch: int) -> None:
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(job.model(x), y)
        x = None
        print("loss", loss.item(), x, i)
        if epoch == 3 and i == 10:
            raise ValueError(i)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()


# A turn raises an error behind what it has told, or added; turns before are replayed.
ENDED = [raises_with_nothing, raises, raises_in_a_block, asserts, an_op_raises, backward_raises, is_interrupted]


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", ENDED)
def test_ended_by_an_error(body: Callable[..., Any]) -> None:
    def script(capture: Capture) -> Calls:
        def capture_too(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
            run = capture(fn, **options)

            def caught(*args: Any) -> Any:
                try:
                    return run(*args)
                except (ValueError, RuntimeError, AssertionError, KeyboardInterrupt) as error:
                    return type(error), str(error)

            return caught

        return (yield from script_of(body)(capture_too))

    found = check_turns(script, more_than=25)
    assert found.outputs[3]["output.0.0"] in (ValueError, RuntimeError, AssertionError, KeyboardInterrupt)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_ends_with_a_call() -> None:
    """A bar of progress is closed when the last variable that holds it is gone: as soon as the function returns."""

    class Bar:
        def __init__(self, told: list[str]) -> None:
            self.told = told

        def __del__(self) -> None:
            self.told.append("closed")

    def fit(job: Job, loader: Batches, told: list[str]) -> None:
        bar = Bar(told)
        for x, y in loader:
            loss = F.cross_entropy(job.model(x), y)
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            assert bar.told is told
        told.append("ends")

    def script(capture: Capture) -> Calls:
        job, run = Job(), capture(fit)
        for _ in range(4):
            told: list[str] = []
            run(job, [(torch.randn(6, 8), torch.randint(4, (6,))) for _ in range(LIMIT)], told)
            yield told

    check_right(script, captured)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", REPLAYED)
def test_replayed(body: Callable[..., Any]) -> None:
    check_turns(script_of(body), more_than=35)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", OTHERS)
def test_right(body: Callable[..., Any]) -> None:
    check_right(script_of(body), captured)


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="make test-wild installs it")
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore")
def test_a_writer_of_tensorboard() -> None:
    from torch.utils import tensorboard

    class Noting(tensorboard.SummaryWriter):  # type: ignore[misc]
        def __init__(self) -> None:
            self.told: list[Any] = []

        def add_scalar(self, *what: Any, **more: Any) -> None:
            self.told.append(what)

    Noting.__module__ = tensorboard.SummaryWriter.__module__

    def fit(model: nn.Module, optimizer: Any, writer: Any, loader: list[Tensor]) -> None:
        for i, x in enumerate(loader):
            loss = model(x).square().mean()
            writer.add_scalar("loss", loss.item(), i)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        writer, run = Noting(), capture(fit)
        for _ in range(4):
            run(model, optimizer, writer, [torch.randn(2, 4) for _ in range(LIMIT)])
            yield [*writer.told]
        return model

    check_turns(script, more_than=25)
