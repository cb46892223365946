//! Figures of a plan: the numbers of instructions, collectives and bytes.

use std::collections::BTreeMap;

use crate::binding::ArchivedBindingKind;
use crate::describe::notation::collective_kind;
use crate::instr::{ArchivedArg, ArchivedInstr};
use crate::placement::ReduceOp;
use crate::plan::ArchivedPlan;
use crate::pool::NONE;
use crate::value::{ArchivedDef, ArchivedValue, DType};

/// Instructions by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Instructions {
    /// Local ops.
    pub local: u64,
    /// Views, which cost nothing at a replay.
    pub views: u64,
    /// Collectives.
    pub collectives: u64,
    /// Waits for collectives.
    pub waits: u64,
    /// Generator states saved or restored.
    pub rng: u64,
    /// Values dropped.
    pub frees: u64,
}

/// Counts the instructions by kind.
pub fn instructions(plan: &ArchivedPlan) -> Instructions {
    let mut counts = Instructions::default();
    for instr in plan.instrs.iter() {
        let Instructions {
            local,
            views,
            collectives,
            waits,
            rng,
            frees,
        } = &mut counts;
        *match instr {
            ArchivedInstr::Local { .. } => local,
            ArchivedInstr::View { .. } => views,
            ArchivedInstr::Collective(_) => collectives,
            ArchivedInstr::Wait { .. } => waits,
            ArchivedInstr::Rng { .. } => rng,
            ArchivedInstr::Free { .. } => frees,
        } += 1;
    }
    counts
}

/// All collectives of one kind over one group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveTotal {
    /// The group's label: the name of a mesh dim, or the ranks.
    pub group: String,
    /// For example `all_reduce`.
    pub kind: &'static str,
    /// For example `sum`; `None` for kinds that do not reduce.
    pub reduce: Option<&'static str>,
    /// How many there are.
    pub count: u64,
    /// Bytes that this rank puts into them.
    pub bytes: u64,
}

/// The collectives by group, kind and reduction.
pub fn collectives(plan: &ArchivedPlan) -> Vec<CollectiveTotal> {
    let mut totals = BTreeMap::<_, (u64, u64)>::new();
    for instr in plan.instrs.iter() {
        let ArchivedInstr::Collective(collective) = instr else {
            continue;
        };
        let group = &plan.groups[collective.group.to_native() as usize];
        let reduce = collective
            .reduce
            .as_ref()
            .map(|op| ReduceOp::TEXTS[*op as usize]);
        let key = (
            plan.str(group.label.to_native()),
            collective_kind(collective.kind),
            reduce,
        );
        let (count, bytes) = totals.entry(key).or_default();
        let input = &plan.values[collective.input.to_native() as usize];
        *count += 1;
        *bytes = bytes.saturating_add(tensor_bytes(plan, input));
    }
    totals
        .into_iter()
        .map(|((group, kind, reduce), (count, bytes))| CollectiveTotal {
            group: group.into(),
            kind,
            reduce,
            count,
            bytes,
        })
        .collect()
}

/// An op of a process group that the plan holds as a local op: its name and group, and the bytes that this rank puts
/// in. `None` for other instructions.
pub fn exchange(plan: &ArchivedPlan, instr: &ArchivedInstr) -> Option<(String, u64)> {
    let ArchivedInstr::Local {
        op, args, writes, ..
    } = instr
    else {
        return None;
    };
    let name = plan.str(op.to_native()).strip_prefix("c10d::")?;
    let (mut group, mut bytes) = ("", 0_u64);
    let written = match name {
        "reduce_" | "allreduce_coalesced_" => &[][..], // sent too
        _ => &plan.ids[writes.indices()],
    };
    for arg in &plan.args[args.indices()] {
        match arg {
            ArchivedArg::Str(text) => {
                let text = plan.str(text.to_native());
                let known = plan
                    .groups
                    .iter()
                    .find(|g| plan.str(g.name.to_native()) == text);
                group = known.map_or(group, |known| plan.str(known.label.to_native()));
            }
            ArchivedArg::Values(range) => {
                for value in plan.ids[range.indices()]
                    .iter()
                    .filter(|v| !written.contains(v))
                {
                    let value = plan.values.get(value.to_native() as usize);
                    let sent = value.map_or(0, |value| tensor_bytes(plan, value));
                    bytes = bytes.saturating_add(sent);
                }
            }
            _ => {}
        }
    }
    Some((format!("{name} on {group}"), bytes))
}

/// Bytes of the elements of a tensor, 0 for an element type of unknown size.
pub fn tensor_bytes(plan: &ArchivedPlan, value: &ArchivedValue) -> u64 {
    let element = DType(value.dtype.0).bytes().unwrap_or(0);
    let shape = plan.dims[value.shape.indices()].iter();
    shape.fold(element, |bytes, size| {
        bytes.saturating_mul(size.to_native().unsigned_abs())
    })
}

/// Bytes that a replay needs on this rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Tensors among the arguments.
    pub arguments: u64,
    /// Tensors of the state.
    pub state: u64,
    /// Gradients bound before the run.
    pub gradients: u64,
    /// Constants.
    pub constants: u64,
    /// The most bytes of results that are live at once.
    pub peak: u64,
    /// The instruction after which that is so, 0 for an empty program.
    pub peak_at: u32,
}

/// Adds up the memory of bindings, constants and results. A result's storage is
/// live from its definition until it and all views of it have been freed.
pub fn memory(plan: &ArchivedPlan) -> Memory {
    let mut memory = Memory {
        constants: plan.bytes.len() as u64,
        ..Memory::default()
    };
    for binding in plan.bindings.iter() {
        let bytes = match binding.kind {
            ArchivedBindingKind::Arg => &mut memory.arguments,
            ArchivedBindingKind::State => &mut memory.state,
            ArchivedBindingKind::Grad => &mut memory.gradients,
        };
        let value = &plan.values[binding.value.to_native() as usize];
        if value.root == binding.value {
            *bytes = bytes.saturating_add(tensor_bytes(plan, value));
        }
    }
    // For each root, after which instruction its last alias is gone.
    let mut until: Vec<u32> = vec![0; plan.values.len()];
    let mut freed: Vec<u32> = vec![NONE; plan.values.len()];
    for (index, instr) in (0..).zip(plan.instrs.iter()) {
        if let ArchivedInstr::Free { value } = instr {
            freed[value.to_native() as usize] = index;
        }
    }
    for (value, freed) in plan.values.iter().zip(&freed) {
        let until = &mut until[value.root.to_native() as usize];
        *until = (*until).max(*freed);
    }
    let mut freed_at: Vec<u64> = vec![0; plan.instrs.len()];
    let mut made_at: Vec<u64> = vec![0; plan.instrs.len()];
    for ((id, value), until) in (0..).zip(plan.values.iter()).zip(&until) {
        if let (ArchivedDef::Instr(instr), true) = (value.def, value.root == id) {
            let bytes = value.storage_bytes.to_native();
            let made = &mut made_at[instr.to_native() as usize];
            *made = made.saturating_add(bytes);
            if let Some(freed) = freed_at.get_mut(*until as usize) {
                *freed = freed.saturating_add(bytes);
            }
        }
    }
    let mut live = 0_u64;
    for (index, (made, freed)) in (0..).zip(made_at.iter().zip(&freed_at)) {
        live = live.saturating_sub(*freed).saturating_add(*made);
        if live > memory.peak {
            (memory.peak, memory.peak_at) = (live, index);
        }
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::PlanFile;
    use crate::sample;

    #[test]
    fn figures_of_the_sample() {
        let file = PlanFile::from_plan(&sample::small()).expect("valid");
        let plan = file.plan();
        assert_eq!(
            instructions(plan),
            Instructions {
                local: 4,
                views: 1,
                collectives: 1,
                waits: 1,
                rng: 2,
                frees: 1
            }
        );
        assert_eq!(
            collectives(plan),
            [CollectiveTotal {
                group: "tp".into(),
                kind: "all_reduce",
                reduce: Some("sum"),
                count: 1,
                bytes: 4 * 8 * 4,
            }]
        );
        // y (4x8) stays, spare (4x8) goes before the loss (one element) comes.
        assert_eq!(
            memory(plan),
            Memory {
                arguments: 128,
                state: 256,
                gradients: 0,
                constants: 8,
                peak: 256,
                peak_at: 6
            }
        );
    }

    #[test]
    fn a_view_keeps_its_root_alive() {
        let mut b = sample::Builder::new(1, 0);
        let x = b.binding(crate::BindingKind::Arg, "args[0]", &[4, 4], NONE);
        let y = b.op("aten::relu", &[crate::Arg::Value(x)], &[4, 4]);
        let view = b.transpose(y);
        b.free(y);
        let z = b.op("aten::relu", &[crate::Arg::Value(view)], &[4, 4]);
        b.free(view);
        b.op("aten::relu", &[crate::Arg::Value(z)], &[1]);
        let file = PlanFile::from_plan(&b.plan).expect("valid");
        let memory = memory(file.plan());
        assert_eq!((memory.peak, memory.peak_at), (128, 3));
    }
}
