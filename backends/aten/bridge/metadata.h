// The metadata of tensors, and where in their storages they lie, as words.
#pragma once
#include <cstring>
#include <typeinfo>

#include "describe.h"
#include "values.h"

namespace rote {

// A number for the metadata of a tensor and where in its storage it lies.
inline uint64_t meta_word(const at::Tensor& tensor) {
  uint64_t hash = mix(static_cast<uint64_t>(tensor.scalar_type()), static_cast<uint64_t>(tensor.device().type()));
  hash = mix(hash, static_cast<uint8_t>(tensor.device().index()));
  for (int64_t size : tensor.sizes()) hash = mix(hash, size);
  if (tensor.layout() == at::kStrided && tensor.has_storage()) {
    for (int64_t stride : tensor.strides()) hash = mix(hash, stride);
    hash = mix(hash, tensor.storage_offset());
    hash = mix(hash, tensor.storage().nbytes());
    hash = mix(hash, (tensor.is_conj() ? 1 : 0) | (tensor.is_neg() ? 2 : 0));
  } else {
    hash = mix(hash, static_cast<uint64_t>(tensor.layout()) + 16);
  }
  return hash;
}

// Of a DTensor itself, which `.data =` changes and leaves its local tensor as it was.
inline uint64_t wrapper_word(const at::Tensor& outer) {
  uint64_t hash = mix(0x4454, outer.storage_offset());
  for (int64_t size : outer.sizes()) hash = mix(hash, size);
  for (int64_t stride : outer.strides()) hash = mix(hash, stride);
  return hash;
}

// What a tensor's record in C++ held when it was looked at last. While its bytes are the same, so are the tensor's
// sizes, strides, offset, dtype, device and layout, and which storage and which part in autograd it has.
class Record {
 public:
  bool holds(const at::Tensor& tensor) const {
    return known_ && std::memcmp(bytes_, start(tensor), kBytes) == 0;
  }

  void take(const at::Tensor& tensor) {
    const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
    // Classes derived from it keep more, and more than five sizes lie elsewhere.
    known_ = typeid(impl) == typeid(c10::TensorImpl) && impl.layout() == at::kStrided &&
             !impl.has_symbolic_sizes_strides() && impl.dim() <= 5 && !has_names(impl, 0);
    if (known_) std::memcpy(bytes_, start(tensor), kBytes);
  }

 private:
  // How many references there are changes without end, and says nothing.
  static constexpr size_t kBytes = sizeof(c10::TensorImpl) - sizeof(c10::intrusive_ptr_target);

  static const char* start(const at::Tensor& tensor) {
    return reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl()) + sizeof(c10::intrusive_ptr_target);
  }

  char bytes_[kBytes];
  bool known_ = false;
};

// The metadata of a tensor of the state, or of what a DTensor holds, as read last: its words are found again while nothing has changed.
class LastMetadata {
 public:
  uint64_t storage = 0, data = 0, meta = 0;  // of the local tensor
  uint64_t wrapper = 0;                      // of the DTensor itself

  // Reads both anew if one may have changed.
  void read(const at::Tensor& outer, const at::Tensor& local, bool distributed) {
    if (outer_.holds(outer) && local_.holds(local) && bytes_at_ == bytes_at(local) && size_ == size_of(local)) return;
    outer_.take(outer);
    local_.take(local);
    bytes_at_ = bytes_at(local);
    size_ = size_of(local);
    const bool stored = local.has_storage();
    storage = stored ? address(local.storage().unsafeGetStorageImpl()) : 0;
    data = stored ? address(local.unsafeGetTensorImpl()->data()) : 0;
    meta = meta_word(local);
    wrapper = distributed ? wrapper_word(outer) : 0;
  }

 private:
  static const void* bytes_at(const at::Tensor& local) { return local.has_storage() ? local.storage().data() : nullptr; }
  static size_t size_of(const at::Tensor& local) { return local.has_storage() ? local.storage().nbytes() : 0; }

  Record outer_, local_;
  const void* bytes_at_ = nullptr;
  size_t size_ = 0;
};

// Where a tensor lies in its storage; looked at closely, what it is a view of too.
inline Anchor place_of(PyObject* object, bool closely) {
  const at::Tensor local = local_tensor(object);
  Anchor place{0, 0, 0};
  if (!local.has_storage() || local.layout() != at::kStrided) return place;
  place.start = local.storage_offset() * static_cast<int64_t>(local.element_size());
  place.bytes = local.storage().nbytes();
  if (closely) {
    const at::Tensor& outer = THPVariable_Unpack(object);
    place.base = mix(0x506c, (outer.is_inference() ? 1 : 0) | (local.is_pinned() ? 2 : 0));
    if (outer.is_view()) place.base = mix(place.base, meta_word(at::Tensor(outer._base())));
  }
  return place;
}

}  // namespace rote
