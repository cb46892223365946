"""Whether every use that a step makes of its hyperparameters can be followed.

A float in ``param_groups`` may vary between replays only when every use of it
was seen. C code reads the number inside a float without a trace (``math.sqrt``,
``"%f" % lr``, ``torch.tensor(lr)``), so watching a recording proves nothing by
itself. This module proves, before the step runs, that the float never gets to
such code:

- A hyperparameter is reached through ``param_groups`` alone: nothing else in
  reach of the step holds a group, and code that gets at an object's attributes
  without naming them counts as code that names ``param_groups``.
- PyTorch's own optimizers do arithmetic with it, and give the results to ops
  as plain arguments. (Those that do more are not on the list.)
- Any other code that names ``param_groups`` is checked statement by statement:
  hyperparameters may be added, subtracted, multiplied, divided and raised to powers, among
  themselves and with numbers that are written there; compared with such numbers,
  which a recording sees; combined with parameters of a group and what follows
  from these; and given to the ops below. The source must be that of the code
  that runs: it is compiled again and compared.

What is not proven keeps its guard: a new value is a miss, and a plan of its own.
"""

from __future__ import annotations

import ast
import builtins
import functools
import linecache
import re
import sys
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.overrides import _get_current_function_mode_stack

from ._frames import TORCH
from ._identity import by_identity

# PyTorch's optimizers that only compute with the floats of their groups, compare them, and make tensors of them
# by `torch.as_tensor`, which a recording sees. LBFGS calls back.
_OPTIMIZERS = frozenset(
    {"ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"}
    | {"Rprop", "SGD", "SparseAdam"}
)
# What a class derived from these may define anew: the walk sees its code, and nothing gives it a group.
_OWN_METHODS = frozenset({"__init__", "__doc__", "__module__", "__annotations__", "__setstate__", "step", "zero_grad"})
# Names by which code gets at a group, or at attributes that it does not name.
TOUCHING = frozenset(
    {"param_groups", "state_dict", "__dict__", "__getstate__", "__getattribute__", "vars", "attrgetter", "eval"}
    | {"exec", "get_objects", "get_referents", "get_referrers"}
)
# Names by which code reads the dict of an object: who reads that of an optimizer can be seen.
_SEEN = frozenset({"__dict__", "vars"})
# Of these, ``super().__getattribute__`` gives attributes of one object, and their dict by its name.
_OF_SELF = frozenset({"__getattribute__", "__dict__"})
# Ops that are recorded with the very numbers they are given.
_NUMERIC = frozenset(
    name + suffix for name in ("add", "sub", "mul", "div", "addcmul", "addcdiv", "lerp") for suffix in ("", "_")
)
_FOREACH = frozenset(f"_foreach_{name}" for name in _NUMERIC)
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor, AsyncCollectiveTensor)
_MODES = ("__torch_function__", "__torch_dispatch__")
# Names that the check of code takes to be PyTorch's.
_TAKEN = _NUMERIC | _FOREACH | {"parameters", "data", "grad"}
_TAKEN |= {f"__{way}{name}__" for name in ("add", "sub", "mul", "truediv", "pow", "neg") for way in ("", "r", "i")}
_OPTIM = str(torch.optim.__path__[0])
# Files whose code adds, multiplies, compares and gives to ops what it reads from the state, and nothing else; and
# the one with the function by which they read.
_READERS = frozenset(
    f"{_OPTIM}/{name}.py" for name in ("_adafactor", "adagrad", "adam", "adamax", "adamw", "asgd", "nadam", "radam")
)
_GET_VALUE = f"{_OPTIM}/optimizer.py"
_ROTE = f"{Path(__file__).parent}/"


class Unproven(Exception):
    """Why a hyperparameter keeps its guard."""


def is_followed(code: types.CodeType, proven: frozenset[types.CodeType]) -> bool:
    """Whether arithmetic in this code is arithmetic that was proven."""
    return is_of_optimizers(code) or code in proven


def is_of_optimizers(code: types.CodeType) -> bool:
    """Whether code is that of PyTorch's optimizers and schedulers."""
    return code.co_filename.startswith(_OPTIM)


def readable(
    optimizers: list[tuple[str, torch.optim.Optimizer]],
    tensors: list[tuple[str, torch.Tensor]],
    functions: list[types.FunctionType],
) -> dict[int, str]:
    """For each optimizer, by identity, why it may do more with what it reads from its state than compute with it and
    compare it; empty if it does not."""
    problem = _seen_by(tensors, functions)
    found = {}
    for path, optimizer in optimizers:
        found[id(optimizer)] = problem
        try:
            _check_optimizer(path, optimizer)
        except Unproven as unproven:
            found[id(optimizer)] = str(unproven)
    return found


def _seen_by(tensors: list[tuple[str, torch.Tensor]], functions: list[types.FunctionType]) -> str:
    """What of the script sees the arguments of ops, if anything does."""
    if _get_current_function_mode_stack():
        return "a torch function mode is active, which sees all arguments"
    for path, tensor in tensors:
        if type(tensor) not in _TENSORS:
            return f"{path} is a {type(tensor).__qualname__}"
    for function in functions:
        if function.__name__ in _MODES:
            return f"{function.__qualname__} sees the arguments of ops"
    return ""


def trusted_functions(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """The functions that the steps of optimizers call by name, and that are known to do no more than arithmetic with
    what they read: the module of each, its names, and the function's."""
    modules = {kind.__module__ for optimizer in optimizers for kind in type(optimizer).__mro__}
    for module in sorted(modules):
        found = sys.modules.get(module)
        if getattr(found, "__file__", None) not in _READERS:
            continue
        names = vars(found)
        for name, value in names.items():
            if isinstance(value, types.FunctionType) and name.startswith(
                ("_single_tensor", "_multi_tensor", "_get_value")
            ):
                yield module, names, name


def reader(frame: types.FrameType | None) -> Any:
    """The optimizer whose step asks a tensor for its number, if that is code of PyTorch which does no more than
    arithmetic with the number, or None."""
    if frame is not None and frame.f_code.co_filename == _GET_VALUE:
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename not in _READERS:
        return None
    while frame is not None and frame.f_code.co_filename.startswith((TORCH, _ROTE)):
        if frame.f_code.co_name == "step" and frame.f_code.co_filename in _READERS:
            return frame.f_locals.get("self")
        frame = frame.f_back
    return None


def watched(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """The identities of all that holds a group, and of the groups."""
    found: set[int] = set()
    for optimizer in optimizers:
        found.update((id(optimizer.param_groups), *map(id, optimizer.param_groups)))
    return found


def is_alias(path: str) -> bool:
    """Whether what is found at this path, a group or a list of groups, is
    reached without naming ``param_groups``."""
    return re.search(r"\.param_groups(\[\d+\])?$", path) is None


def prove(
    readable: dict[int, str],
    functions: list[types.FunctionType],
    names_of: Any,
    aliases: list[str],
    iterators: list[Any],
    optimizers: list[torch.optim.Optimizer],
    seen: bool,
) -> frozenset[types.CodeType]:
    """The code that was proven to follow hyperparameters, of the user's. ``readable`` comes from the function of
    that name, ``names_of(code)`` says what code names. ``seen``: it will be seen who reads the dicts of the
    optimizers. Raises :class:`Unproven`."""
    if aliases:
        raise Unproven(f"{aliases[0]} holds a group of the optimizer")
    for problem in filter(None, readable.values()):
        raise Unproven(problem)
    for iterator in iterators:
        code = getattr(iterator, "gi_code", None)
        if code is not None and _touches(names_of(code)):
            raise Unproven(f"a generator in reach names {', '.join(_touches(names_of(code)))}")
    proven: set[types.CodeType] = set()
    names = {function.__name__ for function in functions}
    # A descriptor of a class gives a dict that nobody sees read.
    seen = seen and not any("__get__" in names_of(function.__code__).attributes for function in functions)
    unnamed = _SEEN if seen else frozenset()
    for function in functions:
        touching = set(_touches(names_of(function.__code__))) - unnamed
        if touching and not (touching <= _OF_SELF and reads_no_other(function, optimizers)):
            shadowing = names & _TAKEN
            if shadowing:
                raise Unproven(f"{min(shadowing)} is the name of a function in reach")
            _check_code(function)
            proven.update(_nested(function.__code__))
    return frozenset(proven)


def _touches(names: Any) -> list[str]:
    return sorted(TOUCHING & (names.attributes | set(names.globals)))


def reads_no_other(function: types.FunctionType, objects: Iterable[Any]) -> bool:
    """Whether a function of a class gets at attributes that it does not name by ``super().__getattribute__`` alone, and
    none of ``objects`` is of that class. So it reads none of these: ``super()`` takes no object but the class's."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        kind = cells["__class__"].cell_contents
    except (KeyError, ValueError):
        return False
    if "super" in function.__globals__ or not issubclass(type(kind), type):
        return False
    if any(issubclass(type(each), kind) for each in objects):
        return False
    node = node_of(function.__code__)
    if node is None:
        return False
    calls = [each for each in ast.walk(node) if isinstance(each, ast.Call) and _is_of_super(each.func)]
    own = {id(part) for call in calls for part in (call.func, *call.args)}
    return all(id(each) in own or _is_harmless(each) for each in ast.walk(node))


def _is_of_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and ast.unparse(node) == "super().__getattribute__"


def _is_harmless(node: ast.AST) -> bool:
    """Whether a part of code neither names what gets at attributes nor makes another thing of ``super``."""
    match node:
        case ast.Name(id=name, ctx=use):
            return name not in (*_OF_SELF, "__class__") and (name != "super" or isinstance(use, ast.Load))
        case ast.arg(arg=name) | ast.Attribute(attr=name):
            return name not in (*_OF_SELF, "__class__", "super")
        case ast.Constant(value=text):
            return text not in _OF_SELF
    return not isinstance(node, ast.Nonlocal | ast.Global)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _nested(const)


def _check_optimizer(path: str, optimizer: torch.optim.Optimizer) -> None:
    kinds = type(optimizer).__mro__
    own = [kind for kind in kinds if kind.__module__.split(".")[0] != "torch" and kind is not object]
    base = next(kind for kind in kinds if kind not in own)
    if base is not torch.optim.Optimizer and base.__name__ not in _OPTIMIZERS:
        raise Unproven(f"{base.__name__} does more with its numbers than arithmetic")
    inherited = {name for kind in kinds if kind not in own and kind is not object for name in vars(kind)}
    changed = {name for kind in own for name in vars(kind)} | {
        name for name, value in vars(optimizer).items() if isinstance(value, types.FunctionType | types.MethodType)
    }
    changed = (changed & inherited) - _OWN_METHODS
    if changed:
        raise Unproven(f"{path} has a {min(changed)} of its own, which may be given a group")
    for i, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if key != "params" and not _is_ordinary(value):
                raise Unproven(f"{path}.param_groups[{i}][{key!r}] is a {type(value).__qualname__}")
        if group.get("differentiable"):
            raise Unproven(f"{path} is differentiable: autograd computes with its numbers")
        for parameter in group["params"]:
            if type(parameter) not in _TENSORS:
                raise Unproven(f"{path} has a parameter that is a {type(parameter).__qualname__}")
            if parameter.is_leaf and parameter.grad is not None and type(parameter.grad) not in _TENSORS:
                raise Unproven(f"{path} has a gradient that is a {type(parameter.grad).__qualname__}")
    for entries in optimizer.state.values():
        for value in entries.values() if isinstance(entries, dict) else ():
            if isinstance(value, torch.Tensor) and type(value) not in _TENSORS:
                raise Unproven(f"{path} has state that is a {type(value).__qualname__}")


def _is_ordinary(value: Any) -> bool:
    """Whether arithmetic with a value is Python's or PyTorch's own."""
    if issubclass(type(value), tuple | list):
        return all(map(_is_ordinary, value))
    return value is None or type(value) in (bool, int, float, str, *_TENSORS) or is_number(value)


def is_number(value: Any) -> bool:
    """Whether a hyperparameter is a float, NumPy's or Python's own."""
    return type(value) is float or (issubclass(type(value), float) and type(value).__module__ == "numpy")


def is_numbers(value: Any) -> bool:
    """Whether a hyperparameter is a tuple of floats, as Adam's ``betas`` are."""
    return type(value) is tuple and len(value) > 0 and all(map(is_number, value))


# -- code -------------------------------------------------------------------------

_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
# What an expression may be, as far as it matters.
_UNKNOWN, _OTHER, _WRITTEN, _TENSOR, _PARAMETERS, _NUMBER, _GROUP, _GROUPS, _MIXED = range(9)
_HELD = (_NUMBER, _GROUP, _GROUPS, _MIXED)  # kinds that must not go anywhere unseen
_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)


class _Source:
    """What a file says, and the code that it is compiled to."""

    def __init__(self, filename: str) -> None:
        tree = ast.parse("".join(linecache.getlines(filename)))
        self.codes = set(_nested(compile(tree, filename, "exec", dont_inherit=True)))
        self._nodes: dict[tuple[str, int], list[_Function]] = {}
        for node in ast.walk(tree):
            if isinstance(node, _Function):
                decorators = getattr(node, "decorator_list", ())
                line = min([node.lineno, *(each.lineno for each in decorators)])
                self._nodes.setdefault((getattr(node, "name", "<lambda>"), line), []).append(node)

    def node_of(self, code: types.CodeType) -> _Function | None:
        found = self._nodes.get((code.co_name, code.co_firstlineno), [])
        return found[0] if len(found) == 1 and code in self.codes else None


@functools.lru_cache(maxsize=256)
def _source(filename: str) -> _Source | None:
    try:
        return _Source(filename)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None


@by_identity
def node_of(code: types.CodeType) -> _Function | None:
    """The source of a function, when that is what runs."""
    source = _source(code.co_filename)
    return None if source is None else source.node_of(code)


_checked: dict[types.CodeType, str | None] = {}


def _check_code(function: types.FunctionType) -> None:
    code = function.__code__
    own = function.__globals__
    if own.get("torch", torch) is not torch or any(hasattr(builtins, name) for name in own.keys() & _Checker.BUILTINS):
        raise Unproven(f"{function.__qualname__} names another torch, or replaces built-in functions")
    if code not in _checked:
        node = node_of(code)
        if node is None:
            _checked[code] = f"{function.__qualname__} names param_groups, and its source is not known"
        else:
            try:
                _checked[code] = _Checker(node).check()
            except RecursionError:
                _checked[code] = f"{function.__qualname__} is nested too deep"
    problem = _checked[code]
    if problem is not None:
        raise Unproven(problem)


class _Checker:
    """Follows what a function does with hyperparameters, whatever the order of its
    statements: a name is what any of its assignments makes it."""

    BUILTINS = frozenset({"enumerate", "zip", "len", "list", "tuple", "reversed"})

    def __init__(self, node: _Function) -> None:
        self._node = node
        self._names: dict[str, int] = {
            each.id: _UNKNOWN
            for each in ast.walk(node)
            if isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load)
        }
        self._settled = False
        self._problem: str | None = None

    def check(self) -> str | None:
        """Why the function is not proven, if it is not."""
        while True:
            before = dict(self._names)
            self._function(self._node)
            if before == self._names:
                break
        for name, kind in self._names.items():
            if kind == _UNKNOWN:
                self._names[name] = _OTHER
        self._settled = True
        self._function(self._node)
        return self._problem

    def _fail(self, node: ast.AST, why: str) -> int:
        if self._settled and self._problem is None:
            name = getattr(self._node, "name", "a lambda")
            self._problem = f"{name}, line {getattr(node, 'lineno', '?')}: {why}"
        return _OTHER

    def _bind(self, target: ast.AST, kind: int) -> None:
        if isinstance(target, ast.Name):
            known = self._names.get(target.id, _UNKNOWN)
            self._names[target.id] = _join(known, kind)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, _OTHER if kind not in _HELD else kind)
        elif isinstance(target, ast.Tuple | ast.List):
            for each in target.elts:
                # A hyperparameter that can be unpacked is none that is followed.
                self._bind(each, {_NUMBER: _OTHER, _WRITTEN: _OTHER}.get(kind, _element(kind)))
        else:
            if kind in _HELD:
                self._fail(target, "a hyperparameter is kept where others may read it")
            if isinstance(target, ast.Subscript) and self._kind(target.value) in (_GROUP, _GROUPS):
                self._fail(target, "a group is changed")
            elif isinstance(target, ast.Attribute):
                self._plain(target.value)

    def _plain(self, node: ast.AST | None) -> None:
        """An expression that must not be a hyperparameter."""
        if node is not None and self._kind(node) in _HELD:
            self._fail(node, "a hyperparameter goes where it cannot be followed")

    # -- expressions ----------------------------------------------------------------

    def _kind(self, node: ast.AST) -> int:
        method = getattr(self, f"_{type(node).__name__.lower()}", None)
        if method is not None:
            return int(method(node))
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr | ast.keyword | ast.Slice):
                self._plain(child)
        return _OTHER

    def _constant(self, node: ast.Constant) -> int:
        if isinstance(node.value, str) and not TOUCHING.isdisjoint(node.value.split(".")):
            return self._fail(node, f"{node.value!r} may get at hyperparameters")
        return _WRITTEN if type(node.value) in (int, float) else _OTHER

    def _name(self, node: ast.Name) -> int:
        kind = self._names.get(node.id, _OTHER)
        if node.id in TOUCHING:
            return self._fail(node, f"{node.id} gets at hyperparameters")
        if kind == _MIXED:
            self._fail(node, f"{node.id} is a hyperparameter, or something else")
        return kind

    def _keyword(self, node: ast.keyword) -> int:
        return self._kind(node.value)

    def _starred(self, node: ast.Starred) -> int:
        return self._kind(node.value)

    def _attribute(self, node: ast.Attribute) -> int:
        kind = self._kind(node.value)
        if node.attr == "param_groups" and kind not in _HELD:
            return _GROUPS
        if node.attr in TOUCHING:
            return self._fail(node, f"{node.attr} gets at hyperparameters")
        if kind in _HELD:
            return self._fail(node, f"{node.attr} of a hyperparameter or a group")
        return _TENSOR if kind == _TENSOR and node.attr in ("grad", "data") else _OTHER

    def _subscript(self, node: ast.Subscript) -> int:
        kind = self._kind(node.value)
        self._plain(node.slice)
        if kind == _GROUP:
            key = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return self._entry(node, key)
        if kind in (_GROUPS, _PARAMETERS):
            if isinstance(node.slice, ast.Slice):
                return kind
            return _element(kind)
        if kind in _HELD:
            return self._fail(node, "an entry of a hyperparameter")
        return _UNKNOWN if kind == _UNKNOWN else _OTHER

    def _entry(self, node: ast.AST, key: Any) -> int:
        if not isinstance(key, str):
            return self._fail(node, "an entry of a group whose name is not written there")
        return _PARAMETERS if key == "params" else _NUMBER

    def _binop(self, node: ast.BinOp) -> int:
        return self._combined(node, self._kind(node.left), node.op, self._kind(node.right))

    def _combined(self, node: ast.AST, left: int, op: ast.operator, right: int) -> int:
        kinds = {left, right}
        if _UNKNOWN in kinds:
            return _UNKNOWN
        if _NUMBER in kinds:
            if kinds <= {_NUMBER, _WRITTEN} and isinstance(op, _ARITHMETIC):
                return _NUMBER
            if kinds == {_NUMBER, _TENSOR} and isinstance(op, _ARITHMETIC[:4]):
                return _TENSOR
            return self._fail(node, "a hyperparameter is combined with something that is no known number or tensor")
        if kinds & set(_HELD):
            return self._fail(node, "a group is combined with something")
        if kinds == {_WRITTEN}:
            return _WRITTEN
        return _TENSOR if _TENSOR in kinds and kinds <= {_TENSOR, _WRITTEN} else _OTHER

    def _unaryop(self, node: ast.UnaryOp) -> int:
        kind = self._kind(node.operand)
        if isinstance(node.op, ast.Not):
            return _OTHER  # a recording sees it
        if kind in _HELD and (kind != _NUMBER or isinstance(node.op, ast.Invert)):
            return self._fail(node, "a group, or an operation that numbers do not have")
        return kind

    def _compare(self, node: ast.Compare) -> int:
        kinds = [self._kind(each) for each in (node.left, *node.comparators)]
        if _NUMBER in kinds:
            is_none = [isinstance(each, ast.Constant) and each.value is None for each in node.comparators]
            for op, none in zip(node.ops, is_none, strict=True):
                if isinstance(op, ast.In | ast.NotIn) or (isinstance(op, ast.Is | ast.IsNot) and not none):
                    return self._fail(node, "a hyperparameter is looked for, or compared by identity")
            if not all(is_none) and not set(kinds) <= {_NUMBER, _WRITTEN, _UNKNOWN}:
                return self._fail(node, "a hyperparameter is compared with something that is no known number")
        elif set(kinds) & set(_HELD):
            return self._fail(node, "a group is compared")
        return _OTHER

    def _ifexp(self, node: ast.IfExp) -> int:
        self._kind(node.test)
        kind = _join(self._kind(node.body), self._kind(node.orelse))
        return self._fail(node, "a hyperparameter, or something else") if kind == _MIXED else kind

    def _joinedstr(self, node: ast.JoinedStr) -> int:
        for each in ast.walk(node):
            if isinstance(each, ast.FormattedValue) and self._kind(each.value) in (_GROUP, _GROUPS, _MIXED):
                self._fail(node, "a group is formatted")
        return _OTHER  # of a number, a recording sees it

    def _namedexpr(self, node: ast.NamedExpr) -> int:
        kind = self._kind(node.value)
        self._bind(node.target, kind)
        return kind

    def _lambda(self, node: ast.Lambda) -> int:
        self._function(node)
        return _OTHER

    def _listcomp(self, node: ast.ListComp | ast.GeneratorExp) -> int:
        self._generators(node.generators)
        kind = self._kind(node.elt)
        self._plain(node.elt)
        return _PARAMETERS if kind == _TENSOR else _OTHER

    _generatorexp = _listcomp

    def _setcomp(self, node: ast.SetComp) -> int:
        self._generators(node.generators)
        self._plain(node.elt)
        return _OTHER

    def _dictcomp(self, node: ast.DictComp) -> int:
        self._generators(node.generators)
        self._plain(node.key)
        self._plain(node.value)
        return _OTHER

    def _generators(self, generators: list[ast.comprehension]) -> None:
        for each in generators:
            self._loop(each.target, each.iter)
            for test in each.ifs:
                self._kind(test)

    def _loop(self, target: ast.AST, iterable: ast.AST) -> None:
        """Binds what a loop goes through."""
        if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and not iterable.keywords:
            name, kinds = iterable.func.id, [self._kind(each) for each in iterable.args]
            targets = target.elts if isinstance(target, ast.Tuple | ast.List) else []
            if name == "enumerate" and len(targets) == 2 and kinds:
                self._bind(targets[0], _OTHER)
                self._bind(targets[1], _element(kinds[0]))
                return
            if name == "zip" and len(targets) == len(kinds):
                for each, kind in zip(targets, kinds, strict=True):
                    self._bind(each, _element(kind))
                return
            if name == "reversed" and len(kinds) == 1:
                self._bind(target, _element(kinds[0]))
                return
        kind = self._kind(iterable)
        if kind in (_GROUP, _NUMBER):
            self._fail(iterable, "a loop over the entries of a group")
        self._bind(target, _element(kind))

    def _call(self, node: ast.Call) -> int:
        given = [*node.args, *node.keywords]
        kinds = [self._kind(each) for each in given]
        function = node.func
        if isinstance(function, ast.Name) and function.id in self.BUILTINS and function.id not in self._names:
            if function.id == "len" and set(kinds) <= {_GROUPS, _PARAMETERS, _OTHER, _UNKNOWN}:
                return _OTHER
            if function.id in ("list", "tuple", "reversed") and kinds == [_PARAMETERS]:
                return _PARAMETERS
        if isinstance(function, ast.Attribute):
            owner = self._kind(function.value)
            if owner == _GROUP and function.attr == "get" and 0 < len(given) <= 2 and not node.keywords:
                default = kinds[1] if len(kinds) == 2 else _OTHER
                key = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
                if default in (_OTHER, _WRITTEN):
                    return self._entry(node, key)
            allowed = not set(kinds) & {_GROUP, _GROUPS, _MIXED}
            of_torch = isinstance(function.value, ast.Name) and function.value.id == "torch" not in self._names
            if allowed and owner == _TENSOR and function.attr in _NUMERIC:
                return _TENSOR
            if allowed and of_torch and function.attr in _NUMERIC | _FOREACH:
                return _TENSOR if function.attr in _NUMERIC else _OTHER
            if owner == _TENSOR:
                for each in given:
                    self._plain(each)
                return _TENSOR if function.attr in _SAME_KIND else _OTHER
        self._plain(function)
        for each in given:
            self._plain(each)
        if isinstance(function, ast.Attribute) and function.attr == "parameters":
            return _PARAMETERS
        return _OTHER

    # -- statements ----------------------------------------------------------------

    def _function(self, node: _Function) -> None:
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                self._names[each.arg] = _join(self._names.get(each.arg, _UNKNOWN), _OTHER)
        for default in (*arguments.defaults, *arguments.kw_defaults):
            self._plain(default)
        if isinstance(node, ast.Lambda):
            self._plain(node.body)
            return
        if node is not self._node:
            self._names[node.name] = _join(self._names.get(node.name, _UNKNOWN), _OTHER)
            for decorator in node.decorator_list:
                self._plain(decorator)
        self._body(node.body)

    def _body(self, statements: list[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            if node.value is not None:
                self._assign(node.target, node.value)
        elif isinstance(node, ast.AugAssign):
            kind = self._combined(node, self._kind(node.target), node.op, self._kind(node.value))
            self._bind(node.target, kind)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self._loop(node.target, node.iter)
            self._body(node.body)
            self._body(node.orelse)
        elif isinstance(node, ast.If | ast.While):
            self._kind(node.test)  # whether a number is 0, a recording sees
            self._body(node.body)
            self._body(node.orelse)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._plain(item.context_expr)
                if item.optional_vars is not None:
                    self._bind(item.optional_vars, _OTHER)
            self._body(node.body)
        elif isinstance(node, ast.Try):
            self._body(node.body)
            for handler in node.handlers:
                self._plain(handler.type)
                if handler.name:
                    self._names[handler.name] = _join(self._names.get(handler.name, _UNKNOWN), _OTHER)
                self._body(handler.body)
            self._body(node.orelse)
            self._body(node.finalbody)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self._function(node)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            for name in node.names:
                if self._names.get(name) in _HELD:
                    self._fail(node, f"{name} outlives the call")
        elif isinstance(node, ast.Return | ast.Expr):
            if isinstance(node, ast.Return):
                self._plain(node.value)
            else:
                self._kind(node.value)
        elif isinstance(node, ast.Assert):
            self._kind(node.test)
            self._plain(node.msg)
        elif isinstance(node, ast.Raise):
            self._plain(node.exc)
            self._plain(node.cause)
        elif isinstance(node, ast.Delete):
            for target in node.targets:
                if not isinstance(target, ast.Name):
                    self._fail(node, "something is deleted")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                name = (alias.asname or alias.name).split(".")[0]
                self._names[name] = _join(self._names.get(name, _UNKNOWN), _OTHER)
        elif not isinstance(node, ast.Pass | ast.Break | ast.Continue):
            self._fail(node, f"a {type(node).__name__} statement beside param_groups")

    def _assign(self, target: ast.AST, value: ast.AST) -> None:
        both = isinstance(target, ast.Tuple | ast.List) and isinstance(value, ast.Tuple | ast.List)
        if both and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
            for inner, given in zip(target.elts, value.elts, strict=True):  # type: ignore[attr-defined]
                self._assign(inner, given)
            return
        self._bind(target, self._kind(value))


# Methods of a tensor whose results are tensors of the same kind.
_SAME_KIND = frozenset({"clone", "detach", "copy_", "zero_", "neg", "sqrt", "sign", "mul_", "add_"})


def _join(one: int, other: int) -> int:
    if one == other or other == _UNKNOWN:
        return one
    if one == _UNKNOWN:
        return other
    if {one, other} == {_NUMBER, _WRITTEN}:
        return _NUMBER
    return _MIXED if {one, other} & set(_HELD) else _OTHER


def _element(kind: int) -> int:
    """What a loop over this goes through."""
    return {_GROUPS: _GROUP, _PARAMETERS: _TENSOR, _UNKNOWN: _UNKNOWN}.get(kind, kind if kind in _HELD else _OTHER)
