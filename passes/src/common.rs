//! The same op on the same tensors is run once.
//!
//! An op that only makes results from its arguments ([`is_function`]) gives the
//! same bits when it is given the same bits: of two with equal arguments the
//! second can read the first one's results, if no argument was written in
//! between, if no result of either is ever written, and if none is returned
//! (returned tensors are fresh).

use hashbrown::HashMap;
use rote_plans::schedule::Ops;
use rote_plans::{Arg, Instr, Meta, NONE, Plan, Region, ValueId};

use super::effects::{self, is_function, outlives, root, writes};
use super::{Done, Pass, Program, Stage};
use crate::liveness::for_each_value;

pub(super) const PASS: Pass = Pass {
    name: "common",
    about: "run the same op on the same tensors once",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

fn apply(program: &mut Program, ops: &dyn Ops) -> Done {
    // What is made twice may be so that it need not be kept in between (activation
    // checkpointing): then only what is small is made once.
    let merged = |largest| {
        let mut plan = program.plan.clone();
        let changed = merge(&mut plan, largest);
        (plan, changed)
    };
    let (mut plan, mut changed) = merged(u64::MAX);
    if !program.has_room(&plan, ops) {
        (plan, changed) = merged(program.recorded / 1024);
    }
    program.plan = plan;
    Done {
        changed,
        what: format!("{changed} ops repeat an earlier one"),
    }
}

/// Lets ops read the results of earlier ones that are the same, if these have no
/// more than `largest` bytes. Returns how many ops this leaves out.
fn merge(plan: &mut Plan, largest: u64) -> usize {
    let (outlives, writes) = (outlives(plan), writes(plan));
    let mut with: Vec<ValueId> = (0..plan.values.len() as ValueId).collect();
    let mut keep = vec![true; plan.instrs.len()];
    let before = plan.clone();
    // Of ops as numbers that are equal for equal arguments only.
    let mut ops: HashMap<Vec<u64>, usize> = HashMap::new();
    // Views of one root are told apart by how they look at it alone.
    let mut views: HashMap<(ValueId, Meta<'_>, i64), usize> = HashMap::new();
    let mut key = Vec::new();
    let mut changed = 0;
    for (i, kept) in keep.iter_mut().enumerate() {
        let instr = plan.instrs[i];
        key.clear();
        let first = match instr {
            Instr::View { base, out } => {
                let Region {
                    meta,
                    root: _,
                    offset,
                } = before.region(out);
                let looks = (root(plan, with[base as usize]), meta, offset);
                *views.entry(looks).or_insert(i)
            }
            Instr::Local {
                op,
                overload,
                args,
                grad,
                ..
            } if is_function(plan, &instr) => {
                key.extend([0, u64::from(op), u64::from(overload), u64::from(grad)]);
                for arg in args.indices() {
                    encode(plan, &plan.args[arg], &with, &mut key);
                }
                *ops.entry(key.clone()).or_insert(i)
            }
            _ => continue,
        };
        if first == i {
            continue;
        }
        let view = matches!(instr, Instr::View { .. });
        let (a, b) = (all_outs(plan, first), all_outs(plan, i));
        let is_small =
            |v: &ValueId| *v == NONE || plan.values[*v as usize].storage_bytes <= largest;
        let fits = a.len() == b.len()
            && (view || a.iter().all(is_small))
            && (a.iter().zip(&b)).all(|(a, b)| *b == NONE || *a != NONE)
            && (view || (fresh(&a, &outlives, &writes) && fresh(&b, &outlives, &writes)))
            && (view || !written_between(plan, &instr, &with, &writes, first, i));
        if !fits {
            if !view {
                ops.insert(key.clone(), i);
            }
            continue;
        }
        for (a, b) in a.into_iter().zip(b).filter(|(_, b)| *b != NONE) {
            with[b as usize] = a;
            let new = root(plan, a);
            for value in &mut plan.values {
                if value.root == b {
                    value.root = new;
                }
            }
        }
        *kept = false;
        changed += usize::from(!view);
    }
    effects::replace(plan, &with);
    effects::retain(plan, &keep);
    changed
}

/// Results, [`NONE`] included.
fn all_outs(plan: &Plan, i: usize) -> Vec<ValueId> {
    match plan.instrs[i] {
        Instr::Local { outs, .. } => plan.ids(outs).to_vec(),
        Instr::View { out, .. } => vec![out],
        _ => Vec::new(),
    }
}

/// Whether results are never written and do not outlive the run.
fn fresh(outs: &[ValueId], outlives: &[bool], writes: &[Vec<u32>]) -> bool {
    outs.iter().filter(|v| **v != NONE).all(|v| {
        let v = *v as usize;
        !outlives[v] && writes[v].is_empty()
    })
}

fn written_between(
    plan: &Plan,
    instr: &Instr,
    with: &[ValueId],
    writes: &[Vec<u32>],
    first: usize,
    second: usize,
) -> bool {
    let mut found = false;
    for_each_value(plan, instr, |value| {
        let root = root(plan, with[value as usize]) as usize;
        found |= writes[root]
            .iter()
            .any(|at| (first..second).contains(&(*at as usize)));
    });
    found
}

/// An argument as numbers that are equal for equal arguments only.
fn encode(plan: &Plan, arg: &Arg, with: &[ValueId], key: &mut Vec<u64>) {
    let value = |v: ValueId| match v {
        NONE => u64::MAX,
        v => u64::from(with[v as usize]),
    };
    match arg {
        Arg::None => key.push(2),
        Arg::Value(v) => key.extend([3, value(*v)]),
        Arg::Values(range) => {
            key.extend([4, u64::from(range.len)]);
            key.extend(plan.ids(*range).iter().map(|v| value(*v)));
        }
        Arg::Bool(b) => key.extend([5, u64::from(*b)]),
        Arg::Int(n) => key.extend([6, *n as u64]),
        Arg::Float(x) => key.extend([7, x.to_bits()]),
        Arg::Complex(re, im) => key.extend([8, re.to_bits(), im.to_bits()]),
        Arg::Scalar(s) => key.extend([9, u64::from(*s)]),
        Arg::Wrapped(inner) => {
            key.push(10);
            encode(plan, &plan.args[*inner as usize], with, key);
        }
        Arg::Ints(range) => {
            key.extend([11, u64::from(range.len)]);
            key.extend(plan.dims(*range).iter().map(|n| *n as u64));
        }
        Arg::List(range) => {
            key.extend([12, u64::from(range.len)]);
            for inner in range.indices() {
                encode(plan, &plan.args[inner], with, key);
            }
        }
        Arg::Str(text) => key.extend([13, u64::from(*text)]),
        Arg::DType(dtype) => key.extend([14, u64::from(dtype.0)]),
        Arg::Device(device) => {
            key.extend([15, u64::from(device.kind), device.index as u64]);
        }
        Arg::Layout(layout) => key.extend([16, *layout as u64]),
        Arg::MemoryFormat(format) => key.extend([17, *format as u64]),
    }
}
