"""Tests marked `ranks(n)` run their whole body on n gloo processes at once; `faults=True`: with plans made wrong.

    pytest tests/torch                  everything
    pytest tests/torch -k dropout       some cases
    ROTE_TEST_ORACLE_ONLY=1 pytest ...  eager PyTorch in place of `rote.capture`

The third checks the tests themselves: eager must equal eager in every case,
so a difference seen without the variable is Rote's.
"""

from collections.abc import Iterator

import pytest
import torch.distributed
from oracle import ORACLE_ONLY
from ranks import CaseFailed, CaseSkipped, Pools

POOLS = pytest.StashKey[Pools]()
#: Files that take minutes, the longest first. They begin first, so that none is left alone at the end.
LONGEST = (
    "random_programs",
    "equality",
    "validation",
    "state_sweep",
    "divergence",
    "op_sweep",
    "numbers",
    "sharing_sweep",
    "zoo",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(world, timeout=120, faults=False, last=False): run the body on every rank"
    )
    config.stash[POOLS] = Pools()


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[POOLS].close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


@pytest.fixture(scope="session", autouse=True)
def bridge() -> None:
    """Compiles the bridge before anything waits for a case that needs it."""
    if not ORACLE_ONLY:
        from rote import _bridge

        _bridge.build()


@pytest.fixture(autouse=True, scope="module")
def no_group() -> Iterator[None]:
    """Only ranks are in process groups: one that a file leaves here would break another one's tests."""
    yield
    assert not torch.distributed.is_initialized(), "this file leaves a default process group"


@pytest.fixture(scope="session")
def pools(request: pytest.FixtureRequest) -> Iterator[Pools]:
    """For tests that direct several pools, or the same one across restarts."""
    yield request.config.stash[POOLS]


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}
    pyfuncitem.config.stash[POOLS].run(*marker.args, pyfuncitem.function, arguments, **marker.kwargs)
    return True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    except CaseSkipped as skipped:
        pytest.skip(str(skipped))
    except CaseFailed as failed:
        report = str(failed)
    raise pytest.fail.Exception(report, pytrace=False)
