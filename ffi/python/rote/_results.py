"""The structure of a step's result, and how a replay gives it back."""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from . import _containers, _introspect, _metrics
from ._bridge import bridge
from ._facts import is_of_argument
from ._libraries import is_library_class
from ._returns import Rate, Read
from ._specs import local_of, mesh_text
from ._views import Made, as_inference, make, of_inference


@dataclass(frozen=True)
class Late:
    """What a replay does when it has ended: it adds a number to the counter at a path, sets the attribute there to a
    boolean or to a value (a node), or calls the step of the scheduler there, with a metric (a node) if that takes
    one."""

    path: str
    number: int | bool | None = None
    metric: Any = None
    value: Any = None

    def to_json(self) -> Any:
        """As docs/plan-format.md defines it."""
        path = {"c": self.path}
        if self.number is not None:
            return {"tuple": [path, {"c": self.number}]}
        if self.value is not None:
            return {"tuple": [path, {"list": [self.value]}]}
        return path if self.metric is None else {"tuple": [path, {"tuple": [self.metric]}]}

    @staticmethod
    def from_json(node: Any) -> Late:
        """The same of the nodes in a plan."""
        if "c" in node:
            return Late(node["c"])
        path, what = node["tuple"]
        if "c" in what:
            return Late(path["c"], number=what["c"])
        if "list" in what:
            return Late(path["c"], value=what["list"][0])
        (metric,) = what["tuple"]
        return Late(path["c"], metric=metric)


class Unsupported(Exception):
    """A result that a plan cannot give back."""


Classes = dict[tuple[str, str], type]  # of a result, by the names of their modules and their own


def outputs_in(node: Any) -> set[int]:
    """The places of the outputs that a node names."""
    return {value for kind, value in _nodes_in(node) if kind == "t"}


def _nodes_in(node: Any) -> Iterator[tuple[str, Any]]:
    """A node and all nodes in it: the key and the value of each."""
    ((kind, value),) = node.items()
    yield kind, value
    parts = [part for item in value for part in item] if kind == "dict" else value if type(value) is list else [value]
    for part in parts:
        if type(part) is dict:
            yield from _nodes_in(part)


def can_give(value: Any, outlives: set[int]) -> bool:
    """Whether a replay can make a value, as :func:`encode` has it."""
    try:
        encode(value, {}, [], outlives, {})
    except Unsupported:
        return False
    return True


def encode(
    result: Any, names: dict[int, Any], outputs: list[torch.Tensor], outlives: set[int], numbers: dict[int, Read]
) -> tuple[Any, Classes]:
    """The structure as docs/plan-format.md defines it, and the classes in it. ``names`` are nodes of
    the caller's own tensors by id; other tensors are appended to ``outputs``.
    ``outlives`` are objects from before the step, by id; ``numbers`` are floats that were read from tensors."""
    given: dict[int, int | None] = {}  # lists, dicts and objects: their numbers; None of those that are not complete
    classes: Classes = {}
    complete = itertools.count()
    tuples: dict[int, int] = {}  # their numbers

    def node(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return names.get(id(value)) or tensor(value)
        if isinstance(value, Rate):
            return {"rate": [{"c": value.path}, {"c": value.place}, {"c": value.key}]}
        if isinstance(value, Read):
            return {"item": tensor(value.tensor)}
        if type(value) is float and id(value) in numbers:
            return {"item": tensor(numbers[id(value)].tensor)}
        kind = type(value)
        if kind is float and not math.isfinite(value):
            return {"f": "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")}
        if kind is str and not _is_unicode(value):
            raise Unsupported("text that is not Unicode")
        if value is None or kind in (bool, int, float, str):
            return {"c": value}
        if kind is tuple:
            if id(value) in tuples:
                return {"object": [{"c": "tuple"}, {"c": tuples[id(value)]}]}
            made: Any = {"tuple": [node(item) for item in value]}
            tuples[id(value)] = len(tuples)
            return made
        if kind in _SAID:
            return {"object": [{"c": _SAID[kind]}, {"c": str(value).removeprefix("torch.")}]}
        layout = _containers.layout_of(kind)
        if kind not in (list, dict) and layout is None:
            raise Unsupported(f"a {_introspect.name(kind)}")
        if id(value) in outlives and kind is not torch.Size:  # an equal one does, as of tuples
            raise Unsupported(f"a {_introspect.name(kind)} that is older than the step")
        if id(value) in given:
            number = given[id(value)]
            if number is None:
                raise Unsupported(f"a {_introspect.name(kind)} that contains itself")
            return {"object": [{"c": number}]}
        given[id(value)] = None
        if kind is list:
            made = {"list": [node(item) for item in value]}
        elif layout is None:
            made = {"dict": pairs(value.items())}
        else:
            made = container(value, layout)
        given[id(value)] = next(complete)
        return made

    def pairs(items: Iterable[tuple[Any, Any]]) -> Any:
        return [[key_of(key), node(item)] for key, item in items]

    def key_of(key: Any) -> Any:
        if not _is_key(key):
            raise Unsupported(f"a dict with a {_introspect.name(type(key))} for a key")
        return node(key)

    def container(value: Any, layout: _containers.Layout) -> Any:
        kind = layout.kind
        module, name = _introspect.module_of(kind), _introspect.name(kind)
        if id(kind) not in outlives and not (is_library_class(kind) and _containers.named(module, name) is kind):
            raise Unsupported(f"a {name}, a class that the step has not in reach before it runs")
        if classes.setdefault((module, name), kind) is not kind:
            raise Unsupported(f"a {name} beside another class of that name")
        if weakref.getweakrefcount(value) if kind.__weakrefoffset__ else 0:
            raise Unsupported(f"a {name} with a weak reference to it")
        attributes = _containers.attributes_of(value)
        if not all(map(_is_name, attributes)):
            raise Unsupported(f"a {name} with an attribute whose name is no text")
        _check_made(value, layout)
        entries = layout.entries(value)
        if entries is None:
            content: Any = {"c": None}
        elif issubclass(layout.base, dict):
            content = {"dict": pairs(entries)}
        else:
            content = {"tuple": [node(item) for item in entries]}
        own, slots = ({"dict": pairs(each)} for each in (attributes.items(), layout.filled(value)))
        return {"object": [{"c": module}, {"c": name}, content, own, slots]}

    def tensor(value: torch.Tensor) -> Any:
        for i, other in enumerate(outputs):
            if other is value:
                return {"t": i}
        outputs.append(value)
        return {"t": len(outputs) - 1}

    return node(result), classes


# Values that their text says in full.
_SAID = {torch.dtype: "dtype", torch.device: "device"}


def _is_name(name: Any) -> bool:
    return type(name) is str and _is_unicode(name)


def _is_key(key: Any) -> bool:
    """Whether no code of a user's class runs where a dict gets an entry with the key."""
    if type(key) is tuple:
        return all(map(_is_key, key))
    return key is None or type(key) in (bool, int, float, str) or isinstance(key, torch.Tensor)


def _check_made(value: Any, layout: _containers.Layout) -> None:
    """Raises :class:`Unsupported` where an object like this one cannot be made of its parts."""
    name = _introspect.name(layout.kind)
    try:
        entries, own, slots = layout.entries(value), _containers.attributes_of(value), dict(layout.filled(value))
        made = layout.make(entries, own, slots)
        again = layout.entries(made), _containers.attributes_of(made), dict(layout.filled(made))
    except Exception as problem:
        raise Unsupported(f"a {name} ({type(problem).__name__}: {problem})") from None
    if type(made) is not type(value) or not all(map(_alike, (entries, own, slots), again)):
        raise Unsupported(f"a {name}, of which an equal one cannot be made")


def _alike(one: Any, other: Any) -> bool:
    """Whether entries are the same objects in the same order."""
    if one is None or other is None:
        return one is other
    ones, others = (_flat(list(each.items()) if isinstance(each, dict) else each) for each in (one, other))
    return len(ones) == len(others) and all(map(operator.is_, ones, others))


def _flat(entries: list[Any]) -> list[Any]:
    return [part for item in entries for part in (item if type(item) is tuple else (item,))]


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Decoder:
    """Makes one result of its structure."""

    __slots__ = ("_classes", "_made", "_own", "_schedulers", "_tensors", "_tuples")

    def __init__(
        self, tensors: list[Any], own: Callable[[str], Any], classes: Classes, schedulers: Mapping[str, Any]
    ) -> None:
        self._schedulers = schedulers
        self._tensors = tensors
        self._own = own
        self._classes = classes
        self._made: list[Any] = []  # lists, dicts and objects, as they became complete
        self._tuples: list[Any] = []  # the same of tuples

    def made_of(self, node: Any) -> Any:
        """What a node stands for."""
        ((kind, value),) = node.items()
        if kind == "t":
            return self._tensors[value]
        if kind == "c":
            return value
        if kind == "f":
            return float(value)
        if kind == "b":
            return self._own(value)
        if kind == "local":
            return local_of(self.made_of(value))
        if kind == "item":
            return self.made_of(value).item()
        if kind == "rate":
            path, place, key = (part["c"] for part in value)
            return Rate(path, self._schedulers[path], place, key)
        if kind == "tuple":
            made: Any = tuple(self.made_of(item) for item in value)
            self._tuples.append(made)
            return made
        if kind == "object" and len(value) < _PARTS:
            if len(value) == 1:
                return self._made[value[0]["c"]]
            return self._tuples[value[1]["c"]] if value[0]["c"] == "tuple" else _said(value)
        if kind == "list":
            made = [self.made_of(item) for item in value]
        elif kind == "dict":
            made = self._dict(value)
        else:
            made = self._object(value)
        self._made.append(made)
        return made

    def _dict(self, pairs: Any) -> dict[Any, Any]:
        return {self.made_of(key): self.made_of(item) for key, item in pairs}

    def _object(self, value: Any) -> Any:
        module, name, content, own, slots = value
        ((kind, items),) = content.items()
        if kind == "dict":
            items = [(self.made_of(key), self.made_of(item)) for key, item in items]
        elif kind == "tuple":
            items = [self.made_of(item) for item in items]
        layout = _containers.layout_of(self._classes[module["c"], name["c"]])
        assert layout is not None
        return layout.make(items, self._dict(own["dict"]), self._dict(slots["dict"]))


_PARTS = 5  # of an object's node


def _said(node: Any) -> Any:
    kind, text = (part["c"] for part in node)
    return torch.device(text) if kind == "device" else getattr(torch, text)


def classes_in(structure: Any, known: set[int]) -> Classes:
    """The classes in the structure of a stored plan. ``known``: those that the step has in reach, by id. Raises
    :class:`Unsupported`."""
    classes: Classes = {}
    complete = tuples = 0

    def look(node: Any) -> None:
        nonlocal complete, tuples
        ((kind, value),) = node.items()
        if kind == "rate":
            raise Unsupported("the rate of a scheduler, which only a recording finds")
        if kind in ("local", "item"):
            look(value)
        elif kind in ("tuple", "list"):
            for item in value:
                look(item)
        elif kind == "dict":
            for pair in value:
                for item in pair:
                    look(item)
        elif kind == "object":
            _look_at_object(value)
        complete += kind in ("list", "dict") or (kind == "object" and len(value) == _PARTS)
        tuples += kind == "tuple"

    def _look_at_object(value: Any) -> None:
        words = [part.get("c") for part in value]
        if len(words) == 1 and type(words[0]) is int and 0 <= words[0] < complete:
            return
        if len(words) == 2 and words[0] == "tuple" and type(words[1]) is int and 0 <= words[1] < tuples:
            return
        if len(words) == 2 and words[0] in _SAID.values() and type(words[1]) is str:
            try:
                good = type(_said(value)) in _SAID
            except (AttributeError, RuntimeError):
                good = False
            if good:
                return
        elif len(words) == _PARTS and type(words[0]) is str and type(words[1]) is str:
            module, name = words[:2]
            found = _containers.named(module, name)
            usable = isinstance(found, type) and (id(found) in known or is_library_class(found))
            layout = _containers.layout_of(found) if usable else None
            if layout is None:
                raise Unsupported(f"a {name} of {module}, a class that is not there by that name")
            _look_into(layout, *value[2:])
            classes[module, name] = found
            return
        raise Unsupported("an object that this version does not know")

    def _look_into(layout: _containers.Layout, content: Any, own: Any, slots: Any) -> None:
        nonlocal complete, tuples
        kind = (
            "c"
            if layout.base in (object, types.SimpleNamespace)
            else "dict"
            if issubclass(layout.base, dict)
            else "tuple"
        )
        names = {name for name, _ in layout.slots}
        said = [*own.get("dict", [({}, {})]), *slots.get("dict", [({}, {})])]
        wrong = kind not in content or any(type(key.get("c")) is not str for key, _ in said)
        if wrong or not {key["c"] for key, _ in slots["dict"]} <= names:
            raise Unsupported(f"a {_introspect.name(layout.kind)} of other parts than its class has")
        for part in (content, own, slots):
            look(part)
            complete -= "dict" in part
            tuples -= "tuple" in part

    look(structure)
    return classes


class StoredSpec:
    """A spec of a plan file, on a mesh of this process."""

    def __init__(self, text: str, example_specs: list[Any]) -> None:
        """``example_specs`` are specs of the caller's tensors: their meshes are
        the ones that a result can lie on. Raises :class:`Unsupported`."""
        *mesh, placements, shape, strides = text.split("|")
        found = next((spec.mesh for spec in example_specs if mesh_text(spec.mesh) == "|".join(mesh)), None)
        if found is None:
            raise Unsupported(f"a tensor on the mesh {'|'.join(mesh)}, which no tensor of the state lies on")
        self._mesh = found
        self._placements = tuple(_placement(text) for text in placements.split(";"))
        self._shape = torch.Size(int(size) for size in shape.split(",") if size)
        self._strides = tuple(int(stride) for stride in strides.split(",") if stride)

    def of(self, local: torch.Tensor) -> Any:
        """The spec of a DTensor with this local tensor."""
        return DTensorSpec(self._mesh, self._placements, TensorMeta(self._shape, self._strides, local.dtype))


def _placement(text: str) -> Any:
    kind, _, inside = text.partition("(")
    if text == "R":
        return Replicate()
    if kind == "S":
        return Shard(int(inside[:-1]))
    if kind == "_S":
        dim, split_factor = inside[:-1].split(",")
        return _StridedShard(int(dim), split_factor=int(split_factor))
    if kind == "P":
        return Partial(inside[:-1])
    raise Unsupported(f"a tensor placed {text}")


# What runs when a replay has ended, and the node of the metric that it takes, if any.
Act = tuple[Callable[..., Any], Any]
# What sets an attribute, and the node of the value.
Put = tuple[Callable[[Any], None], Any]


class Results:
    """What one variant gives back: the result and the gradients it leaves."""

    def __init__(
        self,
        structure: Any,
        outputs: list[tuple[Any, bool]],
        grads: list[tuple[str, Any, bool]],
        own: Callable[[str], Any],
        views: list[Made],
        after: list[Act],
        classes: Classes,
        kept: Sequence[Put] = (),
        schedulers: Mapping[str, Any] = types.MappingProxyType({}),
    ) -> None:
        """``outputs``: spec (or None) and requires_grad of each; ``grads``:
        owner's path, spec (or None), and whether ``.grad`` becomes None;
        ``after``: what runs after a replay; ``kept``: the attributes that are set before; ``schedulers``: by their
        paths."""
        self._kept = kept
        self._schedulers = schedulers
        self.gives_rates = any(kind == "rate" for kind, _ in _nodes_in(structure))
        """Whether :class:`Rate` stands in places of the result."""
        self._after = after
        self._classes = classes
        self._structure = structure
        self._views = views
        self._inference = of_inference(views)
        self._outputs = outputs
        self._own = own
        self._single = structure == {"t": 0} and len(outputs) == 1
        self._grads = grads
        self._owners: list[Any] | None = None
        if not any(is_of_argument(path) for path, _, _ in grads):
            self._owners = [own(path) for path, _, _ in grads]

        #: Makes the result, where a replay leaves nothing but new tensors in tuples and lists.
        self.simply: Callable[[list[torch.Tensor]], Any] | None = None
        if not (grads or after or views or kept or any(requires_grad for _, requires_grad in outputs)):
            self.simply = _maker([spec for spec, _ in outputs], structure)

    @property
    def acts_later(self) -> bool:
        """Whether something runs after a replay."""
        return bool(self._after)

    def of_equal(self, own: Callable[[str], Any]) -> Results:
        """The same of an equal step, in which nothing runs after a replay. ``own``: finds that step's tensors."""
        return Results(self._structure, self._outputs, self._grads, own, self._views, [], self._classes)

    def deliver(self, locals_: list[torch.Tensor], own_argument: Callable[[str], Any]) -> Any:
        """Puts gradients where eager leaves them, sets attributes and returns the result."""
        at = len(self._outputs)
        owners = self._owners
        if owners is None:
            owners = [self._find(path, own_argument) for path, _, _ in self._grads]
        for owner, (_, spec, none) in zip(owners, self._grads, strict=True):
            if none:
                if owner.grad is not None:  # setting it takes longer than looking
                    owner.grad = None
                continue
            local = locals_[at]
            at += 1
            owner.grad = local if spec is None else DTensor(local, spec, requires_grad=False)
        tensors = [
            self._tensor(i, local, spec)
            for i, (local, (spec, _)) in enumerate(zip(locals_, self._outputs, strict=False))
        ]
        if self._views:
            make(self._views, self._decoder(tensors, own_argument).made_of)
        for tensor, (_, requires_grad) in zip(tensors, self._outputs, strict=True):
            if requires_grad:
                bridge().mark_replayed(tensor)
        if self._single and not self._kept:
            return tensors[0]
        decoder = self._decoder(tensors, own_argument)
        result = decoder.made_of(self._structure)
        for put, node in self._kept:
            put(decoder.made_of(node))
        return result

    def acts(self, locals_: list[torch.Tensor]) -> list[Callable[[], Any]]:
        """What is to run now that a replay has ended."""
        return [
            act if metric is None else functools.partial(act, _metrics.number_of(metric, locals_))
            for act, metric in self._after
        ]

    def _decoder(self, tensors: list[Any], own_argument: Callable[[str], Any]) -> _Decoder:
        return _Decoder(tensors, lambda path: self._find(path, own_argument), self._classes, self._schedulers)

    def _tensor(self, place: int, local: torch.Tensor, spec: Any) -> torch.Tensor:
        """The output at a place."""
        if place not in self._inference:
            return local if spec is None else DTensor(local, spec, requires_grad=False)
        local = as_inference(local)
        if spec is None:
            return local
        with torch.inference_mode():
            return DTensor(local, spec, requires_grad=False)

    def leave(self, made: dict[int, torch.Tensor], nothing: list[int], own_argument: Callable[[str], Any]) -> None:
        """Puts some of the gradients where eager leaves them, and takes others away, by their places."""
        for place, (path, spec, _) in enumerate(self._grads):
            if place in made:
                local = made[place]
                grad = local if spec is None else DTensor(local, spec, requires_grad=False)
                self._find(path, own_argument).grad = grad
            elif place in nothing:
                self._find(path, own_argument).grad = None

    def _find(self, path: str, own_argument: Callable[[str], Any]) -> Any:
        if not is_of_argument(path):
            return self._own(path)
        return own_argument(path.removesuffix(".grad")).grad if path.endswith(".grad") else own_argument(path)


def _maker(specs: list[Any], structure: Any) -> Callable[[list[torch.Tensor]], Any] | None:
    """A function that makes a result of a replay's tensors; None where it takes more than tuples and lists of them."""
    ((kind, value),) = structure.items()
    if kind == "c":
        return lambda _: value
    if kind == "t":
        spec = specs[value]
        if spec is None:
            return operator.itemgetter(value)
        return lambda locals_: DTensor(locals_[value], spec, requires_grad=False)
    if kind not in ("tuple", "list"):
        return None
    if value and all(
        item == {"t": value[0].get("t", 0) + i} and specs[item["t"]] is None for i, item in enumerate(value)
    ):
        first, end = value[0]["t"], value[-1]["t"] + 1
        made = operator.itemgetter(slice(first, end))
        return made if kind == "list" else lambda locals_: tuple(made(locals_))
    makers = [_maker(specs, item) for item in value]
    if None in makers:
        return None
    of_kind = list if kind == "list" else tuple
    return lambda locals_: of_kind([maker(locals_) for maker in makers])  # type: ignore[misc]


def to_json(structure: Any, late: list[Late], views: list[Made]) -> bytes:
    """The structure as the library takes it."""
    if late:
        structure = {"after": [structure, *(each.to_json() for each in late)]}
    return json.dumps({"views": [structure, *(view.to_json() for view in views)]} if views else structure).encode()


def from_json(node: Any) -> tuple[Any, list[Late], list[Made]]:
    """The structure in a plan, what a replay does when it has ended, and what it makes of its tensors."""
    views: list[Any] = []
    late: list[Any] = []
    if isinstance(node, dict) and "views" in node:
        node, *views = node["views"]
    if isinstance(node, dict) and "after" in node:
        node, *late = node["after"]
    return node, list(map(Late.from_json, late)), [Made.from_json(view) for view in views]
