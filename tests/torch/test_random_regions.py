"""Random programs, cut into regions at random places, train as in eager.

    ROTE_TEST_REGIONS=2000 ROTE_TEST_SEED=5000 pytest tests/torch/test_random_regions.py

checks others than the usual ones. A program is a chain of modules, of which some are regions. How it is trained comes
from the seed too: several forwards before their backwards, evaluation, checkpoints and an autocast around regions,
weights that regions share, parameters that are frozen for a while. Regions may return several values, some computed of
others; these are used, left out, watched by hooks, and differentiated one after the other. The first replays of some
regions are verified.
"""

import contextlib
import os
import random
from collections.abc import Callable
from typing import Any

import pytest
import rote
import torch
import torch.nn.functional as F
from extent import EVERYTHING, SEED
from oracle import ORACLE_ONLY, Calls, Capture, check_same, run, run_eager
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

PROGRAMS = int(os.environ.get("ROTE_TEST_REGIONS", "2000" if EVERYTHING else "25"))
#: A test each.
AT_ONCE = 20
STEPS = 18
WIDTH = 6
#: Fewer programs that replay at all, and they are no test.
LEAST_REPLAYED = 0.6

Op = Callable[[Tensor, Tensor, Tensor, Tensor, "Part"], Tensor]
#: Of two values (rows, WIDTH), a matrix and a vector; each makes a value of that shape.
OPS: list[Op] = [
    lambda x, y, w, b, part: F.linear(x, w, b),
    lambda x, y, w, b, part: (x @ w.t()) * 0.5,
    lambda x, y, w, b, part: torch.einsum("ij,kj->ik", x, w).tanh(),
    lambda x, y, w, b, part: F.layer_norm(x, (WIDTH,), b),
    lambda x, y, w, b, part: F.rms_norm(x, (WIDTH,), b),
    lambda x, y, w, b, part: F.batch_norm(x, part.mean, part.variance, b, None, part.training),
    lambda x, y, w, b, part: F.dropout(x, 0.2, part.training),
    lambda x, y, w, b, part: x + y,
    lambda x, y, w, b, part: x * y.sigmoid() + b,
    lambda x, y, w, b, part: torch.where(x > 0, x, y * 0.1),
    lambda x, y, w, b, part: F.gelu(x) * x,
    lambda x, y, w, b, part: x.softmax(-1) @ w,
    lambda x, y, w, b, part: torch.cat([x[:, :2], y[:, 2:]], 1),
    lambda x, y, w, b, part: torch.stack([x, y]).mean(0),
    lambda x, y, w, b, part: x.view(-1, 2, WIDTH // 2).transpose(1, 2).reshape(-1, WIDTH),
    lambda x, y, w, b, part: x.clone().mul_(0.5).add_(y),
    lambda x, y, w, b, part: x - x.mean(1, keepdim=True),
    lambda x, y, w, b, part: x.detach() * 0.1 + y,
    lambda x, y, w, b, part: F.scaled_dot_product_attention(x[None], y[None], x[None])[0],
    lambda x, y, w, b, part: (w.sum() + b).exp().clamp(max=2) * x,
    lambda x, y, w, b, part: x.chunk(2, 1)[0].repeat(1, 2) + x.sin(),
    lambda x, y, w, b, part: x.index_select(1, torch.arange(WIDTH).flip(0)),
    lambda x, y, w, b, part: (
        torch.view_as_real(torch.view_as_complex(x.reshape(-1, WIDTH // 2, 2)).exp()).flatten(1) * 0.1
    ),
    lambda x, y, w, b, part: x.double().cos(),
]


class Part(nn.Module):
    """A piece of a program: ops on its two inputs and on what earlier ops have made."""

    def __init__(self, draw: random.Random, weights: list[nn.Parameter]) -> None:
        super().__init__()
        own = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.matrices = nn.ParameterList([own, draw.choice([*weights, own])])
        self.vector = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("variance", torch.ones(WIDTH))
        self.ops = [
            (draw.randrange(len(OPS)), draw.random(), draw.random(), draw.randrange(2))
            for _ in range(draw.randint(2, 7))
        ]
        self.returns_list = draw.random() < 0.2
        #: The numbers of values that are returned too.
        self.others = sorted({draw.random() for _ in range(draw.choice([0, 0, 1, 1, 2, 3]))})

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        values = [x] if y is None else [x, y]
        for op, first, second, matrix in self.ops:
            one, other = (values[-1 - int(each * each * len(values))] for each in (first, second))
            values.append(OPS[op](one, other, self.matrices[matrix], self.vector, self).float())
        made = values[1 if y is None else 2 :]
        others = {id(made[int(each * len(made))]): made[int(each * len(made))] for each in self.others}
        others.pop(id(made[-1]), None)
        if self.returns_list or others:
            return [made[-1], None, len(values), *others.values()]
        return made[-1]


class Program(nn.Module):
    """A chain of parts; the numbers of those that are regions."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        weights = [nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4) for _ in range(2)]
        self.weights = nn.ParameterList(weights)
        self.parts = nn.ModuleList(Part(draw, weights) for _ in range(draw.randint(2, 5)))
        self.two_inputs = [draw.random() < 0.5 for _ in self.parts]
        self.regions = sorted(draw.sample(range(len(self.parts)), draw.randint(1, len(self.parts))))
        self.checkpoints: bool | None = None  # whether reentrant
        #: What becomes of each other value of a part.
        self.uses = [draw.choice(["loss", "loss", "next", "watched", "left out"]) for _ in range(3 * len(self.parts))]
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The result, and other values that count in the loss."""
        before, counted = x, list[Tensor]()
        for number, part in enumerate(self.parts):
            given = [x, before] if self.two_inputs[number] else [x]
            before = x
            if self.checkpoints is not None and number in self.regions:
                found = checkpoint(part, *given, use_reentrant=self.checkpoints)
            else:
                found = part(*given)
            x, others = (found[0], found[3:]) if isinstance(found, list) else (found, [])
            for place, other in enumerate(others):
                use = self.uses[3 * number + place]
                if use == "watched" and other.requires_grad:
                    other.register_hook(lambda gradient: self.seen.append(gradient.clone()))
                    counted.append(other.sin())
                if use == "loss":
                    counted.append(other)
                if use == "next":
                    before = before + other * x.detach()
        return F.linear(x, self.weights[0]) + x, counted


def program(seed: int) -> Callable[[Capture], Calls]:
    def script(capture: Capture) -> Calls:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        model = Program(draw)
        for number in model.regions:
            capture(model.parts[number])
        optimizer = draw.choice([torch.optim.AdamW, torch.optim.SGD])(model.parameters(), lr=0.01)
        kinds = [
            draw.choice(["plain", "apart", "two", "autocast", "checkpoint", "reentrant", "evaluation", "frozen"])
            for _ in range(2)
        ]
        rows = draw.choice([2, 4, 8])
        for step in range(STEPS):
            kind = kinds[step % 2]
            model.train(kind != "evaluation")
            model.checkpoints = {"checkpoint": False, "reentrant": True}.get(kind)
            model.weights[1].requires_grad_(kind != "frozen")
            inputs = [torch.randn(rows, WIDTH) for _ in range(2 if kind == "two" else 1)]
            if kind == "evaluation":
                with draw.choice([torch.no_grad, torch.inference_mode])():
                    result, others = model(inputs[0])
                    yield result.clone(), [other.clone() for other in others]
                continue
            optimizer.zero_grad(set_to_none=draw.random() < 0.7)
            around = torch.autocast("cpu") if kind == "autocast" else contextlib.nullcontext()
            model.seen.clear()
            losses = []
            for x in inputs:
                with around:
                    result, others = model(x.requires_grad_(kind == "reentrant"))
                    of_result = result.float().square().mean()
                    if kind == "apart" and others:
                        losses += [of_result, *(other.float().sin().mean() for other in others)]
                    else:
                        losses.append(sum((other.float().sin().mean() for other in others), of_result))
            left = [loss for loss in draw.sample(losses, len(losses)) if loss.requires_grad]
            for loss in left:
                loss.backward(retain_graph=kind == "apart" and loss is not left[-1])
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            yield (
                [loss.detach() for loss in losses],
                [parameter.grad for parameter in model.parameters()],
                model.seen[:],
            )
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    return script


@pytest.mark.sampled(2)
@pytest.mark.skipif(ORACLE_ONLY, reason="compares two ways of running")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("first", range(SEED, SEED + PROGRAMS, AT_ONCE))
def test_programs_cut_into_regions(first: int) -> None:
    handles: list[Any] = []
    seed = first

    def capture(module: Any, **_: Any) -> Any:
        handles.append(rote.capture_module(module, verify=(seed + len(handles)) % 3))
        return handles[-1]

    replayed = 0
    for seed in range(first, first + AT_ONCE):
        handles.clear()
        try:
            expected = run_eager(program(seed))
        except RuntimeError:  # a checkpoint of what has no gradient
            continue
        try:
            check_same(expected, run(program(seed), capture))
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
        replayed += any(handle.stats.replays and handle.stats.backward.replays for handle in handles)
    print(f"seeds {first} to {first + AT_ONCE - 1}: {replayed} replayed")
    assert replayed >= LEAST_REPLAYED * AT_ONCE
