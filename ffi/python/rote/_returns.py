"""Numbers that a step reads from tensors only to return them: ``return loss.item()``, ``return float(loss)``.

Nothing between the read and the caller can use such a number. This is proven from the code: the captured function
itself calls ``.item()`` or ``float()`` inside a ``return`` statement, in a place of a tuple, list or dict that is
written there, or as the whole result; or it puts the number into a variable that it only returns. While the step is
recorded, a :class:`Read` stands in that place. A number that goes through ``float()`` is itself there, and is known
again by its identity. The plan returns the tensor, and a replay reads the number from it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor, Replicate

from ._frames import TORCH
from ._identity import by_identity
from ._sources import node_of

_DEFERRED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
# Functions of PyTorch that call the captured function and return what it returns, such as `torch.no_grad()`.
_PASSING = f"{TORCH}utils/_contextlib.py"


class Read:
    """A number that is returned, with a tensor of its own that holds it."""

    __slots__ = ("tensor", "value")

    def __init__(self, tensor: torch.Tensor, value: Any) -> None:
        self.tensor = tensor
        self.value = value


def source_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The plain tensor that a read finds its number in, if that is simple."""
    if type(tensor) is DTensor and all(isinstance(placement, Replicate) for placement in tensor.placements):
        tensor = tensor._local_tensor
    return tensor if type(tensor) is torch.Tensor and tensor.numel() == 1 else None


def how_returned(frame: types.FrameType, step: Any, runner: types.CodeType) -> str:
    """How the result of the call that a frame makes now is returned, if that is all that the frame's function does with
    it, and what it returns is the result of ``step``, which ``runner`` has called: :data:`AS_IT_IS`, or
    :data:`AS_FLOAT`. Otherwise empty."""
    inner, caller = frame, frame.f_back
    while caller is not None and caller.f_code.co_filename == _PASSING:
        if not _runs(caller.f_locals.get("func"), inner.f_code):
            return ""
        inner, caller = caller, caller.f_back
    if caller is None or caller.f_code is not runner or not _runs(step, inner.f_code):
        return ""
    positions = list(frame.f_code.co_positions())
    at = frame.f_lasti // 2
    how = _returned_calls(frame.f_code).get(positions[at], "") if at < len(positions) else ""
    return how if how != AS_FLOAT or frame.f_globals.get("float", float) is float else ""


def code_of(function: Any) -> types.CodeType | None:
    """The code whose result a call of a captured function gives, if nobody sees it before the caller; none of a
    generator."""
    while True:
        if type(function) is functools.partial:
            function = function.func
        elif type(function) is types.MethodType:
            function = function.__func__
        elif type(function) is not types.FunctionType:
            return None
        elif function.__code__.co_filename == _PASSING:
            function = inspect.getclosurevars(function).nonlocals.get("func")
        else:
            code = function.__code__
            return None if code.co_flags & _DEFERRED else code


def _runs(function: Any, code: types.CodeType) -> bool:
    """Whether calling a function runs code and gives what this returns to the caller, and to nobody else (a cache)."""
    while type(function) is functools.partial:
        function = function.func
    if type(function) is types.MethodType:
        function = function.__func__
    return type(function) is types.FunctionType and function.__code__ is code


AS_IT_IS = "as it is"
AS_FLOAT = "as a float"


@by_identity
def _returned_calls(code: types.CodeType) -> dict[Any, str]:
    """Where, in the source of a function, calls stand whose results it only returns, and how."""
    return dict(_found(code))


def _found(code: types.CodeType) -> Iterator[tuple[Any, str]]:
    if code.co_flags & _DEFERRED:
        return
    node = node_of(code)
    if node is None:
        return
    returned = list(_places(node))
    has_own_float = "float" in (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    for place in (*returned, *_assigned(node, code, returned)):
        if _is_item(place):
            yield _position(place), AS_IT_IS
        elif _is_float(place) and not has_own_float:
            yield _position(place), AS_FLOAT
            if len(place.args) == 1 and _is_item(place.args[0]):
                yield _position(place.args[0]), AS_FLOAT


def _places(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions whose values a function returns, as its result or in a place of it."""
    pending: list[ast.AST] = list(ast.iter_child_nodes(node)) if not isinstance(node, ast.Lambda) else []
    places: list[ast.expr | None] = [node.body] if isinstance(node, ast.Lambda) else []
    while pending:
        each = pending.pop()
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(each, ast.Return):
            places.append(each.value)
            continue
        pending.extend(ast.iter_child_nodes(each))
    while places:
        place = places.pop()
        if isinstance(place, ast.Tuple | ast.List):
            places.extend(place.elts)
        elif isinstance(place, ast.Dict):
            places.extend(place.values if None not in place.keys else ())
        elif isinstance(place, ast.IfExp):
            places += (place.body, place.orelse)
        elif place is not None:
            yield place


# By these, code gets at its own variables without their names: as names of functions, and of attributes.
_SEES_VARIABLES = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"})
_OF_FRAMES = frozenset({"_getframe", "currentframe", "f_locals", "tb_frame"})


def _sees_variables(node: ast.AST) -> bool:
    return (isinstance(node, ast.Name) and node.id in _SEES_VARIABLES) or (
        isinstance(node, ast.Attribute) and node.attr in _OF_FRAMES
    )


def _assigned(node: ast.AST, code: types.CodeType, returned: list[ast.expr]) -> Iterator[ast.expr]:
    """The expressions whose values go into variables that the function does nothing with from then on but return
    them."""
    every = list(ast.walk(node))
    if any(map(_sees_variables, every)):
        return
    own = set(code.co_varnames).difference(code.co_cellvars)  # what functions inside see too is left out
    in_places = set(map(id, returned))
    repeated = {id(inner) for each in every if isinstance(each, ast.For | ast.While) for inner in ast.walk(each)}
    last_uses: dict[str, tuple[int, int]] = {}  # in the text
    assignments: list[tuple[ast.stmt, list[ast.expr], ast.expr]] = []

    def uses(name: str, at: ast.expr | ast.stmt) -> None:
        last_uses[name] = max(last_uses.get(name, (0, 0)), (at.lineno, at.col_offset))

    for each in every:
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load) and id(each) not in in_places:
            uses(each.id, each)
        elif isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name):
            uses(each.target.id, each)
        elif isinstance(each, ast.Assign):
            assignments.append((each, each.targets, each.value))
        elif isinstance(each, ast.AnnAssign) and each.value is not None:
            assignments.append((each, [each.target], each.value))

    def only_returns(name: ast.expr, since: ast.stmt) -> bool:
        if not isinstance(name, ast.Name) or name.id not in own:
            return False
        last = last_uses.get(name.id)
        end = since.end_lineno or 0, since.end_col_offset or 0
        return last is None or (last < end and id(since) not in repeated)

    for statement, targets, value in assignments:
        pairs = [(targets, value)]
        if isinstance(value, ast.Tuple) and len(targets) == 1 and isinstance(targets[0], ast.Tuple):
            names, values = targets[0].elts, value.elts
            starred = any(isinstance(each, ast.Starred) for each in (*names, *values))
            pairs = [] if starred else [([name], item) for name, item in zip(names, values, strict=False)]
        for into, item in pairs:
            if all(only_returns(name, statement) for name in into):
                yield item


def _is_float(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float"


def _is_item(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"


def _position(node: ast.expr | None) -> Any:
    assert node is not None
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def plain(result: Any) -> Any:
    """A result with the numbers in their places."""
    return _with(result, lambda part: part.value if isinstance(part, Read) else part)


def replaced(result: Any, new: Callable[[Any], Any]) -> Any:
    """A result with other parts in the places of tuples, lists and dicts."""
    return _with(result, new)


def placed(result: Any, reads: list[Read]) -> Any:
    """A result with the reads in the places of their numbers. Those that it has are taken off the list."""
    found: list[Read] = []

    def read_of(part: Any) -> Any:
        read = next((read for read in reads if read.value is part), None)
        if read is None:
            return part
        found.append(read)
        return read

    if reads:
        result = _with(result, read_of)
        reads[:] = [read for read in reads if read not in found]
    return result


def _with(result: Any, replaced: Callable[[Any], Any]) -> Any:
    """A result in which some parts are replaced; where none is, it stays itself."""
    if type(result) in (tuple, list):
        items = [_with(item, replaced) for item in result]
        same = all(one is other for one, other in zip(items, result, strict=True))
        return result if same else type(result)(items)
    if type(result) is dict:
        entries = {key: _with(value, replaced) for key, value in result.items()}
        return result if all(entries[key] is value for key, value in result.items()) else entries
    return replaced(result)
