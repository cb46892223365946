"""`rote.capture` behaves like the function it captures."""

import copy
import functools
import inspect
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Mlp, inputs, mesh, mlp, training
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, facts, over, rote_capture, same
from ranks import CaseSkipped
from torch import Tensor, nn

CALLS = 12


def needs_rote() -> None:
    if ORACLE_ONLY:
        raise CaseSkipped("says nothing about eager PyTorch")


@pytest.mark.ranks(1)
def test_signature_name_and_doc_are_kept() -> None:
    needs_rote()
    import rote

    def train_step(x: Tensor, *, scale: float = 2.0) -> Tensor:
        """One step."""
        return x * scale

    captured = rote.capture(train_step)
    assert inspect.signature(captured) == inspect.signature(train_step)
    assert captured.__name__ == "train_step"
    assert captured.__doc__ == "One step."
    assert isinstance(rote.__version__, str)


@pytest.mark.ranks(1)
def test_decorator_with_and_without_options() -> None:
    needs_rote()
    import rote

    @rote.capture
    def plain(x: Tensor) -> Tensor:
        return x + 1

    @rote.capture(state=[], strict=True)
    def with_options(x: Tensor) -> Tensor:
        return x + 2

    for x in inputs(CALLS, 4):
        assert same(plain(x), x + 1)
        assert same(with_options(x), x + 2)
    assert plain.stats.replays > 0
    assert with_options.stats.replays > 0
    assert plain.stats.calls == with_options.stats.calls == CALLS


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["module", "dict", "list", "nested", "tensors"])
def test_ways_to_name_state(how: str) -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scale = torch.ones(())

        def train_step(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean() * scale
            loss.backward()
            optimizer.step()
            scale.mul_(0.99)
            return loss.detach()

        state: Any = {
            "module": {"it": [model, optimizer, scale]},
            "dict": {"model": model, "optimizer": optimizer, "scale": scale},
            "list": [model, optimizer, scale],
            "nested": {"training": {"model": model, "rest": [optimizer, {"scale": scale}]}},
            "tensors": [dict(model.named_parameters()), optimizer, scale],
        }[how]
        return over(capture, train_step, inputs(CALLS, 4, 8), state=state)

    check_equal(script, replays=6)


@pytest.mark.ranks(1)
def test_module_alone_as_state_and_no_state() -> None:
    def script(capture: Capture) -> Calls:
        model = Mlp()
        one = capture(lambda x: model(x).detach(), state=model)
        two = capture(lambda x: x.softmax(-1))
        for x in inputs(CALLS, 4, 8):
            yield one(x), two(x)
        return model

    check_equal(script, replays=6)


@pytest.mark.ranks(2)
def test_exceptions_of_the_step_come_through() -> None:
    """An error while recording drops the recording; the next calls record again."""

    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def train_step(x: Tensor, fail: bool) -> Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            if fail:
                raise KeyError("from the step")
            optimizer.step()
            return loss.detach()

        step = capture(train_step, state={"model": model, "optimizer": optimizer})
        for i, x in enumerate(inputs(20, 4, 8)):
            try:
                yield step(x, i in (1, 12))
            except KeyError as error:
                yield str(error), [p.grad for p in model.parameters()]
        return {"model": model, "optimizer": optimizer}

    check_right(script, replays=8)


@pytest.mark.ranks(1)
def test_captured_function_calls_a_captured_function() -> None:
    def script(capture: Capture) -> Calls:
        inner = capture(lambda x: x.exp())
        outer = capture(lambda x: inner(x) + 1)
        for x in inputs(CALLS, 4):
            yield outer(x), inner(x)
        return None

    check_right(script)


@pytest.mark.ranks(1)
def test_many_captures_come_and_go() -> None:
    def script(capture: Capture) -> Calls:
        for i in range(20):
            step = capture(lambda x, i=i: x * i)
            for x in inputs(6, 4):
                yield step(x)
        return None

    check_right(script)


@pytest.mark.ranks(1)
def test_empty_and_scalar_tensors() -> None:
    def script(capture: Capture) -> Calls:
        return over(
            capture,
            lambda x, y: (x.sum(0), x.reshape(-1) * 2, y + 1, y.expand(3)),
            ((torch.empty(0, 4), torch.tensor(float(i))) for i in range(CALLS)),
        )

    check_equal(script, replays=6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_dtypes(dtype: torch.dtype) -> None:
    def script(capture: Capture) -> Calls:
        return over(
            capture,
            lambda x: (x.to(torch.float32) * 2, x.clone(), (x != 0).sum()),
            (((x * 3).abs().to(dtype),) for x in inputs(CALLS, 4)),
        )

    check_equal(script, replays=6)


def every_kind_of_op(x: Tensor) -> Any:
    """Multiple results, lists, optional arguments, scalars of all kinds, in-place, out=."""
    values, indices = x.topk(2, dim=-1)
    mean_and_deviation = torch.std_mean(x, dim=-1, correction=0)
    parts = torch.split(x, [1, 3], dim=-1)
    stacked = torch.stack([*parts[1].unbind(-1), values[:, 0]])
    torch.add(x, 1, out=(out := torch.empty_like(x)))
    out.clamp_(min=-1.0).masked_fill_(out > 1.5, 0.25)
    out[:2].neg_()
    rows = torch.arange(x.shape[0], dtype=torch.int64)
    picked = x[rows, indices[:, 0]]
    where = torch.where(x > 0, x, -0.0)
    return values, indices, mean_and_deviation, stacked, out, picked, where, x.tril(-1), x.cumsum(0)


@pytest.mark.ranks(1)
def test_kinds_of_ops() -> None:
    check_equal(lambda capture: over(capture, every_kind_of_op, inputs(CALLS, 4, 4)), replays=6)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    "options",
    [{"verify": -1}, {"max_variants": 0}, {"ignore": "not a list"}, {"state": {"model": object()}}],
    ids=lambda options: next(iter(options)),
)
def test_wrong_options_are_errors_at_once(options: dict[str, Any]) -> None:
    needs_rote()
    try:
        rote_capture(lambda x: x, **options)
    except (TypeError, ValueError) as error:
        assert next(iter(options)) in str(error), str(error)
    else:
        raise AssertionError("accepted")


def misses_printed(directory: Path) -> list[str]:
    """Standard error of a first use of Rote under ROTE_LOG=guards."""
    os.environ["ROTE_LOG"] = "guards"
    saved, target = os.dup(2), os.open(directory / "stderr", os.O_CREAT | os.O_RDWR)
    os.dup2(target, 2)
    try:
        step = rote_capture(lambda x: x * 2)
        for x in inputs(8, 4):
            step(x)
        for x in inputs(8, 5):
            step(x)
    finally:
        os.dup2(saved, 2)
        del os.environ["ROTE_LOG"]
    return (directory / "stderr").read_text().splitlines()


def test_log_of_guard_misses(pools: Any, tmp_path: Path) -> None:
    pools.restart(1)
    (lines,) = pools.run(1, misses_printed, {"directory": tmp_path})
    pools.restart(1)
    if not ORACLE_ONLY:
        ours = [line for line in lines if "args[0].shape" in line]
        assert ours, lines
        assert all("4" in line and "5" in line for line in ours[:1]), ours


@pytest.mark.ranks(2)
def test_nothing_is_said_when_nothing_is_wrong() -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))
        step = capture(lambda x: model(x).detach(), state={"model": model})
        for x in inputs(CALLS, 4, 8):
            yield step(x), facts(x)
        return None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_right(script)
    assert not [w for w in caught if "rote" in str(w.message).lower()], caught


def callables() -> dict[str, Callable[[Tensor], Tensor]]:
    import functools

    class Doubler:
        def __call__(self, x: Tensor) -> Tensor:
            return x * 2

        def method(self, x: Tensor) -> Tensor:
            return x * 3

    return {
        "object": Doubler(),
        "method": Doubler().method,
        "partial": functools.partial(torch.mul, 4.0),
        "module": torch.nn.ReLU(),
        "builtin": torch.sigmoid,
    }


@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["object", "method", "partial", "module", "builtin"])
def test_kinds_of_callables(kind: str) -> None:
    def script(capture: Capture) -> Calls:
        fn = callables()[kind]
        return over(capture, fn if kind != "partial" else lambda x: x * 4.0, inputs(CALLS, 4))

    check_equal(script, replays=6)


class Raises:
    """A step that has no name and says so in its own way."""

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2

    def __getattr__(self, name: str) -> Any:
        raise (ValueError if name.startswith("__") else AttributeError)(name)


class Misleads:
    """A step with attributes that are called as Rote's own, and odd values of a function's."""

    def __init__(self) -> None:
        self.__qualname__ = 5
        self.__code__ = "none"
        self._call = self._fn = self._lock = self.stats = None

    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


def script_module() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))


@pytest.mark.parametrize("make", [Raises, Misleads, script_module, lambda: torch.neg])
def test_callable_objects_of_all_kinds(make: Callable[[], Any]) -> None:
    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        fn = make()
        step = capture(fn, state=fn if isinstance(fn, torch.nn.Module) else None)
        for x in inputs(8, 4, 4):
            with torch.no_grad():
                yield step(x)
        return {}

    check_right(script, replays=5)


def test_copies_of_what_holds_a_captured_function() -> None:
    """A function is copied as itself, a method as one of the copy."""

    def script(capture: Capture) -> Calls:
        model = torch.nn.Linear(4, 4)
        model.forward = capture(model.forward, state={"model": model})  # type: ignore[method-assign]
        for x in inputs(CALLS, 4, 4):
            yield model(x)
        averaged = torch.optim.swa_utils.AveragedModel(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            twin.weight.add_(1)
        for x in inputs(CALLS, 4, 4):
            yield model(x), twin(x), averaged(x)
        return None

    check_right(script)
    step = rote_capture(lambda x: x * 2)
    assert ORACLE_ONLY or copy.deepcopy({"step": step})["step"] is step


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_pickled_by_name_or_as_the_plain_function(tmp_path: Path) -> None:
    """As checkpoints, and processes that are spawned, do with what holds a captured function."""
    captured = globals()["doubled"] = rote_capture(doubled)  # as the decorator does
    assert pickle.loads(pickle.dumps(captured)) is captured
    model = Scaled()
    model.forward = rote_capture(model.forward, state=model)  # type: ignore[method-assign]
    for _ in range(4):
        model(torch.ones(2)).sum().backward()
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    with torch.no_grad():
        loaded.scale.fill_(3)
    assert loaded(torch.ones(2)).tolist() == [3, 3]
    assert model(torch.ones(2)).tolist() == [1, 1]
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):  # as the plain function
        pickle.dumps(rote_capture(lambda x: x))


def test_warnings_that_are_errors_do_not_stop_a_step() -> None:
    """A refusal warns after the step has run: its result must not be lost."""

    def script(capture: Capture) -> Calls:
        weight = torch.ones(3)

        def step(x: Tensor) -> Tensor:
            weight.add_(1)
            return x * weight * weight.sum().item()

        captured = capture(step, state=weight)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(4):
                yield captured(torch.ones(3))
        return {"weight": weight}

    check_right(script)


@pytest.mark.parametrize("around", [False, True])
def test_compilers_leave_it_as_it_is(around: bool) -> None:
    """`torch.compile` breaks the graph at a captured function, before its first call too."""

    def script(capture: Capture) -> Calls:
        weight = torch.ones(3)

        def step(x: Tensor) -> Tensor:
            weight.mul_(0.5)
            return (x * weight).sum()

        captured = capture(step, state=weight)
        compiled = torch.compile((lambda x: captured(x * 2) + 1) if around else captured, backend="eager")
        for call in range(CALLS):
            yield compiled(torch.ones(3) + call)
        torch.compiler.reset()
        return {"weight": weight}

    check_right(script, replays=CALLS - 3)


def test_exported() -> None:
    """`torch.export` traces the function that was captured."""
    needs_rote()
    model = Scaled()
    model.forward = rote_capture(model.forward, state=model)  # type: ignore[method-assign]
    with torch.no_grad():
        exported = torch.export.export(model, (torch.ones(2),)).module()
        assert exported(torch.full((2,), 3.0)).tolist() == [3, 3]


def changed(captured: Any, changes: dict[int, Callable[[], None]]) -> Calls:
    """Calls it, with a change before some of the calls."""
    for call in range(max(changes) + 4):
        changes.get(call, lambda: None)()
        yield captured(torch.ones(2) + call)
    return {}


def test_attributes_are_the_functions() -> None:
    """A captured function that keeps values in attributes of its own."""

    def script(capture: Capture) -> Calls:
        def step(x: Tensor, by: float = 1.0) -> Tensor:
            return x * captured.scale * by + getattr(captured, "more", 0)

        captured = capture(step)
        captured.scale = 2.0
        changes: dict[int, Callable[[], None]] = {
            4: lambda: setattr(captured, "scale", 3.0),
            8: lambda: setattr(captured, "more", 1),
            12: lambda: delattr(captured, "more"),
            16: lambda: setattr(captured, "__defaults__", (5.0,)),
            20: lambda: setattr(captured, "__code__", (lambda x, by: x * captured.scale - by).__code__),
            24: lambda: captured.__dict__.update(scale=7.0),
        }
        return (yield from changed(captured, changes))

    check_right(script, replays=8)


def test_asked_for_by_other_ways() -> None:
    """Its dict, its name, its text and its annotations are the function's, however a step asks."""

    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> Tensor:
            scale = captured.__dict__.get("scale", 1.0) * vars(helper).get("scale", 1.0)
            scale += ("scale" in captured.__dict__) + len([name for name in dir(captured) if name == "scale"])
            scale += len(helper.__name__) + len(helper.__doc__ or "") + len(captured.__doc__ or "")
            return x * scale * helper.__annotations__.get("x", 1)

        def helper() -> None:
            pass

        captured = capture(step)
        changes: dict[int, Callable[[], None]] = {
            4: lambda: captured.__dict__.setdefault("scale", 3.0),
            8: lambda: setattr(helper, "scale", 2.0),
            12: lambda: setattr(helper, "__name__", "other"),
            16: lambda: setattr(helper, "__doc__", "more"),
            20: lambda: setattr(captured, "__doc__", "a step"),
            24: lambda: helper.__annotations__.update(x=5),
            28: lambda: setattr(helper, "__annotations__", {"x": 6}),
        }
        return (yield from changed(captured, changes))

    check_right(script, replays=10)


def test_methods_are_methods() -> None:
    """Bound ones compare, and tell their attributes, as the function's do."""
    needs_rote()

    class Holder:
        @rote_capture
        def method(self, x: Tensor) -> Tensor:
            """Doubles."""
            return x * self.method.factor  # type: ignore[attr-defined]

    Holder.method.factor = 2.0
    holder = Holder()
    assert holder.method == holder.method and holder.method.__self__ is holder
    assert (holder.method.__name__, holder.method.__doc__) == ("method", "Doubles.")
    for factor in (2.0, 2.0, 2.0, 3.0, 3.0, 3.0):
        Holder.method.factor = factor
        assert torch.equal(holder.method(torch.ones(2)), torch.full((2,), factor))
    assert Holder.method.stats.replays


@pytest.mark.parametrize(
    "function",
    [torch.sin, torch.nn.Tanh(), functools.partial(torch.mul, other=2), staticmethod(torch.neg), Scaled().forward],
)
def test_binds_as_the_function_does(function: Any) -> None:
    """As an attribute of a class."""
    needs_rote()

    class Holder:
        plain = function
        captured = rote_capture(function)

    x = torch.ones(2)
    with torch.no_grad():
        for _ in range(4):
            assert torch.equal(Holder().captured(x), Holder().plain(x))
            assert torch.equal(Holder.captured(x), Holder.plain(x))


@pytest.mark.parametrize(("backend", "refused"), [("eager", False), ("aot_eager", False), ("inductor", True)])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_modules_inside(backend: str, refused: bool) -> None:
    """Ops of compiled code are recorded where PyTorch's kernels run them; fused kernels are refused by their name."""

    def script(capture: Capture) -> Any:
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Linear(4, 2))
        net[0] = torch.compile(net[0], backend=backend)
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        return over(capture, training(net, opt), (torch.randn(3, 4) for _ in range(26)), state=[net, opt])

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert (stats.replays >= 20) != refused, stats
        assert refused == any("torch.compile with the backend inductor at" in each for each in stats.refusals), stats
