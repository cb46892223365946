//! Bytes of a plan's results that are alive at each instruction.

use rote_plans::schedule::{GroupMemory, Ops};
use rote_plans::{CollectiveKind, Def, Instr, Plan, ValueId};

use super::budget::Buffer;
use super::effects::{for_each_written, outlives, root};
use super::gathers;
use crate::liveness::{for_each_out, for_each_value};

/// Instructions from the first to the last at which something is alive.
pub(super) type Life = (u32, u32);

/// For each root, the instruction that makes it and the last at which its
/// storage is needed. What a collective sends is needed until the wait for it,
/// and what it writes to the end if nobody waits. `copies`: a reduction to all and a
/// broadcast send what lies in their result, where the input is copied first.
pub(super) fn lives(plan: &Plan, copies: bool) -> Vec<Life> {
    let mut live = vec![(u32::MAX, 0); plan.values.len()];
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
    }
    // What nobody waits for may be in use until the end, and results are.
    let end = plan.instrs.len() as u32;
    for flight in flights(plan) {
        let (output, input) = (root(plan, flight.output), root(plan, flight.input));
        let of_copies = [CollectiveKind::AllReduce, CollectiveKind::Broadcast];
        let copied = copies && of_copies.contains(&flight.kind);
        let sent = &mut live[if copied { output } else { input } as usize].1;
        *sent = (*sent).max(flight.end);
        if flight.end == end {
            live[output as usize].1 = end;
        }
    }
    for (life, outlives) in live.iter_mut().zip(outlives(plan)) {
        if outlives {
            life.1 = end;
        }
    }
    live
}

/// Roots that instructions make.
pub(super) fn made(plan: &Plan) -> impl Iterator<Item = ValueId> {
    let values = plan.values.iter().zip(0..);
    values.filter_map(|(value, id)| {
        (value.root == id && matches!(value.def, Def::Instr(_))).then_some(id)
    })
}

/// For each collective, from its start to the wait, or to the end if nobody waits: bytes that its process group
/// allocates for itself.
pub(super) fn of_groups(plan: &Plan, ops: &dyn Ops) -> impl Iterator<Item = (Life, u64)> {
    flights(plan).into_iter().map(|flight| {
        let device = plan.values[flight.input as usize].device;
        let bytes = match ops.group_memory(flight.kind, device) {
            GroupMemory::None => 0,
            GroupMemory::OfInput => bytes(plan, flight.input),
            GroupMemory::OfOutput => bytes(plan, flight.output),
        };
        ((flight.start, flight.end), bytes)
    })
}

/// A collective from its start to the wait, or to the end of the plan if nobody waits.
pub(super) struct Flight {
    pub(super) start: u32,
    pub(super) end: u32,
    pub(super) kind: CollectiveKind,
    pub(super) input: ValueId,
    pub(super) output: ValueId,
}

/// All collectives, in the order in which they start.
pub(super) fn flights(plan: &Plan) -> Vec<Flight> {
    let mut found: Vec<Flight> = Vec::new();
    let mut under_way: Vec<usize> = Vec::new();
    for (i, instr) in plan.instrs.iter().enumerate() {
        match instr {
            Instr::Collective(c) => {
                under_way.push(found.len());
                found.push(Flight {
                    start: i as u32,
                    end: plan.instrs.len() as u32,
                    kind: c.kind,
                    input: c.input,
                    output: c.output,
                });
            }
            Instr::Wait { value } => under_way.retain(|&at| {
                let is_waited = root(plan, found[at].output) == root(plan, *value);
                if is_waited {
                    found[at].end = i as u32;
                }
                !is_waited
            }),
            _ => {}
        }
    }
    found
}

/// Bytes of a value's elements.
pub(super) fn bytes(plan: &Plan, value: ValueId) -> u64 {
    let value = &plan.values[value as usize];
    let numel: i64 = plan.dims(value.shape).iter().product();
    let width = value.dtype.bytes().unwrap_or(1);
    numel.unsigned_abs().saturating_mul(width)
}

/// Bytes at each instruction, and after the last.
#[derive(Clone, Debug)]
pub(super) struct Bytes(Vec<i64>);

impl Bytes {
    /// How many instructions there are.
    pub(super) fn instrs(&self) -> usize {
        self.0.len() - 1
    }

    /// Those of so many things: while each is alive, and how many.
    pub(super) fn of(instrs: usize, things: impl Iterator<Item = (Life, u64)>) -> Self {
        let mut bytes = vec![0; instrs + 2];
        for ((from, to), count) in things {
            let count = i64::try_from(count).unwrap_or(i64::MAX / 2);
            bytes[from as usize] += count;
            bytes[to as usize + 1] -= count;
        }
        bytes.pop();
        let mut now = 0;
        for at in &mut bytes {
            now += *at;
            *at = now;
        }
        Bytes(bytes)
    }

    /// Those of all results, each an allocation of its own. Where the backend gathers in
    /// place, the output of an all-gather and the memory that its input is a part of are one allocation if both have
    /// one place (see `gathers`).
    pub(super) fn of_results(plan: &Plan, ops: &dyn Ops) -> Self {
        let mut lives = lives(plan, true);
        if ops.gathers_in_place() {
            for (i, under, _) in gathers::in_place(plan) {
                lives[under as usize].1 = (i as u32).saturating_sub(1);
            }
        }
        // Between passes there are values of instructions that are gone.
        let made = made(plan).filter(|v| lives[*v as usize].0 != u32::MAX);
        let made = made.map(|v| (lives[v as usize], plan.values[v as usize].storage_bytes));
        Bytes::of(plan.instrs.len(), made)
    }

    /// Those of the buffers in the arena.
    pub(super) fn of_buffers(buffers: &[Buffer], instrs: usize) -> Self {
        let placed = buffers.iter().filter(|b| b.is_placed());
        Bytes::of(instrs, placed.map(|b| (b.live, b.bytes)))
    }

    /// Both together.
    pub(super) fn and(&self, other: &Bytes) -> Bytes {
        Bytes(
            (self.0.iter().zip(&other.0))
                .map(|(a, b)| a.saturating_add(*b))
                .collect(),
        )
    }

    /// Adds so many while something is alive.
    pub(super) fn add(&mut self, life: Life, bytes: u64) {
        self.change(life, i64::try_from(bytes).unwrap_or(i64::MAX / 2));
    }

    /// Takes away so many.
    pub(super) fn remove(&mut self, life: Life, bytes: u64) {
        self.change(life, -i64::try_from(bytes).unwrap_or(i64::MAX / 2));
    }

    fn change(&mut self, (from, to): Life, bytes: i64) {
        for at in &mut self.0[from as usize..=to as usize] {
            *at = at.saturating_add(bytes);
        }
    }

    /// How many there are at an instruction.
    pub(super) fn at(&self, instr: usize) -> u64 {
        u64::try_from(self.0[instr]).unwrap_or(0)
    }

    /// The most while something is alive.
    pub(super) fn most_in(&self, (from, to): Life) -> u64 {
        let most = self.0[from as usize..=to as usize].iter().max();
        most.map_or(0, |most| u64::try_from(*most).unwrap_or(0))
    }

    /// The most, and the first instruction at which it is reached.
    pub(super) fn most(&self) -> (u64, u32) {
        let most = self.0.iter().copied().max().unwrap_or(0);
        let at = self.0.iter().position(|bytes| *bytes == most).unwrap_or(0);
        (u64::try_from(most).unwrap_or(0), at as u32)
    }
}
