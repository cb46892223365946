// Times bare calls of ATen's kernels from C++, for benches/steps/bridge.py: what
// an op costs that is called where its tensors are known, by at::'s own functions,
// as a person would write it in C++. Below autograd, as replay calls them.

#include <ATen/ATen.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/extension.h>

#include <ctime>

namespace {

// CPU time of the thread: what other processes take does not count.
double nanoseconds_of_thread() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e9 * static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec);
}

template <typename Call>
double per_call(int64_t calls, Call call) {
  const double start = nanoseconds_of_thread();
  for (int64_t i = 0; i < calls; ++i) call(i);
  return (nanoseconds_of_thread() - start) / static_cast<double>(calls);
}

// Nanoseconds of one of `calls` calls in a row. `x` and `y` are read and written
// in turn, `w` is read.
double bare(const std::string& kind, at::Tensor x, at::Tensor y, const at::Tensor& w, const std::string& group,
            int64_t calls) {
  py::gil_scoped_release no_gil;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  std::array<at::Tensor, 2> both = {x, y};
  if (kind == "mul.out") return per_call(calls, [&](int64_t) { at::mul_out(x, x, w); });
  if (kind == "add.out") return per_call(calls, [&](int64_t) { at::add_out(x, x, w, 1); });
  if (kind == "mm.out") return per_call(calls, [&](int64_t i) { at::mm_out(both[~i & 1], both[i & 1], w); });
  if (kind == "copy_") return per_call(calls, [&](int64_t) { x.copy_(w); });
  if (kind == "add_.Tensor") return per_call(calls, [&](int64_t) { x.add_(w, 1); });
  if (kind == "cat.out") {
    const int64_t half = x.size(0) / 2;
    const at::Tensor w_half = w.narrow(0, half, half);
    const std::array<std::vector<at::Tensor>, 2> parts = {std::vector<at::Tensor>{x.narrow(0, half, half), w_half},
                                                          std::vector<at::Tensor>{y.narrow(0, half, half), w_half}};
    return per_call(calls, [&](int64_t i) { at::cat_out(both[~i & 1], parts[i & 1], 0); });
  }
  if (kind == "a result of its own") return per_call(calls, [&](int64_t) { x = at::mul(x, w); });
  if (kind == "a view and a result") return per_call(calls, [&](int64_t) { x = at::mul(at::t(x), w); });
  if (kind == "all-reduce") {
    const auto backend = c10d::resolve_process_group(group)->getBackend(x.device().type());
    return per_call(calls, [&](int64_t i) {
      std::vector<at::Tensor> tensors = {both[~i & 1].copy_(both[i & 1])};
      backend->allreduce(tensors, c10d::AllreduceOptions())->wait();
    });
  }
  TORCH_CHECK(false, "no kind of op is called ", kind);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("bare", &bare);
}
