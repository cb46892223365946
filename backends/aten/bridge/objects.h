// What guards read of Python objects, from where the interpreter keeps it:
// own dicts, classes, sizes, entries, buffers. No method that a user's class
// may define is called.
#pragma once
#include <cstring>
#include <vector>

#include <torch/csrc/Size.h>

#include "describe.h"

namespace rote {

inline uint64_t mix(uint64_t hash, uint64_t word) {
  hash ^= word + 0x9e3779b97f4a7c15ull + (hash << 6) + (hash >> 2);
  return hash * 0xff51afd7ed558ccdull;
}

inline uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// The dict of an object's own attributes; null where there is none yet.
inline PyObject* own_dict(PyObject* object) {
  PyObject** at = _PyObject_GetDictPtr(object);
  if (!at) forget_error();
  return at ? *at : nullptr;
}

// Another number after each change of a dict's entries, never one that any dict has had (PEP 509); 0 where Python
// counts none: from 3.12 on, the version of a dict is on its way out.
inline uint64_t dict_version(PyObject* dict) {
#if PY_VERSION_HEX < 0x030C0000
  return reinterpret_cast<PyDictObject*>(dict)->ma_version_tag;
#else
  return 0;
#endif
}

// Which dict it is, and how many entries it has; 0 for none.
inline uint64_t how_many(PyObject* dict) {
  return dict && PyDict_GET_SIZE(dict) ? mix(address(dict), PyDict_GET_SIZE(dict)) : 0;
}

// A number for the attributes that an object has of its own: which dict holds
// them, how many there are and, if `names`, which and in what order. 0: none.
inline uint64_t own_attributes(PyObject* object, bool names) {
  PyObject* own = own_dict(object);
  uint64_t hash = own && PyDict_Check(own) ? how_many(own) : 0;
  if (hash && names) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(own, &position, &key, &value)) hash = mix(hash, address(key));
  }
  return hash;
}

inline PyTypeObject* deque_type() {
  static auto* type = reinterpret_cast<PyTypeObject*>(
      py::module_::import("collections").attr("deque").cast<py::object>().release().ptr());
  return type;
}

// The class of the interpreter's own that keeps a container's entries.
inline PyTypeObject* container_type(PyObject* container) {
  if (PyODict_Check(container)) return &PyODict_Type;
  if (PyDict_Check(container)) return &PyDict_Type;
  if (PyList_Check(container)) return &PyList_Type;
  if (PySet_Check(container)) return &PySet_Type;
  if (PyFrozenSet_Check(container)) return &PyFrozenSet_Type;
  if (PyTuple_Check(container)) return &PyTuple_Type;
  if (PyType_IsSubtype(Py_TYPE(container), deque_type())) return deque_type();
  return Py_TYPE(container);
}

inline Py_ssize_t entry_count(PyObject* container) {
  if (PyDict_Check(container)) return PyDict_GET_SIZE(container);
  if (PyList_Check(container)) return PyList_GET_SIZE(container);
  if (PyAnySet_Check(container)) return PySet_GET_SIZE(container);
  PyTypeObject* type = container_type(container);
  lenfunc length = type->tp_as_sequence ? type->tp_as_sequence->sq_length : nullptr;
  Py_ssize_t n = length ? length(container) : PyObject_Size(container);
  if (n < 0) forget_error();
  return n;
}

// Calls `visit` with every entry in its order: keys alone of a dict, unless `values`.
template <typename Visit>
void each_entry(PyObject* container, bool values, Visit&& visit) {
  if (PyList_Check(container)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container); ++i) visit(PyList_GET_ITEM(container, i));
    return;
  }
  // An ordered dict keeps its order beside the dict: up to one entry has but one.
  if (PyDict_Check(container) && (!PyODict_Check(container) || PyDict_GET_SIZE(container) < 2)) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(container, &position, &key, &value)) {
      visit(key);
      if (values) visit(value);
    }
    return;
  }
  PyTypeObject* type = container_type(container);
  py::object iterator = py::reinterpret_steal<py::object>(
      type->tp_iter ? type->tp_iter(container) : PyObject_GetIter(container));
  if (!iterator) return forget_error();
  while (true) {
    py::object item = py::reinterpret_steal<py::object>(PyIter_Next(iterator.ptr()));
    if (!item) break;
    visit(item.ptr());
    if (!values || !PyODict_Check(container)) continue;
    PyObject* value = PyDict_GetItemWithError(container, item.ptr());
    if (value) visit(value);
  }
  forget_error();
}

// A number for what a container holds, by identity.
inline uint64_t entries(PyObject* container, bool values) {
  uint64_t hash = 0x4954;
  each_entry(container, values, [&](PyObject* item) { hash = mix(hash, address(item)); });
  return hash;
}

inline py::object entries_held(PyObject* container, bool values) {
  py::list all;
  each_entry(container, values, [&](PyObject* item) { all.append(py::reinterpret_borrow<py::object>(item)); });
  return py::tuple(all);
}

// Calls `visit` with the class and the entries of each holder, and with what attributes it has: see `_within.py`.
template <typename Visit>
void each_within(PyObject* holders, Visit&& visit) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(holders); ++i) {
    PyObject* holder = PyTuple_GET_ITEM(holders, i);
    PyTypeObject* type = Py_TYPE(holder);
    visit(reinterpret_cast<PyObject*>(type));
    constexpr unsigned long containers = Py_TPFLAGS_LIST_SUBCLASS | Py_TPFLAGS_DICT_SUBCLASS | Py_TPFLAGS_TUPLE_SUBCLASS;
    if ((type->tp_flags & containers) || PyAnySet_Check(holder) || PyType_IsSubtype(type, deque_type()))
      each_entry(holder, true, visit);
    visit(Py_None);  // where the entries end
    PyObject* own = own_dict(holder);
    if (own && PyDict_Check(own)) each_entry(own, true, visit);
  }
}

// A number for all that the holders hold, by identity.
inline uint64_t within(PyObject* holders) {
  uint64_t hash = 0x5749;
  each_within(holders, [&](PyObject* item) { hash = mix(hash, address(item)); });
  return hash;
}

inline py::object held_within(PyObject* holders) {
  py::list all;
  each_within(holders, [&](PyObject* item) { all.append(py::reinterpret_borrow<py::object>(item)); });
  return py::tuple(all);
}

// 64 bits of memory, in four lanes; each step is one-to-one in the word read.
inline uint64_t digest(const void* data, size_t n) {
  const auto* at = static_cast<const uint8_t*>(data);
  uint64_t lanes[4] = {0x42554646, 0x9e3779b97f4a7c15ull, 0xc2b2ae3d27d4eb4full, 0x165667b19e3779f9ull};
  auto take = [](uint64_t& lane, uint64_t word) {
    lane = (lane ^ word) * 0xff51afd7ed558ccdull;
    lane = lane << 29 | lane >> 35;
  };
  size_t left = n;
  for (; left >= 32; left -= 32, at += 32) {
    uint64_t words[4];
    std::memcpy(words, at, 32);
    for (int i = 0; i < 4; ++i) take(lanes[i], words[i]);
  }
  uint64_t rest[4] = {};
  if (left) std::memcpy(rest, at, left);
  uint64_t hash = n;
  for (int i = 0; i < 4; ++i) {
    take(lanes[i], rest[i]);
    hash = mix(hash, lanes[i]);
  }
  return hash;
}

// The objects that an object of the interpreter's own classes points to, as the
// garbage collector sees them.
template <typename Visit>
void each_referent(PyObject* object, Visit&& visit) {
  traverseproc traverse = Py_TYPE(object)->tp_traverse;
  if (!traverse) return;
  auto call = [](PyObject* item, void* context) -> int {
    (*static_cast<std::remove_reference_t<Visit>*>(context))(item);
    return 0;
  };
  traverse(object, call, &visit);
}

inline uint64_t referents(PyObject* object) {
  uint64_t hash = 0x5246;
  each_referent(object, [&](PyObject* item) { hash = mix(hash, address(item)); });
  return hash;
}

// A number for where an iterator of the interpreter's own stands: all that its memory says.
inline uint64_t position(PyObject* iterator) {
  const PyTypeObject* type = Py_TYPE(iterator);
  const char* memory = reinterpret_cast<const char*>(iterator) + sizeof(PyObject);
  return mix(referents(iterator), digest(memory, type->tp_basicsize - sizeof(PyObject)));
}

inline py::object referents_held(PyObject* object) {
  py::list all;
  each_referent(object, [&](PyObject* item) { all.append(py::reinterpret_borrow<py::object>(item)); });
  return py::tuple(all);
}

// What a weak reference or proxy refers to; null where that is gone.
inline py::object referent(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) forget_error();
  return py::reinterpret_steal<py::object>(found);
#else
  PyObject* found = PyWeakref_GetObject(reference);
  return py::reinterpret_borrow<py::object>(found == Py_None ? nullptr : found);
#endif
}

// Calls `visit(key, value)` for what classes of libraries say: their methods and
// public attributes, and those private attributes that `names` holds.
template <typename Visit>
void each_class_entry(PyTypeObject* type, PyObject* names, Visit&& visit) {
  PyObject* mro = type->tp_mro;
  for (Py_ssize_t i = 0; mro && i < PyTuple_GET_SIZE(mro); ++i) {
    auto* base = reinterpret_cast<PyTypeObject*>(PyTuple_GET_ITEM(mro, i));
    if ((base->tp_flags & (Py_TPFLAGS_HEAPTYPE | Py_TPFLAGS_IMMUTABLETYPE)) != Py_TPFLAGS_HEAPTYPE) continue;
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(base->tp_dict, &position, &key, &value)) {
      if (!PyUnicode_Check(key) || PyUnicode_GET_LENGTH(key) == 0) continue;
      bool kept = PyUnicode_READ_CHAR(key, 0) == '_' && !PyCallable_Check(value) && !Py_TYPE(value)->tp_descr_get;
      if (kept && !(names && PyAnySet_Check(names) && PySet_Contains(names, key) == 1)) continue;
      visit(key, value);
    }
  }
}

inline uint64_t class_entries(PyTypeObject* type, PyObject* names) {
  uint64_t hash = mix(0x434c, address(type->tp_mro));
  each_class_entry(type, names, [&](PyObject* key, PyObject* value) {
    hash = mix(mix(hash, address(key)), address(value));
  });
  return hash;
}

inline py::object class_entries_held(PyTypeObject* type, PyObject* names) {
  py::list all;
  all.append(py::reinterpret_borrow<py::object>(type->tp_mro));
  each_class_entry(type, names,
                   [&](PyObject*, PyObject* value) { all.append(py::reinterpret_borrow<py::object>(value)); });
  return py::tuple(all);
}

// The number that the interpreter gives to a class anew whenever it, or a base,
// changes. 0: none.
inline unsigned class_version(PyTypeObject* type) {
  if (type->tp_version_tag == 0) {
    static PyObject* name = PyUnicode_InternFromString("__class__");
    _PyType_Lookup(type, name);  // numbers the class
  }
  return type->tp_version_tag;
}

// A number for a buffer: format, shape and bytes; where it lies and whether it
// can be written in place of the bytes, if not `content`.
inline uint64_t buffer(PyObject* array, bool content) {
  Py_buffer view;
  if (PyObject_GetBuffer(array, &view, PyBUF_FULL_RO) != 0) {
    forget_error();
    return 0;
  }
  uint64_t hash = mix(0x4255, view.len);
  hash = mix(hash, view.format ? digest(view.format, std::strlen(view.format)) : 0);
  for (int i = 0; view.shape && i < view.ndim; ++i) hash = mix(hash, view.shape[i]);
  if (!content) {
    hash = mix(mix(hash, address(view.buf)), view.readonly);
    for (int i = 0; view.strides && i < view.ndim; ++i) hash = mix(hash, view.strides[i]);
  } else if (PyBuffer_IsContiguous(&view, 'C')) {
    hash = mix(hash, digest(view.buf, view.len));
  } else {
    std::vector<uint8_t> bytes(view.len);
    if (PyBuffer_ToContiguous(bytes.data(), &view, view.len, 'C') != 0) forget_error();
    hash = mix(hash, digest(bytes.data(), bytes.size()));
  }
  PyBuffer_Release(&view);
  return hash;
}

// The builtin class by whose content alone objects of a class are told: itself,
// or the base of one that adds no room for attributes. Null: there is none.
inline PyTypeObject* content_type(PyTypeObject* type) {
  if (type == &THPSizeType) return &PyTuple_Type;  // its size counts the first item
  for (PyTypeObject* base : {&PyBool_Type, &PyLong_Type, &PyFloat_Type, &PyComplex_Type, &PyUnicode_Type,
                             &PyBytes_Type, &PyTuple_Type}) {
    if (type == base) return base;
    if (!PyType_IsSubtype(type, base)) continue;
    bool room = type->tp_dictoffset != 0 || type->tp_basicsize != base->tp_basicsize;
#ifdef Py_TPFLAGS_MANAGED_DICT
    room = room || (type->tp_flags & Py_TPFLAGS_MANAGED_DICT);
#endif
    return room ? nullptr : base;
  }
  return nullptr;
}

// Whether a class is one of NumPy's scalars, which never change.
inline bool numpy_scalar(PyTypeObject* type) {
  if (std::strncmp(type->tp_name, "numpy.", 6) != 0 || std::strcmp(type->tp_name, "numpy.void") == 0) return false;
  for (PyTypeObject* base = type->tp_base; base; base = base->tp_base)
    if (std::strcmp(base->tp_name, "numpy.generic") == 0) return true;
  return false;
}

// Whether two objects have one class and content, bit for bit: -0.0 is not 0.0,
// a NaN is itself. What has attributes equals itself only.
inline bool same_content(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  PyTypeObject* type = content_type(Py_TYPE(a));
  if (type == &PyFloat_Type) {
    double x = PyFloat_AS_DOUBLE(a), y = PyFloat_AS_DOUBLE(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (type == &PyComplex_Type) {
    Py_complex x = PyComplex_AsCComplex(a), y = PyComplex_AsCComplex(b);
    return std::memcmp(&x, &y, sizeof x) == 0;
  }
  if (type == &PyTuple_Type) {
    Py_ssize_t n = PyTuple_GET_SIZE(a);
    if (n != PyTuple_GET_SIZE(b)) return false;
    for (Py_ssize_t i = 0; i < n; ++i)
      if (!same_content(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
    return true;
  }
  if (!type && numpy_scalar(Py_TYPE(a))) {
    uint64_t x = buffer(a, true);
    return x != 0 && x == buffer(b, true);
  }
  if (!type && std::strcmp(Py_TYPE(a)->tp_name, "torch.device") == 0) type = Py_TYPE(a);
  if (!type || !type->tp_richcompare) return false;
  py::object same = py::reinterpret_steal<py::object>(type->tp_richcompare(a, b, Py_EQ));
  if (!same) forget_error();
  return same.ptr() == Py_True;
}

// A number for an object: its address, or its content where nothing else holds
// it, since the next object may come to lie at the same place.
inline uint64_t number_of(const py::object& object) {
  PyObject* value = object.ptr();
  if (!value || Py_REFCNT(value) > 1) return address(value);
  if (PyFloat_CheckExact(value)) {
    double x = PyFloat_AS_DOUBLE(value);
    return mix(0x464c, digest(&x, sizeof x));
  }
  PyTypeObject* type = content_type(Py_TYPE(value));
  Py_hash_t hash = type && type != &PyTuple_Type && type->tp_hash ? type->tp_hash(value) : -1;
  if (hash == -1) forget_error();
  return hash == -1 ? address(value) : mix(address(Py_TYPE(value)), static_cast<uint64_t>(hash));
}

// What an object is, for a message: the content of plain values, the class of others.
inline std::string in_words(PyObject* value) {
  if (PyTuple_CheckExact(value)) {
    std::string all;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i)
      all += (i ? ", " : "") + in_words(PyTuple_GET_ITEM(value, i));
    return "(" + all + ")";
  }
  if (value == Py_None || content_type(Py_TYPE(value)) == Py_TYPE(value) || numpy_scalar(Py_TYPE(value))) {
    py::object repr = py::reinterpret_steal<py::object>(PyObject_Repr(value));
    if (repr) return repr.cast<std::string>();
    forget_error();
  }
  return std::string("a ") + Py_TYPE(value)->tp_name;
}

}  // namespace rote
