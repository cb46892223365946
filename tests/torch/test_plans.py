"""Plans outlive the process that recorded them, and are believed only when they apply."""

import contextlib
import dataclasses
import itertools
import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import inputs, mesh, mlp, training
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over, rote_capture, run
from ranks import Pools
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

CALLS = 12

Report = dict[str, Any]


@contextlib.contextmanager
def logged() -> Iterator[list[tuple[str, str]]]:
    """What logger `rote` says: (level, message)."""
    records: list[tuple[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append((record.levelname, record.getMessage()))

    logger, handler = logging.getLogger("rote"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield records
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def train(store: Path, width: int = 8, scale: float = 1.0, dims: tuple[int, ...] = (), **options: Any) -> Report:
    """One process's share of a run with a plan store, checked against eager."""

    def script(capture: Capture) -> Calls:
        shape = dims or (torch.distributed.get_world_size(),)
        on = mesh(*shape)
        model = mlp(on if on.ndim == 1 else on["tp"], width)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        def changed_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean() * 3.0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        state = {"model": model, "optimizer": optimizer}
        changed_step.__qualname__ = train_step.__qualname__
        changed_step.__name__ = train_step.__name__
        step = train_step if scale == 1.0 else changed_step
        return over(capture, step, inputs(CALLS, 4, width), state=state, plans=store, **options)

    with logged() as records:
        found = check_right(script)
    if ORACLE_ONLY:
        return {}
    return {"stats": dataclasses.asdict(found.steps[0].stats), "log": records}


def problems(report: Report) -> list[str]:
    return [text for level, text in report["log"] if level in ("WARNING", "ERROR", "CRITICAL")]


def record(pools: Pools, store: Path, world: int = 2, **how: Any) -> None:
    """A first run in processes of its own: a plan holds what the process has imported."""
    pools.restart(world)
    for report in pools.run(world, train, {"store": store, **how}):
        if not ORACLE_ONLY:
            assert report["stats"]["recordings"] >= 1, report
            assert report["stats"]["replays"] >= CALLS - 5, report
            assert not problems(report), report
    pools.restart(world)
    if not ORACLE_ONLY:
        assert plan_files(store), list(store.rglob("*"))


@pytest.fixture(scope="module")
def first_run(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plans of a first run, whose processes have ended."""
    store = tmp_path_factory.mktemp("first_run")
    record(pools, store)
    return store


@pytest.fixture
def store(first_run: Path, tmp_path: Path) -> Path:
    """A copy of these plans."""
    return Path(shutil.copytree(first_run, tmp_path / "store"))


def plan_files(store: Path) -> list[Path]:
    return sorted(store.glob("*/rank*.rote"))


def test_found_again_by_a_new_process(pools: Pools, store: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in plan_files(store)}
    for report in pools.run(2, train, {"store": store}):
        if not ORACLE_ONLY:
            assert report["stats"]["recordings"] == 0, report
            assert report["stats"]["replays"] == CALLS - 1, report
            assert not problems(report), report
    assert before == {path: path.stat().st_mtime_ns for path in plan_files(store)}


def train_without_mesh(store: Path, fake: bool) -> Report:
    """Fake tensors, once used, leave a device guard for CUDA in a process that has no GPU."""
    if fake:
        with FakeTensorMode():
            torch.zeros(1)

    found = check_right(lambda capture: over(capture, lambda x: x * 2, inputs(CALLS, 4, 8), plans=store))
    return {} if ORACLE_ONLY else {"stats": dataclasses.asdict(found.steps[0].stats)}


def test_found_by_a_process_that_used_fake_tensors(pools: Pools, tmp_path: Path) -> None:
    recordings = []
    for fake in (False, True):
        pools.restart(1)
        [report] = pools.run(1, train_without_mesh, {"store": tmp_path, "fake": fake})
        if not ORACLE_ONLY:
            recordings.append(report["stats"]["recordings"])
    assert ORACLE_ONLY or recordings == [1, 0]


def test_trusted_plans_replay_from_the_first_call(pools: Pools, store: Path) -> None:
    for report in pools.run(2, train, {"store": store, "trust_plans": True}):
        if not ORACLE_ONLY:
            assert report["stats"]["recordings"] == 0, report
            assert report["stats"]["replays"] == CALLS, report


def test_a_changed_script_is_recorded_again(pools: Pools, store: Path) -> None:
    for report in pools.run(2, train, {"store": store, "scale": 3.0}):
        if not ORACLE_ONLY:
            assert report["stats"]["recordings"] >= 1, report
            assert report["stats"]["replays"] >= CALLS - 5, report
            assert any("it expects code(" in text for _, text in report["log"]), report["log"]


def truncate(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flip_bit(data: bytes) -> bytes:
    at = 64 + (len(data) - 64) // 2
    return data[:at] + bytes([data[at] ^ 8]) + data[at + 1 :]


def flip_header_bit(data: bytes) -> bytes:
    return data[:41] + bytes([data[41] ^ 1]) + data[42:]


def foreign(data: bytes) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + data[8:]


def empty(data: bytes) -> bytes:
    return b""


def other_format(data: bytes) -> bytes:
    return data[:8] + (999).to_bytes(2, "little") + data[10:]


def longer(data: bytes) -> bytes:
    return data + bytes(4096)


DAMAGES = [truncate, flip_bit, flip_header_bit, foreign, empty, other_format, longer]


def train_with_each(stores: list[Path]) -> list[Report]:
    return [train(store) for store in stores]


def test_damaged_files_are_recorded_again(pools: Pools, first_run: Path, tmp_path: Path) -> None:
    """Only rank 0's files are damaged; rank 1 finds its own whole, and neither hangs."""
    stores = [Path(shutil.copytree(first_run, tmp_path / damage.__name__)) for damage in DAMAGES]
    for damage, store in zip(DAMAGES, stores, strict=True):
        for path in store.glob("*/rank0.rote"):
            path.write_bytes(damage(path.read_bytes()))
    files = len(list(first_run.glob("*/rank0.rote")))
    for *reports, store in zip(*pools.run(2, train_with_each, {"stores": stores}), stores, strict=True):
        if ORACLE_ONLY:
            continue
        lines = problems(reports[0])
        assert len(lines) == files, (store, lines)
        assert all("rank0.rote" in line and "\n" not in line for line in lines), (store, lines)
        assert reports[0]["stats"]["recordings"] >= 1, (store, reports[0])
        assert not problems(reports[1]), (store, reports[1])
        for report in reports:
            assert report["stats"]["replays"] >= CALLS - 6, (store, report)
    pools.restart(2)
    for report in itertools.chain(*pools.run(2, train_with_each, {"stores": stores})):
        assert ORACLE_ONLY or not problems(report), "the new recording replaced the damaged file"


def test_a_directory_in_place_of_a_file(pools: Pools, store: Path) -> None:
    for path in plan_files(store):
        path.unlink()
        path.mkdir()
    for report in pools.run(2, train, {"store": store}):
        if not ORACLE_ONLY:
            assert problems(report), report


def refused_plan(reports: list[Report], *patterns: str) -> None:
    """A plan was found, a log line names both sides, and a new one was recorded."""
    if ORACLE_ONLY:
        return
    for report in reports:
        lines = problems(report)
        assert any(all(re.search(p, line) for p in patterns) for line in lines), (patterns, lines)
        assert report["stats"]["recordings"] >= 1, report
        assert report["stats"]["replays"] >= CALLS - 6, report


def test_plan_for_another_world_size(pools: Pools, store: Path) -> None:
    reports = pools.run(1, train, {"store": store})
    refused_plan(reports, "world size", r"\b2\b", r"\b1\b")


def test_plan_for_another_mesh(pools: Pools, tmp_path: Path) -> None:
    record(pools, tmp_path, world=4, dims=(4,))
    reports = pools.run(4, train, {"store": tmp_path, "dims": (2, 2)})
    refused_plan(reports, "mesh", "4", "2")


def test_plan_for_another_rank(pools: Pools, store: Path) -> None:
    for path in store.glob("*/rank0.rote"):
        other, aside = path.with_name("rank1.rote"), path.with_name("aside")
        shutil.move(path, aside)
        shutil.move(other, path)
        shutil.move(aside, other)
    refused_plan(pools.run(2, train, {"store": store}), "rank", r"\b0\b", r"\b1\b")


def test_plan_for_another_model(pools: Pools, store: Path) -> None:
    reports = pools.run(2, train, {"store": store, "width": 12})
    refused_plan(reports, "model", r"\b8\b", r"\b12\b")


def train_with_older_torch(store: Path) -> Report:
    """The version is changed once the bridge is loaded, which is built per version."""
    train(store / "warm-up")
    version = torch.__version__
    torch.__version__ = "2.14.0"
    try:
        return train(store / "plans")
    finally:
        torch.__version__ = version


def test_plan_for_another_torch_version(pools: Pools, tmp_path: Path) -> None:
    pools.run(2, train_with_older_torch, {"store": tmp_path})
    pools.restart(2)
    reports = pools.run(2, train, {"store": tmp_path / "plans"})
    refused_plan(reports, "torch", r"2\.14\.0", re.escape(torch.__version__))


@pytest.mark.parametrize("after", [0.05, 0.1, 0.15, 0.2])
def test_kill_leaves_no_torn_plan(pools: Pools, tmp_path: Path, after: float) -> None:
    pools.run(2, train, {"store": tmp_path / "warm-up"})
    pools.kill_during(2, train_many, {"store": tmp_path}, after)
    for report in pools.run(2, train, {"store": tmp_path / "0"}):
        if not ORACLE_ONLY:
            assert not problems(report), report
    for path in tmp_path.glob("*/*/rank*.rote"):
        assert path.stat().st_size > 64, path


def train_many(store: Path) -> None:
    for i in range(20):
        train(store / str(i))


@pytest.mark.ranks(2)
def test_verify_passes_on_a_right_plan(tmp_path: Path) -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            out = torch.nn.functional.dropout(model(x), 0.2)
            loss = out.square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        state = {"model": model, "optimizer": optimizer}
        return over(capture, train_step, inputs(16, 4, 8), state=state, verify=4, plans=tmp_path)

    check_right(script, replays=10)


@pytest.mark.ranks(1)
def test_verify_finds_what_no_guard_can_see(tmp_path: Path) -> None:
    """A file is out of reach of guards: `verify` exists for such steps."""
    if ORACLE_ONLY:
        return
    import rote

    setting = tmp_path / "scale"
    setting.write_text("2.0")

    def step(x: Tensor) -> Tensor:
        return x * float(setting.read_text())

    captured = rote_capture(step, verify=100)
    xs = inputs(30, 4)
    for _ in range(8):
        captured(next(xs))
    assert captured.stats.replays > 0, captured.stats
    setting.write_text("3.0")
    try:
        for x in xs:
            captured(x)
    except rote.VerificationError as error:
        assert re.search("output|return|result", str(error)), str(error)
    else:
        raise AssertionError("a stale replay was not found")


@pytest.mark.ranks(2)
def test_explain_says_what_was_erased_and_who_communicates() -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = capture(training(model, optimizer), state={"model": model, "optimizer": optimizer})
        for x in inputs(CALLS, 4, 8):
            yield step(x)
        for x in inputs(CALLS, 3, 8):
            yield step(x)
        return None

    if ORACLE_ONLY:
        return
    step = run(script, rote_capture).steps[0]
    text = step.explain()
    for word in ("ops", "all_reduce", "models.py:", "guard", "args[0].shape"):
        assert word in text, (word, text)
    fields = {field.name for field in dataclasses.fields(step.stats)}
    assert fields >= {
        "calls",
        "recordings",
        "replays",
        "fallbacks",
        "variants",
        "guard_misses",
        "refusals",
    }
    assert step.stats.calls == 2 * CALLS
    assert step.stats.variants == 2
