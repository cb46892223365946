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
  from these; given to the ops below; and returned by the captured function. The source must be that of the code
  that runs: it is compiled again and compared.

What is not proven keeps its guard: a new value is a miss, and a plan of its own.
"""

from __future__ import annotations

import ast
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

from ._arithmetic import FOREACH, NUMERIC, TOUCHING, problem
from ._frames import TORCH
from ._return_places import only_returns_groups
from ._sources import arguments, names_in, nested, node_of

# PyTorch's optimizers that only compute with the floats of their groups, compare them, and make tensors of them
# by `torch.as_tensor`, which a recording sees. LBFGS calls back.
_OPTIMIZERS = frozenset(
    {"ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "Muon", "NAdam", "RAdam", "RMSprop"}
    | {"Rprop", "SGD", "SparseAdam"}
)
# What a class derived from these may define anew: the walk sees its code, and nothing gives it a group.
_OWN_METHODS = frozenset({"__init__", "__doc__", "__module__", "__annotations__", "__setstate__", "step", "zero_grad"})
# What Python 3.13 and 3.14 put into each class that is written in a file.
_OWN_METHODS |= {"__firstlineno__", "__static_attributes__", "__annotate_func__", "__annotations_cache__"}
# Names by which code reads the dict of an object: who reads that of an optimizer can be seen.
_SEEN = frozenset({"__dict__", "vars"})
# Of these, ``super().__getattribute__`` gives attributes of one object, and their dict by its name.
_OF_SELF = frozenset({"__getattribute__", "__dict__"})
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, DTensor, AsyncCollectiveTensor)
_MODES = ("__torch_function__", "__torch_dispatch__")
# Names that the check of code takes to be PyTorch's.
_TAKEN = NUMERIC | FOREACH | {"parameters", "data", "grad"}
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


class UnprovenCode(Unproven):
    """The same, of what a function in reach may do; the step may not run it."""


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
    sees = seen_by(tensors, functions)
    found = {}
    for path, optimizer in optimizers:
        found[id(optimizer)] = sees
        try:
            _check_optimizer(path, optimizer)
        except Unproven as unproven:
            found[id(optimizer)] = str(unproven)
    return found


def seen_by(tensors: list[tuple[str, torch.Tensor]], functions: list[types.FunctionType]) -> str:
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
    captured: types.CodeType | None,
) -> frozenset[types.CodeType]:
    """The code that was proven to follow hyperparameters, of the user's. ``readable`` comes from the function of
    that name, ``names_of(code)`` says what code names. ``seen``: it will be seen who reads the dicts of the
    optimizers. ``captured``: the code of the captured function, which may return hyperparameters. Raises
    :class:`Unproven`."""
    if aliases:
        raise Unproven(f"{aliases[0]} holds a group of the optimizer")
    for why in filter(None, readable.values()):
        raise Unproven(why)
    for iterator in iterators:
        code = getattr(iterator, "gi_code", None)
        if code is not None and _touches(names_of(code)):
            raise Unproven(f"a generator in reach names {', '.join(_touches(names_of(code)))}")
    proven: set[types.CodeType] = set()
    shadowing = taken_names(functions)
    # A descriptor of a class gives a dict that nobody sees read.
    seen = seen and not any("__get__" in names_of(function.__code__).attributes for function in functions)
    unnamed = _SEEN if seen else frozenset()
    for function in functions:
        touching = set(_touches(names_of(function.__code__))) - unnamed
        if touching and not (touching <= _OF_SELF and reads_no_other(function, optimizers)):
            if touching == {"param_groups"} and _hands_on(function.__code__):
                continue
            runs = function.__code__ is captured
            if runs and touching == {"param_groups"} and only_returns_groups(function.__code__):
                continue  # it computes nothing, so that tuples in the groups may be followed beside it
            kind = Unproven if runs else UnprovenCode
            if shadowing:
                raise kind(f"{min(shadowing)} is the name of a function in reach")
            unproven = problem(function, returns=runs)
            if unproven is not None:
                raise kind(unproven)
            proven.update(nested(function.__code__))
    return frozenset(proven)


def taken_names(functions: Iterable[types.FunctionType]) -> set[str]:
    """The names of functions that the check of code takes to be PyTorch's."""
    return {function.__name__ for function in functions} & _TAKEN


def _touches(names: Any) -> list[str]:
    return sorted(TOUCHING & (names.attributes | set(names.globals)))


def _hands_on(code: types.CodeType) -> bool:
    """Whether code is a property, as a wrapper of optimizers has it, that gives the groups under the name which they
    have: who asks it for them names them too."""
    node = node_of(code)
    match node:
        case ast.FunctionDef(name="param_groups", body=[ast.Return(ast.Attribute(value=holder, attr="param_groups"))]):
            named = [each.id for each in ast.walk(holder) if isinstance(each, ast.Name)]
            return bool(names_in(holder)) and named == [each.arg for each in arguments(node)]
    return False


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
