"""Where a value is kept, by kinds."""

from . import arrays, containers, functions, lookups, numbers, objects, process, tensors
from .place import Place

PLACES: dict[str, Place] = {
    **objects.PLACES,
    **tensors.PLACES,
    **containers.PLACES,
    **numbers.PLACES,
    **arrays.PLACES,
    **functions.PLACES,
    **process.PLACES,
    **lookups.PLACES,
}

# Where a plan would freeze the value, and no guard could see that: the step is not recorded.
REFUSED = {
    *("eval", "eval_code", "text_run", "count", "iterator", "generator", "cycle", "repeat", "zip"),
    *("random", "numpy_random", "random_state", "random_module", "lock", "context", "asyncio_future", "finalizer"),
    "generator_seed",
    *("text_executed", "eval_attribute", "eval_renamed", "function_of_code"),
}

# The same where only the code that runs is followed.
REFUSED_AS_CALLED = {*REFUSED, "custom_op"}

# What docs/guards.md says is out of sight, as names of scripts in which nobody sees it.
OUT_OF_SIGHT = {
    "a file": "file/cell/direct/set/number/after/plain",
    "text in memory": "string_io/cell/direct/set/number/after/plain",
    "references to an object": "reference_count/cell/direct/set/number/after/plain",
    "an object that a plan holds": "weak_and_strong/cell/direct/set/number/after/plain",
    "a name that is kept in data": "python_module/cell/getattr_computed/set/number/after/plain",
    "a context of numbers": "decimal_context/cell/direct/set/integer/after/plain",
    "the name of a thread": "thread_name/cell/direct/set/integer/after/plain",
    "how many names a library's module has": "torch_attribute/cell/own_dict_len/delete/number/after/plain",
    "a given context of numbers": "itself/cell/asked/inside/context/after/plain",
    "bytes in memory": "itself/cell/asked/inside/in_memory/after/plain",
    "a hash that goes on": "itself/cell/asked/inside/hash/after/plain",
    "a class that is registered": "abstract_registry/cell/direct/set/number/after/plain",
    "the garbage collector": "collector/cell/direct/set/number/after/plain",
    "settings of NumPy": "numpy_printing/cell/direct/set/integer/after/plain",
    "errors of NumPy": "numpy_errstate/cell/direct/set/number/after/plain",
    "a limit of Python": "recursion_limit/cell/direct/set/number/after/plain",
    "an element of XML": "xml_element/cell/direct/set/number/after/plain",
    "a simple queue": "simple_queue/cell/direct/set/number/after/plain",
    "the size of a storage": "storage_size/cell/direct/set/number/after/plain",
    "a place in an error": "error_start/cell/direct/set/number/after/plain",
    "metadata of a dtype": "dtype_metadata/cell/direct/set/number/after/plain",
    "the name of a class": "class_name/cell/direct/set/number/after/plain",
}
