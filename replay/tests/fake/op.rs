//! An op of a plan, with its arguments as kernels take them: tensors, then numbers.

use rote_plans::{Arg, Plan};
use rote_replay::{LocalOp, NumberSite};

/// Where a number is among the arguments, and in the list that is one.
type At = (u32, Option<u32>);

#[derive(Debug)]
pub struct Op {
    pub name: String,
    pub tensors: Vec<u32>,
    pub numbers: Vec<(At, f64)>,
    pub out: u32,
    pub in_arena: bool,
}

impl Op {
    pub fn of(plan: &Plan, op: &LocalOp<'_>) -> Self {
        let mut bound = Op {
            name: op.name.to_owned(),
            tensors: Vec::new(),
            numbers: Vec::new(),
            out: op.outs[0],
            in_arena: op.into.is_some(),
        };
        let args = (0..).zip(op.args);
        args.for_each(|(at, &arg)| bound.take(plan, (at, None), arg));
        bound
    }

    fn take(&mut self, plan: &Plan, at: At, arg: Arg) {
        match arg {
            Arg::Value(value) => self.tensors.push(value),
            Arg::Int(int) => self.numbers.push((at, int as f64)),
            Arg::Float(float) => self.numbers.push((at, float)),
            Arg::Scalar(_) => self.numbers.push((at, f64::NAN)),
            Arg::Ints(ints) => {
                let numbers = plan.dims(ints).iter().map(|&int| (at, int as f64));
                self.numbers.extend(numbers);
            }
            Arg::Wrapped(inner) => self.take(plan, at, plan.args[inner as usize]),
            Arg::List(list) => {
                for (i, &arg) in (0..).zip(&plan.args[list.indices()]) {
                    self.take(plan, (at.0, Some(i)), arg);
                }
            }
            _ => {}
        }
    }

    pub fn set(&mut self, site: &NumberSite, value: f64) {
        let numbers = self.numbers.iter_mut();
        let mut numbers = numbers.filter(|(at, _)| *at == (site.arg, site.element));
        numbers.by_ref().for_each(|(_, number)| *number = value);
    }
}
