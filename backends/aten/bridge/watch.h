// Watches what a thread allocates, through the hook that PyTorch's allocators
// have for its profiler.
#pragma once
#include <algorithm>
#include <atomic>
#include <memory>

#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

namespace rote {

// Stands where a profiler would, and is one that is switched off, for whoever asks.
class Watch : public torch::profiler::impl::ProfilerStateBase {
 public:
  Watch()
      : ProfilerStateBase(torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}

  bool memoryProfilingEnabled() const override { return true; }

  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }

  // Negative for a free. A thread that works for this one may report too.
  void reportMemoryUsage(void*, int64_t bytes, size_t, size_t, c10::Device) override {
    int64_t now = now_.fetch_add(bytes) + bytes;
    int64_t most = most_.load();
    while (now > most && !most_.compare_exchange_weak(most, now)) {
    }
  }

  // The most bytes allocated at once since the last call, above those at that call.
  int64_t rise() {
    int64_t before = before_;
    before_ = now_.load();
    return std::max(most_.exchange(before_) - before, int64_t{0});
  }

 private:
  std::atomic<int64_t> now_{0};
  std::atomic<int64_t> most_{0};
  int64_t before_ = 0;
};

// A watch over the thread that makes and drops it.
class Watching {
 public:
  // Nothing is watched while a profiler runs, which has the hook.
  static std::unique_ptr<Watching> start() {
    if (c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE) != nullptr) return nullptr;
    return std::make_unique<Watching>(std::make_shared<Watch>());
  }

  explicit Watching(const std::shared_ptr<Watch>& watch)
      : watch_(watch), guard_(c10::DebugInfoKind::PROFILER_STATE, watch) {}

  int64_t rise() { return watch_->rise(); }

 private:
  std::shared_ptr<Watch> watch_;
  c10::DebugInfoGuard guard_;
};

}  // namespace rote
