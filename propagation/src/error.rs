//! Errors in questions about propagation.

/// Why an op could not be propagated.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PropagationError {
    /// A text is not in the notation.
    #[error("cannot read {found:?}: expected {expected}")]
    Notation {
        /// What was expected there.
        expected: String,
        /// The text found.
        found: String,
    },
    /// The mesh cannot be used.
    #[error("mesh {mesh}: expected {expected}")]
    Mesh {
        /// The mesh as given.
        mesh: String,
        /// What a mesh must be.
        expected: &'static str,
    },
    /// No rule is registered under this name.
    #[error("{op}: no sharding rule is registered for this op{}", hint(op))]
    UnknownOp {
        /// The op.
        op: String,
    },
    /// A second rule for one op.
    #[error("{op}: a sharding rule is registered already")]
    Duplicate {
        /// The op.
        op: String,
    },
    /// Too few arguments, or too many.
    #[error("{op}: expected {expected} arguments, found {found}")]
    Arity {
        /// The op.
        op: String,
        /// How many it takes.
        expected: String,
        /// How many came.
        found: usize,
    },
    /// An argument is not what the op takes there.
    #[error("{op}: argument {argument}: expected {expected}, found {found}")]
    Argument {
        /// The op.
        op: String,
        /// Position of the argument, from 0.
        argument: usize,
        /// What the op takes there.
        expected: String,
        /// What came.
        found: String,
    },
    /// A strategy of a caller's own rule does not fit the op.
    #[error("{op}: strategy {strategy} of the rule: expected {expected}, found {found}")]
    Strategy {
        /// The op.
        op: String,
        /// Which strategy, from 0.
        strategy: usize,
        /// What a strategy of this op has there.
        expected: String,
        /// What it has.
        found: String,
    },
    /// A caller's own rule cannot be made.
    #[error("{op}: {reason}")]
    OwnRule {
        /// The op.
        op: String,
        /// Why not.
        reason: String,
    },
    /// Every strategy would move a tensor that must stay where it is.
    #[error(
        "{op}: argument {argument} is written in place and cannot be redistributed: \
         expected placements that a strategy keeps, found {found}"
    )]
    InPlace {
        /// The op.
        op: String,
        /// Position of the written argument.
        argument: usize,
        /// Its placements.
        found: String,
    },
    /// A sharding cannot be registered.
    #[error("sharding {name}: expected {expected}, found {found}")]
    Sharding {
        /// Its name.
        name: String,
        /// What a sharding must be.
        expected: String,
        /// What this one is.
        found: String,
    },
    /// What each rank holds by a sharding of a family is not known.
    #[error(
        "sharding {name}, parameters ({parameters}), of {size} elements on {ranks} ranks: {reason}"
    )]
    Pieces {
        /// The name of the family.
        name: String,
        /// The parameters of the sharding.
        parameters: String,
        /// The elements of the dim.
        size: u64,
        /// The ranks that it is split over.
        ranks: u64,
        /// Why not.
        reason: String,
    },
    /// A search would be too large.
    #[error("{op}: expected at most {limit} {what}, found {found}")]
    TooLarge {
        /// The op.
        op: String,
        /// What there is too much of.
        what: &'static str,
        /// How many are taken.
        limit: usize,
        /// How many there are.
        found: usize,
    },
}

/// What a name without its namespace lacks.
fn hint(op: &str) -> String {
    match op.contains("::") {
        true => String::new(),
        false => format!("; names of ops begin with their namespace, such as aten::{op}"),
    }
}

impl PropagationError {
    /// The same error of an op that asked this one.
    pub(super) fn asked_of(mut self, asking: &str) -> Self {
        match &mut self {
            PropagationError::UnknownOp { op }
            | PropagationError::Duplicate { op }
            | PropagationError::Arity { op, .. }
            | PropagationError::Argument { op, .. }
            | PropagationError::InPlace { op, .. }
            | PropagationError::Strategy { op, .. }
            | PropagationError::OwnRule { op, .. }
            | PropagationError::TooLarge { op, .. } => asking.clone_into(op),
            PropagationError::Notation { .. }
            | PropagationError::Mesh { .. }
            | PropagationError::Sharding { .. }
            | PropagationError::Pieces { .. } => {}
        }
        self
    }

    pub(super) fn notation(found: &str, expected: impl Into<String>) -> Self {
        let mut found: String = found.chars().take(80).collect();
        if found.is_empty() {
            found = "nothing".into();
        }
        PropagationError::Notation {
            expected: expected.into(),
            found,
        }
    }
}
