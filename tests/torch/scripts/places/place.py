"""One place where a value is kept.

In the text of a place, `$H` is what holds it, `$V` a value. What a step names
at the top level of a script is in `define`.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Place:
    """Somewhere to keep a value."""

    fresh: str  # an expression that makes one with the value `$V` in it
    get: str  # an expression that reads the value
    set: str | None = None  # a statement that changes it
    define: str = ""  # classes and functions at the top level
    attribute: tuple[str, str] | None = None  # the object and the name, where the value is an attribute
    item: tuple[str, str] | None = None  # the container and the key, where it is an entry of a dict
    entries: str | None = None  # what can be iterated and holds the value only
    delete: str | None = None
    absent: str | None = None  # `fresh` without the value
    patches: dict[str, str] = dataclasses.field(default_factory=dict)  # other ways to change what is read
    undo: str = ""  # of what outlives the script
    takes: str = "any"  # values: any, number, integer, text
    alone: bool = False  # whether it is always kept in a name
    moves: bool = False  # whether to read it changes it


def attribute_of(kind: str, define: str = "", make: str | None = None, **more: object) -> Place:
    """A value that is the attribute `scale` of an object of a class."""
    made = make or f"{kind}()"
    fields: dict[str, object] = {
        "fresh": f"with_scale({made}, $V)",
        "get": "$H.scale",
        "set": "$H.scale = $V",
        "define": define,
        "attribute": ("$H", "scale"),
        "delete": "del $H.scale",
        "absent": made,
    }
    return Place(**{**fields, **more})  # type: ignore[arg-type]


def entry_of(make: str, empty: str | None = None, define: str = "", **more: object) -> Place:
    """A value that is the entry `scale` of a mapping."""
    fields: dict[str, object] = {
        "fresh": make,
        "get": '$H["scale"]',
        "set": '$H["scale"] = $V',
        "define": define,
        "item": ("$H", '"scale"'),
        "entries": "list($H.values())",
        "delete": 'del $H["scale"]',
        "absent": empty,
    }
    return Place(**{**fields, **more})  # type: ignore[arg-type]


def sequence(make: str, take: str = "any", **more: object) -> Place:
    """A value that is the first entry of a sequence."""
    fields: dict[str, object] = {"fresh": make, "get": "$H[0]", "set": "$H[0] = $V", "entries": "$H", "takes": take}
    return Place(**{**fields, **more})  # type: ignore[arg-type]


def class_(name: str, base: str = "", body: str = "pass") -> str:
    """The definition of a class."""
    return f"class {name}{f'({base})' if base else ''}:\n    {body}\n"
