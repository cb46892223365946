//! The session: one captured function, its plans, and what happens at a call.
//!
//! A call is replayed when a variant's guards hold. Otherwise it runs eagerly,
//! and is recorded: the first recording becomes a candidate, the second equal
//! one a plan. State that is created lazily (an optimizer's first step) drops
//! a recording; what can't be proven right refuses it.

use std::ffi::{CStr, CString};
use std::path::PathBuf;

use hashbrown::{HashMap, HashSet};
use rote_plans::{Fingerprint, GuardKind};
use rote_replay::aten::ranks::without_gil;
use rote_replay::aten::sys::Object as PyObject;
use rote_replay::aten::{Call, Group, Object};
use rote_replay::first_difference;
use rote_tracer::Refusal;
use rote_tracer::compare::{Recording, compare};
use rote_tracer::passes::Selection;
use rote_tracer::scalars::TracedFloats;

use crate::SessionError;
use crate::agreement::{self, Decision};
use crate::facts::{DISPATCH_MODES_WORD, call_subject};
use crate::recording::{ActiveRecording, GuardText, Parts};
use crate::stats::Stats;
use crate::stored::{StoredPlans, free_of, guard_key, guards_differ, numbers_of, same_as_stored};
use crate::variant::{Confirmed, Variant};

/// What a session is made of.
#[derive(Clone, Debug)]
pub struct Config {
    /// The captured function, for example `train.py:train_step`.
    pub function: String,
    /// This process.
    pub fingerprint: Fingerprint,
    /// Directory of the plan store.
    pub plans: PathBuf,
    /// How many variants are kept at most.
    pub max_variants: usize,
    /// Which passes run over a plan when it is bound.
    pub passes: Selection,
}

/// What to do with a call.
#[derive(Debug)]
pub enum Next {
    /// It was replayed: by which variant, and the results in a Python list.
    Replayed(u32, Object),
    /// Run it eagerly and record it.
    Record,
    /// Run it eagerly.
    Eager,
}

/// What guards say of a call.
#[derive(Debug)]
enum Found {
    /// This variant's guards hold.
    Variant(usize),
    /// No variant's do; of the nearest one, the guard that missed.
    None(Option<String>),
    /// Calls made while something is recorded are not looked at.
    Recording,
}

/// What became of a recording.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Not kept, for a reason that should be gone at the next call.
    Dropped(String),
    /// Kept until a second one confirms it.
    Candidate,
    /// A new variant can be replayed.
    Kept(u32),
    /// The plan in the store is the same: it can be replayed.
    Adopted(u32),
    /// It cannot be replayed.
    Refused(Refusal),
}

#[derive(Debug)]
struct Candidate {
    recording: Recording,
    parts: Parts,
}

/// A recording in progress, with what it was found to resemble.
#[derive(Debug)]
struct Active {
    recording: ActiveRecording,
    /// A variant whose guards differ in hyperparameters only.
    variant: Option<usize>,
    /// A candidate under the same guards.
    candidate: Option<usize>,
    missed: Option<String>,
}

/// How many recordings in a row may differ from the one before.
const MAX_DIFFERING: u32 = 3;

/// How often a recording may be dropped in a row.
const MAX_DROPS: u32 = 4;

/// One captured function.
#[derive(Debug)]
pub struct Session {
    config: Config,
    stored: StoredPlans,
    call: Call,
    variants: Vec<Variant>,
    candidates: Vec<Candidate>,
    active: Option<Active>,
    stats: Stats,
    refused: HashSet<Vec<u64>>,
    drops: u32,
    last_changes: Vec<String>,
    unsteady: HashMap<String, u32>,
    full: bool,
    /// Recordings since the last one that was confirmed.
    unconfirmed: usize,
    /// Recordings in a row that differed from the one before.
    differing: u32,
    notice: Option<String>,
    missed: Option<String>,
    next_id: u32,
    state_storages: Vec<u64>,
    /// The process group whose ranks agree about every call.
    ranks: Option<CString>,
    /// Whether, as far as is known, every rank replays the last call.
    together: bool,
    /// Why the ranks' collectives did not fit, once said.
    unfit: Option<String>,
}

impl Session {
    /// A session with nothing recorded. The bridge must be loaded.
    pub fn new(config: Config) -> Result<Self, SessionError> {
        let stored = StoredPlans::open(&config)?;
        Ok(Session {
            config,
            stored,
            call: Call::new(),
            variants: Vec::new(),
            candidates: Vec::new(),
            active: None,
            stats: Stats::default(),
            refused: HashSet::new(),
            drops: 0,
            last_changes: Vec::new(),
            unsteady: HashMap::new(),
            full: false,
            unconfirmed: 0,
            differing: 0,
            notice: None,
            missed: None,
            next_id: 0,
            state_storages: Vec::new(),
            ranks: None,
            together: true,
            unfit: None,
        })
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The variants that can be replayed.
    pub fn variants(&self) -> &[Variant] {
        &self.variants
    }

    /// The variant with this number.
    pub fn variant(&self, id: u32) -> Option<&Variant> {
        self.variants.iter().find(|variant| variant.id == id)
    }

    /// Says which process group all ranks are of. When passes alter collectives,
    /// its ranks agree about every call: whether that is so. Every rank must then
    /// make the same calls in the same order.
    pub fn agree_in(&mut self, group: &CStr) -> Result<bool, SessionError> {
        if !self.config.passes.alters_collectives() {
            return Ok(false);
        }
        let Some(found) = Group::find(group)? else {
            return Ok(false);
        };
        if !found.cpu {
            self.config.passes = self.config.passes.keeping_collectives();
            self.notice = Some(format!(
                "{}: passes that alter collectives stay off: the ranks would agree on the CPU, and the default \
                 process group has no backend for it; init_process_group(\"cpu:gloo,cuda:nccl\") makes one that has",
                self.config.function
            ));
            return Ok(false);
        }
        self.ranks = Some(group.to_owned());
        Ok(true)
    }

    /// Whether every rank replays the call that was handled last, as far as the
    /// ranks tell each other.
    pub fn together(&self) -> bool {
        self.together
    }

    /// Handles a call: replays it, or says how it must run. The ranks agree, if
    /// they are to.
    ///
    /// # Safety
    /// `args` must be a live tuple and `kwargs` a live dict, and the GIL held.
    pub unsafe fn call(&mut self, args: PyObject, kwargs: PyObject) -> Result<Next, SessionError> {
        // SAFETY: the caller vouches for the objects.
        unsafe { self.handle(args, kwargs, true) }
    }

    /// Handles a call that is made from within a captured function, which runs
    /// eagerly here and may be replayed on other ranks: nothing is agreed.
    ///
    /// # Safety
    /// As [`Session::call`].
    pub unsafe fn call_within(
        &mut self,
        args: PyObject,
        kwargs: PyObject,
    ) -> Result<Next, SessionError> {
        // SAFETY: the caller vouches for the objects.
        unsafe { self.handle(args, kwargs, false) }
    }

    /// # Safety
    /// As [`Session::call`].
    unsafe fn handle(
        &mut self,
        args: PyObject,
        kwargs: PyObject,
        agree: bool,
    ) -> Result<Next, SessionError> {
        self.stats.calls += 1;
        self.missed = None;
        // SAFETY: the caller vouches for the objects.
        let found = unsafe { self.find(args, kwargs) };
        // Before anything else, an error included: other ranks wait for this one.
        let agreed = agree && self.agree(found.as_ref().ok())?;
        let missed = match found? {
            Found::Recording => return Ok(Next::Eager),
            Found::Variant(i) => {
                self.variants[..=i].rotate_right(1); // most recently used first
                return self.replay(agreed);
            }
            Found::None(missed) => missed,
        };
        let refused = self.refused.contains(self.call.words());
        if let Some(subject) = missed {
            self.stats.fallbacks += 1;
            *self.stats.guard_misses.entry(subject.clone()).or_insert(0) += 1;
            self.missed = Some(subject);
        }
        if refused || self.refused.len() >= self.config.max_variants {
            self.log_eager_miss();
            return Ok(Next::Eager);
        }
        if let Some(why) = self.no_room() {
            if !self.full {
                self.full = true;
                self.notice = Some(format!("{}: {why}", self.config.function));
            }
            self.log_eager_miss();
            return Ok(Next::Eager);
        }
        Ok(Next::Record)
    }

    /// Looks for a variant whose guards hold.
    ///
    /// # Safety
    /// As [`Session::call`].
    unsafe fn find(&mut self, args: PyObject, kwargs: PyObject) -> Result<Found, SessionError> {
        // SAFETY: the caller vouches for the objects.
        let (words, facts) = unsafe { self.call.collect(args, kwargs)? };
        if self.active.is_some() || words[DISPATCH_MODES_WORD] != 0 {
            return Ok(Found::Recording);
        }
        let mut best: Option<(usize, String)> = None;
        for (i, variant) in self.variants.iter_mut().enumerate() {
            let (progress, subject) = match variant.call.difference(words) {
                Some(word) => {
                    let fact = variant.call_facts.get(word).or_else(|| facts.get(word));
                    (word, call_subject(word, fact, &variant.leaves))
                }
                None => match variant.facts.difference(&variant.free)? {
                    Some(subject) => (usize::MAX, subject),
                    None => return Ok(Found::Variant(i)),
                },
            };
            if best.as_ref().is_none_or(|(most, _)| progress > *most) {
                best = Some((progress, subject));
            }
        }
        Ok(Found::None(best.map(|(_, subject)| subject)))
    }

    /// Agrees with the other ranks about a call: whether all replay it with
    /// altered collectives.
    fn agree(&mut self, found: Option<&Found>) -> Result<bool, SessionError> {
        self.together = true;
        let Some(name) = &self.ranks else {
            return Ok(false);
        };
        let Some(group) = Group::find(name)? else {
            return Ok(false); // left by all ranks
        };
        let offer = match found {
            Some(Found::Variant(i)) => self.variants[*i].offer(),
            _ => None,
        };
        let decided = without_gil(|| agreement::decide(group.number, &group, offer));
        let (decision, exchanged) = decided.and_then(|decided| decided).map_err(|error| {
            SessionError::Agreement(format!(
                "{}: the ranks could not agree about a call, which every rank of the job must make while passes \
                 alter collectives: {error}",
                self.config.function
            ))
        })?;
        self.stats.exchanges += u64::from(exchanged);
        self.together = decision != Decision::Missed;
        if let Decision::Unfit(why) = &decision {
            if self.unfit.is_none() {
                self.notice = Some(format!(
                    "{}: the passes altered collectives so that those of the ranks do not fit together; such calls \
                     keep the collectives of eager: {why}",
                    self.config.function
                ));
            }
            self.unfit = Some(why.to_string());
        }
        Ok(decision == Decision::Altered)
    }

    /// Replays the call with the first variant.
    fn replay(&mut self, agreed: bool) -> Result<Next, SessionError> {
        let Some(variant) = self.variants.first_mut() else {
            return Ok(Next::Eager);
        };
        let results = variant.replay(&self.call, agreed)?;
        self.stats.replays += 1;
        if variant.needs_agreement() {
            *(if agreed {
                &mut self.stats.altered
            } else {
                &mut self.stats.kept
            }) += 1;
        }
        Ok(Next::Replayed(variant.id, results))
    }

    /// Why the collectives that passes have left did not fit those of other
    /// ranks, the last time they did not.
    pub fn unfit(&self) -> Option<&str> {
        self.unfit.as_deref()
    }

    /// Why nothing more is recorded, if so.
    fn no_room(&self) -> Option<String> {
        let most = self.config.max_variants;
        if self.variants.len() >= most {
            return Some(format!(
                "{most} variants are recorded, which is the most allowed (max_variants): calls that match none of \
                 them run eagerly; the last miss was on {}",
                self.missed.as_deref().unwrap_or("?")
            ));
        }
        (self.unconfirmed >= most).then(|| {
            let mut latest = self.candidates.iter().rev().map(|candidate| &candidate.parts);
            let changing = match (latest.next(), latest.next()) {
                (Some(last), Some(before)) => first_difference(&before.words, &last.words)
                    .map(|word| call_subject(word, last.word_facts.get(word), &last.leaves)),
                _ => None,
            };
            format!(
                "{most} recordings in a row were made under different guards, so that none could be confirmed \
                 (max_variants): further calls run eagerly; what changes is {}",
                changing.as_deref().unwrap_or("a host value")
            )
        })
    }

    /// Something to warn the user of, once.
    pub fn take_notice(&mut self) -> Option<String> {
        self.notice.take()
    }

    fn log_eager_miss(&self) {
        if let Some(subject) = &self.missed {
            let expected = self
                .variants
                .first()
                .and_then(|variant| guard_on(&variant.guards, subject));
            tracing::info!(
                target: "rote::guards",
                "{}: {subject}: expected {}, found another value; the call runs eagerly",
                self.config.function,
                expected.as_deref().unwrap_or("absent")
            );
        }
    }

    /// Begins to record the call that was handled last.
    pub fn begin(&mut self) -> &mut ActiveRecording {
        // The facts are still those of the last call; collect() owns them.
        let (words, facts) = self.call.last();
        let recording = ActiveRecording::new(
            self.config.fingerprint.clone(),
            &self.config.function,
            words,
            facts,
        );
        let missed = self.missed.take();
        &mut self
            .active
            .insert(Active {
                recording,
                variant: None,
                candidate: None,
                missed,
            })
            .recording
    }

    /// The recording in progress.
    pub fn active(&mut self) -> Option<&mut ActiveRecording> {
        self.active.as_mut().map(|active| &mut active.recording)
    }

    /// The step failed: the recording is worth nothing.
    pub fn abort(&mut self) {
        self.active = None;
    }

    /// All names and facts are known; the step is about to run.
    pub fn ready(&mut self) -> Result<(), SessionError> {
        let Some(active) = self.active.as_mut() else {
            return Ok(());
        };
        active.recording.facts.settle()?;
        let storages: Vec<u64> = active
            .recording
            .named
            .iter()
            .filter(|named| named.kind == rote_plans::BindingKind::State)
            .map(|named| named.storage)
            .collect();
        if storages != self.state_storages {
            // Arguments that alias the state could not be told before.
            self.call.set_state(&storages)?;
            self.state_storages = storages;
            self.call.recollect()?;
            let (words, facts) = self.call.last();
            active.recording.words = words;
            active.recording.word_facts = facts;
        }
        if let Some(subject) = &active.missed {
            log_miss(
                &self.config.function,
                subject,
                &self.variants,
                &active.recording,
            );
        }
        let all: Vec<String> = active
            .recording
            .facts
            .entries
            .iter()
            .filter(|entry| entry.hyperparameter)
            .map(|entry| entry.subject.clone())
            .collect();
        for (i, variant) in self.variants.iter_mut().enumerate() {
            if variant.call.words() == active.recording.words
                && variant.facts.difference(&all)?.is_none()
            {
                active.variant = Some(i);
                break;
            }
        }
        let mut unsteady = None;
        for (i, candidate) in self.candidates.iter_mut().enumerate() {
            if candidate.parts.words != active.recording.words {
                continue;
            }
            match candidate.parts.facts.difference(&all)? {
                None => {
                    active.candidate = Some(i);
                    unsteady = None;
                    break;
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
        if active.variant.is_none() && active.candidate.is_none() {
            if let Some((subject, was)) = unsteady {
                let times = self.unsteady.entry(subject.clone()).or_insert(0);
                *times += 1;
                if *times >= 2 {
                    active
                        .recording
                        .refuse(changes_every_call(&format!("{subject} (once {was})")));
                }
            }
        } else {
            self.unsteady.clear();
        }
        Ok(())
    }

    /// Binds a plan of the store without recording, when one was made under
    /// the same guards. The call can then be replayed.
    pub fn trust(&mut self) -> Result<bool, SessionError> {
        self.stored.scan();
        let Some(active) = self.active.take() else {
            return Ok(false);
        };
        let guards = active.recording.guard_texts();
        let key = guard_key(&self.config.function, &guards);
        let Some(file) = self.stored.find(&key) else {
            self.active = Some(active);
            return Ok(false);
        };
        let plan = file.to_plan();
        if let Some(problem) = guards_differ(&plan, &guards) {
            tracing::warn!(target: "rote::replay", "{}: stored plan {key}: {problem}", self.config.function);
            self.active = Some(active);
            return Ok(false);
        }
        let free = free_of(&plan);
        let recording = Recording {
            plan,
            sources: Vec::new(),
            floats: TracedFloats::default(),
        };
        let parts = active.recording.into_parts();
        let variant = Variant::bind(
            self.next_id,
            file,
            &key,
            Confirmed {
                recording,
                numbers: Vec::new(),
                free,
                parts,
            },
            self.config.passes,
        )?;
        self.next_id += 1;
        self.variants.insert(0, variant);
        tracing::info!(target: "rote::replay", "{}: stored plan {key} is trusted", self.config.function);
        Ok(true)
    }

    /// Replays the call that was handled last with the newest variant. Other
    /// ranks were told that it is not replayed: collectives are as recorded.
    pub fn replay_last(&mut self) -> Result<Next, SessionError> {
        self.replay(false)
    }

    /// Ends the recording of a step that ran to its end. `result` is the
    /// structure of the result as JSON; `None` for one a plan cannot give back.
    pub fn finish(&mut self, result: &str) -> Result<Outcome, SessionError> {
        let Some(Active {
            mut recording,
            variant,
            candidate,
            ..
        }) = self.active.take()
        else {
            return Err(SessionError::NoRecording);
        };
        self.stored.scan();
        recording.check_generators("")?;
        let words = recording.words.clone();
        let outcome = match self.judge(recording, variant, candidate, result) {
            Err(SessionError::Refused(refusal)) => Outcome::Refused(refusal),
            other => other?,
        };
        match &outcome {
            Outcome::Dropped(why) => {
                self.drops += 1;
                tracing::info!(target: "rote::record", "{}: recording dropped: {why}", self.config.function);
            }
            Outcome::Refused(refusal) => {
                self.refused.insert(words);
                self.stats.refusals.push(refusal.to_string());
            }
            _ => self.drops = 0,
        }
        Ok(outcome)
    }

    fn judge(
        &mut self,
        mut active: ActiveRecording,
        variant: Option<usize>,
        candidate: Option<usize>,
        result: &str,
    ) -> Result<Outcome, SessionError> {
        if let Some(refusal) = active.refusal() {
            return Ok(Outcome::Refused(refusal.clone()));
        }
        active.facts.settle_added()?;
        let changes = active.facts.changes()?;
        if !changes.is_empty() {
            let subject =
                |change: &String| change.split(" (").next().unwrap_or_default().to_owned();
            let subjects: Vec<String> = changes.iter().map(subject).collect();
            let again = changes
                .iter()
                .find(|change| self.last_changes.contains(&subject(change)));
            if let Some(change) = again {
                return Ok(Outcome::Refused(changes_every_call(change)));
            }
            self.last_changes = subjects;
            return Ok(Outcome::Dropped(format!(
                "the step changed {}",
                changes.join(", ")
            )));
        }
        self.last_changes.clear();
        let survivors = active.survivors();
        if !survivors.is_empty() {
            let some: Vec<&str> = survivors.iter().take(3).map(String::as_str).collect();
            let what = format!(
                "{} tensors that outlive the call, among them {}",
                survivors.len(),
                some.join("; ")
            );
            if self.drops + 1 >= MAX_DROPS {
                return Err(SessionError::Refused(Refusal::step(
                    format!("keeps {what}, at every call"),
                    "return them, or write them in place to tensors that state= names",
                )));
            }
            return Ok(Outcome::Dropped(format!("the step made {what}")));
        }

        let (recording, parts) = active.into_recording(result);
        let key = guard_key(&self.config.function, &parts.guards);
        if let Some(i) = variant {
            return self.generalize(i, &key, recording, parts);
        }
        if let Some(i) = candidate {
            let numbers = match compare(&self.candidates[i].recording, &recording) {
                Ok(numbers) => numbers,
                Err(refusal) => {
                    self.candidates[i] = Candidate { recording, parts };
                    return self.differs(refusal);
                }
            };
            let free = recording.floats.free(&self.candidates[i].recording.floats);
            self.candidates.remove(i);
            return self.keep(&key, recording, numbers, free, parts);
        }
        let ours = self.variants.iter().any(|variant| variant.key == key);
        let stored = if ours { None } else { self.stored.find(&key) };
        if let Some(file) = stored {
            let plan = file.to_plan();
            match same_as_stored(&plan, &recording, &parts) {
                Ok(free) => {
                    tracing::info!(target: "rote::record", "{}: stored plan {key} is the same", self.config.function);
                    let id = self.next_id();
                    let numbers = numbers_of(&plan, &recording);
                    let variant = Variant::bind(
                        id,
                        file,
                        &key,
                        Confirmed {
                            recording,
                            numbers,
                            free,
                            parts,
                        },
                        self.config.passes,
                    )?;
                    self.add(variant);
                    return Ok(Outcome::Adopted(id));
                }
                Err(difference) => tracing::warn!(
                    target: "rote::record",
                    "{}: stored plan {key} is not what the script does now: {difference}; recording a new one",
                    self.config.function
                ),
            }
        } else if self.variants.is_empty() && self.candidates.is_empty() {
            self.stored.explain_strangers(&parts.guards);
        }
        if self.candidates.len() >= self.config.max_variants {
            self.candidates.remove(0);
        }
        self.unconfirmed += 1;
        self.candidates.push(Candidate { recording, parts });
        Ok(Outcome::Candidate)
    }

    /// Two recordings under the same guards differ. Once it may be chance:
    /// autograd clones a gradient that a collective's thread still holds, and
    /// steals it otherwise.
    fn differs(&mut self, refusal: Refusal) -> Result<Outcome, SessionError> {
        self.differing += 1;
        if self.differing >= MAX_DIFFERING {
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
        parts: Parts,
    ) -> Result<Outcome, SessionError> {
        let old = &self.variants[i];
        let found = match compare(&old.recording, &recording) {
            Ok(found) => found,
            Err(refusal) => return self.differs(refusal),
        };
        let mut numbers: Vec<_> = old.numbers.iter().copied().chain(found).collect();
        numbers.sort_unstable();
        numbers.dedup_by_key(|number| number.arg);
        let mut free = old.free.clone();
        for path in recording.floats.free(&old.recording.floats) {
            if !free.contains(&path) {
                free.push(path);
            }
        }
        if free.len() > old.free.len() {
            self.variants.remove(i);
        }
        self.keep(key, recording, numbers, free, parts)
    }

    fn keep(
        &mut self,
        key: &str,
        recording: Recording,
        numbers: Vec<rote_tracer::compare::BoundNumber>,
        free: Vec<String>,
        parts: Parts,
    ) -> Result<Outcome, SessionError> {
        let id = self.next_id();
        let variant = Variant::keep(
            id,
            self.stored.store(),
            key,
            Confirmed {
                recording,
                numbers,
                free,
                parts,
            },
            self.config.passes,
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

    /// A recording was confirmed: its variant is the first to be tried.
    fn add(&mut self, variant: Variant) {
        self.variants.insert(0, variant);
        self.unconfirmed = 0;
        self.differing = 0;
    }

    fn next_id(&mut self) -> u32 {
        self.next_id += 1;
        self.next_id - 1
    }
}

fn changes_every_call(what: &str) -> Refusal {
    Refusal::step(
        format!(
            "changes the host value {what} at every call: a replay would not, or would miss every time"
        ),
        "pass it as an argument, make it a tensor, or, if it does not matter, name it in ignore=",
    )
}

/// What the guard on a subject, or on what it is a part of, expects.
fn guard_on(guards: &[GuardText], subject: &str) -> Option<String> {
    let stem = subject.rsplit_once('.').map_or(subject, |(stem, _)| stem);
    let find = |name: &str| guards.iter().find(|guard| guard.subject == name);
    find(subject)
        .or_else(|| find(stem))
        .map(|guard| guard.expected.clone())
}

fn log_miss(function: &str, subject: &str, variants: &[Variant], recording: &ActiveRecording) {
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
