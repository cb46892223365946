//! What runs when: collectives beside compute, and updates as ops on lists.

use rote_plans::Plan;

use super::{ops, run};
use rote_tracer::event::{ArgEvent, OpEvent};
use rote_tracer::sample::{self, Tensor, collective, in_place, op, program, read, tensor};

#[test]
fn collectives_start_early_and_are_waited_for_late() {
    let x = tensor(1, &[64]);
    let [a, b, c, d] = [2, 3, 4, 5].map(|storage| tensor(storage, &[64]));
    let [first, second, e] = [6, 7, 8].map(|storage| tensor(storage, &[64]));
    let sum = || vec![ArgEvent::Str("sum")];
    let reduce = "_c10d_functional::all_reduce";
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        op("aten::exp", &[&x], &[&b]),
        collective(reduce, &a, sum(), &first),
        sample::wait(&first),
        op("aten::sin", &[&x], &[&c]),
        collective(reduce, &b, sum(), &second),
        sample::wait(&second),
        op("aten::cos", &[&first], &[&d]),
        op("aten::tan", &[&second], &[&e]),
    ];
    let found = run("overlap", &steps, &[&c, &d, &e], &[&x]);
    let order: Vec<String> = program(&found.plan)
        .into_iter()
        .filter(|line| !line.starts_with("free"))
        .map(|line| line.split(' ').next().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(
        order,
        [
            "neg",
            "AllReduce",
            "exp",
            "AllReduce",
            "sin",
            "wait",
            "cos",
            "wait",
            "tan"
        ]
    );
}

/// The order in which a plan is left, by the names of ops.
fn order(plan: &Plan) -> Vec<String> {
    let lines = program(plan).into_iter();
    let brief = lines.map(|line| line.split(' ').next().unwrap_or_default().to_owned());
    brief
        .filter(|name| name != "free" && name != "view")
        .collect()
}

#[test]
fn compute_that_needs_no_result_runs_while_it_is_under_way() {
    let x = tensor(1, &[64]);
    let [a, b, c, d, e, f] = [2, 3, 4, 5, 6, 7].map(|storage| tensor(storage, &[64]));
    let [first, second] = [8, 9].map(|storage| tensor(storage, &[128]));
    let gather = "_c10d_functional::all_gather_into_tensor";
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        collective(gather, &a, vec![ArgEvent::Int(2)], &first),
        sample::wait(&first),
        op("aten::mm", &[&first], &[&b]),
        op("aten::exp", &[&x], &[&c]), // makes what the next one sends
        collective(gather, &c, vec![ArgEvent::Int(2)], &second),
        sample::wait(&second),
        op("aten::bmm", &[&second], &[&d]),
        op("aten::sin", &[&x], &[&e]),
        op("aten::add", &[&b, &d, &e], &[&f]),
    ];
    let found = run("overlap", &steps, &[&f], &[&x]);
    assert_eq!(
        order(&found.plan),
        [
            "neg",
            "AllGather",
            "exp",
            "AllGather",
            "sin",
            "wait",
            "mm",
            "wait",
            "bmm",
            "add"
        ]
    );
    // What was sent may be written after the wait only, and random numbers, ops
    // outside of ATen and collectives keep their order.
    let mut draw = op("aten::rand_like", &[&x], &[&c]);
    draw.seeded = true;
    let steps = [
        collective(gather, &x, vec![ArgEvent::Int(2)], &first),
        sample::wait(&first),
        in_place("aten::add_", &x, &[]),
        op("mylib::log", &[&first], &[]),
        draw,
        op("mylib::log", &[], &[]),
        op("aten::sin", &[&x], &[&e]),
    ];
    let found = run("overlap", &steps, &[&c, &e], &[&x]);
    let expected = [
        "AllGather",
        "wait",
        "add_",
        "log",
        "rand_like",
        "log",
        "sin",
    ];
    assert_eq!(order(&found.plan), expected);
}

#[test]
fn only_so_much_runs_ahead_of_its_turn() {
    let big = 12 << 20; // elements of 4 bytes: two of them are more than the limit
    let x = tensor(1, &[64]);
    let [a, out] = [2, 3].map(|storage| tensor(storage, &[64]));
    let [b, c] = [4, 5].map(|storage| tensor(storage, &[big]));
    let first = tensor(8, &[128]);
    let gather = "_c10d_functional::all_gather_into_tensor";
    let steps = [
        collective(gather, &x, vec![ArgEvent::Int(2)], &first),
        sample::wait(&first),
        op("aten::mm", &[&first], &[&a]),
        op("aten::arange", &[], &[&b]),
        op("aten::zeros", &[], &[&c]),
        op("aten::add", &[&a, &b, &c], &[&out]),
    ];
    let found = run("overlap", &steps, &[&out], &[&x]);
    let expected = ["AllGather", "arange", "wait", "mm", "zeros", "add"];
    assert_eq!(order(&found.plan), expected);
}

/// An in-place op of a tensor and a number.
fn scaled<'a>(target: &'a Tensor, number: f64) -> OpEvent<'a> {
    let mut event = in_place("aten::mul_", target, &[]);
    event.overload = "Scalar";
    event.args.push(read(ArgEvent::Float(number)));
    event
}

fn added<'a>(target: &'a Tensor, source: &'a Tensor, factor: i64) -> OpEvent<'a> {
    let mut event = in_place("aten::add_", target, &[source]);
    event.overload = "Tensor";
    event.args.push(read(ArgEvent::Int(factor)));
    event
}

#[test]
fn updates_of_one_kind_become_one() {
    let [x, y, z] = [1, 2, 3].map(|storage| tensor(storage, &[8]));
    let all = [&x, &y, &z];
    let found = |steps: &[OpEvent<'_>]| {
        let plan = run("foreach", steps, &[], &all).plan;
        ops(&plan)
            .into_iter()
            .map(str::to_owned)
            .collect::<Vec<_>>()
    };
    let together = [scaled(&x, 0.5), scaled(&y, 0.5), scaled(&z, 0.5)];
    assert_eq!(found(&together), ["_foreach_mul_"]);
    let numbers = [scaled(&x, 0.5), scaled(&y, 0.25), scaled(&z, 0.5)];
    assert_eq!(found(&numbers), ["_foreach_mul_", "mul_"]);
    assert_eq!(
        found(&[added(&x, &z, 1), added(&y, &z, 1)]),
        ["_foreach_add_"]
    );
    // A factor may be added with one rounding or two.
    assert_eq!(
        found(&[added(&x, &z, 2), added(&y, &z, 2)]),
        ["add_", "add_"]
    );
    // Each reads what the one before has written, or writes what it has read.
    assert_eq!(
        found(&[added(&x, &z, 1), added(&y, &x, 1)]),
        ["add_", "add_"]
    );
    assert_eq!(
        found(&[added(&x, &z, 1), added(&z, &y, 1)]),
        ["add_", "add_"]
    );
    // The second of each moves over the others of the first.
    let momentum = [
        scaled(&x, 0.5),
        added(&x, &z, 1),
        scaled(&y, 0.5),
        added(&y, &z, 1),
    ];
    assert_eq!(found(&momentum), ["_foreach_mul_", "_foreach_add_"]);
    // Something else writes what both read, or looks at what each writes.
    let looks = op("mylib::log", &[&x, &y], &[]);
    for other in [scaled(&z, 2.0), looks] {
        let steps = [added(&x, &z, 1), other, added(&y, &z, 1)];
        assert!(!found(&steps).contains(&"_foreach_add_".to_owned()));
    }
    // The second moves up, or the first down.
    let written = scaled(&x, 2.0);
    assert_eq!(
        found(&[added(&x, &z, 1), written, added(&y, &z, 1)]),
        ["_foreach_add_", "mul_"]
    );
    let reads = op("mylib::log", &[&z, &y], &[]);
    assert_eq!(
        found(&[added(&x, &z, 1), reads, added(&y, &z, 1)]),
        ["_foreach_add_"]
    );
    // What is sent is written after the wait.
    let gathered = tensor(8, &[16]);
    let gather = "_c10d_functional::all_gather_into_tensor";
    let sent = [
        collective(gather, &y, vec![ArgEvent::Int(2)], &gathered),
        scaled(&x, 0.5),
        sample::wait(&gathered),
        scaled(&y, 0.5),
    ];
    assert_eq!(order(&run("foreach", &sent, &[], &all).plan)[1], "wait");
    // Parts of one storage, apart and not.
    let parts = [0, 4, 2].map(|at| x.view(&[4], &[1], at));
    let [a, b, c] = &parts;
    assert_eq!(found(&[scaled(a, 0.5), scaled(b, 0.5)]), ["_foreach_mul_"]);
    assert_eq!(found(&[scaled(a, 0.5), scaled(c, 0.5)]), ["mul_", "mul_"]);
    let large = tensor(9, &[(1 << 18) + 1]);
    let plan = run(
        "foreach",
        &[scaled(&large, 0.5), scaled(&x, 0.5)],
        &[],
        &[&large, &x],
    )
    .plan;
    assert_eq!(ops(&plan), ["mul_", "mul_"]);
}

#[test]
fn a_bucket_is_waited_for_once() {
    let x = tensor(1, &[4]);
    let [a, b, first, second, y] = [2, 3, 4, 5, 6].map(|storage| tensor(storage, &[4]));
    let reduce = "_c10d_functional::all_reduce";
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        op("aten::exp", &[&x], &[&b]),
        collective(reduce, &a, vec![ArgEvent::Str("sum")], &first),
        collective(reduce, &b, vec![ArgEvent::Str("sum")], &second),
        sample::wait(&second),
        op("aten::sin", &[&second], &[&y]), // waits for the bucket
        sample::wait(&first),
    ];
    let found = run("buckets", &steps, &[&y], &[&x]);
    let names = order(&found.plan);
    let of = |name: &str| names.iter().filter(|found| *found == name).count();
    assert_eq!((of("AllReduce"), of("wait")), (1, 1), "{names:?}");
}
