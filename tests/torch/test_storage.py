"""How tensors lie in memory, and what their bytes mean, is never guessed.

Lazily conjugated and negated views; arguments at other places of their storages;
ops that count from the start of a storage; questions of where a tensor lies.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import as_dtensor, mesh
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, rote_capture
from torch import Tensor
from torch.distributed.tensor import Replicate

CALLS = 6


def numbers(seed: int, *shape: int, dtype: torch.dtype = torch.complex64) -> Tensor:
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def gradient(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """The gradient of the sum of what a step returns."""

    def of(x: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        out = step(leaf)
        (out.abs().sum() if out.is_complex() else out.sum()).backward()
        assert leaf.grad is not None
        return leaf.grad * 1

    return of


def convolution(x: Tensor) -> Tensor:
    """A circular convolution through real Fourier transforms."""
    kernel = torch.fft.rfft(x.roll(1, -1) * 0.5).conj()
    return torch.fft.irfft(torch.fft.rfft(x) * kernel, n=x.shape[-1])


def rotary(x: Tensor) -> Tensor:
    """Rotary embeddings by complex numbers that the step computes."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[0]), 1e4 ** (-torch.arange(half) / half))
    turned = torch.view_as_complex(x.reshape(-1, half, 2)) * torch.polar(torch.ones_like(angles), angles).conj()
    return torch.view_as_real(turned.resolve_conj()).flatten(1)


# Steps of a complex matrix.
COMPLEX: dict[str, Callable[[Tensor], Tensor]] = {
    "conj of a result": lambda z: (z * 1).conj() * 2,
    "conj of an argument": lambda z: z.conj() + 1,
    "conj, cloned": lambda z: (z * 1).conj().clone() + z,
    "conj, contiguous": lambda z: (z * 2).mT.conj().contiguous() - z,
    "conj, returned": lambda z: (z * 2).conj(),
    "conj twice": lambda z: (z * 2).conj().mT.conj() + z,
    "conj and not, joined": lambda z: torch.cat([(z * 2).conj(), z * 2]),
    "rows of a conj, joined": lambda z: torch.cat(list((z * 2).conj().split(1))) * 2,
    "conj, multiplied by a matrix": lambda z: (z * 2).conj() @ z.mH,
    "the imaginary part of a conj": lambda z: (z * 2).conj().imag * 3,
    "the imaginary part of a conj, cloned": lambda z: (z * 2).conj().imag.clone() * 3,
    "the imaginary part of a conj, returned": lambda z: (z * 2).conj().imag,
    "neg of a conj": lambda z: torch._neg_view((z * 2).conj()) + z,
    "written through a conj": lambda z: (z * 2).conj().mul_(1j).sum() + z,
    "the conj of what is written later": lambda z: _written_later(z),
    "conj and not, both of one": lambda z: torch.stack([a := z * 2, a.conj()]).sum(0),
    "power spectrum": lambda z: (torch.fft.fft(z) * torch.fft.fft(z).conj()).real,
    "eigenvalues": lambda z: torch.linalg.eigvals(z.real * 2).abs().sum(),
    "ihfft": lambda z: torch.fft.ihfft(z.real * 2) * 2,
    "a gradient": gradient(lambda z: (z * 2).conj() * z.mT),
    "a gradient of polar": gradient(lambda z: torch.polar(z.abs(), z.angle())),
    "a gradient of ihfft": gradient(lambda z: torch.fft.ihfft(z.real)),
    "a gradient of eigenvalues": gradient(lambda z: torch.linalg.eigvals(z)),
    "a gradient of a norm": gradient(lambda z: torch.linalg.vector_norm(z * 2)),
    "a gradient of a real part": gradient(lambda z: (z.conj() * 2).imag * z.real),
}
REAL: dict[str, Callable[[Tensor], Tensor]] = {
    "convolution": convolution,
    "a gradient of a convolution": gradient(convolution),
    "rotary embeddings": rotary,
    "a gradient of rotary embeddings": gradient(rotary),
    "neg view, cloned": lambda x: torch._neg_view(x * 2).clone() + x,
    "neg views, joined": lambda x: torch.cat(list(torch._neg_view(x * 2).split(1))) * 2,
}


def _written_later(z: Tensor) -> Tensor:
    a = z * 2
    view = a.conj()
    before = view.clone()
    a.add_(1j)
    return before - view


@pytest.mark.parametrize("passes", ["default", "none", "all"])
@pytest.mark.parametrize("name", [*COMPLEX, *REAL])
def test_marks_survive(name: str, passes: str) -> None:
    def script(capture: Capture) -> Calls:
        step = capture(COMPLEX.get(name) or REAL[name], passes=passes)
        for call in range(CALLS):
            yield step(numbers(call, 4, 4, dtype=torch.complex64 if name in COMPLEX else torch.float32))
        return {}

    check_equal(script, replays=3)


@pytest.mark.parametrize("marks", ["conj", "neg", "both"])
def test_marked_arguments_are_told_from_others(marks: str) -> None:
    marked: dict[str, Callable[[Tensor], Tensor]] = {
        "conj": torch.conj,
        "neg": torch._neg_view,
        "both": lambda z: torch._neg_view(z.conj()),
    }

    def script(capture: Capture) -> Calls:
        step = capture(lambda z: (z * 2, z.clone(), z.conj() + 1))
        for change in (lambda z: z, marked[marks]) * 2:
            for call in range(CALLS):
                yield step(change(numbers(call, 4)))
        return {}

    check_right(script, replays=2 * CALLS)


@pytest.mark.parametrize("kind", ["a parameter", "a gradient"])
def test_a_mark_that_the_state_gets_is_seen(kind: str) -> None:
    def script(capture: Capture) -> Calls:
        p = torch.nn.Parameter(numbers(0, 4))
        p.grad = numbers(1, 4)
        step = capture(lambda: p.detach() * 2 + (p.grad * 3 if p.grad is not None else 0), state=[p])
        for _ in range(CALLS):
            yield step()
        if kind == "a parameter":
            p.data = p.data.conj()
        else:
            p.grad.data = p.grad.data.conj()
        for _ in range(CALLS):
            yield step()
        return {}

    check_right(script)


# -- where arguments lie -----------------------------------------------------------

BASE = 4000
Where = Callable[[Tensor], Any]

# Steps whose result depends on more than the argument's own elements.
AROUND: dict[str, Where] = {
    "as_strided from the start": lambda x: x.as_strided((4,), (1,), 0) * 2,
    "as_strided from the argument's own start": lambda x: x.as_strided((4,), (1,), 1000) * 2,
    "as_strided_scatter": lambda x: torch.as_strided_scatter(x, x[:2] * 2, (2,), (1,), 1000),
    "as_strided_copy": lambda x: torch.as_strided_copy(x, (4,), (1,), 1000) * 2,
    "further than the argument": lambda x: x.as_strided((8,), (1,)) * 2,
    "storage_offset()": lambda x: x * x.storage_offset(),
    "a branch on storage_offset()": lambda x: x * (2 if x.storage_offset() else 3),
    "storage_offset() of a view": lambda x: x * x[1:].storage_offset(),
    "the size of the storage": lambda x: x * x.untyped_storage().nbytes(),
    "the size of the storage's rest": lambda x: x * (x.untyped_storage().nbytes() // 4 - x.storage_offset()),
    "_base": lambda x: x * (2 if x._base is None else x._base.numel()),
    "the elements of _base": lambda x: x + (x if x._base is None else x._base[:4]),
    "_is_view": lambda x: x * (2 if x._is_view() else 3),
    "is_inference": lambda x: x * (2 if x.is_inference() else 3),
    "an unread argument's storage": lambda x: torch.ones(3) * x.storage_offset(),
}


def _arguments() -> list[Tensor]:
    base = numbers(0, BASE, dtype=torch.float32)
    shorter = numbers(1, 1100, dtype=torch.float32)
    with torch.inference_mode():
        inference = numbers(4, 4, dtype=torch.float32)
    return [
        base[1000:1004],
        base[2000:2004],
        base[:4],
        base[BASE - 4 :],
        shorter[1000:1004],
        numbers(2, 4, dtype=torch.float32),
        numbers(3, BASE, dtype=torch.float32)[1000:1004],
        inference,
        base[1000:1004],
        base[:2000][1000:1004],
    ]


@pytest.mark.parametrize("name", AROUND)
def test_what_lies_around_an_argument_is_guarded(name: str) -> None:
    def outcome(step: Callable[[Tensor], Any], x: Tensor) -> Any:
        try:
            return step(x)
        except RuntimeError as error:
            return str(error).split("\n")[0]

    def script(capture: Capture) -> Calls:
        step = capture(AROUND[name])
        for x in _arguments():
            for _ in range(4):
                yield outcome(step, x)
        return {}

    with torch.no_grad():
        check_right(script, replays=1)


def test_a_write_outside_of_an_argument_stays_where_eager_puts_it() -> None:
    def script(capture: Capture) -> Calls:
        base = torch.zeros(BASE)
        small = torch.zeros(8)

        def write(x: Tensor) -> Tensor:
            x.as_strided((4,), (1,), 0).add_(1)
            return x * 2

        step = capture(write)
        for x in [base[1000:1004]] * 4 + [base[:4]] * 4 + [small[4:]] * 4 + [small[:4]] * 4:
            yield step(x)
        return {"base": base, "small": small}

    check_right(script)


def test_an_argument_may_start_anywhere_in_its_storage() -> None:
    """Batches of one data set, and their shifted labels, share a plan."""

    def script(capture: Capture) -> Calls:
        data = numbers(0, BASE, dtype=torch.float32)
        step = capture(lambda x, y: (x * y).sum() + x[1:3].sum(), strict=True)
        for call in range(20):
            batch = data[call * 64 : call * 64 + 64].view(4, 16)
            yield step(batch[:, :-1], batch[:, 1:])
        return {}

    check_right(script, replays=17)


def test_an_arguments_gradient_may_change_its_layout() -> None:
    def script(capture: Capture) -> Calls:
        def double(x: Tensor) -> Tensor:
            assert x.grad is not None
            return x.detach() + x.grad.as_strided((4,), (1,))

        step = capture(double)
        x = numbers(0, 4, dtype=torch.float32).requires_grad_()
        wide = numbers(1, 8, dtype=torch.float32)
        for grad in (numbers(2, 4, dtype=torch.float32), wide[4:], wide[::2]):
            x.grad = grad
            for _ in range(4):
                yield step(x)
        return {}

    check_right(script)


def test_a_storage_of_the_state_that_is_made_smaller_is_seen() -> None:
    def script(capture: Capture) -> Calls:
        buffer = numbers(0, 64, dtype=torch.float32)
        step = capture(lambda: buffer * 2, state=[buffer])
        for _ in range(CALLS):
            yield step()
        buffer.untyped_storage().resize_(64 * 8)
        for _ in range(CALLS):
            yield step()
        buffer.untyped_storage().resize_(64 * 4)
        for _ in range(CALLS):
            yield step()
        return {}

    check_right(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("place", ["state", "argument", "in reach"])
def test_a_dtensor_whose_wrapper_alone_changes_is_seen(place: str) -> None:
    """`.data =` leaves its local tensor as it was."""

    def script(capture: Capture) -> Calls:
        on = mesh(2)
        one, other = (as_dtensor(numbers(0, 8, dtype=torch.float32)[at:], on, Replicate()) for at in (4, 2))
        taken = as_dtensor(torch.ones(4), on, Replicate())
        step = capture(lambda x, *given: x * taken.storage_offset() + taken.numel(), state=[taken][: place == "state"])
        if place == "argument":
            step = capture(lambda x, y: x * y.storage_offset() + y.numel())
        for now in (taken, one, other, one):
            taken.data = now
            for call in range(CALLS):
                yield step(torch.ones(2) + call, *([taken] if place == "argument" else []))
        return {}

    check_right(script)


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("Tensor._version", lambda x: x * x._version),
        ("Tensor.is_shared", lambda x: x * x.is_shared()),
        ("UntypedStorage.__getitem__", lambda x: x * x.untyped_storage()[0]),
        ("UntypedStorage.tolist", lambda x: x * x.untyped_storage().tolist()[0]),
        ("UntypedStorage.fill_", lambda x: (x.untyped_storage().fill_(1), x * 2)[1]),
    ],
)
@pytest.mark.skipif(ORACLE_ONLY, reason="eager refuses nothing")
def test_what_no_guard_can_see_of_a_storage_is_refused(name: str, step: Where) -> None:
    import rote

    with pytest.raises(rote.RecordingRefused, match=name.replace(".", r"\.")):
        captured = rote_capture(step, strict=True)
        for _ in range(3):
            captured(torch.ones(4))
