"""The two engines' answers to the same questions, by class."""

import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from . import dtensor, engine, judge, questions, workers
from .dtensor import Answer, Placements
from .engine import Question
from .pieces import Unmade
from .samples import Sample, Tensor

# Answers that agree: the same placements, or a refusal by both.
SAME = "same"
REFUSED = "both refuse"
# Answers that differ for a reason that docs/propagation.md gives.
EXPLAINED = (
    "a strategy that DTensor lacks",
    "ours costs less",
    "ours costs the same",
    "DTensor has no price",
    "DTensor refuses",
    "partials that hide NaN",
    "in place on a partial",
    "in-place views",
    "DTensor moves what the op writes",
    "DTensor is wrong",
    "empty shards of an extremum",
    "fewer elements than ranks",
)
UNEXPLAINED = "unexplained"
# Of these, those where DTensor had no way to answer as Rote does.
BEYOND = ("a strategy that DTensor lacks", "DTensor has no price", "DTensor refuses", "DTensor is wrong")
# Questions that have no answer to compare with.
NO_RULE = "DTensor has no rule"


@dataclass
class Difference:
    """A question that the engines answer differently."""

    kind: str
    op: str
    line: str
    ours: Answer
    theirs: Answer

    def __str__(self) -> str:
        return f"{self.kind}: {self.line}\n    ours   {shown(self.ours)}\n    theirs {shown(self.theirs)}"


def shown(answer: Answer) -> str:
    if answer.error is not None:
        return answer.error.splitlines()[0][:200] if answer.error else "an error"
    listed = [" ".join(",".join(p) for p in part) for part in (answer.to, answer.outputs)]
    return f"{listed[0]} -> {listed[1]}  {answer.cost:.2f} us  {' '.join(answer.steps)}"


@dataclass
class Tally:
    """What came of some questions."""

    classes: Counter[tuple[int, str]] = field(default_factory=Counter)
    judged: int = 0
    unjudged: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    differences: list[Difference] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.classes.update(other.classes)
        self.judged += other.judged
        self.unjudged.update(other.unjudged)
        self.wrong += other.wrong
        self.differences += other.differences

    def count(self, dims: int | None = None, kind: str | None = None) -> int:
        chosen = (n for (d, k), n in self.classes.items() if dims in (None, d) and kind in (None, k))
        return sum(chosen)

    def identity(self, dims: int | None = None, known: bool = False) -> float:
        """The share of questions with the same answer, of those that DTensor
        has a rule for; if `known`, of those where it also knows what Rote
        chose, and answers."""
        asked = self.count(dims) - self.count(dims, NO_RULE)
        if known:
            asked -= sum(self.count(dims, kind) for kind in BEYOND)
        return (self.count(dims, SAME) + self.count(dims, REFUSED)) / max(1, asked)

    def table(self) -> str:
        """Counts by class and number of mesh dims, as docs/propagation.md has them."""
        dims = sorted({d for d, _ in self.classes})
        rows = [("class", *(f"{d}-D" for d in dims), "all")]
        for kind in (SAME, REFUSED, *EXPLAINED, UNEXPLAINED, NO_RULE):
            if self.count(kind=kind):
                rows.append((kind, *(f"{self.count(d, kind):,}" for d in (*dims, None))))
        rows.append(("all", *(f"{self.count(d):,}" for d in (*dims, None))))
        rows.append(("identity", *(f"{self.identity(d):.1%}" for d in (*dims, None))))
        rows.append(("of what both know", *(f"{self.identity(d, known=True):.1%}" for d in (*dims, None))))
        wide = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [" | ".join(cell.ljust(w) for cell, w in zip(row, wide, strict=True)) for row in rows]
        skipped = ", ".join(f"{n} {why}" for why, n in self.unjudged.most_common())
        return "\n".join([*lines, f"{self.judged:,} strategies judged by arithmetic; not judged: {skipped or 'none'}"])


def agree(ours: Answer, theirs: Answer) -> bool:
    # DTensor does not say where a result lies that is no tensor. The indices of
    # an embedding carry its mask in DTensor's rule.
    outputs = theirs.outputs or ours.outputs
    return ours.error is None and (ours.to, ours.outputs) == (unmasked(theirs), outputs)


def unmasked(answer: Answer) -> list[Placements]:
    return [tuple(p.replace("P(mask)", "R") for p in ps) for ps in answer.to]


def moves_written(question: Question, answer: Answer) -> bool:
    """Whether an input is redistributed that the op writes, as running
    statistics: what is written is lost."""
    sample, placements, _ = question
    written: list[bool] = []
    for formal, given in zip(sample.op._schema.arguments, sample.args, strict=False):
        kept = formal.alias_info is not None and formal.alias_info.is_write
        tensors = given if isinstance(given, list) else [given]
        written += [kept for t in tensors if isinstance(t, Tensor)]
    pairs = zip(written, placements, answer.to, strict=False)
    return any(kept and tuple(before) != tuple(after) for kept, before, after in pairs)


def kind(question: Question, ours: Answer, theirs: Answer, price: float) -> str:
    """The class of a pair of answers; `price` is that of DTensor's choice in
    Rote's cost model."""
    name = question[0].op.overloadpacket.__name__
    if theirs.error is not None and "does not have a sharding strategy registered" in theirs.error:
        return NO_RULE
    if theirs.error is None and not math.isinf(theirs.cost) and moves_written(question, theirs):
        return SAME if agree(ours, theirs) else "DTensor moves what the op writes"
    if ours.error is not None:
        if theirs.error is not None:
            return REFUSED
        # A shard made partial in place: DTensor's own cost for it is infinite.
        if math.isinf(theirs.cost):
            return "in place on a partial"
        return "in-place views" if name == "squeeze_" else UNEXPLAINED
    if theirs.error is not None:
        return "DTensor refuses"
    if agree(ours, theirs):
        return SAME
    if math.isinf(theirs.cost):
        return "DTensor has no price"
    if ours.cost <= price + 1e-6:
        if not agree(ours, dtensor.ask(question[0], ours.to, question[2])):
            return "a strategy that DTensor lacks"
        return "ours costs less" if ours.cost < price - 1e-6 else "ours costs the same"
    if name in {"max", "min", "amax", "amin", "norm", "linalg_vector_norm", "_foreach_norm"}:
        return "empty shards of an extremum"
    if name == "nansum":
        return "partials that hide NaN"
    if name in {"stack", "embedding"}:
        return "fewer elements than ranks"
    return UNEXPLAINED


def is_wrong(question: Question, ours: Answer, theirs: Answer) -> bool:
    """Whether arithmetic refutes DTensor's choice."""
    sample, _, sizes = question
    # In a process of its own: kernels may read out of bounds on pieces that no
    # right strategy makes.
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the others are not in this process
        verdict = 0
        try:
            outputs = theirs.outputs or ours.outputs
            verdict = int(judge.is_right(sample, theirs.to, outputs, sizes) is not None)
        except Unmade:
            pass
        finally:
            os._exit(verdict)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) != 0


def compare(asked: list[Question]) -> Tally:
    """Asks both engines, and judges what Rote chose."""
    dtensor.start()
    tally = Tally()
    both = [(q, ours, dtensor.ask(*q)) for q, ours in zip(asked, engine.ask(asked), strict=True)]
    apart = [at for at, (_, ours, theirs) in enumerate(both) if theirs.error is None and not agree(ours, theirs)]
    prices = engine.prices([asked[at] for at in apart], [unmasked(both[at][2]) for at in apart])
    known = dict(zip(apart, prices, strict=True))
    judged: set[Any] = set()
    for at, (question, ours, theirs) in enumerate(both):
        sample, _, sizes = question
        found = kind(question, ours, theirs, known.get(at, math.inf))
        if found == UNEXPLAINED and theirs.error is None and is_wrong(question, ours, theirs):
            found = "DTensor is wrong"
        tally.classes[len(sizes), found] += 1
        if found != SAME:
            line = engine.written(question)
            tally.differences.append(Difference(found, sample.name, line, ours, theirs))
        key = (sample.family, sample.line, tuple(ours.to), tuple(ours.outputs), sizes)
        if ours.error is not None or key in judged:
            continue
        judged.add(key)
        try:
            trouble = judge.is_right(sample, ours.to, ours.outputs, sizes)
            tally.judged += 1
        except Unmade as reason:
            tally.unjudged[str(reason)] += 1
            continue
        if trouble is not None:
            tally.wrong.append(f"{engine.written(question)}\n    ours   {shown(ours)}\n    {trouble}")
    return tally


def compare_all(samples: Iterable[Sample], most: int, larger: int, meshes: Iterable[tuple[int, ...]] = ()) -> Tally:
    """Compares on two processes: up to `most` questions per sample and mesh of
    one dim, and `larger` questions in all on meshes of several dims."""
    asked = list(chosen(list(samples), most, larger, tuple(meshes)))
    size = max(1, min(200, -(-len(asked) // 2)))
    # Samples lie in turn, so that the parts take the same time.
    parts = [asked[at : at + size] for at in range(0, len(asked), size)]
    tally = Tally()
    for result in workers.each(compare, parts):
        tally.add(result)
    return tally


def chosen(samples: list[Sample], most: int, larger: int, meshes: tuple[tuple[int, ...], ...]) -> Iterator[Question]:
    """The questions."""
    several = [m for m in meshes if len(m) > 1] or list(questions.LARGER_MESHES)
    for sizes in [m for m in meshes if len(m) == 1] or (() if meshes else questions.MESHES):
        for sample in samples:
            yield from questions.every(sample, sizes, most)
    if larger and (not meshes or any(len(m) > 1 for m in meshes)):
        each = -(-larger // max(1, len(samples)))
        for at, sample in enumerate(samples):
            for turn in range(each):
                sizes = several[(at + turn) % len(several)]
                yield from list(questions.drawn(sample, sizes, turn + 1))[turn:]
