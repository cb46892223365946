// One fact about a Python object that the captured function can reach: what it sees,
// as 64-bit words and as the object to hold. Rust compares; nothing here decides.
#pragma once
#include <cstring>

#include <torch/csrc/Generator.h>

#include "describe.h"
#include "hooks.h"
#include "metadata.h"
#include "objects.h"
#include "ranks.h"
#include "reducer.h"
#include "values.h"

namespace rote {

// A fact, and what is kept of it between calls.
struct FactEntry {
  FactKind kind;
  PyObject* container;
  PyObject* key;
  PyObject* held;
  uint32_t start;
  mutable PyObject* spec;    // the spec that was looked at last,
  mutable uint64_t number;   // and the number of its placements; of a class, of its attributes; an entry's address
  mutable uint64_t version;  // of a class, or of an object's own dict, when it was looked at last
  Py_hash_t hash;            // of the key of an entry of a dict
  mutable std::unique_ptr<LastMetadata> metadata;  // of a tensor of the state
};

// A number for the placements of a DTensor; quick for a spec seen before.
inline uint64_t placements_of(const FactEntry& fact, PyObject* dtensor) {
  py::object keep;
  PyObject* spec = dtensor_attribute(dtensor, classes.spec_offset, classes.spec_name, keep);
  if (spec != fact.spec) {
    auto now = py::reinterpret_borrow<py::object>(spec);
    fact.number = mix(hash_of(now.attr("placements").ptr()), hash_of(now.attr("mesh").ptr()));
    Py_XSETREF(fact.spec, now.release().ptr());
  }
  return fact.number;
}

inline const PyFunctionObject& as_function(PyObject* function) {
  return *reinterpret_cast<PyFunctionObject*>(function);
}

inline PyTypeObject* as_type(PyObject* type) { return reinterpret_cast<PyTypeObject*>(type); }

// Borrowed; null where there is none.
inline PyObject* dict_item(const FactEntry& fact) {
#if PY_VERSION_HEX < 0x030E0000
  PyObject* item = _PyDict_GetItem_KnownHash(fact.container, fact.key, fact.hash);
#else
  PyObject* item = PyDict_GetItemWithError(fact.container, fact.key);
#endif
  if (!item) forget_error();
  return item;
}

// Which of some names a dict has. Names are texts, which know their hash.
inline std::vector<Py_ssize_t> present(const FactEntry& fact) {
  std::vector<Py_ssize_t> found;  // takes no memory while there is none
  const Py_ssize_t n = PyTuple_GET_SIZE(fact.key);
  for (Py_ssize_t i = 0; i < n; ++i) {
    const int there = PyDict_Contains(fact.container, PyTuple_GET_ITEM(fact.key, i));
    if (there > 0) found.push_back(i);
    if (there < 0) forget_error();
  }
  return found;
}

// Whether the entries of a dict, by identity, decide what a fact sees.
inline bool of_dict(const FactEntry& fact) {
  return fact.kind == kDictItem || fact.kind == kEntrySize || fact.kind == kNoneOf || (fact.kind == kSize && PyDict_Check(fact.container)) ||
         (fact.kind == kItems && PyDict_CheckExact(fact.container));
}

// How many words a fact has.
inline uint32_t width_of(const FactEntry& fact) {
  if (fact.kind == kTensorMeta) return 6;
  if (fact.kind == kGradMeta) return 2;
  return 1;
}

// The object that a fact compares; null where there is none.
inline py::object object_of(const FactEntry& fact) {
  switch (fact.kind) {
    case kDictItem:
    case kEntrySize:
      return py::reinterpret_borrow<py::object>(dict_item(fact));
    case kListItem: {
      Py_ssize_t index = PyLong_AsSsize_t(fact.key);
      if (index >= PyList_GET_SIZE(fact.container)) return py::object();
      return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(fact.container, index));
    }
    case kTupleItem: {
      PyObject* tuple = PyDict_GetItemWithError(fact.container, PyTuple_GET_ITEM(fact.key, 0));
      if (!tuple) forget_error();
      Py_ssize_t index = PyLong_AsSsize_t(PyTuple_GET_ITEM(fact.key, 1));
      Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(fact.key, 2));
      if (!tuple || !PyTuple_CheckExact(tuple) || PyTuple_GET_SIZE(tuple) != size) return py::object();
      return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(tuple, index));
    }
    case kCell:
      return py::reinterpret_borrow<py::object>(PyCell_GET(fact.container));
    case kAttribute: {
      py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttr(fact.container, fact.key));
      if (!value) forget_error();
      return value;
    }
    case kItems:
      return entries_held(fact.container, fact.key == Py_True);
    case kWithin:
      return held_within(fact.key);
    case kFunction: {
      auto part = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object ? object : Py_None); };
      const auto& function = as_function(fact.container);
      return py::make_tuple(part(function.func_code), part(function.func_defaults), part(function.func_kwdefaults),
                            part(function.func_name), part(function.func_qualname), part(function.func_doc),
                            part(function.func_module), part(function.func_dict));
    }
    case kTypeOf:
      return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(fact.container)));
    case kContextVar: {
      PyObject* value = nullptr;
      if (PyContextVar_Get(fact.container, nullptr, &value) < 0) forget_error();
      return py::reinterpret_steal<py::object>(value);
    }
    case kTensorMeta:
      return py::make_tuple(py::reinterpret_borrow<py::object>(own_dict(fact.container) ? own_dict(fact.container) : Py_None), hooks_of(THPVariable_Unpack(fact.container)));
    case kMetadata:
      return is_tensor(fact.container) ? py::object(hooks_of(THPVariable_Unpack(fact.container))) : py::none();
    case kOwn:
      return py::reinterpret_borrow<py::object>(own_dict(fact.container));
    case kMember: {
      descrgetfunc get = Py_TYPE(fact.key)->tp_descr_get;
      py::object value = py::reinterpret_steal<py::object>(
          get ? get(fact.key, fact.container, reinterpret_cast<PyObject*>(Py_TYPE(fact.container))) : nullptr);
      if (!value) forget_error();
      return value;
    }
    case kBases:
      return py::reinterpret_borrow<py::object>(as_type(fact.container)->tp_mro);
    case kClass:
      return class_entries_held(as_type(fact.container), fact.key);
    case kReferents:
      return referents_held(fact.container);
    case kWeak:  // held, it would never go
      return py::none();
    default:
      return py::reinterpret_borrow<py::object>(fact.container);
  }
}

// Whether a fact says of a tensor only which memory it lies in: the words of the call say the rest of an argument.
inline bool is_argument(const FactEntry& fact) { return fact.kind == kMetadata && fact.key == Py_True; }

// The metadata of a tensor that is no state, or a generator.
inline uint64_t look_of(const FactEntry& fact) {
  if (THPGenerator_Check(fact.container))
    return reinterpret_cast<THPGenerator*>(fact.container)->cdata.current_seed();
  const at::Tensor& outer = THPVariable_Unpack(fact.container);
  uint64_t hash = mix(meta_word(settled_tensor(fact.container)), grad_flags(outer));
  if (is_dtensor(fact.container)) {
    hash = mix(mix(hash, placements_of(fact, fact.container)), wrapper_word(outer));
    py::object keep;
    PyObject* inner =
        dtensor_attribute(fact.container, classes.local_tensor_offset, classes.local_tensor_name, keep);
    hash = mix(hash, own_attributes(inner, true));
  }
  if (!outer.is_leaf() && !outer.retains_grad()) return hash;  // to ask is worth a warning of torch's
  const at::Tensor& grad = outer.grad();
  if (!grad.defined()) return hash;
  py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  hash = mix(mix(hash, grad_word(grad, wrapped.ptr())), address(Py_TYPE(wrapped.ptr())));
  return mix(hash, own_attributes(wrapped.ptr(), true));
}

// Reads how many entries a container in a dict has, which the dict held when it was looked up last.
inline void read_size_of_entry(const FactEntry& fact, uint64_t* out) {
  auto* item = reinterpret_cast<PyObject*>(fact.number);
  out[0] = item ? mix(fact.number, entry_count(item)) : 0;
}

// What a function is made of; without its names and its text, if it has not been called. A dict of its own that holds
// nothing is as good as none.
inline uint64_t function_word(const PyFunctionObject& function, bool called) {
  // Two chains side by side: there are many functions, and each step of a chain waits for the one before.
  const uint64_t runs = mix(mix(address(function.func_code), address(function.func_defaults)), address(function.func_kwdefaults));
  const uint64_t own = how_many(function.func_dict);
  if (!called) return mix(runs, own);
  const uint64_t named = mix(mix(address(function.func_name), address(function.func_qualname)), address(function.func_doc));
  return mix(mix(mix(runs, address(function.func_module)), named), own);
}

// The attributes of an object's own, found again while its dict is the same.
inline uint64_t own_word(const FactEntry& fact) {
  if (fact.key != Py_True) return own_attributes(fact.container, false);
  PyObject* own = own_dict(fact.container);
  const uint64_t version = own && PyDict_Check(own) ? dict_version(own) : 0;
  if (version == 0 || version != fact.version) {
    fact.number = own_attributes(fact.container, true);
    fact.version = version;
  }
  return fact.number;
}

// The word of a fact of a frequent kind, which needs no more of the fact than this. False: it is of another kind.
// `whole`: the key is True.
inline bool read_frequent(FactKind kind, PyObject* container, bool whole, uint64_t* out) {
  switch (kind) {
    case kFunction:
      out[0] = function_word(as_function(container), !whole);
      return true;
    case kCell:
      out[0] = address(PyCell_GET(container));
      return true;
    case kSize:
      out[0] = static_cast<uint64_t>(entry_count(container));
      return true;
    case kTypeOf:
      out[0] = address(Py_TYPE(container));
      return true;
    default:
      return false;
  }
}

// Reads the words of a fact, except those of gradients and of shared memory.
__attribute__((always_inline)) inline void read_words(const FactEntry& fact, uint64_t* out) {
  if (read_frequent(fact.kind, fact.container, fact.key == Py_True, out)) return;
  switch (fact.kind) {
    case kDictItem: {  // the frequent kind: no reference counting
      out[0] = address(dict_item(fact));
      return;
    }
    case kOwn:
      out[0] = own_word(fact);
      return;
    case kNoneOf:
      out[0] = 0;
      for (Py_ssize_t i : present(fact)) out[0] = mix(out[0], static_cast<uint64_t>(i));
      return;
    case kEntryCount: {
      PyObject* item = dict_item(fact);
      out[0] = item ? mix(address(Py_TYPE(item)), entry_count(item)) : 0;
      return;
    }
    case kEntrySize:
      fact.number = address(dict_item(fact));
      read_size_of_entry(fact, out);
      return;
    case kTensorMeta: {  // local storage, data, meta; part in autograd; spec; attributes
      const at::Tensor& outer = THPVariable_Unpack(fact.container);
      bool distributed = is_dtensor(fact.container);
      py::object keep;
      PyObject* inner = distributed ? dtensor_attribute(fact.container, classes.local_tensor_offset,
                                                        classes.local_tensor_name, keep)
                                    : fact.container;
      bool plain = reinterpret_cast<PyObject*>(Py_TYPE(inner)) != classes.async_collective_tensor;
      at::Tensor waited = plain ? at::Tensor() : settled_tensor(inner, false);
      const at::Tensor& local = plain ? THPVariable_Unpack(inner) : waited;
      if (!fact.metadata) fact.metadata = std::make_unique<LastMetadata>();
      fact.metadata->read(outer, local, distributed);
      out[0] = fact.metadata->storage;
      // With the key True, of a region: the memory may be freed and taken again, as FSDP2 does, since what is bound
      // follows the storage; and hooks are outside.
      const bool of_region = fact.key == Py_True;
      out[1] = of_region ? 0 : fact.metadata->data;
      out[2] = fact.metadata->meta;
      out[3] = grad_flags(outer, !of_region);
      if (outer.is_view()) out[3] = mix(out[3], address(root_of(outer).unsafeGetTensorImpl()));
      out[4] = distributed ? mix(placements_of(fact, fact.container), fact.metadata->wrapper) : 0;
      out[5] = mix(address(Py_TYPE(fact.container)), own_attributes(fact.container, false));
      if (distributed) out[5] += own_attributes(inner, true);
      return;
    }
    case kGroup: {  // the process group registered under a name
      const char* name = PyUnicode_AsUTF8(fact.container);
      auto group = name ? find_group(name) : c10::intrusive_ptr<c10d::ProcessGroup>();
      out[0] = group ? group_number(group) + 1 : 0;
      return;
    }
    case kReducer:
      out[0] = reducer_word(fact.container);
      return;
    case kItems:
      out[0] = entries(fact.container, fact.key == Py_True);
      return;
    case kWithin:
      out[0] = within(fact.key);
      return;
    case kBuffer:
      out[0] = buffer(fact.container, fact.key != Py_True);
      return;
    case kBases:
      out[0] = address(as_type(fact.container)->tp_mro);
      return;
    case kClass: {
      const uint64_t version = class_version(as_type(fact.container));
      if (version == 0 || version != fact.version) {
        fact.number = class_entries(as_type(fact.container), fact.key);
        fact.version = version;
      }
      out[0] = fact.number;
      return;
    }
    case kWeak:
      out[0] = address(referent(fact.container).ptr());
      return;
    case kMetadata:
      out[0] = is_argument(fact) ? 0 : look_of(fact);
      return;
    case kReferents:
      out[0] = fact.key == Py_True ? position(fact.container) : referents(fact.container);
      return;
    default:
      out[0] = number_of(object_of(fact));
  }
}

// Whether an object is a float, Python's own or NumPy's: a user's class may compute otherwise. (`_uses.is_number`.)
inline bool is_number(PyObject* object) {
  return PyFloat_CheckExact(object) ||
         (PyFloat_Check(object) && std::strncmp(Py_TYPE(object)->tp_name, "numpy.", 6) == 0);
}

}  // namespace rote
