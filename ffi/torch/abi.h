// What crosses the border between the bridge and Rust: plain C structs and
// status codes. `replay/src/aten/sys.rs` holds the same definitions; both name
// kAbiVersion, and loading refuses a bridge of another version.
#pragma once
#include <cstdint>

namespace rote {

constexpr uint32_t kAbiVersion = 12;

// The tag of an Arg: which member of its union is set.
enum Tag : uint8_t {
  kNone = 0,
  kTensor = 1,    // tensors[0]
  kTensors = 2,   // tensors[0..len]; storage 0 is an absent optional tensor
  kBool = 3,      // i
  kInt = 4,       // i
  kFloat = 5,     // f
  kComplex = 6,   // c
  kWrapped = 7,   // list[0]: a number where the schema wants a tensor
  kInts = 8,      // ints[0..len]
  kList = 9,      // list[0..len]
  kStr = 10,      // s
  kDType = 11,    // i
  kDevice = 12,   // i: kind << 8 | (index & 0xff)
  kLayout = 13,   // i
  kMemoryFormat = 14,  // i
  kOther = 15,    // s: the Python type of something that a plan cannot hold
  kValue = 16,    // i: a slot (binding a plan only)
  kValues = 17,   // ints[0..len]: slots, -1 for an absent tensor (likewise)
};

// How the results of an op get to where they lie already.
enum Into : uint8_t {
  kIntoSlot = 0,      // they do not: the op makes them
  kIntoOverload = 1,  // an overload of the op writes them
  kIntoCopy = 2,      // the op copies its first argument: copy_ does
};

// What of a Python tensor is bound to a slot.
enum Bound : uint32_t { kBindTensor = 0, kBindGrad = 1, kBindMemory = 2 };

// Bits of Tensor::flags.
enum TensorFlags : uint8_t { kConj = 1, kNeg = 2, kNoStorage = 4, kZeroTensor = 8, kWrappedNumber = 16 };

// What a plan says that a value is marked as (`Marks` in plans/src/value.rs).
enum Marks : uint8_t { kMarkedConj = 1, kMarkedNeg = 2 };

// Where a tensor lies in its storage.
struct Place {
  int64_t start;   // the byte at which its data starts
  uint64_t bytes;  // of the storage
  uint64_t base;   // a number for what it is a view of
};

// A local tensor as the dispatcher sees it. Pointers hold until the next call.
struct Tensor {
  uint64_t storage;        // address of the StorageImpl, unique in a recording
  const int64_t* sizes;    // elements
  const int64_t* strides;  // elements
  int64_t offset;          // elements of this dtype, from the storage's start
  uint64_t storage_bytes;
  uint32_t ndim;
  uint8_t dtype;
  uint8_t device_kind;
  int8_t device_index;
  uint8_t flags;
};

struct Arg {
  uint8_t tag;
  uint8_t written;  // the schema says that the op writes to it
  uint32_t len;
  union {
    int64_t i;
    double f;
    double c[2];
    const char* s;
    const Tensor* tensors;
    const int64_t* ints;
    const Arg* list;
  };
};

// Bits of Op::flags.
enum OpFlags : uint32_t {
  kSeeded = 1,         // draws from a generator
  kDataDependent = 2,  // reads tensor data on the host, or its shape depends on it
  kInplaceView = 4,    // changes the meta of an argument in place
  kHidden = 8,         // hidden from dispatch modes
  kGrad = 16,          // its kernel ran while gradients were enabled
};

struct Op {
  const char* name;      // aten::mm
  const char* overload;  // empty for the default one
  const Arg* args;       // in schema order, defaults filled in
  const Arg* outs;
  uint32_t nargs;
  uint32_t nouts;
  uint32_t flags;
};

// One word of the facts of a call's arguments, beside the word itself: which
// leaf of the flattened arguments, and which property of it.
enum Field : uint32_t {
  kStructure = 0,
  kType = 1,
  kDTypeField = 2,
  kDeviceField = 3,
  kRequiresGrad = 4,
  kShape = 5,
  kStrides = 6,
  kAlias = 7,
  kMesh = 8,
  kPlacements = 9,
  kGlobalShape = 10,
  kGlobalStrides = 11,
  kValueField = 12,
  kGradField = 13,
  kGraph = 14,
  kStorageFlags = 15,
  kAttributes = 16,
};

struct Fact {
  uint32_t leaf;
  uint32_t field;
};

}  // namespace rote
