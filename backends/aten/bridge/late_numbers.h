// Ops with numbers that the step has computed from what it read of tensors: see NUMBER_OPS in plans/src/instr.rs. Each
// number is in a tensor of its own, and the op of PyTorch gets it as it got it from Python.
#pragma once
#include <ATen/ATen.h>
#include <torch/library.h>

namespace rote {

inline double number_in(const at::Tensor& number) {
  TORCH_CHECK(number.is_cpu() && number.scalar_type() == at::kDouble && number.numel() == 1,
              "a number of a plan must be one f64 on the host");
  return at::_local_scalar_dense(number).toDouble();
}

inline void add_number_(const at::Tensor& self, const at::Tensor& other, const at::Tensor& alpha) {
  self.add_(other, number_in(alpha));
}

inline void foreach_mul_numbers_(at::TensorList self, at::TensorList numbers) {
  std::vector<at::Scalar> plain;
  for (const at::Tensor& number : numbers) plain.emplace_back(number_in(number));
  at::_foreach_mul_(self, plain);
}

// Makes the ops known to PyTorch, for as long as the process lasts.
inline void register_late_numbers() {
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "rote", {}, __FILE__, __LINE__);
  static bool registered = [] {
    library->def("add_number_(Tensor(a!) self, Tensor other, Tensor alpha) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(add_number_)));
    library->def("foreach_mul_numbers_(Tensor(a!)[] self, Tensor[] numbers) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(foreach_mul_numbers_)));
    return true;
  }();
  (void)registered;
}

}  // namespace rote
