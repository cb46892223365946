//! What instructions read, write and make, for every pass alike.
//!
//! Storage is what matters: a write through one view changes what every view of
//! the same root reads.

use rote_plans::{Arg, Def, Instr, NONE, Plan, Range, StrId, ValueId, keeps_to_arguments};

pub use crate::liveness::for_each_written;
use crate::liveness::{self, follow, for_each_out};
use crate::ops::ABSOLUTE;

/// The root of a value.
pub fn root(plan: &Plan, value: ValueId) -> ValueId {
    plan.values[value as usize].root
}

/// For each value that is a root, the instructions that write it after it was
/// made, in order.
pub fn writes(plan: &Plan) -> Vec<Vec<u32>> {
    let mut writes = vec![Vec::new(); plan.values.len()];
    for (i, instr) in plan.instrs.iter().enumerate() {
        for_each_written(plan, instr, |root| writes[root as usize].push(i as u32));
    }
    writes
}

/// For each value that is a root, whether its storage is there after the run:
/// bindings, and what is returned or left as a gradient.
pub fn outlives(plan: &Plan) -> Vec<bool> {
    let mut roots = vec![false; plan.values.len()];
    for (value, outlives) in liveness::outlives(plan).into_iter().enumerate() {
        roots[root(plan, value as ValueId) as usize] |= outlives;
    }
    roots
}

/// For each value that is a root, whether an op counts from the start of its storage:
/// its data must stay where the op that makes it puts it.
pub fn anchored(plan: &Plan) -> Vec<bool> {
    let mut roots = vec![false; plan.values.len()];
    for instr in &plan.instrs {
        let Instr::Local { op, args, .. } = instr else {
            continue;
        };
        let name = plan.str(*op);
        if let (true, Some(Arg::Value(value))) = (
            ABSOLUTE.iter().any(|(absolute, _)| *absolute == name),
            plan.args[args.indices()].first(),
        ) {
            roots[root(plan, *value) as usize] = true;
        }
    }
    roots
}

/// Whether an op does nothing but make its results from its arguments: no
/// write, no random numbers, and a namespace whose ops keep to that.
pub fn is_function(plan: &Plan, instr: &Instr) -> bool {
    let Instr::Local {
        op,
        outs,
        writes,
        seeded,
        ..
    } = instr
    else {
        return false;
    };
    writes.len == 0 && !seeded && outs.len > 0 && keeps_to_arguments(plan.str(*op))
}

/// Ops that look only at the meta of their tensor argument.
pub fn reads_meta_only(name: &str) -> bool {
    name.ends_with("_like") && name != "aten::rand_like" || name.starts_with("aten::new_")
}

/// Keeps the marked instructions, with everything that counts instructions.
/// What the others define must be defined by nothing and read by nothing.
pub fn retain(plan: &mut Plan, keep: &[bool]) {
    let mut moved = Vec::with_capacity(keep.len() + 1);
    let mut next = 0_u32;
    for &kept in keep {
        moved.push(next);
        next += u32::from(kept);
    }
    moved.push(next);
    let mut at = keep.iter();
    plan.instrs.retain(|_| *at.next().unwrap_or(&true));
    follow(plan, &moved);
    for value in &mut plan.values {
        value.last_use = NONE;
    }
}

/// Puts instructions into another order: `order[i]` is the old index of the new
/// instruction `i`. Ranges of instructions that tell where they come from
/// (strategies, redistributions) become those that hold all of theirs.
pub fn reorder(plan: &mut Plan, order: &[usize]) {
    let mut to = vec![0_u32; order.len()];
    for (new, old) in order.iter().enumerate() {
        to[*old] = new as u32;
    }
    plan.instrs = order.iter().map(|old| plan.instrs[*old]).collect();
    for grad in &mut plan.grads {
        grad.gone = to.get(grad.gone as usize).copied().unwrap_or(grad.gone);
    }
    for value in &mut plan.values {
        if let Def::Instr(instr) = &mut value.def {
            // Values of instructions that are gone name none.
            *instr = to.get(*instr as usize).copied().unwrap_or(*instr);
        }
        value.last_use = NONE;
    }
    let span = |range: &mut Range| {
        let new = &to[range.indices()];
        if let (Some(first), Some(last)) = (new.iter().min(), new.iter().max()) {
            *range = Range {
                start: *first,
                len: last - first + 1,
            };
        }
    };
    for strategy in &mut plan.strategies {
        span(&mut strategy.instrs);
    }
    for redistribution in &mut plan.redistributions {
        span(&mut redistribution.instrs);
    }
}

/// Puts other values in the place of values, wherever they are read. `with[v]`
/// is what replaces `v`, itself if nothing does.
pub fn replace(plan: &mut Plan, with: &[ValueId]) {
    let new = |value: &mut ValueId| {
        if *value != NONE {
            *value = with[*value as usize];
        }
    };
    let mut ranges: Vec<Range> = Vec::new();
    for arg in &mut plan.args {
        match arg {
            Arg::Value(value) => new(value),
            Arg::Values(range) => ranges.push(*range),
            _ => {}
        }
    }
    for instr in &mut plan.instrs {
        match instr {
            Instr::Local { writes, .. } => ranges.push(*writes),
            other => replace_own(other, new),
        }
    }
    for range in ranges {
        for id in &mut plan.ids[range.indices()] {
            new(id);
        }
    }
    for output in &mut plan.outputs {
        new(&mut output.value);
    }
    for grad in &mut plan.grads {
        new(&mut grad.value);
    }
}

/// Puts other values in the place of those that an instruction itself names, and not in a list of the plan.
fn replace_own(instr: &mut Instr, new: impl Fn(&mut ValueId)) {
    match instr {
        Instr::View { base, .. } => new(base),
        Instr::Collective(c) => {
            let in_place = c.input == c.output;
            new(&mut c.input);
            if in_place {
                c.output = c.input;
            }
        }
        Instr::Wait { value } | Instr::Free { value } => new(value),
        Instr::Local { .. } | Instr::Rng { .. } => {}
    }
}

/// Puts other values in the place of those that one instruction reads or writes. Lists of the plan, which other
/// instructions may share, stay as they are.
pub fn replace_in(plan: &mut Plan, at: usize, new: impl Fn(ValueId) -> ValueId + Copy) {
    let mut instr = plan.instrs[at];
    match &mut instr {
        Instr::Local { args, writes, .. } => {
            *args = args_with(plan, *args, new);
            *writes = ids_with(plan, *writes, new);
        }
        other => replace_own(other, |value| *value = new(*value)),
    }
    plan.instrs[at] = instr;
}

/// A list of values with others in their places.
fn ids_with(plan: &mut Plan, range: Range, new: impl Fn(ValueId) -> ValueId) -> Range {
    let ids: Vec<ValueId> = (plan.ids(range).iter())
        .map(|&id| if id == NONE { NONE } else { new(id) })
        .collect();
    let start = plan.ids.len() as u32;
    plan.ids.extend(ids);
    Range { start, ..range }
}

/// A list of arguments with other values in their places. It has entries of its own: the old
/// ones stay in the plan, and what renumbers values would change a shared one twice.
fn args_with(plan: &mut Plan, range: Range, new: impl Fn(ValueId) -> ValueId + Copy) -> Range {
    let mut own = plan.args[range.indices()].to_vec();
    for arg in &mut own {
        match arg {
            Arg::Value(value) => *value = new(*value),
            Arg::Values(range) => *range = ids_with(plan, *range, new),
            Arg::List(range) => *range = args_with(plan, *range, new),
            Arg::Wrapped(inner) => {
                let inside = Range {
                    start: *inner,
                    len: 1,
                };
                *inner = args_with(plan, inside, new).start;
            }
            _ => {}
        }
    }
    let start = plan.args.len() as u32;
    plan.args.extend(own);
    Range { start, ..range }
}

/// The id of a text, which is added if there is none yet.
pub fn text(plan: &mut Plan, wanted: &str) -> StrId {
    let known = plan.strings.iter().position(|text| text == wanted);
    known.unwrap_or_else(|| {
        plan.strings.push(wanted.to_owned());
        plan.strings.len() - 1
    }) as StrId
}

/// The values that an instruction defines.
pub fn outs(plan: &Plan, instr: &Instr) -> Vec<ValueId> {
    let mut outs = Vec::new();
    for_each_out(plan, instr, |value| outs.push(value));
    outs
}
