//! Backends that have not all ops: for tests.

use std::collections::HashSet;

use rote_aten_ops::AtenOps;
use rote_plans::schedule::{Into, Ops};
use rote_plans::{Device, Instr, Plan};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::Program;

type Names = (String, String);

/// A backend that has the ops of a recorded plan, and of the others those that a seed chooses.
pub struct SomeOps {
    seed: Option<u64>,
    recorded: HashSet<Names>,
}

impl SomeOps {
    /// One that has no others.
    pub fn of(recorded: &Plan) -> Self {
        SomeOps {
            seed: None,
            recorded: ops_of(recorded),
        }
    }

    /// One that has half of the others.
    pub fn and_others(recorded: &Plan, seed: u64) -> Self {
        SomeOps {
            seed: Some(seed),
            ..Self::of(recorded)
        }
    }

    fn chosen(&self, name: &str, overload: &str) -> bool {
        let hash = |seed| xxh3_64_with_seed(format!("{name}.{overload}").as_bytes(), seed);
        self.seed.is_some_and(|seed| hash(seed) % 2 == 0)
    }

    /// An op of a program that it has not, or that does not write where the program says.
    pub fn lacks(&self, program: &Program) -> Option<Names> {
        let plan = &program.plan;
        let missing = |names: &Names| !self.has(&names.0, &names.1);
        let cannot_write = |(at, into): &(u32, Into)| match &plan.instrs[*at as usize] {
            Instr::Local { op, overload, .. } if *into != Into::Nothing => {
                let names = (plan.str(*op), plan.str(*overload));
                let wrong = self.writes_into(names.0, names.1) != Some(*into);
                wrong.then(|| (names.0.to_owned(), names.1.to_owned()))
            }
            _ => None,
        };
        (ops_of(plan).into_iter().find(missing))
            .or_else(|| program.schedule.into.iter().find_map(cannot_write))
    }
}

impl Ops for SomeOps {
    fn has(&self, name: &str, overload: &str) -> bool {
        let names = (name.to_owned(), overload.to_owned());
        self.recorded.contains(&names) || self.chosen(name, overload)
    }

    fn writes_into(&self, name: &str, overload: &str) -> Option<Into> {
        AtenOps
            .writes_into(name, overload)
            .filter(|_| self.chosen(overload, name))
    }

    fn copies_inputs(&self) -> bool {
        self.chosen("copies", "inputs")
    }

    fn gathers_in_place(&self) -> bool {
        self.chosen("gathers", "in place")
    }

    fn alignment(&self, _device: Device) -> u64 {
        64 << (self.seed.unwrap_or(0) % 4)
    }
}

/// The ops of a plan, with their overloads.
fn ops_of(plan: &Plan) -> HashSet<Names> {
    let names = |instr: &Instr| match instr {
        Instr::Local { op, overload, .. } => {
            Some((plan.str(*op).to_owned(), plan.str(*overload).to_owned()))
        }
        _ => None,
    };
    plan.instrs.iter().filter_map(names).collect()
}
