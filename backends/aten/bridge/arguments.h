// Reads the arguments of a call and what it runs under, as flat arrays of
// 64-bit words. Rust compares them; nothing here decides.
#pragma once
#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "describe.h"
#include "hooks.h"
#include "metadata.h"
#include "modes.h"
#include "references.h"
#include "values.h"
#include "views.h"

namespace rote {

// Numbers addresses: equal ones by the place of the first.
class Firsts {
 public:
  // The place of the first equal address; the address's own place when it is new.
  uint32_t add(uint64_t address) {
    uint32_t place = static_cast<uint32_t>(seen_.size());
    seen_.push_back(address);
    if (place < kFew) {
      for (uint32_t i = 0; i < place; ++i)
        if (seen_[i] == address) return i;
      return place;
    }
    if (place == kFew)
      for (uint32_t i = 0; i < place; ++i) places_.emplace(seen_[i], i);
    return places_.emplace(address, place).first->second;
  }

  // The place of an address that was added; none.
  std::optional<uint32_t> find(uint64_t address) const {
    if (seen_.size() <= kFew) {
      for (uint32_t i = 0; i < seen_.size(); ++i)
        if (seen_[i] == address) return i;
      return std::nullopt;
    }
    auto found = places_.find(address);
    return found == places_.end() ? std::nullopt : std::optional<uint32_t>(found->second);
  }

  void clear() {
    seen_.clear();
    places_.clear();
  }

 private:
  static constexpr uint32_t kFew = 48;
  std::vector<uint64_t> seen_;
  std::unordered_map<uint64_t, uint32_t> places_;
};

// What the words of a call cannot tell alone: values to compare in full, and
// the objects that the words name by their addresses.
class Held;

// Containers of other classes than Python's own (dataclasses, batches of libraries): `_containers.py` says which these
// are, and takes them apart.
class OtherContainers {
 public:
  // A tuple of what an object is made of: names and values. Null: it is one value.
  py::object parts_of(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    bool may_be = PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) || PyDict_Check(object) || PyTuple_Check(object) ||
                  type == namespace_class_.get();
    if (!may_be || is_none_.count(type)) return py::object();
    if (!parts_) {
      py::module_ module = py::module_::import("rote._containers");
      is_container_ = py::object(module.attr("is_container")).release().ptr();  // kept as long as the process
      parts_ = py::object(module.attr("parts_of")).release().ptr();
    }
    py::handle kind(reinterpret_cast<PyObject*>(type));
    if (!py::handle(is_container_)(kind).cast<bool>()) {
      if (is_none_.size() < kMostKnown && is_none_.insert(type).second) kind.inc_ref();  // its address stays its own
      return py::object();
    }
    py::object parts = py::handle(parts_)(py::handle(object));
    return parts.is_none() ? py::object() : parts;
  }

 private:
  static constexpr size_t kMostKnown = 4096;
  std::unordered_set<PyTypeObject*> is_none_;
  PyObject* is_container_ = nullptr;
  PyObject* parts_ = nullptr;
  LateClass namespace_class_{"types", "SimpleNamespace"};
};
inline OtherContainers other_containers;

// The arguments of one call, flattened: tuples, lists and dicts are structure, and so are containers of other classes.
// Everything else is a leaf. `_naming.flatten` does the same.
class Call {
 public:
  std::vector<uint64_t> words;
  std::vector<WordSubject> facts;
  std::vector<PyObject*> leaves;  // borrowed: the caller holds the arguments
  const Holders holders = std::make_shared<Holders::element_type>();  // of the session

  // The storages and tensors of the captured state, to see arguments that alias it.
  // Numbers stay: what is said again after others were added has the number that it had.
  // A weak reference keeps the address of a storage that is gone from being another's.
  void add_state(const uint64_t* storages, const uint64_t* objects, uint32_t n) {
    for (uint32_t i = 0; i < n; ++i) {
      bool is_new = state_.emplace(storages[i], state_.size()).second;
      state_objects_.emplace(objects[i], state_objects_.size());
      const at::Tensor& tensor = THPVariable_Unpack(reinterpret_cast<PyObject*>(objects[i]));
      state_roots_.emplace(address(root_of(tensor).unsafeGetTensorImpl()), state_roots_.size());
      state_counters_.emplace(counter_of(tensor), state_counters_.size());
      if (!is_new) continue;
      at::Tensor local = local_tensor(reinterpret_cast<PyObject*>(objects[i]));
      if (local.has_storage()) state_storages_.push_back(local.storage().getWeakStorageImpl());
      auto extent = extent_of(local);
      if (!extent) continue;
      state_extents_.push_back(*extent);
      foreign_state_ |= extent->foreign;
    }
  }

  // Whether the state or an argument of the last collected call lies in memory that PyTorch has not allocated.
  bool has_foreign() const { return foreign_state_ || foreign_leaf_; }

  // Whether a storage lies in the memory of another one of the state or of the last collected call.
  bool overlaps(const Extent& extent) const {
    if (!extent.foreign && !has_foreign()) return false;
    auto found = [&](const std::vector<Extent>& others) {
      return std::any_of(others.begin(), others.end(), [&](const Extent& other) { return extent.overlaps(other); });
    };
    return found(state_extents_) || found(extents_);
  }

  // A number that the default process group of the process has.
  void set_world(uint64_t world) { world_ = world; }

  // A leaf, and where it starts in its storage.
  struct Start {
    uint32_t leaf;
    int64_t bytes;
    const at::Tensor* tensor;
  };

  // The first leaf of the last collected call that lies in a storage; null.
  const Start* in_storage(uint64_t storage) const {
    auto first = storages_.find(storage);
    return first ? &starts_[*first] : nullptr;
  }

  void collect(PyObject* args, PyObject* kwargs) {
    args_ = args;
    kwargs_ = kwargs;
    read(nullptr);
  }

 private:
  friend class Held;

  // How a value is compared besides its word.
  enum class By : uint8_t { kContent, kPlacement };
  struct Value {
    PyObject* value;  // borrowed
    uint32_t word;
    By by;
  };

  // `kept`: takes the objects that the words name by their addresses.
  void read(std::vector<py::object>* kept) {
    words.clear();
    facts.clear();
    leaves.clear();
    values_.clear();
    storages_.clear();
    starts_.clear();
    extents_.clear();
    foreign_leaf_ = false;
    tensors_.clear();
    roots_.clear();
    counters_.clear();
    containers_.clear();
    parts_.clear();
    kept_ = kept;
    structure_ = 0x5242;
    add(0, kFieldStructure, 0);  // filled in below
    uint32_t mode = 0;
    read_modes(world_, kept, [&](uint64_t word) { add(mode++, kFieldStructure, word); });
    flatten(args_, 0);
    flatten(kwargs_, 0);
    words[0] = structure_;
    kept_ = nullptr;
  }

  void add(uint32_t leaf, uint32_t field, uint64_t word) {
    words.push_back(word);
    facts.push_back({leaf, field});
  }

  // A word that names an object by its address.
  uint64_t identity(PyObject* object) {
    if (kept_) kept_->push_back(py::reinterpret_borrow<py::object>(object));
    return address(object);
  }

  void compare_in_full(PyObject* value, By by = By::kContent) {
    values_.push_back({value, static_cast<uint32_t>(words.size()) - 1, by});
  }

  void open(PyObject* container, uint64_t kind, Py_ssize_t n) {
    structure_ = mix(structure_, kind);
    structure_ = mix(structure_, n);
    // One container passed twice is another thing than two equal ones.
    if (n > 0) structure_ = mix(structure_, containers_.add(address(container)));
  }

  void entry(PyObject* key, PyObject* value, int depth) {
    structure_ = mix(structure_, Content(Content::kAll, kept_).word(key));
    values_.push_back({key, 0, By::kContent});
    flatten(value, depth);
  }

  static constexpr int kMostDepth = 64;  // what contains itself is a leaf in the end

  void flatten(PyObject* object, int depth) {
    if (depth > kMostDepth) return leaf(object);
    bool named = PyTuple_Check(object) && !PyTuple_CheckExact(object) && is_named_tuple(object);
    if (PyTuple_CheckExact(object) || PyList_CheckExact(object) || named) {
      Py_ssize_t n = PySequence_Fast_GET_SIZE(object);
      open(object, PyTuple_CheckExact(object) ? 1 : PyList_CheckExact(object) ? 2 : 6, n);
      if (named) structure_ = mix(structure_, identity(reinterpret_cast<PyObject*>(Py_TYPE(object))));
      for (Py_ssize_t i = 0; i < n; ++i) flatten(PySequence_Fast_GET_ITEM(object, i), depth + 1);
      return;
    }
    if (PyDict_CheckExact(object)) {
      open(object, 3, PyDict_GET_SIZE(object));
      PyObject *key, *value;
      Py_ssize_t position = 0;
      while (PyDict_Next(object, &position, &key, &value)) entry(key, value, depth + 1);
      return;
    }
    if (PyODict_CheckExact(object) && !attributes(object)) {
      open(object, 7, PyDict_GET_SIZE(object));
      py::object keys = py::reinterpret_steal<py::object>(PyObject_GetIter(object));
      while (keys) {
        py::object key = py::reinterpret_steal<py::object>(PyIter_Next(keys.ptr()));
        if (!key) break;
        PyObject* value = PyDict_GetItemWithError(object, key.ptr());
        if (value) entry(key.ptr(), value, depth + 1);
      }
      if (PyErr_Occurred()) throw py::error_already_set();
      return;
    }
    if (!is_tensor(object))
      if (py::object parts = other_containers.parts_of(object)) return open_other(object, std::move(parts), depth);
    leaf(object);
  }

  void open_other(PyObject* object, py::object parts, int depth) {
    PyObject *names = PyTuple_GET_ITEM(parts.ptr(), 0), *values = PyTuple_GET_ITEM(parts.ptr(), 1);
    Py_ssize_t n = PyTuple_GET_SIZE(values);
    parts_.push_back(std::move(parts));
    open(object, 8, n);
    structure_ = mix(structure_, identity(reinterpret_cast<PyObject*>(Py_TYPE(object))));
    structure_ = mix(structure_, Content(Content::kAll, kept_).word(names));
    values_.push_back({names, 0, By::kContent});
    for (Py_ssize_t i = 0; i < n; ++i) flatten(PyTuple_GET_ITEM(values, i), depth + 1);
  }

  void leaf(PyObject* object) {
    uint32_t at = static_cast<uint32_t>(leaves.size());
    leaves.push_back(object);
    const bool of_tensor = is_tensor(object);
    structure_ = mix(structure_, of_tensor ? 4 : 5);
    add(at, kFieldType, identity(reinterpret_cast<PyObject*>(Py_TYPE(object))));
    if (of_tensor) return tensor(at, object);
    if (PyFloat_CheckExact(object)) return add(at, kFieldValue, Content::float_bits(object));
    if (PyLong_CheckExact(object)) {
      int overflow = 0;
      long long small = PyLong_AsLongLongAndOverflow(object, &overflow);
      if (!overflow) return add(at, kFieldValue, static_cast<uint64_t>(small));
    }
    add(at, kFieldValue, Content(Content::kAll, kept_).word(object));
    if (form_of(object) == Form::kIdentity) return;
    compare_in_full(object);
    // Which of equal values are one object, where programs may ask.
    if (form_of(object) > Form::kNumber) add(at, kFieldAlias, containers_.add(address(object)));
  }

  void tensor(uint32_t leaf, PyObject* object) {
    const at::Tensor& outer = THPVariable_Unpack(object);
    bool distributed = is_dtensor(object);
    at::Tensor local = settled_tensor(object, distributed);
    add(leaf, kFieldDType, static_cast<uint64_t>(local.scalar_type()));
    add(leaf, kFieldDevice, static_cast<uint64_t>(local.device().type()) << 8 |
                                static_cast<uint8_t>(local.device().index()));
    add(leaf, kFieldRequiresGrad, grad_flags(outer));
    if (kept_) kept_->push_back(hooks_of(outer));
    add(leaf, kFieldGraph, outer.grad_fn() != nullptr);
    add(leaf, kFieldGrad, outer.is_leaf() ? grad_word(outer) : 0);
    if (distributed) {
      py::object spec = py::reinterpret_steal<py::object>(PyObject_GetAttr(object, classes.spec_name));
      if (!spec) throw py::error_already_set();
      placed(leaf, kFieldMesh, spec.attr("mesh").ptr());
      placed(leaf, kFieldPlacements, spec.attr("placements").ptr());
      add(leaf, kFieldGlobalShape, outer.dim());
      for (int64_t size : outer.sizes()) add(leaf, kFieldGlobalShape, size);
      for (int64_t stride : outer.strides()) add(leaf, kFieldGlobalStrides, stride);
      add(leaf, kFieldGlobalStrides, outer.storage_offset());
    }
    attributes_of(leaf, object);
    if (distributed) {
      py::object keep;
      attributes_of(leaf, dtensor_attribute(object, classes.local_tensor_offset, classes.local_tensor_name, keep));
    }
    if (outer.is_leaf() && outer.grad().defined()) {
      py::object grad = py::reinterpret_steal<py::object>(THPVariable_Wrap(outer.grad()));
      add(leaf, kFieldGrad, identity(reinterpret_cast<PyObject*>(Py_TYPE(grad.ptr()))));
      attributes_of(leaf, grad.ptr());
    }
    add(leaf, kFieldShape, local.dim());
    for (int64_t size : local.sizes()) add(leaf, kFieldShape, size);
    uint32_t same = tensors_.add(address(object));
    if (local.layout() != at::kStrided || !local.has_storage()) {
      add(leaf, kFieldStorageFlags, static_cast<uint64_t>(local.layout()) + 16);
      add(leaf, kFieldAlias, same);
      return;
    }
    for (int64_t stride : local.strides()) add(leaf, kFieldStrides, stride);
    add(leaf, kFieldStorageFlags, (local.is_conj() ? 1 : 0) | (local.is_neg() ? 2 : 0));
    alias(leaf, object, outer, local, same);
  }

  // The attributes of a tensor, which is held by another.
  void attributes_of(uint32_t leaf, PyObject* tensor) {
    PyObject* own = attributes(tensor);
    if (!own) return;
    add(leaf, kFieldAttributes, Content(Content::kAll, kept_).word(own));
    compare_in_full(own);
  }

  void placed(uint32_t leaf, uint32_t field, PyObject* value) {
    add(leaf, field, hash_of(value));
    compare_in_full(value, By::kPlacement);
  }

  // Which earlier leaf or state tensor shares the storage, how far apart the
  // two start, whether they are one object, and what autograd knows of that.
  // Alone in its storage, a tensor may start anywhere.
  void alias(uint32_t leaf, PyObject* object, const at::Tensor& outer, const at::Tensor& local, uint32_t same) {
    const c10::StorageImpl* storage = local.storage().unsafeGetStorageImpl();
    int64_t start = local.storage_offset() * static_cast<int64_t>(local.element_size());
    uint32_t own = static_cast<uint32_t>(starts_.size());
    uint32_t first = storages_.add(address(storage));
    starts_.push_back({leaf, start, &outer});
    auto extent = extent_of(local);
    add(leaf, kFieldAlias, extent && overlaps(*extent));
    if (extent) {
      extents_.push_back(*extent);
      foreign_leaf_ |= extent->foreign;
    }
    auto state = state_.find(address(storage));
    if (state != state_.end()) {
      auto named = state_objects_.find(address(object));
      add(leaf, kFieldAlias, 1ull << 32 | state->second);
      add(leaf, kFieldAlias, static_cast<uint64_t>(start));
      add(leaf, kFieldAlias, named == state_objects_.end() ? 0 : named->second + 1);
      add(leaf, kFieldAlias, same);
      add(leaf, kFieldAlias, kin(outer));
    } else if (first != own) {
      add(leaf, kFieldAlias, 1ull << 33 | starts_[first].leaf);
      add(leaf, kFieldAlias, static_cast<uint64_t>(start - starts_[first].bytes));
      add(leaf, kFieldAlias, same);
      add(leaf, kFieldAlias, mix(kin(*starts_[first].tensor), kin(outer)));
    } else {
      add(leaf, kFieldAlias, 0);
      add(leaf, kFieldAlias, 0);
    }
  }

  // A number for which others have the base that a tensor is a view of, and its version counter: state, or
  // those of which that was asked before.
  uint64_t kin(const at::Tensor& tensor) {
    uint64_t root = address(root_of(tensor).unsafeGetTensorImpl()), counter = counter_of(tensor);
    auto known_root = state_roots_.find(root);
    auto known_counter = state_counters_.find(counter);
    uint64_t number = mix(tensor.is_view() ? 1 : 0, known_root == state_roots_.end() ? roots_.add(root)
                                                                                     : 1ull << 32 | known_root->second);
    return mix(number, known_counter == state_counters_.end() ? counters_.add(counter)
                                                              : 1ull << 32 | known_counter->second);
  }

  PyObject* args_ = nullptr;  // borrowed, as the leaves are
  PyObject* kwargs_ = nullptr;
  std::unordered_map<uint64_t, uint32_t> state_;
  std::unordered_map<uint64_t, uint32_t> state_objects_;
  std::unordered_map<uint64_t, uint32_t> state_roots_;
  std::unordered_map<uint64_t, uint32_t> state_counters_;
  uint64_t world_ = 0;
  std::vector<Value> values_;
  std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> state_storages_;
  std::vector<Extent> state_extents_;
  std::vector<Extent> extents_;  // of the leaves
  bool foreign_state_ = false;
  bool foreign_leaf_ = false;
  Firsts storages_;
  std::vector<Start> starts_;  // of the leaves in `storages_`
  Firsts tensors_;
  Firsts roots_;
  Firsts counters_;
  Firsts containers_;
  std::vector<py::object> parts_;  // which hold the parts of containers of other classes
  std::vector<py::object>* kept_ = nullptr;
  uint64_t structure_ = 0;
};

class Held : public Holder {
 public:
  // Holds what the words of the last collected call stand for.
  explicit Held(Call& call) : holders_(call.holders) {
    call.read(&kept_);
    for (const Call::Value& value : call.values_)
      values_.push_back({py::reinterpret_borrow<py::object>(value.value), value.by});
    holders_->insert(this);
  }

  ~Held() override { holders_->erase(this); }

  int traverse(visitproc visit, void* arg) const override {
    for (const py::object& object : kept_) Py_VISIT(object.ptr());
    for (const Value& value : values_) Py_VISIT(value.value.ptr());
    return 0;
  }

  // The first word of a call with equal words that stands for another value; -1 when there is none.
  int64_t difference(const Call& call) const {
    if (call.values_.size() != values_.size()) return 0;
    for (size_t i = 0; i < values_.size(); ++i) {
      const Call::Value& now = call.values_[i];
      PyObject* then = values_[i].value.ptr();
      if (now.value == then) continue;
      bool same = values_[i].by == Call::By::kContent ? Content(Content::kAll).same(now.value, then)
                                                      : equal_placed(now.value, then);
      if (!same) return now.word;
    }
    return -1;
  }

 private:
  struct Value {
    py::object value;
    Call::By by;
  };
  Holders holders_;
  std::vector<py::object> kept_;
  std::vector<Value> values_;
};

}  // namespace rote
