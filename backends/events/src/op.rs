//! Ops as they run, in C structs. The bridge describes PyTorch's ops in them (`rote::Op` in
//! `backends/aten/bridge/abi.h`), and any program its own ops through `rote.h`.

use std::ffi::c_char;

/// Tensor flag: lazily conjugated.
pub const CONJ: u8 = 1;
/// Tensor flag: lazily negated.
pub const NEG: u8 = 2;
/// Tensor flag: has no strided storage (sparse tensors, for example).
pub const NO_STORAGE: u8 = 4;
/// Tensor flag: zeros that take no memory.
pub const ZERO_TENSOR: u8 = 8;
/// Tensor flag: a number wrapped in a tensor. Type promotion treats it as a number.
pub const WRAPPED_NUMBER: u8 = 16;

/// A local tensor.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Tensor {
    /// Number of its storage. Tensors that share memory have the same number. A number is never used for two
    /// storages in a recording. 0 stands for no tensor.
    pub storage: u64,
    /// Shape, `ndim` entries.
    pub sizes: *const i64,
    /// Strides in elements, `ndim` entries.
    pub strides: *const i64,
    /// Offset from the start of the storage, in elements.
    pub offset: i64,
    /// Size of the storage in bytes.
    pub storage_bytes: u64,
    /// Number of dims.
    pub ndim: u32,
    /// Element type: PyTorch's `ScalarType` number (6 is f32, 15 bf16, 4 i64).
    pub dtype: u8,
    /// PyTorch's `DeviceType` number (0 cpu, 1 cuda).
    pub device_kind: u8,
    /// Index of the device, -1 for the current one.
    pub device_index: i8,
    /// Tensor flags.
    pub flags: u8,
}

/// What an argument or result is: which member of its payload is set.
pub mod tag {
    /// Argument tag: no value (`None`).
    pub const NONE: u8 = 0;
    /// Argument tag: a tensor, `tensors[0]`.
    pub const TENSOR: u8 = 1;
    /// Argument tag: tensors, `tensors[0..len]`; storage 0 stands for an absent tensor.
    pub const TENSORS: u8 = 2;
    /// Argument tag: a boolean, `i`.
    pub const BOOL: u8 = 3;
    /// Argument tag: an integer, `i`.
    pub const INT: u8 = 4;
    /// Argument tag: a float, `f`.
    pub const FLOAT: u8 = 5;
    /// Argument tag: a complex number, `c`.
    pub const COMPLEX: u8 = 6;
    /// Argument tag: a number where the schema wants a tensor, `list[0]`.
    pub const WRAPPED: u8 = 7;
    /// Argument tag: integers, `ints[0..len]`.
    pub const INTS: u8 = 8;
    /// Argument tag: a list of anything else, `list[0..len]`.
    pub const LIST: u8 = 9;
    /// Argument tag: text, `s`.
    pub const STR: u8 = 10;
    /// Argument tag: an element type, `i`.
    pub const DTYPE: u8 = 11;
    /// Argument tag: a device, `i`: kind << 8 | (index & 0xff).
    pub const DEVICE: u8 = 12;
    /// Argument tag: PyTorch's `Layout` number, `i`.
    pub const LAYOUT: u8 = 13;
    /// Argument tag: PyTorch's `MemoryFormat` number, `i`.
    pub const MEMORY_FORMAT: u8 = 14;
    /// Argument tag: a value that a plan cannot hold; `s` names its type.
    pub const OTHER: u8 = 15;
    /// Argument tag, when an op is bound: a tensor of the run; `i` is its index.
    pub const VALUE: u8 = 16;
    /// Argument tag, when an op is bound: tensors of the run; their indices are `ints[0..len]`, -1 for an
    /// absent tensor.
    pub const VALUES: u8 = 17;
}

/// The value of an argument or result.
#[repr(C)]
#[derive(Clone, Copy)]
pub union Payload {
    /// Integers, and element types, devices, layouts and memory formats by their numbers.
    pub i: i64,
    /// Floats.
    pub f: f64,
    /// Complex numbers: real and imaginary part.
    pub c: [f64; 2],
    /// Text.
    pub s: *const c_char,
    /// Tensors.
    pub tensors: *const Tensor,
    /// Integers.
    pub ints: *const i64,
    /// Nested arguments.
    pub list: *const Arg,
}

/// An argument or result of an op.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Arg {
    /// The argument tag (`ROTE_ARG_...`): it says which member of `payload` is set.
    pub tag: u8,
    /// Whether the op writes to this argument.
    pub written: u8,
    /// Number of entries of a list.
    pub len: u32,
    /// The value.
    pub payload: Payload,
}

/// Op flag: draws from a generator.
pub const SEEDED: u32 = 1;
/// Op flag: reads tensor data on the host, or has a result whose shape depends on tensor data.
pub const DATA_DEPENDENT: u32 = 2;
/// Op flag: changes the meta of an argument in place.
pub const INPLACE_VIEW: u32 = 4;
/// Op flag: ran while the framework hides ops from observers. Frameworks do so for their own bookkeeping, and a
/// step may do so for other ops.
pub const HIDDEN: u32 = 8;
/// Op flag: its kernel ran with gradients enabled. Some kernels then compute in another way.
pub const GRAD: u32 = 16;
/// Op flag: code of the framework's own called it, which waits for its collectives before it uses their results, and
/// keeps memory of its own that it fills in every step: buckets of gradients.
pub const INTERNAL: u32 = 32;

/// An op that has run, on plain local tensors.
#[repr(C)]
pub struct Op {
    /// Name with namespace, for example `aten::mm`.
    pub name: *const c_char,
    /// Overload; empty for the default overload.
    pub overload: *const c_char,
    /// Arguments in the order of the op's schema, defaults filled in.
    pub args: *const Arg,
    /// Results.
    pub outs: *const Arg,
    /// Number of arguments.
    pub nargs: u32,
    /// Number of results.
    pub nouts: u32,
    /// Op flags.
    pub flags: u32,
}
