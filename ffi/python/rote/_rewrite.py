"""Functions made of the sources of others: with other statements, and with variables of their own."""

from __future__ import annotations
import __future__

import ast
import copy
import sys
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from . import _frames, _returns, _sources
from ._identity import by_identity
from ._return_places import DEFERRED, sees_variables
from ._sources import Chain, Function, keep_source, node_of

_MAKER = "what makes a function"  # no variable of a script is named so
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag
OF_ITS_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
#: What these name, they may use at another time.
LATER = (*OF_ITS_OWN, ast.GeneratorExp)
#: Methods that run ops, in some calls at least.
OPS = frozenset({"backward", "step", "zero_grad"})
_SWALLOWING = frozenset({"suppress", "raises", "assertRaises"})  # managers that let no error pass
_FLAG = "whether the block at "  # no variable of a script is named so, nor any of these
_ENTERED = "what the block at "
_ENTER = "what enters a block"
_KEPT = "what is kept at "


def named(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def statements(node: Function) -> list[ast.stmt]:
    return node.body if isinstance(node.body, list) else []


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


def _parted(statement: ast.stmt) -> list[ast.stmt]:
    """A statement as several, if it is a block with ops in it, and more beside them."""
    if isinstance(statement, ast.With):
        return _opened(statement)
    if not isinstance(statement, ast.If) or not any(map(runs_ops, statement.body[:-1])):
        return [statement]
    flag = f"{_FLAG}{statement.lineno}:{statement.col_offset} runs"
    answer = ast.IfExp(statement.test, ast.Constant(True), ast.Constant(False))
    parts: list[ast.stmt] = [ast.copy_location(ast.Assign([stored(flag)], answer), statement)]
    for each in statement.body:
        parts.append(ast.copy_location(ast.If(loaded(flag), [each], []), each))
    for each in statement.orelse:
        parts.append(ast.copy_location(ast.If(ast.UnaryOp(ast.Not(), loaded(flag)), [each], []), each))
    return [ast.fix_missing_locations(each) for each in parts]


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


def may_swallow(node: ast.With) -> bool:
    """Whether the managers of a statement may let no error pass, as far as their names tell."""
    every = [each for item in node.items for each in ast.walk(item)]
    return not _SWALLOWING.isdisjoint(getattr(each, "id", getattr(each, "attr", "")) for each in every)


def _entering(enters: Any, inner: list[ast.stmt]) -> list[ast.stmt]:
    """Statements that enter a block, and those in it, which leave it only if they raise."""
    name = enters.enters
    made: list[ast.stmt] = [ast.Assign([stored(name)], ast.Call(loaded(_ENTER), [enters.value], []))]
    for target in enters.targets[1:]:
        made.append(ast.Assign([target], ast.Attribute(loaded(name), "value", ast.Load())))
    if inner:
        fails = ast.Expr(ast.Call(ast.Attribute(loaded(name), "fail", ast.Load()), [], []))
        made.append(ast.Try(inner, [ast.ExceptHandler(loaded("BaseException"), None, [fails, ast.Raise()])], [], []))
    return [ast.copy_location(each, enters) for each in made]


def runs_ops(statement: ast.stmt) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr in OPS for each in ast.walk(statement))


def kept_at(node: ast.stmt, number: int) -> str:
    """A variable for something that a statement reads."""
    return f"{_KEPT}{node.lineno}:{node.col_offset}:{number}"


def copied(name: ast.expr, at: ast.stmt) -> ast.stmt:
    """A statement that puts a copy in the place of a tensor, without its graph."""
    assert isinstance(name, ast.Name)
    detached = ast.Call(ast.Attribute(name, "detach", ast.Load()), [], [])
    copy_of = ast.Call(ast.Attribute(detached, "clone", ast.Load()), [], [])
    is_tensor = ast.Call(loaded("hasattr"), [name, ast.Constant("detach")], [])
    return ast.copy_location(ast.If(is_tensor, [ast.Assign([stored(name.id)], copy_of)], []), at)


def flags(body: list[ast.stmt]) -> set[str]:
    """The variables in statements that no script has."""
    return {name for name in mentioned(body) if name.startswith((_FLAG, _ENTERED, _KEPT))}


def flags_set(body: list[ast.stmt]) -> set[str]:
    """The same of variables that the statements set."""
    return {name for name in names_set(body) if name.startswith(_FLAG)}


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


def source_of(function: Any) -> tuple[types.FunctionType, Function, list[ast.stmt]] | None:
    """The function that a captured function runs in the end, its source and its outermost statements, if it can be
    rewritten."""
    plain = plain_function(function)
    node = None if plain is None else node_of(plain.__code__)
    body = [] if plain is None else body_of(plain.__code__)
    return None if plain is None or node is None or not body else (plain, node, body)


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
) -> types.FunctionType | None:
    """The function of a source, in the place of another one. ``counted``: what counts when it has run; ``more``: other
    variables that it uses."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells.update({_ENTER: types.CellType(Entered), **more})
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
    keep_source(inner, node, counted)
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
