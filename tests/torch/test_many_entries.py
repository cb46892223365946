"""What the entries of a large container hold is guarded, however deep: one of them changes, and a call sees it."""

import collections
import dataclasses
import enum
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hidden import Hidden, check_seen
from oracle import ORACLE_ONLY, rote_capture

MANY = 2000
setting = types.SimpleNamespace


class Row(NamedTuple):
    scale: Any
    other: int = 1


@dataclasses.dataclass
class Cell:
    scale: Any


class Other(Cell):
    pass


class Key:
    def __init__(self, scale: float) -> None:
        self.scale = scale


class Text(str):
    scale: float


class Number(float):
    scale: float


class Choice(enum.Enum):
    ONE = 1


def texts(kind: type) -> list[Any]:
    made = [kind(i) for i in range(MANY)]
    for each in made:
        each.scale = 2.0
    return made


def choices() -> list[Any]:
    Choice.ONE.scale = 2.0  # type: ignore[attr-defined]
    return [Choice.ONE] * MANY


def doubled_with_a_scale() -> list[Any]:
    made = [Doubled([1.0]) for _ in range(MANY)]
    for each in made:
        each.scale = 2.0
    return made


def tree() -> list[Any]:
    """Each of which knows its parent, that holds them all."""
    root = setting()
    root.children = [setting(parent=root, scale=2.0) for _ in range(MANY)]
    return root.children  # type: ignore[no-any-return]


class Doubled(list[float]):
    scale: float

    def first(self) -> float:
        return self[0] * 2


class Case(NamedTuple):
    make: Callable[[], Any]
    find: Callable[[Any], Any]
    """What holds the number."""
    read: Callable[[Any], float] = lambda held: held[0]
    change: Callable[[Any], object] = lambda held: held.__setitem__(0, 3.0)


def array_of_lists() -> Any:
    made = np.empty(MANY, dtype=object)
    made[:] = [[2.0] for _ in range(MANY)]
    return made


def read_scale(held: Any) -> float:
    return held.scale  # type: ignore[no-any-return]


def set_scale(held: Any) -> None:
    held.scale = 3.0


CASES: dict[str, Case] = {
    "lists": Case(lambda: [[2.0, 1.0] for _ in range(MANY)], lambda many: many[-9]),
    "lists in a tuple": Case(lambda: tuple([2.0] for _ in range(MANY)), lambda many: many[-9]),
    "lists in a deque": Case(lambda: collections.deque([2.0] for _ in range(MANY)), lambda many: many[-9]),
    "lists in a dict": Case(lambda: {i: [2.0] for i in range(MANY)}, lambda many: many[9]),
    "lists in an array": Case(array_of_lists, lambda many: many[9]),
    "lists in lists": Case(lambda: [[[[2.0]]] for _ in range(MANY)], lambda many: many[-9][0][0]),
    "lists in named tuples": Case(lambda: [Row([2.0]) for _ in range(MANY)], lambda many: many[-9].scale),
    "lists in dataclasses": Case(lambda: [Cell([2.0]) for _ in range(MANY)], lambda many: many[-9].scale),
    "lists that grow": Case(
        lambda: [[] for _ in range(MANY)],
        lambda many: many[-9],
        lambda held: 2.0 + len(held),
        lambda held: held.append(1),
    ),
    "deques": Case(lambda: [collections.deque([2.0]) for _ in range(MANY)], lambda many: many[-9]),
    "dicts": Case(lambda: [{0: 2.0} for _ in range(MANY)], lambda many: many[-9]),
    "order of dicts": Case(
        lambda: [{"a": 2.0, "b": 3.0} for _ in range(MANY)],
        lambda many: many[-9],
        lambda held: next(iter(held.values())),
        lambda held: held.__setitem__("a", held.pop("a")),
    ),
    "sets": Case(
        lambda: [{2.0} for _ in range(MANY)],
        lambda many: many[-9],
        lambda held: next(iter(held)),
        lambda held: (held.clear(), held.add(3.0)),
    ),
    "dataclasses": Case(lambda: [Cell(2.0) for _ in range(MANY)], lambda many: many[-9], read_scale, set_scale),
    "values of a dict": Case(
        lambda: {i: setting(scale=2.0) for i in range(MANY)}, lambda many: many[9], read_scale, set_scale
    ),
    "keys of a dict": Case(
        lambda: {Key(2.0): i for i in range(MANY)}, lambda many: next(iter(many)), read_scale, set_scale
    ),
    "keys of a dict, in tuples": Case(
        lambda: {(i, Key(2.0)): i for i in range(MANY)}, lambda many: next(iter(many))[1], read_scale, set_scale
    ),
    "attributes of texts": Case(lambda: texts(Text), lambda many: many[-9], read_scale, set_scale),
    "attributes of numbers": Case(lambda: texts(Number), lambda many: many[-9], read_scale, set_scale),
    "attributes of members of an enum": Case(choices, lambda many: many[-9], read_scale, set_scale),
    "attributes of lists": Case(doubled_with_a_scale, lambda many: many[-9], read_scale, set_scale),
    "a tree": Case(tree, lambda many: many[-9], read_scale, set_scale),
    "attribute that appears": Case(
        lambda: [setting() for _ in range(MANY)],
        lambda many: many[-9],
        lambda held: getattr(held, "scale", 2.0),
        set_scale,
    ),
    "class of an object": Case(
        lambda: [Cell(2.0) for _ in range(MANY)],
        lambda many: many[-9],
        lambda held: 2.0 if type(held) is Cell else 3.0,
        lambda held: setattr(held, "__class__", Other),
    ),
    "method of a class": Case(
        lambda: [Doubled([1.0]) for _ in range(MANY)],
        lambda many: many[-9],
        lambda held: held.first(),
        lambda held: setattr(Doubled, "first", lambda self: self[0] * 3),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_many_entries_hold_is_seen(name: str) -> None:
    make, find, read, change = CASES[name]
    first = Doubled.first

    def build() -> Hidden:
        setattr(Doubled, "first", first)  # noqa: B010
        many = make()
        return lambda: read(find(many)), lambda: change(find(many))

    check_seen(build)


def test_equal_numbers_in_the_place_of_numbers_are_no_miss() -> None:
    many = [[float(i), 2.0] for i in range(MANY)]
    step = rote_capture(lambda x: x * many[-9][1])
    for call in range(8):
        many[-9][:] = [float(MANY - 9), float(str(2 + call // 6))]
        assert torch.equal(step(torch.ones(2)), torch.ones(2) * (2 + call // 6))
    if not ORACLE_ONLY:
        assert step.stats.guard_misses == {"contents(closure['many'])": 2}, step.stats
        assert step.stats.replays >= 4, step.stats


def test_entries_that_hold_each_other() -> None:
    def build() -> Hidden:
        many: list[Any] = [[2.0] for _ in range(MANY)]
        many[5].append(many)
        return lambda: many[-9][0], lambda: many[-9].__setitem__(0, 3.0)

    check_seen(build)


def test_what_cannot_be_looked_into_is_said() -> None:
    many = [lambda: 2.0 for _ in range(MANY)]
    step = rote_capture(lambda x: x * many[-9]())
    for _ in range(6):
        assert torch.equal(step(torch.ones(2)), torch.ones(2) * 2)
    if not ORACLE_ONLY:
        assert step.stats.replays >= 4 and "may change inside" in step.explain(), step.stats


def test_objects_that_hold_too_much_leave_their_lists_guarded() -> None:
    large = setting(all=list(range(1000)))

    def build() -> Hidden:
        many = [[2.0, Cell(large)] for _ in range(MANY)]
        return lambda: many[-9][0], lambda: many[-9].__setitem__(0, 3.0)

    check_seen(build)
