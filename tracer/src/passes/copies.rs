//! Copies that nothing can tell from what they copy.
//!
//! A copy with the layout of its source holds the same elements at the same
//! strides for as long as neither is written, so whoever reads the copy may read
//! the source. It stays when the source is written after the copy was made, when
//! the copy is ever written, or when it is returned or left as a gradient
//! (returned tensors are fresh). The source must lie where the copy would have,
//! up to alignment: matrix kernels may sum in another order on data that is not
//! aligned.

use rote_plans::schedule::ARENA_ALIGNMENT;
use rote_plans::{Arg, Def, Instr, Plan, ValueId};

use super::effects::{self, is_function, outlives, outs, root, writes};
use super::{Done, Pass, Program, Stage};

pub(super) const PASS: Pass = Pass {
    name: "copies",
    about: "read the source of a copy that is never told apart from it",
    by_default: true,
    stage: Stage::Instructions,
    apply,
};

const COPIES: &[&str] = &["aten::clone", "aten::_to_copy", "aten::contiguous"];

fn apply(program: &mut Program) -> Done {
    let plan = &mut program.plan;
    let (outlives, writes) = (outlives(plan), writes(plan));
    let mut with: Vec<ValueId> = (0..plan.values.len() as ValueId).collect();
    let mut keep = vec![true; plan.instrs.len()];
    let (mut changed, mut bytes) = (0, 0);
    for (i, kept) in keep.iter_mut().enumerate() {
        let Some((source, copy)) = copied(plan, i) else {
            continue;
        };
        let source = with[source as usize];
        let from = root(plan, source);
        let written_later = writes[from as usize].iter().any(|at| *at > i as u32);
        if outlives[copy as usize]
            || !writes[copy as usize].is_empty()
            || written_later
            || !same_layout(plan, source, copy)
        {
            continue;
        }
        let views = |plan: &Plan| {
            let values = plan.values.iter().enumerate();
            let of_copy = values.filter(|(_, value)| value.root == copy);
            of_copy.map(|(id, _)| id).collect::<Vec<_>>()
        };
        let views = views(plan);
        let dtype = plan.values[copy as usize].dtype;
        if views.iter().any(|id| plan.values[*id].dtype != dtype) {
            continue; // offsets count in elements of another size
        }
        let offset = plan.values[source as usize].offset;
        bytes += plan.values[copy as usize].storage_bytes;
        for id in views.into_iter().filter(|id| *id != copy as usize) {
            plan.values[id].root = from;
            plan.values[id].offset += offset;
        }
        with[copy as usize] = source;
        *kept = false;
        changed += 1;
    }
    if changed > 0 {
        effects::replace(plan, &with);
        effects::retain(plan, &keep);
    }
    Done {
        changed,
        what: format!("{changed} copies of {bytes} bytes are not made"),
    }
}

/// Source and result of a copy.
fn copied(plan: &Plan, i: usize) -> Option<(ValueId, ValueId)> {
    let instr = &plan.instrs[i];
    let Instr::Local { op, args, .. } = instr else {
        return None;
    };
    if !COPIES.contains(&plan.str(*op)) || !is_function(plan, instr) {
        return None;
    }
    match (
        plan.args[args.indices()].first(),
        outs(plan, instr).as_slice(),
    ) {
        (Some(Arg::Value(source)), [copy]) => Some((*source, *copy)),
        _ => None,
    }
}

fn same_layout(plan: &Plan, source: ValueId, copy: ValueId) -> bool {
    let (a, b) = (&plan.values[source as usize], &plan.values[copy as usize]);
    let width = a.dtype.bytes().unwrap_or(0) as i64;
    let aligned = (a.offset * width) % ARENA_ALIGNMENT as i64 == 0;
    let made_here = matches!(plan.values[a.root as usize].def, Def::Instr(_));
    (a.dtype, a.device) == (b.dtype, b.device)
        && plan.dims(a.shape) == plan.dims(b.shape)
        && plan.dims(a.strides) == plan.dims(b.strides)
        && b.root == copy
        && b.offset == 0
        && aligned
        && made_here
}
