//! Decisions that were made before: a bounded map from op and arguments.
//!
//! A hit costs a hash of the question and one comparison with the kept question,
//! and allocates nothing. When the cache is full, a decision is evicted by the clock
//! algorithm: the first one without a hit since the clock's hand last passed it.

use std::hash::{BuildHasher, Hasher};
use std::sync::Arc;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::placement::{PartialOp, Placement};
use super::rule::{Arg, Query};
use super::search::Propagation;
use super::spec::Spec;

#[derive(Debug)]
struct Entry {
    hash: u64,
    op: Box<str>,
    args: Box<[Arg]>,
    decision: Arc<Propagation>,
    used: bool,
}

/// The decisions of one mesh, topology and registry, which are therefore no part
/// of a question.
#[derive(Debug)]
pub(super) struct Cache {
    hashing: DefaultHashBuilder,
    /// Positions in `entries`.
    index: HashTable<usize>,
    entries: Vec<Entry>,
    limit: usize,
    hand: usize,
}

impl Cache {
    pub(super) fn new(limit: usize) -> Self {
        Cache {
            hashing: DefaultHashBuilder::default(),
            index: HashTable::new(),
            entries: Vec::new(),
            limit: limit.max(1),
            hand: 0,
        }
    }

    pub(super) fn clear(&mut self) {
        *self = Cache::new(self.limit);
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// The hash of a question, for [`Cache::find`] and [`Cache::keep`].
    pub(super) fn hash(&self, query: &Query<'_>) -> u64 {
        hash(&self.hashing, query)
    }

    /// The position of a question's decision.
    pub(super) fn find(&mut self, hash: u64, query: &Query<'_>) -> Option<usize> {
        let entries = &mut self.entries;
        let found = self.index.find(hash, |at| asks(&entries[*at], query));
        let at = *found?;
        entries[at].used = true;
        Some(at)
    }

    pub(super) fn decision(&self, at: usize) -> &Arc<Propagation> {
        &self.entries[at].decision
    }

    /// Keeps the decision of a question that was not found; gives its position.
    pub(super) fn keep(&mut self, hash: u64, query: &Query<'_>, decision: Propagation) -> usize {
        let entry = Entry {
            hash,
            op: query.op.into(),
            args: query.args.into(),
            decision: Arc::new(decision),
            used: false,
        };
        let at = if self.entries.len() < self.limit {
            self.entries.push(entry);
            self.entries.len() - 1
        } else {
            let at = self.oldest();
            let gone = self.entries[at].hash;
            if let Ok(found) = self.index.find_entry(gone, |known| *known == at) {
                found.remove();
            }
            self.entries[at] = entry;
            at
        };
        let entries = &self.entries;
        self.index.insert_unique(hash, at, |at| entries[*at].hash);
        at
    }

    fn oldest(&mut self) -> usize {
        loop {
            let at = self.hand;
            self.hand = (at + 1) % self.entries.len();
            if !std::mem::replace(&mut self.entries[at].used, false) {
                return at;
            }
        }
    }
}

/// Questions about one op, by what they ask.
#[derive(Default)]
pub(super) struct Alike {
    hashing: DefaultHashBuilder,
    /// The arguments, and the number of the first question that had them.
    known: HashTable<(Vec<Arg>, usize)>,
}

impl Alike {
    /// The number of the first question with these arguments, which is `number` if there
    /// was none.
    pub(super) fn first(&mut self, op: &str, args: Vec<Arg>, number: usize) -> usize {
        let hash_of = |args: &[Arg]| hash(&self.hashing, &Query { op, args });
        let found = hash_of(&args);
        let equal = |known: &(Vec<Arg>, usize)| same_args(&known.0, &args);
        if let Some((_, first)) = self.known.find(found, equal) {
            return *first;
        }
        self.known
            .insert_unique(found, (args, number), |known| hash_of(&known.0));
        number
    }
}

fn hash(hashing: &DefaultHashBuilder, query: &Query<'_>) -> u64 {
    let mut hasher = hashing.build_hasher();
    hasher.write(query.op.as_bytes());
    for arg in query.args {
        hash_arg(arg, &mut hasher);
    }
    hasher.finish()
}

fn same_args(one: &[Arg], other: &[Arg]) -> bool {
    one.len() == other.len() && one.iter().zip(other).all(|(a, b)| same(a, b))
}

fn asks(entry: &Entry, query: &Query<'_>) -> bool {
    *entry.op == *query.op && same_args(&entry.args, query.args)
}

/// Equality under which a number that is no number is itself, and the zeros
/// differ.
fn same(a: &Arg, b: &Arg) -> bool {
    match (a, b) {
        (Arg::Float(a), Arg::Float(b)) => a.to_bits() == b.to_bits(),
        (Arg::Complex(a, b), Arg::Complex(c, d)) => {
            a.to_bits() == c.to_bits() && b.to_bits() == d.to_bits()
        }
        (Arg::Complexes(a), Arg::Complexes(b)) => {
            let bits = |x: &(f64, f64)| (x.0.to_bits(), x.1.to_bits());
            a.iter().map(bits).eq(b.iter().map(bits))
        }
        (Arg::Floats(a), Arg::Floats(b)) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
        }
        _ => a == b,
    }
}

fn hash_arg(arg: &Arg, hasher: &mut impl Hasher) {
    // A word per argument says which kind it is and how long.
    let mut head = |kind: u64, length: usize| hasher.write_u64(kind << 56 | length as u64);
    match arg {
        Arg::None => head(0, 0),
        Arg::Bool(b) => head(1, usize::from(*b)),
        Arg::DType(dtype) => head(2, usize::from(dtype.0)),
        Arg::Int(n) => {
            head(3, 0);
            hasher.write_i64(*n);
        }
        Arg::Float(x) => {
            head(4, 0);
            hasher.write_u64(x.to_bits());
        }
        Arg::Ints(list) => {
            head(5, list.len());
            list.iter().for_each(|n| hasher.write_i64(*n));
        }
        Arg::Floats(list) => {
            head(6, list.len());
            list.iter().for_each(|x| hasher.write_u64(x.to_bits()));
        }
        Arg::Complex(re, im) => {
            head(10, 0);
            [re, im].iter().for_each(|x| hasher.write_u64(x.to_bits()));
        }
        Arg::Complexes(list) => {
            head(11, list.len());
            for (re, im) in list {
                [re, im].iter().for_each(|x| hasher.write_u64(x.to_bits()));
            }
        }
        Arg::Text(text) => {
            head(7, text.len());
            hasher.write(text.as_bytes());
        }
        Arg::Tensor(spec) => {
            head(8, 0);
            hash_spec(spec, hasher);
        }
        Arg::Tensors(specs) => {
            head(9, specs.len());
            for spec in specs {
                hasher.write_u64(u64::from(spec.is_some()));
                if let Some(spec) = spec {
                    hash_spec(spec, hasher);
                }
            }
        }
    }
}

fn hash_spec(spec: &Spec, hasher: &mut impl Hasher) {
    if let Some(meta) = &spec.meta {
        hasher.write_u64(u64::from(meta.dtype.0) << 32 | meta.shape.len() as u64);
        meta.shape.iter().for_each(|n| hasher.write_u64(*n));
    }
    for placement in &spec.placements {
        hasher.write_u64(match *placement {
            Placement::Replicate => 0,
            Placement::Shard { dim } => 1 << 62 | u64::from(dim),
            Placement::StridedShard { dim, split_factor } => {
                2 << 62 | u64::from(dim) << 32 | u64::from(split_factor)
            }
            Placement::Registered { dim, sharding } => {
                3 << 62 | u64::from(dim) << 28 | u64::from(sharding.number()) << 4
            }
            Placement::Partial(PartialOp::Registered(partial)) => {
                3 << 62 | 9 | u64::from(partial.number()) << 4
            }
            Placement::Partial(PartialOp::Norm(order)) => order.p().to_bits().rotate_left(4),
            Placement::Partial(op) => 3 << 62 | 8 | op.reduce_op() as u64,
        });
    }
}
