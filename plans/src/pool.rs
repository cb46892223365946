//! Ids and ranges: how the tables of a plan refer to each other.

use rkyv::{Archive, Deserialize, Serialize};

/// An index into [`crate::Plan::strings`].
pub type StrId = u32;

/// An index into [`crate::Plan::values`].
pub type ValueId = u32;

/// An index into [`crate::Plan::instrs`].
pub type InstrId = u32;

/// Stands for "no id" where an id is optional.
pub const NONE: u32 = u32::MAX;

/// A run of `len` entries from `start` in one of the plan's pools. Which pool
/// is said at the field that holds the range.
#[derive(Archive, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[rkyv(derive(Clone, Copy, Debug, PartialEq, Eq))]
pub struct Range {
    /// The first entry.
    pub start: u32,
    /// How many entries.
    pub len: u32,
}

impl Range {
    /// The range as indices of a native slice.
    pub fn indices(self) -> std::ops::Range<usize> {
        let start = self.start as usize;
        start..start + self.len as usize
    }
}

impl ArchivedRange {
    /// The range as indices of an archived slice. Only meaningful after
    /// [`crate::PlanFile::open`] has checked every range against its pool.
    pub fn indices(self) -> std::ops::Range<usize> {
        let start = self.start.to_native() as usize;
        start..start + self.len.to_native() as usize
    }
}
