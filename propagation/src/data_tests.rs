//! Rules and redistributions against the data that each rank holds, as layouts
//! tell it.

#![allow(clippy::unwrap_used, reason = "tests")]

use super::*;

/// The global row-major index of every element that a rank holds, in local
/// row-major order.
pub(super) fn held(shape: &[u64], placements: &[Placement], mesh: &[u32], at: &[u32]) -> Vec<u64> {
    let mut all = vec![0];
    for (dim, size) in shape.iter().enumerate() {
        let layout = Layout::of(*size, dim as u32, placements, mesh, at).unwrap();
        all = (all.iter())
            .flat_map(|lead| {
                let layout = &layout;
                (0..layout.size()).map(move |i| lead * size + layout.global(i).unwrap())
            })
            .collect();
    }
    all
}

pub(super) fn coordinates(mesh: &[u32]) -> Vec<Vec<u32>> {
    mesh.iter().fold(vec![Vec::new()], |all, n| {
        let next = |c: &Vec<u32>| {
            let c = c.clone();
            (0..*n).map(move |i| [&c[..], &[i]].concat())
        };
        all.iter().flat_map(next).collect()
    })
}

/// Every list of placements of a tensor on a mesh.
pub(super) fn every(choices: &[Placement], dims: usize) -> Vec<Vec<Placement>> {
    (0..dims).fold(vec![Vec::new()], |all, _| {
        let next = |p: &Vec<Placement>| {
            let p = p.clone();
            choices.iter().map(move |c| [&p[..], &[*c]].concat())
        };
        all.iter().flat_map(next).collect()
    })
}

fn choices(ndim: u32, factors: &[u32]) -> Vec<Placement> {
    let mut choices = vec![Placement::Replicate];
    for dim in 0..ndim {
        choices.push(Placement::Shard { dim });
        choices.extend((factors.iter()).map(|f| Placement::StridedShard {
            dim,
            split_factor: *f,
        }));
        choices.push(Placement::Registered {
            dim,
            sharding: super::sharding_tests::registered()[dim as usize % 2],
        });
    }
    choices
}

#[test]
fn a_view_leaves_every_element_where_it_is() {
    let (mut kept, mut asked) = (0, 0);
    for (on, dims) in [("2", 1), ("3", 1), ("2,2", 2), ("2,3", 2), ("2,2,2", 3)] {
        let mesh = Mesh::parse(on).unwrap();
        for (from, to) in [
            (vec![4, 6], vec![24]),
            (vec![24], vec![4, 6]),
            (vec![4, 4, 3], vec![4, 12]),
            (vec![4, 12], vec![4, 4, 3]),
            (vec![6, 4], vec![4, 6]),
            (vec![3, 5], vec![15]),
            (vec![2, 3, 4], vec![24]),
            (vec![24], vec![2, 3, 4]),
            (vec![2, 1, 8], vec![16, 1]),
        ] {
            let factors: &[u32] = if dims == 3 { &[4] } else { &[2, 3, 4] };
            for placements in every(&choices(from.len() as u32, factors), dims) {
                let meta = TensorMeta {
                    dtype: rote_plans::DType::F32,
                    shape: from.clone(),
                };
                let spec = Spec {
                    meta: Some(meta),
                    placements: placements.clone(),
                };
                let shape = Arg::Ints(to.iter().map(|n| *n as i64).collect());
                let args = [Arg::Tensor(spec), shape];
                let query = Query {
                    op: "aten::view",
                    args: &args,
                };
                let topology = Topology::one_node(&mesh);
                let found = propagate(standard_rules().unwrap(), &query, &mesh, &topology);
                let found = found.unwrap();
                let (input, output) = (&found.inputs[0].to, &found.outputs[0].placements);
                asked += 1;
                kept += usize::from(*input == placements);
                for at in coordinates(mesh.sizes()) {
                    assert_eq!(
                        held(&from, input, mesh.sizes(), &at),
                        held(&to, output, mesh.sizes(), &at),
                        "{from:?} @ {} -> {to:?} @ {} at {at:?} of {on}",
                        written(input),
                        written(output),
                    );
                }
            }
        }
    }
    assert!(
        kept * 10 > asked,
        "{kept} of {asked} without a redistribution"
    );
}

#[test]
fn an_operation_moves_data_only_along_its_mesh_dim() {
    let union = |shape: &[u64], p: &[Placement], mesh: &[u32], at: &[u32], m: usize| {
        let mut all: Vec<u64> = (0..mesh[m])
            .flat_map(|i| {
                let mut at = at.to_vec();
                at[m] = i;
                held(shape, p, mesh, &at)
            })
            .collect();
        all.sort_unstable();
        all.dedup();
        all
    };
    let mut checked = 0;
    for (on, shape) in [
        ("2,2", vec![8]),
        ("2,3", vec![12]),
        ("2,2", vec![7]),
        ("2,2", vec![4, 6]),
        ("2,2,2", vec![16]),
    ] {
        let mesh = Mesh::parse(on).unwrap();
        let sizes = mesh.sizes();
        let meta = TensorMeta {
            dtype: rote_plans::DType::F32,
            shape: shape.clone(),
        };
        let topology = Topology::one_node(&mesh);
        let specs = every(&choices(shape.len() as u32, &[2]), sizes.len());
        for from in &specs {
            for to in &specs {
                let Some((steps, _)) = plan(&meta, sizes, &topology, from, to) else {
                    continue;
                };
                let mut now = from.clone();
                for step in steps {
                    let m = step.mesh_dim;
                    assert_eq!(now[m], step.from);
                    let before = now.clone();
                    now[m] = step.to;
                    for at in coordinates(sizes) {
                        assert_eq!(
                            union(&shape, &before, sizes, &at, m),
                            union(&shape, &now, sizes, &at, m),
                            "{} -> {} of {shape:?} on {on}",
                            written(&before),
                            written(&now),
                        );
                    }
                    checked += 1;
                }
                assert_eq!(now, *to);
            }
        }
    }
    assert!(checked > 500, "{checked}");
}
