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

use hashbrown::{HashMap, hash_map};

use super::cost::{Kind, Order, Topology};
use super::layout::smallest;
use super::operation::{Lying, Operations};
use super::placement::Placement;
use super::spec::{MAX_MESH_DIMS, TensorMeta};
use super::work::{self, Work};

/// The operations of a redistribution, and what they cost in microseconds.
pub(super) type Way = (Vec<Step>, f64);

/// What is done at an operation: with the state before, the mesh dim, the code of its
/// placement after, and the cost.
pub(super) type Visit<'v> = dyn FnMut(&State, usize, u8, f64) -> Option<()> + 'v;

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
    meta: &'a TensorMeta,
    table: &'a [Placement],
    pub(super) operations: Operations<'a>,
    order: Order,
    allowed: Vec<u8>,
    source: State,
    partitions: bool,
    /// Beyond this cost, nothing is looked for.
    limit: f64,
    /// How many states will be asked for at most.
    keeps: usize,
    /// How many entries the heap had after the last [`Reach::forget`].
    kept: usize,
    nodes: HashMap<u64, Node>,
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
            meta,
            table,
            operations: Operations::new(sizes, topology, meta, table, source),
            order: topology.order(),
            allowed,
            source,
            partitions: true,
            limit: f64::INFINITY,
            keeps: usize::MAX,
            kept: 0,
            nodes: HashMap::from_iter([(u64::from_ne_bytes(source), node)]),
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

    /// Leaves out states that cost more than this, from now on.
    pub(super) fn within(&mut self, limit: f64) {
        self.limit = self.limit.min(limit);
    }

    /// Leaves out states that would only be given out after so many others.
    pub(super) fn keeping(mut self, states: usize) -> Self {
        self.keeps = states;
        self
    }

    /// Drops what lies beyond the states that are kept, once there is much of it.
    fn forget(&mut self) {
        if self.heap.len() / 2 < self.keeps.max(self.kept) {
            return;
        }
        let mut entries = std::mem::take(&mut self.heap).into_vec();
        // A state has more than one entry if a cheaper way to it was found later.
        entries.retain(|e| {
            let node = self.nodes.get(&u64::from_ne_bytes(e.state));
            node.is_some_and(|node| !node.done && node.cost == e.cost)
        });
        if entries.len() > self.keeps {
            let by_cost = |a: &Entry, b: &Entry| a.cost.total_cmp(&b.cost);
            let (_, last, _) = entries.select_nth_unstable_by(self.keeps, by_cost);
            self.limit = self.limit.min(last.cost);
            entries.retain(|e| e.cost <= self.limit);
        }
        self.kept = entries.len();
        self.heap = BinaryHeap::from(entries);
    }

    /// The cost that no state which [`Reach::next`] has yet to give is below, or
    /// infinity if there is none.
    pub(super) fn next_cost(&mut self) -> f64 {
        let waiting = self.waiting.peek().map_or(f64::INFINITY, |e| e.cost);
        waiting.min(self.next_cheapest_cost())
    }

    /// The next state in order of cost, and its cost.
    pub(super) fn next(&mut self) -> Option<(State, f64)> {
        if self.order == Order::Cheapest {
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
            if !self.nodes[&u64::from_ne_bytes(entry.state)].done {
                return entry.cost;
            }
            self.heap.pop();
        }
        f64::INFINITY
    }

    fn next_cheapest(&mut self) -> Option<(State, f64)> {
        while let Some(entry) = self.heap.pop() {
            let node = self.nodes.get_mut(&u64::from_ne_bytes(entry.state))?;
            if std::mem::replace(&mut node.done, true) {
                continue;
            }
            self.finished += 1;
            if self.finished > MAX_STATES {
                self.heap.clear();
                return None;
            }
            work::count(Work::State);
            self.expand(&entry);
            self.forget();
            return Some((entry.state, entry.cost));
        }
        None
    }

    fn expand(&mut self, entry: &Entry) {
        let lying = self.operations.lying(&entry.state);
        for m in (0..self.sizes.len()).rev() {
            let can_change = self.sizes[m] > 1 || entry.state[m] != 0;
            if can_change && self.operations.can_leave(&lying, m) {
                self.leave(entry, &lying, m);
            }
        }
    }

    pub(super) fn order(&self) -> Order {
        self.order
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
        (0..self.sizes.len())
            .any(|m| matches!(self.placement(state, m), Placement::StridedShard { .. }))
    }

    /// Whether a placement is a shard that a caller has registered.
    pub(super) fn is_registered(&self, code: u8) -> bool {
        self.table[usize::from(code)].registered().is_some()
    }

    pub(super) fn source(&self) -> State {
        self.source
    }

    pub(super) fn mesh_dims(&self) -> usize {
        self.sizes.len()
    }

    fn leave(&mut self, entry: &Entry, lying: &Lying, m: usize) {
        let state = &entry.state;
        for at in 0..self.allowed.len() {
            let code = self.allowed[at];
            let Some(kind) = self.operations.kind(lying, m, state[m], code) else {
                continue;
            };
            if kind == Kind::Partition && !self.partitions {
                continue;
            }
            let cost = entry.cost + self.operations.price(lying, kind, m, code);
            if cost > self.limit {
                continue;
            }
            let mut next = *state;
            next[m] = code;
            let node = Node {
                cost,
                before: *state,
                done: false,
            };
            match self.nodes.entry(u64::from_ne_bytes(next)) {
                hash_map::Entry::Occupied(mut known) => {
                    if known.get().done || known.get().cost <= cost {
                        continue;
                    }
                    known.insert(node);
                }
                hash_map::Entry::Vacant(place) => {
                    place.insert(node);
                }
            }
            self.heap.push(Entry {
                cost,
                steps: entry.steps + 1,
                number: self.number,
                state: next,
            });
            self.number += 1;
        }
    }

    fn placement(&self, state: &State, m: usize) -> Placement {
        self.table[usize::from(state[m])]
    }

    /// The operations that lead to a state that was given out.
    pub(super) fn steps(&self, mut state: State) -> Vec<Step> {
        if let Some((steps, _)) = self.dtensors_way(&state) {
            return steps;
        }
        let mut steps = Vec::new();
        while let Some(node) = self.nodes.get(&u64::from_ne_bytes(state)) {
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

    /// The steps and the cost of the operations that something goes through.
    pub(super) fn way(&self, through: impl FnOnce(&mut Visit<'_>) -> Option<()>) -> Option<Way> {
        let (mut steps, mut total) = (Vec::new(), 0.0);
        through(&mut |before, m, code, cost| {
            total += cost;
            let mut after = *before;
            after[m] = code;
            steps.push(self.step(*before, after)?);
            Some(())
        })?;
        Some((steps, total))
    }

    fn step(&self, before: State, after: State) -> Option<Step> {
        let m = (0..self.sizes.len()).find(|m| before[*m] != after[*m])?;
        let (from, to) = (self.placement(&before, m), self.placement(&after, m));
        let lying = self.operations.lying(&before);
        let kind = self.operations.kind(&lying, m, before[m], after[m])?;
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
        Some(Step {
            kind,
            mesh_dim: m,
            from,
            to,
            bytes: sent,
            padding: sent.saturating_sub(exact),
            cost_us: self.operations.price(&lying, kind, m, after[m]),
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
