//! What turns the recorded list into a plan: views that nothing reads go,
//! last uses are found, and values are freed after them.

use rote_plans::{Arg, Def, Instr, InstrId, NONE, Plan, Range, ValueId};

/// Drops dead views, computes last uses and inserts frees. `sources` holds the
/// source line of each instruction and is returned in the new order.
pub fn finish(mut plan: Plan, sources: Vec<String>) -> (Plan, Vec<String>) {
    let last = last_uses(&plan);
    let mut outlives = vec![false; plan.values.len()];
    for value in plan
        .outputs
        .iter()
        .map(|o| o.value)
        .chain(plan.grads.iter().map(|g| g.value))
    {
        if value != NONE {
            outlives[value as usize] = true;
        }
    }
    for binding in &plan.bindings {
        outlives[binding.value as usize] = true;
    }

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

    for (value, entry) in plan.values.iter_mut().enumerate() {
        if let Def::Instr(instr) = entry.def {
            entry.def = Def::Instr(moved[instr as usize]);
        }
        entry.last_use = match last[value] {
            Some(at) if !outlives[value] => moved[at as usize],
            _ => NONE,
        };
    }
    let shift = |range: &mut Range| {
        let start = moved[range.start as usize];
        let end = moved[(range.start + range.len) as usize];
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
    plan.instrs = instrs;
    drop_dead_values(&mut plan);
    (plan, new_sources)
}

/// The last instruction that reads each value.
fn last_uses(plan: &Plan) -> Vec<Option<InstrId>> {
    let mut last = vec![None; plan.values.len()];
    for (i, instr) in plan.instrs.iter().enumerate() {
        if let Instr::View { out, base } = instr {
            // A dead view does not keep its base: settle views in reverse below.
            let _ = (out, base);
            continue;
        }
        for_each_value(plan, instr, |value| last[value as usize] = Some(i as u32));
    }
    let mut outlives = vec![false; plan.values.len()];
    for value in plan
        .outputs
        .iter()
        .map(|o| o.value)
        .chain(plan.grads.iter().map(|g| g.value))
    {
        if value != NONE {
            outlives[value as usize] = true;
        }
    }
    for (i, instr) in plan.instrs.iter().enumerate().rev() {
        if let Instr::View { base, out } = instr {
            if last[*out as usize].is_some() || outlives[*out as usize] {
                let entry = &mut last[*base as usize];
                *entry = Some(entry.map_or(i as u32, |at| at.max(i as u32)));
            }
        }
    }
    last
}

/// Values of views that were dropped would have no definition: renumber.
fn drop_dead_values(plan: &mut Plan) {
    let mut defined = vec![false; plan.values.len()];
    for binding in &plan.bindings {
        defined[binding.value as usize] = true;
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
            Instr::Local { outs, .. } => ranges.push(*outs),
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
    for output in &mut plan.outputs {
        new(&mut output.value);
    }
    for grad in &mut plan.grads {
        new(&mut grad.value);
    }
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
