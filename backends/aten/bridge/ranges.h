// What a profiler sees of a replay beside the ops that the dispatcher shows it:
// named ranges around them, and collectives under the names that eager calls
// them by. PyTorch's profiler and everything else that observes ops listens to
// RecordFunction. Without a listener nothing here runs.
#pragma once
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>

namespace rote {

class Ranges {
 public:
  // Whether anybody listens on this thread; asked once a step.
  bool look() { return listened_ = at::hasCallbacks(); }
  bool listened() const { return listened_; }

  void begin(const char* name) {
    auto range = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
    range->before(std::string_view(name));
    open_.push_back(std::move(range));
  }

  void end() {
    if (!open_.empty()) open_.pop_back();
  }

 private:
  bool listened_ = false;
  std::vector<std::unique_ptr<at::RecordFunction>> open_;
};

// A range like the dispatcher's around an op, for what is called past it.
class OpRange {
 public:
  OpRange(const char* name, const at::Tensor& input) : range_(at::RecordScope::FUNCTION) {
    if (!range_.isActive()) return;
    if (range_.needsInputs()) {
      const c10::IValue inputs[] = {input};
      range_.before(std::string_view(name), c10::ArrayRef<const c10::IValue>(inputs));
    } else {
      range_.before(std::string_view(name));
    }
  }

 private:
  at::RecordFunction range_;
};

}  // namespace rote
