//! The variants of a session: which one a call is replayed by, and which one makes room for another.

use rote_replay::Frontend;

use super::Config;
use crate::SessionError;
use crate::recording::GuardText;
use crate::variant::{Confirmed, Terms, Unanswered, Variant};

/// For how many calls a variant must be unused before it makes room for another.
pub const IDLE_CALLS: u64 = 256;

/// How many replays of a variant may end in a row since the step would get another answer about data.
const MAX_UNANSWERED: u32 = 32;

/// What guards say of a call.
#[derive(Debug)]
pub enum Found {
    /// This variant's guards hold.
    Variant(usize),
    /// No variant's do.
    None(Miss),
    /// Nothing: no guard is checked while something is recorded, or under something that sees each op.
    Unchecked,
}

/// Why no variant is replayed.
#[derive(Debug, Default)]
pub struct Miss {
    /// Of the nearest variant, the guard that missed.
    pub subject: Option<String>,
    /// Whether one variant may follow from another recording: nothing but
    /// hyperparameters has changed, on which only arithmetic was seen.
    pub near: bool,
}

/// The plans that can be replayed.
#[derive(Debug)]
pub struct Variants<F: Frontend> {
    /// Most recently used first.
    pub all: Vec<Variant<F>>,
    next_id: u32,
    /// How many are kept at most.
    most: usize,
    function: String,
}

impl<F: Frontend> Variants<F> {
    pub fn new(config: &Config) -> Self {
        Variants {
            all: Vec::new(),
            next_id: 0,
            most: config.max_variants,
            function: config.function.clone(),
        }
    }

    /// Looks for a variant whose guards hold for the call that was collected. Not among those `unanswered`: the step
    /// would get another answer about data; nor among those that would end as these have; nor, unless `checks_data`, among
    /// those that check any.
    pub fn find(
        &mut self,
        frontend: &F,
        unanswered: &[Unanswered],
        checks_data: bool,
    ) -> Result<Found, SessionError> {
        let mut best: Option<(usize, String)> = None;
        let mut near = false;
        let ruled_out = self.ruled_out(unanswered);
        for (i, variant) in self.all.iter_mut().enumerate() {
            if let Some(Unanswered { subject, .. }) = ruled_out.get(i).copied().flatten() {
                best = Some((usize::MAX, subject.clone()));
                continue;
            }
            if !checks_data && variant.checks_data() {
                continue;
            }
            let (progress, subject) = match frontend.difference(&variant.parts.call)? {
                Some(word) => {
                    let about = variant.parts.call.subjects.get(word);
                    let about = about.or_else(|| frontend.subjects().get(word));
                    (word, frontend.word(word, about, &variant.parts.leaves))
                }
                None => match variant.missed(frontend)? {
                    Some(subject) => {
                        near = near || variant.is_near_but_for(frontend, &subject)?;
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

    /// Of replays that have ended: for each variant, the replay that has ended and says that one of this variant would, too.
    fn ruled_out<'a>(&self, unanswered: &'a [Unanswered]) -> Vec<Option<&'a Unanswered>> {
        if unanswered.is_empty() {
            return Vec::new();
        }
        let trace = |id: u32| (self.all.iter().find(|one| one.id == id)).map(|one| &one.trace);
        let rules_out = |ended: &Unanswered, variant: &Variant<F>| {
            let fails = |trace| variant.trace.fails_as(trace, &ended.failed);
            ended.id == variant.id || trace(ended.id).is_some_and(fails)
        };
        let by = |variant: &Variant<F>| unanswered.iter().find(|ended| rules_out(ended, variant));
        self.all.iter().map(by).collect()
    }

    /// Where the variants are that apply to the call but for `hyperparameters` that only arithmetic was seen on.
    pub fn near(
        &mut self,
        frontend: &F,
        hyperparameters: &[String],
    ) -> Result<Vec<usize>, SessionError> {
        let mut near = Vec::new();
        for (i, variant) in self.all.iter_mut().enumerate() {
            if frontend.difference(&variant.parts.call)?.is_none()
                && variant.is_near(frontend, hyperparameters)?
            {
                near.push(i);
            }
        }
        Ok(near)
    }

    /// Whether there is a variant with a fact about a subject that holds now.
    pub fn any_sees(&mut self, frontend: &F, subject: &str) -> Result<bool, SessionError> {
        for variant in &mut self.all {
            if variant.parts.facts.holds_of(frontend, subject)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// A variant is used for a call: it is the first to be tried at the next one.
    pub fn use_at(&mut self, i: usize, call: u64) -> &Variant<F> {
        self.all[..=i].rotate_right(1);
        self.all[0].last_used = call;
        &self.all[0]
    }

    /// Gives up the variant that was used last if no replay of it is worth another try.
    pub fn give_up_spent(&mut self) {
        let spent = |variant: &Variant<F>| variant.lost || variant.unanswered >= MAX_UNANSWERED;
        if self.all.first().is_some_and(spent) {
            self.all.remove(0);
        }
    }

    /// What the variant that was used last expects of a subject, as text; `None` if it has no guard on it.
    pub fn expected(&self, subject: &str) -> Option<String> {
        let variant = self.all.first();
        variant.and_then(|variant| guard_on(&variant.parts.guards, subject))
    }

    /// Whether there is no room for another one: all are in use.
    pub fn are_full(&self, call: u64) -> bool {
        let used_lately = |variant: &Variant<F>| call - variant.last_used < IDLE_CALLS;
        self.all.len() >= self.most && self.all.iter().all(used_lately)
    }

    /// Binds a recording that was confirmed: its variant is the first to be tried, in place of the one at `replaces`.
    /// If there are too many, the one that was not used for the longest time goes.
    pub fn add(
        &mut self,
        frontend: &F,
        confirmed: Confirmed<F>,
        replaces: Option<usize>,
        terms: &Terms,
        call: u64,
    ) -> Result<u32, SessionError> {
        // What the replaced one could replay, the new one can, or neither should.
        replaces.map(|i| self.all.remove(i));
        let id = self.next_id;
        let mut variant = Variant::bind(frontend, id, confirmed, terms)?;
        self.next_id += 1;
        variant.last_used = call;
        self.all.insert(0, variant);
        while self.all.len() > self.most {
            let used = self.all.iter().map(|variant| variant.last_used);
            let Some((oldest, _)) = used.enumerate().skip(1).min_by_key(|&(_, used)| used) else {
                break;
            };
            let gone = self.all.remove(oldest);
            tracing::info!(
                target: "rote::record",
                "{}: plan {} makes room for a new plan: it was unused for {} calls",
                self.function,
                gone.key,
                call - gone.last_used
            );
        }
        Ok(id)
    }
}

/// What the guard on a subject, or on what it is a part of, expects.
pub fn guard_on(guards: &[GuardText], subject: &str) -> Option<String> {
    let stem = subject.rsplit_once('.').map_or(subject, |(stem, _)| stem);
    let find = |name: &str| guards.iter().find(|guard| guard.subject == name);
    find(subject)
        .or_else(|| find(stem))
        .map(|guard| guard.expected.clone())
}
