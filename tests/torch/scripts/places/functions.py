"""Functions, what they hold, and iterators."""

# ruff: noqa: E501 (a table)
from .place import Place

PLACES: dict[str, Place] = {
    "default": Place("defaulted($V)", "$H()", "$H.__defaults__ = ($V,)",
                     "def defaulted(value):\n    def read(scale=value):\n        return scale\n    return read\n",
                     patches={"code": "$H.__code__ = (lambda scale=1: 4.5).__code__", "drop": "$H.__defaults__ = None"}),
    "keyword_default": Place("defaulted($V)", "$H()", "$H.__kwdefaults__['scale'] = $V",
                             "def defaulted(value):\n    def read(*, scale=value):\n        return scale\n    return read\n",
                             patches={"replace": "$H.__kwdefaults__ = {'scale': $V}", "drop": "$H.__kwdefaults__ = None"}),
    "mutable_default": Place("defaulted($V)", "$H()", "$H.__defaults__[0][0] = $V",
                             "def defaulted(value):\n    def read(scale=[value]):\n        return scale[0]\n    return read\n"),
    "lambda_default": Place("(lambda scale=$V: scale)", "$H()", "$H.__defaults__ = ($V,)"),
    "closure": Place("closed($V)", "$H()", "$H.__closure__[0].cell_contents = $V",
                     "def closed(value):\n    def read():\n        return value\n    return read\n"),
    "run_text": Place("execute({}, $V)", "$H()", "$H.__globals__['scale'] = $V",
                      "def execute(names, value):\n    names['scale'] = value\n    exec('def read(): return scale', names)\n    return names['read']\n",
                      delete="del $H.__globals__['scale']"),
    "run_as_library": Place("execute({'__name__': 'torch.optim.own'}, $V)", "$H()", "$H.__globals__['scale'] = $V",
                            "def execute(names, value):\n    names['scale'] = value\n    exec('def read(): return scale', names)\n    return names['read']\n",
                            patches={"code": "$H.__code__ = (lambda: 4.5).__code__"}),
    "run_class": Place("execute({'__name__': 'json.tool'}, $V)", "$H.read()", "type($H).read.__globals__['scale'] = $V",
                       "def execute(names, value):\n    names['scale'] = value\n"
                       "    exec('class Owner:\\n    def read(self): return scale', names)\n    return names['Owner']()\n",
                       patches={"method": "type($H).read = lambda self: $V"}),
    "said_to_be_torch": Place("closed($V)", "$H()", "$H.__closure__[0].cell_contents[0] = $V",
                              "def closed(value):\n    held = [value]\n\n    @functools.wraps(torch.relu)\n    def read(scale=1):\n        return held[0]\n    return read\n",
                              patches={"defaults": "$H.__code__ = (lambda held: lambda scale=1: 4.5 + 0 * len(held))(0).__code__"}),
    "nonlocal": Place("closed($V)", "$H[0]()", "$H[1]($V)",
                      "def closed(value):\n    def read():\n        return value\n\n    def write(new):\n"
                      "        nonlocal value\n        value = new\n\n    return read, write\n"),
    "cell": Place("types.CellType($V)", "$H.cell_contents", "$H.cell_contents = $V", delete="del $H.cell_contents",
                  attribute=("$H", "cell_contents"), absent="types.CellType()"),
    "partial": Place("functools.partial(double, $V)", "$H()", "$H.__setstate__((double, ($V,), {}, {}))",
                     "def double(x):\n    return x * 2\n", takes="number", patches={"function": "double.__code__ = (lambda x: 4.5).__code__"}),
    "partial_list": Place("functools.partial(first, [$V])", "$H()", "$H.args[0][0] = $V",
                          "def first(values):\n    return values[0]\n"),
    "partial_keyword": Place("functools.partial(same, x=$V)", "$H()", "$H.keywords['x'] = $V",
                             "def same(x):\n    return x\n"),
    "partial_method": Place(
        "Owner()", "$H.read()", "Owner.held[0] = $V",
        "class Owner:\n    held = [$V0]\n\n    def get(self, i):\n        return self.held[i]\n\n"
        "    read = functools.partialmethod(get, 0)\n",
    ),
    "bound_method": Place("with_scale(Owner(), $V).read", "$H()", "$H.__self__.scale = $V",
                          "class Owner:\n    def read(self):\n        return self.scale\n",
                          patches={"method": "Owner.read.__code__ = (lambda self: 4.5).__code__"}),
    "builtin_method": Place("[$V].__getitem__", "$H(0)", "$H.__self__[0] = $V"),
    "dict_method": Place("{'a': $V}.get", "$H('a')", "$H.__self__['a'] = $V"),
    "cached_function": Place("cached($V)", "$H()", "($H.cell.__setitem__(0, $V), $H.cache_clear())",
                             "def cached(value):\n    cell = [value]\n    made = functools.lru_cache(lambda: cell[0])\n"
                             "    made.cell = cell\n    made()\n    return made\n",
                             patches={"behind": "$H.cell[0] = 4.5"}),
    "cached_property": Place(
        "with_scale(Owner(), $V)", "$H.read", "($H.__setattr__('scale', $V), vars($H).pop('read', None))",
        "class Owner:\n    @functools.cached_property\n    def read(self):\n        return self.scale\n",
        patches={"stale": "$H.scale = 4.5", "own": "$H.__dict__['read'] = $V"},
    ),
    "single_dispatch": Place(
        "dispatched($V)", "$H(1.0)", "$H.cell[0] = $V",
        "def dispatched(value):\n    cell = [value]\n\n    @functools.singledispatch\n    def read(x):\n"
        "        return cell[0]\n\n    read.cell = cell\n    return read\n",
        patches={"register": "$H.register(float, lambda x: $V)"},
    ),
    "wrapped": Place(
        "wrapped($V)", "$H()", "$H.__wrapped__.cell[0] = $V",
        "def wrapped(value):\n    cell = [value]\n\n    def inner():\n        return cell[0]\n\n    inner.cell = cell\n\n"
        "    @functools.wraps(inner)\n    def outer():\n        return inner()\n\n    return outer\n",
    ),
    "code": Place("coded()", "$H()", "$H.__code__ = (lambda: 4.5).__code__",
                  "def coded():\n    def read():\n        return 2.0\n    return read\n", takes="none"),
    "exec": Place("executed($V)", "$H['read']()", "$H['scale'] = $V",
                  "def executed(value):\n    space = {'scale': value}\n    exec('def read():\\n    return scale\\n', space)\n"
                  "    return space\n", patches={"again": "exec('def read():\\n    return 4.5\\n', $H)"},
                  delete="del $H['scale']"),
    "eval": Place("{'scale': $V}", "eval('scale', $H)", "$H['scale'] = $V", delete="del $H['scale']"),
    "eval_code": Place("[compile(repr($V), '<text>', 'eval')]", "eval($H[0])", "$H[0] = compile(repr($V), '<text>', 'eval')"),
    "text_run": Place("[repr($V)]", "eval($H[0])", "$H[0] = repr($V)", takes="number"),
    "getter": Place("operator.itemgetter(int($V))", "$H([1.0, 2.0, 3.0, 4.0])", "$H = operator.itemgetter(int($V))",
                    takes="integer"),
    "count": Place("itertools.count(int($V))", "next($H)", "$H = itertools.count(int($V))", takes="integer", moves=True),
    "iterator": Place("iter([$V] * 40)", "next($H)", "next($H)", moves=True),
    "generator": Place("generated($V)", "next($H)", "next($H)",
                       "def generated(value):\n    for i in range(40):\n        yield value if i < 6 else 4.5\n", moves=True),
    "cycle": Place("itertools.cycle([$V, 4.5])", "next($H)", "next($H)", moves=True),
    "repeat": Place("itertools.repeat($V)", "next($H)", "$H = itertools.repeat($V)", moves=True),
    "zip": Place("zip([$V] * 40, range(40))", "next($H)[0]", "next($H)", moves=True),
    "iterator_outside": Place("[iter([$V] * 40), 0.0]", "$H[1]", "$H[1] = next($H[0])"),
    "iterator_copied": Place("iter([2.0, 3.0, 4.0, 5.0])", "next(copy.copy($H))", "next($H)", takes="none"),
    "length_hint": Place("iter([2.0, 3.0, 4.0, 5.0])", "operator.length_hint($H)", "next($H)", takes="none"),
    "random": Place("random.Random(int($V))", "$H.random()", "$H.seed(int($V))", takes="integer", moves=True),
    "numpy_random": Place("np.random.default_rng(int($V))", "$H.random()", "$H.random()", takes="integer", moves=True),
    "random_state": Place("random.Random(int($V))", "$H.getstate()[1][0] % 97", "$H.seed(int($V))", takes="integer"),
    "context_manager": Place(
        "[$V]", "entered($H)", "$H[0] = $V",
        "@contextlib.contextmanager\ndef opened(cell):\n    yield cell[0]\n\n\n"
        "def entered(cell):\n    with opened(cell) as value:\n        return value\n",
    ),
    "null_context": Place("contextlib.nullcontext($V)", "entered($H)", "$H.enter_result = $V",
                          "def entered(held):\n    with held as value:\n        return value\n"),
    "exit_stack": Place("contextlib.ExitStack()", "9.0 + len($H._exit_callbacks)", "$H.callback(float)", takes="none"),
    "deep_calls": Place("deep([$V])", "$H()", "$H.cell[0] = $V",
                        "def calling(function):\n    return lambda: function()\n\n\ndef deep(cell):\n    made = lambda: cell[0]\n"
                        "    for i in range(20):\n        made = functools.partial(lambda inner: inner(), calling(made))\n"
                        "    made.cell = cell\n    return made\n"),
    "unset_cell": Place("unset()", "$H[0]()", "$H[1]($V)",
                        "def unset():\n    def read():\n        try:\n            return value\n        except NameError:\n"
                        "            return 9.0\n\n    def write(new):\n        nonlocal value\n        value = new\n\n"
                        "    if False:\n        value = 0\n    return read, write\n"),
    "globals_of_a_function": Place("execute({}, $V)", "$H.__globals__['scale']", "$H.__globals__['scale'] = $V",
                                   "def execute(names, value):\n    names['scale'] = value\n    exec('def read(): return 1', names)\n"
                                   "    return names['read']\n"),
    "builtins_of_a_function": Place("built({**builtins.__dict__, 'scale': $V})", "$H()", "$H.__builtins__['scale'] = $V",
                                    "def built(own):\n    return types.FunctionType((lambda: scale).__code__, {'__builtins__': own})\n"),
    "variable_method": Place("variable($V).get", "$H()", "$H.__self__.set($V)",
                             "def variable(value):\n    made = contextvars.ContextVar('made')\n    made.set(value)\n    return made\n"),
    "class_getitem": Place("Table", "$H[0]", "globals()['rote_scale'] = $V",
                           "rote_scale = $V0\n\n\nclass Table:\n    @classmethod\n    def __class_getitem__(cls, index):\n"
                           "        return rote_scale\n"),
    "init_subclass": Place("Base", "type('Child', ($H,), {}).made", "globals()['rote_scale'] = $V",
                           "rote_scale = $V0\n\n\nclass Base:\n    def __init_subclass__(cls):\n        cls.made = rote_scale\n"),
    "partial_special_method": Place("Sized()", "float(len($H))", "cell[0] = int($V)",
                                    "cell = [int($V0)]\n\n\nclass Sized:\n"
                                    "    __len__ = functools.partialmethod(lambda self, cell: cell[0], cell)\n", takes="integer"),
    "text_executed": Place("['found.append(%r)' % $V]", "executed($H)", "$H[0] = 'found.append(%r)' % $V",
                           "def executed(texts):\n    found = []\n    exec(texts[0], {'found': found})\n    return found[0]\n",
                           takes="number"),
    "eval_attribute": Place("['rote_scale']", "builtins.eval($H[0])", "globals()['rote_scale'] = $V", "rote_scale = $V0\n"),
    "eval_renamed": Place("[eval, 'rote_scale']", "$H[0]($H[1])", "globals()['rote_scale'] = $V", "rote_scale = $V0\n"),
    "function_of_code": Place("[(lambda: rote_scale).__code__]", "types.FunctionType($H[0], globals())()",
                              "globals()['rote_scale'] = $V", "rote_scale = $V0\n"),
}  # fmt: skip
