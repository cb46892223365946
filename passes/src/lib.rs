//! Passes: what makes a plan faster to replay, with the same bits as before.
//!
//! They run when a plan is bound, on a copy in memory, so a plan file holds
//! what was recorded and any pass can be left out without recording again. The
//! file of each pass says why it is safe.
//!
//! | module | pass |
//! |---|---|
//! | `scalars` | ops with a number as ops with a tensor that wraps it |
//! | `copies` | copies that are never told apart from what they copy |
//! | `common` | the same op on the same tensors, once |
//! | `dead` | ops whose results nothing needs |
//! | `joins` | evenly spaced pieces joined by one copy |
//! | `overlap` | collectives started early and waited for late |
//! | `buckets` | small collectives of one kind as one |
//! | `constants` | what depends on nothing but constants, in the first run only |
//! | `arena` | results at fixed places, written there directly |
//! | `budget` | which results lie in the arena, so that memory stays within what was recorded |
//! | `live` | bytes that are alive at each instruction |
//! | `gathers` | all-gathers whose output may lie where their input lies |
//! | [`liveness`] | last uses, frees, dead views |
//! | [`ops`] | what is known of ops by their names |
//! | `lists` | entries of its own for every list, before any pass |
//! | `effects` | what instructions read, write and make |
//! | `emit` | instructions and values that passes add |
//!
//! Tests hold them against what was recorded on paper (`paper.rs`), over random plans
//! (`random.rs`), and plant bugs to see that they are found (`planted.rs`). Under Miri
//! these take minutes each, and neither they nor the passes have unsafe code.

#![forbid(unsafe_code)]

#[cfg(test)]
#[cfg(not(miri))]
mod altering;
mod arena;
mod buckets;
mod budget;
mod common;
mod constants;
mod copies;
mod dead;
mod effects;
pub mod emit;
mod gathers;
mod joins;
#[cfg(test)]
mod lacking;
mod lists;
mod live;
pub mod liveness;
pub mod ops;
mod overlap;
#[cfg(test)]
#[cfg(not(miri))]
mod paper;
#[cfg(test)]
#[cfg(not(miri))]
mod planted;
#[cfg(test)]
#[cfg(not(miri))]
mod random;
mod scalars;
#[cfg(test)]
mod tests;

pub use effects::{reorder, replace, replace_in};
use rote_plans::schedule::Ops;
use rote_plans::{Collective, Instr, NONE, Plan, Schedule, ValueId};

use crate::liveness::finish_values;

/// A plan on its way through the passes.
#[derive(Clone, Debug)]
pub struct Program {
    /// The plan. Passes over instructions see it without [`Instr::Free`].
    pub plan: Plan,
    /// How it runs; filled by the passes after liveness.
    pub schedule: Schedule,
    /// For each collective of the plan, in order: which of the recorded ones it
    /// carries out, counted from 0, in the order in which their elements lie in
    /// it. A pass that alters collectives keeps this: by it the ranks see that
    /// they mean the same ones.
    pub carries: Vec<Vec<u32>>,
    /// The most bytes of results alive at once in the plan as recorded.
    pub recorded: u64,
    /// For each value of the plan, the recorded one that it is, or
    /// [`rote_plans::NONE`] for one that a pass has added.
    pub values: Vec<ValueId>,
}

/// Bytes that a run may need beyond those of the recorded plan, at least, and else a
/// 256th: offsets are rounded up where allocations of their own are counted by what
/// was asked for, and numbers that ops take as tensors are kept.
const ROUNDING: u64 = 512;

/// The same for a plan that was recorded with these bytes.
fn rounding(recorded: u64) -> u64 {
    ROUNDING.max(recorded / 256)
}

impl Program {
    /// The most bytes that it may need.
    fn allowed(&self) -> u64 {
        self.recorded + rounding(self.recorded)
    }

    /// Whether a plan in the place of its own needs no more bytes than that or than
    /// it may need.
    fn has_room(&self, plan: &Plan, ops: &dyn Ops) -> bool {
        most(plan, ops) <= self.allowed().max(most(&self.plan, ops))
    }

    /// Gives results their places again, once a run without an arena has shown what
    /// ops allocate for themselves. `allocated`: for each instruction, the most bytes
    /// that it had allocated at once, its results included.
    pub fn arrange(&mut self, ops: &dyn Ops, allocated: &[u64]) -> Done {
        arena::arrange(self, ops, allocated)
    }
}

/// What a pass did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// How many things it changed.
    pub changed: usize,
    /// What they are, for people.
    pub what: String,
}

/// When a pass runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Over instructions without frees.
    Instructions,
    /// Over the finished plan, to fill its schedule.
    Schedule,
}

/// One pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass {
    /// Its name in `passes=` and `ROTE_PASSES`.
    pub name: &'static str,
    /// What it does, in one line.
    pub about: &'static str,
    /// Whether it runs unless it is named.
    pub by_default: bool,
    /// Whether it changes the number or the order of collectives: ranks must
    /// agree before they replay what it leaves. It keeps [`Program::carries`].
    pub alters_collectives: bool,
    /// Whether every result has the bits of eager. If not, `all` leaves it out.
    pub keeps_bits: bool,
    /// Ops that it puts into plans, by name and overload: without one of them it does nothing.
    needs: &'static [(&'static str, &'static str)],
    stage: Stage,
    apply: fn(&mut Program, &dyn Ops) -> Done,
}

/// Every pass, in the order in which they run.
pub const PASSES: &[Pass] = &[
    scalars::PASS,
    copies::PASS,
    common::PASS,
    dead::PASS,
    joins::PASS,
    overlap::PASS,
    buckets::PASS,
    buckets::SUMS,
    constants::PASS,
    arena::PASS,
];

/// Which passes run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selection(u32);

/// A name that no pass has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "unknown pass {found:?}: expected all, none, default, or names of {known}, with - before those to leave out and + before those to add"
)]
pub struct UnknownPass {
    found: String,
    known: String,
}

impl Default for Selection {
    /// The passes that run unless another choice is made.
    fn default() -> Self {
        Self::of(|pass| pass.by_default)
    }
}

impl std::str::FromStr for Selection {
    type Err = UnknownPass;

    fn from_str(text: &str) -> Result<Self, UnknownPass> {
        Self::parse(text)
    }
}

impl Selection {
    /// No pass.
    pub const NONE: Selection = Selection(0);

    fn of(chosen: impl Fn(&Pass) -> bool) -> Self {
        let bits = PASSES.iter().enumerate();
        Selection(bits.fold(0, |set, (at, pass)| set | u32::from(chosen(pass)) << at))
    }

    /// Reads a list separated by commas: `all` (that keep bits), `none`, `default`,
    /// names of passes to run, names after `-` to leave out. A list that begins with a
    /// name runs the named passes alone; one that begins with `-` or `+` changes
    /// the default.
    ///
    /// # Errors
    ///
    /// [`UnknownPass`] for a name that no pass has.
    pub fn parse(text: &str) -> Result<Self, UnknownPass> {
        let mut words = text.split(',').map(str::trim).filter(|w| !w.is_empty());
        let mut first = true;
        words.try_fold(Selection::default(), |set, word| {
            let begins = std::mem::replace(&mut first, false);
            let (sign, name) = match word.split_at_checked(1) {
                Some(("-", name)) => (-1, name),
                Some(("+", name)) => (1, name),
                _ => (0, word),
            };
            let (bits, named) = match name {
                "all" => (Self::of(|pass| pass.keeps_bits).0, true),
                "none" => (0, true),
                "default" => (Self::default().0, true),
                name => (Self::of(|p| p.name == name).0, false),
            };
            if bits == 0 && !named {
                let known: Vec<_> = PASSES.iter().map(|p| p.name).collect();
                return Err(UnknownPass {
                    found: name.to_owned(),
                    known: known.join(", "),
                });
            }
            Ok(Selection(match sign {
                -1 => set.0 & !bits,
                0 if begins => bits,
                _ => set.0 | bits,
            }))
        })
    }

    /// Whether a pass runs.
    pub fn has(self, name: &str) -> bool {
        self.0 & Self::of(|p| p.name == name).0 != 0
    }

    /// Whether a pass runs that changes the number or the order of collectives.
    pub fn alters_collectives(self) -> bool {
        self != self.keeping_collectives()
    }

    /// The same without such passes: what is left issues the collectives of
    /// eager, in eager's order.
    #[must_use]
    pub fn keeping_collectives(self) -> Selection {
        Selection(self.0 & Self::of(|p| !p.alters_collectives).0)
    }
}

/// What the chosen passes did, in their order.
pub type Report = Vec<(&'static str, Done)>;

/// Runs the chosen passes over a recorded plan, for a backend that has these ops.
pub fn optimize(plan: Plan, chosen: Selection, ops: &dyn Ops) -> (Program, Report) {
    let recorded = most(&plan, ops);
    let mut plan = without_frees(plan);
    lists::unshare(&mut plan);
    let groups: Vec<u32> = collectives(&plan).map(|c| c.group).collect();
    let mut program = Program {
        carries: (0..groups.len() as u32).map(|at| vec![at]).collect(),
        plan,
        schedule: Schedule::default(),
        recorded,
        values: Vec::new(),
    };
    let known = program.plan.values.len() as ValueId;
    let mut report = Report::new();
    let mut run = |stage: Stage, program: &mut Program| {
        for pass in PASSES.iter().filter(|p| p.stage == stage) {
            if chosen.has(pass.name) {
                report.push((pass.name, run_pass(program, pass, ops)));
                check_carries(program, &groups, pass.name);
            }
        }
    };
    run(Stage::Instructions, &mut program);
    let sources = vec![String::new(); program.plan.instrs.len()];
    let (plan, _, values) = finish_values(program.plan, sources);
    program.plan = plan;
    let recorded_one = |value: ValueId| if value < known { value } else { NONE };
    program.values = values.into_iter().map(recorded_one).collect();
    run(Stage::Schedule, &mut program);
    (program, report)
}

/// A finished plan without some of its instructions, which nothing may need but for
/// what they write.
pub fn without(plan: &mut Plan, instr: usize) {
    let keep: Vec<bool> = (0..plan.instrs.len()).map(|at| at != instr).collect();
    let last_uses: Vec<_> = plan.values.iter().map(|value| value.last_use).collect();
    effects::retain(plan, &keep);
    for (value, at) in plan.values.iter_mut().zip(last_uses) {
        value.last_use = match at {
            NONE => NONE,
            at => at - u32::from(at as usize > instr),
        };
    }
}

/// The collectives of a plan, in order.
fn collectives(plan: &Plan) -> impl Iterator<Item = &Collective> {
    plan.instrs.iter().filter_map(|instr| match instr {
        Instr::Collective(c) => Some(c),
        _ => None,
    })
}

/// Panics when a pass lost track of what its collectives carry out. `groups`:
/// those of the recorded ones.
fn check_carries(program: &Program, groups: &[u32], pass: &str) {
    let mut carried = vec![false; groups.len()];
    let mut left = program.carries.iter();
    for c in collectives(&program.plan) {
        let parts = left.next().filter(|parts| !parts.is_empty());
        let known = parts.into_iter().flatten().all(|&part| {
            groups.get(part as usize) == Some(&c.group)
                && !std::mem::replace(&mut carried[part as usize], true)
        });
        assert!(
            known && parts.is_some(),
            "pass {pass} does not say which recorded collectives of its group {c:?} carries out"
        );
    }
    assert!(
        left.next().is_none(),
        "pass {pass} says of more collectives than there are what they carry out"
    );
}

/// Applies a pass, unless the backend lacks an op that it needs.
fn run_pass(program: &mut Program, pass: &Pass, ops: &dyn Ops) -> Done {
    match pass
        .needs
        .iter()
        .find(|(name, overload)| !ops.has(name, overload))
    {
        Some((name, _)) => Done {
            changed: 0,
            what: format!("left out: the backend has no {name}"),
        },
        None => within_memory(program, pass, ops),
    }
}

/// Applies a pass, unless it is a default one and what it keeps alive would need
/// more memory than was recorded.
fn within_memory(program: &mut Program, pass: &Pass, ops: &dyn Ops) -> Done {
    if pass.stage == Stage::Schedule || !pass.by_default {
        return (pass.apply)(program, ops);
    }
    let before = program.clone();
    let done = (pass.apply)(program, ops);
    if before.has_room(&program.plan, ops) {
        return done;
    }
    let most = most(&program.plan, ops);
    *program = before;
    Done {
        changed: 0,
        what: format!(
            "left out: {most} bytes at once, as recorded {}",
            program.recorded
        ),
    }
}

/// The most bytes of results alive at once.
fn most(plan: &Plan, ops: &dyn Ops) -> u64 {
    live::Bytes::of_results(plan, ops).most().0
}

/// A finished plan as it was before [`finish`].
fn without_frees(mut plan: Plan) -> Plan {
    let keep: Vec<bool> = (plan.instrs.iter())
        .map(|instr| !matches!(instr, Instr::Free { .. }))
        .collect();
    effects::retain(&mut plan, &keep);
    plan
}
