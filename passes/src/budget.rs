//! Which results lie in the arena, so that a run needs no more memory than the
//! plan as it was recorded.
//!
//! The arena is there for the whole run, at the size of its fullest moment.
//! Results of ops that cannot write to it come and go beside it, and what such
//! ops need while they run; when that happens at another moment, arena and rest
//! together are more than what ever was alive at once. Then buffers leave the
//! arena and are allocated when they are made, as eager does it: the fewest that
//! are found, taken from the arena's fullest moments, if they fit beside the rest
//! while they live.

use rote_plans::ValueId;

use super::live::{Bytes, Life};

/// A run of bytes of the arena, for a while.
#[derive(Clone, Debug)]
pub(super) struct Buffer {
    pub(super) bytes: u64,
    /// The instruction that makes it, and the last that looks at it.
    pub(super) live: Life,
    /// What lies in it, one after the other. None: it is not in the arena.
    pub(super) roots: Vec<ValueId>,
    pub(super) offset: u64,
}

impl Buffer {
    /// Whether it is in the arena.
    pub(super) fn is_placed(&self) -> bool {
        !self.roots.is_empty()
    }

    /// Where it ends in the arena, 0 if it is not there.
    pub(super) fn end(&self) -> u64 {
        if self.is_placed() {
            self.offset + self.bytes
        } else {
            0
        }
    }
}

/// A result that is allocated when it is made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Allocation {
    pub(super) bytes: u64,
    pub(super) live: Life,
}

/// Buffers that are in the arena together or not at all, because one op writes
/// to all of them, and what they are as allocations.
#[derive(Clone, Debug)]
pub(super) struct Unit {
    pub(super) buffers: Vec<usize>,
    pub(super) allocations: Vec<Allocation>,
}

impl Unit {
    /// Whether there are no more than `rest` bytes beside the arena while this is
    /// there too.
    pub(super) fn fits(&self, beside: &Bytes, rest: u64) -> bool {
        if let [made] = self.allocations.as_slice() {
            return beside.most_in(made.live) + made.bytes <= rest;
        }
        let mut with = beside.clone();
        self.leave(&mut with);
        (self.allocations.iter()).all(|made| with.most_in(made.live) <= rest)
    }

    /// Leaves the arena for what is beside it.
    pub(super) fn leave(&self, beside: &mut Bytes) {
        for made in &self.allocations {
            beside.add(made.live, made.bytes);
        }
    }
}

/// What is known of a run's memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Budget {
    /// The most bytes that a run may need.
    pub(super) bytes: u64,
    /// Bytes that are kept between runs beside the arena.
    pub(super) kept: u64,
    /// By how much sizes of the arena that are tried differ, close to the largest.
    pub(super) step: u64,
}

/// What leaves the arena, and what is then beside it.
#[derive(Clone, Debug)]
pub(super) struct Choice {
    /// Units that are not in the arena.
    pub(super) out: Vec<usize>,
    /// Bytes beside the arena.
    pub(super) beside: Bytes,
}

/// How many sizes of the arena are tried close to the largest, and how many below.
const CLOSE: u64 = 48;
const FAR: u64 = 24;

/// The choice with the largest arena of at most `ceiling` bytes that is found to
/// keep the budget. `beside`: what is not for the arena to hold.
pub(super) fn choose(
    buffers: &[Buffer],
    units: &[Unit],
    beside: &Bytes,
    budget: Budget,
    ceiling: u64,
) -> Option<Choice> {
    let arena = Bytes::of_buffers(buffers, beside.instrs());
    let room = budget.bytes.checked_sub(budget.kept)?;
    if arena.and(beside).most().0 > room {
        return None;
    }
    let most = room.checked_sub(beside.most().0)?.min(ceiling);
    let fewest = arena.most().0.min(most);
    let close = (0..CLOSE).map(|i| budget.step * i);
    let far = (1..=FAR).map(|i| fewest / FAR * i);
    let smaller = close.chain(far).filter(|less| *less <= fewest);
    (smaller.chain([fewest]).map(|less| fewest - less))
        .find_map(|size| within(buffers, units, &arena, beside, size, room - size))
}

/// Leaves units out until the arena needs no more than `size` bytes, while there
/// are no more than `rest` beside it.
fn within(
    buffers: &[Buffer],
    units: &[Unit],
    arena: &Bytes,
    beside: &Bytes,
    size: u64,
    rest: u64,
) -> Option<Choice> {
    let (mut arena, mut beside) = (arena.clone(), beside.clone());
    let mut out = Vec::new();
    // What does not fit beside the arena does not later: more is there then.
    let mut movable = vec![true; units.len()];
    let mut alive: Vec<(u64, usize, usize)> = Vec::new();
    loop {
        let (most, at) = arena.most();
        if most <= size {
            return Some(Choice { out, beside });
        }
        let excess = most - size;
        // Of those alive then the smallest that is enough, else the largest; of
        // equals, the one with the fewest allocations.
        alive.clear();
        for (i, unit) in units.iter().enumerate().filter(|(i, _)| movable[*i]) {
            let alive_then = unit.buffers.iter().map(|b| &buffers[*b]);
            let alive_then = alive_then.filter(|b| b.live.0 <= at && at <= b.live.1);
            let bytes: u64 = alive_then.map(|b| b.bytes).sum();
            if bytes > 0 {
                let short = bytes < excess;
                let key = if short { u64::MAX - bytes } else { bytes };
                alive.push((key, unit.allocations.len(), i));
            }
        }
        alive.sort_unstable();
        let mut fits = |(_, _, unit): &(u64, usize, usize)| {
            let fits = units[*unit].fits(&beside, rest);
            movable[*unit] = false; // it leaves, or never will
            fits
        };
        let (_, _, unit) = *alive.iter().find(|unit| fits(unit))?;
        out.push(unit);
        for buffer in &units[unit].buffers {
            arena.remove(buffers[*buffer].live, buffers[*buffer].bytes);
        }
        units[unit].leave(&mut beside);
    }
}
