"""Rote's answers about ops that have a decomposition of PyTorch's and no rule of DTensor's, on the calls that PyTorch's
op tests make.

    python -m tests.torch.propagation.decomposed_calls --op glu

prints the share of the overloads that are answered, what is wrong, and why others are handed on.
"""

import argparse
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import OpSchema

from . import calls, dtensor, torch_calls, workers
from .calls import NAMES, Call
from .engine import Question

# Partials with which policy "best" hands questions on.
HANDED_ON = ("P(avg)", "P(max)", "P(min)")


@dataclass
class Findings:
    """What came of some calls. An overload is answered if all its calls that PyTorch runs are, with all placements but
    those of tensors that may not move."""

    asked: set[str] = field(default_factory=set)
    handed_on: dict[str, Counter[str]] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)  # answered with a shard or a partial among the inputs
    judged: torch_calls.Findings = field(default_factory=torch_calls.Findings)

    def add(self, other: "Findings") -> None:
        self.asked |= other.asked
        self.kept |= other.kept
        for name, reasons in other.handed_on.items():
            self.handed_on.setdefault(name, Counter()).update(reasons)
        self.judged.add(other.judged)

    @property
    def share(self) -> float:
        return 1 - len(self.handed_on) / len(self.asked)

    def summary(self) -> str:
        return (
            f"{len(self.asked) - len(self.handed_on)} of {len(self.asked)} overloads answered ({self.share:.1%}); "
            f"{self.judged.summary()}"
        )


def is_wanted(sample: Call) -> bool:
    """Whether an op takes tensors and has a decomposition of PyTorch's and no rule of DTensor's."""
    op = sample.op
    propagator = DTensor._op_dispatcher.sharding_propagator
    tables = (propagator.op_single_dim_strategy_funcs, propagator.op_strategy_funcs, propagator.op_to_rules)
    decomposes = op in decomposition_table or op._can_decompose()
    return bool(sample.tensors) and decomposes and not any(op in table for table in tables)


@cache
def answers() -> Any:
    """Those of policy "best" in this process."""
    import rote.propagation

    rote.propagation.install("best")
    return rote.propagation._installed.answers


def answered(question: Question) -> dict[str, Any]:
    """The answer to a question, as `rote propagate --json` prints it."""
    import rote.propagation

    sample, placements, sizes = question
    specs = [dtensor.spec(t, p, sizes) for t, p in zip(sample.tensors, placements, strict=True)]
    args, kwargs = sample.filled(specs)
    answer = answers().answer
    before = rote.propagation.stats().handed_on
    found = answer(OpSchema(sample.op, tuple(args), kwargs))
    if found is None:
        after = rote.propagation.stats().handed_on
        reasons = [reason for (op, reason), count in after.items() if count != before.get((op, reason))]
        return {"error": ", ".join(reasons)}
    taken = specs
    if found.redistribute_schema is not None:
        schema = found.redistribute_schema
        taken = [*dtensor.specs_in(schema.args_schema), *dtensor.specs_in(schema.kwargs_schema.values())]
    return {
        "inputs": [{"to": [dtensor.text(p) for p in spec.placements], "steps": []} for spec in taken],
        "outputs": [
            {
                "placements": [dtensor.text(p) for p in spec.placements],
                "dtype": NAMES.get(spec.tensor_meta.dtype, str(spec.tensor_meta.dtype)),
                "shape": list(spec.tensor_meta.shape),
            }
            for spec in dtensor.specs_in([found.output_spec])
        ],
        "cost_us": 0.0,
    }


def of_questions(asked: Sequence[Question]) -> Findings:
    """The findings about some questions. The first about a call is with all tensors replicated."""
    found = Findings()
    said = [answered(question) for question in asked]
    found.judged = torch_calls.judged(asked, said)
    # These count as handed on.
    found.judged.wrong = [line for line in found.judged.wrong if "    refused, though" not in line]
    refused = {id(sample) for (sample, _, _) in asked if torch_calls.ran(sample) is None}
    for (sample, _, _), answer in zip(asked, said, strict=True):
        if id(sample) in refused:
            continue
        found.asked.add(sample.name)
        if "error" in answer and not any(part in answer["error"] for part in torch_calls.KEPT):
            found.handed_on.setdefault(sample.name, Counter())[answer["error"]] += 1
        elif any(to != "R" for told in answer.get("inputs", []) for to in told["to"]):
            found.kept.add(sample.name)
    return found


def of_op(work: tuple[int, tuple[torch.dtype, ...], int, int, int | None]) -> Findings:
    """The findings about the calls of one op test."""
    at, dtypes, samples, most, seed = work
    dtensor.start()
    draw = None if seed is None else random.Random(f"{seed} {at}")
    asked = [
        question
        for sample in calls.of_op(at, dtypes, samples, draw)
        if is_wanted(sample)
        for question in torch_calls.questions(sample, most)
        if not any(partial in p for ps in question[1] for p in ps for partial in HANDED_ON)
    ]
    found = Findings()
    size = 400
    for start in range(0, len(asked), size):
        found.add(of_questions(asked[start : start + size]))
    return found


def of_all(names: Sequence[int], samples: int, most: int, seed: int | None = None) -> Findings:
    """The findings about op tests: up to `samples` samples of each dtype, and up to `most` placements for each call."""
    found = Findings()
    dtypes = (torch.float32,) if seed is not None else (torch.float32, torch.int64, torch.complex64, torch.bfloat16)
    for result in workers.each(of_op, [(at, dtypes, samples, most, seed) for at in names]):
        found.add(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="an op test, as nn.functional.glu; all if nothing is said")
    parser.add_argument("--samples", type=int, default=4, help="samples per op test and dtype")
    parser.add_argument("--most", type=int, default=6, help="placements per call")
    parser.add_argument("--seed", type=int, help="one dtype, and random samples")
    given = parser.parse_args()
    names = [at for at, test in enumerate(calls.ops()) if given.op is None or given.op in test.name]
    found = of_all(names, given.samples, given.most, given.seed)
    for line in found.judged.wrong:
        print(f"WRONG {line}")
    for name, reasons in sorted(found.handed_on.items()):
        print(f"HANDED ON {name}: {reasons}")
    print(f"REPLICATED {' '.join(sorted(found.asked - found.kept - found.handed_on.keys()))}")
    print(found.summary())


if __name__ == "__main__":
    main()
