//! Floats that Python computes from an optimizer's hyperparameters, and from numbers that
//! it reads from tensors of the state, followed while a step is recorded.
//!
//! A replay computes all of them before its first instruction. So of a tensor that the step
//! writes before it reads it, as optimizers do with their step counters, the write is
//! followed too ([`crate::contents`]).
//!
//! A recorded op has the value of each number among its arguments, but not the
//! source of the number. So each number keeps every source that fits: a number
//! written in the program, if it was the same in all recordings, and each
//! followed float that had this value in all recordings. A replay computes all
//! sources. If they differ, one of them is wrong, and the call must run eagerly.
//! This also covers a product that was rounded away at first.

use hashbrown::HashMap;
use rote_plans::{Comparison, NONE, Scalar};

/// The source of a number that is written in the program.
pub const AS_WRITTEN: u32 = u32::MAX;

/// How a followed float came about. Operands are indices of earlier ones.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Origin {
    /// Read from the state under this path.
    Read(String),
    /// The number in the tensor of the state under this path, before the step.
    Tensor(String),
    /// A plain number that took part in the arithmetic.
    Const(u64),
    /// Negation.
    Neg(u32),
    /// Sum.
    Add(u32, u32),
    /// Difference.
    Sub(u32, u32),
    /// Product.
    Mul(u32, u32),
    /// Quotient.
    Div(u32, u32),
    /// Power.
    Pow(u32, u32),
    /// Rounded to single precision.
    Round(u32),
    /// The first one, which the second one must equal: the number may be either.
    Same(u32, u32),
    /// A number among an op's arguments, which was taken for this float because they are equal.
    Taken(u32),
}

impl Origin {
    /// Indices of the floats it is computed from.
    fn operands(&self) -> impl Iterator<Item = u32> {
        let (a, b) = match *self {
            Origin::Read(_) | Origin::Tensor(_) | Origin::Const(_) => (None, None),
            Origin::Neg(a) | Origin::Round(a) | Origin::Taken(a) => (Some(a), None),
            Origin::Add(a, b)
            | Origin::Sub(a, b)
            | Origin::Mul(a, b)
            | Origin::Div(a, b)
            | Origin::Pow(a, b)
            | Origin::Same(a, b) => (Some(a), Some(b)),
        };
        a.into_iter().chain(b)
    }

    /// The same of other operands; `None` if one has no other.
    fn with_operands(&self, of: impl Fn(u32) -> Option<u32>) -> Option<Origin> {
        Some(match *self {
            Origin::Read(_) | Origin::Tensor(_) | Origin::Const(_) => self.clone(),
            Origin::Neg(a) => Origin::Neg(of(a)?),
            Origin::Add(a, b) => Origin::Add(of(a)?, of(b)?),
            Origin::Sub(a, b) => Origin::Sub(of(a)?, of(b)?),
            Origin::Mul(a, b) => Origin::Mul(of(a)?, of(b)?),
            Origin::Div(a, b) => Origin::Div(of(a)?, of(b)?),
            Origin::Pow(a, b) => Origin::Pow(of(a)?, of(b)?),
            Origin::Round(a) => Origin::Round(of(a)?),
            Origin::Same(a, b) => Origin::Same(of(a)?, of(b)?),
            Origin::Taken(a) => Origin::Taken(of(a)?),
        })
    }

    /// Whether it is found and not computed.
    fn is_read(&self) -> bool {
        matches!(self, Origin::Read(_) | Origin::Tensor(_))
    }

    /// Its value, where the floats before it have these; none where Python
    /// raises, and for what is not computed.
    fn computed(&self, values: &[f64]) -> Option<f64> {
        let of = |index: u32| values[index as usize];
        match *self {
            Origin::Read(_) | Origin::Tensor(_) => None,
            Origin::Const(bits) => Some(f64::from_bits(bits)),
            Origin::Neg(a) => Some(-of(a)),
            Origin::Add(a, b) => Some(of(a) + of(b)),
            Origin::Sub(a, b) => Some(of(a) - of(b)),
            Origin::Mul(a, b) => Some(of(a) * of(b)),
            Origin::Div(a, b) => quotient(of(a), of(b)),
            Origin::Pow(a, b) => power(of(a), of(b)),
            Origin::Round(a) => Some(rounded(of(a))),
            Origin::Taken(a) => Some(of(a)),
            Origin::Same(a, b) => (of(a).to_bits() == of(b).to_bits()).then(|| of(a)),
        }
    }
}

/// A float in single precision. Sums, differences, products and quotients of such floats, computed in
/// double precision and then rounded, are those of single precision (Figueroa, When is double rounding
/// innocuous?, 1995).
fn rounded(a: f64) -> f64 {
    f64::from(a as f32)
}

/// `a / b`, where Python does not raise.
fn quotient(a: f64, b: f64) -> Option<f64> {
    (b != 0.0).then(|| a / b)
}

/// `a ** b`, where Python neither raises nor gives a complex number. Its own
/// answers for NaN are left to it.
fn power(a: f64, b: f64) -> Option<f64> {
    let unfit = a.is_nan()
        || b.is_nan()
        || (a == 0.0 && b < 0.0)
        || (a < 0.0 && a.is_finite() && b.is_finite() && b.fract() != 0.0);
    let value = if unfit { return None } else { a.powf(b) };
    let overflows = value.is_infinite() && a.is_finite() && b.is_finite();
    (!overflows).then_some(value)
}

/// A float is said to follow from one that is not followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("float {index} is not followed: there are {known} so far")]
pub struct UnknownFloat {
    /// The operand.
    pub index: u32,
    /// How many floats are followed.
    pub known: usize,
}

/// A comparison of two followed floats by which the step has decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Compared {
    how: Comparison,
    a: u32,
    b: u32,
    holds: bool,
}

/// The floats followed in one recording, in the order they came about.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedFloats {
    origins: Vec<Origin>,
    /// Where each origin is in `origins`.
    known: HashMap<Origin, u32>,
    values: Vec<f64>,
    /// Of each float, whether it depends on anything that is read, and on a tensor.
    depends: Vec<[bool; 2]>,
    /// Of each float, whether the program has it: others are only in tensors.
    on_host: Vec<bool>,
    /// What is read and whose value decided a branch, or left Python's floats.
    pinned: Vec<u32>,
    /// Comparisons by which the step decided.
    compared: Vec<Compared>,
    /// Floats that the step has read from tensors that it had written.
    read_again: Vec<u32>,
}

impl TracedFloats {
    /// Adds a float that the program has; the same origin twice is one float. Returns its index.
    pub fn add(&mut self, origin: Origin, value: f64) -> Result<u32, UnknownFloat> {
        let index = self.insert(origin, value)?;
        self.on_host[index as usize] = true;
        Ok(index)
    }

    /// The number that a tensor of the state has before the step, or its index if it is known.
    pub fn held(&mut self, path: &str, value: f64) -> Option<u32> {
        self.insert(Origin::Tensor(path.to_owned()), value).ok()
    }

    fn insert(&mut self, origin: Origin, value: f64) -> Result<u32, UnknownFloat> {
        if let Some(index) = self.known.get(&origin) {
            return Ok(*index);
        }
        origin.operands().try_for_each(|index| self.check(index))?;
        let computed = origin.computed(&self.values);
        let ours = origin.is_read()
            || computed.is_some_and(|computed| computed.to_bits() == value.to_bits());
        let mut depends = [origin.is_read(), matches!(origin, Origin::Tensor(_))];
        for operand in origin.operands() {
            let of = self.depends[operand as usize];
            depends = [depends[0] || of[0], depends[1] || of[1]];
        }
        let index = self.origins.len() as u32;
        self.known.insert(origin.clone(), index);
        self.origins.push(origin);
        self.values.push(value);
        self.depends.push(depends);
        self.on_host.push(false);
        if !ours {
            self.pin(index)?; // what Python computed, a replay would not
        }
        Ok(index)
    }

    /// Adds a float that an op computes in a tensor from those before it. Returns its index; none where a replay
    /// would not compute it.
    pub fn computed(&mut self, origin: Origin) -> Option<u32> {
        let value = origin.computed(&self.values)?;
        self.insert(origin, value).ok()
    }

    /// A number among an op's arguments: the followed float that it is, of those that depend on a tensor. It may
    /// be any of several that are equal; a replay sees whether they still are. `None` if it is none of them. If it
    /// equals a hyperparameter it may still be written in the program: a constant that must equal it.
    pub fn number(&mut self, value: f64) -> Option<u32> {
        let all: Vec<u32> = self.valued(value).collect();
        let (of_tensors, others): (Vec<u32>, Vec<u32>) =
            (all.iter()).partition(|index| self.depends[**index as usize][1]);
        let (first, rest) = match of_tensors.split_first() {
            Some((first, rest)) => (self.computed(Origin::Taken(*first))?, rest),
            None => (self.computed(Origin::Const(value.to_bits()))?, &others[..]),
        };
        (rest.iter()).try_fold(first, |all, other| self.computed(Origin::Same(all, *other)))
    }

    /// The program reads a float from a tensor that it may have written.
    pub fn read_again(&mut self, index: u32) {
        self.on_host[index as usize] = true;
        if !self.read_again.contains(&index) {
            self.read_again.push(index);
        }
    }

    /// Whether two recordings leave open whether a number that was taken for a followed float, written to a tensor and
    /// read from there, is that float: it was the same in both.
    pub fn is_unproven(&self, other: &TracedFloats) -> bool {
        let aligned = self.aligned(other);
        let mut used = vec![false; self.origins.len()];
        for &index in &self.read_again {
            used[index as usize] = true;
        }
        (0..self.origins.len()).rev().any(|i| {
            if !used[i] {
                return false;
            }
            let origin = &self.origins[i];
            for operand in origin.operands() {
                used[operand as usize] = true;
            }
            let differs = aligned[i].is_some_and(|there| !other.has_value(there, self.values[i]));
            matches!(origin, Origin::Taken(_)) && !differs
        })
    }

    /// Adds a comparison by which the step decides: a replay must find the same.
    pub fn compare(
        &mut self,
        how: Comparison,
        a: u32,
        b: u32,
        holds: bool,
    ) -> Result<(), UnknownFloat> {
        self.check(a)?;
        self.check(b)?;
        if how.of(self.values[a as usize], self.values[b as usize]) != holds {
            self.pin(a)?; // what Python compared, a replay would not
            self.pin(b)?;
        }
        let compared = Compared { how, a, b, holds };
        if !self.compared.contains(&compared) {
            self.compared.push(compared);
        }
        Ok(())
    }

    /// Whether comparisons had the same outcomes in another recording.
    pub fn decides_as(&self, other: &TracedFloats) -> bool {
        let aligned = self.aligned(other);
        let there = |compared: &Compared| {
            let (a, b) = (aligned[compared.a as usize]?, aligned[compared.b as usize]?);
            Some(Compared { a, b, ..*compared })
        };
        let ours = self.compared.iter().map(there);
        ours.eq(other.compared.iter().copied().map(Some))
    }

    /// Whether something looked at a number in a tensor in a way that no replay can repeat.
    pub fn pins_a_tensor(&self) -> bool {
        (self.pinned.iter()).any(|&index| self.depends[index as usize][1])
    }

    /// The number that a tensor of the state held before the step, if the step has read it.
    pub fn in_tensor(&self, path: &str) -> Option<f64> {
        let index = self.known.get(&Origin::Tensor(path.to_owned()))?;
        Some(self.values[*index as usize])
    }

    /// The value of a float.
    pub fn value(&self, index: u32) -> Option<f64> {
        self.values.get(index as usize).copied()
    }

    fn check(&self, index: u32) -> Result<(), UnknownFloat> {
        let known = self.origins.len();
        if (index as usize) < known {
            Ok(())
        } else {
            Err(UnknownFloat { index, known })
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.origins.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.origins.is_empty()
    }

    /// The program depends on more than the arithmetic of this float: it was
    /// compared or converted.
    pub fn pin(&mut self, index: u32) -> Result<(), UnknownFloat> {
        self.check(index)?;
        for read in self.reads(index) {
            if !self.pinned.contains(&read) {
                self.pinned.push(read);
            }
        }
        Ok(())
    }

    /// Whether a hyperparameter is followed, and nothing pins it.
    pub fn is_loose(&self, path: &str) -> bool {
        (0_u32..).zip(&self.origins).any(|(i, origin)| {
            matches!(origin, Origin::Read(read) if read == path) && !self.pinned.contains(&i)
        })
    }

    /// The floats that the program has and that depend on something that is read, by the bits of their values: those
    /// that it can give to an op.
    pub fn by_value(&self) -> HashMap<u64, Vec<u32>> {
        let mut found: HashMap<u64, Vec<u32>> = HashMap::new();
        for (i, value) in (0_u32..).zip(&self.values) {
            if self.depends[i as usize][0] && self.on_host[i as usize] {
                found.entry(value.to_bits()).or_default().push(i);
            }
        }
        found
    }

    /// The floats that the program has and that depend on something that is read, and have this value.
    fn valued(&self, value: f64) -> impl Iterator<Item = u32> {
        (0_u32..)
            .zip(&self.values)
            .filter(move |(_, own)| own.to_bits() == value.to_bits())
            .map(|(i, _)| i)
            .filter(|&i| self.depends[i as usize][0] && self.on_host[i as usize])
    }

    /// Whether a float has this value.
    pub fn has_value(&self, index: u32, value: f64) -> bool {
        (self.values.get(index as usize)).is_some_and(|own| own.to_bits() == value.to_bits())
    }

    /// For each float, the one that came about in `other` as it did here.
    pub fn aligned(&self, other: &TracedFloats) -> Vec<Option<u32>> {
        let mut aligned: Vec<Option<u32>> = Vec::with_capacity(self.origins.len());
        for origin in &self.origins {
            let there = origin.with_operands(|operand| aligned[operand as usize]);
            aligned.push(there.and_then(|origin| other.known.get(&origin).copied()));
        }
        aligned
    }

    /// Paths of hyperparameters that differ from `other` and that nothing
    /// pins, in either recording.
    pub fn free(&self, other: &TracedFloats) -> Vec<String> {
        let differs = |(i, origin): (usize, &Origin)| {
            let Origin::Read(path) = origin else {
                return None;
            };
            let there = *other.known.get(origin)?;
            let pinned = self.pinned.contains(&(i as u32)) || other.pinned.contains(&there);
            let same = self.values[i].to_bits() == other.values[there as usize].to_bits();
            (!pinned && !same).then(|| path.clone())
        };
        self.origins
            .iter()
            .enumerate()
            .filter_map(differs)
            .collect()
    }

    /// Indices of what is read and a float depends on.
    fn reads(&self, index: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut seen = vec![false; index as usize + 1];
        let mut open = vec![index];
        while let Some(i) = open.pop() {
            if std::mem::replace(&mut seen[i as usize], true) {
                continue;
            }
            let origin = &self.origins[i as usize];
            if origin.is_read() {
                found.push(i);
            }
            open.extend(origin.operands());
        }
        found
    }

    /// Of each float, whether it depends on a tensor or on one of these hyperparameters.
    fn varying(&self, free: &[String]) -> Vec<bool> {
        let mut varying: Vec<bool> = Vec::with_capacity(self.origins.len());
        for origin in &self.origins {
            varying.push(match origin {
                Origin::Read(path) => free.contains(path),
                Origin::Tensor(_) => true,
                computed => computed.operands().any(|operand| varying[operand as usize]),
            });
        }
        varying
    }

    /// The scalars of a plan that computes `numbers`, each given as its value
    /// and its sources, where `free` hyperparameters and tensors vary, all arithmetic on
    /// these at which Python may raise, and all comparisons of them; and where each of the
    /// numbers is found, if it varies. Other hyperparameters are guarded, and constants
    /// here. `path` interns a path.
    pub fn scalars(
        &self,
        numbers: &[(f64, Vec<u32>)],
        free: &[String],
        mut path: impl FnMut(&str) -> u32,
    ) -> (Vec<Scalar>, Vec<Option<u32>>) {
        let varies = self.varying(free);
        let varying: Vec<Vec<u32>> = numbers
            .iter()
            .map(|(_, sources)| {
                let mut varying = sources.clone();
                varying.retain(|&source| source != AS_WRITTEN && varies[source as usize]);
                varying
            })
            .collect();
        let mut needed = vec![false; self.origins.len()];
        for &index in varying.iter().flatten() {
            needed[index as usize] = true;
        }
        let compared = (self.compared.iter())
            .filter(|compared| varies[compared.a as usize] || varies[compared.b as usize]);
        for compared in compared.clone() {
            needed[compared.a as usize] = true;
            needed[compared.b as usize] = true;
        }
        for (i, origin) in self.origins.iter().enumerate() {
            // Python may raise here, whatever becomes of the value.
            let raises = matches!(origin, Origin::Div(..) | Origin::Pow(..));
            needed[i] |= raises && varies[i];
        }
        for i in (0..self.origins.len()).rev() {
            if !needed[i] || !varies[i] {
                continue;
            }
            for operand in self.origins[i].operands() {
                needed[operand as usize] = true;
            }
        }
        let mut scalars = Vec::new();
        let mut at: HashMap<u32, u32> = HashMap::new();
        for (i, origin) in self.origins.iter().enumerate().filter(|&(i, _)| needed[i]) {
            let of = |index: &u32| at.get(index).copied().unwrap_or(NONE);
            let scalar = match origin {
                _ if !varies[i] => Scalar::Const(self.values[i]),
                Origin::Read(name) => Scalar::Read { path: path(name) },
                Origin::Tensor(name) => Scalar::Tensor { path: path(name) },
                Origin::Const(bits) => Scalar::Const(f64::from_bits(*bits)),
                Origin::Neg(a) => Scalar::Neg(of(a)),
                Origin::Add(a, b) => Scalar::Add(of(a), of(b)),
                Origin::Sub(a, b) => Scalar::Sub(of(a), of(b)),
                Origin::Mul(a, b) => Scalar::Mul(of(a), of(b)),
                Origin::Div(a, b) => Scalar::Div(of(a), of(b)),
                Origin::Pow(a, b) => Scalar::Pow(of(a), of(b)),
                Origin::Round(a) => Scalar::Round(of(a)),
                Origin::Same(a, b) => Scalar::Same(of(a), of(b)),
                Origin::Taken(a) => {
                    let same = of(a);
                    at.insert(i as u32, same);
                    continue;
                }
            };
            at.insert(i as u32, scalars.len() as u32);
            scalars.push(scalar);
        }
        scalars.extend(compared.map(|&Compared { how, a, b, holds }| {
            let [a, b] = [a, b].map(|operand| at[&operand]);
            Scalar::Compared { how, a, b, holds }
        }));
        let mut known: HashMap<(u64, &[u32], bool), u32> = HashMap::new();
        let mut found = Vec::new();
        for ((value, sources), varying) in numbers.iter().zip(&varying) {
            // Where a source does not vary, the number may be one that does not.
            let fixed = varying.len() < sources.len();
            let key = (value.to_bits(), varying.as_slice(), fixed);
            if varying.is_empty() || known.contains_key(&key) {
                found.push(known.get(&key).copied());
                continue;
            }
            let mut add = |scalar| {
                scalars.push(scalar);
                scalars.len() as u32 - 1
            };
            let mut parts = varying.iter().map(|source| at[source]);
            let first = if fixed {
                add(Scalar::Const(*value))
            } else {
                parts.next().unwrap_or(NONE)
            };
            let number = parts.fold(first, |all, part| add(Scalar::Same(all, part)));
            known.insert(key, number);
            found.push(Some(number));
        }
        (scalars, found)
    }
}

/// Computes the scalars of a plan into `values`, in place of what it held.
/// `read` gives the value now of a hyperparameter, or of the number in a tensor. Where
/// Python would raise, the sources of a number do not agree, or a comparison has another
/// outcome, the plan does not apply: the error is the scalar at which this shows.
pub fn evaluate(
    scalars: &[Scalar],
    values: &mut Vec<f64>,
    mut read: impl FnMut(usize) -> f64,
) -> Result<(), usize> {
    values.clear();
    let mut powers = Powers::default();
    for (i, scalar) in scalars.iter().enumerate() {
        let of = |index: u32| values[index as usize];
        let value = match *scalar {
            Scalar::Read { .. } | Scalar::Tensor { .. } => Some(read(i)),
            Scalar::Const(value) => Some(value),
            Scalar::Neg(a) => Some(-of(a)),
            Scalar::Add(a, b) => Some(of(a) + of(b)),
            Scalar::Sub(a, b) => Some(of(a) - of(b)),
            Scalar::Mul(a, b) => Some(of(a) * of(b)),
            Scalar::Div(a, b) => quotient(of(a), of(b)),
            Scalar::Pow(a, b) => powers.power(of(a), of(b)),
            Scalar::Same(a, b) => (of(a).to_bits() == of(b).to_bits()).then(|| of(a)),
            Scalar::Round(a) => Some(rounded(of(a))),
            Scalar::Compared { how, a, b, holds } => (how.of(of(a), of(b)) == holds).then(|| of(a)),
        };
        values.push(value.ok_or(i)?);
    }
    Ok(())
}

/// The last powers: an optimizer raises its betas to the same step count for every parameter, and takes a root of one.
#[derive(Default)]
struct Powers {
    last: [Option<(u64, u64, f64)>; 4],
    next: usize,
}

impl Powers {
    /// As [`power`].
    fn power(&mut self, base: f64, exponent: f64) -> Option<f64> {
        let (a, b) = (base.to_bits(), exponent.to_bits());
        if let Some(&(_, _, value)) = self
            .last
            .iter()
            .flatten()
            .find(|known| (known.0, known.1) == (a, b))
        {
            return Some(value);
        }
        let value = power(base, exponent)?;
        self.last[self.next] = Some((a, b, value));
        self.next = (self.next + 1) % self.last.len();
        Some(value)
    }
}

/// A hyperparameter or a tensor that a scalar depends on: the index of its `Read` or `Tensor`.
pub fn read_behind(scalars: &[Scalar], scalar: usize) -> Option<usize> {
    let mut open = vec![scalar];
    while let Some(i) = open.pop() {
        match scalars[i] {
            Scalar::Read { .. } | Scalar::Tensor { .. } => return Some(i),
            Scalar::Const(_) => {}
            Scalar::Neg(a) | Scalar::Round(a) => open.push(a as usize),
            Scalar::Add(a, b)
            | Scalar::Sub(a, b)
            | Scalar::Mul(a, b)
            | Scalar::Div(a, b)
            | Scalar::Pow(a, b)
            | Scalar::Same(a, b)
            | Scalar::Compared { a, b, .. } => open.extend([a as usize, b as usize]),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    const FREE: [&str; 2] = ["opt.lr", "opt.beta"];

    fn free() -> Vec<String> {
        FREE.map(str::to_owned).into()
    }

    fn read(name: &str) -> Origin {
        Origin::Read(name.to_owned())
    }

    /// AdamW's step size, `-lr / (1 - beta ** t)`, and what it is made of.
    fn step_size(lr: f64, beta: f64, t: f64) -> (TracedFloats, u32, f64) {
        let mut floats = TracedFloats::default();
        let mut add = |origin, value| floats.add(origin, value).expect("known");
        let lr_read = add(read("opt.lr"), lr);
        let beta_read = add(read("opt.beta"), beta);
        let t_const = add(Origin::Const(t.to_bits()), t);
        let power = add(Origin::Pow(beta_read, t_const), beta.powf(t));
        let one = add(Origin::Const(1_f64.to_bits()), 1.0);
        let correction = add(Origin::Sub(one, power), 1.0 - beta.powf(t));
        let negated = add(Origin::Neg(lr_read), -lr);
        let value = -lr / (1.0 - beta.powf(t));
        let size = add(Origin::Div(negated, correction), value);
        (floats, size, value)
    }

    /// Evaluates what a plan would hold for one number.
    fn replayed(
        floats: &TracedFloats,
        value: f64,
        sources: &[u32],
        now: impl Fn(&str) -> f64,
    ) -> (usize, Option<f64>) {
        let mut paths: Vec<String> = Vec::new();
        let (scalars, at) = floats.scalars(&[(value, sources.to_vec())], &free(), |path| {
            paths.push(path.to_owned());
            paths.len() as u32 - 1
        });
        let mut values = vec![f64::NAN];
        let done = evaluate(&scalars, &mut values, |i| match scalars[i] {
            Scalar::Read { path } => now(&paths[path as usize]),
            _ => unreachable!("only what is read is asked for"),
        });
        let found = match at[0] {
            Some(at) => done.ok().map(|()| values[at as usize]),
            None => Some(value),
        };
        (scalars.len(), found)
    }

    #[test]
    fn replayed_arithmetic_is_that_of_plain_floats() {
        let (floats, size, recorded) = step_size(0.1, 0.9, 3.0);
        let at = |lr: f64, beta: f64| {
            let now = move |path: &str| if path == "opt.lr" { lr } else { beta };
            let (_, found) = replayed(&floats, recorded, &[size], now);
            found.map(f64::to_bits)
        };
        assert_eq!(at(0.1, 0.9), Some(recorded.to_bits()));
        let expected = -0.025 / (1.0 - 0.8_f64.powf(3.0));
        assert_eq!(at(0.025, 0.8), Some(expected.to_bits()));
        assert_eq!(at(0.025, 1.0), None, "Python raises ZeroDivisionError");
    }

    #[test]
    fn every_operation_is_the_one_it_says() {
        let (a, b) = (0.3_f64, -7.25_f64);
        for (make, expected) in [
            (Origin::Add as fn(u32, u32) -> Origin, a + b),
            (Origin::Sub, a - b),
            (Origin::Mul, a * b),
            (Origin::Div, a / b),
            (Origin::Pow, a.powf(b)),
        ] {
            let mut floats = TracedFloats::default();
            let x = floats.add(read("opt.lr"), a).expect("known");
            let y = floats.add(read("opt.beta"), b).expect("known");
            let out = floats.add(make(x, y), expected).expect("known");
            let now = |path: &str| if path == "opt.lr" { a } else { b };
            let (_, value) = replayed(&floats, expected, &[out], now);
            assert_eq!(value.map(f64::to_bits), Some(expected.to_bits()));
        }
    }

    #[test]
    fn where_python_raises_nothing_is_computed() {
        for (a, b) in [
            (10.0, 400.0),
            (-10.0, 401.0),
            (0.0, -1.0),
            (-0.0, -0.5),
            (-8.0, 1.0 / 3.0),
            (f64::NAN, 1.0),
            (1.0, f64::NAN),
        ] {
            assert_eq!(power(a, b), None, "{a} ** {b}");
        }
        for (a, b, expected) in [
            (f64::INFINITY, 2.0, f64::INFINITY),
            (2.0, f64::NEG_INFINITY, 0.0),
            (-8.0, 3.0, -512.0),
            (10.0, -400.0, 0.0),
            (0.0, 0.0, 1.0),
        ] {
            assert_eq!(power(a, b), Some(expected), "{a} ** {b}");
        }
        assert_eq!((quotient(1.0, 0.0), quotient(0.0, -0.0)), (None, None));
        assert_eq!(quotient(1.0, -2.0), Some(-0.5));
    }

    #[test]
    fn a_plan_holds_only_what_it_needs() {
        let mut floats = TracedFloats::default();
        let lr = floats.add(read("opt.lr"), 0.1).expect("known");
        let beta = floats.add(read("opt.beta"), 0.9).expect("known");
        floats.add(Origin::Mul(lr, beta), 0.1 * 0.9).expect("known");
        let negated = floats.add(Origin::Neg(lr), -0.1).expect("known");
        let now = |_: &str| 0.5;
        assert_eq!(replayed(&floats, -0.1, &[negated], now), (2, Some(-0.5)));
        // Python may raise at a quotient, even at one that no op is given.
        floats.add(Origin::Div(lr, beta), 0.1 / 0.9).expect("known");
        assert_eq!(replayed(&floats, -0.1, &[negated], now), (4, Some(-0.5)));
        assert_eq!(replayed(&floats, -0.1, &[negated], |_| 0.0).1, None);
    }

    #[test]
    fn sources_of_a_number_must_agree() {
        let mut floats = TracedFloats::default();
        let lr = floats.add(read("opt.lr"), 0.5).expect("known");
        let beta = floats.add(read("opt.beta"), 0.5).expect("known");
        let now = |lr: f64, beta: f64| move |path: &str| if path == "opt.lr" { lr } else { beta };
        let both = [lr, beta];
        assert_eq!(replayed(&floats, 0.5, &both, now(0.7, 0.7)).1, Some(0.7));
        assert_eq!(replayed(&floats, 0.5, &both, now(0.7, 0.5)).1, None);
        let written = [AS_WRITTEN, lr];
        assert_eq!(replayed(&floats, 0.5, &written, now(0.5, 0.1)).1, Some(0.5));
        assert_eq!(replayed(&floats, 0.5, &written, now(0.7, 0.1)).1, None);
        // What is not free is guarded: no scalar is needed for it.
        let (scalars, at) = floats.scalars(&[(0.5, both.to_vec())], &[], |_| 0);
        assert_eq!((scalars.len(), at), (0, vec![None]));
    }

    #[test]
    fn the_same_origin_is_one_float() {
        let mut floats = TracedFloats::default();
        assert_eq!(floats.add(read("opt.lr"), 0.1), Ok(0));
        assert_eq!(floats.add(Origin::Neg(0), -0.1), Ok(1));
        assert_eq!(floats.add(read("opt.lr"), 0.1), Ok(0));
        assert_eq!(floats.len(), 2);
    }

    #[test]
    fn a_float_follows_only_from_floats_that_are_followed() {
        let mut floats = TracedFloats::default();
        let unknown = Err(UnknownFloat { index: 0, known: 0 });
        assert_eq!(floats.add(Origin::Neg(0), 0.0), unknown);
        assert_eq!(floats.pin(0), unknown.map(|_: u32| ()));
        assert!(floats.is_empty());
    }

    #[test]
    fn what_is_compared_or_computed_otherwise_is_pinned() {
        let make = |lr: f64| {
            let mut floats = TracedFloats::default();
            let read = floats.add(read("opt.lr"), lr).expect("known");
            floats.add(Origin::Neg(read), -lr).expect("known");
            floats
        };
        let (mut a, b) = (make(0.1), make(0.2));
        assert_eq!(a.free(&b), ["opt.lr"]);
        assert!(a.free(&a).is_empty(), "it has not changed");
        a.pin(1).expect("known");
        assert!(a.free(&b).is_empty() && b.free(&a).is_empty());
        assert!(!a.is_loose("opt.lr") && b.is_loose("opt.lr"));
        assert!(!b.is_loose("opt.beta"), "it is not followed");
        let mut other = make(0.1);
        let sum = Origin::Add(0, 0);
        other.add(sum, 0.2 + f64::EPSILON).expect("known");
        assert!(!other.is_loose("opt.lr"));
    }

    #[test]
    fn a_hyperparameter_is_free_unless_something_looked_at_what_follows_from_it() {
        let changed = || (step_size(0.1, 0.9, 3.0).0, step_size(0.2, 0.9, 3.0).0);
        let (a, b) = changed();
        assert_eq!(a.free(&b), ["opt.lr"], "beta stayed the same");
        // `if step_size < ...` in either run: what it depends on decides.
        let (mut a, b) = changed();
        a.pin(7).expect("known");
        assert!(a.free(&b).is_empty());
        let (mut a, b) = changed();
        a.pin(1).expect("known"); // beta alone
        assert_eq!(a.free(&b), ["opt.lr"]);
    }

    #[test]
    fn floats_that_came_about_alike_are_aligned() {
        let make = |t: f64| step_size(0.1, 0.9, t).0;
        let aligned = make(3.0).aligned(&make(3.0));
        assert_eq!(aligned, (0..8).map(Some).collect::<Vec<_>>());
        // Another step: the power of another constant, and all that follows from it.
        let aligned = make(3.0).aligned(&make(4.0));
        let expected = [Some(0), Some(1), None, None, Some(4), None, Some(6), None];
        assert_eq!(aligned, expected);
        // In another order.
        let mut other = TracedFloats::default();
        other.add(read("opt.beta"), 0.9).expect("known");
        other.add(read("opt.lr"), 0.1).expect("known");
        other.add(Origin::Neg(1), -0.1).expect("known");
        let expected = [Some(1), Some(0), None, None, None, None, Some(2), None];
        assert_eq!(make(3.0).aligned(&other), expected);
    }

    /// Adam's `1 - beta ** (step + 1)`, of a counter in `f32`.
    fn correction(beta: f64, step: f64) -> (TracedFloats, u32, f64) {
        let mut floats = TracedFloats::default();
        let counter = floats.held("opt.step", step).expect("known");
        let beta = floats.add(read("opt.beta"), beta).expect("known");
        let one = floats
            .computed(Origin::Const(1_f64.to_bits()))
            .expect("a constant");
        let sum = floats.computed(Origin::Add(counter, one)).expect("a sum");
        let steps = floats.computed(Origin::Round(sum)).expect("a number");
        let power = floats.computed(Origin::Pow(beta, steps)).expect("a power");
        let size = floats.computed(Origin::Sub(one, power)).expect("a number");
        let value = floats.value(size).expect("known");
        (floats, size, value)
    }

    /// Evaluates what a plan would hold for one number.
    fn computed(
        floats: &TracedFloats,
        number: (f64, u32),
        free: &[String],
        now: impl Fn(&str) -> f64,
    ) -> (Vec<Scalar>, Option<f64>) {
        let mut paths: Vec<String> = Vec::new();
        let (scalars, at) = floats.scalars(&[(number.0, vec![number.1])], free, |path| {
            paths.push(path.to_owned());
            paths.len() as u32 - 1
        });
        let mut values = Vec::new();
        let done = evaluate(&scalars, &mut values, |i| match scalars[i] {
            Scalar::Read { path } | Scalar::Tensor { path } => now(&paths[path as usize]),
            _ => unreachable!("only what is read is asked for"),
        });
        let at = at[0].expect("it varies") as usize;
        (scalars, done.ok().map(|()| values[at]))
    }

    #[test]
    fn a_number_follows_from_a_tensor_as_it_is_before_the_replay() {
        let (floats, size, value) = correction(0.9, 3.0);
        assert_eq!(value.to_bits(), (1.0 - 0.9_f64.powf(4.0)).to_bits());
        let now = |steps: f64| move |path: &str| if path == "opt.step" { steps } else { 0.5 };
        // What is not free is guarded, and a constant of the plan.
        let (scalars, found) = computed(&floats, (value, size), &[], now(9.0));
        assert_eq!(found, Some(1.0 - 0.9_f64.powf(10.0)));
        assert!(
            !scalars
                .iter()
                .any(|scalar| matches!(scalar, Scalar::Read { .. }))
        );
        let (_, found) = computed(&floats, (value, size), &free(), now(9.0));
        assert_eq!(found, Some(1.0 - 0.5_f64.powf(10.0)));
        // A counter in `f32` stands still at 2 ** 24.
        let end = f64::from(1 << 24);
        let (_, found) = computed(&floats, (value, size), &[], now(end));
        assert_eq!(found, Some(1.0 - 0.9_f64.powf(end)));
        assert_eq!(floats.in_tensor("opt.step"), Some(3.0));
        assert_eq!(floats.in_tensor("opt.beta"), None, "it is no tensor");
    }

    #[test]
    fn what_the_step_decided_by_a_number_must_hold_again() {
        let (mut floats, size, value) = correction(0.9, 3.0);
        let limit = floats
            .computed(Origin::Const(0.5_f64.to_bits()))
            .expect("known");
        floats
            .compare(Comparison::Less, size, limit, true)
            .expect("known");
        assert!(!floats.pins_a_tensor());
        let at = |steps: f64| computed(&floats, (value, size), &[], |_| steps).1;
        assert_eq!(at(4.0), Some(1.0 - 0.9_f64.powf(5.0)));
        assert_eq!(at(6.0), None, "1 - 0.9 ** 7 is more than a half");
        // Comparisons of what cannot vary need no scalar.
        let (mut floats, ..) = correction(0.9, 3.0);
        let limit = floats
            .computed(Origin::Const(0.5_f64.to_bits()))
            .expect("known");
        floats
            .compare(Comparison::Less, limit, 1, true)
            .expect("known");
        let (scalars, _) = floats.scalars(&[], &[], |_| 0);
        let compared = |scalar: &&Scalar| matches!(scalar, Scalar::Compared { .. });
        assert_eq!(scalars.iter().filter(compared).count(), 0);
        let (scalars, _) = floats.scalars(&[], &free(), |_| 0);
        assert_eq!(scalars.iter().filter(compared).count(), 1);
    }

    #[test]
    fn what_no_replay_can_repeat_pins_the_tensor() {
        let (mut floats, size, _) = correction(0.9, 3.0);
        let unlike = |floats: &mut TracedFloats| {
            floats
                .compare(Comparison::Equal, size, size, false)
                .expect("known");
            floats.pins_a_tensor()
        };
        assert!(
            unlike(&mut floats),
            "the comparison had another outcome than ours"
        );
        let (mut floats, size, _) = correction(0.9, 3.0);
        floats.pin(1).expect("known"); // beta
        assert!(!floats.pins_a_tensor());
        floats.add(Origin::Neg(size), 7.0).expect("known");
        assert!(
            floats.pins_a_tensor(),
            "the result was another one than ours"
        );
    }

    #[test]
    fn a_number_given_to_an_op_is_any_of_those_that_it_equals() {
        let two = |a: f64, b: f64| {
            let mut floats = TracedFloats::default();
            let counters = [("opt.a", a), ("opt.b", b)].map(|(path, value)| {
                (floats.add(Origin::Tensor(path.to_owned()), value)).expect("known")
            });
            (floats, counters)
        };
        let (mut floats, [a, b]) = two(3.0, 3.0);
        let number = floats.number(3.0).expect("it may be either");
        assert!(matches!(floats.origins[number as usize], Origin::Same(_, second) if second == b));
        assert_eq!(floats.origins[number as usize - 1], Origin::Taken(a));
        let (mut other, _) = two(4.0, 4.0);
        other.number(4.0).expect("likewise");
        assert!(
            !floats.is_unproven(&floats.clone()),
            "nothing depends on it"
        );
        floats.read_again(number);
        assert!(!floats.is_unproven(&other));
        assert!(floats.is_unproven(&floats.clone()), "it may be a constant");
        // What depends on no tensor is written there, as far as it equals what it may be.
        let lr = floats.add(read("opt.lr"), 0.1).expect("known");
        let number = floats.number(0.1).expect("a constant");
        assert!(matches!(floats.origins[number as usize], Origin::Same(_, b) if b == lr));
        let number = floats.number(0.7).expect("a constant");
        assert_eq!(
            floats.origins[number as usize],
            Origin::Const(0.7_f64.to_bits())
        );
    }

    #[test]
    fn a_number_has_every_source_of_its_value() {
        let (floats, size, value) = step_size(0.1, 0.9, 3.0);
        assert_eq!(floats.valued(value).collect::<Vec<_>>(), [size]);
        assert_eq!(floats.valued(-0.1).collect::<Vec<_>>(), [6]);
        assert_eq!(floats.valued(1.0).count(), 0, "it depends on nothing");
        assert!(floats.has_value(6, -0.1) && !floats.has_value(6, 0.1));
    }
}
