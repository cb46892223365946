//! Whole tensors in host memory, as numbers that arithmetic can be done with.

use rote_plans::DType;

use rote_propagation::TensorMeta;

/// A tensor in host memory, elements in order.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// Element type and shape.
    pub meta: TensorMeta,
    /// The elements, with more precision than the element type may have.
    pub numbers: Numbers,
}

/// Elements by kind of number.
#[derive(Clone, Debug, PartialEq)]
pub enum Numbers {
    /// Floating point.
    Real(Vec<f64>),
    /// Real and imaginary parts.
    Complex(Vec<[f64; 2]>),
    /// Integers; truth values as 0 and 1.
    Whole(Vec<i64>),
}

/// What can be done with elements of a dtype.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Real,
    Complex,
    Whole,
    Truth,
}

/// The kind of a dtype that host tensors can have.
pub(super) fn kind(dtype: DType) -> Option<Kind> {
    Some(match dtype {
        DType::F16 | DType::BF16 | DType::F32 | DType::F64 => Kind::Real,
        DType::C64 | DType::C128 => Kind::Complex,
        DType::U8 | DType::I8 | DType::I16 | DType::I32 | DType::I64 => Kind::Whole,
        DType::BOOL => Kind::Truth,
        _ => return None,
    })
}

impl HostTensor {
    /// Reads the elements' little-endian bytes; `None` for a dtype without
    /// arithmetic here, or bytes that are not as many as the shape has.
    pub fn from_bytes(meta: TensorMeta, bytes: &[u8]) -> Option<Self> {
        let width = usize::try_from(meta.dtype.bytes()?).ok()?;
        if bytes.len() as u64 != meta.bytes() {
            return None;
        }
        let each = bytes.chunks_exact(width);
        let numbers = match meta.dtype {
            DType::U8 => Numbers::Whole(bytes.iter().map(|b| i64::from(*b)).collect()),
            DType::I8 => Numbers::Whole(bytes.iter().map(|b| i64::from(*b as i8)).collect()),
            DType::I16 => {
                Numbers::Whole(each.map(|b| i64::from(i16::from_le_bytes(of(b)))).collect())
            }
            DType::I32 => {
                Numbers::Whole(each.map(|b| i64::from(i32::from_le_bytes(of(b)))).collect())
            }
            DType::I64 => Numbers::Whole(each.map(|b| i64::from_le_bytes(of(b))).collect()),
            DType::F16 => {
                Numbers::Real(each.map(|b| from_f16(u16::from_le_bytes(of(b)))).collect())
            }
            DType::F32 => {
                Numbers::Real(each.map(|b| f64::from(f32::from_le_bytes(of(b)))).collect())
            }
            DType::F64 => Numbers::Real(each.map(|b| f64::from_le_bytes(of(b))).collect()),
            DType::C64 => Numbers::Complex(
                each.map(|b| {
                    let part = |at| f64::from(f32::from_le_bytes(of(&b[at..at + 4])));
                    [part(0), part(4)]
                })
                .collect(),
            ),
            DType::C128 => Numbers::Complex(
                each.map(|b| {
                    let part = |at| f64::from_le_bytes(of(&b[at..at + 8]));
                    [part(0), part(8)]
                })
                .collect(),
            ),
            DType::BOOL => Numbers::Whole(bytes.iter().map(|b| i64::from(*b != 0)).collect()),
            DType::BF16 => Numbers::Real(
                each.map(|b| {
                    let high = u32::from(u16::from_le_bytes(of(b)));
                    f64::from(f32::from_bits(high << 16))
                })
                .collect(),
            ),
            _ => return None,
        };
        Some(HostTensor { meta, numbers })
    }

    /// The elements' little-endian bytes, rounded to the element type; `None`
    /// for a dtype without arithmetic here.
    pub fn to_bytes(&self) -> Option<Vec<u8>> {
        let reals = |f: &dyn Fn(f64, &mut Vec<u8>)| match &self.numbers {
            Numbers::Real(x) => Some(x.iter().fold(Vec::new(), |mut bytes, x| {
                f(*x, &mut bytes);
                bytes
            })),
            _ => None,
        };
        let wholes = |f: &dyn Fn(i64, &mut Vec<u8>)| match &self.numbers {
            Numbers::Whole(x) => Some(x.iter().fold(Vec::new(), |mut bytes, x| {
                f(*x, &mut bytes);
                bytes
            })),
            _ => None,
        };
        match (self.meta.dtype, &self.numbers) {
            (DType::U8 | DType::I8, _) => wholes(&|x, b| b.push(x as u8)),
            (DType::I16, _) => wholes(&|x, b| b.extend((x as i16).to_le_bytes())),
            (DType::I32, _) => wholes(&|x, b| b.extend((x as i32).to_le_bytes())),
            (DType::I64, _) => wholes(&|x, b| b.extend(x.to_le_bytes())),
            (DType::BOOL, _) => wholes(&|x, b| b.push(u8::from(x != 0))),
            (DType::F16, _) => reals(&|x, b| b.extend(to_f16(x).to_le_bytes())),
            (DType::F32, _) => reals(&|x, b| b.extend((x as f32).to_le_bytes())),
            (DType::F64, _) => reals(&|x, b| b.extend(x.to_le_bytes())),
            (DType::BF16, _) => reals(&|x, b| b.extend(to_bf16(x).to_le_bytes())),
            (DType::C64, Numbers::Complex(x)) => {
                let parts = x.iter().flatten();
                Some(parts.flat_map(|x| (*x as f32).to_le_bytes()).collect())
            }
            (DType::C128, Numbers::Complex(x)) => {
                Some(x.iter().flatten().flat_map(|x| x.to_le_bytes()).collect())
            }
            _ => None,
        }
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        match &self.numbers {
            Numbers::Real(x) => x.len(),
            Numbers::Complex(x) => x.len(),
            Numbers::Whole(x) => x.len(),
        }
    }

    /// Whether there is no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The elements at these indices of each dim.
    pub(super) fn picked(&self, indices: &[Vec<u64>]) -> HostTensor {
        let mut flat = vec![0_usize];
        for (own, size) in indices.iter().zip(&self.meta.shape) {
            let step = |base: &usize| {
                let base = *base * *size as usize;
                own.iter().map(move |i| base + *i as usize)
            };
            flat = flat.iter().flat_map(step).collect();
        }
        let mut meta = self.meta.clone();
        meta.shape = indices.iter().map(|i| i.len() as u64).collect();
        let numbers = match &self.numbers {
            Numbers::Real(x) => Numbers::Real(flat.iter().map(|i| x[*i]).collect()),
            Numbers::Complex(x) => Numbers::Complex(flat.iter().map(|i| x[*i]).collect()),
            Numbers::Whole(x) => Numbers::Whole(flat.iter().map(|i| x[*i]).collect()),
        };
        HostTensor { meta, numbers }
    }

    /// Whether two elements differ.
    pub(super) fn varies(&self) -> bool {
        match &self.numbers {
            Numbers::Real(x) => x.windows(2).any(|w| w[0] != w[1]),
            Numbers::Complex(x) => x.windows(2).any(|w| w[0] != w[1]),
            Numbers::Whole(x) => x.windows(2).any(|w| w[0] != w[1]),
        }
    }

    /// Whether no element is NaN or infinite.
    pub(super) fn is_finite(&self) -> bool {
        match &self.numbers {
            Numbers::Real(x) => x.iter().all(|x| x.is_finite()),
            Numbers::Complex(x) => x.iter().flatten().all(|x| x.is_finite()),
            Numbers::Whole(_) => true,
        }
    }

    /// The largest finite magnitude.
    pub(super) fn scale(&self) -> f64 {
        let largest = |all: &mut dyn Iterator<Item = f64>| {
            all.map(f64::abs)
                .filter(|x| x.is_finite())
                .fold(0.0, f64::max)
        };
        match &self.numbers {
            Numbers::Real(x) => largest(&mut x.iter().copied()),
            Numbers::Complex(x) => largest(&mut x.iter().flatten().copied()),
            Numbers::Whole(_) => 0.0,
        }
    }

    /// Whether this is the other tensor: integers and truth values exactly,
    /// floats within what their dtype can hold of `scale` after a few hundred
    /// operations, or exactly without a scale; NaN and infinities equal.
    pub(super) fn equals(&self, other: &HostTensor, scale: Option<f64>) -> bool {
        if self.meta != other.meta {
            return false;
        }
        let (relative, absolute) = match (scale, self.meta.dtype) {
            (None, _) => (0.0, 0.0),
            (_, DType::F64 | DType::C128) => (1e-7, 1e-9),
            (_, DType::F32 | DType::C64) => (1e-3, 1e-4),
            (_, DType::BF16) => (5e-2, 5e-2),
            _ => (3e-2, 1e-2),
        };
        let scale = scale.unwrap_or(0.0);
        let close = |a: f64, b: f64| {
            let within = (a - b).abs() <= relative * b.abs() + absolute * scale;
            a == b || (a.is_nan() && b.is_nan()) || (a.is_finite() && b.is_finite() && within)
        };
        match (&self.numbers, &other.numbers) {
            (Numbers::Whole(a), Numbers::Whole(b)) => a == b,
            (Numbers::Real(a), Numbers::Real(b)) => a.iter().zip(b).all(|(a, b)| close(*a, *b)),
            (Numbers::Complex(a), Numbers::Complex(b)) => a
                .iter()
                .flatten()
                .zip(b.iter().flatten())
                .all(|(a, b)| close(*a, *b)),
            _ => false,
        }
    }
}

fn of<const N: usize>(bytes: &[u8]) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(bytes);
    out
}

fn from_f16(bits: u16) -> f64 {
    let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
    sign * match exponent {
        31 if mantissa == 0.0 => f64::INFINITY,
        31 => f64::NAN,
        0 => mantissa * 2_f64.powi(-24),
        e => (1024.0 + mantissa) * 2_f64.powi(e - 25),
    }
}

fn to_f16(x: f64) -> u16 {
    let sign = u16::from(x.is_sign_negative()) << 15;
    let size = x.abs();
    if x.is_nan() {
        return sign | 0x7e00;
    }
    if size >= 65520.0 {
        return sign | 0x7c00;
    }
    let exponent = (size.log2().floor() as i32).clamp(-14, 15);
    let steps = (size / 2_f64.powi(exponent - 10)).round_ties_even() as u16;
    match exponent {
        -14 if steps < 1024 => sign | steps,
        // One step too many carries into the exponent, as it should.
        e => sign | ((((e + 15) as u16) << 10) + (steps - 1024)),
    }
}

fn to_bf16(x: f64) -> u16 {
    let bits = (x as f32).to_bits();
    if x.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::*;

    #[test]
    fn bytes_read_back() {
        let reals = Numbers::Real(vec![0.0, -1.5, 1024.0, f64::INFINITY, 2_f64.powi(-20)]);
        let wholes = Numbers::Whole(vec![0, 1, 1, 0, 1]);
        let complex = Numbers::Complex(vec![[1.0, -2.0]; 5]);
        for (dtypes, numbers) in [
            (&[5, 6, 7, 15][..], reals),
            (&[0, 1, 2, 3, 4, 11], wholes),
            (&[9, 10], complex),
        ] {
            for dtype in dtypes {
                let meta = TensorMeta {
                    dtype: DType(*dtype),
                    shape: vec![5],
                };
                let tensor = HostTensor {
                    meta: meta.clone(),
                    numbers: numbers.clone(),
                };
                let bytes = tensor.to_bytes().unwrap();
                assert_eq!(
                    HostTensor::from_bytes(meta.clone(), &bytes).unwrap(),
                    tensor
                );
                assert_eq!(HostTensor::from_bytes(meta, &bytes[1..]), None);
            }
        }
    }

    #[test]
    fn halves_round_as_ieee_says() {
        // From IEEE 754: the largest half, the smallest, one and the next.
        for (x, bits) in [
            (65504.0, 0x7bff),
            (5.960_464_477_539_063e-8, 1),
            (1.0, 0x3c00),
        ] {
            assert_eq!(to_f16(x), bits);
            assert_eq!(from_f16(bits), x);
        }
        assert_eq!(to_f16(1.0 + 2_f64.powi(-11)), 0x3c00);
        assert_eq!(to_f16(2047.9), 0x6800);
        assert!(from_f16(to_f16(f64::NAN)).is_nan());
        assert_eq!(to_bf16(1.0), 0x3f80);
    }
}
