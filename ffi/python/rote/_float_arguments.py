"""Floats among the arguments of a step that are others at every call: the weight of a loss that is annealed, the
share of a mixup, a temperature, the momentum of a teacher.

As hyperparameters of an optimizer do, such a float varies without a miss if every use of it is followed. The source of
the captured function says whether it is: the float goes through arithmetic, comparisons with numbers, ops that take
numbers as they are, and functions of the script's own that do no more. In the arguments that the session sees, the
float gives way to ``((),)``. It is found in a dict of Rote's own, as a hyperparameter is found in a group.

Whether the other operand of ``weight * loss`` is a tensor shows when a call is recorded: a tensor takes the float to an
op. With anything else, but for numbers that are known from the source, the float is pinned, that is guarded itself.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _decisions, _facts, _introspect, _returns, _uses
from ._arithmetic import NUMERIC, Follower, Kind
from ._libraries import PACKAGES
from ._numbers import DICT_ITEM, HOST
from ._policy import holds_hooks
from ._sources import Function, Position, names_in, nested, node_of, position_of

_DEEP = 4  # functions that a float is passed on through
#: Functions of PyTorch in Python that divide a tensor by the argument of a name, and do no more with it.
_DIVIDING: dict[Any, tuple[str, ...]] = {torch.nn.functional.gumbel_softmax: ("logits", "tau")}
_CHOOSING = (min, max)
#: Stand for a float in what the session sees: NumPy's, and Python's. Numbers that decide give way to ``()``.
_INSTEAD = (((),),), ((),)
_NUMBERS = (int, float)
# Numbers of other classes, written in C, read a float unseen.
_OTHER_NUMBERS = frozenset({"complex", "timedelta", "datetime", "Decimal", "decimal", "mpf", "mpfr"})
Place = tuple[str, Position]  # file, and where in it


@dataclass(frozen=True)
class Proof:
    """That floats are followed wherever a function takes them."""

    codes: frozenset[types.CodeType]
    places: frozenset[Place]
    """Where numbers are combined with numbers."""
    called: tuple[tuple[Callable[[], Any], Any, Any], ...]
    """What finds the functions that they are passed on to, these, and their code."""
    numbers: tuple[Callable[[], Any], ...]
    """What finds the other numbers that they are combined with."""
    names: frozenset[str]
    """The names by which all of these are found."""

    def holds(self) -> bool:
        """Whether the functions are still those, and the numbers still numbers."""
        same = all(_is_same(find(), known) and _returns.code_of(known) is code for find, known, code in self.called)
        return same and all(type(find()) in _NUMBERS for find in self.numbers)


class _Unfollowed(Exception):
    """Why floats are not followed."""


class FloatArguments:
    """The floats that a captured function takes."""

    def __init__(self, function: Callable[..., Any]) -> None:
        bound, self._function = _returns.bound_and_plain(function)
        self._bound, self._object = len(bound), next(iter(bound), None)
        #: By name: what a call has given for those that are followed.
        self.values: dict[str, float] = {}
        self._present: dict[str, int | str] = {}  # of the last call, with the place or the name of each
        self._proofs: dict[frozenset[str], Proof | None] = {}
        self._followed: dict[str, bool] = {}

    def seen(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any] | None:
        """The arguments of a call without the floats that are followed; None where there are none."""
        self._present = {}
        if self._function is None or not any(isinstance(value, float) for value in (*args, *kwargs.values())):
            return None
        code = self._function.__code__
        names = code.co_varnames[self._bound : code.co_argcount]
        present: dict[str, int | str] = {
            name: place
            for place, (name, value) in enumerate(zip(names, args, strict=False))
            if _uses.is_number(value) and self._is_followed(name)
        }
        known = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
        present |= {
            name: name
            for name, value in kwargs.items()
            if _uses.is_number(value) and name in known and self._is_followed(name)
        }
        if not present:
            return None
        self._present = present
        for name, place in present.items():
            self.values[name] = args[place] if isinstance(place, int) else kwargs[place]
        return self.replaced(args, kwargs, {name: _INSTEAD[type(self.values[name]) is float] for name in present})

    def replaced(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], by: Mapping[str, Any]) -> tuple[Any, Any]:
        """The arguments of the present call with other things in the places of its floats."""
        left, more = list(args), dict(kwargs)
        for name, place in self._present.items():
            if isinstance(place, int):
                left[place] = by[name]
            else:
                more[place] = by[name]
        return tuple(left), more

    def proof(self, given: Iterable[Any], functions: list[types.FunctionType]) -> Proof | None:
        """Why the floats of the present call may vary, if they may. ``given``: its arguments; ``functions``: all in
        reach."""
        if not self._present or self._function is None or any(type(value) is complex for value in given):
            return None
        names = frozenset(self._present)
        if names not in self._proofs:
            self._proofs[names] = _proof(self._function, names, self._object)
        proof = self._proofs[names]
        if proof is not None and not proof.holds():
            self._proofs.clear()
            self._followed.clear()
            return None
        if proof is None or _uses.taken_names(functions):
            return None
        later = (each for each in functions if each.__name__ != "__init__")  # which sets those of a new object
        return None if _decisions.may_set(proof.names, later) else proof

    def facts(self, followed: bool) -> Iterator[_facts.Fact]:
        """What is to be looked at, at every call. ``followed``: whether the floats may vary."""
        for name in self._present:
            text = _facts.describe(self.values[name])
            yield _facts.Fact(DICT_ITEM, self.values, name, HOST, self.path(name), text, hyperparameter=followed)

    def present(self) -> Iterator[tuple[str, str, float]]:
        """The floats of the present call, by name and path."""
        for name in self._present:
            yield name, self.path(name), self.values[name]

    def path(self, name: str) -> str:
        """How an argument is called in messages."""
        place = self._present[name]
        return f"args[{place}]" if isinstance(place, int) else f"kwargs[{place!r}]"

    def _is_followed(self, name: str) -> bool:
        if name not in self._followed:
            assert self._function is not None
            self._followed[name] = _proof(self._function, frozenset({name}), self._object) is not None
        return self._followed[name]


def _proof(function: types.FunctionType, names: Set[str], holder: Any) -> Proof | None:
    """``holder``: the object whose method the function is."""
    try:
        found = _Found()
        _check(function, names, found, holder)
    except Exception:  # of functions that are not followed, or of objects that may be anything
        return None
    parts = frozenset(found.codes), frozenset(found.places), tuple(found.called), tuple(found.numbers)
    return Proof(*parts, frozenset(found.names))


@dataclass
class _Found:
    codes: set[types.CodeType] = field(default_factory=set)
    places: set[Place] = field(default_factory=set)
    called: list[tuple[Callable[[], Any], Any, Any]] = field(default_factory=list)
    numbers: list[Callable[[], Any]] = field(default_factory=list)
    names: set[str] = field(default_factory=lambda: {"__code__"})


def _check(function: types.FunctionType, names: Set[str], found: _Found, holder: Any, depth: int = 0) -> None:
    code, own = function.__code__, function.__globals__
    node = node_of(code) if _decisions.is_fit(code) else None
    if node is None or depth > _DEEP or code.co_filename.startswith(PACKAGES):
        raise _Unfollowed
    if own.get("torch", torch) is not torch or not _OTHER_NUMBERS.isdisjoint(_named(code)):
        raise _Unfollowed
    follower = _Follower(node, function, names, holder)
    if follower.check() is not None:
        raise _Unfollowed
    found.codes.update(nested(code))
    found.places.update((code.co_filename, place) for place in follower.places)
    found.numbers += follower.numbers
    found.names |= follower.looked_up
    found.called.append((lambda: function, function, code))
    found.called += [(find, known, _returns.code_of(known)) for find, known in follower.known]
    for find, called, passed in follower.passed:
        found.called.append((find, called, _returns.code_of(called)))
        is_method = isinstance(called, types.MethodType)
        plain, its_object = (called.__func__, called.__self__) if is_method else (called, None)
        _check(plain, passed, found, its_object, depth + 1)


def _is_same(one: Any, other: Any) -> bool:
    """Whether two functions are one, or the same method of one object."""
    if one is other:
        return True
    methods = type(one) is types.MethodType and type(other) is types.MethodType
    return methods and one.__func__ is other.__func__ and one.__self__ is other.__self__


def _named(code: types.CodeType) -> set[str]:
    return {name for each in nested(code) for name in (*each.co_names, *each.co_freevars)}


class _Follower(Follower):
    """Follows what a function does with floats that it takes."""

    def __init__(self, node: Function, function: types.FunctionType, names: Set[str], holder: Any) -> None:
        super().__init__(node, function.__code__, returns=False)
        self._function_itself, self._given, self._holder = function, names, holder
        self.numbers: list[Callable[[], Any]] = []
        self.looked_up: set[str] = set()
        self._own = _bound(function.__code__, holder is not None).union(self._names)
        every = [each for each in ast.walk(node) if isinstance(each, ast.Attribute)]
        self._set = {each.attr for each in every if not isinstance(each.ctx, ast.Load)}
        self.places: set[Position] = set()
        #: Functions that floats are passed on to: what finds each, it itself, and the names of the arguments.
        self.passed: list[tuple[Callable[[], Any], Any, frozenset[str]]] = []
        self.known: list[tuple[Callable[[], Any], Any]] = []  # Python's and PyTorch's, with what finds them

    def _argument(self, name: str, node: Function) -> Kind:
        return Kind.NUMBER if node is self._node and name in self._given else Kind.OTHER

    def _constant(self, node: ast.Constant) -> Kind:
        return Kind.WRITTEN if type(node.value) in (int, float) else Kind.OTHER

    def _name(self, node: ast.Name) -> Kind:
        kind = self._names.get(node.id, Kind.OTHER)
        if kind == Kind.MIXED:
            return self._fail(node, "a float, or something else")
        return self._found(node) if kind == Kind.OTHER else kind

    def _attribute(self, node: ast.Attribute) -> Kind:
        kind = self._kind(node.value)
        if kind == Kind.NUMBER:
            return self._fail(node, "an attribute of a float")
        return Kind.UNKNOWN if kind == Kind.UNKNOWN else self._found(node)

    def _found(self, node: ast.expr) -> Kind:
        """What names stand for that nothing in the function sets: a number, or something else."""
        find = self._finder(names_in(node))
        found = None if find is None else find()
        if type(found) is complex:
            return self._fail(node, "a number that is no float")
        if find is None or type(found) not in _NUMBERS:
            return Kind.OTHER
        if self._settled:
            self.numbers.append(find)
            self.looked_up.update(names_in(node))
        return Kind.WRITTEN

    def _entry(self, node: ast.AST, key: Any) -> Kind:
        return Kind.OTHER

    def _combined(self, node: ast.AST, left: Kind, op: ast.operator, right: Kind) -> Kind:
        kinds = {left, right}
        if Kind.NUMBER not in kinds or Kind.UNKNOWN in kinds:
            return super()._combined(node, left, op, right)
        if not isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow):
            return self._fail(node, "an operation that is not followed")
        if kinds <= {Kind.NUMBER, Kind.WRITTEN}:
            return self._computes(node)
        if isinstance(op, ast.Pow) or _is_complex(node):
            return self._fail(node, "an operation that is not followed")
        return Kind.OTHER

    def _computes(self, node: Any) -> Kind:
        if self._settled:
            self.places.add(position_of(node))
        return Kind.NUMBER

    def _unary(self, node: ast.UnaryOp) -> Kind:
        kind = super()._unary(node)
        return self._computes(node) if kind == Kind.NUMBER else kind

    def _call(self, node: ast.Call) -> Kind:
        kinds = [self._kind(each) for each in (*node.args, *node.keywords)]
        if Kind.NUMBER not in kinds:
            self._plain(node.func)
            for each in (*node.args, *node.keywords):
                self._plain(each)
            return Kind.OTHER
        starred = any(isinstance(each, ast.Starred) for each in node.args)
        if starred or any(each.arg is None for each in node.keywords):
            return self._fail(node, "arguments that are not written there")
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in NUMERIC and self._is_op(function):
            return Kind.OTHER
        find = self._finder(names_in(function), calls=True)
        called = None if find is None else find()
        numbers = len(kinds) > 1 and {*kinds} <= {Kind.NUMBER, Kind.WRITTEN} and not node.keywords
        chooses = numbers and any(called is each for each in _CHOOSING)
        names = None if chooses else self._names_passed(node, called)
        if find is None or (names is None and not chooses):
            return self._fail(node, "a float goes where it cannot be followed")
        if self._settled:
            self.looked_up.update((*names_in(function), getattr(called, "__name__", "")))
        if self._settled and (names is None or called in _DIVIDING):
            self.known.append((find, called))
        elif self._settled and names is not None:
            self.passed.append((find, called, names))
        return Kind.NUMBER if chooses else Kind.OTHER

    def _is_op(self, function: ast.Attribute) -> bool:
        """Whether a function of torch is called, or a method of a tensor. One whose name has no underscore may be that
        of anything: its object is a tensor by what finds it, or a result."""
        owner, name = function.value, function.attr
        if self._kind(owner) == Kind.NUMBER or name in self._set:
            return False
        find = self._finder(names_in(owner))
        found = None if find is None else find()
        if found is torch:
            op = self._finder((*names_in(owner), name))
            if self._settled and op is not None:
                self.known.append((op, op()))
            return op is not None and isinstance(op(), types.BuiltinFunctionType)
        if isinstance(found, types.ModuleType):
            return False
        return name.endswith("_") or isinstance(owner, ast.BinOp | ast.Call) or isinstance(found, torch.Tensor)

    def _finder(self, chain: tuple[str, ...], calls: bool = False) -> Callable[[], Any] | None:
        """Finds what names stand for that no statement of the function sets. ``calls``: of an object, what a call of it
        runs."""
        function, builtin = self._function_itself, vars(builtins)
        of_holder = self._holder is not None and chain[:1] == function.__code__.co_varnames[:1]
        if not chain or chain[0] in self._own or not self._set.isdisjoint(chain[1:]):
            return None

        def find() -> Any:
            free = function.__code__.co_freevars
            try:
                if of_holder:
                    found = self._holder
                elif chain[0] in free:
                    found = (function.__closure__ or ())[free.index(chain[0])].cell_contents
                else:
                    found = function.__globals__.get(chain[0], builtin.get(chain[0]))
            except ValueError:
                return None
            for name in chain[1:]:
                try:
                    found = _introspect.plain_value(found, name)
                except AttributeError:
                    found = _method(found, name) if calls else None
            return _forward(found) if calls and isinstance(found, nn.Module) else found

        return find

    def _names_passed(self, node: ast.Call, called: Any) -> frozenset[str] | None:
        """The arguments of a function that are floats in a call; None if they are not known."""
        bound = isinstance(called, types.MethodType)
        plain = called.__func__ if bound else called
        if type(plain) is not types.FunctionType:
            return None
        code = plain.__code__
        if called in _DIVIDING:
            every = by_place = _DIVIDING[called]
        else:
            by_place = code.co_varnames[bound : code.co_argcount]
            every = code.co_varnames[code.co_posonlyargcount : code.co_argcount + code.co_kwonlyargcount]
        given: set[str] = set()
        for place, value in enumerate(node.args):
            if self._kind(value) == Kind.NUMBER:
                if place >= len(by_place):
                    return None
                given.add(by_place[place])
        for each in node.keywords:
            if self._kind(each.value) == Kind.NUMBER:
                if each.arg not in every:
                    return None
                given.add(str(each.arg))
        return None if called in _DIVIDING and given != {"tau"} else frozenset(given)


def _bound(code: types.CodeType, has_object: bool) -> set[str]:
    """The variables that code has, and that functions in it have, without the first argument of a method."""
    every = {name for each in nested(code) if each is not code for name in (*each.co_varnames, *each.co_cellvars)}
    first = code.co_varnames[: int(has_object)]
    return every.union(name for name in (*code.co_varnames, *code.co_cellvars) if name not in first)


def _method(holder: Any, name: str) -> Any:
    """A method of an object, if its class has it and nothing finds it otherwise; else None."""
    kind: Any = type(holder)
    own = _introspect.own(holder)
    found: Any = None if own is None or name in own else inspect.getattr_static(kind, name, None)
    plain = type(found) is types.FunctionType and kind.__getattribute__ is object.__getattribute__
    return types.MethodType(found, holder) if plain else None


def _forward(module: nn.Module) -> Any:
    """What a call of a module runs, if that is its ``forward`` and no hook sees its arguments; else None."""
    own, everywhere = vars(module), vars(torch.nn.modules.module)
    hooked = [*(value for name, value in own.items() if holds_hooks(name))]
    hooked += [value for name, value in everywhere.items() if name.startswith("_global_") and name.endswith("_hooks")]
    is_plain = type(module).__call__ is nn.Module.__call__ and own.get("_compiled_call_impl") is None
    return _method(module, "forward") if is_plain and not any(hooked) else None


def _is_complex(node: ast.AST) -> bool:
    """Whether a number that is no float stands in an expression: it would read a float unseen."""
    return any(isinstance(each, ast.Constant) and type(each.value) is complex for each in ast.walk(node))
