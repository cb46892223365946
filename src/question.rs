//! Questions to propagation and its answers as JSON, so that the command line, C and
//! Python ask the same way.

use std::sync::Arc;
use std::time::Instant;

use rote_propagation::{
    Arg, Link, Mesh, Placement, Propagation, PropagationError, Query, Registry, Spec, Step,
    Topology, candidates, check_partials, explain, local_meta, output_strides, parse_placements,
    partition_spec, plan, propagate, standard_rules,
};
use serde_json::{Value as Json, json};

use crate::own_rules::{self, Ask};

pub mod why;

/// Answers a question, a JSON object:
///
/// - `op`: such as `aten::mm`,
/// - `mesh`: such as `dp=8,tp=2`,
/// - `args`: the arguments of the op, in the notation of `rote propagate`,
/// - `links`: `[[us per hop, GiB/s], ...]`, measured, one per mesh dim,
/// - `coordinate`: the rank whose local shapes are told; the first one by default,
/// - `why`: whether to tell the reasons,
/// - `all`: whether to tell all candidates, cheapest first, instead of the cheapest,
/// - `own`: names of ops for which `ask` states the rule ([`own_rules`]).
///
/// A question with `tensor` and `to` instead of `op` and `args` is about a
/// redistribution; its answer has the steps.
///
/// `strict`: it is an error if a partial has to be reduced before the op.
///
/// # Errors
///
/// What is wrong with the question.
pub fn answer(
    question: &str,
    strict: bool,
    ask: Option<Arc<Ask>>,
) -> Result<Json, PropagationError> {
    let question: Json = serde_json::from_str(question).map_err(|_| {
        let found = question.chars().take(80).collect();
        wrong("a JSON object", found)
    })?;
    let expected = |what: &str| {
        let found = question.to_string().chars().take(80).collect();
        wrong(what, found)
    };
    let text = |key: &str| question.get(key).and_then(Json::as_str);
    let list = |key: &str| question.get(key).and_then(Json::as_array);
    let holds = |key: &str| question.get(key).and_then(Json::as_bool) == Some(true);
    let mesh = Mesh::parse(text("mesh").ok_or_else(|| expected("\"mesh\", a string"))?)?;
    let links: Vec<Link> = list("links")
        .into_iter()
        .flatten()
        .map(|pair| Link {
            latency_us: pair[0].as_f64().unwrap_or_default(),
            bandwidth: pair[1].as_f64().unwrap_or_default(),
        })
        .collect();
    let topology = Topology::measured(&mesh, &links);
    if let Some(tensor) = text("tensor") {
        let to = text("to").ok_or_else(|| expected("\"to\", placements"))?;
        return moved(tensor, to, &mesh, &topology);
    }
    let op = text("op").ok_or_else(|| expected("\"op\", a string"))?;
    let args = list("args").ok_or_else(|| expected("\"args\", a list of strings"))?;
    let given = Given::parse(args.iter().map(|a| a.as_str().unwrap_or_default()), &mesh)?;
    let coordinate = match list("coordinate") {
        None => vec![0; mesh.sizes().len()],
        Some(at) => place(at, &mesh).ok_or_else(|| expected("\"coordinate\", a rank's place"))?,
    };
    let own = list("own").into_iter().flatten().filter_map(Json::as_str);
    let own: Vec<&str> = own.collect();
    let mut of_script;
    let rules = match ask {
        Some(ask) if !own.is_empty() => {
            of_script = Registry::standard()?;
            own_rules::put(&mut of_script, own.into_iter(), &ask);
            &of_script
        }
        _ => standard_rules()?,
    };
    let query = Query {
        op,
        args: &given.args,
    };
    if strict {
        check_partials(rules, &query, &mesh)?;
    }
    let start = Instant::now();
    let found = match holds("all") {
        true => candidates(rules, &query, &mesh, &topology)?,
        false => vec![propagate(rules, &query, &mesh, &topology)?],
    };
    let time = start.elapsed().as_nanos() as u64;
    let mut rows = found.iter().map(|found| {
        let strides = given.outputs(rules, &query, found);
        described(found, &query, &mesh, &given, &strides, &coordinate)
    });
    let mut answer = match holds("all") {
        true => json!({"candidates": rows.collect::<Vec<_>>()}),
        false => rows.next().unwrap_or_default(),
    };
    if holds("why") {
        let reasons = explain(rules, &query, &mesh, &topology)?;
        answer["why"] = why::described(&reasons, &mesh);
    }
    answer["op"] = op.into();
    answer["mesh"] = json!({"names": mesh.names(), "sizes": mesh.sizes()});
    answer["time_ns"] = time.into();
    Ok(answer)
}

fn wrong(expected: &str, found: String) -> PropagationError {
    PropagationError::Notation {
        expected: expected.into(),
        found,
    }
}

/// A rank's place in the mesh.
fn place(at: &[Json], mesh: &Mesh) -> Option<Vec<u32>> {
    let at = at.iter().map(|c| u32::try_from(c.as_u64()?).ok());
    let at: Vec<u32> = at.collect::<Option<_>>()?;
    let sizes = mesh.sizes();
    (at.len() == sizes.len() && at.iter().zip(sizes).all(|(c, n)| c < n)).then_some(at)
}

/// The arguments of a question, and the strides of the tensors among them.
#[derive(Debug, Default)]
pub struct Given {
    /// The arguments.
    pub args: Vec<Arg>,
    /// Whether the question has strides.
    pub strided: bool,
    strides: Vec<Vec<i64>>,
}

impl Given {
    /// Reads arguments in the notation of `rote propagate`.
    ///
    /// # Errors
    ///
    /// [`PropagationError::Notation`].
    pub fn parse<'a>(
        texts: impl Iterator<Item = &'a str>,
        mesh: &Mesh,
    ) -> Result<Self, PropagationError> {
        let mut given = Given::default();
        for text in texts {
            let (arg, strides, strided) = Arg::parse_with_strides(text, mesh)?;
            given.args.push(arg);
            given.strides.extend(strides);
            given.strided |= strided;
        }
        Ok(given)
    }

    /// The strides of the outputs, where they are known.
    pub fn outputs(
        &self,
        rules: &Registry,
        query: &Query<'_>,
        found: &Propagation,
    ) -> Vec<Option<Vec<i64>>> {
        let inputs: Vec<_> = self.strides.iter().map(Vec::as_slice).collect();
        output_strides(rules, query, &inputs, &found.outputs)
    }
}

fn described(
    found: &Propagation,
    query: &Query<'_>,
    mesh: &Mesh,
    given: &Given,
    strides: &[Option<Vec<i64>>],
    coordinate: &[u32],
) -> Json {
    let metas = query.inputs().zip(&given.strides);
    let inputs = found.inputs.iter().zip(metas);
    let inputs = inputs.map(|(input, ((argument, spec), strides))| {
        let meta = spec.meta.as_ref();
        json!({
            "argument": argument,
            "dtype": meta.map(|m| m.dtype.to_string()),
            "shape": meta.map(|m| &m.shape),
            "strides": strides,
            "from": texts(&input.from),
            "to": texts(&input.to),
            "steps": listed(&input.steps, mesh),
            "bytes": input.bytes(),
            "cost_us": input.cost_us,
        })
    });
    let outputs = found.outputs.iter().zip(strides).enumerate();
    let outputs = outputs.map(|(i, (spec, strides))| {
        let meta = spec.meta.as_ref();
        let local = local_meta(query, i, spec, mesh, coordinate).ok();
        let ndim = meta.map_or(0, |m| m.shape.len());
        json!({
            "dtype": meta.map(|m| m.dtype.to_string()),
            "shape": meta.map(|m| &m.shape),
            "strides": strides,
            "local_shape": local.map(|m| m.shape),
            "placements": texts(&spec.placements),
            "partition_spec": partition_spec(&spec.placements, mesh, ndim),
        })
    });
    json!({
        "inputs": inputs.collect::<Vec<_>>(),
        "outputs": outputs.collect::<Vec<_>>(),
        "bytes": found.bytes(),
        "cost_us": found.cost_us,
        "tied": found.tied,
    })
}

fn listed(steps: &[Step], mesh: &Mesh) -> Vec<Json> {
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

/// How a tensor gets from its placements to others.
fn moved(
    tensor: &str,
    to: &str,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Json, PropagationError> {
    let spec = Spec::parse(tensor, mesh)?;
    let to = parse_placements(to, spec.meta.as_ref())?;
    let wrong = |expected: &str| wrong(expected, tensor.into());
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
