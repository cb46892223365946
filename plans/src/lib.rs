//! Plans: the data model of a recorded step, its zero-copy file and the store.
//!
//! | module | subject |
//! |---|---|
//! | [`plan`] | the whole: tables that refer to each other by index |
//! | [`value`] | tensors: dtype, device, marks, shape, strides, alias root, last use |
//! | [`instr`] | instructions and their arguments |
//! | [`binding`] | bindings, outputs, gradients, scalars, guards |
//! | [`placement`], [`mesh`] | specs, placements, meshes, process groups |
//! | [`strategy`] | decisions of the sharding system, for people and tools |
//! | [`pool`] | ids and ranges |
//! | `numbered` | enums whose numbers other languages know |
//! | [`header`], [`mod@file`] | the file: written whole or not at all, opened in place |
//! | [`check`] | the rules that the tables must keep |
//! | [`schedule`] | the schedule of a bound plan: what runs once, and where results lie |
//! | [`sequence`] | the collectives a plan issues, and whether those of all ranks fit together |
//! | [`store`] | a directory of plans, by guard key and rank |
//! | [`describe`], [`diff`], [`result`] | plans for people: text, JSON, differences in words |
//! | [`error`] | every way a plan can be wrong |
//!
//! Nothing here executes anything.

#[cfg(test)]
extern crate self as rote_plans;

pub mod binding;
pub mod check;
pub mod describe;
pub mod diff;
pub mod error;
pub mod file;
pub mod header;
pub mod instr;
pub mod mesh;
mod numbered;
pub mod placement;
pub mod plan;
pub mod pool;
pub mod result;
pub mod schedule;
pub mod sequence;
pub mod store;
pub mod strategy;
pub mod value;

pub use binding::{
    Anchor, Binding, BindingKind, Comparison, Constant, GradResult, Guard, GuardKind, Output,
    Scalar,
};
pub use check::Fault;
pub use error::PlanError;
pub use file::PlanFile;
pub use instr::{
    Arg, CHECK_EQUAL, CHECK_NUMBER, CHECK_SHAPE, Collective, CollectiveKind, Instr, NUMBER_OPS,
    RngAction, WAIT, is_check, keeps_to_arguments,
};
pub use mesh::{Group, Mesh};
pub use placement::{Placement, ReduceOp, Spec};
pub use plan::{ArchivedPlan, Fingerprint, Plan};
pub use pool::{InstrId, NONE, Range, StrId, ValueId};
pub use schedule::Schedule;
pub use sequence::Sequence;
pub use store::PlanStore;
pub use strategy::{Redistribution, Strategy};
pub use value::{DType, Def, Device, Kind, Marks, Meta, Region, Value};

#[cfg(test)]
#[path = "../tests/sample/mod.rs"]
mod sample;
