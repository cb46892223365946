//! What runs when: collectives beside compute.

use rote_plans::Plan;

use super::run;
use rote_tracer::event::ArgEvent;
use rote_tracer::sample::{self, collective, in_place, op, program, tensor};

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
    let [first, second] = [8, 9].map(|storage| tensor(storage, &[64]));
    let (peak, most) = (tensor(10, &[4096]), tensor(11, &[64]));
    let reduce = "_c10d_functional::all_reduce";
    let sum = || vec![ArgEvent::Str("sum")];
    let steps = [
        op("aten::neg", &[&x], &[&a]),
        collective(reduce, &a, sum(), &first),
        sample::wait(&first),
        op("aten::mm", &[&first], &[&b]),
        op("aten::exp", &[&x], &[&c]), // makes what the next one sends
        collective(reduce, &c, sum(), &second),
        sample::wait(&second),
        op("aten::bmm", &[&second], &[&d]),
        op("aten::sin", &[&x], &[&e]),
        op("aten::add", &[&b, &d, &e], &[&f]),
        op("aten::repeat", &[&f], &[&peak]), // leaves memory for what runs ahead
        op("aten::sum", &[&peak], &[&most]),
    ];
    let found = run("overlap", &steps, &[&most], &[&x]);
    assert_eq!(
        order(&found.plan),
        [
            "neg",
            "AllReduce",
            "exp",
            "AllReduce",
            "sin",
            "wait",
            "mm",
            "wait",
            "bmm",
            "add",
            "repeat",
            "sum"
        ]
    );
    // What was sent may be written after the wait only, and random numbers, ops
    // outside of ATen and collectives keep their order.
    let mut draw = op("aten::rand_like", &[&x], &[&c]);
    draw.seeded = true;
    let first = tensor(8, &[128]);
    let gather = "_c10d_functional::all_gather_into_tensor";
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
fn a_run_that_raises_has_changed_what_the_recorded_order_would_have() {
    let [x, y] = [1, 2].map(|storage| tensor(storage, &[64]));
    let [a, b] = [3, 4].map(|storage| tensor(storage, &[64]));
    let first = tensor(5, &[128]);
    let gather = "_c10d_functional::all_gather_into_tensor";
    let two = || vec![ArgEvent::Int(2)];
    let steps = [
        op("aten::embedding", &[&y], &[&a]), // the call can be made again
        collective(gather, &x, two(), &first),
        sample::wait(&first),
        op("aten::index_select", &[&first], &[&b]),
        in_place("aten::add_", &y, &[]),
    ];
    let found = run("overlap", &steps, &[&a, &b], &[&x, &y]);
    let expected = ["embedding", "AllGather", "wait", "index_select", "add_"];
    assert_eq!(order(&found.plan), expected);

    let [first, second] = [5, 6].map(|storage| tensor(storage, &[64]));
    let reduce = "_c10d_functional::all_reduce";
    let sum = || vec![ArgEvent::Str("sum")];
    let steps = [
        collective(reduce, &x, sum(), &first),
        op("aten::embedding", &[&x], &[&a]), // too late
        collective(reduce, &x, sum(), &second),
        sample::wait(&first),
        in_place("aten::add_", &y, &[]),
        sample::wait(&second),
        op("aten::cat", &[&first, &second], &[&b]),
    ];
    let found = run("overlap", &steps, &[&a, &b], &[&x, &y]);
    let expected = [
        "AllReduce",
        "AllReduce",
        "embedding",
        "wait",
        "add_",
        "wait",
        "cat",
    ];
    assert_eq!(order(&found.plan), expected);
}

#[test]
fn what_runs_ahead_stays_within_the_recorded_peak() {
    let big = 1 << 20;
    let x = tensor(1, &[big]);
    let [a, out] = [2, 3].map(|storage| tensor(storage, &[64]));
    let [b, c, first] = [4, 5, 6].map(|storage| tensor(storage, &[big]));
    let reduce = "_c10d_functional::all_reduce";
    let steps = [
        collective(reduce, &x, vec![ArgEvent::Str("sum")], &first),
        sample::wait(&first),
        op("aten::mm", &[&first], &[&a]),
        op("aten::arange", &[], &[&b]),
        op("aten::zeros", &[], &[&c]),
        op("aten::add", &[&a, &b, &c], &[&out]),
    ];
    // Two big tensors are alive at once as recorded: beside what is reduced, one runs ahead.
    let found = run("overlap", &steps, &[&out], &[&x]);
    let expected = ["AllReduce", "arange", "wait", "mm", "zeros", "add"];
    assert_eq!(order(&found.plan), expected);
}

#[test]
fn what_is_sent_is_not_kept_beyond_the_recorded_peak() {
    let big = 1 << 20;
    let x = tensor(1, &[64]);
    let [a, b, c, d] = [2, 3, 4, 5].map(|storage| tensor(storage, &[big]));
    let [out, part] = [tensor(6, &[64]), tensor(7, &[big / 2])];
    let scatter = "_c10d_functional::reduce_scatter_tensor";
    let sum = vec![ArgEvent::Str("sum"), ArgEvent::Int(2)];
    let steps = [
        op("aten::repeat", &[&x], &[&a]),
        collective(scatter, &a, sum, &part),
        sample::wait(&part),
        op("aten::repeat", &[&x], &[&b]),
        op("aten::exp", &[&b], &[&c]),
        op("aten::sin", &[&b], &[&d]),
        op("aten::sum", &[&b, &c, &d, &part], &[&out]),
    ];
    // Beside what was sent, and the copy of it that gloo makes, one of the three later ones has room.
    let found = run("overlap", &steps, &[&out], &[&x]);
    let expected = [
        "repeat",
        "ReduceScatter",
        "repeat",
        "wait",
        "exp",
        "sin",
        "sum",
    ];
    assert_eq!(order(&found.plan), expected);
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
