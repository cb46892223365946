"""torchtitan's Llama 3 debug model under torchtitan's own Trainer, on the CPU: FSDP2 in mixed precision, tensor and
sequence parallel, loss parallel, selective activation checkpointing.

    torchrun --standalone --nproc-per-node 2 examples/torchtitan_llama.py --steps 30 --shards 2

FSDP2 shards parameters over `--shards` ranks; tensor parallel has what is left. The Trainer calls `fwd_bwd_fn`, which
it wraps itself for CUDA graphs, and later the step of its optimizers; here Rote captures both. The tokens are random.

With `--regions`, each block is a region instead, where torchtitan would compile the block, and checkpoints are full: a
selective one watches every op, so that nothing in it can be replayed.
"""

import argparse
import dataclasses
import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools
from torch.distributed.fsdp import FSDPModule


class Host:
    """What torchtitan asks of an accelerator, answered for the CPU."""

    set_device = synchronize = empty_cache = reset_peak_memory_stats = lambda *_: None
    current_device = lambda *_: 0  # noqa: E731
    get_device_name = lambda *_: "CPU"  # noqa: E731
    device_count = lambda *_: int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))  # noqa: E731
    get_device_properties = lambda *_: types.SimpleNamespace(total_memory=1 << 30)  # noqa: E731
    memory_stats = lambda *_: dict[str, int]()  # noqa: E731


tools.device_type, tools.device_module = "cpu", Host()  # before the rest of torchtitan asks

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.components.dataloader import BaseDataLoader  # noqa: E402
from torchtitan.components.loss import CrossEntropyLoss  # noqa: E402
from torchtitan.components.metrics import MetricsProcessor  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw  # noqa: E402
from torchtitan.components.tokenizer import BaseTokenizer  # noqa: E402
from torchtitan.config.configs import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry, parallelize_llama  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402

VOCABULARY = 2048


class Tokens(BaseDataLoader):
    """Batches of random tokens, others on each data parallel rank."""

    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_rank: int, seq_len: int, local_batch_size: int, **_: Any) -> None:
        self.seed = 1 + dp_rank
        self.shape = (local_batch_size, seq_len + 1)

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        draw = torch.Generator().manual_seed(self.seed)
        while True:
            tokens = torch.randint(0, VOCABULARY, self.shape, generator=draw)
            yield {"input": tokens[:, :-1].contiguous()}, tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclasses.dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        super().__init__()

    def encode(self, *args: Any, **kwargs: Any) -> list[int]:
        raise NotImplementedError("the tokens are random")

    def decode(self, *args: Any, **kwargs: Any) -> str:
        raise NotImplementedError("the tokens are random")

    def get_vocab_size(self) -> int:
        return VOCABULARY


def parallelize(model: Any, **options: Any) -> Any:
    """What torchtitan does, but gradients are reduced by plain sums: with the factor that torchtitan sets, FSDP2 asks
    for `PREMUL_SUM`, which gloo does not have and Rote does not record."""
    model = parallelize_llama(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return model


def config(steps: int, shards: int, regions: bool) -> Any:
    spec = dataclasses.replace(model_registry("debugmodel"), parallelize_fn=parallelize)
    for _, _, owner, name in list(spec.traverse(FlexAttention.Config)):
        setattr(owner, name, ScaledDotProductAttention.Config())  # flex attention compiles itself
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        tokenizer=NoTokenizer.Config(),
        dataloader=Tokens.Config(),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, decay_type="linear"),
        training=TrainingConfig(local_batch_size=2, seq_len=64, steps=steps, disable_cuda_graphs=True),
        parallelism=ParallelismConfig(
            spmd_backend="partial_dtensor",
            data_parallel_shard_degree=shards,
            tensor_parallel_degree=dist.get_world_size() // shards,
        ),
        activation_checkpoint=FullAC.Config() if regions else SelectiveAC.Config(),
        checkpoint=CheckpointManager.Config(enable=False),
        metrics=MetricsProcessor.Config(log_freq=10),
    )


def blocks(trainer: Any) -> Iterator[torch.nn.Module]:
    """The blocks of the model, inside of their checkpoints."""
    for part in trainer.model_parts:
        for block in part.layers.values():
            yield getattr(block, "_checkpoint_wrapped_module", block)


def train_by_regions(steps: int, capture: Callable[..., Any], shards: int) -> tuple[Any, list[Any]]:
    """Trains; `capture` is `rote.capture_module`. Comes back: the trainer, and what `capture` returned."""
    trainer = Trainer(config(steps, shards, regions=True))
    handles = [capture(block) for block in blocks(trainer)]
    trainer.train()
    trainer.close()
    return trainer, handles


def train(steps: int, capture: Callable[..., Any], shards: int) -> Any:
    """Trains; `capture` is `rote.capture`."""
    trainer = Trainer(config(steps, shards, regions=False))
    # An ExitStack without content, of which nothing tells beforehand whether it swallows errors.
    trainer.fwd_bwd_fn = capture(trainer.fwd_bwd_fn, state=trainer.model_parts)
    optimizers = trainer.optimizers
    optimizers.step = capture(optimizers.step, state=[trainer.model_parts, *optimizers.optimizers])
    trainer.train()
    trainer.close()
    return trainer


def main() -> None:
    import rote

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--shards", type=int, default=1, help="ranks over which FSDP2 shards parameters")
    parser.add_argument("--regions", action="store_true", help="capture each block, and not the steps")
    arguments = parser.parse_args()
    if not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    if arguments.regions:
        _, handles = train_by_regions(arguments.steps, rote.capture_module, arguments.shards)
        captured = {f"block {i}": handle for i, handle in enumerate(handles)}
    else:
        trainer = train(arguments.steps, rote.capture, arguments.shards)
        captured = {"forward and backward": trainer.fwd_bwd_fn, "optimizer": trainer.optimizers.step}
    if dist.get_rank() == 0:
        for name, each in captured.items():
            print(f"{each.stats.calls} calls: {each.stats.replays} replayed ({name})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
