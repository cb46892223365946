//! How much memory the order leaves at each instruction, by the turn of the recorded order.

use rote_plans::Plan;
use rote_plans::schedule::Ops;

use crate::live::{Bytes, of_groups};

/// Bytes that are alive at each instruction, for their most over ranges of instructions.
pub(super) struct Room {
    /// What may be alive at once.
    allowed: i64,
    /// A segment tree over instructions. The nodes below node `n` are `2 * n` and `2 * n + 1`;
    /// node 1 holds all instructions.
    nodes: Vec<Node>,
    instrs: usize,
}

#[derive(Clone, Copy, Default)]
struct Node {
    /// Bytes that were added to all instructions below.
    added: i64,
    /// The most of them, with what was added to this node and below it.
    most: i64,
}

impl Room {
    /// `allowed`: bytes that may be alive at once, where the recorded order has fewer.
    pub(super) fn of(plan: &Plan, ops: &dyn Ops, allowed: u64) -> Self {
        let groups = Bytes::of(plan.instrs.len(), of_groups(plan, ops));
        let bytes = Bytes::of_results(plan, ops).and(&groups);
        let alive = (0..=bytes.instrs()).map(|at| signed(bytes.at(at)));
        Self::with(&alive.collect::<Vec<_>>(), signed(allowed))
    }

    fn with(alive: &[i64], allowed: i64) -> Self {
        let mut room = Room {
            allowed,
            nodes: vec![Node::default(); 2 * alive.len().next_power_of_two()],
            instrs: alive.len(),
        };
        let leaves = room.nodes.len() / 2;
        for (at, bytes) in alive.iter().enumerate() {
            room.nodes[leaves + at].most = *bytes;
        }
        for node in (1..leaves).rev() {
            room.nodes[node].most = room.below(node);
        }
        room
    }

    /// Whether so many bytes more may be alive at instructions from one to before another.
    pub(super) fn has(&self, from: usize, to: usize, bytes: u64) -> bool {
        let most = self.most_in(1, (0, self.nodes.len() / 2), (from, to.min(self.instrs)));
        most.saturating_add(signed(bytes)) <= self.allowed
    }

    /// Bytes that are alive at instructions from one to before another, beside those that are.
    pub(super) fn take(&mut self, from: usize, to: usize, bytes: u64) {
        self.add(from, to, signed(bytes));
    }

    /// Takes back what [`Room::take`] was told, from one instruction on.
    pub(super) fn give_back(&mut self, from: usize, bytes: u64) {
        self.add(from, self.instrs, -signed(bytes));
    }

    fn add(&mut self, from: usize, to: usize, bytes: i64) {
        if from < to && bytes != 0 {
            let all = (0, self.nodes.len() / 2);
            self.add_below(1, all, (from, to.min(self.instrs)), bytes);
        }
    }

    fn below(&self, node: usize) -> i64 {
        self.nodes[2 * node].most.max(self.nodes[2 * node + 1].most)
    }

    fn most_in(&self, node: usize, (low, high): (usize, usize), range: (usize, usize)) -> i64 {
        let (from, to) = range;
        if from >= high || to <= low {
            return 0;
        }
        if from <= low && high <= to {
            return self.nodes[node].most;
        }
        let middle = low.midpoint(high);
        let left = self.most_in(2 * node, (low, middle), range);
        let right = self.most_in(2 * node + 1, (middle, high), range);
        self.nodes[node].added.saturating_add(left.max(right))
    }

    fn add_below(
        &mut self,
        node: usize,
        (low, high): (usize, usize),
        range: (usize, usize),
        bytes: i64,
    ) {
        let (from, to) = range;
        if from >= high || to <= low {
            return;
        }
        if from <= low && high <= to {
            let all = &mut self.nodes[node];
            all.added = all.added.saturating_add(bytes);
            all.most = all.most.saturating_add(bytes);
            return;
        }
        let middle = low.midpoint(high);
        self.add_below(2 * node, (low, middle), range, bytes);
        self.add_below(2 * node + 1, (middle, high), range, bytes);
        self.nodes[node].most = self.below(node).saturating_add(self.nodes[node].added);
    }
}

fn signed(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_of_a_range_decides() {
        let mut alive = vec![5, 0, 7, 2, 2, 9, 1];
        let mut room = Room::with(&alive, 20);
        for (from, to, bytes) in [
            (0, 7, 0),
            (1, 3, 4),
            (2, 7, 2),
            (4, 5, 9),
            (0, 1, 3),
            (6, 7, 8),
        ] {
            room.take(from, to, bytes);
            for at in &mut alive[from..to] {
                *at += bytes as i64;
            }
            for from in 0..7 {
                for to in from + 1..=7 {
                    let left = 20 - *alive[from..to].iter().max().unwrap_or(&0) as u64;
                    assert!(room.has(from, to, left), "{from} {to}");
                    assert!(!room.has(from, to, left + 1), "{from} {to}");
                }
            }
        }
        room.give_back(3, 2);
        assert!(room.has(4, 5, 20 - 11) && !room.has(4, 5, 20 - 10) && room.has(2, 3, 20 - 13));
    }
}
