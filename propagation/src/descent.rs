//! A descent, for questions whose search would take too long: many inputs, many
//! mesh dims, placements without any order.
//!
//! The descent starts from the best known combination of strategies. On one mesh dim
//! at a time it takes the strategy that costs least, until nothing gets cheaper.
//! Costs are those of a simple way between two specs: change each placement that can
//! be changed at once, else replicate from the right. Such a way exists whenever
//! there is a way. Time is bounded. The answer is correct, and may cost more than
//! the best answer.

use super::fill::{Filled, Masks};
use super::redistribute::{Reach, State, Way};

/// How often all mesh dims are gone through.
const ROUNDS: usize = 4;

pub(super) struct Descent<'s, 'a> {
    pub(super) filled: &'s Filled<'a>,
    /// Per input, the way from where it lies.
    pub(super) reaches: Vec<Reach<'s>>,
    /// The strategies that each mesh dim may use.
    pub(super) base: Masks,
}

impl Descent<'_, '_> {
    /// Strategies per mesh dim, the inputs' states and the ways there.
    pub(super) fn run(
        &self,
        start: Option<Vec<usize>>,
    ) -> Option<(Vec<usize>, Vec<State>, Vec<Way>)> {
        let mut rows = match start {
            Some(rows) => rows,
            None => self.filled.choose(&self.base, |_| true)?.0,
        };
        let mut best = self.costs(&rows).unwrap_or_default();
        // How many rows were tried without a change: after all of them, none is cheaper.
        let mut tried = 0;
        let rows_of =
            |m: usize| (0..self.filled.rows()).filter(move |row| self.base[m] >> row & 1 == 1);
        let all: usize = (0..rows.len()).map(|m| rows_of(m).count()).sum();
        'rounds: for _ in 0..ROUNDS {
            for m in 0..rows.len() {
                for row in rows_of(m) {
                    let old = std::mem::replace(&mut rows[m], row);
                    match self.cheaper(&rows, (m, old), &best) {
                        Some(costs) => {
                            best = costs;
                            tried = 0;
                        }
                        None => rows[m] = old,
                    }
                    tried += 1;
                    if tried >= all {
                        break 'rounds;
                    }
                }
            }
        }
        let targets = self.filled.targets(&rows)?;
        let ways = (self.reaches.iter().zip(&targets))
            .map(|(reach, target)| reach.simple_way(target))
            .collect::<Option<Vec<_>>>()?;
        Some((rows, targets, ways))
    }

    /// What each input costs; `None` if one of them has no way.
    fn costs(&self, rows: &[usize]) -> Option<Vec<f64>> {
        let targets = self.filled.targets(rows)?;
        (self.reaches.iter().zip(&targets))
            .map(|(reach, target)| reach.simple_cost(target, f64::INFINITY))
            .collect()
    }

    /// What each input costs after mesh dim `m` has changed from a row, if that is less
    /// in all; `known` are the costs before, none if there was no way.
    fn cheaper(&self, rows: &[usize], (m, old): (usize, usize), known: &[f64]) -> Option<Vec<f64>> {
        if known.is_empty() && !self.reaches.is_empty() {
            return self.costs(rows);
        }
        if rows[m] == old {
            return None;
        }
        let least: f64 = known.iter().sum();
        // Inputs that the change does not concern cost what they did.
        let stays = |input: &usize| self.filled.same_input(*input, rows[m], old);
        let kept: Vec<bool> = (0..known.len()).map(|input| stays(&input)).collect();
        let both = known.iter().zip(&kept);
        let mut total: f64 = both.filter(|(_, kept)| **kept).map(|(cost, _)| cost).sum();
        if total >= least {
            return None;
        }
        let targets = self.filled.targets(rows)?;
        // What the others cost at least leaves less for each. Sums are rounded: the last
        // comparison decides.
        let limit = least * (1.0 + 1e-9);
        let mut costs = known.to_vec();
        let mut rest = 0.0;
        for input in (0..known.len()).filter(|input| !kept[*input]) {
            costs[input] = self.reaches[input].operations.least(&targets[input])?;
            rest += costs[input];
        }
        if total + rest > limit {
            return None;
        }
        for input in (0..known.len()).filter(|input| !kept[*input]) {
            rest -= costs[input];
            let left = limit - total - rest;
            costs[input] = self.reaches[input].simple_cost(&targets[input], left)?;
            total += costs[input];
        }
        (total < least).then_some(costs)
    }
}

impl Reach<'_> {
    /// The cost of [`Reach::simple_way`], if it is no more than a limit.
    fn simple_cost(&self, target: &State, limit: f64) -> Option<f64> {
        if let Some(cost) = self.dtensors_cost(target) {
            return (cost <= limit).then_some(cost);
        }
        let mut total = 0.0;
        self.simple(target, |_, _, _, cost| {
            total += cost;
            (total <= limit).then_some(())
        })?;
        Some(total)
    }

    /// A way to a state that need not be the cheapest; `None` when there is
    /// none, as from a shard to a partial.
    pub(super) fn simple_way(&self, target: &State) -> Option<Way> {
        if let Some(way) = self.dtensors_way(target) {
            return Some(way);
        }
        self.way(|each| self.simple(target, each))
    }

    /// Runs something on each operation of the way: the state before, the mesh dim, its
    /// placement after, and the cost.
    fn simple(
        &self,
        target: &State,
        mut each: impl FnMut(&State, usize, u8, f64) -> Option<()>,
    ) -> Option<()> {
        let operations = &self.operations;
        let mut now = self.source();
        let dims = self.mesh_dims();
        // Every round brings a mesh dim home or replicates one; what was
        // replicated is brought home at once or stays until all others are.
        let mut gathered = [false; super::spec::MAX_MESH_DIMS];
        while now != *target {
            let lying = operations.lying(&now);
            // The cheapest first: what splits a tensor makes later steps cheaper.
            let mut direct: Option<(f64, usize)> = None;
            // Tensor dims that a mesh dim further left has yet to split, or to gather.
            let mut moving = 0_u64;
            for m in (0..dims).filter(|m| now[*m] != target[*m]) {
                let (before, after) = operations.split(now[m], target[m]);
                let waits = after & moving != 0;
                moving |= before | after;
                if waits {
                    continue;
                }
                if let Some(cost) = operations.change(&lying, m, now[m], target[m]) {
                    if direct.is_none_or(|d| cost.total_cmp(&d.0).is_lt()) {
                        direct = Some((cost, m));
                    }
                }
            }
            let (cost, m, code) = match direct {
                Some((cost, m)) => (cost, m, target[m]),
                None => {
                    let gather = |m: usize| operations.change(&lying, m, now[m], 0);
                    let away = (0..dims).rev().filter(|m| now[*m] != 0 && !gathered[*m]);
                    let (cost, m) = away.filter_map(|m| Some((gather(m)?, m))).next()?;
                    gathered[m] = true;
                    (cost, m, 0)
                }
            };
            each(&now, m, code, cost)?;
            now[m] = code;
        }
        Some(())
    }
}
