"""What cannot be replayed soundly is refused: the message names the op, the
user's line and the remedy, and training goes on eagerly with right results."""

import ctypes
import itertools
import random
import re
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import inputs, mesh, mlp, training
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, eager, over, rote_capture, run
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

CALLS = 20


def line_of(mark: str) -> str:
    """`file:line` of the line of this file that ends in the comment `# refused: mark`."""
    for number, line in enumerate(Path(__file__).read_text().splitlines(), 1):
        if line.endswith(f"# refused: {mark}"):
            return f"{Path(__file__).name}:{number}"
    raise LookupError(mark)


def check_refused(script: Callable[[Capture], Calls], *words: str, at: str | None = None, remedy: str) -> None:
    """`words` and `remedy` are regular expressions that the one warning must match."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = check_right(script)
    if ORACLE_ONLY:
        return
    import rote

    (step,) = found.steps
    assert step.stats.refusals, step.stats
    assert step.stats.replays == 0, step.stats
    ours = [str(warning.message) for warning in caught if "refused" in str(warning.message).lower()]
    assert len(ours) == 1, [str(warning.message) for warning in caught]
    wanted = [*words, remedy, *([re.escape(line_of(at))] if at else [])]
    missing = [word for word in wanted if not re.search(word, ours[0])]
    assert not missing, (missing, ours[0])
    assert any(all(re.search(word, text) for word in words) for text in step.stats.refusals)
    assert all(re.search(word, step.explain()) for word in words), step.explain()

    def strict(fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Any:
        # Whole, so that all ranks raise at the same call: the others would wait for one that is gone.
        return rote_capture(fn, state=state, **{**options, "strict": True, "tail": False})

    try:
        run(script, strict)
    except rote.RecordingRefused as refused:
        assert all(re.search(word, str(refused)) for word in wanted), str(refused)
    else:
        raise AssertionError("strict=True did not raise")


def small_training(capture: Capture, loss_of: Callable[[nn.Module, Tensor], Tensor], **options: Any) -> Calls:
    """SGD on a sharded MLP; only `loss_of` is refused."""
    model = mlp(mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    state = {"model": model, "optimizer": optimizer}
    step = capture(train_step, state=state, **options)
    for x in inputs(CALLS, 4, 8):
        yield step(x)  # in this file, which messages name
    return state


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["local", "dtensor"])
def test_item_steers_python(kind: str) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        if kind == "dtensor":
            out = DTensor.from_local(out, mesh(2), [Replicate()])
        loss = out.square().mean()
        if loss.item() > 0.05:  # refused: item
            loss = loss * 2
        return loss

    check_refused(
        lambda capture: small_training(capture, loss_of),
        "aten::_local_scalar_dense",
        at="item",
        remedy="torch.where|keep it a tensor|tensor",
    )


@pytest.mark.ranks(2)
def test_float_from_a_step_counter_out_of_reach() -> None:
    def script(capture: Capture) -> Calls:
        counter = itertools.count(1)

        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            return model(x).square().mean() * (1 / counter.__next__())

        return small_training(capture, loss_of)

    check_refused(script, "the iterator .*counter", remedy="argument|tensor")


class Counting:
    def __init__(self) -> None:
        self.count = 0
        self.model = mlp(mesh(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def step(self, x: Tensor) -> Tensor:
        self.count += 1
        self.optimizer.zero_grad()
        loss = self.model(x).square().mean() * (2 if min(self.count, 1000) == 1000 else 1)
        loss.backward()
        self.optimizer.step()
        return loss.detach()


def counting(capture: Capture, **options: Any) -> Calls:
    trainer = Counting()
    state = {"model": trainer.model, "optimizer": trainer.optimizer}
    return over(capture, trainer.step, inputs(CALLS, 4, 8), state=state, **options)


@pytest.mark.ranks(2)
def test_counter_that_changes_at_every_call() -> None:
    check_refused(lambda capture: counting(capture, tail=False), r"self\.count", remedy="ignore")


@pytest.mark.ranks(2)
def test_ignored_counter_replays() -> None:
    found = check_right(lambda capture: counting(capture, ignore=["self.count"]))
    if not ORACLE_ONLY:
        assert found.steps[0].stats.replays >= CALLS - 5, found.steps[0].stats
        assert not found.steps[0].stats.refusals


@pytest.mark.ranks(1)
def test_counter_changed_by_the_caller_at_every_call() -> None:
    def script(capture: Capture) -> Calls:
        count = 0

        def step(x: Tensor) -> Tensor:
            return x * 2 if count < 100 else x * 3

        captured = capture(step)
        for x in inputs(CALLS, 4):
            count += 1
            yield captured(x)

    check_refused(script, "count", remedy="ignore|argument")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("made", ["torch_tensor", "from_numpy", "as_tensor_of_list"])
def test_tensor_made_from_host_data(made: str) -> None:
    def script(capture: Capture) -> Calls:
        host = np.random.default_rng(3)

        def loss_of(model: nn.Module, x: Tensor) -> Tensor:
            values = host.random(8, dtype=np.float32)
            if made == "torch_tensor":
                mask = torch.tensor(values.tolist())
            elif made == "from_numpy":
                mask = torch.from_numpy(values)
            else:
                mask = torch.as_tensor(values.tolist())
            return (model(x) * mask).square().mean()  # refused: host data

        return small_training(capture, loss_of)

    word = "aten::" if made == "from_numpy" else "draws random numbers"
    check_refused(script, word, r"test_refusals\.py:\d+", remedy="argument")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("how", "word"),
    [("memmove", "Tensor.data_ptr"), ("numpy", "Tensor.numpy"), ("extension", r"allocation \(empty\)")],
)
def test_result_written_outside_the_dispatcher(how: str, word: str) -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        mask = torch.empty(4, 8)
        if how == "memmove":
            ctypes.memmove(mask.data_ptr(), x.data_ptr(), 4 * 8 * 4)
        elif how == "numpy":
            mask.numpy()[:] = x.numpy()
        else:
            address = Tensor.__mro__[1].__dict__["data_ptr"]  # as a C extension takes it: nobody can see that
            ctypes.memmove(address(mask), address(x), 4 * 8 * 4)
        return (model(x) * mask).square().mean()

    check_refused(
        lambda capture: small_training(capture, loss_of),
        word,
        r"test_refusals\.py:\d+",
        remedy="outside the captured function",
    )


@pytest.mark.ranks(1)
def test_memory_of_a_constant_written_outside_the_dispatcher() -> None:
    """Whatever Rote makes of it, a raw write into a recorded result must not be lost."""

    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> Tensor:
            mask = torch.zeros(4)
            ctypes.memmove(mask.data_ptr(), x.data_ptr(), 16)
            return x * mask

        return over(capture, step, inputs(CALLS, 4))

    check_right(script)


@pytest.mark.ranks(2)
def test_shape_that_depends_on_data() -> None:
    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        out = model(x)
        return out[out > 0].square().sum()  # refused: mask

    check_refused(
        lambda capture: small_training(capture, loss_of),
        "aten::(nonzero|index|masked_select)",
        at="mask",
        remedy="where|shape",
    )


@pytest.mark.ranks(2)
def test_graph_that_outlives_the_step() -> None:
    """A loss returned with its graph, for the caller to run backward on."""

    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        step = capture(lambda x: model(x).square().mean(), state={"model": model})
        for x in inputs(CALLS, 4, 8):
            model.zero_grad()
            loss = step(x)
            loss.backward()
            yield loss.detach()
        return {"model": model}

    check_refused(script, "requires_grad|graph|backward", remedy="backward|detach|no_grad")


# Sources of change that leave no plain value in reach: right by whatever means.


GENERATOR = torch.Generator()


def reseeding(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x + torch.randn(4)


def forked_rng(x: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        noise = torch.randn(4)
    return x + noise + torch.randn(4)


def saved_and_restored_rng(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    first = torch.randn(4)
    torch.set_rng_state(state)
    return x + first - torch.randn(4)


def unused_item(x: Tensor) -> Tensor:
    x.sum().item()
    return x * 2


SOURCES: dict[str, Callable[[Tensor], Tensor]] = {
    "python_random": lambda x: x * random.random(),
    "numpy_random": lambda x: x * float(np.random.random()),
    "clock": lambda x: x + (0.0 if time.time() > 0 else 1.0),
    "own_generator": lambda x: x + torch.randn(4, generator=GENERATOR),
    "reseeding": reseeding,
    "forked_rng": forked_rng,
    "saved_and_restored_rng": saved_and_restored_rng,
    "host_round_trip": lambda x: x + torch.tensor(x.tolist()),
    "numpy_round_trip": lambda x: x + torch.from_numpy(x.numpy() * 2),
    "item_comes_back": lambda x: x * x.sum().item(),
    "unused_item": unused_item,
    "python_branch": lambda x: x * 2 if x.sum() > 0 else x * 3,
    # `tolist` of a CPU tensor reads memory and dispatches no op.
    "branch_on_tolist": lambda x: x * 2 if x.tolist()[0] > 0 else x * 3,
    "branch_on_numpy": lambda x: x * 2 if x.numpy()[0] > 0 else x * 3,
    "branch_on_equal": lambda x: x * 2 if torch.equal(x.sign(), x.sign().abs()) else x * 3,
    "branch_on_allclose": lambda x: x * 2 if torch.allclose(x.sign(), x.sign().abs()) else x * 3,
    "branch_on_any": lambda x: x * 2 if (x < 0).any() else x * 3,
    "repeated_random_shape": lambda x: x.repeat(random.randint(1, 3)).sum(),
    "unique_values": lambda x: x.round().unique().sum(),
}


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", SOURCES)
def test_is_right_or_refused(name: str) -> None:
    def script(capture: Capture) -> Calls:
        random.seed(1)
        np.random.seed(1)
        GENERATOR.manual_seed(1)
        return over(capture, SOURCES[name], inputs(CALLS, 4), end=GENERATOR.get_state)

    check_right(script)


@pytest.mark.ranks(2)
def test_one_refusing_rank_does_not_hang_the_other() -> None:
    """Only rank 1 reads a value; both ranks go on, and both are right."""

    def loss_of(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if torch.distributed.get_rank() == 1 and loss.item() < 0:
            raise AssertionError("a square is not negative")
        return loss

    check_right(lambda capture: small_training(capture, loss_of))


@pytest.mark.skipif(ORACLE_ONLY, reason="nothing is recorded")
@pytest.mark.ranks(2)
def test_recordings_do_not_differ_by_chance() -> None:
    """Autograd clones a gradient that the thread of a collective still holds: it must have let go."""
    for _ in range(40):
        model = mlp(mesh(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def train_step(x: Tensor, model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = rote_capture(train_step, state={"model": model, "optimizer": optimizer}, strict=True)
        for _ in range(4):
            step(torch.randn(4, 8, requires_grad=True))
        assert step.stats.replays == 1, step.stats  # state appears, two recordings, a replay


def test_marks_are_lines_of_this_file() -> None:
    assert line_of("item").startswith("test_refusals.py:")
    assert eager(len) is len


@torch.no_grad()
def by_elements(x: Tensor, weight: Tensor) -> Tensor:
    y = x * 2
    y.apply_(lambda value: value + 1)  # mark: elements
    return y * weight


def by_dlpack(x: Tensor, weight: Tensor) -> Tensor:
    y = x * weight
    return y * (2 if np.from_dlpack(y.detach())[0] > 0 else 3)


def by_capsule(x: Tensor, weight: Tensor) -> Tensor:
    y = x * weight
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(y)).numpy()
    return y


def with_attributes(x: Tensor, weight: Tensor) -> Tensor:
    y = (x * weight).detach()
    y.mark = 5  # type: ignore[attr-defined]
    return y


@torch.no_grad()
def beside_ops(x: Tensor, weight: Tensor) -> Tensor:
    """As a kernel that says that it has written, and is no op."""
    torch.autograd.graph.increment_version(weight)
    return x * weight


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("body", "words", "remedy"),
    [
        (by_elements, "apply_.*each element", "custom_op"),
        (by_dlpack, "__dlpack__.*passes the memory", "custom_op"),
        (by_capsule, "__dlpack__.*passes the memory", "custom_op"),
        (with_attributes, "Python attributes.*mark", "beside"),
        (beside_ops, "writes to .*weight.* without a recorded op", "by an op"),
    ],
)
def test_what_leaves_no_op(body: Callable[[Tensor, Tensor], Tensor], words: str, remedy: str) -> None:
    def script(capture: Capture) -> Calls:
        state = {"weight": torch.ones(3)}

        def step(x: Tensor) -> Tensor:
            return body(x, state["weight"])

        return over(capture, step, inputs(6, 3), state=state)

    check_refused(script, words, remedy=remedy)


class Scheduled(nn.Module):
    """Has methods that name what reads the memory of tensors, and `super`, which is no tensor there."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = torch.linspace(0.1, 0.5, 3).tolist()
        self.layer = nn.Linear(8, 8)

    def _load_from_state_dict(self, *args: Any) -> None:
        self._version = 1
        super()._load_from_state_dict(*args)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.rates[1]


class ThroughTwo(Scheduled):
    """Names a class in `super`."""

    def forward(self, x: Tensor) -> Tensor:
        rates = self.rates.tolist() if isinstance(self.rates, Tensor) else [1]
        return super(ThroughTwo, self).forward(x) * len(rates)  # noqa: UP008 - the two arguments are what is tested


class Listed(Tensor):
    def total(self) -> Any:
        return sum(super().tolist())


def through_super(x: Tensor) -> Any:
    return sum(super(Listed, x.as_subclass(Listed)).tolist())  # type: ignore[misc]


def test_super_of_a_module_is_no_tensor() -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = Scheduled()
        return over(capture, lambda x: model(x).detach(), inputs(24, 4, 8), state=model)

    check_equal(script, replays=18)


def test_super_of_a_named_class_is_refused() -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = ThroughTwo()
        return over(capture, lambda x: model(x).detach(), inputs(6, 4, 8), state=model)

    check_refused(script, r"super\(\)\.tolist in ThroughTwo.forward", remedy="call the method of the tensor")


class Steps:
    def step(self, x: Tensor) -> Tensor:
        return x * 2


class Filling(Steps):
    def __init__(self) -> None:
        self.seen = torch.zeros(4)

    def step(self, x: Tensor) -> Tensor:
        y = super().step(x)
        self.seen.fill_(1.5)
        return y + self.seen


def test_super_of_a_trainer_is_no_tensor() -> None:
    def script(capture: Capture) -> Calls:
        trainer = Filling()
        return over(capture, trainer.step, inputs(24, 4), state=trainer, end=lambda: trainer.seen)

    check_equal(script, replays=18)


class Mixed:
    """Tensors inherit from it."""

    def total(self) -> Any:
        return sum(super().tolist())  # type: ignore[misc]


class MixedIn(Mixed, Tensor):
    pass


@pytest.mark.parametrize(
    "read", [lambda x: x.as_subclass(Listed).total(), lambda x: x.as_subclass(MixedIn).total(), through_super]
)
def test_super_of_a_tensor_is_refused(read: Any) -> None:
    def script(capture: Capture) -> Calls:
        return over(capture, lambda x: x * read(x), inputs(6, 3))

    check_refused(script, r"super\(\)\.tolist", remedy="call the method of the tensor")


def test_a_new_object_at_every_call_in_an_attribute_that_is_read() -> None:
    class Holder:
        scale = 1.0

    class Keeps(nn.Linear):
        kept: Any = Holder()

        def forward(self, x: Tensor) -> Tensor:
            before, self.kept = self.kept, Holder()
            return super().forward(x) * before.scale

    def script(capture: Capture) -> Calls:
        model = Keeps(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return over(capture, training(model, optimizer), inputs(20, 3, 4), state=[model, optimizer])

    check_refused(script, "puts a new object into", r"\[0\]\.kept", remedy="write into a tensor that stays")


class CountsInNumbers(torch.optim.Optimizer):
    """As many optimizers outside of PyTorch: the number of steps is an entry of each group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] += 1
            rate = group["lr"] / (1 - 0.9 ** group["step"])
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-rate)


def test_an_optimizer_that_counts_in_numbers() -> None:
    def script(capture: Capture) -> Calls:
        model = nn.Linear(4, 4)
        optimizer = CountsInNumbers(model.parameters())
        return over(capture, training(model, optimizer), inputs(20, 3, 4), state=[model, optimizer])

    check_refused(script, r"param_groups\[0\]\['step'\]", "at every call", remedy=r"step\(\) outside")


GENERATOR, STATE, PLAIN = torch.Generator(), torch.Generator().manual_seed(5).get_state(), random.Random()
SEEDING: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.manual_seed(3),
    "torch.random": lambda: torch.random.manual_seed(3),
    "a generator": lambda: GENERATOR.manual_seed(3),
    "the state of a generator": lambda: GENERATOR.set_state(STATE),
    "the state": lambda: torch.set_rng_state(STATE),
    "random": lambda: random.seed(3),
    "numpy": lambda: np.random.seed(3),
    "numpy's state": lambda: np.random.set_state(np.random.RandomState(2).get_state()),
    "a generator of Python": lambda: PLAIN.seed(3),
}


@pytest.mark.ranks(1)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", SEEDING)
def test_seeding(name: str) -> None:
    """A step that seeds and draws nothing finds the generator in that state already while it is recorded."""
    seed = SEEDING[name]

    def script(capture: Capture) -> Calls:
        weight = torch.zeros(3)

        def step(x: Tensor) -> Tensor:
            seed()
            return x + weight.add_(1)

        captured = capture(step)
        for call in range(16):
            if call % 5 == 4:
                torch.manual_seed(call), random.seed(call), np.random.seed(call)
                GENERATOR.manual_seed(call), PLAIN.seed(call)
            result = captured(torch.ones(3))
            drawn = torch.rand(1, generator=GENERATOR), PLAIN.random(), random.random(), np.random.rand()
            yield result, *(drawn if call % 5 == 4 else ())
            if call % 5 == 4:
                captured(torch.ones(3))
        return weight

    check_right(script)
