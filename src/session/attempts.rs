//! Recordings that made no plan, and whether another recording is worth its cost.

use std::rc::Rc;

use hashbrown::HashMap;
use rote_replay::{CallFacts, Frontend, ReplayError};

use super::candidates::HostValue;
use super::variants::IDLE_CALLS;

/// How many recordings in a row none may confirm, at least, and how many kinds of
/// calls may be refused: the first steps of a run are like no others.
const MIN_ATTEMPTS: usize = 4;

/// For how many calls none is recorded after the first refusal of a step that has asked for data.
const REFUSED_PAUSE: u64 = 8;

/// For how many calls nothing is recorded at first, after too many recordings that none confirmed. What these cost is
/// then a small part of the calls between.
const FIRST_PAUSE: u64 = IDLE_CALLS;

/// How many recordings in a row may differ from the one before.
const MAX_DIFFERING: u32 = 3;

/// How often a recording may be dropped in a row.
const MAX_DROPS: u32 = 4;

/// What a session's recordings came to since one of them was confirmed.
#[derive(Debug)]
pub struct Attempts<F: Frontend> {
    /// How many recordings in a row none may confirm, and how many kinds of calls may be refused.
    most: usize,
    refused: Vec<RefusedCall<F>>,
    /// Recordings since the last one that was confirmed.
    unconfirmed: usize,
    /// Up to which call nothing is recorded, after too many of these.
    paused_until: u64,
    /// For how many calls, the next time.
    pause: u64,
    /// Recordings in a row that differed from the one before.
    differing: u32,
    /// Recordings in a row that were dropped.
    drops: u32,
    /// What the step of the last recording has changed of what is guarded.
    changes: Vec<String>,
    /// Host values that differed from a candidate's: what they were so far.
    unsteady: HashMap<String, Vec<String>>,
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

impl<F: Frontend> Attempts<F> {
    pub fn new(max_variants: usize) -> Self {
        Attempts {
            most: max_variants.max(MIN_ATTEMPTS),
            refused: Vec::new(),
            unconfirmed: 0,
            paused_until: 0,
            pause: FIRST_PAUSE,
            differing: 0,
            drops: 0,
            changes: Vec::new(),
            unsteady: HashMap::new(),
        }
    }

    /// A recording waits for a second one.
    pub fn wait(&mut self) {
        self.unconfirmed += 1;
    }

    /// A recording was confirmed.
    pub fn confirm(&mut self) {
        self.unconfirmed = 0;
        self.differing = 0;
        self.is_steady();
    }

    /// A recording has ended: whether it was dropped.
    pub fn end(&mut self, dropped: bool) {
        self.drops = if dropped { self.drops + 1 } else { 0 };
    }

    /// Whether one more recording that is dropped is too many in a row.
    pub fn is_last_drop(&self) -> bool {
        self.drops + 1 >= MAX_DROPS
    }

    /// A recording differs from the one before: whether that is too often in a row.
    pub fn differs(&mut self) -> bool {
        self.differing += 1;
        self.differing >= MAX_DIFFERING
    }

    /// What a step has changed of what is guarded. Comes back: which of it the step before has changed too, if any.
    pub fn changed(&mut self, subjects: Vec<String>) -> Option<usize> {
        let again = subjects
            .iter()
            .position(|subject| self.changes.contains(subject));
        self.changes = subjects;
        again
    }

    /// A host value differs from what the only fitting candidate has: whether it has done so before, and is another one
    /// each time. One that has few values comes back to them, and each of them will have a plan.
    pub fn is_unsteady(&mut self, value: &HostValue) -> bool {
        let known = self.unsteady.entry_ref(&value.subject).or_default();
        let is_new = !known.is_empty() && !known.contains(&value.values[1]);
        for each in &value.values {
            if !known.contains(each) {
                known.push(each.clone());
            }
        }
        is_new
    }

    /// The host values of a recording are those of an earlier one, or do not count.
    pub fn is_steady(&mut self) {
        self.unsteady.clear();
    }

    /// Whether nothing is recorded at a call, since too many recordings were not confirmed.
    pub fn is_paused(&self, call: u64) -> bool {
        call < self.paused_until
    }

    /// Whether too many recordings were not confirmed.
    pub fn are_too_many(&self) -> bool {
        self.unconfirmed >= self.most
    }

    /// Begins a pause at a call if too many recordings were not confirmed. Comes back: how many there were, and for how
    /// many calls nothing is recorded.
    pub fn pause(&mut self, call: u64) -> Option<(usize, u64)> {
        if !self.are_too_many() {
            return None;
        }
        let (attempts, pause) = (std::mem::take(&mut self.unconfirmed), self.pause);
        self.paused_until = call + pause;
        self.pause = pause.saturating_mul(2);
        Some((attempts, pause))
    }

    /// Whether the call that is handled, of this number, is not to be recorded since calls like it were refused.
    pub fn are_refused(&self, frontend: &F, call: u64) -> Result<bool, ReplayError> {
        let mut refused = self.refused.len() >= self.most;
        for earlier in &self.refused {
            let waits = earlier.again.is_none_or(|again| call < again);
            refused = refused || waits && frontend.difference(&earlier.call)?.is_none();
        }
        Ok(refused)
    }

    /// The recording of a call was refused: calls like it are not recorded for some time if the step has `asked` for
    /// data, else never again.
    pub fn refuse(
        &mut self,
        frontend: &F,
        call: Rc<CallFacts<F::Held>>,
        asked: bool,
        now: u64,
    ) -> Result<(), ReplayError> {
        let mut known = None;
        for (i, earlier) in self.refused.iter().enumerate() {
            if frontend.difference(&earlier.call)?.is_none() {
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
        refused.again = asked.then(|| now + refused.pause);
        refused.pause = refused.pause.saturating_mul(2);
        Ok(())
    }
}
