//! PyTorch's type promotion: the element type that an op on several tensors and
//! numbers computes in (`c10/core/ScalarType.cpp`,
//! `aten/src/ATen/native/TypeProperties.cpp`).

use rote_plans::DType;

use super::placement::PartialOp;
use super::rule::Arg;

/// What kind of numbers a type holds; a higher kind wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Class {
    Bool,
    Integer,
    Float,
    Complex,
}

pub(super) fn class(dtype: DType) -> Class {
    match dtype {
        DType::BOOL => Class::Bool,
        _ if dtype.is_integer() => Class::Integer,
        _ if dtype.is_complex() => Class::Complex,
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
    let unsigned = |d: DType| matches!(d, DType::U8 | DType::U16 | DType::U32 | DType::U64);
    let (a, b) = if width(a) < width(b) { (b, a) } else { (a, b) };
    if unsigned(a) == unsigned(b) || width(a) > width(b) && !unsigned(a) {
        return a;
    }
    // An unsigned type and a signed one no wider: the next wider signed one.
    match width(a) {
        1 => DType::I16,
        2 => DType::I32,
        _ => DType::I64,
    }
}

fn floats(a: DType, b: DType) -> DType {
    let (a, b) = if width(a) < width(b) { (b, a) } else { (a, b) };
    match width(a) == width(b) {
        // bf16 and f16 hold different values.
        true => DType::F32,
        false => a,
    }
}

fn complexes(a: DType, b: DType) -> DType {
    if width(a) < width(b) { b } else { a }
}

/// The complex type whose parts hold a float.
pub(super) fn complex_of(float: DType) -> DType {
    match float {
        DType::F16 => DType::C32,
        DType::F64 => DType::C128,
        _ => DType::C64,
    }
}

/// The type of the parts of a complex number; other types are their own.
pub(super) fn real(dtype: DType) -> DType {
    match dtype {
        DType::C32 => DType::F16,
        DType::C64 => DType::F32,
        DType::C128 => DType::F64,
        _ => dtype,
    }
}

/// Integers and truth values as floats, as sine and true division take them.
pub(super) fn float(dtype: DType) -> DType {
    if class(dtype) < Class::Float {
        DType::F32
    } else {
        dtype
    }
}

/// Double precision.
pub(super) fn double(dtype: DType) -> DType {
    if class(dtype) == Class::Complex {
        DType::C128
    } else {
        DType::F64
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
            Arg::Bool(_) => (2, DType::BOOL),
            Arg::Int(_) => (2, DType::I64),
            Arg::Float(_) => (2, DType::F32),
            Arg::Complex(..) => (2, DType::C64),
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
    if let PartialOp::Registered(_) = op {
        return false;
    }
    if let PartialOp::Norm(_) = op {
        return class(from) == Class::Float && class(to) == Class::Float;
    }
    let extremum = matches!(op, PartialOp::Max | PartialOp::Min);
    match (class(from), class(to)) {
        (_, Class::Bool) => false,
        (Class::Bool, _) => extremum,
        (Class::Integer, Class::Integer) if extremum => promote(from, to) == to,
        (Class::Float | Class::Complex, Class::Integer) => extremum && to == DType::I64,
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
