// Times ATen ops called from C++, for benches/steps/floor.py.
//
// `time_call` calls an op boxed through the dispatcher, below autograd, with
// arguments converted once, and takes off what the same loop costs around an
// op that does nothing. What is left is the kernel: no Python, no dispatch.

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <ctime>

namespace {

void do_nothing(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  stack->clear();
}

// CPU time of the thread: what other processes take does not count.
double microseconds_of_thread() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return 1e6 * static_cast<double>(now.tv_sec) + 1e-3 * static_cast<double>(now.tv_nsec);
}

double microseconds_per_call(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                             int64_t calls) {
  const double start = microseconds_of_thread();
  for (int64_t i = 0; i < calls; ++i) {
    torch::jit::Stack stack = arguments;
    op.callBoxed(&stack);
  }
  return (microseconds_of_thread() - start) / static_cast<double>(calls);
}

// Microseconds of one call of `name.overload`, and of the empty loop around it.
std::pair<double, double> time_call(const std::string& name, const std::string& overload,
                                    int64_t calls, const py::tuple& args, const py::kwargs& kwargs) {
  auto& dispatcher = c10::Dispatcher::singleton();
  const auto op = dispatcher.findSchemaOrThrow(name.c_str(), overload.c_str());
  const auto nothing = dispatcher.findSchemaOrThrow("rote_bench::nothing", "");
  const auto stack = torch::jit::createStackForSchema(
      op.schema(), torch::jit::tuple_slice(args), kwargs, std::nullopt);
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const double empty = microseconds_per_call(nothing, stack, calls);
  return {microseconds_per_call(op, stack, calls), empty};
}

}  // namespace

TORCH_LIBRARY(rote_bench, library) {
  library.def("nothing() -> ()", torch::CppFunction::makeFromBoxedFunction<&do_nothing>());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("time_call", &time_call);
}
