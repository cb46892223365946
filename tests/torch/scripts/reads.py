"""How a step reads a value.

`$E` is the value, `$O` and `$K` the object and the name of an attribute or the
container and the key of an entry, `$I` what can be iterated. What is read
becomes the number `s`.
"""

# ruff: noqa: E501 (a table)
import dataclasses


@dataclasses.dataclass(frozen=True)
class Read:
    """Statements that end with a number in `s`."""

    text: str
    of: str = "value"  # value, attribute, item, entries, thing
    define: str = ""
    before: str = ""  # statements outside of the step
    where: str = "any"  # what holds the value: anything, a global, or what is no argument ("reach")


READS: dict[str, Read] = {
    "asked": Read("", "thing"),  # as the thing says itself
    "direct": Read("s = $E"),
    "arithmetic": Read("s = $E * 2 - 1"),
    "compare": Read("s = 2.0 if $E > 2.25 else 3.0"),
    "equal": Read("s = 2.0 if $E == 2.0 else 3.0"),
    "branch": Read("s = 2.0\nif $E >= 3:\n    s = 3.0\n    x = x + 1"),
    "truth": Read("s = 2.0 if $E else 3.0"),
    "float": Read("s = float($E)"),
    "int": Read("s = int($E)"),
    "bool": Read("s = bool($E) + 1"),
    "format": Read('s = float(f"""{$E:.3f}""")'),
    "text": Read("s = float(str($E))"),
    "percent": Read('s = float("%s" % ($E,))'),
    "repr": Read("s = len(repr($E))"),
    "sqrt": Read("s = math.sqrt(abs($E))"),
    "sign": Read("s = math.copysign(1.0, $E)"),
    "is_nan": Read("s = 2.0 if math.isnan($E) else 3.0"),
    "round": Read("s = round($E, 1)"),
    "max": Read("s = max($E, 2.5)"),
    "power": Read("s = 2.0 ** $E"),
    "helper": Read("s = helper($E)", define="def helper(value):\n    return value * 1\n"),
    "spread": Read("s = spread(*[$E], **{'b': $E})", define="def spread(*a, **k):\n    return a[0] + k['b']\n"),
    "captured": Read("s = 1.0\nx = inner(x, $E)", before="inner = capture(lambda x, value: x * value)"),
    "captured_reach": Read("s = 1.0\nx = inner(x)", before="inner = capture(lambda x: x * $E)", where="reach"),
    "comprehension": Read("s = sum([each for each in [$E]])"),
    "lambda": Read("s = (lambda: $E)()"),
    "inner": Read("def fetch_value():\n    return $E\ns = fetch_value()"),
    "match": Read(
        "match $E:\n    case bool():\n        s = 5.0\n    case int():\n        s = 6.0\n    case 2.0:\n        s = 7.0\n"
        "    case float(v):\n        s = v\n    case _:\n        s = 8.0"
    ),
    "try": Read("try:\n    s = $E\nexcept Exception:\n    s = 7.0"),
    "suppress": Read("s = 7.0\nwith contextlib.suppress(AttributeError, KeyError, IndexError):\n    s = $E"),
    "finally": Read("s = 7.0\ntry:\n    s = $E\nfinally:\n    x = x + s"),
    "type": Read("s = len(type($E).__name__)"),
    "instance": Read("s = 2.0 if isinstance($E, float) else 3.0"),
    "is": Read("s = 2.0 if $E is True else 3.0 if $E is None else 4.0"),
    "member": Read("s = 2.0 if $E in (2.0, 4.0) else 3.0"),
    "lookup": Read("s = {2.0: 5.0, 3.0: 6.0, None: 7.0}.get($E, 8.0)"),
    "hash": Read("s = hash($E) % 97"),
    "operator": Read("s = operator.mul($E, 2)"),
    "walrus": Read("s = v if (v := $E) else 9.0"),
    "sorted": Read("s = sorted([$E, 2.5])[0]"),
    "json": Read("s = float(len(json.dumps($E)))"),
    "decimal": Read("s = float(decimal.Decimal($E))"),
    "struct": Read('s = struct.pack("d", $E)[6]'),
    "numpy": Read("s = float(np.add($E, 1))"),
    "numpy_signbit": Read("s = float(np.signbit($E))"),
    "tensor_scalar": Read("s = 1.0\nx = torch.add(x, x, alpha=$E)"),
    "tensor_fill": Read("s = 1.0\nx = x + torch.full((4,), $E)"),
    "tensor_power": Read("s = 1.0\nx = x ** $E"),
    "tensor_clamp": Read("s = 1.0\nx = x.clamp(max=$E)"),
    "shape": Read("s = 1.0\nx = x.repeat(int($E))"),
    "loop": Read("s = 1.0\nfor _ in range(int($E) % 64):\n    x = x + 1"),
    "assertion": Read("s = 1.0\nassert $E != 3.0"),
    "generator": Read("s = next(each for each in (1, 2) if each) * $E"),
    "deepcopy": Read("s = copy.deepcopy($E)"),
    "thread_pool": Read("s = helper(lambda: $E)", define="def helper(read):\n    return read()\n"),
    "recursive": Read(
        "s = recursive(3, lambda: $E)",
        define="def recursive(n, read):\n    return read() if n == 0 else recursive(n - 1, read)\n",
    ),
    "eval": Read("s = eval('$E') if x is not None else 'no code'", where="global"),
    "exec": Read("space = {}\nexec('s = $E', globals(), space)\ns = space['s']", where="global"),
    "globals": Read("s = globals()['held'] and $E", where="global"),
    # -- attributes -----------------------------------------------------------------
    "getattr": Read('s = getattr($O, "$K")', "attribute"),
    "getattr_default": Read('s = getattr($O, "$K", 9.5)', "attribute"),
    "getattr_computed": Read('s = getattr($O, names[0], 9.5)', "attribute", before='names = ["$K"]'),
    "hasattr": Read('s = 2.0 if hasattr($O, "$K") else 3.0', "attribute"),
    "vars": Read('s = vars($O)["$K"]', "attribute"),
    "vars_get": Read('s = vars($O).get("$K", 9.5)', "attribute"),
    "own_dict": Read('s = $O.__dict__.get("$K", 9.5)', "attribute"),
    "own_dict_len": Read("s = len($O.__dict__)", "attribute"),
    "own_values": Read("s = [v for k, v in vars($O).items() if k[0] != '_'][0]", "attribute"),
    "dir": Read('s = 2.0 if "$K" in dir($O) else 3.0', "attribute"),
    "attrgetter": Read('s = operator.attrgetter("$K")($O)', "attribute"),
    "attrgetter_outside": Read("s = get($O)", "attribute", before='get = operator.attrgetter("$K")'),
    "try_attribute": Read("try:\n    s = $O.$K\nexcept AttributeError:\n    s = 9.5", "attribute"),
    "match_class": Read("match $O:\n    case object($K=found):\n        s = found\n    case _:\n        s = 9.5", "attribute"),
    "inspect": Read('s = inspect.getattr_static($O, "$K", 9.5)', "attribute"),
    "get_method": Read('s = type($O).__getattribute__($O, "$K")', "attribute"),
    # -- entries of dicts -------------------------------------------------------------
    "get": Read("s = $O.get($K, 9.5)", "item"),
    "contains": Read("s = 2.0 if $K in $O else 3.0", "item"),
    "not_contains": Read("s = 2.0 if 'absent' not in $O else 3.0", "item"),
    "itemgetter": Read("s = operator.itemgetter($K)($O)", "item"),
    "merge": Read("s = {**$O}[$K]", "item"),
    "copy": Read("s = dict($O)[$K]", "item"),
    "match_mapping": Read("match $O:\n    case {$K: found}:\n        s = found\n    case _:\n        s = 9.5", "item"),
    "try_key": Read("try:\n    s = $O[$K]\nexcept KeyError:\n    s = 9.5", "item"),
    "len": Read("s = len($O)", "item"),
    "keywords": Read("s = take(**{k: v for k, v in $O.items() if k == $K})", "item",
                     define="def take(**k):\n    return sum(k.values())\n"),
    # -- entries ------------------------------------------------------------------------
    "iterate": Read("s = 0.0\nfor each in $I:\n    s = s * 2 + each", "entries"),
    "sum": Read("s = sum($I)", "entries"),
    "first": Read("s = next(iter($I))", "entries"),
    "unpack": Read("first, *rest = $I\ns = first", "entries"),
    "count": Read("s = len(list($I))", "entries"),
    "sorted_entries": Read("s = sorted($I, reverse=True)[0]", "entries"),
    "any": Read("s = 2.0 if any(each == 2.0 for each in $I) else 3.0", "entries"),
    "index": Read("s = list($I).index(2.0)", "entries"),
    "enumerate": Read("s = sum(i + each for i, each in enumerate($I))", "entries"),
    "match_sequence": Read(
        "match list($I):\n    case [found, *_]:\n        s = found\n    case _:\n        s = 9.5", "entries"
    ),
    "reversed": Read("s = list(reversed(list($I)))[0]", "entries"),
    "map": Read("s = sum(map(float, $I))", "entries"),
    "set_of": Read("s = float(len({*$I}))", "entries"),
}  # fmt: skip
