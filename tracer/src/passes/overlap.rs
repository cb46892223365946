//! Collectives start as soon as their input is there, and are waited for when
//! their result is needed.
//!
//! A start moves up to just after the last instruction that makes or writes its
//! input, or reads it where the result replaces it; and a wait down to just
//! before the first that looks at the result or writes what is being sent.
//! Neither passes another start, so every rank issues
//! the same collectives in the same order as in eager, with this pass or
//! without; and no instruction sees other bytes than before. What is sent and
//! what is received live longer, so memory can grow.

use rote_plans::{Instr, Plan, ValueId};

use super::effects::{self, for_each_written, root};
use super::{Done, Pass, Program, Stage};
use crate::finish::{for_each_out, for_each_value};

pub(super) const PASS: Pass = Pass {
    name: "overlap",
    about: "start collectives early and wait for them late (more memory)",
    by_default: false,
    alters_collectives: false,
    keeps_bits: true,
    stage: Stage::Instructions,
    apply,
};

fn apply(program: &mut Program) -> Done {
    let plan = &mut program.plan;
    let mut order: Vec<usize> = (0..plan.instrs.len()).collect();
    let (mut early, mut late) = (0, 0);
    for at in 0..order.len() {
        if let Instr::Collective(c) = plan.instrs[order[at]] {
            let storages = [root(plan, c.input), root(plan, c.output)];
            let mut to = at;
            while to > 0 && !holds_up(plan, order[to - 1], storages) {
                to -= 1;
            }
            early += at - to;
            order[to..=at].rotate_right(1);
        }
    }
    for at in (0..order.len()).rev() {
        if let Instr::Wait { value } = plan.instrs[order[at]] {
            let Some(sent) = sent(plan, &order[..at], value) else {
                continue;
            };
            let mut to = at;
            while to + 1 < order.len() && !needs(plan, order[to + 1], root(plan, value), sent) {
                to += 1;
            }
            late += to - at;
            order[at..=to].rotate_left(1);
        }
    }
    effects::reorder(plan, &order);
    Done {
        changed: early + late,
        what: format!("starts move up by {early} instructions in all, waits down by {late}"),
    }
}

/// Whether a start must stay behind an instruction.
fn holds_up(plan: &Plan, before: usize, storages: [ValueId; 2]) -> bool {
    let instr = &plan.instrs[before];
    if matches!(instr, Instr::Collective(_)) {
        return true;
    }
    let mut found = false;
    let mut look = |root: ValueId| found |= storages.contains(&root);
    for_each_out(plan, instr, |v| look(root(plan, v)));
    for_each_written(plan, instr, &mut look);
    if storages[0] == storages[1] {
        for_each_value(plan, instr, |v| look(root(plan, v)));
    }
    if let Instr::Wait { value } = instr {
        look(root(plan, *value));
    }
    found
}

/// What the collective that a wait belongs to is sending.
fn sent(plan: &Plan, before: &[usize], value: ValueId) -> Option<ValueId> {
    before.iter().rev().find_map(|at| match plan.instrs[*at] {
        Instr::Collective(c) if root(plan, c.output) == root(plan, value) => {
            Some(root(plan, c.input))
        }
        _ => None,
    })
}

/// Whether an instruction must stay behind a wait.
fn needs(plan: &Plan, after: usize, result: ValueId, sent: ValueId) -> bool {
    let instr = &plan.instrs[after];
    // Views only say where to look: what reads them comes later.
    if let Instr::View { .. } = instr {
        return false;
    }
    let mut found = matches!(instr, Instr::Wait { value } if root(plan, *value) == result);
    for_each_value(plan, instr, |v| found |= root(plan, v) == result);
    for_each_written(plan, instr, |root| found |= root == result || root == sent);
    found
}
