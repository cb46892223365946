// Counts the memory of tensors on the CPU, whichever thread allocates and frees it.
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <unordered_map>

namespace {

std::mutex lock;
std::unordered_map<void*, std::size_t> sizes;
std::int64_t held = 0;
std::int64_t most = 0;

void freed(void* data) {
  {
    const std::lock_guard<std::mutex> guard(lock);
    const auto found = sizes.find(data);
    if (found != sizes.end()) {
      held -= static_cast<std::int64_t>(found->second);
      sizes.erase(found);
    }
  }
  c10::GetDefaultCPUAllocator()->raw_deleter()(data);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    c10::DataPtr made = c10::GetDefaultCPUAllocator()->allocate(bytes);
    void* const data = made.get();
    if (data == nullptr) return made;
    const std::lock_guard<std::mutex> guard(lock);
    sizes[data] = bytes;
    held += static_cast<std::int64_t>(bytes);
    most = std::max(most, held);
    made.release_context();
    return {data, data, &freed, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &freed; }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

Counting counting;

}  // namespace

extern "C" {

void count_allocations() { c10::SetCPUAllocator(&counting, 255); }

std::int64_t bytes_held() {
  const std::lock_guard<std::mutex> guard(lock);
  return held;
}

// Since the last call.
std::int64_t most_bytes() {
  const std::lock_guard<std::mutex> guard(lock);
  const std::int64_t found = most;
  most = held;
  return found;
}
}
