"""Work in parts on several processes: `ROTE_TEST_PROCESSES` says on how many, 2 by default."""

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


def each(work: Callable[[Part], Result], parts: Sequence[Part]) -> Iterator[Result]:
    """The results of the parts, in their order; in this process if there is one part, or one process."""
    processes = 1 if len(parts) == 1 else int(os.environ.get("ROTE_TEST_PROCESSES", "2"))
    if processes == 1:
        yield from map(work, parts)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        yield from pool.map(work, parts)
