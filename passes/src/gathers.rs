//! Gathers of which a rank needs its own piece only, and collectives whose results
//! nothing needs.
//!
//! DTensor gathers a tensor to replicate it, and slices it to shard it again. Where
//! every look at a gathered tensor lies within the piece that this rank itself sent,
//! nobody else's is needed: the result keeps its place, its shape and its strides,
//! and this rank's piece is copied into it where the gather was. What is read holds
//! the same elements at the same offsets of an allocation as before, bit for bit; the
//! rest of the allocation holds anything, and nothing looks at it. The same goes for
//! a gather along another dim than the first: a gather, its rows, and `cat` of the
//! rows, all looks at which lie within this rank's part of that dim.
//!
//! ```text
//! %3 = all_gather(%1)           %3 = empty
//! wait %3                  >    copy_(%3[own], %1)
//! %4 = view %3[own]             %4 = view %3[own]
//! ```
//!
//! Where in the group this rank is follows from the plan: a plan belongs to one
//! rank, and the ranks of its groups are recorded; both are guarded.
//!
//! The pass then leaves out what nothing needs any more, as `dead` does, but
//! collectives too: every rank has the same ones to leave out, since the ranks run
//! the same program and look at their own pieces alike; they agree on it before they
//! replay.

use rote_plans::schedule::Ops;
use rote_plans::{Collective, CollectiveKind, Instr, Plan, ValueId};

use super::effects::{self, Joined, for_each_written, outlives, outs, root};
use super::{Done, Pass, Program, Stage, dead, emit};
use crate::liveness::{follow, for_each_value};

pub(super) const PASS: Pass = Pass {
    name: "gathers",
    about: "leave out gathers if only this rank's own piece is used, and unused collectives",
    by_default: false,
    alters_collectives: true,
    keeps_bits: true,
    needs: emit::COPY,
    stage: Stage::Instructions,
    apply,
};

fn apply(program: &mut Program, _ops: &dyn Ops) -> Done {
    let own = own_pieces(&program.plan);
    if !own.is_empty() {
        program.carries = keep_own(&mut program.plan, &own, &program.carries);
    }
    let plan = &mut program.plan;
    let keep = dead::needed(plan, false);
    let collective = |(instr, _): &(&Instr, &bool)| matches!(instr, Instr::Collective(_));
    let collectives = plan.instrs.iter().zip(&keep).filter(collective);
    let kept: Vec<bool> = collectives.map(|(_, keep)| *keep).collect();
    let unused = kept.iter().filter(|kept| !**kept).count();
    if own.len() + unused > 0 {
        let mut kept = kept.into_iter();
        program.carries.retain(|_| kept.next().unwrap_or(true));
        dead::leave_out(plan, &keep);
    }
    Done {
        changed: own.len() + unused,
        what: format!(
            "{} gathers become copies of this rank's piece, {unused} collectives nothing needs",
            own.len()
        ),
    }
}

/// A result of which only this rank's own piece is looked at.
struct Own {
    /// The gather, and what makes the result: the gather, or the join of its rows.
    gather: usize,
    at: usize,
    input: ValueId,
    gathered: ValueId,
    result: ValueId,
    /// The dim along which the result is gathered.
    dim: usize,
    /// Where along that dim this rank's piece starts.
    start: i64,
}

fn own_pieces(plan: &Plan) -> Vec<Own> {
    let outlives = outlives(plan);
    // What nothing needs does not count as looking.
    let needed = dead::needed(plan, false);
    let looking: Vec<usize> = (0..plan.instrs.len()).filter(|i| needed[*i]).collect();
    let mut found = Vec::new();
    for (gather, instr) in plan.instrs.iter().enumerate() {
        let Instr::Collective(c) = instr else {
            continue;
        };
        let ranks = plan.dims(plan.groups[c.group as usize].ranks);
        let rank = i64::from(plan.fingerprint.rank);
        let Some(place) = ranks.iter().position(|of| *of == rank) else {
            continue;
        };
        let whole = |own: &Own, looks: &[(usize, ValueId)]| {
            !outlives[own.result as usize]
                && is_gathered(plan, own, ranks.len() as i64)
                && looks.iter().all(|(_, value)| within(plan, own, *value))
        };
        let looks_at = |result: ValueId| looks(plan, &looking, result);
        let looks = looks_at(c.output);
        let Some(&(first, _)) = looks.first() else {
            continue;
        };
        let size = |dim: usize| plan.dims(plan.values[c.input as usize].shape).get(dim);
        let mut own = Own {
            gather,
            at: gather,
            input: c.input,
            gathered: c.output,
            result: c.output,
            dim: 0,
            start: place as i64 * size(0).unwrap_or(&0),
        };
        if c.kind != CollectiveKind::AllGather || !is_gathered(plan, &own, ranks.len() as i64) {
            continue;
        }
        if whole(&own, &looks) {
            found.push(own);
        } else if let Some((result, dim)) = joined(plan, first, c) {
            // Nothing else may look at the rows, and they are those of the copy.
            let alone = looks.iter().all(|(at, _)| *at == first);
            if alone && !outlives[c.output as usize] && !overwritten(plan, c.input, gather..first) {
                own.at = first;
                own.result = result;
                own.dim = dim;
                own.start = place as i64 * size(dim).unwrap_or(&0);
                if whole(&own, &looks_at(result)) {
                    found.push(own);
                }
            }
        }
    }
    found
}

/// What looks at the storage of a root, and through which value: reads and writes,
/// but not the wait for it.
fn looks(plan: &Plan, looking: &[usize], of: ValueId) -> Vec<(usize, ValueId)> {
    let mut found = Vec::new();
    for &i in looking {
        let instr = &plan.instrs[i];
        if matches!(instr, Instr::View { .. } | Instr::Wait { .. }) {
            continue;
        }
        let mut look = |value: ValueId| {
            if root(plan, value) == of {
                found.push((i, value));
            }
        };
        for_each_value(plan, instr, &mut look);
        // An op may hand out a view of what it reads.
        let views = outs(plan, instr).into_iter().filter(|out| *out != of);
        views.for_each(look);
    }
    found
}

/// Whether a result fills a storage of its own, row after row, with what the ranks
/// send joined along the dim.
fn is_gathered(plan: &Plan, own: &Own, ranks: i64) -> bool {
    let value = |v: ValueId| &plan.values[v as usize];
    let (input, result) = (value(own.input), value(own.result));
    let mut shape = plan.dims(input.shape).to_vec();
    let Some(size) = shape.get_mut(own.dim) else {
        return false;
    };
    *size = size.saturating_mul(ranks);
    if plan.dims(result.shape) != shape {
        return false;
    }
    let numel: i64 = shape.iter().product();
    let bytes = numel.unsigned_abs() * result.dtype.bytes().unwrap_or(0);
    bytes > 0
        && plan.kind(own.input) == plan.kind(own.result)
        && emit::is_contiguous(&shape, plan.dims(result.strides))
        && (result.root, result.offset, result.storage_bytes) == (own.result, 0, bytes)
}

/// Whether a value that looks at a result lies within this rank's piece of it.
fn within(plan: &Plan, own: &Own, value: ValueId) -> bool {
    let value = &plan.values[value as usize];
    let result = &plan.values[own.result as usize];
    let gathered = plan.dims(result.shape);
    let step: i64 = gathered[own.dim + 1..].iter().product();
    // The piece is a run of each period of the joined dim and those after it.
    let period = gathered[own.dim] * step;
    let input = plan.dims(plan.values[own.input as usize].shape);
    let run = own.start * step..(own.start + input[own.dim]) * step;
    let mut last = value.offset.rem_euclid(period);
    let starts_inside = run.contains(&last);
    for (size, stride) in plan.dims(value.shape).iter().zip(plan.dims(value.strides)) {
        if *size == 0 {
            return value.dtype == result.dtype;
        }
        if *stride < 0 {
            return false;
        }
        if stride % period != 0 {
            last += (size - 1) * stride;
        }
    }
    value.dtype == result.dtype && starts_inside && run.contains(&last)
}

/// The result of an op that joins the rows of a gathered tensor, one per rank, and the
/// dim.
fn joined(plan: &Plan, at: usize, gather: &Collective) -> Option<(ValueId, usize)> {
    let Joined { pieces, dim, out } = effects::joined(plan, &plan.instrs[at])?;
    let shape = plan.dims(plan.values[gather.input as usize].shape);
    let row: i64 = shape.iter().product();
    let rows = pieces.iter().zip(0_i64..).all(|(piece, rank)| {
        let value = &plan.values[*piece as usize];
        value.root == gather.output
            && value.offset == row.saturating_mul(rank)
            && plan.dims(value.shape) == shape
            && emit::is_contiguous(shape, plan.dims(value.strides))
            && plan.kind(*piece) == plan.kind(gather.output)
    });
    (rows && dim < shape.len()).then_some((out, dim))
}

/// Whether an instruction in between writes what a value looks at.
fn overwritten(plan: &Plan, value: ValueId, between: std::ops::Range<usize>) -> bool {
    let own = root(plan, value);
    let mut written = false;
    for instr in &plan.instrs[between] {
        for_each_written(plan, instr, |root| written |= root == own);
    }
    written
}

/// Puts copies of this rank's pieces in the place of gathers. `carried`: which
/// recorded collectives each one carries out; returns the same of those that are left.
fn keep_own(plan: &mut Plan, own: &[Own], carried: &[Vec<u32>]) -> Vec<Vec<u32>> {
    let old = std::mem::take(&mut plan.instrs);
    let (mut instrs, mut moved, mut left) = (Vec::new(), Vec::new(), Vec::new());
    let mut carried = carried.iter();
    for (i, instr) in old.iter().enumerate() {
        moved.push(instrs.len() as u32);
        let gather = own.iter().any(|own| own.gather == i);
        if let Instr::Collective(_) = instr {
            left.extend(carried.next().filter(|_| !gather).cloned());
        }
        let waited = |value: ValueId| own.iter().any(|own| own.gathered == root(plan, value));
        if let Some(own) = own.iter().find(|own| own.at == i) {
            let (input, result) = (plan.values[own.input as usize], own.result);
            let shape = plan.dims(input.shape).to_vec();
            let strides = plan.dims(plan.values[result as usize].strides).to_vec();
            let offset = own.start * strides[own.dim];
            let piece = emit::piece(plan, result, &shape, &strides, offset);
            instrs.extend([
                emit::allocate(plan, result),
                emit::view(plan, piece),
                emit::copy(plan, piece, own.input),
            ]);
        } else if !gather && !matches!(instr, Instr::Wait { value } if waited(*value)) {
            instrs.push(*instr);
        }
    }
    moved.push(instrs.len() as u32);
    plan.instrs = instrs;
    follow(plan, &moved);
    emit::define(plan);
    left
}
