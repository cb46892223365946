"""The outermost statements of a function, those of blocks among them: a step is parted between them.

A block under ``if`` becomes its answer, kept in a variable, and each of its statements under an ``if`` of its own. A
block under ``with`` becomes a statement that enters it, its statements, and one that leaves it.
"""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Sequence
from typing import Any

from . import _frames
from ._identity import by_identity
from ._return_places import DEFERRED, sees_variables
from ._rewrite import is_private, loaded, may_swallow, mentioned, names_set, plain_function, stored
from ._sources import Function, node_of

ENTER = "what enters a block"  # no variable of a script is named so, nor any of these
_FLAG = "whether the block at "
_ENTERED = "what the block at "
_KEPT = "what is kept at "
_OPS = frozenset({"backward", "step", "zero_grad"})  # methods that run ops, in some calls at least


@by_identity
def body_of(code: types.CodeType) -> list[ast.stmt]:
    """The outermost statements of a function that can be halved; none of others. Those of a block under an `if` or a
    `with` that trains are among them: each under an `if` of its own, or between one that enters the block and one that
    leaves it. :func:`assembled` makes whole blocks of these again."""
    node = None if code.co_flags & DEFERRED else node_of(code)
    if node is None or not isinstance(node.body, list):
        return []
    every = [each for statement in node.body for each in ast.walk(statement)]
    if any(map(sees_variables, every)) or any(map(is_private, every)):
        return []
    return [each for statement in node.body for each in _parted(statement)]


def source_of(function: Any) -> tuple[types.FunctionType, Function, list[ast.stmt]] | None:
    """The function that a captured function runs in the end, its source and its outermost statements, if it can be
    rewritten."""
    plain = plain_function(function)
    node = None if plain is None else node_of(plain.__code__)
    body = [] if plain is None else body_of(plain.__code__)
    return None if plain is None or node is None or not body else (plain, node, body)


def _parted(statement: ast.stmt) -> list[ast.stmt]:
    """A statement as several, if it is a block with ops in it, and more beside them."""
    if isinstance(statement, ast.With):
        return _opened(statement)
    if not isinstance(statement, ast.If) or not any(map(runs_ops, statement.body[:-1])):
        return [statement]
    flag = f"{_FLAG}{statement.lineno}:{statement.col_offset} runs"
    parts = [answered(flag, statement.test, statement), *(under(flag, each) for each in statement.body)]
    return [*parts, *(under(flag, each, answer=False) for each in statement.orelse)]


def answered(flag: str, question: ast.expr, at: ast.stmt) -> ast.stmt:
    """A statement that keeps the answer to a question in a variable."""
    answer = ast.IfExp(question, ast.Constant(True), ast.Constant(False))
    return ast.fix_missing_locations(ast.copy_location(ast.Assign([stored(flag)], answer), at))


def under(flag: str, statement: ast.stmt, *, answer: bool = True) -> ast.stmt:
    """A statement that runs only if a variable holds this answer."""
    test = loaded(flag) if answer else ast.UnaryOp(ast.Not(), loaded(flag))
    return ast.fix_missing_locations(ast.copy_location(ast.If(test, [statement], []), statement))


def runs_ops(statement: ast.stmt) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in _OPS for each in ast.walk(statement))


def flags(body: list[ast.stmt]) -> set[str]:
    """The variables in statements that no script has."""
    return {name for name in mentioned(body) if name.startswith((_FLAG, _ENTERED, _KEPT))}


def flags_set(body: list[ast.stmt]) -> set[str]:
    """The same of variables that the statements set."""
    return {name for name in names_set(body) if name.startswith(_FLAG)}


class Entered:
    """A manager whose block has begun."""

    def __init__(self, manager: Any) -> None:
        self._leave = type(manager).__exit__
        self._manager = manager
        self.may_swallow = _frames.may_swallow(manager)
        """Whether it may let no error pass."""
        self.value = type(manager).__enter__(manager)

    def __enter__(self) -> Any:
        return self.value

    def __exit__(self, *error: Any) -> Any:
        return self._leave(self._manager, *error)

    def fail(self) -> None:
        """Leaves the block since an error is on its way."""
        self._leave(self._manager, *sys.exc_info())


def _opened(statement: ast.With) -> list[ast.stmt]:
    """A block under `with` as the statements in it, between one that enters it and one that leaves it. What enters it
    stays out, where the manager has been entered already."""
    body, (item, *more) = statement.body, statement.items
    is_entered = isinstance(item.context_expr, ast.Name) and item.context_expr.id.startswith(_ENTERED)
    is_fit = not may_swallow(statement) and len(body) > 1
    if more or not (is_entered or (is_fit and any(map(runs_ops, body)))):
        return [statement]
    name = f"{_ENTERED}{statement.lineno}:{statement.col_offset} has entered"
    enters = ast.Assign([stored(name)], item.context_expr)
    if item.optional_vars is not None:
        enters.targets.append(item.optional_vars)
    leaves = ast.Expr(loaded(name))
    enters.enters, leaves.leaves = name, name  # type: ignore[attr-defined]
    ast.copy_location(enters, statement)
    ast.copy_location(leaves, statement)
    leaves.lineno, leaves.col_offset = statement.end_lineno or 0, statement.end_col_offset or 0
    if is_entered:
        leaves.value = item.context_expr
        leaves.leaves = item.context_expr.id  # type: ignore[attr-defined]
    inner = [part for each in body for part in ([each] if isinstance(each, ast.With) else _parted(each))]
    return [*([] if is_entered else [ast.fix_missing_locations(enters)]), *inner, leaves]


def leaves_more(body: list[ast.stmt]) -> bool:
    """Whether statements leave a block that they do not enter."""
    opened = ""
    for each in body:
        opened = getattr(each, "enters", opened)
        if hasattr(each, "leaves"):
            if each.leaves != opened:
                return True
            opened = ""
    return False


def entered(body: list[ast.stmt]) -> str:
    """The variable with the manager of a block which statements enter and do not leave; empty if there is none."""
    opened = ""
    for each in body:
        opened = getattr(each, "enters", "") or ("" if hasattr(each, "leaves") else opened)
    return opened


def assembled(body: list[ast.stmt]) -> list[ast.stmt]:
    """Statements of :func:`body_of` as Python runs them. What leaves a block that it does not enter leaves that of the
    manager in a variable; what enters a block that it does not leave puts the manager there."""
    made: list[ast.stmt] = []
    before: list[ast.stmt] = []  # the block
    enters: Any = None
    for each in body:
        if hasattr(each, "enters"):
            enters, before, made = each, made, []
        elif hasattr(each, "leaves"):
            manager, *targets = [each.value] if enters is None else [enters.value, *enters.targets[1:]]  # type: ignore[attr-defined]
            block = ast.With([ast.withitem(manager, *targets)], made or [ast.Pass()])
            made = [*before, ast.copy_location(block, enters or each)]
            enters, before = None, []
        else:
            made.append(each)
    if enters is not None:
        made = [*before, *_entering(enters, made)]
    return [ast.fix_missing_locations(each) for each in made]


def _entering(enters: Any, inner: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that enter a block, and those in it, which leave it only if they raise."""
    name = enters.enters
    made: list[ast.stmt] = [ast.Assign([stored(name)], ast.Call(loaded(ENTER), [enters.value], []))]
    for target in enters.targets[1:]:
        made.append(ast.Assign([target], ast.Attribute(loaded(name), "value", ast.Load())))
    if inner:
        fails = ast.Expr(ast.Call(ast.Attribute(loaded(name), "fail", ast.Load()), [], []))
        made.append(ast.Try(inner, [ast.ExceptHandler(loaded("BaseException"), None, [fails, ast.Raise()])], [], []))
    return [ast.copy_location(each, enters) for each in made]


def kept_at(node: ast.stmt, number: int) -> str:
    """A variable for something that a statement reads."""
    return f"{_KEPT}{node.lineno}:{node.col_offset}:{number}"


def keeps(name: str, value: ast.expr, at: ast.stmt, read_by: Sequence[str] = ()) -> list[ast.stmt]:
    """Statements that keep a value in a variable, a tensor as a copy. ``read_by``: nothing is done with it but to read
    it by these methods, so that it needs no graph; what is no tensor is read at once, and what they raise for."""
    copy = _called(name, ("detach", "clone") if read_by else ("clone",))
    others: list[ast.stmt] = [ast.Assign([stored(name)], _called(name, read_by))] if read_by else []
    test = _is_tensor(name)
    if "numpy" in read_by and "detach" not in read_by:  # which a tensor with a graph has not
        has_none = ast.UnaryOp(ast.Not(), ast.Attribute(loaded(name), "requires_grad", ast.Load()))
        test = ast.BoolOp(ast.And(), [test, has_none])
    every = [ast.Assign([stored(name)], value), ast.If(test, [ast.Assign([stored(name)], copy)], others)]
    return [ast.fix_missing_locations(ast.copy_location(each, at)) for each in every]


def read_of_kept(name: str, read_by: Sequence[str], otherwise: ast.expr | None = None) -> ast.expr:
    """What these methods read of what :func:`keeps` has kept for them. ``otherwise``: what takes the place of what is
    no tensor, if it is not kept as it is to be."""
    late = [each for each in read_by if each != "detach"]
    return ast.IfExp(_is_tensor(name), _called(name, late), otherwise or loaded(name))


def _is_tensor(name: str) -> ast.expr:
    return ast.Call(loaded("hasattr"), [loaded(name), ast.Constant("detach")], [])


def _called(name: str, methods: Sequence[str]) -> ast.expr:
    """What methods give that are called one after the other, the first of what is in a variable."""
    value: ast.expr = loaded(name)
    for method in methods:
        value = ast.Call(ast.Attribute(value, method, ast.Load()), [], [])
    return value
