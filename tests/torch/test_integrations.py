"""Training loops of frameworks as they come, with no edit but the line of `rote.capture`: torchtitan, the Trainer of
Hugging Face, trl, accelerate, Lightning, PyTorch Geometric and Stable-Baselines3. The scripts are those of
`examples/`, whose `train` takes the capture.

Each has an eager twin in the same process, from the same seed.
"""

import importlib
import logging
import re
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import mesh
from oracle import ORACLE_ONLY, Capture, Script, check_equal, check_right
from test_loops import captured
from test_regions import check_regions
from torch import Tensor, nn

for package in ("transformers", "accelerate", "lightning", "torchtitan", "trl", "stable_baselines3", "torch_geometric"):
    pytest.importorskip(package, reason="make test-wild installs it")

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 40


def example(name: str) -> Any:
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def replayed(script: Script, least: int) -> None:
    found = check_right(script)
    if not ORACLE_ONLY:
        for step in found.steps:
            assert step.stats.replays >= least, (step.stats, step.explain()[-2000:])


def test_accelerate() -> None:
    def script(capture: Capture) -> Any:
        _, losses = example("accelerate_loop").train(STEPS, capture)
        yield from losses
        return losses

    replayed(script, 30)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_trainer_of_hugging_face(accumulate: int) -> None:
    def script(capture: Capture) -> Any:
        _, seen, log = example("hf_trainer").train(STEPS, capture, accumulate)
        yield from seen
        return log

    replayed(script, 25)


def test_lightning() -> None:
    def script(capture: Capture) -> Any:
        model = example("lightning_module").train(STEPS, capture)
        yield from model.losses
        return model.net

    replayed(script, 25)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sft_trainer_of_trl() -> None:
    """The trainer sets activation checkpoints, and reads its metrics between the forward and the backward."""

    def script(capture: Capture) -> Any:
        _, model, log = example("trl_sft").train(STEPS, capture)
        yield log
        return model

    check_regions(script)


@pytest.mark.filterwarnings("ignore:rote")
@pytest.mark.parametrize("name, steps", [("PPO", 2560), ("A2C", 600), ("DQN", 300), ("SAC", 300), ("TD3", 300)])
def test_stable_baselines(name: str, steps: int) -> None:
    def script(capture: Capture) -> Any:
        _, agent, logged = example("stable_baselines").train(name, steps, capture)
        yield logged
        return agent.policy

    found = check_right(script, captured)
    if not ORACLE_ONLY:
        (stats,) = found.steps[0].stats.values()
        assert stats.replays > 0.75 * stats.calls, stats


@pytest.mark.parametrize("convolution", ["GCNConv", "GATConv", "SAGEConv", "TransformerConv", "ChebConv"])
def test_graph_network(convolution: str) -> None:
    def script(capture: Capture) -> Any:
        _, model, told = example("graph_network").train(convolution, STEPS, capture)
        yield told
        return model

    replayed(script, 30)


def torchtitan(capture: Capture, shards: int = 1) -> Any:
    logging.disable(logging.INFO)
    titan = example("torchtitan_llama")
    losses: list[Tensor] = []

    def noting(step: Any, **options: Any) -> Any:
        captured = capture(step, **options)

        def call(*arguments: Any) -> Tensor | None:
            loss: Tensor | None = captured(*arguments)
            if loss is not None:  # of the forward and backward passes
                losses.append(loss.detach().clone())
            return loss

        return call

    trainer = titan.train(STEPS, noting, shards)
    yield from losses
    return {"model": trainer.model_parts[0], "optimizer": trainer.optimizers.optimizers[0]}


def torchtitan_by_regions(capture: Capture, shards: int) -> Any:
    logging.disable(logging.INFO)
    titan = example("torchtitan_llama")
    trainer, _ = titan.train_by_regions(STEPS, capture, shards)
    yield torch.zeros(())
    return {"model": trainer.model_parts[0], "optimizer": trainer.optimizers.optimizers[0]}


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("shards", [1, 2])
def test_torchtitan_by_regions(shards: int) -> None:
    check_regions(partial(torchtitan_by_regions, shards=shards))


@pytest.mark.ranks(1, timeout=600)
def test_torchtitan() -> None:
    replayed(torchtitan, 25)


@pytest.mark.ranks(2, timeout=600)
def test_torchtitan_tensor_parallel() -> None:
    replayed(torchtitan, 25)


@pytest.mark.ranks(2, timeout=600)
def test_torchtitan_fsdp() -> None:
    replayed(partial(torchtitan, shards=2), 25)


@pytest.mark.ranks(4, timeout=600)
def test_torchtitan_fsdp_over_tensor_parallel() -> None:
    replayed(partial(torchtitan, shards=2), 25)


def llama(**options: Any) -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, max_position_embeddings=64, **sizes, **options)
    return transformers.LlamaForCausalLM(config)


def hugging_face(prepare: Any, scheduled: bool = True, sharded: bool = False) -> Script:
    """The plain loop: a `BatchEncoding` goes in, a `ModelOutput` comes out, the rate changes at each call."""

    def script(capture: Capture) -> Any:
        import transformers

        torch.manual_seed(0)
        model = prepare(llama().train())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        scheduler = transformers.get_cosine_schedule_with_warmup(optimizer, 4, STEPS)

        def train_step(batch: Any) -> Any:
            optimizer.zero_grad()
            output = model(**batch)
            output.loss.backward()
            optimizer.step()
            if scheduled:
                scheduler.step()
            return transformers.modeling_outputs.CausalLMOutput(loss=output.loss.detach())

        step = capture(train_step, state=[model, optimizer])
        draw = torch.Generator().manual_seed(1)
        for _ in range(STEPS):
            ids = torch.randint(0, 128, (2, 12), generator=draw)
            yield step(transformers.BatchEncoding({"input_ids": ids, "labels": ids}))
            if not scheduled:
                scheduler.step()
        return {"model": model, "optimizer": optimizer}

    return script


@pytest.mark.ranks(1, timeout=600)
@pytest.mark.parametrize("scheduled", [True, False])
def test_hugging_face_with_schedules(scheduled: bool) -> None:
    check_equal(hugging_face(lambda model: model, scheduled), replays=25)


@pytest.mark.ranks(2, timeout=600)
def test_hugging_face_by_its_own_plan() -> None:
    """`tp_plan="auto"` applies the model's own plan as the model is loaded."""
    import transformers

    def prepare(model: Any) -> Any:
        with tempfile.TemporaryDirectory() as own:
            place = [own]
            dist.broadcast_object_list(place, 0)  # the first rank saves the model
            model.save_pretrained(place[0])
            dist.barrier()
            loaded = transformers.LlamaForCausalLM.from_pretrained(
                place[0], tp_plan="auto", device_mesh=mesh(2), dtype=torch.float32
            )
            dist.barrier()
        return loaded.train()

    check_equal(hugging_face(prepare), replays=25)


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", ["accelerate_loop", "hf_trainer", "lightning_module"])
def test_examples(name: str, processes: int) -> None:
    """On two processes, the libraries wrap the model in DistributedDataParallel."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes > 1 else []
    command = [sys.executable, *launch, str(EXAMPLES / f"{name}.py"), "--steps", str(30 * processes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"\d+ steps: (\d+) replayed", done.stdout)
    assert len(found) == processes and all(int(each) >= 20 for each in found), done.stdout + done.stderr
