"""Functions that run: whose code it is, the user's current line, and where they handle errors."""

from __future__ import annotations

import contextlib
import dataclasses
import dis
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from . import _introspect
from ._identity import address, by_identity
from ._libraries import is_file_of_python
from ._native import c_text

# The slash at the end tells them from packages whose names begin alike.
TORCH = f"{torch.__path__[0]}/"
_ROTE = f"{__file__.rsplit('/', 1)[0]}/"

# These swallow what a manager in them swallows, which is in reach itself, or a function that was pushed.
_STACKS = (contextlib.ExitStack, contextlib.AsyncExitStack)
_PUSHED = frozenset({"push", "push_async_exit"})
_OF_GENERATORS = (contextlib._GeneratorContextManager, contextlib._AsyncGeneratorContextManager)
_OF_TESTS = frozenset({"assertRaises", "assertRaisesRegex", "subTest"})
LENIENT = _OF_TESTS | {contextlib.suppress.__name__}
# Managers made by `contextlib.contextmanager`.
_ENTERS = contextlib._GeneratorContextManager.__enter__.__code__
_LEAVES = contextlib._GeneratorContextManager.__exit__.__code__
_WRAPPERS = (functools.partialmethod, staticmethod, classmethod)
_LEAVING = frozenset({"__exit__", "__aexit__"})
# Of Python's own: these return what the `__exit__` of a lock of C returns, which is nothing.
_OF_LOCKS = frozenset({"SemLock.__exit__", "Condition.__exit__"})
# Where C calls these and an error is raised, iteration ends, another way is tried, or Python prints it and goes on.
_CALLED_BY_C = ("__getitem__", "__next__", "__len__", "__length_hint__", "__getattr__", "__getattribute__", "__del__")
_GENERATES = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
_FIRST = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT", "RERAISE", "WITH_EXCEPT_START")


def _is_users_own(code: types.CodeType) -> bool:
    """Whether code is neither torch's, nor Rote's, nor Python's own."""
    name = code.co_filename
    return not (name.startswith((TORCH, _ROTE, "<frozen")) or is_file_of_python(name))


is_users_own = by_identity(_is_users_own, most=1 << 16)  # asked of every frame


def user_line() -> bytes:
    """The innermost line of the user's own code, as ``file:line``."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users_own(frame.f_code):
            return c_text(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        frame = frame.f_back
    return b""


@dataclasses.dataclass
class Handlers:
    """What may handle errors, of all that a step can reach, beside ``except``."""

    lenient: bool = False  # whether some manager may swallow errors
    suppresses: bool = False  # whether `contextlib.suppress` is there: it swallows what it is told to
    suppressing: int = 0  # how many of these are entered now that are told anything
    stacks: bool = False  # whether there are stacks of managers
    called_by_c: dict[int, types.CodeType] = dataclasses.field(default_factory=dict)  # methods whose errors C handles

    def of_class(self, kind: type) -> None:
        """Takes note of what a class itself has of it."""
        names = _introspect.class_dict(kind)
        if kind in _OF_GENERATORS:
            return  # the generator decides, whose function is in reach
        if kind in _STACKS:
            self.stacks = True
            return
        if kind is contextlib.suppress:
            self.suppresses = True
            return
        self.lenient |= issubclass(kind, contextlib.suppress) or any(
            _may_handle(names[leave]) for leave in _LEAVING if leave in names
        )
        for name in _CALLED_BY_C:
            method: Any = names.get(name)
            while type(method) in _WRAPPERS:
                method = method.func if type(method) is functools.partialmethod else method.__func__
            if type(method) is types.FunctionType and method.__code__.co_name != name:
                self.called_by_c[address(method.__code__)] = method.__code__

    def of_function(self, function: types.FunctionType) -> None:
        """The same of a function: managers that it makes, with ``contextlib.contextmanager`` or by a class of its
        own."""
        self.lenient |= _is_lenient_code(function.__code__)

    def of_names(self, names: set[str]) -> None:
        """The same of the names in code."""
        stacks = self.stacks or any(kind.__name__ in names for kind in _STACKS)
        self.suppresses |= contextlib.suppress.__name__ in names
        self.lenient |= not _OF_TESTS.isdisjoint(names) or (stacks and not _PUSHED.isdisjoint(names))

    def patches(self, stack: contextlib.ExitStack, patched: Callable[..., Any]) -> None:
        """Counts those that are entered, until ``stack`` is left."""
        kind: Any = contextlib.suppress
        enter, leave = kind.__enter__, kind.__exit__

        def entering(manager: Any) -> Any:
            self.suppressing += bool(manager._exceptions)
            return enter(manager)

        def leaving(manager: Any, *error: Any) -> Any:
            self.suppressing -= bool(manager._exceptions)
            return leave(manager, *error)

        self.suppressing = 0
        stack.enter_context(patched(kind, "__enter__", entering))
        stack.enter_context(patched(kind, "__exit__", leaving))

    @property
    def may_swallow(self) -> bool:
        """Whether a manager that is entered now may swallow errors."""
        return self.lenient or (self.suppresses and self.suppressing > 0)


def handler_since(end: types.CodeType, handlers: Handlers) -> str | None:
    """``file:line`` of the innermost call, of those since one of ``end``, that lies where a function of the user's or
    of Python's own library handles errors: under ``except``, a ``finally`` that returns or raises, a ``with`` if some
    manager in reach may swallow them; or in a method of which C handles them."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not end:
        code = frame.f_code
        if not _is_of_torch(code) and _handles(frame, handlers) and not _resumes_generator(frame):
            return f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return None


@by_identity
def _is_of_torch(code: types.CodeType) -> bool:
    """Whether code is PyTorch's or Rote's."""
    return code.co_filename.startswith((TORCH, _ROTE))


def _handles(frame: types.FrameType, handlers: Handlers) -> bool:
    code = frame.f_code
    if code.co_name in _CALLED_BY_C or address(code) in handlers.called_by_c:
        return True
    at = frame.f_lasti
    return any(start <= at < stop and (catches or handlers.may_swallow) for start, stop, catches in _regions(code))


def _resumes_generator(frame: types.FrameType) -> bool:
    """Whether a manager made by ``contextlib.contextmanager`` runs the part of its generator before or behind the
    ``yield``, and no error is handled there so far. Around it stands ``except StopIteration``, which no generator
    raises. What the generator handles, its own frame tells."""
    code = frame.f_code
    return code is _ENTERS or (code is _LEAVES and frame.f_locals.get("typ", code) is None)


@by_identity
def _regions(code: types.CodeType) -> list[tuple[int, int, bool]]:
    """Ranges of instructions under a handler, and whether it is one that catches by itself: else it is that of a
    ``with`` statement, whose manager decides."""
    if not code.co_exceptiontable:
        return []
    instructions = list(dis.get_instructions(code))
    at = {each.offset: i for i, each in enumerate(instructions)}
    regions = []
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        first = at.get(entry.target)
        if first is None or instructions[first].opname != "PUSH_EXC_INFO":
            continue  # tidies up behind another handler
        name = next((each.opname for each in instructions[first:] if _decides(each)), "RERAISE")
        if name != "RERAISE":  # `finally` raises again
            regions.append((entry.start, entry.end, name != "WITH_EXCEPT_START"))
    return regions


def _decides(instruction: dis.Instruction) -> bool:
    """Whether it is at this instruction that a handler lets an error pass or not."""
    return instruction.opname in _FIRST or _raises(instruction)


def _raises(instruction: dis.Instruction) -> bool:
    """``raise`` of an error, which takes the place of one that is handled."""
    return instruction.opname == "RAISE_VARARGS" and bool(instruction.arg)


@by_identity
def _raises_another(code: types.CodeType) -> bool:
    """Whether a function raises an error of its own anywhere."""
    return any(map(_raises, dis.get_instructions(code)))


def _may_handle(leave: object) -> bool:
    """Whether a method may swallow errors by what it returns, or raise others: C's do not, others if they can't be
    looked into."""
    if type(leave) is types.FunctionType:
        code = leave.__code__
        if code.co_filename.startswith((TORCH, _ROTE)):
            return False
        if code.co_qualname in _OF_LOCKS and is_file_of_python(code.co_filename):
            return False
        return not _returns_nothing(code) or (is_users_own(code) and _raises_another(code))
    return type(leave) is not types.MethodDescriptorType and type(leave).__name__ != "instancemethod"


def may_swallow(manager: Any) -> bool:
    """Whether a manager may let no error pass, or raise another one."""
    kind = type(manager)
    if kind in _OF_GENERATORS:
        code = getattr(manager.gen, "gi_code", None)
        return code is None or _is_lenient_code(code)
    if issubclass(kind, contextlib.suppress):
        return kind is not contextlib.suppress or bool(manager._exceptions)
    return kind in _STACKS or _may_handle(inspect.getattr_static(kind, "__exit__", None))


@by_identity
def _is_lenient_code(code: types.CodeType) -> bool:
    if code.co_flags & _GENERATES and any(catches for _, _, catches in _regions(code)):
        return True
    inner = [const for const in code.co_consts if type(const) is types.CodeType]
    said = itertools.chain(code.co_names, code.co_consts, *(c for c in code.co_consts if type(c) is tuple))
    leaving = {name for name in said if type(name) is str} & _LEAVING
    plain = {each.co_name for each in inner if _returns_nothing(each) and not _raises_another(each)}
    return not leaving <= plain or any(map(_is_lenient_code, inner))


@by_identity
def _returns_nothing(code: types.CodeType) -> bool:
    """Whether a function returns ``None`` or ``False``, wherever it ends."""
    instructions = list(dis.get_instructions(code))
    for before, each in itertools.pairwise(instructions):
        falsy = before.opname == "LOAD_CONST" and before.argval in (None, False) and not each.is_jump_target
        if each.opname == "RETURN_VALUE" and not falsy:
            return False
        if each.opname == "RETURN_CONST" and each.argval not in (None, False):
            return False
    return True
