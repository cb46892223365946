// By what tensors are indexed, through the slots of their classes. A function in the place of `Tensor.__getitem__` would not
// do: once it is gone, Python leaves the class with the slots of a sequence, which a tensor is not, for the whole process.
#pragma once
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <initializer_list>
#include <utility>
#include <vector>

namespace rote {

// One at a time, with the GIL held. `seen` is called with a tensor, the index, and what is written there, if something is,
// before PyTorch sees them; and without arguments after that.
class IndexHook {
 public:
  static IndexHook& get() {
    static IndexHook* hook = new IndexHook();  // outlives Python
    return *hook;
  }

  // Of classes that index as PyTorch's own does.
  void begin(const py::list& classes, py::function seen) {
    seen_ = std::move(seen);
    for (py::handle each : classes) {
      auto* type = reinterpret_cast<PyTypeObject*>(each.ptr());
      PyMappingMethods* slots = type->tp_as_mapping;
      if (!slots || slots->mp_subscript != original().mp_subscript) continue;
      if (slots->mp_ass_subscript != original().mp_ass_subscript) continue;
      slots->mp_subscript = &read;
      slots->mp_ass_subscript = &write;
      classes_.push_back(each.cast<py::object>());
    }
  }

  void end() {
    for (const py::object& each : classes_) {
      PyMappingMethods* slots = reinterpret_cast<PyTypeObject*>(each.ptr())->tp_as_mapping;
      if (slots->mp_subscript == &read) slots->mp_subscript = original().mp_subscript;
      if (slots->mp_ass_subscript == &write) slots->mp_ass_subscript = original().mp_ass_subscript;
    }
    classes_.clear();
    seen_ = py::object();
  }

 private:
  // Those of the class in C++ that `torch.Tensor` derives from. A class that is made while the hook is there keeps the
  // functions below, which are then these.
  static const PyMappingMethods& original() {
    return *reinterpret_cast<PyTypeObject*>(THPVariableClass)->tp_base->tp_as_mapping;
  }

  static PyObject* read(PyObject* self, PyObject* key) {
    const Seen seen({self, key});
    return original().mp_subscript(self, key);
  }

  static int write(PyObject* self, PyObject* key, PyObject* value) {
    const Seen seen({self, key, value});
    return original().mp_ass_subscript(self, key, value);
  }

  struct Seen {
    // The last of them may be null.
    explicit Seen(std::initializer_list<PyObject*> arguments) : seen(get().seen_) {
      call(arguments.begin(), arguments.size() - (arguments.end()[-1] == nullptr));
    }
    ~Seen() {
      py::error_scope raised;  // by PyTorch, which goes on its way
      call(nullptr, 0);
    }
    Seen(const Seen&) = delete;
    Seen& operator=(const Seen&) = delete;

    void call(PyObject* const* arguments, size_t count) const {
      if (!seen) return;
      PyObject* result = PyObject_Vectorcall(seen.ptr(), arguments, count, nullptr);
      if (!result) PyErr_WriteUnraisable(seen.ptr());
      Py_XDECREF(result);
    }

    py::object seen;
  };

  py::object seen_;
  std::vector<py::object> classes_;
};

}  // namespace rote
