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
use super::redistribute::{Reach, State, Step};

/// How often all mesh dims are gone through.
const ROUNDS: usize = 4;

pub(super) struct Descent<'s, 'a> {
    pub(super) filled: &'s Filled<'a>,
    /// Per input, the way from where it lies.
    pub(super) reaches: Vec<Reach<'s>>,
    /// The strategies that each mesh dim may use.
    pub(super) base: Masks,
}

/// A way, and its cost.
type Way = (Vec<Step>, f64);

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
        for _ in 0..ROUNDS {
            let mut changed = false;
            for m in 0..rows.len() {
                for row in (0..self.filled.rows()).filter(|row| self.base[m] >> row & 1 == 1) {
                    let old = std::mem::replace(&mut rows[m], row);
                    match self.cheaper(&rows, (m, old), &best) {
                        Some(costs) => {
                            best = costs;
                            changed = true;
                        }
                        None => rows[m] = old,
                    }
                }
            }
            if !changed {
                break;
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
        let mut costs = known.to_vec();
        for input in (0..known.len()).filter(|input| !kept[*input]) {
            costs[input] = self.reaches[input].simple_cost(&targets[input], least - total)?;
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
        self.simple(target, |before, m, code| {
            total += self.change(before, m, code)?;
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
        let (mut steps, mut total) = (Vec::new(), 0.0);
        self.simple(target, |before, m, code| {
            total += self.change(before, m, code)?;
            let mut after = *before;
            after[m] = code;
            steps.push(self.step(*before, after)?);
            Some(())
        })?;
        Some((steps, total))
    }

    fn simple(
        &self,
        target: &State,
        mut each: impl FnMut(&State, usize, u8) -> Option<()>,
    ) -> Option<()> {
        let mut now = self.source();
        let dims = self.mesh_dims();
        let mut apply = |now: &mut State, m: usize, code: u8| -> Option<()> {
            each(now, m, code)?;
            now[m] = code;
            Some(())
        };
        // Every round brings a mesh dim home or replicates one; what was
        // replicated is brought home at once or stays until all others are.
        let mut gathered = [false; super::spec::MAX_MESH_DIMS];
        loop {
            // The cheapest first: what splits a tensor makes later steps cheaper.
            let free = (0..dims).filter(|m| now[*m] != target[*m] && !self.waits(&now, target, *m));
            let direct = free
                .filter_map(|m| Some((self.change(&now, m, target[m])?, m)))
                .min_by(|a, b| a.0.total_cmp(&b.0));
            if let Some((_, m)) = direct {
                apply(&mut now, m, target[m])?;
                continue;
            }
            if now == *target {
                return Some(());
            }
            let away = (0..dims)
                .rev()
                .find(|m| now[*m] != 0 && !gathered[*m] && self.change(&now, *m, 0).is_some());
            let m = away?;
            gathered[m] = true;
            apply(&mut now, m, 0)?;
        }
    }
}
