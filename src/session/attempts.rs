//! Recordings that made no plan, and whether another recording is worth its cost.

use hashbrown::HashMap;

/// For how many calls nothing is recorded at first, after too many recordings that none confirmed. What these cost is
/// then a small part of the calls between.
const FIRST_PAUSE: u64 = super::IDLE_CALLS;

/// How many recordings in a row may differ from the one before.
const MAX_DIFFERING: u32 = 3;

/// How often a recording may be dropped in a row.
const MAX_DROPS: u32 = 4;

/// What a session's recordings came to since one of them was confirmed.
#[derive(Debug)]
pub(super) struct Attempts {
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
    /// Host values that differed from a candidate's, and how often.
    unsteady: HashMap<String, u32>,
}

impl Attempts {
    pub(super) fn new() -> Self {
        Attempts {
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
    pub(super) fn wait(&mut self) {
        self.unconfirmed += 1;
    }

    /// A recording was confirmed.
    pub(super) fn confirm(&mut self) {
        self.unconfirmed = 0;
        self.differing = 0;
    }

    /// A recording has ended: whether it was dropped.
    pub(super) fn end(&mut self, dropped: bool) {
        self.drops = if dropped { self.drops + 1 } else { 0 };
    }

    /// Whether one more recording that is dropped is too many in a row.
    pub(super) fn is_last_drop(&self) -> bool {
        self.drops + 1 >= MAX_DROPS
    }

    /// A recording differs from the one before: whether that is too often in a row.
    pub(super) fn differs(&mut self) -> bool {
        self.differing += 1;
        self.differing >= MAX_DIFFERING
    }

    /// What a step has changed of what is guarded. Comes back: which of it the step before has changed too, if any.
    pub(super) fn changed(&mut self, subjects: Vec<String>) -> Option<usize> {
        let again = subjects
            .iter()
            .position(|subject| self.changes.contains(subject));
        self.changes = subjects;
        again
    }

    /// A host value differs from what the only fitting candidate has: whether it has done so before.
    pub(super) fn is_unsteady(&mut self, subject: &str) -> bool {
        let times = self.unsteady.entry_ref(subject).or_insert(0);
        *times += 1;
        *times >= 2
    }

    /// The host values of a recording are those of an earlier one, or do not count.
    pub(super) fn is_steady(&mut self) {
        self.unsteady.clear();
    }

    /// Whether nothing is recorded at a call, since too many recordings were not confirmed.
    pub(super) fn is_paused(&self, call: u64) -> bool {
        call < self.paused_until
    }

    /// Begins a pause at a call if `most` recordings were not confirmed. Comes back: how many there were, and for how
    /// many calls nothing is recorded.
    pub(super) fn pause(&mut self, call: u64, most: usize) -> Option<(usize, u64)> {
        if self.unconfirmed < most {
            return None;
        }
        let (attempts, pause) = (std::mem::take(&mut self.unconfirmed), self.pause);
        self.paused_until = call + pause;
        self.pause = pause.saturating_mul(2);
        Some((attempts, pause))
    }
}
