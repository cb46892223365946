//! What turns the recorded list into a plan: views that nothing reads go,
//! last uses are found, and values are freed after them.

use rote_plans::{Arg, Def, Instr, InstrId, NONE, Plan, Range, ValueId};

/// Drops dead views, computes last uses and inserts frees. `sources` holds the
/// source line of each instruction and is returned in the new order.
pub fn finish(plan: Plan, sources: Vec<String>) -> (Plan, Vec<String>) {
    let (plan, sources, _) = finish_values(plan, sources);
    (plan, sources)
}

/// The same, and for each value which one it was before.
pub(crate) fn finish_values(
    mut plan: Plan,
    sources: Vec<String>,
) -> (Plan, Vec<String>, Vec<ValueId>) {
    let outlives = outlives(&plan);
    let last = last_uses(&plan, &outlives);

    let old = std::mem::take(&mut plan.instrs);
    let mut moved = vec![0u32; old.len() + 1];
    let mut instrs = Vec::with_capacity(old.len() * 2);
    let mut new_sources = Vec::with_capacity(old.len() * 2);
    for (i, instr) in old.iter().enumerate() {
        moved[i] = instrs.len() as u32;
        if let Instr::View { out, .. } = instr {
            if last[*out as usize].is_none() && !outlives[*out as usize] {
                continue; // a view that nothing reads
            }
        }
        instrs.push(*instr);
        new_sources.push(sources[i].clone());
        let mut touched = Vec::new();
        for_each_value(&plan, instr, |value| touched.push(value));
        for_each_out(&plan, instr, |value| touched.push(value));
        if let Instr::Local { writes, .. } = instr {
            touched.extend(plan.ids(*writes));
        }
        touched.sort_unstable();
        touched.dedup();
        for value in touched {
            // Made here and never read, or read here for the last time.
            let dies = last[value as usize].is_none_or(|at| at == i as u32);
            if dies && !outlives[value as usize] {
                instrs.push(Instr::Free { value });
                new_sources.push(sources[i].clone());
            }
        }
    }
    moved[old.len()] = instrs.len() as u32;

    follow(&mut plan, &moved);
    for (value, entry) in plan.values.iter_mut().enumerate() {
        entry.last_use = match last[value] {
            Some(at) if !outlives[value] => moved[at as usize],
            _ => NONE,
        };
    }
    plan.instrs = instrs;
    let before = drop_dead_values(&mut plan);
    (plan, new_sources, before)
}

/// Lets definitions, gradients, strategies and redistributions follow their instructions:
/// `moved[i]` is where instruction `i` went, or the next one that is left if it
/// is gone; the last entry is the new number of instructions.
pub(crate) fn follow(plan: &mut Plan, moved: &[u32]) {
    for value in &mut plan.values {
        if let Def::Instr(instr) = &mut value.def {
            *instr = moved[*instr as usize];
        }
    }
    for grad in &mut plan.grads {
        grad.gone = moved.get(grad.gone as usize).copied().unwrap_or(NONE);
    }
    let shift = |range: &mut Range| {
        let (start, end) = (moved[range.start as usize], moved[range.indices().end]);
        *range = Range {
            start,
            len: end - start,
        };
    };
    for strategy in &mut plan.strategies {
        shift(&mut strategy.instrs);
    }
    for redistribution in &mut plan.redistributions {
        shift(&mut redistribution.instrs);
    }
}

/// Calls `visit` with the root of everything that an instruction writes in
/// place.
pub fn for_each_written(plan: &Plan, instr: &Instr, mut visit: impl FnMut(ValueId)) {
    match instr {
        Instr::Local { writes, .. } => {
            for &value in plan.ids(*writes) {
                visit(plan.values[value as usize].root);
            }
        }
        Instr::Collective(c) if c.output == c.input => visit(plan.values[c.input as usize].root),
        _ => {}
    }
}

/// Whether an instruction writes a tensor that outlives the call.
pub fn writes_binding(plan: &Plan, instr: &Instr) -> bool {
    let mut written = false;
    for_each_written(plan, instr, |root| {
        written |= plan.is_bound(root);
    });
    written
}

/// Which values are there after the run: bindings, constants, outputs, gradients.
pub(crate) fn outlives(plan: &Plan) -> Vec<bool> {
    let mut outlives = vec![false; plan.values.len()];
    let bindings = plan.bindings.iter().map(|binding| binding.value);
    let constants = plan.constants.iter().map(|constant| constant.value);
    let outputs = plan.outputs.iter().map(|output| output.value);
    let grads = plan.grads.iter().map(|grad| grad.value);
    for value in bindings.chain(constants).chain(outputs).chain(grads) {
        if value != NONE {
            outlives[value as usize] = true;
        }
    }
    outlives
}

/// The last instruction that uses each value. A view that nothing reads does
/// not count as a reader of its base.
fn last_uses(plan: &Plan, outlives: &[bool]) -> Vec<Option<InstrId>> {
    let mut last: Vec<Option<InstrId>> = vec![None; plan.values.len()];
    for (i, instr) in plan.instrs.iter().enumerate().rev() {
        if let Instr::View { out, .. } = instr {
            // What reads the view comes after it, and has been seen.
            if last[*out as usize].is_none() && !outlives[*out as usize] {
                continue;
            }
        }
        let at = i as InstrId;
        for_each_value(plan, instr, |value| {
            last[value as usize].get_or_insert(at);
        });
        // So do those that it writes or lists again, which are its arguments in what
        // is recorded.
        for_each_out(plan, instr, |value| {
            if plan.values[value as usize].def != Def::Instr(at) {
                last[value as usize].get_or_insert(at);
            }
        });
        if let Instr::Local { writes, .. } = instr {
            for &value in plan.ids(*writes) {
                last[value as usize].get_or_insert(at);
            }
        }
    }
    last
}

/// Values of views that were dropped would have no definition: renumber. Returns
/// the old number of each that is left.
fn drop_dead_values(plan: &mut Plan) -> Vec<ValueId> {
    let mut defined = vec![false; plan.values.len()];
    for binding in &plan.bindings {
        defined[binding.value as usize] = true;
    }
    for constant in &plan.constants {
        defined[constant.value as usize] = true;
    }
    for i in 0..plan.instrs.len() {
        let instr = plan.instrs[i];
        for_each_out(plan, &instr, |value| defined[value as usize] = true);
    }
    let mut renumbered = vec![NONE; plan.values.len()];
    let mut next = 0;
    for (old, &keep) in defined.iter().enumerate() {
        if keep {
            renumbered[old] = next;
            next += 1;
        }
    }
    let new = |value: &mut ValueId| {
        if *value != NONE {
            *value = renumbered[*value as usize];
        }
    };
    let mut keep = defined.iter();
    plan.values.retain(|_| *keep.next().unwrap_or(&false));
    for value in &mut plan.values {
        new(&mut value.root);
    }
    for arg in &mut plan.args {
        if let Arg::Value(value) = arg {
            new(value);
            if *value == NONE {
                *arg = Arg::None; // of an instruction that is gone
            }
        }
    }
    // Lists of values and of results live in the id pool, beside other ids.
    let mut ranges: Vec<Range> = Vec::new();
    for arg in &plan.args {
        if let Arg::Values(range) = arg {
            ranges.push(*range);
        }
    }
    for instr in &mut plan.instrs {
        match instr {
            Instr::Local { outs, writes, .. } => ranges.extend([*outs, *writes]),
            Instr::View { base, out } => {
                new(base);
                new(out);
            }
            Instr::Collective(c) => {
                new(&mut c.input);
                new(&mut c.output);
            }
            Instr::Wait { value } | Instr::Free { value } => new(value),
            Instr::Rng { .. } => {}
        }
    }
    for range in ranges {
        for id in &mut plan.ids[range.indices()] {
            new(id);
        }
    }
    for binding in &mut plan.bindings {
        new(&mut binding.value);
    }
    for constant in &mut plan.constants {
        new(&mut constant.value);
    }
    for output in &mut plan.outputs {
        new(&mut output.value);
    }
    for grad in &mut plan.grads {
        new(&mut grad.value);
    }
    (0..)
        .zip(&defined)
        .filter_map(|(old, keep)| keep.then_some(old))
        .collect()
}

/// Calls `visit` with every value that an instruction reads.
pub fn for_each_value(plan: &Plan, instr: &Instr, mut visit: impl FnMut(ValueId)) {
    match instr {
        Instr::Local { args, .. } => {
            for arg in &plan.args[args.indices()] {
                visit_arg(plan, arg, &mut visit);
            }
        }
        Instr::View { base, .. } => visit(*base),
        Instr::Collective(collective) => visit(collective.input),
        Instr::Wait { value } => visit(*value),
        Instr::Free { .. } | Instr::Rng { .. } => {}
    }
}

fn visit_arg(plan: &Plan, arg: &Arg, visit: &mut impl FnMut(ValueId)) {
    match arg {
        Arg::Value(value) => visit(*value),
        Arg::Values(range) => {
            for &value in plan.ids(*range) {
                if value != NONE {
                    visit(value);
                }
            }
        }
        Arg::List(range) => {
            for inner in &plan.args[range.indices()] {
                visit_arg(plan, inner, visit);
            }
        }
        _ => {}
    }
}

/// Calls `visit` with every value that an instruction defines.
pub fn for_each_out(plan: &Plan, instr: &Instr, mut visit: impl FnMut(ValueId)) {
    match instr {
        Instr::Local { outs, .. } => {
            for &value in plan.ids(*outs) {
                if value != NONE {
                    visit(value);
                }
            }
        }
        Instr::View { out, .. } => visit(*out),
        Instr::Collective(collective) if collective.output != collective.input => {
            visit(collective.output);
        }
        _ => {}
    }
}

/// Bytes that this rank puts into the collective at `instr`; 0 for others.
pub fn collective_bytes(plan: &Plan, instr: InstrId) -> u64 {
    match plan.instrs.get(instr as usize) {
        Some(Instr::Collective(collective)) => {
            let value = &plan.values[collective.input as usize];
            let numel: i64 = plan.dims(value.shape).iter().product();
            numel as u64 * value.dtype.bytes().unwrap_or(0)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rote_tracer::sample::{finish, *};

    #[test]
    fn values_are_freed_after_their_last_use_and_name_it() {
        let [x, a, b, y] = [1, 2, 3, 4].map(|storage| tensor(storage, &[4]));
        let mut recorder = recorder(&[&x]);
        record(
            &mut recorder,
            &[
                op("aten::relu", &[&x], &[&a]),
                op("aten::exp", &[&a], &[&b]),
                op("aten::add", &[&a, &b], &[&y]),
                op("aten::neg", &[&y], &[&tensor(5, &[4])]), // made and never read
            ],
        );
        let (plan, sources) = finish(recorder, &[&y]);
        assert_eq!(
            program(&plan),
            [
                "relu %0 > %1",
                "exp %1 > %2",
                "add %1 %2 > %3",
                "free %1",
                "free %2",
                "neg %3 > %4",
                "free %4"
            ]
        );
        let last: Vec<InstrId> = plan.values.iter().map(|value| value.last_use).collect();
        assert_eq!(last, [NONE, 2, 2, NONE, NONE]);
        assert_eq!(plan.values[4].def, Def::Instr(5));
        assert_eq!(sources.len(), 7, "a free has the line of what it follows");
    }

    #[test]
    fn a_chain_of_dead_views_keeps_nothing_alive() {
        let (x, a, y) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
        let half = a.view(&[2], &[1], 0);
        let mut recorder = recorder(&[&x]);
        record(
            &mut recorder,
            &[
                op("aten::relu", &[&x], &[&a]),
                op("aten::exp", &[&a], &[&y]),
                op("aten::slice", &[&a], &[&half]),
                op("aten::slice", &[&half], &[&a.view(&[1], &[1], 1)]),
            ],
        );
        let (plan, _) = finish(recorder, &[&y]);
        assert_eq!(program(&plan), ["relu %0 > %1", "exp %1 > %2", "free %1"]);
    }

    #[test]
    fn a_returned_view_keeps_itself_not_the_value_it_looks_at() {
        let (x, a) = (tensor(1, &[4]), tensor(2, &[4]));
        let half = a.view(&[2], &[1], 2);
        let mut recorder = recorder(&[&x]);
        record(&mut recorder, &[op("aten::relu", &[&x], &[&a])]);
        let (plan, _) = finish(recorder, &[&half]);
        assert_eq!(
            program(&plan),
            ["relu %0 > %1", "view %1 > %2", "free %1"],
            "a view keeps its root's storage"
        );
    }

    #[test]
    fn bytes_of_a_collective_are_what_this_rank_puts_in() {
        let (x, y) = (tensor(1, &[4, 2]), tensor(2, &[8, 2]));
        let mut recorder = recorder(&[&x]);
        let two = rote_tracer::event::ArgEvent::Int(2);
        let gather = "_c10d_functional::all_gather_into_tensor";
        record(
            &mut recorder,
            &[collective(gather, &x, vec![two], &y), wait(&y)],
        );
        let (plan, _) = finish(recorder, &[&y]);
        assert_eq!(collective_bytes(&plan, 0), 4 * 2 * 4);
        assert_eq!(collective_bytes(&plan, 1), 0, "a wait moves nothing");
        assert_eq!(collective_bytes(&plan, 99), 0);
    }
}
