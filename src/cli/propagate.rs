//! `rote propagate`: how an op runs on distributed tensors.

use std::io::{self, BufRead, Write};
use std::time::Instant;

use clap::Args;
use rote_propagation::{
    Arg, Link, Mesh, Placement, Propagation, PropagationError, Query, Registry, Spec, Step,
    Topology, candidates, check_partials, explain, output_strides, parse_placements,
    partition_spec, plan, propagate, standard_rules, written,
};
use serde_json::{Value, json};

use super::{Trouble, complain, ops, why};

/// Print how an op runs on distributed tensors: the placements of its inputs, the
/// collectives that redistribute the inputs, and the placements of its outputs.
///
/// Arguments are those of the op's schema, in order. A tensor is written with its
/// placements, one per mesh dim: f32[64,32] @ S(0),R. It may also be written by
/// tensor dim: f32[64,32] @ PartitionSpec('dp', None). R is replicated, S(0)
/// sharded on dim 0, _S(0,2) a strided shard, P(sum) partial. A list of tensors is
/// written in braces, with semicolons between. Other arguments: 1, [1,2], true,
/// bf16, none. A tensor may say its global strides, f32[64,32]{1,64} @ S(0); without,
/// it is contiguous. Then the strides of outputs are printed, where they are known.
#[derive(Debug, Args)]
pub(super) struct Propagate {
    /// The op, for example aten::mm or aten::sum.dim_IntList
    #[arg(required_unless_present_any = ["batch", "ops"])]
    op: Option<String>,
    /// The op's arguments
    #[arg(allow_negative_numbers = true)]
    args: Vec<String>,
    /// The mesh, for example dp=8,tp=2
    #[arg(long, required_unless_present_any = ["batch", "ops"])]
    mesh: Option<String>,
    /// List all candidates, cheapest first
    #[arg(long)]
    all: bool,
    /// Say why: the rule, the strategy of each mesh dim, and the cost of every other
    /// strategy
    #[arg(long, conflicts_with = "all")]
    why: bool,
    /// Refuse a partial input that has to be reduced before the op
    #[arg(long)]
    strict: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Answer questions from stdin, one JSON object per line: {"op": "aten::mm",
    /// "mesh": "dp=8,tp=2", "args": ["f32[64,32] @ S(0),R", ...]}. "links": [[us per
    /// hop, GiB/s], ...] gives measured links, one per mesh dim. Each output of an answer
    /// has "strides", null where they are not known. A question may also be
    /// a redistribution: {"tensor": "f32[64,32] @ S(0),R", "to": "R,R", ...}
    #[arg(long, requires = "json", conflicts_with_all = ["op", "mesh", "all", "why"])]
    batch: bool,
    /// List the ops that have rules. With names instead of an op and its arguments,
    /// print the rule of each name, as one JSON object per line. The name - stands
    /// for names on stdin
    #[arg(long, conflicts_with_all = ["mesh", "all", "why", "strict", "batch"])]
    ops: bool,
}

impl Propagate {
    pub(super) fn run(&self, out: &mut impl Write) -> Result<u8, Trouble> {
        if self.ops {
            let names = self.op.iter().chain(&self.args);
            let names: Vec<_> = names.map(String::as_str).collect();
            return ops::run(&names, self.json, out);
        }
        let (Some(op), Some(mesh)) = (&self.op, &self.mesh) else {
            return batch(self.strict, out);
        };
        match self.answer(op, mesh, out) {
            Ok(()) => Ok(0),
            Err(Failed::Question(error)) => {
                if self.json {
                    writeln!(out, "{}", json!({"error": error.to_string()}))?;
                } else {
                    complain(&error.to_string());
                }
                Ok(1)
            }
            Err(Failed::Output(error)) => Err(error.into()),
        }
    }

    fn answer(&self, op: &str, mesh: &str, out: &mut impl Write) -> Result<(), Failed> {
        let mesh = Mesh::parse(mesh)?;
        let given = Given::parse(self.args.iter().map(String::as_str), &mesh)?;
        let query = Query {
            op,
            args: &given.args,
        };
        let topology = Topology::one_node(&mesh);
        let rules = standard_rules()?;
        if self.strict {
            check_partials(rules, &query, &mesh)?;
        }
        let start = Instant::now();
        let found = if self.all {
            candidates(rules, &query, &mesh, &topology)?
        } else {
            vec![propagate(rules, &query, &mesh, &topology)?]
        };
        let taken = start.elapsed();
        let reasons = match self.why {
            true => Some(explain(rules, &query, &mesh, &topology)?),
            false => None,
        };
        if self.json {
            let rows =
                (found.iter()).map(|p| described(p, &mesh, &given.outputs(rules, &query, p)));
            let rows: Vec<_> = rows.collect();
            let time = taken.as_nanos() as u64;
            let answer = if self.all {
                json!({"op": op, "candidates": rows, "time_ns": time})
            } else {
                let mut row = rows.into_iter().next().unwrap_or_default();
                row["op"] = op.into();
                row["time_ns"] = time.into();
                if let Some(reasons) = &reasons {
                    row["why"] = why::described(reasons, &mesh);
                }
                row
            };
            serde_json::to_writer_pretty(&mut *out, &answer).map_err(io::Error::from)?;
            writeln!(out)?;
            return Ok(());
        }
        for (i, propagation) in found.iter().enumerate() {
            if self.all {
                writeln!(out, "candidate {}", i + 1)?;
            }
            let strides = match given.strided {
                true => given.outputs(rules, &query, propagation),
                false => Vec::new(),
            };
            print(propagation, &query, &mesh, &strides, out)?;
        }
        if let Some(reasons) = &reasons {
            why::print(reasons, &mesh, out)?;
        }
        writeln!(out, "time       {:.1} us", taken.as_secs_f64() * 1e6)?;
        Ok(())
    }
}

enum Failed {
    Question(PropagationError),
    Output(io::Error),
}

impl From<PropagationError> for Failed {
    fn from(error: PropagationError) -> Self {
        Failed::Question(error)
    }
}

impl From<io::Error> for Failed {
    fn from(error: io::Error) -> Self {
        Failed::Output(error)
    }
}

/// The arguments of a question, and the strides of the tensors among them.
struct Given {
    args: Vec<Arg>,
    strides: Vec<Vec<i64>>,
    /// Whether the question has strides.
    strided: bool,
}

impl Given {
    fn parse<'a>(
        texts: impl Iterator<Item = &'a str>,
        mesh: &Mesh,
    ) -> Result<Self, PropagationError> {
        let mut given = Given {
            args: Vec::new(),
            strides: Vec::new(),
            strided: false,
        };
        for text in texts {
            let (arg, strides, strided) = Arg::parse_with_strides(text, mesh)?;
            given.args.push(arg);
            given.strides.extend(strides);
            given.strided |= strided;
        }
        Ok(given)
    }

    /// The strides of the outputs, where they are known.
    fn outputs(
        &self,
        rules: &Registry,
        query: &Query<'_>,
        found: &Propagation,
    ) -> Vec<Option<Vec<i64>>> {
        let inputs: Vec<_> = self.strides.iter().map(Vec::as_slice).collect();
        output_strides(rules, query, &inputs, &found.outputs)
    }
}

fn print(
    p: &Propagation,
    query: &Query<'_>,
    mesh: &Mesh,
    strides: &[Option<Vec<i64>>],
    out: &mut impl Write,
) -> io::Result<()> {
    let inputs = p.inputs.iter().zip(query.inputs());
    for (i, (input, (argument, spec))) in inputs.enumerate() {
        let meta = spec.meta.as_ref();
        let shown = meta.map_or_else(String::new, ToString::to_string);
        write!(out, "input {i}    {shown} @ {}", written(&input.from))?;
        if input.from != input.to {
            write!(out, "  ->  {}", written(&input.to))?;
        }
        if argument != i {
            write!(out, "  (argument {argument})")?;
        }
        writeln!(out)?;
        for step in &input.steps {
            let mut line = format!(
                "  {:<8} {} {} -> {}",
                mesh.names()[step.mesh_dim],
                step.kind,
                step.from,
                step.to
            );
            if !step.kind.is_local() {
                line += &format!(", {} B per rank, {:.1} us", step.bytes, step.cost_us);
            }
            if step.padding > 0 {
                line += &format!(", {} B of it padding", step.padding);
            }
            writeln!(out, "{line}")?;
        }
    }
    for (i, spec) in p.outputs.iter().enumerate() {
        match (&spec.meta, strides.get(i)) {
            (Some(meta), Some(Some(strides))) => {
                let strides: Vec<_> = strides.iter().map(ToString::to_string).collect();
                let placed = written(&spec.placements);
                write!(
                    out,
                    "output {i}   {meta}{{{}}} @ {placed}",
                    strides.join(",")
                )?;
            }
            _ => write!(out, "output {i}   {spec}")?,
        }
        let ndim = spec.meta.as_ref().map_or(0, |m| m.shape.len());
        match partition_spec(&spec.placements, mesh, ndim) {
            Some(text) => writeln!(out, "  {text}")?,
            None => writeln!(out)?,
        }
    }
    writeln!(out, "cost       {:.1} us", p.cost_us)
}

fn described(p: &Propagation, mesh: &Mesh, strides: &[Option<Vec<i64>>]) -> Value {
    let inputs: Vec<_> = p
        .inputs
        .iter()
        .map(|input| {
            json!({
                "from": texts(&input.from),
                "to": texts(&input.to),
                "steps": listed(&input.steps, mesh),
                "cost_us": input.cost_us,
            })
        })
        .collect();
    let outputs: Vec<_> = p
        .outputs
        .iter()
        .zip(strides)
        .map(|(spec, strides)| {
            json!({
                "dtype": spec.meta.as_ref().map(|m| m.dtype.to_string()),
                "shape": spec.meta.as_ref().map(|m| m.shape.clone()),
                "strides": strides,
                "placements": texts(&spec.placements),
            })
        })
        .collect();
    json!({"inputs": inputs, "outputs": outputs, "cost_us": p.cost_us})
}

fn listed(steps: &[Step], mesh: &Mesh) -> Vec<Value> {
    let one = |s: &Step| {
        json!({
            "kind": s.kind.name(),
            "mesh_dim": mesh.names()[s.mesh_dim],
            "from": s.from.to_string(),
            "to": s.to.to_string(),
            "bytes": s.bytes,
            "padding": s.padding,
            "cost_us": s.cost_us,
        })
    };
    steps.iter().map(one).collect()
}

fn texts(placements: &[Placement]) -> Vec<String> {
    placements.iter().map(ToString::to_string).collect()
}

fn batch(strict: bool, out: &mut impl Write) -> Result<u8, Trouble> {
    for line in io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let answer = match question(&line, strict) {
            Ok(answer) => answer,
            Err(error) => json!({"error": error.to_string()}),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(0)
}

fn question(line: &str, strict: bool) -> Result<Value, PropagationError> {
    let wrong = |expected: &str| PropagationError::Notation {
        expected: expected.into(),
        found: line.chars().take(80).collect(),
    };
    let value: Value = serde_json::from_str(line).map_err(|_| wrong("a JSON object"))?;
    let text = |key: &str| value.get(key).and_then(Value::as_str);
    let mesh = Mesh::parse(text("mesh").ok_or_else(|| wrong("\"mesh\", a string"))?)?;
    let links: Vec<Link> = (value.get("links").and_then(Value::as_array))
        .into_iter()
        .flatten()
        .map(|pair| Link {
            latency_us: pair[0].as_f64().unwrap_or_default(),
            bandwidth: pair[1].as_f64().unwrap_or_default(),
        })
        .collect();
    let topology = Topology::measured(&mesh, &links);
    if let Some(tensor) = text("tensor") {
        let to = text("to").ok_or_else(|| wrong("\"to\", placements"))?;
        return moved(tensor, to, &mesh, &topology);
    }
    let op = text("op").ok_or_else(|| wrong("\"op\", a string"))?;
    let args = value.get("args").and_then(Value::as_array);
    let args = args.ok_or_else(|| wrong("\"args\", a list of strings"))?;
    let texts = args.iter().map(|a| a.as_str().unwrap_or_default());
    let given = Given::parse(texts, &mesh)?;
    let query = Query {
        op,
        args: &given.args,
    };
    let rules = standard_rules()?;
    if strict {
        check_partials(rules, &query, &mesh)?;
    }
    let start = Instant::now();
    let found = propagate(rules, &query, &mesh, &topology)?;
    let time = start.elapsed().as_nanos() as u64;
    let mut answer = described(&found, &mesh, &given.outputs(rules, &query, &found));
    answer["time_ns"] = time.into();
    Ok(answer)
}

/// How a tensor gets from its placements to others.
fn moved(
    tensor: &str,
    to: &str,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Value, PropagationError> {
    let spec = Spec::parse(tensor, mesh)?;
    let to = parse_placements(to, spec.meta.as_ref())?;
    let wrong = |expected: &str| PropagationError::Notation {
        expected: expected.into(),
        found: tensor.into(),
    };
    let meta = spec.meta.ok_or_else(|| wrong("a tensor with its meta"))?;
    if [&spec.placements, &to].map(Vec::len) != [mesh.sizes().len(); 2] {
        return Err(wrong("one placement per mesh dim, before and after"));
    }
    let within = |p: &Placement| {
        p.sharded()
            .is_none_or(|(dim, blocks)| (dim as usize) < meta.shape.len() && blocks > 0)
    };
    if !spec.placements.iter().chain(&to).all(within) {
        return Err(wrong("shards of dims that the tensor has"));
    }
    match plan(&meta, mesh.sizes(), topology, &spec.placements, &to) {
        Some((steps, cost_us)) => Ok(json!({"steps": listed(&steps, mesh), "cost_us": cost_us})),
        None => Err(wrong("placements within reach")),
    }
}
