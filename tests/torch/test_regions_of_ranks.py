"""Regions inside of FSDP2, DistributedDataParallel and tensor parallel modules leave what eager leaves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import test_ddp
import test_fsdp
import torch
from extent import EVERYTHING
from models import Llama, Mlp, Sizes, as_dtensor, cross_entropy, llama, llama_over_last, mesh, token_batches
from oracle import ORACLE_ONLY, Calls, Capture, check_same, local_of, run, run_eager
from test_regions import Wrapped, check_regions, check_steps, inputs, region, trained
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard


def blocks(state: Any) -> list[nn.Module]:
    return list(state[0].blocks)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "name",
    [
        "default",
        "mixed precision",
        "accumulation",
        "checkpoints",
        "tied, mixed precision",
        "tied, mixed precision, accumulation",
    ],
)
def test_fsdp_of_one_rank(name: str) -> None:
    check_steps(test_fsdp.SETTINGS[name].script, blocks)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "name",
    test_fsdp.SETTINGS if EVERYTHING else ["buffers", "dropout in checkpoints", "columns", "tied, mixed precision"],
)
def test_fsdp_of_two_ranks(name: str) -> None:
    check_steps(test_fsdp.SETTINGS[name].script, blocks)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", test_fsdp.OF_FOUR if EVERYTHING else ["tensor parallel, mixed precision"])
def test_fsdp_of_four_ranks(name: str) -> None:
    check_steps(test_fsdp.OF_FOUR[name].script, blocks)


@pytest.mark.ranks(2)
def test_settings_of_fsdp_that_whole_steps_refuse() -> None:
    """They are outside of a region."""
    setting = test_fsdp.Setting({"offload_policy": CPUOffloadPolicy(pin_memory=False)})
    check_steps(setting.script, blocks)


def module_of(state: Any) -> list[nn.Module]:
    return [state[0].module]


# Checkpoints inside a region are refused.
OF_DDP = [name for name in test_ddp.SETTINGS if name != "checkpoints"] if EVERYTHING else ["static views", "autocast"]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OF_DDP)
def test_ddp_of_two_ranks(name: str) -> None:
    check_steps(test_ddp.SETTINGS[name].script, module_of)


def dtensor_llama() -> Llama:
    model = llama(Sizes(fused_attention=False), mesh(2), local_activations=False)
    model.table = as_dtensor(model.table, mesh(2), Replicate())
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("distributed", [False, True])
def test_tensor_parallel_blocks(distributed: bool) -> None:
    def script(capture: Capture) -> Calls:
        model = dtensor_llama() if distributed else llama(Sizes(dropout=0.1), mesh(2))
        placed = (mesh(2), [Replicate()]) if distributed else ()
        return trained(capture, model, token_batches(Sizes(), 28, *placed), lambda model: model.layers, cross_entropy)

    check_regions(script)


@pytest.mark.ranks(2)
def test_verified_blocks_of_two_ranks() -> None:
    def script(capture: Capture) -> Calls:
        model = llama(Sizes(dropout=0.1), mesh(2))
        return trained(capture, model, token_batches(Sizes(), 28), lambda model: model.layers, cross_entropy)

    expected, found = run_eager(script), run(script, partial(region, verify=3))
    check_same(expected, found)
    for handle in found.steps if not ORACLE_ONLY else []:
        stats = handle.stats
        assert stats.verified >= 3 and stats.backward.verified >= 3 and stats.replays >= 20, stats


class Two(nn.Module):
    """Returns what a block makes, and something that is computed of it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *given: Tensor) -> tuple[Tensor, Tensor]:
        y = self.block(*given)
        return y, y.sin() * y


class UsesTwo(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.region = Two(block)

    def forward(self, *given: Tensor) -> Tensor:
        y, z = self.region(*given)
        return y * z + z.tanh() - y  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("distributed", [False, True])
def test_results_of_which_one_is_computed_of_another(distributed: bool) -> None:
    def script(capture: Capture) -> Calls:
        model = dtensor_llama() if distributed else llama(Sizes(dropout=0.1), mesh(2))
        placed = (mesh(2), [Replicate()]) if distributed else ()
        model.layers = nn.ModuleList(map(UsesTwo, model.layers))
        batches = token_batches(Sizes(), 28, *placed)
        return trained(capture, model, batches, lambda model: [each.region for each in model.layers], cross_entropy)

    check_regions(script)


@pytest.mark.ranks(4, timeout=400)  # four processes, which propagate on 2-D meshes
def test_blocks_on_a_mesh_of_two_dims() -> None:
    sizes = Sizes(fused_attention=False, batch=4, layers=1)

    def script(capture: Capture) -> Calls:
        batches = token_batches(sizes, 28, mesh(2, 2), [Shard(0), Replicate()])
        return trained(capture, llama_over_last(sizes, mesh(2, 2)), batches, lambda model: model.layers, cross_entropy)

    check_regions(script)


def gathered(module: nn.Module) -> nn.Module:
    return fully_shard(module, mesh=test_fsdp.line(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


def reduced(module: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(module)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [None if parameter.grad is None else local_of(parameter.grad) for parameter in module.parameters()]


def flattened(module: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"), use_orig_params=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["state", "reach"])
@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize(
    ("wrap", "name"),
    [(gathered, "FSDP2"), (reduced, "DistributedDataParallel"), (flattened, "FullyShardedDataParallel")],
)
def test_modules_with_wrappers_inside_run_as_they_are(
    wrap: Callable[[nn.Module], nn.Module], name: str, twice: bool, way: str
) -> None:
    """Hooks of these wrappers read gradients within the backward: not one call may be cut off."""

    def script(capture: Capture) -> Calls:
        inner = wrap(Mlp())
        outer = Wrapped(inner) if way == "state" else Wrapped(nn.Identity())
        if way == "reach":
            outer.region.forward = lambda x: inner(x)
        capture(outer, strict=False)
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for x in inputs(8, 4, 8):
            loss = outer(x).float().square().mean()
            if twice:
                loss = loss + outer(x + 1).float().mean()
            loss.backward()
            optimizer.step()
            yield loss.detach(), *gradients(inner)
            optimizer.zero_grad()
        return None

    if ORACLE_ONLY:
        return
    expected = run_eager(script)
    with pytest.warns(UserWarning, match=rf"{name}.*inside"):
        found = run(script, region)
    check_same(expected, found)
    assert all(handle.stats.replays == 0 for handle in found.steps)


class Branching(nn.Module):
    """Calls a module with a wrapper in some calls only."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(8, 8), inner

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        y = self.first(x).tanh()
        return self.inner(y) if extra else y  # type: ignore[no-any-return]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [gathered, reduced])
@pytest.mark.parametrize("begin", [1, 5])
def test_a_wrapper_that_later_calls_reach(wrap: Callable[[nn.Module], nn.Module], begin: int) -> None:
    def script(capture: Capture) -> Calls:
        model = Branching(wrap(Mlp()))
        capture(model, strict=False)
        for i, x in enumerate(inputs(10, 4, 8)):
            loss = model(x, i >= begin).float().square().mean()
            loss.backward()
            yield loss.detach(), *gradients(model)
            model.zero_grad()
        return None

    if ORACLE_ONLY:
        return
    expected = run_eager(script)
    with pytest.warns(UserWarning, match=r"inside the region"):
        check_same(expected, run(script, region))
