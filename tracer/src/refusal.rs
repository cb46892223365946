//! Why a recording was refused: the op, the argument, the user's source line
//! and the remedy.

/// A reason not to record a step: a replay of the step could not be proven right.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{} {reason}; remedy: {remedy}", self.subject(), self.place())]
pub struct Refusal {
    /// The op, for example `aten::_local_scalar_dense`; empty when no op is to
    /// blame.
    pub op: String,
    /// The user's source line, `file:line`, or empty.
    pub source_line: String,
    /// What is wrong, naming the argument or object.
    pub reason: String,
    /// What the user can do.
    pub remedy: String,
}

impl Refusal {
    /// A refusal of an op.
    pub fn op(
        op: &str,
        source: &str,
        reason: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Self {
        Refusal {
            op: op.to_owned(),
            source_line: source.to_owned(),
            reason: reason.into(),
            remedy: remedy.into(),
        }
    }

    /// A refusal of the step as a whole.
    pub fn step(reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self::op("", "", reason, remedy)
    }

    fn subject(&self) -> String {
        if self.op.is_empty() {
            "the step".to_owned()
        } else {
            self.op.clone()
        }
    }

    fn place(&self) -> String {
        if self.source_line.is_empty() {
            String::new()
        } else {
            format!(" at {}", self.source_line)
        }
    }
}
