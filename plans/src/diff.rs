//! The differences between two plans, in words.

use std::collections::BTreeMap;

use crate::describe::{
    Bytes, binding_kind, binding_marks, collectives, guard_kind, instr, memory, placements, scalar,
    spec, tensor, text,
};
use crate::plan::{ArchivedFingerprint, ArchivedPlan};
use crate::pool::{ArchivedRange, NONE};

/// How many lines of each side of a changed passage are told.
const PASSAGE: usize = 8;

/// The differences between two plans that have been opened, one or more lines
/// each; empty when both do the same. The first plan is called A, the second
/// B. How the pools are laid out makes no difference.
pub fn diff(a: &ArchivedPlan, b: &ArchivedPlan) -> Vec<String> {
    // Destructured so that a new table cannot be forgotten.
    let ArchivedPlan {
        fingerprint,
        function,
        result,
        strings: _,
        dims: _,
        ids: _,
        bytes: _,
        placements: _,
        meshes: _,
        groups: _,
        specs: _,
        values: _,
        args: _,
        instrs: _,
        rng_slots: _,
        bindings: _,
        outputs: _,
        grads: _,
        scalars: _,
        guards: _,
        constants: _,
        strategies: _,
        redistributions: _,
    } = a;
    let ArchivedFingerprint {
        rote,
        framework,
        world_size,
        rank,
    } = fingerprint;
    let mut said = Vec::new();
    let mut field = |what: &str, a: String, b: String| {
        if a != b {
            said.push(format!("{what}: A has {}, B has {}", text(&a), text(&b)));
        }
    };
    field("function", function.to_string(), b.function.to_string());
    field(
        "version of rote",
        rote.to_string(),
        b.fingerprint.rote.to_string(),
    );
    field(
        "framework",
        framework.to_string(),
        b.fingerprint.framework.to_string(),
    );
    field(
        "world size",
        world_size.to_string(),
        b.fingerprint.world_size.to_string(),
    );
    field("rank", rank.to_string(), b.fingerprint.rank.to_string());
    field("result", result.to_string(), b.result.to_string());
    passages("meshes", lines(a, meshes), lines(b, meshes), &mut said);
    passages("groups", lines(a, groups), lines(b, groups), &mut said);
    named(
        "binding",
        entries(a, bindings),
        entries(b, bindings),
        &mut said,
    );
    named(
        "output",
        entries(a, outputs),
        entries(b, outputs),
        &mut said,
    );
    named(
        "gradient of",
        entries(a, grads),
        entries(b, grads),
        &mut said,
    );
    passages("scalars", lines(a, scalars), lines(b, scalars), &mut said);
    named("guard", entries(a, guards), entries(b, guards), &mut said);
    passages(
        "constants",
        lines(a, constants),
        lines(b, constants),
        &mut said,
    );
    named(
        "collectives",
        entries(a, totals),
        entries(b, totals),
        &mut said,
    );
    program(a, b, &mut said);
    let (peak_a, peak_b) = (memory(a).peak, memory(b).peak);
    if peak_a != peak_b {
        let (a, b) = (Bytes(peak_a), Bytes(peak_b));
        said.push(format!(
            "memory of results at its peak: A has {a}, B has {b}"
        ));
    }
    passages(
        "global ops",
        lines(a, strategies),
        lines(b, strategies),
        &mut said,
    );
    said
}

type Lines = Vec<String>;
type Entries = BTreeMap<(String, usize), String>;

fn lines(plan: &ArchivedPlan, list: impl Fn(&ArchivedPlan, &mut Lines)) -> Lines {
    let mut lines = Vec::new();
    list(plan, &mut lines);
    lines
}

/// Entries by name; of several with one name, by their order.
fn entries(
    plan: &ArchivedPlan,
    list: impl Fn(&ArchivedPlan, &mut dyn FnMut(String, String)),
) -> Entries {
    let mut entries = Entries::new();
    let mut seen = BTreeMap::<String, usize>::new();
    list(plan, &mut |name, what| {
        let count = seen.entry(name.clone()).or_default();
        entries.insert((name, *count), what);
        *count += 1;
    });
    entries
}

/// Differences between tables whose entries have names.
fn named(what: &str, a: Entries, b: Entries, said: &mut Vec<String>) {
    for (key, in_a) in &a {
        let name = text(&key.0);
        match b.get(key) {
            None => said.push(format!("{what} {name}: only in A ({in_a})")),
            Some(in_b) if in_a != in_b => {
                said.push(format!("{what} {name}: A has {in_a}, B has {in_b}"));
            }
            Some(_) => {}
        }
    }
    for (key, in_b) in b.iter().filter(|(key, _)| !a.contains_key(key)) {
        said.push(format!("{what} {}: only in B ({in_b})", text(&key.0)));
    }
}

/// The passage by which two lists differ, in lines, or nothing.
fn passages(what: &str, a: Lines, b: Lines, said: &mut Vec<String>) {
    let Some((start, end_a, end_b)) = passage(&a, &b) else {
        return;
    };
    let mut words = match (start == end_a, start == end_b) {
        (true, _) => format!("{what}: B has {start}..{end_b} where A has nothing"),
        (_, true) => format!("{what}: A has {start}..{end_a} where B has nothing"),
        _ => format!("{what}: {start}..{end_a} of A are {start}..{end_b} of B"),
    };
    for (side, lines) in [("A", &a[start..end_a]), ("B", &b[start..end_b])] {
        for line in lines.iter().take(PASSAGE) {
            words.push_str(&format!("\n  {side}: {line}"));
        }
        if lines.len() > PASSAGE {
            words.push_str(&format!("\n  {side}: and {} more", lines.len() - PASSAGE));
        }
    }
    said.push(words);
}

/// Where two lists begin to differ, and where in each they are the same again.
fn passage(a: &[String], b: &[String]) -> Option<(usize, usize, usize)> {
    if a == b {
        return None;
    }
    let start = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let rest = a[start..].iter().rev().zip(b[start..].iter().rev());
    let end = rest.take_while(|(a, b)| a == b).count();
    Some((start, a.len() - end, b.len() - end))
}

/// The programs: first by what each instruction does, then, when that is the
/// same, by the values that it does it to.
fn program(a: &ArchivedPlan, b: &ArchivedPlan, said: &mut Vec<String>) {
    let before = said.len();
    passages(
        "instructions",
        lines(a, anonymous),
        lines(b, anonymous),
        said,
    );
    if said.len() > before {
        return;
    }
    for index in 0..a.instrs.len() as u32 {
        let (in_a, in_b) = (instr(a, index).to_string(), instr(b, index).to_string());
        if in_a != in_b {
            said.push(format!(
                "instructions do the same, but from {index} on to other values\n  A: {in_a}\n  B: {in_b}"
            ));
            return;
        }
    }
    let slots = (a.rng_slots, b.rng_slots);
    if slots.0 != slots.1 {
        said.push(format!(
            "generator slots: A has {}, B has {}",
            slots.0, slots.1
        ));
    }
}

/// The instructions without the numbers of their values, which shift when one
/// instruction comes or goes.
fn anonymous(plan: &ArchivedPlan, lines: &mut Lines) {
    for index in 0..plan.instrs.len() as u32 {
        let line = instr(plan, index).to_string();
        let mut parts = line.split('%');
        let mut without = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            without.push('%');
            without.push_str(part.trim_start_matches(|c: char| c.is_ascii_digit()));
        }
        lines.push(without);
    }
}

fn ints(plan: &ArchivedPlan, range: ArchivedRange) -> Vec<i64> {
    plan.dims[range.indices()]
        .iter()
        .map(|dim| dim.to_native())
        .collect()
}

fn meshes(plan: &ArchivedPlan, lines: &mut Lines) {
    for mesh in plan.meshes.iter() {
        let names = plan.ids[mesh.dim_names.indices()].iter();
        let names: Vec<_> = names
            .map(|id| text(plan.str(id.to_native())).to_string())
            .collect();
        lines.push(format!(
            "{} {:?} {} of ranks {:?}",
            text(plan.str(mesh.device_type.to_native())),
            ints(plan, mesh.shape),
            names.join(", "),
            ints(plan, mesh.ranks)
        ));
    }
}

fn groups(plan: &ArchivedPlan, lines: &mut Lines) {
    for group in plan.groups.iter() {
        // The name is a counter of the framework and changes with every run.
        let label = text(plan.str(group.label.to_native()));
        lines.push(format!("{label} of ranks {:?}", ints(plan, group.ranks)));
    }
}

fn bindings(plan: &ArchivedPlan, entry: &mut dyn FnMut(String, String)) {
    for binding in plan.bindings.iter() {
        let value = binding.value.to_native();
        let kind = binding_kind(binding.kind);
        let written = binding_marks(binding);
        entry(
            format!("{kind} {}", plan.str(binding.path.to_native())),
            format!(
                "{}, {}{written}",
                tensor(plan, value),
                spec_or_plain(plan, binding.spec.to_native())
            ),
        );
    }
}

fn outputs(plan: &ArchivedPlan, entry: &mut dyn FnMut(String, String)) {
    for output in plan.outputs.iter() {
        let requires_grad = if output.requires_grad {
            ", requires grad"
        } else {
            ""
        };
        entry(
            plan.str(output.path.to_native()).into(),
            format!(
                "{}, {}{requires_grad}",
                tensor(plan, output.value.to_native()),
                spec_or_plain(plan, output.spec.to_native())
            ),
        );
    }
}

fn grads(plan: &ArchivedPlan, entry: &mut dyn FnMut(String, String)) {
    for grad in plan.grads.iter() {
        let what = match grad.value.to_native() {
            NONE => "None".into(),
            value => {
                let spec = spec_or_plain(plan, grad.spec.to_native());
                format!("{}, {spec}", tensor(plan, value))
            }
        };
        entry(plan.str(grad.path.to_native()).into(), what);
    }
}

fn spec_or_plain(plan: &ArchivedPlan, id: u32) -> String {
    match id {
        NONE => "plain".into(),
        id => spec(plan, id).to_string(),
    }
}

fn scalars(plan: &ArchivedPlan, lines: &mut Lines) {
    lines.extend(
        plan.scalars
            .iter()
            .map(|entry| scalar(plan, *entry).to_string()),
    );
}

fn guards(plan: &ArchivedPlan, entry: &mut dyn FnMut(String, String)) {
    for guard in plan.guards.iter() {
        let subject = plan.str(guard.subject.to_native());
        let expected = text(plan.str(guard.expected.to_native()));
        entry(
            format!("{} {subject}", guard_kind(guard.kind)),
            expected.to_string(),
        );
    }
}

fn constants(plan: &ArchivedPlan, lines: &mut Lines) {
    for constant in plan.constants.iter() {
        let data = &plan.bytes[constant.data.indices()];
        let hash = xxhash_rust::xxh3::xxh3_64(data);
        let value = constant.value.to_native();
        lines.push(format!(
            "{} with bytes of hash {hash:016x}",
            tensor(plan, value)
        ));
    }
}

fn totals(plan: &ArchivedPlan, entry: &mut dyn FnMut(String, String)) {
    for total in collectives(plan) {
        let name = format!(
            "{} {} {}",
            total.group,
            total.kind,
            total.reduce.unwrap_or("")
        );
        let what = format!("{} of {}", total.count, Bytes(total.bytes));
        entry(name.trim_end().into(), what);
    }
}

fn strategies(plan: &ArchivedPlan, lines: &mut Lines) {
    for strategy in plan.strategies.iter() {
        let specs = |range: ArchivedRange| {
            let ids = plan.ids[range.indices()].iter();
            let specs: Vec<_> = ids
                .map(|id| placements(plan, id.to_native()).to_string())
                .collect();
            specs.join("; ")
        };
        let mut line = format!(
            "{}  {}  ({}) -> ({})",
            text(plan.str(strategy.source.to_native())),
            text(plan.str(strategy.op.to_native())),
            specs(strategy.inputs),
            specs(strategy.outputs)
        );
        for redistribution in &plan.redistributions[strategy.redistributions.indices()] {
            line.push_str(&format!(
                ", redistributes {} -> {}",
                placements(plan, redistribution.from.to_native()),
                spec(plan, redistribution.to.to_native())
            ));
        }
        lines.push(line);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file::PlanFile;
    use crate::sample;
    use crate::*;

    fn differences(change: impl FnOnce(&mut Plan)) -> Vec<String> {
        let mut changed = sample::small();
        change(&mut changed);
        let a = PlanFile::from_plan(&sample::small()).expect("valid");
        let b = PlanFile::from_plan(&changed).expect("valid");
        diff(a.plan(), b.plan())
    }

    #[test]
    fn a_plan_is_the_same_as_itself_however_its_pools_are_laid_out() {
        assert!(differences(|_| ()).is_empty());
        let moved = differences(|plan| {
            plan.strings.push("not used".into());
            let start = plan.dims.len() as u32;
            plan.dims.extend([4, 8]);
            plan.values[0].shape = Range { start, len: 2 };
        });
        assert!(moved.is_empty(), "{moved:?}");
    }

    #[test]
    fn each_table_has_its_words() {
        type Change = fn(&mut Plan);
        let changes: &[(Change, &str)] = &[
            (
                |p| p.function = "eval".into(),
                "function: A has train.py:train_step, B has eval",
            ),
            (
                |p| p.fingerprint.framework = "torch 2.11.0".into(),
                "framework: A has torch 2.15.0, B has torch 2.11.0",
            ),
            (|p| p.fingerprint.rank = 0, "rank: A has 1, B has 0"),
            (|p| p.result = String::new(), "result: A has {\"dict\""),
            (
                |p| p.bindings[1].written = false,
                "binding state model.weight: A has f32[8,8], S(1) of [8,16], written, B has \
                 f32[8,8], S(1) of [8,16]",
            ),
            (
                |p| p.bindings[0].path = p.bindings[1].path,
                "binding argument args[0]: only in A (f32[4,8], plain)",
            ),
            (
                |p| {
                    p.outputs.clear();
                    p.result.clear();
                },
                "output result['loss']: only in A (f32[], plain, requires grad)",
            ),
            (
                |p| p.grads[1].value = p.grads[0].value,
                "gradient of model.weight: A has None, B has f32[4,8], plain",
            ),
            (
                |p| p.scalars[1] = Scalar::Const(2.0),
                "scalars: 1..2 of A are 1..2 of B\n  A: -1.0\n  B: 2.0",
            ),
            (
                |p| p.guards[0].expected = 0,
                "guard argument args[0].shape: A has (4, 8), B has ",
            ),
            (
                |p| p.bytes[0] = 1,
                "constants: 0..1 of A are 0..1 of B\n  A: f32[2] with bytes of hash",
            ),
            (
                |p| {
                    p.instrs.remove(9);
                },
                "instructions: A has 9..10 where B has nothing\n  A: % = aten::mul_(%, wrapped(2.0))",
            ),
            (
                |p| {
                    let at = p
                        .args
                        .iter()
                        .position(|a| *a == Arg::Value(3))
                        .expect("there");
                    p.args[at] = Arg::Value(0);
                },
                "instructions do the same, but from 6 on to other values\n  A: %4 f32[4,8] = \
                 aten::add(%3, %3, 1)\n  B: %4 f32[4,8] = aten::add(%0, %3, 1)",
            ),
            (|p| p.rng_slots = 2, "generator slots: A has 1, B has 2"),
            (
                |p| p.values[3].storage_bytes = 1024,
                "memory of results at its peak: A has 256 B, B has 1.1 KiB",
            ),
            (
                |p| p.strategies.clear(),
                "global ops: A has 0..1 where B has nothing\n  A: train.py:12  aten::mm  \
                 (-; S(1)) -> (P(sum)), redistributes P(sum) -> R of [4,8]",
            ),
            (
                |p| p.groups[0].label = 0,
                "groups: 0..1 of A are 0..1 of B\n  A: tp of ranks [0, 1]\n  B: cpu of ranks",
            ),
        ];
        let every = if cfg!(miri) { 5 } else { 1 };
        for (change, expected) in changes.iter().step_by(every) {
            let said = differences(change);
            assert!(
                said.iter().any(|line| line.starts_with(expected)),
                "{expected}: {said:#?}"
            );
        }
    }

    #[test]
    fn long_passages_are_cut() {
        let other =
            PlanFile::from_plan(&sample::large(if cfg!(miri) { 16 } else { 100 })).expect("valid");
        let a = PlanFile::from_plan(&sample::small()).expect("valid");
        let said = diff(a.plan(), other.plan());
        assert!(
            said.iter().any(|line| line.contains("\n  B: and ")),
            "{said:#?}"
        );
        assert!(
            said.iter()
                .all(|line| line.lines().count() <= 2 * PASSAGE + 3),
            "{said:#?}"
        );
    }
}
