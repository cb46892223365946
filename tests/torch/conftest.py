"""Tests marked `ranks(n)` run their whole body on n gloo processes at once; `faults=True`: with plans made wrong.

    pytest tests/torch                  everything
    pytest tests/torch -k dropout       some cases
    ROTE_TEST_ORACLE_ONLY=1 pytest ...  eager PyTorch in place of `rote.capture`

The third checks the tests themselves: eager must equal eager in every case,
so a difference seen without the variable is Rote's.

Of a test marked `sampled(n)`, one in n cases runs, unless `ROTE_TEST_EVERYTHING=1`, or
unless tests are named (by `-k` or `file.py::test`). `ROTE_TEST_SEED` takes others.
"""

import collections
from collections.abc import Iterator

import pytest
import torch.distributed
from extent import EVERYTHING, SEED
from oracle import ORACLE_ONLY
from ranks import CaseFailed, CaseSkipped, Pools

POOLS = pytest.StashKey[Pools]()
#: Files that take minutes, the longest first. They begin first, so that none is left alone at the end.
LONGEST = (
    "fsdp",
    "equality",
    "script",
    "regions",
    "float_arguments",
    "validation",
    "divergence",
    "state_sweep",
    "random_programs",
    "propagation",
    "memory_of_wrappers",
    "examples",
    "op_sweep",
    "zoo",
    "regions_of_ranks",
    "answering_dtensor",
    "kept_attributes",
    "tails",
    "module_regions",
)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "ranks(world, timeout=120, faults=False, last=False): run the body on every rank"
    )
    config.addinivalue_line("markers", "sampled(n): run one in n cases, unless all are asked for")
    config.stash[POOLS] = Pools()


def pytest_report_header(config: pytest.Config) -> str | None:
    return "a part of the cases of sampled tests: ROTE_TEST_EVERYTHING=1 runs all" if samples(config) else None


def samples(config: pytest.Config) -> bool:
    """Whether only some cases of sampled tests run."""
    return not (EVERYTHING or config.option.keyword or any("::" in arg for arg in config.args))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[POOLS].close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if samples(config):
        left_out = set(items)
        items[:] = sampled(items)
        config.hook.pytest_deselected(items=[*left_out.difference(items)])
    order = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(LONGEST)))


def sampled(items: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Without the cases that are left out."""
    numbers: collections.Counter[str] = collections.Counter()
    for item in items:
        marker = item.get_closest_marker("sampled")
        if marker is not None:
            (n,) = marker.args
            test = item.nodeid.partition("[")[0]
            number = numbers[test]
            numbers[test] += 1
            if number % n != (SEED - 1) % n:
                continue
        yield item


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
