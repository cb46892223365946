"""Functions made of the sources of others: with other statements, and with variables of their own."""

from __future__ import annotations
import __future__

import ast
import copy
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _returns, _sources
from ._frames import LENIENT
from ._sources import Chain, Function, Made, keep_source

_MAKER = "what makes a function"  # no variable of a script is named so
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag
OF_ITS_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
#: What these name, they may use at another time.
LATER = (*OF_ITS_OWN, ast.GeneratorExp)
_SWALLOWING = LENIENT | {"raises"}  # managers that let no error pass


def named(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def statements(node: Function) -> list[ast.stmt]:
    return node.body if isinstance(node.body, list) else []


def may_swallow(node: ast.With) -> bool:
    """Whether the managers of a statement may let no error pass, as far as their names tell."""
    every = [each for item in node.items for each in ast.walk(item)]
    return not _SWALLOWING.isdisjoint(getattr(each, "id", getattr(each, "attr", "")) for each in every)


def is_private(node: ast.AST) -> bool:
    """Whether a part of the source has a name that Python writes otherwise within a class."""
    name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def plain_function(function: Any) -> types.FunctionType | None:
    """The function that a captured function runs in the end."""
    while (
        inner := function.__func__ if type(function) is types.MethodType else _returns.unwrapped(function)
    ) is not function:
        function = inner
    return function if type(function) is types.FunctionType else None


def in_place(function: Any, made: types.FunctionType) -> Any:
    """What runs another function in the place of the one that a captured function runs in the end: bound to the same
    object, and within the same functions of PyTorch, such as `torch.no_grad()` makes."""
    if type(function) is types.MethodType:
        return types.MethodType(in_place(function.__func__, made), function.__self__)
    if _returns.unwrapped(function) is function:
        return made
    code, cells = function.__code__, function.__closure__ or ()
    at = code.co_freevars.index("func")
    inner = types.CellType(in_place(cells[at].cell_contents, made))
    outer = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, (*cells[:at], inner, *cells[at + 1 :])
    )
    outer.__kwdefaults__, outer.__qualname__ = function.__kwdefaults__, function.__qualname__
    outer.__wrapped__ = inner.cell_contents  # type: ignore[attr-defined]
    return outer


def is_stored(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def arguments(node: Function) -> set[str]:
    return {each.arg for each in _sources.arguments(node)}


def walk(body: Sequence[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)


def may_return(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(each, ast.Return) for each in walk(body))


def mentioned(body: list[ast.stmt]) -> list[str]:
    """The variables in statements, in order, each once."""
    found = [each.id for each in walk(body) if isinstance(each, ast.Name)]
    return list(dict.fromkeys([*found, *names_set(body)]))


def names_set(body: Sequence[ast.stmt]) -> set[str]:
    """The variables that statements set or delete. Those of functions inside are among them."""
    found = set()
    inner = {id(name) for each in walk(body) for name in targets_of(each)}
    for each in walk(body):
        match each:
            case ast.Name() if id(each) in inner:
                pass
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()):
                found.add(name)
            case ast.alias(name=name, asname=other):
                found.add(other or name.partition(".")[0])
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case (
                ast.ExceptHandler(name=str() as name)
                | ast.MatchAs(name=str() as name)
                | ast.MatchStar(name=str() as name)
            ):
                found.add(name)
            case ast.MatchMapping(rest=str() as name):
                found.add(name)
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                found.update(names)
    return found


def targets_of(node: ast.AST) -> Iterator[ast.Name]:
    """The variables of a comprehension, which only it knows."""
    if isinstance(node, ast.comprehension):
        yield from (each for each in ast.walk(node.target) if isinstance(each, ast.Name))


def of_comprehensions(node: Function) -> set[str]:
    return {name.id for each in ast.walk(node) for name in targets_of(each)}


def seen_by(function: ast.AST) -> set[str]:
    """The variables of others that a function or a class in a source may use, or a generator."""
    inner = {each.arg for each in ast.walk(function) if isinstance(each, ast.arg)}
    inner |= {name.id for each in ast.walk(function) for name in targets_of(each)}
    if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
        shared = {name for each in ast.walk(function) if isinstance(each, ast.Nonlocal) for name in each.names}
        inner |= names_set(function.body) - shared
    return named(function) - inner


def own_names(code: types.CodeType, node: Function) -> set[str]:
    """The variables of a function. Those of its comprehensions are none."""
    inner = of_comprehensions(node) - names_set(statements(node)) - arguments(node)
    return {*code.co_varnames, *code.co_cellvars} - inner


def set_for_sure(body: list[ast.stmt]) -> set[str]:
    """The variables that statements have set when they have run, and have not deleted."""
    found: set[str] = set()
    for statement in body:
        match statement:
            case ast.Assign(targets=targets):
                found.update(each for target in targets for each in plain_names(target))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                found.add(name)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
    return found - deleted(body)


def deleted(body: Sequence[ast.stmt]) -> set[str]:
    """The variables that statements may delete."""
    return {each.id for each in walk(body) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Del)}


def plain_names(target: ast.expr) -> list[str]:
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [name for item in items for name in plain_names(item)]
        case ast.Starred(value=inner):
            return plain_names(inner)
    return []


def loaded(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def stored(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def unless_unset(body: list[ast.stmt], otherwise: list[ast.stmt]) -> ast.Try:
    """Statements that give way to others where a variable in them is not set."""
    return ast.Try(body, [ast.ExceptHandler(loaded("NameError"), None, otherwise)], [], [])


def if_set(target: ast.expr, value: ast.expr) -> ast.Try:
    """An assignment that is left out where a variable in the value is not set."""
    return unless_unset([ast.Assign([target], value)], [ast.Pass()])


may_be, is_set = "{}, or nothing", "whether {} is set"
"""The variables that :func:`may_be_set` sets."""


def may_be_set(name: str) -> list[ast.stmt]:
    """Statements that find out whether a variable is set, and what it is."""
    value, flag = may_be.format(name), is_set.format(name)
    there: list[ast.stmt] = [ast.Assign([stored(value)], loaded(name)), ast.Assign([stored(flag)], ast.Constant(True))]
    gone: list[ast.stmt] = [
        ast.Assign([stored(value)], ast.Constant(None)),
        ast.Assign([stored(flag)], ast.Constant(False)),
    ]
    return [unless_unset(there, gone)]


def unset_again(name: str) -> ast.stmt:
    """A statement that takes back a variable which was not set where :func:`may_be_set` asked."""
    return ast.If(ast.UnaryOp(ast.Not(), loaded(is_set.format(name))), [ast.Delete([ast.Name(name, ast.Del())])], [])


def function_with(node: Function, body: list[ast.stmt], at: ast.stmt) -> ast.FunctionDef:
    """A function with other statements. ``at``: where those stand that are not written in the source."""
    made = empty_function(getattr(node, "name", ""))
    made.args, made.body = copy.deepcopy(node.args), body
    for each in ast.walk(made.args):
        if isinstance(each, ast.arg):
            each.annotation = None
    made.args.defaults = [ast.Constant(None) for _ in made.args.defaults]
    made.args.kw_defaults = [each and ast.Constant(None) for each in made.args.kw_defaults]
    ast.copy_location(made, node)
    for statement in body:
        if not hasattr(statement, "lineno"):
            ast.copy_location(statement, at)
        ast.fix_missing_locations(statement)
    return ast.fix_missing_locations(made)


def empty_function(name: str) -> ast.FunctionDef:
    made = ast.parse("def f(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.name = name
    return made


def made_of(
    function: types.FunctionType,
    node: ast.FunctionDef,
    counted: frozenset[Chain] = frozenset(),
    more: Mapping[str, types.CellType] = types.MappingProxyType({}),
    lists: frozenset[str] = frozenset(),
) -> types.FunctionType | None:
    """The function of a source, in the place of another one. ``counted``: what counts when it has run; ``more``: other
    variables that it uses; ``lists``: those of its own that hold lists which nothing else holds."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells.update(more)
    given = ast.arguments([], [ast.arg(name) for name in cells], None, [], [], None, [])
    maker = empty_function(_MAKER)
    maker.args, maker.body = given, [node]
    ast.copy_location(maker, node)
    module = ast.fix_missing_locations(ast.Module([maker], []))
    try:
        whole = compile(module, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    made = next(each for each in codes_in(whole) if each.co_name == _MAKER)
    inner = _renamed(next(codes_in(made)), f"{_MAKER}.<locals>.{node.name}", code.co_qualname)
    if not set(inner.co_freevars) <= cells.keys():
        return None
    keep_source(Made(inner, node, counted, lists))
    closure = tuple(cells[name] for name in inner.co_freevars)
    half = types.FunctionType(inner, function.__globals__, function.__name__, function.__defaults__, closure)
    half.__kwdefaults__ = function.__kwdefaults__
    half.__qualname__ = function.__qualname__
    half.__module__ = function.__module__
    return half


def codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (each for each in code.co_consts if isinstance(each, types.CodeType))


def _renamed(code: types.CodeType, old: str, new: str) -> types.CodeType:
    """Code with the qualified names that it has in the script."""
    inner = tuple(_renamed(each, old, new) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=inner, co_qualname=code.co_qualname.replace(old, new, 1))
