"""Whether a function does no more than arithmetic with hyperparameters.

:mod:`rote._uses` says why, and what a function may do. The source is followed statement by statement.
"""

from __future__ import annotations

import ast
import builtins
import enum
import types
from typing import Any

import torch

from . import _return_places
from ._sources import Function, node_of

# Names by which code gets at a group, or at attributes that it does not name. (Text that code runs is read as code.)
TOUCHING = frozenset(
    {"param_groups", "state_dict", "__dict__", "__getstate__", "__getattribute__", "vars", "attrgetter"}
    | {"get_objects", "get_referents", "get_referrers"}
)
# Ops that are recorded with the very numbers they are given.
NUMERIC = frozenset(
    name + suffix for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp") for suffix in ("", "_")
)
FOREACH = frozenset(f"_foreach_{name}" for name in NUMERIC)
# Methods of a tensor whose results are tensors of the same kind.
_SAME_KIND = frozenset({"clone", "detach", "copy_", "zero_", "neg", "sqrt", "sign", "mul_", "add_"})
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_BUILTINS = frozenset({"enumerate", "zip", "len", "list", "tuple", "reversed"})


class Kind(enum.Enum):
    """What an expression may be, as far as it matters."""

    UNKNOWN = enum.auto()
    OTHER = enum.auto()
    WRITTEN = enum.auto()  # a number that is written there
    TENSOR = enum.auto()
    PARAMETERS = enum.auto()
    NUMBER = enum.auto()  # a hyperparameter
    GROUP = enum.auto()
    GROUPS = enum.auto()
    MIXED = enum.auto()  # a hyperparameter or a group, or something else


_HELD = frozenset({Kind.NUMBER, Kind.GROUP, Kind.GROUPS, Kind.MIXED})  # kinds that must not go anywhere unseen


_checked: dict[tuple[types.CodeType, bool], str | None] = {}


def problem(function: types.FunctionType, returns: bool) -> str | None:
    """What a function may do with hyperparameters that is not proven to be arithmetic, if there is something.
    ``returns``: it may return them, in places of tuples, lists and dicts that are written there."""
    code = function.__code__
    own = function.__globals__
    if own.get("torch", torch) is not torch or any(hasattr(builtins, name) for name in own.keys() & _BUILTINS):
        return f"{function.__qualname__} names another torch, or replaces built-in functions"
    key = code, returns
    if key not in _checked:
        _checked[key] = f"{function.__qualname__} names param_groups, and its source is not known"
        if (node := node_of(code)) is not None:
            try:
                _checked[key] = Follower(node, code, returns).check()
            except RecursionError:
                _checked[key] = f"{function.__qualname__} is nested too deep"
    return _checked[key]


class Follower:
    """Follows what a function does with hyperparameters, whatever the order of its
    statements: a name is what any of its assignments makes it."""

    def __init__(self, node: Function, code: types.CodeType, returns: bool) -> None:
        self._node = node
        self._returns = returns
        self._filled = frozenset(_return_places.filled_by(node, code) if returns else ())
        self._names: dict[str, Kind] = {
            each.id: Kind.UNKNOWN
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
        }
        self._settled = False
        self._problem: str | None = None

    def check(self) -> str | None:
        """Why the function is not proven, if it is not."""
        while True:
            before = dict(self._names)
            self._function(self._node)
            if before == self._names:
                break
        for name, kind in self._names.items():
            if kind == Kind.UNKNOWN:
                self._names[name] = Kind.OTHER
        self._settled = True
        self._function(self._node)
        return self._problem

    def _fail(self, node: ast.AST, why: str) -> Kind:
        if self._settled and self._problem is None:
            name = getattr(self._node, "name", "a lambda")
            self._problem = f"{name}, line {getattr(node, 'lineno', '?')}: {why}"
        return Kind.OTHER

    def _bind(self, target: ast.AST, kind: Kind) -> None:
        if isinstance(target, ast.Name):
            self._name_is(target.id, kind)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, Kind.OTHER if kind not in _HELD else kind)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                # A hyperparameter that can be unpacked is none that is followed.
                self._bind(each, {Kind.NUMBER: Kind.OTHER, Kind.WRITTEN: Kind.OTHER}.get(kind, _element(kind)))
        else:
            if kind in _HELD:
                self._fail(target, "a hyperparameter is kept where others may read it")
            if isinstance(target, ast.Subscript) and self._kind(target.value) in (Kind.GROUP, Kind.GROUPS):
                self._fail(target, "a group is changed")
            elif isinstance(target, ast.Attribute):
                self._plain(target.value)

    def _name_is(self, name: str, kind: Kind) -> None:
        self._names[name] = _join(self._names.get(name, Kind.UNKNOWN), kind)

    def _plain(self, node: ast.AST | None) -> None:
        """An expression that must not be a hyperparameter."""
        if node is not None and self._kind(node) in _HELD:
            self._fail(node, "a hyperparameter goes where it cannot be followed")

    # -- expressions ----------------------------------------------------------------

    def _kind(self, node: ast.AST) -> Kind:
        match node:
            case ast.Constant():
                return self._constant(node)
            case ast.Name():
                return self._name(node)
            case ast.keyword() | ast.Starred():
                return self._kind(node.value)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript():
                return self._subscript(node)
            case ast.BinOp():
                return self._combined(node, self._kind(node.left), node.op, self._kind(node.right))
            case ast.UnaryOp():
                return self._unary(node)
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp():
                return self._conditional(node)
            case ast.JoinedStr():
                return self._formatted(node)
            case ast.NamedExpr():
                kind = self._kind(node.value)
                self._bind(node.target, kind)
                return kind
            case ast.Lambda():
                self._function(node)
                return Kind.OTHER
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                return self._comprehension(node)
            case ast.Call():
                return self._call(node)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr | ast.keyword | ast.Slice):
                self._plain(child)
        return Kind.OTHER

    def _constant(self, node: ast.Constant) -> Kind:
        if isinstance(node.value, str) and not TOUCHING.isdisjoint(node.value.split(".")):
            return self._fail(node, f"{node.value!r} may get at hyperparameters")
        return Kind.WRITTEN if type(node.value) in (int, float) else Kind.OTHER

    def _name(self, node: ast.Name) -> Kind:
        kind = self._names.get(node.id, Kind.OTHER)
        if node.id in TOUCHING or node.id in ("eval", "exec"):
            return self._fail(node, f"{node.id} gets at hyperparameters")
        if kind == Kind.MIXED:
            self._fail(node, f"{node.id} is a hyperparameter, or something else")
        return kind

    def _attribute(self, node: ast.Attribute) -> Kind:
        kind = self._kind(node.value)
        if node.attr == "param_groups" and kind not in _HELD:
            return Kind.GROUPS
        if node.attr in TOUCHING:
            return self._fail(node, f"{node.attr} gets at hyperparameters")
        if kind in _HELD:
            return self._fail(node, f"{node.attr} of a hyperparameter or a group")
        return Kind.TENSOR if kind == Kind.TENSOR and node.attr in ("grad", "data") else Kind.OTHER

    def _subscript(self, node: ast.Subscript) -> Kind:
        kind = self._kind(node.value)
        self._plain(node.slice)
        if kind == Kind.GROUP:
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return self._entry(node, key)
        if kind in (Kind.GROUPS, Kind.PARAMETERS):
            if isinstance(node.slice, ast.Slice):
                return kind
            return _element(kind)
        if kind in _HELD:
            return self._fail(node, "an entry of a hyperparameter")
        return Kind.UNKNOWN if kind == Kind.UNKNOWN else Kind.OTHER

    def _entry(self, node: ast.AST, key: Any) -> Kind:
        if not isinstance(key, str):
            return self._fail(node, "an entry of a group whose name is not written there")
        return Kind.PARAMETERS if key == "params" else Kind.NUMBER

    def _combined(self, node: ast.AST, left: Kind, op: ast.operator, right: Kind) -> Kind:
        kinds = {left, right}
        if Kind.UNKNOWN in kinds:
            return Kind.UNKNOWN
        if Kind.NUMBER in kinds:
            if kinds <= {Kind.NUMBER, Kind.WRITTEN} and isinstance(op, _ARITHMETIC):
                return Kind.NUMBER
            if kinds == {Kind.NUMBER, Kind.TENSOR} and isinstance(op, _ARITHMETIC[:4]):
                return Kind.TENSOR
            return self._fail(node, "a hyperparameter is combined with something that is no known number or tensor")
        if kinds & _HELD:
            return self._fail(node, "a group is combined with something")
        if kinds == {Kind.WRITTEN}:
            return Kind.WRITTEN
        return Kind.TENSOR if Kind.TENSOR in kinds and kinds <= {Kind.TENSOR, Kind.WRITTEN} else Kind.OTHER

    def _unary(self, node: ast.UnaryOp) -> Kind:
        kind = self._kind(node.operand)
        if isinstance(node.op, ast.Not):
            return Kind.OTHER  # a recording sees it
        if kind in _HELD and (kind != Kind.NUMBER or isinstance(node.op, ast.Invert)):
            return self._fail(node, "a group, or an operation that numbers do not have")
        return kind

    def _compare(self, node: ast.Compare) -> Kind:
        kinds = [self._kind(each) for each in (node.left, *node.comparators)]
        if Kind.NUMBER in kinds:
            is_none = [isinstance(each, ast.Constant) and each.value is None for each in node.comparators]
            for op, none in zip(node.ops, is_none, strict=True):
                if isinstance(op, ast.In | ast.NotIn) or (isinstance(op, ast.Is | ast.IsNot) and not none):
                    return self._fail(node, "a hyperparameter is looked for, or compared by identity")
            if not all(is_none) and not set(kinds) <= {Kind.NUMBER, Kind.WRITTEN, Kind.UNKNOWN}:
                return self._fail(node, "a hyperparameter is compared with something that is no known number")
        elif _HELD & set(kinds):
            return self._fail(node, "a group is compared")
        return Kind.OTHER

    def _conditional(self, node: ast.IfExp) -> Kind:
        self._kind(node.test)
        kind = _join(self._kind(node.body), self._kind(node.orelse))
        return self._fail(node, "a hyperparameter, or something else") if kind == Kind.MIXED else kind

    def _formatted(self, node: ast.JoinedStr) -> Kind:
        for each in ast.walk(node):
            if isinstance(each, ast.FormattedValue) and self._kind(each.value) in (Kind.GROUP, Kind.GROUPS, Kind.MIXED):
                self._fail(node, "a group is formatted")
        return Kind.OTHER  # of a number, a recording sees it

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp) -> Kind:
        for each in node.generators:
            self._loop(each.target, each.iter)
            for test in each.ifs:
                self._kind(test)
        parts = [node.key, node.value] if isinstance(node, ast.DictComp) else [node.elt]
        kinds = [self._kind(part) for part in parts]
        for part in parts:
            self._plain(part)
        ordered = isinstance(node, ast.ListComp | ast.GeneratorExp)
        return Kind.PARAMETERS if ordered and kinds == [Kind.TENSOR] else Kind.OTHER

    def _loop(self, target: ast.AST, iterable: ast.AST) -> None:
        """Binds what a loop goes through."""
        if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and not iterable.keywords:
            name, kinds = iterable.func.id, [self._kind(each) for each in iterable.args]
            targets = target.elts if isinstance(target, ast.Tuple | ast.List) else []
            if name == "enumerate" and len(targets) == 2 and kinds:
                self._bind(targets[0], Kind.OTHER)
                self._bind(targets[1], _element(kinds[0]))
                return
            if name == "zip" and len(targets) == len(kinds):
                for each, kind in zip(targets, kinds, strict=True):
                    self._bind(each, _element(kind))
                return
            if name == "reversed" and len(kinds) == 1:
                self._bind(target, _element(kinds[0]))
                return
        kind = self._kind(iterable)
        if kind in (Kind.GROUP, Kind.NUMBER):
            self._fail(iterable, "a loop over the entries of a group")
        self._bind(target, _element(kind))

    def _call(self, node: ast.Call) -> Kind:
        given = [*node.args, *node.keywords]
        kinds = [self._kind(each) for each in given]
        function = node.func
        if isinstance(function, ast.Name) and function.id in _BUILTINS and function.id not in self._names:
            if function.id == "len" and set(kinds) <= {Kind.GROUPS, Kind.PARAMETERS, Kind.OTHER, Kind.UNKNOWN}:
                return Kind.OTHER
            if function.id in ("list", "tuple", "reversed") and kinds == [Kind.PARAMETERS]:
                return Kind.PARAMETERS
        if isinstance(function, ast.Attribute):
            owner = self._kind(function.value)
            if owner == Kind.GROUP and function.attr == "get" and 0 < len(given) <= 2 and not node.keywords:
                default = kinds[1] if len(kinds) == 2 else Kind.OTHER
                key = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                if default in (Kind.OTHER, Kind.WRITTEN):
                    return self._entry(node, key)
            allowed = not set(kinds) & {Kind.GROUP, Kind.GROUPS, Kind.MIXED}
            of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch" not in self._names
            if allowed and owner == Kind.TENSOR and function.attr in NUMERIC:
                return Kind.TENSOR
            if allowed and of_torch and function.attr in NUMERIC | FOREACH:
                return Kind.TENSOR if function.attr in NUMERIC else Kind.OTHER
            if owner == Kind.TENSOR:
                for each in given:
                    self._plain(each)
                return Kind.TENSOR if function.attr in _SAME_KIND else Kind.OTHER
        self._plain(function)
        for each in given:
            self._plain(each)
        if isinstance(function, ast.Attribute) and function.attr == "parameters":
            return Kind.PARAMETERS
        return Kind.OTHER

    def _returned(self, node: ast.expr | None) -> None:
        """An expression that is returned, or stands in a place of what is."""
        match node:
            case ast.Tuple(elts=items) | ast.List(elts=items) if self._returns:
                for item in items:
                    self._returned(item)
            case ast.Dict() if self._returns:
                for key, value in zip(node.keys, node.values, strict=True):
                    self._plain(key)
                    self._returned(value) if key is not None else self._plain(value)
            case ast.ListComp(elt=item, generators=[ast.comprehension(ifs=[]) as over]) if self._returns:
                self._loop(over.target, over.iter)
                self._returned(item)
            case None:
                pass
            case _:
                kind = self._kind(node)
                if kind in _HELD and not (self._returns and kind == Kind.NUMBER):
                    self._fail(node, "a hyperparameter goes where it cannot be followed")

    # -- statements ----------------------------------------------------------------

    def _argument(self, name: str, node: Function) -> Kind:
        """What an argument of a function is."""
        return Kind.OTHER

    def _function(self, node: Function) -> None:
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                self._name_is(each.arg, self._argument(each.arg, node))
        for default in (*arguments.defaults, *arguments.kw_defaults):
            self._plain(default)
        if isinstance(node, ast.Lambda):
            self._plain(node.body)
            return
        returns = self._returns
        self._returns = returns and node is self._node
        if node is not self._node:
            self._name_is(node.name, Kind.OTHER)
            for decorator in node.decorator_list:
                self._plain(decorator)
        self._body(node.body)
        self._returns = returns

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        into = _return_places.filled(node)
        if into is not None and into[0].id in self._filled:
            self._name_is(into[0].id, Kind.OTHER)
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                self._plain(node.targets[0].slice)
            self._returned(into[1])
            return
        match node:
            case ast.Assign():
                for target in node.targets:
                    self._assign(target, node.value)
            case ast.AnnAssign():
                if node.value is not None:
                    self._assign(node.target, node.value)
            case ast.AugAssign():
                kind = self._combined(node, self._kind(node.target), node.op, self._kind(node.value))
                self._bind(node.target, kind)
            case ast.For() | ast.AsyncFor():
                self._loop(node.target, node.iter)
                self._body(node.body + node.orelse)
            case ast.If() | ast.While():
                self._kind(node.test)  # whether a number is 0, a recording sees
                self._body(node.body + node.orelse)
            case ast.With() | ast.AsyncWith():
                for item in node.items:
                    self._plain(item.context_expr)
                    if item.optional_vars is not None:
                        self._bind(item.optional_vars, Kind.OTHER)
                self._body(node.body)
            case ast.Try():
                self._body(node.body)
                for handler in node.handlers:
                    self._plain(handler.type)
                    if handler.name:
                        self._name_is(handler.name, Kind.OTHER)
                    self._body(handler.body)
                self._body(node.orelse + node.finalbody)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._function(node)
            case ast.Global() | ast.Nonlocal():
                for name in node.names:
                    if self._names.get(name) in _HELD:
                        self._fail(node, f"{name} outlives the call")
            case ast.Return():
                self._returned(node.value)
            case ast.Expr():
                self._kind(node.value)
            case ast.Assert():
                self._kind(node.test)
                self._plain(node.msg)
            case ast.Raise():
                self._plain(node.exc)
                self._plain(node.cause)
            case ast.Delete():
                if not all(isinstance(target, ast.Name) for target in node.targets):
                    self._fail(node, "something is deleted")
            case ast.Import() | ast.ImportFrom():
                for alias in node.names:
                    self._name_is((alias.asname or alias.name).split(".")[0], Kind.OTHER)
            case ast.Pass() | ast.Break() | ast.Continue():
                pass
            case _:
                self._fail(node, f"a {type(node).__name__} statement beside param_groups")

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        both = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
        if both and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
            for inner, given in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
                self._assign(inner, given)
            return
        self._bind(target, self._kind(value))


def _join(one: Kind, other: Kind) -> Kind:
    if one == other or other == Kind.UNKNOWN:
        return one
    if one == Kind.UNKNOWN:
        return other
    if {one, other} == {Kind.NUMBER, Kind.WRITTEN}:
        return Kind.NUMBER
    return Kind.MIXED if {one, other} & _HELD else Kind.OTHER


def _element(kind: Kind) -> Kind:
    """What a loop over this goes through."""
    entries = {Kind.GROUPS: Kind.GROUP, Kind.PARAMETERS: Kind.TENSOR, Kind.UNKNOWN: Kind.UNKNOWN}
    return entries.get(kind, kind if kind in _HELD else Kind.OTHER)
