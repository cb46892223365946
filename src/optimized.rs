//! The effect of passes on a plan, for people and tools.

use std::fmt::Write as _;

use rote_passes::{PASSES, Report, Selection};
use serde_json::{Value, json};

/// One line per pass: its name, and what it did or that it is off.
pub fn section(report: &Report) -> String {
    let mut out = String::from("passes\n");
    for pass in PASSES {
        let done = report.iter().find(|(name, _)| *name == pass.name);
        let what = match done {
            Some((_, done)) => done.what.clone(),
            None => format!("off ({})", pass.about),
        };
        let _ = writeln!(out, "  {:<12} {what}", pass.name);
    }
    out
}

/// The same as JSON.
pub fn json(report: &Report, chosen: Selection) -> Value {
    let rows = PASSES.iter().map(|pass| {
        let done = report.iter().find(|(name, _)| *name == pass.name);
        json!({
            "name": pass.name,
            "about": pass.about,
            "by_default": pass.by_default,
            "alters_collectives": pass.alters_collectives,
            "keeps_bits": pass.keeps_bits,
            "on": chosen.has(pass.name),
            "changed": done.map(|(_, done)| done.changed),
            "what": done.map(|(_, done)| done.what.clone()),
        })
    });
    json!({"passes": rows.collect::<Vec<_>>()})
}
