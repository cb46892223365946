//! Copies that nothing can tell from what they copy are not made.
//!
//! A copy with the layout and the marks (conjugated, negated) of its source holds
//! the same elements at the same strides for as long as neither is written, so
//! whoever reads the copy may read the source, unless it counts from the start of
//! the copy's storage. The same holds for pieces of one tensor that are joined again as
//! they lie. A copy stays when the source is written after the copy was made,
//! when the copy is ever written, or when it is returned or left as a gradient
//! (returned tensors are fresh). The source must be aligned as the copy would
//! have been: matrix kernels may sum in another order on data that is not.
//!
//! A copy into a tensor that is there already (`copy_`) goes too, where it has the layout
//! of its source: what reads the tensor from then on reads all that was copied and no
//! more, and reads the source instead, which nothing writes until the last of them has
//! run. So optimizers read the buckets of DDP, and not what DDP copies out of them. Such
//! a source seldom is aligned: ops that go element by element may read it all the same.

use std::collections::{HashMap, HashSet};

use rote_plans::schedule::{COPIES, Ops};
use rote_plans::{Arg, Def, Instr, Meta, NONE, Plan, Region, ValueId, keeps_to_arguments};

use super::effects::{
    anchored, for_each_written, is_function, outlives, outs, replace_in, retain, root, writes,
};
use super::{Done, Pass, Program, Stage};
use crate::liveness::for_each_value;
use crate::ops::{goes_by_elements, leaves_gradients};

pub(super) const PASS: Pass = Pass {
    name: "copies",
    about: "leave out copies that are never told apart from their source",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

fn apply(program: &mut Program, ops: &dyn Ops) -> Done {
    let plan = &mut program.plan;
    let (views, bytes) = as_views(plan, ops);
    let (read, more) = into_tensors(plan, ops);
    let (changed, bytes) = (views + read, bytes + more);
    Done {
        changed,
        what: format!("{changed} copies of {bytes} bytes are not made"),
    }
}

/// Makes copies views of what they copy. Returns how many, and of how many bytes.
fn as_views(plan: &mut Plan, ops: &dyn Ops) -> (usize, u64) {
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
    (changed, bytes)
}

/// Leaves out copies into tensors, and has what reads these read the sources.
/// Returns how many, and of how many bytes.
fn into_tensors(plan: &mut Plan, ops: &dyn Ops) -> (usize, u64) {
    let copies: Vec<_> = (0..plan.instrs.len())
        .filter_map(|i| copied_into(plan, i).map(|(to, from)| (i, to, from)))
        .collect();
    if copies.is_empty() {
        return (0, 0);
    }
    let (outlives, anchored) = (outlives(plan), anchored(plan));
    let (reads, writes) = (reads(plan), writes_that_happen(plan));
    let mut keep = vec![true; plan.instrs.len()];
    let mut gone = vec![false; plan.values.len()];
    let mut sources: HashMap<u32, HashMap<ValueId, ValueId>> = HashMap::new();
    let (mut changed, mut bytes) = (0, 0);
    for (i, to, from) in copies {
        let (root_of_copy, root_of_source) = (root(plan, to), root(plan, from));
        let kept = outlives[root_of_copy as usize] || anchored[root_of_copy as usize];
        if kept || gone[root_of_copy as usize] || gone[root_of_source as usize] {
            continue;
        }
        let aligned = aligned(plan, from, ops);
        let readers = readers(plan, i, to, &reads, &writes, aligned);
        let last = readers.as_ref().and_then(|readers| readers.last());
        let (Some(readers), Some(&(last, _))) = (&readers, last) else {
            continue;
        };
        let mut written = writes[root_of_source as usize].iter();
        if written.any(|at| (i as u32..=last).contains(at)) {
            continue;
        }
        for &(at, read) in readers {
            sources.entry(at).or_default().insert(read, from);
        }
        gone[root_of_copy as usize] = true;
        keep[i] = false;
        changed += 1;
        bytes += bytes_of(plan, to);
    }
    for (at, sources) in &sources {
        let source = |value| sources.get(&value).copied().unwrap_or(value);
        replace_in(plan, *at as usize, source);
    }
    retain(plan, &keep);
    (changed, bytes)
}

/// What an instruction copies: the tensor into which, and the one from which, if they
/// have one layout and the program has made both.
fn copied_into(plan: &Plan, i: usize) -> Option<(ValueId, ValueId)> {
    let instr = &plan.instrs[i];
    let Instr::Local { op, args, .. } = instr else {
        return None;
    };
    let [Arg::Value(to), Arg::Value(from), ..] = plan.args[args.indices()] else {
        return None;
    };
    if plan.str(*op) != "aten::copy_" || !outs(plan, instr).is_empty() {
        return None;
    }
    let (copy, source) = (plan.region(to), plan.region(from));
    let fits = copy.meta == source.meta && copy.root != source.root;
    (fits && made_here(plan, to) && made_here(plan, from)).then_some((to, from))
}

/// The bytes of a tensor's elements.
fn bytes_of(plan: &Plan, value: ValueId) -> u64 {
    let meta = plan.region(value).meta;
    let elements: i64 = meta.shape.iter().product();
    elements as u64 * meta.kind.dtype.bytes().unwrap_or(0)
}

/// Whether the program makes a value's storage.
fn made_here(plan: &Plan, value: ValueId) -> bool {
    matches!(plan.values[root(plan, value) as usize].def, Def::Instr(_))
}

/// For each value that is a root, the instructions that read it or a view of it, and
/// which of these they read. Making a view reads nothing.
fn reads(plan: &Plan) -> Vec<Vec<(u32, ValueId)>> {
    let mut reads = vec![Vec::new(); plan.values.len()];
    for (i, instr) in plan.instrs.iter().enumerate() {
        if !matches!(instr, Instr::View { .. }) {
            for_each_value(plan, instr, |value| {
                reads[root(plan, value) as usize].push((i as u32, value));
            });
        }
    }
    reads
}

/// For each value that is a root, the instructions that write it after it was made, in
/// order, without optimizer steps that only declare it.
fn writes_that_happen(plan: &Plan) -> Vec<Vec<u32>> {
    let mut writes = vec![Vec::new(); plan.values.len()];
    for (i, instr) in plan.instrs.iter().enumerate() {
        match (instr, leaves_gradients(plan, instr)) {
            (Instr::Local { writes: list, .. }, Some(gradients)) => {
                let left: HashSet<_> = plan.ids(gradients).iter().collect();
                for &value in plan.ids(*list).iter().filter(|v| !left.contains(v)) {
                    writes[root(plan, value) as usize].push(i as u32);
                }
            }
            _ => for_each_written(plan, instr, |root| writes[root as usize].push(i as u32)),
        }
    }
    writes
}

/// The instructions that read a tensor after a copy was written into it, and by which
/// value each; none if one of them could tell the copy from its source.
fn readers(
    plan: &Plan,
    i: usize,
    copy: ValueId,
    reads: &[Vec<(u32, ValueId)>],
    writes: &[Vec<u32>],
    aligned: bool,
) -> Option<Vec<(u32, ValueId)>> {
    let (root, copied) = (root(plan, copy) as usize, plan.region(copy));
    if writes[root].iter().any(|at| *at > i as u32) {
        return None;
    }
    let behind: Vec<_> = (reads[root].iter().copied())
        .filter(|(at, _)| *at > i as u32)
        .collect();
    let takes = |&(at, read): &(u32, ValueId)| {
        plan.region(read) == copied
            && takes_from_elsewhere(plan, &plan.instrs[at as usize], aligned)
    };
    behind.iter().all(takes).then_some(behind)
}

/// Whether an instruction does the same with a tensor in another place. `aligned`:
/// whether that is aligned as an allocation.
fn takes_from_elsewhere(plan: &Plan, instr: &Instr, aligned: bool) -> bool {
    let Instr::Local { op, .. } = instr else {
        return false;
    };
    let name = plan.str(*op);
    let any = leaves_gradients(plan, instr).is_some() || goes_by_elements(name);
    any || aligned && keeps_to_arguments(name)
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
    let made_here = made_here(plan, value);
    let value = &plan.values[value as usize];
    let width = value.dtype.bytes().unwrap_or(0) as i64;
    made_here && value.offset * width % ops.alignment(value.device) as i64 == 0
}
