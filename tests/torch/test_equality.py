"""A captured run equals its eager twin bit for bit: losses, parameters, gradients,
buffers, optimizer state and RNG state, over at least 20 replayed steps."""

import contextlib
import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import (
    ConvNet,
    Llama,
    Mlp,
    Sizes,
    as_dtensor,
    column_then_row,
    cross_entropy,
    inputs,
    llama,
    llama_over_last,
    mesh,
    mlp,
    replicated,
    token_batches,
)
from oracle import Calls, Capture
from oracle import check_equal_with_each as check_equal
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel

STEPS = 26
MakeOptimizer = Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]

fused_adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)


def train(
    capture: Capture,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[tuple[Tensor, ...]],
    loss_of: Callable[..., Tensor] = cross_entropy,
    around: Callable[[], Any] = contextlib.nullcontext,
    between: Callable[[], None] = lambda: None,
) -> Calls:
    """The usual loop; `around` is entered in the step, `between` runs after each."""

    def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad()
        with around():
            loss = loss_of(model(tokens), labels)
            loss.backward()
        optimizer.step()
        return loss.detach()

    state = {"model": model, "optimizer": optimizer}
    step = capture(train_step, state=state)
    for tokens, labels in batches:
        yield step(tokens, labels)
        between()
    return state


def check_llama(sizes: Sizes, world: int, optimizer: MakeOptimizer = fused_adamw, **how: Any) -> None:
    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(world))
        batches = token_batches(sizes, STEPS)
        return (yield from train(capture, model, optimizer(model.parameters()), batches, **how))

    check_equal(script)


@pytest.mark.sampled(4)
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "sizes",
    [Sizes(), Sizes(tied=True), Sizes(complex_rope=True), Sizes(fused_attention=False)],
    ids=["plain", "tied", "complex_rope", "unfused_attention"],
)
def test_tensor_and_sequence_parallel(sizes: Sizes) -> None:
    check_llama(sizes, 2)


@pytest.mark.ranks(1)
def test_single_rank() -> None:
    check_llama(Sizes(), 1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_dtensor_activations(tied: bool) -> None:
    sizes = Sizes(tied=tied, fused_attention=False)

    def script(capture: Capture) -> Calls:
        model = dtensor_llama(sizes, 2)
        batches = token_batches(sizes, STEPS, mesh(2), [Replicate()])
        return (yield from train(capture, model, fused_adamw(model.parameters()), batches))

    check_equal(script)


def dtensor_llama(sizes: Sizes, world: int) -> Llama:
    model = llama(sizes, mesh(world), local_activations=False)
    model.table = as_dtensor(model.table, mesh(world), Replicate())
    return model


@pytest.mark.ranks(4, timeout=400)  # four processes, which propagate on 2-D meshes
def test_2d_mesh_with_sharded_batch() -> None:
    sizes = Sizes(fused_attention=False, batch=4, layers=1)

    def script(capture: Capture) -> Calls:
        model = llama_over_last(sizes, mesh(2, 2))
        batches = token_batches(sizes, STEPS, mesh(2, 2), [Shard(0), Replicate()])
        return (yield from train(capture, model, fused_adamw(model.parameters()), batches))

    check_equal(script)


UNEVEN = Sizes(
    vocabulary=257, hidden=130, heads=6, kv_heads=3, feed_forward=171, sequence=15, layers=1
)  # where activations are local tensors, each rank's share has to be equal


@pytest.mark.ranks(3)
@pytest.mark.parametrize("activations", ["local", "dtensor"])
def test_sizes_that_do_not_divide(activations: str) -> None:
    if activations == "local":
        return check_llama(UNEVEN, 3)
    sizes = dataclasses.replace(UNEVEN, feed_forward=170, sequence=16, fused_attention=False)

    def script(capture: Capture) -> Calls:
        model = dtensor_llama(sizes, 3)
        batches = token_batches(sizes, STEPS, mesh(3), [Replicate()])
        return (yield from train(capture, model, fused_adamw(model.parameters()), batches))

    check_equal(script)


@pytest.mark.ranks(2)
def test_loss_parallel() -> None:
    sizes = Sizes()

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2), logits=Shard(-1))
        batches = token_batches(sizes, STEPS)
        how = {"around": loss_parallel}
        return (yield from train(capture, model, fused_adamw(model.parameters()), batches, **how))

    check_equal(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("activations", ["local", "dtensor"])
def test_dropout(activations: str) -> None:
    sizes = Sizes(dropout=0.2, fused_attention=False)
    if activations == "local":
        return check_llama(sizes, 2)

    def script(capture: Capture) -> Calls:
        model = dtensor_llama(sizes, 2)
        batches = token_batches(sizes, STEPS, mesh(2), [Replicate()])
        return (yield from train(capture, model, fused_adamw(model.parameters()), batches))

    check_equal(script)


@pytest.mark.ranks(2)
def test_accumulation_with_the_optimizer_inside() -> None:
    sizes = Sizes()

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2))
        optimizer = fused_adamw(model.parameters())

        def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for part, truth in zip(tokens.unbind(), labels.unbind(), strict=True):
                loss = cross_entropy(model(part), truth) / 3
                loss.backward()
                total += loss.detach()
            optimizer.step()
            return total

        state = {"model": model, "optimizer": optimizer}
        step = capture(train_step, state=state)
        batches = token_batches(sizes, 3 * STEPS)
        for micro in zip(batches, batches, batches, strict=True):
            yield step(*(torch.stack(part) for part in zip(*micro, strict=True)))
        return state

    check_equal(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cleared", ["to_none", "to_zero"])
def test_accumulation_with_the_optimizer_outside(cleared: str) -> None:
    sizes = Sizes()

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2))
        optimizer = fused_adamw(model.parameters())

        def micro_step(tokens: Tensor, labels: Tensor) -> Tensor:
            loss = cross_entropy(model(tokens), labels) / 3
            loss.backward()
            return loss.detach()

        step = capture(micro_step, state={"model": model})
        for i, (tokens, labels) in enumerate(token_batches(sizes, 3 * STEPS)):
            gradients = [p.grad for p in model.parameters()]
            loss = step(tokens, labels)
            kept = [p.grad is g for p, g in zip(model.parameters(), gradients, strict=True)]
            yield loss, kept, [p.grad for p in model.parameters()]
            if i % 3 == 2:
                optimizer.step()
                for parameter in model.parameters():
                    if cleared == "to_none":
                        parameter.grad = None
                    else:
                        parameter.grad.zero_()
        return {"model": model, "optimizer": optimizer}

    check_equal(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("foreach", [True, False], ids=["foreach", "for_loop"])
def test_gradient_clipping(foreach: bool) -> None:
    sizes = Sizes()

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2))
        optimizer = fused_adamw(model.parameters())

        def train_step(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens), labels)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            optimizer.step()
            return loss.detach(), norm

        state = {"model": model, "optimizer": optimizer}
        step = capture(train_step, state=state)
        for tokens, labels in token_batches(sizes, STEPS):
            yield step(tokens, labels)
        return state

    check_equal(script)


@pytest.mark.ranks(2)
def test_bf16_autocast() -> None:
    check_llama(Sizes(), 2, around=lambda: torch.autocast("cpu", torch.bfloat16))


@pytest.mark.ranks(2)
def test_bf16_parameters() -> None:
    sizes = Sizes()

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2)).to(torch.bfloat16)
        batches = token_batches(sizes, STEPS)
        return (yield from train(capture, model, fused_adamw(model.parameters()), batches))

    check_equal(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_activation_checkpointing(dropout: float) -> None:
    check_llama(Sizes(dropout=dropout, checkpoint=True, fused_attention=False), 2)


sgd = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "sgd_foreach": functools.partial(sgd, foreach=True),
    "sgd_nesterov_decay": functools.partial(sgd, nesterov=True, weight_decay=0.1),
    "adamw_fused": fused_adamw,
    "adamw_fused_amsgrad": functools.partial(fused_adamw, amsgrad=True),
    "adamw_capturable": functools.partial(torch.optim.AdamW, lr=1e-2, foreach=True, capturable=True),
}


def allow_capturable_on_cpu() -> None:
    """PyTorch lists the devices for `capturable`; the arithmetic is the same on a CPU."""
    adam = importlib.import_module("torch.optim.adam")
    adam._get_capturable_supported_devices = lambda *_, **__: ["cpu"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizer(optimizer: str) -> None:
    allow_capturable_on_cpu()
    check_mlp(OPTIMIZERS[optimizer])


def check_mlp(
    make_optimizer: MakeOptimizer,
    make_scheduler: Callable[[torch.optim.Optimizer], Any] | None = None,
) -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = make_optimizer(model.parameters())
        between = make_scheduler(optimizer).step if make_scheduler else lambda: None
        batches = zip(inputs(STEPS, 4, 8), inputs(STEPS, 4, 8, seed=6), strict=True)
        how = {"loss_of": F.mse_loss, "between": between}
        return (yield from train(capture, model, optimizer, batches, **how))

    check_equal(script)


SCHEDULES: dict[str, tuple[MakeOptimizer, Any]] = {
    "sgd_float": (sgd, 0.1),
    "sgd_foreach_float": (functools.partial(sgd, foreach=True), 0.1),
    "adamw_fused_float": (fused_adamw, 1e-2),
    "adamw_fused_tensor": (fused_adamw, "tensor"),
    "adamw_capturable_float": (OPTIMIZERS["adamw_capturable"], 1e-2),
    "adamw_capturable_tensor": (OPTIMIZERS["adamw_capturable"], "tensor"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_learning_rate_changes_every_step(schedule: str) -> None:
    allow_capturable_on_cpu()
    make, rate = SCHEDULES[schedule]

    def optimizer(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return make(parameters, lr=torch.tensor(1e-2) if rate == "tensor" else rate)

    def halve(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (1 + i))

    check_mlp(optimizer, halve)


@pytest.mark.ranks(2)
def test_parameter_groups_with_their_own_rates() -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = torch.optim.AdamW(
            [
                {"params": model.up.parameters(), "lr": 1e-2, "weight_decay": 0.1},
                {"params": model.down.parameters(), "lr": 2e-2, "weight_decay": 0.0},
            ],
            fused=True,
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
        batches = zip(inputs(STEPS, 4, 8), inputs(STEPS, 4, 8, seed=6), strict=True)
        how = {"loss_of": F.mse_loss, "between": scheduler.step}
        return (yield from train(capture, model, optimizer, batches, **how))

    check_equal(script)


@pytest.mark.ranks(2)
def test_convolutions_with_a_sharded_batch() -> None:
    def script(capture: Capture) -> Calls:
        model = replicated(ConvNet(), mesh(2))
        optimizer = fused_adamw(model.parameters())
        labels = torch.arange(8) % 10
        batches = (
            (as_dtensor(images, mesh(2), Shard(0)), as_dtensor(labels, mesh(2), Shard(0)))
            for images in inputs(STEPS, 8, 3, 8, 8)
        )
        how = {"loss_of": F.cross_entropy}
        return (yield from train(capture, model, optimizer, batches, **how))

    check_equal(script)


@pytest.mark.ranks(2)
def test_buffers_written_by_the_step() -> None:
    """Batch norm on local tensors: running statistics and a step counter."""

    class Normed(Mlp):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(super().forward(x))

    def script(capture: Capture) -> Calls:
        model = column_then_row(Normed(), mesh(2))
        optimizer = sgd(model.parameters())
        batches = zip(inputs(STEPS, 4, 8), inputs(STEPS, 4, 8, seed=6), strict=True)
        return (yield from train(capture, model, optimizer, batches, loss_of=F.mse_loss))

    check_equal(script)


@pytest.mark.ranks(2)
def test_evaluation_beside_training() -> None:
    sizes = Sizes(dropout=0.1)

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2))
        optimizer = fused_adamw(model.parameters())

        def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = cross_entropy(model(tokens), labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        @torch.no_grad()
        def evaluate(tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = model(tokens)
            return cross_entropy(logits, labels), (logits.argmax(-1) == labels).float().mean()

        state = {"model": model, "optimizer": optimizer}
        step = capture(train_step, state=state)
        judge = capture(evaluate, state={"model": model})
        for tokens, labels in token_batches(sizes, STEPS):
            yield step(tokens, labels)
            model.eval()
            yield judge(tokens, labels)
            model.train()
        return state

    check_equal(script)


@pytest.mark.ranks(2)
def test_two_captured_functions_share_one_model() -> None:
    sizes = Sizes()

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2))
        first, second = fused_adamw(model.parameters()), sgd(model.parameters(), lr=1e-3)

        def predict_next(tokens: Tensor, labels: Tensor) -> Tensor:
            first.zero_grad()
            loss = cross_entropy(model(tokens), labels)
            loss.backward()
            first.step()
            return loss.detach()

        def flatten(tokens: Tensor) -> Tensor:
            second.zero_grad(set_to_none=False)
            loss = model(tokens).pow(2).mean()
            loss.backward()
            second.step()
            return loss.detach()

        one = capture(predict_next, state={"model": model, "optimizer": first})
        two = capture(flatten, state={"model": model, "optimizer": second})
        for tokens, labels in token_batches(sizes, STEPS):
            yield one(tokens, labels)
            yield two(tokens)
        return {"model": model, "first": first, "second": second}

    check_equal(script)


@pytest.mark.ranks(2)
def test_explicit_redistribution() -> None:
    """A script that moves activations itself: all-to-all, reduce-scatter, partial sums."""

    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(as_dtensor(torch.randn(8, 8), mesh(2), Shard(0)))

        def train_step(x: DTensor) -> Tensor:
            hidden = (x.redistribute(placements=[Shard(1)]) @ weight).tanh()
            hidden = hidden.redistribute(placements=[Shard(0)])
            loss = hidden.square().sum().full_tensor()
            loss.backward()
            with torch.no_grad():
                weight.sub_(weight.grad, alpha=0.01)
                weight.grad = None
            return loss.detach()

        step = capture(train_step, state={"weight": weight})
        for x in inputs(STEPS, 8, 8):
            yield step(as_dtensor(x, mesh(2), Shard(0)))
        return {"weight": weight}

    check_equal(script)
