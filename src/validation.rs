//! The truth table with PyTorch's kernels: requests and reports as JSON, so that
//! the command line, C and Python ask the same way.

use rote_plans::DType;
use rote_propagation::{Combination, Mesh, Registry, TensorMeta};
use rote_replay::aten::eager::{CallArg, HostData, call};
use rote_validation::samples::{self, Sample};
use rote_validation::{
    Event, Finding, HostTensor, Kernels, OpReport, Options, Ran, Value, validate,
};
use serde_json::{Value as Json, json};

/// PyTorch's kernels on the CPU, through the bridge, which must be loaded.
#[derive(Debug)]
pub struct Aten;

impl Kernels for Aten {
    fn run(&mut self, op: &str, args: &[Value<'_>]) -> Result<Ran, String> {
        let mut held: Vec<HostData> = Vec::new();
        for arg in args {
            match arg {
                Value::Tensor(tensor) => held.push(data(tensor)?),
                Value::Tensors(list) => {
                    for tensor in list.iter().flatten() {
                        held.push(data(tensor)?);
                    }
                }
                _ => {}
            }
        }
        let mut rest = held.iter();
        let given: Vec<CallArg<'_>> = (args.iter())
            .map(|arg| match arg {
                Value::None => CallArg::None,
                Value::Tensor(_) => rest.next().map_or(CallArg::None, CallArg::Tensor),
                Value::Tensors(list) => {
                    let entries = list.iter().map(|t| t.and_then(|_| rest.next()));
                    CallArg::Tensors(entries.collect())
                }
                Value::Bool(value) => CallArg::Bool(*value),
                Value::Int(value) => CallArg::Int(*value),
                Value::Float(value) => CallArg::Float(*value),
                Value::Ints(values) => CallArg::Ints(values),
                Value::Floats(values) => CallArg::Floats(values),
                Value::Text(text) => CallArg::Text(text),
                Value::DType(dtype) => CallArg::DType(dtype.0),
            })
            .collect();
        let (name, overload) = op.split_once('.').unwrap_or((op, ""));
        let overload = if overload == "default" { "" } else { overload };
        let ran = call(name, overload, &given).map_err(|error| first_line(&error.to_string()))?;
        let outputs = ran.results.into_iter().map(|r| r.map(host).transpose());
        Ok(Ran {
            outputs: outputs.collect::<Result<_, _>>()?,
            random: ran.seeded,
        })
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

fn data(tensor: &HostTensor) -> Result<HostData, String> {
    let shape = &tensor.meta.shape;
    Ok(HostData {
        dtype: tensor.meta.dtype.0,
        shape: shape
            .iter()
            .map(|s| i64::try_from(*s).unwrap_or(i64::MAX))
            .collect(),
        bytes: tensor
            .to_bytes()
            .ok_or_else(|| format!("no arithmetic for {}", tensor.meta))?,
    })
}

fn host(data: HostData) -> Result<HostTensor, String> {
    let meta = TensorMeta {
        dtype: DType(data.dtype),
        shape: data.shape.iter().map(|s| s.unsigned_abs()).collect(),
    };
    let shown = meta.to_string();
    HostTensor::from_bytes(meta, &data.bytes).ok_or_else(|| format!("no arithmetic for {shown}"))
}

/// Answers a request, a JSON object:
///
/// - `ops`: names such as `aten::mm`, `mm` or `add.Tensor`, or `all`,
/// - `mesh`: such as `2` or `dp=2,tp=2`,
/// - `args`: the arguments of one op, in the notation of the samples; without,
///   its samples are judged,
/// - `only`: one combination, such as `S(0),R -> S(0)`,
/// - `missing`: whether to look for rules that are missing; true by default,
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
    let samples = chosen(&names, text("args"))?;
    let all = names.contains(&"all");
    let known: Vec<String> = samples.iter().map(|s| s.op.clone()).collect();
    let options = Options {
        samples,
        mesh: mesh.clone(),
        only: only.transpose().map_err(|e| e.to_string())?,
        missing: request.get("missing").and_then(Json::as_bool) != Some(false),
    };
    validate(&rules, kernels, &options, &mut |event| {
        let line = match event {
            Event::Start { op, number, total } => {
                json!({"start": op, "number": number, "total": total})
            }
            Event::Done(report) => described(report, &mesh),
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
            tell(&described(&report, &mesh).to_string());
        }
    }
    Ok(())
}

/// The samples to judge.
fn chosen(names: &[&str], args: Option<&str>) -> Result<Vec<Sample>, String> {
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
        return Ok(vec![Sample::read(&format!("{op} {args}"))?]);
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

fn described(report: &OpReport, mesh: &Mesh) -> Json {
    let sizes: Vec<_> = mesh.sizes().iter().map(ToString::to_string).collect();
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
                    "rote validate --op {} --args \"{}\" {mesh}{only}",
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
