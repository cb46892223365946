//! A variant: a plan, bound, with the facts under which it may run.

use hashbrown::HashMap;
use rote_plans::{Arg, BindingKind, Guard, PlanFile, PlanStore, Scalar, StrId};
use rote_replay::aten::sys::Fact;
use rote_replay::aten::{BoundPlan, Call, Object};
use rote_replay::{Expected, ReplayError};
use rote_tracer::compare::{BoundNumber, Recording};
use rote_tracer::passes::{Report, Selection, optimize};
use rote_tracer::scalars::evaluate;

use crate::SessionError;
use crate::facts::Facts;
use crate::recording::{GuardText, Parts};

/// A plan that can be replayed in this process.
#[derive(Debug)]
pub struct Variant {
    /// Its number, never used twice in a session.
    pub id: u32,
    /// The plan file, mapped.
    pub file: PlanFile,
    /// Its guard key.
    pub key: String,
    /// The facts of the call.
    pub call: Expected,
    /// Where each of them belongs.
    pub call_facts: Vec<Fact>,
    /// Names of the leaves of the arguments.
    pub leaves: Vec<String>,
    /// Facts about objects that outlive calls.
    pub facts: Facts,
    /// Hyperparameters that may change.
    pub free: Vec<String>,
    /// The recording it comes from, every number as it was.
    pub recording: Recording,
    /// Numbers that hyperparameters explain.
    pub numbers: Vec<BoundNumber>,
    /// Guards as text.
    pub guards: Vec<GuardText>,
    /// How often it was replayed.
    pub replays: u64,
    /// What the passes did.
    pub passes: Report,
    bound: BoundPlan,
    args: Vec<ArgBinding>,
    grads: Vec<(u32, Object)>,
    scalars: Vec<Scalar>,
    scalar_words: Vec<usize>,
    /// The scalars' values at the last replay.
    numbers_now: Vec<f64>,
    _state: Vec<Object>,
}

#[derive(Clone, Copy, Debug)]
struct ArgBinding {
    slot: u32,
    leaf: u32,
    grad: bool,
}

/// A recording that a second one, or a stored plan, has confirmed.
#[derive(Debug)]
pub struct Confirmed {
    /// The recording, every number as it was.
    pub recording: Recording,
    /// Numbers that hyperparameters explain.
    pub numbers: Vec<BoundNumber>,
    /// Hyperparameters that may change.
    pub free: Vec<String>,
    /// What it names and the facts it was made under.
    pub parts: Parts,
}

/// The plan of a recording with its bound numbers and guards filled in.
pub fn final_plan(
    recording: &Recording,
    numbers: &[BoundNumber],
    guards: &[GuardText],
    free: &[String],
) -> rote_plans::Plan {
    let mut plan = recording.plan.clone();
    let wanted: Vec<u32> = numbers.iter().map(|number| number.float).collect();
    let mut strings = std::mem::take(&mut plan.strings);
    let mut ids: HashMap<String, StrId> = (0..)
        .zip(&strings)
        .map(|(id, text)| (text.clone(), id))
        .collect();
    let mut intern = |text: &str| -> StrId {
        *ids.entry_ref(text).or_insert_with(|| {
            strings.push(text.to_owned());
            strings.len() as StrId - 1
        })
    };
    let (scalars, at) = recording.floats.scalars(&wanted, &mut intern);
    for number in numbers {
        plan.args[number.arg as usize] = Arg::Scalar(at[&number.float]);
    }
    plan.scalars = scalars;
    plan.guards = guards
        .iter()
        .filter(|guard| !free.contains(&guard.subject))
        .map(|guard| Guard {
            kind: guard.kind,
            subject: intern(&guard.subject),
            expected: intern(&guard.expected),
        })
        .collect();
    plan.strings = strings;
    plan
}

impl Variant {
    /// Writes a plan to the store, opens what was written and binds it.
    pub fn keep(
        id: u32,
        store: &PlanStore,
        key: &str,
        confirmed: Confirmed,
        passes: Selection,
    ) -> Result<Self, SessionError> {
        let plan = final_plan(
            &confirmed.recording,
            &confirmed.numbers,
            &confirmed.parts.guards,
            &confirmed.free,
        );
        let file = match store.write(key, &plan).and_then(PlanFile::open) {
            Ok(file) => file,
            Err(error) => {
                // The plan itself is good: replay it from memory.
                tracing::warn!(target: "rote::record", "plan {key} is not stored: {error}");
                PlanFile::from_plan(&plan)?
            }
        };
        Self::bind(id, file, key, confirmed, passes)
    }

    /// Binds an open plan file.
    pub fn bind(
        id: u32,
        file: PlanFile,
        key: &str,
        confirmed: Confirmed,
        passes: Selection,
    ) -> Result<Self, SessionError> {
        let Confirmed {
            recording,
            numbers,
            free,
            parts,
        } = confirmed;
        let (program, report) = optimize(file.to_plan(), passes);
        let optimized = PlanFile::from_plan(&program.plan)?;
        let plan = optimized.plan();
        let bound = BoundPlan::bind(plan, &program.schedule)?;
        let mut args = Vec::new();
        let mut grads = Vec::new();
        let mut state = Vec::new();
        let mut named = parts.named;
        for (binding, &(kind, slot)) in plan.bindings.iter().zip(bound.bindings()) {
            let path = plan.str(binding.path.to_native());
            let Some(at) = named.iter().position(|n| n.kind == kind && n.path == path) else {
                return Err(ReplayError::Bind(format!(
                    "the plan binds {path}, which this process does not have"
                ))
                .into());
            };
            let entry = &mut named[at];
            match (kind, entry.leaf) {
                (BindingKind::Arg, Some(leaf)) => args.push(ArgBinding {
                    slot,
                    leaf,
                    grad: false,
                }),
                (BindingKind::Grad, Some(leaf)) => args.push(ArgBinding {
                    slot,
                    leaf,
                    grad: true,
                }),
                (_, _) => {
                    let Some(object) = entry.object.take() else {
                        return Err(ReplayError::Bind(format!("{path} is bound twice")).into());
                    };
                    if kind == BindingKind::Grad {
                        grads.push((slot, object));
                    } else {
                        // SAFETY: the object is held, a tensor, and the GIL is held.
                        unsafe { bound.program().bind(slot, object.as_ptr(), false)? };
                        state.push(object);
                    }
                }
            }
        }
        let scalars = bound.scalars().to_vec();
        let mut scalar_words = vec![usize::MAX; scalars.len()];
        for (word, scalar) in scalar_words.iter_mut().zip(&scalars) {
            if let Scalar::Read { path } = scalar {
                let path = plan.str(*path);
                *word = parts.facts.float_word(path).ok_or_else(|| {
                    ReplayError::Bind(format!(
                        "the plan reads {path}, which this process does not have"
                    ))
                })?;
            }
        }
        Ok(Variant {
            id,
            key: key.to_owned(),
            call: Expected::new(parts.words),
            call_facts: parts.word_facts,
            leaves: parts.leaves,
            facts: parts.facts,
            free,
            recording,
            numbers,
            guards: parts.guards,
            replays: 0,
            passes: report,
            bound,
            args,
            grads,
            scalars,
            numbers_now: Vec::with_capacity(scalar_words.len()),
            scalar_words,
            _state: state,
            file,
        })
    }

    /// Replays the plan on the arguments that `call` has collected. Results:
    /// outputs, then gradients, in a Python list.
    pub fn replay(&mut self, call: &Call) -> Result<Object, ReplayError> {
        self.bound.begin()?;
        let results = self.replayed(call);
        self.bound.end()?;
        results
    }

    fn replayed(&mut self, call: &Call) -> Result<Object, ReplayError> {
        if !self.scalars.is_empty() {
            let mut failed = None;
            evaluate(&self.scalars, &mut self.numbers_now, |i| {
                self.facts
                    .float_at(self.scalar_words[i])
                    .unwrap_or_else(|error| {
                        failed.get_or_insert(error);
                        f64::NAN
                    })
            });
            if let Some(error) = failed {
                return Err(error);
            }
            self.bound.set_numbers(&self.numbers_now)?;
        }
        for arg in &self.args {
            // SAFETY: the leaf belongs to the caller's live arguments, and its
            // type was guarded.
            unsafe {
                self.bound
                    .program()
                    .bind(arg.slot, call.leaf(arg.leaf), arg.grad)?
            };
        }
        for (slot, owner) in &self.grads {
            // SAFETY: the owner is held.
            unsafe { self.bound.program().bind(*slot, owner.as_ptr(), true)? };
        }
        let run = self.bound.run().and_then(|()| self.bound.results());
        self.bound.clear()?;
        self.replays += 1;
        run
    }
}
