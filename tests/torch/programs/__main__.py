"""Checks random programs: `python -m tests.torch.programs --help`."""

import dataclasses
import json
import sys
import warnings
from functools import partial
from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' own modules

from checker import Report, parser, plainest

from programs.generate import Program, generate
from programs.planted import plant, unseen
from programs.shrink import plainer
from programs.twins import Outcome, check, passes


def main() -> int:
    known = parser(__doc__, "programs")
    known.add_argument("--world", type=int, choices=[2, 4], help="ranks on the mesh; by default the seed decides")
    known.add_argument("--passes", help="by default another setting for each seed")
    known.add_argument("--planted", action="store_true", help="plant bugs and count those that are seen")
    options = known.parse_args()
    warnings.simplefilter("ignore")
    worlds = [options.world] if options.world else [2, 4]
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    meshes = {2: whole["tp"], 4: init_device_mesh("cpu", (4,))}
    report = Report()
    counts = report.counts
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
        report.checks(f"seed {seed}")
        outcome = check(program, mesh, chosen)
        counts.update(["programs", f"lines {len(program.lines) // 10 * 10}+"])
        counts["calls"] += outcome.calls
        counts["replays"] += outcome.replays
        if outcome.invalid:
            counts["invalid"] += 1
            print(f"seed {seed}: {outcome.invalid}", file=sys.stderr)
        elif outcome.wrong:
            if not options.whole:
                program, outcome = plainest(program, outcome, plainer, partial(_wrong, mesh=mesh, passes=chosen))
            again = f"python -m tests.torch.programs --seed {seed} --programs 1 --passes {chosen} --world {world}"
            report.failed(f"seed {seed}, passes {chosen}, {outcome.wrong}\n{program.source()}\nrun it again: {again}")
        elif outcome.refusal:
            counts["refused"] += 1
            report.refused(outcome.refusal)
        elif not outcome.replays:
            counts["never replayed"] += 1
    if options.source:
        return 0
    if options.planted:
        report.failures = unseen(counts)
    return report.end(options.json)


def _wrong(program: Program, mesh: DeviceMesh, passes: str) -> Outcome | None:
    outcome = check(program, mesh, passes)
    return outcome if outcome.wrong and not outcome.invalid else None


if __name__ == "__main__":
    sys.exit(main())
