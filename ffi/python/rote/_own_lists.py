"""Lists that a function fills and that nothing but its own variable ever holds: ``losses = []``, ``losses += [x]``,
``np.mean(losses)``."""

from __future__ import annotations

import ast
from collections.abc import Set

from ._rewrite import LATER, seen_by, walk
from ._sources import names_in

# Functions that keep nothing of a list which they are given.
_ASKING = frozenset({"len", "sum", "min", "max", "any", "all", "print", "str", "round", "sorted"})
_COMPUTING = frozenset({"mean", "std", "var", "median", "sum", "min", "max", "fmean", "array"})
_MODULES = frozenset({"np", "numpy", "statistics", "math", "torch"})


def own_lists(body: list[ast.stmt], names: Set[str]) -> frozenset[str]:
    """Those of the variables of a function, or of a module's text, that hold such a list whenever they are set.
    ``body``: its statements."""
    every = list(walk(body))
    parents = {id(inner): each for each in every for inner in ast.iter_child_nodes(each)}
    uses = [each for each in every if isinstance(each, ast.Name) and each.id in names]
    others = {each.id for each in uses if not _is_plain(each, parents)}
    made = {each.id for each in uses if isinstance(each.ctx, ast.Store)}
    named = {name for each in every if isinstance(each, ast.Global | ast.Nonlocal) for name in each.names}
    seen = {name for each in every if isinstance(each, LATER) for name in seen_by(each)}
    set_ = {each.id for each in every if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)}
    set_ |= {each.name for each in every if isinstance(each, ast.FunctionDef | ast.ClassDef)}
    return frozenset() if set_ & (_ASKING | _MODULES) else frozenset(made - others - named - seen)


def _is_plain(use: ast.Name, parents: dict[int, ast.AST]) -> bool:
    """Whether a use of a variable makes a list for it, adds to that, only looks at it, or returns it."""
    parent = parents.get(id(use))
    while isinstance(parent, ast.Tuple | ast.List | ast.Dict) and isinstance(use.ctx, ast.Load):
        parent = parents.get(id(parent))
    match parent:
        case ast.Assign(targets=[target], value=value):
            return target is use and _is_new(value)
        case ast.Tuple(elts=targets) as several:
            match parents.get(id(several)):
                case ast.Assign(targets=[target], value=ast.Tuple(elts=values)):
                    starred = any(isinstance(each, ast.Starred) for each in (*targets, *values))
                    pairs = [] if starred else [*zip(targets, values, strict=False)]
                    return target is several and any(one is use and _is_new(value) for one, value in pairs)
        case ast.AugAssign(target=target, op=ast.Add(), value=ast.List()):
            return target is use
        case ast.Call(func=function, args=[argument, *_]) if argument is use:
            chain = names_in(function)
            asks = len(chain) == 1 and chain[0] in _ASKING
            return asks or (len(chain) == 2 and chain[0] in _MODULES and chain[1] in _COMPUTING)
        case ast.Attribute(value=value, attr="append") as method if value is use:
            call = parents.get(id(method))
            return isinstance(call, ast.Call) and call.func is method and isinstance(parents.get(id(call)), ast.Expr)
        case ast.Subscript(value=value, slice=ast.Constant() | ast.UnaryOp(), ctx=ast.Load()):
            return value is use
        case ast.For(iter=every) | ast.comprehension(iter=every):
            return every is use
        case ast.Return() | ast.FormattedValue():
            return True
    return False


def _is_new(value: ast.expr) -> bool:
    """Whether an expression makes a list."""
    match value:
        case ast.List() | ast.Call(func=ast.Name(id="list"), args=[], keywords=[]):
            return True
    return False
