// What autograd knows of a tensor as a view: its base, how it was made, and
// whose version counter it has. Replays make their results so, too.
#pragma once
#include <cstring>
#include <optional>

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

#include "describe.h"

namespace rote {

// Tensors with one version counter have one number, which others have not while these live.
inline uint64_t counter_of(const at::Tensor& tensor) {
  const c10::VariableVersion& version = torch::autograd::impl::version_counter(tensor);
  static_assert(sizeof(version) == sizeof(uint64_t), "a version is a pointer to its counter");
  uint64_t counter = 0;
  std::memcpy(&counter, &version, sizeof(counter));
  return counter;
}

// The tensor that autograd takes a view for a part of; the tensor itself when it is no view.
inline const at::Tensor& root_of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  return meta && meta->has_bw_view() ? meta->get_backward_view().base_ : tensor;
}

// How a view was made: without gradients, as one of several results, ...; 0 of any other tensor.
inline uint64_t creation_of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  return meta && meta->has_bw_view() ? static_cast<uint64_t>(meta->get_creation_meta()) : 0;
}

// What makes a view of its base once more, where strides do not say it all.
struct Rebuild {
  std::unique_ptr<torch::autograd::ViewFunc> forth;
  std::function<at::Tensor(const at::Tensor&)> back;

  static constexpr const char* kName = "rote.rebuild";

  static const Rebuild* in(PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, kName)) return nullptr;
    return static_cast<const Rebuild*>(PyCapsule_GetPointer(capsule, kName));
  }

  // None where the strides do; False where it needs other tensors, which nobody may hold.
  static py::object of(const torch::autograd::ViewInfo& info) {
    if (!info.has_view_fn()) return py::none();
    if (info.view_fn().num_tensors() > 0) return py::bool_(false);
    auto* rebuild = new Rebuild{info.view_fn().clone_and_set(), info.rev_view_fn()};
    return py::reinterpret_steal<py::object>(PyCapsule_New(
        rebuild, kName, [](PyObject* capsule) { delete const_cast<Rebuild*>(Rebuild::in(capsule)); }));
  }
};

// What a tensor is to autograd: bits of `how` in a view.
enum How : uint32_t {
  kBackward = 1,  // gradients go to its base
  kForward = 2,   // tangents come from its base
  kStale = 4,     // its memory was written since it was made
  kCounts = 8,    // it has a version counter of its own
                  // 16 is Python's: an inference tensor, which has no version counter
  kCreated = 32,  // times this: how it was made
};

// What autograd knows of a tensor as a view: (version counter, whether another tensor has it too, how, base, whether it
// has a gradient function of its own or requires grad by itself, what rebuilds it). Base is None where there is none.
inline py::tuple view_of(const at::Tensor& tensor) {
  const auto* meta = torch::autograd::impl::get_view_autograd_meta(tensor);
  const auto* own = torch::autograd::impl::get_autograd_meta(tensor);
  uint32_t how = 0;
  py::object base = py::none(), rebuild = py::none();
  if (meta) {
    const auto& info = meta->has_bw_view() ? meta->get_backward_view() : meta->get_forward_view();
    if (meta->has_bw_view()) {
      how = kBackward | kCreated * static_cast<uint32_t>(meta->get_creation_meta());
      const bool counts = !tensor.is_inference() && counter_of(tensor) != counter_of(info.base_);
      if (counts) how |= kCounts;
      if (!counts && meta->get_attr_version() != static_cast<uint32_t>(tensor._version())) how |= kStale;
    }
    if (meta->has_fw_view()) how |= kForward;
    base = py::reinterpret_steal<py::object>(THPVariable_Wrap(info.base_));
    rebuild = Rebuild::of(info);
  }
  const bool counted = !tensor.is_inference();
  const bool shared = counted && !torch::autograd::impl::version_counter(tensor).unique();
  return py::make_tuple(counted ? counter_of(tensor) : 0, shared, how, base, own && (own->requires_grad_ || own->grad_fn_),
                        rebuild);
}

// Makes a tensor a view of `base` as a view op does, or, if `how` is 0, gives it the version counter of `base` alone. The
// tensor shares the memory of `base`, and is no view yet.
inline void make_view(const at::Tensor& tensor, const at::Tensor& base, uint32_t how, const py::object& rebuilt) {
  using namespace torch::autograd;
  auto has_memory = [](const at::Tensor& of) { return of.has_storage() && !of.key_set().has(c10::DispatchKey::Python); };
  const bool stored = has_memory(tensor) && has_memory(base);
  TORCH_CHECK(!stored || tensor.storage().is_alias_of(base.storage()), "a view of what has other memory");
  if (tensor.is_inference() || base.is_inference() || tensor.is_same(base)) return;
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (!(how & (kBackward | kForward))) return impl->set_version_counter(impl::version_counter(base));
  const auto* under = impl::get_view_autograd_meta(base);
  const Rebuild* rebuild = Rebuild::in(rebuilt.ptr());
  auto info = [&](const ViewInfo* through) {
    std::unique_ptr<ViewFunc> forth = rebuild ? rebuild->forth->clone_and_set() : nullptr;
    auto back = rebuild ? rebuild->back : std::function<at::Tensor(const at::Tensor&)>();
    return through ? through->chain(base, tensor, std::move(forth), std::move(back))
                   : ViewInfo(base, std::move(forth), std::move(back));
  };
  const bool backward = how & kBackward, forward = how & kForward;
  const bool shared = (!under || under->shared_view_info()) && backward && forward;
  std::optional<ViewInfo> to_gradients, to_tangents;
  auto created = static_cast<CreationMeta>(how / kCreated);
  if (backward) {
    const bool chained = under && under->has_bw_view();
    to_gradients = info(chained ? &under->get_backward_view() : nullptr);
    if (chained) created = propagate_creation_meta(under->get_creation_meta(), created);
  }
  if (forward && !shared) to_tangents = info(under && under->has_fw_view() ? &under->get_forward_view() : nullptr);
  impl->set_version_counter(impl::version_counter(base));
  impl->set_autograd_meta(std::make_unique<DifferentiableViewMeta>(impl, std::move(to_gradients),
                                                                   std::move(to_tangents), shared, created));
  if (how & kCounts) impl->set_version_counter(c10::VariableVersion(0));
  if (backward && (how & kStale))
    impl::get_view_autograd_meta(tensor)->set_attr_version(static_cast<uint32_t>(tensor._version()) - 1);
}

// The same tensor as one that was made in inference mode.
inline at::Tensor as_inference(const at::Tensor& tensor) {
  if (tensor.is_inference() || !tensor.has_storage()) return tensor;
  c10::InferenceMode mode;
  auto keys = tensor.key_set() - c10::autograd_dispatch_keyset_with_ADInplaceOrView;
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(tensor.storage()), keys, tensor.dtype());
  c10::TensorImpl* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return out;
}

// The addresses of a storage. Two storages may lie in the same memory if one of them is of memory that PyTorch has not
// allocated: an array of NumPy's, what DLPack brought.
struct Extent {
  uint64_t begin;
  uint64_t end;
  uint64_t storage;
  bool foreign;

  bool overlaps(const Extent& other) const {
    return storage != other.storage && begin < other.end && other.begin < end;
  }
};

inline std::optional<Extent> extent_of(const at::Tensor& local) {
  if (!local.has_storage() || !(local.is_cpu() || local.is_cuda())) return std::nullopt;
  if (local.key_set().has(c10::DispatchKey::Python)) return std::nullopt;  // it wraps others
  const c10::StorageImpl* storage = local.storage().unsafeGetStorageImpl();
  uint64_t begin = reinterpret_cast<uint64_t>(storage->data());
  if (!begin || !storage->nbytes()) return std::nullopt;
  return Extent{begin, begin + storage->nbytes(), address(storage), !storage->resizable()};
}

// The memory of what has the protocol of buffers, which has no storage of PyTorch's.
inline std::optional<Extent> extent_of_buffer(PyObject* object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object, &view, PyBUF_FULL_RO) != 0) {
    forget_error();
    return std::nullopt;
  }
  uint64_t begin = address(view.buf), end = begin + (view.strides ? view.itemsize : view.len);
  for (int i = 0; view.strides && i < view.ndim && view.len; ++i) {
    int64_t last = view.strides[i] * (view.shape[i] - 1);
    last < 0 ? begin += last : end += last;
  }
  bool empty = !view.len;
  PyBuffer_Release(&view);
  if (empty) return std::nullopt;
  return Extent{begin, end, 0, true};
}

}  // namespace rote
