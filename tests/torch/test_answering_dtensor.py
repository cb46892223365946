"""`rote.propagation` in the place of DTensor's own propagation.

With policy "same", the scripts of `test_equality.py` give bit for bit what they give without it. With policy "best",
they train to the same losses. Answers themselves are compared with DTensor's in all their parts.
"""

import contextlib
import functools
import inspect
import itertools
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import rote.propagation
import test_equality
import torch
import torch.distributed as dist
from extent import EVERYTHING, SEED
from models import mesh
from oracle import Capture, Run, Script, check_replayed, check_same, eager, run, run_eager
from ranks import eager_side
from sending import sent
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor._op_schema import OpSchema
from torch.distributed.tensor.experimental import register_sharding

from propagation import agreement, dtensor, samples

# The share of the questions of `propagation.agreement` that are asked, and which ones.
SHARE = 1.0 if EVERYTHING else 0.04
# Losses of two orders of summation, in f32.
TOLERANCE = 1e-5


def cases(module: ModuleType, share: int) -> list[Any]:
    """One in `share` of the tests of a module with their parameters, as parameters of one test; all with
    `ROTE_TEST_EVERYTHING`."""
    found = list(all_cases(module))
    return found if EVERYTHING else found[SEED % share :: share]


def all_cases(module: ModuleType) -> Iterator[Any]:
    for name, test in inspect.getmembers(module, inspect.isfunction):
        if not name.startswith("test_"):
            continue
        marks = getattr(test, "pytestmark", [])
        ranks = next((mark for mark in marks if mark.name == "ranks"), None)
        given = [(m.args[0], tuple(m.args[1])) for m in marks if m.name == "parametrize"]
        if "optimizer" in inspect.signature(test).parameters and not given:  # a fixture
            given = [("optimizer", tuple(module.OPTIMIZERS))]
        for values in itertools.product(*(range(len(values)) for _, values in given)):
            arguments = {names: all_values[at] for (names, all_values), at in zip(given, values, strict=True)}
            shown = "-".join([name, *map(str, values)])
            yield pytest.param(name, arguments, marks=[ranks] if ranks else [], id=shown)


def with_propagation(policy: Any, check: Callable[[Run, Run], None]) -> Callable[..., None]:
    """In the place of `check_equal`: a script in plain eager PyTorch, and the same with Rote's propagation."""

    def check_equal(script: Script, **options: Any) -> None:
        expected = run_eager(script)
        with rote.propagation.install(policy):
            found = run(script, eager)
        check(expected, found)

    return check_equal


def check_the_best(script: Script, **options: Any) -> None:
    """In the place of `check_equal`: a script in plain eager PyTorch, and the same under "best"."""
    theirs, ours = list[int](), list[int]()
    with eager_side():
        expected = run(script, counting(theirs))
    with rote.propagation.install("best"):
        found = run(script, counting(ours))
    check_losses(expected, found)
    assert len(ours) == len(theirs)
    more = [(call, *pair) for call, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] > pair[1]]
    assert not more, f"calls, bytes that a rank sends under best and with DTensor: {more[:5]}"


def counting(bytes_sent: list[int]) -> Capture:
    """An eager `capture`: each call appends the bytes that this rank sends in it."""

    def capture(fn: Callable[..., Any], *, state: Any = None, **options: Any) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            with sent() as counted:
                result = fn(*args, **kwargs)
            bytes_sent.append(sum(counted.values()))
            return result

        return step

    return capture


def check_losses(expected: Run, found: Run) -> None:
    """Fails where what the calls return is not near what eager returns."""
    assert len(expected.outputs) == len(found.outputs)
    for call, (want, got) in enumerate(zip(expected.outputs, found.outputs, strict=True)):
        for name in want:
            if name != "rng" and isinstance(want[name], Tensor) and want[name].dtype == torch.float32:
                torch.testing.assert_close(
                    got[name], want[name], rtol=TOLERANCE, atol=TOLERANCE, msg=lambda m, at=(call, name): f"{at}: {m}"
                )


@pytest.mark.sampled(5)
@pytest.mark.parametrize(("name", "arguments"), cases(test_equality, 4))
def test_the_same_bits(name: str, arguments: dict[str, Any]) -> None:
    with mock.patch.object(test_equality, "check_equal", with_propagation("same", check_same)):
        getattr(test_equality, name)(**arguments)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "arguments"), cases(test_equality, 6))
def test_the_best_trains_alike_and_sends_no_more(name: str, arguments: dict[str, Any]) -> None:
    with mock.patch.object(test_equality, "check_equal", check_the_best):
        getattr(test_equality, name)(**arguments)


def test_answers_are_dtensors_own() -> None:
    """Questions by chance, other ones than those that the table of agreement was made of."""
    tally = agreement.compare_all(list(samples.read()), SHARE, seed=SEED)
    agreed = rote.propagation._agreed()
    wrong = {(op, kind) for op, kind in tally.other if agreed.get(op, 0) >> kind & 1}
    shown = [
        line for line in tally.shown for op, kind in wrong if line.startswith(f"{op} ") and f"kind {kind:07b}" in line
    ]
    assert not wrong, "\n".join([f"seed {SEED}: {len(wrong)} kinds of answers that differ", *shown[:5]])
    assert tally.same.total() > 0.8 * (tally.same.total() + tally.other.total())


# An op, the shapes of two tensors, and the sizes of the mesh.
PAIRS = [
    ("aten.add.Tensor", (4, 8, 16), (4, 8, 16), (2, 2)),
    ("aten.mul.Tensor", (4, 8), (8,), (2, 4)),
    ("aten.mm.default", (8, 16), (16, 8), (2, 2)),
    ("aten.bmm.default", (4, 8, 16), (4, 16, 8), (2, 4)),
    ("aten.tanh_backward.default", (8, 3), (8, 3), (2, 2)),
]


@pytest.mark.parametrize(("name", "one", "other", "sizes"), PAIRS)
def test_all_pairs_of_placements_on_two_mesh_dims(
    request: pytest.FixtureRequest, name: str, one: tuple[int, ...], other: tuple[int, ...], sizes: tuple[int, int]
) -> None:
    """Where two tensors lie apart, both engines compare what it costs to move either of them."""
    dtensor.start()
    request.addfinalizer(dtensor.stop)
    op = functools.reduce(getattr, name.split("."), torch.ops)
    propagator = DTensor._op_dispatcher.sharding_propagator
    shapes = [one, other]
    ways = [
        list(itertools.product([Replicate(), Partial(), *map(Shard, range(len(shape)))], repeat=2)) for shape in shapes
    ]
    pairs = list(itertools.product(*ways))
    if not EVERYTHING:
        pairs = random.Random(SEED).sample(pairs, 120)
    answered = 0
    with rote.propagation.install("same"):
        assert rote.propagation._installed is not None
        ask = rote.propagation._installed.answers.answer
        for pair in pairs:
            question = OpSchema(op, tuple(map(functools.partial(spec, sizes), shapes, pair)), {})
            ours = ask(question)
            if ours is not None:
                answered += 1
                theirs = type(propagator).propagate_op_sharding_non_cached(propagator, question)
                assert agreement.everything(ours, question) == agreement.everything(theirs, question), pair
    assert answered


def spec(sizes: tuple[int, ...], shape: tuple[int, ...], placements: tuple[Placement, ...]) -> DTensorSpec:
    like = torch.empty(shape, device="meta")
    return DTensorSpec(dtensor.device_mesh(sizes), placements, TensorMeta(like.shape, like.stride(), like.dtype))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("keepdim", [False, True])
def test_an_empty_list_of_dims(keepdim: bool) -> None:
    """DTensor takes it for no dims where the op takes it for all."""
    x = distribute_tensor(torch.ones(4, 6, dtype=torch.bool), mesh(2), [Shard(0)])
    expected = torch.ops.aten.sum.dim_IntList(x, [], keepdim)
    with rote.propagation.install("same"):
        found = torch.ops.aten.sum.dim_IntList(x, [], keepdim)
    assert found.placements == expected.placements


# Where an attack found another answer than DTensor's.
LIKE_DTENSOR: dict[str, Callable[[DeviceMesh], DTensor]] = {
    "a backward of a partial": lambda on: torch.ops.aten.leaky_relu_backward(
        DTensor.from_local(torch.ones(8, 8), on, [Partial()]), distribute_tensor(torch.ones(8, 8), on), 0.1, False
    ),
    "a view of odd strides": lambda on: distribute_tensor(torch.ones(2).as_strided((1, 1, 2), (1, 2, 1)), on).view(
        1, 2
    ),
    "logsumexp": lambda on: torch.logsumexp(distribute_tensor(torch.ones(8, 8, 3), on, [Shard(1)]), [0], keepdim=True),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("of", LIKE_DTENSOR)
def test_what_is_answered_otherwise_is_handed_on(of: str) -> None:
    expected = LIKE_DTENSOR[of](mesh(2))
    with rote.propagation.install("same"):
        found = LIKE_DTENSOR[of](mesh(2))
    assert found._spec == expected._spec and found.stride() == expected.stride()


# Ops whose strides come from PyTorch's fake tensors, during which other threads run.
WITH_FAKE_TENSORS: dict[str, Callable[[DTensor], Any]] = {
    "sort": lambda x: torch.sort(x, dim=1).values,
    "qr": lambda x: torch.linalg.qr(x.redistribute(placements=[Replicate()]))[0],
    "pad": lambda x: torch.nn.functional.pad(x, (0, 1)),
}


@pytest.mark.ranks(1)
def test_threads_do_not_mix() -> None:
    on, failed = mesh(1), list[str]()

    def ask(number: int) -> None:
        try:
            for i in range(40):
                x = DTensor.from_local(torch.randn(4, 5 + 4 * i + number), on, [Shard(0)], run_check=False)
                for act in WITH_FAKE_TENSORS.values():
                    act(x)
        except Exception as error:
            failed.append(repr(error))

    with rote.propagation.install("best"):
        threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        stats = rote.propagation.stats()
    assert not failed and stats.strides and not stats.handed_on, (failed, stats)


def product(policy: Any = "best") -> tuple[DTensor, rote.propagation.Stats]:
    on = mesh(2)
    a = distribute_tensor(torch.ones(8, 6), on, [Shard(0)])
    b = distribute_tensor(torch.ones(6, 4), on, [Replicate()])
    with rote.propagation.install(policy):
        made = a @ b
    return made, rote.propagation.stats()


@pytest.mark.ranks(2)
def test_what_is_answered_is_counted() -> None:
    made, stats = product("same")
    assert made.placements == (Shard(0),)
    assert stats.answered == 1, stats
    assert not stats.handed_on
    assert stats.microseconds > 0


@pytest.mark.ranks(2)
def test_a_wrong_choice_of_dtensors_is_warned_of_once() -> None:
    """DTensor reads the summand of this rank as if it were the sum."""
    half = DTensor.from_local(torch.ones(()), mesh(2), [Partial()], run_check=False)
    with rote.propagation.install("same"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        read = [half.item() for _ in range(2)]
        other = (half + half, half * 2)
        stats = rote.propagation.stats()
    assert read == [1.0, 1.0]
    assert all(one.full_tensor() == 4 for one in other)
    said = [str(one.message) for one in caught if "rote" in str(one.message)]
    assert len(said) == 1 and "aten::_local_scalar_dense on P(sum)" in said[0] and f"{__file__}:" in said[0], said
    assert list(stats.refuted) == ["aten::_local_scalar_dense on P(sum)"] and "wrong by Rote's rules" in str(stats)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduction", ["avg", "max"])
def test_the_best_reduces_other_partials_first(reduction: str) -> None:
    """So that the script may write in place what follows."""
    on = mesh(2)
    part = torch.arange(6.0).reshape(2, 3) + dist.get_rank()
    x = DTensor.from_local(part, on, [Partial(reduction)], run_check=False)
    with rote.propagation.install("best"):
        made = (-x + 1).mul_(2.0)
        stats = rote.propagation.stats()
    assert not any(one.is_partial() for one in made.placements) and not stats.handed_on, (made, stats)
    assert torch.equal(made.full_tensor(), (1 - x.full_tensor()) * 2)


@pytest.mark.ranks(2)
def test_uninstall_leaves_dtensor_as_it_was() -> None:
    propagator = DTensor._op_dispatcher.sharding_propagator
    before = propagator.propagate_op_sharding_non_cached, propagator.propagate_op_sharding
    product()
    rote.propagation.uninstall()  # once more does nothing
    assert (propagator.propagate_op_sharding_non_cached, propagator.propagate_op_sharding) == before


@pytest.mark.ranks(2)
def test_install_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match='policy=\'cheapest\': expected "same" or "best"'):
        rote.propagation.install("cheapest")  # type: ignore[arg-type]
    with rote.propagation.install("best"), pytest.raises(RuntimeError, match='installed already, with policy="best"'):
        rote.propagation.install()


@pytest.mark.ranks(2)
def test_errors_are_dtensors() -> None:
    """What Rote refuses is DTensor's to refuse, in its words."""
    x = distribute_tensor(torch.ones(8, 6), mesh(2), [Shard(0)])

    def refused() -> str:
        with pytest.raises(RuntimeError) as raised:
            x.view(3, 16)
        return str(raised.value)

    expected = refused()
    with rote.propagation.install("same"):
        assert refused() == expected


@pytest.mark.ranks(2)
def test_a_strategy_of_the_scripts_own_is_asked() -> None:
    asked: list[int] = []

    @torch.library.custom_op("rote_test::doubled", mutates_args=())
    def doubled(x: Tensor) -> Tensor:
        return 2 * x

    @doubled.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    @register_sharding(torch.ops.rote_test.doubled.default)
    def strategies(x: Any) -> list[tuple[list[Placement], list[Placement]]]:
        asked.append(1)
        return [([Replicate()], [Replicate()]), ([Shard(0)], [Shard(0)])]

    x = distribute_tensor(torch.ones(8, 6), mesh(2), [Shard(0)])
    with rote.propagation.install("best"):
        assert torch.ops.rote_test.doubled(x).placements == (Shard(0),)
        stats = rote.propagation.stats()
    assert asked
    assert [reason for (op, reason) in stats.handed_on if op == "rote_test::doubled"] == [
        "a strategy of the script's own is registered"
    ]


@pytest.mark.ranks(2)
def test_a_placement_of_the_scripts_own_is_handed_on() -> None:
    class Summed(Partial):
        pass

    x = DTensor.from_local(torch.ones(4), mesh(2), [Summed()], run_check=False)
    with rote.propagation.install("best"):
        with contextlib.suppress(Exception):
            x + x
        reasons = [reason for (op, reason) in rote.propagation.stats().handed_on if op == "aten::add.Tensor"]
    assert reasons == ["a placement of class Summed"]


@pytest.mark.ranks(2)
def test_meshes_do_not_mix() -> None:
    x = distribute_tensor(torch.ones(4), mesh(2), [Shard(0)])
    y = distribute_tensor(torch.ones(4), mesh(1, 2), [Replicate(), Shard(0)])
    with rote.propagation.install("best"), pytest.raises(RuntimeError, match="different meshes"):
        x + y


@pytest.mark.ranks(2)
def test_a_masked_lookup() -> None:
    """The mask of a table that is split by rows is shared by indices and result."""
    torch.manual_seed(0)
    table = torch.randn(10, 4)
    indices = torch.tensor([[0, 9, 3], [7, 5, 4]])
    on = mesh(2)
    with rote.propagation.install("best"):
        looked_up = torch.nn.functional.embedding(
            distribute_tensor(indices, on, [Replicate()]), distribute_tensor(table, on, [Shard(0)])
        )
        answered = rote.propagation.stats().answered
        whole = looked_up.full_tensor()
    assert answered == 1
    assert str(looked_up.placements[0]).startswith("MaskP")
    assert torch.equal(whole, table[indices])


def squares(x: DTensor) -> Tensor:
    return (x * x).sum().full_tensor()


@pytest.mark.ranks(2)
def test_a_plan_is_replayed_under_the_policy_of_its_recording() -> None:
    x = distribute_tensor(torch.ones(8, 6), mesh(2), [Shard(0)])
    step = rote.capture(squares, strict=True)
    with rote.propagation.install("best"):
        for _ in range(6):
            assert step(x).item() == 48
    replays = step.stats.replays
    assert replays >= 3
    assert step(x).item() == 48
    assert step.stats.replays == replays
    assert "who chooses placements" in " ".join(step.stats.guard_misses)


@pytest.mark.ranks(2)
def test_a_plan_is_replayed_with_and_without_the_same_answers() -> None:
    x = distribute_tensor(torch.ones(8, 6), mesh(2), [Shard(0)])
    step = rote.capture(squares, strict=True)
    with rote.propagation.install("same"):
        for _ in range(6):
            step(x)
    replays = step.stats.replays
    assert step(x).item() == 48
    assert step.stats.replays == replays + 1


@pytest.mark.ranks(2)
def test_a_captured_step_asks_rote() -> None:
    def check(script: Script, **options: Any) -> None:
        expected = run_eager(script)
        rote.propagation._forget()  # what DTensor has answered for eager
        check_replayed(expected, script, 20, {"propagation": "rote"})

    with mock.patch.object(test_equality, "check_equal", check):
        test_equality.test_dtensor_activations(tied=False)
    assert rote.propagation._within_steps is not None
    answered = rote.propagation._within_steps.answers.stats()[0]
    assert answered > 10
    assert DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding_non_cached.__module__ != "rote.propagation"


def test_a_wrong_choice_of_propagation_is_named() -> None:
    with pytest.raises(ValueError, match='propagation=\'tensor\': expected "torch" or "rote"'):
        rote.capture(squares, propagation="tensor")  # type: ignore[call-overload]


AFTER_A_NORM: dict[str, Callable[[DTensor], Any]] = {
    "1-norm, times 2": lambda x: torch.linalg.vector_norm(x, 1) * 2,
    "1-norm, negated": lambda x: -torch.linalg.vector_norm(x, 1),
    "1-norms, stacked": lambda x: torch.stack([torch.linalg.vector_norm(x, 1), torch.linalg.vector_norm(x, 1)]),
    "maximum norm, plus 1": lambda x: torch.linalg.vector_norm(x, float("inf")) + 1,
    "2-norm, written in place": lambda x: torch.linalg.vector_norm(x, 2, dim=1).clamp_min_(1.0),
    "cosine similarity": lambda x: torch.nn.functional.cosine_similarity(x, x + 1, dim=1),
    "maxima, written in place": lambda x: (x.amax(1) * 2.0).relu_(),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("of", AFTER_A_NORM)
@pytest.mark.parametrize("dim", [0, 1])
def test_what_runs_without_rote_runs_with_it(of: str, dim: int) -> None:
    """Partials of norms and extrema, on which DTensor and scripts expect what DTensor makes of them."""
    torch.manual_seed(0)
    x = torch.randn(8, 6)
    sharded = distribute_tensor(x, mesh(2), [Shard(dim)])
    expected = AFTER_A_NORM[of](x)
    try:
        AFTER_A_NORM[of](sharded)
    except RuntimeError:
        return  # DTensor itself cannot
    with rote.propagation.install("best"):
        torch.testing.assert_close(AFTER_A_NORM[of](sharded).full_tensor(), expected)


@pytest.mark.ranks(2)
def test_a_lookup_by_sharded_indices() -> None:
    torch.manual_seed(0)
    table, indices = torch.randn(12, 64), torch.randint(12, (4, 3))
    on = mesh(2)
    with rote.propagation.install("best"):
        found = torch.nn.functional.embedding(
            distribute_tensor(indices, on, [Shard(0)]), distribute_tensor(table, on, [Shard(0)])
        )
        assert torch.equal(found.full_tensor(), table[indices])


@pytest.mark.ranks(2)
def test_a_table_that_is_not_split_stays_whole() -> None:
    """DTensor's ops fail on a masked partial: a script that does not split its table meets none."""
    torch.manual_seed(0)
    on, indices = mesh(2), torch.randint(8, (4, 4))
    table = DTensor.from_local(torch.randn(8, 6), on, [Partial()], run_check=False)
    given = distribute_tensor(indices, on, [Replicate()])
    with rote.propagation.install("best"):
        looked_up = torch.nn.functional.embedding(given, table)
        found = torch.nn.functional.linear(looked_up, table).full_tensor()
    whole = table.full_tensor()
    torch.testing.assert_close(found, torch.nn.functional.linear(whole[indices], whole))


@pytest.mark.ranks(2)
def test_an_installation_that_has_ended_does_nothing() -> None:
    ended = rote.propagation.install("best")
    rote.propagation.uninstall()
    with pytest.raises(RuntimeError, match="has ended"), ended:
        pass
    with rote.propagation.install("same"):
        ended.__exit__(None, None, None)
        with pytest.raises(RuntimeError, match='policy="same"'):
            rote.propagation.install()
