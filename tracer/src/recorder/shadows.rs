//! Writes of tensors that outlive the call, ahead of a check: the running averages of a batch norm, before an optimizer
//! asks whether gradients are finite; one optimizer's update, before the loss of another one is looked at.
//!
//! Where a check ends a replay, the call is made again, and finds its tensors as they were. So the plan writes to a copy
//! of such a tensor, which it makes first, and copies that back behind the last check. From there on it reads and writes
//! the tensor itself.

use hashbrown::{HashMap, HashSet};
use rote_passes::emit::{allocate, copy, is_contiguous, piece, storage, view};
use rote_passes::liveness::{for_each_out, for_each_value, for_each_written};
use rote_passes::{reorder, replace, replace_in};
use rote_plans::value::reach;
use rote_plans::{Def, Instr, Marks, NONE, Plan, StrId, Value, ValueId, keeps_to_arguments};

use super::failing::{is_final, lasts};

/// How many bytes of tensors are copied at each replay, at most: averages, parameters of a small model with what their
/// optimizer keeps, and no parameters of a large one.
const MOST_BYTES: u64 = 64 << 20;

/// The tensors that a plan has to write to copies of, so that nothing that lasts comes before a check, or before an op that
/// raises; `None` where that cannot be, or something else comes before it. `agree`: whether the ranks agree about checks, so that collectives may
/// come before.
pub(super) fn shadowed(plan: &Plan, check: usize, agree: bool) -> Option<Vec<ValueId>> {
    let mut found = Vec::new();
    let mut bytes = 0;
    for instr in &plan.instrs[..=check] {
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
        let mut fits = true;
        for_each_written(plan, instr, |written| {
            if plan.is_bound(written) && !found.contains(&written) {
                match whole(plan, written) {
                    Some(more) => bytes += more,
                    None => fits = false,
                }
                found.push(written);
            }
        });
        if !fits || bytes > MOST_BYTES {
            return None;
        }
    }
    Some(found)
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
    use_originals_behind(plan, check + 1..recorded, &copies);
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

/// Has instructions, results and gradients behind the last check look at tensors themselves, and no longer at their
/// `copies`. Views of copies that were made before are made anew, by instructions at the end.
fn use_originals_behind(
    plan: &mut Plan,
    behind: std::ops::Range<usize>,
    copies: &HashMap<ValueId, ValueId>,
) {
    let originals: HashMap<ValueId, ValueId> =
        copies.iter().map(|(&one, &copy)| (copy, one)).collect();
    let mut made = HashSet::new();
    let mut used = Vec::new();
    for instr in &plan.instrs[behind.clone()] {
        for_each_out(plan, instr, |out| {
            made.insert(out);
        });
        for_each_value(plan, instr, |value| used.push(value));
    }
    for &value in &made {
        let root = &mut plan.values[value as usize].root;
        *root = originals.get(root).copied().unwrap_or(*root);
    }
    used.extend(plan.outputs.iter().map(|output| output.value));
    used.extend(plan.grads.iter().map(|grad| grad.value));
    let mut instead = originals.clone();
    for value in used {
        if value == NONE || instead.contains_key(&value) {
            continue;
        }
        let old = plan.values[value as usize];
        let Some(&one) = originals.get(&old.root) else {
            continue;
        };
        let (shape, strides) = (
            plan.dims(old.shape).to_vec(),
            plan.dims(old.strides).to_vec(),
        );
        let new = piece(plan, value, &shape, &strides, old.offset);
        plan.values[new as usize].root = one;
        plan.values[new as usize].def = Def::Instr(plan.instrs.len() as u32);
        plan.instrs.push(view(plan, new));
        instead.insert(value, new);
    }
    let new = |value: ValueId| instead.get(&value).copied().unwrap_or(value);
    for at in behind {
        replace_in(plan, at, new);
    }
    for output in &mut plan.outputs {
        output.value = new(output.value);
    }
    for grad in &mut plan.grads {
        grad.value = new(grad.value);
    }
}
