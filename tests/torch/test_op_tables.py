"""What ops do beyond their schemas and tags is known: such an op is replayed as eager runs it, or refused.

    ROTE_TEST_EVERYTHING=1 pytest tests/torch/test_op_tables.py     over all that PyTorch has samples for

The ops are found by running them, so that a new version of PyTorch cannot add one unseen.
"""

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from extent import EVERYTHING
from oracle import ORACLE_ONLY, rote_capture
from sweep import beyond, composites, samples, twins
from sweep.samples import Case
from torch import Tensor
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree

SLICES = 16

pytestmark = pytest.mark.skipif(ORACLE_ONLY, reason="compares two ways of running")


def cases(finding: beyond.Finding) -> Iterator[Case]:
    """Steps that go wrong where a plan does not know what was found."""
    call, data = finding.call, finding.data

    def between_reads(*tensors: Tensor) -> Any:
        before = [tensor.clone() for tensor in tensors]
        call(*tensors)  # for what it writes alone
        return before, [tensor.clone() for tensor in tensors]

    def repeated(*tensors: Tensor) -> Any:
        return call(*tensors), call(*tensors)

    yield Case(f"{finding.kind} {finding.op}", call, data)
    yield Case(f"{finding.kind} {finding.op} between reads", between_reads, data)
    yield Case(f"{finding.kind} {finding.op} twice", repeated, data)


def check(findings: list[beyond.Finding]) -> None:
    """Each is replayed right, or refused; what reads memory itself is refused."""
    wrong = []
    for finding in findings:
        for case in cases(finding):
            outcome = twins.check(case, "default")
            if outcome.invalid and not case.name.endswith("twice"):  # eager itself fails
                wrong.append(f"{case.name}: {outcome.invalid}")
            elif outcome.wrong:
                wrong.append(f"{case.name}: {outcome.wrong}")
            elif finding.kind == "memory" and outcome.replays:
                wrong.append(f"{case.name} {[t.shape for t in finding.data[0]]}: replayed {outcome.replays} times")
    assert not wrong, "\n".join(wrong)


def of_samples(chosen: list[tuple[str, Any]], most: int) -> list[beyond.Finding]:
    found: dict[tuple[str, str], beyond.Finding] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, entry in chosen:
            for finding in beyond.findings(beyond.calls_of(entry, most)):
                found.setdefault((finding.kind, finding.op or name), finding)
    print({f"{kind} {name}" for kind, name in found})
    return list(found.values())


def test_ops_that_do_more_than_they_say() -> None:
    """The ones that are known are found, and are right."""
    names = ("tensor_split", "native_batch_norm", "nn.functional.instance_norm")
    found = of_samples([(n, e) for n, e in samples.entries() if n in names], 8)
    assert {(f.kind, f.op) for f in found} >= {("memory", ""), ("writes", "aten.native_batch_norm.default")}
    check(found)


@pytest.mark.skipif(not EVERYTHING, reason="takes an hour: make test-all")
@pytest.mark.parametrize("part", range(SLICES))
def test_no_other_op_does_more_than_it_says(part: int) -> None:
    check(of_samples(samples.entries()[part::SLICES], 12))


# -- calls that PyTorch has no samples of ------------------------------------------------


def integers(*values: Any) -> Tensor:
    return torch.tensor(values)


def with_lengths(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[list[Tensor]]]:
    """A call on a padded batch and the lengths in it."""
    batch = torch.randn(5, 3, 3, generator=torch.Generator().manual_seed(0))
    return call, [[batch.clone(), integers(5, 3, 2)], [batch.clone(), integers(5, 4, 1)]]


def packed(call: Callable[..., Any]) -> tuple[Callable[..., Any], list[list[Tensor]]]:
    """A call on packed sequences, in two packings of as many elements."""
    _, data = with_lengths(call)
    return call, [list(torch._VF._pack_padded_sequence(batch, lengths, False)) for batch, lengths in data]


def recurrent(kind: str) -> tuple[Callable[..., Any], list[list[Tensor]]]:
    module: Any = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}.get(kind, torch.nn.RNN)(3, 4)

    def call(data: Tensor, sizes: Tensor, hidden: Tensor, *weights: Tensor) -> Any:
        start = (hidden, hidden) if kind == "lstm" else hidden
        return getattr(torch._VF, kind)(data, sizes, start, list(weights), True, 1, 0.0, False, False)

    rest = [torch.zeros(1, 3, 4), *(weight.detach() for weight in module._flat_weights)]
    return call, [[*tensors, *rest] for tensors in packed(call)[1]]


def of_two(call: Callable[..., Any], x: Tensor, one: Tensor, other: Tensor) -> Any:
    return call, [[x.clone(), one], [x.clone(), other]]


def unsampled() -> dict[str, tuple[Callable[..., Any], list[list[Tensor]]]]:
    x, engine = torch.rand(3, 3), torch.quasirandom.SobolEngine(2)
    likely = torch.randn(6, 2, 4).log_softmax(2)
    targets = integers([1, 2], [2, 3])
    return {
        "_pack_padded_sequence": with_lengths(lambda batch, n: torch._VF._pack_padded_sequence(batch, n, False)),
        "_pad_packed_sequence": packed(lambda data, n: torch._VF._pad_packed_sequence(data, n, False, 0.0, 5)),
        "pack_padded_sequence": with_lengths(lambda batch, n: rnn.pack_padded_sequence(batch, n).data),
        "unpad_sequence": with_lengths(lambda batch, n: rnn.unpad_sequence(batch.clone(), n)),
        "pack_sequence": with_lengths(lambda batch, n: rnn.pack_sequence([batch, batch[:3]]).data * n.sum()),
        "invert_permutation": of_two(lambda x, p: rnn.invert_permutation(p), x, integers(0, 2, 1), integers(1, 2, 0)),
        **{kind: recurrent(kind) for kind in ("gru", "lstm", "rnn_tanh", "rnn_relu")},
        "tensordot": of_two(
            lambda x, dims: torch.tensordot(x, x, dims=dims), x, integers([1], [0]), integers([0], [1])
        ),
        "tensor_split": of_two(lambda x, i: torch.tensor_split(x, i), x, integers(1, 2), integers(1, 3)),
        "_rowwise_prune": of_two(
            lambda x, keep: torch._rowwise_prune(x, keep, torch.int64),
            x,
            integers(True, False, True),
            integers(False, True, True),
        ),
        "split": of_two(torch.split, x, torch.tensor(1), torch.tensor(2)),
        "repeat_interleave": of_two(
            lambda x, n: torch.repeat_interleave(x, n, dim=0, output_size=4), x, integers(1, 1, 2), integers(2, 1, 1)
        ),
        "one_hot": of_two(lambda x, i: torch.nn.functional.one_hot(i), x, integers(0, 2), integers(1, 2)),
        "interpolate": of_two(
            lambda x, n: torch.nn.functional.interpolate(x[None], size=n), x, torch.tensor(4), torch.tensor(5)
        ),
        "ctc_loss": (
            lambda likely, a, b: torch.nn.functional.ctc_loss(likely, targets.clone(), a, b),
            [[likely.clone(), integers(6, 5), integers(2, 1)], [likely.clone(), integers(4, 6), integers(1, 2)]],
        ),
        "_sobol_engine_draw": (
            lambda quasi, state: torch._sobol_engine_draw(quasi, 3, state, 2, 0, torch.float32),
            [[engine.quasi.clone(), engine.sobolstate], [engine.quasi.clone() + 5, engine.sobolstate]],
        ),
        "_sobol_engine_ff_": (
            lambda quasi, state: torch._sobol_engine_ff_(quasi, 3, state, 2, 0),
            [[engine.quasi.clone(), engine.sobolstate], [engine.quasi.clone() + 5, engine.sobolstate]],
        ),
        "batch_norm_update_stats": (
            lambda x, mean, var: torch.batch_norm_update_stats(x, mean, var, 0.5),
            [[torch.randn(4, 3), torch.zeros(3), torch.ones(3)], [torch.randn(4, 3), torch.ones(3), torch.ones(3)]],
        ),
    }


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", unsampled())
def test_calls_without_samples(name: str) -> None:
    call, data = unsampled()[name]
    kinds = {f.kind for f in beyond.findings(iter([(call, data)]))}
    check([beyond.Finding("memory" if "memory" in kinds else "call", name, call, data)])


def test_what_reads_memory_is_found() -> None:
    """Tensors without data tell it, or the list of these ops would be all that the tests know."""
    found = [name for name, (call, data) in unsampled().items() if beyond.reads_memory(call, data[0])]
    assert {"gru", "lstm", "rnn_tanh", "rnn_relu", "_pad_packed_sequence", "tensor_split"} <= set(found), found


# -- composites, by their schemas ----------------------------------------------------------

#: Some that read memory themselves.
READERS = ("aten::_reshape_from_tensor", "aten::_saturate_weight_to_fp16", "aten::_validate_sparse_coo_tensor_args")


def test_composites_that_read_memory_are_refused() -> None:
    names = (
        composites.names()
        if EVERYTHING
        else [
            *READERS,
            "aten::choose_qparams_optimized",
            "aten::_shape_as_tensor",
            "aten::fbgemm_linear_quantize_weight",
            "aten::reshape",
            "aten::einsum",
            "aten::cdist",
        ]
    )
    beyond.reads_memory(torch.sum, [torch.ones(3)])  # what it loads, processes share
    tried = [composites.try_apart(name) for name in names if torch._C._dispatch_has_kernel(name)]
    found = [each.name for each in tried if each.reads >= 0]
    print({"read": found, "died": [each.name for each in tried if each.died]})
    assert sum(each.ran > 0 for each in tried) > 0.6 * len(tried)
    assert set(READERS) <= set(found)
    assert not set(found) & {"aten::reshape", "aten::einsum", "aten::cdist"}
    replayed = []
    for each in tried:
        if each.reads < 0:
            continue
        call, tensors = next(itertools.islice(composites.calls(each.name), each.reads, None))
        step = rote_capture(lambda *tensors, call=call: pytree.tree_leaves(call(*tensors)))
        for _ in range(4):
            with contextlib.suppress(Exception):  # eager's own, of arguments that were written
                step(*[tensor.clone() for tensor in tensors])
        if step.stats.replays or not step.stats.refusals:
            replayed.append((each.name, [(t.dtype, t.shape) for t in tensors], step.stats))
    assert not replayed, "\n".join(map(str, replayed))
