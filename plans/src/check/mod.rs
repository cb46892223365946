//! The rules that the tables of a plan must keep, whoever wrote it. The executor
//! indexes without further checks, so all rules are checked here. The time is linear
//! in the size of the file, and the memory does not grow with it.
//!
//! - Every id lies in its table, every range in its pool; numbers that stand
//!   for an enum of the framework lie in its span.
//! - **Values.** A value names its one definition and the definition names the
//!   value: a binding, a constant, or an instruction, which lists the values
//!   that it defines in increasing order. Shape and strides have the same
//!   length, at most [`MAX_TENSOR_DIMS`]. A root is its own root and is defined
//!   no later than its views. If the plan knows the size of the root's storage, a
//!   view stays inside it. No tensor has or reaches [`SPAN`] elements, and all
//!   tensors together have fewer than [`TOGETHER`] bytes. So arithmetic on sizes
//!   cannot overflow.
//! - **Instructions.** A value is used after its definition, before it is freed
//!   and no later than the last use that it names. Only results of
//!   instructions are freed, once, and not those that outlive the run (outputs,
//!   gradients). Values that outlive the run name no last use. A result that is
//!   listed again was defined before (an in-place result). The base and the
//!   result of a view share their root.
//! - **Arguments.** `Arg::List` and `Arg::Wrapped` refer to strictly smaller
//!   indices of the pool (nested arguments are pushed before the ones that
//!   hold them) and nest at most [`MAX_ARG_DEPTH`] deep. A wrapped argument is a number.
//! - **Scalars** refer to scalars before them.
//! - **Generator slots** are restored only after they were saved.
//! - Ranks lie below the world size; a mesh has as many ranks as its shape
//!   says; a spec has one placement per mesh dim, and shards dims that exist.
//! - The result structure is JSON of the forms of docs/plan-format.md, and
//!   refers to outputs that exist.
//! - Pools may be shared, but all lists together name at most as many entries
//!   as the file has bytes. This bounds the time of a walk over the lists.

mod fault;
mod instrs;
mod result;
mod tables;
#[cfg(test)]
mod tests;

use std::cell::Cell;

use rkyv::primitive::ArchivedI64;
use rkyv::vec::ArchivedVec;

pub use fault::{Fault, Place};

use crate::plan::ArchivedPlan;
use crate::pool::{ArchivedRange, NONE};
use crate::value::{ArchivedDef, ArchivedValue};

/// The most dims of a tensor or mesh: PyTorch's own limit.
pub const MAX_TENSOR_DIMS: usize = 64;

/// Elements of a tensor, its strides, its offset and what it reaches lie below this.
pub const SPAN: i64 = 1 << 48;

/// The bytes of all tensors and storages together lie below this.
pub const TOGETHER: u64 = 1 << 62;

/// How deep lists and wrapped numbers nest in an op's arguments.
pub const MAX_ARG_DEPTH: u32 = 8;

/// `DType` numbers lie below this: PyTorch has 46 types in use and assumes
/// fewer than 64 in its own tables (c10/core/ScalarType.h).
const DTYPE_END: i64 = 64;

/// `DeviceType` numbers lie below this (c10/core/DeviceType.h,
/// `COMPILE_TIME_MAX_DEVICE_TYPES` is 22).
const DEVICE_END: i64 = 32;

/// `Layout` numbers lie below this (c10/core/Layout.h).
const LAYOUT_END: i64 = 8;

/// `MemoryFormat` numbers lie below this (c10/core/MemoryFormat.h).
const MEMORY_FORMAT_END: i64 = 4;

/// Checks all of the above; `payload_bytes` is the size of the archive.
pub(crate) fn check(plan: &ArchivedPlan, payload_bytes: u64) -> Result<(), Fault> {
    // Destructured so that a new table cannot be forgotten.
    let ArchivedPlan {
        fingerprint,
        function: _,
        result,
        strings: _,
        dims: _,
        ids: _,
        bytes: _,
        placements,
        meshes,
        groups,
        specs,
        values,
        args,
        instrs,
        rng_slots,
        bindings,
        outputs,
        grads,
        scalars,
        guards,
        constants,
        strategies,
        redistributions,
    } = plan;
    let world_size = fingerprint.world_size.to_native();
    let rank = fingerprint.rank.to_native();
    if rank >= world_size {
        return Err(Fault::Rank {
            rank: i64::from(rank),
            world_size,
            at: at("fingerprint", 0, "rank"),
        });
    }
    let checker = Checker {
        plan,
        world_size,
        entries_left: Cell::new(payload_bytes),
    };
    checker.placements(placements)?;
    checker.meshes(meshes)?;
    checker.groups(groups)?;
    checker.specs(specs)?;
    checker.values(values)?;
    checker.bindings(bindings)?;
    checker.constants(constants)?;
    checker.outputs(outputs)?;
    checker.grads(grads)?;
    checker.scalars(scalars)?;
    checker.guards(guards)?;
    checker.strategies(strategies)?;
    checker.redistributions(redistributions)?;
    checker.arg_pool(args)?;
    checker.program(instrs)?;
    checker.rng_slots(instrs, rng_slots.to_native())?;
    result::check(result, outputs.len())
}

/// One place in the tables, for messages.
fn at(table: &'static str, index: usize, field: &'static str) -> Place {
    Place {
        table,
        index,
        field,
    }
}

struct Checker<'a> {
    plan: &'a ArchivedPlan,
    world_size: u32,
    /// How many more entries of pools the plan's lists may name.
    entries_left: Cell<u64>,
}

impl<'a> Checker<'a> {
    fn id(
        &self,
        id: u32,
        table: &'static str,
        len: usize,
        place: impl Fn() -> Place,
    ) -> Result<(), Fault> {
        if (id as usize) < len {
            return Ok(());
        }
        Err(Fault::Id {
            at: place(),
            id,
            table,
            len,
        })
    }

    fn text(&self, id: u32, place: impl Fn() -> Place) -> Result<(), Fault> {
        self.id(id, "strings", self.plan.strings.len(), place)
    }

    /// The spec of a tensor, or none.
    fn spec(&self, id: u32, place: impl Fn() -> Place) -> Result<(), Fault> {
        if id == NONE {
            return Ok(());
        }
        self.id(id, "specs", self.plan.specs.len(), place)
    }

    fn value(&self, id: u32, place: impl Fn() -> Place) -> Result<&'a ArchivedValue, Fault> {
        let values = &self.plan.values;
        values.get(id as usize).ok_or_else(|| Fault::Id {
            at: place(),
            id,
            table: "values",
            len: values.len(),
        })
    }

    fn range(
        &self,
        range: ArchivedRange,
        pool: &'static str,
        len: usize,
        place: impl Fn() -> Place,
    ) -> Result<(), Fault> {
        let (start, entries) = (range.start.to_native(), range.len.to_native());
        if u64::from(start) + u64::from(entries) <= len as u64 {
            return Ok(());
        }
        Err(Fault::Range {
            at: place(),
            start,
            entries,
            pool,
            len,
        })
    }

    /// The entries of a pool that a list names, paid for.
    fn list<T>(
        &self,
        range: ArchivedRange,
        pool: &'static str,
        entries: &'a ArchivedVec<T>,
        place: impl Fn() -> Place,
    ) -> Result<&'a [T], Fault> {
        self.range(range, pool, entries.len(), &place)?;
        let len = u64::from(range.len.to_native());
        let Some(left) = self.entries_left.get().checked_sub(len) else {
            return Err(Fault::Shared { at: place() });
        };
        self.entries_left.set(left);
        Ok(&entries[range.indices()])
    }

    /// A shape, or strides: few enough to be walked without paying.
    fn short(
        &self,
        range: ArchivedRange,
        place: impl Fn() -> Place,
    ) -> Result<&'a [ArchivedI64], Fault> {
        let dims = &self.plan.dims;
        self.range(range, "dims", dims.len(), &place)?;
        let dims = &dims[range.indices()];
        if dims.len() > MAX_TENSOR_DIMS {
            return Err(Fault::Count {
                at: place(),
                found: dims.len(),
                expected: MAX_TENSOR_DIMS,
                what: "dims at most",
            });
        }
        Ok(dims)
    }

    fn number(
        &self,
        found: i64,
        from: i64,
        to: i64,
        place: impl Fn() -> Place,
    ) -> Result<(), Fault> {
        if (from..to).contains(&found) {
            return Ok(());
        }
        Err(Fault::Number {
            at: place(),
            found,
            from,
            to,
        })
    }

    fn count(
        &self,
        found: usize,
        expected: usize,
        what: &'static str,
        place: impl Fn() -> Place,
    ) -> Result<(), Fault> {
        if found == expected {
            return Ok(());
        }
        Err(Fault::Count {
            at: place(),
            found,
            expected,
            what,
        })
    }
}

/// The instruction that defines a value, `None` for what exists before the run.
fn defining_instr(value: &ArchivedValue) -> Option<u32> {
    match value.def {
        ArchivedDef::Instr(instr) => Some(instr.to_native()),
        ArchivedDef::Binding(_) | ArchivedDef::Constant(_) => None,
    }
}
