"""Policy "best" of `rote.propagation`: models train to the losses of a single device, on meshes of three dims."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rote.propagation
import torch
import torch.nn.functional as F
from models import (
    ConvNet,
    Llama,
    Mlp,
    Sizes,
    cross_entropy,
    inputs,
    llama_over_last,
    replicated,
    sharded_over_last,
    token_batches,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

STEPS = 4
BATCH = 8
# Losses of two orders of summation, in f32.
TOLERANCE = 1e-5
SIZES = Sizes(layers=1, batch=BATCH, heads=8, kv_heads=8, head_dim=4, fused_attention=False)

Batches = Iterator[tuple[Tensor, Tensor]]


@dataclasses.dataclass(frozen=True)
class Model:
    """A model of `test_equality.py`, whole and on a mesh, with its data and an optimizer."""

    whole: Callable[[], nn.Module]
    placed: Callable[[DeviceMesh], nn.Module]
    batches: Callable[[], Batches]
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Callable[[Iterator[nn.Parameter]], torch.optim.Optimizer]
    sharded: bool = True
    """Whether parameters are sharded on a mesh."""


def language_model(**other: Any) -> Model:
    sizes = dataclasses.replace(SIZES, **other)
    return Model(
        lambda: Llama(sizes),
        lambda on: llama_over_last(sizes, on),
        lambda: token_batches(sizes, STEPS),
        cross_entropy,
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    )


def mean_square(found: Tensor, wanted: Tensor) -> Tensor:
    return (found - wanted).square().mean()


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def images() -> Batches:
    """Images need a gradient: without, DTensor's convolutions fail on more than one mesh dim (PyTorch 2.15)."""
    for image in inputs(STEPS, BATCH, 3, 8, 8):
        yield image.requires_grad_(), torch.arange(BATCH) % 10


MODELS: dict[str, Model] = {
    "llama": language_model(),
    "tied llama": language_model(tied=True),
    "mlp": Model(
        Mlp,
        lambda on: sharded_over_last(Mlp(), on),
        lambda: zip(inputs(STEPS, BATCH, 8), inputs(STEPS, BATCH, 8, seed=6), strict=True),
        mean_square,
        sgd,
    ),
    "convolutions": Model(ConvNet, lambda on: replicated(ConvNet(), on), images, F.cross_entropy, sgd, sharded=False),
}


def train(model: nn.Module, of: Model, batches: Batches) -> Iterator[Tensor]:
    """The loss of each step."""
    optimizer = of.optimizer(model.parameters())
    for given, wanted in batches:
        optimizer.zero_grad()
        loss = of.loss(model(given), wanted)
        loss.backward()
        optimizer.step()
        yield loss.detach()


def train_on(on: DeviceMesh, of: Model) -> Iterator[Tensor]:
    """The same on a mesh, the batch sharded over its first dim, unless the parameters are."""
    first: list[Placement] = [Replicate()] * on.ndim
    if on.ndim > 1 or not of.sharded:
        first[0] = Shard(0)

    def placed(tensor: Tensor) -> DTensor:
        return distribute_tensor(tensor.detach(), on, first).requires_grad_(tensor.requires_grad)

    torch.manual_seed(0)
    model = of.placed(on)
    yield from train(model, of, ((placed(a), placed(b)) for a, b in of.batches()))


def mesh_of(sizes: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=tuple(f"dim{i}" for i in range(len(sizes))))


MESHES = [(2, 1, 1), (1, 2, 2), (2, 1, 2), (2, 2, 1)]


def of_ranks(sizes: tuple[int, ...]) -> Any:
    return pytest.param(sizes, marks=pytest.mark.ranks(math.prod(sizes)), id="x".join(map(str, sizes)))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", map(of_ranks, MESHES))
def test_losses_of_one_device_on_three_mesh_dims(sizes: tuple[int, ...], model: str) -> None:
    of = MODELS[model]
    torch.manual_seed(0)
    expected = list(train(of.whole(), of, of.batches()))
    with rote.propagation.install("best"):
        found = [loss.full_tensor() for loss in train_on(mesh_of(sizes), of)]
        stats = rote.propagation.stats()
    assert stats.answered > 10
    torch.testing.assert_close(torch.stack(found), torch.stack(expected), rtol=TOLERANCE, atol=TOLERANCE)
    assert found[0] != found[-1]
