"""Lists that a loop fills before its last op, and that others look at meanwhile."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from oracle import check_right
from test_loops import Batches, Job, captured, script_of
from torch import Tensor


class Holder:
    """Looks at a list between the statement that adds to it and the end of the ops."""

    def __init__(self) -> None:
        self.held: Any = []

    def weighed(self, loss: Tensor) -> Tensor:
        return loss * (1.0 + 0.1 * (len(self.held) % 3))


HOLDER = Holder()


def list_in_an_attribute(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    HOLDER.held = losses
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_from_an_attribute(job: Job, loader: Batches, epoch: int) -> Any:
    HOLDER.held = []
    losses = HOLDER.held
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses += [loss.item()]
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_by_two_names(job: Job, loader: Batches, epoch: int) -> Any:
    losses = HOLDER.held = []
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_in_a_list(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    HOLDER.held = [losses, *[0] * epoch]
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        (HOLDER.weighed(loss) * (1 + len(HOLDER.held[0]) % 2)).backward()
        job.optimizer.step()
    return losses


def list_seen_by_a_function(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []

    def weighed(loss: Tensor) -> Tensor:
        return loss * (1.0 + 0.1 * (len(losses) % 3))

    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_held_by_a_turn(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        HOLDER.held = losses
        losses.append(loss.item())
        HOLDER.weighed(loss).backward()
        job.optimizer.step()
    return losses


def list_held_behind(job: Job, loader: Batches, epoch: int) -> Any:
    HOLDER.held = [] if epoch == 0 else HOLDER.held
    for _ in range(2):
        losses: list[float] = []
        for x, y in loader:
            job.optimizer.zero_grad()
            loss = F.cross_entropy(job.model(x), y)
            losses.append(loss.item())
            HOLDER.weighed(loss).backward()
            job.optimizer.step()
        HOLDER.held = losses
    return losses


def list_before_the_turn_ends_early(job: Job, loader: Batches, epoch: int) -> Any:
    losses, shares, total = [], [], 0.0
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        output = job.model(x)
        loss = F.cross_entropy(output, y)
        losses.append(loss.item())
        with torch.no_grad():
            shares += [output.mean().item()]
        total += loss.item()
        if i % 5 == 4:
            continue
        loss.backward()
        job.optimizer.step()
        if i == 11 and epoch % 2:
            break
    return losses, shares, total


def list_alone_before_the_turn_ends_early(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []
    for i, (x, y) in enumerate(loader):
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        if i % 5 == 4:
            continue
        loss.backward()
        job.optimizer.step()
    return losses


def by_a_hook(register: Callable[[Job, Any, Any], Any]) -> Callable[..., Any]:
    """What a hook looks at in the backward pass, for the next turn's loss."""

    def body(job: Job, loader: Batches, epoch: int) -> Any:
        losses: list[float] = []
        seen = []
        handle = register(job, None, lambda *_: seen.append(len(losses)))
        for x, y in loader:
            job.optimizer.zero_grad()
            output = job.model(x)
            if handle is None:
                register(job, output, lambda *_: seen.append(len(losses)))
            loss = F.cross_entropy(output, y) * (1.0 + 0.1 * (sum(seen) % 3))
            losses.append(loss.item())
            loss.backward()
            job.optimizer.step()
        if handle is not None:
            handle.remove()
        return losses, seen

    return body


class Looks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1.0 + 0.1 * (len(HOLDER.held) % 3))


def list_seen_by_a_function_of_autograd(job: Job, loader: Batches, epoch: int) -> Any:
    losses: list[float] = []
    HOLDER.held = losses
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(Looks.apply(job.model(x)), y)
        losses.append(loss.item())
        loss.backward()
        job.optimizer.step()
    return losses


def list_of_tensors(job: Job, loader: Batches, epoch: int) -> Any:
    losses, more, kept = [], [], []
    weight = torch.ones((), requires_grad=True)
    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        other = loss.detach() * 2
        losses += [loss.item(), other]
        with torch.no_grad():
            more += [other.item() * weight]
        kept.append(loss.item() * weight)
        other.mul_(3)
        loss.backward()
        job.optimizer.step()
    return losses, [(each.detach(), each.requires_grad) for each in [*more, *kept]]


def list_passed_on(job: Job, loader: Batches, epoch: int) -> Any:
    losses = []

    def weighed(loss: Tensor, losses: list[float]) -> Tensor:
        return loss * (1.0 + 0.1 * (len(losses) % 3))

    for x, y in loader:
        job.optimizer.zero_grad()
        loss = F.cross_entropy(job.model(x), y)
        losses.append(loss.item())
        weighed(loss, losses).backward()
        job.optimizer.step()
    return losses


CASES = [
    list_in_an_attribute,
    list_from_an_attribute,
    list_by_two_names,
    list_in_a_list,
    list_seen_by_a_function,
    list_held_by_a_turn,
    list_held_behind,
    list_before_the_turn_ends_early,
    list_alone_before_the_turn_ends_early,
    list_seen_by_a_function_of_autograd,
    list_of_tensors,
    list_passed_on,
]


def of_output(what: Any, method: str, look: Any) -> None:
    """Registers a hook with what a turn has made; there is nothing before the first one."""
    if what is not None:
        getattr(what, method)(look)


HOOKS: dict[str, Callable[[Job, Any, Any], Any]] = {
    "of the model": lambda job, _, look: job.model.register_full_backward_hook(look),
    "of a layer": lambda job, _, look: job.model[0].register_full_backward_hook(look),
    "before a layer": lambda job, _, look: job.model[3].register_full_backward_pre_hook(look),
    "of a parameter": lambda job, _, look: job.model[0].weight.register_hook(look),
    "behind a parameter": lambda job, _, look: job.model[0].weight.register_post_accumulate_grad_hook(look),
    "of the optimizer": lambda job, _, look: job.optimizer.register_step_pre_hook(look),
    "of a result": lambda job, output, look: of_output(output, "register_hook", look),
    "of a node": lambda job, output, look: of_output(getattr(output, "grad_fn", None), "register_hook", look),
    "before a node": lambda job, output, look: of_output(getattr(output, "grad_fn", None), "register_prehook", look),
}


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name", HOOKS)
def test_seen_by_a_hook(name: str) -> None:
    check_right(script_of(by_a_hook(HOOKS[name])), captured)


@pytest.mark.sampled(3)
@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("body", CASES)
def test_right(body: Callable[..., Any]) -> None:
    HOLDER.held = []
    check_right(script_of(body), captured)
