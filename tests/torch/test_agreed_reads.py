"""Values that a step reads on the host after collectives: with `agree=True` the ranks decide together whether a
replay goes on."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import mesh
from oracle import ORACLE_ONLY, Calls, Capture, Run, Script, check_right, over, rote_capture
from test_refusals import check_refused
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

CALLS = 24


def agreeing(function: Callable[..., Any], *, state: Any = None, **options: Any) -> Any:
    return rote_capture(function, state=state, **{"agree": True, "strict": True, **options})


def check(script: Callable[[Capture], Calls], replays: int, **options: Any) -> Run:
    """Equal to eager on every rank, and replayed so often."""

    def capture(function: Callable[..., Any], *, state: Any = None, **more: Any) -> Any:
        return agreeing(function, state=state, **{**options, **more})

    found = check_right(script, capture)
    if not ORACLE_ONLY:
        for step in found.steps:
            assert step.stats.replays >= replays, step.stats
            assert not step.stats.refusals, step.stats
    return found


def numbers(call: int, rank: int | None = None, scale: float = 1.0) -> Tensor:
    rank = dist.get_rank() if rank is None else rank
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * call + rank)) * scale


def small(dropout: float = 0.2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 3))


def averaged(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


def adding(w: Tensor) -> Callable[[Tensor], Tensor]:
    """A step that adds to ``w`` where the sum over the ranks is positive."""

    def metric(x: Tensor) -> Tensor:
        y = x + 1
        dist.all_reduce(y)
        if y.sum() > 0:
            w.add_(y[0])
        return y

    return metric


def is_odd(call: int) -> bool:
    return call in (6, 7, 12, 17, 20, 21)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_an_update_is_skipped(is_async: bool) -> None:
    """Gradients are averaged by hand; a norm out of bounds skips the update on both ranks."""

    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def train(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            works = [dist.all_reduce(p.grad, async_op=is_async) for p in model.parameters()]
            for work in works:
                if is_async:
                    work.wait()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if norm < 50:
                optimizer.step()
            return loss.detach(), norm

        state = {"model": model, "optimizer": optimizer}
        step = capture(train, state=state)
        for call in range(CALLS):
            yield step(numbers(call, scale=60.0 if is_odd(call) else 1.0))
        return state

    check(script, replays=14)


@pytest.mark.ranks(2)
def test_a_scaler_of_gradients() -> None:
    """Infinite gradients of one rank skip the update of both."""

    def script(capture: Capture) -> Calls:
        model = small()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=5)

        def train(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).square().mean()
            scaler.scale(loss).backward()
            averaged(model)
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        state = {"model": model, "optimizer": optimizer, "scaler": scaler}
        step = capture(train, state=state)
        for call in range(40):
            x = numbers(call)
            if is_odd(call) and dist.get_rank() == call % 2:
                x[0, 0] = torch.inf
            yield step(x)
        return {"model": model, "optimizer": optimizer, "scaler": scaler.state_dict()}

    check(script, replays=20)


@pytest.mark.ranks(2)
def test_a_value_that_differs_among_the_ranks() -> None:
    """Each rank takes its own branch, and all begin anew where one finds another value."""

    def script(capture: Capture) -> Calls:
        total = torch.zeros(())

        def metric(x: Tensor, bound: Tensor) -> Tensor:
            mean = x.mean()
            dist.all_reduce(mean)
            y = torch.rand(3) * mean
            if (x.mean() > bound + mean * 0).item():
                y = y * 2
            total.add_(y.sum())
            return y

        step = capture(metric, state={"total": total})
        for call in range(CALLS):
            high = (call // 5 + dist.get_rank() * (call // 11)) % 2
            yield step(numbers(call), torch.tensor(-9.0 if high else 9.0))
        return {"total": total}

    check(script, replays=8)


@pytest.mark.ranks(2)
def test_collectives_in_a_branch() -> None:
    def script(capture: Capture) -> Calls:
        def metric(x: Tensor) -> Tensor:
            largest = x.max()
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)
            if largest > 30:
                scale = x.abs().max()
                dist.all_reduce(scale, op=dist.ReduceOp.MAX)
                x = x / scale
            out = x.new_empty(8, 6)
            dist.all_gather_into_tensor(out, x)
            return out if out.sum() > 0 else -out

        return over(capture, metric, ((numbers(call, scale=60.0 if is_odd(call) else 1.0),) for call in range(CALLS)))

    check(script, replays=6)


@pytest.mark.ranks(1)
def test_a_group_of_one() -> None:
    def script(capture: Capture) -> Calls:
        w = torch.zeros(6)

        step = capture(adding(w), state={"w": w})
        for call in range(CALLS):
            yield step(numbers(call).abs() * (-2 if is_odd(call) else 1))
        return {"w": w}

    check(script, replays=14)


@pytest.mark.ranks(2)
def test_tensor_parallel() -> None:
    """A loss that is not finite skips the update."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        parallelize_module(model, mesh(2), {"0": ColwiseParallel(), "2": RowwiseParallel()})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

        def train(x: Tensor) -> Any:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            norm = torch.stack([g.full_tensor().norm() if isinstance(g, DTensor) else g.norm() for g in grads]).norm()
            if torch.isfinite(norm):
                optimizer.step()
                return loss.item()
            return None

        state = {"model": model, "optimizer": optimizer}
        step = capture(train, state=state)
        for call in range(CALLS):
            x = numbers(call, rank=0)
            if is_odd(call):
                x[0] = torch.nan
            yield step(x)
        return state

    check(script, replays=14)


class Setting:
    scale = 1.0


@pytest.mark.ranks(2)
def test_one_rank_misses_a_guard() -> None:
    """Then no rank replays."""

    def script(capture: Capture) -> Calls:
        setting = Setting()
        w = torch.ones(6)

        def metric(x: Tensor) -> Tensor:
            y = x * setting.scale
            dist.all_reduce(y)
            if y.sum() > 0:
                w.add_(y[0])
            return y

        step = capture(metric, state={"w": w})
        for call in range(30):
            setting.scale = 2.0 if dist.get_rank() == 1 and call in (9, 14, 15, 21) else 1.0
            yield step(numbers(call).abs())
        return {"w": w}

    found = check(script, replays=12)
    if not ORACLE_ONLY and dist.get_rank() == 0:
        assert found.steps[0].stats.guard_misses["other ranks"] >= 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("trust", [False, True], ids=["stored", "trusted"])
def test_stored_plans(tmp_path: Path, trust: bool) -> None:
    def script(capture: Capture) -> Calls:
        w = torch.ones(6)

        for _ in range(2):
            step = capture(adding(w), state={"w": w}, plans=tmp_path, trust_plans=trust)
            for call in range(12):
                yield step(numbers(call).abs() * (-1 if call == 8 else 1))
        return {"w": w}

    check(script, replays=6)


@pytest.mark.ranks(2)
def test_beside_eager() -> None:
    """Every third call runs twice."""

    def script(capture: Capture) -> Calls:
        w = torch.ones(6)

        step = capture(adding(w), state={"w": w}, verify_every=3)
        for call in range(20):
            yield step(numbers(call).abs() * (-1 if call in (8, 9, 13) else 1))
        return {"w": w}

    check(script, replays=3)


def after_a_write(x: Tensor, w: Tensor) -> Tensor:
    dist.all_reduce(x)
    w.add_(1)
    return x if x.sum() > 0 else -x


def on_the_way(x: Tensor, w: Tensor) -> Tensor:
    work = dist.all_reduce(x, async_op=True)
    y = w * 2 if w.sum() > 0 else w
    work.wait()
    return x + y


def in_place(x: Tensor, w: Tensor) -> Tensor:
    dist.all_reduce(w)
    return x if x.sum() + w.sum() > 0 else -x


def between_writes(x: Tensor, w: Tensor) -> Tensor:
    dist.all_reduce(w)
    y = x if x.sum() + w.sum() > 0 else -x
    w.mul_(0.5)
    return y


def of_a_state(function: Callable[..., Tensor]) -> Script:
    def script(capture: Capture) -> Calls:
        w = torch.ones(6)
        step = capture(lambda x: function(x + 1, w), state={"w": w}, agree=True)
        for call in range(12):
            yield step(numbers(call))
        return {"w": w}

    return script


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [after_a_write, in_place, between_writes], ids=lambda f: f.__name__)
def test_after_a_write(function: Callable[..., Tensor]) -> None:
    """The write is put off until all ranks know the answer."""
    check(of_a_state(function), replays=5)


@pytest.mark.ranks(2)
def test_the_remedy() -> None:
    def script(capture: Capture) -> Calls:
        def metric(x: Tensor) -> Tensor:
            y = x + 1
            dist.all_reduce(y)
            return y if y.sum() > 0 else -y

        return over(capture, metric, ((numbers(call),) for call in range(6)), tail=False)

    check_refused(script, "a collective .* was sent", remedy="agree=True")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("function", [on_the_way], ids=lambda f: f.__name__)
def test_before_a_collective_has_ended(function: Callable[..., Tensor]) -> None:
    """What does not depend on the collective is read before it."""

    def script(capture: Capture) -> Calls:
        w = torch.ones(6)
        step = capture(lambda x: function(x + 1, w), state={"w": w})
        for call in range(CALLS):
            w.fill_(-1.0 if is_odd(call) else 1.0)
            yield step(numbers(call))
        return {"w": w}

    check(script, replays=10)


def random_step(draw: random.Random, w: Tensor) -> Callable[[Tensor], Any]:
    """Collectives, noise and questions in any order; then a write that depends on the answers."""
    plan = [
        draw.choice(["reduce", "noise", "ask own", "ask all", "gather", "scale"]) for _ in range(draw.randint(3, 9))
    ]
    bounds = [draw.uniform(-4, 4) for _ in plan]

    def step(x: Tensor) -> Any:
        y, answers = x * 1.0, 0
        for each, bound in zip(plan, bounds, strict=True):
            if each == "reduce":
                y = y.clone()
                dist.all_reduce(y)
                y = y / 2
            elif each == "noise":
                y = y + torch.rand_like(y) / 8
            elif each == "scale":
                y = y * 1.5
            elif each == "gather":
                out = y.new_empty(2 * y.shape[0], *y.shape[1:])
                dist.all_gather_into_tensor(out, y)
                y = out[: y.shape[0]] - out[y.shape[0] :] / 2
            elif each == "ask own":
                if x.sum() > bound * 4:
                    answers += 1
                    y = y + 1
            else:
                total = y.sum()
                dist.all_reduce(total)
                if total > bound:
                    answers += 2
                    y = -y
        w.add_(y[0], alpha=float(answers + 1))
        return y

    return step


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("part", range(6))
def test_random_steps(part: int) -> None:
    """Few kinds of data, so that answers come again."""
    replays = 0
    for seed in range(6 * part, 6 * part + 6):

        def script(capture: Capture, seed: int = seed) -> Calls:
            draw = random.Random(seed)
            w = torch.zeros(6)
            step = capture(random_step(draw, w), state={"w": w})
            kinds = [draw.randint(0, 2) for _ in range(CALLS)]
            for kind in kinds:
                yield step(numbers(7 * seed + kind))
            return {"w": w}

        found = check_right(script, lambda f, *, state=None, **o: agreeing(f, state=state, strict=False, **o))
        if not ORACLE_ONLY:
            replays += found.steps[0].stats.replays
    assert ORACLE_ONLY or replays >= 30
