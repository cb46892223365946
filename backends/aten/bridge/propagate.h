// Answers what DTensor asks its own sharding propagation, from Rust: an `OpSchema` in, an `OutputSharding` out
// (`torch/distributed/tensor/_sharding_prop.py`).
#pragma once
#include <bitset>
#include <chrono>
#include <map>
#include <mutex>
#include <thread>

#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include "placements.h"

namespace rote {

// A mesh that questions are about.
struct AskedMesh {
  py::object mesh;
  void* propagator = nullptr;  // null: this process is not part of the mesh
  std::vector<int64_t> sizes;
  // A spec of each placements that have come up, without meta.
  std::map<std::string, py::object> specs;

  size_t dims() const { return sizes.size(); }
};

// An op that questions are about.
struct AskedOp {
  struct Formal {
    py::object name;
    bool of_tensors;  // a list of tensors, if it is a list
    bool written;
    int32_t output;   // if it is written: the result that it is returned as, or -1
  };
  enum class Returns { kNothing, kTensor, kTuple, kList };

  std::string name;  // `aten::sum.dim_IntList`
  std::vector<Formal> formals;
  Returns returns = Returns::kNothing;
  size_t return_count = 0;
  int shape_arg = -1;         // DTensor's table says: this argument is the shape of the result
  bool other_change = false;  // DTensor's tables say: a rank's arguments differ in another way
  bool decomposed = false;    // no rule of Rote's, but strategies by PyTorch's decomposition
  bool gives_views = false;   // of what it takes
  bool is_product = false;    // linear in each tensor, which is how DTensor's strategies for it say it
  bool handled = false;       // by code of DTensor's own, which expects certain placements
  bool is_lazy = false;       // its result is conjugated or negated where it is read
  bool seems_in_place = false;  // by the end of its name, by which DTensor tells; it writes nothing (`__lshift__`)
  py::object registered;      // what is registered for the op with DTensor, as a tuple
  bool is_torchs = true;      // all of it comes with PyTorch
  std::bitset<128> agreed;    // which answers are DTensor's own (`kind_of_answer`)
};

// What of an answer decides whether it is DTensor's own: 128 kinds, each a bit of `AskedOp::agreed`. `uneven`: ranks
// have different numbers of elements of a dim. `other_partials`: a tensor is partial by another reduction than a sum.
// `chunks`: a tensor that ranks hold whole is split, which costs nothing. `split_twice`: several mesh dims split one dim
// of a tensor.
inline uint32_t kind_of_answer(bool moves, bool strided, bool several_dims, bool uneven, bool other_partials, bool chunks,
                               bool split_twice) {
  return moves | strided << 1 | several_dims << 2 | uneven << 3 | other_partials << 4 | chunks << 5 | split_twice << 6;
}
// The kind of answers that may differ from DTensor's whatever was compared: they move tensors where moving others costs
// about the same, or in several steps; they keep a partial of some tensors only, and are no products; a list of dims is
// empty; a view is of strides that decide nothing, or joins or takes apart dims that several mesh dims split; partial sums
// move beside a tensor of integers, or become complex; a rank has no elements.
constexpr uint32_t kNeverAgreed = 128;

class Answers {
 public:
  // `ask` is the address of `rote_propagate`, `error` that of `rote_last_error`. `propagator` and
  // `handlers` (of ops that DTensor runs in ways of its own) are DTensor's.
  // `mesh_propagator` makes the propagator of a mesh: its address, or 0. `registered` says what is registered for an
  // op with DTensor, and whether it comes with PyTorch. `agreement` has the kinds of answers that are DTensor's own by
  // the name of the op; None: every answer is taken. `own_rules` has the ops for which the script has registered a rule
  // with Rote. `state` says what the script's rule for a schema is, whether registered with Rote or with DTensor: its
  // strategies, a list of tuples of placements; the metas of the results, a list; and these as the op returns them. Or it
  // says why there is none, as text. `decompositions` says the same of ops without a rule that PyTorch decomposes
  // (`Decompositions` of `_decomposed.py`); None: such ops are handed on.
  Answers(uintptr_t ask, uintptr_t error, const py::dict& named, py::object propagator, py::object handlers,
          py::object mesh_propagator, py::object registered, py::object agreement, py::dict own_rules, py::object state,
          py::object decompositions)
      : ask_(reinterpret_cast<int (*)(void*, const Question*, Answer*)>(ask)),
        error_(reinterpret_cast<const char* (*)()>(error)),
        classes_(named),
        propagator_(std::move(propagator)),
        handlers_(std::move(handlers)),
        mesh_propagator_(std::move(mesh_propagator)),
        registered_(std::move(registered)),
        agreement_(std::move(agreement)),
        own_rules_(std::move(own_rules)),
        state_(std::move(state)),
        decompositions_(std::move(decompositions)) {}

  // The `OutputSharding` for a schema; None if PyTorch has to answer.
  py::object answer(const py::object& schema) {
    const Turn turn(*this);
    const auto start = std::chrono::steady_clock::now();
    py::object found = py::none();
    AskedOp* op = nullptr;
    try {
      if (closed_) throw HandedOn{"Rote is uninstalled"};
      if (turn.is_inner) throw HandedOn{"a question within another one"};
      const py::object op_object = attribute(schema, names().op);
      op = &know(op_object);
      found = try_to_answer(schema, op_object, *op);
      ++answered_;
    } catch (const HandedOn& handed_on) {
      ++handed_on_[{op ? op->name : "?", handed_on.reason}];
    } catch (py::error_already_set& error) {
      if (!error.matches(PyExc_Exception)) throw;  // an interrupt, or the end of the process
      ++handed_on_[{op ? op->name : "?", std::string("an error: ") + error.what()}];
    }
    nanoseconds_ += std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - start).count();
    return found;
  }

  // Whether this thread is in the middle of a question: a rule of the script's own runs.
  bool is_asking() const { return asking_ == std::this_thread::get_id(); }

  // Answers nothing from now on, and lets go of what it was made with: the propagators of the meshes may go.
  void close() {
    const Turn turn(*this);
    closed_ = true;
    meshes_.clear();
    mesh_propagator_ = registered_ = state_ = decompositions_ = py::none();
  }

  // The kind of the last answer; `kNeverAgreed` if none such is DTensor's own for sure.
  uint32_t kind() const { return kind_; }

  // How many questions were answered, the nanoseconds that all took, for how many answers PyTorch gave the strides by op,
  // how many were answered by PyTorch's decomposition by op, and how many were handed on by op and reason.
  py::tuple stats() const {
    py::dict strides, decomposed, handed_on;
    for (const auto& [op, count] : decomposed_) decomposed[py::str(op)] = count;
    for (const auto& [op, count] : strides_asked_) strides[py::str(op)] = count;
    for (const auto& [key, count] : handed_on_) handed_on[py::make_tuple(key.first, key.second)] = count;
    return py::make_tuple(answered_, nanoseconds_, strides, decomposed, handed_on);
  }

 private:
  // The turn of a thread: one question is answered at a time, also while Python runs for it, which lets other threads run.
  struct Turn {
    explicit Turn(Answers& of) : of(of), is_inner(of.is_asking()) {
      if (is_inner) return;
      if (!of.turns_.try_lock()) {
        py::gil_scoped_release released;
        of.turns_.lock();
      }
      of.asking_ = std::this_thread::get_id();
    }
    ~Turn() {
      if (is_inner) return;
      of.asking_ = {};
      of.turns_.unlock();
    }
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;

    Answers& of;
    const bool is_inner;  // the thread is in the middle of another question
  };

  // One question as it is read, and what it points at. It is filled anew for each question.
  struct Asked {
    std::vector<Arg> args;
    std::vector<Spec> tensors;
    std::vector<py::object> specs;  // DTensor's, one for each of the tensors
    std::deque<std::vector<int64_t>> ints;
    std::deque<std::vector<Arg>> lists;
    std::deque<std::vector<Placement>> placements;
    std::deque<std::string> text;
    std::vector<Written> written;
    AskedMesh* mesh = nullptr;
    bool strided = false;             // a tensor lies in strided shards
    bool strided_as_order = false;    // which mean an order of shards

    void clear() { *this = Asked(); }
  };

  AskedOp& know(const py::object& op) {
    auto it = ops_.find(op.ptr());
    if (it == ops_.end()) it = ops_.emplace(op.ptr(), known(op)).first;
    return it->second;
  }

  AskedOp known(const py::object& op) {
    op.inc_ref();  // op overloads live as long as the process
    AskedOp known;
    const py::object schema_object = op.attr("_schema");
    const auto& schema = schema_object.cast<const c10::FunctionSchema&>();
    known.name = schema.name();
    if (!schema.overload_name().empty()) known.name += "." + schema.overload_name();
    for (const c10::Argument& formal : schema.arguments()) {
      const auto list = formal.type()->cast<c10::ListType>();
      const bool of_tensors = list && list->getElementType()->isSubtypeOf(*c10::OptionalType::ofTensor());
      const auto* alias = formal.alias_info();
      const bool written = alias && alias->isWrite();
      known.formals.push_back({py::reinterpret_steal<py::object>(PyUnicode_InternFromString(formal.name().c_str())),
                               of_tensors, written, written ? returned_as(schema, *alias) : -1});
    }
    known.return_count = schema.returns().size();
    if (known.return_count > 0) {
      const auto kind = schema.returns()[0].type()->kind();
      using Returns = AskedOp::Returns;
      if (kind == c10::TypeKind::TensorType) known.returns = known.return_count > 1 ? Returns::kTuple : Returns::kTensor;
      if (kind == c10::TypeKind::ListType && known.return_count == 1) known.returns = Returns::kList;
    }
    const py::object shapes = attribute(propagator_, names().op_to_shape_and_stride_idx);
    if (PyObject* at = PyDict_GetItem(shapes.ptr(), op.ptr())) {
      if (PyLong_Check(at)) known.shape_arg = static_cast<int>(PyLong_AsLong(at));
      else known.other_change = true;
    }
    for (const char* table : {"op_to_scalar_shape_adjuster", "squeeze_op_to_dims_variant"}) {
      py::object found = py::getattr(propagator_, table, py::none());  // not in every version
      if (PyDict_Check(found.ptr()) && PyDict_Contains(found.ptr(), op.ptr()) == 1) known.other_change = true;
    }
    for (const c10::Argument& result : schema.returns()) {
      const auto* alias = result.alias_info();
      known.gives_views |= alias && !alias->isWrite();
    }
    known.decomposed = !decompositions_.is_none() && decompositions_.attr("has")(op).cast<bool>();
    known.is_product = known.name == "aten::mul.Tensor" || known.name == "aten::mm" || known.name == "aten::bmm";
    known.handled = PyDict_Contains(handlers_.ptr(), op.ptr()) == 1;
    known.is_lazy = known.name == "aten::_conj" || known.name == "aten::_neg_view";
    const auto& formals = schema.arguments();
    // Without handlers, no dispatcher of DTensor's runs the op.
    known.seems_in_place = PyDict_GET_SIZE(handlers_.ptr()) > 0 && schema.name().back() == '_' && std::none_of(formals.begin(), formals.end(), [](const auto& formal) {
      return formal.alias_info() && formal.alias_info()->isWrite();
    });
    if (!agreement_.is_none()) {
      if (PyObject* bits = PyDict_GetItemString(agreement_.ptr(), known.name.c_str())) {
        const py::int_ low = py::reinterpret_borrow<py::int_>(bits), high = low >> py::int_(64);
        known.agreed = PyLong_AsUnsignedLongLongMask(high.ptr());
        known.agreed = known.agreed << 64 | std::bitset<128>(PyLong_AsUnsignedLongLongMask(low.ptr()));
      }
    }
    return known;
  }

  // The result that a written argument is returned as; -1 if it is not returned.
  static int32_t returned_as(const c10::FunctionSchema& schema, const c10::AliasInfo& written) {
    for (size_t i = 0; i < schema.returns().size(); ++i) {
      const auto* alias = schema.returns()[i].alias_info();
      if (alias && alias->beforeSets() == written.beforeSets()) return static_cast<int32_t>(i);
    }
    return -1;
  }

  // Notes the tensors from `first` on as written, if the op writes the argument that they are.
  void note_written(const AskedOp& op, const AskedOp::Formal& formal, size_t first) {
    if (!formal.written) return;
    for (size_t i = first; i < asked_.tensors.size(); ++i) {
      const bool one_of_list = op.returns == AskedOp::Returns::kList && formal.output >= 0;
      const int32_t output = one_of_list ? static_cast<int32_t>(i - first) : formal.output;
      asked_.written.push_back({static_cast<uint32_t>(i), output});
    }
  }

  // What a rule of the script's own says.
  struct Stated {
    std::vector<Placement> strategies;
    std::vector<Spec> outputs;
    py::object metas;  // of the results, as the op returns them
    StatedRule rule{};
  };

  // What `state` says of a schema.
  void state(const py::object& state, const py::object& schema, Stated& stated) {
    const py::object said = state(schema);
    if (PyUnicode_Check(said.ptr())) throw HandedOn{said.cast<std::string>()};
    const py::tuple parts = said.cast<py::tuple>();
    const py::list strategies = parts[0].cast<py::list>();
    const py::list metas = parts[1].cast<py::list>();
    stated.metas = parts[2];
    for (const py::handle& strategy : strategies) {
      if (py::len(strategy) != metas.size() + asked_.tensors.size()) throw HandedOn{"a strategy of another length"};
      for (const py::handle& slot : strategy) stated.strategies.push_back(read_slot(slot.ptr(), classes_));
    }
    for (const py::handle& meta : metas) {
      Spec& output = stated.outputs.emplace_back();
      if (meta.is_none()) continue;
      output.shape = read_ints(PyTuple_GET_ITEM(meta.ptr(), 0)).data();
      output.ndim = static_cast<uint32_t>(asked_.ints.back().size());
      output.dtype = static_cast<uint8_t>(reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(meta.ptr(), 2))->scalar_type);
    }
    stated.rule.strategies = stated.strategies.data();
    stated.rule.nstrategies = static_cast<uint32_t>(strategies.size());
    stated.rule.outputs = stated.outputs.data();
    stated.rule.noutputs = static_cast<uint32_t>(stated.outputs.size());
    stated.rule.written = asked_.written.data();
    stated.rule.nwritten = static_cast<uint32_t>(asked_.written.size());
  }

  // Whether what is registered for an op with DTensor comes with PyTorch. A script may register anew at any time.
  bool is_torchs(AskedOp& known, const py::object& op) {
    static constexpr const char* kTables[] = {"op_single_dim_strategy_funcs", "op_strategy_funcs", "op_to_rules"};
    bool same = static_cast<bool>(known.registered);
    for (size_t i = 0; i < std::size(kTables); ++i) {
      if (!tables_[i]) tables_[i] = propagator_.attr(kTables[i]);
      PyObject* now = PyDict_GetItem(tables_[i].ptr(), op.ptr());
      same = same && (now ? now : Py_None) == PyTuple_GET_ITEM(known.registered.ptr(), i);
    }
    if (!same) {
      py::tuple found = registered_(op);
      known.registered = found[0];
      known.is_torchs = found[1].cast<bool>();
    }
    return known.is_torchs;
  }

  AskedMesh& mesh_of(const py::object& mesh) {
    auto it = meshes_.find(mesh.ptr());
    if (it == meshes_.end()) {
      AskedMesh made;
      made.mesh = mesh;
      made.sizes = attribute(mesh, names().shape).cast<std::vector<int64_t>>();
      made.propagator = reinterpret_cast<void*>(mesh_propagator_(mesh).cast<uintptr_t>());
      it = meshes_.emplace(mesh.ptr(), std::move(made)).first;
    }
    return it->second;
  }

  // Reads a tensor among the arguments. Returns its place.
  int64_t read_tensor(const py::object& spec) {
    AskedMesh& mesh = mesh_of(attribute(spec, names().mesh));
    if (!asked_.mesh) asked_.mesh = &mesh;
    if (asked_.mesh != &mesh && PyObject_RichCompareBool(asked_.mesh->mesh.ptr(), mesh.mesh.ptr(), Py_EQ) != 1)
      throw HandedOn{"tensors on different meshes"};
    const py::object placements = attribute(spec, names().placements);
    const py::object meta = attribute(spec, names().tensor_meta);
    if (!PyTuple_Check(placements.ptr()) || !PyTuple_Check(meta.ptr())) throw HandedOn{"a tensor without meta"};
    std::vector<Placement>& read = asked_.placements.emplace_back();
    bool strided = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(placements.ptr()); ++i) {
      read.push_back(read_placement(PyTuple_GET_ITEM(placements.ptr(), i), classes_));
      strided |= read.back().kind == kStridedShard;
    }
    if (read.size() != asked_.mesh->dims()) throw HandedOn{"placements of another number than mesh dims"};
    check_order(spec, strided, read);
    Spec tensor{};
    tensor.shape = read_ints(PyTuple_GET_ITEM(meta.ptr(), 0)).data();
    tensor.strides = read_ints(PyTuple_GET_ITEM(meta.ptr(), 1)).data();
    tensor.ndim = static_cast<uint32_t>(asked_.ints.back().size());
    tensor.placements = read.data();
    PyObject* dtype = PyTuple_GET_ITEM(meta.ptr(), 2);
    if (!THPDtype_Check(dtype)) throw HandedOn{"a tensor without dtype"};
    tensor.dtype = static_cast<uint8_t>(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
    asked_.tensors.push_back(tensor);
    asked_.specs.push_back(spec);
    return static_cast<int64_t>(asked_.tensors.size()) - 1;
  }

  // Rote knows one order of the mesh dims that split a tensor dim, from left to right, and strided shards.
  void check_order(const py::object& spec, bool strided, const std::vector<Placement>& read) {
    const bool as_order = attribute(spec, names().use_strided_shard_as_shard_order).ptr() == Py_True;
    asked_.strided |= strided;
    asked_.strided_as_order |= strided && as_order;
    if (as_order) return;
    const py::object usual = attribute(spec_without_meta(read.data(), false), names().shard_order);
    const py::object order = attribute(spec, names().shard_order);
    const int same = PyObject_RichCompareBool(order.ptr(), usual.ptr(), Py_EQ);
    if (same < 0) throw py::error_already_set();
    if (!same) throw HandedOn{"shards in an order of their own"};
  }

  std::vector<int64_t>& read_ints(PyObject* numbers) {
    std::vector<int64_t>& read = asked_.ints.emplace_back();
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(numbers);
    read.reserve(n + 1);  // so that the list of no numbers has an address, too
    for (Py_ssize_t i = 0; i < n; ++i) {
      PyObject* item = PySequence_Fast_GET_ITEM(numbers, i);
      if (!PyLong_Check(item)) throw HandedOn{"a size that is no number"};
      read.push_back(PyLong_AsLongLong(item));
      if (read.back() == -1 && PyErr_Occurred()) throw py::error_already_set();
    }
    return read;
  }

  Arg read(PyObject* object, bool of_tensors = false) {
    Arg arg{};
    if (object == Py_None) return arg;
    if (is_a(object, classes_.spec)) {
      arg.tag = kValue;
      arg.i = read_tensor(py::reinterpret_borrow<py::object>(object));
    } else if (PyBool_Check(object)) {
      arg.tag = kBool;
      arg.i = object == Py_True;
    } else if (PyLong_Check(object)) {
      arg.tag = kInt;
      arg.i = PyLong_AsLongLong(object);
      if (arg.i == -1 && PyErr_Occurred()) throw py::error_already_set();
    } else if (PyFloat_Check(object)) {
      arg.tag = kFloat;
      arg.f = PyFloat_AS_DOUBLE(object);
    } else if (PyUnicode_Check(object)) {
      arg.tag = kStr;
      asked_.text.push_back(py::handle(object).cast<std::string>());
      arg.s = asked_.text.back().c_str();
    } else if (THPDtype_Check(object)) {
      arg.tag = kDtype;
      arg.i = static_cast<int64_t>(reinterpret_cast<THPDtype*>(object)->scalar_type);
    } else if (THPMemoryFormat_Check(object)) {
      arg.tag = kMemoryFormat;
      arg.i = static_cast<int64_t>(reinterpret_cast<THPMemoryFormat*>(object)->memory_format);
    } else if (THPLayout_Check(object)) {
      arg.tag = kLayout;
      arg.i = static_cast<int64_t>(reinterpret_cast<THPLayout*>(object)->layout);
    } else if (THPDevice_Check(object)) {
      arg.tag = kDevice;
    } else if (PyList_Check(object) || PyTuple_Check(object)) {
      return read_list(object, of_tensors);
    } else {
      throw HandedOn{std::string("an argument of class ") + Py_TYPE(object)->tp_name};
    }
    return arg;
  }

  Arg read_list(PyObject* list, bool of_tensors) {
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(list);
    PyObject** items = PySequence_Fast_ITEMS(list);
    Arg arg{};
    arg.len = static_cast<uint32_t>(n);
    if (of_tensors || std::any_of(items, items + n, [this](PyObject* item) { return is_a(item, classes_.spec); })) {
      std::vector<int64_t> places;
      for (Py_ssize_t i = 0; i < n; ++i) {
        if (items[i] != Py_None && !is_a(items[i], classes_.spec)) throw HandedOn{"a list of tensors and other things"};
        places.push_back(items[i] == Py_None ? -1 : read_tensor(py::reinterpret_borrow<py::object>(items[i])));
      }
      arg.tag = kValues;
      places.reserve(n + 1);  // so that the list of no tensors has an address, too
      arg.ints = asked_.ints.emplace_back(std::move(places)).data();
      return arg;
    }
    if (std::all_of(items, items + n, [](PyObject* item) { return PyLong_CheckExact(item); })) {
      arg.tag = kInts;
      arg.ints = read_ints(list).data();
      return arg;
    }
    std::vector<Arg> read_items;
    for (Py_ssize_t i = 0; i < n; ++i) read_items.push_back(read(items[i]));
    arg.tag = kList;
    arg.list = asked_.lists.emplace_back(std::move(read_items)).data();
    return arg;
  }

  py::object try_to_answer(const py::object& schema, const py::object& op_object, AskedOp& op) {
    const py::object args = attribute(schema, names().args_schema);
    const py::object kwargs = attribute(schema, names().kwargs_schema);
    if (op.handled) throw HandedOn{"DTensor runs the op in a way of its own"};
    if (op.seems_in_place) throw HandedOn{"DTensor takes the op for one in place"};
    const bool is_own = PyDict_Contains(own_rules_.ptr(), op_object.ptr()) == 1;
    const bool is_scripts = !is_torchs(op, op_object) || is_own;
    const bool is_decomposed = op.decomposed && !is_scripts;
    const bool is_stated = is_scripts || is_decomposed;
    if (is_scripts && !is_own && !agreement_.is_none()) throw HandedOn{"a strategy of the script's own is registered"};
    if (op.other_change) throw HandedOn{"the arguments of the local op differ"};
    asked_.clear();
    const Py_ssize_t given = PyTuple_GET_SIZE(args.ptr());
    size_t by_position = 0;  // tensors among the positional arguments
    for (size_t i = 0; i < op.formals.size(); ++i) {
      PyObject* actual = static_cast<Py_ssize_t>(i) < given ? PyTuple_GET_ITEM(args.ptr(), i)
                                                            : PyDict_GetItem(kwargs.ptr(), op.formals[i].name.ptr());
      const size_t first = asked_.tensors.size();
      asked_.args.push_back(actual ? read(actual, op.formals[i].of_tensors) : Arg{});
      note_written(op, op.formals[i], first);
      if (static_cast<Py_ssize_t>(i) < given) by_position = asked_.tensors.size();
    }
    if (given > static_cast<Py_ssize_t>(op.formals.size())) throw HandedOn{"more arguments than the op has"};
    if (!asked_.mesh) throw HandedOn{"no distributed tensor"};
    if (!asked_.mesh->propagator) throw HandedOn{"this rank is not part of the mesh"};
    check_own_placements();
    // Collectives refuse such tensors.
    if (op.is_lazy && is_any_placement([](const Placement& one) { return one.kind == kPartial; })) throw HandedOn{"a partial that is conjugated where it is read"};
    // A view stays one: reducing the tensor would make a copy.
    if (agreement_.is_none() && op.gives_views && !is_stated && takes_other_partials()) throw HandedOn{"a partial that is no sum would pass"};

    Question question{};
    question.op = op.name.c_str();
    question.args = asked_.args.data();
    question.nargs = static_cast<uint32_t>(asked_.args.size());
    question.tensors = asked_.tensors.data();
    question.ntensors = static_cast<uint32_t>(asked_.tensors.size());
    // DTensor reduces most other partials, so that a script may write in place what follows; a partial it could not.
    question.sums_only = agreement_.is_none();
    Stated stated;
    if (is_stated) {
      state(is_decomposed ? decompositions_.attr("state") : state_, schema, stated);
      question.rule = &stated.rule;
    } else if (agreement_.is_none() && PyDict_Contains(classes_.passes.ptr(), op_object.ptr()) == 1) {
      state(classes_.state_passes, schema, stated);
      stated.rule.added = 1;
      question.rule = &stated.rule;
    }
    Answer answer{};
    const auto ask = [&] {
      if (ask_(asked_.mesh->propagator, &question, &answer) >= 0) return;
      const std::string reason = error_();
      if (reason.rfind("sharding ", 0) == 0) classes_.warn_own(reason);
      throw HandedOn{reason};
    };
    ask();
    if (is_decomposed && asked_.mesh->dims() > 1 && !decompositions_.attr("schema_holds")(schema, placements_of(answer)).cast<bool>()) {
      stated.rule.nstrategies = 0;  // replication is left
      ask();
    }
    if (!is_scripts && changes_shape_in_place(answer) && !is_known_to_dtensor(op)) throw HandedOn{"a tensor that changes its shape in place"};
    if (is_decomposed && op.gives_views && answer.moved > 0) throw HandedOn{"a view of a tensor that would have to be redistributed"};
    const bool has_shape = answer.shape_arg >= 0 && !is_decomposed;
    // Of a decomposed op, `local_args` says what a rank adjusts.
    if (!is_decomposed && (answer.other_args || (has_shape && answer.shape_arg != op.shape_arg)))
      throw HandedOn{"the arguments of the local op differ"};
    kind_ = may_differ(op, answer)
                ? kNeverAgreed
                : kind_of_answer(answer.moved > 0, asked_.strided, asked_.mesh->dims() > 1, is_uneven(answer),
                                 has_other_partials(), chunks(answer), splits_twice(answer));
    if (!is_stated && agreement_.is_none() && passes_other_partials(answer)) throw HandedOn{"a partial that is no sum would pass"};
    if (!is_stated && !agreement_.is_none() && (kind_ == kNeverAgreed || !op.agreed[kind_]))
      throw HandedOn{"Rote may choose otherwise than DTensor"};

    // All positional tensors as the op takes them.
    std::vector<py::object> taken = asked_.specs;
    bool moves = false;
    for (size_t i = 0; i < taken.size(); ++i) {
      const Placement* to = answer.inputs + i * asked_.mesh->dims();
      const Placement* from = asked_.tensors[i].placements;
      if (std::equal(to, to + asked_.mesh->dims(), from, same_placement)) continue;
      if (i >= by_position) throw HandedOn{"a keyword argument would have to be redistributed"};
      taken[i] = with_meta(spec_without_meta(to, asked_.strided_as_order), attribute(taken[i], names().tensor_meta));
      moves = true;
    }
    const py::object mask = mask_of(op, answer);
    if (mask) {
      taken[1] = with_meta(masked_spec(answer.inputs + asked_.mesh->dims(), answer.outputs[0].placements, mask),
                           attribute(taken[1], names().tensor_meta));
      moves = true;
    }
    py::object outputs = make_outputs(op, answer, schema, mask, is_stated ? &stated : nullptr);
    py::object suggestion = py::none();
    // The argument that is another on this rank, and what it is.
    Py_ssize_t local_at = -1;
    py::object local_arg;
    if (has_shape && answer.noutputs > 0 && is_sharded(answer.outputs[0])) {
      local_at = answer.shape_arg;
      local_arg = ints_of(answer.local_shape, answer.outputs[0].ndim);
    } else if (is_decomposed) {
      const py::object local = decompositions_.attr("local_args")(schema, placements_of(answer), stated.metas);
      if (!local.is_none()) std::tie(local_at, local_arg) = local.cast<std::pair<Py_ssize_t, py::object>>();
    }
    if (moves || local_arg) {
      size_t next = 0;
      py::tuple local_args(given);
      for (Py_ssize_t i = 0; i < given; ++i) {
        py::object arg = replaced(PyTuple_GET_ITEM(args.ptr(), i), taken, next);
        local_args[i] = i == local_at ? local_arg : arg;
      }
      if (local_at >= given) throw HandedOn{"the shape is a keyword argument"};
      suggestion = classes_.schema(op_object, local_args, kwargs);
    }
    if (is_decomposed) ++decomposed_[op.name];
    return classes_.output_sharding(outputs, suggestion, moves || local_arg, static_cast<bool>(local_arg));
  }

  // Placements of the script's own are for policy "best", and shards not beside strided ones, which may mean an order of
  // shards.
  void check_own_placements() const {
    const bool has_shards = is_any_placement([](const Placement& one) { return one.kind == kRegisteredShard; });
    if (!has_shards && !is_any_placement([](const Placement& one) { return one.kind == kRegisteredPartial; })) return;
    if (!agreement_.is_none()) throw HandedOn{"a placement of the script's own"};
    if (has_shards && asked_.strided) throw HandedOn{"a placement of the script's own beside a strided shard"};
  }

  // The placements of the results, then of the tensors that the op takes, a tuple each.
  py::list placements_of(const Answer& answer) const {
    const auto made = [this](const Placement* placements) {
      py::tuple all(asked_.mesh->dims());
      for (size_t m = 0; m < asked_.mesh->dims(); ++m) all[m] = make_placement(placements[m], classes_);
      return all;
    };
    py::list placements;
    for (size_t i = 0; i < answer.noutputs; ++i) placements.append(made(answer.outputs[i].placements));
    for (size_t i = 0; i < asked_.tensors.size(); ++i) placements.append(made(answer.inputs + i * asked_.mesh->dims()));
    return placements;
  }

  // Whether an answer may differ from DTensor's whatever was compared (`kNeverAgreed`).
  bool may_differ(const AskedOp& op, const Answer& answer) const {
    return (answer.moved > 0 && answer.tied) || moves_far(answer) || has_no_dims() ||
           (!op.is_product && mixes_partials(answer)) || (op.shape_arg >= 0 && (has_odd_strides() || splits_otherwise(answer))) ||
           moves_sums_beside_integers(answer) || has_complex_partials(answer) || is_empty_somewhere(answer);
  }

  // Whether the ranks that a dim is split over do not all have as many elements of it.
  bool is_uneven(const Spec& spec, const Placement* placements) const {
    for (uint32_t dim = 0; dim < spec.ndim; ++dim) {
      int64_t ranks = 1;
      for (size_t m = 0; m < asked_.mesh->dims(); ++m) {
        if (is_shard(placements[m]) && placements[m].dim == dim) ranks *= asked_.mesh->sizes[m];
      }
      if (spec.shape[dim] % ranks != 0) return true;
    }
    return false;
  }

  bool is_uneven(const Answer& answer) const {
    for (size_t i = 0; i < asked_.tensors.size(); ++i) {
      const Spec& tensor = asked_.tensors[i];
      if (is_uneven(tensor, tensor.placements) || is_uneven(tensor, answer.inputs + i * asked_.mesh->dims())) return true;
    }
    return std::any_of(answer.outputs, answer.outputs + answer.noutputs,
                       [this](const Spec& spec) { return is_uneven(spec, spec.placements); });
  }

  // Whether a tensor has no elements, or a rank none of a dim that is split: DTensor does not always see that.
  bool is_empty_somewhere(const Spec& spec, const Placement* placements) const {
    for (uint32_t dim = 0; dim < spec.ndim; ++dim) {
      int64_t least = spec.shape[dim];
      for (size_t m = 0; m < asked_.mesh->dims(); ++m) {
        if (!is_shard(placements[m]) || placements[m].dim != dim) continue;
        const int64_t ranks = asked_.mesh->sizes[m], most = (least + ranks - 1) / ranks;
        least -= most * (ranks - 1);
      }
      if (least <= 0) return true;
    }
    return false;
  }

  bool is_empty_somewhere(const Answer& answer) const {
    for (const Spec& tensor : asked_.tensors)
      if (is_empty_somewhere(tensor, tensor.placements)) return true;
    return std::any_of(answer.outputs, answer.outputs + answer.noutputs,
                       [this](const Spec& spec) { return is_empty_somewhere(spec, spec.placements); });
  }

  // Whether a tensor that is written has another shape after: DTensor changes what it knows of the tensor for its own ops only.
  bool changes_shape_in_place(const Answer& answer) const {
    return std::any_of(asked_.written.begin(), asked_.written.end(), [&](const Written& one) {
      if (one.output < 0 || static_cast<size_t>(one.output) >= answer.noutputs) return false;
      const Spec &before = asked_.tensors[one.tensor], &after = answer.outputs[one.output];
      return !std::equal(before.shape, before.shape + before.ndim, after.shape, after.shape + after.ndim);
    });
  }

  // Whether a rule for an op is registered with DTensor.
  static bool is_known_to_dtensor(const AskedOp& op) {
    const auto parts = py::reinterpret_borrow<py::tuple>(op.registered);
    return std::any_of(parts.begin(), parts.end(), [](const py::handle& part) { return !part.is_none(); });
  }

  // Whether a tensor moves in several steps. For one step, Rote and DTensor expect the same cost; DTensor goes further in
  // steps of another order than Rote's, which may cost more.
  bool moves_far(const Answer& answer) const {
    const size_t dims = asked_.mesh->dims();
    for (size_t i = 0; i < asked_.tensors.size(); ++i) {
      const Placement *from = asked_.tensors[i].placements, *to = answer.inputs + i * dims;
      size_t moved = 0;
      for (size_t m = 0; m < dims; ++m) {
        if (same_placement(from[m], to[m])) continue;
        if (++moved > 1) return true;
        for (size_t other = 0; other < dims; ++other)
          if (other != m && (splits_same_dim(from[m], from[other]) || splits_same_dim(to[m], from[other]))) return true;
      }
    }
    return false;
  }

  // Whether several mesh dims split one dim of a tensor, as it is given, taken or returned.
  bool splits_twice(const Answer& answer) const {
    const size_t dims = asked_.mesh->dims();
    const auto twice = [dims](const Placement* placements) {
      for (size_t m = 0; m < dims; ++m)
        for (size_t other = 0; other < m; ++other)
          if (splits_same_dim(placements[m], placements[other])) return true;
      return false;
    };
    for (size_t i = 0; i < asked_.tensors.size(); ++i)
      if (twice(asked_.tensors[i].placements) || twice(answer.inputs + i * dims)) return true;
    return std::any_of(answer.outputs, answer.outputs + answer.noutputs,
                       [&twice](const Spec& output) { return twice(output.placements); });
  }

  // Whether a view joins dims that several mesh dims split, or takes such dims apart.
  bool splits_otherwise(const Answer& answer) const {
    const size_t dims = asked_.mesh->dims();
    const auto is_strided = [dims](const Placement* placements) {
      return std::any_of(placements, placements + dims, [](const Placement& one) { return one.kind == kStridedShard; });
    };
    const Placement* before = answer.inputs;
    return std::any_of(answer.outputs, answer.outputs + answer.noutputs, [&](const Spec& output) {
      const Placement* after = output.placements;
      for (size_t m = 0; m < dims; ++m)
        for (size_t other = 0; other < m; ++other)
          if (splits_same_dim(before[m], before[other]) != splits_same_dim(after[m], after[other])) return true;
      return is_strided(before) != is_strided(after);
    });
  }

  static bool splits_same_dim(const Placement& one, const Placement& other) {
    return is_shard(one) && is_shard(other) && one.dim == other.dim;
  }

  // Whether a result stays partial where not all tensors are: DTensor reduces some of these first.
  bool mixes_partials(const Answer& answer) const {
    const size_t dims = asked_.mesh->dims();
    const auto is_partial = [](const Placement& placement) { return placement.kind == kPartial; };
    for (size_t m = 0; m < dims; ++m) {
      size_t partial = 0;
      for (size_t i = 0; i < asked_.tensors.size(); ++i) partial += is_partial(answer.inputs[i * dims + m]);
      if (partial == 0 || partial == asked_.tensors.size()) continue;
      for (size_t i = 0; i < answer.noutputs; ++i)
        if (is_partial(answer.outputs[i].placements[m])) return true;
    }
    return false;
  }

  // Whether partial sums move beside a tensor of integers or truth values: DTensor divides such a tensor to make it a partial
  // sum, which Rote does not.
  bool moves_sums_beside_integers(const Answer& answer) const {
    return answer.moved > 0 &&
           std::any_of(asked_.tensors.begin(), asked_.tensors.end(),
                       [](const Spec& tensor) { return c10::isIntegralType(static_cast<c10::ScalarType>(tensor.dtype), true); }) &&
           is_any_placement([](const Placement& one) { return one.kind == kPartial && !is_other_partial(one); });
  }

  // Whether a partial tensor becomes a complex one: DTensor reduces some casts first.
  bool has_complex_partials(const Answer& answer) const {
    return is_any_placement([](const Placement& one) { return one.kind == kPartial; }) &&
           std::any_of(answer.outputs, answer.outputs + answer.noutputs,
                       [](const Spec& spec) { return c10::isComplexType(static_cast<c10::ScalarType>(spec.dtype)); });
  }

  // Whether a dim of size 1 has a stride that decides nothing: views of such tensors may state any.
  bool has_odd_strides() const {
    for (const Spec& tensor : asked_.tensors) {
      for (uint32_t dim = 0; dim < tensor.ndim; ++dim) {
        const int64_t next = dim + 1 < tensor.ndim ? tensor.shape[dim + 1] * tensor.strides[dim + 1] : 1;
        if (tensor.shape[dim] == 1 && tensor.strides[dim] != next) return true;
      }
    }
    return false;
  }

  // Whether an argument is an empty list of numbers, which some of DTensor's rules take for no dims, and others for all.
  bool has_no_dims() const {
    return std::any_of(asked_.args.begin(), asked_.args.end(), [](const Arg& arg) { return arg.tag == kInts && arg.len == 0; });
  }

  // Whether a mesh dim that holds a tensor whole holds shards of it in the answer.
  bool chunks(const Answer& answer) const {
    for (size_t i = 0; i < asked_.tensors.size(); ++i) {
      for (size_t m = 0; m < asked_.mesh->dims(); ++m) {
        const uint8_t to = answer.inputs[i * asked_.mesh->dims() + m].kind;
        if (asked_.tensors[i].placements[m].kind == kReplicate && to != kReplicate) return true;
      }
    }
    return false;
  }

  // Whether a partial that is no sum passes through the op.
  bool passes_other_partials(const Answer& answer) const {
    for (size_t m = 0; m < asked_.mesh->dims(); ++m) {
      bool taken = false, given = false;
      for (size_t i = 0; i < asked_.tensors.size(); ++i) taken |= is_other_partial(answer.inputs[i * asked_.mesh->dims() + m]);
      for (size_t i = 0; i < answer.noutputs; ++i) given |= is_other_partial(answer.outputs[i].placements[m]);
      if (taken && given) return true;
    }
    return false;
  }

  bool has_other_partials() const { return is_any_placement(is_other_partial); }

  // The same without the masked ones of lookups, which few ops of DTensor can take.
  bool takes_other_partials() const {
    return is_any_placement([](const Placement& one) { return is_other_partial(one) && one.kind != kMaskPartial; });
  }

  // Whether a tensor of the question has such a placement.
  template <class Is>
  bool is_any_placement(const Is& is) const {
    return std::any_of(asked_.placements.begin(), asked_.placements.end(), [&is](const std::vector<Placement>& placements) {
      return std::any_of(placements.begin(), placements.end(), is);
    });
  }

  bool is_sharded(const Spec& spec) const {
    return std::any_of(spec.placements, spec.placements + asked_.mesh->dims(), is_shard);
  }

  // An argument with other specs in the place of its own.
  py::object replaced(PyObject* arg, const std::vector<py::object>& specs, size_t& next) const {
    if (is_a(arg, classes_.spec)) return specs[next++];
    if (!PyList_Check(arg) && !PyTuple_Check(arg)) return py::reinterpret_borrow<py::object>(arg);
    const Py_ssize_t n = PySequence_Fast_GET_SIZE(arg);
    py::list items(n);
    for (Py_ssize_t i = 0; i < n; ++i) items[i] = replaced(PySequence_Fast_GET_ITEM(arg, i), specs, next);
    if (PyList_Check(arg)) return std::move(items);
    return Py_TYPE(arg) == &PyTuple_Type ? py::object(py::tuple(items)) : py::reinterpret_borrow<py::object>(arg);
  }

  // The spec of placements on the mesh that is asked about, without meta.
  const py::object& spec_without_meta(const Placement* placements, bool strided_as_order) {
    const size_t dims = asked_.mesh->dims();
    std::string key(1, static_cast<char>(strided_as_order));
    bool strided = false;
    for (size_t i = 0; i < dims; ++i) {
      const Placement& p = placements[i];
      strided |= p.kind == kStridedShard;
      key.push_back(static_cast<char>(p.kind));
      key.push_back(static_cast<char>(p.reduce));
      key.append(reinterpret_cast<const char*>(&p.dim), sizeof p.dim);
      key.append(reinterpret_cast<const char*>(&p.split_factor), sizeof p.split_factor);
      key.append(reinterpret_cast<const char*>(&p.order), sizeof p.order);
    }
    auto it = asked_.mesh->specs.find(key);
    if (it == asked_.mesh->specs.end()) {
      py::tuple made(dims);
      for (size_t i = 0; i < dims; ++i) made[i] = make_placement(placements[i], classes_);
      py::object spec = strided ? classes_.spec(asked_.mesh->mesh, made, py::arg("use_strided_shard_as_shard_order") = strided_as_order)
                                : classes_.spec(asked_.mesh->mesh, made);
      it = asked_.mesh->specs.emplace(std::move(key), std::move(spec)).first;
    }
    return it->second;
  }

  // The masked partial of a lookup in a table that is split over a mesh dim; null if there is none. DTensor keeps the mask
  // in it, and gives it to the indices, too.
  py::object mask_of(const AskedOp& op, const Answer& answer) const {
    const auto masked = [](const Placement& placement) { return placement.kind == kMaskPartial; };
    const auto count = [&](const Placement* placements) { return std::count_if(placements, placements + asked_.mesh->dims(), masked); };
    if (answer.noutputs == 0 || count(answer.outputs[0].placements) == 0) return {};
    const bool is_gather = op.name == "aten::gather";
    if (!is_gather && op.name != "aten::embedding") throw HandedOn{"a masked partial"};
    if (count(answer.outputs[0].placements) > 1 || count(answer.inputs) || count(answer.inputs + asked_.mesh->dims()))
      throw HandedOn{"a masked partial on several mesh dims"};
    for (size_t m = 0; m < asked_.mesh->dims(); ++m) {
      // DTensor makes a mask of whole indices alone.
      if (!masked(answer.outputs[0].placements[m])) continue;
      if (asked_.tensors[1].placements[m].kind != kReplicate)
        throw HandedOn{"a masked partial of indices that are not replicated"};
      // Many of DTensor's ops fail on a masked partial: that is for scripts that split the table.
      if (!is_shard(asked_.tensors[0].placements[m])) throw HandedOn{"a masked partial of a table that is not split"};
    }
    const int64_t ndim = asked_.tensors[0].ndim;
    const int64_t dim = is_gather ? asked_.args[1].i : 0;
    const py::object shape = tuple_of(classes_.size, ints_of(asked_.tensors[0].shape, asked_.tensors[0].ndim));
    return classes_.mask_partial(py::arg("offset_shape") = shape, py::arg("offset_dim") = dim < 0 ? dim + ndim : dim);
  }

  // A spec with the mask where `masked` has a masked partial.
  py::object masked_spec(const Placement* placements, const Placement* masked, const py::object& mask) const {
    py::tuple made(asked_.mesh->dims());
    for (size_t i = 0; i < asked_.mesh->dims(); ++i)
      made[i] = masked[i].kind == kMaskPartial ? mask : make_placement(placements[i], classes_);
    return classes_.spec(asked_.mesh->mesh, made);
  }

  // A copy of a spec that has a meta. What the class computes from the placements stays as it is.
  py::object with_meta(const py::object& spec, const py::object& meta) const {
    auto* type = reinterpret_cast<PyTypeObject*>(classes_.spec.ptr());
    static const py::tuple nothing;
    auto copy = py::reinterpret_steal<py::object>(PyBaseObject_Type.tp_new(type, nothing.ptr(), nullptr));
    if (!copy) throw py::error_already_set();
    auto from = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(spec.ptr(), nullptr));
    auto to = py::reinterpret_steal<py::object>(PyObject_GenericGetDict(copy.ptr(), nullptr));
    if (!from || !to || PyDict_Update(to.ptr(), from.ptr()) != 0) throw py::error_already_set();
    PyDict_SetItem(to.ptr(), names().tensor_meta, meta.ptr());
    PyDict_SetItem(to.ptr(), names().hash, Py_None);
    return copy;
  }

  // A tuple of a subclass that adds nothing.
  static py::object tuple_of(const py::object& kind, const py::tuple& items) {
    const py::tuple arguments = py::make_tuple(items);
    auto made = py::reinterpret_steal<py::object>(
        PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(kind.ptr()), arguments.ptr(), nullptr));
    if (!made) throw py::error_already_set();
    return made;
  }

  static py::tuple ints_of(const int64_t* numbers, uint32_t n) {
    py::tuple made(n);
    for (uint32_t i = 0; i < n; ++i) made[i] = numbers[i];
    return made;
  }

  py::object make_meta(const Spec& output) const {
    auto dtype = py::reinterpret_borrow<py::object>(
        reinterpret_cast<PyObject*>(torch::getTHPDtype(static_cast<at::ScalarType>(output.dtype))));
    const py::object shape = tuple_of(classes_.size, ints_of(output.shape, output.ndim));
    return tuple_of(classes_.meta, py::make_tuple(shape, ints_of(output.strides, output.ndim), dtype));
  }

  // The meta of a result as PyTorch gives it, which must be what Rote says of it.
  void check_meta(const py::object& meta, const Spec& output) const {
    PyObject* shape = PyTuple_GET_ITEM(meta.ptr(), 0);
    PyObject* dtype = PyTuple_GET_ITEM(meta.ptr(), 2);
    bool same = PyTuple_GET_SIZE(shape) == output.ndim && static_cast<uint8_t>(reinterpret_cast<THPDtype*>(dtype)->scalar_type) == output.dtype;
    for (uint32_t i = 0; same && i < output.ndim; ++i) same = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i)) == output.shape[i];
    if (!same) throw HandedOn{"PyTorch's result has another shape or dtype"};
  }

  py::object make_outputs(const AskedOp& op, const Answer& answer, const py::object& schema, const py::object& mask,
                          const Stated* stated) {
    if (op.returns == AskedOp::Returns::kNothing) return py::none();
    const bool known = !stated && std::all_of(answer.outputs, answer.outputs + answer.noutputs, [](const Spec& spec) { return spec.strides || spec.ndim == 0; });
    py::object metas = py::none();
    if (stated) {
      metas = stated->metas;
    } else if (!known) {
      ++strides_asked_[op.name];
      metas = propagator_.attr("_propagate_tensor_meta_non_cached")(schema);
    }
    const auto output = [&](size_t i, const py::object& meta) -> py::object {
      if (meta && meta.is_none()) return py::none();
      const Spec& spec = answer.outputs[i];
      if (meta) check_meta(meta, spec);
      for (size_t m = 0; !stated && m < asked_.mesh->dims(); ++m)
        if (spec.placements[m].kind == kPartial && op.name.find("norm") != std::string::npos && asked_.tensors[0].placements[m].kind != kPartial)
          throw HandedOn{"a norm whose partial DTensor names otherwise"};
      const py::object placed = mask ? masked_spec(spec.placements, spec.placements, mask) : spec_without_meta(spec.placements, asked_.strided_as_order);
      return with_meta(placed, meta ? meta : make_meta(spec));
    };
    if (op.returns == AskedOp::Returns::kTensor) {
      if (answer.noutputs != 1 || (!known && !is_a(metas.ptr(), classes_.meta))) throw HandedOn{"another number of results"};
      return output(0, metas.is_none() ? py::object() : metas);
    }
    if (!known && (metas.is_none() || is_a(metas.ptr(), classes_.meta) || static_cast<uint32_t>(PySequence_Fast_GET_SIZE(metas.ptr())) != answer.noutputs))
      throw HandedOn{"another number of results"};
    if (op.returns == AskedOp::Returns::kTuple && answer.noutputs != op.return_count) throw HandedOn{"another number of results"};
    py::tuple all(answer.noutputs);
    for (size_t i = 0; i < answer.noutputs; ++i)
      all[i] = output(i, known ? py::object() : py::reinterpret_borrow<py::object>(PySequence_Fast_GET_ITEM(metas.ptr(), i)));
    return all;
  }

  int (*ask_)(void*, const Question*, Answer*);
  const char* (*error_)();
  ShardingClasses classes_;
  py::object propagator_, handlers_, mesh_propagator_, registered_, agreement_;
  py::dict own_rules_;
  py::object state_, decompositions_;
  py::object tables_[3];
  std::unordered_map<PyObject*, AskedOp> ops_;
  std::unordered_map<PyObject*, AskedMesh> meshes_;
  std::mutex turns_;
  std::thread::id asking_;  // whose turn it is; read and written under the GIL
  bool closed_ = false;
  Asked asked_;
  uint32_t kind_ = 0;
  uint64_t answered_ = 0, nanoseconds_ = 0;
  std::map<std::string, uint64_t> strides_asked_, decomposed_;
  std::map<std::pair<std::string, std::string>, uint64_t> handed_on_;
};

}  // namespace rote
