"""Slices of data in the middle of a turn, taken at its begin: ``yb = y[i:i + size]`` behind ``out = model(xb)``, or
``loss_of(model(x[i]), y[i])``.

The places of a slice change from turn to turn. So the part that is recorded must begin behind all of them, and take the
slices. A slice may be taken early if the function sets neither its tensor nor, from there on, the numbers in it, and
does nothing else with the tensor until then. It has the same memory then. Each call makes sure that it is a slice of a
plain tensor without a graph, and that the tensor has not been moved meanwhile (``y.data = ...`` in a function); else it
is taken in its place.
"""

from __future__ import annotations

import ast
import copy
import itertools
import linecache
import re
import types
import weakref
from collections.abc import Callable, Mapping, Set
from typing import Any

import torch

from . import _blocks, _rewrite

_EARLY = "what takes slices early"  # no variable of a script is named so, nor any of these
_LATE, _MOVED = "what takes slices late", "whether a tensor has moved"
_SLICE, _PUT_OFF = "the slice at {}", "whether the slice at {} is put off"
_PARTS = (
    ast.Slice | ast.Tuple | ast.Constant | ast.Name | ast.BinOp | ast.UnaryOp | ast.operator | ast.unaryop | ast.Load
)
_NUMBERS = (int, types.NoneType, types.EllipsisType)
_SIMPLE = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr | ast.Return


class EarlySlices:
    """The slices in a function that may be taken early, seen in calls of it."""

    def __init__(self, function: types.FunctionType, body: list[ast.stmt]) -> None:
        self._body = body
        code = function.__code__
        self._arguments = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
        self._set = _rewrite.names_set(body)
        inner = [each for each in _rewrite.walk(body) if isinstance(each, _rewrite.LATER)]
        self._seen_inside = {name for each in inner for name in _rewrite.seen_by(each)}
        # Where they may be taken at the earliest, and where they stand.
        self._places: dict[ast.Subscript, tuple[int, int]] = {}
        for at, statement in enumerate(body):
            for each in _slices(statement):
                begin = self._begin(each, at)
                if begin is not None and self._may(each, begin, at):
                    self._places[each] = begin, at
        own = self._arguments | self._set
        globals_ = {name for each in self._places for name in _names_of(each)}.difference(own, code.co_freevars)
        text = "".join(linecache.getlines(code.co_filename)) if globals_ else ""
        set_ = {name for name in globals_ if re.search(rf"\bglobal\b[^\n#]*\b{re.escape(name)}\b", text)}
        self._places = {each: at for each, at in self._places.items() if set_.isdisjoint(_names_of(each))}

    def _begin(self, node: ast.Subscript, at: int) -> int | None:
        """The first statement before which all numbers of a slice are set; None if it is not known that they are."""
        names = _numbers_of(node)
        setting = [place for place in range(at) if not names.isdisjoint(_rewrite.names_set([self._body[place]]))]
        begin = setting[-1] + 1 if setting else 0
        known = self._arguments | _rewrite.set_for_sure(self._body[:begin])
        return begin if names & self._set <= known else None

    def _may(self, node: ast.Subscript, begin: int, at: int) -> bool:
        """Whether a slice is one of what the function does not set, at places that change, and stands behind more than
        other slices."""
        numbers, own = _numbers_of(node), self._arguments | self._set
        if _base(node) in own or numbers.isdisjoint(own) or not self._seen_inside.isdisjoint(numbers):
            return False
        between = self._body[begin:at]
        if any(_uses_otherwise(each, _base(node)) for each in (*between, self._body[at])):
            return False
        return any(map(_calls, [*between, _without(self._body[at], node)]))

    def see(self, place: int, variables: Mapping[str, Any]) -> None:
        """A statement is about to run: slices of what is no plain tensor stay where they are, and so do those at other
        places than numbers."""
        for each in [each for each, (_, at) in self._places.items() if at == place]:
            numbers = [variables.get(name) for name in _numbers_of(each)]
            if not _is_plain(variables.get(_base(each))) or not all(map(_is_number, numbers)):
                del self._places[each]

    def taken(self, function: Any) -> Any:
        """The function with these slices taken early; None if there are none, or it cannot be made."""
        source = _blocks.source_of(function)
        if source is None or not self._places:
            return None
        plain, node, body = source
        before: dict[int, list[ast.stmt]] = {}
        number = next(_functions)
        for each, (begin, _) in self._places.items():
            before.setdefault(begin, []).append(_take(each, number))
        instead = _Instead({*map(_place_in_text, self._places)}, number)
        new = [instead.visit(copy.deepcopy(each)) for each in body]
        every = [part for at, each in enumerate(new) for part in (*before.get(at, ()), each)]
        made = _rewrite.made_of(
            plain,
            _rewrite.function_with(node, _blocks.assembled(every), body[0]),
            more={name: types.CellType(each) for name, each in _TAKERS.items()},
        )
        return None if made is None else _rewrite.in_place(function, made)


# Of what each slice was taken early, its key, and where that lay; by what names the slice and its function.
_taken: dict[tuple[int, str], tuple[Callable[[], Any], Any, Any]] = {}
_functions = itertools.count()


class _Early:
    def __getitem__(self, given: tuple[Any, ...]) -> tuple[Any, bool]:
        """A slice of a plain tensor, and that it is not put off; of anything else, that it is."""
        function, slice_, value, *parts = given
        key = tuple(parts) if len(parts) > 1 else parts[0]
        if _is_plain(value) and all(map(_is_number, (each for part in parts for each in _numbers(part)))):
            try:
                found = value[key]
            except Exception:  # which comes where the slice stands
                pass
            else:
                _taken[function, slice_] = weakref.ref(value), key, _place_of(value)
                return found, False
        _taken[function, slice_] = lambda: value, key, None
        return None, True


def _late(function: int, slice_: str) -> Any:
    """A slice that was put off, or of a tensor that has moved."""
    of, key, _ = _taken[function, slice_]  # which stays: a call that is verified comes here twice
    return of()[key]


def _has_moved(function: int, slice_: str) -> bool:
    """Whether the tensor of a slice has moved since that was taken."""
    of, _, place = _taken[function, slice_]
    return bool(_place_of(of()) != place)


def _place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, and how."""
    storage = tensor.untyped_storage()
    return storage._cdata, storage.data_ptr(), tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def _numbers(key: Any) -> tuple[Any, ...]:
    return (key.start, key.stop, key.step) if type(key) is slice else (key,)


def _is_number(value: Any) -> bool:
    """Whether a value is a part of a key: Python's integers and NumPy's, and what stands for the rest of a dim."""
    kind = type(value)
    return kind in _NUMBERS or (kind.__module__, kind.__name__) in (("numpy", "int64"), ("numpy", "int32"))


def _is_plain(value: Any) -> bool:
    return type(value) is torch.Tensor and not value.requires_grad


def _base(node: ast.Subscript) -> str:
    return node.value.id if isinstance(node.value, ast.Name) else ""


def _slices(statement: ast.stmt) -> list[ast.Subscript]:
    """The slices of variables in a simple statement."""
    if not isinstance(statement, _SIMPLE) or any(isinstance(each, ast.NamedExpr) for each in ast.walk(statement)):
        return []
    found: list[ast.Subscript] = []
    pending: list[ast.AST] = [statement]
    while pending:
        each = pending.pop()
        if isinstance(each, _rewrite.LATER):
            continue
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Load) and _base(each) and _is_key(each.slice):
            found.append(each)
        pending.extend(ast.iter_child_nodes(each))
    return found


def _is_key(key: ast.expr) -> bool:
    return all(isinstance(each, _PARTS) for each in ast.walk(key))


def _numbers_of(node: ast.Subscript) -> set[str]:
    """The variables in the key of a slice."""
    return {each.id for each in ast.walk(node.slice) if isinstance(each, ast.Name)}


def _names_of(node: ast.Subscript) -> set[str]:
    return {_base(node), *_numbers_of(node)}


def _uses_otherwise(statement: ast.stmt, name: str) -> bool:
    """Whether a statement does more with a variable than to take parts of it, and to ask how large it is."""
    allowed: set[int] = set()
    for each in ast.walk(statement):
        match each:
            case ast.Subscript(value=ast.Name() as value, ctx=ast.Load()):
                allowed.add(id(value))
            case ast.Call(ast.Name("len"), [ast.Name() as value]):
                allowed.add(id(value))
            case ast.Attribute(value=ast.Name() as value, attr="shape" | "size"):
                allowed.add(id(value))
    names = (each for each in ast.walk(statement) if isinstance(each, ast.Name) and each.id == name)
    return any(id(each) not in allowed for each in names)


def only_takes(statement: ast.stmt) -> bool:
    """Whether a statement only takes parts of variables."""
    return isinstance(statement, ast.Assign) and not _calls(statement)


def _calls(node: ast.AST) -> bool:
    return any(isinstance(each, ast.Call) for each in ast.walk(node))


def _without(statement: ast.stmt, node: ast.Subscript) -> ast.stmt:
    """A statement, but none that only takes a slice."""
    value = getattr(statement, "value", None)
    return ast.Pass() if value is node else statement


def _place_in_text(node: ast.Subscript) -> str:
    """What names a slice in its function."""
    return f"{node.lineno}:{node.col_offset}"


def _take(node: ast.Subscript, function: int) -> ast.stmt:
    """The statement that takes a slice early."""
    place = _place_in_text(node)
    key = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    named: list[ast.expr] = [ast.Constant(function), ast.Constant(place)]
    given = ast.Tuple([*named, *copy.deepcopy([node.value, *key])], ast.Load())
    target = ast.Tuple([_rewrite.stored(name.format(place)) for name in (_SLICE, _PUT_OFF)], ast.Store())
    made = ast.Assign([target], ast.Subscript(_rewrite.loaded(_EARLY), given, ast.Load()))
    return ast.fix_missing_locations(ast.copy_location(made, node))


class _Instead(ast.NodeTransformer):
    """Puts what was taken early in the place of slices."""

    def __init__(self, places: Set[str], function: int) -> None:
        self._places, self._function = places, function

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        place = _place_in_text(node)
        if not _base(node) or place not in self._places:
            return self.generic_visit(node)
        named = [ast.Constant(self._function), ast.Constant(place)]
        late, moved = (ast.Call(_rewrite.loaded(name), [*named], []) for name in (_LATE, _MOVED))
        taken, put_off = (_rewrite.loaded(name.format(place)) for name in (_SLICE, _PUT_OFF))
        made = ast.IfExp(ast.BoolOp(ast.Or(), [put_off, moved]), late, taken)
        return ast.fix_missing_locations(ast.copy_location(made, node))


_TAKERS = {_EARLY: _Early(), _LATE: _late, _MOVED: _has_moved}
