//! Redistribution in the order in which DTensor runs it.
//!
//! DTensor goes over the mesh dims from the right and brings each into its target,
//! or replicates it where the shards to its left will be others. Then it goes from
//! the left and brings what is left into its target (PyTorch's `_redistribute.py`,
//! `generate_greedy_transform_infos`). It takes the cheapest order instead where a
//! shard is strided.

use super::cost::Order;
use super::redistribute::{Reach, State, Way};

impl Reach<'_> {
    /// DTensor's way to a state and its cost; `None` where it is the cheapest one, or if
    /// the topology does not ask for it.
    pub(super) fn dtensors_way(&self, target: &State) -> Option<Way> {
        self.way(|each| self.in_dtensors_order(target, each))
    }

    /// The cost of [`Reach::dtensors_way`].
    pub(super) fn dtensors_cost(&self, target: &State) -> Option<f64> {
        let mut total = 0.0;
        self.in_dtensors_order(target, |_, _, _, cost| {
            total += cost;
            Some(())
        })?;
        Some(total)
    }

    /// Runs something on each operation of the way: the state before, the mesh dim, the
    /// code of its placement after, and the cost.
    fn in_dtensors_order(
        &self,
        target: &State,
        mut each: impl FnMut(&State, usize, u8, f64) -> Option<()>,
    ) -> Option<()> {
        let (mut now, dims) = (self.source(), self.mesh_dims());
        if self.order() != Order::DTensors || self.is_strided(&now) || self.is_strided(target) {
            return None;
        }
        let operations = &self.operations;
        let mut bring = |now: &mut State, m: usize, code: u8| -> Option<()> {
            if now[m] == code {
                return Some(());
            }
            // A sharding that the program has registered comes and goes by way of R.
            let direct = !self.is_registered(now[m]) && !self.is_registered(code);
            let whole = [now[m], code].contains(&0);
            let steps: &[u8] = if direct || whole { &[code] } else { &[0, code] };
            for code in steps {
                let cost = operations.change(&operations.lying(now), m, now[m], *code)?;
                each(now, m, *code, cost)?;
                now[m] = *code;
            }
            Some(())
        };
        if self.shards(&now) > 1 {
            for m in (0..dims).rev() {
                let to = match self.shard_dim(target, m) {
                    Some(dim) if self.left(&now, m, dim) != self.left(target, m, dim) => 0,
                    _ => target[m],
                };
                bring(&mut now, m, to)?;
            }
        }
        (0..dims).try_for_each(|m| bring(&mut now, m, target[m]))
    }

    /// The placements of the mesh dims left of `m` that shard a tensor dim; 0 for others.
    fn left(&self, state: &State, m: usize, dim: u32) -> State {
        std::array::from_fn(|l| match l < m && self.shard_dim(state, l) == Some(dim) {
            true => state[l],
            false => 0,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "tests")]
    use super::super::{Arg, Mesh, Query, Topology, plan, propagate, standard_rules};

    fn mesh() -> Mesh {
        Mesh::parse("a=2,b=2,c=2").unwrap()
    }

    /// What `_gen_transform_infos` of PyTorch 2.15 says of a tensor of 16 x 16 on a mesh
    /// 2 x 2 x 2.
    const DTENSORS: [(&str, &str, &str); 10] = [
        (
            "S(0),R,P(sum)",
            "S(0),S(0),S(0)",
            "2:P(sum)->R 1:R->S(0) 2:R->S(0)",
        ),
        ("R,S(0),R", "S(0),S(0),R", "1:S(0)->R 0:R->S(0) 1:R->S(0)"),
        ("S(0),S(0),R", "R,S(0),R", "1:S(0)->R 0:S(0)->R 1:R->S(0)"),
        (
            "S(0),S(1),R",
            "S(1),S(0),R",
            "1:S(1)->R 0:S(0)->S(1) 1:R->S(0)",
        ),
        (
            "P(sum),P(sum),P(sum)",
            "S(0),S(0),S(0)",
            "0:P(sum)->S(0) 1:P(sum)->S(0) 2:P(sum)->S(0)",
        ),
        (
            "S(0),S(0),S(0)",
            "S(1),R,R",
            "2:S(0)->R 1:S(0)->R 0:S(0)->S(1)",
        ),
        (
            "S(1),S(0),P(sum)",
            "R,S(0),S(1)",
            "2:P(sum)->R 0:S(1)->R 2:R->S(1)",
        ),
        (
            "R,S(1),P(sum)",
            "S(0),S(1),S(1)",
            "2:P(sum)->S(1) 0:R->S(0)",
        ),
        (
            "S(0),S(1),P(sum)",
            "S(1),S(1),R",
            "2:P(sum)->R 1:S(1)->R 0:S(0)->S(1) 1:R->S(1)",
        ),
        ("R,R,S(0)", "S(0),R,R", "2:S(0)->R 0:R->S(0)"),
    ];

    #[test]
    fn steps_are_dtensors() {
        let mesh = mesh();
        let topology = Topology::one_node(&mesh).in_dtensors_order();
        for (from, to, expected) in DTENSORS {
            let spec = |placements: &str| {
                let written = format!("f32[16,16] @ {placements}");
                let Arg::Tensor(spec) = Arg::parse(&written, &mesh).unwrap() else {
                    unreachable!("{written} is a tensor");
                };
                spec
            };
            let (from, to) = (spec(from), spec(to));
            let (meta, sizes) = (from.meta.as_ref().unwrap(), mesh.sizes());
            let way = plan(meta, sizes, &topology, &from.placements, &to.placements);
            let (steps, cost_us) = way.unwrap();
            let shown = steps
                .iter()
                .map(|s| format!("{}:{}->{}", s.mesh_dim, s.from, s.to));
            assert_eq!(shown.collect::<Vec<_>>().join(" "), expected);
            let sum: f64 = steps.iter().map(|s| s.cost_us).sum();
            assert!((sum - cost_us).abs() < 1e-9);
            let cheapest = Topology::one_node(&mesh);
            let way = plan(meta, sizes, &cheapest, &from.placements, &to.placements);
            assert!(way.unwrap().1 <= cost_us);
        }
    }

    /// In the cheapest order, the sum is split before it is reduced. DTensor reduces it
    /// first, so another strategy costs less.
    #[test]
    fn the_choice_is_cheapest_as_dtensor_moves() {
        let mesh = mesh();
        let args = [
            Arg::parse("f32[8,8] @ S(0),R,P(sum)", &mesh).unwrap(),
            Arg::parse("2", &mesh).unwrap(),
        ];
        let query = Query {
            op: "aten::pow.Tensor_Scalar",
            args: &args,
        };
        let chosen = |topology: &Topology| {
            let found = propagate(standard_rules().unwrap(), &query, &mesh, topology).unwrap();
            (found.outputs[0].to_string(), found.bytes())
        };
        let links = Topology::one_node(&mesh);
        let expected = ("f32[8,8] @ S(0),S(0),S(0)".to_owned(), 32);
        assert_eq!(chosen(&links), expected);
        let expected = ("f32[8,8] @ S(0),R,S(0)".to_owned(), 64);
        assert_eq!(chosen(&links.in_dtensors_order()), expected);
    }

    #[test]
    fn mesh_dims_of_one_rank_cost_nothing() {
        let mesh = Mesh::parse("a=1,b=2").unwrap();
        let args = [
            Arg::parse("f32[8,8] @ P(sum),S(0)", &mesh).unwrap(),
            Arg::parse("2", &mesh).unwrap(),
        ];
        let query = Query {
            op: "aten::pow.Tensor_Scalar",
            args: &args,
        };
        let topology = Topology::one_node(&mesh).in_dtensors_order();
        let found = propagate(standard_rules().unwrap(), &query, &mesh, &topology).unwrap();
        assert_eq!((found.cost_us, found.bytes()), (0.0, 0));
    }
}
