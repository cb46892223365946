//! The schedule of a bound plan: which instructions run only once, and where results
//! lie. Passes decide it when a plan is bound. It is not part of the file.

use crate::instr::CollectiveKind;
use crate::pool::InstrId;
use crate::value::Device;

/// Stands for "not in the arena".
pub const DYNAMIC: u64 = u64::MAX;

/// Ops that copy their first argument to a layout of their own. [`Into::Copy`] does the same for a result that is there.
pub const COPIES: &[&str] = &["aten::clone", "aten::_to_copy", "aten::contiguous"];

/// How an op writes a result that lies in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Into {
    /// Through this overload, whose results are its last arguments.
    Overload(&'static str),
    /// The op copies its first argument: `aten::copy_` does.
    Copy,
    /// Nothing is to be written: the op only allocates.
    Nothing,
}

/// What a process group allocates for itself from the start of a collective to the wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupMemory {
    /// Nothing that counts.
    None,
    /// As many bytes as the input has.
    OfInput,
    /// As many bytes as the output has.
    OfOutput,
}

/// What passes ask of the backend that will run a plan. Plans name ops as ATen does, and a backend need not have
/// all of them.
pub trait Ops {
    /// Whether the backend has an op. A pass that needs an op which is missing leaves the plan as it is.
    fn has(&self, name: &str, overload: &str) -> bool;
    /// How an op writes its results into memory that it is given, if it can. Results have the shape and strides that
    /// the op would give them. Those of an element-wise op may lie in the memory of an argument.
    fn writes_into(&self, name: &str, overload: &str) -> Option<Into>;
    /// Whether an all-reduce and a broadcast copy their input to their result when they start, so that the input may
    /// change before the wait. The other collectives read their input until the wait.
    fn copies_inputs(&self) -> bool;
    /// Whether the input of an all-gather may lie where the gather puts it: in this rank's part of the output.
    fn gathers_in_place(&self) -> bool;
    /// What process groups of a device allocate for themselves while a collective is under way.
    fn group_memory(&self, _kind: CollectiveKind, _device: Device) -> GroupMemory {
        GroupMemory::None
    }
    /// The alignment that the backend gives tensors on a device, in bytes, so that kernels take the same
    /// paths for results in an arena. A power of two.
    fn alignment(&self, device: Device) -> u64;
}

/// How a plan runs.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Schedule {
    /// For each instruction, whether only the first run executes it: its results
    /// are kept. Empty: none.
    pub once: Vec<bool>,
    /// For each value that is a root, its offset in the arena in bytes, or
    /// [`DYNAMIC`]. Empty: all are dynamic.
    pub offsets: Vec<u64>,
    /// Bytes of the arena.
    pub arena_bytes: u64,
    /// The device of the arena.
    pub arena_device: Option<Device>,
    /// Instructions whose results lie in the arena, in order, and how they get
    /// there. Collectives are not listed.
    pub into: Vec<(InstrId, Into)>,
}

impl Schedule {
    /// Whether only the first run executes an instruction.
    pub fn once(&self, instr: usize) -> bool {
        self.once.get(instr).copied().unwrap_or(false)
    }

    /// Where a root lies in the arena, if it does.
    pub fn offset(&self, root: u32) -> Option<u64> {
        let offset = self.offsets.get(root as usize).copied()?;
        (offset != DYNAMIC).then_some(offset)
    }

    /// How an op writes its results into the arena, if it does.
    pub fn into(&self, instr: usize) -> Option<Into> {
        let at = self.into.binary_search_by_key(&(instr as u32), |e| e.0);
        at.ok().map(|at| self.into[at].1)
    }
}
