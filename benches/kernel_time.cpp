// Times ATen ops called from C++, for the floor of benches/overhead.py.
//
// `time_call` calls an op boxed through the dispatcher, below autograd, with
// arguments converted once, and takes off what the same loop costs around an
// op that does nothing. What is left is the kernel: no Python, no dispatch.

#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/extension.h>
#include <torch/library.h>

#include <chrono>

namespace {

void do_nothing(const c10::OperatorHandle&, torch::jit::Stack* stack) {
  stack->clear();
}

double microseconds_per_call(const c10::OperatorHandle& op, const torch::jit::Stack& arguments,
                             int64_t calls) {
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < calls; ++i) {
    torch::jit::Stack stack = arguments;
    op.callBoxed(&stack);
  }
  const std::chrono::duration<double, std::micro> elapsed = std::chrono::steady_clock::now() - start;
  return elapsed.count() / static_cast<double>(calls);
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
