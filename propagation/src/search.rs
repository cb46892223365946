//! Expansion to a mesh: the cheapest strategies that fit together.
//!
//! When the inputs lie as a strategy of every mesh dim wants, that is the
//! answer. Otherwise each input that must move is searched on its own, cheapest
//! placements first ([`Reach`]); whatever a search finds is joined with what
//! the others found, and the cheapest combination wins; among equal ones that of
//! the strategies which the rule lists first, compared from the first mesh dim
//! on. Replicated inputs need no search: every placement that a strategy wants
//! of them is a local chunk away. A search that takes too long ends in a
//! [`Descent`].

use std::sync::OnceLock;

use super::cost::Topology;
use super::descent::Descent;
use super::each::Each;
use super::error::PropagationError;
use super::family::unless_faulty;
use super::fill::{Filled, Masks};
use super::layout;
use super::placement::Placement;
use super::redistribute::{Reach, State, Step, fits, plan};
use super::registry::{Registry, Written};
use super::rule::{Query, Rule, Slot};
use super::spec::{MAX_TENSOR_DIMS, Mesh, Spec, TensorMeta, written};
use super::stated;
use super::work::{self, Work};

/// How far a search goes before it gives way to a descent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Effort {
    /// Into how many specs the inputs are brought.
    states: usize,
    /// How many combinations of these are looked at.
    joins: usize,
}

impl Effort {
    /// The effort for one op.
    pub(super) const FULL: Effort = Effort {
        states: 8_000,
        joins: 1_000_000,
    };

    /// The effort for all entries of a list op.
    pub(super) const LIST: Effort = Effort {
        states: 2 * Self::FULL.states,
        joins: 2 * Self::FULL.joins,
    };

    /// The part of each, where so many ops are searched for one answer; at most the
    /// effort for one op.
    pub(super) fn shared(self, by: usize) -> Effort {
        let by = by.max(1);
        Effort {
            states: (self.states / by).min(Self::FULL.states),
            joins: (self.joins / by).min(Self::FULL.joins),
        }
    }

    /// What is left of a part of the effort for several inputs that can lie in so many ways
    /// each: next to nothing where it reaches few of these, and a descent finds as much.
    fn among(self, inputs: usize, ways: usize) -> Effort {
        let is_part = self.states < Self::FULL.states;
        match is_part && inputs > 1 && ways / HOPELESS > self.states {
            true => self.shared(4 * inputs),
            false => self,
        }
    }
}

/// A search that reaches less than one in so many ways to lay an input rarely ends.
const HOPELESS: usize = 1000;

/// Costs that differ by less are equal: sums of the same steps in another order.
pub(super) const TIE_US: f64 = 1e-6;

/// The part of a cost within which another one is near: estimates do not tell them apart.
const NEAR: f64 = 0.05;

/// Up to which cost others are near the best.
pub(super) fn near(best_us: f64) -> f64 {
    best_us * (1.0 + NEAR) + TIE_US
}

/// What became of one input.
#[derive(Clone, Debug, PartialEq)]
pub struct Input {
    /// Its placements before the op.
    pub from: Vec<Placement>,
    /// The placements that the op takes it in.
    pub to: Vec<Placement>,
    /// The way there.
    pub steps: Vec<Step>,
    /// Estimated time of these steps.
    pub cost_us: f64,
}

impl Input {
    /// Bytes that a rank sends on the way.
    pub fn bytes(&self) -> u64 {
        let steps = self.steps.iter();
        steps.fold(0, |sum, step| sum.saturating_add(step.bytes))
    }
}

/// A way to run an op on a mesh.
#[derive(Clone, Debug, PartialEq)]
pub struct Propagation {
    /// The tensors among the arguments, in order; those of lists one by one.
    pub inputs: Vec<Input>,
    /// The outputs, with meta.
    pub outputs: Vec<Spec>,
    /// Estimated time of all redistributions, in microseconds.
    pub cost_us: f64,
    /// Whether other placements may cost the same, or up to a twentieth more.
    pub tied: bool,
}

impl Propagation {
    /// Bytes that a rank sends for all redistributions.
    pub fn bytes(&self) -> u64 {
        let inputs = self.inputs.iter();
        inputs.fold(0, |sum, input| sum.saturating_add(input.bytes()))
    }
}

/// Rote's own rules, made once.
///
/// # Errors
///
/// [`PropagationError::Duplicate`] when the tables name an op twice.
pub fn standard_rules() -> Result<&'static Registry, PropagationError> {
    static RULES: OnceLock<Result<Registry, PropagationError>> = OnceLock::new();
    let rules = RULES.get_or_init(Registry::standard);
    rules.as_ref().map_err(Clone::clone)
}

/// A question whose specs are known to be sound.
pub(super) struct Checked<'a> {
    pub(super) rule: Rule,
    pub(super) inputs: Vec<(&'a Spec, &'a TensorMeta)>,
    /// The inputs that are written.
    pub(super) written: Vec<Written>,
}

/// The tensors among the arguments with their metas, which fit the mesh.
pub(super) fn sound<'a>(
    query: &Query<'a>,
    mesh: &Mesh,
) -> Result<Vec<(&'a Spec, &'a TensorMeta)>, PropagationError> {
    let dims = mesh.sizes().len();
    let mut inputs = Vec::with_capacity(4);
    for (i, spec) in query.inputs() {
        let Some(meta) = &spec.meta else {
            return Err(query.wrong(i, "a tensor whose meta is known", "a tensor without meta"));
        };
        if spec.placements.len() != dims {
            let expected = format!("{dims} placements, one per mesh dim of {mesh}");
            let found = format!("{}: {}", spec.placements.len(), written(&spec.placements));
            return Err(query.wrong(i, expected, found));
        }
        let ndim = meta.shape.len();
        if ndim > MAX_TENSOR_DIMS {
            let expected = format!("at most {MAX_TENSOR_DIMS} dims");
            return Err(query.wrong(i, expected, ndim.to_string()));
        }
        let bytes = meta.shape.iter().try_fold(16_u64, |n, d| n.checked_mul(*d));
        // Zero hides an overflow of the other dims, which views would meet.
        let others =
            (meta.shape.iter().filter(|d| **d > 0)).try_fold(16_u64, |n, d| n.checked_mul(*d));
        if bytes.is_none() || others.is_none() || others > Some(1 << 62) {
            return Err(query.wrong(i, "a tensor of fewer than 2^58 elements", meta.to_string()));
        }
        let own = spec.placements.iter().any(|p| p.registered().is_some());
        for (dim, size) in meta.shape.iter().enumerate().filter(|_| own) {
            if !layout::fits(*size, dim as u32, &spec.placements, mesh.sizes()) {
                let expected = format!("shards that fit {meta} on mesh {mesh}");
                return Err(query.wrong(i, expected, written(&spec.placements)));
            }
        }
        for placement in &spec.placements {
            match placement.sharded() {
                Some((dim, _)) if dim as usize >= ndim => {
                    let expected = format!("shard dims below {ndim}, the dims of {meta}");
                    return Err(query.wrong(i, expected, placement.to_string()));
                }
                Some((_, 0)) => {
                    let expected = "split factors from 1";
                    return Err(query.wrong(i, expected, placement.to_string()));
                }
                _ => {}
            }
        }
        inputs.push((spec, meta));
    }
    Ok(inputs)
}

/// Checks a question: its arguments against the schema of the op, its specs
/// against the mesh.
pub(super) fn check<'a>(
    rules: &Registry,
    query: &Query<'a>,
    mesh: &Mesh,
) -> Result<Checked<'a>, PropagationError> {
    rules.takes(query)?;
    check_specs(rules, query, mesh)
}

/// The same of one entry of a list op, whose arguments were checked as those of
/// the list op.
pub(super) fn check_specs<'a>(
    rules: &Registry,
    query: &Query<'a>,
    mesh: &Mesh,
) -> Result<Checked<'a>, PropagationError> {
    let inputs = sound(query, mesh)?;
    let (rule, written) = rules.rule(query)?;
    fitting(query, rule, inputs, written)
}

/// A rule with the tensors that it is about.
fn fitting<'a>(
    query: &Query<'a>,
    rule: Rule,
    inputs: Vec<(&'a Spec, &'a TensorMeta)>,
    written: Vec<Written>,
) -> Result<Checked<'a>, PropagationError> {
    if rule.inputs() != inputs.len() {
        return Err(PropagationError::Arity {
            op: query.op.into(),
            expected: format!("{} tensors among the", rule.inputs()),
            found: inputs.len(),
        });
    }
    Ok(Checked {
        rule,
        inputs,
        written,
    })
}

/// The cheapest way to run an op whose inputs lie as they do.
///
/// # Errors
///
/// An error that names op, argument, expected and found.
pub fn propagate(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Propagation, PropagationError> {
    unless_faulty(|| {
        if let Some(each) = Each::of(query.op, rules) {
            return each.propagate(rules, query, mesh, topology);
        }
        let checked = check(rules, query, mesh)?;
        run(query, &checked, mesh, topology, Effort::FULL)
    })
}

/// The same, where partials other than sums are reduced before the op instead of passing
/// through it. Ops on lists pass them all the same.
///
/// # Errors
///
/// An error that names op, argument, expected and found.
pub fn propagate_passing_sums(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Propagation, PropagationError> {
    if Each::of(query.op, rules).is_some() {
        return propagate(rules, query, mesh, topology);
    }
    unless_faulty(|| {
        let mut checked = check(rules, query, mesh)?;
        checked.rule.pass_only_sums();
        run(query, &checked, mesh, topology, Effort::FULL)
    })
}

/// The rule of an op with more strategies, each with the outputs' slots first. `sums`: as
/// [`propagate_passing_sums`], which holds for the rule alone.
///
/// # Errors
///
/// An error that names op, argument, expected and found.
pub fn rule_with(
    rules: &Registry,
    query: &Query<'_>,
    strategies: Vec<Vec<Slot>>,
    sums: bool,
) -> Result<Rule, PropagationError> {
    if Each::of(query.op, rules).is_some() {
        let expected = "an op on single tensors, whose rule strategies can be added to";
        return Err(query.wrong(0, expected, "one on lists"));
    }
    rules.takes(query)?;
    let (mut rule, written) = rules.rule(query)?;
    if sums {
        rule.pass_only_sums();
    }
    rule.add_all(&stated::rule(query, rule.outputs.clone(), strategies)?);
    rule.writes_all(written.iter().map(|one| (one.input, one.output)));
    Ok(rule)
}

/// The same by a rule of the caller's own, whatever rule the op has.
///
/// # Errors
///
/// An error that names op, argument, expected and found.
pub fn propagate_by(
    mut rule: Rule,
    query: &Query<'_>,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Propagation, PropagationError> {
    unless_faulty(|| {
        let inputs = sound(query, mesh)?;
        let placements = inputs.iter().flat_map(|(spec, _)| &spec.placements);
        rule.bar(query.op, placements, || {
            (query.op.into(), "registered".into())
        });
        let written = rule.writings(query);
        let checked = fitting(query, rule, inputs, written)?;
        run(query, &checked, mesh, topology, Effort::FULL)
    })
}

/// The same, for a question that was checked.
pub(super) fn run(
    query: &Query<'_>,
    checked: &Checked<'_>,
    mesh: &Mesh,
    topology: &Topology,
    effort: Effort,
) -> Result<Propagation, PropagationError> {
    let filled = Filled::new(query, &checked.rule, &checked.inputs, mesh.sizes())?;
    if let Some(found) = in_place(&filled, checked) {
        return Ok(found);
    }
    Search::new(&filled, checked, topology, effort)
        .run()
        .ok_or_else(|| stuck(query, checked))
}

fn stuck(query: &Query<'_>, checked: &Checked<'_>) -> PropagationError {
    match checked.written.first() {
        Some(written) => PropagationError::InPlace {
            op: query.op.into(),
            argument: written.argument,
            found: checked.inputs[written.input].0.to_string(),
        },
        None => query.wrong(0, "placements within reach of a strategy", "none in reach"),
    }
}

/// The answer when nothing has to move.
fn in_place(filled: &Filled<'_>, checked: &Checked<'_>) -> Option<Propagation> {
    let mut masks = filled.every();
    for (i, source) in filled.sources.iter().enumerate() {
        narrow(&mut masks, &filled.masks(i, source));
    }
    for w in &checked.written {
        if let Some(output) = w.output {
            narrow(&mut masks, &filled.writes(output, &filled.sources[w.input]));
        }
    }
    let (rows, _) = filled.choose(&masks, |_| true)?;
    let inputs = (checked.inputs.iter())
        .map(|(spec, _)| Input {
            from: spec.placements.clone(),
            to: spec.placements.clone(),
            steps: Vec::new(),
            cost_us: 0.0,
        })
        .collect();
    Some(Propagation {
        inputs,
        outputs: filled.outputs(&rows),
        cost_us: 0.0,
        tied: false,
    })
}

fn narrow(masks: &mut Masks, by: &Masks) {
    masks.iter_mut().zip(by).for_each(|(m, b)| *m &= b);
}

/// An input that may move.
struct Live<'a> {
    input: usize,
    reach: Reach<'a>,
    /// What the next state of it costs.
    next_us: f64,
    found: Vec<(State, f64, Masks)>,
}

struct Search<'s, 'a> {
    filled: &'s Filled<'a>,
    base: Masks,
    replicated: Vec<bool>,
    live: Vec<Live<'s>>,
    topology: &'s Topology,
    effort: Effort,
    best: f64,
    /// How many combinations of what inputs found were looked at.
    joined: usize,
    answer: Option<(Vec<usize>, Vec<State>)>,
    tied: bool,
}

impl<'s, 'a> Search<'s, 'a> {
    fn new(
        filled: &'s Filled<'a>,
        checked: &Checked<'a>,
        topology: &'s Topology,
        effort: Effort,
    ) -> Self {
        let written = |i: usize| checked.written.iter().find(|w| w.input == i);
        let replicated: Vec<bool> = (filled.sources.iter().enumerate())
            .map(|(i, s)| written(i).is_none() && *s == State::default())
            .collect();
        let mut base = filled.every();
        let mut live = Vec::new();
        let mut ways = 0;
        for (i, source) in filled.sources.iter().enumerate() {
            if let Some(written) = written(i) {
                narrow(&mut base, &filled.masks(i, source));
                if let Some(output) = written.output {
                    narrow(&mut base, &filled.writes(output, source));
                }
            } else if replicated[i] {
                narrow(&mut base, &filled.masks_of_replicated(i));
            } else {
                let allowed = filled.allowed(i);
                ways = ways.max(allowed.len().saturating_pow(filled.sizes.len() as u32));
                let reach = Reach::new(
                    filled.sizes,
                    topology,
                    filled.metas[i],
                    &filled.table,
                    allowed,
                    *source,
                )
                .without_partitions()
                // One more state than the effort ends the search.
                .keeping(effort.states.saturating_add(2));
                live.push(Live {
                    input: i,
                    reach,
                    next_us: 0.0,
                    found: Vec::new(),
                });
            }
        }
        Search {
            filled,
            base,
            replicated,
            effort: effort.among(live.len(), ways),
            live,
            topology,
            best: f64::INFINITY,
            joined: 0,
            answer: None,
            tied: false,
        }
    }

    fn run(mut self) -> Option<Propagation> {
        if self.live.is_empty() {
            let base = self.base;
            self.offer(&base, 0.0);
        }
        let mut ended = true;
        // How many states were given out.
        let mut states = 0;
        loop {
            if states > self.effort.states || self.joined > self.effort.joins {
                ended = false;
                break;
            }
            let next = (self.live.iter().enumerate())
                .map(|(at, l)| (l.next_us, at))
                .min_by(|a, b| a.0.total_cmp(&b.0));
            let Some((cost, at)) = next else { break };
            if cost > near(self.best) || cost.is_infinite() {
                break;
            }
            let live = &mut self.live[at];
            live.reach.within(near(self.best));
            let Some((state, cost)) = live.reach.next() else {
                ended = false;
                break;
            };
            states += 1;
            live.next_us = live.reach.next_cost();
            let masks = self.filled.masks_with_partitions(live.input, &state);
            let mut fits = self.base;
            narrow(&mut fits, &masks);
            if fits[..self.filled.sizes.len()].contains(&0) {
                continue;
            }
            live.found.push((state, cost, masks));
            self.join(0, at, &fits, cost);
        }
        let answer = self.answer.take();
        let found = answer.as_ref().and_then(|a| self.report(&a.0, &a.1));
        if ended && found.is_some() {
            return found;
        }
        let other = self.descend(answer.map(|a| a.0));
        let cost = |p: &Option<Propagation>| p.as_ref().map_or(f64::INFINITY, |p| p.cost_us);
        if cost(&other) < cost(&found) {
            other
        } else {
            found
        }
    }

    /// The answer by descent, when this search did not end.
    fn descend(&self, start: Option<Vec<usize>>) -> Option<Propagation> {
        let reach = |i: usize| {
            let f = self.filled;
            let (meta, source) = (f.metas[i], f.sources[i]);
            Reach::new(f.sizes, self.topology, meta, &f.table, f.allowed(i), source)
        };
        let descent = Descent {
            filled: self.filled,
            reaches: (0..self.filled.metas.len()).map(reach).collect(),
            base: self.base,
        };
        let (rows, targets, ways) = descent.run(start)?;
        let inputs = targets.iter().zip(ways).enumerate();
        let inputs: Vec<_> = inputs
            .map(|(i, (target, (steps, cost_us)))| Input {
                from: self.filled.shown(&self.filled.sources[i]),
                to: self.filled.shown(target),
                steps,
                cost_us,
            })
            .collect();
        Some(Propagation {
            cost_us: inputs.iter().map(|i| i.cost_us).sum(),
            inputs,
            outputs: self.filled.outputs(&rows),
            tied: true,
        })
    }

    /// Joins what input `new` just found with what the inputs from `at` on
    /// found before.
    fn join(&mut self, at: usize, new: usize, masks: &Masks, cost: f64) {
        if at == self.live.len() {
            self.offer(masks, cost);
            return;
        }
        if at == new {
            self.join(at + 1, new, masks, cost);
            return;
        }
        for i in 0..self.live[at].found.len() {
            let (_, more, other) = &self.live[at].found[i];
            let total = cost + more;
            self.joined += 1;
            work::count(Work::Join);
            if total > near(self.best) || self.joined > self.effort.joins {
                break;
            }
            let mut both = *masks;
            narrow(&mut both, other);
            if !both[..self.filled.sizes.len()].contains(&0) {
                self.join(at + 1, new, &both, total);
            }
        }
    }

    fn offer(&mut self, masks: &Masks, cost: f64) {
        if cost > near(self.best) {
            return;
        }
        let accept = |targets: &[State]| {
            (0..targets.len()).all(|i| !self.replicated[i] || self.chunks(i, &targets[i]))
        };
        let Some(answer) = self.filled.choose(masks, accept) else {
            return;
        };
        let first = match &self.answer {
            Some(known) => {
                let apart = answer.1 != known.1;
                self.tied = match cost < self.best {
                    true => apart && self.best <= near(cost),
                    false => self.tied || apart,
                };
                cost < self.best - TIE_US || (cost <= self.best + TIE_US && answer.0 < known.0)
            }
            None => true,
        };
        self.best = self.best.min(cost);
        if first {
            self.answer = Some(answer);
        }
    }

    /// Whether a replicated input has enough elements for its shards.
    fn chunks(&self, input: usize, target: &State) -> bool {
        let shape = &self.filled.metas[input].shape;
        let placements = self.filled.shown(target);
        let mut dims = placements.iter().filter_map(|p| p.sharded());
        dims.all(|(dim, _)| fits(shape, dim, self.filled.sizes, |m| placements[m]))
    }

    fn report(&self, rows: &[usize], targets: &[State]) -> Option<Propagation> {
        let mut inputs = Vec::with_capacity(targets.len());
        for (i, target) in targets.iter().enumerate() {
            let from = self.filled.shown(&self.filled.sources[i]);
            let to = self.filled.shown(target);
            let live = self.live.iter().find(|l| l.input == i);
            let (steps, cost_us) = match live {
                Some(live) => {
                    let before = self.filled.before_partitions(i, target);
                    let found = live.found.iter().find(|f| f.0 == before)?;
                    let mut steps = live.reach.steps(before);
                    let partial = (0..to.len()).filter(|m| before[*m] != target[*m]);
                    steps.extend(partial.map(|m| Step::partition(m, to[m])));
                    (steps, found.1)
                }
                None if from == to => (Vec::new(), 0.0),
                None => {
                    let meta = self.filled.metas[i];
                    plan(meta, self.filled.sizes, self.topology, &from, &to)?
                }
            };
            inputs.push(Input {
                from,
                to,
                steps,
                cost_us,
            });
        }
        Some(Propagation {
            cost_us: inputs.iter().map(|i| i.cost_us).sum(),
            inputs,
            outputs: self.filled.outputs(rows),
            tied: self.tied,
        })
    }
}
