"""Rote's answers about the calls of PyTorch's op tests, held against what PyTorch makes of them.

    python -m tests.torch.propagation.torch_calls --op softmax

prints what is wrong, and what is refused.
"""

import argparse
import json
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import calls, compare, dtensor, engine, judge, workers
from .calls import Call
from .engine import Question
from .pieces import Unmade
from .samples import Tensor

Alone = tuple[str, ...]
# From which size on a sum of unequal parts loses what it is judged by, in single precision.
LARGE = 1e3
NO_RULE = "no sharding rule is registered"
# What may not move: what an op writes, and what it gives a view of.
KEPT = ("is written in place", "a view of a tensor that would have to be redistributed")


@dataclass
class Findings:
    """What came of some calls."""

    calls: int = 0
    questions: int = 0
    judged: int = 0
    overloads: set[str] = field(default_factory=set)
    no_rule: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[str]] = field(default_factory=dict)
    unjudged: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def add(self, other: "Findings") -> None:
        self.calls += other.calls
        self.questions += other.questions
        self.judged += other.judged
        self.overloads |= other.overloads
        self.no_rule.update(other.no_rule)
        for name, lines in other.refused.items():
            self.refused.setdefault(name, []).extend(lines)
        self.unjudged.update(other.unjudged)
        self.wrong += other.wrong

    def summary(self) -> str:
        skipped = ", ".join(f"{n} {why}" for why, n in self.unjudged.most_common(8))
        refused = sum(map(len, self.refused.values()))
        return (
            f"{self.questions:,} questions about {self.calls:,} calls of {len(self.overloads):,} overloads; "
            f"{self.judged:,} strategies judged, {len(self.wrong)} wrong; {refused} calls of "
            f"{len(self.refused)} overloads refused; {len(self.no_rule)} overloads without a rule; "
            f"not judged: {skipped or 'none'}"
        )


def options(tensor: Tensor) -> list[str]:
    """What one mesh dim may hold of a tensor."""
    shards = [f"S({dim})" for dim in range(len(tensor.shape))]
    if tensor.dtype == torch.bool:
        return ["R", *shards]
    mean = ["P(avg)"] if tensor.dtype.is_floating_point or tensor.dtype.is_complex else []
    extrema = [] if tensor.dtype.is_complex else ["P(max)", "P(min)"]
    return ["R", *shards, "P(sum)", *mean, *extrema]


def placed(sample: Call) -> Iterator[Alone]:
    """Placements on one mesh dim: one kind for all tensors that have it, or for a single tensor."""
    each = [options(t) for t in sample.tensors]
    kinds = dict.fromkeys(kind for own in each for kind in own)
    for kind in kinds:
        yield tuple(kind if kind in own else "R" for own in each)
    for at, own in enumerate(each[:4]):
        for kind in own[1:]:
            yield tuple(kind if i == at else "R" for i in range(len(each)))


def questions(sample: Call, most: int) -> list[Question]:
    """Questions about a call, all tensors replicated first."""
    draw = random.Random(f"{sample.name} {' '.join(sample.words)}")
    one = list(dict.fromkeys(placed(sample)))
    replicated, others = one[:1], one[1:]
    if len(others) > most:
        others = draw.sample(others, most)
    asked: list[Question] = [(sample, tuple((p,) for p in ps), (2,)) for ps in [*replicated, *others]]
    if not sample.tensors:
        return asked or [(sample, (), (2,))]
    for sizes in ((3,), (2, 2)):
        drawn = [draw.choice(one[1:] or one) for _ in sizes]
        mixed = tuple(zip(*drawn, strict=True))
        if draw.random() < 0.5:
            mixed = tuple(tuple(draw.choice(options(t)) for _ in sizes) for t in sample.tensors)
        asked.append((sample, mixed, sizes))
    return asked


def metas(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [f"{calls.NAMES.get(t.dtype, t.dtype)}{list(t.shape)}" for t in tensors]


def ran(sample: Call) -> list[torch.Tensor] | None:
    """What PyTorch returns; None where it refuses the call now."""
    torch.manual_seed(0)
    values = [t.make(torch.Generator()) for t in sample.tensors]
    try:
        returned, _, _ = judge.run(sample, sample.op, values)
    except Exception:
        return None
    return judge.results(sample, (returned, [], {})) if sample.op._schema.returns else []


def differs(sample: Call, answer: dict[str, Any], results: list[torch.Tensor]) -> str | None:
    """How shapes and dtypes of the outputs differ from PyTorch's."""
    if not sample.op._schema.returns:
        return None
    found = [f"{o['dtype']}{o['shape']}" for o in answer["outputs"]]
    expected = metas(results)
    kinds = {str(r.type) for r in sample.op._schema.returns}
    if kinds <= {"bool", "number", "int", "float"}:
        # A value of the host: what counts is that there is one.
        found, expected = [str(len(found))], [str(len(expected))]
    return None if found == expected else f"outputs {found}, in PyTorch {expected}"


def beyond(sample: Call, answer: dict[str, Any], results: list[torch.Tensor]) -> str | None:
    """Why partials cannot be judged: in half precision, sums of unequal parts lose what they are judged by; and
    the parts of an infinity may be infinities that cancel."""
    placements = [t["to"] for t in answer["inputs"]] + [t["placements"] for t in answer["outputs"]]
    if not any(p.startswith("P(") for ps in placements for p in ps):
        return None
    tensors = [*results, *(t.value for t in sample.tensors if isinstance(t, calls.Recorded))]
    if any(t.dtype in (torch.float16, torch.bfloat16) for t in tensors):
        return "partials in half precision"
    numbers = [t for t in tensors if (t.is_floating_point() or t.is_complex()) and t.numel()]
    if not all(t.isfinite().all() for t in numbers):
        return "partials of infinities"
    # Parts are some units large, so that this much of a sum is lost in rounding.
    return "partials of large numbers" if any(t.abs().max() > LARGE for t in numbers) else None


def judged(asked: Sequence[Question], said: Sequence[dict[str, Any]]) -> Findings:
    """The verdicts on Rote's answers to these questions."""
    found = Findings()
    unusable: set[int] = set()
    results: dict[int, list[torch.Tensor] | None] = {}
    seen: set[Any] = set()
    known: set[int] = set()
    for question, answer in zip(asked, said, strict=True):
        sample, _, sizes = question
        found.questions += 1
        line = engine.written(question)
        if id(sample) not in known:
            # The first question about a call, with all tensors replicated.
            known.add(id(sample))
            found.calls += 1
            if NO_RULE in answer.get("error", ""):
                found.no_rule[sample.name] += 1
                unusable.add(id(sample))
                continue
            found.overloads.add(sample.name)
            results[id(sample)] = ran(sample)
            if results[id(sample)] is None:
                found.unjudged["PyTorch refuses the call alone"] += 1
                unusable.add(id(sample))
                continue
            if "error" in answer:
                found.refused.setdefault(sample.name, []).append(f"{line}\n    {answer['error']}")
                unusable.add(id(sample))
                continue
        if id(sample) in unusable:
            continue
        if "error" in answer:
            if not any(part in answer["error"] for part in KEPT):
                found.wrong.append(f"{line}\n    refused, though not with replicated tensors: {answer['error']}")
            continue
        whole = results[id(sample)]
        assert whole is not None
        ours = engine.read(answer)
        key = (id(sample), tuple(ours.to), tuple(ours.outputs), sizes)
        if key in seen:
            continue
        seen.add(key)
        trouble = differs(sample, answer, whole)
        if trouble is None and torch.Tag.nondeterministic_seeded in sample.op.tags:
            found.unjudged["values are random or undefined"] += 1
            continue
        if trouble is None and (why := beyond(sample, answer, whole)):
            found.unjudged[why] += 1
            continue
        if trouble is None:
            try:
                trouble = judge.is_right(sample, ours.to, ours.outputs, sizes)
                found.judged += 1
            except Unmade as reason:
                found.unjudged[str(reason)] += 1
                continue
        if trouble is not None:
            found.wrong.append(f"{line}\n    {compare.shown(ours)}\n    {trouble}")
            if trouble.startswith("outputs ["):
                unusable.add(id(sample))
    return found


def answered(asked: Sequence[Question]) -> list[dict[str, Any]]:
    return engine.answered([engine.written(q) for q in asked])


def apart(work: Callable[[], Findings]) -> Findings | None:
    """Runs in a process of its own, as kernels may crash on pieces that no right strategy makes; None if it died."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # the others are not in this process
        os.close(read)
        code = 1
        try:
            found = work()
            text = json.dumps({**found.__dict__, "overloads": sorted(found.overloads)})
            with os.fdopen(write, "w") as pipe:
                pipe.write(text)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != 0 or not text:
        return None
    told = json.loads(text)
    for name in ("no_rule", "unjudged"):
        told[name] = Counter(told[name])
    return Findings(**{**told, "overloads": set(told["overloads"])})


def of_op(work: tuple[int, tuple[torch.dtype, ...], int, int, int | None]) -> Findings:
    """The findings about the calls of one op test."""
    at, dtypes, samples, most, seed = work
    dtensor.start()
    judge.KNOWN.clear()
    draw = None if seed is None else random.Random(f"{seed} {at}")
    chosen = dtypes
    if draw is not None:
        supported = [d for d in dtypes if d in calls.ops()[at].supported_dtypes("cpu")]
        chosen = tuple(draw.sample(supported, min(1, len(supported))))
    found = Findings()
    # All questions about a call stay together: the first of them says whether it can be asked about.
    each = [questions(sample, most) for sample in calls.of_op(at, chosen, samples, draw)]
    for start in range(0, len(each), 80):
        part = [question for one in each[start : start + 80] for question in one]
        result = apart(lambda part=part: judged(part, answered(part)))
        if result is None:
            result = Findings()
            for question in part:
                one = apart(lambda question=question: judged([question], answered([question])))
                if one is None:
                    result.wrong.append(f"{engine.written(question)}\n    the process died")
                else:
                    result.add(one)
        found.add(result)
    return found


def of_all(names: Sequence[int], samples: int, most: int, seed: int | None = None) -> Findings:
    """The findings about op tests: up to `samples` samples of each dtype, or of one dtype if seeded, and up to
    `most` placements for each call."""
    found = Findings()
    work = [(at, calls.WANTED, samples, most, seed) for at in names]
    for result in workers.each(of_op, work):
        found.add(result)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", help="an op test, as softmax; all if nothing is said")
    parser.add_argument("--samples", type=int, default=10_000, help="samples per op test and dtype")
    parser.add_argument("--most", type=int, default=20, help="placements per call")
    parser.add_argument("--part", help="as 2/10: every tenth op test, from the third on")
    parser.add_argument("--seed", type=int, help="one dtype for each op test, and random samples")
    parser.add_argument("--show", type=int, default=3, help="wrong answers to print per overload")
    given = parser.parse_args()
    names = [at for at, test in enumerate(calls.ops()) if given.op in (None, test.name)]
    if given.part:
        first, step = map(int, given.part.split("/"))
        names = names[first::step]
    found = of_all(names, given.samples, given.most, given.seed)
    shown: Counter[str] = Counter()
    for line in found.wrong:
        name = json.loads(line.splitlines()[0])["op"]
        shown[name] += 1
        if shown[name] <= given.show:
            print(f"WRONG {line}")
    for name, count in shown.most_common():
        print(f"{count:6} wrong {name}")
    for name, lines in sorted(found.refused.items()):
        print(f"REFUSED {len(lines)} {name}: {lines[0]}")
    for name, count in found.no_rule.most_common():
        print(f"NO RULE {count} {name}")
    print(found.summary())


if __name__ == "__main__":
    main()
