//! The session: one captured function, its plans, and its calls.
//!
//! A call is replayed when a variant's guards hold. Otherwise it runs eagerly,
//! and is recorded: the first recording becomes a candidate, the second equal
//! one a plan. The session drops a recording if the step creates state
//! lazily, as an optimizer's first step does. It refuses a recording that it cannot
//! prove right. [`State`] has a table of a session's states and its answers to calls.

mod attempts;
mod confirm;

use std::ffi::{CStr, CString};
use std::path::PathBuf;
use std::rc::Rc;

use rote_passes::Selection;
use rote_plans::Fingerprint;
use rote_plans::sequence::Members;
use rote_replay::agreement::{self, Decision, Ranks};
use rote_replay::{CallFacts, Frontend, Left, TensorOf, first_difference};
use rote_tracer::Refusal;
use rote_tracer::compare::Recording;

use crate::SessionError;
use crate::places::Places;
use crate::recording::{ActiveRecording, GuardText, Parts};
use crate::stats::Stats;
use crate::stored::StoredPlans;
use crate::variant::{Terms, Variant};

use attempts::Attempts;

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
pub enum Next<R> {
    /// It was replayed: by which variant, and its results.
    Replayed(u32, R),
    /// Run it eagerly and record it.
    Record,
    /// Run it eagerly.
    Eager,
}

/// For how many calls a variant must be unused before it makes room for another.
const IDLE_CALLS: u64 = 256;

/// How many replays of a variant may end in a row since the step would get another answer about data.
const MAX_UNANSWERED: u32 = 32;

/// How many recordings in a row none may confirm, at least, and how many kinds of
/// calls may be refused: the first steps of a run are like no others.
const MIN_ATTEMPTS: usize = 4;

/// What guards say of a call.
#[derive(Debug)]
enum Found {
    /// This variant's guards hold.
    Variant(usize),
    /// No variant's do.
    None(Miss),
    /// Calls made while something is recorded, or under something that sees
    /// each op, are not looked at.
    Unseen,
}

/// What became of a replay.
#[derive(Debug)]
enum Replayed<R> {
    Done(Next<R>),
    /// Nothing: the step would get another answer about data than the plan is for, as the text says.
    Answered(String),
}

/// Why no variant is replayed.
#[derive(Debug, Default)]
struct Miss {
    /// Of the nearest variant, the guard that missed.
    subject: Option<String>,
    /// Whether one variant may follow from another recording: nothing but
    /// hyperparameters has changed, on which only arithmetic was seen.
    near: bool,
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
struct Candidate<F: Frontend> {
    id: u32,
    recording: Recording,
    parts: Parts<F>,
    places: Places,
}

impl<F: Frontend> Candidate<F> {
    fn new(id: u32, recording: Recording, parts: Parts<F>) -> Self {
        Candidate {
            id,
            places: Places::of::<F>(&recording.plan, &parts.named),
            recording,
            parts,
        }
    }
}

/// A recording in progress, with what it was found to resemble.
#[derive(Debug)]
struct Active<F: Frontend> {
    recording: ActiveRecording<F>,
    /// Variants whose guards differ in hyperparameters only.
    variants: Vec<usize>,
    /// Candidates under the same guards.
    candidates: Vec<usize>,
    /// The candidate whose guards the recording has taken over.
    resumed: Option<Candidate<F>>,
    missed: Option<String>,
    /// Whether all names and facts are known.
    ready: bool,
    /// Whether no other recording and no stored plan can confirm it.
    first: bool,
}

/// A call whose recording was refused.
#[derive(Debug)]
struct RefusedCall<F: Frontend> {
    call: Rc<CallFacts<F::Held>>,
    /// From which call on another one like it may be recorded: the step has asked for data, and may do something else
    /// for another answer.
    again: Option<u64>,
    /// For how many calls none is recorded, the next time.
    pause: u64,
}

/// For how many calls none is recorded after the first refusal of a step that has asked for data.
const REFUSED_PAUSE: u64 = 8;

/// One captured function.
#[derive(Debug)]
pub struct Session<F: Frontend> {
    config: Config,
    stored: StoredPlans,
    frontend: F,
    variants: Vec<Variant<F>>,
    candidates: Vec<Candidate<F>>,
    /// What is guarded of a call that was not recorded, and its number.
    survey: Option<(u32, Parts<F>)>,
    state: State<F>,
    stats: Stats,
    refused: Vec<RefusedCall<F>>,
    attempts: Attempts,
    agreement: Agreement,
    notices: Notices,
    /// The guard on which the call that is handled missed.
    missed: Option<String>,
    /// Whether a stored plan was bound for the last call, which was not replayed yet.
    just_trusted: bool,
    next_id: u32,
    next_candidate: u32,
    failure: Failure<F>,
}

/// What a session does with calls.
///
/// | state | a call | next |
/// |---|---|---|
/// | `Open` | a variant's guards hold: it is replayed | `Open` |
/// | | none hold, and a recording is worth its cost: the caller runs and records it ([`Session::begin`]) | `Recording` |
/// | | none hold: the caller runs it | `Open` |
/// | `Recording` | the caller runs it, as a part of the call that is recorded | `Recording` |
/// | | [`Session::finish`]: dropped, kept as a candidate, made a variant, or refused | `Open` |
/// | | [`Session::abort`], [`Session::trust`] | `Open` |
/// | any | [`Session::stop`] | `Stopped` |
/// | `Stopped` | the caller runs it | `Stopped` |
#[derive(Debug)]
enum State<F: Frontend> {
    Open,
    Recording(Box<Active<F>>),
    Stopped,
}

impl<F: Frontend> State<F> {
    /// The recording in progress, which ends.
    fn take(&mut self) -> Option<Box<Active<F>>> {
        match std::mem::replace(self, State::Open) {
            State::Recording(active) => Some(active),
            other => {
                *self = other;
                None
            }
        }
    }
}

/// The ranks with which calls are agreed.
#[derive(Debug)]
struct Agreement {
    /// The process group whose ranks agree about every call.
    ranks: Option<CString>,
    /// Whether the ranks are to agree about checks too.
    checks: bool,
    /// How many default process groups had no name that the framework knows.
    unregistered: u64,
    /// Why the ranks' collectives did not fit, once said.
    unfit: Option<String>,
}

/// What users are told, each once.
#[derive(Debug, Default)]
struct Notices {
    /// What is to be told next.
    next: Option<String>,
    /// Whether it was said that nothing more is recorded.
    full: bool,
    /// Whether it was said that guards could not be checked.
    unguarded: bool,
}

/// What the last replay has left, if it failed.
#[derive(Debug)]
struct Failure<F: Frontend> {
    /// Of each gradient of a variant's plan.
    left: Option<(u32, Vec<Left<TensorOf<F>>>)>,
    /// What the framework raised.
    exception: Option<F::Exception>,
}

impl<F: Frontend> Session<F> {
    /// A session with nothing recorded, for calls of a framework.
    pub fn new(config: Config, frontend: F) -> Result<Self, SessionError> {
        let stored = StoredPlans::open(&config)?;
        Ok(Session {
            config,
            stored,
            frontend,
            variants: Vec::new(),
            candidates: Vec::new(),
            survey: None,
            state: State::Open,
            stats: Stats::default(),
            refused: Vec::new(),
            attempts: Attempts::new(),
            agreement: Agreement {
                ranks: None,
                checks: false,
                unregistered: 0,
                unfit: None,
            },
            notices: Notices::default(),
            missed: None,
            just_trusted: false,
            next_id: 0,
            next_candidate: 0,
            failure: Failure {
                left: None,
                exception: None,
            },
        })
    }

    /// The framework, to tell it of what calls have in common.
    pub fn frontend_mut(&mut self) -> &mut F {
        &mut self.frontend
    }

    /// Counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The passes that run over a plan.
    #[cfg(feature = "faults")]
    pub(crate) fn passes(&self) -> Selection {
        self.config.passes
    }

    /// The variants that can be replayed.
    pub fn variants(&self) -> &[Variant<F>] {
        &self.variants
    }

    /// The variant with this number.
    pub fn variant(&self, id: u32) -> Option<&Variant<F>> {
        self.variants.iter().find(|variant| variant.id == id)
    }

    /// The same, to change it, and the framework.
    pub(crate) fn variant_mut(&mut self, id: u32) -> Option<(&F, &mut Variant<F>)> {
        let variant = self.variants.iter_mut().find(|variant| variant.id == id);
        variant.map(|variant| (&self.frontend, variant))
    }

    /// Says which process group is the default one now, none or another than
    /// before, and what this process is in it. Plans of another one stay, and are
    /// not used until it is back.
    pub fn enter_world(
        &mut self,
        group: Option<&CStr>,
        world_size: u32,
        rank: u32,
    ) -> Result<(), SessionError> {
        let number = match group {
            None => 0,
            Some(name) => match self.frontend.group(name)? {
                Some(group) => group.number() + 1,
                None => {
                    self.agreement.unregistered += 1;
                    u64::MAX - self.agreement.unregistered // never the same again
                }
            },
        };
        self.frontend.enter_world(number);
        self.agreement.ranks = None;
        let own = &mut self.config.fingerprint;
        if (own.world_size, own.rank) != (world_size, rank) {
            (own.world_size, own.rank) = (world_size, rank);
            self.stored = StoredPlans::open(&self.config)?;
        }
        Ok(())
    }

    /// Lets a step read values on the host after collectives: the ranks of the group that
    /// [`Session::agree_in`] is told next agree about every call, and about these values.
    pub fn let_ranks_agree(&mut self) {
        self.agreement.checks = true;
    }

    /// Says which process group all ranks are of. When passes alter collectives, or the
    /// ranks are to agree ([`Session::let_ranks_agree`]), its ranks agree about every
    /// call: whether that is so. Every rank must then make the same calls in the same
    /// order.
    pub fn agree_in(&mut self, group: &CStr) -> Result<bool, SessionError> {
        let checks = self.agreement.checks;
        if !self.config.passes.alters_collectives() && !checks {
            return Ok(false);
        }
        let Some(found) = self.frontend.group(group)? else {
            return Ok(false);
        };
        if let Some(why) = found.why_silent() {
            self.config.passes = self.config.passes.keeping_collectives();
            let off = match checks {
                true => "the ranks do not agree about calls",
                false => "passes that alter collectives stay off",
            };
            self.notices.next = Some(format!("{}: {off}: {why}", self.config.function));
            return Ok(false);
        }
        self.agreement.ranks = Some(group.to_owned());
        Ok(true)
    }

    /// How plans are bound.
    fn terms(&self) -> Terms {
        let own = &self.config.fingerprint;
        let ranks = self.agreement.ranks.as_ref();
        let ranks = ranks.filter(|_| self.agreement.checks);
        Terms {
            passes: self.config.passes,
            ranks: ranks.map(|group| Members {
                name: group.to_string_lossy().into_owned(),
                ranks: (0..own.world_size).collect(),
            }),
        }
    }

    /// Whether a call would be replayed, were it made now.
    pub fn holds(&mut self, args: F::Args) -> Result<bool, SessionError> {
        let found = self.find(args)?;
        Ok(!self.is_stopped() && matches!(found, Found::Variant(_)))
    }

    /// The facts of a call, and a variant. An error where there is no such variant.
    pub(crate) fn collected(
        &mut self,
        id: u32,
        args: F::Args,
    ) -> Result<(&F, &mut Variant<F>), SessionError> {
        self.frontend.collect(args)?;
        self.variant_mut(id).ok_or(SessionError::NoVariant)
    }

    /// The recording in progress, which ends.
    pub(crate) fn take_recording(&mut self) -> Option<ActiveRecording<F>> {
        self.state.take().map(|active| active.recording)
    }

    /// Whether all calls run eagerly from now on.
    fn is_stopped(&self) -> bool {
        matches!(self.state, State::Stopped)
    }

    /// Replays nothing any more, for a reason that statistics list. Every rank that
    /// agrees about calls must do so at the same call.
    pub fn stop(&mut self, why: &str) {
        self.state = State::Stopped;
        self.stats.refusals.push(why.to_owned());
    }

    /// Handles a call: replays it, or says how it must run. The ranks agree, if
    /// they are to.
    pub fn call(&mut self, args: F::Args) -> Result<Next<F::Results>, SessionError> {
        self.handle(args, true)
    }

    /// Handles a call that is made from within a captured function, which runs
    /// eagerly here and may be replayed on other ranks: nothing is agreed.
    pub fn call_within(&mut self, args: F::Args) -> Result<Next<F::Results>, SessionError> {
        self.handle(args, false)
    }

    fn handle(&mut self, args: F::Args, agree: bool) -> Result<Next<F::Results>, SessionError> {
        self.stats.calls += 1;
        self.missed = None;
        self.just_trusted = false;
        if self.is_stopped() {
            return Ok(Next::Eager);
        }
        let found = self.find(args);
        // Before anything else, an error included: other ranks wait for this one.
        let mut agreed = agree && self.agree(found.as_ref().ok())?;
        let mut found = self.guarded(found);
        let mut unanswered: Vec<(u32, String)> = Vec::new();
        let missed = loop {
            match found {
                Found::Unseen => return Ok(Next::Eager),
                Found::Variant(i) => {
                    self.variants[..=i].rotate_right(1); // most recently used first
                    self.variants[0].last_used = self.stats.calls;
                    let (id, late) = (self.variants[0].id, self.variants[0].is_late());
                    match self.replay(agreed)? {
                        Replayed::Done(next) => return Ok(next),
                        Replayed::Answered(subject) => unanswered.push((id, subject)),
                    }
                    let other = self.look(&unanswered);
                    // The check has ended the replay of every rank.
                    agreed = late && self.agree(other.as_ref().ok())?;
                    found = self.guarded(other);
                }
                Found::None(missed) => break missed,
            }
        };
        let mut refused = false;
        for earlier in &self.refused {
            let waits = earlier.again.is_none_or(|again| self.stats.calls < again);
            refused = refused || waits && self.frontend.difference(&earlier.call)?.is_none();
        }
        if let Some(subject) = missed.subject {
            self.stats.fallbacks += 1;
            *self.stats.guard_misses.entry(subject.clone()).or_insert(0) += 1;
            self.missed = Some(subject);
        }
        if refused || self.refused.len() >= self.most_attempts() {
            self.log_eager_miss();
            return Ok(Next::Eager);
        }
        let no_room = if missed.near { None } else { self.no_room() };
        if let Some(why) = no_room {
            if !std::mem::replace(&mut self.notices.full, true) {
                self.notices.next = Some(format!("{}: {why}", self.config.function));
            }
            self.log_eager_miss();
            return Ok(Next::Eager);
        }
        Ok(Next::Record)
    }

    /// Looks for a variant whose guards hold.
    fn find(&mut self, args: F::Args) -> Result<Found, SessionError> {
        if matches!(self.state, State::Recording(_)) {
            return Ok(Found::Unseen); // what is recorded stays the last call
        }
        self.frontend.collect(args)?;
        if self.frontend.is_watched() {
            return Ok(Found::Unseen);
        }
        self.look(&[])
    }

    /// No replay without guards. What the step makes of the call, it says itself.
    fn guarded(&mut self, found: Result<Found, SessionError>) -> Found {
        found.unwrap_or_else(|error| {
            if !std::mem::replace(&mut self.notices.unguarded, true) {
                self.notices.next = Some(format!(
                    "{}: the guards of a call could not be checked, so such calls run eagerly: {error}",
                    self.config.function
                ));
            }
            Found::Unseen
        })
    }

    /// Looks for a variant whose guards hold for the call that was collected. Not among those `unanswered`: the step
    /// would get another answer about data, as the text says.
    fn look(&mut self, unanswered: &[(u32, String)]) -> Result<Found, SessionError> {
        let mut best: Option<(usize, String)> = None;
        let mut near = false;
        for (i, variant) in self.variants.iter_mut().enumerate() {
            if let Some((_, subject)) = unanswered.iter().find(|(id, _)| *id == variant.id) {
                best = Some((usize::MAX, subject.clone()));
                continue;
            }
            let (progress, subject) = match self.frontend.difference(&variant.call)? {
                Some(word) => {
                    let fact = variant.call.places.get(word);
                    let fact = fact.or_else(|| self.frontend.places().get(word));
                    (word, self.frontend.word(word, fact, &variant.leaves))
                }
                None => match variant.missed(&self.frontend)? {
                    Some(subject) => {
                        near = near || variant.is_near_but_for(&self.frontend, &subject)?;
                        (usize::MAX, subject)
                    }
                    None => return Ok(Found::Variant(i)),
                },
            };
            if best.as_ref().is_none_or(|(most, _)| progress > *most) {
                best = Some((progress, subject));
            }
        }
        Ok(Found::None(Miss {
            subject: best.map(|(_, subject)| subject),
            near,
        }))
    }

    /// Agrees with the other ranks about a call: whether all replay it with
    /// altered collectives.
    fn agree(&mut self, found: Option<&Found>) -> Result<bool, SessionError> {
        let Some(name) = &self.agreement.ranks else {
            return Ok(false);
        };
        let Some(group) = self.frontend.group(name)? else {
            return Ok(false); // left by all ranks
        };
        let offer = match found {
            Some(Found::Variant(i)) => self.variants[*i].offer(),
            _ => None,
        };
        let decided = (self.frontend).unlocked(|| agreement::decide(&group, offer));
        let (decision, exchanged) = decided.and_then(|decided| decided).map_err(|error| {
            SessionError::Agreement(format!(
                "{}: the ranks could not agree about a call (while passes alter collectives, every rank of the job must \
                 make each call): {error}",
                self.config.function
            ))
        })?;
        self.stats.exchanges += u64::from(exchanged);
        if let Decision::Unfit(why) = &decision {
            if self.agreement.unfit.is_none() {
                self.notices.next = Some(format!(
                    "{}: the passes altered collectives, and the collectives of the ranks do not fit together; such calls \
                     keep the collectives of eager: {why}",
                    self.config.function
                ));
            }
            self.agreement.unfit = Some(why.to_string());
        }
        Ok(decision == Decision::Altered)
    }

    /// Replays the call with the first variant.
    fn replay(&mut self, agreed: bool) -> Result<Replayed<F::Results>, SessionError> {
        let Some(variant) = self.variants.first_mut() else {
            return Ok(Replayed::Done(Next::Eager));
        };
        let late = variant.is_late();
        if late && !agreed {
            self.stats.fallbacks += 1;
            *(self.stats.guard_misses)
                .entry("other ranks".to_owned())
                .or_insert(0) += 1;
            return Ok(Replayed::Done(Next::Eager));
        }
        if late {
            let group = match &self.agreement.ranks {
                Some(name) => self.frontend.group(name)?,
                None => None,
            };
            self.frontend.compare_checks(group.as_ref())?;
        }
        let results = variant.replay(&self.frontend, agreed);
        if late {
            self.frontend.compare_checks(None)?;
        }
        let left = std::mem::take(&mut variant.left);
        self.failure.left = (!left.is_empty()).then_some((variant.id, left));
        let (undone, answered) = (variant.undone, variant.answered.take());
        if variant.lost || variant.unanswered >= MAX_UNANSWERED {
            self.variants.remove(0);
        }
        if let Some(subject) = answered {
            return Ok(Replayed::Answered(subject));
        }
        // Eager raises the same, or handles it: `except`, `finally`, `with`.
        if let (Err((error, _)), true) = (&results, undone) {
            tracing::info!(target: "rote::replay", "{}: {error}; the call runs eagerly", self.config.function);
            self.stats.fallbacks += 1;
            return Ok(Replayed::Done(Next::Eager));
        }
        let results = results.map_err(|(error, exception)| {
            self.failure.exception = exception;
            error
        })?;
        let Some(variant) = self.variants.first() else {
            return Ok(Replayed::Done(Next::Eager));
        };
        self.stats.replays += 1;
        if variant.needs_agreement() {
            *(if agreed {
                &mut self.stats.altered
            } else {
                &mut self.stats.kept
            }) += 1;
        }
        Ok(Replayed::Done(Next::Replayed(variant.id, results)))
    }

    /// Replays the call that was handled last with the newest variant, or gives the variant
    /// up, if the step would read other values than it is for. Other ranks were told that
    /// the call is not replayed: collectives are as recorded.
    pub fn replay_last(&mut self) -> Result<Next<F::Results>, SessionError> {
        let id = self.variants.first().map(|variant| variant.id);
        let next = match self.replay(false)? {
            Replayed::Done(next) => next,
            Replayed::Answered(_) => Next::Eager,
        };
        if let (Next::Eager, Some(id)) = (&next, id) {
            self.give_up(id); // the caller has not seen what it gives back
        }
        Ok(next)
    }

    /// Whether a stored plan was bound for the call that was handled last ([`Session::trust`]), and the call has not been
    /// replayed yet. Says so once.
    pub fn take_trusted(&mut self) -> bool {
        std::mem::take(&mut self.just_trusted)
    }

    /// Gives up a variant whose results the framework cannot give back.
    pub fn give_up(&mut self, id: u32) {
        self.variants.retain(|variant| variant.id != id);
    }

    /// Why the collectives that passes have left did not fit those of other
    /// ranks, the last time they did not.
    pub fn unfit(&self) -> Option<&str> {
        self.agreement.unfit.as_deref()
    }

    /// How many recordings in a row none may confirm, and how many kinds of calls
    /// may be refused.
    fn most_attempts(&self) -> usize {
        self.config.max_variants.max(MIN_ATTEMPTS)
    }

    /// Why nothing more is recorded, if so.
    fn no_room(&mut self) -> Option<String> {
        let (most, calls) = (self.config.max_variants, self.stats.calls);
        let used_lately = |variant: &Variant<F>| calls - variant.last_used < IDLE_CALLS;
        if self.variants.len() >= most && self.variants.iter().all(used_lately) {
            return Some(format!(
                "{most} variants are recorded, which is the limit (max_variants), and all are in use: calls that match \
                 no variant run eagerly, until a variant was not used for {IDLE_CALLS} calls; the last miss was on {}",
                self.missed.as_deref().unwrap_or("?")
            ));
        }
        if self.attempts.is_paused(calls) {
            return Some(String::new()); // which was said when it began
        }
        let most = self.most_attempts();
        let (attempts, pause) = self.attempts.pause(calls, most)?;
        let changing = self.changing();
        Some(format!(
            "{attempts} recordings in a row were made under different guards, so no recording was confirmed by a second \
             one (max_variants): the next {pause} calls that match no plan run eagerly, then Rote records again; the \
             value that changes is {}",
            changing.as_deref().unwrap_or("a host value")
        ))
    }

    /// What differs between the last two recordings.
    fn changing(&self) -> Option<String> {
        let mut latest = self
            .candidates
            .iter()
            .rev()
            .map(|candidate| &candidate.parts);
        let (last, before) = (latest.next()?, latest.next()?);
        if let Some(word) = first_difference(&before.call.words, &last.call.words) {
            let place = last.call.places.get(word);
            return Some(self.frontend.word(word, place, &last.leaves));
        }
        let differs = |guard: &&GuardText| {
            let same = |other: &GuardText| {
                other.subject == guard.subject && other.expected == guard.expected
            };
            !before.guards.iter().any(same)
        };
        let changed = last.guards.iter().find(differs)?;
        let was = guard_on(&before.guards, &changed.subject);
        Some(match was {
            Some(was) => format!("{}: {was}, then {}", changed.subject, changed.expected),
            None => changed.subject.clone(),
        })
    }

    /// What the last replay has left of each gradient of a variant's plan, if it failed;
    /// given out once.
    pub fn take_left(&mut self) -> Option<(u32, Vec<Left<TensorOf<F>>>)> {
        self.failure.left.take()
    }

    /// What the framework raised in the last replay, if it failed; given out once.
    pub fn take_exception(&mut self) -> Option<F::Exception> {
        self.failure.exception.take()
    }

    /// Something to warn the user of, once.
    pub fn take_notice(&mut self) -> Option<String> {
        self.notices.next.take()
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
}

/// What the guard on a subject, or on what it is a part of, expects.
fn guard_on(guards: &[GuardText], subject: &str) -> Option<String> {
    let stem = subject.rsplit_once('.').map_or(subject, |(stem, _)| stem);
    let find = |name: &str| guards.iter().find(|guard| guard.subject == name);
    find(subject)
        .or_else(|| find(stem))
        .map(|guard| guard.expected.clone())
}
