// What a session holds of Python's objects, where Python's garbage collector sees it: an object that a session holds
// may hold the captured function, and the captured function holds the session.
#pragma once
#include <memory>
#include <unordered_set>

#include <torch/csrc/utils/pybind.h>

namespace rote {

// Something that holds Python objects for a session.
class Holder {
 public:
  virtual ~Holder() = default;
  // Visits each reference once, as `tp_traverse` does.
  virtual int traverse(visitproc visit, void* arg) const = 0;
};

// All holders of a session. The collector may come whenever Python allocates: a holder stands here from when it is
// whole until before it lets go of its first object.
using Holders = std::shared_ptr<std::unordered_set<const Holder*>>;

// A Python object that owns a session, and through which the collector sees what the session holds.
struct Owner {
  PyObject_HEAD
  Holders holders;
  void* session;
  int (*free)(void*);

  static int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    const auto& holders = reinterpret_cast<Owner*>(self)->holders;
    if (holders)
      for (const Holder* holder : *holders)
        if (int stop = holder->traverse(visit, arg)) return stop;
    return 0;
  }

  // When Python ends, sessions stay: process groups may be gone already.
  static void dealloc(PyObject* self) {
    PyObject_GC_UnTrack(self);
    auto* owner = reinterpret_cast<Owner*>(self);
    const bool ends = is_finalizing();
    if (ends) (new Holders())->swap(owner->holders);  // its holders live on
    else {
      PyObject *type, *value, *trace;
      PyErr_Fetch(&type, &value, &trace);
      owner->free(owner->session);
      PyErr_Restore(type, value, trace);
    }
    owner->holders.~Holders();
    PyTypeObject* type = Py_TYPE(self);
    type->tp_free(self);
    Py_DECREF(type);
  }

  static bool is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
  }

  static PyTypeObject* type() {
    static PyTypeObject* const made = [] {
      static PyType_Slot slots[] = {
          {Py_tp_traverse, reinterpret_cast<void*>(&Owner::traverse)},
          {Py_tp_dealloc, reinterpret_cast<void*>(&Owner::dealloc)},
          {0, nullptr},
      };
      static PyType_Spec spec = {"rote.Session", sizeof(Owner), 0,
                                 Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};
      return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
    }();
    if (made == nullptr) throw py::error_already_set();
    return made;
  }

  static PyObject* make(Holders holders, void* session, int (*free)(void*)) {
    Owner* owner = PyObject_GC_New(Owner, type());
    if (owner == nullptr) throw py::error_already_set();
    new (&owner->holders) Holders(std::move(holders));
    owner->session = session;
    owner->free = free;
    PyObject_GC_Track(reinterpret_cast<PyObject*>(owner));
    return reinterpret_cast<PyObject*>(owner);
  }
};

}  // namespace rote
