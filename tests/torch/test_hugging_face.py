"""Models of Hugging Face as they come, in a plain training loop, with no edit but the line of `rote.capture`.

The loop has AdamW with its defaults, clips gradients, and returns the loss as a number. Each model is small, has
random weights and all its dropout. Its eager twin runs in the same process, from the same seed.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import rote
import torch
import torch.distributed as dist
from models import mesh
from oracle import Calls, Capture, check_equal, check_same, run_eager
from rote._checkpointed import inside_of
from test_regions import check_steps
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

transformers = pytest.importorskip("transformers", reason="make test-wild installs transformers")
modeling_layers = pytest.importorskip("transformers.modeling_layers")

CALLS = 28
VOCABULARY = 128
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
HEADS: dict[str, Any] = {**SIZES, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
Batch = dict[str, Tensor]


def words(draw: torch.Generator) -> Batch:
    ids = torch.randint(0, VOCABULARY, (2, 12), generator=draw)
    return {"input_ids": ids, "labels": ids}


def padded(draw: torch.Generator) -> Batch:
    lengths = torch.randint(6, 12, (2, 1), generator=draw)
    return {**words(draw), "attention_mask": (torch.arange(12) < lengths).long()}


def sometimes_padded(draw: torch.Generator) -> Batch:
    batch = padded(draw)
    if torch.randint(0, 3, (), generator=draw):
        return batch
    return {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}


def images(draw: torch.Generator) -> Batch:
    pixels = torch.randn(2, 3, 16, 16, generator=draw)
    return {"pixel_values": pixels, "labels": torch.randint(0, 5, (2,), generator=draw)}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**HEADS))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=8, **HEADS))


def mistral() -> nn.Module:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**HEADS))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes))


def bert() -> nn.Module:
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **SIZES)
    return transformers.BertForMaskedLM(config)


def vit() -> nn.Module:
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(image_size=16, patch_size=4, num_labels=5, **SIZES)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    "llama": (llama, words),
    "qwen3": (qwen3, words),
    "mistral": (mistral, words),
    "gpt2": (gpt2, words),
    "bert": (bert, words),
    "vit": (vit, images),
}


def sharded(model: nn.Module) -> nn.Module:
    """Attention and feed-forward layers over two ranks."""
    plan = {f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}
    plan |= {f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
    plan |= {"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()}
    return parallelize_module(model, mesh(2), plan)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a model, whatever their names."""
    return [part for part in model.modules() if isinstance(part, modeling_layers.GradientCheckpointingLayer)]


def fully_sharded(model: nn.Module) -> nn.Module:
    for part in blocks(model):
        fully_shard(part, mesh=mesh(2))
    return fully_shard(model, mesh=mesh(2))


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"FSDP2": fully_sharded, "DDP": DistributedDataParallel}


def training(
    make: Callable[[], nn.Module],
    batches: Callable[[torch.Generator], Batch],
    clips: bool = True,
    apart: bool = False,
) -> Callable[[Capture], Calls]:
    """``apart``: each rank has batches of its own."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = make().train()
        optimizer = torch.optim.AdamW(model.parameters())

        def train_step(batch: Batch) -> float:
            optimizer.zero_grad()
            loss = model(**batch).loss
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            return loss.item()

        state = {"model": model, "optimizer": optimizer}
        step = capture(train_step, state=state)
        draw = torch.Generator().manual_seed(1 + (dist.get_rank() if apart else 0))
        for _ in range(CALLS):
            yield step(batches(draw))
        return state

    return script


@pytest.mark.ranks(1, timeout=600)
@pytest.mark.parametrize("name", MODELS)
def test_on_one_rank(name: str) -> None:
    check_equal(training(*MODELS[name]))


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_tensor_parallel(name: str) -> None:
    make, batches = MODELS[name]
    # Eager cannot clip gradients of which some are DTensors and some are not.
    check_equal(training(lambda: sharded(make()), batches, clips=False))


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_wrapped(name: str, wrapper: str) -> None:
    make, batches = MODELS[name]
    check_equal(training(lambda: WRAPPERS[wrapper](make()), batches, apart=True), replays=15)


@pytest.mark.ranks(1, timeout=600)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_padding_masks(name: str) -> None:
    """Their code asks on the host whether a mask hides anything: here each does."""
    check_equal(training(MODELS[name][0], padded))


@pytest.mark.ranks(1, timeout=600)
@pytest.mark.parametrize("name", [name for name in MODELS if name != "vit"])
def test_padding_now_and_then(name: str) -> None:
    """A mask that hides nothing takes another branch."""
    check_equal(training(MODELS[name][0], sometimes_padded))


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_padding_and_tensor_parallel(name: str) -> None:
    make, _ = MODELS[name]
    check_equal(training(lambda: sharded(make()), sometimes_padded, clips=False))


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert"])
def test_padding_and_wrapped(name: str, wrapper: str) -> None:
    """One rank's batch may be padded when the other's is not."""
    make, _ = MODELS[name]
    check_equal(training(lambda: WRAPPERS[wrapper](make()), sometimes_padded, apart=True), replays=10)


def layers(state: Any) -> list[nn.Module]:
    return blocks(state["model"])


@pytest.mark.ranks(1, timeout=600)
@pytest.mark.parametrize("name", MODELS)
def test_blocks_as_regions(name: str) -> None:
    make, batches = MODELS[name]

    def uncached() -> nn.Module:
        model = make()
        model.config.use_cache = False  # a cache is filled in every block
        return model

    check_steps(training(uncached, batches if name == "vit" else sometimes_padded), layers, replays=10)


@pytest.mark.ranks(1, timeout=600)
def test_regions_inside_of_checkpoints() -> None:
    def make() -> nn.Module:
        model = llama()
        model.gradient_checkpointing_enable()
        return model

    def parts(state: Any) -> Iterator[nn.Module]:
        for layer in state["model"].model.layers:
            yield from (layer.self_attn, layer.mlp)

    check_steps(training(make, words), parts)


def checkpointed(**options: Any) -> nn.Module:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(attention_dropout=0.1, **HEADS))
    model.config.use_cache = False
    model.activation_checkpointing_enable(options or None)
    return model


@pytest.mark.ranks(1, timeout=600)
@pytest.mark.parametrize("options", [{}, {"use_reentrant": True}, {"use_reentrant": False}], ids=str)
def test_regions_of_layers_that_set_checkpoints(options: dict[str, bool]) -> None:
    check_steps(training(lambda: checkpointed(**options), words), layers, replays=12)


@pytest.mark.ranks(2, timeout=600)
def test_sharded_layers_that_set_checkpoints() -> None:
    check_steps(training(lambda: fully_sharded(checkpointed()), words, apart=True), layers, replays=12)


@pytest.mark.ranks(2, timeout=600)
def test_layers_that_set_checkpoints_captured_before_they_are_sharded() -> None:
    handles: list[Any] = []

    def captured() -> nn.Module:
        model = checkpointed()
        handles.extend(rote.capture_module(layer, strict=True) for layer in layers({"model": model}))
        return fully_sharded(model)

    eager = run_eager(training(lambda: fully_sharded(checkpointed()), words))
    check_same(eager, run_eager(training(captured, words)))
    assert all(handle.stats.replays >= 12 and handle.stats.backward.replays >= 12 for handle in handles)


@pytest.mark.ranks(1, timeout=600)
def test_checkpoints_switched_on_and_off() -> None:
    """The region stays the same; so do plans, but for those of the reentrant checkpoint's forward without gradients."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = checkpointed()
        optimizer = torch.optim.AdamW(model.parameters())
        state = {"model": model, "optimizer": optimizer}
        switches: list[Callable[[], object]] = [
            model.activation_checkpointing_disable,
            model.eval,
            model.activation_checkpointing_enable,
            model.train,
            lambda: model.activation_checkpointing_enable({"use_reentrant": True}),
        ]

        def step(batch: Batch) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = model(**batch).loss
            loss.backward()
            optimizer.step()
            return loss.detach()

        capture(step, state=state)
        draw = torch.Generator().manual_seed(1)
        for number in range(70):
            if number % 12 == 11:
                switches[number // 12]()
            yield step(words(draw))
        return state

    check_steps(script, layers)


def test_other_wrappers_of_a_forward_are_in_the_region() -> None:
    model = checkpointed()
    wrapped = [part for part in model.modules() if hasattr(type(part).forward, "__wrapped__")]
    inside = [part for part in wrapped if inside_of(part) is not None]
    assert len(wrapped) > len(inside) and inside == layers({"model": model})


def test_copies_set_checkpoints_too() -> None:
    model = checkpointed()
    handles = [rote.capture_module(layer) for layer in layers({"model": model})]
    for layer in layers({"model": copy.deepcopy(model)}):
        assert layer.forward.__func__ is type(layer).forward and layer.forward.__self__ is layer
    for layer, handle in zip(layers({"model": model}), handles, strict=True):
        handle.release()
        assert "forward" not in vars(layer)


@pytest.mark.ranks(1, timeout=600)
def test_whole_steps_over_regions_inside_of_checkpoints() -> None:
    """A captured step runs the checkpoint, and not only what is inside of it."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = checkpointed()
        for layer in layers({"model": model}):
            rote.capture_module(layer)
        return (yield from training(lambda: model, words)(capture))

    check_equal(script, replays=10)


@pytest.mark.ranks(1, timeout=600)
def test_evaluation_and_logits() -> None:
    """Results of a model's own class are read inside the step."""

    def script(capture: Capture) -> Iterator[Any]:
        torch.manual_seed(0)
        model = llama().eval()

        @torch.no_grad()
        def evaluate(ids: Tensor) -> Any:
            output = model(input_ids=ids)
            return output.logits, output.logits.mean().item()

        step = capture(evaluate, state=model)
        draw = torch.Generator().manual_seed(1)
        for _ in range(CALLS):
            yield step(words(draw)["input_ids"])

    check_equal(script)
