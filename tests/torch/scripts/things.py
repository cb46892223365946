"""Values that are no numbers: objects of many classes, tensors and modules of the state."""

# ruff: noqa: E501 (a table)
import dataclasses


@dataclasses.dataclass(frozen=True)
class Thing:
    """Three values in turn, and the statements that make the number `s` of one: `$E` is the value."""

    values: tuple[str, str, str]
    ask: str


def _factor(first: str, second: str, third: str, ask: str) -> Thing:
    return Thing((first, second, third), f"s = {ask}")


def _layer(first: str, second: str, third: str, ask: str = "$E(x)") -> Thing:
    return Thing((first, second, third), f"s = 2.0\nx = {ask}")


def _of(make: str, ask: str, values: tuple[str, str, str] = ("2", "3", "4")) -> Thing:
    """What one expression makes of three values."""
    return _factor(*(make.replace("@", value) for value in values), ask)


THINGS: dict[str, Thing] = {
    # -- of the state: which tensor or module it is -----------------------------------
    "tensor": _layer("ta", "tb", "tc", "x * $E"),
    "view": _layer("tf[:4]", "tf[4:]", "tf[::2]", "x * $E"),
    "transposed": _layer("tm", "tm.t()", "tm[:1].expand(4, 4)", "$E @ x"),
    "parameter": _layer("pa", "pb", "pa.detach()", "(x * $E).detach()"),
    "grad": _layer("pa.grad", "pb.grad", "ta", "x * $E"),
    "data": _layer("pa.data", "pb.data", "ta", "x * $E"),
    "layer": _layer("ma", "mb", "nn.Identity()", "$E(x).detach()"),
    "forward": _layer("ma.forward", "mb.forward", "torch.relu", "$E(x).detach()"),
    "call": _layer("functools.partial(ma)", "functools.partial(mb)", "torch.relu", "$E(x).detach()"),
    "weight": _layer("(ma.weight,)", "(mb.weight,)", "(pa,)", "(x * $E[0]).detach()"),
    "order": _layer("[ma, mb]", "[mb, ma]", "[ma]", "[x := layer(x).detach() for layer in $E][-1]"),
    "sequence": _layer("nn.Sequential(ma, mb)", "nn.Sequential(mb, ma)", "nn.Sequential(ma)", "$E(x).detach()"),
    "named": _layer("{'a': ma, 'b': mb}", "{'a': mb, 'b': ma}", "{'b': mb, 'a': ma}", "$E['a']($E['b'](x)).detach()"),
    "set_of_tensors": _factor("{ta}", "{tb}", "set()", "2.0 if ta in $E else 3.0"),
    "frozenset_of_modules": _factor("frozenset([ma])", "frozenset([mb])", "frozenset()", "2.0 if ma in $E else 3.0"),
    "weak_set": _factor("weakref.WeakSet([ma])", "weakref.WeakSet([mb])", "weakref.WeakSet()", "2.0 if ma in $E else 3.0"),
    "weak_keys": _factor("weakref.WeakKeyDictionary({ma: 2})", "weakref.WeakKeyDictionary({mb: 2})", "weakref.WeakKeyDictionary()", "$E.get(ma, 3.0)"),
    "weak_values": _layer("weakref.WeakValueDictionary({'m': ma})", "weakref.WeakValueDictionary({'m': mb})", "weakref.WeakValueDictionary({'m': ma, 'n': mb})", "$E['m'](x).detach()"),
    "weak_reference": _layer("weakref.ref(ma)", "weakref.ref(mb)", "weakref.ref(ma)", "$E()(x).detach()"),
    "weak_method": _layer("weakref.WeakMethod(ma.forward)", "weakref.WeakMethod(mb.forward)", "weakref.WeakMethod(ma.forward)", "$E()(x).detach()"),
    "proxy": _layer("weakref.proxy(ma)", "weakref.proxy(mb)", "weakref.proxy(ma)", "$E(x).detach()"),
    "keys_of_tensors": _factor("{pa: 2.0, pb: 3.0}", "{pa: 3.0, pb: 2.0}", "{pa: 2.0}", "$E[pa]"),
    "index": _layer("ti", "tj", "ti", "x[$E]"),
    "generator": _layer("torch.Generator().manual_seed(2)", "torch.Generator().manual_seed(3)", "torch.Generator().manual_seed(4)", "x + torch.rand(4, generator=$E)"),
    # -- layers without state ------------------------------------------------------------
    "slope": _layer(*(f"nn.LeakyReLU({v})" for v in (0.1, 0.2, 0.3)), "$E(-x)"),
    "norm": _layer(*(f"nn.LayerNorm(4, eps={v}, elementwise_affine=False)" for v in (0.1, 0.2, 0.3))),
    "activation": _layer("nn.ReLU()", "nn.Tanh()", "nn.SiLU()"),
    "loss": _layer("nn.MSELoss()", "nn.L1Loss()", "nn.MSELoss(reduction='sum')", "x * $E(x, x * 2)"),
    "pad": _layer(*(f"nn.ConstantPad1d((0, {v}), 1.0)" for v in (0, 1, 2)), "$E(x).sum() + x"),
    # -- functions -------------------------------------------------------------------------
    "lambda": _factor("lambda v: v", "lambda v: v * 2", "lambda v: v + 1", "$E(2.0)"),
    "default": _factor("lambda v=2.0: v", "lambda v=3.0: v", "lambda v=4.0: v", "$E()"),
    "partial": _of("functools.partial(operator.mul, @)", "$E(2.0)"),
    "method_of_text": _factor("'ab'.upper", "'cd'.upper", "'ab'.lower", "ord($E()[0])"),
    "of_torch": _layer("torch.relu", "torch.tanh", "torch.sigmoid"),
    "of_functional": _layer("nn.functional.silu", "nn.functional.gelu", "nn.functional.elu"),
    "of_tensor": _layer("torch.Tensor.relu", "torch.Tensor.tanh", "torch.Tensor.sigmoid"),
    "op": _layer("torch.ops.aten.relu", "torch.ops.aten.tanh", "torch.ops.aten.relu.default"),
    "ufunc": _factor("np.add", "np.multiply", "np.maximum", "float($E(3, 4))"),
    "of_numpy": _factor("np.mean", "np.sum", "np.median", "float($E([3, 4, 9]))"),
    "of_math": _factor("math.sqrt", "math.exp", "math.floor", "$E(2.5)"),
    "builtin": _factor("max", "min", "sum", "$E([2.0, 3.0])"),
    "operator": _factor("operator.add", "operator.mul", "operator.sub", "$E(2.0, 3.0)"),
    "item_getter": _factor("operator.itemgetter(0)", "operator.itemgetter(1)", "operator.itemgetter(2)", "$E([2.0, 3.0, 4.0])"),
    "method_caller": _factor("operator.methodcaller('index', 'a')", "operator.methodcaller('index', 'b')", "operator.methodcaller('count', 'a')", "$E('ab') + 2"),
    "cached": _factor("functools.lru_cache(lambda v: v)", "functools.lru_cache(lambda v: v * 2)", "functools.lru_cache(lambda v: v + 1)", "$E(2.0)"),
    "static_method": _factor("staticmethod(lambda v: v)", "staticmethod(lambda v: v * 2)", "staticmethod(lambda v: v + 1)", "$E(2.0)"),
    # -- objects ------------------------------------------------------------------------------
    "namespace": _of("types.SimpleNamespace(k=@)", "$E.k"),
    "slots": _of("Slotted(@)", "$E.k"),
    "named_tuple": _of("Pair(@, 1)", "$E.k"),
    "field": _of("Field(@)", "$E.k"),
    "frozen": _of("Frozen(@)", "$E.k"),
    "class": _factor("type('A', (), {'k': 2})", "type('A', (), {'k': 3})", "type('B', (), {'k': 2})", "$E.k"),
    "instance": _factor("type('A', (), {'k': 2})()", "type('A', (), {'k': 3})()", "type('B', (), {'k': 2})()", "$E.k"),
    "descriptor": _factor(*(f"type('A', (), {{'k': property(lambda self: {v})}})()" for v in (2, 3, 4)), "$E.k"),
    "answers_all": _of("Answers(@)", "$E.anything"),
    "callable": _of("Answers(@)", "$E(1)"),
    "error": _of("ValueError(@)", "$E.args[0]"),
    "enum": _factor("Level.TWO", "Level.THREE", "Level(2)", "$E.value"),
    "flag": _factor("Mode.A", "Mode.B", "Mode.A | Mode.B", "$E.value"),
    "cycle": _of("circle(@)", "$E.me.me.k"),
    "module_of_python": _of("python_module(@)", "$E.k"),
    # -- containers ----------------------------------------------------------------------------
    "list": _of("[1, [@]]", "$E[1][0]"),
    "dict": _of("{'a': {1: @}}", "$E['a'][1]"),
    "order_of_keys": _factor("{'a': 2, 'b': 3}", "{'b': 3, 'a': 2}", "{'a': 2}", "next(iter($E.values()))"),
    "set": _factor("{2}", "{3}", "{2, 3}", "sum($E)"),
    "frozenset": _factor("frozenset({2})", "frozenset({3})", "frozenset({2, 3})", "sum($E)"),
    "deque": _of("collections.deque([1], @)", "$E.maxlen"),
    "counter": _of("collections.Counter({'a': @})", "$E['a'] + $E['b']"),
    "default_dict": _of("collections.defaultdict(lambda: @)", "dict.__len__($E) or $E.default_factory()"),
    "ordered": _factor("collections.OrderedDict(a=2, b=3)", "collections.OrderedDict(b=3, a=2)", "collections.OrderedDict(a=2)", "list($E.values())[0]"),
    "chain": _of("collections.ChainMap({}, {'a': @})", "$E['a']"),
    "user_dict": _of("collections.UserDict(a=@)", "$E['a']"),
    "user_list": _of("collections.UserList([@])", "$E[0]"),
    "proxy_of_dict": _of("types.MappingProxyType({'a': @})", "$E['a']"),
    "keys": _of("{@: 1}.keys()", "next(iter($E))"),
    "range": _of("range(@)", "len($E)"),
    "slice": _layer("slice(0, 2)", "slice(1, 3)", "slice(0, 4, 2)", "x[$E]"),
    "size": _of("torch.Size([@])", "$E[0]"),
    "module_dict": _layer(*(f"nn.ModuleDict({{'a': {kind}}})" for kind in ("nn.ReLU()", "nn.Tanh()", "nn.SiLU()")), "$E['a'](x)"),
    "module_list": _layer("nn.ModuleList([nn.ReLU()])", "nn.ModuleList([nn.Tanh()])", "nn.ModuleList([nn.ReLU(), nn.Tanh()])", "$E[-1](x)"),
    "parameter_dict": _layer("nn.ParameterDict({'a': pa})", "nn.ParameterDict({'a': pb})", "nn.ParameterDict({'a': pa, 'b': pb})", "(x * $E['a']).detach()"),
    # -- bytes and text ------------------------------------------------------------------------
    "bytes": _factor("b'a'", "b'b'", "b'ab'", "float($E[-1])"),
    "bytearray": _factor("bytearray(b'a')", "bytearray(b'b')", "bytearray(b'ab')", "float($E[-1])"),
    "memory": _factor("memoryview(b'a')", "memoryview(b'b')", "memoryview(b'ab')", "float($E[-1])"),
    "in_memory": _factor("io.BytesIO(b'a')", "io.BytesIO(b'b')", "io.BytesIO(b'ab')", "float($E.getvalue()[-1])"),
    "text_in_memory": _factor("io.StringIO('2')", "io.StringIO('3')", "io.StringIO('4')", "float($E.getvalue())"),
    "array": _of("array.array('d', [@])", "$E[0]"),
    "c_double": _of("ctypes.c_double(@)", "$E.value"),
    "c_structure": _of("Point(@)", "$E.k"),
    "format": _factor("struct.Struct('i')", "struct.Struct('d')", "struct.Struct('b')", "$E.size"),
    "pattern": _factor("re.compile('a')", "re.compile('b')", "re.compile('A', re.I)", "2.0 if $E.match('a') else 3.0"),
    "template": _factor("string.Template('2')", "string.Template('3')", "string.Template('4')", "float($E.substitute())"),
    "path": _factor("pathlib.PurePath('a')", "pathlib.PurePath('ab')", "pathlib.PurePath('abc')", "len(str($E))"),
    "address": _of("ipaddress.ip_address(@)", "int($E)"),
    "uuid": _of("uuid.UUID(int=@)", "$E.int"),
    # -- numbers and times ------------------------------------------------------------------------
    "decimal": _factor("decimal.Decimal('1.5')", "decimal.Decimal('2.5')", "decimal.Decimal('NaN')", "float($E)"),
    "context": _of("decimal.Context(@)", "$E.prec"),
    "fraction": _of("fractions.Fraction(@, 5)", "float($E)"),
    "date": _of("datetime.date(2020, 1, @)", "$E.day"),
    "moment": _of("datetime.datetime(2020, 1, 1, @)", "$E.hour"),
    "time": _of("datetime.time(@)", "$E.hour"),
    "duration": _of("datetime.timedelta(hours=@)", "$E.seconds"),
    "zone": _of("datetime.timezone(datetime.timedelta(hours=@))", "$E.utcoffset(None).seconds"),
    "random": _of("random.Random(@)", "$E.getstate()[1][0] % 97"),
    "count": _of("itertools.count(@)", "int(repr($E)[6:-1])"),
    "iterator": _of("iter([1, @])", "copy.copy($E).__reduce__()[1][0][1]"),
    "np_array": _of("np.array([1.0, @])", "float($E[1])"),
    "np_view": _factor("floats[:2]", "floats[2:]", "floats[::2]", "float($E[1])"),
    "np_frozen": _of("frozen_array(@)", "float($E[0])"),
    "np_objects": _of("np.array([@, None], dtype=object)", "$E[0]"),
    "np_masked": _of("np.ma.masked_array([1.0, @], [True, False])", "float($E[1])"),
    "np_record": _of("np.array([(1, @)], dtype='i4,f8')", "float($E['f1'][0])"),
    "np_dtype": _factor("np.dtype('f4')", "np.dtype('f8')", "np.dtype([('a', 'i2')])", "$E.itemsize"),
    "np_void": _of("np.array([(1, @)], dtype='i4,f8')[0]", "float($E[1])"),
    "np_random": _of("np.random.RandomState(@)", "float($E.get_state()[1][0] % 97)"),
    "np_date": _of("np.datetime64('2020-01-0@')", "$E.astype(int) % 97"),
    # -- of torch ---------------------------------------------------------------------------------------
    "dtype": _layer("torch.float32", "torch.float64", "torch.float16", "x.to($E) * 3"),
    "device": _factor("torch.device('cpu')", "torch.device('cpu', 0)", "torch.device('meta')", "len(str($E))"),
    "layout": _factor("torch.strided", "torch.sparse_coo", "torch.sparse_csr", "len(str($E))"),
    "memory_format": _factor("torch.contiguous_format", "torch.preserve_format", "torch.channels_last", "len(str($E))"),
    "finfo": _factor("torch.finfo(torch.float32)", "torch.finfo(torch.float16)", "torch.finfo(torch.float64)", "$E.eps"),
    "iinfo": _factor("torch.iinfo(torch.int32)", "torch.iinfo(torch.int16)", "torch.iinfo(torch.int64)", "$E.bits"),
    "placement": _factor("placements.Shard(0)", "placements.Shard(1)", "placements.Shard(-1)", "$E.dim + 2"),
    "partial_sum": _factor("placements.Partial('sum')", "placements.Partial('max')", "placements.Partial('avg')", "2.0 if $E.reduce_op == 'sum' else 3.0"),
    "placements": _factor("[placements.Shard(0)]", "[placements.Replicate()]", "[placements.Shard(1)]", "2.0 if $E[0].is_shard(0) else 3.0"),
    "backend": _factor("nn.attention.SDPBackend.MATH", "nn.attention.SDPBackend.FLASH_ATTENTION", "nn.attention.SDPBackend.EFFICIENT_ATTENTION", "$E.value"),
    "storage": _of("torch.ones(@).untyped_storage()", "len($E)"),
    "scheduler": _of("torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=@), 1)", "$E.base_lrs[0]"),
    "optimizer": _of("torch.optim.SGD([torch.ones(1)], lr=@)", "$E.param_groups[0]['lr']"),
    "averaged": _of("torch.optim.swa_utils.AveragedModel(nn.Identity(), avg_fn=lambda a, b, n: n * @)", "$E.avg_fn(1, 1, 1)"),
    "constraint": _of("torch.distributions.constraints.integer_interval(0, @)", "$E.upper_bound"),
    "data_set": _of("torch.utils.data.TensorDataset(torch.ones(@))", "len($E)"),
    "subset": _of("torch.utils.data.Subset([7, 8, 9, 10, 11], [@])", "$E[0]"),
    "sampler": _of("torch.utils.data.SequentialSampler(range(@))", "len($E)"),
    "batches": _of("torch.utils.data.BatchSampler(range(12), @, False)", "len($E)"),
    "loader": _of("torch.utils.data.DataLoader(range(12), batch_size=@)", "len($E)"),
    "logger": _factor("new_logger(10)", "new_logger(20)", "new_logger(30)", "$E.level"),
    "event": _factor("new_event(True)", "new_event(False)", "new_event(True)", "2.0 if $E.is_set() else 3.0"),
    "future": _of("new_future(@)", "$E.result()"),
    "queue": _of("filled(queue.Queue(), @)", "$E.qsize()"),
    "hash": _factor("hashlib.sha1(b'a')", "hashlib.sha1(b'b')", "hashlib.sha1(b'c')", "float($E.digest()[0])"),
    "context_variable": _factor("new_variable(2)", "new_variable(3)", "new_variable(4)", "$E.get()"),
    "thread_local": _of("new_local(@)", "$E.k"),
    "mesh": _factor("mesh((2, 1))", "mesh((1, 2))", "mesh((2,))", "$E.size(0) + 2"),
}  # fmt: skip

# Statements that change what a value holds, and leave it the same object.
INSIDE: dict[str, str] = {
    "tensor": "$E.resize_(1)",
    "grad": "pa.grad = pb.grad = tc",
    "layer": "$E.weight = pa.view(1, 4)",
    "weight": "ma.weight = nn.Parameter(torch.ones(1, 4))",
    "forward": "ma.forward = mb.forward = torch.tanh",
    "order": "$E.reverse()",
    "sequence": "$E.append(nn.ReLU())",
    "named": "$E['a'], $E['b'] = $E['b'], $E['a']",
    "set_of_tensors": "$E.symmetric_difference_update({ta})",
    "weak_set": "$E.discard(ma)",
    "weak_keys": "$E[ma] = 7",
    "weak_values": "$E['m'] = nn.Identity()",
    "weak_reference": "ma.forward = mb.forward = torch.tanh",
    "keys_of_tensors": "$E[pa] = 7",
    "slope": "$E.negative_slope = 0.7",
    "norm": "$E.eps = 0.7",
    "activation": "$E.forward = torch.cos",
    "loss": "$E.reduction = 'none'",
    "pad": "$E.value = 7.0",
    "lambda": "$E.__code__ = (lambda v: v * 7).__code__",
    "default": "$E.__defaults__ = (7.0,)",
    "namespace": "$E.k = 7",
    "slots": "$E.k = 7",
    "field": "$E.k = 7",
    "frozen": "object.__setattr__($E, 'k', 7)",
    "class": "$E.k = 7",
    "instance": "type($E).k = 7",
    "descriptor": "type($E).k = 7",
    "answers_all": "$E.anything = 7",
    "callable": "type($E).__call__ = lambda self, v: 7.0",
    "error": "$E.args = (7,)",
    "cycle": "$E.me.k = 7",
    "module_of_python": "$E.k = 7",
    "list": "$E[1][0] = 7",
    "dict": "$E['a'].update({1: 7})",
    "order_of_keys": "$E['a'] = $E.pop('a') + 1",
    "set": "$E.add(7)",
    "counter": "$E.update(b=7)",
    "default_dict": "$E.default_factory = lambda: 7",
    "ordered": "$E.move_to_end('a')",
    "chain": "$E['a'] = 7",
    "user_dict": "$E['a'] = 7",
    "user_list": "$E[0] = 7",
    "module_dict": "$E['a'] = nn.Sigmoid()",
    "module_list": "$E.append(nn.Sigmoid())",
    "parameter_dict": "$E['a'] = tc",
    "bytearray": "$E[-1] = 7",
    "array": "$E[0] = 7",
    "c_double": "$E.value = 7.0",
    "c_structure": "$E.k = 7",
    "template": "$E.template = '7'",
    "random": "$E.seed(7)",
    "np_array": "$E[1] = 7",
    "np_view": "floats[:] = 7",
    "np_objects": "$E[0] = 7",
    "np_masked": "$E[1] = 7",
    "np_record": "$E['f1'] = 7",
    "placements": "$E[0] = placements.Partial()",
    "scheduler": "$E.base_lrs[0] = 7",
    "optimizer": "$E.param_groups[0]['lr'] = 7",
    "averaged": "$E.avg_fn = lambda a, b, n: 7",
    "data_set": "$E.tensors = (torch.ones(7),)",
    "subset": "$E.indices[0] = 0",
    "sampler": "$E.data_source = range(7)",
    "batches": "$E.drop_last = True",
    "logger": "$E.setLevel(7)",
    "event": "$E.clear()",
    "future": "$E._result = 7",
    "queue": "$E.put(7)",
    "context_variable": "$E.set(7)",
    "thread_local": "$E.k = 7",
}
# What only C code knows, and so no guard sees.
UNSEEN = {
    "in_memory": "$E.write(b'7')",
    "context": "$E.prec = 7",
    "np_random": "$E.seed(7)",
    "hash": "$E.update(b'7')",
}

# What values and statements name at the top level.
DEFINED = {
    r"\bt[abcfm]\b": (
        "ta, tb, tc = torch.ones(4), torch.full((4,), 2.0), torch.full((4,), 3.0)\n"
        "tf, tm = torch.arange(8.0), torch.arange(16.0).view(4, 4)\n"
    ),
    r"\bt[ij]\b": "ti, tj = torch.tensor([0, 1]), torch.tensor([1, 2])\n",
    r"\bp[ab]\b": (
        "pa, pb = nn.Parameter(torch.ones(4)), nn.Parameter(torch.full((4,), 2.0))\n"
        "pa.grad, pb.grad = torch.full((4,), 3.0), torch.full((4,), 4.0)\n"
    ),
    r"(?<!\.)\bm[ab]\b": "torch.manual_seed(1)\nma, mb = nn.Linear(4, 4), nn.Linear(4, 4)\n",
    r"\bSlotted\b": "class Slotted:\n    __slots__ = ('k',)\n\n    def __init__(self, k):\n        self.k = k\n",
    r"\bPair\b": "Pair = collections.namedtuple('Pair', 'k l')\n",
    r"\bField\b": "@dataclasses.dataclass\nclass Field:\n    k: object\n",
    r"\bFrozen\b": "@dataclasses.dataclass(frozen=True, slots=True)\nclass Frozen:\n    k: object\n",
    r"\bAnswers\b": (
        "class Answers:\n    def __init__(self, k):\n        self.k = k\n\n    def __getattr__(self, name):\n"
        "        if name.startswith('__'):\n            raise AttributeError(name)\n        return self.__dict__['k']\n\n"
        "    def __call__(self, v):\n        return v * self.k\n"
    ),
    r"\bMode\b": "class Mode(enum.Flag):\n    A = 1\n    B = 2\n",
    r"\bcircle\b": "def circle(k):\n    made = types.SimpleNamespace(k=k)\n    made.me = made\n    return made\n",
    r"\bpython_module\b": "def python_module(k):\n    made = types.ModuleType('rote_script_kept')\n    made.k = k\n    return made\n",
    r"\bPoint\b": "class Point(ctypes.Structure):\n    _fields_ = [('k', ctypes.c_int)]\n",
    r"\bfloats\b": "floats = np.arange(4.0)\n",
    r"\bfrozen_array\b": "def frozen_array(k):\n    made = np.array([k])\n    made.flags.writeable = False\n    return made\n",
    r"\bnew_logger\b": "def new_logger(level):\n    made = logging.Logger('rote_script')\n    made.setLevel(level)\n    return made\n",
    r"\bnew_event\b": "def new_event(on):\n    made = threading.Event()\n    if on:\n        made.set()\n    return made\n",
    r"\bnew_future\b": "def new_future(k):\n    made = concurrent.futures.Future()\n    made.set_result(k)\n    return made\n",
    r"\bfilled\b": "def filled(made, k):\n    for i in range(k):\n        made.put(i)\n    return made\n",
    r"\bnew_variable\b": "def new_variable(k):\n    made = contextvars.ContextVar('rote_script')\n    made.set(k)\n    return made\n",
    r"\bnew_local\b": "def new_local(k):\n    made = threading.local()\n    made.k = k\n    return made\n",
}  # fmt: skip
#: Tensors and modules among these, which are the step's state.
STATE = ("ta", "tb", "tc", "tf", "tm", "ti", "tj", "pa", "pb", "ma", "mb")
