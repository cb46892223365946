"""What surrounds a call counts: settings of PyTorch, modes, hooks, and the job.

Each test warms a step until it replays, changes what surrounds it, and changes
it back. Every call equals eager.
"""

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import mesh
from oracle import ORACLE_ONLY, Calls, Capture, check_right
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

WARM, CHANGED, BACK = 6, 5, 3


def source() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(7)
    return lambda *shape: torch.randn(*shape, generator=generator)


def check_around(step: Callable[[Tensor], Any], around: Callable[[], Any], *, replays: bool = True) -> Any:
    """Calls a step plainly, within `around`, and plainly again."""

    def script(capture: Capture) -> Calls:
        captured, draw = capture(step), source()
        for i in range(WARM + CHANGED + BACK):
            with around() if WARM <= i < WARM + CHANGED else contextlib.nullcontext():
                yield captured(draw(2, 4, 8))
        return None

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = [of[0] for of in found.stats]
        assert stats[WARM - 1].replays > 0, stats[WARM - 1]
        assert stats[-1].replays > stats[WARM + CHANGED - 1].replays, stats[-1]
        if not replays:
            assert stats[WARM + CHANGED - 1].replays == stats[WARM - 1].replays, stats[-1]
    return found


def gradients(x: Tensor) -> Tensor:
    weight = x.detach().clone().requires_grad_()
    (weight.exp() * weight).sum().backward()
    return weight.grad  # pytest's asserts reach all of pytest, which would be guarded


def test_hooks_on_saved_tensors() -> None:
    def halved() -> Any:
        return torch.autograd.graph.saved_tensors_hooks(lambda t: t * 0.5, lambda t: t)

    check_around(gradients, halved, replays=False)


def test_anomaly_mode() -> None:
    check_around(gradients, torch.autograd.detect_anomaly, replays=False)


def test_anomaly_mode_raises_where_eager_does() -> None:
    def step(x: Tensor) -> Tensor:
        weight = x.detach().clone().requires_grad_()
        (weight.abs() * -1).sqrt().sum().backward()
        return weight.grad

    def script(capture: Capture) -> Calls:
        captured, draw = capture(step), source()
        for i in range(8):
            x = draw(4)
            with torch.autograd.set_detect_anomaly(i >= 5):
                try:
                    yield captured(x)
                except RuntimeError as error:
                    yield str(error).splitlines()[0]
        return None

    check_right(script)


def test_level_of_forward_mode() -> None:
    def script(capture: Capture) -> Calls:
        step, draw = capture(lambda x: x * x), source()
        for i in range(12):
            with forward_ad.dual_level() if i >= 6 else contextlib.nullcontext():
                x = draw(4)
                if i < 6:
                    yield step(x)
                else:
                    found = forward_ad.unpack_dual(step(forward_ad.make_dual(x, x + 1)))
                    yield found.primal, found.tangent
        return None

    check_right(script)


def test_transform_around_a_step() -> None:
    def script(capture: Capture) -> Calls:
        step, draw = capture(lambda x: (x * x).sum()), source()
        for _ in range(6):
            yield step(draw(4))
        for _ in range(3):
            yield torch.func.vmap(step)(draw(3, 4))
            yield torch.func.grad(step)(draw(4))
            yield step(draw(4))
        return None

    check_right(script)


@contextlib.contextmanager
def setting(get: Callable[[], Any], set_: Callable[[Any], Any], value: Any) -> Iterator[None]:
    # Whether or not PyTorch's own samples for tests, which freeze such settings, have been imported.
    unfrozen = torch.backends.__allow_nonbracketed_mutation
    before = get()
    with unfrozen():
        set_(value)
    try:
        yield
    finally:
        with unfrozen():
            set_(before)


def attribute(owner: Any, name: str, value: Any) -> Callable[[], Any]:
    return lambda: setting(lambda: getattr(owner, name), lambda v: setattr(owner, name, v), value)


SETTINGS: dict[str, Callable[[], Any]] = {
    "mha_fastpath": lambda: setting(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
    "num_threads": lambda: setting(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "flush_denormal": lambda: setting(lambda: False, torch.set_flush_denormal, True),
    "mkldnn": attribute(torch.backends.mkldnn, "enabled", False),
    "mkldnn_deterministic": attribute(torch.backends.mkldnn, "deterministic", True),
    "cudnn": attribute(torch.backends.cudnn, "enabled", False),
    "cudnn_benchmark": attribute(torch.backends.cudnn, "benchmark", True),
    "cudnn_deterministic": attribute(torch.backends.cudnn, "deterministic", True),
    "fp32_precision": attribute(torch.backends, "fp32_precision", "tf32"),
    "matmul_precision_of_mkldnn": attribute(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "fp16_reduction": attribute(torch.backends.cuda.matmul, "allow_fp16_reduced_precision_reduction", False),
    "bf16_reduction": attribute(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "math_sdp": lambda: setting(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "nnpack": lambda: setting(lambda: True, torch.backends.nnpack.set_flags, False),
    "sparse_invariants": lambda: torch.sparse.check_sparse_tensor_invariants(True),
    "multithreaded_autograd": lambda: torch.autograd.set_multithreading_enabled(False),
    "default_device": lambda: torch.device("meta"),
    "fill_uninitialized": attribute(torch.utils.deterministic, "fill_uninitialized_memory", False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_setting(name: str) -> None:
    """A step that reads the setting sees it; the plan of the old one is back with it."""
    around = SETTINGS[name]

    def script(capture: Capture) -> Calls:
        step, draw = capture(lambda x: x.square().mean() * 2), source()
        for i in range(WARM + CHANGED + BACK):
            x = draw(4, 8)
            with around() if WARM <= i < WARM + CHANGED else contextlib.nullcontext():
                yield step(x)
        return None

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = [of[0] for of in found.stats]
        assert stats[WARM].replays == stats[WARM - 1].replays, "the change is seen"
        assert stats[WARM + CHANGED - 1].replays > stats[WARM].replays, "the new variant is replayed too"
        assert stats[-1].replays == stats[WARM + CHANGED - 1].replays + BACK, stats[-1]


@pytest.mark.parametrize("train", [False, True])
def test_parametrizations_that_are_cached(train: bool) -> None:
    """Around several calls, `cached` makes the first one compute the weight, and the others use it."""

    def script(capture: Capture) -> Calls:
        torch.manual_seed(0)
        model = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4)).train(train)

        def step(x: Tensor) -> Tensor:
            with torch.no_grad():
                return model(x) + model(-x)

        captured, draw = capture(step, state=model), source()
        for cached in (False, True, False, True, False):
            with torch.nn.utils.parametrize.cached() if cached else contextlib.nullcontext():
                for _ in range(6):
                    yield captured(draw(2, 4))
        return {"model": model}

    check_right(script, replays=10)


def test_arguments_of_distributions_are_checked_again() -> None:
    """An attribute of a library's class that only the library's code reads."""

    def script(capture: Capture) -> Calls:
        step = capture(lambda x: torch.distributions.Normal(x, x).mean * 2)
        for checks in (False, True, False):
            torch.distributions.Distribution.set_default_validate_args(checks)
            for call in range(6):
                try:
                    yield step(torch.ones(2) * (call - 2))
                except ValueError as error:
                    yield type(error)
        return None

    before = torch.distributions.Distribution._validate_args
    try:
        found = check_right(script)
    finally:
        torch.distributions.Distribution.set_default_validate_args(before)
    assert ORACLE_ONLY or found.stats[-1][0].replays >= 8, found.stats[-1][0]


def test_old_and_new_names_of_one_setting_disagree() -> None:
    """Getters of torch raise then; a call of ours does not."""

    def script(capture: Capture) -> Calls:
        step, draw = capture(lambda x: x * 2), source()
        with setting(
            lambda: torch.backends.cuda.matmul.fp32_precision,
            lambda v: setattr(torch.backends.cuda.matmul, "fp32_precision", v),
            "tf32",
        ):
            for _ in range(6):
                yield step(draw(4))
        return None

    check_right(script)


def test_device_that_is_made_the_default() -> None:
    def script(capture: Capture) -> Calls:
        step = capture(lambda x: torch.ones(2).device.type if x is None else (x, torch.ones(2).device.type))
        for device in ("cpu", "meta", "cpu"):
            torch.set_default_device(device)
            try:
                for _ in range(5):
                    yield step(None)
            finally:
                torch.set_default_device(None)
        return None

    check_right(script)


class Scaling(torch.overrides.TorchFunctionMode):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * self.factor if func is torch.Tensor.exp else out


def test_mode_on_functions() -> None:
    factors = iter([2.0, 2.0, 2.0, 3.0, 3.0] * 2)
    check_around(lambda x: x.exp(), lambda: Scaling(next(factors)), replays=False)


def test_reads_of_the_number_of_threads() -> None:
    check_around(lambda x: x * torch.get_num_threads(), SETTINGS["num_threads"])


def test_inference_tensor_that_backward_would_need() -> None:
    def script(capture: Capture) -> Calls:
        weight = nn.Parameter(torch.ones(4))

        def step(x: Tensor) -> Tensor:
            weight.grad = None
            (weight * x).sum().backward()
            return weight.grad.clone()

        captured, draw = capture(step, state=weight), source()
        for i in range(10):
            with torch.inference_mode(i >= 6):
                x = draw(4)
            try:
                yield captured(x)
            except RuntimeError as error:
                yield str(error)
        return weight

    check_right(script)


def test_attention_with_dropout_of_another_kernel() -> None:
    """The composite that is chosen depends on what is enabled."""

    def step(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x[None], x[None], x[None])

    check_around(step, SETTINGS["math_sdp"])


def accumulator(p: Tensor) -> Any:
    return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


@pytest.mark.parametrize("when", ["added", "removed", "replaced"])
def test_hooks_of_the_node_that_accumulates(when: str) -> None:
    """Megatron's way: a hook of the node that adds up a gradient puts it elsewhere."""

    def script(capture: Capture) -> Calls:
        p, main = nn.Parameter(torch.ones(4)), torch.zeros(4)
        node = accumulator(p)

        def by(factor: float) -> Callable[..., None]:
            def hook(*_: Any) -> None:
                with torch.no_grad():
                    main.add_(p.grad * factor)
                    p.grad = None

            return hook

        handles = [] if when == "added" else [node.register_hook(by(1.0))]

        def step(x: Tensor) -> None:
            p.grad = None
            (p * x).sum().backward()

        captured, draw = capture(step, state={"p": p, "main": main}), source()
        for i in range(15):
            if i == 8:
                if handles:
                    handles.pop().remove()
                if when != "removed":
                    handles.append(node.register_hook(by(2.0)))
            captured(draw(4))
            yield main.clone(), p.grad
        return {"p": p, "main": main}

    check_right(script)


# The job: rank, world size, and whether there is one.


def position() -> float:
    """Depends on all that a step can ask of the job."""
    if not dist.is_initialized():
        return 10.0
    return (dist.get_rank() + 1) / dist.get_world_size() + dist.get_process_group_ranks(None)[-1]


def test_group_that_is_made_after_calls_without_one() -> None:
    def script(capture: Capture) -> Calls:
        step, draw = capture(lambda x: x * position()), source()
        for i in range(15):
            if i == 5:
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            if i == 10:
                dist.destroy_process_group()
            yield step(draw(4))
        return None

    try:
        found = check_right(script)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if not ORACLE_ONLY:
        stats = [of[0] for of in found.stats]
        assert stats[9].replays > stats[5].replays > 0 and stats[-1].replays == stats[9].replays + 5, stats[-1]
        assert "default process group" in stats[-1].guard_misses, stats[-1]


def agreed_file() -> str:
    """A new file, known to all ranks, where they can meet."""
    file, path = tempfile.mkstemp(prefix="rote-group-")
    os.close(file)
    found = [path]
    dist.broadcast_object_list(found)
    return found[0]


def join(store: dist.Store, rank: int, world: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)


@pytest.mark.ranks(2, last=True)  # DTensor remembers answers with meshes of the groups that are gone
def test_ranks_that_swap() -> None:
    """Every process keeps its session when the group is made anew with other ranks, or alone."""
    own = int(os.environ["RANK"])

    def script(capture: Capture) -> Calls:
        step, draw = capture(lambda x: x * position()), source()

        def reduce(x: Tensor) -> Tensor:
            out = x * (dist.get_rank() + 1)
            dist.all_reduce(out)
            return out

        for rank in (own, 1 - own, own):
            join(dist.FileStore(agreed_file(), 2), rank, 2)
            for _ in range(5):
                yield step(draw(4)), reduce(draw(2))
        back = agreed_file()
        dist.barrier()
        join(dist.HashStore(), 0, 1)
        for _ in range(5):
            yield step(draw(4))
        join(dist.FileStore(back, 2), own, 2)
        for _ in range(5):
            yield step(draw(4))
        return None

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = [of[0] for of in found.stats]
        for end in (4, 9, 14, 19, 24):
            assert stats[end].replays > stats[end - 4].replays, (end, stats[end])


@pytest.mark.ranks(1)
def test_mesh_that_is_entered() -> None:
    def step(x: Tensor) -> Tensor:
        of_the_mesh = DTensor.from_local(x)
        return of_the_mesh.to_local() * of_the_mesh.device_mesh.ndim

    def script(capture: Capture) -> Calls:
        captured, draw = capture(step), source()
        meshes = [mesh(1), init_device_mesh("cpu", (1, 1))]
        for i in range(24):
            with meshes[i // 4 % 2]:
                yield captured(draw(4))
        return None

    found = check_right(script)
    if not ORACLE_ONLY:
        stats = found.stats[-1][0]
        assert stats.replays and set(stats.guard_misses) == {"current meshes"}, stats
