"""Steps that read data on the host and decide by it: a replay goes on only where it finds what the recording found."""

import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import inputs, mesh, mlp
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over, rote_capture
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

TRUE, FALSE = torch.ones(8, dtype=torch.bool), torch.arange(8) != 3


def small(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 8))


def spoiled(calls: int, bad: Callable[[int], bool] | tuple[int, ...], value: float = math.nan) -> Iterator[Tensor]:
    """Inputs of which some hold a number that is not finite."""
    for i, x in enumerate(inputs(calls, 4, 8)):
        if bad(i) if callable(bad) else i in bad:
            x[0, 0] = value
        yield x


def number(dtype: torch.dtype) -> Callable[[Tensor], bool]:
    return lambda mask: mask.sum().to(dtype).item() == 8


def while_true(mask: Tensor) -> bool:
    count = 0
    while (mask.sum() > count + 7).item():
        count += 1
    return count > 0


def asserted(mask: Tensor) -> bool:
    try:
        assert mask.all()
    except AssertionError:
        return False
    return True


# Ways to ask whether a mask is all true.
QUESTIONS: dict[str, Callable[[Tensor], bool]] = {
    "if": lambda mask: True if mask.all() else False,  # noqa: SIM210
    "not": lambda mask: not (~mask).any(),
    "item": lambda mask: mask.all().item(),
    "comparison": lambda mask: bool(mask.sum() > 7),
    "truth of a number": lambda mask: not (mask.sum() - 8),
    "truth of a float": lambda mask: not (mask.sum() - 8).float(),
    "int": lambda mask: int(mask.sum()) == 8,
    "float": lambda mask: float(mask.float().mean()) == 1.0,
    "equal": lambda mask: torch.equal(mask, torch.ones_like(mask)),
    "one element": lambda mask: bool(mask[3]),
    "numbers": lambda mask: [int(each) for each in mask] == [1] * 8,
    "while": while_true,
    "assert": asserted,
    "index": lambda mask: (True, False)[(~mask).sum()],
    "nan": lambda mask: mask.float().log().sum().item() == 0,
    "is_nonzero": lambda mask: torch.is_nonzero(mask.all()),
    **{str(dtype): number(dtype) for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8)},
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_about_an_argument(question: str) -> None:
    asks = QUESTIONS[question]

    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}

        def train_step(x: Tensor, mask: Tensor) -> Tensor:
            optimizer.zero_grad()
            y = model(x)
            if not asks(mask):
                y = y.masked_fill(~mask, 0.0)
            loss: Tensor = y.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        draw = random.Random(0)
        calls = ((x, TRUE if i < 5 or draw.random() < 0.6 else FALSE) for i, x in enumerate(inputs(50, 4, 8)))
        return over(capture, train_step, calls, state=state)

    check_equal(script)


def train(model: nn.Module, optimizer: Any, is_good: Callable[[nn.Module, Tensor], bool]) -> Callable[[Tensor], Tensor]:
    """A step that leaves out an update."""

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x).square().mean()
        loss.backward()
        if is_good(model, loss):
            optimizer.step()
        return loss.detach()

    return train_step


def norm(model: nn.Module) -> Tensor:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


SKIPS: dict[str, Callable[[nn.Module, Tensor], bool]] = {
    "finite loss": lambda model, loss: bool(torch.isfinite(loss)),
    "finite norm": lambda model, loss: bool(norm(model).isfinite()),
    "small norm": lambda model, loss: bool(norm(model) < 0.2),
    "all finite": lambda model, loss: all(p.grad.isfinite().all() for p in model.parameters()),
    "no nan": lambda model, loss: not torch.isnan(loss).item(),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", SKIPS)
def test_an_update_that_is_left_out(kind: str, dropout: float) -> None:
    def script(capture: Capture) -> Calls:
        model = small(dropout)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        calls = (x * (30 if i % 7 == 3 else 1) for i, x in enumerate(spoiled(60, (0, 9, 10, 23, 31, 32, 33, 40))))
        return over(capture, train(model, optimizer, SKIPS[kind]), calls, state=state)

    check_equal(script)


@pytest.mark.ranks(1)
def test_a_norm_that_must_be_finite() -> None:
    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, error_if_nonfinite=True)
            optimizer.step()
            return total

        step = capture(train_step, state=state)
        for x in spoiled(40, (12, 20, 21), math.inf):
            try:
                yield step(x)
            except RuntimeError as error:
                yield str(error)
        return state

    check_equal(script)


def fused_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1, fused=True)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("make", [torch.optim.AdamW, fused_sgd])
def test_a_gradient_scaler(make: Callable[[Any], torch.optim.Optimizer], clips: bool, every: int) -> None:
    """Its scale grows, and shrinks where a gradient is infinite: then the update is left out. ``every``: steps that
    accumulate gradients in one call."""

    def script(capture: Capture) -> Calls:
        model = small(0.1)
        optimizer = make(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        state = {"model": model, "optimizer": optimizer, "scaler": scaler}

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            for part in x.chunk(every):
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(part).square().mean()
                scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        return over(
            capture,
            train_step,
            spoiled(40, (12, 20, 21), math.inf),
            state=state,
            before={30: lambda: scaler.load_state_dict({**scaler.state_dict(), "scale": 8.0})},
            end=lambda: [model, optimizer, scaler.state_dict()],
        )

    check_equal(script)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_gradient_scaler_that_is_used_otherwise() -> None:
    """Named in the state or not; with its update outside; switched off; with two optimizers."""

    def script(capture: Capture) -> Calls:
        models = [small(0.1), small()]
        optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
        state = {"models": models, "optimizers": optimizers}

        def train_step(x: Tensor, updates: bool) -> Tensor:
            loss = torch.zeros(())
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                loss = model(x).square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
            if updates:
                scaler.update()
            return loss.detach()

        for named in (state, {**state, "scaler": scaler}):
            step = capture(train_step, state=named)
            for i, x in enumerate(spoiled(40, (12, 20, 21), math.inf)):
                yield step(x, i % 8 != 7)
                if i % 8 == 7:
                    scaler.update()
                if i == 33:
                    scaler._enabled = False
        return [state, scaler.state_dict()]

    found = check_right(script)
    if not ORACLE_ONLY:
        assert all(step.stats.replays >= 15 for step in found.steps), [step.stats for step in found.steps]


# Values of which each call has another one.
CHANGING: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "float": lambda loss: float(loss),
    "int": lambda loss: int(loss * 1e9),
    "text": lambda loss: f"{loss.item():.3}",
    "comparison": lambda loss: loss.item() > 0.3,
    "tensor": lambda loss: bool(loss > 0.3),
    "rounded": lambda loss: round(loss.item(), 1),
}


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("kind", CHANGING)
def test_a_number_that_changes(kind: str) -> None:
    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        state = {"model": model, "optimizer": optimizer}

        def train_step(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            value = CHANGING[kind](loss)
            loss.backward()
            optimizer.step()
            return loss.detach(), value

        return over(capture, train_step, inputs(80, 4, 8), state=state)

    check_right(script)


def drift(x: Tensor) -> Tensor:
    return x.square().mean()


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_read_after_a_write() -> None:
    """It is put off until the value is known (`test_put_off.py`)."""

    def script(capture: Capture) -> Calls:
        total = torch.zeros(())

        def step(x: Tensor) -> Tensor:
            total.add_(drift(x))
            return x * 2 if total > 2.0 else x

        return over(capture, step, inputs(60, 4, 8), state=[total])

    check_right(script, replays=20)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_read_between_two_writes() -> None:
    def script(capture: Capture) -> Calls:
        total = torch.zeros(())

        def step(x: Tensor) -> Tensor:
            total.add_(drift(x))
            y = x * 2 if total > 2.0 else x
            total.mul_(0.9)
            return y

        return over(capture, step, inputs(40, 4, 8), state=[total])

    check_right(script, replays=20)


@pytest.mark.ranks(1)
def test_a_read_of_what_is_written_later() -> None:
    """What the step has not written when it reads can be read first."""

    def script(capture: Capture) -> Calls:
        total, other = torch.zeros(()), torch.zeros(())

        def step(x: Tensor) -> Tensor:
            other.add_(1)
            many = total > 2.0  # known before the write, and asked for after it
            total.add_(drift(x))
            if many:
                total.zero_()
            return x * 2 if many else x

        return over(capture, step, inputs(60, 4, 8), state=[total, other])

    check_equal(script)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("where", ["in reach", "out of reach"])
def test_a_branch_that_changes_the_host(where: str) -> None:
    """Only calls that take the other branch can be replayed."""

    def script(capture: Capture) -> Calls:
        skipped = [0]
        kept: dict[str, int] = {"skipped": 0}

        def count() -> None:
            if where == "in reach":
                skipped[0] += 1
            else:
                kept.update(skipped=kept["skipped"] + 1)

        def step(x: Tensor) -> Tensor:
            if x.isnan().any():
                count()
                return torch.zeros_like(x)
            return x * 2

        captured = capture(step)
        for x in spoiled(120, lambda i: i < 5 or i % 11 == 0):
            yield captured(x), skipped[0], kept["skipped"]

    check_right(script, replays=20)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_an_error_that_the_step_handles() -> None:
    def script(capture: Capture) -> Calls:
        class Bad(Exception):
            pass

        def step(x: Tensor) -> Tensor:
            try:
                if x.isnan().any():
                    raise Bad
            except Bad:
                return x.nan_to_num()
            return x * 2

        return over(capture, step, spoiled(40, lambda i: i % 3 == 1))

    check_equal(script)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_read_in_a_hook() -> None:
    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for parameter in model.parameters():
            parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01) if grad.abs().max() > 0.02 else grad)
        state = {"model": model, "optimizer": optimizer}
        draw = random.Random(0)
        calls = (x * draw.choice([0.3, 1.0, 3.0]) for x in inputs(60, 4, 8))
        return over(capture, train(model, optimizer, lambda model, loss: True), calls, state=state)

    check_right(script, replays=10)


class Counted:
    calls = 0


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("options", [{"verify_every": 2}, {"verify": 4}], ids=["verify_every", "verify"])
def test_beside_eager_the_host_counts_once(options: dict[str, Any]) -> None:
    """Where a check fails in a replay beside eager, the call has run, and runs no second time."""

    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        counted = Counted()

        def function(x: Tensor) -> Tensor:
            counted.calls += 1
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if x.sum() > 0:
                optimizer.step()
            scheduler.step()
            return loss.detach()

        return over(
            capture,
            function,
            (torch.ones(2, 8) * (-1 if call in (6, 9, 10, 14, 15, 19) else 1) for call in range(24)),
            state={"model": model, "optimizer": optimizer},
            **options,
            seen=lambda: (counted.calls, scheduler.last_epoch),
        )

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[0].stats.verified >= 3


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
def test_a_trusted_plan_of_another_branch(tmp_path: Path) -> None:
    """The first call finds a stored plan, and the data is not what that plan is for."""

    def script(capture: Capture) -> Calls:
        w = torch.zeros(3)

        def function(x: Tensor) -> Tensor:
            y = x * 2 if x.sum() > 0 else x + 1
            w.add_(y)
            return y

        for signs in ([1, 1, 1], [-1, 1, -1, -1, 1, 1]):
            step = capture(function, state={"w": w}, plans=tmp_path, trust_plans=True)
            for sign in signs:
                yield step(torch.ones(3) * sign)
        return {"w": w}

    check_right(script)


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("trust", [False, True])
def test_plans_of_two_branches_in_one_store(trust: bool, tmp_path: Path) -> None:
    def script(capture: Capture) -> Calls:
        model = small(0.2)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        function = train(model, optimizer, lambda model, loss: bool(loss.isfinite()))
        for _ in range(3):
            step = capture(function, state=state, plans=tmp_path, trust_plans=trust)
            for x in spoiled(20, lambda i: i % 4 == 2):
                yield step(x)
        return state

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[2].stats.replays >= (17 if trust else 16), found.steps[2].stats
        assert found.steps[2].stats.recordings == 0, found.steps[2].stats


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["argument", "loss", "own"])
@pytest.mark.filterwarnings("ignore:rote")
def test_a_read_after_a_collective(kind: str) -> None:
    """What depends on arguments only is read first; a value that needs a collective is refused. Ranks may find
    different values."""

    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}

        def train_step(x: Tensor, mask: Tensor) -> Tensor:
            optimizer.zero_grad()
            out = DTensor.from_local(x, mesh(2), [Replicate()])
            out = model(out)
            loss = out.square().mean()
            if kind == "loss":
                if loss.to_local() > 0.1 if isinstance(loss, DTensor) else loss > 0.1:
                    loss = loss * 0.5
            elif mask.all():
                loss = loss * 2
            loss.backward()
            optimizer.step()
            return loss.detach()

        draw = random.Random(dist.get_rank() if kind == "own" else 0)
        calls = ((x, TRUE if i < 5 or draw.random() < 0.6 else FALSE) for i, x in enumerate(inputs(50, 4, 8)))
        return over(capture, train_step, calls, state=state, tail=False)

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        if kind == "loss":
            assert stats.replays == 0 and "a collective" in stats.refusals[0], stats
        else:
            assert stats.replays >= 20 and not stats.refusals, stats


class Program:
    """A random step: ops on a few tensors, writes to the state, reads by which it decides."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.lines = [
            (
                draw.choice(["op", "op", "op", "op", "random", "read", "read", "in place", "write"]),
                draw.randrange(4),
                draw.randrange(4),
                draw.random(),
            )
            for _ in range(draw.randrange(4, 14))
        ]
        self.state = [torch.full((3,), 0.1 * i) for i in range(2)]
        self.may_write = draw.random() < 0.7

    def __call__(self, x: Tensor, y: Tensor) -> list[Tensor]:
        values = [x * 1, y + 1, x, y]
        for kind, a, b, by in self.lines:
            left, right = values[a], values[b]
            if kind == "op":
                values[b] = torch.tanh(left * right + by)
            elif kind == "random":
                values[a] = left + torch.rand(3) * 0.01
            elif kind == "in place" and a < 2 and left is not x and left is not y:
                left.mul_(0.9)
            elif kind == "write" and self.may_write:
                self.state[a % 2].add_(left.detach() * 0.1)
            elif kind == "read" and left.mean() > (right * by).mean():
                values[a] = left - self.state[b % 2]
        return [*values]


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("seed", range(80))
def test_random_programs(seed: int) -> None:
    def script(capture: Capture) -> Calls:
        program = Program(seed)
        scales = (1.0 if i < 6 else (-1.0) ** (i // 3) for i in range(40))
        calls = ((x[0] * scale, x[1]) for x, scale in zip(inputs(40, 2, 3), scales, strict=True))
        return over(capture, program.__call__, calls, state=[program.state])

    check_right(script)


@pytest.mark.ranks(1)
def test_verified_calls() -> None:
    def script(capture: Capture) -> Calls:
        model = small(0.2)
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        calls = spoiled(60, lambda i: i > 5 and i % 5 == 0)
        return over(capture, train(model, optimizer, SKIPS["finite loss"]), calls, state=state, verify_every=3)

    found = check_right(script, lambda fn, **options: rote_capture(fn, **{"strict": True, **options}))
    if not ORACLE_ONLY:
        assert found.steps[0].stats.verified >= 5, found.steps[0].stats
        assert not found.steps[0].stats.refusals
