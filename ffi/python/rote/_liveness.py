"""Which variables of a function may be read later: those that are live, as compilers say."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from ._rewrite import OF_ITS_OWN, may_swallow, plain_names, seen_by, walk

_Names = frozenset[str]
_NONE: _Names = frozenset()


@dataclass(frozen=True)
class _Ways:
    """What is live where statements go on elsewhere."""

    at_break: _Names = _NONE
    at_continue: _Names = _NONE


class Liveness:
    """The variables that are live in a function. Where a variable may be read without being set again, it is live; of
    statements that are not known, and of those under a `try`, all that they name is."""

    def __init__(self, body: Sequence[ast.stmt]) -> None:
        self._behind: dict[int, _Names] = {}
        self._at_end: dict[int, _Names] = {}
        inner = (seen_by(each) for each in walk(body) if isinstance(each, OF_ITS_OWN))
        self.always = frozenset(name for names in inner for name in names)
        """Those that functions inside may read at any time."""
        self.at_begin = self._before(body, _NONE, _Ways()) | self.always

    def behind(self, loop: ast.For | ast.While) -> _Names:
        """The variables that may be read when a turn of a loop has ended, but for what the next turn reads."""
        return self._behind[id(loop)] | self.always

    def at_end(self, loop: ast.For | ast.While) -> _Names:
        """The variables that may be read when a turn of a loop has ended, by the next turn too."""
        return self._at_end[id(loop)] | self.always

    def _before(self, body: Sequence[ast.stmt], after: _Names, ways: _Ways) -> _Names:
        live = after
        for each in reversed(body):
            live = self._statement(each, live, ways)
        return live

    def _statement(self, node: ast.stmt, after: _Names, ways: _Ways) -> _Names:
        match node:
            case ast.Assign(targets=targets, value=value):
                return (after - {name for each in targets for name in plain_names(each)}) | _read(value, *targets)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                return (after - {name}) | _read(value)
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                return (after - {name}) | _read(node)
            case ast.If(test=test, body=body, orelse=otherwise):
                return _read(test) | self._before(body, after, ways) | self._before(otherwise, after, ways)
            case ast.With(items=items, body=body):
                left = after if may_swallow(node) else _NONE
                return _read(*items) | self._before(body, after, ways) | left
            case ast.For(target=target, iter=over):
                return _read(over) | self._loop(node, frozenset(plain_names(target)), _read(target), after, ways)
            case ast.While(test=test):
                return self._loop(node, _NONE, _read(test), after, ways)
            case ast.Return():
                return _read(node)
            case ast.Raise():
                return _read(node)
            case ast.Break():
                return ways.at_break
            case ast.Continue():
                return ways.at_continue
            case ast.Try():
                return self._guarded(node, after, ways)
        return after | _read(node)

    def _loop(self, node: ast.For | ast.While, set_: _Names, read: _Names, after: _Names, ways: _Ways) -> _Names:
        at_end = self._before(node.orelse, after, ways) | read
        head = at_end
        while True:
            self._behind[id(node)] = at_end | after
            self._at_end[id(node)] = head | after
            more = head | (self._before(node.body, head, _Ways(after, head)) - set_)
            if more == head:
                return head
            head = more

    def _guarded(self, node: ast.Try, after: _Names, ways: _Ways) -> _Names:
        """An error may lead from any place to the handlers, and on from there."""
        every = after | ways.at_break | ways.at_continue | _read(node)
        for part in (node.body, node.orelse, node.finalbody, *(each.body for each in node.handlers)):
            self._before(part, every, _Ways(every, every))
        for each in ast.walk(node):
            if isinstance(each, ast.For | ast.While):
                self._behind[id(each)] = self._at_end[id(each)] = every
        return every


def _read(*nodes: ast.AST) -> _Names:
    """The variables that parts of the source read."""
    every = [each for node in nodes for each in ast.walk(node)]
    added = [each.target for each in every if isinstance(each, ast.AugAssign)]
    found = [each for each in every if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store)]
    return frozenset(each.id for each in (*added, *found) if isinstance(each, ast.Name))
