//! The findings of the truth table.

use rote_propagation::Combination;

/// Something to tell about one combination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The combination.
    pub combination: Combination,
    /// The op's arguments, as samples write them.
    pub args: String,
    /// What went wrong, or why a missing rule is left out.
    pub reason: String,
}

/// The truth table of one op.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OpReport {
    /// The op.
    pub op: String,
    /// How many samples were judged.
    pub samples: usize,
    /// How many placements of the inputs were run, over all samples.
    pub tried: usize,
    /// How many claimed combinations are correct, over all samples.
    pub correct: usize,
    /// Claimed, but not true.
    pub wrong: Vec<Finding>,
    /// True, but not claimed; and not on the list of rules that are left out.
    pub missing: Vec<Finding>,
    /// True, not claimed, and left out for a reason that is on the list.
    pub left_out: Vec<Finding>,
    /// Asked for alone, neither claimed nor true.
    pub untrue: Vec<Finding>,
    /// Claims that could not be judged, or only in part, and samples that could
    /// not be run: each reason once, with the arguments of the first.
    pub unjudged: Vec<(String, String)>,
}

impl OpReport {
    pub(super) fn unjudged(&mut self, reason: impl Into<String>, args: &str) {
        let reason = reason.into();
        if self.unjudged.iter().all(|u| u.0 != reason) {
            self.unjudged.push((reason, args.to_owned()));
        }
    }
}
