"""Returned tensors are fresh, inputs are written only where eager writes them,
and whatever eager makes alias still does."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import as_dtensor, inputs, mesh, mlp
from oracle import Calls, Capture, check_equal_with_each, facts, local_of, over, overlaps
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard

STEPS = 14
REPLAYS = 8


check = functools.partial(check_equal_with_each, replays=REPLAYS)


def trained(capture: Capture, returns: Callable[[nn.Module, Tensor, Tensor], Any]) -> Any:
    """An SGD step on a sharded MLP that returns `returns(model, x, loss)`."""
    model = mlp(mesh(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(x: Tensor) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return returns(model, x, loss.detach())

    return model, capture(train_step, state={"model": model, "optimizer": optimizer})


@pytest.mark.ranks(2)
def test_appended_losses_stay_distinct() -> None:
    def script(capture: Capture) -> Calls:
        _, step = trained(capture, lambda model, x, loss: (loss, model(x).detach()))
        kept = [step(x) for x in inputs(STEPS, 4, 8)]
        for loss, _ in kept:
            yield loss
        return kept

    check(script)


@pytest.mark.ranks(2)
def test_caller_may_overwrite_what_was_returned() -> None:
    def script(capture: Capture) -> Calls:
        model, step = trained(capture, lambda model, x, loss: (loss, model(x).detach()))
        for x in inputs(STEPS, 4, 8):
            loss, out = step(x)
            yield loss, out
            loss.zero_()
            out.fill_(float("nan"))
        return model

    check(script)


@pytest.mark.ranks(2)
def test_inputs_are_not_written() -> None:
    def script(capture: Capture) -> Calls:
        _, step = trained(capture, lambda model, x, loss: loss)
        for x in inputs(STEPS, 4, 8):
            yield step(x), x, x._version
        return None

    check(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["plain", "view", "dtensor"])
def test_inputs_written_in_place(kind: str) -> None:
    def script(capture: Capture) -> Calls:
        def step(x: Tensor) -> Tensor:
            x.mul_(2)
            x[1].add_(1)
            return x.sum(0)

        captured = capture(step)
        for whole in inputs(STEPS, 8, 8):
            if kind == "plain":
                x = whole
            elif kind == "view":
                x = whole[2:6, ::2]
            else:
                x = as_dtensor(whole, mesh(2), Shard(1))
            yield captured(x), x, whole
        return None

    check(script)


RETURNS: dict[str, Callable[[nn.Module, Tensor, Tensor], Any]] = {
    "argument": lambda model, x, loss: x,
    "view_of_argument": lambda model, x, loss: x[1:3].t(),
    "parameter": lambda model, x, loss: model.up.weight,
    "view_of_parameter": lambda model, x, loss: model.up.weight.detach().t(),
    "local_of_parameter": lambda model, x, loss: model.up.weight.detach().to_local(),
    "gradient": lambda model, x, loss: model.up.weight.grad,
    "same_twice": lambda model, x, loss: (loss, loss),
    "two_views_of_one": lambda model, x, loss: (h := loss.expand(3).clone(), h[:2], h[1:]),
    "nested": lambda model, x, loss: {"loss": loss, "more": [x.sum(), None, 3, "text", 2.5]},
    "nothing": lambda model, x, loss: None,
    "constant": lambda model, x, loss: (torch.arange(3), torch.full((2,), 7.0)),
    "expanded": lambda model, x, loss: loss.expand(2, 3),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", RETURNS)
def test_outputs_alias_what_eager_aliases(case: str) -> None:
    def script(capture: Capture) -> Calls:
        model, step = trained(capture, RETURNS[case])
        kept = []
        for x in inputs(STEPS, 4, 8):
            out = step(x)
            kept.append(out)
            yield out, aliases(out, x, model), identities(out, x, model)
        return {"model": model, "kept": kept}

    check(script)


def leaves(out: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(out) if isinstance(leaf, Tensor)]


def named(x: Tensor, model: nn.Module) -> dict[str, Tensor]:
    gradients = {f"{name}.grad": p.grad for name, p in model.named_parameters()}
    return {"x": x, **dict(model.named_parameters()), **gradients}


def aliases(out: Any, x: Tensor, model: nn.Module) -> list[tuple[str, ...]]:
    outputs = {f"out{i}": leaf for i, leaf in enumerate(leaves(out))}
    return overlaps({**outputs, **named(x, model)})


def identities(out: Any, x: Tensor, model: nn.Module) -> list[str]:
    """Which returned tensors are the very objects that the caller holds, or each other."""
    found = leaves(out)
    held = [
        f"out{i} is {name}"
        for i, leaf in enumerate(found)
        for name, tensor in named(x, model).items()
        if leaf is tensor
    ]
    return held + [f"out{i} is out{j}" for i, a in enumerate(found) for j, b in enumerate(found[:i]) if a is b]


@pytest.mark.ranks(2)
def test_write_through_a_returned_view_reaches_the_parameter() -> None:
    def script(capture: Capture) -> Calls:
        model, step = trained(capture, lambda model, x, loss: model.up.weight.detach())
        for x in inputs(STEPS, 4, 8):
            view = step(x)
            local_of(view).mul_(0.9)
            yield model.up.weight.detach()
        return model

    check(script)


@pytest.mark.ranks(2)
def test_gradients_kept_by_the_caller_keep_their_values() -> None:
    def script(capture: Capture) -> Calls:
        model, step = trained(capture, lambda model, x, loss: loss)
        kept = []
        for x in inputs(STEPS, 4, 8):
            yield step(x)
            kept.append([p.grad for p in model.parameters()])
        return {"kept": kept}

    check(script)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_objects_across_accumulation(set_to_none: bool) -> None:
    def script(capture: Capture) -> Calls:
        model = mlp(mesh(2))

        def micro_step(x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss.detach()

        step = capture(micro_step, state={"model": model})
        for i, x in enumerate(inputs(3 * STEPS, 4, 8)):
            before = [p.grad for p in model.parameters()]
            loss = step(x)
            after = [p.grad for p in model.parameters()]
            yield (
                loss,
                after,
                [a is b for a, b in zip(after, before, strict=True)],
                overlaps({str(i): gradient for i, gradient in enumerate([*before, *after]) if gradient is not None}),
            )
            if i % 3 == 2:
                model.zero_grad(set_to_none=set_to_none)
        return model

    check_equal_with_each(script)


@pytest.mark.ranks(2)
def test_overlapping_slices_at_changing_offsets() -> None:
    """Tokens and labels are usually windows of one long text, one apart."""

    def script(capture: Capture) -> Calls:
        text = torch.randint(16, (1000,), generator=torch.Generator().manual_seed(3))
        table = as_dtensor(torch.randn(16, 16), mesh(2), Shard(1))
        table = nn.Parameter(table)
        optimizer = torch.optim.SGD([table], lr=0.1)

        def train_step(tokens: Tensor, labels: Tensor) -> Tensor:
            optimizer.zero_grad()
            here = [Replicate()]
            tokens = torch.distributed.tensor.DTensor.from_local(tokens, mesh(2), here)
            logits = nn.functional.embedding(tokens, table).full_tensor()
            loss = nn.functional.cross_entropy(logits, labels)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = capture(train_step, state={"table": table, "optimizer": optimizer})
        for i in range(STEPS):
            at = (i * 37) % 900
            yield step(text[at : at + 32], text[at + 1 : at + 33])
        return {"table": table, "text": text}

    check(script)


@pytest.mark.ranks(1)
def test_offset_and_alignment_of_inputs_do_not_matter() -> None:
    """Views that start anywhere in their storage, at addresses of any alignment."""

    def script(capture: Capture) -> Calls:
        whole = torch.randn(400, generator=torch.Generator().manual_seed(3))
        return over(
            capture,
            lambda x: (x.view(4, 8) @ x.view(8, 4)).exp().sum(0),
            ((whole[i * 7 : i * 7 + 32],) for i in range(STEPS)),
            end=lambda: {"whole": whole},
        )

    check(script)


@pytest.mark.ranks(1)
def test_memory_of_dead_inputs_is_not_read_again() -> None:
    """Inputs die between calls, and others come to lie where they lay."""

    def script(capture: Capture) -> Calls:
        step = capture(lambda x, y: x @ y)
        for i, x in enumerate(inputs(STEPS, 16, 16)):
            y = torch.full((16, 16), float(i))
            yield step(x, y)
            del x, y
        return None

    check(script)


@pytest.mark.ranks(1)
def test_state_tensor_given_as_argument() -> None:
    """An argument that is also named state: writes show through both names."""

    def script(capture: Capture) -> Calls:
        table = torch.zeros(4)

        def step(x: Tensor, into: Tensor) -> Tensor:
            into.add_(x)
            return table * 2

        return over(
            capture, step, ((x, table) for x in inputs(STEPS, 4)), state={"table": table}, seen=lambda: facts(table)
        )

    check(script)


@pytest.mark.ranks(1)
def test_strides_of_outputs_follow_eager() -> None:
    def script(capture: Capture) -> Calls:
        return over(capture, lambda x: (x.t() + 1, x.t().contiguous(), x[:, ::2].exp(), x.mean()), inputs(STEPS, 4, 8))

    check(script)
