"""NumPy arrays among the arguments of a step that are others at every call: the indices of a batch (`obs[inds]`), its
labels (`torch.tensor(labels)`).

Such an array may vary without a miss if all that the step does with it is to index tensors by it, to have PyTorch make
a tensor of it, and to ask for its shape. The source of the captured function says so. In the arguments that the session
sees, a tensor takes the place of the array, with a copy of its data. The step itself gets the array. PyTorch makes a
tensor of an array by one op, which a mode sees (``lift_fresh``): a plan copies the tensor in the arguments there.

What is indexed must be a tensor: an array that an array indexes is the host's data. Where no name tells it, the
recording does: PyTorch is seen to index by the array at that place. So the place must not be in a loop, where another
object may have its turn.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from . import _decisions, _introspect, _memory, _returns
from ._literals import PLAIN
from ._rewrite import names_set, of_comprehensions, walk
from ._sources import Function, Position, arguments, names_in, node_of, position_in, position_of
from ._verify import bits

_LOOPS = (ast.For, ast.While, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_MADE = frozenset({"tensor", "as_tensor", "asarray"})
#: Attributes of an array that its tensor's guards hold for.
_METADATA = frozenset({"shape", "dtype", "ndim", "size"})
#: Methods of tensors that give tensors.
_SAME = frozenset(
    {"long", "int", "float", "double", "half", "bfloat16", "bool", "to", "cpu", "cuda", "type", "type_as"}
    | {"detach", "clone", "contiguous", "view", "reshape", "flatten", "squeeze", "unsqueeze", "t", "transpose"}
)
_BESIDE = (int, slice, type(None), type(Ellipsis))
_COPY = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class _Use:
    """A place where a function indexes by an array, or has a tensor made of it."""

    at: Position
    owner: ast.expr | None
    """What is indexed."""
    once: bool
    """Whether a call comes there once at most."""


class ArrayArguments:
    """The arrays that a captured function takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._first, self._function = _returns.bound_and_plain(function)
        self._bound = len(self._first)
        self._uses: dict[str, list[_Use]] | None = None  # by the names of arguments that may be followed

    def seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The arguments of a call with tensors in the places of arrays; None where there are no arrays."""
        if self._uses is None:
            self._uses = _uses_in(self._function)
        numpy = sys.modules.get("numpy")
        if not self._uses or numpy is None or self._function is None:
            return None
        code, kind = self._function.__code__, numpy.ndarray
        left: list[Any] | None = None
        more: dict[str, Any] | None = None
        # One for an array that is passed twice: then it is guarded that it is.
        copies: dict[int, torch.Tensor | None] = {}
        for name in self._uses:
            place = code.co_varnames.index(name) - self._bound
            if name in kwargs:
                value = kwargs[name]
            elif 0 <= place < min(len(args), code.co_argcount - self._bound):
                value = args[place]
            else:
                continue
            if type(value) is not kind:
                continue
            if id(value) not in copies:
                copies[id(value)] = _copied(value)
            copied = copies[id(value)]
            if copied is None:
                continue
            if name in kwargs:
                more = dict(kwargs) if more is None else more
                more[name] = copied
            else:
                left = list(args) if left is None else left
                left[place] = copied
        if left is None and more is None:
            return None
        return args if left is None else tuple(left), kwargs if more is None else more

    def recorded(self, given: tuple[Any, Any], seen: tuple[Any, Any]) -> RecordedArrays:
        """The arrays of a call that is recorded. ``given``: its arguments; ``seen``: those of the session."""
        found: dict[str, tuple[Any, torch.Tensor]] = {}
        function = self._function
        if function is not None and self._uses:
            names = function.__code__.co_varnames[self._bound : function.__code__.co_argcount]
            (args, kwargs), (left, more) = given, seen
            pairs = [*zip(names, args, left, strict=False)]
            pairs += [(name, kwargs[name], value) for name, value in more.items() if name in kwargs]
            for name, value, other in pairs:
                if name in self._uses and _introspect.numpy_array(type(value)) and isinstance(other, torch.Tensor):
                    found[name] = value, other
        uses = {name: (self._uses or {})[name] for name in found}
        args, kwargs = given
        return RecordedArrays(found, uses, _Tensors(function, (*self._first, *args), kwargs) if found else None)

    def stop(self, names: set[str]) -> None:
        """Guards the values of these arrays from now on."""
        for name in names:
            (self._uses or {}).pop(name, None)


class RecordedArrays:
    """The arrays that a call takes which is recorded."""

    def __init__(
        self, found: dict[str, tuple[Any, torch.Tensor]], uses: dict[str, list[_Use]], tensors: _Tensors | None
    ) -> None:
        self._names = {id(array): name for name, (array, _) in found.items()}
        self._found, self._uses, self._tensors = found, uses, tensors
        self._pending: list[str] = []  # of which PyTorch makes tensors now
        self._in_memory: set[str] = set()  # in whose memory the step has tensors
        self._seen: dict[str, set[Position]] = {name: set() for name in found}

    def __bool__(self) -> bool:
        return bool(self._found)

    def in_memory(self, taken: Iterable[tuple[int, int]]) -> None:
        """Notes which arrays lie in memory that tensors of the step have too, from one address to another: ops may
        write there."""
        for begin, end in taken if self._found else ():
            for name, (array, _) in self._found.items():
                if _overlap((begin, end), _memory.extent_of_buffer(array)):
                    self._in_memory.add(name)

    def indexes(self, tensor: Any, key: Any, frame: types.FrameType) -> None:
        """PyTorch is about to index a tensor."""
        parts = key if type(key) is tuple else (key,)
        arrays = [self._names[id(part)] for part in parts if id(part) in self._names]
        if not arrays or type(tensor) not in PLAIN:
            return
        others = (part for part in parts if id(part) not in self._names)
        if any(type(part) not in (*_BESIDE, *PLAIN) for part in others):
            return
        if key is not parts or all(self._found[name][0].ndim == 1 for name in arrays):
            self._takes(arrays, frame)

    def made(self, data: Any, frame: types.FrameType) -> None:
        """PyTorch is about to make a tensor of data."""
        if id(data) in self._names:
            self._takes([self._names[id(data)]], frame)

    def has_made(self, data: Any, tensor: torch.Tensor) -> None:
        """PyTorch has made a tensor of data."""
        if id(data) not in self._names or not tensor.is_cpu:
            return
        extent = _memory.extent_of_tensor(tensor)
        if extent is not None and _overlap(extent[:2], _memory.extent_of_buffer(data)):
            self._in_memory.add(self._names[id(data)])

    def _takes(self, arrays: list[str], frame: types.FrameType) -> None:
        self._pending = arrays
        if self._tensors is not None and frame.f_code is self._tensors.code:
            for name in arrays:
                self._seen[name].add(position_in(frame))

    def taken(self) -> None:
        """PyTorch has made what it was about to make."""
        self._pending = []

    def op_of(
        self, tensor: torch.Tensor, unrecorded: Callable[[], AbstractContextManager[None]]
    ) -> tuple[Any, tuple[Any, ...], dict[str, Any]] | None:
        """The op by which a plan makes a tensor that PyTorch has made now, if it is made of an array."""
        if not self._pending or tensor.dim() == 0:
            return None
        _, copied = self._found[self._pending.pop(0)]
        op: tuple[Any, tuple[Any, ...], dict[str, Any]]
        op = _COPY, (copied,), {"dtype": tensor.dtype, "device": tensor.device}
        with unrecorded():
            expected = _COPY(copied, dtype=tensor.dtype, device=tensor.device)
            same = tensor.shape == expected.shape and tensor.stride() == expected.stride()
            same = same and bits(tensor).equal(bits(expected))
        return op if same else None

    def unfollowed(self) -> set[str]:
        """The arrays of which not all uses are known to be PyTorch's."""
        left = set(self._in_memory)
        for name, uses in self._uses.items():
            for use in uses:
                seen = use.once and use.at in self._seen[name]
                if not (seen or use.owner is None or (self._tensors is not None and self._tensors.has(use.owner))):
                    left.add(name)
        return left


NONE = RecordedArrays({}, {}, None)


class _Tensors:
    """What a function finds by names that none of its statements sets."""

    def __init__(self, function: types.FunctionType | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        assert function is not None
        self._function, self.code = function, function.__code__
        names = self.code.co_varnames[: self.code.co_argcount]
        self._given = {**dict(zip(names, args, strict=False)), **kwargs}
        node = node_of(self.code)
        self._set = _set_in(node) if node is not None else set()

    def has(self, node: ast.expr) -> bool:
        """Whether an expression is a tensor."""
        while isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _SAME:
            node = node.func.value
        chain = names_in(node)
        if not chain or not self._set.isdisjoint(chain):
            return False
        return type(_introspect.found_by_names(self._function, self._given, chain)) in PLAIN


def _copied(array: Any) -> torch.Tensor | None:
    """A tensor on the host with the data of an array; None if PyTorch makes none of such."""
    if array.ndim == 0:
        return None
    try:
        return torch.tensor(array, device="cpu")
    except Exception:  # of objects, of another byte order, of negative strides
        return None


def _overlap(one: tuple[int, int] | None, other: tuple[int, int] | None) -> bool:
    """Whether two extents in memory have a byte in common."""
    return one is not None and other is not None and one[0] < other[1] and other[0] < one[1]


def _set_in(node: Function) -> set[str]:
    """The variables and attributes that a function sets, or comprehensions in it."""
    body = node.body if isinstance(node.body, list) else []
    attributes = {
        each.attr for each in walk(body) if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load)
    }
    return names_set(body) | of_comprehensions(node) | attributes


def _uses_in(function: types.FunctionType | None) -> dict[str, list[_Use]]:
    """What a function does with those of its arguments that it uses as arrays may be used."""
    code = None if function is None else function.__code__
    node = node_of(code) if code is not None and _decisions.is_fit(code) else None
    if function is None or code is None or node is None:
        return {}
    own = "torch" in code.co_names and function.__globals__.get("torch") is torch
    own = own and all(type(vars(torch)[name]) is types.BuiltinFunctionType for name in _MADE)
    known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    names = {each.arg for each in arguments(node)}.intersection(known).difference(code.co_cellvars, _set_in(node))
    finder = _Finder(names, own and "torch" not in (*code.co_varnames, *code.co_cellvars, *code.co_freevars))
    for statement in node.body if isinstance(node.body, list) else []:
        finder.visit(statement)
    return finder.uses


class _Finder(ast.NodeVisitor):
    """Finds what is done with variables."""

    def __init__(self, names: set[str], has_torch: bool) -> None:
        self.uses: dict[str, list[_Use]] = {name: [] for name in names}
        self._has_torch, self._loops = has_torch, 0

    def visit(self, node: ast.AST) -> None:
        is_loop = isinstance(node, _LOOPS)
        self._loops += is_loop
        if not self._is_known(node):
            if isinstance(node, ast.Name):
                self.uses.pop(node.id, None)
            super().generic_visit(node)
        self._loops -= is_loop

    def _is_known(self, node: ast.AST) -> bool:
        """Visits the parts of an expression that uses arrays as they may be used."""
        match node:
            case ast.Subscript(value=owner, slice=key):
                parts = key.elts if isinstance(key, ast.Tuple) else [key]
                arrays = [part for part in parts if isinstance(part, ast.Name) and part.id in self.uses]
                self._note(arrays, node, owner)
                rest = [owner, *(part for part in parts if part not in arrays)]
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="torch"), attr=made), args=[ast.Name() as data, *more]
            ) if made in _MADE and self._has_torch and data.id in self.uses:
                self._note([data], node, None)
                rest = [*more, *(each.value for each in node.keywords)]
            case ast.Attribute(value=ast.Name(id=name), attr=attribute, ctx=ast.Load()) if attribute in _METADATA:
                rest = [] if name in self.uses else [node.value]
            case _:
                return False
        for each in rest:
            self.visit(each)
        return True

    def _note(self, arrays: list[ast.Name], node: ast.expr, owner: ast.expr | None) -> None:
        for array in arrays:
            self.uses[array.id].append(_Use(position_of(node), owner, self._loops == 0))
