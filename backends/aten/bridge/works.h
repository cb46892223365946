// Ops of process groups that a step calls by hand: what their schemas do not say, their groups and
// reductions as text, and their handles (`Work`) as numbers.
#pragma once
#include <chrono>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/function_schema.h>
#include <ATen/core/ivalue.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include "ranks.h"

namespace rote {

// The class of an object of TorchScript, with its namespace; empty for other values.
inline std::string class_of(const c10::IValue& value) {
  if (!value.isObject()) return "";
  auto name = value.toObject()->type()->name();
  return name ? name->qualifiedName() : "";
}

inline bool is_of_class(const c10::IValue& value, const char* name) {
  return class_of(value) == std::string("__torch__.torch.classes.c10d.") + name;
}

// The name of a process group or of a reduction; empty if plans have no name for it, nothing for other objects.
inline std::optional<std::string> process_group_text(const c10::IValue& value) {
  if (is_of_class(value, "ProcessGroup")) {
    auto group = value.toCustomClass<c10d::ProcessGroup>();
    const std::string& name = group->getGroupName();
    return find_group(name.c_str()) == group ? name : "";
  }
  if (!is_of_class(value, "ReduceOp")) return std::nullopt;
  switch (value.toCustomClass<c10d::ReduceOp>()->op_) {
    case c10d::ReduceOp::SUM: return "sum";
    case c10d::ReduceOp::AVG: return "avg";
    case c10d::ReduceOp::MAX: return "max";
    case c10d::ReduceOp::MIN: return "min";
    case c10d::ReduceOp::PRODUCT: return "product";
    default: return "";
  }
}

// The object that such a name stands for, of the class that an op's argument has.
inline c10::IValue process_group_object(const std::string& text, const c10::Type& type) {
  const std::string name = type.annotation_str();
  const auto is = [&](const char* end) { return name.size() >= std::strlen(end) && name.compare(name.size() - std::strlen(end), std::string::npos, end) == 0; };
  if (is(".c10d.ProcessGroup")) return c10::IValue(c10d::resolve_process_group(text));
  TORCH_CHECK(is(".c10d.ReduceOp"), "a text where the schema has ", name);
  for (auto [known, reduction] : {std::pair{"sum", c10d::ReduceOp::SUM}, std::pair{"avg", c10d::ReduceOp::AVG},
                                  std::pair{"max", c10d::ReduceOp::MAX}, std::pair{"min", c10d::ReduceOp::MIN},
                                  std::pair{"product", c10d::ReduceOp::PRODUCT}})
    if (text == known) return c10::IValue(c10::make_intrusive<c10d::ReduceOp>(reduction));
  TORCH_CHECK(false, "unknown reduction ", text);
}

// Whether an argument is a list of lists of tensors. Ops of process groups take a list of tensors for each device of
// the process, of which there is one.
inline bool is_of_lists_of_tensors(const c10::Argument& formal) {
  auto outer = formal.type()->cast<c10::ListType>();
  auto inner = outer ? outer->getElementType()->cast<c10::ListType>() : nullptr;
  return inner && inner->getElementType()->kind() == c10::TypeKind::TensorType;
}

// The handle among what an op has left on the stack; null if there is none.
inline c10::intrusive_ptr<c10d::Work> work_of(const std::vector<c10::IValue>& results) {
  if (results.empty() || !is_of_class(results.back(), "Work")) return {};
  return results.back().toCustomClass<c10d::Work>();
}

// The op `(Tensor handle, Tensor[] received, Tensor[] sent)` by which plans wait for an op of a process group, of
// which `handle` stands for the handle: see WAIT in plans/src/instr.rs. Programs run it themselves.
inline constexpr const char* kWait = "rote::wait";

inline void register_wait() {
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "rote", {}, __FILE__, __LINE__);
  static bool registered = [] {
    library->def("wait(Tensor handle, Tensor(a!)[] received, Tensor[] sent) -> ()");
    return true;
  }();
  (void)registered;
}

// The handles that ops of one recording have returned.
class Works {
 public:
  // Whether an op of a process group writes an argument: its schema does not say so.
  static bool writes(const c10::FunctionSchema& op, const c10::Argument& argument) {
    if (op.name().rfind("c10d::", 0) != 0 || op.name().back() != '_') return false;
    return argument.name() == "tensors" || argument.name().rfind("output", 0) == 0;
  }

  // The number of a handle that an op has just returned: 0 for the absence of one, nothing for other objects.
  std::optional<int64_t> number(const c10::IValue& value) {
    if (!is_of_class(value, "Work")) return std::nullopt;
    auto work = value.toCustomClass<c10d::Work>();
    if (!work) return 0;
    // An address is used again only once nobody can wait with the old handle.
    numbers_[work.get()] = ++last_;
    return last_;
  }

  // The number of a handle, once nobody but Python holds it: the thread that has run a collective holds the handle,
  // and by it the tensors, a moment longer. Autograd clones a gradient that somebody else holds, and takes others
  // as they are: two recordings would differ by chance.
  int64_t number_of(PyObject* object) {
    auto* work = py::handle(object).cast<c10d::Work*>();
    auto it = numbers_.find(work);
    if (!work || it == numbers_.end()) return 0;
    py::gil_scoped_release others;
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(kLetGo);
    while (patient_ && c10::raw::intrusive_ptr::use_count(work) > 1) {
      patient_ = std::chrono::steady_clock::now() < end;
      std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
    return it->second;
  }

 private:
  static constexpr int kLetGo = 200;  // milliseconds

  std::unordered_map<const c10d::Work*, int64_t> numbers_;
  int64_t last_ = 0;
  bool patient_ = true;  // until somebody holds on for long
};

}  // namespace rote
