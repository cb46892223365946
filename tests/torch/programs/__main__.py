"""Checks random programs: `python -m tests.torch.programs --help`."""

import argparse
import dataclasses
import faulthandler
import json
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from programs.generate import generate
from programs.planted import plant, unseen
from programs.shrink import shrink
from programs.twins import check, passes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--every", type=int, default=1, help="check each so many seeds")
    parser.add_argument("--world", type=int, choices=[2, 4], help="ranks on the mesh; by default the seed decides")
    parser.add_argument("--passes", help="by default another setting for each seed")
    parser.add_argument("--source", action="store_true", help="print the programs, check nothing")
    parser.add_argument("--planted", action="store_true", help="plant bugs and count those that are seen")
    parser.add_argument("--json", action="store_true", help="print what `report` counts as JSON")
    parser.add_argument("--whole", action="store_true", help="do not cut failing programs down")
    options = parser.parse_args()
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worlds = [options.world] if options.world else [2, 4]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {2: whole["tp"], 4: init_device_mesh("cpu", (4,))}
    counts: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    failures = []
    begin = time.monotonic()
    for seed in range(options.seed, options.seed + options.programs, options.every):
        world = worlds[seed % len(worlds)]
        mesh = meshes[world]
        program = generate(seed, mesh)
        if options.source:
            print(json.dumps(dataclasses.asdict(program)) if options.json else program.source())
            continue
        if options.planted:
            plant(program, mesh, counts)
            continue
        chosen = options.passes or passes()[seed // 2 % len(passes())]
        print(f"seed {seed}", file=sys.stderr, flush=True)  # the last one, should the process die
        outcome = check(program, mesh, chosen)
        counts.update(["programs", f"lines {len(program.lines) // 10 * 10}+"])
        counts["calls"] += outcome.calls
        counts["replays"] += outcome.replays
        if outcome.invalid:
            counts["invalid"] += 1
            print(f"seed {seed}: {outcome.invalid}", file=sys.stderr)
        elif outcome.wrong:
            if not options.whole:
                program, outcome = shrink(program, outcome, mesh)
            again = f"python -m tests.torch.programs --seed {seed} --programs 1 --passes {chosen} --world {world}"
            report = f"seed {seed}, passes {chosen}, {outcome.wrong}\n{program.source()}\nrun it again: {again}"
            failures.append(report)
            print(report, file=sys.stderr, flush=True)
        elif outcome.refusal:
            counts["refused"] += 1
            refusals[outcome.refusal.split("\n")[0]] += 1
        elif not outcome.replays:
            counts["never replayed"] += 1
    if options.source:
        return 0
    if options.planted:
        failures = unseen(counts)
    counts["seconds"] = round(time.monotonic() - begin)
    if options.json:
        print(json.dumps({"counts": counts, "refusals": refusals, "failures": failures}))
    else:
        print(dict(counts), *(f"{n}x {text}" for text, n in refusals.most_common(20)), *failures, sep="\n")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
