//! Full enumeration of the ways to run an op: the slow and simple counterpart of
//! the search.

use hashbrown::{HashMap, HashSet};

use super::cost::Topology;
use super::each::Each;
use super::error::PropagationError;
use super::fill::Filled;
use super::redistribute::Reach;
use super::registry::{Registry, Written};
use super::rule::Query;
use super::search::{Checked, Input, Propagation, TIE_US, check, near};
use super::spec::Mesh;

/// The most combinations that are enumerated.
const LIMIT: usize = 50_000;

/// Every way to run an op, cheapest first: full enumeration, for people who ask
/// what else there is and for tests of [`propagate`](super::propagate).
///
/// # Errors
///
/// As [`propagate`](super::propagate), and [`PropagationError::TooLarge`] for more than 50,000
/// combinations.
pub fn candidates(
    rules: &Registry,
    query: &Query<'_>,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Vec<Propagation>, PropagationError> {
    if let Some(each) = Each::of(query.op, rules) {
        return each.candidates(rules, query, mesh, topology, LIMIT);
    }
    enumerate(query, &check(rules, query, mesh)?, mesh, topology)
}

/// The same, for a question that was checked.
pub(super) fn enumerate(
    query: &Query<'_>,
    checked: &Checked<'_>,
    mesh: &Mesh,
    topology: &Topology,
) -> Result<Vec<Propagation>, PropagationError> {
    let filled = Filled::new(query, &checked.rule, &checked.inputs, mesh.sizes())?;
    let dims = mesh.sizes().len();
    let total = filled.combinations(query.op, dims, LIMIT)?;
    let mut reaches = Vec::new();
    for (i, source) in filled.sources.iter().enumerate() {
        let allowed = filled.allowed(i);
        let meta = filled.metas[i];
        let table = &filled.table;
        let mut reach = Reach::new(mesh.sizes(), topology, meta, table, allowed, *source);
        let mut costs = HashMap::new();
        while let Some((state, cost)) = reach.next() {
            costs.insert(state, cost);
        }
        reaches.push((reach, costs));
    }
    let mut known = HashSet::new();
    let mut all: Vec<Propagation> = Vec::new();
    for number in 0..total {
        let rows: Vec<usize> = (0..dims)
            .rev()
            .map(|place| number / filled.rows().pow(place as u32) % filled.rows())
            .collect();
        let Some(targets) = filled.targets(&rows) else {
            continue;
        };
        let outputs = filled.outputs(&rows);
        let moves = |w: &Written| {
            targets[w.input] != filled.sources[w.input]
                || (w.output)
                    .is_some_and(|o| outputs[o].placements != checked.inputs[w.input].0.placements)
        };
        if checked.written.iter().any(moves) {
            continue;
        }
        if !known.insert(targets.clone()) {
            continue;
        }
        let inputs: Option<Vec<Input>> = (reaches.iter().zip(&targets).enumerate())
            .map(|(i, ((reach, costs), target))| {
                Some(Input {
                    from: checked.inputs[i].0.placements.clone(),
                    to: filled.shown(target),
                    cost_us: *costs.get(target)?,
                    steps: reach.steps(*target),
                })
            })
            .collect();
        if let Some(inputs) = inputs {
            let cost_us = inputs.iter().map(|i| i.cost_us).sum();
            let found = Propagation {
                inputs,
                outputs,
                cost_us,
                tied: false,
            };
            all.push(found);
        }
    }
    // The sort is stable: among equal costs, strategies listed first come first.
    all.sort_by_key(|p| (p.cost_us / TIE_US).round() as u64);
    for i in 1..all.len() {
        if all[i].cost_us <= near(all[i - 1].cost_us) {
            all[i - 1].tied = true;
            all[i].tied = true;
        }
    }
    Ok(all)
}
