"""The SFTTrainer of trl, with one line for Rote: each layer of the model is a region, inside of the activation
checkpoint that the trainer sets by default. Reads of metrics, clipping and the optimizer stay eager.

python examples/trl_sft.py --steps 40
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = 128


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each number."""
    words = {f"w{number}": number for number in range(WORDS)}
    known = Tokenizer(models.WordLevel(words, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=known, pad_token="w0", eos_token="w1", unk_token="w0")


def train(steps: int, capture_module: Callable[[nn.Module], Any]) -> tuple[list[Any], nn.Module, list[Any]]:
    """Trains; `capture_module` is `rote.capture_module`. Comes back: its handle of each layer, the model, the log."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=64, pad_token_id=0, **SIZES))
    tokens = torch.randint(2, WORDS, (4 * steps, 24), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as directory:
        arguments = SFTConfig(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=4,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
        )
        layers = [capture_module(layer) for layer in model.model.layers]
        data = Dataset.from_dict({"input_ids": tokens.tolist()})
        trainer = SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer())
        trainer.train()
    kept = ("loss", "grad_norm", "entropy", "mean_token_accuracy")
    return layers, model, [[entry.get(name) for name in kept] for entry in trainer.state.log_history]


def main() -> None:
    import rote

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    layers, _, _ = train(parser.parse_args().steps, rote.capture_module)
    for number, layer in enumerate(layers):
        stats = layer.stats
        print(f"layer {number}: {stats.replays} of {stats.calls} forwards replayed, {stats.backward.replays} backwards")


if __name__ == "__main__":
    main()
