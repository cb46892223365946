//! Gives every list of a plan entries of its own.
//!
//! A plan file may let lists share the entries of a pool, and have entries that no list
//! names. Passes change entries in place: one that two lists share would change twice.
//! What is recorded has no such entries.

use rote_plans::{Arg, Instr, Plan, Range};

/// Copies arguments and lists of values to where each entry belongs to one of them.
/// Meshes and strategies keep what they name.
pub fn unshare(plan: &mut Plan) {
    if !shares(plan) {
        return;
    }
    let old = std::mem::take(&mut plan.args);
    let mut instrs = std::mem::take(&mut plan.instrs);
    for instr in &mut instrs {
        if let Instr::Local {
            args, outs, writes, ..
        } = instr
        {
            *args = copied(plan, &old, *args);
            *outs = ids(plan, *outs);
            *writes = ids(plan, *writes);
        }
    }
    plan.instrs = instrs;
}

/// Whether two lists of instructions share an entry, or an argument is none of theirs, which
/// may share with any.
fn shares(plan: &Plan) -> bool {
    let (mut args, mut ids) = (vec![false; plan.args.len()], vec![false; plan.ids.len()]);
    let mut open = Vec::new();
    for instr in &plan.instrs {
        if let Instr::Local {
            args, outs, writes, ..
        } = instr
        {
            open.push(*args);
            if taken(&mut ids, *outs) || taken(&mut ids, *writes) {
                return true;
            }
        }
    }
    while let Some(range) = open.pop() {
        if taken(&mut args, range) {
            return true;
        }
        for arg in &plan.args[range.indices()] {
            match arg {
                Arg::Values(list) if taken(&mut ids, *list) => return true,
                Arg::List(list) => open.push(*list),
                Arg::Wrapped(inner) => open.push(Range {
                    start: *inner,
                    len: 1,
                }),
                _ => {}
            }
        }
    }
    args.contains(&false)
}

/// Marks entries; whether one of them was marked before.
fn taken(entries: &mut [bool], range: Range) -> bool {
    let mut before = false;
    for entry in &mut entries[range.indices()] {
        before |= std::mem::replace(entry, true);
    }
    before
}

/// A copy of these arguments, behind copies of what they hold. The check of a plan
/// bounds how deep they nest and how many there are.
fn copied(plan: &mut Plan, old: &[Arg], range: Range) -> Range {
    let mut own = old[range.indices()].to_vec();
    for arg in &mut own {
        match arg {
            Arg::Values(list) => *list = ids(plan, *list),
            Arg::List(list) => *list = copied(plan, old, *list),
            Arg::Wrapped(inner) => {
                let inside = Range {
                    start: *inner,
                    len: 1,
                };
                *inner = copied(plan, old, inside).start;
            }
            _ => {}
        }
    }
    let start = plan.args.len() as u32;
    plan.args.extend(own);
    Range {
        start,
        len: range.len,
    }
}

fn ids(plan: &mut Plan, range: Range) -> Range {
    let start = plan.ids.len() as u32;
    plan.ids.extend_from_within(range.indices());
    Range {
        start,
        len: range.len,
    }
}
