// A process group of which every collective ends later than it would, for benches/collectives.py.
//
// Each collective runs on another backend (gloo). Its wait returns no earlier than a delay after
// that backend was done, as if the network were so much slower, and its future ends no earlier.
// Meanwhile the process may compute, and the wait sleeps. Collectives end one after the other, as
// on a stream of NCCL: two that start at once end one and two delays later.

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/extension.h>

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <map>
#include <mutex>
#include <thread>

namespace {

// Nanoseconds.
std::atomic<int64_t> delay{0};
std::atomic<bool> in_order{true};

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return 1'000'000'000 * static_cast<int64_t>(time.tv_sec) + time.tv_nsec;
}

void sleep_until(int64_t end) {
  static thread_local const int exact = prctl(PR_SET_TIMERSLACK, 1);  // by default 50 us late
  (void)exact;
  const timespec time{end / 1'000'000'000, end % 1'000'000'000};
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, nullptr) == EINTR) {
  }
}

// When the collectives of one group end, and a thread that does what is to be done then.
class Line {
 public:
  Line() : thread_([this] { serve(); }) {}
  ~Line() {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      closed_ = true;
    }
    changed_.notify_one();
    thread_.join();
  }

  // The end of a collective that is done now but for the delay.
  int64_t end(std::function<void()> at_end) {
    const std::lock_guard<std::mutex> guard(lock_);
    const int64_t begin = in_order ? std::max(now(), last_) : now();
    last_ = begin + delay;
    ends_.emplace(last_, std::move(at_end));
    changed_.notify_one();
    return last_;
  }

 private:
  void serve() {
    std::unique_lock<std::mutex> guard(lock_);
    while (!closed_) {
      if (ends_.empty()) {
        changed_.wait(guard);
        continue;
      }
      const int64_t end = ends_.begin()->first;
      if (now() < end) {
        guard.unlock();
        sleep_until(end);
        guard.lock();
        continue;  // an earlier one may have come
      }
      const auto at_end = std::move(ends_.begin()->second);
      ends_.erase(ends_.begin());
      guard.unlock();
      at_end();
      guard.lock();
    }
  }

  std::mutex lock_;
  std::condition_variable changed_;
  bool closed_ = false;
  int64_t last_ = 0;
  std::multimap<int64_t, std::function<void()>> ends_;
  std::thread thread_;
};

using Work = c10::intrusive_ptr<c10d::Work>;

class LateWork : public c10d::Work {
 public:
  // `finish`: what is left to do once the other backend is done.
  LateWork(::Work inner, const std::shared_ptr<Line>& line, std::function<void()> finish) : inner_(std::move(inner)) {
    // Called by the thread that runs the collective, before those that wait for it go on.
    const auto future = inner_->getFuture();
    future_ = c10::make_intrusive<c10::ivalue::Future>(future->elementType());
    future->addCallback([line, end = end_, late = future_, finish = std::move(finish)](c10::ivalue::Future& done) {
      if (finish) finish();
      *end = line->end([late, value = done.value()] { late->markCompleted(value); });
    });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = inner_->wait(timeout);
    sleep_until(*end_);
    return done;
  }

  bool isCompleted() override { return inner_->isCompleted() && now() >= *end_; }
  bool isSuccess() const override { return inner_->isSuccess(); }
  std::vector<at::Tensor> result() override { return inner_->result(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  ::Work inner_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::shared_ptr<std::atomic<int64_t>> end_ = std::make_shared<std::atomic<int64_t>>(0);
};

class LateGroup : public c10d::Backend {
 public:
  explicit LateGroup(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}

  const std::string getBackendName() const override { return "late"; }

  Work allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    return late(inner_->allreduce(tensors, options));
  }
  Work broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    return late(inner_->broadcast(tensors, options));
  }
  Work allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                 const c10d::AllgatherOptions& options) override {
    return late(inner_->allgather(outputs, inputs, options));
  }
  Work _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    return late(inner_->_allgather_base(output, input, options));
  }
  // As gloo does it, but that gloo leaves the copy to the wait.
  Work _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                            const c10d::ReduceScatterOptions& options) override {
    std::vector<at::Tensor> sum{input.clone()};
    c10d::AllreduceOptions all;
    all.reduceOp = options.reduceOp;
    const Work work = inner_->allreduce(sum, all);
    return late(work, [own = sum[0].chunk(getSize())[getRank()], output]() mutable {
      const at::AutoDispatchBelowADInplaceOrView guard;
      output.copy_(own.view_as(output));
    });
  }
  Work allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                       const c10d::AllgatherOptions& options) override {
    return late(inner_->allgather_into_tensor_coalesced(outputs, inputs, options));
  }
  Work reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                       const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == 1, "several at once");
    return _reduce_scatter_base(outputs[0], inputs[0], options);
  }
  Work alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                     const c10d::AllToAllOptions& options) override {
    return late(inner_->alltoall_base(output, input, to, from, options));
  }
  Work scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
               const c10d::ScatterOptions& options) override {
    return late(inner_->scatter(outputs, inputs, options));
  }
  Work barrier(const c10d::BarrierOptions& options) override { return inner_->barrier(options); }

 private:
  Work late(Work work, std::function<void()> finish = {}) {
    return c10::make_intrusive<LateWork>(std::move(work), line_, std::move(finish));
  }

  c10::intrusive_ptr<c10d::Backend> inner_;
  std::shared_ptr<Line> line_ = std::make_shared<Line>();
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("late", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<LateGroup>(inner);
  });
  m.def("set_delay", [](double microseconds, bool one_by_one) {
    delay = static_cast<int64_t>(1e3 * microseconds);
    in_order = one_by_one;
  });
}
