"""Equality with eager on a GPU: its kernels, its generator, its streams, NCCL.

One GPU is enough: one rank with an NCCL group of its own. DTensor leaves out
collectives among one rank, so one case calls them itself.

Without a GPU every case is skipped. `ROTE_TEST_DEVICE=cpu` runs the same cases
on the CPU and gloo instead: that checks the cases, and nothing about CUDA.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F
from models import Sizes, as_dtensor, inputs, llama, mlp, token_batches
from oracle import Calls, Capture, check_equal, check_right, over
from test_equality import STEPS, MakeOptimizer, fused_adamw, sgd, train
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate

DEVICE = os.environ.get("ROTE_TEST_DEVICE", "cuda")
ON_GPU = DEVICE == "cuda"
GENERATOR: Any = torch.cuda if ON_GPU else torch  # owns get_rng_state and set_rng_state


def missing() -> str:
    """Why there is nothing to test on, or nothing."""
    if ON_GPU and not torch.cuda.is_available():
        return "needs a GPU: torch.cuda.is_available() is False"
    if ON_GPU and not dist.is_nccl_available():
        return "needs NCCL: this torch was built without it"
    return ""


pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.ranks(1)]


@functools.cache
def mesh() -> DeviceMesh:
    group = dist.new_group(backend="nccl" if ON_GPU else "gloo")
    return DeviceMesh.from_group(group, DEVICE, mesh_dim_names=("tp",))


def observed(calls: Calls) -> Calls:
    """Every result together with the state of the device's generator after it."""
    while True:
        try:
            result = next(calls)
        except StopIteration as stop:
            return stop.value
        yield result, GENERATOR.get_rng_state()


def on_device(batches: Iterator[tuple[Tensor, ...]]) -> Iterator[tuple[Tensor, ...]]:
    return (tuple(part.to(DEVICE) for part in batch) for batch in batches)


def check_llama(sizes: Sizes, *, dtensor_activations: bool = False, **how: Any) -> None:
    def script(capture: Capture) -> Calls:
        with torch.device(DEVICE):
            model = llama(sizes, mesh(), local_activations=not dtensor_activations)
        batches = on_device(token_batches(sizes, STEPS))
        if dtensor_activations:
            model.table = as_dtensor(model.table, mesh(), Replicate())
            batches = (tuple(as_dtensor(t, mesh(), Replicate()) for t in b) for b in batches)
        optimizer = fused_adamw(model.parameters())
        return (yield from observed(train(capture, model, optimizer, batches, **how)))

    check_equal(script)


LLAMAS = {
    "plain": Sizes(),
    "unfused_attention": Sizes(fused_attention=False),
    "tied": Sizes(tied=True),
    "dropout": Sizes(dropout=0.2, fused_attention=False),
    "dropout_in_fused_attention": Sizes(dropout=0.2),
    "checkpointed": Sizes(checkpoint=True, fused_attention=False),
    "checkpointed_dropout": Sizes(checkpoint=True, dropout=0.2, fused_attention=False),
}


@pytest.mark.parametrize("case", LLAMAS)
def test_local_activations(case: str) -> None:
    check_llama(LLAMAS[case])


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_dtensor_activations(dropout: float) -> None:
    """With dropout, DTensor moves the GPU generator's offset itself."""
    check_llama(Sizes(dropout=dropout, fused_attention=False), dtensor_activations=True)


def test_bf16_autocast() -> None:
    check_llama(Sizes(), around=lambda: torch.autocast(DEVICE, torch.bfloat16))


OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": sgd,
    "sgd_foreach": functools.partial(sgd, foreach=True),
    "adamw_fused": fused_adamw,
    "adamw_fused_tensor_rate": lambda p: fused_adamw(p, lr=torch.tensor(1e-2, device=DEVICE)),
}
if ON_GPU:  # PyTorch has it for accelerators only
    OPTIMIZERS["adamw_capturable"] = functools.partial(torch.optim.AdamW, lr=1e-2, capturable=True)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_learning_rate_changes_every_step(optimizer: str) -> None:
    def script(capture: Capture) -> Calls:
        with torch.device(DEVICE):
            model = mlp(mesh())
        made = OPTIMIZERS[optimizer](model.parameters())
        scheduler = torch.optim.lr_scheduler.LambdaLR(made, lambda i: 1 / (1 + i))
        batches = on_device(zip(inputs(STEPS, 4, 8), inputs(STEPS, 4, 8, seed=6), strict=True))
        how = {"loss_of": F.mse_loss, "between": scheduler.step}
        return (yield from observed(train(capture, model, made, batches, **how)))

    check_equal(script)


def test_collectives() -> None:
    def script(capture: Capture) -> Calls:
        group = (mesh(), 0)
        mean = "avg" if ON_GPU else "sum"  # gloo has no average
        weight = nn.Parameter(torch.randn(8, 8, device=DEVICE))

        def train_step(x: Tensor) -> Tensor:
            hidden = collectives.all_gather_tensor_autograd(x @ weight, 0, group).tanh()
            hidden = collectives.reduce_scatter_tensor_autograd(hidden, "sum", 0, group)
            loss = hidden.square().sum()
            loss.backward()
            with torch.no_grad():
                weight.sub_(collectives.all_reduce(weight.grad, mean, group), alpha=0.01)
                weight.grad = None
            return loss.detach()

        return over(capture, train_step, ((x.to(DEVICE),) for x in inputs(STEPS, 8, 8)), state={"weight": weight})

    check_equal(script)


def saved_and_restored(x: Tensor) -> Tensor:
    state = GENERATOR.get_rng_state()
    first = torch.randn(4, device=x.device)
    GENERATOR.set_rng_state(state)
    return x + first - 2 * torch.randn(4, device=x.device)


def forked(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[0] if ON_GPU else []):
        noise = torch.randn(4, device=x.device)
    return x + noise - 2 * torch.randn(4, device=x.device)


def reseeded(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x + torch.randn(4, device=x.device)


def draws(function: Callable[[Tensor], Tensor], capture: Capture) -> Calls:
    step = capture(function)
    for x in inputs(STEPS, 4):
        yield step(x.to(DEVICE)), torch.randn(2, device=DEVICE)


@pytest.mark.parametrize("function", [saved_and_restored, forked])
def test_generator_saved_and_restored(function: Callable[[Tensor], Tensor]) -> None:
    check_equal(lambda capture: observed(draws(function, capture)))


def test_reseeding_is_right_or_refused() -> None:
    check_right(lambda capture: observed(draws(reseeded, capture)))


def test_on_a_side_stream() -> None:
    """Replays run where eager would: on the stream that is current at the call."""

    def script(capture: Capture) -> Calls:
        device = torch.get_device_module(DEVICE)
        weight = torch.randn(512, 512, device=DEVICE)

        def long(x: Tensor) -> Tensor:
            for _ in range(20):
                x = (x @ weight).tanh()
            weight.add_(x.mean())
            return x

        step = capture(long, state={"weight": weight})
        for i, x in enumerate(inputs(STEPS, 512, 512)):
            x = x.to(DEVICE)
            device.synchronize()
            with device.stream(device.Stream()) if i % 2 else contextlib.nullcontext():
                result = step(x) + 1  # on the same stream: it must see the result
            device.synchronize()
            yield result
        return {"weight": weight}

    check_equal(script)
