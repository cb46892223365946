"""Statements in the middle of a step that only tell numbers: ``print(i, loss.item())`` ahead of ``optimizer.step()``,
``progress.set_postfix(loss=loss.item())``.

Such a statement may as well run when all ops have run. What it reads of tensors stays in its place, and so does what it
finds by names that are not the function's own; what is made of that, and the call, come later.
"""

from __future__ import annotations

import ast
import builtins
import copy
import types
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from . import _blocks, _introspect, _rewrite
from ._sources import Chain, names_in

PLAIN = (int, float, str, bool, type(None))
_FUNCTIONS = frozenset({"float", "int", "round", "abs", "max", "min", "str"})
_METHODS = frozenset(
    {"set_postfix", "set_postfix_str", "set_description", "set_description_str"}
    | {"debug", "info", "warning", "error", "add_scalar"}
)
# Whose methods of these names tell, and do nothing else.
_LIBRARIES = frozenset({"tqdm", "logging", "tensorboardX", "wandb"})
_WRITERS = "torch.utils.tensorboard"
# What may tell something, too, so that the order would be another one, or changes where to.
_TELLING = _METHODS | {"print", "write", "update", "display", "flush", "log", "stdout", "stderr"}
_TELLING |= {"redirect_stdout", "redirect_stderr"}


class _Unfit(Exception):
    """A statement does more than tell numbers."""


@dataclass
class Report:
    """A statement that tells numbers, in two."""

    stays: list[ast.stmt]
    late: ast.stmt
    names: Set[str]  # of the function's own variables that it reads late
    kept: list[Chain]  # the names that lead to what it keeps, but for tensors
    teller: Chain  # those that lead to the object whose method it calls; none of `print`
    values: dict[str, Any] = field(default_factory=dict)  # of these variables, once it was about to run
    fits: bool = False  # whether all of this was then as it must be

    def see(self, variables: Mapping[str, Any]) -> None:
        """The statement, or a block with it, is about to run."""
        self.values = {name: variables[name] for name in self.names if name in variables}
        plain = all(type(_found(variables, chain)) in PLAIN for chain in self.kept)
        self.fits = plain and (_tells(variables, self.teller) if self.teller else _prints(variables))


def report_of(node: ast.stmt, own: Set[str]) -> Report | None:
    """A statement in two, if it only tells numbers. ``own``: the variables of the function."""
    if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Call):
        return None
    call = copy.deepcopy(node.value)
    match call.func:
        case ast.Name("print"):
            teller: Chain = ()
            if any(not isinstance(each.value, ast.Constant) or each.arg == "file" for each in call.keywords):
                return None
        case ast.Attribute(value=ast.Name("wandb"), attr="log"):
            teller = ("wandb",)
        case ast.Attribute(value=holder, attr=name) if name in _METHODS and (teller := names_in(holder)):
            pass
        case _:
            return None
    splitting = _Splitting(node, own)
    try:
        call.args = [splitting.late(each) for each in call.args]
        for each in call.keywords:
            if each.arg is None:
                return None
            each.value = splitting.late(each.value)
    except _Unfit:
        return None
    late = ast.fix_missing_locations(ast.copy_location(ast.Expr(call), node))
    return Report(splitting.stays, late, splitting.names, splitting.kept, teller)


def is_silent(statement: ast.stmt) -> bool:
    """Whether nothing in a statement is named as what tells something."""
    named = {getattr(each, "attr", getattr(each, "id", "")) for each in ast.walk(statement)}
    return named.isdisjoint(_TELLING)


class _Splitting:
    def __init__(self, node: ast.stmt, own: Set[str]) -> None:
        self._node, self._own = node, own
        self._number = 0
        self.stays: list[ast.stmt] = []
        self.names: set[str] = set()
        self.kept: list[Chain] = []

    def _keep(self, value: ast.expr, *read_by: str) -> str:
        name = _blocks.kept_at(self._node, self._number)
        self._number += 1
        self.stays.extend(_blocks.keeps(name, value, self._node, read_by))
        return name

    def late(self, value: ast.expr) -> ast.expr:
        """An expression for later, of what is kept now."""
        match value:
            case ast.Constant():
                return value
            case ast.Name(id=name) if name in self._own:
                self.names.add(name)
                return value
            case ast.Name() | ast.Attribute() if chain := names_in(value):
                self.kept.append(chain)
                return _rewrite.loaded(self._keep(value))
            case ast.Call(func=ast.Attribute(value=tensor, attr="item"), args=[], keywords=[]):
                return _blocks.read_of_kept(self._keep(tensor, "item"), ["item"])
            case ast.Call(func=ast.Name("len"), args=[counted], keywords=[]) if names_in(counted):
                return _rewrite.loaded(self._keep(value))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return ast.Call(value.func, [self.late(each) for each in args], [])
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str()), attr="format"), args=args, keywords=named
            ):
                others = [ast.keyword(each.arg, self.late(each.value)) for each in named]
                return ast.Call(value.func, [self.late(each) for each in args], others)
            case ast.BinOp(left=left, op=op, right=right):
                return ast.BinOp(self.late(left), op, self.late(right))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=inner):
                return ast.UnaryOp(op, self.late(inner))
            case ast.Tuple(elts=parts):
                return ast.Tuple([self.late(each) for each in parts], ast.Load())
            case ast.Dict(keys=keys, values=values) if all(isinstance(key, ast.Constant) for key in keys):
                return ast.Dict(keys, [self.late(each) for each in values])
            case ast.JoinedStr(values=parts):
                return ast.JoinedStr([self.late(each) for each in parts])
            case ast.FormattedValue(value=inner, conversion=conversion, format_spec=spec):
                return ast.FormattedValue(self.late(inner), conversion, None if spec is None else self.late(spec))
        raise _Unfit


def _found(variables: Mapping[str, Any], chain: Chain) -> Any:
    """What names stand for; an object of no plain kind where that is not known."""
    if chain[0] not in variables:
        return _Unfit
    found = variables[chain[0]]
    try:
        for name in chain[1:]:
            found = _introspect.plain_value(found, name)
    except AttributeError:
        return _Unfit
    return found


def _prints(variables: Mapping[str, Any]) -> bool:
    """Whether `print` is Python's own."""
    return "print" not in variables and type(builtins.print) is types.BuiltinFunctionType


def _tells(variables: Mapping[str, Any], chain: Chain) -> bool:
    """Whether names lead to what only tells: an object of a library for that, or the library."""
    found = _found(variables, chain)
    if isinstance(found, types.ModuleType):
        module = (_introspect.own(found) or {}).get("__name__", "")
    else:
        module = type(found).__module__
    return type(module) is str and (module.partition(".")[0] in _LIBRARIES or module.startswith(_WRITERS))
