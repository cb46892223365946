"""Loops whose turns are captured: ``for x, y in loader: ...`` in a function that trains for an epoch.

From the source of the function another one is made. What the loop does in one turn becomes a function of its own, which
is captured as a step is. It takes the variables that a turn changes, or finds changed, and returns those that the
function uses later. What a turn only reads it finds in cells, which the loop fills: the model, the optimizer, settings.
``continue``, ``break`` and ``return`` become results.
"""

from __future__ import annotations

import ast
import copy
import functools
import types
from collections.abc import Callable, Iterator, Set
from typing import Any

from . import _rewrite
from ._blocks import source_of
from ._liveness import Liveness
from ._own_lists import own_lists
from ._return_places import sees_variables
from ._rewrite import LATER, OF_ITS_OWN, loaded, may_swallow, mentioned, names_set, plain_names, stored, walk

Loop = ast.For | ast.While
_TURN = "_turn {}"  # no variable of a script is named so, nor any of those below
_CELLS = "_cells of turn {}"
_LEFT = "_what a turn has left"
_MORE = "_what else a turn has left"
_INTERRUPT = "KeyboardInterrupt"
_READ, _SET = "read", "set"  # what statements do with a variable first
_NEXT, _BREAK, _RETURN, _CONTINUE = range(4)
# Calls that keep functions passed to them.
_KEEPING = frozenset(
    {
        *(
            "append",
            "appendleft",
            "add",
            "insert",
            "extend",
            "put",
            "submit",
            "setdefault",
            "update",
            "push",
            "callback",
        ),
        *("partial", "setattr", "Thread", "Timer"),
    }
)


class NotCapturedError(ValueError):
    """No loop of a function can be captured; says why."""


def remade(function: Any, capture: Callable[[types.FunctionType], Callable[..., Any]]) -> Any:
    """A function that does the same, with what ``capture`` makes of the turns of its loops. Raises
    :class:`NotCapturedError`."""
    source = source_of(function)
    if source is None:
        raise NotCapturedError(
            "it is no function of Python's whose source is known, or it is a generator, or gets at its variables "
            "otherwise than by their names (locals, eval)"
        )
    plain, node, _ = source
    node = copy.deepcopy(node)
    loops = _Loops(plain, _rewrite.statements(node), _rewrite.own_names(plain.__code__, node), None, capture)
    body = loops.made(_rewrite.arguments(node))
    whole = _rewrite.function_with(node, body, body[0])
    made = _rewrite.made_of(plain, whole, more=loops.used)
    if made is None:
        raise NotCapturedError("its source cannot be compiled again")
    made.__doc__, made.__annotations__ = plain.__doc__, dict(plain.__annotations__)
    made.__dict__.update(plain.__dict__)
    return _rewrite.in_place(function, made)


def cells_of(made: Any) -> list[types.CellType]:
    """The cells in which the turns of such a function find what they read."""
    plain = _rewrite.plain_function(made)
    closure = () if plain is None else zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True)
    begin = _CELLS.partition("{")[0]
    return [each for name, cell in closure if name.startswith(begin) for each in cell.cell_contents]


def remade_text(
    text: types.FunctionType,
    module: ast.Module,
    seen: Set[str],
    capture: Callable[[types.FunctionType], Callable[..., Any]],
) -> dict[str, Any]:
    """Puts what ``capture`` makes of the turns of its loops into the text of a module, outside of its functions. Raises
    :class:`NotCapturedError`. ``text``: stands for the text, as a function with the variables of the module for its
    globals; ``seen``: the variables of the module that its functions may use. Returns what else the module needs."""
    if not trains(module.body):
        raise NotCapturedError("it has no loop that trains")
    chosen = _chosen(module.body)
    rests = [rest for each in outer_nodes(module.body) if isinstance(each, Loop) for rest in _rest(each.body, chosen)]
    own = names_set([*chosen, *rests]) - seen
    loops = _Loops(text, module.body, own, seen, capture)
    module.body = loops.made(set())
    return {name: cell.cell_contents for name, cell in loops.used.items()}


def trains(body: list[ast.stmt]) -> bool:
    """Whether loops in statements train: loops that the statements themselves run."""
    return any(isinstance(each, Loop) and _trains(each) for each in outer_nodes(body))


class _Loops:
    """Statements whose loops are being captured: those of a function, or the text of a module."""

    def __init__(
        self,
        function: types.FunctionType,
        body: list[ast.stmt],
        own: Set[str],
        shared: Set[str] | None,
        capture: Callable[[types.FunctionType], Callable[..., Any]],
    ) -> None:
        """``own``: the variables of the function, which functions inside may see; or, of a text, those that nobody else
        uses, and ``shared``: its other variables."""
        self._function = function
        self._capture = capture
        self._body = body
        self._own = own
        #: What the new statements use beside their variables.
        self.used: dict[str, types.CellType] = {}
        self._why: list[str] = []
        every = list(walk(self._body))
        self._loops = _chosen(self._body)
        blocks = [(each, _block_that_trains(each)) for each in self._loops]
        #: The loops whose turns are captured, and the blocks in others that are.
        self._chosen = {id(block or loop) for loop, block in blocks}
        # By the first statements of blocks: the variables that change in the loops around them.
        self._changing = {id(block.body[0]): _changing(loop) for loop, block in blocks if block is not None}
        self._is_text = shared is not None
        self._uses = [each for each in every if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store)]
        self._uses += [e.target for e in every if isinstance(e, ast.AugAssign) and isinstance(e.target, ast.Name)]
        inner = [each for each in every if isinstance(each, LATER)] if shared is None else []
        self._captured = [(id(each), _rewrite.seen_by(each)) for each in inner]
        self._nonlocal = {name for each in every if isinstance(each, ast.Nonlocal) for name in each.names}
        self._live = Liveness(self._body)
        code = function.__code__
        mine = own - {*code.co_varnames[: code.co_argcount]} if shared is None else names_set(body) - shared
        self._lists = own_lists(body, mine)
        self._declared: list[ast.stmt] = [each for each in every if isinstance(each, ast.Global | ast.Nonlocal)]
        if shared:
            self._declared.append(ast.Global(sorted(shared & {*_rewrite.mentioned(self._body)})))

    def made(self, known: set[str]) -> list[ast.stmt]:
        """The new statements. ``known``: the variables that are set before them."""
        if self._is_text:
            body, _ = self._block(self._body, known, frozenset())
        else:
            body = self._around(self._body, known, frozenset(), self._live.always)
        if not self.used:
            raise NotCapturedError("; ".join(self._why) or "it has no loop that trains, or that calls a model")
        return body

    # -- statements -----------------------------------------------------------------

    def _block(
        self, body: list[ast.stmt], known: set[str], handled: Set[str] | None
    ) -> tuple[list[ast.stmt], set[str] | None]:
        """Statements with captured loops, and the variables that are set when they have run; None if what follows
        never runs. ``known``: the variables that are set before them; ``handled``: those that the function may look at
        after an error in them; None if it may be any."""
        made: list[ast.stmt] = []
        set_: set[str] | None = set(known)
        for each in body:
            if set_ is None:
                made.append(each)
                continue
            new, set_ = self._statement(each, set_, handled)
            made += new
        return made, set_

    def _statement(
        self, node: ast.stmt, known: set[str], handled: Set[str] | None
    ) -> tuple[list[ast.stmt], set[str] | None]:
        match node:
            case ast.For() | ast.While() if id(node) in self._chosen:
                made = self._loop(node, known, handled)
                return made, known
            case ast.If(body=body) if id(node) in self._chosen:
                turn = ast.copy_location(ast.While(ast.Constant(True), body, []), node)
                node.body = self._turn(turn, known, handled, self._outside(turn), self._changing[id(body[0])])
            case ast.For(target=target, orelse=otherwise):
                before = known.union(plain_names(target))
                node.body = self._around(node.body, before, handled, self._live.at_end(node), _changing(node))
                node.orelse, _ = self._block(otherwise, known, handled)
            case ast.While(orelse=otherwise):
                node.body = self._around(node.body, known, handled, self._live.at_end(node), _changing(node))
                node.orelse, _ = self._block(otherwise, known, handled)
            case ast.If(body=body, orelse=otherwise):
                node.body, one = self._block(body, known, handled)
                node.orelse, other = self._block(otherwise, known, handled)
                both = [each for each in (one, other) if each is not None]
                return [node], set.intersection(*both) if both else None
            case ast.With(items=items, body=body):
                names = [name for item in items if item.optional_vars for name in plain_names(item.optional_vars)]
                node.body, after = self._block(body, known.union(names), None if may_swallow(node) else handled)
                return [node], known if after is None else after
            case ast.Try(body=body, handlers=handlers, orelse=otherwise, finalbody=last):
                at_end = None if handled is None else handled | {*mentioned(last)}
                by_user = all(map(_interrupts, handlers)) and _INTERRUPT not in mentioned(body)
                node.body, _ = self._block(body, known, at_end if by_user else None)
                for each in handlers:
                    each.body, _ = self._block(each.body, known, at_end)
                node.orelse, _ = self._block(otherwise, known, at_end)
                node.finalbody, _ = self._block(last, known, handled)
            case ast.Return() | ast.Raise() | ast.Break() | ast.Continue():
                return [node], None
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                return [node], known | {name}
            case ast.Import() | ast.ImportFrom():
                return [node], known | names_set([node])
            case _:
                return [node], (known | _rewrite.set_for_sure([node])) - _rewrite.deleted([node])
        return [node], known

    # -- loops ------------------------------------------------------------------------

    def _around(
        self,
        body: list[ast.stmt],
        known: set[str],
        handled: Set[str] | None,
        later: Set[str],
        changing: Set[str] = frozenset(),
    ) -> list[ast.stmt]:
        """The statements of a function, or of a loop around others, with what stands behind these captured too if they
        leave the optimizer's step to it. ``later``: the variables that may be read behind all; ``changing``: those that
        the loop sets."""
        rest = _rest(body, self._loops)
        made, known_behind = self._block(body[: len(body) - len(rest)], known, handled)
        if not rest or known_behind is None:
            return [*made, *rest]
        turn = ast.copy_location(ast.While(ast.Constant(True), rest, []), rest[0])
        return [*made, *self._turn(turn, known_behind, handled, later, changing)]

    def _loop(self, loop: Loop, known: set[str], handled: Set[str] | None) -> list[ast.stmt]:
        targets = plain_names(loop.target) if isinstance(loop, ast.For) else []
        loop.body = self._turn(loop, known.union(targets), handled, self._live.behind(loop))
        return [loop]

    def _turn(
        self,
        loop: Loop,
        known: set[str],
        handled: Set[str] | None,
        later: Set[str],
        changing: Set[str] = frozenset(),
    ) -> list[ast.stmt]:
        """The body of a loop that calls a captured turn; the body as it is where that cannot be. ``changing``: what a
        loop around it sets."""
        why = self._why_not(loop, handled)
        if why:
            self._why.append(f"the loop in line {loop.lineno} {why}")
            return loop.body
        number = len(self.used) // 2
        turn = _Turn(loop, self._own, known, later, self._declared, changing & self._own)
        cells = [types.CellType() for _ in turn.found]
        function = _rewrite.made_of(
            self._function,
            turn.function(f"{self._function.__name__}, line {loop.lineno}"),
            more=dict(zip(turn.found, cells, strict=True)),
            lists=self._lists,
        )
        if function is None:
            self._why.append(f"the loop in line {loop.lineno} cannot be compiled by itself")
            return loop.body
        function.__name__ = f"{self._function.__name__} (line {loop.lineno})"
        function.__qualname__ = f"{self._function.__qualname__} (line {loop.lineno})"
        function.__defaults__ = function.__kwdefaults__ = None
        self.used[_TURN.format(number)] = types.CellType(self._capture(function))
        self.used[_CELLS.format(number)] = types.CellType(tuple(cells))
        first = loop.body[0]
        return [_placed(each, first) for each in turn.calls(_TURN.format(number), _CELLS.format(number))]

    def _why_not(self, loop: Loop, handled: Set[str] | None) -> str:
        """Why a loop cannot be captured."""
        every = list(walk(loop.body))
        mine = set(map(id, every))
        targets = plain_names(loop.target) if isinstance(loop, ast.For) else []
        changed = names_set(loop.body).union(targets) & self._own
        names = {name for place, names in self._captured if place not in mine for name in names}
        if changed & names:
            return f"changes a variable that a function sees: {min(changed & names)}"
        if self._nonlocal & set(mentioned(loop.body)) & self._own:
            return "names a variable that a function inside changes"
        if name := self._kept_by_functions(loop, changed):
            return f"makes a function that may be called when {name} is another one"
        if any(isinstance(each, ast.Name) and each.id == "super" for each in every):
            return "calls super()"
        if any(map(sees_variables, every)):
            return "gets at variables otherwise than by their names (locals, dir, eval)"
        outside = self._outside(loop)
        if _rewrite.deleted(loop.body) & outside & self._own:
            return "deletes a variable that is used elsewhere"
        given = _rewrite.deleted(loop.body).difference(targets)  # to a turn, or left from an earlier one
        if any(_first_use(name, loop.body) == _READ for name in given & self._own):
            return "deletes a variable that is set before it"
        seen = outside if handled is None else outside & handled
        returns = handled is None and any(isinstance(each, ast.Return) for each in every)
        if changed & seen or returns:
            return "sets variables under a `try`: what comes after an error would find them otherwise"
        return ""

    def _kept_by_functions(self, loop: Loop, changed: Set[str]) -> str:
        """A variable that changes from turn to turn, or outside of the loop once it has begun, and that a function made
        in a turn may read then: a turn has variables of its own. Functions that are called by their names, or passed to
        calls that do not keep them, go with the turn."""
        changed = changed | self._set_from(loop)
        parents = {id(inner): each for each in walk(loop.body) for inner in ast.iter_child_nodes(each)}
        mine = set(map(id, walk(loop.body)))

        def goes(node: ast.AST) -> bool:
            parent = parents.get(id(node))
            while isinstance(parent, ast.keyword | ast.Starred):
                parent = parents.get(id(parent))
            return isinstance(parent, ast.Call) and (parent.func is node or not _keeps(parent.func))

        for each in walk(loop.body):
            seen = _rewrite.seen_by(each) & changed if isinstance(each, LATER) else set[str]()
            if not seen:
                continue
            if isinstance(each, ast.FunctionDef) and each in loop.body:
                uses = [use for use in self._uses if isinstance(use, ast.Name) and use.id == each.name]
                behind = (use.lineno > (each.end_lineno or 0) or _is_within(use, each) for use in uses)
                if all(id(use) in mine and goes(use) for use in uses) and all(behind):
                    continue
            elif isinstance(each, ast.Lambda | ast.GeneratorExp) and goes(each):
                continue
            return min(seen)
        return ""

    def _set_from(self, loop: Loop) -> set[str]:
        """The variables that are set by statements that contain a loop, or stand behind it."""
        first = loop.body[0]
        place = next(i for i, each in enumerate(self._body) if any(inner is first for inner in walk([each])))
        return names_set(self._body[place:]) & self._own

    def _outside(self, loop: Loop) -> set[str]:
        """The variables that the function uses outside of the body of a loop."""
        inside = {id(each) for each in walk(loop.body)}
        return {each.id for each in self._uses if id(each) not in inside}


def _interrupts(handler: ast.ExceptHandler) -> bool:
    """Whether a handler is for nothing but an interrupt by the user, which may come at any time."""
    return isinstance(handler.type, ast.Name) and handler.type.id == _INTERRUPT


def _keeps(callee: ast.expr) -> bool:
    """Whether a call may keep a function that is passed to it, as its name tells."""
    name = getattr(callee, "attr", getattr(callee, "id", ""))
    return not name or name.startswith("register") or name in _KEEPING


def _is_within(node: ast.AST, function: ast.AST) -> bool:
    return any(each is node for each in ast.walk(function))


def _placed(statement: ast.stmt, at: ast.stmt) -> ast.stmt:
    if not hasattr(statement, "lineno"):
        ast.copy_location(statement, at)
    return ast.fix_missing_locations(statement)


def _chosen(body: list[ast.stmt]) -> list[Loop]:
    """The innermost loops that train; if no loop does, the innermost loops that call something by a plain name, or by
    an attribute of `self`."""
    loops = [each for each in outer_nodes(body) if isinstance(each, Loop)]
    found = [each for each in loops if _trains(each)]
    found = found or [each for each in loops if isinstance(each, ast.For) and _calls_something(each)]
    known = set(map(id, found))
    return [each for each in found if known.isdisjoint(map(id, walk(each.body)))]


def _changing(loop: Loop) -> set[str]:
    """The variables that a loop sets."""
    return names_set(loop.body).union(plain_names(loop.target) if isinstance(loop, ast.For) else ())


def _block_that_trains(loop: Loop) -> ast.If | None:
    """The block under `if` in which a loop trains, if in its other statements the loop steps through an environment:
    `observation, reward, *_ = env.step(action)`."""
    found: ast.If | None = None
    body = loop.body
    while True:
        training = [each for each in body if any(map(_goes_backward, outer_nodes([each])))]
        block = training[0] if len(training) == 1 else None
        if not isinstance(block, ast.If) or any(map(_goes_backward, outer_nodes(block.orelse))):
            break
        found, body = block, block.body
    backward = (each.value for each in outer_nodes(body) if isinstance(each, ast.Attribute) and _goes_backward(each))
    losses = {each.id for each in backward if isinstance(each, ast.Name)}
    outside = {id(each) for each in walk(body)}
    acts = any(
        isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute) and each.func.attr == "step" and each.args
        for each in outer_nodes(loop.body)
        if id(each) not in outside
    )
    return found if acts and losses and losses <= names_set(body) else None


def _rest(body: list[ast.stmt], chosen: list[Loop]) -> list[ast.stmt]:
    """What stands behind the last of the chosen loops in statements, if these leave the optimizer's step to it, as
    gradients are accumulated; nothing otherwise."""
    places = {id(each): i + 1 for i, statement in enumerate(body) for each in walk([statement])}
    inside = [each for each in chosen if id(each) in places]
    place = max((places[id(each)] for each in inside), default=len(body))
    return body[place:] if _steps(body[place:]) and not _steps(body[:place]) else []


def _steps(body: list[ast.stmt]) -> bool:
    """Whether statements call an optimizer's `step`, or that of a scaler or a scheduler."""
    calls = (each.func for each in outer_nodes(body) if isinstance(each, ast.Call))
    return any(isinstance(each, ast.Attribute) and each.attr == "step" for each in calls)


def outer_nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """All parts of statements, but for those of functions inside."""
    left: list[ast.AST] = [*body]
    while left:
        each = left.pop()
        if not isinstance(each, OF_ITS_OWN):
            yield each
            left += ast.iter_child_nodes(each)


def _trains(loop: Loop) -> bool:
    return any(map(_goes_backward, outer_nodes(loop.body)))


def _goes_backward(node: ast.AST) -> bool:
    """Whether something names `backward`, or passes a loss and an optimizer to what goes backward, as a class around a
    scaler: `loss_scaler(loss, optimizer, parameters=model.parameters())`."""
    if isinstance(node, ast.Call):
        given = [each.id for each in node.args if isinstance(each, ast.Name)]
        return any("loss" in name for name in given) and any("optim" in name for name in given)
    return isinstance(node, ast.Attribute) and node.attr == "backward"


def _calls_something(loop: Loop) -> bool:
    assigned = [each.value for each in outer_nodes(loop.body) if isinstance(each, ast.Assign)]
    return any(isinstance(value, ast.Call) and isinstance(value.func, ast.Name | ast.Attribute) for value in assigned)


class _Turn:
    """What one turn of a loop does, as a function."""

    def __init__(
        self,
        loop: Loop,
        own: Set[str],
        known: set[str],
        later: Set[str],
        declared: list[ast.stmt],
        changing: Set[str],
    ) -> None:
        """``known``: the variables that are set where a turn begins; ``later``: those that may be read behind it;
        ``declared``: which are others' variables; ``changing``: what a loop around it sets."""
        self._loop, self._known = loop, known
        body = loop.body
        targets = plain_names(loop.target) if isinstance(loop, ast.For) else []
        set_ = names_set(body) & own
        used = [name for name in mentioned(body) if name in own]
        others = set_.union(targets, changing)  # than in the turn before
        self._taken = [name for name in used if name in others and _first_use(name, body) == _READ]
        self._unsure = [name for name in self._taken if name not in known]
        self.found = [name for name in used if name not in set_.union(targets, self._taken)]
        """The variables that a turn only reads."""
        gone = _rewrite.deleted(body).intersection(targets)  # the `for` statement sets them again
        left = [name for name in used if name in set_ and (name in later or name in self._taken) and name not in gone]
        certain = {*self._taken, *_rewrite.set_for_sure(body)} - {*self._unsure}
        self._always = [name for name in left if name in certain]
        self._sometimes = [name for name in left if name not in certain]
        self._has = {type(each) for each in _exits(body)}
        early = not self._has.isdisjoint((ast.Continue, ast.Break))
        self._more = left if early else self._sometimes  # what may be left beside what a turn that ends leaves
        self._declared = [each for each in declared if not {*mentioned(body)}.isdisjoint(each.names)]  # type: ignore[attr-defined]

    def function(self, name: str) -> ast.FunctionDef:
        """The turn as a function of the variables that it takes."""
        loop = self._loop
        body: list[ast.stmt] = []
        unsure, set_ = [*self._unsure], set[str]()
        for each in copy.deepcopy(loop.body):
            for one in [name for name in unsure if name in mentioned([each])]:
                unsure.remove(one)
                body.append(_placed(_rewrite.unset_again(one), each))
            set_ |= names_set([each])
            body += _listed(_Exits(functools.partial(self._leave, set_=frozenset(set_))).visit(each))
        body += [_placed(each, loop.body[-1]) for each in self._end()]
        like = _rewrite.empty_function(name)
        taken = [*self._taken, *map(_rewrite.is_set.format, self._unsure)]
        like.args = ast.arguments([], [ast.arg(each) for each in taken], None, [], [], None, [])
        ast.copy_location(like, loop)
        return _rewrite.function_with(like, [*copy.deepcopy(self._declared), *body], loop.body[0])

    def _leave(self, how: int, value: ast.expr | None, set_: frozenset[str]) -> list[ast.stmt]:
        """Statements that leave a turn. ``value``: what the whole function returns; ``set_``: the variables that the
        turn may have set by then. The others stay as they are."""
        names = [name for name in self._more if name in set_] if how != _RETURN else []
        return self._left(how, value, ast.Constant(None), names)

    def _end(self) -> list[ast.stmt]:
        """Statements at the end of a turn."""
        always = ast.Tuple([loaded(name) for name in self._always], ast.Load())
        return self._left(_NEXT, None, always, self._sometimes)

    @staticmethod
    def _left(how: int, value: ast.expr | None, always: ast.expr, sometimes: list[str]) -> list[ast.stmt]:
        made: list[ast.stmt] = []
        if sometimes:
            made.append(ast.Assign([stored(_MORE)], ast.Dict([], [])))
            made += [_rewrite.if_set(_entry(name, ast.Store()), loaded(name)) for name in sometimes]
        more = loaded(_MORE) if sometimes else ast.Constant(None)
        parts = [ast.Constant(how), value or ast.Constant(None), always, more]
        return [*made, ast.Return(ast.Tuple(parts, ast.Load()))]

    def calls(self, turn: str, cells: str) -> list[ast.stmt]:
        """The body of the loop that calls it."""
        made: list[ast.stmt] = []
        for i, name in enumerate(self.found):
            cell = ast.Subscript(loaded(cells), ast.Constant(i), ast.Load())
            put = ast.Assign([ast.Attribute(cell, "cell_contents", ast.Store())], loaded(name))
            empty = ast.Delete([ast.Attribute(copy.deepcopy(cell), "cell_contents", ast.Del())])
            made.append(put if name in self._known else _rewrite.unless_unset([put], [empty]))
        made += [part for name in self._unsure for part in _rewrite.may_be_set(name)]
        given = [(name, _rewrite.may_be.format(name) if name in self._unsure else name) for name in self._taken]
        given += [(is_set, is_set) for is_set in map(_rewrite.is_set.format, self._unsure)]
        keywords = [ast.keyword(name, loaded(value)) for name, value in given]
        made.append(ast.Assign([stored(_LEFT)], ast.Call(loaded(turn), [], keywords)))
        if ast.Return in self._has:
            made.append(ast.If(_is(_RETURN), [ast.Return(_part(1))], []))
        if self._always:
            names = ast.Tuple([stored(name) for name in self._always], ast.Store())
            made.append(ast.If(_is_there(2), [ast.Assign([names], _part(2))], []))
        if self._more:
            entries: list[ast.stmt] = [ast.Assign([stored(_MORE)], _part(3))]
            for name in self._more:
                is_left = ast.Compare(ast.Constant(name), [ast.In()], [loaded(_MORE)])
                entries.append(ast.If(is_left, [ast.Assign([stored(name)], _entry(name, ast.Load()))], []))
            made.append(ast.If(_is_there(3), entries, []))
        if ast.Break in self._has:
            made.append(ast.If(_is(_BREAK), [ast.Break()], []))
        if ast.Continue in self._has:  # of a block: there is more behind it
            made.append(ast.If(_is(_CONTINUE), [ast.Continue()], []))
        return made


def _entry(name: str, context: ast.expr_context) -> ast.Subscript:
    return ast.Subscript(loaded(_MORE), ast.Constant(name), context)


def _part(place: int) -> ast.expr:
    return ast.Subscript(loaded(_LEFT), ast.Constant(place), ast.Load())


def _is_there(place: int) -> ast.expr:
    return ast.Compare(_part(place), [ast.IsNot()], [ast.Constant(None)])


def _is(how: int) -> ast.expr:
    return ast.Compare(_part(0), [ast.Eq()], [ast.Constant(how)])


def _exits(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Where statements of a loop end its turn before their end."""
    pending: list[tuple[ast.AST, bool]] = [(each, False) for each in body]
    while pending:
        each, inside = pending.pop()
        if isinstance(each, OF_ITS_OWN):
            continue
        if isinstance(each, ast.Return) or (isinstance(each, ast.Break | ast.Continue) and not inside):
            yield each
        for field, value in ast.iter_fields(each):
            of_loop = inside or (isinstance(each, Loop) and field == "body")
            pending += [(one, of_loop) for one in _listed(value) if isinstance(one, ast.AST)]


class _Exits(ast.NodeTransformer):
    """Puts results in the places of `continue`, `break` and `return`."""

    def __init__(self, ends: Callable[[int, ast.expr | None], list[ast.stmt]]) -> None:
        self._ends = ends

    def generic_visit(self, node: ast.AST) -> ast.AST:
        return node if isinstance(node, OF_ITS_OWN) else super().generic_visit(node)

    def visit_Return(self, node: ast.Return) -> Any:
        return [_placed(each, node) for each in self._ends(_RETURN, node.value)]

    def visit_Continue(self, node: ast.Continue) -> Any:
        return [_placed(each, node) for each in self._ends(_CONTINUE, None)]

    def visit_Break(self, node: ast.Break) -> Any:
        return [_placed(each, node) for each in self._ends(_BREAK, None)]

    def visit_For(self, node: ast.For) -> Any:
        return self._inner(node)

    def visit_While(self, node: ast.While) -> Any:
        return self._inner(node)

    def _inner(self, node: Loop) -> Loop:
        """A loop inside: only what leaves the whole function concerns the outer one, and what stands behind `else`."""
        node.body = [one for each in node.body for one in _listed(_Returns(self._ends).visit(each))]
        node.orelse = [one for each in node.orelse for one in _listed(self.visit(each))]
        return node


class _Returns(_Exits):
    """The same of `return` alone."""

    def visit_Continue(self, node: ast.Continue) -> Any:
        return node

    def visit_Break(self, node: ast.Break) -> Any:
        return node


def _listed(made: Any) -> list[Any]:
    return made if isinstance(made, list) else [made]


def _first_use(name: str, body: list[ast.stmt]) -> str:
    """What statements do with a variable first: they read it, or may; or they set it; or neither for sure."""
    return next((use for each in body if (use := _use(name, each))), "")


def _use(name: str, node: ast.stmt) -> str:
    def reads(*parts: ast.AST | None) -> bool:
        every = [each for part in parts if part is not None for each in ast.walk(part)]
        added = [each.target for each in every if isinstance(each, ast.AugAssign)]
        used = [each for each in every if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Store)]
        return any(isinstance(each, ast.Name) and each.id == name for each in (*added, *used))

    match node:
        case ast.Assign(targets=targets, value=value):
            if reads(value, *targets):
                return _READ
            return _SET if any(name in plain_names(target) for target in targets) else ""
        case ast.AugAssign(target=ast.Name(id=target)) if target == name:
            return _READ
        case ast.FunctionDef(name=made) | ast.ClassDef(name=made) if made == name:
            return _READ if reads(node) else _SET
        case ast.If(test=test, body=body, orelse=otherwise):
            both = {_first_use(name, body), _first_use(name, otherwise)}
            return _READ if reads(test) or _READ in both else _SET if both == {_SET} else ""
        case ast.With(items=items, body=body):
            if reads(*items):
                return _READ
            names = [one for item in items if item.optional_vars for one in plain_names(item.optional_vars)]
            return _SET if name in names else _first_use(name, body)
        case ast.For(target=target, iter=over, body=body, orelse=otherwise):
            if reads(over):
                return _READ
            inner = "" if name in plain_names(target) else _first_use(name, body)
            return _READ if _READ in (inner, _first_use(name, otherwise)) else ""
        case ast.While(test=test, body=body, orelse=otherwise):
            return _READ if reads(test) or _READ in (_first_use(name, body), _first_use(name, otherwise)) else ""
        case ast.Try(body=body, handlers=handlers, orelse=otherwise, finalbody=last):
            parts = [body, otherwise, last, *(each.body for each in handlers)]
            kinds = [each.type for each in handlers]
            return _READ if reads(*kinds) or any(_first_use(name, part) == _READ for part in parts) else ""
    return _READ if reads(node) else ""
