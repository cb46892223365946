//! Floats that Python computes from an optimizer's hyperparameters, followed
//! while a step is recorded.
//!
//! A recorded op has the value of each number among its arguments, but not the
//! source of the number. So each number keeps every source that fits: a number
//! written in the program, if it was the same in all recordings, and each
//! followed float that had this value in all recordings. A replay computes all
//! sources. If they differ, one of them is wrong, and the call must run eagerly.
//! This also covers a product that was rounded away at first.

use hashbrown::HashMap;
use rote_plans::{NONE, Scalar};

/// The source of a number that is written in the program.
pub const AS_WRITTEN: u32 = u32::MAX;

/// How a followed float came about. Operands are indices of earlier ones.
#[derive(Clone, Debug, PartialEq)]
pub enum Origin {
    /// Read from the state under this path.
    Read(String),
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
}

impl Origin {
    /// Indices of the floats it is computed from.
    fn operands(&self) -> impl Iterator<Item = u32> {
        let (a, b) = match *self {
            Origin::Read(_) | Origin::Const(_) => (None, None),
            Origin::Neg(a) => (Some(a), None),
            Origin::Add(a, b)
            | Origin::Sub(a, b)
            | Origin::Mul(a, b)
            | Origin::Div(a, b)
            | Origin::Pow(a, b) => (Some(a), Some(b)),
        };
        a.into_iter().chain(b)
    }

    /// Its value, where the floats before it have these; none where Python
    /// raises, and for what is not computed.
    fn computed(&self, values: &[f64]) -> Option<f64> {
        let of = |index: u32| values[index as usize];
        match *self {
            Origin::Read(_) => None,
            Origin::Const(bits) => Some(f64::from_bits(bits)),
            Origin::Neg(a) => Some(-of(a)),
            Origin::Add(a, b) => Some(of(a) + of(b)),
            Origin::Sub(a, b) => Some(of(a) - of(b)),
            Origin::Mul(a, b) => Some(of(a) * of(b)),
            Origin::Div(a, b) => quotient(of(a), of(b)),
            Origin::Pow(a, b) => power(of(a), of(b)),
        }
    }
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

/// The floats followed in one recording, in the order they came about.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TracedFloats {
    origins: Vec<Origin>,
    values: Vec<f64>,
    /// Hyperparameters whose value decided a branch, or left Python's floats.
    pinned: Vec<u32>,
}

impl TracedFloats {
    /// Adds a float; the same origin twice is one float. Returns its index.
    pub fn add(&mut self, origin: Origin, value: f64) -> Result<u32, UnknownFloat> {
        if let Some(index) = self.origins.iter().position(|o| *o == origin) {
            return Ok(index as u32);
        }
        origin.operands().try_for_each(|index| self.known(index))?;
        let computed = origin.computed(&self.values);
        let ours = matches!(origin, Origin::Read(_))
            || computed.is_some_and(|computed| computed.to_bits() == value.to_bits());
        self.origins.push(origin);
        self.values.push(value);
        let index = self.origins.len() as u32 - 1;
        if !ours {
            self.pin(index)?; // what Python computed, a replay would not
        }
        Ok(index)
    }

    fn known(&self, index: u32) -> Result<(), UnknownFloat> {
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
        self.known(index)?;
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

    /// The floats that depend on a hyperparameter and have this value.
    pub fn valued(&self, value: f64) -> impl Iterator<Item = u32> {
        (0_u32..)
            .zip(&self.values)
            .filter(move |(_, own)| own.to_bits() == value.to_bits())
            .map(|(i, _)| i)
            .filter(|&i| !self.reads(i).is_empty())
    }

    /// Whether a float has this value.
    pub fn has_value(&self, index: u32, value: f64) -> bool {
        (self.values.get(index as usize)).is_some_and(|own| own.to_bits() == value.to_bits())
    }

    /// For each float, whether it came about in `other` as it did here.
    pub fn shared(&self, other: &TracedFloats) -> Vec<bool> {
        let mut shared: Vec<bool> = Vec::with_capacity(self.origins.len());
        for (i, origin) in self.origins.iter().enumerate() {
            let same = other.origins.get(i) == Some(origin)
                && origin.operands().all(|operand| shared[operand as usize]);
            shared.push(same);
        }
        shared
    }

    /// Paths of hyperparameters that differ from `other` and that nothing
    /// pins, in either recording.
    pub fn free(&self, other: &TracedFloats) -> Vec<String> {
        self.origins
            .iter()
            .enumerate()
            .filter_map(|(i, origin)| match origin {
                Origin::Read(path) => Some((i, path)),
                _ => None,
            })
            .filter(|&(i, path)| {
                other.origins.get(i) == Some(&Origin::Read(path.clone()))
                    && self.values[i].to_bits() != other.values[i].to_bits()
                    && !self.pinned.contains(&(i as u32))
                    && !other.pinned.contains(&(i as u32))
            })
            .map(|(_, path)| path.clone())
            .collect()
    }

    /// Indices of the hyperparameters that a float depends on.
    fn reads(&self, index: u32) -> Vec<u32> {
        let mut found = Vec::new();
        let mut open = vec![index];
        while let Some(i) = open.pop() {
            let origin = &self.origins[i as usize];
            if let Origin::Read(_) = origin {
                found.push(i);
            }
            open.extend(origin.operands());
        }
        found
    }

    /// Whether a float depends on one of these hyperparameters.
    fn varies(&self, index: u32, free: &[String]) -> bool {
        self.reads(index).iter().any(|&read| {
            matches!(&self.origins[read as usize], Origin::Read(path) if free.contains(path))
        })
    }

    /// The scalars of a plan that computes `numbers`, each given as its value
    /// and its sources, where `free` hyperparameters vary, and all arithmetic on
    /// these at which Python may raise; and where each of the numbers is found,
    /// if it varies. `path` interns a path.
    pub fn scalars(
        &self,
        numbers: &[(f64, Vec<u32>)],
        free: &[String],
        mut path: impl FnMut(&str) -> u32,
    ) -> (Vec<Scalar>, Vec<Option<u32>>) {
        let varying: Vec<Vec<u32>> = numbers
            .iter()
            .map(|(_, sources)| {
                let mut varying = sources.clone();
                varying.retain(|&source| source != AS_WRITTEN && self.varies(source, free));
                varying
            })
            .collect();
        let mut needed = vec![false; self.origins.len()];
        for &index in varying.iter().flatten() {
            needed[index as usize] = true;
        }
        for (i, origin) in (0_u32..).zip(&self.origins) {
            // Python may raise here, whatever becomes of the value.
            let raises = matches!(origin, Origin::Div(..) | Origin::Pow(..));
            needed[i as usize] |= raises && self.varies(i, free);
        }
        for i in (0..self.origins.len()).rev() {
            if !needed[i] {
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
                Origin::Read(name) => Scalar::Read { path: path(name) },
                Origin::Const(bits) => Scalar::Const(f64::from_bits(*bits)),
                Origin::Neg(a) => Scalar::Neg(of(a)),
                Origin::Add(a, b) => Scalar::Add(of(a), of(b)),
                Origin::Sub(a, b) => Scalar::Sub(of(a), of(b)),
                Origin::Mul(a, b) => Scalar::Mul(of(a), of(b)),
                Origin::Div(a, b) => Scalar::Div(of(a), of(b)),
                Origin::Pow(a, b) => Scalar::Pow(of(a), of(b)),
            };
            at.insert(i as u32, scalars.len() as u32);
            scalars.push(scalar);
        }
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
/// `read` gives a hyperparameter's value now. Where Python would raise or the
/// sources of a number do not agree, the plan does not apply: the error is the
/// scalar at which this shows.
pub fn evaluate(
    scalars: &[Scalar],
    values: &mut Vec<f64>,
    mut read: impl FnMut(usize) -> f64,
) -> Result<(), usize> {
    values.clear();
    for (i, scalar) in scalars.iter().enumerate() {
        let of = |index: u32| values[index as usize];
        let value = match *scalar {
            Scalar::Read { .. } => Some(read(i)),
            Scalar::Const(value) => Some(value),
            Scalar::Neg(a) => Some(-of(a)),
            Scalar::Add(a, b) => Some(of(a) + of(b)),
            Scalar::Sub(a, b) => Some(of(a) - of(b)),
            Scalar::Mul(a, b) => Some(of(a) * of(b)),
            Scalar::Div(a, b) => quotient(of(a), of(b)),
            Scalar::Pow(a, b) => power(of(a), of(b)),
            Scalar::Same(a, b) => (of(a).to_bits() == of(b).to_bits()).then(|| of(a)),
        };
        values.push(value.ok_or(i)?);
    }
    Ok(())
}

/// A hyperparameter that a scalar depends on: the index of its `Read`.
pub fn read_behind(scalars: &[Scalar], scalar: usize) -> Option<usize> {
    let mut open = vec![scalar];
    while let Some(i) = open.pop() {
        match scalars[i] {
            Scalar::Read { .. } => return Some(i),
            Scalar::Const(_) => {}
            Scalar::Neg(a) => open.push(a as usize),
            Scalar::Add(a, b)
            | Scalar::Sub(a, b)
            | Scalar::Mul(a, b)
            | Scalar::Div(a, b)
            | Scalar::Pow(a, b)
            | Scalar::Same(a, b) => open.extend([a as usize, b as usize]),
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
    fn floats_that_came_about_alike_are_shared() {
        let make = |t: f64| step_size(0.1, 0.9, t).0;
        let shared = make(3.0).shared(&make(3.0));
        assert!(shared.iter().all(|&shared| shared));
        // Another step: the power of another constant, and all that follows from it.
        let shared = make(3.0).shared(&make(4.0));
        assert_eq!(shared, [true, true, false, false, true, false, true, false]);
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
