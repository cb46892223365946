// The node of autograd that stands for a region in the caller's graph (`_region.py`).
#pragma once
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_function.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <vector>

#include "values.h"

namespace rote {

// Hands its gradients and what the forward has saved to a Python function, which returns the gradients of its edges.
class RegionBackward : public torch::autograd::Node {
 public:
  RegionBackward(torch::autograd::edge_list&& edges, py::object backward)
      : Node(std::move(edges)), backward_(backward.release().ptr(), getPyInterpreter()) {}

  void save(const at::Tensor& tensor, bool is_output) { saved_.emplace_back(tensor, is_output); }

  std::string name() const override { return "RegionBackward"; }

  void release_variables() override {
    for (torch::autograd::SavedVariable& each : saved_) each.reset_data();
  }

  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    pybind11::gil_scoped_acquire gil;
    py::tuple needs(num_outputs());
    for (uint32_t i = 0; i < num_outputs(); ++i) needs[i] = task_should_compute_output(i);
    py::list saved(saved_.size());
    for (size_t i = 0; i < saved_.size(); ++i) saved[i] = wrapped(saved_[i].unpack(getptr()));
    py::tuple tangents(gradients.size());
    for (size_t i = 0; i < gradients.size(); ++i) tangents[i] = wrapped(gradients[i]);
    gradients.clear();
    PyObject* function = backward_.ptr(getPyInterpreter());
    py::object made = py::reinterpret_steal<py::object>(
        PyObject_CallFunctionObjArgs(function, needs.ptr(), tangents.ptr(), saved.ptr(), nullptr));
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
};

// The node of a tensor at which the graph of a region begins.
class RegionInput : public torch::autograd::Node {
 public:
  std::string name() const override { return "RegionInput"; }
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override { return {}; }
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
  torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(tensor), make_node<RegionInput>());
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

// The edge to a tensor, or to what a `GradientEdge` of Python names.
inline torch::autograd::Edge edge_to(PyObject* input) {
  if (THPVariable_Check(input)) return torch::autograd::impl::gradient_edge(THPVariable_Unpack(input));
  PyObject* node = PyTuple_GetItem(input, 0);
  if (!node) throw py::error_already_set();
  const auto number = static_cast<uint32_t>(PyLong_AsLong(PyTuple_GetItem(input, 1)));
  if (THPFunction_Check(node)) return {owned(reinterpret_cast<THPFunction*>(node)->cdata), number};
  return {reinterpret_cast<torch::autograd::THPCppFunction*>(node)->cdata, number};
}

// Makes the outputs of a region those of a new node. Gradients of `inputs`, tensors and edges, leave it, one after the
// other, and `backward` computes them: of which are needed, the gradients of the outputs, and what was saved.
inline void attach_region(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& saved, const py::list& inputs,
                          py::object backward) {
  torch::autograd::edge_list edges;
  for (py::handle input : inputs) edges.push_back(edge_to(input.ptr()));
  auto node = make_node<RegionBackward>(std::move(edges), std::move(backward));
  for (const at::Tensor& tensor : saved) {
    bool is_output = false;
    for (const at::Tensor& output : outputs) is_output |= output.is_same(tensor);
    static_cast<RegionBackward&>(*node).save(tensor, is_output);
  }
  for (const at::Tensor& output : outputs) torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(output), node);
}

}  // namespace rote
