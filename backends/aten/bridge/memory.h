// Which memory gradients, tensors that are no state, and buffers have in common with the state, with arguments and with
// each other, as two words.
#pragma once
#include <algorithm>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "arguments.h"
#include "describe.h"
#include "objects.h"
#include "views.h"

namespace rote {

// Where a tensor lies in its storage.
struct InStorage {
  uint64_t storage;
  int64_t bytes;  // from where it starts
  std::optional<Extent> extent;
};

// Of a DTensor where its local tensor lies; none for a tensor that has no storage of its own yet.
inline std::optional<InStorage> place_in_storage(PyObject* tensor) {
  py::object keep;
  if (is_dtensor(tensor))
    tensor = dtensor_attribute(tensor, classes.local_tensor_offset, classes.local_tensor_name, keep);
  if (!is_tensor(tensor) || reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == classes.async_collective_tensor)
    return std::nullopt;
  const at::Tensor& local = THPVariable_Unpack(tensor);
  if (local.layout() != at::kStrided || !local.has_storage()) return std::nullopt;
  return InStorage{address(local.storage().unsafeGetStorageImpl()),
                   local.storage_offset() * static_cast<int64_t>(local.element_size()), extent_of(local)};
}

inline bool is_alone(const at::Tensor& local) {
  if (!local.has_storage() || local.storage().use_count() != 1) return false;
  return local.storage().unsafeGetStorageImpl()->resizable();  // else it may be others' memory
}

// Whether nothing else can have a gradient's memory: neither its tensor object (of which the caller holds one
// reference), nor its tensor, nor its storage has another owner.
inline bool is_alone(const at::Tensor& grad, PyObject* wrapped, bool distributed) {
  if (Py_REFCNT(wrapped) != 1 || grad.use_count() > 2) return false;
  if (!distributed) return is_alone(grad);
  py::object keep;
  PyObject* inner = dtensor_attribute(wrapped, classes.local_tensor_offset, classes.local_tensor_name, keep);
  if (keep || Py_REFCNT(inner) != 1 || !is_tensor(inner)) return false;
  const at::Tensor& local = THPVariable_Unpack(inner);
  return local.use_count() == 1 && is_alone(local);
}

class SharedMemory {
 public:
  struct Words {
    uint64_t gradients = 0;  // of the state and of arguments
    uint64_t in_reach = 0;   // of tensors that are no state, of their gradients, and of buffers
  };

  // --- the state, which stays ---------------------------------------------------

  void forget_state() {
    state_storages_.clear();
    state_tensors_.clear();
  }

  // `owner`: a number that tells tensors apart, here and below.
  void add_state(uint32_t owner, PyObject* tensor) {
    state_tensors_.insert(address(THPVariable_Unpack(tensor).unsafeGetTensorImpl()));
    if (auto place = place_in_storage(tensor)) state_storages_.emplace(place->storage, Named{owner, place->bytes});
  }

  // --- a call, in this order ----------------------------------------------------

  void begin() {
    found_.clear();
    gradients_.clear();
  }

  // `wrapped`: its Python object.
  void add_gradient(uint64_t owner, const at::Tensor& grad, py::object wrapped) {
    found_.push_back({owner, &grad, std::move(wrapped), true, false});
  }

  void add_gradient_of(uint64_t owner, const at::Tensor& tensor, bool in_reach) {
    if (tensor.is_leaf() && tensor.grad().defined()) found_.push_back({owner, &tensor.grad(), wrap(tensor.grad()), true, in_reach});
  }

  // A tensor that is no state.
  void add_in_reach(uint64_t owner, const at::Tensor& tensor) { found_.push_back({owner, &tensor, wrap(tensor), false, true}); }

  // The words for all that was added: which of it lies in memory of the state, of arguments or of gradients before it.
  // `call` has collected the arguments.
  Words read(const Call& call) {
    Words words;
    std::unordered_map<uint64_t, Before> first;  // of the gradients in a storage
    for (const Found& each : found_) {
      auto place = place_in_storage(each.wrapped.ptr());
      if (!place) continue;
      uint64_t word = word_of(*place, *each.tensor, call);
      uint64_t itself = address(each.tensor->unsafeGetTensorImpl());
      auto before = first.find(place->storage);
      if (!word && before != first.end()) {
        uint64_t bytes = static_cast<uint64_t>(place->bytes - before->second.bytes);
        word = mix(mix(kGradient, before->second.owner), mix(bytes, before->second.tensor == itself));
      }
      if (each.gradient) {
        first.try_emplace(place->storage, Before{each.owner, place->bytes, itself});
        if (place->extent) gradients_.push_back(*place->extent);
      }
      uint64_t& into = each.in_reach ? words.in_reach : words.gradients;
      if (word) into = mix(into, mix(each.owner, word));
    }
    found_.clear();
    return words;
  }

  // Adds whether a buffer lies in the memory of the state, of an argument or of a gradient.
  void read_buffer(uint64_t owner, const Extent& extent, const Call& call, Words& words) const {
    auto overlaps = [&](const Extent& gradient) { return extent.overlaps(gradient); };
    if (call.overlaps(extent) || std::any_of(gradients_.begin(), gradients_.end(), overlaps))
      words.in_reach = mix(words.in_reach, mix(owner, kBuffer));
  }

 private:
  static py::object wrap(const at::Tensor& tensor) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  }

  // Whose memory it is.
  enum Whose : uint64_t {
    kState = 1ull << 32,
    kArgument = 2ull << 32,
    kForeign = 3ull << 32,  // of one of these by way of another storage
    kGradient = 4ull << 32,
    kBuffer = 5ull << 32,
  };

  // Which memory of the state or of an argument a tensor lies in, and where in it; 0 for other memory.
  uint64_t word_of(const InStorage& place, const at::Tensor& tensor, const Call& call) const {
    auto word = [&](uint64_t owner, int64_t bytes, bool same) {
      return mix(owner, mix(static_cast<uint64_t>(place.bytes - bytes), same));
    };
    uint64_t itself = address(tensor.unsafeGetTensorImpl());
    if (auto state = state_storages_.find(place.storage); state != state_storages_.end())
      return word(kState | state->second.owner, state->second.bytes, state_tensors_.count(itself) != 0);
    if (const Call::Start* leaf = call.in_storage(place.storage))
      return word(kArgument | leaf->leaf, leaf->bytes, address(leaf->tensor->unsafeGetTensorImpl()) == itself);
    return place.extent && call.overlaps(*place.extent) ? word(kForeign, 0, false) : 0;
  }

  struct Named {
    uint32_t owner;
    int64_t bytes;
  };
  struct Before {
    uint64_t owner;
    int64_t bytes;
    uint64_t tensor;
  };
  struct Found {
    uint64_t owner;
    const at::Tensor* tensor;
    py::object wrapped;
    bool gradient;
    bool in_reach;
  };
  std::unordered_map<uint64_t, Named> state_storages_;
  std::unordered_set<uint64_t> state_tensors_;
  std::vector<Found> found_;
  std::vector<Extent> gradients_;
};

}  // namespace rote
