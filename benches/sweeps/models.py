"""Over models: language models with local sections and without, layers, convolutions."""

from collections.abc import Iterator

from steps.llama import full_dtensor, llama
from steps.networks import convolution, mlp
from steps.subject import RANKS, WAYS, Subject
from steps.sweep import Sweep


def subjects() -> Iterator[Subject]:
    yield llama("Llama, TP + SP")
    yield full_dtensor("Llama, all DTensor", RANKS, batch=4)
    yield mlp("MLP of 8 pairs, TP")
    yield convolution("4 convolutions, batch")


SWEEP = Sweep("models", "Step time over models", "model", subjects, quick=(0, 1, 2, 3), ways=WAYS, ordered=False)
