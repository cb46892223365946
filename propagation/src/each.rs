//! Ops on lists of tensors: each entry as if by an op on single tensors, so that
//! a list of hundreds costs hundreds of small searches and not a large one.
//!
//! `_foreach_` ops follow from the op on single tensors. For fused optimizers, one
//! entry has a rule of its own. A tensor that all entries share keeps its placement,
//! is replicated, or gets a placement that one of the entries needs, whichever moves
//! fewest bytes in all.

use super::cache::Alike;
use super::cost::Topology;
use super::enumerate::enumerate;
use super::error::PropagationError;
use super::placement::{PartialOp, Placement};
use super::redistribute::{Step, plan};
use super::registry::{Registry, Written};
use super::rule::{Arg, Query};
use super::rules;
use super::search::{self, Checked, Effort, Input, Propagation, check_specs, near, sound};
use super::spec::{Mesh, Spec};

/// How the arguments of an entry follow from those of the list op.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Arguments {
    /// Lists of tensors and of numbers give their entry, others are shared.
    Same,
    /// The same, but the op on single tensors has a dim and whether it is kept
    /// behind the first two.
    Norm,
    /// The same, but the tensor at this position holds a number per entry.
    Numbers(usize),
    /// The same; what is shared is whole.
    Whole,
    /// The same, but the tensor at position 1 is the largest of what each shard
    /// writes to it.
    Noted,
}

/// `_foreach_` ops whose names do not say which op they apply.
#[rustfmt::skip]
const FOREACH: &[(&str, &str, Arguments)] = &[
    ("addcdiv.Tensor", "addcdiv", Arguments::Numbers(3)),
    ("addcdiv_.Tensor", "addcdiv_", Arguments::Numbers(3)),
    ("addcmul.Tensor", "addcmul", Arguments::Numbers(3)),
    ("addcmul_.Tensor", "addcmul_", Arguments::Numbers(3)),
    ("maximum.Scalar", "clamp_min", Arguments::Same),
    ("maximum.ScalarList", "clamp_min", Arguments::Same),
    ("maximum_.Scalar", "clamp_min_", Arguments::Same),
    ("maximum_.ScalarList", "clamp_min_", Arguments::Same),
    ("minimum.Scalar", "clamp_max", Arguments::Same),
    ("minimum.ScalarList", "clamp_max", Arguments::Same),
    ("minimum_.Scalar", "clamp_max_", Arguments::Same),
    ("minimum_.ScalarList", "clamp_max_", Arguments::Same),
    ("norm.Scalar", "linalg_vector_norm", Arguments::Norm),
    ("pow.List", "pow.Tensor_Tensor", Arguments::Same),
    ("pow.Scalar", "pow.Tensor_Scalar", Arguments::Same),
    ("pow.ScalarAndTensor", "pow.Scalar", Arguments::Same),
    ("pow.ScalarList", "pow.Tensor_Scalar", Arguments::Same),
    ("pow_.ScalarList", "pow_.Scalar", Arguments::Same),
    ("powsum.Scalar", "linalg__powsum", Arguments::Norm),
];

/// How many ways of single entries are tried for a tensor that all share.
const MAX_WAYS: usize = 8;

/// An op on single tensors that a list op applies to each entry.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Each {
    /// Its name.
    pub(super) op: String,
    arguments: Arguments,
}

impl Each {
    /// What a list op applies to each entry; `None` for other ops.
    pub(super) fn of(op: &str, registry: &Registry) -> Option<Each> {
        let op = op.strip_suffix(".default").unwrap_or(op);
        let name = op.strip_prefix("aten::_")?;
        if let Some(noted) = rules::on_lists(op) {
            let arguments = match noted {
                true => Arguments::Noted,
                false => Arguments::Whole,
            };
            let op = op.to_owned();
            return Some(Each { op, arguments });
        }
        let name = name.strip_prefix("foreach_")?;
        if let Some((_, op, arguments)) = FOREACH.iter().find(|row| row.0 == name) {
            let op = format!("aten::{op}");
            return Some(Each {
                op,
                arguments: *arguments,
            });
        }
        let (name, overload) = name.split_once('.').unwrap_or((name, ""));
        let overload = match overload {
            "List" => "Tensor",
            "ScalarList" => "Scalar",
            other => other,
        };
        let exact = format!("aten::{name}.{overload}");
        let plain = format!("aten::{name}");
        let op = [exact, plain]
            .into_iter()
            .find(|op| registry.base_of_one(op).is_some())?;
        Some(Each {
            op,
            arguments: Arguments::Same,
        })
    }

    /// How many entries the lists have.
    fn count(&self, query: &Query<'_>) -> Result<usize, PropagationError> {
        let mut count = None;
        for (at, arg) in query.args.iter().enumerate() {
            let Arg::Tensors(list) = arg else { continue };
            let known = *count.get_or_insert(list.len());
            let absent = self.arguments == Arguments::Whole && list.is_empty();
            if list.len() != known && !absent {
                let expected = format!("a list of {known} tensors, as the first one has");
                return Err(query.wrong(at, expected, format!("{} tensors", list.len())));
            }
        }
        count.ok_or_else(|| query.wrong(0, "a list of tensors", query.found(0)))
    }

    /// The tensors that all entries share, by their arguments.
    fn shared<'a>(&self, query: &Query<'a>) -> Vec<(usize, &'a Spec)> {
        let args = query.args.iter().enumerate();
        args.filter_map(|(at, arg)| match arg {
            Arg::Tensor(spec) => Some((at, spec)),
            _ => None,
        })
        .collect()
    }

    /// The arguments of one entry, and which tensors among them are which
    /// arguments of the list op.
    fn entry(
        &self,
        query: &Query<'_>,
        entry: usize,
        shared: &[Shared],
    ) -> Result<(Vec<Arg>, Vec<usize>), PropagationError> {
        let numbers = query.op.contains(".ScalarList");
        let mut args = Vec::with_capacity(query.args.len() + 2);
        let mut tensors = Vec::with_capacity(4);
        for (at, arg) in query.args.iter().enumerate() {
            let too_few = |n| {
                let expected = format!("a number for each of {} entries", entry + 1);
                query.wrong(at, expected, format!("{n} numbers"))
            };
            if self.arguments == Arguments::Norm && at == 2 {
                args.extend([Arg::None, Arg::Bool(false)]);
            }
            args.push(match arg {
                Arg::Tensors(list) if list.is_empty() => Arg::None,
                Arg::Tensors(list) => {
                    let spec = list[entry].as_ref();
                    let missing =
                        || query.wrong(at, "a list of tensors", "a list with an absent one");
                    tensors.push(at);
                    Arg::Tensor(spec.ok_or_else(missing)?.clone())
                }
                Arg::Ints(list) if numbers => {
                    Arg::Int(*list.get(entry).ok_or_else(|| too_few(list.len()))?)
                }
                Arg::Floats(list) if numbers => {
                    Arg::Float(*list.get(entry).ok_or_else(|| too_few(list.len()))?)
                }
                Arg::Tensor(_) if self.arguments == Arguments::Numbers(at) => continue,
                Arg::Tensor(spec) => {
                    tensors.push(at);
                    let placements = shared.iter().find(|s| s.argument == at);
                    Arg::Tensor(Spec {
                        meta: spec.meta.clone(),
                        placements: placements.map_or(&spec.placements, |s| &s.input.to).clone(),
                    })
                }
                other => other.clone(),
            });
        }
        Ok((args, tensors))
    }

    /// For each entry, the first one that has the same arguments.
    fn alike(&self, query: &Query<'_>) -> Result<Vec<usize>, PropagationError> {
        let op = &self.op;
        let mut known = Alike::default();
        (0..self.count(query)?)
            .map(|i| {
                let (args, _) = self.entry(query, i, &[])?;
                Ok(known.first(op, args, i))
            })
            .collect()
    }

    /// The entries that no earlier one is like.
    fn firsts(&self, query: &Query<'_>) -> Result<Vec<usize>, PropagationError> {
        let alike = self.alike(query)?.into_iter().enumerate();
        Ok(alike
            .filter(|(i, first)| i == first)
            .map(|(i, _)| i)
            .collect())
    }

    /// How many different entries there are.
    fn different(&self, query: &Query<'_>) -> Result<usize, PropagationError> {
        self.firsts(query).map(|firsts| firsts.len())
    }

    /// Runs something on the question of every entry.
    pub(super) fn try_each<T>(
        &self,
        rules: &Registry,
        query: &Query<'_>,
        mut run: impl FnMut(&Query<'_>) -> Result<T, PropagationError>,
    ) -> Result<Vec<T>, PropagationError> {
        rules.takes(query)?;
        let op = &self.op;
        (0..self.count(query)?)
            .map(|i| {
                let (args, _) = self.entry(query, i, &[])?;
                run(&Query { op, args: &args }).map_err(|e| e.asked_of(query.op))
            })
            .collect()
    }

    /// The ways that shared tensors may go: as they lie, replicated, or as an
    /// entry alone would have them.
    fn ways(
        &self,
        rules: &Registry,
        query: &Query<'_>,
        mesh: &Mesh,
        topology: &Topology,
        effort: Effort,
    ) -> Result<Vec<Vec<Shared>>, PropagationError> {
        let shared = self.shared(query);
        let replicated = vec![Placement::Replicate; mesh.sizes().len()];
        let whole = || -> Result<Vec<Shared>, PropagationError> {
            let all = shared.iter();
            all.map(|(at, spec)| moved(query, *at, spec, &replicated, mesh, topology))
                .collect()
        };
        Ok(match self.arguments {
            Arguments::Noted => {
                let mut way = whole()?;
                if let (Some(note), Some((1, spec))) = (way.first_mut(), shared.first()) {
                    *note = self.noted(query, spec)?;
                }
                vec![way]
            }
            Arguments::Same if !shared.is_empty() => {
                let own = |(at, spec): &(usize, &Spec)| Shared::unmoved(*at, &spec.placements);
                let mut ways = vec![shared.iter().map(own).collect(), whole()?];
                if let [(at, spec)] = *shared {
                    let alone = self.alone(rules, query, at, mesh, topology, effort)?;
                    for to in alone.iter().take(MAX_WAYS) {
                        ways.push(vec![moved(query, at, spec, to, mesh, topology)?]);
                    }
                }
                ways
            }
            _ => vec![whole()?],
        })
    }

    /// Where a shared tensor would go if an entry were the only one, except
    /// nowhere and to replicated.
    fn alone(
        &self,
        rules: &Registry,
        query: &Query<'_>,
        shared: usize,
        mesh: &Mesh,
        topology: &Topology,
        effort: Effort,
    ) -> Result<Vec<Vec<Placement>>, PropagationError> {
        let op = &self.op;
        let mut found = Vec::new();
        for i in self.firsts(query)? {
            let (args, tensors) = self.entry(query, i, &[])?;
            let entry = Query { op, args: &args };
            let checked = check_specs(rules, &entry, mesh).map_err(|e| e.asked_of(query.op))?;
            // An entry that cannot be had at all will say so with the others.
            let Ok(way) = search::run(&entry, &checked, mesh, topology, effort) else {
                continue;
            };
            let input = tensors.iter().position(|t| *t == shared);
            let Some(input) = input.map(|i| &way.inputs[i]) else {
                continue;
            };
            let new = input.to != input.from && !found.contains(&input.to);
            if new && input.to.iter().any(|p| *p != Placement::Replicate) {
                found.push(input.to.clone());
            }
        }
        Ok(found)
    }

    /// What is noted of shards is partial where a list entry is sharded.
    fn noted(&self, query: &Query<'_>, note: &Spec) -> Result<Shared, PropagationError> {
        let mut input = Shared::unmoved(1, &note.placements).input;
        for (_, entry) in query.inputs().filter(|(at, _)| *at == 0) {
            for (m, placement) in entry.placements.iter().enumerate() {
                let largest = Placement::Partial(PartialOp::Max);
                let Some(to) = input.to.get_mut(m) else {
                    continue;
                };
                match (placement, *to) {
                    (Placement::Replicate, _) => {}
                    (_, Placement::Replicate) => {
                        // Every rank keeps the number that it has.
                        *to = largest;
                        input.steps.push(Step::partition(m, largest));
                    }
                    (_, own) if own == largest => {}
                    _ => {
                        return Err(PropagationError::InPlace {
                            op: query.op.into(),
                            argument: 1,
                            found: note.to_string(),
                        });
                    }
                }
            }
        }
        Ok(Shared { argument: 1, input })
    }

    /// Propagates every entry with shared tensors that lie as `shared` says, by
    /// `run`, which must leave them so.
    fn along<T: Clone>(
        &self,
        query: &Query<'_>,
        mesh: &Mesh,
        rules: &Registry,
        shared: &[Shared],
        mut run: impl FnMut(&Query<'_>, &Checked<'_>) -> Result<T, PropagationError>,
    ) -> Result<Vec<(Vec<usize>, T)>, PropagationError> {
        let op = &self.op;
        let mut found: Vec<(Vec<usize>, T)> = Vec::new();
        for (i, first) in self.alike(query)?.into_iter().enumerate() {
            if first < i {
                found.push(found[first].clone());
                continue;
            }
            let (args, tensors) = self.entry(query, i, shared)?;
            let entry = Query { op, args: &args };
            let mut one = || {
                let mut checked = check_specs(rules, &entry, mesh)?;
                for (input, (argument, _)) in entry.inputs().enumerate() {
                    let is_shared = shared.iter().any(|s| s.argument == tensors[input]);
                    if is_shared && !checked.written.iter().any(|w| w.input == input) {
                        checked.written.push(Written {
                            input,
                            argument,
                            output: None,
                        });
                    }
                }
                run(&entry, &checked)
            };
            let way = one().map_err(|e| e.asked_of(query.op))?;
            found.push((tensors, way));
        }
        Ok(found)
    }

    /// The cheapest way to run the op on its lists.
    pub(super) fn propagate(
        &self,
        rules: &Registry,
        query: &Query<'_>,
        mesh: &Mesh,
        topology: &Topology,
    ) -> Result<Propagation, PropagationError> {
        rules.takes(query)?;
        sound(query, mesh)?;
        let mut best: Option<Propagation> = None;
        let mut error = None;
        let different = self.different(query)?;
        let ways = self.ways(rules, query, mesh, topology, Effort::LIST.shared(different))?;
        let effort = Effort::LIST.shared(different * ways.len());
        for shared in ways {
            let run = |entry: &Query<'_>, checked: &Checked<'_>| {
                search::run(entry, checked, mesh, topology, effort)
            };
            match self.along(query, mesh, rules, &shared, run) {
                Ok(entries) => {
                    let mut found = self.joined(query, &shared, entries);
                    if let Some(known) = &mut best {
                        let (one, other) = (found.cost_us, known.cost_us);
                        let tied =
                            one.max(other) <= near(one.min(other)) && found.inputs != known.inputs;
                        known.tied |= tied;
                        found.tied |= tied;
                    }
                    if best.as_ref().is_none_or(|b| found.cost_us < b.cost_us) {
                        best = Some(found);
                    }
                }
                Err(e) => error = error.or(Some(e)),
            }
        }
        match (best, error) {
            (Some(best), _) => Ok(best),
            (None, Some(error)) => Err(error),
            (None, None) => Err(query.wrong(0, "a list of tensors", query.found(0))),
        }
    }

    /// Every combination of what the entries can do, cheapest first.
    pub(super) fn candidates(
        &self,
        rules: &Registry,
        query: &Query<'_>,
        mesh: &Mesh,
        topology: &Topology,
        limit: usize,
    ) -> Result<Vec<Propagation>, PropagationError> {
        rules.takes(query)?;
        sound(query, mesh)?;
        let mut all = Vec::new();
        for shared in self.ways(rules, query, mesh, topology, Effort::FULL)? {
            let run = |entry: &Query<'_>, checked: &Checked<'_>| {
                enumerate(entry, checked, mesh, topology)
            };
            let entries = self.along(query, mesh, rules, &shared, run)?;
            let total = (entries.iter()).try_fold(1_usize, |n, e| n.checked_mul(e.1.len()));
            let total = total.unwrap_or(usize::MAX);
            if total.saturating_add(all.len()) > limit {
                return Err(PropagationError::TooLarge {
                    op: query.op.into(),
                    what: "combinations of what entries can do",
                    limit,
                    found: total,
                });
            }
            for mut number in 0..total {
                let chosen = entries.iter().map(|(tensors, ways)| {
                    let way = ways[number % ways.len()].clone();
                    number /= ways.len();
                    (tensors.clone(), way)
                });
                let chosen = chosen.collect();
                let found = self.joined(query, &shared, chosen);
                if !all.contains(&found) {
                    all.push(found);
                }
            }
        }
        all.sort_by(|a, b| a.cost_us.total_cmp(&b.cost_us));
        Ok(all)
    }

    /// The entries as one: inputs and outputs list by list.
    fn joined(
        &self,
        query: &Query<'_>,
        shared: &[Shared],
        mut entries: Vec<(Vec<usize>, Propagation)>,
    ) -> Propagation {
        let mut inputs = Vec::new();
        for (at, arg) in query.args.iter().enumerate() {
            match arg {
                Arg::Tensor(_) => {
                    inputs.extend(
                        shared
                            .iter()
                            .find(|s| s.argument == at)
                            .map(|s| s.input.clone()),
                    );
                }
                Arg::Tensors(_) => {
                    for (tensors, entry) in &mut entries {
                        let input = tensors.iter().position(|t| *t == at);
                        inputs.extend(input.map(|i| entry.inputs[i].clone()));
                    }
                }
                _ => {}
            }
        }
        let name = query.op.split('.').next().unwrap_or(query.op);
        let written = name.ends_with('_');
        let lists = entries.first().map_or(0, |e| e.1.outputs.len());
        let outputs = (0..if written { 0 } else { lists })
            .flat_map(|o| entries.iter().map(move |e| e.1.outputs[o].clone()))
            .collect();
        Propagation {
            cost_us: inputs.iter().map(|i| i.cost_us).sum(),
            inputs,
            outputs,
            tied: entries.iter().any(|(_, entry)| entry.tied),
        }
    }
}

/// A tensor that all entries share.
struct Shared {
    argument: usize,
    input: Input,
}

impl Shared {
    fn unmoved(argument: usize, placements: &[Placement]) -> Self {
        Shared {
            argument,
            input: Input {
                from: placements.to_vec(),
                to: placements.to_vec(),
                steps: Vec::new(),
                cost_us: 0.0,
            },
        }
    }
}

fn moved(
    query: &Query<'_>,
    argument: usize,
    spec: &Spec,
    to: &[Placement],
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Shared, PropagationError> {
    if spec.placements == to {
        return Ok(Shared::unmoved(argument, to));
    }
    let meta = spec.meta.as_ref();
    let unknown = || {
        query.wrong(
            argument,
            "a tensor whose meta is known",
            "a tensor without meta",
        )
    };
    let found = plan(
        meta.ok_or_else(unknown)?,
        mesh.sizes(),
        topology,
        &spec.placements,
        to,
    );
    let far = || {
        query.wrong(
            argument,
            "placements that can be replicated",
            spec.to_string(),
        )
    };
    let (steps, cost_us) = found.ok_or_else(far)?;
    Ok(Shared {
        argument,
        input: Input {
            from: spec.placements.clone(),
            to: to.to_vec(),
            steps,
            cost_us,
        },
    })
}
