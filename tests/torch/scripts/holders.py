"""Where what keeps a value is itself kept: in a cell, a global, an attribute, an argument, ..."""

# ruff: noqa: E501 (a table)
import dataclasses


@dataclasses.dataclass(frozen=True)
class Holder:
    """In its text, `$F` is the expression that makes what is held."""

    setup: str  # statements; empty: they are those of a global
    inside: str = "held"  # how the step gets at it
    outside: str = "held"  # how the rest of the script does
    names: str = "held"  # that the rest of the script may assign to
    define: str = ""
    parameters: str = "x, n"  # of the step
    call: str = "x, n"
    state: str = ""
    captured: str = "step"
    top: bool = False  # whether the setup is at the top level
    fixed: bool = False  # whether what is held cannot be exchanged for another


HOLDERS: dict[str, Holder] = {
    "cell": Holder("held = $F"),
    "global": Holder("held = $F", top=True),
    "global_of_a_module": Holder(
        "other = types.ModuleType('rote_script_other')\nexec('held = None\\ndef fetch():\\n    return held\\n', vars(other))\n"
        "other.held = $F",
        "other.fetch()", "other.held", "other",
    ),
    "attribute": Holder("box = types.SimpleNamespace(held=$F)", "box.held", "box.held", "box"),
    "deep": Holder(
        "box = types.SimpleNamespace(inner=[{'a': types.SimpleNamespace(held=$F)}])",
        "box.inner[0]['a'].held", "box.inner[0]['a'].held", "box",
    ),
    "slot": Holder(
        "box = Box()\nbox.held = $F", "box.held", "box.held", "box", 'class Box:\n    __slots__ = ("held",)\n'
    ),
    "class": Holder("class Owner:\n    pass\n\nOwner.held = [$F]", "Owner.held[0]", "Owner.held[0]", "Owner"),
    "class_directly": Holder("Owner = type('Owner', (), {'held': None})\nOwner.held = $F", "Owner.held", "Owner.held", "Owner"),
    "list": Holder("boxes = [$F]", "boxes[0]", "boxes[0]", "boxes"),
    "dict": Holder("table = {'held': $F}", "table['held']", "table['held']", "table"),
    "tuple": Holder("boxes = ($F, 1.0)", "boxes[0]", "boxes[0]", "boxes", fixed=True),
    "deque": Holder("boxes = collections.deque([$F])", "boxes[0]", "boxes[0]", "boxes"),
    "python_module": Holder("settings = types.ModuleType('rote_script_settings')\nsettings.held = $F", "settings.held", "settings.held", "settings"),
    "module": Holder("model = nn.Linear(1, 1)\nmodel.held = $F", "model.held", "model.held", "model", state="model"),
    "module_in_reach": Holder("model = nn.Sequential(nn.Identity())\nmodel[0].held = $F", "model[0].held", "model[0].held", "model"),
    "tensor": Holder("t = nn.Parameter(torch.ones(1))\nt.held = $F", "t.held", "t.held", "t", state="t"),
    "tensor_in_reach": Holder("t = torch.ones(1)\nt.held = $F", "t.held", "t.held", "t"),
    "function": Holder("def fetch():\n    return fetch.held\n\nfetch.held = $F", "fetch()", "fetch.held", "fetch"),
    "nested": Holder("held = $F\n\ndef fetch():\n    return lambda: held\n", "fetch()()", "held", "held"),
    "default": Holder("held = $F", parameters="x, n, held=held", fixed=True),
    "keyword": Holder("held = $F", parameters="x, n, *, held=held", fixed=True),
    "self": Holder(
        "class Trainer:\n    def __init__(self, held):\n        self.held = held\n\ntrainer = Trainer($F)",
        "self.held", "trainer.held", "trainer", parameters="self, x, n", captured="types.MethodType(step, trainer)",
    ),
    "partial": Holder("held = $F", parameters="held, x, n", captured="functools.partial(step, held)", fixed=True),
    "argument": Holder("held = $F", parameters="x, n, held", call="x, n, held"),
    "keyword_argument": Holder("held = $F", parameters="x, n, *, held", call="x, n, held=held"),
    "in_an_argument": Holder("held = $F", inside="batch['held'][0]", parameters="x, n, batch", call="x, n, {'held': [held]}"),
    "object_argument": Holder(
        "box = types.SimpleNamespace(held=$F)", "box.held", "box.held", "box", parameters="x, n, box", call="x, n, box"
    ),
    "argument_attribute": Holder(
        "t = torch.ones(1)\nt.held = $F", "t.held", "t.held", "t", parameters="x, n, t", call="x, n, t"
    ),
    "property": Holder(
        "box = Box()\nbox._held = $F", "box.held", "box._held", "box",
        "class Box:\n    @property\n    def held(self):\n        return self._held\n",
    ),
    "getattr": Holder(
        "box = Box()\nbox.table = {'held': $F}", "box.held", "box.table['held']", "box",
        "class Box:\n    def __getattr__(self, name):\n        return self.table[name]\n",
    ),
    "dataclass": Holder(
        "box = Box($F)", "box.held", "box.held", "box",
        "@dataclasses.dataclass\nclass Box:\n    held: object\n",
    ),
    "weak_reference": Holder(
        "box = Strong()\nbox.held = $F\nweak = weakref.ref(box)", "weak().held", "box.held", "box", "class Strong:\n    pass\n",
    ),
    "context_variable": Holder("variable = contextvars.ContextVar('variable')\nvariable.set([$F])",
                               "variable.get()[0]", "variable.get()[0]", "variable"),
    "thread_local": Holder("local = threading.local()\nlocal.held = $F", "local.held", "local.held", "local"),
    "defaults_of_a_class": Holder(
        "def make(held):\n    class Owner:\n        def read(self, held=held):\n            return held\n    return Owner()\n\n"
        "held = $F\nowner = make(held)", "owner.read()", "held", "held", fixed=True,
    ),
    "cached": Holder("held = $F\n\n@functools.lru_cache\ndef fetch():\n    return [held]\n", "fetch()[0]", "fetch()[0]", "held"),
    "optimizer": Holder(
        "opt = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)\nopt.param_groups[0]['held'] = $F",
        "opt.param_groups[0]['held']", "opt.param_groups[0]['held']", "opt", state="opt",
    ),
    "hook": Holder(
        "held = $F\nmodel = nn.Identity()\nmodel.register_forward_hook(lambda module, args, output: held)",
        "model(1.0)", "held", "held", state="model",
    ),
    "generator_expression": Holder("boxes = [$F]", "next(each for each in boxes)", "boxes[0]", "boxes"),
    "argument_of_a_captured": Holder(
        "box = types.SimpleNamespace(held=$F)\ninner = capture(lambda x, box: x * 1)",
        "(inner(x, 1), box.held)[1]", "box.held", "box",
    ),
}  # fmt: skip
