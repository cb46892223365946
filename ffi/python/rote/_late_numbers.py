"""Numbers that an optimizer reads from tensors in the middle of its step, as ``Adafactor`` does.

A replay knows such a number only when its turn comes: it is the norm of a gradient, and parameters have been written
before. So a number is followed as a tensor: one ``f64`` on the host. What the optimizer computes from the number by
Python's arithmetic, ops compute from the tensor, with the same bits. An op that takes the number as an argument gives
way to one that takes the tensor (backends/aten/bridge/late_numbers.h).

Nothing else may get the number. A mode sees all that PyTorch is called with while the optimizer's function runs, and
any other use of the number refuses the recording. The function names nothing beside PyTorch by which C code could
look into the number. Python raises where a divisor is 0. So a divisor is a number written in the code, a
hyperparameter that a replay compares with 0 before it begins, or the greater one of a positive number and another.
"""

from __future__ import annotations

import builtins
import struct
import sys
import types
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from . import _code
from ._floats import TracedFloat, check_not_zero
from ._record import unrecorded_item

try:
    from torch.optim import _adafactor
except ImportError:  # before PyTorch 2.5
    _adafactor = None  # type: ignore[assignment]

_FUNCTIONS = ("_single_tensor_adafactor", "_multi_tensor_adafactor")
# What these may name of the module and of Python: none of it looks into a float unseen.
_KNOWN = frozenset(
    {
        "AssertionError",
        "TYPE_CHECKING",
        "Tensor",
        "TensorListList",
        "_group_tensors_by_device_dtype_and_is_multidim",
        "_to_scalar",
    }
    | {"cast", "enumerate", "float", "isinstance", "len", "list", "max", "min", "torch", "type", "zip"}
)
_KNOWN_OF_TORCH = frozenset({"compiler", "finfo", "jit", "linalg", "norm", "tensor"})
_OPERANDS = (float, int, TracedFloat)
_Patch = Callable[[Any, str, Any], Any]


class LateNumber(float):
    """A float with the tensor that a replay finds it in."""

    __slots__ = ("_numbers", "_positive", "_tensor")
    _numbers: Numbers
    _tensor: torch.Tensor
    _positive: bool  # whatever is read

    def __neg__(self) -> Any:
        return self._numbers.computed(float.__neg__(self), lambda: -self._tensor, sys._getframe(1))

    def __mul__(self, other: Any) -> Any:
        return self._numbers.product(self, other, sys._getframe(1))

    def __rmul__(self, other: Any) -> Any:
        return self._numbers.product(self, other, sys._getframe(1))

    def __truediv__(self, other: Any) -> Any:
        return self._numbers.quotient(self, other, sys._getframe(1))


def _is_known(code: types.CodeType) -> bool:
    """Whether code names nothing that looks into a float unseen."""
    names = _code.names(code)
    of_torch = {attribute for name, attribute in names.pairs if name == "torch"}
    known = _KNOWN_OF_TORCH | {name for name in of_torch if name.startswith("_foreach_")}
    return not names.imports and _KNOWN.issuperset(names.globals) and known.issuperset(of_torch)


def _plain(value: Any) -> Any:
    return float.__pos__(value) if isinstance(value, LateNumber) else value


def _refusing(name: str) -> Callable[..., Any]:
    plain = getattr(float, name)

    def method(self: LateNumber, *others: Any) -> Any:
        self._numbers.refuse_use(f"float.{name}")
        return plain(_plain(self), *map(_plain, others))

    method.__name__ = name
    return method


for _name in (
    [f"__{side}{name}__" for name in ("add", "sub", "floordiv", "mod", "divmod", "pow") for side in ("", "r")]
    + [f"__{name}__" for name in ("rtruediv", "pos", "abs", "bool", "int", "float", "round", "trunc", "floor", "ceil")]
    + [f"__{name}__" for name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "repr", "str", "format", "getnewargs")]
    + ["is_integer", "hex", "as_integer_ratio", "conjugate", "__reduce_ex__"]
):
    setattr(LateNumber, _name, _refusing(_name))


class Numbers:
    """The late numbers of one recording."""

    def __init__(self, refuse: Callable[[str, str, str], None]) -> None:
        self._refuse = refuse
        self._running = False  # one of the functions whose use of numbers is seen
        self._made: list[LateNumber] = []

    def patches(self, stack: ExitStack, patched: _Patch) -> None:
        """Enters every patch."""
        if _adafactor is None or "max" in vars(_adafactor):
            return
        for name in _FUNCTIONS:
            function = vars(_adafactor).get(name)
            if isinstance(function, types.FunctionType) and _is_known(function.__code__):
                stack.enter_context(patched(_adafactor, name, self._watched(function)))
        stack.enter_context(patched(_adafactor, "max", self.greatest))

    def _watched(self, function: types.FunctionType) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if self._running:
                return function(*args, **kwargs)
            self._running = True
            try:
                with _Mode(self):
                    return function(*args, **kwargs)
            finally:
                self._running = False
                self._close()

        return run

    def _close(self) -> None:
        while self._made:
            one = self._made.pop()
            if sys.getrefcount(one) > 2:  # this name, and the argument
                self.refuse_use("a place that outlives the function")

    def refuse_use(self, by: str) -> None:
        """Refuses the recording, since a number is used as no replay can."""
        self._refuse(
            "Tensor.item",
            f"reads a number from a tensor and gives it to {by}: a plan cannot hold the host's use of the value",
            "another optimizer, or one that computes with tensors",
        )

    def read(self, tensor: torch.Tensor) -> LateNumber | None:
        """The number in a tensor, if all its uses will be seen."""
        fits = type(tensor) is torch.Tensor and tensor.dim() == 0 and tensor.dtype.is_floating_point
        # A copy from another device may still be on its way to the host.
        late = tensor.is_cpu and torch.cuda.is_initialized()
        if not self._running or not fits or late:
            return None
        own = torch.ops.aten._to_copy.default(tensor.detach(), dtype=torch.float64, device=torch.device("cpu"))
        return self._make(unrecorded_item(own), own)

    def _make(self, value: float, tensor: torch.Tensor, positive: bool = False) -> LateNumber:
        made = LateNumber(value)
        made._numbers, made._tensor, made._positive = self, tensor, positive
        self._made.append(made)
        return made

    def computed(self, value: float, compute: Callable[[], torch.Tensor], by: types.FrameType) -> float:
        """The outcome of arithmetic, as a tensor too."""
        if not self._running or by.f_code.co_filename != _adafactor.__file__:
            self.refuse_use(by.f_code.co_qualname)
            return value
        tensor = compute()
        if _bits(unrecorded_item(tensor)) != _bits(value):
            self.refuse_use("arithmetic with another outcome than that of ops")
            return value
        return self._make(value, tensor)

    def product(self, number: LateNumber, other: Any, by: types.FrameType) -> Any:
        """``number * other``"""
        if type(other) not in _OPERANDS:
            self.refuse_use("arithmetic with something else than floats")
            return _plain(number) * _plain(other)
        value = float.__mul__(number, float(_number(other)))
        return self.computed(value, lambda: number._tensor * other, by)

    def quotient(self, number: LateNumber, other: Any, by: types.FrameType) -> Any:
        """``number / other``"""
        if isinstance(other, LateNumber) and other._positive:
            value = float.__truediv__(number, _plain(other))
            return self.computed(value, lambda: number._tensor / other._tensor, by)
        if type(other) not in _OPERANDS:
            self.refuse_use("a quotient whose divisor may be 0")
            return _plain(number) / _plain(other)
        value = float.__truediv__(number, float(_number(other)))
        if isinstance(other, TracedFloat):
            check_not_zero(other)
        return self.computed(value, lambda: number._tensor / other, by)

    def greatest(self, *args: Any, **kwargs: Any) -> Any:
        """``max``, which chooses in a replay anew."""
        if len(args) != 2 or kwargs or type(args[0]) not in _OPERANDS or not isinstance(args[1], LateNumber):
            return builtins.max(*args, **kwargs)
        first, second = args
        plain = float(_number(first))

        def choose() -> torch.Tensor:
            other = torch.full((), first, dtype=torch.float64, device="cpu")
            return torch.where(second._tensor > other, second._tensor, other)

        value = builtins.max(plain, float.__pos__(second))
        chosen = self.computed(value, choose, sys._getframe(1))
        if isinstance(chosen, LateNumber):
            chosen._positive = type(first) is not TracedFloat and plain > 0
        return chosen

    def given(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Calls an op with the tensors in place of numbers, if there is one that takes them."""
        if function is torch.Tensor.add_ and len(args) == 2 and kwargs.keys() == {"alpha"}:
            if all(isinstance(each, torch.Tensor) for each in args):
                torch.ops.rote.add_number_(*args, kwargs["alpha"]._tensor)
                return True
        elif function is torch._foreach_mul_ and len(args) == 2 and not kwargs:
            tensors, numbers = args
            if all(isinstance(each, LateNumber) for each in numbers):
                torch.ops.rote.foreach_mul_numbers_(tensors, [each._tensor for each in numbers])
                return True
        return False


class _Mode(TorchFunctionMode):
    """Sees numbers among what PyTorch is called with."""

    def __init__(self, numbers: Numbers) -> None:
        super().__init__()
        self._numbers = numbers

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not any(isinstance(each, LateNumber) for each in pytree.tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        if self._numbers.given(func, args, kwargs):
            return args[0]
        self._numbers.refuse_use(getattr(func, "__name__", "PyTorch"))
        return func(*args, **kwargs)


def _number(value: Any) -> Any:
    """A number without what follows it."""
    return value._plain if isinstance(value, TracedFloat) else value


def _bits(value: float) -> bytes:
    return struct.pack("d", value)
