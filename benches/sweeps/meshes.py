"""Over mesh dims: every activation a DTensor, parameters sharded over the last dim, the batch over the first."""

from collections.abc import Iterator

from steps.llama import full_dtensor
from steps.subject import EAGER, NO_PASSES, ROTE, Subject
from steps.sweep import Sweep


def subjects() -> Iterator[Subject]:
    for shape in ((8,), (2, 4), (4, 2)):
        yield full_dtensor(" x ".join(map(str, shape)), *shape, batch=8)


SWEEP = Sweep(
    "meshes",
    "Step time over meshes of 8 ranks: 4 Llama blocks, all DTensor, 8 x 32 tokens",
    "mesh",
    subjects,
    quick=(0, 1),
    ways=(EAGER, NO_PASSES, ROTE),
    ordered=False,
)
