// Python values as words: what is immutable by its content, anything else by
// identity. Words that differ stand for values that differ; equal words may
// stand for values that only `same` tells apart.
#pragma once
#include <cstring>
#include <vector>

#include <torch/csrc/Device.h>

#include "describe.h"
#include "objects.h"

namespace rote {

// A device as plans write it. The CPU has no index.
inline c10::Device device_of(uint8_t kind, int8_t index) {
  const auto type = static_cast<c10::DeviceType>(kind);
  return {type, type == c10::DeviceType::CPU ? static_cast<c10::DeviceIndex>(-1) : static_cast<c10::DeviceIndex>(index)};
}

// The attributes that an object has of its own; null when there are none.
inline PyObject* attributes(PyObject* object) {
  PyObject** place = _PyObject_GetDictPtr(object);
  return place && *place && PyDict_CheckExact(*place) && PyDict_GET_SIZE(*place) > 0 ? *place : nullptr;
}

// How a value is compared.
enum class Form : uint8_t {
  kIdentity,
  kFloat,
  kInteger,
  kText,      // text and bytes
  kComplex,
  kDevice,
  kNumber,    // one of NumPy's that is none of Python's
  kSequence,  // tuples and lists
  kSet,       // in the order in which it is walked, which code may depend on
  kMapping,
  kFields,    // ranges, slices, partial functions
  kMethod,
  kBuiltin,   // a method of a built-in object
  kReferent,  // a proxy or a view of a dict
};

// A class that Python code defines, once its module has been imported.
class LateClass {
 public:
  constexpr LateClass(const char* module, const char* name) : module_(module), name_(name) {}

  PyTypeObject* get() {
    if (!found_) {
      PyObject* module = PyDict_GetItemString(PyImport_GetModuleDict(), module_);  // borrowed
      if (!module) return nullptr;
      found_ = PyObject_GetAttrString(module, name_);  // kept as long as the process
      if (!found_) forget_error();
    }
    return reinterpret_cast<PyTypeObject*>(found_);
  }

 private:
  const char* module_;
  const char* name_;
  PyObject* found_ = nullptr;
};
inline LateClass partial_class{"functools", "partial"};
inline LateClass enum_class{"enum", "EnumType"};
inline LateClass numpy_number{"numpy", "number"};
inline LateClass numpy_bool{"numpy", "bool_"};

// The built-in class whose content a value's class only adds attributes to; null for any other class.
inline PyTypeObject* content_class(PyTypeObject* type) {
  if (type == &THPSizeType) return &PyTuple_Type;  // its size counts the first item
  PyTypeObject* base = PyType_HasFeature(type, Py_TPFLAGS_LONG_SUBCLASS)      ? &PyLong_Type
                       : PyType_HasFeature(type, Py_TPFLAGS_UNICODE_SUBCLASS) ? &PyUnicode_Type
                       : PyType_HasFeature(type, Py_TPFLAGS_BYTES_SUBCLASS)   ? &PyBytes_Type
                       : PyType_HasFeature(type, Py_TPFLAGS_TUPLE_SUBCLASS)   ? &PyTuple_Type
                       : PyType_IsSubtype(type, &PyFloat_Type)                ? &PyFloat_Type
                       : PyType_IsSubtype(type, &PyComplex_Type)              ? &PyComplex_Type
                       : PyType_IsSubtype(type, &PyFrozenSet_Type)            ? &PyFrozenSet_Type
                                                                              : nullptr;
  if (!base) return nullptr;
  PyTypeObject* members = enum_class.get();
  if (members && PyType_IsSubtype(Py_TYPE(type), members)) return nullptr;  // each is one object
  Py_ssize_t size = base->tp_basicsize;
  if (type->tp_dictoffset != 0 && !PyType_HasFeature(type, Py_TPFLAGS_MANAGED_DICT)) size += sizeof(PyObject*);
  if (type->tp_weaklistoffset > 0 && base->tp_weaklistoffset == 0) size += sizeof(PyObject*);
  return type->tp_basicsize == size ? base : nullptr;  // else it has slots
}

inline bool has_attribute(PyTypeObject* type, const char* name) {
  return PyObject_HasAttrString(reinterpret_cast<PyObject*>(type), name);
}

// Whether a tuple of a class of its own is nothing but its items, which have names.
inline bool is_named_tuple(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return PyType_HasFeature(type, Py_TPFLAGS_TUPLE_SUBCLASS) && content_class(type) && !attributes(value) &&
         has_attribute(type, "_fields");
}

inline Form form_of_content(PyTypeObject* type) {
  if (type == &PyFloat_Type) return Form::kFloat;
  if (type == &PyLong_Type) return Form::kInteger;
  if (type == &PyUnicode_Type || type == &PyBytes_Type) return Form::kText;
  if (type == &PyTuple_Type || type == &PyList_Type) return Form::kSequence;
  if (type == &PyComplex_Type) return Form::kComplex;
  if (type == &PyFrozenSet_Type || type == &PySet_Type) return Form::kSet;
  if (type == &PyDict_Type) return Form::kMapping;
  return Form::kIdentity;
}

inline Form form_of(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  Form form = form_of_content(type);
  if (form != Form::kIdentity || value == Py_None || PyBool_Check(value) || PyType_Check(value)) return form;
  if (type == &PyFunction_Type || is_tensor(value)) return Form::kIdentity;
  if (type == &PyMethod_Type) return Form::kMethod;
  if (type == &PyCFunction_Type) return Form::kBuiltin;
  if (type == &PyRange_Type || type == &PySlice_Type || type == partial_class.get()) return Form::kFields;
  if (type == &PyDictProxy_Type || type == &PyDictKeys_Type || type == &PyDictValues_Type || type == &PyDictItems_Type)
    return Form::kReferent;
  if (THPDevice_Check(value)) return Form::kDevice;
  if (PyTypeObject* base = content_class(type)) return form_of_content(base);
  for (LateClass* kind : {&numpy_number, &numpy_bool})
    if (PyTypeObject* numbers = kind->get(); numbers && PyType_IsSubtype(type, numbers)) return Form::kNumber;
  return Form::kIdentity;
}

// Compares one value, of at most as many parts as `kMostParts`; one of more is compared by identity.
class Content {
 public:
  enum Which : uint8_t {
    kImmutable,  // lists and other containers that may change are compared by identity
    kAll,        // they are compared by content: for values that are read anew at every call
  };

  // `kept`: takes what is compared by identity, so that no other object gets its address while it is held.
  explicit Content(Which which, std::vector<py::object>* kept = nullptr) : which_(which), kept_(kept) {}

  uint64_t word(PyObject* value) {
    size_t before = kept_ ? kept_->size() : 0;
    left_ = kMostParts;
    uint64_t found = read(value);
    if (left_ >= 0) return found;
    if (kept_) kept_->resize(before);
    return identity(value);
  }

  // Whether two values whose words are equal are equal in all that a program can compute from them.
  bool same(PyObject* a, PyObject* b) {
    left_ = kMostParts;
    return equal(a, b) && left_ >= 0;
  }

 private:
  static constexpr int kMostParts = 1024;
  static constexpr int kMostDepth = 24;
  using Parts = std::vector<py::object>;

  uint64_t identity(PyObject* value) {
    if (kept_) kept_->push_back(py::reinterpret_borrow<py::object>(value));
    return address(value);
  }

  Form form_here(PyObject* value) const {
    Form form = form_of(value);
    bool changes = form == Form::kMapping || form == Form::kFields || form == Form::kReferent ||
                   PyList_CheckExact(value) || PySet_Check(value);
    bool fixed = PyRange_Check(value) || PySlice_Check(value);
    return which_ == kImmutable && changes && !fixed ? Form::kIdentity : form;
  }

  uint64_t read(PyObject* value) {
    if (--left_ < 0) return 0;
    Form form = form_here(value);
    if (form == Form::kIdentity) return identity(value);
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(value));
    uint64_t hash = mix(static_cast<uint64_t>(form), identity(type));
    if (form <= Form::kNumber) {
      hash = mix(hash, atom(value, form));
      if (PyObject* own = own_attributes(value)) hash = mix(hash, read(own));
      return hash;
    }
    if (++depth_ > kMostDepth) left_ = -1;
    if (form == Form::kBuiltin) hash = mix(hash, address(reinterpret_cast<PyCFunctionObject*>(value)->m_ml));
    Parts all;
    if (left_ >= 0) all = parts(value, form);
    hash = mix(hash, all.size());
    for (const py::object& part : all) {
      hash = mix(hash, read(part.ptr()));
      if (left_ < 0) break;
    }
    --depth_;
    return hash;
  }

  bool equal(PyObject* a, PyObject* b) {
    if (a == b) return true;
    if (--left_ < 0 || Py_TYPE(a) != Py_TYPE(b)) return false;
    Form form = form_here(a);
    if (form == Form::kIdentity) return false;
    if (form <= Form::kNumber) {
      if (!equal_atoms(a, b, form)) return false;
      PyObject *x = own_attributes(a), *y = own_attributes(b);
      return x == y || (x && y && equal(x, y));
    }
    if (form == Form::kBuiltin &&
        reinterpret_cast<PyCFunctionObject*>(a)->m_ml != reinterpret_cast<PyCFunctionObject*>(b)->m_ml)
      return false;
    if (depth_ >= kMostDepth) return false;
    Parts x = parts(a, form), y = parts(b, form);
    if (x.size() != y.size() || x.size() > kMostParts) return false;  // there may be more
    ++depth_;
    bool all = true;
    for (size_t i = 0; all && i < x.size(); ++i) all = equal(x[i].ptr(), y[i].ptr());
    --depth_;
    return all;
  }

  // The attributes of an instance of a class that is derived from a built-in one.
  static PyObject* own_attributes(PyObject* value) {
    return form_of_content(Py_TYPE(value)) == Form::kIdentity ? attributes(value) : nullptr;
  }

  static std::vector<uint8_t> bytes(PyObject* number) {
    py::bytes content = py::reinterpret_steal<py::bytes>(PyObject_CallMethod(number, "tobytes", nullptr));
    if (!content) throw py::error_already_set();
    const char* start = PyBytes_AS_STRING(content.ptr());
    return {start, start + PyBytes_GET_SIZE(content.ptr())};
  }

 public:
  static uint64_t float_bits(PyObject* value) {
    double number = PyFloat_AS_DOUBLE(value);
    uint64_t bits;
    std::memcpy(&bits, &number, sizeof bits);
    return bits;
  }

 private:
  static uint64_t atom(PyObject* value, Form form) {
    switch (form) {
      case Form::kFloat: return float_bits(value);
      case Form::kInteger: {
        int overflow = 0;
        long long small = PyLong_AsLongLongAndOverflow(value, &overflow);
        return overflow ? static_cast<uint64_t>(PyLong_Type.tp_hash(value)) : static_cast<uint64_t>(small);
      }
      case Form::kText:
        return static_cast<uint64_t>(PyUnicode_Check(value) ? PyUnicode_Type.tp_hash(value)
                                                            : PyBytes_Type.tp_hash(value));
      case Form::kComplex: {
        Py_complex number = PyComplex_AsCComplex(value);
        uint64_t bits[2];
        std::memcpy(bits, &number, sizeof bits);
        return mix(mix(0x43, bits[0]), bits[1]);
      }
      case Form::kDevice: {
        c10::Device device = reinterpret_cast<THPDevice*>(value)->device;
        return static_cast<uint64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index());
      }
      default: {
        uint64_t hash = 0x4e;
        for (uint8_t byte : bytes(value)) hash = mix(hash, byte);
        return hash;
      }
    }
  }

  static bool equal_atoms(PyObject* a, PyObject* b, Form form) {
    switch (form) {
      case Form::kInteger:
      case Form::kText: {
        PyTypeObject* type = form == Form::kInteger  ? &PyLong_Type
                             : PyUnicode_Check(a) ? &PyUnicode_Type
                                                  : &PyBytes_Type;
        py::object same = py::reinterpret_steal<py::object>(type->tp_richcompare(a, b, Py_EQ));
        if (!same) forget_error();
        return same.ptr() == Py_True;
      }
      case Form::kComplex: {
        Py_complex x = PyComplex_AsCComplex(a), y = PyComplex_AsCComplex(b);
        return std::memcmp(&x, &y, sizeof x) == 0;
      }
      case Form::kNumber: return bytes(a) == bytes(b);
      default: return atom(a, form) == atom(b, form);
    }
  }

  // What a value is made of; all of it is compared in turn.
  static Parts parts(PyObject* value, Form form) {
    Parts all;
    auto add = [&](PyObject* part) { all.push_back(py::reinterpret_borrow<py::object>(part)); };
    switch (form) {
      case Form::kSequence: {
        Py_ssize_t n = PySequence_Fast_GET_SIZE(value);
        for (Py_ssize_t i = 0; i < n && i <= kMostParts; ++i) add(PySequence_Fast_GET_ITEM(value, i));
        break;
      }
      case Form::kSet: {
        PyTypeObject* base = PyFrozenSet_Check(value) ? &PyFrozenSet_Type : &PySet_Type;
        py::object walk = py::reinterpret_steal<py::object>(base->tp_iter(value));
        while (walk && all.size() <= kMostParts) {
          PyObject* item = PyIter_Next(walk.ptr());
          if (!item) break;
          all.push_back(py::reinterpret_steal<py::object>(item));
        }
        if (PyErr_Occurred()) throw py::error_already_set();
        break;
      }
      case Form::kMapping: {
        PyObject *key, *item;
        Py_ssize_t position = 0;
        while (all.size() <= kMostParts && PyDict_Next(value, &position, &key, &item)) {
          add(key);
          add(item);
        }
        break;
      }
      case Form::kFields: {
        bool partial = Py_TYPE(value) == partial_class.get();
        static const char* const bounds[] = {"start", "stop", "step"};
        static const char* const call[] = {"func", "args", "keywords"};
        for (const char* name : partial ? call : bounds) {
          py::object field = py::reinterpret_steal<py::object>(PyObject_GetAttrString(value, name));
          if (!field) throw py::error_already_set();
          all.push_back(std::move(field));
        }
        break;
      }
      case Form::kMethod:
        add(PyMethod_GET_FUNCTION(value));
        add(PyMethod_GET_SELF(value));
        break;
      case Form::kBuiltin: {
        PyObject* self = PyCFunction_GET_SELF(value);
        add(self ? self : Py_None);
        break;
      }
      default: {  // a class of C with one referent
        PyObject* found = nullptr;
        auto take = [](PyObject* object, void* place) {
          *static_cast<PyObject**>(place) = object;
          return 1;
        };
        Py_TYPE(value)->tp_traverse(value, take, &found);
        add(found ? found : Py_None);
      }
    }
    if (PyObject* own = own_attributes(value)) add(own);
    return all;
  }

  Which which_;
  std::vector<py::object>* kept_;
  int left_ = kMostParts;
  int depth_ = 0;
};

// The hash of a placement, of a mesh, or of a tuple of these; by identity without one.
inline uint64_t hash_of(PyObject* value) {
  if (PyTuple_Check(value)) {
    uint64_t hash = PyTuple_GET_SIZE(value);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) hash = mix(hash, hash_of(PyTuple_GET_ITEM(value, i)));
    return hash;
  }
  Py_hash_t hash = PyObject_Hash(value);
  if (hash == -1 && PyErr_Occurred()) {
    forget_error();
    return address(value);
  }
  return mix(address(Py_TYPE(value)), static_cast<uint64_t>(hash));
}

// Whether placements or meshes are equal, in class and by their own `==`.
inline bool equal_placed(PyObject* a, PyObject* b) {
  if (a == b) return true;
  if (Py_TYPE(a) != Py_TYPE(b)) return false;
  if (PyTuple_Check(a)) {
    Py_ssize_t n = PyTuple_GET_SIZE(a);
    if (n != PyTuple_GET_SIZE(b)) return false;
    for (Py_ssize_t i = 0; i < n; ++i)
      if (!equal_placed(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i))) return false;
    return true;
  }
  int same = PyObject_RichCompareBool(a, b, Py_EQ);
  if (same < 0) forget_error();
  return same == 1;
}

}  // namespace rote
