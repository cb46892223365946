//! How a session records the call that it has handled last.

use std::rc::Rc;

use rote_plans::{BindingKind, GuardKind};
use rote_replay::Frontend;
use rote_tracer::Refusal;
use rote_tracer::compare::Trace;
use rote_tracer::scalars::TracedFloats;

use super::candidates::Candidate;
use super::variants::{Variants, guard_on};
use super::{Outcome, Session, State};
use crate::SessionError;
use crate::recording::ActiveRecording;
use crate::stored::free_of;
use crate::variant::Confirmed;

/// A recording in progress.
#[derive(Debug)]
pub struct Active<F: Frontend> {
    pub recording: ActiveRecording<F>,
    /// The candidate whose guards it has taken over.
    pub resumed: Option<Candidate<F>>,
    pub alike: Alike,
    /// The guard on which the call missed.
    missed: Option<String>,
    /// Whether all names and facts are known.
    ready: bool,
}

/// What may confirm a recording that has resumed none, by the places among variants and candidates.
#[derive(Debug, Default)]
pub struct Alike {
    /// Those whose guards differ in hyperparameters only.
    pub variants: Vec<usize>,
    /// Those under the same guards.
    pub candidates: Vec<usize>,
    /// Whether there are none, and no stored plans.
    pub first: bool,
}

impl<F: Frontend> Active<F> {
    /// All names and facts are known: holds what they see.
    fn settle(&mut self, frontend: &mut F) -> Result<(), SessionError> {
        let recording = &mut self.recording;
        recording.facts.settle(frontend)?;
        self.ready = true;
        let named = (recording.named.iter()).filter(|named| named.kind == BindingKind::State);
        let state =
            named.filter_map(|named| Some((named.storage, F::borrow(named.tensor.as_ref()?))));
        // Arguments that alias the state could not be told before.
        frontend.add_state(state)?;
        frontend.recollect()?;
        recording.call = Rc::new(frontend.last()?);
        Ok(())
    }

    fn log_miss(&self, function: &str, variants: &Variants<F>) {
        if let Some(subject) = &self.missed {
            let found = guard_on(&self.recording.guard_texts(), subject);
            let expected = variants.expected(subject);
            let told = match (expected, found) {
                (None, None) => "found another value".to_owned(), // by a check
                (expected, found) => {
                    let text = |value: Option<String>| value.unwrap_or_else(|| "absent".to_owned());
                    format!("expected {}, found {}", text(expected), text(found))
                }
            };
            tracing::info!(target: "rote::guards", "{function}: {subject}: {told}");
        }
    }
}

impl<F: Frontend> Session<F> {
    /// Begins to record the call that was handled last.
    pub fn begin(&mut self) -> Result<&mut ActiveRecording<F>, SessionError> {
        if self.is_stopped() {
            return Err(SessionError::NoRecording);
        }
        let call = Rc::new(self.frontend.last()?);
        let fingerprint = self.config.fingerprint.clone();
        let function = &self.config.function;
        let mut recording = ActiveRecording::new(&self.frontend, fingerprint, function, call);
        if self.terms().ranks.is_some() {
            recording.let_ranks_agree();
        }
        for (name, value) in self.frontend.surroundings() {
            recording.guard(GuardKind::Mode, name, &value);
        }
        self.state = State::Recording(Box::new(Active {
            recording,
            resumed: None,
            alike: Alike::default(),
            missed: self.missed.take(),
            ready: false,
        }));
        let (_, recording) = self.active().ok_or(SessionError::NoRecording)?;
        Ok(recording)
    }

    /// Names the next leaf of the call that is recorded.
    pub fn name_leaf(&mut self, name: &str, leaf: Option<F::Ref<'_>>) -> Result<(), SessionError> {
        let (frontend, recording) = self.active().ok_or(SessionError::NoRecording)?;
        let found = frontend.leaf(recording.leaves.len() as u32);
        recording.leaves.push(name.to_owned());
        if !found
            .zip(leaf)
            .is_some_and(|(found, leaf)| F::same(found, leaf))
        {
            recording.refuse(Refusal::step(
                format!("takes arguments whose contents changed before Rote read {name}"),
                "change arguments only in the thread that calls the step, and not during the call",
            ));
        }
        Ok(())
    }

    /// Ends a recording whose step has run unseen: what it names and guards is kept for the next recording. Comes back:
    /// its number, for [`Session::resume`]; `None` where the step is refused.
    pub fn survey(&mut self) -> Result<Option<u32>, SessionError> {
        let active = self.state.take().ok_or(SessionError::NoRecording)?;
        if active.recording.refusal().is_some() || !active.ready {
            return Ok(None);
        }
        let parts = active.recording.into_parts();
        Ok(Some(self.judge.candidates.keep_survey(parts)))
    }

    /// Records under the guards of a candidate ([`Session::newest_candidate`]) or a survey ([`Session::survey`]), if all
    /// of them hold: the same values of hyperparameters too. Not of a candidate whose step has asked for data. Nothing has
    /// to be guarded again then. Whether that is so.
    pub fn resume(&mut self, number: u32) -> Result<bool, SessionError> {
        let State::Recording(active) = &mut self.state else {
            return Err(SessionError::NoRecording);
        };
        if active.ready || active.resumed.is_some() {
            self.judge.candidates.survey = None;
            return Ok(false);
        }
        (self.judge.candidates).resume(number, &self.frontend, active)
    }

    /// The number of the newest candidate.
    pub fn newest_candidate(&self) -> Option<u32> {
        self.judge
            .candidates
            .all
            .last()
            .map(|candidate| candidate.id)
    }

    /// Whether nothing can confirm the recording that is about to run, but a later one: it will be a candidate at best.
    pub fn is_first(&self) -> bool {
        matches!(&self.state, State::Recording(active) if active.alike.first)
    }

    /// The recording in progress, and the framework that it is of.
    pub fn active(&mut self) -> Option<(&F, &mut ActiveRecording<F>)> {
        let State::Recording(active) = &mut self.state else {
            return None;
        };
        Some((&self.frontend, &mut active.recording))
    }

    /// The recording in progress, which ends.
    pub(crate) fn take_recording(&mut self) -> Option<ActiveRecording<F>> {
        self.state.take().map(|active| active.recording)
    }

    /// The step failed, or the next recording guards other values: the recording is worth nothing.
    pub fn abort(&mut self) {
        self.judge.attempts.is_steady();
        let Some(active) = self.state.take() else {
            return;
        };
        if let Some(mut candidate) = active.resumed {
            candidate.parts.facts = active.recording.facts;
            self.judge.candidates.all.push(candidate);
        }
    }

    /// All names and facts are known; the step is about to run.
    pub fn ready(&mut self) -> Result<(), SessionError> {
        let State::Recording(active) = &mut self.state else {
            return Ok(());
        };
        active.settle(&mut self.frontend)?;
        active.log_miss(&self.config.function, &self.variants);
        (self.judge).compare_guards(&self.frontend, &mut self.variants, active)
    }

    /// Whether a recording is in progress.
    pub fn is_recording(&self) -> bool {
        matches!(&self.state, State::Recording(_))
    }

    /// Whether a recording is in progress that [`Session::ready`] was called for.
    pub fn is_ready(&self) -> bool {
        matches!(&self.state, State::Recording(active) if active.ready)
    }

    /// Binds a plan of the store without recording, when one was made under
    /// the same guards. The call can then be replayed. A plan that lets a hyperparameter
    /// vary is bound if the recording follows that by now ([`ActiveRecording::float`]).
    pub fn trust(&mut self) -> Result<bool, SessionError> {
        let State::Recording(active) = &self.state else {
            return Ok(false);
        };
        if !active.ready {
            return Err(SessionError::NotReady);
        }
        let variants = self.variants.all.iter();
        let ours: Vec<&str> = variants.map(|variant| variant.key.as_str()).collect();
        let stored = &mut self.judge.stored;
        stored.scan();
        let found = stored.find_trusted(&self.frontend, &active.recording, &ours)?;
        let Some((key, file)) = found else {
            return Ok(false);
        };
        let recording = self.take_recording().ok_or(SessionError::NoRecording)?;
        let plan = file.to_plan();
        let trusted = format!("{}: stored plan {key} is trusted", self.config.function);
        let confirmed = Confirmed {
            key,
            file: Rc::new(file),
            optimized: None,
            free: free_of(&plan),
            trace: Trace {
                plan,
                sources: Vec::new(),
                floats: TracedFloats::default(),
            },
            sources: Vec::new(),
            parts: recording.into_parts(),
        };
        self.add(confirmed, None)?;
        self.just_trusted = true;
        tracing::info!(target: "rote::replay", "{trusted}");
        Ok(true)
    }

    /// Binds the plan of another session, whose function is equal to this one, in place of recording the call. Both
    /// sessions are told the same facts in the same order. `own` says which of them are about an object that each of the
    /// two functions has for itself: the caller has compared what these hold. All other facts, the call, and how tensors
    /// look must be as the other variant expects them. Whether the plan was bound; the call can then be replayed.
    pub fn adopt(
        &mut self,
        other: &Session<F>,
        id: u32,
        own: &[bool],
    ) -> Result<bool, SessionError> {
        let State::Recording(active) = &self.state else {
            return Ok(false);
        };
        if !active.ready {
            return Err(SessionError::NotReady);
        }
        let variant = other.variant(id).ok_or(SessionError::NoVariant)?;
        let same_place = self.config.function == other.config.function
            && self.config.fingerprint == other.config.fingerprint;
        if !same_place || !variant.is_for(&self.frontend, &active.recording, own)? {
            return Ok(false);
        }
        let recording = self.take_recording().ok_or(SessionError::NoRecording)?;
        let mut parts = recording.into_parts();
        for named in &mut parts.named {
            named.written = Some(variant.written(named));
        }
        let confirmed = Confirmed {
            key: variant.key.clone(),
            file: variant.file.clone(),
            trace: variant.trace.clone(),
            sources: variant.sources.clone(),
            free: Vec::new(),
            parts,
            optimized: variant
                .optimized(self.config.passes)
                .filter(|_| self.config.passes == other.config.passes),
        };
        self.add(confirmed, None)?;
        self.just_trusted = true;
        let function = &self.config.function;
        tracing::info!(target: "rote::replay", "{function}: plan {} of an equal function is taken over", variant.key);
        Ok(true)
    }

    /// Makes a recording that was confirmed a variant, in place of the one at `replaces`: its number.
    fn add(
        &mut self,
        confirmed: Confirmed<F>,
        replaces: Option<usize>,
    ) -> Result<u32, SessionError> {
        let terms = self.terms();
        let (frontend, call) = (&self.frontend, self.stats.calls);
        let id = (self.variants).add(frontend, confirmed, replaces, &terms, call)?;
        self.judge.attempts.confirm();
        Ok(id)
    }

    /// Ends the recording of a step that ran to its end. `result` is the
    /// structure of the result as JSON; `None` for one a plan cannot give back.
    pub fn finish(&mut self, result: &str) -> Result<Outcome, SessionError> {
        let active = self.state.take().ok_or(SessionError::NoRecording)?;
        let call = active.recording.call.clone();
        let asked = active.recording.last_op().asks();
        let outcome = self.judged(*active, result).unwrap_or_else(|unkept| unkept);
        let attempts = &mut self.judge.attempts;
        match &outcome {
            Outcome::Refused(refusal) => {
                attempts.refuse(&self.frontend, call, asked, self.stats.calls)?;
                let text = refusal.to_string();
                if !self.stats.refusals.contains(&text) {
                    self.stats.refusals.push(text);
                }
            }
            Outcome::Dropped(why) => {
                tracing::info!(target: "rote::record", "{}: recording dropped: {why}", self.config.function);
                attempts.end(true);
            }
            _ => attempts.end(false),
        }
        Ok(outcome)
    }

    /// What becomes of a recording; an error where it makes no variant.
    fn judged(&mut self, active: Active<F>, result: &str) -> Result<Outcome, Outcome> {
        let accepted = (self.judge).judge(&self.frontend, &self.variants, active, result)?;
        let id = self.add(accepted.confirmed, accepted.replaces)?;
        if accepted.stored {
            return Ok(Outcome::Adopted(id));
        }
        if let Some(variant) = self.variant(id) {
            let plan = variant.file.plan();
            tracing::info!(
                target: "rote::record",
                "{}: plan {} recorded, {} instructions, {} guards",
                self.config.function,
                variant.key,
                plan.instrs.len(),
                plan.guards.len()
            );
        }
        self.stats.recordings += 1;
        Ok(Outcome::Kept(id))
    }
}
