// What crosses the border between the bridge and Rust: plain C structs and
// status codes. `backends/aten/src/sys.rs` holds the same definitions; both name
// kAbiVersion, and loading refuses a bridge of another version.
#pragma once
#include <cstdint>

namespace rote {

constexpr uint32_t kAbiVersion = 17;

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

// Where what is observed of a step is recorded: a session, and functions of `rote.h` and `rote_torch.h`.
struct Sink {
  void* session;
  int (*observed)(void* session, const char* line);
  int (*global_begin)(void* session, const char* op, const uint32_t* inputs, uint32_t n, const char* line);
  int (*global_end)(void* session, const uint32_t* outputs, uint32_t n);
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

// What a fact looks at: an object, and a key where the kind has one.
enum FactKind : uint32_t {
  kDictItem = 0,  // the entry of a dict under a key
  kListItem = 1,  // the item of a list at an index
  kCell = 2,  // what a cell of a closure holds
  kAttribute = 3,  // the attribute of an object under a name
  kSize = 4,  // the size of a container
  kTensorMeta = 5,  // a tensor of the state: its address, how it looks, and what autograd knows of it
  kGradMeta = 6,  // the gradient of a tensor of the state or of an argument
  kGroup = 7,  // the process group under a name
  kItems = 8,  // which keys, members or items a container has, in its order; of a dict the values too, if the key is True
  kFunction = 9,  // the code, defaults, names and text of a function; without names and text, if the key is True
  kBuffer = 10,  // format, shape and bytes of an array; where it lies in place of the bytes, if the key is True
  kTypeOf = 11,  // the class of an object
  kContextVar = 12,  // the value of a context variable
  kOwn = 13,  // how many attributes of its own an object has; their names and order too, if the key is True
  kMember = 14,  // what a descriptor, the key, finds in an object
  kEntrySize = 15,  // the container that is an entry of a dict, and its size
  kBases = 16,  // the classes that a class inherits from
  kClass = 17,  // the attributes of a library's class and its bases; the key names the private ones that count
  kWeak = 18,  // the referent of a weak reference
  kReferents = 19,  // what an object of the interpreter's own classes points to; where an iterator stands, if the key is True
  kLook = 20,  // how a tensor looks that is no state, and its gradient; the seed of a generator
  kGradMemory = 21,  // the memory that gradients share with the state, with arguments and with each other
  kReachMemory = 22,  // the memory that tensors which are no state, their gradients, and buffers share with these
  kEntryCount = 23,  // of a container that is an entry of a dict, and may be another one at each call: its class and size
  kTupleItem = 24,  // the item of a tuple that is an entry of a dict; the key is (its key, the index, the size of the tuple)
  kAbsent = 25,  // that a dict has none of some names, a tuple that is the key; else, which it has
  kWithin = 26,  // all that a container holds, however deep; the key is the classes of objects whose attributes count
  kFactKinds = 27,
};

struct Fact {
  uint32_t leaf;
  uint32_t field;
};

}  // namespace rote
