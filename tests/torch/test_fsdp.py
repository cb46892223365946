"""Steps of FSDP2 (``fully_shard``) leave what eager leaves, whatever the settings."""

import contextlib
import dataclasses
import itertools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import inputs, training
from oracle import ORACLE_ONLY, Calls, Capture, check_equal, check_right, over
from ranks import CaseSkipped
from test_refusals import check_refused
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

REPLAYS = 20
CALLS = 32  # FSDP2 makes what it keeps in its first iteration, and two recordings must be equal


def groups_of(module: FSDPModule) -> list[FSDPParamGroup]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # until PyTorch 2.12


class Block(nn.Module):
    """Sizes that 2 and 4 ranks do not divide, unless ``hidden`` is another."""

    def __init__(self, width: int, hidden: int, norm: str, dropout: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width) if norm == "batch" else nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(
        self, norm: str = "layer", dropout: float = 0.0, checkpoints: bool = False, width: int = 6, hidden: int = 19
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, hidden, norm, dropout) for _ in range(3))
        self.head = nn.Linear(width, 1)
        self.checkpoints = checkpoints

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpoints else block(x)
        return self.head(x)  # type: ignore[no-any-return]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def sharded(model: Net, mesh: DeviceMesh, **options: Any) -> FSDPModule:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def over_tensor_parallel(model: Net, **options: Any) -> FSDPModule:
    mesh = square("dp", "tp")
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return sharded(model, mesh["dp"], **options)


def held(model: nn.Module) -> dict[str, Any]:
    """What FSDP2 keeps for the next step: gradients that are not reduced yet, and what it has noted of each group."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            for group in groups_of(module):
                for noted in ("_sharded_state", "_training_state", "_post_backward_pending", "reduce_grads"):
                    found[f"{name}.{noted}"] = str(getattr(group, noted, None))  # some since PyTorch 2.12
                for i, parameter in enumerate(group.fsdp_params):
                    found[f"{name}.{i}"] = getattr(
                        parameter.unsharded_param.grad, "_local_tensor", parameter.unsharded_param.grad
                    )
    return found


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


@dataclasses.dataclass
class Setting:
    """How a model is wrapped and trained."""

    wrapper: dict[str, Any] = dataclasses.field(default_factory=dict)
    net: Callable[[], Net] = Net
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    wrap: Callable[..., FSDPModule] = lambda model, **options: sharded(model, line(), **options)
    prepare: Callable[[Any], object] = lambda model: None
    none: bool = True  # gradients are None between steps
    parts: int = 1  # of a batch: gradients are reduced after the last
    sync: Callable[[Any, bool], object] = lambda model, last: model.set_requires_gradient_sync(last)
    clip: bool = False

    def model(self) -> Any:
        torch.manual_seed(0)
        model = self.wrap(self.net(), **self.wrapper)
        self.prepare(model)
        return model

    def script(self, capture: Capture, **options: Any) -> Calls:
        model = self.model()
        optimizer = self.optimizer(model)

        @contextlib.contextmanager
        def within(last: bool) -> Iterator[None]:
            if self.parts > 1:
                self.sync(model, last)
            yield

        step = training(
            *(model, optimizer),
            none=self.none,
            parts=self.parts,
            within=within,
            clip=self.clip,
            forward=lambda x: model(x).float(),  # type: ignore[no-any-return]
        )
        captured = capture(step, state=[model, optimizer], **options)
        dtype = next(model.parameters()).dtype
        for call, x in enumerate(inputs(CALLS, 12, 8)):
            x = (x + dist.get_rank()).to(dtype)
            # Some calls run eagerly.
            yield (step if call in (15, 21, 22) else captured)(x)
        return [model, optimizer, held(model)]


def all_reduce_last(model: Any, last: bool) -> None:
    model.set_requires_all_reduce(last)


def reshard_last(model: Any, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
    model.set_is_last_backward(last)


def prefetching(model: Any) -> None:
    blocks = list(model.blocks)
    for this, following in itertools.pairwise(blocks):
        this.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([this])


def dividing(model: Any) -> None:
    model.set_force_sum_reduction_for_comms(True)
    model.set_gradient_divide_factor(3.0)


def with_event(model: Any, optimizer: Any) -> None:
    model.set_post_optim_event(torch.cpu.Event() if hasattr(torch.cpu, "Event") else torch.Event("cpu"))


def dividing_later(model: Any, optimizer: Any) -> None:
    dividing(model)


def replicated(model: Net, **options: Any) -> FSDPModule:
    """The successor of DistributedDataParallel, which is made of FSDP2's parts."""
    from torch.distributed._composable.replicate_with_fsdp import replicate

    for block in model.blocks:
        replicate(block, mesh=line(), **options)
    return replicate(model, mesh=line(), **options)  # type: ignore[no-any-return]


def with_unused(net: Net) -> Net:
    net.blocks[1].register_parameter("unused", nn.Parameter(torch.ones(3)))
    net.blocks[0].up.weight.requires_grad_(False)
    return net


def tied(net: Net) -> Net:
    """All blocks use one weight, and each uses it twice."""
    for block in net.blocks:
        block.up.weight = block.down.weight = net.blocks[0].up.weight
    return net


def alone(model: Net, **options: Any) -> FSDPModule:
    """Blocks that share weights must be in one group."""
    return fully_shard(model, mesh=line(), **options)


def columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % dist.get_world_size() == 0 else None


def calling(name: str, value: object) -> Callable[[Any], None]:
    """Calls a method of an FSDP2 model, if this PyTorch has it."""

    def prepare(model: Any) -> None:
        if not hasattr(model, name):
            raise CaseSkipped(f"needs {name}, which is newer than this PyTorch")
        getattr(model, name)(value)

    return prepare


HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF_PARAMETERS = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
ALL_HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
HSDP: Any = lambda model, **options: sharded(model, square("replicate", "shard"), **options)  # noqa: E731
SETTINGS = {
    "default": Setting(),
    "kept after forward": Setting({"reshard_after_forward": False}),
    "zeroed": Setting(none=False),
    "accumulation": Setting(parts=3),
    "accumulation, unsharded between": Setting(parts=2, sync=reshard_last),
    "accumulation of sums": Setting(parts=2, sync=lambda model, last: None),
    "mixed precision": Setting({"mp_policy": HALF}),
    "reduced in half": Setting({"mp_policy": ALL_HALF}),
    "mixed precision, accumulation": Setting({"mp_policy": HALF}, parts=3),
    "half": Setting(net=lambda: Net().bfloat16()),
    "tied, mixed precision": Setting({"mp_policy": HALF}, net=lambda: tied(Net(hidden=6)), wrap=alone),
    "tied, mixed precision, accumulation": Setting(
        {"mp_policy": HALF_PARAMETERS}, net=lambda: tied(Net(hidden=6)), wrap=alone, parts=3
    ),
    "buffers": Setting(net=partial(Net, "batch")),
    "dropout": Setting(net=partial(Net, dropout=0.3)),
    "checkpoints": Setting(net=partial(Net, checkpoints=True)),
    "dropout in checkpoints": Setting(net=partial(Net, dropout=0.3, checkpoints=True)),
    "clipped": Setting(clip=True),
    "columns": Setting({"shard_placement_fn": columns}, net=partial(Net, width=8, hidden=16)),
    "prefetch": Setting(prepare=prefetching),
    "async gathers": Setting(prepare=lambda model: model._set_unshard_async_op(True)),
    "unused and frozen": Setting(net=lambda: with_unused(Net())),
    "several buffers": Setting(prepare=calling("set_reduce_scatter_max_input_buffers", 3)),
    "reduced in a group of its own": Setting(prepare=calling("set_separate_reduce_scatter_group", True)),
    "grouped": Setting(
        wrap=lambda model, **options: fully_shard([model.embed, model.head], mesh=line()) and sharded(model, line())
    ),
    "replicated": Setting(wrap=replicated),
    "replicated, accumulation": Setting(wrap=replicated, parts=2),
    "divided otherwise": Setting(prepare=dividing),
    "kept storage": Setting(prepare=calling("set_keep_unsharded_storage", True)),
    "momentum": Setting(optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    "fused": Setting(optimizer=partial(adamw, fused=True)),
    "one by one": Setting(optimizer=partial(adamw, foreach=False)),
}
OF_FOUR = {
    **{
        name: SETTINGS[name]
        for name in ("default", "kept after forward", "accumulation", "mixed precision", "columns", "clipped")
    },
    "to two": Setting({"reshard_after_forward": 2}),
    "hsdp": Setting(wrap=HSDP),
    "hsdp, accumulation": Setting(wrap=HSDP, parts=2),
    "hsdp, all-reduce last": Setting(wrap=HSDP, parts=3, sync=all_reduce_last),
    "hsdp, mixed precision": Setting({"mp_policy": HALF}, wrap=HSDP, clip=True),
    "tensor parallel": Setting(wrap=over_tensor_parallel, net=partial(Net, hidden=20)),
    "tensor parallel, mixed precision": Setting(
        {"mp_policy": HALF}, wrap=over_tensor_parallel, net=partial(Net, hidden=20), parts=2
    ),
}


@pytest.mark.sampled(5)
@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", SETTINGS)
def test_one_rank(name: str) -> None:
    check_equal(SETTINGS[name].script, replays=REPLAYS)


@pytest.mark.sampled(6)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", SETTINGS)
def test_two_ranks(name: str) -> None:
    check_equal(SETTINGS[name].script, replays=REPLAYS)


@pytest.mark.sampled(5)
@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", OF_FOUR)
def test_four_ranks(name: str) -> None:
    check_equal(OF_FOUR[name].script, replays=REPLAYS)


# -- what is guarded --------------------------------------------------------------


def steps(
    capture: Capture,
    setting: Setting,
    between: dict[int, Callable[[Any, Any], object]],
    body: Callable[[Any, Any, Tensor], Tensor] | None = None,
    calls: int = CALLS,
    **options: Any,
) -> Calls:
    """Calls a step, with something done to the model and the optimizer before some calls."""
    model = setting.model()
    optimizer = setting.optimizer(model)

    def step(x: Tensor) -> Tensor:
        if body is not None:
            return body(model, optimizer, x)
        optimizer.zero_grad()
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    captured = capture(step, state=[model, optimizer], **options)
    for call, x in enumerate(inputs(calls, 12, 8)):
        if call in between:
            made = between[call](model, optimizer)
            if isinstance(made, Tensor):
                yield made
        yield captured(x + dist.get_rank())
    return [model, optimizer, held(model)]


def evaluated(model: Any, optimizer: Any) -> Tensor:
    """Leaves the root unsharded."""
    model.eval()
    with torch.no_grad():
        out = model(torch.ones(4, 8))
    model.train()
    return out  # type: ignore[no-any-return]


def forward_alone(model: Any, optimizer: Any) -> Tensor:
    """With grad mode on: FSDP2 notes the order of the modules for a backward that never comes."""
    return model(torch.ones(4, 8)).detach()  # type: ignore[no-any-return]


def gathered_by_hand(model: Any, optimizer: Any) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.unshard()


def saved_and_loaded(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: value.clone() * 0.5 for name, value in model.state_dict().items()})
    optimizer.load_state_dict(optimizer.state_dict())


def frozen(model: Any, optimizer: Any) -> None:
    for parameter in model.blocks[0].parameters():
        parameter.requires_grad_(False)


def first_gradients(model: Any, optimizer: Any) -> None:
    """Of gathered parameters: they come into the next reduction."""
    model.set_requires_gradient_sync(False)
    model(torch.ones(4, 8)).sum().backward()
    model.set_requires_gradient_sync(True)


BETWEEN: dict[str, Callable[[Any, Any], object]] = {
    "an evaluation": evaluated,
    "a forward alone": forward_alone,
    "unshard()": gathered_by_hand,
    "state dicts": saved_and_loaded,
    "frozen parameters": frozen,
    "gradients that are not reduced": first_gradients,
    "no reduction": lambda model, optimizer: model.set_requires_gradient_sync(False),
    "kept after backward": lambda model, optimizer: model.set_reshard_after_backward(False),
    "kept after forward": lambda model, optimizer: model.set_reshard_after_forward(False),
    "another factor": dividing_later,
    "prefetch": lambda model, optimizer: prefetching(model),
    "not the last backward": lambda model, optimizer: model.set_is_last_backward(False),
    "an event": with_event,
    "other hooks": lambda model, optimizer: model.head.register_forward_hook(lambda module, args, out: out * 2),
}


@pytest.mark.sampled(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", BETWEEN)
def test_changes_between_steps(name: str) -> None:
    """What comes between two calls shows in the next one."""
    found = check_right(lambda capture: steps(capture, Setting(), {14: BETWEEN[name]}))
    if not ORACLE_ONLY:
        assert found.stats[14][0].replays >= 9, found.stats[14]


@pytest.mark.ranks(2)
def test_patched_functions() -> None:
    """What FSDP2 calls by name, and a method of its classes."""

    def script(capture: Capture) -> Calls:
        reduce, reshard = _fsdp_param_group.foreach_reduce, FSDPParamGroup.reshard

        def doubled(params: Any, grads: list[Tensor], *args: Any, **options: Any) -> Any:
            return reduce(params, [grad * 2 for grad in grads], *args, **options)

        def before_reshard(group: FSDPParamGroup) -> None:
            for parameter in group.fsdp_params:
                if parameter.unsharded_param.grad is not None:
                    parameter.unsharded_param.grad.mul_(3)
            reshard(group)

        def patch(function: Any, method: Any) -> None:
            _fsdp_param_group.foreach_reduce = function
            FSDPParamGroup.reshard = method  # type: ignore[method-assign]

        between: dict[int, Callable[[Any, Any], object]] = {
            10: lambda model, optimizer: patch(doubled, reshard),
            18: lambda model, optimizer: patch(reduce, before_reshard),
            25: lambda model, optimizer: patch(reduce, reshard),
        }
        try:
            return (yield from steps(capture, Setting(), between))
        finally:
            patch(reduce, reshard)

    check_right(script, replays=15)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["default", "mixed precision"])
def test_micro_steps_in_calls_of_their_own(name: str) -> None:
    """Gradients that are not reduced yet are kept in parameters that are not in the model between steps."""
    if name == "mixed precision" and not isinstance(
        getattr(_fsdp_param.FSDPParam, "unsharded_accumulated_grad", None), property
    ):
        raise CaseSkipped("this PyTorch keeps them elsewhere, where Rote refuses them")

    def script(capture: Capture) -> Calls:
        setting = SETTINGS[name]
        model = setting.model()
        optimizer = adamw(model)

        def step(x: Tensor, last: bool) -> Tensor:
            model.set_requires_gradient_sync(last)
            loss = model(x).float().square().mean()
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        captured = capture(step, state=[model, optimizer])
        for call, x in enumerate(inputs(3 * CALLS, 12, 8)):
            yield (step if call in (45, 50, 51) else captured)(x + dist.get_rank(), call % 3 == 2), held(model)
        return [model, optimizer]

    check_equal(script, replays=3 * REPLAYS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_misses_a_guard(alone: int) -> None:
    """The other rank goes on to replay: the collectives are eager's, in eager's order."""

    def script(capture: Capture) -> Calls:
        setting = SETTINGS["accumulation"]
        model = setting.model()
        optimizer = adamw(model)

        def step(x: Tensor, factor: float) -> Tensor:
            optimizer.zero_grad()
            loss = (model(x) * factor).square().mean()
            loss.backward()
            optimizer.step()
            return loss.detach()

        captured = capture(step, state=[model, optimizer])
        misses = range(10, 26, 2) if dist.get_rank() == alone else ()
        for call, x in enumerate(inputs(CALLS, 12, 8)):
            yield captured(x, 2.0 + call if call in misses else 1.0)
        return [model, optimizer]

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.steps[0].stats
        assert stats.replays >= (REPLAYS - 8 if dist.get_rank() == alone else REPLAYS) and not stats.refusals, stats


@pytest.mark.sampled(2)
@pytest.mark.ranks(2)
@pytest.mark.parametrize("passes", ["none", "all", "+buckets,+sums,+overlap"])
@pytest.mark.parametrize("name", ["default", "accumulation", "mixed precision"])
def test_passes(name: str, passes: str) -> None:
    check_equal(partial(SETTINGS[name].script, passes=passes), replays=REPLAYS)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["default", "accumulation", "kept storage", "mixed precision"])
def test_verified(name: str) -> None:
    found = check_right(partial(SETTINGS[name].script, verify=5, strict=True))
    if not ORACLE_ONLY:
        assert found.steps[0].stats.verified >= 5, found.steps[0].stats


@pytest.mark.ranks(2)
def test_stored_plans() -> None:
    """A second captured step finds the plan of the first one."""
    with tempfile.TemporaryDirectory() as plans:
        check_equal(partial(SETTINGS["default"].script, plans=plans), replays=REPLAYS)
        for options in ({}, {"trust_plans": True}):
            found = check_equal(partial(SETTINGS["default"].script, plans=plans, **options), replays=REPLAYS)
            assert ORACLE_ONLY or found[0].stats.recordings == 0, found[0].stats


@pytest.mark.ranks(2)
def test_model_in_a_closure() -> None:
    """``state=`` names the optimizer alone."""

    def script(capture: Capture) -> Calls:
        model = Setting().model()
        optimizer = adamw(model)

        yield from over(capture, training(model, optimizer), inputs(CALLS, 12, 8), state=optimizer)
        return [model, optimizer]

    check_refused(script, "FSDP2", remedy="name the model in state=")


# -- what is refused ----------------------------------------------------------------


def check_stays_eager(prepare: Callable[[Any], object], *words: str, remedy: str, **wrapper: Any) -> None:
    setting = Setting(wrapper, prepare=prepare)
    check_refused(lambda capture: steps(capture, setting, {}, calls=16), "FSDP2", *words, remedy=remedy)


@pytest.mark.ranks(2)
def test_refuses_offloading() -> None:
    check_stays_eager(
        lambda model: None,
        "CPUOffloadPolicy",
        remedy="offload_policy",
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )


class Gather(DefaultAllGather):
    pass


class Scatter(DefaultReduceScatter):
    pass


@pytest.mark.ranks(2)
def test_refuses_custom_collectives() -> None:
    check_stays_eager(
        lambda model: model.set_custom_all_gather(Gather()), "set_custom_all_gather", remedy="leave it out"
    )
    check_stays_eager(
        lambda model: model.set_custom_reduce_scatter(Scatter()), "set_custom_reduce_scatter", remedy="leave it out"
    )


@pytest.mark.ranks(2)
def test_refuses_hooks_of_reductions() -> None:
    check_stays_eager(
        lambda model: model.set_all_reduce_hook(lambda output: None), "set_all_reduce_hook", remedy="leave"
    )


@pytest.mark.ranks(2)
def test_refuses_finalization_by_hand() -> None:
    def script(capture: Capture) -> Calls:
        def body(model: Any, optimizer: Any, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            model.finalize_backward()
            return loss.detach()

        by_hand = Setting(prepare=calling("set_manual_backward_finalization", True))
        return steps(capture, by_hand, {}, body, calls=16)

    check_refused(script, "set_manual_backward_finalization", remedy="leave it out")


def forward_only(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return model(x)  # type: ignore[no-any-return]


def never_last(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    model.set_is_last_backward(False)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


def forward_resharded(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    """FSDP2 notes the order of the modules, for a backward that never comes."""
    out = forward_only(model, optimizer, x)
    model.reshard()
    return out


def kept_unsharded(model: Any, optimizer: Any, x: Tensor) -> Tensor:
    model.set_reshard_after_backward(False)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("body", "remedy"),
    [
        (forward_only, "reshard"),
        (forward_resharded, "leave forward passes"),
        (never_last, "set_is_last_backward"),
        (kept_unsharded, "set_reshard_after_backward"),
    ],
)
def test_refuses_steps_that_do_not_come_to_rest(body: Callable[[Any, Any, Tensor], Tensor], remedy: str) -> None:
    check_refused(lambda capture: steps(capture, Setting(), {}, body, calls=40), "FSDP2", remedy=remedy)


@pytest.mark.ranks(2)
@pytest.mark.skipif(not hasattr(FSDPModule, "reset_iter_state"), reason="torch has no reset_iter_state")
def test_evaluation_that_resets() -> None:
    def evaluate(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        out = forward_only(model, optimizer, x)
        model.reset_iter_state()
        return out

    check_equal(lambda capture: steps(capture, Setting(), {}, evaluate), replays=REPLAYS)


@pytest.mark.ranks(2)
def test_refuses_partial_reductions_between_steps() -> None:
    def body(model: Any, optimizer: Any, x: Tensor) -> Tensor:
        model.set_requires_all_reduce(False)
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    def script(capture: Capture) -> Calls:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        setting = Setting(wrap=lambda model, **options: sharded(model, mesh, **options))
        return steps(capture, setting, {}, body, calls=40)

    check_refused(script, "reduced in part", remedy="set_requires_all_reduce")


@pytest.mark.ranks(2)
def test_refuses_resized_state() -> None:
    """Memory of a tensor that exists before the step, resized by code of a library."""

    def script(capture: Capture) -> Calls:
        buffer = torch.ones(4)

        def step(x: Tensor) -> Tensor:
            _fsdp_param.free_storage(buffer)
            _fsdp_param.alloc_storage(buffer)
            buffer.copy_(x[0, :4])
            return buffer * 2

        yield from over(capture, step, inputs(8, 12, 8), state=[buffer], tail=False)
        return [buffer]

    check_refused(script, "resize_", remedy="resize storages outside")


@pytest.mark.ranks(2)
def test_refuses_memory_that_is_read_before_it_is_written() -> None:
    def script(capture: Capture) -> Calls:
        scratch = torch.empty(12)
        scratch.untyped_storage().resize_(0)

        def step(x: Tensor) -> Tensor:
            _fsdp_param.alloc_storage(scratch)
            scratch[:6].copy_(x[0, :6])
            out = scratch[:8].abs() * 0
            _fsdp_param.free_storage(scratch)
            return out.nan_to_num()

        yield from over(capture, step, inputs(8, 12, 8), state=[], tail=False)
        return []

    check_refused(script, "not filled", remedy="keep the step eager")


TRAINED = """
import sys, torch, rote
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 4))
for part in (*model, model):
    fully_shard(part)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
def step(x):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()
step = rote.capture(step, state=[model, optimizer], plans=sys.argv[1], trust_plans=True)
for _ in range(8):
    step(torch.ones(4, 8))
sys.stdout.write(f"{step.stats.recordings} recordings\\n")  # in one piece, beside the other rank
dist.barrier()
dist.destroy_process_group()
"""


def test_a_stored_plan_serves_another_process(tmp_path: Path) -> None:
    """Names and hashes that PyTorch draws anew in each process are not guarded."""
    script = tmp_path / "script.py"
    script.write_text(TRAINED)
    for expected in ("1", "0"):
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command = [sys.executable, *launch, str(script), str(tmp_path / "plans")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
        assert done.stdout.count(f"{expected} recordings") == 2, done.stdout + done.stderr
