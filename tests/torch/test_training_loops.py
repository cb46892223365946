"""Training and decoding loops as people write them, with nothing changed but the one line of the capture."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import training
from oracle import Capture, Script, check_equal
from test_regions import check_regions
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F


@dataclass
class Config:
    block_size: int = 8
    vocab_size: int = 23
    n_layer: int = 2
    n_head: int = 2
    n_embd: int = 16
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.q = nn.Linear(config.n_embd, config.n_embd)
        self.k = nn.Linear(config.n_embd, config.n_embd)
        self.v = nn.Linear(config.n_embd, config.n_embd)
        self.proj = nn.Linear(config.n_embd, config.n_embd)
        self.head = config.n_embd // config.n_head
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (each(x).view(batch, length, -1, self.head).transpose(1, 2) for each in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.drop(self.proj(y.transpose(1, 2).reshape(batch, length, -1)))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd)
        self.up = nn.Linear(config.n_embd, 4 * config.n_embd)
        self.down = nn.Linear(4 * config.n_embd, config.n_embd)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x))))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, length = idx.size()
        assert length <= self.config.block_size, "the sequence is longer than a block"
        pos = torch.arange(0, length, dtype=torch.long, device=idx.device)
        x = self.wte(idx) + self.wpe(pos)
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_lr(it: int) -> float:
    """A warm-up, and then a cosine."""
    warmup, decay, most, least = 5, 40, 1e-2, 1e-3
    if it < warmup:
        return most * (it + 1) / (warmup + 1)
    ratio = (it - warmup) / (decay - warmup)
    return least + 0.5 * (1 + math.cos(math.pi * ratio)) * (most - least)


def tokens(config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.randint(0, config.vocab_size, (2, config.block_size + 1))
    return data[:, :-1].contiguous(), data[:, 1:].contiguous()


def pretraining(scaled: bool, parallel: bool, averaged: bool = False, **options: Any) -> Script:
    """Accumulated gradients, a GradScaler, clipping, and a schedule that is set by hand."""

    def script(capture: Capture) -> Any:
        config = Config()
        model = GPT(config)
        if parallel:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            plan = {f"attn.{name}": ColwiseParallel() for name in "qkv"}
            plan |= {"up": ColwiseParallel(), "attn.proj": RowwiseParallel(), "down": RowwiseParallel()}
            for block in model.blocks:
                parallelize_module(block, mesh, plan)
        decay = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
        scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=2.0**8)
        accumulation = 3

        def train_step(batches: list[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
            total = torch.zeros(())
            for x, y in batches:
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=scaled):
                    _, loss = model(x, y)
                    loss = loss / accumulation
                scaler.scale(loss).backward()
                total += loss.detach()
            if averaged:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
                    p.grad /= dist.get_world_size()
            scaler.unscale_(optimizer)
            if not parallel:  # eager takes no mixture of tensors and DTensors
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            return total

        state = {"model": model, "optimizer": optimizer, "scaler": scaler}
        step = capture(train_step, state=state, **options)
        for it in range(40):
            for group in optimizer.param_groups:
                group["lr"] = get_lr(it)
            yield step([tokens(config) for _ in range(accumulation)])
        return model, optimizer, scaler.get_scale()

    return script


@pytest.mark.parametrize("scaled", [False, True])
def test_pretraining(scaled: bool) -> None:
    check_equal(pretraining(scaled, parallel=False), replays=20)


@pytest.mark.ranks(2)
def test_pretraining_tensor_parallel() -> None:
    """Without a scaler: in eager it takes no mixture of tensors and DTensors."""
    check_equal(pretraining(scaled=False, parallel=True), replays=20)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("scaled", [False, True])
def test_pretraining_data_parallel(scaled: bool) -> None:
    check_equal(pretraining(scaled, parallel=False, averaged=True, agree=scaled), replays=20)


def test_a_schedule_of_ones_own() -> None:
    """It runs before each call, and the step has the rate of its turn."""

    def script(capture: Capture) -> Any:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        done = [0]

        def scheduled(x: torch.Tensor) -> None:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(done[0])
            done[0] += len(x)

        def train_step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = capture(train_step, state={"model": model, "optimizer": optimizer}, host=scheduled)
        for call in range(30):
            x = torch.randn(2 if call == 9 else 1, 4)
            if step is train_step:  # eager has no `host=`
                scheduled(x)
            yield step(x), done[0]
        return model, optimizer

    check_equal(script, replays=20)


def test_images() -> None:
    """Adadelta and StepLR on a small convolutional network, and its evaluation."""

    def script(capture: Capture) -> Any:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.conv1 = nn.Conv2d(1, 4, 3, 1)
                self.conv2 = nn.Conv2d(4, 8, 3, 1)
                self.dropout1 = nn.Dropout(0.25)
                self.dropout2 = nn.Dropout(0.5)
                self.fc1 = nn.Linear(8 * 16, 16)
                self.fc2 = nn.Linear(16, 10)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = F.relu(self.conv2(F.relu(self.conv1(x))))
                x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
                return F.log_softmax(self.fc2(self.dropout2(F.relu(self.fc1(x)))), dim=1)

        model = Net()
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

        def train_step(data: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.nll_loss(model(data), target)
            loss.backward()
            optimizer.step()
            return loss

        @torch.no_grad()
        def test_step(data: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            output = model(data)
            correct = output.argmax(dim=1, keepdim=True).eq(target.view_as(output.argmax(dim=1, keepdim=True))).sum()
            return F.nll_loss(output, target, reduction="sum"), correct

        train = capture(train_step, state={"model": model, "optimizer": optimizer})
        test = capture(test_step, state={"model": model})
        for _ in range(6):
            model.train()
            for _ in range(5):
                yield train(torch.randn(3, 1, 12, 12), torch.randint(0, 10, (3,))).item()
            model.eval()
            for _ in range(5):
                loss, correct = test(torch.randn(4, 1, 12, 12), torch.randint(0, 10, (4,)))
                yield loss.item(), correct.item()
            scheduler.step()
        return model, optimizer

    check_equal(script, replays=20)


@pytest.mark.parametrize("held", ["buffer", "attribute"])
def test_decoding(held: str) -> None:
    """A token at a time, with a cache of keys and values, and sampling."""

    def script(capture: Capture) -> Any:
        size, length, vocab = 16, 40, 23

        class Decoder(nn.Module):
            keys: torch.Tensor
            values: torch.Tensor

            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Embedding(vocab, size)
                self.qkv = nn.Linear(size, 3 * size)
                self.head = nn.Linear(size, vocab)
                for name in ("keys", "values"):
                    cache = torch.zeros(1, length, size)
                    if held == "buffer":
                        self.register_buffer(name, cache, persistent=False)
                    else:
                        setattr(self, name, cache)

            def forward(self, token: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
                q, k, v = self.qkv(self.embed(token)).chunk(3, dim=-1)
                self.keys.index_copy_(1, pos, k)
                self.values.index_copy_(1, pos, v)
                mask = torch.arange(length) <= pos
                y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=mask[None, None])
                return self.head(y)[:, -1]  # type: ignore[no-any-return]

        model = Decoder().eval()

        @torch.inference_mode()
        def decode_one(token: torch.Tensor, pos: torch.Tensor, temperature: float, top_k: int) -> torch.Tensor:
            logits = model(token, pos) / max(temperature, 1e-5)
            least, _ = torch.topk(logits, top_k)
            logits = torch.where(logits < least[..., -1:], -float("Inf"), logits)
            return torch.multinomial(F.softmax(logits, dim=-1), num_samples=1)

        step = capture(decode_one, state={"model": model})
        token = torch.zeros(1, 1, dtype=torch.long)
        for i in range(length - 1):
            token = step(token, torch.tensor([i]), 0.8, 5).clone()
            yield token
        return model, model.keys, model.values

    check_equal(script, replays=20)


def test_a_trainer_of_ones_own() -> None:
    """A class with everything in it: counters, a schedule, an average of the weights, and metrics that are returned."""

    def script(capture: Capture) -> Any:
        @dataclass
        class Metrics:
            loss: torch.Tensor
            norm: torch.Tensor
            lr_step: int

        class Trainer:
            def __init__(self) -> None:
                self.config = Config(dropout=0.0)
                self.model = GPT(self.config)
                self.average = torch.optim.swa_utils.AveragedModel(
                    self.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
                )
                self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
                self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 3e-3, total_steps=60)
                self.global_step = 0
                self.tokens_seen = 0

            def train_step(self, batch: dict[str, torch.Tensor]) -> Metrics:
                self.optimizer.zero_grad()
                _, loss = self.model(batch["input_ids"], batch["labels"])
                loss.backward()
                norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.average.update_parameters(self.model)
                self.global_step += 1
                self.tokens_seen += batch["labels"].numel()
                return Metrics(loss.detach(), norm, 1)

            def progress(self) -> str:
                return f"{self.global_step} steps, {self.tokens_seen} tokens, rate {self.scheduler.get_last_lr()}"

        trainer = Trainer()
        step = capture(trainer.train_step, state=trainer)
        for _ in range(35):
            metrics = step(dict(zip(("input_ids", "labels"), tokens(trainer.config), strict=True)))
            yield metrics.loss, metrics.norm, trainer.progress()
        return trainer.model, trainer.average, trainer.optimizer, trainer.progress()

    check_equal(script, replays=20)


class Agent(nn.Module):
    """A module that trains itself, as those of reinforcement learning do: it holds its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.values = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = torch.optim.Adam(self.values.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.values(x)  # type: ignore[no-any-return]

    def learn(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        loss = F.smooth_l1_loss(self(x), wanted)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.detach()


@pytest.mark.parametrize("inside", [False, True], ids=["", "in a module"])
@pytest.mark.parametrize("scheduled", ["", "in the step", "between"])
def test_a_module_that_holds_its_optimizer(inside: bool, scheduled: str) -> None:
    def script(capture: Capture) -> Any:
        agent = Agent()
        state = nn.ModuleDict({"agent": agent}) if inside else agent

        def learn(x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
            loss = agent.learn(x, wanted)
            agent.scheduler.step()
            return loss

        @torch.no_grad()
        def act(x: torch.Tensor) -> torch.Tensor:
            return agent(x).argmax(-1)  # type: ignore[no-any-return]

        step = capture(learn if scheduled == "in the step" else agent.learn, state=state)
        choose = capture(act, state=state)
        for _ in range(30):
            yield step(torch.randn(5, 4), torch.randn(5, 2)), choose(torch.randn(5, 4))
            if scheduled == "between":
                agent.scheduler.step()
        return agent, agent.optimizer, agent.scheduler.state_dict()

    check_equal(script, replays=20)


class Renamed(nn.Linear):
    """Its methods have other signatures than those of `nn.Module`, as torchrl's `LossModule` has them."""

    def named_parameters(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        yield from super().named_parameters(prefix, recurse)

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Any:  # type: ignore[override]
        yield from super().named_buffers(prefix, recurse)


@pytest.mark.parametrize("region", [False, True], ids=["", "region"])
def test_a_module_with_methods_of_its_own_for_parameters(region: bool) -> None:
    def script(capture: Capture) -> Any:
        model = Renamed(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = training(model, optimizer)
        if region:
            capture(model)
        else:
            step = capture(step, state=[model, optimizer])
        for _ in range(26):
            yield step(torch.randn(3, 4))
        return list(model.named_parameters()), optimizer

    if region:
        check_regions(script)
    else:
        check_equal(script, replays=20)
