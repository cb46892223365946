//! The scalars of a plan: numbers that follow hyperparameters and step counters.

use rote_plans::{Plan, Scalar};
use rote_replay::{Frontend, ReplayError, TensorOf};
use rote_tracer::scalars::{evaluate, read_behind};

use crate::facts::NamedFacts;
use crate::recording::{Parts, state_tensor};

/// The scalars of a plan, each bound to what it is read from.
#[derive(Debug)]
pub struct BoundScalars<F: Frontend> {
    scalars: Vec<Scalar>,
    /// What each of them is read from; none where it is computed.
    reads: Vec<Option<Read<F>>>,
    /// The scalars' values, as computed last.
    values: Vec<f64>,
    /// Whether they were computed for the call that is handled now.
    computed: bool,
}

#[derive(Debug)]
struct Read<F: Frontend> {
    path: String,
    from: ReadFrom<F>,
}

#[derive(Debug)]
enum ReadFrom<F: Frontend> {
    /// The word of a hyperparameter.
    Word(usize),
    /// A tensor of the state.
    Tensor(TensorOf<F>),
}

impl<F: Frontend> BoundScalars<F> {
    pub fn bind(
        frontend: &F,
        plan: &Plan,
        scalars: &[Scalar],
        parts: &Parts<F>,
    ) -> Result<Self, ReplayError> {
        let word = |path: &str| parts.facts.float_word(path).map(ReadFrom::Word);
        let tensor = |path: &str| {
            let held = F::borrow(state_tensor(&parts.named, path)?);
            frontend.number(held)?;
            Some(ReadFrom::Tensor(frontend.hold(held)))
        };
        let read = |scalar: &Scalar| {
            let (path, from) = match scalar {
                Scalar::Read { path } => (plan.str(*path), word(plan.str(*path))),
                Scalar::Tensor { path } => (plan.str(*path), tensor(plan.str(*path))),
                _ => return Ok(None),
            };
            let not_here = || {
                ReplayError::Bind(format!(
                    "the plan reads {path}, which this process does not have"
                ))
            };
            let (path, from) = (path.to_owned(), from.ok_or_else(not_here)?);
            Ok(Some(Read { path, from }))
        };
        Ok(BoundScalars {
            reads: scalars.iter().map(read).collect::<Result<_, _>>()?,
            scalars: scalars.to_vec(),
            values: Vec::with_capacity(scalars.len()),
            computed: false,
        })
    }

    /// Computes the scalars from the hyperparameters and tensors of now, for the replay that
    /// follows. Comes back: a hyperparameter or a tensor under which the plan does not apply, if
    /// Python would raise, the sources of a number do not agree, or a comparison has another
    /// outcome.
    pub fn compute(&mut self, frontend: &F, facts: &NamedFacts<F>) -> Option<String> {
        self.computed = true;
        let mut missing = None;
        let done = evaluate(&self.scalars, &mut self.values, |i| {
            let found = match self.reads[i].as_ref().map(|read| &read.from) {
                Some(ReadFrom::Tensor(tensor)) => frontend.number(F::borrow(tensor)),
                Some(ReadFrom::Word(word)) => facts.float_at(*word).ok(),
                None => None,
            };
            found.unwrap_or_else(|| {
                missing.get_or_insert(i); // no float any more
                f64::NAN
            })
        });
        let unfit = missing.or_else(|| {
            let scalar = done.err()?;
            Some(read_behind(&self.scalars, scalar).unwrap_or(scalar))
        })?;
        self.computed = false;
        let read = self.reads[unfit].as_ref();
        Some(read.map(|read| read.path.clone()).unwrap_or_default())
    }

    /// The values for a replay, computed now if they were not for this call.
    pub fn values(&mut self, frontend: &F, facts: &NamedFacts<F>) -> Result<&[f64], ReplayError> {
        if !self.computed {
            if let Some(path) = self.compute(frontend, facts) {
                return Err(ReplayError::Bind(format!(
                    "the plan does not apply to {path} as it is now"
                )));
            }
        }
        self.computed = false;
        Ok(&self.values)
    }
}
