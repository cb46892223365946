"""Scripts that run as they are, with their training loops captured: ``python -m rote train.py``.

The script, and the modules of the user's own that it imports, are compiled from their sources with a few changes: a
function with a loop that trains gets a decorator that captures its loops; so does a function of a module or class that
runs a step; loops in the text of a module become calls of their turns.
"""

from __future__ import annotations

import ast
import collections
import functools
import importlib.abc
import importlib.machinery
import itertools
import os
import symtable
import sys
import tokenize
import types
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from . import _introspect, _loops
from ._capture import capture
from ._capture_loops import captured_turn, with_captured_loops
from ._captured import Captured, step_of
from ._libraries import is_own_file
from ._return_places import sees_variables

_LOOPS, _STEP = "_what captures loops", "_what captures a step"  # no variable of a script is named so
_OF_OPTIMIZERS = frozenset({"step", "zero_grad"})
_STEPS = frozenset({"step"})  # inside of functions: what zeroes and goes backward may be a closure for `step`
_NEVER = frozenset({"torch", "rote"})
#: How many steps are captured that the same text has made.
MOST_MADE = 8
# Scopes that run where they stand.
_COMPREHENSIONS = frozenset({"listcomp", "setcomp", "dictcomp"})


class Captures:
    """What is captured of a script."""

    def __init__(self, packages: Sequence[str] = (), **options: Any) -> None:
        """``packages``: installed packages, or modules of these, that are captured as the user's own modules are."""
        self._options = options
        self._packages = [name.replace("-", "_") for name in packages]
        self._made: collections.Counter[types.CodeType] = collections.Counter()
        #: Each captured step and turn of a loop, with the file that it is in.
        self.found: list[tuple[str, Captured[..., Any]]] = []
        #: Why loops that train are not captured.
        self.why: list[str] = []

    def captures(self, module: str, file: str) -> bool:
        """Whether what trains in a module is captured."""
        named = any(module == name or module.startswith(f"{name}.") for name in self._packages)
        return named or is_own_file(file)

    def not_imported(self) -> list[str]:
        """The packages that were named, and that the script has not imported."""
        return [name for name in self._packages if name not in sys.modules]

    def packages_that_train(self) -> list[str]:
        """The installed packages, of those imported and not captured, that have something to capture."""
        found = set[str]()
        for name, module in list(sys.modules.items()):
            package, file = name.partition(".")[0], (_introspect.own(module) or {}).get("__file__")
            if package in {*found, *_NEVER, *sys.stdlib_module_names} or type(file) is not str:
                continue
            if file.endswith(".py") and not self.captures(name, file) and _has_what_trains(file):
                found.add(package)
        return sorted(found)

    def code(self, source: str, path: str, names: dict[str, Any]) -> types.CodeType:
        """The code of a module. ``names``: its globals, which get what the code uses beside."""
        tree = ast.parse(source, path)
        if _uses_rote(tree):
            return compile(source, path, "exec", dont_inherit=True)
        file = os.path.relpath(path)
        used = _Decorating(tree).used
        names.update({name: functools.partial(used[name], self, file) for name in used})
        if _loops.trains(tree.body):
            text = types.FunctionType(compile(source, path, "exec", dont_inherit=True), names)
            text.__name__ = text.__qualname__ = "module"
            turn = functools.partial(self._turn, file)
            try:
                names.update(_loops.remade_text(text, tree, _seen(source, path, tree, names), turn))
            except _loops.NotCapturedError as problem:
                self.why.append(f"{file}: no loop of the module's text can be captured: {problem}")
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def loops(self, file: str, function: types.FunctionType) -> Callable[..., Any]:
        """A function with captured loops."""
        try:
            made, turns = with_captured_loops(function, None, **self._options)
        except ValueError as problem:
            self.why.append(f"{file}: {problem}")
            return function
        self.found += [(file, turn) for turn in turns]
        return made  # type: ignore[no-any-return]

    def step(self, file: str, function: types.FunctionType) -> Callable[..., Any]:
        """A function that is captured, unless it is one of many that the same text has made."""
        self._made[function.__code__] += 1
        if self._made[function.__code__] > MOST_MADE:
            return function
        captured = capture(function, **self._options)
        step_of(captured).keeps_prints = True
        self.found.append((file, captured))

        @functools.wraps(function)
        def step(*args: Any, **kwargs: Any) -> Any:
            return captured(*args, **kwargs)

        return step

    def _turn(self, file: str, turn: types.FunctionType) -> Captured[..., Any]:
        captured = captured_turn(turn, None, **self._options)
        self.found.append((file, captured))
        return captured


class _Decorating(ast.NodeTransformer):
    """Decorates what is to be captured, first of all decorators that are there."""

    def __init__(self, tree: ast.Module) -> None:
        self._is_inside = False  # of a function
        #: What the decorators stand for, by their names.
        self.used: dict[str, Callable[..., Any]] = {}
        self.visit(tree)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if _loops.trains(node.body):
            return self._decorated(node, _LOOPS, Captures.loops)
        if _runs_step(node, _OF_OPTIMIZERS if not self._is_inside else _STEPS):
            return self._decorated(node, _STEP, Captures.step)
        before, self._is_inside = self._is_inside, True
        self.generic_visit(node)
        self._is_inside = before
        return node

    def _as_it_is(self, node: ast.AST) -> ast.AST:
        """Functions in it may be made many times."""
        return node

    visit_AsyncFunctionDef = visit_For = visit_While = visit_Lambda = _as_it_is

    def _decorated(self, node: ast.FunctionDef, name: str, by: Callable[..., Any]) -> ast.FunctionDef:
        at = node.decorator_list[0] if node.decorator_list else node
        node.decorator_list.append(ast.copy_location(ast.Name(name, ast.Load()), at))
        self.used[name] = by
        return node


def _runs_step(node: ast.FunctionDef, of_optimizers: Set[str]) -> bool:
    """Whether a function goes backward and calls one of these methods, and is no generator."""
    every = list(_loops.outer_nodes(node.body))
    called = {each.func.attr for each in every if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)}
    yields = any(isinstance(each, ast.Yield | ast.YieldFrom) for each in every)
    return "backward" in called and not called.isdisjoint(of_optimizers) and not yields


def _has_what_trains(file: str) -> bool:
    """Whether a module has a loop or a step that would be captured."""
    try:
        with tokenize.open(file) as text:
            source = text.read()
        return ".backward(" in source and bool(_Decorating(ast.parse(source)).used)
    except (OSError, SyntaxError, UnicodeDecodeError):
        return False


def _uses_rote(tree: ast.Module) -> bool:
    """Whether a module captures by itself."""
    imported = [each for each in ast.walk(tree) if isinstance(each, ast.Import | ast.ImportFrom)]
    names = [getattr(each, "module", None) or name.name for each in imported for name in each.names]
    return any(name.partition(".")[0] == "rote" for name in names)


def _looks_up(node: ast.AST) -> bool:
    """Whether a part of the source gets at globals without their names."""
    return sees_variables(node) or (isinstance(node, ast.Name) and node.id == "globals")


def _seen(source: str, path: str, tree: ast.Module, names: dict[str, Any]) -> set[str]:
    """The variables of a module that its functions may use, or whoever finds them by text."""
    every = list(ast.walk(tree))
    early = _before_loops(tree)
    looks_up = any(_looks_up(each) for each in every if id(each) not in early)
    if looks_up or names["__name__"] != "__main__":  # others import what is in a module
        return {each.id for each in every if isinstance(each, ast.Name)}
    found = {each.value for each in every if isinstance(each, ast.Constant) and type(each.value) is str}
    left = [*symtable.symtable(source, path, "exec").get_children()]
    while left:
        table = left.pop()
        left += table.get_children()
        if table.get_name() not in _COMPREHENSIONS:
            found.update(each.get_name() for each in table.get_symbols() if each.is_global())
    return found


def _before_loops(tree: ast.Module) -> set[int]:
    """The parts of the text that run once, before any loop that trains begins."""
    found: set[int] = set()
    body: Iterable[ast.stmt] = tree.body
    while body:
        before = list(itertools.takewhile(lambda each: not _loops.trains([each]), body))
        found.update(map(id, _loops.outer_nodes([*before])))
        first = next((each for each in body if each not in before), None)  # `if __name__ == "__main__":`, mostly
        body = [] if not isinstance(first, ast.If) else first.body if _loops.trains(first.body) else first.orelse
    return found


class Finder(importlib.abc.MetaPathFinder):
    """Finds the modules that a script imports, and captures what they train: the user's own, and those of the packages
    that were named."""

    def __init__(self, captures: Captures) -> None:
        self._captures = captures

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        """The module's specification, if this finder loads it."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or type(spec.loader) is not importlib.machinery.SourceFileLoader:
            return None
        if spec.origin is None or not self._captures.captures(name, spec.origin):
            return None
        spec.loader = _Loader(name, str(spec.origin), self._captures)
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, captures: Captures) -> None:
        super().__init__(name, path)
        self._captures = captures

    def exec_module(self, module: types.ModuleType) -> None:
        """Runs the module, with what is captured in it if its text may train."""
        source = self.get_source(module.__name__) or ""
        if "backward" not in source and "optim" not in source:
            return super().exec_module(module)
        exec(self._captures.code(source, self.path, vars(module)), vars(module))
