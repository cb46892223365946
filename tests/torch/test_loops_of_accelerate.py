"""Loops in the shape that scripts for accelerate have, such as those of transformers and diffusers: captured as they
are, beside an eager twin. Progress bars, sums before `backward`, `accumulate`, and two loops in an epoch."""

import math
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from test_loops import captured

for package in ("transformers", "accelerate", "tqdm"):
    pytest.importorskip(package, reason="make test-wild installs it")

EPOCHS, BATCH = 4, 4


class Rows(torch.utils.data.Dataset[dict[str, Any]]):
    def __init__(self, number: int) -> None:
        self.rows = torch.randint(0, 100, (number, 16), generator=torch.Generator().manual_seed(number))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, place: int) -> dict[str, Any]:
        row = self.rows[place].tolist()
        return {"input_ids": row, "attention_mask": [1] * len(row), "labels": row}


class Job:
    """What a script has prepared when its loops begin."""

    def __init__(self, accumulate: int) -> None:
        from accelerate import Accelerator
        from transformers import GPT2Config, GPT2LMHeadModel, default_data_collator, get_scheduler

        config = GPT2Config(vocab_size=100, n_positions=16, n_embd=32, n_layer=2, n_head=2)
        config.bos_token_id = config.eos_token_id = 0
        model = GPT2LMHeadModel(config)
        load = torch.utils.data.DataLoader
        train = load(Rows(160), BATCH, shuffle=True, collate_fn=default_data_collator)
        test = load(Rows(40), BATCH, collate_fn=default_data_collator)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        prepared = self.accelerator.prepare(model, optimizer, train, test)
        self.model, self.optimizer, self.train, self.test = prepared
        self.accumulate, self.most = accumulate, EPOCHS * math.ceil(len(self.train) / accumulate) - 3
        self.scheduler = get_scheduler("linear", self.optimizer, num_warmup_steps=2, num_training_steps=self.most)
        self.log: list[Any] = []


def completes_steps(job: Job) -> Any:
    from tqdm.auto import tqdm

    model, optimizer, scheduler, accelerator = job.model, job.optimizer, job.scheduler, job.accelerator
    progress = tqdm(range(job.most), disable=True)
    completed = 0
    for _ in range(EPOCHS):
        model.train()
        for step, batch in enumerate(job.train):
            loss = model(**batch).loss / job.accumulate
            accelerator.backward(loss)
            if step % job.accumulate == 0 or step == len(job.train) - 1:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                progress.update(1)
                completed += 1
            if completed >= job.most:
                break
        model.eval()
        for batch in job.test:
            outputs = model(**batch)
            predictions = outputs.logits.argmax(dim=-1)
            job.log.append(accelerator.gather(predictions).sum().item())
    return completed


def within_accumulate(job: Job) -> Any:
    model, optimizer, scheduler, accelerator = job.model, job.optimizer, job.scheduler, job.accelerator
    completed = 0
    for _ in range(EPOCHS):
        model.train()
        total = 0
        for batch in job.train:
            with accelerator.accumulate(model):
                outputs = model(**batch)
                loss = outputs.loss
                total += loss.detach().float()
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                completed += 1
            if completed >= job.most:
                break
        model.eval()
        losses = []
        for batch in job.test:
            with torch.no_grad():
                outputs = model(**batch)
            losses.append(accelerator.gather_for_metrics(outputs.loss.repeat(BATCH)))
        job.log.append((math.exp(torch.cat(losses).mean()), float(total)))
    return completed


def sums_and_logs(job: Job) -> Any:
    from tqdm.auto import tqdm

    model, optimizer, scheduler, accelerator = job.model, job.optimizer, job.scheduler, job.accelerator
    progress = tqdm(range(job.most), disable=True)
    completed = 0
    for _ in range(EPOCHS):
        train_loss = 0.0
        for batch in job.train:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                mean = accelerator.gather(loss.repeat(BATCH)).mean()
                train_loss += mean.item() / job.accumulate
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                progress.update(1)
                completed += 1
                job.log.append(train_loss)
                train_loss = 0.0
            logs = {"step_loss": loss.detach().item(), "lr": scheduler.get_last_lr()[0]}
            progress.set_postfix(**logs)
            job.log.append(logs)
            if completed >= job.most:
                break
    return completed


def check_replayed(body: Callable[[Job], Any], accumulate: int, least: float) -> None:
    def script(capture: Capture) -> Calls:
        job = Job(accumulate)
        yield capture(body)(job), job.log
        return job.model, job.optimizer.optimizer

    (loops,) = check_right(script, captured).steps
    if not ORACLE_ONLY:
        train, *_ = loops.stats.values()
        assert train.replays > train.calls * least, train


@pytest.mark.ranks(1, timeout=600)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("body", [completes_steps, within_accumulate, sums_and_logs])
def test_replayed(body: Callable[[Job], Any], accumulate: int) -> None:
    check_replayed(body, accumulate, 0.5)


@pytest.mark.ranks(2, timeout=600)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_on_two_ranks() -> None:
    """`accelerate` wraps the model in `DistributedDataParallel`, and `accumulate` leaves out its reductions."""
    # accelerate asks for them even where the processes are connected already.
    with patch.dict(os.environ, MASTER_ADDR="127.0.0.1", MASTER_PORT="29500"):
        check_replayed(within_accumulate, 2, 0.3)
