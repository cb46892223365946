"""``rote.capture(step)``: no state is given, and Rote finds what the step uses."""

import copy
import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY, Capture, check_equal, check_right
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

CALLS = 40


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4))


class Trainer:
    def __init__(self, model: Callable[[], nn.Module] = net) -> None:
        self.model = model()
        self.optimizer: torch.optim.Optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 5, 0.9)
        self.loss = nn.CrossEntropyLoss(weight=torch.rand(4))
        self.averages = [parameter.detach().clone() for parameter in self.model.parameters()]

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        with torch.no_grad():
            for average, parameter in zip(self.averages, self.model.parameters(), strict=True):
                average.lerp_(parameter, 0.1)
        return loss.detach()


class Scaled(Trainer):
    def __init__(self) -> None:
        super().__init__()
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


the_trainer: Any = None


def helper(x: Tensor, y: Tensor) -> Tensor:
    return step_of(the_trainer.model, the_trainer.optimizer, x, y)


def of_a_global(x: Tensor, y: Tensor) -> Tensor:
    return helper(x, y)


def of_method(trainer: Trainer, capture: Capture) -> Callable[..., Any]:
    return capture(trainer.step)


def of_closure(trainer: Trainer, capture: Capture) -> Callable[..., Any]:
    model, optimizer = trainer.model, trainer.optimizer

    def step(x: Tensor, y: Tensor) -> Tensor:
        return step_of(model, optimizer, x, y)

    return capture(step)


def of_globals(trainer: Trainer, capture: Capture) -> Callable[..., Any]:
    globals()["the_trainer"] = trainer
    return capture(of_a_global)


def of_partial(trainer: Trainer, capture: Capture) -> Callable[..., Any]:
    return capture(functools.partial(step_of, trainer.model, trainer.optimizer))


def of_arguments(trainer: Trainer, capture: Capture) -> Callable[..., Any]:
    captured = capture(step_of)
    return lambda x, y: captured(trainer.model, trainer.optimizer, x, y)


def of_decorated_method(trainer: Trainer, capture: Capture) -> Callable[..., Any]:
    kind = type("Decorated", (type(trainer),), {"step": capture(type(trainer).step)})
    trainer.__class__ = kind
    return lambda x, y: trainer.step(x, y)


def of_callable(trainer: Trainer, capture: Capture) -> Callable[..., Any]:
    class Step:
        def __call__(self, x: Tensor, y: Tensor) -> Tensor:
            return trainer.step(x, y)

    return capture(Step())


HOLDERS = [of_method, of_closure, of_globals, of_partial, of_arguments, of_decorated_method, of_callable]


def nothing(trainer: Trainer, i: int) -> None: ...


def schedules(trainer: Trainer, i: int) -> None:
    if i:
        trainer.scheduler.step()


def loads(trainer: Trainer, i: int) -> None:
    if i == 14:
        trainer.model.load_state_dict({key: 0.5 * one for key, one in trainer.model.state_dict().items()})
        trainer.optimizer.load_state_dict(copy.deepcopy(trainer.optimizer.state_dict()))


def evaluates(trainer: Trainer, i: int) -> None:
    trainer.model.train(i % 8 < 6)


def replaces_the_optimizer(trainer: Trainer, i: int) -> None:
    if i == 14:
        trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.1, momentum=0.9)


def replaces_the_model(trainer: Trainer, i: int) -> None:
    if i == 14:
        trainer.model = net()


def freezes(trainer: Trainer, i: int) -> None:
    if i in (14, 22):
        trainer.model[0].requires_grad_(i == 22)  # type: ignore[index]


BETWEEN = [nothing, schedules, loads, evaluates, replaces_the_optimizer, replaces_the_model, freezes]


def script_of(
    holder: Callable[[Trainer, Capture], Callable[..., Any]],
    between: Callable[[Trainer, int], None],
    kind: Callable[[], Trainer] = Trainer,
    **options: Any,
) -> Any:
    def script(capture: Capture) -> Any:
        trainer = kind()
        captured = holder(trainer, functools.partial(capture, **options))
        for i in range(CALLS):
            between(trainer, i)
            yield captured(torch.randn(6, 4), torch.randint(4, (6,))), trainer.averages
        return trainer.model, trainer.optimizer

    return script


@pytest.mark.sampled(10)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("holder", HOLDERS)
def test_finds(holder: Any, between: Any) -> None:
    check_right(script_of(holder, between), replays=12)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("between", [nothing, schedules])
@pytest.mark.parametrize("holder", [of_method, of_decorated_method])
def test_scaled(holder: Any, between: Any) -> None:
    check_right(script_of(holder, between, Scaled), replays=20)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", [{"verify": 5}, {"verify_every": 3}])
@pytest.mark.parametrize("holder", HOLDERS)
def test_verified(holder: Any, options: dict[str, Any]) -> None:
    check_right(script_of(holder, nothing, **options), replays=8)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("holder", [of_method, of_closure, of_arguments])
def test_stored_plans(holder: Any, trust: bool, tmp_path: Any) -> None:
    for _ in range(3):
        found = check_right(script_of(holder, nothing, plans=tmp_path, trust_plans=trust), replays=20)
        if not ORACLE_ONLY:
            assert not found.steps[0].stats.refusals


def test_an_optimizer_beside_a_given_state() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        captured = capture(trainer.step, state=trainer.model)
        for i in range(CALLS):
            schedules(trainer, i)
            yield captured(torch.randn(6, 4), torch.randint(4, (6,)))
        return trainer.model, trainer.optimizer

    check_equal(script)


def test_an_optimizer_that_the_step_does_not_call() -> None:
    """Its rates are no business of the step's."""

    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def gradients(x: Tensor, y: Tensor) -> Tensor:
            trainer.optimizer.zero_grad()
            loss = trainer.loss(trainer.model(x), y)
            loss.backward()
            return loss.detach()

        captured = capture(gradients)
        for i in range(CALLS):
            schedules(trainer, i)
            yield captured(torch.randn(6, 4), torch.randint(4, (6,)))
            trainer.optimizer.step()
        return trainer.model, trainer.optimizer

    check_equal(script)


def test_a_function_of_tensors_alone() -> None:
    def script(capture: Capture) -> Any:
        captured = capture(lambda x: x.exp().sum())
        for _ in range(12):
            yield captured(torch.randn(3))

    check_equal(script, replays=9)


def plain(model: nn.Sequential) -> nn.Module:
    return model


def data_parallel(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Sequential) -> nn.Module:
    fully_shard(model[0])
    return fully_shard(model)


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("wraps", [plain, data_parallel, sharded, tensor_parallel])
def test_of_ranks(wraps: Callable[[nn.Sequential], nn.Module]) -> None:
    def script(capture: Capture) -> Any:
        model = wraps(nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def step(x: Tensor, y: Tensor) -> Tensor:
            return step_of(model, optimizer, x, y)

        captured = capture(step)
        for _ in range(32):
            yield captured(torch.randn(6, 4), torch.randint(4, (6,)))
        return model, optimizer

    check_equal(script, replays=18)


@pytest.mark.parametrize("by_method", [False, True])
def test_in_a_region(by_method: bool) -> None:
    """Gradients reach parameters that nobody has named."""

    def script(capture: Capture) -> Any:
        model, scale, shift = net(), nn.Parameter(torch.rand(4)), torch.rand(4)
        holder = types.SimpleNamespace(forward=lambda x: (model(x) * scale + shift).tanh())
        region = capture(holder.forward if by_method else (lambda x: holder.forward(x)), region=True)
        optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.1)
        for i in range(CALLS):
            model.train(i % 8 < 6)
            if i % 9 == 8:
                shift.mul_(2)
            x = torch.randn(6, 4, requires_grad=True)
            optimizer.zero_grad()
            loss = region(x).square().mean()
            loss.backward()
            yield loss.detach(), x.grad
            optimizer.step()
        return model, scale

    check_equal(script)


@pytest.mark.parametrize("name", ["args", "kwargs"])
def test_a_state_under_a_name_of_arguments(name: str) -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        captured = capture(step_of, state={name: [trainer.model, trainer.optimizer]})
        for _ in range(CALLS):
            yield captured(trainer.model, trainer.optimizer, torch.randn(6, 4), torch.randint(4, (6,)))
        return trainer.model

    check_equal(script)
