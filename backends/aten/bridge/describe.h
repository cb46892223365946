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
#include "exceptions.h"
#include "others.h"

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

// Whether an object is a tensor. `THPVariable_Check` asks the metaclass of tensors, in some 800 instructions, about each
// object that is none.
inline bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object) ||
         PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(THPVariableClass));
}

// The plain tensor behind an object: the element of an AsyncCollectiveTensor,
// the object itself otherwise. Undefined for anything that is not a tensor.
inline at::Tensor plain_tensor(PyObject* object) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == classes.async_collective_tensor) {
    py::object elem = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, classes.elem_name));
    if (!elem) throw py::error_already_set();
    return plain_tensor(elem.ptr());
  }
  if (!is_tensor(object)) return at::Tensor();
  return THPVariable_Unpack(object);
}

// Waits for a collective whose result nobody has used yet, as eager does at its first use.
inline void settle(PyObject* object) {
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) != classes.async_collective_tensor) return;
  py::object waited = py::reinterpret_steal<py::object>(PyObject_CallMethod(object, "trigger_wait", nullptr));
  if (!waited) throw py::error_already_set();
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

// An op that has just run, as the dispatcher has it.
struct JustRun {
  const c10::OperatorHandle* op = nullptr;
  const std::vector<c10::IValue>* inputs = nullptr;
  const std::vector<c10::IValue>* outputs = nullptr;
  bool hidden = false;  // from dispatch modes
  bool grad = false;    // gradients were enabled
  bool internal = false;  // called by code of PyTorch's own that waits for its collectives itself
};
inline JustRun just_run;

// Whether dims have names, which newer versions of torch no longer know.
template <typename Impl>
auto has_names(const Impl& impl, int) -> decltype(impl.has_named_tensor_meta()) {
  return impl.has_named_tensor_meta();
}
template <typename Impl>
bool has_names(const Impl&, long) {
  return false;
}

inline bool is_dtensor(PyObject* object) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == classes.dtensor ||
         (classes.dtensor && PyType_IsSubtype(Py_TYPE(object), reinterpret_cast<PyTypeObject*>(classes.dtensor)));
}

// The local tensor of a DTensor, the plain tensor otherwise.
inline at::Tensor local_tensor(PyObject* object) {
  if (is_dtensor(object)) {
    py::object keep;
    return plain_tensor(dtensor_attribute(object, classes.local_tensor_offset, classes.local_tensor_name, keep));
  }
  return plain_tensor(object);
}

// The local tensor before a call. What other ranks still send has arrived by then.
inline at::Tensor settled_tensor(PyObject* object, bool distributed) {
  py::object keep;
  if (distributed) object = dtensor_attribute(object, classes.local_tensor_offset, classes.local_tensor_name, keep);
  settle(object);
  return plain_tensor(object);
}

inline at::Tensor settled_tensor(PyObject* object) { return settled_tensor(object, is_dtensor(object)); }

// Describes ops and tensors while a step is recorded: the storages it has seen, held weakly so that no address is
// used twice while it lasts, and the scratch space of the op being described.
class Describer {
 public:
  Describer() { others().forget(); }

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
    describes_results_ = true;
    std::vector<Arg>& out = block();
    if (PyTuple_Check(result) || PyList_Check(result)) {
      Py_ssize_t n = PySequence_Fast_GET_SIZE(result);
      out.reserve(n);
      for (Py_ssize_t i = 0; i < n; ++i) out.push_back(from_result(PySequence_Fast_GET_ITEM(result, i)));
    } else if (result != Py_None) {
      out.push_back(from_result(result));
    }
    set_op(known, in, out);
    if (c10::GradMode::is_enabled()) op_.flags |= kGrad;
    return &op_;
  }

  // Describes the op that has just run under observation.
  const Op* describe_observed() {
    clear();
    TORCH_CHECK(just_run.op, "no op has just run");
    const Known& known = know(*just_run.op);
    const auto& formals = known.schema->arguments();
    std::vector<Arg>& in = block();
    in.reserve(formals.size());
    for (size_t i = 0; i < formals.size(); ++i) {
      Arg arg = from_stack((*just_run.inputs)[i], formals[i]);
      arg.written = (formals[i].alias_info() && formals[i].alias_info()->isWrite()) || works_.writes(*known.schema, formals[i]);
      in.push_back(arg);
    }
    describes_results_ = true;
    std::vector<Arg>& out = block();
    const auto& results = *just_run.outputs;
    if (results.size() == 1 && results[0].isTensorList()) {
      for (const at::Tensor& tensor : results[0].toTensorVector()) out.push_back(from_tensor_or_none(tensor));
    } else {
      for (const c10::IValue& result : results) out.push_back(from_stack(result, c10::Argument("", c10::AnyType::get())));
    }
    set_op(known, in, out);
    if (just_run.hidden) op_.flags |= kHidden;
    if (just_run.grad) op_.flags |= kGrad;
    if (just_run.internal) op_.flags |= kInternal;
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

  int64_t number_of_work(PyObject* work) { return works_.number_of(work); }

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
    return known->emplace(func, known_of(*handle)).first->second;
  }

  static const Known& know(const c10::OperatorHandle& op) {
    static auto* known = new std::unordered_map<c10::OperatorName, Known>();
    auto it = known->find(op.operator_name());
    // An op may be registered anew under its name.
    if (it == known->end() || it->second.schema != &op.schema())
      it = known->insert_or_assign(op.operator_name(), known_of(op)).first;
    return it->second;
  }

  static Known known_of(const c10::OperatorHandle& op) {
    Known entry{&op.schema(), op.schema().name(), op.schema().overload_name(), 0};
    for (at::Tag tag : op.getTags()) {
      if (tag == at::Tag::nondeterministic_seeded) entry.flags |= kSeeded;
      if (tag == at::Tag::data_dependent_output || tag == at::Tag::dynamic_output_shape)
        entry.flags |= kDataDependent;
      if (tag == at::Tag::inplace_view) entry.flags |= kInplaceView;
    }
    return entry;
  }

  void set_op(const Known& known, const std::vector<Arg>& in, const std::vector<Arg>& out) {
    op_.name = known.name.c_str();
    op_.overload = known.overload.c_str();
    op_.args = in.data();
    op_.nargs = static_cast<uint32_t>(in.size());
    op_.outs = out.data();
    op_.nouts = static_cast<uint32_t>(out.size());
    op_.flags = known.flags;
  }

  Tensor meta(const at::Tensor& tensor) {
    Tensor out{};
    if (!tensor.is_nested()) {  // else it has no sizes to speak of
      out.ndim = static_cast<uint32_t>(tensor.dim());
      out.sizes = tensor.sizes().data();
    }
    out.dtype = static_cast<uint8_t>(tensor.scalar_type());
    out.device_kind = static_cast<uint8_t>(tensor.device().type());
    out.device_index = static_cast<int8_t>(tensor.device().index());
    if (!tensor.has_storage() || tensor.layout() != at::kStrided || tensor.is_nested() ||
        has_names(*tensor.unsafeGetTensorImpl(), 0)) {
      out.flags = kNoStorage;
      return out;
    }
    c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
    if (storages_.find(storage) == storages_.end()) {
      auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
      storages_.emplace(storage, c10::weak_intrusive_ptr<c10::StorageImpl>(strong));
      others().uses(storage, describes_results_);
    }
    out.storage = reinterpret_cast<uint64_t>(storage);
    out.storage_bytes = storage->nbytes();
    out.strides = tensor.strides().data();
    out.offset = tensor.storage_offset();
    out.flags = (tensor.is_conj() ? kConj : 0) | (tensor.is_neg() ? kNeg : 0) |
                (tensor._is_zerotensor() ? kZeroTensor : 0) |
                (tensor.unsafeGetTensorImpl()->is_wrapped_number() ? kWrappedNumber : 0);
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

  // What a subclass that only waits for a collective holds; the tensor itself otherwise.
  static at::Tensor unwrapped(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python)) return tensor;
    py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    if (!object) throw py::error_already_set();
    return plain_tensor(object.ptr());
  }

  Arg from_tensor_or_none(const at::Tensor& tensor) { return tensor.defined() ? from_tensor(unwrapped(tensor)) : Arg{}; }

  // A tensor, a list of tensors, or anything else, from a stack of the dispatcher.
  Arg from_stack(const c10::IValue& value, const c10::Argument& formal) {
    if (value.isTensor()) {
      const at::Tensor& tensor = value.toTensor();
      if (!tensor.defined() || !tensor.unsafeGetTensorImpl()->is_wrapped_number()) return from_tensor_or_none(tensor);
      std::vector<Arg>& one = block();  // a number, wrapped by PyTorch
      one.push_back(from_ivalue(item(tensor), c10::Argument("", c10::NumberType::get())));
      Arg arg{};
      arg.tag = kWrapped;
      arg.len = 1;
      arg.list = one.data();
      return arg;
    }
    if (value.isList() && is_of_lists_of_tensors(formal)) {
      static const c10::Argument tensors("", c10::ListType::ofTensors());
      auto lists = value.toListRef();
      if (lists.empty()) return from_stack(c10::List<at::Tensor>(), tensors);
      if (lists.size() == 1 && !lists[0].toListRef().empty()) return from_stack(lists[0], tensors);
    }
    if (value.isList() && is_of_tensors(formal, value)) {
      std::vector<Tensor>& space = tensor_block();
      auto items = value.toListRef();
      space.reserve(items.size());
      for (const c10::IValue& each : items)
        space.push_back(each.isTensor() && each.toTensor().defined() ? meta(unwrapped(each.toTensor())) : Tensor{});
      Arg arg{};
      arg.tag = kTensors;
      arg.len = static_cast<uint32_t>(space.size());
      arg.tensors = space.data();
      return arg;
    }
    return from_ivalue(value, formal);
  }

  static bool is_of_tensors(const c10::Argument& formal, const c10::IValue& value) {
    if (value.isTensorList() || value.isOptionalTensorList()) return true;
    c10::TypePtr type = formal.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    auto list = type->cast<c10::ListType>();
    if (!list) return false;
    c10::TypePtr element = list->getElementType();
    if (auto optional = element->cast<c10::OptionalType>()) element = optional->getElementType();
    return element->kind() == c10::TypeKind::TensorType;
  }

  // The number in a tensor without dims on the host.
  static c10::IValue item(const at::Tensor& tensor) {
    const void* data = tensor.const_data_ptr();
    switch (tensor.scalar_type()) {
      case at::kDouble: return *static_cast<const double*>(data);
      case at::kLong: return *static_cast<const int64_t*>(data);
      case at::kBool: return *static_cast<const bool*>(data);
      case at::kComplexDouble: return *static_cast<const c10::complex<double>*>(data);
      default: TORCH_CHECK(false, "a number of type ", tensor.scalar_type());
    }
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
      forget_error();
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
        case c10::TypeKind::ScalarTypeType: arg.tag = kDtype; break;
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
    if (value.isObject()) return from_object(value);
    return other(value.tagKind().c_str());
  }

  // What ops of process groups take and return beside tensors.
  Arg from_object(const c10::IValue& value) {
    Arg arg{};
    if (auto number = works_.number(value)) {
      arg.tag = kInt;
      arg.i = *number;
      return arg;
    }
    auto text = process_group_text(value);
    if (!text) return other(class_of(value).c_str());
    if (text->empty()) return other("process group or reduction that is not registered under a name");
    text_.push_back(*text);
    arg.tag = kStr;
    arg.s = text_.back().c_str();
    return arg;
  }

  std::vector<Arg>& block() { return blocks_.emplace_back(); }
  std::vector<Tensor>& tensor_block() { return tensors_.emplace_back(); }
  void clear() {
    blocks_.clear();
    tensors_.clear();
    text_.clear();
    ints_.clear();
    describes_results_ = false;
  }

  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> storages_;
  std::deque<std::vector<Arg>> blocks_;  // deques keep addresses as they grow
  std::deque<std::vector<Tensor>> tensors_;
  std::deque<std::string> text_;
  Works works_;
  std::deque<std::vector<int64_t>> ints_;
  Op op_{};
  bool describes_results_ = false;
};

}  // namespace rote
