//! What depends on nothing but constants is run in the first run only (of a plan
//! whose results have their places: the one before, which shows what these may be,
//! runs everything).
//!
//! An op that makes results from its arguments ([`is_function`]) and reads
//! nothing, or only the meta of its arguments, or only such results, makes the
//! same bits at every run; so does an op that writes such results, if every op
//! that writes them is of this kind, and no other op reads them before the last
//! of these writes: later runs find what the last one left. Numbers that are read anew at every replay,
//! collectives, what outlives the run (returned tensors are fresh), and whatever
//! a later op writes do not take part. Kept results are limited in size.

use rote_plans::schedule::Ops;
use rote_plans::{Arg, Instr, Plan, Range};

use super::effects::{
    for_each_written, is_function, outlives, outs, reads_meta_only, root, writes,
};
use super::{Done, Pass, Program, Stage};
use crate::liveness::for_each_value;

pub(super) const PASS: Pass = Pass {
    name: "constants",
    about: "compute results that depend on constants alone once",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Schedule,
    apply,
};

/// The most bytes of one kept result.
const MAX_BYTES: u64 = 1 << 20;
/// The most bytes of all kept results.
const MAX_TOTAL: u64 = 64 << 20;

fn apply(program: &mut Program, _ops: &dyn Ops) -> Done {
    let plan = &program.plan;
    let (outlives, writes) = (outlives(plan), writes(plan));
    // Roots that may be kept; each round takes out what a run writes or makes.
    let mut kept: Vec<bool> = (plan.values.iter().zip(&outlives))
        .map(|(value, outlives)| !outlives && value.storage_bytes <= MAX_BYTES)
        .collect();
    let mut once = vec![false; plan.instrs.len()];
    let mut bytes;
    loop {
        settle(plan, &writes, &mut kept, &mut once);
        // Too much to keep: the later results are made anew at every run.
        bytes = 0;
        let mut over = false;
        for (instr, _) in plan.instrs.iter().zip(&once).filter(|(_, once)| **once) {
            for out in outs(plan, instr) {
                bytes += plan.values[out as usize].storage_bytes;
                if bytes > MAX_TOTAL {
                    over |= std::mem::replace(&mut kept[root(plan, out) as usize], false);
                }
            }
        }
        if !over {
            break;
        }
    }
    let changed = (plan.instrs.iter().zip(&once))
        .filter(|(instr, once)| **once && matches!(instr, Instr::Local { .. }))
        .count();
    program.schedule.once = once;
    Done {
        changed,
        what: format!("{changed} ops run once; {bytes} bytes are kept"),
    }
}

/// Takes out of `kept` what a later run makes or writes, or reads as it was
/// before a write, until nothing changes, and marks the instructions that run
/// once.
fn settle(plan: &Plan, writes: &[Vec<u32>], kept: &mut [bool], once: &mut [bool]) {
    loop {
        let mut changed = false;
        for (i, instr) in plan.instrs.iter().enumerate() {
            once[i] = constant(plan, instr, kept);
            if once[i] || matches!(instr, Instr::View { .. } | Instr::Free { .. }) {
                continue;
            }
            let mut drop =
                |root: u32| changed |= std::mem::replace(&mut kept[root as usize], false);
            for out in outs(plan, instr) {
                drop(root(plan, out));
            }
            for_each_written(plan, instr, &mut drop);
            for_each_value(plan, instr, |value| {
                let root = root(plan, value);
                if writes[root as usize].last() > Some(&(i as u32)) {
                    drop(root);
                }
            });
        }
        if !changed {
            return;
        }
    }
}

/// Whether an instruction does the same at every run, if the `kept` roots hold
/// the same at every run.
fn constant(plan: &Plan, instr: &Instr, kept: &[bool]) -> bool {
    match instr {
        Instr::View { base, .. } => kept[root(plan, *base) as usize],
        Instr::Local {
            op,
            args,
            outs,
            writes,
            seeded,
            ..
        } => {
            let name = plan.str(*op);
            if *seeded || !name.starts_with("aten::") || has_scalar(plan, *args) {
                return false;
            }
            let mut all = true;
            if !reads_meta_only(name) {
                for_each_value(plan, instr, |value| all &= kept[root(plan, value) as usize]);
            }
            let made = plan.ids(*outs).iter().filter(|v| **v != rote_plans::NONE);
            let made = made.chain(plan.ids(*writes));
            all && (writes.len > 0 || is_function(plan, instr))
                && made.map(|v| root(plan, *v)).all(|root| kept[root as usize])
        }
        _ => false,
    }
}

/// Whether an argument is read anew at every replay.
fn has_scalar(plan: &Plan, args: Range) -> bool {
    plan.args[args.indices()].iter().any(|arg| match arg {
        Arg::Scalar(_) => true,
        Arg::Wrapped(inner) => matches!(plan.args[*inner as usize], Arg::Scalar(_)),
        Arg::List(range) => has_scalar(plan, *range),
        _ => false,
    })
}
