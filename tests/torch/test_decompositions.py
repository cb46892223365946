"""Ops that have no rule of their own, which Rote propagates through decompositions:
every strategy chosen for a composite op must give the right numbers. The op itself
runs on pieces of random tensors, and the pieces of its outputs are put together.
"""

import json
import random
from itertools import product

import pytest
from propagation.judge import is_right
from propagation.pieces import Unmade

from propagation import engine, questions, samples

MOST = 150  # questions per sample and mesh

CALLS = """
aten::matmul f32[4,6] f32[6,8]
aten::matmul f32[2,4,6] f32[6,5]
aten::matmul f32[2,3,4,5] f32[3,5,6]
aten::matmul f32[3,4,5] f32[5]
aten::matmul f32[5] f32[4,5,6]
aten::matmul f32[4,1,6] f32[6,4]
aten::linear f32[8,4,6] f32[10,6] f32[10]
aten::linear f32[7,6] f32[5,6]
aten::linear f32[6] f32[4,6] f32[4]
aten::einsum 'bqd,bkd->bqk' {f32[2,4,6];f32[2,8,6]}
aten::einsum 'ij,jk,kl->il' {f32[4,6];f32[6,5];f32[5,4]}
aten::einsum 'ij->ji' {f32[4,6]}
aten::einsum 'ab,cd' {f32[4,3];f32[2,6]}
aten::einsum '...ij,...jk->...ik' {f32[3,2,4,6];f32[2,6,5]}
aten::einsum 'i...->...' {f32[4,6,5]}
aten::einsum '...a,b...' {f32[4,1,6];f32[3,4,2]}
aten::einsum 'iji->ji' {f32[4,6,4]}
aten::einsum 'ii,ij->j' {f32[4,4];f32[4,6]}
aten::einsum 'ij,jk->ik' {f32[4,1];f32[6,8]}
aten::outer f32[4] f32[7]
aten::inner f32[4,6] f32[3,6]
aten::bilinear f32[4,6] f32[4,5] f32[3,6,5] f32[3]
aten::tensordot f32[4,6,5] f32[6,4] [0,1] [1,0]
aten::tensordot f32[1,4] f32[6,5] [0] [0]
aten::scaled_dot_product_attention f32[2,4,8,6] f32[2,4,8,6] f32[2,4,8,5]
aten::scaled_dot_product_attention f32[2,4,7,6] f32[2,4,5,6] f32[2,4,5,6] none 0.0 false 0.5
aten::scaled_dot_product_attention f32[2,4,8,6] f32[2,4,8,6] f32[2,4,8,6] bool[8,8]
aten::scaled_dot_product_attention f32[2,4,8,6] f32[2,4,8,6] f32[2,4,8,6] f32[2,1,8,8]
aten::scaled_dot_product_attention f32[2,4,8,6] f32[2,4,8,6] f32[2,4,8,6] none 0.0 true
aten::scaled_dot_product_attention f32[2,8,6,4] f32[2,2,6,4] f32[2,2,6,5] none 0.0 false none true
aten::scaled_dot_product_attention f32[2,4,6,4] f32[2,2,6,4] f32[2,2,6,5] f32[2,4,6,6] 0.0 false none true
aten::scaled_dot_product_attention f32[4,6,4] f32[2,4,6,4] f32[2,4,6,5]
aten::layer_norm f32[4,3,6] [6] f32[6] f32[6]
aten::layer_norm f32[4,3,6] [3,6]
aten::rms_norm f32[4,3,6] [6] f32[6]
aten::group_norm f32[4,6,5] 3 f32[6] f32[6]
aten::softmax.int f32[4,6] 1
aten::log_softmax.int f32[4,6,3] 0
aten::glu f32[4,6] 1
aten::glu f32[6,5,2] 0
aten::log_sigmoid f32[4,5]
aten::prelu f32[4,6,3] f32[6]
aten::prelu f32[4,6] f32[1]
aten::cosine_similarity f32[4,6] f32[4,6] 1
aten::cosine_similarity f32[4,6] f32[3,1,6] -1
aten::mse_loss f32[4,6] f32[4,6]
aten::mse_loss f32[4,5] f32[4,5] 2
aten::mse_loss f32[4,5] f32[5] 0
aten::l1_loss f32[8,3] f32[8,3]
aten::smooth_l1_loss f32[8,3] f32[8,3] 1 0.5
aten::huber_loss f32[8,3] f32[8,3] 2
aten::soft_margin_loss f32[8,3] f32[8,3]
aten::kl_div f32[8,3] f32[8,3]:unit 2
aten::kl_div f32[8,3] f32[8,3] 1 true
aten::binary_cross_entropy f32[8,3]:unit f32[8,3]:unit f32[3]
aten::binary_cross_entropy_with_logits f32[8,3] f32[8,3]:unit none f32[3] 2
aten::margin_ranking_loss f32[8] f32[8] f32[8] 0.5
aten::nll_loss f32[8,5] i64[8]<5 none 2
aten::cross_entropy_loss f32[8,5] i64[8]<5 f32[5] 2
aten::cross_entropy_loss f32[7,5] i64[7]<5 none 2
aten::cross_entropy_loss f32[4,5,2,3] i64[4,2,3]<5 none 0
aten::cross_entropy_loss f32[4,5,6] i64[4,6]<5 none 0
aten::cross_entropy_loss f32[4,5,6] i64[4,6]<5 f32[5] 2
aten::cross_entropy_loss f32[4,5,2,3,2] i64[4,2,3,2]<5 none 0
aten::cross_entropy_loss f32[4,5] f32[4,5]:unit none 2
aten::cross_entropy_loss f32[4,5,3] f32[4,5,3]:unit f32[5] 1 -100 0.25
aten::softmax.int f32[4,6] 1 f64
aten::prelu f32[] f32[1]
aten::narrow f32[8,6] 1 2 3
aten::chunk f32[8,6] 4 1
aten::swapaxes f32[4,6,3] 0 2
aten::movedim.int f32[4,6,3] 0 -1
aten::ravel f32[4,6]
aten::mT f32[4,6,3]
aten::numpy_T f32[4,6,3]
aten::multiply.Tensor f32[4,6] f32[6]
aten::true_divide.Tensor f32[4,6] f32[4,1]
"""

SAMPLES = [s for i, text in enumerate(CALLS.splitlines()) if (s := samples.parse("composite", i, text))]


def asked(sample: samples.Sample) -> list[engine.Question]:
    """Placements on meshes of one dim, other partials among them, and of two."""
    draw = random.Random(sample.line)
    found: list[engine.Question] = []
    each = []
    for tensor in sample.tensors:
        kinds = questions.options(tensor)
        each.append([*kinds, *(["P(avg)", "P(max)", "P(min)"] if "P(sum)" in kinds else [])])
    combinations = [tuple((p,) for p in ps) for ps in product(*each)]
    for sizes in ((2,), (4,)):
        # The same on all, as far as each has it, then by chance.
        alike = [tuple((p if p in e else "R",) for e in each) for p in each[0]]
        chance = combinations if len(combinations) <= MOST else draw.sample(combinations, MOST)
        chosen = dict.fromkeys([*alike, *chance])
        found += [(sample, placements, sizes) for placements in chosen]
    return [*found, *questions.drawn(sample, (2, 2), MOST // 2)]


def line(sample: samples.Sample, placements: tuple[tuple[str, ...], ...], sizes: tuple[int, ...]) -> str:
    args = sample.written([",".join(p) for p in placements])
    return json.dumps({"op": sample.name, "mesh": ",".join(map(str, sizes)), "args": args})


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"{s.name}-{s.line}")
def test_what_is_chosen_is_right(sample: samples.Sample) -> None:
    if engine.binary() is None:
        pytest.skip("no rote binary: cargo build --release")
    every = asked(sample)
    judged: dict[tuple[object, ...], str | None] = {}
    kept = 0
    answers = engine.answered([line(*question) for question in every])
    for (_, placements, sizes), answer in zip(every, map(engine.read, answers), strict=True):
        assert answer.error is None, (placements, answer.error)
        key = (tuple(answer.to), tuple(answer.outputs), sizes)
        if key not in judged:
            try:
                judged[key] = is_right(sample, answer.to, answer.outputs, sizes)
            except Unmade:
                continue
        assert judged[key] is None, f"{placements} on {sizes}: taken as {answer.to} -> {answer.outputs}: {judged[key]}"
        kept += answer.cost == 0 and any(p != "R" for ps in placements for p in ps)
    assert kept > 0, "everything but replicated tensors is redistributed"
