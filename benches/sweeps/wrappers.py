"""Over what PyTorch wraps a model in."""

from collections.abc import Iterator

from steps.llama import data_parallel
from steps.subject import EAGER, NO_PASSES, ROTE, Subject
from steps.sweep import Sweep


def subjects() -> Iterator[Subject]:
    yield data_parallel("DDP")
    yield data_parallel("DDP, bucket views", gradient_as_bucket_view=True)
    yield data_parallel("DDP, small buckets", bucket_cap_mb=0.1)


SWEEP = Sweep(
    "wrappers",
    "Step time of wrapped models: 4 Llama blocks, 2 x 32 tokens, one rank",
    "wrapper",
    subjects,
    quick=(0,),
    ways=(EAGER, NO_PASSES, ROTE),
    ordered=False,
)
