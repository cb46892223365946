//! The plan: one rank's straight-line program for one set of guards.

use rkyv::{Archive, Deserialize, Serialize};

use crate::binding::{Binding, Constant, GradResult, Guard, Output, Scalar};
use crate::instr::{Arg, Instr};
use crate::mesh::{Group, Mesh};
use crate::placement::{Placement, Spec};
use crate::pool::{Range, StrId, ValueId};
use crate::strategy::{Redistribution, Strategy};
use crate::value::{Def, Value};

/// What process a plan was recorded in. A plan runs only where all of it is
/// the same.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fingerprint {
    /// Version of Rote.
    pub rote: String,
    /// Framework and version, for example `torch 2.15.0`.
    pub framework: String,
    /// Number of ranks.
    pub world_size: u32,
    /// This rank.
    pub rank: u32,
}

/// One rank's program, in static single assignment form: tables of plain data
/// that refer to each other by index. [`crate::check`] says what must hold
/// between them.
#[derive(Archive, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
pub struct Plan {
    /// The process it was recorded in.
    pub fingerprint: Fingerprint,
    /// The captured function, for example `train.py:train_step`.
    pub function: String,
    /// The result's structure, as JSON (docs/plan-format.md).
    pub result: String,
    /// Interned text.
    pub strings: Vec<String>,
    /// Pool of shapes, strides, ranks and integer lists.
    pub dims: Vec<i64>,
    /// Pool of id lists.
    pub ids: Vec<u32>,
    /// Pool of constant bytes.
    pub bytes: Vec<u8>,
    /// Pool of placements.
    pub placements: Vec<Placement>,
    /// Device meshes.
    pub meshes: Vec<Mesh>,
    /// Process groups.
    pub groups: Vec<Group>,
    /// Specs of distributed tensors.
    pub specs: Vec<Spec>,
    /// Tensors.
    pub values: Vec<Value>,
    /// Pool of op arguments.
    pub args: Vec<Arg>,
    /// The program.
    pub instrs: Vec<Instr>,
    /// How many generator states it keeps at once.
    pub rng_slots: u32,
    /// Tensors it reads or writes that exist before it runs.
    pub bindings: Vec<Binding>,
    /// Tensors it returns.
    pub outputs: Vec<Output>,
    /// What it leaves in `.grad`.
    pub grads: Vec<GradResult>,
    /// Floats read anew at every replay.
    pub scalars: Vec<Scalar>,
    /// What must hold.
    pub guards: Vec<Guard>,
    /// Tensors computed ahead of time.
    pub constants: Vec<Constant>,
    /// What the sharding system decided.
    pub strategies: Vec<Strategy>,
    /// Changes of placements.
    pub redistributions: Vec<Redistribution>,
}

impl Plan {
    /// The text with this id.
    pub fn str(&self, id: StrId) -> &str {
        &self.strings[id as usize]
    }

    /// Entries of the pool of integers.
    pub fn dims(&self, range: Range) -> &[i64] {
        &self.dims[range.indices()]
    }

    /// Entries of the pool of ids.
    pub fn ids(&self, range: Range) -> &[u32] {
        &self.ids[range.indices()]
    }

    /// Whether a value is a tensor that exists before the run, and outlives it.
    pub fn is_bound(&self, value: ValueId) -> bool {
        matches!(self.values[value as usize].def, Def::Binding(_))
    }
}

impl ArchivedPlan {
    /// The text with this id. Meaningful for a plan that has been opened by
    /// [`crate::PlanFile`], which checks every id.
    pub fn str(&self, id: StrId) -> &str {
        &self.strings[id as usize]
    }
}
