"""The parts of a step: the head, which is recorded and replayed, and the front and the tail, which run on the host as
they are written.

Many steps end on the host: ``self.total += loss.item()``, ``meter.update(loss.item(), n)``, ``if loss < self.best``.
A plan can hold none of that, and need not, since no op of the step comes after it. So two functions are made from the
source of the step. The *head* has the statements before one of its outermost ones; where it comes to its end, it
returns the variables that the others use. The *tail* takes these and the arguments of the call, and goes on from there.
Where a step begins on the host too (``x, y = next(batches)``), the *front* has these statements, and head and tail are
made of the rest.
"""

from __future__ import annotations

import ast
import copy
import types
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

from . import _rewrite
from ._blocks import (
    ENTER,
    Entered,
    assembled,
    body_of,
    entered,
    flags,
    flags_set,
    leaves_more,
    runs_ops,
    source_of,
)
from ._liveness import Liveness
from ._rewrite import (
    LATER,
    OF_ITS_OWN,
    deleted,
    empty_function,
    function_with,
    if_set,
    in_place,
    is_set,
    is_stored,
    loaded,
    made_of,
    may_be,
    may_be_set,
    may_return,
    mentioned,
    named,
    names_set,
    own_names,
    seen_by,
    set_for_sure,
    stored,
    unset_again,
    walk,
)
from ._sources import Chain, Function, added_to, made_by_rote, names_in

LAST = -1  # in the place of a number of a statement: behind the last one
_LEFT = "what the head left"  # no variable of a script is named so, nor the next two
_MORE = "what else the head left"
_MARK = "what is told of each statement"
#: What reads a tensor, and needs no graph of it.
_READS = frozenset({"item", "detach", "tolist"})


@dataclass(frozen=True)
class Halves:
    """The two halves of a function."""

    head: Callable[..., Any]
    """Takes what the function takes, and returns a boolean and a value: the result of the function; or, if the boolean
    is true, what the tail is to be given."""
    tail: Callable[..., Any]
    line: str
    """Where the tail begins, as ``file:line``."""
    unused: frozenset[int | str]
    """The arguments that the head does not name, by their places and names in a call."""
    names: tuple[str, ...]
    """Variables whose values the head gives the tail, in order."""
    chains: Mapping[str, Chain]
    """By which names the step has found what is in some of these."""

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, without those that are the tail's alone."""
        if not self.unused:
            return args, kwargs
        left = tuple(None if place in self.unused else value for place, value in enumerate(args))
        return left, {name: None if name in self.unused else value for name, value in kwargs.items()}

    def end(self, left: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs the tail, with what the head has left in a call with these arguments, and returns its result."""
        return self.tail(*args, **kwargs, **{_LEFT: left})


@dataclass(frozen=True)
class Front:
    """What a step does before the part that is recorded."""

    run: Callable[..., Any]
    """Takes what the function takes, and returns a boolean and a value: the result of the function; or, if the boolean
    is true, the values of what the rest takes."""
    rest: Callable[..., Any]
    """Takes these variables."""
    begin: int  # so many statements of the rest are not the function's
    line: str  # where the rest begins, as ``file:line``
    takes_first: bool  # the rest takes the first one by its place
    names: tuple[str, ...]
    manager: str  # which of them holds the manager of a block that the front has entered, if one does

    def arguments(self, values: tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the rest."""
        first = int(self.takes_first)
        return values[:first], dict(zip(self.names[first:], values[first:], strict=True))


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
    body = body_of(code)
    last = [each for each in stops if not each.writes_later and each.later_ops <= each.ops]
    at = [_statement(body, each.at) for each in last[:1] or stops]
    uses = [_first_use(body, place) for place in at]
    found = [*filter(None, uses), *(at if last else ())]
    return [place for place in dict.fromkeys(found) if place > 0]


def is_declaration(function: Any, at: int) -> bool:
    """Whether nothing runs before one of the outermost statements of a function: there is only what it declares."""
    source = source_of(function)
    declares = (ast.Global, ast.Nonlocal, ast.Import, ast.ImportFrom)
    return source is None or all(
        isinstance(each, declares) or (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
        for each in source[2][:at]
    )


def end_of_ops(function: Any, at: int) -> int:
    """Behind the last of the outermost statements of a function from one on that call methods which run ops, one after
    the other; the given one, if there is none, or nothing behind it."""
    source = source_of(function)
    body = [] if source is None else source[2]
    end = place = at
    while place < len(body) and (runs_ops(body[place]) or flags_set([body[place]])):
        place += 1
        end = place if runs_ops(body[place - 1]) else end
    return end if end < len(body) else at


def calls_step(statement: ast.stmt) -> bool:
    """Whether a statement calls a method `step`."""
    calls = (each.func for each in ast.walk(statement) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr == "step" for each in calls)


def begin_of_host(function: Any, at: int) -> int:
    """The first of the outermost statements of a function from one on that do something on the host; 0 if none does, or
    if a later one may run ops at other calls."""
    source = source_of(function)
    body = [] if source is None else source[2]
    later = body[at:]
    if not 0 < at < len(body) or any(map(runs_ops, later)):
        return 0
    does = any(isinstance(each, ast.Call | ast.Delete | ast.AugAssign | ast.Assert) for each in walk(later))
    return at if does else 0


def _statement(body: list[ast.stmt], at: tuple[int, int]) -> int:
    """The number of the statement that stands at a line and a column; below 0 if there is none."""
    begins = [(each.lineno, each.col_offset) for each in body]
    last = max((begin for begin in begins if begin <= at), default=None)
    return -1 if last is None else begins.index(last)


def _first_use(body: list[ast.stmt], at: int) -> int | None:
    """The first statement that uses a variable which the statement at a place does nothing but set."""
    match body[at] if at >= 0 else None:
        case ast.Assign(targets=[target]) if all(isinstance(each, ast.Name | ast.Tuple) for each in _targets(target)):
            names = {each.id for each in ast.walk(target) if isinstance(each, ast.Name)}
            return next((i for i, each in enumerate(body) if i > at and named(each) & names), None)
    return None


def _targets(target: ast.expr) -> list[ast.expr]:
    return [target, *(target.elts if isinstance(target, ast.Tuple) else ())]


def has_more_than_one(code: types.CodeType) -> bool:
    """Whether a function can be halved, as far as its own source tells."""
    return len(body_of(code)) > 1


def halves(function: Any, at: int, anew: Set[str] = frozenset()) -> Halves | None:
    """A function halved at one of its outermost statements; None if that does not give the same. ``anew``: variables of
    which the tail finds the values itself, by the names that the step uses."""
    source = source_of(function)
    if source is None:
        return None
    plain, node, body = source
    at = len(body) if at == LAST else at
    if not 0 < at <= len(body):
        return None
    first, last = body[:at], body[at:]
    left = None if entered(first) or leaves_more(first) else _left(plain.__code__, node, first, last, anew)
    if left is None:
        return None
    made = made_by_rote(plain.__code__)
    counted = _counted(last) | (frozenset() if made is None else made.counted)
    head = made_of(plain, _head(node, first, left), counted)
    tail = made_of(plain, _tail(node, first, last, left))
    if head is None or tail is None:
        return None
    line = f"{plain.__code__.co_filename}:{last[0].lineno}" if last else ""
    unused = _unused(plain.__code__, set(mentioned(first)), bound=type(function) is types.MethodType)
    head.__defaults__ = _without(head.__defaults__, plain.__code__.co_varnames[: plain.__code__.co_argcount], unused)
    return Halves(
        in_place(function, head),
        in_place(function, tail),
        line,
        unused,
        tuple(left.always),
        left.chains,
    )


def _counted(body: list[ast.stmt]) -> frozenset[Chain]:
    """The attributes that statements add to."""
    return frozenset(chain for each in walk(body) if len(chain := names_in(added_to(each))) > 1)


def _without(
    defaults: tuple[Any, ...] | None, places: tuple[str, ...], unused: frozenset[int | str]
) -> tuple[Any, ...] | None:
    """The defaults of the last arguments, without those of arguments that are not used."""
    if not defaults:
        return defaults
    named = zip(places[-len(defaults) :], defaults, strict=True)
    return tuple(None if name in unused else value for name, value in named)


def _unused(code: types.CodeType, named: set[str], bound: bool) -> frozenset[int | str]:
    """The arguments that are not among some names: by place, and by name where they may be given by name. Not the
    object of a method, which `super()` uses."""
    places, owner = code.co_varnames[: code.co_argcount], _owner(code)
    by_name = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
    by_place = [place - bound for place, name in enumerate(places) if name not in owner and name not in named]
    return frozenset([*by_place, *(name for name in by_name if name not in owner and name not in named)])


def _owner(code: types.CodeType) -> tuple[str, ...]:
    """The first argument of a method."""
    first = code.co_varnames[: min(code.co_argcount, 1)]
    return first if "__class__" in code.co_freevars or first in (("self",), ("cls",)) else ()


def front(function: Any, at: int) -> Front | None:
    """What a function does before one of its outermost statements, and the rest as a function of the variables that
    it uses; None if that does not give the same."""
    source = source_of(function)
    if source is None or not 0 < at < len(source[2]):
        return None
    plain, node, body = source
    functions = _only_made(body[:at])
    first, last = [each for each in body[:at] if each not in functions], [*functions, *body[at:]]
    left = _left(plain.__code__, node, first, last, frozenset()) if first else None
    if left is None:
        return None
    manager = entered(first)
    if manager and may_return(first):
        return None  # it would return from within the block
    code, set_ = plain.__code__, names_set(first)
    given = [name for name in code.co_varnames if name in _rewrite.arguments(node) and name not in set_]
    bound = type(function) is types.MethodType
    by_place = [name for name in given[:1] if name == code.co_varnames[0] and (bound or name in _owner(code))]
    if bound and not by_place:
        return None  # the object is another one by then
    used = set(mentioned(last))
    names = [*by_place, *(name for name in given if name not in by_place and name in used), *left.always]
    values = [*names[bound:], *map(may_be.format, left.sometimes), *map(is_set.format, left.sometimes)]
    names += [*left.sometimes, *map(is_set.format, left.sometimes)]
    asked = [part for name in left.sometimes for part in may_be_set(name)]
    head = _head(node, [*first, *asked], replace(left, always=values, sometimes=[], only_read=set()))
    like = empty_function(plain.__name__)
    like.args = ast.arguments([], [ast.arg(name) for name in by_place], None, [], [], None, [])
    like.args.kwonlyargs = [ast.arg(name) for name in names if name not in by_place]
    like.args.kw_defaults = [None for _ in like.args.kwonlyargs]
    ast.copy_location(like, node)
    declared = [each for each in walk(first) if isinstance(each, ast.Global | ast.Nonlocal)]
    begin = [*copy.deepcopy(declared), *map(unset_again, left.sometimes)]
    every = [*begin, *assembled(copy.deepcopy(last))]
    rest = made_of(plain, function_with(like, every, body[at]), _counted(first))
    run = made_of(plain, head, more={ENTER: types.CellType(Entered)})
    if rest is None or run is None:
        return None
    rest.__defaults__ = rest.__kwdefaults__ = None
    line = f"{plain.__code__.co_filename}:{body[at].lineno}"
    takes_first = bool(by_place) and not bound
    parts = in_place(function, run), in_place(function, rest)
    return Front(*parts, len(begin) + len(functions), line, takes_first, tuple(names[bound:]), manager)


def _only_made(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Those of these statements that make a function which the others do not name: it may be made behind them, since it
    finds its variables when it is called."""
    made: list[ast.stmt] = []
    for each in statements:
        if not isinstance(each, ast.FunctionDef) or each.decorator_list:
            continue
        others = [other for other in statements if other is not each]
        defaults = filter(None, (*each.args.defaults, *each.args.kw_defaults))
        if each.name not in mentioned(others) and all(isinstance(default, ast.Constant) for default in defaults):
            made.append(each)
    return made


def marked(function: Any, mark: Callable[[int], None]) -> Callable[..., Any] | None:
    """A function that does the same, and calls ``mark`` before each of its outermost statements, with the number of the
    statement."""
    source = source_of(function)
    if source is None or len(source[2]) < 2:
        return None
    plain, node, body = source
    notes = [ast.Expr(ast.Call(loaded(_MARK), [ast.Constant(i)], [])) for i in range(len(body))]
    both = [part for note, each in zip(notes, copy.deepcopy(body), strict=True) for part in (note, each)]
    if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):  # `global` may follow the docstring
        del both[0]
    made = made_of(plain, function_with(node, assembled(both), body[0]), more={_MARK: types.CellType(mark)})
    return None if made is None else in_place(function, made)


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
    arguments = _rewrite.arguments(node)
    own = own_names(code, node) | flags([*first, *last])
    set_first, set_last = names_set(first), names_set(last)
    if any(name in own and name not in arguments | set_first for name in mentioned(first)):
        return None  # a variable that is set later
    captured = {name for each in walk(first) if isinstance(each, LATER) for name in seen_by(each)}
    if captured & own & set_last:
        return None  # by functions that may be called later
    live = Liveness(assembled(copy.deepcopy(last))).at_begin
    used = [name for name in mentioned(last) if name in own and name in set_first and name in live]
    chains = {name: chain for name, chain in _chains(first, own).items() if name in used}
    used = [name for name in used if name not in anew]
    certain = (arguments | set_for_sure(first)) - deleted(first)
    uses = [each for each in walk(last) if isinstance(each, ast.Name)]
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
    stores = Counter(each.id for each in walk(body) if isinstance(each, ast.Name) and is_stored(each))
    attributes = {each.attr for each in walk(body) if isinstance(each, ast.Attribute) and is_stored(each)}
    set_, found = names_set(body), {}
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if stores[name] == 1 and name in own:
                chain = names_in(value)
                if chain and chain[0] not in set_ and attributes.isdisjoint(chain[1:]):
                    found[name] = chain
    return found


def _read_only(body: list[ast.stmt]) -> Iterator[ast.Name]:
    """The places where statements only read the tensor in a variable."""
    for each in walk(body):
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
        return node if isinstance(node, OF_ITS_OWN) else super().generic_visit(node)


def _head(node: Function, first: list[ast.stmt], left: _Left) -> ast.FunctionDef:
    body = [_Returns().visit(each) for each in assembled(copy.deepcopy(first))]
    known: list[ast.expr] = [_value(name, left) for name in left.always]
    if left.sometimes:
        body.append(ast.Assign([stored(_MORE)], ast.Dict([], [])))
        for name in left.sometimes:
            entry = ast.Subscript(loaded(_MORE), ast.Constant(name), ast.Store())
            body.append(if_set(entry, _value(name, left)))
        known.append(loaded(_MORE))
    body.append(ast.Return(ast.Tuple([ast.Constant(True), ast.Tuple(known, ast.Load())], ast.Load())))
    return function_with(node, body, first[-1])


def _tail(node: Function, first: list[ast.stmt], last: list[ast.stmt], left: _Left) -> ast.FunctionDef:
    given = _rewrite.arguments(node)
    declared = [each for each in walk(first) if isinstance(each, ast.Global | ast.Nonlocal)]
    body: list[ast.stmt] = list(copy.deepcopy(declared))
    names: list[ast.expr] = [stored(name) for name in (*left.always, *([_MORE] if left.sometimes else []))]
    body.append(ast.Assign([ast.Tuple(names, ast.Store())], loaded(_LEFT)))
    for name, (root, *more) in left.anew.items():
        found: ast.expr = loaded(root)
        for each in more:
            found = ast.Attribute(found, each, ast.Load())
        body.append(ast.Assign([stored(name)], found))
    for name in left.sometimes:
        is_set = ast.Compare(ast.Constant(name), [ast.In()], [loaded(_MORE)])
        entry = ast.Subscript(loaded(_MORE), ast.Constant(name), ast.Load())
        gone: list[ast.stmt] = [ast.Delete([ast.Name(name, ast.Del())])] if name in given else []
        body.append(ast.If(is_set, [ast.Assign([stored(name)], entry)], gone))
    made = function_with(node, [*body, *assembled(copy.deepcopy(last))], last[0] if last else first[-1])
    made.args.kwonlyargs.append(ast.arg(_LEFT))
    made.args.kw_defaults.append(None)
    return made


def _value(name: str, left: _Left) -> ast.expr:
    """The value of a variable, without the graph of a tensor that is only read."""
    if name not in left.only_read:
        return loaded(name)
    detached = ast.Call(ast.Attribute(loaded(name), "detach", ast.Load()), [], [])
    has = ast.Call(loaded("hasattr"), [loaded(name), ast.Constant("detach")], [])
    return ast.IfExp(has, detached, loaded(name))
