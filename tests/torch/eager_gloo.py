"""Whether functional all-gathers of eager PyTorch damage the heap on gloo, without Rote.

    python tests/torch/eager_gloo.py [rounds, 5 by default]

Each round starts two ranks that gather three small tensors at a time, 20,000 in all. In PyTorch 2.15 most rounds end
with `malloc(): unaligned tcache chunk detected`, a segmentation fault or a hang.
"""

import multiprocessing
import sys
import warnings

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as collectives

SECONDS = 60


def gather(rank: int, port: int) -> None:
    warnings.simplefilter("ignore")
    store = dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x = torch.ones(4)
    for _ in range(20000 // 3):
        in_flight = [collectives.all_gather_tensor(x, 0, dist.group.WORLD) for _ in range(3)]
        sum(gathered + 0 for gathered in in_flight)


def main() -> int:
    context = multiprocessing.get_context("spawn")
    failed = 0
    for done in range(rounds := int(sys.argv[1]) if len(sys.argv) > 1 else 5):
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = [context.Process(target=gather, args=(rank, store.port)) for rank in range(2)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(SECONDS)
            rank.kill()
        for rank in ranks:
            rank.join()
        codes = [rank.exitcode for rank in ranks]
        failed += any(codes)
        print(f"round {done + 1} of {rounds}: exit codes {codes}", flush=True)
    print(f"torch {torch.__version__}: {failed} of {rounds} rounds failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
