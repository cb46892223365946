"""Methods that get at attributes without naming them, but at those of their own object alone, such as the
``__post_init__`` of a dataclass: ``setattr(self, field.name, value)``, ``self.__dict__.update(...)``."""

from __future__ import annotations

import ast
import types

from ._identity import by_identity
from ._rewrite import names_set, statements
from ._sources import node_of

_BY_TEXT = frozenset({"setattr", "delattr", "vars"})
_BY_METHOD = frozenset({"__setattr__", "__delattr__", "__getattribute__"})
_OTHERWISE = frozenset({"globals", "locals", "cell_contents", "__globals__", "__closure__"})


@by_identity
def is_all_it_gets_at(code: types.CodeType) -> bool:
    """Whether the source shows that code sets attributes whose names it does not write of its first argument alone."""
    node = node_of(code)
    if node is None or not code.co_argcount:
        return False
    own, body = code.co_varnames[0], statements(node)
    if own in names_set(body):
        return False
    every = [each for statement in body for each in ast.walk(statement)]
    inner = {each.arg for each in every if isinstance(each, ast.arg)}
    if own in inner:
        return False
    fine: set[int] = set()
    for each in every:
        match each:
            case ast.Call(func=ast.Name(id="setattr" | "delattr" | "vars") as name, args=[ast.Name(id=first), *_]):
                if first == own:
                    fine.add(id(name))
            case ast.Call(func=ast.Attribute(value=holder, attr=attr) as method, args=args) if attr in _BY_METHOD:
                by_class = bool(args) and isinstance(args[0], ast.Name) and args[0].id == own
                if by_class or _is_own(holder, own):
                    fine.add(id(method))
                    fine.update(id(arg) for arg in args if isinstance(arg, ast.Constant))
            case ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=first), ast.Constant() as text, *_]):
                if first == own:
                    fine.add(id(text))
            case ast.Attribute(value=holder, attr="__dict__") if _is_own(holder, own):
                fine.add(id(each))
    return all(id(each) in fine or not _gets(each) for each in every)


def _is_own(node: ast.expr, own: str) -> bool:
    """Whether an expression is the first argument, or ``super()``."""
    match node:
        case ast.Name(id=name):
            return name == own
        case ast.Call(func=ast.Name(id="super"), args=[]):
            return True
    return False


def _gets(node: ast.AST) -> bool:
    """Whether a part of the source may get at attributes that it does not name."""
    match node:
        case ast.Name(id=name):
            return name in _BY_TEXT | _OTHERWISE
        case ast.Attribute(attr=name):
            return name == "__dict__" or name in _BY_METHOD | _OTHERWISE or name in _BY_TEXT
        case ast.Constant(value=str() as text):
            return text in _BY_TEXT | _BY_METHOD | _OTHERWISE or text == "__dict__"
    return False
