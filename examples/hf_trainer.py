"""The Trainer of Hugging Face's transformers, with one line for Rote: it captures `training_step`.

python examples/hf_trainer.py --steps 40
"""

import argparse
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Weights(TrainerCallback):
    """Keeps a copy of the parameters after each step, for a comparison."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_step_end(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.seen.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))


def train(steps: int, capture: Callable[..., Any], accumulate: int = 1) -> tuple[Any, list[torch.Tensor], Any]:
    """Trains; `capture` is `rote.capture`. Comes back: the captured step, the parameters after each, the log."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=64, **SIZES))
    tokens = torch.randint(0, 128, (4 * steps * accumulate, 24), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=accumulate,
            learning_rate=1e-3,
            logging_steps=10,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        weights = Weights()
        trainer = Trainer(
            model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in tokens], callbacks=[weights]
        )
        trainer.training_step = capture(trainer.training_step, state=model)
        trainer.train()
    log = [(entry.get("loss"), entry.get("grad_norm")) for entry in trainer.state.log_history]
    return trainer.training_step, weights.seen, log


def main() -> None:
    import rote

    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    step, _, _ = train(parser.parse_args().steps, rote.capture)
    print(f"{step.stats.calls} steps: {step.stats.replays} replayed")


if __name__ == "__main__":
    main()
