// The bridge between Rote and PyTorch: a C ABI over the parts of libtorch and
// of Python's C API that recording, guards and replay need, and a Python module
// (module.h). Compiled on first use against the installed torch. A function
// that can fail returns 0, or -1 with the reason in rote_bridge_error(), or
// null; no exception leaves this file.

#include "abi.h"
#include "arguments.h"
#include "describe.h"
#include "eager.h"
#include "exceptions.h"
#include "fact_table.h"
#include "module.h"
#include "numbers.h"
#include "observe.h"
#include "program.h"
#include "ranks.h"
#include "scope.h"
#include "watch.h"

namespace rote {

namespace {

thread_local std::string last_error;
thread_local std::string last_text;

int fail(const char* what) {
  last_error = what;
  size_t end = last_error.find("\nException raised from");  // c10's own backtrace
  if (end != std::string::npos) last_error.resize(end);
  return -1;
}

template <typename Body>
int guarded(Body&& body) {
  try {
    body();
    return 0;
  } catch (...) {
    return fail(what_of(std::current_exception()).c_str());
  }
}

// The same for what belongs to a program, which keeps the exception.
template <typename Body>
int guarded(Program* program, Body&& body) {
  try {
    body();
    return 0;
  } catch (...) {
    auto error = std::current_exception();
    program->raised.keep(error);
    return fail(what_of(error).c_str());
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT uint32_t rote_bridge_abi() { return kAbiVersion; }
EXPORT const char* rote_bridge_error() { return last_error.c_str(); }

// --- recording ---------------------------------------------------------------

EXPORT Describer* rote_bridge_describer_new() { return new Describer(); }
EXPORT void rote_bridge_describer_free(Describer* describer) { delete describer; }

EXPORT int rote_bridge_describe_op(Describer* describer, PyObject* func, PyObject* args, PyObject* kwargs,
                                   PyObject* result, const Op** out) {
  return guarded([&] { *out = describer->describe(func, args, kwargs, result); });
}

EXPORT int rote_bridge_describe_observed(Describer* describer, const Op** out) {
  return guarded([&] { *out = describer->describe_observed(); });
}

// The number of the handle of a collective, once nobody but Python holds it; 0 if no described op returned it.
EXPORT int rote_bridge_work(Describer* describer, PyObject* work, int64_t* number) {
  return guarded([&] { *number = describer->number_of_work(work); });
}

// Records the ops of this thread, and tells `listener`, until `observe_no_more` in module.h.
EXPORT int rote_bridge_observe(PyObject* listener, const Sink* sink) {
  return guarded([&] { observe_from_now(listener, *sink); });
}

EXPORT int rote_bridge_describe_tensor(Describer* describer, PyObject* tensor, const Tensor** out) {
  return guarded([&] { *out = describer->describe_tensor(tensor); });
}

EXPORT int rote_bridge_storage_alive(const Describer* describer, uint64_t storage) {
  return describer->alive(storage) ? 1 : 0;
}

// The state of a device's default generator, for seeing draws that no recorded
// op made. Writes a 64-bit digest.
EXPORT int rote_bridge_rng_digest(uint8_t device_kind, int8_t device_index, uint64_t* out) {
  return guarded([&] {
    const c10::Device device = device_of(device_kind, device_index);
    at::Generator generator = at::globalContext().defaultGenerator(device);
    at::Tensor state;
    {
      NoPython plain;
      std::lock_guard<std::mutex> lock(generator.mutex());
      state = generator.get_state();
    }
    const auto* bytes = static_cast<const uint8_t*>(state.unsafeGetTensorImpl()->data());
    uint64_t hash = 0x524e47;
    size_t n = state.storage().nbytes();
    for (size_t i = 0; i + 8 <= n; i += 8) {
      uint64_t word;
      std::memcpy(&word, bytes + i, 8);
      hash = mix(hash, word);
    }
    *out = hash;
  });
}

// --- facts -------------------------------------------------------------------

EXPORT Call* rote_bridge_call_new() { return new Call(); }
EXPORT void rote_bridge_call_free(Call* call) { delete call; }

EXPORT int rote_bridge_call_state(Call* call, const uint64_t* storages, const uint64_t* objects, uint32_t n) {
  return guarded([&] { call->add_state(storages, objects, n); });
}

EXPORT void rote_bridge_call_world(Call* call, uint64_t world) { call->set_world(world); }

// A new object that owns a session, to be made once: `free` frees the session when the object goes. Through it, Python's
// garbage collector sees what the session holds. Null on failure.
EXPORT PyObject* rote_bridge_call_owner(Call* call, void* session, int (*free)(void*)) {
  PyObject* made = nullptr;
  guarded([&] { made = Owner::make(call->holders, session, free); });
  return made;
}

// What the words of the last collected call stand for; null on failure.
EXPORT Held* rote_bridge_call_hold(Call* call) {
  Held* held = nullptr;
  guarded([&] { held = new Held(*call); });
  return held;
}
EXPORT void rote_bridge_held_free(Held* held) { delete held; }

// The first word of the last collected call that stands for another value than the same word of what is held;
// -1 when there is none. The words must be equal.
EXPORT int rote_bridge_held_difference(const Held* held, const Call* call, int64_t* word) {
  return guarded([&] { *word = held->difference(*call); });
}

EXPORT int rote_bridge_call_collect(Call* call, PyObject* args, PyObject* kwargs, const uint64_t** words,
                                    const WordSubject** facts, uint32_t* n) {
  return guarded([&] {
    call->collect(args, kwargs);
    *words = call->words.data();
    *facts = call->facts.data();
    *n = static_cast<uint32_t>(call->words.size());
  });
}

// The leaf of the last collected call; borrowed.
EXPORT PyObject* rote_bridge_call_leaf(Call* call, uint32_t leaf) {
  return leaf < call->leaves.size() ? call->leaves[leaf] : nullptr;
}

// Where a tensor lies in its storage; looked at closely, what it is a view of too.
EXPORT int rote_bridge_tensor_place(PyObject* tensor, int closely, Anchor* out) {
  return guarded([&] { *out = place_of(tensor, closely != 0); });
}

// The number in a tensor of one float on the host. 1: it was found.
EXPORT int rote_bridge_number_in(PyObject* tensor, double* number) {
  return is_tensor(tensor) && number_in(THPVariable_Unpack(tensor), number) ? 1 : 0;
}

EXPORT FactTable* rote_bridge_table_new(Call* call) { return new FactTable(call->holders); }
EXPORT void rote_bridge_table_free(FactTable* table) { delete table; }

EXPORT int rote_bridge_table_add(FactTable* table, uint32_t kind, PyObject* container, PyObject* key, uint32_t* width) {
  return guarded([&] { *width = table->add(kind, container, key); });
}

EXPORT int rote_bridge_table_read(const FactTable* table, const Call* call, uint64_t* out, int kept) {
  return guarded([&] { table->read(*call, out, kept != 0); });
}

EXPORT int rote_bridge_table_hold(FactTable* table) {
  return guarded([&] { table->hold(); });
}

EXPORT int rote_bridge_table_same(const FactTable* table, uint32_t index, int* same) {
  return guarded([&] { *same = table->same(index) ? 1 : 0; });
}

EXPORT const char* rote_bridge_table_text(const FactTable* table, uint32_t index, int held) {
  if (guarded([&] { last_text = table->text(index, held != 0); }) != 0) last_text = "?";
  return last_text.c_str();
}

// --- replay ------------------------------------------------------------------

EXPORT Program* rote_bridge_program_new(uint32_t values, uint32_t rng_slots) {
  Program* program = nullptr;
  guarded([&] { program = new Program(values, rng_slots); });
  return program;
}
EXPORT void rote_bridge_program_free(Program* program) { give_back(program); }

// The exception of the first call on this program that failed since the last
// time, as a new reference to what PyTorch's own bindings would raise; or null.
EXPORT PyObject* rote_bridge_program_exception(Program* program) { return program->raised.take(); }

// A run draws from the default generator of a device.
EXPORT int rote_bridge_program_draws(Program* program, uint8_t device_kind, int8_t device_index) {
  return guarded(program, [&] {
    program->draws(device_of(device_kind, device_index));
  });
}

// Puts generators back after a run that failed with an error; `*done`: whether it was one.
EXPORT int rote_bridge_program_undo(Program* program, int* done) {
  return guarded(program, [&] { *done = program->undo() ? 1 : 0; });
}

// Whether a collective of a run that failed may still use the program's memory:
// it must not run again.
EXPORT int rote_bridge_program_lost(Program* program) { return program->lost() ? 1 : 0; }

// Whether an op has made another result than the plan says: the program must not run again.
EXPORT int rote_bridge_program_differs(Program* program) { return program->differs() ? 1 : 0; }

EXPORT int rote_bridge_program_op(Program* program, const char* name, const char* overload, const Arg* args,
                                  uint32_t nargs, const int64_t* outs, uint32_t nouts, uint8_t into,
                                  const char* into_overload, int grad, int own, uint32_t* index) {
  return guarded(program, [&] {
    *index = program->prepare_op(name, overload, args, nargs, outs, nouts, into, into_overload, grad != 0, own != 0);
  });
}

EXPORT int rote_bridge_program_arena(Program* program, uint64_t bytes, uint8_t device_kind, int8_t device_index) {
  return guarded(program, [&] {
    program->arena(bytes, device_of(device_kind, device_index));
  });
}

EXPORT int rote_bridge_program_place(Program* program, uint32_t value, uint8_t dtype, const int64_t* sizes,
                                     const int64_t* strides, uint32_t ndim, uint64_t offset, uint64_t bytes) {
  return guarded(program, [&] { program->place(value, dtype, {sizes, ndim}, {strides, ndim}, offset, bytes); });
}

EXPORT int rote_bridge_program_fix(Program* program, const uint32_t* values, uint32_t n) {
  return guarded(program, [&] { program->fix(values, n); });
}

EXPORT int rote_bridge_program_view(Program* program, uint32_t base, uint32_t out, uint8_t dtype, uint8_t marks,
                                    const int64_t* sizes, const int64_t* strides, uint32_t ndim, int64_t offset,
                                    uint32_t* index) {
  return guarded(program, [&] { *index = program->prepare_view(base, out, dtype, marks, sizes, strides, ndim, offset); });
}

EXPORT int rote_bridge_program_collective(Program* program, uint32_t kind, int32_t reduce, const char* group,
                                          uint32_t root, uint32_t input, uint32_t output, const int64_t* sizes,
                                          uint32_t ndim, const int64_t* input_splits, uint32_t n_input_splits,
                                          const int64_t* output_splits, uint32_t n_output_splits, uint32_t* index) {
  return guarded(program, [&] {
    *index = program->prepare_collective(kind, reduce, group, root, input, output, sizes, ndim, input_splits,
                                         n_input_splits, output_splits, n_output_splits);
  });
}

// Puts the local tensor of a Python tensor, or of its `.grad`, into a slot; of state its memory.
EXPORT int rote_bridge_program_put(Program* program, uint32_t value, PyObject* tensor, uint32_t part) {
  return guarded(program, [&] {
    if (part == kPartTensor) return program->put(value, local_tensor(tensor));
    if (part == kPartMemory) return program->put_memory(value, local_tensor(tensor));
    const at::Tensor& owned = THPVariable_Unpack(tensor).grad();
    TORCH_CHECK(owned.defined(), "a gradient that the plan reads is None");
    py::object wrapped = py::reinterpret_steal<py::object>(THPVariable_Wrap(owned));
    program->put(value, local_tensor(wrapped.ptr()));
  });
}

EXPORT int rote_bridge_program_expect(Program* program, uint32_t op, uint32_t result, uint8_t dtype, uint8_t marks,
                                      uint8_t device_kind, int8_t device_index, const int64_t* sizes,
                                      const int64_t* strides, uint32_t ndim) {
  return guarded(program, [&] {
    const c10::Device device = device_of(device_kind, device_index);
    program->expect(op, result, dtype, marks, device, {sizes, ndim}, {strides, ndim});
  });
}

EXPORT int rote_bridge_program_leave_shape(Program* program, uint32_t value, PyObject* tensor) {
  return guarded(program, [&] { program->leave_shape(value, local_tensor(tensor)); });
}

EXPORT int rote_bridge_program_number(Program* program, uint32_t op, uint32_t arg, int64_t element, double value) {
  return guarded(program, [&] {
    if (element < 0) {
      program->set_number(op, arg, value);
    } else {
      program->set_list_number(op, arg, static_cast<uint32_t>(element), value);
    }
  });
}

EXPORT int rote_bridge_run_op(Program* program, uint32_t index) {
  return guarded(program, [&] { program->run_op(index); });
}
EXPORT int rote_bridge_run_view(Program* program, uint32_t index) {
  return guarded(program, [&] { program->run_view(index); });
}
EXPORT int rote_bridge_run_collective(Program* program, uint32_t index) {
  return guarded(program, [&] { program->run_collective(index); });
}
EXPORT int rote_bridge_run_wait(Program* program, uint32_t value) {
  return guarded(program, [&] { program->run_wait(value); });
}
EXPORT int rote_bridge_run_rng(Program* program, uint32_t action, uint8_t device_kind, int8_t device_index,
                               uint32_t slot) {
  return guarded(program, [&] { program->run_rng(action, device_kind, device_index, slot); });
}
EXPORT int rote_bridge_run_free(Program* program, uint32_t value) {
  return guarded(program, [&] { program->run_free(value); });
}

// Whether a profiler listens to the step that is about to run; collectives
// show themselves in the steps for which this was so.
EXPORT int rote_bridge_program_listened(Program* program) { return program->ranges.look() ? 1 : 0; }

// Ranges nest: the end is that of the last one begun.
EXPORT int rote_bridge_range_begin(Program* program, const char* name) {
  return guarded(program, [&] { program->ranges.begin(name); });
}
EXPORT int rote_bridge_range_end(Program* program) {
  return guarded(program, [&] { program->ranges.end(); });
}

// Calls `body(context)` below autograd and autocast, with the GIL released,
// then waits for collectives that are still under way, whatever became of it.
EXPORT int rote_bridge_run(Program* program, int (*body)(void*), void* context) {
  int status = 0;
  int end = guarded(program, [&] {
    py::gil_scoped_release no_gil;
    ReplayScope scope;
    program->begin();
    status = body(context);
    program->finish();
  });
  return end != 0 ? end : status;
}

// Watches what this thread allocates until the watch is dropped, by the same
// thread. Null, without an error, while a profiler runs.
EXPORT int rote_bridge_watch_new(Watching** watch) {
  return guarded([&] { *watch = Watching::start().release(); });
}
EXPORT void rote_bridge_watch_free(Watching* watch) { delete watch; }

// The most bytes allocated at once since the last call, above those at that call.
EXPORT int64_t rote_bridge_watch_rise(Watching* watch) { return watch->rise(); }

// Drops the tensors of the run from these slots.
EXPORT int rote_bridge_program_clear(Program* program, const uint32_t* values, uint32_t n) {
  return guarded(program, [&] { program->clear(values, n); });
}

// Says of tensors, or of their `.grad`, how often a step has written them, as autograd counts it; of DTensors,
// how often their local tensors besides. Version counters of several tensors rise once.
EXPORT int rote_bridge_written(PyObject* const* tensors, const uint8_t* grads, const uint32_t* times,
                               const uint32_t* local_times, uint32_t n) {
  return guarded([&] {
    std::vector<std::pair<at::Tensor, int64_t>> versions;
    versions.reserve(n);
    auto add = [&](const at::Tensor& tensor, uint32_t by) {
      if (by && tensor.defined() && !tensor.is_inference()) versions.emplace_back(tensor, int64_t{tensor._version()} + by);
    };
    for (uint32_t i = 0; i < n; ++i) {
      const at::Tensor& owner = THPVariable_Unpack(tensors[i]);
      const at::Tensor& tensor = grads[i] ? owner.grad() : owner;
      add(tensor, times[i]);
      if (!local_times[i] || !tensor.defined()) continue;
      py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
      add(local_tensor(object.ptr()), local_times[i]);
    }
    for (const auto& [tensor, version] : versions) {
      c10::VariableVersion counter = torch::autograd::impl::version_counter(tensor);
      counter.set_version(version);
    }
  });
}

// A result as a new reference. `fresh`: nothing else holds the slot's tensor.
EXPORT PyObject* rote_bridge_program_output(Program* program, uint32_t value, int fresh) {
  PyObject* out = nullptr;
  if (guarded(program, [&] { out = THPVariable_Wrap(program->output(value, fresh != 0)); }) != 0) return nullptr;
  return out;
}

// The tensor of a slot as a new reference; null, without an error, for an empty one.
EXPORT PyObject* rote_bridge_program_shown(Program* program, uint32_t value) {
  PyObject* out = nullptr;
  guarded([&] {
    if (program->get(value).defined()) out = THPVariable_Wrap(program->output(value, false));
  });
  return out;
}

// Calls `body(context)` with the GIL held, from where it was released.
EXPORT int rote_bridge_with_gil(int (*body)(void*), void* context) {
  int status = 0;
  int end = guarded([&] {
    py::gil_scoped_acquire gil;
    status = body(context);
  });
  return end != 0 ? end : status;
}

// --- agreement of ranks --------------------------------------------------------

// The process group registered under a name: its number, which no other group
// ever has, how many ranks it has (0: there is no such group), and whether it
// has a CPU backend.
EXPORT int rote_bridge_group(const char* name, uint64_t* number, uint32_t* ranks, int* cpu) {
  return guarded([&] {
    *ranks = 0;
    auto group = find_group(name);
    if (!group) return;
    *number = group_number(group);
    *ranks = static_cast<uint32_t>(group->getSize());
    *cpu = has_cpu_backend(*group) ? 1 : 0;
  });
}

// Gathers `n` bytes of every rank of a group in `out`, in the order of ranks.
EXPORT int rote_bridge_gather(const char* name, uint64_t number, const uint8_t* ours, uint64_t n, uint8_t* out) {
  return guarded([&] {
    auto group = find_group(name);
    TORCH_CHECK(group && group_number(group) == number, "the process group ", name, " is gone");
    gather_bytes(*group, ours, n, out);
  });
}

// The checks that this thread runs tell each other their outcomes over the group of this name and number. No name: none.
EXPORT int rote_bridge_compare_checks(const char* name, uint64_t number) {
  return guarded([&] {
    checks_compared.reset();
    if (!name) return;
    auto group = find_group(name);
    TORCH_CHECK(group && group_number(group) == number, "the process group ", name, " is gone");
    checks_compared = group;
  });
}

// What the last check of this thread that has ended a run has found: integers, and how many; or null.
EXPORT const int64_t* rote_bridge_found_answer(uint64_t* n) {
  *n = found_answer ? found_answer->size() : 0;
  static const int64_t nothing = 0;  // of a shape without dimensions
  return !found_answer ? nullptr : found_answer->empty() ? &nothing : found_answer->data();
}

// Calls `body(context)` with the GIL released.
EXPORT int rote_bridge_without_gil(int (*body)(void*), void* context) {
  int status = 0;
  int end = guarded([&] {
    py::gil_scoped_release no_gil;
    status = body(context);
  });
  return end != 0 ? end : status;
}

// --- single calls --------------------------------------------------------------

// Calls an op on host data: a tensor's `storage` is the address of its elements,
// dense and in order. The results lie so too, until the thread's next call.
EXPORT int rote_bridge_call_op(const char* name, const char* overload, const Arg* args, uint32_t nargs,
                               const Tensor** results, uint32_t* count, uint32_t* flags) {
  thread_local EagerCall call;
  return guarded([&] {
    ReplayScope scope;
    NoPython plain;
    call.run(name, overload, args, nargs);
    *results = call.results().data();
    *count = static_cast<uint32_t>(call.results().size());
    *flags = call.flags;
  });
}

EXPORT PyObject* rote_bridge_list_new(uint32_t n) { return PyList_New(n); }
EXPORT void rote_bridge_list_set(PyObject* list, uint32_t index, PyObject* item) { PyList_SET_ITEM(list, index, item); }
EXPORT void rote_bridge_incref(PyObject* object) { Py_XINCREF(object); }
EXPORT void rote_bridge_decref(PyObject* object) { Py_XDECREF(object); }

EXPORT int rote_bridge_read_float(const FactTable* table, uint32_t index, double* out) {
  return guarded([&] { *out = table->number(index); });
}

}  // namespace rote
