// DTensor's placements, read and made.
#pragma once
#include <algorithm>
#include <cmath>

#include "describe.h"

namespace rote {

// What cannot be answered here, and why. PyTorch has to answer it.
struct HandedOn {
  std::string reason;
};

// The names of attributes that are read, each interned once.
struct Names {
  static PyObject* intern(const char* name) { return PyUnicode_InternFromString(name); }
  PyObject* args_schema = intern("args_schema");
  PyObject* dim = intern("dim");
  PyObject* hash = intern("_hash");
  PyObject* kwargs_schema = intern("kwargs_schema");
  PyObject* mesh = intern("mesh");
  PyObject* norm_type = intern("norm_type");
  PyObject* op = intern("op");
  PyObject* op_to_shape_and_stride_idx = intern("op_to_shape_and_stride_idx");
  PyObject* placements = intern("placements");
  PyObject* reduce_op = intern("reduce_op");
  PyObject* shape = intern("shape");
  PyObject* shard_order = intern("shard_order");
  PyObject* split_factor = intern("split_factor");
  PyObject* tensor_meta = intern("tensor_meta");
  PyObject* use_strided_shard_as_shard_order = intern("use_strided_shard_as_shard_order");
};

inline const Names& names() {
  static const Names all;
  return all;
}

inline py::object attribute(const py::handle& object, PyObject* name) {
  py::object found = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name));
  if (!found) throw py::error_already_set();
  return found;
}

// The classes of DTensor's propagation.
struct ShardingClasses {
  py::object spec, meta, size, schema, output_sharding, placeholder;
  py::object replicate, shard, strided_shard, partial, mask_partial, norm_partial;
  // Placements of the script's own: `own` says the number of one (`rote_sharding`), or why it is none, as text; None for
  // a class that is not registered. `made_own` makes one of a number and a dim, `made_own_partial` of a number. `warn_own`
  // warns once of what cannot be said of a class. `passes` has the ops that pass registered partials by further strategies,
  // which `state_passes` says of a schema. `own` is None where none are answered.
  py::object own, made_own, made_own_partial, warn_own, passes, state_passes;

  explicit ShardingClasses(const py::dict& named)
      : spec(named["DTensorSpec"]),
        meta(named["TensorMeta"]),
        size(named["Size"]),
        schema(named["OpSchema"]),
        output_sharding(named["OutputSharding"]),
        placeholder(named["_ShardingPlaceholder"]),
        replicate(named["Replicate"]),
        shard(named["Shard"]),
        strided_shard(named["_StridedShard"]),
        partial(named["Partial"]),
        mask_partial(named["_MaskPartial"]),
        norm_partial(named["_NormPartial"]),
        own(named["own"]),
        made_own(named["made_own"]),
        made_own_partial(named["made_own_partial"]),
        warn_own(named["warn_own"]),
        passes(named["passes"]),
        state_passes(named["state_passes"]) {}
};

// Reductions of `Partial`, by number.
inline constexpr const char* kReductions[] = {"sum", "avg", "max", "min", "product"};

inline bool is_a(PyObject* object, const py::object& kind) {
  return reinterpret_cast<PyObject*>(Py_TYPE(object)) == kind.ptr();
}

inline uint32_t small_number(PyObject* number) {
  const long value = PyLong_AsLong(number);
  if (value == -1 && PyErr_Occurred()) throw py::error_already_set();
  if (value < 0) throw HandedOn{"a dim or number of blocks below zero"};
  return static_cast<uint32_t>(value);
}

// A placement of a class that is not PyTorch's.
inline Placement read_own(PyObject* placement, const ShardingClasses& classes) {
  const py::object said = classes.own.is_none() ? py::none() : classes.own(py::handle(placement));
  if (PyUnicode_Check(said.ptr())) throw HandedOn{said.cast<std::string>()};
  if (said.is_none()) throw HandedOn{std::string("a placement of class ") + Py_TYPE(placement)->tp_name};
  Placement read{};
  read.split_factor = said.cast<uint32_t>();
  if (py::isinstance(placement, classes.partial)) {
    read.kind = kRegisteredPartial;
    return read;
  }
  read.kind = kRegisteredShard;
  read.dim = small_number(attribute(placement, names().dim).ptr());
  return read;
}

inline Placement read_placement(PyObject* placement, const ShardingClasses& classes) {
  Placement read{};
  if (is_a(placement, classes.replicate)) {
    read.kind = kReplicate;
  } else if (is_a(placement, classes.shard)) {
    read.kind = kShard;
    read.dim = small_number(attribute(placement, names().dim).ptr());
  } else if (is_a(placement, classes.strided_shard)) {
    read.kind = kStridedShard;
    read.dim = small_number(attribute(placement, names().dim).ptr());
    read.split_factor = small_number(attribute(placement, names().split_factor).ptr());
  } else if (is_a(placement, classes.partial)) {
    read.kind = kPartial;
    const auto reduction = attribute(placement, names().reduce_op).cast<std::string>();
    const auto* found = std::find(std::begin(kReductions), std::end(kReductions), reduction);
    if (found == std::end(kReductions)) throw HandedOn{"a partial with the reduction " + reduction};
    read.reduce = static_cast<uint8_t>(found - kReductions);
  } else if (is_a(placement, classes.mask_partial)) {
    read.kind = kMaskPartial;
  } else if (is_a(placement, classes.norm_partial)) {
    read.kind = kNormPartial;
    read.order = attribute(placement, names().norm_type).cast<double>();
    // Rote reduces these as sums and extrema, and DTensor knows no way from one class of partial to another.
    if (read.order == 0 || read.order == 1 || std::isinf(read.order)) throw HandedOn{"a norm whose partial DTensor names otherwise"};
  } else {
    return read_own(placement, classes);
  }
  return read;
}

// A placement of a strategy. None stands for a result that there is not.
inline Placement read_slot(PyObject* slot, const ShardingClasses& classes) {
  if (slot == Py_None) return Placement{};
  if (!is_a(slot, classes.placeholder)) return read_placement(slot, classes);
  Placement read{};
  read.kind = kPlaceholder;
  read.dim = small_number(attribute(slot, names().dim).ptr());
  return read;
}

inline py::object make_placement(const Placement& placement, const ShardingClasses& classes) {
  switch (placement.kind) {
    case kReplicate: return classes.replicate();
    case kShard: return classes.shard(placement.dim);
    case kStridedShard: return classes.strided_shard(placement.dim, py::arg("split_factor") = placement.split_factor);
    case kRegisteredShard: return classes.made_own(placement.split_factor, placement.dim);
    case kRegisteredPartial: return classes.made_own_partial(placement.split_factor);
    case kPartial: return classes.partial(kReductions[placement.reduce]);
    case kNormPartial: {
      const auto whole = static_cast<int64_t>(placement.order);
      const bool is_whole = static_cast<double>(whole) == placement.order;
      return classes.norm_partial(is_whole ? py::object(py::int_(whole)) : py::object(py::float_(placement.order)));
    }
    default: throw HandedOn{"a masked partial"};
  }
}

// Whether it splits a tensor dim.
inline bool is_shard(const Placement& placement) {
  return placement.kind == kShard || placement.kind == kStridedShard || placement.kind == kRegisteredShard;
}

// Whether it is partial by another reduction than a sum, which is PyTorch's.
inline bool is_other_partial(const Placement& placement) {
  return placement.kind == kMaskPartial || placement.kind == kNormPartial ||
         (placement.kind == kPartial && placement.reduce != kReduceSum);
}

inline bool same_placement(const Placement& a, const Placement& b) {
  return a.kind == b.kind && a.reduce == b.reduce && a.dim == b.dim && a.split_factor == b.split_factor && a.order == b.order;
}

}  // namespace rote
