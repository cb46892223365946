"""What raises inside a step and is handled there: eager goes on, and so does the call that would have been replayed."""

import asyncio
import collections.abc
import contextlib
import functools
import sys
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right, rote_capture
from torch import Tensor, nn

CALLS = 12
BAD = (5, 6, 9)


def tries(x: Tensor, i: Tensor) -> Tensor:
    try:
        return nn.functional.embedding(i, x)
    except IndexError:
        return x[:1] * 3


@contextlib.contextmanager
def swallowing() -> Iterator[None]:
    with contextlib.suppress(IndexError):
        yield


def swallowing_with(name: str, manager: str) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of this name, in whose code this manager stands."""
    made: dict[str, Any] = {}
    source = (
        f"def {name}(x, i):\n    y = x[:1] * 2\n    with {manager}:\n"
        "        y = nn.functional.embedding(i, x)\n    return y\n"
    )
    exec(compile(source, f"<{name}>", "exec"), globals(), made)
    return made[name]  # type: ignore[no-any-return]


suppresses = swallowing_with("suppresses", "contextlib.suppress(IndexError)")
swallows = swallowing_with("swallows", "swallowing()")


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

        captured = capture(step, state={"words": words, "optimizer": optimizer}, passes=passes, tail=False)
        for call in range(CALLS):
            yield [attempt(lambda: captured(torch.tensor([9 if call in BAD else 1]))), words.grad]  # noqa: B023
        return {"words": words}

    run = check_right(script)
    if not ORACLE_ONLY:
        stats = run.stats[-1][0]
        assert stats.replays >= CALLS - 4 - len(BAD), stats
        assert stats.fallbacks >= len(BAD), stats


@pytest.mark.filterwarnings("ignore::UserWarning")
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

        captured = capture(step, state=words, tail=False)
        for bad in [True] * 5 + [False] * 8 + [True, False]:
            yield captured(torch.tensor([9 if bad else 1]))
        return {"words": words}

    run = check_right(script)
    if not ORACLE_ONLY:
        stats = run.stats[-1][0]
        assert any("and the step handled the error" in refusal for refusal in stats.refusals), stats


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("told", [(), (IndexError,)])
def test_suppress_swallows_what_it_is_told(told: tuple[type[Exception], ...]) -> None:
    """Scripts enter one that is told nothing where others enter autocast."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(2)
        words = nn.Parameter(torch.randn(4, 2))
        seen = torch.zeros(2, 3).t()  # of which no plan makes a copy
        manager: Any = functools.partial(contextlib.suppress, *told) if told else contextlib.suppress

        def step(i: Tensor) -> Tensor:
            seen.add_(1)
            loss = words.sum()
            with manager():
                loss = nn.functional.embedding(i, words).square().sum()
            loss.backward()
            with torch.no_grad():
                words.sub_(words.grad, alpha=0.1)
            words.grad = None
            return loss.detach()

        captured = capture(step, state=[words, seen], tail=False)
        for call in range(CALLS):
            yield attempt(lambda: captured(torch.tensor([9 if call in BAD else 1]))), seen.clone()  # noqa: B023
        return {"words": words}

    run = check_right(script)
    if not ORACLE_ONLY:
        stats = run.stats[-1][0]
        assert bool(stats.refusals) == bool(told) and bool(stats.replays) != bool(told), stats


class Swallowing:
    """A manager of the user's own."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type | None, error: object, trace: object) -> bool:
        return kind is IndexError


class Timed(Swallowing):
    """One that lets errors pass."""

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:  # type: ignore[override]
        self.ended = kind


SWALLOWING = Swallowing()


class Guarding:
    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        try:
            yield
        except IndexError:
            return


def picked() -> contextlib.AbstractContextManager[None]:
    return contextlib.suppress(IndexError)


class Holding:
    def __init__(self) -> None:
        self.managers = {"one": contextlib.suppress(IndexError)}
        self.make = functools.partial(contextlib.suppress, IndexError)

    @property
    def lenient(self) -> contextlib.AbstractContextManager[None]:
        return self.make()


HOLDING = Holding()


WITH = {
    "swallows_with_a_class": "SWALLOWING",
    "swallows_with_a_method": "Guarding().guarded()",
    "swallows_with_what_a_function_returns": "picked()",
    "swallows_with_an_entry": "HOLDING.managers['one']",
    "swallows_with_a_property": "HOLDING.lenient",
}


def swallows_in_a_stack(x: Tensor, i: Tensor) -> Tensor:
    y = x[:1] * 2
    with contextlib.ExitStack() as stack:
        stack.enter_context(picked())
        y = nn.functional.embedding(i, x)
    return y


def swallows_by_what_is_pushed(x: Tensor, i: Tensor) -> Tensor:
    y = x[:1] * 2
    with contextlib.ExitStack() as stack:
        stack.push(lambda kind, *_: kind is IndexError)
        y = nn.functional.embedding(i, x)
    return y


STACK = contextlib.ExitStack()
STACK.enter_context(contextlib.suppress(IndexError))


def swallows_by_a_stack_of_before(x: Tensor, i: Tensor) -> Tensor:
    y = x[:1] * 2
    with STACK.pop_all() as stack:
        STACK.enter_context(picked())
        y = nn.functional.embedding(i, x)
    assert stack is not STACK
    return y


def swallows_with_a_class_of_its_own(x: Tensor, i: Tensor) -> Tensor:
    class Local:
        def __enter__(self) -> None: ...
        def __exit__(self, kind: type | None, error: object, trace: object) -> bool:
            return kind is IndexError

    y = x[:1] * 2
    with Local():
        y = nn.functional.embedding(i, x)
    return y


def swallows_with_a_generator_of_its_own(x: Tensor, i: Tensor) -> Tensor:
    @contextlib.contextmanager
    def local() -> Iterator[None]:
        with contextlib.suppress(IndexError):
            yield

    y = x[:1] * 2
    with local():
        y = nn.functional.embedding(i, x)
    return y


def swallows_with_a_class_made_by_a_call(x: Tensor, i: Tensor) -> Tensor:
    made = type("Made", (), {"__enter__": lambda self: self, "__exit__": lambda self, kind, *_: kind is IndexError})
    y = x[:1] * 2
    with made():
        y = nn.functional.embedding(i, x)
    return y


def swallows_by(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """With an `__exit__` that is no plain function, or whose last `return` is not its only one."""

    def is_index(_: object, kind: type | None, *rest: object) -> bool | None:
        return kind is IndexError or None

    class Called:
        def __call__(self, kind: type | None, *rest: object) -> bool:
            return kind is IndexError

    leaving = {
        "method": is_index,
        "partial": functools.partialmethod(is_index),
        "static": staticmethod(lambda kind, *rest: kind is IndexError),
        "builtin": staticmethod(slice),
        "callable": Called(),
        "property": property(lambda self: functools.partial(is_index, self)),
    }
    manager = type(kind, (), {"__enter__": lambda self: self, "__exit__": leaving[kind]})

    def body(x: Tensor, i: Tensor) -> Tensor:
        y = x[:1] * 2
        with manager():
            y = nn.functional.embedding(i, x)
        return y

    body.__name__ = f"swallows_by_a_{kind}"
    return body


class Dropped:
    """Python prints what `__del__` raises, and goes on."""

    def __init__(self, x: Tensor, i: Tensor, found: list[Tensor]) -> None:
        self.x, self.i, self.found = x, i, found

    def __del__(self) -> None:
        self.found.append(nn.functional.embedding(self.i, self.x))


def drops(x: Tensor, i: Tensor) -> Tensor:
    found: list[Tensor] = []
    Dropped(x, i, found)
    return found[0] if found else x[:1] * 2


class Rows:
    """Iterated by index: an IndexError ends the loop."""

    def __init__(self, x: Tensor, i: Tensor) -> None:
        self.x, self.i = x, i

    def __getitem__(self, k: int) -> Tensor:
        if k == len(self.i):
            raise IndexError
        return nn.functional.embedding(self.i[k : k + 1], self.x)


def iterates_by_index(x: Tensor, i: Tensor) -> Tensor:
    return torch.cat([x[:1], *Rows(x, i)])  # type: ignore[misc]


def iterates_by(kind: str) -> Callable[[Tensor, Tensor], Tensor]:
    """The same, by a method that is not called so where it is written."""

    def row(rows: Rows, k: int) -> Tensor:
        if k == len(rows.i):
            raise IndexError
        return nn.functional.embedding(rows.i[k : k + 1], rows.x)

    way = row if kind == "function" else functools.partialmethod(row)
    found = type(kind, (), {"__init__": Rows.__init__, "__getitem__": way})

    def body(x: Tensor, i: Tensor) -> Tensor:
        return torch.cat([x[:1], *found(x, i)])

    body.__name__ = f"iterates_by_a_{kind}"
    return body


class Sequence(Rows, collections.abc.Sequence[Tensor]):  # type: ignore[misc]
    def __len__(self) -> int:
        return len(self.i)


def iterates_as_a_sequence(x: Tensor, i: Tensor) -> Tensor:
    return torch.cat([x[:1], *Sequence(x, i)])


def gathers(x: Tensor, i: Tensor) -> Tensor:
    """`asyncio` returns what coroutines raise."""

    async def look_up() -> Tensor:
        return nn.functional.embedding(i, x)

    async def all_of_them() -> Any:
        return await asyncio.gather(look_up(), return_exceptions=True)

    found = asyncio.new_event_loop().run_until_complete(all_of_them())[0]
    return found if isinstance(found, Tensor) else x[:1] * 3


@swallowing()
def decorated(x: Tensor, i: Tensor, found: list[Tensor]) -> None:
    found.append(nn.functional.embedding(i, x))


def calls_what_is_decorated(x: Tensor, i: Tensor) -> Tensor:
    found: list[Tensor] = []
    decorated(x, i, found)
    return found[0] if found else x[:1] * 2


def expects(x: Tensor, i: Tensor) -> Tensor:
    y = x[:1] * 2
    try:
        with unittest.TestCase().assertRaises(IndexError):
            y = nn.functional.embedding(i, x)
    except AssertionError:
        pass
    return y


def returns_at_last(x: Tensor, i: Tensor) -> Tensor:
    y = x[:1] * 2
    try:
        y = nn.functional.embedding(i, x)
    finally:
        return y  # noqa: B012


def in_a_loop(x: Tensor, i: Tensor) -> Tensor:
    found = []
    for each in i:
        try:
            found.append(x[each.view(1)])
        except IndexError as error:
            print(error)
    return torch.cat(found) if found else x[:1]


def is_raised_again(x: Tensor, i: Tensor) -> Tensor:
    try:
        return nn.functional.embedding(i, x)
    except IndexError:
        x.grad = None
        raise


class BadBatchError(Exception):
    pass


class Translating(Timed):
    """One that raises an error of its own in the place of another."""

    def __exit__(self, kind: type | None, error: object, trace: object) -> None:  # type: ignore[override]
        if kind is IndexError:
            raise BadBatchError


@contextlib.contextmanager
def translating() -> Iterator[None]:
    done = False
    try:
        yield
        done = True
    finally:
        if not done:
            raise BadBatchError


def is_another_at_last(x: Tensor, i: Tensor) -> Tensor:
    y = None
    try:
        y = nn.functional.embedding(i, x)
    finally:
        if y is None:
            raise BadBatchError
    return y


def is_another_behind_a_manager(x: Tensor, i: Tensor) -> Tensor:
    with Translating():
        return nn.functional.embedding(i, x)


def is_another_behind_a_generator(x: Tensor, i: Tensor) -> Tensor:
    with translating():
        return nn.functional.embedding(i, x)


def times(x: Tensor, i: Tensor) -> Tensor:
    """Nothing is handled here."""
    with Timed(), torch.enable_grad(), torch.profiler.record_function("look up"):
        try:
            return nn.functional.embedding(i, x)
        finally:
            i = i + 1


@contextlib.contextmanager
def looking_up(x: Tensor, i: Tensor, found: list[Tensor], before: bool) -> Iterator[None]:
    if before:
        found.append(nn.functional.embedding(i, x))
    yield
    if not before:
        found.append(nn.functional.embedding(i, x))


def enters(x: Tensor, i: Tensor) -> Tensor:
    """Nothing is handled here: the op runs before the `yield` of a manager."""
    found: list[Tensor] = []
    with looking_up(x, i, found, True):
        return found[0] * 2


def leaves(x: Tensor, i: Tensor) -> Tensor:
    """Nor here, behind the `yield`."""
    found: list[Tensor] = []
    with looking_up(x, i, found, False):
        x = x * 2
    return found[0]


@contextlib.contextmanager
def trying_at_last(x: Tensor, i: Tensor, found: list[Tensor]) -> Iterator[None]:
    yield
    try:
        found.append(nn.functional.embedding(i, x))
    except IndexError:
        found.append(x[:1] * 2)


def tries_behind_a_yield(x: Tensor, i: Tensor) -> Tensor:
    found: list[Tensor] = []
    with trying_at_last(x, i, found):
        x = x * 2
    return found[0]


def tries_around_a_manager(x: Tensor, i: Tensor) -> Tensor:
    try:
        return leaves(x, i)
    except IndexError:
        return x[:1] * 2


def stacks(x: Tensor, i: Tensor) -> Tensor:
    """No manager in it swallows anything."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.callback(len, "called at the end")
        return nn.functional.embedding(i, x)


HANDLING = [
    *BODIES,
    tries_behind_a_yield,
    tries_around_a_manager,
    *map(swallowing_with, WITH, WITH.values()),
    swallows_in_a_stack,
    swallows_by_what_is_pushed,
    swallows_by_a_stack_of_before,
    swallows_with_a_class_of_its_own,
    swallows_with_a_generator_of_its_own,
    swallows_with_a_class_made_by_a_call,
    *map(swallows_by, ["method", "partial", "static", "builtin", "callable", "property"]),
    drops,
    iterates_by_index,
    *map(iterates_by, ["function", "partial"]),
    iterates_as_a_sequence,
    gathers,
    calls_what_is_decorated,
    expects,
    returns_at_last,
    in_a_loop,
    is_raised_again,
    is_another_at_last,
    is_another_behind_a_manager,
    is_another_behind_a_generator,
]
WRITES = ["buffer", "turned buffer", "custom_op", "argument"]


@torch.library.custom_op("rote_handled::note", mutates_args=())
def note(x: Tensor) -> Tensor:
    return x.clone()


@note.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("before", WRITES)
@pytest.mark.parametrize("body", [*HANDLING, times, enters, leaves, stacks])
def test_handled_after_a_write(body: Callable[[Tensor, Tensor], Tensor], before: str) -> None:
    """A replay that has written something can't go on in a handler: the write is put off, or the step stays eager."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(2)
        words, seen = nn.Parameter(torch.randn(4, 2)), torch.zeros(1)
        if before == "turned buffer":
            seen = torch.zeros(2, 3).t()

        def step(i: Tensor, given: Tensor) -> Tensor:
            if "buffer" in before:
                seen.add_(1)
            elif before == "argument":
                given.mul_(2)
            x = words * note(given) if before == "custom_op" else words * given
            loss = body(x, i).square().sum()
            words.grad = None
            loss.backward()
            with torch.no_grad():
                words.sub_(words.grad, alpha=0.1)
            return loss.detach()

        captured = capture(step, state={"words": words, "seen": seen}, tail=False)
        for call in range(CALLS):
            i, given = torch.tensor([9 if call in BAD else 1]), torch.ones(1)
            yield [attempt(lambda: captured(i, given)), words.grad, given, seen]  # noqa: B023
        return {"words": words, "seen": seen}

    run = check_right(script)
    if ORACLE_ONLY:
        return
    stats = run.stats[-1][0]
    if body in (times, enters, leaves, stacks):
        assert stats.replays >= CALLS - 4 - len(BAD), stats
    elif before in ("buffer", "argument"):
        assert stats.replays or "that carries a graph" in str(stats.refusals), stats
    else:
        assert any("and the step may handle the error at" in refusal for refusal in stats.refusals), stats


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_handlers_of_packages_beside_torch_count() -> None:
    """Their files lie where torch's do, and their names begin alike."""
    source = (
        "def look_up(x, i):\n    try:\n        return embedding(i, x)\n    except IndexError:\n        return x[:1]\n"
    )
    names: dict[str, Any] = {"__name__": "torch_words", "embedding": nn.functional.embedding}
    exec(compile(source, f"{torch.__path__[0]}_words/looks.py", "exec"), names)

    def script(capture: Capture) -> Calls:
        words, seen = torch.arange(8.0).view(4, 2), torch.zeros(2, 3).t()  # of which no plan makes a copy

        def step(i: Tensor) -> Tensor:
            seen.add_(1)
            found: Tensor = names["look_up"](words, i)
            return found + seen

        captured = capture(step, state=[words, seen], tail=False)
        for call in range(CALLS):
            yield attempt(lambda: captured(torch.tensor([9 if call in BAD else 1])))  # noqa: B023
        return {"seen": seen}

    run = check_right(script)
    assert ORACLE_ONLY or "and the step may handle the error at" in str(run.stats[-1][0].refusals)


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


def fails_behind_it(x: Tensor, i: Tensor) -> Tensor:
    try:
        return nn.functional.embedding(i, x)
    finally:
        {None: 0}[sys.exc_info()[0]]


def is_a_callback(x: Tensor, i: Tensor) -> Tensor:
    done: torch.futures.Future[Tensor] = torch.futures.Future()
    looked = done.then(lambda _: nn.functional.embedding(i, x))
    done.set_result(x)
    return looked.wait()


@torch.jit.script
def embed(x: Tensor, i: Tensor) -> Tensor:
    return torch.embedding(x, i)


@pytest.mark.parametrize(
    "body, eager", [(fails_behind_it, KeyError), (is_a_callback, RuntimeError), (embed, RuntimeError)]
)
def test_limits_are_as_documented(body: Callable[[Tensor, Tensor], Tensor], eager: type[Exception]) -> None:
    """A replay that fails after it has written raises the op's error: what is around the op does not run."""
    if ORACLE_ONLY:
        return
    words, seen = torch.arange(8.0).view(4, 2), torch.zeros(1)

    def step(i: Tensor) -> Tensor:
        seen.add_(1)
        return body(words, i)

    captured = rote_capture(step, state=[words, seen])
    for _ in range(5):
        captured(torch.tensor([1]))
    with pytest.raises(eager):
        step(torch.tensor([9]))
    with pytest.raises(IndexError):
        captured(torch.tensor([9]))
    assert captured.stats.replays >= 3 and seen.item() == 7, (captured.stats, seen)
