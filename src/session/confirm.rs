//! Judges the recording of a call: whether it is dropped, refused, kept as a candidate,
//! or made a variant that can be replayed.

use std::rc::Rc;

use rote_plans::{BindingKind, GuardKind};
use rote_replay::{CallFacts, Frontend};
use rote_tracer::Refusal;
use rote_tracer::compare::{Recording, Source, compare};
use rote_tracer::recorder::checks_come_first;
use rote_tracer::scalars::TracedFloats;

use super::{Active, Candidate, Outcome, REFUSED_PAUSE, RefusedCall, Session, State, guard_on};
use crate::SessionError;
use crate::places::Places;
use crate::recording::{ActiveRecording, Parts};
use crate::stored::{
    free_of, guard_key, guards_differ, numbers_now, plan_key, same_as_stored, sources_of,
};
use crate::variant::{Confirmed, Variant};

/// What a recording may be like.
enum Known<F: Frontend> {
    /// The candidate whose guards it has taken over.
    Resumed(Box<Candidate<F>>),
    /// Variants and candidates by their places. `first`: there are none, and no stored plans.
    Alike {
        variants: Vec<usize>,
        candidates: Vec<usize>,
        first: bool,
    },
}

impl<F: Frontend> Session<F> {
    /// Begins to record the call that was handled last.
    pub fn begin(&mut self) -> Result<&mut ActiveRecording<F>, SessionError> {
        if self.is_stopped() {
            return Err(SessionError::NoRecording);
        }
        let call = Rc::new(self.frontend.last()?);
        let mut recording = ActiveRecording::new(
            &self.frontend,
            self.config.fingerprint.clone(),
            &self.config.function,
            call,
        );
        if self.terms().ranks.is_some() {
            recording.let_ranks_agree();
        }
        for (name, value) in self.frontend.surroundings() {
            recording.guard(GuardKind::Mode, name, &value);
        }
        let missed = self.missed.take();
        self.state = State::Recording(Box::new(Active {
            recording,
            variants: Vec::new(),
            candidates: Vec::new(),
            resumed: None,
            missed,
            ready: false,
            first: false,
        }));
        match &mut self.state {
            State::Recording(active) => Ok(&mut active.recording),
            _ => Err(SessionError::NoRecording),
        }
    }

    /// Names the next leaf of the call that is recorded.
    pub fn name_leaf(&mut self, name: &str, leaf: Option<F::Ref<'_>>) -> Result<(), SessionError> {
        let State::Recording(active) = &mut self.state else {
            return Err(SessionError::NoRecording);
        };
        let leaves = &mut active.recording.leaves;
        let found = self.frontend.leaf(leaves.len() as u32);
        leaves.push(name.to_owned());
        if !found
            .zip(leaf)
            .is_some_and(|(found, leaf)| F::same(found, leaf))
        {
            active.recording.refuse(Refusal::step(
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
        let number = self.next_candidate();
        self.survey = Some((number, active.recording.into_parts()));
        Ok(Some(number))
    }

    /// Records under the guards of a candidate ([`Session::newest_candidate`]) or a survey ([`Session::survey`]), if all
    /// of them hold: the same values of hyperparameters too. Nothing has to be guarded again then. Whether that is so.
    pub fn resume(&mut self, number: u32) -> Result<bool, SessionError> {
        let survey = self.survey.take();
        let State::Recording(active) = &mut self.state else {
            return Err(SessionError::NoRecording);
        };
        if active.resumed.is_some() || active.ready {
            return Ok(false);
        }
        if let Some((_, mut parts)) = survey.filter(|(known, _)| *known == number) {
            let holds = parts.hold(&self.frontend)?;
            if holds {
                active.recording.take_over(&self.frontend, &mut parts);
            }
            return Ok(holds);
        }
        let found = (self.candidates.iter()).position(|known| known.id == number);
        let Some(i) = found else { return Ok(false) };
        let known = &mut self.candidates[i];
        if !known.parts.hold(&self.frontend)? || known.places.difference(&self.frontend)?.is_some()
        {
            return Ok(false);
        }
        let mut known = self.candidates.remove(i);
        active.recording.take_over(&self.frontend, &mut known.parts);
        active.resumed = Some(known);
        Ok(true)
    }

    /// Whether nothing can confirm the recording that is about to run, but a later one: it will be a candidate at best.
    pub fn is_first(&self) -> bool {
        matches!(&self.state, State::Recording(active) if active.first)
    }

    /// The recording in progress, and the framework that it is of.
    pub fn active(&mut self) -> Option<(&F, &mut ActiveRecording<F>)> {
        let State::Recording(active) = &mut self.state else {
            return None;
        };
        Some((&self.frontend, &mut active.recording))
    }

    /// The step failed, or the next recording guards other values: the recording is worth nothing.
    pub fn abort(&mut self) {
        self.attempts.is_steady();
        let Some(active) = self.state.take() else {
            return;
        };
        if let Some(mut candidate) = active.resumed {
            candidate.parts.facts = active.recording.facts;
            self.candidates.push(candidate);
        }
    }

    /// All names and facts are known; the step is about to run.
    pub fn ready(&mut self) -> Result<(), SessionError> {
        let State::Recording(active) = &mut self.state else {
            return Ok(());
        };
        self.survey = None;
        active.recording.facts.settle(&self.frontend)?;
        active.ready = true;
        let state = active
            .recording
            .named
            .iter()
            .filter(|named| named.kind == BindingKind::State);
        let state =
            state.filter_map(|named| Some((named.storage, F::borrow(named.tensor.as_ref()?))));
        // Arguments that alias the state could not be told before.
        self.frontend.add_state(state)?;
        self.frontend.recollect()?;
        active.recording.call = Rc::new(self.frontend.last()?);
        if let Some(subject) = &active.missed {
            log_miss(
                &self.config.function,
                subject,
                &self.variants,
                &active.recording,
            );
        }
        if active.resumed.is_some() {
            self.attempts.is_steady();
            return Ok(());
        }
        let all = active.recording.facts.hyperparameters();
        for (i, variant) in self.variants.iter_mut().enumerate() {
            if self.frontend.difference(&variant.call)?.is_none()
                && variant.is_near(&self.frontend, &all)?
            {
                active.variants.push(i);
            }
        }
        let mut unsteady = None;
        for (i, candidate) in self.candidates.iter_mut().enumerate() {
            if self.frontend.difference(&candidate.parts.call)?.is_some() {
                continue;
            }
            let loose = loose(&candidate.recording, &all);
            match candidate.parts.facts.difference(&self.frontend, &loose)? {
                None if candidate.places.difference(&self.frontend)?.is_some() => {}
                None => {
                    active.candidates.push(i);
                }
                Some(subject) => {
                    let entry = candidate
                        .parts
                        .facts
                        .entries
                        .iter()
                        .find(|entry| entry.subject == subject);
                    if let Some(entry) = entry.filter(|entry| entry.kind == GuardKind::Host) {
                        unsteady = Some((subject, entry.text.clone()));
                    }
                }
            }
        }
        if active.variants.is_empty() && active.candidates.is_empty() {
            active.first = self.stored.is_empty();
            if let Some((subject, was)) = unsteady {
                if self.attempts.is_unsteady(&subject) {
                    active.recording.refuse(changes_every_call(
                        &format!("{subject} (once {was})"),
                        false,
                    ));
                }
            }
        } else {
            self.attempts.is_steady();
        }
        Ok(())
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
        if matches!(&self.state, State::Recording(active) if !active.ready) {
            return Err(SessionError::NotReady);
        }
        self.stored.scan();
        let Some(active) = self.state.take() else {
            return Ok(false);
        };
        let guards = active.recording.guard_texts();
        let key = guard_key(&self.config.function, &guards);
        let ours: Vec<&str> = (self.variants.iter().map(|variant| variant.key.as_str())).collect();
        let Some((key, file)) = self.stored.find_any(&key, &ours) else {
            self.state = State::Recording(active);
            return Ok(false);
        };
        let plan = file.to_plan();
        // What rebuilds views, only a recording holds; and all ranks replay late checks, or none.
        if has_rebuilt_views(&plan.result) || !checks_come_first(&plan) {
            self.state = State::Recording(active);
            return Ok(false);
        }
        let free = free_of(&plan);
        let pinned = free.iter().find(|path| !active.recording.is_loose(path));
        let problem = guards_differ(&plan, &guards)
            .or_else(|| {
                pinned.map(|path| {
                    format!("it lets {path} vary, but the script does more than arithmetic with it")
                })
            })
            .or_else(|| {
                let in_tensor = |path: &str| active.recording.number_in(&self.frontend, path);
                numbers_now(&plan, &active.recording.facts, in_tensor).err()
            });
        if let Some(problem) = problem {
            tracing::warn!(target: "rote::replay", "{}: stored plan {key}: {problem}", self.config.function);
            self.state = State::Recording(active);
            return Ok(false);
        }
        let places = Places::of::<F>(&plan, &active.recording.named);
        if let Some(subject) = places.difference(&self.frontend)? {
            tracing::info!(
                target: "rote::replay",
                "{}: stored plan {key}: it was recorded with another {subject}",
                self.config.function
            );
            self.state = State::Recording(active);
            return Ok(false);
        }
        let recording = Recording {
            plan,
            sources: Vec::new(),
            floats: TracedFloats::default(),
        };
        let parts = active.recording.into_parts();
        let variant = Variant::bind(
            &self.frontend,
            self.next_id,
            file,
            &key,
            Confirmed {
                recording,
                sources: Vec::new(),
                free,
                parts,
            },
            &self.terms(),
        )?;
        self.next_id += 1;
        self.add(variant);
        self.just_trusted = true;
        tracing::info!(target: "rote::replay", "{}: stored plan {key} is trusted", self.config.function);
        Ok(true)
    }

    /// Ends the recording of a step that ran to its end. `result` is the
    /// structure of the result as JSON; `None` for one a plan cannot give back.
    pub fn finish(&mut self, result: &str) -> Result<Outcome, SessionError> {
        let active = self.state.take().ok_or(SessionError::NoRecording)?;
        let Active {
            recording,
            variants,
            candidates,
            resumed,
            first,
            ..
        } = *active;
        self.stored.scan();
        let (call, asked) = (recording.call.clone(), recording.last_op().asks());
        // The step has run: whatever goes wrong from here on is no error of its.
        let known = match resumed {
            Some(candidate) => Known::Resumed(Box::new(candidate)),
            None => Known::Alike {
                variants,
                candidates,
                first,
            },
        };
        let outcome = match self.judge(recording, known, result) {
            Ok(outcome) => outcome,
            Err(SessionError::Refused(refusal)) => Outcome::Refused(refusal),
            Err(error) => Outcome::Refused(Refusal::step(
                format!("was recorded, but no plan could be made of the recording: {error}"),
                "report this as a bug, with the step; the step stays eager",
            )),
        };
        match &outcome {
            Outcome::Dropped(why) => {
                tracing::info!(target: "rote::record", "{}: recording dropped: {why}", self.config.function);
            }
            Outcome::Refused(refusal) => {
                self.refuse_calls(call, asked)?;
                let text = refusal.to_string();
                if !self.stats.refusals.contains(&text) {
                    self.stats.refusals.push(text);
                }
            }
            _ => {}
        }
        if !matches!(outcome, Outcome::Refused(_)) {
            self.attempts.end(matches!(outcome, Outcome::Dropped(_)));
        }
        Ok(outcome)
    }

    /// The recording of a call was refused: calls like it are not recorded for some time if the step has `asked` for
    /// data, else never again.
    fn refuse_calls(
        &mut self,
        call: Rc<CallFacts<F::Held>>,
        asked: bool,
    ) -> Result<(), SessionError> {
        let mut known = None;
        for (i, earlier) in self.refused.iter().enumerate() {
            if self.frontend.difference(&earlier.call)?.is_none() {
                known = Some(i);
            }
        }
        let i = known.unwrap_or(self.refused.len());
        if known.is_none() {
            self.refused.push(RefusedCall {
                call,
                again: None,
                pause: REFUSED_PAUSE,
            });
        }
        let refused = &mut self.refused[i];
        refused.again = asked.then(|| self.stats.calls + refused.pause);
        refused.pause = refused.pause.saturating_mul(2);
        Ok(())
    }

    /// What becomes of a recording: whether it can be kept, then whether another one confirms it.
    fn judge(
        &mut self,
        mut active: ActiveRecording<F>,
        known: Known<F>,
        result: &str,
    ) -> Result<Outcome, SessionError> {
        active.check_generators(&self.frontend, "")?;
        active.refuse_race(F::WAITS);
        let changed = self.changed(&mut active)?;
        if let Some(refusal) = active.refusal() {
            // A first call may make state, and do once what it never does again.
            return Ok(match changed {
                Some(Outcome::Dropped(why)) => Outcome::Dropped(format!("{why}, and {refusal}")),
                _ => Outcome::Refused(refusal.clone()),
            });
        }
        let unfit = match changed {
            None => self.outlived(&active),
            changed => changed,
        };
        if let Some(outcome) = unfit {
            return Ok(outcome);
        }
        let (recording, parts) = active.into_recording(result);
        let key = plan_key(&guard_key(&self.config.function, &parts.guards), &recording);
        let (variants, candidates, first) = match known {
            Known::Alike {
                variants,
                candidates,
                first,
            } => (variants, candidates, first),
            Known::Resumed(candidate) if candidate.recording.decides_as(&recording) => {
                return self.confirm(*candidate, &key, recording, parts);
            }
            Known::Resumed(mut candidate) => {
                candidate.parts.facts = parts.facts; // the next call's may be another recording of its branch
                self.candidates.push(*candidate);
                let why = "the step went another way than in the recording whose guards hold";
                return Ok(Outcome::Dropped(why.to_owned()));
            }
        };
        // Another branch makes another variant: by answers about data, or by numbers that are computed before a replay.
        // So do other numbers in tensors, or where nothing is known of what the variant computes.
        let of_variant = |i: &&usize| !recording.is_other_than(&self.variants[**i].recording);
        if let Some(&i) = variants.iter().find(of_variant) {
            return self.generalize(i, &key, recording, parts);
        }
        let of_candidate = |i: &&usize| self.candidates[**i].recording.decides_as(&recording);
        if let Some(&i) = candidates.iter().find(of_candidate) {
            let candidate = self.candidates.remove(i);
            return self.confirm(candidate, &key, recording, parts);
        }
        let others = variants.iter().map(|&i| &self.variants[i].recording);
        let mut others = others.chain(candidates.iter().map(|&i| &self.candidates[i].recording));
        match others.find_map(|other| recording.changing_number(other)) {
            Some(refusal) if self.attempts.differs() => Ok(Outcome::Refused(refusal)),
            _ => self.adopt(&key, recording, parts, !first),
        }
    }

    /// A step that changes what is guarded: the recording is dropped once, since the change may be the last one.
    fn changed(
        &mut self,
        active: &mut ActiveRecording<F>,
    ) -> Result<Option<Outcome>, SessionError> {
        active.facts.settle_added(&self.frontend)?;
        let changes = active.facts.changes(&self.frontend)?;
        let subject = |change: &String| change.split(" (").next().unwrap_or_default().to_owned();
        let again = self.attempts.changed(changes.iter().map(subject).collect());
        Ok(match (again, changes.is_empty()) {
            (_, true) => None,
            (Some(again), _) => {
                let what = &changes[again];
                let hyperparameters = active.facts.hyperparameters();
                let is_hyper = hyperparameters.contains(&subject(what));
                Some(Outcome::Refused(changes_every_call(what, is_hyper)))
            }
            (None, _) => {
                let changes = changes.join(", ");
                Some(Outcome::Dropped(format!("the step changed {changes}")))
            }
        })
    }

    /// A step that makes tensors which outlive the call and are no result: the recording is dropped, since the first
    /// steps make state; too often in a row it is refused.
    fn outlived(&self, active: &ActiveRecording<F>) -> Option<Outcome> {
        let survivors = active.survivors();
        if survivors.is_empty() {
            return None;
        }
        let some: Vec<&str> = survivors.iter().take(3).map(String::as_str).collect();
        let what = format!(
            "{} tensors that outlive the call, among them {}",
            survivors.len(),
            some.join("; ")
        );
        if !self.attempts.is_last_drop() {
            return Some(Outcome::Dropped(format!("the step made {what}")));
        }
        Some(Outcome::Refused(Refusal::step(
            format!("keeps {what}, at every call"),
            if active.unwaited() > 0 {
                "wait for every collective inside the captured function (in PyTorch wait_tensor(), or .wait()); return \
                 the other tensors, or write them in place to tensors of the state (state= in Python)"
            } else {
                "return these tensors, or write them in place to tensors of the state (state= in Python)"
            },
        )))
    }

    /// A recording under the guards of a candidate: an equal one makes a variant, another one takes its place.
    fn confirm(
        &mut self,
        candidate: Candidate<F>,
        key: &str,
        recording: Recording,
        parts: Parts<F>,
    ) -> Result<Outcome, SessionError> {
        let known = &candidate.recording;
        let sources = match compare(known, &known.sources(), &recording) {
            Ok(sources) => sources,
            Err(refusal) => {
                self.wait(recording, parts);
                return self.differs(refusal);
            }
        };
        let free = recording.floats.free(&known.floats);
        self.keep(key, recording, sources, free, parts)
    }

    /// A recording that nothing in this process confirms: the stored plan may, if it is the same; else it waits for a
    /// second one.
    fn adopt(
        &mut self,
        key: &str,
        recording: Recording,
        parts: Parts<F>,
        may_be_stored: bool,
    ) -> Result<Outcome, SessionError> {
        let ours = self.variants.iter().any(|variant| variant.key == key);
        let find = may_be_stored && !ours;
        let stored = if find { self.stored.find(key) } else { None };
        if let Some(file) = stored {
            let plan = file.to_plan();
            match same_as_stored(&plan, &recording, &parts) {
                Ok(free) => {
                    tracing::info!(target: "rote::record", "{}: stored plan {key} is the same", self.config.function);
                    let id = self.next_id();
                    let sources = sources_of(&plan, &recording);
                    let confirmed = Confirmed {
                        recording,
                        sources,
                        free,
                        parts,
                    };
                    let terms = self.terms();
                    let variant = Variant::bind(&self.frontend, id, file, key, confirmed, &terms)?;
                    self.add(variant);
                    return Ok(Outcome::Adopted(id));
                }
                Err(difference) => tracing::warn!(
                    target: "rote::record",
                    "{}: stored plan {key} differs from the recording: {difference}; recording a new plan",
                    self.config.function
                ),
            }
        } else if self.variants.is_empty() && self.candidates.is_empty() {
            self.stored.explain_strangers(&parts.guards);
        }
        if self.candidates.len() >= self.config.max_variants {
            self.candidates.remove(0);
        }
        self.attempts.wait();
        self.wait(recording, parts);
        Ok(Outcome::Candidate)
    }

    /// Keeps a recording until a second one confirms it.
    fn wait(&mut self, recording: Recording, parts: Parts<F>) {
        let id = self.next_candidate();
        (self.candidates).push(Candidate::new(id, recording, parts));
    }

    fn next_candidate(&mut self) -> u32 {
        self.next_candidate += 1;
        self.next_candidate - 1
    }

    /// The number of the newest candidate.
    pub fn newest_candidate(&self) -> Option<u32> {
        self.candidates.last().map(|candidate| candidate.id)
    }

    /// Two recordings under the same guards differ. Once it may be chance:
    /// autograd clones a gradient that a collective's thread still holds, and
    /// steals it otherwise.
    fn differs(&mut self, refusal: Refusal) -> Result<Outcome, SessionError> {
        if self.attempts.differs() {
            return Ok(Outcome::Refused(refusal));
        }
        Ok(Outcome::Dropped(refusal.to_string()))
    }

    /// A variant missed because hyperparameters changed: bind the numbers that
    /// follow them.
    fn generalize(
        &mut self,
        i: usize,
        key: &str,
        recording: Recording,
        parts: Parts<F>,
    ) -> Result<Outcome, SessionError> {
        let old = &self.variants[i];
        let sources = match compare(&old.recording, &old.sources, &recording) {
            Ok(sources) => sources,
            Err(refusal) => return self.differs(refusal),
        };
        let mut free = old.free.clone();
        for path in recording.floats.free(&old.recording.floats) {
            if !free.contains(&path) {
                free.push(path);
            }
        }
        free.retain(|path| recording.floats.is_loose(path));
        // What it could replay, the new one can, or neither should.
        self.variants.remove(i);
        self.keep(key, recording, sources, free, parts)
    }

    fn keep(
        &mut self,
        key: &str,
        recording: Recording,
        sources: Vec<Source>,
        free: Vec<String>,
        parts: Parts<F>,
    ) -> Result<Outcome, SessionError> {
        let id = self.next_id();
        let variant = Variant::keep(
            &self.frontend,
            id,
            self.stored.store(),
            key,
            Confirmed {
                recording,
                sources,
                free,
                parts,
            },
            &self.terms(),
        )?;
        tracing::info!(
            target: "rote::record",
            "{}: plan {key} recorded, {} instructions, {} guards",
            self.config.function,
            variant.file.plan().instrs.len(),
            variant.file.plan().guards.len()
        );
        self.add(variant);
        self.stats.recordings += 1;
        Ok(Outcome::Kept(id))
    }

    /// A recording was confirmed: its variant is the first to be tried. Beyond
    /// `max_variants`, the one that was not used for the longest time goes.
    fn add(&mut self, mut variant: Variant<F>) {
        variant.last_used = self.stats.calls;
        self.variants.insert(0, variant);
        while self.variants.len() > self.config.max_variants {
            let used = self.variants.iter().map(|variant| variant.last_used);
            let Some((oldest, _)) = used.enumerate().skip(1).min_by_key(|&(_, used)| used) else {
                break;
            };
            let gone = self.variants.remove(oldest);
            tracing::info!(
                target: "rote::record",
                "{}: plan {} makes room for a new plan: it was unused for {} calls",
                self.config.function,
                gone.key,
                self.stats.calls - gone.last_used
            );
        }
        self.attempts.confirm();
    }

    fn next_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }
}

/// Whether a plan returns views that take more than strides to make from their bases.
fn has_rebuilt_views(result: &str) -> bool {
    let result: serde_json::Value = serde_json::from_str(result).unwrap_or_default();
    let views = result["views"].as_array();
    views.is_some_and(|views| views.iter().any(|view| !view["tuple"][3].is_null()))
}

/// The hyperparameters among `all` that a recording follows and nothing pins.
fn loose(recording: &Recording, all: &[String]) -> Vec<String> {
    let mut loose = all.to_vec();
    loose.retain(|path| recording.floats.is_loose(path));
    loose
}

fn changes_every_call(what: &str, hyperparameter: bool) -> Refusal {
    let remedy = if hyperparameter {
        "set it before the captured function is called (in Python, host= takes a function for that); the step of a learning rate scheduler may stay inside, if \
         nothing there reads the rate"
    } else {
        "make the value a tensor, or pass it as an argument if it has few values; if it does not matter, leave it \
         unguarded (ignore= in Python)"
    };
    Refusal::step(
        format!(
            "changes the host value {what} at every call: a replay changes no host value, and each new value misses its \
             guard"
        ),
        remedy,
    )
}

fn log_miss<F: Frontend>(
    function: &str,
    subject: &str,
    variants: &[Variant<F>],
    recording: &ActiveRecording<F>,
) {
    let expected = variants
        .first()
        .and_then(|variant| guard_on(&variant.guards, subject));
    let found = guard_on(&recording.guard_texts(), subject);
    tracing::info!(
        target: "rote::guards",
        "{function}: {subject}: expected {}, found {}",
        expected.as_deref().unwrap_or("absent"),
        found.as_deref().unwrap_or("absent")
    );
}
