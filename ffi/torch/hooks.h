// What waits for a tensor's gradient, as words.
#pragma once
#include <cstring>
#include <typeinfo>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "values.h"
#include "views.h"

namespace rote {

// The functions in the hooks of the node that adds up a leaf's gradient: `take(hook)` for each Python function,
// null for a hook of C++.
template <typename Take>
inline void accumulation_hooks(const at::Tensor& leaf, Take&& take) {
  auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!node) return;
  auto all = [&](const auto& hooks, const char* python) {
    for (const auto& hook : hooks) {
      const auto& found = *hook;
      if (std::strstr(typeid(found).name(), python) == nullptr) {
        take(nullptr);
        continue;
      }
      // The class is known by its name: its type information is hidden in libtorch_python.
      PyObject* dict = nullptr;
      if (std::strcmp(python, "18PyFunctionPostHook") == 0) {
        dict = reinterpret_cast<const torch::autograd::PyFunctionPostHook*>(&found)->dict;
      } else {
        dict = reinterpret_cast<const torch::autograd::PyFunctionPreHook*>(&found)->dict;
      }
      PyObject *key, *function;
      Py_ssize_t position = 0;
      while (dict && PyDict_Check(dict) && PyDict_Next(dict, &position, &key, &function)) take(function);
    }
  };
  all(node->post_hooks(), "18PyFunctionPostHook");
  all(node->pre_hooks(), "17PyFunctionPreHook");
}

// A list of these functions, None for a hook of C++.
inline py::list hooks_of(PyObject* tensor) {
  py::list found;
  const at::Tensor& leaf = THPVariable_Unpack(tensor);
  if (leaf.requires_grad() && leaf.is_leaf())
    accumulation_hooks(leaf, [&](PyObject* hook) {
      found.append(py::reinterpret_borrow<py::object>(hook ? hook : Py_None));
    });
  return found;
}

// Whether a tensor requires grad, what kind of tensor it is to the dispatcher, which hooks wait for its
// gradient, and how it was made if it is a view.
inline uint64_t grad_flags(const at::Tensor& tensor) {
  uint64_t kind = tensor.unsafeGetTensorImpl()->key_set().raw_repr();
  if (!torch::autograd::impl::get_autograd_meta(tensor)) return mix(kind, 0);
  uint64_t hooks = torch::autograd::impl::hooks(tensor).size();
  bool after = torch::autograd::impl::post_acc_grad_hooks(tensor) != nullptr;
  uint64_t flags = (tensor.requires_grad() ? 1 : 0) | (after ? 2 : 0) | hooks << 2 | creation_of(tensor) << 40;
  if (tensor.requires_grad() && tensor.is_leaf())
    accumulation_hooks(tensor, [&](PyObject* hook) { flags = mix(flags, address(hook)); });
  return mix(kind, flags);
}

}  // namespace rote
