// C++ exceptions as the Python exceptions that PyTorch's own bindings make of them.
#pragma once
#include <exception>
#include <string>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pybind.h>

namespace rote {

// Goes on after an error of what was asked. An interrupt, which may come in any Python code, is none: it is raised
// again where this thread next runs Python code.
inline void forget_error() {
  PyObject* kind = PyErr_Occurred();  // borrowed
  if (kind && !PyErr_GivenExceptionMatches(kind, PyExc_Exception))
    PyThreadState_SetAsyncExc(PyThread_get_thread_ident(), kind);
  PyErr_Clear();
}

// What an exception says. An exception of Python's says it with the GIL held.
inline std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& error) {
    py::gil_scoped_acquire gil;
    return error.what();
  } catch (python_error& error) {
    error.persist();
    py::gil_scoped_acquire gil;
    return error.what();
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown C++ exception";
  }
}

// The first exception of several, as a Python object. Kept and taken by any
// thread, dropped with the GIL held.
class Raised {
 public:
  Raised() = default;
  Raised(const Raised&) = delete;
  Raised& operator=(const Raised&) = delete;
  ~Raised() { Py_XDECREF(exception_); }

  void keep(const std::exception_ptr& error) noexcept {
    if (exception_ || !Py_IsInitialized()) return;
    try {
      py::gil_scoped_acquire gil;
      try {
        std::rethrow_exception(error);
      } catch (py::builtin_exception& error) {
        error.set_error();
      } catch (...) {
        torch::translate_exception_to_python(std::current_exception());
      }
      PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
      PyErr_Fetch(&type, &value, &traceback);
      if (!type) return;
      PyErr_NormalizeException(&type, &value, &traceback);
      if (value && traceback) PyException_SetTraceback(value, traceback);
      Py_XDECREF(type);
      Py_XDECREF(traceback);
      exception_ = value;
    } catch (...) {  // one that PyTorch does not know: its text must do
    }
  }

  // Whether the exception is one that programs handle, no KeyboardInterrupt. The GIL is held.
  bool is_error() const { return exception_ && PyErr_GivenExceptionMatches(exception_, PyExc_Exception); }

  // The exception, which is the caller's to release; or null.
  PyObject* take() { return std::exchange(exception_, nullptr); }

 private:
  PyObject* exception_ = nullptr;
};

}  // namespace rote
