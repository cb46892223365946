//! The counters of a session.

use hashbrown::HashMap;

/// Counters of a captured function. A call is one of: a replay, a recording
/// (which runs eagerly), or an eager call.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Calls of the captured function.
    pub calls: u64,
    /// New plans that were recorded and kept.
    pub recordings: u64,
    /// Calls that were replayed.
    pub replays: u64,
    /// Replays with altered collectives, about which all ranks agreed.
    pub altered: u64,
    /// Replays that kept the recorded collectives, though the passes had altered
    /// them, because not all ranks could follow.
    pub kept: u64,
    /// How often the ranks exchanged the sequences of their collectives.
    pub exchanges: u64,
    /// Calls that ran through full propagation because a guard missed.
    pub fallbacks: u64,
    /// Guard misses by what was looked at.
    pub guard_misses: HashMap<String, u64>,
    /// Why recordings were refused.
    pub refusals: Vec<String>,
}

impl Stats {
    /// A call that could have been replayed runs eagerly, since a guard missed.
    pub(crate) fn miss(&mut self, subject: &str) {
        self.fallbacks += 1;
        *self.guard_misses.entry_ref(subject).or_insert(0) += 1;
    }
}
