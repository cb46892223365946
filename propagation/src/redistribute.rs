//! Redistribution: the cheapest sequence of one-mesh-dim operations between two
//! specs.
//!
//! A state is one placement per mesh dim. Placements apply from left to right,
//! so of several mesh dims that split one tensor dim only the rightmost can be
//! gathered or split further, except for a strided shard whose blocks are
//! exactly the shards to its right: that one is the innermost piece of the data
//! and goes first. Search is by Dijkstra's algorithm, costs then order of
//! discovery deciding, so every rank finds the same sequence.

use std::cmp::Ordering;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use super::cost::{ALL_TO_ALL_US, Kind, Order, Topology};
use super::layout::smallest;
use super::placement::Placement;
use super::spec::{MAX_MESH_DIMS, TensorMeta};

/// One operation of a redistribution.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Step {
    /// Which.
    pub kind: Kind,
    /// On which mesh dim.
    pub mesh_dim: usize,
    /// The placement of that mesh dim before.
    pub from: Placement,
    /// The placement of that mesh dim after.
    pub to: Placement,
    /// Bytes that a rank sends, padding included.
    pub bytes: u64,
    /// Of these, bytes that only even out shards of different sizes, on the rank
    /// that holds the least.
    pub padding: u64,
    /// Estimated time.
    pub cost_us: f64,
}

impl Step {
    /// Making a partial of a replicated mesh dim.
    pub(super) fn partition(mesh_dim: usize, to: Placement) -> Self {
        Step {
            kind: Kind::Partition,
            mesh_dim,
            from: Placement::Replicate,
            to,
            bytes: 0,
            padding: 0,
            cost_us: 0.0,
        }
    }
}

/// A placement per mesh dim, as indices into a table of placements.
pub(super) type State = [u8; MAX_MESH_DIMS];

/// How many states a search may finish.
const MAX_STATES: usize = 20_000;

#[derive(Clone, Copy)]
struct Node {
    cost: f64,
    before: State,
    done: bool,
}

#[derive(Clone, Copy, PartialEq)]
struct Entry {
    cost: f64,
    steps: u32,
    number: u32,
    state: State,
}

impl Eq for Entry {}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> Ordering {
        // The heap gives out its greatest.
        (other.cost.total_cmp(&self.cost))
            .then(other.steps.cmp(&self.steps))
            .then(other.number.cmp(&self.number))
    }
}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The specs that a tensor can be brought into, cheapest first.
pub(super) struct Reach<'a> {
    sizes: &'a [u32],
    topology: &'a Topology,
    meta: &'a TensorMeta,
    table: &'a [Placement],
    allowed: Vec<u8>,
    source: State,
    partitions: bool,
    nodes: HashMap<State, Node>,
    heap: BinaryHeap<Entry>,
    /// States that DTensor may reach at a higher cost than those still in `heap`.
    waiting: BinaryHeap<Entry>,
    number: u32,
    finished: usize,
}

impl<'a> Reach<'a> {
    /// From `source`, through and to the placements `allowed`, which are
    /// indices into `table`; index 0 must be [`Placement::Replicate`].
    pub(super) fn new(
        sizes: &'a [u32],
        topology: &'a Topology,
        meta: &'a TensorMeta,
        table: &'a [Placement],
        allowed: Vec<u8>,
        source: State,
    ) -> Self {
        let node = Node {
            cost: 0.0,
            before: source,
            done: false,
        };
        let entry = Entry {
            cost: 0.0,
            steps: 0,
            number: 0,
            state: source,
        };
        Reach {
            sizes,
            topology,
            meta,
            table,
            allowed,
            source,
            partitions: true,
            nodes: HashMap::from_iter([(source, node)]),
            heap: BinaryHeap::from(vec![entry]),
            waiting: BinaryHeap::new(),
            number: 1,
            finished: 0,
        }
    }

    /// Leaves out making partials of replicated mesh dims, which is free at any
    /// time and makes nothing else cheaper.
    pub(super) fn without_partitions(mut self) -> Self {
        self.partitions = false;
        self
    }

    /// The cost that no state which [`Reach::next`] has yet to give is below, or
    /// infinity if there is none.
    pub(super) fn next_cost(&mut self) -> f64 {
        let waiting = self.waiting.peek().map_or(f64::INFINITY, |e| e.cost);
        waiting.min(self.next_cheapest_cost())
    }

    /// The next state in order of cost, and its cost.
    pub(super) fn next(&mut self) -> Option<(State, f64)> {
        if self.topology.order() == Order::Cheapest {
            return self.next_cheapest();
        }
        loop {
            let least = self.next_cheapest_cost();
            let first = self.waiting.peek().filter(|entry| entry.cost <= least);
            if first.is_some() || least.is_infinite() {
                return self.waiting.pop().map(|entry| (entry.state, entry.cost));
            }
            let (state, cost) = self.next_cheapest()?;
            self.waiting.push(Entry {
                cost: self.dtensors_cost(&state).unwrap_or(cost),
                steps: 0,
                number: self.finished as u32,
                state,
            });
        }
    }

    fn next_cheapest_cost(&mut self) -> f64 {
        while let Some(entry) = self.heap.peek() {
            if !self.nodes[&entry.state].done {
                return entry.cost;
            }
            self.heap.pop();
        }
        f64::INFINITY
    }

    fn next_cheapest(&mut self) -> Option<(State, f64)> {
        while let Some(entry) = self.heap.pop() {
            let node = self.nodes.get_mut(&entry.state)?;
            if std::mem::replace(&mut node.done, true) {
                continue;
            }
            self.finished += 1;
            if self.finished > MAX_STATES {
                self.heap.clear();
                return None;
            }
            self.expand(&entry);
            return Some((entry.state, entry.cost));
        }
        None
    }

    fn expand(&mut self, entry: &Entry) {
        let state = entry.state;
        let mut shards = 1_u64;
        for (m, n) in self.sizes.iter().enumerate() {
            if self.placement(&state, m).sharded().is_some() {
                shards *= u64::from(*n);
            }
        }
        let local = self.meta.bytes() as f64 / shards as f64;
        // Tensor dims that mesh dims to the right split, as bits.
        let mut right = 0_u64;
        for m in (0..self.sizes.len()).rev() {
            let from = self.placement(&state, m);
            if self.sizes[m] > 1 || from != Placement::Replicate {
                self.leave(entry, m, from, right, local);
            }
            if let Some((dim, _)) = from.sharded() {
                right |= 1 << dim;
            }
        }
    }

    /// The cost of bringing one mesh dim of a state into a placement, if one
    /// operation does.
    pub(super) fn change(&self, state: &State, m: usize, code: u8) -> Option<f64> {
        let (from, to) = (self.placement(state, m), self.table[usize::from(code)]);
        let kind = transition(from, to)?;
        if kind == Kind::Partition && self.source[m] != 0 {
            return None;
        }
        let (mut right, mut shards) = (0_u64, 1.0);
        for (l, n) in self.sizes.iter().enumerate() {
            if let Some((dim, _)) = self.placement(state, l).sharded() {
                shards *= f64::from(*n);
                if l > m {
                    right |= 1 << dim;
                }
            }
        }
        if from.sharded().is_some() && !self.innermost(state, m, from, right)
            || to.sharded().is_some() && !self.splits(state, m, to, right)
        {
            return None;
        }
        let local = self.meta.bytes() as f64 / shards;
        Some(self.price(kind, m, to, local))
    }

    /// Whether a mesh dim left of `m` has yet to split the same tensor dim, or to
    /// gather it.
    pub(super) fn waits(&self, now: &State, target: &State, m: usize) -> bool {
        let dim = |state: &State, l: usize| self.placement(state, l).sharded().map(|s| s.0);
        let own = dim(target, m);
        let moves = |l: usize| now[l] != target[l];
        own.is_some() && (0..m).any(|l| moves(l) && [dim(now, l), dim(target, l)].contains(&own))
    }

    pub(super) fn order(&self) -> Order {
        self.topology.order()
    }

    /// The tensor dim that a mesh dim shards.
    pub(super) fn shard_dim(&self, state: &State, m: usize) -> Option<u32> {
        self.placement(state, m).sharded().map(|(dim, _)| dim)
    }

    /// Into how many shards a tensor is split.
    pub(super) fn shards(&self, state: &State) -> u64 {
        let split = |m: &usize| self.shard_dim(state, *m).is_some();
        (0..self.sizes.len())
            .filter(split)
            .map(|m| u64::from(self.sizes[m]))
            .product()
    }

    /// Whether a shard is not a plain one.
    pub(super) fn is_strided(&self, state: &State) -> bool {
        (0..self.sizes.len()).any(|m| {
            let placement = self.placement(state, m);
            placement.sharded().is_some() && !matches!(placement, Placement::Shard { .. })
        })
    }

    pub(super) fn source(&self) -> State {
        self.source
    }

    pub(super) fn mesh_dims(&self) -> usize {
        self.sizes.len()
    }

    /// How many states were given out.
    pub(super) fn finished(&self) -> usize {
        self.finished
    }

    fn leave(&mut self, entry: &Entry, m: usize, from: Placement, right: u64, local: f64) {
        let state = &entry.state;
        if from.sharded().is_some() && !self.innermost(state, m, from, right) {
            return;
        }
        for at in 0..self.allowed.len() {
            let code = self.allowed[at];
            let to = self.table[usize::from(code)];
            let Some(kind) = transition(from, to) else {
                continue;
            };
            if kind == Kind::Partition && (self.source[m] != 0 || !self.partitions) {
                // What was a shard or another partial has no way there.
                continue;
            }
            if to.sharded().is_some() && !self.splits(state, m, to, right) {
                continue;
            }
            let cost = entry.cost + self.price(kind, m, to, local);
            let mut next = *state;
            next[m] = code;
            let known = self.nodes.get(&next);
            if known.is_some_and(|k| k.done || k.cost <= cost) {
                continue;
            }
            let node = Node {
                cost,
                before: *state,
                done: false,
            };
            self.nodes.insert(next, node);
            self.heap.push(Entry {
                cost,
                steps: entry.steps + 1,
                number: self.number,
                state: next,
            });
            self.number += 1;
        }
    }

    /// Microseconds of one operation.
    fn price(&self, kind: Kind, m: usize, to: Placement, local: f64) -> f64 {
        let source = self.table[usize::from(self.source[m])];
        let us = self.topology.us(kind, m, self.sizes[m], local);
        if kind == Kind::Chunk && source.sharded().is_some() && source != to {
            // A gather and a chunk in place of an all-to-all save nothing.
            us + ALL_TO_ALL_US
        } else {
            us
        }
    }

    fn placement(&self, state: &State, m: usize) -> Placement {
        self.table[usize::from(state[m])]
    }

    /// Whether the shard of mesh dim `m` is the last split of its tensor dim.
    fn innermost(&self, state: &State, m: usize, shard: Placement, right: u64) -> bool {
        let Some((dim, blocks)) = shard.sharded() else {
            return false;
        };
        if right & (1 << dim) == 0 {
            return true;
        }
        let mut product = 1_u64;
        for later in m + 1..self.sizes.len() {
            match self.placement(state, later).sharded() {
                Some((d, _)) if d == dim && self.placement(state, later).registered().is_some() => {
                    return false;
                }
                Some((d, 1)) if d == dim => product *= u64::from(self.sizes[later]),
                Some((d, _)) if d == dim => return false,
                _ => {}
            }
        }
        let pieces = product.saturating_mul(u64::from(self.sizes[m]));
        // Left of `m` too, or the blocks would not be those of the whole dim.
        let whole = (0..m).all(|l| {
            self.placement(state, l)
                .sharded()
                .is_none_or(|s| s.0 != dim)
        });
        product == u64::from(blocks) && whole && self.meta.shape[dim as usize] % pieces == 0
    }

    /// Whether mesh dim `m` may split what it holds into `shard`.
    fn splits(&self, state: &State, m: usize, shard: Placement, right: u64) -> bool {
        let Some((dim, _)) = shard.sharded() else {
            return false;
        };
        let after = |l| {
            if l == m {
                shard
            } else {
                self.placement(state, l)
            }
        };
        fits(&self.meta.shape, dim, self.sizes, after)
            && (right & (1 << dim) == 0 || self.innermost(state, m, shard, right))
    }

    /// The operations that lead to a state that was given out.
    pub(super) fn steps(&self, mut state: State) -> Vec<Step> {
        if let Some((steps, _)) = self.dtensors_way(&state) {
            return steps;
        }
        let mut steps = Vec::new();
        while let Some(node) = self.nodes.get(&state) {
            if node.before == state {
                break;
            }
            if let Some(step) = self.step(node.before, state) {
                steps.push(step);
            }
            state = node.before;
        }
        steps.reverse();
        steps
    }

    pub(super) fn step(&self, before: State, after: State) -> Option<Step> {
        let m = (0..self.sizes.len()).find(|m| before[*m] != after[*m])?;
        let (from, to) = (self.placement(&before, m), self.placement(&after, m));
        let kind = transition(from, to)?;
        let ranks = u64::from(self.sizes[m]);
        // Collectives take pieces of one size: that of the first rank.
        let large = self.largest(&before);
        let put_in = match kind {
            Kind::ReduceScatter | Kind::AllToAll => {
                self.split_piece(&before, m, to).saturating_mul(ranks)
            }
            _ => large,
        };
        let sent = kind.sent(put_in, self.sizes[m]);
        let exact = match kind {
            Kind::AllGather => kind.sent(self.least(&before), self.sizes[m]),
            Kind::ReduceScatter | Kind::AllToAll => sent.min(large - large.div_ceil(ranks)),
            _ => sent,
        };
        let mut shards = 1.0;
        for (l, n) in self.sizes.iter().enumerate() {
            if self.placement(&before, l).sharded().is_some() {
                shards *= f64::from(*n);
            }
        }
        Some(Step {
            kind,
            mesh_dim: m,
            from,
            to,
            bytes: sent,
            padding: sent.saturating_sub(exact),
            cost_us: self.price(kind, m, to, self.meta.bytes() as f64 / shards),
        })
    }

    /// Bytes of the first rank, which holds the most.
    fn largest(&self, state: &State) -> u64 {
        self.local(|dim, size| {
            let mut left = size;
            for (m, n) in self.sizes.iter().enumerate() {
                let placement = self.placement(state, m);
                if let Some((d, blocks)) = placement.sharded() {
                    if d as usize == dim {
                        if let Some(sharding) = placement.registered() {
                            left = sharding.extent(left, u64::from(*n)).1;
                            continue;
                        }
                        left = largest_piece(left, u64::from(*n), u64::from(blocks));
                    }
                }
            }
            left
        })
    }

    /// Bytes of the last rank, which holds the least.
    fn least(&self, state: &State) -> u64 {
        let placements: Vec<_> = (0..self.sizes.len())
            .map(|m| self.placement(state, m))
            .collect();
        self.local(|dim, size| smallest(size, dim as u32, &placements, self.sizes))
    }

    /// Bytes of one of the pieces that mesh dim `m` splits its tensor into.
    fn split_piece(&self, state: &State, m: usize, to: Placement) -> u64 {
        let mut after = *state;
        let code = self.table.iter().position(|p| *p == to).unwrap_or(0);
        after[m] = code as u8;
        let piece = self.largest(&after);
        let split = self.placement(state, m).sharded().is_some();
        if split {
            piece.div_ceil(u64::from(self.sizes[m]))
        } else {
            piece
        }
    }

    fn local(&self, size: impl Fn(usize, u64) -> u64) -> u64 {
        let width = self.meta.dtype.bytes().unwrap_or(1);
        let dims = self.meta.shape.iter().enumerate();
        dims.fold(width, |n, (dim, all)| n.saturating_mul(size(dim, *all)))
    }
}

fn largest_piece(size: u64, ranks: u64, blocks: u64) -> u64 {
    let block = size.div_ceil(blocks).max(1);
    size / block * block.div_ceil(ranks) + (size % block).div_ceil(ranks)
}

/// Whether a dim has enough elements for the shards of all mesh dims, so that no
/// rank is given nothing: as PyTorch, which never shards further.
pub(super) fn fits(
    shape: &[u64],
    dim: u32,
    sizes: &[u32],
    place: impl Fn(usize) -> Placement,
) -> bool {
    let Some(size) = shape.get(dim as usize) else {
        return false;
    };
    let mut ranks = 1_u64;
    sizes.iter().enumerate().all(|(m, n)| {
        let Some((_, blocks)) = place(m).sharded().filter(|s| s.0 == dim) else {
            return true;
        };
        ranks = ranks.saturating_mul(u64::from(*n));
        *size >= ranks.saturating_mul(u64::from(blocks))
    })
}

/// The operation that leads from one placement of a mesh dim to another.
fn transition(from: Placement, to: Placement) -> Option<Kind> {
    use Placement::{Partial, Replicate};
    match (from, to) {
        _ if from == to => None,
        (Replicate, Partial(_)) => to.is_made_of_copies().then_some(Kind::Partition),
        (_, Partial(_)) => None,
        (Replicate, _) => Some(Kind::Chunk),
        (_, _) if to != Replicate && !(exchanges(from) && exchanges(to)) => None,
        (Partial(_), Replicate) => Some(Kind::AllReduce),
        (Partial(_), _) => Some(Kind::ReduceScatter),
        (_, Replicate) => Some(Kind::AllGather),
        (_, _) => Some(Kind::AllToAll),
    }
}

/// Whether reductions and swaps know a placement.
fn exchanges(placement: Placement) -> bool {
    let registered = placement.registered();
    registered.is_none_or(|s| s.sharding().exchanges())
}

/// The cheapest way from one list of placements to another and its cost in
/// microseconds; `None` when there is none, as from a shard to a partial.
pub fn plan(
    meta: &TensorMeta,
    sizes: &[u32],
    topology: &Topology,
    from: &[Placement],
    to: &[Placement],
) -> Option<(Vec<Step>, f64)> {
    let mut table = vec![Placement::Replicate];
    let mut state = |placements: &[Placement]| {
        let mut state = State::default();
        for (at, p) in state.iter_mut().zip(placements) {
            let code = table.iter().position(|q| q == p).unwrap_or(table.len());
            if code == table.len() {
                table.push(*p);
            }
            *at = code as u8;
        }
        state
    };
    let (source, target) = (state(from), state(to));
    let allowed = (0..table.len() as u8).collect();
    let mut reach = Reach::new(sizes, topology, meta, &table, allowed, source);
    if let Some(way) = reach.dtensors_way(&target) {
        return Some(way);
    }
    while let Some((state, cost)) = reach.next() {
        if state == target {
            return Some((reach.steps(state), cost));
        }
    }
    None
}
