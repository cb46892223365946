//! Propagating one op: inputs that match (the promise is below 2 us on a 1-D
//! mesh and 10 us on a 5-D one), and inputs that must be redistributed (below
//! 50 us on a 3-D mesh and 250 us on a 5-D one); and questions asked before
//! (below 100 ns); and the strides of outputs (below 1 us).

use std::hint::black_box;
use std::time::Instant;

use criterion::{Criterion, criterion_group, criterion_main};
use rote_propagation::{
    Arg, Mesh, Propagator, Query, Topology, output_strides, propagate, standard_rules,
};

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

fn strides(c: &mut Criterion) {
    let rules = standard_rules().expect("rules");
    let mesh = Mesh::parse("2").expect("mesh");
    let topology = Topology::one_node(&mesh);
    let mut group = c.benchmark_group("strides");
    for (name, op, args) in [
        ("mm", MM, ["f32[1024,1024]", "f32[1024,1024]{1,1024}"]),
        ("add", ADD, ["f32[8,16,512,64]", "f32[8,16,512,64]"]),
        (
            "add_permuted",
            ADD,
            ["f32[8,16,512,64]{524288,64,1024,1}", "f32[512,64]"],
        ),
        ("view", "aten::view", ["f32[8,512,1024]", "[8,512,16,64]"]),
    ] {
        let read = |text| Arg::parse_with_strides(text, &mesh).expect("argument");
        let [(a, first, _), (b, second, _)] = args.map(read);
        let (args, given) = ([a, b], [first, second].concat());
        let query = Query { op, args: &args };
        let found = propagate(rules, &query, &mesh, &topology).expect("propagated");
        let inputs: Vec<_> = given.iter().map(Vec::as_slice).collect();
        let ask = || output_strides(rules, black_box(&query), &inputs, &found.outputs);
        assert!(ask().iter().all(Option::is_some), "{name}");
        group.bench_function(name, |b| b.iter(ask));
    }
    group.finish();
}

criterion_group!(benches, propagation, cached, strides);
criterion_main!(benches);
