"""Steps of DistributedDataParallel leave what eager leaves, whatever the settings of the wrapper."""

import contextlib
import dataclasses
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import inputs, training
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over
from test_refusals import check_refused
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

REPLAYS = 20
CALLS = 32  # DDP makes its buckets anew in its second iteration, and two recordings must be equal


class Net(nn.Module):
    def __init__(self, norm: str = "layer", dropout: float = 0.0, checkpoints: bool = False, width: int = 32) -> None:
        super().__init__()
        self.up = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.middle = nn.Linear(width, width)
        self.down = nn.Linear(width, 4)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.norm(self.up(x))))
        x = checkpoint(self.middle, x, use_reentrant=False) if self.checkpoints else self.middle(x)
        return self.down(x)  # type: ignore[no-any-return]


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


@dataclasses.dataclass
class Setting:
    """How a model is wrapped and trained. ``wrapper``: arguments of the wrapper; buckets of 1 KB by default, several
    for the model."""

    wrapper: dict[str, Any] = dataclasses.field(default_factory=dict)
    net: Callable[[], nn.Module] = Net
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    none: bool = True  # gradients are None between steps
    parts: int = 1  # of a batch: all but the last go through no_sync()
    autocast: bool = False
    clip: bool = False

    def wrapped(self) -> DistributedDataParallel:
        return DistributedDataParallel(self.net(), **{"bucket_cap_mb": 0.001, **self.wrapper})

    def script(self, capture: Capture, **options: Any) -> Calls:
        model = self.wrapped()
        optimizer = self.optimizer(model)

        def forward(x: Tensor) -> Tensor:
            with torch.autocast("cpu", enabled=self.autocast):
                return model(x)  # type: ignore[no-any-return]

        step = training(
            *(model, optimizer),
            none=self.none,
            parts=self.parts,
            within=lambda last: contextlib.nullcontext() if last else model.no_sync(),
            clip=self.clip,
            forward=forward,
        )
        captured = capture(step, state=[model, optimizer], **options)
        dtype = next(model.parameters()).dtype
        for call, x in enumerate(inputs(CALLS, 12, 8)):
            x = (x + dist.get_rank()).to(dtype)
            # Some calls run eagerly, and a forward of evaluation comes between.
            yield (step if call in (15, 21, 22) else captured)(x)
            if call == 18:
                model.eval()
                with torch.no_grad():
                    yield model(x)
                model.train()
        return [model, optimizer]


VIEWS = {"gradient_as_bucket_view": True}
STATIC = {"static_graph": True}


class Twice(nn.Module):
    """Two biases with one gradient, as in cells of recurrent networks."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(8, 5), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(torch.tanh(x))  # type: ignore[no-any-return]


UNALIGNED = partial(Net, width=29)
SETTINGS = {
    "default": Setting(),
    "one bucket": Setting({"bucket_cap_mb": 25}),
    "views": Setting(VIEWS),
    "zeroed": Setting(none=False),
    "zeroed views": Setting(VIEWS, none=False),
    "static": Setting(STATIC),
    "static views": Setting({**STATIC, **VIEWS}, net=partial(Net, "batch")),
    "buffers": Setting(net=partial(Net, "batch")),
    "own buffers": Setting({"broadcast_buffers": False}, net=partial(Net, "batch")),
    "accumulation": Setting(parts=3),
    "accumulation in views": Setting(VIEWS, net=partial(Net, "batch"), parts=2, none=False),
    "search": Setting({"find_unused_parameters": True}),
    "search in views": Setting({**VIEWS, "find_unused_parameters": True}, net=partial(Net, "batch"), parts=2),
    "static search": Setting({**STATIC, "find_unused_parameters": True}),
    "dropout": Setting(net=partial(Net, dropout=0.3)),
    "checkpoints": Setting(net=partial(Net, checkpoints=True)),
    "autocast": Setting(autocast=True),
    "clipped": Setting(VIEWS, clip=True),
    "momentum": Setting(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "fused": Setting(VIEWS, optimizer=partial(adamw, fused=True)),
    "one by one": Setting(optimizer=partial(adamw, foreach=False)),
    "half": Setting(VIEWS, net=lambda: Net().bfloat16()),
    **{
        f"equal gradients, {name}": Setting(net=Twice, optimizer=optimizer)
        for name, optimizer in {
            "fused": partial(adamw, fused=True),
            "foreach": partial(adamw, foreach=True),
            "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True),
        }.items()
    },
    # Gradients begin anywhere in the buckets, and optimizers read them there.
    "unaligned": Setting(net=UNALIGNED, optimizer=partial(adamw, fused=True)),
    "unaligned, one by one": Setting(net=UNALIGNED, optimizer=partial(adamw, foreach=False)),
    "unaligned, foreach": Setting(net=UNALIGNED, optimizer=partial(adamw, foreach=True)),
    "unaligned, zeroed": Setting(net=UNALIGNED, optimizer=partial(adamw, fused=True), none=False),
    "unaligned, momentum": Setting(
        net=UNALIGNED, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    ),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", ["default", "views"])
def test_one_rank(name: str) -> None:
    check_equal(SETTINGS[name].script, replays=REPLAYS)


@pytest.mark.sampled(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks(name: str) -> None:
    check_equal(SETTINGS[name].script, replays=REPLAYS)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["default", "static views", "buffers", "accumulation in views"])
def test_four_ranks(name: str) -> None:
    check_equal(SETTINGS[name].script, replays=REPLAYS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_steps_that_synchronize_at_some_calls(views: bool) -> None:
    """Each micro-step is a call: whether the next forward broadcasts buffers depends on the one before."""

    def script(capture: Capture) -> Calls:
        model = Setting({"gradient_as_bucket_view": views}, net=partial(Net, "batch")).wrapped()
        optimizer = adamw(model)

        def step(x: Tensor, synchronizes: bool) -> Tensor:
            with contextlib.nullcontext() if synchronizes else model.no_sync():
                loss = model(x).square().mean()
                loss.backward()
            if synchronizes:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        calls = ((x + dist.get_rank(), call % 3 == 2) for call, x in enumerate(inputs(48, 12, 8)))
        return over(capture, step, calls, state=[model, optimizer])

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_two_wrapped_models_in_a_step() -> None:
    def script(capture: Capture) -> Calls:
        first, second = Setting().wrapped(), Setting(VIEWS, net=lambda: nn.Linear(4, 4)).wrapped()
        optimizers = [adamw(first), adamw(second)]

        def step(x: Tensor) -> Tensor:
            loss: Tensor = second(first(x)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        calls = (x + dist.get_rank() for x in inputs(CALLS, 4, 8))
        return over(capture, step, calls, state=[first, second, *optimizers])

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_parameters_that_do_not_train() -> None:
    def net() -> nn.Module:
        model = Net()
        model.middle.requires_grad_(False)
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["up.bias"])
        return model

    check_equal(Setting(VIEWS, net=net).script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_a_stored_plan_serves_a_new_model(tmp_path: Path) -> None:
    plans = tmp_path / str(dist.get_rank())
    setting = SETTINGS["accumulation in views"]
    check_equal(setting.script, replays=REPLAYS, plans=plans)
    (step,) = check_equal(setting.script, replays=REPLAYS, plans=plans, trust_plans=True)
    assert ORACLE_ONLY or step.stats.recordings == 0


@pytest.mark.ranks(2)
def test_another_wrapped_model() -> None:
    def script(capture: Capture) -> Calls:
        training = types.SimpleNamespace()

        def wrap(norm: str) -> None:
            training.model = Setting(VIEWS, net=partial(Net, norm)).wrapped()
            training.optimizer = adamw(training.model)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = training.model(x).square().mean()
            loss.backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            return loss.detach()

        wrap("layer")
        captured = capture(step, state=training)
        for call, x in enumerate(inputs(CALLS, 4, 8)):
            if call == 12:
                wrap("batch")
            yield captured(x + dist.get_rank())
        return training

    found = check_right(script)
    assert ORACLE_ONLY or all(run[0].replays > 4 for run in (found.stats[11], found.stats[-1]))
    assert ORACLE_ONLY or found.stats[-1][0].replays > found.stats[11][0].replays + 8


class Hooked(DistributedDataParallel):
    """A wrapper with a communication hook."""

    def __init__(self, module: nn.Module, hook: Any) -> None:
        super().__init__(module)
        if callable(hook):
            self.register_comm_hook(None, hook)
        else:
            self._register_builtin_comm_hook(hook)


REFUSED: dict[str, tuple[Callable[[nn.Module], DistributedDataParallel], str]] = {
    "hook": (partial(Hooked, hook=default_hooks.bf16_compress_hook), "bf16_compress_hook"),
    "built-in hook": (partial(Hooked, hook=dist.BuiltinCommHookType.FP16_COMPRESS), "FP16_COMPRESS"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_of_the_wrapper(name: str) -> None:
    wrap, word = REFUSED[name]

    def script(capture: Capture) -> Calls:
        model = wrap(Net())
        optimizer = adamw(model)

        calls = (x + dist.get_rank() for x in inputs(8, 4, 8))
        return over(capture, training(model, optimizer), calls, state=[model, optimizer], tail=False)

    check_refused(script, word, remedy="leave")


class Idle(Net):
    """It has parameters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(4, 4)


@pytest.mark.ranks(2)
def test_unused_parameters() -> None:
    """The reducer asks the other ranks about them."""
    setting = Setting({"find_unused_parameters": True}, net=Idle)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_right(setting.script)
    assert ORACLE_ONLY or (found.steps[0].stats.replays == 0 and "static_graph" in found.steps[0].stats.refusals[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", [STATIC, {**STATIC, **VIEWS}], ids=["", "views"])
def test_unused_parameters_of_a_static_graph(how: dict[str, Any]) -> None:
    check_equal(Setting(how, net=Idle).script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_parts_of_a_batch_as_calls_with_a_search_for_unused_parameters() -> None:
    """What one call notes, the next one reads in C++."""

    def script(capture: Capture) -> Calls:
        model = Setting({"find_unused_parameters": True}).wrapped()

        def step(x: Tensor, synchronizes: bool) -> Tensor:
            with contextlib.nullcontext() if synchronizes else model.no_sync():
                loss: Tensor = model(x).square().mean()
                loss.backward()
            return loss.detach()

        calls = ((x + dist.get_rank(), call % 3 == 2) for call, x in enumerate(inputs(CALLS, 12, 8)))
        return over(capture, step, calls, state=model)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = check_right(script)
    assert ORACLE_ONLY or any("which parameters it has used" in each for each in found.steps[0].stats.refusals)


def micro_steps(capture: Capture, parts: int, none: bool, before: Callable[[int, nn.Module], None]) -> Calls:
    """Each part of a batch is a call of the captured function, which the script puts in no_sync()."""
    model = Setting().wrapped()
    optimizer = adamw(model)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = model(x).square().mean()
        loss.backward()
        return loss.detach()

    captured = capture(step, state=[model, optimizer])
    for call, x in enumerate(inputs(60, 4, 8)):
        before(call, model)
        last = call % parts == parts - 1
        with contextlib.nullcontext() if last else model.no_sync():
            yield captured(x + dist.get_rank())
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=none)
    return [model, optimizer]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("none", [False, True])
@pytest.mark.parametrize("parts", [2, 4])
def test_parts_of_a_batch_as_calls(parts: int, none: bool) -> None:
    check_right(lambda capture: micro_steps(capture, parts, none, lambda call, model: None), replays=40)


@pytest.mark.ranks(2)
def test_a_forward_without_a_backward_pass() -> None:
    """Validation without no_grad(): the reducer reduces the gradients of the next part, though it is in no_sync()."""

    def validate(call: int, model: nn.Module) -> None:
        if call % 15 == 14:
            model(torch.ones(4, 8))

    check_right(lambda capture: micro_steps(capture, 3, True, validate), replays=20)


@pytest.mark.ranks(2)
def test_a_forward_in_the_step_without_a_backward_pass() -> None:
    def script(capture: Capture) -> Calls:
        model = Setting().wrapped()

        def step(x: Tensor) -> Tensor:
            model(x).square().mean().backward()
            return model(x).square().mean().detach()  # type: ignore[no-any-return]

        captured = capture(step, state=model)
        for x in inputs(12, 4, 8):
            yield captured(x + dist.get_rank())
            with model.no_sync():
                model(x + dist.get_rank()).square().mean().backward()
            yield [parameter.grad for parameter in model.parameters()]
        return model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_right(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("change", ["unused", "hook"])
def test_a_reducer_in_another_state(change: str) -> None:
    """A parameter without a gradient leaves a reduction that has not ended: eager refuses all later steps. A built-in
    communication hook has no trace in Python."""

    def script(capture: Capture) -> Calls:
        model = Setting().wrapped()
        optimizer = adamw(model)

        class Short(Net):
            def forward(self, x: Tensor) -> Tensor:
                return self.up(x)  # type: ignore[no-any-return]

        captured = capture(training(model, optimizer, none=False), state=[model, optimizer])
        for call, x in enumerate(inputs(20, 4, 8)):
            if call == 12 and change == "hook":
                model._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
            if change == "unused":
                model.module.__class__ = Short if call == 12 else Net
            try:
                yield captured(x + dist.get_rank())
            except RuntimeError as error:
                yield str(error)[:60]
        return [model, optimizer]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_right(script, replays=6)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("views", [False, True])
def test_a_wrapper_that_the_state_does_not_name(views: bool) -> None:
    """A Trainer of a library wraps the model itself."""

    def script(capture: Capture) -> Calls:
        model = Net("batch")
        trainer = types.SimpleNamespace(model=DistributedDataParallel(model, gradient_as_bucket_view=views))
        optimizer = adamw(model)

        def step(x: Tensor) -> Tensor:
            loss: Tensor = trainer.model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        calls = (x + dist.get_rank() for x in inputs(CALLS, 4, 8))
        return over(capture, step, calls, state=[model, optimizer])

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(2)
def test_a_wrapper_out_of_reach() -> None:
    wrappers = []

    def script(capture: Capture) -> Calls:
        model = Net()
        wrappers.append(DistributedDataParallel(model))

        def step(x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss.detach()

        return over(capture, step, (x + dist.get_rank() for x in inputs(8, 4, 8)), state=model)

    check_refused(script, "C\\+\\+ hook", remedy="DistributedDataParallel module that .* in state=")


@pytest.mark.ranks(2)
def test_join_stays_eager() -> None:
    """Ranks with fewer batches shadow the collectives of the others, outside the captured function."""

    def script(capture: Capture) -> Calls:
        model = Setting().wrapped()
        optimizer = adamw(model)

        captured = capture(training(model, optimizer), state=[model, optimizer])
        for x in inputs(8, 4, 8):
            yield captured(x + dist.get_rank())
        with Join([model]):
            for x in list(inputs(6, 4, 8))[: 3 + 3 * dist.get_rank()]:
                captured(x)
        for x in inputs(8, 4, 8):
            yield captured(x + dist.get_rank())
        return [model, optimizer]

    check_right(script)


@pytest.mark.ranks(2)
def test_collectives_of_the_users_in_hooks() -> None:
    """A hook of the user's starts them in the backward pass, beside those of the wrapper."""

    def script(capture: Capture) -> Calls:
        model = Setting(VIEWS).wrapped()
        sums = torch.zeros(4)

        def hook(gradient: Tensor) -> None:
            sums.copy_(gradient.flatten()[:4])
            work = dist.all_reduce(sums, async_op=True)
            if work is not None:
                work.wait()

        model.module.down.weight.register_hook(hook)

        def step(x: Tensor) -> Tensor:
            model.zero_grad()
            loss: Tensor = model(x).square().mean()
            loss.backward()
            return loss.detach()

        calls = (x + dist.get_rank() for x in inputs(CALLS, 4, 8))
        return over(capture, step, calls, state=[model, sums])

    check_equal(script, replays=REPLAYS)
