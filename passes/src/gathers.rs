//! All-gathers whose output may lie where their input lies.
//!
//! `fully_shard` allocates the output of a gather, fills this rank's part of it, and passes this part as the input.
//! A plan names the output anew, so that it has two values of the same size. One buffer is enough for both, where
//! nothing looks at the first value once the gather has started.

use rote_plans::{Collective, CollectiveKind, Def, Instr, Marks, Plan, ValueId};

use super::effects::{for_each_written, outlives, root};
use super::live::{Flight, flights};
use crate::liveness::{for_each_out, for_each_value};

/// For each all-gather of this kind, its instruction, the root that its input looks at, and its output.
pub(super) fn in_place(plan: &Plan) -> Vec<(usize, ValueId, ValueId)> {
    let gathers = plan.instrs.iter().enumerate().filter_map(|(i, instr)| {
        let Instr::Collective(collective) = instr else {
            return None;
        };
        let under = root(plan, collective.input);
        fits(plan, collective, under).then_some((i, under, collective.output))
    });
    let mut found: Vec<(usize, ValueId, ValueId)> = gathers.collect();
    if found.is_empty() {
        return found;
    }
    let outlives = outlives(plan);
    let looks = Looks::of(plan);
    found.retain(|&(i, under, _)| !outlives[under as usize] && looks.end_with(plan, i, under));
    found
}

/// Whether an all-gather's input is this rank's part of a root that is as large as the output.
fn fits(plan: &Plan, gather: &Collective, under: ValueId) -> bool {
    let [input, output, whole] =
        [gather.input, gather.output, under].map(|value| &plan.values[value as usize]);
    let ranks = plan.dims(plan.groups[gather.group as usize].ranks);
    let own = i64::from(plan.fingerprint.rank);
    let Some(place) = ranks.iter().position(|rank| *rank == own) else {
        return false;
    };
    let part: i64 = plan.dims(input.shape).iter().product();
    let all: i64 = plan.dims(output.shape).iter().product();
    gather.kind == CollectiveKind::AllGather
        && matches!(whole.def, Def::Instr(_))
        && output.root == gather.output
        && whole.storage_bytes == output.storage_bytes
        && (input.dtype, input.device) == (output.dtype, output.device)
        && (input.marks, output.marks) == (Marks::NONE, Marks::NONE)
        && part * ranks.len() as i64 == all
        && input.offset == part * place as i64
        && in_order(plan.dims(input.shape), plan.dims(input.strides))
}

/// Whether elements lie one after the other, in the order of their indices.
fn in_order(shape: &[i64], strides: &[i64]) -> bool {
    let mut next = 1;
    shape.iter().zip(strides).rev().all(|(size, stride)| {
        let fits = *size == 1 || *stride == next;
        next *= size;
        fits
    })
}

/// When instructions look at roots.
struct Looks {
    /// For each root, the last instruction that reads or writes it. What a collective sends, it reads when it starts.
    last: Vec<usize>,
    flights: Vec<Flight>,
}

impl Looks {
    fn of(plan: &Plan) -> Self {
        let mut last = vec![0; plan.values.len()];
        for (i, instr) in plan.instrs.iter().enumerate() {
            if matches!(instr, Instr::Free { .. }) {
                continue;
            }
            let mut look = |value: ValueId| last[root(plan, value) as usize] = i;
            for_each_value(plan, instr, &mut look);
            for_each_out(plan, instr, &mut look);
            for_each_written(plan, instr, &mut look);
        }
        Looks {
            last,
            flights: flights(plan),
        }
    }

    /// Whether the collective at an instruction is the last that looks at a root.
    fn end_with(&self, plan: &Plan, collective: usize, looked: ValueId) -> bool {
        let is_other = |flight: &&Flight| {
            flight.start as usize != collective && root(plan, flight.input) == looked
        };
        let mut others = self.flights.iter().filter(is_other);
        self.last[looked as usize] == collective
            && others.all(|flight| (flight.end as usize) < collective)
    }
}
