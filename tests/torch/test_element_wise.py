"""A replay calls element-wise kernels past the dispatcher, with iterators that it keeps: nobody can tell."""

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, rote_capture
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

CALLS = 8
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64)
# Shapes of a tensor that is written and of what it is computed with.
SHAPES = [((7,), (7,)), ((3, 70), (70,)), ((3, 70), ()), ((), ()), ((0, 4), (4,)), ((1,), (1,))]


def numbers(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Among them infinities, NaN and numbers that are rounded to zero where the machine is told to."""
    drawn = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    if dtype.is_floating_point and drawn.numel() > 60:
        drawn.view(-1)[:4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-40])
    return drawn.to(dtype)


def in_place(a: Tensor, b: Tensor, rate: float) -> None:
    a.add_(b).sub_(b, alpha=3).mul_(b).mul_(3).add_(2)
    if not a.is_floating_point():
        return
    a.mul_(0.1).div_(b).div_(3).div_(0.7).add_(1e-8).add_(b, alpha=rate).sub_(rate).mul_(1 - rate * 0.01)
    same = b.to(a.dtype)
    a.lerp_(same.expand_as(a), 0.1).addcmul_(same, same, value=1 - 0.999).addcdiv_(a.clone(), same, value=-rate)
    a.neg_().abs_().sqrt_().rsqrt_()


def results(a: Tensor, b: Tensor, rate: float) -> Tensor:
    out = (a + b) * b - a * 2
    if not a.is_floating_point():
        return out + 1
    same = b.to(a.dtype)
    out = out / b + torch.lerp(a, same.expand_as(a), 0.3) - torch.addcmul(a, same, same, value=rate)
    out = F.silu(out * 0.1) + torch.addcdiv(-a, same, same + 1, value=rate)
    return torch.ops.aten.silu_backward(out, a.abs().sqrt().rsqrt() + out) * 1.7


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("other", DTYPES, ids=str)
def test_ops(dtype: torch.dtype, other: torch.dtype) -> None:
    if torch.promote_types(dtype, other) != dtype:
        pytest.skip("no result to write into")

    def script(capture: Capture) -> Calls:
        made = [numbers(i, shape, dtype) for i, (shape, _) in enumerate(SHAPES)]
        made.append(numbers(90, (5, 6), dtype).mT)
        state = [*made, *(tensor.clone() for tensor in made)]
        given = [*(shape for _, shape in SHAPES), (6, 1)]
        rate = 1e-3

        def update(others: list[Tensor]) -> list[Tensor]:
            out = [results(a, b, rate) for a, b in zip(state[: len(given)], others, strict=True)]
            for a, b in zip(state[len(given) :], others, strict=True):
                in_place(a, b, rate)
            return out

        step = capture(torch.no_grad()(update), state=state)
        for call in range(CALLS):
            yield step([numbers(100 * call + i, shape, other) for i, shape in enumerate(given)])
        return state

    check_equal(script, replays=CALLS - 3)


@pytest.mark.parametrize("foreach", [None, True], ids=["one by one", "lists"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_numbers_that_change(foreach: bool | None, dtype: torch.dtype) -> None:
    """A step counter and a learning rate are other numbers at every step."""

    def script(capture: Capture) -> Calls:
        weight = torch.nn.Parameter(numbers(0, (5, 20), dtype))
        optimizer = torch.optim.AdamW([weight], foreach=foreach)

        def train_step(x: Tensor) -> Tensor:
            loss = (weight * x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        step = capture(train_step, state={"weight": weight, "optimizer": optimizer})
        for call in range(20):
            optimizer.param_groups[0]["lr"] = 0.1 / (call + 3)
            yield step(numbers(call, (5, 20), dtype))
        return weight, optimizer.state_dict()

    check_right(script)


def kept(change: Callable[[Tensor], object]) -> Callable[[Capture], Calls]:
    """A step that computes with a tensor that it keeps. Between calls something befalls it."""

    def script(capture: Capture) -> Calls:
        held, other = (numbers(seed, (3, 40), torch.float32) for seed in range(2))

        @torch.no_grad()
        def update(x: Tensor) -> Tensor:
            other.copy_(x)
            held.mul_(0.9).add_(other)
            return held * 3 + x

        step = capture(update, state=[held, other])
        for call in range(2 * CALLS):
            yield step(numbers(call, (3, 40), torch.float32))
            if call == CALLS:
                change(held)
        yield step(torch.ones(3, 40))
        return held

    return script


def grown_and_back(held: Tensor) -> None:
    values = held.clone()
    held.untyped_storage().resize_(0)
    held.untyped_storage().resize_(1 << 16)
    held.copy_(values)


MOVES: dict[str, Callable[[Tensor], object]] = {
    "shared with other processes": lambda held: held.share_memory_(),
    "freed and allocated again": grown_and_back,
    "given other memory": lambda held: held.set_(held.clone()),
}


@pytest.mark.parametrize("move", MOVES)
def test_memory_that_moves(move: str) -> None:
    check_right(kept(MOVES[move]))


def test_a_copy_that_is_made_when_it_is_written() -> None:
    clones: list[Tensor] = []

    def script(capture: Capture) -> Calls:
        clones.clear()
        yield from kept(lambda held: clones.append(torch._lazy_clone(held)))(capture)
        return clones

    check_right(script)


@pytest.mark.filterwarnings("ignore:.*Overriding a previously registered kernel")
def test_a_kernel_that_a_library_has_replaced() -> None:
    def script(capture: Capture) -> Calls:
        library = torch.library.Library("aten", "IMPL")
        replace = kept(lambda _: library.impl("add_.Tensor", lambda a, b, *, alpha=1: a.copy_(a - b), "CPU"))
        try:
            return (yield from replace(capture))
        finally:
            library._destroy()

    check_right(script)


@pytest.mark.skipif(ORACLE_ONLY, reason="only a replay can leave ops out")
def test_a_profiler_sees_the_ops() -> None:
    def names(capture: Callable[..., Callable[[Tensor], Tensor]]) -> Counter[str]:
        held, other = (numbers(seed, (3, 40), torch.float32) for seed in range(2))

        @torch.no_grad()
        def update(x: Tensor) -> Tensor:
            other.copy_(x)
            return held.lerp_(other, 0.1).addcmul_(other, other, value=0.1) + x

        step = capture(update, state=[held, other])
        for call in range(CALLS):
            step(numbers(call, (3, 40), torch.float32))
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            step(torch.ones(3, 40))
        return Counter(event.name for event in profiler.events() if event.name.startswith("aten::"))

    expected = names(lambda fn, **_: fn)
    found = names(rote_capture)
    assert {name: found[name] for name in expected} == expected


def test_a_recording_sees_what_an_inner_replay_does() -> None:
    def script(capture: Capture) -> Calls:
        held = numbers(0, (3, 40), torch.float32)

        @torch.no_grad()
        def inner(x: Tensor) -> Tensor:
            held.mul_(0.9).add_(x)
            return held * 3

        inside = capture(inner, state=[held])
        for call in range(CALLS):
            yield inside(numbers(call, (3, 40), torch.float32))

        @torch.no_grad()
        def outer(x: Tensor) -> Tensor:
            return inside(x) + held

        step = capture(outer, state=[held])
        for call in range(CALLS):
            yield step(numbers(call, (3, 40), torch.float32))
        return held

    check_right(script)
