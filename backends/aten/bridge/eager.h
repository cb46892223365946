// Calls one op on host data: arguments by the op's schema, results copied to
// contiguous CPU tensors. For the truth table of sharding rules.
#pragma once
#include <vector>

#include <ATen/ops/from_blob.h>

#include "program.h"

namespace rote {

// Ops warn of what is deprecated or resized, which here is no news.
struct Quiet : public c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

class EagerCall {
 public:
  // Runs the op; its results are those in `results()` until the next call.
  void run(const char* name, const char* overload, const Arg* args, uint32_t nargs) {
    results_.clear();
    described_.clear();
    auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
    TORCH_CHECK(handle, "operator ", name, ".", overload, " is not in this version of torch");
    const c10::FunctionSchema& schema = handle->schema();
    const auto& formals = schema.arguments();
    TORCH_CHECK(nargs <= formals.size(), "operator ", name, " takes ", formals.size(), " arguments, found ", nargs);
    flags = handle->hasTag(at::Tag::nondeterministic_seeded) ? kSeeded : 0;
    std::vector<c10::IValue> stack;
    for (size_t i = 0; i < formals.size(); ++i) {
      if (i < nargs && !(args[i].tag == kNone && formals[i].default_value())) {
        stack.push_back(value(args[i], formals[i]));
      } else {
        TORCH_CHECK(formals[i].default_value(), "operator ", name, " needs argument ", formals[i].name());
        stack.push_back(*formals[i].default_value());
      }
    }
    std::vector<c10::IValue> written;
    if (schema.returns().empty())
      for (size_t i = 0; i < formals.size(); ++i)
        if (formals[i].alias_info() && formals[i].alias_info()->isWrite()) written.push_back(stack[i]);
    {
      Quiet quiet;
      c10::WarningUtils::WarningHandlerGuard guard(&quiet);
      handle->callBoxed(&stack);
    }
    for (const c10::IValue& result : schema.returns().empty() ? written : stack) collect(result);
    described_.reserve(results_.size());
    for (const at::Tensor& tensor : results_) described_.push_back(describe(tensor));
  }

  const std::vector<Tensor>& results() const { return described_; }

  uint32_t flags = 0;

 private:
  static at::Tensor tensor(const Tensor& given) {
    if (given.storage == 0) return at::Tensor();
    c10::IntArrayRef sizes(given.sizes, given.ndim);
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(given.dtype));
    return at::from_blob(reinterpret_cast<void*>(given.storage), sizes, options).clone();
  }

  static bool is_number(const Arg& arg) { return arg.tag >= kBool && arg.tag <= kComplex; }

  // A list argument: given as one, or as a single number for a list of fixed length.
  template <typename T, typename Convert>
  static c10::IValue list(const Arg& arg, const c10::Argument& formal, Convert convert) {
    c10::List<T> out;
    if (arg.tag == kInts) {
      for (uint32_t i = 0; i < arg.len; ++i) out.push_back(convert(c10::Scalar(arg.ints[i])));
    } else if (arg.tag == kList) {
      for (uint32_t i = 0; i < arg.len; ++i) out.push_back(convert(number(arg.list[i])));
    } else {
      TORCH_CHECK(is_number(arg) && formal.N(), "argument ", formal.name(), " is a list");
      for (int32_t i = 0; i < *formal.N(); ++i) out.push_back(convert(number(arg)));
    }
    return out;
  }

  static c10::IValue value(const Arg& arg, const c10::Argument& formal) {
    c10::TypePtr type = formal.type();
    if (auto optional = type->cast<c10::OptionalType>()) {
      if (arg.tag == kNone) return c10::IValue();
      type = optional->getElementType();
    }
    switch (type->kind()) {
      case c10::TypeKind::TensorType:
        if (is_number(arg)) return wrapped(number(arg));
        TORCH_CHECK(arg.tag == kTensor, "argument ", formal.name(), " is a tensor");
        return tensor(arg.tensors[0]);
      case c10::TypeKind::NumberType: return number(arg);
      case c10::TypeKind::FloatType: return number(arg).toDouble();
      case c10::TypeKind::BoolType: return number(arg).toBool();
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType:
        if (arg.tag == kDtype || arg.tag == kLayout || arg.tag == kMemoryFormat) return arg.i;
        return number(arg).toLong();
      case c10::TypeKind::StringType:
        TORCH_CHECK(arg.tag == kStr, "argument ", formal.name(), " is a text");
        return std::string(arg.s);
      case c10::TypeKind::ListType: break;
      default:
        if (arg.tag == kNone) return c10::IValue();
        // ScalarType, Layout and MemoryFormat, where schemas keep their names.
        TORCH_CHECK(arg.tag == kDtype || arg.tag == kLayout || arg.tag == kMemoryFormat, "argument ", formal.name(),
                    " of type ", type->str(), " cannot be given");
        return arg.i;
    }
    c10::TypePtr element = type->cast<c10::ListType>()->getElementType();
    if (arg.tag == kTensors) {
      if (element->kind() == c10::TypeKind::OptionalType) {
        c10::List<std::optional<at::Tensor>> out;
        for (uint32_t i = 0; i < arg.len; ++i) {
          at::Tensor entry = tensor(arg.tensors[i]);
          out.push_back(entry.defined() ? std::optional<at::Tensor>(entry) : std::nullopt);
        }
        return out;
      }
      TORCH_CHECK(element->kind() == c10::TypeKind::TensorType, "argument ", formal.name(), " is no list of tensors");
      c10::List<at::Tensor> out;
      for (uint32_t i = 0; i < arg.len; ++i) out.push_back(tensor(arg.tensors[i]));
      return out;
    }
    switch (element->kind()) {
      case c10::TypeKind::FloatType: return list<double>(arg, formal, [](c10::Scalar s) { return s.toDouble(); });
      case c10::TypeKind::BoolType: return list<bool>(arg, formal, [](c10::Scalar s) { return s.toBool(); });
      case c10::TypeKind::IntType:
      case c10::TypeKind::SymIntType: return list<int64_t>(arg, formal, [](c10::Scalar s) { return s.toLong(); });
      case c10::TypeKind::TensorType: {
        TORCH_CHECK(arg.tag == kInts && arg.len == 0, "argument ", formal.name(), " is a list of tensors");
        return c10::List<at::Tensor>();
      }
      default: {
        c10::impl::GenericList out(element);
        TORCH_CHECK(arg.tag == kInts || arg.tag == kList, "argument ", formal.name(), " is a list");
        for (uint32_t i = 0; i < arg.len; ++i)
          out.push_back(arg.tag == kInts ? c10::IValue(c10::Scalar(arg.ints[i])) : c10::IValue(number(arg.list[i])));
        return out;
      }
    }
  }

  // Absent tensors stay, undefined; numbers become tensors without dims.
  void collect(const c10::IValue& result) {
    if (result.isTensor()) {
      keep(result.toTensor());
    } else if (result.isTensorList()) {
      for (const at::Tensor& tensor : result.toTensorVector()) keep(tensor);
    } else if (result.isList()) {
      for (const c10::IValue& entry : result.toListRef()) collect(entry);
    } else if (result.isScalar()) {
      keep(at::scalar_tensor(result.toScalar(), result.isDouble()  ? at::kDouble
                                                : result.isBool()  ? at::kBool
                                                : result.isInt()   ? at::kLong
                                                                   : at::kComplexDouble));
    } else {
      TORCH_CHECK(result.isNone(), "a result that is no tensor");
      keep(at::Tensor());
    }
  }

  void keep(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      results_.emplace_back();
      return;
    }
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.device().is_cpu(), "a result that is not dense on the CPU");
    results_.push_back(tensor.resolve_conj().resolve_neg().contiguous());
  }

  static Tensor describe(const at::Tensor& tensor) {
    Tensor out{};
    if (!tensor.defined()) return out;
    static const uint64_t nothing = 0;  // the address of tensors without elements
    const void* data = tensor.numel() ? tensor.const_data_ptr() : &nothing;
    out.storage = reinterpret_cast<uint64_t>(data);
    out.sizes = tensor.sizes().data();
    out.strides = tensor.strides().data();
    out.storage_bytes = tensor.nbytes();
    out.ndim = static_cast<uint32_t>(tensor.dim());
    out.dtype = static_cast<uint8_t>(tensor.scalar_type());
    return out;
  }

  std::vector<at::Tensor> results_;
  std::vector<Tensor> described_;
};

}  // namespace rote
