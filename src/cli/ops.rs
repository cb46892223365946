//! `rote propagate --ops`: the ops that have rules, and the rule of each name.

use std::collections::HashMap;
use std::io::{self, BufRead, Write};

use rote_propagation::{Form, standard_rules};
use rote_validation::samples;
use serde_json::json;

use super::{Trouble, complain};

/// Says of every name which registered op its rule is that of and how many
/// sample calls there are; without names, of every registered op. `-` stands for
/// names on stdin, one per line.
pub(super) fn run(names: &[&str], json: bool, out: &mut impl Write) -> Result<u8, Trouble> {
    let rules = match standard_rules() {
        Ok(rules) => rules,
        Err(error) => return refuse(&error.to_string()),
    };
    let samples = match samples::all() {
        Ok(samples) => samples,
        Err(error) => return refuse(&error),
    };
    // Sample calls per name without overload, and per registered op.
    let mut by_name: HashMap<&str, usize> = HashMap::new();
    let mut by_rule: HashMap<String, usize> = HashMap::new();
    for sample in &samples {
        *by_name.entry(without_overload(&sample.op)).or_default() += 1;
        if let Some((base, _)) = rules.base(&sample.op) {
            *by_rule.entry(base).or_default() += 1;
        }
    }
    let mut asked: Vec<String> = Vec::new();
    for name in names {
        match *name {
            "-" => asked.extend(io::stdin().lock().lines().collect::<Result<Vec<_>, _>>()?),
            name => asked.push(name.to_owned()),
        }
    }
    if names.is_empty() {
        asked = rules.ops().into_iter().map(str::to_owned).collect();
    }
    let mut all_known = true;
    for op in asked.iter().map(|op| op.trim()).filter(|op| !op.is_empty()) {
        let base = rules.base(op);
        let by_name = by_name.get(without_overload(op)).copied().unwrap_or(0);
        let by_rule = |base| by_rule.get(base).copied().unwrap_or(0);
        all_known &= base.is_some();
        let Some((base, form)) = base else {
            match json {
                true => writeln!(out, "{}", json!({"op": op, "rule": null}))?,
                false => writeln!(out, "{op:<40} no rule")?,
            }
            continue;
        };
        let form = match form {
            Form::Functional => "functional",
            Form::InPlace => "in place",
            Form::Out => "out",
            Form::Each => "each",
        };
        if json {
            let line = json!({
                "op": op,
                "rule": base,
                "form": form,
                "random": rules.draws(op),
                "samples": by_name,
                "samples_of_rule": by_rule(&base),
            });
            writeln!(out, "{line}")?;
        } else {
            write!(out, "{op:<40} {by_name:>3} samples")?;
            match base == op {
                true => writeln!(out)?,
                false => writeln!(out, "  {form}, by the rule of {base}")?,
            }
        }
    }
    Ok(u8::from(!all_known))
}

fn without_overload(op: &str) -> &str {
    op.split('.').next().unwrap_or(op)
}

fn refuse(error: &str) -> Result<u8, Trouble> {
    complain(error);
    Ok(1)
}
