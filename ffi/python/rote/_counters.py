"""Whole numbers that a step counts up and nothing else in it reads: ``self.step += 1``.

Such a number needs no guard, and a replay adds to it what the recorded call has added. This is proven from the code
that a call runs: each place that names the number adds to it, in a statement of its own (``n += k``, ``n -= k``,
``n = n + k``), and no code gets at attributes without naming them. What is added then depends on guarded values only.
"""

from __future__ import annotations

import ast
import functools
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import _code, _facts, _introspect
from ._decisions import Decisions
from ._libraries import is_library_class
from ._numbers import ATTRIBUTE, CELL, DICT_ITEM, HOST
from ._sources import added_to, node_of

_LARGE = 1 << 53  # what a plan's JSON holds exactly
# With these, code gets at attributes that it does not name.
_UNNAMED = frozenset(
    {"vars", "__dict__", "dir", "__dir__", "getmembers", "copy", "deepcopy", "dumps", "dump", "__getstate__"}
    | {"__reduce__", "__reduce_ex__", "asdict", "astuple", "globals", "attrgetter"}
    | {"methodcaller", "__getattribute__", "get_referents", "get_objects", "get_referrers", "cell_contents"}
    | {"__match_args__", "format", "format_map"}
)
# With these, code gets at attributes by their text.
_BY_TEXT = frozenset(
    {"getattr", "hasattr", "setattr", "delattr", "__getattr__", "__setattr__", "__delattr__", "getattr_static"}
)


@dataclass
class Counter:
    """One number: a cell, or an entry of an object's or a module's own dict."""

    path: str
    holder: Any
    key: Any
    name: str

    @property
    def value(self) -> Any:
        if isinstance(self.holder, types.CellType):
            try:
                return self.holder.cell_contents
            except ValueError:  # empty
                return None
        return self.holder.get(self.key)

    @property
    def kind(self) -> type:
        """The class of the number, which is guarded."""
        return type(self.value)

    def add(self, number: int) -> None:
        """Counts as a step has counted."""
        self._put(self.value + number)

    def _put(self, value: Any) -> None:
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        else:
            self.holder[self.key] = value

    def put_back(self, value: int) -> None:
        """Takes back what a step has counted."""
        self._put(value)

    def fact(self) -> _facts.Fact:
        """That it is a whole number still."""
        return _facts.Fact(ATTRIBUTE, self, "kind", HOST, f"type({self.path})", "int")


class Counters:
    """The whole numbers in reach of a step that is recorded."""

    def __init__(self, facts: list[_facts.Fact], holders: dict[int, Any], functions: list[types.FunctionType]) -> None:
        """``holders``: the objects by the identities of their own dicts."""
        self._before: list[tuple[Counter, int]] = []
        namespaces = {id(function.__globals__) for function in functions}
        known = set()  # an object may be guarded under two paths
        for fact in facts:
            counter = _counter(fact, holders, namespaces)
            if counter is not None and (place := (id(counter.holder), counter.key)) not in known:
                known.add(place)
                self._before.append((counter, counter.value))
        self.found: list[Counter] = []
        """Which nothing reads."""

    def prove(
        self, functions: list[types.FunctionType], late: list[Any], read: set[str], decisions: Decisions | None
    ) -> None:
        """Finds the counters that nothing reads, or only the step, to decide. ``functions``: what calls of the step
        run; ``late``: the schedulers that run after it; ``read``: names, and paths of counters, that are known to be
        read; ``decisions``: what the step asks about numbers."""
        functions = [*functions, *_functions_in([vars(scheduler) for scheduler in late])]
        names = [_code.names(function.__code__) for function in functions]
        if any(each.computes or each.runs_text for each in names):
            return
        if any(not _UNNAMED.isdisjoint(each.attributes | set(each.globals)) for each in names):
            return
        by_text = any(not _BY_TEXT.isdisjoint(each.attributes | set(each.globals)) for each in names)
        texts = {text for each in names for text in each.texts} if by_text else set()
        sees_cells = any("locals" in each.globals for each in names)
        for counter, _ in self._before:
            if counter.name in texts or not read.isdisjoint((counter.name, counter.path)):
                continue
            if sees_cells and isinstance(counter.holder, types.CellType):
                continue
            codes = [function.__code__ for function in functions]
            naming = [code for code, each in zip(codes, names, strict=True) if _is_named(counter, code, each)]
            alone = decisions is not None and [*map(id, naming)] == [id(decisions.code)]
            asked = alone and decisions is not None and decisions.counted(counter.name)
            if naming and (asked or all(_only_counts(code, counter.name) for code in naming)):
                self.found.append(counter)

    def guarded(self, facts: list[_facts.Fact]) -> list[_facts.Fact]:
        """The facts without those of counters."""
        places = {(id(counter.holder), counter.key) for counter in self.found}
        left = [
            fact for fact in facts if fact.kind not in (DICT_ITEM, CELL) or (id(fact.container), fact.key) not in places
        ]
        return [*left, *(counter.fact() for counter in self.found)]

    def changed(self) -> bool:
        """Whether the step has changed a whole number that is guarded."""
        free = {id(counter) for counter in self.found}
        return any(counter.value != before for counter, before in self._before if id(counter) not in free)

    def counted(self) -> list[tuple[Counter, int]]:
        """What the step has added to each counter."""
        free = {id(counter) for counter in self.found}
        found = []
        for counter, before in self._before:
            after = counter.value
            if id(counter) in free and type(after) is int and after != before:
                found.append((counter, after - before))
        return found

    def put_back(self) -> None:
        """Takes back what the step has counted."""
        for counter, number in self.counted():
            counter.put_back(counter.value - number)

    @property
    def strange(self) -> str:
        """A counter that the step has left as something else than a whole number near the one before."""
        for counter in self.found:
            if type(counter.value) is not int:
                return counter.path
        return next((counter.path for counter, number in self.counted() if abs(number) > _LARGE), "")


def _counter(fact: _facts.Fact, holders: dict[int, Any], namespaces: set[int]) -> Counter | None:
    if fact.kind == CELL:
        name = fact.subject.rpartition("closure['")[2].removesuffix("']")
        counter = Counter(fact.subject, fact.container, None, name)
    elif fact.kind == DICT_ITEM and fact.guard == HOST and type(fact.key) is str:
        if type(dict.get(fact.container, fact.key)) is not int:
            return None
        owner = holders.get(id(fact.container))
        if id(fact.container) not in namespaces and (owner is None or not _is_set_plainly(owner, fact.key)):
            return None
        counter = Counter(fact.subject, fact.container, fact.key, fact.key)
    else:
        return None
    return counter if type(counter.value) is int else None


def _is_set_plainly(owner: Any, name: str) -> bool:
    """Whether setting an attribute does nothing else, and no code of a library's class reads it."""
    kind = type(owner)
    if not _introspect.sets_plainly(kind, name):
        return False
    for base in _introspect.mro(kind):
        own = _introspect.class_dict(base)
        if base is not object and is_library_class(base):
            codes = [each.__code__ for each in own.values() if type(each) is types.FunctionType]
            if any(name in _code.names(code).attributes for code in codes):
                return False
    return True


def _is_named(counter: Counter, code: types.CodeType, names: _code.Names) -> bool:
    if isinstance(counter.holder, types.CellType):
        return any(counter.name in (*each.co_freevars, *each.co_cellvars) for each in _nested(code))
    return counter.name in names.attributes or counter.name in names.globals


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _functions_in(values: list[Any], depth: int = 3) -> Iterator[types.FunctionType]:
    """Functions among values, in lists and dicts of these, and of classes of the user's."""
    for value in values:
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, types.MethodType):
            value = value.__func__
        if isinstance(value, types.FunctionType):
            yield value
        elif depth and isinstance(value, list | tuple):
            yield from _functions_in(list(value), depth - 1)
        elif depth and isinstance(value, dict):
            yield from _functions_in(list(value.values()), depth - 1)
        elif not is_library_class(type(value)) and _introspect.can_change(type(value)):
            yield from (each for base in _introspect.mro(type(value)) for each in _introspect.class_dict(base).values()
                        if type(each) is types.FunctionType)  # fmt: skip


_counting: dict[tuple[types.CodeType, str], bool] = {}


def _only_counts(code: types.CodeType, name: str) -> bool:
    """Whether all that a function does with a name is to add to what it stands for."""
    known = _counting.get((code, name))
    if known is None:
        node = node_of(code)
        known = _counting[code, name] = node is not None and _adds_only(node, name)
    return known


def _adds_only(node: ast.AST, name: str) -> bool:
    uses = sum(_uses(each, name) for each in ast.walk(node))
    arguments = {each.arg for each in ast.walk(node) if isinstance(each, ast.arg)}
    return name not in arguments and uses == sum(_added(each, name) for each in ast.walk(node))


def _uses(node: ast.AST, name: str) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == name) or (isinstance(node, ast.Name) and node.id == name)


def _added(node: ast.AST, name: str) -> int:
    """How many uses of a name a statement has that adds to it."""
    target = added_to(node)
    if target is None or not _uses(target, name):
        return 0
    return 1 if isinstance(node, ast.AugAssign) else 2
