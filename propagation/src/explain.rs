//! The reasons of a decision: the rule that matched, the strategy of each mesh dim,
//! and the cost of every other strategy on that mesh dim.

use std::fmt;

use super::cost::Topology;
use super::each::Each;
use super::error::PropagationError;
use super::fill::Filled;
use super::placement::Placement;
use super::redistribute::{Step, plan};
use super::registry::Registry;
use super::rule::Query;
use super::search::{Checked, Propagation, check, propagate};
use super::spec::{Mesh, written};

/// A decision with its reasons.
#[derive(Clone, Debug, PartialEq)]
pub struct Explanation {
    /// The op whose rule answered: for a derived form the functional op.
    pub rule: String,
    /// The family of rules that it belongs to.
    pub family: String,
    /// What was decided.
    pub decision: Propagation,
    /// One choice per mesh dim; none for ops on lists, whose entries are each
    /// decided as the op on single tensors is.
    pub choices: Vec<Choice>,
}

/// The strategy of one mesh dim, and the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// What was chosen.
    pub strategy: OneDim,
    /// The other strategies of the rule, cheapest first, those that cannot be
    /// had last. The other mesh dims stay as chosen.
    pub others: Vec<Other>,
}

/// A strategy on one mesh dim. Written `S(0),R -> S(0)`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OneDim {
    /// The placement of each input.
    pub inputs: Vec<Placement>,
    /// The placement of each output.
    pub outputs: Vec<Placement>,
}

impl fmt::Display for OneDim {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} -> {}", written(&self.inputs), written(&self.outputs))
    }
}

/// A strategy that was not chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Other {
    /// The strategy.
    pub strategy: OneDim,
    /// What speaks against it.
    pub verdict: Verdict,
}

/// What speaks against a strategy.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// What it would cost, with the steps of each input.
    Costs {
        /// Microseconds of all redistributions.
        cost_us: f64,
        /// The way of each input.
        steps: Vec<Vec<Step>>,
    },
    /// A shard lacks what the strategy needs: elements on every rank, or a
    /// number of shards that divides the dim.
    Unfit,
    /// There is no way to bring this input there, as from a shard to a partial.
    NoWay {
        /// Which of the tensors among the arguments.
        input: usize,
    },
    /// This input is written and would have to move.
    Written {
        /// Which of the tensors among the arguments.
        input: usize,
    },
}

/// Decides as [`propagate`] does, and says why.
///
/// # Errors
///
/// As [`propagate`].
pub fn explain(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Explanation, PropagationError> {
    let decision = propagate(rules, query, mesh, topology)?;
    let (rule, family) = rules.matched(query.op).unwrap_or_default();
    if Each::of(query.op, rules).is_some() {
        return Ok(Explanation {
            rule,
            family,
            decision,
            choices: Vec::new(),
        });
    }
    let checked = check(rules, query, mesh)?;
    let filled = Filled::new(query, &checked.rule, &checked.inputs, mesh.sizes())?;
    let every: Vec<OneDim> = (0..filled.rows())
        .map(|row| {
            let (inputs, outputs) = filled.row(row);
            OneDim { inputs, outputs }
        })
        .collect();
    let chosen: Vec<usize> = (0..mesh.sizes().len())
        .map(|m| {
            let is = |row: &OneDim| {
                let mut inputs = row.inputs.iter().zip(&decision.inputs);
                let mut outputs = row.outputs.iter().zip(&decision.outputs);
                inputs.all(|(p, i)| *p == i.to[m]) && outputs.all(|(p, o)| *p == o.placements[m])
            };
            every.iter().position(is).unwrap_or(0)
        })
        .collect();
    let choices = (0..chosen.len())
        .map(|m| {
            let mut others = Vec::new();
            for (row, strategy) in every.iter().enumerate() {
                let known = |o: &Other| o.strategy == *strategy;
                if *strategy == every[chosen[m]] || others.iter().any(known) {
                    continue;
                }
                let mut rows = chosen.clone();
                rows[m] = row;
                others.push(Other {
                    strategy: strategy.clone(),
                    verdict: verdict(&filled, &checked, topology, &rows),
                });
            }
            others.sort_by(|a, b| a.verdict.cost().total_cmp(&b.verdict.cost()));
            Choice {
                strategy: every[chosen[m]].clone(),
                others,
            }
        })
        .collect();
    Ok(Explanation {
        rule,
        family,
        decision,
        choices,
    })
}

fn verdict(
    filled: &Filled<'_>,
    checked: &Checked<'_>,
    topology: &Topology,
    rows: &[usize],
) -> Verdict {
    let Some(targets) = filled.targets(rows) else {
        return Verdict::Unfit;
    };
    let outputs = filled.outputs(rows);
    for written in &checked.written {
        let own = &checked.inputs[written.input].0.placements;
        let elsewhere = |output: usize| outputs[output].placements != *own;
        if targets[written.input] != filled.sources[written.input]
            || written.output.is_some_and(elsewhere)
        {
            let input = written.input;
            return Verdict::Written { input };
        }
    }
    let (mut steps, mut cost_us) = (Vec::new(), 0.0);
    for (input, (spec, meta)) in checked.inputs.iter().enumerate() {
        let to = filled.shown(&targets[input]);
        match plan(meta, filled.sizes, topology, &spec.placements, &to) {
            Some((way, cost)) => {
                steps.push(way);
                cost_us += cost;
            }
            None => return Verdict::NoWay { input },
        }
    }
    Verdict::Costs { cost_us, steps }
}

impl Verdict {
    /// What the strategy would cost; infinity where it cannot be had.
    pub fn cost(&self) -> f64 {
        match self {
            Verdict::Costs { cost_us, .. } => *cost_us,
            _ => f64::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::{Arg, candidates, standard_rules};
    use super::*;

    fn why(op: &str, on: &str, args: &[&str]) -> Explanation {
        let mesh = Mesh::parse(on).unwrap();
        let args: Vec<_> = args.iter().map(|a| Arg::parse(a, &mesh).unwrap()).collect();
        let query = Query { op, args: &args };
        let topology = Topology::one_node(&mesh);
        let why = explain(standard_rules().unwrap(), &query, &mesh, &topology).unwrap();
        // Each mesh dim's strategy is the decision's, and nothing is cheaper.
        for (m, choice) in why.choices.iter().enumerate() {
            let to: Vec<_> = why.decision.inputs.iter().map(|i| i.to[m]).collect();
            assert_eq!(choice.strategy.inputs, to);
            let least = choice
                .others
                .first()
                .map_or(f64::INFINITY, |o| o.verdict.cost());
            assert!(least >= why.decision.cost_us - 1e-9, "{op} {choice:?}");
        }
        why
    }

    #[test]
    fn every_strategy_is_accounted_for() {
        let w = why(
            "aten::mm",
            "tp=4",
            &["f32[64,32] @ S(0)", "f32[32,128] @ S(1)"],
        );
        assert_eq!((w.rule.as_str(), w.family.as_str()), ("aten::mm", "matmul"));
        let choice = &w.choices[0];
        assert_eq!(choice.strategy.to_string(), "R,S(1) -> S(1)");
        // From the mathematics of a product: rows, contraction, replicated, and
        // the partials in one factor that a shard cannot become.
        let named = |text: &str| {
            let mut others = choice.others.iter();
            others.find(|o| o.strategy.to_string() == text).unwrap()
        };
        for text in ["S(0),R -> S(0)", "S(1),S(0) -> P(sum)", "R,R -> R"] {
            assert!(named(text).verdict.cost() > w.decision.cost_us, "{text}");
        }
        let partial = named("P(sum),R -> P(sum)");
        assert_eq!(partial.verdict, Verdict::NoWay { input: 0 });
        assert_eq!(choice.others.len() + 1, 8);
    }

    #[test]
    fn costs_are_those_of_full_enumeration() {
        let args = ["f32[64,32] @ S(0)", "f32[32,128] @ S(0)"];
        let w = why("aten::mm", "tp=4", &args);
        let mesh = Mesh::parse("tp=4").unwrap();
        let args = args.map(|a| Arg::parse(a, &mesh).unwrap());
        let query = Query {
            op: "aten::mm",
            args: &args,
        };
        let all = candidates(
            standard_rules().unwrap(),
            &query,
            &mesh,
            &Topology::one_node(&mesh),
        );
        for candidate in all.unwrap() {
            let to: Vec<_> = candidate.inputs.iter().map(|i| i.to[0]).collect();
            let mut others = w.choices[0].others.iter();
            match others.find(|o| o.strategy.inputs == to) {
                Some(o) => assert!((o.verdict.cost() - candidate.cost_us).abs() < 1e-9),
                None => assert_eq!(w.choices[0].strategy.inputs, to),
            }
        }
    }

    #[test]
    fn what_cannot_be_had_says_why() {
        let w = why("aten::add_.Tensor", "2", &["f32[4] @ S(0)", "f32[4]"]);
        assert_eq!(w.rule, "aten::add.Tensor");
        let others = &w.choices[0].others;
        assert!(
            others
                .iter()
                .all(|o| o.verdict == Verdict::Written { input: 0 })
        );
        // Five elements over two ranks: a mean of means would be wrong.
        let w = why("aten::mean", "2", &["f32[5] @ S(0)"]);
        let unfit = |o: &&Other| o.strategy.to_string() == "S(0) -> P(avg)";
        let other = w.choices[0].others.iter().find(unfit).unwrap();
        assert_eq!(other.verdict, Verdict::Unfit);
    }
}
