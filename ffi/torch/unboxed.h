// Direct calls of the most frequent kinds of ops: their tensors are read where
// they lie in the slots, without a stack of boxed arguments.
#pragma once
#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace rote {

// The arguments of one op: tensors as slots, numbers as constants, both in the
// order of the schema.
struct Direct {
  std::vector<const at::Tensor*> tensors;
  const std::vector<c10::IValue>* constants = nullptr;
  std::vector<uint32_t> numbers;   // positions among the constants
  std::vector<at::Tensor> list;    // of an op whose first argument is a list
  std::function<void(const Direct&)> call;

  at::Tensor& written() const { return const_cast<at::Tensor&>(*tensors.back()); }
  at::Tensor& first() const { return const_cast<at::Tensor&>(*tensors.front()); }
  at::Scalar scalar(size_t i) const { return (*constants)[numbers[i]].toScalar(); }
  int64_t integer(size_t i) const { return (*constants)[numbers[i]].toInt(); }
  bool flag(size_t i) const { return (*constants)[numbers[i]].toBool(); }
};

// The kinds of arguments of a schema: t tensor, T tensor that is written, l list
// of tensors, s number, i integer, b truth value, ? anything else.
inline std::string kinds_of(const c10::FunctionSchema& schema) {
  std::string kinds;
  for (const c10::Argument& formal : schema.arguments()) {
    const c10::TypePtr& type = formal.type();
    bool written = formal.alias_info() && formal.alias_info()->isWrite();
    switch (type->kind()) {
      case c10::TypeKind::TensorType: kinds += written ? 'T' : 't'; break;
      case c10::TypeKind::ListType:
        kinds += type->expectRef<c10::ListType>().getElementType()->kind() == c10::TypeKind::TensorType ? 'l' : '?';
        break;
      case c10::TypeKind::NumberType: kinds += 's'; break;
      case c10::TypeKind::IntType: kinds += 'i'; break;
      case c10::TypeKind::BoolType: kinds += 'b'; break;
      default: kinds += '?';
    }
  }
  return kinds;
}

template <typename Signature, typename Body>
std::function<void(const Direct&)> typed(const c10::OperatorHandle& handle, Body body) {
  auto op = handle.typed<Signature>();  // throws when the kernel has another signature
  return [op, body](const Direct& direct) { body(op, direct); };
}

// How to call ops of these kinds, or nothing.
inline std::function<void(const Direct&)> direct_call(const c10::OperatorHandle& handle, const std::string& kinds) {
  using at::Scalar;
  using at::Tensor;
  if (kinds == "tT")
    return typed<Tensor&(const Tensor&, Tensor&)>(
        handle, [](const auto& op, const Direct& d) { op.call(*d.tensors[0], d.written()); });
  if (kinds == "ttT")
    return typed<Tensor&(const Tensor&, const Tensor&, Tensor&)>(
        handle, [](const auto& op, const Direct& d) { op.call(*d.tensors[0], *d.tensors[1], d.written()); });
  if (kinds == "tttT")
    return typed<Tensor&(const Tensor&, const Tensor&, const Tensor&, Tensor&)>(
        handle,
        [](const auto& op, const Direct& d) { op.call(*d.tensors[0], *d.tensors[1], *d.tensors[2], d.written()); });
  if (kinds == "ttsT")
    return typed<Tensor&(const Tensor&, const Tensor&, const Scalar&, Tensor&)>(
        handle,
        [](const auto& op, const Direct& d) { op.call(*d.tensors[0], *d.tensors[1], d.scalar(0), d.written()); });
  if (kinds == "tsT")
    return typed<Tensor&(const Tensor&, const Scalar&, Tensor&)>(
        handle, [](const auto& op, const Direct& d) { op.call(*d.tensors[0], d.scalar(0), d.written()); });
  if (kinds == "tttssT")
    return typed<Tensor&(const Tensor&, const Tensor&, const Tensor&, const Scalar&, const Scalar&, Tensor&)>(
        handle, [](const auto& op, const Direct& d) {
          op.call(*d.tensors[0], *d.tensors[1], *d.tensors[2], d.scalar(0), d.scalar(1), d.written());
        });
  if (kinds == "Tt")
    return typed<Tensor&(Tensor&, const Tensor&)>(
        handle, [](const auto& op, const Direct& d) { op.call(d.first(), *d.tensors[1]); });
  if (kinds == "Tts")
    return typed<Tensor&(Tensor&, const Tensor&, const Scalar&)>(
        handle, [](const auto& op, const Direct& d) { op.call(d.first(), *d.tensors[1], d.scalar(0)); });
  if (kinds == "Ttb")
    return typed<Tensor&(Tensor&, const Tensor&, bool)>(
        handle, [](const auto& op, const Direct& d) { op.call(d.first(), *d.tensors[1], d.flag(0)); });
  if (kinds == "liT")
    return typed<Tensor&(const at::ITensorListRef&, int64_t, Tensor&)>(
        handle, [](const auto& op, const Direct& d) { op.call(d.list, d.integer(0), d.written()); });
  return {};
}

}  // namespace rote
