// Numbers among arguments, and tensors that stand for them.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/scalar_tensor.h>

#include "abi.h"

namespace rote {

inline c10::Scalar number(const Arg& arg) {
  switch (arg.tag) {
    case kBool: return arg.i != 0;
    case kInt: return arg.i;
    case kFloat: return arg.f;
    case kComplex: return c10::complex<double>(arg.c[0], arg.c[1]);
    default: TORCH_CHECK(false, "argument of kind ", static_cast<int>(arg.tag), " where a number is expected");
  }
}

// The tensor without dims that PyTorch makes of a number among tensors.
inline at::Tensor wrapped(const c10::Scalar& number) {
  at::Tensor tensor = at::scalar_tensor(number, number.isFloatingPoint() ? at::kDouble
                                                : number.isComplex()     ? at::kComplexDouble
                                                : number.isBoolean()     ? at::kBool
                                                                         : at::kLong);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

// Puts another number in such a tensor, unless somebody else holds the tensor too.
inline bool set_wrapped(const at::Tensor& tensor, double number) {
  if (tensor.scalar_type() != at::kDouble || tensor.use_count() != 1 || tensor.storage().use_count() != 1) return false;
  *static_cast<double*>(tensor.mutable_data_ptr()) = number;
  return true;
}

// The number in a plain tensor of one float on the host. False: it is no such tensor.
inline bool number_in(const at::Tensor& tensor, double* number) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.device().is_cpu() || !tensor.has_storage() ||
      tensor.numel() != 1 || tensor.is_conj() || tensor.is_neg() || tensor._is_zerotensor() ||
      tensor.unsafeGetTensorImpl()->is_python_dispatch()) {
    return false;
  }
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case at::kFloat: *number = *static_cast<const float*>(data); return true;
    case at::kDouble: *number = *static_cast<const double*>(data); return true;
    default: return false;
  }
}

}  // namespace rote
