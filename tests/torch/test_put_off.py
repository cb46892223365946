"""What a step writes before it asks about data: a replay puts it off until it has met the recorded answer."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY, Calls, Capture, Script, check_right, over
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

CALLS = 40


def network(dropout: bool) -> nn.Sequential:
    between = nn.Dropout(0.2) if dropout else nn.Tanh()
    return nn.Sequential(
        nn.Linear(4, 8), nn.BatchNorm1d(8), between, nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
    )


def batches(overflow: Callable[[int], bool]) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    found = []
    for call in range(CALLS):
        x, wanted = torch.randn(6, 4, generator=draw), torch.randn(6, 2, generator=draw)
        found.append((x, wanted * (float("inf") if overflow(call) else 1.0)))
    return found


def now_and_then(call: int) -> bool:
    return call in (1, 9, 10, 22, 30)


def scaled(
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
    overflow: Callable[[int], bool] = now_and_then,
    dropout: bool = False,
    clips: bool = False,
    **options: Any,
) -> Script:
    """Training with batch norm and a `GradScaler`, which asks whether gradients are finite."""

    def script(capture: Capture) -> Calls:
        model = wrap(network(dropout))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=7)

        def step(x: Tensor, wanted: Tensor) -> Tensor:
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (model(x) - wanted).square().mean()
            scaler.scale(loss).backward()
            if clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            return loss.detach()

        state = {"model": model, "optimizer": optimizer, "scaler": scaler}

        def end() -> Any:
            return model, optimizer, scaler.state_dict()

        return over(capture, step, batches(overflow), state=state, end=end, **options)

    return script


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("clips", [False, True], ids=["", "clipped"])
def test_batch_norm_and_a_scaler(dropout: bool, clips: bool) -> None:
    check_right(scaled(dropout=dropout, clips=clips), replays=20)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("rank", [None, 1], ids=["no overflow", "overflow on one rank"])
def test_batch_norm_and_a_scaler_under_ddp(rank: int | None) -> None:
    """The buffers that DDP broadcasts are put off too."""

    def overflow(call: int) -> bool:
        return dist.get_rank() == rank and now_and_then(call)

    check_right(scaled(DistributedDataParallel, overflow, agree=True), replays=15)


@pytest.mark.ranks(1)
def test_an_error_that_the_step_raises() -> None:
    """The averages are eager's, who has written them before."""

    def script(capture: Capture) -> Calls:
        model = network(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: Tensor, wanted: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) - wanted).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
            optimizer.step()
            return loss.detach()

        step = capture(step, state=[model, optimizer])
        for batch in batches(now_and_then):
            try:
                yield step(*batch), list(model.buffers())
            except RuntimeError as error:
                yield str(error), list(model.buffers())
        return model, optimizer

    check_right(script, replays=20)


class Averages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            self.register_buffer(name, torch.zeros(3, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def drawn(seed: int) -> Callable[[Averages, Tensor], Any]:
    """A random step: writes to tensors of the state and to views of these, held or not, questions, and reads, in any
    order."""
    draw = random.Random(seed)
    kinds = ["write", "write", "view", "hold", "held", "read", "ask", "count", "copy"]
    plan = [draw.choice(kinds) for _ in range(draw.randint(4, 14))]
    plan.insert(draw.randint(1, len(plan)), "ask")
    names = [draw.choice("abc") for _ in plan]
    rows = [draw.randrange(3) for _ in plan]
    ends = draw.choice(["result", "result", "state", "written", "held"])

    def step(state: Averages, x: Tensor) -> Any:
        y = x
        held = [state.a[1:], state.b.t()]
        for what, name, row in zip(plan, names, rows, strict=True):
            of_state = getattr(state, name)
            if what == "write":
                of_state.mul_(0.5).add_(y)
            elif what == "view":
                of_state[row].add_(y[row], alpha=0.25)
            elif what == "hold":
                held.append(of_state[row:])
            elif what == "held":
                held[-1].mul_(0.75).add_(y[0, 0])
            elif what == "copy":
                of_state.t().copy_(y.t() * 0.5)
            elif what == "read":
                y = y * 0.5 + of_state
            elif what == "count":
                state.count += 1
            elif (of_state.sum() + y.sum() > 4).item():
                y = y * 2
        if ends == "written":
            state.a.add_(1)
        return {"state": state.b, "held": held[-1]}.get(ends, y)

    return step


@pytest.mark.sampled(4)
@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("part", range(16))
def test_random_steps(part: int) -> None:
    replayed = 0
    for seed in range(part * 12, part * 12 + 12):

        def script(capture: Capture) -> Calls:
            state, body = Averages(), drawn(seed)  # noqa: B023
            step = capture(lambda x: body(state, x), state=state)
            draw = torch.Generator().manual_seed(seed)  # noqa: B023
            for _ in range(24):
                result = step(torch.randn(3, 4, generator=draw))
                yield result, list(state.buffers())
            return state

        found = check_right(script)
        replayed += ORACLE_ONLY or found.steps[0].stats.replays > 0
    assert replayed >= 2


class ActorAndCritic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.critic = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        self.target = copy.deepcopy(self.critic)


@pytest.mark.sampled(3)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW", "RMSprop"])
@pytest.mark.parametrize("none", [False, True], ids=["zeroed", "none"])
@pytest.mark.parametrize("asks", ["distribution", "loss", "norm", "both losses"])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.filterwarnings("ignore:rote")
def test_one_update_before_a_question_about_another(optimizer: str, none: bool, asks: str, steps: int) -> None:
    """The parameters of the critic, its gradients and its optimizer's state are written before the question, and the
    gradients behind it too: the loss of the actor goes through the critic."""

    def script(capture: Capture) -> Calls:
        nets = ActorAndCritic()
        make = getattr(torch.optim, optimizer)
        of_actor, of_critic = (make(net.parameters(), lr=1e-2) for net in (nets.actor, nets.critic))

        def step(x: Tensor, wanted: Tensor) -> Any:
            lost = []
            for _ in range(steps):
                with torch.no_grad():
                    target = wanted + 0.9 * nets.target(torch.cat([x, nets.actor(x)], 1))
                of_critic.zero_grad(set_to_none=none)
                loss = (nets.critic(torch.cat([x, wanted.expand(-1, 2)], 1)) - target).square().mean()
                loss.backward()
                of_critic.step()
                spread = torch.distributions.Normal(nets.actor(x), 0.5, validate_args=asks == "distribution")
                of_actor.zero_grad(set_to_none=none)
                drawn = spread.rsample()
                lost = [-nets.critic(torch.cat([x, drawn], 1)).mean() + spread.log_prob(drawn).mean()]
                lost[0].backward()
                norm = nn.utils.clip_grad_norm_(nets.actor.parameters(), 1.0)
                asked = {"loss": lost[0], "norm": norm, "both losses": lost[0] + loss}.get(asks)
                if asked is None or asked > 0.3:
                    of_actor.step()
                for one, other in zip(nets.target.parameters(), nets.critic.parameters(), strict=True):
                    one.data.lerp_(other.data, 0.05)
            return lost[0].detach()

        state = [nets, of_actor, of_critic]
        draw = torch.Generator().manual_seed(5)
        captured = capture(step, state=state)
        for _ in range(CALLS):
            yield (
                captured(torch.randn(6, 4, generator=draw), torch.randn(6, 1, generator=draw)),
                [parameter.grad for parameter in nets.parameters()],
            )
        return state

    found = check_right(script)
    assert ORACLE_ONLY or found.steps[0].stats.replays >= 8, found.steps[0].stats


@pytest.mark.ranks(1)
def test_large_tensors_are_not_copied() -> None:
    def script(capture: Capture) -> Calls:
        weight = torch.zeros(17 << 20)

        def step(x: Tensor) -> Tensor:
            weight[:4].add_(x)
            return x * 2 if (x.sum() > 0).item() and weight[0].item() > 1e9 else x

        return over(capture, step, torch.ones(12, 4).unbind(), state=weight, tail=False)

    found = check_right(script)
    assert ORACLE_ONLY or "has written a tensor" in str(found.steps[0].stats.refusals)
