//! Values: the tensors that a plan reads, makes and writes.

use rkyv::{Archive, Deserialize, Serialize};

use crate::pool::{InstrId, Range, ValueId};

/// Element types, with PyTorch's `ScalarType` numbers (c10/core/ScalarType.h),
/// kept as a number so that a type this version does not name still round-trips.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub struct DType(pub u8);

/// `(ScalarType number, short name, bytes per element)`.
const DTYPES: &[(u8, &str, u64)] = &[
    (0, "u8", 1),
    (1, "i8", 1),
    (2, "i16", 2),
    (3, "i32", 4),
    (4, "i64", 8),
    (5, "f16", 2),
    (6, "f32", 4),
    (7, "f64", 8),
    (8, "c32", 4),
    (9, "c64", 8),
    (10, "c128", 16),
    (11, "bool", 1),
    (15, "bf16", 2),
    (23, "f8e5m2", 1),
    (24, "f8e4m3fn", 1),
    (25, "f8e5m2fnuz", 1),
    (26, "f8e4m3fnuz", 1),
    (27, "u16", 2),
    (28, "u32", 4),
    (29, "u64", 8),
    (44, "f8e8m0fnu", 1),
];

impl DType {
    /// The short name (`f32`, `bf16`, `i64`), or `None` for an unknown number.
    pub fn name(self) -> Option<&'static str> {
        DTYPES.iter().find(|d| d.0 == self.0).map(|d| d.1)
    }

    /// Bytes per element, or `None` for an unknown number.
    pub fn bytes(self) -> Option<u64> {
        DTYPES.iter().find(|d| d.0 == self.0).map(|d| d.2)
    }

    /// The type with this short name.
    pub fn from_name(name: &str) -> Option<Self> {
        DTYPES.iter().find(|d| d.1 == name).map(|d| DType(d.0))
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "dtype#{}", self.0),
        }
    }
}

/// A device, with PyTorch's `DeviceType` number (c10/core/DeviceType.h) and
/// the index on this machine (-1: the current one).
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub struct Device {
    /// 0 is `cpu`, 1 is `cuda`, 14 is `meta`.
    pub kind: u8,
    /// Index of the device, or -1.
    pub index: i8,
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.kind {
            0 => f.write_str("cpu")?,
            1 => f.write_str("cuda")?,
            14 => f.write_str("meta")?,
            kind => write!(f, "device#{kind}")?,
        }
        if self.index >= 0 && self.kind != 0 {
            write!(f, ":{}", self.index)?;
        }
        Ok(())
    }
}

/// Where a value comes from.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub enum Def {
    /// Bound before the run: index into [`crate::Plan::bindings`].
    Binding(u32),
    /// Made by an instruction: index into [`crate::Plan::instrs`].
    Instr(InstrId),
    /// Computed ahead of time: index into [`crate::Plan::constants`].
    Constant(u32),
}

/// One tensor of the program, on this rank. Every value is defined once; what
/// its storage holds may be written in place later.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug))]
pub struct Value {
    /// Element type.
    pub dtype: DType,
    /// Device of the storage.
    pub device: Device,
    /// Where it comes from.
    pub def: Def,
    /// The value whose storage this one looks at: itself, unless it is a view.
    pub root: ValueId,
    /// Local shape in elements, a range of [`crate::Plan::dims`].
    pub shape: Range,
    /// Strides in elements, a range of [`crate::Plan::dims`].
    pub strides: Range,
    /// Offset in elements of this dtype, from where the root's data starts.
    pub offset: i64,
    /// Bytes of storage that the root holds; 0 for views and bindings.
    pub storage_bytes: u64,
    /// The last instruction that reads the value, [`crate::NONE`] for values
    /// that outlive the run (bindings, outputs, gradients) or that nothing
    /// reads.
    pub last_use: InstrId,
}
