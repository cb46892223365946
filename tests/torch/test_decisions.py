"""What a step decides by whole numbers that count: an argument, or an attribute to which it adds."""

import builtins
import contextlib
import dataclasses
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from extent import EVERYTHING
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_right
from torch import Tensor, nn

CALLS = 48
EVERY = 3
PERIODS, STACK = (1, 2, 3), [1, 2, 3]
PLAIN = types.SimpleNamespace(last=31)
LOADER = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(23, 1)), batch_size=2)
count = 0


class Trainer:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.every, self.warm, self.steps, self.settings = 4, 9, 0, Settings()
        self.seen: list[int] = []

    def backward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        loss = self.model(x).square().mean() * scale
        loss.backward()
        return loss.detach()

    def update(self) -> None:
        self.opt.step()
        self.opt.zero_grad()


class Fillable:
    def put(self, name: str, value: int) -> None:
        setattr(self, name, value)

    def fill(self, values: dict[str, int]) -> None:
        self.__dict__.update(values)


class Settings(Fillable):
    every = 5

    def __init__(self) -> None:
        self.warm = 7


@dataclasses.dataclass
class Answer:
    """As models return them: it sets its own attributes by names that it does not write."""

    loss: Any = None
    other: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if (value := getattr(self, field.name)) is not None:
                setattr(self, field.name, value)
        self.__dict__.update(other=1)


class Remote:
    def __init__(self, target: Any) -> None:
        self.target = target

    def put(self, name: str, value: int) -> None:
        setattr(self.target, name, value)


def accumulates(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    if (i + 1) % self.every == 0:
        self.update()
    return loss


def by_truth(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    if not i % EVERY:
        self.update()
    return loss


def with_a_stack(self: Trainer, x: Tensor, i: int) -> Any:
    loss = torch.stack([self.backward(x), x.sum()]).sum()
    if i % self.every == 0:
        self.update()
    return loss


def with_an_answer(self: Trainer, x: Tensor, i: int) -> Any:
    answer = Answer(self.backward(x))
    if i % self.settings.every == 0 or i == PLAIN.last:
        self.update()
    return answer.loss


def sets_by_name(self: Trainer, x: Tensor, i: int) -> Any:
    self.settings.put("ev" + "ery", 3 + i // 20)
    loss = self.backward(x)
    if i % self.settings.every == 0:
        self.update()
    return loss


def sets_by_dict(self: Trainer, x: Tensor, i: int) -> Any:
    self.settings.fill({"ev" + "ery": 3 + i // 20})
    loss = self.backward(x)
    if i % self.settings.every == 0:
        self.update()
    return loss


def sets_from_afar(self: Trainer, x: Tensor, i: int) -> Any:
    Remote(self.settings).put("ev" + "ery", 3 + i // 20)
    loss = self.backward(x)
    if i % self.settings.every == 0:
        self.update()
    return loss


def by_length(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    if (i + 1) % len(PERIODS) == 0 or i % 24 == len(LOADER) - 1:
        self.update()
    return loss


def one_of_two(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x if i % 3 else x.neg())
    update = self.update if (i + 1) % 4 == 0 else self.opt.zero_grad
    update()
    return loss


def by_length_in_between(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    STACK.append(1)
    if i % len(STACK) == 0:
        self.update()
    STACK.pop()
    return loss


def by_a_setting_in_between(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    self.settings.fill({"ev" + "ery": 3})
    if i % self.settings.every == 0:
        self.update()
    self.settings.fill({"ev" + "ery": 5})
    return loss


def by_length_that_grows(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    if i % (len(self.seen) + 1) == 0:
        self.update()
        self.seen.append(i // 9)
    return loss


def unused(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    self.update()
    return loss


def by_keyword(self: Trainer, x: Tensor, *, i: int = 0) -> Any:
    loss = self.backward(x)
    if (i > 20 and i % 2 == 1) or i in (3, 4):
        self.update()
    return loss


def warms_up(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x, 0.5 if i < self.settings.warm else 1.0)
    if i % self.settings.every == 2:
        self.update()
    elif i % self.settings.every == 4:
        return loss * 2
    return loss


def prints_now_and_then(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    self.update()
    if i % 16 == 0:
        print(f"step {i}: {loss.item()}")
    return loss


def beside_another_question(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    if i % 2 == 0 and loss > 1e6:
        self.model[0].weight.data.mul_(0.5)
    if x.shape[0] == 3 and i % 3 == 1:
        self.update()
    return loss


def in_a_loop(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    for part in x:
        if i % 4 == 3:
            loss = loss + part.sum()
    with torch.no_grad():
        if i % 8 == 5:
            loss = loss * 2
    self.update()
    return loss


def counts(self: Trainer, x: Tensor) -> Any:
    self.steps += 1
    loss = self.backward(x)
    if self.steps % self.every == 0:
        self.update()
    return loss


def counts_behind(self: Trainer, x: Tensor) -> Any:
    loss = self.backward(x)
    if self.steps % self.every == 0 or self.steps < self.warm:
        self.update()
    self.steps = self.steps + 1
    return loss


def counts_twice(self: Trainer, x: Tensor) -> Any:
    self.steps += 1
    if self.steps % 3 == 0:
        self.steps += 2
        x = x * 2
    loss = self.backward(x)
    self.update()
    if self.steps % 4 < 2:
        return loss * 3
    return loss


def counts_and_takes(self: Trainer, x: Tensor, i: int) -> Any:
    self.steps += 1
    loss = self.backward(x)
    if (i + self.steps) % 4 == 0:
        self.update()
    return loss


@torch.enable_grad()
def decorated(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    if i % self.every == 1:
        self.update()
    return loss


def passed_on(self: Trainer, x: Tensor, i: int) -> Any:
    self.update()
    return self.backward(x) * (2 if is_odd(i) else 1)


def is_odd(i: int) -> bool:
    return i % 2 == 1


class Base(Trainer):
    def fit(self, x: Tensor, step: int, name: str = "train") -> Any:
        loss = self.backward(x)
        if step % self.every == 0:
            self.update()
        return loss

    def scale(self, *, number: int) -> float:
        return 2.0 if number < self.settings.warm else 1.0

    def also(self, i: int) -> float:
        return 3.0 if i % self.every == 0 else 1.0


class Derived(Base):
    def fit(self, x: Tensor, step: int, name: str = "train") -> Any:
        loss = super().fit(x, step, name=name)
        return loss if step % 3 else loss * 2

    @torch.no_grad()
    def doubled(self, y: Tensor, number: int) -> Tensor:
        return y * 2 if number > 5 else y


def passed_to_methods(self: Any, x: Tensor, i: int) -> Any:
    loss = self.fit(x, i, name="test") * self.scale(number=i + 2)
    return self.doubled(loss, i // 4)


def shared_step(self: Trainer, x: Tensor, i: int, train: bool = True, *, warm: int = 5, every: int = 4) -> Tensor:
    loss = self.backward(x, 0.5 if i < warm else 1.0)
    if train and i % every == 0:
        self.update()
    return loss


def with_other_arguments(self: Any, x: Tensor, i: int) -> Any:
    return shared_step(self, x, i, warm=self.warm)


def with_a_default(self: Any, x: Tensor, i: int, period: int = 3) -> Any:
    loss = self.backward(x)
    if (i + 1) % period == 0:
        self.update()
    return loss


def by_a_variable(self: Any, x: Tensor, i: int) -> Any:
    number = i + 1
    is_last = number % self.every == 0
    loss = self.backward(x)
    if is_last:
        self.update()
    return loss * (2 if number in (3, 4, 5) else 1)


def another(_: Callable[[int], int]) -> Callable[..., Any]:
    return lambda function: function


@another(lambda i: i + 1)
def beside_a_name_in_a_decorator(self: Any, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    if i % 4 == 0:
        self.update()
    return loss


FOLLOWED: dict[Callable[..., Any], int] = {  # and how many of the calls are replayed, at least
    accumulates: 30,
    by_truth: 30,
    unused: 40,
    with_a_stack: 30,
    by_length: 30,
    one_of_two: 26,
    by_keyword: 26,
    warms_up: 20,
    prints_now_and_then: 36,
    beside_another_question: 16,
    in_a_loop: 26,
    counts: 30,
    counts_behind: 26,
    counts_twice: 16,
    counts_and_takes: 28,
    decorated: 30,
    passed_on: 36,
    passed_to_methods: 8,
    with_other_arguments: 26,
    with_a_default: 30,
    by_a_variable: 26,
    beside_a_name_in_a_decorator: 30,
}


def multiplies(self: Trainer, x: Tensor, i: int) -> Any:
    self.update()
    return self.backward(x * i)


def of_another_name(self: Trainer, x: Tensor, i: int) -> Any:
    j = i + 1
    if x.sum() > 0:
        j = i
    self.update()
    return self.backward(x) * (2 if j % 2 else 1)


def asks_a_builtin(self: Trainer, x: Tensor) -> Any:
    self.steps += 1
    self.update()
    return self.backward(x) * (2 if max(self.steps, 30) > 30 else 1)


def names_it_anew(self: Trainer, x: Tensor, i: int) -> Any:
    i = i // 2
    self.update()
    return self.backward(x) * (2 if i % 2 else 1)


def in_a_function(self: Trainer, x: Tensor, i: int) -> Any:
    self.update()
    return (lambda y: y * (1 + i % 2))(self.backward(x))


def in_a_comprehension(self: Trainer, x: Tensor, i: int) -> Any:
    self.update()
    return [each * (2 if i % 2 else 1) for each in self.backward(x).view(1)]


def passed_to_what_counts(self: Any, x: Tensor, i: int) -> Any:
    self.update()
    return self.backward(x) * adding(self, i)


def adding(self: Trainer, number: int) -> int:
    self.steps += number % 2
    return 1 + self.steps % 3


def passed_to_what_asks_by_what_it_sets(self: Any, x: Tensor, i: int) -> Any:
    self.every = 2
    self.update()
    result = self.backward(x) * (2 if asks_every(self, i) else self.also(i))
    self.every = 4
    return result


def asks_every(self: Trainer, i: int) -> bool:
    return i % 5 == 0


def passed_to_what_it_replaces(self: Any, x: Tensor, i: int) -> Any:
    self.asks = is_odd if i % 3 else is_third
    self.update()
    return self.backward(x) * (2 if self.asks(i) else 1)


def is_third(i: int) -> bool:
    return i % 3 == 1


def passed_to_a_closure(self: Any, x: Tensor, i: int) -> Any:
    def asks(number: int) -> bool:
        return number % 4 == 1

    self.update()
    return self.backward(x) * (2 if asks(i) else 1)


def passed_with_others(self: Any, x: Tensor, i: int) -> Any:
    self.update()
    both = (i, 2)
    return self.backward(x) * (2 if divides_evenly(*both) else 1)


def divides_evenly(one: int, other: int) -> bool:
    return one % other == 0


def passed_on_and_back(self: Any, x: Tensor, i: int) -> Any:
    self.update()
    return self.backward(x) * down(i)


def down(i: int) -> int:
    return 1 + i % 3 if i < 4 else down(i - 4)


def sees_all(self: Trainer, x: Tensor, i: int) -> Any:
    self.update()
    return self.backward(x) * (1 + locals()["i"] % 2)


def sets_what_it_asks_by(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    self.every = 2 if self.every == 3 else 3
    if i % self.every == 0:
        self.update()
    return loss


def adapts(self: Trainer) -> None:
    self.every = 3


def lets_set_what_it_asks_by(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    self.every = 4
    adapts(self)
    if i % self.every == 0:
        self.update()
    self.every = 4
    return loss


def sets_by_text(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    setattr(self, "ev" + "ery", 2)
    if i % self.every == 0:
        self.update()
    setattr(self, "ev" + "ery", 4)
    return loss


def counted_in_a_try(self: Trainer, x: Tensor) -> Any:
    loss = self.backward(x)
    with contextlib.suppress(ZeroDivisionError):
        self.steps += 1
    try:
        self.steps += 1
    finally:
        self.update()
    return loss * (1 + self.steps % 3)


def counted_elsewhere(self: Trainer, x: Tensor) -> Any:
    loss = self.backward(x)
    counts_one(self)
    if self.steps % 2:
        self.update()
    return loss


def counts_one(self: Trainer) -> None:
    self.steps += 1


def counted_sometimes(self: Trainer, x: Tensor) -> Any:
    loss = self.backward(x)
    if x.sum() > 0:
        self.steps += 1
    if self.steps % 2:
        self.update()
    return loss


def started_again(self: Trainer, x: Tensor) -> Any:
    self.steps += 1
    loss = self.backward(x)
    if self.steps == 5:
        self.update()
        self.steps = 0
    return loss


def returns_it(self: Trainer, x: Tensor) -> Any:
    self.steps += 1
    loss = self.backward(x)
    self.update()
    return loss, self.steps, self.steps % 3


def divides(self: Trainer, x: Tensor, i: int) -> Any:
    loss = self.backward(x)
    with contextlib.suppress(ZeroDivisionError):
        if 12 % (i - 6) == 0:
            loss = loss * 2
    self.update()
    return loss


def of_a_global(self: Trainer, x: Tensor) -> Any:
    global count
    count += 1
    loss = self.backward(x)
    if count % 4 == 0:
        self.update()
    return loss


RIGHT = [
    with_an_answer,
    by_length_that_grows,
    by_length_in_between,
    by_a_setting_in_between,
    sets_by_name,
    sets_by_dict,
    sets_from_afar,
    multiplies,
    of_another_name,
    asks_a_builtin,
    names_it_anew,
    in_a_function,
    in_a_comprehension,
    passed_to_what_counts,
    passed_to_what_asks_by_what_it_sets,
    passed_to_what_it_replaces,
    passed_to_a_closure,
    passed_with_others,
    passed_on_and_back,
    sees_all,
    sets_what_it_asks_by,
    lets_set_what_it_asks_by,
    sets_by_text,
    counted_in_a_try,
    counted_elsewhere,
    counted_sometimes,
    started_again,
    returns_it,
    divides,
    of_a_global,
]


def nothing(trainer: Trainer, call: int) -> None:
    pass


def other_period(trainer: Trainer, call: int) -> None:
    trainer.every = 4 if call % 20 < 10 else 3


def starts_again(trainer: Trainer, call: int) -> None:
    if call % 11 == 10:
        trainer.steps = 0


def a_float(trainer: Trainer, call: int) -> None:
    trainer.steps = float(trainer.steps) if call == 17 else int(trainer.steps)  # type: ignore[assignment]


def other_setting(trainer: Trainer, call: int) -> None:
    Settings.every = 5 if call < 24 else 3
    trainer.settings.warm = 7 if call < 30 else 100


def other_settings(trainer: Trainer, call: int) -> None:
    if call == 21:
        trainer.settings = Settings()
        trainer.settings.warm = 33


BETWEEN = [nothing, other_period, starts_again, a_float, other_setting, other_settings]


def arguments(body: Any, call: int, number: Callable[[int], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    x = torch.randn(3, 4)
    code = getattr(body, "__wrapped__", body).__code__
    if code.co_kwonlyargcount:
        return (x,), {"i": number(call)}
    return ((x, number(call)) if code.co_argcount > 2 else (x,)), {}


def script_of(
    body: Any,
    between: Any = nothing,
    number: Callable[[int], Any] = lambda i: i,
    decorated: bool = False,
    **options: Any,
) -> Script:
    """``decorated``: the method is captured in its class."""

    def script(capture: Capture) -> Calls:
        global count
        count, Settings.every = 0, 5
        trainer = Derived()
        if decorated:
            step = types.MethodType(capture(body, **options), trainer)
        else:
            step = capture(types.MethodType(body, trainer), **options)
        for call in range(CALLS):
            between(trainer, call)
            args, kwargs = arguments(body, call, number)
            yield step(*args, **kwargs), trainer.steps, trainer.every
        return trainer.model, trainer.opt

    return script


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", FOLLOWED)
@pytest.mark.parametrize("decorated", [False, True], ids=["", "decorated"])
def test_replayed(body: Callable[..., Any], decorated: bool) -> None:
    check_right(script_of(body, decorated=decorated), replays=FOLLOWED[body] - 2 * decorated)


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("between", BETWEEN[1:])
@pytest.mark.parametrize("body", [*FOLLOWED, *RIGHT])
def test_right(body: Callable[..., Any], between: Any) -> None:
    check_right(script_of(body, between))


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", RIGHT)
def test_used_otherwise(body: Callable[..., Any]) -> None:
    check_right(script_of(body))


def is_even(i: int) -> bool:
    return i % 2 == 0


def minus(i: int) -> int:
    return -i


def huge(i: int) -> int:
    return 10**30 + i


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("number", [float, is_even, torch.tensor, minus, huge])
@pytest.mark.parametrize("body", [accumulates, unused, warms_up, by_keyword])
def test_of_other_kinds(body: Callable[..., Any], number: Callable[[int], Any]) -> None:
    """An argument may be something else in another call, and in all calls."""
    check_right(script_of(body, number=number))
    check_right(script_of(body, number=lambda i: number(i) if i % 7 == 6 else i))


@pytest.mark.sampled(2)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("options", [{"verify": 5}, {"verify_every": 3}, {"passes": "all"}, {"agree": True}])
@pytest.mark.parametrize("body", [accumulates, counts, counts_and_takes])
def test_settings(body: Callable[..., Any], options: dict[str, Any]) -> None:
    check_right(script_of(body, **options), replays=16)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", [accumulates, counts])
def test_stored_plans(body: Callable[..., Any], tmp_path: Path) -> None:
    for _ in range(2):
        check_right(script_of(body, plans=str(tmp_path), trust_plans=True), replays=30)


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", [accumulates, counts])
def test_of_ranks(body: Callable[..., Any]) -> None:
    """Each rank decides by itself."""
    rank = torch.distributed.get_rank()
    check_right(script_of(body, number=lambda i: i + rank), replays=24)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("own", [False, True])
def test_lists_that_are_measured(own: bool) -> None:
    """What is in a list counts for nothing, but where `len` is a function of the script's."""

    def script(capture: Capture) -> Calls:
        batches: list[Any] = [torch.ones(4), 2.0]
        len = (lambda items: items[1]) if own else builtins.len

        def of_pythons(x: Tensor) -> Tensor:
            return x * builtins.len(batches)

        def by_its_name(x: Tensor, call: int = 0) -> Tensor:
            return x * len(batches)

        def decides(x: Tensor, call: int) -> Tensor:
            return x * 2 if call % (len(batches) + 1) == 0 else x

        step, other = capture(by_its_name if own else of_pythons), capture(decides)
        for call in range(48):
            batches[1] = 2.0 + min(call // 8, 2)
            if call == 16:
                batches = [*batches, call]
            yield step(torch.ones(4) * call), other(torch.ones(4), call)

    check_right(script)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_two_trainers_in_turn() -> None:
    class Own(Trainer):
        step = counts

    def script(capture: Capture) -> Calls:
        one, other = Own(), Own()
        other.every = 5
        steps = [capture(each.step) for each in (one, other)]
        for call in range(CALLS):
            yield steps[call % 2](torch.randn(3, 4)), one.steps, other.steps
            if call % 9 == 0:
                yield steps[0](torch.randn(3, 4))
        return one.model, other.model

    check_right(script)


CLASS = """
import torch

EVERY = 3

class Drawn:
    def __init__(self):
        self.steps, self.more, self.every, self.held = 0, 5, 4, torch.zeros(3)

    def bump(self):
        {bumps}

    def helps(self, y, n, more=1):
{helps}
        return y

    def step(self, x, i):
        y = x
{body}
        return y
"""


def drawn(seed: int) -> str:
    """A random step: counts and decides, in branches and loops, by an argument, two attributes, and data."""
    draw = random.Random(seed)
    numbers = ["i", "self.steps", "self.more", "self.every", "EVERY", "i", "self.steps"]

    names: list[str] = []
    helping = False  # the function that is drawn is called by the step

    def expression(depth: int = 2) -> str:
        if depth == 0 or draw.random() < 0.3:
            return draw.choice([*numbers, str(draw.randint(-2, 6))])
        form = draw.choice(["({} % {})", "({} + {})", "({} - {})", "({} // {})", "({} * {})"])
        left, right = expression(depth - 1), draw.choice([str(draw.randint(1, 5)), "self.every", "EVERY"])
        return form.format(left, right if "%" in form or "//" in form else expression(depth - 1))

    def test() -> str:
        kind = draw.randrange(7)
        compared = f"{expression()} % {draw.randint(2, 5)} {draw.choice(['==', '<', '!=', '>='])} {draw.randint(0, 3)}"
        if kind == 0:
            return f"{expression()} % {draw.randint(2, 4)}"
        if kind == 1:
            return f"not {compared} or {expression(1)} in (1, 2, 5)"
        if kind == 2:
            return f"{compared} and x.sum() > 0"
        if kind == 3:
            return f"x.sum() > {draw.randint(-2, 2)}"
        if kind == 4:
            return f"1 < {expression(1)} % 7 < 5"
        return compared

    def block(depth: int) -> list[str]:
        lines = []
        for _ in range(draw.randint(1, 3)):
            kind = draw.randrange(15)
            if kind < 2 and depth < 3:
                lines += [f"if {test()}:", *indented(block(depth + 1))]
                if draw.random() < 0.5:
                    lines += ["else:", *indented(block(depth + 1))]
            elif kind == 2 and depth < 2:
                lines += [f"for part in range({draw.randint(1, 3)}):", *indented(block(3))]
            elif kind == 3:
                lines.append(draw.choice(["self.steps += 1", "self.more -= 2", "self.steps = self.steps + self.every"]))
            elif kind == 4 and depth < 2:
                lines += ["with torch.no_grad():", *indented(block(depth + 1))]
            elif kind == 5 and draw.random() < 0.3:
                lines.append(f"return y, {draw.choice(numbers)}")
            elif kind == 6:
                lines.append(f"y = y * (2 if {test()} else 0.5)")
            elif kind == 11 and draw.random() < 0.5:
                name = f"v{len(names)}"
                lines.append(f"{name} = {expression()}")
                names.append(name)
                numbers.append(name)
            elif kind == 10 and draw.random() < 0.3:
                lines.append(f"y = y * (2 if {draw.choice(['min', 'max', 'pow'])}({expression()}, 3) else 1)")
            elif kind == 7 and draw.random() < 0.4:
                lines.append(f"y = y + {expression()}")
            elif kind >= 12 and not helping:
                passed = draw.choice(["i", "i + 1", "i % 6", "i, 2", "i, more=self.every", "n=i"])
                lines.append(f"y = self.helps(y, {passed})")
            elif kind == 8 and draw.random() < 0.3:
                lines.append(draw.choice(["self.bump()", "self.every = self.every % 4 + 1", "i += 1"]))
            else:
                lines.append(draw.choice(["y = y.sin()", "self.held.add_(y)", "y = y + self.held", "y = y * 1.5"]))
        return lines

    def indented(lines: list[str]) -> list[str]:
        return ["    " + line for line in lines]

    counting = ["self.steps += 1"] if draw.random() < 0.7 else []
    body = [*counting, *block(0), *block(0)]
    bumps = draw.choice(["pass", "self.every = 3", "self.steps += 1", "self.held.mul_(0.5)"])
    parts = {"bumps": bumps, "body": "\n".join(indented(indented(body)))}
    names.append("none")
    numbers, helping = ["n", "n", "self.every", "more"], True
    helps = [line.replace("i += 1", "n += 1").replace("x.sum", "y.sum") for line in block(1)]
    helps = [line.partition("return")[0] + "pass" if "return" in line else line for line in helps]
    return CLASS.format(**parts, helps="\n".join(indented(indented(helps))))


@pytest.mark.sampled(8)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("part", range(32))
def test_random_steps(part: int, tmp_path: Path) -> None:
    replayed = 0
    many = 40 if EVERYTHING else 16
    for seed in range(part * many, part * many + many):
        path = tmp_path / f"drawn_{seed}_{torch.distributed.get_rank()}.py"
        path.write_text(drawn(seed))

        def script(capture: Capture) -> Calls:
            scope: dict[str, Any] = {"__name__": f"drawn_{seed}"}  # noqa: B023
            exec(compile(path.read_text(), str(path), "exec"), scope)  # noqa: B023
            trainer = scope["Drawn"]()
            step = capture(trainer.step)
            if seed % 3 == 0:  # noqa: B023
                step = types.MethodType(capture(scope["Drawn"].step), trainer)
            draw = torch.Generator().manual_seed(seed)  # noqa: B023
            for call in range(30):
                if call == 19:
                    trainer.every = 2
                try:
                    result = step(torch.randn(3, generator=draw), call if call != 23 else 5)
                except (ZeroDivisionError, RuntimeError, NameError) as error:
                    result = type(error)
                yield result, trainer.steps, trainer.more, trainer.every, trainer.held.clone()
            return trainer.held

        try:
            found = check_right(script)
        except BaseException as error:
            error.add_note(path.read_text())
            raise
        replayed += ORACLE_ONLY or found.steps[-1].stats.replays > 4
    assert replayed >= many // 4, replayed
