//! Ops whose results nothing needs.
//!
//! Needed is what outlives the run, what a collective sends (other ranks wait
//! for it), what moves a generator, what an op outside of ATen may do, and ops that
//! raise for some values (an index out of range, a singular matrix). An op
//! is needed when it makes or writes storage that something needed reads, and
//! then so is what it reads. Everything else changes nothing that anybody sees.

use rote_plans::schedule::Ops;
use rote_plans::{Instr, Plan, is_check};

use super::effects::{self, for_each_written, outlives, root};
use super::{Done, Pass, Program, Stage};
use crate::liveness::{for_each_out, for_each_value};
use crate::ops::may_raise;

pub(super) const PASS: Pass = Pass {
    name: "dead",
    about: "leave out ops whose results nothing needs",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

fn apply(program: &mut Program, _ops: &dyn Ops) -> Done {
    let plan = &mut program.plan;
    let keep = needed(plan);
    let local = |instr: &Instr| matches!(instr, Instr::Local { .. });
    let instrs = plan.instrs.iter().zip(&keep);
    let changed = instrs
        .filter(|(instr, keep)| local(instr) && !**keep)
        .count();
    effects::retain(plan, &keep);
    Done {
        changed,
        what: format!("{changed} ops that nothing needs"),
    }
}

/// Which instructions something needs.
fn needed(plan: &Plan) -> Vec<bool> {
    let mut needed = outlives(plan);
    let mut keep = vec![false; plan.instrs.len()];
    for (i, instr) in plan.instrs.iter().enumerate().rev() {
        let mut live = acts(plan, instr);
        for_each_out(plan, instr, |out| live |= needed[root(plan, out) as usize]);
        for_each_written(plan, instr, |root| live |= needed[root as usize]);
        if live {
            for_each_value(plan, instr, |value| {
                needed[root(plan, value) as usize] = true
            });
        }
        keep[i] = live;
    }
    keep
}

/// Whether an instruction is needed whatever its results are.
fn acts(plan: &Plan, instr: &Instr) -> bool {
    match instr {
        Instr::Local {
            op,
            outs,
            writes,
            seeded,
            ..
        } => {
            // Ops of other libraries may all raise.
            *seeded
                || (outs.len == 0 && writes.len == 0)
                || is_check(plan.str(*op))
                || may_raise(plan, instr)
        }
        Instr::View { .. } => false,
        Instr::Collective(_) | Instr::Wait { .. } | Instr::Rng { .. } | Instr::Free { .. } => true,
    }
}
