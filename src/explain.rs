//! The work that a session has erased, and the causes of its collectives, as text for people.

use std::fmt::Write as _;

use rote_plans::describe::{self, Bytes};
use rote_plans::instr::ArchivedInstr;
use rote_plans::pool::ArchivedRange;
use rote_plans::{ArchivedPlan, NONE};

use crate::opinion;
use crate::optimized;
use crate::session::Session;
use rote_replay::Frontend;

/// The text of `explain()`: counters, and for each plan what it erased, its
/// collectives with their causes, the redistributions, the second opinion on them
/// and the guards; then
/// misses and refusals.
pub fn explain<F: Frontend>(session: &Session<F>) -> String {
    let mut out = String::new();
    let stats = session.stats();
    let _ = writeln!(
        out,
        "calls {}, replays {}, recordings {}, fallbacks {}, variants {}",
        stats.calls,
        stats.replays,
        stats.recordings,
        stats.fallbacks,
        session.variants().len()
    );
    if stats.altered + stats.kept > 0 {
        let _ = writeln!(
            out,
            "{} replays ran with altered collectives; {} replays kept the collectives of eager, because not all ranks \
             could follow; the ranks compared their collectives {} times",
            stats.altered, stats.kept, stats.exchanges
        );
    }
    if let Some(why) = session.unfit() {
        let _ = writeln!(
            out,
            "the altered collectives of the ranks did not fit together: {why}"
        );
    }
    for variant in session.variants() {
        let _ = writeln!(out, "\nplan {} ({} replays)", variant.key, variant.replays);
        describe_plan(variant.file.plan(), &mut out);
        for line in optimized::section(&variant.passes).lines() {
            let _ = writeln!(out, "  {line}");
        }
    }
    if !stats.guard_misses.is_empty() {
        let mut misses: Vec<_> = stats.guard_misses.iter().collect();
        misses.sort();
        let _ = writeln!(out, "\nguard misses");
        for (subject, times) in misses {
            let _ = writeln!(out, "  {times:>5}  {subject}");
        }
    }
    if !stats.refusals.is_empty() {
        let _ = writeln!(out, "\nrefusals");
        for refusal in &stats.refusals {
            let _ = writeln!(out, "  {refusal}");
        }
    }
    out
}

fn describe_plan(plan: &ArchivedPlan, out: &mut String) {
    let instructions = describe::instructions(plan);
    let _ = writeln!(
        out,
        "  {} global ops, their sharding propagation and dispatch, became {} local ops, {} views and {} collectives",
        plan.strategies.len(),
        instructions.local,
        instructions.views,
        instructions.collectives,
    );
    let _ = writeln!(
        out,
        "  reads {} bindings, writes {} of them, returns {} tensors, leaves {} gradients",
        plan.bindings.len(),
        plan.bindings
            .iter()
            .filter(|binding| binding.written)
            .count(),
        plan.outputs.len(),
        plan.grads.iter().filter(|grad| grad.value != NONE).count()
    );
    global_ops(plan, out);
    collectives(plan, out);
    redistributions(plan, out);
    out.push_str(&opinion::section(plan));
    guards(plan, out);
}

/// Global ops by name, most frequent first.
fn global_ops(plan: &ArchivedPlan, out: &mut String) {
    let mut names: Vec<(&str, usize)> = Vec::new();
    for strategy in plan.strategies.iter() {
        let name = plan.str(strategy.op.to_native());
        match names.iter_mut().find(|(known, _)| *known == name) {
            Some((_, times)) => *times += 1,
            None => names.push((name, 1)),
        }
    }
    names.sort_by_key(|&(_, times)| std::cmp::Reverse(times));
    if !names.is_empty() {
        let list: Vec<String> = names
            .iter()
            .map(|(name, times)| format!("{name} x{times}"))
            .collect();
        let _ = writeln!(out, "  global ops: {}", list.join(", "));
    }
}

fn covers(range: &ArchivedRange, instr: usize) -> bool {
    range.indices().contains(&instr)
}

/// Collectives by kind, group and cause.
fn collectives(plan: &ArchivedPlan, out: &mut String) {
    let mut rows: Vec<(String, usize, u64)> = Vec::new();
    let mut add = |name: String, bytes: u64| match rows.iter_mut().find(|row| row.0 == name) {
        Some(row) => {
            row.1 += 1;
            row.2 += bytes;
        }
        None => rows.push((name, 1, bytes)),
    };
    for (i, instr) in plan.instrs.iter().enumerate() {
        let c = match instr {
            ArchivedInstr::Collective(c) => c,
            _ => {
                if let Some((name, bytes)) = describe::exchange(plan, instr) {
                    add(format!("{name}: the step itself"), bytes);
                }
                continue;
            }
        };
        let strategy = plan.strategies.iter().find(|s| covers(&s.instrs, i));
        let redistribution = plan.redistributions.iter().find(|r| covers(&r.instrs, i));
        let cause = match (strategy, redistribution) {
            (Some(s), _) => format!(
                "{} at {}",
                plan.str(s.op.to_native()),
                plan.str(s.source.to_native())
            ),
            (None, Some(r)) => format!("redistribute at {}", plan.str(r.source.to_native())),
            (None, None) => "the step itself".to_owned(),
        };
        let group = plan.str(plan.groups[c.group.to_native() as usize].label.to_native());
        let name = format!("{} on {group}: {cause}", describe::collective_kind(c.kind));
        let input = &plan.values[c.input.to_native() as usize];
        add(name, describe::tensor_bytes(plan, input));
    }
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(out, "  collectives (times, bytes put in by this rank)");
    for (name, times, bytes) in rows {
        let _ = writeln!(out, "    {times:>4} {:>10}  {name}", Bytes(bytes));
    }
}

/// Redistributions that moved data, alike ones together.
fn redistributions(plan: &ArchivedPlan, out: &mut String) {
    let mut rows: Vec<(String, usize, u64)> = Vec::new();
    for r in plan.redistributions.iter().filter(|r| r.bytes != 0) {
        let name = format!(
            "{} -> {} at {}",
            describe::placements(plan, r.from.to_native()),
            describe::placements(plan, r.to.to_native()),
            plan.str(r.source.to_native())
        );
        match rows.iter_mut().find(|row| row.0 == name) {
            Some(row) => {
                row.1 += 1;
                row.2 += r.bytes.to_native();
            }
            None => rows.push((name, 1, r.bytes.to_native())),
        }
    }
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(out, "  redistributions (times, bytes put in by this rank)");
    for (name, times, bytes) in rows {
        let _ = writeln!(out, "    {times:>4} {:>10}  {name}", Bytes(bytes));
    }
}

fn guards(plan: &ArchivedPlan, out: &mut String) {
    use rote_plans::binding::ArchivedGuardKind as Kind;
    let count = |kinds: &[Kind]| {
        plan.guards
            .iter()
            .filter(|guard| kinds.contains(&guard.kind))
            .count()
    };
    let _ = writeln!(
        out,
        "  guards: {} on arguments, {} on state, {} on host values, {} on modes, {} on the world",
        count(&[Kind::Argument, Kind::Structure]),
        count(&[Kind::State]),
        count(&[Kind::Host]),
        count(&[Kind::Mode]),
        count(&[Kind::World])
    );
}
