// What waits for a tensor's gradient, as words.
#pragma once
#include <cstring>
#include <typeinfo>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "describe.h"
#include "metadata.h"
#include "views.h"

namespace rote {

// The Python functions in a hook, as `take(function)`; null for a hook of C++. `python` is the name of the class
// whose hooks hold functions in a dict: its type information is hidden in libtorch_python.
template <typename PythonHook, typename Hook, typename Take>
inline void functions_in(const Hook& hook, const char* python, Take&& take) {
  if (std::strstr(typeid(hook).name(), python) == nullptr) {
    take(nullptr);
    return;
  }
  PyObject* dict = reinterpret_cast<const PythonHook*>(&hook)->dict;
  PyObject *key, *function;
  Py_ssize_t position = 0;
  while (dict && PyDict_Check(dict) && PyDict_Next(dict, &position, &key, &function)) take(function);
}

// The functions in the hooks of a tensor, and of the node that adds up a leaf's gradient: `take(function)` for
// each Python function, null for a hook of C++.
template <typename Take>
inline void functions_in_hooks(const at::Tensor& tensor, Take&& take) {
  using namespace torch::autograd;
  const AutogradMeta* meta = impl::get_autograd_meta(tensor);
  if (!meta) return;
  for (const auto& hook : meta->hooks_) functions_in<PyFunctionTensorPreHook>(*hook, "23PyFunctionTensorPreHook", take);
  if (PostAccumulateGradHook* after = meta->post_acc_grad_hooks_.get())
    functions_in<PyFunctionTensorPostAccGradHooks>(*after, "32PyFunctionTensorPostAccGradHooks", take);
  if (!tensor.requires_grad() || !tensor.is_leaf()) return;
  auto node = impl::try_get_grad_accumulator(tensor);
  if (!node) return;
  for (const auto& hook : node->post_hooks()) functions_in<PyFunctionPostHook>(*hook, "18PyFunctionPostHook", take);
  for (const auto& hook : node->pre_hooks()) functions_in<PyFunctionPreHook>(*hook, "17PyFunctionPreHook", take);
}

// A list of these functions, None for a hook of C++.
inline py::list hooks_of(const at::Tensor& tensor) {
  py::list found;
  functions_in_hooks(tensor, [&](PyObject* function) {
    found.append(py::reinterpret_borrow<py::object>(function ? function : Py_None));
  });
  return found;
}

// Whether a tensor requires grad, or has a gradient without, what kind of tensor it is to the dispatcher, which
// hooks it has, and how it was made if it is a view. Without `outside`, neither the gradient nor hooks count.
inline uint64_t grad_flags(const at::Tensor& tensor, bool outside = true) {
  uint64_t kind = tensor.unsafeGetTensorImpl()->key_set().raw_repr();
  const auto* meta = torch::autograd::impl::get_autograd_meta(tensor);
  if (!meta) return mix(kind, 0);
  if (meta->grad_dtype_) kind = mix(kind, static_cast<uint64_t>(*meta->grad_dtype_) + 1);
  if (meta->allow_grad_dtype_mismatch_) kind = mix(kind, 0x6d69);
  bool needs = tensor.requires_grad();
  if (!outside) return mix(kind, (needs ? 1 : 0) | creation_of(tensor) << 40);
  bool left = !needs && meta->grad_.defined(), after = meta->post_acc_grad_hooks_ != nullptr;
  uint64_t flags = (needs ? 1 : 0) | (after ? 2 : 0) | (left ? 4 : 0) | meta->hooks_.size() << 3 |
                   creation_of(tensor) << 40;
  functions_in_hooks(tensor, [&](PyObject* function) { flags = mix(flags, address(function)); });
  return mix(kind, flags);
}

// The metadata of a gradient, and its own part in autograd. `wrapped`: its Python object.
inline uint64_t grad_word(const at::Tensor& grad, PyObject* wrapped) {
  uint64_t flags = mix(grad_flags(grad), grad.grad_fn() != nullptr);
  if (grad.is_leaf() && grad.grad().defined())  // a gradient of its own: always this one
    flags = mix(flags, address(grad.grad().unsafeGetTensorImpl()));
  const bool python = grad.key_set().has(c10::DispatchKey::Python);
  return mix(meta_word(python ? settled_tensor(wrapped) : grad), flags) | 1;
}

// The same of a leaf; 0 if there is none.
inline uint64_t grad_word(const at::Tensor& leaf) {
  const at::Tensor& grad = leaf.grad();
  if (!grad.defined()) return 0;
  py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(grad));
  return grad_word(grad, wrapped.ptr());
}

}  // namespace rote
