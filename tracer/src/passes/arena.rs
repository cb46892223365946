//! Results at fixed places of one allocation, written there directly.
//!
//! A result that does not outlive the run, of an op that can write where it is
//! told to, or of a collective, gets an offset in the arena. Two results share
//! bytes only if their lifetimes do not touch: from the instruction that makes a
//! root to the last that looks at the root or a view of it, and for what a
//! collective reads, to the wait for it. Then every read sees what was written
//! last under its name, as with allocations of their own.
//!
//! A result of an element-wise op may lie exactly over an argument of the same
//! layout that is not used again: element for element the kernel reads before it
//! writes.
//!
//! Offsets are found largest first, each at the smallest gap that holds it among
//! those that live at the same time.

use rote_plans::schedule::{ARENA_ALIGNMENT, DEVICE_ARENA_ALIGNMENT, DYNAMIC};
use rote_plans::{Arg, Def, Device, Instr, NONE, Plan, ValueId};

use super::effects::{for_each_written, outlives, outs, root};
use super::into::{element_wise, into};
use super::{Done, Pass, Program, Stage};
use crate::finish::{for_each_out, for_each_value};

pub(super) const PASS: Pass = Pass {
    name: "arena",
    about: "write results at fixed places of one allocation",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    stage: Stage::Schedule,
    apply,
};

/// A run of bytes of the arena, for a while.
#[derive(Clone, Debug)]
struct Buffer {
    bytes: u64,
    /// The instruction that makes it, and the last that looks at it.
    live: (u32, u32),
    roots: Vec<ValueId>,
    offset: u64,
}

fn apply(program: &mut Program) -> Done {
    let plan = &program.plan;
    let (roots, device) = candidates(plan, &program.schedule.once);
    let alignment = match device {
        Some(Device { kind: 0, .. }) | None => ARENA_ALIGNMENT,
        Some(_) => DEVICE_ARENA_ALIGNMENT,
    };
    let lifetimes = lifetimes(plan);
    let (mut buffers, shared) = buffers(plan, &roots, &lifetimes, alignment);
    let bound = most_at_once(&buffers, plan.instrs.len());
    place(&mut buffers);

    let schedule = &mut program.schedule;
    schedule.offsets = vec![DYNAMIC; plan.values.len()];
    for buffer in &buffers {
        for root in &buffer.roots {
            schedule.offsets[*root as usize] = buffer.offset;
        }
        schedule.arena_bytes = schedule.arena_bytes.max(buffer.offset + buffer.bytes);
    }
    schedule.arena_device = device;
    let mut ops = 0;
    for (i, instr) in plan.instrs.iter().enumerate() {
        let placed = outs(plan, instr).iter().any(|v| roots[*v as usize]);
        if let (Instr::Local { op, overload, .. }, true) = (instr, placed) {
            if let Some(how) = into(plan.str(*op), plan.str(*overload)) {
                schedule.into.push((i as u32, how));
                ops += 1;
            }
        }
    }
    Done {
        changed: ops,
        what: format!(
            "{ops} ops write to an arena of {} bytes ({bound} live at once); {shared} over an argument",
            schedule.arena_bytes
        ),
    }
}

/// Which values are roots that can lie in the arena, and on which device.
fn candidates(plan: &Plan, once: &[bool]) -> (Vec<bool>, Option<Device>) {
    let outlives = outlives(plan);
    let mut device = None;
    let mut chosen = vec![false; plan.values.len()];
    for (i, instr) in plan.instrs.iter().enumerate() {
        if once.get(i) == Some(&true) {
            continue;
        }
        let made = match instr {
            Instr::Local {
                op, overload, outs, ..
            } => {
                let how = into(plan.str(*op), plan.str(*overload));
                let ids = plan.ids(*outs);
                // All results or none: an overload writes all of them.
                if how.is_none() || ids.is_empty() || ids.contains(&NONE) {
                    continue;
                }
                ids.to_vec()
            }
            Instr::Collective(c) if c.output != c.input => vec![c.output],
            _ => continue,
        };
        let first = plan.values[made[0] as usize].device;
        let fits = made.iter().all(|v| {
            let value = &plan.values[*v as usize];
            let here = value.def == Def::Instr(i as u32) && value.root == *v;
            here && !outlives[*v as usize]
                && value.device == first
                && value.offset == 0
                && dense(plan, *v)
        });
        if fits && *device.get_or_insert(first) == first {
            made.into_iter().for_each(|v| chosen[v as usize] = true);
        }
    }
    (chosen, device)
}

/// Whether a value's elements fill its storage.
fn dense(plan: &Plan, value: ValueId) -> bool {
    let value = &plan.values[value as usize];
    let numel: i64 = plan.dims(value.shape).iter().product();
    let bytes = value.dtype.bytes().unwrap_or(0) * numel.unsigned_abs();
    bytes > 0 && bytes == value.storage_bytes
}

/// For each root, the instruction that makes it and the last that looks at its
/// storage.
fn lifetimes(plan: &Plan) -> Vec<(u32, u32)> {
    let mut live = vec![(u32::MAX, 0); plan.values.len()];
    let mut sent: Vec<(ValueId, ValueId)> = Vec::new();
    for (i, instr) in plan.instrs.iter().enumerate() {
        let i = i as u32;
        let mut touch = |root: ValueId| {
            let (from, to) = &mut live[root as usize];
            (*from, *to) = ((*from).min(i), (*to).max(i));
        };
        if matches!(instr, Instr::Free { .. }) {
            continue;
        }
        for_each_value(plan, instr, |v| touch(root(plan, v)));
        for_each_out(plan, instr, |v| touch(root(plan, v)));
        for_each_written(plan, instr, &mut touch);
        match instr {
            Instr::Collective(c) => sent.push((root(plan, c.output), root(plan, c.input))),
            Instr::Wait { value } => {
                let waited = root(plan, *value);
                for (_, input) in sent.iter().filter(|(output, _)| *output == waited) {
                    touch(*input);
                }
                sent.retain(|(output, _)| *output != waited);
            }
            _ => {}
        }
    }
    // What nobody waits for may be in use until the end.
    let end = plan.instrs.len() as u32;
    for (output, input) in sent {
        live[output as usize].1 = end;
        live[input as usize].1 = end;
    }
    live
}

/// One buffer per root, or for several where one lies over another; and how many
/// do.
fn buffers(
    plan: &Plan,
    roots: &[bool],
    lifetimes: &[(u32, u32)],
    alignment: u64,
) -> (Vec<Buffer>, usize) {
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut of: Vec<Option<usize>> = vec![None; plan.values.len()];
    let mut shared = 0;
    for (i, instr) in plan.instrs.iter().enumerate() {
        for out in outs(plan, instr) {
            if !roots[out as usize] {
                continue;
            }
            let live = lifetimes[out as usize];
            let under = reused(plan, i, out, lifetimes).and_then(|v| of[v as usize]);
            if let Some(at) = under {
                let buffer = &mut buffers[at];
                buffer.live.1 = buffer.live.1.max(live.1);
                buffer.roots.push(out);
                of[out as usize] = Some(at);
                shared += 1;
                continue;
            }
            of[out as usize] = Some(buffers.len());
            let bytes = plan.values[out as usize].storage_bytes;
            buffers.push(Buffer {
                bytes: bytes.next_multiple_of(alignment),
                live,
                roots: vec![out],
                offset: 0,
            });
        }
    }
    (buffers, shared)
}

/// The argument that the result of an element-wise op may lie over.
fn reused(plan: &Plan, i: usize, out: ValueId, lifetimes: &[(u32, u32)]) -> Option<ValueId> {
    let Instr::Local { op, args, .. } = &plan.instrs[i] else {
        return None;
    };
    if !element_wise(plan.str(*op)) {
        return None;
    }
    let result = &plan.values[out as usize];
    let values: Vec<ValueId> = plan.args[args.indices()]
        .iter()
        .filter_map(|arg| match arg {
            Arg::Value(v) => Some(*v),
            _ => None,
        })
        .collect();
    values.iter().copied().find(|v| {
        let value = &plan.values[*v as usize];
        let same = value.root == *v
            && value.offset == 0
            && value.dtype == result.dtype
            && value.storage_bytes == result.storage_bytes
            && plan.dims(value.shape) == plan.dims(result.shape)
            && plan.dims(value.strides) == plan.dims(result.strides);
        // No other argument may look at the same storage in another way.
        let others = values.iter().all(|o| o == v || root(plan, *o) != *v);
        same && others && lifetimes[*v as usize].1 == i as u32
    })
}

/// The most bytes that live at one time: no placement needs fewer.
fn most_at_once(buffers: &[Buffer], instrs: usize) -> u64 {
    let mut changes = vec![0_i128; instrs + 2];
    for buffer in buffers {
        changes[buffer.live.0 as usize] += i128::from(buffer.bytes);
        changes[buffer.live.1 as usize + 1] -= i128::from(buffer.bytes);
    }
    let (mut now, mut most) = (0, 0);
    for change in changes {
        now += change;
        most = most.max(now);
    }
    u64::try_from(most).unwrap_or(0)
}

/// Gives every buffer its offset.
fn place(buffers: &mut [Buffer]) {
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.sort_by_key(|at| (std::cmp::Reverse(buffers[*at].bytes), buffers[*at].live.0));
    let mut placed: Vec<usize> = Vec::with_capacity(order.len());
    let mut taken: Vec<(u64, u64)> = Vec::new();
    for at in order {
        let (bytes, live) = (buffers[at].bytes, buffers[at].live);
        taken.clear();
        let at_once = placed.iter().map(|other| &buffers[*other]);
        let at_once = at_once.filter(|o| o.live.0 <= live.1 && live.0 <= o.live.1);
        taken.extend(at_once.map(|o| (o.offset, o.offset + o.bytes)));
        taken.sort_unstable();
        let (mut best, mut end) = (None::<(u64, u64)>, 0);
        for (from, to) in &taken {
            let gap = from.saturating_sub(end);
            if gap >= bytes && best.is_none_or(|(smallest, _)| gap < smallest) {
                best = Some((gap, end));
            }
            end = end.max(*to);
        }
        buffers[at].offset = best.map_or(end, |(_, offset)| offset);
        placed.push(at);
    }
}
