"""The C ABI of librote.so, by ctypes."""

from __future__ import annotations

import ctypes
import os
import re
from array import array
from collections.abc import Iterable, Sequence
from ctypes import POINTER, byref, c_char_p, c_double, c_int, c_int64, c_uint8, c_uint32, c_uint64, c_void_p, py_object
from pathlib import Path
from typing import Any

LogCallback = ctypes.CFUNCTYPE(None, c_int, c_char_p, c_char_p)
# The caller holds the GIL throughout.
ReportCallback = ctypes.PYFUNCTYPE(None, c_void_p, c_char_p)
RuleCallback = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)
CombineCallback = ctypes.PYFUNCTYPE(
    c_void_p, c_void_p, c_char_p, POINTER(c_double), c_uint32, c_uint64, POINTER(c_double)
)
ShowCallback = ctypes.PYFUNCTYPE(None, c_void_p, c_uint32, c_uint32, py_object)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "rote_version": (c_char_p, []),
    "rote_last_error": (c_char_p, []),
    "rote_last_exception": (c_void_p, []),
    "rote_set_log": (c_int, [LogCallback]),
    "rote_bridge_source_count": (c_uint32, []),
    "rote_bridge_source_name": (c_char_p, [c_uint32]),
    "rote_bridge_source_text": (c_char_p, [c_uint32]),
    "rote_load_bridge": (c_int, [c_char_p]),
    "rote_session_new": (c_void_p, [c_char_p, c_char_p, c_uint32, c_uint32, c_char_p, c_uint32, c_char_p]),
    "rote_session_owner": (c_int, [c_void_p, POINTER(c_void_p)]),
    "rote_session_call": (
        c_int,
        [c_void_p, py_object, py_object, POINTER(c_uint32), POINTER(c_void_p)],
    ),
    "rote_session_call_within": (
        c_int,
        [c_void_p, py_object, py_object, POINTER(c_uint32), POINTER(c_void_p)],
    ),
    "rote_session_world": (c_int, [c_void_p, c_char_p, c_uint32, c_uint32]),
    "rote_session_let_ranks_agree": (c_int, [c_void_p]),
    "rote_session_agree_in": (c_int, [c_void_p, c_char_p, POINTER(c_int)]),
    "rote_session_show": (c_int, [c_void_p, c_uint32, py_object, py_object, c_int, ShowCallback, c_void_p]),
    "rote_session_program": (c_char_p, [c_void_p, c_uint32]),
    "rote_record_executed": (c_int, [c_void_p, POINTER(c_uint32)]),
    "rote_record_compare": (c_char_p, [c_void_p, c_uint32, c_char_p]),
    "rote_session_left": (c_char_p, [c_void_p, POINTER(c_void_p)]),
    "rote_session_holds": (c_int, [c_void_p, py_object, py_object, POINTER(c_int)]),
    "rote_session_stop": (c_int, [c_void_p, c_char_p]),
    "rote_session_replay_last": (c_int, [c_void_p, POINTER(c_uint32), POINTER(c_void_p)]),
    "rote_session_give_up": (c_int, [c_void_p, c_uint32]),
    "rote_session_stats": (c_char_p, [c_void_p]),
    "rote_session_notice": (c_char_p, [c_void_p]),
    "rote_session_explain": (c_char_p, [c_void_p]),
    "rote_session_variant": (c_char_p, [c_void_p, c_uint32]),
    "rote_record_begin": (c_int, [c_void_p]),
    "rote_record_leaf": (c_int, [c_void_p, c_char_p, py_object]),
    "rote_record_spec": (c_int, [c_void_p, c_char_p, POINTER(c_uint32)]),
    "rote_record_tensor": (
        c_int,
        [c_void_p, c_uint32, c_char_p, py_object, py_object, c_uint32, c_uint32],
    ),
    "rote_record_written": (c_int, [c_void_p, POINTER(c_uint32), POINTER(c_uint32), c_uint32]),
    "rote_record_facts": (
        c_int,
        [
            *(c_void_p, c_uint32, POINTER(c_uint32), POINTER(c_void_p), POINTER(c_void_p), POINTER(c_uint32)),
            *(c_char_p, c_char_p),
        ],
    ),
    "rote_record_guard": (c_int, [c_void_p, c_uint32, c_char_p, c_char_p]),
    "rote_record_generator": (c_int, [c_void_p, c_uint32, c_int]),
    "rote_record_survey": (c_int, [c_void_p, POINTER(c_uint32)]),
    "rote_record_resume": (c_int, [c_void_p, c_uint32, POINTER(c_int)]),
    "rote_record_ready": (c_int, [c_void_p]),
    "rote_record_adopt": (
        c_int,
        [c_void_p, c_void_p, c_uint32, c_char_p, c_uint32, POINTER(c_uint32), POINTER(c_int)],
    ),
    "rote_record_is_first": (c_int, [c_void_p, POINTER(c_int)]),
    "rote_record_trust": (c_int, [c_void_p, POINTER(c_uint32), POINTER(c_int)]),
    "rote_record_op": (c_int, [c_void_p, py_object, py_object, py_object, py_object, c_char_p]),
    "rote_record_observe": (c_int, [c_void_p, py_object]),
    "rote_record_observed": (c_int, [c_void_p, c_char_p]),
    "rote_record_waited": (c_int, [c_void_p, py_object, c_char_p]),
    "rote_record_handled": (c_int, [c_void_p, c_char_p]),
    "rote_record_grad_gone": (c_int, [c_void_p, c_char_p]),
    "rote_record_reach": (c_int, [c_void_p, c_char_p, c_uint64]),
    "rote_record_resized": (c_int, [c_void_p, c_uint64, c_uint64, c_uint64, c_char_p]),
    "rote_record_anchor": (c_int, [c_void_p, py_object, POINTER(c_int)]),
    "rote_record_random": (c_int, [c_void_p, c_char_p]),
    "rote_record_rng": (c_int, [c_void_p, c_uint32, c_uint32, c_int, POINTER(c_uint32), c_char_p]),
    "rote_record_global_args": (c_int, [c_void_p, c_char_p]),
    "rote_record_redistribute_begin": (c_int, [c_void_p, c_uint32, c_uint32, c_char_p]),
    "rote_record_redistribute_end": (c_int, [c_void_p]),
    "rote_record_float": (
        c_int,
        [c_void_p, c_uint32, c_uint32, c_uint32, c_double, c_char_p, POINTER(c_uint32)],
    ),
    "rote_record_item": (c_int, [c_void_p, py_object, POINTER(c_uint32), POINTER(c_double)]),
    "rote_record_compared": (c_int, [c_void_p, c_uint32, c_uint32, c_uint32, c_int]),
    "rote_record_pin": (c_int, [c_void_p, c_uint32]),
    "rote_record_groups": (c_char_p, [c_void_p]),
    "rote_record_met": (c_char_p, [c_void_p]),
    "rote_record_group": (c_int, [c_void_p, c_char_p, POINTER(c_int64), c_uint32, c_char_p]),
    "rote_record_output": (c_int, [c_void_p, c_char_p, py_object, c_uint32, c_int]),
    "rote_record_grad": (c_int, [c_void_p, c_char_p, py_object, c_uint32]),
    "rote_record_refuse": (c_int, [c_void_p, c_char_p, c_char_p, c_char_p, c_char_p]),
    "rote_record_survivors": (c_int, [c_void_p, POINTER(c_uint32)]),
    "rote_record_abort": (c_int, [c_void_p]),
    "rote_record_finish": (c_char_p, [c_void_p, c_char_p]),
    "rote_plan_check": (c_int, [c_char_p]),
    "rote_propagator_new": (c_void_p, [c_char_p, POINTER(c_uint32), POINTER(c_double)]),
    "rote_propagator_in_dtensors_order": (c_int, [c_void_p]),
    "rote_propagator_free": (None, [c_void_p]),
    "rote_propagate": (c_int, [c_void_p, c_void_p, c_void_p]),
    "rote_propagate_json": (c_char_p, [c_char_p, c_int, RuleCallback, c_void_p]),
    "rote_register_shardings": (c_int, [c_char_p, RuleCallback, c_void_p]),
    "rote_forget_shardings": (c_int, [c_char_p]),
    "rote_sharding": (c_int, [c_char_p, c_char_p, POINTER(c_uint32)]),
    "rote_register_partials": (c_int, [c_char_p, c_uint8, CombineCallback, c_void_p]),
    "rote_forget_partials": (c_int, [c_char_p]),
    "rote_partial": (c_int, [c_char_p, c_char_p, POINTER(c_uint32)]),
    "rote_has_rule": (c_int, [c_char_p]),
    "rote_local_args": (c_int, [c_char_p, POINTER(c_int), POINTER(c_int)]),
    "rote_validate": (c_int, [c_char_p, ReportCallback, RuleCallback, c_void_p]),
}


def _load() -> ctypes.PyDLL:
    path = os.environ.get("ROTE_LIBRARY") or str(Path(__file__).parent / "librote.so")
    # PyDLL keeps the GIL: the library calls back into Python's C API.
    library = ctypes.PyDLL(path)
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = arguments
    return library


lib: Any = _load()
#: Where functions are that the bridge calls: `call_session` takes less time than ctypes does.
SESSION_CALL, SESSION_CALL_WITHIN = (
    ctypes.cast(function, c_void_p).value for function in (lib.rote_session_call, lib.rote_session_call_within)
)
# `local` may be NULL, which py_object cannot say.
record_no_grad: Any = ctypes.PYFUNCTYPE(c_int, c_void_p, c_char_p, c_void_p, c_uint32)(("rote_record_grad", lib))


def error() -> str:
    """What the last failed call has to say."""
    return str(lib.rote_last_error().decode(errors="replace"))


def c_text(words: str) -> bytes:
    """Any text as the library takes it: what a C string cannot hold is escaped."""
    return words.encode(errors="backslashreplace").replace(b"\0", b"\\x00")


def c_texts(words: Iterable[str]) -> bytes:
    """Texts as the library takes them, one C string after the other."""
    each = list(words)
    joined = "\0".join(each)
    if joined.count("\0") >= len(each):
        joined = "\0".join(text.replace("\0", "\\x00") for text in each)
    return joined.encode(errors="backslashreplace")


def check(status: int) -> int:
    """Raises for a failed status; passes others on."""
    if status < 0:
        exception = lib.rote_last_exception()
        if exception is not None:
            raised, said = take_object(c_void_p(exception)), error()
            if (failed := re.match(r"instruction \d+ failed: (.*?): ", said)) is not None:
                raised.add_note(f"rote: raised in a replay of the step, by {failed[1]}")
            raise raised
        raise RuntimeError(f"rote: {error()}")
    return status


def object_in(slot: c_void_p) -> Any:
    """The Python object in a slot that owns one reference to it."""
    return ctypes.cast(slot, py_object).value


def drop_object(slot: c_void_p) -> None:
    """Empties such a slot."""
    value = object_in(slot)
    slot.value = None
    ctypes.pythonapi.Py_DecRef(py_object(value))


def take_object(slot: c_void_p) -> Any:
    """The Python object in such a slot, which is empty then."""
    value = object_in(slot)
    drop_object(slot)
    return value


def addresses(objects: Iterable[int]) -> Any:
    """An array of objects for the library, by their addresses: ctypes would take long over each, and some classes
    answer anything to it. 0: none."""
    found = array("Q", objects)
    return (c_void_p * len(found)).from_buffer(found)


def ids(numbers: Sequence[int]) -> Any:
    """An array of ids for the library."""
    return (c_uint32 * len(numbers))(*numbers)


__all__ = [
    "CombineCallback",
    "LogCallback",
    "ReportCallback",
    "RuleCallback",
    "ShowCallback",
    "byref",
    "c_int",
    "c_uint32",
    "c_void_p",
]
