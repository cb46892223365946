//! What a session erased and why, as text for people.

use std::fmt::Write as _;

use rote_plans::{ArchivedPlan, NONE, Plan};

use crate::session::Session;

/// The text of `explain()`.
pub fn explain(session: &Session) -> String {
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
    for variant in session.variants() {
        let plan = variant.file.to_plan();
        let _ = writeln!(out, "\nplan {} ({} replays)", variant.key, variant.replays);
        erased(&plan, &mut out);
        collectives(&plan, &mut out);
        redistributions(&plan, &mut out);
        guards(&plan, &mut out);
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

/// How many instructions of each kind a plan has: local ops, views,
/// collectives.
pub fn counts(plan: &ArchivedPlan) -> (usize, usize, usize) {
    use rote_plans::instr::ArchivedInstr;
    let count = |wanted: fn(&ArchivedInstr) -> bool| plan.instrs.iter().filter(|i| wanted(i)).count();
    (
        count(|i| matches!(i, ArchivedInstr::Local { .. })),
        count(|i| matches!(i, ArchivedInstr::View { .. })),
        count(|i| matches!(i, ArchivedInstr::Collective(_))),
    )
}

fn erased(plan: &Plan, out: &mut String) {
    use rote_plans::Instr;
    let count = |wanted: fn(&Instr) -> bool| plan.instrs.iter().filter(|i| wanted(i)).count();
    let _ = writeln!(
        out,
        "  {} global ops, their sharding propagation and dispatch, became {} local ops, {} views and {} collectives",
        plan.strategies.len(),
        count(|i| matches!(i, Instr::Local { .. })),
        count(|i| matches!(i, Instr::View { .. })),
        count(|i| matches!(i, Instr::Collective(_))),
    );
    let written = plan.bindings.iter().filter(|binding| binding.written).count();
    let _ = writeln!(
        out,
        "  reads {} bindings, writes {written} of them, returns {} tensors, leaves {} gradients",
        plan.bindings.len(),
        plan.outputs.len(),
        plan.grads.iter().filter(|grad| grad.value != NONE).count()
    );
}

fn collectives(plan: &Plan, out: &mut String) {
    let mut rows: Vec<(String, usize, u64)> = Vec::new();
    for (i, instr) in plan.instrs.iter().enumerate() {
        let rote_plans::Instr::Collective(c) = instr else { continue };
        let strategy = plan.strategies.iter().find(|s| s.instrs.indices().contains(&i));
        let cause = strategy.map_or_else(
            || {
                let redistribution = plan.redistributions.iter().find(|r| r.instrs.indices().contains(&i));
                redistribution.map_or_else(|| "called by the step".to_owned(), |r| format!("redistribute at {}", plan.str(r.source)))
            },
            |s| format!("{} at {}", plan.str(s.op), plan.str(s.source)),
        );
        let name = format!("{:?} on {}: {cause}", c.kind, plan.str(plan.groups[c.group as usize].label));
        let bytes = rote_tracer::finish::collective_bytes(plan, i as u32);
        match rows.iter_mut().find(|row| row.0 == name) {
            Some(row) => {
                row.1 += 1;
                row.2 += bytes;
            }
            None => rows.push((name, 1, bytes)),
        }
    }
    if rows.is_empty() {
        return;
    }
    let _ = writeln!(out, "  collectives (times, bytes sent by this rank)");
    for (name, times, bytes) in rows {
        let _ = writeln!(out, "    {times:>4} {bytes:>10}  {name}");
    }
}

fn redistributions(plan: &Plan, out: &mut String) {
    if plan.redistributions.is_empty() {
        return;
    }
    let _ = writeln!(out, "  redistributions (bytes sent by this rank)");
    for r in &plan.redistributions {
        let _ = writeln!(
            out,
            "    {:>10}  {} -> {} at {}",
            r.bytes,
            placements(plan, r.from),
            placements(plan, r.to),
            plan.str(r.source)
        );
    }
}

fn placements(plan: &Plan, spec: u32) -> String {
    use rote_plans::Placement;
    let Some(spec) = plan.specs.get(spec as usize) else { return "plain".to_owned() };
    let parts: Vec<String> = plan.placements[spec.placements.indices()]
        .iter()
        .map(|placement| match placement {
            Placement::Replicate => "R".to_owned(),
            Placement::Shard { dim } => format!("S({dim})"),
            Placement::StridedShard { dim, split_factor } => format!("_S({dim}, {split_factor})"),
            Placement::Partial { op } => format!("P({})", format!("{op:?}").to_lowercase()),
            Placement::Other { text } => plan.str(*text).to_owned(),
        })
        .collect();
    format!("{:?} {}", plan.dims(spec.shape), parts.join(","))
}

fn guards(plan: &Plan, out: &mut String) {
    use rote_plans::GuardKind;
    let count = |kind: GuardKind| plan.guards.iter().filter(|guard| guard.kind == kind).count();
    let _ = writeln!(
        out,
        "  guards: {} on arguments, {} on state, {} on host values, {} on modes, {} on the world",
        count(GuardKind::Argument) + count(GuardKind::Structure),
        count(GuardKind::State),
        count(GuardKind::Host),
        count(GuardKind::Mode),
        count(GuardKind::World)
    );
}
