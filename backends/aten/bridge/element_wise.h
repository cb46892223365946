// Element-wise ops on the CPU, called with what PyTorch makes anew at every call: the
// iterator over their operands (dtypes, broadcasting, strides, overlaps).
//
// PyTorch's structured kernels come in two halves: `meta` makes the iterator, `impl`
// runs the kernel over it. Here `meta` runs once and `impl` at every call, so it is the
// same kernel over the same memory. It may stand in for the dispatcher's call where
// that would do nothing else: all operands are plain tensors of one element type, which
// lie where they lay, and the op's kernel is PyTorch's own.
#pragma once
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/TensorIterator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/add_native.h>
#include <ATen/ops/addcdiv_native.h>
#include <ATen/ops/addcmul_native.h>
#include <ATen/ops/div_native.h>
#include <ATen/ops/lerp_native.h>
#include <ATen/ops/mul_native.h>
#include <ATen/ops/neg_native.h>
#include <ATen/ops/rsqrt_native.h>
#include <ATen/ops/scalar_tensor.h>
#include <ATen/ops/silu_backward_native.h>
#include <ATen/ops/silu_native.h>
#include <ATen/ops/sqrt_native.h>
#include <ATen/ops/sub_native.h>

#include "unboxed.h"

namespace rote {
class OwnKernel;
}

// The dispatcher shows its table to typed handles alone. Asking it for a kernel by its other functions costs memory
// each time, which it keeps.
template <>
class c10::TypedOperatorHandle<rote::OwnKernel> {
 public:
  static const c10::KernelFunction& on_cpu(const c10::OperatorHandle& op) {
    return op.operatorDef_->op.lookup(c10::DispatchKeySet(c10::DispatchKey::CPU));
  }
};

namespace rote {

// Whether the dispatcher, asked on this thread, has nothing to do for plain tensors on
// the CPU but to call their kernel.
inline bool goes_to_kernel(c10::DispatchKeySet keys, c10::DispatchKeySet included, c10::DispatchKeySet excluded) {
  keys = ((keys | included) - excluded).remove(c10::DispatchKey::BackendSelect);
  return keys.highestPriorityTypeId() == c10::DispatchKey::CPU;
}

inline bool thread_goes_to_kernel() {
  const auto local = c10::impl::tls_local_dispatch_key_set();
  return goes_to_kernel(c10::DispatchKeySet(c10::DispatchKey::CPU), local.included_, local.excluded_);
}

// PyTorch's own kernel of an op on the CPU: a library may put another in its place, at any time.
class OwnKernel {
 public:
  // Nothing if another is there now.
  static std::optional<OwnKernel> of(const c10::OperatorHandle& op) {
    if (!op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU)) return std::nullopt;
    const std::string registered = op.getComputedKernelForDispatchKey(c10::DispatchKey::CPU).debug();
    if (registered.find("/RegisterCPU") == std::string::npos) return std::nullopt;
    return OwnKernel(op);
  }

  // Whether the dispatcher would call it.
  bool is_there() const {
    return c10::TypedOperatorHandle<OwnKernel>::on_cpu(op_)._equalsBoxedAndUnboxed(kernel_);
  }

  bool is_of(const c10::OperatorHandle& op) const { return op_ == op; }

 private:
  explicit OwnKernel(const c10::OperatorHandle& op)
      : op_(op), kernel_(c10::TypedOperatorHandle<OwnKernel>::on_cpu(op)) {}

  c10::OperatorHandle op_;
  c10::KernelFunction kernel_;
};

// A tensor that a kernel reads or writes: it lies in a slot, or wraps a number, which
// may be another one at every step.
class Operand {
 public:
  // Throws, as all of this file does, where an iterator cannot stay.
  Operand(const at::Tensor* place, at::ScalarType type, bool written) : place_(place), written_(written) {
    // Kernels of other types compute with the number before it is rounded, and take iterators apart.
    TORCH_CHECK(place->defined() && (type == at::kFloat || type == at::kDouble));
    wraps_number_ = place->unsafeGetTensorImpl()->is_wrapped_number();
    if (wraps_number_) {
      tensor_ = at::scalar_tensor(0, type);
      tensor_.unsafeGetTensorImpl()->set_wrapped_number(true);
      data_ = tensor_.mutable_data_ptr();
      TORCH_CHECK(!written && take_number());
    } else {
      tensor_ = *place;
      const auto below = c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset;
      TORCH_CHECK(goes_to_kernel(tensor_.key_set(), {}, below) && tensor_.scalar_type() == type);
      data_ = memory();
    }
  }

  const at::Tensor& tensor() const { return tensor_; }
  const void* data() const { return data_; }

  // Whether it is the tensor of before, in the memory of before. Takes the number of this step.
  bool is_ready() const { return wraps_number_ ? take_number() : place_->is_same(tensor_) && memory() == data_; }

 private:
  const void* memory() const { return written_ ? tensor_.mutable_data_ptr() : tensor_.const_data_ptr(); }

  // Rounds the number to the element type, as the iterator of a call does.
  bool take_number() const { return tensor_.scalar_type() == at::kFloat ? round_to<float>() : round_to<double>(); }

  template <typename T>
  bool round_to() const {
    const void* from = place_->const_data_ptr();
    T* to = static_cast<T*>(const_cast<void*>(data_));
    switch (place_->scalar_type()) {
      case at::kDouble: *to = static_cast<T>(*static_cast<const double*>(from)); return true;
      case at::kLong: *to = static_cast<T>(*static_cast<const int64_t*>(from)); return true;
      default: return false;
    }
  }

  const at::Tensor* place_;
  bool written_;
  bool wraps_number_;
  at::Tensor tensor_;  // held: the iterator has its address
  const void* data_;
};

// A structured kernel that writes a given tensor as it lies. Older versions of torch
// hand over names of dims too.
template <typename Structured, typename Method>
class OnResult;

template <typename Structured, typename... Names>
class OnResult<Structured, void (at::impl::MetaBase::*)(int64_t, c10::IntArrayRef, c10::IntArrayRef, c10::TensorOptions, Names...)>
    : public Structured {
 public:
  explicit OnResult(const at::Tensor& result) : result_(result) {}

  const at::Tensor& maybe_get_output(int64_t) override { return result_; }

  void set_output_strided(int64_t at, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::TensorOptions options,
                          Names... names) override {
    set_output_raw_strided(at, sizes, strides, options, names...);
  }

  void set_output_raw_strided(int64_t at, c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::TensorOptions options,
                              Names... names) override {
    TORCH_CHECK(result_.sizes() == sizes && (strides.empty() || result_.strides() == strides));
    Structured::set_output_raw_strided(at, sizes, strides, options, names...);
  }

 private:
  const at::Tensor& result_;
};

template <typename Structured>
using OnGivenResult = OnResult<Structured, decltype(&at::impl::MetaBase::set_output_raw_strided)>;

// One op with its iterator.
struct ElementWise {
  virtual ~ElementWise() = default;
  // Runs the kernel. False, and nothing is done, where an operand or the iterator is not as it was.
  virtual bool call() = 0;
};

// An argument of a structured kernel, by its kind as in `kinds_of`.
template <char kind>
struct Argument;

template <>
struct Argument<'t'> : Operand {
  Argument(const DirectArguments& from, size_t at, at::ScalarType type) : Operand(from.tensors[at], type, false) {}
  const at::Tensor& get() const { return tensor(); }
  bool lies_at(const void* data) const { return data == this->data(); }
  static constexpr int kOperands = 1;
};

template <>
struct Argument<'s'> : Kept<'s'> {
  Argument(const DirectArguments& from, size_t at, at::ScalarType) : Kept(from, at) {}
  bool is_ready() const { return true; }
  bool lies_at(const void*) const { return true; }
  static constexpr int kOperands = 0;
};

template <typename Structured, char... kinds>
class TypedElementWise final : public ElementWise {
 public:
  // `result`: the place of the result among the arguments of the schema. In an op in
  // place it is the first of them, and in any other it follows them.
  TypedElementWise(const DirectArguments& from, size_t result)
      : TypedElementWise(from, result, std::make_index_sequence<sizeof...(kinds)>()) {}

  bool call() override {
    return std::apply(
        [&](const auto&... arguments) {
          if (!result_.is_ready() || !(arguments.is_ready() && ...) || !goes_over_operands()) return false;
          iterator_.impl(arguments.get()..., result_.tensor());
          return true;
        },
        arguments_);
  }

 private:
  template <size_t... at>
  TypedElementWise(const DirectArguments& from, size_t result, std::index_sequence<at...>)
      : result_(from.tensors[result], from.tensors[result]->scalar_type(), true),
        arguments_(Argument<kinds>(from, at, result_.tensor().scalar_type())...),
        iterator_(result_.tensor()) {
    std::apply([&](const auto&... arguments) { iterator_.meta(arguments.get()...); }, arguments_);
    TORCH_CHECK(goes_over_operands());
  }

  // Whether the iterator goes over all operands, where they lie: `meta` may have made copies,
  // and a kernel may have taken an operand out.
  bool goes_over_operands() const {
    int at = 0;
    auto next = [&](const auto& argument) {
      if constexpr (std::decay_t<decltype(argument)>::kOperands == 0) return true;
      return ++at < iterator_.ntensors() && argument.lies_at(iterator_.data_ptr(at));
    };
    return iterator_.data_ptr(0) == result_.data() &&
           std::apply([&](const auto&... arguments) { return (next(arguments) && ...); }, arguments_) &&
           iterator_.ntensors() == at + 1;
  }

  Operand result_;
  std::tuple<Argument<kinds>...> arguments_;
  OnGivenResult<Structured> iterator_;
};

// An op, as a row of a table: its name, its overloads in place and into a given result,
// and how to make it.
struct ElementWiseOp {
  const char* name;
  const char* in_place;
  const char* into;
  size_t arguments;
  std::unique_ptr<ElementWise> (*make)(const DirectArguments&, size_t result);
};

template <typename Structured, char... kinds>
constexpr ElementWiseOp element_wise_op(const char* name, const char* in_place, const char* into) {
  return {name, in_place, into, sizeof...(kinds),
          [](const DirectArguments& from, size_t result) -> std::unique_ptr<ElementWise> {
            return std::make_unique<TypedElementWise<Structured, kinds...>>(from, result);
          }};
}

// How to call an op with an iterator that stays, or nothing. Its tensors must stay in their slots.
inline std::unique_ptr<ElementWise> element_wise(const DirectArguments& from) {
  namespace n = at::native;
  static constexpr ElementWiseOp known[] = {
      element_wise_op<n::structured_ufunc_add_CPU, 't', 't', 's'>("aten::add", "Tensor", "out"),
      element_wise_op<n::structured_sub_out, 't', 't', 's'>("aten::sub", "Tensor", "out"),
      element_wise_op<n::structured_mul_out, 't', 't'>("aten::mul", "Tensor", "out"),
      element_wise_op<n::structured_div_out, 't', 't'>("aten::div", "Tensor", "out"),
      element_wise_op<n::structured_addcmul_out, 't', 't', 't', 's'>("aten::addcmul", "", "out"),
      element_wise_op<n::structured_addcdiv_out, 't', 't', 't', 's'>("aten::addcdiv", "", "out"),
      element_wise_op<n::structured_lerp_Scalar, 't', 't', 's'>("aten::lerp", "Scalar", "Scalar_out"),
      element_wise_op<n::structured_neg_out, 't'>("aten::neg", "", "out"),
      element_wise_op<n::structured_sqrt_out, 't'>("aten::sqrt", "", "out"),
      element_wise_op<n::structured_rsqrt_out, 't'>("aten::rsqrt", "", "out"),
      element_wise_op<n::structured_silu_out, 't'>("aten::silu", "", "out"),
      element_wise_op<n::structured_silu_backward_out, 't', 't'>("aten::silu_backward", "", "grad_input"),
  };
  const c10::FunctionSchema& schema = from.handle.schema();
  const size_t count = schema.arguments().size();
  for (const ElementWiseOp& op : known) {
    const bool in_place = schema.name() == std::string(op.name) + "_" && schema.overload_name() == op.in_place;
    const bool into = schema.name() == op.name && schema.overload_name() == op.into;
    if (!(in_place && count == op.arguments) && !(into && count == op.arguments + 1)) continue;
    try {
      return op.make(from, in_place ? 0 : op.arguments);
    } catch (const c10::Error&) {
      return nullptr;
    }
  }
  return nullptr;
}

}  // namespace rote
