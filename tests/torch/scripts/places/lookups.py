"""Names that code looks up in globals, in the dict of a Python module or in `sys.modules`, wherever the name stands: in a
getter of `operator`, or in the text of another function than that which hands out the dict."""

# ruff: noqa: E501 (a table)
from .place import Place

_SET = "globals()['rote_scale'] = $V"
_DEFINE = "rote_scale = $V0\n"
_CONFIG = "rote_config = {'scale': $V0}\n"
_MODULE = "sys.modules['rote_script'] = types.ModuleType('rote_script')\nsys.modules['rote_script'].scale = $V0\n"
_SET_MODULE = "sys.modules['rote_script'].scale = $V"
_UNDO_MODULE = "sys.modules.pop('rote_script', None)"

PLACES: dict[str, Place] = {
    "getter_of_globals": Place("operator.itemgetter('rote_scale')", "$H(globals())", _SET, _DEFINE),
    "getters_one_after_the_other": Place("[operator.itemgetter('rote_config'), operator.itemgetter('scale')]",
                                         "$H[1]($H[0](globals()))", "rote_config['scale'] = $V", _CONFIG),
    "getters_in_a_list": Place("[operator.itemgetter('rote_config'), operator.itemgetter('scale')]",
                               "functools.reduce(lambda value, get: get(value), $H, globals())", "rote_config['scale'] = $V", _CONFIG),
    "getter_of_several": Place("operator.itemgetter('rote_config', 'rote_scale')", "$H(globals())[1]", _SET, _DEFINE + _CONFIG),
    "getter_in_a_partial": Place("functools.partial(map, operator.itemgetter('rote_scale'))", "sum($H([globals()]))", _SET, _DEFINE,
                                 takes="number"),
    "getter_in_a_class": Place("type('Reader', (), {'read': operator.itemgetter('rote_scale')})", "$H.read(globals())", _SET, _DEFINE),
    "partial_of_getattr": Place("functools.partial(getattr, sys.modules[__name__], 'rote_scale')", "$H()", _SET, _DEFINE),
    "method_with_a_default": Place("operator.methodcaller('get', 'rote_scale', 9.0)", "$H(globals())", _SET),
    "globals_as_arguments": Place("None", "picked(**globals())", _SET,
                                  _DEFINE + "\n\ndef picked(rote_scale=0.0, **others):\n    return rote_scale\n", alone=True),
    "text_in_another_function": Place("None", "look(globals())", _SET, _DEFINE + "\n\ndef look(own):\n    return own['rote_scale']\n",
                                      alone=True),
    "getter_of_a_module": Place(
        "with_config(types.ModuleType('rote_test_looked_up'), $V)", "operator.itemgetter('config')(vars($H))['scale']",
        "$H.config['scale'] = $V", "def with_config(module, value):\n    module.config = {'scale': value}\n    return module\n",
    ),
    "getter_of_a_loaded_module": Place("operator.itemgetter('rote_script')", "$H(sys.modules).scale", _SET_MODULE, _MODULE,
                                       patches={"replace": "sys.modules['rote_script'] = types.SimpleNamespace(scale=$V)"},
                                       undo=_UNDO_MODULE),
    "text_of_a_loaded_module": Place("None", "look(sys.modules)", _SET_MODULE,
                                     _MODULE + "\n\ndef look(modules):\n    return modules['rote_script'].scale\n",
                                     alone=True, undo=_UNDO_MODULE),
    "getter_of_a_functions_globals": Place(
        "execute({}, $V)", "operator.itemgetter('scale')($H.__globals__)", "$H.__globals__['scale'] = $V",
        "def execute(names, value):\n    names['scale'] = value\n    exec('def read(): return 1', names)\n    return names['read']\n",
    ),
}  # fmt: skip
