//! Shardings with parameters: a family has a name, and a caller lists the indices of each rank
//! for given parameters when they are first needed.
//!
//! Each sharding of a family is a [`Sharding`] of its own, written with its parameters behind the
//! dim: `RaggedShard(0,1,3)`. What the caller lists is checked for each size and number of ranks.
//! A failure of the caller's is kept until the answer is made, and is its error.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, PoisonError};

use hashbrown::HashMap;

use super::error::PropagationError;
use super::names::{Named, Names};
use super::sharding::{Sharding, are_parameters, check_name, is_taken};

/// Indices at one distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The first one.
    pub start: u64,
    /// From one to the next.
    pub step: i64,
    /// How many.
    pub count: u64,
}

impl Run {
    pub(super) fn at(self, place: u64) -> u64 {
        self.start
            .wrapping_add_signed(self.step.wrapping_mul(place as i64))
    }

    /// The place of an index.
    fn place(self, index: u64) -> Option<u64> {
        let from = i128::from(index) - i128::from(self.start);
        let step = i128::from(self.step);
        let place = match step {
            0 => (from == 0).then_some(0)?,
            step if from % step == 0 => from / step,
            _ => return None,
        };
        u64::try_from(place)
            .ok()
            .filter(|place| *place < self.count)
    }
}

/// The indices of each rank, in local order.
pub type Runs = Vec<Vec<Run>>;

/// What a caller says of a family of shardings.
pub trait Splits: Send + Sync {
    /// The indices of each rank; `None` where these parameters do not fit the size or the
    /// number of ranks: then no tensor lies so.
    ///
    /// # Errors
    ///
    /// Why the caller cannot say.
    fn runs(&self, parameters: &str, size: u64, ranks: u64) -> Result<Option<Runs>, String>;

    /// Whether shardings of the family may fill the placeholders in the rule of `base`, which
    /// answers for `op`.
    ///
    /// # Errors
    ///
    /// Why the caller cannot say.
    fn fills(&self, base: &str, op: &str) -> Result<bool, String> {
        let _ = (base, op);
        Ok(true)
    }
}

pub(super) type Family = Named<Box<dyn Splits>>;

static FAMILIES: Names<Box<dyn Splits>> = Names::new();

/// The most tables of one sharding that are kept.
const MAX_TABLES: usize = 1024;
/// The most runs of one table.
const MAX_RUNS: usize = 1 << 20;
/// The largest dim whose indices are checked one by one.
const MAX_LISTED: u64 = 1 << 28;

/// Makes a family of shardings known.
///
/// # Errors
///
/// [`PropagationError::Sharding`] when the name is taken or no name.
pub fn register_family(name: &str, splits: impl Splits + 'static) -> Result<(), PropagationError> {
    check_name(name)?;
    FAMILIES.register(name, Box::new(splits), |name| !is_taken(name))
}

/// Forgets a family: its name is free again. Returns whether there was one.
pub fn forget_family(name: &str) -> bool {
    FAMILIES.forget(name)
}

/// The family of this name.
pub(super) fn named(name: &str) -> Option<&'static Family> {
    FAMILIES.named(name)
}

/// What a caller lists for one size and number of ranks, checked.
struct Table {
    ranks: Vec<(u64, Vec<Run>)>,
}

/// One sharding of a family.
pub(super) struct Tabled {
    family: &'static Family,
    parameters: String,
    tables: Mutex<Tables>,
}

/// By size and number of ranks; `None` where the sharding does not fit.
type Tables = HashMap<(u64, u64), Option<Arc<Table>>>;

impl Tabled {
    /// `None` for parameters that cannot stand in a placement.
    pub(super) fn new(family: &'static Family, parameters: &str) -> Option<Self> {
        are_parameters(parameters).then(|| Tabled {
            family,
            parameters: parameters.into(),
            tables: Mutex::default(),
        })
    }

    fn table(&self, size: u64, ranks: u64) -> Option<Arc<Table>> {
        // The caller's function may ask in turn, so nothing is locked while it runs.
        let tables = || self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = tables().get(&(size, ranks)) {
            return known.clone();
        }
        let said = self.family.is.runs(&self.parameters, size, ranks);
        let made = said.and_then(|runs| runs.map(|runs| table(runs, size, ranks)).transpose());
        match made {
            Ok(made) => {
                let made = made.map(Arc::new);
                let mut tables = tables();
                if tables.len() >= MAX_TABLES {
                    tables.clear();
                }
                tables.insert((size, ranks), made.clone());
                made
            }
            Err(reason) => {
                note_fault(PropagationError::Pieces {
                    name: self.family.name.clone(),
                    parameters: self.parameters.clone(),
                    size,
                    ranks,
                    reason,
                });
                None
            }
        }
    }
}

/// Checks that every index is held exactly once.
fn table(runs: Runs, size: u64, ranks: u64) -> Result<Table, String> {
    if runs.len() as u64 != ranks {
        return Err(format!(
            "expected the indices of {ranks} ranks, found those of {}",
            runs.len()
        ));
    }
    let count: usize = runs.iter().map(Vec::len).sum();
    if count > MAX_RUNS {
        return Err(format!(
            "expected at most {MAX_RUNS} ranges of indices, found {count}"
        ));
    }
    let each = || runs.iter().flatten().filter(|run| run.count > 0);
    let mut held = 0_u64;
    for (rank, run) in
        (runs.iter().enumerate()).flat_map(|(rank, all)| all.iter().map(move |r| (rank, r)))
    {
        if run.count == 0 {
            continue;
        }
        let last = i128::from(run.start) + i128::from(run.step) * i128::from(run.count - 1);
        for index in [i128::from(run.start), last] {
            if !(0..i128::from(size)).contains(&index) {
                return Err(format!("index {index} on rank {rank} is none below {size}"));
            }
        }
        if run.step == 0 && run.count > 1 {
            return Err(format!("rank {rank} holds index {} twice", run.start));
        }
        held = held.saturating_add(run.count);
    }
    let holder = |index: u64| {
        let holds = |run: &Run| run.place(index).is_some();
        let ranks = runs
            .iter()
            .enumerate()
            .filter(|(_, all)| all.iter().any(holds));
        ranks.map(|(rank, _)| rank.to_string()).collect::<Vec<_>>()
    };
    let twice = |index: u64| match holder(index).as_slice() {
        [one] => format!("rank {one} holds index {index} twice"),
        many => format!("index {index} is on ranks {}", many.join(" and ")),
    };
    if each().all(|run| run.step == 1 || run.count == 1) {
        let mut bounds: Vec<(u64, u64)> = each()
            .map(|run| (run.start, run.start + run.count))
            .collect();
        bounds.sort_unstable();
        let mut next = 0;
        for (from, to) in bounds {
            if from > next {
                return Err(format!("index {next} is on no rank"));
            }
            if from < next {
                return Err(twice(from));
            }
            next = to;
        }
        if next != size {
            return Err(format!("index {next} is on no rank"));
        }
    } else {
        if size > MAX_LISTED {
            return Err(format!(
                "expected ranges of step 1 where a dim has more than {MAX_LISTED} elements"
            ));
        }
        let mut seen = vec![0_u64; size.div_ceil(64) as usize];
        for run in each() {
            for place in 0..run.count {
                let index = run.at(place);
                let (word, bit) = ((index / 64) as usize, 1 << (index % 64));
                if seen[word] & bit != 0 {
                    return Err(twice(index));
                }
                seen[word] |= bit;
            }
        }
        if held != size {
            let missing = (0..size).find(|i| seen[(i / 64) as usize] & 1 << (i % 64) == 0);
            return Err(format!("index {} is on no rank", missing.unwrap_or(0)));
        }
    }
    let ranks = runs
        .into_iter()
        .map(|runs| (runs.iter().map(|run| run.count).sum(), runs));
    Ok(Table {
        ranks: ranks.collect(),
    })
}

impl Sharding for Tabled {
    fn name(&self) -> &str {
        &self.family.name
    }

    fn parameters(&self) -> Option<&str> {
        Some(self.parameters.as_str()).filter(|parameters| !parameters.is_empty())
    }

    fn is_known(&self) -> bool {
        self.family.is_active()
    }

    fn fits(&self, size: u64, ranks: u64) -> bool {
        self.table(size, ranks).is_some()
    }

    fn held(&self, size: u64, ranks: u64, rank: u64) -> u64 {
        let table = self.table(size, ranks);
        table.map_or(0, |table| table.ranks.get(rank as usize).map_or(0, |r| r.0))
    }

    fn split(&self, size: u64, ranks: u64, index: u64) -> (u64, u64) {
        let Some(table) = self.table(size, ranks) else {
            return (0, 0);
        };
        for (rank, (_, runs)) in table.ranks.iter().enumerate() {
            let mut before = 0;
            for run in runs {
                if let Some(place) = run.place(index) {
                    return (rank as u64, before + place);
                }
                before += run.count;
            }
        }
        (0, 0)
    }

    fn merge(&self, size: u64, ranks: u64, rank: u64, local: u64) -> u64 {
        let table = self.table(size, ranks);
        let mut left = local;
        for run in table
            .iter()
            .flat_map(|t| t.ranks.get(rank as usize))
            .flat_map(|r| &r.1)
        {
            if left < run.count {
                return run.at(left);
            }
            left -= run.count;
        }
        0
    }

    fn runs(&self, size: u64, ranks: u64, rank: u64) -> Option<Vec<Run>> {
        let table = self.table(size, ranks)?;
        table.ranks.get(rank as usize).map(|r| r.1.clone())
    }

    fn fills_as(&self, _family: &str, base: &str, op: &str) -> bool {
        self.family.is.fills(base, op).unwrap_or_else(|reason| {
            note_fault(PropagationError::Sharding {
                name: self.family.name.clone(),
                expected: format!("whether it may fill the rule of {op}"),
                found: reason,
            });
            false
        })
    }
}

thread_local! {
    /// What a caller could not say while this thread made an answer.
    static FAULT: RefCell<Option<PropagationError>> = const { RefCell::new(None) };
}

fn note_fault(fault: PropagationError) {
    FAULT.with_borrow_mut(|first| {
        first.get_or_insert(fault);
    });
}

/// An answer, unless a caller's function failed while it was made.
pub(super) fn unless_faulty<T>(
    make: impl FnOnce() -> Result<T, PropagationError>,
) -> Result<T, PropagationError> {
    let before = FAULT.take();
    let made = make();
    match FAULT.replace(before) {
        Some(fault) => Err(fault),
        None => made,
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use std::sync::OnceLock;
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{
        Arg, Layout, Mesh, Placement, Propagation, Query, ShardingId, Topology, propagate,
        standard_rules, written,
    };

    /// Units of a dim per rank, as veScale has them.
    struct Ragged;

    static ASKED: AtomicUsize = AtomicUsize::new(0);

    impl Splits for Ragged {
        fn runs(&self, parameters: &str, size: u64, ranks: u64) -> Result<Option<Runs>, String> {
            ASKED.fetch_add(1, Ordering::Relaxed);
            if parameters == "7" {
                return Err("seven is refused".into());
            }
            let units: Vec<u64> = parameters.split(',').map(|n| n.parse().unwrap()).collect();
            let whole: u64 = units.iter().sum();
            if units.len() as u64 != ranks || size % whole != 0 {
                return Ok(None);
            }
            let mut start = 0;
            let run = |units: &u64| {
                let count = size / whole * units;
                start += count;
                vec![Run {
                    start: start - count,
                    step: 1,
                    count,
                }]
            };
            Ok(Some(units.iter().map(run).collect()))
        }

        fn fills(&self, base: &str, op: &str) -> Result<bool, String> {
            match op {
                "aten::exp" => Ok(false),
                "aten::tanh" => Err(format!("not known of {base}")),
                _ => Ok(true),
            }
        }
    }

    fn ragged() {
        static ONCE: OnceLock<()> = OnceLock::new();
        ONCE.get_or_init(|| register_family("Ragged", Ragged).unwrap());
    }

    fn ask(op: &str, on: &str, args: &[&str]) -> Result<Propagation, PropagationError> {
        ragged();
        let mesh = Mesh::parse(on).unwrap();
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let topology = Topology::one_node(&mesh).in_dtensors_order();
        propagate(
            standard_rules().unwrap(),
            &Query { op, args: &args },
            &mesh,
            &topology,
        )
    }

    fn placed(op: &str, on: &str, args: &[&str]) -> String {
        let found = ask(op, on, args).unwrap();
        let inputs: Vec<_> = found.inputs.iter().map(|i| written(&i.to)).collect();
        let outputs: Vec<_> = found
            .outputs
            .iter()
            .map(|o| written(&o.placements))
            .collect();
        format!("{} -> {}", inputs.join(" "), outputs.join(" "))
    }

    #[test]
    fn a_sharding_is_known_by_its_parameters() {
        ragged();
        let number = |text: &str| {
            let placement = Placement::parse(text).unwrap();
            assert_eq!(placement.to_string(), text.replace(' ', ""));
            placement.registered().unwrap()
        };
        let first = number("Ragged(0,1,3)");
        assert_eq!(first, number("Ragged(1,1,3)"));
        assert_eq!(first, number("Ragged(0, 1, 3)"));
        assert_eq!(Some(first), ShardingId::numbered(first.number()));
        for other in [
            "Ragged(0,3,1)",
            "Ragged(0,1,3,1)",
            "Ragged(0,[1,3])",
            "Ragged(0)",
        ] {
            assert_ne!(first, number(other), "{other}");
        }
        for text in [
            "Ragged(0,x)",
            "Ragged(a,1)",
            "Ragged(,1)",
            "Raggedy(0,1,3)",
            "Ragged(-1,1,3)",
        ] {
            assert!(Placement::parse(text).is_err(), "{text}");
        }
    }

    #[test]
    fn shards_of_the_same_parameters_meet_and_others_do_not() {
        for (op, args, expected) in [
            (
                "aten::mm",
                ["f32[8,6] @ Ragged(1,1,2)", "f32[6,4] @ Ragged(0,1,2)"],
                "Ragged(1,1,2) Ragged(0,1,2) -> P(sum)",
            ),
            (
                "aten::add.Tensor",
                ["f32[8,6] @ Ragged(0,1,3)", "f32[6] @ R"],
                "Ragged(0,1,3) R -> Ragged(0,1,3)",
            ),
            (
                "aten::mm",
                ["f32[8,6] @ Ragged(1,1,2)", "f32[6,4] @ Ragged(0,2,1)"],
                "Ragged(1,1,2) Ragged(0,1,2) -> P(sum)",
            ),
            // 12 elements are 3 units of 4, 8 are none.
            (
                "aten::mm",
                ["f32[8,12] @ Ragged(1,1,2)", "f32[12,8] @ R"],
                "Ragged(1,1,2) Ragged(0,1,2) -> P(sum)",
            ),
        ] {
            assert_eq!(placed(op, "2", &args), expected);
        }
        // The ways between two of them lead through R.
        let found = ask(
            "aten::add.Tensor",
            "2",
            &["f32[8,6] @ Ragged(0,1,3)", "f32[8,6] @ Ragged(0,3,1)"],
        )
        .unwrap();
        let steps: Vec<String> = (found.inputs.iter().flat_map(|i| &i.steps))
            .map(|s| format!("{}->{}", s.from, s.to))
            .collect();
        assert!(
            steps
                .iter()
                .all(|s| s.ends_with("->R") || s.starts_with("R->")),
            "{steps:?}"
        );
        assert!(!steps.is_empty());
    }

    #[test]
    fn a_shard_that_does_not_fit_fills_nothing() {
        // The halves of 12 have 6 elements, which are no 4 units.
        let found = placed(
            "aten::add.Tensor",
            "2,2",
            &["f32[12] @ S(0),R", "f32[12] @ R,Ragged(0,1,3)"],
        );
        assert!(!found.starts_with("S(0),Ragged"), "{found}");
        // Those of 16 have 8.
        let found = placed("aten::relu", "2,2", &["f32[16] @ S(0),Ragged(0,1,3)"]);
        assert_eq!(found, "S(0),Ragged(0,1,3) -> S(0),Ragged(0,1,3)");
        let error = ask("aten::relu", "2", &["f32[9] @ Ragged(0,1,3)"]).unwrap_err();
        assert!(
            error
                .to_string()
                .contains("expected shards that fit f32[9] on mesh"),
            "{error}"
        );
    }

    #[test]
    fn what_the_caller_cannot_say_is_an_error() {
        let error = ask("aten::relu", "2", &["f32[8] @ Ragged(0,7)"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "sharding Ragged, parameters (7), of 8 elements on 2 ranks: seven is refused"
        );
        let error = ask("aten::tanh", "2", &["f32[8] @ Ragged(0,1,3)"]).unwrap_err();
        assert!(
            error.to_string().ends_with("found not known of aten::tanh"),
            "{error}"
        );
        // It is no error of the next question.
        assert_eq!(
            placed("aten::relu", "2", &["f32[8] @ Ragged(0,1,3)"]),
            "Ragged(0,1,3) -> Ragged(0,1,3)"
        );
        assert_eq!(
            placed("aten::exp", "2", &["f32[8] @ Ragged(0,1,3)"]),
            "R -> R"
        );
    }

    #[test]
    fn the_caller_is_asked_once() {
        placed("aten::relu", "2", &["f32[800] @ Ragged(0,3,97)"]);
        let before = ASKED.load(Ordering::Relaxed);
        let asked = |size: u64| {
            let sharding = Placement::parse("Ragged(0,3,97)")
                .unwrap()
                .registered()
                .unwrap()
                .sharding();
            sharding.fits(size, 2)
        };
        assert!(asked(800) && asked(800));
        // Other tests ask of their own shardings meanwhile; a new size is asked about.
        assert!(asked(1_000_000_000));
        assert!(ASKED.load(Ordering::Relaxed) > before);
        // A dim of 10^9 elements is laid out in ranges.
        let placement = [Placement::parse("Ragged(0,3,97)").unwrap()];
        let layout = Layout::of(1_000_000_000, 0, &placement, &[2], &[1]).unwrap();
        assert_eq!(
            (layout.size(), layout.global(5)),
            (970_000_000, Some(30_000_005))
        );
    }

    #[test]
    fn every_index_is_on_one_rank() {
        let run = |start, step, count| Run { start, step, count };
        for (ranks, reason) in [
            (
                vec![vec![run(0, 1, 4)]],
                "expected the indices of 2 ranks, found those of 1",
            ),
            (
                vec![vec![run(0, 1, 4)], vec![run(5, 1, 3)]],
                "index 4 is on no rank",
            ),
            (
                vec![vec![run(0, 1, 4)], vec![run(4, 1, 3)]],
                "index 7 is on no rank",
            ),
            (
                vec![vec![run(0, 1, 5)], vec![run(4, 1, 4)]],
                "index 4 is on ranks 0 and 1",
            ),
            (
                vec![vec![run(0, 1, 4), run(2, 1, 1)], vec![run(4, 1, 4)]],
                "rank 0 holds index 2 twice",
            ),
            (
                vec![vec![run(0, 1, 4)], vec![run(4, 1, 5)]],
                "index 8 on rank 1 is none below 8",
            ),
            (
                vec![vec![run(0, 2, 4)], vec![run(0, 2, 4)]],
                "index 0 is on ranks 0 and 1",
            ),
            (
                vec![vec![run(0, 2, 4)], vec![run(3, 2, 3)]],
                "index 1 is on no rank",
            ),
            (
                vec![vec![run(0, 0, 2)], vec![run(1, 1, 7)]],
                "rank 0 holds index 0 twice",
            ),
            (
                vec![vec![run(1, -2, 2)], vec![]],
                "index -1 on rank 0 is none below 8",
            ),
            (
                vec![vec![run(u64::MAX, 1, 2)], vec![]],
                "index 18446744073709551615 on rank 0 is none below 8",
            ),
        ] {
            assert_eq!(table(ranks, 8, 2).err().as_deref(), Some(reason));
        }
        for ranks in [
            vec![vec![run(0, 1, 8)], vec![]],
            vec![vec![run(0, 2, 4)], vec![run(1, 2, 4)]],
            vec![vec![run(7, -1, 8)], vec![run(3, 5, 0)]],
            vec![vec![run(6, 1, 2), run(0, 1, 1)], vec![run(1, 1, 5)]],
        ] {
            assert!(table(ranks, 8, 2).is_ok());
        }
    }

    #[test]
    fn a_family_that_was_forgotten_leaves_its_name() {
        assert!(register_family("R", Ragged).is_err());
        register_family("Gone", Ragged).unwrap();
        assert!(register_family("Gone", Ragged).is_err());
        let before = Placement::parse("Gone(0,1,3)").unwrap();
        assert!(forget_family("Gone") && !forget_family("Gone"));
        assert!(Placement::parse("Gone(0,1,3)").is_err());
        register_family("Gone", Ragged).unwrap();
        assert_ne!(Placement::parse("Gone(0,1,3)").unwrap(), before);
    }
}
