//! Random tensors: the whole inputs of an op.

use crate::samples::Values;
use rote_propagation::TensorMeta;

use super::host::{HostTensor, Kind, Numbers, kind};

/// A generator of random numbers (splitmix64), the same on every machine.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    /// A generator whose numbers follow from all of these.
    pub(super) fn new(seeds: &[u64]) -> Self {
        let mut rng = Rng(0x5265_7465);
        for seed in seeds {
            rng.0 = rng.word() ^ seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
        rng
    }

    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Between 0 and 1, neither reached.
    pub(super) fn unit(&mut self) -> f64 {
        ((self.word() >> 12) as f64 + 0.5) / (1_u64 << 52) as f64
    }

    /// From 0 up to a bound, not reached.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.word() % bound.max(1)
    }

    /// Normal, of mean 0 and deviation 1.
    pub(super) fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// 1 or -1.
    pub(super) fn sign(&mut self) -> f64 {
        if self.word() >> 63 == 0 { 1.0 } else { -1.0 }
    }

    /// The numbers from 0 in some order.
    pub(super) fn order(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<_> = (0..count).collect();
        for i in (1..count).rev() {
            order.swap(i, self.below(i as u64 + 1) as usize);
        }
        order
    }
}

/// A tensor with such values; `None` for a dtype without arithmetic here.
/// `negated`: unconstrained floats with their signs turned.
pub(super) fn whole(
    meta: &TensorMeta,
    values: Values,
    rng: &mut Rng,
    negated: bool,
) -> Option<HostTensor> {
    let count = meta.shape.iter().product::<u64>() as usize;
    let last = meta.shape.last().copied().unwrap_or(1).max(1) as usize;
    let turn = if negated { -1.0 } else { 1.0 };
    let kind = kind(meta.dtype)?;
    let real = |rng: &mut Rng| match values {
        Values::Positive => (0.7 * rng.normal()).exp(),
        Values::Unit => 0.05 + 0.9 * rng.unit(),
        _ => turn * rng.normal(),
    };
    let numbers = match (kind, values) {
        (_, Values::PositiveDefinite | Values::Lower | Values::Upper) => {
            matrices(meta, kind, values, rng)?
        }
        (Kind::Real, Values::Sorted) => {
            let mut x: Vec<f64> = (0..count).map(|_| rng.normal()).collect();
            x.chunks_mut(last)
                .for_each(|row| row.sort_by(f64::total_cmp));
            Numbers::Real(x)
        }
        (Kind::Real, _) => Numbers::Real((0..count).map(|_| real(rng)).collect()),
        (Kind::Complex, _) => {
            Numbers::Complex((0..count).map(|_| [real(rng), real(rng)]).collect())
        }
        (Kind::Truth, _) => Numbers::Whole((0..count).map(|_| rng.below(2) as i64).collect()),
        (Kind::Whole, Values::Below(bound)) => {
            let bound = bound.max(1) as u64;
            Numbers::Whole((0..count).map(|_| rng.below(bound) as i64).collect())
        }
        (Kind::Whole, Values::Permutation) => {
            let rows = (0..count / last).flat_map(|_| rng.order(last));
            Numbers::Whole(rows.map(|i| i as i64).collect())
        }
        (Kind::Whole, _) => {
            let mut x: Vec<_> = (0..count).map(|_| 1 + rng.below(4) as i64).collect();
            if values == Values::Sorted {
                x.chunks_mut(last).for_each(<[i64]>::sort_unstable);
            }
            Numbers::Whole(x)
        }
    };
    Some(HostTensor {
        meta: meta.clone(),
        numbers,
    })
}

/// Matrices in the last two dims, well conditioned.
fn matrices(meta: &TensorMeta, kind: Kind, values: Values, rng: &mut Rng) -> Option<Numbers> {
    let [.., n, m] = *meta.shape.as_slice() else {
        return None;
    };
    if n != m {
        return None;
    }
    let n = n as usize;
    let count = meta.shape[..meta.shape.len() - 2].iter().product::<u64>() as usize;
    let imaginary = f64::from(u8::from(kind == Kind::Complex));
    let mut all: Vec<[f64; 2]> = Vec::with_capacity(count * n * n);
    for _ in 0..count {
        let a: Vec<[f64; 2]> = (0..n * n)
            .map(|_| [rng.normal(), imaginary * rng.normal()])
            .collect();
        for i in 0..n {
            for j in 0..n {
                all.push(match values {
                    Values::PositiveDefinite => {
                        let mut sum = [if i == j { n as f64 } else { 0.0 }, 0.0];
                        for k in 0..n {
                            let ([x, y], [u, v]) = (a[i * n + k], a[j * n + k]);
                            sum[0] += x * u + y * v;
                            sum[1] += y * u - x * v;
                        }
                        sum
                    }
                    _ if i == j => [1.5 + a[i * n + i][0].abs(), 0.0],
                    Values::Lower if i > j => a[i * n + j].map(|x| 0.4 * x),
                    Values::Upper if i < j => a[i * n + j].map(|x| 0.4 * x),
                    _ => [0.0, 0.0],
                });
            }
        }
    }
    Some(match kind {
        Kind::Real => Numbers::Real(all.into_iter().map(|x| x[0]).collect()),
        Kind::Complex => Numbers::Complex(all),
        Kind::Whole | Kind::Truth => return None,
    })
}

/// Rounds unconstrained floats, so that some are equal, and some zero.
pub(super) fn make_rounded(tensor: &mut HostTensor, values: Values) {
    if let (Numbers::Real(x), Values::Any) = (&mut tensor.numbers, values) {
        x.iter_mut().for_each(|x| *x = x.round());
    }
}

/// Turns unconstrained floats into what norms can be.
pub(super) fn make_non_negative(tensor: &mut HostTensor, values: Values) {
    if let (Numbers::Real(x), Values::Any) = (&mut tensor.numbers, values) {
        x.iter_mut().for_each(|x| *x = x.abs());
    }
}

/// Puts NaN and infinities at a few places of unconstrained floats.
pub(super) fn make_special(tensor: &mut HostTensor, values: Values, rng: &mut Rng) {
    if let (Numbers::Real(x), Values::Any) = (&mut tensor.numbers, values) {
        for special in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -0.0] {
            let at = rng.below(x.len() as u64) as usize;
            if let Some(x) = x.get_mut(at) {
                *x = special;
            }
        }
    }
}
