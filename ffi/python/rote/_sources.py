"""The source of the code that runs."""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
import types
from collections.abc import Iterator
from typing import NamedTuple

from ._identity import address, by_identity

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Chain = tuple[str, ...]  # of names: ("self", "step")
#: Begin and end of an expression in the source: lines, and columns.
Position = tuple[int | None, int | None, int | None, int | None]


def position_of(node: ast.expr) -> Position:
    """Where an expression stands."""
    return node.lineno, node.end_lineno, node.col_offset, node.end_col_offset


def position_at(code: types.CodeType, offset: int) -> Position:
    """Where the expression stands that the instruction at an offset is for."""
    return next(itertools.islice(code.co_positions(), offset // 2, None))


def position_in(frame: types.FrameType) -> Position:
    """Where the expression stands that a frame evaluates now."""
    return position_at(frame.f_code, frame.f_lasti)


@by_identity
def only_measured(code: types.CodeType) -> frozenset[str]:
    """The variables of others that a function uses for nothing but Python's `len(name)`, if `len` is no other function
    among its globals."""
    node = None if "len" in (*code.co_varnames, *code.co_cellvars, *code.co_freevars) else node_of(code)
    every = [] if node is None else list(ast.walk(node))
    calls = [each for each in every if isinstance(each, ast.Call) and isinstance(each.func, ast.Name)]
    measured = {id(each.args[0]) for each in calls if ast.unparse(each.func) == "len" and len(each.args) == 1}
    names = [each for each in every if isinstance(each, ast.Name)]
    others = {each.id for each in names if id(each) not in measured}
    return frozenset(each.id for each in names if id(each) in measured).difference(others)


def names_in(node: ast.AST | None) -> tuple[str, ...]:
    """The names in ``self.model.encoder``; none of another expression."""
    match node:
        case ast.Name(id=name):
            return (name,)
        case ast.Attribute(value=inner, attr=name) if names := names_in(inner):
            return (*names, name)
    return ()


def added_to(node: ast.AST) -> ast.expr | None:
    """What a statement adds to, or takes from: ``n += 1``, ``n = n - 1``."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add() | ast.Sub()):
            return target
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add() | ast.Sub())):
            return target if ast.unparse(target) == ast.unparse(left) else None
    return None


def arguments(node: Function) -> list[ast.arg]:
    """The arguments of a function. Those of functions in its defaults are none."""
    given = node.args
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *filter(None, (given.vararg, given.kwarg))]


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Code, and all code in it."""
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from nested(const)


# They set the state of a generator of random numbers, as functions of modules or methods of generators.
_SEEDING = frozenset({"seed", "manual_seed", "manual_seed_all", "seed_all", "set_state"})


@by_identity
def sets_generator(code: types.CodeType) -> str:
    """The name by which a function sets the state of a random number generator, if it does."""
    node = node_of(code)
    for each in ast.walk(node) if node is not None else ():
        if isinstance(each, ast.Call) and (names := names_in(each.func)) and names[-1] in _SEEDING:
            return ".".join(names)
    return ""


class _Source:
    """What a file says, and the code that it is compiled to."""

    def __init__(self, filename: str) -> None:
        tree = ast.parse("".join(linecache.getlines(filename)))
        self.codes = set(nested(compile(tree, filename, "exec", dont_inherit=True)))
        self._nodes: dict[tuple[str, int], list[Function]] = {}
        for node in ast.walk(tree):
            if isinstance(node, Function):
                decorators = getattr(node, "decorator_list", ())
                line = min([node.lineno, *(each.lineno for each in decorators)])
                self._nodes.setdefault((getattr(node, "name", "<lambda>"), line), []).append(node)

    def node_of(self, code: types.CodeType) -> Function | None:
        found = self._nodes.get((code.co_name, code.co_firstlineno), [])
        return found[0] if len(found) == 1 and code in self.codes else None


@functools.lru_cache(maxsize=256)
def _source(filename: str) -> _Source | None:
    try:
        return _Source(filename)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


class Made(NamedTuple):
    """What is known of a function that Rote has made."""

    code: types.CodeType
    node: Function
    counted: frozenset[Chain] = frozenset()
    """The attributes to which others add before it runs, or when it has run."""
    lists: frozenset[str] = frozenset()
    """Its variables that hold lists which nothing else holds."""


_made: dict[int, Made] = {}  # by the addresses of their code


def keep_source(made: Made) -> None:
    """Says of what source a function was made."""
    _made[address(made.code)] = made


def made_by_rote(code: types.CodeType) -> Made | None:
    """What is known of a function, if Rote has made it."""
    return _made.get(address(code))


@by_identity
def node_of(code: types.CodeType) -> Function | None:
    """The source of a function, when that is what runs."""
    if (made := made_by_rote(code)) is not None:
        return made.node
    source = _source(code.co_filename)
    return None if source is None else source.node_of(code)
