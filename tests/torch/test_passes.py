"""Passes that run only where they are named find something to do in such steps, and
leave what eager leaves."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvNet, Sizes, as_dtensor, inputs, llama, mesh, replicated, token_batches
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, eager, run
from torch import Tensor
from torch.distributed.tensor import Shard

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="the oracle alone has no passes")

STEPS = 26


def did(step: Any, name: str) -> list[int]:
    """The numbers in the report of a pass, of the plan that is replayed."""
    lines = re.findall(rf"^\s*{name} +(.*)$", step.explain(), re.MULTILINE)
    assert lines and "off (" not in lines[-1], step.explain()
    return [int(number) for number in re.findall(r"\d+", lines[-1])]


def training(world: int, optimizer: Callable[..., torch.optim.Optimizer], **how: Any) -> Callable[[Capture], Calls]:
    """Convolutions over a sharded batch: every parameter replicated, every gradient a sum."""

    def script(capture: Capture) -> Calls:
        model = replicated(ConvNet(), mesh(world))
        opt = optimizer(model.parameters(), lr=1e-2, **how)
        labels = as_dtensor(torch.arange(12) % 10, mesh(world), Shard(0))

        def train_step(images: Tensor) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            opt.step()
            return loss.detach()

        step = capture(train_step, state={"model": model, "opt": opt, "labels": labels})
        for images in inputs(STEPS, 12, 3, 8, 8):
            yield step(as_dtensor(images, mesh(world), Shard(0)))
        return {"model": model, "opt": opt}

    return script


@pytest.mark.ranks(2)
def test_gradients_of_replicated_parameters_are_summed_at_once() -> None:
    script = training(2, torch.optim.AdamW, fused=True)
    for passes in ["buckets", "default,+buckets", "default,+overlap,+buckets"]:
        before, after = did(check_equal(script, passes=passes)[0], "buckets")
        assert before >= 6 and after <= 2, (passes, before, after)


@pytest.mark.ranks(3)
def test_sums_over_more_ranks_differ_by_rounding_at_most() -> None:
    import rote

    script = training(3, torch.optim.AdamW, fused=True, eps=1e-2)
    expected = run(script, eager)
    found = run(script, lambda fn, *, state=None: rote.capture(fn, state=state, strict=True, passes="default,+sums"))
    before, after = did(found.steps[0], "sums")
    assert before >= 6 and after <= 2
    for want, got in zip(expected.outputs, found.outputs, strict=True):
        for name in want:
            if isinstance(want[name], Tensor) and want[name].is_floating_point():
                torch.testing.assert_close(got[name], want[name], rtol=1e-4, atol=1e-6)


@pytest.mark.ranks(2)
def test_compute_runs_while_collectives_are_under_way() -> None:
    sizes = Sizes()

    def script(capture: Capture) -> Calls:
        model = llama(sizes, mesh(2))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

        def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(0, 1))
            loss.backward()
            opt.step()
            return loss.detach()

        step = capture(train_step, state={"model": model, "opt": opt})
        for tokens, labels in token_batches(sizes, STEPS):
            yield step(tokens, labels)
        return {"model": model, "opt": opt}

    after, before = did(check_equal(script, passes="default,+overlap")[0], "overlap")
    assert after > before
