//! Any input is answered: no panic, no endless search, no error without words.
//!
//! Half of the questions are calls of the samples with placements and arguments
//! changed, which get far into the rules; the others are made of nothing.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::time::{Duration, Instant};

use proptest::prelude::{
    Just, ProptestConfig, Strategy, TestCaseError, any, prop, prop_assert, prop_assert_eq,
    prop_oneof, proptest,
};
use proptest::sample::{Index, select};
use rote_plans::DType;

use rote_propagation::*;

use crate::samples;

/// Longest time for an answer without optimization, on a machine that others
/// use as well.
const LONGEST: Duration = Duration::from_secs(10);

fn sizes() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => 0..9_u64,
        2 => select(vec![12, 24, 48, 64, 1024, 4096]),
        1 => select(vec![u64::MAX, 1 << 63, (1 << 63) - 1, 1 << 62, 1 << 32, 1 << 31, 1 << 58]),
    ]
}

fn placement() -> impl Strategy<Value = Placement> {
    let dims = || prop_oneof![8 => 0..4_u32, 1 => 4..70_u32, 1 => Just(u32::MAX)];
    let factors = prop_oneof![8 => 1..9_u32, 1 => select(vec![0, 1 << 16, 1 << 31, u32::MAX])];
    let partials = ["sum", "avg", "max", "min", "product", "mask"];
    let partial = |name: &str| Placement::parse(&format!("P({name})")).unwrap();
    prop_oneof![
        3 => Just(Placement::Replicate),
        4 => dims().prop_map(|dim| Placement::Shard { dim }),
        2 => (dims(), factors)
            .prop_map(|(dim, split_factor)| Placement::StridedShard { dim, split_factor }),
        2 => select(partials.map(partial).to_vec()),
    ]
}

fn mesh() -> impl Strategy<Value = Mesh> {
    let ranks = prop_oneof![8 => 1..5_u32, 1 => select(vec![7, 64, 1 << 10])];
    prop::collection::vec(ranks, 1..=8).prop_map(|sizes| {
        let text: Vec<_> = sizes.iter().map(ToString::to_string).collect();
        // Eight mesh dims of 2^10 are more than 2^31 ranks.
        Mesh::parse(&text.join(",")).unwrap_or_else(|_| Mesh::parse("2,2").unwrap())
    })
}

fn meta() -> impl Strategy<Value = TensorMeta> {
    let ndim = prop_oneof![12 => 0..5_usize, 1 => 60..66_usize];
    let shape = ndim.prop_flat_map(|n| prop::collection::vec(sizes(), n));
    let dtype = select(vec![6, 15, 4, 11, 0, 255]).prop_map(DType);
    (dtype, shape).prop_map(|(dtype, shape)| TensorMeta { dtype, shape })
}

fn spec() -> impl Strategy<Value = Spec> {
    let meta = prop::option::weighted(0.95, meta());
    let placements = prop::collection::vec(placement(), 0..=8);
    (meta, placements).prop_map(|(meta, placements)| Spec { meta, placements })
}

fn integer() -> impl Strategy<Value = i64> {
    let far = vec![
        i64::MIN,
        i64::MAX,
        i64::MIN + 1,
        1 << 62,
        1 << 32,
        -(1 << 40),
    ];
    prop_oneof![6 => -4..10_i64, 1 => select(far)]
}

fn argument() -> impl Strategy<Value = Arg> {
    let float = prop_oneof![any::<f64>(), Just(0.5), Just(f64::NAN)];
    let words = vec!["", "sum", "mean", "none", "tanh", "wrap", "é"];
    let list = |n| prop::collection::vec(integer(), 0..=n);
    prop_oneof![
        6 => spec().prop_map(Arg::Tensor),
        1 => prop::collection::vec(prop::option::weighted(0.9, spec()), 0..=3)
            .prop_map(Arg::Tensors),
        3 => integer().prop_map(Arg::Int),
        3 => list(4).prop_map(Arg::Ints),
        1 => list(80).prop_map(Arg::Ints),
        1 => any::<bool>().prop_map(Arg::Bool),
        1 => float.prop_map(Arg::Float),
        1 => prop::collection::vec(any::<f64>(), 0..=4).prop_map(Arg::Floats),
        1 => select(words).prop_map(|w| Arg::Text(w.into())),
        1 => Just(Arg::DType(DType::BF16)),
        2 => Just(Arg::None),
    ]
}

/// Every name that the registry may answer to: those of the tables, and their
/// in-place and `out=` forms.
fn names() -> Vec<String> {
    let mut names = Vec::new();
    let rules = standard_rules().unwrap();
    for op in rules.ops().into_iter().chain(rules.decomposed()) {
        let (name, overload) = op.split_once('.').unwrap_or((op, ""));
        names.push(op.to_owned());
        names.push(format!("{name}_.{overload}"));
        names.push(format!("{name}.{overload}_out"));
        names.push(format!("{name}.out"));
        names.push(format!("{name}_"));
        names.push(name.to_owned());
        for overload in ["List", "Scalar", "ScalarList", "Tensor"] {
            names.push(name.replace("::", "::_foreach_") + "." + overload);
        }
    }
    names
}

/// The steps lead from where the inputs lie to where the op takes them, and
/// what they cost adds up.
fn leads_there(found: &Propagation) -> Result<(), TestCaseError> {
    for input in &found.inputs {
        let (mut now, mut cost) = (input.from.clone(), 0.0);
        for step in &input.steps {
            prop_assert_eq!(now[step.mesh_dim], step.from);
            now[step.mesh_dim] = step.to;
            cost += step.cost_us;
        }
        prop_assert_eq!(&now, &input.to);
        prop_assert!(
            (cost - input.cost_us).abs() <= 1e-6 * cost,
            "{cost} {input:?}"
        );
    }
    Ok(())
}

/// Asks everything there is to ask. Gives whether there was an answer.
fn ask(op: &str, args: &[Arg], mesh: &Mesh) -> Result<bool, TestCaseError> {
    let rules = standard_rules().unwrap();
    let topology = Topology::one_node(mesh);
    let query = Query { op, args };
    let start = Instant::now();
    let found = propagate(rules, &query, mesh, &topology);
    let strict = check_partials(rules, &query, mesh);
    let taken = start.elapsed();
    prop_assert!(taken < LONGEST, "{op} took {taken:?}: {args:?} on {mesh}");
    for error in [found.as_ref().err(), strict.as_ref().err()]
        .into_iter()
        .flatten()
    {
        prop_assert!(error.to_string().len() > 10);
    }
    if let Ok(found) = &found {
        leads_there(found)?;
    }
    Ok(found.is_ok())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    // Far too much for a search: an answer there is all the same.
    #[test]
    fn many_inputs_on_many_mesh_dims_are_answered(
        lists in prop::collection::vec(prop::collection::vec(placement(), 8), 2..=16),
    ) {
        let mesh = Mesh::parse("2,3,2,4,2,2,3,2").unwrap();
        let specs = lists.into_iter().map(|placements| {
            let shape = vec![4096, 4096];
            let placements = placements.into_iter().map(|p| match p {
                Placement::Shard { dim } => Placement::Shard { dim: dim % 2 },
                Placement::StridedShard { dim, split_factor } => {
                    let split_factor = split_factor.max(1);
                    Placement::StridedShard { dim: dim % 2, split_factor }
                }
                other => other,
            });
            let meta = Some(TensorMeta { dtype: DType::F32, shape });
            Some(Spec { meta, placements: placements.collect() })
        });
        let args = [Arg::Tensors(specs.collect()), Arg::Int(1)];
        prop_assert!(ask("aten::cat", &args, &mesh)?);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_arguments_are_answered(
        op in select(names()),
        args in prop::collection::vec(argument(), 0..8),
        mesh in mesh(),
    ) {
        ask(&op, &args, &mesh)?;
    }

    #[test]
    fn any_text_is_read_or_refused(text in any::<String>(), mesh in mesh()) {
        for error in [
            Arg::parse(&text, &mesh).err(),
            Spec::parse(&text, &mesh).err(),
            Mesh::parse(&text).err(),
            Placement::parse(&text).err(),
        ].into_iter().flatten() {
            prop_assert!(error.to_string().len() > 10);
        }
    }

    #[test]
    fn any_text_of_the_notation_is_read_or_refused(
        pieces in prop::collection::vec(select(vec![
            "f32", "[", "]", "64", ",", "@", "S", "_S", "P", "R", "(", ")", "sum", "{", "}", ";",
            "none", "PartitionSpec", "'dp'", "None", "unreduced={", "'dim0'", ":", "=", "-", "1.5",
            "99999999999999999999", "4294967295", " ", "?", "'", "é", "dim0",
        ]), 0..16),
        mesh in mesh(),
    ) {
        let text = pieces.concat();
        for error in [
            Arg::parse(&text, &mesh).err(),
            Spec::parse(&format!("f32[4,4] @ {text}"), &mesh).err(),
            Spec::parse(&format!("f32[4,4] @ PartitionSpec({text})"), &mesh).err(),
            Mesh::parse(&text).err(),
        ].into_iter().flatten() {
            prop_assert!(error.to_string().len() > 10);
        }
    }
}

/// Changes a tensor's placements, and now and then a size.
fn misplace(spec: &mut Spec, mesh: &Mesh, wild: &[(Placement, Index, u64)]) {
    let (fallback, _, _) = wild[0];
    spec.placements = (0..mesh.sizes().len())
        .map(|m| wild.get(m).map_or(fallback, |w| w.0))
        .collect();
    let Some(meta) = &mut spec.meta else { return };
    // Mostly dims that exist.
    for (placement, (_, index, _)) in spec.placements.iter_mut().zip(wild) {
        let keep = meta.shape.is_empty() || index.index(16) == 0;
        if let (Some((dim, blocks)), false) = (placement.sharded(), keep) {
            let dim = dim % meta.shape.len() as u32;
            *placement = match blocks {
                1 => Placement::Shard { dim },
                split_factor => Placement::StridedShard { dim, split_factor },
            };
        }
    }
    let (_, index, size) = wild[0];
    if index.index(12) == 0 && !meta.shape.is_empty() {
        let at = index.index(meta.shape.len());
        meta.shape[at] = size;
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn calls_with_changed_arguments_are_answered(
        sample in select(samples::all().unwrap()),
        mesh in mesh(),
        wild in prop::collection::vec(
            prop::collection::vec((placement(), any::<Index>(), sizes()), 8), 1..6),
        others in prop::option::weighted(0.3, (any::<Index>(), prop::collection::vec(argument(), 8))),
        form in 0..8_u8,
    ) {
        let mut args = sample.replicated(&mesh).unwrap();
        let mut number = 0;
        for arg in &mut args {
            let specs: Vec<&mut Spec> = match arg {
                Arg::Tensor(spec) => vec![spec],
                Arg::Tensors(specs) => specs.iter_mut().flatten().collect(),
                _ => Vec::new(),
            };
            for spec in specs {
                misplace(spec, &mesh, &wild[number % wild.len()]);
                number += 1;
            }
        }
        if let Some((at, others)) = others {
            if !args.is_empty() {
                // Of the same kind if there is one, as the schema refuses others.
                let at = at.index(args.len());
                let kind = std::mem::discriminant(&args[at]);
                let alike = others.iter().find(|o| std::mem::discriminant(*o) == kind);
                args[at] = alike.unwrap_or(&others[0]).clone();
            }
        }
        let (name, overload) = sample.op.split_once('.').unwrap_or((&sample.op, ""));
        let op = match form {
            0 => format!("{name}_.{overload}"),
            1 => {
                args.extend(args.first().cloned());
                format!("{name}.{overload}_out")
            }
            _ => sample.op.clone(),
        };
        ask(&op, &args, &mesh)?;
    }
}
