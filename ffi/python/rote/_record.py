"""Runs one call eagerly while the library records it.

The bridge reports every op. Ops on plain tensors are recorded; ops on DTensors
frame the ops that they run. Some things never reach the dispatcher and are
observed where they happen: generator state, host reads, redistributions,
backward passes.
"""

from __future__ import annotations

import builtins
import gc
import pickle
import random
import sys
import time
import types
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from ctypes import byref, c_uint32
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from . import _array_arguments, _literals
from ._arguments import notation
from ._bridge import bridge
from ._by_hand import ByHand
from ._frames import TORCH, Handlers, handler_since, is_users_own, user_line
from ._graph import reached
from ._identity import address
from ._meshes import Meshes
from ._metadata_reads import MetadataReads
from ._native import c_text, check, error, lib
from ._numbers import MAY_RAISE, MAY_RAISE_LATE, NO_INDEX, REFUSED
from ._outside import Outside
from ._specs import spec_text

_Number = TypeVar("_Number")


def _is_step(code: types.CodeType) -> bool:
    """Whether code is the user's own, and of the step, not of a kernel."""
    return is_users_own(code) and not within_kernel()


def note(session: Any, status: int) -> int:
    """A status of the library: what went wrong there refuses the recording, and does not stop the step."""
    if status < 0:
        failed(session, error())
    return status


def failed(session: Any, problem: object) -> None:
    """Refuses the recording, since something of Rote's own went wrong while the step ran."""
    kind = f"{type(problem).__name__}: " if isinstance(problem, Exception) else ""
    reason = c_text(f"could not be recorded: {kind}{problem}")
    lib.rote_record_refuse(session, b"", b"", reason, b"report this as a bug, with the step; the step stays eager")


class Specs:
    """Numbers for specs in one recording."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self._by_id: dict[int, int] = {}
        self._by_text: dict[str, int] = {}
        self._hold: list[Any] = []

    def of(self, spec: Any) -> int:
        """The number of a spec."""
        number = self._by_id.get(address(spec))
        if number is not None:
            return number
        with unrecorded():
            text = spec_text(spec)
        number = self._by_text.get(text)
        if number is None:
            index = c_uint32()
            note(self._session, lib.rote_record_spec(self._session, c_text(text), byref(index)))
            number = self._by_text[text] = index.value
        self._hold.append(spec)
        self._by_id[address(spec)] = number
        return number

    def of_tensor(self, tensor: Any) -> int:
        """The number of a tensor's spec; NO_INDEX for a plain tensor."""
        return self.of(tensor._spec) if isinstance(tensor, DTensor) else NO_INDEX


# Composite ops that read or write the memory of their tensors themselves, below the dispatcher,
# and go other ways by what is there. tests/torch/test_op_tables.py finds them: they run on tensors,
# but not on tensors without data.
_IN_MEMORY = (
    "aten::_pack_padded_sequence_backward",
    "aten::_pad_packed_sequence",
    "aten::_reshape_from_tensor",
    "aten::_rowwise_prune",
    "aten::_saturate_weight_to_fp16",
    "aten::_sobol_engine_draw",
    "aten::_sobol_engine_ff_",
    "aten::_sobol_engine_initialize_state_",
    "aten::_sobol_engine_scramble_",
    "aten::_validate_sparse_coo_tensor_args",
    "aten::choose_qparams_optimized",
    "aten::ctc_loss.Tensor",
    "aten::gru.data",
    "aten::lstm.data",
    "aten::quantized_gru.data",
    "aten::quantized_lstm.data",
    "aten::rnn_relu.data",
    "aten::rnn_tanh.data",
    "aten::tensor_split.tensor_indices_or_sections",
)
# What the bridge tells of an op that has run.
_WAITS, _LIFTS = 1, 2
_OBSERVED_KEY = torch._C._dispatch_key_parse("Fake")  # as observe.h has it
_OBSERVED = torch._C.DispatchKeySet(_OBSERVED_KEY)
# Operators of functions that call them under autograd's transforms, and do nothing else.
_TRANSPARENT = ("custom_function_call",)


def unrecorded() -> Any:
    """Within, ops are not recorded."""
    return torch._C._ExcludeDispatchKeyGuard(_OBSERVED)


@contextmanager
def uncollected() -> Iterator[None]:
    """Within, Python collects no cycles."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def unrecorded_item(tensor: torch.Tensor) -> Any:
    """The number in a tensor of one element, read without a trace in the recording."""
    with unrecorded():
        return torch._C.TensorBase.item(tensor)


def within_kernel() -> bool:
    """Whether the caller is a kernel in Python of an op that is recorded: what it does, a replay does too."""
    return torch._C._dispatch_tls_is_dispatch_key_excluded(_OBSERVED_KEY)


def in_step() -> bool:
    """Whether the caller is the step that is recorded, and neither another thread nor a kernel."""
    return torch._C._dispatch_tls_is_dispatch_key_included(_OBSERVED_KEY) and not within_kernel()


# References to a collective's result once its thread has let go of it: four, or five where the
# caller has one more, as seen in PyTorch 2.15, where the thread holds three more. Where there
# are others, recordings go on after the time below, and may differ.
_OWN_REFERENCES = (4, 5)
_LET_GO_SECONDS = 0.5
_LAST_REFERENCE_SECONDS = 0.0003  # the thread drops its three at once


def _let_go(result: torch.Tensor) -> bool:
    """Waits until the thread that ran a collective lets go of its result, a moment after the wait for it. False:
    it did not in time.

    Autograd clones a gradient that somebody else holds, and takes others as they are: two recordings
    would differ by chance.
    """
    if result.device.type != "cpu" or not hasattr(result, "_use_count"):
        return True
    end = time.monotonic() + _LET_GO_SECONDS
    fewest, most = _OWN_REFERENCES
    while result._use_count() > most:
        if time.monotonic() > end:
            return False
        time.sleep(0.0001)
    end = time.monotonic() + _LAST_REFERENCE_SECONDS
    while result._use_count() > fewest and time.monotonic() < end:
        time.sleep(0.00005)
    return True


def _collectives_have_threads() -> bool:
    """Whether threads run collectives of some process group: not PyTorch's fake one, which answers at once."""
    if not dist.is_initialized():
        return False
    groups = getattr(getattr(dist.distributed_c10d, "_world", None), "pg_map", None)  # (backend, store) of each
    return groups is None or any(known[0] != "fake" for known in groups.values())


# Is called with an op that was recorded, its arguments and its result.
Seen = Callable[[Any, Any, Any, Any], None]


class _Recorder:
    """Hands every op to the library; ``observe.h`` tells it of them."""

    def __init__(self, session: Any, watch: Watch, seen: Seen | None) -> None:
        self._seen = seen
        self.detailed = seen is not None  # whether `ran` is told of arguments and results
        self._session = session
        self._watch = watch
        self.number_of = watch.specs.of
        self.is_users_own = is_users_own
        self.internal = watch.internal  # code of PyTorch's that calls what waits for its collectives itself
        self._gradients = watch.gradients  # those that the step has not dropped or replaced
        self._patient = _collectives_have_threads()  # with them, until one holds on for long
        self.refused = False

    def ran(self, kind: int, tensor: Any, func: Any = None, args: Any = (), result: Any = ()) -> None:
        """Records an op that has just run and that the bridge does not record by itself."""
        if self.refused:
            return
        kwargs: dict[str, Any] = {}
        result = result[0] if len(result) == 1 else result
        try:
            if kind == _WAITS and self._patient:
                self._patient = _let_go(tensor)
            if kind == _LIFTS and (op := self._watch.arrays.op_of(tensor, unrecorded)) is not None:
                func, args, kwargs = op
                result = tensor
                self._note(lib.rote_record_op(self._session, func, args, kwargs, result, user_line()))
            elif kind == _LIFTS and self._is_constant(tensor, sys._getframe(1).f_code):
                for func, args, kwargs, result in _literals.ops_of(tensor, self._watch.number, unrecorded):
                    self._note(lib.rote_record_op(self._session, func, args, kwargs, result, user_line()))
                    if self._seen is not None:
                        self._seen(func, args, kwargs, result)
                return
            else:
                self.recorded(lib.rote_record_observed(self._session, user_line()))
        except Exception as problem:
            self.failed(problem)
        if self._seen is not None:
            self._seen(func, args, kwargs, result)

    def waited(self, work: Any) -> None:
        """Records a wait for a collective that the step has called by hand."""
        if self.refused:
            return
        try:
            self.recorded(lib.rote_record_waited(self._session, work, user_line()))
        except Exception as problem:
            self.failed(problem)

    def recorded(self, status: int) -> None:
        """An op was recorded: what is known of it."""
        if status in (MAY_RAISE, MAY_RAISE_LATE):
            self._may_raise(late=status == MAY_RAISE_LATE)
        else:
            self._note(status)

    def _is_constant(self, tensor: torch.Tensor, by: types.CodeType) -> bool:
        """Whether a tensor is made of numbers that are written in the code, or follow from guarded values: were it no
        constant, the next recording would differ. PyTorch's own code makes such of no dims, as optimizers do."""
        by_torch = not is_users_own(by) and by.co_filename != __file__  # code here stands before what users call
        self._watch.literals -= 1
        return self._watch.literals >= 0 or (tensor.dim() == 0 and by_torch)

    def _may_raise(self, late: bool) -> None:
        """A replay of the last op may raise, perhaps too late to start again: notes what eager leaves then."""
        left = []
        for path, tensor, before in self._gradients:
            if tensor.grad is before:
                left.append((path, tensor, before))
            else:
                note(self._session, lib.rote_record_grad_gone(self._session, c_text(path)))
        self._gradients = left
        if late and (handler := self._watch.handler()):
            self._note(lib.rote_record_handled(self._session, c_text(handler)))

    def _note(self, status: int) -> None:
        """Ends the recording when it was refused, or failed: the step runs on."""
        if status < 0:
            self._watch.refuse(
                "", f"runs an op that cannot be recorded: {error()}", "run it outside the captured function"
            )
        if status < 0 or status == REFUSED:
            self.refused = True
            self._watch.at_stop()

    def draws(self) -> None:
        """An op that draws random numbers is about to run."""
        try:
            if not self.refused:
                self._note(lib.rote_record_random(self._session, user_line()))
        except Exception as problem:
            self.failed(problem)

    def called(self, name: str) -> None:
        """Refuses an op that reads or writes memory itself, see ``_IN_MEMORY``."""
        if not self.refused:
            self._watch.refuse(
                name,
                "reads or writes the memory of a tensor on the host: the ops that it calls may depend on the values, "
                "and a plan cannot hold that",
                "pass it Python numbers in place of the tensor (padded sequences in place of packed sequences), or "
                "call it outside the captured function",
            )

    def set_otherwise(self, op: str) -> None:
        """Refuses a step that changes how kernels compute; ``op`` has just run, none at the end of the step."""
        if self.refused:
            return
        self._watch.refuse(
            op,
            f"{'runs' if op else 'ends'} under other settings of PyTorch than the step began with (the default dtype, "
            "the number of threads, torch.backends, deterministic algorithms): a replay runs the whole step under the "
            "settings at the begin of the call",
            "change settings outside the captured function",
        )
        self.refused = True

    def failed(self, problem: object) -> None:
        """Recording an op went wrong."""
        failed(self._session, problem)
        self.refused = True


_HOST_READS = ("tolist", "numpy", "__array__")
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_ADDRESSES = ("data_ptr", "const_data_ptr")  # the last one is new
_MADE_OF_DATA = ("tensor", "as_tensor", "asarray")
_BY_ELEMENTS = ("apply_", "map_", "map2_")  # call a function for each element, without an op
# These read meshes, and places of shards, which are no data of the step.
_READS_MESHES = (f"{TORCH}distributed/device_mesh.py", f"{TORCH}distributed/tensor/placement_types.py")


@contextmanager
def _patched(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    own = vars(owner).get(name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


class Watch:
    """What a recording observes outside the dispatcher."""

    def __init__(self, session: Any, specs: Specs) -> None:
        self._session = session
        self.specs = specs
        self._states: list[tuple[torch.Tensor, int, tuple[int, int]]] = []
        self._roots: list[Any] = []
        self._moving: list[tuple[str, Callable[[], Any], Any]] = []
        self._advancing: list[tuple[str, Callable[[], Any], Any]] = []
        self.iterators: list[Any] = []
        #: Tensors that have a gradient before the step, with their paths and gradients.
        self.gradients: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        self.arguments: set[int] = set()  # identities of tensors
        #: Code of PyTorch's that calls functions of C++ which wait for their collectives themselves.
        self.internal: Set[types.CodeType] = frozenset()
        self.handlers = Handlers()
        #: The number that a frame reads from a tensor, if a replay can compute what follows from it.
        self.number_in: Callable[[torch.Tensor, types.FrameType], float | None]
        #: The plain float behind one whose use a recording follows.
        self.followed: Callable[[Any], float | None]
        #: What stands for a number that the step reads from a tensor only to return it.
        self.read_out: Callable[[torch.Tensor, types.FrameType, bool], Any]
        #: The number that a frame reads from a tensor only to give it to a scheduler, and how it reads.
        self.read_metric: Callable[[torch.Tensor, types.FrameType, Callable[[torch.Tensor], float]], float | None]
        #: Is called where the step does what a plan may not be able to hold: reads on the host, and refusals.
        self.at_stop: Callable[[], None]
        self.outside: Outside | None = None  # what arguments bring along
        self.keeps_prints = False  # refuses a step that prints, which a replay does not
        #: Patches of others, while the step runs.
        self.more: list[Callable[[ExitStack, Callable[..., Any]], None]] = []
        self.follows_nothing()
        self.arrays = _array_arguments.NONE
        self.number: float | None = None  # of which PyTorch makes a tensor now
        self.literals = 0  # how many tensors PyTorch makes of numbers now, which is all that these have in their memory
        self.was_refused = False
        self.metadata_reads = MetadataReads(session, self.refuse, _is_step, self._resized)

    def _resized(self, storage: int, before: int, after: int) -> None:
        """Records that code of a library has resized a storage."""
        if in_step():
            note(self._session, lib.rote_record_resized(self._session, storage, before, after, user_line()))

    def handler(self) -> str | None:
        """Where the step handles errors of what it calls now, if it does."""
        return handler_since(run.__code__, self.handlers)

    def follows_nothing(self) -> None:
        """No number is followed."""
        self.number_in = lambda tensor, frame: None
        self.followed = lambda data: None
        self.read_out = lambda tensor, frame, by_float: None
        self.read_metric = lambda tensor, frame, how: None
        self.at_stop = lambda: None

    def patches(self, stack: ExitStack) -> None:
        """Enters every patch."""
        self.metadata_reads.patches(stack, _patched)
        self.handlers.patches(stack, _patched)
        if self.outside is not None:
            self.outside.patches(stack, _patched)
        for patches in self.more:
            patches(stack, _patched)
        for name in _HOST_READS:
            stack.enter_context(_patched(torch.Tensor, name, self._host_read(name)))
        stack.enter_context(_patched(torch.Tensor, "item", self._item()))
        stack.enter_context(_patched(torch.Tensor, "__float__", self._float()))
        stack.enter_context(_patched(torch.Tensor, "__bool__", self._bool()))
        for name in _MADE_OF_DATA:
            stack.enter_context(_patched(torch, name, self._made_of_data(getattr(torch, name))))
        made = self._made_of_data(torch.Tensor.new_tensor, at=1)
        stack.enter_context(_patched(torch.Tensor, "new_tensor", made))
        bridge().index_begin(list(_literals.PLAIN), self._indexed)
        stack.callback(bridge().index_end)
        for name in _BY_ELEMENTS:
            stack.enter_context(_patched(torch.Tensor, name, self._by_elements(name)))
        for name in _ADDRESSES:
            if hasattr(torch.Tensor, name):
                stack.enter_context(_patched(torch.Tensor, name, self._address(name)))
        stack.enter_context(_patched(torch.Tensor, "__dlpack__", self._handed_out(torch.Tensor.__dlpack__)))
        for module in (torch, torch.utils.dlpack):
            stack.enter_context(_patched(module, "to_dlpack", self._handed_out(module.to_dlpack)))
        if self.iterators:
            stack.enter_context(_patched(builtins, "next", self._next()))
        stack.enter_context(_patched(builtins, "id", self._id()))
        if self.keeps_prints:
            stack.enter_context(_patched(builtins, "print", self._print()))
        stack.enter_context(_patched(torch.utils, "swap_tensors", self._swap()))
        get, set_ = torch.get_rng_state, torch.set_rng_state
        saved, restored = self._save(get, (0, -1)), self._restore(set_, (0, -1))
        for owner in (torch, torch.random):
            stack.enter_context(_patched(owner, "get_rng_state", saved))
            stack.enter_context(_patched(owner, "set_rng_state", restored))
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            device = (1, torch.cuda.current_device())
            for owner in (torch.cuda, torch.cuda.random):
                stack.enter_context(_patched(owner, "get_rng_state", self._save(torch.cuda.get_rng_state, device)))
                stack.enter_context(_patched(owner, "set_rng_state", self._restore(torch.cuda.set_rng_state, device)))
        stack.enter_context(
            _patched(
                torch.autograd,
                "_engine_run_backward",
                self._backward(vars(torch.autograd)["_engine_run_backward"]),
            )
        )
        stack.enter_context(
            _patched(
                torch._ops.HigherOrderOperator, "dispatch", self._higher_order(torch._ops.HigherOrderOperator.dispatch)
            )
        )
        import torch.distributed.tensor._api as api
        import torch.distributed.tensor._dispatch as dispatch
        import torch.distributed.tensor._redistribute as redistribute

        for module in (api, dispatch, redistribute):
            original = getattr(module, "redistribute_local_tensor", None)
            if original is not None:
                replacement = self._redistribute(original)
                stack.enter_context(_patched(module, "redistribute_local_tensor", replacement))

    def refuse(self, op: str, reason: str, remedy: str) -> None:
        """Refuses the recording at the user's current line."""
        self.was_refused = True
        self.at_stop()
        lib.rote_record_refuse(self._session, c_text(op), user_line(), c_text(reason), c_text(remedy))

    def moving(
        self, generators: list[tuple[str, Callable[[], Any]]], iterators: list[tuple[str, Callable[[], Any]]]
    ) -> None:
        """Notes where generators of random numbers stand that are not torch's, and where iterators do."""
        self._advancing = [(name, state, state()) for name, state in iterators]
        found = [("random", random.getstate), *generators]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            found.append(("numpy.random", lambda: pickle.dumps(numpy.random.get_state())))
        self._moving = [(name, state, state()) for name, state in found]

    def check_raising(self) -> None:
        """Refuses when an op has raised, which the step has handled."""
        if op := bridge().raising():
            self.refuse(
                op,
                "raised, and the step handled the error: whether it raises may depend on data",
                "call the op outside the captured function, or use a form that does not raise (linalg.cholesky_ex); a "
                "call in which no op raises is recorded",
            )

    def check_others(self) -> None:
        """Refuses when another thread has used the tensors of the step."""
        if op := bridge().others():
            self.refuse(
                op,
                "runs in another thread on tensors of the step, which a recording does not see",
                "run these ops in the step's own thread, and join other threads before the call",
            )

    def check_moving(self) -> None:
        """Refuses when the step drew from one of them, or advanced an iterator."""
        for name, state, before in self._advancing:
            if state() != before:
                self.refuse(
                    "",
                    f"advances the iterator {name}, which outlives the step: a replay would not advance it",
                    "call next() outside the captured function and pass the result as an argument",
                )
        self._advancing = []
        for name, state, before in self._moving:
            if state() != before:
                self.refuse(
                    name,
                    "draws random numbers on the host: a plan cannot hold Python's use of the numbers",
                    "draw with torch, or draw outside the captured function and pass the result as an argument",
                )
        self._moving = []

    def _print(self) -> Callable[..., None]:
        original = builtins.print

        def printing(*args: Any, **kwargs: Any) -> None:
            if in_step():
                self.refuse(
                    "print",
                    "prints before its last op: a replay prints nothing",
                    "print behind the last op, or outside of the loop",
                )
            original(*args, **kwargs)

        return printing

    def _next(self) -> Callable[..., Any]:
        original = builtins.next
        outlive = {id(iterator) for iterator in self.iterators}

        def next_(iterator: Any, *default: Any) -> Any:
            if id(iterator) in outlive:
                self.refuse(
                    "next",
                    f"advances a {type(iterator).__name__} that outlives the step: a replay would not advance it",
                    "call next() outside the captured function and pass the result as an argument",
                )
            return original(iterator, *default)

        return next_

    def _swap(self) -> Callable[..., Any]:
        original = torch.utils.swap_tensors

        def swap_tensors(one: Any, other: Any) -> Any:
            self.refuse(
                "torch.utils.swap_tensors",
                "exchanges two tensors: a replay would not exchange them",
                "exchange the tensors outside the captured function",
            )
            self._roots.clear()  # the graphs would hold the nodes that accumulate their gradients
            return original(one, other)

        return swap_tensors

    def _id(self) -> Callable[..., Any]:
        original = builtins.id

        def id_(thing: Any, /) -> int:
            if original(thing) in self.arguments and is_users_own(sys._getframe(1).f_code):
                self.refuse(
                    "id",
                    "asks for the identity of an argument: a later call may pass another object, or a new object at "
                    "the same address",
                    "compare with `is`, or call id() outside the captured function",
                )
            return original(thing)

        return id_

    def _host_read(self, name: str) -> Callable[..., Any]:
        original = getattr(torch.Tensor, name)
        watch = self
        returned = name == "numpy" and original is torch._C.TensorBase.numpy

        def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if returned and not (args or kwargs) and in_step() and tensor.dim() == 0:
                original(tensor)  # which raises PyTorch's own errors
                number = watch.read_out(tensor, sys._getframe(1), False)
                if type(number) is float:  # float(t.numpy()) is the number itself
                    return number
            if not (within_kernel() or sys._getframe(1).f_code.co_filename.startswith(_READS_MESHES)):
                watch.refuse(
                    f"Tensor.{name}",
                    "reads a tensor on the host: a plan cannot hold Python's use of the values",
                    "return the tensor and read it outside the captured function",
                )
            return original(tensor, *args, **kwargs)

        return read

    def _item(self) -> Callable[..., Any]:
        original = torch.Tensor.item
        is_own = original is torch._C.TensorBase.item  # and not one that the script has put there

        def item(tensor: torch.Tensor) -> Any:
            if not is_own or not in_step():
                return original(tensor)
            frame = sys._getframe(1)
            if (followed := self.number_in(tensor, frame)) is not None:
                return followed
            read = self.read_out(tensor, frame, False)
            if read is None:
                read = self.read_metric(tensor, frame, original)
            return self._read(original, tensor) if read is None else read

        return item

    def _read(self, original: Callable[[torch.Tensor], _Number], tensor: torch.Tensor) -> _Number:
        self.at_stop()
        return original(tensor)

    def _float(self) -> Callable[..., Any]:
        original = torch.Tensor.__float__
        is_own = original is torch._C.TensorBase.__float__

        def __float__(tensor: torch.Tensor) -> float:
            if within_kernel() or not is_own:
                return original(tensor)
            frame = sys._getframe(1)
            read = self.read_out(tensor, frame, True)
            if read is None:
                read = self.read_metric(tensor, frame, original)
            return self._read(original, tensor) if read is None else read

        return __float__

    def _bool(self) -> Callable[..., Any]:
        original = torch.Tensor.__bool__
        is_own = original is torch._C.TensorBase.__bool__

        def truth(tensor: torch.Tensor) -> bool:
            """Asks whether a number is 0, not which number it is: a plan holds for all others alike."""
            of_numbers = tensor.dtype.is_floating_point or tensor.dtype in _INTEGERS
            simple = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() == 1
            if is_own and of_numbers and simple and not within_kernel():
                tensor = tensor != 0
            return bool(original(tensor) if within_kernel() else self._read(original, tensor))

        return truth

    def _made_of_data(self, original: Callable[..., Any], at: int = 0) -> Callable[..., Any]:
        """``at``: where the data is among the arguments."""
        # And not one that the script has put there.
        is_own = type(original) in (types.BuiltinFunctionType, types.MethodDescriptorType)

        def make(*args: Any, **kwargs: Any) -> Any:
            data = args[at] if len(args) > at else kwargs.get("data")
            self.number = self.followed(data) if is_own else None
            self.literals = int(self.number is not None or (is_own and _literals.is_literal(data)))
            follows = is_own and bool(self.arrays) and in_step()
            if follows:
                self.arrays.made(data, sys._getframe(1))
            try:
                made = original(*args, **kwargs)
            finally:
                self.number, self.literals = None, 0
                self.arrays.taken()
            if follows:
                self.arrays.has_made(data, made)
            return made

        return make

    def _indexed(self, *given: Any) -> None:
        """Is told of a tensor, an index, and what is written there; and of nothing once PyTorch has taken the index."""
        self.literals = _literals.in_index(*given) if given else 0
        if not given:
            self.arrays.taken()
        elif self.arrays and in_step():
            self.arrays.indexes(given[0], given[1], sys._getframe(1))

    def _refused(self, op: str, original: Callable[..., Any], reason: str, remedy: str) -> Callable[..., Any]:
        """A function that only kernels may call while a step is recorded."""
        watch = self

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not within_kernel():
                watch.refuse(op, reason, remedy)
            return original(tensor, *args, **kwargs)

        return call

    def _handed_out(self, original: Callable[..., Any]) -> Callable[..., Any]:
        return self._refused(
            "Tensor.__dlpack__",
            original,
            "passes the memory of a tensor to code outside the dispatcher: a plan cannot hold the reads and writes of "
            "that code",
            "make that code a custom op (torch.library.custom_op), or run it outside the captured function",
        )

    def _by_elements(self, name: str) -> Callable[..., Any]:
        return self._refused(
            f"Tensor.{name}",
            getattr(torch.Tensor, name),
            "calls a Python function for each element: a plan cannot hold what the function computes",
            "use an op, or make the function a custom op (torch.library.custom_op)",
        )

    def _address(self, name: str) -> Callable[..., Any]:
        original = getattr(torch._C.TensorBase, name)
        watch = self

        def data_ptr(tensor: torch.Tensor) -> int:
            caller = sys._getframe(1).f_code
            if (is_users_own(caller) or "triton" in caller.co_filename) and not within_kernel():
                watch.refuse(
                    f"Tensor.{name}",
                    "passes the address of a tensor to code outside the dispatcher: a plan cannot hold the reads and "
                    "writes of that code",
                    "make the kernel a custom op (torch.library.custom_op), or run it outside the captured function",
                )
            return int(original(tensor))

        return data_ptr

    def _save(self, original: Callable[..., Any], device: tuple[int, int]) -> Callable[..., Any]:
        def get_rng_state(*args: Any, **kwargs: Any) -> Any:
            slot = c_uint32()
            note(self._session, lib.rote_record_rng(self._session, 0, *device, byref(slot), user_line()))
            with unrecorded():
                state = original(*args, **kwargs)
            self._states.append((state, slot.value, device))
            return state

        return get_rng_state

    def _restore(self, original: Callable[..., Any], device: tuple[int, int]) -> Callable[..., Any]:
        def set_rng_state(state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            with unrecorded():
                slot = self._slot(state, device)
                done = original(state, *args, **kwargs)
            if slot is None:  # the generator may have been in that state already
                self.refuse(
                    "torch.set_rng_state",
                    "sets the state of a random number generator to one that the step has not asked for",
                    "set the state outside the captured function",
                )
            else:
                number = c_uint32(slot)
                note(self._session, lib.rote_record_rng(self._session, 1, *device, byref(number), user_line()))
            return done

        return set_rng_state

    def _slot(self, state: torch.Tensor, device: tuple[int, int]) -> int | None:
        for known, slot, of in reversed(self._states):
            if of == device and known is state:
                return slot
        for known, slot, of in reversed(self._states):
            if of == device and torch.equal(known.cpu(), state.cpu()):
                return slot
        return None

    def _redistribute(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def redistribute_local_tensor(local: Any, current: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                given = bridge().global_call()
                begin, end = self.specs.of(current), self.specs.of(target)
                if given is not None:
                    note(self._session, lib.rote_record_global_args(self._session, notation(given)))
                note(self._session, lib.rote_record_redistribute_begin(self._session, begin, end, user_line()))
            except Exception as problem:
                failed(self._session, problem)
            try:
                return original(local, current, target, *args, **kwargs)
            finally:
                note(self._session, lib.rote_record_redistribute_end(self._session))

        return redistribute_local_tensor

    def _backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            # (outputs, grads, keep_graph, create_graph, inputs, ...)
            keeps_graph = kwargs.get("keep_graph", args[1] if len(args) > 1 else False)
            inputs = kwargs.get("inputs", args[3] if len(args) > 3 else ())
            if not keeps_graph and not inputs:
                for tensor in t_outputs:
                    node = getattr(tensor, "grad_fn", None)
                    if node is not None:
                        self._roots.append(node)
            return original(t_outputs, *args, **kwargs)

        return run

    def _higher_order(self, original: Callable[..., Any]) -> Callable[..., Any]:
        watch = self

        def dispatch(op: Any, key: Any, /, *args: Any, **kwargs: Any) -> Any:
            name = op.name()
            if name in _TRANSPARENT:
                return original(op, key, *args, **kwargs)
            watch.refuse(
                name,
                "is an operator that calls Python functions: which functions run may depend on data",
                "call the operator outside the captured function",
            )
            with unrecorded():
                key = torch._ops._compute_keyset(args, kwargs, op.non_fallthrough_keys).highestPriorityTypeId()
                return original(op, key, *args, **kwargs)

        return dispatch

    def used_up(self, node: Any) -> bool:
        """Whether a backward pass of this recording has used a graph up: whatever leads from the node to a leaf meets a
        node that has freed what it had saved, or the graph of an argument."""
        used, has_met = reached(self._roots)[0], False
        outside = set() if self.outside is None else self.outside.nodes
        seen: set[Any] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            if current in seen or current in outside:
                continue
            seen.add(current)
            if current in used and _has_freed(current):
                has_met = True
                continue
            following = [each for each, _ in current.next_functions if each is not None]
            if not following:
                return False  # a leaf, or a function without inputs
            pending.extend(following)
        return has_met

    def forget(self) -> None:
        """Drops the tensors and graphs that were held."""
        self.gradients, self.outside = [], None
        self._roots.clear()
        self._states.clear()


def _has_freed(node: Any) -> bool:
    """Whether a node of autograd that has run has freed tensors which it had saved: it raises if it runs again."""
    saved = [name.removeprefix("_raw") for name in dir(node) if name.startswith("_raw_saved_")]
    for name in saved:
        try:
            getattr(node, "saved_tensors" if name == "_saved_tensors" else name, None)
        except RuntimeError:
            return True
    return False


def run(
    session: Any,
    watch: Watch,
    step: Callable[[], Any],
    returns: Callable[[Any], Any],
    seen: Seen | None = None,
) -> Any:
    """Runs the step under every observer. ``returns`` is given its result, and gives what stands for it."""
    for name in _IN_MEMORY:
        bridge().tell_of(name)
    recorder = _Recorder(session, watch, seen)
    with ExitStack() as stack:
        watch.patches(stack)
        ByHand(recorder.waited, watch.refuse, in_step, unrecorded).patches(stack, _patched)
        Meshes(watch.refuse, in_step, unrecorded).patches(stack, _patched)
        check(lib.rote_record_observe(session, recorder))
        stack.callback(bridge().observe_no_more)
        return returns(step())


def survivors(session: Any, thorough: bool) -> int:
    """How many tensors of the step something still holds. Cycles that the step
    left behind are collected first; ``thorough`` collects old ones too, which
    takes long."""
    count = c_uint32()
    for _ in range(3):
        check(lib.rote_record_survivors(session, byref(count)))
        if not count.value:
            return 0
        time.sleep(0.001)  # a gloo thread may still hold what it has just sent
    if count.value:
        gc.collect() if thorough else gc.collect(1)
        check(lib.rote_record_survivors(session, byref(count)))
    return int(count.value)
