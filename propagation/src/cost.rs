//! The cost of a collective.
//!
//! Latency plus bytes over bandwidth, per mesh dim, for ring algorithms: the
//! model of PyTorch's planner (`torch/distributed/tensor/_collective_utils.py`),
//! so that costs of the two can be compared. Measured numbers may be given instead.

use std::fmt;

use super::spec::Mesh;

/// Microseconds before any collective moves data.
const START_US: f64 = 6.6;
/// What a mesh dim that goes from one shard to another costs on top: PyTorch
/// prefers an all-gather when close.
pub(super) const ALL_TO_ALL_US: f64 = 1.0;

/// The links of one mesh dim.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Microseconds per hop.
    pub latency_us: f64,
    /// GiB per second.
    pub bandwidth: f64,
}

/// In which order the operations of a redistribution run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    /// In the order that costs least.
    #[default]
    Cheapest,
    /// In the order in which DTensor runs them.
    DTensors,
}

/// The links of a mesh.
#[derive(Clone, Debug, PartialEq)]
pub struct Topology {
    links: Vec<Link>,
    order: Order,
}

/// One operation between two placements on one mesh dim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every rank gets all pieces.
    AllGather,
    /// Every rank gets its piece of the reduction.
    ReduceScatter,
    /// Every rank gets the whole reduction.
    AllReduce,
    /// Every rank swaps pieces of one dim for pieces of another.
    AllToAll,
    /// Every rank keeps its piece of what it has; nothing is sent.
    Chunk,
    /// All but one rank of a sum drop what they have, a mean or an extremum
    /// keeps it; nothing is sent.
    Partition,
}

impl Kind {
    /// The word for it: `all_gather`, `reduce_scatter`, ...
    pub fn name(self) -> &'static str {
        match self {
            Kind::AllGather => "all_gather",
            Kind::ReduceScatter => "reduce_scatter",
            Kind::AllReduce => "all_reduce",
            Kind::AllToAll => "all_to_all",
            Kind::Chunk => "chunk",
            Kind::Partition => "partition",
        }
    }

    /// Bytes that each of `ranks` ranks sends in a ring when it puts in `bytes`,
    /// padding included: `n - 1` times its own of an all-gather, all but its own
    /// share of a reduce-scatter or an all-to-all, both for an all-reduce.
    pub fn sent(self, bytes: u64, ranks: u32) -> u64 {
        let (bytes, ranks) = (u128::from(bytes), u128::from(ranks.max(1)));
        let sent = match self {
            Kind::AllGather => bytes * (ranks - 1),
            Kind::ReduceScatter | Kind::AllToAll => bytes * (ranks - 1) / ranks,
            Kind::AllReduce => 2 * bytes * (ranks - 1) / ranks,
            Kind::Chunk | Kind::Partition => 0,
        };
        u64::try_from(sent).unwrap_or(u64::MAX)
    }

    /// Whether it sends nothing.
    pub fn is_local(self) -> bool {
        matches!(self, Kind::Chunk | Kind::Partition)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl Topology {
    /// Links of one node: 0.6 us a hop, 87.7 GiB/s.
    pub fn one_node(mesh: &Mesh) -> Self {
        let link = Link {
            latency_us: 0.6,
            bandwidth: 87.7,
        };
        Topology {
            links: vec![link; mesh.sizes().len()],
            order: Order::default(),
        }
    }

    /// The same links, where DTensor redistributes: in an order of its own (PyTorch's
    /// `_redistribute.py`, `generate_greedy_transform_infos`), which may cost more than
    /// the cheapest, and without operations on mesh dims of one rank.
    pub fn in_dtensors_order(mut self) -> Self {
        self.order = Order::DTensors;
        self
    }

    pub(super) fn order(&self) -> Order {
        self.order
    }

    /// Links as measured, one per mesh dim; a mesh dim without one, or whose
    /// numbers are not finite and positive, keeps those of
    /// [`Topology::one_node`].
    pub fn measured(mesh: &Mesh, links: &[Link]) -> Self {
        let mut topology = Topology::one_node(mesh);
        for (link, given) in topology.links.iter_mut().zip(links) {
            let fine = |x: f64| x.is_finite() && x > 0.0;
            if fine(given.latency_us) && fine(given.bandwidth) {
                *link = *given;
            }
        }
        topology
    }

    /// Microseconds of one operation over `ranks` ranks of a mesh dim, of which
    /// each holds `local` bytes before.
    pub(super) fn us(&self, kind: Kind, mesh_dim: usize, ranks: u32, local: f64) -> f64 {
        if ranks == 1 && self.order == Order::DTensors {
            return 0.0;
        }
        let link = self.links[mesh_dim];
        let ranks = f64::from(ranks);
        let (hops, bytes, more) = match kind {
            Kind::Chunk | Kind::Partition => return 0.0,
            Kind::AllGather => (ranks - 1.0, local * ranks, 0.0),
            Kind::ReduceScatter => (ranks - 1.0, local, 0.0),
            Kind::AllReduce => (2.0 * (ranks - 1.0), local, 0.0),
            Kind::AllToAll => (ranks - 1.0, local, ALL_TO_ALL_US),
        };
        let gib = bytes / (1024.0 * 1024.0 * 1024.0);
        START_US + more + hops * link.latency_us + gib * hops / ranks / link.bandwidth * 1e6
    }
}
