// Which code Python runs, on all threads, through the hook that it has for profilers.
#pragma once
#include <unordered_set>

#include <torch/csrc/utils/pybind.h>

namespace rote {

// One at a time, with the GIL held.
class ProfileHook {
 public:
  static ProfileHook& get() {
    static ProfileHook* hook = new ProfileHook();  // outlives Python
    return *hook;
  }

  // False, and nothing is done, where a profiler of somebody else's listens.
  bool begin() {
    for (PyThreadState* thread : threads())
      if (thread->c_profilefunc != nullptr) return false;
    for (PyThreadState* thread : threads())
      if (thread != PyThreadState_Get()) note_stack(thread);
    listen(&note);
    return true;
  }

  // For a thread that was started since `begin`, from its first function on.
  void join() {
    note_stack(PyThreadState_Get());
    PyEval_SetProfile(&note, nullptr);
  }

  // The code that ran since `begin`; None where somebody else's profiler, or a thread without ours, came in between.
  py::object end() {
    bool all = true;
    for (PyThreadState* thread : threads()) all &= thread->c_profilefunc == &note;
    listen(nullptr);
    py::list codes;  // by identity: equal code of two functions may read other globals
    for (PyObject* code : seen_) {
      codes.append(py::handle(code));
      Py_DECREF(code);
    }
    seen_.clear();
    return all ? py::object(codes) : py::object(py::none());
  }

 private:
  static int note(PyObject*, PyFrameObject* frame, int what, PyObject*) {
    if (what == PyTrace_CALL) get().add(frame);
    return 0;
  }

  void add(PyFrameObject* frame) {
    PyCodeObject* code = PyFrame_GetCode(frame);
    if (!seen_.insert(reinterpret_cast<PyObject*>(code)).second) Py_DECREF(code);
  }

  // What another thread is in the midst of runs on.
  void note_stack(PyThreadState* thread) {
    PyFrameObject* frame = PyThreadState_GetFrame(thread);
    while (frame) {
      add(frame);
      PyFrameObject* back = PyFrame_GetBack(frame);
      Py_DECREF(frame);
      frame = back;
    }
  }

  static std::vector<PyThreadState*> threads() {
    std::vector<PyThreadState*> found;
    PyThreadState* thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    for (; thread; thread = PyThreadState_Next(thread)) found.push_back(thread);
    return found;
  }

  static void listen(Py_tracefunc function) {
#if PY_VERSION_HEX >= 0x030C0000
    PyEval_SetProfileAllThreads(function, nullptr);
#else
    for (PyThreadState* thread : threads()) _PyEval_SetProfile(thread, function, nullptr);
#endif
  }

  std::unordered_set<PyObject*> seen_;  // held
};

}  // namespace rote
