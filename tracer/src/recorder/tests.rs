//! What the recorder makes of streams of ops, against programs written by hand.

use rote_plans::{BindingKind, Def, Device, Marks, NONE, RngAction};

use crate::event::{ArgEvent, OpEvent};
use crate::sample::*;

#[test]
fn an_op_reads_bindings_and_its_result_outlives_the_run() {
    let (x, w, y) = (tensor(1, &[4, 8]), tensor(2, &[8, 2]), tensor(3, &[4, 2]));
    let mut recorder = recorder(&[&x, &w]);
    record(&mut recorder, &[op("aten::mm", &[&x, &w], &[&y])]);
    let (plan, sources) = finish(recorder, &[&y]);
    assert_eq!(program(&plan), ["mm %0 %1 > %2"]);
    assert_eq!(sources, ["train.py:1"]);
    assert_eq!(plan.str(plan.bindings[1].path), "args[1]");
    assert_eq!(plan.dims(plan.values[2].shape), [4, 2]);
    assert_eq!(plan.dims(plan.values[2].strides), [2, 1]);
    assert_eq!(plan.values[2].storage_bytes, 32);
    assert_eq!(plan.values[2].def, Def::Instr(0));
}

#[test]
fn a_name_that_no_op_uses_binds_nothing() {
    let (x, unused, y) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
    let mut recorder = recorder(&[&unused, &x]);
    record(&mut recorder, &[op("aten::relu", &[&x], &[&y])]);
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!(plan.bindings.len(), 1);
    assert_eq!(plan.str(plan.bindings[0].path), "args[1]");
}

#[test]
fn the_first_name_of_a_storage_counts() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let mut recorder = recorder(&[&x, &x]);
    record(&mut recorder, &[op("aten::relu", &[&x], &[&y])]);
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!(plan.str(plan.bindings[0].path), "args[0]");
}

#[test]
fn views_are_told_by_geometry_whatever_made_them() {
    let (x, y) = (tensor(1, &[4, 8]), tensor(2, &[8, 4]));
    let transposed = x.view(&[8, 4], &[1, 8], 0);
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[
            op("aten::t", &[&x], &[&transposed]),
            op("aten::transpose", &[&x], &[&transposed]),
            op("aten::t", &[&transposed], &[&x]), // back to the root itself
            op("aten::relu", &[&transposed], &[&y]),
        ],
    );
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!(program(&plan), ["view %0 > %1", "relu %1 > %2", "free %1"]);
    let view = plan.values[1];
    assert_eq!((view.root, view.offset, view.storage_bytes), (0, 0, 0));
    assert_eq!(plan.dims(view.shape), [8, 4]);
    assert_eq!(plan.dims(view.strides), [1, 8]);
}

#[test]
fn offsets_count_from_where_the_root_starts() {
    // An argument that is itself the upper half of a storage of 64 floats.
    let x = Tensor {
        storage_bytes: 256,
        ..tensor(1, &[32]).view(&[32], &[1], 32)
    };
    let row = x.view(&[8], &[1], 40);
    let y = tensor(2, &[8]);
    let mut recorder = recorder(&[&x]);
    record(&mut recorder, &[op("aten::relu", &[&row], &[&y])]);
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!(plan.values[0].offset, 0);
    assert_eq!(plan.values[1].offset, 8);
}

#[test]
fn a_view_as_another_dtype_counts_in_its_own_elements() {
    let x = tensor(1, &[8]);
    let doubles = Tensor {
        dtype: F64,
        ..x.view(&[2], &[1], 2)
    };
    let y = tensor(2, &[2]);
    let mut recorder = recorder(&[&x]);
    record(&mut recorder, &[op("aten::sum", &[&doubles], &[&y])]);
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!((plan.values[1].dtype, plan.values[1].offset), (F64, 2));
}

#[test]
fn a_view_that_starts_inside_an_element_is_refused() {
    let x = tensor(1, &[8]).view(&[7], &[1], 1);
    let doubles = Tensor {
        dtype: F64,
        ..x.view(&[2], &[1], 1)
    };
    let y = tensor(2, &[2]);
    let mut recorder = recorder(&[&x]);
    let refusal = refusal(&mut recorder, &op("aten::sum", &[&doubles], &[&y]));
    assert!(refusal.reason.contains("starts inside an element"));
}

#[test]
fn a_lazily_negated_view_is_a_view_that_says_so() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let negated = Tensor {
        marks: Marks::NEG,
        ..x.clone()
    };
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[
            op("aten::_neg_view", &[&x], &[&negated]),
            op("aten::clone", &[&negated], &[&y]),
        ],
    );
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!(program(&plan), ["view %0 > %1", "clone %1 > %2", "free %1"]);
    assert_eq!((plan.values[1].root, plan.values[1].marks), (0, Marks::NEG));
}

#[test]
fn what_a_view_cannot_be_marked_as_is_made_by_its_op() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let marked = Tensor {
        marks: Marks::WRAPPED,
        ..x.clone()
    };
    let (make, read) = (
        op("aten::alias", &[&x], &[&marked]),
        op("aten::neg", &[&marked], &[&y]),
    );
    let mut known = recorder(&[&x]);
    record(&mut known, &[make, read.clone()]);
    let (plan, _) = finish(known, &[&y]);
    assert_eq!(program(&plan), ["alias %0 > %1", "neg %1 > %2", "free %1"]);
    let refused = refusal(&mut recorder(&[&x]), &read);
    assert!(refused.reason.contains("no plain view"), "{refused}");
}

#[test]
fn views_that_nothing_reads_leave_nothing_behind() {
    let (x, y) = (tensor(1, &[4, 8]), tensor(2, &[4, 8]));
    let (a, b) = (x.view(&[8, 4], &[1, 8], 0), x.view(&[32], &[1], 0));
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[
            op("aten::t", &[&x], &[&a]),
            op("aten::view", &[&a], &[&b]),
            op("aten::relu", &[&x], &[&y]),
        ],
    );
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!(program(&plan), ["relu %0 > %1"]);
    assert_eq!(plan.values.len(), 2, "their values are gone too");
}

#[test]
fn writing_in_place_marks_the_binding_that_is_written() {
    let (x, w) = (tensor(1, &[4, 8]), tensor(2, &[4, 8]));
    let (row, row_of_x) = (w.view(&[8], &[1], 8), x.view(&[8], &[1], 0));
    let mut recorder = recorder(&[&x, &w]);
    record(&mut recorder, &[in_place("aten::add_", &row, &[&row_of_x])]);
    let (plan, _) = finish(recorder, &[]);
    let written = |path: &str| {
        let mut bindings = plan.bindings.iter();
        bindings
            .find(|b| plan.str(b.path) == path)
            .expect("bound")
            .written
    };
    assert!(written("args[1]"), "through a view as well");
    assert!(!written("args[0]"));
    assert_eq!(
        program(&plan),
        [
            "view %0 > %2",
            "view %1 > %3",
            "add_ %2 %3 > _",
            "free %2",
            "free %3"
        ]
    );
}

#[test]
fn a_tensor_that_nobody_named_is_refused() {
    let (x, stranger, y) = (tensor(1, &[4]), tensor(9, &[4]), tensor(2, &[4]));
    let mut recorder = recorder(&[&x]);
    let refusal = refusal(&mut recorder, &op("aten::add", &[&x, &stranger], &[&y]));
    assert_eq!(refusal.op, "aten::add");
    assert_eq!(refusal.source_line, "train.py:1");
    assert!(refusal.reason.contains("argument 1 (f32[4])"));
    assert!(refusal.remedy.contains("name the tensor in the state"));
    let text = refusal.to_string();
    assert!(
        text.starts_with("aten::add at train.py:1 argument 1"),
        "{text}"
    );
}

#[test]
fn a_tensor_from_host_data_is_refused_by_what_it_is() {
    let (data, y) = (tensor(9, &[4]), tensor(2, &[4]));
    let mut recorder = recorder(&[]);
    let refusal = refusal(&mut recorder, &op("aten::lift_fresh", &[&data], &[&y]));
    assert!(refusal.reason.contains("from host data"));
}

#[test]
fn hidden_ops_are_recorded_unless_they_concern_nobody() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let (strange, other) = (tensor(3, &[4]), tensor(4, &[4]));
    let mut known = recorder(&[&x]);
    let mut ops = [
        op("aten::neg", &[&strange], &[&other]),
        in_place("aten::add_", &strange, &[&x]),
        op("aten::relu", &[&x], &[&y]),
        in_place("aten::add_", &y, &[&x]),
    ];
    ops.iter_mut().for_each(|op| op.hidden = true);
    record(&mut known, &ops);
    let (plan, _) = finish(known, &[&y]);
    assert_eq!(program(&plan), ["relu %0 > %1", "add_ %1 %0 > _"]);

    let mut drawing = in_place("aten::normal_", &strange, &[]);
    drawing.seeded = true;
    let mut answer = op("aten::is_same_size", &[&strange], &[]);
    answer.outs.push(ArgEvent::Bool(true));
    for mut event in [in_place("aten::add_", &x, &[&strange]), drawing, answer] {
        event.hidden = true;
        let found = recorder(&[&x]).op(&event);
        assert!(found.is_err(), "{event:?}");
    }
}

#[test]
fn ops_that_no_plan_can_hold_are_refused() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let sparse = Tensor {
        opaque: true,
        ..tensor(3, &[4])
    };
    let plain = |name| op(name, &[&x], &[&y]);
    let mut data_dependent = plain("aten::nonzero");
    data_dependent.data_dependent = true;
    let mut reshaping = plain("aten::squeeze_");
    reshaping.inplace_view = true;
    let mut object = plain("aten::custom");
    object.args.push(read(ArgEvent::Other("Generator")));
    let mut mixed = plain("aten::custom");
    mixed.args.push(read(ArgEvent::List(vec![x.arg()])));
    for (event, reason) in [
        (plain("aten::_local_scalar_dense"), "on the host"),
        (plain("aten::equal"), "on the host"),
        (data_dependent, "depends on tensor data"),
        (reshaping, "changes the shape or strides"),
        (plain("aten::set_"), "changes the storage"),
        (plain("c10d::allreduce_"), "without a process group"),
        (
            plain("c10d::recv_any_source_"),
            "a call of a process group that plans cannot hold",
        ),
        (plain("c10d::send"), "not registered under a name"),
        (object, "argument 1 is a Generator"),
        (mixed, "argument 1 is a list of tensors"),
        (op("aten::relu", &[&sparse], &[&y]), "plain strided"),
        (
            op("aten::to_sparse", &[&x], &[&sparse]),
            "plain strided tensor",
        ),
    ] {
        let refusal = refusal(&mut recorder(&[&x]), &event);
        assert!(refusal.reason.contains(reason), "{refusal}");
        assert!(!refusal.remedy.is_empty());
    }
}

#[test]
fn indexing_by_integers_has_a_fixed_shape_and_by_a_mask_has_not() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let (rows, mask) = (
        Tensor {
            dtype: rote_plans::DType::I64,
            storage_bytes: 32,
            ..tensor(3, &[4])
        },
        Tensor {
            dtype: BOOL,
            ..tensor(4, &[4])
        },
    );
    let index = |by| {
        let mut event = op("aten::index", &[&x], &[&y]);
        event.data_dependent = true;
        event.args.push(read(ArgEvent::Tensors(vec![by])));
        event
    };
    let mut recorder = recorder(&[&x, &rows, &mask]);
    record(&mut recorder, &[index(rows.event())]);
    assert!(recorder.op(&index(mask.event())).is_err());
}

#[test]
fn an_empty_that_no_op_wrote_is_refused_when_it_is_read() {
    let (x, fresh, y) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
    let half = fresh.view(&[2], &[1], 2);
    let start = || {
        let mut recorder = recorder(&[&x]);
        record(
            &mut recorder,
            &[
                op("aten::empty", &[], &[&fresh]),
                op("aten::slice", &[&fresh], &[&half]), // a view reads nothing
                op("aten::zeros_like", &[&fresh], &[&tensor(4, &[4])]),
            ],
        );
        recorder
    };
    let refusal = refusal(&mut start(), &op("aten::relu", &[&half], &[&y]));
    assert!(refusal.reason.contains("something else wrote it"));

    // `beta * fresh + alpha * product` reads nothing of `fresh` where beta is 0.
    for (beta, reads) in [(0.0, false), (0.5, true)] {
        let mut product = op("aten::addr", &[&fresh, &x, &x], &[&y]);
        let numbers = [ArgEvent::Float(beta), ArgEvent::Int(1)];
        product.args.extend(numbers.map(read));
        assert_eq!(start().op(&product).is_err(), reads);
    }

    let mut recorder = start();
    record(
        &mut recorder,
        &[
            in_place("aten::copy_", &half, &[&x]),
            op("aten::relu", &[&fresh], &[&y]),
        ],
    );
    finish(recorder, &[&y]);
}

#[test]
fn a_storage_that_changes_its_size_is_refused() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let grown = Tensor {
        storage_bytes: 64,
        ..y.clone()
    };
    let mut recorder = recorder(&[&x]);
    record(&mut recorder, &[op("aten::relu", &[&x], &[&y])]);
    let refusal = refusal(
        &mut recorder,
        &op("aten::relu", &[&grown], &[&tensor(3, &[4])]),
    );
    assert!(refusal.reason.contains("from 16 to 64 bytes"));
}

#[test]
fn results_that_alias_each_other_stay_aliases() {
    let (x, whole) = (tensor(1, &[4]), tensor(2, &[4]));
    let half = whole.view(&[2], &[1], 2);
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[op("custom::split", &[&x], &[&whole, &half, &whole])],
    );
    let (plan, _) = finish(recorder, &[&half, &whole, &x]);
    assert_eq!(program(&plan), ["split %0 > %1 > _ > _", "view %1 > %2"]);
    let outputs: Vec<u32> = plan.outputs.iter().map(|output| output.value).collect();
    assert_eq!(outputs, [2, 1, 0], "the caller's own tensor is a binding");
    assert_eq!(plan.values[2].root, 1);
}

#[test]
fn a_result_that_nothing_made_is_refused() {
    let mut recorder = recorder(&[]);
    let stranger = tensor(9, &[4]);
    let refusal = recorder
        .output("result", &stranger.event(), None, false)
        .expect_err("refused");
    assert!(refusal.reason.contains("no recorded op made"));
}

#[test]
fn a_gradient_is_a_result_and_none_is_one_too() {
    let (x, g) = (tensor(1, &[4]), tensor(2, &[4]));
    let mut recorder = recorder(&[&x]);
    record(&mut recorder, &[op("aten::relu", &[&x], &[&g])]);
    recorder.grad("w", Some((&g.event(), None))).expect("known");
    recorder.grad("v", None).expect("none is fine");
    let (plan, _) = finish(recorder, &[]);
    let grads: Vec<_> = plan
        .grads
        .iter()
        .map(|g| (plan.str(g.path), g.value))
        .collect();
    assert_eq!(grads, [("w", 1), ("v", NONE)]);
    assert_eq!(program(&plan), ["relu %0 > %1"]);
}

#[test]
fn what_the_step_made_and_did_not_return_is_listed() {
    let (x, kept, lost) = (tensor(1, &[4]), tensor(2, &[4]), tensor(3, &[4]));
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[
            op("aten::relu", &[&x], &[&lost]),
            op("aten::exp", &[&lost], &[&kept]),
        ],
    );
    recorder
        .output("result", &kept.view(&[2], &[1], 0).event(), None, false)
        .expect("known");
    let made = recorder.made();
    assert_eq!(
        made,
        [(3, "f32[4] made by aten::relu at train.py:1".to_owned())]
    );
}

#[test]
fn a_collective_runs_until_it_is_waited_for() {
    let (x, part, sum, other, y) = (
        tensor(1, &[4]),
        tensor(2, &[4]),
        tensor(3, &[4]),
        tensor(4, &[4]),
        tensor(5, &[4]),
    );
    let mut recorder = recorder(&[&x]);
    let all_reduce = "_c10d_functional::all_reduce";
    record(
        &mut recorder,
        &[
            op("aten::relu", &[&x], &[&part]),
            collective(all_reduce, &part, vec![ArgEvent::Str("sum")], &sum),
            op("aten::exp", &[&x], &[&other]),
            wait(&sum),
            wait(&sum), // a second one has nothing to wait for
            op("aten::add", &[&sum, &other], &[&y]),
        ],
    );
    let (plan, _) = finish(recorder, &[&y]);
    assert_eq!(
        program(&plan),
        [
            "relu %0 > %1",
            "AllReduce %1 > %2",
            "free %1",
            "exp %0 > %3",
            "wait %2",
            "add %2 %3 > %4",
            "free %2",
            "free %3"
        ]
    );
}

#[test]
fn collectives_keep_their_kind_and_splits() {
    let (x, gathered, scattered, swapped) = (
        tensor(1, &[4, 2]),
        tensor(2, &[8, 2]),
        tensor(3, &[2, 2]),
        tensor(4, &[4, 2]),
    );
    let mut recorder = recorder(&[&x]);
    let two = ArgEvent::Int(2);
    record(
        &mut recorder,
        &[
            collective(
                "_c10d_functional::all_gather_into_tensor",
                &x,
                vec![two.clone()],
                &gathered,
            ),
            wait(&gathered),
            collective(
                "_c10d_functional::reduce_scatter_tensor",
                &x,
                vec![ArgEvent::Str("avg"), two],
                &scattered,
            ),
            wait(&scattered),
            collective(
                "_c10d_functional::all_to_all_single",
                &x,
                vec![ArgEvent::Ints(&[3, 1]), ArgEvent::Ints(&[1, 3])],
                &swapped,
            ),
            wait(&swapped),
            collective(
                "_c10d_functional::broadcast_",
                &x,
                vec![ArgEvent::Int(1)],
                &x,
            ),
            wait(&x),
        ],
    );
    let (plan, _) = finish(recorder, &[&gathered, &scattered, &swapped]);
    let found: Vec<_> = plan
        .instrs
        .iter()
        .filter_map(|instr| match instr {
            rote_plans::Instr::Collective(c) => Some((
                format!("{:?} {:?}", c.kind, c.reduce),
                (c.root, c.input == c.output),
                plan.dims(c.input_splits).to_vec(),
                plan.dims(c.output_splits).to_vec(),
            )),
            _ => None,
        })
        .collect();
    let plain = |text: &str| (text.to_owned(), (0, false), vec![], vec![]);
    assert_eq!(
        found,
        [
            plain("AllGather None"),
            plain("ReduceScatter Some(Avg)"),
            (
                "AllToAll None".to_owned(),
                (0, false),
                vec![1, 3],
                vec![3, 1]
            ),
            ("Broadcast None".to_owned(), (1, true), vec![], vec![]),
        ]
    );
}

#[test]
fn a_collective_in_another_form_runs_through_its_op_and_so_does_its_wait() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[
            collective(
                "_c10d_functional::all_reduce",
                &x,
                vec![ArgEvent::Str("premul_sum")],
                &y,
            ),
            wait(&y),
        ],
    );
    let (plan, _) = finish(recorder, &[&y]);
    let names: Vec<_> = program(&plan)
        .iter()
        .map(|line| line.split(' ').next().unwrap_or_default().to_owned())
        .collect();
    assert_eq!(names, ["all_reduce", "wait_tensor"]);
}

#[test]
fn strategies_cover_what_their_op_became_frees_included() {
    let (x, a, b, c, y) = (
        tensor(1, &[4, 8]),
        tensor(2, &[8, 8]),
        tensor(3, &[8, 8]),
        tensor(4, &[8, 8]),
        tensor(5, &[8, 8]),
    );
    let dead = a.view(&[64], &[1], 0);
    fn at<'a>(mut event: OpEvent<'a>, source: &'a str) -> OpEvent<'a> {
        event.source = source;
        event
    }
    let [x, a, b, c, y, dead] = [&x, &a, &b, &c, &y, &dead];
    let mut recorder = recorder(&[x]);
    recorder.global_begin("aten::mul", &[Some(spec("S(0)")), None], "train.py:7");
    recorder.redistribute_begin(&spec("S(0)"), &spec("R"), "train.py:7");
    let gather = "_c10d_functional::all_gather_into_tensor";
    record(
        &mut recorder,
        &[
            at(
                collective(gather, x, vec![ArgEvent::Int(2)], a),
                "train.py:7",
            ),
            at(wait(a), "train.py:7"),
        ],
    );
    recorder.redistribute_end();
    record(
        &mut recorder,
        &[
            at(op("aten::view", &[a], &[dead]), "train.py:7"),
            at(op("aten::mul", &[a, a], &[b]), "train.py:7"),
        ],
    );
    recorder.global_end(&[Some(spec("R"))]);
    recorder.global_begin("aten::relu", &[Some(spec("R"))], "train.py:8");
    record(
        &mut recorder,
        &[
            at(op("aten::relu", &[b], &[c]), "train.py:8"),
            at(op("aten::exp", &[c], &[y]), "train.py:8"),
        ],
    );
    recorder.global_end(&[Some(spec("R"))]);
    let (plan, sources) = finish(recorder, &[y]);

    let lines = |range: rote_plans::Range| sources[range.indices()].to_vec();
    let all = |source: &str| -> Vec<String> {
        let same = sources.iter().filter(|line| *line == source);
        same.cloned().collect()
    };
    let [mul, relu] = [plan.strategies[0], plan.strategies[1]];
    assert_eq!(lines(mul.instrs), all("train.py:7"));
    assert_eq!(lines(relu.instrs), all("train.py:8"));
    assert_eq!(mul.instrs.len + relu.instrs.len, plan.instrs.len() as u32);
    assert_eq!((mul.redistributions.start, mul.redistributions.len), (0, 1));
    assert_eq!(relu.redistributions.len, 0);
    assert_eq!(plan.ids(mul.inputs), [0, NONE]);
    assert_eq!(plan.ids(mul.outputs), [1]);
    let redistribution = plan.redistributions[0];
    assert_eq!((redistribution.from, redistribution.to), (0, 1));
    assert_eq!(redistribution.bytes, 4 * 8 * 4, "this rank's shard");
    assert_eq!(redistribution.instrs.len, 2, "all-gather and wait");
}

#[test]
fn arguments_of_every_kind_keep_their_value() {
    let (x, y) = (tensor(1, &[4]), tensor(2, &[4]));
    let absent = Tensor {
        storage: 0,
        ..tensor(0, &[])
    };
    let mut event = op("custom::op", &[&x], &[&y]);
    event.args.extend(
        [
            ArgEvent::None,
            absent.arg(),
            ArgEvent::Tensors(vec![x.event(), absent.event()]),
            ArgEvent::Bool(true),
            ArgEvent::Int(-3),
            ArgEvent::Float(0.5),
            ArgEvent::Complex(1.0, -2.0),
            ArgEvent::Wrapped(Box::new(ArgEvent::Float(2.5))),
            ArgEvent::Ints(&[7, 8]),
            ArgEvent::List(vec![
                ArgEvent::List(vec![ArgEvent::Int(1)]),
                ArgEvent::Str("a"),
            ]),
            ArgEvent::DType(F64),
            ArgEvent::Device(Device { kind: 1, index: 3 }),
            ArgEvent::Layout(2),
            ArgEvent::MemoryFormat(1),
        ]
        .map(read),
    );
    let mut recorder = recorder(&[&x]);
    record(&mut recorder, &[event]);
    let (plan, _) = finish(recorder, &[&y]);
    let rote_plans::Instr::Local { args, .. } = plan.instrs[0] else {
        panic!("a local op");
    };
    let written: Vec<String> = plan.args[args.indices()]
        .iter()
        .map(|&arg| spelled(&plan, arg))
        .collect();
    assert_eq!(
        written,
        [
            "%0",
            "None",
            "None",
            "[%0, none]",
            "Bool(true)",
            "Int(-3)",
            "Float(0.5)",
            "Complex(1.0, -2.0)",
            "wrapped Float(2.5)",
            "[7, 8]",
            "((Int(1)), a)",
            "DType(DType(7))",
            "Device(Device { kind: 1, index: 3 })",
            "Layout(2)",
            "MemoryFormat(1)",
        ]
    );
}

/// An argument, with what it refers to.
fn spelled(plan: &rote_plans::Plan, arg: rote_plans::Arg) -> String {
    use rote_plans::Arg;
    match arg {
        Arg::Value(value) => format!("%{value}"),
        Arg::Values(range) => {
            let name = |&id: &u32| match id {
                NONE => "none".to_owned(),
                id => format!("%{id}"),
            };
            let names: Vec<String> = plan.ids(range).iter().map(name).collect();
            format!("[{}]", names.join(", "))
        }
        Arg::Wrapped(inner) => format!("wrapped {}", spelled(plan, plan.args[inner as usize])),
        Arg::Ints(range) => format!("{:?}", plan.dims(range)),
        Arg::List(range) => {
            let inner = plan.args[range.indices()].iter();
            let inner: Vec<String> = inner.map(|&arg| spelled(plan, arg)).collect();
            format!("({})", inner.join(", "))
        }
        Arg::Str(text) => plan.str(text).to_owned(),
        other => format!("{other:?}"),
    }
}

#[test]
fn generator_states_are_saved_into_slots() {
    let cpu = Device { kind: 0, index: -1 };
    let mut recorder = recorder(&[]);
    let first = recorder.rng(RngAction::Save, cpu, None, "train.py:3");
    let second = recorder.rng(RngAction::Save, cpu, None, "train.py:4");
    recorder.rng(RngAction::Restore, cpu, Some(first), "train.py:5");
    let (plan, _) = finish(recorder, &[]);
    assert_eq!((first, second, plan.rng_slots), (0, 1, 2));
    assert_eq!(program(&plan), ["Save 0", "Save 1", "Restore 0"]);
}

#[test]
fn what_does_no_work_leaves_no_instruction() {
    let x = tensor(1, &[4]);
    let mut meta = x.event();
    meta.device.kind = 14;
    let mut shape_arithmetic = op("aten::mm", &[], &[]);
    shape_arithmetic.args.push(read(ArgEvent::Tensor(meta)));
    let mut size = op("aten::sym_size", &[&x], &[]);
    size.outs.push(ArgEvent::Other("int"));
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[
            shape_arithmetic,
            size,
            op("profiler::_record_function_enter", &[], &[]),
            wait(&x),
        ],
    );
    assert!(recorder.is_empty());
}

#[test]
fn ops_called_for_what_they_do_are_kept_and_answers_about_data_refused() {
    let x = tensor(1, &[4]);
    let mut recorder = recorder(&[&x]);
    record(
        &mut recorder,
        &[op("aten::_linalg_check_errors", &[&x], &[])],
    );
    assert!(!recorder.is_empty());
    for (name, overload, right) in [
        ("aten::is_contiguous", "", true),
        ("aten::_use_cudnn_ctc_loss", "", true),
        ("aten::_use_cudnn_ctc_loss", "Tensor", false),
        ("aten::_choose_qparams_per_tensor", "", false),
    ] {
        let mut question = op(name, &[&x], &[]);
        question.overload = overload;
        question.outs.push(ArgEvent::Other("bool"));
        assert_eq!(recorder.op(&question).is_ok(), right, "{name}.{overload}");
    }
}

#[test]
fn state_and_arguments_keep_their_kind_and_spec() {
    let (w, y) = (tensor(1, &[4, 8]), tensor(2, &[4, 8]));
    let mut recorder = recorder(&[]);
    let spec = spec("S(0)");
    recorder.name_tensor(BindingKind::State, "model.w", &w.event(), Some(&spec), None);
    record(&mut recorder, &[op("aten::relu", &[&w], &[&y])]);
    let (plan, _) = finish(recorder, &[&y]);
    let binding = plan.bindings[0];
    assert_eq!(binding.kind, BindingKind::State);
    let placed = plan.specs[binding.spec as usize];
    assert_eq!(
        plan.placements[placed.placements.indices()],
        [rote_plans::Placement::Shard { dim: 0 }]
    );
}
