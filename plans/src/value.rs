//! Values: the tensors that a plan reads, makes and writes.

use rkyv::{Archive, Deserialize, Serialize};

use crate::plan::Plan;
use crate::pool::{InstrId, Range, ValueId};

/// Element types, with PyTorch's `ScalarType` numbers (c10/core/ScalarType.h),
/// kept as a number so that a type this version does not name still round-trips.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub struct DType(pub u8);

/// Element types: a name in Rust, the `ScalarType` number, the short name, bytes per element.
macro_rules! dtypes {
    ($($(#[$doc:meta])* $constant:ident = $number:literal, $name:literal, $bytes:literal;)*) => {
        impl DType {
            $($(#[$doc])* pub const $constant: DType = DType($number);)*
        }

        /// `(ScalarType number, short name, bytes per element)`.
        const DTYPES: &[(u8, &str, u64)] = &[$(($number, $name, $bytes),)*];
    };
}

dtypes! {
    /// Unsigned integers of 8 bits.
    U8 = 0, "u8", 1;
    /// Integers of 8 bits.
    I8 = 1, "i8", 1;
    /// Integers of 16 bits.
    I16 = 2, "i16", 2;
    /// Integers of 32 bits.
    I32 = 3, "i32", 4;
    /// Integers of 64 bits: indices and sizes.
    I64 = 4, "i64", 8;
    /// Floats of 16 bits, as IEEE 754 has them.
    F16 = 5, "f16", 2;
    /// Floats of 32 bits.
    F32 = 6, "f32", 4;
    /// Floats of 64 bits.
    F64 = 7, "f64", 8;
    /// Complex numbers of two `f16`.
    C32 = 8, "c32", 4;
    /// Complex numbers of two `f32`.
    C64 = 9, "c64", 8;
    /// Complex numbers of two `f64`.
    C128 = 10, "c128", 16;
    /// Truth values.
    BOOL = 11, "bool", 1;
    /// Floats of 16 bits with the exponent of `f32`.
    BF16 = 15, "bf16", 2;
    /// Floats of 8 bits, 5 of them the exponent.
    F8E5M2 = 23, "f8e5m2", 1;
    /// Floats of 8 bits, 4 of them the exponent, without infinities.
    F8E4M3FN = 24, "f8e4m3fn", 1;
    /// As `F8E5M2`, without infinities and negative zero.
    F8E5M2FNUZ = 25, "f8e5m2fnuz", 1;
    /// As `F8E4M3FN`, without negative zero.
    F8E4M3FNUZ = 26, "f8e4m3fnuz", 1;
    /// Unsigned integers of 16 bits.
    U16 = 27, "u16", 2;
    /// Unsigned integers of 32 bits.
    U32 = 28, "u32", 4;
    /// Unsigned integers of 64 bits.
    U64 = 29, "u64", 8;
    /// Exponents of 8 bits: scales.
    F8E8M0FNU = 44, "f8e8m0fnu", 1;
}

impl DType {
    /// The short name (`f32`, `bf16`, `i64`), or `None` for an unknown number.
    pub fn name(self) -> Option<&'static str> {
        DTYPES.iter().find(|d| d.0 == self.0).map(|d| d.1)
    }

    /// Bytes per element, or `None` for an unknown number.
    pub fn bytes(self) -> Option<u64> {
        DTYPES.iter().find(|d| d.0 == self.0).map(|d| d.2)
    }

    /// Whether its elements are whole numbers; truth values are none.
    pub fn is_integer(self) -> bool {
        (self.name()).is_some_and(|name| name.starts_with(['i', 'u']))
    }

    /// Whether its elements are complex numbers.
    pub fn is_complex(self) -> bool {
        self.name().is_some_and(|name| name.starts_with('c'))
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
    /// [`Device::CPU`], [`Device::CUDA`], ...
    pub kind: u8,
    /// Index of the device, or -1.
    pub index: i8,
}

/// Device kinds: a name in Rust, the `DeviceType` number, the name.
macro_rules! devices {
    ($($(#[$doc:meta])* $constant:ident = $number:literal, $name:literal;)*) => {
        impl Device {
            $($(#[$doc])* pub const $constant: u8 = $number;)*
        }

        /// `(DeviceType number, name)`.
        const DEVICES: &[(u8, &str)] = &[$(($number, $name),)*];
    };
}

devices! {
    /// Kind: the memory of the host.
    CPU = 0, "cpu";
    /// Kind: a GPU under CUDA.
    CUDA = 1, "cuda";
    /// Kind: no memory at all.
    META = 14, "meta";
}

impl Device {
    /// Whether its memory is the host's.
    pub fn is_cpu(self) -> bool {
        self.kind == Device::CPU
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match DEVICES.iter().find(|row| row.0 == self.kind) {
            Some((_, name)) => f.write_str(name)?,
            None => write!(f, "device#{}", self.kind)?,
        }
        if self.index >= 0 && !self.is_cpu() {
            write!(f, ":{}", self.index)?;
        }
        Ok(())
    }
}

/// What PyTorch marks a tensor as, beside its geometry: bits of this number.
/// Ops on a marked tensor see other elements than its bytes hold, or promote
/// types in another way.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub struct Marks(pub u8);

impl Marks {
    /// None.
    pub const NONE: Marks = Marks(0);
    /// Lazily conjugated.
    pub const CONJ: Marks = Marks(1);
    /// Lazily negated.
    pub const NEG: Marks = Marks(2);
    /// Zeros that take no memory (`_efficientzerotensor`).
    pub const ZERO: Marks = Marks(4);
    /// A Python number in a tensor, which promotes types as a number does.
    pub const WRAPPED: Marks = Marks(8);

    /// `(mark, name)`.
    const NAMES: [(Marks, &'static str); 4] = [
        (Marks::CONJ, "conj"),
        (Marks::NEG, "neg"),
        (Marks::ZERO, "zero"),
        (Marks::WRAPPED, "wrapped"),
    ];

    /// One past the largest number.
    pub const END: i64 = 16;

    /// Whether it has a mark.
    pub fn has(self, mark: Marks) -> bool {
        self.0 & mark.0 != 0
    }

    /// Whether a plain view of a tensor with marks `of` can have these: a view
    /// says by itself whether it is conjugated or negated, and nothing else.
    pub fn can_view(self, of: Marks) -> bool {
        (self.0 ^ of.0) & !(Marks::CONJ.0 | Marks::NEG.0) == 0
    }
}

impl std::fmt::Display for Marks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names = Marks::NAMES.iter().filter(|(mark, _)| self.has(*mark));
        let names: Vec<&str> = names.map(|(_, name)| *name).collect();
        f.write_str(&names.join(" "))
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
    /// What PyTorch marks it as.
    pub marks: Marks,
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

/// What elements a tensor has: what two tensors have in common if the same bytes
/// mean the same in both.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Kind {
    /// Element type.
    pub dtype: DType,
    /// Device of the storage.
    pub device: Device,
    /// What PyTorch marks it as.
    pub marks: Marks,
}

/// All that an op can tell of a tensor but for what it holds and where it lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Meta<'a> {
    /// Its elements.
    pub kind: Kind,
    /// Shape in elements.
    pub shape: &'a [i64],
    /// Strides in elements.
    pub strides: &'a [i64],
}

/// The elements of a storage that a tensor has, and how: two tensors with equal regions are the same tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region<'a> {
    /// The tensor to an op.
    pub meta: Meta<'a>,
    /// The value whose storage it is in.
    pub root: ValueId,
    /// Offset in elements, from where the root's data starts.
    pub offset: i64,
}

impl Plan {
    /// The region of a value. Whoever compares tensors compares this, or a part of it.
    pub fn region(&self, value: ValueId) -> Region<'_> {
        // Destructured so that a new field cannot be left out.
        let Value {
            dtype,
            device,
            marks,
            def: _,
            root,
            shape,
            strides,
            offset,
            storage_bytes: _,
            last_use: _,
        } = self.values[value as usize];
        Region {
            meta: Meta {
                kind: Kind {
                    dtype,
                    device,
                    marks,
                },
                shape: self.dims(shape),
                strides: self.dims(strides),
            },
            root,
            offset,
        }
    }

    /// What a value looks like to an op.
    pub fn meta(&self, value: ValueId) -> Meta<'_> {
        self.region(value).meta
    }

    /// What elements a value has.
    pub fn kind(&self, value: ValueId) -> Kind {
        self.meta(value).kind
    }
}

/// The bytes that a tensor reaches, counted from where its root's data starts: the
/// first, and the one after the last. `None` for a tensor without elements. `offset`
/// and strides are counted in elements of so many bytes.
pub fn reach(
    element: u64,
    offset: i64,
    dims: impl IntoIterator<Item = (i64, i64)>,
) -> Option<(i128, i128)> {
    let element = i128::from(element);
    let (mut from, mut to) = (i128::from(offset), i128::from(offset));
    for (size, stride) in dims {
        if size <= 0 {
            return None;
        }
        let step = i128::from(size - 1) * i128::from(stride);
        let end = if step < 0 { &mut from } else { &mut to };
        *end = end.saturating_add(step);
    }
    let to = to.saturating_add(1);
    Some((from.saturating_mul(element), to.saturating_mul(element)))
}
