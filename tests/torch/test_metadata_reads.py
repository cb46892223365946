"""What a step reads of a tensor besides its data is never stale: where its
memory lies, how often it was written, whether it is a view."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over
from torch import Tensor
from torch import initial_seed as seed_of_torch

BASE = 20


READS: dict[str, Callable[[Tensor], Any]] = {
    "offset": lambda x: float(x.storage_offset()),
    "storage_bytes": lambda x: float(x.untyped_storage().nbytes()),
    "is_a_view": lambda x: 2.0 if x._is_view() else 3.0,
    "has_a_base": lambda x: 2.0 if x._base is None else 3.0,
    "strided": lambda x: x.as_strided((2,), (2,), x.storage_offset()).sum(),
    "inference": lambda x: 2.0 if x.is_inference() else 3.0,
    "one_object": lambda x: float(x.storage_offset() - x[1:].storage_offset()),
}


def arguments() -> dict[str, Tensor]:
    """Tensors of one shape that lie in memory otherwise."""
    whole = torch.arange(float(BASE))
    with torch.inference_mode():
        unknown_to_autograd = torch.arange(4.0)
    return {
        "own": torch.arange(4.0),
        "slice": whole[:4],
        "other slice": whole[3:7],
        "of a shorter one": whole[:10].clone()[2:6],
        "inference": unknown_to_autograd,
    }


@pytest.mark.parametrize("read", READS)
def test_read_of_an_argument(read: str) -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * READS[read](x), max_variants=12)
        for _ in range(2):
            for x in arguments().values():
                for _ in range(5):
                    yield step(x)
        return None

    check_right(script, replays=26)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x._version,
        lambda x: x.untyped_storage()[0],
        lambda x: torch.initial_seed(),
        lambda x: seed_of_torch(),
        lambda x: torch.default_generator.initial_seed(),
    ],
    ids=["version", "byte of the storage", "seed", "seed by another name", "seed of a generator"],
)
def test_read_that_no_guard_could_hold_to(read: Callable[[Tensor], Any]) -> None:
    """It is right, by running eagerly, and says why."""

    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * (read(x) % 97))
        x = torch.arange(4.0)
        for i in range(10):
            torch.manual_seed(i // 5)
            yield step(x)
            x.add_(1)
        return None

    with pytest.warns(UserWarning, match="recording refused") if not ORACLE_ONLY else _nothing():
        found = check_right(script)
    if not ORACLE_ONLY:
        assert found.stats[-1][0].replays == 0


def _nothing() -> Any:
    import contextlib

    return contextlib.nullcontext()


OF_DTYPES: dict[str, Callable[[Tensor], Tensor]] = {
    "promoted": lambda x: x.to(torch.promote_types(x.dtype, torch.float64)),
    "result": lambda x: x.to(torch.result_type(x, 1.0)),
    "cast": lambda x: x * 2 if torch.can_cast(x.dtype, torch.float16) else x,
}


@pytest.mark.parametrize("what", OF_DTYPES)
def test_questions_about_dtypes(what: str) -> None:
    calls = [torch.ones(3).to(torch.int32 if call % 8 == 7 else torch.float32) for call in range(24)]
    check_right(lambda capture: over(capture, OF_DTYPES[what], calls), replays=14)


def test_what_the_step_makes_may_be_looked_at() -> None:
    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> Tensor:
            y = (x * 2)[1:]
            return y * (y.storage_offset() + y._version + y.untyped_storage().nbytes())

        return over(capture, step, (torch.arange(4.0) + i for i in range(10)), strict=True)

    check_right(script, replays=7)


# One object passed twice is another thing than two equal ones.


def is_same(a: Any, b: Any) -> float:
    return 2.0 if a is b else 3.0


PAIRS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tensor": lambda: (torch.arange(4.0), torch.arange(4.0)),
    "view": lambda: (lambda base: (base[:], base[:]))(torch.arange(4.0)),
    "list": lambda: ([1.0], [1.0]),
    "dict": lambda: ({"a": 1.0}, {"a": 1.0}),
    "list of tensors": lambda: ([torch.arange(4.0)], [torch.arange(4.0)]),
    "namedtuple": lambda: (torch.Size([2]), torch.Size([2])),
    "range": lambda: (range(3), range(3)),
    "object": lambda: (object(), object()),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("same_first", [True, False])
def test_identity_of_two_arguments(pair: str, same_first: bool) -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x, a, b: x * is_same(a, b))
        a, b = PAIRS[pair]()
        for i in range(20):
            same = same_first == ((i // 5) % 2 == 0)
            yield step(torch.arange(4.0), a, a if same else b)
        return None

    check_right(script, replays=10)


@pytest.mark.parametrize("same_first", [True, False])
def test_argument_that_is_a_tensor_of_the_state(same_first: bool) -> None:
    def script(capture: Capture) -> Calls:
        weight = torch.arange(4.0)
        step = capture(lambda x: x * is_same(x, weight), state=weight)
        for i in range(20):
            same = same_first == ((i // 5) % 2 == 0)
            yield step(weight if same else weight[:])
        return weight

    check_right(script, replays=8)


def test_step_that_marks_its_argument() -> None:
    """A replay would not: refused, and right."""

    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> Tensor:
            x.seen = True  # type: ignore[attr-defined]
            return x * 2

        captured = capture(step)
        for _ in range(8):
            x = torch.arange(4.0)
            yield captured(x), x.seen  # type: ignore[attr-defined]
        return None

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check_right(script)


def test_list_that_contains_itself() -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x, items: x * len(items))
        items: list[Any] = [1.0]
        items.append(items)
        for i in range(12):
            if i == 6:
                items.append(2.0)
            yield step(torch.arange(4.0), items)
        return None

    check_right(script)


def test_ordered_dict_and_named_tuple_carry_tensors() -> None:
    import collections

    batch = collections.namedtuple("batch", "x y")  # type: ignore[name-match]

    def script(capture: Capture) -> Calls:
        step = capture(lambda b, d: (b.x * 2 + b.y, d["u"] + d["v"]), strict=True)
        for i in range(10):
            x = torch.arange(4.0) + i
            yield step(batch(x, x + 1), collections.OrderedDict(u=x, v=x * 2))
        return None

    check_right(script, replays=7)


def test_values_are_forgotten() -> None:
    """What is interned for comparing is not kept: distinct floats and texts cost no memory."""
    import resource

    import rote

    step = rote.capture(lambda x, value, name: x * value)
    x = torch.arange(4.0)
    import warnings

    def calls(n: int, start: int) -> None:
        for i in range(n):
            step(x, float(start + i), f"name {start + i}")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls(2000, 0)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        calls(30000, 10**6)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 2000, f"{grown} KiB for 30,000 values"


@pytest.mark.parametrize("asked", ["_version", "is_shared"])
@pytest.mark.filterwarnings("ignore:rote")
def test_counts_of_a_tensor_that_no_name_reaches(asked: str) -> None:
    def script(capture: Capture) -> Calls:
        held = torch.ones(4)

        def ask() -> float:
            return float(held._version if asked == "_version" else held.is_shared())

        step = capture(lambda x: x * ask())
        for call in range(12):
            if call == 6:
                held.add_(1) if asked == "_version" else held.share_memory_()
            yield step(torch.ones(4))
        return {}

    check_right(script)
