//! The operation that brings one mesh dim of a tensor into another placement: whether
//! there is one, and what it costs.
//!
//! Searches ask this millions of times. What depends on the tensor or on a placement
//! alone is therefore worked out once, and what depends on a state once per state. The
//! functions that each search calls most are inlined (15 % of a long descent).

use super::cost::{ALL_TO_ALL_US, Kind, Topology};
use super::placement::Placement;
use super::redistribute::State;
use super::spec::{MAX_MESH_DIMS, TensorMeta};
use super::work::{self, Work};
use rote_plans::DType;

/// What a placement is to the operations.
#[derive(Clone, Copy, PartialEq)]
enum Sort {
    Replicate,
    /// A partial.
    Partial,
    /// A partial that a replicated mesh dim can be made into.
    OfCopies,
    /// A shard.
    Shard,
    /// A shard that reductions and swaps do not know: its ways lead through `R`.
    Alone,
}

/// A placement of the table.
#[derive(Clone, Copy)]
struct Code {
    sort: Sort,
    registered: bool,
    /// The tensor dim that a shard splits.
    dim: u8,
    blocks: u32,
}

impl Code {
    fn of(placement: Placement, dtype: DType) -> Code {
        let registered = placement.registered();
        let sort = match placement {
            Placement::Replicate => Sort::Replicate,
            Placement::Partial(_) if placement.is_made_of_copies(dtype) => Sort::OfCopies,
            Placement::Partial(_) => Sort::Partial,
            _ if registered.is_none_or(|s| s.sharding().exchanges()) => Sort::Shard,
            _ => Sort::Alone,
        };
        let (dim, blocks) = placement.sharded().unwrap_or((0, 0));
        Code {
            sort,
            registered: registered.is_some(),
            // Tensors have no more than 64 dims.
            dim: dim as u8,
            blocks,
        }
    }

    fn is_shard(self) -> bool {
        matches!(self.sort, Sort::Shard | Sort::Alone)
    }

    fn splits(self, dim: u8) -> bool {
        self.is_shard() && self.dim == dim
    }

    /// The tensor dim that it splits, as a bit.
    fn bit(self) -> u64 {
        if self.is_shard() { 1 << self.dim } else { 0 }
    }
}

/// How a tensor lies in one state.
pub(super) struct Lying {
    codes: [Code; MAX_MESH_DIMS],
    /// Per mesh dim, the tensor dims that mesh dims to the right split, as bits.
    right: [u64; MAX_MESH_DIMS],
    /// The same of mesh dims to the left.
    left: [u64; MAX_MESH_DIMS],
    /// Bytes that a rank holds.
    local: f64,
}

/// The operations on one tensor.
pub(super) struct Operations<'a> {
    sizes: &'a [u32],
    topology: &'a Topology,
    shape: &'a [u64],
    bytes: f64,
    source: State,
    codes: Vec<Code>,
}

impl<'a> Operations<'a> {
    pub(super) fn new(
        sizes: &'a [u32],
        topology: &'a Topology,
        meta: &'a TensorMeta,
        table: &[Placement],
        source: State,
    ) -> Self {
        Operations {
            sizes,
            topology,
            shape: &meta.shape,
            bytes: meta.bytes() as f64,
            source,
            codes: table.iter().map(|p| Code::of(*p, meta.dtype)).collect(),
        }
    }

    fn code(&self, code: u8) -> Code {
        self.codes[usize::from(code)]
    }

    pub(super) fn lying(&self, state: &State) -> Lying {
        let mut lying = Lying {
            codes: [self.codes[0]; MAX_MESH_DIMS],
            right: [0; MAX_MESH_DIMS],
            left: [0; MAX_MESH_DIMS],
            local: self.bytes,
        };
        let (mut right, mut shards) = (0_u64, 1_u64);
        for m in (0..self.sizes.len()).rev() {
            let code = self.code(state[m]);
            lying.codes[m] = code;
            lying.right[m] = right;
            right |= code.bit();
            if code.is_shard() {
                shards *= u64::from(self.sizes[m]);
            }
        }
        for m in 1..self.sizes.len() {
            lying.left[m] = lying.left[m - 1] | lying.codes[m - 1].bit();
        }
        lying.local = self.bytes / shards as f64;
        lying
    }

    /// Whether the shard of mesh dim `m`, if it is one, can be changed before others.
    pub(super) fn can_leave(&self, lying: &Lying, m: usize) -> bool {
        let from = lying.codes[m];
        !from.is_shard() || self.innermost(lying, m, from)
    }

    /// The operation that brings mesh dim `m`, which can be changed, into a placement.
    #[inline(always)]
    pub(super) fn kind(&self, lying: &Lying, m: usize, from: u8, to: u8) -> Option<Kind> {
        if from == to {
            return None;
        }
        work::count(Work::Operation);
        let to = self.code(to);
        let kind = transition(lying.codes[m].sort, to.sort)?;
        if kind == Kind::Partition && self.source[m] != 0 {
            // What was a shard or another partial has no way there.
            return None;
        }
        (!to.is_shard() || self.splits(lying, m, to)).then_some(kind)
    }

    /// Microseconds of an operation; `to` is what the mesh dim comes into.
    #[inline(always)]
    pub(super) fn price(&self, lying: &Lying, kind: Kind, m: usize, to: u8) -> f64 {
        let us = self.topology.us(kind, m, self.sizes[m], lying.local);
        let source = self.source[m];
        if kind == Kind::Chunk && self.code(source).is_shard() && source != to {
            // A gather and a chunk in place of an all-to-all save nothing.
            us + ALL_TO_ALL_US
        } else {
            us
        }
    }

    /// The cost of bringing one mesh dim of a state into a placement, if one
    /// operation does.
    #[inline(always)]
    pub(super) fn change(&self, lying: &Lying, m: usize, from: u8, to: u8) -> Option<f64> {
        if !self.can_leave(lying, m) {
            return None;
        }
        let kind = self.kind(lying, m, from, to)?;
        Some(self.price(lying, kind, m, to))
    }

    /// No more than what a way costs from the source to a state whose mesh dims are
    /// changed at once or replicated in between; `None` if there is none.
    pub(super) fn least(&self, target: &State) -> Option<f64> {
        let mut shards = 1_u64;
        for (m, n) in self.sizes.iter().enumerate() {
            if self.code(self.source[m]).is_shard() || self.code(target[m]).is_shard() {
                shards *= u64::from(*n);
            }
        }
        let smallest = self.bytes / shards as f64;
        let mut least = 0.0;
        for (m, n) in self.sizes.iter().enumerate() {
            let (from, to) = (self.source[m], target[m]);
            if from == to {
                continue;
            }
            let us = |kind| self.topology.us(kind, m, *n, smallest);
            least += match (self.code(from).sort, self.code(to).sort) {
                (_, Sort::Partial) => return None,
                (Sort::Replicate, _) => 0.0,
                (_, Sort::OfCopies) => return None,
                (Sort::Partial | Sort::OfCopies, Sort::Replicate) => us(Kind::AllReduce),
                (Sort::Partial | Sort::OfCopies, _) => us(Kind::ReduceScatter),
                (_, Sort::Replicate) => us(Kind::AllGather),
                (_, _) => us(Kind::AllToAll).min(us(Kind::AllGather)),
            };
        }
        // Costs of the same operations in another order may be rounded otherwise.
        Some(least * (1.0 - 1e-9))
    }

    /// The tensor dims that one mesh dim splits before and after, as bits.
    pub(super) fn split(&self, from: u8, to: u8) -> (u64, u64) {
        (self.code(from).bit(), self.code(to).bit())
    }

    /// Whether the shard of mesh dim `m` is the last split of its tensor dim.
    #[inline(always)]
    fn innermost(&self, lying: &Lying, m: usize, shard: Code) -> bool {
        let dim = shard.dim;
        if lying.right[m] & (1 << dim) == 0 {
            return true;
        }
        let mut product = 1_u64;
        for (later, code) in lying.codes.iter().enumerate().take(self.sizes.len()) {
            if later <= m || !code.splits(dim) {
                continue;
            }
            if code.registered || code.blocks != 1 {
                return false;
            }
            product *= u64::from(self.sizes[later]);
        }
        let pieces = product.saturating_mul(u64::from(self.sizes[m]));
        // Left of `m` too, or the blocks would not be those of the whole dim.
        let whole = lying.left[m] & (1 << dim) == 0;
        product == u64::from(shard.blocks) && whole && self.shape[dim as usize] % pieces == 0
    }

    /// Whether mesh dim `m` may split what it holds into `shard`.
    #[inline(always)]
    fn splits(&self, lying: &Lying, m: usize, shard: Code) -> bool {
        let Some(size) = self.shape.get(shard.dim as usize) else {
            return false;
        };
        if (lying.right[m] | lying.left[m]) & shard.bit() == 0 {
            return *size >= u64::from(self.sizes[m]).saturating_mul(u64::from(shard.blocks));
        }
        // As `redistribute::fits`, after the split.
        let mut ranks = 1_u64;
        for (l, (n, code)) in self.sizes.iter().zip(&lying.codes).enumerate() {
            let code = if l == m { shard } else { *code };
            if code.splits(shard.dim) {
                ranks = ranks.saturating_mul(u64::from(*n));
                if *size < ranks.saturating_mul(u64::from(code.blocks)) {
                    return false;
                }
            }
        }
        self.innermost(lying, m, shard)
    }
}

/// The operation that leads from one placement of a mesh dim to another one.
fn transition(from: Sort, to: Sort) -> Option<Kind> {
    use Sort::{Alone, OfCopies, Partial, Replicate};
    match (from, to) {
        (Replicate, OfCopies) => Some(Kind::Partition),
        (_, Partial | OfCopies) => None,
        (Replicate, _) => Some(Kind::Chunk),
        (Partial | OfCopies, Replicate) => Some(Kind::AllReduce),
        (_, Replicate) => Some(Kind::AllGather),
        (Alone, _) | (_, Alone) => None,
        (Partial | OfCopies, _) => Some(Kind::ReduceScatter),
        (_, _) => Some(Kind::AllToAll),
    }
}
