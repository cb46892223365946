//! The session: one captured function, its plans, and its calls.
//!
//! A call is replayed when a variant's guards hold. Otherwise it runs eagerly,
//! and is recorded: the first recording becomes a candidate, the second equal
//! one a plan. The session drops a recording if the step creates state
//! lazily, as an optimizer's first step does. It refuses a recording that it cannot
//! prove right. [`State`] has a table of a session's states and its answers to calls.

mod agreement;
mod asking;
mod attempts;
mod candidates;
mod judge;
mod notices;
mod record;
mod variants;

use std::ffi::CStr;
use std::path::PathBuf;

use rote_passes::Selection;
use rote_plans::Fingerprint;
use rote_replay::{Frontend, Left, TensorOf};
use rote_tracer::Refusal;

use crate::SessionError;
use crate::stats::Stats;
use crate::stored::StoredPlans;
use crate::variant::{Terms, Unanswered, Variant};

use agreement::Agreement;
use asking::Asking;
use judge::Judge;
use notices::Notices;
use record::Active;
use variants::{Found, IDLE_CALLS, Variants};

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

/// What became of a replay.
#[derive(Debug)]
enum Replayed<R> {
    Done(Next<R>),
    /// Nothing: the step would get another answer about data than the plan is for, as the text says.
    Answered(Unanswered),
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

/// One captured function.
#[derive(Debug)]
pub struct Session<F: Frontend> {
    config: Config,
    frontend: F,
    variants: Variants<F>,
    judge: Judge<F>,
    agreement: Agreement,
    notices: Notices,
    state: State<F>,
    stats: Stats,
    /// The guard on which the call that is handled missed.
    missed: Option<String>,
    /// Whether a stored plan was bound for the last call, which was not replayed yet.
    just_trusted: bool,
    /// Whether plans that check data are tried.
    asking: Asking,
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
        Ok(Session {
            variants: Variants::new(&config),
            judge: Judge::new(&config)?,
            agreement: Agreement::default(),
            notices: Notices::new(&config.function),
            config,
            frontend,
            state: State::Open,
            stats: Stats::default(),
            missed: None,
            just_trusted: false,
            asking: Asking::new(),
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
        &self.variants.all
    }

    /// The variant with this number.
    pub fn variant(&self, id: u32) -> Option<&Variant<F>> {
        self.variants().iter().find(|variant| variant.id == id)
    }

    /// The same, to change it, and the framework.
    pub(crate) fn variant_mut(&mut self, id: u32) -> Option<(&F, &mut Variant<F>)> {
        let variant = self
            .variants
            .all
            .iter_mut()
            .find(|variant| variant.id == id);
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
        let number = self.agreement.enter(&self.frontend, group)?;
        self.frontend.enter_world(number);
        let own = &mut self.config.fingerprint;
        if (own.world_size, own.rank) != (world_size, rank) {
            (own.world_size, own.rank) = (world_size, rank);
            self.judge.stored = StoredPlans::open(&self.config)?;
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
        let (frontend, config) = (&self.frontend, &mut self.config);
        Ok((self.agreement).join(frontend, group, config, &mut self.notices)?)
    }

    /// How plans are bound.
    fn terms(&self) -> Terms {
        Terms {
            passes: self.config.passes,
            ranks: (self.agreement).of_checks(self.config.fingerprint.world_size),
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
        let mut unanswered: Vec<Unanswered> = Vec::new();
        let mut again = self.config.max_variants; // each time, a rank rules one of its variants out
        let missed = loop {
            match found {
                Found::Unchecked => return Ok(Next::Eager),
                Found::Variant(i) => {
                    let variant = self.variants.use_at(i, self.stats.calls);
                    let late = variant.is_late();
                    match self.replay(agreed)? {
                        Replayed::Done(next) => {
                            self.asking.replayed();
                            return Ok(next);
                        }
                        // Another rank has ended it: what this one has is right, and may be so again.
                        Replayed::Answered(ended) if ended.is_right_here(late) && again > 0 => {
                            again -= 1;
                        }
                        Replayed::Answered(ended) => {
                            self.asking.ended_in_vain();
                            unanswered.push(ended);
                        }
                    }
                    let other = self.variants.find(&self.frontend, &unanswered, true);
                    // The check has ended the replay of every rank.
                    agreed = late && self.agree(other.as_ref().ok())?;
                    found = self.guarded(other);
                }
                Found::None(missed) => break missed,
            }
        };
        let attempts = &self.judge.attempts;
        let refused = attempts.are_refused(&self.frontend, self.stats.calls)?
            || self.asking.is_paused(self.stats.calls);
        if let Some(ended) = unanswered.last() {
            self.pause_asking(&ended.subject);
        }
        if let Some(subject) = missed.subject {
            self.stats.miss(&subject);
            self.missed = Some(subject);
        }
        let full = match refused || missed.near {
            true => None,
            false => self.no_room()?,
        };
        if let Some(why) = &full {
            self.notices.tell_full(why);
        }
        if refused || full.is_some() {
            self.log_eager_miss();
            return Ok(Next::Eager);
        }
        Ok(Next::Record)
    }

    /// Looks for a variant whose guards hold for a call.
    fn find(&mut self, args: F::Args) -> Result<Found, SessionError> {
        if self.is_recording() {
            return Ok(Found::Unchecked); // what is recorded stays the last call
        }
        self.frontend.collect(args)?;
        if self.frontend.is_watched() {
            return Ok(Found::Unchecked);
        }
        let checks_data = !self.asking.is_paused(self.stats.calls);
        self.variants.find(&self.frontend, &[], checks_data)
    }

    /// No plan had the answer that the step would get at a call: tries none for a while if that is too often so.
    fn pause_asking(&mut self, subject: &str) {
        if let Some(pause) = self.asking.pauses(self.stats.calls) {
            self.notices.tell_asking(format_args!(
                "the step decides by data that is another one at most calls, the last time by {subject}: the next {pause} \
                 calls run eagerly"
            ));
        }
    }

    /// No replay without guards. What the step makes of the call, it says itself.
    fn guarded(&mut self, found: Result<Found, SessionError>) -> Found {
        found.unwrap_or_else(|error| {
            self.notices.tell_unguarded(error);
            Found::Unchecked
        })
    }

    /// Agrees with the other ranks about a call: whether all replay it with
    /// altered collectives.
    fn agree(&mut self, found: Option<&Found>) -> Result<bool, SessionError> {
        let offer = match found {
            Some(Found::Variant(i)) => self.variants.all[*i].offer(),
            _ => None,
        };
        let (stats, notices) = (&mut self.stats, &mut self.notices);
        (self.agreement).decide(&self.frontend, offer, stats, notices)
    }

    /// Replays the call with the first variant.
    fn replay(&mut self, agreed: bool) -> Result<Replayed<F::Results>, SessionError> {
        let Some(variant) = self.variants.all.first_mut() else {
            return Ok(Replayed::Done(Next::Eager));
        };
        let (id, late) = (variant.id, variant.is_late());
        let altered = variant.needs_agreement();
        if late && !agreed {
            self.stats.miss("other ranks");
            return Ok(Replayed::Done(Next::Eager));
        }
        if late {
            let group = self.agreement.group(&self.frontend)?;
            self.frontend.compare_checks(group.as_ref())?;
        }
        let results = variant.replay(&self.frontend, agreed);
        if late {
            self.frontend.compare_checks(None)?;
        }
        let left = std::mem::take(&mut variant.left);
        self.failure.left = (!left.is_empty()).then_some((id, left));
        let (undone, answered) = (variant.undone, variant.answered.take());
        self.variants.give_up_spent();
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
        self.stats.replays += 1;
        if altered {
            *(if agreed {
                &mut self.stats.altered
            } else {
                &mut self.stats.kept
            }) += 1;
        }
        Ok(Replayed::Done(Next::Replayed(id, results)))
    }

    /// Replays the call that was handled last with the newest variant, or gives the variant
    /// up, if the step would read other values than it is for. Other ranks were told that
    /// the call is not replayed: collectives are as recorded.
    pub fn replay_last(&mut self) -> Result<Next<F::Results>, SessionError> {
        let id = self.variants().first().map(|variant| variant.id);
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
        self.variants.all.retain(|variant| variant.id != id);
    }

    /// Why the collectives that passes have left did not fit those of other
    /// ranks, the last time they did not.
    pub fn unfit(&self) -> Option<&str> {
        self.agreement.unfit.as_deref()
    }

    /// Why nothing more is recorded, if so.
    fn no_room(&mut self) -> Result<Option<String>, SessionError> {
        let (most, call) = (self.config.max_variants, self.stats.calls);
        if !self.variants.are_full(call) {
            return self.judge.pause(&self.frontend, call);
        }
        Ok(Some(format!(
            "the step has as many variants as max_variants={most} lets it have, and all are in use: calls that match no \
             variant run eagerly, until a variant was not used for {IDLE_CALLS} calls; the last miss was on {}",
            self.missed.as_deref().unwrap_or("?")
        )))
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
            let expected = self.variants.expected(subject);
            let expected =
                expected.map_or(String::new(), |expected| format!("expected {expected}, "));
            tracing::info!(
                target: "rote::guards",
                "{}: {subject}: {expected}found another value; the call runs eagerly",
                self.config.function,
            );
        }
    }
}
