"""Whole numbers by which a step decides, and which count from call to call: ``if (i + 1) % 4 == 0``,
``if self.step % self.every == 0``.

Such a number is another one at every call, and the step does the same for many of them. So it is not the number that is
guarded, but what the step finds out about it: the answers to its questions. They are known before the call. From the
source of the captured function, another function is made that takes the same arguments, goes the same way, and gives
the answers in order. It runs before each call. A number among the arguments gives way to ``()``; the answers are one
more argument, and are guarded as arguments are.

An answer is the value of an expression of such a number, of other numbers that are found by plain names, and of
arithmetic and comparisons. Where a number goes elsewhere (``print(i)``), the number itself is the answer. Numbers are
arguments of the captured function, and attributes to which it adds, such as ``self.step += 1``; of these,
:mod:`._counters` proves that nothing else reads them.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch

from . import _code, _introspect, _returns
from ._identity import by_identity
from ._libraries import PACKAGES
from ._return_places import DEFERRED, sees_variables
from ._sources import Chain, Function, added_to, arguments, made_by_rote, names_in, nested, node_of

ANSWERS = "answers about numbers"
"""The name of the argument that holds them. No argument of a function is named so."""
_NUMBERS = (int, float, bool)
_SIZED = (tuple, str, range)  # and loaders: a step may fill a list, ask for its length, and empty it again
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Mod, ast.FloorDiv)
_COMPARED = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
_MOST = 64  # answers
_DEEP = 4  # functions that a number is passed on through
_SUPER = "super()"
# Expressions with code of their own, which may run at another time.
_INNER = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SETS = ("_ATTR", "_GLOBAL", "_DEREF", "_NAME")
# With these, code sets attributes that it does not name, or names in texts.
_SETS_UNNAMED = frozenset({"vars", "__dict__", "globals", "cell_contents"})
_SETS_BY_TEXT = frozenset({"setattr", "delattr", "__setattr__", "__delattr__"})


class _Unfit(Exception):
    """The numbers of a function are guarded themselves."""


class _Unknown(Exception):
    """A name stands for no plain number."""


class Decisions:
    """What a captured function asks about numbers."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._first, plain = _returns.bound_and_plain(function)
        self._function = plain if plain is not None and is_fit(plain.__code__) else None
        self.code = None if self._function is None else self._function.__code__
        self._counts = self.code is not None and _counts_attributes(self.code)
        # By the names of arguments that are numbers, and whether the first argument is an object with attributes.
        self._questions: dict[tuple[frozenset[str], bool], _Questions | None] = {}
        self._present: _Questions | None = None  # of the call that was looked at last
        self._operands_of_others: set[str] = set()  # of functions that numbers are passed on to

    def seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The arguments of a call with the answers in the place of numbers; None where there are no questions."""
        self._present = None
        function = self._function
        if function is None or not (self._counts or int in map(type, args) or int in map(type, kwargs.values())):
            return None
        try:
            return self._answered(function, args, kwargs)
        except Exception:  # of an answer, as the step may meet it too; or of what is not known of Python's grammar
            return None

    def operands(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Operand]:
        """What the answers of a call depend on, besides the numbers themselves."""
        read: list[Operand] = []
        if self._present is not None and self._function is not None:
            self._answered(self._function, args, kwargs, read)
        counters = set() if self._present is None else self._present.counters
        return [each for each in read if each.chain not in counters]

    def _answered(
        self,
        function: types.FunctionType,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        read: list[Operand] | None = None,
    ) -> tuple[Any, Any] | None:
        code = function.__code__
        given = dict(zip(code.co_varnames[: code.co_argcount], (*self._first, *args), strict=False))
        if len(given) < len(self._first) + len(args) or not given.keys().isdisjoint(kwargs):
            return None
        known = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        values = {name: value for name, value in (*given.items(), *kwargs.items()) if name in known}
        values = {**_defaults(function), **values}
        numbers = frozenset(name for name, value in values.items() if type(value) is int)
        key = numbers, bool(known) and _has_attributes(values.get(known[0]))
        if key not in self._questions:
            self._questions[key] = _questions(code, *key)
        questions = self._questions[key]
        if questions is None:
            return None
        answers = questions.ask(_Values(function, values, self._operands_of_others, read))
        self._present = questions
        left = [() if name in questions.numbers else value for name, value in given.items()]
        more = {name: () if name in questions.numbers else value for name, value in kwargs.items()}
        return tuple(left[len(self._first) :]), {**more, ANSWERS: answers}

    def counted(self, name: str) -> bool:
        """Whether all that the function does with attributes of a name is to count, and to ask what the answers of the
        present call tell."""
        return self._present is not None and any(chain[-1] == name for chain in self._present.counters)

    @property
    def depend(self) -> bool:
        """Whether answers may depend on more than the numbers."""
        return bool(self._operands_of_others) or any(each and each.operands for each in self._questions.values())

    def may_be_others(self, functions: Iterable[types.FunctionType]) -> bool:
        """Whether a function that calls of a step run may set what answers depend on, besides the numbers."""
        own = {name for each in self._questions.values() if each is not None for name in each.operands}
        names = own | self._operands_of_others
        return bool(names) and may_set(names, functions)

    def stop(self) -> None:
        """Guards the numbers themselves from now on."""
        self._function = None
        self._questions.clear()
        self._operands_of_others.clear()


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    """The arguments of a function that need not be given, and what they are then."""
    given, code = function.__defaults__ or (), function.__code__
    names = code.co_varnames[code.co_argcount - len(given) : code.co_argcount]
    return {**dict(zip(names, given, strict=True)), **(function.__kwdefaults__ or {})}


def _has_attributes(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) and _introspect.own(value) is not None


@dataclass(frozen=True)
class _Questions:
    """What a function asks about its arguments of some names."""

    ask: Callable[[_Values], tuple[Any, ...]]
    numbers: frozenset[str]  # the arguments of which the answers tell all
    counters: frozenset[Chain]
    operands: frozenset[str]


@by_identity
def is_fit(code: types.CodeType) -> bool:
    """Whether a function uses its variables by their names only, and its source is known."""
    node = None if code.co_flags & DEFERRED else node_of(code)
    if node is None or isinstance(node, ast.Lambda):
        return False
    return not any(map(sees_variables, _parts(node)))


def _parts(node: Function) -> list[ast.AST]:
    """All that runs when a function is called: not its decorators and defaults."""
    body = node.body if isinstance(node.body, list) else [node.body]
    return [part for statement in body for part in ast.walk(statement)]


def _counted_later(code: types.CodeType) -> frozenset[Chain]:
    made = made_by_rote(code)
    return frozenset() if made is None else made.counted


@by_identity
def _counts_attributes(code: types.CodeType) -> bool:
    node = node_of(code)
    return node is not None and bool(_counted_later(code) or any(len(_counts(each)) > 1 for each in _parts(node)))


@dataclass(frozen=True)
class Operand:
    """Something that answers depend on."""

    read: Callable[[Chain], Any]
    chain: Chain
    value: Any

    def has_changed(self) -> bool:
        try:
            now = self.read(self.chain)
        except Exception:  # of what is no number any more, or of a `__len__` of the script's
            return True
        return type(now) is not type(self.value) or now != self.value


class _Values:
    """What names stand for at the begin of a call."""

    def __init__(
        self,
        function: types.FunctionType,
        given: dict[str, Any],
        operands: set[str],
        read: list[Operand] | None,
        depth: int = 0,
    ) -> None:
        """``operands``: takes the names of those of functions that numbers are passed on to; ``read``: takes what is
        found, if anybody asks for it."""
        self._function, self._given, self._operands, self._depth = function, given, operands, depth
        self._read = read

    def of(self, chain: Chain) -> Any:
        """A number, by the names that lead to it."""
        found = self._object(chain)
        if type(found) not in _NUMBERS:
            raise _Unknown
        if self._read is not None:
            self._read.append(Operand(self.of, chain, found))
        return found

    def length(self, chain: Chain) -> int:
        """How many items what names lead to has: `len(loader)`."""
        found = self._object(chain)
        if "len" in self._function.__globals__ or "len" in self._function.__code__.co_freevars:  # one of the script's
            raise _Unknown
        if type(found) not in _SIZED and not isinstance(found, torch.utils.data.DataLoader):
            raise _Unknown
        if self._read is not None:
            self._read.append(Operand(self.length, chain, len(found)))
        return len(found)

    def passed(
        self, chain: Chain, asked: dict[int | str, Any], known: dict[int | str, Any], others: tuple[int | str, ...]
    ) -> Any:
        """The answers about numbers that are passed on to a function, as arguments of these places and names; the
        numbers themselves where the answers do not tell all. ``known``: what it is called with by other names that were
        found; ``others``: its other arguments."""
        try:
            holder, function = None, self._called(chain)
        except _Unknown:
            return tuple(asked.values())
        if type(function) is types.MethodType:
            holder, function = function.__self__, function.__func__
        function = _returns.unwrapped(function)
        if type(function) is not types.FunctionType or not is_fit(function.__code__) or self._depth >= _DEEP:
            return tuple(asked.values())
        code, bound = function.__code__, holder is not None
        positional = code.co_varnames[bound : code.co_argcount]

        def named(place: int | str) -> str:
            return place if isinstance(place, str) else positional[place] if place < len(positional) else ""

        unknown = {named(place) for place in others} | {named(at) for at, value in known.items() if value is _Unknown}
        given = {named(place): value for place, value in (*asked.items(), *known.items()) if value is not _Unknown}
        every = code.co_varnames[bound : code.co_argcount + code.co_kwonlyargcount]
        default = {name: value for name, value in _defaults(function).items() if name not in unknown}
        numbers = frozenset(name for name, number in {**default, **given}.items() if type(number) is int)
        questions = _questions(code, numbers, bound) if given.keys() <= {*every} else None
        if questions is None or questions.counters or not questions.numbers.issuperset(map(named, asked)):
            return tuple(asked.values())
        values = {**default, **given, **({code.co_varnames[0]: holder} if bound else {})}
        self._operands.update(questions.operands)
        return questions.ask(_Values(function, values, self._operands, self._read, self._depth + 1))

    def _called(self, chain: Chain) -> Any:
        """The function or method that stands behind names."""
        if len(chain) == 1:
            return self._named(chain[0])
        if chain[0] == _SUPER:
            holder = self._given.get(self._function.__code__.co_varnames[0])
            found = _introspect.inherited(holder, self._named("__class__"), chain[1])
        else:
            holder = self._object(chain[:-1])
            found = _introspect.attribute(holder, chain[-1])
        own = {} if isinstance(holder, type | types.ModuleType) else _introspect.own(holder) or {}
        is_method = isinstance(found, types.FunctionType) and not isinstance(holder, types.ModuleType)
        if is_method and isinstance(inspect.getattr_static(holder, chain[-1], None), types.FunctionType):
            return found if chain[-1] in own else types.MethodType(found, holder)
        return found if isinstance(holder, types.ModuleType) else None

    def _object(self, chain: Chain) -> Any:
        found = self._named(chain[0])
        for name in chain[1:]:
            try:
                found = _introspect.plain_value(found, name)
            except AttributeError:
                raise _Unknown from None
        return found

    def found(self, chain: Chain) -> Any:
        """What names lead to; itself if that is no plain number."""
        try:
            found = self.of(chain)
        except _Unknown:
            return _Unknown
        self._operands.update(_set_by(chain))
        return found

    def argument(self, name: str) -> int:
        return int(self._given[name])

    def _named(self, name: str) -> Any:
        if name in self._given:
            return self._given[name]
        code = self._function.__code__
        if name in code.co_freevars:
            try:
                return (self._function.__closure__ or ())[code.co_freevars.index(name)].cell_contents
            except ValueError:
                raise _Unknown from None
        found = self._function.__globals__.get(name, _Unknown)
        if found is _Unknown:
            raise _Unknown
        return found


@functools.lru_cache(maxsize=1024)
def _questions(code: types.CodeType, numbers: frozenset[str], bound: bool) -> _Questions | None:
    """What a function asks about those arguments that are numbers: about all; or only about those that it does not
    set, if it puts something else into the others: `total += loss`, where `total` is 0."""
    node = node_of(code)
    found = _asked(node, code, numbers, bound)
    if found is not None or node is None:
        return found
    set_ = {each.id for each in _parts(node) if _is_stored(each)}
    return None if numbers.isdisjoint(set_) else _asked(node, code, numbers - set_, bound)


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _asked(node: Function | None, code: types.CodeType, numbers: frozenset[str], bound: bool) -> _Questions | None:
    try:
        plain: set[str | Chain] = set()
        while node is not None:
            maker = _Maker(node, code, numbers.difference(plain), bound, plain)
            made = maker.made()
            if plain.issuperset(maker.used_plainly):
                return made
            plain |= maker.used_plainly
    except Exception:  # of functions that are not followed, or of source that Python cannot compile again
        pass
    return None


class _Maker:
    """Makes the function that gives the answers."""

    def __init__(
        self, node: Function, code: types.CodeType, numbers: frozenset[str], bound: bool, plain: Set[str | Chain]
    ) -> None:
        """``bound``: whether the first argument is an object with attributes; ``plain``: counters whose values are
        asked for."""
        self._node, self._numbers = node, numbers
        self._bound = code.co_varnames[0] if bound and code.co_argcount else ""
        every = _parts(node)
        self._times_stored = Counter(each.id for each in every if _is_stored(each))
        self._aliases: dict[str, set[str | Chain]] = {}  # variables that hold numbers, and which these are of
        self._open: set[str] = set()  # of these: with as many values as the numbers
        self._bound_otherwise = {each.arg for each in every if isinstance(each, ast.arg)}
        self._bound_otherwise |= {name for each in every for name in _bound_otherwise(each)}
        self._stored = self._bound_otherwise.union(self._times_stored)
        self._arguments = {each.arg for each in arguments(node)}
        self._inner = {name for const in nested(code) if const is not code for name in (*const.co_freevars,)}
        self._set = {
            each.attr for each in every if isinstance(each, ast.Attribute) and not isinstance(each.ctx, ast.Load)
        }
        self.counters: dict[Chain, str] = {}  # the variables that hold them
        self.operands: set[str] = set()
        self.used_plainly: set[str | Chain] = set()  # numbers that are used themselves, whatever the answers
        self._used: set[Chain] = set()
        self._asked = 0
        self._in_choices = 0
        if not numbers.isdisjoint(self._stored | self._inner):
            raise _Unfit
        self._find_counters(every, plain, _counted_later(code))

    def _find_counters(self, every: list[ast.AST], plain: Set[str | Chain], later: frozenset[Chain]) -> None:
        found = {chain for each in every if len(chain := _counts(each)) > 1} | later
        for chain in sorted(found.difference(plain)):
            name = chain[-1]
            named = [each for each in every if isinstance(each, ast.Attribute) and each.attr == name]
            stores = [each for each in named if not isinstance(each.ctx, ast.Load)]
            counted = [each for each in every if _counts(each) == chain]
            is_one = all(names_in(each) == chain for each in named) and self._set.isdisjoint(chain[1:-1])
            if is_one and len(stores) == len(counted) and self._is_found(chain[0]):
                self.counters[chain] = f"counter_{len(self.counters)}"
        self._variables = set(self.counters.values())

    def _is_found(self, name: str) -> bool:
        """Whether a variable stands for the same from the begin of a call on, and is known then."""
        is_own = name == self._bound and name not in self._stored
        return is_own or name not in self._stored | self._inner | self._arguments

    def _stays(self, chain: Chain) -> bool:
        """Whether names lead to the same from the begin of a call on, as far as the function itself tells."""
        return bool(chain) and self._is_found(chain[0]) and self._set.isdisjoint(chain[1:])

    def made(self) -> _Questions:
        body = self._block(self._node.body, certain=True)  # type: ignore[arg-type]
        if self._asked > _MOST:
            raise _Unfit
        asked = {chain: name for chain, name in self.counters.items() if chain in self._used}
        begin = [_statement(f"{name} = values.of({chain!r})") for chain, name in asked.items()]
        begin += [_statement(f"{_argument(name)} = values.argument({name!r})") for name in sorted(self._numbers)]
        dropped = self._variables.difference(asked.values())
        if not (self._numbers or asked):
            raise _Unfit
        made = ast.parse("def ask(values):\n    answers = []\n    note = answers.append")
        definition = made.body[0]
        assert isinstance(definition, ast.FunctionDef)
        definition.body += [*begin, *_without(body, dropped), _statement("return tuple(answers)")]
        scope: dict[str, Any] = {}
        exec(compile(ast.fix_missing_locations(made), "<answers about numbers>", "exec"), scope)
        operands = self.operands.union(*(chain[1:-1] for chain in asked))
        return _Questions(scope["ask"], self._numbers, frozenset(asked), frozenset(operands))

    # -- statements -----------------------------------------------------------------

    def _block(self, statements: list[ast.stmt], certain: bool) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        for each in statements:
            made += self._statement(each, certain)
            if certain and isinstance(each, ast.Return):
                break
        return made

    def _statement(self, node: ast.stmt, certain: bool) -> list[ast.stmt]:
        if (chain := _counts(node)) in self.counters:
            return self._count(node, chain, certain)
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if certain and self._is_alias(name, value):
                self._aliases[name] = self._mentioned(value)
                if self._is_open(value):
                    self._open.add(name)
                made = _statement("_ = _")
                made.targets, made.value = [ast.Name(_alias(name), ast.Store())], self._number(value)
                return [made]
            case ast.If(test=test, body=body, orelse=otherwise):
                asked = self._asks(test)
                if asked is None:
                    return [*self._notes(test), *self._block(body, False), *self._block(otherwise, False)]
                self._asked += 1
                answer = f"answer_{self._asked}"
                self._in_choices += 1
                one, other = self._block(body, certain), self._block(otherwise, certain)
                self._in_choices -= 1
                made = ast.parse(
                    f"{answer} = True if _ else False\nnote({answer})\nif {answer}:\n  pass\nelse:\n  pass"
                ).body
                first, _, choice = made
                assert (
                    isinstance(first, ast.Assign) and isinstance(first.value, ast.IfExp) and isinstance(choice, ast.If)
                )
                first.value.test = asked
                choice.body += one
                choice.orelse += other
                return made
            case ast.With(items=items, body=body):
                return [*(note for item in items for note in self._notes(item)), *self._block(body, certain)]
            case ast.For(target=target, iter=over, body=body, orelse=otherwise):
                return [*self._notes(target), *self._notes(over), *self._block([*body, *otherwise], False)]
            case ast.While(test=test, body=body, orelse=otherwise):
                return [*self._notes(test), *self._block([*body, *otherwise], False)]
            case ast.Try(body=body, handlers=handlers, orelse=otherwise, finalbody=last):
                kinds = [note for each in handlers if each.type is not None for note in self._notes(each.type)]
                parts = [*body, *(one for each in handlers for one in each.body), *otherwise, *last]
                return [*kinds, *self._block(parts, False)]
            case (
                ast.Match()
                | ast.AsyncFor()
                | ast.AsyncWith()
                | ast.FunctionDef()
                | ast.AsyncFunctionDef()
                | ast.ClassDef()
            ):
                if self._mentions(node):
                    raise _Unfit
                return []
            case ast.Return():
                notes = self._notes(node)
                return [*notes, _statement("return tuple(answers)")] if certain else notes
        return self._notes(node)

    def _is_alias(self, name: str, value: ast.expr) -> bool:
        """Whether a variable is another name for a number from its only assignment on."""
        once = self._times_stored[name] == 1 and name not in self._inner | self._arguments | self._bound_otherwise
        is_number = self._mentions(value) and self._chosen_by(value) is None
        return once and is_number and self._number(value) is not None

    def _count(self, node: ast.stmt, chain: Chain, certain: bool) -> list[ast.stmt]:
        added = node.value if isinstance(node, ast.AugAssign) else node.value.right  # type: ignore[attr-defined]
        op = node.op if isinstance(node, ast.AugAssign) else node.value.op  # type: ignore[attr-defined]
        number = self._number(added)
        if number is None or not certain:
            self.counters.pop(chain)
            if chain in self._used:
                raise _Unfit
            return self._notes(added)
        made = ast.AugAssign(ast.Name(self.counters[chain], ast.Store()), op, number)
        return [*(self._notes(added) if self._mentions(added) else []), made]

    # -- expressions ----------------------------------------------------------------

    def _notes(self, node: ast.AST) -> list[ast.stmt]:
        """Statements that note each number in a statement or an expression, and each answer about one."""
        if isinstance(node, _INNER) and self._mentions(node, counters_only=not isinstance(node, ast.Lambda)):
            raise _Unfit
        if (test := self._chosen_by(node)) is not None:
            self._asked += 1
            asked = _statement("note(True if _ else False)")
            asked.value.args[0].test = self._asks(test)
            parts = [child for child in ast.iter_child_nodes(node) if child is not test]
            return [asked, *(note for part in parts for note in self._notes(part))]
        if isinstance(node, ast.Call) and self._mentions(node) and (chain := self._callee(node)) is not None:
            return [*self._notes(node.func), *self._passed(node, chain)]
        if isinstance(node, ast.expr) and self._mentions(node) and (number := self._number(node)) is not None:
            self._asked += 1
            if self._is_open(node) and not self._in_choices:
                self.used_plainly |= self._mentioned(node)
            note = _statement("note(_)")
            note.value.args[0] = number
            return [note]
        return [note for child in ast.iter_child_nodes(node) for note in self._notes(child)]

    def _chosen_by(self, node: ast.AST) -> ast.expr | None:
        """The test about numbers by which an expression takes one of two things, of which one may be no number."""
        if not isinstance(node, ast.IfExp) or self._asks(node.test) is None:
            return None
        named = [each for each in (node.body, node.orelse) if isinstance(each, ast.Name | ast.Attribute)]
        return None if all(map(self._mentions, named)) else node.test

    def _callee(self, node: ast.Call) -> Chain | None:
        """The names by which a function is found that a call with plain arguments calls."""
        if any(isinstance(each, ast.Starred) for each in node.args) or any(each.arg is None for each in node.keywords):
            return None
        match node.func:
            case ast.Attribute(value=ast.Call(func=ast.Name(id="super"), args=[], keywords=[]), attr=name):
                return (_SUPER, name) if self._bound else None
        chain = names_in(node.func)
        return chain if self._stays(chain) else None

    def _passed(self, node: ast.Call, chain: Chain) -> list[ast.stmt]:
        """Notes what a function asks about the numbers that it is called with."""
        given = [*enumerate(node.args), *((each.arg, each.value) for each in node.keywords)]
        made: list[ast.stmt] = []
        note = _statement(f"note(values.passed({chain!r}, {{}}, {{}}, ()))")
        _, asked, known, others = note.value.args[0].args
        for place, value in given:
            asks = self._mentions(value)
            number = self._number(value) if asks else self._known(value)
            if number is None:
                made += self._notes(value)
                others.elts.append(ast.Constant(place))
                continue
            into = asked if asks else known
            into.keys.append(ast.Constant(place))
            into.values.append(number)
            self.used_plainly |= self._mentioned(value).intersection(self.counters)
        if asked.keys:
            self._asked += 1
            self.operands.update(_set_by(chain))
            made.append(note)
        return made

    def _known(self, value: ast.expr) -> ast.expr | None:
        """What else a function is called with, if that is written there or found by names, and may be a number."""
        if isinstance(value, ast.Constant):
            return self._number(value)
        chain = names_in(value)
        if not self._stays(chain):
            return None
        return ast.parse(f"values.found({chain!r})", mode="eval").body

    def _asks(self, test: ast.expr) -> ast.expr | None:
        return self._number(test) if self._mentions(test) else None

    def _mentions(self, node: ast.AST, counters_only: bool = False) -> bool:
        """Whether a number stands in a part of the source."""
        found = self._mentioned(node)
        return not found.isdisjoint(self.counters) if counters_only else bool(found)

    def _mentioned(self, node: ast.AST) -> set[str | Chain]:
        """The numbers that stand in a part of the source."""
        names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        chains = {names_in(each) for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        of_aliases = set().union(*(self._aliases[name] for name in names & self._aliases.keys()))
        return {*names & self._numbers, *self.counters.keys() & chains, *of_aliases}

    def _number(self, node: ast.expr) -> ast.expr | None:
        """An expression as the made function computes it; None if it is more than arithmetic with plain numbers."""
        match node:
            case ast.Constant(value=value) if type(value) in _NUMBERS:
                return node
            case ast.Name(id=name) if name in self._numbers:
                return ast.Name(_argument(name), ast.Load())
            case ast.Name(id=name) if name in self._aliases:
                return ast.Name(_alias(name), ast.Load())
            case ast.Name() | ast.Attribute():
                return self._found(node)
            case ast.Call(func=ast.Name(id="len"), args=[inner], keywords=[]) if self._is_found("len"):
                chain = names_in(inner)
                if not self._stays(chain):
                    return None
                self.operands.update(_set_by(chain))
                return ast.parse(f"values.length({chain!r})", mode="eval").body
            case ast.UnaryOp(operand=inner):
                return self._with(lambda inner: ast.UnaryOp(node.op, inner), inner)
            case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _ARITHMETIC):
                return self._with(lambda left, right: ast.BinOp(left, node.op, right), left, right)
            case ast.BoolOp(values=values):
                return self._with(lambda *values: ast.BoolOp(node.op, [*values]), *values)
            case ast.IfExp(test=test, body=one, orelse=other):
                return self._with(lambda test, one, other: ast.IfExp(test, one, other), test, one, other)
            case ast.Compare(
                left=left, ops=[ast.In() | ast.NotIn() as op], comparators=[ast.Tuple() | ast.List() as many]
            ):
                return self._with(
                    lambda left, *items: ast.Compare(left, [op], [ast.Tuple([*items], ast.Load())]), left, *many.elts
                )
            case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(op, _COMPARED) for op in ops):
                return self._with(lambda left, *others: ast.Compare(left, ops, [*others]), left, *others)
        return None

    def _is_open(self, node: ast.expr) -> bool:
        """Whether an expression of a number has as many values as the number."""
        match node:
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Invert(), operand=inner):
                return self._is_open(inner)
            case ast.BinOp(left=left, op=op, right=right):
                parts = [part for part in (left, right) if self._mentions(part)]
                return not isinstance(op, ast.Mod | ast.FloorDiv) and any(map(self._is_open, parts))
            case ast.Name(id=name) if name in self._aliases:
                return name in self._open
        return isinstance(node, ast.Name | ast.Attribute)

    def _with(self, made: Callable[..., ast.expr], *parts: ast.expr) -> ast.expr | None:
        numbers = [self._number(part) for part in parts]
        return None if None in numbers else made(*numbers)

    def _found(self, node: ast.expr) -> ast.expr | None:
        chain = names_in(node)
        if chain in self.counters:
            self._used.add(chain)
            return ast.Name(self.counters[chain], ast.Load())
        if not self._stays(chain):
            return None
        self.operands.update(_set_by(chain))
        return ast.parse(f"values.of({chain!r})", mode="eval").body


def _set_by(chain: Chain) -> Chain:
    """The names under which code would set what a chain of names leads to."""
    return chain[1:] or chain


def _argument(name: str) -> str:
    return f"argument_{name}"


def _alias(name: str) -> str:
    return f"variable_{name}"


def _bound_otherwise(node: ast.AST) -> list[str]:
    """The names that a part of the source binds, and that are no `ast.Name`."""
    match node:
        case ast.alias(name=name, asname=other):
            return [other or name.partition(".")[0]]
        case (
            ast.ExceptHandler(name=str() as name) | ast.MatchAs(name=str() as name) | ast.MatchStar(name=str() as name)
        ):
            return [name]
        case ast.MatchMapping(rest=str() as name):
            return [name]
        case ast.Global(names=names) | ast.Nonlocal(names=names):
            return names
    return []


def _counts(node: ast.AST) -> Chain:
    """The names of what a statement adds a number to; none of another statement."""
    return names_in(added_to(node))


def _statement(text: str) -> Any:
    return ast.parse(text).body[0]


def _without(body: list[ast.stmt], dropped: set[str]) -> list[ast.stmt]:
    """Statements without those that count what nobody asks about."""
    left = []
    for each in body:
        if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name) and each.target.id in dropped:
            continue
        if isinstance(each, ast.If):
            each.body, each.orelse = _without(each.body, dropped), _without(each.orelse, dropped)
        left.append(each)
    return left


def may_set(names: Set[str], functions: Iterable[types.FunctionType]) -> bool:
    """Whether a function may set an attribute or a variable of these names. Of what installed packages set without
    naming it, :class:`Operand` tells when they have run."""
    for function in functions:
        code, named = function.__code__, _code.names(function.__code__)
        asked = named.attributes | set(named.globals)
        is_scripts = not code.co_filename.startswith(PACKAGES)
        if named.runs_text or not names.isdisjoint(_names_set(code)):
            return True
        if is_scripts and not _SETS_UNNAMED.isdisjoint(asked):
            return True
        may_name = not names.isdisjoint(named.texts) or (is_scripts and named.computes)
        if may_name and not _SETS_BY_TEXT.isdisjoint(asked):
            return True
    return False


@by_identity
def _names_set(code: types.CodeType) -> frozenset[str]:
    """The attributes and variables of others that code sets or takes away, nested code included."""
    return frozenset(
        str(instruction.argval)
        for each in nested(code)
        for instruction in dis.get_instructions(each)
        if instruction.opname.startswith(("STORE_", "DELETE_")) and instruction.opname.endswith(_SETS)
    )
