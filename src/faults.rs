//! What tests make wrong in a plan, to see that it is found. The feature `faults` builds it; the shipped library
//! has none of it.

use rote_passes::without;
use rote_plans::{Arg, Instr, NONE, Plan, PlanFile, ReduceOp, ValueId};
use rote_replay::Frontend;

use crate::SessionError;
use crate::session::Session;

/// What a test makes wrong in a plan.
#[derive(Clone, Debug)]
pub enum Fault {
    /// The first number among the arguments is another one.
    Number,
    /// The first two tensors among the arguments change places.
    Swap,
    /// The instruction is left out.
    Drop,
    /// A view begins one element later, or earlier where there is none.
    Offset,
    /// Another reduction.
    Reduce,
    /// Another op of the same arguments.
    Op(String),
    /// What the first run has made is used ever after.
    Stale,
}

impl Fault {
    /// Reads `number`, `swap`, `drop`, `offset`, `reduce`, `stale` or the name of an op.
    pub fn parse(text: &str) -> Self {
        match text {
            "number" => Fault::Number,
            "swap" => Fault::Swap,
            "drop" => Fault::Drop,
            "offset" => Fault::Offset,
            "reduce" => Fault::Reduce,
            "stale" => Fault::Stale,
            op => Fault::Op(op.to_owned()),
        }
    }

    /// Changes an instruction; whether it could.
    fn apply(&self, plan: &mut Plan, at: usize) -> bool {
        match (self, plan.instrs[at]) {
            (Fault::Number, Instr::Local { args, .. }) => {
                let number = args.indices().find_map(|index| match plan.args[index] {
                    Arg::Wrapped(inner) => Some(inner as usize),
                    Arg::Float(_) | Arg::Int(_) | Arg::Scalar(_) => Some(index),
                    _ => None,
                });
                let Some(number) = number else { return false };
                plan.args[number] = match plan.args[number] {
                    Arg::Int(number) => Arg::Int(number + 1),
                    Arg::Float(number) => Arg::Float(number * 1.5 + 1.0),
                    _ => Arg::Float(0.0625),
                };
                true
            }
            (Fault::Swap, Instr::Local { args, .. }) => {
                let is_tensor = |index: &usize| matches!(plan.args[*index], Arg::Value(_));
                let mut tensors = args.indices().filter(is_tensor);
                match (tensors.next(), tensors.next()) {
                    (Some(first), Some(second)) => {
                        plan.args.swap(first, second);
                        true
                    }
                    _ => false,
                }
            }
            (
                Fault::Op(name),
                Instr::Local {
                    args,
                    outs,
                    writes,
                    seeded,
                    grad,
                    ..
                },
            ) => {
                let (name, overload) = name.split_once('.').unwrap_or((name, ""));
                let mut intern = |text: &str| {
                    plan.strings.push(text.to_owned());
                    plan.strings.len() as u32 - 1
                };
                plan.instrs[at] = Instr::Local {
                    op: intern(name),
                    overload: intern(overload),
                    args,
                    outs,
                    writes,
                    seeded,
                    grad,
                };
                true
            }
            (Fault::Offset, Instr::View { out, .. }) => {
                let before = plan.values[out as usize].offset;
                [1, -1].iter().any(|step| {
                    plan.values[out as usize].offset = before + step;
                    PlanFile::from_plan(plan).is_ok()
                })
            }
            (Fault::Reduce, Instr::Collective(mut c)) => {
                c.reduce = Some(ReduceOp::Max);
                plan.instrs[at] = Instr::Collective(c);
                true
            }
            (Fault::Drop, Instr::Local { .. }) => {
                without(plan, at);
                true
            }
            _ => false,
        }
    }

    /// Makes a variant wrong at an instruction of its recorded plan: in the plan itself,
    /// or in what the passes have made of it. Returns whether there was a way.
    pub fn plant<F: Frontend>(
        &self,
        session: &mut Session<F>,
        id: u32,
        at: usize,
        bound: bool,
    ) -> Result<bool, SessionError> {
        let passes = session.passes();
        let (frontend, variant) = session.variant_mut(id).ok_or(SessionError::NoVariant)?;
        let mut plan = variant.file.to_plan();
        if at >= plan.instrs.len() {
            return Ok(false);
        }
        let made = first_shown(&plan, at);
        let mut done = false;
        if !bound {
            done = self.apply(&mut plan, at);
        }
        variant.spoil(frontend, plan, passes, &mut |program| {
            if !bound {
                return;
            }
            let same = |now: &ValueId| {
                *now != NONE && Some(program.values[*now as usize]) == made.map(|(value, _)| value)
            };
            let nth = made.map_or(0, |(_, nth)| nth);
            let instrs = (0..program.plan.instrs.len())
                .filter(|&now| shown(&program.plan, now).iter().any(same));
            let Some(now) = instrs.clone().nth(nth) else {
                return;
            };
            done = match self {
                Fault::Stale => {
                    program
                        .schedule
                        .once
                        .resize(program.plan.instrs.len(), false);
                    program.schedule.once[now] = true;
                    true
                }
                fault => fault.apply(&mut program.plan, now),
            };
        })?;
        Ok(done)
    }
}

/// What an instruction makes or writes.
fn shown(plan: &Plan, at: usize) -> Vec<ValueId> {
    match plan.instrs[at] {
        Instr::Local { outs, writes, .. } => {
            let mut all = plan.ids(outs).to_vec();
            all.extend(plan.ids(writes));
            all
        }
        Instr::View { out, .. } => vec![out],
        Instr::Collective(c) => vec![c.output],
        _ => Vec::new(),
    }
}

/// The first value that an instruction shows, and how many show it before.
fn first_shown(plan: &Plan, at: usize) -> Option<(ValueId, usize)> {
    let value = shown(plan, at).into_iter().find(|&value| value != NONE)?;
    let before = (0..at).filter(|&at| shown(plan, at).contains(&value));
    Some((value, before.count()))
}
