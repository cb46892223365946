"""Learning rate schedulers inside a step, and in its reach."""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import inputs, mesh, mlp
from oracle import ORACLE_ONLY, Capture, Script, check_equal, check_right, rote_capture
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

Make = Callable[[torch.optim.Optimizer], Any]

# Every scheduler of torch.optim.lr_scheduler that is stepped without a metric.
SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + 0.1 * epoch)),
    "LambdaLR of cos": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.5 * (1 + math.cos(epoch / 40))),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.97),
    "StepLR": lambda o: schedulers.StepLR(o, 3, gamma=0.9),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [4, 9, 15], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.5, total_iters=7),
    "LinearLR": lambda o: schedulers.LinearLR(o, total_iters=12),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.98),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=60, power=1.5),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 50, eta_min=1e-5),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 8, T_mult=2),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=6), schedulers.ExponentialLR(o, 0.97)], milestones=[6]
    ),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ConstantLR(o, factor=0.5, total_iters=9), schedulers.ExponentialLR(o, 0.98)], optimizer=o
    ),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 1e-4, 1e-2, step_size_up=5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 1e-2, total_steps=80),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
}
CALLS = 30


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.2), nn.Linear(12, 3))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 6), torch.randn(4, 3)


def numbers(scheduler: Any) -> Any:
    """What a scheduler and those inside it know, but for the optimizer and functions."""
    inner = [numbers(each) for each in getattr(scheduler, "_schedulers", [])]
    plain = {key: value for key, value in vars(scheduler).items() if isinstance(value, int | float | str | list)}
    plain.pop("_schedulers", None)
    plain.pop("lr_lambdas", None)
    return {**plain, "inner": inner}


def training(
    make: Make,
    body: Callable[..., Any],
    *,
    optimizer: str = "AdamW",
    calls: int = CALLS,
    more: Callable[[int], tuple[Any, ...]] = lambda call: (),
    before: Callable[[int, Any], object] = lambda call, scheduler: None,
    after: Callable[[Any, Any], object] = lambda scheduler, result: None,
    raises: type[Exception] | tuple[()] = (),
    **options: Any,
) -> Script:
    """``body(model, optimizer, scheduler, x, y, *more)`` is the step.

    ``before`` and ``after`` are what the script does around a call, and ``raises`` is the error that it handles."""

    def script(capture: Capture) -> Any:
        net = model()
        opt = OPTIMIZERS[optimizer](net.parameters())
        scheduler = make(opt)

        def step(x: torch.Tensor, y: torch.Tensor, *more: Any) -> Any:
            return body(net, opt, scheduler, x, y, *more)

        captured = capture(step, state={"model": net, "opt": opt}, **options)
        for call in range(calls):
            before(call, scheduler)
            try:
                result = captured(*batch(), *more(call))
            except raises as error:
                result = str(error)
            after(scheduler, result)
            yield result, numbers(scheduler), [group["lr"] for group in opt.param_groups]
        return net, opt, numbers(scheduler)

    return script


def update(net: nn.Module, opt: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    return loss.detach()


def last(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    opt.zero_grad()
    loss = update(net, opt, x, y)
    scheduler.step()
    return loss


def before_zero_grad(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = update(net, opt, x, y)
    scheduler.step()
    opt.zero_grad(set_to_none=True)
    return loss


def unused(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    """The scheduler is in reach of the step, but the step does not name its numbers."""
    assert scheduler is not None
    opt.zero_grad()
    return update(net, opt, x, y)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("body", [last, before_zero_grad])
def test_inside(name: str, body: Any, optimizer: str) -> None:
    check_equal(training(SCHEDULERS[name], body, optimizer=optimizer), replays=20)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_in_reach_and_stepped_outside(name: str) -> None:
    check_equal(training(SCHEDULERS[name], unused, after=lambda scheduler, _: scheduler.step()), replays=20)


def returns_rate(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = last(net, opt, scheduler, x, y)
    return loss, scheduler.get_last_lr()[0]


def returns_rate_before(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    rate = scheduler.get_last_lr()[0]
    return last(net, opt, scheduler, x, y), rate


def returns_group(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = last(net, opt, scheduler, x, y)
    return loss, opt.param_groups[0]["lr"]


def held_group(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    group = opt.param_groups[0]
    loss = last(net, opt, scheduler, x, y)
    return loss, group["lr"]


def first(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    scheduler.step()
    opt.zero_grad()
    return update(net, opt, x, y)


def between(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    opt.zero_grad()
    update(net, opt, x, y)
    scheduler.step()
    opt.zero_grad()
    return update(net, opt, y.sum() + x, y)


def decided(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = last(net, opt, scheduler, x, y)
    return loss * 2 if scheduler.last_epoch % 7 == 3 else loss


def epoch_given(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    opt.zero_grad()
    loss = update(net, opt, x, y)
    scheduler.step(*[None] * (type(scheduler) is not schedulers.SequentialLR))
    return loss


def through_dict(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = last(net, opt, scheduler, x, y)
    return loss, vars(scheduler)["last_epoch"]


def of_state_dict(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = last(net, opt, scheduler, x, y)
    return loss, opt.state_dict()["param_groups"][0]["lr"]


def two_steps(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = last(net, opt, scheduler, x, y)
    scheduler.step()
    return loss


def kind(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    loss = last(net, opt, scheduler, x, y)
    good = isinstance(scheduler, schedulers.LRScheduler) and isinstance(opt, torch.optim.Optimizer)
    return loss, scheduler.__class__.__name__, opt.__class__.__name__, good, hasattr(scheduler, "step")


READING = [returns_rate, returns_rate_before, returns_group, held_group, first, between, decided, epoch_given]
READING += [through_dict, of_state_dict]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["LambdaLR", "CosineAnnealingLR", "ExponentialLR", "SequentialLR"])
@pytest.mark.parametrize("body", READING)
def test_a_step_that_reads_the_rate_is_right(body: Any, name: str) -> None:
    check_right(training(SCHEDULERS[name], body))


@pytest.mark.parametrize("body", [two_steps, kind])
def test_more_that_replays(body: Any) -> None:
    check_equal(training(SCHEDULERS["CosineAnnealingLR"], body), replays=20)


def test_a_method_taken_before() -> None:
    def script(capture: Capture) -> Any:
        net = model()
        opt = torch.optim.AdamW(net.parameters())
        scheduler = schedulers.ExponentialLR(opt, 0.9)
        advance, rates = scheduler.step, scheduler.get_last_lr

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = update(net, opt, x, y)
            advance()
            opt.zero_grad()
            return loss, rates()

        captured = capture(step, state={"model": net, "opt": opt})
        for _ in range(20):
            yield captured(*batch()), numbers(scheduler)
        return net, opt

    check_right(script)


@pytest.mark.parametrize("has_metric", [False, True])
def test_of_a_trainer_with_branches(has_metric: bool) -> None:
    """Accumulation: the scheduler is called in every third call."""

    def script(capture: Capture) -> Any:
        class Trainer:
            def __init__(self) -> None:
                self.model = model()
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
                self.scheduler = (plateau if has_metric else SCHEDULERS["CosineAnnealingLR"])(self.optimizer)
                self.steps = 0

            def training_step(self, x: torch.Tensor, y: torch.Tensor, last: bool) -> Any:
                loss = F.mse_loss(self.model(x), y)
                loss.backward()
                if has_metric:
                    self.steps += 1
                if last:
                    self.optimizer.step()
                    if has_metric:
                        self.scheduler.step(float(loss.detach()))
                    else:
                        self.scheduler.step()
                    self.optimizer.zero_grad()
                return loss.item() if has_metric else loss.detach()

        trainer = Trainer()
        step = capture(trainer.training_step, state={"model": trainer.model, "opt": trainer.optimizer})
        for i in range(60):
            yield step(*batch(), i % 3 == 2), numbers(trainer.scheduler), trainer.steps
        return trainer.model, trainer.optimizer

    check_equal(script, replays=40)


def test_two_optimizers_and_their_schedulers() -> None:
    def script(capture: Capture) -> Any:
        nets = [model(), model()]
        opts = [torch.optim.AdamW(net.parameters(), lr=0.01 * (i + 1)) for i, net in enumerate(nets)]
        rates = [schedulers.ExponentialLR(opts[0], 0.95), schedulers.CosineAnnealingLR(opts[1], 30)]

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            losses = []
            for net, opt, rate in zip(nets, opts, rates, strict=True):
                losses.append(update(net, opt, x, y))
                rate.step()
                opt.zero_grad()
            return losses

        captured = capture(step, state={"models": nets, "opts": opts})
        for _ in range(CALLS):
            yield captured(*batch()), [numbers(rate) for rate in rates]
        return nets, opts

    check_equal(script, replays=20)


@pytest.mark.parametrize("replaced", ["object", "rate", "function"])
def test_a_scheduler_changes_between_calls(replaced: str) -> None:
    def script(capture: Capture) -> Any:
        net = model()
        opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
        held = {"scheduler": schedulers.LambdaLR(opt, lambda epoch: 1 / (1 + epoch))}

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = update(net, opt, x, y)
            held["scheduler"].step()
            opt.zero_grad()
            return loss

        captured = capture(step, state={"model": net, "opt": opt})
        for i in range(40):
            if i == 20 and replaced == "object":
                held["scheduler"] = schedulers.ExponentialLR(opt, 0.9)
            if i == 20 and replaced == "rate":
                held["scheduler"].base_lrs = [0.5]
            if i == 20 and replaced == "function":
                held["scheduler"].lr_lambdas = [lambda epoch: 0.5**epoch]
            yield captured(*batch()), numbers(held["scheduler"])
        return net, opt

    check_equal(script, replays=30)


def test_the_function_of_a_scheduler_may_do_anything() -> None:
    def make(optimizer: torch.optim.Optimizer) -> Any:
        seen: list[int] = []

        def rate(epoch: int) -> float:
            seen.append(epoch)
            return 0.1 + float(torch.tensor(0.01 * epoch).sin())

        made = schedulers.LambdaLR(optimizer, rate)
        made.seen = seen  # type: ignore[attr-defined]
        return made

    check_equal(training(make, last), replays=20)


def test_a_function_that_raises() -> None:
    def rate(epoch: int) -> float:
        if epoch in (2, 9, 21):
            raise KeyError(epoch)
        return 1 / epoch if epoch else 1.0

    check_right(training(lambda optimizer: schedulers.LambdaLR(optimizer, rate), last, raises=KeyError))


@pytest.mark.parametrize("has_metric", [False, True])
def test_a_step_that_raises_after_the_call(has_metric: bool) -> None:
    def body(net: Any, opt: Any, scheduler: Any, x: Any, y: Any, fails: bool) -> Any:
        opt.zero_grad()
        loss = update(net, opt, x, y)
        if has_metric:
            scheduler.step(loss.item())
        else:
            scheduler.step()
        if fails:
            raise ValueError("after the call")
        return loss

    make, optimizer = (plateau, "SGD") if has_metric else (SCHEDULERS["ExponentialLR"], "AdamW")
    fails = (0, 1, 2, 10, 11)
    check_right(training(make, body, optimizer=optimizer, more=lambda call: (call in fails,), raises=ValueError))


class _Noisy(schedulers.LRScheduler):
    """One of the user's own, with a step of its own."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        self.noise = self.last_epoch * 2

    def get_lr(self) -> list[float]:
        return [0.01 / (1 + self.last_epoch) for _ in self.base_lrs]


class _Own(schedulers.LRScheduler):
    def get_lr(self) -> list[float]:
        return [0.01 / (1 + self.last_epoch) for _ in self.base_lrs]


def test_schedulers_of_the_users_own() -> None:
    check_right(training(_Noisy, last))
    check_equal(training(_Own, last), replays=20)


def test_plateau_is_right() -> None:
    check_equal(training(plateau, unused, after=lambda scheduler, loss: scheduler.step(loss)), replays=20)


def test_verified_calls_step_a_scheduler_once() -> None:
    check_equal(training(SCHEDULERS["CosineAnnealingLR"], last, verify=5), replays=20)


def test_stored_plans(tmp_path: Any) -> None:
    check_stored(training, SCHEDULERS["CosineAnnealingLR"], last, plans=str(tmp_path / "plans"))


def check_stored(script: Callable[..., Script], *what: Any, plans: str) -> None:
    check_equal(script(*what, plans=plans), replays=20)
    check_equal(script(*what, plans=plans), replays=20)
    check_right(script(*what, plans=plans, trust_plans=True), replays=25)


def test_a_recording_leaves_classes_as_they_were() -> None:
    net = model()
    opt = torch.optim.AdamW(net.parameters())
    scheduler = schedulers.ExponentialLR(opt, 0.9)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return before_zero_grad(net, opt, scheduler, x, y)

    captured = rote_capture(step, state={"model": net, "opt": opt})
    for _ in range(6):
        captured(*batch())
        assert type(scheduler) is schedulers.ExponentialLR
        assert type(opt) is torch.optim.AdamW


def test_a_new_scheduler_in_each_call_is_not_recorded_for_ever() -> None:
    def script(capture: Capture) -> Any:
        net = model()
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        held: list[Any] = []

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            loss = update(net, opt, x, y)
            opt.zero_grad()
            return loss, held[-1].last_epoch

        captured = capture(step, state={"model": net, "opt": opt})
        for _ in range(60):
            held[:] = [schedulers.ExponentialLR(opt, 0.9)]
            yield captured(*batch())
        return net, opt

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays >= 20 or found.steps[0].stats.refusals, found.steps[0].stats


def asks_for_what_is_not_there(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    """As the scheduler of `accelerate` asks."""
    loss = last(net, opt, scheduler, x, y)
    if hasattr(scheduler, "total_steps"):
        loss = loss * 2
    return loss


def test_asks_for_what_is_not_there() -> None:
    check_equal(training(SCHEDULERS["StepLR"], asks_for_what_is_not_there), replays=20)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_asks_for_what_is_there() -> None:
    check_right(training(SCHEDULERS["OneCycleLR"], asks_for_what_is_not_there))


def test_asks_for_what_comes_later() -> None:
    def before(call: int, scheduler: Any) -> None:
        if call == 20:
            scheduler.total_steps = 3

    check_right(training(SCHEDULERS["StepLR"], asks_for_what_is_not_there, optimizer="SGD", before=before), replays=14)


def tries(scheduler: Any) -> None:
    try:
        scheduler.step()
    except ValueError:
        scheduler.last_epoch += 0


def suppresses(scheduler: Any) -> None:
    with contextlib.suppress(ValueError):
        scheduler.step()


@pytest.mark.parametrize("ends", [tries, suppresses])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_errors_that_the_step_handles(ends: Callable[[Any], None]) -> None:
    def body(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = update(net, opt, x, y)
        ends(scheduler)
        return loss

    make = functools.partial(schedulers.OneCycleLR, max_lr=0.1, total_steps=9)
    check_right(training(make, body, optimizer="SGD", calls=14))


def plateau(optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer, **{"patience": 1, "factor": 0.7, "threshold": 0.05, **options})


def written_later(loss: torch.Tensor, scheduler: Any) -> None:
    metric = loss.detach() * 1
    scheduler.step(metric)
    metric.mul_(-3)


def item_written_later(loss: torch.Tensor, scheduler: Any) -> None:
    metric = loss.detach() * 1
    scheduler.step(metric.item())
    metric.fill_(float("nan"))


def twice(loss: torch.Tensor, scheduler: Any) -> None:
    scheduler.step(loss.detach())
    scheduler.step(loss.item() if loss is None else loss.detach() * 2)


def not_a_number(loss: torch.Tensor, scheduler: Any) -> None:
    scheduler.step(math.nan)
    scheduler.step(-math.inf)
    scheduler.step(True)


def special_tensors(loss: torch.Tensor, scheduler: Any) -> None:
    zero = loss.detach() * 0
    scheduler.step(zero / zero)
    scheduler.step(float(1 / zero))
    scheduler.step((-1 / zero).item())


def in_a_loop(loss: torch.Tensor, scheduler: Any) -> None:
    for factor in (1, 3, 2):
        scheduler.step((loss.detach() * factor).item())


# What a step calls a scheduler with that takes a metric.
Metric = Callable[[torch.Tensor, Any], object]
HANDED_OUT: dict[str, Metric] = {
    "tensor": lambda loss, scheduler: scheduler.step(loss),
    "detached": lambda loss, scheduler: scheduler.step(loss.detach()),
    "by name": lambda loss, scheduler: scheduler.step(metrics=loss.detach()[None, None]),
    "item": lambda loss, scheduler: scheduler.step(loss.item()),
    "item by name": lambda loss, scheduler: scheduler.step(metrics=loss.detach().item()),
    "float": lambda loss, scheduler: scheduler.step(float(loss.detach())),
    "whole number": lambda loss, scheduler: scheduler.step((loss.detach() * 100).long()),
    "whole item": lambda loss, scheduler: scheduler.step((loss.detach() * 100).long().item()),
    "half": lambda loss, scheduler: scheduler.step(loss.detach().to(torch.bfloat16)),
    "truth": lambda loss, scheduler: scheduler.step(loss.detach() > 1),
    "written later": written_later,
    "item written later": item_written_later,
    "twice": twice,
    "constant": lambda loss, scheduler: scheduler.step(0.25),
    "not a number": not_a_number,
    "special tensors": special_tensors,
    "in a loop": in_a_loop,
}


def with_metric(call: Metric, **options: Any) -> Script:
    """A step that ends with a call of a scheduler that takes a metric."""

    def body(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
        opt.zero_grad()
        loss = F.mse_loss(net(x), y)
        loss.backward()
        opt.step()
        call(loss, scheduler)
        return loss.detach()

    return training(plateau, body, **options)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("name", HANDED_OUT)
def test_a_metric(name: str) -> None:
    check_equal(with_metric(HANDED_OUT[name]), replays=20)


@pytest.mark.filterwarnings("ignore:Converting a tensor")
@pytest.mark.parametrize("name", ["detached", "item", "constant"])
@pytest.mark.parametrize("options", [{"verify": 5}, {"verify_every": 4}, {"passes": "none"}])
def test_a_metric_with_options(name: str, options: Any) -> None:
    check_equal(with_metric(HANDED_OUT[name], **options), replays=20 if "passes" in options else 15)


@pytest.mark.parametrize("name", ["detached", "item", "not a number"])
def test_a_metric_of_a_stored_plan(name: str, tmp_path: Any) -> None:
    check_stored(with_metric, HANDED_OUT[name], plans=str(tmp_path / "plans"))


def shown(loss: torch.Tensor, scheduler: Any) -> None:
    value = loss.item()
    scheduler.step(value)


def tried(loss: torch.Tensor, scheduler: Any) -> None:
    try:
        scheduler.step(loss.detach())
    except ValueError:
        scheduler.last_epoch += 0


def suppressed(loss: torch.Tensor, scheduler: Any) -> None:
    with contextlib.suppress(ValueError):
        scheduler.step(loss.item())


def by_another_function(loss: torch.Tensor, scheduler: Any) -> None:
    float = math.sqrt  # as a name that code takes for the built-in one
    scheduler.step(float(loss.detach()))


def read_again(loss: torch.Tensor, scheduler: Any) -> None:
    scheduler.step(loss.detach())
    loss.detach().mul_(scheduler.best)


def number_without_a_call(loss: torch.Tensor, scheduler: Any) -> None:
    advance = scheduler.step
    advance(loss.item())


def kept(loss: torch.Tensor, scheduler: Any) -> None:
    scheduler.step(metric := loss.item())
    loss.detach().mul_(metric)


class Scorer:
    """Has a method of the name, which decides by the number."""

    scores = 0

    def step(self, value: float) -> None:
        if value > 2:
            self.scores += 1


SCORER = Scorer()


def of_other_objects(loss: torch.Tensor, scheduler: Any) -> None:
    for each in (scheduler, SCORER, scheduler):
        each.step(loss.item())


def fails_between(loss: torch.Tensor, scheduler: Any) -> None:
    """The first call gets no number, in the place where the second one gets one that decides."""
    for each, what in ((scheduler, loss[None].expand(2)), (SCORER, loss)):
        with contextlib.suppress(RuntimeError):
            each.step(what.item())


NOT_HANDED_OUT: dict[str, Metric] = {
    "shown": shown,
    "divided": lambda loss, scheduler: scheduler.step(loss.item() / 3),
    "rounded": lambda loss, scheduler: scheduler.step(round(loss.item(), 2)),
    "of NumPy": lambda loss, scheduler: scheduler.step(loss.detach().numpy()),
    "with epoch": lambda loss, scheduler: scheduler.step(loss.detach(), scheduler.last_epoch + 1),
    "with epoch by name": lambda loss, scheduler: scheduler.step(loss.detach(), epoch=7),
    "tried": tried,
    "suppressed": suppressed,
    "by another function": by_another_function,
    "read again": read_again,
    "number without a call": number_without_a_call,
    "of the best": lambda loss, scheduler: scheduler.step(min(loss.item(), 2.0)),
    "kept": kept,
    "of other objects": of_other_objects,
    "fails between": fails_between,
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", NOT_HANDED_OUT)
def test_a_metric_that_is_not_followed_is_right(name: str) -> None:
    check_right(with_metric(NOT_HANDED_OUT[name]))


@pytest.mark.parametrize("name", ["StepLR", "CosineAnnealingLR"])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_number_for_a_scheduler_without_a_metric_is_right(name: str) -> None:
    check_right(training(SCHEDULERS[name], stepped_by_item))


def stepped_by_item(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    opt.zero_grad()
    loss = update(net, opt, x, y)
    scheduler.step((loss * 3).long().item())
    return loss


def test_a_metric_that_is_bad_at_times() -> None:
    """Losses that are not finite come in data, and the scheduler is another one behind a call."""

    def script(capture: Capture) -> Any:
        net = model()
        opt = OPTIMIZERS["SGD"](net.parameters())
        held = {"scheduler": plateau(opt)}

        def step(x: torch.Tensor, y: torch.Tensor, scale: torch.Tensor) -> Any:
            opt.zero_grad()
            loss = update(net, opt, x, y) * scale
            held["scheduler"].step(loss)
            return loss

        captured = capture(step, state={"model": net, "opt": opt})
        for i in range(40):
            if i == 25:
                held["scheduler"] = plateau(opt, mode="max", cooldown=2)
            if i == 32:
                held["scheduler"].patience = 0
            scale = {8: math.nan, 9: math.inf, 18: -math.inf, 30: math.nan}.get(i, 1.0)
            scheduler = held["scheduler"]
            yield captured(*batch(), torch.tensor(scale)), scheduler.best, scheduler.num_bad_epochs, opt.param_groups
        return net, opt

    check_equal(script, replays=30)


def test_a_metric_of_another_type_in_some_calls() -> None:
    given: list[Any] = [0.5, torch.tensor(0.5), torch.tensor([2.0]), 3, torch.tensor(4, dtype=torch.int64)]
    script = training(plateau, stepped, calls=60, more=lambda call: (given[call // 4 % len(given)],))
    check_equal(script, replays=30)


def test_metrics_of_several_schedulers() -> None:
    def script(capture: Capture) -> Any:
        nets = [model(), model()]
        opts = [torch.optim.AdamW(net.parameters(), lr=0.01 * (i + 1)) for i, net in enumerate(nets)]
        rates = [schedulers.ExponentialLR(opts[0], 0.95), plateau(opts[0]), plateau(opts[1], patience=0)]

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            losses = [update(net, opt, x, y) for net, opt in zip(nets, opts, strict=True)]
            rates[1].step(losses[0].item())
            rates[0].step()
            rates[2].step(losses[0] + losses[1])
            for opt in opts:
                opt.zero_grad()
            return losses

        captured = capture(step, state={"models": nets, "opts": opts})
        for _ in range(CALLS):
            yield captured(*batch()), [numbers(rate) for rate in rates], [opt.param_groups[0]["lr"] for opt in opts]
        return nets, opts

    check_equal(script, replays=20)


def test_a_scheduler_of_another_kind_behind_a_stored_plan(tmp_path: Any) -> None:
    def body(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
        return stepped(net, opt, scheduler, x, y, 3)

    store = str(tmp_path / "plans")
    check_equal(training(plateau, body, plans=store), replays=20)
    for trust in (False, True):
        with pytest.warns(UserWarning):
            check_right(training(SCHEDULERS["StepLR"], body, plans=store, trust_plans=trust))


def stepped(net: Any, opt: Any, scheduler: Any, x: Any, y: Any, metric: Any) -> Any:
    opt.zero_grad()
    loss = update(net, opt, x, y)
    scheduler.step(metric)
    return loss


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["detached", "item", "float"])
def test_a_metric_on_a_mesh(name: str) -> None:
    def script(capture: Capture) -> Any:
        on = mesh(2)
        net = mlp(on)
        opt = OPTIMIZERS["AdamW"](net.parameters())
        scheduler = plateau(opt)

        def step(x: torch.Tensor) -> Any:
            opt.zero_grad()
            loss = net(x).square().mean()
            loss.backward()
            opt.step()
            HANDED_OUT[name](DTensor.from_local(loss.detach(), on, [Replicate()], run_check=False), scheduler)
            return loss.detach()

        captured = capture(step, state={"model": net, "opt": opt})
        for x in inputs(CALLS, 4, 8):
            yield captured(x), scheduler.best, opt.param_groups[0]["lr"]
        return net, opt

    check_equal(script, replays=20)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_a_metric_of_an_evaluation(context: Any) -> None:
    def script(capture: Capture) -> Any:
        net = model().eval()
        opt = OPTIMIZERS["SGD"](net.parameters())
        scheduler = plateau(opt)

        def evaluate(x: torch.Tensor, y: torch.Tensor) -> Any:
            with context():
                loss = F.mse_loss(net(x), y)
                scheduler.step(loss)
                scheduler.step(loss.item())
            return loss

        captured = capture(evaluate, state={"model": net, "opt": opt})
        for _ in range(CALLS):
            yield captured(*batch()), scheduler.best, opt.param_groups[0]["lr"]
        return net, opt

    check_equal(script, replays=20)


def test_a_plateau_of_ones_own() -> None:
    """It has PyTorch's step, and decides in its own way."""

    class Own(schedulers.ReduceLROnPlateau):
        def _is_better(self, a: Any, best: Any) -> bool:
            assert type(a) is float
            return bool(a < best - 0.01 * self.num_bad_epochs)

    check_equal(training(lambda optimizer: Own(optimizer, patience=1), last_of), replays=20)


def last_of(net: Any, opt: Any, scheduler: Any, x: Any, y: Any) -> Any:
    opt.zero_grad()
    loss = update(net, opt, x, y)
    scheduler.step(metrics=float(loss))
    return loss
