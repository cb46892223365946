// The node of autograd that stands for a region in the caller's graph (`_region.py`).
#pragma once
#include <ATen/SavedTensorHooks.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/tensor.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "observe.h"
#include "values.h"

namespace rote {

// Whether nothing is set in this thread that a region has to look at: no recording, no transform of torch.func, no
// hooks for saved tensors and no ban on them, no autocast.
inline bool is_plain_call() {
  const auto keys = c10::impl::tls_local_dispatch_key_set();
  const c10::DispatchKeySet looking({kObserved, c10::DispatchKey::FuncTorchDynamicLayerFrontMode});
  return !keys.included_.has_any(looking) && keys.excluded_.has_all(c10::autocast_dispatch_keyset) &&
         at::SavedTensorDefaultHooks::is_enabled() && !at::SavedTensorDefaultHooks::get_hooks(false);
}

// How many of the saved tensors, from the first on, the caller has passed, and how many the forward has made. All others
// are saved only so that writes to them are found.
struct Live {
  size_t given, made;
};

// Hands its gradients and what the forward has saved to a Python function, which returns the gradients of its edges. The
// function takes all that was saved in one list; or, if it is known which of that is live, two lists of plain tensors.
class RegionBackward : public torch::autograd::Node {
 public:
  RegionBackward(torch::autograd::edge_list&& edges, py::object backward, std::optional<Live> live)
      : Node(std::move(edges)), backward_(backward.release().ptr(), getPyInterpreter()), live_(live) {}

  void save(const at::Tensor& tensor, bool is_output) { saved_.emplace_back(tensor, is_output); }

  // Takes the gradients that a node of the graph inside takes.
  void stand_for(const Node& other, uint32_t input) { input_metadata_.emplace_back(other.input_metadata(input)); }

  // Has its last input take gradients of the dtype that a node of the graph inside asks for.
  void take_dtype_of(const Node& other, uint32_t input) {
    input_metadata_.back().set_grad_dtype(other.input_metadata(input).grad_dtype());
  }

  std::string name() const override { return "RegionBackward"; }

  void release_variables() override {
    for (torch::autograd::SavedVariable& each : saved_) each.reset_data();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    pybind11::gil_scoped_acquire gil;
    py::tuple needs(num_outputs());
    for (uint32_t i = 0; i < num_outputs(); ++i) needs[i] = task_should_compute_output(i);
    torch::autograd::variable_list saved;
    saved.reserve(saved_.size());
    for (torch::autograd::SavedVariable& each : saved_) saved.push_back(each.unpack(getptr()));
    py::tuple tangents(gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) tangents[i] = wrapped(gradients[i]);
    gradients.clear();
    PyObject* function = backward_.ptr(getPyInterpreter());
    py::object made;
    if (live_) {
      py::list given(live_->given), of_forward(live_->made);
      for (size_t i = 0; i < live_->given; ++i) given[i] = plain(saved[i], true);
      for (size_t i = 0; i < live_->made; ++i) of_forward[i] = plain(saved[live_->given + i], false);
      made = py::reinterpret_steal<py::object>(PyObject_CallFunctionObjArgs(
          function, needs.ptr(), tangents.ptr(), given.ptr(), of_forward.ptr(), nullptr));
    } else {
      py::list all(saved.size());
      for (size_t i = 0; i < saved.size(); ++i) all[i] = wrapped(saved[i]);
      made = py::reinterpret_steal<py::object>(
          PyObject_CallFunctionObjArgs(function, needs.ptr(), tangents.ptr(), all.ptr(), nullptr));
    }
    if (!made) {
      python_error error;
      error.persist();
      throw std::move(error);
    }
    return tensors_in(py::reinterpret_borrow<py::list>(made));
  }

 private:
  static py::object wrapped(const at::Tensor& tensor) {
    if (!tensor.defined()) return py::none();
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(tensor));
  }

  // A saved tensor without its graph: of a DTensor the local one. One that needs no gradient stays as it is, unless
  // `always`.
  static py::object plain(const at::Tensor& tensor, bool always) {
    py::object object = wrapped(tensor);
    if (!always && !tensor.requires_grad()) return object;
    if (always && is_dtensor(object.ptr())) object = object.attr("_local_tensor");
    if (!THPVariable_CheckTypeExact(Py_TYPE(object.ptr()))) return object.attr("data");
    return wrapped(THPVariable_Unpack(object.ptr()).variable_data());
  }

  static torch::autograd::variable_list tensors_in(const py::list& list) {
    torch::autograd::variable_list found(list.size());
    for (size_t i = 0; i < list.size(); ++i) {
      PyObject* item = PyList_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i));
      if (item != Py_None) found[i] = THPVariable_Unpack(item);
    }
    return found;
  }

  std::vector<torch::autograd::SavedVariable> saved_;
  c10::SafePyObject backward_;
  std::optional<Live> live_;
};

// A node at which the graph of a region ends. It takes gradients of any dtype: the engine casts what `RegionBackward`
// returns to what the caller's node asks for at that time, which may change after the forward (FSDP2 sets `grad_dtype`).
class RegionInput : public torch::autograd::Node {
 public:
  std::string name() const override { return "RegionInput"; }

  // Takes the gradients that an edge would hand on, and keeps the node that it led to.
  void stand_for(torch::autograd::Edge edge) {
    input_metadata_.emplace_back(edge.function->input_metadata(edge.input_nr));
    take_any_dtype();
    before_ = std::move(edge.function);
  }

  // Has the engine hand on the gradients of its only input as they are.
  void take_any_dtype() { input_metadata_.at(0).set_grad_dtype(std::nullopt); }

  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    throw std::runtime_error(
        "rote: the graph of a region is used from outside; remedy: return the tensors that have it, or call release() on "
        "the region");
  }

 private:
  decltype(torch::autograd::Edge::function) before_;
};

// Found where there is a function of this name: in versions of torch that hold nodes by shared pointers.
template <typename Any>
void delete_node(Any* node) {
  deleteNode(node);
}

// A new node, as this version of torch holds nodes.
template <typename Made, typename Pointer = decltype(torch::autograd::Edge::function), typename... Parts>
Pointer make_node(Parts&&... parts) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(new Made(std::forward<Parts>(parts)...), delete_node<typename Pointer::element_type>);
  } else {
    return c10::make_intrusive<Made>(std::forward<Parts>(parts)...);
  }
}

// Makes a detached tensor one at which a graph begins: no leaf, and nothing holds it.
inline void begin_graph(const at::Tensor& tensor) {
  auto begin = make_node<RegionInput>();
  torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(tensor), begin);
  static_cast<RegionInput&>(*begin).take_any_dtype();
}

// The node of a function of Python, which held it weakly in older versions of torch.
template <typename Any>
decltype(torch::autograd::Edge::function) owned(const std::weak_ptr<Any>& held) {
  return held.lock();
}
template <typename Any>
decltype(torch::autograd::Edge::function) owned(const Any& held) {
  return held;
}

using NodePointer = decltype(torch::autograd::Edge::function);

// The node that an object of Python stands for.
inline NodePointer node_in(PyObject* node) {
  if (THPFunction_Check(node)) return owned(reinterpret_cast<THPFunction*>(node)->cdata);
  return reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata;
}

// The two items of a tuple: an object, and a number.
inline std::pair<PyObject*, uint32_t> pair_in(PyObject* tuple) {
  PyObject* first = PyTuple_GetItem(tuple, 0);
  if (!first) throw py::error_already_set();
  return {first, static_cast<uint32_t>(PyLong_AsLong(PyTuple_GetItem(tuple, 1)))};
}

// Ends an edge of a node at a new node, which takes the same gradients. Returns the new node.
inline py::object end_edge(const py::object& node, size_t place) {
  NodePointer owner = node_in(node.ptr());
  torch::autograd::Edge& edge = owner->next_edges().at(place);
  auto end = make_node<RegionInput>();
  static_cast<RegionInput&>(*end).stand_for(edge);
  edge = {end, 0};
  // The node of a write to a view has the node of the op inside, which hands on the gradients of other operands.
  if (auto* write = dynamic_cast<torch::autograd::CopySlices*>(&*owner); write && place > 0)
    write->fn->next_edges().at(place) = edge;
  return py::reinterpret_steal<py::object>(torch::autograd::functionToPyObject(end));
}

// A tensor in a list, by its place.
inline const at::Tensor& tensor_at(const py::list& tensors, PyObject* place) {
  PyObject* item = PyList_GetItem(tensors.ptr(), PyLong_AsSsize_t(place));
  if (!item) throw py::error_already_set();
  return THPVariable_Unpack(item);
}

// The edge to a tensor, to one of those that were passed by its place, to what a `GradientEdge` of Python names, or to a
// place of a piece that is made already.
inline torch::autograd::Edge edge_to(PyObject* input, const py::list& given, const std::vector<NodePointer>& made) {
  if (is_tensor(input)) return torch::autograd::impl::gradient_edge(THPVariable_Unpack(input));
  if (PyLong_Check(input)) return torch::autograd::impl::gradient_edge(tensor_at(given, input));
  const auto [item, number] = pair_in(input);
  if (PyLong_Check(item)) return {made.at(PyLong_AsLong(item)), number};
  return {node_in(item), number};
}

// What one forward has: the leaves of its result, the tensors that were passed, and those that it has made.
struct OfForward {
  const py::list &leaves, &given, &made;
};

// The tensors that a piece saves. `saved` is a list of them; or, for all forwards, a tuple: the places of those that were
// passed, the places of those that were made, and what is saved only so that writes to it are found: tensors, places of
// leaves, places of tensors that were passed.
inline std::vector<at::Tensor> tensors_to_save(PyObject* saved, const OfForward& forward) {
  std::vector<at::Tensor> tensors;
  if (PyList_Check(saved)) {
    for (py::handle tensor : py::handle(saved)) tensors.push_back(THPVariable_Unpack(tensor.ptr()));
    return tensors;
  }
  const py::list* lists[] = {&forward.given, &forward.made, nullptr, &forward.leaves, &forward.given};
  for (Py_ssize_t part = 0; part < PyTuple_Size(saved); ++part)
    for (py::handle item : py::handle(PyTuple_GetItem(saved, part)))
      tensors.push_back(lists[part] ? tensor_at(*lists[part], item.ptr()) : THPVariable_Unpack(item.ptr()));
  return tensors;
}

// Makes the outputs of a region, leaves of its result at `places`, those of new nodes, one for each piece of its graph. The
// pieces stand in the order in which the engine runs them. A piece is a tuple: what takes gradients (places of outputs, and
// edges of the graph inside), what gradients go to (as `edge_to` has it), the function that computes these, one after the
// other, of which are needed, the gradients that have come, and what was saved; what to save (as `tensors_to_save` has it);
// and the edges of the graph inside at which gradients come in, one for each of what takes them. `order` has the piece of
// each saved tensor, in the order in which eager saves them; it is empty if that does not matter.
inline void attach_region(const py::list& leaves, const std::vector<size_t>& places, const py::list& given,
                          const py::list& made_tensors, const py::list& pieces, const std::vector<size_t>& order) {
  const OfForward forward{leaves, given, made_tensors};
  std::vector<at::Tensor> outputs;
  for (const size_t place : places) outputs.push_back(THPVariable_Unpack(py::handle(leaves[place]).ptr()));
  std::vector<NodePointer> made(pieces.size());
  std::vector<size_t> owners_of_outputs(outputs.size());
  std::vector<std::vector<at::Tensor>> saved(pieces.size());
  for (size_t number = pieces.size(); number-- > 0;) {  // the engine runs those first that were made last
    PyObject* piece = PyList_GET_ITEM(pieces.ptr(), static_cast<Py_ssize_t>(number));
    torch::autograd::edge_list edges;
    for (py::handle input : py::handle(PyTuple_GetItem(piece, 1))) edges.push_back(edge_to(input.ptr(), given, made));
    auto backward = py::reinterpret_borrow<py::object>(PyTuple_GetItem(piece, 2));
    PyObject* to_save = PyTuple_GetItem(piece, 3);
    std::optional<Live> live;
    if (PyTuple_Check(to_save)) live = Live{py::len(PyTuple_GetItem(to_save, 0)), py::len(PyTuple_GetItem(to_save, 1))};
    saved[number] = tensors_to_save(to_save, forward);
    made[number] = make_node<RegionBackward>(std::move(edges), std::move(backward), live);
    auto& node = static_cast<RegionBackward&>(*made[number]);
    auto entry = py::iter(py::handle(PyTuple_GetItem(piece, 4)));
    for (py::handle slot : py::handle(PyTuple_GetItem(piece, 0))) {
      const auto [inside, input] = pair_in((entry++)->ptr());
      if (PyLong_Check(slot.ptr())) {
        const size_t place = PyLong_AsSize_t(slot.ptr());
        torch::autograd::create_gradient_edge(outputs.at(place), made[number]);
        node.take_dtype_of(*node_in(inside), input);
        owners_of_outputs[place] = number;
      } else {
        node.stand_for(*node_in(inside), input);
      }
    }
  }
  std::vector<size_t> next(pieces.size());
  auto save = [&](size_t owner) {
    if (next.at(owner) >= saved[owner].size()) return false;
    const at::Tensor& tensor = saved[owner][next[owner]++];
    bool is_output = false;  // of its owner, which must not hold it
    for (size_t i = 0; i < outputs.size(); ++i) is_output |= owners_of_outputs[i] == owner && outputs[i].is_same(tensor);
    static_cast<RegionBackward&>(*made[owner]).save(tensor, is_output);
    return true;
  };
  for (const size_t owner : order) save(owner);
  for (size_t owner = 0; owner < made.size(); ++owner) {
    while (save(owner)) {
    }
  }
}

}  // namespace rote
