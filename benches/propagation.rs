//! Propagating one op: inputs that match (the promise is below 2 us on a 1-D
//! mesh and 10 us on a 5-D one), and inputs that must be redistributed (below
//! 50 us on a 3-D mesh and 250 us on a 5-D one); and questions asked before
//! (below 100 ns).

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use rote_propagation::{Arg, Mesh, Propagator, Query, Topology, propagate, standard_rules};

struct Case {
    name: &'static str,
    op: &'static str,
    mesh: &'static str,
    args: [&'static str; 2],
    moves: bool,
}

const fn case(
    name: &'static str,
    op: &'static str,
    mesh: &'static str,
    args: [&'static str; 2],
    moves: bool,
) -> Case {
    Case {
        name,
        op,
        mesh,
        args,
        moves,
    }
}

const MM: &str = "aten::mm";
const ADD: &str = "aten::add.Tensor";
#[rustfmt::skip]
const CASES: &[Case] = &[
    case("mm_matches_1d", MM, "2",
         ["f32[1024,1024] @ S(0)", "f32[1024,1024] @ R"], false),
    case("mm_matches_5d", MM, "2,2,2,2,2",
         ["f32[1024,1024] @ S(0),S(0),S(1),R,R", "f32[1024,1024] @ R,R,S(0),S(1),R"], false),
    case("mm_moves_1d", MM, "2",
         ["f32[1024,1024] @ S(0)", "f32[1024,1024] @ S(0)"], true),
    case("mm_moves_2d", MM, "2,2",
         ["f32[1024,1024] @ S(0),S(1)", "f32[1024,1024] @ S(0),S(1)"], true),
    case("mm_moves_3d", MM, "2,2,2",
         ["f32[1024,1024] @ S(0),S(0),S(1)", "f32[1024,1024] @ S(0),S(1),S(1)"], true),
    case("mm_moves_3d_all", MM, "2,2,2",
         ["f32[1024,1024] @ S(0),S(0),S(0)", "f32[1024,1024] @ S(0),S(0),S(0)"], true),
    case("mm_moves_4d", MM, "2,2,2,2",
         ["f32[1024,1024] @ S(0),S(0),S(1),R", "f32[1024,1024] @ S(0),S(1),S(1),R"], true),
    case("mm_moves_5d", MM, "2,2,2,2,2",
         ["f32[1024,1024] @ S(0),S(0),S(1),R,S(0)", "f32[1024,1024] @ S(0),S(1),S(1),R,S(1)"], true),
    case("mm_moves_5d_all", MM, "2,2,2,2,2",
         ["f32[1024,1024] @ S(0),S(0),S(0),S(0),S(0)",
          "f32[1024,1024] @ S(0),S(0),S(0),S(0),S(0)"], true),
    case("mm_moves_5d_partial", MM, "2,2,2,2,2",
         ["f32[1024,1024] @ P(max),R,S(0),R,R", "f32[1024,1024] @ R,S(0),S(0),P(max),R"], true),
    case("add_moves_3d", ADD, "2,2,2",
         ["f32[1024,1024] @ S(0),P(sum),S(1)", "f32[1024,1024] @ S(1),R,S(1)"], true),
    case("add_moves_5d", ADD, "2,2,2,2,2",
         ["f32[1024,1024] @ S(0),P(sum),S(1),R,R", "f32[1024,1024] @ S(1),R,S(1),S(0),P(sum)"], true),
];

fn propagation(c: &mut Criterion) {
    let rules = standard_rules().expect("rules");
    let mut group = c.benchmark_group("propagation");
    for case in CASES {
        let mesh = Mesh::parse(case.mesh).expect("mesh");
        let topology = Topology::one_node(&mesh);
        let args = case.args.map(|a| Arg::parse(a, &mesh).expect("argument"));
        let query = Query {
            op: case.op,
            args: &args,
        };
        let found = propagate(rules, &query, &mesh, &topology).expect("propagated");
        assert_eq!(found.cost_us > 0.0, case.moves, "{}", case.name);
        let mut samples = Vec::new();
        group.bench_function(case.name, |b| {
            b.iter_custom(|times| {
                let start = Instant::now();
                for _ in 0..times {
                    let found = propagate(rules, black_box(&query), &mesh, &topology);
                    let _ = black_box(found);
                }
                let taken = start.elapsed();
                samples.push(taken.as_secs_f64() * 1e6 / times as f64);
                taken
            });
        });
        samples.sort_by(f64::total_cmp);
        if let Some(median) = samples.get(samples.len() / 2) {
            println!("{}: {median:.2} us", case.name);
        }
    }
    group.finish();
}

fn cached(c: &mut Criterion) {
    let rules = standard_rules().expect("rules");
    let mut group = c.benchmark_group("cached");
    for case in CASES.iter().filter(|c| !c.moves) {
        let mesh = Mesh::parse(case.mesh).expect("mesh");
        let topology = Topology::one_node(&mesh);
        let args = case.args.map(|a| Arg::parse(a, &mesh).expect("argument"));
        let mut propagator = Propagator::new(rules, mesh, topology);
        // Not the only decision in the cache, and not the arguments it keeps.
        for other in CASES.iter().filter(|c| c.mesh == case.mesh) {
            let args = (other.args).map(|a| Arg::parse(a, propagator.mesh()).expect("argument"));
            let query = Query {
                op: other.op,
                args: &args,
            };
            propagator.propagate(&query).expect("propagated");
        }
        let query = Query {
            op: case.op,
            args: &args,
        };
        group.bench_function(case.name, |b| {
            b.iter(|| {
                let found = propagator.propagate(black_box(&query));
                black_box(found.is_ok());
            });
        });
    }
    group.finish();
}

criterion_group!(benches, propagation, cached);
criterion_main!(benches);
