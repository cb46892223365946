"""Trainers drawn at random: optimizers, schedulers, counters, containers and what happens between calls.

    ROTE_TEST_TRAINERS=5000 ROTE_TEST_SEED=7000 pytest tests/torch/test_trainer_sweep.py

draws others than the usual ones. Each is compared with eager after every call.
"""

import collections
import copy
import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from extent import EVERYTHING, SEED
from oracle import ORACLE_ONLY, Capture, Script, check_right
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

TRAINERS = int(os.environ.get("ROTE_TEST_TRAINERS", "3000" if EVERYTHING else "8"))
PART = 20 if EVERYTHING else 8
CALLS = 24
#: The others end in what eager raises, change in each call, or are refused.
LEAST_REPLAYED = 0.5

OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2),
    lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    lambda p: torch.optim.SGD(p, lr=1e-2),
    lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5),
    lambda p: torch.optim.NAdam(p, lr=1e-2),
    lambda p: torch.optim.RAdam(p, lr=1e-2),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
]
SCHEDULERS: list[Callable[[torch.optim.Optimizer], Any]] = [
    lambda o: schedulers.LambdaLR(o, lambda epoch: 1 / (1 + 0.1 * epoch)),
    lambda o: schedulers.StepLR(o, 4, gamma=0.5),
    lambda o: schedulers.CosineAnnealingLR(o, 30),
    lambda o: schedulers.OneCycleLR(o, 2e-2, total_steps=200, cycle_momentum="betas" in o.param_groups[0]),
    lambda o: schedulers.LinearLR(o, total_iters=9),
    lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, total_iters=5), schedulers.CosineAnnealingLR(o, 20)], milestones=[5]
    ),
    lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=7),
]

Batch = collections.namedtuple("Batch", "x y")


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    extra: Any = None
    names: list[str] = dataclasses.field(default_factory=list)


class Net(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.a = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(dropout)
        self.b = nn.Linear(6, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.b(self.drop(torch.relu(self.norm(self.a(x)))))  # type: ignore[no-any-return]


class Trainer:
    """Its step is put together by the drawn choices, which never change, but for those that events change."""

    def __init__(self, draw: random.Random) -> None:
        self.model = Net(draw.choice([0.0, 0.2]))
        parameters = list(self.model.parameters())
        split = draw.random() < 0.3
        parts = [parameters[:3], parameters[3:]] if split else [parameters]
        self.optimizers = [draw.choice(OPTIMIZERS)(part) for part in parts]
        self.schedulers = [draw.choice(SCHEDULERS)(each) for each in self.optimizers]
        self.when = draw.choice(["before zero_grad", "after zero_grad", "outside", "every third"])
        self.every = draw.choice([1, 1, 1, 2, 3])
        self.clips = draw.random() < 0.4
        self.form = draw.choice(["tensor", "dict", "output", "named", "item", "tuple"])
        self.counts = draw.choice(["none", "steps", "steps", "samples", "samples", "both", "both", "both", "reads"])
        self.steps = 0
        self.samples = 0
        self.fails = False

    def advance(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def train_step(self, batch: Any, last: bool, third: bool) -> Any:
        loss = F.mse_loss(self.model(batch.x), batch.y)
        loss.backward()
        if last:
            if self.clips:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            for optimizer in self.optimizers:
                optimizer.step()
            if self.when == "before zero_grad" or (self.when == "every third" and third):
                self.advance()
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if self.when == "after zero_grad":
                self.advance()
        if self.fails:
            raise ArithmeticError("asked for")
        if self.counts in ("steps", "both", "reads"):
            self.steps += 1
        if self.counts in ("samples", "both"):
            self.samples += batch.x.shape[0]
        loss = loss.detach()
        if self.counts == "reads" and self.is_seventh():
            loss = loss * 2
        if self.form == "dict":
            return collections.OrderedDict(loss=loss, n=2)
        if self.form == "output":
            return Output(loss, [loss + 1])
        if self.form == "named":
            return Batch(loss, None)
        if self.form == "item":
            return loss.item()
        return (loss, loss) if self.form == "tuple" else loss

    def is_seventh(self) -> bool:
        return self.steps % 7 == 6

    @torch.no_grad()
    def evaluate(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).sum(0)  # type: ignore[no-any-return]

    def seen(self) -> Any:
        """Numbers of the host."""
        rates = [[group["lr"] for group in optimizer.param_groups] for optimizer in self.optimizers]
        betas = [[str(group.get("betas")) for group in optimizer.param_groups] for optimizer in self.optimizers]
        inside = [
            {key: value for key, value in vars(each).items() if type(value) in (int, float, list) and key[0] != "_"}
            for each in self.schedulers
        ]
        for each in inside:
            each.pop("lr_lambdas", None)
        return self.steps, self.samples, self.model.calls, rates, betas, str(inside)


def sets_rates(trainer: Trainer, draw: random.Random) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["lr"] *= 0.7


def sets_betas(trainer: Trainer, draw: random.Random) -> None:
    for group in trainer.optimizers[-1].param_groups:
        if "betas" in group:
            group["betas"] = (group["betas"][0] * 0.99, group["betas"][1])
        group["weight_decay"] = draw.choice([0.0, 0.05])


def loads_scheduler(trainer: Trainer, draw: random.Random) -> None:
    trainer.schedulers[0].load_state_dict(copy.deepcopy(trainer.schedulers[0].state_dict()))


def loads_optimizer(trainer: Trainer, draw: random.Random) -> None:
    trainer.optimizers[0].load_state_dict(copy.deepcopy(trainer.optimizers[0].state_dict()))


def loads_model(trainer: Trainer, draw: random.Random) -> None:
    trainer.model.load_state_dict({key: value * 0.5 for key, value in trainer.model.state_dict().items()})


def new_scheduler(trainer: Trainer, draw: random.Random) -> None:
    trainer.schedulers[0] = draw.choice(SCHEDULERS[:5])(trainer.optimizers[0])


def freezes(trainer: Trainer, draw: random.Random) -> None:
    trainer.model.b.bias.requires_grad_(not trainer.model.b.bias.requires_grad)


def to_eval(trainer: Trainer, draw: random.Random) -> None:
    trainer.model.train(not trainer.model.training)


def resets_counters(trainer: Trainer, draw: random.Random) -> None:
    trainer.steps, trainer.samples, trainer.model.calls = draw.choice([(0, 0, 0), (5, -3, 10**18)])


def fails(trainer: Trainer, draw: random.Random) -> None:
    trainer.fails = not trainer.fails


def clips(trainer: Trainer, draw: random.Random) -> None:
    trainer.clips = not trainer.clips


def nothing(trainer: Trainer, draw: random.Random) -> None:
    pass


EVENTS = [sets_rates, sets_betas, loads_scheduler, loads_optimizer, loads_model, new_scheduler, freezes, to_eval]
EVENTS += [resets_counters, fails, clips, nothing]


def trained(seed: int) -> Script:
    def script(capture: Capture) -> Any:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        trainer = Trainer(draw)
        state: Any = trainer
        if draw.random() < 0.5:
            state = {"model": trainer.model, "optimizers": trainer.optimizers}
        options = {"verify": 2} if draw.random() < 0.1 else {}
        step = capture(trainer.train_step, state=state, **options)
        evaluate = capture(trainer.evaluate, state={"model": trainer.model}) if draw.random() < 0.3 else None
        event, at = draw.choice(EVENTS), draw.randrange(6, CALLS - 6)
        often = draw.random() < 0.2
        for i in range(CALLS):
            if i == at or (often and i > at and i % 3 == 0):
                event(trainer, draw)
            batch = Batch(torch.randn(4, 4), torch.randn(4, 3))
            try:
                result = step(batch, i % trainer.every == trainer.every - 1, i % 3 == 2)
            except ArithmeticError as error:
                result = str(error)
            if isinstance(result, Output):
                result = [type(result).__name__, result.loss, *result.extra]
            if trainer.when == "outside" and i % 2:
                trainer.advance()
            yield result, trainer.seen()
            if evaluate is not None and i % 4 == 3:
                yield evaluate(torch.randn(3, 4)), trainer.seen()
        return trainer.model, trainer.optimizers, trainer.seen()

    return script


@pytest.mark.sampled(4)
@pytest.mark.skipif(ORACLE_ONLY, reason="compares two ways of running")
@pytest.mark.parametrize("part", range(0, TRAINERS, PART))
def test_trainers(part: int) -> None:
    replayed, wrong = 0, []
    for seed in range(SEED + part, SEED + part + PART):
        try:
            found = check_right(trained(seed))
        except Exception as problem:
            wrong.append(f"seed {seed}: {problem!r:.1500}")
        else:
            replayed += any(step.stats.replays > 0 for step in found.steps)
    assert not wrong, "\n\n".join(wrong)
    assert replayed >= LEAST_REPLAYED * PART
