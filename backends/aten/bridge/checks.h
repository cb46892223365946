// The ops that plans have in the place of questions about data: see CHECK_NUMBER in plans/src/instr.rs.
#pragma once
#include <cstring>
#include <optional>
#include <stdexcept>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include "ranks.h"

namespace rote {

// A number as plans hold it: of floats the bits of a double, else the value.
inline int64_t bits_of(const at::Scalar& number) {
  if (number.isBoolean()) return number.toBool();
  if (!number.isFloatingPoint()) return number.toLong();
  double value = number.toDouble();
  int64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The ranks that end a run together, if any of them finds another answer.
inline thread_local c10::intrusive_ptr<c10d::ProcessGroup> checks_compared;

inline bool same_on_all(bool same) {
  std::vector<uint8_t> all(static_cast<size_t>(checks_compared->getSize()));
  const auto ours = static_cast<uint8_t>(same);
  std::optional<py::gil_scoped_release> others_may_run;
  if (PyGILState_Check()) others_may_run.emplace();
  gather_bytes(*checks_compared, &ours, 1, all.data());
  for (uint8_t each : all) same = same && each;
  return same;
}

// What a check of this thread has found in place of the answer that its plan is for; none if only other ranks have.
inline thread_local std::optional<std::vector<int64_t>> found_answer;

// Ends a run. No c10::Error: these gather a backtrace, and another answer is nothing unusual.
inline void answer_is(at::IntArrayRef expected, at::IntArrayRef found) {
  bool same = expected == found;
  found_answer.reset();
  if (!same) found_answer = found.vec();
  if (checks_compared) same = same_on_all(same);
  if (!same) throw std::runtime_error("the step would read another value on the host than the plan is for");
}

inline void check_number(const at::Tensor& number, int64_t bits) {
  found_answer.reset();
  answer_is(bits, bits_of(at::_local_scalar_dense(number)));
}

inline void check_equal(const at::Tensor& a, const at::Tensor& b, bool equal) {
  found_answer.reset();
  answer_is(int64_t{equal}, int64_t{at::equal(a, b)});
}

inline void check_shape(const at::Tensor& result, at::IntArrayRef shape) { answer_is(shape, result.sizes()); }

// Makes the ops known to PyTorch, for as long as the process lasts.
inline void register_checks() {
  static auto* library = new torch::Library(torch::Library::FRAGMENT, "rote", {}, __FILE__, __LINE__);
  static bool registered = [] {
    library->def("check_number(Tensor number, int bits) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(check_number)));
    library->def("check_equal(Tensor a, Tensor b, bool equal) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(check_equal)));
    library->def("check_shape(Tensor(a!) result, int[] shape) -> ()", torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(check_shape)));
    return true;
  }();
  (void)registered;
}

}  // namespace rote
