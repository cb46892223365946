// Direct calls of the most frequent kinds of ops: their tensors are read where
// they lie in the slots, without a stack of boxed arguments.
#pragma once
#include <memory>
#include <tuple>
#include <vector>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

namespace rote {

// One op with all that its calls need, in one piece of memory.
struct Direct {
  virtual ~Direct() = default;
  virtual void call() const = 0;
};

// What a direct call is made from. Each argument has a place in `tensors` (where
// the tensor lies) or in `constants`, by its position in the schema.
struct DirectArguments {
  const c10::OperatorHandle& handle;
  std::vector<const at::Tensor*> tensors;
  const std::vector<c10::IValue>& constants;
  std::vector<at::Tensor> list;  // of an op whose first argument is a list
  at::Tensor* result;            // where an op that makes a result puts it
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

// Of each kind: its type in C++, and what is kept of an argument to pass it.
template <char kind>
struct Kept;

template <>
struct Kept<'t'> {
  using Type = const at::Tensor&;
  Kept(const DirectArguments& from, size_t at) : tensor(from.tensors[at]) {}
  Type get() const { return *tensor; }
  const at::Tensor* tensor;
};

template <>
struct Kept<'T'> {
  using Type = at::Tensor&;
  Kept(const DirectArguments& from, size_t at) : tensor(const_cast<at::Tensor*>(from.tensors[at])) {}
  Type get() const { return *tensor; }
  at::Tensor* tensor;
};

template <>
struct Kept<'l'> {
  using Type = const at::ITensorListRef&;
  Kept(const DirectArguments& from, size_t) : tensors(from.list) {}
  at::ITensorListRef get() const { return tensors; }
  std::vector<at::Tensor> tensors;
};

// Another number may be bound at any step.
template <>
struct Kept<'s'> {
  using Type = const at::Scalar&;
  Kept(const DirectArguments& from, size_t at) : number(&from.constants[at]) {}
  at::Scalar get() const { return number->toScalar(); }
  const c10::IValue* number;
};

template <>
struct Kept<'i'> {
  using Type = int64_t;
  Kept(const DirectArguments& from, size_t at) : number(from.constants[at].toInt()) {}
  Type get() const { return number; }
  int64_t number;
};

template <>
struct Kept<'b'> {
  using Type = bool;
  Kept(const DirectArguments& from, size_t at) : flag(from.constants[at].toBool()) {}
  Type get() const { return flag; }
  bool flag;
};

// `Result`: Tensor& of an op that writes an argument, Tensor of one that makes
// its result.
template <typename Result, char... kinds>
class TypedDirect final : public Direct {
 public:
  explicit TypedDirect(const DirectArguments& from) : TypedDirect(from, std::make_index_sequence<sizeof...(kinds)>()) {}

  void call() const override {
    std::apply(
        [&](const auto&... kept) {
          if constexpr (std::is_reference_v<Result>) {
            op_.call(kept.get()...);
          } else {
            *result_ = op_.call(kept.get()...);
          }
        },
        kept_);
  }

 private:
  using Signature = Result(typename Kept<kinds>::Type...);

  // Throws when the kernel has another signature.
  template <size_t... at>
  TypedDirect(const DirectArguments& from, std::index_sequence<at...>)
      : op_(from.handle.typed<Signature>()), result_(from.result), kept_(Kept<kinds>(from, at)...) {}

  c10::TypedOperatorHandle<Signature> op_;
  at::Tensor* result_;
  std::tuple<Kept<kinds>...> kept_;
};

// One kind of signature, as a row of a table.
struct DirectKind {
  const char* kinds;
  bool makes_result;
  std::unique_ptr<Direct> (*make)(const DirectArguments&);
};

template <char... kinds>
inline constexpr char kinds_text[] = {kinds..., '\0'};

template <typename Result, char... kinds>
constexpr DirectKind direct_kind() {
  return {kinds_text<kinds...>, !std::is_reference_v<Result>, [](const DirectArguments& from) -> std::unique_ptr<Direct> {
            return std::make_unique<TypedDirect<Result, kinds...>>(from);
          }};
}

// Whether an op has one result, and that is a tensor: a new one, or the one argument
// that it writes.
inline bool one_tensor(const c10::FunctionSchema& schema, bool makes_result) {
  if (schema.returns().size() != 1 || schema.returns()[0].type()->kind() != c10::TypeKind::TensorType) return false;
  const c10::AliasInfo* result = schema.returns()[0].alias_info();
  if (makes_result) return result == nullptr;
  for (const c10::Argument& formal : schema.arguments())
    if (formal.alias_info() && formal.alias_info()->isWrite())
      return result && result->isWrite() && result->beforeSets() == formal.alias_info()->beforeSets();
  return false;
}

// How to call an op of these kinds, or nothing.
inline std::unique_ptr<Direct> direct_call(const std::string& kinds, const DirectArguments& from) {
  using at::Tensor;
  static constexpr DirectKind known[] = {
      direct_kind<Tensor&, 't', 'T'>(),
      direct_kind<Tensor&, 't', 't', 'T'>(),
      direct_kind<Tensor&, 't', 't', 't', 'T'>(),
      direct_kind<Tensor&, 't', 't', 's', 'T'>(),
      direct_kind<Tensor&, 't', 's', 'T'>(),
      direct_kind<Tensor&, 't', 't', 't', 's', 's', 'T'>(),
      direct_kind<Tensor&, 'l', 'i', 'T'>(),
      direct_kind<Tensor&, 'T', 't'>(),
      direct_kind<Tensor&, 'T', 's'>(),
      direct_kind<Tensor&, 'T', 't', 's'>(),
      direct_kind<Tensor&, 'T', 't', 'b'>(),
      direct_kind<Tensor&, 'T'>(),
      direct_kind<Tensor, 't'>(),
      direct_kind<Tensor, 't', 't'>(),
      direct_kind<Tensor, 't', 't', 't'>(),
      direct_kind<Tensor, 't', 's'>(),
      direct_kind<Tensor, 't', 't', 's'>(),
      direct_kind<Tensor, 't', 't', 't', 's', 's'>(),
  };
  if (!one_tensor(from.handle.schema(), from.result != nullptr)) return nullptr;
  for (const DirectKind& kind : known)
    if (kind.kinds == kinds && kind.makes_result == (from.result != nullptr)) {
      try {
        return kind.make(from);
      } catch (const c10::Error&) {
        return nullptr;  // a signature of another kind: the stack does
      }
    }
  return nullptr;
}

}  // namespace rote
