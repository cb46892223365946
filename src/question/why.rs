//! The reasons of a decision, as text and as JSON.

use std::io::{self, Write};

use rote_propagation::{Explanation, Mesh, Other, Verdict};
use serde_json::{Value, json};

/// Prints rule, strategies and what each other strategy would have cost.
pub fn print(why: &Explanation, mesh: &Mesh, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "rule       {} ({})", why.rule, why.family)?;
    for (name, choice) in mesh.names().iter().zip(&why.choices) {
        writeln!(out, "{name:<10} {}", choice.strategy)?;
        for other in &choice.others {
            let strategy = other.strategy.to_string();
            let reason = reason(other, why.decision.cost_us, mesh);
            writeln!(out, "  not      {strategy:<24} {reason}")?;
        }
    }
    Ok(())
}

fn reason(other: &Other, chosen_us: f64, mesh: &Mesh) -> String {
    match &other.verdict {
        Verdict::Costs { cost_us, steps } => {
            let mut ways = Vec::new();
            for (input, way) in steps.iter().enumerate() {
                for step in way.iter().filter(|s| !s.kind.is_local()) {
                    let name = &mesh.names()[step.mesh_dim];
                    ways.push(format!("{} of input {input} on {name}", step.kind));
                }
            }
            let more = match cost_us - chosen_us {
                more if more > 5e-5 => format!("{more:.1} us more"),
                _ => "costs the same".into(),
            };
            match ways.len() {
                0 => more,
                _ => format!("{more}: {}", ways.join(", ")),
            }
        }
        Verdict::Unfit => "a shard would be empty or divide a dim unevenly".into(),
        Verdict::NoWay { input } => format!("no way to bring input {input} there"),
        Verdict::Written { input } => format!("input {input} is written and stays where it is"),
    }
}

/// The reasons as an object with the rule, its family and the mesh dims.
pub(super) fn described(why: &Explanation, mesh: &Mesh) -> Value {
    let mesh_dims = mesh.names().iter().zip(&why.choices);
    let mesh_dims: Vec<_> = mesh_dims
        .map(|(name, choice)| {
            let others = choice.others.iter().map(|other| {
                let mut row = json!({
                    "strategy": other.strategy.to_string(),
                    "reason": reason(other, why.decision.cost_us, mesh),
                });
                if let Verdict::Costs { cost_us, .. } = other.verdict {
                    row["cost_us"] = cost_us.into();
                }
                row
            });
            json!({
                "mesh_dim": name,
                "strategy": choice.strategy.to_string(),
                "others": others.collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({"rule": why.rule, "family": why.family, "mesh_dims": mesh_dims})
}
