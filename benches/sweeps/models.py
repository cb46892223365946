"""Over models: language models with local sections and without, layers, convolutions."""

from collections.abc import Iterator

from steps.llama import config, full_dtensor, llama
from steps.networks import convolution, mlp
from steps.subject import RANKS, WAYS, Subject
from steps.sweep import Sweep


def subjects() -> Iterator[Subject]:
    yield llama("Llama, TP + SP")
    # As many tokens as above; a batch of 2 DTensor cannot view as sharded over 8 ranks.
    yield full_dtensor("Llama, all DTensor", RANKS, sizes=config(sequence=8), batch=8)
    yield full_dtensor("the same, 4 x 32 tokens", RANKS, batch=4)
    yield mlp("MLP of 8 pairs, TP")
    yield convolution("4 convolutions, batch")


SWEEP = Sweep("models", "Step time over models", "model", subjects, quick=(0, 1, 3, 4), ways=WAYS, ordered=False)
