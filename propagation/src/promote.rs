//! PyTorch's type promotion: the element type that an op on several tensors and
//! numbers computes in (`c10/core/ScalarType.cpp`,
//! `aten/src/ATen/native/TypeProperties.cpp`).

use rote_plans::DType;

use super::placement::PartialOp;
use super::rule::Arg;

/// Truth values.
pub(super) const BOOL: DType = DType(11);
/// The integers of indices and sizes.
pub(super) const I64: DType = DType(4);
/// The floats that integers become.
pub(super) const F32: DType = DType(6);
const I32: DType = DType(3);
const F64: DType = DType(7);
const C64: DType = DType(9);
const C128: DType = DType(10);

/// What kind of numbers a type holds; a higher kind wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Bool,
    Integer,
    Float,
    Complex,
}

pub(super) fn class(dtype: DType) -> Class {
    match dtype.0 {
        11 => Class::Bool,
        0..=4 | 27..=29 => Class::Integer,
        8..=10 => Class::Complex,
        _ => Class::Float,
    }
}

/// The smallest type that holds the values of both.
pub(super) fn promote(a: DType, b: DType) -> DType {
    if a == b {
        return a;
    }
    let (low, high) = if class(a) < class(b) { (a, b) } else { (b, a) };
    match (class(low), class(high)) {
        (Class::Integer, Class::Integer) => integers(low, high),
        (Class::Float, Class::Float) => floats(low, high),
        (Class::Float, Class::Complex) => complexes(complex_of(low), high),
        (Class::Complex, Class::Complex) => complexes(low, high),
        _ => high,
    }
}

fn width(dtype: DType) -> u64 {
    dtype.bytes().unwrap_or(1)
}

fn integers(a: DType, b: DType) -> DType {
    let unsigned = |d: DType| matches!(d.0, 0 | 27..=29);
    let (a, b) = if width(a) < width(b) { (b, a) } else { (a, b) };
    if unsigned(a) == unsigned(b) || width(a) > width(b) && !unsigned(a) {
        return a;
    }
    // An unsigned type and a signed one no wider: the next wider signed one.
    match width(a) {
        1 => DType(2),
        2 => I32,
        _ => I64,
    }
}

fn floats(a: DType, b: DType) -> DType {
    let (a, b) = if width(a) < width(b) { (b, a) } else { (a, b) };
    match width(a) == width(b) {
        // bf16 and f16 hold different values.
        true => F32,
        false => a,
    }
}

fn complexes(a: DType, b: DType) -> DType {
    if width(a) < width(b) { b } else { a }
}

/// The complex type whose parts hold a float.
pub(super) fn complex_of(float: DType) -> DType {
    match float.0 {
        5 => DType(8),
        7 => C128,
        _ => C64,
    }
}

/// The type of the parts of a complex number; other types are their own.
pub(super) fn real(dtype: DType) -> DType {
    match dtype.0 {
        8 => DType(5),
        9 => F32,
        10 => F64,
        _ => dtype,
    }
}

/// Integers and truth values as floats, as sine and true division take them.
pub(super) fn float(dtype: DType) -> DType {
    if class(dtype) < Class::Float {
        F32
    } else {
        dtype
    }
}

/// Double precision.
pub(super) fn double(dtype: DType) -> DType {
    if class(dtype) == Class::Complex {
        C128
    } else {
        F64
    }
}

/// The type that an op computes in: tensors with dims decide, then tensors
/// without, then numbers, where a lower rank counts only if its kind is higher.
pub(super) fn result<'a>(args: impl IntoIterator<Item = &'a Arg>) -> Option<DType> {
    let mut ranks: [Option<DType>; 3] = [None; 3];
    for arg in args {
        let (rank, dtype) = match arg {
            Arg::Tensor(spec) => match &spec.meta {
                Some(meta) => (usize::from(meta.shape.is_empty()), meta.dtype),
                None => continue,
            },
            Arg::Bool(_) => (2, BOOL),
            Arg::Int(_) => (2, I64),
            Arg::Float(_) => (2, F32),
            _ => continue,
        };
        let known = &mut ranks[rank];
        *known = Some(known.map_or(dtype, |known| promote(known, dtype)));
    }
    ranks.into_iter().flatten().reduce(|high, low| {
        if class(low) <= class(high) {
            return high;
        }
        // The kind of the lower rank, no wider than the higher rank asks.
        match (class(high), class(low)) {
            (Class::Float, Class::Complex) => complex_of(high),
            _ => low,
        }
    })
}

/// Whether casting the pieces and then combining them is casting the whole
/// (`_partial_needs_reduce_for_dtype_cast` in `_ops/_tensor_ops.py`, where
/// integers that wrap around and truth values are let pass).
pub(super) fn commutes(op: PartialOp, from: DType, to: DType) -> bool {
    if from == to {
        return true;
    }
    if let PartialOp::Norm(_) = op {
        return class(from) == Class::Float && class(to) == Class::Float;
    }
    let extremum = matches!(op, PartialOp::Max | PartialOp::Min);
    match (class(from), class(to)) {
        (_, Class::Bool) => false,
        (Class::Bool, _) => extremum,
        (Class::Integer, Class::Integer) if extremum => promote(from, to) == to,
        (Class::Float | Class::Complex, Class::Integer) => extremum && to == I64,
        (Class::Complex, Class::Complex) | (Class::Integer | Class::Float, Class::Complex) => {
            !extremum
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(a: &str, b: &str) -> Option<&'static str> {
        promote(DType::from_name(a)?, DType::from_name(b)?).name()
    }

    /// Against `torch.promote_types`.
    #[test]
    fn types_promote_as_in_torch() {
        for (a, b, both) in [
            ("u8", "i8", "i16"),
            ("i8", "u8", "i16"),
            ("u8", "i16", "i16"),
            ("u8", "i64", "i64"),
            ("bool", "u8", "u8"),
            ("i64", "f16", "f16"),
            ("f16", "bf16", "f32"),
            ("bf16", "f32", "f32"),
            ("f64", "f32", "f64"),
            ("c64", "f64", "c128"),
            ("c64", "f32", "c64"),
            ("c32", "f16", "c32"),
            ("c32", "f32", "c64"),
            ("c64", "i64", "c64"),
            ("c64", "c128", "c128"),
        ] {
            assert_eq!(names(a, b), Some(both), "{a} {b}");
            assert_eq!(names(b, a), Some(both), "{b} {a}");
        }
    }
}
