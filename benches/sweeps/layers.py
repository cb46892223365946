"""Over layers: what rote costs per op must not grow with the length of a plan."""

from collections.abc import Iterator

from steps.llama import config, llama
from steps.subject import Subject
from steps.sweep import Sweep


def subjects() -> Iterator[Subject]:
    for layers in (1, 2, 4, 8, 16, 32, 64):
        yield llama(str(layers), config(layers=layers))


SWEEP = Sweep("layers", "Step time over Llama blocks, TP + SP, width 64", "blocks", subjects, quick=(0, 2, 4))
