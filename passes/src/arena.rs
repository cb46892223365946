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
//! writes. Not so for complex numbers: where arguments have different strides,
//! compilers keep two loops, for operands that overlap and for others, which round
//! the sums of products at other places (`mul` and `div` in PyTorch 2.15 on x86-64).
//!
//! The output of an all-gather lies over the memory that its input is this rank's part of, as in eager (`gathers`).
//!
//! Offsets are found one after the other, each at the smallest gap that holds it
//! among those that live at the same time, in a few orders, of which the best
//! counts. Which results lie in the arena at all is for the `budget` module to
//! choose.

use hashbrown::HashMap;
use rote_plans::schedule::{DYNAMIC, Into, Ops};
use rote_plans::{Arg, CHECK_SHAPE, Def, Device, Instr, Marks, NONE, Plan, ValueId};

use super::budget::{Allocation, Budget, Buffer, Choice, Unit, choose};
use super::effects::{outlives, outs, root};
use super::gathers;
use super::live::{Bytes, Life, lives, made};
use super::{Done, Pass, Program, Stage, rounding};
use crate::ops::{ALLOCATORS, element_wise};

pub(super) const PASS: Pass = Pass {
    name: "arena",
    about: "write results at fixed places of one allocation",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Schedule,
    apply,
};

/// How often a smaller arena is tried where gaps between the buffers take what
/// was saved.
const ATTEMPTS: usize = 2;

fn apply(program: &mut Program, ops: &dyn Ops) -> Done {
    arrange(program, ops, &[])
}

/// Gives results their places in the arena. `allocated`: as in [`Program::arrange`],
/// empty if no run was seen.
pub(super) fn arrange(program: &mut Program, ops: &dyn Ops, allocated: &[u64]) -> Done {
    let plan = &program.plan;
    let (roots, device) = candidates(plan, ops, &program.schedule.once);
    let alignment = device.map_or(1, |device| ops.alignment(device));
    let gathered = match ops.gathers_in_place() {
        true => gathers::in_place(plan),
        false => Vec::new(),
    };
    let gathered = gathered
        .into_iter()
        .map(|(_, under, output)| (output, under))
        .collect();
    let lives = lives(plan, ops.copies_inputs());
    let memory = Memory::of(program, ops, &roots, allocated);
    let arranged = |over: bool| {
        let (buffers, shared) = buffers(plan, &roots, &gathered, &lives, alignment, over);
        let (placed, beside) = place_within(&buffers, &units(plan, ops, &buffers), &memory);
        let most = end(&placed) + beside.most().0 + memory.kept;
        (most, placed, beside, buffers.len(), shared)
    };
    let mut best = arranged(true);
    // What lies over an argument leaves the arena only with it.
    if best.0 > memory.budget + rounding(memory.budget) {
        let apart = arranged(false);
        best = if apart.0 < best.0 { apart } else { best };
    }
    let (most, placed, beside, all, shared) = best;

    let bound = Bytes::of_buffers(&placed, plan.instrs.len()).most().0;
    let arena_bytes = end(&placed);
    let schedule = &mut program.schedule;
    schedule.offsets = vec![DYNAMIC; plan.values.len()];
    for buffer in &placed {
        for root in &buffer.roots {
            schedule.offsets[*root as usize] = buffer.offset;
        }
    }
    schedule.arena_bytes = arena_bytes;
    schedule.arena_device = device;
    schedule.into.clear();
    for (i, instr) in plan.instrs.iter().enumerate() {
        let placed = (outs(plan, instr).iter()).any(|v| schedule.offset(*v).is_some());
        if let (Instr::Local { op, overload, .. }, true) = (instr, placed) {
            if let Some(how) = into(ops, plan.str(*op), plan.str(*overload)) {
                schedule.into.push((i as u32, how));
            }
        }
    }
    let (ops, left) = (schedule.into.len(), all - placed.len());
    let (beside, kept, recorded) = (beside.most().0, memory.kept, memory.budget);
    Done {
        changed: ops,
        what: format!(
            "{ops} ops write to an arena of {arena_bytes} bytes ({bound} live at once); {shared} over an argument; \
             {left} buffers left out; with {beside} beside it and {kept} kept {most}, as recorded {recorded}"
        ),
    }
}

/// What a run needs beside the arena, and may need.
struct Memory {
    /// What is not for the arena to hold.
    beside: Bytes,
    /// What is kept between runs: results of what only the first run executes, and
    /// numbers that ops take as tensors.
    kept: u64,
    budget: u64,
}

impl Memory {
    fn of(program: &Program, ops: &dyn Ops, roots: &[bool], allocated: &[u64]) -> Self {
        let plan = &program.plan;
        let all = Bytes::of_results(plan, ops);
        let (most, recorded) = (all.most().0, program.recorded);
        let lives = lives(plan, ops.copies_inputs());
        let mut beside: Vec<(Life, u64)> = Vec::new();
        let mut kept = 8 * wrapped_numbers(plan);
        for root in made(plan) {
            let value = &plan.values[root as usize];
            match value.def {
                Def::Instr(i) if program.schedule.once(i as usize) => kept += value.storage_bytes,
                _ if roots[root as usize] => {}
                _ => beside.push((lives[root as usize], value.storage_bytes)),
            }
        }
        // What an op allocates for itself while it runs.
        let mut seen = 0;
        for (i, (instr, allocated)) in plan.instrs.iter().zip(allocated).enumerate() {
            let made = outs(plan, instr)
                .into_iter()
                .filter(|v| root(plan, *v) == *v);
            let made: u64 = made.map(|v| plan.values[v as usize].storage_bytes).sum();
            let own = allocated.saturating_sub(made);
            beside.push(((i as u32, i as u32), own));
            seen = seen.max(all.at(i) + own);
        }
        let beside = Bytes::of(plan.instrs.len(), beside.into_iter());
        // The recorded plan needed what was seen, less what passes have added.
        let budget = recorded.max(seen.saturating_sub(most.saturating_sub(recorded)));
        Memory {
            beside,
            kept,
            budget,
        }
    }
}

/// How many numbers ops take as tensors.
fn wrapped_numbers(plan: &Plan) -> u64 {
    let args = plan.instrs.iter().filter_map(|instr| match instr {
        Instr::Local { args, .. } => Some(&plan.args[args.indices()]),
        _ => None,
    });
    args.flatten()
        .filter(|arg| matches!(arg, Arg::Wrapped(_)))
        .count() as u64
}

/// Chooses buffers that keep the budget, and gives them their offsets. Where none
/// keep it, those that exceed it by the least that is found; what is beside them
/// is the second result.
fn place_within(buffers: &[Buffer], units: &[Unit], memory: &Memory) -> (Vec<Buffer>, Bytes) {
    let all = Bytes::of_buffers(buffers, memory.beside.instrs());
    let least = all.and(&memory.beside).most().0 + memory.kept;
    let rounding = rounding(memory.budget);
    let mut most = least.max(memory.budget + rounding);
    loop {
        let budget = Budget {
            bytes: most,
            kept: memory.kept,
            step: rounding / 2,
        };
        let room = most.saturating_sub(memory.kept);
        let mut ceiling = u64::MAX;
        for _ in 0..ATTEMPTS {
            let Some(Choice { out, beside }) =
                choose(buffers, units, &memory.beside, budget, ceiling)
            else {
                break;
            };
            let mut placed = buffers.to_vec();
            for buffer in out.iter().flat_map(|unit| &units[*unit].buffers) {
                placed[*buffer].roots.clear();
            }
            let mut least = u64::MAX;
            let mut best: Option<(usize, Vec<Buffer>, Bytes)> = None;
            for order in ORDERS {
                let mut placed = placed.clone();
                place(&mut placed, order);
                least = least.min(end(&placed));
                let Some((lowered, beside)) = lower(&mut placed, units, beside.clone(), room)
                else {
                    continue;
                };
                if best.as_ref().is_none_or(|(fewest, ..)| lowered < *fewest) {
                    best = Some((lowered, placed, beside));
                }
                if lowered == 0 {
                    break;
                }
            }
            if let Some((_, mut placed, beside)) = best {
                placed.retain(Buffer::is_placed);
                return (placed, beside);
            }
            let over = (least + beside.most().0).saturating_sub(room);
            let size = Bytes::of_buffers(&placed, memory.beside.instrs()).most().0;
            ceiling = size.saturating_sub(over);
        }
        most += rounding.max((most - memory.budget) / 2);
    }
}

/// Takes those out of the arena that lie so high that it is larger than there is
/// room for, if they fit beside it: gaps between the others may have put them there.
/// Returns how many units these were, and what is beside the arena then.
fn lower(
    placed: &mut [Buffer],
    units: &[Unit],
    mut beside: Bytes,
    room: u64,
) -> Option<(usize, Bytes)> {
    let mut lowered = 0;
    loop {
        let size = room.checked_sub(beside.most().0)?;
        let top = |unit: &Unit| {
            unit.buffers
                .iter()
                .map(|b| placed[*b].end())
                .max()
                .unwrap_or(0)
        };
        let (high, low): (Vec<&Unit>, Vec<&Unit>) = units.iter().partition(|unit| top(unit) > size);
        if high.is_empty() {
            return Some((lowered, beside));
        }
        let rest = room - low.into_iter().map(top).max().unwrap_or(0);
        for unit in high {
            if !unit.fits(&beside, rest) {
                return None;
            }
            unit.leave(&mut beside);
            unit.buffers.iter().for_each(|b| placed[*b].roots.clear());
            lowered += 1;
        }
    }
}

/// Which values are roots that can lie in the arena, and on which device.
fn candidates(plan: &Plan, ops: &dyn Ops, once: &[bool]) -> (Vec<bool>, Option<Device>) {
    let outlives = outlives(plan);
    let mut device = None;
    let mut chosen = vec![false; plan.values.len()];
    let varying = varying(plan);
    for (i, instr) in plan.instrs.iter().enumerate() {
        if once.get(i) == Some(&true) {
            continue;
        }
        let made = match instr {
            Instr::Local {
                op, overload, outs, ..
            } => {
                let how = into(ops, plan.str(*op), plan.str(*overload));
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
                && !varying[*v as usize]
                && value.device == first
                && value.offset == 0
                && value.marks == Marks::NONE
                && dense(plan, *v)
        });
        if fits && *device.get_or_insert(first) == first {
            made.into_iter().for_each(|v| chosen[v as usize] = true);
        }
    }
    (chosen, device)
}

/// For each value that is a root, whether its shape depends on data: it may be larger than in the plan.
fn varying(plan: &Plan) -> Vec<bool> {
    let mut roots = vec![false; plan.values.len()];
    for instr in &plan.instrs {
        let Instr::Local { op, args, .. } = instr else {
            continue;
        };
        if let (CHECK_SHAPE, Some(Arg::Value(value))) =
            (plan.str(*op), plan.args[args.indices()].first())
        {
            roots[plan.values[*value as usize].root as usize] = true;
        }
    }
    roots
}

/// How an op writes its results where it is told to, if it can.
fn into(ops: &dyn Ops, op: &str, overload: &str) -> Option<Into> {
    match ALLOCATORS.contains(&op) {
        true => Some(Into::Nothing),
        false => ops.writes_into(op, overload),
    }
}

/// Whether a value's elements fill its storage.
fn dense(plan: &Plan, value: ValueId) -> bool {
    let value = &plan.values[value as usize];
    let numel: i64 = plan.dims(value.shape).iter().product();
    let bytes = value.dtype.bytes().unwrap_or(0) * numel.unsigned_abs();
    bytes > 0 && bytes == value.storage_bytes
}

/// One buffer per root, or for several where one lies over another; and how many
/// do. `over`: whether results of element-wise ops may lie over arguments.
fn buffers(
    plan: &Plan,
    roots: &[bool],
    gathered: &HashMap<ValueId, ValueId>,
    lives: &[Life],
    alignment: u64,
    over: bool,
) -> (Vec<Buffer>, usize) {
    let mut buffers: Vec<Buffer> = Vec::new();
    let mut of: Vec<Option<usize>> = vec![None; plan.values.len()];
    let mut shared = 0;
    for (i, instr) in plan.instrs.iter().enumerate() {
        for out in outs(plan, instr) {
            if !roots[out as usize] {
                continue;
            }
            let live = lives[out as usize];
            let under = gathered.get(&out).copied();
            let under = under.or_else(|| {
                if over {
                    reused(plan, i, out, lives)
                } else {
                    None
                }
            });
            let under = under.and_then(|v| of[v as usize]);
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

/// Buffers by what can leave the arena together: all results of an op lie in it or
/// none.
fn units(plan: &Plan, ops: &dyn Ops, buffers: &[Buffer]) -> Vec<Unit> {
    let mut of: Vec<Option<usize>> = vec![None; plan.values.len()];
    for (i, buffer) in buffers.iter().enumerate() {
        buffer
            .roots
            .iter()
            .for_each(|root| of[*root as usize] = Some(i));
    }
    let mut unit: Vec<usize> = (0..buffers.len()).collect();
    for instr in &plan.instrs {
        let together: Vec<usize> = (outs(plan, instr).iter())
            .filter_map(|v| of[*v as usize])
            .collect();
        for (a, b) in together.iter().zip(together.iter().skip(1)) {
            let (a, b) = (unit[*a], unit[*b]);
            if a != b {
                unit.iter_mut().filter(|u| **u == b).for_each(|u| *u = a);
            }
        }
    }
    let lives = lives(plan, ops.copies_inputs());
    let mut units: Vec<Unit> = vec![
        Unit {
            buffers: Vec::new(),
            allocations: Vec::new()
        };
        buffers.len()
    ];
    for (i, buffer) in buffers.iter().enumerate() {
        let unit = &mut units[unit[i]];
        unit.buffers.push(i);
        unit.allocations
            .extend(buffer.roots.iter().map(|root| Allocation {
                bytes: plan.values[*root as usize].storage_bytes,
                live: lives[*root as usize],
            }));
    }
    units.retain(|unit| !unit.buffers.is_empty());
    units
}

/// The argument that the result of an element-wise op may lie over.
fn reused(plan: &Plan, i: usize, out: ValueId, lives: &[Life]) -> Option<ValueId> {
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
        let same = (value.root, value.offset) == (*v, 0)
            && !value.dtype.is_complex()
            && value.storage_bytes == result.storage_bytes
            && plan.meta(*v) == plan.meta(out);
        // No other argument may look at the same storage in another way.
        let others = values.iter().all(|o| o == v || root(plan, *o) != *v);
        same && others && lives[*v as usize].1 == i as u32
    })
}

/// Where the last buffer ends.
fn end(buffers: &[Buffer]) -> u64 {
    buffers.iter().map(Buffer::end).max().unwrap_or(0)
}

/// In which order buffers get their offsets.
#[derive(Clone, Copy)]
enum Order {
    /// The largest first, and of equals the first made.
    Size,
    /// The largest first, and of equals the longest alive.
    SizeThenLife,
    /// First those alive at the arena's fullest moment, in the order in which they
    /// are made, then the others, outwards from it.
    FromFullest,
}

const ORDERS: [Order; 3] = [Order::Size, Order::SizeThenLife, Order::FromFullest];

impl Order {
    fn key(self, buffer: &Buffer, fullest: u32) -> (u64, u32) {
        let (from, to) = buffer.live;
        match self {
            Order::Size => (u64::MAX - buffer.bytes, from),
            Order::SizeThenLife => (u64::MAX - buffer.bytes, u32::MAX - (to - from)),
            Order::FromFullest if from <= fullest && fullest <= to => (0, from),
            Order::FromFullest => (
                u64::from(from.abs_diff(fullest).min(to.abs_diff(fullest))),
                from,
            ),
        }
    }
}

/// Gives every buffer its offset, one after the other: the smallest gap that holds
/// it among those that live at the same time.
fn place(buffers: &mut [Buffer], order_by: Order) {
    let instrs = buffers.iter().map(|b| b.live.1 as usize).max().unwrap_or(0);
    let fullest = Bytes::of_buffers(buffers, instrs).most().1;
    let mut order: Vec<usize> = (0..buffers.len()).collect();
    order.retain(|at| buffers[*at].is_placed());
    order.sort_by_key(|at| order_by.key(&buffers[*at], fullest));
    // What has a place: first and last instruction, first and last byte; by offset.
    let mut placed: Vec<(Life, u64, u64)> = Vec::with_capacity(order.len());
    for at in order {
        let (bytes, live) = (buffers[at].bytes, buffers[at].live);
        let (mut best, mut end) = (None::<(u64, u64)>, 0);
        for (other, from, to) in &placed {
            if other.0 > live.1 || live.0 > other.1 {
                continue;
            }
            let gap = from.saturating_sub(end);
            if gap >= bytes && best.is_none_or(|(smallest, _)| gap < smallest) {
                best = Some((gap, end));
            }
            end = end.max(*to);
        }
        let offset = best.map_or(end, |(_, offset)| offset);
        buffers[at].offset = offset;
        let before = placed.partition_point(|(_, from, _)| *from <= offset);
        placed.insert(before, (live, offset, offset + bytes));
    }
}
