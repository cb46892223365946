"""A walk over values: which it has seen, which it has yet to visit, and the facts and notes that it has made.

It goes down to ``DEPTH`` hops and looks at ``MOST`` objects. Nothing that an object is or does makes it raise.
"""

from __future__ import annotations

import abc
import collections
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any

from ._carried import Carried, by_identity, is_place
from ._executed_code import Codes
from ._facts import (
    ABSENT,
    FUNCTIONS,
    PARTS,
    SAYS_SIZE,
    Attribute,
    Fact,
    atom,
    describe_object,
    describe_plain,
    expects,
    parts_of,
    plain,
    shortened,
    size_in_words,
)
from ._frames import Handlers
from ._numbers import DICT_ITEM, HOST, NONE_OF, SIZE
from ._policy import DEPTH, MOST, reaches_no_memory, reads_unseen, renamed, runs_text


class TooMuchError(BaseException):
    """A walk that follows all code in reach has found too much of it."""


class Walk(abc.ABC):
    """One walk. How it reads a value, the classes that inherit from it say."""

    def __init__(self, ignore: tuple[str, ...], ran: Codes | None, carried: Carried) -> None:
        self.carried, self._carries = carried, bool(carried)  # places that get no guard
        self.met: set[tuple[int, Any]] = set()  # of these, those in reach
        self.ran = ran  # the code that the step runs; None: all that is in reach is followed
        self.facts: list[Fact] = []
        self._ignore = ignore
        self.seen: set[int] = set()
        self._once: set[Any] = set()
        self._hold: list[Any] = []
        self.held_weakly: list[Any] = []  # of these, what only weak references lead to
        self._later: collections.deque[Callable[[], None]] = collections.deque()
        self._first: dict[int, tuple[str, Any]] = {}  # where objects were found first
        self._reads_environment = False
        self.functions: list[types.FunctionType] = []  # whose code is the user's
        self.handlers = Handlers()
        self.watched: set[int] = set()  # objects of which it matters who else holds them,
        self.aliases: list[tuple[str, int]] = []  # and where they were found
        self.stopped: list[str] = []  # where the walk went no further
        self.untold: list[str] = []  # what holds more than the facts say in words
        self.renamed: dict[str, str] = {}  # what reads memory without an op, and where it has a name of its own
        self.origin: Attribute | None = None  # through which it has come by what it visits
        self.class_dicts: dict[int, type] = {}  # classes by the identities of the dicts of their attributes
        self.reads_unseen = False  # whether anything in reach reads attributes so that no recording sees it
        self.unguarded: list[tuple[str, str]] = []  # what could not be looked into, and why

    # -- how a value is read --------------------------------------------------

    @abc.abstractmethod
    def read(self, path: str, value: Any, depth: int) -> None:
        """Guards what a value holds, by what it is."""

    @abc.abstractmethod
    def attributes(self, path: str, value: Any, depth: int) -> None:
        """What an object that is no plain one of Python's classes holds beside its content."""

    @abc.abstractmethod
    def of_class(self, kind: type, depth: int) -> None:
        """The attributes of a class, and what its methods name."""

    @abc.abstractmethod
    def op(self, path: str, packet: Any, depth: int) -> None:
        """Guards the Python functions behind an op: its gradient, and what sets it up."""

    # -- visits -----------------------------------------------------------------

    def name(self, path: str, named: Any) -> None:
        """Names a tensor, module or optimizer of the state, before anything is described that may refer to it."""
        self._first.setdefault(id(named), (path, named))

    def path_of(self, value: Any) -> str:
        """Where an object was found first; empty where that is not known any more."""
        return self._first.get(id(value), ("", None))[0]

    def value(self, path: str, value: Any, depth: int) -> None:
        """Guards what an object can reach. Nothing that it is raises."""
        if id(value) in self.watched:
            self.aliases.append((path, id(value)))
        if atom(value) or (id(value) in self.seen and not issubclass(type(value), types.ModuleType)):
            return
        if type(value) is not type:  # a base class may be in reach under its own name
            self._look_for_renamed(path, None, value)
        if self._ignore and self._ignored(path):
            return
        if runs_text(value):
            self.unguarded.append((path, "it runs any text"))
            return
        if depth > DEPTH:
            if id(value) not in self.seen:
                self._stop(f"{path} is {depth} objects deep")
            return
        if len(self._hold) > MOST:
            self._stop(f"more than {MOST} objects are in reach", once=True)
            return
        self._first.setdefault(id(value), (path, value))
        try:
            self.read(path, value, depth)
        except Exception as problem:  # an object may be anything
            self._note_unseen(path, problem)

    def _look_for_renamed(self, path: str, container: Any, value: Any) -> None:
        if reaches_no_memory(value):
            return
        what = renamed(container, value)
        if what is not None:
            self.renamed[what] = path
        self.reads_unseen = self.reads_unseen or reads_unseen(value)

    def _note_unseen(self, path: str, problem: Exception) -> None:
        self.unguarded.append((path or "the function", type(problem).__name__))

    def _stop(self, why: str, once: bool = False) -> None:
        if why not in self.stopped if once else len(self.stopped) < 20:
            self.stopped.append(why)

    def soon(self, path: str, value: Any, depth: int) -> None:
        """Visits a value once the present visit is over: calls nest without end, and are no hops."""
        if not atom(value):
            depth -= issubclass(type(value), FUNCTIONS)
            origin = self.origin
            self._later.append(lambda: self.through(origin, path, value, depth))

    def through(self, origin: Attribute | None, path: str, value: Any, depth: int) -> None:
        """Visits a value that was come by through an attribute."""
        before, self.origin = self.origin, origin
        try:
            self.value(path, value, depth)
        finally:
            self.origin = before

    def catch_up(self) -> None:
        """Makes the visits that are due."""
        while self._later:
            self._later.popleft()()

    # -- what it remembers ------------------------------------------------------

    def hold(self, value: Any) -> None:
        """Keeps an object while the walk lasts, so that its address stays its own."""
        self._hold.append(value)

    def let_go(self, values: Iterable[Any]) -> None:
        """Lets go, once all is described, of some objects, and of those that nothing but weak references leads to."""
        given = set(map(id, values))
        gone = given.union(map(id, self.held_weakly))
        self._hold = [value for value in self._hold if id(value) not in gone]
        self.seen -= given
        self.held_weakly = []
        self._first.clear()

    def forget(self) -> None:
        """Lets go of everything."""
        self._hold.clear()
        self.held_weakly = []
        self._first.clear()
        self.facts = []

    def visit(self, value: Any) -> bool:
        """Whether an object is seen for the first time."""
        if id(value) in self.seen:
            return False
        self.seen.add(id(value))
        self._hold.append(value)
        return True

    def visit_once(self, key: Any) -> bool:
        """Whether a key is seen for the first time."""
        if key in self._once:
            return False
        self._once.add(key)
        return True

    def environment(self) -> None:
        """Guards the environment variables."""
        self._reads_environment = True

    # -- facts ------------------------------------------------------------------

    def add(
        self,
        kind: int,
        container: Any,
        key: Any,
        guard: int,
        subject: str,
        value: Any,
        text: str | None = None,
        hyperparameter: bool = False,
    ) -> bool:
        """Adds a fact. False: the user has said to ignore it."""
        if self._carries and is_place(kind, container) and (container, key) in self.carried:
            self.met.add(by_identity(container, key))
            return False
        if not atom(value):
            self._look_for_renamed(subject, container, value)
        if self._ignore and self._ignored(subject):
            return False
        part = PARTS.get(kind)
        if text is None:
            if part is None:
                text = self.described(subject, value)
            elif kind in SAYS_SIZE:
                text = size_in_words(kind, value)
            else:
                inside = (f"{subject}({i})" for i in itertools.count())
                text = expects(kind, value, key, lambda item: self.described(next(inside), item))
        if part is not None:
            subject = f"{part}({subject})"
        self.facts.append(Fact(kind, container, key, guard, subject, text, hyperparameter, self.origin))
        return True

    def lacks(self, path: str, own: dict[str, Any], keys: set[str], origin: Attribute | None) -> None:
        """Adds the fact that a dict has nothing under some names."""
        names = tuple(sorted(key for key in keys if not (self._ignore and self._ignored(f"{path}.{key}"))))
        if names:
            self.facts.append(Fact(NONE_OF, own, names, HOST, path, shortened(", ".join(names)), False, origin))

    def _ignored(self, subject: str) -> bool:
        name = subject
        for head in ("closure['", "globals['"):
            if name.startswith(head):
                name = name[len(head) :].replace("']", "", 1)
        return any(
            name == ignored
            or subject == ignored
            or name.endswith("." + ignored)
            or name.startswith((ignored + ".", ignored + "["))
            for ignored in self._ignore
        )

    def described(self, subject: str, value: Any, text: str | None = None) -> str:
        """What a guard expects of a value, which of the objects found before it is, and what it is made of."""
        if value is ABSENT or plain(value):
            return describe_plain(value) if text is None else text
        text = describe_object(value) if text is None else text
        first, _ = self._first.setdefault(id(value), (subject, value))
        if first != subject:
            return f"{text}, {first}"
        parts = parts_of(value)
        if parts is None:
            return text
        inside = [self.described(f"{subject}[{i}]", part) for i, part in enumerate(parts)]
        return shortened(f"{text} of {', '.join(inside)}")

    def entries(self, path: str, own: dict[Any, Any], depth: int) -> None:
        self.add(SIZE, own, None, HOST, path, own)
        for key, item in own.items():
            if type(key) is str and self.add(DICT_ITEM, own, key, HOST, f"{path}.{key}", item):
                self.value(f"{path}.{key}", item, depth + 1)
