"""Architectures of `transformers`, each in a plain training loop: captured as a whole, and block by block.

    ROTE_TEST_EVERYTHING=1 pytest tests/torch/test_architectures.py

takes all, otherwise one in twelve. A model that cannot be made small is skipped, with what its code raises.
"""

import re
from typing import Any

import pytest
import torch
from architectures import TASKS, make, names
from oracle import Calls, Capture, Script, check_right, check_same, run, run_eager
from torch import nn

transformers = pytest.importorskip("transformers", reason="make test-wild installs transformers")
modeling_layers = pytest.importorskip("transformers.modeling_layers")

CALLS = 14
#: Random layers are left out and in: each choice is a variant.
LEAST_REPLAYED = 4
ALL = [pytest.param(*each, id=each[2]) for each in names()]
#: Why a whole step is refused, by parts of names of models.
SHAPES = "depends on tensor data"
REFUSED = {
    "Canine": "no recorded op wrote",  # max_pool1d without gradients, which writes below the dispatcher
    "FSMT": "reads a tensor on the host",
    "JetMoe": r"Tensor\.tolist",
    "SwitchTransformers": SHAPES,  # of the tokens of each expert
}
#: What gives each block an object that is new in every call, of which it is a part: a cache.
NEW_OBJECTS = ("Gemma4", "Nemotron3_5")


def training(task: str, config_class: Any, model_class: Any, by_blocks: bool) -> Script:
    def script(capture: Capture) -> Calls:
        model, config = make(task, config_class, model_class)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(batch: Any) -> float:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item()

        state = {"model": model, "optimizer": optimizer}
        if by_blocks:
            for block in blocks(model):
                capture(block)
        else:
            step = capture(step, state=state, tail=False)
        draw = torch.Generator().manual_seed(2)
        for _ in range(CALLS):
            yield step(TASKS[task](draw, config))
        return state

    return script


def blocks(model: nn.Module) -> list[nn.Module]:
    return [part for part in model.modules() if isinstance(part, modeling_layers.GradientCheckpointingLayer)]


def classes(task: str, kind: str, name: str) -> tuple[Any, Any]:
    """The classes of configuration and model; skips what cannot be made."""
    try:
        found = transformers.CONFIG_MAPPING[kind], getattr(transformers, name)
        make(task, *found)
    except Exception as problem:
        pytest.skip(f"{type(problem).__name__}: {str(problem)[:200]}")
    return found


@pytest.mark.sampled(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "kind", "name"), ALL)
def test_a_step_of_each(task: str, kind: str, name: str) -> None:
    (step,) = check_right(training(task, *classes(task, kind, name), by_blocks=False)).steps
    reasons = [reason for part, reason in REFUSED.items() if part in name]
    if reasons:
        assert re.search(reasons[0], "".join(map(str, step.stats.refusals))), step.stats
    else:
        assert step.stats.replays >= LEAST_REPLAYED, step.stats


@pytest.mark.sampled(12)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "kind", "name"), ALL)
def test_blocks_of_each(task: str, kind: str, name: str) -> None:
    import rote

    script = training(task, *classes(task, kind, name), by_blocks=True)
    expected = run_eager(script)
    regions: list[Any] = []

    def region(block: nn.Module, **_: Any) -> Any:
        regions.append(rote.capture_module(block))
        return regions[-1]

    check_same(expected, run(script, region))
    new_objects = any(part in name for part in NEW_OBJECTS)
    for each in regions:
        if any(subject.startswith("the shape of a result") for subject in each.stats.guard_misses):
            continue  # of the tokens of each expert
        called = each.stats.calls > 0  # of a part that only other inputs reach
        assert not called or each.stats.replays >= LEAST_REPLAYED or each.stats.refusals or new_objects, each.stats
