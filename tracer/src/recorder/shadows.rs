//! Writes of tensors that outlive the call, ahead of a check: the running averages of a batch norm, before an optimizer
//! asks whether gradients are finite.
//!
//! Where a check ends a replay, the call is made again, and finds its tensors as they were. So the plan writes to a copy
//! of such a tensor, which it makes first, and copies that back behind the last check.

use hashbrown::HashMap;
use rote_passes::emit::{allocate, copy, is_contiguous, storage};
use rote_passes::liveness::for_each_written;
use rote_passes::{reorder, replace};
use rote_plans::value::reach;
use rote_plans::{Def, Instr, Marks, NONE, Plan, StrId, Value, ValueId, keeps_to_arguments};

use super::failing::{is_final, lasts};

/// How many bytes of tensors are copied at each replay, at most: averages, and no parameters of a large model.
const MOST_BYTES: u64 = 4 << 20;

/// The tensors that a plan has to write to copies of, so that nothing that lasts comes before a check; `None` where that
/// cannot be: something else comes before it, the step writes them behind it too, or gives them back. `agree`: whether
/// the ranks agree about checks, so that collectives may come before.
pub(super) fn shadowed(plan: &Plan, check: usize, agree: bool) -> Option<Vec<ValueId>> {
    let root = |value: ValueId| plan.values[value as usize].root;
    let mut found = Vec::new();
    for instr in &plan.instrs[..check] {
        let lasts = match agree {
            true => is_final(plan, instr),
            false => lasts(plan, instr),
        };
        match instr {
            _ if !lasts => continue,
            Instr::Local { op, .. } if keeps_to_arguments(plan.str(*op)) => {}
            Instr::Collective(_) if agree => {}
            _ => return None,
        }
        for_each_written(plan, instr, |written| {
            if plan.is_bound(written) && !found.contains(&written) {
                found.push(written);
            }
        });
    }
    let mut bytes = 0;
    for &one in &found {
        bytes += whole(plan, one)?;
    }
    let mut is_free = bytes <= MOST_BYTES;
    for instr in &plan.instrs[check..] {
        for_each_written(plan, instr, |written| is_free &= !found.contains(&written));
    }
    let outputs = plan.outputs.iter().map(|output| output.value);
    let grads = plan.grads.iter().map(|grad| grad.value);
    is_free &= !outputs
        .chain(grads)
        .filter(|&value| value != NONE)
        .any(|value| found.contains(&root(value)));
    is_free.then_some(found)
}

/// The bytes of a binding, if a copy of it has each of its elements at the same place, and the plan looks at these alone.
fn whole(plan: &Plan, one: ValueId) -> Option<u64> {
    let value = &plan.values[one as usize];
    let (shape, strides) = (plan.dims(value.shape), plan.dims(value.strides));
    let width = value.dtype.bytes()?;
    let bytes = shape.iter().product::<i64>().checked_mul(width as i64)?;
    let is_plain = value.marks == Marks::NONE && value.offset == 0;
    let is_inside = |other: &Value| {
        let dims = plan.dims(other.shape).iter().copied();
        let dims = dims.zip(plan.dims(other.strides).iter().copied());
        let width = other.dtype.bytes().unwrap_or(1);
        let seen = reach(width, other.offset, dims);
        seen.is_none_or(|(from, to)| 0 <= from && to <= i128::from(bytes))
    };
    let mut of_it = plan.values.iter().filter(|other| other.root == one);
    (is_plain && is_contiguous(shape, strides) && of_it.all(is_inside)).then_some(bytes as u64)
}

/// Writes to copies of tensors up to a check, and copies them back behind it.
pub(super) fn shadow(plan: &mut Plan, sources: &mut Vec<StrId>, check: usize, found: &[ValueId]) {
    let mut copies = HashMap::new();
    for &one in found {
        let shape = plan.dims(plan.values[one as usize].shape).to_vec();
        copies.insert(one, storage(plan, one, &shape));
    }
    let with: Vec<ValueId> = (0..plan.values.len() as ValueId)
        .map(|value| copies.get(&value).copied().unwrap_or(value))
        .collect();
    replace(plan, &with);
    for value in &mut plan.values {
        value.root = with[value.root as usize];
    }
    for &one in found {
        plan.values[one as usize].root = one;
    }
    let recorded = plan.instrs.len();
    for &one in found {
        let made = copies[&one];
        plan.values[made as usize].def = Def::Instr(plan.instrs.len() as u32);
        let new = [allocate(plan, made), copy(plan, made, one)];
        plan.instrs.extend(new);
    }
    let back = plan.instrs.len();
    for &one in found {
        let new = copy(plan, one, copies[&one]);
        plan.instrs.push(new);
    }
    let source = sources[check];
    sources.resize(plan.instrs.len(), source);
    let order: Vec<usize> = (recorded..back)
        .chain(0..=check)
        .chain(back..plan.instrs.len())
        .chain(check + 1..recorded)
        .collect();
    reorder(plan, &order);
    *sources = order.iter().map(|&at| sources[at]).collect();
}
