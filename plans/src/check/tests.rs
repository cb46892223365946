//! Each rule, broken once.

use crate::sample::{self, CPU};
use crate::*;

/// What checking says to a plan that is valid but for one change.
fn broken(change: impl FnOnce(&mut Plan)) -> String {
    let mut plan = sample::small();
    change(&mut plan);
    match plan.check() {
        Err(PlanError::Invalid(fault)) => fault.to_string(),
        Err(other) => panic!("not a fault of the tables: {other}"),
        Ok(()) => "valid".into(),
    }
}

/// The index of the first instruction that `is` accepts.
fn find(plan: &Plan, is: impl Fn(&Instr) -> bool) -> usize {
    plan.instrs.iter().position(is).expect("in the sample")
}

fn op(plan: &Plan, name: &str) -> usize {
    find(
        plan,
        |i| matches!(i, Instr::Local { op, .. } if plan.str(*op) == name),
    )
}

fn args(plan: &Plan, name: &str) -> std::ops::Range<usize> {
    match plan.instrs[op(plan, name)] {
        Instr::Local { args, .. } => args.indices(),
        _ => unreachable!(),
    }
}

/// The argument of `test::every_argument` that `is` accepts.
fn arg(plan: &mut Plan, is: impl Fn(&Arg) -> bool) -> &mut Arg {
    let range = args(plan, "test::every_argument");
    plan.args[range]
        .iter_mut()
        .find(|a| is(a))
        .expect("in the sample")
}

fn collective(plan: &mut Plan) -> &mut Collective {
    let at = find(plan, |i| matches!(i, Instr::Collective(_)));
    match &mut plan.instrs[at] {
        Instr::Collective(collective) => collective,
        _ => unreachable!(),
    }
}

const FAR: Range = Range {
    start: 4_000_000_000,
    len: 4_000_000_000,
};

#[test]
fn the_samples_are_valid() {
    assert_eq!(broken(|_| ()), "valid");
    let ops = if cfg!(miri) { 20 } else { 2000 };
    sample::large(ops).check().expect("valid");
}

#[test]
fn ids_lie_in_their_tables() {
    let far = 4_000_000_000;
    type Change = fn(&mut Plan, u32);
    let changes: &[(&str, Change)] = &[
        ("placements[1].text", |p, id| {
            p.placements[1] = Placement::Other { text: id }
        }),
        ("meshes[0].device_type", |p, id| {
            p.meshes[0].device_type = id
        }),
        ("meshes[0].dim_names", |p, id| {
            p.ids[p.meshes[0].dim_names.start as usize] = id
        }),
        ("groups[0].name", |p, id| p.groups[0].name = id),
        ("groups[0].label", |p, id| p.groups[0].label = id),
        ("specs[0].mesh", |p, id| p.specs[0].mesh = id),
        ("values[0].root", |p, id| p.values[0].root = id),
        ("values[0].def", |p, id| p.values[0].def = Def::Binding(id)),
        ("values[0].def", |p, id| p.values[0].def = Def::Constant(id)),
        ("values[0].def", |p, id| p.values[0].def = Def::Instr(id)),
        ("values[0].last_use", |p, id| p.values[0].last_use = id),
        ("bindings[0].path", |p, id| p.bindings[0].path = id),
        ("bindings[0].value", |p, id| {
            p.values[0].def = Def::Constant(0);
            p.constants[0].value = 0;
            p.values.truncate(1);
            p.bindings[0].value = id;
        }),
        ("bindings[0].spec", |p, id| p.bindings[0].spec = id),
        ("outputs[0].path", |p, id| p.outputs[0].path = id),
        ("outputs[0].value", |p, id| p.outputs[0].value = id),
        ("outputs[0].spec", |p, id| p.outputs[0].spec = id),
        ("grads[0].path", |p, id| p.grads[0].path = id),
        ("grads[0].value", |p, id| p.grads[0].value = id),
        ("grads[0].spec", |p, id| p.grads[0].spec = id),
        ("scalars[0].path", |p, id| {
            p.scalars[0] = Scalar::Read { path: id }
        }),
        ("guards[0].subject", |p, id| p.guards[0].subject = id),
        ("guards[0].expected", |p, id| p.guards[0].expected = id),
        ("strategies[0].op", |p, id| p.strategies[0].op = id),
        ("strategies[0].source", |p, id| p.strategies[0].source = id),
        ("strategies[0].args", |p, id| {
            p.ids[p.strategies[0].args.start as usize] = id
        }),
        ("strategies[0].inputs", |p, id| {
            p.ids[p.strategies[0].inputs.start as usize] = id
        }),
        ("strategies[0].outputs", |p, id| {
            p.ids[p.strategies[0].outputs.start as usize] = id
        }),
        ("redistributions[0].from", |p, id| {
            p.redistributions[0].from = id
        }),
        ("redistributions[0].to", |p, id| {
            p.redistributions[0].to = id
        }),
        ("redistributions[0].source", |p, id| {
            p.redistributions[0].source = id
        }),
        ("args[0]", |p, id| p.args[0] = Arg::Value(id)),
        ("args[0]", |p, id| p.args[0] = Arg::Scalar(id)),
        ("args[0]", |p, id| p.args[0] = Arg::Str(id)),
        ("instrs[3].op", |p, id| match &mut p.instrs[3] {
            Instr::Local { op, .. } => *op = id,
            _ => unreachable!(),
        }),
        ("instrs[3].overload", |p, id| match &mut p.instrs[3] {
            Instr::Local { overload, .. } => *overload = id,
            _ => unreachable!(),
        }),
        ("instrs[3].outs", |p, id| match p.instrs[3] {
            Instr::Local { outs, .. } => p.ids[outs.start as usize] = id,
            _ => unreachable!(),
        }),
        ("instrs[2].base", |p, id| {
            p.instrs[2] = Instr::View { base: id, out: 2 }
        }),
        ("instrs[2].out", |p, id| {
            p.instrs[2] = Instr::View { base: 1, out: id }
        }),
        ("instrs[5].value", |p, id| {
            p.instrs[5] = Instr::Wait { value: id }
        }),
        ("instrs[7].value", |p, id| {
            p.instrs[7] = Instr::Free { value: id }
        }),
        ("instrs[4].group", |p, id| collective(p).group = id),
        ("instrs[4].input", |p, id| collective(p).input = id),
        ("instrs[4].output", |p, id| collective(p).output = id),
    ];
    for (place, change) in changes {
        let said = broken(|plan| change(plan, far));
        let expected = format!("{place} is {far}, but ");
        assert!(
            said.starts_with(&expected) && said.ends_with(" entries"),
            "{place}: {said}"
        );
    }
}

#[test]
fn ranges_lie_in_their_pools() {
    type Change = fn(&mut Plan);
    let changes: &[(&str, Change)] = &[
        ("meshes[0].shape", |p| p.meshes[0].shape = FAR),
        ("meshes[0].dim_names", |p| p.meshes[0].dim_names = FAR),
        ("meshes[0].ranks", |p| p.meshes[0].ranks = FAR),
        ("groups[0].ranks", |p| p.groups[0].ranks = FAR),
        ("specs[0].placements", |p| p.specs[0].placements = FAR),
        ("specs[0].shape", |p| p.specs[0].shape = FAR),
        ("specs[0].strides", |p| p.specs[0].strides = FAR),
        ("values[0].shape", |p| p.values[0].shape = FAR),
        ("values[0].strides", |p| p.values[0].strides = FAR),
        ("constants[0].data", |p| p.constants[0].data = FAR),
        ("strategies[0].args", |p| p.strategies[0].args = FAR),
        ("strategies[0].inputs", |p| p.strategies[0].inputs = FAR),
        ("strategies[0].outputs", |p| p.strategies[0].outputs = FAR),
        ("strategies[0].instrs", |p| p.strategies[0].instrs = FAR),
        ("strategies[0].redistributions", |p| {
            p.strategies[0].redistributions = FAR
        }),
        ("redistributions[0].instrs", |p| {
            p.redistributions[0].instrs = FAR
        }),
        ("args[0]", |p| p.args[0] = Arg::Values(FAR)),
        ("args[0]", |p| p.args[0] = Arg::Ints(FAR)),
        ("args[0]", |p| p.args[0] = Arg::List(FAR)),
        ("instrs[4].input_splits", |p| {
            collective(p).input_splits = FAR
        }),
        ("instrs[4].output_splits", |p| {
            collective(p).output_splits = FAR
        }),
        ("instrs[3].args", |p| match &mut p.instrs[3] {
            Instr::Local { args, .. } => *args = FAR,
            _ => unreachable!(),
        }),
        ("instrs[3].outs", |p| match &mut p.instrs[3] {
            Instr::Local { outs, .. } => *outs = FAR,
            _ => unreachable!(),
        }),
    ];
    for (place, change) in changes {
        let said = broken(change);
        let expected = format!("{place} is 4000000000 entries from 4000000000, but ");
        assert!(
            said.starts_with(&expected) && said.ends_with(" entries"),
            "{place}: {said}"
        );
    }
    // One past the end is refused, up to the end is not.
    let said = broken(|p| p.constants[0].data = Range { start: 1, len: 8 });
    assert_eq!(
        said,
        "constants[0].data is 8 entries from 1, but bytes has 8 entries"
    );
    assert_eq!(
        broken(|p| p.strategies[0].inputs = Range {
            start: p.ids.len() as u32,
            len: 0
        }),
        "valid"
    );
}

#[test]
fn numbers_of_the_framework_lie_in_their_spans() {
    assert_eq!(
        broken(|p| p.values[0].dtype = DType(64)),
        "values[0].dtype is 64, expected 0 or more and less than 64"
    );
    assert_eq!(
        broken(|p| p.values[0].device = Device { kind: 32, index: 0 }),
        "values[0].device is 32, expected 0 or more and less than 32"
    );
    assert_eq!(
        broken(|p| p.values[0].device.index = -2),
        "values[0].device is -2, expected -1 or more and less than 128"
    );
    for (change, expected) in [
        (
            Arg::DType(DType(200)),
            "200, expected 0 or more and less than 64",
        ),
        (
            Arg::Device(Device { kind: 99, index: 0 }),
            "99, expected 0 or more and less than 32",
        ),
        (Arg::Layout(8), "8, expected 0 or more and less than 8"),
        (
            Arg::MemoryFormat(-1),
            "-1, expected 0 or more and less than 4",
        ),
    ] {
        let said = broken(|p| p.args[0] = change);
        assert!(
            said.contains(".dtype is")
                || said.contains(".device is")
                || said.starts_with("args[0] is")
        );
        assert!(said.ends_with(expected), "{said}");
    }
    assert_eq!(
        broken(|p| p.placements[3] = Placement::StridedShard {
            dim: 0,
            split_factor: 0
        }),
        "placements[3].split_factor is 0, expected 1 or more and less than 4294967296"
    );
    assert_eq!(
        broken(|p| p.placements[4] = Placement::Shard { dim: 2 }),
        "specs[4].placements is 2, expected 0 or more and less than 2"
    );
    assert_eq!(
        broken(|p| p.instrs[0] = Instr::Rng {
            action: RngAction::Save,
            device: CPU,
            slot: 1
        }),
        "instrs[0].slot is 1, expected 0 or more and less than 1"
    );
    assert_eq!(
        broken(|p| p.instrs[0] = Instr::Rng {
            action: RngAction::Save,
            device: Device { kind: 77, index: 0 },
            slot: 0
        }),
        "instrs[0].device is 77, expected 0 or more and less than 32"
    );
    let said = broken(|p| p.rng_slots = u32::MAX);
    assert_eq!(
        said,
        "rng_slots is 4294967295, expected 0 or more and less than 3"
    );
}

#[test]
fn shapes_are_shapes() {
    assert_eq!(
        broken(|p| p.dims[p.values[0].shape.start as usize] = -4),
        "values[0].shape is -4, expected 0 or more and less than 281474976710656"
    );
    let product = |p: &mut Plan| {
        let start = p.values[0].shape.start as usize;
        p.dims[start..start + 2].fill(1 << 24);
    };
    assert_eq!(
        broken(product),
        "values[0].shape has 281474976710656 elements or more"
    );
    assert_eq!(
        broken(|p| p.values[3].storage_bytes = 1 << 62),
        "values[3] and the tensors before it have 4611686018427387904 bytes or more"
    );
    assert_eq!(
        broken(|p| p.values[3].storage_bytes = u64::MAX),
        "values[3] and the tensors before it have 4611686018427387904 bytes or more"
    );
    assert_eq!(
        broken(|p| p.values[0].offset = i64::MIN),
        "values[0].offset is -9223372036854775808, expected -281474976710656 or more and \
         less than 281474976710656"
    );
    assert_eq!(
        broken(|p| p.dims[p.values[0].strides.start as usize] = (1 << 48) - 1),
        "values[0] reaches elements 0 to 844424930131973, expected less than 281474976710656 away"
    );
    assert_eq!(
        broken(|p| p.values[0].strides.len = 1),
        "values[0].strides has 1 entries, expected 2 (one per dim of the shape)"
    );
    assert_eq!(
        broken(|p| {
            let start = p.dims.len() as u32;
            p.dims.extend([1; 65]);
            p.values[0].shape = Range { start, len: 65 };
        }),
        "values[0].shape has 65 entries, expected 64 (dims at most)"
    );
    assert_eq!(
        broken(|p| p.specs[0].placements.len = 2),
        "specs[0].placements has 2 entries, expected 1 (one placement per mesh dim)"
    );
}

#[test]
fn ranks_are_ranks_of_the_world() {
    assert_eq!(
        broken(|p| p.fingerprint.rank = 2),
        "fingerprint.rank is rank 2, but the world size is 2"
    );
    assert_eq!(
        broken(|p| p.dims[p.groups[0].ranks.start as usize] = 2),
        "meshes[0].ranks is rank 2, but the world size is 2"
    );
    assert_eq!(
        broken(|p| {
            p.dims.push(-1);
            p.groups[0].ranks = Range {
                start: p.dims.len() as u32 - 1,
                len: 1,
            };
        }),
        "groups[0].ranks is rank -1, but the world size is 2"
    );
    assert_eq!(
        broken(|p| p.groups[0].ranks.len = 1),
        "groups[0].ranks is a group of which rank 1 is no member"
    );
    assert_eq!(
        broken(|p| p.meshes[0].ranks.len = 1),
        "meshes[0].ranks has 1 ranks, but its shape has room for 2"
    );
    assert_eq!(
        broken(|p| p.meshes[0].dim_names.len = 2),
        "meshes[0].dim_names has 2 entries, expected 1 (one name per mesh dim)"
    );
    assert_eq!(
        broken(|p| p.dims[p.meshes[0].shape.start as usize] = 0),
        "meshes[0].shape is 0, expected 1 or more and less than 4294967296"
    );
}

#[test]
fn values_and_their_definitions_name_each_other() {
    assert_eq!(
        broken(|p| p.values[0].def = Def::Binding(1)),
        "values[0] says that bindings[1] defines it, but bindings[1] does not"
    );
    assert_eq!(
        broken(|p| p.values[0].def = Def::Constant(0)),
        "values[0] says that constants[0] defines it, but constants[0] does not"
    );
    assert_eq!(
        broken(|p| p.bindings[0].value = 3),
        "values[0] says that bindings[0] defines it, but bindings[0] does not"
    );
    assert_eq!(
        broken(|p| p.bindings.push(p.bindings[0])),
        "values[0] says that bindings[2] defines it, but bindings[2] does not"
    );
    assert_eq!(
        broken(|p| p.constants.push(p.constants[0])),
        "values[6] says that constants[1] defines it, but constants[1] does not"
    );
    // A value that no instruction lists.
    assert_eq!(
        broken(|p| p.values[4].def = Def::Instr(3)),
        "values[4] says that instrs[3] defines it, but instrs[3] does not"
    );
    assert_eq!(
        broken(|p| p.instrs[2] = Instr::View { base: 1, out: 4 }),
        "instrs[2].out is %4, expected a value that this instruction defines"
    );
    // One instruction that lists a new value twice.
    assert_eq!(
        broken(|p| {
            let at = op(p, "aten::mm");
            let start = p.ids.len() as u32;
            p.ids.extend([3, 3]);
            match &mut p.instrs[at] {
                Instr::Local { outs, .. } => *outs = Range { start, len: 2 },
                _ => unreachable!(),
            }
        }),
        "instrs[3].outs defines %3 after %3, expected increasing ids"
    );
    assert_eq!(
        broken(|p| collective(p).output = 2),
        "instrs[4].output is %2, expected a new value or the input %3"
    );
}

#[test]
fn values_are_used_between_definition_and_free() {
    let mm = args(&sample::small(), "aten::mm").start;
    assert_eq!(
        broken(|p| p.args[mm] = Arg::Value(3)),
        "instrs[3].args uses %3 before instrs[3] defines it"
    );
    assert_eq!(
        broken(|p| {
            let start = p.ids.len() as u32;
            p.ids.extend([NONE, 5]);
            p.args[mm] = Arg::Values(Range { start, len: 2 });
        }),
        "instrs[3].args uses %5 before instrs[8] defines it"
    );
    assert_eq!(
        broken(|p| p.instrs[2] = Instr::Wait { value: 3 }),
        "instrs[2].value uses %3 before instrs[3] defines it"
    );
    assert_eq!(
        broken(|p| p.values[2].last_use = 2),
        "instrs[3].args uses %2 after its last use, instrs[2]"
    );
    assert_eq!(
        broken(|p| {
            p.values[4].last_use = NONE;
            *arg(p, |a| matches!(a, Arg::None)) = Arg::Value(4);
        }),
        "instrs[8].args is %4, which was freed before"
    );
    assert_eq!(
        broken(|p| p.instrs.push(Instr::Free { value: 4 })),
        "instrs[10].value frees %4 a second time"
    );
    assert_eq!(
        broken(|p| p.instrs[7] = Instr::Free { value: 5 }),
        "instrs[7].value uses %5 before instrs[8] defines it"
    );
    assert_eq!(
        broken(|p| p.instrs[7] = Instr::Free { value: 0 }),
        "instrs[7].value frees %0, which exists before the run"
    );
    assert_eq!(
        broken(|p| p.instrs.push(Instr::Free { value: 5 })),
        "outputs[0].value is %5, which was freed before"
    );
    assert_eq!(
        broken(|p| p.values[3].last_use = 9),
        "grads[0].value is %3, which outlives the run but has its last use at instrs[9]"
    );
}

#[test]
fn roots_are_roots_and_hold_what_looks_at_them() {
    assert_eq!(
        broken(|p| p.values[0].root = 2),
        "values[0].root is %2, whose own root is %1"
    );
    assert_eq!(
        broken(|p| p.values[3].root = 5),
        "values[3].root is %5, which is defined after it"
    );
    assert_eq!(
        broken(|p| p.values[0].root = 3),
        "values[0].root is %3, which is defined after it"
    );
    assert_eq!(
        broken(|p| p.values[2].root = 0),
        "instrs[2] makes %2 a view of %1, but their roots are %0 and %1"
    );
    assert_eq!(
        broken(|p| p.values[5].root = 4),
        "instrs[8].outs makes %5 in the storage of %4, which none of its arguments lies in"
    );
    assert_eq!(
        broken(|p| p.values[3].offset = 1),
        "values[3] reaches bytes 4 to 132 of its storage, which has 128"
    );
    assert_eq!(
        broken(|p| p.values[3].offset = -(1 << 47)),
        format!(
            "values[3] reaches bytes {} to {} of its storage, which has 128",
            -(1_i64 << 47) * 4,
            (-(1_i64 << 47) + 32) * 4
        )
    );
    let huge = broken(|p| {
        let start = p.dims.len() as u32;
        p.dims.extend([i64::MAX - 1; 64]);
        let all = Range { start, len: 64 };
        (p.values[3].shape, p.values[3].strides) = (all, all);
    });
    assert_eq!(
        huge,
        "values[3].shape is 9223372036854775806, expected 0 or more and less than 281474976710656"
    );
    assert_eq!(
        broken(|p| p.constants[0].data.len = 7),
        "constants[0].data has 7 bytes, its value reaches bytes 0 to 8"
    );
}

#[test]
fn arguments_nest_backwards_and_not_too_deep() {
    let last = |p: &Plan| p.args.len() as u32 - 1;
    assert_eq!(
        broken(|p| {
            let inner = last(p);
            p.args[inner as usize] = Arg::Wrapped(inner);
        }),
        format!(
            "args[{0}] holds args[{0}], expected entries before it",
            last(&sample::small())
        )
    );
    assert_eq!(
        broken(|p| p.args[2] = Arg::List(Range { start: 1, len: 2 })),
        "args[2] holds args[2], expected entries before it"
    );
    assert_eq!(
        broken(|p| p.args[2] = Arg::List(Range { start: 2, len: 0 })),
        "valid"
    );
    let wrapped = |inner: Arg| {
        broken(|p| {
            p.args.push(inner);
            let inner = last(p);
            p.args.push(Arg::Wrapped(inner));
        })
    };
    let inner = sample::small().args.len();
    assert_eq!(
        wrapped(Arg::Value(0)),
        format!("args[{}] wraps args[{inner}], expected a number", inner + 1)
    );
    assert_eq!(wrapped(Arg::Int(2)), "valid");
    let nested = |depth: usize| {
        broken(|p| {
            let start = p.args.len() as u32;
            p.args.push(Arg::Int(1));
            for level in 0..depth {
                p.args.push(Arg::List(Range {
                    start: start + level as u32,
                    len: 1,
                }));
            }
            let range = Range {
                start: last(p),
                len: 1,
            };
            let at = op(p, "aten::mul_");
            match &mut p.instrs[at] {
                Instr::Local { args, .. } => *args = range,
                _ => unreachable!(),
            }
        })
    };
    assert_eq!(nested(8), "valid");
    assert_eq!(
        nested(9),
        "instrs[9].args holds lists nested more than 8 deep"
    );
}

#[test]
fn lists_that_share_their_entries_without_limit_are_refused() {
    // Eight lists of eight lists of ...: 8^8 entries in a file of a few KiB.
    let said = broken(|p| {
        let mut start = p.args.len() as u32;
        p.args.extend([Arg::Int(1); 8]);
        for _ in 0..8 {
            let below = Range { start, len: 8 };
            start = p.args.len() as u32;
            p.args.extend([Arg::List(below); 8]);
        }
        let at = op(p, "aten::mul_");
        match &mut p.instrs[at] {
            Instr::Local { args, .. } => *args = Range { start, len: 8 },
            _ => unreachable!(),
        }
    });
    assert_eq!(
        said,
        "instrs[9].args and the lists before it name more entries than the file has bytes"
    );
    // Every strategy lists the whole program.
    let many: u32 = if cfg!(miri) { 200 } else { 10_000 };
    let said = broken(|p| {
        p.strategies[0].instrs = Range {
            start: 0,
            len: p.instrs.len() as u32,
        };
        p.strategies[0].inputs = Range { start: 4, len: 0 };
        p.ids.resize(2 * many as usize, NONE);
        p.strategies[0].inputs = Range {
            start: many,
            len: many,
        };
        p.strategies = vec![p.strategies[0]; many as usize];
    });
    assert!(
        said.ends_with("name more entries than the file has bytes"),
        "{said}"
    );
}

#[test]
fn scalars_are_computed_from_earlier_ones() {
    let compared = |a, b| Scalar::Compared {
        how: Comparison::Less,
        a,
        b,
        holds: true,
    };
    for (scalar, operand) in [
        (Scalar::Neg(2), 2),
        (Scalar::Add(0, 3), 3),
        (Scalar::Sub(7, 0), 7),
        (Scalar::Mul(2, 2), 2),
        (Scalar::Div(1, 4), 4),
        (Scalar::Pow(u32::MAX, 0), u32::MAX),
        (Scalar::Same(0, 5), 5),
        (Scalar::Round(2), 2),
        (compared(0, 6), 6),
        (compared(6, 0), 6),
    ] {
        assert_eq!(
            broken(|p| p.scalars[2] = scalar),
            format!("scalars[2] is computed from scalars[{operand}], expected one before it")
        );
    }
}

#[test]
fn collectives_are_complete() {
    assert_eq!(
        broken(|p| collective(p).reduce = None),
        "instrs[4].reduce is none, expected a reduction for this kind of collective"
    );
    assert_eq!(
        broken(|p| collective(p).kind = CollectiveKind::AllGather),
        "instrs[4].reduce is a reduction, expected none for this kind of collective"
    );
    assert_eq!(
        broken(|p| collective(p).root = 1),
        "instrs[4].root is 1, expected 0 or more and less than 1"
    );
    let all_to_all = |splits: &[i64]| {
        broken(|p| {
            let start = p.dims.len() as u32;
            p.dims.extend(splits);
            let range = Range {
                start,
                len: splits.len() as u32,
            };
            let c = collective(p);
            (c.kind, c.reduce, c.input_splits) = (CollectiveKind::AllToAll, None, range);
        })
    };
    assert_eq!(all_to_all(&[1, 3]), "valid");
    assert_eq!(
        all_to_all(&[1, 3, 4]),
        "instrs[4].input_splits has 3 entries, expected 2 (one per rank of an all-to-all)"
    );
    assert_eq!(
        all_to_all(&[1, -3]),
        "instrs[4].input_splits is -3, expected 0 or more and less than 9223372036854775807"
    );
    assert_eq!(
        broken(|p| {
            let ranks = p.groups[0].ranks;
            collective(p).output_splits = ranks;
        }),
        "instrs[4].output_splits has 2 entries, expected 0 (one per rank of an all-to-all)"
    );
    assert_eq!(
        broken(|p| {
            let c = collective(p);
            (c.kind, c.reduce, c.root) = (CollectiveKind::Broadcast, None, 1);
        }),
        "valid"
    );
}

#[test]
fn generator_slots_are_saved_before_they_are_restored() {
    assert_eq!(
        broken(|p| p.instrs.swap(0, 1)),
        "instrs[0].slot restores generator slot 0 before it is saved"
    );
}

#[test]
fn the_result_structure_is_read() {
    let result = |text: &str| broken(|p| p.result = text.into());
    for valid in [
        "",
        r#"{"t":0}"#,
        r#"{"c":null}"#,
        r#"{"c":-1.5e3}"#,
        r#"{"c":"\u00e9"}"#,
        r#" {"list":[{"c":true},{"f":"-inf"},{"tuple":[]}]} "#,
        r#"{"dict":[]}"#,
        r#"{"local":{"b":"x"}}"#,
        r#"{"item":{"t":0}}"#,
        r#"{"object":[{"c":"m"},{"c":"B"},{"c":null},{"dict":[[{"c":"x"},{"t":0}]]},{"dict":[]}]}"#,
        r#"{"views":[{"t":0},{"tuple":[{"t":0},{"local":{"b":"x"}},{"c":3}]}]}"#,
    ] {
        assert_eq!(result(valid), "valid", "{valid}");
    }
    let levels = if cfg!(miri) { 200 } else { 100_000 };
    let deep = r#"{"list":["#.repeat(levels);
    for (invalid, because) in [
        (
            r#"{"t":1}"#,
            "it refers to outputs[1], but outputs has 1 entries",
        ),
        (r#"{"t":-1}"#, "invalid value: integer `-1`, expected u64"),
        (r#"{"t":"0"}"#, "invalid type: string \"0\", expected u64"),
        (r#"{}"#, "a node without a key"),
        (r#"{"t":0,"c":1}"#, "a node with a second key"),
        (
            r#"{"x":0}"#,
            "expected one of the keys t, c, f, b, local, item, tuple, list, dict, object, rate, after, views",
        ),
        (
            r#"[]"#,
            "expected a node with one of the keys t, c, f, b, local, item, tuple, list, dict, object, rate, after, views",
        ),
        (
            r#"{"c":[]}"#,
            "expected null, a boolean, a number or a text",
        ),
        (r#"{"f":1.0}"#, "expected \"nan\", \"inf\" or \"-inf\""),
        (r#"{"f":"NaN"}"#, "expected \"nan\", \"inf\" or \"-inf\""),
        (r#"{"b":0}"#, "expected the path of a binding"),
        (r#"{"local":[]}"#, "expected a node with one of the keys"),
        (r#"{"views":[{"t":0},{"t":2}]}"#, "it refers to outputs[2]"),
        (r#"{"tuple":{"t":0}}"#, "expected a list of nodes"),
        (r#"{"object":{"c":"m"}}"#, "expected a list of nodes"),
        (r#"{"rate":{"c":"m"}}"#, "expected a list of nodes"),
        (r#"{"object":[{"t":1}]}"#, "it refers to outputs[1]"),
        (
            r#"{"dict":{}}"#,
            "expected a list of items, each a key and a node",
        ),
        (
            r#"{"dict":[[{"c":1}]]}"#,
            "invalid length 1, expected a key and a node",
        ),
        (r#"{"dict":[{"c":1}]}"#, "expected a key and a node"),
        (r#"{"t":0} {"t":0}"#, "trailing characters"),
        (r#"{"t":0"#, "EOF while parsing"),
        (&deep, "recursion limit exceeded"),
    ] {
        let said = result(invalid);
        assert!(
            said.starts_with("the result structure is not valid: "),
            "{invalid:.40}: {said}"
        );
        assert!(said.contains(because), "{invalid:.40}: {said}");
    }
}
