// The node of autograd that stands for a region in the caller's graph (`_region.py`).
#pragma once
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
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

// Found where there is a function of this name: in versions of torch that hold nodes by shared pointers.
template <typename Any>
void delete_node(Any* node) {
  deleteNode(node);
}

// A new node, as this version of torch holds nodes.
template <typename Pointer>
Pointer make_node(torch::autograd::edge_list&& edges, py::object&& backward) {
  if constexpr (std::is_same_v<Pointer, std::shared_ptr<torch::autograd::Node>>) {
    return Pointer(new RegionBackward(std::move(edges), std::move(backward)), delete_node<typename Pointer::element_type>);
  } else {
    return c10::make_intrusive<RegionBackward>(std::move(edges), std::move(backward));
  }
}

// Makes the outputs of a region those of a new node. Gradients of `inputs` leave it, one after the other, and `backward`
// computes them: of which are needed, the gradients of the outputs, and what was saved.
inline void attach_region(const std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& saved,
                          const std::vector<at::Tensor>& inputs, py::object backward) {
  using Pointer = decltype(torch::autograd::Edge::function);
  auto node = make_node<Pointer>(torch::autograd::collect_next_edges(inputs), std::move(backward));
  for (const at::Tensor& tensor : saved) {
    bool is_output = false;
    for (const at::Tensor& output : outputs) is_output |= output.is_same(tensor);
    static_cast<RegionBackward&>(*node).save(tensor, is_output);
  }
  for (const at::Tensor& output : outputs) torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(output), node);
}

}  // namespace rote
