//! Floats that Python computes from an optimizer's hyperparameters, followed
//! while a step is recorded.

use hashbrown::HashMap;
use rote_plans::{NONE, Scalar};

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
        self.origins.push(origin);
        self.values.push(value);
        Ok(self.origins.len() as u32 - 1)
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

    /// The float that is `a` in this recording and `b` in `other`.
    pub fn explain(&self, other: &TracedFloats, a: f64, b: f64) -> Option<u32> {
        (0..self.origins.len().min(other.origins.len()))
            .find(|&i| {
                self.origins[i] == other.origins[i]
                    && self.values[i].to_bits() == a.to_bits()
                    && other.values[i].to_bits() == b.to_bits()
            })
            .map(|i| i as u32)
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

    /// The scalars of a plan that computes `wanted`, and where each of them is
    /// found. `path` interns a path.
    pub fn scalars(
        &self,
        wanted: &[u32],
        mut path: impl FnMut(&str) -> u32,
    ) -> (Vec<Scalar>, HashMap<u32, u32>) {
        let mut needed = vec![false; self.origins.len()];
        for &index in wanted {
            needed[index as usize] = true;
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
        (scalars, at)
    }
}

/// Computes the scalars of a plan into `values`, in place of what it held.
/// `read` gives a hyperparameter's value now.
pub fn evaluate(scalars: &[Scalar], values: &mut Vec<f64>, mut read: impl FnMut(usize) -> f64) {
    values.clear();
    for (i, scalar) in scalars.iter().enumerate() {
        let of = |index: u32| values[index as usize];
        let value = match *scalar {
            Scalar::Read { .. } => read(i),
            Scalar::Const(value) => value,
            Scalar::Neg(a) => -of(a),
            Scalar::Add(a, b) => of(a) + of(b),
            Scalar::Sub(a, b) => of(a) - of(b),
            Scalar::Mul(a, b) => of(a) * of(b),
            Scalar::Div(a, b) => of(a) / of(b),
            Scalar::Pow(a, b) => of(a).powf(of(b)),
        };
        values.push(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// AdamW's step size, `-lr / (1 - beta ** t)`, and what it is made of.
    fn step_size(lr: f64, beta: f64, t: f64) -> (TracedFloats, u32, f64) {
        let mut floats = TracedFloats::default();
        let mut add = |origin, value| floats.add(origin, value).expect("known");
        let lr_read = add(Origin::Read("opt.lr".to_owned()), lr);
        let beta_read = add(Origin::Read("opt.beta".to_owned()), beta);
        let t_const = add(Origin::Const(t.to_bits()), t);
        let power = add(Origin::Pow(beta_read, t_const), beta.powf(t));
        let one = add(Origin::Const(1_f64.to_bits()), 1.0);
        let correction = add(Origin::Sub(one, power), 1.0 - beta.powf(t));
        let negated = add(Origin::Neg(lr_read), -lr);
        let value = -lr / (1.0 - beta.powf(t));
        let size = add(Origin::Div(negated, correction), value);
        (floats, size, value)
    }

    /// Evaluates what a plan would hold for one followed float.
    fn replayed(floats: &TracedFloats, wanted: u32, now: impl Fn(&str) -> f64) -> (usize, f64) {
        let mut paths: Vec<String> = Vec::new();
        let (scalars, at) = floats.scalars(&[wanted], |path| {
            paths.push(path.to_owned());
            paths.len() as u32 - 1
        });
        let mut values = vec![f64::NAN];
        evaluate(&scalars, &mut values, |i| match scalars[i] {
            Scalar::Read { path } => now(&paths[path as usize]),
            _ => unreachable!("only what is read is asked for"),
        });
        (scalars.len(), values[at[&wanted] as usize])
    }

    #[test]
    fn replayed_arithmetic_is_that_of_plain_floats() {
        let (floats, size, recorded) = step_size(0.1, 0.9, 3.0);
        let (_, same) = replayed(
            &floats,
            size,
            |path| if path == "opt.lr" { 0.1 } else { 0.9 },
        );
        assert_eq!(same.to_bits(), recorded.to_bits());
        let (_, now) = replayed(
            &floats,
            size,
            |path| if path == "opt.lr" { 0.025 } else { 0.8 },
        );
        let expected = -0.025 / (1.0 - 0.8_f64.powf(3.0));
        assert_eq!(now.to_bits(), expected.to_bits());
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
            let x = floats
                .add(Origin::Read("a".to_owned()), 0.0)
                .expect("known");
            let y = floats
                .add(Origin::Read("b".to_owned()), 0.0)
                .expect("known");
            let out = floats.add(make(x, y), 0.0).expect("known");
            let (_, value) = replayed(&floats, out, |path| if path == "a" { a } else { b });
            assert_eq!(value.to_bits(), expected.to_bits(), "{:?}", make(0, 1));
        }
    }

    #[test]
    fn a_plan_holds_only_what_it_needs() {
        let (floats, _, _) = step_size(0.1, 0.9, 3.0);
        let negated = 6; // -lr
        assert_eq!(replayed(&floats, negated, |_| 0.5), (2, -0.5));
    }

    #[test]
    fn the_same_origin_is_one_float() {
        let mut floats = TracedFloats::default();
        let read = || Origin::Read("opt.lr".to_owned());
        assert_eq!(floats.add(read(), 0.1), Ok(0));
        assert_eq!(floats.add(Origin::Neg(0), -0.1), Ok(1));
        assert_eq!(floats.add(read(), 0.1), Ok(0));
        assert_eq!(floats.len(), 2);
    }

    #[test]
    fn a_float_follows_only_from_floats_that_are_followed() {
        let mut floats = TracedFloats::default();
        let unknown = Err(UnknownFloat { index: 0, known: 0 });
        assert_eq!(floats.add(Origin::Neg(0), 1.0), unknown);
        assert!(floats.pin(0).is_err());
        assert!(floats.is_empty());
    }

    #[test]
    fn a_changed_hyperparameter_is_free_unless_something_looked_at_it() {
        let changed = || (step_size(0.1, 0.9, 3.0).0, step_size(0.2, 0.9, 3.0).0);
        let (a, b) = changed();
        assert_eq!(a.free(&b), ["opt.lr"], "beta stayed the same");
        // `if step_size < ...` in either run: what it depends on decides.
        let (mut a, b) = changed();
        a.pin(7).expect("known");
        assert!(a.free(&b).is_empty());
        let (a, mut b) = changed();
        b.pin(0).expect("known");
        assert!(a.free(&b).is_empty());
        let (mut a, b) = changed();
        a.pin(1).expect("known"); // beta alone
        assert_eq!(a.free(&b), ["opt.lr"]);
    }

    #[test]
    fn a_float_is_explained_by_its_value_in_both_runs() {
        let ((a, size, x), (b, _, y)) = (step_size(0.1, 0.9, 3.0), step_size(0.2, 0.9, 3.0));
        assert_eq!(a.explain(&b, x, y), Some(size));
        assert_eq!(a.explain(&b, x, x), None);
        assert_eq!(a.explain(&b, -0.1, -0.2), Some(6));
    }
}
