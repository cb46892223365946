"""Over size: the same Llama from all overhead to all work. Width 16 is a step as a GPU's is seen from its CPU."""

from collections.abc import Iterator

from steps.llama import config, llama
from steps.subject import Subject
from steps.sweep import Sweep


def subjects() -> Iterator[Subject]:
    yield llama("16 (1 x 8 tokens)", config(width=16, sequence=8), batch=1)
    for width in (32, 64, 128, 256, 512, 1024):
        yield llama(str(width), config(width=width))
    yield llama("1024 (4 x 128)", config(width=1024, sequence=128), batch=4)


SWEEP = Sweep(
    "sizes", "Step time over width: 4 Llama blocks, TP + SP, 2 x 32 tokens", "width", subjects, quick=(0, 2, 6)
)
