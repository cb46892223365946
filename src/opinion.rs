//! The second opinion on a plan, as text for people and as JSON.

use std::fmt::Write as _;

use crate::second_opinion::{Opinion, opinions};
use rote_plans::ArchivedPlan;
use rote_plans::describe::{Bytes, text};
use rote_propagation::{Input, Propagation, written};
use serde_json::{Value, json};

/// The section of `explain()` and `rote show`: what DTensor moved for global ops
/// beside what the cheapest strategies would have moved, the largest savings
/// first. Empty where DTensor moved nothing.
pub fn section(plan: &ArchivedPlan) -> String {
    let opinions = opinions(plan);
    let mut out = String::new();
    let (judged, unjudged): (Vec<_>, Vec<_>) = opinions.iter().partition(|o| o.cheapest.is_ok());
    let count = |opinions: &[&Opinion]| opinions.iter().map(|o| o.times).sum::<u64>();
    let dearer: Vec<&Opinion> = (judged.iter().copied())
        .filter(|o| o.saved() > Some(0))
        .collect();
    if !dearer.is_empty() {
        let _ = writeln!(
            out,
            "  second opinion (times, bytes that a rank would send less)"
        );
        for opinion in &dearer {
            let _ = writeln!(out, "    {}", line(opinion));
        }
        let sum = |bytes: fn(&Opinion) -> Option<u64>| {
            let each = dearer
                .iter()
                .map(|o| bytes(o).unwrap_or(0).saturating_mul(o.times));
            Bytes(each.fold(0, u64::saturating_add))
        };
        let _ = writeln!(
            out,
            "    in total {} less: DTensor moved {} for these, the cheapest strategies would {}",
            sum(Opinion::saved),
            sum(|o| Some(o.bytes())),
            sum(Opinion::cheapest_bytes)
        );
    }
    let fine = count(&judged) - count(&dearer);
    match (fine, dearer.is_empty()) {
        (0, _) => {}
        (1, true) => {
            out.push_str("  second opinion: what DTensor moved for 1 op was the cheapest\n")
        }
        (fine, true) => {
            let _ = writeln!(
                out,
                "  second opinion: what DTensor moved for {fine} ops was the cheapest each time"
            );
        }
        (fine, false) => {
            let _ = writeln!(out, "    the cheapest already: {fine} more");
        }
    }
    if !unjudged.is_empty() {
        let _ = writeln!(out, "  no second opinion (times)");
    }
    for opinion in unjudged {
        if let Err(why) = &opinion.cheapest {
            let why = why.to_string();
            let why = why
                .strip_prefix(&format!("{}: ", opinion.op))
                .unwrap_or(&why);
            let _ = writeln!(
                out,
                "    {:>4}  {}: {}",
                opinion.times,
                place(opinion),
                text(why)
            );
        }
    }
    out
}

fn line(opinion: &Opinion) -> String {
    let moved = opinion.moved.iter();
    let moved = moved.map(|m| format!("{} -> {}", text(&m.from), text(&m.to)));
    let outputs = opinion.outputs.iter().map(|o| text(o).to_string());
    let mut line = format!(
        "{:>4} {:>10}  {}: DTensor moved {} (out {}): {}",
        opinion.times,
        Bytes(opinion.saved().unwrap_or(0)),
        place(opinion),
        listed(moved),
        listed(outputs),
        Bytes(opinion.bytes())
    );
    if let Ok(cheapest) = &opinion.cheapest {
        let keeps = cheapest.inputs.iter().all(|input| input.from == input.to);
        let inputs = cheapest.inputs.iter().map(|input| taken(input, opinion));
        let outputs = cheapest.outputs.iter().map(|o| written(&o.placements));
        let _ = write!(
            line,
            "; cheapest {} {} (out {}): {}",
            if keeps { "keeps" } else { "takes" },
            listed(inputs),
            listed(outputs),
            Bytes(opinion.cheapest_bytes().unwrap_or(0))
        );
    }
    line
}

fn place(opinion: &Opinion) -> String {
    match opinion.source.as_str() {
        "" => text(&opinion.op).to_string(),
        source => format!("{} at {}", text(&opinion.op), text(source)),
    }
}

/// An input as the cheapest strategy takes it, and how it gets there.
fn taken(input: &Input, opinion: &Opinion) -> String {
    let (from, to) = (written(&input.from), written(&input.to));
    if from == to {
        return from;
    }
    let steps = input.steps.iter();
    let steps: Vec<String> = steps
        .map(|s| format!("{} on {}", s.kind, text(&opinion.mesh_dims[s.mesh_dim])))
        .collect();
    format!("{from} -> {to} by {}", steps.join(" and "))
}

/// Separated by semicolons, equal neighbours once with their number.
fn listed(items: impl Iterator<Item = String>) -> String {
    let mut runs: Vec<(String, usize)> = Vec::new();
    for item in items {
        match runs.last_mut() {
            Some((last, times)) if *last == item => *times += 1,
            _ => runs.push((item, 1)),
        }
    }
    let shown = runs.into_iter().map(|(item, times)| match times {
        1 => item,
        _ => format!("{item} x{times}"),
    });
    shown.collect::<Vec<_>>().join("; ")
}

/// All opinions for programs, those that agree with DTensor as well.
pub fn json(plan: &ArchivedPlan) -> Value {
    let one = |opinion: &Opinion| {
        let moved: Vec<_> = (opinion.moved.iter())
            .map(|m| json!({"from": m.from, "to": m.to, "bytes": m.bytes}))
            .collect();
        let cheapest = opinion.cheapest.as_ref();
        json!({
            "op": opinion.op,
            "source": opinion.source,
            "times": opinion.times,
            "mesh": opinion.mesh,
            "moved": moved,
            "outputs": opinion.outputs,
            "bytes": opinion.bytes(),
            "cheapest": cheapest.ok().map(strategy),
            "saved": opinion.saved(),
            "no_opinion": cheapest.err().map(ToString::to_string),
        })
    };
    opinions(plan).iter().map(one).collect()
}

fn strategy(cheapest: &Propagation) -> Value {
    let inputs: Vec<_> = (cheapest.inputs.iter())
        .map(|input| {
            json!({"from": written(&input.from), "to": written(&input.to), "bytes": input.bytes()})
        })
        .collect();
    let outputs = cheapest.outputs.iter().map(|o| written(&o.placements));
    json!({
        "inputs": inputs,
        "outputs": outputs.collect::<Vec<_>>(),
        "bytes": cheapest.bytes(),
        "cost_us": cheapest.cost_us,
    })
}
