"""A step that keeps something in an attribute at every call: a replay leaves there what eager leaves."""

import dataclasses
import functools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import update
from oracle import ORACLE_ONLY, Capture, check_equal, check_equal_with_each, check_right
from test_unread import LOOKS, NAME
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune

CALLS = 30


class Doubled(dict[Any, Any]):
    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value * 2)


class Inner:
    def __init__(self) -> None:
        self.logs: dict[str, Any] = {}
        self.losses: list[float] = []


class Trainer:
    other: Any = None

    def __init__(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.1), nn.Linear(6, 2))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.kept: Any = None
        self.before = torch.zeros(2)
        self.losses: list[Any] = []
        self.same_losses = self.losses
        self.logs: dict[Any, Any] = {"epoch": 0}
        self.doubled_logs = Doubled()
        self.inner = Inner()

    def train(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return update(self.net, self.optimizer, x)


def of_a_tensor(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = loss


def of_the_result(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = loss
    return loss


def of_a_used_graph(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = y
    return loss


def of_two_names(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = trainer.other = y.detach()
    return loss


def of_a_view(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.other = y.detach()
    trainer.kept = trainer.other[:, :1]
    return trainer.other


def of_a_parameter(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = trainer.net[0].weight
    return loss


def of_a_view_of_a_parameter(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = trainer.net[0].weight.detach()[:2]
    return loss


def of_an_argument(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = x
    return loss


def of_a_dict(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = {"loss": loss, "size": x.shape[0], "parts": [y.detach(), (loss, None)]}
    return trainer.kept


def of_a_list_in_two_places(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = trainer.other = [loss]
    return loss


def of_a_tuple_in_many_places(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    pair = loss, y.detach()
    trainer.kept = pair
    trainer.other = [pair, {"pair": (1, pair), ("a", 1): pair}, ()]
    return pair


def of_a_number(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = loss.item()
    return loss


def of_numbers(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = {"loss": loss.item(), "rows": [row.sum().item() for row in y], "y": (y.detach(), y[0, 0].item())}
    trainer.other = y.argmax().item()
    return loss


def of_a_number_twice(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = loss.item()
    trainer.kept = y.sum().item()
    return loss


def of_a_number_that_is_read(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = loss.item()
    return loss * 2 if trainer.kept > 0.2 else loss


def of_numbers_that_are_read(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = {"loss": loss.item()}
    return loss * sum(trainer.kept.values())


def of_a_number_that_is_read_in_the_dict(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = loss.item()
    return loss * vars(trainer)["kept"]


def of_a_number_that_is_added_to(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = loss.item()
    trainer.kept += 1
    return loss


def of_a_number_under_two_names(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = found = loss.item()
    return loss * found


def of_a_sum_of_numbers(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.before = trainer.before + loss.item()
    return loss


def into_a_list(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.losses.append(loss)
    trainer.losses.append({"number": loss.item(), "y": y.detach()})
    return loss


def into_a_dict(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.logs["loss"] = loss.item()
    trainer.logs[0] = [loss, x.shape[0]]
    for i, row in enumerate(y):
        trainer.logs[f"row {i}"] = row.sum().item()
    return loss


def of_an_inner_object(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.net.last = loss.item()
    trainer.inner.logs = {"loss": loss.item()}
    trainer.inner.losses = [y.sum().item()]
    trainer.kept = loss
    return loss


def into_a_new_dict(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = {"number": loss.item()}
    trainer.kept["loss"] = loss
    return loss


def into_a_list_that_is_counted(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.losses.append(loss.item())
    return loss * len(trainer.losses)


def into_a_list_that_is_read_before(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    if trainer.losses:
        loss = loss * 2
    trainer.losses.append(loss.item())
    return loss


def into_a_list_that_has_another_name(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.losses.append(loss.item())
    return loss * sum(trainer.same_losses)


def into_a_list_from_a_variable(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    losses = trainer.losses
    losses.append(loss.item())
    return loss


def into_a_dict_that_is_added_to(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.logs["sum"] = loss.item()
    trainer.logs["sum"] += 1
    return loss


def into_a_dict_of_its_own_class(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.doubled_logs["loss"] = loss.item()
    return loss


def into_a_dict_that_is_replaced(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.logs["loss"] = loss.item()
    trainer.logs = {"loss": loss}
    return loss


def into_a_new_dict_with_a_name(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    logs: dict[str, Any] = {}
    trainer.logs = logs
    trainer.logs["loss"] = loss.item()
    return loss * sum(logs.values())


def by_a_number_as_a_key(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.logs[loss.item()] = loss
    return loss


def while_it_is_read(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.logs["loss"] = [loss.item(), len(trainer.logs)]
    trainer.losses.append((loss.item(), len(trainer.losses)))
    return loss


def of_a_constant(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = "trained"
    return loss


def of_a_gradient(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = trainer.net[0].weight.grad
    return loss


def set_twice(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = y.detach()
    trainer.kept = trainer.kept.exp() + loss
    return trainer.kept.sum()


def set_by_text(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    setattr(trainer, "".join(["ke", "pt"]), loss)
    return loss


def accumulated(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.before = trainer.before.detach() * 0.9 + loss
    return loss


def taken_away(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.kept = y
    del trainer.kept
    trainer.kept = loss
    return loss


def set_through_a_property(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.doubled = loss  # type: ignore[attr-defined]
    return loss


def set_in_the_dict(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    trainer.__dict__["kept"] = loss
    return loss


def set_by_object(trainer: Trainer, loss: Tensor, y: Tensor, x: Tensor) -> Any:
    object.__setattr__(trainer, "kept", loss)
    return loss


# Those that do not replay read the attribute before they set it, or set it unseen.
KEEPS: dict[Callable[..., Any], bool] = {
    of_a_tensor: True,
    of_the_result: True,
    of_a_used_graph: True,
    of_two_names: True,
    of_a_view: True,
    of_a_parameter: True,
    of_a_view_of_a_parameter: True,
    of_an_argument: True,
    of_a_dict: True,
    of_a_list_in_two_places: True,
    of_a_constant: True,
    of_an_inner_object: True,
    into_a_list: False,
    into_a_dict: False,
    into_a_new_dict: False,
    into_a_list_that_is_counted: False,
    into_a_list_that_is_read_before: False,
    into_a_list_that_has_another_name: False,
    into_a_list_from_a_variable: False,
    into_a_dict_that_is_added_to: False,
    into_a_dict_of_its_own_class: False,
    into_a_dict_that_is_replaced: False,
    into_a_new_dict_with_a_name: False,
    by_a_number_as_a_key: False,
    while_it_is_read: False,
    of_a_number: True,
    of_numbers: True,
    of_a_number_twice: True,
    of_a_number_that_is_read: False,
    of_numbers_that_are_read: False,
    of_a_number_that_is_read_in_the_dict: False,
    of_a_number_that_is_added_to: False,
    of_a_number_under_two_names: False,
    of_a_sum_of_numbers: False,
    of_a_tuple_in_many_places: True,
    of_a_gradient: True,
    set_twice: True,
    set_by_text: True,
    taken_away: True,
    set_through_a_property: True,
    accumulated: False,
    set_in_the_dict: False,
    set_by_object: False,
}


class WithProperty(Trainer):
    @property
    def doubled(self) -> Any:
        return self.kept

    @doubled.setter
    def doubled(self, value: Any) -> None:
        self.kept = value * 2


def nothing(trainer: Trainer, i: int) -> None: ...


def takes_away(trainer: Trainer, i: int) -> None:
    if i % 3 == 0 and "kept" in vars(trainer):
        del trainer.kept


def resets(trainer: Trainer, i: int) -> None:
    if i % 4 == 2:
        trainer.kept = trainer.other = None


def puts_another(trainer: Trainer, i: int) -> None:
    if i % 4 == 2:
        trainer.kept = torch.full((3,), float(i))


def writes(trainer: Trainer, i: int) -> None:
    if isinstance(trainer.kept, Tensor) and not trainer.kept.requires_grad and i % 3 == 1:
        trainer.kept.mul_(2)


def clears(trainer: Trainer, i: int) -> None:
    if i % 7 == 6:
        trainer.losses = []
        trainer.logs.pop("loss", None)
    trainer.logs["epoch"] = i // 4


def goes_over_to_evaluation(trainer: Trainer, i: int) -> None:
    trainer.net.train(i % 5 != 4)


BETWEEN = [nothing, takes_away, resets, puts_another, writes, clears, goes_over_to_evaluation]


def aliases(trainer: Trainer, result: Any) -> list[bool]:
    kept = getattr(trainer, "kept", None)
    inner = trainer.other[0] if type(trainer.other) is list else None
    return [
        kept is result,
        kept is inner,
        kept is trainer.other,
        kept is trainer.net[0].weight,
        kept is trainer.net[0].weight.grad,
    ]


def script_of(keeps: Callable[..., Any], between: Callable[[Trainer, int], None], **options: Any) -> Any:
    def script(capture: Capture) -> Any:
        trainer = WithProperty()

        def step(x: Tensor) -> Any:
            loss, y = trainer.train(x)
            return keeps(trainer, loss, y, x)

        captured = capture(step, state=trainer, **options)
        again = torch.randn(3, 4)
        for i in range(CALLS):
            between(trainer, i)
            x = again if i in (5, 6, 7, 20) else torch.randn(3, 4)
            result = captured(x)
            logged = list(trainer.losses[-3:]), dict(trainer.logs), list(trainer.logs), dict(trainer.doubled_logs)
            logged += dict(trainer.inner.logs), trainer.inner.losses[-3:], getattr(trainer.net, "last", 0)
            yield result, getattr(trainer, "kept", 0), trainer.other, aliases(trainer, result), logged
        return trainer.net, trainer.optimizer, getattr(trainer, "kept", 0), trainer.other

    return script


@pytest.mark.sampled(20)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("keeps", KEEPS)
def test_keeps(keeps: Callable[..., Any], between: Callable[[Trainer, int], None]) -> None:
    replays = 0
    changes_state = between is writes and keeps in (of_a_view_of_a_parameter, of_an_argument)
    if KEEPS[keeps] and not changes_state and between is not takes_away:  # how many attributes there are is guarded
        replays = 12
    check_right(script_of(keeps, between), replays=replays)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", [{"verify": 8}, {"verify_every": 3}, {"passes": "none"}, {"passes": "all"}])
@pytest.mark.parametrize("keeps", [keeps for keeps, replays in KEEPS.items() if replays])
def test_settings(keeps: Callable[..., Any], options: dict[str, Any]) -> None:
    check_right(script_of(keeps, nothing, **options), replays=12)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("keeps", [of_a_tensor, of_a_dict, of_a_view])
def test_stored_plans(keeps: Callable[..., Any], trust: bool, tmp_path: Any) -> None:
    for _ in range(3):
        found = check_right(script_of(keeps, resets, plans=tmp_path, trust_plans=trust), replays=12)
        if not ORACLE_ONLY:
            assert not found.steps[0].stats.refusals


class Looks(Trainer):
    """Reads the attribute in some way, before it is set or after."""

    def __init__(self, look: Callable[[Any], Any]) -> None:
        super().__init__()
        self.look = look

    def step(self, x: Tensor, first: bool) -> Any:
        loss, _ = self.train(x)
        if first:
            loss = loss + self.look(self)
        setattr(self, NAME, loss)
        return loss if first else loss + self.look(self)


def read(way: Callable[[Any], Any], one: Any) -> Any:
    try:
        found = way(one)
    except Exception as error:
        return len(str(type(error)))
    return found if isinstance(found, Tensor) else 1


# Those of dataclasses apart, and those that tell whether an object has a dict of its own yet.
OTHERS = ("repr", "format", "asdict", "history", "referents", "referents, renamed")


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("name", [name for name in LOOKS if name not in OTHERS])
def test_reads(name: str, first: bool) -> None:
    def script(capture: Capture) -> Any:
        one = Looks(functools.partial(read, LOOKS[name]))
        captured = capture(one.step, state=one)
        for _ in range(CALLS):
            yield captured(torch.randn(3, 4), first)
        return one.net

    check_right(script)


@dataclasses.dataclass
class Counted:
    """Setting an attribute does something else too."""

    sets: int = 0
    kept: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        object.__setattr__(self, "sets", vars(self).get("sets", 0) + 1)


class Slots:
    __slots__ = ("kept",)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kept: Any = None
        self.register_buffer("buffer", torch.zeros(()))


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", [Counted, Slots, Holder])
@pytest.mark.parametrize("name", ["kept", "buffer"])
def test_holders(kind: Any, name: str) -> None:
    if name == "buffer" and kind is not Holder:
        pytest.skip("only a module has buffers")

    def script(capture: Capture) -> Any:
        trainer, holder = Trainer(), kind()

        def step(x: Tensor) -> Any:
            loss, _ = trainer.train(x)
            setattr(holder, name, loss)
            return loss

        captured = capture(step, state=[trainer, holder] if kind is Holder else trainer)
        for _ in range(CALLS):
            yield captured(torch.randn(3, 4)), getattr(holder, name), getattr(holder, "sets", 0)

    check_right(script, replays=20 if kind is Holder and name == "kept" else 0)


@pytest.mark.parametrize("by", ["argument", "data"])
def test_a_branch_that_keeps(by: str) -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def step(x: Tensor, keep: bool) -> Any:
            loss, y = trainer.train(x)
            if keep if by == "argument" else bool(x[0, 0] > 0):
                trainer.kept = y.detach()
            return loss

        captured = capture(step, state=trainer)
        for i in range(60):
            yield captured(torch.randn(3, 4), i % 3 == 0), trainer.kept
        return trainer.net

    check_right(script, replays=30)


def test_a_scheduler_reads_what_is_kept() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        rates: list[float] = []

        def rate(epoch: int) -> float:
            rates.append(-1.0 if trainer.kept is None else float(trainer.kept))
            return 0.99**epoch

        scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, rate)

        def step(x: Tensor) -> Any:
            loss, _ = trainer.train(x)
            trainer.kept = loss
            scheduler.step()
            return loss

        captured = capture(step, state=trainer)
        for _ in range(CALLS):
            yield captured(torch.randn(3, 4)), list(rates)
        return trainer.net

    check_right(script)


def test_a_graph_that_is_not_used_up_is_refused() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def step(x: Tensor) -> Any:
            loss, _ = trainer.train(x)
            trainer.kept = trainer.net[0].weight[:2]
            return loss

        captured = capture(step, state=trainer, tail=False)
        for _ in range(12):
            yield captured(torch.randn(3, 4)), trainer.kept

    with pytest.warns(UserWarning, match="puts into closure.*kept a tensor .* with an autograd graph"):
        check_right(script)


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("how", ["weight norm", "spectral norm", "prune", "aux loss"])
def test_modules_that_compute_their_weights(how: str) -> None:
    class Experts(nn.Linear):
        aux: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            self.aux = y.square().mean()
            return y

    def script(capture: Capture) -> Any:
        kind = Experts if how == "aux loss" else nn.Linear
        model = nn.Sequential(kind(4, 6), nn.Tanh(), kind(6, 6), nn.Tanh(), kind(6, 1))
        for layer in (model[0], model[2]):
            if how == "weight norm":
                nn.utils.weight_norm(layer)
            elif how == "spectral norm":
                nn.utils.spectral_norm(layer)
            elif how == "prune":
                prune.l1_unstructured(layer, "weight", 0.3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            if how == "aux loss":
                loss = loss + 0.1 * sum(layer.aux for layer in model if isinstance(layer, Experts))
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state=[model, optimizer])
        for i in range(32):
            yield captured(torch.randn(3, 4)), model[0].weight, getattr(model[2], "aux", 0)
            if i % 6 == 5:
                model.eval()
                with torch.no_grad():
                    yield model(torch.ones(2, 4))
                model.train()
        return model, optimizer

    check_equal_with_each(script, replays=20)


def test_a_cell_of_a_recurrent_step_is_an_argument() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()
        cell = nn.GRUCell(4, 4)

        def step(x: Tensor, hidden: Tensor) -> Any:
            trainer.kept = cell(x, hidden).detach()
            return trainer.train(trainer.kept)[0]

        captured = capture(step, state=[trainer, cell])
        trainer.kept = torch.zeros(3, 4)
        for _ in range(CALLS):
            yield captured(torch.randn(3, 4), trainer.kept), trainer.kept
        return trainer.net

    check_equal(script, replays=20)


class Routed(nn.Module):
    """A block that keeps what it balances by, as routers of experts do, and its output."""

    aux: Any = None
    output: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x).relu()
        self.output = self.down(hidden)
        self.aux = self.output.square().mean()
        return x + self.output


def data_parallel(model: nn.Sequential) -> nn.Module:
    return DistributedDataParallel(model)


def sharded(model: nn.Sequential) -> nn.Module:
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel(model: nn.Sequential) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}
    for block in model:
        parallelize_module(block, mesh, plan)
    return model


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wraps", [data_parallel, sharded, tensor_parallel])
def test_of_ranks(wraps: Callable[[nn.Sequential], nn.Module]) -> None:
    def script(capture: Capture) -> Any:
        blocks = nn.Sequential(Routed(), Routed())
        model = wraps(blocks)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        replicated = [Replicate()]

        def step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            if wraps is tensor_parallel:
                x = distribute_tensor(x, blocks[0].up.weight.device_mesh, replicated)
            loss = model(x).square().mean() + 0.1 * sum(block.aux for block in blocks)
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state=[model, optimizer])
        for i in range(32):
            yield captured(torch.randn(4, 8) + i), [(block.aux, block.output) for block in blocks]
        return model, optimizer

    check_equal(script, replays=20)


class Totals:
    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def total(self) -> float:
        return sum(value for value in self.values.values() if type(value) is float)


class Shared:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__ = values


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("how", ["holder of the dict", "object with the same dict", "dict in a closure"])
@pytest.mark.parametrize("number", [True, False])
def test_the_dict_of_the_object_has_another_name(how: str, number: bool) -> None:
    def script(capture: Capture) -> Any:
        trainer, progress = Trainer(), Shared({"loss": 0.0})
        own, totals, same = vars(progress), Totals(vars(progress)), Shared(vars(progress))
        reads: dict[str, Callable[[], Any]] = {
            "holder of the dict": totals.total,
            "object with the same dict": lambda: same.loss,  # type: ignore[attr-defined]
            "dict in a closure": lambda: own["loss"],
        }
        read = reads[how]

        def step(x: Tensor) -> Any:
            loss, _ = trainer.train(x)
            progress.loss = loss.item() if number else loss  # type: ignore[attr-defined]
            return loss + read()

        captured = capture(step, state=trainer)
        for _ in range(24):
            yield captured(torch.randn(3, 4)), own["loss"]

    check_right(script)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("late", ["settings", "an argument", "a group", "another list"])
def test_a_list_or_dict_that_is_filled_becomes_another_one(late: str) -> None:
    """What the step puts there is read by another name from then on."""

    def script(capture: Capture) -> Any:
        trainer = Trainer()
        settings, given = {"lr": 1.0}, {"lr": 1.0}
        scales: list[Any] = [1.0]

        def step(x: Tensor, given: dict[str, Any]) -> Any:
            trainer.logs["lr"] = 0.5
            trainer.losses.append(1.5)
            for scale in (*scales, settings["lr"], given["lr"]):
                x = x * scale
            return trainer.train(x)[0]

        captured = capture(step, state=trainer)
        for i in range(24):
            if i == 12 and late == "another list":
                trainer.losses = scales
            elif i == 12:
                others: dict[str, Any] = {"settings": settings, "an argument": given}
                trainer.logs = others.get(late, trainer.optimizer.param_groups[0])
            yield captured(torch.randn(3, 4), given), settings, given, scales
        return trainer.net

    check_right(script)


def test_another_thread_sets_the_attribute() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def sets(x: Tensor) -> None:
            trainer.kept = "busy"

        def step(x: Tensor) -> Any:
            thread = threading.Thread(target=sets, args=(x,))
            thread.start()
            thread.join()
            return trainer.train(x)[0]

        captured = capture(step, state=trainer, tail=False)
        for _ in range(14):
            yield captured(torch.randn(3, 4)), trainer.kept
            trainer.kept = "idle"

    found = check_right(script)
    assert ORACLE_ONLY or not found.steps[0].stats.replays


def test_a_step_that_raises_leaves_numbers() -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def step(x: Tensor) -> Any:
            loss, y = trainer.train(x)
            trainer.kept = {"loss": loss.item()}
            if x.shape[0] > 4:
                raise RuntimeError("too large")
            return y.detach()

        captured = capture(step, state=trainer)
        for i in range(24):
            try:
                yield captured(torch.randn(3 + 4 * (i % 6 == 5), 4)), trainer.kept
            except RuntimeError as error:
                yield str(error), trainer.kept, type(trainer.kept["loss"]).__name__

    check_right(script, replays=8)


def test_a_phase_that_two_functions_set() -> None:
    """Each finds what the other has set, at every call."""

    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def step(x: Tensor) -> Any:
            trainer.kept = "train"
            return trainer.train(x)[0]

        @torch.no_grad()
        def evaluate(x: Tensor) -> Any:
            trainer.kept = "evaluation"
            return trainer.net(x).mean()

        steps = capture(step, state=trainer), capture(evaluate, state=trainer)
        for i in range(48):
            yield steps[i % 2](torch.randn(3, 4)), trainer.kept
        return trainer.net

    found = check_right(script)
    assert ORACLE_ONLY or all(step.stats.replays >= 18 for step in found.steps)


def test_memory_that_was_freed_is_not_taken_for_the_states() -> None:
    """Tensors that were part of the state before it was known that nothing reads them."""

    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def step(x: Tensor) -> Any:
            trainer.kept = [x * 2, x.sum()]
            return trainer.kept[1]

        captured = capture(step, state=trainer)
        for _ in range(60):
            yield captured(torch.ones(3))

    found = check_equal(script, replays=50)
    assert ORACLE_ONLY or not found[0].stats.guard_misses


@pytest.mark.parametrize("value", [time.time, lambda: {"at": time.time()}])
def test_a_clock_is_refused(value: Callable[[], Any]) -> None:
    def script(capture: Capture) -> Any:
        trainer = Trainer()

        def step(x: Tensor) -> Any:
            trainer.kept = value()
            return trainer.train(x)[0]

        captured = capture(step, state=trainer, tail=False)
        for _ in range(12):
            yield captured(torch.randn(3, 4))

    with pytest.warns(UserWarning, match="put .* into closure.*kept in one call and .* in the next"):
        check_right(script)
