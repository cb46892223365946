"""Over what PyTorch wraps a model in."""

from collections.abc import Iterator

import torch
from steps.llama import data_parallel, fully_sharded
from steps.subject import BLOCKS, EAGER, NO_PASSES, REGIONS, ROTE, Subject
from steps.sweep import Sweep
from torch.distributed.fsdp import MixedPrecisionPolicy


def subjects() -> Iterator[Subject]:
    yield data_parallel("DDP")
    yield data_parallel("DDP, bucket views", gradient_as_bucket_view=True)
    yield data_parallel("DDP, small buckets", bucket_cap_mb=0.1)
    yield fully_sharded("FSDP2")
    yield fully_sharded("FSDP2, mixed precision", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    yield fully_sharded("FSDP2 over 4 ranks of TP", tp=4)


SWEEP = Sweep(
    "wrappers",
    "Step time of wrapped models: 4 Llama blocks, 2 x 32 tokens, DDP on 1 rank, FSDP2 on 8",
    "wrapper",
    subjects,
    quick=(0, 3, 5),
    ways=(EAGER, BLOCKS, REGIONS, NO_PASSES, ROTE),
    ordered=False,
)
