// Reads facts about Python objects that the captured function can reach, as
// flat arrays of 64-bit words. Rust compares them; nothing here decides.
#pragma once
#include <cstring>
#include <vector>

#include <torch/csrc/Generator.h>

#include "call.h"
#include "describe.h"
#include "hooks.h"
#include "looks.h"
#include "memory.h"
#include "objects.h"
#include "ranks.h"
#include "values.h"

namespace rote {

// Facts about Python objects that outlive calls: entries of dicts and lists,
// cells, attributes, sizes, and the tensors of the state.
class FactTable {
 public:
  ~FactTable() {
    for (Entry& entry : entries_) {
      Py_XDECREF(entry.container);
      Py_XDECREF(entry.key);
      Py_XDECREF(entry.held);
      Py_XDECREF(entry.spec);
    }
  }

  // Returns how many words the fact adds.
  uint32_t add(uint32_t kind, PyObject* container, PyObject* key) {
    TORCH_CHECK(kind < kFactKinds, kind, " is no kind of fact");
    Py_hash_t hash = 0;
    if (kind == kDictItem || kind == kEntrySize) {  // once: a user's class may say how its objects hash
      hash = PyObject_Hash(key);
      if (hash == -1) throw py::error_already_set();
    }
    Py_XINCREF(container);
    Py_XINCREF(key);
    entries_.push_back(
        {static_cast<FactKind>(kind), container, key, nullptr, static_cast<uint32_t>(words_), nullptr, 0, 0, hash});
    uint32_t n = width(entries_.back());
    if (kind == kGradMeta) gradients_.push_back(static_cast<uint32_t>(entries_.size() - 1));
    if (kind == kGradMemory) grad_memory_ = words_;
    if (kind == kReachMemory) reach_memory_ = words_;
    if (kind == kBuffer) buffers_.push_back(static_cast<uint32_t>(entries_.size() - 1));
    if (kind == kLook && THPVariable_Check(container)) looks_.push_back(static_cast<uint32_t>(entries_.size() - 1));
    words_ += n;
    return n;
  }

  size_t words() const { return words_; }

  // `call` has collected the arguments of the call that is under way.
  void read(const Call& call, uint64_t* out) const {
    for (const Entry& entry : entries_) read_one(entry, out + entry.start);
    memory_.begin();
    for (uint32_t i : gradients_) read_gradient(entries_[i], call.has_foreign(), out + entries_[i].start);
    SharedMemory::Words words = read_memory(call);
    if (grad_memory_) out[*grad_memory_] = words.gradients;
    if (reach_memory_) out[*reach_memory_] = words.in_reach;
  }

  // Holds what the facts see now, so that no address can stand for another
  // object later, and so that values can be compared by content.
  void hold() {
    memory_.forget_state();
    for (Entry& entry : entries_) {
      py::object now = object(entry);
      Py_XSETREF(entry.held, now.release().ptr());
      if (entry.kind == kTensorMeta) memory_.add_state(entry.start, entry.container);
    }
  }

  // Whether the value behind word `index` equals the one held, by content.
  bool same(uint32_t index) const {
    const Entry& entry = at(index);
    switch (entry.kind) {
      case kDictItem: case kListItem: case kCell: case kAttribute: case kItems: case kContextVar: case kMember: {
        py::object now = object(entry);
        return now && entry.held && same_content(now.ptr(), entry.held);
      }
      default:
        return false;  // the words are all there is
    }
  }

  // Whether an object is a float, Python's own or NumPy's: a user's class may compute otherwise. (`_uses.is_number`.)
  static bool is_number(PyObject* object) {
    return PyFloat_CheckExact(object) ||
           (PyFloat_Check(object) && std::strncmp(Py_TYPE(object)->tp_name, "numpy.", 6) == 0);
  }

  // The float behind the word at `index`, now.
  double number(uint32_t index) const {
    py::object now = object(at(index));
    TORCH_CHECK(now && is_number(now.ptr()), "a hyperparameter is no longer a float");
    return PyFloat_AS_DOUBLE(now.ptr());
  }

  // What the word at `index` sees, as text: now, or when it was held.
  std::string text(uint32_t index, bool held) const {
    const Entry& entry = at(index);
    switch (entry.kind) {
      case kSize:
        return held ? "" : std::to_string(entry_count(entry.container));
      case kDictItem: case kListItem: case kCell: case kAttribute: case kContextVar: case kMember: {
        py::object value = held ? py::reinterpret_borrow<py::object>(entry.held) : object(entry);
        if (!value) return "absent";
        std::string out = in_words(value.ptr());
        return out.size() > 80 ? out.substr(0, 77) + "..." : out;
      }
      default:
        return "";
    }
  }

 private:
  struct Entry {
    FactKind kind;
    PyObject* container;
    PyObject* key;
    PyObject* held;
    uint32_t start;
    mutable PyObject* spec;         // the spec that was looked at last,
    mutable uint64_t number;        // and the number of its placements; of a class, of its attributes
    mutable unsigned version;       // of a class, when it was looked at last
    Py_hash_t hash;                 // of the key of an entry
  };

  // A number for the placements of a DTensor; quick for a spec seen before.
  static uint64_t placements(const Entry& entry, PyObject* dtensor) {
    py::object keep;
    PyObject* spec = dtensor_attribute(dtensor, classes.spec_offset, classes.spec_name, keep);
    if (spec != entry.spec) {
      auto now = py::reinterpret_borrow<py::object>(spec);
      entry.number = mix(hash_of(now.attr("placements").ptr()), hash_of(now.attr("mesh").ptr()));
      Py_XSETREF(entry.spec, now.release().ptr());
    }
    return entry.number;
  }

  // Whether there is a gradient, and how it looks when the plan reads it.
  void read_gradient(const Entry& entry, bool foreign, uint64_t* out) const {
    const at::Tensor& outer = THPVariable_Unpack(entry.container);
    const at::Tensor& grad = outer.grad();
    out[0] = grad.defined();
    out[1] = 0;
    if (!grad.defined()) return;
    py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
    const bool distributed = is_dtensor(wrapped.ptr());
    if (foreign || !is_alone(grad, wrapped.ptr(), distributed)) memory_.add_gradient(entry.start, grad);
    if (entry.key != Py_True) return;
    out[1] = mix(grad_word(outer), address(Py_TYPE(wrapped.ptr())));
    if (distributed) out[1] = mix(out[1], placements(entry, wrapped.ptr()));
    if (uint64_t own = own_attributes(wrapped.ptr(), true)) out[1] = mix(out[1], own);
  }

  SharedMemory::Words read_memory(const Call& call) const {
    for (uint32_t leaf = 0; leaf < call.leaves.size(); ++leaf)
      if (THPVariable_Check(call.leaves[leaf]))
        memory_.add_gradient_of(1ull << 40 | leaf, THPVariable_Unpack(call.leaves[leaf]), false);
    for (uint32_t i : looks_) {
      const at::Tensor& tensor = THPVariable_Unpack(entries_[i].container);
      memory_.add_in_reach(entries_[i].start, tensor);
      memory_.add_gradient_of(entries_[i].start, tensor, true);
    }
    SharedMemory::Words words = memory_.read(call);
    for (uint32_t i : buffers_)
      if (auto extent = extent_of_buffer(entries_[i].container)) memory_.read_buffer(entries_[i].start, *extent, call, words);
    return words;
  }

  static uint64_t look(const Entry& entry) {
    if (THPGenerator_Check(entry.container))
      return reinterpret_cast<THPGenerator*>(entry.container)->cdata.current_seed();
    const at::Tensor& outer = THPVariable_Unpack(entry.container);
    uint64_t hash = mix(meta_word(settled_tensor(entry.container)), grad_flags(outer));
    if (is_dtensor(entry.container)) {
      hash = mix(mix(hash, placements(entry, entry.container)), wrapper_word(outer));
      py::object keep;
      PyObject* inner =
          dtensor_attribute(entry.container, classes.local_tensor_offset, classes.local_tensor_name, keep);
      hash = mix(hash, own_attributes(inner, true));
    }
    if (!outer.is_leaf() && !outer.retains_grad()) return hash;  // to ask is worth a warning of torch's
    const at::Tensor& grad = outer.grad();
    if (!grad.defined()) return hash;
    py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
    hash = mix(mix(hash, grad_word(outer)), address(Py_TYPE(wrapped.ptr())));
    return mix(hash, own_attributes(wrapped.ptr(), true));
  }

  const Entry& at(uint32_t index) const {
    auto it = std::upper_bound(entries_.begin(), entries_.end(), index,
                               [](uint32_t i, const Entry& entry) { return i < entry.start; });
    return *(it - 1);
  }

  static uint32_t width(const Entry& entry) {
    if (entry.kind == kTensorMeta) return 6;
    if (entry.kind == kGradMeta) return 2;
    if (entry.kind == kFunction) return 4;
    return 1;
  }

  // Borrowed; null where there is none.
  static PyObject* dict_item(const Entry& entry) {
#if PY_VERSION_HEX < 0x030E0000
    PyObject* item = _PyDict_GetItem_KnownHash(entry.container, entry.key, entry.hash);
#else
    PyObject* item = PyDict_GetItemWithError(entry.container, entry.key);
#endif
    if (!item) PyErr_Clear();
    return item;
  }

  // The object that a fact compares; null where there is none.
  static py::object object(const Entry& entry) {
    switch (entry.kind) {
      case kDictItem:
      case kEntrySize:
        return py::reinterpret_borrow<py::object>(dict_item(entry));
      case kListItem: {
        Py_ssize_t index = PyLong_AsSsize_t(entry.key);
        if (index >= PyList_GET_SIZE(entry.container)) return py::object();
        return py::reinterpret_borrow<py::object>(PyList_GET_ITEM(entry.container, index));
      }
      case kCell:
        return py::reinterpret_borrow<py::object>(PyCell_GET(entry.container));
      case kAttribute: {
        py::object value = py::reinterpret_steal<py::object>(PyObject_GetAttr(entry.container, entry.key));
        if (!value) PyErr_Clear();
        return value;
      }
      case kItems:
        return entries_held(entry.container, entry.key == Py_True);
      case kFunction: {
        auto part = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object ? object : Py_None); };
        const auto& function = as_function(entry.container);
        return py::make_tuple(part(function.func_code), part(function.func_defaults), part(function.func_kwdefaults),
                              part(function.func_name), part(function.func_qualname), part(function.func_doc),
                              part(function.func_module), part(function.func_dict));
      }
      case kTypeOf:
        return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(Py_TYPE(entry.container)));
      case kContextVar: {
        PyObject* value = nullptr;
        if (PyContextVar_Get(entry.container, nullptr, &value) < 0) PyErr_Clear();
        return py::reinterpret_steal<py::object>(value);
      }
      case kTensorMeta:
        return py::make_tuple(py::reinterpret_borrow<py::object>(own_dict(entry.container) ? own_dict(entry.container) : Py_None), hooks_of(entry.container));
      case kLook:
        return THPVariable_Check(entry.container) ? py::object(hooks_of(entry.container)) : py::none();
      case kOwn:
        return py::reinterpret_borrow<py::object>(own_dict(entry.container));
      case kMember: {
        descrgetfunc get = Py_TYPE(entry.key)->tp_descr_get;
        py::object value = py::reinterpret_steal<py::object>(
            get ? get(entry.key, entry.container, reinterpret_cast<PyObject*>(Py_TYPE(entry.container))) : nullptr);
        if (!value) PyErr_Clear();
        return value;
      }
      case kBases:
        return py::reinterpret_borrow<py::object>(as_type(entry.container)->tp_mro);
      case kClass:
        return class_entries_held(as_type(entry.container), entry.key);
      case kReferents:
        return referents_held(entry.container);
      case kWeak:  // held, it would never go
        return py::none();
      default:
        return py::reinterpret_borrow<py::object>(entry.container);
    }
  }

  static const PyFunctionObject& as_function(PyObject* function) {
    return *reinterpret_cast<PyFunctionObject*>(function);
  }

  static PyTypeObject* as_type(PyObject* type) { return reinterpret_cast<PyTypeObject*>(type); }

  __attribute__((always_inline)) static void read_one(const Entry& entry, uint64_t* out) {
    switch (entry.kind) {
      case kDictItem: {  // the frequent kind: no reference counting
        out[0] = address(dict_item(entry));
        return;
      }
      case kSize:
        out[0] = static_cast<uint64_t>(PyDict_CheckExact(entry.container) ? PyDict_GET_SIZE(entry.container)
                                                                          : entry_count(entry.container));
        return;
      case kOwn:
        out[0] = own_attributes(entry.container, entry.key == Py_True);
        return;
      case kEntrySize: {
        PyObject* item = dict_item(entry);
        out[0] = item ? mix(address(item), entry_count(item)) : 0;
        return;
      }
      case kTensorMeta: {  // local storage, data, meta; part in autograd; spec; attributes
        const at::Tensor& outer = THPVariable_Unpack(entry.container);
        bool distributed = is_dtensor(entry.container);
        py::object keep;
        PyObject* inner = distributed ? dtensor_attribute(entry.container, classes.local_tensor_offset,
                                                          classes.local_tensor_name, keep)
                                      : entry.container;
        bool plain = reinterpret_cast<PyObject*>(Py_TYPE(inner)) != classes.async_collective_tensor;
        at::Tensor waited = plain ? at::Tensor() : settled_tensor(inner, false);
        const at::Tensor& local = plain ? THPVariable_Unpack(inner) : waited;
        const bool stored = local.has_storage();
        out[0] = stored ? address(local.storage().unsafeGetStorageImpl()) : 0;
        out[1] = stored ? address(local.unsafeGetTensorImpl()->data()) : 0;
        out[2] = meta_word(local);
        out[3] = grad_flags(outer);
        if (outer.is_view()) out[3] = mix(out[3], address(root_of(outer).unsafeGetTensorImpl()));
        out[4] = distributed ? mix(placements(entry, entry.container), wrapper_word(outer)) : 0;
        out[5] = mix(address(Py_TYPE(entry.container)), own_attributes(entry.container, false));
        if (distributed) out[5] += own_attributes(inner, true);
        return;
      }
      case kGradMeta:  // read together, by `read`
      case kGradMemory:
      case kReachMemory:
        return;
      case kGroup: {  // the process group registered under a name
        const char* name = PyUnicode_AsUTF8(entry.container);
        auto group = name ? find_group(name) : c10::intrusive_ptr<c10d::ProcessGroup>();
        out[0] = group ? group_number(group) + 1 : 0;
        return;
      }
      case kItems:
        out[0] = entries(entry.container, entry.key == Py_True);
        return;
      case kFunction: {
        const auto& function = as_function(entry.container);
        out[0] = address(function.func_code);
        out[1] = address(function.func_defaults);
        out[2] = address(function.func_kwdefaults);
        out[3] = mix(mix(address(function.func_name), address(function.func_qualname)),
                     mix(mix(address(function.func_doc), address(function.func_module)), address(function.func_dict)));
        return;
      }
      case kBuffer:
        out[0] = buffer(entry.container, entry.key != Py_True);
        return;
      case kBases:
        out[0] = address(as_type(entry.container)->tp_mro);
        return;
      case kClass: {
        unsigned version = class_version(as_type(entry.container));
        if (version == 0 || version != entry.version) {
          entry.number = class_entries(as_type(entry.container), entry.key);
          entry.version = version;
        }
        out[0] = entry.number;
        return;
      }
      case kWeak:
        out[0] = address(referent(entry.container).ptr());
        return;
      case kLook:
        out[0] = look(entry);
        return;
      case kReferents:
        out[0] = entry.key == Py_True ? position(entry.container) : referents(entry.container);
        return;
      case kTypeOf:
        out[0] = address(Py_TYPE(entry.container));
        return;
      default:
        out[0] = number_of(object(entry));
    }
  }

  std::vector<Entry> entries_;
  size_t words_ = 0;
  std::vector<uint32_t> gradients_;  // entries about gradients,
  std::vector<uint32_t> looks_;      // entries about tensors that are no state,
  std::vector<uint32_t> buffers_;    // and about buffers
  std::optional<size_t> grad_memory_, reach_memory_;  // the words about their memory
  mutable SharedMemory memory_;
};

}  // namespace rote
