"""Expressions of a function whose values nothing but its caller gets: they stand in a ``return``, or go into variables
and containers that the function only returns.

    logs = {"loss": loss.item()}
    logs["norm"] = norm.item()
    logs.update(self.evaluate(batch))
    return logs, [part.item() for part in parts]
"""

from __future__ import annotations

import ast
import inspect
import types
from collections.abc import Iterator
from typing import Any, TypeGuard

from . import _introspect
from ._identity import by_identity
from ._sources import Function, Position, names_in, node_of, position_in, position_of

AS_IT_IS = "as it is"
AS_FLOAT = "as a float"
#: Kinds of code that gives its result later, or piece by piece.
DEFERRED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_COMPREHENSIONS = ("<listcomp>", "<dictcomp>")  # functions of their own until Python 3.11
#: Entries of the groups of an optimizer that may be returned when a scheduler has set them.
RATES = ("lr", "initial_lr", "max_lr", "min_lr", "momentum", "max_momentum", "base_momentum", "weight_decay")


def how_returned(frame: types.FrameType) -> str:
    """How the result of the call that a frame makes now is returned, if that is all that the frame's function does with
    it: :data:`AS_IT_IS`, or :data:`AS_FLOAT`. Otherwise empty."""
    return _calls(function_of(frame).f_code).get(position_in(frame), "")


def called(frame: types.FrameType) -> Any:
    """What a frame calls now, if all that the frame's function does with the result is to return it, or what is in it.
    None if the code does not say so, or finds what it calls in another way than by names."""
    function = _returned_calls(function_of(frame).f_code).get(position_in(frame))
    match function:
        case ast.Name(id=name):
            return _variable(frame, name)
        case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[], keywords=[]), attr=name):
            first = frame.f_code.co_varnames[:1]
            owner, holder = frame.f_locals.get("__class__"), frame.f_locals.get(first[0]) if first else None
            return _introspect.inherited(holder, owner, name)
        case ast.Attribute(value=inner, attr=name) if names := names_in(inner):
            holder = _variable(frame, names[0])
            for each in (*names[1:], name):
                holder = _introspect.attribute(holder, each)
            return holder
    return None


def _variable(frame: types.FrameType, name: str) -> Any:
    known = frame.f_locals
    return known[name] if name in known else frame.f_globals.get(name)


def attribute_set(frame: types.FrameType) -> tuple[Any, str] | None:
    """The object and the attribute that the result of the call which a frame makes now goes into, if it goes nowhere
    else: ``self.loss = loss.item()``, ``self.logs = {"loss": loss.item()}``."""
    outer = function_of(frame)
    found = _set_attributes(outer.f_code).get(position_in(frame))
    if found is None:
        return None
    (name, *names), attribute = found
    known = outer.f_locals
    holder = known[name] if name in known else outer.f_globals.get(name)
    for name in names:
        own: dict[str, Any] = _introspect.own(holder) or {}
        holder = own.get(name, (own.get("_modules") or {}).get(name))  # as modules hold modules
    return holder, attribute


def gives_rates(frame: types.FrameType) -> bool:
    """Whether a frame reads ``get_last_lr`` of something now, to call it and return what it gives, or an entry of that.
    Or it reads ``param_groups``, to return an entry of a group."""
    return position_in(frame) in _rates(function_of(frame).f_code)


def function_of(frame: types.FrameType) -> types.FrameType:
    """The frame of the function that a comprehension stands in, or the frame itself."""
    while frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
        if not any(part is frame.f_code for part in frame.f_back.f_code.co_consts):
            break
        frame = frame.f_back
    return frame


@by_identity
def _calls(code: types.CodeType) -> dict[Any, str]:
    """Where, in the source of a function, calls stand whose results it only returns, and how."""
    return dict(_found(code))


@by_identity
def _returned_calls(code: types.CodeType) -> dict[Position, ast.expr]:
    """What a function calls whose results it only returns, by where the calls stand in its source."""
    return {position_of(place): place.func for place in _only_returned(code) if isinstance(place, ast.Call)}


@by_identity
def only_returns_groups(code: types.CodeType) -> bool:
    """Whether a function reads ``param_groups`` only to return entries of groups."""
    node = node_of(code)
    if node is None:
        return False
    reads = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and each.attr == "param_groups"]
    return bool(reads) and all(position_of(each) in _rates(code) for each in reads)


@by_identity
def _rates(code: types.CodeType) -> frozenset[Any]:
    """Where a function reads ``get_last_lr`` or ``param_groups`` only to return numbers from there."""
    found = set()
    for place in _only_returned(code):
        entry, key = (place.value, place.slice) if isinstance(place, ast.Subscript) else (place, None)
        match entry:
            case ast.Call(func=ast.Attribute(attr="get_last_lr") as read, args=[], keywords=[]):
                if key is None or _is_written(key):
                    found.add(position_of(read))
            case ast.Subscript(value=ast.Attribute(attr="param_groups") as read, slice=index):
                if _is_written(index) and isinstance(key, ast.Constant) and key.value in RATES:
                    found.add(position_of(read))
    return frozenset(found)


@by_identity
def _set_attributes(code: types.CodeType) -> dict[Any, tuple[tuple[str, ...], str]]:
    """Where, in the source of a function, reads of numbers stand that go into an attribute: by which names the object
    is found, and which attribute."""
    node = node_of(code)
    found = {}
    for each in ast.walk(node) if node is not None else ():
        match each:
            case ast.Assign(targets=[ast.Attribute(value=holder, attr=attribute)], value=value) if names := names_in(
                holder
            ):
                found.update({position_of(place): (names, attribute) for place in _places(value) if _is_item(place)})
    return found


def _is_written(node: ast.expr) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def _only_returned(code: types.CodeType) -> Iterator[ast.expr]:
    """The expressions whose values nothing but the caller of a function gets."""
    node = None if code.co_flags & DEFERRED else node_of(code)
    if node is None:
        return
    returned = list(_returned(node))
    yield from returned
    put = [place for values in filled_by(node, code).values() for value in values for place in _places(value)]
    yield from put
    for value in _assigned(node, code, [*returned, *put]):
        yield from _places(value)


def _found(code: types.CodeType) -> Iterator[tuple[Position, str]]:
    inside = [const for const in code.co_consts if type(const) is types.CodeType]
    has_own_float = any("float" in (*c.co_varnames, *c.co_cellvars, *c.co_freevars) for c in (code, *inside))
    for place in _only_returned(code):
        if _is_item(place):
            yield position_of(place), AS_IT_IS
        elif _is_float(place) and not has_own_float:
            yield position_of(place), AS_FLOAT
            if len(place.args) == 1 and (_is_item(place.args[0]) or _is_array(place.args[0])):
                yield position_of(place.args[0]), AS_FLOAT


def _returned(node: Function) -> Iterator[ast.expr]:
    """The expressions whose values a function returns, as its result or in a place of it."""
    if isinstance(node, ast.Lambda):
        yield from _places(node.body)
        return
    pending: list[ast.AST] = list(ast.iter_child_nodes(node))
    while pending:
        each = pending.pop()
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            continue
        if isinstance(each, ast.Return):
            if each.value is not None:
                yield from _places(each.value)
            continue
        pending.extend(ast.iter_child_nodes(each))


def _places(value: ast.expr) -> Iterator[ast.expr]:
    """What a value is made of, where tuples, lists, dicts and comprehensions of these are written there."""
    pending = [value]
    while pending:
        match pending.pop():
            case ast.Tuple(elts=items) | ast.List(elts=items):
                pending += items
            case ast.Dict(keys=keys, values=items):
                for key, item in zip(keys, items, strict=True):
                    pending += [item] if key is not None else _emptied(item)
            case ast.Starred(value=item):
                pending += _emptied(item)
            case ast.IfExp(body=one, orelse=other):
                pending += (one, other)
            case ast.ListComp(elt=item) | ast.DictComp(value=item):
                pending.append(item)
            case place:
                yield place


def _emptied(value: ast.expr) -> list[ast.expr]:
    """A value of which only what is in it goes on: that of a call, or of a container that is written there. What a
    scheduler gives is none: it stands for a list."""
    match value:
        case ast.Call(func=ast.Attribute(attr="get_last_lr")):
            return []
        case ast.Call() | ast.Dict() | ast.Tuple() | ast.List():
            return [value]
    return []


# By these, code gets at its own variables without their names: as names of functions, and of attributes.
_SEES_VARIABLES = frozenset({"locals", "vars", "dir", "eval", "exec", "_getframe", "currentframe", "stack"})
_OF_FRAMES = frozenset({"_getframe", "currentframe", "f_locals", "tb_frame"})


def sees_variables(node: ast.AST) -> bool:
    """Whether a part of the source gets at variables without their names."""
    return (isinstance(node, ast.Name) and node.id in _SEES_VARIABLES) or (
        isinstance(node, ast.Attribute) and node.attr in _OF_FRAMES
    )


def _own_names(code: types.CodeType) -> set[str]:
    """Variables of a function that no function inside sees."""
    return set(code.co_varnames).difference(code.co_cellvars)


def _assigned(node: Function, code: types.CodeType, returned: list[ast.expr]) -> Iterator[ast.expr]:
    """The expressions whose values go into variables that the function does nothing with from then on but return
    them. ``returned``: what is returned otherwise."""
    every = list(ast.walk(node))
    if any(map(sees_variables, every)):
        return
    own = _own_names(code)
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
        if isinstance(name, ast.Tuple | ast.List):
            return all(only_returns(each, since) for each in name.elts)
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
                yield from [item] if all(isinstance(name, ast.Name) for name in into) else _emptied(item)


def filled_by(node: Function, code: types.CodeType) -> dict[str, list[ast.expr]]:
    """Lists and dicts that a function makes, fills and returns, and does nothing else with: the values that it puts
    there, by the names of its variables."""
    every = list(ast.walk(node))
    if any(map(sees_variables, every)):
        return {}
    given = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    given += bool(code.co_flags & inspect.CO_VARKEYWORDS)
    made: set[str] = set()
    values: dict[str, list[ast.expr]] = {}
    known = {id(place) for place in _returned(node)}
    for each in every:
        into = filled(each)
        if into is not None:
            name, value = into
            known.add(id(name))
            values.setdefault(name.id, []).append(value)
            if isinstance(name.ctx, ast.Store):
                made.add(name.id)
    found = made & _own_names(code).difference(code.co_varnames[:given])
    names = [each for each in every if isinstance(each, ast.Name) and id(each) not in known]
    while True:
        inside = {id(place) for name in found for value in values[name] for place in _places(value)}
        left = found.difference(each.id for each in names if id(each) not in inside)
        if left == found:
            return {name: values[name] for name in found}
        found = left


def filled(statement: ast.AST) -> tuple[ast.Name, ast.expr] | None:
    """The variable that a statement makes a list or dict, or puts a value into, and what it puts there."""
    match statement:
        case ast.Expr(
            ast.Call(func=ast.Attribute(value=ast.Name() as name, attr="update" | "extend"), args=[value], keywords=[])
        ) if _emptied(value):
            return name, value
        case (
            ast.Assign(targets=[ast.Name() as name], value=ast.Dict() | ast.List() as value)
            | ast.AnnAssign(target=ast.Name() as name, value=ast.Dict() | ast.List() as value)
            | ast.Assign(targets=[ast.Subscript(value=ast.Name() as name)], value=value)
            | ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name() as name, attr="append"), args=[value], keywords=[]))
        ):
            return name, value
    return None


def _is_float(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "float"


def _is_array(node: ast.expr) -> TypeGuard[ast.Call]:
    match node:
        case ast.Call(func=ast.Attribute(attr="numpy"), args=[], keywords=[]):
            return True
    return False


def _is_item(node: ast.expr) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "item"
