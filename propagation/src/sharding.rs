//! Shardings that callers bring: another way to split a tensor dim over the
//! ranks of a mesh dim, next to `S(d)` and `_S(d,n)`.
//!
//! A sharding says where each index goes and which index a rank holds at each
//! place, and which rules it may fill. Everything else follows: it is written
//! and read by its name, fills the placeholders of rules, gathers to `R` and is
//! chunked from there.
//!
//! ```
//! use rote_propagation::{Placement, Sharding, register_sharding};
//!
//! /// Index i lies on rank i modulo the number of ranks.
//! struct RoundRobin;
//!
//! impl Sharding for RoundRobin {
//!     fn name(&self) -> &str {
//!         "RoundRobin"
//!     }
//!     fn held(&self, size: u64, ranks: u64, rank: u64) -> u64 {
//!         (size + ranks - 1 - rank) / ranks
//!     }
//!     fn split(&self, _size: u64, ranks: u64, index: u64) -> (u64, u64) {
//!         (index % ranks, index / ranks)
//!     }
//!     fn merge(&self, _size: u64, ranks: u64, rank: u64, local: u64) -> u64 {
//!         local * ranks + rank
//!     }
//! }
//!
//! # fn main() -> Result<(), rote_propagation::PropagationError> {
//! register_sharding(RoundRobin)?;
//! assert_eq!(Placement::parse("RoundRobin(1)")?.to_string(), "RoundRobin(1)");
//! # Ok(())
//! # }
//! ```

use std::sync::{PoisonError, RwLock};

use super::error::PropagationError;
use super::family::{self, Run, Tabled};

/// A way to split a tensor dim of `size` elements over `ranks` ranks.
///
/// The three maps must describe one arrangement for every size and every number
/// of ranks: each index on exactly one rank, at a local index below what that
/// rank holds. None may take time that grows with its arguments.
pub trait Sharding: Send + Sync {
    /// Its name in the notation: a letter, then letters and digits.
    fn name(&self) -> &str;

    /// How many elements a rank holds.
    fn held(&self, size: u64, ranks: u64, rank: u64) -> u64;

    /// The rank on which an index lies, and its local index there.
    fn split(&self, size: u64, ranks: u64, index: u64) -> (u64, u64);

    /// The index that a rank holds at a local index.
    fn merge(&self, size: u64, ranks: u64, rank: u64, local: u64) -> u64;

    /// Whether it may fill the placeholders in the rule of `op`, which belongs
    /// to `family` (`pointwise`, `einsum`, ...; `registered` for rules that a
    /// caller brought). All of them unless something else is said; strategies
    /// that need contiguous or even shards are left out in any case.
    fn fills(&self, family: &str, op: &str) -> bool {
        let _ = (family, op);
        true
    }

    /// Whether a reduce-scatter or an all-to-all with other shards can make it
    /// or take it apart. If not, its ways lead through `R`.
    fn exchanges(&self) -> bool {
        false
    }

    /// What tells it from other shardings of its name, as it is written behind the
    /// dim; `None`: it has the name alone.
    fn parameters(&self) -> Option<&str> {
        None
    }

    /// Whether its name is still its own.
    fn is_known(&self) -> bool {
        true
    }

    /// Whether it can split a dim of this size over so many ranks. If not, no tensor
    /// lies so.
    fn fits(&self, size: u64, ranks: u64) -> bool {
        let _ = (size, ranks);
        true
    }

    /// What [`Sharding::merge`] says of all local indices of a rank, as ranges;
    /// `None`: ask that.
    fn runs(&self, size: u64, ranks: u64, rank: u64) -> Option<Vec<Run>> {
        let _ = (size, ranks, rank);
        None
    }

    /// As [`Sharding::fills`] of the rule of `base`, where it answers for `op`.
    fn fills_as(&self, family: &str, base: &str, op: &str) -> bool {
        let _ = op;
        self.fills(family, base)
    }
}

/// A registered sharding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ShardingId(u32);

/// All of them, in order of registration. Placements are read and written
/// without a registry at hand, so there is one list per process, and what is
/// registered stays.
static SHARDINGS: RwLock<Vec<&'static dyn Sharding>> = RwLock::new(Vec::new());

/// The sizes and the numbers of ranks that the maps are tried with.
const SIZES: std::ops::Range<u64> = 0..65;
const RANKS: std::ops::Range<u64> = 1..9;

/// The most ranks whose shards are counted one by one.
const MAX_RANKS: u64 = 4096;

/// Makes a sharding known for the life of the process.
///
/// # Errors
///
/// [`PropagationError::Sharding`] when the name is taken or no name, or when the
/// maps lose an index, hold one twice or contradict each other, tried with up to
/// 64 elements on up to 8 ranks.
pub fn register_sharding(
    sharding: impl Sharding + 'static,
) -> Result<ShardingId, PropagationError> {
    let name = sharding.name().to_owned();
    let wrong = |expected: &str, found: String| PropagationError::Sharding {
        name: name.clone(),
        expected: expected.into(),
        found,
    };
    check_name(&name)?;
    for ranks in RANKS {
        for size in SIZES {
            check(&sharding, size, ranks).map_err(|(expected, found)| {
                wrong(
                    expected,
                    format!("{found} of {size} elements on {ranks} ranks"),
                )
            })?;
        }
    }
    let mut all = SHARDINGS.write().unwrap_or_else(PoisonError::into_inner);
    let taken = |s: &&dyn Sharding| s.is_known() && s.name() == name;
    if all.iter().any(taken) || family::named(&name).is_some() {
        return Err(wrong("a name that is not taken", format!("{name:?}")));
    }
    all.push(Box::leak(Box::new(sharding)));
    Ok(ShardingId(all.len() as u32 - 1))
}

/// Checks that placements can be written with a name.
pub(super) fn check_name(name: &str) -> Result<(), PropagationError> {
    let mut letters = name.chars();
    let named = letters.next().is_some_and(|c| c.is_ascii_alphabetic())
        && letters.all(|c| c.is_ascii_alphanumeric());
    if named && !["R", "S", "P", "PartitionSpec"].contains(&name) {
        return Ok(());
    }
    let expected = "a letter, then letters and digits, other than R, S, P, PartitionSpec";
    Err(PropagationError::Sharding {
        name: name.into(),
        expected: expected.into(),
        found: format!("{name:?}"),
    })
}

/// The most letters of parameters.
const MAX_PARAMETERS: usize = 4096;

/// Whether a text can stand in a placement as parameters.
pub(super) fn are_parameters(text: &str) -> bool {
    let fine = |c: char| c.is_ascii_digit() || matches!(c, ',' | '-' | '[' | ']');
    text.len() <= MAX_PARAMETERS && text.chars().all(fine)
}

/// Whether a sharding without parameters has this name.
pub(super) fn is_taken(name: &str) -> bool {
    let all = SHARDINGS.read().unwrap_or_else(PoisonError::into_inner);
    all.iter().any(|s| s.is_known() && s.name() == name)
}

/// Checks that every index is held exactly once and comes back.
fn check(sharding: &impl Sharding, size: u64, ranks: u64) -> Result<(), (&'static str, String)> {
    let mut seen = vec![false; size as usize];
    for rank in 0..ranks {
        let held = sharding.held(size, ranks, rank);
        if held > size {
            return Err((
                "as many elements as there are",
                format!("{held} on rank {rank}"),
            ));
        }
        for local in 0..held {
            let index = sharding.merge(size, ranks, rank, local);
            let place = || format!("index {index} at {local} on rank {rank}");
            let Some(seen) = seen.get_mut(index as usize) else {
                return Err(("indices below the size", place()));
            };
            if std::mem::replace(seen, true) {
                return Err(("every index once", place()));
            }
            let back = sharding.split(size, ranks, index);
            if back != (rank, local) {
                let found = format!("{}, split to {} on rank {}", place(), back.1, back.0);
                return Err(("split and merge to be inverse", found));
            }
        }
    }
    match seen.iter().position(|s| !s) {
        Some(index) => Err(("every index once", format!("index {index} on no rank"))),
        None => Ok(()),
    }
}

impl ShardingId {
    /// The sharding of this name with these parameters: those of a family come to be
    /// when they are first named.
    pub fn named(name: &str, parameters: Option<&str>) -> Option<Self> {
        let parameters = parameters.filter(|parameters| !parameters.is_empty());
        let same =
            |s: &&dyn Sharding| s.is_known() && s.name() == name && s.parameters() == parameters;
        let find = |all: &[&'static dyn Sharding]| {
            let at = all.iter().position(same)?;
            Some(ShardingId(at as u32))
        };
        let known = find(&SHARDINGS.read().unwrap_or_else(PoisonError::into_inner));
        known.or_else(|| {
            let made = Tabled::new(family::named(name)?, parameters.unwrap_or_default())?;
            let mut all = SHARDINGS.write().unwrap_or_else(PoisonError::into_inner);
            find(&all).or_else(|| {
                all.push(Box::leak(Box::new(made)));
                Some(ShardingId(all.len() as u32 - 1))
            })
        })
    }

    /// The sharding with a number that [`ShardingId::number`] gave.
    pub fn numbered(number: u32) -> Option<Self> {
        let all = SHARDINGS.read().unwrap_or_else(PoisonError::into_inner);
        ((number as usize) < all.len()).then_some(ShardingId(number))
    }

    /// What was registered.
    pub fn sharding(self) -> &'static dyn Sharding {
        // An id comes from the list, which never shrinks.
        SHARDINGS.read().unwrap_or_else(PoisonError::into_inner)[self.0 as usize]
    }

    /// Its number in this process.
    pub fn number(self) -> u32 {
        self.0
    }

    /// The least and the most that any rank holds; bounds of them on a mesh dim
    /// of very many ranks.
    pub(super) fn extent(self, size: u64, ranks: u64) -> (u64, u64) {
        if ranks > MAX_RANKS {
            return (0, size);
        }
        let sharding = self.sharding();
        let held = |rank| sharding.held(size, ranks, rank).min(size);
        (0..ranks).fold((size, 0), |(least, most), rank| {
            let held = held(rank);
            (least.min(held), most.max(held))
        })
    }
}
