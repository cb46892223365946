//! Rote: record a distributed training step once, replay it from a plan.
//!
//! | module | subject |
//! |---|---|
//! | [`session`] | one captured function: record, replay, fall back |
//! | [`recording`] | a recording in progress |
//! | [`variant`] | a plan, bound, with the facts under which it may run |
//! | `bound` | a plan through its passes, bound to the tensors of a variant |
//! | [`facts`] | facts that guards check, and their names |
//! | `faults` | what tests make wrong in a plan |
//! | [`explain`] | the work that replays erase, as text for people |
//! | [`optimized`] | the effect of passes on a plan, as text and JSON |
//! | [`opinion`] | the second opinion on a plan, as text and JSON |
//! | `second_opinion` | DTensor's redistributions against those of the cheapest strategies |
//! | [`shown`] | replays that show every result, to find a wrong instruction |
//! | [`own_rules`] | rules that a script states when it is asked, as JSON |
//! | [`question`] | questions to propagation, as JSON |
//! | [`places`] | where arguments must lie in their storages |
//! | [`stored`] | stored plans: their names, and whether a stored plan applies |
//! | [`stats`] | counters |
//! | [`validation`] | questions to the truth table, as JSON |

#![forbid(unsafe_code)]

mod bound;
pub mod explain;
pub mod facts;
#[cfg(feature = "faults")]
pub mod faults;
pub mod opinion;
pub mod optimized;
pub mod own_rules;
pub mod places;
pub mod question;
pub mod recording;
mod second_opinion;
pub mod session;
pub mod shown;
pub mod stats;
pub mod stored;
pub mod validation;
pub mod variant;

pub use rote_passes as passes;
pub use rote_plans as plans;
pub use rote_propagation as propagation;
pub use rote_replay as replay;
pub use rote_tracer as tracer;
pub use session::{Config, Next, Outcome, Session};
pub use stats::Stats;

/// What can go wrong in a session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// A plan file or the plan store.
    #[error(transparent)]
    Plan(#[from] rote_plans::PlanError),
    /// Binding or running a plan.
    #[error(transparent)]
    Replay(#[from] rote_replay::ReplayError),
    /// A step that cannot be replayed.
    #[error("{0}")]
    Refused(rote_tracer::Refusal),
    /// Ranks that could not agree.
    #[error("{0}")]
    Agreement(String),
    /// A variant that the session does not have.
    #[error("there is no such variant")]
    NoVariant,
    /// A recording whose names and facts are not all known yet.
    #[error("the recording is not ready: its names and facts come first")]
    NotReady,
    /// A recording call without a recording.
    #[error("no recording is in progress")]
    NoRecording,
}
