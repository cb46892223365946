"""Calls of every composite op of PyTorch with arguments that are made from its schema alone.

Few of the calls are sensible. Those that run tell whether the op reads the memory of its
tensors below the dispatcher, where PyTorch has no samples of it.
"""

import dataclasses
import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .beyond import reads_memory
from .samples import flat_call, number_of

TRIES = 300
ENOUGH = 4  # calls that run
SECONDS = 60


@dataclasses.dataclass
class Composite:
    name: str
    ran: int = 0  # calls
    reads: int = -1  # the number of the call that reads memory
    died: bool = False


def names() -> list[str]:
    return sorted(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def overload(name: str) -> Any:
    namespace, _, rest = name.partition("::")
    op, _, suffix = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), suffix or "default")


def tensor(draw: random.Random) -> Tensor:
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    shape = draw.choice([(3, 3), (3, 3), (3, 3), (3,), (), (2, 3, 4), (2, 3, 4, 4), (1, 2, 3, 4, 4)])
    kind = draw.randrange(9)
    if kind < 3:
        return torch.tensor(draw.choice([[1, 2], [3, 2, 1], 1, [0], [9], [1, 1], [3, 3], [[0, 1], [2, 0]]]))
    if kind == 3:
        return torch.rand(shape, generator=generator) > 0.5
    return torch.rand(shape, generator=generator, dtype=torch.complex64 if kind == 4 else torch.float32)


#: Values of the types of arguments.
VALUES: dict[str, list[Any]] = {
    "int": [0, 0, 1, 1, 2, 3],
    "List[int]": [[], [0], [1], [3], [0, 1], [1, 1], [1, 2], [2, 2], [3, 3], [1, 1, 1], [0, 1, 2], [2, 3, 4]],
    "float": [0.0, 0.5, 1.0],
    "List[float]": [[], [0.5], [0.5, 0.5]],
    "number": [0, 1, 2, 0.5],
    "bool": [False, True],
    "List[bool]": [[True], [True, False]],
    "str": ["mean", "none", "linear", "trunc", "fro", "ij,jk->ik", "left", "reflect", "ij"],
    "Device": [torch.device("cpu")],
}


def value(kind: str, draw: random.Random, shared: Tensor) -> Any:
    if kind.startswith("Optional["):
        return None if draw.random() < 0.5 else value(kind.removeprefix("Optional[")[:-1], draw, shared)
    if kind == "Tensor":
        return shared if draw.random() < 0.5 else tensor(draw)
    if kind in ("List[Tensor]", "List[Optional[Tensor]]"):
        return [shared if draw.random() < 0.7 else tensor(draw) for _ in range(draw.randrange(1, 4))]
    return draw.choice(VALUES.get(kind, [None]))


def calls(name: str) -> Iterator[tuple[Callable[..., Any], list[Tensor]]]:
    """The same calls each time."""
    op, draw = overload(name), random.Random(number_of(name))
    for _ in range(TRIES):
        shared = tensor(draw)
        args, kwargs = [], {}
        for formal in op._schema.arguments:
            default = formal.has_default_value() and draw.random() < 0.6
            given = formal.default_value if default else value(str(formal.type), draw, shared)
            if formal.kwarg_only:
                kwargs[formal.name] = given
            else:
                args.append(given)
        yield flat_call(op, (args, kwargs))


def try_out(name: str) -> Composite:
    """Calls an op until enough calls have run, or one reads memory."""
    found = Composite(name)
    for number, (call, tensors) in enumerate(calls(name)):
        copies = [t.clone() for t in tensors]
        try:
            call(*tensors)
        except Exception:
            continue
        found.ran += 1
        if reads_memory(call, copies):
            found.reads = number
        if found.reads >= 0 or found.ran == ENOUGH:
            break
    return found


def try_apart(name: str, again: bool = True) -> Composite:
    """The same in a process of its own, since the calls may be of any kind. One that hangs is tried once more: it may
    wait for a lock that another thread of this process held."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            signal.alarm(SECONDS)
            torch.set_num_threads(1)  # the others are not in this process
            os.write(writing, json.dumps(dataclasses.asdict(try_out(name))).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    if again and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
        return try_apart(name, again=False)
    return Composite(**json.loads(text)) if text else Composite(name, died=True)
