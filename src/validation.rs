//! Requests to the truth table and its reports as JSON, so that the command line, C and
//! Python ask the same way.

use std::sync::Arc;

use rote_propagation::{Combination, Mesh, PartialOp, Placement, Registry};
use rote_validation::samples::{self, Sample};
use rote_validation::{Event, Finding, Kernels, OpReport, Options, validate};
use serde_json::{Value as Json, json};

use crate::own_rules::{self, Ask};

/// Answers a request, a JSON object:
///
/// - `ops`: names such as `aten::mm`, `mm` or `add.Tensor`, or `all`,
/// - `mesh`: such as `2` or `dp=2,tp=2`,
/// - `args`: the arguments of one op, in the notation of the samples; without,
///   its samples are judged,
/// - `only`: one combination, such as `S(0),R -> S(0)`,
/// - `missing`: whether to look for rules that are missing; true by default,
/// - `own`: names of ops for which `ask` states the rule ([`own_rules`]),
/// - `placements`: placements of registered kinds (`RaggedShard(0,1,3)`, `P(LogSumExp)`) by which
///   placeholders are filled, too,
/// - `changes`: lists of op, strategy and what to put in its place, for tests.
///
/// `tell` is given JSON objects: `{"start": op, "number": 1, "total": 2}` before
/// each op, its report after it.
///
/// # Errors
///
/// What is wrong with the request.
pub fn answer(
    request: &str,
    kernels: &mut dyn Kernels,
    ask: Option<Arc<Ask>>,
    tell: &mut dyn FnMut(&str),
) -> Result<(), String> {
    let request: Json = serde_json::from_str(request).map_err(|e| format!("the request: {e}"))?;
    let text = |key: &str| request.get(key).and_then(Json::as_str);
    let mesh = Mesh::parse(text("mesh").unwrap_or("2")).map_err(|e| e.to_string())?;
    let names: Vec<&str> = match request.get("ops").and_then(Json::as_array) {
        Some(names) => names.iter().filter_map(Json::as_str).collect(),
        None => vec!["all"],
    };
    let dims = mesh.sizes().len();
    let only = text("only").map(|only| Combination::parse(only, dims));
    let placements = request.get("placements").and_then(Json::as_array);
    let placements = placements.into_iter().flatten().filter_map(Json::as_str);
    let registered: Vec<Placement> = placements.map(is_registered).collect::<Result<_, _>>()?;
    let mut rules = Registry::standard().map_err(|e| e.to_string())?;
    for change in request
        .get("changes")
        .and_then(Json::as_array)
        .into_iter()
        .flatten()
    {
        let part = |i: usize| change.get(i).and_then(Json::as_str);
        let (Some(op), Some(from), Some(to)) = (part(0), part(1), part(2)) else {
            return Err(format!(
                "a change is [op, strategy, strategy], found {change}"
            ));
        };
        rules.change(op, from, to);
    }
    if let Some(own) = request.get("own").and_then(Json::as_array) {
        let ask = ask.ok_or("nobody states the scripts' own rules")?;
        own_rules::put(&mut rules, own.iter().filter_map(Json::as_str), &ask);
    }
    let samples = chosen(&names, text("args"), &mesh)?;
    let all = names.contains(&"all");
    let known: Vec<String> = samples.iter().map(|s| s.op.clone()).collect();
    let options = Options {
        samples,
        mesh,
        only: only.transpose().map_err(|e| e.to_string())?,
        missing: request.get("missing").and_then(Json::as_bool) != Some(false),
        registered,
    };
    validate(&rules, kernels, &options, &mut |event| {
        let line = match event {
            Event::Start { op, number, total } => {
                json!({"start": op, "number": number, "total": total})
            }
            Event::Done(report) => described(report, &options),
        };
        tell(&line.to_string());
    });
    for op in rules.ops() {
        if all && !known.iter().any(|k| k == op) {
            let mut report = OpReport {
                op: op.to_owned(),
                ..OpReport::default()
            };
            report.unjudged.push(("no sample".into(), String::new()));
            tell(&described(&report, &options).to_string());
        }
    }
    Ok(())
}

/// The placement of a registered kind, whose pieces or parts can be made.
fn is_registered(text: &str) -> Result<Placement, String> {
    let placement = Placement::parse(text).map_err(|e| e.to_string())?;
    match placement {
        Placement::Registered { .. } => Ok(placement),
        Placement::Partial(PartialOp::Registered(partial)) if partial.combines() => Ok(placement),
        Placement::Partial(PartialOp::Registered(partial)) => Err(format!(
            "P({partial}): it is not known how parts combine: register it with combine="
        )),
        _ => Err(format!(
            "{text}: expected a placement of a registered class"
        )),
    }
}

/// The samples to judge.
fn chosen(names: &[&str], args: Option<&str>, mesh: &Mesh) -> Result<Vec<Sample>, String> {
    if let Some(args) = args {
        let [op] = names else {
            return Err(format!(
                "arguments are those of one op, found {}",
                names.join(", ")
            ));
        };
        let op = match op.contains("::") {
            true => (*op).to_owned(),
            false => format!("aten::{op}"),
        };
        let sample = Sample::read(&format!("{op} {args}"))?;
        sample.replicated(mesh).map_err(|e| e.to_string())?;
        return Ok(vec![sample]);
    }
    let samples = samples::all()?;
    for name in names.iter().filter(|n| **n != "all") {
        if !samples.iter().any(|s| is_named(&s.op, name)) {
            return Err(format!("{name}: no sample of this op; give its arguments"));
        }
    }
    let wanted = |s: &Sample| names.iter().any(|n| *n == "all" || is_named(&s.op, n));
    Ok(samples.into_iter().filter(wanted).collect())
}

/// Whether an op goes by a name with or without namespace and overload.
fn is_named(op: &str, name: &str) -> bool {
    let short = op.strip_prefix("aten::").unwrap_or(op);
    [op, short]
        .iter()
        .any(|full| *full == name || full.split('.').next() == Some(name))
}

fn described(report: &OpReport, options: &Options) -> Json {
    let sizes: Vec<_> = options
        .mesh
        .sizes()
        .iter()
        .map(ToString::to_string)
        .collect();
    let placements = options.registered.iter();
    let placements: String = placements.map(|p| format!(" --placement '{p}'")).collect();
    let findings = |list: &[Finding]| -> Vec<Json> {
        let one = |f: &Finding| {
            let combination = f.combination.to_string();
            let mesh = match sizes.as_slice() {
                [world] => format!("--world {world}"),
                sizes => format!("--mesh {}", sizes.join(",")),
            };
            let only = match f.combination.inputs.is_empty() && f.combination.outputs.is_empty() {
                true => String::new(),
                false => format!(" --only '{combination}'"),
            };
            json!({
                "combination": combination,
                "args": f.args,
                "reason": f.reason,
                "repro": format!(
                    "rote validate --op {} --args \"{}\" {mesh}{placements}{only}",
                    report.op, f.args
                ),
            })
        };
        list.iter().map(one).collect()
    };
    let unjudged = report.unjudged.iter();
    let unjudged: Vec<_> = unjudged
        .map(|(reason, args)| json!({"reason": reason, "args": args}))
        .collect();
    json!({
        "op": report.op,
        "samples": report.samples,
        "tried": report.tried,
        "correct": report.correct,
        "wrong": findings(&report.wrong),
        "missing": findings(&report.missing),
        "left_out": findings(&report.left_out),
        "untrue": findings(&report.untrue),
        "unjudged": unjudged,
    })
}

#[cfg(test)]
mod tests {
    use super::is_named;

    #[test]
    fn ops_go_by_short_names() {
        for name in ["aten::add.Tensor", "add.Tensor", "add", "aten::add"] {
            assert!(is_named("aten::add.Tensor", name), "{name}");
        }
        assert!(!is_named("aten::add.Tensor", "add.Scalar") && !is_named("aten::mm", "m"));
    }
}
