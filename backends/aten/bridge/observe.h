// Sees the ops of a recording, each below autograd and above its kernel, without a
// dispatch mode: PyTorch's composites look for modes, and go other ways where there
// is one. A dispatch key that PyTorch leaves to others does instead.
#pragma once
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/library.h>

#include "describe.h"
#include "modes.h"

namespace rote {

// Above the kernels of all backends. PyTorch has no kernel for it.
inline constexpr c10::DispatchKey kObserved = c10::DispatchKey::Fake;

// Who is told, one at a time, of what is not simply recorded: an object of Python with the methods `ran`, `recorded`,
// `failed`, `draws`, `called`, `set_otherwise`, `number_of` and `is_users_own`. Read and written under the GIL.
inline PyObject* listener = nullptr;

// Whether this thread runs a step that is being recorded.
inline bool observing() { return c10::impl::tls_is_dispatch_key_included(kObserved); }

inline void call_listener(const char* method, const py::tuple& arguments, py::object* answer = nullptr) {
  if (!listener) return;
  c10::impl::ExcludeDispatchKeyGuard unrecorded(kObserved);  // what the listener does is none of the step's
  py::object bound = py::reinterpret_steal<py::object>(PyObject_GetAttrString(listener, method));
  if (!bound) throw py::error_already_set();
  py::object result = py::reinterpret_steal<py::object>(PyObject_Call(bound.ptr(), arguments.ptr(), nullptr));
  if (!result) throw py::error_already_set();
  if (answer) *answer = std::move(result);
}

// The first op of the last observed step that raised; empty if none did. Read and written under the GIL.
inline std::string raising;

// The settings that the observed step began with, in its own thread and in those that work for it.
struct Settings {
  std::thread::id thread;
  uint64_t own = 0, others = 0;
};
inline Settings settings_before;

// Tells of an op that ran under other settings than the step began with; of the end of the step, by an empty name.
inline void compare_settings(const std::string& op) {
  bool own = std::this_thread::get_id() == settings_before.thread;
  if (computing_settings(own) != (own ? settings_before.own : settings_before.others))
    call_listener("set_otherwise", py::make_tuple(py::str(op)));
}

// What is the same for every call of an op.
struct ObservedOp {
  bool composite;  // it calls others, and no backend has a kernel for it
  bool reported;   // the listener wants to know when it is called
};

// Threads that work for the step ask too, without the GIL: those of gloo, which inherit this thread's callbacks, and
// may do so while the process ends.
struct ObservedOps {
  std::mutex mutex;
  std::unordered_set<std::string> reported;  // composites whose calls the listener wants to know of
  std::unordered_map<c10::OperatorName, ObservedOp> known;
};
inline ObservedOps& observed_ops = *new ObservedOps;

// A call of an op on DTensors, recorded once it does something.
struct GlobalCall {
  c10::OperatorName name;
  std::vector<c10::IValue> inputs;
  bool begun = false;
  bool given = false;  // Python has its arguments
};
inline thread_local std::vector<GlobalCall> global_calls;

inline py::tuple to_python(c10::ArrayRef<c10::IValue> values) {
  py::tuple out(values.size());
  for (size_t i = 0; i < values.size(); ++i) out[i] = torch::jit::toPyObject(values[i]);
  return out;
}

// Hands the ops of the observed step to the recording. Used under the GIL.
class Scribe {
 public:
  void begin(const Sink& sink) {
    sink_ = sink;
    detailed_ = py::handle(listener).attr("detailed").cast<bool>();
    recorded_ = unrecorded_ = 0;
    internal_.clear();
    for (py::handle code : py::handle(listener).attr("internal")) internal_.insert(code.ptr());
  }

  void end() {
    for (auto& [code, own] : own_) Py_DECREF(code);
    own_.clear();
    specs_.clear();
    line_.clear();
    open_ = 0;
    sink_ = {};
  }

  // Whether the listener is to be told of every op, with its arguments and results.
  bool detailed() const { return detailed_; }

  // The ops that have run since `begin`: until the recording was refused, and from then on.
  std::pair<size_t, size_t> counts() const { return {recorded_, unrecorded_}; }

  // Whether code of PyTorch's own runs an op: what a function in C++ does that no function of Python has called since.
  bool is_internal() const {
    if (internal_.empty()) return false;
    auto frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
    if (!frame) return true;  // a thread of the autograd engine
    auto code = py::reinterpret_steal<py::object>(
        reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
    return internal_.count(code.ptr()) != 0;
  }

  // The op that has just run.
  void record() {
    attempt([&] { return sink_.observed(sink_.session, open_ > 0 ? line_.c_str() : user_line().c_str()); });
  }

  void global_begins(const GlobalCall& call) {
    attempt([&] {
      numbers_.clear();
      for (const c10::IValue& input : call.inputs) add_specs(input);
      if (open_ == 0) line_ = user_line();
      ++open_;
      return sink_.global_begin(sink_.session, c10::toString(call.name).c_str(), numbers_.data(), numbers_.size(), line_.c_str());
    });
  }

  void global_ends(const std::vector<c10::IValue>& outputs) {
    attempt([&] {
      if (open_ > 0) --open_;
      numbers_.clear();
      for (const c10::IValue& output : outputs) add_specs(output);
      return sink_.global_end(sink_.session, numbers_.data(), numbers_.size());
    });
  }

 private:
  // Does what is to be recorded; the listener is told where that has another status than 0, or fails.
  template <typename Do>
  void attempt(Do&& record) {
    if (!listener) return;
    bool refused = py::handle(listener).attr("refused").cast<bool>();
    ++(refused ? unrecorded_ : recorded_);
    if (refused) return;
    try {
      c10::impl::ExcludeDispatchKeyGuard unrecorded(kObserved);
      if (int status = record()) call_listener("recorded", py::make_tuple(status));
    } catch (const std::exception& problem) {
      call_listener("failed", py::make_tuple(problem.what()));
    }
  }

  // The innermost line of the user's own code, as `file:line`; empty where there is none.
  std::string user_line() {
    auto frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyThreadState_GetFrame(PyThreadState_Get())));
    while (frame) {
      auto* at = reinterpret_cast<PyFrameObject*>(frame.ptr());
      auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(at)));
      if (is_own(code.ptr())) {
        const char* file = PyUnicode_AsUTF8(reinterpret_cast<PyCodeObject*>(code.ptr())->co_filename);
        if (!file) throw py::error_already_set();
        return std::string(file) + ":" + std::to_string(PyFrame_GetLineNumber(at));
      }
      frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
    }
    return "";
  }

  bool is_own(PyObject* code) {
    auto known = own_.find(code);
    if (known != own_.end()) return known->second;
    py::object answer;
    call_listener("is_users_own", py::make_tuple(py::handle(code)), &answer);
    Py_INCREF(code);
    return own_[code] = answer.cast<bool>();
  }

  // Adds the numbers of the specs of all tensors in a value.
  void add_specs(const c10::IValue& value) {
    if (value.isTensor() && value.toTensor().defined()) numbers_.push_back(number_of(value.toTensor()));
    if (value.isList())
      for (const c10::IValue& item : value.toListRef()) add_specs(item);
    if (value.isTuple())
      for (const c10::IValue& item : value.toTupleRef().elements()) add_specs(item);
  }

  uint32_t number_of(const at::Tensor& tensor) {
    constexpr uint32_t none = UINT32_MAX;  // ROTE_NO_INDEX: a plain tensor
    if (!tensor.key_set().has(c10::DispatchKey::Python)) return none;
    py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    if (!object || !is_dtensor(object.ptr())) return none;
    py::object keep;
    PyObject* spec = dtensor_attribute(object.ptr(), classes.spec_offset, classes.spec_name, keep);
    auto known = specs_.find(spec);
    if (known != specs_.end()) return known->second;
    py::object number;  // the listener keeps the spec, so that its address stays its own
    call_listener("number_of", py::make_tuple(py::handle(spec)), &number);
    return specs_[spec] = number.cast<uint32_t>();
  }

  Sink sink_{};
  bool detailed_ = false;
  std::unordered_set<PyObject*> internal_;  // code of PyTorch's that calls such functions
  std::unordered_map<PyObject*, bool> own_;        // code, held: whether it is the user's
  std::unordered_map<PyObject*, uint32_t> specs_;  // their numbers
  std::vector<uint32_t> numbers_;
  size_t recorded_ = 0, unrecorded_ = 0;
  size_t open_ = 0;   // ops on DTensors under way,
  std::string line_;  // and the user's line that calls the outermost: what they run is PyTorch's
};
inline Scribe& scribe = *new Scribe;

// Records the beginning of the innermost call on DTensors under way. The GIL is held.
inline void begin_global_call() {
  if (global_calls.empty() || global_calls.back().begun) return;
  global_calls.back().begun = true;
  scribe.global_begins(global_calls.back());
}

// The arguments of that call, the first time that somebody asks.
inline py::object innermost_global_call() {
  begin_global_call();
  if (global_calls.empty() || std::exchange(global_calls.back().given, true)) return py::none();
  return to_python(global_calls.back().inputs);
}

// Hands a call to a mode or a subclass of Tensor. Up to PyTorch 2.12 the observed key
// stands above Python's, and PyTorch's own kernel excludes all keys above Python's
// while Python code runs, so that the ops that it calls would go by unseen. This
// excludes the same keys without the observed one.
inline void hand_to_python(const c10::OperatorHandle& op, c10::DispatchKeySet below, torch::jit::Stack* stack) {
  constexpr c10::DispatchKeySet from_python =
      c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, c10::DispatchKey::Python) | c10::DispatchKeySet(c10::DispatchKey::Python);
  constexpr c10::DispatchKeySet above_python = c10::DispatchKeySet(c10::DispatchKeySet::FULL) ^ from_python;
  if (op.hasKernelForDispatchKey(c10::DispatchKey::Python)) {
    op.redispatchBoxed(below, stack);
    return;
  }
  c10::impl::ExcludeDispatchKeyGuard guard(above_python.remove(kObserved));
  (*getPyInterpreter())->dispatch(op, stack);
}

// Ops of FSDP with kernels in Python, which do nothing but call other ops. Some schemas do not say what is written.
inline bool calls_others_only(const std::string& name) {
  static const std::unordered_set<std::string> names = {"fsdp::all_gather_copy_in", "fsdp::split_with_sizes_copy", "fsdp::chunk_cat",
                                                        "fsdp::copy_"};
  return names.count(name) != 0;
}

// Whether one of the tensors is only the shell of a subclass of Tensor, which keeps its data elsewhere.
inline bool any_without_memory(c10::ArrayRef<c10::IValue> inputs) {
  auto shell = [](const at::Tensor& tensor) {
    return tensor.defined() && tensor.key_set().has(c10::DispatchKey::Python) && tensor.has_storage() &&
           tensor.storage().nbytes() > 0 && !tensor.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get();
  };
  for (const c10::IValue& input : inputs) {
    if (input.isTensor()) {
      if (shell(input.toTensor())) return true;
    } else if (input.isList()) {
      for (const c10::IValue& item : input.toListRef())
        if (item.isTensor() && shell(item.toTensor())) return true;
    }
  }
  return false;
}

// Runs an op of a step that is being recorded, and tells what it has done.
inline void observe(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  c10::DispatchKeySet below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kObserved);
  // What goes on to a mode or a subclass of Tensor comes back as the ops that these call.
  if (below.has(c10::DispatchKey::Python)) {
    hand_to_python(op, below, stack);
    return;
  }
  const c10::FunctionSchema& schema = op.schema();
  if (calls_others_only(schema.name())) {
    op.redispatchBoxed(below, stack);
    return;
  }
  std::vector<c10::IValue> inputs = torch::jit::last(*stack, schema.arguments().size()).vec();
  bool hidden = c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::Python);
  if (hidden && (keys.has_backend(c10::BackendComponent::MetaBit) || any_without_memory(inputs))) {
    op.redispatchBoxed(below, stack);
    return;
  }
  {
    bool draws = op.hasTag(at::Tag::nondeterministic_seeded);
    bool begins = !global_calls.empty() && !global_calls.back().begun;
    if (draws || begins) {
      py::gil_scoped_acquire gil;
      begin_global_call();
      if (draws) call_listener("draws", py::tuple(0));
    }
  }
  try {
    c10::impl::ExcludeDispatchKeyGuard unrecorded(kObserved);
    op.redispatchBoxed(below, stack);
  } catch (...) {
    py::gil_scoped_acquire gil;
    if (raising.empty()) raising = c10::toString(op.operator_name());
    throw;
  }
  std::vector<c10::IValue> outputs = torch::jit::last(*stack, schema.returns().size()).vec();
  py::gil_scoped_acquire gil;
  compare_settings(schema.name());
  just_run = {&op, &inputs, &outputs, hidden, c10::GradMode::is_enabled(), scribe.is_internal()};
  const std::string& name = schema.name();
  bool waits = name == "_c10d_functional::wait_tensor", lifts = name == "aten::lift_fresh";
  if (!waits && !lifts && !scribe.detailed()) {
    scribe.record();
    just_run = {};
    return;
  }
  py::object tensor = py::none();
  if ((waits || lifts) && outputs.size() == 1 && outputs[0].isTensor()) tensor = torch::jit::toPyObject(outputs[0]);
  py::tuple arguments = py::make_tuple(waits ? 1 : lifts ? 2 : 0, tensor);
  if (scribe.detailed()) {
    py::object overload = py::reinterpret_borrow<py::object>(torch::detail::getTorchApiFunction(op));
    arguments = py::make_tuple(arguments[0], tensor, overload, to_python(inputs), to_python(outputs));
  }
  call_listener("ran", arguments);
  just_run = {};
}

// --- calls on DTensors, and of composites ------------------------------------------

struct Nested : public at::ObserverContext {};

inline ObservedOp observed_op(const c10::OperatorName& name) {
  auto& [mutex, reported, known] = observed_ops;
  std::lock_guard<std::mutex> lock(mutex);
  auto it = known.find(name);
  if (it != known.end()) return it->second;
  ObservedOp op{false, reported.count(c10::toString(name)) != 0};
  if (auto handle = c10::Dispatcher::singleton().findSchema(name))
    op.composite = handle->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd);
  return known.emplace(name, op).first->second;
}

inline void tell_of(const std::string& name) {
  std::lock_guard<std::mutex> lock(observed_ops.mutex);
  observed_ops.reported.insert(name);
  observed_ops.known.clear();
}

inline bool on_dtensors(c10::ArrayRef<const c10::IValue> inputs) {
  auto is_of_dtensor = [](const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.key_set().has(c10::DispatchKey::Python)) return false;
    py::gil_scoped_acquire gil;
    py::object object = py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
    return object && is_dtensor(object.ptr());
  };
  for (const c10::IValue& input : inputs) {
    if (input.isTensor()) {
      if (is_of_dtensor(input.toTensor())) return true;
    } else if (input.isList()) {
      for (const c10::IValue& item : input.toListRef()) {
        if (!item.isTensor()) break;
        if (is_of_dtensor(item.toTensor())) return true;
      }
    }
  }
  return false;
}

inline std::unique_ptr<at::ObserverContext> call_begins(const at::RecordFunction& call) {
  if (!observing()) return nullptr;
  auto name = call.operator_name();
  if (!name) return nullptr;
  const ObservedOp op = observed_op(*name);
  if (op.reported) {
    py::gil_scoped_acquire gil;
    call_listener("called", py::make_tuple(py::str(c10::toString(*name))));
  }
  if (op.composite || !on_dtensors(call.inputs())) return nullptr;
  global_calls.push_back({*name, std::vector<c10::IValue>(call.inputs().begin(), call.inputs().end())});
  return std::make_unique<Nested>();
}

inline void call_ends(const at::RecordFunction& call, at::ObserverContext* nested) {
  if (!nested || global_calls.empty()) return;
  py::gil_scoped_acquire gil;
  bool begun = global_calls.back().begun;
  global_calls.pop_back();
  if (!begun) return;
  // Called while an exception goes by, too.
  PyObject *kind, *value, *trace;
  PyErr_Fetch(&kind, &value, &trace);
  scribe.global_ends(call.outputs());
  PyErr_Restore(kind, value, trace);
}

// --- a count of ops ---------------------------------------------------------------

// How many ops a thread runs that do more than to read a number. One at a time.
class OpCount {
 public:
  void begin() {
    end();
    so_far_ = 0;
    counting_ = at::addThreadLocalCallback(at::RecordFunctionCallback([](const at::RecordFunction& call) {
                                             static const std::unordered_set<std::string> reads{
                                                 "aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::detach", "detach"};
                                             so_far_ += reads.count(call.name()) == 0;
                                             return std::unique_ptr<at::ObserverContext>();
                                           }).scopes({at::RecordScope::FUNCTION}));
  }

  size_t so_far() const { return so_far_; }

  size_t end() {
    if (counting_) at::removeCallback(std::exchange(counting_, 0));
    return so_far_;
  }

 private:
  static inline thread_local size_t so_far_ = 0;
  at::CallbackHandle counting_ = 0;
};
inline OpCount op_count;

// --- beginning and end --------------------------------------------------------------

inline at::CallbackHandle calls_seen = 0, calls_seen_elsewhere = 0;

// From now on, the ops of this thread, and of threads that work for it, are recorded, and `object` is told.
inline void observe_from_now(PyObject* object, const Sink& sink) {
  static auto* library = new torch::Library(torch::Library::IMPL, "_", kObserved, __FILE__, __LINE__);
  static bool registered = (library->fallback(torch::CppFunction::makeFromBoxedFunction<&observe>()), true);
  (void)registered;
  TORCH_CHECK(!listener && !observing(), "a step is being recorded already");
  Py_INCREF(object);
  listener = object;
  scribe.begin(sink);
  raising.clear();
  settings_before = {std::this_thread::get_id(), computing_settings(true), computing_settings(false)};
  calls_seen = at::addThreadLocalCallback(
      at::RecordFunctionCallback(call_begins, call_ends).needsInputs(true).needsOutputs(true).scopes({at::RecordScope::FUNCTION}));
  others().begin();
  calls_seen_elsewhere = at::addGlobalCallback(
      at::RecordFunctionCallback(called_elsewhere).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  c10::impl::tls_set_dispatch_key_included(kObserved, true);
}

inline void observe_no_more() {
  if (!listener) return;
  c10::impl::tls_set_dispatch_key_included(kObserved, false);
  at::removeCallback(calls_seen);
  at::removeCallback(calls_seen_elsewhere);
  others().end();
  global_calls.clear();
  struct End {
    ~End() {
      scribe.end();
      Py_DECREF(std::exchange(listener, nullptr));
    }
  } end;
  compare_settings("");
}

}  // namespace rote
