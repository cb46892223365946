// The Python module `rote.bridge`: what Python alone asks of the bridge. Its functions raise what PyTorch's own bindings
// raise.
#pragma once
#include <ATen/autocast_mode.h>

#include <utility>

#include "checks.h"
#include "hooks.h"
#include "index_hook.h"
#include "late_numbers.h"
#include "observe.h"
#include "profile_hook.h"
#include "program.h"
#include "propagate.h"
#include "ranks.h"
#include "region.h"
#include "scope.h"
#include "views.h"

namespace rote {

// Takes torch's classes of these names, and registers the bridge's own ops, once per process.
inline void init(const py::object& dtensor, const py::object& async_collective_tensor) {
  if (classes.dtensor) return;
  classes.async_collective_tensor = async_collective_tensor.inc_ref().ptr();
  classes.local_tensor_name = PyUnicode_InternFromString("_local_tensor");
  classes.spec_name = PyUnicode_InternFromString("_spec");
  classes.elem_name = PyUnicode_InternFromString("elem");
  classes.local_tensor_offset = slot_offset(dtensor.ptr(), classes.local_tensor_name);
  classes.spec_offset = slot_offset(dtensor.ptr(), classes.spec_name);
  register_checks();
  register_late_numbers();
  register_wait();
  classes.dtensor = dtensor.inc_ref().ptr();
}

// The bytes of every rank of a process group, one after the other in the order of ranks. None, and nothing is sent,
// where there is no such group, or it has no backend for the CPU.
inline py::object gather(const std::string& name, const std::string& ours) {
  auto group = find_group(name.c_str());
  if (!group || !has_cpu_backend(*group)) return py::none();
  std::string all(ours.size() * group->getSize(), '\0');
  {
    py::gil_scoped_release no_gil;
    gather_bytes(*group, reinterpret_cast<const uint8_t*>(ours.data()), ours.size(), reinterpret_cast<uint8_t*>(all.data()));
  }
  return py::bytes(all);
}

// Calls `rote_session_call`, or another function of its signature. The functions, the session and the places where the
// number of a variant and the results go are addresses: ctypes takes longer over each.
inline int call_session(size_t function, size_t session, const py::object& args, const py::object& kwargs, size_t variant,
                        size_t results) {
  using Function = int (*)(void*, void*, void*, uint32_t*, void**);
  const int status = reinterpret_cast<Function>(function)(reinterpret_cast<void*>(session), args.ptr(), kwargs.ptr(),
                                                          reinterpret_cast<uint32_t*>(variant),
                                                          reinterpret_cast<void**>(results));
  if (PyErr_Occurred()) throw py::error_already_set();
  return status;
}

// The object in a place that owns one reference to it, which is empty then.
inline py::object take(size_t place) {
  return py::reinterpret_steal<py::object>(std::exchange(*reinterpret_cast<PyObject**>(place), nullptr));
}

// What the listener raises at the end of a step must not hide what the step raises.
inline void end_observation() {
  try {
    observe_no_more();
  } catch (...) {
  }
}

}  // namespace rote

PYBIND11_MODULE(bridge, module) {
  using namespace rote;
  auto add = [&module](const char* name, auto function) { module.def(name, torch::wrap_pybind_function(function)); };

  add("init", init);
  add("gather", gather);
  add("call_session", call_session);
  add("take", take);

  // Has the listener of `rote_record_observe` told of calls of a composite op.
  add("tell_of", [](const std::string& op) { tell_of(op); });
  add("observe_no_more", end_observation);
  // Records the innermost call on DTensors under way, if it is not recorded yet. Returns a tuple of its arguments the
  // first time, else None: also where there is no such call.
  add("global_call", innermost_global_call);
  // The first op of the last observed step that raised; empty if none did. If the step has ended normally, it has
  // handled the error.
  add("raising", [] { return raising; });
  // How many ops the last observed step has run: until its recording was refused, and from then on.
  add("counts", [] { return scribe.counts(); });
  // Counts the ops of this thread, and those that they call, until it is asked how many ran.
  add("count_ops", [] { op_count.begin(); });
  add("ops_so_far", [] { return op_count.so_far(); });
  add("ops_counted", [] { return op_count.end(); });
  // The op of another Python thread that wrote a tensor used by the last observed step, or read one that it made; empty
  // if there was none.
  add("others", [] { return others().found(); });

  add("view_of", view_of);
  add("make_view", make_view);
  add("as_inference", as_inference);
  // Marks a tensor as eager returns it after a backward pass: it requires grad, and its graph is used up.
  add("mark_replayed", set_replayed_history);
  add("hooks_of", hooks_of);
  add("begin_graph", begin_graph);
  add("end_edge", end_edge);
  add("attach_region", attach_region);
  add("is_plain_call", is_plain_call);

  // A parameter as `torch.autocast` casts it now for the ops of its list of lower precision: the cast that autocast keeps
  // until its context ends, if it keeps one.
  add("autocast", [](const at::Tensor& parameter) {
    const c10::DeviceType type = parameter.device().type();
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(type), parameter, type);
  });

  // Has a function told of each index by which tensors of classes are read and written, see `IndexHook`.
  add("index_begin", [](const py::list& classes, py::function seen) { IndexHook::get().begin(classes, std::move(seen)); });
  add("index_end", [] { IndexHook::get().end(); });

  // Begins to note which code Python runs, on all threads: False, and nothing is done, where another profiler listens.
  add("calls_begin", [] { return ProfileHook::get().begin(); });
  // Notes what the calling thread runs too, which was started since then.
  add("calls_join", [] { ProfileHook::get().join(); });
  // A list of the code objects that ran since then; None where not all of them were seen.
  add("calls_end", [] { return ProfileHook::get().end(); });

  // Answers DTensor's questions to sharding propagation.
  py::class_<Answers>(module, "Answers")
      .def(py::init<uintptr_t, uintptr_t, const py::dict&, py::object, py::object, py::object, py::object, py::object, py::dict, py::object,
                    py::object>())
      .def("answer", torch::wrap_pybind_function(&Answers::answer))
      .def("is_asking", &Answers::is_asking)
      .def("close", &Answers::close)
      .def("kind", &Answers::kind)
      .def("stats", &Answers::stats);
}
