//! The truth tables of ops, over all their samples.

use hashbrown::{HashMap, HashSet};

use crate::samples::{Sample, Values};
use rote_propagation::{Arg, Combination, Mesh, PartialOp, Placement, Registry};

use super::judge::{Case, Placed, Unfit};
use super::kernels::Kernels;
use super::left_out;
use super::names::checks_shapes;
use super::registered::registered;
use super::report::{Finding, OpReport};

/// What to validate.
#[derive(Clone, Debug)]
pub struct Options {
    /// The calls to judge; those of one op stand together.
    pub samples: Vec<Sample>,
    /// On which mesh.
    pub mesh: Mesh,
    /// Only this combination, as [`Combination::parse`] reads it.
    pub only: Option<Combination>,
    /// Whether to look for true combinations that no rule claims.
    pub missing: bool,
    /// Placements of registered kinds by which placeholders are filled, too: shards,
    /// whatever dim they split, and partials.
    pub registered: Vec<Placement>,
}

/// How far a validation is.
#[derive(Debug)]
pub enum Event<'a> {
    /// An op is about to be judged: the how manieth, of how many.
    Start {
        /// The op.
        op: &'a str,
        /// From 1.
        number: usize,
        /// Of all.
        total: usize,
    },
    /// An op is judged.
    Done(&'a OpReport),
}

/// More combinations than these, on a mesh of several dims, are sampled.
const MOST: usize = 1500;

/// Judges the rules on every sample, op by op.
pub fn validate(
    rules: &Registry,
    kernels: &mut dyn Kernels,
    options: &Options,
    tell: &mut dyn FnMut(Event<'_>),
) {
    let mut ops: Vec<&str> = Vec::new();
    for sample in &options.samples {
        if !ops.contains(&sample.op.as_str()) {
            ops.push(&sample.op);
        }
    }
    for (i, op) in ops.iter().enumerate() {
        tell(Event::Start {
            op,
            number: i + 1,
            total: ops.len(),
        });
        let mut report = OpReport {
            op: (*op).to_owned(),
            ..OpReport::default()
        };
        for sample in options.samples.iter().filter(|s| s.op == *op) {
            one(rules, kernels, options, sample, &mut report);
        }
        tell(Event::Done(&report));
    }
}

/// Judges the rule of a sample's op on the sample.
fn one(
    rules: &Registry,
    kernels: &mut dyn Kernels,
    options: &Options,
    sample: &Sample,
    report: &mut OpReport,
) {
    let mesh = &options.mesh;
    let args = sample.written();
    let parsed: Vec<Arg> = match sample.replicated(mesh) {
        Ok(parsed) => parsed,
        Err(error) => return report.unjudged(error.to_string(), &args),
    };
    let flat = mesh.sizes().len() == 1;
    // Strided shards: those of a mesh dim of 2 further left.
    let strided = Placement::StridedShard {
        dim: 0,
        split_factor: 2,
    };
    let mut types = options.registered.clone();
    types.extend(flat.then_some(strided));
    let case = Case::new(
        rules,
        &sample.op,
        &parsed,
        &sample.values,
        mesh,
        kernels,
        &types,
    );
    let case = match case {
        Ok(case) => case,
        Err(unfit) => return is_unfit(unfit, args, report),
    };
    report.samples += 1;
    if case.shapes_only {
        report.unjudged("random or undefined values: shapes only", &args);
    }
    let (claimed, mut order) = claimed(&case);
    if !flat && order.len() > MOST {
        // Every so manieth, the same ones each time.
        let step = order.len().div_ceil(MOST);
        report.unjudged(
            format!("more than {MOST} combinations: one in {step} is judged"),
            &args,
        );
        order = order.into_iter().step_by(step).collect();
    }
    let open = options.missing && flat && !case.shapes_only && !case.claims.some;
    if open && !checks_shapes(&sample.op) {
        let reason = "its kernel may not check shapes: no shards but those claimed";
        report.unjudged(reason, &args);
    }
    let mut judging = Judging {
        case,
        claimed,
        open,
        args,
        report,
    };
    if let Some(only) = &options.only {
        return judging.asked(only);
    }
    if open {
        let known: HashSet<Placed> = order.iter().cloned().collect();
        let more = judging.case.open_inputs().into_iter();
        order.extend(more.filter(|p| !known.contains(p)));
    }
    let found = judging.all(order);
    if judging.case.varies.contains(&true) {
        judging.unclaimed(found, &sample.values);
    }
}

/// Reports a sample that cannot be judged.
fn is_unfit(unfit: Unfit, args: String, report: &mut OpReport) {
    match unfit {
        Unfit::Refused(error) => report.unjudged(error.to_string(), &args),
        Unfit::Kernel(error) => report.unjudged(format!("the op does not run: {error}"), &args),
        Unfit::Outputs(reason) => report.wrong.push(Finding {
            combination: Combination {
                inputs: Vec::new(),
                outputs: Vec::new(),
            },
            args,
            reason,
        }),
    }
}

/// The outputs that the rule claims for placements of the inputs.
type Claimed = HashMap<Placed, Vec<Placed>>;

/// What the rule claims, and the order in which it names placements of the
/// inputs.
fn claimed(case: &Case<'_>) -> (Claimed, Vec<Placed>) {
    let (mut claimed, mut order) = (Claimed::new(), Vec::new());
    for strategy in &case.claims.strategies {
        let outputs = claimed.entry(strategy.inputs.clone()).or_insert_with(|| {
            order.push(strategy.inputs.clone());
            Vec::new()
        });
        outputs.push(strategy.outputs.clone());
    }
    (claimed, order)
}

/// The judgement of one sample.
struct Judging<'a, 'r> {
    case: Case<'a>,
    claimed: Claimed,
    /// Whether true combinations that no rule claims are looked for.
    open: bool,
    /// The sample's arguments, as a report shows them.
    args: String,
    report: &'r mut OpReport,
}

impl Judging<'_, '_> {
    /// Judges what is claimed for each of these placements of the inputs; the
    /// true outputs of those that could be claimed too.
    fn all(&mut self, order: Vec<Placed>) -> Vec<(Placed, Vec<Placed>)> {
        let mut found = Vec::new();
        for inputs in order {
            let outputs = self.claimed.get(&inputs).cloned().unwrap_or_default();
            let verdict = self.case.judge(&inputs, &outputs, self.open);
            if let Some(reason) = verdict.untried {
                if let Some(outputs) = outputs.into_iter().next() {
                    let combination = Combination { inputs, outputs };
                    let reason = format!("{combination}: {reason}");
                    self.report.unjudged(reason, &self.args);
                }
                continue;
            }
            self.report.tried += 1;
            for (outputs, found) in verdict.claimed {
                match found {
                    Ok(()) => self.report.correct += 1,
                    Err(reason) => {
                        let combination = Combination {
                            inputs: inputs.clone(),
                            outputs,
                        };
                        note(&mut self.report.wrong, combination, &self.args, reason);
                    }
                }
            }
            let replicated = |p: &Placement| *p == Placement::Replicate;
            let idle = inputs.iter().flatten().all(replicated);
            let other = |p: &Placement| {
                matches!(
                    p,
                    Placement::StridedShard { .. } | Placement::Registered { .. }
                )
            };
            if self.open && !idle && !inputs.iter().flatten().any(other) {
                let outputs = open_outputs(&verdict.open, &self.case.varies);
                found.push((inputs, outputs));
            }
        }
        found
    }

    /// Reports the true combinations that no rule claims: as missing, or as left
    /// out for a reason.
    fn unclaimed(&mut self, found: Vec<(Placed, Vec<Placed>)>, values: &[Values]) {
        let all: HashSet<Combination> = (found.iter())
            .flat_map(|(inputs, all)| {
                all.iter().map(|outputs| Combination {
                    inputs: inputs.clone(),
                    outputs: outputs.clone(),
                })
            })
            .collect();
        for (inputs, outputs) in found {
            let claimed = self.claimed.get(&inputs).map_or(&[][..], Vec::as_slice);
            for outputs in outputs {
                if outputs_are_claimed(&outputs, claimed) {
                    continue;
                }
                let combination = Combination {
                    inputs: inputs.clone(),
                    outputs,
                };
                let reason = (self.case.empties(&combination.inputs))
                    .or_else(|| incidental(&combination, &all, values))
                    .or_else(|| to_be_stated(&combination))
                    .or_else(|| left_out::reason(&self.report.op, &combination).map(str::to_owned));
                match reason {
                    Some(reason) => {
                        note(&mut self.report.left_out, combination, &self.args, reason);
                    }
                    None => {
                        note(
                            &mut self.report.missing,
                            combination,
                            &self.args,
                            String::new(),
                        );
                    }
                }
            }
        }
    }

    /// Judges one combination, claimed or not.
    fn asked(&mut self, only: &Combination) {
        let (case, report, args) = (&mut self.case, &mut *self.report, &self.args);
        let fits = |side: &Placed, count| side.len() == count;
        if !fits(&only.inputs, case.inputs()) || !fits(&only.outputs, case.claims.outputs.len()) {
            let expected = format!(
                "{only}: the op has {} tensors and {} outputs",
                case.inputs(),
                case.claims.outputs.len()
            );
            return report.unjudged(expected, args);
        }
        let claimed = self.claimed.get(&only.inputs);
        let is_claimed = claimed.is_some_and(|all| all.contains(&only.outputs));
        let verdict = case.judge(&only.inputs, std::slice::from_ref(&only.outputs), false);
        if let Some(reason) = verdict.untried {
            return report.unjudged(format!("{only}: {reason}"), args);
        }
        report.tried += 1;
        let found = verdict.claimed.into_iter().next().map(|c| c.1);
        let only = only.clone();
        match (found, is_claimed) {
            (None | Some(Ok(())), true) => report.correct += 1,
            (None | Some(Ok(())), false) => match left_out::reason(&report.op, &only) {
                Some(reason) => note(&mut report.left_out, only, args, reason.to_owned()),
                None => note(&mut report.missing, only, args, String::new()),
            },
            (Some(Err(reason)), true) => note(&mut report.wrong, only, args, reason),
            (Some(Err(reason)), false) => note(&mut report.untrue, only, args, reason),
        }
    }
}

/// Why a combination that is true says nothing of partials: the op does not read
/// the values of one, or only takes some, as which the parts were drawn.
fn incidental(
    combination: &Combination,
    all: &HashSet<Combination>,
    values: &[Values],
) -> Option<String> {
    use PartialOp::{Max, Min, Sum};
    for (i, placements) in combination.inputs.iter().enumerate() {
        if !matches!(placements[..], [Placement::Partial(_)]) {
            continue;
        }
        if values.get(i).is_some_and(|v| *v != Values::Any) {
            return Some(format!(
                "only with such values as the samples have of input {i}"
            ));
        }
        let with = |op| {
            let mut other = combination.clone();
            other.inputs[i] = vec![Placement::Partial(op)];
            all.contains(&other)
        };
        if [Sum, Max, Min].into_iter().all(with) {
            return Some(format!("the values of input {i} are not read"));
        }
    }
    None
}

/// That what is true of a registered partial is for those to state who register it.
fn to_be_stated(combination: &Combination) -> Option<String> {
    let mut all = combination
        .inputs
        .iter()
        .chain(&combination.outputs)
        .flatten();
    let partial = all.find_map(registered)?;
    Some(format!(
        "what passes P({partial}) is stated where it is registered"
    ))
}

fn note(list: &mut Vec<Finding>, combination: Combination, args: &str, reason: String) {
    if list.iter().all(|f| f.combination != combination) {
        list.push(Finding {
            combination,
            args: args.to_owned(),
            reason,
        });
    }
}

/// What every rank has whole is also its own mean and extremum.
fn weaker(p: &[Placement], than: &[Placement]) -> bool {
    use PartialOp::{Avg, Max, Min};
    let trivial = |p: &Placement| matches!(p, Placement::Partial(Avg | Max | Min));
    than.iter().all(|p| *p == Placement::Replicate) && p.iter().all(trivial)
}

fn outputs_are_claimed(outputs: &Placed, claimed: &[Placed]) -> bool {
    (claimed.iter()).any(|c| outputs.iter().zip(c).all(|(o, c)| o == c || weaker(o, c)))
}

/// The true placements of all outputs together, without those that follow from
/// others, and of outputs that do not vary only the plainest.
fn open_outputs(open: &[Placed], varies: &[bool]) -> Vec<Placed> {
    let mut all: Vec<Placed> = vec![Vec::new()];
    for (candidates, varies) in open.iter().zip(varies) {
        let strong = |p: &&Vec<Placement>| !candidates.iter().any(|c| weaker(p, c));
        let most = if *varies { usize::MAX } else { 1 };
        let strong: Vec<_> = candidates.iter().filter(strong).take(most).collect();
        all = (all.iter())
            .flat_map(|a| {
                strong
                    .iter()
                    .map(move |p| [a.as_slice(), &[(*p).clone()]].concat())
            })
            .take(64)
            .collect();
    }
    if open.is_empty() { Vec::new() } else { all }
}
