// The reducer of DistributedDataParallel: what it expects of the next calls. It has no names for that in Python.
#pragma once
#include <memory>

#include <torch/csrc/distributed/c10d/reducer.hpp>
#include <torch/csrc/utils/pybind.h>

namespace rote {

struct OpenReducer : public c10d::Reducer {
  // Whether the next gradient is reduced, and whether a reduction was begun and not ended.
  static uint64_t state(const c10d::Reducer& reducer) {
    return (reducer.*&OpenReducer::expect_autograd_hooks_ ? 1 : 0) | (reducer.*&OpenReducer::require_finalize_ ? 2 : 0);
  }
};

// A member that derived classes may not name either.
template <auto Member>
struct OpenMember {
  friend auto communication_hook(const c10d::Reducer& reducer) { return (reducer.*Member).get(); }
};
auto communication_hook(const c10d::Reducer& reducer);
template struct OpenMember<&c10d::Reducer::comm_hook_>;

inline uint64_t reducer_word(PyObject* object) {
  const auto& reducer = py::handle(object).cast<const c10d::Reducer&>();
  return 8 | OpenReducer::state(reducer) | (communication_hook(reducer) ? 4 : 0);
}

}  // namespace rote
