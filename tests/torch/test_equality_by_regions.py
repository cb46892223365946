"""The cases of `test_equality.py` with each block of their models a region, and everything around it eager."""

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import test_equality
from models import Llama
from oracle import Script
from test_regions import check_steps
from torch import nn

#: Cases without a module.
WITHOUT = {"test_explicit_redistribution"}
#: Of 26 or more steps; training and evaluation in turn are two variants, each recorded and confirmed.
REPLAYS = 18


def cases() -> Iterator[Any]:
    for name, test in vars(test_equality).items():
        marks = getattr(test, "pytestmark", [])
        ranks = [mark for mark in marks if mark.name == "ranks"]
        if not name.startswith("test_") or not ranks or name in WITHOUT:
            continue
        axes = [
            [(mark.args[0], value, id) for value, id in zip(mark.args[1], ids_of(mark), strict=True)]
            for mark in marks
            if mark.name == "parametrize"
        ]
        for chosen in itertools.product(*axes):
            arguments = {axis: value for axis, value, _ in chosen}
            id = "-".join([name.removeprefix("test_"), *(id for _, _, id in chosen)])
            yield pytest.param(name, arguments, marks=ranks, id=id)


def ids_of(mark: pytest.Mark) -> list[str]:
    return list(mark.kwargs.get("ids") or map(str, mark.args[1]))


def blocks(state: dict[str, Any]) -> list[nn.Module]:
    model = state["model"]
    return list(model.layers) if isinstance(model, Llama) else [model]


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("name", "arguments"), list(cases()))
def test_case(name: str, arguments: dict[str, Any]) -> None:
    known: list[nn.Module] = []

    def new_blocks(state: dict[str, Any]) -> list[nn.Module]:
        new = [block for block in blocks(state) if block not in known]
        known.extend(new)
        return new

    def check(script: Script) -> None:
        check_steps(script, new_blocks, REPLAYS)

    with mock.patch.object(test_equality, "check_equal", check):
        getattr(test_equality, name)(**arguments)
