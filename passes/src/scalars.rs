//! Ops with a number as ops with a tensor that wraps it.
//!
//! PyTorch itself implements `mul.Scalar` and its like by wrapping the number in
//! a tensor at every call and calling `mul.Tensor` (`aten/src/ATen/native/
//! BinaryOps.cpp`). Wrapped once when the plan is bound, the same kernel gets
//! the same operands: same bits, without the allocation.

use rote_plans::schedule::Ops;
use rote_plans::{Arg, Instr, Range};

use super::effects::text;
use super::{Done, Pass, Program, Stage};

pub(super) const PASS: Pass = Pass {
    name: "scalars",
    about: "wrap the numbers of element-wise ops in tensors once",
    by_default: true,
    alters_collectives: false,
    keeps_bits: true,
    needs: &[],
    stage: Stage::Instructions,
    apply,
};

/// Ops whose `Scalar` overload is their `Tensor` overload on a wrapped number.
const OPS: &[&str] = &[
    "aten::add",
    "aten::add_",
    "aten::sub",
    "aten::sub_",
    "aten::mul",
    "aten::mul_",
    "aten::div",
    "aten::div_",
];

fn apply(program: &mut Program, ops: &dyn Ops) -> Done {
    let plan = &mut program.plan;
    let mut tensor = None;
    let mut changed = 0;
    for i in 0..plan.instrs.len() {
        let Instr::Local {
            op, overload, args, ..
        } = plan.instrs[i]
        else {
            continue;
        };
        let name = plan.str(op);
        let applies =
            OPS.contains(&name) && plan.str(overload) == "Scalar" && ops.has(name, "Tensor");
        if !applies || args.len < 2 || !is_number(&plan.args[args.start as usize + 1]) {
            continue;
        }
        let tensor = *tensor.get_or_insert_with(|| text(plan, "Tensor"));
        let mut own: Vec<Arg> = plan.args[args.indices()].to_vec();
        plan.args.push(own[1]);
        own[1] = Arg::Wrapped(plan.args.len() as u32 - 1);
        let new = Range {
            start: plan.args.len() as u32,
            len: args.len,
        };
        plan.args.extend(own);
        if let Instr::Local { overload, args, .. } = &mut plan.instrs[i] {
            (*overload, *args) = (tensor, new);
        }
        changed += 1;
    }
    Done {
        changed,
        what: format!("{changed} ops take their number as a tensor"),
    }
}

fn is_number(arg: &Arg) -> bool {
    matches!(
        arg,
        Arg::Bool(_) | Arg::Int(_) | Arg::Float(_) | Arg::Complex(..) | Arg::Scalar(_)
    )
}
