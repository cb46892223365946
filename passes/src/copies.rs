//! Copies that nothing can tell from what they copy become views of it.
//!
//! A copy with the layout and the marks (conjugated, negated) of its source holds
//! the same elements at the same strides for as long as neither is written, so
//! whoever reads the copy may read the source, unless it counts from the start of
//! the copy's storage. The same holds for pieces of one tensor that are joined again as
//! they lie. A copy stays when the source is written after the copy was made,
//! when the copy is ever written, or when it is returned or left as a gradient
//! (returned tensors are fresh). The source must be aligned as the copy would
//! have been: matrix kernels may sum in another order on data that is not.

use rote_plans::schedule::{COPIES, Ops};
use rote_plans::{Arg, Def, Instr, Meta, NONE, Plan, Region, ValueId};

use super::effects::{anchored, is_function, outlives, outs, root, writes};
use super::{Done, Pass, Program, Stage};

pub(super) const PASS: Pass = Pass {
    name: "copies",
    about: "replace copies that are never told apart from their source by views",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

fn apply(program: &mut Program, ops: &dyn Ops) -> Done {
    let plan = &mut program.plan;
    let (outlives, writes, anchored) = (outlives(plan), writes(plan), anchored(plan));
    let (mut changed, mut bytes) = (0, 0);
    for i in 0..plan.instrs.len() {
        let Some((source, copy)) = copied(plan, i) else {
            continue;
        };
        let from = root(plan, source);
        let written_later = writes[from as usize].iter().any(|at| *at > i as u32);
        if outlives[copy as usize]
            || anchored[copy as usize]
            || !writes[copy as usize].is_empty()
            || written_later
            || !aligned(plan, source, ops)
        {
            continue;
        }
        let (dtype, offset) = {
            let source = &plan.values[source as usize];
            (source.dtype, source.offset)
        };
        let mut views = (plan.values.iter_mut())
            .filter(|value| value.root == copy)
            .collect::<Vec<_>>();
        if views.iter().any(|view| view.dtype != dtype) {
            continue; // offsets count in elements of another size
        }
        for view in &mut views {
            view.root = from;
            view.offset += offset;
        }
        let value = &mut plan.values[copy as usize];
        bytes += std::mem::take(&mut value.storage_bytes);
        plan.instrs[i] = Instr::View {
            base: from,
            out: copy,
        };
        // Views are bound from their root.
        for instr in &mut plan.instrs[i + 1..] {
            match instr {
                Instr::View { base, .. } if *base == copy => *base = from,
                _ => {}
            }
        }
        changed += 1;
    }
    Done {
        changed,
        what: format!("{changed} copies of {bytes} bytes are not made"),
    }
}

/// What a copy would be a view of (the first piece, for joined ones), and the
/// copy, if they have one layout.
fn copied(plan: &Plan, i: usize) -> Option<(ValueId, ValueId)> {
    let instr = &plan.instrs[i];
    let Instr::Local { op, args, .. } = instr else {
        return None;
    };
    if !is_function(plan, instr) {
        return None;
    }
    let [copy] = *outs(plan, instr).as_slice() else {
        return None;
    };
    let args = &plan.args[args.indices()];
    let (source, sizes) = match (plan.str(*op), args) {
        (name, [Arg::Value(source), ..]) if COPIES.contains(&name) => {
            let sizes = plan.dims(plan.values[*source as usize].shape);
            (*source, sizes.to_vec())
        }
        ("aten::cat", [Arg::Values(pieces), Arg::Int(dim), ..]) => {
            joined(plan, plan.ids(*pieces), *dim)?
        }
        _ => return None,
    };
    let (from, to) = (plan.region(source), plan.region(copy));
    let joined = Meta {
        shape: &sizes,
        ..from.meta
    };
    let own = (to.root, to.offset) == (copy, 0);
    (joined == to.meta && own).then_some((source, copy))
}

/// The first of several pieces that lie one after another along a dim of one
/// tensor, and the sizes of all of them together.
fn joined(plan: &Plan, pieces: &[ValueId], dim: i64) -> Option<(ValueId, Vec<i64>)> {
    let first = *pieces.first()?;
    if pieces.contains(&NONE) {
        return None;
    }
    let head = plan.region(first);
    let mut sizes = head.meta.shape.to_vec();
    let strides = head.meta.strides;
    let dim = usize::try_from(if dim < 0 {
        dim + sizes.len() as i64
    } else {
        dim
    })
    .ok()?;
    let stride = *strides.get(dim)?;
    for &piece in &pieces[1..] {
        let region = plan.region(piece);
        let shape = region.meta.shape;
        let expected = Region {
            meta: Meta { shape, ..head.meta },
            offset: head.offset + sizes[dim] * stride,
            ..head
        };
        let alike = shape.len() == sizes.len()
            && (0..sizes.len()).all(|d| d == dim || shape[d] == sizes[d])
            && region == expected;
        if !alike {
            return None;
        }
        sizes[dim] += shape[dim];
    }
    Some((first, sizes))
}

/// Whether a value starts where an allocation of its own could: only known of
/// what the program makes.
fn aligned(plan: &Plan, value: ValueId, ops: &dyn Ops) -> bool {
    let value = &plan.values[value as usize];
    let width = value.dtype.bytes().unwrap_or(0) as i64;
    let made_here = matches!(plan.values[value.root as usize].def, Def::Instr(_));
    made_here && value.offset * width % ops.alignment(value.device) as i64 == 0
}
