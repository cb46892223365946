"""Statements in the middle of a step that only add up numbers, and may as well run when all ops have run:
``running_loss += loss.item()`` before ``loss.backward()``, ``losses.update(loss.item(), n)``.

Such a statement adds to a variable or an attribute what is read from tensors by simple expressions, or calls a method
that only counts, such as that of the `AverageMeter` of many scripts. Between its place and the end of the ops may stand
only what runs no code of the script: ``optimizer.zero_grad()``, ``loss.backward()``, ``optimizer.step()``, the clipping
of gradients, with objects of PyTorch's own classes and without hooks. That is looked at before each recording; and what
is neither recorded nor replayed runs in the order in which it is written.

A variable of the function's own that no function inside names is nobody else's, so that anything may stand between.
There all of the statement stays in its place but for ``.item()`` and the sum: what is read is kept, a tensor as a copy.
So it is with a list in such a variable (``losses.append(loss.item())``), if the source of the loop around the step
shows that nothing else holds the list; with a variable that only such statements use (``kl = x.mean().cpu().numpy()``);
and with such statements in blocks under ``if``, or in blocks that only change a mode (``with torch.no_grad():``).

A block under ``if`` may use what is moved, or return, if its first question does not (``if self.limit is not None and
kl > self.limit: break``): if that is answered with yes, all from there on runs as it is written.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import sys
import types
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from . import _blocks, _introspect, _memory, _modules, _reports, _rewrite
from ._frames import TORCH
from ._reads import Reads, is_plain
from ._rewrite import may_return, mentioned, named, names_set, walk
from ._sources import Chain, made_by_rote, names_in, node_of, position_at

# What reads a tensor, or says how large something is; and functions that compute with numbers.
_METHODS = frozenset(
    {"item", "size", "dim", "numel", "detach", "cpu", "mean", "sum", "float", "double", "tolist", "argmax", "eq"}
)
_FUNCTIONS = frozenset({"len", "float", "int", "round", "abs", "max", "min"})
# Values that only other code than Python's can change; of tensors, it is seen.
_STAYING = (torch.Tensor, int, float, str, torch.Size, type(None), types.BuiltinFunctionType, type)
_CLIPPING = ("clip_grad_norm_", "clip_grad_value_")
_ADDS = (ast.Add, ast.Sub, ast.Mult)
_MODES = frozenset({"no_grad", "enable_grad", "set_grad_enabled", "autocast"})
# What gives a tensor that nothing else holds.
_REDUCING = frozenset({"mean", "sum", "std", "var", "norm", "median", "prod"})

# The modules, and their functions, that ask something of a number that a tensor can be asked, too.
_LIBRARIES = ("math", "np", "numpy")
_EXACT = 1 << 53  # integers up to it are doubles, and those beyond it compare with smaller numbers as their doubles do
_OF_NUMBERS = frozenset({"isfinite", "isnan", "isinf"})

Need = tuple[Chain, str]  # the names of an object or a function, and what is called of it


@dataclass(frozen=True)
class Moved:
    """A step with moved statements."""

    function: Any
    begin: int  # the first of them
    first: int  # where the first of them stood
    needs: tuple[Need, ...] | None  # what the statements between call; None if they may call anything
    late: tuple[ast.stmt, ...]  # they themselves, where they stood

    def hold(self, original: Any, args: Any, kwargs: Any, state: Any) -> bool:
        """Whether what is called between is PyTorch's own, in a call of the original function with these arguments."""
        if self.needs is None:
            return True
        try:
            inner = (module for _, module in _modules.within_each(state.modules))
            parts = *(tensor for _, tensor in state.tensors()), *inner
            plain = all(_is_plain(_found(original, chain, args, kwargs), name) for chain, name in self.needs)
            return plain and not any(map(_has_hooks, parts))
        except Exception:  # of objects that may be anything
            return False

    def make_up(self, error: BaseException, head: Any, original: Any, args: Any, kwargs: Any) -> None:
        """Runs the moved statements that stood before the place where a head has raised an error: the step would have
        run them. ``original``, ``args``, ``kwargs``: as for :meth:`hold`."""
        plain = _rewrite.plain_function(head)
        raised = None if plain is None else _raised_in(error, plain.__code__)
        if raised is None:  # by a replay, which has no variables
            return
        frame, at = raised
        passed = [each for each in self.late if (each.end_lineno or 0, each.end_col_offset or 0) <= at]
        variables = {**frame.f_locals, **_given(original, args, kwargs)}  # the head is not given what it does not use
        made = made_by_rote(frame.f_code)
        used = () if made is None else mentioned(_rewrite.statements(made.node))
        variables.update({name: frame.f_locals[name] for name in used if name in frame.f_locals})
        module = ast.fix_missing_locations(ast.Module(copy.deepcopy(passed), []))
        with contextlib.suppress(NameError):  # of a variable that is gone: the error of the step matters more
            exec(compile(module, frame.f_code.co_filename, "exec", dont_inherit=True), frame.f_globals, variables)


def _raised_in(error: BaseException, code: types.CodeType) -> tuple[types.FrameType, tuple[int, int]] | None:
    """The frame of this code that an error has come through, and where; None if there is none."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    if trace is None:
        return None
    line, _, column, _ = position_at(code, trace.tb_lasti)
    return trace.tb_frame, (trace.tb_lineno, 0) if line is None or column is None else (line, column)


def _given(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The variables that a function has at the begin of a call."""
    plain = _rewrite.plain_function(function)
    if plain is None:
        return kwargs
    code = plain.__code__
    bound = (function.__self__,) if type(function) is types.MethodType else ()
    variables = {**dict(zip(code.co_varnames[: code.co_argcount], (*bound, *args), strict=False)), **kwargs}
    for name, cell in zip(code.co_freevars, plain.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of one that is not set
            variables.setdefault(name, cell.cell_contents)
    return variables


@dataclass
class _Move:
    """A statement that may be moved."""

    place: int
    changes: Chain  # the names that lead to what it changes: a variable, an attribute, or an object with a method
    method: str  # that it calls of the object
    reads: frozenset[str]
    tensors: list[tuple[torch.Tensor, int]] = field(default_factory=list)  # that it reads, and how often written then
    changeable: set[str] = field(default_factory=set)  # of the variables that it reads: those that hold other objects
    holder: Any = None  # the object that it changes
    kept: _Kept | None = None  # of a statement about variables of its own alone
    is_simple: bool = True  # it does nothing but read tensors, and compute with numbers


@dataclass
class _Kept:
    """A statement in two: what stays in its place, with the block around it, and what is done to variables."""

    stays: list[ast.stmt]
    parts: list[_Part]


@dataclass
class _Part:
    """What is done to a variable: it is added to, or set."""

    name: str
    adds: ast.stmt
    later: list[ast.stmt]  # what stands behind it in its block
    others: bool  # it adds more than numbers that are read and constants: that may be tensors
    uses: tuple[str, ...] = ()  # other variables that it takes the numbers of
    sets: bool = False
    kept: str = ""  # the variable with the tensor of which it is set to the number
    adds_to_list: bool = False
    value: Any = None  # that the variable has been seen to hold
    report: _reports.Report | None = None  # it tells numbers, and changes no variable

    @property
    def fits(self) -> bool:
        """Whether the variable holds what may be added to later: a list, or a number."""
        return type(self.value) is list if self.adds_to_list else type(self.value) in (int, float)


class Moves:
    """The statements of a step that may be moved, seen in one call of it."""

    def __init__(self, function: types.FunctionType, body: list[ast.stmt]) -> None:
        self._body = body
        code = function.__code__
        self._own = set(code.co_varnames)
        made = made_by_rote(code)
        self._lists = frozenset[str]() if made is None else made.lists
        self._known = self._own.union(code.co_cellvars, code.co_freevars, _FUNCTIONS)
        late = _read_names(body)
        moves = (_move(place, each, self._own, late) for place, each in enumerate(body))
        self._found = {move.place: move for move in moves if move is not None}
        numbers: set[str] = set()  # variables that are set to the number of a tensor
        for move in [*self._found.values()]:
            if isinstance(block := body[move.place], ast.If) and not numbers.isdisjoint(named(block.test)):
                del self._found[move.place]  # it asks
            elif move.kept is not None:
                numbers.update(part.name for part in move.kept.parts if part.kept)
        self._libraries: set[str] = set()  # the names of modules that tell whether numbers are finite
        self._place = -1
        #: The statements that have called code of the script's, or may have.
        self.calling: set[int] = set()
        self._reads = Reads()
        self._kinds: set[type] = set()  # classes whose objects are watched
        self._read: dict[int, set[tuple[int, str]]] = {}  # of objects, by their identities: where, and what
        self._written: dict[int, dict[int, int]] = {}  # by statements: how often tensors were written before them

    def mark(self, place: int, variables: dict[str, Any] | None) -> None:
        """A statement is about to run, where these are the variables; or, without any, the call has ended."""
        before, self._place = self._place, place
        seen = [tensor for move in self._found.values() for tensor, _ in move.tensors]
        self._written[place] = {id(tensor): _memory.version_of(tensor) for tensor in seen}
        if variables is None:
            return
        self._libraries = {name for name in _LIBRARIES if type(variables.get(name)) is types.ModuleType}
        if before in self._found:
            self._watch(self._found[before], variables)
        if place in self._found:
            move = self._found[place]
            for part in () if move.kept is None else move.kept.parts:
                part.value = variables.get(part.name)
                if part.report is not None:
                    part.report.see(variables)
            values = {name: variables.get(name) for name in move.reads}
            tensors = [each for value in values.values() for each in _tensors_in(value)]
            move.tensors = [(each, _memory.version_of(each)) for each in tensors]
            move.changeable = {name for name, value in values.items() if not isinstance(value, _STAYING)}

    def _watch(self, move: _Move, variables: dict[str, Any]) -> None:
        if not move.method and len(move.changes) < 2:
            return
        holder = variables.get(move.changes[0])
        for name in move.changes[1:] if move.method else move.changes[1:-1]:
            try:
                holder = _introspect.plain_value(holder, name)
            except AttributeError:
                return
        if type(holder) is list and move.method == "append":  # of which nothing of PyTorch's takes notice
            move.holder = holder
            self._read.setdefault(id(holder), set())
            return
        if type(holder) not in self._kinds and not (is_plain(holder) and _introspect.can_change(type(holder))):
            return
        if move.method and not _only_counts(getattr(type(holder), move.method, None)):
            return
        self._kinds.add(type(holder))
        move.holder = holder
        self._read.setdefault(id(holder), set())
        self._reads.watch(holder, lambda one, name: self._read[id(one)].add((self._place, name)))

    def close(self) -> None:
        """Sees nothing any more."""
        self._reads.close()

    def places(self, behind: int) -> list[int]:
        """The statements that may be moved to the place of another one."""
        while True:  # what may not be moved itself stands between
            found = [place for place, move in self._found.items() if place < behind and self._may_move(move, behind)]
            if len(found) == len([place for place in self._found if place < behind]):
                return found
            self._found = {place: self._found[place] for place in found}

    def stand_before_ops(self, begin: int) -> bool:
        """Whether a statement about own variables, from a place on, stands before one that may run ops."""
        kept = [place for place, move in self._found.items() if place >= begin and move.kept is not None]
        return any(map(_blocks.runs_ops, self._body[kept[0] + 1 :])) if kept else False

    def needs(self, places: list[int], behind: int) -> tuple[Need, ...] | None:
        """What the statements from some places to another one call that stay; None if they may call anything."""
        strict = [place for place in places if self._found[place].kept is None]
        if not strict:
            return None
        return tuple(need for each in self._others(strict[0], behind) for need in self._needs(each) or ())

    def _others(self, first: int, behind: int) -> list[ast.stmt]:
        """What stays between two places."""
        moved = {place for place, move in self._found.items() if move.kept is None or move.is_simple}
        return [each for place, each in enumerate(self._body[:behind]) if place > first and place not in moved]

    def _needs(self, node: ast.stmt) -> list[Need] | None:
        """What a statement calls, if that may be PyTorch's own and nothing else."""
        match node:
            case ast.Expr(ast.Call() as call) | ast.Assign(targets=[ast.Name()], value=ast.Call() as call):
                pass
            case _:
                return None
        given = [*call.args, *(each.value for each in call.keywords)]
        match call.func:
            case ast.Attribute(value=ast.Name(id=name), attr="backward") if not given and name in self._own:
                return []
            case ast.Attribute(value=holder, attr="zero_grad" | "step" as name) if not call.args:
                chain = names_in(holder)
                plain = all(isinstance(each, ast.Constant) for each in given)
                return [(chain, name)] if plain and self._stays(chain) else None
        chain = names_in(call.func)
        return [(chain, "")] if self._stays(chain) and chain[-1] in _CLIPPING else None

    def _stays(self, chain: Chain) -> bool:
        return bool(chain) and chain[0] not in names_set(self._body)

    def kept(self, place: int) -> tuple[list[ast.stmt], list[ast.stmt]]:
        """Of a statement that may be moved: what stays in its place, and what is moved."""
        kept = self._found[place].kept
        return ([], [self._body[place]]) if kept is None else (kept.stays, [part.adds for part in kept.parts])

    def asks(self, places: list[int], behind: int) -> int:
        """The block under `if` that asks for what is moved, or leaves the step, once its first question is answered
        with yes; below 0 if there is none."""
        found = next((at for at in range(places[0] + 1, behind) if at not in places and self._asks(at, places)), -1)
        has_parts = any(hasattr(each, "enters") or hasattr(each, "leaves") for each in self._body[found + 1 : behind])
        return -1 if has_parts else found

    def _asks(self, at: int, places: list[int]) -> bool:
        """Whether a block under `if` uses variables that the statements at some places set or change, or returns, and
        its first question is one that can be asked before these are set."""
        block = self._body[at]
        if not isinstance(block, ast.If) or block.orelse:
            return False
        names = {part.name for part in self._parts(places)}
        asks = may_return([block]) or not names.isdisjoint(named(block))
        return asks and names.isdisjoint(named(self.question(at, places)))

    def question(self, at: int, places: list[int]) -> ast.expr:
        """The first question of a block, asked of tensors where it is one about their numbers."""
        block = self._body[at]
        assert isinstance(block, ast.If)
        changed = Counter(part.name for part in self._parts(places))
        before = self._parts([place for place in places if place < at])
        numbers = {part.name: part.kept for part in before if part.kept and changed[part.name] == 1}
        question = copy.deepcopy(_first_question(block)[0])
        return _OfTensors(numbers, self._libraries).visit(question)  # type: ignore[no-any-return]

    def _parts(self, places: list[int]) -> list[_Part]:
        return [part for place in places if (kept := self._found[place].kept) for part in kept.parts]

    def _is_own(self, name: str, later: list[ast.stmt]) -> bool:
        """Whether a variable is one that nobody else sees before others have run."""
        inner = [_rewrite.seen_by(each) for each in walk(self._body) if isinstance(each, _rewrite.LATER)]
        return name in self._own and not any(name in names for names in inner) and name not in mentioned(later)

    def _later(self, place: int, behind: int) -> list[ast.stmt]:
        """What stays between the statement at one place and another one, but for the block that asks."""
        moved = [at for at, move in self._found.items() if at < behind and move.kept is not None]
        places = sorted({*moved, place})
        asking = self.asks(places, behind)
        stay: list[ast.stmt] = []
        for at in range(place + 1, behind):
            kept = self._found[at].kept if at in self._found else None
            block = self._body[at]
            if at == asking:
                stay.append(ast.Expr(self.question(at, places)))
            else:
                stay.extend([block] if kept is None else kept.stays)
        return stay

    def _may_be_kept(self, move: _Move, behind: int) -> bool:
        """Whether all that a statement does to variables may be done later."""
        later = self._later(move.place, behind)
        if move.kept is None or not all(self._may_wait(part, [*part.later, *later]) for part in move.kept.parts):
            return False
        return all(part.report is None for part in move.kept.parts) or self._is_silent(move.place, behind)

    def _is_silent(self, place: int, behind: int) -> bool:
        """Whether nothing is told between two places but by statements that are moved, too."""
        stay = [at for at in range(place + 1, behind) if at not in self._found or self._found[at].kept is None]
        return self.calling.isdisjoint(range(place + 1, behind)) and all(
            _reports.is_silent(self._body[at]) for at in stay
        )

    def _may_wait(self, part: _Part, between: list[ast.stmt]) -> bool:
        if part.report is not None:
            return not may_return(between) and self._may_tell(part.report, between)
        if not all(map(self._is_set_late, part.uses)):
            return False
        if part.sets or (part.fits and not part.adds_to_list):
            return self._is_own(part.name, between)
        if may_return(between):  # the end of the ops may not be reached
            return False
        return part.fits and part.name in self._lists.difference(mentioned(between))

    def _may_tell(self, report: _reports.Report, between: list[ast.stmt]) -> bool:
        """Whether the variables that a statement reads later hold then what they hold now."""
        inner = {
            name for each in walk(self._body) if isinstance(each, _rewrite.LATER) for name in _rewrite.seen_by(each)
        }
        if not report.fits or not inner.isdisjoint(report.names) or not names_set(between).isdisjoint(report.names):
            return False
        if report.teller and report.teller[0] in mentioned(between):
            return False
        plain = {name for name, value in report.values.items() if type(value) in _reports.PLAIN}
        return all(name in plain or self._is_set_late(name) for name in report.names)

    def _is_set_late(self, name: str) -> bool:
        """Whether nothing but statements that may be moved sets a variable."""
        parts = [part for move in self._found.values() if move.kept is not None for part in move.kept.parts]
        uses = [each for each in walk(self._body) if isinstance(each, ast.Name) and each.id == name]
        late = sum(part.sets and part.name == name for part in parts)
        return late > 0 and late == sum(map(_rewrite.is_stored, uses))

    def _may_move(self, move: _Move, behind: int) -> bool:
        later = self._body[move.place + 1 : behind]
        if move.kept is not None:
            if self._may_be_kept(move, behind):
                return True
            move.kept = None
        if not move.is_simple:
            return False
        set_, root = names_set(later), move.changes[0]
        if set_.intersection((*move.reads, root)) or not move.reads <= self._known:
            return False
        if not move.changeable.isdisjoint(mentioned(later)):
            return False
        others = self._others(move.place, behind)
        if any(self._needs(each) is None for each in others):
            return False
        if any(self._body[place] in others for place in self.calling):  # hooks, functions of autograd
            return False
        if any(isinstance(each, ast.Attribute) and each.attr.startswith("register") for each in walk(self._body)):
            return False
        if len(move.changes) == 1 and not move.method:
            return self._is_own(root, later)
        what = move.changes[-1]
        is_named = root in mentioned(later) if len(move.changes) == 1 else _names_attribute(later, what)
        if move.holder is None or is_named:
            return False
        span = range(move.place + 1, behind)
        if any(at in span and (move.method or name == what) for at, name in self._read[id(move.holder)]):
            return False
        return self._are_as_before(move, behind)

    def _are_as_before(self, move: _Move, behind: int) -> bool:
        written = self._written.get(behind if behind < len(self._body) else -1)
        return written is not None and all(written.get(id(each)) == version for each, version in move.tensors)


def moved(function: Any, moves: Moves, behind: int) -> Moved | None:
    """A function with all statements moved that may be moved to the place of another one; None if none may."""
    source, places = _blocks.source_of(function), moves.places(behind)
    if source is None or not places:
        return None
    plain, node, body = source
    parts = {place: moves.kept(place) for place in places}
    late = [part for place in places for part in parts[place][1]]
    asking = moves.asks(places, behind)
    stay: list[ast.stmt] = []
    flag = ""
    for place, each in enumerate(body[:behind]):
        if place == asking and isinstance(each, ast.If):
            flag = _blocks.kept_at(each, 0)
            stay.append(_blocks.answered(flag, moves.question(asking, places), each))
            first = [part for at in places if at < asking for part in parts[at][1]]
            late = [_asking(each, first, body[asking + 1 : behind], late)]
            continue
        mine = parts[place][0] if place in parts else [each]
        stay.extend([_blocks.under(flag, one, answer=False) for one in mine] if flag else mine)
    every = copy.deepcopy([*stay, *late, *body[behind:]])
    needs = moves.needs(places, behind)
    made = _rewrite.made_of(plain, _rewrite.function_with(node, _blocks.assembled(every), body[0]))
    if made is None:
        return None
    every = [part for place in places for part in parts[place][1]]
    return Moved(_rewrite.in_place(function, made), len(stay), places[0], needs, tuple(copy.deepcopy(every)))


def _found(function: Any, chain: Chain, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What names stand for at the begin of a call; None if that is not known."""
    plain = _rewrite.plain_function(function)
    return None if plain is None else _introspect.found_by_names(plain, _given(function, args, kwargs), chain)


def _is_plain(found: Any, name: str) -> bool:
    """Whether a method of an object, or a function, is PyTorch's own and calls no hooks of others."""
    if not name:
        return any(found is getattr(torch.nn.utils, each) for each in _CLIPPING)
    if isinstance(found, torch.nn.Module):
        return name == "zero_grad" and type(found).zero_grad is torch.nn.Module.zero_grad and name not in vars(found)
    if not isinstance(found, torch.optim.Optimizer) or not type(found).__module__.startswith("torch.optim"):
        return False
    own = vars(found).get(name)
    own = getattr(own, "__func__", own)
    hooks = [value for key, value in vars(found).items() if key.endswith("_hooks")]
    of_all = vars(sys.modules["torch.optim.optimizer"])
    hooks += [value for key, value in of_all.items() if key.startswith("_global_optimizer_")]
    return (own is None or own.__code__.co_filename.startswith(TORCH)) and not any(hooks)


def _has_hooks(one: Any) -> bool:
    """Whether a backward pass through a tensor or a module calls functions of others."""
    names = ("_backward_hooks", "_backward_pre_hooks", "_post_accumulate_grad_hooks")
    return any(getattr(one, name, None) for name in names)


def _read_names(body: list[ast.stmt]) -> set[str]:
    """The variables that are set to numbers of tensors."""
    return {
        each.targets[0].id
        for each in walk(body)
        if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name) and _read_of(each.value)
    }


def _move(place: int, node: ast.stmt, own: Set[str], late: Set[str]) -> _Move | None:
    """What a statement changes and reads, if it is one that may be moved. ``own``: the variables of the function;
    ``late``: those that are set to numbers of tensors."""
    if (report := _reports.report_of(node, own)) is not None:
        part = _Part("", report.late, [], others=False, report=report)
        return _Move(place, (), "", frozenset(), kept=_Kept(report.stays, [part]), is_simple=False)
    match node:
        case ast.AugAssign(target=target, op=op, value=value) if isinstance(op, _ADDS):
            kept = _kept(node, late) if isinstance(target, ast.Name) else None
            if (chain := names_in(target)) and (kept or _reads(value)):
                return _Move(place, chain, "", frozenset(named(value)), kept=kept, is_simple=_reads(value))
        case ast.With(items=[ast.withitem(ast.Call(func=manager), None)]) if names_in(manager)[-1:] and (
            names_in(manager)[-1] in _MODES
        ):
            return _in_block(place, node, own, late)
        case ast.If() if not may_return([node]):
            return _in_block(place, node, own, late)
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if (kept := _set_late(node)) is not None:
            return _Move(place, (name,), "", frozenset(named(value)), kept=kept, is_simple=False)
        case ast.Expr(ast.Call(func=ast.Attribute(value=holder, attr=method), args=values, keywords=more)):
            given = [*values, *(each.value for each in more)]
            simple, chain = all(map(_reads, given)), names_in(holder)
            kept = _kept(node, late) if method == "append" and len(chain) == len(values) == 1 else None
            if chain and (kept or simple):
                reads = frozenset(name for each in given for name in named(each))
                return _Move(place, chain, method, reads, kept=kept, is_simple=simple)
    return None


def _in_block(place: int, block: ast.With | ast.If, variables: Set[str], late: Set[str]) -> _Move | None:
    """What a block does to variables of the function's own, if that may be done later."""
    body, parts = _split(place, block.body, variables, late)
    if isinstance(block, ast.With):
        if not parts or any(part.others for part in parts):  # which the block's mode is for
            return None
        stays = ast.copy_location(ast.With(block.items, body), block)
        return _Move(place, (), "", frozenset(), kept=_Kept([stays], parts), is_simple=False)
    otherwise, others = _split(place, block.orelse, variables, late)
    if not parts and not others:
        return None
    every: list[ast.stmt] = []
    for number, (own, branch) in enumerate(((parts, body), (others, otherwise))):
        for part in own:
            part.kept = ""  # the branch may not run
        if own:
            flag = _blocks.kept_at(block, number)
            every.append(ast.Assign([_rewrite.stored(flag)], ast.Constant(False)))
            branch.insert(0, ast.Assign([_rewrite.stored(flag)], ast.Constant(True)))
            for part in own:
                part.adds = _blocks.under(flag, part.adds)
    every.append(ast.If(block.test, body, otherwise))
    every = [ast.fix_missing_locations(ast.copy_location(each, block)) for each in every]
    return _Move(place, (), "", frozenset(), kept=_Kept(every, [*parts, *others]), is_simple=False)


def _split(place: int, body: list[ast.stmt], variables: Set[str], late: Set[str]) -> tuple[list[ast.stmt], list[_Part]]:
    """The statements of a block without what may be done later, and that."""
    stays: list[ast.stmt] = []
    parts: list[_Part] = []
    for each in body:
        move = _move(place, each, variables, late)
        kept = None if move is None else move.kept
        mine = [each] if kept is None else kept.stays
        for part in parts:
            part.later = [*part.later, *mine]
        stays += mine
        parts += [] if kept is None else kept.parts
    return stays or [ast.Pass()] if body else [], parts


def _set_late(node: ast.Assign) -> _Kept | None:
    """A statement that sets a variable to what it reads of a tensor, in two."""
    read = _read_of(node.value)
    if read is None:
        return None
    tensor, methods = read
    name = _blocks.kept_at(node, 0)
    sets = ast.copy_location(ast.Assign(node.targets, _blocks.read_of_kept(name, methods)), node)
    target = node.targets[0]
    assert isinstance(target, ast.Name)
    part = _Part(target.id, ast.fix_missing_locations(sets), [], others=False, sets=True)
    part.kept = name if methods == ["item"] else ""
    return _Kept(_blocks.keeps(name, tensor, node, methods), [part])


def _read_of(value: ast.expr) -> tuple[ast.expr, list[str]] | None:
    """The tensor that an expression reads, and the methods that it reads it by: as a number, or as an array, if nothing
    else may hold the tensor."""
    chain = [value]
    while isinstance(each := chain[-1], ast.Call) and isinstance(each.func, ast.Attribute):
        chain.append(each.func.value)
    methods = [each.func.attr for each in chain if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute)]
    plain = [isinstance(each, ast.Call) and not each.args and not each.keywords for each in chain]
    if methods[:1] == ["item"] and plain[0]:
        return chain[1], ["item"]
    many = next((at for at, each in enumerate(methods) if at and each not in ("cpu", "detach")), len(methods))
    is_new = many < len(methods) and methods[many] in _REDUCING
    return (chain[many], methods[:many][::-1]) if methods[:1] == ["numpy"] and is_new and all(plain[:many]) else None


class _OfTensors(ast.NodeTransformer):
    """Asks tensors instead of their numbers: whether they are finite, or, as doubles, how they compare with written
    numbers."""

    def __init__(self, kept: Mapping[str, str], libraries: Set[str]) -> None:
        self._kept, self._libraries = kept, libraries

    def visit_Call(self, node: ast.Call) -> ast.AST:
        match node:
            case ast.Call(ast.Attribute(ast.Name(module), name), [ast.Name(number)], []) if (
                module in self._libraries and name in _OF_NUMBERS and number in self._kept
            ):
                kept = self._kept[number]
                return _blocks.read_of_kept(kept, [name], ast.Call(node.func, [_rewrite.loaded(kept)], []))
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        match node:
            case ast.Compare(left, ops, [right]) if _is_written(left) or _is_written(right):
                return ast.Compare(self._double(left), ops, [self._double(right)])
        return self.generic_visit(node)

    def _double(self, side: ast.expr) -> ast.expr:
        match side:
            case ast.Name(number) if number in self._kept:
                return _blocks.read_of_kept(self._kept[number], ["double"])
        return side


def _is_written(value: ast.expr) -> bool:
    """Whether an expression is a number in the source that a double holds."""
    match value:
        case ast.UnaryOp(ast.USub(), ast.Constant(number)) | ast.Constant(number):
            return isinstance(number, int | float) and type(number) is not bool and abs(number) <= _EXACT
    return False


def _first_question(block: ast.If) -> tuple[ast.expr, list[ast.stmt]]:
    """The first of the questions of a block that `and` joins, and what runs if the answer is yes."""
    match block.test:
        case ast.BoolOp(op=ast.And(), values=[first, other]):
            return first, [ast.If(other, block.body, [])]
        case ast.BoolOp(op=ast.And(), values=[first, *others]):
            return first, [ast.If(ast.BoolOp(ast.And(), others), block.body, [])]
    return block.test, block.body


def _asking(block: ast.If, first: list[ast.stmt], rest: list[ast.stmt], late: list[ast.stmt]) -> ast.If:
    """What runs where the ops have ended: moved statements, or, if the first question of a block under `if` has been
    answered with yes, those from before the block, the block, and what is behind it. Its flag has the answer."""
    flag = _rewrite.loaded(_blocks.kept_at(block, 0))
    made = ast.If(flag, [*first, *_first_question(block)[1], *rest], late or [ast.Pass()])
    return ast.fix_missing_locations(ast.copy_location(made, block))


def _kept(node: ast.AugAssign | ast.Expr, late: Set[str]) -> _Kept | None:
    """A statement that adds to a variable in two: what it reads of tensors by ``.item()``, a constant, or numbers that
    other such statements have read."""
    stays: list[ast.stmt] = []
    uses: list[str] = []
    others = False

    def keep(value: ast.expr, *read_by: str) -> str:
        name = _blocks.kept_at(node, len(stays))
        stays.extend(_blocks.keeps(name, value, node, read_by))
        return name

    def split(value: ast.expr) -> ast.expr:
        nonlocal others
        match value:
            case ast.BinOp(left=left, op=op, right=right):
                return ast.BinOp(split(left), op, split(right))
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=inner):
                return ast.UnaryOp(op, split(inner))
            case ast.Call(func=ast.Attribute(value=tensor, attr="item"), args=[], keywords=[]):
                return _blocks.read_of_kept(keep(tensor, "item"), ["item"])
            case ast.List(elts=parts) if value is whole:
                return ast.List([split(each) for each in parts], ast.Load())
            case ast.Constant():
                return value
            case ast.Name(id=name) if name in late:
                uses.append(name)
                return value
        others = True
        return _rewrite.loaded(keep(value))

    adds = copy.deepcopy(node)
    whole = adds.value.args[0] if isinstance(adds.value, ast.Call) and isinstance(node, ast.Expr) else adds.value
    if isinstance(whole, ast.Name) and isinstance(node, ast.Expr):  # a number that another such statement has read
        return _Kept([], [_Part(_changed(node), adds, [], others=False, uses=(whole.id,), adds_to_list=True)])
    if isinstance(whole, ast.Constant) and not isinstance(node, ast.Expr):
        return _Kept([], [_Part(_changed(node), adds, [], others=False)])
    reads = any(isinstance(each, ast.Attribute) and each.attr == "item" for each in ast.walk(whole))
    if not reads and late.isdisjoint(named(whole)):
        return None
    parts = whole.elts if isinstance(whole, ast.List) else [whole] if isinstance(node, ast.Expr) else []
    if not all(map(_is_new_number, parts)):
        return None
    if isinstance(adds, ast.Expr):
        assert isinstance(adds.value, ast.Call)
        adds.value.args = [split(whole)]
    else:
        adds.value = split(whole)
    to_list = isinstance(node, ast.Expr) or (isinstance(whole, ast.List) and isinstance(node.op, ast.Add))
    part = _Part(_changed(node), ast.fix_missing_locations(adds), [], others, tuple(uses), adds_to_list=to_list)
    return _Kept(stays, [part])


def _changed(node: ast.AugAssign | ast.Expr) -> str:
    """The variable that a statement adds to; empty if it is something else."""
    match node:
        case ast.AugAssign(target=ast.Name(id=name)):
            return name
        case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Name(id=name)))):
            return name
    return ""


def _is_new_number(value: ast.expr) -> bool:
    """Whether an expression makes what it gives, so that a list that holds it holds no tensor of others."""
    match value:
        case ast.Constant() | ast.BinOp() | ast.UnaryOp():
            return True
        case ast.Call(func=ast.Attribute(attr="item"), args=[], keywords=[]):
            return True
    return False


def _reads(value: ast.expr) -> bool:
    """Whether an expression does nothing but read tensors, and compute with numbers."""
    match value:
        case ast.Constant() | ast.Name():
            return True
        case ast.UnaryOp(operand=inner):
            return _reads(inner)
        case ast.BinOp(left=left, right=right):
            return _reads(left) and _reads(right)
        case ast.Subscript(value=inner, slice=ast.Constant() | ast.UnaryOp()):
            return _reads(inner)
        case ast.Compare(left=left, comparators=others):
            return all(map(_reads, (left, *others)))
        case ast.Attribute(value=ast.Name(), attr="shape"):
            return True
        case ast.Call(func=ast.Attribute(value=inner, attr=name), args=args, keywords=[]) if name in _METHODS:
            return _reads(inner) and all(map(_reads, args))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return all(map(_reads, args))
    return False


def _names_attribute(body: list[ast.stmt], name: str) -> bool:
    return any(isinstance(each, ast.Attribute) and each.attr == name for each in walk(body))


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """A tensor, or those in a list or tuple."""
    parts = value if isinstance(value, list | tuple) else [value]
    return [each for each in parts if isinstance(each, torch.Tensor)]


def _only_counts(method: Any) -> bool:
    """Whether a method does nothing but compute, of its arguments and the attributes of its object, other values of
    these attributes."""
    node = node_of(method.__code__) if isinstance(method, types.FunctionType) else None
    if node is None or not isinstance(node.body, list) or not node.args.args:
        return False
    own = node.args.args[0].arg
    known = {each.arg for each in ast.walk(node.args) if isinstance(each, ast.arg)}
    return all(_counts(each, own, known) for each in node.body)


def _counts(node: ast.stmt, own: str, known: set[str]) -> bool:
    def computes(value: ast.expr) -> bool:
        match value:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name in known and name != own
            case ast.Attribute(value=ast.Name(id=name)):
                return name == own
            case ast.UnaryOp(operand=inner):
                return computes(inner)
            case ast.BinOp(left=left, right=right):
                return computes(left) and computes(right)
            case ast.IfExp(test=test, body=one, orelse=other):
                return all(map(computes, (test, one, other)))
            case ast.Compare(left=left, comparators=others):
                return all(map(computes, (left, *others)))
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                return all(map(computes, args))
        return False

    match node:
        case ast.Expr(ast.Constant()) | ast.Pass() | ast.Return(value=None):
            return True
        case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name))], value=value):
            return name == own and computes(value)
        case ast.AugAssign(target=ast.Attribute(value=ast.Name(id=name)), value=value):
            return name == own and computes(value)
        case ast.Expr(ast.Call(func=ast.Attribute(value=ast.Attribute(value=ast.Name(id=name)), attr=attr), args=args)):
            return name == own and attr == "append" and all(map(computes, args))
    return False
