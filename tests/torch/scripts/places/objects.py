"""Attributes of objects, classes, Python modules and functions."""

# ruff: noqa: E501 (a table)
from .place import Place, attribute_of, class_

PLACES: dict[str, Place] = {
    "itself": Place("$V", "$H", "$H = $V"),
    "object": attribute_of("Plain", class_("Plain")),
    "class_default": attribute_of(
        "Plain",
        class_("Plain", body="scale = 9.0"),
        patches={"class": "type($H).scale = $V", "other_class": "$H.__class__ = type('Other', (Plain,), {'scale': $V})"},
    ),
    "inherited": Place(
        "derived($V)()", "$H.scale", "type($H).__mro__[1].scale = $V",
        "def derived(value):\n    base = type('Base', (), {'scale': value})\n    return type('Derived', (base,), {})\n",
        attribute=("$H", "scale"),
        patches={"nearer": "type($H).scale = $V", "own": "$H.scale = $V",
                 "bases": "type($H).__bases__ = (type('Base', (), {'scale': $V}),)"},
    ),
    "slots": attribute_of("Slotted", class_("Slotted", body='__slots__ = ("scale",)')),
    "slots_and_dict": attribute_of("Slotted", class_("Slotted", body='__slots__ = ("scale", "__dict__")')),
    "property": Place(
        "Owner($V)", "$H.scale", "$H._scale = $V",
        "class Owner:\n    def __init__(self, value):\n        self._scale = value\n\n"
        "    @property\n    def scale(self):\n        return self._scale\n",
        attribute=("$H", "scale"), delete="del $H._scale",
        patches={"property": "type($H).scale = property(lambda self: $V)", "getter": "type($H).scale = $V"},
        undo="",
    ),
    "descriptor": Place(
        "described($V)()", "$H.scale", "vars(type($H))['scale'].value = $V",
        "class Descriptor:\n    def __init__(self, value):\n        self.value = value\n\n"
        "    def __get__(self, instance, owner):\n        return self.value\n\n\n"
        "def described(value):\n    return type('Described', (), {'scale': Descriptor(value)})\n",
        attribute=("$H", "scale"),
        patches={"get": "Descriptor.__get__ = lambda self, instance, owner: $V", "own": "$H.__dict__['scale'] = $V"},
    ),
    "getattr": Place(
        "Answers($V)", "$H.scale", "$H.table['scale'] = $V",
        "class Answers:\n    def __init__(self, value):\n        self.table = {'scale': value}\n\n"
        "    def __getattr__(self, name):\n        try:\n            return self.table[name]\n"
        "        except KeyError:\n            raise AttributeError(name) from None\n",
        attribute=("$H", "scale"), delete="del $H.table['scale']",
        patches={"hide": "$H.scale = $V", "class": "type($H).scale = $V",
                 "method": "type($H).__getattr__ = lambda self, name: $V"},
    ),
    "getattribute": Place(
        "Answers($V)", "$H.scale", "object.__getattribute__($H, 'table')['scale'] = $V",
        "class Answers:\n    def __init__(self, value):\n        self.table = {'scale': value}\n\n"
        "    def __getattribute__(self, name):\n        return object.__getattribute__(self, 'table')[name]\n",
    ),
    "class_attribute": Place(
        "type('Kind', (), {'scale': $V})", "$H.scale", "$H.scale = $V",
        attribute=("$H", "scale"), delete="del $H.scale", absent="type('Kind', (), {})",
    ),
    "metaclass": Place(
        "Meta('Kind', (), {})", "$H.scale", "Meta.scale = $V", "class Meta(type):\n    pass\n\n\nMeta.scale = $V0\n",
        attribute=("$H", "scale"), delete="del Meta.scale",
        patches={"class": "$H.scale = $V", "property": "Meta.scale = property(lambda cls: $V)"},
    ),
    "method": Place(
        "with_scale(Owner(), $V)", "$H.read()", "$H.scale = $V",
        "class Owner:\n    def read(self):\n        return self.scale\n",
        delete="del $H.scale",
        patches={"method": "Owner.read = lambda self: $V", "own": "$H.read = lambda: $V",
                 "code": "Owner.read.__code__ = (lambda self: 4.5).__code__"},
    ),
    "static_method": Place(
        "Owner()", "$H.read()", "Owner.held[0] = $V",
        "class Owner:\n    held = [$V0]\n\n    @staticmethod\n    def read():\n        return Owner.held[0]\n",
        patches={"method": "Owner.read = staticmethod(lambda: $V)", "list": "Owner.held = [$V]"},
    ),
    "class_method": Place(
        "Owner()", "$H.read()", "Owner.held = $V",
        "class Owner:\n    held = $V0\n\n    @classmethod\n    def read(cls):\n        return cls.held\n",
        delete="del Owner.held",
    ),
    "super": Place(
        "with_scale(Derived(), $V)", "$H.read()", "$H.scale = $V",
        "class Base:\n    def read(self):\n        return self.scale\n\n\n"
        "class Derived(Base):\n    def read(self):\n        return super().read()\n",
        patches={"base": "Base.read = lambda self: $V"},
    ),
    "call": Place(
        "with_scale(Caller(), $V)", "$H()", "$H.scale = $V",
        "class Caller:\n    def __call__(self):\n        return self.scale\n",
        patches={"call": "Caller.__call__ = lambda self: $V"},
    ),
    "operator_method": Place(
        "with_scale(Measured(), $V)", "($H + 0)", "$H.scale = $V",
        "class Measured:\n    def __add__(self, other):\n        return self.scale + other\n\n"
        "    def __len__(self):\n        return 2 if self.scale else 3\n",
        patches={"method": "Measured.__add__ = lambda self, other: $V"},
    ),
    "dataclass": attribute_of(
        "Config", "@dataclasses.dataclass\n" + class_("Config", body="scale: float = 9.0"), absent="Config()"
    ),
    "frozen_dataclass": Place(
        "Config($V)", "$H.scale", "object.__setattr__($H, 'scale', $V)",
        "@dataclasses.dataclass(frozen=True)\n" + class_("Config", body="scale: float = 9.0"),
        attribute=("$H", "scale"), delete="object.__delattr__($H, 'scale')",
    ),
    "slots_dataclass": attribute_of(
        "Config", "@dataclasses.dataclass(slots=True)\n" + class_("Config", body="scale: float = 9.0")
    ),
    "dataclass_replaced": Place(
        "Config($V)", "$H.scale", "$H = dataclasses.replace($H, scale=$V)",
        "@dataclasses.dataclass\n" + class_("Config", body="scale: float = 9.0"), attribute=("$H", "scale"),
    ),
    "namespace": attribute_of("types.SimpleNamespace"),
    "python_module": attribute_of("types.ModuleType", make='types.ModuleType("rote_test_settings")'),
    "module_getattr": Place(
        "answering({'scale': $V})", "$H.scale", "$H.table['scale'] = $V",
        "def answering(table):\n    module = types.ModuleType('rote_test_answers')\n    module.table = table\n\n"
        "    def answer(name):\n        try:\n            return table[name]\n        except KeyError:\n"
        "            raise AttributeError(name) from None\n\n    module.__getattr__ = answer\n    return module\n",
        attribute=("$H", "scale"), delete="del $H.table['scale']",
        patches={"hide": "$H.scale = $V", "function": "$H.__getattr__ = lambda name: $V"},
    ),
    "module_answers": Place(
        "answering_all({'scale': $V})", "$H.scale", "$H.table['scale'] = $V",
        "def answering_all(table):\n    module = types.ModuleType('rote_test_answers')\n    module.table = table\n"
        "    module.__getattr__ = lambda name: table[name]\n    return module\n",
        patches={"hide": "$H.scale = $V"},
    ),
    "library_named_module": attribute_of("types.ModuleType", make='types.ModuleType("torch.own")'),
    "dataset": attribute_of("Dataset", make="torch.utils.data.TensorDataset(torch.ones(2))"),
    "dataset_length": Place(
        "torch.utils.data.TensorDataset(torch.ones(2))", "9.0 + len($H)", "$H.tensors = (torch.ones(len($H) + 1),)", takes="none",
    ),
    "data_loader": attribute_of("DataLoader", make="torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(2)))"),
    "data_in_loader": Place(
        "torch.utils.data.DataLoader(with_scale(torch.utils.data.TensorDataset(torch.ones(2)), $V))", "$H.dataset.scale",
        "$H.dataset.scale = $V",
    ),
    "sampler_epoch": Place(
        "torch.utils.data.DistributedSampler([1, 2], 1, 0)", "9.0 + $H.epoch", "$H.set_epoch($H.epoch + 1)", takes="none",
    ),
    "executor": attribute_of("Executor", make="concurrent.futures.ThreadPoolExecutor(1)"),
    "bytes_io": attribute_of("io.StringIO"),
    "function_attribute": attribute_of("make_function", "def make_function():\n    return lambda: None\n"),
    "partial_attribute": attribute_of("functools.partial", make="functools.partial(float, 1)"),
    "exception_attribute": attribute_of("ValueError"),
    "thread_local": attribute_of("threading.local"),
    "own_dict": Place(
        "with_scale(Plain(), $V)", "$H.__dict__['scale']", "$H.__dict__['scale'] = $V", class_("Plain"),
        item=("$H.__dict__", '"scale"'), delete="del $H.__dict__['scale']",
        patches={"dict": "$H.__dict__ = {'scale': $V}", "update": "vars($H).update(scale=$V)"},
    ),
    "private_slot": Place(
        "Owner($V)", "$H.read()", "$H._Owner__scale = $V",
        "class Owner:\n    __slots__ = ('__scale',)\n\n    def __init__(self, value):\n        self.__scale = value\n\n"
        "    def read(self):\n        return self.__scale\n",
    ),
    "inner_class": Place("type('Config', (), {'Inner': type('Inner', (), {'scale': $V})})", "$H.Inner.scale", "$H.Inner.scale = $V"),
    "attribute_order": Place("types.SimpleNamespace(a=$V, b=5.0)", "next(iter(vars($H).values()))",
                             "(delattr($H, 'a'), setattr($H, 'a', $V))"),
    "dict_attribute": attribute_of("Table", class_("Table", "dict")),
    "module_getattr_appears": Place("types.ModuleType('rote_test_answers')", "getattr($H, 'scale', 9.0)",
                                    "$H.__getattr__ = lambda name: $V"),
    "module_inner": Place(
        "with_inner(types.ModuleType('rote_test_inner'), $V)", "operator.attrgetter('inner.scale')($H)", "$H.inner.scale = $V",
        "def with_inner(module, value):\n    module.inner = types.SimpleNamespace(scale=value)\n    return module\n",
    ),
    "tried_by_the_caller": Place(
        "types.ModuleType('rote_test_tried')", "tried($H)", "$H.scale = $V",
        "def inner(module):\n    return module.scale\n\n\ndef tried(module):\n    with contextlib.suppress(AttributeError):\n"
        "        return inner(module)\n    return 9.0\n",
    ),
    "type_hints": Place("Noted", "9.0 + len(typing.get_type_hints($H))", "$H.__annotations__['b'] = float",
                        "class Noted:\n    a: float = 0.0\n", takes="none"),
    "how_copies_are_made": Place(
        "Plain()", "2.0 if type(copy.copy($H)) is Plain else 3.0", "copyreg.pickle(Plain, made_otherwise)",
        "class Plain:\n    pass\n\n\ndef made_otherwise(_):\n    return collections.OrderedDict, ()\n", takes="none",
        undo="copyreg.dispatch_table.pop(Plain, None)",
    ),
}  # fmt: skip
