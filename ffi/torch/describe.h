// Describes ops as they run: Python arguments and results in, abi.h structs
// out, in schema order with defaults filled in.
#pragma once
#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include <structmember.h>

#include "abi.h"

namespace rote {

// The Python classes that the bridge must know, given by Python at start.
struct Classes {
  PyObject* dtensor = nullptr;
  PyObject* async_collective_tensor = nullptr;
  PyObject* local_tensor_name = nullptr;  // "_local_tensor"
  PyObject* spec_name = nullptr;          // "_spec"
  PyObject* elem_name = nullptr;          // "elem"
  Py_ssize_t local_tensor_offset = 0;     // where a DTensor keeps them, when they are slots
  Py_ssize_t spec_offset = 0;
};
inline Classes classes;

// The plain tensor behind an object: the element of an AsyncCollectiveTensor,
// the object itself otherwise. Undefined for anything that is not a tensor.
inline at::Tensor plain_tensor(PyObject* object) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == classes.async_collective_tensor) {
    py::object elem = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, classes.elem_name));
    if (!elem) throw py::error_already_set();
    return plain_tensor(elem.ptr());
  }
  if (!THPVariable_Check(object)) return at::Tensor();
  return THPVariable_Unpack(object);
}

// Where objects of a class keep a slot; 0 when the attribute is no slot.
inline Py_ssize_t slot_offset(PyObject* kind, PyObject* name) {
  py::object descriptor = py::reinterpret_steal<py::object>(PyObject_GetAttr(kind, name));
  if (!descriptor) throw py::error_already_set();
  if (Py_TYPE(descriptor.ptr()) != &PyMemberDescr_Type) return 0;
  return reinterpret_cast<PyMemberDescrObject*>(descriptor.ptr())->d_member->offset;
}

// An attribute of a DTensor, borrowed; `keep` holds it where it is no slot.
inline PyObject* dtensor_attribute(PyObject* dtensor, Py_ssize_t offset, PyObject* name, py::object& keep) {
  if (offset) {
    PyObject* value = *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(dtensor) + offset);
    if (value) return value;
  }
  keep = py::reinterpret_steal<py::object>(PyObject_GetAttr(dtensor, name));
  if (!keep) throw py::error_already_set();
  return keep.ptr();
}

// One recording: the storages it has seen, held weakly so that no address is
// used twice while it lasts, and the scratch space of the op being described.
class Recording {
 public:
  const Op* describe(PyObject* func, PyObject* args, PyObject* kwargs, PyObject* result) {
    clear();
    const Known& known = know(func);
    const auto& schema = *known.schema;
    const auto& formals = schema.arguments();
    std::vector<Arg>& in = block();
    in.reserve(formals.size());
    Py_ssize_t given = PyTuple_GET_SIZE(args);
    for (size_t i = 0; i < formals.size(); ++i) {
      const c10::Argument& formal = formals[i];
      PyObject* actual = nullptr;
      if (static_cast<Py_ssize_t>(i) < given) {
        actual = PyTuple_GET_ITEM(args, i);
      } else if (kwargs && kwargs != Py_None) {
        actual = PyDict_GetItemString(kwargs, formal.name().c_str());
      }
      Arg arg = actual ? from_python(actual, formal)
                       : formal.default_value() ? from_ivalue(*formal.default_value(), formal)
                                                : Arg{};
      arg.written = formal.alias_info() && formal.alias_info()->isWrite();
      in.push_back(arg);
    }
    std::vector<Arg>& out = block();
    if (PyTuple_Check(result) || PyList_Check(result)) {
      Py_ssize_t n = PySequence_Fast_GET_SIZE(result);
      out.reserve(n);
      for (Py_ssize_t i = 0; i < n; ++i) out.push_back(from_result(PySequence_Fast_GET_ITEM(result, i)));
    } else if (result != Py_None) {
      out.push_back(from_result(result));
    }
    op_.name = known.name.c_str();
    op_.overload = known.overload.c_str();
    op_.args = in.data();
    op_.nargs = static_cast<uint32_t>(in.size());
    op_.outs = out.data();
    op_.nouts = static_cast<uint32_t>(out.size());
    op_.flags = known.flags;
    return &op_;
  }

  // Describes one tensor (not an op): for bindings, outputs and gradients.
  const Tensor* describe_tensor(PyObject* object) {
    clear();
    at::Tensor tensor = plain_tensor(object);
    TORCH_CHECK(tensor.defined(), "not a tensor");
    std::vector<Tensor>& space = tensor_block();
    space.push_back(meta(tensor));
    return space.data();
  }

  bool alive(uint64_t storage) const {
    auto it = storages_.find(reinterpret_cast<c10::StorageImpl*>(storage));
    return it != storages_.end() && !it->second.expired();
  }

 private:
  struct Known {
    const c10::FunctionSchema* schema;
    std::string name;
    std::string overload;
    uint32_t flags;
  };

  static const Known& know(PyObject* func) {
    static auto* known = new std::unordered_map<PyObject*, Known>();
    auto it = known->find(func);
    if (it != known->end()) return it->second;
    Py_INCREF(func);  // op overloads live as long as the process
    py::object schema_object = py::reinterpret_borrow<py::object>(func).attr("_schema");
    const auto& schema = schema_object.cast<const c10::FunctionSchema&>();
    auto handle = c10::Dispatcher::singleton().findSchema({schema.name(), schema.overload_name()});
    TORCH_CHECK(handle, "operator ", schema.name(), " is not registered");
    Known entry{&handle->schema(), schema.name(), schema.overload_name(), 0};
    for (at::Tag tag : handle->getTags()) {
      if (tag == at::Tag::nondeterministic_seeded) entry.flags |= kSeeded;
      if (tag == at::Tag::data_dependent_output || tag == at::Tag::dynamic_output_shape)
        entry.flags |= kDataDependent;
      if (tag == at::Tag::inplace_view) entry.flags |= kInplaceView;
    }
    return known->emplace(func, std::move(entry)).first->second;
  }

  Tensor meta(const at::Tensor& tensor) {
    Tensor out{};
    out.ndim = static_cast<uint32_t>(tensor.dim());
    out.dtype = static_cast<uint8_t>(tensor.scalar_type());
    out.device_kind = static_cast<uint8_t>(tensor.device().type());
    out.device_index = static_cast<int8_t>(tensor.device().index());
    out.sizes = tensor.sizes().data();
    if (!tensor.has_storage() || tensor.layout() != at::kStrided) {
      out.flags = kNoStorage;
      return out;
    }
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (storages_.find(storage) == storages_.end()) {
      auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
      storages_.emplace(storage, c10::weak_intrusive_ptr<c10::StorageImpl>(strong));
    }
    out.storage = reinterpret_cast<uint64_t>(storage);
    out.storage_bytes = storage->nbytes();
    out.strides = tensor.strides().data();
    out.offset = tensor.storage_offset();
    out.flags = (tensor.is_conj() ? kConj : 0) | (tensor.is_neg() ? kNeg : 0);
    return out;
  }

  Arg from_tensors(PyObject* const* items, size_t n) {
    std::vector<Tensor>& space = tensor_block();
    space.reserve(n);
    for (size_t i = 0; i < n; ++i) {
      at::Tensor tensor = plain_tensor(items[i]);
      space.push_back(tensor.defined() ? meta(tensor) : Tensor{});
    }
    Arg arg{};
    arg.tag = kTensors;
    arg.len = static_cast<uint32_t>(n);
    arg.tensors = space.data();
    return arg;
  }

  Arg from_tensor(const at::Tensor& tensor) {
    std::vector<Tensor>& space = tensor_block();
    space.push_back(meta(tensor));
    Arg arg{};
    arg.tag = kTensor;
    arg.len = 1;
    arg.tensors = space.data();
    return arg;
  }

  Arg other(const char* what) {
    text_.emplace_back(what);
    Arg arg{};
    arg.tag = kOther;
    arg.s = text_.back().c_str();
    return arg;
  }

  Arg from_result(PyObject* result) {
    if (PyList_Check(result) || PyTuple_Check(result)) {
      return from_tensors(PySequence_Fast_ITEMS(result), PySequence_Fast_GET_SIZE(result));
    }
    at::Tensor tensor = plain_tensor(result);
    if (tensor.defined()) return from_tensor(tensor);
    return result == Py_None ? Arg{} : other(Py_TYPE(result)->tp_name);
  }

  Arg from_python(PyObject* object, const c10::Argument& formal) {
    if (object == Py_None) return Arg{};
    at::Tensor tensor = plain_tensor(object);
    c10::TypePtr type = formal.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (tensor.defined()) return from_tensor(tensor);
    if (type->kind() == c10::TypeKind::TensorType) {  // a number, wrapped by PyTorch
      std::vector<Arg>& one = block();
      one.push_back(number(object));
      Arg arg{};
      arg.tag = kWrapped;
      arg.len = 1;
      arg.list = one.data();
      return arg;
    }
    if (auto list = type->cast<c10::ListType>()) {
      c10::TypePtr element = list->getElementType();
      if (auto optional = element->cast<c10::OptionalType>()) element = optional->getElementType();
      if (element->kind() == c10::TypeKind::TensorType && (PyList_Check(object) || PyTuple_Check(object))) {
        return from_tensors(PySequence_Fast_ITEMS(object), PySequence_Fast_GET_SIZE(object));
      }
    }
    c10::IValue value;
    try {
      value = torch::jit::toIValue(object, formal.type(), formal.N());
    } catch (const std::exception&) {
      PyErr_Clear();
      return other(Py_TYPE(object)->tp_name);
    }
    return from_ivalue(value, formal);
  }

  Arg number(PyObject* object) {
    Arg arg{};
    if (PyBool_Check(object)) {
      arg.tag = kBool;
      arg.i = object == Py_True;
    } else if (PyLong_Check(object)) {
      arg.tag = kInt;
      arg.i = PyLong_AsLongLong(object);
      if (PyErr_Occurred()) throw py::error_already_set();
    } else if (PyFloat_Check(object)) {
      arg.tag = kFloat;
      arg.f = PyFloat_AS_DOUBLE(object);
    } else if (PyComplex_Check(object)) {
      arg.tag = kComplex;
      arg.c[0] = PyComplex_RealAsDouble(object);
      arg.c[1] = PyComplex_ImagAsDouble(object);
    } else {
      return other(Py_TYPE(object)->tp_name);
    }
    return arg;
  }

  Arg from_ivalue(const c10::IValue& value, const c10::Argument& formal) {
    c10::TypePtr type = formal.real_type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    Arg arg{};
    if (value.isNone()) return arg;
    if (value.isInt()) {
      arg.i = value.toInt();
      switch (type->kind()) {
        case c10::TypeKind::ScalarTypeType: arg.tag = kDType; break;
        case c10::TypeKind::LayoutType: arg.tag = kLayout; break;
        case c10::TypeKind::MemoryFormatType: arg.tag = kMemoryFormat; break;
        default: arg.tag = kInt;
      }
      return arg;
    }
    if (value.isBool()) {
      arg.tag = kBool;
      arg.i = value.toBool();
      return arg;
    }
    if (value.isDouble()) {
      arg.tag = kFloat;
      arg.f = value.toDouble();
      return arg;
    }
    if (value.isComplexDouble()) {
      arg.tag = kComplex;
      arg.c[0] = value.toComplexDouble().real();
      arg.c[1] = value.toComplexDouble().imag();
      return arg;
    }
    if (value.isString()) {
      text_.push_back(value.toStringRef());
      arg.tag = kStr;
      arg.s = text_.back().c_str();
      return arg;
    }
    if (value.isDevice()) {
      c10::Device device = value.toDevice();
      arg.tag = kDevice;
      arg.i = static_cast<int64_t>(device.type()) << 8 | static_cast<uint8_t>(device.index());
      return arg;
    }
    if (value.isIntList()) {
      ints_.push_back(value.toIntVector());
      arg.tag = kInts;
      arg.len = static_cast<uint32_t>(ints_.back().size());
      arg.ints = ints_.back().data();
      return arg;
    }
    if (value.isList()) {
      std::vector<Arg>& items = block();
      auto list = value.toListRef();
      items.reserve(list.size());
      c10::TypePtr element = type->cast<c10::ListType>() ? type->expectRef<c10::ListType>().getElementType() : type;
      for (const c10::IValue& item : list) items.push_back(from_ivalue(item, c10::Argument("", element)));
      arg.tag = kList;
      arg.len = static_cast<uint32_t>(items.size());
      arg.list = items.data();
      return arg;
    }
    return other(value.tagKind().c_str());
  }

  std::vector<Arg>& block() { return blocks_.emplace_back(); }
  std::vector<Tensor>& tensor_block() { return tensors_.emplace_back(); }
  void clear() {
    blocks_.clear();
    tensors_.clear();
    text_.clear();
    ints_.clear();
  }

  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::deque<std::vector<Arg>> blocks_;  // deques keep addresses as they grow
  std::deque<std::vector<Tensor>> tensors_;
  std::deque<std::string> text_;
  std::deque<std::vector<int64_t>> ints_;
  Op op_{};
};

}  // namespace rote
