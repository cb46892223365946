"""Policy "best" of `rote.propagation`: models train to the losses of a single device, and no rank sends more than with
DTensor's own propagation, on meshes of one, two and three dims."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
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
from sending import sent
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from propagation import dtensor

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


@pytest.mark.sampled(2)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("sizes", [of_ranks(sizes) for sizes in MESHES])
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


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[None]:
    """In name only: nothing moves."""
    dtensor.start()
    yield
    dtensor.stop()


def sent_in_a_step(on: DeviceMesh, of: Model, propagation: AbstractContextManager[object]) -> dict[str, int]:
    """The bytes that this rank sends in the third step, by collective."""
    with propagation:
        steps = train_on(on, of)
        list(itertools.islice(steps, 2))
        with sent() as counted:
            next(steps)
    return dict(counted)


# DTensor takes minutes to place a transformer on three mesh dims.
SENT = [
    (sizes, name)
    for sizes in [(8,), (2, 4), (4, 2), (2, 2, 2)]
    for name in MODELS
    if len(sizes) < 3 or not name.endswith("llama")
]


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("sizes", "model"), SENT, ids=[f"{'x'.join(map(str, s))}-{name}" for s, name in SENT])
def test_no_more_is_sent_than_with_dtensor(eight_ranks: None, sizes: tuple[int, ...], model: str) -> None:
    on, of = mesh_of(sizes), MODELS[model]
    theirs = sent_in_a_step(on, of, nullcontext())
    ours = sent_in_a_step(on, of, rote.propagation.install("best"))
    assert sum(ours.values()) <= sum(theirs.values()), (ours, theirs)
    assert sum(theirs.values()) > 0


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "detach": Tensor.detach,
    "view": lambda x: x.view(1, -1),
    "expand": lambda x: x.expand(1, *x.shape),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("of", VIEWS)
@pytest.mark.parametrize("made", ["mean", "amax"])
def test_a_view_of_a_partial_is_a_view(of: str, made: str) -> None:
    """Of partials other than sums too: these are reduced before other ops."""
    x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh_of((2,)), [Shard(0)])
    with rote.propagation.install("best"):
        partial = getattr(x, made)(0)
        with sent() as counted:
            view = VIEWS[of](partial)
    assert isinstance(partial, DTensor) and isinstance(view, DTensor)
    assert partial.placements[0].is_partial() and view.placements == partial.placements
    assert view.to_local().data_ptr() == partial.to_local().data_ptr()
    assert not counted
