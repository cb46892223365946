"""A toy eager framework on NumPy, and its training step replayed by Rote through `ctypes`.

    python examples/numpy_framework.py [librote.so]

`docs/frameworks.md` walks through it. The first half is the framework: arrays, ops by their ATen names, a tape. The
second half is what its author adds for Rote: C structs, kernels behind function pointers, and `capture`.
"""

from __future__ import annotations

import ctypes as c
import importlib.util
import itertools
import json
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# ---- the framework ----

numbers = itertools.count(1)
listener: Callable[..., None] | None = None  # told of each op while a step is recorded
storages: weakref.WeakValueDictionary[int, Array] = weakref.WeakValueDictionary()  # arrays that are alive


def relu_backward(gradient: np.ndarray, x: np.ndarray, threshold: float, out: np.ndarray | None = None) -> np.ndarray:
    return np.multiply(gradient, x > threshold, out=out)


def add_in_place(x: np.ndarray, other: np.ndarray, alpha: float) -> None:
    x += other * x.dtype.type(alpha)


KERNELS: dict[str, Callable[..., Any]] = {
    "aten::mm": lambda a, b, out=None: np.matmul(a, b, out=out),
    "aten::relu": lambda x, out=None: np.maximum(x, 0, out=out),
    "aten::threshold_backward": relu_backward,
    "aten::sub.Tensor": lambda a, b, alpha, out=None: np.subtract(a, b, out=out),
    "aten::mul.Tensor": lambda a, b, out=None: np.multiply(a, b, out=out),
    "aten::sum": lambda x, dtype, out=None: np.sum(x, out=out, keepdims=False),
    "aten::add_.Tensor": add_in_place,
    "aten::t": lambda x: x.T,
}
VIEWS, IN_PLACE = {"aten::t"}, {"aten::add_.Tensor"}


class Array:
    """An array, the number of its memory, and how its gradient is computed."""

    def __init__(self, data: np.ndarray, base: Array | None = None, trained: bool = False) -> None:
        self.data, self.trained = data, trained
        self.storage = base.storage if base else next(numbers)
        self.bytes = base.bytes if base else data.nbytes
        self.base = base
        self.tape: list[tuple[Array, Callable[[Array], Array]]] = []
        self.grad: Array | None = None
        if not base:
            storages[self.storage] = self


def run(name: str, *args: Any) -> Array:
    """An op: its kernel on the data of arrays, told to who listens."""
    data = KERNELS[name](*(arg.data if isinstance(arg, Array) else arg for arg in args))
    if name in IN_PLACE:
        result = args[0]
    else:
        result = Array(np.asarray(data), args[0] if name in VIEWS else None)
    if listener:
        listener(name, args, result)
    return result


def follow(out: Array, *ways: tuple[Array, Callable[[Array], Array]]) -> Array:
    """Notes how the gradients of those follow that are trained, or made of what is."""
    out.tape = [(source, way) for source, way in ways if source.trained]
    out.trained = bool(out.tape)
    return out


def mm(a: Array, b: Array) -> Array:
    to_a = (a, lambda g: run("aten::mm", g, run("aten::t", b)))
    return follow(run("aten::mm", a, b), to_a, (b, lambda g: run("aten::mm", run("aten::t", a), g)))


def relu(x: Array) -> Array:
    return follow(out := run("aten::relu", x), (x, lambda g: run("aten::threshold_backward", g, out, 0.0)))


def squared_error(x: Array, y: Array) -> Array:
    difference = run("aten::sub.Tensor", x, y, 1)
    out = run("aten::sum", run("aten::mul.Tensor", difference, difference), None)
    return follow(out, (x, lambda g: run("aten::mul.Tensor", difference, g)))


def backward(out: Array, gradient: Array) -> None:
    """Leaves the gradients of what is trained, each of which a step uses once, and uses the tape up."""
    tape, out.tape = out.tape, []
    for source, way in tape:
        backward(source, way(gradient))
    if not tape:
        out.grad = gradient


class Mlp:
    def __init__(self, seed: int) -> None:
        draw = np.random.default_rng(seed)
        shapes = [(16, 32), (32, 4)]
        self.weights = [Array(draw.standard_normal(shape, np.float32) / 10, trained=True) for shape in shapes]
        self.two, self.lr = Array(np.full((), 2.0, np.float32)), 0.01

    def step(self, x: Array, y: Array) -> Array:
        """A training step. Returns the loss."""
        loss = squared_error(mm(relu(mm(x, self.weights[0])), self.weights[1]), y)
        backward(loss, self.two)
        for weight in self.weights:
            run("aten::add_.Tensor", weight, weight.grad, -self.lr)
            weight.grad = None
        return loss


# ---- what its author adds for Rote ----


def struct(fields: str, **types: Any) -> type[c.Structure]:
    """A C struct from its fields: a name and a letter each (`q` int64, `Q` uint64, `p` pointer, ...)."""
    letters = {"q": c.c_int64, "Q": c.c_uint64, "I": c.c_uint32, "i": c.c_int32, "B": c.c_uint8, "b": c.c_int8}
    letters |= {"H": c.c_uint16, "p": c.c_void_p, "s": c.c_char_p, "d": c.c_double}
    listed = [field.split(":") for field in fields.split()]
    typed = [(name, types.get(kind) or letters[kind]) for name, kind in listed]
    return type("Struct", (c.Structure,), {"_fields_": typed})


Dl = struct("data:p device_type:i device_id:i ndim:i code:B bits:B lanes:H shape:p strides:p byte_offset:Q")
Managed = struct("tensor:Dl context:p deleter:p", Dl=Dl)
Tensor = struct(
    "storage:Q sizes:p strides:p offset:q storage_bytes:Q ndim:I dtype:B device_kind:B device_index:b flags:B"
)
MEMBERS = [("i", c.c_int64), ("f", c.c_double), ("p", c.c_void_p), ("c", c.c_double * 2)]
Payload = type("Payload", (c.Union,), {"_fields_": MEMBERS})
Arg = struct("tag:B written:B len:I payload:Payload", Payload=Payload)
Op = struct("name:s overload:s args:p outs:p nargs:I nouts:I flags:I")
Leaf = struct("name:s spec:s tensor:p storage:Q start:q bytes:Q word:Q state:I")
Call = struct("leaves:p n_leaves:I words:p n_words:I numbers:p n_numbers:I")
Results = struct("variant:I n:I tensors:p")
NONE, TENSOR, INT, FLOAT, INPUT = 0, 1, 4, 5, 16
REPLAYED, RECORD = 0, 1
READ, NEGATION = 0, 2

Int, P = c.c_int, c.c_void_p
FUNCTIONS = {
    "has_op": (Int, P, c.c_char_p, c.c_char_p, Int),
    "bind_op": (Int, P, c.c_char_p, c.c_char_p, c.POINTER(Arg), c.c_uint32, c.c_uint32, Int, c.POINTER(c.c_uint64)),
    "run_op": (Int, P, c.c_uint64, c.POINTER(P), c.POINTER(P), c.POINTER(P)),
    "set_number": (Int, P, c.c_uint64, c.c_uint32, c.c_int64, c.c_double),
    "forget_op": (None, P, c.c_uint64),
    "allocate": (Int, P, c.c_uint64, c.c_uint32, c.c_int32, c.POINTER(P)),
    "release": (None, P, P),
    "is_alive": (Int, P, c.c_uint64),
}
UNUSED = [
    "generator",
    "keep_generator",
    "bind_collective",
    "forget_collective",
    "start",
    "wait",
    "gather",
    "ranks",
    "error",
]
TYPES = {name: c.CFUNCTYPE(*kinds) for name, kinds in FUNCTIONS.items()}
ENTRIES = [*(f"{name}:{name}" for name in FUNCTIONS), *(f"{name}:p" for name in UNUSED)]
Table = struct("size:I alignment:I context:p " + " ".join(ENTRIES), **TYPES)
Deleter = c.CFUNCTYPE(None, P)


def dl(data: np.ndarray) -> Any:
    """An array as DLPack's struct, which lives as long as the array."""
    shape = (c.c_int64 * (2 * data.ndim))(*data.shape, *(stride // data.itemsize for stride in data.strides))
    start = c.addressof(shape)
    tensor = Dl(data.ctypes.data, 1, 0, data.ndim, 2, 32, 1, start, start + 8 * data.ndim, 0)
    tensor.kept = shape
    return tensor


class Slot:
    """The array of a slot of Rote's, made anew where the slot's memory is another one."""

    def __init__(self, address: int) -> None:
        self.tensor, self.data = Dl.from_address(address), 0
        ndim = self.tensor.ndim
        dims = (c.c_int64 * (2 * ndim)).from_address(self.tensor.shape)
        self.shape, self.strides = tuple(dims[:ndim]), tuple(4 * stride for stride in dims[ndim:])
        self.reach = 4 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    def array(self) -> np.ndarray:
        if self.tensor.data != self.data:
            self.data = self.tensor.data
            memory = (c.c_char * self.reach).from_address(self.data)
            self.made = np.ndarray(self.shape, np.float32, memory, strides=self.strides)
        return self.made


class BoundOp:
    """A kernel and its arguments: numbers, and the places of tensors among those of a run."""

    def __init__(self, kernel: Callable[..., Any], args: list[Any]) -> None:
        self.kernel, self.args = kernel, args
        self.places = [(at, arg.stop) for at, arg in enumerate(args) if isinstance(arg, slice)]
        self.slots: list[tuple[int, Slot]] = []
        self.out: Slot | None = None


def op_name(name: bytes, overload: bytes) -> str:
    """The key of an op in `KERNELS`."""
    return f"{name.decode()}.{overload.decode()}".rstrip(".")


class Kernels:
    """The functions that Rote calls."""

    def __init__(self) -> None:
        self.ops: dict[int, BoundOp] = {}
        self.given: dict[int, Any] = {}  # what Rote holds
        self.delete = Deleter(lambda managed: self.given.pop(managed, None) and None)
        self.kept = {name: kind(getattr(self, name)) for name, kind in TYPES.items()}
        self.table = Table(size=c.sizeof(Table), **self.kept)

    def has_op(self, _: Any, name: bytes, overload: bytes, into: int) -> int:
        return int(op_name(name, overload) in KERNELS)

    def bind_op(self, _: Any, name: bytes, overload: bytes, args: Any, n: int, outs: int, into: int, op: Any) -> int:
        full = op_name(name, overload)
        if full not in KERNELS:
            return 2

        def value(arg: Any) -> Any:
            if arg.tag == INPUT:
                return slice(arg.payload.i)
            return {INT: arg.payload.i, FLOAT: arg.payload.f}.get(arg.tag)

        op[0] = next(numbers)
        self.ops[op[0]] = BoundOp(KERNELS[full], [value(args[i]) for i in range(n)])
        return 0

    def run_op(self, _: Any, number: int, tensors: Any, into: Any, made: Any) -> int:
        op = self.ops[number]
        if not op.slots:  # an op is given the same slots in every run
            op.slots = [(at, Slot(tensors[place])) for at, place in op.places]
            op.out = Slot(into[0]) if into else None
        for at, slot in op.slots:
            op.args[at] = slot.array()
        if op.out:
            op.kernel(*op.args, out=op.out.array())
        elif (result := op.kernel(*op.args)) is not None:
            data = np.asarray(result)
            managed = Managed(looks := dl(data), None, c.cast(self.delete, P))
            self.given[c.addressof(managed)] = managed, looks, data
            made[0] = c.addressof(managed)
        return 0

    def set_number(self, _: Any, number: int, arg: int, element: int, value: float) -> int:
        self.ops[number].args[arg] = value
        return 0

    def forget_op(self, _: Any, number: int) -> None:
        del self.ops[number]

    def allocate(self, _: Any, size: int, kind: int, index: int, memory: Any) -> int:
        data = np.empty(size + 64, np.uint8)
        memory[0] = data.ctypes.data + 63 & ~63
        self.given[memory[0]] = data
        return 0

    def release(self, _: Any, memory: int) -> None:
        del self.given[memory]

    def is_alive(self, _: Any, storage: int) -> int:
        return storage in storages


def library(path: str | None) -> c.CDLL:
    """librote.so, by default that of the installed package."""
    if path is None:
        found = importlib.util.find_spec("rote")
        if found is None or found.origin is None:
            sys.exit("the package rote is not installed: name librote.so as first argument")
        path = str(Path(found.origin).with_name("librote.so"))
    loaded = c.CDLL(path)
    for name in ["rote_session_for", "rote_session_stats", "rote_record_finish", "rote_last_error"]:
        getattr(loaded, name).restype = c.c_void_p if name == "rote_session_for" else c.c_char_p
    return loaded


class Captured:
    """A model's step that is recorded in its first calls, and replayed from then on."""

    def __init__(self, rote: c.CDLL, model: Mlp, plans: str) -> None:
        self.rote, self.model, self.kernels, self.kept = rote, model, Kernels(), []
        new = rote.rote_session_for(c.byref(self.kernels.table), b"Mlp.step", b"numpy", 1, 0, plans.encode(), 4, b"")
        if not new:
            sys.exit(rote.rote_last_error().decode())
        self.session = P(new)
        self.check(rote.rote_session_fact(self.session, 3, b"lr", 1))
        self.state = [self.leaf(f"weights[{i}]", weight, 1) for i, weight in enumerate(model.weights)]
        self.state.append(self.leaf("two", model.two, 1))

    def check(self, status: int) -> int:
        if status < 0:
            raise RuntimeError(self.rote.rote_last_error().decode())
        return status

    def leaf(self, name: str, array: Array, state: int = 0) -> Any:
        tensor = dl(array.data)
        leaf = Leaf(name.encode(), None, c.addressof(tensor), array.storage, 0, array.data.nbytes, 0, state)
        leaf.kept = tensor
        return leaf

    def __call__(self, x: Array, y: Array) -> float:
        given = [*self.state, self.leaf("x", x), self.leaf("y", y)]
        leaves = (Leaf * len(given))(*given)
        number, results = (c.c_double * 1)(self.model.lr), Results()
        call = Call(c.addressof(leaves), len(given), None, 0, c.addressof(number), 1)
        status = self.check(self.rote.rote_session_step(self.session, c.byref(call), c.byref(results)))
        if status == REPLAYED:
            managed = P.from_address(results.tensors).value
            loss = float(Slot(managed).array())
            Deleter(Managed.from_address(managed).deleter)(managed)
            return loss
        return float((self.record(x, y) if status == RECORD else self.model.step(x, y)).data)

    def record(self, x: Array, y: Array) -> Array:
        global listener
        self.check(self.rote.rote_record_call(self.session))
        lr, negative = c.c_uint32(), c.c_uint32()  # all that the step does with it: the plan may follow it
        self.follow(READ, 0, self.model.lr, b"lr", lr)
        self.follow(NEGATION, lr.value, -self.model.lr, None, negative)
        self.check(self.rote.rote_record_ready(self.session))
        listener = self.ran
        loss = self.model.step(x, y)
        listener = None
        self.check(self.rote.rote_record_returned(self.session, b"loss", c.byref(self.described(loss)), 2**32 - 1))
        outcome = self.rote.rote_record_finish(self.session, json.dumps({"t": 0}).encode())
        print("recorded:", json.loads(outcome or b'{"outcome": "failed"}')["outcome"])
        self.kept.clear()
        return loss

    def follow(self, kind: int, of: int, value: float, name: bytes | None, number: Any) -> None:
        self.check(self.rote.rote_record_float(self.session, kind, of, 0, c.c_double(value), name, c.byref(number)))

    def described(self, array: Array) -> Any:
        data = array.data
        tensor, looks = Tensor(storage=array.storage, storage_bytes=array.bytes), dl(data)
        tensor.sizes, tensor.strides, tensor.ndim = looks.shape, looks.strides, data.ndim
        tensor.dtype, tensor.device_index = 6, -1
        self.kept += [looks, tensor]
        return tensor

    def ran(self, name: str, args: tuple[Any, ...], result: Array) -> None:
        def arg(value: Any, written: bool = False) -> Any:
            if isinstance(value, Array):
                return Arg(TENSOR, written, 1, Payload(p=c.addressof(self.described(value))))
            if value is None:
                return Arg(NONE, 0, 0, Payload())
            is_float = isinstance(value, float)
            return Arg(FLOAT if is_float else INT, 0, 0, Payload(f=value) if is_float else Payload(i=value))

        given = (Arg * len(args))(*(arg(value, i == 0 and name in IN_PLACE) for i, value in enumerate(args)))
        out = arg(result)
        op, _, overload = name.partition(".")
        event = Op(op.encode(), overload.encode(), c.addressof(given), c.addressof(out), len(args), 1, 0)
        self.check(self.rote.rote_record_ran(self.session, c.byref(event), b""))

    def stats(self) -> Any:
        return json.loads(self.rote.rote_session_stats(self.session))

    def close(self) -> None:
        self.check(self.rote.rote_session_free(self.session))


def kernels_alone(model: Mlp, x: np.ndarray, y: np.ndarray) -> None:
    """What NumPy does in a step, with no framework around it."""
    first, second = (weight.data for weight in model.weights)
    hidden = np.maximum(product := np.matmul(x, first), 0)
    difference = np.subtract(np.matmul(hidden, second), y)
    np.sum(np.multiply(difference, difference))
    gradient = np.multiply(difference, model.two.data)
    to_second, to_hidden = np.matmul(hidden.T, gradient), np.matmul(gradient, second.T)
    to_first = np.matmul(x.T, np.multiply(to_hidden, product > 0))
    for weight, found in ((first, to_first), (second, to_second)):
        add_in_place(weight.copy(), found, -model.lr)


def main() -> None:
    rote = library(sys.argv[1] if len(sys.argv) > 1 else None)
    eager, model = Mlp(0), Mlp(0)
    micros: dict[str, list[float]] = {"kernels alone": [], "eager": [], "replayed": []}
    with tempfile.TemporaryDirectory() as plans:
        captured = Captured(rote, model, plans)
        draw = np.random.default_rng(1)
        for step in range(400):
            rows = 8 if step % 100 != 50 else 4  # another batch size now and then: no plan fits at first
            x, y = (Array(draw.standard_normal((rows, columns), np.float32)) for columns in (16, 4))
            eager.lr = model.lr = 0.01 if step < 200 else 0.005
            times = [time.perf_counter()]
            kernels_alone(eager, x.data, y.data)
            times.append(time.perf_counter())
            expected = float(eager.step(x, y).data)
            times.append(time.perf_counter())
            found = captured(x, y)
            times.append(time.perf_counter())
            weights = zip(eager.weights, model.weights, strict=True)
            if expected != found or any(a.data.tobytes() != b.data.tobytes() for a, b in weights):
                sys.exit(f"step {step}: the captured step differs from eager: {found} and {expected}")
            for name, began, ended in zip(micros, times, times[1:], strict=False):
                micros[name].append(1e6 * (ended - began))
        stats = captured.stats()
        captured.close()
    print(
        f"400 steps: {stats['replays']} replayed, {stats['fallbacks']} fell back; losses and weights are the same bits"
    )
    alone, others = (
        float(np.median(micros.pop("kernels alone"))),
        {name: np.median(found) for name, found in micros.items()},
    )
    print(f"microseconds of a step (medians): NumPy's kernels alone {alone:.0f}; and around them:")
    print("; ".join(f"{name} {found - alone:.0f}" for name, found in others.items()))


if __name__ == "__main__":
    main()
