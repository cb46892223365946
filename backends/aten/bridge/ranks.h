// Bytes from every rank to all, over a process group's CPU backend.
#pragma once
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "scope.h"

namespace rote {

// The process group registered under a name, or null.
inline c10::intrusive_ptr<c10d::ProcessGroup> find_group(const char* name) {
  try {
    return c10d::resolve_process_group(name);
  } catch (const c10::Error&) {
    return {};
  }
}

inline bool has_cpu_backend(const c10d::ProcessGroup& group) {
  for (const auto& device : group.getDeviceTypes())
    if (device.type() == c10::DeviceType::CPU) return true;
  return false;
}

// A number for a group object: another group has another one, at any time of
// the process, even under the same name or at the same address.
inline uint64_t group_number(const c10::intrusive_ptr<c10d::ProcessGroup>& group) {
  static std::mutex lock;
  static std::vector<c10::weak_intrusive_ptr<c10d::ProcessGroup>> known;  // keep addresses taken
  std::lock_guard<std::mutex> guard(lock);
  for (size_t i = 0; i < known.size(); ++i)
    if (known[i]._unsafe_get_target() == group.get()) return i;
  known.emplace_back(group);
  return known.size() - 1;
}

// Puts `n` bytes in and gets those of every rank, one after the other, in
// `out`. The tensors are our own: a collective that fails may still write.
inline void gather_bytes(c10d::ProcessGroup& group, const uint8_t* ours, uint64_t n, uint8_t* out) {
  ReplayScope scope;
  NoPython plain;
  int64_t size = static_cast<int64_t>(n);
  at::Tensor input = at::empty({size}, at::kByte);
  at::Tensor output = at::empty({size * group.getSize()}, at::kByte);
  std::memcpy(input.data_ptr(), ours, n);
  group.getBackend(c10::DeviceType::CPU)->_allgather_base(output, input, c10d::AllgatherOptions())->wait();
  std::memcpy(out, output.data_ptr(), output.nbytes());
}

}  // namespace rote
