"""Whatever strides Rote states of outputs are those of PyTorch's fake tensors, with which DTensor's propagator asks.

    ROTE_TEST_EVERYTHING=1 pytest -s tests/torch/test_strides.py

asks about every sample of `validation/src/samples/*.txt` in many ways to lie in memory, otherwise about a seeded part.
The test prints the share of questions that are answered, by family of ops.
"""

import json
import logging
import random
from collections import Counter, defaultdict
from collections.abc import Iterator

import pytest
from extent import EVERYTHING, SEED
from propagation.strided import Call, Shape, Strides, calls, pytorchs
from torch._subclasses import FakeTensorMode

from propagation import engine, samples

# At least this share of the samples' ops has all strides stated, where tensors are contiguous.
LEAST_OPS = 0.9
# Fake tensors of both, since strides depend on the device for some ops.
DEVICES = ("cpu", "cuda")
# Of every sample, this many forms are asked about; each sample is contiguous in one of them.
FORMS = 10**9 if EVERYTHING else 2
ROUNDS = 6 if EVERYTHING else 1

Outputs = list[tuple[Shape, Strides]]


# Arguments that no sample has.
MORE = """
aten::clone                  f32[2,3,4,5] 'channels_last'
aten::clone                  f32[2,3,4,5] 'contiguous_format'
aten::clone                  f32[2,3,4,5,2] 'channels_last_3d'
aten::clone                  f32[2,3,4,5] 'preserve_format'
aten::contiguous             f32[2,3,4,5] 'channels_last'
aten::empty_like             f32[2,3,4,5] none none none none 'channels_last'
aten::empty_like             f32[2,3,4] none none none none 'contiguous_format'
aten::zeros_like             f32[2,3,4,5] none none none none 'contiguous_format'
aten::full_like              f32[2,3,4,5] 1.0 none none none none 'channels_last'
aten::_to_copy               f32[2,3,4,5] bf16 none none none none 'channels_last'
aten::_to_copy               f32[2,3,4,5] bf16 none none none none 'preserve_format'
aten::new_empty_strided      f32[2,3] [4,5] [1,4]
aten::transpose.int          f32[2,3,4,5] 1 -1
aten::permute                f32[2,3,4,5] [0,2,3,1]
aten::unsqueeze_             f32[2,3] 1
aten::expand                 f32[3,1] [1,3,4]
aten::expand                 f32[3,1] [2,1,3,-1]
aten::slice.Tensor           f32[8,6] 0 1 7 3
aten::squeeze.dims           f32[1,3,1,4] [0,-2]
aten::view                   f32[4,6,5] [2,2,6,5]
aten::view                   f32[4,6,5] [4,3,2,1,5]
aten::reshape                f32[4,6,5] [24,5]
aten::reshape                f32[4,6,5] [4,30]
aten::reshape                f32[4,6,5] [-1,1]
aten::mul.Tensor             f32[2,3,4,5] f32[4,5]
aten::mul.Tensor             bf16[2,3,4,5] f32[1,1,4,5]
aten::xlogy.Tensor           f32[2,3,4,5] f32[4,5]
aten::rsub.Tensor            f32[2,3,4,5] f32[3,1,5]
aten::where.self             bool[4,4] f32[2,3,4,4] f32[]
aten::addcmul                bf16[2,3,4] bf16[2,3,4] f32[3,4]
aten::gelu_backward          bf16[2,3,4,5] bf16[2,3,4,5]
aten::add.Tensor             i64[2,3,4] f32[2,3,4]
aten::_scaled_dot_product_flash_attention bf16[2,3,4,8] bf16[2,3,6,8] bf16[2,3,6,16] 0.0 true
aten::_scaled_dot_product_cudnn_attention bf16[2,3,4,8] bf16[2,3,6,8] bf16[2,3,6,16] none true 0.0 true
""".strip().splitlines()


def all_samples() -> Iterator[samples.Sample]:
    yield from samples.read()
    for at, text in enumerate(MORE):
        sample = samples.parse("more", at, text)
        assert sample is not None
        yield sample


def asked() -> Iterator[tuple[Call, dict[str, Outputs]]]:
    """Calls that PyTorch takes, with its answers by device."""
    logging.disable(logging.CRITICAL)
    mode = FakeTensorMode()
    for sample in all_samples():
        chance = random.Random(f"{SEED} {sample.family} {sample.line}")
        forms = list(calls(sample, chance, ROUNDS))
        few = FORMS if sample.family != "more" else 40
        for call in [forms[0], *chance.sample(forms[1:], min(len(forms) - 1, few))]:
            answers = {device: pytorchs(mode, call, device) for device in DEVICES}
            taken = {device: answer for device, answer in answers.items() if answer is not None}
            if taken:
                yield call, taken
    logging.disable(logging.NOTSET)


def test_strides_are_those_of_fake_tensors() -> None:
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    questions = list(asked())
    lines = [json.dumps({"op": call.sample.name, "mesh": "d=1", "args": call.written()}) for call, _ in questions]
    wrong: list[str] = []
    stated: Counter[str] = Counter()
    total: Counter[str] = Counter()
    ops: defaultdict[str, bool] = defaultdict(lambda: True)
    for (call, answers), line, answer in zip(questions, lines, engine.answered(lines), strict=True):
        outputs = [(tuple(o["shape"]), o["strides"]) for o in answer.get("outputs", [])]
        family, all_stated = call.sample.family, "error" not in answer
        for device, pytorch in answers.items():
            # Rote leaves out some outputs of attention; a value of the host counts as one of Rote's. Statistics of
            # batch norm that are not used have no elements on the CPU, as Rote says, but have some on CUDA.
            rest = iter(pytorch)
            for at, (shape, strides) in enumerate(outputs if pytorch else []):
                theirs = next((t for s, t in rest if s == shape or (shape == (0,) and len(s) == 1)), None)
                all_stated &= strides is not None
                if strides is not None and tuple(strides) != theirs:
                    found = f"{list(shape)} {strides}, not {theirs}"
                    wrong.append(f"{line} on {device} ({call.variant}): output {at}: {found}")
        total[family] += 1
        stated[family] += all_stated
        if call.variant == "contiguous" and family != "more":
            ops[call.sample.name] &= all_stated
    for family in sorted(total):
        print(f"{family:20} {stated[family]:6} of {total[family]:6} questions, {stated[family] / total[family]:.1%}")
    unstated = sorted(op for op, is_stated in ops.items() if not is_stated)
    share = 1 - len(unstated) / len(ops)
    print(f"{share:.1%} of {len(ops)} ops; not of {' '.join(unstated)}")
    print(f"{sum(total.values())} questions, {len(wrong)} wrong")
    assert not wrong, "\n".join(wrong[:40])
    assert share >= LEAST_OPS, unstated
