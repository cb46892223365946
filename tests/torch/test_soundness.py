"""No host state changes unseen: a step that reads it equals eager after a change.

`scripts/` holds the places where a number hides. Here are functions within
functions, what is patched into a library, what a step leaves behind, and what
is refused since it moves and cannot be guarded.
"""

import itertools
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hidden import AFTER, BEFORE
from oracle import ORACLE_ONLY, Calls, Capture, check_right, over, rote_capture
from torch import Tensor, nn

SCALE = 2.0


def set_scale(value: float) -> None:
    global SCALE
    SCALE = value


class Value:
    def __init__(self, value: float) -> None:
        self.value = value


@pytest.mark.parametrize("what", ["global", "cell", "attribute"])
def test_captured_function_within_another(what: str) -> None:
    """What the inner function reads is seen by the outer one."""

    def script(capture: Capture) -> Calls:
        set_scale(2.0)
        cell = 2.0

        def change(value: float) -> None:
            nonlocal cell
            if what == "global":
                set_scale(value)
            elif what == "cell":
                cell = value
            else:
                holder.value = value

        holder = Value(2.0)
        functions = {"global": lambda x: x * SCALE, "cell": lambda x: x * cell, "attribute": lambda x: x * holder.value}
        inner = capture(functions[what])
        step = capture(lambda x: inner(x) + 1)
        for i in range(18):
            change(2.0 + i // 6)
            yield step(torch.arange(4.0))
        return {}

    found = check_right(script)
    if not ORACLE_ONLY:
        assert found.stats[-1][-1].replays > 6, found.stats[-1]


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def forward_of_a_library_class(model: nn.Sequential) -> Any:
    original = nn.Tanh.forward
    nn.Tanh.forward = lambda self, x: x  # type: ignore[method-assign]
    return lambda: setattr(nn.Tanh, "forward", original)


def function_of_the_library(model: nn.Sequential) -> Any:
    original = torch.nn.functional.relu
    torch.nn.functional.relu = lambda x: original(x) + 1
    return lambda: setattr(torch.nn.functional, "relu", original)


def hook_on_all_modules(model: nn.Sequential) -> Any:
    return nn.modules.module.register_module_forward_hook(lambda module, args, output: output * 2).remove


def order_of_children(model: nn.Sequential) -> Any:
    model._modules["0"] = model._modules.pop("0")
    return lambda: None


def hook_exchanged_for_another(model: nn.Sequential) -> Any:
    model[0].handle.remove()
    return model[0].register_forward_hook(lambda module, args, output: output * 3).remove


@pytest.mark.parametrize(
    "change",
    [
        forward_of_a_library_class,
        function_of_the_library,
        hook_on_all_modules,
        order_of_children,
        hook_exchanged_for_another,
    ],
    ids=lambda change: change.__name__,
)
def test_patched(change: Callable[[nn.Sequential], Callable[[], object]]) -> None:
    """``change`` returns what undoes it."""

    def script(capture: Capture) -> Calls:
        model, undo = small_model(), []
        model[0].handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
        calls = (torch.ones(2, 4) for _ in range(BEFORE + AFTER))
        before = {BEFORE: lambda: undo.append(change(model))}
        step = lambda x: torch.nn.functional.relu(model(x)).detach()  # noqa: E731
        return over(capture, step, calls, state=model, before=before, end=lambda: (undo[0](), model)[1])

    check_right(script)


def adds_an_entry(module: nn.Module, found: Any, prefix: str, metadata: Any) -> None:
    found[f"{prefix}more"] = torch.ones(2)


def halves(*_: Any) -> None:
    with torch.no_grad():
        HALVED[0].mul_(0.5)


HALVED: list[Tensor] = []
SAVING: dict[str, Callable[[nn.Module], object]] = {
    "buffer": lambda model: model.register_buffer("scale", model.scale, persistent=False),
    "hook after saving": lambda model: model.register_state_dict_post_hook(adds_an_entry),
    "hook before saving": lambda model: model.register_state_dict_pre_hook(halves),
    "hook before loading": lambda model: model.register_load_state_dict_pre_hook(halves),
    "hook after loading": lambda model: model.register_load_state_dict_post_hook(halves),
}


@pytest.mark.parametrize("name", SAVING)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_modules_save_and_load_by(name: str) -> None:
    def script(capture: Capture) -> Calls:
        model, other, third = (nn.BatchNorm1d(4) for _ in range(3))
        model.register_buffer("scale", torch.ones(4))
        other.register_buffer("scale", torch.ones(4))
        HALVED[:] = [third.weight]

        def step(x: Tensor) -> Tensor:
            other.load_state_dict(model.state_dict(), strict=False)
            return x * len(model.state_dict()) * third.weight.detach()

        before = {BEFORE: lambda: SAVING[name](other if "loading" in name else model)}
        calls = (torch.ones(2, 4) for _ in range(BEFORE + AFTER))
        return over(capture, step, calls, state=[model, other, third], before=before)

    found = check_right(script)
    assert ORACLE_ONLY or found.stats[BEFORE - 1][0].replays, found.stats[-1]


def iterator() -> Callable[[], float]:
    held = iter([2.0] * 5 + [3.0] * 20)
    return lambda: next(held)


def generator() -> Callable[[], float]:
    held = (float(i // 5) for i in itertools.count())
    return lambda: next(held)


def pythons_random() -> Callable[[], float]:
    random.seed(0)
    return lambda: 2.0 if random.random() < 0.9 else 3.0


def random_object() -> Callable[[], float]:
    held = random.Random(1)
    return lambda: 2.0 if held.random() < 0.9 else 3.0


def numpys_random() -> Callable[[], float]:
    np.random.seed(1)
    return lambda: 2.0 if np.random.rand() < 0.9 else 3.0


def numpys_generator() -> Callable[[], float]:
    held = np.random.default_rng(1)
    return lambda: 2.0 if held.random() < 0.9 else 3.0


@pytest.mark.parametrize(
    "build",
    [iterator, generator, pythons_random, random_object, numpys_random, numpys_generator],
    ids=lambda build: build.__name__,
)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_moves_unseen_is_refused(build: Callable[[], Callable[[], float]]) -> None:
    def script(capture: Capture) -> Calls:
        read = build()
        return over(capture, lambda x: x * read(), (torch.ones(4) for _ in range(12)))

    found = check_right(script)
    if not ORACLE_ONLY:
        (message,) = found.steps[0].stats.refusals
        assert "remedy" in message and not found.steps[0].stats.replays, message


def test_first_parameter_may_be_asked_for() -> None:
    """next() on an iterator that the step makes itself is no host state."""

    def script(capture: Capture) -> Calls:
        model = small_model()

        def step(x: Tensor) -> Tensor:
            return model(x.to(next(model.parameters()).dtype)).detach()

        return over(capture, step, (torch.ones(2, 4) for _ in range(6)), state=model)

    check_right(script, replays=1)


@pytest.mark.filterwarnings("ignore:rote")
def test_results_of_a_tensor_subclass_keep_their_class() -> None:
    class Labelled(torch.Tensor):
        pass

    def script(capture: Capture) -> Calls:
        step = capture(lambda x: x * 2)
        for _ in range(6):
            result = step(torch.ones(4).as_subclass(Labelled))
            yield type(result).__name__
        return {}

    check_right(script)


def test_threads_that_record_at_once_leave_torch_as_it_was() -> None:
    begun, done = threading.Event(), threading.Event()
    before = torch.get_rng_state, vars(torch.Tensor).get("numpy")

    def slow(x: Tensor) -> Tensor:
        begun.set()
        done.wait(10)
        return x * 2

    first, second = rote_capture(slow), rote_capture(lambda x: x + 1)
    thread = threading.Thread(target=first, args=(torch.ones(4),))
    thread.start()
    assert begun.wait(10)
    assert torch.equal(second(torch.ones(4)), torch.full((4,), 2.0))
    done.set()
    thread.join(10)
    assert (torch.get_rng_state, vars(torch.Tensor).get("numpy")) == before


def pops_from_a_batch(batch: dict[str, Tensor]) -> Tensor:
    y = batch.pop("y")
    return batch["x"] * y


def writes_to_a_batch(batch: dict[str, Tensor]) -> Tensor:
    batch["z"] = batch["x"]
    return batch["x"] * batch["y"]


def writes_to_a_library(batch: dict[str, Tensor]) -> Tensor:
    torch.nn.functional.written_here = 3  # type: ignore[attr-defined]
    return batch["x"] * 2


def asks_for_a_gradient(batch: dict[str, Tensor]) -> Tensor:
    batch["x"].requires_grad_(True)
    return batch["x"].detach() * batch["y"]


def leaves_grad_mode_off(batch: dict[str, Tensor]) -> Tensor:
    torch.set_grad_enabled(False)
    return batch["x"] * batch["y"]


def returns_the_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return batch


@pytest.mark.parametrize(
    "step",
    [
        pops_from_a_batch,
        writes_to_a_batch,
        writes_to_a_library,
        asks_for_a_gradient,
        leaves_grad_mode_off,
        returns_the_batch,
    ],
    ids=lambda step: step.__name__,
)
@pytest.mark.filterwarnings("ignore:rote")
def test_what_a_step_leaves_behind_is_left_behind(step: Callable[[dict[str, Tensor]], Any]) -> None:
    def script(capture: Capture) -> Calls:
        captured = capture(step)
        torch.nn.functional.written_here = 0  # type: ignore[attr-defined]
        for i in range(6):
            batch = {"x": torch.full((4,), float(i)), "y": torch.ones(4)}
            result = captured(batch)
            yield {"same": result is batch, "batch": dict(batch), "grads": torch.is_grad_enabled()}
            yield {"requires": {name: tensor.requires_grad for name, tensor in batch.items()}}
            yield getattr(torch.nn.functional, "written_here", 0)
            torch.nn.functional.written_here = i % 2  # type: ignore[attr-defined]
            torch.set_grad_enabled(True)
        return {}

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_identity_of_an_argument_is_not_asked_for() -> None:
    def script(capture: Capture) -> Calls:
        known = torch.ones(4)
        numbers = {id(known)}
        return over(
            capture,
            lambda x: x * (3.0 if id(x) in numbers else 2.0),
            ((known if call == 8 else torch.ones(4),) for call in range(12)),
        )

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_list_that_is_in_the_result_twice() -> None:
    def script(capture: Capture) -> Calls:
        def twice(x: Tensor) -> Any:
            found = [x * 2]
            return found, {"again": found}

        step = capture(twice)
        for _ in range(6):
            first, second = step(torch.ones(4))
            yield first, first is second["again"]
        return {}

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_gradients_keep_their_class() -> None:
    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.ones(4))

        def step(x: Tensor) -> Tensor:
            weight.grad = nn.Parameter(x * 2, requires_grad=False)
            return x * 3

        return over(
            capture,
            step,
            (torch.ones(4) + call for call in range(8)),
            state=[weight],
            seen=lambda: (type(weight.grad).__name__, weight.grad),
        )

    check_right(script)


@pytest.mark.filterwarnings("ignore:rote")
def test_gradients_that_are_one_tensor_stay_one() -> None:
    def script(capture: Capture) -> Calls:
        a, b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def share(x: Tensor) -> Tensor:
            (a * x).sum().backward()
            b.grad = a.grad
            return x * 1

        step = capture(share, state=[a, b])
        for _ in range(6):
            yield step(torch.ones(4))
            yield a.grad is b.grad
            a.grad = b.grad = None
        return {}

    check_right(script)


def test_op_that_returns_nothing_is_run_at_every_replay() -> None:
    seen: list[float] = []

    @torch.library.custom_op("rote_tests::note", mutates_args=())
    def note(x: Tensor) -> None:
        seen.append(x.sum().item())

    def step(x: Tensor) -> Tensor:
        torch.ops.rote_tests.note(x)
        return x * 2

    captured = rote_capture(step)
    for i in range(8):
        captured(torch.full((4,), float(i)))
    assert seen == [4.0 * i for i in range(8)]
    if not ORACLE_ONLY:
        assert captured.stats.replays > 0


def factorized(x: Tensor) -> Tensor:
    return torch.linalg.cholesky(x @ x.t() + x)


def asserted(x: Tensor) -> Tensor:
    torch._assert_async((x.diagonal() > 0).all())
    return x * 2


@pytest.mark.parametrize("checked", [factorized, asserted])
def test_what_an_op_checks_is_checked_at_every_replay(checked: Callable[[Tensor], Tensor]) -> None:
    captured = rote_capture(checked)
    for i in range(5):
        assert torch.equal(captured(torch.eye(4) * (i + 1)), checked(torch.eye(4) * (i + 1)))
    for step in (checked, captured):
        with pytest.raises(RuntimeError, match=r"positive-definite|nonzero value"):
            step(torch.eye(4) * -0.5)
    assert torch.equal(captured(torch.eye(4)), checked(torch.eye(4)))
    if not ORACLE_ONLY:
        assert captured.stats.replays > 2
