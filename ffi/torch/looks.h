// How tensors look, and where in their storages they lie, as words.
#pragma once
#include "describe.h"
#include "values.h"

namespace rote {

// A number for how a tensor looks and where in its storage it lies.
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

// Where a tensor lies in its storage; looked at closely, what it is a view of too.
inline Place place_of(PyObject* object, bool closely) {
  const at::Tensor local = local_tensor(object);
  Place place{0, 0, 0};
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
