"""The two halves of a step: what is replayed, and what the step then does on the host, which runs as it is written.

Many steps end on the host: ``self.total += loss.item()``, ``meter.update(loss.item(), n)``, ``if loss < self.best``.
A plan can hold none of that, and need not, since no op of the step comes after it. So two functions are made from the
source of the step. The *head* has the statements before one of its outermost ones; where it comes to its end, it
returns the variables that the others use. The *tail* takes these and the arguments of the call, and goes on from there.
"""

from __future__ import annotations
import __future__

import ast
import copy
import functools
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from . import _returns
from ._identity import by_identity
from ._return_places import DEFERRED, sees_variables
from ._sources import Chain, Function, added_to, keep_source, names_in, node_of

_LEFT = "what the head left"  # no variable of a script is named so, nor the two below
_MORE = "what else the head left"
_MAKER = "what makes a half"
_MARK = "what is told of each statement"
_FUTURE = 0
for _name in __future__.all_feature_names:
    _FUTURE |= getattr(__future__, _name).compiler_flag
_OF_ITS_OWN = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_LATER = (*_OF_ITS_OWN, ast.GeneratorExp)  # what they name, they may use at another time
#: What reads a tensor, and needs no graph of it.
_READS = frozenset({"item", "detach", "tolist"})


@dataclass(frozen=True)
class Halves:
    """The two halves of a function."""

    head: Callable[..., Any]
    """Takes what the function takes, and returns a boolean and a value: the result of the function; or, if the boolean
    is true, what the tail is to be given."""
    tail: Callable[..., Any]
    at: int
    """The number of the statement with which the tail begins."""
    line: str
    """Where that stands, as ``file:line``."""
    names: tuple[str, ...]
    """Variables whose values the head gives the tail, in order."""
    chains: Mapping[str, Chain]
    """By which names the step has found what is in some of these."""

    def end(self, left: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the tail, with what the head has left in a call with these arguments, and returns its result."""
        return self.tail(*args, **kwargs, **{_LEFT: left})


@dataclass(frozen=True)
class Stop:
    """Where a recorded step does what a plan may not be able to hold."""

    at: tuple[int, int]  # in the captured function: line and column
    writes_later: bool  # the step writes its state after that
    ops: int  # that ran before
    later_ops: int


def places(code: types.CodeType, stops: list[Stop]) -> list[int]:
    """At which of the outermost statements of a function a tail may begin, the best first. None if the function cannot
    be halved."""
    body = _body(code)
    last = [each for each in stops if not each.writes_later and each.later_ops <= each.ops]
    at = [_statement(body, each.at) for each in last[:1] or stops]
    uses = [_first_use(body, place) for place in at]
    found = [*filter(None, uses), *(at if last else ())]
    return [place for place in dict.fromkeys(found) if place > 0]


def _statement(body: list[ast.stmt], at: tuple[int, int]) -> int:
    """The number of the statement that stands at a line and a column; below 0 if there is none."""
    begins = [(each.lineno, each.col_offset) for each in body]
    return sum(begin <= at for begin in begins) - 1


def _first_use(body: list[ast.stmt], at: int) -> int | None:
    """The first statement that uses a variable which the statement at a place does nothing but set."""
    match body[at] if at >= 0 else None:
        case ast.Assign(targets=[target]) if all(isinstance(each, ast.Name | ast.Tuple) for each in _targets(target)):
            names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
            return next((i for i, each in enumerate(body) if i > at and _named(each) & names), None)
    return None


def _targets(target: ast.expr) -> list[ast.expr]:
    return [target, *(target.elts if isinstance(target, ast.Tuple) else ())]


def _named(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def has_more_than_one(code: types.CodeType) -> bool:
    """Whether a function can be halved, as far as its own source tells."""
    return len(_body(code)) > 1


def _statements(node: Function) -> list[ast.stmt]:
    return node.body if isinstance(node.body, list) else []


@by_identity
def _body(code: types.CodeType) -> list[ast.stmt]:
    """The outermost statements of a function that can be halved; none of others."""
    node = None if code.co_flags & DEFERRED else node_of(code)
    if node is None or not isinstance(node.body, list):
        return []
    every = [each for statement in node.body for each in ast.walk(statement)]
    if any(map(sees_variables, every)) or any(map(_is_private, every)):
        return []
    return node.body


def _is_private(node: ast.AST) -> bool:
    """Whether a part of the source has a name that Python writes otherwise within a class."""
    name = getattr(node, "id", None) or getattr(node, "attr", None) or getattr(node, "arg", None)
    return isinstance(name, str) and name.startswith("__") and not name.endswith("__")


def halves(function: Any, at: int, anew: Set[str] = frozenset()) -> Halves | None:
    """A function halved at one of its outermost statements; None if that does not give the same. ``anew``: variables of
    which the tail finds the values itself, by the names that the step uses."""
    plain = _plain(function)
    node = None if plain is None else node_of(plain.__code__)
    body = [] if plain is None else _body(plain.__code__)
    if plain is None or node is None or not 0 < at < len(body):
        return None
    first, last = body[:at], body[at:]
    left = _left(plain.__code__, node, first, last, anew)
    if left is None:
        return None
    counted = frozenset(chain for each in _walk(last) if len(chain := names_in(added_to(each))) > 1)
    head = _made(plain, _head(node, first, left), counted)
    tail = _made(plain, _tail(node, first, last, left))
    if head is None or tail is None:
        return None
    line = f"{plain.__code__.co_filename}:{last[0].lineno}"
    return Halves(_in_place(function, head), _in_place(function, tail), at, line, tuple(left.always), left.chains)


def marked(function: Any, mark: Callable[[int], None]) -> Callable[..., Any] | None:
    """A function that does the same, and calls ``mark`` before each of its outermost statements, with the number of the
    statement."""
    plain = _plain(function)
    node = None if plain is None else node_of(plain.__code__)
    body = [] if plain is None else _body(plain.__code__)
    if plain is None or node is None or len(body) < 2:
        return None
    notes = [ast.Expr(ast.Call(_loaded(_MARK), [ast.Constant(i)], [])) for i in range(len(body))]
    both = [part for note, each in zip(notes, copy.deepcopy(body), strict=True) for part in (note, each)]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # `global` may follow the docstring
        del both[0]
    made = _made(plain, _function(node, both, body[0]), more={_MARK: mark})
    return None if made is None else _in_place(function, made)


def _plain(function: Any) -> types.FunctionType | None:
    """The function that a captured function runs in the end."""
    while True:
        if type(function) is types.MethodType:
            function = function.__func__
        elif type(function) is not types.FunctionType:
            return None
        elif (inner := _returns.unwrapped(function)) is function:
            return function
        else:
            function = inner


def _in_place(function: Any, made: types.FunctionType) -> Any:
    """What runs another function in the place of the one that a captured function runs in the end: bound to the same
    object, and within the same functions of PyTorch, such as `torch.no_grad()` makes."""
    if type(function) is types.MethodType:
        return types.MethodType(_in_place(function.__func__, made), function.__self__)
    if _returns.unwrapped(function) is function:
        return made
    code, cells = function.__code__, function.__closure__ or ()
    at = code.co_freevars.index("func")
    inner = types.CellType(_in_place(cells[at].cell_contents, made))
    outer = types.FunctionType(
        code, function.__globals__, function.__name__, function.__defaults__, (*cells[:at], inner, *cells[at + 1 :])
    )
    outer.__kwdefaults__, outer.__qualname__ = function.__kwdefaults__, function.__qualname__
    outer.__wrapped__ = inner.cell_contents  # type: ignore[attr-defined]
    return outer


@dataclass(frozen=True)
class _Left:
    """The variables that the tail uses, in order."""

    always: list[str]  # the head has set them wherever it comes to its end
    sometimes: list[str]
    only_read: set[str]  # the tail does nothing with them but read tensors
    chains: dict[str, Chain]  # by which names the step has found what is in some of them
    anew: dict[str, Chain]  # the same of others, which the tail finds itself


def _left(
    code: types.CodeType, node: Function, first: list[ast.stmt], last: list[ast.stmt], anew: Set[str]
) -> _Left | None:
    arguments = _arguments(node)
    own = {*code.co_varnames, *code.co_cellvars} - (_of_comprehensions(node) - _set(_statements(node)) - arguments)
    set_first, set_last = _set(first), _set(last)
    if any(name in own and name not in arguments | set_first for name in _mentioned(first)):
        return None  # a variable that is set later
    captured = {name for each in _walk(first) if isinstance(each, _LATER) for name in _named(each)}
    if captured & own & set_last:
        return None  # by functions that may be called later
    used = [name for name in _mentioned(last) if name in own and name in set_first and not _is_set_first(name, last)]
    chains = {name: chain for name, chain in _chains(first, own).items() if name in used}
    used = [name for name in used if name not in anew]
    certain = arguments | _set_for_sure(first)
    uses = [each for each in _walk(last) if isinstance(each, ast.Name)]
    reads = {id(each) for each in _read_only(last)}
    only_read = {name for name in used if all(id(each) in reads for each in uses if each.id == name)}
    return _Left(
        [name for name in used if name in certain],
        [name for name in used if name not in certain],
        only_read - arguments,
        {name: chain for name, chain in chains.items() if name not in anew},
        {name: chain for name, chain in chains.items() if name in anew},
    )


def _chains(body: list[ast.stmt], own: set[str]) -> dict[str, Chain]:
    """The variables that stand for what is found by names, such as ``model = self.model``: the names."""
    stores = Counter(each.id for each in _walk(body) if isinstance(each, ast.Name) and _is_stored(each))
    attributes = {each.attr for each in _walk(body) if isinstance(each, ast.Attribute) and _is_stored(each)}
    found = {}
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if stores[name] == 1 and name in own:
                chain = names_in(value)
                if chain and not stores[chain[0]] and attributes.isdisjoint(chain[1:]):
                    found[name] = chain
    return found


def _is_stored(node: ast.Name | ast.Attribute) -> bool:
    return not isinstance(node.ctx, ast.Load)


def _arguments(node: Function) -> set[str]:
    return {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}


def _walk(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)


def _mentioned(body: list[ast.stmt]) -> list[str]:
    """The variables in statements, in order, each once."""
    found = [each.id for each in _walk(body) if isinstance(each, ast.Name)]
    return list(dict.fromkeys([*found, *_set(body)]))


def _set(body: Sequence[ast.stmt]) -> set[str]:
    """The variables that statements set or delete. Those of functions inside are among them."""
    found = set()
    inner = {id(name) for each in _walk(body) for name in _targets_of(each)}
    for each in _walk(body):
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


def _targets_of(node: ast.AST) -> Iterator[ast.Name]:
    """The variables of a comprehension, which only it knows."""
    if isinstance(node, ast.comprehension):
        yield from (each for each in ast.walk(node.target) if isinstance(each, ast.Name))


def _of_comprehensions(node: Function) -> set[str]:
    return {name.id for each in ast.walk(node) for name in _targets_of(each)}


def _set_for_sure(body: list[ast.stmt]) -> set[str]:
    """The variables that statements have set when they have run, and have not deleted."""
    found: set[str] = set()
    for statement in body:
        match statement:
            case ast.Assign(targets=targets):
                found.update(each for target in targets for each in _plain_names(target))
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                found.add(name)
    deleted = {each.id for each in _walk(body) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Del)}
    return found - deleted


def _plain_names(target: ast.expr) -> list[str]:
    match target:
        case ast.Name(id=name):
            return [name]
        case ast.Tuple(elts=items) | ast.List(elts=items):
            return [name for item in items for name in _plain_names(item)]
        case ast.Starred(value=inner):
            return _plain_names(inner)
    return []


def _is_set_first(name: str, body: list[ast.stmt]) -> bool:
    """Whether statements set a variable before they use it."""
    first = next(each for each in body if name in _mentioned([each]))
    match first:
        case ast.Assign(targets=targets, value=value):
            return name in [each for target in targets for each in _plain_names(target)] and name not in _named(value)
    return False


def _read_only(body: list[ast.stmt]) -> Iterator[ast.Name]:
    """The places where statements only read the tensor in a variable."""
    for each in _walk(body):
        match each:
            case ast.Call(func=ast.Attribute(value=ast.Name() as name, attr=attribute)) if attribute in _READS:
                yield name
            case ast.Call(func=ast.Name(id="float" | "int" | "bool"), args=[ast.Name() as name], keywords=[]):
                yield name


class _Returns(ast.NodeTransformer):
    """Says of what a function returns that it is the function's result."""

    def visit_Return(self, node: ast.Return) -> ast.AST:
        value = node.value or ast.Constant(None)
        pair = ast.Tuple([ast.Constant(False), value], ast.Load())
        return ast.copy_location(ast.Return(pair), node)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node if isinstance(node, _OF_ITS_OWN) else super().generic_visit(node)


def _head(node: Function, first: list[ast.stmt], left: _Left) -> ast.FunctionDef:
    body = [_Returns().visit(each) for each in copy.deepcopy(first)]
    known: list[ast.expr] = [_value(name, left) for name in left.always]
    if left.sometimes:
        body.append(ast.Assign([_stored(_MORE)], ast.Dict([], [])))
        for name in left.sometimes:
            entry = ast.Subscript(_loaded(_MORE), ast.Constant(name), ast.Store())
            unset = ast.ExceptHandler(_loaded("NameError"), None, [ast.Pass()])
            body.append(ast.Try([ast.Assign([entry], _value(name, left))], [unset], [], []))
        known.append(_loaded(_MORE))
    body.append(ast.Return(ast.Tuple([ast.Constant(True), ast.Tuple(known, ast.Load())], ast.Load())))
    return _function(node, body, first[-1])


def _tail(node: Function, first: list[ast.stmt], last: list[ast.stmt], left: _Left) -> ast.FunctionDef:
    declared = [each for each in _walk(first) if isinstance(each, ast.Global | ast.Nonlocal)]
    body: list[ast.stmt] = list(copy.deepcopy(declared))
    names: list[ast.expr] = [_stored(name) for name in (*left.always, *([_MORE] if left.sometimes else []))]
    body.append(ast.Assign([ast.Tuple(names, ast.Store())], _loaded(_LEFT)))
    for name, (root, *more) in left.anew.items():
        body.append(ast.Assign([_stored(name)], functools.reduce(_attribute, more, _loaded(root))))
    for name in left.sometimes:
        is_set = ast.Compare(ast.Constant(name), [ast.In()], [_loaded(_MORE)])
        entry = ast.Subscript(_loaded(_MORE), ast.Constant(name), ast.Load())
        body.append(ast.If(is_set, [ast.Assign([_stored(name)], entry)], []))
    made = _function(node, [*body, *copy.deepcopy(last)], last[0])
    made.args.kwonlyargs.append(ast.arg(_LEFT))
    made.args.kw_defaults.append(None)
    return made


def _value(name: str, left: _Left) -> ast.expr:
    """The value of a variable, without the graph of a tensor that is only read."""
    if name not in left.only_read:
        return _loaded(name)
    detached = ast.Call(ast.Attribute(_loaded(name), "detach", ast.Load()), [], [])
    has = ast.Call(_loaded("hasattr"), [_loaded(name), ast.Constant("detach")], [])
    return ast.IfExp(has, detached, _loaded(name))


def _attribute(value: ast.expr, name: str) -> ast.expr:
    return ast.Attribute(value, name, ast.Load())


def _loaded(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _stored(name: str) -> ast.Name:
    return ast.Name(name, ast.Store())


def _function(node: Function, body: list[ast.stmt], at: ast.stmt) -> ast.FunctionDef:
    """A function with other statements. ``at``: where those stand that are not written in the source."""
    made = _empty(getattr(node, "name", ""))
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


def _empty(name: str) -> ast.FunctionDef:
    made = ast.parse("def f(): pass").body[0]
    assert isinstance(made, ast.FunctionDef)
    made.name = name
    return made


def _made(
    function: types.FunctionType,
    node: ast.FunctionDef,
    counted: frozenset[Chain] = frozenset(),
    more: Mapping[str, Any] = types.MappingProxyType({}),
) -> types.FunctionType | None:
    """The function of a source, in the place of another one. ``counted``: what counts when it has run; ``more``: other
    variables that it uses."""
    code = function.__code__
    cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
    cells.update((name, types.CellType(value)) for name, value in more.items())
    given = ast.arguments([], [ast.arg(name) for name in cells], None, [], [], None, [])
    maker = _empty(_MAKER)
    maker.args, maker.body = given, [node]
    ast.copy_location(maker, node)
    module = ast.fix_missing_locations(ast.Module([maker], []))
    try:
        whole = compile(module, code.co_filename, "exec", flags=code.co_flags & _FUTURE, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    made = next(each for each in _codes_in(whole) if each.co_name == _MAKER)
    inner = _renamed(next(_codes_in(made)), f"{_MAKER}.<locals>.{node.name}", code.co_qualname)
    if not set(inner.co_freevars) <= cells.keys():
        return None
    keep_source(inner, node, counted)
    closure = tuple(cells[name] for name in inner.co_freevars)
    half = types.FunctionType(inner, function.__globals__, function.__name__, function.__defaults__, closure)
    half.__kwdefaults__ = function.__kwdefaults__
    half.__qualname__ = function.__qualname__
    half.__module__ = function.__module__
    return half


def _codes_in(code: types.CodeType) -> Iterator[types.CodeType]:
    return (each for each in code.co_consts if isinstance(each, types.CodeType))


def _renamed(code: types.CodeType, old: str, new: str) -> types.CodeType:
    """Code with the qualified names that it has in the script."""
    inner = tuple(_renamed(each, old, new) if isinstance(each, types.CodeType) else each for each in code.co_consts)
    return code.replace(co_consts=inner, co_qualname=code.co_qualname.replace(old, new, 1))
