"""Meshes that a step asks for: `mesh["tp"]`, groups and coordinates of meshes, equal meshes, meshes made inside.

Each is compared with an eager twin, bit for bit.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over
from test_collectives_by_hand import CALLS, REPLAYS, drawn
from test_refusals import check_refused
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

MESHES: dict[str, DeviceMesh] = {}


def mesh_of(kind: str) -> DeviceMesh:
    """Made once per process."""
    if kind not in MESHES:
        names = ("dp", "tp")
        if kind == "other order":
            MESHES[kind] = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=names)
        elif kind in ("a", "b"):
            MESHES[kind] = DeviceMesh("cpu", list(range(4)), mesh_dim_names=("all",))
        else:
            MESHES[kind] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        if MESHES[kind].ndim > 1:
            MESHES[kind]._flatten("both")
    return MESHES[kind]


def by_name(x: Tensor, mesh: DeviceMesh) -> Tensor:
    tp = mesh["tp"]
    return DTensor.from_local(x, tp, [Shard(0)]).redistribute(tp, [Replicate()]).to_local() * 2


def by_both_names(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return (DTensor.from_local(x, mesh["dp", "tp"], [Shard(0), Replicate()]) * 2).full_tensor()


def flattened(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return (DTensor.from_local(x, mesh["dp", "tp"]._flatten("both"), [Shard(0)]) + 1).full_tensor()


def group_by_name(x: Tensor, mesh: DeviceMesh) -> Tensor:
    y = x * 2
    dist.all_reduce(y, group=mesh["tp"].get_group())
    dist.broadcast(y, group_src=1, group=mesh.get_group("dp"))
    return y


def coordinates(x: Tensor, mesh: DeviceMesh) -> Tensor:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    return x * (1 + mesh["tp"].get_local_rank()) + coordinate[0] + mesh["dp"].size()


def distributed(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return distribute_tensor(x, mesh["tp"], [Shard(0)]).to_local() * 3


def returned(x: Tensor, mesh: DeviceMesh) -> Tensor:
    return DTensor.from_local(x * 2, mesh["dp"], [Shard(0)])


BODIES: list[Callable[[Tensor, DeviceMesh], Tensor]] = [
    *(by_name, by_both_names, flattened, group_by_name, coordinates, distributed, returned),
]


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_asked_of_a_mesh(body: Callable[[Tensor, DeviceMesh], Tensor]) -> None:
    def script(capture: Capture) -> Calls:
        mesh = mesh_of("two dims")
        return over(capture, lambda x: body(x, mesh), map(drawn, range(CALLS)))

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_another_mesh_is_a_miss(body: Callable[[Tensor, DeviceMesh], Tensor]) -> None:
    """The ranks lie in another order, under the same names."""

    def script(capture: Capture) -> Calls:
        holder = {"mesh": mesh_of("two dims")}
        step = capture(lambda x: body(x, holder["mesh"]))
        for call in range(3 * CALLS):
            holder["mesh"] = mesh_of("two dims" if call // 6 % 2 == 0 else "other order")
            yield step(drawn(call))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert not stats.refusals and stats.replays >= REPLAYS, stats


@pytest.mark.ranks(4, timeout=60)
def test_names_are_guarded() -> None:
    def script(capture: Capture) -> Calls:
        mesh = mesh_of("two dims")

        def body(x: Tensor, name: str) -> Tensor:
            y = x * 2
            dist.all_reduce(y, group=mesh[name].get_group())
            return y

        return over(capture, body, ((drawn(call), ["dp", "tp"][call // 3 % 2]) for call in range(3 * CALLS)))

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert not stats.refusals and stats.variants == 2 and stats.replays >= 2 * CALLS, stats


@pytest.mark.ranks(4, timeout=60)
def test_equal_meshes() -> None:
    """Made by hand twice: DTensor takes one for the other."""

    def script(capture: Capture) -> Calls:
        a, b = mesh_of("a"), mesh_of("b")

        def body(x: Tensor) -> Tensor:
            return (DTensor.from_local(x, a, [Shard(0)]) + DTensor.from_local(x + 1, b, [Shard(0)])).full_tensor()

        return over(capture, body, map(drawn, range(CALLS)))

    check_equal(script, replays=REPLAYS)


@pytest.mark.ranks(4, timeout=60)
def test_trains_by_names(tmp_path: Path) -> None:
    """Gradients are averaged over one dim of the mesh, and activations gathered over the other; stored and trusted."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        mesh = mesh_of("two dims")
        model = nn.Linear(6, 6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        for again in range(2):

            def train(x: Tensor) -> Tensor:
                optimizer.zero_grad()
                y = DTensor.from_local(model(x), mesh["tp"], [Shard(0)])
                loss = y.redistribute(mesh["tp"], [Replicate()]).to_local().square().mean()
                loss.backward()
                for p in model.parameters():
                    dist.all_reduce(p.grad, group=mesh["dp"].get_group())
                optimizer.step()
                return loss.detach()

            state = {"model": model, "optimizer": optimizer}
            step = capture(train, state=state, plans=str(tmp_path), trust_plans=bool(again))
            for call in range(CALLS):
                yield step(drawn(call))
        return {"model": model, "optimizer": optimizer}

    check_equal(script, replays=REPLAYS)


def made(x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", list(range(dist.get_world_size())))
    return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()


def made_of_data(x: Tensor) -> Tensor:
    mesh = DeviceMesh("cpu", x[0, :2].argsort())
    return DTensor.from_local(x, mesh, [Shard(0)]).full_tensor()


def listed(x: Tensor) -> Tensor:
    total = funcol.all_reduce(x, "sum", dist.group.WORLD)
    return x if total.tolist()[0][0] > -1e9 else -x


def as_an_array(x: Tensor) -> Tensor:
    total = funcol.all_reduce(x, "sum", dist.group.WORLD)
    return x if total.numpy()[0, 0] > -1e9 else -x


@pytest.mark.ranks(2, timeout=60)
@pytest.mark.parametrize(
    ("body", "words", "remedy"),
    [
        (made, "DeviceMesh at .*makes a device mesh", "outside the captured function"),
        (made_of_data, "DeviceMesh at .*makes a device mesh", "outside the captured function"),
        (listed, "Tensor.tolist.*reads a tensor on the host", "outside the captured function"),
        (as_an_array, "Tensor.numpy.*reads a tensor on the host", "outside the captured function"),
    ],
    ids=lambda case: case.__name__ if callable(case) else "",
)
def test_refused(body: Callable[[Tensor], Tensor], words: str, remedy: str) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(3)
        step = capture(lambda x: body(x))
        for call in range(6):
            numbers: Any = torch.arange(24.0).reshape(4, 6) + call
            yield step(numbers)
        return {}

    check_refused(script, words, remedy=remedy)


@pytest.mark.ranks(4, timeout=60)
@pytest.mark.parametrize("by_dtensor", [False, True], ids=["group", "dtensor"])
def test_an_equal_mesh_with_other_groups_is_a_miss(by_dtensor: bool) -> None:
    """A rank that replays must use the groups that a rank uses which runs eagerly."""

    def script(capture: Capture) -> Calls:
        holder = {"mesh": mesh_of("a")}

        def body(x: Tensor, scale: float) -> Tensor:
            y = x * scale
            if by_dtensor:
                return DTensor.from_local(y, holder["mesh"], [Shard(0)]).full_tensor()
            dist.all_reduce(y, group=holder["mesh"].get_group())
            return y

        step = capture(body)
        for call in range(3 * CALLS):
            holder["mesh"] = mesh_of("a" if call < CALLS else "b")
            alone = dist.get_rank() == 0 and call in (CALLS, 2 * CALLS)
            yield step(drawn(call), 3.0 if alone else 2.0)
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        assert not found.steps[0].stats.refusals, found.steps[0].stats
