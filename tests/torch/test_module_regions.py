"""Steps that cannot be replayed: the modules that they call are regions while they run."""

import copy
import io
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import rote
import torch
import torch.distributed as dist
from oracle import ORACLE_ONLY
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

pytestmark = [
    pytest.mark.skipif(ORACLE_ONLY, reason="compares with eager itself"),
    pytest.mark.filterwarnings("ignore:rote"),
]
FORWARD: Any = None
Batches = list[tuple[torch.Tensor, torch.Tensor]]


class Job:
    """A model with what trains it, the same for the same seed."""

    def __init__(self, model: nn.Module | None = None, batches: int = 80) -> None:
        torch.manual_seed(0)
        random.seed(0)
        inner = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Dropout(0.1), nn.GELU())
        self.model = model or nn.Sequential(nn.Linear(8, 16), nn.GELU(), inner, nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.batches = [(torch.randn(6, 8), torch.randint(0, 4, (6,))) for _ in range(batches)]
        self.beta = 0.1
        self.log: list[Any] = []

    def left(self) -> list[torch.Tensor]:
        """All that training leaves."""
        states = [each for state in self.optimizer.state.values() for each in state.values()]
        left = [*self.model.state_dict().values(), *states, torch.get_rng_state()]
        return [each.full_tensor() if hasattr(each, "full_tensor") else each for each in left]

    def step(self, loss: torch.Tensor) -> None:
        """Ends a turn: not itself in a loop that trains."""
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.log.append(loss.item())


def of_an_attribute(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches):
        job.beta = 0.1 + i * 0.001
        hidden = job.model(x)
        loss = F.cross_entropy(hidden, y) + job.beta * hidden.pow(2).mean()
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.log.append(loss.item())


def reads_before_backward(job: Job) -> None:
    for x, y in job.batches:
        loss = F.cross_entropy(job.model(x), y)
        value = loss.item()
        if value > 1.0:
            loss = loss * (1.0 / value)
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.log.append(value)


def chooses_examples(job: Job) -> None:
    for x, y in job.batches:
        losses = F.cross_entropy(job.model(x), y, reduction="none")
        hard = [i for i in range(len(losses)) if losses[i].item() > 0.5]
        if not hard:
            continue
        loss = losses[hard].mean()
        job.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(job.model.parameters(), 1.0)
        job.optimizer.step()
        job.log.append(loss.item())


def permutes(job: Job) -> None:
    for x, y in job.batches:
        order = random.sample(range(len(x)), len(x))
        one, two = job.model(x), job.model(x[order])
        loss = F.cross_entropy(one, y) + F.mse_loss(two, one[order])
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.log.append(loss.item())


def acts(job: Job) -> None:
    for x, y in job.batches:
        chances, rewards = [], []
        for t in range(3):
            policy = torch.distributions.Categorical(logits=job.model(x[t]))
            action = policy.sample()
            chances.append(policy.log_prob(action))
            rewards.append(1.0 if action.item() == y[t].item() else -0.1)
        loss, later = torch.zeros(()), 0.0
        for chance, reward in zip(chances[::-1], rewards[::-1], strict=True):
            later = reward + 0.9 * later
            loss = loss - chance * later
        job.optimizer.zero_grad()
        loss.backward()
        job.optimizer.step()
        job.log.append(loss.item())


def loads_before_backward(job: Job) -> None:
    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.randint(len(job.batches), (6,))
        return torch.stack([job.batches[i][0][0] for i in places]), torch.stack([job.batches[i][1][0] for i in places])

    x, y = batch()
    for _ in range(160):
        loss = F.cross_entropy(job.model(x), y)
        x, y = batch()
        loss.backward()
        job.optimizer.step()
        job.optimizer.zero_grad()
        job.log.append(loss.item())


LOOPS = [of_an_attribute, reads_before_backward, chooses_examples, permutes, acts, loads_before_backward]


def compare(captured: Any, train: Callable[[Job], Any], make: Callable[[], Job] = Job) -> Job:
    """Trains captured and in eager mode, and compares all that both leave. Returns the job that was captured."""
    job = make()
    captured(job)
    left = job.left()
    eager = make()
    train(eager)
    assert job.log == eager.log
    assert all(torch.equal(one, two) for one, two in zip(left, eager.left(), strict=True))
    return job


def each_batch(step: Callable[[Job, torch.Tensor, torch.Tensor], Any]) -> Callable[[Job], None]:
    """A training function that calls a step."""

    def train(job: Job) -> None:
        for x, y in job.batches:
            step(job, x, y)

    return train


def regions_of(captured: rote.CapturedLoops[..., Any]) -> dict[str, rote.Stats]:
    (stats,) = captured.stats.values()
    return stats.regions


@pytest.mark.parametrize("train", LOOPS, ids=lambda train: str(train.__name__))
def test_loops(train: Callable[[Job], None]) -> None:
    captured = rote.capture_loops(train)
    job = compare(captured, train)
    (stats,) = regions_of(captured).values()
    assert stats.replays > 20
    assert stats.backward is not None
    assert stats.backward.replays > 20
    assert "forward" not in vars(job.model)


def test_step() -> None:
    def step(job: Job, x: torch.Tensor, y: torch.Tensor) -> None:
        loss = F.cross_entropy(job.model(x), y)
        if loss.item() > 1.3:
            loss = loss / 2
        job.step(loss)

    captured = rote.capture(step)
    compare(each_batch(captured), each_batch(step))
    assert captured.stats.regions["args[0].model"].replays > 20, captured.explain()
    plain = rote.capture(step, regions=False)
    each_batch(plain)(Job())
    assert not plain.stats.regions


def test_one_warning_whatever_was_read() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        rote.capture_loops(reads_before_backward)(Job())
    assert len([each for each in seen if "recording refused" in str(each.message)]) <= 1


def test_modules_inside_of_one_that_reads() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            first = [(nn.Linear(8 if i == 0 else 16, 16), nn.GELU(), nn.LayerNorm(16)) for i in range(4)]
            self.first = nn.Sequential(*(each for layer in first for each in layer))
            second = [(nn.Linear(16, 4 if i == 3 else 16), nn.GELU()) for i in range(4)]
            self.second = nn.ModuleList([nn.Sequential(*(each for layer in second for each in layer))])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x)
            if hidden.sum().item() > 0:
                hidden = hidden * 2
            return self.second[0](hidden)  # type: ignore[no-any-return]

    def job() -> Job:
        torch.manual_seed(1)
        return Job(Model())

    captured = rote.capture_loops(reads_before_backward)
    compare(captured, reads_before_backward, job)
    regions = regions_of(captured)
    assert [*regions] == ["job.model.first", "job.model.second.0"]
    assert all(each.replays > 20 for each in regions.values())


def test_between_turns_a_module_is_as_it_was() -> None:
    job = Job()
    seen = []

    def batches() -> Any:
        for x, y in Job().batches:
            seen.append("forward" in vars(job.model))
            copied = copy.deepcopy(job.model)
            assert copied.state_dict().keys() == job.model.state_dict().keys()
            torch.save(job.model, io.BytesIO())
            yield x, y

    class Loader:
        def __iter__(self) -> Any:
            return batches()

    job.batches = Loader()  # type: ignore[assignment]
    captured = rote.capture_loops(reads_before_backward)
    captured(job)
    assert regions_of(captured)
    assert len(seen) == 80
    assert not any(seen)
    torch.jit.script(job.model)
    torch.jit.trace(job.model.eval(), torch.randn(2, 8))


def doubled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: forward(x) * 2


def test_a_forward_that_is_replaced_counts() -> None:
    def train(job: Job) -> None:
        for i, (x, y) in enumerate(job.batches):
            if i == 60:
                job.model.forward = doubled(job.model.forward)  # type: ignore[method-assign]
            loss = F.cross_entropy(job.model(x), y)
            if loss.item() > 1.0:
                loss = loss * 2
            job.optimizer.zero_grad()
            loss.backward()
            job.optimizer.step()
            job.log.append(loss.item())

    compare(rote.capture_loops(train), train)


def test_what_is_differentiated_twice_stays_eager() -> None:
    script = {"torch": torch, "F": F, "twice": {"create" + "_graph": True}}
    exec(  # text that no file holds, with the word out of sight
        "def step(job, x, y):\n"
        "    x = x.clone().requires_grad_()\n"
        "    out = job.model(x)\n"
        "    loss = F.cross_entropy(out, y)\n"
        "    penalty, = torch.autograd.grad(out.sum(), x, **twice)\n"
        "    loss = loss + penalty.pow(2).sum() if loss.item() > 0 else loss\n"
        "    job.step(loss)\n",
        script,
    )
    step: Any = script["step"]
    captured = rote.capture(step)
    compare(each_batch(captured), each_batch(step))
    assert not captured.stats.regions
    assert "differentiated twice" in captured.explain()


def test_functions_that_ask_for_zeros_stay_eager() -> None:
    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> Any:
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, one: torch.Tensor, two: torch.Tensor) -> Any:
            return one * 2 + two * 3

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> Any:
            one, two = Both.apply(self.first(x))  # type: ignore[no-untyped-call]
            return self.last(F.gelu(one + two))

    def job() -> Job:
        torch.manual_seed(1)
        return Job(Model())

    captured = rote.capture_loops(reads_before_backward)
    compare(captured, reads_before_backward, job)
    assert not regions_of(captured)


def check_attributes(*modules: nn.Module) -> None:
    assert not any("forward" in vars(each) for each in modules)


def copies_a_module(job: Job) -> None:
    for x, y in job.batches:
        twin = job.model.__new__(type(job.model))
        twin.__dict__ = {**job.model.__dict__}
        twin._modules = {name: copy.deepcopy(inner) for name, inner in job.model._modules.items()}
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.9)
        other = copy.deepcopy(job.model)
        check_attributes(job.model, other, twin)
        loss = F.cross_entropy(job.model(x), y) + F.cross_entropy(twin(x), y).detach() * other(x).mean().detach()
        if loss.item() > 1.0:
            loss = loss * 0.5
        job.step(loss)


def hooks_draw(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches):
        if i == 50:
            for parameter in job.model.parameters():
                parameter.register_hook(lambda gradient: gradient + torch.randn_like(gradient) * 0.01)
        loss = F.cross_entropy(job.model(x), y)
        if loss.item() > 1.0:
            loss = loss * 0.5
        job.step(loss)


def looks_inside_later(job: Job) -> None:
    seen: list[torch.Tensor] = []
    for i, (x, y) in enumerate(job.batches):
        hook = None
        if i >= 50 and i % 5 == 0:
            inner: Any = job.model[2]  # type: ignore[index]
            hook = inner[0].register_forward_hook(lambda module, args, result: seen.append(result))
        out = job.model(x)
        loss = F.cross_entropy(out, y)
        if hook is not None:
            hook.remove()
            (gradient,) = torch.autograd.grad(out.sum(), seen[-1], retain_graph=True)
            loss = loss + seen.pop().pow(2).mean()
            job.log.append(gradient.sum().item())
        if loss.item() > 1.0:
            loss = loss * 0.5
        job.step(loss)


def takes_a_list_later(job: Job) -> None:
    for i, (x, y) in enumerate(job.batches):
        features: list[torch.Tensor] = []
        job.model.keep = i > 50  # type: ignore[assignment]
        loss = F.cross_entropy(job.model(x, features), y)
        if features:
            loss = loss + features[0].pow(2).mean()
        if loss.item() > 1.0:
            loss = loss * 0.5
        job.step(loss)


class Filling(nn.Module):
    """Writes to a list in its arguments, if it is asked to."""

    keep = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, features: list[torch.Tensor]) -> torch.Tensor:
        hidden = F.gelu(self.first(x))
        if self.keep:
            features.append(hidden)
        return self.last(hidden)  # type: ignore[no-any-return]


@pytest.mark.parametrize("train", [copies_a_module, hooks_draw, looks_inside_later], ids=lambda train: train.__name__)
def test_what_scripts_do_to_modules_in_a_turn(train: Callable[[Job], None]) -> None:
    compare(rote.capture_loops(train), train)


def test_a_forward_that_looks_at_its_class() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [(nn.Linear(8 if i == 0 else 16, 4 if i == 5 else 16), nn.GELU()) for i in range(6)]
            self.layers = nn.Sequential(*(each for layer in layers for each in layer))

        def forward(self, x: torch.Tensor) -> Any:
            return self.layers(x) * (1 if type(self).forward is FORWARD else 2)

    global FORWARD
    FORWARD = Model.forward

    def job() -> Job:
        torch.manual_seed(1)
        return Job(Model())

    captured = rote.capture_loops(reads_before_backward)
    compare(captured, reads_before_backward, job)
    assert [*regions_of(captured)] == ["job.model.layers"]


def test_lists_in_arguments() -> None:
    def job() -> Job:
        torch.manual_seed(1)
        return Job(Filling())

    compare(rote.capture_loops(takes_a_list_later), takes_a_list_later, job)


def test_gradients_of_inputs_may_be_differentiated_later() -> None:
    script = {"torch": torch, "F": F, "twice": {"create" + "_graph": True}}
    exec(
        "def step(job, x, y):\n"
        "    x = x.clone().requires_grad_(len(job.log) > 50)\n"
        "    out = job.model(x)\n"
        "    loss = F.cross_entropy(out, y)\n"
        "    if x.requires_grad:\n"
        "        loss = loss + torch.autograd.grad(out.sum(), x, **twice)[0].pow(2).sum()\n"
        "    job.step(loss * 2 if loss.item() > 1 else loss)\n",
        script,
    )
    step: Any = script["step"]
    compare(each_batch(rote.capture(step)), each_batch(step))


def of_ranks(wrap: Callable[[nn.Module], nn.Module], check: Callable[[dict[str, rote.Stats]], None]) -> None:
    """Compares a loop of wrapped models with eager."""

    def job() -> Job:
        torch.manual_seed(1)
        inner = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
        return Job(wrap(nn.Sequential(nn.Linear(8, 16), nn.GELU(), inner, nn.Linear(16, 4))), 60)

    captured = rote.capture_loops(reads_before_backward)
    compare(captured, reads_before_backward, job)
    check(regions_of(captured))


def replayed(regions: dict[str, rote.Stats]) -> None:
    assert regions
    assert all(each.replays > 10 for each in regions.values()), regions


@pytest.mark.ranks(2)
def test_ddp() -> None:
    of_ranks(DistributedDataParallel, replayed)


@pytest.mark.ranks(2)
def test_fsdp() -> None:
    def wrap(model: Any) -> Any:
        fully_shard(model[2])
        return fully_shard(model)

    of_ranks(wrap, replayed)


@pytest.mark.ranks(2)
def test_tensor_parallel() -> None:
    def wrap(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model[2], mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        return model

    of_ranks(wrap, replayed)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_models_of_transformers(checkpoints: bool) -> None:
    """Of a layer that sets a checkpoint around itself, modules inside of it are regions."""
    transformers = pytest.importorskip("transformers", reason="make test-wild installs transformers")

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
        for _ in range(130):
            ids = torch.randint(0, 128, (2, 12))
            loss = model(input_ids=ids, labels=ids).loss
            if loss.item() > 4.0:
                loss = loss * 0.9
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    left: list[Any] = []
    captured = rote.capture_loops(train)
    for each in (captured, train):
        torch.manual_seed(0)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=128, **sizes))
        model.config.use_cache = False
        if checkpoints:
            model.gradient_checkpointing_enable()
        losses: list[float] = []
        each(model.train(), torch.optim.AdamW(model.parameters()), losses)
        left.append((losses, [*model.state_dict().values()]))
    (one, weights), (two, others) = left
    assert one == two
    assert all(torch.equal(*pair) for pair in zip(weights, others, strict=True))
    regions = regions_of(captured)
    inside = [path for path in regions if "self_attn" in path or "mlp" in path]
    assert inside if checkpoints else [*regions] == ["model"], captured.explain()
    assert all(each.replays > 30 for each in regions.values())
