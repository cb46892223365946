"""A replay that fails raises what eager raises, and leaves what eager leaves."""

import signal
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn
from torch.distributed import device_mesh

WARM = 5
PLANNED = ["left", "error"]  # read by an op, which a replay runs as well


class OwnError(ValueError):
    """Of a custom op."""


class Planned:
    """Which call of the planted op raises, and what."""

    left = -1
    error: BaseException | None = None


@torch.library.custom_op("rote_failures::pass_on", mutates_args=())
def pass_on(x: Tensor) -> Tensor:
    Planned.left -= 1
    if Planned.left == 0 and Planned.error is not None:
        raise Planned.error
    return x.clone()


@pass_on.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, or the class and the words of what it raises."""
    try:
        return call()
    except BaseException as error:
        return [type(error).__module__, type(error).__qualname__, str(error)]


FAILING: dict[str, tuple[Callable[[Tensor], Any], Tensor, Tensor]] = {
    "IndexError": (
        lambda x: nn.functional.embedding(x, torch.ones(4, 3)),
        torch.tensor([1, 2]),
        torch.tensor([1, 9]),
    ),
    "LinAlgError": (torch.linalg.cholesky, torch.eye(3), -torch.eye(3)),
    "RuntimeError": (lambda x: torch.multinomial(x, 2), torch.ones(3), torch.zeros(3)),
}


@pytest.mark.parametrize("name", FAILING)
def test_errors_of_ops_keep_their_class(name: str) -> None:
    step, good, bad = FAILING[name]
    table = torch.ones(4, 3)
    if name == "IndexError":
        step = lambda x: nn.functional.embedding(x, table)  # noqa: E731

    def script(capture: Capture) -> Calls:
        captured = capture(lambda x: step(x) * 2, state=table)
        for _ in range(WARM):
            yield captured(good)
        yield attempt(lambda: captured(bad))
        for _ in range(3):
            yield captured(good)
        return {}

    run = check_right(script)
    assert name in str(run.outputs[WARM]["output.1"])
    if not ORACLE_ONLY:
        assert run.stats[-1][0].replays >= WARM - 2 + 3


@pytest.mark.parametrize("passes", ["none", "default", "all"])
@pytest.mark.parametrize("out", ["made", "state"])
def test_an_op_that_fails_half_way_leaves_no_shape_behind(out: str, passes: str) -> None:
    """`lu_solve` turns `out=` round while it works: one that raises leaves it so."""
    torch.manual_seed(0)
    LU, pivots = torch.linalg.lu_factor(torch.randn(2, 3, 3))
    B = torch.randn(2, 3, 3)

    def script(capture: Capture) -> Calls:
        kept = torch.zeros(2, 3, 3)

        def step(pivots: Tensor) -> tuple[Tensor, Tensor]:
            solved = kept if out == "state" else B.clone()
            torch.linalg.lu_solve(LU, pivots, B, left=False, out=solved)
            return solved.flatten(1)[:, 1:3] + 1, solved.transpose(1, 2) * 2

        captured = capture(step, state={"LU": LU, "B": B, "kept": kept}, passes=passes)
        for i in range(WARM + 6):
            yield attempt(lambda: captured(torch.zeros_like(pivots) if i in (WARM, WARM + 2) else pivots))  # noqa: B023
        return {"kept": kept}

    run = check_right(script)
    assert "Pivots" in str(run.outputs[WARM]["output.2"])
    if not ORACLE_ONLY:
        assert run.stats[-1][0].replays >= WARM - 2 + 2


@pytest.mark.parametrize("error", [OwnError("no"), NotImplementedError("not so"), KeyboardInterrupt(), SystemExit(3)])
def test_errors_of_custom_ops_are_the_very_objects(error: BaseException) -> None:
    def script(capture: Capture) -> Calls:
        captured = capture(lambda x: pass_on(x * 2) + 1, ignore=PLANNED)
        for i in range(WARM + 4):
            Planned.left, Planned.error = (1 if i in (WARM, WARM + 1) else -1), error
            try:
                yield captured(torch.arange(3.0) + i)
            except BaseException as raised:
                assert raised is error
                frames = []
                trace = raised.__traceback__
                while trace is not None:
                    frames.append(trace.tb_frame.f_code.co_name)
                    trace = trace.tb_next
                assert "pass_on" in frames, frames
                yield "raised"
        return {}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert run.stats[-1][0].replays == WARM - 2 + 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("passes", ["none", "default", "all"])
def test_what_is_under_way_ends_before_memory_is_used_again(passes: str) -> None:
    """The op after a start fails, before the wait: the next replay must not overwrite what is being sent."""

    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> Tensor:
            sent = (x * 2).sin()
            under_way = funcol.all_reduce(sent, "sum", dist.group.WORLD)
            passed = pass_on(x)
            return under_way + passed

        captured = capture(step, passes=passes, ignore=PLANNED)
        for i in range(WARM + 6):
            Planned.left, Planned.error = (1 if i == WARM + 1 and dist.get_rank() == 0 else -1), OwnError("skip")
            if i == WARM + 1 and dist.get_rank() == 1:
                time.sleep(0.3)  # what the other rank sends is still on its way when it fails
            x = torch.full((1 << 16,), float(i + 1 + dist.get_rank()))
            yield attempt(lambda x=x: captured(x))  # type: ignore[misc]
        return {}

    check_right(script, replays=WARM)


def test_a_signal_during_a_replay_leaves_a_whole_step() -> None:
    """Python learns of it when the replay is over: gradients are where the rest of the step says."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.ones(700, 700) / 700)

        def step(x: Tensor) -> Tensor:
            weight.grad = None
            loss = (x @ weight @ weight @ weight @ weight).sum()
            loss.backward()
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=1e-6)
            return loss

        captured = capture(step, state=weight)
        x, took = torch.ones(700, 700), 0.0
        for i in range(WARM + 3):
            late = i == WARM and captured is not step
            before = signal.signal(signal.SIGALRM, interrupt)
            if late:
                signal.setitimer(signal.ITIMER_REAL, took / 2)
            begin = time.perf_counter()
            try:
                captured(x)
                took = time.perf_counter() - begin
                assert not late
            except KeyboardInterrupt:
                assert late
            finally:
                signal.signal(signal.SIGALRM, before)
            yield [weight.detach().clone(), weight.grad]
        return {"weight": weight}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert run.stats[-1][0].replays == WARM


class Interrupted:
    """Stands where guards look at meshes, and is interrupted there once."""

    def __init__(self, error: type[BaseException]) -> None:
        self.errors = [error]

    @property
    def mesh_stack(self) -> Any:
        if self.errors:
            raise self.errors.pop()
        return ()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_guards_are_checked(error: type[BaseException]) -> None:
    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.ones(3))

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                weight.mul_(0.9)
            return (x * weight.detach()).sum()

        captured = capture(step, state=weight)
        for call in range(WARM + 3):
            yield captured(torch.arange(3.0) + call)
        if captured is not step:
            with (
                mock.patch.object(device_mesh, "_mesh_resources", Interrupted(error), create=True),
                pytest.raises(error),
            ):
                captured(torch.ones(3))
        return None

    check_right(script, replays=1)


class PassOn(torch.autograd.Function):
    """The planted op in the forward and in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return pass_on(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return pass_on(grads[0])


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = PassOn.apply(nn.functional.dropout(torch.tanh(layer(x)), 0.2))
        return self.norm(x)


# Planted ops of a step: of each of 3 layers one forward and one backward, and one for each of 8 parameters' updates.
POINTS = 3 + 3 + 8


@pytest.mark.parametrize("passes", ["none", "default"])
@pytest.mark.parametrize("clears", ["before", "between", "to_zero", "some", "never"])
def test_each_op_of_a_step_fails_in_turn(clears: str, passes: str) -> None:
    """Forward, backward and optimizer: gradients, buffers, parameters, momentum and generators are eager's."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(3)
        model = Layers()
        momentum = [torch.zeros_like(p) for p in model.parameters()]

        def step(x: Tensor) -> Tensor:
            if clears == "before":
                model.zero_grad()
            elif clears == "some":
                model.layers[1].zero_grad()
            loss = model(x).square().mean()
            if clears == "between":
                model.zero_grad()
            elif clears == "to_zero":
                model.zero_grad(set_to_none=False)
            elif clears == "some":
                model.layers[0].zero_grad()
            loss.backward()
            with torch.no_grad():
                for p, m in zip(model.parameters(), momentum, strict=True):
                    m.mul_(0.9).add_(pass_on(p.grad))
                    p.sub_(m, alpha=0.1)
            return loss

        captured = capture(step, state={"model": model, "momentum": momentum}, passes=passes, ignore=PLANNED)
        for i in range(WARM + 2 * POINTS):
            point = (i - WARM) // 2 + 1 if i >= WARM and i % 2 else -1
            Planned.left, Planned.error = point, OwnError(f"at {point}")
            loss = attempt(lambda: captured(torch.randn(3, 4)))
            yield [loss, {f"{i}": p.grad for i, p in enumerate(model.parameters())}, [*model.buffers()], momentum]
        return {"model": model, "momentum": momentum}

    run = check_right(script)
    if not ORACLE_ONLY:
        assert run.stats[-1][0].replays >= 10, run.stats[-1][0]  # beside those that failed, which do not count


@pytest.mark.parametrize("drops", ["all", "one", "by_assignment"])
def test_gradients_stay_where_a_check_fails_first(drops: str) -> None:
    """An op of another library looks at the batch before anything is dropped."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

        def step(x: Tensor) -> Tensor:
            x = pass_on(x)
            if drops == "all":
                model.zero_grad()
            elif drops == "one":
                model[0].zero_grad()
            else:
                model[1].bias.grad = None
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        captured = capture(step, state=model, ignore=PLANNED)
        for i in range(WARM + 6):
            Planned.left, Planned.error = (1 if i in (WARM, WARM + 3) else -1), OwnError("no")
            yield [attempt(lambda: captured(torch.randn(3, 4))), [p.grad for p in model.parameters()]]
        return {"model": model}

    check_right(script, replays=4)


UNUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], Tensor, Tensor]] = {
    "index": (lambda x, i: x[i], torch.tensor([1]), torch.tensor([9])),
    "embedding": (lambda x, i: nn.functional.embedding(i, x.view(-1, 1)), torch.tensor([1]), torch.tensor([9])),
    "target": (lambda x, i: nn.functional.nll_loss(x.expand(1, 4), i), torch.tensor([1]), torch.tensor([9])),
    "scatter": (lambda x, i: x.scatter(0, i, 1.0), torch.tensor([1]), torch.tensor([9])),
    "division": (lambda x, i: 7 // i, torch.tensor([1]), torch.tensor([0])),
    "matrix": (
        lambda x, i: torch.linalg.cholesky(i * torch.eye(2)),
        torch.ones(1),
        -torch.ones(1),
    ),
}


@pytest.mark.parametrize("name", UNUSED)
def test_ops_whose_results_are_not_used_fail_too(name: str) -> None:
    unused, good, bad = UNUSED[name]

    def script(capture: Capture) -> Calls:
        def step(x: Tensor, i: Tensor) -> Tensor:
            unused(x, i)
            return x * 2

        captured = capture(step)
        for i in range(WARM + 4):
            yield attempt(lambda: captured(torch.arange(4.0) + i, bad if i == WARM + 1 else good))  # noqa: B023
        return {}

    check_right(script, replays=WARM - 2 + 3)
