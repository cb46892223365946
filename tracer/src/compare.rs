//! What differs between two recordings of one step.
//!
//! A step is recorded twice in a row. What is host state (a step counter, a
//! schedule) shows as a difference: it is bound when it is explained by a
//! hyperparameter, and refused otherwise.

use rote_plans::{Arg, Instr, Plan};

use crate::refusal::Refusal;
use crate::scalars::TracedFloats;

/// One run of a step, recorded.
#[derive(Clone, Debug)]
pub struct Recording {
    /// The plan, with every number as it was in this run.
    pub plan: Plan,
    /// The user's source line of each instruction.
    pub sources: Vec<String>,
    /// Floats computed from hyperparameters.
    pub floats: TracedFloats,
}

/// An op argument that a hyperparameter explains.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BoundNumber {
    /// Index into the plan's argument pool.
    pub arg: u32,
    /// Index into the recording's traced floats.
    pub float: u32,
}

/// Compares two recordings. Numbers that differ and are explained by
/// hyperparameters come back; anything else is a refusal that names the op.
pub fn compare(a: &Recording, b: &Recording) -> Result<Vec<BoundNumber>, Refusal> {
    let mut bound = Vec::new();
    let same_shape =
        a.plan.instrs.len() == b.plan.instrs.len() && a.plan.args.len() == b.plan.args.len();
    if same_shape {
        for (i, (x, y)) in a.plan.args.iter().zip(&b.plan.args).enumerate() {
            if let (Arg::Float(x), Arg::Float(y)) = (x, y) {
                if x.to_bits() != y.to_bits() {
                    if let Some(float) = a.floats.explain(&b.floats, *x, *y) {
                        bound.push(BoundNumber {
                            arg: i as u32,
                            float,
                        });
                    }
                }
            }
        }
    }
    let is_bound = |arg: u32| bound.iter().any(|b| b.arg == arg);
    for (i, (x, y)) in a.plan.instrs.iter().zip(&b.plan.instrs).enumerate() {
        let (left, right) = (render(&a.plan, x, &is_bound), render(&b.plan, y, &is_bound));
        if left != right {
            return Err(differs(a, i, x, &left, &right));
        }
    }
    if a.plan.instrs.len() != b.plan.instrs.len() {
        return Err(Refusal::step(
            format!(
                "ran {} instructions in one call and {} in the next",
                a.plan.instrs.len(),
                b.plan.instrs.len()
            ),
            "make the decision an argument of the captured function, so that it is guarded",
        ));
    }
    if a.plan.result != b.plan.result {
        return Err(Refusal::step(
            format!(
                "returned {} in one call and {} in the next",
                a.plan.result, b.plan.result
            ),
            "return tensors; Python values must not change between calls",
        ));
    }
    if let Some(what) = tables_differ(&a.plan, &b.plan) {
        return Err(Refusal::step(
            format!("left different {what} in two calls in a row"),
            "make the step do the same at every call",
        ));
    }
    Ok(bound)
}

fn differs(a: &Recording, instr: usize, x: &Instr, left: &str, right: &str) -> Refusal {
    let op = match x {
        Instr::Local { op, .. } => a.plan.str(*op).to_owned(),
        Instr::Collective(c) => format!("{:?}", c.kind),
        other => format!("{other:?}")
            .split(' ')
            .next()
            .unwrap_or_default()
            .to_owned(),
    };
    Refusal::op(
        &op,
        &a.sources[instr],
        format!(
            "differs between two calls in a row: `{left}` and then `{right}`: a number that Python computes anew \
             (a step counter, a schedule) would be frozen"
        ),
        "pass the value as an argument, keep it in a tensor, or let the optimizer hold it in param_groups; for \
         optimizers, fused=True or capturable=True keep their step counters in tensors",
    )
}

/// An instruction as text, complete enough that equal text means equal effect.
fn render(plan: &Plan, instr: &Instr, is_bound: &impl Fn(u32) -> bool) -> String {
    use std::fmt::Write as _;
    let mut out = String::new();
    match instr {
        Instr::Local {
            op,
            overload,
            args,
            outs,
        } => {
            let _ = write!(out, "{}", plan.str(*op));
            if *overload != u32::MAX && !plan.str(*overload).is_empty() {
                let _ = write!(out, ".{}", plan.str(*overload));
            }
            out.push('(');
            for (i, index) in args.indices().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                render_arg(plan, index as u32, is_bound, &mut out);
            }
            let _ = write!(out, ") -> {:?}", plan.ids(*outs));
            for &id in plan.ids(*outs).iter().filter(|&&id| id != u32::MAX) {
                let value = &plan.values[id as usize];
                let _ = write!(out, " {}{:?}", value.dtype, plan.dims(value.shape));
            }
        }
        Instr::View { base, out: view } => {
            let value = &plan.values[*view as usize];
            let _ = write!(
                out,
                "view of {base} as {view}: {}{:?} strides {:?} offset {}",
                value.dtype,
                plan.dims(value.shape),
                plan.dims(value.strides),
                value.offset
            );
        }
        Instr::Collective(c) => {
            let _ = write!(
                out,
                "{:?} {:?} group {} root {} {} -> {} splits {:?} {:?}",
                c.kind,
                c.reduce,
                plan.str(plan.groups[c.group as usize].name),
                c.root,
                c.input,
                c.output,
                plan.dims(c.input_splits),
                plan.dims(c.output_splits)
            );
        }
        other => {
            let _ = write!(out, "{other:?}");
        }
    }
    out
}

fn render_arg(plan: &Plan, index: u32, is_bound: &impl Fn(u32) -> bool, out: &mut String) {
    use std::fmt::Write as _;
    match plan.args[index as usize] {
        Arg::None => out.push_str("None"),
        Arg::Value(value) => {
            let _ = write!(out, "%{value}");
        }
        Arg::Values(range) => {
            let _ = write!(out, "%{:?}", plan.ids(range));
        }
        Arg::Float(_) if is_bound(index) => out.push_str("<bound>"),
        Arg::Float(value) => {
            let _ = write!(out, "{value:?}");
            if value.is_nan() {
                let _ = write!(out, "/{:x}", value.to_bits());
            }
        }
        Arg::Wrapped(inner) => render_arg(plan, inner, is_bound, out),
        Arg::Ints(range) => {
            let _ = write!(out, "{:?}", plan.dims(range));
        }
        Arg::List(range) => {
            out.push('[');
            for (i, inner) in range.indices().enumerate() {
                if i > 0 {
                    out.push_str(", ");
                }
                render_arg(plan, inner as u32, is_bound, out);
            }
            out.push(']');
        }
        Arg::Str(text) => {
            let _ = write!(out, "{:?}", plan.str(text));
        }
        other => {
            let _ = write!(out, "{other:?}");
        }
    }
}

fn tables_differ(a: &Plan, b: &Plan) -> Option<&'static str> {
    let text = |plan: &Plan, id: u32| plan.str(id).to_owned();
    let bindings = |plan: &Plan| -> Vec<_> {
        plan.bindings
            .iter()
            .map(|x| (x.kind, text(plan, x.path), x.value, x.written))
            .collect()
    };
    let outputs = |plan: &Plan| -> Vec<_> {
        plan.outputs
            .iter()
            .map(|x| (text(plan, x.path), x.value, x.spec, x.requires_grad))
            .collect()
    };
    let grads = |plan: &Plan| -> Vec<_> {
        plan.grads
            .iter()
            .map(|x| (text(plan, x.path), x.value, x.spec))
            .collect()
    };
    if bindings(a) != bindings(b) {
        return Some("bindings (tensors of the state that are read or written)");
    }
    if outputs(a) != outputs(b) {
        return Some("results");
    }
    if grads(a) != grads(b) {
        return Some("gradients");
    }
    (a.rng_slots != b.rng_slots).then_some("generator states")
}
