// Runs plans: operator handles found once, arguments boxed once, slots for the
// tensors of a step. Rust drives it, one call per instruction.
#pragma once
#include <algorithm>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/distributed/c10d/Functional.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "describe.h"
#include "element_wise.h"
#include "exceptions.h"
#include "numbers.h"
#include "ranges.h"
#include "unboxed.h"

namespace rote {

// In place of the graph of a tensor that a replayed step returns: eager's own
// graph is used up by then, and going backward through it is an error too.
struct ReplayedBackward : public torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&&) override {
    TORCH_CHECK(false,
                "trying to backward through a step captured by rote a second time: the graph of a returned tensor was "
                "used up inside the step. Call backward() once, inside the captured function, or return a tensor "
                "that does not need it.");
  }
  std::string name() const override { return "ReplayedBackward"; }
};

// Newer versions of torch count references to nodes inside the node.
template <typename NodePointer>
NodePointer new_replayed_backward() {
  if constexpr (std::is_constructible_v<NodePointer, std::shared_ptr<ReplayedBackward>>) {
    return std::make_shared<ReplayedBackward>();
  } else {
    return c10::make_intrusive<ReplayedBackward>();
  }
}

inline void set_replayed_history(const at::Tensor& tensor) {
  using NodePointer = decltype(torch::autograd::Edge::function);
  torch::autograd::create_gradient_edge(const_cast<at::Tensor&>(tensor), new_replayed_backward<NodePointer>());
}

// The bytes that a tensor reaches from its first element on: from the first of them
// to the one after the last. Nothing, if it has no elements.
struct Reach {
  int64_t from = 0, to = 0;

  Reach(c10::IntArrayRef sizes, c10::IntArrayRef strides, int64_t offset, int64_t element) {
    TORCH_CHECK(sizes.size() == strides.size() && element > 0, "a tensor without a layout");
    bool beyond = false;
    int64_t low = offset, high = offset, step = 0;
    for (size_t i = 0; i < sizes.size(); ++i) {
      if (sizes[i] == 0) return;
      TORCH_CHECK(sizes[i] > 0, "a negative size");
      beyond |= __builtin_mul_overflow(sizes[i] - 1, strides[i], &step);
      int64_t& end = step < 0 ? low : high;
      beyond |= __builtin_add_overflow(end, step, &end);
    }
    beyond |= __builtin_add_overflow(high, 1, &high);
    beyond |= __builtin_mul_overflow(low, element, &from) || __builtin_mul_overflow(high, element, &to);
    TORCH_CHECK(!beyond, "a tensor of more than 2^63 bytes");
  }

  // Fails unless a tensor that starts at a byte of a storage stays inside.
  void check(int64_t start, size_t bytes) const {
    if (from == to) return;
    int64_t last = 0;
    TORCH_CHECK(from >= -start && !__builtin_add_overflow(start, to, &last) && last <= static_cast<int64_t>(bytes),
                "a view of bytes ", from, " to ", to, " from byte ", start, " of a storage of ", bytes, " bytes");
  }
};

// A tensor on the storage of `base`, without going through the dispatcher. The caller
// has checked that it stays inside. `marks`: conjugated, negated.
inline at::Tensor alias_of(const at::Tensor& base, at::ScalarType dtype, uint8_t marks, c10::IntArrayRef sizes,
                           c10::IntArrayRef strides, int64_t offset) {
  c10::Storage storage = base.storage();
  auto keys = base.key_set().remove(c10::DispatchKey::Conjugate).remove(c10::DispatchKey::Negative);
  auto out = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, std::move(storage), keys,
                                                      c10::scalarTypeToTypeMeta(dtype));
  c10::TensorImpl* impl = out.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(sizes, strides, offset);
  if (marks & kMarkedConj) impl->_set_conj(true);
  if (marks & kMarkedNeg) impl->_set_neg(true);
  return out;
}

inline uint8_t marks_of(const at::Tensor& tensor) {
  return (tensor.is_conj() ? kMarkedConj : 0) | (tensor.is_neg() ? kMarkedNeg : 0);
}

class Program {
 public:
  Ranges ranges;  // what a profiler is shown
  Raised raised;  // why a call failed

  Program(uint32_t values, uint32_t rng_slots) : slots_(values), works_(values), rng_(rng_slots) {}

  // One allocation for the results that have a fixed place.
  void arena(uint64_t bytes, c10::Device device) {
    arena_ = at::empty({static_cast<int64_t>(bytes)}, at::TensorOptions().dtype(at::kByte).device(device));
  }

  // The tensor of a slot in the arena, on a storage of its own that ends where
  // the tensor does.
  void place(uint32_t value, uint8_t dtype, c10::IntArrayRef sizes, c10::IntArrayRef strides, uint64_t offset,
             uint64_t bytes) {
    TORCH_CHECK(arena_.defined() && bytes <= arena_.nbytes() && offset <= arena_.nbytes() - bytes, "value ", value, " lies outside the arena");
    const auto type = static_cast<at::ScalarType>(dtype);
    Reach(sizes, strides, 0, static_cast<int64_t>(c10::elementSize(type))).check(0, bytes);
    void* data = static_cast<uint8_t*>(arena_.data_ptr()) + offset;
    c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, at::DataPtr(data, arena_.device()), nullptr, false);
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), arena_.key_set(), c10::scalarTypeToTypeMeta(type));
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, 0);
    slots_[slot(value)] = std::move(tensor);
  }

  // The slots hold these tensors for good: what reads them need not look.
  void fix(const uint32_t* values, uint32_t n) {
    std::vector<bool> fixed(slots_.size());
    for (uint32_t i = 0; i < n; ++i) fixed[slot(values[i])] = true;
    for (size_t i = 0; i < ops_.size(); ++i) {
      Prepared& op = ops_[i];
      make_calls(i, fixed);
      auto is_fixed = [&](const std::pair<uint32_t, uint32_t>& tensor) {
        if (!fixed[tensor.second]) return false;
        op.constants[tensor.first] = slots_[tensor.second];
        return true;
      };
      op.tensors.erase(std::remove_if(op.tensors.begin(), op.tensors.end(), is_fixed), op.tensors.end());
      auto all_fixed = [&](const TensorList& list) {
        for (int64_t value : list.slots)
          if (value >= 0 && !fixed[value]) return false;
        op.constants[list.position] = build(list);
        return true;
      };
      op.lists.erase(std::remove_if(op.lists.begin(), op.lists.end(), all_fixed), op.lists.end());
    }
  }

  // Whether an op looks at memory through another shape without a look at its bounds. No recorded plan has
  // one: it has views.
  static bool looks_elsewhere(const c10::OperatorHandle& op) {
    const std::string& name = op.schema().name();
    return op.hasTag(at::Tag::inplace_view) || name == "aten::_reshape_alias" ||
           name == "inductor::_reinterpret_tensor" || name == "inductor::_alloc_from_pool";
  }

  // `into`: how results get to the slots where they lie already; see Into. `grad`: whether
  // its kernel runs with gradients enabled; some compute otherwise then. `own`: PyTorch's
  // own, which does nothing but what its schema says.
  uint32_t prepare_op(const char* name, const char* overload, const Arg* args, uint32_t nargs, const int64_t* outs,
                      uint32_t nouts, uint8_t into, const char* into_overload, bool grad, bool own) {
    auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
    TORCH_CHECK(handle, "operator ", name, ".", overload, " is not in this version of torch");
    const auto& formals = handle->schema().arguments();
    TORCH_CHECK(formals.size() == nargs, "operator ", name, " takes ", formals.size(), " arguments, the plan gives ",
                nargs);
    TORCH_CHECK(nouts <= handle->schema().returns().size() || handle->schema().returns().size() == 1,
                "operator ", name, " returns ", handle->schema().returns().size(), " results, the plan names ", nouts);
    TORCH_CHECK(!looks_elsewhere(*handle), "operator ", name,
                " looks at memory through another shape: a plan says so as a view, whose bounds are checked");
    Prepared op{*handle, {}, {}, {}, {}, false, {}, {}};
    op.constants.reserve(nargs);
    for (uint32_t i = 0; i < nargs; ++i) {
      const Arg& arg = args[i];
      if (arg.tag == kValue) {
        op.tensors.push_back({i, slot(arg.i)});
        op.constants.emplace_back();
      } else if (arg.tag == kValues) {
        op.lists.push_back({i, optional_elements(formals[i]), is_of_lists_of_tensors(formals[i]), {}});
        for (uint32_t j = 0; j < arg.len; ++j)
          op.lists.back().slots.push_back(arg.ints[j] < 0 ? -1 : static_cast<int64_t>(slot(arg.ints[j])));
        op.constants.emplace_back();
      } else {
        op.constants.push_back(constant(arg, formals[i].type()));
      }
    }
    op.own = own;
    for (uint32_t i = 0; i < nargs && !own; ++i)
      if (formals[i].alias_info() && formals[i].alias_info()->isWrite()) op.written.push_back(i);
    // An op of which nothing is kept, as one in place, has no results to look at.
    if (std::any_of(outs, outs + nouts, [](int64_t out) { return out >= 0; })) op.outs.assign(outs, outs + nouts);
    if (handle->schema().name().rfind("c10d::", 0) == 0) {
      TORCH_CHECK(op.outs.size() == 1, "operator ", name, " returns a handle, which the plan does not keep");
      op.starts = slot(op.outs[0]);
      op.outs.clear();
    } else if (handle->schema().name() == kWait) {
      TORCH_CHECK(!op.tensors.empty() && op.tensors[0].first == 0, "a wait without a handle");
      op.waits = op.tensors[0].second;
    }
    if (into == kIntoOverload) {
      write_into(op, name, into_overload);
    } else if (into == kIntoCopy) {
      copy_into(op);
    }
    ops_.push_back(std::move(op));
    direct_.emplace_back();
    element_wise_.emplace_back();
    grads_.push_back(grad);
    return static_cast<uint32_t>(ops_.size() - 1);
  }

  // A result that an op of another library must make in every run as in the recording: nothing but its kernel decides
  // how it looks.
  void expect(uint32_t op, uint32_t result, uint8_t dtype, uint8_t marks, c10::Device device, c10::IntArrayRef sizes,
              c10::IntArrayRef strides) {
    if (ops_.at(op).outs.empty()) return;  // nothing is kept of what it returns
    const auto seen = static_cast<uint8_t>(marks & (kMarkedConj | kMarkedNeg));
    ops_.at(op).expected.push_back({result, static_cast<at::ScalarType>(dtype), seen, device, sizes.vec(), strides.vec()});
  }

  // Whether an op has made another result than the plan says.
  bool differs() const { return differs_; }

  void set_number(uint32_t op, uint32_t arg, double value) {
    c10::IValue& constant = ops_.at(op).constants.at(arg);
    if (constant.isTensor()) {
      if (!set_wrapped(constant.toTensor(), value)) constant = wrapped(value);
    } else {
      constant = value;
    }
  }

  void set_list_number(uint32_t op, uint32_t arg, uint32_t element, double value) {
    c10::IValue& constant = ops_.at(op).constants.at(arg);
    if (constant.isDoubleList()) {
      constant.toDoubleList().set(element, value);
    } else {
      constant.toList().set(element, value);
    }
  }

  uint32_t prepare_view(uint32_t base, uint32_t out, uint8_t dtype, uint8_t marks, const int64_t* sizes,
                        const int64_t* strides, uint32_t ndim, int64_t offset) {
    const auto type = static_cast<at::ScalarType>(dtype);
    Reach reach({sizes, ndim}, {strides, ndim}, offset, static_cast<int64_t>(c10::elementSize(type)));
    views_.push_back({slot(base), slot(out), type, marks, std::vector<int64_t>(sizes, sizes + ndim),
                      std::vector<int64_t>(strides, strides + ndim), offset, reach});
    return static_cast<uint32_t>(views_.size() - 1);
  }

  uint32_t prepare_collective(uint32_t kind, int32_t reduce, const char* group, uint32_t root, uint32_t input,
                              uint32_t output, const int64_t* sizes, uint32_t ndim, const int64_t* input_splits,
                              uint32_t n_input_splits, const int64_t* output_splits, uint32_t n_output_splits) {
    collectives_.push_back({kind, reduce, c10d::resolve_process_group(group), root, slot(input), slot(output),
                            std::vector<int64_t>(sizes, sizes + ndim),
                            std::vector<int64_t>(input_splits, input_splits + n_input_splits),
                            std::vector<int64_t>(output_splits, output_splits + n_output_splits),
                            {},
                            {}});
    return static_cast<uint32_t>(collectives_.size() - 1);
  }

  void put(uint32_t value, const at::Tensor& tensor) {
    slots_[slot(value)] = tensor;
  }

  // Puts the memory of a tensor in its slot for good, without holding the tensor: its caller may
  // put another one in its place (`swap_tensors`).
  void put_memory(uint32_t value, const at::Tensor& tensor) {
    const bool plain = tensor.has_storage() && tensor.layout() == at::kStrided &&
                       !tensor.key_set().has(c10::DispatchKey::Python);
    if (!plain) return put(value, tensor);
    slots_[slot(value)] =
        alias_of(tensor, tensor.scalar_type(), marks_of(tensor), tensor.sizes(), tensor.strides(), tensor.storage_offset());
  }

  // Gives a tensor the sizes and strides of what is in its slot: an op that raised may have
  // changed them, which eager leaves so.
  void leave_shape(uint32_t value, const at::Tensor& tensor) const {
    const at::Tensor& left = slots_[slot(value)];
    if (!left.defined() || !left.has_storage() || !tensor.has_storage()) return;
    if (left.sizes() == tensor.sizes() && left.strides() == tensor.strides()) return;
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(left.sizes(), left.strides(), left.storage_offset());
  }

  // A run draws from the default generator of a device.
  void draws(c10::Device device) { generators_.push_back({at::globalContext().defaultGenerator(device), {}}); }

  // Before a run: gradients are disabled.
  void begin() {
    grad_ = false;
    past_dispatcher_ = !ranges.listened() && thread_goes_to_kernel() &&
                       std::all_of(own_kernels_.begin(), own_kernels_.end(), [](const auto& own) { return own.is_there(); });
    for (auto& [generator, state] : generators_) {
      std::lock_guard<std::mutex> lock(generator.mutex());
      state = generator.get_state();
    }
  }

  // After a run that failed and has changed nothing else that lasts: puts generators back where they stood before it.
  // False, and nothing is done, if something other than an error ended it (KeyboardInterrupt).
  bool undo() {
    if (!raised.is_error()) return false;
    for (auto& [generator, state] : generators_) {
      std::lock_guard<std::mutex> lock(generator.mutex());
      generator.set_state(state);
    }
    return true;
  }

  void run_op(uint32_t index) {
    if (bool grad = grads_.at(index); grad != grad_) c10::GradMode::set_enabled(grad_ = grad);
    if (past_dispatcher_ && element_wise_[index] && element_wise_[index]->call()) return;
    if (const auto& direct = direct_[index]) return direct->call();
    Prepared& op = ops_[index];
    if (op.waits) return run_wait(*op.waits);
    stack_.clear();
    for (const c10::IValue& constant : op.constants) stack_.push_back(constant);
    for (const auto& [position, value] : op.tensors) stack_[position] = slots_[value];
    for (const TensorList& list : op.lists) stack_[list.position] = build(list);
    if (op.own) {
      op.handle.callBoxed(&stack_);
    } else {
      run_of_others(op);
    }
    if (op.starts) {
      take_handle(*op.starts);
    } else {
      take_results(op);
    }
    stack_.clear();  // it holds what the op wrote in place
  }

  void run_view(uint32_t index) {
    const View& view = views_.at(index);
    const at::Tensor& base = slots_[view.base];
    TORCH_CHECK(base.defined() && base.has_storage(), "a view of what has no storage");
    // The base is the root: offsets count from where its data starts.
    int64_t start = base.storage_offset() * static_cast<int64_t>(base.element_size());
    int64_t element = static_cast<int64_t>(c10::elementSize(view.dtype));
    TORCH_CHECK(start % element == 0, "a view of another dtype starts inside an element");
    view.reach.check(start, base.storage().nbytes());
    slots_[view.out] = alias_of(base, view.dtype, view.marks, view.sizes, view.strides, view.offset + start / element);
  }

  void run_collective(uint32_t index) {
    Collective& c = collectives_.at(index);
    const at::Tensor& input = slots_[c.input];
    std::optional<OpRange> range;
    if (ranges.listened()) range.emplace(name_of(c), input);
    if (!c.backend) c.backend = c.group->getBackend(input.device().type());
    const auto& backend = c.backend;
    bool in_place = c.input == c.output;
    at::Tensor& output = slots_[c.output];
    c10::intrusive_ptr<c10d::Work> work;
    switch (c.kind) {
      case 0: {  // all-reduce
        if (!in_place) same_as(output, input);
        c.tensors.assign(1, output);
        c10d::AllreduceOptions options;
        options.reduceOp = reduce_op(c.reduce);
        work = backend->allreduce(c.tensors, options);
        break;
      }
      case 1: {  // all-gather
        if (!output.defined()) output = at::empty(c.sizes, input.options());
        at::Tensor contiguous = input.contiguous();
        work = backend->_allgather_base(output, contiguous, c10d::AllgatherOptions());
        break;
      }
      case 2: {  // reduce-scatter
        if (!output.defined()) output = at::empty(c.sizes, input.options());
        at::Tensor contiguous = input.contiguous();
        c10d::ReduceScatterOptions options;
        options.reduceOp = reduce_op(c.reduce);
        work = backend->_reduce_scatter_base(output, contiguous, options);
        break;
      }
      case 3: {  // all-to-all
        if (!output.defined()) output = at::empty(c.sizes, input.options());
        at::Tensor contiguous = input.contiguous();
        std::vector<int64_t> in = c.input_splits, out = c.output_splits;
        work = backend->alltoall_base(output, contiguous, out, in, c10d::AllToAllOptions());
        break;
      }
      case 4: {  // broadcast
        if (!in_place) same_as(output, input);
        c.tensors.assign(1, output);
        c10d::BroadcastOptions options;
        options.rootRank = c.root;
        work = backend->broadcast(c.tensors, options);
        break;
      }
      default:
        TORCH_CHECK(false, "unknown collective ", c.kind);
    }
    c.tensors.clear();
    works_[c.output] = std::move(work);
    pending_.push_back(c.output);
  }

  void run_wait(uint32_t value) {
    auto& work = works_[slot(value)];
    if (!work) return;
    std::optional<OpRange> range;
    if (ranges.listened()) range.emplace("_c10d_functional::wait_tensor", slots_[value]);
    work->wait();
    work.reset();
  }

  void run_rng(uint32_t action, uint8_t device_kind, int8_t device_index, uint32_t index) {
    const c10::Device device = device_of(device_kind, device_index);
    at::Generator generator = at::globalContext().defaultGenerator(device);
    std::lock_guard<std::mutex> lock(generator.mutex());
    if (action == 0) {
      rng_.at(index) = generator.get_state();
    } else {
      TORCH_CHECK(rng_.at(index).defined(), "generator state ", index, " is restored before it is saved");
      generator.set_state(rng_.at(index));
    }
  }

  void run_free(uint32_t value) { slots_[slot(value)].reset(); }

  // After a run, one that failed too: waits for what nobody waited for. Where a
  // wait fails, others may never end: none follows, and the memory is lost.
  void finish() {
    for (uint32_t value : pending_)
      if (auto& work = works_[value]) {
        try {
          work->wait();
        } catch (...) {
          lost_ = true;
          throw;
        }
        work.reset();
      }
    pending_.clear();
  }

  // Whether what this program has started may still use its memory.
  bool lost() const { return lost_; }

  // Whether all of it has come to an end.
  bool ended() const {
    return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return !work || work->isCompleted(); });
  }

  // Drops what a run has left in these slots.
  void clear(const uint32_t* values, uint32_t n) {
    for (at::Tensor& state : rng_) state.reset();
    if (lost_) return;
    for (uint32_t i = 0; i < n; ++i) slots_[values[i]].reset();
  }

  const at::Tensor& get(uint32_t value) const { return slots_.at(value); }

  // A result, as a tensor object of its own: never the caller's, never one
  // that was handed out before.
  at::Tensor output(uint32_t value, bool fresh) {
    const at::Tensor& tensor = slots_[slot(value)];
    TORCH_CHECK(tensor.defined(), "result ", value, " was not computed");
    if (fresh) return tensor;
    return alias_of(tensor, tensor.scalar_type(), marks_of(tensor), tensor.sizes(), tensor.strides(),
                    tensor.storage_offset());
  }

 private:
  struct TensorList {
    uint32_t position;
    bool optional;
    bool nested;  // the only list of a list
    std::vector<int64_t> slots;
  };
  struct Expected {
    uint32_t result;
    at::ScalarType dtype;
    uint8_t marks;
    c10::Device device;
    std::vector<int64_t> sizes, strides;

    bool is(const at::Tensor& tensor) const {
      return tensor.defined() && tensor.layout() == at::kStrided && tensor.scalar_type() == dtype &&
             marks_of(tensor) == marks && tensor.device() == device && tensor.sizes() == sizes &&
             tensor.strides() == strides;
    }
  };
  struct Prepared {
    c10::OperatorHandle handle;
    std::vector<c10::IValue> constants;
    std::vector<std::pair<uint32_t, uint32_t>> tensors;
    std::vector<TensorList> lists;
    std::vector<int64_t> outs;
    bool copies;  // results are copied to where they lie
    std::optional<uint32_t> starts;  // the slot of the handle that it returns
    std::optional<uint32_t> waits;   // the slot of the handle that it waits with
    bool own = true;                 // one of PyTorch's own
    std::vector<uint32_t> written{};   // of others: which arguments they write
    std::vector<Expected> expected{};  // and how their results look
  };
  struct View {
    uint32_t base, out;
    at::ScalarType dtype;
    uint8_t marks;
    std::vector<int64_t> sizes, strides;
    int64_t offset;
    Reach reach;
  };
  struct Collective {
    uint32_t kind;
    int32_t reduce;
    c10::intrusive_ptr<c10d::ProcessGroup> group;
    uint32_t root, input, output;
    std::vector<int64_t> sizes, input_splits, output_splits;
    c10::intrusive_ptr<c10d::Backend> backend;  // found at the first run
    std::vector<at::Tensor> tensors;            // what the backend takes a list of
  };

  // Makes `op` write its results where they lie, through another overload. This
  // version of torch may lack it: then the results are copied.
  void write_into(Prepared& op, const char* name, const char* overload) {
    op.copies = true;
    auto handle = c10::Dispatcher::singleton().findSchema({name, overload});
    if (!handle) return;
    const auto& own = op.handle.schema().arguments();
    const auto& formals = handle->schema().arguments();
    if (formals.size() != own.size() + op.outs.size()) return;
    for (size_t i = 0; i < own.size(); ++i)
      if (formals[i].name() != own[i].name() || *formals[i].type() != *own[i].type()) return;
    for (size_t i = own.size(); i < formals.size(); ++i)
      if (!formals[i].is_out()) return;
    for (size_t i = 0; i < op.outs.size(); ++i) {
      op.tensors.push_back({static_cast<uint32_t>(own.size() + i), slot(op.outs[i])});
      op.constants.emplace_back();
    }
    op.handle = *handle;
    op.outs.clear();
    op.copies = false;
  }

  // Direct calls for an op, if there are some for its kind. Tensors are read from
  // the slots, so only a list must be of fixed ones, and what an iterator goes over.
  void make_calls(size_t index, const std::vector<bool>& fixed) {
    const Prepared& op = ops_[index];
    auto from = direct_arguments(op, fixed);
    if (!from) return;
    direct_[index] = direct_call(kinds_of(op.handle.schema()), *from);
    auto is_fixed = [&](const auto& tensor) { return fixed[tensor.second]; };
    if (from->result || !direct_[index] || !std::all_of(op.tensors.begin(), op.tensors.end(), is_fixed)) return;
    element_wise_[index] = element_wise(*from);
    if (element_wise_[index] && !keep_own_kernel(op.handle)) element_wise_[index].reset();
  }

  // False if the op has another kernel than PyTorch's own.
  bool keep_own_kernel(const c10::OperatorHandle& op) {
    for (const OwnKernel& own : own_kernels_)
      if (own.is_of(op)) return true;
    auto own = OwnKernel::of(op);
    if (own) own_kernels_.push_back(std::move(*own));
    return own.has_value();
  }

  std::optional<DirectArguments> direct_arguments(const Prepared& op, const std::vector<bool>& fixed) {
    if (op.copies || op.starts || op.waits || !op.own) return std::nullopt;
    const c10::FunctionSchema& schema = op.handle.schema();
    std::string kinds = kinds_of(schema);
    DirectArguments from{op.handle, std::vector<const at::Tensor*>(kinds.size()), op.constants, {}, nullptr};
    for (const auto& [position, value] : op.tensors) from.tensors[position] = &slots_[value];
    for (const TensorList& list : op.lists) {
      if (list.position != 0) return std::nullopt;
      for (int64_t value : list.slots) {
        if (value < 0 || !fixed[value]) return std::nullopt;
        from.list.push_back(slots_[value]);
      }
    }
    for (uint32_t i = 0; i < kinds.size(); ++i)
      if ((kinds[i] == 't' || kinds[i] == 'T') && !from.tensors[i]) {
        if (!op.constants[i].isTensor()) return std::nullopt;  // an absent optional tensor
        from.tensors[i] = &op.constants[i].toTensor();    // a wrapped number
      }
    for (size_t i = 0; i < op.outs.size(); ++i) {
      // Nothing is kept of what is an argument, in its slot, or not used.
      bool written = schema.returns().size() > i && schema.returns()[i].alias_info() &&
                     schema.returns()[i].alias_info()->isWrite();
      if (written) {
        auto is_result = [&](const auto& tensor) { return tensor.second == op.outs[i]; };
        if (op.outs[i] >= 0 && std::none_of(op.tensors.begin(), op.tensors.end(), is_result)) return std::nullopt;
      } else {
        if (op.outs.size() != 1 || op.outs[0] < 0) return std::nullopt;
        from.result = &slots_[op.outs[0]];
      }
    }
    return from;
  }

  // Makes a copy of the first argument a copy to where the result lies.
  void copy_into(Prepared& op) {
    TORCH_CHECK(op.outs.size() == 1 && !op.tensors.empty() && op.tensors[0].first == 0, "a copy of one tensor");
    op.handle = c10::Dispatcher::singleton().findSchemaOrThrow("aten::copy_", "");
    op.tensors = {{0, slot(op.outs[0])}, {1, op.tensors[0].second}};
    op.constants.clear();
    op.constants.resize(2);
    op.constants.emplace_back(false);
    op.outs.clear();
  }

  // Keeps the handle that an op of a process group has left on the stack. Its slot gets an empty tensor.
  void take_handle(uint32_t value) {
    works_[value] = work_of(stack_);
    pending_.push_back(value);
    slots_[value] = at::empty({0}, at::kByte);
  }

  // Calls an op of another library. Fails if it does to a tensor what no recorded op does.
  void run_of_others(const Prepared& op) {
    struct Look {
      at::Tensor tensor;
      c10::Storage storage;
      std::vector<int64_t> sizes, strides;
      int64_t offset;
    };
    std::vector<Look> before;
    auto look = [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.has_storage())
        before.push_back({tensor, tensor.storage(), tensor.sizes().vec(), tensor.strides().vec(), tensor.storage_offset()});
    };
    for (uint32_t position : op.written) {
      const c10::IValue& argument = stack_[position];
      if (argument.isTensor()) look(argument.toTensor());
      if (argument.isTensorList()) for (const at::Tensor& tensor : argument.toTensorVector()) look(tensor);
    }
    op.handle.callBoxed(&stack_);
    for (const Look& look : before) {
      const at::Tensor& now = look.tensor;
      if (now.storage().is_alias_of(look.storage) && now.sizes() == look.sizes && now.strides() == look.strides &&
          now.storage_offset() == look.offset)
        continue;
      differs_ = true;
      TORCH_CHECK(false, "the op ", op.handle.schema().name(), " has changed the shape, strides or memory of an argument "
                  "in place, which it did not when the step was recorded: a replay cannot go on with it, and the next "
                  "calls are recorded anew. Leave the op out of the step");
    }
    check_results(op);
  }

  // Fails unless what an op has left on the stack looks as the plan says.
  void check_results(const Prepared& op) {
    if (op.expected.empty()) return;
    std::vector<at::Tensor> results;
    for (const c10::IValue& result : stack_) {
      if (result.isTensor()) results.push_back(result.toTensor());
      if (result.isTensorList()) results = result.toTensorVector();
    }
    if (stack_.size() == 1 && stack_[0].isTensorList() && results.size() != op.outs.size()) {
      differs_ = true;
      TORCH_CHECK(false, "the op ", op.handle.schema().name(), " has made ", results.size(), " tensors, and ", op.outs.size(),
                  " when the step was recorded: a replay cannot go on with it, and the next calls are recorded anew. Let "
                  "the op make the same number at every call, or leave it out of the step");
    }
    for (const Expected& expected : op.expected) {
      const at::Tensor found = expected.result < results.size() ? results[expected.result] : at::Tensor();
      if (expected.is(found)) continue;
      differs_ = true;
      TORCH_CHECK(false, "the op ", op.handle.schema().name(), " has made ", in_words(found), ", and ",
                  in_words(expected.dtype, expected.device, expected.sizes, expected.strides),
                  " when the step was recorded: a replay cannot go on with it, and the next calls are recorded anew. Let "
                  "the op give its results the same shape, dtype and strides at every call, or leave it out of the step");
    }
  }

  static std::string in_words(const at::Tensor& tensor) {
    if (!tensor.defined()) return "no tensor";
    if (tensor.layout() != at::kStrided) return "a tensor without strides";
    return in_words(tensor.scalar_type(), tensor.device(), tensor.sizes(), tensor.strides());
  }

  static std::string in_words(at::ScalarType dtype, c10::Device device, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    return c10::str("a tensor ", sizes, " of ", dtype, " on ", device, " with strides ", strides);
  }

  // Puts what an op has left on the stack into the slots of its results.
  void take_results(const Prepared& op) {
    if (op.outs.empty()) return;
    if (op.copies) {
      for (size_t i = 0; i < op.outs.size() && i < stack_.size(); ++i) slots_[op.outs[i]].copy_(stack_[i].toTensor());
      return;
    }
    if (stack_.size() == 1 && stack_[0].isTensorList()) {
      auto results = stack_[0].toTensorVector();
      TORCH_CHECK(results.size() == op.outs.size(), "operator ", op.handle.schema().name(), " returned ",
                  results.size(), " tensors, the plan has ", op.outs.size());
      for (size_t i = 0; i < results.size(); ++i)
        if (op.outs[i] >= 0) slots_[op.outs[i]] = std::move(results[i]);
    } else {
      for (size_t i = 0; i < op.outs.size() && i < stack_.size(); ++i)
        if (op.outs[i] >= 0) slots_[op.outs[i]] = std::move(stack_[i]).toTensor();
    }
  }

  // A tensor with the elements of `input`, in the place of `output` if it has one.
  static void same_as(at::Tensor& output, const at::Tensor& input) {
    if (output.defined()) {
      output.copy_(input);
    } else {
      output = input.clone(at::MemoryFormat::Contiguous);
    }
  }

  uint32_t slot(int64_t value) const {
    TORCH_CHECK(value >= 0 && value < static_cast<int64_t>(slots_.size()), "value ", value, " is out of range");
    return static_cast<uint32_t>(value);
  }

  static bool optional_elements(const c10::Argument& formal) {
    c10::TypePtr type = formal.type();
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    auto list = type->cast<c10::ListType>();
    return list && list->getElementType()->kind() == c10::TypeKind::OptionalType;
  }

  c10::IValue build(const TensorList& list) const {
    if (list.optional) {
      c10::List<std::optional<at::Tensor>> out;
      out.reserve(list.slots.size());
      for (int64_t value : list.slots)
        out.push_back(value < 0 ? std::optional<at::Tensor>() : std::optional<at::Tensor>(slots_[value]));
      return out;
    }
    c10::List<at::Tensor> out;
    out.reserve(list.slots.size());
    for (int64_t value : list.slots) out.push_back(value < 0 ? at::Tensor() : slots_[value]);
    if (!list.nested) return out;
    c10::List<c10::List<at::Tensor>> lists;
    if (!out.empty()) lists.push_back(std::move(out));
    return lists;
  }

  static c10::IValue constant(const Arg& arg, c10::TypePtr type) {
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    switch (arg.tag) {
      case kNone: return c10::IValue();
      case kBool: return arg.i != 0;
      case kDtype:
        TORCH_CHECK(arg.i >= 0 && arg.i < static_cast<int64_t>(at::ScalarType::NumOptions), "no element type: ", arg.i);
        return arg.i;
      case kInt:
      case kLayout:
      case kMemoryFormat: return arg.i;
      case kFloat: return arg.f;
      case kComplex: return c10::complex<double>(arg.c[0], arg.c[1]);
      case kStr:
        if (type->kind() == c10::TypeKind::ClassType) return process_group_object(arg.s, *type);
        return std::string(arg.s);
      case kDevice:
        TORCH_CHECK((arg.i >> 8) < static_cast<int64_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES), "no device: ", arg.i >> 8);
        return c10::Device(static_cast<c10::DeviceType>(arg.i >> 8), static_cast<int8_t>(arg.i & 0xff));
      case kWrapped: return wrapped(number(arg.list[0]));
      case kInts: return c10::List<int64_t>(c10::IntArrayRef(arg.ints, arg.len));
      case kList: {
        auto list = type->cast<c10::ListType>();
        TORCH_CHECK(list, "a list where the schema has ", type->str());
        c10::TypePtr element = list->getElementType();
        if (element->kind() == c10::TypeKind::FloatType) {
          c10::List<double> out;
          for (uint32_t i = 0; i < arg.len; ++i) out.push_back(number(arg.list[i]).toDouble());
          return out;
        }
        if (element->kind() == c10::TypeKind::BoolType) {
          c10::List<bool> out;
          for (uint32_t i = 0; i < arg.len; ++i) out.push_back(number(arg.list[i]).toBool());
          return out;
        }
        c10::impl::GenericList out(element);
        for (uint32_t i = 0; i < arg.len; ++i) out.push_back(constant(arg.list[i], element));
        return out;
      }
      default: TORCH_CHECK(false, "argument of kind ", static_cast<int>(arg.tag), " cannot be bound");
    }
  }

  // The op of a collective in eager.
  static const char* name_of(const Collective& c) {
    bool in_place = c.input == c.output;
    switch (c.kind) {
      case 0: return in_place ? "_c10d_functional::all_reduce_" : "_c10d_functional::all_reduce";
      case 1: return "_c10d_functional::all_gather_into_tensor";
      case 2: return "_c10d_functional::reduce_scatter_tensor";
      case 3: return "_c10d_functional::all_to_all_single";
      case 4: return in_place ? "_c10d_functional::broadcast_" : "_c10d_functional::broadcast";
      default: return "_c10d_functional::?";
    }
  }

  static c10d::ReduceOp reduce_op(int32_t reduce) {
    switch (reduce) {
      case 0: return c10d::ReduceOp::SUM;
      case 1: return c10d::ReduceOp::AVG;
      case 2: return c10d::ReduceOp::MAX;
      case 3: return c10d::ReduceOp::MIN;
      case 4: return c10d::ReduceOp::PRODUCT;
      default: TORCH_CHECK(false, "unknown reduction ", reduce);
    }
  }

  at::Tensor arena_;
  std::vector<at::Tensor> slots_;
  std::vector<c10::intrusive_ptr<c10d::Work>> works_;
  std::vector<uint32_t> pending_;  // started and not known to be waited for
  bool lost_ = false;
  bool differs_ = false;
  std::vector<at::Tensor> rng_;
  std::vector<std::pair<at::Generator, at::Tensor>> generators_;  // with their states before the run
  std::vector<Prepared> ops_;
  std::vector<std::unique_ptr<Direct>> direct_;  // of each op, if it is called so
  std::vector<std::unique_ptr<ElementWise>> element_wise_;  // of each op, if its iterator stays
  std::vector<OwnKernel> own_kernels_;                      // of the ops of these
  bool past_dispatcher_ = false;                            // whether they are called so, in a run
  std::vector<uint8_t> grads_;                   // of each op, whether gradients are enabled
  bool grad_ = false;                            // whether they are now, in a run
  std::vector<View> views_;
  std::vector<Collective> collectives_;
  std::vector<c10::IValue> stack_;
};

// Deletes a program, but not while a collective may use its memory.
inline void give_back(Program* program) {
  static std::vector<Program*> kept;  // with the GIL held
  if (program) kept.push_back(program);
  auto over = std::partition(kept.begin(), kept.end(), [](Program* each) { return each->lost() || !each->ended(); });
  std::vector<Program*> ended(over, kept.end());
  kept.erase(over, kept.end());
  for (Program* each : ended) delete each;
}

}  // namespace rote
