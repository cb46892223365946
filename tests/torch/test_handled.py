"""What raises inside a step and is handled there: eager goes on, and so does the call that would have been replayed."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn

CALLS = 12
BAD = (5, 6, 9)


def tries(x: Tensor, i: Tensor) -> Tensor:
    try:
        return nn.functional.embedding(i, x)
    except IndexError:
        return x[:1] * 3


def suppresses(x: Tensor, i: Tensor) -> Tensor:
    y = x[:1] * 2
    with contextlib.suppress(IndexError):
        y = nn.functional.embedding(i, x)
    return y


@contextlib.contextmanager
def swallowing() -> Iterator[None]:
    with contextlib.suppress(IndexError):
        yield


def swallows(x: Tensor, i: Tensor) -> Tensor:
    y = x[:1] * 2
    with swallowing():
        y = nn.functional.embedding(i, x)
    return y


def raises_another(x: Tensor, i: Tensor) -> Tensor:
    try:
        return nn.functional.embedding(i, x)
    except IndexError as error:
        raise ValueError("no such word") from error


def draws_before(x: Tensor, i: Tensor) -> Tensor:
    y = nn.functional.dropout(x, 0.5)
    try:
        return nn.functional.embedding(i, y)
    except IndexError:
        return torch.rand_like(x[:1]) * y[:1]


def puts_states_back(x: Tensor, i: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = nn.functional.dropout(x, 0.5)
    torch.set_rng_state(state)
    try:
        return nn.functional.embedding(i, y)
    except IndexError:
        return torch.rand_like(x[:1]) * nn.functional.dropout(y[:1])


def factors(x: Tensor, i: Tensor) -> Tensor:
    """As Gaussian processes do: more on the diagonal, until there is a factor."""
    a = torch.diag_embed(torch.stack([5.0 - i.float()[0], x[0, 0].square() + 1]))
    for jitter in (0.0, 1.0, 10.0, 100.0):
        try:
            return torch.linalg.cholesky(a + jitter * torch.eye(2))
        except torch.linalg.LinAlgError:
            continue
    raise AssertionError("no factor")


BODIES: list[Callable[[Tensor, Tensor], Tensor]] = [
    tries,
    suppresses,
    swallows,
    raises_another,
    draws_before,
    puts_states_back,
    factors,
]


def attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__} from {type(error.__cause__).__name__}"


@pytest.mark.parametrize("passes", ["none", "default", "all"])
@pytest.mark.parametrize("body", BODIES)
def test_handled_inside_the_step(body: Callable[[Tensor, Tensor], Tensor], passes: str) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(2)
        words = nn.Parameter(torch.randn(4, 2))
        optimizer = torch.optim.SGD([words], lr=0.1)

        def step(i: Tensor) -> Tensor:
            loss = body(words, i).square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state={"words": words, "optimizer": optimizer}, passes=passes)
        for call in range(CALLS):
            yield [attempt(lambda: captured(torch.tensor([9 if call in BAD else 1]))), words.grad]  # noqa: B023
        return {"words": words}

    run = check_right(script)
    if not ORACLE_ONLY:
        stats = run.stats[-1][0]
        assert stats.replays >= CALLS - 4 - len(BAD), stats
        assert stats.fallbacks >= len(BAD), stats


@pytest.mark.parametrize("body", [tries, suppresses, swallows, draws_before, factors])
def test_ways_that_handlers_took_are_not_recorded(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replays of what followed an error would follow it without one."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(2)
        words = nn.Parameter(torch.randn(4, 2))

        def step(i: Tensor) -> Tensor:
            loss = body(words, i).square().sum()
            loss.backward()
            with torch.no_grad():
                words.sub_(words.grad, alpha=0.1)
            words.grad = None
            return loss.detach()

        captured = capture(step, state=words)
        for bad in [True] * 5 + [False] * 8 + [True, False]:
            yield captured(torch.tensor([9 if bad else 1]))
        return {"words": words}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        run = check_right(script)
    if not ORACLE_ONLY:
        stats = run.stats[-1][0]
        assert any("and the step handled the error" in refusal for refusal in stats.refusals), stats


def test_gradients_of_the_step_before_stay() -> None:
    """The loss fails before the gradients are dropped."""

    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, labels: Tensor) -> Tensor:
            loss = nn.functional.cross_entropy(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state={"model": model, "optimizer": optimizer})
        for call in range(CALLS):
            labels = torch.tensor([0, 7 if call in BAD else 2])
            yield [attempt(lambda: captured(torch.randn(2, 4), labels)), [p.grad for p in model.parameters()]]  # noqa: B023
        return {"model": model}

    run = check_right(script)
    assert ORACLE_ONLY or run.stats[-1][0].replays >= CALLS - 4 - len(BAD), run.stats[-1][0]
