"""Imports inside a step: what is imported may be another module, or come and go."""

import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from oracle import Calls, Capture, check_right

NAMES = ("rote_package", "rote_package.inner", "rote_late")


def put(name: str, **values: Any) -> types.ModuleType:
    module = sys.modules[name] = types.ModuleType(name)
    vars(module).update(values)
    return module


@pytest.fixture(autouse=True)
def modules() -> Iterator[None]:
    yield
    for name in NAMES:
        sys.modules.pop(name, None)


def module_of_a_package() -> float:
    import rote_package.inner as inner

    return inner.scale  # type: ignore[no-any-return]


def name_of_a_package() -> float:
    from rote_package import inner

    return inner.scale  # type: ignore[no-any-return]


def one_that_may_be_missing() -> float:
    try:
        import rote_late
    except ImportError:
        return 2.0
    return rote_late.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("read", [module_of_a_package, name_of_a_package, one_that_may_be_missing])
@pytest.mark.parametrize("bound", [False, True], ids=["", "bound"])
def test_what_is_imported_changes(read: Callable[[], float], bound: bool) -> None:
    """``bound``: the package has its module as an attribute, as after an import from files."""

    def script(capture: Capture) -> Calls:
        for name in NAMES:
            sys.modules.pop(name, None)
        package, inner = put("rote_package", __path__=[]), put("rote_package.inner", scale=2.0)
        if bound:
            package.inner = inner  # type: ignore[attr-defined]
        changes: list[Callable[[], Any]] = [
            lambda: None,
            lambda: setattr(inner, "scale", 4.0),
            lambda: put("rote_package.inner", scale=8.0),
            lambda: setattr(package, "inner", types.SimpleNamespace(scale=5.0)),
            lambda: put("rote_late", scale=7.0),
            lambda: sys.modules.pop("rote_late"),
        ]
        step = capture(lambda x: x * read())
        for change in changes:
            change()
            for call in range(5):
                yield step(torch.ones(2) + call)
        return {}

    check_right(script, replays=12)


def test_module_of_a_library_is_replaced() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        from torch.nn import functional

        return functional.relu(x)

    def script(capture: Capture) -> Calls:
        captured, own = capture(step), torch.nn.functional
        try:
            for call in range(12):
                if call == 6:
                    torch.nn.functional = types.SimpleNamespace(relu=torch.tanh)  # type: ignore[assignment]
                yield captured(torch.ones(2) + call)
        finally:
            torch.nn.functional = own
        return {}

    check_right(script, replays=6)
