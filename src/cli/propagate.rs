//! `rote propagate`: how an op runs on distributed tensors.

use std::io::{self, BufRead, Write};
use std::time::Instant;

use clap::Args;
use rote::question::{self, Given, why};
use rote_propagation::{
    Mesh, Propagation, PropagationError, Query, Topology, candidates, check_partials, explain,
    partition_spec, propagate, standard_rules, written,
};
use serde_json::json;

use super::{Trouble, complain, ops};

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
        let mut answer = || match self.json {
            true => self.as_json(op, mesh, out),
            false => self.as_text(op, mesh, out),
        };
        match answer() {
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

    fn as_json(&self, op: &str, mesh: &str, out: &mut impl Write) -> Result<(), Failed> {
        let question = json!({
            "op": op,
            "mesh": mesh,
            "args": self.args,
            "all": self.all,
            "why": self.why,
        });
        let answer = question::answer(&question.to_string(), self.strict, None)?;
        serde_json::to_writer_pretty(&mut *out, &answer).map_err(io::Error::from)?;
        writeln!(out)?;
        Ok(())
    }

    fn as_text(&self, op: &str, mesh: &str, out: &mut impl Write) -> Result<(), Failed> {
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
        if self.why {
            why::print(&explain(rules, &query, &mesh, &topology)?, &mesh, out)?;
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

fn batch(strict: bool, out: &mut impl Write) -> Result<u8, Trouble> {
    for line in io::stdin().lock().lines() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let answer = match question::answer(&line, strict, None) {
            Ok(answer) => answer,
            Err(error) => json!({"error": error.to_string()}),
        };
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(0)
}
